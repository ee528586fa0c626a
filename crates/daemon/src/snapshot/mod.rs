//! Snapshots of groups, and their restore: the daemon's part (docs/cluster.md). What is decided
//! about them is in `understudy_snapshot`; here orders and reports are carried between hosts,
//! and carried out.
//!
//! | module | is |
//! |--------|----|
//! | [`take`], [`restore`] | one member, on its host: a cohort and its threads |
//! | [`command`], [`taker`], [`restorer`] | the daemon that got the command: a coordinator |
//! | [`library`] | what is in a store: list, delete, verify |
//! | [`reading`] | the mark of a restore, which keeps others from deleting what it reads |
//! | [`member`] | a VM's seat at its cluster's network, and its cut |
//! | [`used_stores`] | which stores this host has used, and does not make anew |
//! | [`unswept`] | stores from which chunks are still to be removed |
//! | [`sampling`] | working sets in normal running |
//! | [`schedule`] | snapshots that are taken by themselves |
//! | [`decision`] | whether restored members stay, by the arbiter |
//! | [`capture`] | all of one member that a snapshot has |
//! | [`mirrored`] | the same of a protected one, which its backup stores |
//! | [`exchange`] | how hosts talk about them |
//! | [`prepare`] | from a part of a snapshot to a VM that runs |
//! | [`kept`] | a restore in a keeper, and how its daemon hands orders on |
//! | [`adopt`] | a VM whose daemon died before all of it was loaded |
//! | [`former`] | what it was before, until the restore can come to nothing no more |
//! | [`placement`] | who may be restored where, asked before anything is started |
//! | [`frames`] | frames between members, and those in flight |

mod adopt;
mod capture;
mod command;
mod decision;
mod exchange;
mod former;
pub(crate) mod frames;
mod kept;
mod library;
mod member;
mod mirrored;
mod placement;
mod prepare;
pub use understudy_cluster::store_keys::make_key;
mod reading;
mod restore;
mod restorer;
mod sampling;
mod schedule;
mod take;
mod taker;
mod unswept;
mod used_stores;

pub(crate) use adopt::RestoreNote;
pub(crate) use exchange::serve;
pub(crate) use sampling::start as start_sampling;
pub(crate) use schedule::start as start_schedules;
use understudy_protocol::{GroupName, VmName};
pub(crate) use unswept::start as start_sweeping;

use crate::inventory::Inventory;
use frames::Network;
use kept::KeptRestore;
use member::{MemberSeat, Outside};
use restore::Restoring;
use sampling::WorkingSets;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};
use take::Taking;
use tracing::warn;
use understudy_report::FillReport;
use understudy_snapshot::{Incarnation, SnapshotNumber, Store};
use unswept::Unswept;

/// Bytes that a store gives in a second, as long as nothing was read from it.
const ASSUMED_SPEED: u64 = 100_000_000;

/// Fewest pages that tell how fast a store is.
const TELLING_PAGES: u64 = 1024;

/// State of what a host does for snapshots and restores, by VM.
#[derive(Default)]
pub(crate) struct Snapshots {
    /// What is known of them is a part of what the host knows.
    vms: Inventory,
    /// Bytes a second that were read from a store last; 0 if that is not known.
    speed: AtomicU64,
    /// Way that all restored guests share.
    way: Arc<understudy_cluster::source::Way>,
}

/// Tasks that a host knows of, by VM and by group.
#[derive(Default)]
pub(crate) struct Known {
    takings: BTreeMap<VmName, Arc<Taking>>,
    restorings: BTreeMap<VmName, Arc<Restoring>>,
    /// Restores in keepers.
    kept: BTreeMap<VmName, KeptRestore>,
    members: BTreeMap<VmName, Arc<MemberSeat>>,
    /// The last number and incarnation of each group that this host has heard of.
    groups: BTreeMap<GroupName, (SnapshotNumber, Incarnation)>,
    /// VMs that are not the members that they are to be.
    outside: BTreeMap<VmName, Outside>,
    unswept: Unswept,
    working_sets: WorkingSets,
    /// The networks of the clusters that have members on this host.
    networks: BTreeMap<GroupName, Arc<Network>>,
}

/// Puts one in the place of `former`; returns whether that was still there: else yet another one has come meanwhile.
fn succeed<T>(
    known: &mut BTreeMap<VmName, Arc<T>>,
    vm: &VmName,
    former: Option<&Arc<T>>,
    next: &Arc<T>,
) -> bool {
    let is_there = known.get(vm).map(Arc::as_ptr) == former.map(Arc::as_ptr);
    if is_there {
        known.insert(vm.clone(), next.clone());
    }
    is_there
}

impl Snapshots {
    /// State of a host that knows this.
    pub(crate) fn of(vms: &Inventory) -> Snapshots {
        Snapshots { vms: vms.clone(), ..Snapshots::default() }
    }

    /// Looks something up.
    fn look<T>(&self, look: impl FnOnce(&Known) -> T) -> T {
        self.vms.look(|all| look(&all.snapshots))
    }

