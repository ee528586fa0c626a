//! QEMU's command line, as a pure function of a definition and its resources.
//!
//! The same definition and machine type give the same guest-visible machine on
//! every host: versioned machine type, fixed PCI addresses, nothing by default.
//! A standby differs only in waiting for its device state.

mod disks;

use crate::capabilities::Accelerator;
use crate::clock::ClockBase;
use crate::definition::{
    CardModel, PciPlace, Topology, TpmModel, Vga, VirtioInterface, VmDefinition,
};
use crate::lockstep::{ICOUNT_SHIFT, LOG_NAME, LogRole, obstacles};
use crate::processor::cpu_model;
use crate::qmp::MONITORS;
use std::ffi::OsString;
use std::os::fd::RawFd;
use std::path::{Path, PathBuf};

pub(crate) use disks::{AHCI_SLOT, FIRST_DISK_SLOT, RECONNECT_SECONDS, SCSI_SLOT};
pub use disks::{AHCI_SLOTS, MAX_SCSI_DISKS, MAX_VIRTIO_DISKS, ide_slots, scsi_drive};

/// Cards go to PCI slots 0x10 to 0x1d; 0x1f is the chipset's on q35.
pub(crate) const FIRST_CARD_SLOT: u8 = 0x10;
/// Cards that a VM may have.
pub const MAX_CARDS: usize = 14;

/// The controller of the guest agent's channel.
pub(crate) const SERIAL_SLOT: u8 = 0x0f;
/// Sockets that QEMU makes in its directory.
pub const VNC: &str = "vnc";
/// The channel of the guest's agent.
pub const GUEST_AGENT: &str = "guest-agent";

/// QEMU's number for the set with the KVM device's descriptor.
const KVM_SET: u32 = 1;

/// The resources that one host gives to a VM. Descriptors are the daemon's own numbers: QEMU
/// inherits them under the same numbers (see [`crate::process::Launch`]).
#[derive(Clone, Debug)]
pub struct Resources {
    /// Versioned machine type, from [`crate::Capabilities::machine_type`].
    pub machine_type: String,
    /// The accelerator that executes the guest's instructions.
    pub accelerator: Accelerator,
    /// The opened KVM device, for a QEMU that may not open it itself.
    pub kvm: Option<RawFd>,
    /// Kernel and initial RAM disk as QEMU reads them, if the definition has them.
    pub boot: BootFiles,
    /// Memfd of the guest's main memory, as long as the definition says.
    pub ram: RawFd,
    /// QEMU's ends of its monitors, from [`crate::qmp::QemuEnds::numbers`].
    pub monitors: [RawFd; MONITORS],
    /// The unix socket of each disk's NBD server, which must listen already.
    pub disks: Vec<PathBuf>,
    /// QEMU's end of the socket to the port of each card.
    pub cards: Vec<RawFd>,
    /// The place of the console, if the definition has one.
    pub console: Option<Console>,
    /// QEMU's end of the connection to the TPM, if the definition has one.
    pub tpm: Option<RawFd>,
    /// Whether it waits for disks whose server is gone, which will be there again.
    pub awaits_disks: bool,
    /// The role in which QEMU starts.
    pub role: Role,
    /// Its part in lockstep, if it runs so.
    pub lockstep: Option<Lockstep>,
}

/// The way in which a QEMU runs in lockstep. Both hosts' clocks begin at the same time of day,
/// wherever and whenever their QEMUs are started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lockstep {
    /// The role that it has for its log.
    pub role: LogRole,
    /// The base of the guest's clocks.
    pub clock: ClockBase,
}

/// The files that a guest begins with: where they are, or what else is known of each.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BootFiles<T = PathBuf> {
    /// The code of its firmware.
    pub firmware: Option<T>,
    /// The kernel.
    pub kernel: Option<T>,
    /// The initial RAM disk.
    pub initrd: Option<T>,
}

