//! The end of a backup: the VM goes on here, or is forgotten.

mod clock;

pub use clock::{Clock, Stage};

use super::activation::Readiness;
use super::apply::Checkpoint;
use super::failure::OwnFailure;
use super::frames::Frames;
use super::session::Session;
use crate::clock::now;
use crate::lockstep::backup::{self as lockstep, Following, NoEnd};
use crate::moments::pass;
use std::sync::Arc;
use understudy_machine::Machine;
use understudy_protocol::Generation;
use understudy_report::{ProtectRequest, TakeoverReport};
use understudy_session::backup::Ending;
use understudy_threads::lock;

/// The end of a session.
pub enum Outcome {
    /// The VM runs here now.
    Live {
        /// The machine that it runs on.
        machine: Arc<Machine>,
        /// Request of its operator.
        wish: Option<ProtectRequest>,
        /// The generation of ownership.
        generation: Generation,
        /// Reason, for people.
        reason: String,
        /// Time that it took.
        takeover: TakeoverReport,
    },
    /// The VM owns nothing here any more.
    Discarded,
    /// This host won the VM, could not start it, and has handed it back.
    Returned {
        /// Reason: what went wrong.
        reason: String,
    },
    /// This host owns the VM and could not start it.
    Failed {
        /// The generation of ownership.
        generation: Generation,
        /// Reason: what went wrong.
        reason: String,
    },
}

impl Session {
    /// The VM is this host's: what there is of a log is executed.
    pub(super) fn complete(&self, log: Option<&Arc<Following>>) -> anyhow::Result<()> {
        // The guest tells of none of its writes.
        self.end_kept();
        if let Some(following) = log {
            self.execute_rest(following)?;
        }
        self.clock.reach(Stage::Executed);
        pass("before-activation");
        Ok(())
    }

    /// Executes what is left of a log that has ended.
    pub(super) fn execute_rest(&self, following: &Following) -> Result<(), OwnFailure> {
        lockstep::await_end(&self.machine(), following).map_err(|no_end| match no_end {
            NoEnd::Diverged(reason) => {
                OwnFailure::Mirror(self.with_evidence(Some(following), &reason))
            }
            NoEnd::Other(reason) => OwnFailure::Other(reason),
        })
    }

    /// Ends a copy that this host has won and does not start.
    pub(super) fn halt(&self) {
        // Its guest may have run for a moment, unseen.
        self.machine().halt();
    }

    /// The VM is not this host's any more. Whether somebody changes its mirrors from here on the lists of their changes
    /// tell, if they were whole.
    pub(super) fn forget(&self, ready: Option<Readiness>) {
        fail::fail_point!("forget");
        self.end_kept();
        let machine = self.machine();
        machine.halt();
        let changes = ready.into_iter().flat_map(|ready| ready.changes);
        for (disk, changes) in machine.disks().iter().zip(changes) {
            disk.set_changes(Some(changes));
            disk.seal_changes();
            // Its end would seal it again, with what somebody has changed by then.
            disk.set_changes(None);
        }
    }

    /// Starts the guest; nothing leaves it yet.
    pub(super) fn start(&self, from: &Checkpoint, in_lockstep: bool) -> anyhow::Result<()> {
        self.clock.reach(Stage::Activated);
        fail::fail_point!("before-start", |_| anyhow::bail!("a test says so"));
        match in_lockstep {
            true => lockstep::start(&self.machine()),
            false => self.machine().start_standby(&from.device_state, now() - from.taken),
        }
    }

    /// Takes the guest's conversations up where the primary left them.
    pub(super) fn go_live(&self, from: &Checkpoint, in_lockstep: bool) -> TakeoverReport {
        let before = if in_lockstep { Vec::new() } else { self.frames(Frames::take_sent) };
        let resent_frames =
            self.machine().open_network(&self.frames(|frames| frames.stations()), &before);
        self.clock.reach(Stage::Live);
        let injected_frames = self.inject_kept();
        let lag_ms = self.following().map_or(0.0, |following| following.lag_at_failure_ms());
        let report = self.clock.report();
        let outage_ms = match in_lockstep {
            true => lag_ms + report.total_ms,
            false => (now() - from.taken).as_secs_f64() * 1e3,
        };
        let planned = self.group.core().standby.is_planned();
        TakeoverReport { planned, lag_ms, outage_ms, injected_frames, resent_frames, ..report }
    }

    /// The outcome of the session; `takeover` is how long that took, if the VM runs here.
    pub(super) fn outcome(&self, ending: Ending, takeover: Option<TakeoverReport>) -> Outcome {
        self.forget_other();
        self.waiting.close();
        match (ending, takeover) {
            (Ending::Live(generation, reason), Some(takeover)) => {
                let (machine, wish) = {
                    let present = lock(&self.present);
                    (present.machine.clone(), present.wish.clone())
                };
                let generation = self.group.generation(self, generation);
                Outcome::Live { machine, wish, generation, reason, takeover }
            }
            (Ending::Live(generation, _), None) => {
                self.failed(generation, "its guest was never started".to_owned())
            }
            (Ending::Failed(generation, reason), _) => self.failed(generation, reason),
            (Ending::Returned(reason), _) => Outcome::Returned { reason },
            (Ending::Discarded, _) => Outcome::Discarded,
        }
    }

    fn failed(&self, generation: Generation, reason: String) -> Outcome {
        self.machine().halt();
        Outcome::Failed { generation: self.group.generation(self, generation), reason }
    }
}
