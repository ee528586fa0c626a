//! Money that guests pay to each other, over TCP and over UDP, for tests of snapshots of groups:
//! whatever is restored, no payment is lost or doubled, and the total is what it was.
//!
//! Each bank begins with [`START`] and pays small amounts to each peer, one payment under way on
//! each of its ways (peer, protocol) at any time. Payments are numbered for each way: 1, 2, 3, …
//!
//! | request                 | answer | |
//! |-------------------------|--------|-|
//! | `pay WAY NUMBER AMOUNT` | `ok NUMBER` | over TCP once; over UDP said again until it is answered |
//! | `report`                | `BALANCE PENDING MOVES BROKEN` | pending: payments that are not answered; moves: those that were; broken: what went wrong, or `-` |
//! | `pause`, `resume`       | `ok` | no new payments; payments again |
//! | `silence`               | `ok MICROSECONDS` | the longest that a payment over TCP waited for its answer since this was asked last, by this guest's clock, which stands still while the guest does |
//! | `once BURST`, `ledger` | | [`crate::once`]: payments that nobody repeats |
//!
//! `BANK_PACE_MS` in the environment: milliseconds between two payments of a way, 2 without.

use crate::once::Ledger;
use crate::server;
use std::collections::HashMap;
use std::io::{self, BufRead, BufReader, Write};
use std::net::{Ipv4Addr, TcpStream, UdpSocket};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

/// What each bank begins with.
const START: i64 = 1_000_000;
/// Milliseconds between two payments of a way, so that a guest has time for all of them.
const PACE_MS: u64 = 2;
/// Names others.
const PACE_VARIABLE: &str = "BANK_PACE_MS";
/// Room for datagrams that nobody has read yet: none is to be lost in the guest itself.
const UNREAD_BYTES: &str = "4194304";
/// Before a payment over UDP is said again.
const AGAIN: Duration = Duration::from_millis(50);
/// Between two bursts, so that a guest on a busy machine keeps up with them.
const BETWEEN_BURSTS: Duration = Duration::from_millis(30);
/// Between two looks whether to pay in bursts.
const IDLE: Duration = Duration::from_millis(50);
/// After an error, which may come at once.
const AGAIN_AT_ONCE: Duration = Duration::from_millis(2);
/// Before a peer that does not listen yet is called again.
const CALL_AGAIN: Duration = Duration::from_millis(100);

struct Bank {
    balance: i64,
    pending: u64,
    moves: u64,
    paused: bool,
    pace: Duration,
    /// The longest wait for an answer over TCP since somebody asked.
    silence: Duration,
    broken: Option<String>,
    /// The last payment of each way that came in.
    seen: HashMap<String, u64>,
    /// Payments that are sent once.
    ledger: Ledger,
}

type Shared = Arc<Mutex<Bank>>;
/// Pays over and over: the bank, what this way is called, the peer.
type Payer = fn(&Shared, &str, &str) -> io::Result<()>;

/// Pays and is paid for ever. `peers` are HOST:PORT.
pub fn run(name: &str, port: u16, peers: &[&str]) -> Result<(), String> {
    let pace = match std::env::var(PACE_VARIABLE) {
        Ok(text) => text.parse().map_err(|_| format!("{PACE_VARIABLE}: `{text}` is no number"))?,
        Err(_) => PACE_MS,
    };
    let bank: Shared = Arc::new(Mutex::new(Bank {
        balance: START,
        pending: 0,
        moves: 0,
        paused: false,
        pace: Duration::from_millis(pace),
        silence: Duration::ZERO,
        broken: None,
        seen: HashMap::new(),
        ledger: Ledger::default(),
    }));
    std::fs::write("/proc/sys/net/core/rmem_default", UNREAD_BYTES)
        .map_err(|error| format!("the sockets cannot have more room: {error}"))?;
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port))
        .map_err(|error| format!("cannot listen on port {port}: {error}"))?;
    let own = Arc::clone(&bank);
    thread::spawn(move || serve_datagrams(&own, &socket));
    for peer in peers {
        let (own, name_of_own, to) = (Arc::clone(&bank), name.to_owned(), (*peer).to_owned());
        thread::spawn(move || {
            if let Err(error) = pay_once(&own, &name_of_own, &to) {
                lock(&own).breaks(format!("once-to-{to}:{error}"));
            }
        });
        let ways: [(&str, Payer); 2] = [("tcp", pay_by_stream), ("udp", pay_by_datagram)];
        for (protocol, pay) in ways {
            let (bank, way, peer) =
                (Arc::clone(&bank), format!("{name}-{protocol}"), (*peer).to_owned());
            thread::spawn(move || {
                if let Err(error) = pay(&bank, &way, &peer) {
                    lock(&bank).breaks(format!("{way}-to-{peer}:{error}"));
                }
            });
        }
    }
    server::serve(port, move |stream| {
        server::answer_lines(stream, |request| Ok(lock(&bank).answer(request, false).into_bytes()))
    })
}

