//! A backup that does not reach the arbiter could never take over: it is not taken as one, is not
//! called one any more when that happens later, and does not wait for ever after a cut.

use crate::cluster::{Bank, bank_options};
use crate::fencing::pass;
use crate::refusals::quick;
use crate::stage::{
    Calm, LIMIT, await_degraded, await_forgotten, await_service, daemon, daemon_passing, fail_at,
    hand_over, options, play, play_protected, protect, protection, prove_survival, refusal,
};
use anyhow::{Context, Result, ensure};
use std::io::{BufRead, BufReader};
use std::time::{Duration, Instant};
use understudy_arbiter::etcd::Etcd;
use understudy_arbiter::{EtcdConfig, EtcdEndpoints};
use understudy_lab::scene::VM;
use understudy_lab::{ArbiterKind, HostOptions, Scene, in_namespace, wait_for};

/// Leaves nothing in the place of the arbiter's directory on this host.
fn unmount(scene: &Scene, host: &str) -> Result<()> {
    scene.host(host)?.hide(&scene.lab().arbiter_directory())
}

fn mount(scene: &Scene, host: &str) -> Result<()> {
    scene.host(host)?.unhide(&scene.lab().arbiter_directory())
}

/// The exit code of `status`, and what it says of protection.
fn status(scene: &Scene, host: &str) -> Result<(i32, String, String)> {
    let output = scene.host(host)?.cli(["status", VM, "--json"])?;
    let code = output.status.code().context("`status` was killed")?;
    let status = serde_json::from_slice(&output.stdout)?;
    let (state, reason) = protection(&status);
    Ok((code, state.to_owned(), reason.to_owned()))
}

/// Waits until `status` says with 3 that the backup could not take over; returns the reason.
fn await_unfit(scene: &Scene, host: &str) -> Result<String> {
    wait_for("the primary to say that its backup could not take over", LIMIT, || {
        let (code, state, reason) = status(scene, host)?;
        // Another lapse, of a machine that stands still, is not what is waited for.
        let unfit = state == "degraded" && reason.contains("is its storage mounted?");
        ensure!(!unfit || code == 3, "{reason}, and the exit code is {code}");
        Ok(unfit.then_some(reason))
    })
}

/// Waits until `status` calls the guest of `host` protected.
pub fn await_fit(scene: &Scene, host: &str) -> Result<()> {
    wait_for("protection to be back", LIMIT, || {
        let (code, state, _) = status(scene, host)?;
        Ok((code == 0 && state == "protected").then_some(()))
    })
}

/// The command `protect` once said that b stands by, and `status` was 0; b could never have taken
/// over.
#[test]
fn another_arbiter_is_refused() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let place = directory.path().display().to_string();
    let mut options = options().calm();
    let settings =
        format!("{}[arbiter]\nkind = \"file\"\npath = \"{place}\"\n", daemon().calm().settings);
    let other = HostOptions { arbiter: ArbiterKind::None, settings, ..daemon().calm() };
    options.daemons.insert("b".to_owned(), other);
    play(options, |scene| {
        scene.start_guest("a")?;
        let (_, words) = refusal(scene.host("a")?, &["protect", VM, "--to", "b"])?;
        let ours = scene.lab().arbiter_directory();
        for part in [&place, &ours.display().to_string(), "host b refuses", "[arbiter]"] {
            ensure!(words.contains(part), "{part:?} is not in: {words}");
        }
        ensure!(status(scene, "a")?.1 == "off", "something has begun");
        await_forgotten(scene, "b")
    });
    Ok(())
}

/// The command `status` once said "protected" with 0 for ever.
#[test]
fn a_backup_that_loses_the_arbiter_protects_nothing_until_it_is_back() {
    play_protected(options().calm(), |scene, client| {
        await_fit(scene, "a")?;
        await_fit(scene, "b")?;
        unmount(scene, "b")?;
        let unmounted = Instant::now();
        let reason = await_unfit(scene, "a")?;
        println!("said after {:.1} s: {reason}", unmounted.elapsed().as_secs_f64());
        ensure!(reason.contains("is its storage mounted?"), "{reason}");
        wait_for("host b to say it of itself", LIMIT, || {
            let status = scene.host("b")?.call(["status"])?;
            Ok(status.contains("WRONG: arbiter: ").then_some(()))
        })?;
        // Output goes on: it is committed to the backup as ever.
        await_service(&client)?;
        let (_, words) = refusal(scene.host("a")?, &["failover", VM])?;
        ensure!(words.contains("could not take it over now"), "{words}");
        await_service(&client)?;
        mount(scene, "b")?;
        await_fit(scene, "a")?;
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")
    });
}

/// A hand-over was once refused at once.
#[test]
fn a_hand_over_waits_for_the_end_of_a_lapse() {
    play(quick(), |scene| {
        scene.protected_guest("a", "b")?;
        await_fit(scene, "a")?;
        unmount(scene, "b")?;
        await_unfit(scene, "a")?;
        let mut waiting = scene.host("a")?.begin(["failover", VM])?;
        let mut words = String::new();
        let said = waiting.stderr.as_mut().context("it says nothing")?;
        BufReader::new(said).read_line(&mut words)?;
        ensure!(words.contains("waiting for it"), "{words}");
        mount(scene, "b")?;
        let ended = waiting.wait_with_output()?;
        ensure!(ended.status.success(), "{ended:?}");
        scene.await_live("b").map(drop)
    });
}

