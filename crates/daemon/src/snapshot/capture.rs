//! All of one member that a snapshot has: memory, disks, device state, what it boots from.

use super::member::MemberSeat;
use super::take::Start;
use crate::host::Host;
use crate::protection::check_blockers;
use crate::vm::PrimaryVm;
use anyhow::{Context, bail};
use crossbeam_channel::Receiver;
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use tracing::info;
use understudy_cluster::Stop;
use understudy_cluster::disk::DiskCapture;
use understudy_cluster::memory::{CaptureOptions, MemoryCapture, Taken};
use understudy_cluster::messages::{RestoreTask, TakeTask};
use understudy_cluster::part::{Content, Shape, put_part};
use understudy_cluster::store_keys::StoreKeys;
use understudy_cluster::upload::Upload;
use understudy_disk::ChangesTaken;
use understudy_machine::Machine;
use understudy_protocol::{BaseId, BlockId, DiskIndex};
use understudy_protocol::{GroupName, VmName};
use understudy_qemu::lockstep::LogErrand;
use understudy_snapshot::{Area, AreaMap, Part, SnapshotNumber, Store, StoreAddress};
use understudy_threads::lock;

/// The last snapshot that exists: what the next one need not save again.
#[derive(Clone)]
pub struct Base {
    /// What its machine counts changes from, if it still does.
    id: BaseId,
    store: StoreAddress,
    group: GroupName,
    number: SnapshotNumber,
    memory: Arc<BTreeMap<BlockId, AreaMap>>,
    disks: Arc<BTreeMap<DiskIndex, AreaMap>>,
    /// Machine that the memory and disks belong to: a VM that was started anew has others.
    machine: Weak<()>,
    /// Whether one that builds on it did not come to exist: some of it may be gone from the store.
    is_doubted: bool,
}

/// One that is stored, and does not exist yet. Dropped, what it saved counts as changed since the
/// one before.
pub struct Saved {
    base: Base,
    taken: Taken,
    /// Changes that its disks no longer tell of.
    disk_changes: Vec<ChangesTaken>,
}

impl Saved {
    /// The snapshot exists.
    pub fn commit(self) -> Base {
        self.taken.commit();
        self.disk_changes.into_iter().for_each(ChangesTaken::commit);
        self.base
    }
}

impl Base {
    /// Makes that of a VM that was just restored from this snapshot, all of it: its disks know what
    /// they have changed since then.
    pub fn of_restored(
        task: &RestoreTask,
        id: BaseId,
        machine: &Machine,
        keys: &StoreKeys,
    ) -> anyhow::Result<Base> {
        let store = keys.open(&task.store)?;
        let manifest = store.snapshot(&task.group.name, Some(task.number))?;
        let entry = manifest.members.iter().find(|entry| entry.name == *task.vm());
        let member = store.member(entry.context("it is not in the snapshot any more")?)?;
        let (mut memory, mut disks) = (BTreeMap::new(), BTreeMap::new());
        for entry in &member.areas {
            match entry.area {
                Area::Memory(id) => drop(memory.insert(id, store.area(entry)?)),
                Area::Disk(index) => drop(disks.insert(index, store.area(entry)?)),
            }
        }
        Ok(Base {
            id,
            store: task.store.clone(),
            group: task.group.name.clone(),
            number: task.number,
            memory: Arc::new(memory),
            disks: Arc::new(disks),
            machine: machine.presence(),
            is_doubted: false,
        })
    }

    /// A snapshot that builds on it was stored, and does not exist all the same.
    pub fn doubt(&mut self) {
        self.is_doubted = true;
    }

    /// That of a machine without memory and disks.
    #[cfg(test)]
    pub fn of_nothing(task: &TakeTask, machine: Weak<()>) -> Base {
        Base {
            id: BaseId::new_here(),
            store: task.store.clone(),
            group: task.group.name.clone(),
            number: SnapshotNumber(1),
            memory: Arc::default(),
            disks: Arc::default(),
            machine,
            is_doubted: false,
        }
    }

