//! Groups: VMs that are protected, taken over and fenced as one (Remus, section 5).
//!
//! All members run on one host and have one backup. Each keeps its own record at
//! the arbiter; the group is owned by whoever owns all of them, won in one order,
//! so that the first record decides between two hosts that contest the group.

use crate::host::Host;
use crate::protection::check_held_console;
use crate::repair::{self, Wish};
use crate::vm::{PrimaryVm, Vm};
use std::sync::Arc;
use tracing::warn;
use understudy_protocol::{GroupName, VmName};
use understudy_protocol::{Output, Policy};
use understudy_replication::membership::{GroupMembers, MOST_MEMBERS, Member, Membership};
use understudy_replication::moments::pass;
use understudy_replication::primary;
use understudy_report::error::{ErrorKind, HostError};
use understudy_report::events::EventKind;
use understudy_report::{DiskReads, GroupRequest, Mode, ProtectRequest, VmStatus};
use understudy_threads::{MutexGuard, lock};

impl Host {
    /// Starts protecting VMs of this host as one group; returns when the peer has
    /// accepted all of them and the first synchronisation runs.
    pub fn protect_group(
        self: &Arc<Self>,
        name: &GroupName,
        request: GroupRequest,
    ) -> Result<Vec<VmStatus>, HostError> {
        check_request(name, &request)?;
        let members = GroupMembers { name: name.to_owned(), vms: request.vms };
        let vms = self.own_members(&members)?;
        let _none_is_repaired = hold(&vms);
        // The operator decides: nothing else is tried meanwhile.
        vms.iter().for_each(|vm| vm.repairer().ended());
        let formers: Vec<GroupMembers> = vms
            .iter()
            .filter_map(|vm| vm.repairer().group())
            .filter(|group| *group != members)
            .collect();
        let begun = common_policy(&vms, request.policy).and_then(|policy| {
            let request = ProtectRequest {
                to: request.to,
                mode: Mode::Checkpoint,
                disk_reads: DiskReads::default(),
                policy: Some(policy),
                encoding: request.encoding,
                repair: request.repair,
                output: Output::Held,
                hold_console: request.hold_console,
            };
            self.begin_group(&vms, &members, request)
        });
        if let Err(error) = begun {
            for vm in vms.iter().filter(|vm| vm.is_degraded()) {
                repair::restore(self, vm, &error.to_string(), None);
            }
            return Err(error);
        }
        for former in formers {
            self.dissolve(&former, name, "has taken some of its VMs");
        }
        Ok(vms.iter().map(|vm| Vm::Primary(vm.clone()).status()).collect())
    }

    /// Protects the group of its leader to another host, as its operator wished.
    pub(crate) fn protect_group_again(
        self: &Arc<Self>,
        leader: &Arc<PrimaryVm>,
        to: &str,
    ) -> Result<(), HostError> {
        let wish = self.still_wanted(leader)?;
        let Some(members) = &wish.group else {
            let message = format!("{} is in no group any more", leader.name());
            return Err(HostError::new(ErrorKind::Conflict, message));
        };
        let vms = self.own_members(members)?;
        pass("protect-group-again");
        let _nobody_else = hold(&vms);
        // Before all of them were held the operator may have decided otherwise.
        if self.still_wanted(leader)? != wish {
            let message = format!("{} is to be protected in another way by now", leader.name());
            return Err(HostError::new(ErrorKind::Conflict, message));
        }
        self.begin_group(&vms, members, ProtectRequest { to: to.to_owned(), ..wish.request })
    }

    /// Begins the protection of all members, or of none.
    fn begin_group(
        self: &Arc<Self>,
        vms: &[Arc<PrimaryVm>],
        members: &GroupMembers,
        request: ProtectRequest,
    ) -> Result<(), HostError> {
        vms.iter().try_for_each(|vm| self.check_protectable(vm))?;
        if request.hold_console {
            let check =
                |vm: &Arc<PrimaryVm>| check_held_console(vm.machine().definition(), Output::Held);
            vms.iter().try_for_each(check)?;
        }
        vms.iter().try_for_each(|vm| self.make_fit(vm, Mode::Checkpoint))?;
        let plans = vms
            .iter()
            .map(|vm| self.plan_protection(vm, &request))
            .collect::<Result<Vec<_>, _>>()?;
        let member = |(vm, plan): (&Arc<PrimaryVm>, &primary::Plan)| Member {
            vm: vm.name().to_owned(),
            generation: plan.generation,
        };
        let membership = Membership {
            name: Some(members.name.clone()),
            members: vms.iter().zip(&plans).map(member).collect(),
        };
        let bounds = &self.config.detection;
        let group = primary::Group::new(membership, &plans[0].peer, bounds, Output::Held);
        // Before protection can be lost again.
        let wish = Wish { request, group: Some(members.clone()) };
        let formers: Vec<_> = vms.iter().map(|vm| vm.repairer().wish()).collect();
        vms.iter().for_each(|vm| vm.repairer().set_wish(Some(wish.clone())));
        for (begun, (vm, plan)) in vms.iter().zip(plans).enumerate() {
            if let Err(error) = self.begin_protection(vm, plan, (group.clone(), begun)) {
                for (vm, former) in vms.iter().zip(formers) {
                    vm.repairer().take_back(former);
                }
                self.abandon(&vms[..begun], &error);
                return Err(error);
            }
        }
        vms.iter().for_each(|vm| self.note_wish(vm));
        Ok(())
    }

