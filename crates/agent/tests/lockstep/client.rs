//! A client of the guest on one TCP connection, which must survive everything.

use crate::DEADLINE;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

const RECORDS: ([u8; 4], u16) = ([10, 9, 0, 2], 7000);
const RUN: ([u8; 4], u16) = ([10, 9, 0, 2], 7001);

pub struct Client {
    shared: Arc<Shared>,
    thread: JoinHandle<Vec<Duration>>,
}

#[derive(Default)]
struct Shared {
    answers: AtomicUsize,
    stop: AtomicBool,
}

impl Client {
    /// Appends and asks in turn; every answer is checked.
    pub fn start() -> Client {
        let connection = TcpStream::connect(SocketAddr::from(RECORDS)).unwrap();
        connection.set_read_timeout(Some(DEADLINE)).unwrap();
        connection.set_nodelay(true).unwrap();
        let shared = Arc::new(Shared::default());
        let of_thread = shared.clone();
        let thread = thread::spawn(move || talk(connection, &of_thread));
        Client { shared, thread }
    }

    pub fn answers(&self) -> usize {
        assert!(!self.thread.is_finished(), "the connection broke");
        self.shared.answers.load(Ordering::Relaxed)
    }

    pub fn end(self) -> String {
        self.shared.stop.store(true, Ordering::Relaxed);
        let mut times = self.thread.join().expect("every answer was right");
        times.sort_unstable();
        let at = |part: usize| times[(times.len() - 1) * part / 100];
        format!(
            "{} answers, p50 {:.1?}, p99 {:.1?}, longest {:.1?}",
            times.len(),
            at(50),
            at(99),
            at(100)
        )
    }
}

fn talk(connection: TcpStream, shared: &Shared) -> Vec<Duration> {
    let mut answers = BufReader::new(connection.try_clone().unwrap());
    let mut connection = connection;
    let mut times = Vec::new();
    for n in 1.. {
        if shared.stop.load(Ordering::Relaxed) {
            break;
        }
        let (request, expected) = match n % 10 {
            0 => (format!("append {n} record\n"), format!("ok {n}\n")),
            _ => (format!("ping {n}\n"), format!("pong {n}\n")),
        };
        let asked = Instant::now();
        connection.write_all(request.as_bytes()).unwrap();
        let mut answer = String::new();
        answers.read_line(&mut answer).unwrap();
        assert_eq!(answer, expected);
        times.push(asked.elapsed());
        shared.answers.fetch_add(1, Ordering::Relaxed);
        thread::sleep(Duration::from_millis(5));
    }
    times
}

/// Starts a shell line in the guest.
pub fn run_in_guest(line: &str) {
    let mut connection = TcpStream::connect(SocketAddr::from(RUN)).unwrap();
    connection.write_all(format!("{line}\n").as_bytes()).unwrap();
    let mut answer = [0; 7];
    connection.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"started");
}
