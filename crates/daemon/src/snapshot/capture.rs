//! All of one member that a snapshot has: memory, disks, device state, what it boots from.

use super::Stopped;
use super::disk::DiskCapture;
use super::frames::crossings;
use super::member::MemberSeat;
use super::memory::{CaptureOptions, MemoryCapture, Taken};
use super::take::Start;
use super::words::{SavedVm, TakeTask};
use crate::host::Host;
use crate::machine::Machine;
use crate::sync::lock;
use crate::vm::PrimaryVm;
use anyhow::{Context, bail};
use crossbeam_channel::Receiver;
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};
use tracing::info;
use understudy_disk::ChangesTaken;
use understudy_protocol::{BlockId, DiskIndex};
use understudy_qemu::lockstep::LogErrand;
use understudy_snapshot::{
    Area, AreaEntry, AreaMap, Blob, MemberManifest, Part, SnapshotNumber, Store,
};

/// What the next snapshot need not save again.
pub struct Base {
    store: String,
    group: String,
    number: SnapshotNumber,
    memory: BTreeMap<BlockId, AreaMap>,
    disks: BTreeMap<DiskIndex, AreaMap>,
    /// Whose memory and disks it is of: a VM that was started anew has others.
    machine: Weak<()>,
    /// Until the snapshot exists.
    taken: Option<Taken>,
    /// What its disks no longer tell of; none once it is committed.
    disk_changes: Vec<ChangesTaken>,
}

impl Base {
    /// The snapshot exists.
    pub fn commit(&mut self) {
        if let Some(taken) = self.taken.take() {
            taken.commit();
        }
        self.disk_changes.drain(..).for_each(ChangesTaken::commit);
    }

    /// Whether it is still in the store that the next snapshot goes to.
    fn is_there(&self, task: &TakeTask, store: &Store, machine: &Machine) -> bool {
        let same = (&self.store, &self.group) == (&task.store, &task.group.name);
        same && self.machine.ptr_eq(&machine.presence())
            && store.snapshot(&self.group, Some(self.number)).is_ok()
    }
}

/// One member, for one snapshot.
pub struct Capture {
    task: TakeTask,
    number: SnapshotNumber,
    seat: Option<Arc<MemberSeat>>,
    /// Told when no frame is in flight to the member any more.
    complete: Option<Receiver<()>>,
    store: Store,
    vm: Arc<PrimaryVm>,
    machine: Arc<Machine>,
    qemu: String,
    base: Option<Base>,
    memory: MemoryCapture,
    disks: DiskCapture,
    device_state: Vec<u8>,
    /// For how long the guest stood still.
    paused: Duration,
}

