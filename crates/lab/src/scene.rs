//! What most tests, the demo and the benchmarks begin with: a laboratory whose
//! hosts run the daemon, and one test guest that can be started, protected,
//! talked to, and found again on another host.

use crate::bench_guest::{self, BENCH_IMAGE, BenchGuest};
use crate::etcd::Etcd;
use crate::host::{ArbiterKind, HostOptions, HostProcess, issue_certificates};
use crate::lab::{BRIDGE, GUEST_ADDRESS, Lab};
use crate::records::RecordClient;
use crate::shell::GuestShell;
use crate::wait::await_servers;
use crate::watcher::{Mac, Watcher};
use crate::{command, wait_for};
use anyhow::{Context, Result, bail, ensure};
use serde::Serialize;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;
use understudy_protocol::Policy;

/// The VM's name on every host.
pub const VM: &str = "guest";
/// The guest's record server.
pub const RECORDS_PORT: u16 = 7000;
/// The guest's server of shell lines.
pub const SHELL_PORT: u16 = 7001;
/// The guest's echo server.
pub const ECHO_PORT: u16 = 7002;
/// The bench guest's tbench server.
pub const TBENCH_PORT: u16 = 7003;
/// The bench guest's web server.
pub const WEB_PORT: u16 = 80;
/// The address of the guest's second card, and its network's client.
pub const SECOND_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 78, 0, 50);
const SECOND_CLIENT: &str = "10.78.0.100/24";

/// For a first synchronisation.
const SYNC_LIMIT: Duration = Duration::from_secs(180);
/// For a backup to run the guest after a failure.
const TAKE_OVER_LIMIT: Duration = Duration::from_secs(30);

/// The images that `guests/build` makes disks from, in the guest's order.
const IMAGES: [&str; 2] = ["disk.img", "disk2.img"];
const BOOT_IMAGE: &str = "boot-sector.img";
pub(crate) const KERNEL: &str = "vmlinuz";
pub(crate) const INITRD: &str = "initrd.gz";

/// Which of the test guests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuestKind {
    /// Linux with the guest tools.
    Linux,
    /// The real-mode boot sector: one disk, no card, no servers.
    BootSector,
    /// Debian with the programs of the benchmark suite: one disk, one card. Needs
    /// `guests/bench`.
    Bench,
}

impl GuestKind {
    /// Whether it runs Linux, and so the servers of the guest tools.
    fn is_linux(self) -> bool {
        self != GuestKind::BootSector
    }

    /// The ports of the servers that are up once the guest is.
    fn ports(self) -> &'static [u16] {
        match self {
            GuestKind::Linux => &[RECORDS_PORT, SHELL_PORT, ECHO_PORT],
            GuestKind::BootSector => &[],
            GuestKind::Bench => &[RECORDS_PORT, SHELL_PORT, ECHO_PORT, TBENCH_PORT, WEB_PORT],
        }
    }
}

/// What a scene is made of.
#[derive(Clone, Debug)]
pub struct SceneOptions {
    /// The program under test.
    pub binary: PathBuf,
    /// Where `guests/build` put the guests' files.
    pub guest_files: PathBuf,
    /// The hosts.
    pub hosts: Vec<String>,
    /// Networks between the hosts for their daemons alone; without, they use
    /// the guest's.
    pub cables: usize,
    /// The daemons' options, by host; a host that is not named has none.
    pub daemons: BTreeMap<String, HostOptions>,
    /// The guest.
    pub kind: GuestKind,
    /// Its memory in MiB.
    pub memory_mib: u32,
    /// Its virtual CPUs.
    pub vcpus: u32,
    /// Its disks, 0 to 2; without the first there is no record server to use.
    pub disks: usize,
    /// Whether the second disk is a qcow2 image; all others are raw.
    pub second_disk_is_qcow2: bool,
    /// Its cards, 1 or 2.
    pub cards: usize,
    /// QEMU's accelerator, as `accel` in the definition; its default without.
    pub accel: Option<String>,
    /// The checkpoint policy in the definition; the product's default without.
    pub policy: Option<Policy>,
    /// Whether its QEMU counts instructions from the start, as `lockstep` in the definition.
    pub lockstep: bool,
}