impl<T> BootFiles<T> {
    /// All of them, each with its name in a definition.
    pub fn each(&self) -> [(&'static str, Option<&T>); 3] {
        let BootFiles { firmware, kernel, initrd } = self;
        [("firmware", firmware.as_ref()), ("kernel", kernel.as_ref()), ("initrd", initrd.as_ref())]
    }
}

/// The end to which the guest's first serial port goes.
#[derive(Clone, Debug)]
pub struct Console {
    /// Its socket.
    pub socket: ConsoleSocket,
    /// File that QEMU appends all output to; none if whoever has the other end keeps one.
    pub log: Option<PathBuf>,
}

/// The socket of a console.
#[derive(Clone, Debug)]
pub enum ConsoleSocket {
    /// QEMU listens there. While nobody is connected the port takes no byte, and a log of
    /// lockstep says so: the backup then shows nothing of what was said.
    Listen(PathBuf),
    /// QEMU's end of one that is connected.
    Connected(RawFd),
}

/// The role in which QEMU starts. In both roles the guest waits for `cont`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// QEMU starts with a machine at power-on.
    Fresh,
    /// QEMU starts without state: waits for [`crate::Monitor::go_live`].
    Standby,
}

/// QEMU's arguments, without the program's name.
///
/// # Panics
/// If `resources` has not one socket per disk and card of the definition.
pub fn command_line(vm: &VmDefinition, resources: &Resources) -> Vec<OsString> {
    assert_eq!(vm.disks.len(), resources.disks.len(), "one NBD socket per disk");
    assert_eq!(vm.cards.len(), resources.cards.len(), "one port per card");
    let mut args = Args::default();
    machine(&mut args, vm, resources);
    monitors(&mut args, resources);
    console(&mut args, resources);
    boot(&mut args, vm, &resources.boot);
    // Devices behind them come after them.
    let (bridges, others) = vm.split_qemu_args();
    args.0.extend(bridges.into_iter().map(OsString::from));
    disks::disks(&mut args, vm, resources);
    cards(&mut args, vm, resources);
    tpm(&mut args, vm, resources);
    local(&mut args, vm);
    if resources.role == Role::Standby {
        args.pair("-incoming", "defer");
        // The blob of xen-save-devices-state has no configuration section.
        args.pair("-global", "migration.send-configuration=off");
    }
    args.0.extend(others.into_iter().map(OsString::from));
    args.0
}

#[derive(Default)]
struct Args(Vec<OsString>);

impl Args {
    fn flag(&mut self, option: &str) {
        self.0.push(option.into());
    }

    fn pair(&mut self, option: &str, value: impl Into<OsString>) {
        self.flag(option);
        self.0.push(value.into());
    }
}

fn machine(args: &mut Args, vm: &VmDefinition, resources: &Resources) {
    args.pair("-name", format!("guest={},debug-threads=on", vm.name));
    args.flag("-no-user-config");
    args.flag("-nodefaults");
    sandbox(args);
    args.pair("-display", "none");
    // Without the VMware port, whose mouse is an eighth of the device state. Replay hangs
    // with the HPET. What the guest has in memory is nobody's who looks at a QEMU that crashed.
    let hpet = if may_count(vm, resources) { ",hpet=off" } else { "" };
    let flash = disks::flash(vm, &resources.boot);
    args.pair(
        "-machine",
        format!(
            "{},suppress-vmdesc=on,dump-guest-core=off,vmport=off,memory-backend=ram{hpet}{flash}",
            resources.machine_type
        ),
    );
    accelerator(args, resources);
    args.pair(
        "-object",
        format!(
            "memory-backend-file,id=ram,size={},mem-path=/proc/self/fd/{},share=on,prealloc=off",
            vm.memory.bytes(),
            resources.ram
        ),
    );
    args.pair("-m", format!("size={}B", vm.memory.bytes()));
    args.pair("-smp", processors(vm.vcpus, vm.topology));
    if let Some(cpu) = cpu_model(vm, resources.accelerator) {
        args.pair("-cpu", cpu);
    }
    // Not offered: nothing of a guest that sleeps in memory is proven to survive, and with secure boot it
    // would wake with the firmware's memory open.
    let chipset = if vm.is_q35() { "ICH9-LPC" } else { "PIIX4_PM" };
    args.pair("-global", format!("{chipset}.disable_s3=1"));
    if may_count(vm, resources) {
        // Its reset waits for the vCPU's thread while it holds the lock of record and replay,
        // for which that thread waits: a reboot would never end.
        args.pair("-global", "apic.vapic=off");
    }
    match &resources.lockstep {
        None => args.pair("-rtc", "base=utc"),
        Some(lockstep) => replayable(args, lockstep),
    }
    args.pair(
        "-vga",
        match vm.vga {
            Vga::None => "none",
            Vga::Std => "std",
            Vga::Virtio => "virtio",
        },
    );
    args.pair("-msg", "timestamp=on");
    // A guest that powers off leaves a stopped QEMU, so that its last output
    // can be committed; the daemon sees the event SHUTDOWN. Reboot is a reset.
    args.pair("-action", "shutdown=pause");
    args.flag("-S");
}

