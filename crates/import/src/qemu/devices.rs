//! The devices of a command line, with what is behind them.

use super::{Argument, LINE};
use crate::draft::{Draft, image_format, other_controller};
use understudy_qemu::definition::{
    CardDefinition, CardModel, DiskBus, DiskDefinition, DiskFormat, EmptyCdrom, PciPlace, TpmModel,
    VirtioInterface,
};

/// Drives and networks go with the devices that name them; drives with `if=` are devices, too.
pub(super) fn devices(draft: &mut Draft<'_>, arguments: &[Argument]) {
    let all = |option: &'static str| arguments.iter().filter(move |it| it.option == option);
    pflash(draft, arguments);
    virtio(draft, arguments);
    for drive in all("-drive").filter(|drive| !matches!(drive.get("if"), "none" | "pflash")) {
        let bus = match drive.get("if") {
            "virtio" => Ok(DiskBus::Virtio),
            "ide" | "" => Ok(DiskBus::Ide),
            // QEMU makes one for them.
            "scsi" => Err(other_controller("lsi53c895a")),
            other => Err(format!("a drive on {other:?} is not replicated")),
        };
        match bus {
            Ok(bus) => disk(draft, drive, bus, drive.get("media") == "cdrom", None),
            Err(why) => draft.refused(LINE, drive.text(), why),
        }
    }
    for medium in all("-cdrom") {
        let new = DiskDefinition::new(medium.value.clone(), DiskFormat::Raw, DiskBus::Ide);
        draft.taken(LINE, medium.text());
        draft.disk(None, DiskDefinition { cdrom: true, ..new });
    }
    for nic in all("-nic") {
        card(draft, nic, nic, nic.get("model"));
    }
    all("-device").for_each(|it| one(draft, it, arguments));
    if !arguments
        .iter()
        .any(|it| matches!(&*it.option, "-nodefaults" | "-nic" | "-net" | "-netdev"))
    {
        let why = "write what the guest needs of it: -nic bridge,br=BRIDGE,mac=…";
        draft.left_out(LINE, "the card and the drives that QEMU gives without -nodefaults", why);
    }
}

