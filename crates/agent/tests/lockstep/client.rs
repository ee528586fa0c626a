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
const ECHO: ([u8; 4], u16) = ([10, 9, 0, 2], 7002);

/// Bytes that go to the guest and come back at once; more than a window of TCP's.
const BULK_BYTES: usize = 256 << 10;

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
        let connection = connect(RECORDS);
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

/// A client that sends much and gets it back, again and again; every byte is checked.
pub struct Bulk {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<u64>,
}

impl Bulk {
    /// Starts a bulk with so much time between two rounds.
    pub fn start(between: Duration) -> Bulk {
        let connection = connect(ECHO);
        connection.set_read_timeout(Some(DEADLINE)).unwrap();
        let stop = Arc::new(AtomicBool::new(false));
        let of_thread = stop.clone();
        Bulk {
            stop,
            thread: thread::spawn(move || send_and_compare(&connection, between, &of_thread)),
        }
    }

    /// Ends it; returns the bytes that went each way.
    pub fn end(self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("everything came back as it was sent")
    }
}

fn send_and_compare(connection: &TcpStream, between: Duration, stop: &AtomicBool) -> u64 {
    let mut bytes = 0;
    for round in 0_u64.. {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let noise = |n: usize| (n as u64).wrapping_add(round).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let sent: Vec<u8> = (0..BULK_BYTES).map(|n| (noise(n) >> 56) as u8).collect();
        let mut back = vec![0; BULK_BYTES];
        // Both at once: neither side's buffers hold all of it.
        thread::scope(|scope| {
            scope.spawn(|| (&*connection).write_all(&sent).unwrap());
            (&*connection).read_exact(&mut back).unwrap();
        });
        assert!(sent == back, "what came back differs");
        bytes += BULK_BYTES as u64;
        thread::sleep(between);
    }
    bytes
}

/// Connects to a server of the guest, which a busy machine may keep from answering for seconds.
fn connect(server: ([u8; 4], u16)) -> TcpStream {
    let deadline = Instant::now() + DEADLINE;
    loop {
        match TcpStream::connect(SocketAddr::from(server)) {
            Ok(connection) => return connection,
            Err(error) => assert!(Instant::now() < deadline, "{server:?}: {error}"),
        }
        thread::sleep(Duration::from_millis(100));
    }
}

/// Starts a shell line in the guest.
pub fn run_in_guest(line: &str) {
    let mut connection = connect(RUN);
    connection.write_all(format!("{line}\n").as_bytes()).unwrap();
    let mut answer = [0; 7];
    connection.read_exact(&mut answer).unwrap();
    assert_eq!(&answer, b"started");
}
