//! Keepers that are replaced while their guests run: by hand, by another program, and by one that dies.

use crate::cluster_deaths::Moment;
use crate::keepers::{Kept, begin, kept, with_keepers};
use crate::refusals::log_of;
use crate::snapshot::{json, store};
use crate::stage::{
    LIMIT, await_forgotten, await_service, close, fail_at, hand_over, play, protection, prove_disk,
    prove_survival, refusal, restart_daemon, vms,
};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;
use tempfile::TempDir;
use understudy_lab::scene::VM;
use understudy_lab::{ArbiterKind, HostOptions, Scene, SceneOptions, wait_for};

/// The status of a host's guest once it runs there in a keeper that answers.
pub fn answered(scene: &Scene) -> Result<Kept> {
    wait_for("the keeper to answer", LIMIT, || {
        let known = scene.host("a")?.known(VM)?;
        known.filter(|status| status["live"] == true).map(|status| kept(&status)).transpose()
    })
}

/// Has the keeper of host a's guest replaced; the guest goes on in the same QEMU.
pub fn replace(scene: &Scene) -> Result<()> {
    let before = answered(scene)?;
    let words = scene.host("a")?.call(["upgrade", "--keepers", VM])?;
    prove_replaced(scene, &before, &words)
}

fn prove_replaced(scene: &Scene, before: &Kept, words: &str) -> Result<()> {
    let now = answered(scene)?;
    let told = format!("{VM}: keeper {} is replaced by {};", before.keeper, now.keeper);
    ensure!(words.contains(&told), "not {told:?}: {words}");
    ensure!(words.contains("the guest stood still for"), "{words}");
    eprintln!("{}", words.trim());
    ensure!(now.qemu == before.qemu, "another QEMU: {before:?} became {now:?}");
    ensure!(now.keeper != before.keeper, "the same keeper: {now:?}");
    Ok(())
}

pub fn stop(scene: &Scene) -> Result<()> {
    scene.host("a")?.call(["vm", "stop", VM, "--force"])?;
    await_forgotten(scene, "a")
}

/// Waits until a host's guest is protected again, of which it says until then that it is not.
pub fn await_protected_again(scene: &Scene, host: &str) -> Result<()> {
    wait_for("the guest to be protected again", LIMIT, || {
        let known = scene.host(host)?.known(VM)?;
        Ok(known.filter(|status| protection(status).0 == "protected").map(drop))
    })
}

#[test]
fn a_protected_guests_keeper_is_replaced_twice_and_its_client_does_not_notice() {
    let shape = SceneOptions { disks: 2, second_disk_is_qcow2: true, ..with_keepers() };
    play(shape, |scene| {
        scene.protected_guest("a", "b")?;
        let client = begin(scene)?;
        for _ in 0..2 {
            // The second disk's image grows: what it is shown with must not.
            let grown =
                scene.shell()?.run("dd if=/dev/urandom of=/data2/$$ bs=1M count=4; sync")?;
            ensure!(grown.code == 0, "{grown:?}");
            replace(scene)?;
            await_service(&client)?;
            await_protected_again(scene, "a")?;
            await_service(&client)?;
        }
        wait_for("the daemon to tell what the next keeper has done", LIMIT, || {
            let events = scene.host("a")?.call(["events", "--json"])?;
            Ok((events.matches("\"keeper-replaced\"").count() == 2).then_some(()))
        })?;
        let status = scene.status("a")?;
        let copied = &status["disk_sync"]["full_because"];
        ensure!(copied.is_null(), "all of its disks was copied: {copied}");
        // What its daemon need not be there for.
        scene.host_mut("a")?.kill_daemon()?;
        await_service(&client)?;
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")
    });
}

