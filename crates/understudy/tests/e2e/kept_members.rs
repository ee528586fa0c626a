//! Tests of which VMs come into a keeper: what its daemon has examined, and what belongs to its
//! group.

use crate::keepers::{kept, signal_keeper, told};
use crate::peer::{MadeUpPeer, message, refusal_of_keeper};
use crate::refusals::{definition, log_of, quick, with_peers, write};
use crate::stage::{LIMIT, await_forgotten, play, refusal, run, vms};
use anyhow::{Context, Result, ensure};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use std::fs;
use std::os::unix::net::UnixStream;
use understudy_lab::scene::VM;
use understudy_lab::{HostOptions, Scene, SceneOptions, wait_for};
use understudy_protocol::wire::Kind;

/// Another VM of the same kind.
const OTHER: &str = "other";

/// A daemon that has keepers, and these groups.
fn keeping(mut daemon: HostOptions, groups: &str) -> HostOptions {
    daemon.settings.insert_str(0, "keepers = true\n");
    daemon.settings += groups;
    daemon
}

fn all_keeping(mut options: SceneOptions, groups: &str) -> SceneOptions {
    for daemon in options.daemons.values_mut() {
        *daemon = keeping(std::mem::take(daemon), groups);
    }
    options
}

fn group_of(vms: &[&str]) -> String {
    format!("[groups]\nshop = {vms:?}\n")
}

/// Starts the other VM on host a.
fn start_other(scene: &Scene) -> Result<()> {
    let path = write(scene, "other.toml", &definition(scene, OTHER)?)?;
    scene.host("a")?.call(["vm", "start", &path.to_string_lossy()]).map(drop)
}

fn keeper_of(scene: &Scene, vm: &str) -> Result<u64> {
    Ok(kept(&told(scene, "a", vm)?)?.keeper)
}

fn stop(scene: &Scene, vms: &[&str]) -> Result<()> {
    for vm in vms {
        scene.host("a")?.call(["vm", "stop", vm, "--force"])?;
    }
    await_forgotten(scene, "a")
}

