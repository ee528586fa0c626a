//! A second guest in a scene, beside the first on every host's bridge: for tests
//! and measurements of guests that talk to each other.

use crate::command;
use crate::host::HostProcess;
use crate::lab::GUEST_ADDRESS;
use crate::records::RecordClient;
use crate::scene::{RECORDS_PORT, SHELL_PORT, Scene};
use crate::shell::GuestShell;
use crate::wait::await_servers;
use anyhow::{Context, Result};
use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;
use toml::{Table, Value};

/// The second guest's name on every host.
pub const COMPANION: &str = "companion";
/// Its address.
pub const COMPANION_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 51);
const MAC: &str = "52:54:00:75:74:01";

/// The second guest of a scene: the same as the first but for its name, address
/// and disk, and never in lockstep.
pub struct Companion {
    definition: PathBuf,
}

impl Companion {
    /// Writes its definition and copies its disk from the first guest's, which
    /// must not have been started yet.
    pub fn new(scene: &Scene) -> Result<Companion> {
        let text = fs::read_to_string(scene.definition())?;
        let mut table: Table = text.parse().context("the scene's definition is no TOML")?;
        let first = |table: &mut Table, list: &str, field: &str, value: String| -> Result<()> {
            let entry = table.get_mut(list).and_then(|list| list.get_mut(0));
            let entry = entry.and_then(Value::as_table_mut);
            let entry = entry.with_context(|| format!("the first guest has no {list}"))?;
            entry.insert(field.to_owned(), Value::String(value));
            Ok(())
        };
        let append = table.get("append").and_then(Value::as_str).unwrap_or_default();
        let append = append.replace(&GUEST_ADDRESS.to_string(), &COMPANION_ADDRESS.to_string());
        table.insert("append".to_owned(), Value::String(append));
        table.insert("name".to_owned(), Value::String(COMPANION.to_owned()));
        table.remove("lockstep");
        let directory = scene.lab().directory();
        let (from, to) = (directory.join("disk.img"), directory.join("companion.img"));
        let (from, to) = (from.to_string_lossy(), to.to_string_lossy());
        command::run("cp", &["--sparse=always", "--reflink=auto", &from, &to])?;
        first(&mut table, "disk", "path", to.into_owned())?;
        first(&mut table, "card", "mac", MAC.to_owned())?;
        let definition = directory.join("companion.toml");
        fs::write(&definition, table.to_string())?;
        Ok(Companion { definition })
    }

    /// Starts it on a host, and returns while it boots.
    pub fn start(&self, host: &HostProcess) -> Result<()> {
        host.call(["vm", "start", &*self.definition.to_string_lossy()])?;
        Ok(())
    }

    /// Waits until its servers answer the client.
    pub fn await_boot(&self, scene: &Scene) -> Result<()> {
        let servers = [RECORDS_PORT, SHELL_PORT].map(Companion::address);
        await_servers(scene.lab(), "the companion", &servers)
    }

    /// One of its servers.
    pub fn address(port: u16) -> SocketAddr {
        SocketAddr::from((COMPANION_ADDRESS, port))
    }

    /// Connects to its server of shell lines.
    pub fn shell(&self, scene: &Scene) -> Result<GuestShell> {
        GuestShell::connect(scene.lab(), Companion::address(SHELL_PORT))
    }

    /// Opens the one connection of a client outside that appends records to it.
    pub fn record_client(&self, scene: &Scene, pace: Duration) -> Result<RecordClient> {
        RecordClient::start(scene.lab(), Companion::address(RECORDS_PORT), pace)
    }
}
