//! Preparation of a VM that runs from a member's part of a snapshot: QEMU on fresh memory, its
//! disks, its device state.

use super::former;
use super::placement::runs_elsewhere;
use crate::host::Host;
use crate::lease::{Busy, Contender, FormerLease};
use crate::recover::OwnersWord;
use anyhow::{Context, anyhow, bail};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::thread;
use std::time::Duration;
use understudy_cluster::Stopped;
use understudy_cluster::boot_files::BootFiles;
use understudy_cluster::disk_fill::DiskFiller;
use understudy_cluster::early::Early;
use understudy_cluster::fill::Filler;
use understudy_cluster::messages::{RestoreTask, SavedVm};
use understudy_cluster::source::Source;
use understudy_cluster::trial::Watch;
use understudy_disk::incomplete_mark;
use understudy_machine::{Machine, Plan};
use understudy_memory::{GuestRam, MAIN_MEMORY, RamBlock};
use understudy_protocol::{BaseId, BlockId, DiskIndex, Generation, HostName, Ownership, VmName};
use understudy_qemu::{Role, VmDefinition};
use understudy_replication::moments::pass;
use understudy_snapshot::{
    Area, AreaEntry, AreaMap, InFlightFrame, MemberManifest, Store, UNIT_BYTES,
};
use understudy_threads::spawn;

/// Time between two looks whether the owner is known by now to let nothing out.
const LOOK: Duration = Duration::from_millis(5);

/// Prefix of the names of restored disks' files.
pub(super) const PREFIX: &str = "restored-";

/// A member that could start.
pub struct Prepared {
    machine: Arc<Machine>,
    /// The host that owned the VM, which may have a copy of it.
    owner: Option<HostName>,
    /// Its lease, if it did not answer, and those of owners before it.
    former: FormerLease,
    filler: Arc<Filler>,
    disks: Arc<Vec<DiskFiller>>,
    /// What its disks count their changes from: the snapshot.
    base: BaseId,
    /// Frames in flight to it.
    frames: Vec<InFlightFrame>,
    images: Images,
}

/// Files of a restore; removed unless it succeeds.
struct Images(Vec<PathBuf>);

impl Drop for Images {
    fn drop(&mut self) {
        former::remove(&self.0);
    }
}

/// Loads all that the start waits for, and the device state. `filling` gets the fillers as soon as there are some.
pub fn prepare(
    host: &Arc<Host>,
    task: &RestoreTask,
    pages: u64,
    stop: &Arc<AtomicBool>,
    filling: impl FnOnce(&Arc<Filler>, &Arc<Vec<DiskFiller>>),
) -> anyhow::Result<Prepared> {
    let store = Arc::new(host.config.store_keys.open(&task.store)?);
    host.begin_reading(&store, task);
    let member = member_of(&store, task)?;
    let saved = SavedVm::of(&member)?;
    host.check_unused(&saved.definition)?;
    host.await_former(task.vm())?;
    let (asker, vm) = (host.clone(), task.vm().clone());
    let (group, incarnation) = (task.group.name.clone(), task.incarnation);
    let owner = spawn("ask-owner", move || {
        asker.check_granted(&group, incarnation)?;
        await_owner(&asker, &vm)
    })?;
    let directory = host.vm_directory(task.vm())?;
    let mut images = Images(Vec::new());
    let foreign = saved.definition;
    let source = Source::new(store.clone(), host.snapshots.way.clone());
    let mut maps = memory_maps(&store, &member)?;
    let main = maps.remove(&MAIN_MEMORY).context("the main memory is not in the snapshot")?;
    let queue = task.queue(&store, &member)?;
    // What QEMU's start waits for comes first from the store.
    let boot = BootFiles::of(&member, &directory, &foreign);
    boot.fetch(&store)?;
    let ram = Arc::new(GuestRam::create(foreign.memory.bytes())?);
    let early = Early::begin(source.clone(), ram.clone(), main, &queue, pages, stop.clone())?;
    boot.copy(&store)?;
    let base = BaseId::new_here();
    let disks = make_disks(&source, &member, task, (&directory, base), &foreign, &mut images)?;
    let disks = Arc::new(disks);
    let places = disks.iter().map(|filler| filler.disk().path()).collect();
    let definition = foreign.here(boot.places(), places)?;
    let machine = host.launch(Plan {
        machine_type: member.machine.machine_type.clone(),
        accelerator: saved.accelerator,
        run_dir: &directory,
        qemu: &host.capabilities.binary,
        agent: host.agent.path(),
        run_as: &host.config.run_as,
        limits: host.config.limits,
        disks: disks.iter().map(|filler| filler.disk().clone()).collect(),
        definition,
        role: Role::Standby,
        lockstep: None,
        may_be_adopted: true,
        former: None,
        ram: Some(ram),
        on_event: host.event_sink(task.vm()),
    })?;
    check_blocks(&member, &machine)?;
    let filler = Filler::new(source, machine.clone(), maps, early.loading().clone());
    let filler = Arc::new(filler);
    filling(&filler, &disks);
    filler.load_auxiliary(stop)?;
    let took = early.finish()?;
    host.snapshots.note_loaded(filler.state().pages, took);
    Stopped::check(stop)?;
    // What takes time is done here: when members start in a line, each start is short.
    let frames = store.frames(&member)?;
    filler.attach()?;
    machine.load(&store.device_state(&member)?)?;
    // A silent owner's lease may take long: who is given up does not wait for it.
    while !owner.is_finished() {
        Stopped::check(stop)?;
        thread::sleep(LOOK);
    }
    let (owner, former) = owner.join().map_err(|_| {
        anyhow!("whether {} runs on its owner could not be asked; see this host's log", task.vm())
    })??;
    Ok(Prepared { machine, owner, former, filler, disks, base, frames, images })
}

