//! Tests of what a monitoring system sees of a fail-over, and what its rules make of it.

use crate::keepers::with_keepers;
use crate::stage::{Calm, LIMIT, await_forgotten, options, play};
use anyhow::{Context, Result, ensure};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::Command;
use understudy_lab::scene::VM;
use understudy_lab::{Scene, SceneOptions, in_namespace, wait_for};

pub const ADDRESS: &str = "127.0.0.1:9177";

#[test]
fn lost_protection_shows_in_the_metrics() {
    play_loss(options().calm());
}

/// The counts of keepers are on their daemon's page, and on the next one's.
#[test]
fn lost_protection_of_a_vm_with_a_keeper_shows_in_the_metrics() {
    play_loss(with_keepers());
}

fn play_loss(mut options: SceneOptions) {
    for daemon in options.daemons.values_mut() {
        daemon.settings += &format!("[metrics]\nlisten = \"{ADDRESS}\"\n");
    }
    play(options, |scene| {
        scene.protected_guest("a", "b")?;
        await_line(scene, "a", "vm_protection", ",state=\"protected\"", 1)?;
        await_line(scene, "a", "vm_live", "", 1)?;
        await_count(scene, "a", "vm_checkpoints_total", 10)?;
        await_count(scene, "a", "vm_pause_seconds_count", 10)?;
        await_count(scene, "a", "vm_sent_bytes_total", 1)?;
        await_host(scene, "a", "arbiter_reachable{host=\"a\",kind=\"file\"} 1.0")?;
        await_line(scene, "b", "vm_role", ",role=\"backup\"", 1)?;
        await_line(scene, "b", "vm_live", "", 0)?;
        scene.host_mut("a")?.kill_everything()?;
        await_line(scene, "b", "vm_live", "", 1)?;
        await_line(scene, "b", "vm_protection", ",state=\"degraded\"", 1)?;
        await_count(scene, "b", "vm_outage_seconds_count", 1)?;
        scene.host("b")?.call(["vm", "stop", VM, "--force"])?;
        await_forgotten(scene, "b")
    });
}

/// A caller who only connects once had as many descriptors of the daemon's as it liked.
#[test]
fn who_holds_connections_to_the_metrics_leaves_descriptors_to_others() {
    let mut options = options().calm();
    for daemon in options.daemons.values_mut() {
        daemon.settings += &format!("[metrics]\nlisten = \"{ADDRESS}\"\n");
    }
    play(options, |scene| {
        let connect = || -> Result<TcpStream> {
            Ok(in_namespace(scene.host("a")?.namespace(), || TcpStream::connect(ADDRESS))??)
        };
        let held: Vec<TcpStream> = (0..40).map(|_| connect()).collect::<Result<_>>()?;
        let closed = || {
            let is_closed = |mut socket: &TcpStream| {
                let _ = socket.set_nonblocking(true);
                matches!(socket.read(&mut [0]), Ok(0))
            };
            held.iter().filter(|socket| is_closed(socket)).count()
        };
        wait_for("those over the bound to be closed", LIMIT, || Ok((closed() >= 8).then_some(())))?;
        drop(held);
        wait_for("a page of metrics", LIMIT, || {
            Ok(scrape(scene, "a").is_ok_and(|page| page.contains("understudy_")).then_some(()))
        })
    });
}

#[test]
fn promtool_takes_the_alert_rules_and_they_say_what_they_should() -> Result<()> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/monitoring");
    for arguments in
        [["check", "rules", "understudy.rules.yml"], ["test", "rules", "understudy.rules.test.yml"]]
    {
        let output = Command::new(promtool()?).args(arguments).current_dir(&folder).output()?;
        ensure!(output.status.success(), "promtool {arguments:?}: {output:?}");
    }
    Ok(())
}

fn promtool() -> Result<PathBuf> {
    let unpacked = options().guest_files.join("promtool/usr/bin/promtool");
    let path = std::env::var_os("PATH").unwrap_or_default();
    let installed = std::env::split_paths(&path).map(|folder| folder.join("promtool"));
    let found = installed.chain([unpacked]).find(|path| path.is_file());
    found.context("there is no promtool: run `scripts/setup tests`")
}

/// Waits until the VM has this value.
fn await_line(scene: &Scene, host: &str, metric: &str, label: &str, value: u8) -> Result<()> {
    let line = format!("understudy_{metric}{{vm=\"{VM}\"{label}}} {value}.0");
    wait_for(&line, LIMIT, || {
        let page = scrape(scene, host)?;
        Ok(page.lines().any(|other| other == line).then_some(()))
    })
}

/// Waits until the VM's count is so high.
fn await_count(scene: &Scene, host: &str, metric: &str, least: u64) -> Result<()> {
    let name = format!("understudy_{metric}{{vm=\"{VM}\"}} ");
    wait_for(&format!("{metric} on host {host} to be {least}"), LIMIT, || {
        let page = scrape(scene, host)?;
        let count = page.lines().find_map(|line| line.strip_prefix(&name)?.parse::<u64>().ok());
        Ok(count.is_some_and(|count| count >= least).then_some(()))
    })
}

/// Waits until the host has this line.
pub fn await_host(scene: &Scene, host: &str, line: &str) -> Result<()> {
    let line = format!("understudy_{line}");
    wait_for(&line, LIMIT, || {
        Ok(scrape(scene, host)?.lines().any(|other| other == line).then_some(()))
    })
}

fn scrape(scene: &Scene, host: &str) -> Result<String> {
    in_namespace(scene.host(host)?.namespace(), || {
        let mut connection = TcpStream::connect(ADDRESS).context("no metrics")?;
        connection.write_all(b"GET /metrics HTTP/1.0\r\n\r\n")?;
        let mut page = String::new();
        connection.read_to_string(&mut page)?;
        Ok(page)
    })?
}
