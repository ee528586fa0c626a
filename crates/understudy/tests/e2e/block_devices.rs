//! Disks on block devices: through fail-overs to a file and back, and devices that are somebody else's.

use crate::confinement::{has_another_vm, that_try, told_of_devices};
use crate::keepers::with_keepers;
use crate::refusals::says;
use crate::replaced_keepers::await_protected_again;
use crate::stage::{
    Calm, LIMIT, PACE, await_service, close, options, play, prove_disk, refusal, run,
};
use anyhow::{Context, Result, ensure};
use std::fs::{self, File};
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use toml::{Table, Value};
use understudy_lab::check::check_disk;
use understudy_lab::scene::VM;
use understudy_lab::{Scene, SceneOptions, wait_for};

/// The volume group of the story with a logical volume.
const GROUP: &str = "understudy-story";
/// A logical volume as large as the guest's disk, and a device with room for it.
const VOLUME: &str = "256M";
const VOLUME_GROUP_BYTES: u64 = 300 << 20;

/// A loop device on a file, until it is dropped.
pub struct Device {
    path: PathBuf,
    file: PathBuf,
}

impl Device {
    pub fn on(file: &Path) -> Result<Device> {
        let shown = run("losetup", &["--find", "--show", &file.to_string_lossy()])?;
        Ok(Device { path: shown.trim().into(), file: file.to_owned() })
    }

    /// Makes it another one, of so many bytes, from now on. Nobody else can get its name meanwhile.
    fn become_small(&self, bytes: u64) -> Result<()> {
        File::create(&self.file)?.set_len(bytes)?;
        run("losetup", &["--set-capacity", self.path()]).map(drop)
    }

    pub fn path(&self) -> &str {
        self.path.to_str().expect("a device's path is text")
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        if let Err(error) = run("losetup", &["--detach", self.path()]) {
            eprintln!("{error:#}");
        }
    }
}

/// A device that is mounted until it is dropped, in a mount namespace of its own: a host that
/// another story begins meanwhile inherits the mounts that it sees, and would have it mounted as
/// long as it lives.
struct Mounted(Child);

impl Mounted {
    fn on(place: &str, device: &Device) -> Result<Mounted> {
        let script = r#"mount -o ro "$0" "$1" && echo mounted && read -r _"#;
        let mut child = Command::new("unshare")
            .args(["--mount", "sh", "-c", script, device.path(), place])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        let output = child.stdout.take().context("no pipe")?;
        let mounted = Mounted(child);
        let mut said = String::new();
        BufReader::new(output).read_line(&mut said)?;
        ensure!(said == "mounted\n", "{} cannot be mounted", device.path());
        Ok(mounted)
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // What it reads ends, and it with it.
        drop(self.0.stdin.take());
        if let Err(error) = self.0.wait() {
            eprintln!("{error:#}");
        }
    }
}

/// A logical volume of LVM, until it is dropped.
struct Volume {
    path: PathBuf,
    _under: Device,
}

impl Volume {
    /// Makes a volume with the content of `image`.
    fn of(image: &Path, directory: &Path) -> Result<Volume> {
        let file = directory.join("physical-volume.img");
        File::create(&file)?.set_len(VOLUME_GROUP_BYTES)?;
        let under = Device::on(&file)?;
        lvm(&["vgcreate", GROUP, under.path()])?;
        let volume = Volume { path: format!("/dev/{GROUP}/disk").into(), _under: under };
        lvm(&["lvcreate", "--yes", "--name", "disk", "--size", VOLUME, GROUP])?;
        fs::copy(image, &volume.path)?;
        Ok(volume)
    }

    fn path(&self) -> &str {
        self.path.to_str().expect("a volume's path is text")
    }
}

/// The room of a device for the guest's disk as a qcow2 image, however full it is.
const QCOW2_ROOM_BYTES: u64 = 1 << 30;

/// A device with a qcow2 image that has the content of `image`.
fn qcow2_device(image: &Path) -> Result<Device> {
    let file = image.with_extension("qcow2");
    let (from, to) = (image.to_string_lossy(), file.to_string_lossy());
    run("qemu-img", &["convert", "-f", "raw", "-O", "qcow2", &from, &to])?;
    File::options().write(true).open(&file)?.set_len(QCOW2_ROOM_BYTES)?;
    Device::on(&file)
}

