//! The devices of a VM of Proxmox.

use super::Line;
use crate::draft::{Draft, image_format, other_controller};
use std::path::PathBuf;
use understudy_network::{FIRST_VLAN, LAST_VLAN, VlanSet, VlanSetError, Vlans};
use understudy_qemu::definition::{
    CardDefinition, CardModel, DiskBus, DiskDefinition, DiskFormat, EmptyCdrom, PciPlace, Vga,
};

/// Slot where Proxmox puts the first card and the first virtio disk.
const FIRST_CARD_SLOT: u8 = 0x12;
const FIRST_DISK_SLOT: u8 = 0x0a;
/// Places for each on the first bus; further ones are behind bridges.
const PLACES: u8 = 6;

/// Directory where Proxmox's local storage keeps images.
const LOCAL: &str = "/var/lib/vz";

/// Models that Proxmox makes of QEMU's.
const MODELS: [(&str, &str); 3] = [
    ("x86-64-v2", "qemu64,popcnt=on,pni=on,sse4.1=on,sse4.2=on,ssse3=on"),
    ("x86-64-v2-AES", "qemu64,aes=on,popcnt=on,pni=on,sse4.1=on,sse4.2=on,ssse3=on"),
    (
        "x86-64-v3",
        "qemu64,aes=on,popcnt=on,pni=on,sse4.1=on,sse4.2=on,ssse3=on,avx=on,avx2=on,bmi1=on,bmi2=on,\
         f16c=on,fma=on,abm=on,movbe=on,xsave=on",
    ),
];

pub(super) fn processor(draft: &mut Draft<'_>, line: &Line<'_>) {
    let model = match line.option("cputype") {
        "" => line.subject(),
        model => model,
    };
    if matches!(model, "host" | "max") {
        return draft.processor_of_host(line.number, line.text());
    }
    let known = MODELS.iter().find(|(name, _)| *name == model).map_or(model, |(_, known)| known);
    let mut text = known.to_owned();
    for flag in line.option("flags").split(';').filter(|flag| !flag.is_empty()) {
        match (flag.strip_prefix('+'), flag.strip_prefix('-')) {
            (Some(name), _) => text += &format!(",{name}=on"),
            (_, Some(name)) => text += &format!(",{name}=off"),
            _ => return draft.refused(line.number, line.text(), format!("the flag {flag:?}")),
        }
    }
    if line.option("hidden") == "1" {
        draft.flags.push("kvm=off".to_owned());
    }
    draft.rest(line.number, line.key, &line.beside(&["cputype", "flags", "hidden"]));
    draft.taken(line.number, format!("processor {model}"));
    draft.vm.cpu = Some(text);
}

pub(super) fn uefi(draft: &mut Draft<'_>, line: &Line<'_>, store: Option<Line<'_>>) {
    let Some(store) = store else {
        let why = "its variables lie nowhere: add an EFI disk";
        return draft.refused(line.number, line.text(), why);
    };
    let Some((path, _)) = volume(draft, &store) else { return };
    let secure = store.option("pre-enrolled-keys") == "1" && draft.vm.is_q35();
    if store.option("efitype") != "4m" {
        let why = "firmware of 2 MiB is no more shipped: make a new EFI disk with efitype=4m";
        return draft.refused(store.number, store.text(), why);
    }
    if path.starts_with("/dev") {
        let why = "a volume is larger than the firmware's variables: copy its first 540672 bytes to a \
                   file, and name that by --volume";
        return draft.refused(store.number, store.text(), why);
    }
    let variables = draft.uefi(None, Some(path), secure);
    draft.taken(line.number, format!("UEFI, its variables in {}", variables.display()));
}

pub(super) fn video(draft: &mut Draft<'_>, line: &Line<'_>) {
    let kind = match line.option("type") {
        "" => line.subject(),
        kind => kind,
    };
    draft.rest(line.number, line.key, &line.beside(&["type"]));
    (draft.vm.vga, draft.vm.vnc) = match kind {
        "none" => (Vga::None, false),
        kind if kind.starts_with("serial") => (Vga::None, false),
        "virtio" => (Vga::Virtio, true),
        "std" => (Vga::Std, true),
        "virtio-gl" => {
            return draft.refused(line.number, line.text(), "3D is drawn by this host's hardware");
        }
        _ => {
            draft.other_video(line.number, line.text());
            (Vga::Std, true)
        }
    };
}

