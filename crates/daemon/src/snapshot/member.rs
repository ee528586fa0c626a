//! A VM as a member of its cluster: its seat at the cluster's network, and what its cut tells
//! whoever takes its snapshots.

use super::frames::{self, CutListener, Joining, Seat, listed};
use crate::config::ClusterConfig;
use crate::containment;
use crate::host::Host;
use anyhow::{Context, bail, ensure};
use crossbeam_channel::{Receiver, Sender};
use std::fmt;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use tracing::warn;
use understudy_cluster::Stop;
use understudy_cluster::messages::GroupPlaces;
use understudy_machine::Machine;
use understudy_protocol::Generation;
use understudy_protocol::{GroupName, VmName};
use understudy_replication::handshake::ClusterOffer;
use understudy_report::error::{ErrorKind, HostError};
use understudy_snapshot::{Gate, InFlightFrame, Incarnation, Member, SnapshotNumber};
use understudy_threads::{Mutex, lock};

/// Time for all members to be connected, before a snapshot is begun.
const CONNECTED: Duration = Duration::from_secs(4);
/// Time for the last frames that were in flight to arrive. They are milliseconds away, unless a
/// connection is lost.
const ARRIVED: Duration = Duration::from_secs(30);
const LOOK: Duration = Duration::from_millis(100);

/// Pause before it is tried again to make a VM the member that it is to be.
const AGAIN: Duration = Duration::from_secs(1);

/// A VM that is not the member that it is to be, since that failed.
#[derive(Debug)]
pub(super) struct Outside {
    cluster: GroupName,
    why: String,
}

impl fmt::Display for Outside {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "its frames do not go through the cluster {}: {}", self.cluster, self.why)
    }
}

/// A member that runs here.
pub struct MemberSeat {
    cluster: GroupName,
    /// The members, by whose order they are numbered.
    members: Vec<VmName>,
    state: Mutex<State>,
}

/// The seat, and who waits for an event of the cut.
#[derive(Default)]
struct State {
    /// None until it is taken.
    seat: Option<Seat>,
    gate: Gate,
    take: Option<Sender<()>>,
    log: Option<Sender<()>>,
}

impl CutListener for MemberSeat {
    fn take(&self, number: SnapshotNumber) {
        let mut state = lock(&self.state);
        if state.gate.take(number) {
            // Whoever waits may have given up.
            let _ = state.take.take().map(|take| take.try_send(()));
            return;
        }
        drop(state);
        self.let_pass();
    }

    fn log_complete(&self, number: SnapshotNumber) {
        let state = lock(&self.state);
        if let (true, Some(log)) = (state.gate.log_complete(number), &state.log) {
            let _ = log.try_send(());
        }
    }
}

impl MemberSeat {
    /// What nobody prepares here is not waited for; said once the seat is known.
    fn let_pass(&self) {
        let (seat, passed) = {
            let mut state = lock(&self.state);
            let Some(seat) = state.seat.clone() else { return };
            (seat, state.gate.passed())
        };
        if let Some(number) = passed {
            seat.over(number);
        }
    }

    fn seat(&self) -> Seat {
        lock(&self.state).seat.clone().expect("set before anybody else knows of it")
    }

    /// Waits until frames reach all members, which are to be these.
    pub fn prepare(&self, members: &[VmName]) -> anyhow::Result<()> {
        ensure!(
            *members == self.members,
            "the cluster {} cannot be snapshotted: its members are {} on the host that was told to, and {} here",
            self.cluster,
            listed(members),
            listed(&self.members)
        );
        let deadline = Instant::now() + CONNECTED;
        while let Some(lacks) = self.seat().lacks() {
            if Instant::now() > deadline {
                bail!("the cluster {} cannot be snapshotted: {lacks}", self.cluster);
            }
            thread::sleep(LOOK);
        }
        Ok(())
    }

