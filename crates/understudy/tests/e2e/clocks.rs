//! The guest's clocks lose neither the pauses of its checkpoints nor the time without a host, and
//! no virtual CPU ever sees them go backwards.

use crate::stage::{Calm, LIMIT, options, play};
use anyhow::{Context, Result, ensure};
use std::fmt;
use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpStream};
use std::thread;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use understudy_lab::scene::VM;
use understudy_lab::{GUEST_ADDRESS, Scene, SceneOptions, in_namespace, patience, wait_for};
use understudy_protocol::Policy;
use understudy_qemu::TickRate;

const PORT: u16 = 7060;
/// Checkpoints a second.
const HZ: u32 = 100;
/// Time by which a clock may be off afterwards; on a slow machine questions take longer, too.
const MOST_OFF: Duration = Duration::from_millis(10);
/// Times that a clock is asked for one comparison, at least.
const QUESTIONS: usize = 100;
/// The error within which a clock is to be known before it is asked no more: on a busy machine few
/// questions are answered at once.
const CLOSE: Duration = Duration::from_millis(2);
/// Time between two of them, so that they fall into different parts of an epoch.
const BETWEEN: Duration = Duration::from_millis(3);
/// Looks at the clocks that a watch is worth something after.
const FEWEST_LOOKS: u64 = 20_000;

#[test]
fn clocks_keep_up_through_a_thousand_checkpoints_and_a_fail_over() {
    keep_up_through(1_000);
}

#[test]
#[ignore = "long: ten thousand checkpoints, 100 s and more"]
fn clocks_keep_up_through_ten_thousand_checkpoints_and_a_fail_over() {
    keep_up_through(10_000);
}

fn keep_up_through(checkpoints: u64) {
    let policy = Some(Policy::Interval { hz: HZ });
    play(SceneOptions { vcpus: 2, policy, ..options().calm() }, |scene| {
        scene.start_guest("a")?;
        scene.await_guest()?;
        let mut clocks = Clocks::open(scene)?;
        let unprotected = clocks.compare()?;
        scene.protect("a", "b")?;
        scene.await_protected("a", |_| ())?;
        let first = committed(scene, "a")?;
        let limit = LIMIT + Duration::from_millis(checkpoints * 40);
        let last = wait_for(&format!("{checkpoints} checkpoints"), limit, || {
            let now = committed(scene, "a")?;
            Ok((now >= first + checkpoints).then_some(now))
        })?;
        // What a protected guest says is held for a while, which makes comparisons inaccurate.
        scene.host("a")?.call(["unprotect", VM])?;
        let protected = clocks.compare()?;
        scene.protect("a", "b")?;
        scene.await_protected("a", |_| ())?;
        scene.host_mut("a")?.kill_everything()?;
        scene.await_live("b")?;
        let taken_over = clocks.compare()?;
        for (when, offset) in [("checkpoints", protected), ("fail-over", taken_over)] {
            for (clock, was, is) in [
                ("counter", unprotected.counter, offset.counter),
                ("time of day", unprotected.day, offset.day),
            ] {
                let off = is.since(was);
                println!("{} checkpoints, {when}: the {clock} is off by {off}", last - first);
                let limit = MOST_OFF * patience();
                ensure!(off.is_within(limit), "after {when} the {clock} is off by {off}");
            }
        }
        clocks.prove_forward()
    });
}

/// Epochs that the backup has.
fn committed(scene: &Scene, host: &str) -> Result<u64> {
    let status = scene.status(host)?;
    status["checkpoints"].as_u64().with_context(|| format!("no checkpoints in {status}"))
}

/// The connection to the guest's clocks, which outlives its hosts.
struct Clocks {
    connection: BufReader<TcpStream>,
    rate: TickRate,
}

/// One answer.
struct Shown {
    day_ns: i128,
    ticks: i64,
    looks: u64,
    backwards: [u64; 2],
}

/// The distances of the guest's clocks from this machine's.
#[derive(Clone, Copy)]
struct Offsets {
    counter: Bounds,
    day: Bounds,
}

/// A number of nanoseconds of which is known that it is not less, and not more.
#[derive(Clone, Copy)]
struct Bounds {
    least: i64,
    most: i64,
}

