//! A guest as virt-install makes one today, through its host's death: UEFI whose variables only the
//! firmware may write, a TPM, devices behind PCI Express ports, disks on SCSI and SATA, a CD-ROM,
//! the agent's channel, a screen, a tablet.

use crate::planned::reboot;
use crate::stage::{
    Calm, LIMIT, PACE, await_service, close, daemon_passing, options, play, protect_when_taken,
    protection, prove_disk,
};
use anyhow::{Context, Result, ensure};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use toml::{Table, Value};
use understudy_lab::{GuestShell, Scene, SceneOptions};

/// Files of Debian's package ovmf.
const CODE: &str = "/usr/share/OVMF/OVMF_CODE_4M.secboot.fd";
const VARIABLES: &str = "/usr/share/OVMF/OVMF_VARS_4M.fd";

/// Arguments that libvirt writes for such a guest, as far as they are no fields of a definition.
const ARGUMENTS: [&str; 16] = [
    "-device",
    "pcie-root-port,id=pci.1,bus=pcie.0,addr=0x2.0x0,multifunction=on,chassis=1,port=0x10",
    "-device",
    "pcie-root-port,id=pci.2,bus=pcie.0,addr=0x2.0x1,chassis=2,port=0x11",
    "-device",
    "qemu-xhci,id=usb,bus=pci.2,addr=0x0",
    "-device",
    "usb-tablet,id=input0,bus=usb.0,port=1",
    "-object",
    "rng-random,id=entropy,filename=/dev/urandom",
    "-device",
    "virtio-rng-pci,rng=entropy,id=rng0,ioeventfd=off",
    "-device",
    "virtio-balloon-pci,id=balloon0,ioeventfd=off",
    "-uuid",
    "4a67b082-90a4-4b0e-a25d-2b0e5d0c9a11",
];

const EFIVARS: &str = "/sys/firmware/efi/efivars";

fn tables(pairs: &[(&str, &str)]) -> Value {
    let table = pairs.iter().map(|&(key, value)| (key.to_owned(), Value::from(value)));
    Value::Table(table.collect())
}

/// The scene's guest is such a one from now on; the content of its CD-ROM.
fn define(scene: &Scene) -> Result<Vec<u8>> {
    let mut table: Table = fs::read_to_string(scene.definition())?.parse()?;
    let folder = scene.definition().parent().context("a definition is in a folder")?;
    let medium: Vec<u8> = (0..2048 * 64_u32).map(|n| (n / 7 % 251) as u8).collect();
    fs::write(folder.join("medium.iso"), &medium)?;
    fs::copy(VARIABLES, folder.join("variables.fd"))
        .with_context(|| format!("no {VARIABLES}: run scripts/setup tests"))?;
    let append = table["append"].as_str().context("no append")?;
    table.insert("append".into(), format!("{append} us.disk=sda").into());
    for (field, file) in [("kernel", "vmlinuz-devices"), ("initrd", "initrd-devices.gz")] {
        table.insert(field.into(), scene.guest_files().join(file).display().to_string().into());
    }
    for (field, value) in
        [("machine", "q35"), ("virtio", "modern"), ("firmware", CODE), ("tpm", "crb")]
    {
        table.insert(field.into(), value.into());
    }
    for field in ["secure_boot", "vnc", "guest_agent"] {
        table.insert(field.into(), true.into());
    }
    table.insert("vga".into(), "std".into());
    table.insert("vcpus".into(), 2.into());
    table.insert("topology".into(), Value::Table("sockets = 1\ncores = 2".parse()?));
    table.insert("memory".into(), "256M".into());
    table.insert("qemu_args".into(), ARGUMENTS.map(Value::from).to_vec().into());
    let card = table.get_mut("card").and_then(|cards| cards.get_mut(0)?.as_table_mut());
    let card = card.context("no card")?;
    card.insert("pci".into(), "pci.1:00.0".into());
    card.insert("mtu".into(), 1400.into());
    let disks = table.get_mut("disk").and_then(Value::as_array_mut).context("no disk")?;
    let disk = disks[0].as_table_mut().context("no disk")?;
    disk.insert("bus".into(), "scsi".into());
    disk.insert("serial".into(), "data-1".into());
    disks.push(tables(&[("path", "variables.fd"), ("format", "raw"), ("bus", "pflash")]));
    let mut cdrom = tables(&[("path", "medium.iso"), ("format", "raw"), ("bus", "sata")]);
    cdrom.as_table_mut().context("a table")?.insert("cdrom".into(), true.into());
    disks.push(cdrom);
    table.insert("empty_cdrom".into(), Value::Array(vec![tables(&[("bus", "sata")])]));
    fs::write(scene.definition(), table.to_string())?;
    Ok(medium)
}