impl SceneOptions {
    /// Hosts a and b; Linux with 512 MiB, one vCPU, one disk, one card.
    pub fn new(binary: &Path, guest_files: &Path) -> SceneOptions {
        SceneOptions {
            binary: binary.to_owned(),
            guest_files: guest_files.to_owned(),
            hosts: vec!["a".to_owned(), "b".to_owned()],
            cables: 0,
            daemons: BTreeMap::new(),
            kind: GuestKind::Linux,
            memory_mib: 512,
            vcpus: 1,
            disks: 1,
            second_disk_is_qcow2: false,
            cards: 1,
            accel: None,
            policy: None,
            lockstep: false,
        }
    }

    /// A host's daemon, started with its options.
    fn start_daemon(&self, lab: &Lab, name: &str) -> Result<HostProcess> {
        let none = HostOptions::default();
        let options = self.daemons.get(name).unwrap_or(&none);
        HostProcess::start_with(lab, name, &self.binary, options)
    }

    /// The files that the guest is made of, in `guest_files`.
    fn sources(&self) -> Vec<&'static str> {
        match self.kind {
            GuestKind::BootSector => vec![BOOT_IMAGE],
            GuestKind::Bench => vec![KERNEL, INITRD, BENCH_IMAGE],
            GuestKind::Linux => {
                [&[KERNEL, INITRD][..], &IMAGES[..self.disks.min(IMAGES.len())]].concat()
            }
        }
    }

    /// Says what is missing or impossible; [`Scene::start`] does so as well.
    pub fn check(&self) -> Result<()> {
        ensure!(self.disks <= IMAGES.len(), "{} disks asked for, 2 possible", self.disks);
        ensure!((1..=2).contains(&self.cards), "{} cards asked for, 1 or 2 possible", self.cards);
        if self.kind == GuestKind::Bench {
            ensure!(
                self.disks == 1 && self.cards == 1,
                "the bench guest has one disk and one card"
            );
            BenchGuest::files(&self.guest_files, GUEST_ADDRESS)?;
        }
        for name in self.sources() {
            let path = self.guest_files.join(name);
            ensure!(
                path.is_file(),
                "there is no {}: build the test guests with `make guests`",
                path.display()
            );
        }
        Ok(())
    }
}

/// The definition file of the scene's VM.
#[derive(Serialize)]
struct VmToml {
    name: &'static str,
    memory: String,
    vcpus: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    accel: Option<String>,
    lockstep: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    kernel: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    initrd: Option<PathBuf>,
    #[serde(skip_serializing_if = "Option::is_none")]
    append: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    policy: Option<Policy>,
    disk: Vec<DiskToml>,
    card: Vec<CardToml>,
}

#[derive(Serialize)]
struct DiskToml {
    path: PathBuf,
    format: &'static str,
}

#[derive(Serialize)]
struct CardToml {
    mac: String,
    bridge: &'static str,
}

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
        let lab = Lab::with_cables(&names, options.cables)?;
        if options.cards == 2 {
            lab.client().ip(&["addr", "add", SECOND_CLIENT, "dev", "net"])?;
        }
        // A host with certificates does not talk to one without.
        if !options.daemons.values().any(|daemon| daemon.insecure) {
            issue_certificates(&lab, &options.binary)?;
        }
        let definition = write_definition(&lab, &options)?;
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

    /// Where the guests' files are.
    pub fn guest_files(&self) -> &Path {
        &self.options.guest_files
    }

    /// The VM's definition file.
    pub fn definition(&self) -> &Path {
        &self.definition
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
    pub fn await_protected(&self, host: &str, mut watch: impl FnMut(&Value)) -> Result<Value> {
        wait_for(&format!("host {host}'s guest to be protected"), SYNC_LIMIT, || {
            let status = self.status(host)?;
            watch(&status);
            match status["protection"]["state"].as_str() {
                Some("syncing") => Ok(None),
                Some("protected") => Ok(Some(status)),
                _ => bail!("protection ended: {}", status["protection"]),
            }
        })
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
        let status = self.status(host)?;
        let path = status["disks"][index]["path"].as_str();
        path.map(PathBuf::from).with_context(|| format!("host {host} has no disk {index}"))
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
        let left = self.lab.leftovers()?;
        ensure!(left.is_empty(), "the daemons left behind:\n{left}\n{}", self.diagnostics());
        let name = self.lab.name().clone();
        drop(self);
        let left = name.leftovers()?;
        ensure!(left.is_empty(), "the laboratory left behind:\n{left}");
        Ok(())
    }
}