#[test]
fn an_unprotected_guests_keeper_is_replaced_and_the_next_is_one_as_any() {
    play(with_keepers(), |scene| {
        scene.start_guest("a")?;
        scene.await_guest()?;
        let client = begin(scene)?;
        // It leaves memory watched, for the next one.
        let store = store(scene);
        let snapshot = ["vm", "snapshot", VM, "--trace", "0", "--store", &store];
        json(scene, "a", &snapshot)?;
        replace(scene)?;
        await_service(&client)?;
        // What it must reach of a QEMU that is not its own takes this, and is said.
        ensure!(log_of(scene, "a")?.contains("not kept from other processes"), "nothing is said");
        json(scene, "a", &snapshot)?;
        let before = answered(scene)?;
        scene.host_mut("a")?.kill_daemon()?;
        await_service(&client)?;
        scene.revive("a")?;
        ensure!(answered(scene)? == before, "another one");
        replace(scene)?;
        await_service(&client)?;
        // It is protected, and handed over, as if nothing had been.
        scene.protect("a", "b")?;
        scene.await_protected("a", |_| ())?;
        hand_over(scene.host("a")?, VM)?;
        await_forgotten(scene, "a")?;
        scene.await_live("b")?;
        await_service(&client)?;
        let acked = close(client)?;
        prove_disk(scene, "b", acked)
    });
}

/// The next keeper on host a dies at a point for as long as there is a file.
pub struct Dying {
    file: PathBuf,
    _directory: TempDir,
}

impl Dying {
    pub fn at(point: &str) -> Result<(Dying, SceneOptions)> {
        let directory = tempfile::tempdir()?;
        let file = directory.path().join("dies");
        fs::write(&file, "")?;
        let mut options = with_keepers();
        fail_at(&mut options, "a", &format!("{point}=return({})", file.display()));
        Ok((Dying { file, _directory: directory }, options))
    }

    pub fn no_more(&self) -> Result<()> {
        Ok(fs::remove_file(&self.file)?)
    }
}

/// Has what passes a fail point on host a pass these, too.
fn pass_too(options: &mut SceneOptions, points: &str) {
    let daemon = options.daemons.get_mut("a").expect("a host a");
    let (_, passed) = daemon.environment.last_mut().expect("a fail point");
    *passed += &format!(";{points}");
}

#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_next_keeper_that_dies_before_the_last_has_left_changes_nothing() {
    let (dying, options) = Dying::at("prepare-to-adopt").expect("a file");
    play(options, |scene| {
        scene.protected_guest("a", "b")?;
        let client = begin(scene)?;
        let before = answered(scene)?;
        let (code, words) = refusal(scene.host("a")?, &["upgrade", "--keepers", VM, "--json"])?;
        ensure!(code == 1, "{code}: {words}");
        let words = scene.host("a")?.cli(["upgrade", "--keepers", VM])?;
        let words = String::from_utf8_lossy(&words.stdout).into_owned();
        ensure!(words.contains("NOT REPLACED: its next keeper has ended"), "{words}");
        ensure!(answered(scene)? == before, "another one");
        scene.await_protected("a", |_| ())?;
        await_service(&client)?;
        dying.no_more()?;
        replace(scene)?;
        await_protected_again(scene, "a")?;
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")
    });
}

/// The guest of host a stands still, and the host says so.
fn await_standstill(scene: &Scene) -> Result<()> {
    wait_for("host a to say that the guest stands still", LIMIT, || {
        let Some(status) = scene.host("a")?.known(VM)? else { return Ok(None) };
        let reason = status["protection"]["reason"].as_str().unwrap_or_default();
        Ok(reason.contains("stands still between two keepers").then_some(()))
    })
}

#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_guest_whose_next_keeper_dies_is_taken_up_by_a_further_one_of_the_next_daemon_too() {
    let (dying, options) = Dying::at("adopt").expect("a file");
    play(options, |scene| {
        scene.protected_guest("a", "b")?;
        let client = begin(scene)?;
        let before = answered(scene)?;
        let output = scene.host("a")?.cli(["upgrade", "--keepers", VM])?;
        let words = String::from_utf8_lossy(&output.stdout).into_owned();
        ensure!(words.contains("the next one does not go on with the guest"), "{words}");
        await_standstill(scene)?;
        // Nothing starts it a second time.
        let (_, words) =
            refusal(scene.host("a")?, &["vm", "start", &scene.definition().to_string_lossy()])?;
        ensure!(words.contains("between two keepers"), "{words}");
        restart_daemon(scene, "a")?;
        await_standstill(scene)?;
        dying.no_more()?;
        await_service(&client)?;
        let now = answered(scene)?;
        ensure!(now.qemu == before.qemu && now.keeper != before.keeper, "{before:?}: {now:?}");
        await_protected_again(scene, "a")?;
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")
    });
}

