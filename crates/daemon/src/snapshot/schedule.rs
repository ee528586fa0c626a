//! Snapshots that are taken by themselves, and deleted by themselves.

use super::unix_now;
use crate::config::ClusterConfig;
use crate::containment::spawn_for_request;
use crate::host::Host;
use std::collections::BTreeSet;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};
use tracing::{info, warn};
use understudy_protocol::GroupName;
use understudy_report::cluster::SnapshotRequest;
use understudy_report::error::{ErrorKind, HostError};
use understudy_report::events::EventKind;
use understudy_snapshot::{Manifest, Retention, SnapshotNumber, SteadyClock, SteadyTime};

/// Time after which it is looked again whether a snapshot is due: a daemon that ends is not held up
/// for long.
const LOOK: Duration = Duration::from_secs(1);

/// Time that a daemon which has just begun has to start VMs before a snapshot that is overdue is
/// taken.
const FIRST: Duration = Duration::from_secs(60);

/// The attempt which, put off, is told as a failure.
const TOLD_AFTER: u32 = 5;

/// Pause before one that something was in the way of is tried again.
const AGAIN: Duration = Duration::from_secs(60);

/// One thread for each cluster that has a schedule.
pub(crate) fn start(host: &Arc<Host>) {
    for (name, cluster) in host.config.clusters.clone() {
        let host = Arc::downgrade(host);
        if cluster.schedule.is_some() {
            spawn_for_request("schedule", move || run(&host, &name, &cluster));
        }
    }
}

fn run(host: &Weak<Host>, name: &GroupName, cluster: &ClusterConfig) {
    let Some(schedule) = cluster.schedule else { return };
    let Some(newest) = host.upgrade().map(|host| host.newest_taken(name)) else { return };
    let first = first_wait(newest, unix_now(), schedule.every);
    let mut timetable = Timetable::new(Instant::now() + first, schedule.every);
    let mut clock = SteadyClock::new(schedule.every, Instant::now(), unix_now());
    let (mut is_to_expire, mut left) = (false, BTreeSet::new());
    loop {
        thread::sleep(LOOK.min(schedule.every));
        let Some(host) = host.upgrade().filter(|host| !host.is_closing()) else { return };
        // Asked all the time: so it notices when it is set.
        let time = clock.time(Instant::now(), unix_now());
        if let Some(time) = time.filter(|_| is_to_expire) {
            host.delete_old(name, schedule.retention, time, &mut left);
            is_to_expire = false;
        }
        if !timetable.begins(Instant::now()) {
            continue;
        }
        if let Err(error) = host.snapshot_cluster(name, &SnapshotRequest::default()) {
            // What is in the way, another snapshot, a VM that does not run yet or a store that is away, may pass.
            let passes = !matches!(error.kind, ErrorKind::Invalid | ErrorKind::Refused);
            let put_off = if passes { timetable.put_off(Instant::now()) } else { None };
            if let Some(times) = put_off {
                info!("the snapshot of {name} that is due is tried again in a minute: {error}");
                if times != TOLD_AFTER {
                    continue;
                }
            }
            let (group, reason) = (name.clone(), error.to_string());
            host.note_snapshot(name, Some(format!("cannot be taken: {reason}")));
            host.events.record(EventKind::SnapshotFailed { group, reason });
            // A store that is full would be so for ever.
            let time = clock.time(Instant::now(), unix_now());
            let expired = time.map(|time| host.expire(name, schedule.retention, time));
            if let Some(Err(error)) = expired {
                warn!("old snapshots of {name} cannot be deleted: {error}");
            }
            continue;
        }
        match clock.time(Instant::now(), unix_now()) {
            Some(time) => host.delete_old(name, schedule.retention, time, &mut left),
            None => {
                host.note_snapshot(name, None);
                is_to_expire = true;
            }
        }
    }
}

/// Time until the first snapshot of a daemon that begins, of a group whose newest was taken at that
/// second since 1970: a daemon that is restarted again and again takes them, too.
fn first_wait(newest: Option<u64>, now: u64, every: Duration) -> Duration {
    let age = newest.map_or(every, |newest| Duration::from_secs(now.saturating_sub(newest)));
    every.saturating_sub(age).max(every.min(FIRST))
}

/// When snapshots are due.
struct Timetable {
    every: Duration,
    /// Beginning of the next period.
    next: Instant,
    /// Time of the next attempt: then, or before.
    due: Instant,
    /// How often this period's has been put off.
    put_off: u32,
}

impl Timetable {
    fn new(first: Instant, every: Duration) -> Timetable {
        Timetable { every, next: first, due: first, put_off: 0 }
    }

    /// Whether one is to be taken now.
    fn begins(&mut self, now: Instant) -> bool {
        let is_due = now >= self.due;
        if is_due {
            if now >= self.next {
                self.next = now + self.every;
                self.put_off = 0;
            }
            self.due = self.next;
        }
        is_due
    }

    /// What was in the way of it passes, as a sweep does: it is tried again, unless the next one is due before
    /// that. Returns how often it has been; none if it is not.
    fn put_off(&mut self, now: Instant) -> Option<u32> {
        let again = now + AGAIN;
        (again < self.next).then(|| {
            self.due = again;
            self.put_off += 1;
            self.put_off
        })
    }
}

impl Host {
    /// Time at which the newest snapshot of a group was taken; none if there is none that can be read.
    fn newest_taken(&self, group: &GroupName) -> Option<u64> {
        match self.snapshots_of(group, None) {
            Ok(there) => there.iter().map(|one| one.taken_at).max(),
            // The first attempt, which is due soon, says so where it is seen.
            Err(error) => {
                info!("when a snapshot of {group} was taken last is not known: {error}");
                None
            }
        }
    }

