//! Mutual TLS between hosts: who a peer is, and that nobody else reads along.
//!
//! Both sides show a certificate of the CA that the configuration names, and
//! the name in it must be the host's that it claims to be. TLS 1.3 only,
//! nothing is resumed: every connection checks both certificates anew.

mod callers;
pub mod certificate;
mod material;
pub mod renewal;
mod stream;
mod words;

pub use callers::ApiTls;
pub use stream::{NotTls, TlsStream, part};
pub use words::explain;

use anyhow::Context;
use material::{Contents, Material};
use rustls::client::verify_server_name;
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::{ClientConnection, ServerConnection};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};
use understudy_threads::Common;

/// A certificate that expires within this time is told of.
const NEAR_SECONDS: i64 = 30 * 24 * 3600;
/// An authority's within this one: another takes new certificates for all hosts.
const AUTHORITY_NEAR_SECONDS: i64 = 180 * 24 * 3600;

/// Paths of a host's certificate and key, and of the CA's that it trusts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// The CA's certificate, PEM.
    pub ca: PathBuf,
    /// Certificate of this host, PEM.
    pub cert: PathBuf,
    /// Its private key, PEM; readable by its owner only.
    pub key: PathBuf,
    /// The CA's list of revoked certificates, PEM, if there is to be one.
    pub revoked: Option<PathBuf>,
}

/// Certificates that a host needs to be recognised by its peers, and to recognise them; read again
/// when the files change.
pub struct Tls {
    files: TlsFiles,
    name: String,
    state: Common<State>,
}

struct State {
    /// Material of the files that is used.
    material: Arc<Material>,
    /// Reason why what they have now is not.
    problem: Option<String>,
    /// Connections that there are.
    live: Vec<Live>,
}