impl Clocks {
    fn open(scene: &Scene) -> Result<Clocks> {
        scene.shell()?.start(&format!("guest-tools clock {PORT}"))?;
        let guest = SocketAddr::new(GUEST_ADDRESS.into(), PORT);
        let connect = || {
            let tried = in_namespace(&scene.lab().client(), || TcpStream::connect(guest))?;
            Ok(tried.ok())
        };
        let connection = wait_for("the guest to show its clocks", LIMIT, connect)?;
        connection.set_nodelay(true)?;
        connection.set_read_timeout(Some(LIMIT))?;
        Ok(Clocks { connection: BufReader::new(connection), rate: TickRate::of_this_host() })
    }

    fn ask(&mut self) -> Result<Shown> {
        self.connection.get_mut().write_all(b"?\n")?;
        let mut line = String::new();
        self.connection.read_line(&mut line).context("the guest shows no clocks")?;
        let words: Vec<i128> = line.split_whitespace().filter_map(|w| w.parse().ok()).collect();
        let &[day_ns, ticks, looks, monotonic, counter] = &words[..] else {
            anyhow::bail!("the guest's clocks are {line:?}");
        };
        let backwards = [monotonic as u64, counter as u64];
        Ok(Shown { day_ns, ticks: ticks as i64, looks: looks as u64, backwards })
    }

    /// Compares the guest's clocks with this machine's: each question narrows it down.
    fn compare(&mut self) -> Result<Offsets> {
        let (mut counter, mut day) = (Bounds::NONE, Bounds::NONE);
        let until = Instant::now() + LIMIT * patience();
        for asked_before in 0.. {
            let known = counter.is_within_one(CLOSE) && day.is_within_one(CLOSE);
            if asked_before >= QUESTIONS && (known || Instant::now() > until) {
                break;
            }
            let (before, asked) = (TickRate::counter(), time_of_day()?);
            let shown = self.ask()?;
            let (after, answered) = (TickRate::counter(), time_of_day()?);
            let ticks = [after, before].map(|then| self.rate.nanoseconds(shown.ticks - then));
            counter.narrow(ticks);
            day.narrow([answered, asked].map(|then| (shown.day_ns - then) as i64));
            thread::sleep(BETWEEN);
        }
        ensure!(counter.is_one(), "the guest's counter moves: {counter}");
        ensure!(day.is_one(), "the guest's time of day moves: {day}");
        Ok(Offsets { counter, day })
    }

    /// No thread in the guest saw a clock behind what another one had seen before.
    fn prove_forward(&mut self) -> Result<()> {
        let Shown { looks, backwards: [monotonic, counter], .. } = self.ask()?;
        println!("{looks} looks on two virtual CPUs");
        ensure!(looks >= FEWEST_LOOKS, "the clocks of {VM} were looked at {looks} times only");
        ensure!(
            monotonic == 0 && counter == 0,
            "of {looks} looks CLOCK_MONOTONIC went backwards in {monotonic}, the counter in {counter}"
        );
        Ok(())
    }
}

fn time_of_day() -> Result<i128> {
    Ok(SystemTime::now().duration_since(UNIX_EPOCH)?.as_nanos() as i128)
}

impl Bounds {
    const NONE: Bounds = Bounds { least: i64::MIN, most: i64::MAX };

    fn narrow(&mut self, [least, most]: [i64; 2]) {
        self.least = self.least.max(least);
        self.most = self.most.min(most);
    }

    /// Whether there is such a number.
    fn is_one(self) -> bool {
        self.least <= self.most
    }

    /// Whether it is known up to so much.
    fn is_within_one(self, width: Duration) -> bool {
        self.most.saturating_sub(self.least) <= width.as_nanos() as i64
    }

    fn since(self, before: Bounds) -> Bounds {
        Bounds { least: self.least - before.most, most: self.most - before.least }
    }

    /// Whether it is within the limit, whatever it is within its bounds.
    fn is_within(self, limit: Duration) -> bool {
        let limit = limit.as_nanos() as i64;
        -limit <= self.least && self.most <= limit
    }
}

impl fmt::Display for Bounds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:.2} to {:.2} ms", self.least as f64 / 1e6, self.most as f64 / 1e6)
    }
}
