//! Commands to QEMU.

use super::connection::{Connection, Message, QemuVersion, QmpError};
use super::device_state::DeviceState;
use super::events::Events;
use super::ram_blocks::{self, RamBlockInfo};
use super::sockets::{MONITORS, MonitorSockets};
use crate::tsc::TscRate;
#[cfg(feature = "fail-points")]
use qapi::qmp::migrate;
use qapi::qmp::{
    HumanReadableText, MigrationCapability, MigrationCapabilityStatus, RunState, cont,
    migrate_incoming, migrate_set_capabilities, qom_get, query_cpus_fast, query_migrate,
    query_status, quit, stop, system_powerdown, system_reset, x_query_ramblock,
    xen_save_devices_state,
};
use qapi::{Command, Empty};
use serde::Deserialize;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
#[cfg(feature = "fail-points")]
use std::path::Path;
use std::time::Duration;

/// QEMU's monitors.
///
/// After a [`QmpError::Timeout`] or [`QmpError::Closed`] it is of no more use,
/// nor is its QEMU.
#[derive(Debug)]
pub struct Monitor {
    connection: Connection,
    /// Connection that only saves device states: its long command waits here, sent up to its
    /// last brace, while `connection` stops the guest.
    saver: Connection,
    /// Socket of the events, which [`Events`] reads.
    events: UnixStream,
    version: QemuVersion,
}

#[derive(Deserialize)]
struct Migration {
    #[serde(rename = "blocked-reasons", default)]
    blocked_reasons: Vec<String>,
}

#[derive(Deserialize)]
struct Status {
    status: RunState,
}

#[derive(Deserialize)]
#[serde(rename_all = "kebab-case")]
struct Cpu {
    qom_path: String,
}

impl Monitor {
    /// Waits for QEMU's greetings and negotiates; `timeout` is for each answer,
    /// then and later. What QEMU tells by itself the caller hears.
    pub fn connect(
        sockets: MonitorSockets,
        timeout: Duration,
    ) -> Result<(Monitor, Events), QmpError> {
        let [commands, saver, events] = sockets.0;
        let (connection, version) = Connection::open(commands, timeout)?;
        let (saver, _) = Connection::open(saver, timeout)?;
        let duplicate = events.try_clone().map_err(QmpError::Io)?;
        let events = Events::of(Connection::open(events, timeout)?.0);
        Ok((Monitor { connection, saver, events: duplicate, version }, events))
    }

    /// The same for monitors that another process has negotiated, and left in the midst of
    /// anything. [`Monitor::catch_up`] comes before all else.
    pub fn adopt(
        sockets: MonitorSockets,
        version: QemuVersion,
        timeout: Duration,
    ) -> Result<(Monitor, Events), QmpError> {
        let [commands, saver, events] = sockets.0;
        let connection = Connection::adopt(commands, timeout)?;
        let saver = Connection::adopt(saver, timeout)?;
        let duplicate = events.try_clone().map_err(QmpError::Io)?;
        Ok((Monitor { connection, saver, events: duplicate, version }, Events::adopt(events)))
    }

    /// Leaves behind what was asked before; returns when QEMU listens.
    pub fn catch_up(&mut self) -> Result<(), QmpError> {
        self.connection.catch_up()?;
        self.saver.catch_up()
    }

    /// The sockets, for [`Monitor::adopt`] in another process.
    pub fn duplicate(&self) -> io::Result<[OwnedFd; MONITORS]> {
        let events = self.events.try_clone()?.into();
        Ok([self.connection.duplicate()?, self.saver.duplicate()?, events])
    }

    /// QEMU's version.
    pub fn version(&self) -> QemuVersion {
        self.version
    }

    /// Stops the vCPUs, drains and flushes the disks.
    pub fn stop(&mut self) -> Result<(), QmpError> {
        self.simple(&stop {})
    }

    /// Lets the vCPUs run.
    pub fn cont(&mut self) -> Result<(), QmpError> {
        self.simple(&cont {})
    }

    /// Presses the machine's power button; a guest that listens powers off.
    pub fn system_powerdown(&mut self) -> Result<(), QmpError> {
        self.simple(&system_powerdown {})
    }

    /// Presses the machine's reset button.
    pub fn system_reset(&mut self) -> Result<(), QmpError> {
        self.simple(&system_reset {})
    }

    /// Ends QEMU; [`crate::Qemu::wait`] sees it.
    pub fn quit(&mut self) -> Result<(), QmpError> {
        match self.simple(&quit {}) {
            Err(QmpError::Closed) => Ok(()),
            other => other,
        }
    }