/// Regression: whatever that host's members sent waited as long, those of others, too.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn an_arbiter_that_hangs_holds_up_no_frames_of_members() {
    let mut options = bank_options().calm();
    fail_at(&mut options, "a", "ask-member=1*sleep(3600000)");
    play(options, |scene| {
        let bank = Bank::found(scene)?;
        bank.protect(0)?;
        hand_over(scene.host("a")?, "bank0")?;
        // Two members are on host b, and the third hears both.
        bank.await_payments()?;
        bank.audit()?;
        scene.host("b")?.call(["vm", "stop", "bank0", "--force"])?;
        bank.end()
    });
}

/// Host b once waited for the arbiter until its daemon was restarted, however long host a had
/// gone on alone, and refused to be its backup again meanwhile.
#[test]
fn a_cut_that_heals_leaves_nobody_waiting() {
    play_protected(options().calm(), |scene, client| {
        unmount(scene, "b")?;
        scene.lab().cut("b")?;
        await_degraded(scene, "a")?;
        await_service(&client)?;
        wait_for("host b to wait for the arbiter", LIMIT, || {
            let (_, _, reason) = status(scene, "b")?;
            Ok(reason.contains("waiting for the arbiter").then_some(()))
        })?;
        let (_, words) = refusal(scene.host("b")?, &["recover", VM])?;
        ensure!(words.contains("lets go once host a"), "{words}");
        ensure!(words.contains("is its storage mounted?"), "{words}");
        scene.lab().heal("b")?;
        await_forgotten(scene, "b")?;
        let (_, words) = refusal(scene.host("a")?, &["protect", VM, "--to", "b"])?;
        ensure!(words.contains("is its storage mounted?"), "{words}");
        mount(scene, "b")?;
        protect(scene.host("a")?, VM, &["--to", "b"])?;
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")
    });
}

/// Time in which two hosts had made 20 revisions.
const IDLE: Duration = Duration::from_secs(20);

/// Each look at the other members had put a revision, of which etcd keeps every one until it is compacted, and takes no
/// new owner of any VM once its space is full of them.
#[test]
fn hosts_that_idle_do_not_fill_etcd() {
    let mut options = options().calm();
    for host in options.hosts.clone() {
        let arbiter = ArbiterKind::Etcd;
        options
            .daemons
            .insert(host, HostOptions { arbiter, without_peers: true, ..daemon().calm() });
    }
    play(options, |scene| {
        for (host, other) in [("a", "b"), ("b", "a")] {
            wait_for("the other member", LIMIT, || {
                let status = scene.host(host)?.call(["status", "--json"])?;
                let status: serde_json::Value = serde_json::from_str(&status)?;
                Ok((status["peers"] == serde_json::json!([other])).then_some(()))
            })?;
        }
        let before = scene.etcd()?.revision()?;
        pass(IDLE)?;
        let made = scene.etcd()?.revision()? - before;
        // A host that stood still has another lease, which is a revision when it ends, too.
        ensure!(made <= 6, "{made} revisions");
        let endpoint = understudy_lab::Etcd::endpoint(scene.lab(), "a")?;
        let endpoints = EtcdEndpoints::new(&[endpoint], None).map_err(anyhow::Error::msg)?;
        let config = EtcdConfig { endpoints, prefix: "/understudy".to_owned() };
        let (etcd, host) = (Etcd::new(&config)?, scene.lab().host("a")?);
        let keeps = |revisions| in_namespace(&host, || etcd.keeps_all(revisions))?;
        ensure!(keeps(1)?, "nobody has compacted them");
        ensure!(!keeps(1_000_000)?, "there were not that many");
        scene.etcd()?.compact()?;
        ensure!(!keeps(1)?, "they were compacted");
        Ok(())
    });
}

/// It had been well for ever, and could be reached.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn an_arbiter_that_hangs_is_told_of() {
    let mut options = options().calm();
    options.daemons.insert("a".to_owned(), daemon_passing("ask-arbiter=sleep(1000000)"));
    play(options, |scene| {
        wait_for("host a to tell of its arbiter", LIMIT, || {
            let status = scene.host("a")?.call(["status"])?;
            Ok(status.contains("WRONG: arbiter: it has not answered").then_some(()))
        })
    });
}

/// The guest's end was not told of as long as the arbiter did not answer, and its power counted as cut.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_vm_is_stopped_in_order_although_its_arbiter_hangs() {
    let mut options = options().calm();
    options.daemons.insert("a".to_owned(), daemon_passing("release=sleep(1000000)"));
    play(options, |scene| {
        scene.start_guest("a")?;
        scene.await_guest()?;
        scene.host("a")?.call(["vm", "stop", VM])?;
        await_forgotten(scene, "a")?;
        let events = scene.host("a")?.call(["events"])?;
        ensure!(events.contains("stopped") && !events.contains("power was cut"), "{events}");
        Ok(())
    });
}
