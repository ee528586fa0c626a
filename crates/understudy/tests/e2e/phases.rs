//! Failures at each phase of the protocol, as in Remus (NSDI'08, 3.2): the
//! primary dies right there, under a compile-like load and a chattering client.
//!
//! One guest lives through all the failures of a test: each time, the survivor
//! is protected by the host that has just died. Both daemons are armed from
//! their start; only the primary's passes the points.

use crate::deaths::{await_empty, await_rounds, unharmed};
use crate::refusals::log_of;
use crate::stage::{
    Calm, LIMIT, LOAD_PACE, PACE, await_service, daemon_passing, options, play, prove_survival,
};
use anyhow::{Context, Result, ensure};
use understudy_lab::scene::RECORDS_PORT;
use understudy_lab::{ChatterClient, HostOptions, Load, Scene, SceneOptions, wait_for};

/// Deaths at each phase.
const DEATHS: u64 = 3;
/// Deaths of one guest's hosts in the long test.
const MANY_DEATHS: u64 = 50;
const CONNECTIONS: usize = 4;
/// Load that leaves the guest some time for its clients.
const LOAD: &str = "mkdir -p /data/load; exec nice guest-tools load /data/load 100";

/// A daemon that dies when it passes `point` in its Nth checkpoint.
fn armed(point: &str, seed: u64) -> HostOptions {
    // Any spread will do, as long as it is the same in every run.
    let checkpoints = 5 + seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) % 35;
    let actions = format!("{point}={checkpoints}*off->panic");
    daemon_passing(actions)
}

fn armed_options(point: &str) -> SceneOptions {
    let mut options = options().calm();
    options.daemons.insert("a".to_owned(), armed(point, 0));
    options.daemons.insert("b".to_owned(), armed(point, 1));
    options
}

fn primaries_die(point: &str, deaths: u64) {
    // The first host may die as soon as its guest is protected: all is under way before, and the test
    // has no more to do then than to watch.
    play(armed_options(point), |scene| {
        scene.start_guest("a")?;
        scene.await_guest()?;
        let client = scene.record_client(PACE)?;
        await_service(&client)?;
        let lab = scene.lab();
        let pings = ChatterClient::start(
            lab,
            scene.guest(RECORDS_PORT),
            CONNECTIONS,
            Load::Pings,
            LOAD_PACE,
        )?;
        scene.shell()?.start(LOAD)?;
        scene.protect("a", "b")?;
        let (mut victim, mut survivor) = ("a", "b");
        for death in 1..=deaths {
            await_death(scene, victim, point)
                .with_context(|| format!("death {death}, of host {victim}"))?;
            scene.await_live(survivor)?;
            await_service(&client)?;
            await_rounds(&pings, 1)?;
            if death < deaths {
                // Never armed before it is dead: its points are counted anew.
                scene.restart_with(victim, armed(point, death + 1))?;
                scene.protect(survivor, victim)?;
                (victim, survivor) = (survivor, victim);
            }
        }
        unharmed(&pings.stop())?;
        prove_survival(scene, client, survivor)
    });
}

/// Waits until a host has died of its fail point, QEMU included.
fn await_death(scene: &mut Scene, host: &str, point: &str) -> Result<()> {
    let daemon = scene.host_mut(host)?;
    wait_for("the daemon to die", LIMIT, || Ok((!daemon.is_running()).then_some(())))?;
    let cause = format!("failpoint {point} panic");
    ensure!(log_of(scene, host)?.contains(&cause), "host {host} did not die of `{cause}`");
    await_empty(scene, host)
}

#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn primaries_die_while_the_guest_is_paused() {
    primaries_die("while-paused", DEATHS);
}

#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn primaries_die_before_an_epoch_is_whole() {
    primaries_die("before-epoch-end", DEATHS);
}

#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn primaries_die_when_an_epoch_is_sent() {
    primaries_die("after-epoch-end", DEATHS);
}

#[test]
#[cfg_attr(not(feature = "fail-points"), ignore = "needs `--features fail-points`")]
fn primaries_die_before_output_is_released() {
    primaries_die("before-release", DEATHS);
}

#[test]
#[ignore = "long: `make test-long`"]
fn one_guest_outlives_many_hosts() {
    primaries_die("before-release", MANY_DEATHS);
}