    /// The members, which must run here.
    fn own_members(&self, group: &GroupMembers) -> Result<Vec<Arc<PrimaryVm>>, HostError> {
        group.vms.iter().map(|vm| self.own_member(&group.name, vm)).collect()
    }

    /// Refuses a VM as a member of a group that does not run in this process.
    pub fn check_member(&self, group: &GroupName, vm: &VmName) -> Result<(), HostError> {
        self.own_member(group, vm).map(drop)
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
    fn abandon(&self, begun: &[Arc<PrimaryVm>], error: &HostError) {
        for vm in begun {
            if let Err(error) = self.end_protection(vm) {
                warn!(vm = %vm.name(), "{error}");
            }
            match vm.repairer().wish() {
                Some(_) => vm.degrade(error.to_string()),
                None => vm.accept_unprotected(),
            }
        }
    }

    /// The other members of a VM's group, as it is protected or was last, on this host.
    pub(crate) fn fellows(&self, vm: &PrimaryVm) -> Vec<Arc<PrimaryVm>> {
        let is_fellow = |other: &Arc<PrimaryVm>| other.name() != vm.name() && other.is_fellow(vm);
        self.primaries().into_iter().filter(is_fellow).collect()
    }

    /// The VMs on this host that are to be protected with a VM.
    pub(crate) fn wanted_fellows(&self, vm: &PrimaryVm) -> Vec<Arc<PrimaryVm>> {
        let members = vm.repairer().group().map(|group| self.wanted_members(&group));
        let others = members.into_iter().flatten().filter(|other| other.name() != vm.name());
        others.collect()
    }

    /// The VMs on this host that are to be protected as this group.
    fn wanted_members(&self, group: &GroupMembers) -> Vec<Arc<PrimaryVm>> {
        let is_member = |vm: &Arc<PrimaryVm>| vm.repairer().group().as_ref() == Some(group);
        self.primaries().into_iter().filter(is_member).collect()
    }

    /// A VM leaves its host for good, and with it its group.
    pub(crate) fn leave_group(&self, vm: &PrimaryVm) {
        if let Some(group) = vm.repairer().group() {
            vm.repairer().set_wish(None);
            self.dissolve(&group, vm.name(), "was stopped");
        }
    }

    /// The VM has ended, and no backup takes it over. Its fellows go on without it; if it led their group, nobody else
    /// would see to their protection.
    pub(crate) fn dissolve_without(&self, leader: &PrimaryVm) {
        let leads = |group: &GroupMembers| group.vms.first() == Some(leader.name());
        // A session that has ended it for the sake of another host decides there about the group.
        if leader.bound_session().is_none()
            && let Some(group) = leader.repairer().group().filter(leads)
        {
            leader.repairer().set_wish(None);
            self.dissolve(&group, leader.name(), "has died");
        }
    }

    /// The VMs that were to be protected as this group are not any more, which nobody asked for:
    /// `who` did `what`.
    pub(crate) fn dissolve(&self, group: &GroupMembers, who: &str, what: &str) {
        for vm in self.wanted_members(group) {
            if !vm.repairer().leave(group) {
                continue;
            }
            self.note_wish(&vm);
            // One that is still protected says itself how that goes on.
            if vm.active_session().is_none() {
                let reason = format!(
                    "{who}, of the same group, {what}, which ended the group; not protected until \
                     `understudy protect`"
                );
                vm.events.record(EventKind::ProtectionLost { reason: reason.clone() });
                vm.degrade(reason);
            }
        }
    }
}

/// Locks all members' protection, by their names: groups that share members do not wait for each other for ever.
fn hold(vms: &[Arc<PrimaryVm>]) -> Vec<MutexGuard<'_, ()>> {
    let mut by_name: Vec<_> = vms.iter().collect();
    by_name.sort_by_key(|vm| vm.name());
    by_name.into_iter().map(|vm| lock(&vm.protecting)).collect()
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
