//! Live migration of a plain guest: what QEMU itself offers to move a machine, and
//! how long the guest stands still for it.
//!
//! Source and target run on one host with the same disks, as with shared storage:
//! QEMU hands the images over at the switch (their locks, and what is not flushed).
//! The stream goes through a unix socket, the fastest link that two QEMUs can have.

use crate::lab::Lab;
use crate::plain::PlainGuest;
use crate::qmp::Event;
use crate::wait::wait_for;
use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use std::thread;
use std::time::{Duration, Instant};

/// Time for a cancelled migration to be over, and for the target to run after the switch.
const END_LIMIT: Duration = Duration::from_secs(20);
/// Time between two looks at QEMU's events.
const GLANCE: Duration = Duration::from_millis(10);
const SOCKET: &str = "migration";

/// Limits within which QEMU may switch over.
#[derive(Clone, Copy, Debug)]
pub struct MigrationLimits {
    /// `downtime-limit`: how long the rest may take, as QEMU estimates it.
    pub downtime: Duration,
    /// `max-bandwidth`: bytes a second while the guest runs.
    pub bandwidth: u64,
}

impl Default for MigrationLimits {
    /// QEMU's own.
    fn default() -> MigrationLimits {
        MigrationLimits { downtime: Duration::from_millis(300), bandwidth: 128 << 20 }
    }
}

/// A migration that came to its end.
#[derive(Clone, Copy, Debug)]
pub struct Migration {
    /// Time from the event `STOP` of the source to the event `RESUME` of the target.
    pub downtime: Duration,
    /// The downtime that QEMU reports, in whole milliseconds.
    pub reported: Duration,
    /// The whole migration.
    pub total: Duration,
    /// Number of times that QEMU went over the guest's written pages.
    pub rounds: u64,
    /// Bytes that went over the socket.
    pub bytes: u64,
}

impl PlainGuest {
    /// Moves the running guest to a fresh QEMU on the same host; its connections live
    /// on. None if QEMU has not found the moment to switch within `patience`: then
    /// the guest stays where it is.
    pub fn migrate(
        &mut self,
        lab: &Lab,
        limits: &MigrationLimits,
        patience: Duration,
    ) -> Result<Option<Migration>> {
        self.hops += 1;
        let tap = format!("{}-{}", self.home.options.name, self.hops);
        let target = self.home.start_plain(lab, &tap, true).context("the target of a migration")?;
        let socket = self.home.directory.path().join(format!("{tap}/{SOCKET}"));
        let uri = format!("unix:{}", socket.display());
        target.execute("migrate-incoming", json!({"uri": uri}))?;
        let source = &self.emulator;
        source.execute("migrate-set-capabilities", capability("events"))?;
        let downtime = limits.downtime.as_millis() as u64;
        let parameters = json!({"downtime-limit": downtime, "max-bandwidth": limits.bandwidth});
        source.execute("migrate-set-parameters", parameters)?;
        let known = source.events().count();
        source.execute("migrate", json!({"uri": uri}))?;
        if !self.await_switch(known, patience)? {
            return Ok(None);
        }
        let stopped = source.events().last("STOP", known).context("the source did not stop")?;
        let resumed = wait_for("the target to run the guest", END_LIMIT, || {
            Ok(target.events().last("RESUME", 0))
        })?;
        let report = source.execute("query-migrate", json!({}))?;
        // The source goes with its tap and its copy of the guest.
        self.emulator = target;
        Migration::of(&stopped, &resumed, &report).map(Some)
    }

    /// Waits for the end of the migration that began after so many events; whether the
    /// guest has moved.
    fn await_switch(&self, known: usize, patience: Duration) -> Result<bool> {
        let end = || {
            let event = self.emulator.events().last("MIGRATION", known);
            let status = event.map_or(Value::Null, |mut event| event.data["status"].take());
            match status.as_str() {
                Some("completed") => Ok(Some(true)),
                Some("cancelled") => Ok(Some(false)),
                Some("failed") => {
                    let report = self.emulator.execute("query-migrate", json!({}))?;
                    bail!("the migration failed: {}", report["error-desc"]);
                }
                _ => Ok(None),
            }
        };
        let begun = Instant::now();
        while begun.elapsed() < patience {
            if let Some(moved) = end()? {
                return Ok(moved);
            }
            thread::sleep(GLANCE);
        }
        self.emulator.execute("migrate_cancel", json!({}))?;
        // It may have found its moment at the last.
        wait_for("the cancelled migration's end", END_LIMIT, end)
    }
}

impl Migration {
    fn of(stopped: &Event, resumed: &Event, report: &Value) -> Result<Migration> {
        let number = |value: &Value| {
            value.as_u64().with_context(|| format!("query-migrate lacks a number: {report}"))
        };
        let micros = resumed.micros.checked_sub(stopped.micros);
        Ok(Migration {
            downtime: Duration::from_micros(micros.context("it resumed before it stopped")?),
            reported: Duration::from_millis(number(&report["downtime"])?),
            total: Duration::from_millis(number(&report["total-time"])?),
            rounds: number(&report["ram"]["dirty-sync-count"])?,
            bytes: number(&report["ram"]["transferred"])?,
        })
    }
}

/// The arguments that switch a capability of migrations on.
pub(crate) fn capability(name: &str) -> Value {
    json!({"capabilities": [{"capability": name, "state": true}]})
}
