//! The laboratory: namespaces, the switch between them, and its failures.

use crate::command::run;
use crate::etcd;
use crate::leftovers::Leftovers;
use crate::namespace::Namespace;
use crate::processors::Shares;
use crate::remains::{self, LabName};
use crate::wait::wait_for;
use anyhow::{Context, Result, bail, ensure};
use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The bridge of every host, for the VMs' taps; it carries the host's address.
pub const BRIDGE: &str = "br0";
/// The bridge's port towards the switch, in every host.
pub const UPLINK: &str = "uplink";
/// Address of the client.
pub const CLIENT_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 100);
/// The address that a guest is given.
pub const GUEST_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 77, 0, 50);
/// The port on which daemons listen for their peers.
pub const PEER_PORT: u16 = 7700;

/// The kernel's BR_STATE numbers.
const DISABLED: &str = "0";
const FORWARDING: &str = "3";
/// Time for the kernel to notice that a cable is plugged in.
const CARRIER_LIMIT: Duration = Duration::from_secs(30);

const SWITCH: &str = "sw0";
/// Cables that hosts may have between them beside the switch.
const MOST_CABLES: usize = 4;
/// Hosts have 10.77.0.1 and up, below the guest's address.
const MOST_HOSTS: usize = 40;

/// Hosts, a client and a switch between them, on this machine.
pub struct Lab {
    name: LabName,
    hosts: Vec<String>,
    cables: usize,
    directory: PathBuf,
    /// Shares of the processors; without, they are not shared out.
    shares: Option<Shares>,
}

impl Lab {
    /// Builds a laboratory with these hosts ("a", "b", …).
    pub fn new(hosts: &[&str]) -> Result<Lab> {
        Lab::with_cables(hosts, 0)
    }

    /// The same, with so many further networks between the hosts, for their
    /// daemons alone; each can be cut by itself.
    pub fn with_cables(hosts: &[&str], cables: usize) -> Result<Lab> {
        check_machine()?;
        check_hosts(hosts)?;
        ensure!(cables <= MOST_CABLES, "{cables} cables asked for, {MOST_CABLES} possible");
        remains::remove_stale();
        let name = LabName::unique();
        remains::register(&name);
        let directory = tempfile::Builder::new().prefix(&name.directory_prefix()).tempdir();
        let lab = Lab {
            directory: directory.context("cannot make the laboratory's directory")?.keep(),
            hosts: hosts.iter().map(|host| (*host).to_owned()).collect(),
            cables,
            name,
            shares: None,
        };
        // From here on, an error drops `lab`, which removes what is there.
        lab.build().with_context(|| format!("cannot build the laboratory {}", lab.name))?;
        Ok(lab)
    }

    /// Pins what is started from now on: on the first host it has a processor to itself, and what
    /// is started elsewhere another one.
    pub fn pin(&mut self) -> Result<()> {
        self.shares = Some(Shares::find()?);
        Ok(())
    }

    fn build(&self) -> Result<()> {
        fs::create_dir(self.arbiter_directory())?;
        let switch = self.switch();
        switch.create()?;
        add_bridge(&switch, SWITCH)?;
        self.client().create()?;
        self.join(&self.client(), &port("client"), "net", SWITCH)?;
        set_address(&self.client(), "net", CLIENT_ADDRESS)?;
        for host in &self.hosts {
            fs::create_dir(self.host_directory(host)?)?;
            let namespace = self.host(host)?;
            namespace.create()?;
            self.join(&namespace, &port(host), UPLINK, SWITCH)?;
            add_bridge(&namespace, BRIDGE)?;
            namespace.ip(&["link", "set", UPLINK, "master", BRIDGE])?;
            set_address(&namespace, BRIDGE, self.host_address(host)?)?;
        }
        (0..self.cables).try_for_each(|cable| self.add_cable(cable))
    }

    fn add_cable(&self, cable: usize) -> Result<()> {
        let bridge = format!("sw{}", cable + 1);
        add_bridge(&self.switch(), &bridge)?;
        for host in &self.hosts {
            let (namespace, end) = (self.host(host)?, cable_end(cable));
            self.join(&namespace, &cable_port(cable, host), &end, &bridge)?;
            set_address(&namespace, &end, self.cable_address(host, cable)?)?;
        }
        Ok(())
    }

