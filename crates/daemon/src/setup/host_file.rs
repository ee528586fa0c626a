//! `host.toml` as `understudy init` and `understudy join` write it, and its [peers] as `invite`
//! extends them: by a line, so that whatever else is in it stays as the operator wrote it.

use crate::config::{ArbiterConfig, EtcdEndpoints, EtcdTls, HostConfig};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, File};
use std::io::Write;
use std::net::SocketAddr;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use understudy_arbiter::whole_file;
use understudy_protocol::HostName;
use understudy_report::error::{ErrorKind, HostError, cannot};

const HEADER: &str = "\
# Made by Understudy, and yours from now on. All that can be in it: FILES.md.gz in
# /usr/share/doc/understudy. [peers] is read again when it changes, all else when the
# daemon starts; `understudy doctor --config` checks it.

";

/// The [arbiter] section, and an arbiter as one host tells another of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
pub enum ArbiterSettings {
    /// A directory that all hosts reach.
    File {
        /// The directory.
        path: PathBuf,
    },
    /// An etcd cluster.
    Etcd {
        /// Its endpoints.
        endpoints: Vec<String>,
        /// Beginning of all keys, unless it is the default.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        prefix: Option<String>,
        /// Authority of `https` endpoints.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        ca: Option<PathBuf>,
        /// Certificate for them.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        cert: Option<PathBuf>,
        /// Its key.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        key: Option<PathBuf>,
    },
}

impl FromStr for ArbiterSettings {
    type Err = String;

    /// A directory, or endpoints with commas between them.
    fn from_str(text: &str) -> Result<ArbiterSettings, String> {
        if text.starts_with('/') {
            return Ok(ArbiterSettings::File { path: text.into() });
        }
        let endpoints: Vec<String> = text.split(',').map(|one| one.trim().to_owned()).collect();
        if endpoints.iter().all(|one| one.starts_with("http://")) {
            EtcdEndpoints::new(&endpoints, None)?;
            return Ok(ArbiterSettings::Etcd {
                endpoints,
                prefix: None,
                ca: None,
                cert: None,
                key: None,
            });
        }
        if endpoints.iter().all(|one| one.starts_with("https://")) {
            return Err("https endpoints need certificates: give http ones here, then make them \
                        https in [arbiter] of the configuration, and write `ca`, `cert` and `key` \
                        there, before the daemon starts"
                .to_owned());
        }
        Err(format!(
            "{text:?} is no arbiter: name a directory that all hosts reach (/mnt/shared/arbiter), \
             or etcd's endpoints (http://10.0.0.9:2379,http://10.0.0.10:2379)"
        ))
    }
}

impl fmt::Display for ArbiterSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ArbiterSettings::File { path } => path.display().fmt(f),
            ArbiterSettings::Etcd { endpoints, .. } => f.write_str(&endpoints.join(",")),
        }
    }
}

impl From<&ArbiterConfig> for ArbiterSettings {
    fn from(config: &ArbiterConfig) -> ArbiterSettings {
        match config {
            ArbiterConfig::File { path } => ArbiterSettings::File { path: path.clone() },
            ArbiterConfig::Etcd(etcd) => {
                let tls = |file: fn(&EtcdTls) -> &PathBuf| etcd.endpoints.tls().map(file).cloned();
                ArbiterSettings::Etcd {
                    endpoints: etcd.endpoints.urls().collect(),
                    prefix: Some(etcd.prefix.clone()),
                    ca: tls(|tls| &tls.ca),
                    cert: tls(|tls| &tls.cert),
                    key: tls(|tls| &tls.key),
                }
            }
        }
    }
}

impl ArbiterSettings {
    /// The files and directories that it names, which each host must have.
    pub fn paths(&self) -> Vec<&Path> {
        match self {
            ArbiterSettings::File { path } => vec![path],
            ArbiterSettings::Etcd { ca, cert, key, .. } => {
                [ca, cert, key].into_iter().flatten().map(PathBuf::as_path).collect()
            }
        }
    }
}

