//! The offer: what the backup is told and given, until its QEMU stands by.

use super::Plan;
use super::dialler::Dialler;
use super::group::Group;
use crate::handshake::{self, ExportBytes, FileOffer, FileRole, GroupOffer, Offer, Ready};
use crate::messages::ToBackup;
use crate::resync::{self, Basis};
use anyhow::{Context, bail};
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tracing::info;
use understudy_disk::{Disk, image_bytes};
use understudy_link::channel::Channel;
use understudy_link::link::{Link, Next, read_json};
use understudy_machine::Machine;
use understudy_protocol::wire::{Kind, WireVersion};
use understudy_protocol::{DiskIndex, Epoch, PathIndex};
use understudy_qemu::Vendor;
use understudy_qemu::definition::DiskFormat;

/// Holds the header of any disk format.
const DISK_HEAD_BYTES: u64 = 64 << 10;

/// An offer that a backup has taken.
pub struct Taken {
    /// The data connection.
    pub link: Link,
    /// The path that it takes.
    pub path: PathIndex,
    /// The basis that the first synchronisation begins with.
    pub basis: Basis,
    /// The wire version that is spoken.
    pub version: WireVersion,
    /// The backup's patience, if it has said it.
    pub patience: Option<Duration>,
}

/// The handshake on the data connection, until the backup starts its QEMU.
pub fn offer(
    machine: &Machine,
    plan: &Plan,
    group: (&Group, usize),
    dialler: &Dialler,
) -> anyhow::Result<Taken> {
    let definition = machine.definition_now();
    let files = start_files(machine)?;
    let arbiter = plan.arbiter.identify().context("this host's arbiter")?;
    let offer = Offer {
        session: plan.session.clone(),
        definition: (*definition).clone().into(),
        machine_type: machine.machine_type().to_owned(),
        accelerator: machine.accelerator(),
        tsc: machine.tsc(),
        vendor: Vendor::seen_here(machine.accelerator()),
        qemu: plan.qemu.clone(),
        qemu_build: machine.qemu_build(),
        mode: plan.mode,
        disk_reads: plan.disk_reads,
        clock: machine.lockstep().map(|lockstep| lockstep.clock.clone()),
        generation: plan.generation,
        arbiter,
        group: group
            .0
            .is_shared()
            .then(|| GroupOffer { membership: group.0.membership.clone(), place: group.1 }),
        cluster: plan.cluster.clone(),
        disk_bytes: export_bytes(machine)?,
        disk_used: machine.disks().iter().map(|disk| used_bytes(disk)).collect(),
        sessions: plan.sessions.clone(),
        files: files.iter().map(|(offer, _)| offer.clone()).collect(),
        paths: plan.addresses.clone(),
        path: PathIndex(0),
        wish: Some(plan.wish.clone()),
        patience_ms: Some(plan.detection.patience().as_millis() as u64),
    };
    let (link, path, welcome) = dialler.offer(offer)?;
    let version = handshake::agreed(welcome.wire_version)?;
    info!(vm = %definition.name, "speaks wire version {version} with host {}", plan.peer);
    if welcome.host != plan.peer {
        let reason = format!(
            "the host at {} is {:?}, not {:?}: correct [peers] in this host's configuration",
            plan.addresses[usize::from(path.0)],
            welcome.host,
            plan.peer
        );
        link.refuse(&reason);
        bail!(reason);
    }
    if let Some(note) = welcome.note {
        machine.notice(note);
    }
    let basis = match &welcome.resync {
        None => Basis::Full(welcome.full_because),
        Some(resync) => {
            // On disk before the backup changes anything: it may ask again.
            resync::merge(machine, &plan.sessions, resync)?;
            Basis::Changes(resync.session.clone())
        }
    };
    let send = || -> anyhow::Result<()> {
        for (offer, path) in &files {
            send_file(&link, path, offer.bytes)?;
        }
        Ok(link.send_signal(Kind::Prepare, Epoch(0))?)
    };
    // A backup that hangs up has said why, before.
    send().map_err(|error| link.last_words().unwrap_or(error))?;
    let patience = welcome.patience_ms.map(Duration::from_millis);
    Ok(Taken { link, path, basis, version, patience })
}

