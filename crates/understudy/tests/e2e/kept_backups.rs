//! Backups that have a keeper: the daemon of the backup's host may die as well, and what was taken over
//! runs on without it.

use crate::autostart::{await_coming_up, awaited, set_autostart};
use crate::keepers::{begin, kept, signal_keeper, told, with_keepers};
use crate::paths::{await_both_up, cut_the_one_in_use};
use crate::peer::{hung_up, message, refusal_of, refusal_of_keeper};
use crate::recover::lose;
use crate::stage::{
    Calm, LIMIT, PACE, await_forgotten, await_service, hand_over, play, prove_disk, prove_survival,
    restart_daemon,
};
use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use std::fs;
use std::io::Write;
use std::os::unix::net::UnixStream;
use std::time::Duration;
use understudy_lab::companion::{COMPANION, Companion};
use understudy_lab::scene::VM;
use understudy_lab::{HostOptions, Scene, SceneOptions, wait_for};
use understudy_protocol::wire::Kind;

#[test]
fn what_was_taken_over_outlives_its_daemon_and_is_protected_back() {
    play(with_keepers(), |scene| {
        scene.protected_guest("a", "b")?;
        let client = begin(scene)?;
        scene.host_mut("a")?.kill_everything()?;
        let before = kept(&scene.await_live("b")?)?;
        await_service(&client)?;
        scene.host_mut("b")?.kill_daemon()?;
        await_service(&client)?;
        scene.revive("b")?;
        ensure!(kept(&told(scene, "b", VM)?)? == before, "another one");
        scene.restart("a")?;
        scene.protect("b", "a")?;
        scene.await_protected("b", |_| ())?;
        kept(&told(scene, "a", VM)?).context("the backup has no keeper")?;
        for host in ["a", "b"] {
            scene.host_mut(host)?.kill_daemon()?;
        }
        await_service(&client)?;
        scene.host_mut("b")?.kill_everything()?;
        await_service(&client)?;
        scene.revive("a")?;
        prove_survival(scene, client, "a")
    });
}

#[test]
fn a_guest_is_handed_to_and_fro_between_keepers_while_a_daemon_is_dead() {
    play(with_keepers(), |scene| {
        scene.protected_guest("a", "b")?;
        let client = begin(scene)?;
        for (from, to) in [("a", "b"), ("b", "a")] {
            scene.host_mut(to)?.kill_daemon()?;
            hand_over(scene.host(from)?, VM)?;
            await_forgotten(scene, from)?;
            await_service(&client)?;
            scene.revive(to)?;
            let status = scene.await_live(to)?;
            ensure!(status["takeover"]["planned"] == true, "{status}");
            scene.protect(to, from)?;
            scene.await_protected(to, |_| ())?;
        }
        prove_survival(scene, client, "a")?;
        await_forgotten(scene, "b")
    });
}

#[test]
fn protection_that_ends_and_begins_again_at_once_finds_its_place_free() {
    play(with_keepers(), |scene| {
        scene.protected_guest("a", "b")?;
        let client = begin(scene)?;
        let first = kept(&told(scene, "b", VM)?)?;
        scene.host("a")?.call(["unprotect", VM])?;
        scene.protect("a", "b")?;
        scene.await_protected("a", |_| ())?;
        ensure!(kept(&told(scene, "b", VM)?)?.keeper != first.keeper, "the same keeper");
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")
    });
}

pub fn with_repair() -> SceneOptions {
    let mut options = with_keepers();
    for host in ["a", "b"] {
        let repairing =
            HostOptions { settings: "keepers = true\n".to_owned(), ..Default::default() };
        options.daemons.insert(host.to_owned(), repairing.calm());
    }
    options
}

fn await_protected_again(scene: &Scene) -> Result<()> {
    wait_for("the guest to be protected again", LIMIT, || {
        Ok((scene.status("a")?["protection"]["state"] == "protected").then_some(()))
    })
}

