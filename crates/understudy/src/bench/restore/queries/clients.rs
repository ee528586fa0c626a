//! Ten clients of the search service.

use super::super::members::Members;
use anyhow::{Context, Result, bail, ensure};
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use understudy_lab::{Namespace, in_namespace};

/// How many.
pub const CLIENTS: usize = 10;
/// For a connection to a guest that may not run yet: then it is tried again.
const CONNECT_LIMIT: Duration = Duration::from_millis(100);
/// For a guest to be there, and for an answer.
const LIMIT: Duration = Duration::from_secs(120);

/// An answer that a client got.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Answer {
    /// When.
    pub at: Instant,
    /// How long it took.
    pub took: Duration,
}

/// Clients that ask, each on a thread of its own.
pub struct Clients {
    stop: Arc<AtomicBool>,
    answers: Arc<Mutex<Vec<Answer>>>,
    threads: Vec<JoinHandle<Result<Vec<Answer>>>>,
}

impl Clients {
    /// They connect as soon as they can, to the members in turn, and ask until they are stopped,
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

    /// They are to end, whatever they wait for.
    pub fn give_up(&self) {
        self.stop.store(true, Ordering::Release);
    }

    /// Ends them.
    pub fn stop(self) -> Result<()> {
        self.give_up();
        self.finish().map(drop)
    }

    /// Waits until all have asked what they had to ask. The answers of each.
    pub fn finish(self) -> Result<Vec<Vec<Answer>>> {
        let join = |thread: JoinHandle<Result<Vec<Answer>>>| {
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
    fn run(&self) -> Result<Vec<Answer>> {
        let Some(mut connection) = self.connect()? else { return Ok(Vec::new()) };
        let mut own = Vec::new();
        while own.len() < self.queries && !self.stop.load(Ordering::Acquire) {
            let query = self.first + own.len() as u64;
            let answer = ask(&mut connection, query)
                .with_context(|| format!("query {} of {}", own.len() + 1, self.server))?;
            own.push(answer);
            self.answers.lock().unwrap_or_else(PoisonError::into_inner).push(answer);
        }
        Ok(own)
    }

    fn connect(&self) -> Result<Option<BufReader<TcpStream>>> {
        let began = Instant::now();
        while !self.stop.load(Ordering::Acquire) {
            let connect = || TcpStream::connect_timeout(&self.server, CONNECT_LIMIT);
            if let Ok(stream) = in_namespace(&self.namespace, connect)? {
                stream.set_nodelay(true)?;
                stream.set_read_timeout(Some(LIMIT))?;
                return Ok(Some(BufReader::new(stream)));
            }
            if began.elapsed() > LIMIT {
                bail!("{} takes no connection", self.server);
            }
            // A host that is not there refuses at once.
            thread::sleep(Duration::from_millis(2));
        }
        Ok(None)
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
