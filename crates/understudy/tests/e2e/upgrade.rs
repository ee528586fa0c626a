//! Hosts of two versions: the one before this is built from its commit, and both protect VMs to each other.

use crate::keepers::{kept, told, with_keepers};
use crate::replaced_keepers::{Installed, await_protected_again};
use crate::stage::{
    self, Calm, LIMIT, PACE, await_service, close, daemon, options, play, play_protected,
    prove_survival, restart_daemon,
};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use std::env::consts::EXE_SUFFIX;
use std::path::{Path, PathBuf};
use std::process::Command;
use understudy_lab::scene::VM;
use understudy_lab::{HostOptions, RecordClient, Scene, SceneOptions, wait_for};

/// The last commit that speaks wire version 17 alone.
const PREVIOUS: &str = "7814159";
/// The last one whose keepers leave QEMUs with version 8 of the agent, and do not say so.
const PREVIOUS_KEEPERS: &str = "3007229";

/// The repository that this is built from.
fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn git(arguments: &[&str]) -> Result<std::process::Output> {
    let mut git = Command::new("git");
    git.arg("-C").arg(repository()).args(arguments);
    git.output().with_context(|| format!("cannot run {git:?}"))
}

/// The program of a commit, built if it is not there; none where the commit is not.
fn program_of(commit: &str) -> Result<Option<PathBuf>> {
    let found = format!("{commit}^{{commit}}");
    if !git(&["rev-parse", "--verify", "--quiet", &found])?.status.success() {
        return Ok(None);
    }
    let previous = repository().join("target/previous");
    std::fs::create_dir_all(&previous)?;
    let source = previous.canonicalize()?.join(commit);
    if !source.join("Cargo.toml").exists() {
        std::fs::create_dir_all(&source)?;
        let archive = source.with_extension("tar");
        let archived = git(&["archive", commit, "--output", &archive.to_string_lossy()])?;
        ensure!(archived.status.success(), "{archived:?}");
        stage::run("tar", &["-xf", &archive.to_string_lossy(), "-C", &source.to_string_lossy()])?;
    }
    let mut cargo = Command::new(env!("CARGO"));
    // Of two commits in one directory cargo would take the one's crates for the other's.
    cargo.current_dir(&source).env("CARGO_TARGET_DIR", source.join("target"));
    cargo.args(["build", "--quiet", "--locked", "--profile", "checks"]);
    cargo.args(["-p", "understudy", "-p", "understudy-agent"]);
    let built = cargo.status().with_context(|| format!("cannot run {cargo:?}"))?;
    ensure!(built.success(), "commit {commit} does not build: {built}");
    Ok(Some(source.join("target/checks").join(format!("understudy{EXE_SUFFIX}"))))
}

/// Plays a story with the program of a commit, if it is to be had.
fn with_program_of(commit: &str, story: impl FnOnce(&Path)) {
    match program_of(commit) {
        Ok(Some(program)) => story(&program),
        Ok(None) => eprintln!("SKIPPED: this checkout does not have the commit {commit}"),
        Err(error) => panic!("{error:#}"),
    }
}

/// Plays a story with the previous version's program.
fn with_previous(story: impl FnOnce(&mut Scene, &Path) -> Result<()>) {
    // Fail points are not the previous version's: guests boot.
    let options = SceneOptions { booted: false, ..options().calm() };
    with_program_of(PREVIOUS, |previous| play(options, |scene| story(scene, previous)));
}

/// The version of host `host`'s daemon is another one from now on; its VMs were handed over before.
fn install(scene: &mut Scene, host: &str, program: Option<&Path>) -> Result<()> {
    let status = scene.host_mut(host)?.terminate()?;
    ensure!(status.success(), "host {host}'s daemon ended with {status}");
    scene.restart_as(host, program)
}

fn protect(scene: &Scene, from: &str, to: &str) -> Result<()> {
    scene.protect(from, to)?;
    scene.await_protected(from, |_| ()).map(drop)
}

fn hand_over(scene: &Scene, client: &RecordClient, from: &str, to: &str) -> Result<()> {
    stage::hand_over(scene.host(from)?, VM)?;
    scene.await_live(to)?;
    await_service(client)
}

fn said(scene: &Scene, host: &str, words: &str) -> Result<()> {
    let log = crate::refusals::log_of(scene, host)?;
    ensure!(log.contains(words), "host {host} did not say {words:?}:\n{log}");
    Ok(())
}

