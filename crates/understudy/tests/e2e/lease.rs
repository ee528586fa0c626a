//! The lease of a sole owner: it freezes without its arbiter, `recover --force` waits for its end,
//! and a host that wakes up has lost the VM before anything leaves it.

use crate::cluster_deaths::Moment;
use crate::fencing::{hide, is_gone, pass, unhide};
use crate::refusals::log_of;
use crate::sick_disks::Failing;
use crate::stage::{
    Calm, LIMIT, PACE, await_degraded, await_service, daemon, fail_at, options, play,
    play_protected, protect, prove_survival, refusal, refused,
};
use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::fs;
use std::time::{Duration, Instant};
use understudy_lab::companion::{COMPANION, Companion};
use understudy_lab::scene::VM;
use understudy_lab::{ArbiterKind, CLIENT_ADDRESS, HostOptions, Scene, SceneOptions, wait_for};

/// The length, as short as may be configured.
pub const LENGTH: Duration = Duration::from_secs(4);
/// A second more than it takes a lease to end.
const LONGER: Duration = Duration::from_secs(6);

fn leased(arbiter: ArbiterKind, seconds: u32) -> SceneOptions {
    let mut options = options();
    for host in options.hosts.clone() {
        let mut daemon = HostOptions { arbiter, ..daemon().calm() };
        daemon.settings += &format!("lease_seconds = {seconds}\n");
        options.daemons.insert(host, daemon);
    }
    options
}

pub fn short(arbiter: ArbiterKind) -> SceneOptions {
    leased(arbiter, LENGTH.as_secs() as u32)
}

/// The guest goes on alone, and the other host has a copy.
pub fn unprotect(scene: &Scene) -> Result<()> {
    scene.host("a")?.call(["unprotect", VM])?;
    await_event(scene, "a", "lease of")
}

/// Waits until the arbiter's directory has a lease of the first generation.
pub fn await_lease(scene: &Scene) -> Result<()> {
    let lease = scene.lab().arbiter_directory().join(VM).join("1.lease");
    wait_for("the lease", LIMIT, || Ok(lease.exists().then_some(())))
}

fn await_event(scene: &Scene, host: &str, words: &str) -> Result<()> {
    wait_for(&format!("host {host} to tell of {words:?}"), LIMIT, || {
        Ok(log_of(scene, host)?.contains(words).then_some(()))
    })
}

/// Waits until the guest of host a stands still since its lease ran out; returns when that was seen.
fn await_standstill(scene: &Scene) -> Result<Instant> {
    wait_for("the guest to stand still", LIMIT, || {
        let status = scene.status("a")?;
        let over = status["lease_over"].as_str().unwrap_or_default();
        ensure!(over.is_empty() == (status["live"] == true), "{status}");
        Ok(over.contains("lease has run out").then_some(()))
    })?;
    Ok(Instant::now())
}

fn without_the_arbiter(arbiter: ArbiterKind) {
    play_protected(short(arbiter), |scene, client| {
        let qemu = scene.host("a")?.qemu_pid(VM)?;
        let watcher = scene.watch_uplink("a", 0)?;
        unprotect(scene)?;
        hide(scene, arbiter, "a")?;
        let still = await_standstill(scene)?;
        let output = scene.host("a")?.cli(["status", VM])?;
        let words = String::from_utf8_lossy(&output.stdout).into_owned();
        ensure!(output.status.code() == Some(3), "`status` ended with {}", output.status);
        ensure!(words.contains("STANDS STILL"), "`status` said {words}");
        let (_, words) = refusal(scene.host("a")?, &["protect", VM, "--to", "b"])?;
        ensure!(words.contains("stands still"), "`protect`: {words}");
        pass(LENGTH)?;
        ensure!(watcher.frames_after(still)? == 0, "something left a guest without a lease");
        unhide(scene, arbiter, "a")?;
        await_service(&client)?;
        // On a machine that stands still for as long it may run out once more.
        let status = wait_for("the lease to be renewed", LIMIT, || {
            Ok(Some(scene.status("a")?).filter(|status| status["lease_over"].is_null()))
        })?;
        ensure!(status["generation"] == 1, "{status}");
        ensure!(scene.host("a")?.qemu_pid(VM)? == qemu, "it is another QEMU: {status}");
        // With a backup there is none.
        scene.protect("a", "b")?;
        scene.await_protected("a", |_| ())?;
        await_event(scene, "a", "no lease of")?;
        hide(scene, arbiter, "a")?;
        pass(LONGER)?;
        await_service(&client)?;
        unhide(scene, arbiter, "a")?;
        prove_survival(scene, client, "a")
    });
}

#[test]
fn a_sole_owner_freezes_without_its_arbiter_and_goes_on() {
    without_the_arbiter(ArbiterKind::File);
}

