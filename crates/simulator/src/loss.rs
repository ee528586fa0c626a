//! The loss of the VM: who could go on with it, and what took it from the last one that could:
//! something that failed there, or what an operator wanted. No decision of the hosts ever may.

use crate::host::{HostId, Role};
use crate::world::World;
use understudy_protocol::{BackupPhase, Generation};

impl World {
    /// Excuses a loss: what has just happened may take the VM from a host.
    pub(crate) fn excuse(&mut self, cause: impl Into<String>) {
        self.excuse = Some(cause.into());
    }

    /// Checks after each event that whoever loses the VM has an excuse.
    pub(crate) fn check_loss(&mut self) {
        let excuse = self.excuse.take();
        let carried = (0..self.hosts.len()).map(HostId).any(|host| self.carries(host));
        let was = std::mem::replace(&mut self.carried, carried);
        if !was || carried {
            return;
        }
        match excuse {
            Some(cause) => {
                self.coverage.losses += 1;
                self.note_world(|| format!("the VM is lost: {cause}"));
            }
            None => self.violation("the VM is lost, and nothing has failed just now".to_owned()),
        }
    }

    /// Whether a host has the VM as it is, and may go on with it: now, or once it gets it back.
    fn carries(&self, id: HostId) -> bool {
        match &self.hosts[id.0].role {
            // Or it was given back to it, and the winner's record came late.
            Role::Primary(running) => {
                let owns = self.oracle.ran_last() == id || self.arbiter.owner == id;
                owns || self.gets_back(id, running.generation)
            }
            Role::Backup(standby) => {
                let sound = !standby.broken && !standby.lost_writes && !standby.log.is_spoilt();
                let won = *standby.core.phase() == BackupPhase::Live;
                sound && (won || self.is_entitled(id, standby))
            }
            Role::Idle | Role::Fenced => false,
        }
    }

    /// Whether its winner has started nothing yet, whatever its record says: one that cannot hands the
    /// VM back.
    fn gets_back(&self, id: HostId, generation: Generation) -> bool {
        let keeps = |role: &Role| match role {
            Role::Backup(standby) => {
                let phase = standby.core.phase();
                let won = matches!(phase, BackupPhase::Live | BackupPhase::HandingBack(_));
                won && standby.primary == id && standby.core.generation() == generation.next()
            }
            _ => false,
        };
        self.hosts.iter().any(|host| keeps(&host.role))
    }
}
