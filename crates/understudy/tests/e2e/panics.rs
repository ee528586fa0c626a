//! A panic in what one VM runs ends that VM on its host, and nothing else: its backup takes over,
//! another VM stays protected, and the daemon lives.

use crate::group::{self, play_group_with};
use crate::planned::console;
use crate::stage::{
    Calm, LIMIT, PACE, alone, await_degraded, await_service, daemon, has_backup, options, play,
    protection, prove_survival, repairing_daemon,
};
use anyhow::{Context, Result, ensure};
use std::fs;
use std::path::PathBuf;
use understudy_lab::companion::{COMPANION, Companion};
use understudy_lab::scene::VM;
use understudy_lab::{HostOptions, RecordClient, Scene, SceneOptions, wait_for};

/// Threads of a primary: in the pause, with the state machine's lock held, between two messages,
/// and while output is released.
const OF_PRIMARY: [&str; 5] = ["capture", "barrier", "send", "receive", "release"];
/// Threads of a backup: at each message, at each epoch, with the state machine's lock held.
const OF_BACKUP: [&str; 3] = ["stage", "apply", "acknowledge"];

/// The file that says whom to strike on a host, in one of the stories.
fn strike_file(story: &str, host: &str) -> PathBuf {
    let process = std::process::id();
    std::env::temp_dir().join(format!("understudy-strike-{process}-{story}-{host}"))
}

fn struck_options(story: &str) -> SceneOptions {
    with_strikes(story, daemon().calm())
}

fn with_strikes(story: &str, daemon: HostOptions) -> SceneOptions {
    let mut options = SceneOptions { memory_mib: 256, ..options().calm() };
    for host in ["a", "b"] {
        let action = format!("strike=return({})", strike_file(story, host).display());
        let environment = vec![("FAILPOINTS".to_owned(), action)];
        let armed = HostOptions { environment, ..daemon.clone() };
        options.daemons.insert(host.to_owned(), armed);
    }
    options
}

/// Has a thread of the guest panic on a host; returns when it has.
fn strike(story: &str, host: &str, role: &str) -> Result<()> {
    let file = strike_file(story, host);
    let beside = file.with_extension("new");
    fs::write(&beside, format!("{role} of {VM}"))?;
    fs::rename(&beside, &file)?;
    let struck = wait_for(&format!("`{role}` to panic on host {host}"), LIMIT, || {
        Ok((!file.exists()).then_some(()))
    });
    // There only if nobody was struck.
    let _ = fs::remove_file(&file);
    struck
}

/// The bystanders that must not take notice: both daemons, and another VM with its backup.
struct Bystanders {
    daemons: [u32; 2],
    qemu: u64,
    client: RecordClient,
}

/// The processes of both daemons.
fn daemons(scene: &Scene) -> Result<[u32; 2]> {
    Ok([scene.host("a")?.pid(), scene.host("b")?.pid()])
}

/// Checks that they run still.
fn are_the_same(scene: &mut Scene, pids: [u32; 2]) -> Result<()> {
    for (host, pid) in ["a", "b"].into_iter().zip(pids) {
        let daemon = scene.host_mut(host)?;
        ensure!(daemon.is_running() && daemon.pid() == pid, "the daemon of host {host} ended");
    }
    Ok(())
}

impl Bystanders {
    fn begin(scene: &Scene, companion: &Companion) -> Result<Bystanders> {
        companion.await_boot(scene)?;
        let host = scene.host("a")?;
        host.call(["protect", COMPANION, "--to", "b", "--no-wait"])?;
        host.await_protected(COMPANION, |_| ())?;
        Ok(Bystanders {
            daemons: daemons(scene)?,
            qemu: host.status(COMPANION)?["qemu_pid"].as_u64().context("it has no QEMU")?,
            client: companion.record_client(scene, PACE)?,
        })
    }

    fn are_unharmed(&self, scene: &mut Scene) -> Result<()> {
        are_the_same(scene, self.daemons)?;
        let status = scene.host("a")?.status(COMPANION)?;
        ensure!(has_backup(&status), "the other VM: {status}");
        ensure!(status["qemu_pid"] == self.qemu, "the other VM has another QEMU: {status}");
        await_service(&self.client)
    }
}

/// `understudy status` of a host says what happened, with the exit code of lost protection. Its own
/// threads may have noticed the end first, without knowing why: that is soon replaced.
fn says_what_happened(scene: &Scene, host: &str, role: &str) -> Result<()> {
    let words = format!("a thread of {VM} panicked on host {host}: a test strikes {role}");
    wait_for(&format!("`{words}` in the status"), LIMIT, || {
        let status = scene.status(host)?;
        let reason = status["protection"]["reason"].as_str().unwrap_or_default();
        Ok(reason.contains(&words).then_some(()))
    })?;
    let output = scene.host(host)?.cli(["status", VM])?;
    ensure!(output.status.code() == Some(3), "{output:?}");
    Ok(())
}