#[test]
fn a_vm_comes_up_with_its_host_in_a_keeper_and_is_protected_again() {
    play(with_repair(), |scene| {
        set_autostart(scene)?;
        scene.protected_guest("a", "b")?;
        let client = begin(scene)?;
        lose(scene, &["a", "b"])?;
        let acked = client.abandon().acked();
        scene.restart("b")?;
        scene.restart("a")?;
        await_coming_up(scene, "a")?;
        let up = kept(&told(scene, "a", VM)?)?;
        restart_daemon(scene, "a")?;
        await_protected_again(scene)?;
        ensure!(kept(&told(scene, "a", VM)?)? == up, "another one");
        scene.await_guest()?;
        prove_disk(scene, "a", acked)?;
        await_forgotten(scene, "b")
    });
}

#[test]
fn a_vm_that_cannot_come_up_says_why_and_leaves_no_keeper_until_it_can() {
    play(with_keepers(), |scene| {
        set_autostart(scene)?;
        scene.start_guest("a")?;
        scene.await_guest()?;
        let disk = scene.disk("a", 0)?;
        let aside = disk.with_extension("aside");
        scene.host_mut("a")?.kill_everything()?;
        // Its keeper finds out what its daemon does not look at.
        let record = scene.host("a")?.directory().join("state").join(VM).join("record.json");
        let good = fs::read_to_string(&record)?;
        let mut wrong: Value = serde_json::from_str(&good)?;
        wrong["definition"]["kernel"] = json!("/no/such/kernel");
        fs::write(&record, wrong.to_string())?;
        fs::rename(&disk, &aside)?;
        scene.restart("a")?;
        let await_reason = |words: &str| {
            wait_for(&format!("{words:?} as the reason"), LIMIT, || {
                let reason = awaited(scene, "a")?.context("nobody waits for it")?;
                Ok(reason.contains(words).then_some(()))
            })
        };
        await_reason(&disk.file_name().context("no name")?.to_string_lossy())?;
        fs::rename(&aside, &disk)?;
        await_reason("/no/such/kernel")?;
        fs::write(&record, good)?;
        await_coming_up(scene, "a")?;
        kept(&told(scene, "a", VM)?).context("it has no keeper")?;
        scene.host("a")?.call(["vm", "stop", VM, "--force"])?;
        await_forgotten(scene, "a")
    });
}

#[test]
fn a_backup_that_follows_a_log_takes_over_without_its_daemon() {
    let options = SceneOptions { lockstep: true, ..with_keepers() };
    play(options, |scene| {
        scene.protected_guest("a", "b")?;
        let client = begin(scene)?;
        ensure!(scene.status("b")?["mode"] == "lockstep", "no lockstep");
        let backup = kept(&told(scene, "b", VM)?)?;
        for host in ["a", "b"] {
            scene.host_mut(host)?.kill_daemon()?;
        }
        await_service(&client)?;
        scene.host_mut("a")?.kill_everything()?;
        await_service(&client)?;
        scene.revive("b")?;
        ensure!(kept(&scene.await_live("b")?)?.keeper == backup.keeper, "another one");
        prove_survival(scene, client, "b")
    });
}

#[test]
fn a_backups_keeper_is_killed_and_protection_is_restored() {
    play(with_repair(), |scene| {
        let companion = Companion::new(scene)?;
        companion.start(scene.host("b")?)?;
        scene.protected_guest("a", "b")?;
        let client = begin(scene)?;
        companion.await_boot(scene)?;
        let others = companion.record_client(scene, PACE)?;
        await_service(&others)?;
        let other = kept(&told(scene, "b", COMPANION)?)?;
        let (daemon, status) = (scene.host("b")?.pid(), scene.status("b")?);
        let lost = kept(&status)?;
        signal_keeper(&status, Signal::SIGKILL)?;
        wait_for("another keeper of the backup", LIMIT, || {
            let Ok(status) = scene.status("b") else { return Ok(None) };
            let is_another = kept(&status).is_ok_and(|kept| kept.keeper != lost.keeper);
            Ok((is_another && status["role"] == "backup").then_some(()))
        })?;
        await_protected_again(scene)?;
        await_service(&client)?;
        await_service(&others)?;
        ensure!(kept(&told(scene, "b", COMPANION)?)? == other, "another one");
        ensure!(scene.host("b")?.pid() == daemon, "another daemon");
        let events = scene.host("b")?.call(["events", "--json"])?;
        ensure!(events.contains("was killed"), "{events}");
        others.stop();
        scene.host("b")?.call(["vm", "stop", COMPANION, "--force"])?;
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")
    });
}

