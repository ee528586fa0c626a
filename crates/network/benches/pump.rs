//! The speed at which a port carries frames, beside a bare tap, which is what QEMU's own
//! `-netdev tap` writes to. Needs root. Prints one line per measurement.

use nix::sched::{CloneFlags, unshare};
use nix::sys::resource::{UsageWho, getrusage};
use nix::sys::socket::{MsgFlags, recv, send};
use nix::sys::time::TimeValLike;
use std::os::fd::{AsRawFd, OwnedFd};
use std::process::Command;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use understudy_network::*;
use understudy_protocol::{CardIndex, Epoch};

const GUEST: MacAddress = MacAddress([0x52, 0x54, 0, 0x12, 0x34, 0x56]);
const NEIGHBOUR: MacAddress = MacAddress([0x52, 0x54, 0, 0, 0, 1]);
const FRAME_BYTES: usize = 1500;
const FRAMES: u64 = 300_000;
const CHECKPOINTS: u64 = 20_000;

fn main() {
    // The namespace has no name and goes away with this process.
    unshare(CloneFlags::CLONE_NEWNET).expect("run this as root");
    ip("link add br0 type bridge");
    ip("link set br0 up");
    ip("link add near type veth peer name far");
    ip(&format!("link set far address {NEIGHBOUR} up"));
    ip("link set near master br0 up");

    bare_tap();
    let config = PortConfig {
        card: CardIndex(0),
        mac: GUEST,
        tap: "card0".into(),
        bridge: "br0".into(),
        vlans: Vlans::default(),
        live: true,
        output_limit_bytes: DEFAULT_LIMIT_BYTES,
    };
    let port = Port::open(config, Arc::new(|| {})).unwrap();
    let qemu = port.attach_guest().unwrap().socket;
    outbound(&port, &qemu);
    checkpoints(&port, &qemu);
    release(&port, &qemu);
    inbound(&port, qemu);
}

fn ip(arguments: &str) {
    let status = Command::new("ip").args(arguments.split(' ')).status().unwrap();
    assert!(status.success(), "ip {arguments}");
}

/// A frame with the header that the tap has.
fn packet(to: MacAddress, from: MacAddress) -> Vec<u8> {
    let mut packet = [&[0; HEADER_BYTES][..], &to.0, &from.0, &[0x88, 0xb5]].concat();
    packet.resize(HEADER_BYTES + FRAME_BYTES, 0x55);
    packet
}

/// The same with the header that QEMU begins with.
fn message() -> Vec<u8> {
    packet(NEIGHBOUR, GUEST).split_off(2)
}

fn write(qemu: &OwnedFd, message: &[u8]) {
    send(qemu.as_raw_fd(), message, MsgFlags::empty()).unwrap();
}

/// Time on the clock, on this thread's CPU, and on that of all threads.
struct Stopwatch(Instant, Duration, Duration);

impl Stopwatch {
    fn start() -> Self {
        let (thread, all) = (UsageWho::RUSAGE_THREAD, UsageWho::RUSAGE_SELF);
        Stopwatch(Instant::now(), cpu(thread), cpu(all))
    }

    /// The CPU time per frame does not depend on what else the machine does.
    fn report(&self, what: &str, frames: u64) {
        let now = Stopwatch::start();
        let rate = frames as f64 / (now.0 - self.0).as_secs_f64();
        let gigabits = rate * FRAME_BYTES as f64 * 8.0 / 1e9;
        let (own, all) = (now.1 - self.1, now.2 - self.2);
        let each = |time: Duration| time.as_secs_f64() * 1e6 / frames as f64;
        println!(
            "{what}: {rate:.0} frames/s, {gigabits:.2} Gbit/s; CPU a frame: \
             sender {:.2} us, port {:.2} us",
            each(own),
            each(all.saturating_sub(own))
        );
    }
}

fn cpu(who: UsageWho) -> Duration {
    let usage = getrusage(who).unwrap();
    let time = usage.user_time() + usage.system_time();
    Duration::from_micros(time.num_microseconds().unsigned_abs())
}

fn bare_tap() {
    let tap = Tap::open("bare", "br0", GUEST).unwrap();
    let packet = packet(NEIGHBOUR, GUEST);
    let start = Stopwatch::start();
    for _ in 0..FRAMES {
        tap.send(&packet).unwrap();
    }
    start.report("bare tap, out", FRAMES);
}

/// Sends with one write per frame, as QEMU does it.
fn outbound(port: &Port, qemu: &OwnedFd) {
    let message = message();
    let start = Stopwatch::start();
    for _ in 0..FRAMES {
        write(qemu, &message);
    }
    while port.counters().frames_out < FRAMES {
        thread::sleep(Duration::from_micros(100));
    }
    start.report("port with open gate, out", FRAMES);
}

fn checkpoints(port: &Port, qemu: &OwnedFd) {
    let message = message();
    port.hold(Epoch(1));
    for frames in [0, 10] {
        let first = port.counters().frames_out;
        let (mut drains, mut releases) = (Vec::new(), Vec::new());
        let base = if frames == 0 { 1 } else { CHECKPOINTS + 1 };
        for epoch in base..base + CHECKPOINTS {
            for _ in 0..frames {
                write(qemu, &message);
            }
            let start = Instant::now();
            port.drain_and_barrier(Epoch(epoch + 1));
            drains.push(start.elapsed());
            let start = Instant::now();
            port.release_through(Epoch(epoch), boot_time());
            releases.push(start.elapsed());
        }
        assert_eq!(port.counters().frames_out - first, frames * CHECKPOINTS);
        println!(
            "checkpoint with {frames} frames: drain_and_barrier {}, release_through {}",
            percentiles(drains),
            percentiles(releases)
        );
    }
}

fn percentiles(mut times: Vec<Duration>) -> String {
    times.sort();
    let at = |share: usize| times[times.len() * share / 100];
    format!("p50 {:.1?} p99 {:.1?}", at(50), at(99))
}

fn release(port: &Port, qemu: &OwnedFd) {
    let frames = 20_000;
    let message = message();
    for _ in 0..frames {
        write(qemu, &message);
    }
    let epoch = 2 * CHECKPOINTS + 1;
    assert_eq!(port.drain_and_barrier(Epoch(epoch + 1)), frames);
    let start = Stopwatch::start();
    port.release_through(Epoch(epoch), boot_time());
    start.report("release of 20000 held frames", frames as u64);
    port.open_gate();
}

/// Sends as many frames as the tap's queue takes, again and again.
fn inbound(port: &Port, qemu: OwnedFd) {
    let neighbour = Tap::open("neighbour", "br0", NEIGHBOUR).unwrap();
    let packet = packet(GUEST, NEIGHBOUR);
    let first = port.counters().frames_in;
    let start = Stopwatch::start();
    let reader = thread::spawn(move || {
        let mut bytes = vec![0; 69_632]; // as QEMU reads
        while recv(qemu.as_raw_fd(), &mut bytes, MsgFlags::empty()).is_ok_and(|count| count > 0) {}
    });
    for _ in 0..FRAMES {
        neighbour.send(&packet).unwrap();
    }
    let arrived = port.counters().frames_in - first;
    start.report("port and reader, in (sender not slowed)", arrived);
    println!("  of {FRAMES} sent, {arrived} were carried; a full tap queue drops the rest");
    drop(port.attach_guest()); // ends the reader's connection
    reader.join().unwrap();
}
