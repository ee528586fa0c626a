//! The host's configuration file.
//!
//! ```toml
//! name = "a"
//! listen = "10.0.0.1:7700"
//!
//! [tls]                         # `understudy pki` makes these
//! ca = "/etc/understudy/ca.pem"
//! cert = "/etc/understudy/a.pem"
//! key = "/etc/understudy/a.key"
//!
//! [arbiter]
//! kind = "file"
//! path = "/srv/arbiter"
//!
//! [metrics]
//! listen = "10.0.0.1:9177"
//!
//! [api]                         # beside the unix socket, over TLS; the dashboard is at /
//! listen = "10.0.0.1:7780"
//! tokens = { admin = "/etc/understudy/admin.token" }   # mode 0600, a token a line
//! certificates = { alice = "operate" }                 # by their name
//!
//! [webhook]                     # each event is posted there as JSON
//! url = "https://alerts.example.org/understudy"
//!
//! [peers]
//! b = "10.0.0.2:7700"
//! c = ["10.0.0.3:7700", "10.1.0.3:7700"]   # two paths
//! ```

mod api;
mod arbiter;
mod cluster;
mod detection;
mod ending;
mod groups;
mod listening;
mod qemu_process;
mod source;
mod webhook;

pub use api::{Access, ApiConfig};
pub use arbiter::{ArbiterConfig, EtcdConfig, EtcdEndpoints, EtcdTls};
pub(crate) use cluster::MOST_MEMBERS;
pub use cluster::{ClusterConfig, Schedule};
pub use detection::LONGEST_LEASE;
pub use ending::Ending;
pub use groups::Groups;
use understudy_protocol::{GroupName, HostName};
pub use understudy_replication::primary::Detection;
pub use webhook::WebhookUrl;
pub(crate) use webhook::shown;

use api::RawApi;
use arbiter::RawArbiter;
use cluster::RawCluster;
use detection::RawDetection;
use groups::RawGroups;
use listening::Listening;
use qemu_process::RawQemuProcess;
use serde::Deserialize;
use source::Source;
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use toml::Spanned;
use understudy_cluster::store_keys::{StoreKeys, Stores};
use understudy_link::tls::TlsFiles;
use understudy_machine::cgroup::Limits;
use understudy_qemu::RunAs;
use understudy_qemu::definition::MemorySize;
use understudy_qemu::programs::{Missing, find_agent, find_qemu, is_executable};
use understudy_report::error::{ErrorKind, HostError};
use webhook::RawWebhook;

/// Path at which the daemon listens for the command line, unless told otherwise.
pub const DEFAULT_SOCKET: &str = "/run/understudy/understudy.sock";

const DEFAULT_STATE_DIR: &str = "/var/lib/understudy";
const DEFAULT_POWER_OFF_SECONDS: u64 = 60;
/// Nothing is waited for at 0.
const POWER_OFF_SECONDS: RangeInclusive<u64> = 0..=3600;
/// `sun_path` of a unix address has 108 bytes, the last of them zero.
const LONGEST_SOCKET_PATH: usize = 107;

/// A host's configuration, checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostConfig {
    /// File from which it was read.
    pub file: PathBuf,
    /// Name of this host, as its peers and the arbiter know it.
    pub name: HostName,
    /// Addresses at which peers reach this host; at least one.
    pub listen: Vec<SocketAddr>,
    /// Directory where the daemon keeps what must survive it; absolute.
    pub state_dir: PathBuf,
    /// The unix socket of the local API; absolute.
    pub socket: PathBuf,
    /// Arbiter, which decides which host owns a VM. Without it nothing can be protected.
    pub arbiter: Option<ArbiterConfig>,
    /// Address where metrics can be read by anybody, beside the local API.
    pub metrics: Option<SocketAddr>,
    /// Callers that may use its API over the network, if anybody.
    pub api: Option<ApiConfig>,
    /// URL to which events are posted.
    pub webhook: Option<WebhookUrl>,
    /// The other hosts by name, with an address for each path to them.
    pub peers: BTreeMap<HostName, Vec<SocketAddr>>,
    /// Certificates by which this host and its peers recognise each other.
    pub tls: Option<TlsFiles>,
    /// Whether the operator wants to do without it although others can reach
    /// this host.
    pub insecure: bool,
    /// QEMU, when it is not the one on the PATH; see [`HostConfig::qemu_path`].
    pub qemu: Option<PathBuf>,
    /// The agent library, when it is elsewhere; see [`HostConfig::agent_path`].
    pub agent: Option<PathBuf>,
    /// User that QEMU runs as.
    pub run_as: RunAs,
    /// The most that each QEMU may use.
    pub limits: Limits,
    /// The most memory that VMs and backups may take together, in bytes; without
    /// it, what the system has.
    pub memory_limit: Option<u64>,
    /// Silences that are failures.
    pub detection: Detection,
    /// Time for which a sole owner may be without the arbiter; zero: it keeps no lease.
    pub lease: Duration,
    /// The device that resets this host when its daemon does nothing; shorter than the lease.
    pub watchdog: Option<PathBuf>,
    /// Time that a guest may take to power off when the daemon ends; then its power is cut.
    pub power_off_timeout: Duration,
    /// Settings for how lost protection is restored.
    pub repair: RepairConfig,
    /// Whether VMs may be followed by a backup without output commit.
    pub allow_unheld_output: bool,
    /// Whether VMs that are started get a process of their own.
    pub keepers: bool,
    /// VMs that share a keeper.
    pub groups: Groups,
    /// Groups of VMs that are snapshotted together.
    pub clusters: BTreeMap<GroupName, ClusterConfig>,
    /// The keys of encrypted snapshot stores.
    pub store_keys: StoreKeys,
    /// The snapshot stores that other hosts may have this one use.
    pub stores: Stores,
}