    /// Whether its machine is gone, so that no snapshot begins with it any more.
    pub fn is_of_gone(&self) -> bool {
        self.machine.strong_count() == 0
    }

    /// Whether it is still in the store that the next snapshot goes to.
    fn is_there(&self, task: &TakeTask, store: &Store, machine: &Machine) -> bool {
        let same = (&self.store, &self.group) == (&task.store, &task.group.name);
        if !same || !self.machine.ptr_eq(&machine.presence()) {
            return false;
        }
        let manifest = store.snapshot(&self.group, Some(self.number));
        manifest.is_ok_and(|manifest| !self.is_doubted || store.check_whole(&manifest).is_ok())
    }
}

/// One member, for one snapshot.
pub struct Capture {
    task: TakeTask,
    number: SnapshotNumber,
    seat: Option<Arc<MemberSeat>>,
    /// Receives a word when no frame is in flight to the member any more.
    complete: Option<Receiver<()>>,
    store: Store,
    vm: Arc<PrimaryVm>,
    machine: Arc<Machine>,
    qemu: String,
    base: Option<Base>,
    /// What it is to the next one.
    id: BaseId,
    memory: MemoryCapture,
    disks: DiskCapture,
    device_state: Vec<u8>,
    /// The working set in normal running, if that was sampled.
    sampled: Option<u64>,
    /// Time for which the guest stood still.
    paused: Duration,
}

impl Capture {
    /// Prepares the capture, while the guest runs.
    pub fn prepare(host: &Arc<Host>, start: Start<'_>) -> anyhow::Result<Capture> {
        let Start { task, number, base, seat } = start;
        let vm = host.going_primary(task.vm())?;
        let machine = vm.machine();
        // Protection that is just beginning is seen, or sees that a snapshot has begun.
        drop(lock(&vm.protecting));
        check(&vm, &machine)?;
        // What it cannot save it would leave out without a word.
        check_blockers(&machine)?;
        connect(host, task, seat.as_ref())?;
        let store = host.config.store_keys.open(&task.store)?;
        let base = base.filter(|base| base.is_there(task, &store, &machine));
        let (since, id) = (base.as_ref().map(|base| base.id), BaseId::new_here());
        let sampled = host.snapshots.sampled(&machine);
        let options = CaptureOptions {
            compression: task.compression,
            since,
            next: id,
            trace: task.trace_ms.into(),
            recency: task.recency,
            sampled,
        };
        let memory = MemoryCapture::arm(&machine, options)
            .with_context(|| format!("cannot prepare the memory of {}", task.vm()))?;
        let directory = host.vm_directory(task.vm())?;
        let disks = DiskCapture::arm(&machine, task.compression, &directory, (since, id))
            .with_context(|| format!("cannot prepare the disks of {}", task.vm()))?;
        sync(&machine)?;
        Ok(Capture {
            task: task.clone(),
            number,
            seat,
            complete: None,
            store,
            vm,
            machine,
            qemu: host.capabilities.version.to_string(),
            base,
            id,
            memory,
            disks,
            device_state: Vec::new(),
            sampled,
            paused: Duration::ZERO,
        })
    }

    /// The pause. On an error the guest runs on as soon as its QEMU answers, if that lives.
    ///
    /// Nobody holds what this guest sends, as is done for one with a backup: a flush that comes
    /// meanwhile is answered when the image is on stable storage, and the pause waits for it.
    pub fn take(&mut self) -> anyhow::Result<()> {
        // Protection may have begun since.
        let vm = self.vm.clone();
        let _protecting = lock(&vm.protecting);
        check(&vm, &self.machine)?;
        let machine = self.machine.clone();
        let began = Instant::now();
        let taken = self.pause(&machine);
        if taken.is_err() {
            machine.let_run();
        }
        self.paused = began.elapsed();
        let paused = self.paused.as_secs_f64() * 1e3;
        info!(vm = %self.task.vm(), "stood still for {paused:.1} ms for a snapshot");
        taken
    }

