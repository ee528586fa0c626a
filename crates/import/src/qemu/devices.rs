//! The devices of a command line, with what is behind them.

use super::{Argument, LINE};
use crate::draft::{Draft, image_format};
use understudy_qemu::definition::{
    CardDefinition, CardModel, DiskBus, DiskDefinition, DiskFormat, EmptyCdrom, TpmModel,
};

/// Drives and networks go with the devices that name them; drives with `if=` are devices, too.
pub(super) fn devices(draft: &mut Draft<'_>, arguments: &[Argument]) {
    let all = |option: &'static str| arguments.iter().filter(move |it| it.option == option);
    pflash(draft, arguments);
    for drive in all("-drive").filter(|drive| !matches!(drive.get("if"), "none" | "pflash")) {
        let bus = match drive.get("if") {
            "virtio" => Ok(DiskBus::Virtio),
            "ide" | "" => Ok(DiskBus::Ide),
            "scsi" => Ok(DiskBus::Scsi),
            other => Err(format!("a drive on {other:?} is not replicated")),
        };
        match bus {
            Ok(bus) => disk(draft, drive, bus, drive.get("media") == "cdrom", ""),
            Err(why) => draft.refused(LINE, drive.text(), why),
        }
    }
    for medium in all("-cdrom") {
        let new = DiskDefinition::new(medium.value.clone(), DiskFormat::Raw, DiskBus::Ide);
        draft.taken(LINE, medium.text());
        draft.vm.disks.push(DiskDefinition { cdrom: true, ..new });
    }
    for nic in all("-nic") {
        card(draft, nic, nic, nic.get("model"));
    }
    for device in all("-device") {
        one(draft, device, arguments);
    }
}

/// The firmware's code and its variables.
fn pflash(draft: &mut Draft<'_>, arguments: &[Argument]) {
    let parts: Vec<&Argument> = arguments.iter().filter(|it| it.get("if") == "pflash").collect();
    match parts[..] {
        [] => {}
        [code, store] => {
            let file = |part: &Argument| Some(part.get("file").to_owned().into());
            let secure = arguments.iter().any(|it| it.value.contains("property=secure,value=on"));
            let variables = draft.uefi(file(code), file(store), secure);
            draft.taken(LINE, format!("UEFI, its variables in {}", variables.display()));
        }
        [one, ..] => draft.refused(LINE, one.text(), "two are needed: code, then variables"),
    }
}

fn one(draft: &mut Draft<'_>, device: &Argument, arguments: &[Argument]) {
    let behind = |option: &str, id: &str| {
        let found = |it: &&Argument| !id.is_empty() && it.option == option && it.get("id") == id;
        arguments.iter().find(found).cloned()
    };
    let driver = device.named(&["driver"]);
    let bus = match driver {
        "virtio-blk-pci" | "virtio-blk" => Some(DiskBus::Virtio),
        "scsi-hd" | "scsi-cd" => Some(DiskBus::Scsi),
        "ide-hd" | "ide-cd" => Some(DiskBus::Ide),
        _ => None,
    };
    if let Some(bus) = bus {
        let cdrom = driver.ends_with("-cd");
        return match behind("-drive", device.get("drive")) {
            Some(drive) => disk(draft, &drive, bus, cdrom, device.get("serial")),
            None if cdrom && device.get("drive").is_empty() => {
                draft.taken(LINE, device.text());
                draft.vm.empty_cdroms.push(EmptyCdrom { bus });
            }
            None => draft.refused(LINE, device.text(), "write its drive as -drive if=none,id=…"),
        };
    }
    match driver {
        // Made with the disks on it.
        "virtio-scsi-pci" | "virtio-scsi" => {}
        "virtio-net-pci" | "virtio-net" | "e1000" | "e1000e" | "rtl8139" => {
            match behind("-netdev", device.get("netdev")) {
                Some(network) => card(draft, &network, device, driver),
                None => draft.refused(LINE, device.text(), "it is plugged into no -netdev"),
            }
        }
        "tpm-crb" => draft.vm.tpm = Some(TpmModel::Crb),
        "tpm-tis" => draft.vm.tpm = Some(TpmModel::Tis),
        "nvme" => draft.refused(
            LINE,
            device.text(),
            "QEMU cannot save the state of an NVMe disk: make it virtio-blk-pci",
        ),
        // Their other ends are this host's.
        "virtserialport" | "virtconsole" | "virtio-serial-pci" | "virtio-serial" | "isa-serial"
        | "usb-redir" | "usb-storage" | "usb-net" => {
            draft.refused(LINE, device.text(), "what comes out of it would not be held");
        }
        _ => {
            draft.taken(LINE, device.text());
            draft.device(device.value.clone());
        }
    }
}

fn disk(draft: &mut Draft<'_>, drive: &Argument, bus: DiskBus, cdrom: bool, serial: &str) {
    if drive.get("file").is_empty() && cdrom {
        draft.vm.empty_cdroms.push(EmptyCdrom { bus });
        return draft.taken(LINE, drive.text());
    }
    let format = match drive.get("format") {
        "" => Err("say its format: format=raw or qcow2".to_owned()),
        name => image_format(name),
    };
    let format = match format {
        Ok(format) => format,
        Err(why) => return draft.refused(LINE, drive.text(), why),
    };
    if drive.get("snapshot") == "on" {
        return draft.refused(LINE, drive.text(), "its writes are dropped at the end");
    }
    let new = DiskDefinition::new(drive.get("file"), format, bus);
    let serial = Some(serial.to_owned()).filter(|serial| !serial.is_empty());
    draft.taken(LINE, drive.text());
    draft.vm.disks.push(DiskDefinition { cdrom, serial, ..new });
}

fn card(draft: &mut Draft<'_>, network: &Argument, device: &Argument, model: &str) {
    let what = device.text();
    let kind = match model.trim_end_matches("-pci") {
        "virtio-net" | "virtio" => CardModel::VirtioNet,
        "e1000" | "" => CardModel::E1000,
        "e1000e" => CardModel::E1000e,
        "rtl8139" => CardModel::Rtl8139,
        other => return draft.refused(LINE, what, format!("the model {other} is not known")),
    };
    let named = draft.surroundings.bridges.get(network.subject());
    let bridge = match (network.subject(), network.get("br")) {
        ("bridge", "") => named.map_or("br0", |bridge| bridge),
        ("bridge" | "tap", bridge) if !bridge.is_empty() => bridge,
        (kind, _) => match named {
            Some(bridge) => bridge,
            None => {
                let why = format!("say which bridge it is plugged into: --bridge {kind}=BRIDGE");
                return draft.refused(LINE, network.text(), why);
            }
        },
    };
    let Ok(mac) = device.get("mac").parse() else {
        return draft.refused(LINE, what, "give it the mac= that the guest knows it by");
    };
    let new = CardDefinition::new(mac, bridge, kind);
    draft.taken(LINE, what);
    draft.vm.cards.push(new);
}
