//! Media of CD-ROM drives that are changed while the VM is protected: the guest reads the new one
//! on whichever host it runs.

use crate::block_devices::Device;
use crate::firmware::crc;
use crate::keepers::with_keepers;
use crate::refusals::says;
use crate::stage::{Calm, PACE, await_service, options, play, prove_survival, refusal, run};
use anyhow::{Context, Result, bail, ensure};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use toml::{Table, Value};
use understudy_lab::scene::VM;
use understudy_lab::{GuestShell, Scene, SceneOptions};

/// Makes a medium of so many bytes that nobody else has.
fn medium(scene: &Scene, name: &str, sectors: u32, seed: u32) -> Result<PathBuf> {
    let path = scene.lab().directory().join("media").join(name);
    fs::create_dir_all(path.parent().context("it is in a folder")?)?;
    let bytes: Vec<u8> = (0..2048 * sectors).map(|n| ((n + seed) / 7 % 251) as u8).collect();
    fs::write(&path, bytes)?;
    Ok(path)
}

/// The scene's guest has two drives from now on, disk1 with a medium and disk2 without.
fn define(scene: &Scene) -> Result<PathBuf> {
    let first = medium(scene, "first.iso", 64, 0)?;
    let mut table: Table = fs::read_to_string(scene.definition())?.parse()?;
    for (field, file) in [("kernel", "vmlinuz-devices"), ("initrd", "initrd-devices.gz")] {
        table.insert(field.into(), scene.guest_files().join(file).display().to_string().into());
    }
    table.insert("machine".into(), "q35".into());
    let drive =
        format!("path = \"{}\"\nformat = \"raw\"\nbus = \"sata\"\ncdrom = true", first.display());
    let disks = table.get_mut("disk").and_then(Value::as_array_mut).context("no disk")?;
    disks.push(Value::Table(drive.parse()?));
    let empty = Value::Table("bus = \"scsi\"".parse()?);
    table.insert("empty_cdrom".into(), Value::Array(vec![empty]));
    fs::write(scene.definition(), table.to_string())?;
    Ok(first)
}

fn drives() -> SceneOptions {
    SceneOptions { booted: false, ..options().calm() }
}

/// The guest's name of a drive.
fn device(shell: &mut GuestShell, bus: &str) -> Result<String> {
    let line =
        format!("for s in /sys/block/sr*; do readlink -f $s | grep -q {bus} && echo $s; done");
    let name = shell.run(&line)?.text.trim().replace("/sys/block/", "/dev/");
    ensure!(name.starts_with("/dev/sr"), "no drive on {bus}: {name:?}");
    Ok(name)
}

/// A drive tells of its new medium by refusing what it is asked for first, and then once more.
fn reads(shell: &mut GuestShell, bus: &str, medium: &Path) -> Result<()> {
    let device = device(shell, bus)?;
    let sum = format!("{:08x}", crc(&fs::read(medium)?));
    let mut said = String::new();
    for _ in 0..4 {
        said = shell.run(&format!("crc32 {device} 2>&1"))?.text;
        if said.contains(&sum) {
            return Ok(());
        }
    }
    bail!("{device} is {said:?}, not {} ({sum})", medium.display())
}

fn is_empty(shell: &mut GuestShell, bus: &str) -> Result<()> {
    let device = device(shell, bus)?;
    let said = shell.run(&format!("dd if={device} count=1 2>&1"))?.text;
    ensure!(said.contains("No medium"), "{device} says {said:?}");
    Ok(())
}

fn change(scene: &Scene, host: &str, drive: &str, rest: &[&str]) -> Result<String> {
    let arguments = [&["vm", "medium", VM, drive], rest].concat();
    scene.host(host)?.call(arguments)
}

fn text(path: &Path) -> &str {
    path.to_str().expect("the laboratory's paths are text")
}

/// Runs a program where a host sees its files.
fn as_host(scene: &Scene, host: &str, command: &[&str]) -> Result<()> {
    let pid = scene.host(host)?.pid().to_string();
    run("nsenter", &[&["--mount", "--target", &pid], command].concat()).map(drop)
}

const SATA: &str = "/ata";
const SCSI: &str = "/virtio";

#[test]
fn a_medium_that_was_changed_while_protected_is_there_after_each_take_over() {
    play(drives(), |scene| {
        let first = define(scene)?;
        let second = medium(scene, "second.iso", 100, 3)?;
        let third = medium(scene, "third.iso", 64, 5)?;
        scene.protected_guest("a", "b")?;
        let client = scene.record_client(PACE)?;
        await_service(&client)?;
        let mut shell = scene.shell()?;
        reads(&mut shell, SATA, &first)?;
        is_empty(&mut shell, SCSI)?;
        change(scene, "a", "disk1", &[text(&second)])?;
        change(scene, "a", "disk2", &[text(&third)])?;
        reads(&mut shell, SATA, &second)?;
        reads(&mut shell, SCSI, &third)?;
        let told = scene.host("a")?.call(["events"])?;
        ensure!(told.contains("disk2 has") && told.contains("third.iso"), "no event: {told}");
        scene.await_protected("a", |_| ()).context("it cost protection")?;

        scene.host_mut("a")?.kill_everything()?;
        scene.await_live("b")?;
        reads(&mut shell, SATA, &second)?;
        reads(&mut shell, SCSI, &third)?;

        // Host a has the media of before its death: it gets what there is now.
        change(scene, "b", "disk1", &["--eject"])?;
        is_empty(&mut shell, SATA)?;
        scene.restart("a")?;
        scene.protect("b", "a")?;
        scene.await_protected("b", |_| ())?;
        change(scene, "b", "disk2", &[text(&first)])?;
        reads(&mut shell, SCSI, &first)?;
        scene.host_mut("b")?.kill_everything()?;
        scene.await_live("a")?;
        is_empty(&mut shell, SATA)?;
        reads(&mut shell, SCSI, &first)?;
        prove_survival(scene, client, "a")
    });
}