    /// Deletes the snapshots of a group that are not to be kept, and notes whether that was possible; `left` are those
    /// that the last time has left.
    fn delete_old(
        &self,
        group: &GroupName,
        retention: Retention,
        now: SteadyTime,
        left: &mut BTreeSet<SnapshotNumber>,
    ) {
        let kept = match self.expire(group, retention, now) {
            Ok(failed) => told_of_left(left, &failed),
            Err(error) => Some(format!("are taken, and old ones cannot be deleted: {error}")),
        };
        if let Some(words) = &kept {
            warn!("scheduled snapshots of {group} {words}");
        }
        self.note_snapshot(group, kept);
    }

    fn note_snapshot(&self, of: &GroupName, words: Option<String>) {
        self.vms.note(|all| all.findings.note_snapshot(of, words));
    }

    /// Returns those that cannot be deleted.
    fn expire(
        &self,
        group: &GroupName,
        retention: Retention,
        now: SteadyTime,
    ) -> Result<Vec<(SnapshotNumber, HostError)>, HostError> {
        let store = self.open_store(group, None)?;
        let there =
            store.snapshots(group).map_err(|error| super::placement::store_error("", error))?;
        // What cannot be read is not deleted by itself.
        let readable: Vec<Manifest> =
            there.into_iter().filter_map(|listed| listed.manifest.ok()).collect();
        let mut failed = Vec::new();
        for number in retention.expired(&readable, now) {
            match self.remove_snapshot(group, number, None, false) {
                // What hinders a sweep is recorded.
                Ok(_) => info!("snapshot {number} of {group} was old, and is deleted"),
                Err(error) => {
                    warn!("snapshot {number} of {group} is old: {error}");
                    failed.push((number, error));
                }
            }
        }
        Ok(failed)
    }
}

/// What is told of those that could not be deleted: one that is being restored is mostly deleted the next time, and one
/// whose host died meanwhile is not.
fn told_of_left(
    left: &mut BTreeSet<SnapshotNumber>,
    failed: &[(SnapshotNumber, HostError)],
) -> Option<String> {
    let now = failed.iter().map(|(number, _)| *number).collect();
    let before = std::mem::replace(left, now);
    let again = failed.iter().filter(|(number, _)| before.contains(number));
    let words: Vec<String> = again.map(|(_, error)| error.to_string()).collect();
    (!words.is_empty())
        .then(|| format!("are taken, and some old ones cannot be deleted: {}", words.join("; ")))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Regression: a daemon that was restarted more often than that took none at all.
    #[test]
    fn a_schedule_goes_on_where_the_last_daemon_was_with_it() {
        const HOUR: Duration = Duration::from_secs(3600);
        let wait = |newest| first_wait(newest, 1_790_000_000, HOUR).as_secs();
        assert_eq!(wait(Some(1_790_000_000 - 1800)), 1800, "half of it is over");
        assert_eq!(wait(Some(1_790_000_000 - 3599)), 60, "VMs are being started");
        assert_eq!(wait(Some(0)), 60, "overdue, or unreadable");
        assert_eq!(wait(None), 60, "there is none yet");
        assert_eq!(wait(Some(1_790_000_000 + 9999)), 3600, "taken by another clock");
        let often = Duration::from_secs(60);
        assert_eq!(first_wait(None, 1_790_000_000, often), often);
    }
    /// Regression: the mark of a host that had died in a restore kept a snapshot for ever, and all was said to be well.
    #[test]
    fn a_snapshot_that_is_left_twice_is_told() {
        let left = |number| {
            let words = format!("snapshot {number} of shop is being restored");
            (SnapshotNumber(number), HostError::new(ErrorKind::Conflict, words))
        };
        let mut before = BTreeSet::new();
        assert_eq!(told_of_left(&mut before, &[left(3)]), None, "a restore is under way");
        let told = told_of_left(&mut before, &[left(3), left(4)]).unwrap();
        assert!(told.contains("snapshot 3 of shop is being") && !told.contains("snapshot 4"));
        assert_eq!(told_of_left(&mut before, &[]), None);
        assert_eq!(told_of_left(&mut before, &[left(4)]), None);
    }

    /// Regression: the next one was taken an hour later.
    #[test]
    fn a_snapshot_that_meets_a_sweep_is_taken_soon_after() {
        let (start, minute) = (Instant::now(), Duration::from_secs(60));
        let at = |minutes: u32| start + minutes * minute;
        let mut timetable = Timetable::new(at(60), 60 * minute);
        assert!(!timetable.begins(at(59)) && timetable.begins(at(60)));
        for minutes in 60..119 {
            assert!(!timetable.begins(at(minutes)), "at {minutes}");
            assert!(timetable.put_off(at(minutes)).is_some(), "at {minutes}");
            if minutes < 118 {
                assert!(timetable.begins(at(minutes + 1)), "a minute after {minutes}");
            }
        }
        assert!(
            timetable.begins(at(119)) && timetable.put_off(at(119)).is_none(),
            "the next is due"
        );
        assert!(timetable.begins(at(120)) && !timetable.begins(at(179)), "it was taken");
        assert!(timetable.begins(at(180)));
        let mut often = Timetable::new(start, minute);
        assert!(often.begins(start) && often.put_off(start).is_none(), "a minute is its period");
    }
}
