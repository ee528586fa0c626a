//! The boot-sector guest, which needs no kernel: it counts in memory, on disk
//! and on its serial line (guests/boot-sector/boot.s). Every accelerator runs
//! it, also a software KVM that boots no ordinary kernel.

use crate::deaths::await_empty;
use crate::stage::{Calm, LIMIT, hand_over, options, play};
use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;
use understudy_lab::scene::{GuestKind, VM};
use understudy_lab::{Scene, SceneOptions, wait_for};

/// A printed counter is so much more than the one before it.
const STEP: u64 = 16;
const SECTOR: usize = 512;
/// The sectors that the guest writes in turn, from the second on.
const SECTORS: usize = 256;

fn counting(accel: &str) -> SceneOptions {
    SceneOptions {
        kind: GuestKind::BootSector,
        memory_mib: 64,
        accel: Some(accel.to_owned()),
        ..options().calm()
    }
}

/// Plays each story on each accelerator. Where there was no /dev/kvm when this was built
/// (build.rs), those on KVM are ignored, and counted as such; where it is, KVM must do.
macro_rules! on_every_accelerator {
    ($($story:ident),* $(,)?) => {
        mod tcg {
            $(#[test]
            fn $story() {
                super::play(super::counting("tcg"), super::$story);
            })*
        }

        mod kvm {
            $(#[test]
            #[cfg_attr(not(kvm), ignore = "needs /dev/kvm, which was not there at the build")]
            fn $story() {
                super::play(super::counting("kvm"), super::$story);
            })*
        }
    };
}

on_every_accelerator!(
    counting_goes_on_when_the_host_is_killed,
    counting_goes_on_when_qemu_is_killed,
    counting_goes_on_when_the_host_is_cut_off,
    counting_goes_on_when_it_is_handed_over_and_back,
);

/// The guest on host a, protected to host b.
fn protected(scene: &Scene) -> Result<()> {
    scene.protected_guest("a", "b")?;
    await_count(scene, "a", STEP)
}

fn console(scene: &Scene, host: &str) -> Result<PathBuf> {
    Ok(scene.host(host)?.directory().join("state").join(VM).join("console.log"))
}

/// The counters that the guest has printed on a host, in runs without a hole.
fn runs(log: &Path) -> Result<Vec<Vec<u64>>> {
    let text = String::from_utf8_lossy(&fs::read(log).unwrap_or_default()).into_owned();
    // The last line may not be whole yet.
    let whole = text.rsplit_once('\n').map_or("", |(whole, _)| whole);
    // Not a counter: what the firmware says, and a line that was begun on the
    // other host.
    let counters = whole.lines().filter(|line| line.len() == 8);
    let mut runs: Vec<Vec<u64>> = Vec::new();
    for count in counters.filter_map(|line| u64::from_str_radix(line, 16).ok()) {
        match runs.last_mut() {
            Some(run) if run.last().is_some_and(|before| before + STEP == count) => run.push(count),
            _ => runs.push(vec![count]),
        }
    }
    Ok(runs)
}

/// The counters of the last run.
fn counts(log: &Path) -> Result<Vec<u64>> {
    Ok(runs(log)?.pop().unwrap_or_default())
}

/// Waits until the guest has counted beyond `goal` on `host`.
fn await_count(scene: &Scene, host: &str, goal: u64) -> Result<()> {
    let log = console(scene, host)?;
    wait_for(&format!("the guest to count beyond {goal:x} on host {host}"), LIMIT, || {
        Ok(counts(&log)?.last().is_some_and(|&count| count > goal).then_some(()))
    })
}

/// A counter that is committed: it was printed before several checkpoints.
fn committed_count(scene: &Scene, host: &str) -> Result<u64> {
    let count = *counts(&console(scene, host)?)?.last().context("nothing was counted")?;
    let checkpoints = || -> Result<u64> {
        scene.status(host)?["checkpoints"].as_u64().context("no `checkpoints` in the status")
    };
    let goal = checkpoints()? + 3;
    wait_for("three more checkpoints", LIMIT, || Ok((checkpoints()? >= goal).then_some(())))?;
    Ok(count)
}