/// The content of a new `host.toml`.
#[derive(Clone, Debug, Serialize)]
pub struct HostFile {
    /// The host's name.
    pub name: HostName,
    /// Addresses at which its peers reach it.
    pub listen: Vec<SocketAddr>,
    /// Whether VMs have processes of their own, which outlive the daemon.
    pub keepers: bool,
    /// The arbiter.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub arbiter: Option<ArbiterSettings>,
    /// The other hosts.
    pub peers: BTreeMap<HostName, Vec<SocketAddr>>,
    /// The host's certificates.
    pub tls: TlsSection,
}

/// The [tls] section.
#[derive(Clone, Debug, Serialize)]
pub struct TlsSection {
    /// The authority's certificate.
    pub ca: PathBuf,
    /// The host's.
    pub cert: PathBuf,
    /// Its key.
    pub key: PathBuf,
    /// The authority's list of revoked certificates.
    pub revoked: PathBuf,
}

impl HostFile {
    /// Writes it as the new file `path`, if it is a sound configuration. What may come into it, a webhook's address,
    /// is root's alone.
    pub fn create(&self, path: &Path) -> Result<HostConfig, HostError> {
        let text = toml::to_string(self).map_err(|error| {
            HostError::new(ErrorKind::Internal, format!("cannot write a configuration: {error}"))
        })?;
        let text = format!("{HEADER}{text}");
        let config = HostConfig::from_toml(&text, path)?;
        let written = File::options().write(true).create_new(true).mode(0o600).open(path);
        written
            .and_then(|mut file| file.write_all(text.as_bytes()).and_then(|()| file.sync_all()))
            .map_err(|error| cannot("write", path, &error))?;
        Ok(config)
    }
}

/// An error if there is a configuration already.
pub fn refuse_overwriting(path: &Path) -> Result<(), HostError> {
    if !path.exists() {
        return Ok(());
    }
    let message = format!(
        "{} exists: this host is set up already, and nothing was changed. `understudy invite` lets \
         another host join it; to set it up anew, move that file away",
        path.display()
    );
    Err(HostError::new(ErrorKind::Conflict, message))
}

/// The text of the configuration `file` with one more peer, if it is not there yet.
pub fn with_peer(
    text: &str,
    file: &Path,
    name: &HostName,
    addresses: &[SocketAddr],
) -> Result<String, HostError> {
    let before = HostConfig::from_toml(text, file)?;
    match before.peers.get(name) {
        Some(known) if known == addresses => return Ok(text.to_owned()),
        Some(known) => {
            let message = format!(
                "host {} has a peer {name} already, at {known:?}: give the new host another name, \
                 or take that one out of [peers] of {}",
                before.name,
                file.display()
            );
            return Err(HostError::new(ErrorKind::Conflict, message));
        }
        None => {}
    }
    let line = peer_line(name, addresses);
    let other_form = || {
        let message = format!(
            "the peers in {} are not lines below [peers]: add {line} yourself, then invite again",
            file.display()
        );
        HostError::new(ErrorKind::Invalid, message)
    };
    let fresh = insert(text, &line, before.peers.is_empty()).ok_or_else(other_form)?;
    let after = HostConfig::from_toml(&fresh, file)?;
    let mut expected = before;
    expected.peers.insert(name.clone(), addresses.to_vec());
    if after == expected { Ok(fresh) } else { Err(other_form()) }
}

/// The line that names a peer.
pub fn peer_line(name: &HostName, addresses: &[SocketAddr]) -> String {
    let quoted: Vec<String> = addresses.iter().map(|address| format!("\"{address}\"")).collect();
    match &quoted[..] {
        [one] => format!("{name} = {one}"),
        _ => format!("{name} = [{}]", quoted.join(", ")),
    }
}

/// Puts the line first in [peers], or at the end in a section of its own if it `may_begin` one.
fn insert(text: &str, line: &str, may_begin: bool) -> Option<String> {
    let mut lines: Vec<&str> = text.lines().collect();
    let is_header = |one: &&str| one.split('#').next().unwrap_or_default().trim() == "[peers]";
    match lines.iter().position(is_header) {
        Some(at) => lines.insert(at + 1, line),
        None if may_begin => lines.extend(["", "[peers]", line]),
        None => return None,
    }
    Some(lines.join("\n") + "\n")
}