fn play_struck(
    name: &str,
    story: impl FnOnce(&mut Scene, RecordClient, &Bystanders) -> Result<()>,
) {
    play(struck_options(name), |scene| {
        let companion = Companion::new(scene)?;
        companion.start(scene.host("a")?)?;
        scene.protected_guest("a", "b")?;
        let client = scene.record_client(PACE)?;
        await_service(&client)?;
        let bystanders = Bystanders::begin(scene, &companion)?;
        story(scene, client, &bystanders)
    });
}

/// Each of these panics once ended the daemon, and every VM of the host with it.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_panic_in_a_primarys_thread_moves_that_vm_only() {
    play_struck("primary", |scene, client, bystanders| {
        let (mut victim, mut survivor) = ("a", "b");
        for role in OF_PRIMARY {
            let tell = || format!("`{role}` on host {victim}");
            strike("primary", victim, role)?;
            scene.await_live(survivor).with_context(tell)?;
            scene.await_fenced(victim).with_context(tell)?;
            says_what_happened(scene, victim, role).with_context(tell)?;
            await_service(&client).with_context(tell)?;
            bystanders.are_unharmed(scene).with_context(tell)?;
            scene.protect(survivor, victim)?;
            scene.await_protected(survivor, |_| ()).with_context(tell)?;
            (victim, survivor) = (survivor, victim);
        }
        prove_survival(scene, client, victim)
    });
}

/// Each of these panics once ended the daemon, and every backup of the host with it.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_panic_in_a_backups_thread_ends_that_backup_only() {
    play_struck("backup", |scene, client, bystanders| {
        for role in OF_BACKUP {
            let tell = || format!("`{role}` on host b");
            strike("backup", "b", role)?;
            let reason = await_degraded(scene, "a").with_context(tell)?;
            println!("{role}: {reason}");
            await_service(&client).with_context(tell)?;
            bystanders.are_unharmed(scene).with_context(tell)?;
            wait_for("host b to forget the VM", LIMIT, || {
                Ok(scene.host("b")?.status(VM).is_err().then_some(()))
            })?;
            scene.protect("a", "b")?;
            scene.await_protected("a", |_| ()).with_context(tell)?;
        }
        prove_survival(scene, client, "a")
    });
}

/// The members of a group share what happens to one of them.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_panic_in_a_members_thread_moves_its_group() {
    play_group_with(struck_options("group"), |scene, client, inner| {
        let daemons = daemons(scene)?;
        strike("group", "a", "barrier")?;
        group::prove_survival(scene, client, inner, "b")?;
        group::await_both_fenced(scene, "a")?;
        says_what_happened(scene, "a", "barrier")?;
        are_the_same(scene, daemons)
    });
}

/// Regression: nobody else had the other one yet, and it ended, too.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_panic_in_a_members_first_copy_does_not_take_the_other_along() {
    play(struck_options("first-copy"), |scene| {
        let companion = Companion::new(scene)?;
        scene.start_guest("a")?;
        companion.start(scene.host("a")?)?;
        scene.await_guest()?;
        companion.await_boot(scene)?;
        let client = companion.record_client(scene, PACE)?;
        await_service(&client)?;
        let daemons = daemons(scene)?;
        scene.lab().limit_speed("b", 8)?;
        let a = scene.host("a")?;
        let group = ["--group", "pair", "--to", "b", "--hold-console", "--no-wait"];
        a.call(["protect", VM, COMPANION].into_iter().chain(group))?;
        let status = a.status(VM)?;
        ensure!(protection(&status).0 == "syncing", "too fast to panic meanwhile: {status}");
        strike("first-copy", "a", "copy")?;
        says_what_happened(scene, "a", "copy")?;
        wait_for("the companion to be alone", LIMIT, || {
            let status = a.status(COMPANION)?;
            ensure!(status["role"] == "primary", "it has ended, too: {status}");
            Ok(alone(&status).is_some().then_some(()))
        })?;
        await_service(&client)?;
        wait_for("the companion to be heard on its console", LIMIT, || {
            let said = console(scene, "a", COMPANION, "echo one-$((40 + 1))")?;
            Ok(said.contains("one-41").then_some(()))
        })?;
        are_the_same(scene, daemons)
    });
}

/// The VM is taken over by nobody: the guest ends, which `status` says, and can be started again.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_panic_in_an_unprotected_vms_thread_ends_that_vm_only() {
    // It is the thread that restores protection.
    play(with_strikes("alone", repairing_daemon().calm()), |scene| {
        let companion = Companion::new(scene)?;
        companion.start(scene.host("a")?)?;
        scene.start_guest("a")?;
        scene.await_guest()?;
        let bystanders = Bystanders::begin(scene, &companion)?;
        let qemu = scene.status("a")?["qemu_pid"].as_u64().context("it has no QEMU")?;
        strike("alone", "a", "repair")?;
        scene.await_fenced("a")?;
        says_what_happened(scene, "a", "repair")?;
        wait_for("its QEMU to end", LIMIT, || {
            Ok((!PathBuf::from(format!("/proc/{qemu}")).exists()).then_some(()))
        })?;
        bystanders.are_unharmed(scene)?;
        scene.host("a")?.call(["vm", "start", VM])?;
        scene.await_guest()?;
        bystanders.are_unharmed(scene)
    });
}
