//! A group of guests on several hosts, to be snapshotted and restored as one.

use super::stage::{LIMIT, drop_caches, equipped, ms, store_of};
use crate::bench::words;
use crate::cli::BenchRestoreArgs;
use crate::parts::scene_options;
use anyhow::{Context, Result, ensure};
use std::fmt::Write as _;
use std::io::{BufRead, BufReader, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::time::{Duration, Instant};
use understudy_client::{Client, Subject};
use understudy_lab::scene::{GuestKind, SHELL_PORT};
use understudy_lab::{GuestShell, Scene, SceneOptions, Sibling, in_namespace, wait_for};
use understudy_protocol::literal;
use understudy_report::cluster::{RestoreReport, RestoreRequest, SnapshotReport, SnapshotRequest};

/// The group's name.
const GROUP: &str = "group";
/// Guests boot one or a few at a time: so many.
const BOOT_AT_ONCE: usize = 2;
/// Time for a guest to boot beside others, under emulation.
const BOOT_LIMIT: Duration = Duration::from_secs(180);
/// Time for an answer of a guest that is being restored.
const ANSWER_LIMIT: Duration = Duration::from_secs(20);
/// The first member's address; all are below the client's.
const FIRST_ADDRESS: u8 = 60;
/// More have no addresses.
pub const MOST: usize = 40;

/// Shape of a group.
pub struct Shape<'a> {
    /// Kind of its guests.
    pub kind: GuestKind,
    /// Number of guests.
    pub members: usize,
    /// Memory of each in MiB.
    pub memory_mib: u32,
    /// The hosts; members go to them in turn.
    pub hosts: &'a [&'a str],
}

/// The group, on its hosts.
pub struct Members {
    homes: Vec<String>,
    client: Client,
    store: String,
    scene: Scene,
}

impl Members {
    /// Starts the daemons and boots all guests.
    pub fn boot(args: &BenchRestoreArgs, shape: &Shape<'_>) -> Result<Members> {
        let homes: Vec<String> =
            (0..shape.members).map(|at| shape.hosts[at % shape.hosts.len()].to_owned()).collect();
        let options = SceneOptions {
            hosts: shape.hosts.iter().map(|&host| host.to_owned()).collect(),
            kind: shape.kind,
            disks: usize::from(shape.kind == GuestKind::Bench),
            memory_mib: shape.memory_mib,
            accel: Some("tcg".to_owned()),
            ..scene_options(args.guest.as_deref()).map_err(words)?
        };
        let mut options = equipped(options, args.store_speed, None);
        let cluster = cluster(&homes);
        options.daemons.values_mut().for_each(|host| host.settings += &cluster);
        let scene = Scene::start(options)?;
        let client = Client::new(scene.host(&homes[0])?.socket()).map_err(words)?;
        let store = store_of(&scene);
        let members = Members { homes, client, store, scene };
        let all: Vec<usize> = (0..shape.members).collect();
        for some in all.chunks(BOOT_AT_ONCE) {
            some.iter().try_for_each(|&member| members.start(member))?;
            some.iter().try_for_each(|&member| members.shell(member).map(drop))?;
        }
        Ok(members)
    }

    /// Number of guests.
    pub fn count(&self) -> usize {
        self.homes.len()
    }

    /// The laboratory.
    pub fn scene(&self) -> &Scene {
        &self.scene
    }

    /// A port of a member.
    pub fn server(&self, member: usize, port: u16) -> SocketAddr {
        SocketAddr::from((address(member), port))
    }

    /// Starts a program in a member that runs from now on.
    pub fn run(&self, member: usize, line: &str) -> Result<()> {
        self.shell(member)?.start(line).map(drop)
    }

    /// One request to a member's server of lines, and its answer.
    pub fn ask(&self, member: usize, port: u16, request: &str) -> Result<String> {
        let to = self.server(member, port);
        let connect = || TcpStream::connect_timeout(&to, ANSWER_LIMIT);
        let mut stream = in_namespace(&self.scene.lab().client(), connect)??;
        stream.set_read_timeout(Some(ANSWER_LIMIT))?;
        stream.write_all(format!("{request}\n").as_bytes())?;
        let mut answer = String::new();
        BufReader::new(stream).read_line(&mut answer)?;
        let line = answer.strip_suffix('\n').context("the guest broke off")?;
        Ok(line.to_owned())
    }

