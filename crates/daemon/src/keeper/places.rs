//! The VMs of a keeper: one, or those of a group, which come into the keeper of the first. Of each the
//! keeper holds the lock in its directory, with the socket of its API and that for connections, until
//! the VM is gone: to its daemon it looks as if each had a keeper of its own.

use super::note::{Claim, End};
use super::pass::{Connections, Listening};
use super::watch::CALM;
use super::{CONNECTIONS, LOOK, SOCKET, conflict};
use crate::config::HostConfig;
use crate::host::{Host, internal, prepare_directory};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use tracing::warn;
use understudy_protocol::{GroupName, VmName};
use understudy_replication::membership::GroupMembers;
use understudy_report::error::HostError;
use understudy_threads::Common;

/// Time for the VM to be started in a new keeper.
const START_PATIENCE: Duration = Duration::from_secs(60);
/// Time for the daemon to fetch the last events.
const LAST_EVENTS: Duration = Duration::from_millis(200);

/// Serves a host's API on a socket.
pub type Door = Box<dyn Fn(&Arc<Host>, &Path) -> Result<Close, HostError> + Send + Sync>;
/// Ends that, once what was asked is answered.
pub type Close = Box<dyn FnOnce() + Send>;

/// VMs that a keeper keeps.
pub struct Kept {
    /// Group whose other VMs may come.
    group: Option<GroupName>,
    door: Door,
    places: Common<Places>,
}

#[derive(Default)]
struct Places {
    of: BTreeMap<VmName, Place>,
    /// The last VM is gone: nothing begins any more.
    over: bool,
}

/// Hold on one VM.
struct Place {
    claim: Claim,
    close: Close,
    listening: Listening,
    /// Time at which the VM is gone if it has not come; none while an order about it is being
    /// followed.
    begins_by: Option<Instant>,
    /// Number of those who follow an order about it, or an offer of it.
    following: u32,
    /// End that was seen last.
    end: Option<End>,
}

impl Kept {
    pub(crate) fn new(group: Option<GroupName>, door: Door) -> Kept {
        Kept { group, door, places: Common::default() }
    }

    /// Whether it keeps the VM.
    pub(crate) fn has(&self, vm: &VmName) -> bool {
        self.places.lock().of.contains_key(vm)
    }

    /// All that it keeps.
    pub(crate) fn vms(&self) -> Vec<VmName> {
        self.places.lock().of.keys().cloned().collect()
    }

    /// Refuses a VM that it does not keep.
    pub(crate) fn check(&self, vm: &VmName) -> Result<(), HostError> {
        match self.has(vm) {
            true => Ok(()),
            false => Err(conflict(format!("this is the keeper of {self}, and of nothing else"))),
        }
    }

    /// The VMs that are gone by the second look in a row: what is handed over is fenced for a moment before.
    fn gone(&self, end_of: impl Fn(&VmName) -> Option<End>) -> Vec<(Place, End)> {
        let ends: Vec<(VmName, Option<End>)> =
            self.vms().into_iter().map(|vm| (vm.clone(), end_of(&vm))).collect();
        let mut places = self.places.lock();
        let mut gone = Vec::new();
        for (vm, end) in ends {
            if places.of.get_mut(&vm).is_some_and(|place| place.saw(end.as_ref())) {
                gone.extend(places.of.remove(&vm).zip(end));
            }
        }
        places.over = places.of.is_empty();
        gone
    }

    /// Whether each VM was there at the last look: that it is not any more is told.
    fn are_all_seen(&self) -> bool {
        let now = Instant::now();
        let is_seen =
            |place: &Place| place.end.is_none() && place.begins_by.is_some_and(|at| at <= now);
        self.places.lock().of.values().all(is_seen)
    }

    /// Whether it has VMs of this group.
    fn has_some_of(&self, group: &GroupMembers) -> bool {
        let places = self.places.lock();
        group.vms.iter().any(|vm| places.of.contains_key(vm))
    }

    /// Leaves what is here to the next keeper of the VM: this process ends now, and holds it until
    /// then.
    pub(super) fn leave_to_next(&self, vm: &VmName) {
        let mut places = self.places.lock();
        let said = places.of.get_mut(vm).map_or(Ok(()), |place| place.claim.end(End::Left));
        if let Err(error) = said {
            warn!(%vm, "that it is left to the next keeper cannot be noted: {error}");
        }
    }

