//! Commands of users for a group: take a snapshot, restore one.

use super::frames::listed;
use super::placement::store_error;
use super::restorer::{self, Job};
use super::taker::Coordinator;
use super::{library, unix_now};
use crate::config::ClusterConfig;
use crate::host::Host;
use crate::recover::Inquiry;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tracing::warn;
use understudy_arbiter::{Arbiter, Key};
use understudy_cluster::messages::Question;
use understudy_cluster::messages::{GroupPlaces, RestoreTask};
use understudy_protocol::Generation;
use understudy_protocol::{GroupName, HostName, VmName};
use understudy_replication::clock;
use understudy_report::cluster::{RestoreReport, RestoreRequest, SnapshotReport, SnapshotRequest};
use understudy_report::error::{ErrorKind, HostError};
use understudy_report::events::EventKind;
use understudy_snapshot::{
    Crossing, Incarnation, Line, Load, Manifest, Member, MemberManifest, Mode, Plan,
    SnapshotNumber, StartOrder, Store, StoreAddress,
};

/// Time by which a member should start later than one that it starts after.
const GAP: Duration = Duration::from_millis(70);
/// Time for which members that are loaded wait for others: what they would say to them until then
/// is said in vain. As long as TCP takes for its first four attempts (0.2, 0.4, 0.8 and 1.6 s).
const PATIENCE: Duration = Duration::from_secs(3);
/// Time that a restore takes beside loading memory: a QEMU's start, the device state.
const BESIDE: Duration = Duration::from_millis(300);

impl Host {
    /// Takes a snapshot of a group that this host's configuration has.
    pub fn snapshot_cluster(
        self: &Arc<Self>,
        name: &GroupName,
        request: &SnapshotRequest,
    ) -> Result<SnapshotReport, HostError> {
        let cluster = self.cluster(name)?;
        let vms = cluster.members.keys().cloned().collect();
        self.snapshot_group(name, vms, request)
    }

    /// Takes a snapshot of one VM that runs here.
    pub fn snapshot_vm(
        self: &Arc<Self>,
        vm: &VmName,
        request: &SnapshotRequest,
    ) -> Result<SnapshotReport, HostError> {
        self.going_primary(vm)?;
        let cluster = self.config.clusters.get(&GroupName::from(vm));
        if cluster.is_some_and(|cluster| !cluster.is_only(&vm.into())) {
            let message = format!(
                "a cluster of this host is called {vm}, too, and would have the same snapshots: give it \
                 another name in the host's configuration"
            );
            return Err(HostError::new(ErrorKind::Conflict, message));
        }
        self.snapshot_group(&vm.into(), vec![vm.to_owned()], request)
    }

    fn snapshot_group(
        self: &Arc<Self>,
        name: &GroupName,
        vms: Vec<VmName>,
        request: &SnapshotRequest,
    ) -> Result<SnapshotReport, HostError> {
        let location = self.store_of(name, request.store.as_deref())?;
        let mut hosts = Vec::new();
        let mut memory = Vec::new();
        let mut last = SnapshotNumber(0);
        for vm in &vms {
            let inquiry = self.inquire(vm)?;
            // A daemon that was restarted does not know what the others' members have seen.
            last = last.max(inquiry.last_snapshot(name));
            let (host, bytes) = find_running(vm, &inquiry)?;
            hosts.push(host);
            memory.push(bytes);
        }
        let group = GroupPlaces { name: name.to_owned(), vms, hosts };
        let incarnation = self.incarnation_of(name)?;
        let coordinator =
            Coordinator::new(self, group, incarnation, memory, location.clone(), request)?;
        let manifest = coordinator.run(last)?;
        let store = location.to_string();
        let taken = EventKind::Snapshot { group: name.to_owned(), number: manifest.number, store };
        match &manifest.members[..] {
            [one] => self.events.of(&one.name).record(taken),
            _ => self.events.record(taken),
        }
        Ok(library::snapshot_report(&manifest, &location))
    }

    /// Restores a group that this host's configuration has.
    pub fn restore_cluster(
        self: &Arc<Self>,
        name: &GroupName,
        request: &RestoreRequest,
    ) -> Result<RestoreReport, HostError> {
        self.cluster(name)?;
        self.restore_group(name, request, None)
    }

