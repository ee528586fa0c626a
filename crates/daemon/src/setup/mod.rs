//! Setup of hosts: the first one with an authority of its own, and further ones by invitation.
//!
//! ```text
//! first host                              host that joins
//! init: authority, certificate, host.toml
//! invite ─ token, by the operator's hand ─▶ join: makes its own key
//!        ◀─ TLS: name, addresses, public key ─
//! signs, adds the peer to [peers]
//!        ─ certificate, authority, arbiter, peers ─▶ writes host.toml
//! ```
//!
//! The authority's key stays where it was made, each host's key where that was. The host that joins
//! knows the authority by the fingerprint in the token, and both prove that they know the token's
//! secret without saying it. An invitation is good for one host and some minutes.
//!
//! | module | is |
//! |---|---|
//! | `token` | what the operator carries from one host to the other |
//! | `message` | what both hosts say |
//! | `invitation` | the inviting host |
//! | `join` | the one that joins |
//! | `host_file` | `host.toml`, written and extended |
//! | `machine` | what can be known of a machine without asking |

mod host_file;
mod invitation;
mod join;
mod machine;
mod message;
mod token;

pub use host_file::ArbiterSettings;
pub use invitation::{Invitation, Joined};
pub use join::{Membership, join};
pub use machine::{default_address, default_name};
pub use token::{Token, TokenError};

use crate::config::HostConfig;
use crate::host::prepare_directory;
use host_file::{HostFile, TlsSection, refuse_overwriting};
use serde::Serialize;
use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::{fs, io};
use understudy_link::pki;
use understudy_protocol::HostName;
use understudy_report::error::{ErrorKind, HostError, cannot};

/// Directory where a host's configuration is, unless told otherwise.
pub const DIRECTORY: &str = "/etc/understudy";
/// The configuration's file in it.
pub const HOST_FILE: &str = "host.toml";
const PKI: &str = "pki";

/// Plan of what a host is to be.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Directory where its configuration is to be.
    pub directory: PathBuf,
    /// Its name.
    pub name: HostName,
    /// Address at which its peers reach it.
    pub address: SocketAddr,
}

/// Outcome of setting a host up.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Made {
    /// The host's name.
    pub name: HostName,
    /// Address at which its peers reach it.
    pub address: SocketAddr,
    /// Its configuration.
    pub config: PathBuf,
    /// Notes on what the operator should see to before it protects VMs; for people.
    pub notes: Vec<String>,
}

impl Plan {
    fn config(&self) -> PathBuf {
        self.directory.join(HOST_FILE)
    }

    fn pki(&self) -> PathBuf {
        self.directory.join(PKI)
    }

    /// Checks for whatever speaks against it, before anything is made.
    fn check(&self) -> Result<(), HostError> {
        refuse_overwriting(&self.config())?;
        if self.address.ip().is_unspecified() {
            let message = format!("{} names no host; give this host's own address", self.address);
            return Err(HostError::new(ErrorKind::Invalid, message));
        }
        let bound = TcpListener::bind((self.address.ip(), 0));
        bound.map(drop).map_err(|error| {
            let message = format!(
                "{} is not an address of this host ({error}): `ip addr` lists them",
                self.address.ip()
            );
            HostError::new(ErrorKind::Invalid, message)
        })
    }

    fn host_file(&self, arbiter: Option<ArbiterSettings>) -> HostFile {
        let (pki, name) = (self.pki(), &self.name);
        HostFile {
            name: name.clone(),
            listen: vec![self.address],
            keepers: true,
            arbiter,
            peers: BTreeMap::new(),
            tls: TlsSection {
                ca: pki.join(pki::CA_CERT),
                cert: pki.join(format!("{name}.pem")),
                key: pki.join(format!("{name}.key")),
                revoked: pki.join(pki::REVOKED),
            },
        }
    }

    fn made(&self, config: &HostConfig) -> Made {
        let settings = config.arbiter.as_ref().map(ArbiterSettings::from);
        let missing = |path: &&Path| !path.exists();
        let paths: Vec<&Path> = settings.iter().flat_map(ArbiterSettings::paths).collect();
        let note = |path: &Path| {
            let path = path.display();
            format!("{path} of the arbiter is not on this host yet: mount it, or put it there")
        };
        let notes = paths.into_iter().filter(missing).map(note).collect();
        Made { name: self.name.clone(), address: self.address, config: self.config(), notes }
    }
}

/// Sets the first host up: an authority, unless there is one in its place, a certificate and a
/// configuration without peers.
pub fn init(plan: &Plan, arbiter: ArbiterSettings) -> Result<Made, HostError> {
    plan.check()?;
    prepare_arbiter(&arbiter)?;
    prepare_directory(&plan.directory)?;
    let pki = plan.pki();
    if !pki.join(pki::CA_KEY).exists() {
        pki::init(&pki)?;
    }
    let file = plan.host_file(Some(arbiter));
    // Of an attempt that failed later.
    if !file.tls.cert.exists() {
        pki::issue(&pki, &plan.name, pki::HOST_DAYS)?;
    }
    file.create(&plan.config()).map(|config| plan.made(&config))
}

/// The arbiter's own directory is made, never the storage that it is on: that would hide a mount
/// that is missing.
fn prepare_arbiter(arbiter: &ArbiterSettings) -> Result<(), HostError> {
    let ArbiterSettings::File { path } = arbiter else { return Ok(()) };
    if path.is_dir() {
        return try_to_write(path);
    }
    fs::create_dir(path).map_err(|error| {
        let HostError { kind, message } = cannot("make the arbiter's directory", path, &error);
        let message = format!("{message}; {}", to_look_at(&error));
        HostError::new(kind, message)
    })
}

/// Whether records can be written there, which a directory that root is not root of refuses.
fn try_to_write(path: &Path) -> Result<(), HostError> {
    understudy_arbiter::try_directory(path).map_err(|error| {
        let HostError { kind, message } = cannot("write in the arbiter's directory", path, &error);
        HostError::new(kind, format!("{message}; {}", to_look_at(&error)))
    })
}

fn to_look_at(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::PermissionDenied => {
            "may root write there? NFS takes root for nobody, unless it is exported with no_root_squash"
        }
        _ => "is the storage that all hosts reach mounted?",
    }
}

#[cfg(test)]
mod tests;
