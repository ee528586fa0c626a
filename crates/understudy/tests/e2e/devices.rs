//! Devices other than virtio's, each through a take-over: IDE and AHCI, Intel's cards, both
//! machine types, a VGA card.
//!
//! Debian's cloud kernel has no drivers for most of them: these guests boot the ordinary one.

use crate::deaths::{await_rounds, unharmed};
use crate::stage::{Calm, LOAD_PACE, PACE, await_service, options, play, prove_survival};
use anyhow::{Context, Result, ensure};
use std::fs;
use toml::{Table, Value};
use understudy_lab::scene::ECHO_PORT;
use understudy_lab::{ChatterClient, GuestShell, Load, Scene, SceneOptions};

/// The devices that a guest is made of.
struct Devices {
    machine: &'static str,
    /// Product as its firmware names itself.
    product: &'static str,
    card: &'static str,
    /// The driver of the disk's controller.
    controller: &'static str,
}

const PC: Devices =
    Devices { machine: "pc", product: "i440FX", card: "e1000", controller: "ata_piix" };
const Q35: Devices = Devices { machine: "q35", product: "Q35", card: "e1000e", controller: "ahci" };

/// The text memory of a VGA card, as the processor sees it.
const SCREEN: &str = "dd if=/dev/mem bs=4096 skip=184 count=1 2>/dev/null | md5sum";

impl Devices {
    /// The scene's guest has these from now on.
    fn define(&self, scene: &Scene) -> Result<()> {
        let mut table: Table = fs::read_to_string(scene.definition())?.parse()?;
        let file = |name: &str| -> Result<Value> {
            let path = scene.guest_files().join(name);
            let there = path.is_file();
            ensure!(there, "no {}: run scripts/setup tests and guests/build", path.display());
            Ok(path.display().to_string().into())
        };
        let append = table["append"].as_str().context("no append")?;
        table.insert("append".into(), format!("{append} us.disk=sda").into());
        table.insert("kernel".into(), file("vmlinuz-devices")?);
        table.insert("initrd".into(), file("initrd-devices.gz")?);
        table.insert("machine".into(), self.machine.into());
        table.insert("vga".into(), "std".into());
        let mut device = |kind: &str, field: &str, value: &str| {
            let device = table.get_mut(kind).and_then(|all| all.get_mut(0));
            device.and_then(Value::as_table_mut).map(|one| one.insert(field.into(), value.into()))
        };
        device("disk", "bus", "ide").context("no disk")?;
        device("card", "model", self.card).context("no card")?;
        fs::write(scene.definition(), table.to_string())?;
        Ok(())
    }

    /// The guest has them, and no virtio device in their place.
    fn prove_driven(&self, shell: &mut GuestShell) -> Result<()> {
        let mut says = |line: &str, word: &str| -> Result<()> {
            let said = shell.run(line)?.text;
            ensure!(said.contains(word), "`{line}` says {said:?}, without {word:?}");
            Ok(())
        };
        says("cat /sys/class/dmi/id/product_name", self.product)?;
        says("readlink /sys/class/net/eth0/device/driver; echo end", &format!("/{}\n", self.card))?;
        says("readlink -f /sys/block/sda", "/ata")?;
        says(&format!("ls /sys/bus/pci/drivers/{}", self.controller), "0000:")?;
        says("cat /sys/bus/pci/devices/*/class", "0x030000")?;
        says("grep -c ' /data ' /proc/mounts; ls /dev/vd* 2>&1", "No such file")
    }
}

/// The host dies while the guest uses all of them; they work on the other one, as they were.
fn survive(devices: &Devices) {
    // Its devices are others than those that a scene begins with.
    let options = SceneOptions { booted: false, ..options().calm() };
    play(options, |scene| {
        devices.define(scene)?;
        scene.protected_guest("a", "b")?;
        let client = scene.record_client(PACE)?;
        await_service(&client)?;
        let mut shell = scene.shell()?;
        devices.prove_driven(&mut shell)?;
        let echo = ChatterClient::start(
            scene.lab(),
            scene.guest(ECHO_PORT),
            4,
            Load::Bulk(4096),
            LOAD_PACE,
        )?;
        await_rounds(&echo, 2)?;
        let blank = shell.run(SCREEN)?.text;
        shell.run("seq 1 500 > /dev/tty1")?;
        let screen = shell.run(SCREEN)?.text;
        ensure!(screen != blank, "nothing is seen on the screen");
        scene.host_mut("a")?.kill_everything()?;
        scene.await_live("b")?;
        ensure!(shell.run(SCREEN)?.text == screen, "the screen is another one");
        shell.run("seq 1 700 > /dev/tty1")?;
        ensure!(shell.run(SCREEN)?.text != screen, "the screen stands still");
        devices.prove_driven(&mut shell)?;
        await_rounds(&echo, 2)?;
        unharmed(&echo.stop())?;
        prove_survival(scene, client, "b")
    });
}

#[test]
fn ide_e1000_and_vga_survive_on_pc() {
    survive(&PC);
}

#[test]
fn ahci_e1000e_and_vga_survive_on_q35() {
    survive(&Q35);
}