/// The bridge's own VLAN for what has no tag, where a card has none of its own.
const NATIVE_VLAN: u16 = 1;

fn vlans(line: &Line<'_>) -> Result<Vlans, String> {
    let tag = match line.option("tag") {
        "" => None,
        tag => {
            let id = tag.parse().ok().filter(|id| (FIRST_VLAN..=LAST_VLAN).contains(id));
            Some(id.ok_or_else(|| format!("{tag} is no VLAN that a card can be in"))?)
        }
    };
    match line.option("trunks") {
        "" => Ok(Vlans { access: tag, trunk: VlanSet::default() }),
        trunks => {
            let trunk: Result<VlanSet, VlanSetError> = trunks.replace(';', ",").parse();
            let trunk = trunk.map_err(|error| error.to_string())?;
            Ok(Vlans { access: tag.or(Some(NATIVE_VLAN)), trunk })
        }
    }
}

pub(super) fn card(draft: &mut Draft<'_>, line: &Line<'_>) {
    let what = line.text();
    let Some((model, mac)) = line.subject().split_once('=') else {
        return draft.refused(line.number, what, "it has no model and address");
    };
    let kind = match model {
        "virtio" => CardModel::VirtioNet,
        "e1000" => CardModel::E1000,
        "e1000e" => CardModel::E1000e,
        "rtl8139" => CardModel::Rtl8139,
        _ => return draft.refused(line.number, what, format!("the model {model} is not known")),
    };
    let Ok(mac) = mac.parse() else {
        return draft.refused(line.number, what, format!("{mac:?} is no hardware address"));
    };
    let bridge = line.option("bridge");
    if bridge.is_empty() {
        return draft.refused(line.number, what, "it is plugged into no bridge");
    }
    let vlans = match vlans(line) {
        Ok(vlans) => vlans,
        Err(why) => return draft.refused(line.number, what, why),
    };
    if line.option("firewall") == "1" {
        draft.left_out(line.number, format!("{}, firewall=1", line.key), "filter on the bridge");
    }
    if !line.option("rate").is_empty() {
        draft.left_out(
            line.number,
            format!("{}, rate", line.key),
            "nothing bounds a card's traffic",
        );
    }
    if line.option("link_down") == "1" {
        draft.changed(line.number, format!("{}, link_down=1", line.key), "its link is up");
    }
    let known = [model, "bridge", "tag", "trunks", "firewall", "rate", "link_down", "mtu"];
    draft.rest(line.number, line.key, &line.beside(&known));
    if kind != CardModel::VirtioNet && !line.option("mtu").is_empty() {
        let why = "only a virtio card tells the guest how long packets may be";
        draft.left_out(line.number, format!("{}, mtu", line.key), why);
    }
    // 1 is the bridge's own.
    let mtu = line.option("mtu").parse().ok().filter(|&mtu: &u16| mtu > 1);
    let bridge = draft.surroundings.bridges.get(bridge).map_or(bridge, |other| other);
    let new = CardDefinition::new(mac, bridge, kind);
    let pci = place(draft, line, line.index("net"), FIRST_CARD_SLOT);
    let mtu = mtu.filter(|_| kind == CardModel::VirtioNet);
    draft.taken(line.number, what);
    draft.in_vlans(line.number, CardDefinition { mtu, pci, ..new }, vlans);
}

/// The place of a card or a virtio disk: Proxmox has the first ones on the first bus.
fn place(draft: &mut Draft<'_>, line: &Line<'_>, index: Option<u8>, first: u8) -> Option<PciPlace> {
    let slot = index.filter(|n| *n < PLACES).map(|n| first + n);
    if slot.is_none() {
        let why = "it is at another place on the PCI bus: the guest may call it otherwise";
        draft.changed(line.number, format!("{}, its place", line.key), why);
    }
    slot.and_then(|slot| PciPlace::new("pci.0", slot, 0))
}

/// The options of a disk that are read, and its size, which its image has.
const READ: [&str; 7] = ["file", "media", "size", "format", "serial", "ro", "snapshot"];

