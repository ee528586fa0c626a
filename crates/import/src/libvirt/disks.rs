//! Disks and CD-ROM drives.

use super::{devices, pci, rest};
use crate::draft::{Draft, image_format};
use crate::xml::Element;
use std::path::PathBuf;
use understudy_qemu::definition::{DiskBus, DiskDefinition, EmptyCdrom};

/// `<disk>`.
pub(super) fn disk(draft: &mut Draft<'_>, disk: &Element, boots: &[&str]) {
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
    let path = match source(draft, disk) {
        Ok(Some(path)) => path,
        Ok(None) if cdrom => {
            draft.taken(disk.line, format!("{what}: an empty CD-ROM drive"));
            return draft.vm.empty_cdroms.push(EmptyCdrom { bus });
        }
        Ok(None) => {
            let why = "it has no image: only files and block devices are replicated";
            return draft.refused(disk.line, what, why);
        }
        Err(why) => return draft.refused(disk.line, what, why),
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
    draft.taken(disk.line, format!("{what}: {}", path.display()));
    let serial = Some(disk.child_text("serial").to_owned()).filter(|serial| !serial.is_empty());
    let pci = (bus == DiskBus::Virtio).then(|| pci::place(draft, disk)).flatten();
    let new = DiskDefinition::new(path, format, bus);
    draft.disk(order(disk, cdrom, boots), DiskDefinition { cdrom, serial, pci, ..new });
}

/// Notes what there is to say of its parts.
fn parts(draft: &mut Draft<'_>, disk: &Element, what: &str) {
    for part in &disk.children {
        match &part.name[..] {
            "iotune" => draft.left_out(part.line, part.tag(), "nothing bounds a disk's requests"),
            "boot" => draft.taken(part.line, format!("{what}, {}", part.tag())),
            "driver" => rest::of_part(draft, part, what, &["name", "type"]),
            "source" => {
                let known = ["file", "dev", "pool", "volume", "startupPolicy", "index"];
                rest::of_part(draft, part, what, &known);
            }
            "target" => rest::of_part(draft, part, what, &["dev", "bus", "tray"]),
            "blockio" => rest::of_part(draft, part, what, &[]),
            _ => {}
        }
    }
    devices::interface(draft, disk.line, what, disk.get("model"));
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

/// Its place in the order of booting: its own, else that of its kind in `<os>`.
fn order(disk: &Element, cdrom: bool, boots: &[&str]) -> Option<u32> {
    let kind: &[&str] = if cdrom { &["cdrom"] } else { &["hd", ""] };
    let of_kind = || boots.iter().position(|boot| kind.contains(boot))?.try_into().ok();
    disk.child_get("boot", "order").parse().ok().or_else(of_kind)
}

/// Where its image lies; none if it has none. A place that is no file and no block device is an error.
fn source(draft: &Draft<'_>, disk: &Element) -> Result<Option<PathBuf>, String> {
    let Some(source) = disk.child("source") else { return Ok(None) };
    let path = match disk.get("type") {
        "file" | "" => source.get("file"),
        "block" => source.get("dev"),
        "volume" => {
            let (pool, volume) = (source.get("pool"), source.get("volume"));
            let known = draft.surroundings.volumes.get(&format!("{pool}/{volume}"));
            return known.cloned().map(Some).ok_or_else(|| {
                format!(
                    "say where it lies, as `virsh vol-path {volume} --pool {pool}` does: --volume \
                     {pool}/{volume}=PATH"
                )
            });
        }
        kind => {
            return Err(format!(
                "its image is on {kind}: only files and block devices are replicated"
            ));
        }
    };
    Ok(Some(path).filter(|path| !path.is_empty()).map(PathBuf::from))
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