    /// The state in which the machine is at the moment.
    pub fn status(&mut self) -> Result<RunState, QmpError> {
        let status: Status = self.connection.execute(&query_status {})?;
        Ok(status.status)
    }

    /// The reasons why this machine's state cannot be saved, in QEMU's words; nothing if it can.
    pub fn blockers(&mut self) -> Result<Vec<String>, QmpError> {
        let migration: Migration = self.connection.execute(&query_migrate {})?;
        Ok(migration.blocked_reasons)
    }

    /// The rate of the guest's time stamp counter; none if QEMU knows none, as under TCG.
    pub fn tsc_rate(&mut self) -> Result<Option<TscRate>, QmpError> {
        let cpus: Vec<Cpu> = self.connection.execute(&query_cpus_fast {})?;
        let malformed = |reason: &str| {
            let reason = reason.to_owned();
            QmpError::Malformed { command: query_cpus_fast::NAME, reason }
        };
        let first = cpus.into_iter().next().ok_or_else(|| malformed("there is no processor"))?;
        let property = "tsc-frequency".to_owned();
        let hertz: u64 = self.connection.execute(&qom_get { path: first.qom_path, property })?;
        let rate = u32::try_from(hertz / 1000).map_err(|_| malformed("an impossible rate"))?;
        Ok((rate > 0).then_some(TscRate(rate)))
    }

    /// The machine's RAM blocks. All of them belong to its state.
    pub fn ram_blocks(&mut self) -> Result<Vec<RamBlockInfo>, QmpError> {
        let command = x_query_ramblock {};
        let table: HumanReadableText = self.connection.execute(&command)?;
        ram_blocks::parse(&table.human_readable_text)
            .map_err(|reason| QmpError::Malformed { command: x_query_ramblock::NAME, reason })
    }

