//! The conditions that a definition must satisfy beyond its types.

use super::extra_args::{check_extra_args, has_display, split};
use super::{CardModel, DiskBus, DiskDefinition, DiskFormat, VmDefinition};
use crate::command::{AHCI_SLOTS, MAX_CARDS, MAX_SCSI_DISKS, MAX_VIRTIO_DISKS, ide_slots};
use std::collections::HashMap;
use std::fmt;
use std::path::Path;
use understudy_network::{FIRST_VLAN, LAST_VLAN};

/// The MTU that every network must carry.
const SMALLEST_MTU: u16 = 68;
/// The length that virtio-blk and ATA have room for.
const LONGEST_SERIAL: usize = 20;

/// One thing that is wrong with a definition.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    /// The field, like `disk[0].path`; empty when it is none in particular.
    pub field: String,
    /// The text about what is wrong with it and what is allowed.
    pub message: String,
}

impl Problem {
    pub(crate) fn new(field: impl Into<String>, message: impl Into<String>) -> Problem {
        Problem { field: field.into(), message: message.into() }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.field.is_empty() {
            f.write_str(&self.message)
        } else {
            write!(f, "{}: {}", self.field, self.message)
        }
    }
}

impl VmDefinition {
    /// All that is wrong that can be told without looking at this host. A host
    /// that gets a definition from its peer calls this too.
    pub fn validate(&self) -> Vec<Problem> {
        let mut problems = Vec::new();
        self.check_identity(&mut problems);
        self.check_boot(&mut problems);
        self.check_firmware(&mut problems);
        self.check_disks(&mut problems);
        self.check_buses(&mut problems);
        self.check_cards(&mut problems);
        self.check_places(&mut problems);
        problems.extend(check_extra_args(&self.qemu_args));
        if let Some(Err(message)) = self.policy.map(|policy| policy.validate()) {
            problems.push(policy_problem(&message));
        }
        problems
    }

    /// Firmware, kernel and initial RAM disk, where they are not readable files.
    pub fn missing_boot_files(&self) -> Vec<Problem> {
        let firmware = ("firmware", &self.firmware);
        let files = [firmware, ("kernel", &self.kernel), ("initrd", &self.initrd)];
        let missing = files.iter().filter_map(|(field, path)| missing(field, path.as_ref()?));
        missing.collect()
    }

    /// Disk images that are not readable files.
    pub fn missing_disk_images(&self) -> Vec<Problem> {
        let disks = self.disks.iter().enumerate();
        disks.filter_map(|(n, disk)| missing(&format!("disk[{n}].path"), &disk.path)).collect()
    }

    /// Whether somebody can look at the guest's screen.
    pub fn has_display(&self) -> bool {
        self.vnc || has_display(&self.qemu_args)
    }

    /// The further arguments for PCI bridges, and all others.
    pub(crate) fn split_qemu_args(&self) -> (Vec<&String>, Vec<&String>) {
        split(&self.qemu_args)
    }

    /// Whether the machine is of QEMU's q35 family.
    pub fn is_q35(&self) -> bool {
        self.machine == "q35" || self.machine.starts_with("pc-q35-")
    }

    fn check_identity(&self, problems: &mut Vec<Problem>) {
        if !(1..=255).contains(&self.vcpus) {
            let message = format!("{} is out of range; allowed are 1 to 255", self.vcpus);
            problems.push(Problem::new("vcpus", message));
        }
        if let Some(topology) = self.topology.filter(|t| t.vcpus() != Some(self.vcpus)) {
            let message = format!(
                "{} sockets of {} dies of {} cores of {} threads are not the {} of \"vcpus\"",
                topology.sockets, topology.dies, topology.cores, topology.threads, self.vcpus
            );
            problems.push(Problem::new("topology", message));
        }
        let pc = self.machine == "pc" || self.machine.starts_with("pc-i440fx-");
        if !(self.is_q35() || pc) || !option_value(&self.machine) {
            let message = format!(
                "\"{}\" is not supported; allowed are \"q35\", \"pc\" and their versions, \
                 like \"pc-q35-10.0\"",
                self.machine
            );
            problems.push(Problem::new("machine", message));
        }
        if let Some(cpu) = &self.cpu {
            self.check_cpu(cpu, problems);
        }
    }

