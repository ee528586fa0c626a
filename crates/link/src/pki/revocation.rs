//! Revocation: a certificate that is on the authority's list is of no more use.

use super::authority::Authority;
use super::ledger::{self, Issued, LEDGER};
use super::{CA_CERT, moment};
use crate::tls::certificate::{self, Facts};
use rcgen::{CertificateRevocationListParams, KeyIdMethod, RevokedCertParams, SerialNumber};
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, UnixTime};
use rustls::server::WebPkiClientVerifier;
use rustls::{CertificateError, Error, RootCertStore};
use serde::Serialize;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};
use understudy_arbiter::whole_file;
use understudy_report::error::{ErrorKind, HostError, cannot};

/// The list of revoked certificates, which every host gets.
pub const REVOKED: &str = "revoked.pem";
/// File that it is made from: a line for each certificate, with its number and the second of its
/// end.
pub(super) const INDEX: &str = "revoked.txt";
/// The list has no end of its own: a host that gets no newer one goes on with it.
const LIST_DAYS: u64 = 36_500;

/// State of revocations now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Revoked {
    /// The list, PEM.
    pub list: PathBuf,
    /// Number of certificates that are on it.
    pub certificates: usize,
    /// Numbers of those that were to be revoked, in hexadecimal digits: what the authority knows of.
    pub numbers: Vec<String>,
}

/// Puts certificates on the list of the CA in `directory`: all that it has issued for host `which`, or those of the file
/// `which`.
pub fn revoke(directory: &Path, which: &str) -> Result<Revoked, HostError> {
    let authority = Authority::open(directory)?;
    let _turn = ledger::turn(directory)?;
    let serials: Vec<String> = match which.contains('/') || which.ends_with(".pem") {
        true => {
            let issued = check_issued(directory, Path::new(which))?;
            issued.iter().map(|facts| hex(&facts.serial)).collect()
        }
        false => issued_to(directory, which)?.into_iter().map(|it| it.serial).collect(),
    };
    let mut index = read_index(directory)?;
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    for serial in &serials {
        if !index.iter().any(|(known, _)| known == serial) {
            index.push((serial.clone(), now.as_secs()));
        }
    }
    let list = authority.write_list(&index)?;
    Ok(Revoked { list, certificates: index.len(), numbers: serials })
}

/// Whether a certificate for this name, in whatever case, could still be shown.
pub fn is_certified(directory: &Path, name: &str) -> Result<bool, HostError> {
    let revoked = read_index(directory)?;
    let now = UnixTime::now().as_secs() as i64;
    let counts = |it: &Issued| {
        it.not_after >= now && !revoked.iter().any(|(serial, _)| *serial == it.serial)
    };
    Ok(ledger::issued_for(directory, name)?.iter().any(counts))
}

/// What this CA has issued for the name: at least one.
fn issued_to(directory: &Path, name: &str) -> Result<Vec<Issued>, HostError> {
    let issued = ledger::issued_for(directory, name)?;
    if issued.is_empty() {
        let message = format!(
            "the CA in {} knows of no certificate for {name:?}: {LEDGER} there has those that it issued; one that it \
             issued elsewhere is revoked by its file, `understudy pki revoke ./FILE.pem`",
            directory.display()
        );
        return Err(HostError::new(ErrorKind::NotFound, message));
    }
    Ok(issued)
}

/// The facts of those certificates in a file that are of this CA, if there are any.
pub(super) fn issued_in(directory: &Path, path: &Path) -> Result<Vec<Facts>, HostError> {
    let ca = &read(&directory.join(CA_CERT))?[0];
    let certificates = match certificates(path) {
        Ok(certificates) => certificates,
        Err(pem::Error::NoItemsFound) => Vec::new(),
        Err(error) => return Err(unreadable(path, &error)),
    };
    let of_this_ca = certificates.iter().filter(|certificate| *certificate != ca);
    Ok(of_this_ca.filter_map(|certificate| check(directory, path, ca, certificate).ok()).collect())
}

/// The facts of the certificates in a file, which are all of this CA.
fn check_issued(directory: &Path, path: &Path) -> Result<Vec<Facts>, HostError> {
    let (ca, mut certificates) = (read(&directory.join(CA_CERT))?, read(path)?);
    let ca = &ca[0];
    // A chain may have it behind the host's own.
    certificates.retain(|certificate| certificate != ca);
    certificates.iter().map(|certificate| check(directory, path, ca, certificate)).collect()
}

/// The certificates of a file: at least one.
fn read(path: &Path) -> Result<Vec<CertificateDer<'static>>, HostError> {
    certificates(path).map_err(|error| unreadable(path, &error))
}

