//! `<devices>`.

use super::{disks, pci, rest};
use crate::draft::Draft;
use crate::xml::Element;
use understudy_network::{FIRST_VLAN, LAST_VLAN, VlanSet, Vlans};
use understudy_qemu::definition::{CardDefinition, CardModel, TpmModel, Vga, VirtioInterface};

/// What is to be known of a card on libvirt's own network.
const NAT: &str = ", which is libvirt's NAT, another network on each: a take-over cuts every connection through it. \
                   For protection put the card on a bridge of one Ethernet segment: --bridge default=br0";
/// Directory where libvirt's swtpms keep their state.
const TPM_STATES: &str = "/var/lib/libvirt/swtpm";

pub(super) fn devices(draft: &mut Draft<'_>, devices: &Element, boots: &[&str]) {
    // Bridges and controllers come before what is behind them.
    let controllers = devices.children.iter().filter(|device| device.name == "controller");
    let others = devices.children.iter().filter(|device| device.name != "controller");
    controllers.clone().for_each(|it| controller(draft, it));
    let usb = controllers.clone().any(|it| it.get("type") == "usb" && it.get("model") != "none");
    if !usb && devices.children.iter().any(|device| device.get("bus") == "usb") {
        draft.device("qemu-xhci,id=usb");
    }
    let screen = devices.child("video");
    for it in others {
        match it.name == "video" && screen.is_none_or(|first| !std::ptr::eq(first, it)) {
            true => draft.left_out(it.line, it.tag(), "a guest has one screen here"),
            false => device(draft, it, boots),
        }
    }
}

fn device(draft: &mut Draft<'_>, device: &Element, boots: &[&str]) {
    let (line, tag) = (device.line, device.tag());
    rest::of_device(draft, device);
    match &device.name[..] {
        "emulator" => {}
        "disk" => disks::disk(draft, device, boots),
        "interface" => card(draft, device),
        "serial" | "console" => console(draft, device),
        "channel" => channel(draft, device),
        "input" => input(draft, device),
        "graphics" => graphics(draft, device),
        "video" => video(draft, device),
        "memballoon" => balloon(draft, device),
        "rng" => rng(draft, device),
        "watchdog" => watchdog(draft, device),
        "panic" => match device.get("model") {
            "isa" | "" => draft.device("pvpanic"),
            "hyperv" => draft.left_out(line, tag, "a crash stands in the console's log"),
            _ => draft.refused(line, tag, "it is not known"),
        },
        "sound" | "audio" => draft.left_out(line, tag, "a protected VM makes no sound"),
        "redirdev" => draft.left_out(line, tag, "nothing is plugged into a protected VM"),
        "parallel" => draft.left_out(line, tag, "its output would not be held"),
        "smartcard" => draft.left_out(line, tag, "it is in a reader of this host's"),
        "tpm" => tpm(draft, device),
        "hostdev" => draft.refused(line, tag, "it is hardware of this host, and cannot move"),
        "filesystem" => {
            draft.refused(
                line,
                tag,
                "its files are this host's: put them on a disk, or mount them by NFS",
            );
        }
        _ => draft.refused(line, tag, "it is not known to keep the VM protectable"),
    }
}

fn tpm(draft: &mut Draft<'_>, tpm: &Element) {
    let backend = tpm.child("backend");
    let backend_is = |name: &str, value: &str| backend.is_some_and(|it| it.get(name) == value);
    let model = match tpm.get("model") {
        "tpm-crb" => TpmModel::Crb,
        "tpm-tis" | "" => TpmModel::Tis,
        _ => return draft.refused(tpm.line, tpm.tag(), "this model is not known"),
    };
    if !backend_is("type", "emulator") || backend_is("version", "1.2") {
        let why = "only an emulated TPM 2.0 is replicated";
        return draft.refused(tpm.line, tpm.tag(), why);
    }
    if backend.is_some_and(|backend| backend.child("encryption").is_some()) {
        return draft.refused(
            tpm.line,
            tpm.tag(),
            "its state is encrypted with a key of libvirt's",
        );
    }
    draft.vm.tpm = Some(model);
    let what = "a TPM 2.0".to_owned();
    match draft.uuid.clone().filter(|_| !backend_is("persistent_state", "no")) {
        None => draft.taken(tpm.line, what),
        Some(uuid) => {
            let directory = format!("{TPM_STATES}/{uuid}/tpm2");
            draft.taken(tpm.line, format!("{what}, which begins with the state in {directory}"));
            draft.vm.tpm_state = Some(directory.into());
        }
    }
}

