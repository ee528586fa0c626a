//! VMs that come up with their host (`autostart` in their definition): those that ran here, or were
//! shut down with the last daemon, and that neither their operator nor their guest has ended.
//!
//! Each waits until it is certain that its valid images are this host's, as `recover` would find
//! out, and is then started and protected as it was. What stands in the way is in `status`.

use crate::containment;
use crate::host::Host;
use crate::inventory::Inventory;
use crate::repair::Wish;
use crate::vm::{PrimaryVm, Vm};
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};
use tracing::{info, warn};
use understudy_protocol::autostart::{Autostart, decide};
use understudy_protocol::validity::ImageRole;
use understudy_protocol::{GroupName, VmName};
use understudy_replication::records::Record;
use understudy_report::error::HostError;
use understudy_report::events::{EventKind, now_ms};
use understudy_report::{AwaitedStart, RecoverReport, RecoverRequest};

/// Pause before what is not certain is looked at again.
const AGAIN: Duration = Duration::from_secs(2);
/// Time within which a VM whose keeper is killed comes up again once.
const SELDOM: Duration = Duration::from_secs(60);
/// Reason for which a VM waits until all hosts were asked for the first time.
const FIRST: &str = "the hosts are being asked";

/// Reason for which a VM waits that is started for the first time.
const OPENED: &str = "it is about to start: its images are being opened";

/// Reason for which a VM waits that has a keeper already.
const IN_KEEPER: &str = "its keeper has not said yet that it runs";

/// VMs that are to come up here and have not yet.
pub(crate) struct Awaited(Inventory);

impl Awaited {
    /// Those of this inventory.
    pub fn of(inventory: &Inventory) -> Awaited {
        Awaited(inventory.clone())
    }

    /// All of them.
    pub fn all(&self) -> Vec<AwaitedStart> {
        self.0.look(|all| all.awaited.values().cloned().collect())
    }

    /// Reason why a VM has not come up yet.
    pub fn why(&self, vm: &VmName) -> Option<String> {
        self.0.look(|all| all.awaited.get(vm).map(|awaited| awaited.reason.clone()))
    }

    /// Nobody waits for it any more; whether somebody did.
    pub fn give_up(&self, vm: &VmName) -> bool {
        self.0.change(|all| all.awaited.remove(vm).is_some())
    }

    fn names(&self) -> Vec<VmName> {
        self.0.look(|all| all.awaited.keys().cloned().collect())
    }

    fn add(&self, vm: VmName) {
        let (reason, since_ms) = (FIRST.to_owned(), now_ms());
        let awaited = AwaitedStart { name: vm.clone(), reason, since_ms };
        self.0.change(|all| all.awaited.insert(vm, awaited));
    }

    /// Notes what it waits for; whether that is new.
    fn note(&self, vm: &VmName, reason: &str) -> bool {
        self.0.change(|all| {
            let Some(awaited) = all.awaited.get_mut(vm) else { return false };
            let is_new = awaited.reason != reason;
            awaited.reason = reason.to_owned();
            is_new
        })
    }
}

/// Whether a VM with this record comes up when its host does.
pub(crate) fn comes_up(record: &Record) -> bool {
    let ran = matches!(record.image.role, ImageRole::Active | ImageRole::Stopped | ImageRole::Cut);
    ran && record.wanted && record.definition.autostart
}

/// Wish for how the VM of a record was to be protected.
pub(crate) fn wish_of(record: Record) -> Option<Wish> {
    Some(Wish { request: record.wish?, group: record.group })
}

/// Notes in a record how its VM is to be protected.
pub(crate) fn put_wish(record: &mut Record, wish: Option<&Wish>) {
    record.wish = wish.map(|wish| wish.request.clone());
    record.group = wish.and_then(|wish| wish.group.clone());
}

/// Has every VM come up that is to.
pub(crate) fn start(host: &Arc<Host>, records: Vec<Record>) -> std::io::Result<()> {
    let comes_up = records.into_iter().filter(comes_up);
    comes_up.for_each(|record| host.awaited.add(record.definition.name));
    // One whose storage hangs delays nobody but itself, and its group, which comes up in the order of its names.
    let mut groups: BTreeMap<GroupName, Vec<VmName>> = BTreeMap::new();
    let mut together: Vec<Vec<VmName>> = Vec::new();
    for vm in host.awaited.names() {
        match host.group_of(&vm) {
            Some(group) => groups.entry(group.name).or_default().push(vm),
            None => together.push(vec![vm]),
        }
    }
    together.extend(groups.into_values());
    together.into_iter().try_for_each(|vms| {
        let (weak, first) = (Arc::downgrade(host), vms[0].clone());
        containment::spawn_for(host, &first, "autostart", move || bring_up(&weak, &vms))
    })
}