    /// Restores one VM, on this host unless told otherwise.
    pub fn restore_vm(
        self: &Arc<Self>,
        vm: &VmName,
        request: &RestoreRequest,
    ) -> Result<RestoreReport, HostError> {
        self.restore_group(&vm.into(), request, Some(&self.config.name))
    }

    fn restore_group(
        self: &Arc<Self>,
        name: &GroupName,
        request: &RestoreRequest,
        place: Option<&HostName>,
    ) -> Result<RestoreReport, HostError> {
        let began = clock::now();
        let location = self.store_of(name, request.store.as_deref())?;
        let store =
            self.config.store_keys.open(&location).map_err(|error| store_error("", error))?;
        let found = store.snapshot(name, request.number);
        let manifest = found.map_err(|error| store_error("", error))?;
        match place {
            Some(_) => check_only(&manifest)?,
            None => check_list(&manifest, self.cluster(name)?)?,
        }
        let members: Vec<MemberManifest> = manifest
            .members
            .iter()
            .map(|entry| store.member(entry))
            .collect::<Result<_, _>>()
            .map_err(|error| store_error("", error))?;
        let hosts = place_members(&manifest, &request.onto, place);
        let (newest, speeds) = self.ask_about(&manifest, &location, &hosts, request.force)?;
        let (order, patience) = match request.mode.has_line() {
            true => (StartOrder::new(members.len(), &manifest.crossings), PATIENCE),
            false => (StartOrder::none(members.len()), Duration::ZERO),
        };
        let loads = loads(&store, &members, request, &hosts, &speeds)?;
        let plan = plan(&order, &loads, request.mode);
        let vms = manifest.members.iter().map(|entry| entry.name.clone()).collect();
        let incarnation = self.next_incarnation(name, manifest.incarnation)?;
        let task = RestoreTask {
            id: format!("{}-{}", incarnation.0, unix_now()),
            group: GroupPlaces { name: name.to_owned(), vms, hosts },
            member: Member(0),
            store: location,
            number: manifest.number,
            newest: Generation(0),
            incarnation,
            by_recency: request.mode == Mode::WorkingSet,
        };
        let line = Line { order, patience };
        let pair =
            |crossing: &Crossing| (crossing.from.min(crossing.to), crossing.from.max(crossing.to));
        let talking = manifest.crossings.iter().map(pair).collect();
        let (mode, wait) = (request.mode, request.wait);
        let pages = plan.pages;
        let job = Job { began, task, newest, line, pages, talking, mode, wait };
        let check = move || store.check_whole(&manifest).map_err(|error| store_error("", error));
        restorer::run(self, job, check)
    }

    /// Asks whether the members run anywhere, and whether the hosts can take them; returns the
    /// newest generation of each member, and how fast each host reads.
    fn ask_about(
        self: &Arc<Self>,
        manifest: &Manifest,
        location: &StoreAddress,
        hosts: &[HostName],
        force: bool,
    ) -> Result<(Vec<Generation>, BTreeMap<HostName, u64>), HostError> {
        let members = manifest.members.iter();
        // A coordinator that does not care whether they run.
        fail::fail_point!("restore-unasked", |_| {
            let newest = members.clone().map(|entry| Ok(self.inquire(&entry.name)?.newest()));
            let newest = newest.collect::<Result<_, HostError>>()?;
            Ok((newest, self.ask_all(manifest, location, hosts)?))
        });
        let newest = members.map(|entry| self.check_runs_nowhere(&entry.name, force));
        let newest = newest.collect::<Result<_, _>>()?;
        Ok((newest, self.ask_all(manifest, location, hosts)?))
    }