    /// The keeper ends, and is not to be told again.
    pub(crate) fn note_ending(&self) {
        for (vm, place) in &mut self.places.lock().of {
            if let Err(error) = place.claim.note_ending() {
                warn!(%vm, "that its keeper ends cannot be noted: {error}");
            }
        }
    }

    /// The group whose VMs may come into it.
    pub(super) fn group(&self) -> Option<&GroupName> {
        self.group.as_ref()
    }

    /// How its VMs get into a keeper that has asked the QEMU which is installed now.
    pub(crate) fn remedy_for_qemu(&self) -> String {
        remedy_for_qemu(self.group.as_ref(), &self.to_string())
    }

    fn begin_following(&self, vm: &VmName) {
        if let Some(place) = self.places.lock().of.get_mut(vm) {
            place.following += 1;
            place.begins_by = None;
        }
    }

    /// The place is kept on while another one follows.
    fn end_following(&self, vm: &VmName) {
        if let Some(place) = self.places.lock().of.get_mut(vm) {
            place.following = place.following.saturating_sub(1);
            if place.following == 0 {
                place.begins_by = Some(Instant::now());
            }
        }
    }

    fn all(&self) -> Vec<Place> {
        let mut places = self.places.lock();
        places.over = true;
        std::mem::take(&mut places.of).into_values().collect()
    }
}

fn remedy_for_qemu(group: Option<&GroupName>, vms: &str) -> String {
    match group {
        None => format!("the keeper of {vms} began before: `understudy upgrade --keepers {vms}`"),
        Some(group) => format!(
            "the keeper of group {group} began before: hand {vms} over (`understudy failover`), or stop all of them"
        ),
    }
}

impl std::fmt::Display for Kept {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let names: Vec<String> = self.vms().iter().map(VmName::to_string).collect();
        f.write_str(&names.join(", "))
    }
}

impl Claim {
    /// Claim on a VM of this host, before anything is done for it.
    pub(crate) fn of(
        config: &HostConfig,
        vm: &VmName,
        group: Option<&GroupName>,
    ) -> Result<Claim, HostError> {
        let directory = vm.below(&config.state_dir);
        prepare_directory(&directory)?;
        Claim::take(&directory, &config.name, vm, group)
    }
}

impl Place {
    /// Whether the VM is gone, of which this is seen now: its end, if it is not there.
    fn saw(&mut self, end: Option<&End>) -> bool {
        let before = std::mem::replace(&mut self.end, end.cloned());
        if end.is_none() {
            self.begins_by = Some(Instant::now());
        }
        let is_late = self.begins_by.is_some_and(|at| Instant::now() > at);
        end.is_some() && end == before.as_ref() && is_late
    }

    fn leave(mut self, end: End) {
        drop(self.listening);
        (self.close)();
        if let Err(error) = self.claim.end(end) {
            warn!("the end of a VM's keeper cannot be noted: {error}");
        }
    }
}

/// An order about a VM, or an offer of it, is being followed until this is dropped: by a panic, too. If it has not
/// brought the VM, that is gone from then on.
pub(crate) struct Following<'a> {
    kept: &'a Kept,
    vm: &'a VmName,
}

impl<'a> Following<'a> {
    fn begin(kept: &'a Kept, vm: &'a VmName) -> Following<'a> {
        kept.begin_following(vm);
        Following { kept, vm }
    }
}

impl Drop for Following<'_> {
    fn drop(&mut self) {
        self.kept.end_following(self.vm);
    }
}

impl Host {
    /// Keeps a VM that is about to be here, if this is a keeper of its group. To be called under the lock `adding`.
    pub(crate) fn take_place(
        self: &Arc<Self>,
        vm: &VmName,
        group: Option<&GroupMembers>,
    ) -> Result<(), HostError> {
        let Some(kept) = self.keeps.as_ref().filter(|kept| !kept.has(vm)) else { return Ok(()) };
        let is_own = |group: &&GroupMembers| kept.group.as_ref() == Some(&group.name);
        let Some(group) = group.filter(is_own) else { return kept.check(vm) };
        if kept.places.lock().over || self.is_closing() {
            let message = format!("the keeper that was to have {vm} is just ending: try again");
            return Err(conflict(message));
        }
        // Another host's group of that name is another one.
        if !kept.has_some_of(group) {
            return kept.check(vm);
        }
        let claim = Claim::of(&self.config, vm, Some(&group.name))?;
        self.open_place(claim, vm, Some(Instant::now()))
    }

