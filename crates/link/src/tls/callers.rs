//! Callers of the API over the network: they may show a certificate.
//!
//! Whoever shows one has the key to it, or there is no connection. Whose it is, is judged afterwards and not in the
//! handshake: so that somebody with a certificate of another CA is told what is wrong, by an answer and not by an alert.

use super::{Tls, names, words};
use rustls::client::danger::HandshakeSignatureValid;
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{DigitallySignedStruct, DistinguishedName, Error, ServerConfig, SignatureScheme};
use std::sync::Arc;
use understudy_protocol::HostName;

/// Configuration that the API's own connections are made with.
#[derive(Clone, Debug)]
pub struct ApiTls(Arc<Tls>);

impl ApiTls {
    /// Configuration with these certificates.
    pub fn new(tls: Arc<Tls>) -> ApiTls {
        ApiTls(tls)
    }

    /// Configuration that the next handshake is made with: the files as they are now.
    pub fn server(&self) -> Arc<ServerConfig> {
        self.0.material().callers.clone()
    }

    /// The name of a caller's certificate, the first that it shows, if it is among these. An error says why the
    /// certificate is none to be believed, for people.
    pub fn whose<'a>(
        &self,
        shown: &[CertificateDer<'_>],
        mut known: impl Iterator<Item = &'a HostName>,
    ) -> Result<Option<&'a HostName>, String> {
        let verdict = self.0.material().verdict(shown, UnixTime::now());
        verdict.map_err(|error| words::local(&error).to_string())?;
        let own = shown.first();
        Ok(known.find(|name| own.is_some_and(|own| names(own, name).is_ok())))
    }
}

/// Takes every certificate that its owner can sign with. See the module.
#[derive(Debug)]
pub(super) struct JudgedLater(pub Arc<dyn ClientCertVerifier>);

impl ClientCertVerifier for JudgedLater {
    fn client_auth_mandatory(&self) -> bool {
        false
    }

    /// Returns the authorities, so that a browser offers the certificates that could be believed.
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.0.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        Ok(ClientCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.0.verify_tls12_signature(message, certificate, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.0.verify_tls13_signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
    }
}
