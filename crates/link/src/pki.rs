//! A small certificate authority: one for the hosts that know each other, and
//! one certificate for each of them.

mod authority;
mod ledger;
mod revocation;

pub use revocation::{REVOKED, Revoked, is_certified, revoke};

use authority::Authority;

use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, KeyPair,
    KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, PublicKeyData, SignatureAlgorithm, date_time_ymd,
};
use serde::Serialize;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};
use time::OffsetDateTime;
use understudy_protocol::{HostName, NameError};
use understudy_report::error::{ErrorKind, HostError, cannot};

/// The CA's certificate, which every host gets.
pub const CA_CERT: &str = "ca.pem";
/// The CA's key, which no host needs.
pub const CA_KEY: &str = "ca.key";
/// All that an authority keeps.
const FILES: [&str; 5] = [CA_CERT, CA_KEY, REVOKED, revocation::INDEX, ledger::LEDGER];

/// Days that a host's certificate is valid unless somebody says otherwise.
pub const HOST_DAYS: u32 = 825;
const CA_DAYS: u32 = 3650;
/// Clocks of hosts may differ by this much.
const CLOCK_SKEW: Duration = Duration::from_secs(3600);

/// Files that were written.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Written {
    /// A certificate, PEM.
    pub cert: PathBuf,
    /// Its private key, PEM, mode 0600.
    pub key: PathBuf,
}

/// Makes a CA in `directory`, which is made if need be. An existing CA is kept:
/// a new one would shut out every host that has a certificate of the old.
pub fn init(directory: &Path) -> Result<Written, HostError> {
    init_at(SystemTime::now(), directory)
}

fn make_private(directory: &Path) -> Result<(), HostError> {
    let made = fs::DirBuilder::new().recursive(true).mode(0o700).create(directory);
    made.map_err(|error| cannot("make", directory, &error))
}

/// The same, valid from `now` on.
pub fn init_at(now: SystemTime, directory: &Path) -> Result<Written, HostError> {
    make_private(directory)?;
    // A key without the certificate that is there would sign what no host takes.
    refuse_existing(FILES.map(|file| directory.join(file)))?;
    let key = KeyPair::generate().map_err(internal)?;
    let certificate = ca_params(now)?.self_signed(&key).map_err(internal)?;
    let written = Written { cert: directory.join(CA_CERT), key: directory.join(CA_KEY) };
    write(&written, &certificate.pem(), &key.serialize_pem())?;
    Authority::open(directory)?.begin_list()?;
    Ok(written)
}

/// Issues a certificate for the host `name`, valid for `days`, with the CA in `directory`. It is put there, too.
pub fn issue(directory: &Path, name: &str, days: u32) -> Result<Written, HostError> {
    issue_at(SystemTime::now(), directory, name, days)
}

/// The same, valid from `now` on.
pub fn issue_at(
    now: SystemTime,
    directory: &Path,
    name: &str,
    days: u32,
) -> Result<Written, HostError> {
    issue_from(now, directory, name, days, directory)
}

/// Issues a certificate as [`issue`] does, and puts it into another directory, which is made if need be: where the last
/// one of that name lies nothing is overwritten.
pub fn issue_into(
    directory: &Path,
    name: &str,
    days: u32,
    into: &Path,
) -> Result<Written, HostError> {
    make_private(into)?;
    issue_from(SystemTime::now(), directory, name, days, into)
}

fn issue_from(
    now: SystemTime,
    directory: &Path,
    name: &str,
    days: u32,
    into: &Path,
) -> Result<Written, HostError> {
    let name: HostName = name
        .parse()
        .map_err(|error: NameError| HostError::new(ErrorKind::Invalid, error.to_string()))?;
    let authority = Authority::open(directory)?;
    let key = KeyPair::generate().map_err(internal)?;
    let certificate = authority.sign(host_params(now, &name, days)?, &key)?;
    let path = |ending: &str| into.join(format!("{name}.{ending}"));
    let written = Written { cert: path("pem"), key: path("key") };
    refuse_existing([&written.key, &written.cert])?;
    ledger::note(directory, certificate.der())?;
    write(&written, &certificate.pem(), &key.serialize_pem())?;
    Ok(written)
}

/// A host's key, made on that host, which it never leaves.
pub struct HostKey(KeyPair);

/// The public half of a host's key, as a host that joins sends it.
pub struct PublicKey(Vec<u8>);

impl HostKey {
    /// Makes one.
    pub fn generate() -> Result<HostKey, HostError> {
        KeyPair::generate().map(HostKey).map_err(internal)
    }

    /// The key, PEM.
    pub fn pem(&self) -> String {
        self.0.serialize_pem()
    }

    /// Its public half.
    pub fn public(&self) -> &[u8] {
        self.0.der_bytes()
    }
}

impl PublicKey {
    /// A point of P-256, as [`HostKey::public`] gives it; none if it is something else.
    pub fn parse(bytes: Vec<u8>) -> Option<PublicKey> {
        const UNCOMPRESSED: u8 = 4;
        (bytes.len() == 65 && bytes[0] == UNCOMPRESSED).then_some(PublicKey(bytes))
    }
}

