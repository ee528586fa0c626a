//! Devices and wires that fail as the kernel's own device mapper and packet scheduler have them fail: `make test-kvm` plays
//! it, in a host whose kernel has both.

use crate::block_devices::{Device, define_on};
use crate::sick_hosts::await_unfit;
use crate::stage::{
    Calm, LIMIT, PACE, await_degraded, await_service, options, play, protection, prove_survival,
    run,
};
use anyhow::{Result, ensure};
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::Duration;
use understudy_lab::{Scene, SceneOptions, wait_for};

/// The unit of the device mapper's tables.
const SECTOR_BYTES: u64 = 512;

/// Devices that this process has made, whose names are told apart so.
static MADE: AtomicU32 = AtomicU32::new(0);

/// A device of the device mapper that is all of a file, until it is dropped.
struct Mapped {
    name: String,
    path: PathBuf,
    sectors: u64,
    under: Device,
}

impl Mapped {
    fn on(file: &Path) -> Result<Mapped> {
        let under = Device::on(file)?;
        let sectors = fs::metadata(file)?.len() / SECTOR_BYTES;
        let name =
            format!("understudy-story-{}-{}", process::id(), MADE.fetch_add(1, Ordering::Relaxed));
        let path = Path::new("/dev/mapper").join(&name);
        let device = Mapped { name, path, sectors, under };
        dmsetup(&["create", &device.name, "--table", &device.sound()])?;
        Ok(device)
    }

    fn path(&self) -> &str {
        self.path.to_str().expect("a device's path is text")
    }

    fn sound(&self) -> String {
        format!("0 {} linear {} 0", self.sectors, self.under.path())
    }

    /// Every request fails from now on.
    fn fail(&self) -> Result<()> {
        self.become_another(&format!("0 {} error", self.sectors))
    }

    /// Every write fails from now on, and reads give what is there.
    fn fail_writes(&self) -> Result<()> {
        let (sectors, under) = (self.sectors, self.under.path());
        self.become_another(&format!("0 {sectors} flakey {under} 0 0 3600 1 error_writes"))
    }

    fn recover(&self) -> Result<()> {
        self.become_another(&self.sound())
    }

    fn become_another(&self, table: &str) -> Result<()> {
        dmsetup(&["load", &self.name, "--table", table])?;
        self.hang()?;
        self.answer()
    }

    /// No request is answered from now on.
    fn hang(&self) -> Result<()> {
        dmsetup(&["suspend", "--noflush", "--nolockfs", &self.name])
    }

    /// All that waited are.
    fn answer(&self) -> Result<()> {
        dmsetup(&["resume", &self.name])
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // Whoever has it open keeps it until he is gone.
        let removed = self.answer().and_then(|()| dmsetup(&["remove", "--deferred", &self.name]));
        if let Err(error) = removed {
            eprintln!("{error:#}");
        }
    }
}

/// Has the device mapper make its own nodes, where nobody else does.
fn dmsetup(command: &[&str]) -> Result<()> {
    run("env", &[&["DM_DISABLE_UDEV=1", "dmsetup"], command].concat()).map(drop)
}

fn on_device() -> SceneOptions {
    SceneOptions { booted: false, ..options().calm() }
}

/// Plays a failure of the primary's device; status of the fenced host says `why`.
fn the_primarys(fail: impl Fn(&Mapped) -> Result<()>, why: &str) {
    play(on_device(), |scene| {
        let device = define_on(scene, Mapped::on, Mapped::path)?;
        scene.protected_guest("a", "b")?;
        ensure!(scene.disk("a", 0)? == device.path, "the primary has it elsewhere");
        let client = scene.record_client(PACE)?;
        await_service(&client)?;
        fail(&device)?;
        scene.await_live("b")?;
        wait_for("host a to say why", LIMIT, || {
            let status = scene.status("a")?;
            let says_why = protection(&status).1.contains(why);
            Ok((status["role"] == "fenced" && says_why).then_some(()))
        })?;
        device.recover()?;
        scene.await_fenced("a")?;
        prove_survival(scene, client, "b")
    });
}

#[test]
#[ignore = "needs a kernel with the device mapper; `make test-kvm` plays it"]
fn a_guest_whose_device_fails_is_taken_over() {
    the_primarys(Mapped::fail, "an error on disk0");
}

#[test]
#[ignore = "needs a kernel with the device mapper; `make test-kvm` plays it"]
fn a_guest_whose_device_takes_no_writes_is_taken_over() {
    the_primarys(Mapped::fail_writes, "an error on disk0");
}

