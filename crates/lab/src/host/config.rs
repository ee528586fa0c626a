//! The daemon's configuration, as a host of a laboratory has it.

use super::{ArbiterKind, HostOptions, STATE, pki_directory, socket};
use crate::etcd::Etcd;
use crate::lab::Lab;
use crate::patience;
use anyhow::{Context, Result};
use serde::Serialize;
use std::collections::BTreeMap;
use std::fs;
use std::net::SocketAddr;
use std::path::PathBuf;

/// The daemon's configuration file, `host.toml`.
#[derive(Serialize)]
struct HostToml {
    name: String,
    listen: Addresses,
    state_dir: PathBuf,
    socket: PathBuf,
    #[serde(skip_serializing_if = "Option::is_none")]
    arbiter: Option<ArbiterToml>,
    #[serde(skip_serializing_if = "Option::is_none")]
    insecure: Option<bool>,
    peers: BTreeMap<String, Addresses>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tls: Option<TlsToml>,
    snapshot_stores: Vec<PathBuf>,
    shutdown: ShutdownToml,
    #[serde(skip_serializing_if = "Option::is_none")]
    detection: Option<DetectionToml>,
}

/// The longest that a configuration may ask for, of a peer.
pub const LONGEST_TIMEOUT_MS: u32 = 10_000;

/// The same of QEMU.
pub const LONGEST_QEMU_TIMEOUT_MS: u32 = 15_000;

/// The shipped detector (`DEFAULT`), so many times more patient, as far as a configuration may be.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct DetectionToml {
    timeout_ms: u32,
    qemu_timeout_ms: u32,
}

impl DetectionToml {
    const DEFAULT: DetectionToml = DetectionToml { timeout_ms: 100, qemu_timeout_ms: 1_000 };

    /// Nothing on a machine like most: there the detector is the shipped one.
    fn for_patience(factor: u32) -> Option<DetectionToml> {
        let DetectionToml { timeout_ms, qemu_timeout_ms } = DetectionToml::DEFAULT;
        let longer = |default: u32, longest| default.saturating_mul(factor).min(longest);
        (factor > 1).then(|| DetectionToml {
            timeout_ms: longer(timeout_ms, LONGEST_TIMEOUT_MS),
            qemu_timeout_ms: longer(qemu_timeout_ms, LONGEST_QEMU_TIMEOUT_MS),
        })
    }
}

/// A test that is over does not wait for its guests, unless its settings say so.
#[derive(Default, Serialize)]
struct ShutdownToml {
    power_off_seconds: u64,
}

/// Addresses as a user would write them.
#[derive(Serialize)]
#[serde(untagged)]
enum Addresses {
    One(SocketAddr),
    Several(Vec<SocketAddr>),
}

impl Addresses {
    fn of(lab: &Lab, host: &str) -> Result<Addresses> {
        let addresses = lab.peer_addresses(host)?;
        Ok(match addresses[..] {
            [one] => Addresses::One(one),
            _ => Addresses::Several(addresses),
        })
    }
}

#[derive(Serialize)]
struct TlsToml {
    ca: PathBuf,
    cert: PathBuf,
    key: PathBuf,
}

#[derive(Serialize)]
#[serde(tag = "kind", rename_all = "lowercase")]
enum ArbiterToml {
    File { path: PathBuf },
    Etcd { endpoints: Vec<String> },
}

fn certificate(lab: &Lab, name: &str) -> Option<TlsToml> {
    let file = |name: String| pki_directory(lab).join(name);
    let [ca, cert, key] =
        [file("ca.pem".to_owned()), file(format!("{name}.pem")), file(format!("{name}.key"))];
    cert.is_file().then_some(TlsToml { ca, cert, key })
}

/// Writes `host.toml` into the host's directory and returns its path.
pub(super) fn write_config(lab: &Lab, name: &str, options: &HostOptions) -> Result<PathBuf> {
    let directory = lab.host_directory(name)?;
    let mut peers = BTreeMap::new();
    let others = lab.hosts().iter().filter(|peer| *peer != name && !options.without_peers);
    for peer in others {
        peers.insert(peer.clone(), Addresses::of(lab, peer)?);
    }
    let tls = (!options.insecure).then(|| certificate(lab, name)).flatten();
    let config = HostToml {
        name: name.to_owned(),
        listen: Addresses::of(lab, name)?,
        state_dir: directory.join(STATE),
        socket: socket(&directory),
        arbiter: match options.arbiter {
            ArbiterKind::File => Some(ArbiterToml::File { path: lab.arbiter_directory() }),
            ArbiterKind::Etcd => {
                Some(ArbiterToml::Etcd { endpoints: vec![Etcd::endpoint(lab, name)?] })
            }
            ArbiterKind::None => None,
        },
        peers,
        insecure: tls.is_none().then_some(true),
        tls,
        snapshot_stores: vec![lab.directory().to_owned()],
        shutdown: ShutdownToml::default(),
        detection: DetectionToml::for_patience(patience()),
    };
    let mut config = toml::Table::try_from(config).context("cannot write the configuration")?;
    config.extend(options.settings.parse::<toml::Table>().context("the settings are no TOML")?);
    let path = directory.join("host.toml");
    let text = toml::to_string(&config).context("cannot write the configuration as TOML")?;
    fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_of_a_slow_machine_are_as_much_more_patient_and_those_of_others_as_shipped() {
        let of = |timeout_ms, qemu_timeout_ms| Some(DetectionToml { timeout_ms, qemu_timeout_ms });
        assert_eq!(DetectionToml::for_patience(1), None);
        assert_eq!(DetectionToml::for_patience(12), of(1_200, 12_000));
        assert_eq!(DetectionToml::for_patience(400), of(10_000, 15_000));
    }
}
