//! Disks, CD-ROM drives and the firmware's flash memory.

use super::{Args, BootFiles, Resources, escaped, place, virtio_options};
use crate::definition::{DiskBus, DiskDefinition, DiskFormat, VmDefinition};
use serde_json::{Map, Value};
use std::ffi::OsString;
use std::path::Path;

/// Virtio disks go to PCI slots 0x03 to 0x0e; 0x01 and 0x02 stay free for chipset and video.
pub(crate) const FIRST_DISK_SLOT: u8 = 0x03;
/// Virtio disks that a VM may have.
pub const MAX_VIRTIO_DISKS: usize = 12;

/// The controllers that a machine does not have by itself; on q35 0x1f is the chipset's, and has one.
pub(crate) const SCSI_SLOT: u8 = 0x1e;
pub(crate) const AHCI_SLOT: u8 = 0x1f;
/// Disks and drives of the virtio-scsi controller.
pub const MAX_SCSI_DISKS: usize = 64;
/// Disks and drives of an AHCI controller.
pub const AHCI_SLOTS: usize = 6;

/// IDE disks and drives that a machine has room for.
pub const fn ide_slots(q35: bool) -> usize {
    if q35 { AHCI_SLOTS } else { 4 }
}

/// Time for which requests wait for a disk's server: for good, and no more than QEMU can count.
pub(crate) const RECONNECT_SECONDS: u32 = 1 << 30;

/// The machine's options for its flash memory: the firmware's code, and its variables.
pub(super) fn flash(vm: &VmDefinition, files: &BootFiles) -> String {
    let store = vm.disks.iter().position(|disk| disk.bus == DiskBus::Pflash);
    let smm = if vm.secure_boot { ",smm=on" } else { "" };
    match (&files.firmware, store) {
        (Some(_), Some(n)) => format!(",pflash0=firmware,pflash1=disk{n}{smm}"),
        _ => String::new(),
    }
}

/// The places taken on the buses that share theirs.
#[derive(Default)]
struct Buses {
    virtio: usize,
    ide: usize,
    sata: usize,
    scsi: usize,
}

pub(super) fn disks(args: &mut Args, vm: &VmDefinition, resources: &Resources) {
    if let Some(code) = &resources.boot.firmware {
        let mut node = OsString::from("driver=file,node-name=firmware,read-only=on,filename=");
        node.push(escaped(code));
        args.pair("-blockdev", node);
    }
    if vm.secure_boot {
        args.pair("-global", "driver=cfi.pflash01,property=secure,value=on");
    }
    controllers(args, vm);
    let mut buses = Buses::default();
    for (n, (disk, socket)) in vm.disks.iter().zip(&resources.disks).enumerate() {
        if !disk.ejected {
            block_nodes(args, n, disk, socket, resources);
        }
        if disk.bus != DiskBus::Pflash {
            args.pair("-device", device(vm, n, disk, &mut buses));
        }
    }
    for (n, drive) in vm.empty_cdroms.iter().enumerate() {
        let place = drive_place(vm, drive.bus, true, &mut buses);
        args.pair("-device", format!("{place},id=cdrom{n}"));
    }
}

/// The controllers that the definition needs and the machine lacks.
fn controllers(args: &mut Args, vm: &VmDefinition) {
    let buses =
        || vm.disks.iter().map(|disk| disk.bus).chain(vm.empty_cdroms.iter().map(|d| d.bus));
    if buses().any(|bus| bus == DiskBus::Scsi) {
        let virtio = virtio_options(vm.virtio_interface());
        args.pair("-device", format!("virtio-scsi-pci,{virtio},id=scsi,addr={SCSI_SLOT:#04x}"));
    }
    if !vm.is_q35() && buses().any(|bus| bus == DiskBus::Sata) {
        args.pair("-device", format!("ahci,id=sata,addr={AHCI_SLOT:#04x}"));
    }
}