    /// Takes a snapshot of all; returns how many milliseconds that took, too.
    pub fn snapshot(&self, request: SnapshotRequest) -> Result<(SnapshotReport, f64)> {
        let began = Instant::now();
        let request = SnapshotRequest { store: Some(self.store.clone()), ..request };
        let report = self.client.snapshot(&subject(), &request).map_err(words)?;
        Ok((report, ms(began.elapsed())))
    }

    /// Ends all, as if their power had been cut.
    pub fn end_guests(&self) -> Result<()> {
        for (member, home) in self.homes.iter().enumerate() {
            self.scene.host(home)?.call(["vm", "stop", &name(member), "--force"])?;
        }
        for (member, home) in self.homes.iter().enumerate() {
            let host = self.scene.host(home)?;
            wait_for("the guests to be gone", LIMIT, || {
                Ok(host.status(&name(member)).is_err().then_some(()))
            })?;
        }
        Ok(())
    }

    /// Restores all from a store that is not cached; returns when the command was given, too.
    pub fn restore(&self, request: RestoreRequest) -> Result<(RestoreReport, Instant)> {
        drop_caches();
        // Emptying the caches takes longer the busier the machine is, and is no part of it.
        let began = Instant::now();
        let request = RestoreRequest { store: Some(self.store.clone()), ..request };
        let report = self.client.restore(&subject(), &request).map_err(words)?;
        ensure!(report.members.len() == self.count(), "not all were restored");
        Ok((report, began))
    }

    /// Ends of the logs.
    pub fn diagnostics(&self) -> String {
        self.scene.diagnostics()
    }

    /// Ends all, and proves that nothing is left.
    pub fn end(self) -> Result<()> {
        self.scene.finish()
    }

    fn start(&self, member: usize) -> Result<()> {
        let mac = format!("52:54:00:75:76:{member:02x}");
        let sibling = Sibling { name: &name(member), address: address(member), mac: &mac };
        let path = sibling.define(&self.scene)?.display().to_string();
        self.scene.host(&self.homes[member])?.call(["vm", "start", &path]).map(drop)
    }

    /// Connects to a member's server of shell lines, once it answers.
    pub fn shell(&self, member: usize) -> Result<GuestShell> {
        let server = self.server(member, SHELL_PORT);
        wait_for(&format!("{} to answer", name(member)), BOOT_LIMIT, || {
            Ok(GuestShell::connect(self.scene.lab(), server).ok())
        })
    }
}

fn subject() -> Subject {
    Subject::Cluster(literal(GROUP))
}

/// A member's VM.
pub fn name(member: usize) -> String {
    format!("m{member:02}")
}

/// A member's address.
pub fn address(member: usize) -> Ipv4Addr {
    Ipv4Addr::new(10, 77, 0, FIRST_ADDRESS + member as u8)
}

/// The configuration of each host.
fn cluster(homes: &[String]) -> String {
    let mut text = format!("[cluster.{GROUP}]\nmembers = {{ ");
    for (member, home) in homes.iter().enumerate() {
        let comma = if member == 0 { "" } else { ", " };
        let _ = write!(text, "{comma}{} = \"{home}\"", name(member));
    }
    text + " }\n"
}

#[cfg(test)]
mod tests {
    use super::*;
    use toml::Table;

    #[test]
    fn the_configuration_names_each_members_home() {
        let homes = ["a", "b", "a"].map(str::to_owned);
        let table: Table = cluster(&homes).parse().unwrap();
        let members = table["cluster"][GROUP]["members"].as_table().unwrap();
        assert_eq!(members.len(), 3);
        assert_eq!(members["m02"].as_str(), Some("a"));
        assert!(u32::from(address(MOST - 1)) < u32::from(understudy_lab::CLIENT_ADDRESS));
    }
}
