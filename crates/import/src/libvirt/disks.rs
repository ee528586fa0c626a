//! Disks and CD-ROM drives.

use super::{pci, rest};
use crate::draft::{Draft, image_format};
use crate::xml::Element;
use understudy_qemu::definition::{DiskBus, DiskDefinition, EmptyCdrom};

/// `<disk>`.
pub(super) fn disk(draft: &mut Draft<'_>, disk: &Element) {
    let target = disk.child_get("target", "dev").to_owned();
    let what = format!("disk {target}");
    let bus = match bus(disk.child_get("target", "bus")) {
        Ok(bus) => bus,
        Err(why) => return draft.refused(disk.line, what, why),
    };
    let cdrom = match disk.get("device") {
        "disk" | "" => false,
        "cdrom" => true,
        device => {
            let why = format!("a {device} is not replicated: take it out of the domain");
            return draft.refused(disk.line, what, why);
        }
    };
    if let Some(why) = obstacle(disk, cdrom) {
        return draft.refused(disk.line, what, why);
    }
    parts(draft, disk, &what);
    let Some(path) = source(disk) else {
        if cdrom {
            draft.taken(disk.line, format!("{what}: an empty CD-ROM drive"));
            draft.vm.empty_cdroms.push(EmptyCdrom { bus });
            return;
        }
        let why = format!(
            "its image is on {}: only files and block devices are replicated",
            disk.get("type")
        );
        return draft.refused(disk.line, what, why);
    };
    let format = match disk.child_get("driver", "type") {
        "" => {
            Err("libvirt is not told the format of its image: add <driver name='qemu' type='…'/>"
                .to_owned())
        }
        name => image_format(name),
    };
    let format = match format {
        Ok(format) => format,
        Err(why) => return draft.refused(disk.line, what, why),
    };
    draft.taken(disk.line, format!("{what}: {path}"));
    let serial = Some(disk.child_text("serial").to_owned()).filter(|serial| !serial.is_empty());
    let pci = (bus == DiskBus::Virtio).then(|| pci::place(draft, disk)).flatten();
    let new = DiskDefinition::new(path, format, bus);
    draft.vm.disks.push(DiskDefinition { cdrom, serial, pci, ..new });
}

/// Notes what there is to say of its parts.
fn parts(draft: &mut Draft<'_>, disk: &Element, what: &str) {
    for part in &disk.children {
        match &part.name[..] {
            "iotune" => draft.left_out(part.line, part.tag(), "nothing bounds a disk's requests"),
            "boot" => draft.taken(part.line, format!("{what}, {}", part.tag())),
            "driver" => rest::of_part(draft, part, what, &["name", "type"]),
            "source" => {
                rest::of_part(draft, part, what, &["file", "dev", "startupPolicy", "index"]);
            }
            "target" => rest::of_part(draft, part, what, &["dev", "bus", "tray"]),
            "blockio" => rest::of_part(draft, part, what, &[]),
            _ => {}
        }
    }
    if matches!(disk.get("model"), "virtio-transitional" | "virtio-non-transitional") {
        let why = "its interface is that of all virtio devices of the VM: see `virtio`";
        draft.changed(disk.line, format!("{what}, model='{}'", disk.get("model")), why);
    }
}

fn bus(name: &str) -> Result<DiskBus, String> {
    match name {
        "virtio" => Ok(DiskBus::Virtio),
        "scsi" => Ok(DiskBus::Scsi),
        "sata" => Ok(DiskBus::Sata),
        "ide" => Ok(DiskBus::Ide),
        "nvme" => {
            Err("QEMU cannot save the state of an NVMe disk: make its bus virtio or scsi"
                .to_owned())
        }
        other => Err(format!("a disk on {other:?} is not replicated: make its bus virtio or scsi")),
    }
}

fn source(disk: &Element) -> Option<String> {
    let source = disk.child("source")?;
    let attribute = match disk.get("type") {
        "file" => "file",
        "block" => "dev",
        _ => return None,
    };
    Some(source.get(attribute).to_owned()).filter(|path| !path.is_empty())
}

/// Reason why a disk cannot be replicated as it is.
fn obstacle(disk: &Element, cdrom: bool) -> Option<&'static str> {
    let backing = disk.child("backingStore").is_some_and(|store| !store.children.is_empty());
    let has = |name: &str| disk.child(name).is_some();
    let source_has = |name: &str| disk.child("source").is_some_and(|it| it.child(name).is_some());
    let blocks = disk.child_get("blockio", "logical_block_size");
    match () {
        () if has("shareable") => Some("other VMs write it, too; a fail-over would tear it apart"),
        () if backing => {
            Some("it is an overlay of another image: `qemu-img rebase` makes it whole")
        }
        () if has("transient") => {
            Some("its writes are dropped at power-off; they are replicated here")
        }
        () if has("encryption") || source_has("encryption") => {
            Some("QEMU itself would have to decrypt it on both hosts")
        }
        () if source_has("slices") => {
            Some("it is a part of its image: make it an image of its own")
        }
        () if !matches!(blocks, "" | "0" | "512") && !cdrom => Some(
            "the guest counts its blocks otherwise, and would not find its partitions: disks have blocks of 512 bytes \
             here",
        ),
        () if has("readonly") && !cdrom => Some("a disk that only reads is not known here"),
        () => None,
    }
}