#[test]
fn with_etcd_a_sole_owner_freezes_without_it_and_goes_on() {
    without_the_arbiter(ArbiterKind::Etcd);
}

/// It had stood still for good, and `status` said that it lives.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_guest_whose_qemu_does_not_answer_at_once_goes_on_all_the_same() {
    let mut options = short(ArbiterKind::File);
    fail_at(&mut options, "a", "let-go=2*return");
    play_protected(options, |scene, client| {
        unprotect(scene)?;
        hide(scene, ArbiterKind::File, "a")?;
        await_standstill(scene)?;
        unhide(scene, ArbiterKind::File, "a")?;
        await_service(&client)?;
        ensure!(log_of(scene, "a")?.contains("is told again"), "it went on at once");
        prove_survival(scene, client, "a")
    });
}

/// A guest that says how long it has run, in tenths of a second at the most.
const COUNT: &str =
    "n=0; while :; do n=$((n + 1)); echo $n > /tmp/next; mv /tmp/next /tmp/count; sleep 0.1; done";

/// The VM may be another host's by now: checkpoints for its new backup do not let it run.
#[test]
fn a_guest_stands_still_through_checkpoints() {
    play_protected(leased(ArbiterKind::File, 8), |scene, client| {
        let count = |scene: &Scene| -> Result<u32> {
            let output = scene.shell()?.run("cat /tmp/count")?;
            output.text.trim().parse().context(output.text)
        };
        scene.shell()?.start(COUNT)?;
        wait_for("the first count", LIMIT, || Ok(count(scene).ok()))?;
        unprotect(scene)?;
        let (before, began) = (count(scene)?, Instant::now());
        scene.protect("a", "b")?;
        hide(scene, ArbiterKind::File, "a")?;
        let still = await_standstill(scene)?;
        let epochs = |scene: &Scene| Ok::<_, anyhow::Error>(scene.status("a")?["epoch"].as_u64());
        let seen = epochs(scene)?;
        wait_for("checkpoints of it", LIMIT, || Ok((epochs(scene)? > seen).then_some(())))?;
        pass(2 * LONGER)?;
        let goes_on = Instant::now();
        unhide(scene, ArbiterKind::File, "a")?;
        await_service(&client)?;
        let ran = (count(scene)? - before) / 10;
        let may = (still - began + goes_on.elapsed()).as_secs() as u32 + 2;
        ensure!(ran <= may, "it ran for {ran} s, and may have for {may} s");
        prove_survival(scene, client, "a")
    });
}

#[test]
fn a_vm_that_no_other_host_has_needs_no_arbiter() {
    play(short(ArbiterKind::File), |scene| {
        scene.start_guest("a")?;
        scene.await_guest()?;
        hide(scene, ArbiterKind::File, "a")?;
        let client = scene.record_client(crate::stage::PACE)?;
        pass(LONGER)?;
        await_service(&client)?;
        ensure!(scene.status("a")?["lease_over"].is_null(), "{}", scene.status("a")?);
        unhide(scene, ArbiterKind::File, "a")?;
        prove_survival(scene, client, "a")
    });
}

/// The arbiter has this host as the owner of a later generation by then. An errand of the lease that was on its way
/// all the time must not take that for another's.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_lease_is_not_lost_to_a_contest_that_its_host_has_won() {
    let mut options = leased(ArbiterKind::File, 15);
    for daemon in options.daemons.values_mut() {
        daemon.environment.push(("FAILPOINTS".to_owned(), "renew-lease=sleep(5000)".to_owned()));
    }
    play_protected(options, |scene, client| {
        unprotect(scene)?;
        scene.protect("a", "b")?;
        scene.await_protected("a", |_| ())?;
        scene.host_mut("b")?.kill_everything()?;
        wait_for("host a to win the contest", LIMIT, || {
            Ok((scene.status("a")?["generation"] == 2).then_some(()))
        })?;
        pass(2 * LONGER)?;
        await_service(&client)?;
        // A lost lease would be fenced; one that is late is made up for.
        let status = scene.await_live("a")?;
        ensure!(status["generation"] == 2, "{status}");
        prove_survival(scene, client, "a")
    });
}

