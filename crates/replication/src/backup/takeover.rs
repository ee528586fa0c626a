//! The end of a backup: the VM goes on here, or is forgotten.

mod clock;

pub use clock::{Clock, Stage};

use super::apply::Checkpoint;
use super::session::Session;
use crate::clock::now;
use crate::lockstep::backup::{self as lockstep, Following};
use crate::sync::lock;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use tracing::error;
use understudy_machine::Machine;
use understudy_protocol::wire::Kind;
use understudy_protocol::{Epoch, Generation};
use understudy_report::{ProtectRequest, TakeoverReport};

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
    /// behind it.
    pub(super) fn take_over(
        &self,
        checkpoint: anyhow::Result<Checkpoint>,
        log: Option<&Arc<Following>>,
        generation: Generation,
        reason: String,
    ) -> Outcome {
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
        let result =
            self.group.all_or_none(ready).and_then(|from| self.go_live(&from, log.is_some()));
        self.close(Some(generation));
        let (machine, wish) = (self.machine(), lock(&self.wish).clone());
        match result {
            Ok(takeover) => Outcome::Live { machine, wish, generation, reason, takeover },
            Err(error) => self.failed(generation, &error),
        }
    }

    /// The VM is not this host's any more.
    pub(super) fn forget(&self) -> Outcome {
        self.keeper.end();
        self.machine().halt();
        let _ = self.data.send_signal(Kind::StoodDown, Epoch(0));
        self.parting.await_hang_up(&self.changed);
        self.close(None);
        Outcome::Discarded
    }

    /// Starts the guest, and takes up its conversations where the primary left them.
    fn go_live(&self, from: &Checkpoint, in_lockstep: bool) -> anyhow::Result<TakeoverReport> {
        self.clock.reach(Stage::Activated);
        let resent_frames = match in_lockstep {
            true => lockstep::go_live(&self.machine())?,
            false => {
                let age = now() - from.taken;
                self.machine().go_live(&from.device_state, age, &self.outbound.take())?
            }
        };
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
            let _ = self.data.send_signal(Kind::Live, Epoch(generation.0));
        }
        self.close_connections();
        self.waiting.close();
    }
}
