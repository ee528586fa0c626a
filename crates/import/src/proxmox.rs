//! Proxmox's configuration of a VM, as `qm config ID` prints it and /etc/pve/qemu-server/ID.conf
//! has it.

mod device;

use crate::draft::Draft;
use crate::{Import, Surroundings};
use understudy_qemu::VmDefinition;
use understudy_qemu::definition::{AcceleratorChoice, MemorySize, Topology, Vga, VirtioInterface};

/// One line: a key and what it is.
#[derive(Clone, Copy)]
struct Line<'a> {
    number: usize,
    key: &'a str,
    value: &'a str,
}

impl<'a> Line<'a> {
    fn read(number: usize, text: &'a str) -> Result<Line<'a>, (usize, String)> {
        let (key, value) =
            text.split_once(':').ok_or_else(|| (number, format!("{text:?} is no `key: value`")))?;
        Ok(Line { number, key: key.trim(), value: value.trim() })
    }

    /// Text as it stands there.
    fn text(&self) -> String {
        format!("{}: {}", self.key, self.value)
    }

    /// The value of an option of a value like `file,size=4G`; empty if there is none.
    fn option(&self, name: &str) -> &'a str {
        let options = self.value.split(',').filter_map(|part| part.split_once('='));
        options.filter(|(key, _)| *key == name).map(|(_, value)| value).next().unwrap_or_default()
    }

    /// Its options that are none of these, as they stand in the text.
    fn beside(&self, known: &[&str]) -> Vec<String> {
        let options = self.value.split(',').filter(|part| part.contains('='));
        let key = |part: &&str| part.split('=').next().unwrap_or_default().to_owned();
        options.filter(|part| !known.contains(&&*key(part))).map(str::to_owned).collect()
    }

    /// Part that the value begins with, before its options.
    fn subject(&self) -> &'a str {
        self.value.split(',').next().unwrap_or_default()
    }

    /// The number of a key like `scsi0`.
    fn index(&self, prefix: &str) -> Option<u8> {
        self.key.strip_prefix(prefix)?.parse().ok()
    }
}

/// Makes a definition of a VM.
pub fn proxmox(text: &str, surroundings: &Surroundings) -> Import {
    read(text, surroundings)
        .unwrap_or_else(|(line, why)| Import::refused(line, "the configuration", why))
}

fn read(text: &str, surroundings: &Surroundings) -> Result<Import, (usize, String)> {
    let mut lines = Vec::new();
    for (n, line) in text.lines().enumerate() {
        let line = line.trim();
        // What follows are snapshots, or changes that wait for the next start.
        if line.starts_with('[') {
            break;
        }
        if !line.is_empty() && !line.starts_with('#') {
            lines.push(Line::read(n + 1, line)?);
        }
    }
    let find = |key: &str| lines.iter().find(|line| line.key == key).copied();
    let mut draft = Draft::new(begin(find, surroundings)?, surroundings);
    draft.vm.console = false;
    if let Some(line) = find("name") {
        draft.named(line.number, line.value);
    }
    machine(&mut draft, find("machine"));
    let order = boot_order(&mut draft, find("boot"), find("bootdisk"));
    for line in &lines {
        part(&mut draft, line, &order, find);
    }
    windows(&mut draft, find);
    tablet(&mut draft, find("tablet"), find("vga"));
    if find("balloon").is_none_or(|line| line.value != "0") {
        let line = find("balloon").map_or(1, |line| line.number);
        let why = "the guest has all of its memory";
        draft.left_out(line, "the memory balloon, which Proxmox gives without saying so", why);
    }
    Ok(draft.finish())
}

/// The keys of what the guest boots from, first ones first.
fn boot_order<'a>(
    draft: &mut Draft<'_>,
    boot: Option<Line<'a>>,
    disk: Option<Line<'a>>,
) -> Vec<&'a str> {
    let order = boot.map_or("", |line| line.option("order"));
    let why = "it boots from its disks, in their order";
    match boot.filter(|line| !line.value.is_empty()) {
        Some(line) if order.split(';').any(|key| key.starts_with("net")) => {
            draft.changed(line.number, line.text(), why);
        }
        // As it was written once: letters for kinds of devices.
        Some(line) if order.is_empty() && !line.option("legacy").is_empty() => {
            draft.changed(line.number, line.text(), why);
        }
        Some(line) if order.is_empty() && !line.value.starts_with('c') => {
            draft.changed(line.number, line.text(), why);
        }
        _ => {}
    }
    let legacy = disk.filter(|_| order.is_empty()).map_or("", |line| line.value);
    order.split(';').chain([legacy]).filter(|key| !key.is_empty()).collect()
}

/// Versions of Windows that Proxmox gives the following under KVM.
const WINDOWS: [&str; 4] = ["win7", "win8", "win10", "win11"];
const ENLIGHTENMENTS: [&str; 10] = [
    "hv-spinlocks=0x1fff",
    "hv-vapic=on",
    "hv-time=on",
    "hv-reset=on",
    "hv-vpindex=on",
    "hv-runtime=on",
    "hv-relaxed=on",
    "hv-synic=on",
    "hv-stimer=on",
    "hv-ipi=on",
];

