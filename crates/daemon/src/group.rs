//! Groups: VMs that are protected, taken over and fenced as one (Remus, section 5).
//!
//! All members run on one host and have one backup. Each keeps its own record at
//! the arbiter; the group is owned by whoever owns all of them, won in one order,
//! so that the first record decides between two hosts that contest the group.

use crate::host::Host;
use crate::protection::check_held_console;
use crate::vm::{PrimaryVm, Vm};
use std::sync::Arc;
use tracing::warn;
use understudy_protocol::{GroupName, VmName};
use understudy_protocol::{Output, Policy};
use understudy_replication::membership::{MOST_MEMBERS, Member, Membership};
use understudy_replication::primary;
use understudy_report::error::{ErrorKind, HostError};
use understudy_report::events::EventKind;
use understudy_report::{DiskReads, GroupRequest, Mode, ProtectRequest, VmStatus};
use understudy_threads::lock;

impl Host {
    /// Starts protecting VMs of this host as one group; returns when the peer has
    /// accepted all of them and the first synchronisation runs.
    pub fn protect_group(
        self: &Arc<Self>,
        name: &GroupName,
        request: GroupRequest,
    ) -> Result<Vec<VmStatus>, HostError> {
        let _protecting = self.protecting.lock();
        check_request(name, &request)?;
        let vms: Vec<Arc<PrimaryVm>> =
            request.vms.iter().map(|vm| self.own_member(name, vm)).collect::<Result<_, _>>()?;
        let _none_is_repaired: Vec<_> = vms.iter().map(|vm| lock(&vm.protecting)).collect();
        vms.iter().try_for_each(|vm| self.check_protectable(vm))?;
        if request.hold_console {
            let check =
                |vm: &Arc<PrimaryVm>| check_held_console(vm.machine().definition(), Output::Held);
            vms.iter().try_for_each(check)?;
        }
        vms.iter().try_for_each(|vm| self.make_fit(vm, Mode::Checkpoint))?;
        let policy = common_policy(&vms, request.policy)?;
        // A group that lost its protection is left to the operator: repair knows
        // single VMs only.
        let request = ProtectRequest {
            to: request.to,
            mode: Mode::Checkpoint,
            disk_reads: DiskReads::default(),
            policy: Some(policy),
            encoding: request.encoding,
            repair: false,
            output: Output::Held,
            hold_console: request.hold_console,
        };
        let plans = vms
            .iter()
            .map(|vm| self.plan_protection(vm, &request))
            .collect::<Result<Vec<_>, _>>()?;
        let member = |(vm, plan): (&Arc<PrimaryVm>, &primary::Plan)| Member {
            vm: vm.name().to_owned(),
            generation: plan.generation,
        };
        let members = vms.iter().zip(&plans).map(member).collect();
        let membership = Membership { name: Some(name.to_owned()), members };
        let bounds = &self.config.detection;
        let group = primary::Group::new(membership, &plans[0].peer, bounds, Output::Held);
        for (begun, (vm, plan)) in vms.iter().zip(plans).enumerate() {
            if let Err(error) = self.begin_protection(vm, plan, (group.clone(), begun)) {
                self.abandon(&vms[..begun]);
                return Err(error);
            }
        }
        for vm in &vms {
            vm.repairer.set_wish(Some(request.clone()));
            // A group is protected as a whole, or not at all.
            self.note_wish(vm.name(), None);
            vm.repairer.ended();
        }
        Ok(vms.iter().map(|vm| Vm::Primary(vm.clone()).status()).collect())
    }

    /// A member, which must run here.
    fn own_member(&self, group: &GroupName, vm: &VmName) -> Result<Arc<PrimaryVm>, HostError> {
        let explain = |error: HostError| {
            let message = format!(
                "group {group}: {error}; all VMs of a group must run on the host that protects it"
            );
            HostError::new(error.kind, message)
        };
        self.going_primary(vm).map_err(explain)
    }

    /// One member was refused: the others stay as they were.
    fn abandon(&self, begun: &[Arc<PrimaryVm>]) {
        for vm in begun {
            if let Err(error) = self.end_protection(vm) {
                warn!(vm = %vm.name(), "{error}");
            }
            vm.accept_unprotected();
        }
    }

    /// The other members of a VM's group on this host.
    pub(crate) fn fellows(&self, vm: &PrimaryVm) -> Vec<Arc<PrimaryVm>> {
        let own = vm.name();
        let vms = self.vms.lock();
        let others = vm.fellow_names().into_iter().filter(|name| name != own);
        let primary = |name: VmName| match vms.get(&name) {
            Some(Vm::Primary(other)) if other.is_fellow(vm) => Some(other.clone()),
            _ => None,
        };
        others.filter_map(primary).collect()
    }

    /// A VM leaves its host for good: the rest of its group is not protected any
    /// more, which nobody asked for.
    pub(crate) fn leave_group(&self, vm: &PrimaryVm, fellows: &[Arc<PrimaryVm>]) {
        let name = vm.name();
        // One that is still protected says itself how that goes on.
        for fellow in fellows.iter().filter(|fellow| fellow.active_session().is_none()) {
            let reason = format!(
                "{name}, of the same group, was stopped, which ended the group; not protected \
                 until `understudy protect`"
            );
            fellow.events.record(EventKind::ProtectionLost { reason: reason.clone() });
            fellow.degrade(reason);
        }
    }
}

fn check_request(name: &GroupName, request: &GroupRequest) -> Result<(), HostError> {
    let invalid = |message: String| Err(HostError::new(ErrorKind::Invalid, message));
    if !(2..=MOST_MEMBERS).contains(&request.vms.len()) {
        return invalid(format!(
            "group {name}: a group has at least two VMs, at most {MOST_MEMBERS}"
        ));
    }
    let twice = request.vms.iter().enumerate().find(|(i, vm)| request.vms[..*i].contains(vm));
    match twice {
        Some((_, vm)) => invalid(format!("group {name}: {vm} is named twice")),
        None => Ok(()),
    }
}

/// The group has one policy: the one asked for, or what all definitions say.
fn common_policy(vms: &[Arc<PrimaryVm>], asked: Option<Policy>) -> Result<Policy, HostError> {
    let mut policies = vms.iter().map(|vm| vm.machine().definition().policy.unwrap_or_default());
    let first = policies.next().unwrap_or_default();
    match asked {
        Some(policy) => Ok(policy),
        None if policies.all(|policy| policy == first) => Ok(first),
        None => {
            let message = "the members' definitions name different checkpoint policies, and a \
                           group has one: choose it with --policy";
            Err(HostError::new(ErrorKind::Invalid, message.to_owned()))
        }
    }
}