/// Sees that the owner of a VM does nothing with it. Whoever orders a restore has asked, too, but
/// this host answers for what it starts. An owner that does not answer may be down for good: it is
/// waited until it lets nothing out in any case.
fn await_owner(host: &Host, vm: &VmName) -> anyhow::Result<(Option<HostName>, FormerLease)> {
    pass("ask-owner");
    match host.ask_owner(vm) {
        OwnersWord::Idle(None) => Ok((None, FormerLease::default())),
        OwnersWord::Idle(Some(now)) => {
            let former = await_former(host, vm, &now)?;
            Ok((now.host.filter(|owner| *owner != host.config.name), former))
        }
        OwnersWord::Busy(owner, busy) => bail!(runs_elsewhere(vm, &owner, &busy)),
        // Where it keeps no lease, the operator's --force counts.
        OwnersWord::Silent(owner, generation) => {
            let now = Ownership { host: Some(owner.clone()), generation };
            let former = await_former(host, vm, &now)?;
            let contender = Contender::Owner(owner.clone(), generation);
            Ok((Some(owner), former.and(host.await_lease(vm, &contender, true)?)))
        }
        OwnersWord::Unknown(why) => {
            bail!(
                "whether {vm} runs on its owner cannot be told: the arbiter does not answer: {why}; restore it again once \
                 it does"
            )
        }
    }
}

/// See [`Host::await_former_owners`].
fn await_former(host: &Host, vm: &VmName, now: &Ownership) -> anyhow::Result<FormerLease> {
    host.await_former_owners(vm, now)?
        .map_err(|Busy(owner, busy)| anyhow!(runs_elsewhere(vm, &owner, &busy)))
}

impl Prepared {
    /// Filler of its memory.
    pub fn filler(&self) -> Arc<Filler> {
        self.filler.clone()
    }

    /// Fillers of its disks.
    pub fn disks(&self) -> Arc<Vec<DiskFiller>> {
        self.disks.clone()
    }

    /// The snapshot, as its disks count their changes from it.
    pub fn base(&self) -> BaseId {
        self.base
    }

    /// Wins the VM from the arbiter and lets it run.
    pub fn start(mut self, host: &Arc<Host>, task: &RestoreTask) -> anyhow::Result<()> {
        let _adding = host.adding.lock();
        host.check_unused(self.machine.definition())?;
        let _claim = host.arrivals.begin_claim(task.vm());
        let generation = host.claim_after(task.vm(), task.newest, &self.former)?;
        let run = || -> anyhow::Result<()> {
            host.note_restoring(&self.machine, generation, task, self.owner.clone())?;
            fail::fail_point!("restore-claimed", |_| Err(anyhow!("a test says so")));
            host.check_former(task.vm(), &self.former)?;
            let watch = Watch::begin(&self.machine, &self.filler)?;
            self.join(host, task, generation)?;
            self.machine.start_loaded()?;
            if let Some(watch) = watch {
                watch.run();
            }
            Ok(())
        };
        if let Err(error) = run() {
            self.machine.halt();
            host.end_restore(task.vm(), &task.id);
            host.release(task.vm(), generation);
            return Err(error);
        }
        host.add_restored(self.machine.clone(), generation, &task.id);
        // They are on record.
        self.images.0.clear();
        Ok(())
    }
}

