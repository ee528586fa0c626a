//! Redundancy that restores itself: three hosts, killed one after another, and
//! nobody but the daemons does anything about it.

use crate::refusals::log_of;
use crate::sick_hosts::Hanging;
use crate::stage::{
    Calm, LIMIT, await_service, hand_over, options, play, play_protected, protect, protection,
    prove_survival, repairing_daemon,
};
use anyhow::{Context, Result, ensure};
use understudy_lab::scene::VM;
use understudy_lab::{ArbiterKind, HostOptions, Scene, SceneOptions, wait_for};

const HOSTS: [&str; 3] = ["a", "b", "c"];

/// Three hosts that restore protection by themselves.
fn three(daemon: &HostOptions) -> SceneOptions {
    let mut options = options().calm();
    options.hosts = HOSTS.map(str::to_owned).to_vec();
    for host in HOSTS {
        options.daemons.insert(host.to_owned(), daemon.clone());
    }
    options
}

/// Waits until the guest of `host` is protected; returns its backup.
fn await_backup(scene: &Scene, host: &str) -> Result<String> {
    wait_for(&format!("host {host} to be protected again"), LIMIT, || {
        let status = scene.status(host)?;
        ensure!(status["role"] == "primary", "host {host} does not own the guest: {status}");
        // Until it is protected again nobody is to take it for sound.
        let copied_anew = status["restoring"] == true;
        ensure!(protection(&status).0 != "syncing" || copied_anew, "{status}");
        let peer = status["protection"]["peer"].as_str().unwrap_or_default().to_owned();
        Ok((protection(&status).0 == "protected").then_some(peer))
    })
}

/// Waits until the guest of `host` is protected to `backup`.
fn await_backup_on(scene: &Scene, host: &str, backup: &str) -> Result<()> {
    wait_for(&format!("host {backup} to stand by"), LIMIT, || {
        Ok((await_backup(scene, host)? == backup).then_some(()))
    })
}

/// Kills whoever runs the guest, six times; every dead host's daemon starts
/// again, empty, and just serves.
fn kill_one_after_another(options: SceneOptions) {
    play_protected(options, |scene, client| {
        let mut primary = "a".to_owned();
        for _ in 0..2 * HOSTS.len() {
            let backup = await_backup(scene, &primary)?;
            ensure!(backup != primary, "host {primary} chose itself");
            await_service(&client)?;
            scene.host_mut(&primary)?.kill_everything()?;
            scene.await_live(&backup)?;
            await_service(&client)?;
            scene.restart(&primary)?;
            primary = backup;
        }
        await_backup(scene, &primary)?;
        prove_survival(scene, client, &primary)
    });
}

#[test]
fn hosts_die_one_after_another_twice_round() {
    kill_one_after_another(three(&repairing_daemon().calm()));
}

/// No [peers]: hosts know each other from etcd alone.
#[test]
fn members_die_one_after_another_twice_round() {
    let daemon = HostOptions {
        arbiter: ArbiterKind::Etcd,
        without_peers: true,
        ..repairing_daemon().calm()
    };
    kill_one_after_another(three(&daemon));
}

#[test]
fn a_lost_backup_is_replaced_by_another_host() {
    play_protected(three(&repairing_daemon().calm()), |scene, client| {
        scene.host_mut("b")?.kill_everything()?;
        // Until host a has noticed it still names host b.
        await_backup_on(scene, "a", "c")?;
        await_service(&client)?;
        // No host is left: it says so and goes on looking.
        scene.host_mut("c")?.kill_everything()?;
        wait_for("host a to look for a backup", LIMIT, || {
            let status = scene.status("a")?;
            let (state, reason) = protection(&status);
            let looks = reason.contains("looking for a backup") && reason.contains("next try in");
            Ok((state == "degraded" && looks).then_some(()))
        })?;
        await_service(&client)?;
        let status = scene.host("a")?.cli(["status", VM])?;
        ensure!(status.status.code() == Some(3), "`status` of a degraded VM: {status:?}");
        scene.restart("b")?;
        await_backup_on(scene, "a", "b")?;
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")
    });
}

/// Before, it kept its place for good: it lives, and nobody asked the third host.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_backup_whose_disk_hangs_for_good_gives_way_to_a_third_host() {
    let hanging = Hanging::new();
    let mut options = three(&repairing_daemon().calm());
    let daemon = options.daemons.get_mut("b").expect("a host");
    daemon.environment.push(("FAILPOINTS".to_owned(), hanging.action("hang-disk")));
    play_protected(options, |scene, client| {
        // A first copy may take its time on its way there.
        wait_for("the first copy to be on b's disks", LIMIT, || {
            Ok(log_of(scene, "a")?.contains("is on the disks of host b").then_some(()))
        })?;
        hanging.begin()?;
        // It may seem well in between, until the guest writes again.
        wait_for("host a to turn to host c", LIMIT, || {
            let status = scene.status("a")?;
            let words = status["events"].to_string();
            Ok((words.contains("host b could not take over") && await_backup(scene, "a")? == "c")
                .then_some(()))
        })?;
        await_service(&client)?;
        hanging.end()?;
        scene.host_mut("a")?.kill_everything()?;
        scene.await_live("c")?;
        prove_survival(scene, client, "c")
    });
}

/// A planned fail-over hands the wish over too, and the former primary is a
/// backup like any other.
#[test]
fn wishes_are_respected() {
    let mut options = three(&repairing_daemon().calm());
    options.hosts.pop();
    play(options, |scene| {
        scene.start_guest("a")?;
        scene.await_guest()?;
        let policy = ["--policy", "interval", "--hz", "20"];
        protect(scene.host("a")?, VM, &[&["--to", "b"][..], &policy].concat())?;
        hand_over(scene.host("a")?, VM)?;
        scene.await_live("b")?;
        ensure!(await_backup(scene, "b")? == "a", "there is no other host");
        let status = scene.status("b")?;
        ensure!(status["policy"]["hz"] == 20, "the policy was not kept: {}", status["policy"]);
        // Unprotected by the operator, it stays so.
        scene.host("b")?.call(["unprotect", VM])?;
        stays(scene, "b", "off", "")?;
        // Told not to repair, the survivor does not.
        let no_repair = ["protect", VM, "--to", "a", "--no-repair", "--no-wait"];
        wait_for("a to take the guest", LIMIT, || {
            Ok(scene.host("b")?.cli(no_repair)?.status.success().then_some(()))
        })?;
        scene.await_protected("b", |_| ())?;
        hand_over(scene.host("b")?, VM)?;
        scene.await_live("a")?;
        stays(scene, "a", "degraded", "not protected until")?;
        scene.host("a")?.call(["vm", "stop", VM, "--force"])?;
        Ok(())
    });
}

/// Checks that nothing changes for several times as long as a repair takes to begin.
fn stays(scene: &Scene, host: &str, state: &str, words: &str) -> Result<()> {
    let until = std::time::Instant::now() + std::time::Duration::from_secs(2);
    wait_for("time to pass", LIMIT, || {
        let status = scene.status(host)?;
        let (now, reason) = protection(&status);
        ensure!(now == state && reason.contains(words), "not left alone: {status}");
        Ok((std::time::Instant::now() >= until).then_some(()))
    })
    .context("the operator's wish")
}
