//! The events that a session's phases tell its VM's log.

use super::session::Session;
use crate::resync::Basis;
use understudy_protocol::{Output, Primary, PrimaryPhase};
use understudy_report::events::EventKind;

impl Session {
    /// Records what a new phase means; how protection ended, the host tells.
    pub(super) fn tell_phase(&self, before: &PrimaryPhase, core: &Primary) {
        match core.phase() {
            PrimaryPhase::Protected if *before == PrimaryPhase::Syncing => {
                self.tell_copied();
                let peer = self.peer.clone();
                self.events.record(match core.output() {
                    Output::Held => EventKind::Protected { peer },
                    Output::Unheld => EventKind::Unheld { peer },
                });
            }
            PrimaryPhase::Contesting(reason) => {
                self.events.record(EventKind::Contested { reason: reason.clone() });
            }
            _ => {}
        }
    }

    fn tell_copied(&self) {
        if self.machine().disks().is_empty() {
            return;
        }
        let (bytes, elapsed) = self.progress.disks();
        let full_because = match &self.basis {
            Basis::Full(why) => Some(why.clone()),
            Basis::Changes(_) => None,
        };
        let seconds = elapsed.as_secs_f64();
        self.events.record(EventKind::Copied { bytes, seconds, full_because });
    }
}
