//! The daemon of either host dies many times under load, and no epoch is late for it.
//!
//! An epoch is late if it was committed more than a second after the one before. Of one that is, it is said how long
//! this machine, and not the product, kept everybody waiting meanwhile: a hundred deaths may have none that nothing
//! else explains.

use crate::keepers::{answered, begin, checkpoints, kept, told, with_keepers};
use crate::stage::{LIMIT, await_service, has_backup, play, prove_survival};
use anyhow::{Result, ensure};
use std::fs;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use understudy_lab::scene::VM;
use understudy_lab::{RecordClient, Scene, wait_for};

/// The command that writes beside its client's records: pages of its memory, and again after so
/// many milliseconds.
const LOAD: &str = "guest-tools dirty 2000 20";
/// Time between two looks of whoever notices that the machine stands still.
const PULSE: Duration = Duration::from_millis(10);
/// A machine that stood still for so long may have made an epoch late.
const STANDSTILL: Duration = Duration::from_millis(300);
/// The same of one whose processors were not enough for all that wanted them, in all.
const SHORTAGE: Duration = Duration::from_millis(700);

/// The times between committed epochs that host a has counted: up to a bound in seconds, so many.
struct Gaps(Vec<(f64, u64)>);

impl Gaps {
    fn now(scene: &Scene) -> Result<Gaps> {
        let page = scene.host("a")?.metrics()?;
        let buckets = page.lines().filter_map(|line| {
            let rest = line.strip_prefix("understudy_vm_commit_gap_seconds_bucket{le=\"")?;
            let (bound, rest) = rest.split_once('"')?;
            let count = rest.strip_prefix(&format!(",vm=\"{VM}\"}} "))?.trim().parse().ok()?;
            Some((bound.parse().unwrap_or(f64::INFINITY), count))
        });
        let gaps = Gaps(buckets.collect());
        ensure!(!gaps.0.is_empty(), "no gaps in:\n{page}");
        Ok(gaps)
    }

    fn all(&self) -> u64 {
        self.0.last().map_or(0, |(_, count)| *count)
    }

    fn late(&self) -> u64 {
        let in_time = self.0.iter().rfind(|(bound, _)| *bound <= 1.0);
        self.all() - in_time.map_or(0, |(_, count)| *count)
    }

    /// The bound of the longest since then.
    fn longest_since(&self, before: &Gaps) -> f64 {
        let new = |((bound, now), (_, then)): (&(f64, u64), &(f64, u64))| (*bound, now - then);
        let new: Vec<_> = self.0.iter().zip(&before.0).map(new).collect();
        let all = new.last().map_or(0, |(_, count)| *count);
        new.into_iter().find(|(_, count)| *count == all).map_or(0.0, |(bound, _)| bound)
    }
}

/// Notices how long this machine keeps everybody waiting.
struct Machine {
    longest_micros: Arc<AtomicU64>,
    over: Arc<AtomicBool>,
    pulse: Option<JoinHandle<()>>,
    shortage: Option<Duration>,
}

impl Machine {
    fn watch() -> Machine {
        let (longest_micros, over) = (Arc::<AtomicU64>::default(), Arc::<AtomicBool>::default());
        let (longest, ends) = (longest_micros.clone(), over.clone());
        let pulse = thread::spawn(move || {
            while !ends.load(Ordering::Relaxed) {
                let asleep = Instant::now();
                thread::sleep(PULSE);
                let late = asleep.elapsed().saturating_sub(PULSE).as_micros() as u64;
                longest.fetch_max(late, Ordering::Relaxed);
            }
        });
        Machine { longest_micros, over, pulse: Some(pulse), shortage: shortage() }
    }

    /// The longest standstill since it was asked last, and the time for which in all somebody
    /// waited for a processor, if the kernel counts that.
    fn since(&mut self) -> (Duration, Option<Duration>) {
        let standstill = Duration::from_micros(self.longest_micros.swap(0, Ordering::Relaxed));
        let before = std::mem::replace(&mut self.shortage, shortage());
        (standstill, self.shortage.zip(before).map(|(now, before)| now - before))
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        self.over.store(true, Ordering::Relaxed);
        if let Some(pulse) = self.pulse.take() {
            pulse.join().expect("it only sleeps");
        }
    }
}

/// The time for which somebody has waited for a processor since this machine began, as far as the
/// kernel counts that.
fn shortage() -> Option<Duration> {
    let text = fs::read_to_string("/proc/pressure/cpu").ok()?;
    let (_, total) = text.lines().next()?.rsplit_once("total=")?;
    total.parse().ok().map(Duration::from_micros)
}

/// The tally of the deaths so far.
struct Tally {
    machine: Machine,
    before: Gaps,
    deaths: usize,
    late: usize,
    unexplained: usize,
    longest: f64,
}

impl Tally {
    fn begin(scene: &Scene) -> Result<Tally> {
        let machine = Machine::watch();
        Ok(Tally {
            machine,
            before: Gaps::now(scene)?,
            deaths: 0,
            late: 0,
            unexplained: 0,
            longest: 0.0,
        })
    }