/// Notes a virtio device whose model is not that of the VM's others.
pub(super) fn interface(draft: &mut Draft<'_>, line: usize, what: &str, model: &str) {
    let own = match model {
        "virtio-transitional" => VirtioInterface::Transitional,
        "virtio-non-transitional" => VirtioInterface::Modern,
        _ => return,
    };
    if draft.vm.virtio != Some(own) {
        let why = "the VM has one interface for all its virtio devices: see `virtio`";
        draft.changed(line, format!("{what}, model {model}"), why);
    }
}

fn controller(draft: &mut Draft<'_>, controller: &Element) {
    let model = controller.get("model");
    match controller.get("type") {
        "pci" => pci::bridge(draft, controller),
        "usb" => usb(draft, controller),
        "scsi"
            if !matches!(
                model,
                "virtio-scsi" | "virtio-transitional" | "virtio-non-transitional" | ""
            ) =>
        {
            let why = "disks are on virtio-scsi here; the guest may need its driver first";
            draft.refused(controller.line, controller.tag(), why);
        }
        // Made with what is on them.
        kind @ ("scsi" | "virtio-serial") => {
            if controller.child_get("address", "type") == "pci" {
                let why = "it is made with what is on it, at another place on the PCI bus";
                draft.changed(controller.line, format!("<controller type='{kind}'>"), why);
            }
        }
        "sata" | "ide" | "fdc" => {}
        _ => draft.refused(controller.line, controller.tag(), "it is not known"),
    }
}

fn usb(draft: &mut Draft<'_>, controller: &Element) {
    let driver = match controller.get("model") {
        "none" => return,
        "qemu-xhci" => "qemu-xhci",
        "nec-xhci" => "nec-usb-xhci",
        "piix3-uhci" | "" => "piix3-usb-uhci",
        "ich9-ehci1" => "ich9-usb-ehci1",
        // EHCI's companions, for slow devices.
        "ich9-uhci1" | "ich9-uhci2" | "ich9-uhci3" => return,
        _ => return draft.refused(controller.line, controller.tag(), "it is not known"),
    };
    let options = pci::options(draft, controller);
    draft.device(format!("{driver},id=usb{options}"));
}

/// VLANs that a `<vlan>` names: one tag is the guest's network, several, or `trunk`, are the
/// guest's own.
fn vlans(vlan: &Element) -> Result<Vlans, String> {
    let tags: Vec<&Element> = vlan.children.iter().filter(|tag| tag.name == "tag").collect();
    let id = |tag: &&Element| {
        let id = tag.get("id").parse().ok().filter(|id| (FIRST_VLAN..=LAST_VLAN).contains(id));
        id.ok_or_else(|| format!("{} is no VLAN that a card can be in", tag.tag()))
    };
    let ids: Vec<u16> = tags.iter().map(id).collect::<Result<_, _>>()?;
    let native = tags.iter().zip(&ids).find(|(tag, _)| !tag.get("nativeMode").is_empty());
    if native.is_some_and(|(tag, _)| tag.get("nativeMode") == "tagged") {
        return Err("a native VLAN with a tag is Open vSwitch's".to_owned());
    }
    if let ([access], false) = (&ids[..], vlan.get("trunk") == "yes" || native.is_some()) {
        return Ok(Vlans { access: Some(*access), trunk: VlanSet::default() });
    }
    let texts: Vec<String> = ids.iter().map(u16::to_string).collect();
    let trunk = texts.join(",").parse().map_err(|_| format!("{} has no tag", vlan.tag()))?;
    Ok(Vlans { access: native.map(|(_, id)| *id), trunk })
}