    /// Asks each host whether it can take its members; returns how fast it reads.
    fn ask_all(
        self: &Arc<Self>,
        manifest: &Manifest,
        location: &StoreAddress,
        hosts: &[HostName],
    ) -> Result<BTreeMap<HostName, u64>, HostError> {
        let mut speeds = BTreeMap::new();
        for host in hosts {
            if speeds.contains_key(host) {
                continue;
            }
            let on_host = manifest.members.iter().zip(hosts).filter(|(_, place)| *place == host);
            let question = Question {
                store: location.clone(),
                group: manifest.group.clone(),
                number: manifest.number,
                vms: on_host.map(|(entry, _)| entry.name.clone()).collect(),
            };
            let answer = self.ask_to_restore(host, &question)?;
            speeds.insert(host.clone(), answer.bytes_per_second);
        }
        Ok(speeds)
    }
}

/// Refuses to restore a whole cluster in place of a VM of its name.
fn check_only(manifest: &Manifest) -> Result<(), HostError> {
    let (group, number) = (&manifest.group, manifest.number);
    if matches!(&manifest.members[..], [one] if GroupName::from(&one.name) == *group) {
        return Ok(());
    }
    let members: Vec<&str> = manifest.members.iter().map(|entry| &*entry.name).collect();
    let message = format!(
        "snapshot {number} of {group} is a cluster's of that name, of {}: `understudy cluster restore \
         {group}@{number}` restores all of it",
        members.join(", ")
    );
    Err(HostError::new(ErrorKind::Conflict, message))
}

/// A cluster is restored as the configuration has it: members whose lists differ would not hear each other once one of
/// them has moved.
fn check_list(manifest: &Manifest, cluster: &ClusterConfig) -> Result<(), HostError> {
    let saved: Vec<VmName> = manifest.members.iter().map(|entry| entry.name.clone()).collect();
    let members: Vec<VmName> = cluster.members.keys().cloned().collect();
    if saved == members {
        return Ok(());
    }
    let (group, number) = (&manifest.group, manifest.number);
    let message = format!(
        "snapshot {number} of {group} has the members {}, and [cluster.{group}] here {}: restore it with `members` as \
         they were, on all its hosts",
        listed(&saved),
        listed(&members)
    );
    Err(HostError::new(ErrorKind::Conflict, message))
}

/// The host that runs a VM, and the bytes of its memory.
fn find_running(vm: &VmName, inquiry: &Inquiry) -> Result<(HostName, u64), HostError> {
    inquiry.runner().ok_or_else(|| {
        let message = format!(
            "{vm} runs on no host that answers, so no snapshot was taken{}",
            inquiry.silence()
        );
        HostError::new(ErrorKind::NotFound, message)
    })
}

/// Hosts to which the members go: where each ran, unless other hosts are named; then in turn, those
/// that ran on one of them there.
fn place_members(
    manifest: &Manifest,
    onto: &[HostName],
    place: Option<&HostName>,
) -> Vec<HostName> {
    let mut turn = onto.iter().cycle();
    let host_of = |entry: &understudy_snapshot::MemberEntry| {
        if onto.is_empty() {
            return place.unwrap_or(&entry.host).to_owned();
        }
        match onto.contains(&entry.host) {
            true => entry.host.clone(),
            false => turn.next().expect("a cycle of at least one").clone(),
        }
    };
    manifest.members.iter().map(host_of).collect()
}

/// Facts that are known of each member before its restore.
fn loads(
    store: &Store,
    members: &[MemberManifest],
    request: &RestoreRequest,
    hosts: &[HostName],
    speeds: &BTreeMap<HostName, u64>,
) -> Result<Vec<Load>, HostError> {
    let load = |(member, host): (&MemberManifest, &HostName)| {
        let set = match request.mode {
            Mode::WorkingSet => store.by_sampling(member)?,
            _ => store.working_set(member)?,
        };
        let all = member.machine.memory / understudy_snapshot::UNIT_BYTES as u64;
        let wanted = request.mode.pages_before_start(request.working_set, set.size, set.size, all);
        let sharing = hosts.iter().filter(|other| *other == host).count() as u64;
        Ok(Load {
            wanted,
            least: 0,
            most: all.min(wanted.max(2 * set.size)),
            bytes_per_second: (speeds[host] / sharing).max(1),
            beside: BESIDE,
        })
    };
    let loads: Result<_, understudy_snapshot::StoreError> =
        members.iter().zip(hosts).map(load).collect();
    loads.map_err(|error| store_error("", error))
}