/// Applies what the kind of the guest's system means.
fn windows<'a>(draft: &mut Draft<'_>, find: impl Fn(&str) -> Option<Line<'a>>) {
    let Some(line) = find("ostype") else { return };
    let plain = ["l26", "other", ""];
    if plain.contains(&line.value) {
        return;
    }
    if !WINDOWS.contains(&line.value) {
        let why = "what Proxmox sets for it is not carried over: compare with `qm showcmd`";
        return draft.left_out(line.number, line.text(), why);
    }
    if find("localtime").is_none() {
        draft.argument("-rtc", "base=localtime");
    }
    let is_uefi = find("bios").is_some_and(|bios| bios.value == "ovmf");
    let is_kvm = find("kvm").is_none_or(|kvm| kvm.value != "0");
    if is_kvm && !(is_uefi && line.value == "win7") {
        draft.flags.extend(ENLIGHTENMENTS.map(str::to_owned));
    }
    let why = "a clock in local time, and what Windows is offered; the machine has an HPET";
    draft.changed(line.number, line.text(), why);
}

/// Begins the definition with what every VM has; what is not said is Proxmox's default.
fn begin<'a>(
    find: impl Fn(&str) -> Option<Line<'a>>,
    surroundings: &Surroundings,
) -> Result<VmDefinition, (usize, String)> {
    let line = find("name");
    let name = surroundings
        .name(line.map_or("", |line| line.value))
        .map_err(|error| (line.map_or(1, |line| line.number), error))?;
    let number = |key: &str, default: u32| match find(key) {
        None => Ok(default),
        Some(line) => line
            .subject()
            .trim_start_matches("current=")
            .parse::<u32>()
            .map_err(|_| (line.number, format!("`{}` is no number", line.text()))),
    };
    let (cores, sockets) = (number("cores", 1)?, number("sockets", 1)?);
    let line = find("memory").map_or(1, |line| line.number);
    let memory: MemorySize = format!("{}M", number("memory", 512)?)
        .parse()
        .map_err(|error| (line, format!("{error}")))?;
    let vcpus = cores.checked_mul(sockets).ok_or((1, "too many cores".to_owned()))?;
    let mut vm = VmDefinition::new(name, memory, vcpus);
    vm.topology = Some(Topology { sockets, dies: 1, cores, threads: 1 });
    vm.vga = Vga::Std;
    vm.cpu = Some("kvm64".to_owned());
    // On q35, too, its devices are on a bus of plain PCI.
    vm.virtio = Some(VirtioInterface::Transitional);
    Ok(vm)
}

/// The bridges that Proxmox gives a q35 machine: after the last one a guest calls its first card
/// `enp6s18`.
const BRIDGES: [&str; 6] = [
    "pcie-root-port,id=ich9-pcie-port-1,bus=pcie.0,addr=0x1c.0x0,multifunction=on,port=1,chassis=1",
    "pcie-root-port,id=ich9-pcie-port-2,bus=pcie.0,addr=0x1c.0x1,port=2,chassis=2",
    "pcie-root-port,id=ich9-pcie-port-3,bus=pcie.0,addr=0x1c.0x2,port=3,chassis=3",
    "pcie-root-port,id=ich9-pcie-port-4,bus=pcie.0,addr=0x1c.0x3,port=4,chassis=4",
    // At 0x1e there; but 0x1e is the SCSI controller's here, and only the order counts.
    "i82801b11-bridge,id=pcidmi,bus=pcie.0,addr=0x1d.0x0,multifunction=on",
    "pci-bridge,id=pci.0,bus=pcidmi,addr=0x1.0x0,chassis_nr=1",
];

fn machine(draft: &mut Draft<'_>, line: Option<Line<'_>>) {
    let Some(line) = line else { return };
    let kind = match line.option("type") {
        "" => line.subject(),
        kind => kind,
    };
    // Proxmox counts its own changes, too.
    let kind = kind.split_once('+').map_or(kind, |(kind, _)| kind);
    draft.vm.machine = kind.to_owned();
    if draft.vm.is_q35() {
        BRIDGES.iter().for_each(|bridge| draft.device(*bridge));
    }
    if !line.option("viommu").is_empty() {
        draft.refused(line.number, line.text(), "a virtual IOMMU is not proven");
    }
    draft.rest(line.number, line.key, &line.beside(&["type", "viommu"]));
    draft.taken(line.number, format!("machine {kind}"));
}