    fn check_cpu(&self, cpu: &str, problems: &mut Vec<Problem>) {
        if cpu.is_empty() || cpu.contains(char::is_whitespace) {
            let message = format!("\"{cpu}\" is no CPU model; see qemu-system-x86_64 -cpu help");
            problems.push(Problem::new("cpu", message));
        }
        let model = cpu.split(',').next().unwrap_or_default();
        if matches!(model, "host" | "max") {
            let message = format!(
                "\"{model}\" means something else on every host, and the backup must have the \
                 same CPU; name a model that both hosts have, like \"Westmere\" or \"Haswell\""
            );
            problems.push(Problem::new("cpu", message));
        }
    }

    fn check_boot(&self, problems: &mut Vec<Problem>) {
        if self.kernel.is_none() {
            for (field, present) in
                [("initrd", self.initrd.is_some()), ("append", self.append.is_some())]
            {
                if present {
                    let message = "it needs \"kernel\" beside it";
                    problems.push(Problem::new(field, message));
                }
            }
            if self.disks.is_empty() {
                let message = "nothing to boot from: give \"kernel\" or a [[disk]]";
                problems.push(Problem::new("", message));
            }
        }
    }

    fn check_disks(&self, problems: &mut Vec<Problem>) {
        let mut seen = HashMap::new();
        for (n, disk) in self.disks.iter().enumerate() {
            if let Some(first) = seen.insert(&disk.path, n) {
                let message =
                    format!("{} is the image of disk[{first}] already", disk.path.display());
                problems.push(Problem::new(format!("disk[{n}].path"), message));
            }
        }
        for (n, disk) in self.disks.iter().enumerate() {
            check_disk(n, disk, problems);
        }
        for (n, drive) in self.empty_cdroms.iter().enumerate() {
            if matches!(drive.bus, DiskBus::Virtio | DiskBus::Pflash) {
                let message = "a CD-ROM drive is on \"ide\", \"sata\" or \"scsi\"";
                problems.push(Problem::new(format!("empty_cdrom[{n}].bus"), message));
            }
        }
    }

    /// The room that each bus has.
    fn check_buses(&self, problems: &mut Vec<Problem>) {
        let on = |bus| {
            let disks = self.disks.iter().filter(|disk| disk.bus == bus).count();
            disks + self.empty_cdroms.iter().filter(|drive| drive.bus == bus).count()
        };
        let q35 = self.is_q35();
        // On q35 both are on the chipset's controller.
        let (ide, sata) = match (on(DiskBus::Ide), on(DiskBus::Sata)) {
            (ide, sata) if q35 => (ide + sata, 0),
            apart => apart,
        };
        for (what, count, room) in [
            ("IDE", ide, ide_slots(q35)),
            ("SATA", sata, AHCI_SLOTS),
            ("SCSI", on(DiskBus::Scsi), MAX_SCSI_DISKS),
            ("virtio", on(DiskBus::Virtio), MAX_VIRTIO_DISKS),
        ] {
            if count > room {
                let message = format!("{count} {what} disks; the machine has room for {room}");
                problems.push(Problem::new("disk", message));
            }
        }
    }

    fn check_firmware(&self, problems: &mut Vec<Problem>) {
        let stores = self.disks.iter().filter(|disk| disk.bus == DiskBus::Pflash).count();
        let mut say = |field: &str, message: &str| problems.push(Problem::new(field, message));
        match (&self.firmware, stores) {
            (None, 0) | (Some(_), 1) => {}
            (None, _) => say("firmware", "a disk is on \"pflash\": name the firmware's code, too"),
            (Some(_), 0) => {
                say("firmware", "its variables need a [[disk]] with bus = \"pflash\"");
            }
            (Some(_), _) => say("disk", "more than one is on \"pflash\"; a firmware has one"),
        }
        if self.tpm_state.is_some() && self.tpm.is_none() {
            say("tpm_state", "it needs \"tpm\" beside it");
        }
        if self.secure_boot && !(self.is_q35() && self.firmware.is_some()) {
            say("secure_boot", "it needs machine = \"q35\" and \"firmware\"");
        }
    }

