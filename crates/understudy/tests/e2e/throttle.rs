//! A guest that writes faster than a slow link carries.

use crate::stage::{Calm, await_service, daemon, options, play_protected, prove_survival};
use anyhow::{Result, ensure};
use serde_json::Value;
use std::time::Duration;
use understudy_lab::{HostOptions, Scene, SceneOptions, wait_for};
use understudy_protocol::Policy;

/// 6 MB/s: some 1 500 pages. A guest that gets a quarter of a busy machine's processor writes more.
const SLOW_MBITS: u32 = 50;
/// No link of that speed carries as much noise in a second.
const MOST_PAGES: u64 = 5_000;
/// Noise, which no encoding makes smaller.
const MAKE_NOISE: &str = "for i in 1 2; do dd if=/dev/urandom of=/tmp/$i bs=64k count=300; done";
/// Writes 20 MB of it over and over, as fast as the guest can.
const LOAD: &str = "while :; do cat /tmp/1 > /tmp/out; cat /tmp/2 > /tmp/out; done";
/// Writes as much at once, and then nothing until the link is idle again, over and over. Never the
/// same twice: a page that is written as it was costs the link nothing.
const BURSTS: &str = "while :; do for i in 1 2; do cat /tmp/$i > /tmp/out; sleep 3; done; done";

/// The part of `status` about the guest's throttle.
fn throttle(scene: &Scene) -> Result<Value> {
    Ok(scene.status("a")?["throttle"].clone())
}

/// Time for many of a guest's bursts: which of them meets the end of an epoch is chance.
const PATIENCE: Duration = Duration::from_secs(180);

fn await_throttle(scene: &Scene, what: &str, wanted: impl Fn(&Value) -> bool) -> Result<Value> {
    wait_for(what, PATIENCE, || {
        let throttle = throttle(scene)?;
        Ok(wanted(&throttle).then_some(throttle))
    })
}

fn percent(throttle: &Value) -> u64 {
    throttle["vcpu_percent"].as_u64().unwrap_or_default()
}

#[test]
fn a_guest_that_outruns_the_link_is_slowed_down_and_loses_nothing() {
    let options = SceneOptions { policy: Some(Policy::Interval { hz: 4 }), ..options().calm() };
    play_protected(options, |scene, client| {
        scene.lab().limit_speed("b", SLOW_MBITS)?;
        let mut shell = scene.shell()?;
        shell.run(MAKE_NOISE)?;
        let load = shell.start(LOAD)?;
        await_throttle(scene, "the link to be known and the guest slowed down", |throttle| {
            let known = throttle["link_pages_per_second"].as_u64();
            percent(throttle) < 100 && known.is_some_and(|rate| rate < MOST_PAGES)
        })?;
        await_service(&client)?;
        shell.run(&format!("kill {load}"))?;
        await_throttle(scene, "the guest to get its processors back", |throttle| {
            percent(throttle) == 100
        })?;
        // The link is known by now, and idle before each burst: its first epoch does not get far.
        shell.start(BURSTS)?;
        await_throttle(scene, "an epoch to be cut short", |throttle| {
            throttle["cut_short"].as_u64() > Some(0)
        })?;
        shell.start(LOAD)?;
        await_throttle(scene, "the guest to be slowed down again", |throttle| {
            percent(throttle) < 100
        })?;
        await_service(&client)?;
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")
    });
}

#[test]
fn without_control_groups_the_status_says_so_and_nothing_is_lost() {
    let mut options = options().calm();
    let bare = HostOptions { without_control_groups: true, ..daemon().calm() };
    options.daemons.insert("a".to_owned(), bare);
    play_protected(options, |scene, client| {
        scene.lab().limit_speed("b", SLOW_MBITS)?;
        let mut shell = scene.shell()?;
        shell.run(MAKE_NOISE)?;
        shell.start(LOAD)?;
        let throttle = await_throttle(scene, "status to say what is missing", |throttle| {
            throttle["unavailable"].is_string()
        })?;
        let reason = throttle["unavailable"].as_str().unwrap_or_default();
        ensure!(reason.contains("control group"), "{reason}");
        ensure!(percent(&throttle) == 100, "{throttle}");
        scene.host_mut("a")?.kill_everything()?;
        prove_survival(scene, client, "b")
    });
}
