//! Wish for how a VM is to be protected, as its operator wants it.

use understudy_protocol::VmName;
use understudy_replication::membership::GroupMembers;
use understudy_report::{ProtectRequest, WantedReport};

/// Wish for how a VM is to be protected, as its operator wants it.
#[derive(Clone, Debug, PartialEq)]
pub struct Wish {
    /// Request with which it is to be protected.
    pub request: ProtectRequest,
    /// Group with whose VMs it is protected, if not by itself.
    pub group: Option<GroupMembers>,
}

impl Wish {
    /// Wish for a VM by itself.
    pub fn alone(request: ProtectRequest) -> Wish {
        Wish { request, group: None }
    }

    /// The command that asks for it, of a VM and its group.
    pub fn command(&self, vm: &VmName) -> String {
        let options = self.request.options();
        match &self.group {
            None => format!("understudy protect {vm} {options}"),
            Some(GroupMembers { name, vms }) => {
                let vms: Vec<&str> = vms.iter().map(VmName::as_str).collect();
                format!("understudy protect {} --group {name} {options}", vms.join(" "))
            }
        }
    }

    /// The wish for people.
    pub fn report(&self) -> WantedReport {
        WantedReport {
            to: self.request.to.clone(),
            group: self.group.as_ref().map(|group| group.name.clone()),
            mode: self.request.mode,
            hold_console: self.request.hold_console,
        }
    }

    /// The group whose first VM restores the protection of `vm`, if that is another one.
    pub(super) fn followed_by(&self, vm: &VmName) -> Option<&GroupMembers> {
        self.group.as_ref().filter(|group| group.vms.first() != Some(vm))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use understudy_protocol::{Policy, literal};
    use understudy_report::Mode;

    /// Whoever gave the command lost his group, and what he had asked for.
    #[test]
    fn the_command_of_a_wish_asks_for_all_of_it() {
        let command = |wish: Wish| wish.command(&literal("db"));
        let plain = ProtectRequest { to: "b".into(), repair: true, ..Default::default() };
        assert_eq!(command(Wish::alone(plain.clone())), "understudy protect db --to b");
        let group =
            GroupMembers { name: literal("shop"), vms: vec![literal("db"), literal("web")] };
        // A group's policy is in its wish, whoever said it: these numbers only its members' definitions can have.
        let own = Policy::Adaptive { max_epoch_ms: 50, pause_budget_percent: 20 };
        let request =
            ProtectRequest { hold_console: true, repair: false, policy: Some(own), ..plain };
        let wish = Wish { request: request.clone(), group: Some(group) };
        assert_eq!(
            command(wish),
            "understudy protect db web --group shop --to b --hold-console --no-repair"
        );
        let lockstep = ProtectRequest { mode: Mode::Lockstep, ..request };
        assert!(command(Wish::alone(lockstep)).contains("--mode lockstep"));
    }
}