fn processors(vcpus: u32, topology: Option<Topology>) -> String {
    match topology {
        None => vcpus.to_string(),
        Some(Topology { sockets, dies, cores, threads }) => {
            format!("{vcpus},sockets={sockets},dies={dies},cores={cores},threads={threads}")
        }
    }
}

/// Whether the VM may be moved into a QEMU that counts instructions, or is in one: the guest
/// sees the same machine in both, without what is not replayed.
fn may_count(vm: &VmDefinition, resources: &Resources) -> bool {
    obstacles(vm, resources.accelerator, None).is_empty()
}

/// The guest's time is counted in its own instructions, and what is not determined by them
/// goes to, or comes from, the log.
fn replayable(args: &mut Args, lockstep: &Lockstep) {
    args.pair("-rtc", format!("base={},clock=vm", lockstep.clock.first()));
    let role = lockstep.role.name();
    args.pair("-icount", format!("shift={ICOUNT_SHIFT},rr={role},rrfile={LOG_NAME}"));
}

/// System calls that QEMU does not need, and a guest that broke out of it might want.
fn sandbox(args: &mut Args) {
    args.pair(
        "-sandbox",
        "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny",
    );
}

fn accelerator(args: &mut Args, resources: &Resources) {
    match resources.kvm {
        Some(fd) if resources.accelerator == Accelerator::Kvm => {
            args.pair("-add-fd", format!("fd={fd},set={KVM_SET}"));
            args.pair("-accel", format!("kvm,device=/dev/fdset/{KVM_SET}"));
        }
        _ => args.pair("-accel", resources.accelerator.to_string()),
    }
}

fn monitors(args: &mut Args, resources: &Resources) {
    for (n, fd) in resources.monitors.iter().enumerate() {
        args.pair("-chardev", format!("socket,id=qmp{n},fd={fd}"));
        args.pair("-mon", format!("chardev=qmp{n},mode=control"));
    }
}

fn console(args: &mut Args, resources: &Resources) {
    if let Some(Console { socket, log }) = &resources.console {
        let mut chardev = OsString::from("socket,id=console,");
        match socket {
            ConsoleSocket::Listen(path) => {
                chardev.push("server=on,wait=off,path=");
                chardev.push(escaped(path));
            }
            ConsoleSocket::Connected(fd) => chardev.push(format!("fd={fd}")),
        }
        if let Some(log) = log {
            chardev.push(",logappend=on,logfile=");
            chardev.push(escaped(log));
        }
        args.pair("-chardev", chardev);
        args.pair("-serial", "chardev:console");
    }
}

fn boot(args: &mut Args, vm: &VmDefinition, files: &BootFiles) {
    if let Some(kernel) = &files.kernel {
        args.pair("-kernel", kernel);
    }
    if let Some(initrd) = &files.initrd {
        args.pair("-initrd", initrd);
    }
    if let Some(append) = &vm.append {
        args.pair("-append", append);
    }
}