/// Runs a command of LVM, which makes its own device nodes where nobody does (`make test-kvm`).
fn lvm(command: &[&str]) -> Result<String> {
    run("env", &[&["DM_DISABLE_UDEV=1"], command].concat())
}

impl Drop for Volume {
    fn drop(&mut self) {
        if let Err(error) = lvm(&["vgremove", "--force", "--yes", GROUP]) {
            eprintln!("{error:#}");
        }
    }
}

fn field<'t>(table: &'t mut Table, name: &str) -> Result<&'t mut Value> {
    let disk = table.get_mut("disk").and_then(|disks| disks.get_mut(0)?.as_table_mut());
    disk.and_then(|disk| disk.get_mut(name)).context("no disk")
}

/// The scene's guest has its disk on a device from now on, which holds what its image held.
fn define(scene: &Scene) -> Result<Device> {
    define_on(scene, Device::on, Device::path)
}

/// Defines the guest on what `make` makes of its image.
pub fn define_on<D>(
    scene: &Scene,
    make: impl FnOnce(&Path) -> Result<D>,
    path: impl Fn(&D) -> &str,
) -> Result<D> {
    let mut table: Table = fs::read_to_string(scene.definition())?.parse()?;
    let image: PathBuf = field(&mut table, "path")?.as_str().context("a path")?.into();
    let device = make(&image)?;
    *field(&mut table, "path")? = path(&device).into();
    fs::write(scene.definition(), table.to_string())?;
    Ok(device)
}

fn on_device() -> SceneOptions {
    SceneOptions { booted: false, ..options().calm() }
}

/// The words about how the last synchronisation from a host went. Its daemon hears a keeper's a moment later.
fn copied(scene: &Scene, host: &str) -> Result<String> {
    wait_for("it to be told how the disks were copied", LIMIT, || {
        let events = scene.host(host)?.call(["events"])?;
        let last = events.lines().rev().find(|line| line.contains("MiB of disks copied"));
        Ok(last.map(str::to_owned))
    })
}

#[test]
fn a_disk_on_a_device_goes_over_to_a_file_and_back() {
    play(on_device(), |scene| {
        let device = define(scene)?;
        let acked = goes_over_and_back(scene, &device.path, |_| Ok(()))?;
        prove_disk(scene, "a", acked)
    });
}

/// Its header did not come over, for a device's metadata say that it has no bytes: the backup's QEMU was told of a disk
/// that is none.
#[test]
fn a_qcow2_disk_on_a_device_goes_over_to_a_file_and_back() {
    play(on_device(), |scene| {
        let device = define_on(scene, qcow2_device, Device::path)?;
        let mut table: Table = fs::read_to_string(scene.definition())?.parse()?;
        *field(&mut table, "format")? = "qcow2".into();
        fs::write(scene.definition(), table.to_string())?;
        let acked = goes_over_and_back(scene, &device.path, |_| Ok(()))?;
        scene.host("a")?.call(["vm", "stop", VM, "--force"])?;
        let raw = device.file.with_extension("raw");
        let (from, to) = (device.path(), raw.to_string_lossy());
        run("qemu-img", &["convert", "-f", "qcow2", "-O", "raw", from, &to])?;
        let check = check_disk(&raw, acked)?;
        ensure!(check.is_intact(), "after {acked} records: {check:#?}");
        Ok(())
    });
}

#[test]
#[ignore = "needs a kernel with the device mapper; `make test-kvm` plays it"]
fn a_disk_on_a_logical_volume_goes_over_to_a_file_and_back() {
    play(on_device(), |scene| {
        let directory = scene.lab().directory().to_owned();
        let volume = define_on(scene, |image| Volume::of(image, &directory), Volume::path)?;
        let acked = goes_over_and_back(scene, &volume.path, |_| Ok(()))?;
        prove_disk(scene, "a", acked)
    });
}

/// A device, and a name that it has elsewhere.
struct Named {
    device: Device,
    name: PathBuf,
}

impl Named {
    fn of(image: &Path, directory: &Path) -> Result<Named> {
        let (device, name) = (Device::on(image)?, directory.join("device"));
        symlink(&device.path, &name)?;
        Ok(Named { device, name })
    }
}

