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
//! The thread that strikes off has the counts; whoever knows something that bears on them tells it.
//!
//! After a write that failed, on either host, that host strikes nothing off any more, and tells
//! the other nothing.

use anyhow::ensure;
use crossbeam_channel::{Receiver, Sender};
use understudy_disk::{GuestWrites, Rounds};
use understudy_lockstep::{self as lockstep, Written};
use understudy_machine::Machine;
use understudy_protocol::Epoch;

/// Words that may wait. What finds no room is lost: the other host says more within a second, and without a beginning
/// nothing is struck off.
const MOST_WORDS: usize = 16;

/// What is told of the writes of one log.
#[derive(Debug)]
pub struct Writes {
    words: Sender<Word>,
    inbox: Receiver<Word>,
}

#[derive(Debug)]
enum Word {
    /// The log begins at these counts.
    Begins(Vec<GuestWrites>),
    /// The other host has so much.
    Has(Written),
}

impl Default for Writes {
    fn default() -> Writes {
        let (words, inbox) = crossbeam_channel::bounded(MOST_WORDS);
        Writes { words, inbox }
    }
}

impl Writes {
    /// The guest stands still, and its log begins.
    pub fn begin(&self, machine: &Machine) {
        self.tell(Word::Begins(machine.disks().iter().map(|disk| disk.guest_writes()).collect()));
    }

    /// The other host says what it has.
    pub fn told(&self, written: Written, disks: usize) -> anyhow::Result<()> {
        let counts = written.0.len();
        ensure!(counts == disks, "counts came of {counts} disks, where there are {disks}");
        self.tell(Word::Has(written));
        Ok(())
    }

    fn tell(&self, word: Word) {
        let _ = self.words.try_send(word);
    }
}

/// A session's counts on one host, of one log after the other.
#[derive(Debug, Default)]
pub struct Counts {
    /// The epoch behind which the log begins that they are of.
    log: Option<Epoch>,
    /// Counts at the beginning of the log.
    bases: Option<Vec<GuestWrites>>,
    rounds: lockstep::Rounds,
}

impl Counts {
    /// Counts the writes of the log that begins behind this epoch; takes in what was told of them.
    pub fn hear(&mut self, log: Epoch, writes: &Writes) {
        if self.log != Some(log) {
            *self = Counts { log: Some(log), ..Counts::default() };
        }
        for word in writes.inbox.try_iter() {
            match word {
                Word::Begins(bases) => self.bases = Some(bases),
                Word::Has(written) => self.rounds.told(written),
            }
        }
    }

    fn since_begin(&self, counts: impl Iterator<Item = GuestWrites>) -> Option<Written> {
        let since = |(now, base): (GuestWrites, &GuestWrites)| {
            (now.failed == base.failed).then_some(now.count - base.count)
        };
        counts.zip(self.bases.as_ref()?).map(since).collect::<Option<_>>().map(Written)
    }

    /// The writes that this host's images have now; none if that cannot be told.
    pub fn now(&self, machine: &Machine) -> Option<Written> {
        self.since_begin(machine.disks().iter().map(|disk| disk.guest_writes()))
    }

    /// Strikes off what both hosts have, as the session's rounds. The log has begun.
    pub fn strike_off(&mut self, machine: &Machine, rounds: Rounds) -> anyhow::Result<()> {
        if !self.rounds.may_forget() {
            return Ok(());
        }
        let mut now = Vec::new();
        for disk in machine.disks() {
            // The log may have just ended.
            let Some(changes) = disk.changes() else { return Ok(()) };
            changes.end_round(rounds)?;
            now.push(disk.begin_round(rounds));
        }
        let written = self.since_begin(now.into_iter());
        self.rounds.set_aside(written);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counts(count: u64, failed: u64) -> GuestWrites {
        GuestWrites { count, failed }
    }

    #[test]
    fn what_was_told_of_one_log_does_not_count_for_the_next() {
        let (first, second) = (Writes::default(), Writes::default());
        let mut own = Counts::default();
        let now = |own: &Counts| own.since_begin([counts(7, 0)].into_iter());
        own.hear(Epoch(1), &first);
        assert_eq!(now(&own), None, "it has not begun");
        first.tell(Word::Begins(vec![counts(5, 0)]));
        own.hear(Epoch(1), &first);
        assert_eq!(now(&own), Some(Written(vec![2])));
        own.rounds.set_aside(Some(Written(vec![2])));
        first.told(Written(vec![2]), 1).unwrap();
        assert!(first.told(Written(vec![2]), 2).is_err());
        own.hear(Epoch(1), &first);
        assert!(own.rounds.may_forget());
        own.hear(Epoch(9), &second);
        assert_eq!(now(&own), None);
        own.rounds.set_aside(Some(Written(vec![0])));
        assert!(!own.rounds.may_forget(), "the other host has said nothing of this log");
    }

    #[test]
    fn words_that_nobody_takes_are_bounded() {
        let (writes, mut own) = (Writes::default(), Counts::default());
        (0..=2 * MOST_WORDS as u64).for_each(|n| writes.told(Written(vec![n]), 1).unwrap());
        assert_eq!(writes.inbox.len(), MOST_WORDS);
        own.hear(Epoch(1), &writes);
        assert!(writes.inbox.is_empty());
    }
}