fn plan(order: &StartOrder, loads: &[Load], mode: Mode) -> Plan {
    if !mode.has_line() {
        return Plan::unmoved(order, loads);
    }
    Plan::moved(order, loads, GAP).unwrap_or_else(|why| {
        warn!("working-set sizes are not moved: {why}");
        Plan::unmoved(order, loads)
    })
}

/// Number of incarnations of a group that the arbiter has granted.
fn granted(arbiter: &Arbiter, group: &GroupName) -> Result<u64, HostError> {
    let current = arbiter.current(Key::Incarnation(group));
    let current =
        current.map_err(|error| HostError::new(ErrorKind::Unreachable, error.to_string()))?;
    Ok(current.map_or(0, |owner| owner.generation.0))
}

impl Host {
    /// Number of times that the group was restored, by the arbiter's record.
    pub(super) fn incarnation_of(&self, group: &GroupName) -> Result<Incarnation, HostError> {
        let known = self.snapshots.last_incarnation(group);
        let Some(arbiter) = &self.arbiter else { return Ok(known) };
        let current = Incarnation::of(granted(arbiter, group)?);
        Ok(known.max(current.ok_or_else(|| worn_out(group))?))
    }

    /// An error unless an order is of an incarnation that the arbiter has granted: nobody else's can be counted on from.
    pub(super) fn check_granted(
        &self,
        group: &GroupName,
        incarnation: Incarnation,
    ) -> Result<(), HostError> {
        let Some(arbiter) = &self.arbiter else { return Ok(()) };
        let granted = granted(arbiter, group)?;
        if u64::from(incarnation.0) <= granted {
            return Ok(());
        }
        let message = format!(
            "it is to be restored in incarnation {} of {group}, and the arbiter has granted no more than \
             {granted}: whoever ordered that has not won it, or asks another arbiter; see that all hosts \
             use the same one, and order the restore again",
            incarnation.0
        );
        Err(HostError::new(ErrorKind::Conflict, message))
    }

    /// An incarnation that nobody has had. Without an arbiter all is on one host, whose clock will do.
    fn next_incarnation(
        &self,
        group: &GroupName,
        saved: Incarnation,
    ) -> Result<Incarnation, HostError> {
        if self.arbiter.is_none() {
            let next = saved.next().ok_or_else(|| worn_out(group))?;
            let now = Incarnation::of(unix_now()).unwrap_or(next);
            return Ok(now.max(next));
        }
        let former = self.incarnation_of(group)?.max(saved);
        former.next().ok_or_else(|| worn_out(group))?;
        let won = self.take_ownership(Key::Incarnation(group), Generation(former.0.into()))?;
        Incarnation::of(won.0).ok_or_else(|| worn_out(group))
    }
}

/// A group that, by what some host has said, has been restored more often than can be counted.
fn worn_out(group: &GroupName) -> HostError {
    let message = format!(
        "{group} has no incarnation left that could be counted on: somebody has named one that nobody has won. Remove the \
         arbiter's records cluster.{group} and restore.{group} (docs/FILES.md), with nothing of the group running"
    );
    HostError::new(ErrorKind::Conflict, message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use understudy_protocol::literal;
    use understudy_snapshot::{Blob, Compression, MemberEntry};

    /// Regression: all of it was restored, onto the host that was asked for one VM.
    #[test]
    fn a_cluster_is_not_restored_in_place_of_a_vm() {
        let entry = |name| MemberEntry {
            name,
            host: literal("a"),
            memory: 64 << 20,
            part: Blob::default(),
        };
        let check = |members: &[&'static str]| {
            check_only(&Manifest {
                group: literal("db"),
                number: SnapshotNumber(3),
                label: None,
                taken_at: 0,
                incarnation: Incarnation(0),
                compression: Compression::Lz4,
                members: members.iter().map(|&name| entry(literal(name))).collect(),
                crossings: vec![],
            })
        };
        assert!(check(&["db"]).is_ok());
        for members in [&["db", "web"][..], &["web"]] {
            let refused = check(members).unwrap_err();
            assert!(refused.message.contains("cluster restore db@3"), "{refused}");
        }
    }
}