impl Capture {
    /// While the guest runs.
    pub fn prepare(host: &Arc<Host>, start: Start<'_>) -> anyhow::Result<Capture> {
        let Start { task, number, base, seat } = start;
        let vm = host.primary(task.vm())?;
        let machine = vm.machine();
        // Protection that is just beginning is seen, or sees that a snapshot has begun.
        drop(lock(&vm.protecting));
        check(&vm, &machine)?;
        match &seat {
            Some(seat) => seat.prepare()?,
            None if task.group.vms.len() > 1 => bail!(
                "{} has no seat in the cluster {}: host {} needs [cluster.{}] in its \
                 configuration, and the VM to be started since",
                task.vm(),
                task.group.name,
                host.config.name,
                task.group.name
            ),
            None => {}
        }
        let store = Store::open(&task.store)?;
        let base = base.filter(|base| base.is_there(task, &store, &machine));
        let options = CaptureOptions {
            compression: task.compression,
            incremental: base.is_some(),
            trace: Duration::from_millis(task.trace_ms),
            recency: task.recency,
        };
        let memory = MemoryCapture::arm(&machine, options)
            .with_context(|| format!("cannot prepare the memory of {}", task.vm()))?;
        let directory = host.vm_directory(task.vm())?;
        let disks = DiskCapture::arm(&machine, task.compression, &directory, base.is_some())
            .with_context(|| format!("cannot prepare the disks of {}", task.vm()))?;
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
            memory,
            disks,
            device_state: Vec::new(),
            paused: Duration::ZERO,
        })
    }

    /// The pause. On an error the guest runs on, or its QEMU is gone.
    pub fn take(&mut self) -> anyhow::Result<()> {
        // Protection may have begun since.
        let vm = self.vm.clone();
        let _protecting = lock(&vm.protecting);
        check(&vm, &self.machine)?;
        let machine = self.machine.clone();
        for disk in machine.disks() {
            disk.begin_checkpoint();
        }
        let began = Instant::now();
        let taken = self.pause(&machine);
        for disk in machine.disks() {
            disk.end_checkpoint();
        }
        self.paused = began.elapsed();
        let paused = self.paused.as_secs_f64() * 1e3;
        info!(vm = self.task.vm(), "stood still for {paused:.1} ms for a snapshot");
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
    pub fn save(self, stop: &AtomicBool) -> anyhow::Result<(Part, Base)> {
        let Capture { task, number, store, machine, base, .. } = self;
        let compression = task.compression;
        let put = |bytes: &[u8]| store.put_blob(bytes, compression);
        let device_state = put(&self.device_state)?;
        let definition = machine.definition();
        let kernel = file_blob(&store, &task, definition.kernel.as_deref())?;
        let initrd = file_blob(&store, &task, definition.initrd.as_deref())?;
        let memory = self.memory.save(&store, base.as_ref().map(|base| &base.memory), stop)?;
        Stopped::check(stop)?;
        let disks = self.disks.save(&store, base.as_ref().map(|base| &base.disks), stop)?;
        Stopped::check(stop)?;
        let log = match (&self.seat, &self.complete) {
            (Some(seat), Some(complete)) => seat.log(complete, stop)?,
            _ => Vec::new(),
        };
        let mut areas = Vec::new();
        for block in machine.blocks() {
            let map = memory.areas.get(&block.id()).context("a RAM block was not saved")?;
            let (name, bytes) = (block.name().to_owned(), block.pages() * PAGE);
            let map = put(&map.encode())?;
            areas.push(AreaEntry { area: Area::Memory(block.id()), name, bytes, map });
        }
        for (disk, defined) in machine.disks().iter().zip(&definition.disks) {
            let map = disks.areas.get(&disk.index()).context("a disk was not saved")?;
            let name = defined.path.display().to_string();
            let (bytes, map) = (disk.export_bytes(), put(&map.encode())?);
            areas.push(AreaEntry { area: Area::Disk(disk.index()), name, bytes, map });
        }
        let saved = SavedVm { definition: definition.clone(), accelerator: machine.accelerator() };
        let manifest = MemberManifest {
            name: task.vm().to_owned(),
            machine: understudy_snapshot::Machine {
                qemu: self.qemu,
                machine_type: machine.machine_type().to_owned(),
                vcpus: definition.vcpus,
                memory: definition.memory.bytes(),
            },
            definition: serde_json::to_value(&saved)?,
            kernel,
            initrd,
            areas,
            device_state,
            in_flight: store.put_frames(&log, compression)?,
            working_set: put(&memory.working_set.encode())?,
            recent: memory.recent.map(|recent| put(&recent.encode())).transpose()?,
            pause_us: self.paused.as_micros() as u64,
            base: base.map(|base| base.number),
        };
        let crossings = crossings(task.member, &log);
        let part = Part { manifest: store.put_member(&manifest, compression)?, crossings };
        let base = Base {
            store: task.store,
            group: task.group.name,
            number,
            memory: memory.areas,
            disks: disks.areas,
            machine: machine.presence(),
            taken: Some(memory.taken),
            disk_changes: disks.changes,
        };
        Ok((part, base))
    }
}

const PAGE: u64 = understudy_protocol::PAGE_SIZE as u64;

/// What speaks against a snapshot of it now.
fn check(vm: &PrimaryVm, machine: &Machine) -> anyhow::Result<()> {
    let name = vm.name();
    if machine.lockstep().is_some() {
        bail!(
            "{name} runs in a QEMU that counts instructions for lockstep; such VMs cannot be \
             snapshotted"
        );
    }
    if let Some(session) = vm.active_session() {
        bail!(
            "{name} is protected by host {}; run `understudy unprotect {name}` first, and protect \
             it again afterwards",
            session.peer
        );
    }
    if !machine.is_alive() || machine.is_powered_off() {
        bail!("{name} does not run any more");
    }
    Ok(())
}

fn file_blob(store: &Store, task: &TakeTask, path: Option<&Path>) -> anyhow::Result<Option<Blob>> {
    let Some(path) = path else { return Ok(None) };
    let bytes = std::fs::read(path)
        .with_context(|| format!("cannot read {}, which {} boots", path.display(), task.vm()))?;
    Ok(Some(store.put_blob(&bytes, task.compression)?))
}