    fn check_cards(&self, problems: &mut Vec<Problem>) {
        let mut seen = HashMap::new();
        for (n, card) in self.cards.iter().enumerate() {
            if card.mtu.is_some() && card.model != CardModel::VirtioNet {
                let message = "only a virtio-net-pci card tells the guest; leave it out";
                problems.push(Problem::new(format!("card[{n}].mtu"), message));
            }
            if card.mtu.is_some_and(|mtu| mtu < SMALLEST_MTU) {
                let message = format!("allowed are {SMALLEST_MTU} to {}", u16::MAX);
                problems.push(Problem::new(format!("card[{n}].mtu"), message));
            }
            if card.vlan.is_some_and(|id| !(FIRST_VLAN..=LAST_VLAN).contains(&id)) {
                let message = format!("allowed are {FIRST_VLAN} to {LAST_VLAN}");
                problems.push(Problem::new(format!("card[{n}].vlan"), message));
            }
            if let Some(first) = seen.insert(card.mac, n) {
                let message = format!("{} is the address of card[{first}] already", card.mac);
                problems.push(Problem::new(format!("card[{n}].mac"), message));
            }
            // The kernel's own rule for names of network devices.
            let bad = |c: char| c == '/' || c == ':' || c.is_whitespace();
            let name = &card.bridge;
            if name.is_empty() || name.len() > 15 || name.contains(bad) {
                let message = format!(
                    "\"{name}\" is no name of a bridge; allowed are 1 to 15 characters \
                     without '/', ':' and spaces"
                );
                problems.push(Problem::new(format!("card[{n}].bridge"), message));
            }
        }
        if self.cards.len() > MAX_CARDS {
            problems.push(Problem::new("card", format!("more than {MAX_CARDS} network cards")));
        }
    }
}

/// Checks what a disk by itself must be.
fn check_disk(n: usize, disk: &DiskDefinition, problems: &mut Vec<Problem>) {
    let mut say = |field: &str, message: &str| {
        problems.push(Problem::new(format!("disk[{n}].{field}"), message));
    };
    let raw = disk.format == DiskFormat::Raw;
    if disk.bus == DiskBus::Pflash && !raw {
        say("format", "the firmware's variables are \"raw\": `qemu-img convert -O raw` makes them");
    }
    if disk.bus == DiskBus::Pflash && disk.serial.is_some() {
        say("serial", "flash memory has none");
    }
    if disk.cdrom && !raw {
        say("format", "a CD-ROM's image is \"raw\"");
    }
    if disk.cdrom && matches!(disk.bus, DiskBus::Virtio | DiskBus::Pflash) {
        say("bus", "a CD-ROM is on \"ide\", \"sata\" or \"scsi\"");
    }
    if disk.ejected && !disk.cdrom {
        say("ejected", "only a CD-ROM can be; it needs cdrom = true beside it");
    }
    if disk.pci.is_some() && disk.bus != DiskBus::Virtio {
        say("pci", "only a virtio disk is a PCI device itself; leave it out");
    }
    let serial = disk.serial.as_deref().unwrap_or("-");
    if serial.is_empty() || serial.len() > LONGEST_SERIAL || !option_value(serial) {
        say("serial", "allowed are 1 to 20 letters, digits, '-', '_' and '.'");
    }
}

/// The policy's own message is like "policy: hz is 0; it must be 1 to 1000".
fn policy_problem(message: &str) -> Problem {
    let message = message.strip_prefix("policy: ").unwrap_or(message);
    match message.split_once(" is ") {
        Some((name, rest)) => Problem::new(format!("policy.{name}"), format!("is {rest}")),
        None => Problem::new("policy", message),
    }
}

/// Whether the text can be one value in a comma-separated QEMU option.
fn option_value(text: &str) -> bool {
    text.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.'))
}

fn missing(field: &str, path: &Path) -> Option<Problem> {
    let say = |why: &str| Some(Problem::new(field, format!("{}: {why}", path.display())));
    match std::fs::metadata(path) {
        Ok(found) if found.is_dir() => say("is a folder; it must be a file"),
        Ok(_) => match std::fs::File::open(path) {
            Ok(_) => None,
            Err(error) => say(&format!("cannot be read: {error}")),
        },
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            say("there is no such file (relative paths count from the definition's folder)")
        }
        Err(error) => say(&error.to_string()),
    }
}