    /// A cable from a namespace's interface `end` to a port of a bridge of the
    /// switch.
    fn join(&self, namespace: &Namespace, port: &str, end: &str, bridge: &str) -> Result<()> {
        let switch = self.switch();
        let cable = ["link", "add", port, "type", "veth", "peer", "name", end];
        switch.ip(&[&cable[..], &["netns", namespace.name()]].concat())?;
        switch.ip(&["link", "set", port, "master", bridge, "up"])?;
        namespace.ip(&["link", "set", end, "up"])?;
        Ok(())
    }

    /// The beginning of every name that the laboratory has in the system.
    pub fn name(&self) -> &LabName {
        &self.name
    }

    /// Its hosts' names, in the order of their addresses.
    pub fn hosts(&self) -> &[String] {
        &self.hosts
    }

    /// Its directory: removed with it.
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// A host's own directory, for its state, its socket and its disks.
    pub fn host_directory(&self, host: &str) -> Result<PathBuf> {
        self.index(host)?;
        Ok(self.directory.join(host))
    }

    /// The directory of the `file` arbiter: the storage that all hosts reach.
    pub fn arbiter_directory(&self) -> PathBuf {
        self.directory.join("arbiter")
    }

    /// A host's namespace.
    pub fn host(&self, host: &str) -> Result<Namespace> {
        let first = self.index(host)? == 0;
        let processor =
            self.shares.map(|shares| if first { shares.first_host } else { shares.others });
        Ok(self.name.namespace(host).on(processor))
    }

    /// The client's namespace.
    pub fn client(&self) -> Namespace {
        self.name.namespace("client").on(self.shares.map(|shares| shares.others))
    }

    /// The namespace of the arbiter, when it is an etcd.
    pub(crate) fn etcd(&self) -> Namespace {
        self.name.namespace("etcd").on(self.shares.map(|shares| shares.others))
    }

    fn switch(&self) -> Namespace {
        self.name.namespace("sw")
    }

    /// A host's address.
    pub fn host_address(&self, host: &str) -> Result<Ipv4Addr> {
        // Fits: `check_hosts` allows no more than MOST_HOSTS.
        Ok(Ipv4Addr::new(10, 77, 0, self.index(host)? as u8 + 1))
    }

    fn cable_address(&self, host: &str, cable: usize) -> Result<Ipv4Addr> {
        Ok(Ipv4Addr::new(10, 81 + cable as u8, 0, self.index(host)? as u8 + 1))
    }

    /// Addresses where a host's daemon listens for its peers: one address for each cable,
    /// or the host's own if it has none.
    pub fn peer_addresses(&self, host: &str) -> Result<Vec<SocketAddr>> {
        let addresses = match self.cables {
            0 => vec![self.host_address(host)?],
            cables => {
                (0..cables).map(|cable| self.cable_address(host, cable)).collect::<Result<_>>()?
            }
        };
        Ok(addresses.into_iter().map(|address| (address, PEER_PORT).into()).collect())
    }

    /// The names of a host's own interfaces.
    pub(crate) fn interfaces(&self) -> Vec<String> {
        let cables = (0..self.cables).map(cable_end);
        ["lo", BRIDGE, UPLINK, etcd::LINK].map(str::to_owned).into_iter().chain(cables).collect()
    }

    fn index(&self, host: &str) -> Result<usize> {
        let found = self.hosts.iter().position(|other| other == host);
        found.with_context(|| format!("no host `{host}` in this laboratory: {:?}", self.hosts))
    }

    /// Cuts a host off: the switch drops its frames in both directions. The
    /// link stays up, so that only silence tells the host and its peers.
    pub fn cut(&self, host: &str) -> Result<()> {
        (0..self.cables).try_for_each(|cable| self.cut_cable(host, cable))?;
        self.set_port_state(&port(host), DISABLED)
    }

