//! VM definitions: what a user writes about a VM, in TOML.

mod checked;
mod extra_args;
mod foreign;
mod memory_size;
mod parse;
mod pci_place;
mod places;
mod validate;

pub use checked::{CheckedDefinition, Problems};
pub use foreign::{BootFilesDiffer, ForeignDefinition};
pub use memory_size::{MemorySize, MemorySizeError};
pub use parse::{DefinitionError, LocatedProblem};
pub use pci_place::{PciPlace, PciPlaceError};
pub use validate::Problem;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use understudy_network::{MacAddress, VlanSet, Vlans};
use understudy_protocol::{Policy, VmName};

/// A VM as its user defines it. It also travels to the peer, as JSON, where it is a [`ForeignDefinition`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct VmDefinition {
    /// Its name, unique on a host.
    pub name: VmName,
    /// Size of the guest's main memory.
    #[schemars(with = "String")]
    pub memory: MemorySize,
    /// Virtual CPUs, 1 to 255.
    pub vcpus: u32,
    /// Topology of the virtual CPUs that the guest sees; a socket for each when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub topology: Option<Topology>,
    /// QEMU's machine type, without or with version: `pc`, `q35`, `pc-q35-10.0`.
    /// `pc` by default: the device state of `q35` takes twice as long to save.
    #[serde(default = "default_machine")]
    pub machine: String,
    /// Accelerator that executes the guest's instructions.
    #[serde(default)]
    pub accel: AcceleratorChoice,
    /// QEMU's CPU model; its default, the same on every host, when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu: Option<String>,
    /// The code of a UEFI firmware, instead of the machine's BIOS. Its variables are a disk on
    /// [`DiskBus::Pflash`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub firmware: Option<PathBuf>,
    /// Whether nothing but the firmware, in system management mode, may write its variables.
    #[serde(default, skip_serializing_if = "is_false")]
    pub secure_boot: bool,
    /// The guest's TPM 2.0, emulated by swtpm.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tpm: Option<TpmModel>,
    /// The directory of a swtpm's state, which the VM's own TPM begins with when it is first
    /// started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tpm_state: Option<PathBuf>,
    /// Boots this Linux kernel instead of a disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kernel: Option<PathBuf>,
    /// The kernel's initial RAM disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub initrd: Option<PathBuf>,
    /// The kernel's command line.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub append: Option<String>,
    /// Interface by which the guest's drivers talk to virtio devices; see
    /// [`VmDefinition::virtio_interface`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub virtio: Option<VirtioInterface>,
    /// Whether the guest's first serial port is a unix socket of the host.
    #[serde(default = "default_console")]
    pub console: bool,
    /// QEMU's `-vga`.
    #[serde(default)]
    pub vga: Vga,
    /// Whether the guest's screen is a VNC server on a unix socket of the host.
    #[serde(default, skip_serializing_if = "is_false")]
    pub vnc: bool,
    /// Whether the VM comes up with its host, unless its operator or its guest has ended it.
    #[serde(default, skip_serializing_if = "is_false")]
    pub autostart: bool,
    /// Whether the guest has the channel of QEMU's guest agent, a unix socket of the host.
    #[serde(default, skip_serializing_if = "is_false")]
    pub guest_agent: bool,
    /// Whether QEMU counts the guest's instructions from the start, which slows it down, so
    /// that the VM can be protected in lockstep without being moved into another QEMU.
    #[serde(default, skip_serializing_if = "is_false")]
    pub lockstep: bool,
    /// Further QEMU arguments, of the kinds that keep the VM protectable.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub qemu_args: Vec<String>,
    /// Disks, in the order of the guest's bus.
    #[serde(default, rename = "disk", skip_serializing_if = "Vec::is_empty")]
    pub disks: Vec<DiskDefinition>,
    /// CD-ROM drives without a medium; one with a medium is a disk.
    #[serde(default, rename = "empty_cdrom", skip_serializing_if = "Vec::is_empty")]
    pub empty_cdroms: Vec<EmptyCdrom>,
    /// Network cards, in the order of the guest's bus.
    #[serde(default, rename = "card", skip_serializing_if = "Vec::is_empty")]
    pub cards: Vec<CardDefinition>,
    /// Policy of when to checkpoint; the host's default when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<Policy>,
}

impl Topology {
    /// The number of virtual CPUs that it describes; none if they are too many to count.
    pub fn vcpus(&self) -> Option<u32> {
        let of_each = [self.dies, self.cores, self.threads];
        of_each.iter().try_fold(self.sockets, |product, &n| product.checked_mul(n))
    }
}