/// A peer's certificate with those between it and the authority's, since when it is shown, and the connection.
type Live = (Vec<CertificateDer<'static>>, UnixTime, Weak<dyn Closable>);

/// A connection that ends when its peer's certificate is revoked.
pub trait Closable: Send + Sync {
    /// Ends it in both directions.
    fn close(&self);
}

impl Tls {
    /// Reads and checks the files of the host `name`.
    pub fn load(files: &TlsFiles, name: &str) -> anyhow::Result<Tls> {
        let material = Material::new(Contents::read(files)?, files, name)?;
        Ok(Tls {
            files: files.clone(),
            name: name.to_owned(),
            state: Common::new(State {
                material: Arc::new(material),
                problem: None,
                live: Vec::new(),
            }),
        })
    }

    /// Reads the files again. If they have changed, new handshakes use them, and connections whose
    /// peers' certificates are revoked now are closed: returns how many. A certificate that peers take is not given up
    /// for one that none will.
    pub fn refresh(&self) -> anyhow::Result<Option<usize>> {
        let (contents, former) = (Contents::read(&self.files)?, self.material());
        if contents == former.contents {
            return Ok(None);
        }
        let fresh = Arc::new(Material::new(contents, &self.files, &self.name)?);
        if let (Ok(()), Err(error)) = (former.check_own(), fresh.check_own()) {
            // Whom it is told to trust no more counts all the same.
            let contents = fresh.contents.of_others(&former.contents);
            if contents != former.contents
                && let Ok(mixed) = Material::new(contents, &self.files, &self.name)
                && mixed.check_own().is_ok()
            {
                self.install(Arc::new(mixed));
            }
            let cert = self.files.cert.display();
            return Err(error.context(format!("no peer will take the certificate {cert}")));
        }
        Ok(Some(self.install(fresh)))
    }

    fn install(&self, fresh: Arc<Material>) -> usize {
        let mut state = self.state.lock();
        state.material = fresh.clone();
        let mut closed = 0;
        state.live.retain(|(peer, since, connection)| {
            let Some(connection) = connection.upgrade() else { return false };
            let revoked = fresh.revokes(peer, *since);
            if revoked {
                connection.close();
                closed += 1;
            }
            !revoked
        });
        closed
    }

    /// Sees to it that the connection ends when its peer's certificate is revoked.
    pub fn watch(&self, stream: &TlsStream, connection: Weak<dyn Closable>) {
        let (peer, now) = (stream.peer().to_vec(), UnixTime::now());
        let mut state = self.state.lock();
        state.live.retain(|(.., connection)| connection.strong_count() > 0);
        // The list may have changed since the handshake.
        if state.material.revokes(&peer, now)
            && let Some(connection) = connection.upgrade()
        {
            return connection.close();
        }
        state.live.push((peer, now, connection));
    }

    /// Time at which this host's certificate expires, in seconds since 1970.
    pub fn expires(&self) -> i64 {
        self.material().expires
    }

    /// Problems that the operator should see to; for people.
    pub fn problems(&self) -> Vec<String> {
        let material = self.material();
        let cert = self.files.cert.display();
        let mut problems: Vec<String> = self.state.lock().problem.iter().cloned().collect();
        if let Some(when) = near(material.expires, NEAR_SECONDS) {
            problems.push(format!(
                "the certificate {cert} {when}: issue a new one (`understudy pki issue`) and put \
                 it in its place; no restart is needed"
            ));
        }
        if let Some(when) = near(material.authority_expires, AUTHORITY_NEAR_SECONDS) {
            problems.push(format!(
                "the authority {} {when}, and with it every host's certificate: make another in its \
                 time (docs/operating.md, \"Changing things\")",
                self.files.ca.display()
            ));
        }
        if material.is_revoked {
            problems.push(format!("the certificate {cert} of this host is revoked"));
        }
        problems
    }

    fn note_problem(&self, problem: Option<String>) {
        let words = |problem| format!("[tls]: changed files are not used: {problem}");
        self.state.lock().problem = problem.map(words);
    }

    fn material(&self) -> Arc<Material> {
        self.state.lock().material.clone()
    }

    /// The dialling side's handshake on a fresh connection to `peer`.
    pub fn dial(&self, socket: &TcpStream, peer: &str) -> anyhow::Result<TlsStream> {
        let name = server_name(peer)?;
        let connection = ClientConnection::new(self.material().client.clone(), name)?;
        TlsStream::handshake(socket, connection.into())
    }

    /// The accepting side's handshake. Who the peer is, is still to be checked
    /// with [`TlsStream::check_peer`].
    pub fn accept(&self, socket: &TcpStream) -> anyhow::Result<TlsStream> {
        let connection = ServerConnection::new(self.material().server.clone())?;
        TlsStream::handshake(socket, connection.into())
    }
}

/// Words for when something expires whose end is so near; for people.
fn near(expires: i64, seconds: i64) -> Option<String> {
    let left = expires - UnixTime::now().as_secs() as i64;
    (left < seconds).then(|| match left {
        ..0 => "has expired".to_owned(),
        _ => format!("expires in {} days", left / (24 * 3600)),
    })
}

/// Words on a file of certificates of another authority's making; for people.
pub fn expiring(path: &Path) -> Option<String> {
    let certificates = CertificateDer::pem_file_iter(path).ok()?.filter_map(Result::ok);
    let facts = certificates.filter_map(|certificate| certificate::parse(&certificate).ok());
    let when = near(facts.map(|facts| facts.not_after).min()?, NEAR_SECONDS)?;
    Some(format!("the certificate {} {when}: put a new one in its place", path.display()))
}

impl std::fmt::Debug for Tls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tls").field("files", &self.files).finish_non_exhaustive()
    }
}

/// The fastest cipher comes first; with the processor's help, all are fast.
fn provider() -> Arc<CryptoProvider> {
    let mut provider = ring::default_provider();
    provider.cipher_suites = vec![
        ring::cipher_suite::TLS13_AES_128_GCM_SHA256,
        ring::cipher_suite::TLS13_AES_256_GCM_SHA384,
        ring::cipher_suite::TLS13_CHACHA20_POLY1305_SHA256,
    ];
    Arc::new(provider)
}

/// An error unless the certificate names this host.
fn names(certificate: &CertificateDer<'_>, host: &str) -> anyhow::Result<()> {
    let parsed = ParsedCertificate::try_from(certificate).map_err(|error| words::local(&error))?;
    verify_server_name(&parsed, &server_name(host)?).map_err(|error| words::local(&error))
}

fn server_name(host: &str) -> anyhow::Result<ServerName<'static>> {
    ServerName::try_from(host.to_owned())
        .ok()
        .filter(|name| matches!(name, ServerName::DnsName(_)))
        .with_context(|| format!("{host:?} cannot be the name in a certificate"))
}

#[cfg(test)]
mod tests;
