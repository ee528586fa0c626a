//! Questions of `understudy doctor` to other hosts and the arbiter: as the daemon would, and
//! without a trace in anybody's log.

use crate::config::{ArbiterConfig, HostConfig};
use crate::host::{Host, identify};
use crate::keeper::Keeper;
use crate::vm::PrimaryVm;
use crate::{expiry, membership};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use understudy_arbiter::etcd::Etcd;
use understudy_arbiter::{Arbiter, ArbiterName};
use understudy_link::link::Link;
use understudy_protocol::Generation;
use understudy_protocol::validity::ImageRole;
use understudy_protocol::wire::{Kind, LEAST_WIRE_VERSION};
use understudy_protocol::{HostName, VmName};
use understudy_qemu::VmDefinition;
use understudy_replication::handshake::Purpose;
use understudy_replication::records::Records;
use understudy_report::error::HostError;
use understudy_report::upgrade::Versions;

pub use understudy_machine::cgroup::{Controller, probe as control_groups};
pub use understudy_machine::tpm::{confinement as swtpm_confinement, try_out as try_swtpm};

/// Answer of a host on itself.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProbeAnswer {
    /// Its name.
    pub host: HostName,
    /// The version of its daemon.
    pub version: String,
    /// The arbiter that it uses, if it reaches one.
    #[serde(default)]
    pub arbiter: Option<ArbiterName>,
    /// The VMs that it protects to the host that asks, or of those in keepers did last, and their generations, as the
    /// arbiter has them.
    #[serde(default)]
    pub protected: Vec<(VmName, Generation)>,
    /// All its versions; none of wire version 17.
    #[serde(default)]
    pub versions: Option<Versions>,
}

impl ProbeAnswer {
    /// Its versions, as far as it says them.
    pub(crate) fn versions(self) -> Versions {
        let (product, wire) = (self.version, LEAST_WIRE_VERSION);
        let old = Versions {
            product,
            wire_least: wire,
            wire_highest: wire,
            qemu: None,
            qemu_build: None,
            qemu_layout: None,
        };
        self.versions.unwrap_or(old)
    }
}

/// Reason why a peer could not be asked.
#[derive(Debug)]
pub enum ProbeError {
    /// No answer at its address: it may not run yet.
    NotUp(String),
    /// An answer that is not what this host's peer should give.
    Wrong(String),
}

/// The VMs that a host has records of, running or not.
pub fn recorded(config: &HostConfig) -> Vec<VmDefinition> {
    let records = Records::new(&config.state_dir, &config.name).all();
    records.into_iter().map(|record| record.definition).collect()
}

/// Loads this host's certificates as its daemon would; what is to be said of them.
pub fn certificates(config: &HostConfig) -> Result<Vec<String>, HostError> {
    let own = identify(config)?.tls.map_or_else(Vec::new, |tls| tls.problems());
    Ok(own.into_iter().chain(expiry::of_etcd(config)).collect())
}

/// The other hosts: those of the configuration and, with etcd, those that live.
pub fn hosts(config: &HostConfig) -> anyhow::Result<BTreeMap<HostName, Vec<SocketAddr>>> {
    let mut hosts = BTreeMap::new();
    if let Some(ArbiterConfig::Etcd(etcd)) = &config.arbiter {
        let members = membership::members(&Etcd::new(etcd)?, &config.name)?;
        hosts.extend(members.into_iter().map(|(host, member)| (host, member.addresses)));
    }
    hosts.extend(config.peers.clone());
    Ok(hosts)
}

impl Host {
    /// Answers the host that asks.
    pub(crate) fn answer_probe(&self, link: &Link, asker: &HostName) -> anyhow::Result<()> {
        let owned = |vm: Arc<PrimaryVm>| {
            vm.active_session().filter(|session| session.peer == *asker)?;
            Some((vm.name().to_owned(), vm.generation()))
        };
        let mut protected: Vec<_> = self.running().into_iter().filter_map(owned).collect();
        protected.extend(self.keepers().iter().filter_map(|it| self.kept_for(it, asker)));
        let answer = ProbeAnswer {
            host: self.config.name.clone(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            arbiter: self.arbiter.as_ref().and_then(|arbiter| arbiter.identify().ok()),
            protected,
            versions: Some(self.versions()),
        };
        link.send_json(Kind::Welcome, &answer)
    }

    /// A keeper's VM that runs and was last protected to the host that asks, if it is to be protected; no keeper is asked.
    fn kept_for(&self, keeper: &Keeper, asker: &HostName) -> Option<(VmName, Generation)> {
        let record = self.record(&keeper.vm).ok()??;
        let runs = record.image.role == ImageRole::Active && record.wish.is_some();
        let is_meant = runs && record.peer.as_ref() == Some(asker);
        is_meant.then(|| (keeper.vm.clone(), record.image.generation))
    }
}

/// Tries the arbiter as a take-over from this peer would, and changes nothing: both hosts must use
/// the same one, and this host must read there what the peer owns and be able to write.
pub fn take_over(config: &HostConfig, peer: &ProbeAnswer) -> Result<(), String> {
    let Some(kind) = &config.arbiter else { return Ok(()) };
    let arbiter = Arbiter::new(kind, &config.name).map_err(|error| format!("{error:#}"))?;
    let ours = arbiter.identity().map_err(|error| error.to_string())?;
    match (&peer.arbiter, ours) {
        (None, _) => return Err(format!("host {} reaches no arbiter", peer.host)),
        (Some(theirs), Some(ours)) if theirs.id == ours => {}
        (Some(theirs), ours) => {
            let ours = ours.map_or("one that nobody has used yet".to_owned(), |id| id.to_string());
            return Err(format!(
                "host {} uses another arbiter, {theirs}; this host's is {ours}",
                peer.host
            ));
        }
    }
    peer.protected.iter().try_for_each(|(key, generation)| {
        arbiter.prove(key, &peer.host, *generation).map_err(|error| error.to_string())
    })
}

/// Asks the peer at one of its addresses who it is: over TLS, with this host's certificate, as for
/// every connection between hosts.
pub fn peer(
    config: &HostConfig,
    name: &HostName,
    address: SocketAddr,
) -> Result<ProbeAnswer, ProbeError> {
    let wrong = |error: anyhow::Error| ProbeError::Wrong(format!("{error:#}"));
    let identity = identify(config).map_err(|error| ProbeError::Wrong(error.message))?;
    let socket = understudy_replication::handshake::connect(address)
        .map_err(|error| ProbeError::NotUp(format!("{error:#}")))?;
    let link = identity.greet(socket, name, address, Purpose::Probe).map_err(wrong)?;
    let answer: ProbeAnswer = link.expect_json(Kind::Welcome).map_err(wrong)?;
    match answer.host == *name {
        true => Ok(answer),
        false => Err(ProbeError::Wrong(format!("{address} is host {}, not {name}", answer.host))),
    }
}
