//! The host's configuration file.
//!
//! ```toml
//! name = "a"
//! listen = "10.0.0.1:7788"
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
//! [peers]
//! b = "10.0.0.2:7788"
//! c = ["10.0.0.3:7788", "10.1.0.3:7788"]   # two paths
//! ```

mod arbiter;

pub use arbiter::{ArbiterConfig, EtcdConfig, EtcdTls};

use crate::error::{ErrorKind, HostError};
use crate::handshake::MOST_PATHS;
use crate::tls::TlsFiles;
use arbiter::RawArbiter;
use serde::Deserialize;
use std::collections::BTreeMap;
use std::env;
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::ops::{Range, RangeInclusive};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;
use toml::Spanned;
use understudy_qemu::RunAs;
use understudy_qemu::definition::MemorySize;

/// Where the daemon listens for the command line, unless told otherwise.
pub const DEFAULT_SOCKET: &str = "/run/understudy/understudy.sock";
/// File name of the library that the daemon preloads into QEMU.
pub const AGENT_FILE: &str = "libunderstudy_agent.so";

const DEFAULT_STATE_DIR: &str = "/var/lib/understudy";
const DEFAULT_QEMU: &str = "qemu-system-x86_64";
const DEFAULT_DETECTION_MS: u64 = 100;
const DETECTION_MS: RangeInclusive<u64> = 50..=10_000;
const LONGEST_NAME: usize = 63;
/// `sun_path` of a unix address has 108 bytes, the last of them zero.
const LONGEST_SOCKET_PATH: usize = 107;

/// What the TOML reader says of each field that must be there, and an example.
const EXAMPLES: [(&str, &str); 3] = [
    ("missing field `name`", "name = \"a\""),
    ("missing field `listen`", "listen = \"10.0.0.1:7788\""),
    ("missing field `kind`", "kind = \"file\""),
];

/// A host's configuration, checked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HostConfig {
    /// This host's name, as its peers and the arbiter know it.
    pub name: String,
    /// Where peers reach this host; at least one.
    pub listen: Vec<SocketAddr>,
    /// Where the daemon keeps what must survive it; absolute.
    pub state_dir: PathBuf,
    /// The unix socket of the local API; absolute.
    pub socket: PathBuf,
    /// Who decides which host owns a VM. Without it nothing can be protected.
    pub arbiter: Option<ArbiterConfig>,
    /// The other hosts by name, with an address for each path to them.
    pub peers: BTreeMap<String, Vec<SocketAddr>>,
    /// How this host and its peers recognise each other.
    pub tls: Option<TlsFiles>,
    /// Whether the operator wants to do without it although others can reach
    /// this host.
    pub insecure: bool,
    /// QEMU, when it is not the one on the PATH; see [`HostConfig::qemu_path`].
    pub qemu: Option<PathBuf>,
    /// The agent library, when it is elsewhere; see [`HostConfig::agent_path`].
    pub agent: Option<PathBuf>,
    /// Who QEMU runs as.
    pub run_as: RunAs,
    /// The most memory that VMs and backups may take together, in bytes; without
    /// it, what the system has.
    pub memory_limit: Option<u64>,
    /// The shortest silence after which a peer is suspected.
    pub detection_timeout: Duration,
    /// How lost protection is restored.
    pub repair: RepairConfig,
    /// Whether VMs may be followed by a backup without output commit.
    pub allow_unheld_output: bool,
}

/// How lost protection is restored.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct RepairConfig {
    /// Whether VMs that run on this host get a new backup by themselves.
    pub enabled: bool,
    /// What this host shares its fate with, a rack for example: a backup is
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
        let source = Source { text, file };
        let raw: RawConfig = toml::from_str(text).map_err(|error| source.syntax(&error))?;
        raw.check(&source)
    }

    /// The QEMU binary: the configured one, else the first on the PATH.
    pub fn qemu_path(&self) -> Result<PathBuf, HostError> {
        if let Some(path) = &self.qemu {
            if is_executable(path) {
                return Ok(path.clone());
            }
            let message = format!("qemu: {} is not an executable file", path.display());
            return Err(HostError::new(ErrorKind::NotFound, message));
        }
        find_qemu()
    }

    /// The agent library: the configured one, else [`find_agent`].
    pub fn agent_path(&self) -> Result<PathBuf, HostError> {
        let Some(path) = &self.agent else { return find_agent() };
        if path.is_file() {
            return Ok(path.clone());
        }
        let message = format!("agent: there is no file {}", path.display());
        Err(HostError::new(ErrorKind::NotFound, message))
    }
}