/// Host b, where the guest never was, goes on from `committed` at least, and
/// neither leaves a number out nor counts one twice.
fn prove_first_continuity(scene: &Scene, committed: u64) -> Result<()> {
    prove_continuity(scene, committed)?;
    let log = console(scene, "b")?;
    ensure!(runs(&log)?.len() == 1, "the guest left numbers out: {:x?}", runs(&log)?);
    Ok(())
}

/// Host b goes on from `committed` at least, and its disk has every number.
fn prove_continuity(scene: &Scene, committed: u64) -> Result<()> {
    scene.await_live("b")?;
    let log = console(scene, "b")?;
    // Not the run of an earlier stay.
    let first = wait_for(&format!("host b to count from above {committed:x}"), LIMIT, || {
        Ok(counts(&log)?.first().copied().filter(|&first| first > committed))
    })?;
    await_count(scene, "b", first + 20 * STEP)?;
    let image = scene.disk("b", 0)?;
    scene.host("b")?.call(["vm", "stop", VM, "--force"])?;
    let found = sectors(&fs::read(&image)?)?;
    let last = *found.last().context("no counter is on the disk")?;
    let printed = wait_for("the console's log to have all that was printed", LIMIT, || {
        let printed = *counts(&log)?.last().context("nothing was counted")?;
        ensure!(last >= printed, "{printed:x} was printed, the disk ends at {last:x}");
        Ok((last <= printed + STEP).then_some(printed))
    })?;
    println!("{printed:x} was printed, the disk ends at {last:x}");
    Ok(())
}

/// The last counters, which the disk holds without a hole.
fn sectors(image: &[u8]) -> Result<Vec<u64>> {
    let mut found = Vec::new();
    for index in 0..SECTORS {
        let sector = &image[(1 + index) * SECTOR..][..SECTOR];
        if sector[..4] == [0; 4] {
            continue;
        }
        ensure!(&sector[..4] == b"CNTR", "sector {} is damaged", index + 1);
        let count = u64::from(u32::from_le_bytes(sector[4..8].try_into()?));
        let place = (count / STEP) as usize % SECTORS;
        ensure!(place == index, "{count:x} is in the place of another counter");
        found.push(count);
    }
    found.sort_unstable();
    for (before, after) in found.iter().zip(&found[1..]) {
        ensure!(before + STEP == *after, "{before:x} is followed by {after:x} on the disk");
    }
    Ok(found)
}

fn counting_goes_on_when_the_host_is_killed(scene: &mut Scene) -> Result<()> {
    protected(scene)?;
    let committed = committed_count(scene, "a")?;
    scene.host_mut("a")?.kill_everything()?;
    prove_first_continuity(scene, committed)
}

fn counting_goes_on_when_qemu_is_killed(scene: &mut Scene) -> Result<()> {
    protected(scene)?;
    let committed = committed_count(scene, "a")?;
    scene.host("a")?.kill_qemu(VM)?;
    prove_first_continuity(scene, committed)?;
    scene.await_fenced("a").map(drop)
}

fn counting_goes_on_when_the_host_is_cut_off(scene: &mut Scene) -> Result<()> {
    protected(scene)?;
    let committed = committed_count(scene, "a")?;
    let log = console(scene, "a")?;
    scene.lab().cut("a")?;
    scene.await_live("b")?;
    scene.await_kept("a")?;
    scene.lab().heal("a")?;
    scene.await_fenced("a")?;
    // Halted for good: it counts no more.
    let (halted, fenced_at) = (counts(&log)?, Instant::now());
    prove_first_continuity(scene, committed)?;
    ensure!(counts(&log)? == halted, "a counted on, {:?} after", fenced_at.elapsed());
    Ok(())
}

fn counting_goes_on_when_it_is_handed_over_and_back(scene: &mut Scene) -> Result<()> {
    protected(scene)?;
    hand_over(scene.host("a")?, VM)?;
    scene.await_live("b")?;
    scene.protect("b", "a")?;
    scene.await_protected("b", |_| ())?;
    hand_over(scene.host("b")?, VM)?;
    scene.await_live("a")?;
    scene.protect("a", "b")?;
    scene.await_protected("a", |_| ())?;
    let committed = committed_count(scene, "a")?;
    scene.host_mut("a")?.kill_daemon()?;
    await_empty(scene, "a")?;
    prove_continuity(scene, committed)
}
