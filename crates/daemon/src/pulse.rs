//! The pulse: whether the daemon as a whole is alive, for a service manager's watchdog.

use crate::host::Host;
use crate::vm::Vm;

/// Counts of what a living daemon has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pulse {
    /// VMs that it runs itself.
    pub running: usize,
    /// VMs of other hosts that it backs up itself.
    pub backed_up: usize,
    /// VMs that keepers of this host run, or back up.
    pub kept: usize,
}

impl Host {
    /// Returns once it has had each lock that every request, every VM and every connection of
    /// another host needs. No VM's own: one that hangs is its own affair, and must not have the
    /// daemon ended with all others.
    pub fn pulse(&self) -> Pulse {
        fail::fail_point!("pulse");
        self.lobby.end_overdue();
        // As counted a moment ago: no storage must be waited for here.
        let none = Pulse { kept: self.vms.look(|all| all.findings.kept.len()), ..Pulse::default() };
        let count = |pulse: Pulse, vm: &Vm| match vm {
            Vm::Primary(_) => Pulse { running: pulse.running + 1, ..pulse },
            Vm::Backup(_) => Pulse { backed_up: pulse.backed_up + 1, ..pulse },
            Vm::Fenced(_) => pulse,
        };
        // Without keeping any of them: whoever is the last to have one ends it.
        self.vms.look_at_all(|vms| vms.values().fold(none, count))
    }
}