/// Finds QEMU on the PATH.
pub fn find_qemu() -> Result<PathBuf, HostError> {
    let path = env::var_os("PATH").unwrap_or_default();
    env::split_paths(&path)
        .map(|folder| folder.join(DEFAULT_QEMU))
        .find(|p| is_executable(p))
        .ok_or_else(|| {
            let message = format!(
                "{DEFAULT_QEMU} is not on the PATH: install the package qemu-system-x86, \
                 or name the binary as `qemu` in the host's configuration"
            );
            HostError::new(ErrorKind::NotFound, message)
        })
}

/// Finds the agent library beside the executable, or where packages install it.
pub fn find_agent() -> Result<PathBuf, HostError> {
    let executable = env::current_exe()
        .map_err(|error| HostError::new(ErrorKind::Internal, format!("/proc/self/exe: {error}")))?;
    let folder = executable.parent().unwrap_or(Path::new("/"));
    let candidates = [folder.join(AGENT_FILE), folder.join("../lib/understudy").join(AGENT_FILE)];
    candidates.iter().find(|path| path.is_file()).cloned().ok_or_else(|| {
        let message = format!(
            "{AGENT_FILE} is neither {} nor {}: install it there, \
             or name it as `agent` in the host's configuration",
            candidates[0].display(),
            candidates[1].display(),
        );
        HostError::new(ErrorKind::NotFound, message)
    })
}

fn is_executable(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
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
    qemu: Option<Spanned<PathBuf>>,
    agent: Option<Spanned<PathBuf>>,
    memory: Option<MemorySize>,
    qemu_process: Option<RawQemuProcess>,
    detection: Option<RawDetection>,
    #[serde(default)]
    repair: RepairConfig,
    #[serde(default)]
    experiments: RawExperiments,
}

