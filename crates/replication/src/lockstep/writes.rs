//! The changed blocks that need not be copied after a failure: those that both hosts have.
//!
//! In lockstep nothing is sent of a write, each guest writes its own image. So each host counts
//! what its image has, and tells the other twice a second; the backup what is on stable storage.
//! A block is struck off a host's list once the other host has the writes up to that moment:
//!
//! - the primary's list holds what the backup's mirror may lack;
//! - the backup's, which counts after a take-over, what the lost primary's image may lack: writes
//!   that its QEMU had begun and its daemon had not carried out.
//!
//! After a write that failed, on either host, that host strikes nothing off any more, and tells
//! the other nothing.

use anyhow::ensure;
use std::sync::Arc;
use understudy_disk::{Disk, GuestWrites, Rounds};
use understudy_lockstep::{self as lockstep, Written};

/// A session's counts on one host.
#[derive(Debug, Default)]
pub struct Counts {
    /// Counts at the beginning of the log.
    bases: Option<Vec<GuestWrites>>,
    rounds: lockstep::Rounds,
}

impl Counts {
    /// The writes since the log's begin; none if that cannot be told. No count is below its base today: on a primary
    /// `session.rounds` is held over each count, and over `begin_log` and its checkpoint; a backup's guest begins later.
    fn since_begin(&self, counts: impl IntoIterator<Item = GuestWrites>) -> Option<Written> {
        let since = |(now, base): (GuestWrites, &GuestWrites)| match now.failed == base.failed {
            true => now.count.checked_sub(base.count),
            false => None,
        };
        counts.into_iter().zip(self.bases.as_ref()?).map(since).collect::<Option<_>>().map(Written)
    }
}

/// Whoever has counts behind a lock. It is free whenever a disk is asked for something: one may not answer, and
/// whoever hears of the other host's counts has acknowledgements to hear of as well.
pub trait Writes {
    /// Does something with them, locked.
    fn counts<T>(&self, act: impl FnOnce(&mut Counts) -> T) -> T;

    /// The guest stands still, and its log begins.
    fn begin_writes(&self, disks: &[Arc<Disk>]) {
        let bases = disks.iter().map(|disk| disk.guest_writes()).collect();
        self.counts(|counts| counts.bases = Some(bases));
    }

    /// The writes that this host's images have now; none if that cannot be told.
    fn writes_now(&self, disks: &[Arc<Disk>]) -> Option<Written> {
        let now: Vec<_> = disks.iter().map(|disk| disk.guest_writes()).collect();
        self.counts(|counts| counts.since_begin(now))
    }

    /// The other host says what it has of so many disks.
    fn told_writes(&self, written: Written, disks: usize) -> anyhow::Result<()> {
        let counts = written.0.len();
        ensure!(counts == disks, "counts came of {counts} disks, where there are {disks}");
        self.counts(|counts| counts.rounds.told(written));
        Ok(())
    }

    /// Strikes off what both hosts have, as the session's rounds. The log has begun. What the other host says meanwhile
    /// counts in the next round: one thread alone sets anything aside.
    fn strike_off(&self, disks: &[Arc<Disk>], rounds: Rounds) -> anyhow::Result<()> {
        if !self.counts(|counts| counts.rounds.may_forget()) {
            return Ok(());
        }
        let mut now = Vec::new();
        for disk in disks {
            // The log may have just ended.
            let Some(changes) = disk.changes() else { return Ok(()) };
            changes.end_round(rounds)?;
            now.push(disk.begin_round(rounds));
        }
        self.counts(|counts| {
            let written = counts.since_begin(now);
            counts.rounds.set_aside(written);
        });
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::mpsc;
    use std::thread;
    use std::time::Duration;
    use understudy_disk::{ChangeMap, WriteSink};
    use understudy_protocol::DiskIndex;
    use understudy_threads::{Mutex, lock};

    const BYTES: u64 = 1 << 20;
    const DISK: DiskIndex = DiskIndex(0);

    #[derive(Default)]
    struct Shared(Mutex<Counts>);

    impl Writes for Shared {
        fn counts<T>(&self, act: impl FnOnce(&mut Counts) -> T) -> T {
            act(&mut lock(&self.0))
        }
    }

    /// A write hangs in it until the other end is gone.
    struct Hanging(mpsc::SyncSender<()>);

    impl WriteSink for Hanging {
        fn begin(&self, _: DiskIndex, _: u64, _: u64) {
            // One to say that it hangs, the next to hang.
            (0..2).for_each(|_| self.0.send(()).unwrap_or_default());
        }
        fn write(&self, _: DiskIndex, _: u64, _: &[u8]) {}
        fn zero(&self, _: DiskIndex, _: u64, _: u64) {}
    }

    fn disk(directory: &std::path::Path) -> Arc<Disk> {
        let image = directory.join("image");
        std::fs::write(&image, b"").unwrap();
        let disk = Disk::open(DISK, &image, BYTES).unwrap();
        let changes = ChangeMap::create(&directory.join("changes"), BYTES, &image).unwrap();
        disk.set_changes(Some(Arc::new(changes)));
        Arc::new(disk)
    }

    #[test]
    fn what_the_other_host_has_is_heard_while_a_disk_hangs() {
        let directory = tempfile::tempdir().unwrap();
        let disks = [disk(directory.path())];
        let (rounds, shared) = (Rounds::of_new_session(), Arc::new(Shared::default()));
        shared.begin_writes(&disks);
        let (hang, hung) = mpsc::sync_channel(0);
        disks[0].set_sink(Some(Arc::new(Hanging(hang))));
        thread::scope(|scope| {
            scope.spawn(|| disks[0].write(0, &[1; 4096]).unwrap());
            hung.recv().unwrap();
            let striking = scope.spawn(|| shared.strike_off(&disks, rounds).unwrap());
            thread::sleep(Duration::from_millis(50));
            assert!(!striking.is_finished(), "the disk did not hang");
            let (heard, hears) = mpsc::channel();
            // Not of the scope: if it waits, the test is to fail.
            let listener = shared.clone();
            thread::spawn(move || {
                listener.told_writes(Written(vec![0]), 1).unwrap();
                heard.send(()).unwrap_or_default();
            });
            let heard = hears.recv_timeout(Duration::from_secs(5));
            drop(hung);
            striking.join().unwrap();
            heard.expect("it waited for the disk");
        });
        assert!(shared.counts(|counts| counts.rounds.may_forget()));
    }
}
