//! Connections over the network that end when nobody asks anything on them.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep};

/// The time for which a connection may be without a request.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// Time from its beginning, or the last answer, until the next request's head is whole; and for
    /// the other end to take more of an answer.
    pub idle: Duration,
    /// Time from the first byte of that head.
    pub head: Duration,
}

impl Default for Patience {
    fn default() -> Patience {
        Patience { idle: Duration::from_secs(60), head: Duration::from_secs(10) }
    }
}

/// A connection that fails once it has been without a request for too long. Single bytes do not count for anything, and an
/// answer that is being made is waited for: one may take minutes.
pub struct Patient<S> {
    stream: S,
    patience: Patience,
    /// Alarm at which it fails, unless a request is being answered then.
    alarm: Pin<Box<Sleep>>,
    /// Alarm at which it fails if the other end takes nothing until then; none while it does.
    stuck: Option<Pin<Box<Sleep>>>,
    /// Whether some of the next request has come.
    has_begun: bool,
    requests: Requests,
    /// Number of requests that had been answered when the alarm was set.
    answered: usize,
}

/// The requests of a connection.
#[derive(Clone, Debug, Default)]
pub struct Requests(Arc<Counts>);

#[derive(Debug, Default)]
struct Counts {
    /// Number of those that are being answered.
    going: AtomicUsize,
    /// Number of those that were.
    answered: AtomicUsize,
}

/// A request that is being answered, until this is dropped.
pub struct Answering(Requests);

impl Requests {
    /// Begins to count one that is being answered from now on.
    pub fn begin(&self) -> Answering {
        self.0.going.fetch_add(1, Ordering::AcqRel);
        Answering(self.clone())
    }

    fn are_going(&self) -> bool {
        self.0.going.load(Ordering::Acquire) > 0
    }

    fn answered(&self) -> usize {
        self.0.answered.load(Ordering::Acquire)
    }
}

impl Drop for Answering {
    fn drop(&mut self) {
        // First: whoever sees that none is going sees that one was answered.
        self.0.0.answered.fetch_add(1, Ordering::AcqRel);
        self.0.0.going.fetch_sub(1, Ordering::AcqRel);
    }
}

impl<S> Patient<S> {
    /// Waits for so long, from now on.
    pub(super) fn new(stream: S, patience: Patience, requests: Requests) -> Patient<S> {
        let alarm = Box::pin(sleep(patience.idle));
        Patient { stream, patience, alarm, stuck: None, has_begun: false, requests, answered: 0 }
    }

    /// Notices an answer, after which all begins anew.
    fn notice_answers(&mut self) {
        let answered = self.requests.answered();
        if self.answered != answered {
            (self.answered, self.has_begun) = (answered, false);
            self.fail_in(self.patience.idle);
        }
    }

    /// Notices that some of a request has come.
    fn notice_beginning(&mut self) {
        if self.has_begun || self.requests.are_going() {
            return;
        }
        self.has_begun = true;
        let left = self.alarm.deadline().saturating_duration_since(Instant::now());
        self.fail_in(left.min(self.patience.head));
    }

    fn fail_in(&mut self, time: Duration) {
        self.alarm.as_mut().reset(Instant::now() + time);
    }

    /// Waits where the other end makes nothing go on, and fails in time.
    fn wait<T>(&mut self, context: &mut Context<'_>) -> Poll<io::Result<T>> {
        loop {
            self.notice_answers();
            ready!(self.alarm.as_mut().poll(context));
            if self.requests.are_going() {
                self.fail_in(self.patience.idle);
            } else if self.requests.answered() == self.answered {
                return Poll::Ready(Err(io::ErrorKind::TimedOut.into()));
            }
        }
    }

    /// The result of writing, unless the other end takes nothing for too long.
    fn sent<T>(
        &mut self,
        context: &mut Context<'_>,
        polled: Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if polled.is_ready() {
            self.stuck = None;
            return polled;
        }
        // Whoever takes an answer byte by byte has as long for all of it.
        if let Poll::Ready(over) = self.wait(context) {
            return Poll::Ready(over);
        }
        let idle = self.patience.idle;
        ready!(self.stuck.get_or_insert_with(|| Box::pin(sleep(idle))).as_mut().poll(context));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Patient<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        self.notice_answers();
        let before = buffer.filled().len();
        let polled = Pin::new(&mut self.stream).poll_read(context, buffer);
        if polled.is_pending() {
            return self.wait(context);
        }
        if buffer.filled().len() > before {
            self.notice_beginning();
        }
        polled
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Patient<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let polled = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.sent(context, polled)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.stream).poll_flush(context);
        self.sent(context, polled)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = Pin::new(&mut self.stream).poll_shutdown(context);
        self.sent(context, polled)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::poll_fn;
    use tokio::io::{AsyncWriteExt, DuplexStream, duplex};
    use tokio::time::timeout;

    const SHORT: Duration = Duration::from_millis(50);
    const PATIENCE: Patience = Patience { idle: SHORT, head: SHORT };

    /// A connection, and its other end.
    fn pair(requests: &Requests, patience: Patience) -> (Patient<DuplexStream>, DuplexStream) {
        let (stream, other) = duplex(4);
        (Patient::new(stream, patience, requests.clone()), other)
    }

    async fn read(stream: &mut Patient<DuplexStream>) -> io::Result<usize> {
        let mut bytes = [0; 64];
        let mut buffer = ReadBuf::new(&mut bytes);
        poll_fn(|context| Pin::new(&mut *stream).poll_read(context, &mut buffer)).await?;
        Ok(buffer.filled().len())
    }

    fn is_over<T>(result: io::Result<T>) -> bool {
        matches!(result, Err(error) if error.kind() == io::ErrorKind::TimedOut)
    }

    #[tokio::test]
    async fn a_connection_on_which_nothing_happens_ends() {
        let (mut stream, _other) = pair(&Requests::default(), PATIENCE);
        assert!(is_over(read(&mut stream).await));
    }

    #[tokio::test]
    async fn one_on_which_a_request_is_never_whole_ends() {
        for (idle, head) in [(SHORT, SHORT * 10_000), (SHORT * 10_000, SHORT)] {
            let (mut stream, mut other) = pair(&Requests::default(), Patience { idle, head });
            let dripping = async {
                while other.write_all(b"x").await.is_ok() {
                    sleep(SHORT / 10).await;
                }
            };
            let reading = async {
                loop {
                    if let Err(error) = read(&mut stream).await {
                        return error;
                    }
                }
            };
            tokio::select! {
                error = reading => assert_eq!(error.kind(), io::ErrorKind::TimedOut),
                () = dripping => panic!("nobody ended it"),
            }
        }
    }

    #[tokio::test]
    async fn one_whose_request_is_being_answered_does_not() {
        let requests = Requests::default();
        let (mut stream, _other) = pair(&requests, PATIENCE);
        let answering = requests.begin();
        let waits = timeout(SHORT * 4, read(&mut stream)).await;
        assert!(waits.is_err(), "{waits:?}");
        drop(answering);
        let ended = Instant::now();
        assert!(is_over(read(&mut stream).await));
        assert!(ended.elapsed() >= SHORT, "after an answer there is time for the next request");
    }

    #[tokio::test]
    async fn one_whose_answer_nobody_takes_ends() {
        for is_answered in [false, true] {
            let requests = Requests::default();
            let (mut stream, _other) = pair(&requests, PATIENCE);
            // As an answer that is a stream.
            let _answering = (!is_answered).then(|| requests.begin());
            assert!(is_over(stream.write_all(b"more than it holds").await), "{is_answered}");
        }
    }
}