    /// The same for one of the cables that [`Lab::with_cables`] laid.
    pub fn cut_cable(&self, host: &str, cable: usize) -> Result<()> {
        self.index(host)?;
        self.set_port_state(&cable_port(cable, host), DISABLED)
    }

    /// Limits what a host sends and what it receives to so many Mbit/s each.
    pub fn limit_speed(&self, host: &str, mbits: u32) -> Result<()> {
        let rate = format!("{mbits}mbit");
        let limit = ["root", "tbf", "rate", &rate, "burst", "128kb", "latency", "50ms"];
        for (namespace, interface) in [(self.host(host)?, UPLINK), (self.switch(), &port(host))] {
            let device = ["-n", namespace.name(), "qdisc", "replace", "dev", interface];
            run("tc", &[&device[..], &limit].concat())?;
        }
        Ok(())
    }

    /// Has the kernel lose, double and delay what a host sends and what it receives, as the words of
    /// tc's `netem` say.
    pub fn disturb(&self, host: &str, netem: &[&str]) -> Result<()> {
        for (namespace, interface) in [(self.host(host)?, UPLINK), (self.switch(), &port(host))] {
            let device = ["-n", namespace.name(), "qdisc", "replace", "dev", interface];
            run("tc", &[&device[..], &["root", "netem"], netem].concat())?;
        }
        Ok(())
    }

    /// Has a host send what it sends in frames of one segment each, so that each is as long as it is
    /// on a wire. For connections that begin from here on.
    pub fn cut_segments(&self, host: &str) -> Result<()> {
        for interface in (0..self.cables).map(cable_end).chain([UPLINK.to_owned()]) {
            self.host(host)?.ip(&["link", "set", &interface, "gso_max_segs", "1"])?;
        }
        Ok(())
    }

    /// A hole for long frames on the way to a host: whatever has more bytes than these vanishes, and
    /// nobody is told. Undone with 1500.
    pub fn limit_frames(&self, host: &str, bytes: u32) -> Result<()> {
        self.host(host)?.ip(&["link", "set", UPLINK, "mtu", &bytes.to_string()]).map(drop)
    }

    /// The same on one of the cables that [`Lab::with_cables`] laid.
    pub fn limit_frames_of_cable(&self, host: &str, cable: usize, bytes: u32) -> Result<()> {
        let bytes = bytes.to_string();
        self.host(host)?.ip(&["link", "set", &cable_end(cable), "mtu", &bytes]).map(drop)
    }

    /// Undoes [`cut_cable`](Lab::cut_cable).
    pub fn heal_cable(&self, host: &str, cable: usize) -> Result<()> {
        self.index(host)?;
        self.set_port_state(&cable_port(cable, host), FORWARDING)
    }

    /// Unplugs a host's cable at the switch: both ends lose the carrier.
    pub fn unplug(&self, host: &str) -> Result<()> {
        self.index(host)?;
        self.switch().ip(&["link", "set", &port(host), "down"])?;
        Ok(())
    }

    /// Undoes [`cut`](Lab::cut) and [`unplug`](Lab::unplug).
    pub fn heal(&self, host: &str) -> Result<()> {
        self.index(host)?;
        self.switch().ip(&["link", "set", &port(host), "up"])?;
        // Before its carrier is there a port takes no state.
        wait_for(&format!("the carrier of {host}'s cable"), CARRIER_LIMIT, || {
            let shown = self.switch().ip(&["-brief", "link", "show", &port(host)])?;
            Ok(shown.split_whitespace().nth(1).filter(|state| *state == "UP").map(drop))
        })?;
        (0..self.cables).try_for_each(|cable| self.heal_cable(host, cable))?;
        self.set_port_state(&port(host), FORWARDING)
    }

    fn set_port_state(&self, port: &str, state: &str) -> Result<()> {
        let switch = self.switch();
        let link = ["link", "set", "dev", port, "state", state];
        run("bridge", &[&["-n", switch.name()], &link[..]].concat())?;
        Ok(())
    }