/// A disk of a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct DiskDefinition {
    /// The image file.
    pub path: PathBuf,
    /// Format as which the image file is to be read; never guessed from its contents, which
    /// the guest controls.
    pub format: DiskFormat,
    /// Bus on which the guest sees the disk.
    #[serde(default)]
    pub bus: DiskBus,
    /// Whether it is a CD-ROM in its drive, which the guest cannot write.
    #[serde(default, skip_serializing_if = "is_false")]
    pub cdrom: bool,
    /// Whether that drive has no medium. `path` is then a placeholder.
    #[serde(default, skip_serializing_if = "is_false")]
    pub ejected: bool,
    /// BLAKE3 hash of a medium that was put into the drive while the VM ran, as the daemon notes
    /// it; by it hosts tell whether they have the same one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub medium_hash: Option<String>,
    /// The disk's serial number, as the guest reads it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub serial: Option<String>,
    /// Place of a virtio disk on the guest's PCI buses; chosen by its number when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub pci: Option<PciPlace>,
}

impl DiskDefinition {
    /// A disk without more than it must have.
    pub fn new(path: impl Into<PathBuf>, format: DiskFormat, bus: DiskBus) -> DiskDefinition {
        DiskDefinition {
            path: path.into(),
            format,
            bus,
            cdrom: false,
            ejected: false,
            medium_hash: None,
            serial: None,
            pci: None,
        }
    }
}

impl DiskDefinition {
    /// Whether it has the same in its drive, if it is one, as far as media were changed.
    pub fn has_medium_of(&self, other: &DiskDefinition) -> bool {
        (self.ejected, &self.medium_hash) == (other.ejected, &other.medium_hash)
    }
}

impl CardDefinition {
    /// A card without more than it must have.
    pub fn new(mac: MacAddress, bridge: &str, model: CardModel) -> CardDefinition {
        let bridge = bridge.to_owned();
        CardDefinition { mac, bridge, vlan: None, vlans: None, model, mtu: None, pci: None }
    }

    /// The VLANs that its port at the bridge carries.
    pub fn vlans(&self) -> Vlans {
        Vlans { access: self.vlan, trunk: self.vlans.clone().unwrap_or_default() }
    }

    /// Whether frames get from one to the other, as far as the definitions say.
    pub fn shares_network_with(&self, other: &CardDefinition) -> bool {
        self.bridge == other.bridge && self.vlans() == other.vlans()
    }
}

impl VmDefinition {
    /// Whether the format of a disk keeps back, inside QEMU, a part of what the guest was told is written: the tables of
    /// qcow2.
    pub fn keeps_writes_back(&self) -> bool {
        self.disks.iter().any(|disk| disk.format == DiskFormat::Qcow2 && !disk.cdrom)
    }

    /// Whether a drive is on an AHCI controller. QEMU's has the memory in which it tells its guest of ends mapped as
    /// long as a port runs, writes there by itself, and marks the pages as written when the port stops, not before.
    pub fn has_ahci_drives(&self) -> bool {
        let buses = self.disks.iter().map(|disk| disk.bus);
        let mut buses = buses.chain(self.empty_cdroms.iter().map(|drive| drive.bus));
        // On q35 the IDE controller is one.
        buses.any(|bus| bus == DiskBus::Sata || bus == DiskBus::Ide && self.is_q35())
    }

    /// A VM with what every one must have, and nothing else but a console: not even a disk.
    pub fn new(name: VmName, memory: MemorySize, vcpus: u32) -> VmDefinition {
        VmDefinition {
            name,
            memory,
            vcpus,
            topology: None,
            machine: default_machine(),
            accel: AcceleratorChoice::default(),
            cpu: None,
            firmware: None,
            secure_boot: false,
            tpm: None,
            tpm_state: None,
            kernel: None,
            initrd: None,
            append: None,
            virtio: None,
            console: default_console(),
            vga: Vga::default(),
            vnc: false,
            autostart: false,
            guest_agent: false,
            lockstep: false,
            qemu_args: Vec::new(),
            disks: Vec::new(),
            empty_cdroms: Vec::new(),
            cards: Vec::new(),
            policy: None,
        }
    }

    /// The interface of its virtio devices. A guest that firmware boots has the modern one if it
    /// does not say: QEMU 10.0.13 has queues of 1024 entries in the other, and the BIOS reads no
    /// disk whose queue has more than 256.
    pub fn virtio_interface(&self) -> VirtioInterface {
        let default = match self.kernel {
            Some(_) => VirtioInterface::Legacy,
            None => VirtioInterface::Modern,
        };
        self.virtio.unwrap_or(default)
    }
}

