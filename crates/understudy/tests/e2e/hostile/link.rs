//! A host's end of a connection, with a genuine certificate and nobody's manners.

use crate::peer::read;
use anyhow::{Context, Result, ensure};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName, UnixTime};
use rustls::{
    ClientConfig, ClientConnection, DigitallySignedStruct, ServerConfig, ServerConnection,
    SignatureScheme, StreamOwned,
};
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use understudy_protocol::wire::{Kind, Message};

/// The longest time that it waits for an answer: a peer that is silent is no better than one that
/// hangs up.
pub const PATIENCE: Duration = Duration::from_millis(400);

/// The certificate that a host shows to others.
#[derive(Clone)]
pub struct Certificate {
    client: Arc<ClientConfig>,
    server: Arc<ServerConfig>,
}

/// The same with a keeper that has yet to be started.
pub const LONG_PATIENCE: Duration = Duration::from_secs(15);

/// One connection.
pub struct Line {
    stream: Box<dyn ReadWrite>,
    socket: TcpStream,
}

trait ReadWrite: Read + Write + Send {}
impl<T: Read + Write + Send> ReadWrite for T {}

impl Certificate {
    /// The one of that host in a directory of `understudy pki`.
    pub fn load(directory: &Path, host: &str) -> Result<Certificate> {
        let file = |name: String| directory.join(name);
        let chain = || {
            let chain = CertificateDer::pem_file_iter(file(format!("{host}.pem")))?;
            chain.collect::<Result<Vec<_>, _>>()
        };
        let key = || PrivateKeyDer::from_pem_file(file(format!("{host}.key")));
        let provider = Arc::new(ring::default_provider());
        let client = ClientConfig::builder_with_provider(provider.clone())
            .with_safe_default_protocol_versions()?
            .dangerous()
            .with_custom_certificate_verifier(Arc::new(Anybody))
            .with_client_auth_cert(chain()?, key()?)?;
        let server = ServerConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()?
            .with_no_client_auth()
            .with_single_cert(chain()?, key()?)?;
        Ok(Certificate { client: Arc::new(client), server: Arc::new(server) })
    }

    /// The end of a connection that was dialled to `host`.
    pub fn dialled(&self, socket: TcpStream, host: &str) -> Result<Line> {
        prepare(&socket, PATIENCE)?;
        let name = ServerName::try_from(host.to_owned())?;
        let connection = ClientConnection::new(self.client.clone(), name)?;
        let own = socket.try_clone()?;
        Ok(Line { stream: Box::new(StreamOwned::new(connection, socket)), socket: own })
    }

    /// The end of a connection that was taken, which waits so long for an answer.
    pub fn taken(&self, socket: TcpStream, patience: Duration) -> Result<Line> {
        prepare(&socket, patience)?;
        let connection = ServerConnection::new(self.server.clone())?;
        let own = socket.try_clone()?;
        Ok(Line { stream: Box::new(StreamOwned::new(connection, socket)), socket: own })
    }
}

fn prepare(socket: &TcpStream, patience: Duration) -> Result<()> {
    socket.set_nodelay(true)?;
    socket.set_read_timeout(Some(patience))?;
    Ok(socket.set_write_timeout(Some(patience))?)
}

impl Line {
    /// Sends bytes, which may be anything.
    pub fn send(&mut self, bytes: &[u8]) -> Result<()> {
        self.stream.write_all(bytes)?;
        Ok(self.stream.flush()?)
    }

    /// The other side's next message.
    pub fn receive(&mut self) -> Result<Message> {
        read(&mut self.stream).context("no message")
    }

    /// The words of the next message of this kind, whatever comes before.
    pub fn await_kind(&mut self, kind: Kind) -> Result<String> {
        self.socket.set_read_timeout(Some(LONG_PATIENCE))?;
        loop {
            let message = self.receive()?;
            if message.header.kind == kind {
                return Ok(String::from_utf8_lossy(&message.payload).into_owned());
            }
            ensure!(message.header.kind != Kind::Refuse, "{}", message.payload.escape_ascii());
        }
    }

    /// The answer to a hello. If a keeper has the connection by then, that gets the hello once more.
    pub fn answer(
        &mut self,
        (own, host): (&Certificate, &str),
        hello: &[u8],
        patience: Duration,
    ) -> Result<Message> {
        self.socket.set_read_timeout(Some(patience))?;
        let mut answer = self.receive()?;
        if answer.header.kind == Kind::BeginAnew {
            *self = own.dialled(self.socket.try_clone()?, host)?;
            self.send(hello)?;
            self.socket.set_read_timeout(Some(patience))?;
            answer = self.receive()?;
        }
        self.socket.set_read_timeout(Some(PATIENCE))?;
        Ok(answer)
    }
}

/// A verifier that does not care whom it talks to.
#[derive(Debug)]
struct Anybody;

impl ServerCertVerifier for Anybody {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn verify_tls13_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        Ok(HandshakeSignatureValid::assertion())
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        ring::default_provider().signature_verification_algorithms.supported_schemes()
    }
}
