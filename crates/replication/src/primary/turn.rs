//! The turn to the other way of keeping up, on the primary.
//!
//! | | |
//! |---|---|
//! | whoever asks | has both hosts start what is needed, then waits: [`Session::turn`] |
//! | the receiving thread | hears the backup's answer |
//! | the capture thread | carries it out, as one epoch (`capture.rs`) |

use super::session::Session;
use crate::clock;
use crate::messages::ToBackup;
use crate::turn::{Answer, Order, Wanted};
use anyhow::{Context, anyhow};
use std::sync::Arc;
use std::time::Duration;
use understudy_machine::Machine;
use understudy_report::{DiskReads, Mode};
use understudy_session::primary::{Lead, Look, NoTurn, TURN_PATIENCE};

/// Time between two looks of a waiter whether the session lives.
const GLANCE: Duration = Duration::from_millis(50);

/// All that is there for the turn.
pub struct Prepared {
    /// The other way.
    pub mode: Mode,
    /// Source, in lockstep, from which the backup gets what its guest reads.
    pub disk_reads: DiskReads,
    /// The VM must be moved into this machine first.
    pub next: Option<Next>,
}

/// Callback for the machine that has the guest now.
pub type Adopt = Box<dyn FnOnce(&Arc<Machine>) + Send>;

/// A machine in which the VM is to go on.
pub struct Next {
    /// Machine that has all but the guest.
    pub machine: Arc<Machine>,
    /// Work that is left to do when it has the guest.
    pub adopt: Adopt,
}

impl Session {
    /// Turns to the way that is wanted; the VM stays protected. `next` makes the machine in
    /// which the VM must go on for it, if it must. One caller at a time. Returns when the
    /// backup keeps up in the other way. On an error it does so as before, unless protection has ended, or
    /// the turn was captured, whose commit then took too long: that is carried out all the same.
    pub fn turn(
        &self,
        wanted: Wanted,
        next: impl FnOnce() -> anyhow::Result<Option<Next>>,
    ) -> anyhow::Result<()> {
        let Err(why) = self.try_to_turn(wanted, next) else { return Ok(()) };
        self.present.change(|present| present.turning.give_up());
        if why.is_called_off() && !self.is_over() {
            // If it cannot be sent the receiving thread finds out why.
            let _ = self.say(&ToBackup::Turn(Order::Cancel));
        }
        Err(self.worded(why))
    }

    fn try_to_turn(
        &self,
        wanted: Wanted,
        next: impl FnOnce() -> anyhow::Result<Option<Next>>,
    ) -> Result<(), NoTurn> {
        let (mode, disk_reads) = (wanted.mode, wanted.disk_reads);
        self.ask_backup(wanted)?;
        let prepared = self.prepare_here(mode, next);
        let next = prepared.map_err(|error| NoTurn::Failed(format!("{error:#}")))?;
        let prepared = Prepared { mode, disk_reads, next };
        self.present.change(|present| present.turning.prepared(clock::now(), prepared));
        self.machine().doorbell().ring();
        self.await_look()
    }

    fn ask_backup(&self, wanted: Wanted) -> Result<(), NoTurn> {
        let order = ToBackup::Turn(Order::Prepare(Box::new(wanted)));
        {
            let core = self.group.core();
            self.present.lock().turning.ask(clock::now(), &core)?;
        }
        self.say(&order).map_err(|error| NoTurn::Failed(error.to_string()))?;
        self.await_look()
    }

    fn prepare_here(
        &self,
        mode: Mode,
        next: impl FnOnce() -> anyhow::Result<Option<Next>>,
    ) -> anyhow::Result<Option<Next>> {
        if mode == Mode::Lockstep {
            self.note_lockstep().context("cannot note it")?;
        }
        fail::fail_point!("turn-prepared");
        next().context("cannot start another QEMU here")
    }

    /// Notes that the backup is about to write its disks by itself: as long as the turn can be refused.
    /// Noted for nothing, it costs a copy of all of them after a loss.
    fn note_lockstep(&self) -> std::io::Result<()> {
        fail::fail_point!("note-turn", |_| Err(std::io::Error::other("a test says so")));
        self.records.change(&self.vm, |record| record.in_lockstep = true)
    }

    /// Waits until the backup is ready, or until it keeps up in the other way.
    fn await_look(&self) -> Result<(), NoTurn> {
        loop {
            let core = self.group.core();
            let mut present = self.present.lock();
            let look = present.turning.look(clock::now(), &core);
            drop(core);
            match look {
                Look::Ready | Look::Committed => return Ok(()),
                Look::Ended { why, left } => {
                    // Not under the locks: that ends a QEMU.
                    drop(present);
                    drop(left);
                    return Err(why);
                }
                Look::Wait => drop(self.present.wait_for(present, GLANCE)),
            }
        }
    }

    /// The backup answers an order.
    pub(super) fn turn_answered(&self, answer: Answer) {
        let answer = match answer {
            Answer::Ready => Ok(()),
            Answer::Refused(why) => Err(why),
        };
        self.present.change(|present| present.turning.answered(answer));
    }

    /// Whether the epoch that runs is to end with a turn.
    pub fn may_turn(&self) -> bool {
        self.is_turn_due(&self.group.core())
    }

    /// The same for a caller that holds the core's lock.
    pub(super) fn is_turn_due(&self, core: &Lead) -> bool {
        let present = self.present.lock();
        present.turning.may_begin(core, &present.way)
    }

    fn worded(&self, why: NoTurn) -> anyhow::Error {
        let (peer, patience) = (&self.peer, TURN_PATIENCE.as_secs());
        match why {
            NoTurn::Early(why) => anyhow!("{why}: try again in a while"),
            NoTurn::Refused(why) => anyhow!("{peer} refuses: {why}"),
            NoTurn::Unanswered => anyhow!("{peer} did not start another QEMU for it in time"),
            NoTurn::NotCaptured => anyhow!("no epoch came to its end in {patience} s"),
            NoTurn::Failed(why) => anyhow!(why),
            NoTurn::Over => anyhow!("protection has ended meanwhile"),
            NoTurn::Uncommitted(phase) => anyhow!("the turn is not committed: {phase}"),
        }
    }
}
