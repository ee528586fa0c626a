//! Disk reads in lockstep: from each host's own image, or with the log (VMware FT, 4.1 and 4.2).
//!
//! With the log, [`ReadTrail`] on the primary notes what a read gave *before* QEMU gets it. QEMU
//! logs that the read is done, and so all that comes of it, only afterwards; and a batch is cut
//! by reading the log first and the trail then ([`super::primary`]), and sent in the other
//! order. So when the backup acknowledges a batch it has the data of every read whose end that
//! batch, or an earlier one, tells. No frame that came of a read leaves before.
//!
//! On the backup [`Following`](super::backup::Following) answers the same reads from these data. What has none when the
//! log ends was not done on the primary as far as anybody knows, and is read from the mirror.

use super::Rate;
use std::mem;
use std::sync::Arc;
use understudy_disk::{ReadRecorder, Span};
use understudy_lockstep::DiskRead;
use understudy_machine::Machine;
use understudy_protocol::DiskIndex;
use understudy_threads::Waitable;

/// Data that may wait for the next batch: over it the guest's reads wait.
const MOST_WAITING_BYTES: usize = 8 << 20;

/// The bytes with which a batch is cut at once.
const PRESSING_BYTES: usize = 1 << 20;

/// The results of the guest's reads on the primary, on their way into the log.
pub struct ReadTrail {
    state: Waitable<Trail>,
    /// Tells the log's thread.
    wake: Box<dyn Fn() + Send + Sync>,
}

#[derive(Default)]
struct Trail {
    came: Vec<u64>,
    stream: Vec<u8>,
    total: u64,
    rate: Rate,
    passes: bool,
    closed: bool,
}

impl ReadTrail {
    /// Makes those of a guest with so many disks, at the beginning of its log. `wake` is called
    /// when a batch should be cut.
    pub fn new(disks: usize, wake: impl Fn() + Send + Sync + 'static) -> Arc<ReadTrail> {
        let state = Waitable::new(Trail { came: vec![0; disks], ..Default::default() });
        Arc::new(ReadTrail { state, wake: Box::new(wake) })
    }

    /// Whether a batch should be cut for the sake of reads that may soon wait.
    pub fn is_pressing(&self) -> bool {
        self.state.lock().stream.len() >= PRESSING_BYTES
    }

    /// Takes what came since the last call. To be called after the batch's log was read.
    pub fn take(&self) -> Vec<u8> {
        self.state.change(|state| {
            let stream = mem::take(&mut state.stream);
            state.total += stream.len() as u64;
            state.rate.note(state.total);
            stream
        })
    }

    /// The log is over: nothing is noted any more, and nobody waits.
    pub fn close(&self) {
        self.state.change(|state| {
            state.closed = true;
            state.stream = Vec::new();
        });
    }

    /// The data of the last seconds.
    pub fn mbit_s(&self) -> f64 {
        self.state.lock().rate.mbit_s()
    }
}

impl ReadRecorder for ReadTrail {
    fn came(&self, disk: DiskIndex) -> u64 {
        let full = |state: &mut Trail| {
            state.stream.len() > MOST_WAITING_BYTES && !state.passes && !state.closed
        };
        let mut state = self.state.wait_while(self.state.lock(), full);
        let number = &mut state.came[usize::from(disk.0)];
        *number += 1;
        *number - 1
    }

    fn gave(&self, disk: DiskIndex, number: u64, at: Span, outcome: Result<&[u8], u32>) {
        let Span { offset, length } = at;
        let mut state = self.state.lock();
        if state.closed {
            return;
        }
        let before = state.stream.len();
        DiskRead { disk, number, offset, length }.put(outcome, &mut state.stream);
        if before < PRESSING_BYTES && state.stream.len() >= PRESSING_BYTES {
            drop(state);
            (self.wake)();
        }
    }

    fn let_pass(&self) {
        self.state.change(|state| state.passes = true);
    }
}

impl std::fmt::Debug for ReadTrail {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ReadTrail").finish_non_exhaustive()
    }
}

/// The primary's guest stands still, and its log begins: what it reads from here on is noted.
pub fn record(machine: &Machine, trail: &Arc<ReadTrail>) {
    machine.withhold_disk_errors();
    for disk in machine.disks() {
        disk.set_reads(understudy_disk::Reads::Recorded(trail.clone()));
    }
}

/// The same, and what it reads is not noted.
pub fn copy(machine: &Machine) {
    machine.withhold_disk_errors();
    for disk in machine.disks() {
        disk.set_reads(understudy_disk::Reads::Copied);
    }
}

/// The guest's requests are those of an ordinary machine.
pub fn forget(machine: &Machine) {
    for disk in machine.disks() {
        disk.set_reads(understudy_disk::Reads::Plain);
        disk.let_pass();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::thread;

    const DISK: DiskIndex = DiskIndex(0);

    fn fill(trail: &ReadTrail, bytes: usize) {
        let number = trail.came(DISK);
        let at = Span { offset: 0, length: bytes as u32 };
        trail.gave(DISK, number, at, Ok(&vec![1; bytes]));
    }

    #[test]
    fn reads_wait_while_much_waits_for_a_batch() {
        let wakes = Arc::new(AtomicUsize::new(0));
        let count = wakes.clone();
        let trail = ReadTrail::new(1, move || {
            count.fetch_add(1, Ordering::Relaxed);
        });
        fill(&trail, PRESSING_BYTES);
        fill(&trail, MOST_WAITING_BYTES);
        assert!(trail.is_pressing() && wakes.load(Ordering::Relaxed) == 1);
        thread::scope(|scope| {
            let next = scope.spawn(|| trail.came(DISK));
            assert!(trail.take().len() > MOST_WAITING_BYTES);
            assert_eq!(next.join().unwrap(), 2);
        });
        fill(&trail, MOST_WAITING_BYTES + 1);
        // A QEMU that stops waits for its reads.
        trail.let_pass();
        fill(&trail, 1);
        trail.close();
        fill(&trail, 1);
        assert!(trail.take().is_empty(), "something was noted behind the end");
    }
}
