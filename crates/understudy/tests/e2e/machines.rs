//! Guests of other shapes than the usual one, each through its host's death: another machine
//! type, the modern interface of virtio, an installed system with its own boot loader; and those
//! that are slower than they could be.

use crate::refusals::says;
use crate::stage::{
    Calm, PACE, await_service, close, options, play, prove_disk_at, prove_survival, refusal,
};
use anyhow::{Result, ensure};
use std::fs;
use toml::Table;
use understudy_lab::scene::{GuestKind, VM};
use understudy_lab::{Scene, SceneOptions};
use understudy_qemu::{Kvm, Obstacle};

/// The usual guest, with something else in its definition.
fn survive_with(field: &str, value: &str, prove: impl FnOnce(&Scene) -> Result<()>) {
    // The guest that has booted is that of the definition before.
    play(SceneOptions { booted: false, ..options().calm() }, |scene| {
        let mut table: Table = fs::read_to_string(scene.definition())?.parse()?;
        table.insert(field.into(), value.into());
        fs::write(scene.definition(), table.to_string())?;
        scene.protected_guest("a", "b")?;
        prove(scene)?;
        let client = scene.record_client(PACE)?;
        await_service(&client)?;
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")
    });
}

/// Checks what a line says in the guest.
fn guest_says(scene: &Scene, line: &str, word: &str) -> Result<()> {
    let said = scene.shell()?.run(line)?.text;
    ensure!(said.contains(word), "`{line}` says {said:?}, without {word:?}");
    Ok(())
}

/// The guest is not told that it can sleep in memory.
fn prove_sleepless(scene: &Scene) -> Result<()> {
    let said = scene.shell()?.run("dmesg | grep 'ACPI: PM: (supports'")?.text;
    ensure!(said.contains("S5") && !said.contains("S3"), "the guest finds {said:?}");
    Ok(())
}

#[test]
fn a_guest_on_q35_survives() {
    survive_with("machine", "q35", |scene| {
        guest_says(scene, "cat /sys/class/dmi/id/product_name", "Q35")?;
        prove_sleepless(scene)
    });
}

#[test]
fn a_guest_with_modern_virtio_survives() {
    // Bit 32 is the modern interface's.
    survive_with("virtio", "modern", |scene| {
        guest_says(scene, "cut -c 33 /sys/bus/virtio/devices/virtio0/features", "1")?;
        prove_sleepless(scene)
    });
}

#[test]
fn a_guest_that_is_slower_than_it_could_be_says_so() {
    play(options(), |scene| {
        let definition = scene.definition().to_string_lossy();
        let said = scene.host("a")?.call(["vm", "start", &definition])?;
        let slow = scene.status("a")?["slow"].as_str().map(str::to_owned);
        match Kvm::of_this_machine().obstacle() {
            None => ensure!(slow.is_none(), "nothing is in the way: {slow:?}"),
            Some(Obstacle { what, remedy }) => {
                for words in [&slow.unwrap_or_default(), &said] {
                    ensure!(words.contains(what) && words.contains(remedy), "{words:?}");
                }
            }
        }
        scene.host("a")?.call(["vm", "stop", VM, "--force"]).map(drop)
    });
}

#[test]
#[ignore = "needs KVM that runs guests; `make test-kvm` plays it"]
fn a_model_that_the_processor_lacks_is_refused() {
    play(options(), |scene| {
        // What the newest processors have, and what would let the guest run guests of its own.
        for (model, words) in [
            ("SapphireRapids", &["lacks", "SapphireRapids", "amx-tile", "=off"][..]),
            ("Westmere,+amx-tile", &["lacks", "amx-tile"]),
            ("EPYC,+svm", &["svm", "guests of its own"]),
        ] {
            let mut table: Table = fs::read_to_string(scene.definition())?.parse()?;
            table.insert("cpu".into(), model.into());
            fs::write(scene.definition(), table.to_string())?;
            let definition = scene.definition().to_string_lossy();
            let (_, said) = refusal(scene.host("a")?, &["vm", "start", &definition])?;
            says(&said, words)?;
        }
        Ok(())
    });
}

#[test]
#[ignore = "needs guests/installed, which takes minutes; `make test-kvm` plays it"]
fn an_installed_system_survives() {
    let shape = SceneOptions { kind: GuestKind::Installed, disks: 2, ..options().calm() };
    play(shape, |scene| {
        scene.protected_guest("a", "b")?;
        guest_says(scene, "cat /proc/1/comm", "systemd")?;
        let client = scene.record_client(PACE)?;
        await_service(&client)?;
        scene.host_mut("a")?.kill_everything()?;
        scene.await_live("b")?;
        await_service(&client)?;
        guest_says(scene, "systemctl --failed --no-legend | wc -l", "0")?;
        let acked = close(client)?;
        prove_disk_at(scene, "b", 1, acked)
    });
}
