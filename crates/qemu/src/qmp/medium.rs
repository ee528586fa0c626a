//! The medium of a CD-ROM drive, changed while QEMU runs.

use super::connection::QmpError;
use super::monitor::Monitor;
use crate::command::RECONNECT_SECONDS;
use qapi::qmp::{
    blockdev_close_tray, blockdev_del, blockdev_insert_medium, blockdev_open_tray,
    blockdev_remove_medium, device_del,
};
use qapi::{Command, Empty};
use serde::Serialize;
use serde_json::{Map, Value};
use std::path::Path;
use std::thread;
use std::time::Duration;

/// Node of a raw medium, whose server is on this socket. As on a command line
/// (`command/disks.rs`).
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct AddMedium<'a> {
    driver: &'static str,
    node_name: &'a str,
    read_only: bool,
    server: Server<'a>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reconnect_delay: Option<u32>,
}

#[derive(Debug, Serialize)]
struct Server<'a> {
    r#type: &'static str,
    path: &'a Path,
}

impl Command for AddMedium<'_> {
    const NAME: &'static str = "blockdev-add";
    const ALLOW_OOB: bool = false;
    type Ok = Empty;
}

/// A device, by its options.
#[derive(Debug, Serialize)]
#[serde(transparent)]
struct AddDevice<'a>(&'a Map<String, Value>);

impl Command for AddDevice<'_> {
    const NAME: &'static str = "device_add";
    const ALLOW_OOB: bool = false;
    type Ok = Empty;
}

/// QEMU lets go of what a device had a moment after the device itself.
const REPLUG_TRIES: u32 = 100;
const REPLUG_PAUSE: Duration = Duration::from_millis(20);

/// The reason why a medium cannot be taken out.
#[derive(Debug, thiserror::Error)]
pub enum EjectError {
    /// The guest has the drive locked. It was asked to let go.
    #[error(
        "the guest holds the medium of {0} (it is mounted, mostly); it was asked to let go: \
         unmount it there and try again, or take it out with --force"
    )]
    Locked(String),
    /// QEMU does not do it.
    #[error(transparent)]
    Qmp(#[from] QmpError),
}

impl Monitor {
    /// Takes the medium out of a drive, which may have none, and closes its tray. The medium's
    /// node is gone then, and its server is not connected any more.
    pub fn eject(&mut self, drive: &str, had_medium: bool, force: bool) -> Result<(), EjectError> {
        let id = || Some(drive.to_owned());
        #[allow(deprecated)]
        self.simple(&blockdev_open_tray { device: None, force: Some(force), id: id() })?;
        self.simple(&blockdev_remove_medium { id: drive.to_owned() }).map_err(
            |error| match &error {
                QmpError::Refused { reason, .. } if reason.contains("is not open") => {
                    EjectError::Locked(drive.to_owned())
                }
                _ => error.into(),
            },
        )?;
        if had_medium {
            self.simple(&blockdev_del { node_name: drive.to_owned() })?;
        }
        self.close_tray(drive).map_err(Into::into)
    }

    /// Puts the medium whose server is on this socket into an empty drive; QEMU waits for that server if it
    /// goes away, if it `awaits` it.
    pub fn insert(&mut self, drive: &str, socket: &Path, awaits: bool) -> Result<(), QmpError> {
        self.add_medium(drive, socket, awaits)?;
        #[allow(deprecated)]
        let open = blockdev_open_tray { device: None, force: Some(true), id: Some(drive.into()) };
        self.simple(&open)?;
        let insert = blockdev_insert_medium { id: drive.to_owned(), node_name: drive.to_owned() };
        self.simple(&insert)?;
        self.close_tray(drive)
    }

    /// The same with the drive of a standby whose size its controller has learned when it was made:
    /// another drive takes its place.
    pub fn insert_by_replug(
        &mut self,
        drive: &str,
        socket: &Path,
        awaits: bool,
        device: &Map<String, Value>,
    ) -> Result<(), QmpError> {
        self.add_medium(drive, socket, awaits)?;
        self.simple(&device_del { id: drive.to_owned() })?;
        let mut tries = REPLUG_TRIES;
        loop {
            let added = self.simple(&AddDevice(device));
            tries -= 1;
            match added {
                Err(QmpError::Refused { .. }) if tries > 0 => thread::sleep(REPLUG_PAUSE),
                result => return result,
            }
        }
    }

    fn add_medium(&mut self, drive: &str, socket: &Path, awaits: bool) -> Result<(), QmpError> {
        self.simple(&AddMedium {
            driver: "nbd",
            node_name: drive,
            read_only: true,
            server: Server { r#type: "unix", path: socket },
            reconnect_delay: awaits.then_some(RECONNECT_SECONDS),
        })
    }

    fn close_tray(&mut self, drive: &str) -> Result<(), QmpError> {
        #[allow(deprecated)]
        self.simple(&blockdev_close_tray { device: None, id: Some(drive.to_owned()) })
    }
}