/// The hardware address of one of the guest's cards.
fn mac(card: usize) -> String {
    format!("52:54:00:75:73:{:02x}", card + 1)
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

/// Copies the disks and writes the definition; returns its path.
fn write_definition(lab: &Lab, options: &SceneOptions) -> Result<PathBuf> {
    let linux = options.kind.is_linux();
    let file = |name| linux.then(|| options.guest_files.join(name));
    let cards = if linux { options.cards } else { 0 };
    let card = |index| CardToml { mac: mac(index), bridge: BRIDGE };
    let definition = VmToml {
        name: VM,
        memory: format!("{}M", options.memory_mib),
        vcpus: options.vcpus,
        accel: options.accel.clone(),
        lockstep: options.lockstep,
        kernel: file(KERNEL),
        initrd: file(INITRD),
        append: match options.kind {
            GuestKind::BootSector => None,
            GuestKind::Linux => Some(append(GUEST_ADDRESS, options.cards)),
            GuestKind::Bench => Some(bench_guest::append(GUEST_ADDRESS)),
        },
        policy: options.policy,
        disk: copy_disks(lab, options)?,
        card: (0..cards).map(card).collect(),
    };
    let path = lab.directory().join("vm.toml");
    let text = toml::to_string(&definition).context("cannot write the definition as TOML")?;
    fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path)
}

/// The kernel's command line.
pub(crate) fn append(address: Ipv4Addr, cards: usize) -> String {
    // An emulated timer is late on a busy machine: no reason to call it broken.
    let mut line = "console=ttyS0 quiet no_timer_check cryptomgr.notests".to_owned();
    line += &format!(" us.ip={address}/24");
    if cards == 2 {
        // Both cards are on one bridge: each is to answer for itself only.
        line += &format!(" us.ip2={SECOND_ADDRESS}/24 sysctl.net.ipv4.conf.all.arp_ignore=1");
    }
    line
}

fn copy_disks(lab: &Lab, options: &SceneOptions) -> Result<Vec<DiskToml>> {
    let images = options.sources().into_iter().filter(|name| name.ends_with(".img"));
    let copy = |(index, image): (usize, &str)| {
        let from = options.guest_files.join(image);
        let path = lab.directory().join(from.file_name().unwrap_or_default());
        let paths = [&*from.to_string_lossy(), &*path.to_string_lossy()];
        if index == 1 && options.second_disk_is_qcow2 {
            let convert = ["convert", "-f", "raw", "-O", "qcow2"];
            command::run("qemu-img", &[&convert[..], &paths].concat())?;
            return Ok(DiskToml { path, format: "qcow2" });
        }
        let sparse = ["--sparse=always", "--reflink=auto"];
        command::run("cp", &[&sparse[..], &paths].concat())?;
        Ok(DiskToml { path, format: "raw" })
    };
    images.enumerate().map(copy).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn wrong_options_are_refused_before_anything_is_built() {
        let directory = tempfile::tempdir().unwrap();
        let options = SceneOptions::new(Path::new("understudy"), directory.path());
        let refuse = |options| Scene::start(options).err().expect("an error").to_string();
        let missing = refuse(options.clone());
        assert!(missing.contains("vmlinuz") && missing.contains("make guests"), "{missing}");
        let disks = refuse(SceneOptions { disks: 3, ..options.clone() });
        assert!(disks.contains("3 disks"), "{disks}");
        assert!(refuse(SceneOptions { cards: 0, ..options }).contains("0 cards"));
    }

    #[test]
    fn cards_have_addresses_of_their_own() {
        assert_ne!(mac(0).parse::<Mac>().unwrap(), mac(1).parse::<Mac>().unwrap());
        assert!(append(GUEST_ADDRESS, 1).ends_with("us.ip=10.77.0.50/24"));
        assert!(append(GUEST_ADDRESS, 2).contains("us.ip2=10.78.0.50/24"));
    }
}