/// Settings for how lost protection is restored.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RepairConfig {
    /// Whether VMs that run on this host get a new backup by themselves.
    pub enabled: bool,
    /// Zone that shares this host's fate, a rack for example: a backup is
    /// rather chosen in another zone.
    pub zone: Option<String>,
}

impl Default for RepairConfig {
    fn default() -> RepairConfig {
        RepairConfig { enabled: true, zone: None }
    }
}

impl HostConfig {
    /// Reads and checks a configuration file.
    pub fn load(path: &Path) -> Result<HostConfig, HostError> {
        let text = fs::read_to_string(path).map_err(|error| {
            let kind = match error.kind() {
                io::ErrorKind::NotFound => ErrorKind::NotFound,
                _ => ErrorKind::Invalid,
            };
            HostError::new(kind, format!("{}: {error}", path.display()))
        })?;
        HostConfig::from_toml(&text, path)
    }

    /// Checks the text of a configuration; `file` is only for the errors.
    pub fn from_toml(text: &str, file: &Path) -> Result<HostConfig, HostError> {
        let source = Source::new(text, file);
        let raw: RawConfig = toml::from_str(text).map_err(|error| source.syntax(&error))?;
        raw.check(&source)
    }

    /// The QEMU binary: the configured one, else the first on the PATH.
    pub fn qemu_path(&self) -> Result<PathBuf, Missing> {
        if let Some(path) = &self.qemu {
            if is_executable(path) {
                return Ok(path.clone());
            }
            return Err(Missing(format!("qemu: {} is not an executable file", path.display())));
        }
        find_qemu()
    }