/// Host by host, as docs/operating.md says, with the client's one connection alive all the time; then back
/// and forth between the two versions, and the death of either.
#[test]
#[ignore = "long: builds the previous version, some minutes; `make test-long`"]
fn hosts_of_two_versions_protect_each_other() {
    with_previous(|scene, previous| {
        for host in ["a", "b"] {
            install(scene, host, Some(previous))?;
        }
        scene.start_guest("a")?;
        scene.await_guest()?;
        let client = scene.record_client(PACE)?;
        protect(scene, "a", "b")?;

        // The old primary, and a new backup.
        hand_over(scene, &client, "a", "b")?;
        install(scene, "a", None)?;
        protect(scene, "b", "a")?;
        let plan: Value =
            serde_json::from_str(&scene.host("a")?.call(["upgrade", "--plan", "--json"])?)?;
        let peer = &plan["peers"][0];
        ensure!(peer["versions"]["wire_highest"] == 17 && peer["wire"] == 17, "{plan}");
        ensure!(plan["vms"][0]["outcome"] == "loses-backup", "{plan}");
        await_service(&client)?;

        // The new primary, and an old backup.
        hand_over(scene, &client, "b", "a")?;
        protect(scene, "a", "b")?;
        said(scene, "a", "speaks wire version 17 with host b")?;

        // The new one dies: the old one takes over.
        scene.host_mut("a")?.kill_everything()?;
        scene.await_live("b")?;
        await_service(&client)?;
        scene.restart_as("a", None)?;
        protect(scene, "b", "a")?;

        // The old one dies: the new one takes over; then both are new.
        scene.host_mut("b")?.kill_everything()?;
        scene.await_live("a")?;
        await_service(&client)?;
        scene.restart_as("b", None)?;
        protect(scene, "a", "b")?;
        said(scene, "a", "speaks wire version 18 with host b")?;
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")
    });
}

/// A VM in a keeper, to a host that has none, and knows none; and back, to one that has them and is not
/// asked for one.
#[test]
#[ignore = "long: builds the previous version, some minutes; `make test-long`"]
fn a_host_with_keepers_and_one_of_the_previous_version_protect_each_other() {
    with_previous(|scene, previous| {
        let settings = format!("keepers = true\n{}", daemon().calm().settings);
        scene.restart_with("a", HostOptions { settings, ..HostOptions::default() })?;
        install(scene, "b", Some(previous))?;
        scene.start_guest("a")?;
        scene.await_guest()?;
        let client = scene.record_client(PACE)?;
        protect(scene, "a", "b")?;
        ensure!(scene.status("a")?["keeper_pid"].is_u64(), "no keeper on host a");
        await_service(&client)?;
        scene.host_mut("a")?.kill_everything()?;
        scene.await_live("b")?;
        await_service(&client)?;
        scene.restart("a")?;
        protect(scene, "b", "a")?;
        let status = scene.status("a")?;
        ensure!(status["keeper_pid"].is_null(), "in a keeper, unasked: {status}");
        scene.host_mut("b")?.kill_everything()?;
        prove_survival(scene, client, "a")
    });
}

/// Keepers that were started by an older program, under this one's daemons: what they run, and back up, is told,
/// protected, handed over and taken over, and goes on in keepers of this program.
#[test]
#[ignore = "long: builds an older version, some minutes; `make test-long`"]
fn keepers_of_an_older_program_go_on_under_this_ones_daemons_and_are_replaced() {
    let mut options = SceneOptions { booted: false, ..with_keepers() };
    let program = options.binary.clone();
    with_program_of(PREVIOUS_KEEPERS, |previous| {
        let installed = Installed::new(previous, &mut options).expect("a copy of the program");
        play(options, |scene| {
            scene.protected_guest("a", "b")?;
            let client = scene.record_client(PACE)?;
            await_service(&client)?;
            let [old_primary, old_backup] =
                [kept(&told(scene, "a", VM)?)?, kept(&told(scene, "b", VM)?)?];
            installed.upgrade(&program)?;
            for host in ["a", "b"] {
                restart_daemon(scene, host)?;
            }
            ensure!(kept(&scene.await_protected("a", |_| ())?)? == old_primary, "another one");
            ensure!(kept(&told(scene, "b", VM)?)? == old_backup, "another one");
            await_service(&client)?;

            // From the one older keeper to the other, which is protected by a keeper of this program.
            hand_over(scene, &client, "a", "b")?;
            ensure!(kept(&told(scene, "b", VM)?)?.keeper == old_backup.keeper, "another one");
            protect(scene, "b", "a")?;
            restart_daemon(scene, "b")?;
            await_service(&client)?;
            scene.await_protected("b", |_| ())?;
            let plan = scene.host("b")?.call(["upgrade", "--plan"])?;
            ensure!(plan.contains("`understudy upgrade --keepers` replaces it"), "{plan}");

            // What it leaves is understood, the older agent in its QEMU too.
            let words = scene.host("b")?.call(["upgrade", "--keepers"])?;
            let replaced = format!("{VM}: keeper {} is replaced by", old_backup.keeper);
            ensure!(words.contains(&replaced), "not {replaced:?}: {words}");
            await_protected_again(scene, "b")?;
            let now = kept(&told(scene, "b", VM)?)?;
            ensure!(now.qemu == old_backup.qemu && now.keeper != old_backup.keeper, "{now:?}");
            await_service(&client)?;

            // And left once more by a keeper of this program.
            scene.host("b")?.call(["upgrade", "--keepers", VM])?;
            await_service(&client)?;
            await_protected_again(scene, "b")?;
            scene.host_mut("b")?.kill_everything()?;
            prove_survival(scene, client, "a")
        });
    });
}