/// The guest has all of it, and it works.
fn prove_devices(shell: &mut GuestShell, medium: &[u8]) -> Result<()> {
    let mut says = |line: &str, word: &str| -> Result<()> {
        let said = shell.run(line)?.text;
        ensure!(said.contains(word), "`{line}` says {said:?}, without {word:?}");
        Ok(())
    };
    says("ls /sys/firmware/efi", "efivars")?;
    says("readlink -f /sys/class/net/eth0/device", "0000:01:00.0")?;
    says("cat /sys/class/net/eth0/mtu", "1400")?;
    says("strings /sys/block/sda/device/vpd_pg80", "data-1")?;
    let sum = format!("{:08x}", crc(medium));
    says("crc32 /dev/sr0", &sum)?;
    says("echo x > /dev/sr0 2>&1; dd if=/dev/sr1 count=1 2>&1", "No medium")?;
    says("cat /proc/bus/input/devices", "QEMU USB Tablet")?;
    says("cat /sys/class/misc/hw_random/rng_current", "virtio_rng")?;
    says("ls /sys/bus/virtio/drivers/virtio_balloon", "virtio")?;
    says("cat /sys/devices/system/cpu/cpu1/topology/core_id", "1")?;
    says("cat /sys/devices/system/cpu/cpu1/topology/physical_package_id", "0")?;
    says("cat /sys/class/dmi/id/product_uuid", "4a67b082-90a4-4b0e-a25d-2b0e5d0c9a11")?;
    says("cat /sys/class/virtio-ports/*/name", "org.qemu.guest_agent.0")
}

/// The checksum as busybox has it.
pub fn crc(bytes: &[u8]) -> u32 {
    bytes.iter().fold(!0u32, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |crc, _| {
            (crc >> 1) ^ (0xedb8_8320 & (!(crc & 1)).wrapping_add(1))
        })
    }) ^ !0
}

/// The sockets by which the host reaches it: what the guest says to its agent's peer, and that a
/// VNC client is greeted.
fn prove_reached(scene: &Scene, host: &str, shell: &mut GuestShell) -> Result<()> {
    let status = scene.status(host)?;
    let connect = |field: &str| -> Result<UnixStream> {
        let path: PathBuf = status[field].as_str().with_context(|| format!("no {field}"))?.into();
        let socket = UnixStream::connect(&path).with_context(|| path.display().to_string())?;
        socket.set_read_timeout(Some(LIMIT))?;
        Ok(socket)
    };
    let mut greeting = [0; 4];
    connect("vnc")?.read_exact(&mut greeting)?;
    ensure!(&greeting == b"RFB ", "VNC says {greeting:?}");
    let mut agent = connect("guest_agent")?;
    agent.write_all(b"ping\n")?;
    // The port can be open once at a time.
    let port = "/dev/$(cd /sys/class/virtio-ports && echo vport*)";
    shell.run(&format!("read -r word < {port}; [ \"$word\" = ping ] && echo pong > {port}"))?;
    let mut answer = [0; 5];
    agent.read_exact(&mut answer)?;
    ensure!(&answer == b"pong\n", "the guest says {answer:?}");
    Ok(())
}

/// A variable of the firmware: that can be written once.
fn variable(name: &str) -> String {
    format!("{EFIVARS}/{name}-4a67b082-90a4-4b0e-a25d-2b0e5d0c9a11")
}

fn write_variable(shell: &mut GuestShell, name: &str) -> Result<()> {
    // Non-volatile, and there for the boot loader and the running system.
    let line = format!("printf '\\007\\000\\000\\000of-{name}' > {} && echo done", variable(name));
    let said = shell.run(&line)?.text;
    ensure!(said.contains("done"), "cannot write a variable: {said}");
    Ok(())
}

fn read_variable(shell: &mut GuestShell, name: &str) -> Result<()> {
    let read = shell.run(&format!("cat {}", variable(name)))?.text;
    ensure!(read.contains(&format!("of-{name}")), "the variable {name} is {read:?}");
    Ok(())
}

/// A register of the TPM that anybody may extend.
const REGISTER: &str = "/sys/class/tpm/tpm0/pcr-sha256/23";

