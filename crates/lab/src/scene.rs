//! Scene that most tests, the demo and the benchmarks begin with: a laboratory whose
//! hosts run the daemon, and one test guest that can be started, protected,
//! talked to, and found again on another host.
//!
//! `options` says what the scene is made of, `guest` what the test guests are,
//! `definition` writes the VM's definition and its disks.

mod definition;
mod guest;
mod options;

pub use guest::{
    ECHO_PORT, GuestKind, RECORDS_PORT, SECOND_ADDRESS, SHELL_PORT, TBENCH_PORT, WEB_PORT,
};
pub(crate) use guest::{INITRD, KERNEL, append};
pub use options::SceneOptions;

use crate::etcd::Etcd;
use crate::host::{ArbiterKind, HostOptions, HostProcess, issue_certificates};
use crate::lab::{GUEST_ADDRESS, Lab};
use crate::leftovers::Leftovers;
use crate::records::RecordClient;
use crate::shell::GuestShell;
use crate::wait::await_servers;
use crate::wait_for;
use crate::watcher::{Mac, Watcher};
use anyhow::{Context, Result, ensure};
use definition::write_definition;
use guest::mac;
use serde_json::Value;
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The VM's name on every host.
pub const VM: &str = "guest";
/// The client's address on the network of the guest's second card.
const SECOND_CLIENT: &str = "10.78.0.100/24";

/// Time for a backup to run the guest after a failure.
const TAKE_OVER_LIMIT: Duration = Duration::from_secs(120);
const TAPS_VANISH_WITHIN: Duration = Duration::from_secs(2);

/// A laboratory with daemons and the files of a guest. Dropping it kills and
/// removes everything; [`finish`](Scene::finish) also proves that nothing was
/// left behind.
pub struct Scene {
    // Before the laboratory, which they live in: fields are dropped in order.
    hosts: BTreeMap<String, HostProcess>,
    etcd: Option<Etcd>,
    options: SceneOptions,
    definition: PathBuf,
    lab: Lab,
}

impl Scene {
    /// Builds the laboratory, starts every host's daemon, and writes the VM's
    /// definition. The guest is not started yet.
    pub fn start(options: SceneOptions) -> Result<Scene> {
        options.check()?;
        let names: Vec<&str> = options.hosts.iter().map(String::as_str).collect();
        let mut lab = Lab::with_cables(&names, options.cables)?;
        if options.pinned {
            lab.pin()?;
        }
        if options.cards == 2 {
            lab.client().ip(&["addr", "add", SECOND_CLIENT, "dev", "net"])?;
        }
        // A host with certificates does not talk to one without.
        if !options.daemons.values().any(|daemon| daemon.insecure) {
            issue_certificates(&lab, &options.binary)?;
        }
        let definition = write_definition(&lab, &options)?;
        options.spare_boot(&lab, &definition)?;
        let uses_etcd = |host: &HostOptions| host.arbiter == ArbiterKind::Etcd;
        let etcd = options.daemons.values().any(uses_etcd);
        let etcd = etcd.then(|| Etcd::start(&lab, &options.guest_files)).transpose()?;
        let hosts = start_daemons(&lab, &options)?;
        Ok(Scene { hosts, etcd, options, definition, lab })
    }

    /// The laboratory.
    pub fn lab(&self) -> &Lab {
        &self.lab
    }

    /// The arbiter, if a daemon's options ask for [`ArbiterKind::Etcd`].
    pub fn etcd(&mut self) -> Result<&mut Etcd> {
        self.etcd.as_mut().context("no host of this scene uses etcd")
    }

    /// Path of the guests' files.
    pub fn guest_files(&self) -> &Path {
        &self.options.guest_files
    }

    /// The VM's definition file.
    pub fn definition(&self) -> &Path {
        &self.definition
    }

    /// Has a further guest, which its definition says and whose disks are there, start where one
    /// like it had booted, if the scene's guest does. For guests that several tests have.
    pub fn spare_boot(&self, definition: &Path) -> Result<()> {
        self.options.spare_boot(&self.lab, definition)
    }

    /// A host's daemon.
    pub fn host(&self, name: &str) -> Result<&HostProcess> {
        self.hosts.get(name).with_context(|| format!("no host `{name}` in this scene"))
    }