    /// The agent library: the configured one, else [`find_agent`].
    pub fn agent_path(&self) -> Result<PathBuf, Missing> {
        let Some(path) = &self.agent else { return find_agent() };
        if path.is_file() {
            return Ok(path.clone());
        }
        Err(Missing(format!("agent: there is no file {}", path.display())))
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawConfig {
    name: Spanned<String>,
    listen: Spanned<toml::Value>,
    state_dir: Option<Spanned<PathBuf>>,
    socket: Option<Spanned<PathBuf>>,
    arbiter: Option<RawArbiter>,
    #[serde(default)]
    peers: BTreeMap<Spanned<String>, Spanned<toml::Value>>,
    tls: Option<RawTls>,
    insecure: Option<Spanned<bool>>,
    keepers: Option<Spanned<bool>>,
    qemu: Option<Spanned<PathBuf>>,
    agent: Option<Spanned<PathBuf>>,
    memory: Option<MemorySize>,
    #[serde(default)]
    qemu_process: RawQemuProcess,
    #[serde(default)]
    detection: RawDetection,
    #[serde(default)]
    shutdown: RawShutdown,
    #[serde(default)]
    repair: RepairConfig,
    #[serde(default)]
    experiments: RawExperiments,
    metrics: Option<RawMetrics>,
    api: Option<RawApi>,
    webhook: Option<RawWebhook>,
    #[serde(default)]
    groups: RawGroups,
    #[serde(default, rename = "cluster")]
    clusters: BTreeMap<Spanned<String>, RawCluster>,
    #[serde(default)]
    snapshot_keys: BTreeMap<Spanned<String>, Spanned<PathBuf>>,
    #[serde(default)]
    snapshot_stores: Vec<Spanned<String>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawMetrics {
    listen: Spanned<toml::Value>,
}

/// Switches that no host turns on that is to protect anything.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct RawExperiments {
    allow_unheld_output: bool,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct RawShutdown {
    power_off_seconds: Option<Spanned<i64>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawTls {
    ca: Spanned<PathBuf>,
    cert: Spanned<PathBuf>,
    key: Spanned<PathBuf>,
    revoked: Option<Spanned<PathBuf>>,
}

impl RawTls {
    fn check(self, source: &Source<'_>) -> Result<TlsFiles, HostError> {
        Ok(TlsFiles {
            ca: source.absolute("tls.ca", self.ca)?,
            cert: source.absolute("tls.cert", self.cert)?,
            key: source.absolute("tls.key", self.key)?,
            revoked: self.revoked.map(|path| source.absolute("tls.revoked", path)).transpose()?,
        })
    }
}

impl RawConfig {
    fn check(self, source: &Source<'_>) -> Result<HostConfig, HostError> {
        let name = host_name(source, "name", &self.name)?;
        let mut listening = Listening::default();
        let listen = listening.take(source, "listen", &self.listen)?;
        let tls = self.tls.map(|tls| tls.check(source)).transpose()?;
        let beside = tls.as_ref().map(|_| "there is a [tls]");
        let insecure = check_switch(source, ("insecure", self.insecure), beside)?;
        if tls.is_none() && !insecure {
            refuse_strangers(source, "listen", &self.listen, &listen)?;
            for (name, raw) in &self.peers {
                let field = format!("peers.{}", name.get_ref());
                refuse_strangers(source, &field, raw, &source.addresses(&field, raw)?)?;
            }
        }
        let peers = check_peers(source, self.peers, &name, &listen)?;
        let clusters = cluster::check(source, self.clusters)?;
        let watchdog = self.detection.watchdog(source)?;
        let beside = watchdog.as_ref().map(|_| RESETS_KEEPERS);
        let keepers = check_switch(source, ("keepers", self.keepers), beside)?;
        let store_keys = cluster::check_keys(source, self.snapshot_keys)?;
        Ok(HostConfig {
            file: source.file().to_owned(),
            listen,
            metrics: check_metrics(source, self.metrics, &mut listening)?,
            api: self
                .api
                .map(|api| api.check(source, tls.is_some(), &mut listening))
                .transpose()?,
            webhook: self.webhook.map(|webhook| webhook.check(source)).transpose()?,
            peers,
            tls,
            insecure,
            socket: check_socket(source, self.socket)?,
            state_dir: match self.state_dir {
                Some(path) => source.absolute("state_dir", path)?,
                None => DEFAULT_STATE_DIR.into(),
            },
            arbiter: self.arbiter.map(|arbiter| arbiter.check(source)).transpose()?,
            qemu: self.qemu.map(|path| source.absolute("qemu", path)).transpose()?,
            agent: self.agent.map(|path| source.absolute("agent", path)).transpose()?,
            run_as: self.qemu_process.user(source)?,
            limits: self.qemu_process.limits(source)?,
            memory_limit: self.memory.map(MemorySize::bytes),
            lease: self.detection.lease(source)?,
            keepers,
            groups: groups::check(source, self.groups, keepers, &clusters)?,
            watchdog,
            detection: self.detection.check(source)?,
            power_off_timeout: Duration::from_secs(check_number(
                source,
                ("shutdown.power_off_seconds", self.shutdown.power_off_seconds),
                (DEFAULT_POWER_OFF_SECONDS, POWER_OFF_SECONDS),
            )?),
            repair: self.repair,
            allow_unheld_output: self.experiments.allow_unheld_output,
            stores: cluster::check_stores(
                source,
                (&name, self.snapshot_stores),
                &clusters,
                &store_keys,
            )?,
            clusters,
            store_keys,
            name,
        })
    }
}

/// The name of a host: what others call it, if it is written with capitals here.
fn host_name(
    source: &Source<'_>,
    field: &str,
    raw: &Spanned<String>,
) -> Result<HostName, HostError> {
    let name: HostName = source.name(field, raw)?;
    if name != **raw.get_ref() {
        tracing::warn!("{field}: {:?} is read as {name:?}: write it so", raw.get_ref());
    }
    Ok(name)
}

fn check_peers(
    source: &Source<'_>,
    raw: BTreeMap<Spanned<String>, Spanned<toml::Value>>,
    host: &HostName,
    listen: &[SocketAddr],
) -> Result<BTreeMap<HostName, Vec<SocketAddr>>, HostError> {
    let mut peers: BTreeMap<HostName, Vec<SocketAddr>> = BTreeMap::new();
    for (name, addresses) in raw {
        let field = format!("peers.{}", name.get_ref());
        let peer = host_name(source, &field, &name)?;
        if peer == *host {
            let message = "this is the host's own name; list only the other hosts";
            return Err(source.wrong(&field, name.span(), message));
        }
        if peers.contains_key(&peer) {
            let message =
                format!("host {peer} is listed twice: capitals are read as small letters");
            return Err(source.wrong(&field, name.span(), &message));
        }
        let parsed = source.addresses(&field, &addresses)?;
        for address in &parsed {
            if let Some(problem) = misplaced(*address, listen, &peers) {
                return Err(source.wrong(&field, addresses.span(), &problem));
            }
        }
        peers.insert(peer, parsed);
    }
    Ok(peers)
}

/// Message on the watchdog: keepers are there to outlive a daemon.
const RESETS_KEEPERS: &str =
    "detection.watchdog resets this host, with all keepers, when its daemon dies";

/// A switch that is not possible beside something else; `beside` says what, if that is there.
fn check_switch(
    source: &Source<'_>,
    (field, raw): (&str, Option<Spanned<bool>>),
    beside: Option<&str>,
) -> Result<bool, HostError> {
    let Some(raw) = raw else { return Ok(false) };
    match beside.filter(|_| *raw.get_ref()) {
        Some(other) => {
            Err(source.wrong(field, raw.span(), &format!("{other}: remove one of them")))
        }
        None => Ok(raw.into_inner()),
    }
}

/// Refuses addresses of other machines: without certificates, hosts talk to each other on one only.
fn refuse_strangers(
    source: &Source<'_>,
    field: &str,
    raw: &Spanned<toml::Value>,
    addresses: &[SocketAddr],
) -> Result<(), HostError> {
    let Some(address) = addresses.iter().find(|address| !address.ip().is_loopback()) else {
        return Ok(());
    };
    let message = format!(
        "{address} is not on this machine alone, and there is no [tls]: anybody on the way could \
         read and change VMs. Make certificates with `understudy pki` and name them in [tls], \
         or write insecure = true where nobody else is on the network"
    );
    Err(source.wrong(field, raw.span(), &message))
}

/// Reason that speaks against the address as a peer's.
fn misplaced(
    address: SocketAddr,
    listen: &[SocketAddr],
    peers: &BTreeMap<HostName, Vec<SocketAddr>>,
) -> Option<String> {
    if address.ip().is_unspecified() {
        return Some(format!("{address} names no host; write the address of that host"));
    }
    if listen.contains(&address) {
        return Some(format!("{address} is this host's own `listen` address"));
    }
    let (other, _) = peers.iter().find(|(_, known)| known.contains(&address))?;
    Some(format!("{address} is already the address of peer \"{other}\""))
}

fn check_socket(source: &Source<'_>, raw: Option<Spanned<PathBuf>>) -> Result<PathBuf, HostError> {
    let Some(raw) = raw else { return Ok(DEFAULT_SOCKET.into()) };
    let span = raw.span();
    let path = source.absolute("socket", raw)?;
    let length = path.as_os_str().as_bytes().len();
    if length > LONGEST_SOCKET_PATH {
        let message =
            format!("the path has {length} bytes; a unix socket's may have {LONGEST_SOCKET_PATH}");
        return Err(source.wrong("socket", span, &message));
    }
    Ok(path)
}

fn check_metrics(
    source: &Source<'_>,
    raw: Option<RawMetrics>,
    listening: &mut Listening,
) -> Result<Option<SocketAddr>, HostError> {
    let Some(RawMetrics { listen }) = raw else { return Ok(None) };
    match listening.take(source, "metrics.listen", &listen)?[..] {
        [one] => Ok(Some(one)),
        _ => Err(source.wrong("metrics.listen", listen.span(), "one address is possible")),
    }
}

fn check_number(
    source: &Source<'_>,
    (field, value): (&str, Option<Spanned<i64>>),
    (default, allowed): (u64, RangeInclusive<u64>),
) -> Result<u64, HostError> {
    let Some(value) = value else { return Ok(default) };
    match u64::try_from(*value.get_ref()) {
        Ok(number) if allowed.contains(&number) => Ok(number),
        _ => {
            let (low, high) = (allowed.start(), allowed.end());
            let message =
                format!("{} is out of range; allowed is {low} to {high}", value.get_ref());
            Err(source.wrong(field, value.span(), &message))
        }
    }
}

#[cfg(test)]
mod tests;