/// Extends the TPM's register; what it holds then.
fn extend_register(shell: &mut GuestShell) -> Result<String> {
    // TPM2_PCR_Extend with an empty password and one SHA-256 digest.
    let head = "8002 00000041 00000182 00000017 00000009 40000009 0000 00 0000 00000001 000b";
    let digest = "5a".repeat(32);
    let bytes: String = head.chars().chain(digest.chars()).filter(|c| *c != ' ').collect();
    let escaped: String = bytes
        .as_bytes()
        .chunks(2)
        .map(|hex| format!("\\x{}", String::from_utf8_lossy(hex)))
        .collect();
    let before = register(shell)?;
    shell.run(&format!("printf '{escaped}' > /tmp/extend; cat /tmp/extend > /dev/tpm0"))?;
    let after = register(shell)?;
    ensure!(before != after, "the TPM's register is {after:?} still");
    Ok(after)
}

fn register(shell: &mut GuestShell) -> Result<String> {
    let held = shell.run(&format!("cat {REGISTER}"))?.text.trim().to_owned();
    ensure!(held.len() == 64, "the TPM's register is {held:?}");
    Ok(held)
}

/// QEMU tells nobody of a failed write to its flash memory: the guest went on, and what it had written of its
/// firmware's variables was on no disk.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_guest_with_uefi_scsi_and_all_that_virt_install_adds_survives_a_failed_flash_and_a_death() {
    let directory = tempfile::tempdir().expect("a directory for the test");
    let fails = directory.path().join("fails");
    let point = format!("write-one-disk=return({})", fails.display());
    let mut shape = SceneOptions { booted: false, ..options().calm() };
    shape.daemons.insert("a".to_owned(), daemon_passing(point));
    play(shape, |scene| {
        let medium = define(scene)?;
        scene.protected_guest("a", "b")?;
        let client = scene.record_client(PACE)?;
        await_service(&client)?;
        let mut shell = scene.shell()?;
        shell.run(&format!("mount -t efivarfs efivarfs {EFIVARS}"))?;
        prove_devices(&mut shell, &medium)?;
        prove_reached(scene, "a", &mut shell)?;
        write_variable(&mut shell, "before")?;
        let measured = extend_register(&mut shell)?;

        // The second one is its flash memory.
        fs::write(&fails, "1")?;
        write_variable(&mut shell, "failed")?;
        scene.await_live("b")?;
        let fenced = scene.await_fenced("a")?;
        ensure!(protection(&fenced).1.contains("disk1"), "{fenced}");
        for name in ["before", "failed"] {
            read_variable(&mut shell, name)?;
        }
        ensure!(register(&mut shell)? == measured, "the TPM's register is another one");

        fs::remove_file(&fails)?;
        protect_when_taken(scene, "b", "a")?;
        let measured = extend_register(&mut shell)?;
        scene.host_mut("b")?.kill_everything()?;
        scene.await_live("a")?;
        ensure!(register(&mut shell)? == measured, "the TPM's register is another one");
        write_variable(&mut shell, "after")?;
        prove_devices(&mut shell, &medium)?;
        prove_reached(scene, "a", &mut shell)?;
        await_service(&client)?;
        let acked = close(client)?;

        // The firmware itself reads them from the disk.
        reboot(scene, "a")?;
        let mut shell = scene.shell()?;
        shell.run(&format!("mount -t efivarfs efivarfs {EFIVARS}"))?;
        for name in ["before", "failed", "after"] {
            read_variable(&mut shell, name)?;
        }
        prove_disk(scene, "a", acked)
    });
}

/// Ends the swtpm of a host.
fn end_tpm(scene: &Scene, host: &str) -> Result<()> {
    let processes = scene.host(host)?.namespace().processes()?;
    let is_tpm = |pid: &&u32| {
        fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim() == "swtpm")
    };
    let pid = processes.iter().find(is_tpm).context("no swtpm on that host")?;
    kill(Pid::from_raw(i32::try_from(*pid)?), Signal::SIGKILL)?;
    Ok(())
}

/// A checkpoint that lacks a part of the machine is none. Before, both hosts contested the VM, and
/// the primary could win it and go on without its TPM.
#[test]
fn a_guest_whose_tpm_ends_on_the_primary_is_handed_over() {
    let shape = SceneOptions { booted: false, ..options().calm() };
    play(shape, |scene| {
        let mut table: Table = fs::read_to_string(scene.definition())?.parse()?;
        table.insert("tpm".into(), "crb".into());
        fs::write(scene.definition(), table.to_string())?;
        scene.protected_guest("a", "b")?;
        let client = scene.record_client(PACE)?;
        await_service(&client)?;
        end_tpm(scene, "a")?;
        scene.await_live("b")?;
        let fenced = scene.await_fenced("a")?;
        ensure!(protection(&fenced).1.contains("device state"), "{fenced}");
        await_service(&client)?;
        let acked = close(client)?;
        prove_disk(scene, "b", acked)
    });
}