/// A CD-ROM drive without a medium.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct EmptyCdrom {
    /// Bus on which the guest sees the drive.
    pub bus: DiskBus,
}

/// Topology of the virtual CPUs that the guest sees: the product of all is how many there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Topology {
    /// Processors.
    pub sockets: u32,
    /// Dies of each.
    #[serde(default = "one")]
    pub dies: u32,
    /// Cores of each die.
    pub cores: u32,
    /// Threads of each core.
    #[serde(default = "one")]
    pub threads: u32,
}

/// Format as which an image file is to be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum DiskFormat {
    /// The disk's sectors, nothing else.
    Raw,
    /// QEMU's own format; QEMU itself reads it.
    Qcow2,
}

/// Bus on which the guest sees a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum DiskBus {
    /// virtio-blk.
    #[default]
    Virtio,
    /// The chipset's controller: IDE, or AHCI on q35.
    Ide,
    /// An AHCI controller: on q35 the chipset's.
    Sata,
    /// A virtio-scsi controller, the same for all.
    Scsi,
    /// The flash memory with the firmware's variables.
    Pflash,
}

/// A network card of a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct CardDefinition {
    /// Hardware address; must stay the same on every host, so it is not optional.
    #[serde(with = "mac_text")]
    #[schemars(with = "String")]
    pub mac: MacAddress,
    /// The bridge of the host that the card is plugged into.
    pub bridge: String,
    /// The VLAN that it is in there, of which the guest knows nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vlan: Option<u16>,
    /// VLANs that the guest tags itself.
    #[serde(default, with = "vlans_text", skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub vlans: Option<VlanSet>,
    /// The card's model.
    #[serde(default)]
    pub model: CardModel,
    /// The longest packet, in bytes, that a virtio card tells the guest to send; the guest's own
    /// choice when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mtu: Option<u16>,
    /// Place of the card on the guest's PCI buses; chosen by its number when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<String>")]
    pub pci: Option<PciPlace>,
}

/// Interface by which the guest talks to its TPM.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum TpmModel {
    /// Command and response buffers: what systems of today expect.
    Crb,
    /// A chip on the LPC bus.
    Tis,
}

/// Models of network cards.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum CardModel {
    /// virtio-net.
    #[default]
    #[serde(rename = "virtio-net-pci")]
    VirtioNet,
    /// Intel 82540EM.
    #[serde(rename = "e1000")]
    E1000,
    /// Intel 82574L.
    #[serde(rename = "e1000e")]
    E1000e,
    /// Realtek 8139.
    #[serde(rename = "rtl8139")]
    Rtl8139,
}

/// Accelerator that the user wants to execute the guest's instructions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum AcceleratorChoice {
    /// KVM where it really works, else TCG.
    #[default]
    Auto,
    /// QEMU's own translator.
    Tcg,
    /// KVM, whatever the processor's flags say.
    Kvm,
}

/// Interface by which the guest's drivers talk to virtio devices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum VirtioInterface {
    /// The interface as before virtio 1.0; every common guest still can. A checkpoint is shorter
    /// by about a millisecond for each device.
    Legacy,
    /// The interface as since virtio 1.0, for guests without drivers for the other.
    Modern,
    /// Both, as QEMU's own default on a bus of plain PCI: a guest knows its devices by numbers of their own, not by those of
    /// the modern ones.
    Transitional,
}

/// QEMU's video cards.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Vga {
    /// No video card.
    #[default]
    None,
    /// Bochs VBE.
    Std,
    /// virtio-vga.
    Virtio,
}

fn default_machine() -> String {
    "pc".to_owned()
}

// By reference, as serde wants it.
fn is_false(value: &bool) -> bool {
    !value
}

fn one() -> u32 {
    1
}

fn default_console() -> bool {
    true
}

/// A MAC address as text.
mod mac_text {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};
    use understudy_network::MacAddress;

    pub fn serialize<S: Serializer>(mac: &MacAddress, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(mac)
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<MacAddress, D::Error> {
        String::deserialize(from)?.parse().map_err(D::Error::custom)
    }
}

/// VLANs as text.
mod vlans_text {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};
    use understudy_network::VlanSet;

    pub fn serialize<S: Serializer>(vlans: &Option<VlanSet>, to: S) -> Result<S::Ok, S::Error> {
        // Without any it is left out.
        to.collect_str(vlans.as_ref().unwrap_or(&VlanSet::default()))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Option<VlanSet>, D::Error> {
        String::deserialize(from)?.parse().map(Some).map_err(D::Error::custom)
    }
}

#[cfg(test)]
#[path = "definition_tests.rs"]
mod tests;
