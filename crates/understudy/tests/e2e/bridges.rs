//! Bridges that go, and are made anew, under a VM that runs and under its backup.

use crate::keepers::in_keepers;
use crate::metrics::{ADDRESS, await_host};
use crate::refusals::{definition, quick, write};
use crate::stage::{LIMIT, play, protect, protection};
use anyhow::{Context, Result, ensure};
use serde_json::Value;
use understudy_lab::{Scene, SceneOptions, wait_for};

fn ip(scene: &Scene, host: &str, arguments: &str) -> Result<()> {
    let mut command = scene.lab().host(host)?.command("ip");
    let output = command.args(arguments.split(' ')).output()?;
    ensure!(output.status.success(), "ip {arguments}: {output:?}");
    Ok(())
}

fn make_bridge(scene: &Scene, host: &str) -> Result<()> {
    ip(scene, host, "link add br1 type bridge")?;
    ip(scene, host, "link set br1 up")
}

/// Waits until the VM of host a is so.
fn await_status(scene: &Scene, what: &str, is: impl Fn(&Value) -> bool) -> Result<()> {
    wait_for(what, LIMIT, || Ok(is(&scene.host("a")?.status("extra")?).then_some(())))
}

/// The one port of the bridge on a host: the tap of the VM's card.
fn tap_on(scene: &Scene, host: &str) -> Result<String> {
    let output = scene.lab().host(host)?.ip(&["-brief", "link", "show", "master", "br1"])?;
    let tap = output.split_whitespace().next().with_context(|| format!("no port: {output}"))?;
    Ok(tap.to_owned())
}

/// Nothing brings a tap back, and nothing was said of it: "protected", by a backup whose guest nobody would have heard.
fn taps_that_are_removed(scene: &Scene) -> Result<()> {
    let removed = |text: &str| text.contains("was removed from this host");
    let remove = |host: &str| -> Result<()> {
        let tap = tap_on(scene, host)?;
        ip(scene, host, &format!("link del {tap}"))
    };
    remove("b")?;
    await_status(scene, "host b to be no backup without its tap", |status| {
        let (state, reason) = protection(status);
        state == "degraded" && reason.contains("could not take over now") && removed(reason)
    })?;
    remove("a")?;
    await_status(scene, "host a to say that its tap is gone", |status| {
        status["cards"][0]["problem"].as_str().is_some_and(removed)
    })
}

/// Its tap was on no bridge from then on, nobody noticed, and a take-over led to where nothing was heard.
#[test]
fn a_bridge_that_is_made_anew_has_its_ports_again() {
    play_anew(quick());
}

/// What a keeper found wrong with its host stayed with the keeper: neither `status` nor an alert told of it.
#[test]
fn a_bridge_that_is_made_anew_under_a_vm_with_a_keeper_has_its_ports_again() {
    play_anew(in_keepers(quick()));
}

fn play_anew(mut options: SceneOptions) {
    for daemon in options.daemons.values_mut() {
        daemon.settings += &format!("[metrics]\nlisten = \"{ADDRESS}\"\n");
    }
    play(options, |scene| {
        for host in ["a", "b"] {
            make_bridge(scene, host)?;
        }
        let text = definition(scene, "extra")?.replace("br0", "br1");
        let path = write(scene, "extra.toml", &text)?;
        scene.host("a")?.call(["vm", "start", &path.to_string_lossy()])?;
        protect(scene.host("a")?, "extra", &["--to", "b"])?;
        ip(scene, "b", "link del br1")?;
        await_status(scene, "host b to say that its bridge is gone", |status| {
            protection(status).1.contains("bridge br1 does not exist")
        })?;
        make_bridge(scene, "b")?;
        await_status(scene, "host b to be fit again", |status| {
            protection(status).0 == "protected"
        })?;
        ip(scene, "a", "link del br1")?;
        await_status(scene, "host a to say that its bridge is gone", |status| {
            status["cards"][0]["problem"].as_str().is_some_and(|it| it.contains("br1"))
        })?;
        await_host(scene, "a", "host_problems{host=\"a\"} 1.0")?;
        // A keeper that is silent just then is not in it.
        wait_for("`status` to say what is wrong", LIMIT, || {
            let told = scene.host("a")?.call(["status"])?;
            Ok(told.contains("WRONG: extra is not connected").then_some(()))
        })?;
        make_bridge(scene, "a")?;
        await_status(scene, "the card to be on its bridge", |status| {
            status["cards"][0]["problem"].is_null()
                && status["events"].to_string().contains("which was made anew")
        })?;
        await_host(scene, "a", "host_problems{host=\"a\"} 0.0")?;
        taps_that_are_removed(scene)?;
        scene.host("a")?.call(["vm", "stop", "extra", "--force"])?;
        for host in ["a", "b"] {
            ip(scene, host, "link del br1")?;
        }
        Ok(())
    });
}