    /// [`take_place`](Host::take_place) of a VM that this process is to start, by the configuration as it is now: it
    /// may be in a group since a moment ago.
    pub(crate) fn take_place_to_start(self: &Arc<Self>, vm: &VmName) -> Result<(), HostError> {
        if self.keeps.as_ref().is_none_or(|kept| kept.has(vm)) {
            return Ok(());
        }
        let now = HostConfig::load(&self.config.file)?;
        self.take_place(vm, self.group_by(&now.groups, vm).as_ref())
    }

    /// Keeps the place of a VM in a keeper that is about to start it, or gets an offer of it, for as long as what is
    /// returned is there.
    pub(crate) fn begin_in_place<'a>(&'a self, vm: &'a VmName) -> Option<Following<'a>> {
        self.keeps.as_ref().map(|kept| Following::begin(kept, vm))
    }

    /// [`take_place`](Host::take_place) of a VM about which there is an order, while `follow` follows it.
    pub(super) fn while_placed(
        self: &Arc<Self>,
        vm: &VmName,
        follow: impl FnOnce(Result<(), HostError>),
    ) {
        let Some(kept) = &self.keeps else { return };
        let (placed, _following) = {
            let _adding = self.adding.lock();
            let placed = self.take_place_to_start(vm);
            (placed, Following::begin(kept, vm))
        };
        follow(placed);
    }

    /// Keeps the first VM, which its daemon is about to send.
    pub(crate) fn open_first_place(
        self: &Arc<Self>,
        claim: Claim,
        vm: &VmName,
    ) -> Result<(), HostError> {
        self.open_place(claim, vm, Some(Instant::now() + START_PATIENCE))
    }

    fn open_place(
        self: &Arc<Self>,
        claim: Claim,
        vm: &VmName,
        begins_by: Option<Instant>,
    ) -> Result<(), HostError> {
        let Some(kept) = &self.keeps else { return Ok(()) };
        // Whoever comes through what is opened here finds the VM among those that are kept.
        let mut places = kept.places.lock();
        let directory = vm.below(&self.config.state_dir);
        // Before the API, by which the daemon sees that there is a keeper.
        let listening = Connections::bind(&directory.join(CONNECTIONS))
            .and_then(|connections| connections.take_in(self, vm))
            .map_err(internal)?;
        let close = (kept.door)(self, &directory.join(SOCKET))?;
        let place = Place { claim, close, listening, begins_by, following: 0, end: None };
        places.of.insert(vm.clone(), place);
        drop(places);
        self.vms.tell_of_keepers();
        Ok(())
    }

    /// Waits until no VM is here any more that this process keeps, and says of each how that came.
    pub fn await_end_of_kept(self: &Arc<Self>) {
        let Some(kept) = &self.keeps else { return };
        while !kept.places.lock().over {
            if kept.are_all_seen() {
                self.vms.await_absence(|| kept.vms(), CALM);
            }
            // Held while one is being started.
            let starting = self.adding.lock();
            let gone = kept.gone(|vm| self.end_of_kept(vm));
            drop(starting);
            thread::sleep(if gone.is_empty() { LOOK } else { LAST_EVENTS });
            gone.into_iter().for_each(|(place, end)| place.leave(end));
        }
    }

    /// Leaves all: this process ends, and has no VM any more.
    pub fn leave_all(&self) {
        fail::fail_point!("leave-all");
        let places = self.keeps.as_ref().map(Kept::all).unwrap_or_default();
        places.into_iter().for_each(|place| place.leave(End::Gone));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use understudy_protocol::literal;

    // Before, a group's keeper had its daemon restarted, which it outlives, and started nothing after that either.
    #[test]
    fn a_keeper_says_what_ends_it_where_another_qemu_was_installed() {
        let alone = remedy_for_qemu(None, "db");
        assert!(alone.contains("`understudy upgrade --keepers db`"), "{alone}");
        let shared = remedy_for_qemu(Some(&literal("shop")), "db, web");
        assert!(shared.contains("hand db, web over") && shared.contains("group shop"), "{shared}");
    }
}
