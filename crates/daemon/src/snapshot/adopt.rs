//! Adoption of a restored VM whose daemon died while its memory or disks were being
//! loaded. What is there of them is what the kernel and the disks' marks say; the rest is loaded as
//! ever.

use super::prepare::{disk_area, member_of};
use super::restore::Restoring;
use crate::host::Host;
use crate::orphans::Orphan;
use crate::vm::PrimaryVm;
use anyhow::{Context, bail, ensure};
use serde::{Deserialize, Serialize};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::thread;
use std::time::Duration;
use tracing::warn;
use understudy_cluster::disk_fill::DiskFiller;
use understudy_cluster::fill::Filler;
use understudy_cluster::messages::RestoreTask;
use understudy_cluster::source::Source;
use understudy_machine::custody::{Custody, OF_RESTORE};
use understudy_machine::{Adoption, Machine, MachineNote};
use understudy_memory::MAIN_MEMORY;
use understudy_protocol::{DiskIndex, Generation, LeaseAnswer};
use understudy_replication::resync;
use understudy_snapshot::{Area, AreaMap, Incarnation, MemberManifest, Page, Store};

/// Before an arbiter that did not answer is asked again.
const AGAIN: Duration = Duration::from_secs(1);

/// What the next daemon must know.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct RestoreNote {
    /// The restore.
    pub task: RestoreTask,
    /// The generation at which this host has the VM.
    pub generation: Generation,
    /// The machine.
    pub machine: MachineNote,
}

/// Entrusts the guest to a custodian: should this daemon die from now on, it stands still until the
/// next one.
pub(super) fn entrust(host: &Host, task: &RestoreTask, vm: &PrimaryVm) {
    let machine = vm.machine();
    let begin = || -> anyhow::Result<Custody> {
        let (note, descriptors) = machine.entrusted()?;
        let note = RestoreNote { task: task.clone(), generation: vm.generation(), machine: note };
        Custody::begin(&host.vm_directory(vm.name())?.join(OF_RESTORE), &note, &descriptors)
    };
    match begin() {
        Ok(custody) => machine.set_custody(custody),
        Err(error) => {
            let words =
                format!("it ends with this daemon, if not all is loaded by then: {error:#}");
            vm.events.note(words);
        }
    }
}

/// Facts that must be read before a VM goes on, from the store and from the arbiter.
pub(crate) struct Remaining {
    source: Source,
    disks: Arc<Vec<DiskFiller>>,
    memory: AreaMap,
    /// The order in which that is loaded.
    queue: Vec<Page>,
    /// Incarnation of the VM's group, now.
    incarnation: Incarnation,
}

impl Host {
    /// Goes on with the VM of an orphan, which is this host's. After an error it stands still as
    /// before, or its QEMU has ended.
    pub(crate) fn resume_restore(
        self: &Arc<Self>,
        orphan: &Orphan,
        remaining: Remaining,
    ) -> anyhow::Result<()> {
        let RestoreNote { task, generation, machine: note } = &orphan.note;
        let descriptors = orphan.descriptors.iter().map(OwnedFd::try_clone);
        let disks: Vec<_> = remaining.disks.iter().map(|it| it.disk().clone()).collect();
        let directory = self.vm_directory(task.vm())?;
        if let Some(record) = self.record(task.vm())? {
            resync::go_on(&self.records, &record, &disks, &directory)?;
        }
        let machine = Arc::new(Machine::adopt(Adoption {
            note,
            descriptors: descriptors.collect::<Result<_, _>>()?,
            run_dir: &directory,
            limits: self.config.limits,
            disks,
            on_event: self.event_sink(task.vm()),
        })?);
        let went_on = self.go_on_in(&machine, task, *generation, remaining);
        went_on.inspect_err(|_| machine.halt())
    }