fn card(draft: &mut Draft<'_>, card: &Element) {
    let mac = card.child_get("mac", "address");
    let what = format!("network card {mac}");
    let Ok(address) = mac.parse() else {
        return draft.refused(card.line, what, "it needs a <mac>: without one it would change");
    };
    if card.child("virtualport").is_some() || card.child("teaming").is_some() {
        let why = "only a card on a bridge of Linux's own has its output held";
        return draft.refused(card.line, what, why);
    }
    let source = |name: &str| card.child_get("source", name).to_owned();
    let bridge = match (card.get("type"), source("network")) {
        ("bridge", _) => source("bridge"),
        ("network", network) => {
            let known = draft.surroundings.bridges.get(&network).cloned();
            let (bridge, words) = match known {
                Some(bridge) => (bridge, String::new()),
                // As libvirt's package comes.
                None if network == "default" => ("virbr0".to_owned(), NAT.to_owned()),
                None => {
                    let why = format!("say which bridge the network is: --bridge {network}=BRIDGE");
                    return draft.refused(card.line, what, why);
                }
            };
            draft.changed(
                card.line,
                what.clone(),
                format!("network {network} is bridge {bridge}, on every host{words}"),
            );
            bridge
        }
        ("direct", _) => {
            let why = "macvtap cannot hold output: make a bridge of the interface, and plug the card into it";
            return draft.refused(card.line, what, why);
        }
        (kind, _) => {
            let why = format!("{kind} networks are not held; plug the card into a bridge");
            return draft.refused(card.line, what, why);
        }
    };
    let vlans = match card.child("vlan").map(vlans).transpose() {
        Ok(vlans) => vlans.unwrap_or_default(),
        Err(why) => return draft.refused(card.line, what, why),
    };
    let model = match card.child_get("model", "type") {
        "virtio" | "virtio-non-transitional" | "virtio-transitional" => CardModel::VirtioNet,
        "e1000" => CardModel::E1000,
        "e1000e" => CardModel::E1000e,
        "rtl8139" | "" => CardModel::Rtl8139,
        other => return draft.refused(card.line, what, format!("the model {other} is not known")),
    };
    let mtu = match card.child_get("mtu", "size") {
        "" => None,
        text => match text.parse() {
            Ok(mtu) => Some(mtu),
            Err(_) => return draft.refused(card.line, what, format!("an MTU of {text:?}")),
        },
    };
    let pci = pci::place(draft, card);
    draft.taken(card.line, format!("{what} on {bridge}"));
    interface(draft, card.line, &what, card.child_get("model", "type"));
    if mtu.is_some() && model != CardModel::VirtioNet {
        let why = "only a virtio card tells the guest how long packets may be";
        draft.left_out(card.line, format!("{what}, <mtu>"), why);
    }
    let mtu = mtu.filter(|_| model == CardModel::VirtioNet);
    let new = CardDefinition::new(address, &bridge, model);
    draft.in_vlans(card.line, CardDefinition { mtu, pci, ..new }, vlans);
    card_rest(draft, card, &what);
}

/// Notes what bounds, filters or speeds up a card.
fn card_rest(draft: &mut Draft<'_>, card: &Element, what: &str) {
    for part in &card.children {
        let what = format!("{what}, {}", part.tag());
        match &part.name[..] {
            "bandwidth" => draft.left_out(part.line, what, "nothing bounds a card's traffic"),
            "filterref" => draft.left_out(part.line, what, "filter on the bridge"),
            "link" if part.get("state") == "down" => {
                draft.changed(part.line, what, "its link is up");
            }
            "boot" => draft.changed(part.line, what, "it boots from its disks, in their order"),
            "acpi" => draft.changed(part.line, what, "the guest may call the card otherwise"),
            "port" if part.get("isolated") == "yes" => {
                let why = "other guests on the bridge reach it: filter there";
                draft.left_out(part.line, what, why);
            }
            "source" if !part.get("portgroup").is_empty() => {
                let why = "what libvirt's network says of the group is not carried over: its VLAN is `vlan` of the card";
                draft.left_out(part.line, what, why);
            }
            _ => {}
        }
    }
}

fn console(draft: &mut Draft<'_>, port: &Element) {
    let kind = port.child_get("target", "type");
    let first = matches!(port.child_get("target", "port"), "" | "0");
    if !first || !matches!(kind, "" | "serial" | "isa-serial") {
        let why = "a guest has one serial port here, its console";
        return draft.left_out(port.line, port.tag(), why);
    }
    match port.get("type") {
        "pty" | "" if draft.vm.console => {}
        "pty" | "" => draft.taken(port.line, "a serial port: `understudy vm console`"),
        _ => draft.changed(port.line, port.tag(), "a serial port: `understudy vm console`"),
    }
    draft.vm.console = true;
}