fn certificates(path: &Path) -> Result<Vec<CertificateDer<'static>>, pem::Error> {
    let found = CertificateDer::pem_file_iter(path)?.collect::<Result<Vec<_>, _>>()?;
    if found.is_empty() { Err(pem::Error::NoItemsFound) } else { Ok(found) }
}

fn unreadable(path: &Path, error: &pem::Error) -> HostError {
    let message = format!("cannot read the certificate {}: {error}", path.display());
    HostError::new(ErrorKind::Invalid, message)
}

/// The facts of a certificate of this CA.
fn check(
    directory: &Path,
    path: &Path,
    ca: &CertificateDer<'_>,
    certificate: &CertificateDer<'_>,
) -> Result<Facts, HostError> {
    let wrong = |message: String| HostError::new(ErrorKind::Invalid, message);
    let facts = certificate::parse(certificate)
        .map_err(|error| wrong(format!("{}: {error}", path.display())))?;
    let mut roots = RootCertStore::empty();
    roots.add(ca.clone().into_owned()).map_err(|error| wrong(format!("{CA_CERT}: {error}")))?;
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), provider)
        .build()
        .map_err(|error| wrong(format!("{CA_CERT}: {error}")))?;
    use CertificateError::{BadSignature, UnknownIssuer};
    match verifier.verify_client_cert(certificate, &[], UnixTime::now()) {
        Err(Error::InvalidCertificate(UnknownIssuer | BadSignature)) => {
            let (path, directory) = (path.display(), directory.display());
            Err(wrong(format!("{path} was not issued by the CA in {directory}")))
        }
        // One that has expired may be revoked, too.
        _ => Ok(facts),
    }
}

fn read_index(directory: &Path) -> Result<Vec<(String, u64)>, HostError> {
    let path = directory.join(INDEX);
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            if directory.join(REVOKED).exists() {
                let message = format!(
                    "{} is missing, from which {REVOKED} was made: restore it, or what was \
                     revoked before would be valid again",
                    path.display()
                );
                return Err(HostError::new(ErrorKind::Invalid, message));
            }
            return Ok(Vec::new());
        }
        Err(error) => return Err(cannot("read", &path, &error)),
    };
    let entry = |line: &str| {
        let (serial, second) = line.split_once(' ')?;
        unhex(serial)?;
        Some((serial.to_owned(), second.parse().ok()?))
    };
    entries(&path, &text, "NUMBER SECONDS", entry)
}

/// The entries of a file of the authority's, each a line of this form.
pub(super) fn entries<T>(
    path: &Path,
    text: &str,
    form: &str,
    entry: impl Fn(&str) -> Option<T>,
) -> Result<Vec<T>, HostError> {
    text.lines().map(entry).collect::<Option<_>>().ok_or_else(|| {
        let path = path.display();
        let message =
            format!("{path} is damaged: a line is {form}; mend it, or restore it from a copy");
        HostError::new(ErrorKind::Invalid, message)
    })
}

impl Authority {
    /// Writes a list on which nothing is.
    pub(super) fn begin_list(&self) -> Result<(), HostError> {
        self.write_list(&[]).map(drop)
    }

    /// Makes the list; where it is.
    fn write_list(&self, index: &[(String, u64)]) -> Result<PathBuf, HostError> {
        let now = SystemTime::now();
        let revoked = |(serial, second): &(String, u64)| RevokedCertParams {
            serial_number: SerialNumber::from(unhex(serial).unwrap_or_default()),
            revocation_time: moment(SystemTime::UNIX_EPOCH + Duration::from_secs(*second)),
            reason_code: None,
            invalidity_date: None,
        };
        let pem = self.sign_list(CertificateRevocationListParams {
            this_update: moment(now),
            next_update: moment(now + Duration::from_secs(LIST_DAYS * 24 * 3600)),
            crl_number: SerialNumber::from(index.len() as u64 + 1),
            issuing_distribution_point: None,
            revoked_certs: index.iter().map(revoked).collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        })?;
        let lines: String =
            index.iter().map(|(serial, second)| format!("{serial} {second}\n")).collect();
        // The index first: a list is never made from less than was on the last.
        replace(&self.directory.join(INDEX), &lines)?;
        let path = self.directory.join(REVOKED);
        replace(&path, &pem)?;
        Ok(path)
    }
}

pub(super) fn replace(path: &Path, text: &str) -> Result<(), HostError> {
    whole_file::replace(path, text, 0o644).map_err(|error| cannot("write", path, &error))
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

pub(super) fn unhex(text: &str) -> Option<Vec<u8>> {
    let digits = text.as_bytes();
    if digits.is_empty() || digits.len() % 2 != 0 || !text.is_ascii() {
        return None;
    }
    let byte = |at: usize| u8::from_str_radix(&text[at..at + 2], 16).ok();
    (0..digits.len()).step_by(2).map(byte).collect()
}