#[test]
fn a_medium_that_is_a_device_is_opened_for_its_vms_keeper() {
    play(SceneOptions { booted: false, ..with_keepers() }, |scene| {
        let first = define(scene)?;
        let second = Device::on(&medium(scene, "second.iso", 100, 3)?)?;
        scene.start_guest("a")?;
        scene.await_guest()?;
        let mut shell = scene.shell()?;
        reads(&mut shell, SATA, &first)?;
        change(scene, "a", "disk1", &[second.path()])?;
        reads(&mut shell, SATA, Path::new(second.path()))?;
        // The next keeper finds it on record.
        scene.host("a")?.call(["upgrade", "--keepers", VM])?;
        reads(&mut shell, SATA, Path::new(second.path()))?;
        scene.host("a")?.call(["vm", "stop", VM, "--force"]).map(drop)
    });
}

#[test]
fn a_medium_that_cannot_be_put_in_leaves_the_drive_and_protection_as_they_were() {
    play(drives(), |scene| {
        let first = define(scene)?;
        let second = medium(scene, "second.iso", 100, 3)?;
        let folder = second.parent().context("it is in a folder")?;
        let image = folder.join("image.qcow2");
        run("qemu-img", &["create", "-q", "-f", "qcow2", text(&image), "1M"])?;
        scene.protected_guest("a", "b")?;
        let client = scene.record_client(PACE)?;
        let mut shell = scene.shell()?;
        let refused = |arguments: &[&str], exit: i32, words: &[&str]| -> Result<()> {
            let arguments = [&["vm", "medium", VM], arguments].concat();
            let (code, said) = refusal(scene.host("a")?, &arguments)?;
            ensure!(code == exit, "{arguments:?} exits with {code}: {said}");
            says(&said, words)
        };
        refused(&["disk0", text(&second)], 1, &["no CD-ROM drive", "disk1, disk2"])?;
        refused(&["disk7", text(&second)], 4, &["no disk7", "disk1, disk2"])?;
        let (code, said) = refusal(scene.host("a")?, &["vm", "medium", VM, "cd", text(&second)])?;
        ensure!(code == 2 && said.contains("like `disk1`"), "{code}: {said}");
        refused(&["disk1", text(&image)], 1, &["image.qcow2", "qcow2", "nothing was changed"])?;
        refused(&["disk1", "/nowhere.iso"], 1, &["/nowhere.iso", "does not exist"])?;
        refused(&["disk2", text(&first)], 1, &["first.iso is in disk1 already"])?;
        let (_, said) = refusal(scene.host("b")?, &["vm", "medium", VM, "disk1", text(&second)])?;
        says(&said, &["runs on a"])?;

        // Not everybody may read it: the other host would open it because this one says so.
        fs::set_permissions(&second, fs::Permissions::from_mode(0o600))?;
        refused(&["disk1", text(&second)], 1, &["host b refuses", "everybody", "chmod o+r"])?;
        fs::set_permissions(&second, fs::Permissions::from_mode(0o644))?;
        // The other host has another file of that name, then none.
        as_host(scene, "b", &["mount", "--bind", text(&first), text(&second)])?;
        refused(&["disk1", text(&second)], 1, &["host b refuses", "second.iso is another one"])?;
        as_host(scene, "b", &["umount", "--lazy", text(&second)])?;
        as_host(scene, "b", &["mount", "-t", "tmpfs", "none", text(folder)])?;
        refused(&["disk1", text(&second)], 1, &["host b refuses", "does not exist"])?;
        as_host(scene, "b", &["umount", "--lazy", text(folder)])?;

        // As a mounted medium is.
        let device = device(&mut shell, SATA)?;
        shell.start(&format!("exec sleep 1000 < {device}"))?;
        shell
            .run("until ls -l /proc/[0-9]*/fd 2>/dev/null | grep -q /dev/sr; do sleep 0.1; done")?;
        refused(&["disk1", text(&second)], 1, &["the guest holds the medium", "--force"])?;
        reads(&mut shell, SATA, &first)?;
        change(scene, "a", "disk1", &[text(&second), "--force"])?;
        scene.await_protected("a", |_| ()).context("it cost protection")?;
        await_service(&client)?;
        scene.host_mut("a")?.kill_everything()?;
        scene.await_live("b")?;
        reads(&mut shell, SATA, &second)?;
        prove_survival(scene, client, "b")
    });
}
