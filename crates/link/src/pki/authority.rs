//! What signs: the authority's key, if it is the one of the certificate that the hosts have.

use super::{CA_CERT, CA_KEY, ca_params, internal};
use rcgen::{
    Certificate, CertificateParams, CertificateRevocationListParams, Issuer, KeyPair, PublicKeyData,
};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use rustls::server::ParsedCertificate;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;
use understudy_report::error::{ErrorKind, HostError, cannot};

/// An authority: a certificate, and the key that belongs to it.
pub(super) struct Authority {
    pub(super) directory: PathBuf,
    issuer: Issuer<'static, KeyPair>,
}

impl Authority {
    /// Opens the one in `directory`; an error if its key is another one's.
    pub(super) fn open(directory: &Path) -> Result<Authority, HostError> {
        let invalid = |message: String| HostError::new(ErrorKind::Invalid, message);
        let key = read_key(directory)?;
        let path = directory.join(CA_CERT);
        let unusable = |why: String| invalid(format!("{}: {why}", path.display()));
        let certificate =
            CertificateDer::from_pem_file(&path).map_err(|error| unusable(error.to_string()))?;
        let certificate = ParsedCertificate::try_from(&certificate)
            .map_err(|error| unusable(error.to_string()))?;
        if *certificate.subject_public_key_info() != *key.subject_public_key_info() {
            return Err(invalid(format!(
                "{CA_KEY} is not the key of {}: the hosts that have this certificate would take nothing that it signs; \
                 bring the key back that was made with it, or move all that is in that directory away",
                path.display()
            )));
        }
        // Of its name alone is made use.
        let issuer = Issuer::new(ca_params(SystemTime::now())?, key);
        Ok(Authority { directory: directory.to_owned(), issuer })
    }

    /// Signs a certificate for whoever has the other half of a key.
    pub(super) fn sign(
        &self,
        params: CertificateParams,
        key: &impl PublicKeyData,
    ) -> Result<Certificate, HostError> {
        params.signed_by(key, &self.issuer).map_err(internal)
    }

    /// Signs a list of revoked certificates, PEM.
    pub(super) fn sign_list(
        &self,
        list: CertificateRevocationListParams,
    ) -> Result<String, HostError> {
        list.signed_by(&self.issuer).and_then(|list| list.pem()).map_err(internal)
    }
}

fn read_key(directory: &Path) -> Result<KeyPair, HostError> {
    let path = directory.join(CA_KEY);
    let text = fs::read_to_string(&path).map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => {
            let message = format!(
                "there is no CA in {}: make one with `understudy pki init`",
                directory.display()
            );
            HostError::new(ErrorKind::NotFound, message)
        }
        _ => cannot("read", &path, &error),
    })?;
    KeyPair::from_pem(&text)
        .map_err(|error| HostError::new(ErrorKind::Invalid, format!("{}: {error}", path.display())))
}
