//! End of the wait for a daemon that is to do something, and hangs.

use super::Client;
use crate::failure::Failure;
use hyper::Method;
use hyper::body::Bytes;
use std::future::pending;
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout};

/// Time between two questions: an answer costs little.
const PAUSE: Duration = Duration::from_secs(1);

/// Question that a daemon must go on to answer while it does what it is told.
#[derive(Debug)]
pub struct Hearing {
    /// Path of it.
    pub question: String,
    /// The longest without an answer.
    pub longest: Duration,
}

impl Client {
    /// Waits until what the daemon is told is to be waited for no more; for ever if nothing was said about that.
    pub(super) async fn given_up(&self) -> Failure {
        tokio::select! {
            failure = self.bound_reached() => failure,
            failure = self.silence() => failure,
        }
    }

    async fn bound_reached(&self) -> Failure {
        let Some(bound) = self.bound else { return pending().await };
        sleep(bound).await;
        self.hangs(bound)
    }

    /// Waits until it has answered nothing for too long.
    async fn silence(&self) -> Failure {
        let Some(Hearing { question, longest }) = &self.hearing else { return pending().await };
        let mut heard = Instant::now();
        loop {
            let left = longest.saturating_sub(heard.elapsed());
            if left.is_zero() {
                return self.hangs(*longest);
            }
            // One question at a time: one that hangs is not to be out of room for connections. Any answer shows that
            // it lives, be it that there is no such VM.
            let asked = timeout(left, self.exchange(Method::GET, question, Bytes::new())).await;
            // Else there was no answer, or no connection.
            if let Ok(Ok(_)) = asked {
                heard = Instant::now();
            }
            sleep(PAUSE.min(*longest / 4)).await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::failure::FailureKind;
    use std::io::{BufRead, BufReader, Write};
    use std::os::unix::net::{UnixListener, UnixStream};
    use std::thread;

    const MOMENT: Duration = Duration::from_secs(2);

    /// Answers questions at once, and what it is told to do after a while.
    fn serve(mut stream: UnixStream) {
        let mut request = BufReader::new(stream.try_clone().unwrap()).lines();
        if !request.next().unwrap().unwrap().starts_with("GET ") {
            thread::sleep(MOMENT + MOMENT / 4);
        }
        let _headers = request.find(|line| line.as_ref().is_ok_and(String::is_empty));
        // Who has given up does not hear it.
        let _ = stream.write_all(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n");
    }

    #[test]
    fn what_takes_long_is_waited_for_as_long_as_questions_are_answered() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("api.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let order = || {
            let client = Client::new(&socket).unwrap().while_heard("db", MOMENT);
            client.failover("db").unwrap_err()
        };
        let silent = order();
        assert_eq!(silent.kind, FailureKind::DaemonSilent, "nobody takes connections: {silent:?}");
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                thread::spawn(|| serve(stream));
            }
        });
        let answered = order();
        assert!(answered.message.contains("404"), "its own answer: {answered:?}");
    }
}
