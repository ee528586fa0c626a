//! Ten clients of the search service.

use super::super::members::Members;
use anyhow::{Context, Result, ensure};
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use understudy_lab::{Namespace, in_namespace, wait_for};

/// Number of clients.
pub const CLIENTS: usize = 10;
/// Time for a connection, and for an answer.
const LIMIT: Duration = Duration::from_secs(120);

/// An answer that a client got.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Answer {
    /// Time at which it came.
    pub at: Instant,
    /// Time that it took.
    pub took: Duration,
}

/// Connection and answers that a client had.
#[derive(Clone, Debug, PartialEq)]
pub struct Served {
    /// Time that connecting took.
    pub connecting: Duration,
    /// One answer after the other.
    pub answers: Vec<Answer>,
}

/// Clients that ask, each on a thread of its own.
pub struct Clients {
    stop: Arc<AtomicBool>,
    answers: Arc<Mutex<Vec<Answer>>>,
    threads: Vec<JoinHandle<Result<Served>>>,
}

impl Clients {
    /// Starts them: they connect to the members in turn, which run, and ask until they are stopped,
    /// or so many queries each. No two ask the same: the first query is `first`.
    pub fn start(members: &Members, port: u16, first: u64, queries: Option<usize>) -> Clients {
        let stop = Arc::new(AtomicBool::new(false));
        let answers: Arc<Mutex<Vec<Answer>>> = Arc::default();
        let thread = |client: usize| {
            let client = Client {
                namespace: members.scene().lab().client(),
                server: members.server(client % members.count(), port),
                first: first + ((client as u64) << 20),
                queries: queries.unwrap_or(usize::MAX),
                stop: stop.clone(),
                answers: answers.clone(),
            };
            thread::spawn(move || client.run())
        };
        let threads = (0..CLIENTS).map(thread).collect();
        Clients { stop, answers, threads }
    }

    /// An error if one of them has ended, which none does by itself while it is to go on.
    pub fn check(&self) -> Result<()> {
        let ended = self.threads.iter().filter(|thread| thread.is_finished()).count();
        ensure!(ended == 0, "{ended} clients have ended: does the service answer?");
        Ok(())
    }

    /// The mean time of the last answers in milliseconds, once there are so many.
    pub fn last(&self, count: usize) -> Option<f64> {
        let answers = self.answers.lock().unwrap_or_else(PoisonError::into_inner);
        let last = &answers[answers.len().checked_sub(count)?..];
        let total: Duration = last.iter().map(|answer| answer.took).sum();
        Some(total.as_secs_f64() * 1e3 / count.max(1) as f64)
    }

    /// Ends them.
    pub fn stop(self) -> Result<()> {
        self.stop.store(true, Ordering::Release);
        self.finish().map(drop)
    }

    /// Waits until all have asked what they had to ask. What each had.
    pub fn finish(self) -> Result<Vec<Served>> {
        let join = |thread: JoinHandle<Result<Served>>| {
            thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        self.threads.into_iter().map(join).collect()
    }
}

struct Client {
    namespace: Namespace,
    server: SocketAddr,
    first: u64,
    queries: usize,
    stop: Arc<AtomicBool>,
    answers: Arc<Mutex<Vec<Answer>>>,
}

impl Client {
    fn run(&self) -> Result<Served> {
        let began = Instant::now();
        let mut connection = self.connect()?;
        let connecting = began.elapsed();
        let mut own = Vec::new();
        while own.len() < self.queries && !self.stop.load(Ordering::Acquire) {
            let query = self.first + own.len() as u64;
            let answer = ask(&mut connection, query)
                .with_context(|| format!("query {} of {}", own.len() + 1, self.server))?;
            own.push(answer);
            self.answers.lock().unwrap_or_else(PoisonError::into_inner).push(answer);
        }
        Ok(Served { connecting, answers: own })
    }

    /// One attempt, however long the guest takes to answer it: who gives up and tries anew leaves
    /// it the former attempts to work off first, and comes no sooner.
    fn connect(&self) -> Result<BufReader<TcpStream>> {
        let connect = || TcpStream::connect_timeout(&self.server, LIMIT);
        let stream = wait_for(&format!("{} to take a connection", self.server), LIMIT, || {
            // An error comes at once if the guest's address was not found in time.
            Ok(in_namespace(&self.namespace, connect)?.ok())
        })?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(LIMIT))?;
        Ok(BufReader::new(stream))
    }
}

fn ask(connection: &mut BufReader<TcpStream>, query: u64) -> Result<Answer> {
    let asked = Instant::now();
    connection.get_mut().write_all(format!("find {query}\n").as_bytes())?;
    let mut answer = String::new();
    connection.read_line(&mut answer)?;
    let right = answer.starts_with(&format!("found {query} "));
    ensure!(right, "the answer is {answer:?}");
    Ok(Answer { at: Instant::now(), took: asked.elapsed() })
}
