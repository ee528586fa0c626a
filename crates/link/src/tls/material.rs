//! Certificates as they are in their files: read, checked, and compared with what was read before.

use super::callers::JudgedLater;
use super::{TlsFiles, certificate, names, provider, words};
use anyhow::{Context, bail, ensure};
use rustls::client::{Resumption, WebPkiServerVerifier};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, CertificateRevocationListDer, PrivateKeyDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::ClientCertVerifier;
use rustls::version::TLS13;
use rustls::{CertificateError, ClientConfig, Error, RootCertStore, ServerConfig};
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;

/// Contents of the files.
#[derive(Clone, PartialEq, Eq)]
pub struct Contents {
    ca: Vec<u8>,
    cert: Vec<u8>,
    key: Vec<u8>,
    revoked: Option<Vec<u8>>,
}

/// Material that handshakes are made with.
pub struct Material {
    pub(super) contents: Contents,
    pub(super) client: Arc<ClientConfig>,
    pub(super) server: Arc<ServerConfig>,
    /// Configuration for callers of the API.
    pub(super) callers: Arc<ServerConfig>,
    verifier: Arc<dyn ClientCertVerifier>,
    /// Certificate of this host, and those between it and the authority's.
    pub(super) chain: Vec<CertificateDer<'static>>,
    /// Seconds since 1970 at which this host's certificate expires.
    pub(super) expires: i64,
    /// Seconds since 1970 at which the last of the authority's certificates expires.
    pub(super) authority_expires: i64,
    /// Whether this host's own certificate is revoked.
    pub(super) is_revoked: bool,
}

impl Contents {
    /// Reads all of them. A key that others can read is no secret.
    pub fn read(files: &TlsFiles) -> anyhow::Result<Contents> {
        let read =
            |path: &Path| fs::read(path).with_context(|| format!("cannot read {}", path.display()));
        let key = &files.key;
        let metadata =
            fs::metadata(key).with_context(|| format!("cannot read {}", key.display()))?;
        let mode = metadata.permissions().mode() & 0o777;
        if mode & 0o077 != 0 {
            bail!(
                "{} is a private key that others than its owner may use (mode {mode:04o}): \
                 `chmod 600` it",
                key.display()
            );
        }
        Ok(Contents {
            key: read(key)?,
            cert: read(&files.cert)?,
            ca: read(&files.ca)?,
            revoked: files.revoked.as_deref().map(read).transpose()?,
        })
    }
}

impl Contents {
    /// Those of others whom to trust, and this host's own.
    pub fn of_others(&self, own: &Contents) -> Contents {
        Contents { cert: own.cert.clone(), key: own.key.clone(), ..self.clone() }
    }
}

impl Material {
    /// Checks what the files of the host `name` hold.
    pub fn new(contents: Contents, files: &TlsFiles, name: &str) -> anyhow::Result<Material> {
        let key = PrivateKeyDer::from_pem_slice(&contents.key)
            .with_context(|| format!("cannot read {}", files.key.display()))?;
        let chain = certificates(&contents.cert, &files.cert)?;
        names(&chain[0], name).with_context(|| {
            format!("{} is not a certificate of host {name:?}", files.cert.display())
        })?;
        let expires = certificate::parse(&chain[0])
            .with_context(|| format!("cannot read {}", files.cert.display()))?
            .not_after;
        let mut roots = RootCertStore::empty();
        let mut authority_expires = 0;
        for certificate in certificates(&contents.ca, &files.ca)? {
            let facts = certificate::parse(&certificate)
                .with_context(|| format!("cannot read {}", files.ca.display()))?;
            authority_expires = facts.not_after.max(authority_expires);
            let added = roots.add(certificate);
            added.with_context(|| format!("{} is not a CA's certificate", files.ca.display()))?;
        }
        let lists = match (&contents.revoked, &files.revoked) {
            (Some(bytes), Some(path)) => lists(bytes, path)?,
            _ => Vec::new(),
        };
        let mut material =
            Material::build(contents, roots, lists, chain, key).with_context(|| {
                let (cert, key) = (files.cert.display(), files.key.display());
                format!("cannot use the certificate {cert} with the key {key}")
            })?;
        material.expires = expires;
        material.authority_expires = authority_expires;
        // A list of another authority would have every connection refused.
        material.is_revoked = match material.own_verdict() {
            Err(Error::InvalidCertificate(CertificateError::Revoked)) => true,
            Err(Error::InvalidCertificate(CertificateError::UnknownRevocationStatus))
            | Err(Error::InvalidCertRevocationList(_)) => {
                let path = files.revoked.as_deref().unwrap_or(Path::new("?"));
                bail!("{} is not a list of this host's CA", path.display())
            }
            // Whatever else is wrong, the peers say; nothing that worked is given up for it.
            _ => false,
        };
        Ok(material)
    }