    fn pause(&mut self, machine: &Machine) -> anyhow::Result<()> {
        let mut monitor = machine.monitor();
        let mut pause = machine.pause(&mut monitor, LogErrand::None)?;
        pause.saved(&mut self.device_state)?;
        let mut captured = self.memory.take().map(|()| self.disks.take());
        if let (Some(seat), Ok(())) = (&self.seat, &captured) {
            match seat.taken(machine, self.number) {
                Ok(complete) => self.complete = Some(complete),
                Err(error) => captured = Err(error),
            }
        }
        pause.resume()?;
        captured
    }

    /// The guest runs again: all goes to the store.
    pub fn save(self, stop: &Stop) -> anyhow::Result<(Part, Saved)> {
        let Capture { task, number, store, machine, base, id, .. } = self;
        let upload = Upload { store: &store, compression: task.compression, stop };
        let put = |bytes: &[u8]| upload.blob(bytes);
        let device_state = put(&self.device_state)?;
        let memory = self.memory.save(&store, base.as_ref().map(|base| &*base.memory), stop)?;
        stop.check()?;
        let disks = self.disks.save(&store, base.as_ref().map(|base| &*base.disks), stop)?;
        stop.check()?;
        let log = match (&self.seat, &self.complete) {
            (Some(seat), Some(complete)) => seat.log(complete, stop)?,
            _ => Vec::new(),
        };
        let shape = Shape::of(&machine);
        let content = Content {
            areas: shape.put_areas(upload, &memory.areas, &disks.areas)?,
            device_state,
            working_set: put(&memory.working_set.encode())?,
            recent: memory.recent.map(|recent| put(&recent.encode())).transpose()?,
            clock: memory.by_clock.map(|kept| put(&kept.encode())).transpose()?,
            sampled: self.sampled,
            pause_us: self.paused.as_micros() as u64,
            base: base.map(|base| base.number),
        };
        let part = put_part(upload, &task, &machine, self.qemu, &log, content)?;
        let base = Base {
            id,
            store: task.store,
            group: task.group.name,
            number,
            memory: Arc::new(memory.areas),
            disks: Arc::new(disks.areas),
            machine: machine.presence(),
            is_doubted: false,
        };
        Ok((part, Saved { base, taken: memory.taken, disk_changes: disks.changes }))
    }
}

/// Brings to stable storage what a flush in the pause would otherwise have to bring there.
fn sync(machine: &Machine) -> anyhow::Result<()> {
    for disk in machine.disks() {
        disk.sync().with_context(|| format!("cannot sync {}", disk.path().display()))?;
    }
    Ok(())
}

/// Waits until the member's frames reach all others.
pub(super) fn connect(
    host: &Host,
    task: &TakeTask,
    seat: Option<&Arc<MemberSeat>>,
) -> anyhow::Result<()> {
    match seat {
        Some(seat) => seat.prepare(&task.group.vms),
        None if task.group.vms.len() > 1 => bail!(
            "{} has no seat in the cluster {}: host {} needs [cluster.{}] in its configuration, \
             and the VM to be started since",
            task.vm(),
            task.group.name,
            host.config.name,
            task.group.name
        ),
        None => Ok(()),
    }
}

/// Checks what speaks against a snapshot of it now.
fn check(vm: &PrimaryVm, machine: &Machine) -> anyhow::Result<()> {
    let name = vm.name();
    check_runs(name, machine)?;
    match vm.active_session() {
        Some(session) => bail!("protection of {name} by host {} has begun meanwhile", session.peer),
        None => Ok(()),
    }
}

/// Checks what speaks against a snapshot of it, protected or not.
pub(super) fn check_runs(name: &VmName, machine: &Machine) -> anyhow::Result<()> {
    if machine.lockstep().is_some() {
        bail!(
            "{name} runs in a QEMU that counts instructions for lockstep; such VMs cannot be \
             snapshotted"
        );
    }
    if !machine.is_alive() || machine.is_powered_off() {
        bail!("{name} does not run any more");
    }
    Ok(())
}
