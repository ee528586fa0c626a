//! Commands to QEMU.

use super::connection::{Connection, Message, QemuVersion, QmpError};
use super::device_state::DeviceState;
use super::ram_blocks::{self, RamBlockInfo};
use qapi::qmp::{
    HumanReadableText, MigrationCapability, MigrationCapabilityStatus, RunState, cont,
    migrate_incoming, migrate_set_capabilities, query_status, quit, stop, system_powerdown,
    system_reset, x_query_ramblock, xen_save_devices_state,
};
use qapi::{Command, Empty};
use serde::Deserialize;
use std::os::unix::net::UnixStream;
use std::time::Duration;

/// QEMU's monitor for commands.
///
/// After a [`QmpError::Timeout`] or [`QmpError::Closed`] it is of no more use,
/// nor is its QEMU.
#[derive(Debug)]
pub struct Monitor {
    connection: Connection,
    version: QemuVersion,
}

#[derive(Deserialize)]
struct Status {
    status: RunState,
}

impl Monitor {
    /// Waits for QEMU's greeting and negotiates; `timeout` is for each answer,
    /// then and later.
    pub fn connect(stream: UnixStream, timeout: Duration) -> Result<Monitor, QmpError> {
        let (connection, version) = Connection::open(stream, timeout)?;
        Ok(Monitor { connection, version })
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

    /// What the machine does at the moment.
    pub fn status(&mut self) -> Result<RunState, QmpError> {
        let status: Status = self.connection.execute(&query_status {})?;
        Ok(status.status)
    }

    /// The machine's RAM blocks. All of them belong to its state.
    pub fn ram_blocks(&mut self) -> Result<Vec<RamBlockInfo>, QmpError> {
        let command = x_query_ramblock {};
        let table: HumanReadableText = self.connection.execute(&command)?;
        ram_blocks::parse(&table.human_readable_text)
            .map_err(|reason| QmpError::Malformed { command: x_query_ramblock::NAME, reason })
    }

    /// Begins a checkpoint: sends `stop` and, right behind it, the command that
    /// saves the device state, so that QEMU need not wait for us in between.
    pub fn begin_checkpoint(&mut self, state: &DeviceState) -> Result<Checkpoint<'_>, QmpError> {
        let filename = state.path_in_qemu();
        self.connection.push(&stop {})?;
        // `live: true` would hand the disks over, as at the end of a migration.
        self.connection.push(&xen_save_devices_state { filename, live: Some(false) })?;
        self.connection.flush()?;
        Ok(Checkpoint { connection: &mut self.connection })
    }

    /// Makes a standby report how loading goes; call it once, before it is
    /// needed in a hurry.
    pub fn prepare_standby(&mut self) -> Result<(), QmpError> {
        let events =
            MigrationCapabilityStatus { capability: MigrationCapability::events, state: true };
        self.simple(&migrate_set_capabilities { capabilities: vec![events] })
    }

    /// Loads the device state into a standby whose memory is complete, and lets
    /// the guest run. Returns when it does. If QEMU cannot load the state, it
    /// ends: [`QmpError::Closed`].
    pub fn go_live(&mut self, state: &DeviceState) -> Result<(), QmpError> {
        self.load(state)?;
        let mut progress = Progress::default();
        // `cont` is sent with the load: QEMU starts the guest when it has loaded.
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

    fn load(&mut self, state: &DeviceState) -> Result<(), QmpError> {
        let uri = Some(format!("file:{}", state.path_in_qemu()));
        self.connection.push(&migrate_incoming { channels: None, exit_on_error: None, uri })?;
        self.connection.push(&cont {})?;
        self.connection.flush()
    }

    fn simple<C: Command>(&mut self, command: &C) -> Result<(), QmpError> {
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
    connection: &'m mut Connection,
}

impl Checkpoint<'_> {
    /// Waits until the guest stands still: memory may be copied.
    pub fn stopped(&mut self) -> Result<(), QmpError> {
        self.connection.reply::<Empty>(stop::NAME).map(drop)
    }

    /// Waits until the device state is in its file.
    pub fn saved(&mut self) -> Result<(), QmpError> {
        self.connection.reply::<Empty>(xen_save_devices_state::NAME).map(drop)
    }

    /// Lets the guest run again; returns when it does.
    pub fn resume(self) -> Result<(), QmpError> {
        self.connection.push(&cont {})?;
        self.connection.flush()?;
        self.connection.reply::<Empty>(cont::NAME).map(drop)
    }
}