#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_guest_that_stands_still_between_two_keepers_is_ended_by_its_operator() {
    let (_dying, options) = Dying::at("adopt").expect("a file");
    play(options, |scene| {
        scene.start_guest("a")?;
        scene.await_guest()?;
        scene.host("a")?.cli(["upgrade", "--keepers", VM])?;
        await_standstill(scene)?;
        stop(scene)?;
        // Its place is free.
        scene.start_guest("a")?;
        scene.await_guest()?;
        stop(scene)
    });
}

/// Another keeper was started for it meanwhile, found nobody there, and said for good that its guest was lost.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_guest_that_stands_still_is_ended_though_its_custodian_takes_its_time() {
    let (_dying, mut options) = Dying::at("adopt").expect("a file");
    pass_too(&mut options, "custodian-ends=sleep(1000)");
    play(options, |scene| {
        scene.start_guest("a")?;
        scene.await_guest()?;
        scene.host("a")?.cli(["upgrade", "--keepers", VM])?;
        await_standstill(scene)?;
        stop(scene)?;
        // Whoever was started for it would say so within this time.
        for _ in 0..30 {
            thread::sleep(Duration::from_millis(100));
            let known = vms(scene.host("a")?)?;
            ensure!(known.is_empty(), "{known:?}");
        }
        scene.start_guest("a")?;
        scene.await_guest()?;
        stop(scene)
    });
}

/// That it is to end was forgotten with the wait for its next keeper, and it went on.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_guest_that_its_operator_ends_while_a_further_keeper_takes_it_up_does_not_go_on() {
    let (dying, mut options) = Dying::at("adopt").expect("a file");
    let adopting = Moment::new();
    pass_too(&mut options, &adopting.action("adopting", ""));
    play(options, |scene| {
        scene.start_guest("a")?;
        scene.await_guest()?;
        scene.host("a")?.cli(["upgrade", "--keepers", VM])?;
        await_standstill(scene)?;
        dying.no_more()?;
        adopting.await_reached()?;
        let stop = scene.host("a")?.begin(["vm", "stop", VM, "--force"])?;
        // It is given up, and waited for.
        thread::sleep(Duration::from_secs(2));
        adopting.end()?;
        let output = stop.wait_with_output()?;
        ensure!(output.status.success(), "{output:?}");
        await_forgotten(scene, "a")
    });
}

/// It was never said to have ended: whoever ends it waited for the arbiter without a bound.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_guest_that_stands_still_between_two_keepers_is_ended_while_the_arbiter_hangs() {
    let (_dying, mut options) = Dying::at("adopt").expect("a file");
    pass_too(&mut options, "release=sleep(600000)");
    play(options, |scene| {
        scene.start_guest("a")?;
        scene.await_guest()?;
        scene.host("a")?.cli(["upgrade", "--keepers", VM])?;
        await_standstill(scene)?;
        stop(scene)
    });
}

/// The guest stood still for good, and only the daemon's log told of the keepers that were started in vain.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_guest_that_no_keeper_of_this_release_understands_waits_for_another_release_which_is_said() {
    let (other_release, options) = Dying::at("read-legacy").expect("a file");
    play(options, |scene| {
        scene.start_guest("a")?;
        scene.await_guest()?;
        let client = begin(scene)?;
        let before = answered(scene)?;
        let output = scene.host("a")?.cli(["upgrade", "--keepers", VM])?;
        let words = String::from_utf8_lossy(&output.stdout).into_owned();
        ensure!(words.contains("no keeper of this release can"), "{words}");
        await_standstill(scene)?;
        let way_out = format!("end it by `understudy vm stop {VM} --force`");
        wait_for("host a to say what can be done", LIMIT, || {
            let reason = scene.status("a")?["protection"]["reason"].to_string();
            let events = scene.host("a")?.call(["events", "--json"])?;
            let is_said = reason.contains(&way_out) && events.contains(&way_out);
            Ok(is_said.then_some(()))
        })?;
        other_release.no_more()?;
        restart_daemon(scene, "a")?;
        await_service(&client)?;
        let now = answered(scene)?;
        ensure!(now.qemu == before.qemu && now.keeper != before.keeper, "{before:?}: {now:?}");
        close(client)?;
        stop(scene)
    });
}