    /// Changes something; whatever comes out is to be returned, so that it is dropped without the lock.
    fn note<T>(&self, change: impl FnOnce(&mut Known) -> T) -> T {
        self.vms.note(|all| change(&mut all.snapshots))
    }

    /// Bytes a second that this host reads from a store.
    fn speed(&self) -> u64 {
        match self.speed.load(Ordering::Relaxed) {
            0 => ASSUMED_SPEED,
            known => known,
        }
    }

    /// Notes how long a store took to deliver `pages`; too few say nothing about it.
    fn note_loaded(&self, pages: u64, took: Duration) {
        if pages >= TELLING_PAGES && !took.is_zero() {
            let bytes = pages as f64 * understudy_snapshot::UNIT_BYTES as f64;
            self.speed.store((bytes / took.as_secs_f64()) as u64, Ordering::Relaxed);
        }
    }

    /// The last number that this host has heard of, of a snapshot or of one given up.
    fn last_number(&self, group: &GroupName) -> SnapshotNumber {
        self.look(|known| known.groups.get(group).map_or(SnapshotNumber(0), |known| known.0))
    }

    /// The same of each group.
    pub(crate) fn last_numbers(&self) -> BTreeMap<GroupName, SnapshotNumber> {
        self.look(|known| {
            known.groups.iter().map(|(group, known)| (group.clone(), known.0)).collect()
        })
    }

    fn note_number(&self, group: &GroupName, number: SnapshotNumber) {
        self.note(|known| {
            let known = known.groups.entry(group.to_owned()).or_default();
            known.0 = known.0.max(number);
        });
    }

    fn last_incarnation(&self, group: &GroupName) -> Incarnation {
        self.look(|known| known.groups.get(group).map_or(Incarnation(0), |known| known.1))
    }

    fn note_incarnation(&self, group: &GroupName, incarnation: Incarnation) {
        self.note(|known| {
            let known = known.groups.entry(group.to_owned()).or_default();
            known.1 = known.1.max(incarnation);
        });
    }

    /// The network of a cluster on this host.
    pub(crate) fn network(&self, cluster: &GroupName) -> Arc<Network> {
        self.note(|known| {
            let network = known.networks.entry(cluster.to_owned());
            network.or_insert_with(|| Network::new(cluster)).clone()
        })
    }

    /// Problems of this host with the networks of its clusters.
    pub(crate) fn problems(&self) -> Vec<String> {
        let networks: Vec<_> = self.look(|known| known.networks.values().cloned().collect());
        let mut problems: Vec<_> = networks.iter().flat_map(|network| network.problems()).collect();
        self.look(|known| {
            let outside = known.outside.iter();
            problems.extend(outside.map(|(vm, outside)| format!("VM {vm}: {outside}")));
        });
        problems
    }

    /// Notes that a VM is not the member that it is to be, or is.
    fn note_outside(&self, vm: &VmName, outside: Option<Outside>) {
        self.note(|known| match outside {
            Some(outside) => known.outside.insert(vm.clone(), outside),
            None => known.outside.remove(vm),
        });
    }

    /// Whether a restore of the VM is under way.
    pub(crate) fn is_restoring(&self, vm: &VmName) -> bool {
        let restoring = self.look(|known| known.restorings.get(vm).cloned());
        restoring.is_some_and(|restoring| restoring.is_under_way())
    }

    /// Waits a moment for the end of the VM's restore, of which its host hears last; whether it is over.
    pub(crate) fn await_restored(&self, vm: &VmName) -> bool {
        let deadline = Instant::now() + LAST_WORD;
        while self.is_restoring(vm) {
            if Instant::now() > deadline {
                return false;
            }
            thread::sleep(LOOK);
        }
        true
    }

    /// Whether a snapshot of the VM is under way.
    pub(crate) fn is_taking(&self, vm: &VmName) -> bool {
        let taking = self.look(|known| known.takings.get(vm).cloned());
        taking.is_some_and(|taking| taking.is_under_way())
    }

    /// Progress of the memory and disks of a restored VM; none if it was not restored, or is
    /// whole.
    pub(crate) fn filling(&self, vm: &VmName) -> Option<FillReport> {
        let restoring = self.look(|known| known.restorings.get(vm).cloned());
        restoring?.fill_state().filter(|state| !state.memory.complete)
    }

    /// Whether a restored VM is not whole yet, or is not noted as such.
    fn is_loading(&self, vm: &VmName) -> bool {
        let restoring = self.look(|known| known.restorings.get(vm).cloned());
        restoring.is_some_and(|restoring| restoring.is_loading())
    }
}

/// Time for the end of a restore that is over to be heard of by each of its hosts.
const LAST_WORD: Duration = Duration::from_secs(5);
/// Time between two looks at that.
const LOOK: Duration = Duration::from_millis(10);

/// The time by a store's own clock, by which hosts whose clocks differ judge each other's marks; by this host's where the
/// store takes nothing.
fn time_of(store: &Store) -> u64 {
    store.time().unwrap_or_else(|error| {
        warn!("{error}; this host's clock is taken instead");
        unix_now()
    })
}

/// Seconds since 1970.
fn unix_now() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}