fn channel(draft: &mut Draft<'_>, channel: &Element) {
    match channel.child_get("target", "name") {
        "org.qemu.guest_agent.0" => {
            draft.vm.guest_agent = true;
            draft.taken(channel.line, "the channel of the guest's agent");
        }
        name if channel.get("type").starts_with("spice")
            || name.starts_with("com.redhat.spice") =>
        {
            draft.left_out(channel.line, channel.tag(), "there is no SPICE");
        }
        name => {
            draft.refused(channel.line, channel.tag(), format!("the channel {name:?} is not known"))
        }
    }
}

fn input(draft: &mut Draft<'_>, input: &Element) {
    let driver = match (input.get("bus"), input.get("type")) {
        ("ps2" | "", _) => return,
        ("usb", "tablet") => "usb-tablet",
        ("usb", "mouse") => "usb-mouse",
        ("usb", "keyboard") => "usb-kbd",
        ("virtio", "tablet") => "virtio-tablet-pci,ioeventfd=off",
        ("virtio", "keyboard") => "virtio-keyboard-pci,ioeventfd=off",
        ("virtio", "mouse") => "virtio-mouse-pci,ioeventfd=off",
        _ => return draft.refused(input.line, input.tag(), "it is hardware of this host"),
    };
    let options = pci::options(draft, input);
    let bus = if input.get("bus") == "usb" { ",bus=usb.0" } else { "" };
    draft.taken(input.line, format!("{} ({})", input.get("type"), input.get("bus")));
    draft.device(format!("{driver}{bus}{options}"));
}

fn graphics(draft: &mut Draft<'_>, graphics: &Element) {
    match graphics.get("type") {
        kind @ ("vnc" | "spice") => {
            draft.screen(graphics.line, format!("<graphics type='{kind}'>"));
        }
        "egl-headless" | "none" => {}
        _ => draft.left_out(graphics.line, graphics.tag(), "the screen is seen through VNC only"),
    }
}

fn video(draft: &mut Draft<'_>, video: &Element) {
    let Some(model) = video.child("model") else { return };
    let known = ["type", "heads", "primary", "ram", "vram", "vram64", "vgamem"];
    rest::of_part(draft, model, "video", &known);
    if model.child_get("acceleration", "accel3d") == "yes" {
        return draft.refused(model.line, model.tag(), "3D is drawn by this host's hardware");
    }
    match model.get("type") {
        "virtio" => draft.vm.vga = Vga::Virtio,
        "vga" => draft.vm.vga = Vga::Std,
        "bochs" => {
            let options = pci::options(draft, video);
            draft.device(format!("bochs-display{options}"));
        }
        "none" => return,
        kind @ ("qxl" | "cirrus") => {
            return draft.other_video(model.line, format!("video {kind}"));
        }
        other => return draft.refused(model.line, model.tag(), format!("{other} is not known")),
    }
    draft.taken(model.line, format!("video {}", model.get("type")));
}

fn balloon(draft: &mut Draft<'_>, balloon: &Element) {
    if balloon.get("model") == "none" {
        return;
    }
    let options = pci::options(draft, balloon);
    draft.device(format!("virtio-balloon-pci,id=balloon0,ioeventfd=off{options}"));
    draft.taken(balloon.line, "a memory balloon, which stays empty");
}

fn rng(draft: &mut Draft<'_>, rng: &Element) {
    let file = rng.child_text("backend");
    if rng.child_get("backend", "model") == "egd" {
        return draft.refused(rng.line, rng.tag(), "random numbers come from the host only");
    }
    if let Some(rate) = rng.child("rate") {
        draft.left_out(rate.line, rate.tag(), "nothing bounds it");
    }
    let file = if file.is_empty() { "/dev/urandom" } else { file };
    let options = pci::options(draft, rng);
    draft.random_numbers(rng.line, file, &options);
}

fn watchdog(draft: &mut Draft<'_>, watchdog: &Element) {
    if !matches!(watchdog.get("action"), "reset" | "") {
        draft.changed(watchdog.line, watchdog.tag(), "it resets the guest");
    }
    match watchdog.get("model") {
        // The chipset's own.
        "itco" => {}
        "i6300esb" => {
            let options = pci::options(draft, watchdog);
            draft.device(format!("i6300esb,id=watchdog0{options}"));
        }
        _ => draft.refused(watchdog.line, watchdog.tag(), "it is not known"),
    }
}