/// Prints for how long the guest stood still while its keeper was replaced so many times.
fn replace_again_and_again(scene: &Scene, times: usize, is_protected: bool) -> Result<()> {
    let mut stood_still = Vec::new();
    for _ in 0..times {
        let before = answered(scene)?;
        let said = scene.host("a")?.call(["upgrade", "--keepers", VM, "--json"])?;
        let said: Value = serde_json::from_str(&said)?;
        let still = said.pointer("/replaced/0/still_ms").and_then(Value::as_u64);
        stood_still.push(still.with_context(|| format!("no time: {said}"))?);
        let now = answered(scene)?;
        ensure!(now.qemu == before.qemu && now.keeper != before.keeper, "{before:?}: {now:?}");
        if is_protected {
            await_protected_again(scene, "a")?;
        }
    }
    stood_still.sort_unstable();
    let (median, worst) = (stood_still[times / 2], stood_still[times - 1]);
    let kind = if is_protected { "protected" } else { "unprotected" };
    eprintln!(
        "{kind}: the guest stood still for {median} ms at the median of {times}, {worst} at most: {stood_still:?}"
    );
    Ok(())
}

/// Prints what docs/SPECIFICATION.md has.
#[test]
#[ignore = "long: twenty replacements; make test-long"]
fn a_keeper_is_replaced_twenty_times_and_it_is_told_how_long_the_guest_stood_still() {
    play(with_keepers(), |scene| {
        scene.start_guest("a")?;
        scene.await_guest()?;
        let client = begin(scene)?;
        replace_again_and_again(scene, 10, false)?;
        await_service(&client)?;
        scene.protect("a", "b")?;
        scene.await_protected("a", |_| ())?;
        replace_again_and_again(scene, 10, true)?;
        await_service(&client)?;
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")
    });
}

/// A program in a file of its own, that can be replaced as a package is upgraded.
pub struct Installed(TempDir);

impl Installed {
    /// Installs a program, with the agent's library beside it, for all daemons of a scene.
    pub fn new(program: &Path, options: &mut SceneOptions) -> Result<Installed> {
        let installed = Installed(tempfile::tempdir()?);
        installed.upgrade(program)?;
        options.binary = installed.0.path().join(program.file_name().context("no name")?);
        Ok(installed)
    }

    /// Puts another program in the place of the one that was there; who runs that is not told.
    pub fn upgrade(&self, program: &Path) -> Result<()> {
        for file in [program.to_owned(), program.with_file_name("libunderstudy_agent.so")] {
            let fresh = self.0.path().join("fresh");
            fs::copy(&file, &fresh)?;
            fs::rename(fresh, self.0.path().join(file.file_name().context("no name")?))?;
        }
        Ok(())
    }
}

#[test]
fn after_an_upgrade_the_plan_tells_which_keepers_run_another_program_and_they_are_replaced() {
    let mut options = with_keepers();
    let program = options.binary.clone();
    let installed = Installed::new(&program, &mut options).expect("a copy of the program");
    play(options, |scene| {
        scene.start_guest("a")?;
        scene.await_guest()?;
        let client = begin(scene)?;
        let before = answered(scene)?;
        let words = scene.host("a")?.call(["upgrade", "--keepers"])?;
        ensure!(words.contains("all keepers run the daemon's program"), "{words}");
        installed.upgrade(&program)?;
        restart_daemon(scene, "a")?;
        let plan: Value =
            serde_json::from_str(&scene.host("a")?.call(["upgrade", "--plan", "--json"])?)?;
        let keeper = &plan["vms"][0]["keeper"];
        ensure!(keeper["pid"] == before.keeper && keeper["is_daemons"] == false, "{plan}");
        ensure!(keeper["obstacle"].is_null(), "{plan}");
        let plan = scene.host("a")?.call(["upgrade", "--plan"])?;
        ensure!(plan.contains("`understudy upgrade --keepers` replaces it"), "{plan}");
        let words = scene.host("a")?.call(["upgrade", "--keepers"])?;
        prove_replaced(scene, &before, &words)?;
        await_service(&client)?;
        let plan = scene.host("a")?.call(["upgrade", "--plan"])?;
        ensure!(!plan.contains("another program"), "{plan}");
        close(client)?;
        stop(scene)
    });
}