/// What no host does that is to protect anything.
#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
struct RawExperiments {
    allow_unheld_output: bool,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawQemuProcess {
    user: Option<Spanned<String>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawDetection {
    timeout_ms: Option<Spanned<i64>>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawTls {
    ca: Spanned<PathBuf>,
    cert: Spanned<PathBuf>,
    key: Spanned<PathBuf>,
}

impl RawTls {
    fn check(self, source: &Source<'_>) -> Result<TlsFiles, HostError> {
        Ok(TlsFiles {
            ca: source.absolute("tls.ca", self.ca)?,
            cert: source.absolute("tls.cert", self.cert)?,
            key: source.absolute("tls.key", self.key)?,
        })
    }
}

impl RawConfig {
    fn check(self, source: &Source<'_>) -> Result<HostConfig, HostError> {
        source.check_name("name", &self.name)?;
        let name = self.name.into_inner();
        let listen = source.addresses("listen", &self.listen)?;
        let tls = self.tls.map(|tls| tls.check(source)).transpose()?;
        let insecure = check_insecure(source, self.insecure, tls.is_some())?;
        if tls.is_none() && !insecure {
            refuse_strangers(source, "listen", &self.listen, &listen)?;
            for (name, raw) in &self.peers {
                let field = format!("peers.{}", name.get_ref());
                refuse_strangers(source, &field, raw, &source.addresses(&field, raw)?)?;
            }
        }
        let peers = check_peers(source, self.peers, &name, &listen)?;
        Ok(HostConfig {
            listen,
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
            run_as: check_user(source, self.qemu_process)?,
            memory_limit: self.memory.map(MemorySize::bytes),
            detection_timeout: check_detection(source, self.detection)?,
            repair: self.repair,
            allow_unheld_output: self.experiments.allow_unheld_output,
            name,
        })
    }
}

fn check_peers(
    source: &Source<'_>,
    raw: BTreeMap<Spanned<String>, Spanned<toml::Value>>,
    host: &str,
    listen: &[SocketAddr],
) -> Result<BTreeMap<String, Vec<SocketAddr>>, HostError> {
    let mut peers: BTreeMap<String, Vec<SocketAddr>> = BTreeMap::new();
    for (name, addresses) in raw {
        let field = format!("peers.{}", name.get_ref());
        source.check_name(&field, &name)?;
        if name.get_ref() == host {
            let message = "this is the host's own name; list only the other hosts";
            return Err(source.wrong(&field, name.span(), message));
        }
        let parsed = source.addresses(&field, &addresses)?;
        for address in &parsed {
            if let Some(problem) = misplaced(*address, listen, &peers) {
                return Err(source.wrong(&field, addresses.span(), &problem));
            }
        }
        peers.insert(name.into_inner(), parsed);
    }
    Ok(peers)
}

fn check_insecure(
    source: &Source<'_>,
    raw: Option<Spanned<bool>>,
    has_tls: bool,
) -> Result<bool, HostError> {
    let Some(raw) = raw else { return Ok(false) };
    if *raw.get_ref() && has_tls {
        let message = "there is a [tls]: remove one of them";
        return Err(source.wrong("insecure", raw.span(), message));
    }
    Ok(raw.into_inner())
}

/// Without certificates, hosts talk to each other on one machine only.
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

/// What speaks against the address as a peer's.
fn misplaced(
    address: SocketAddr,
    listen: &[SocketAddr],
    peers: &BTreeMap<String, Vec<SocketAddr>>,
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

fn check_user(source: &Source<'_>, raw: Option<RawQemuProcess>) -> Result<RunAs, HostError> {
    let Some(user) = raw.and_then(|process| process.user) else { return Ok(RunAs::default()) };
    RunAs::named(user.get_ref())
        .map_err(|error| source.wrong("qemu_process.user", user.span(), &error.to_string()))
}

fn check_detection(source: &Source<'_>, raw: Option<RawDetection>) -> Result<Duration, HostError> {
    let Some(timeout) = raw.and_then(|detection| detection.timeout_ms) else {
        return Ok(Duration::from_millis(DEFAULT_DETECTION_MS));
    };
    match u64::try_from(*timeout.get_ref()) {
        Ok(milliseconds) if DETECTION_MS.contains(&milliseconds) => {
            Ok(Duration::from_millis(milliseconds))
        }
        _ => {
            let (low, high) = (DETECTION_MS.start(), DETECTION_MS.end());
            let message =
                format!("{} is out of range; allowed is {low} to {high}", timeout.get_ref());
            Err(source.wrong("detection.timeout_ms", timeout.span(), &message))
        }
    }
}

/// The text under check; places every error in it.
struct Source<'a> {
    text: &'a str,
    file: &'a Path,
}

impl Source<'_> {
    fn wrong(&self, field: &str, span: Range<usize>, message: &str) -> HostError {
        let line = self.line_of(span.start);
        let message = format!("{}:{line}: {field}: {message}", self.file.display());
        HostError::new(ErrorKind::Invalid, message)
    }

    /// An error of the TOML reader. Where its words do not name the field, the
    /// line that it stands on does.
    fn syntax(&self, error: &toml::de::Error) -> HostError {
        let mut message = error.message().trim().replace('\n', ", ");
        message = message.replace("expected i64", "expected a whole number");
        if let Some((_, example)) = EXAMPLES.iter().find(|(missing, _)| message == *missing) {
            message = format!("{message}; write for example {example}");
        }
        let file = self.file.display();
        let line = self.line_of(error.span().map_or(0, |span| span.start));
        let key = self.text.lines().nth(line - 1).and_then(|line| line.split_once('='));
        let message = match key {
            Some((key, _)) if !message.contains(" field ") => {
                format!("{file}:{line}: {}: {message}", key.trim())
            }
            _ => format!("{file}:{line}: {message}"),
        };
        HostError::new(ErrorKind::Invalid, message)
    }

    fn line_of(&self, offset: usize) -> usize {
        self.text.bytes().take(offset).filter(|byte| *byte == b'\n').count() + 1
    }

    fn check_name(&self, field: &str, name: &Spanned<String>) -> Result<(), HostError> {
        check_host_name(name.get_ref()).map_err(|problem| self.wrong(field, name.span(), &problem))
    }

    /// One address, or a list of them: one for each path.
    fn addresses(
        &self,
        field: &str,
        raw: &Spanned<toml::Value>,
    ) -> Result<Vec<SocketAddr>, HostError> {
        let list = match raw.get_ref() {
            toml::Value::Array(list) => list.as_slice(),
            one => std::slice::from_ref(one),
        };
        let wrong = |message: String| Err(self.wrong(field, raw.span(), &message));
        if !(1..=MOST_PATHS).contains(&list.len()) {
            return wrong(format!("{} addresses; 1 to {MOST_PATHS} are possible", list.len()));
        }
        let mut addresses = Vec::new();
        for value in list {
            let Some(address) = address(value) else {
                return wrong(format!(
                    "{value} is not an address; write \"IP:port\" with a port of 1 to 65535, \
                     for example \"10.0.0.1:7788\", or a list of these"
                ));
            };
            if addresses.contains(&address) {
                return wrong(format!("{address} is there twice"));
            }
            addresses.push(address);
        }
        Ok(addresses)
    }

    fn absolute(&self, field: &str, raw: Spanned<PathBuf>) -> Result<PathBuf, HostError> {
        if raw.get_ref().is_absolute() {
            return Ok(raw.into_inner());
        }
        let message =
            format!("\"{}\" is not an absolute path; start it with /", raw.get_ref().display());
        Err(self.wrong(field, raw.span(), &message))
    }
}

/// The problem with a host's name, if there is one.
pub(crate) fn check_host_name(name: &str) -> Result<(), String> {
    let allowed = |c: char| c.is_ascii_alphanumeric() || c == '-';
    let good = !name.is_empty() && name.len() <= LONGEST_NAME && !name.starts_with('-');
    if good && name.chars().all(allowed) {
        return Ok(());
    }
    Err(format!(
        "\"{name}\" is not a host name; allowed are 1 to {LONGEST_NAME} letters, digits and -, \
         not starting with -"
    ))
}

fn address(value: &toml::Value) -> Option<SocketAddr> {
    value.as_str()?.parse().ok().filter(|address: &SocketAddr| address.port() != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = r#"
name = "a"
listen = "10.0.0.1:7788"
state_dir = "/srv/state"
socket = "/run/a.sock"
qemu = "/opt/qemu"
agent = "/opt/agent.so"

[arbiter]
kind = "file"
path = "/srv/arbiter"

[peers]
b = "10.0.0.2:7788"
c-2 = "[fe80::1]:7788"

[detection]
timeout_ms = 250

[tls]
ca = "/etc/ca.pem"
cert = "/etc/a.pem"
key = "/etc/a.key"
"#;

    /// The error that `GOOD` gives once `from` in it has become `to`.
    fn broken(from: &str, to: &str) -> String {
        assert!(GOOD.contains(from), "{from} is not in the good text");
        let text = GOOD.replacen(from, to, 1);
        let error = HostConfig::from_toml(&text, Path::new("host.toml")).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Invalid);
        error.message
    }

    fn assert_says(message: &str, place: &str, words: &[&str]) {
        assert!(message.starts_with(place), "{message:?} does not start with {place:?}");
        for word in words {
            assert!(message.contains(word), "{message:?} does not say {word:?}");
        }
    }

    #[test]
    fn a_full_file_is_read() {
        let config = HostConfig::from_toml(GOOD, Path::new("host.toml")).unwrap();
        assert_eq!(config.name, "a");
        assert_eq!(config.listen, ["10.0.0.1:7788".parse().unwrap()]);
        assert_eq!(config.state_dir, Path::new("/srv/state"));
        assert_eq!(config.socket, Path::new("/run/a.sock"));
        assert_eq!(config.arbiter, Some(ArbiterConfig::File { path: "/srv/arbiter".into() }));
        assert_eq!(config.peers["b"], ["10.0.0.2:7788".parse().unwrap()]);
        assert_eq!(config.peers["c-2"], ["[fe80::1]:7788".parse().unwrap()]);
        assert_eq!(config.qemu.as_deref(), Some(Path::new("/opt/qemu")));
        assert_eq!(config.agent.as_deref(), Some(Path::new("/opt/agent.so")));
        assert_eq!(config.detection_timeout, Duration::from_millis(250));
    }

    #[test]
    fn what_is_left_out_has_its_default() {
        let text = "name = 'a'\nlisten = '127.0.0.1:7788'";
        let config = HostConfig::from_toml(text, Path::new("host.toml")).unwrap();
        assert_eq!(config.state_dir, Path::new("/var/lib/understudy"));
        assert_eq!(config.socket, Path::new(DEFAULT_SOCKET));
        assert_eq!(config.detection_timeout, Duration::from_millis(100));
        assert_eq!((config.arbiter, config.qemu, config.agent), (None, None, None));
        assert!(config.peers.is_empty());
    }

    #[test]
    fn output_is_held_unless_the_operator_allows_otherwise() {
        let read = |text: &str| HostConfig::from_toml(text, Path::new("host.toml"));
        assert!(!read(GOOD).unwrap().allow_unheld_output);
        let text = format!("{GOOD}[experiments]\nallow_unheld_output = true\n");
        assert!(read(&text).unwrap().allow_unheld_output);
        let text = format!("{GOOD}[experiments]\nunheld = true\n");
        assert_says(&read(&text).unwrap_err().message, "host.toml:", &["allow_unheld_output"]);
    }

    #[test]
    fn a_field_of_the_wrong_kind_or_unknown_is_named() {
        assert_says(&broken("name = \"a\"", "name = 5"), "host.toml:2: name:", &["string"]);
        assert_says(&broken("state_dir", "statedir"), "host.toml:4:", &["statedir", "state_dir"]);
        assert_says(&broken("250", "\"x\""), "host.toml:18: timeout_ms:", &["whole number"]);
        assert_says(&broken("timeout_ms", "timeout"), "host.toml:18:", &["timeout", "timeout_ms"]);
        assert_says(&broken("path = \"/srv/arbiter\"", ""), "host.toml:", &["`path`", "path ="]);
    }

    #[test]
    fn a_missing_field_is_named() {
        assert_says(&broken("name = \"a\"", ""), "host.toml:", &["missing", "`name`", "name ="]);
        assert_says(
            &broken("listen = \"10.0.0.1:7788\"", ""),
            "host.toml:",
            &["`listen`", "listen ="],
        );
    }

    #[test]
    fn broken_toml_is_placed() {
        assert_says(&broken("socket = \"/run/a.sock\"", "socket = \"/run"), "host.toml:5:", &[]);
    }

    #[test]
    fn a_bad_name_says_what_is_allowed() {
        for name in ["", "a b", "-a", "host.example", &"x".repeat(64)] {
            let message = broken("name = \"a\"", &format!("name = \"{name}\""));
            assert_says(&message, "host.toml:2: name:", &[name, "letters, digits"]);
        }
        assert_says(&broken("c-2 =", "\"c_2\" ="), "host.toml:15: peers.c_2:", &["letters"]);
    }

    #[test]
    fn a_bad_address_says_how_to_write_it() {
        for address in ["10.0.0.1", "host:7788", "10.0.0.1:0", "10.0.0.1:70000"] {
            let message = broken("10.0.0.1:7788", address);
            assert_says(&message, "host.toml:3: listen:", &[address, "IP:port"]);
        }
        assert_says(&broken("10.0.0.2:7788", "b"), "host.toml:14: peers.b:", &["IP:port"]);
        assert_says(&broken("10.0.0.2", "0.0.0.0"), "host.toml:14: peers.b:", &["no host"]);
    }

    #[test]
    fn peers_differ_from_each_other_and_from_this_host() {
        assert_says(&broken("b = ", "a = "), "host.toml:14: peers.a:", &["own name"]);
        assert_says(&broken("10.0.0.2", "10.0.0.1"), "host.toml:14: peers.b:", &["`listen`"]);
        let twice = broken("[fe80::1]", "10.0.0.2");
        assert_says(&twice, "host.toml:15: peers.c-2:", &["10.0.0.2:7788", "\"b\""]);
    }

    #[test]
    fn a_host_may_have_several_addresses() {
        let (one, two) = ("\"10.0.0.2:7788\"", "\"10.1.0.2:7788\"");
        let text = GOOD.replace(one, &format!("[{one}, {two}]"));
        let text = text.replace("\"10.0.0.1:7788\"", "[\"10.0.0.1:7788\", \"10.1.0.1:7788\"]");
        let config = HostConfig::from_toml(&text, Path::new("host.toml")).unwrap();
        assert_eq!(config.listen.len(), 2);
        let expected: [SocketAddr; 2] =
            ["10.0.0.2:7788".parse().unwrap(), "10.1.0.2:7788".parse().unwrap()];
        assert_eq!(config.peers["b"], expected);
        let place = "host.toml:14: peers.b:";
        assert_says(&broken(one, "[]"), place, &["0 addresses", "1 to 8"]);
        assert_says(&broken(one, &format!("[{one}, {one}]")), place, &["twice"]);
        assert_says(&broken(one, &format!("[{one}, 7]")), place, &["7 is not an address"]);
        assert_says(&broken(one, "7788"), place, &["7788 is not an address"]);
    }

    #[test]
    fn the_memory_limit_is_a_memory_size() {
        let with = |line: &str| {
            let text = GOOD.replacen("\n[arbiter]", &format!("{line}\n[arbiter]"), 1);
            HostConfig::from_toml(&text, Path::new("host.toml"))
        };
        assert_eq!(with("").unwrap().memory_limit, None);
        assert_eq!(with("memory = \"2G\"\n").unwrap().memory_limit, Some(2 << 30));
        let message = with("memory = \"lots\"\n").unwrap_err().message;
        assert!(message.contains("memory") && message.contains("lots"), "{message}");
    }

    #[test]
    fn strangers_are_kept_out_unless_the_operator_says_so() {
        let (open, tls) = GOOD.split_once("[tls]").unwrap();
        let read = |text: &str| HostConfig::from_toml(text, Path::new("host.toml"));
        let refused = |text: &str| read(text).unwrap_err().message;
        let words = ["10.0.0.1:7788", "[tls]", "understudy pki", "insecure = true"];
        assert_says(&refused(open), "host.toml:3: listen:", &words);
        // Loopback is this machine's own, but the way to the peers is not.
        let local = open.replace("10.0.0.1", "127.0.0.1");
        assert_says(&refused(&local), "host.toml:14: peers.b:", &["10.0.0.2:7788"]);
        assert!(read(&format!("insecure = true\n{open}")).unwrap().insecure);
        let both = format!("insecure = true\n{open}[tls]{tls}");
        assert_says(&refused(&both), "host.toml:1: insecure:", &["[tls]"]);
        let config = read(GOOD).unwrap();
        assert_eq!(config.tls.unwrap().cert, Path::new("/etc/a.pem"));
        assert_says(&broken("/etc/a.key", "a.key"), "host.toml:23: tls.key:", &["absolute"]);
    }

    #[test]
    fn qemus_user_must_exist_and_not_be_root() {
        let with = |user: &str| {
            let text = format!("{GOOD}[qemu_process]\nuser = \"{user}\"\n");
            HostConfig::from_toml(&text, Path::new("host.toml")).unwrap_err().message
        };
        let place = format!("host.toml:{}: qemu_process.user:", GOOD.lines().count() + 2);
        assert_says(&with("no-such-user"), &place, &["useradd"]);
        assert_says(&with("root"), &place, &["root"]);
    }

    #[test]
    fn relative_paths_are_refused() {
        let cases = [
            ("/srv/state", "host.toml:4: state_dir:"),
            ("/run/a.sock", "host.toml:5: socket:"),
            ("/opt/qemu", "host.toml:6: qemu:"),
            ("/opt/agent.so", "host.toml:7: agent:"),
            ("/srv/arbiter", "host.toml:11: arbiter.path:"),
        ];
        for (path, place) in cases {
            assert_says(&broken(path, &path[1..]), place, &[&path[1..], "absolute"]);
        }
    }

    #[test]
    fn a_socket_path_fits_into_an_address() {
        let long = format!("/{}", "s".repeat(107));
        assert_says(&broken("/run/a.sock", &long), "host.toml:5: socket:", &["108", "107"]);
    }

    #[test]
    fn the_arbiter_and_the_time_out_are_checked() {
        assert_says(&broken("\"file\"", "\"disk\""), "host.toml:10: arbiter.kind:", &["\"file\""]);
        for value in ["49", "10001", "-1"] {
            let message = broken("250", value);
            assert_says(&message, "host.toml:18: detection.timeout_ms:", &[value, "50 to 10000"]);
        }
    }

    #[test]
    fn a_file_that_is_not_there_is_not_found() {
        let error = HostConfig::load(Path::new("/nonexistent/host.toml")).unwrap_err();
        assert_eq!(error.kind, ErrorKind::NotFound);
        assert!(error.message.contains("/nonexistent/host.toml"));
    }

    #[test]
    fn configured_programs_must_be_there() {
        let config = HostConfig::from_toml(GOOD, Path::new("host.toml")).unwrap();
        assert!(config.qemu_path().unwrap_err().message.contains("/opt/qemu"));
        assert!(config.agent_path().unwrap_err().message.contains("/opt/agent.so"));
    }
}
