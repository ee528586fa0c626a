//! Connections over the network that end when nobody does anything with them.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep};

/// A connection that fails once neither side has said anything for a while, and no request is
/// being answered: one may take minutes.
pub(super) struct Patient<S> {
    stream: S,
    patience: Duration,
    alarm: Pin<Box<Sleep>>,
    requests: Requests,
}

/// How many requests of a connection are being answered.
#[derive(Clone, Debug, Default)]
pub struct Requests(Arc<AtomicUsize>);

/// One of them, until it is dropped.
pub(super) struct Answering(Requests);

impl Requests {
    /// One is being answered from now on.
    pub(super) fn begin(&self) -> Answering {
        self.0.fetch_add(1, Ordering::AcqRel);
        Answering(self.clone())
    }

    fn are_any(&self) -> bool {
        self.0.load(Ordering::Acquire) > 0
    }
}

impl Drop for Answering {
    fn drop(&mut self) {
        self.0.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl<S> Patient<S> {
    /// Waits for so long, from now on.
    pub(super) fn new(stream: S, patience: Duration, requests: Requests) -> Patient<S> {
        Patient { stream, patience, alarm: Box::pin(sleep(patience)), requests }
    }

    fn begin_anew(&mut self) {
        let end = Instant::now() + self.patience;
        self.alarm.as_mut().reset(end);
    }

    /// What to say where nothing could be read or written.
    fn wait<T>(&mut self, context: &mut Context<'_>) -> Poll<io::Result<T>> {
        loop {
            ready!(self.alarm.as_mut().poll(context));
            if !self.requests.are_any() {
                return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
            }
            self.begin_anew();
        }
    }

    fn seen<T>(
        &mut self,
        context: &mut Context<'_>,
        polled: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if polled.is_pending() {
            return self.wait(context);
        }
        self.begin_anew();
        polled
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Patient<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.stream).poll_read(context, buffer);
        self.seen(context, polled)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Patient<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.seen(context, polled)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.stream).poll_flush(context);
        if polled.is_pending() { self.wait(context) } else { polled }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.stream).poll_shutdown(context);
        if polled.is_pending() { self.wait(context) } else { polled }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::poll_fn;
    use std::io::Write;
    use std::net::TcpStream as Other;
    use tokio::net::{TcpListener, TcpStream};

    const SHORT: Duration = Duration::from_millis(50);

    /// A connection on which the other end has said this, if anything.
    async fn pair(requests: &Requests, said: &[u8]) -> (Patient<TcpStream>, Other) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let mut other = Other::connect(listener.local_addr().unwrap()).unwrap();
        let (stream, _) = listener.accept().await.unwrap();
        if !said.is_empty() {
            other.write_all(said).unwrap();
            // Known to be there before the patience begins, which is short.
            stream.readable().await.unwrap();
        }
        (Patient::new(stream, SHORT, requests.clone()), other)
    }

    async fn read(stream: &mut Patient<TcpStream>) -> io::Result<usize> {
        let mut bytes = [0; 64];
        let mut buffer = ReadBuf::new(&mut bytes);
        poll_fn(|context| Pin::new(&mut *stream).poll_read(context, &mut buffer)).await?;
        Ok(buffer.filled().len())
    }

    #[tokio::test]
    async fn a_connection_on_which_nothing_happens_ends() {
        let (mut stream, _other) = pair(&Requests::default(), b"GET").await;
        assert_eq!(read(&mut stream).await.unwrap(), 3);
        let error = read(&mut stream).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }

    #[tokio::test]
    async fn one_whose_request_is_being_answered_does_not() {
        let requests = Requests::default();
        let (mut stream, mut other) = pair(&requests, b"").await;
        let answering = requests.begin();
        let waits = tokio::time::timeout(SHORT * 4, read(&mut stream)).await;
        assert!(waits.is_err(), "{waits:?}");
        drop(answering);
        assert_eq!(read(&mut stream).await.unwrap_err().kind(), io::ErrorKind::TimedOut);
        other.write_all(b"late").unwrap();
    }
}