    /// A host's daemon, to be killed.
    pub fn host_mut(&mut self, name: &str) -> Result<&mut HostProcess> {
        self.hosts.get_mut(name).with_context(|| format!("no host `{name}` in this scene"))
    }

    /// Starts a host's daemon again after its death.
    pub fn restart(&mut self, name: &str) -> Result<()> {
        // Dropped first: it ends everything on its host.
        drop(self.hosts.remove(name));
        let host = self.options.start_daemon(&self.lab, name)?;
        self.hosts.insert(name.to_owned(), host);
        Ok(())
    }

    /// [`restart`](Scene::restart), with another program; with the scene's own if none is given.
    pub fn restart_as(&mut self, name: &str, program: Option<&Path>) -> Result<()> {
        drop(self.hosts.remove(name));
        let own = self.options.binary.clone();
        let options =
            SceneOptions { binary: program.map_or(own, Path::to_owned), ..self.options.clone() };
        self.hosts.insert(name.to_owned(), options.start_daemon(&self.lab, name)?);
        Ok(())
    }

    /// Starts a host's daemon again, on which all else has lived on.
    pub fn revive(&mut self, name: &str) -> Result<()> {
        let options = self.options.daemons.get(name).cloned().unwrap_or_default();
        let host = self.hosts.get_mut(name);
        host.with_context(|| format!("no host `{name}` in this scene"))?.revive(&self.lab, &options)
    }

    /// [`revive`](Scene::revive) with other options than before.
    pub fn revive_with(&mut self, name: &str, options: HostOptions) -> Result<()> {
        self.options.daemons.insert(name.to_owned(), options);
        self.revive(name)
    }

    /// [`restart`](Scene::restart) with other options than before.
    pub fn restart_with(&mut self, name: &str, options: HostOptions) -> Result<()> {
        self.options.daemons.insert(name.to_owned(), options);
        self.restart(name)
    }

    /// The status of the VM on a host.
    pub fn status(&self, host: &str) -> Result<Value> {
        self.host(host)?.status(VM)
    }

    /// Starts the guest on a host, and returns while it boots.
    pub fn start_guest(&self, host: &str) -> Result<()> {
        let definition = self.definition.to_string_lossy();
        self.host(host)?.call(["vm", "start", &definition])?;
        Ok(())
    }

    /// Waits until the guest's servers answer the client.
    pub fn await_guest(&self) -> Result<()> {
        let ports = self.options.kind.ports();
        let servers: Vec<_> = ports.iter().map(|&port| self.guest(port)).collect();
        await_servers(&self.lab, "the guest", &servers)
    }

    /// Begins to protect the guest of host `from` to host `to`.
    pub fn protect(&self, from: &str, to: &str) -> Result<()> {
        let mode = if self.options.lockstep { "lockstep" } else { "checkpoint" };
        self.host(from)?.call(["protect", VM, "--to", to, "--mode", mode, "--no-wait"])?;
        Ok(())
    }

    /// Waits until the guest of `host` is protected; `watch` sees every status
    /// on the way.
    pub fn await_protected(&self, host: &str, watch: impl FnMut(&Value)) -> Result<Value> {
        self.host(host)?.await_protected(VM, watch)
    }

    /// Starts the guest on host `from`, waits for it, protects it to host `to`
    /// and waits for that: the beginning of most tests.
    pub fn protected_guest(&self, from: &str, to: &str) -> Result<()> {
        self.start_guest(from)?;
        if self.options.kind.is_linux() {
            self.await_guest()?;
        }
        self.protect(from, to)?;
        self.await_protected(from, |_| ()).map(drop)
    }

    /// Waits until `host` runs the guest; returns its status there.
    pub fn await_live(&self, host: &str) -> Result<Value> {
        wait_for(&format!("host {host} to run the guest"), TAKE_OVER_LIMIT, || {
            let status = self.status(host)?;
            let lives = status["role"] == "primary" && status["live"] == true;
            Ok(lives.then_some(status))
        })
    }

    /// Waits until `host` has halted its copy and ended its QEMU, because the
    /// guest is another host's.
    pub fn await_fenced(&self, host: &str) -> Result<Value> {
        wait_for(&format!("host {host} to halt its copy"), TAKE_OVER_LIMIT, || {
            let status = self.status(host)?;
            Ok((status["role"] == "fenced" && status["qemu_pid"].is_null()).then_some(status))
        })
    }

