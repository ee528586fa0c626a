//! A second guest in a scene, beside the first on every host's bridge: for tests
//! and measurements of guests that talk to each other.

use crate::host::HostProcess;
use crate::records::RecordClient;
use crate::scene::{RECORDS_PORT, SHELL_PORT, Scene};
use crate::shell::GuestShell;
use crate::sibling::Sibling;
use crate::wait::await_servers;
use anyhow::Result;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

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
    /// Defines it; the first guest must not have been started yet.
    pub fn new(scene: &Scene) -> Result<Companion> {
        let companion = Sibling { name: COMPANION, address: COMPANION_ADDRESS, mac: MAC };
        let definition = companion.define(scene)?;
        scene.spare_boot(&definition)?;
        Ok(Companion { definition })
    }

    /// The file of its definition.
    pub fn definition(&self) -> &Path {
        &self.definition
    }

    /// Starts it on a host, and returns while it boots, if it does.
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