#[test]
fn a_path_is_lost_and_the_session_goes_on_with_the_keeper() {
    let options = SceneOptions { cables: 2, ..with_keepers() };
    play(options, |scene| {
        scene.protected_guest("a", "b")?;
        let client = begin(scene)?;
        let (primary, backup) = (kept(&told(scene, "a", VM)?)?, kept(&told(scene, "b", VM)?)?);
        for host in ["a", "b"] {
            restart_daemon(scene, host)?;
        }
        await_both_up(scene)?;
        let cut = cut_the_one_in_use(scene)?;
        await_service(&client)?;
        scene.lab().heal_cable("a", cut)?;
        // Dialled anew: through a daemon that was not there when the session began.
        await_both_up(scene)?;
        let cut = cut_the_one_in_use(scene)?;
        await_service(&client)?;
        ensure!(kept(&told(scene, "a", VM)?)? == primary, "another one");
        ensure!(kept(&told(scene, "b", VM)?)? == backup, "another one");
        // Without any path the backup takes over; the former primary asks its keeper what became of it.
        scene.lab().cut_cable("b", 0)?;
        scene.lab().cut_cable("b", 1)?;
        scene.await_live("b")?;
        scene.await_kept("a")?;
        scene.lab().heal_cable("a", cut)?;
        scene.lab().heal_cable("b", 0)?;
        scene.await_fenced("a")?;
        prove_survival(scene, client, "b")
    });
}

#[test]
fn a_host_without_keepers_protects_to_one_with_them_and_back() {
    let mut options = with_keepers();
    options.daemons.insert("a".to_owned(), crate::stage::daemon().calm());
    play(options, |scene| {
        scene.protected_guest("a", "b")?;
        let client = begin(scene)?;
        let status = scene.status("b")?;
        ensure!(status["keeper_pid"].is_null(), "in a keeper, unasked: {status}");
        hand_over(scene.host("a")?, VM)?;
        scene.await_live("b")?;
        await_forgotten(scene, "a")?;
        scene.protect("b", "a")?;
        scene.await_protected("b", |_| ())?;
        let status = scene.status("a")?;
        ensure!(status["keeper_pid"].is_null(), "in a keeper, which it has none of: {status}");
        scene.host_mut("b")?.kill_everything()?;
        prove_survival(scene, client, "a")
    });
}

/// The first words of a peer, by hand.
fn hello(purpose: Value, keeper_of: &str) -> Vec<u8> {
    let hello = json!({
        "wire_version": 17, "wire_highest": 18, "product_version": "0", "host": "a",
        "purpose": purpose, "keeper_of": keeper_of
    });
    message(Kind::Hello, hello.to_string().as_bytes())
}

#[test]
fn what_is_not_a_keepers_affair_is_refused_and_its_guest_does_not_notice() {
    let mut options = with_keepers();
    for daemon in options.daemons.values_mut() {
        daemon.insecure = true;
    }
    play(options, |scene| {
        scene.protected_guest("a", "b")?;
        let client = begin(scene)?;
        let backup = kept(&told(scene, "b", VM)?)?;
        let beats = || json!({ "purpose": "heartbeat", "session": "made up", "path": 0 });
        let probe = || json!({ "purpose": "probe" });
        for name in ["../b", "", &"x".repeat(5000)] {
            hung_up(scene, "b", &hello(beats(), name))?;
        }
        let said = refusal_of(scene, "b", &hello(beats(), "nobody"))?;
        ensure!(said.contains("no session"), "{said}");
        for (again, words) in [(beats(), "no session"), (probe(), "answers nothing else")] {
            let said = refusal_of_keeper(scene, "b", &hello(beats(), VM), &hello(again, VM))?;
            ensure!(said.contains(words), "{said}");
        }
        let directory = scene.host("b")?.directory().join("state").join(VM);
        for junk in [&b""[..], b"\x01", b"GET / HTTP/1.1\r\n\r\n"] {
            let mut socket = UnixStream::connect(directory.join("peers.sock"))?;
            socket.set_read_timeout(Some(Duration::from_secs(60)))?;
            // It may be hung up by now.
            let _ = socket.write_all(junk);
        }
        await_service(&client)?;
        scene.await_protected("a", |_| ())?;
        ensure!(kept(&told(scene, "b", VM)?)? == backup, "another one");
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")
    });
}