/// In the documented order. A backup was refused, with exit code 1, on the second of each pair of hosts.
#[test]
fn after_an_upgrade_of_both_hosts_no_keeper_runs_the_former_program_and_nothing_was_refused() {
    let mut options = with_keepers();
    let program = options.binary.clone();
    let installed = Installed::new(&program, &mut options).expect("a copy of the program");
    play(options, |scene| {
        scene.protected_guest("a", "b")?;
        let client = begin(scene)?;
        let before = answered(scene)?;
        installed.upgrade(&program)?;
        for host in ["a", "b"] {
            restart_daemon(scene, host)?;
        }
        await_protected_again(scene, "a")?;
        let later = format!("{VM}: gets a new keeper here when that on host a is replaced");
        let words = scene.host("b")?.call(["upgrade", "--keepers"])?;
        ensure!(words.contains(&later) && !words.contains("NOT REPLACED"), "{words}");
        let words = scene.host("a")?.call(["upgrade", "--keepers"])?;
        prove_replaced(scene, &before, &words)?;
        await_protected_again(scene, "a")?;
        for host in ["a", "b"] {
            let words = scene.host(host)?.call(["upgrade", "--keepers"])?;
            ensure!(words.contains("all keepers run the daemon's program"), "{host}: {words}");
        }
        await_service(&client)?;
        close(client)?;
        stop(scene)
    });
}

/// What a VM's keeper is replaced by reads another file of its host than it did.
pub fn with_settings(scene: &mut Scene, settings: &str, arbiter: ArbiterKind) -> Result<()> {
    let before = with_keepers().daemons.remove("a").context("no host a")?;
    let settings = format!("{}{settings}", before.settings);
    scene.host_mut("a")?.kill_daemon()?;
    scene.revive_with("a", HostOptions { settings, arbiter, ..before })
}

/// The lease of the last keeper had stayed at the arbiter: `recover --force` on host b took it for one that was over.
#[test]
fn a_keeper_without_leases_leaves_none_of_the_last_one() {
    let mut options = with_keepers();
    options.daemons.get_mut("a").expect("a host a").settings += "lease_seconds = 4\n";
    play(options, |scene| {
        scene.protected_guest("a", "b")?;
        scene.host("a")?.call(["unprotect", VM])?;
        let lease = scene.lab().arbiter_directory().join(VM).join("1.lease");
        wait_for("the lease", LIMIT, || Ok(lease.exists().then_some(())))?;
        with_settings(scene, "lease_seconds = 0\n", ArbiterKind::File)?;
        replace(scene)?;
        ensure!(!lease.exists(), "nobody renews it any more");
        scene.await_guest()?;
        stop(scene)
    });
}

/// The next keeper found an older generation on record, and killed the guest: whoever was to note the new one had ended
/// with the last keeper.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_keeper_is_replaced_whose_vm_was_won_anew_when_its_protection_ended() {
    let mut options = with_keepers();
    fail_at(&mut options, "a", "note-generation=sleep(20000)");
    fail_at(&mut options, "b", "stand-down=panic");
    play(options, |scene| {
        scene.protected_guest("a", "b")?;
        let client = begin(scene)?;
        ensure!(scene.status("a")?["generation"] == 1, "{}", scene.status("a")?);
        replace(scene)?;
        await_service(&client)?;
        ensure!(scene.status("a")?["generation"] == 2, "it was not won anew");
        close(client)?;
        // It is just beginning to back it up again.
        scene.host_mut("b")?.kill_everything()?;
        stop(scene)
    });
}