    /// Reads what is needed to go on.
    pub(crate) fn remaining(&self, note: &RestoreNote) -> anyhow::Result<Remaining> {
        let task = &note.task;
        let store = Arc::new(self.config.store_keys.open(&task.store)?);
        self.begin_reading(&store, task);
        let member = member_of(&store, task)?;
        let source = Source::new(store.clone(), self.snapshots.way.clone());
        Ok(Remaining {
            disks: Arc::new(resume_disks(&source, &member, &note.machine)?),
            memory: main_memory(&store, &member)?,
            queue: task.queue(&store, &member)?,
            incarnation: self.incarnation_of(&task.group.name)?.max(task.incarnation),
            source,
        })
    }

    fn go_on_in(
        self: &Arc<Self>,
        machine: &Arc<Machine>,
        task: &RestoreTask,
        generation: Generation,
        remaining: Remaining,
    ) -> anyhow::Result<()> {
        let Remaining { source, disks, memory, queue, incarnation } = remaining;
        self.presences_of(task.vm(), machine);
        let filler = Arc::new(Filler::resume(source, machine.clone(), memory, &queue)?);
        self.snapshots.note_number(&task.group.name, task.number);
        self.snapshots.note_incarnation(&task.group.name, incarnation);
        self.rejoin(machine, generation, &RestoreTask { incarnation, ..task.clone() });
        let restoring = Restoring::resumed(self, task, &filler, disks);
        let vm = self.with_fresh_lease(machine, generation)?;
        let _adding = self.adding.lock();
        self.show_primary(&vm);
        vm.note_restore(&task.id);
        let (known_as, known) = (task.vm().to_owned(), restoring.clone());
        drop(self.snapshots.note(|all| all.restorings.insert(known_as, known)));
        machine.open_network(&[], &[]);
        machine
            .wake(move |error| vm.events.note(format!("its QEMU does not answer: {error:#}")))?;
        restoring.go_on();
        Ok(())
    }

    /// The VM, as soon as the arbiter says that it is this host's: another host may have waited for the end of its lease
    /// while it stood still, and takes nothing from here on.
    fn with_fresh_lease(
        self: &Arc<Self>,
        machine: &Arc<Machine>,
        generation: Generation,
    ) -> anyhow::Result<Arc<PrimaryVm>> {
        loop {
            let vm = self.new_primary(machine.clone(), generation, None);
            let why = match self.resume_lease(&vm) {
                LeaseAnswer::Own => return Ok(vm),
                LeaseAnswer::Moved { why, .. } => bail!("{why}"),
                LeaseAnswer::Unreachable(why) => why,
            };
            ensure!(!self.orphans.is_given_up(vm.name()), "nobody wants it any more");
            self.orphans.note(vm.name(), why);
            thread::sleep(AGAIN);
        }
    }

    /// It is the member of its group that it was.
    fn rejoin(self: &Arc<Self>, machine: &Machine, generation: Generation, task: &RestoreTask) {
        if task.group.vms.len() == 1 {
            return self.join_cluster(machine, generation);
        }
        let join = || -> anyhow::Result<()> {
            fail::fail_point!("rejoin", |_| Err(anyhow::anyhow!("a test says so")));
            let (group, incarnation) = (&task.group, task.incarnation);
            self.join(machine, generation, group, incarnation, task.number).map(drop)
        };
        if let Err(error) = join() {
            let (vm, group) = (task.vm(), &task.group.name);
            warn!(%vm, "its frames do not go through the cluster {group}: {error:#}");
            // What was in the way may pass, and is told of until then.
            self.join_cluster(machine, generation);
        }
    }
}

fn resume_disks(
    source: &Source,
    member: &MemberManifest,
    note: &MachineNote,
) -> anyhow::Result<Vec<DiskFiller>> {
    let resume = |(at, path): (usize, &Path)| {
        let area = disk_area(member, at)?;
        let (map, index) = (source.store.area(area)?, DiskIndex(at as u16));
        DiskFiller::resume(source.clone(), map, index, area.bytes, path)
    };
    let paths = note.definition.disks.iter().map(|disk| disk.path.as_path());
    paths.enumerate().map(resume).collect()
}

fn main_memory(store: &Store, member: &MemberManifest) -> anyhow::Result<AreaMap> {
    let area = member.areas.iter().find(|entry| entry.area == Area::Memory(MAIN_MEMORY));
    Ok(store.area(area.context("the main memory is not in the snapshot")?)?)
}