/// Has a VM come up again whose keeper was killed, if it comes up with its host: that is what its daemon's death would have
/// been to it. Not one that has just done so: it may be what kills its keeper.
pub(crate) fn again(host: &Arc<Host>, vm: &VmName) {
    let record = host.record(vm).ok().flatten();
    if host.is_going_down()
        || host.is_awaited(vm)
        || !record.is_some_and(|record| comes_up(&record))
    {
        return;
    }
    let now = Instant::now();
    if !host.vms.change(|all| may_come_again(&mut all.come_again, vm, now)) {
        let words = format!(
            "does not come up once more: its keeper was killed twice within {} s",
            SELDOM.as_secs()
        );
        warn!(%vm, "{words}");
        return host.events.of(vm).note(words);
    }
    host.awaited.add(vm.clone());
    let (weak, vms) = (Arc::downgrade(host), vec![vm.clone()]);
    let begun = containment::spawn_for(host, vm, "autostart", move || bring_up(&weak, &vms));
    if let Err(error) = begun {
        host.awaited.give_up(vm);
        warn!(%vm, "does not come up again: no thread: {error}");
    }
}

/// Whether a VM has not come up so recently, which is noted.
fn may_come_again(last: &mut BTreeMap<VmName, Instant>, vm: &VmName, now: Instant) -> bool {
    let is_recent = |last: &Instant| now.saturating_duration_since(*last) < SELDOM;
    let may = !last.get(vm).is_some_and(is_recent);
    if may {
        last.insert(vm.clone(), now);
    }
    may
}

/// Ends when none of the VMs is awaited any more.
fn bring_up(host: &Weak<Host>, vms: &[VmName]) {
    loop {
        let Some(host) = host.upgrade().filter(|host| !host.is_closing()) else { return };
        vms.iter().for_each(|vm| host.try_to_bring_up(vm));
        if vms.iter().all(|vm| host.awaited.why(vm).is_none()) {
            return;
        }
        drop(host);
        thread::sleep(AGAIN);
    }
}

impl Host {
    fn try_to_bring_up(self: &Arc<Self>, vm: &VmName) {
        // Its operator may have ended the wait while another VM was being started.
        if self.is_closing() || self.awaited.why(vm).is_none() {
            return;
        }
        let keeper = self.keeper_of(vm);
        if let Some(problem) = keeper.as_ref().and_then(|keeper| keeper.problem.as_ref()) {
            return self.wait_to_start(vm, &format!("it may have a keeper: {problem}"));
        }
        // Its operator was quicker, or it is backed up here. Of a keeper that was just killed the place is kept for a moment.
        let is_kept = keeper.is_some() && self.arrivals.kept(vm).is_some();
        if self.has_guest(vm) || is_kept {
            self.awaited.give_up(vm);
            return;
        }
        // It has outlived the last daemon, and what that has told it may still fail.
        if keeper.is_some() {
            self.awaited.note(vm, IN_KEEPER);
            return;
        }
        match self.look_at_start(vm) {
            Ok(Autostart::Start) => {
                if self.awaited.why(vm).as_deref() == Some(FIRST) {
                    self.awaited.note(vm, OPENED);
                }
                self.bring_up(vm);
            }
            Ok(Autostart::Leave(why)) => {
                self.awaited.give_up(vm);
                info!(%vm, "does not come up here: {why}");
            }
            Ok(Autostart::Wait(why)) => self.wait_to_start(vm, &why),
            Err(error) => self.wait_to_start(vm, &error.message),
        }
    }

    /// Whether a VM runs or is backed up in this process. What this host has lost is not there: the last daemon's
    /// keeper may have been killed before it ran.
    pub(crate) fn has_guest(&self, vm: &VmName) -> bool {
        matches!(self.vms.get(vm), Some(Vm::Primary(_) | Vm::Backup(_)))
    }

    fn look_at_start(&self, vm: &VmName) -> Result<Autostart, HostError> {
        if let Some(why) = self.orphans.why(vm) {
            return Ok(Autostart::Wait(format!("it {why}")));
        }
        if self.record(vm)?.is_some_and(|record| !record.wanted) {
            return Ok(Autostart::Leave("it was ended meanwhile".to_owned()));
        }
        let inquiry = self.inquire(vm)?;
        Ok(decide(&self.config.name, &inquiry.knowledge()))
    }

