//! What a monitoring system sees of a fail-over.

use crate::stage::{Calm, LIMIT, options, play};
use anyhow::{Context, Result};
use std::io::{Read, Write};
use std::net::TcpStream;
use understudy_lab::scene::VM;
use understudy_lab::{Scene, in_namespace, wait_for};

const ADDRESS: &str = "127.0.0.1:9177";

#[test]
fn lost_protection_shows_in_the_metrics() {
    let mut options = options().calm();
    for daemon in options.daemons.values_mut() {
        daemon.settings += &format!("[metrics]\nlisten = \"{ADDRESS}\"\n");
    }
    play(options, |scene| {
        scene.protected_guest("a", "b")?;
        await_line(scene, "a", "vm_protection", ",state=\"protected\"", 1)?;
        await_line(scene, "a", "vm_live", "", 1)?;
        await_line(scene, "b", "vm_role", ",role=\"backup\"", 1)?;
        await_line(scene, "b", "vm_live", "", 0)?;
        scene.host_mut("a")?.kill_everything()?;
        await_line(scene, "b", "vm_live", "", 1)?;
        await_line(scene, "b", "vm_protection", ",state=\"degraded\"", 1)
    });
}

/// Waits until the VM has this value.
fn await_line(scene: &Scene, host: &str, metric: &str, label: &str, value: u8) -> Result<()> {
    let line = format!("understudy_{metric}{{vm=\"{VM}\"{label}}} {value}.0");
    wait_for(&line, LIMIT, || {
        let page = scrape(scene, host)?;
        Ok(page.lines().any(|other| other == line).then_some(()))
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