/// Endings of images that are none of raw bytes.
const FORMATS: [&str; 6] = ["qcow2", "vmdk", "qcow", "qed", "vdi", "vhdx"];

/// Reason why a disk cannot be replicated as it is.
fn obstacle(line: &Line<'_>, cdrom: bool) -> Option<&'static str> {
    let is_on = |name: &str| matches!(line.option(name), "1" | "on" | "yes" | "true");
    match () {
        () if is_on("ro") && !cdrom => Some("a disk that only reads is not known here"),
        () if is_on("snapshot") => {
            Some("its writes are dropped at power-off; they are replicated here")
        }
        () => None,
    }
}

/// A disk or CD-ROM drive; whether the line is one.
pub(super) fn disk(
    draft: &mut Draft<'_>,
    line: &Line<'_>,
    (scsihw, order): (Option<Line<'_>>, &[&str]),
) -> bool {
    let buses = [
        ("virtio", DiskBus::Virtio),
        ("scsi", DiskBus::Scsi),
        ("sata", DiskBus::Sata),
        ("ide", DiskBus::Ide),
    ];
    let found = buses.into_iter().find_map(|(name, bus)| Some((bus, line.index(name)?)));
    let Some((bus, index)) = found else { return false };
    let controller = scsihw.map_or("lsi", |line| line.value);
    if bus == DiskBus::Scsi && !controller.starts_with("virtio-scsi") {
        draft.refused(line.number, line.text(), other_controller(controller));
        return true;
    }
    let cdrom = line.option("media") == "cdrom";
    if cdrom && matches!(line.subject(), "none" | "cdrom") {
        draft.vm.empty_cdroms.push(EmptyCdrom { bus });
        draft.taken(line.number, format!("{}: an empty CD-ROM drive", line.key));
        return true;
    }
    if let Some(why) = obstacle(line, cdrom) {
        draft.refused(line.number, line.text(), why);
        return true;
    }
    if let Some((path, format)) = volume(draft, line) {
        draft.taken(line.number, format!("{}: {}", line.key, path.display()));
        draft.rest(line.number, line.key, &line.beside(&READ));
        let serial = Some(line.option("serial").to_owned()).filter(|serial| !serial.is_empty());
        let is_virtio = bus == DiskBus::Virtio;
        let pci = is_virtio.then(|| place(draft, line, Some(index), FIRST_DISK_SLOT)).flatten();
        let new = DiskDefinition::new(path, format, bus);
        let order = order.iter().position(|key| *key == line.key);
        let order = order.and_then(|order| order.try_into().ok());
        draft.disk(order, DiskDefinition { cdrom, serial, pci, ..new });
    }
    true
}

/// The file or block device of a volume, and its format.
fn volume(draft: &mut Draft<'_>, line: &Line<'_>) -> Option<(PathBuf, DiskFormat)> {
    let volume = match line.option("file") {
        "" => line.subject(),
        file => file,
    };
    let named = volume.split_once(':');
    let path = draft.surroundings.volumes.get(volume).cloned().or_else(|| match named {
        None => volume.starts_with('/').then(|| volume.into()),
        Some(("local", file)) if file.starts_with("iso/") => {
            Some(format!("{LOCAL}/template/{file}").into())
        }
        Some(("local", file)) => Some(format!("{LOCAL}/images/{file}").into()),
        Some(("local-lvm", name)) => Some(format!("/dev/pve/{name}").into()),
        Some(_) => None,
    });
    let Some(path) = path else {
        let why =
            format!("say where it lies, as `pvesm path {volume}` does: --volume {volume}=PATH");
        draft.refused(line.number, line.text(), why);
        return None;
    };
    // What has no such ending, and does not say it, is a volume or a raw file.
    let ending = path.extension().and_then(|ending| ending.to_str());
    let format = match (line.option("format"), ending.filter(|ending| FORMATS.contains(ending))) {
        ("", None) => Ok(DiskFormat::Raw),
        ("", Some(name)) | (name, _) => image_format(name),
    };
    let format = match format {
        Ok(format) => format,
        Err(why) => {
            draft.refused(line.number, line.text(), why);
            return None;
        }
    };
    Some((path, format))
}
