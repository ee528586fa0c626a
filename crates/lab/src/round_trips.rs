//! Request and response with the guest's echo server, one after the other.

use crate::lab::Lab;
use crate::namespace::in_namespace;
use crate::records::mix;
use crate::wait::connect_patiently;
use anyhow::{Context, Result, ensure};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

/// Time for the connection, and for one answer.
const ANSWER_LIMIT: Duration = Duration::from_secs(120);
/// Fits one frame.
const REQUEST_BYTES: usize = 64;
const DICE: u64 = 1 << 16;

/// Times that each of `count` requests was under way until its answer was there, from the
/// laboratory's client to an echo server and back.
///
/// The client thinks between two requests, on average for `pause`. It draws how long,
/// always the same numbers: a client that asks right after an answer would fall into
/// step with the checkpoint that released the answer.
pub fn round_trips(
    lab: &Lab,
    server: SocketAddr,
    count: u64,
    pause: Duration,
) -> Result<Vec<Duration>> {
    let all: Result<Vec<Duration>> = in_namespace(&lab.client(), || {
        let mut connection = connect_patiently(server, ANSWER_LIMIT)?;
        connection.set_nodelay(true)?;
        connection.set_read_timeout(Some(ANSWER_LIMIT))?;
        (1..=count).map(|round| ask(&mut connection, round, pause)).collect()
    })?;
    all.with_context(|| format!("the echo server at {server}"))
}

fn ask(connection: &mut TcpStream, round: u64, pause: Duration) -> Result<Duration> {
    let dice = mix(round) % DICE;
    thread::sleep(pause.mul_f64(2.0 * dice as f64 / DICE as f64));
    let request = request(round);
    let mut answer = [0; REQUEST_BYTES];
    let asked = Instant::now();
    connection.write_all(&request)?;
    connection.read_exact(&mut answer)?;
    let took = asked.elapsed();
    ensure!(answer == request, "a wrong answer in round {round}");
    Ok(took)
}

/// No two rounds ask the same.
fn request(round: u64) -> [u8; REQUEST_BYTES] {
    let mut bytes = [0; REQUEST_BYTES];
    bytes.iter_mut().zip(0..).for_each(|(byte, place)| *byte = mix(round << 8 | place) as u8);
    bytes
}
