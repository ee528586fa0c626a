//! The medium of a CD-ROM drive, changed while QEMU runs.

use super::connection::QmpError;
use super::monitor::Monitor;
use qapi::qmp::{
    blockdev_close_tray, blockdev_del, blockdev_insert_medium, blockdev_open_tray,
    blockdev_remove_medium,
};
use qapi::{Command, Empty};
use serde::Serialize;
use std::path::Path;

/// Node of a raw medium, whose server is on this socket. As on a command line
/// (`command/disks.rs`).
#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct AddMedium<'a> {
    driver: &'static str,
    node_name: &'a str,
    read_only: bool,
    server: Server<'a>,
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

/// Why a medium cannot be taken out.
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

    /// Puts the medium whose server is on this socket into an empty drive.
    pub fn insert(&mut self, drive: &str, socket: &Path) -> Result<(), QmpError> {
        let server = Server { r#type: "unix", path: socket };
        let node = AddMedium { driver: "nbd", node_name: drive, read_only: true, server };
        self.simple(&node)?;
        #[allow(deprecated)]
        let open = blockdev_open_tray { device: None, force: Some(true), id: Some(drive.into()) };
        self.simple(&open)?;
        let insert = blockdev_insert_medium { id: drive.to_owned(), node_name: drive.to_owned() };
        self.simple(&insert)?;
        self.close_tray(drive)
    }

    fn close_tray(&mut self, drive: &str) -> Result<(), QmpError> {
        #[allow(deprecated)]
        self.simple(&blockdev_close_tray { device: None, id: Some(drive.to_owned()) })
    }
}