impl PublicKeyData for PublicKey {
    fn der_bytes(&self) -> &[u8] {
        &self.0
    }

    fn algorithm(&self) -> &'static SignatureAlgorithm {
        &PKCS_ECDSA_P256_SHA256
    }
}

/// Certifies another host's key as [`issue`] would one of its own making; returns the
/// certificate, PEM.
pub fn certify(
    directory: &Path,
    name: &HostName,
    key: &PublicKey,
    days: u32,
) -> Result<String, HostError> {
    let authority = Authority::open(directory)?;
    let certificate = authority.sign(host_params(SystemTime::now(), name, days)?, key)?;
    ledger::note(directory, certificate.der())?;
    Ok(certificate.pem())
}

fn moment(time: SystemTime) -> OffsetDateTime {
    let since_1970 = time.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    date_time_ymd(1970, 1, 1) + since_1970
}

fn ca_params(now: SystemTime) -> Result<CertificateParams, HostError> {
    let mut params = valid_for(now, Vec::new(), CA_DAYS)?;
    params.distinguished_name.push(DnType::CommonName, "Understudy hosts");
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    Ok(params)
}

fn host_params(
    now: SystemTime,
    name: &HostName,
    days: u32,
) -> Result<CertificateParams, HostError> {
    let mut params = valid_for(now, vec![name.to_string()], days)?;
    params.distinguished_name.push(DnType::CommonName, name.as_str());
    params.use_authority_key_identifier_extension = true;
    params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
    // Every host dials and is dialled.
    params.extended_key_usages =
        vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    Ok(params)
}

fn valid_for(
    now: SystemTime,
    names: Vec<String>,
    days: u32,
) -> Result<CertificateParams, HostError> {
    let mut params = CertificateParams::new(names).map_err(internal)?;
    let now = moment(now);
    params.not_before = now - CLOCK_SKEW;
    params.not_after = now + Duration::from_secs(u64::from(days) * 24 * 3600);
    Ok(params)
}

/// What exists may be in use.
fn refuse_existing(paths: impl IntoIterator<Item = impl AsRef<Path>>) -> Result<(), HostError> {
    let existing = paths.into_iter().find(|path| path.as_ref().exists());
    existing.map_or(Ok(()), |path| Err(exists(path.as_ref())))
}

fn exists(path: &Path) -> HostError {
    let path = path.display();
    let message = format!(
        "{path} exists, and may be in use: move it away if it is not, or name another directory \
         (`pki issue --out`, `pki init --dir`)"
    );
    HostError::new(ErrorKind::Conflict, message)
}

/// Nothing that exists is overwritten.
fn write(written: &Written, cert: &str, key: &str) -> Result<(), HostError> {
    for (path, text, mode) in [(&written.key, key, 0o600), (&written.cert, cert, 0o644)] {
        let file = File::options().write(true).create_new(true).mode(mode).open(path);
        file.and_then(|mut file| file.write_all(text.as_bytes())).map_err(|error| {
            match error.kind() {
                io::ErrorKind::AlreadyExists => exists(path),
                _ => cannot("write", path, &error),
            }
        })?;
    }
    Ok(())
}

