//! The host that joins: makes its key, shows its public half, and writes what it is told.

use super::message::{Grant, LIMIT, Reply, Request, WrongSecret};
use super::message::{receive_reply, send_request};
use super::token::{Fingerprint, Token};
use super::{Made, Plan};
use crate::deadline::Bounded;
use crate::host::prepare_directory;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::client::verify_server_cert_signed_by_trust_anchor;
use rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::server::ParsedCertificate;
use rustls::version::TLS13;
use rustls::{
    CertificateError, ClientConfig, ClientConnection, DigitallySignedStruct, Error, RootCertStore,
    SignatureScheme, StreamOwned,
};
use serde::Serialize;
use std::io;
use std::net::TcpStream;
use std::path::Path;
use std::sync::Arc;
use understudy_arbiter::whole_file;
use understudy_link::pki::{CA_KEY, HostKey};
use understudy_link::tls::{self, Tls, TlsFiles};
use understudy_protocol::HostName;
use understudy_report::error::{ErrorKind, HostError, cannot};

/// Outcome of joining.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Membership {
    /// The host that has invited this one.
    pub invited_by: HostName,
    /// Files and facts that are on this host now.
    #[serde(flatten)]
    pub made: Made,
}

/// Sets this host up as the token's inviting host says.
pub fn join(plan: &Plan, token: &Token) -> Result<Membership, HostError> {
    plan.check()?;
    // Before the token is used up.
    prepare_directory(&plan.pki())?;
    refuse_beside_authority(&plan.pki().join(CA_KEY))?;
    let key = HostKey::generate()?;
    let request = Request {
        name: plan.name.clone(),
        listen: vec![plan.address],
        public_key: BASE64_STANDARD.encode(key.public()),
    };
    let grant = ask(token, &request)?;
    let made = write(plan, &grant, &key).map_err(|error| {
        let message = format!(
            "host {} has let this host in, but {}; put that right, then have it invite this host \
             again",
            grant.host, error.message
        );
        HostError::new(error.kind, message)
    })?;
    Ok(Membership { invited_by: grant.host, made })
}

/// The other's certificate would lie beside the key of this one.
fn refuse_beside_authority(key: &Path) -> Result<(), HostError> {
    if !key.exists() {
        return Ok(());
    }
    let message = format!(
        "this host has an authority of its own, {}: move its directory away if no host is of it, or have this host \
         invite the other",
        key.display()
    );
    Err(HostError::new(ErrorKind::Conflict, message))
}

fn ask(token: &Token, request: &Request) -> Result<Grant, HostError> {
    let socket = TcpStream::connect_timeout(&token.address, LIMIT)
        .map_err(|error| nobody_waits(token, &error))?;
    let reply = converse(socket, token, request).map_err(|error| explain(token, &error))?;
    match reply {
        Reply::Granted(grant) => Ok(*grant),
        Reply::Refused(reason) => {
            let message = format!("the host at {} refuses: {reason}", token.address);
            Err(HostError::new(ErrorKind::Refused, message))
        }
    }
}

fn converse(socket: TcpStream, token: &Token, request: &Request) -> anyhow::Result<Reply> {
    let verifier = Arc::new(Verifier { authority: token.authority, provider: ring() });
    let mut client = ClientConfig::builder_with_provider(ring())
        .with_protocol_versions(&[&TLS13])?
        .dangerous()
        .with_custom_certificate_verifier(verifier)
        .with_no_client_auth();
    client.resumption = rustls::client::Resumption::disabled();
    // Which host it is, its secret tells.
    let name = ServerName::IpAddress(token.address.ip().into());
    let connection = ClientConnection::new(Arc::new(client), name)?;
    let mut stream = StreamOwned::new(connection, Bounded::new(socket, LIMIT));
    let asked = send_request(&mut stream, &token.secret, request)?;
    receive_reply(&mut stream, &token.secret, &asked)
}

fn ring() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