/// The VM whose disk hangs has lost its backup, and goes on alone. Before, whoever keeps the leases waited
/// for it with all others, and so did whoever asked for its status.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_disk_that_hangs_costs_no_other_vm_its_lease() {
    let directory = tempfile::tempdir().expect("a directory for the test");
    let hanging = Failing::of("hang-disk", directory.path().join("hangs"));
    let mut options = SceneOptions { memory_mib: 256, ..short(ArbiterKind::File) };
    let daemon = options.daemons.get_mut("a").expect("a host");
    daemon.environment = hanging.daemon().environment;
    play(options, |scene| {
        let companion = Companion::new(scene)?;
        scene.start_guest("a")?;
        companion.start(scene.host("a")?)?;
        scene.await_guest()?;
        companion.await_boot(scene)?;
        protect(scene.host("a")?, COMPANION, &["--to", "b"])?;
        scene.host("a")?.call(["unprotect", COMPANION])?;
        let lease = scene.lab().arbiter_directory().join(COMPANION).join("1.lease");
        wait_for("the companion's lease", LIMIT, || Ok(lease.exists().then_some(())))?;
        protect(scene.host("a")?, VM, &["--to", "b"])?;
        let client = scene.record_client(PACE)?;
        await_service(&client)?;
        hanging.begin()?;
        // A write of the guest hangs from now on.
        pass(Duration::from_secs(1))?;
        scene.host_mut("b")?.kill_everything()?;
        await_degraded(scene, "a")?;
        for _ in 0..3 {
            let seen = fs::read(&lease)?;
            wait_for("the companion's lease to be renewed", LIMIT, || {
                Ok((fs::read(&lease).is_ok_and(|now| now != seen)).then_some(()))
            })?;
        }
        hanging.end()?;
        prove_survival(scene, client, "a")?;
        scene.host("a")?.call(["vm", "stop", COMPANION, "--force"])?;
        Ok(())
    });
}

/// The two hosts, and nobody else, cannot talk to each other. The lease is one that no busy machine
/// misses.
#[test]
fn nobody_forces_a_vm_from_an_owner_that_lives() {
    play_protected(leased(ArbiterKind::File, 20), |scene, client| {
        unprotect(scene)?;
        await_lease(scene)?;
        scene.lab().cut("b")?;
        let (_, words) = refusal(scene.host("b")?, &["recover", VM, "--force"])?;
        ensure!(words.contains("host a runs") && words.contains("failover"), "{words}");
        let vouched = ["recover", VM, "--force", "--other-host-is-off"];
        let (_, words) = refusal(scene.host("b")?, &vouched)?;
        ensure!(words.contains("host a runs"), "whatever its operator says: {words}");
        scene.lab().heal("b")?;
        prove_survival(scene, client, "a")
    });
}

/// Host a stands still as a whole, longer than its lease lasts. Host b has the VM when it wakes up.
fn a_host_that_sleeps(arbiter: ArbiterKind) {
    play_protected(short(arbiter), |scene, client| {
        unprotect(scene)?;
        scene.shell()?.start(&format!("ping -i 0.02 {CLIENT_ADDRESS} >/dev/null"))?;
        await_service(&client)?;
        client.abandon();
        let former = scene.host("a")?.qemu_pid(VM)?;
        let (a, b) = (scene.watch_uplink("a", 0)?, scene.watch_uplink("b", 0)?);
        wait_for("the guest to send", LIMIT, || Ok((a.count()? > 20).then_some(())))?;
        scene.host("a")?.pause()?;
        let asked = Instant::now();
        scene.host("b")?.call(["recover", VM, "--force"])?;
        ensure!(asked.elapsed() > LENGTH, "host b did not wait for the lease's end");
        scene.await_live("b")?;
        scene.await_guest()?;
        let first = b.first_frame_after(asked)?.context("b sent nothing")?;
        let woken = Instant::now();
        scene.host("a")?.resume()?;
        scene.await_fenced("a")?;
        is_gone(former)?;
        ensure!(a.frames_after(first)? == 0, "a still sent something after b had begun to");
        ensure!(a.frames_after(woken)? == 0, "a sent something when it woke up");
        await_event(scene, "a", "this host stood still for about")?;
        // Its own lease may be late for a moment.
        scene.await_live("b")?;
        scene.host("b")?.call(["vm", "stop", VM, "--force"])?;
        Ok(())
    });
}

#[test]
fn a_host_that_slept_longer_than_its_lease_lets_nothing_out() {
    a_host_that_sleeps(ArbiterKind::File);
}

#[test]
fn with_etcd_a_host_that_slept_longer_than_its_lease_lets_nothing_out() {
    a_host_that_sleeps(ArbiterKind::Etcd);
}

/// Before, host b took it and started nothing, and host a ended its copy: the VM ran nowhere.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn an_owner_that_is_back_before_its_vm_is_claimed_keeps_it() {
    let claims = Moment::new();
    let mut options = short(ArbiterKind::File);
    fail_at(&mut options, "b", &claims.action("before-claim", "1*"));
    play_protected(options, |scene, client| {
        unprotect(scene)?;
        await_lease(scene)?;
        scene.host("a")?.pause()?;
        let recover = scene.host("b")?.begin(["recover", VM, "--force"])?;
        claims.await_reached()?;
        let lease = scene.lab().arbiter_directory().join(VM).join("1.lease");
        let seen = fs::read(&lease)?;
        scene.host("a")?.resume()?;
        wait_for("host a to renew its lease", LIMIT, || {
            Ok(fs::read(&lease).is_ok_and(|now| now != seen).then_some(()))
        })?;
        claims.end()?;
        let (_, words) = refused(&recover.wait_with_output()?, "recover")?;
        ensure!(words.contains("it lives, and nothing was changed"), "{words}");
        await_service(&client)?;
        let status = scene.await_live("a")?;
        ensure!(status["generation"] == 1, "{status}");
        prove_survival(scene, client, "a")
    });
}