impl Prepared {
    /// Joins its group, as the member that it was; what was in flight to it comes first.
    fn join(
        &self,
        host: &Arc<Host>,
        task: &RestoreTask,
        generation: Generation,
    ) -> anyhow::Result<()> {
        if task.group.vms.len() == 1 {
            host.join_cluster(&self.machine, generation);
            return Ok(());
        }
        let seat =
            host.join(&self.machine, generation, &task.group, task.incarnation, task.number)?;
        seat.deliver(&self.frames);
        Ok(())
    }
}

/// A member's part of the snapshot that is restored.
pub fn member_of(store: &Store, task: &RestoreTask) -> anyhow::Result<MemberManifest> {
    let manifest = store.snapshot(&task.group.name, Some(task.number))?;
    let entry = manifest.members.iter().find(|entry| entry.name == *task.vm());
    let entry = entry.with_context(|| format!("{} is not in the snapshot", task.vm()))?;
    Ok(store.member(entry)?)
}

/// Area of a disk in the snapshot.
pub fn disk_area(member: &MemberManifest, at: usize) -> anyhow::Result<&AreaEntry> {
    let of_disk = |area: Area| matches!(area, Area::Disk(index) if usize::from(index.0) == at);
    let area = member.areas.iter().find(|entry| of_disk(entry.area));
    area.with_context(|| format!("disk {at} is not in the snapshot"))
}

/// Makes new images beside those that are there: until the VM runs, nothing of the former is
/// touched.
fn make_disks(
    source: &Source,
    member: &MemberManifest,
    task: &RestoreTask,
    (directory, base): (&Path, BaseId),
    definition: &VmDefinition,
    images: &mut Images,
) -> anyhow::Result<Vec<DiskFiller>> {
    let mut fillers = Vec::new();
    for at in 0..definition.disks.len() {
        let area = disk_area(member, at)?;
        let name = format!("{PREFIX}{}-{}-disk{at}.img", task.number, task.id);
        let path = directory.join(name);
        images.0.extend([path.clone(), incomplete_mark(&path)]);
        let (map, index) = (source.store.area(area)?, DiskIndex(at as u16));
        fillers.push(DiskFiller::create(source.clone(), map, index, area.bytes, &path, base)?);
    }
    Ok(fillers)
}

/// The RAM blocks of a member's part.
fn blocks_of(member: &MemberManifest) -> impl Iterator<Item = (BlockId, &AreaEntry)> {
    member.areas.iter().filter_map(|entry| match entry.area {
        Area::Memory(id) => Some((id, entry)),
        Area::Disk(_) => None,
    })
}

/// Their maps.
fn memory_maps(
    store: &Store,
    member: &MemberManifest,
) -> anyhow::Result<BTreeMap<BlockId, AreaMap>> {
    blocks_of(member).map(|(id, entry)| Ok((id, store.area(entry)?))).collect()
}

/// Checks that the RAM blocks are those of the QEMU that is there.
fn check_blocks(member: &MemberManifest, machine: &Machine) -> anyhow::Result<()> {
    for (id, entry) in blocks_of(member) {
        let pages = entry.bytes.div_ceil(UNIT_BYTES as u64);
        let is_it = |block: &RamBlock| block.name() == entry.name && block.pages() == pages;
        if !machine.blocks().iter().find(|block| block.id() == id).is_some_and(is_it) {
            bail!(
                "this host's QEMU has no RAM block {} of {} bytes, which {} was saved with; \
                 restore it with the build of QEMU that it ran in",
                entry.name,
                entry.bytes,
                member.name
            );
        }
    }
    match blocks_of(member).count() == machine.blocks().len() {
        true => Ok(()),
        false => bail!("this host's QEMU has other RAM blocks than {} was saved with", member.name),
    }
}