fn export_bytes(machine: &Machine) -> anyhow::Result<Vec<ExportBytes>> {
    let disks = machine.disks();
    let bytes = disks.iter().map(|disk| ExportBytes::try_from(disk.export_bytes()));
    bytes.collect::<Result<_, _>>().map_err(anyhow::Error::msg)
}

/// Bytes that the image takes: of a block device, all that it has.
pub fn used_bytes(disk: &Disk) -> u64 {
    const BLOCK_BYTES: u64 = 512;
    let file = std::fs::metadata(disk.path()).ok().filter(std::fs::Metadata::is_file);
    let used = file.map(|metadata| metadata.blocks() * BLOCK_BYTES);
    used.map_or(disk.export_bytes(), |used| used.min(disk.export_bytes()))
}

/// Waits until the backup's QEMU stands by with the same memory as this one.
pub fn await_ready(data: &Arc<Channel>, machine: &Machine, peer: &str) -> anyhow::Result<()> {
    let ready: Ready = read_json(&data.receive()?, Kind::Ready)?;
    let ours: Vec<(String, u64)> =
        machine.blocks().iter().map(|block| (block.name().to_owned(), block.bytes())).collect();
    if ready.blocks != ours {
        let reason = format!(
            "QEMU's RAM blocks differ between the hosts: {ours:?} here, {:?} on {peer}",
            ready.blocks
        );
        // It may be gone.
        let _ = ToBackup::Refuse(reason.clone()).send(data, Next::Unknown);
        bail!(reason);
    }
    Ok(())
}

/// The files that the backup's QEMU reads when it starts, before the disks are copied.
fn start_files(machine: &Machine) -> anyhow::Result<Vec<(FileOffer, PathBuf)>> {
    let definition = machine.definition_now();
    let boot = [
        (FileRole::Firmware, &definition.firmware),
        (FileRole::Kernel, &definition.kernel),
        (FileRole::Initrd, &definition.initrd),
    ];
    let boot = boot.into_iter().filter_map(|(role, path)| Some((role, path.clone()?)));
    let boot = boot.map(|(role, path)| -> anyhow::Result<_> {
        let metadata = std::fs::metadata(&path).with_context(|| cannot_read(&path))?;
        Ok((FileOffer { role, bytes: metadata.len() }, path))
    });
    let disks = definition.disks.iter().enumerate();
    let disks = disks.filter(|(_, disk)| disk.format == DiskFormat::Qcow2);
    let heads = disks.map(|(i, disk)| -> anyhow::Result<_> {
        // It may lie on a block device, whose metadata do not tell its bytes.
        let bytes = image_bytes(&disk.path).with_context(|| cannot_read(&disk.path))?;
        let role = FileRole::DiskHead(DiskIndex(i as u16));
        Ok((FileOffer { role, bytes: bytes.min(DISK_HEAD_BYTES) }, disk.path.clone()))
    });
    boot.chain(heads).collect()
}

fn cannot_read(path: &Path) -> String {
    format!("cannot read {}, which the VM needs", path.display())
}

fn send_file(link: &Link, path: &Path, bytes: u64) -> anyhow::Result<()> {
    let context = || format!("cannot send {} to the backup", path.display());
    let mut file = File::open(path).with_context(context)?.take(bytes);
    let mut piece = vec![0; 1 << 20];
    loop {
        let length = file.read(&mut piece).with_context(context)?;
        if length == 0 {
            return Ok(());
        }
        link.send_parts(Kind::File, Epoch(0), &[&piece[..length]]).with_context(context)?;
    }
}