fn internal(error: rcgen::Error) -> HostError {
    HostError::new(ErrorKind::Internal, format!("cannot make a certificate: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o777
    }

    #[test]
    fn keys_are_private_and_nothing_is_overwritten() {
        let directory = tempfile::tempdir().unwrap();
        let pki = directory.path().join("pki");
        let missing = issue(&pki, "b", 1).unwrap_err();
        assert!(missing.message.contains("understudy pki init"), "{missing}");
        let ca = init(&pki).unwrap();
        assert_eq!((mode(&ca.key), mode(&pki)), (0o600, 0o700));
        let before = fs::read(&ca.key).unwrap();
        assert_eq!(init(&pki).unwrap_err().kind, ErrorKind::Conflict);
        assert_eq!(fs::read(&ca.key).unwrap(), before);
        let host = issue(&pki, "b", 1).unwrap();
        assert_eq!(mode(&host.key), 0o600);
        assert!(issue(&pki, "b", 1).unwrap_err().message.contains("exists"));
    }

    /// A key was left behind, with which lists were signed that no host could take.
    #[test]
    fn an_authority_that_is_not_made_leaves_no_key_behind() {
        let directory = tempfile::tempdir().unwrap();
        init(&directory.path().join("of-another")).unwrap();
        for file in FILES {
            let pki = directory.path().join(file);
            fs::create_dir(&pki).unwrap();
            fs::copy(directory.path().join("of-another").join(CA_CERT), pki.join(file)).unwrap();
            let error = init(&pki).unwrap_err();
            assert!(error.kind == ErrorKind::Conflict && error.message.contains(file), "{error}");
            assert_eq!(fs::read_dir(&pki).unwrap().count(), 1, "{file}");
        }
    }

    #[test]
    fn what_is_signed_is_signed_with_the_key_of_the_certificate() {
        let directory = tempfile::tempdir().unwrap();
        let (own, other) = (directory.path().join("own"), directory.path().join("other"));
        for pki in [&own, &other] {
            init(pki).unwrap();
            issue(pki, "a", 1).unwrap();
        }
        let list = fs::read(own.join(REVOKED)).unwrap();
        fs::copy(other.join(CA_KEY), own.join(CA_KEY)).unwrap();
        let key = PublicKey::parse(HostKey::generate().unwrap().public().to_vec()).unwrap();
        let certified = certify(&own, &"b".parse().unwrap(), &key, 1).map(drop);
        let issued = issue(&own, "b", 1).map(drop);
        for refused in [certified, issued, revoke(&own, "a").map(drop)] {
            let error = refused.unwrap_err().message;
            assert!(error.contains("is not the key of") && error.contains(CA_CERT), "{error}");
        }
        assert!(!own.join("b.pem").exists() && !is_certified(&own, "b").unwrap());
        assert_eq!(fs::read(own.join(REVOKED)).unwrap(), list);
    }

    #[test]
    fn only_certificates_of_the_authority_are_revoked() {
        let directory = tempfile::tempdir().unwrap();
        let (own, other) = (directory.path().join("own"), directory.path().join("other"));
        for pki in [&own, &other] {
            init(pki).unwrap();
            issue(pki, "a", 1).unwrap();
        }
        let revoked = revoke(&own, "a").unwrap();
        assert_eq!((revoked.certificates, revoked.numbers.len()), (1, 1));
        assert_eq!(revoke(&own, "a").unwrap().certificates, 1, "twice is once");
        let foreign = revoke(&own, &other.join("a.pem").to_string_lossy()).unwrap_err();
        assert!(foreign.message.contains("was not issued by the CA"), "{foreign}");
        let unknown = revoke(&own, "b").unwrap_err();
        assert_eq!(unknown.kind, ErrorKind::NotFound, "{unknown}");
        fs::remove_file(own.join("revoked.txt")).unwrap();
        let lost = revoke(&own, "a").unwrap_err().message;
        assert!(lost.contains("would be valid again"), "{lost}");
    }

    /// The authority kept nothing of a host that had joined: its certificate could not be revoked.
    #[test]
    fn all_certificates_of_a_host_that_joined_are_revoked() {
        let directory = tempfile::tempdir().unwrap();
        let pki = directory.path();
        init(pki).unwrap();
        assert!(!is_certified(pki, "b").unwrap());
        for _ in 0..2 {
            let key = PublicKey::parse(HostKey::generate().unwrap().public().to_vec()).unwrap();
            certify(pki, &"b".parse().unwrap(), &key, 1).unwrap();
        }
        assert!(is_certified(pki, "B").unwrap() && !is_certified(pki, "c").unwrap());
        assert_eq!(revoke(pki, "b").unwrap().certificates, 2);
        assert!(!is_certified(pki, "b").unwrap());
    }

    /// The one in use was not on the list, and the host was let in as before.
    #[test]
    fn a_renewed_certificate_is_revoked_with_the_first() {
        let directory = tempfile::tempdir().unwrap();
        let pki = directory.path().join("pki");
        init(&pki).unwrap();
        issue(&pki, "b", 1).unwrap();
        // As an authority of a version without a ledger is.
        fs::remove_file(pki.join(ledger::LEDGER)).unwrap();
        fs::rename(pki.join("b.pem"), pki.join("b-of-last-year.pem")).unwrap();
        issue(&pki, "c", 1).unwrap();
        let renewed = issue_into(&pki, "b", 1, &directory.path().join("new/b")).unwrap();
        assert_eq!((mode(&renewed.key), mode(renewed.key.parent().unwrap())), (0o600, 0o700));
        assert_eq!(revoke(&pki, "b").unwrap().certificates, 2);
        let of_renewed = revoke(&pki, &renewed.cert.to_string_lossy()).unwrap();
        assert_eq!(of_renewed.certificates, 2, "it is on the list already");
        assert!(is_certified(&pki, "c").unwrap());
    }

    #[test]
    fn a_damaged_ledger_is_told_and_nothing_is_issued_beside_it() {
        let directory = tempfile::tempdir().unwrap();
        let pki = directory.path();
        init(pki).unwrap();
        issue(pki, "b", 1).unwrap();
        fs::write(pki.join(ledger::LEDGER), "01 b\n").unwrap();
        assert!(revoke(pki, "b").unwrap_err().message.contains("is damaged"));
        assert!(issue(pki, "c", 1).unwrap_err().message.contains("is damaged"));
        assert!(!pki.join("c.pem").exists());
    }

    #[test]
    fn only_host_names_get_certificates() {
        let directory = tempfile::tempdir().unwrap();
        init(directory.path()).unwrap();
        for name in ["", "a b", "../a", "*"] {
            let error = issue(directory.path(), name, 1).unwrap_err();
            assert_eq!(error.kind, ErrorKind::Invalid, "{name:?}: {error}");
        }
        let issued = issue(directory.path(), "Admin", 1).unwrap();
        assert!(issued.cert.ends_with("admin.pem"), "{}", issued.cert.display());
    }
}