fn device(vm: &VmDefinition, n: usize, disk: &DiskDefinition, buses: &mut Buses) -> String {
    let mut device = match disk.bus {
        DiskBus::Virtio => {
            buses.virtio += 1;
            let virtio = virtio_options(vm.virtio_interface());
            let place = place(disk.pci.as_ref(), usize::from(FIRST_DISK_SLOT) + buses.virtio - 1);
            format!("virtio-blk-pci,{virtio},{place}")
        }
        bus => drive_place(vm, bus, disk.cdrom, buses),
    };
    // An I/O error stops the guest and tells the daemon, which may have a
    // backup with a sound disk.
    if !disk.ejected {
        device += &format!(",drive=disk{n}");
    }
    device += &format!(",id=disk{n},werror=stop,rerror=stop");
    if let Some(serial) = &disk.serial {
        device += &format!(",serial={serial}");
    }
    if vm.kernel.is_none() {
        device += &format!(",bootindex={n}");
    }
    device
}

/// The device of a CD-ROM drive on the SCSI controller, as on the command line, for QEMU's
/// `device_add`; none if it is on another bus.
pub fn scsi_drive(vm: &VmDefinition, index: usize) -> Option<Map<String, Value>> {
    let is_scsi = |disk: &&DiskDefinition| disk.bus == DiskBus::Scsi;
    let disk = vm.disks.get(index).filter(is_scsi)?;
    let name = format!("disk{index}");
    let number = vm.disks[..index].iter().filter(is_scsi).count();
    let mut options = Map::new();
    let mut set = |key: &str, value: Value| drop(options.insert(key.to_owned(), value));
    set("driver", "scsi-cd".into());
    set("bus", "scsi.0".into());
    set("scsi-id", number.into());
    set("drive", name.clone().into());
    set("id", name.into());
    set("werror", "stop".into());
    set("rerror", "stop".into());
    if let Some(serial) = &disk.serial {
        set("serial", serial.clone().into());
    }
    if vm.kernel.is_none() {
        set("bootindex", index.into());
    }
    Some(options)
}

/// A disk or CD-ROM drive on the next place of a bus where each has the same device.
fn drive_place(vm: &VmDefinition, bus: DiskBus, cdrom: bool, buses: &mut Buses) -> String {
    let kind = if cdrom { "cd" } else { "hd" };
    let next = |taken: &mut usize| {
        *taken += 1;
        *taken - 1
    };
    match (bus, vm.is_q35()) {
        (DiskBus::Scsi, _) => {
            format!("scsi-{kind},bus=scsi.0,scsi-id={}", next(&mut buses.scsi))
        }
        (DiskBus::Sata, false) => format!("ide-{kind},bus=sata.{}", next(&mut buses.sata)),
        (_, true) => format!("ide-{kind},bus=ide.{}", next(&mut buses.ide)),
        (_, false) => {
            let n = next(&mut buses.ide);
            format!("ide-{kind},bus=ide.{},unit={}", n / 2, n % 2)
        }
    }
}

/// The disk's data come from the data plane; a raw image needs nothing above it. In lockstep
/// requests end when the log says so.
fn block_nodes(
    args: &mut Args,
    n: usize,
    disk: &DiskDefinition,
    socket: &Path,
    resources: &Resources,
) {
    let replay = resources.lockstep.is_some();
    let top = if replay { format!("disk{n}-image") } else { format!("disk{n}") };
    let read_only = if disk.cdrom { ",read-only=on" } else { "" };
    let nbd = match disk.format {
        DiskFormat::Raw => top.clone(),
        DiskFormat::Qcow2 => format!("{top}-nbd"),
    };
    let mut node = OsString::from(format!(
        "driver=nbd,node-name={nbd}{read_only},discard=unmap,detect-zeroes=off,server.type=unix,server.path="
    ));
    node.push(escaped(socket));
    if resources.awaits_disks {
        node.push(format!(",reconnect-delay={RECONNECT_SECONDS}"));
    }
    args.pair("-blockdev", node);
    if disk.format == DiskFormat::Qcow2 {
        args.pair(
            "-blockdev",
            format!("driver=qcow2,node-name={top},file={nbd},discard=unmap,detect-zeroes=off"),
        );
    }
    if replay {
        args.pair("-blockdev", format!("driver=blkreplay,node-name=disk{n},image={top}"));
    }
}