fn lock(bank: &Shared) -> MutexGuard<'_, Bank> {
    bank.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Bank {
    fn answer(&mut self, request: &str, is_datagram: bool) -> String {
        let words: Vec<&str> = request.split_whitespace().collect();
        match words.as_slice() {
            ["pay", way, number, amount] => match (number.parse(), amount.parse()) {
                (Ok(number), Ok(amount)) => self.paid(way, number, amount, is_datagram),
                _ => "error: no numbers\n".to_owned(),
            },
            ["report"] => {
                let broken = self.broken.as_deref().unwrap_or("-").replace(' ', "_");
                format!("{} {} {} {broken}\n", self.balance, self.pending, self.moves)
            }
            ["once", from, number] if is_datagram => match number.parse() {
                Ok(number) => {
                    self.ledger.take(from, number);
                    String::new()
                }
                Err(_) => "error: no number\n".to_owned(),
            },
            ["once", burst] => match burst.parse() {
                Ok(burst) => {
                    self.ledger.burst = burst;
                    "ok\n".to_owned()
                }
                Err(_) => "error: no number\n".to_owned(),
            },
            ["ledger"] => self.ledger.report(),
            ["silence"] => {
                format!("ok {}\n", std::mem::take(&mut self.silence).as_micros())
            }
            ["pause"] => self.set_paused(true),
            ["resume"] => self.set_paused(false),
            _ => format!("error: `{request}`\n"),
        }
    }

    fn set_paused(&mut self, paused: bool) -> String {
        self.paused = paused;
        "ok\n".to_owned()
    }

    fn paid(&mut self, way: &str, number: u64, amount: i64, may_repeat: bool) -> String {
        let seen = self.seen.entry(way.to_owned()).or_default();
        match number {
            next if next == *seen + 1 => {
                *seen = number;
                self.balance += amount;
            }
            // Its answer was lost, or came late.
            known if known <= *seen && may_repeat => {}
            _ => {
                let words = format!("{way} paid {number} after {seen}");
                self.breaks(words);
            }
        }
        format!("ok {number}\n")
    }

    fn breaks(&mut self, words: String) {
        self.broken.get_or_insert(words);
    }
}

/// Waits until there may be payments, and takes the next one's amount away.
fn next_payment(bank: &Shared, number: u64) -> i64 {
    loop {
        let pace = lock(bank).pace;
        thread::sleep(pace);
        let mut bank = lock(bank);
        if !bank.paused {
            let amount = 1 + (number.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 57) as i64;
            bank.balance -= amount;
            bank.pending += 1;
            return amount;
        }
    }
}

fn settle(bank: &Shared) {
    let mut bank = lock(bank);
    bank.pending -= 1;
    bank.moves += 1;
}

fn pay_by_stream(bank: &Shared, way: &str, peer: &str) -> io::Result<()> {
    let mut requests = loop {
        match TcpStream::connect(peer) {
            Ok(stream) => break stream,
            Err(_) => thread::sleep(CALL_AGAIN),
        }
    };
    requests.set_nodelay(true)?;
    let mut answers = BufReader::new(requests.try_clone()?);
    let mut answer = String::new();
    for number in 1.. {
        let amount = next_payment(bank, number);
        let asked = Instant::now();
        requests.write_all(format!("pay {way} {number} {amount}\n").as_bytes())?;
        answer.clear();
        answers.read_line(&mut answer)?;
        if answer != format!("ok {number}\n") {
            return Err(io::Error::other(format!("payment {number} was answered with {answer:?}")));
        }
        settle(bank);
        let mut bank = lock(bank);
        bank.silence = bank.silence.max(asked.elapsed());
    }
    Ok(())
}

fn pay_by_datagram(bank: &Shared, way: &str, peer: &str) -> io::Result<()> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    socket.connect(peer)?;
    socket.set_read_timeout(Some(AGAIN))?;
    let mut answer = [0; 64];
    for number in 1.. {
        let amount = next_payment(bank, number);
        let (request, ok) = (format!("pay {way} {number} {amount}"), format!("ok {number}\n"));
        loop {
            // A peer that does not listen yet refuses: it is asked again.
            let _ = socket.send(request.as_bytes());
            match socket.recv(&mut answer) {
                Ok(length) if answer[..length] == *ok.as_bytes() => break,
                // An earlier answer that came twice, or none.
                Ok(_) => {}
                Err(_) => thread::sleep(AGAIN_AT_ONCE),
            }
        }
        settle(bank);
    }
    Ok(())
}

/// Pays in bursts, as long as it is told to. Not over a connected socket: that would refuse to
/// send because of what a peer had said before.
fn pay_once(bank: &Shared, name: &str, peer: &str) -> io::Result<()> {
    let socket = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?;
    loop {
        let burst = lock(bank).ledger.burst;
        thread::sleep(if burst > 0 { BETWEEN_BURSTS } else { IDLE });
        for _ in 0..burst {
            let number = lock(bank).ledger.pay(peer);
            socket.send_to(format!("once {name} {number}\n").as_bytes(), peer)?;
        }
    }
}

fn serve_datagrams(bank: &Shared, socket: &UdpSocket) {
    let mut request = [0; 128];
    loop {
        let Ok((length, from)) = socket.recv_from(&mut request) else { continue };
        let text = String::from_utf8_lossy(&request[..length]).into_owned();
        let answer = lock(bank).answer(&text, true);
        // A lost answer is asked for again.
        if !answer.is_empty() {
            let _ = socket.send_to(answer.as_bytes(), from);
        }
    }
}
