//! A client inside the guest: one connection to another guest's record server,
//! for tests and measurements of what guests say to each other.
//!
//! - `append`: asks for record 1, 2, 3, … for ever, each after the answer to the
//!   one before, and a rest; FILE always holds `SENT ANSWERED`, two numbers.
//! - `ping`: asks for SECONDS and prints `rounds N p50_us A p99_us B`, measured by
//!   this guest's clock, which stands still while the guest does.

use std::fs::File;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

/// Between a record's answer and the next request.
const REST: Duration = Duration::from_millis(25);

/// Appends records at `server` for ever, and keeps their numbers in `file`.
pub fn append(server: &str, file: &Path) -> Result<(), String> {
    let mut line = Line::connect(server)?;
    let file = File::create(file).map_err(|error| format!("{}: {error}", file.display()))?;
    let note = |sent: u64, answered: u64| {
        let text = format!("{sent:20} {answered:20}\n");
        file.write_all_at(text.as_bytes(), 0).map_err(|error| error.to_string())
    };
    for number in 1.. {
        note(number, number - 1)?;
        let request = format!("append {number} {}\n", payload(number));
        line.ask(&request, &format!("ok {number}\n"))?;
        note(number, number)?;
        thread::sleep(REST);
    }
    Ok(())
}

/// The payload that the laboratory gives record `number`, and looks for on the
/// disk: 48 hexadecimal digits from the SplitMix64 generator.
fn payload(number: u64) -> String {
    let digits = |lane: u64| {
        let seed = number.wrapping_mul(3).wrapping_add(lane);
        let mut value = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
        value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        format!("{:016x}", value ^ (value >> 31))
    };
    (0..3).map(digits).collect()
}

/// Pings `server` for so many seconds and prints how long the round trips took.
pub fn ping(server: &str, seconds: u64) -> Result<(), String> {
    let mut line = Line::connect(server)?;
    let mut times = Vec::new();
    let begun = Instant::now();
    while begun.elapsed() < Duration::from_secs(seconds) {
        let (round, asked) = (times.len(), Instant::now());
        line.ask(&format!("ping {round}\n"), &format!("pong {round}\n"))?;
        times.push(asked.elapsed());
    }
    times.sort();
    let (p50, p99) = (micros(&times, 50), micros(&times, 99));
    println!("rounds {} p50_us {p50} p99_us {p99}", times.len());
    Ok(())
}

/// The smallest of the sorted times that so many percent do not exceed.
fn micros(times: &[Duration], percent: usize) -> u128 {
    let rank = (times.len() * percent).div_ceil(100).max(1);
    times.get(rank - 1).map_or(0, Duration::as_micros)
}

struct Line {
    requests: TcpStream,
    answers: BufReader<TcpStream>,
    answer: String,
}

impl Line {
    fn connect(server: &str) -> Result<Line, String> {
        let connect = || {
            let requests = TcpStream::connect(server)?;
            requests.set_nodelay(true)?;
            let answers = BufReader::new(requests.try_clone()?);
            std::io::Result::Ok(Line { requests, answers, answer: String::new() })
        };
        connect().map_err(|error| format!("cannot connect to {server}: {error}"))
    }

    fn ask(&mut self, request: &str, expected: &str) -> Result<(), String> {
        self.answer.clear();
        let asked = self.requests.write_all(request.as_bytes());
        asked
            .and_then(|()| self.answers.read_line(&mut self.answer))
            .map_err(|error| format!("the connection broke: {error}"))?;
        if self.answer == expected {
            return Ok(());
        }
        Err(format!("expected `{}`, got `{}`", expected.trim_end(), self.answer.trim_end()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    #[test]
    fn it_asks_and_takes_no_wrong_answer() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let server = listener.local_addr().unwrap().to_string();
        let guest = std::thread::spawn(move || {
            let (stream, _) = listener.accept().unwrap();
            crate::server::answer_lines(stream, |request| {
                let answer = if request == "ping 3" { "pong 4" } else { request };
                Ok(format!("{}\n", answer.replace("ping", "pong")).into_bytes())
            })
        });
        let error = ping(&server, 10).unwrap_err();
        assert!(error.contains("expected `pong 3`, got `pong 4`"), "{error}");
        guest.join().unwrap().unwrap();
    }

    #[test]
    fn percentiles() {
        let times: Vec<Duration> = (1..=200).map(Duration::from_micros).collect();
        assert_eq!((micros(&times, 50), micros(&times, 99), micros(&[], 50)), (100, 198, 0));
    }
}