    /// Waits until `host`, which lost the guest and cannot ask whether the winner runs it, lets its
    /// copy stand still.
    pub fn await_kept(&self, host: &str) -> Result<Value> {
        wait_for(&format!("host {host} to keep its copy"), TAKE_OVER_LIMIT, || {
            let status = self.status(host)?;
            let kept = status["protection"]["reason"].as_str().unwrap_or_default();
            let kept = status["role"] == "fenced" && kept.contains("is kept until that host runs");
            Ok(kept.then_some(status))
        })
    }

    /// One of the guest's servers, at its first card.
    pub fn guest(&self, port: u16) -> SocketAddr {
        SocketAddr::from((GUEST_ADDRESS, port))
    }

    /// One of the guest's servers, at its second card.
    pub fn guest_second(&self, port: u16) -> SocketAddr {
        SocketAddr::from((SECOND_ADDRESS, port))
    }

    /// Opens the one connection of a client that appends records.
    pub fn record_client(&self, pace: Duration) -> Result<RecordClient> {
        RecordClient::start(&self.lab, self.guest(RECORDS_PORT), pace)
    }

    /// Connects to the guest's server of shell lines.
    pub fn shell(&self) -> Result<GuestShell> {
        GuestShell::connect(&self.lab, self.guest(SHELL_PORT))
    }

    /// Watches what leaves a host in the name of one of the guest's cards.
    pub fn watch_uplink(&self, host: &str, card: usize) -> Result<Watcher> {
        Watcher::on_uplink(&self.lab, host, mac(card).parse::<Mac>()?)
    }

    /// The image of one of the VM's disks on a host.
    pub fn disk(&self, host: &str, index: usize) -> Result<PathBuf> {
        // A keeper that took long for its answer is asked again: what its daemon says for it has no disks.
        wait_for(&format!("host {host} to name its disk {index}"), TAKE_OVER_LIMIT, || {
            Ok(self.status(host)?["disks"][index]["path"].as_str().map(PathBuf::from))
        })
    }

    /// The socket of the guest's serial console, on the host that runs it.
    pub fn console(&self, host: &str) -> Result<PathBuf> {
        let status = self.status(host)?;
        let path = status["console"].as_str();
        path.map(PathBuf::from).with_context(|| format!("host {host} has no console of the guest"))
    }

    /// Asks the guest on `host` to power off, and waits until the VM is gone.
    pub fn power_off(&self, host: &str) -> Result<()> {
        self.host(host)?.call(["vm", "stop", VM])?;
        Ok(())
    }

    /// The ends of the daemons', QEMUs' and consoles' logs.
    pub fn diagnostics(&self) -> String {
        self.lab.diagnostics()
    }

    /// Ends the daemons that still run, in order, and proves that they leave
    /// nothing behind, and that nothing is left of the laboratory.
    pub fn finish(mut self) -> Result<()> {
        for (name, host) in &mut self.hosts {
            if host.is_running() {
                let status = host.terminate()?;
                ensure!(status.success(), "host {name}'s daemon ended with {status}");
            }
        }
        drop(self.etcd.take());
        let left = self.leftovers()?;
        ensure!(left.is_empty(), "the daemons left behind:\n{left}\n{}", self.diagnostics());
        let name = self.lab.name().clone();
        drop(self);
        let left = name.leftovers()?;
        ensure!(left.is_empty(), "the laboratory left behind:\n{left}");
        Ok(())
    }

    /// What the daemons left behind.
    fn leftovers(&self) -> Result<Leftovers> {
        for host in self.hosts.keys() {
            if let Err(error) = self.lab.await_no_taps(host, TAPS_VANISH_WITHIN) {
                eprintln!("{error:#}");
            }
        }
        self.lab.leftovers()
    }
}

/// All daemons at once: each looks at the installed QEMU first.
fn start_daemons(lab: &Lab, options: &SceneOptions) -> Result<BTreeMap<String, HostProcess>> {
    let start = |name: &str| options.start_daemon(lab, name);
    std::thread::scope(|scope| {
        let starting: Vec<_> =
            options.hosts.iter().map(|name| (name, scope.spawn(move || start(name)))).collect();
        let join = |(name, thread): (&String, std::thread::ScopedJoinHandle<'_, _>)| {
            let host: Result<HostProcess> =
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
            Ok((name.clone(), host?))
        };
        starting.into_iter().map(join).collect()
    })
}