    fn build(
        contents: Contents,
        roots: RootCertStore,
        lists: Vec<CertificateRevocationListDer<'static>>,
        chain: Vec<CertificateDer<'static>>,
        key: PrivateKeyDer<'static>,
    ) -> anyhow::Result<Material> {
        let (roots, provider) = (Arc::new(roots), provider());
        let verifier = WebPkiClientVerifier::builder_with_provider(roots.clone(), provider.clone())
            .with_crls(lists.clone())
            .only_check_end_entity_revocation()
            .build()?;
        let servers = WebPkiServerVerifier::builder_with_provider(roots, provider.clone())
            .with_crls(lists)
            .only_check_end_entity_revocation()
            .build()?;
        let mut server = ServerConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&TLS13])?
            .with_client_cert_verifier(verifier.clone())
            .with_single_cert(chain.clone(), key.clone_key())?;
        server.send_tls13_tickets = 0;
        let mut callers = ServerConfig::builder_with_provider(provider.clone())
            .with_protocol_versions(&[&TLS13])?
            .with_client_cert_verifier(Arc::new(JudgedLater(verifier.clone())))
            .with_single_cert(chain.clone(), key.clone_key())?;
        callers.send_tls13_tickets = 0;
        callers.alpn_protocols = vec![b"http/1.1".to_vec()];
        let mut client = ClientConfig::builder_with_provider(provider)
            .with_protocol_versions(&[&TLS13])?
            .with_webpki_verifier(servers)
            .with_client_auth_cert(chain.clone(), key)?;
        client.resumption = Resumption::disabled();
        let (client, server, callers) = (Arc::new(client), Arc::new(server), Arc::new(callers));
        Ok(Material {
            contents,
            client,
            server,
            callers,
            verifier,
            chain,
            expires: 0,
            authority_expires: 0,
            is_revoked: false,
        })
    }

    /// Refuses what no peer will take, as far as this host can see. One that is revoked is the authority's word.
    pub fn check_own(&self) -> anyhow::Result<()> {
        match self.own_verdict() {
            Ok(()) | Err(Error::InvalidCertificate(CertificateError::Revoked)) => Ok(()),
            Err(error) => Err(words::local(&error)),
        }
    }

    fn own_verdict(&self) -> Result<(), Error> {
        self.verdict(&self.chain, UnixTime::now())
    }

    /// Whether a peer's certificate, which was in order at `then` with those behind it, is revoked now.
    pub fn revokes(&self, peer: &[CertificateDer<'_>], then: UnixTime) -> bool {
        let revoked = Error::InvalidCertificate(CertificateError::Revoked);
        self.verdict(peer, then) == Err(revoked)
    }

    /// What is to be said against the first certificate, with those between it and the authority's behind it.
    pub(super) fn verdict(
        &self,
        chain: &[CertificateDer<'_>],
        then: UnixTime,
    ) -> Result<(), Error> {
        let (own, between) = chain.split_first().ok_or(Error::NoCertificatesPresented)?;
        self.verifier.verify_client_cert(own, between, then).map(drop)
    }
}

fn certificates(bytes: &[u8], path: &Path) -> anyhow::Result<Vec<CertificateDer<'static>>> {
    let read = CertificateDer::pem_slice_iter(bytes).collect::<Result<Vec<_>, _>>();
    let certificates = read.with_context(|| format!("cannot read {}", path.display()))?;
    ensure!(!certificates.is_empty(), "{} holds no certificate", path.display());
    Ok(certificates)
}

fn lists(bytes: &[u8], path: &Path) -> anyhow::Result<Vec<CertificateRevocationListDer<'static>>> {
    let read = CertificateRevocationListDer::pem_slice_iter(bytes).collect::<Result<Vec<_>, _>>();
    let lists = read.with_context(|| format!("cannot read {}", path.display()))?;
    ensure!(
        !lists.is_empty(),
        "{} holds no list of revoked certificates: `understudy pki revoke` makes one",
        path.display()
    );
    Ok(lists)
}
