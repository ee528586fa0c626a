//! The place of a VM on its host, which changes while it is protected.

use super::activity::{Used, Watch};
use super::awaited::Awaited;
use super::session::Session;
use super::turn::Prepared;
use crate::lockstep::primary::Recording;
use anyhow::bail;
use std::sync::Arc;
use understudy_machine::Machine;
use understudy_protocol::{Activity, PrimaryPhase};
use understudy_session::primary::{Turning, Way};

/// The place of the VM on this host, how its backup keeps up with it, and what that is asked beside
/// the epochs. Nobody waits for anything else while he has its lock, which comes after the core's:
/// under that the machine and the way change.
pub(super) struct Present {
    /// Another one after a succession.
    pub machine: Arc<Machine>,
    /// Watch of what the guest does in it, and had done when it went on after its last pause.
    pub watch: Arc<Watch>,
    resumed: Used,
    /// Its log, in lockstep.
    pub recording: Option<Arc<Recording>>,
    /// The way in which the backup keeps up, and since when.
    pub way: Way,
    /// The change of it, for which somebody waits.
    pub turning: Turning<Prepared>,
    pub awaited: Awaited,
}

impl Present {
    /// The place where it is when protection begins.
    pub fn new(watch: Watch, machine: Arc<Machine>, recording: Option<Arc<Recording>>) -> Present {
        let resumed = watch.used();
        let way = Way::at_first(recording.is_some());
        let (turning, awaited) = (Turning::default(), Awaited::default());
        Present { machine, watch: Arc::new(watch), resumed, recording, way, turning, awaited }
    }
}

impl Session {
    /// The machine that the VM is on now.
    pub fn machine(&self) -> Arc<Machine> {
        self.present.lock().machine.clone()
    }

    /// The activity of the guest.
    pub(super) fn activity(&self) -> Activity {
        let (machine, watch, resumed) = {
            let present = self.present.lock();
            (present.machine.clone(), present.watch.clone(), present.resumed)
        };
        watch.activity(&machine, resumed)
    }

    /// The guest runs again after a pause.
    pub(super) fn note_resumed(&self) {
        let mut present = self.present.lock();
        present.resumed = present.watch.used();
    }

    /// The VM goes on in this machine; on an error it does not run.
    pub(super) fn moved(&self, next: &Arc<Machine>) -> anyhow::Result<()> {
        let watch = Watch::new(next)?;
        // Under the core's lock: whoever is told to halt the machine halts this one.
        let core = self.group.core();
        {
            let mut present = self.present.lock();
            (present.machine, present.resumed) = (next.clone(), watch.used());
            present.watch = Arc::new(watch);
        }
        if let PrimaryPhase::Halted(reason) = core.phase() {
            next.halt();
            bail!("another host has the VM: {reason}");
        }
        Ok(())
    }
}