#[test]
#[ignore = "needs a kernel with the device mapper; `make test-kvm` plays it"]
fn a_guest_whose_device_answers_nothing_is_taken_over() {
    the_primarys(Mapped::hang, "disk0 has not answered for");
}

/// The size of the file system that a backup has its mirror and records on.
const ROOM_BYTES: u64 = 768 << 20;

/// A file system on a device of the device mapper, mounted until it is dropped.
struct Room {
    device: Mapped,
    place: PathBuf,
}

impl Room {
    fn of_host(scene: &mut Scene, host: &str) -> Result<Room> {
        let file = scene.lab().directory().join("room.img");
        File::create(&file)?.set_len(ROOM_BYTES)?;
        let place = scene.host(host)?.directory().join("state");
        scene.host_mut(host)?.terminate()?;
        let room = Room { device: Mapped::on(&file)?, place };
        run("mkfs.ext4", &["-q", room.device.path()])?;
        room.mount()?;
        // A daemon has mounts of its own, those of its beginning.
        scene.restart(host)?;
        Ok(room)
    }

    fn mount(&self) -> Result<()> {
        run("mount", &[self.device.path(), &self.place.to_string_lossy()]).map(drop)
    }

    fn unmount(&self) -> Result<()> {
        run("umount", &["--lazy", &self.place.to_string_lossy()]).map(drop)
    }
}

impl Drop for Room {
    fn drop(&mut self) {
        if let Err(error) = self.unmount() {
            eprintln!("{error:#}");
        }
    }
}

/// A backup is never called one again until it has begun anew on a sound device.
#[test]
#[ignore = "needs a kernel with the device mapper; `make test-kvm` plays it"]
fn a_backup_whose_device_takes_no_writes_is_given_up() {
    play(options().calm(), |scene| {
        let room = Room::of_host(scene, "b")?;
        scene.protected_guest("a", "b")?;
        let client = scene.record_client(PACE)?;
        await_service(&client)?;
        room.device.fail_writes()?;
        let reason = await_degraded(scene, "a")?;
        // Whatever is written first.
        let told = ["cannot sync the mirror", "cannot write what a take-over needs"];
        ensure!(told.iter().any(|words| reason.contains(words)), "{reason}");
        await_service(&client)?;
        // As its operator would: the device is mended, the file system mounted anew.
        scene.host_mut("b")?.kill_everything()?;
        room.unmount()?;
        room.device.recover()?;
        room.mount()?;
        scene.restart("b")?;
        scene.protect("a", "b")?;
        scene.await_protected("a", |_| ())?;
        await_service(&client)?;
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")?;
        // Nothing is to be left behind.
        scene.host_mut("b")?.kill_everything().map(drop)
    });
}

#[test]
#[ignore = "needs a kernel with the device mapper; `make test-kvm` plays it"]
fn a_backup_whose_device_answers_nothing_is_no_protection() {
    play(options().calm(), |scene| {
        let room = Room::of_host(scene, "b")?;
        scene.protected_guest("a", "b")?;
        let client = scene.record_client(PACE)?;
        await_service(&client)?;
        room.device.hang()?;
        let unfit = await_unfit(scene, "");
        // Also if that failed: nobody could be ended before.
        room.device.answer()?;
        unfit?;
        prove_survival(scene, client, "a")?;
        scene.host_mut("b")?.kill_everything().map(drop)
    });
}

/// What is lost, doubled, late and out of order on the wire between the hosts, in per cent; and how late.
const WIRE: &[&str] =
    &["delay", "4ms", "2ms", "loss", "1%", "duplicate", "1%", "reorder", "10%", "50%"];
/// Time for which a guest serves over such a wire.
const ON_THE_WIRE: Duration = Duration::from_secs(10);

#[test]
#[ignore = "needs a kernel with netem; `make test-kvm` plays it"]
fn a_bad_wire_loses_nothing() {
    play(options().calm(), |scene| {
        scene.protected_guest("a", "b")?;
        let client = scene.record_client(PACE)?;
        await_service(&client)?;
        scene.lab().disturb("b", WIRE)?;
        let before = client.acked();
        thread::sleep(ON_THE_WIRE);
        await_service(&client)?;
        println!("{} records in {ON_THE_WIRE:?} over it", client.acked() - before);
        scene.await_protected("a", |_| ())?;
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")
    });
}