    /// Leftovers: what the hosts hold beyond the bare laboratory: taps and other
    /// interfaces, processes, mounts. Empty once every daemon has ended and
    /// has cleaned up. After the laboratory, see [`LabName::leftovers`].
    pub fn leftovers(&self) -> Result<Leftovers> {
        Leftovers::in_lab(self)
    }

    /// Waits until a host has no taps any more. The kernel has its time to close what processes held: one counts as ended,
    /// and is in no namespace, before its last thread has let go of a tap.
    pub fn await_no_taps(&self, host: &str, limit: Duration) -> Result<()> {
        let namespace = self.host(host)?;
        wait_for(&format!("host {host}'s taps to be gone"), limit, || {
            let others = Leftovers::interfaces_in(self, &namespace)?;
            Ok(others.is_empty().then_some(()))
        })
    }

    /// The ends of all daemons' logs. Printed by itself when a panic drops the
    /// laboratory; for other failures, to be added to the error.
    pub fn diagnostics(&self) -> String {
        let directories = self.hosts.iter().map(|host| self.directory.join(host));
        directories.map(|directory| crate::host::log_tail(&directory)).collect()
    }

    /// Copies all whole logs into `directory`, which is made: one folder for each host.
    pub fn keep_logs(&self, directory: &Path) -> Result<()> {
        for host in &self.hosts {
            let target = directory.join(host);
            fs::create_dir_all(&target).with_context(|| format!("in {}", target.display()))?;
            for log in
                crate::host::logs(&self.directory.join(host)).iter().filter(|log| log.is_file())
            {
                let name = log.file_name().context("a log has a name")?;
                fs::copy(log, target.join(name))
                    .with_context(|| format!("of {}", log.display()))?;
            }
        }
        Ok(())
    }

    /// Removes every laboratory of this process. Happens by itself on SIGINT
    /// and SIGTERM; to be called before `std::process::exit`, which drops
    /// nothing.
    pub fn remove_all() {
        remains::remove_all();
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("{}", self.diagnostics());
        }
        if let Err(error) = remains::remove(&self.name) {
            tracing::error!("cannot remove the laboratory {}: {error:#}", self.name);
        }
    }
}

/// The switch's port for `who`.
fn port(who: &str) -> String {
    format!("p-{who}")
}

/// The switch's port for a host on one of the further cables.
fn cable_port(cable: usize, host: &str) -> String {
    format!("p{}-{host}", cable + 1)
}

/// A host's interface on one of the further cables.
fn cable_end(cable: usize) -> String {
    format!("cable{}", cable + 1)
}

fn add_bridge(namespace: &Namespace, name: &str) -> Result<()> {
    let bridge = ["link", "add", name, "type", "bridge"];
    let quiet = ["stp_state", "0", "forward_delay", "0", "mcast_snooping", "0"];
    namespace.ip(&[&bridge[..], &quiet].concat())?;
    namespace.ip(&["link", "set", name, "up"])?;
    Ok(())
}

fn set_address(namespace: &Namespace, interface: &str, address: Ipv4Addr) -> Result<()> {
    namespace.ip(&["addr", "add", &format!("{address}/24"), "dev", interface])?;
    Ok(())
}

fn check_machine() -> Result<()> {
    ensure!(
        nix::unistd::geteuid().is_root(),
        "a laboratory makes network namespaces, which needs root: run this as root"
    );
    run("ip", &["-V"])?;
    run("bridge", &["-V"])?;
    Ok(())
}

fn check_hosts(hosts: &[&str]) -> Result<()> {
    ensure!(hosts.len() <= MOST_HOSTS, "{} hosts asked for, {MOST_HOSTS} possible", hosts.len());
    for (index, host) in hosts.iter().enumerate() {
        // Becomes part of an interface name, of which the kernel takes 15 bytes.
        let plain = host.bytes().all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit());
        if host.is_empty() || host.len() > 12 || !plain {
            bail!("host name `{host}`: 1 to 12 lower-case letters and digits are allowed");
        }
        ensure!(!["client", "sw", "arbiter", "etcd"].contains(host), "host name `{host}` is taken");
        ensure!(!hosts[..index].contains(host), "host name `{host}` is given twice");
    }
    Ok(())
}