/// An offer that host a makes, to be changed and said by hand to host b.
fn genuine(scene: &Scene) -> Result<Value> {
    let peer = MadeUpPeer::start(scene, message(Kind::Refuse, b"only asking"))?;
    refusal(scene.host("a")?, &["protect", VM, "--to", "madeup"])?;
    let mut hello = peer.hello()?;
    hello["keeper_of"] = json!(VM);
    // The other one is host a's, too, as the arbiter says.
    let record = scene.lab().arbiter_directory().join(OTHER);
    fs::create_dir(&record)?;
    fs::write(record.join("1"), r#"{"host":"a"}"#)?;
    Ok(hello)
}

/// The same as the second VM of a group, of which it is offered by that place.
fn in_group(hello: &Value, place: usize) -> Value {
    let mut hello = hello.clone();
    let generation = hello["purpose"]["generation"].clone();
    let members = json!([{ "vm": VM, "generation": generation }, { "vm": OTHER, "generation": 1 }]);
    let membership = json!({ "name": "shop", "members": members });
    hello["purpose"]["group"] = json!({ "membership": membership, "place": place });
    if place == 1 {
        hello["purpose"]["definition"]["name"] = json!(OTHER);
        hello["purpose"]["generation"] = json!(1);
        hello["keeper_of"] = json!(OTHER);
    }
    hello
}

fn bytes(hello: &Value) -> Vec<u8> {
    message(Kind::Hello, hello.to_string().as_bytes())
}

/// The first hello was examined, and the second one did as it liked: it brought more memory, another VM's address, or
/// another VM.
#[test]
fn a_keeper_takes_the_offer_that_its_daemon_has_examined_and_no_other() {
    let mut options = with_peers();
    let insecure = HostOptions { insecure: true, ..options.daemons["b"].clone() };
    options.daemons.insert("b".to_owned(), keeping(insecure, ""));
    play(options, |scene| {
        scene.start_guest("a")?;
        let genuine = genuine(scene)?;
        let changed = |field: &str, value: Value| {
            let mut hello = genuine.clone();
            hello["purpose"]["definition"][field] = value;
            (genuine.clone(), hello)
        };
        let mut beats = genuine.clone();
        beats["purpose"] = json!({ "purpose": "heartbeat", "session": "made up", "path": 0 });
        let card = json!([{ "mac": "52:54:00:75:73:09", "bridge": "br0" }]);
        let forgeries = [
            changed("memory", json!("66M")),
            changed("card", card),
            (genuine.clone(), beats),
            (in_group(&genuine, 0), in_group(&genuine, 1)),
        ];
        for (first, again) in forgeries {
            let said = refusal_of_keeper(scene, "b", &bytes(&first), &bytes(&again))?;
            ensure!(said.contains("answers nothing else"), "{said}");
            // It ends as soon as it is clear that nothing comes: the name is free.
            await_forgotten(scene, "b")?;
        }
        scene.protect("a", "b")?;
        scene.await_protected("a", |_| ())?;
        scene.host("a")?.call(["unprotect", VM])?;
        await_forgotten(scene, "b")
    });
}

/// Another host's group of the same name is another one. They met in one keeper.
#[test]
fn two_groups_of_one_name_do_not_meet_in_one_keeper() {
    play(all_keeping(quick(), &group_of(&[OTHER, "absent"])), |scene| {
        start_other(scene)?;
        scene.start_guest("a")?;
        scene.host("a")?.call(["vm", "stop", VM, "--force"])?;
        // As if it had come here with the group of another host.
        let file = scene.host("a")?.directory().join("state").join(VM).join("record.json");
        let mut record: Value = serde_json::from_str(&fs::read_to_string(&file)?)?;
        record["group"] = json!({ "name": "shop", "vms": [VM, "companion"] });
        fs::write(&file, record.to_string())?;
        scene.host("a")?.call(["vm", "start", VM])?;
        ensure!(keeper_of(scene, VM)? != keeper_of(scene, OTHER)?, "they share one");
        stop(scene, &[VM, OTHER])
    });
}

/// The keeper knew the groups of its own start, and refused the VM.
#[test]
fn a_vm_that_is_added_to_a_group_which_runs_starts_in_its_keeper() {
    play(all_keeping(quick(), &group_of(&[VM, "absent"])), |scene| {
        scene.start_guest("a")?;
        scene.host_mut("a")?.kill_daemon()?;
        let mut added = all_keeping(quick(), &group_of(&[VM, "absent", OTHER]));
        let daemon = added.daemons.remove("a").context("no host a")?;
        scene.revive_with("a", daemon)?;
        start_other(scene)?;
        ensure!(keeper_of(scene, VM)? == keeper_of(scene, OTHER)?, "they share none");
        stop(scene, &[VM, OTHER])
    });
}

#[test]
fn a_keeper_that_shuts_down_refuses_what_would_start_in_it() {
    let groups = format!("[shutdown]\npower_off_seconds = 3600\n{}", group_of(&[VM, OTHER]));
    play(all_keeping(quick(), &groups), |scene| {
        scene.start_guest("a")?;
        let status = scene.status("a")?;
        signal_keeper(&status, Signal::SIGTERM)?;
        wait_for("the keeper to shut its guest down", LIMIT, || {
            Ok(log_of(scene, "a")?.contains("shutting down guest").then_some(()))
        })?;
        let path = write(scene, "other.toml", &definition(scene, OTHER)?)?;
        let start = ["vm", "start", &path.to_string_lossy()];
        let (_, words) = refusal(scene.host("a")?, &start)?;
        ensure!(words.contains("is just ending: try again"), "{words}");
        ensure!(vms(scene.host("a")?)?.len() == 1, "there is something of it");
        // The guest never powers off; who signals twice does not wait for that.
        signal_keeper(&status, Signal::SIGTERM)?;
        await_forgotten(scene, "a")?;
        scene.host("a")?.call(start)?;
        ensure!(keeper_of(scene, OTHER)? != kept(&status)?.keeper, "in one that has ended");
        stop(scene, &[OTHER])
    });
}

/// A keeper without a descriptor once asked for one again and again, without a pause.
#[test]
fn a_keeper_that_has_no_descriptor_for_a_connection_waits_for_one() {
    play(all_keeping(quick(), ""), |scene| {
        scene.start_guest("a")?;
        let keeper = keeper_of(scene, VM)?.to_string();
        let allow = |most: u32| run("prlimit", &["--pid", &keeper, &format!("--nofile={most}:")]);
        allow(8)?;
        let socket = scene.host("a")?.directory().join("state").join(VM).join("peers.sock");
        let waiting = UnixStream::connect(socket)?;
        wait_for("the keeper to say that it has none", LIMIT, || {
            Ok(log_of(scene, "a")?.contains("have to wait").then_some(()))
        })?;
        allow(1024)?;
        drop(waiting);
        wait_for("the keeper to answer", LIMIT, || {
            Ok((scene.status("a")?["live"] == true).then_some(()))
        })?;
        stop(scene, &[VM])
    });
}

/// A VM whose keeper had been killed was once in no status for a quarter of a second.
#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn a_vm_whose_keeper_has_just_been_killed_is_said_to_be_lost() {
    let mut options = all_keeping(quick(), "");
    // Nobody looks whether keepers have ended.
    let unseen = ("FAILPOINTS".to_owned(), "look-at-keepers=pause".to_owned());
    options.daemons.get_mut("a").expect("host a's").environment.push(unseen);
    play(options, |scene| {
        scene.start_guest("a")?;
        signal_keeper(&scene.status("a")?, Signal::SIGKILL)?;
        let lost = wait_for("its loss to be known", LIMIT, || {
            let status = scene.status("a")?;
            Ok((status["role"] == "fenced").then_some(status))
        })?;
        for words in ["was killed", "understudy recover"] {
            ensure!(lost["protection"].to_string().contains(words), "{lost}");
        }
        let shown = scene.host("a")?.cli(["status", VM])?;
        ensure!(String::from_utf8_lossy(&shown.stdout).contains("was killed"), "{shown:?}");
        stop(scene, &[VM])
    });
}