    fn count(&mut self, scene: &Scene) -> Result<()> {
        let now = Gaps::now(scene)?;
        ensure!(now.all() > self.before.all(), "no epoch without the daemon");
        let (standstill, shortage) = self.machine.since();
        let longest = now.longest_since(&self.before);
        self.deaths += 1;
        self.longest = self.longest.max(longest);
        if now.late() > self.before.late() {
            // Where nobody counts the shortage, it is not known to be none.
            let was_short = shortage.is_none_or(|shortage| shortage > SHORTAGE);
            let is_explained = standstill > STANDSTILL || was_short;
            self.late += 1;
            self.unexplained += usize::from(!is_explained);
            eprintln!(
                "death {}: {} epochs late, the longest up to {longest} s after the last; the machine stood still for up \
                 to {standstill:.1?}, and somebody waited for a processor for {shortage:?} in all",
                self.deaths,
                now.late() - self.before.late(),
            );
        }
        self.before = now;
        Ok(())
    }

    fn prove(&self) -> Result<()> {
        let Tally { deaths, late, unexplained, longest, .. } = self;
        eprintln!(
            "{deaths} deaths, {late} with late epochs, {unexplained} of them without a reason in the machine; no two \
             epochs were more than {longest} s apart"
        );
        ensure!(
            *unexplained == 0,
            "epochs were late at {unexplained} of {deaths} deaths, and the machine was not"
        );
        Ok(())
    }
}

fn begin_under_load(scene: &Scene) -> Result<RecordClient> {
    scene.protected_guest("a", "b")?;
    scene.shell()?.start(LOAD)?;
    begin(scene)
}

/// The daemon of a protected guest's host dies so many times: nothing resynchronises, fails over or breaks.
fn play_deaths(deaths: usize) {
    play(with_keepers(), |scene| {
        let client = begin_under_load(scene)?;
        let before = answered(scene, VM)?;
        let mut tally = Tally::begin(scene)?;
        for _ in 0..deaths {
            scene.host_mut("a")?.kill_daemon()?;
            await_service(&client)?;
            scene.revive("a")?;
            let status = answered(scene, VM)?;
            ensure!(kept(&status)? == kept(&before)?, "another one: {before} became {status}");
            ensure!(has_backup(&status), "{status}");
            tally.count(scene)?;
        }
        tally.prove()?;
        wait_for("the next daemon to tell what the keeper has seen", LIMIT, || {
            let events = scene.host("a")?.call(["events", "--json"])?;
            Ok(events.contains("protected: b stands by").then_some(()))
        })?;
        // Nobody is there who could help.
        scene.host_mut("a")?.kill_daemon()?;
        await_service(&client)?;
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")
    });
}

/// The daemon of the backup's host does. Then the primary's host dies while it is dead.
fn play_deaths_of_the_backups(deaths: usize) {
    play(with_keepers(), |scene| {
        let client = begin_under_load(scene)?;
        let (primary, backup) = (kept(&told(scene, "a", VM)?)?, kept(&told(scene, "b", VM)?)?);
        let mut tally = Tally::begin(scene)?;
        for _ in 0..deaths {
            let committed = checkpoints(&scene.status("a")?)?;
            scene.host_mut("b")?.kill_daemon()?;
            await_service(&client)?;
            let status = scene.await_protected("a", |_| ())?;
            ensure!(kept(&status)? == primary, "another one: {status}");
            ensure!(checkpoints(&status)? > committed, "no epoch without the daemon: {status}");
            scene.revive("b")?;
            let status = scene.status("b")?;
            ensure!(kept(&status)? == backup, "another one: {status}");
            ensure!(status["role"] == "backup", "{status}");
            tally.count(scene)?;
        }
        tally.prove()?;
        scene.host_mut("b")?.kill_daemon()?;
        scene.host_mut("a")?.kill_everything()?;
        // Nobody is there to be asked but the guest.
        await_service(&client)?;
        scene.revive("b")?;
        let status = scene.await_live("b")?;
        ensure!(kept(&status)?.keeper == backup.keeper, "another one: {status}");
        prove_survival(scene, client, "b")
    });
}

#[test]
fn a_daemon_dies_again_and_again_and_its_protected_guest_does_not_notice() {
    play_deaths(3);
}

#[test]
fn a_backups_daemon_dies_again_and_again_and_the_backup_takes_over_without_it() {
    play_deaths_of_the_backups(3);
}

#[test]
#[ignore = "long: a hundred deaths; make test-long"]
fn a_daemon_dies_a_hundred_times_and_its_protected_guest_does_not_notice() {
    play_deaths(100);
}

#[test]
#[ignore = "long: a hundred deaths; make test-long"]
fn a_backups_daemon_dies_a_hundred_times_and_the_backup_takes_over_without_it() {
    play_deaths_of_the_backups(100);
}