// It hears which it is as it begins: with a VM that starts, one that it goes on with, and one that it backs up, whose disk was
// there before.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_keeper_opens_the_device_of_its_vm_and_no_other() {
    let tried = tempfile::NamedTempFile::new().expect("a file");
    let options = SceneOptions { booted: false, ..with_keepers() };
    play(that_try(options, tried.path()), |scene| {
        let directory = scene.lab().directory().to_owned();
        for host in ["a", "b"] {
            has_another_vm(scene, host)?;
        }
        let others = directory.join("others.img");
        File::create(&others)?.set_len(1 << 20)?;
        let others = Device::on(&others)?;
        let its = define_on(
            scene,
            |image| Named::of(image, &directory),
            |its| its.name.to_str().expect("a path is text"),
        )?;
        let acked = goes_over_and_back(scene, &its.name, |scene| {
            scene.host("a")?.call(["upgrade", "--keepers", VM])?;
            await_protected_again(scene, "a")
        })?;
        prove_disk(scene, "a", acked)?;
        let tries = fs::read_to_string(tried.path())?;
        let opened = |devices: &[&Path]| {
            let end = told_of_devices(devices);
            tries.lines().filter(|line| line.ends_with(&end)).count()
        };
        // Host a's first, its next, and the one of its backup; and those of host b's.
        let (its_own, none) = (opened(&[&its.device.path]), opened(&[]));
        let all = tries.lines().count();
        ensure!(
            its_own == 3 && none > 0 && its_own + none == all,
            "{} is its own, {} another's:\n{tries}",
            its.device.path(),
            others.path()
        );
        Ok(())
    });
}

/// Returns how many records the guest has acknowledged.
fn goes_over_and_back(
    scene: &mut Scene,
    device: &Path,
    meanwhile: impl FnOnce(&Scene) -> Result<()>,
) -> Result<u64> {
    scene.protected_guest("a", "b")?;
    ensure!(scene.disk("a", 0)? == device, "the primary has it elsewhere");
    let client = scene.record_client(PACE)?;
    await_service(&client)?;
    meanwhile(scene)?;
    await_service(&client)?;
    scene.host_mut("a")?.kill_everything()?;
    scene.await_live("b")?;
    await_service(&client)?;
    ensure!(scene.disk("b", 0)?.is_file(), "the mirror is no file");
    scene.restart("a")?;
    scene.protect("b", "a")?;
    scene.await_protected("b", |_| ())?;
    let how = copied(scene, "b")?;
    ensure!(how.contains("only what had changed"), "{how}");
    scene.host_mut("b")?.kill_everything()?;
    scene.await_live("a")?;
    ensure!(scene.disk("a", 0)? == device, "it has left its device");
    await_service(&client)?;
    close(client)
}

#[test]
fn a_device_that_is_mounted_or_has_another_size_is_not_written() {
    play(on_device(), |scene| {
        let device = define(scene)?;
        let definition = scene.definition().to_string_lossy().into_owned();
        let place = scene.lab().directory().join("mounted");
        fs::create_dir(&place)?;
        let place = place.to_string_lossy().into_owned();
        let mounted = Mounted::on(&place, &device)?;
        let (code, said) = refusal(scene.host("a")?, &["vm", "start", &definition])?;
        drop(mounted);
        ensure!(code == 1, "exit code {code}: {said}");
        says(&said, &[device.path(), "is mounted", "lsblk"])?;

        scene.protected_guest("a", "b")?;
        // While a guest has it nobody can mount it.
        ensure!(run("mount", &["-o", "ro", device.path(), &place]).is_err(), "it can be mounted");
        let client = scene.record_client(PACE)?;
        await_service(&client)?;
        scene.host_mut("a")?.kill_everything()?;
        scene.await_live("b")?;
        // The device of that name is another one when host a comes back.
        device.become_small(1 << 20)?;
        let before = fs::read(&device.file)?;
        scene.restart("a")?;
        scene.protect("b", "a")?;
        scene.await_protected("b", |_| ())?;
        let how = copied(scene, "b")?;
        ensure!(
            how.contains(&format!("device {} has 1048576 bytes, and the disk", device.path())),
            "{how}"
        );
        ensure!(fs::read(&device.file)? == before, "the other device was written");
        ensure!(scene.disk("a", 0)?.is_file(), "the mirror is no file of its own");
        await_service(&client)?;
        let acked = close(client)?;
        scene.host("b")?.call(["unprotect", VM])?;
        prove_disk(scene, "b", acked)
    });
}