    /// Begins a checkpoint: stops the guest.
    pub fn begin_checkpoint<'a>(
        &'a mut self,
        state: &'a DeviceState,
    ) -> Result<Checkpoint<'a>, QmpError> {
        self.prime_checkpoint(state)?;
        self.connection.fire();
        self.connection.prime(&cont {})?;
        self.connection.flush()?;
        Ok(Checkpoint { monitor: self, state })
    }

    /// Sends a checkpoint's commands up to their last braces.
    fn prime_checkpoint(&mut self, state: &DeviceState) -> Result<(), QmpError> {
        // After an abandoned checkpoint, answers may be outstanding.
        if !self.saver.is_primed(xen_save_devices_state::NAME) {
            self.saver.settle()?;
        }
        if !self.connection.is_primed(stop::NAME) {
            self.connection.settle()?;
        }
        let filename = state.path_in_qemu();
        // `live: true` would hand the disks over, as at the end of a migration.
        self.saver.prime(&xen_save_devices_state { filename, live: Some(false) })?;
        self.saver.flush()?;
        self.connection.prime(&stop {})?;
        self.connection.flush()
    }

    /// Makes a standby ready to load this device state, and to report how that
    /// goes; call it before [`Monitor::go_live`] is needed in a hurry.
    pub fn prepare_standby(&mut self, state: &DeviceState) -> Result<(), QmpError> {
        let events =
            MigrationCapabilityStatus { capability: MigrationCapability::events, state: true };
        self.simple(&migrate_set_capabilities { capabilities: vec![events] })?;
        let uri = Some(format!("file:{}", state.path_in_qemu()));
        self.connection.prime(&migrate_incoming { channels: None, exit_on_error: None, uri })?;
        self.connection.flush()
    }

    /// Loads the device state into a standby whose memory is complete, and lets
    /// the guest run. Returns when it does. If QEMU cannot load the state, it
    /// ends: [`QmpError::Closed`].
    pub fn go_live(&mut self, state: &DeviceState) -> Result<(), QmpError> {
        if !self.connection.is_primed(migrate_incoming::NAME) {
            self.prepare_standby(state)?;
        }
        self.connection.fire();
        // Sent with the load: QEMU starts the guest as soon as it has loaded.
        self.connection.push(&cont {})?;
        self.connection.flush()?;
        let mut progress = Progress::default();
        while progress.answers < 2 || !progress.resumed {
            match self.connection.message(migrate_incoming::NAME)? {
                Message::Reply(Ok(_)) => progress.answers += 1,
                Message::Reply(Err(reason)) => {
                    return Err(QmpError::Refused { command: migrate_incoming::NAME, reason });
                }
                Message::Event { name, data } => match name.as_str() {
                    "RESUME" => progress.resumed = true,
                    "MIGRATION" => progress.loaded = data["status"] == "completed",
                    _ => {}
                },
            }
            if progress.answers == 2 && progress.loaded && !progress.resumed {
                return Err(QmpError::NotStarted);
            }
        }
        Ok(())
    }

    /// Loads the device state into a standby whose memory is complete; the guest stands
    /// still until [`Monitor::cont`]. If QEMU cannot load it, it ends: [`QmpError::Closed`].
    pub fn load(&mut self, state: &DeviceState) -> Result<(), QmpError> {
        if !self.connection.is_primed(migrate_incoming::NAME) {
            self.prepare_standby(state)?;
        }
        self.connection.fire();
        self.connection.flush()?;
        self.await_migration(migrate_incoming::NAME)
    }

    /// Stops the guest and saves the machine to a file by QEMU's own migration, without the memory
    /// that it shares with other processes.
    #[cfg(feature = "fail-points")]
    pub fn save_beside_memory(&mut self, path: &Path) -> Result<(), QmpError> {
        self.stop()?;
        self.leave_out_memory()?;
        let uri = Some(format!("file:{}", path.display()));
        let (detach, resume, channels) = (None, None, None);
        #[allow(deprecated)]
        self.connection.push(&migrate { uri, detach, resume, channels })?;
        self.connection.flush()?;
        self.await_migration(migrate::NAME)
    }

    /// Loads what [`Monitor::save_beside_memory`] has saved into a standby whose memory is
    /// complete; the guest stands still.
    #[cfg(feature = "fail-points")]
    pub fn load_beside_memory(&mut self, path: &Path) -> Result<(), QmpError> {
        self.leave_out_memory()?;
        let uri = Some(format!("file:{}", path.display()));
        self.connection.push(&migrate_incoming { channels: None, exit_on_error: None, uri })?;
        self.connection.flush()?;
        self.await_migration(migrate_incoming::NAME)
    }

    #[cfg(feature = "fail-points")]
    fn leave_out_memory(&mut self) -> Result<(), QmpError> {
        let wanted = [MigrationCapability::events, MigrationCapability::x_ignore_shared];
        let wanted = wanted.map(|capability| MigrationCapabilityStatus { capability, state: true });
        self.simple(&migrate_set_capabilities { capabilities: wanted.into() })
    }

    fn await_migration(&mut self, command: &'static str) -> Result<(), QmpError> {
        let (mut answered, mut loaded) = (false, false);
        while !(answered && loaded) {
            match self.connection.message(command)? {
                Message::Reply(Ok(_)) => answered = true,
                Message::Reply(Err(reason)) => {
                    return Err(QmpError::Refused { command, reason });
                }
                Message::Event { name, data } => {
                    loaded |= name == "MIGRATION" && data["status"] == "completed";
                }
            }
        }
        Ok(())
    }

    pub(super) fn simple<C: Command>(&mut self, command: &C) -> Result<(), QmpError> {
        let _: Empty = self.connection.execute(command)?;
        Ok(())
    }
}

#[derive(Default)]
struct Progress {
    answers: u32,
    loaded: bool,
    resumed: bool,
}

/// A checkpoint under way. Call [`Checkpoint::stopped`], then
/// [`Checkpoint::saved`], then [`Checkpoint::resume`]; without the last, the
/// guest stays stopped.
#[must_use = "the guest stays stopped"]
#[derive(Debug)]
pub struct Checkpoint<'m> {
    monitor: &'m mut Monitor,
    state: &'m DeviceState,
}

impl Checkpoint<'_> {
    /// Waits until the guest stands still: memory may be copied, while QEMU
    /// begins to save the device state.
    pub fn stopped(&mut self) -> Result<(), QmpError> {
        self.monitor.connection.reply::<Empty>(stop::NAME)?;
        self.monitor.saver.fire();
        self.monitor.saver.flush()
    }

    /// Waits until the device state is in its file.
    pub fn saved(&mut self) -> Result<(), QmpError> {
        self.monitor.saver.reply::<Empty>(xen_save_devices_state::NAME).map(drop)
    }

    /// Lets the guest run again; returns when it does.
    pub fn resume(self) -> Result<(), QmpError> {
        self.monitor.connection.fire();
        self.monitor.connection.flush()?;
        self.monitor.connection.reply::<Empty>(cont::NAME)?;
        // The guest runs: time to prepare the next checkpoint.
        self.monitor.prime_checkpoint(self.state)
    }
}
