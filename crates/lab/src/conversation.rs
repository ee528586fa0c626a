//! One TCP connection on which a thread asks and verifies every byte of every
//! answer, never reconnecting: what all the laboratory's clients have in common.

use crate::lab::Lab;
use crate::namespace::in_namespace;
use crate::wait::connect_patiently;
use anyhow::{Context, Result};
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Time for the guest to accept a connection.
const CONNECT_LIMIT: Duration = Duration::from_secs(120);
/// Time after which a waiting thread looks again whether it is to stop.
const STOP_INTERVAL: Duration = Duration::from_millis(50);
/// Time for the answer to the last request, once stopping was asked for.
const LAST_ANSWER_LIMIT: Duration = Duration::from_secs(60);

/// Reason why a conversation ended before it was stopped.
#[derive(Debug, thiserror::Error)]
pub enum ConversationError {
    /// The connection broke.
    #[error("the connection broke in round {round}: {source}")]
    Broken {
        /// The request that was under way, counted from 1.
        round: u64,
        /// The system's error; `UnexpectedEof` if the guest closed it.
        source: io::Error,
    },
    /// The guest answered something else than it should have.
    #[error("wrong answer in round {round}: expected `{expected}`, got `{got}`")]
    WrongAnswer {
        /// The request that was under way, counted from 1.
        round: u64,
        /// The beginning of the right answer.
        expected: String,
        /// The beginning of the wrong one.
        got: String,
    },
    /// The client was ended at once.
    #[error("the client was ended in round {round}, without an answer")]
    Abandoned {
        /// The request that was under way, counted from 1.
        round: u64,
    },
    /// The last request was not answered before the client gave up.
    #[error("no answer in round {round} for {LAST_ANSWER_LIMIT:?} after the client was stopped")]
    Silent {
        /// The request that was under way, counted from 1.
        round: u64,
    },
}

/// A request and the only answer that is right.
pub(crate) struct Exchange {
    pub(crate) request: Vec<u8>,
    pub(crate) answer: Vec<u8>,
}

/// Transcript of what happened on one connection.
pub(crate) struct Transcript {
    /// Times at which each round's answer was complete; round 1 is the first.
    pub(crate) answers: Vec<Instant>,
    /// Time at which the first request was sent.
    pub(crate) begun: Instant,
    /// Time at which the conversation was over.
    pub(crate) ended: Instant,
    pub(crate) error: Option<ConversationError>,
}

impl Transcript {
    /// The longest time without an answer.
    pub(crate) fn longest_silence(&self) -> Duration {
        self.silences().map(|(_, length)| length).max().unwrap_or_default()
    }

    /// Every silence: when it was over, and how long it was. The last one ends
    /// with the conversation.
    pub(crate) fn silences(&self) -> impl Iterator<Item = (Instant, Duration)> + '_ {
        let starts = std::iter::once(self.begun).chain(self.answers.iter().copied());
        let ends = self.answers.iter().copied().chain([self.ended]);
        starts.zip(ends).map(|(start, end)| (end, end - start))
    }

    /// The longest silence that ended after `failed_at` and not after `until`; none
    /// if no answer came in that time.
    pub(crate) fn outage(&self, failed_at: Instant, until: Instant) -> Option<Duration> {
        let window = |at: Instant| failed_at < at && at <= until;
        self.answers.iter().find(|&&at| window(at))?;
        let within = self.silences().filter(|&(end, _)| window(end));
        within.map(|(_, length)| length).max()
    }
}

/// A conversation under way on its own thread.
pub(crate) struct Conversation {
    shared: Arc<Shared>,
    thread: JoinHandle<Transcript>,
}

#[derive(Default)]
struct Shared {
    stop: AtomicBool,
    abandoned: AtomicBool,
    rounds: AtomicU64,
    failed: AtomicBool,
}

impl Conversation {
    /// Goes through `exchange(1)`, `exchange(2)`, … on `connection`, each after
    /// the answer to the one before, at least `pace` apart.
    pub(crate) fn start(
        connection: TcpStream,
        pace: Duration,
        exchange: impl Fn(u64) -> Exchange + Send + 'static,
    ) -> Conversation {
        let shared = Arc::new(Shared::default());
        let thread = std::thread::spawn({
            let shared = Arc::clone(&shared);
            move || {
                let transcript = converse(Line { connection, shared: &shared }, pace, exchange);
                shared.failed.store(transcript.error.is_some(), Ordering::Release);
                transcript
            }
        });
        Conversation { shared, thread }
    }

    /// Rounds answered until now.
    pub(crate) fn rounds(&self) -> u64 {
        self.shared.rounds.load(Ordering::Acquire)
    }

    /// Whether it has ended in an error.
    pub(crate) fn failed(&self) -> bool {
        self.shared.failed.load(Ordering::Acquire)
    }

