//! Bulk transfers over the card's fast path: long TCP segments, both ways at once.

use crate::stage::{Calm, LIMIT, options, play_protected, prove_survival};
use anyhow::{Context, Result, ensure};
use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpStream};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use understudy_lab::scene::{ECHO_PORT, VM};
use understudy_lab::{Scene, connect_patiently, in_namespace, wait_for};

/// The bytes that are sent to the guest and come back from it, in parts before and behind the
/// kill.
const BYTES: usize = 32 << 20;
const BLOCK: usize = 1 << 20;
/// The longest frame that is none of those which a fast path carries.
const ORDINARY_FRAME: u64 = 1514;
const SEED: u64 = 4;

#[test]
fn a_bulk_transfer_both_ways_survives_a_kill_on_long_segments() {
    play_protected(options().calm(), |scene, client| {
        let to = scene.guest(ECHO_PORT);
        let connection = in_namespace(&scene.lab().client(), || connect_patiently(to, LIMIT))??;
        connection.set_read_timeout(Some(LIMIT))?;
        connection.set_write_timeout(Some(LIMIT))?;
        let transfer =
            Transfer { length: AtomicUsize::new(usize::MAX), returned: AtomicUsize::new(0) };
        thread::scope(|scope| {
            let sender = scope.spawn(|| transfer.send(&connection));
            let receiver = scope.spawn(|| transfer.compare(&connection));
            let story = transfer.await_returned(BYTES / 4).and_then(|()| {
                long_frames_pass(scene, "a")?;
                scene.host_mut("a")?.kill_everything()
            });
            // It goes on for as much on the other host, however late that is.
            transfer
                .length
                .store(transfer.returned.load(Ordering::Relaxed) + BYTES, Ordering::Relaxed);
            let join = |panic| std::panic::resume_unwind(panic);
            let sent = sender.join().unwrap_or_else(join);
            let received = receiver.join().unwrap_or_else(join);
            story.and(sent).and(received)
        })?;
        long_frames_pass(scene, "b")?;
        prove_survival(scene, client, "b")
    });
}

/// Blocks of noise, each of which must come back as it was sent.
struct Transfer {
    /// Bytes that are sent in all, and a block more at the most.
    length: AtomicUsize,
    returned: AtomicUsize,
}

impl Transfer {
    fn goes_on(&self, at: usize) -> bool {
        at < self.length.load(Ordering::Relaxed)
    }

    fn send(&self, mut connection: &TcpStream) -> Result<()> {
        let (mut noise, mut block) = (ChaCha8Rng::seed_from_u64(SEED), vec![0; BLOCK]);
        let mut at = 0;
        while self.goes_on(at) {
            noise.fill_bytes(&mut block);
            connection.write_all(&block).context("cannot send to the guest")?;
            at += BLOCK;
        }
        // The guest answers to the end, and closes.
        connection.shutdown(Shutdown::Write).context("cannot say that this was all")
    }

    fn compare(&self, mut connection: &TcpStream) -> Result<()> {
        let (mut noise, mut expected) = (ChaCha8Rng::seed_from_u64(SEED), vec![0; BLOCK]);
        let mut received = vec![0; BLOCK];
        let mut at = 0;
        while self.goes_on(at) {
            noise.fill_bytes(&mut expected);
            connection.read_exact(&mut received).context("cannot read from the guest")?;
            ensure!(received == expected, "the bytes from {at} on differ");
            at += BLOCK;
            self.returned.store(at, Ordering::Relaxed);
        }
        Ok(())
    }

    fn await_returned(&self, bytes: usize) -> Result<()> {
        wait_for("a part of the transfer", LIMIT, || {
            Ok((self.returned.load(Ordering::Relaxed) >= bytes).then_some(()))
        })
    }
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
