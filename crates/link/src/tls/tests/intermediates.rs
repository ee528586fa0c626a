//! Hosts whose certificates are an intermediate authority's.

use super::*;
use rcgen::{
    BasicConstraints, CertificateParams, CertificateRevocationListParams, DnType,
    ExtendedKeyUsagePurpose, IsCa, Issuer, KeyIdMethod, KeyPair, KeyUsagePurpose,
    RevokedCertParams, SerialNumber, date_time_ymd,
};
use std::fs;

/// An authority that another one certifies, whose certificate alone the hosts have.
struct Intermediate {
    directory: tempfile::TempDir,
    issuer: Issuer<'static, KeyPair>,
    certificate: String,
}

fn params(names: &[&str]) -> CertificateParams {
    let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
    let mut params = CertificateParams::new(names).unwrap();
    params.not_after = date_time_ymd(2049, 1, 1);
    params
}

fn of_authority(name: &str) -> CertificateParams {
    let mut params = params(&[]);
    params.distinguished_name.push(DnType::CommonName, name);
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params
}

impl Intermediate {
    fn new() -> Intermediate {
        let directory = tempfile::tempdir().unwrap();
        let (root, own) = (KeyPair::generate().unwrap(), KeyPair::generate().unwrap());
        let certificate = of_authority("root").self_signed(&root).unwrap();
        fs::write(directory.path().join("ca.pem"), certificate.pem()).unwrap();
        let root = Issuer::new(of_authority("root"), root);
        let certificate = of_authority("between").signed_by(&own, &root).unwrap().pem();
        let issuer = Issuer::new(of_authority("between"), own);
        let authority = Intermediate { directory, issuer, certificate };
        authority.revoke(&[]);
        authority
    }

    /// These are all that are revoked.
    fn revoke(&self, serials: &[u64]) {
        let revoked = |serial: &u64| RevokedCertParams {
            serial_number: SerialNumber::from(*serial),
            revocation_time: date_time_ymd(2024, 1, 1),
            reason_code: None,
            invalidity_date: None,
        };
        let list = CertificateRevocationListParams {
            this_update: date_time_ymd(2024, 1, 1),
            next_update: date_time_ymd(2049, 1, 1),
            crl_number: SerialNumber::from(serials.len() as u64 + 1),
            issuing_distribution_point: None,
            revoked_certs: serials.iter().map(revoked).collect(),
            key_identifier_method: KeyIdMethod::Sha256,
        };
        let list = list.signed_by(&self.issuer).unwrap().pem().unwrap();
        fs::write(self.directory.path().join("revoked.pem"), list).unwrap();
    }

    /// A host that shows its certificate with that of the authority, and heeds the list.
    fn host(&self, name: &str, serial: u64) -> Tls {
        let (key, mut params) = (KeyPair::generate().unwrap(), params(&[name]));
        params.serial_number = Some(SerialNumber::from(serial));
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
        let own = params.signed_by(&key, &self.issuer).unwrap().pem();
        let path = |file: &str| self.directory.path().join(file);
        let files = TlsFiles {
            ca: path("ca.pem"),
            cert: path(&format!("{name}.pem")),
            key: path(&format!("{name}.key")),
            revoked: Some(path("revoked.pem")),
        };
        fs::write(&files.cert, own + &self.certificate).unwrap();
        fs::write(&files.key, key.serialize_pem()).unwrap();
        fs::set_permissions(&files.key, fs::Permissions::from_mode(0o600)).unwrap();
        Tls::load(&files, name).unwrap()
    }
}

/// Regression: it counted for nothing there, whoever had certified it.
#[test]
fn a_caller_with_a_certificate_of_an_intermediate_is_known() {
    let authority = Intermediate::new();
    let host = authority.host("b", 8);
    let shown = authority.host("a", 7).material().chain.clone();
    let (host, known) = (ApiTls::new(Arc::new(host)), [literal("a")]);
    assert_eq!(host.whose(&shown, known.iter()), Ok(Some(&known[0])));
    assert!(host.whose(&shown[..1], known.iter()).is_err(), "whose it is cannot be told");
    assert!(host.whose(&[], known.iter()).is_err());
}

/// Regression: the connection stayed, since nobody could tell whose the certificate is without the one between.
#[test]
fn a_revoked_certificate_of_an_intermediate_ends_its_connections() {
    let authority = Intermediate::new();
    let (a, b) = (authority.host("a", 7), authority.host("b", 8));
    assert_eq!(meet(&a, &b, "b"), (Ok(()), Ok(())));
    let (dialled, accepted) = sockets();
    let (ours, _theirs) = thread::scope(|scope| {
        let accepting = scope.spawn(|| Link::accepted(accepted, Some(&b)).unwrap());
        (Link::dialled(dialled, &literal("b"), Some(&a)).unwrap(), accepting.join().unwrap())
    });
    authority.revoke(&[9]);
    assert_eq!(b.refresh().unwrap(), Some(0), "it is another one's");
    authority.revoke(&[9, 7]);
    assert_eq!(b.refresh().unwrap(), Some(1), "the connection that there was");
    assert!(ours.receive().unwrap_err().to_string().contains("closed"));
    assert_says(meet(&a, &b, "b").1, "it has been revoked");
}