/// The interface of the VM's virtio devices: behind a port of PCIe QEMU's have the modern one alone, else both.
fn virtio(draft: &mut Draft<'_>, arguments: &[Argument]) {
    let devices = || arguments.iter().filter(|it| it.option == "-device");
    let is_port = |id: &str| {
        let ports = ["pcie-root-port", "ioh3420", "xio3130-downstream"];
        !id.is_empty()
            && devices().any(|it| it.get("id") == id && ports.contains(&it.named(&["driver"])))
    };
    let virtio = devices().filter(|it| {
        let drivers = ["virtio-blk", "virtio-net", "virtio-scsi"];
        drivers.contains(&it.named(&["driver"]).trim_end_matches("-pci"))
    });
    let (behind, beside): (Vec<_>, Vec<_>) = virtio.partition(|it| is_port(it.get("bus")));
    draft.vm.virtio = Some(match behind.is_empty() {
        true => VirtioInterface::Transitional,
        false => VirtioInterface::Modern,
    });
    for device in beside.iter().filter(|_| !behind.is_empty()) {
        let why = "the VM has one interface for all its virtio devices: see `virtio`";
        draft.changed(LINE, device.text(), why);
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

/// SCSI controllers of QEMU's, beside virtio's.
const SCSI_CONTROLLERS: [&str; 11] = [
    "am53c974",
    "dc390",
    "lsi",
    "lsi53c810",
    "lsi53c895a",
    "megasas",
    "megasas-gen2",
    "mptsas1068",
    "pvscsi",
    "usb-bot",
    "usb-uas",
];

/// Reason why a disk is not taken that is on another controller than those of a definition's disks.
fn foreign_controller(device: &Argument, bus: DiskBus, arguments: &[Argument]) -> Option<String> {
    let on = device.get("bus").rsplit_once('.').map_or(device.get("bus"), |(id, _)| id);
    let controllers = arguments.iter().filter(|it| it.option == "-device");
    let named = controllers.clone().find(|it| !on.is_empty() && it.get("id") == on);
    let driver = named.map(|it| it.named(&["driver"]));
    match (bus, driver) {
        (DiskBus::Scsi, Some("virtio-scsi-pci" | "virtio-scsi")) => None,
        (DiskBus::Scsi, Some(other)) => Some(other_controller(other)),
        // It is on the first that has room.
        (DiskBus::Scsi, None) => {
            let mut drivers = controllers.map(|it| it.named(&["driver"]));
            drivers.find(|driver| SCSI_CONTROLLERS.contains(driver)).map(other_controller)
        }
        (DiskBus::Ide, Some(other)) => Some(format!(
            "the controller {other} is not known: its disks are on the chipset's here"
        )),
        _ => None,
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
        if let Some(why) = foreign_controller(device, bus, arguments) {
            return draft.refused(LINE, device.text(), why);
        }
        return match behind("-drive", device.get("drive")) {
            Some(drive) => disk(draft, &drive, bus, cdrom, Some(device)),
            None if cdrom && device.get("drive").is_empty() => {
                draft.taken(LINE, device.text());
                draft.vm.empty_cdroms.push(EmptyCdrom { bus });
            }
            None => draft.refused(LINE, device.text(), "write its drive as -drive if=none,id=…"),
        };
    }
    match driver {
        // Made with the disks on it.
        "virtio-scsi-pci" | "virtio-scsi" => {
            draft.rest(LINE, "-device virtio-scsi-pci", &device.beside(&["driver", "id"]));
        }
        "virtio-net-pci" | "virtio-net" | "e1000" | "e1000e" | "rtl8139" => {
            match behind("-netdev", device.get("netdev")) {
                Some(network) => card(draft, &network, device, driver),
                None => draft.refused(LINE, device.text(), "it is plugged into no -netdev"),
            }
        }
        "tpm-crb" => tpm(draft, device, behind("-tpmdev", device.get("tpmdev")), TpmModel::Crb),
        "tpm-tis" => tpm(draft, device, behind("-tpmdev", device.get("tpmdev")), TpmModel::Tis),
        "nvme" => draft.refused(
            LINE,
            device.text(),
            "QEMU cannot save the state of an NVMe disk: make it virtio-blk-pci",
        ),
        "virtserialport" if is_agents(device) => {
            draft.vm.guest_agent = true;
            draft.taken(LINE, "the channel of the guest's agent");
            let known = ["driver", "chardev", "name", "id", "bus", "nr"];
            draft.rest(LINE, "-device virtserialport", &device.beside(&known));
        }
        // Made with the agent's channel.
        "virtio-serial-pci" | "virtio-serial" if arguments.iter().any(is_agents) => {
            draft.rest(LINE, "-device virtio-serial-pci", &device.beside(&["driver", "id"]));
        }
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

/// Whether a port is the channel of the guest's agent.
fn is_agents(device: &Argument) -> bool {
    device.named(&["driver"]) == "virtserialport" && device.get("name") == "org.qemu.guest_agent.0"
}

/// A TPM, whose state is wherever the swtpm behind it keeps that.
fn tpm(draft: &mut Draft<'_>, device: &Argument, backend: Option<Argument>, model: TpmModel) {
    if backend.is_none_or(|backend| backend.named(&["type"]) != "emulator") {
        return draft.refused(LINE, device.text(), "only an emulated TPM 2.0 is replicated");
    }
    draft.vm.tpm = Some(model);
    let why = "a TPM 2.0 that begins anew: to keep what is in the guest's, write the directory of its swtpm's state as \
               `tpm_state`";
    draft.changed(LINE, device.text(), why);
}

/// Place of a device on the PCI bus, if it says so.
fn place(draft: &mut Draft<'_>, device: &Argument) -> Option<PciPlace> {
    let (bus, address) = (device.get("bus"), device.get("addr"));
    if bus.is_empty() && address.is_empty() {
        return None;
    }
    let found = PciPlace::of_options(&device.value, draft.vm.root_bus());
    if found.is_none() {
        let why = "it is at another place on the PCI bus: the guest may call it otherwise";
        draft.changed(LINE, device.text(), why);
    }
    found
}

/// Reason why a disk cannot be replicated as it is.
fn obstacle(drive: &Argument, device: Option<&Argument>, cdrom: bool) -> Option<&'static str> {
    let file = drive.get("file");
    let protocol = file.split_once(':').map(|(protocol, _)| protocol);
    let is_protocol = |name: &str| !name.is_empty() && !name.contains('/');
    let is_on = |value: &str| matches!(value, "on" | "yes" | "true" | "1");
    let blocks = device.map_or("", |device| device.get("logical_block_size"));
    match () {
        () if is_on(drive.get("snapshot")) => Some("its writes are dropped at the end"),
        () if protocol.is_some_and(is_protocol) => {
            Some("only files and block devices are replicated")
        }
        () if (is_on(drive.get("readonly")) || is_on(drive.get("read-only"))) && !cdrom => {
            Some("a disk that only reads is not known here")
        }
        () if !matches!(blocks, "" | "0" | "512") && !cdrom => Some(
            "the guest counts its blocks otherwise, and would not find its partitions: disks have blocks of 512 bytes \
             here",
        ),
        () => None,
    }
}

fn disk(
    draft: &mut Draft<'_>,
    drive: &Argument,
    bus: DiskBus,
    cdrom: bool,
    device: Option<&Argument>,
) {
    let known = ["file", "format", "if", "id", "media", "snapshot", "readonly", "read-only"];
    draft.rest(LINE, "-drive", &drive.beside(&known));
    if let Some(device) = device {
        let known = ["driver", "drive", "serial", "id", "bootindex", "logical_block_size"];
        // Only a virtio disk is a device of the PCI bus itself.
        let of_bus: &[&str] = if bus == DiskBus::Virtio { &["bus", "addr"] } else { &[] };
        draft.rest(LINE, "-device", &device.beside(&[&known[..], of_bus].concat()));
    }
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
    if let Some(why) = obstacle(drive, device, cdrom) {
        return draft.refused(LINE, drive.text(), why);
    }
    let new = DiskDefinition::new(drive.get("file"), format, bus);
    let serial = device.map(|device| device.get("serial").to_owned());
    let serial = serial.filter(|serial| !serial.is_empty());
    draft.taken(LINE, drive.text());
    let pci = device.filter(|_| bus == DiskBus::Virtio).and_then(|device| place(draft, device));
    let order = device.and_then(|device| device.get("bootindex").parse().ok());
    draft.disk(order, DiskDefinition { cdrom, serial, pci, ..new });
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
    card_rest(draft, network, device);
    let pci = place(draft, device);
    let mtu = device.get("host_mtu").parse().ok().filter(|_| kind == CardModel::VirtioNet);
    draft.vm.cards.push(CardDefinition { pci, mtu, ..new });
}

/// Notes what is not carried over of a card, and of what is behind it.
fn card_rest(draft: &mut Draft<'_>, network: &Argument, device: &Argument) {
    let of_network = ["type", "id", "br", "ifname", "script", "downscript", "helper"];
    let of_card =
        ["driver", "netdev", "model", "mac", "id", "bus", "addr", "bootindex", "host_mtu"];
    draft.rest(LINE, &network.option, &network.beside(&[&of_network[..], &of_card].concat()));
    if device != network {
        draft.rest(LINE, &device.option, &device.beside(&of_card));
    }
    if !device.get("bootindex").is_empty() {
        draft.changed(LINE, device.text(), "it boots from its disks, in their order");
    }
}
