//! Bulk transfers over the card's fast path: long TCP segments, both ways at once.

use crate::stage::{LIMIT, options, play_protected, prove_survival};
use anyhow::{Context, Result, ensure};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use std::fs;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use understudy_lab::scene::{ECHO_PORT, VM};
use understudy_lab::{Scene, in_namespace, wait_for};

/// What is sent to the guest, and comes back from it.
const BYTES: usize = 32 << 20;
/// The longest frame that is none of those which a fast path carries.
const ORDINARY_FRAME: u64 = 1514;
const SEED: u64 = 4;

#[test]
fn a_bulk_transfer_both_ways_survives_a_kill_on_long_segments() {
    play_protected(options(), |scene, client| {
        let to = scene.guest(ECHO_PORT);
        let connection =
            in_namespace(&scene.lab().client(), || TcpStream::connect_timeout(&to, LIMIT))??;
        connection.set_read_timeout(Some(LIMIT))?;
        connection.set_write_timeout(Some(LIMIT))?;
        let returned = AtomicUsize::new(0);
        thread::scope(|scope| {
            let sender = scope.spawn(|| send(&connection));
            let receiver = scope.spawn(|| compare(&connection, &returned));
            await_returned(&returned, BYTES / 4)?;
            long_frames_pass(scene, "a")?;
            scene.host_mut("a")?.kill_everything()?;
            let join = |panic| std::panic::resume_unwind(panic);
            sender.join().unwrap_or_else(join)?;
            receiver.join().unwrap_or_else(join)
        })?;
        long_frames_pass(scene, "b")?;
        prove_survival(scene, client, "b")
    });
}

fn send(mut connection: &TcpStream) -> Result<()> {
    let mut bytes = vec![0; BYTES];
    ChaCha8Rng::seed_from_u64(SEED).fill_bytes(&mut bytes);
    connection.write_all(&bytes).context("cannot send to the guest")
}

/// Every byte must come back as it was sent.
fn compare(mut connection: &TcpStream, returned: &AtomicUsize) -> Result<()> {
    let mut expected = vec![0; BYTES];
    ChaCha8Rng::seed_from_u64(SEED).fill_bytes(&mut expected);
    let mut received = vec![0; 1 << 20];
    let mut at = 0;
    while at < BYTES {
        let count = connection.read(&mut received).context("cannot read from the guest")?;
        ensure!(count > 0, "the guest closed the connection after {at} bytes");
        ensure!(received[..count] == expected[at..at + count], "the bytes from {at} on differ");
        at += count;
        returned.store(at, Ordering::Relaxed);
    }
    Ok(())
}

fn await_returned(returned: &AtomicUsize, bytes: usize) -> Result<()> {
    wait_for("a part of the transfer", LIMIT, || {
        Ok((returned.load(Ordering::Relaxed) >= bytes).then_some(()))
    })
}

/// The mean frame on the guest's tap is longer than any ordinary one: the guest's
/// driver sends and takes what only the card's offloads allow.
fn long_frames_pass(scene: &Scene, host: &str) -> Result<()> {
    let namespace = scene.lab().host(host)?;
    let table = in_namespace(&namespace, || fs::read_to_string("/proc/thread-self/net/dev"))??;
    let tap = format!("{VM}.0:");
    let line = table.lines().find_map(|line| line.trim().strip_prefix(&*tap));
    let line = line.with_context(|| format!("host {host} has no tap {tap}"))?;
    let counts: Vec<u64> = line.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
    for (way, bytes, frames) in [("from", counts[0], counts[1]), ("to", counts[8], counts[9])] {
        ensure!(
            bytes > ORDINARY_FRAME * frames,
            "{frames} frames {way} the guest on host {host} have {bytes} bytes: none are long"
        );
    }
    Ok(())
}
