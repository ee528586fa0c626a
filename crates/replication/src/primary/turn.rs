//! The turn to the other way of keeping up, on the primary.
//!
//! | | |
//! |---|---|
//! | whoever asks | has both hosts start what is needed, then waits: [`Session::turn`] |
//! | the receiving thread | hears the backup's answer |
//! | the capture thread | carries it out, as one epoch (`capture.rs`) |

use super::session::Session;
use crate::messages::ToBackup;
use crate::turn::{Answer, Order, Wanted};
use anyhow::{Context, bail};
use std::sync::Arc;
use std::time::{Duration, Instant};
use understudy_machine::Machine;
use understudy_report::{DiskReads, Mode};
use understudy_threads::Waitable;

/// Time that the backup's QEMU may take to start.
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// Time that it may take until the guest's next epoch ends with the turn, and is committed.
const TURN_TIMEOUT: Duration = Duration::from_secs(60);

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

/// The progress of a turn.
#[derive(Default)]
pub struct Turning {
    state: Waitable<State>,
}

#[derive(Default)]
enum State {
    #[default]
    Idle,
    /// The backup was asked.
    Asked,
    Answered(Answer),
    /// The turn is due, for the capture thread.
    Due(Prepared),
    /// The turn has begun.
    UnderWay,
    /// The turn ended so: without an error the epoch has been captured.
    Ended(anyhow::Result<()>),
}

impl Turning {
    /// Whether the capture thread is to turn.
    pub fn is_due(&self) -> bool {
        matches!(*self.state.lock(), State::Due(_))
    }

    /// Begins the turn that is due, if it still is.
    pub(super) fn begin(&self) -> Option<Prepared> {
        let mut state = self.state.lock();
        match std::mem::take(&mut *state) {
            State::Due(prepared) => {
                *state = State::UnderWay;
                Some(prepared)
            }
            other => {
                *state = other;
                None
            }
        }
    }

    /// The turn has ended.
    pub(super) fn end(&self, result: anyhow::Result<()>) {
        self.set(State::Ended(result));
    }

    /// The backup answers.
    pub(super) fn answered(&self, answer: Answer) {
        let mut state = self.state.lock();
        // It may come too late.
        if matches!(*state, State::Asked) {
            *state = State::Answered(answer);
            self.state.wake();
        }
    }

    fn set(&self, next: State) {
        self.state.change(|state| *state = next);
    }

    /// Takes the state once `is_it`; gives up when `session` is over, or it takes too long.
    fn await_state(
        &self,
        session: &Session,
        timeout: Duration,
        is_it: impl Fn(&State) -> bool,
    ) -> Option<State> {
        let deadline = Instant::now() + timeout;
        loop {
            // Not under the lock: the capture thread takes it under the core's.
            let is_over = session.is_over();
            let mut state = self.state.lock();
            if is_it(&state) {
                return Some(std::mem::take(&mut *state));
            }
            let may_wait = Instant::now() < deadline || matches!(*state, State::UnderWay);
            if !may_wait || is_over {
                *state = State::Idle;
                return None;
            }
            drop(self.state.wait_for(state, GLANCE));
        }
    }
}

impl Session {
    /// Turns to the way that is wanted; the VM stays protected. `next` makes the machine in
    /// which the VM must go on for it, if it must. One caller at a time. Returns when the
    /// backup keeps up in the other way; on an error it does so as before, unless protection
    /// has ended.
    pub fn turn(
        &self,
        wanted: Wanted,
        next: impl FnOnce() -> anyhow::Result<Option<Next>>,
    ) -> anyhow::Result<()> {
        let (mode, disk_reads) = (wanted.mode, wanted.disk_reads);
        let capture = || {
            self.ask_backup(wanted)?;
            if mode == Mode::Lockstep {
                self.note_lockstep().context("cannot note it")?;
            }
            fail::fail_point!("turn-prepared");
            let next = next().context("cannot start another QEMU here")?;
            self.carry_out(Prepared { mode, disk_reads, next })
        };
        let captured = capture();
        // Once it is captured the backup needs what it has prepared, however late the epoch comes.
        if captured.is_err() && !self.is_over() {
            // If it cannot be sent the receiving thread finds out why.
            let _ = self.say(&ToBackup::Turn(Order::Cancel));
        }
        captured?;
        self.await_commit_of_turn()
    }

    /// Notes that the backup is about to write its disks by itself: as long as the turn can be refused.
    /// Noted for nothing, it costs a copy of all of them after a loss.
    fn note_lockstep(&self) -> std::io::Result<()> {
        fail::fail_point!("note-turn", |_| Err(std::io::Error::other("a test says so")));
        self.records.change(&self.vm, |record| record.in_lockstep = true)
    }

    fn ask_backup(&self, wanted: Wanted) -> anyhow::Result<()> {
        self.turning.set(State::Asked);
        self.say(&ToBackup::Turn(Order::Prepare(Box::new(wanted))))?;
        let is_it = |state: &State| matches!(state, State::Answered(_));
        match self.turning.await_state(self, START_TIMEOUT, is_it) {
            Some(State::Answered(Answer::Ready)) => Ok(()),
            Some(State::Answered(Answer::Refused(why))) => bail!("{} refuses: {why}", self.peer),
            _ => bail!("{} did not start another QEMU for it in time", self.peer),
        }
    }

    /// Returns once the epoch is captured that is the turn.
    fn carry_out(&self, prepared: Prepared) -> anyhow::Result<()> {
        self.turning.set(State::Due(prepared));
        self.machine().doorbell().ring();
        let is_it = |state: &State| matches!(state, State::Ended(_));
        match self.turning.await_state(self, TURN_TIMEOUT, is_it) {
            Some(State::Ended(result)) => result,
            _ if self.is_over() => bail!("protection has ended meanwhile"),
            _ => bail!("no epoch came to its end in {} s", TURN_TIMEOUT.as_secs()),
        }
    }

    fn await_commit_of_turn(&self) -> anyhow::Result<()> {
        let epoch = self.turned();
        let committed = self.wait_for_phase(TURN_TIMEOUT, |phase| {
            self.has_committed(epoch) || *phase != understudy_protocol::PrimaryPhase::Protected
        });
        match committed {
            Ok(_) if self.has_committed(epoch) => Ok(()),
            Ok(phase) | Err(phase) => bail!("the turn is not committed: {phase:?}"),
        }
    }
}