fn cards(args: &mut Args, vm: &VmDefinition, resources: &Resources) {
    for (n, (card, socket)) in vm.cards.iter().zip(&resources.cards).enumerate() {
        // No tap, but a socket for which the agent answers as a tap would.
        args.pair("-netdev", format!("tap,id=card{n},fd={socket}"));
        let model = match card.model {
            CardModel::VirtioNet => {
                let virtio = virtio_options(vm.virtio_interface());
                // What QEMU has the guest say by itself is in no log.
                let quiet = if may_count(vm, resources) { ",guest_announce=off" } else { "" };
                let mtu = card.mtu.map_or_else(String::new, |mtu| format!(",host_mtu={mtu}"));
                format!("virtio-net-pci,{virtio}{quiet}{mtu}")
            }
            CardModel::E1000 => "e1000".to_owned(),
            CardModel::E1000e => "e1000e".to_owned(),
            CardModel::Rtl8139 => "rtl8139".to_owned(),
        };
        let place = place(card.pci.as_ref(), usize::from(FIRST_CARD_SLOT) + n);
        // No boot ROM: it is one more RAM block to carry, and VMs boot from disk.
        // (`rombar=0` would move it to a place with room for one card of a model.)
        args.pair(
            "-device",
            format!("{model},{place},netdev=card{n},id=nic{n},mac={},romfile=", card.mac),
        );
        if resources.lockstep.is_some() {
            args.pair("-object", format!("filter-replay,id=replay{n},netdev=card{n}"));
        }
    }
}

fn tpm(args: &mut Args, vm: &VmDefinition, resources: &Resources) {
    let (Some(model), Some(fd)) = (vm.tpm, resources.tpm) else { return };
    let model = match model {
        TpmModel::Crb => "tpm-crb",
        TpmModel::Tis => "tpm-tis",
    };
    args.pair("-chardev", format!("socket,id=tpm,fd={fd}"));
    args.pair("-tpmdev", "emulator,id=tpm0,chardev=tpm");
    args.pair("-device", format!("{model},tpmdev=tpm0"));
}

/// Adds what administrators of the host reach, in QEMU's own directory.
fn local(args: &mut Args, vm: &VmDefinition) {
    if vm.vnc {
        args.pair("-vnc", format!("unix:{VNC}"));
    }
    if vm.guest_agent {
        let virtio = virtio_options(vm.virtio_interface());
        args.pair(
            "-chardev",
            format!("socket,id=guest-agent,path={GUEST_AGENT},server=on,wait=off"),
        );
        args.pair(
            "-device",
            format!("virtio-serial-pci,{virtio},id=serial,addr={SERIAL_SLOT:#04x}"),
        );
        let name = "org.qemu.guest_agent.0";
        args.pair(
            "-device",
            format!("virtserialport,bus=serial.0,chardev=guest-agent,name={name}"),
        );
    }
}

/// The place of a device: a slot of the root bus, if the definition does not say.
fn place(chosen: Option<&PciPlace>, slot: usize) -> String {
    chosen.map_or_else(|| format!("addr={slot:#04x}"), PciPlace::options)
}

/// A device with the modern interface has 1024 queues to save, used or not.
///
/// Without event descriptors: QEMU detaches and attaches those of all queues in every pause, and on KVM
/// each time waits until no processor looks at the list that they are in.
fn virtio_options(interface: VirtioInterface) -> String {
    let interface = match interface {
        VirtioInterface::Legacy => "disable-modern=on,disable-legacy=off",
        VirtioInterface::Modern => "disable-modern=off,disable-legacy=on",
        VirtioInterface::Transitional => "disable-modern=off,disable-legacy=off",
    };
    format!("{interface},ioeventfd=off")
}

/// Escapes a value: in QEMU's key=value options a comma is written twice.
fn escaped(path: &Path) -> OsString {
    use std::os::unix::ffi::{OsStrExt, OsStringExt};
    let bytes = path.as_os_str().as_bytes();
    let doubled =
        bytes.iter().flat_map(|&byte| std::iter::repeat_n(byte, 1 + usize::from(byte == b',')));
    OsString::from_vec(doubled.collect())
}

#[cfg(test)]
#[path = "command_tests.rs"]
mod tests;
