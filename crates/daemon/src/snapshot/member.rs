//! A VM as a member of its cluster: its seat at the cluster's network, and what its cut tells
//! whoever takes its snapshots.

use super::frames::{self, CutListener, Joining, Seat};
use crate::host::Host;
use anyhow::{Context, bail};
use crossbeam_channel::{Receiver, Sender};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use tracing::warn;
use understudy_cluster::Stop;
use understudy_cluster::messages::GroupPlaces;
use understudy_machine::Machine;
use understudy_protocol::Generation;
use understudy_protocol::{GroupName, VmName};
use understudy_snapshot::{InFlightFrame, Incarnation, Member, SnapshotNumber};
use understudy_threads::{Mutex, lock};

/// Time for all members to be connected, before a snapshot is begun.
const CONNECTED: Duration = Duration::from_secs(4);
/// Time for the last frames that were in flight to arrive. They are milliseconds away, unless a
/// connection is lost.
const ARRIVED: Duration = Duration::from_secs(30);
const LOOK: Duration = Duration::from_millis(100);

/// A member that runs here.
pub struct MemberSeat {
    cluster: GroupName,
    state: Mutex<State>,
}

/// The seat, and who waits for an event of the cut.
#[derive(Default)]
struct State {
    /// None until it is taken.
    seat: Option<Seat>,
    number: SnapshotNumber,
    take: Option<Sender<()>>,
    log: Option<Sender<()>>,
    /// Number that came before the seat was known.
    early: Option<SnapshotNumber>,
}

impl CutListener for MemberSeat {
    fn take(&self, number: SnapshotNumber) {
        let mut state = lock(&self.state);
        let prepared = state.number == number;
        if let Some(take) = state.take.take_if(|_| prepared) {
            // Whoever waits may have given up.
            let _ = take.try_send(());
            return;
        }
        state.early = Some(number);
        drop(state);
        self.let_pass();
    }

    fn log_complete(&self, number: SnapshotNumber) {
        let state = lock(&self.state);
        if let (true, Some(log)) = (state.number == number, &state.log) {
            let _ = log.try_send(());
        }
    }
}

impl MemberSeat {
    /// All members prepare before any takes a snapshot. One that nobody prepares here was over
    /// before this member was there, or is given up because of it: it is not waited for.
    fn let_pass(&self) {
        let (seat, early) = {
            let mut state = lock(&self.state);
            let Some(seat) = state.seat.clone() else { return };
            (seat, state.early.take())
        };
        if let Some(number) = early {
            seat.over(number);
        }
    }

    fn seat(&self) -> Seat {
        lock(&self.state).seat.clone().expect("set before anybody else knows of it")
    }

    /// Waits until frames reach all members.
    pub fn prepare(&self) -> anyhow::Result<()> {
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
        (state.number, state.take, state.log) = (number, Some(take), None);
        told
    }

    /// The coordinator says that it is to be taken. False if the cut knows a later snapshot.
    pub fn take_now(&self, number: SnapshotNumber) -> bool {
        self.seat().take(number);
        let state = lock(&self.state);
        state.number != number || state.take.is_none()
    }

    /// The VM stands still for it. Gives the channel on which the cut says when the last frame
    /// in flight has come.
    pub fn taken(&self, machine: &Machine, number: SnapshotNumber) -> anyhow::Result<Receiver<()>> {
        let (log, complete) = crossbeam_channel::bounded(1);
        lock(&self.state).log = Some(log);
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
        if state.number == number {
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
    /// The VM, which runs here or is about to, and is this host's in that generation, is a
    /// member of the cluster that this host's configuration has it in, if any.
    pub(crate) fn join_cluster(self: &Arc<Self>, machine: &Machine, generation: Generation) {
        let vm = &machine.definition().name;
        let mut clusters = self.config.clusters.iter();
        let Some((name, cluster)) = clusters.find(|(_, known)| known.members.contains_key(vm))
        else {
            return;
        };
        let group = GroupPlaces {
            name: name.clone(),
            vms: cluster.members.keys().cloned().collect(),
            hosts: cluster.members.values().cloned().collect(),
        };
        let join = || -> anyhow::Result<()> {
            let incarnation = self.incarnation_of(name)?;
            let number = self.snapshots.last_number(name);
            self.join(machine, generation, &group, incarnation, number).map(drop)
        };
        if let Err(error) = join() {
            warn!(%vm, "its frames do not go through the cluster {name}: {error:#}");
        }
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
        let own = Arc::new(MemberSeat { cluster: group.name.clone(), state: Mutex::default() });
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
        let former = self.snapshots.known.lock().members.insert(vm.clone(), own.clone());
        drop(former);
        Ok(own)
    }

    /// A VM's seat in a group, if it has one.
    pub(super) fn seat_of(&self, vm: &VmName, group: &GroupName) -> Option<Arc<MemberSeat>> {
        let known = self.snapshots.known.lock();
        known.members.get(vm).filter(|seat| seat.cluster == *group).cloned()
    }
}
