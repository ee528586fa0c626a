//! Places of a definition's devices on the guest's PCI buses: no two have the same.

use super::extra_args::devices;
use super::{DiskBus, PciPlace, Problem, Vga, VmDefinition};
use crate::command::{
    AHCI_SLOT, FIRST_CARD_SLOT, FIRST_DISK_SLOT, MAX_CARDS, MAX_VIRTIO_DISKS, SCSI_SLOT,
    SERIAL_SLOT,
};
use std::fmt;

/// Slots that a device may be given: those before are the chipset's and the video card's, those behind the controllers'.
const FREE_SLOTS: std::ops::RangeInclusive<u8> = 0x03..=0x1d;

/// A device and its place.
struct Placed {
    /// The field that has it; none if it cannot be elsewhere.
    field: Option<Field>,
    /// The device, for people.
    what: String,
    place: PciPlace,
    /// Whether the definition says the place.
    is_chosen: bool,
}

#[derive(Clone, Copy)]
enum Field {
    Arguments,
    Disk(usize),
    Card(usize),
}

impl fmt::Display for Field {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Field::Arguments => f.write_str("qemu_args"),
            Field::Disk(n) => write!(f, "disk[{n}].pci"),
            Field::Card(n) => write!(f, "card[{n}].pci"),
        }
    }
}

impl VmDefinition {
    /// The bus of every device that does not name one.
    pub fn root_bus(&self) -> &'static str {
        if self.is_q35() { "pcie.0" } else { "pci.0" }
    }

    /// Refuses two devices at one place, chosen or by their numbers: QEMU would not start.
    pub(super) fn check_places(&self, problems: &mut Vec<Problem>) {
        let devices = self.placed();
        for (n, device) in devices.iter().enumerate() {
            let Some(field) = &device.field else { continue };
            let Some(other) = devices[..n].iter().find(|other| other.place == device.place) else {
                continue;
            };
            let mut message =
                format!("{} is at {}, the place of {}", device.what, device.place, other.what);
            if let Some(free) = self.free_place(&devices) {
                message += &format!("; \"{free}\" is free");
            }
            problems.push(Problem::new(field.to_string(), message));
        }
    }

    /// Chooses a free place for each disk and card that has none chosen, and whose own is another's. For a definition in the
    /// making: where a guest knows its devices already, they stay.
    pub fn choose_places(&mut self) {
        while let Some((field, free)) = self.misplaced() {
            match field {
                Field::Disk(n) => self.disks[n].pci = Some(free),
                Field::Card(n) => self.cards[n].pci = Some(free),
                Field::Arguments => return,
            }
        }
    }

    /// A disk or card at a place by its number that is another's, and a free one.
    fn misplaced(&self) -> Option<(Field, PciPlace)> {
        let devices = self.placed();
        let shares = |device: &Placed| {
            devices.iter().filter(|other| other.place == device.place).count() > 1
        };
        let found = devices.iter().find(|device| !device.is_chosen && shares(device))?;
        Some((found.field?, self.free_place(&devices)?))
    }

    /// A slot of the root bus that nothing is in.
    fn free_place(&self, devices: &[Placed]) -> Option<PciPlace> {
        let mut places = FREE_SLOTS.filter_map(|slot| PciPlace::new(self.root_bus(), slot, 0));
        places.find(|free| !devices.iter().any(|device| device.place.shares_slot(free)))
    }

    /// All devices whose places are known: those that cannot be elsewhere come first.
    fn placed(&self) -> Vec<Placed> {
        let root = self.root_bus();
        let on_root = |slot: u8, function| PciPlace::new(root, slot, function);
        let mut all = Vec::new();
        let mut add = |field, what: String, (place, is_chosen): (Option<PciPlace>, bool)| {
            all.extend(place.map(|place| Placed { field, what, place, is_chosen }));
        };
        let fixed = |place| (place, true);
        let chipset: &[(u8, u8)] = match self.is_q35() {
            true => &[(0, 0), (0x1f, 0), (0x1f, 2), (0x1f, 3)],
            false => &[(0, 0), (1, 0), (1, 1), (1, 3)],
        };
        for &(slot, function) in chipset {
            add(None, "the chipset".to_owned(), fixed(on_root(slot, function)));
        }
        if self.vga != Vga::None {
            let slot = if self.is_q35() { 1 } else { 2 };
            add(None, "the video card".to_owned(), fixed(on_root(slot, 0)));
        }
        let has = |bus| {
            self.disks.iter().any(|disk| disk.bus == bus)
                || self.empty_cdroms.iter().any(|drive| drive.bus == bus)
        };
        let sata = has(DiskBus::Sata) && !self.is_q35();
        for (is_there, what, slot) in [
            (has(DiskBus::Scsi), "the SCSI controller", SCSI_SLOT),
            (sata, "the SATA controller", AHCI_SLOT),
            (self.guest_agent, "the channel of the guest's agent", SERIAL_SLOT),
        ] {
            add(None, what.to_owned(), fixed(on_root(slot, 0).filter(|_| is_there)));
        }
        for device in devices(&self.qemu_args) {
            let place = PciPlace::of_options(device, root);
            add(Some(Field::Arguments), format!("`-device {device}`"), fixed(place));
        }
        let virtio = self.disks.iter().enumerate().filter(|(_, disk)| disk.bus == DiskBus::Virtio);
        for (slot, (n, disk)) in (FIRST_DISK_SLOT..).zip(virtio).take(MAX_VIRTIO_DISKS) {
            let place = disk.pci.clone().or_else(|| on_root(slot, 0));
            add(Some(Field::Disk(n)), format!("disk[{n}]"), (place, disk.pci.is_some()));
        }
        let cards = self.cards.iter().enumerate();
        for (slot, (n, card)) in (FIRST_CARD_SLOT..).zip(cards).take(MAX_CARDS) {
            let place = card.pci.clone().or_else(|| on_root(slot, 0));
            add(Some(Field::Card(n)), format!("card[{n}]"), (place, card.pci.is_some()));
        }
        all
    }
}
