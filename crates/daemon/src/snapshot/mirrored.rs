//! A protected member's part: taken from its backup's image at the end of an epoch. The guest
//! stands still for a checkpoint only, as it does all the time.

use super::capture::{check_runs, connect};
use super::member::MemberSeat;
use super::take::Start;
use crate::host::Host;
use anyhow::{Context, bail};
use crossbeam_channel::{Receiver, RecvTimeoutError};
use std::sync::Arc;
use std::time::Duration;
use tracing::info;
use understudy_cluster::Stop;
use understudy_cluster::messages::{KeepOrder, Kept, KeptImage, TakeTask};
use understudy_cluster::part::{Content, put_part};
use understudy_cluster::upload::Upload;
use understudy_machine::Machine;
use understudy_protocol::PrimaryPhase;
use understudy_protocol::VmName;
use understudy_replication::primary;
use understudy_report::Mode;
use understudy_snapshot::{Area, Part, SnapshotNumber, Store};

/// Time after which it is looked again whether the snapshot, or protection, has ended.
const LOOK: Duration = Duration::from_millis(100);

/// A protected member, for one snapshot. Dropped before it is saved, it has the backup forget it.
pub struct MirroredCapture {
    task: TakeTask,
    number: SnapshotNumber,
    seat: Option<Arc<MemberSeat>>,
    /// Receives a word when no frame is in flight to the member any more.
    complete: Option<Receiver<()>>,
    store: Store,
    session: Arc<primary::Session>,
    machine: Arc<Machine>,
    qemu: String,
    sampled: Option<u64>,
    /// Answer of the backup on it, once the epoch is closed.
    answer: Option<Receiver<Kept>>,
}

impl MirroredCapture {
    /// Prepares the capture, while the guest runs.
    pub fn prepare(
        host: &Arc<Host>,
        start: Start<'_>,
        machine: Arc<Machine>,
        session: Arc<primary::Session>,
    ) -> anyhow::Result<MirroredCapture> {
        let Start { task, number, seat, .. } = start;
        check_runs(task.vm(), &machine)?;
        check(task.vm(), &session)?;
        connect(host, task, seat.as_ref())?;
        Ok(MirroredCapture {
            task: task.clone(),
            number,
            seat,
            complete: None,
            store: host.config.store_keys.open(&task.store)?,
            session,
            sampled: host.snapshots.sampled(&machine),
            machine,
            qemu: host.capabilities.version.to_string(),
            answer: None,
        })
    }

    /// The guest's next checkpoint is the snapshot's moment. On an error the guest runs on.
    pub fn take(&mut self) -> anyhow::Result<()> {
        check(self.task.vm(), &self.session)?;
        let order = KeepOrder {
            group: self.task.group.name.clone(),
            number: self.number,
            store: self.task.store.clone(),
            compression: self.task.compression,
            trace_ms: self.task.trace_ms,
        };
        let (machine, number, seat) = (self.machine.clone(), self.number, self.seat.clone());
        let (say, complete) = crossbeam_channel::bounded(1);
        let in_pause = move || {
            if let Some(seat) = seat {
                // Whoever waits takes one.
                let _ = say.try_send(seat.taken(&machine, number)?);
            }
            Ok(())
        };
        self.answer = Some(self.session.keep_epoch(&order, Box::new(in_pause))?);
        self.complete = complete.try_recv().ok();
        info!(vm = %self.task.vm(), "snapshot {} is that of its backup", self.number);
        Ok(())
    }

    /// The backup stores it.
    pub fn save(mut self, stop: &Stop) -> anyhow::Result<Part> {
        let KeptImage { mut areas, device_state, working_set } = self.await_image(stop)?;
        self.answer = None;
        let log = match (&self.seat, &self.complete) {
            (Some(seat), Some(complete)) => seat.log(complete, stop)?,
            _ => Vec::new(),
        };
        for entry in &mut areas {
            if let Area::Disk(index) = entry.area {
                let definition = self.machine.definition_now();
                let disk = definition.disks.get(usize::from(index.0));
                let disk = disk.context("the backup has a disk that the VM has not")?;
                entry.name = disk.path.display().to_string();
            }
        }
        let content = Content {
            areas,
            device_state,
            working_set,
            recent: None,
            clock: None,
            sampled: self.sampled,
            pause_us: 0,
            base: None,
        };
        let qemu = std::mem::take(&mut self.qemu);
        let upload = Upload { store: &self.store, compression: self.task.compression, stop };
        put_part(upload, &self.task, &self.machine, qemu, &log, content)
    }

    fn await_image(&self, stop: &Stop) -> anyhow::Result<KeptImage> {
        let (vm, peer) = (self.task.vm(), &self.session.peer);
        let answer = self.answer.as_ref().context("it was not taken")?;
        loop {
            stop.check()?;
            match answer.recv_timeout(LOOK) {
                Ok(Kept { image, .. }) => {
                    return image.map_err(|why| anyhow::anyhow!("host {peer}, its backup: {why}"));
                }
                Err(RecvTimeoutError::Timeout) if !self.session.is_over() => {}
                Err(_) => bail!("protection of {vm} ended before host {peer} had stored it"),
            }
        }
    }
}

impl Drop for MirroredCapture {
    fn drop(&mut self) {
        if self.answer.is_some() {
            self.session.let_go(&self.task.group.name, self.number);
        }
    }
}

/// Checks what speaks against a snapshot of its backup now.
fn check(vm: &VmName, session: &primary::Session) -> anyhow::Result<()> {
    let peer = &session.peer;
    if session.mode() == Mode::Lockstep {
        bail!(
            "{vm} is protected in lockstep by host {peer}, and cannot be snapshotted: run \
             `understudy unprotect {vm}` first"
        );
    }
    match session.phase() {
        PrimaryPhase::Protected => Ok(()),
        PrimaryPhase::Syncing => bail!(
            "host {peer} does not have all of {vm} yet: try again once `understudy status {vm}` \
             says that it is protected"
        ),
        _ => bail!("protection of {vm} by host {peer} is just ending: try again"),
    }
}