/// A guest has one where nobody says so, unless what it has for a screen needs none.
fn tablet(draft: &mut Draft<'_>, line: Option<Line<'_>>, vga: Option<Line<'_>>) {
    let screen = vga.map_or("", |line| match line.option("type") {
        "" => line.subject(),
        kind => kind,
    });
    let has_one = match line {
        Some(line) => line.value != "0",
        None => !screen.starts_with("serial") && !screen.starts_with("qxl"),
    };
    if !has_one {
        return;
    }
    let (controller, bus) = match draft.vm.is_q35() {
        true => ("ich9-usb-ehci1,id=ehci,bus=pcie.0,addr=0x1d.0x7,multifunction=on", "ehci.0"),
        false => ("piix3-usb-uhci,id=uhci,bus=pci.0,addr=0x1.0x2", "uhci.0"),
    };
    draft.device(controller);
    draft.device(format!("usb-tablet,id=tablet,bus={bus},port=1"));
    let number = line.or(vga).map_or(1, |line| line.number);
    draft.taken(number, "a USB tablet, which Proxmox gives without saying so");
}

fn part<'a>(
    draft: &mut Draft<'_>,
    line: &Line<'_>,
    order: &[&str],
    find: impl Fn(&str) -> Option<Line<'a>>,
) {
    let (number, text) = (line.number, line.text());
    match line.key {
        // Read before, or by Proxmox alone.
        "name" | "cores" | "sockets" | "memory" | "machine" | "boot" | "bootdisk" | "meta"
        | "description" | "tags" | "ostype" | "scsihw" | "parent" | "digest" | "tablet"
        | "vmstatestorage" => {}
        "acpi" if line.value == "0" => draft.changed(number, text, "it has ACPI"),
        "kvm" if line.value == "0" => {
            draft.vm.accel = AcceleratorChoice::Tcg;
            draft.taken(number, text);
        }
        "template" if line.value == "1" => {
            draft.refused(number, text, "its disks are others' templates: import a clone of it");
        }
        "protection" | "startup" => {
            draft.left_out(number, text, "nothing keeps a VM from being ended, or orders starts");
        }
        "acpi" | "kvm" | "template" => {}
        "cpu" => device::processor(draft, line),
        "onboot" => draft.vm.autostart = line.value == "1",
        "smbios1" => {
            if !line.option("uuid").is_empty() {
                draft.argument("-uuid", line.option("uuid"));
            }
            let rest = line.beside(&["uuid", "base64"]);
            if !rest.is_empty() {
                let what = format!("{}, {}", line.key, rest.join(" "));
                draft.left_out(number, what, "add `-smbios` to qemu_args, if the guest reads it");
            }
        }
        "bios" if line.value == "ovmf" => device::uefi(draft, line, find("efidisk0")),
        "efidisk0" if find("bios").is_none_or(|bios| bios.value != "ovmf") => {
            draft.left_out(number, text, "a BIOS has no variables");
        }
        "bios" | "efidisk0" => {}
        "agent" if line.option("type") == "isa" => {
            draft.refused(number, text, "the agent's channel is virtio's here: set type=virtio");
        }
        "agent" if matches!(line.subject(), "0" | "enabled=0") => {}
        "agent" => {
            draft.vm.guest_agent = true;
            draft.taken(number, "the channel of the guest's agent");
            draft.rest(number, line.key, &line.beside(&["enabled", "type"]));
        }
        "vga" => device::video(draft, line),
        "serial0" if line.value == "socket" => {
            draft.vm.console = true;
            draft.taken(number, "a serial port: `understudy vm console`");
        }
        "localtime" if line.value == "1" => draft.argument("-rtc", "base=localtime"),
        "balloon" | "shares" | "cpulimit" | "cpuunits" | "hugepages" | "affinity" | "numa"
        | "vcpus" | "hotplug" | "localtime" | "hookscript" | "ciuser" | "cipassword"
        | "sshkeys" | "nameserver" | "searchdomain" | "freeze" | "keyboard"
        | "migrate_downtime" | "migrate_speed" | "spice_enhancements" => {
            draft.left_out(number, text, "the daemon places memory and threads itself");
        }
        "vmgenid" => draft.left_out(number, text, "the guest is never copied by a fail-over"),
        "rng0" => {
            let file = match line.option("source") {
                "" => line.subject(),
                source => source,
            };
            draft.random_numbers(number, file, "");
            draft.rest(number, line.key, &line.beside(&["source"]));
        }
        "tpmstate0" => draft.refused(
            number,
            text,
            "its state is in a volume that only Proxmox reads: remove it, and add tpm = \"crb\" to the \
             definition, if the guest keeps no secrets in it",
        ),
        "args" => draft.refused(number, text, "write what it adds into qemu_args yourself"),
        key if key.starts_with("unused") => {
            draft.left_out(number, text, "it stays where it is, and the guest has not had it");
        }
        key if key.starts_with("ipconfig") => {
            draft.left_out(number, text, "what cloud-init has done in the guest stays");
        }
        key if key.starts_with("audio") => {
            draft.left_out(number, text, "a protected VM makes no sound");
        }
        key if key.starts_with("hostpci")
            || (key.starts_with("usb") && !line.value.contains("spice")) =>
        {
            draft.refused(number, text, "it is hardware of this host, and cannot move");
        }
        key if key.starts_with("net") => device::card(draft, line),
        _ => {
            if !device::disk(draft, line, (find("scsihw"), order)) {
                draft.refused(number, text, "it is not known to keep the VM protectable");
            }
        }
    }
}

#[cfg(test)]
mod tests;