fn nobody_waits(token: &Token, error: &io::Error) -> HostError {
    let message = format!(
        "nobody waits for this token at {} ({error}): it was used, it has expired, the invitation \
         was ended, or a firewall is between. `understudy invite` on that host makes another",
        token.address
    );
    HostError::new(ErrorKind::Unreachable, message)
}

/// The errors of a peer that has ended meanwhile.
fn has_hung_up(error: &io::Error) -> bool {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    [BrokenPipe, ConnectionReset, UnexpectedEof].contains(&error.kind())
}

fn explain(token: &Token, error: &anyhow::Error) -> HostError {
    let address = token.address;
    let io_error = error.downcast_ref::<io::Error>();
    if let Some(error) = io_error.filter(|error| has_hung_up(error)) {
        return nobody_waits(token, error);
    }
    let tls = io_error.and_then(|error| error.get_ref()).and_then(|error| error.downcast_ref());
    let message = match tls {
        _ if error.is::<WrongSecret>() => format!(
            "the host at {address} waits for another token than this one: use the command that it \
             has printed last"
        ),
        Some(Error::InvalidCertificate(CertificateError::UnknownIssuer)) => format!(
            "the host at {address} has another authority than the token's: it was set up anew, or \
             is another host; use the command that it has printed last"
        ),
        _ => {
            let words = io_error.and_then(tls::explain).unwrap_or_else(|| format!("{error:#}"));
            format!("the host at {address} cannot be asked to let this one in: {words}")
        }
    };
    HostError::new(ErrorKind::Refused, message)
}

/// Files first, the configuration last: without it nothing is set up.
fn write(plan: &Plan, grant: &Grant, key: &HostKey) -> Result<Made, HostError> {
    let mut file = plan.host_file(grant.arbiter.clone());
    file.peers = grant.peers.clone();
    let tls = &file.tls;
    write_over(&tls.key, &key.pem(), 0o600)?;
    write_over(&tls.cert, &grant.certificate, 0o644)?;
    write_over(&tls.ca, &grant.ca, 0o644)?;
    write_over(&tls.revoked, &grant.revoked, 0o644)?;
    let files = TlsFiles {
        ca: tls.ca.clone(),
        cert: tls.cert.clone(),
        key: tls.key.clone(),
        revoked: Some(tls.revoked.clone()),
    };
    Tls::load(&files, &plan.name)
        .map_err(|error| HostError::new(ErrorKind::Invalid, format!("what it sent: {error:#}")))?;
    file.create(&plan.config()).map(|config| plan.made(&config))
}

/// Writes a file, and replaces what an attempt that failed has left; there is no configuration that
/// uses it.
fn write_over(path: &Path, text: &str, mode: u32) -> Result<(), HostError> {
    whole_file::replace(path, text, mode).map_err(|error| cannot("write", path, &error))
}

/// Takes whoever has a certificate of the token's authority. Which of its hosts answers is not
/// looked at: that it knows the secret is proven by its reply.
#[derive(Debug)]
struct Verifier {
    authority: Fingerprint,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        shown: &CertificateDer<'_>,
        further: &[CertificateDer<'_>],
        _name: &ServerName<'_>,
        _ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let unknown = || Error::InvalidCertificate(CertificateError::UnknownIssuer);
        let authority = further.iter().find(|one| Fingerprint::of(one) == self.authority);
        let mut roots = RootCertStore::empty();
        roots.add(authority.ok_or_else(unknown)?.clone().into_owned())?;
        let algorithms = self.provider.signature_verification_algorithms.all;
        let shown = ParsedCertificate::try_from(shown)?;
        verify_server_cert_signed_by_trust_anchor(&shown, &roots, &[], now, algorithms)?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        shown: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls12_signature(message, shown, signed, algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        shown: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        let algorithms = &self.provider.signature_verification_algorithms;
        verify_tls13_signature(message, shown, signed, algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}
