//! Mutual TLS between hosts: who a peer is, and that nobody else reads along.
//!
//! Both sides show a certificate of the CA that the configuration names, and
//! the name in it must be the host's that it claims to be. TLS 1.3 only,
//! nothing is resumed: every connection checks both certificates anew.

mod stream;
mod words;

pub use stream::{NotTls, TlsStream, part};
pub use words::explain;

use anyhow::{Context, bail, ensure};
use rustls::client::{Resumption, verify_server_name};
use rustls::crypto::{CryptoProvider, ring};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::server::{ParsedCertificate, WebPkiClientVerifier};
use rustls::version::TLS13;
use rustls::{ClientConfig, ClientConnection, RootCertStore, ServerConfig, ServerConnection};
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Where a host's certificate and key are, and the CA's that it trusts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsFiles {
    /// The CA's certificate, PEM.
    pub ca: PathBuf,
    /// This host's certificate, PEM.
    pub cert: PathBuf,
    /// Its private key, PEM; readable by its owner only.
    pub key: PathBuf,
}

/// What a host needs to be recognised by its peers, and to recognise them.
#[derive(Debug)]
pub struct Tls {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
}

impl Tls {
    /// Reads and checks the files of the host `name`.
    pub fn load(files: &TlsFiles, name: &str) -> anyhow::Result<Tls> {
        let key = read_key(&files.key)?;
        let chain = read_certificates(&files.cert)?;
        names(&chain[0], name).with_context(|| {
            format!("{} is not a certificate of host {name:?}", files.cert.display())
        })?;
        let mut roots = RootCertStore::empty();
        for certificate in read_certificates(&files.ca)? {
            let added = roots.add(certificate);
            added.with_context(|| format!("{} is not a CA's certificate", files.ca.display()))?;
        }
        Tls::new(roots, chain, key).with_context(|| {
            let (cert, key) = (files.cert.display(), files.key.display());
            format!("cannot use the certificate {cert} with the key {key}")
        })
    }

    fn new(
        roots: RootCertStore,
        chain: Vec<CertificateDer<'static>>,
        key: PrivateKeyDer<'static>,
    ) -> anyhow::Result<Tls> {
        let (roots, provider) = (Arc::new(roots), provider());
        let verifier =
            WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone()).build()?;
        let mut server = ServerConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&TLS13])?
            .with_client_cert_verifier(verifier)
            .with_single_cert(chain.clone(), key.clone_key())?;
        server.send_tls13_tickets = 0;
        let mut client = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])?
            .with_root_certificates(roots)
            .with_client_auth_cert(chain, key)?;
        client.resumption = Resumption::disabled();
        Ok(Tls { client: Arc::new(client), server: Arc::new(server) })
    }

    /// The dialling side's handshake on a fresh connection to `peer`.
    pub fn dial(&self, socket: &TcpStream, peer: &str) -> anyhow::Result<TlsStream> {
        let name = server_name(peer)?;
        let connection = ClientConnection::new(self.client.clone(), name)?;
        TlsStream::handshake(socket, connection.into())
    }

    /// The accepting side's handshake. Who the peer is, is still to be checked
    /// with [`TlsStream::check_peer`].
    pub fn accept(&self, socket: &TcpStream) -> anyhow::Result<TlsStream> {
        let connection = ServerConnection::new(self.server.clone())?;
        TlsStream::handshake(socket, connection.into())
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

fn read_certificates(path: &Path) -> anyhow::Result<Vec<CertificateDer<'static>>> {
    let read = CertificateDer::pem_file_iter(path).and_then(Iterator::collect::<Result<Vec<_>, _>>);
    let certificates = read.with_context(|| format!("cannot read {}", path.display()))?;
    ensure!(!certificates.is_empty(), "{} holds no certificate", path.display());
    Ok(certificates)
}

/// A key that others can read is no secret.
fn read_key(path: &Path) -> anyhow::Result<PrivateKeyDer<'static>> {
    let context = || format!("cannot read {}", path.display());
    let mode = std::fs::metadata(path).with_context(context)?.permissions().mode() & 0o777;
    if mode & 0o077 != 0 {
        bail!(
            "{} is a private key that others than its owner may use (mode {mode:04o}): \
             `chmod 600` it",
            path.display()
        );
    }
    PrivateKeyDer::from_pem_file(path).with_context(context)
}

#[cfg(test)]
mod tests;