    /// Asks the thread to end after the answer that it waits for.
    pub(crate) fn ask_to_stop(&self) {
        self.shared.stop.store(true, Ordering::Release);
        self.thread.thread().unpark();
    }

    /// Ends the conversation with a guest that is no more, which will not answer.
    pub(crate) fn abandon(self) -> Transcript {
        self.shared.abandoned.store(true, Ordering::Release);
        self.stop()
    }

    /// Ends the conversation and returns what happened.
    pub(crate) fn stop(self) -> Transcript {
        self.ask_to_stop();
        self.thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

/// Connects from the client's namespace.
pub(crate) fn connect(lab: &Lab, guest: SocketAddr) -> Result<TcpStream> {
    let connection = in_namespace(&lab.client(), || {
        let connection = connect_patiently(guest, CONNECT_LIMIT)?;
        connection.set_nodelay(true)?;
        connection.set_read_timeout(Some(STOP_INTERVAL))?;
        connection.set_write_timeout(Some(STOP_INTERVAL))?;
        anyhow::Ok(connection)
    })?;
    connection.with_context(|| format!("cannot connect to the guest at {guest}"))
}

fn converse(mut line: Line<'_>, pace: Duration, exchange: impl Fn(u64) -> Exchange) -> Transcript {
    let begun = Instant::now();
    let mut answers = Vec::new();
    let mut error = None;
    for round in 1.. {
        let asked = Instant::now();
        if let Err(failure) = line.ask(round, &exchange(round)) {
            error = Some(failure);
            break;
        }
        answers.push(Instant::now());
        line.shared.rounds.store(round, Ordering::Release);
        line.rest_until(asked + pace);
        if line.is_stopping() {
            break;
        }
    }
    Transcript { answers, begun, ended: Instant::now(), error }
}

/// The thread's side of the connection.
struct Line<'a> {
    connection: TcpStream,
    shared: &'a Shared,
}

impl Line<'_> {
    fn is_stopping(&self) -> bool {
        self.shared.stop.load(Ordering::Acquire)
    }

    fn rest_until(&self, instant: Instant) {
        while !self.is_stopping() {
            let left = instant.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            std::thread::park_timeout(left);
        }
    }

    fn ask(&mut self, round: u64, exchange: &Exchange) -> Result<(), ConversationError> {
        let mut patience = Patience { round, until: None };
        let mut sent = 0;
        while sent < exchange.request.len() {
            let result = (&self.connection).write(&exchange.request[sent..]);
            sent += self.progress(result, &mut patience)?;
        }
        let mut got = vec![0; exchange.answer.len()];
        let mut length = 0;
        while length < got.len() {
            let result = (&self.connection).read(&mut got[length..]);
            length += self.progress(result, &mut patience)?;
            // A wrong answer may be shorter than the right one: look at once.
            if got[..length] != exchange.answer[..length] {
                let (expected, got) = (excerpt(&exchange.answer), excerpt(&got[..length]));
                return Err(ConversationError::WrongAnswer { round, expected, got });
            }
        }
        Ok(())
    }

    /// Number of bytes that went through; 0 after a time-out, which is no error
    /// unless the client has been waiting for its end for too long.
    fn progress(
        &self,
        result: io::Result<usize>,
        patience: &mut Patience,
    ) -> Result<usize, ConversationError> {
        let round = patience.round;
        match result {
            Ok(0) => {
                let source = ErrorKind::UnexpectedEof.into();
                Err(ConversationError::Broken { round, source })
            }
            Ok(count) => Ok(count),
            Err(error) => match error.kind() {
                ErrorKind::Interrupted => Ok(0),
                ErrorKind::WouldBlock | ErrorKind::TimedOut if would_block(&error) => {
                    if self.shared.abandoned.load(Ordering::Acquire) {
                        return Err(ConversationError::Abandoned { round });
                    }
                    patience.check(self.is_stopping()).map(|()| 0)
                }
                _ => Err(ConversationError::Broken { round, source: error }),
            },
        }
    }
}

/// A socket's own time-out is EAGAIN; ETIMEDOUT is TCP giving the peer up.
fn would_block(error: &io::Error) -> bool {
    error.raw_os_error() == Some(nix::errno::Errno::EAGAIN as i32)
}

/// The limit on the last answer, which begins when the client is stopped.
struct Patience {
    round: u64,
    until: Option<Instant>,
}

impl Patience {
    fn check(&mut self, stopping: bool) -> Result<(), ConversationError> {
        if !stopping {
            return Ok(());
        }
        let now = Instant::now();
        if now >= *self.until.get_or_insert(now + LAST_ANSWER_LIMIT) {
            return Err(ConversationError::Silent { round: self.round });
        }
        Ok(())
    }
}

fn excerpt(bytes: &[u8]) -> String {
    bytes[..bytes.len().min(60)].escape_ascii().to_string()
}