    /// The channel on which the cut says when to pause the VM.
    pub fn await_take(&self, number: SnapshotNumber) -> Receiver<()> {
        let (take, told) = crossbeam_channel::bounded(1);
        let mut state = lock(&self.state);
        state.gate.prepare(number);
        (state.take, state.log) = (Some(take), None);
        told
    }

    /// The coordinator says that it is to be taken. False if the cut knows a later snapshot.
    pub fn take_now(&self, number: SnapshotNumber) -> bool {
        self.seat().take(number);
        !lock(&self.state).gate.has_missed(number)
    }

    /// The VM stands still for it. Gives the channel on which the cut says when the last frame
    /// in flight has come.
    pub fn taken(&self, machine: &Machine, number: SnapshotNumber) -> anyhow::Result<Receiver<()>> {
        let (log, complete) = crossbeam_channel::bounded(1);
        {
            let mut state = lock(&self.state);
            state.gate.taken();
            state.log = Some(log);
        }
        self.seat().taken(machine, number)?;
        Ok(complete)
    }

    /// The frames in flight to the member.
    pub fn log(&self, complete: &Receiver<()>, stop: &Stop) -> anyhow::Result<Vec<InFlightFrame>> {
        let deadline = Instant::now() + ARRIVED;
        while complete.recv_timeout(LOOK).is_err() {
            stop.check()?;
            if Instant::now() > deadline {
                let lacks = self.seat().lacks().unwrap_or_else(|| "all are connected".into());
                bail!("frames that were in flight to it did not come to an end: {lacks}");
            }
        }
        let lost = "more frames were in flight to it than are kept: try again when its cluster is less busy";
        self.seat().log().context(lost)
    }

    /// Notes that this snapshot is over: all of it is saved, or there will be none.
    pub fn end(&self, number: SnapshotNumber) {
        let mut state = lock(&self.state);
        if state.gate.end(number) {
            (state.take, state.log) = (None, None);
        }
        drop(state);
        self.seat().over(number);
    }

    /// Gives the guest, which does not run yet, what was in flight to it.
    pub fn deliver(&self, log: &[InFlightFrame]) {
        self.seat().deliver(log);
    }
}

impl Host {
    /// The cluster that this host's configuration has a VM in, if any.
    fn cluster_of(&self, vm: &VmName) -> Option<(&GroupName, &ClusterConfig)> {
        let mut clusters = self.config.clusters.iter();
        clusters.find(|(_, known)| known.members.contains_key(vm))
    }

    /// The same, if it has other members, for the VM's backup.
    pub(crate) fn cluster_offer(&self, vm: &VmName) -> Option<ClusterOffer> {
        let (name, cluster) = self.cluster_of(vm)?;
        let members: Vec<VmName> = cluster.members.keys().cloned().collect();
        (members.len() > 1).then(|| ClusterOffer { name: name.clone(), members })
    }

    /// Refuses a member of a cluster that this host has not: once it was taken over, its fellows would not hear it any
    /// more.
    pub(crate) fn check_cluster(
        &self,
        vm: &VmName,
        offered: Option<&ClusterOffer>,
    ) -> Result<(), HostError> {
        let Some(ClusterOffer { name, members }) = offered else { return Ok(()) };
        let here = self.cluster_offer(vm);
        // With other members it has another network here, which passes frames over the bridge, and both hosts say so: lists
        // are changed on one host after the other.
        if here.as_ref().is_some_and(|here| here.name == *name) {
            return Ok(());
        }
        let here = match here {
            None => "in no cluster of several VMs".to_owned(),
            Some(here) => format!("in {} of {}", here.name, listed(&here.members)),
        };
        let message = format!(
            "{vm} is in the cluster {name} of {} where it runs, and {here} by the configuration that this host's daemon \
             has read: write the same [cluster.{name}] into that, and restart it",
            listed(members)
        );
        Err(HostError::new(ErrorKind::Invalid, message))
    }

