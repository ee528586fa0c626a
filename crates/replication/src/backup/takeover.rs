//! The end of a backup: the VM goes on here, or is forgotten.

mod clock;

pub use clock::{Clock, Stage};

use super::apply::Checkpoint;
use super::copy::Copy;
use super::session::Session;
use crate::clock::now;
use crate::lockstep::backup::{self as lockstep, Following};
use crate::messages::ToPrimary;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tracing::error;
use understudy_disk::Mirror;
use understudy_machine::Machine;
use understudy_protocol::{BackupEvent, Generation};
use understudy_report::{ProtectRequest, TakeoverReport};
use understudy_threads::lock;

/// How a session ended.
pub enum Outcome {
    /// The VM runs here now.
    Live {
        /// The machine that it runs on.
        machine: Arc<Machine>,
        /// What its operator asked for.
        wish: Option<ProtectRequest>,
        /// The generation of ownership.
        generation: Generation,
        /// Why, for people.
        reason: String,
        /// How long it took.
        takeover: TakeoverReport,
    },
    /// The VM owns nothing here any more.
    Discarded,
    /// This host won the VM, could not start it, and has handed it back.
    Returned {
        /// What went wrong.
        reason: String,
    },
    /// This host owns the VM and could not start it.
    Failed {
        /// The generation of ownership.
        generation: Generation,
        /// What went wrong.
        reason: String,
    },
}

impl Session {
    /// The VM is this host's. `checkpoint` is the end of the last epoch, `log` what is executed
    /// behind it. An error says why it cannot be started; nothing has left it.
    pub(super) fn take_over(
        &self,
        checkpoint: anyhow::Result<Checkpoint>,
        log: Option<&Arc<Following>>,
        generation: Generation,
        reason: String,
    ) -> anyhow::Result<Outcome> {
        // The guest tells of none of its writes.
        self.keeper.end();
        let ready = checkpoint.and_then(|checkpoint| {
            if let Some(following) = log {
                lockstep::await_end(&self.machine(), following)?;
            }
            self.clock.reach(Stage::Executed);
            self.activate(generation)?;
            Ok(checkpoint)
        });
        let from = self.group.all_or_none(ready)?;
        let result = match self.start(&from, log.is_some()) {
            // Others of a group may run by now, which is owned as a whole.
            Err(error) if !self.group.is_shared() => return Err(error),
            started => started.and_then(|()| self.go_live(&from, log.is_some())),
        };
        self.close(Some(generation));
        let (machine, wish) = (self.machine(), lock(&self.wish).clone());
        Ok(match result {
            Ok(takeover) => Outcome::Live { machine, wish, generation, reason, takeover },
            Err(error) => self.failed(generation, &error),
        })
    }

    /// Ends a copy that this host has won and could not start: the former primary is to have it
    /// back.
    pub(super) fn not_started(&self, error: anyhow::Error) -> Copy<Vec<Mirror>> {
        error!(vm = %self.vm, "cannot go live: {error:#}");
        // Its guest may have run for a moment, unseen.
        self.machine().halt();
        self.event(BackupEvent::NotStarted(format!("{error:#}")), None);
        Copy::Failed(error)
    }

    /// The VM is not this host's any more.
    pub(super) fn forget(&self, copy: &Copy<Vec<Mirror>>) -> Outcome {
        self.keeper.end();
        self.machine().halt();
        self.say(&ToPrimary::StoodDown);
        self.parting.await_hang_up(&self.changed);
        self.close(None);
        match (self.clock.was_granted(), copy) {
            (true, Copy::Failed(error)) => Outcome::Returned { reason: format!("{error:#}") },
            _ => Outcome::Discarded,
        }
    }

    /// Starts the guest; nothing leaves it yet.
    fn start(&self, from: &Checkpoint, in_lockstep: bool) -> anyhow::Result<()> {
        self.clock.reach(Stage::Activated);
        fail::fail_point!("before-start", |_| anyhow::bail!("a test says so"));
        match in_lockstep {
            true => lockstep::start(&self.machine()),
            false => self.machine().start_standby(&from.device_state, now() - from.taken),
        }
    }

    /// Takes the guest's conversations up where the primary left them.
    fn go_live(&self, from: &Checkpoint, in_lockstep: bool) -> anyhow::Result<TakeoverReport> {
        let before = if in_lockstep { Vec::new() } else { self.outbound.take() };
        let resent_frames = self.machine().open_network(&before)?;
        self.clock.reach(Stage::Live);
        let injected_frames = self.inbound.inject(&self.machine());
        let lag_ms = self.following().map_or(0.0, |following| following.lag_at_failure_ms());
        let report = self.clock.report();
        let outage_ms = match in_lockstep {
            true => lag_ms + report.total_ms,
            false => (now() - from.taken).as_secs_f64() * 1e3,
        };
        let planned = self.planned.load(Ordering::Acquire);
        Ok(TakeoverReport { planned, lag_ms, outage_ms, injected_frames, resent_frames, ..report })
    }

    fn failed(&self, generation: Generation, error: &anyhow::Error) -> Outcome {
        error!(vm = %self.vm, "cannot go live: {error:#}");
        self.machine().halt();
        Outcome::Failed { generation, reason: format!("{error:#}") }
    }

    /// Tells the primary where the VM lives now, and ends all connections.
    fn close(&self, live: Option<Generation>) {
        self.forget_other();
        if let Some(generation) = live {
            self.say(&ToPrimary::Live(generation));
        }
        self.close_connections();
        self.waiting.close();
    }
}