    fn bring_up(self: &Arc<Self>, vm: &VmName) {
        let record = self.record(vm).ok().flatten();
        let definition = record.as_ref().map(|record| &record.definition);
        if let Some(definition) = definition.filter(|_| self.starts_in_keeper(vm)) {
            // Its operator may have ended the wait while it was about to start.
            let still_wanted = || self.awaited.give_up(vm);
            if let Err(error) = self.bring_up_in_keeper(definition, still_wanted) {
                self.wait_to_start(vm, &error.message);
            }
            return;
        }
        let wish = record.and_then(wish_of);
        match self.recover_wanting(vm, RecoverRequest::default(), wish.clone()) {
            // Its operator ended the wait while it was about to start.
            Ok(_) if !self.awaited.give_up(vm) => {
                if let Err(error) = self.vm_stop(vm, true) {
                    warn!(%vm, "{error}");
                }
            }
            Ok(_) => self.came_up(vm, wish),
            Err(error) => self.wait_to_start(vm, &error.message),
        }
    }

    /// Brings up the VM that this process keeps, as its daemon has decided.
    pub(crate) fn come_up(self: &Arc<Self>, vm: &VmName) -> Result<RecoverReport, HostError> {
        let wish = self.record(vm)?.and_then(wish_of);
        let report = self.recover_wanting(vm, RecoverRequest::default(), wish.clone())?;
        self.came_up(vm, wish);
        Ok(report)
    }

    fn came_up(self: &Arc<Self>, vm: &VmName, wish: Option<Wish>) {
        self.events.of(vm).record(EventKind::CameUp);
        self.want_protected(vm, wish);
    }

    /// Notes that it wants protection as it was protected when its host went down.
    fn want_protected(self: &Arc<Self>, vm: &VmName, wish: Option<Wish>) {
        let (Some(wish), Ok(primary)) = (wish, self.primary(vm)) else { return };
        let remedy = wish.command(vm);
        self.degraded(&primary, "it came up by itself".to_owned(), &remedy);
    }

    fn wait_to_start(&self, vm: &VmName, reason: &str) {
        if self.awaited.note(vm, reason) {
            let reason = reason.to_owned();
            self.events.of(vm).record_new(EventKind::StartAwaited { reason });
        }
    }

    /// Whether a VM is to come up here and has not yet, as far as is known.
    pub fn is_awaited(&self, vm: &VmName) -> bool {
        self.awaited.why(vm).is_some()
    }

    /// Whether a VM that is to come up here may be in a keeper that has outlived the last daemon.
    pub fn is_left_to_keeper(&self, vm: &VmName) -> bool {
        self.is_awaited(vm) && !self.arrivals.has(vm) && self.keeper_of(vm).is_some()
    }

    /// A VM that was [left to its keeper](Host::is_left_to_keeper) is there, as that says.
    pub fn await_no_more(&self, vm: &VmName) {
        self.awaited.give_up(vm);
    }

    /// The VM shall not come up; whether it was about to.
    pub(crate) fn give_start_up(&self, vm: &VmName) -> bool {
        let awaited = self.awaited.give_up(vm);
        if awaited {
            self.note_unwanted(vm);
        }
        awaited
    }

    /// The VM's operator, or its guest, has ended it: it does not come up with the host.
    pub(crate) fn note_unwanted(&self, vm: &VmName) {
        if let Err(error) = self.records.change(vm, |record| record.wanted = false) {
            warn!(%vm, "{error}");
        }
    }

    /// Has the VM be protected as `wish` says, from now on and when it comes up with its host.
    pub(crate) fn want(&self, vm: &PrimaryVm, wish: Option<Wish>) {
        vm.repairer().set_wish(wish);
        self.note_wish(vm);
    }

    /// Notes how the VM is to be protected when it comes up with its host: as it is to be now.
    pub(crate) fn note_wish(&self, vm: &PrimaryVm) {
        let (name, wish) = (vm.name(), vm.repairer().wish());
        if let Err(error) = self.records.change(name, |record| put_wish(record, wish.as_ref())) {
            warn!(vm = %name, "{error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use understudy_protocol::literal;

    #[test]
    fn a_vm_that_kills_its_keepers_comes_up_again_once_a_minute() {
        let (mut last, db, web) = (BTreeMap::new(), literal("db"), literal("web"));
        let begin = Instant::now();
        for (vm, second, may) in
            [(&db, 0, true), (&db, 59, false), (&web, 59, true), (&db, 60, true), (&db, 61, false)]
        {
            let now = begin + Duration::from_secs(second);
            assert_eq!(may_come_again(&mut last, vm, now), may, "{vm} after {second} s");
        }
    }
}