    /// The VM, which runs here or is about to, and is this host's in that generation, is a
    /// member of the cluster that this host's configuration has it in, if any. What is in the way may pass.
    pub(crate) fn join_cluster(self: &Arc<Self>, machine: &Machine, generation: Generation) {
        let vm = machine.definition().name.clone();
        let Err(why) = self.try_join(machine, generation) else {
            return self.snapshots.note_outside(&vm, None);
        };
        warn!(%vm, "{why}");
        self.snapshots.note_outside(&vm, Some(why));
        let (host, name, presence) = (Arc::downgrade(self), vm.clone(), machine.presence());
        let again = move || {
            while presence.strong_count() > 0 {
                thread::sleep(AGAIN);
                let Some(host) = host.upgrade().filter(|host| !host.is_closing()) else { return };
                let machine = host.primary(&name).map(|vm| vm.machine());
                let is_it = |machine: &Arc<Machine>| machine.presence().ptr_eq(&presence);
                let Some(machine) = machine.ok().filter(is_it) else { continue };
                let outside = host.try_join(&machine, generation).err();
                let has_joined = outside.is_none();
                host.snapshots.note_outside(&name, outside);
                if has_joined {
                    return;
                }
            }
            if let Some(host) = host.upgrade() {
                host.snapshots.note_outside(&name, None);
            }
        };
        if let Err(error) = containment::spawn_for(self, &vm, "join-cluster", again) {
            warn!(%vm, "it is not tried again: cannot start a thread: {error}");
        }
    }

    /// The same at once, if that is possible.
    fn try_join(
        self: &Arc<Self>,
        machine: &Machine,
        generation: Generation,
    ) -> Result<(), Outside> {
        let Some((name, cluster)) = self.cluster_of(&machine.definition().name) else {
            return Ok(());
        };
        let group = GroupPlaces {
            name: name.clone(),
            vms: cluster.members.keys().cloned().collect(),
            hosts: cluster.members.values().cloned().collect(),
        };
        let join = || -> anyhow::Result<()> {
            fail::fail_point!("join-cluster", |_| Err(anyhow::anyhow!("a test says so")));
            let incarnation = self.incarnation_of(name)?;
            let number = self.snapshots.last_number(name);
            self.join(machine, generation, &group, incarnation, number).map(drop)
        };
        join().map_err(|error| Outside { cluster: name.clone(), why: format!("{error:#}") })
    }

    /// The machine is a member of a group in this incarnation.
    pub(super) fn join(
        self: &Arc<Self>,
        machine: &Machine,
        generation: Generation,
        group: &GroupPlaces,
        incarnation: Incarnation,
        number: SnapshotNumber,
    ) -> anyhow::Result<Arc<MemberSeat>> {
        let vm = &machine.definition().name;
        let Some(place) = group.vms.iter().position(|member| member == vm) else {
            bail!("{vm} is no member of {}", group.name);
        };
        let own = Arc::new(MemberSeat {
            cluster: group.name.clone(),
            members: group.vms.clone(),
            state: Mutex::default(),
        });
        let joining = Joining {
            members: group.vms.clone(),
            member: Member(place as u16),
            generation,
            incarnation,
            number,
            listener: own.clone(),
        };
        let network = self.snapshots.network(&group.name);
        let seat = frames::join(self, network, machine, joining)?;
        lock(&own.state).seat = Some(seat);
        own.let_pass();
        self.snapshots.note_incarnation(&group.name, incarnation);
        drop(self.snapshots.note(|known| known.members.insert(vm.clone(), own.clone())));
        Ok(own)
    }

    /// A VM's seat in a group, if it has one.
    pub(super) fn seat_of(&self, vm: &VmName, group: &GroupName) -> Option<Arc<MemberSeat>> {
        self.snapshots
            .look(|known| known.members.get(vm).filter(|seat| seat.cluster == *group).cloned())
    }
}