/// A host without a record of it waited for nobody, and the silent owner of before might have answered beside it.
#[test]
fn a_first_start_waits_for_owners_that_may_not_have_read_that_they_have_lost_the_vm() {
    play(short(ArbiterKind::File), |scene| {
        // A host that does not answer had it, again and again; host b claimed it, and gave it back.
        let of_vm = scene.lab().arbiter_directory().join(VM);
        let put = |name: &str, text: Value| fs::write(of_vm.join(name), text.to_string());
        fs::create_dir(&of_vm)?;
        let length_ms = LENGTH.as_millis() as u64;
        for generation in 1..=12 {
            put(&generation.to_string(), json!({ "host": "gone" }))?;
            let lease = json!({ "host": "gone", "length_ms": length_ms, "mark": 7 });
            put(&format!("{generation}.lease"), lease)?;
        }
        put("13", json!({ "host": "b" }))?;
        put("14", json!({ "host": null }))?;
        let asked = Instant::now();
        scene.start_guest("a")?;
        let waited = asked.elapsed();
        ensure!(waited > LENGTH, "host a waited for nobody");
        ensure!(waited < 12 * LENGTH, "host a waited for one lease after the other: {waited:?}");
        let status = scene.await_live("a")?;
        ensure!(status["generation"] == 15, "{status}");
        scene.host("a")?.call(["vm", "stop", VM, "--force"])?;
        Ok(())
    });
}

/// The VM is nobody else's meanwhile: the host that wakes up goes on with it.
#[test]
fn a_host_that_slept_and_lost_nothing_goes_on() {
    play_protected(short(ArbiterKind::File), |scene, client| {
        unprotect(scene)?;
        scene.host("a")?.pause()?;
        pass(LONGER)?;
        scene.host("a")?.resume()?;
        await_event(scene, "a", "this host stood still for about")?;
        prove_survival(scene, client, "a")
    });
}

/// Times longer than the watchdog's, the host is not reset; and it is not afterwards.
#[test]
#[ignore = "needs the kernel's module softdog; `make test-kvm` plays it"]
fn a_daemon_pets_its_watchdog_and_leaves_it_at_its_end() {
    let mut options = short(ArbiterKind::File);
    let daemon = options.daemons.get_mut("a").expect("a host");
    daemon.settings += "watchdog = \"/dev/watchdog\"\n";
    let state = || fs::read_to_string("/sys/class/watchdog/watchdog0/state");
    play(options, |scene| {
        ensure!(state()?.trim() == "active", "{}", state()?);
        pass(LONGER)?;
        scene.host_mut("a")?.terminate()?;
        ensure!(state()?.trim() == "inactive", "{}", state()?);
        pass(LONGER)
    });
}

#[test]
fn a_watchdog_that_is_none_is_refused_by_name() {
    let mut options = short(ArbiterKind::File);
    let daemon = options.daemons.get_mut("a").expect("a host");
    daemon.settings += "watchdog = \"/dev/null\"\n";
    let Err(error) = Scene::start(options) else { panic!("/dev/null took petting") };
    let words = format!("{error:#}");
    assert!(words.contains("/dev/null is no watchdog"), "{words}");
}

#[test]
fn without_leases_the_operator_must_know_that_the_other_host_is_off() {
    play_protected(leased(ArbiterKind::File, 0), |scene, client| {
        scene.host("a")?.call(["unprotect", VM])?;
        client.abandon();
        scene.host("a")?.pause()?;
        let (_, words) = refusal(scene.host("b")?, &["recover", VM, "--force"])?;
        ensure!(words.contains("keeps no lease"), "{words}");
        ensure!(words.contains("--other-host-is-off"), "{words}");
        scene.host_mut("a")?.kill_everything()?;
        scene.host("b")?.call(["recover", VM, "--force", "--other-host-is-off"])?;
        scene.await_live("b")?;
        let none = fs::read_dir(scene.lab().arbiter_directory().join(VM))?
            .filter_map(|entry| entry.ok())
            .all(|entry| !entry.file_name().to_string_lossy().contains("lease"));
        ensure!(none, "there is a lease");
        scene.host("b")?.call(["vm", "stop", VM, "--force"])?;
        Ok(())
    });
}