/// Replaces one that is there; it keeps its rights.
pub fn replace(path: &Path, text: &str) -> Result<(), HostError> {
    let replaced = fs::metadata(path)
        .and_then(|former| whole_file::replace(path, text, former.permissions().mode() & 0o7777));
    replaced.map_err(|error| cannot("write", path, &error))
}

#[cfg(test)]
mod tests {
    use super::*;
    use understudy_protocol::literal;

    const FILE: &str = "host.toml";

    fn addresses(text: &[&str]) -> Vec<SocketAddr> {
        text.iter().map(|one| one.parse().unwrap()).collect()
    }

    fn extend(text: &str) -> Result<String, HostError> {
        with_peer(text, Path::new(FILE), &literal("b"), &addresses(&["127.0.0.1:7702"]))
    }

    #[test]
    fn a_peer_is_added_and_all_else_stays() {
        let head = "name = 'a' # ours\nlisten = '127.0.0.1:7700'\n";
        let line = "b = \"127.0.0.1:7702\"\n";
        assert_eq!(extend(head).unwrap(), format!("{head}\n[peers]\n{line}"));
        let rest = "# others\nc = '127.0.0.1:7703'\n\n[detection]\ntimeout_ms = 200\n";
        let text = format!("{head}  [peers] # who\n{rest}");
        let extended = extend(&text).unwrap();
        assert_eq!(extended, format!("{head}  [peers] # who\n{line}{rest}"));
        assert_eq!(extend(&extended).unwrap(), extended, "twice is once");
    }

    #[test]
    fn what_cannot_be_added_is_said() {
        let head = "name = 'a'\nlisten = '127.0.0.1:7700'\n";
        let taken = extend(&format!("{head}[peers]\nb = '127.0.0.1:9'\n")).unwrap_err();
        assert_eq!(taken.kind, ErrorKind::Conflict);
        assert!(taken.message.contains("127.0.0.1:9"), "{taken}");
        let inline = extend(&format!("peers = {{ c = '127.0.0.1:9' }}\n{head}")).unwrap_err();
        assert!(inline.message.contains("are not lines below [peers]"), "{inline}");
        let other = extend(&format!("{head}[peers]\nc = '127.0.0.1:7702'\n")).unwrap_err();
        assert!(other.message.contains("already the address of peer"), "{other}");
    }

    #[test]
    fn a_new_file_is_a_sound_configuration() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join(FILE);
        let at = |file: &str| directory.path().join(file);
        let tls = TlsSection {
            ca: at("ca.pem"),
            cert: at("a.pem"),
            key: at("a.key"),
            revoked: at("revoked.pem"),
        };
        let mut file = HostFile {
            name: literal("a"),
            listen: addresses(&["10.0.0.1:7700"]),
            keepers: true,
            arbiter: Some("http://10.0.0.9:2379, http://10.0.0.8:2379".parse().unwrap()),
            peers: BTreeMap::from([(literal("b"), addresses(&["10.0.0.2:1", "10.1.0.2:1"]))]),
            tls,
        };
        let config = file.create(&path).unwrap();
        assert_eq!(HostConfig::load(&path).unwrap(), config);
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(config.peers["b"].len(), 2);
        assert!(config.keepers);
        assert_eq!(ArbiterSettings::from(&config.arbiter.unwrap()).paths(), [] as [&Path; 0]);
        assert!(file.create(&path).unwrap_err().message.contains("exists"));
        assert_eq!(refuse_overwriting(&path).unwrap_err().kind, ErrorKind::Conflict);
        file.listen = addresses(&["10.0.0.2:1"]);
        let wrong = file.create(&at("other.toml")).unwrap_err();
        assert!(wrong.message.contains("`listen`") && !at("other.toml").exists(), "{wrong}");
    }

    #[test]
    fn an_arbiter_is_a_directory_or_endpoints() {
        let parse = |text: &str| text.parse::<ArbiterSettings>();
        assert_eq!(parse("/mnt/x"), Ok(ArbiterSettings::File { path: "/mnt/x".into() }));
        for (wrong, words) in [
            ("mnt", "no arbiter"),
            ("https://x:1", "make them https"),
            ("http://x:1,https://x:1", "no arbiter"),
            ("http://u:p@x:1", "no password"),
        ] {
            assert!(parse(wrong).unwrap_err().contains(words), "{wrong}");
        }
    }
}