/// Names a QEMU of another patch release than the installed one.
const OTHER_QEMU: &str = "UNDERSTUDY_OTHER_QEMU";

/// Hosts take over from each other, whose release is older or newer.
#[test]
#[ignore = "needs a second QEMU, UNDERSTUDY_OTHER_QEMU; `make test-kvm` plays it"]
fn hosts_of_two_patch_releases_of_qemu_protect_each_other() {
    let other = std::env::var(OTHER_QEMU).unwrap_or_else(|_| panic!("{OTHER_QEMU} is not set"));
    // Guests that have booted already are the installed QEMU's.
    let mut options = SceneOptions { booted: false, ..options().calm() };
    let settings = format!("qemu = {other:?}\n{}", stage::daemon().calm().settings);
    options.daemons.insert("b".to_owned(), HostOptions { settings, ..stage::daemon() });
    play(options, |scene| {
        let release = |host: &str| -> Result<Value> {
            let status = scene.host(host)?.call(["status", "--json"])?;
            Ok(serde_json::from_str::<Value>(&status)?["qemu_version"].take())
        };
        let [a, b] = [release("a")?, release("b")?];
        ensure!(a != b, "both hosts have QEMU {a}");
        scene.start_guest("a")?;
        scene.await_guest()?;
        let client = scene.record_client(PACE)?;
        protect(scene, "a", "b")?;
        scene.host_mut("a")?.kill_everything()?;
        scene.await_live("b")?;
        await_service(&client)?;
        scene.restart("a")?;
        protect(scene, "b", "a")?;
        scene.host_mut("b")?.kill_everything()?;
        prove_survival(scene, client, "a")
    });
}

/// A VM that version 17 does not know all of is not offered to it in part.
#[test]
#[ignore = "long: builds the previous version, some minutes; `make test-long`"]
fn what_the_previous_version_does_not_know_is_not_offered_to_it() {
    with_previous(|scene, previous| {
        install(scene, "b", Some(previous))?;
        let text = std::fs::read_to_string(scene.definition())?;
        std::fs::write(scene.definition(), format!("autostart = true\n{text}"))?;
        scene.start_guest("a")?;
        let (_, words) =
            stage::refusal(scene.host("a")?, &["protect", VM, "--to", "b", "--no-wait"])?;
        for part in ["wire version 18", "does not fit version 17", "install the same version"] {
            ensure!(words.contains(part), "{words}");
        }
        ensure!(scene.status("a")?["live"] == true, "the guest does not run");
        Ok(())
    });
}

#[test]
fn a_host_is_evacuated_before_its_daemon_is_restarted() {
    play_protected(options().calm(), |scene, client| {
        wait_for("the plan to be to hand it over", LIMIT, || {
            // A machine that stands still makes the backup, or the peer's answer, late.
            let output = scene.host("a")?.cli(["upgrade", "--plan", "--json"])?;
            let plan: Value = serde_json::from_slice(&output.stdout)?;
            ensure!(plan["next"]["wire_highest"] == plan["running"]["wire_highest"], "{plan}");
            let step = &plan["vms"][0];
            let handed_over = step["outcome"] == "handed-over" && step["to"] == "b";
            let fits = plan["peers"][0]["device_state_fits"] == true;
            Ok((handed_over && fits && output.status.success()).then_some(()))
        })?;
        wait_for("the host to be evacuated", LIMIT, || {
            let (code, words) = evacuation(scene, "a")?;
            let done = code == Some(0) && words.contains("the daemon may be restarted");
            Ok(done.then_some(()))
        })?;
        scene.await_live("b")?;
        await_service(&client)?;
        let left = stage::vms(scene.host("a")?)?;
        ensure!(left.iter().all(|vm| vm["role"] != "primary"), "{left:?}");
        // Nothing that runs on host b alone can be evacuated.
        let (code, words) = evacuation(scene, "b")?;
        ensure!(code == Some(1) && words.contains("NEEDS YOU"), "{code:?}: {words}");
        wait_for("host a to be restarted", LIMIT, || {
            Ok(scene.host_mut("a")?.terminate()?.success().then_some(()))
        })?;
        scene.restart("a")?;
        protect(scene, "b", "a")?;
        hand_over(scene, &client, "b", "a")?;
        close(client).map(drop)
    });
}

fn evacuation(scene: &Scene, host: &str) -> Result<(Option<i32>, String)> {
    let output = scene.host(host)?.cli(["upgrade", "--evacuate"])?;
    Ok((output.status.code(), String::from_utf8_lossy(&output.stdout).into_owned()))
}
