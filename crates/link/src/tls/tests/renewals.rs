//! Certificates that are renewed, and those whose end is near.

use super::*;

/// Regression: new files were read by a new daemon only.
#[test]
fn certificates_are_renewed_without_a_restart() {
    let authority = Authority::new();
    let (a, b) = (authority.heedful("a"), authority.heedful("b"));
    let near = a.problems();
    // A second may have passed, or not.
    let soon = ["expires in 0 days", "expires in 1 days"];
    assert!(near.len() == 1 && soon.iter().any(|words| near[0].contains(words)), "{near:?}");
    let before = a.expires();
    let path = |file| authority.0.path().join(file);
    for file in ["a.pem", "a.key"] {
        std::fs::rename(path(file), path("old")).unwrap();
    }
    assert!(a.refresh().is_err(), "missing files were taken for an answer");
    let fresh = pki::issue(authority.0.path(), "a", 825).unwrap();
    // Half of the new pair.
    let key = std::fs::read(&fresh.key).unwrap();
    std::fs::copy(path("b.key"), &fresh.key).unwrap();
    let words = format!("{:#}", a.refresh().unwrap_err());
    assert!(words.contains("cannot use the certificate"), "{words}");
    assert_eq!((a.expires(), meet(&a, &b, "b")), (before, (Ok(()), Ok(()))));
    std::fs::write(&fresh.key, key).unwrap();
    assert_eq!(a.refresh().unwrap(), Some(0));
    assert!(a.expires() > before + 800 * 24 * 3600, "{}", a.expires());
    assert_eq!((a.problems(), meet(&a, &b, "b")), (Vec::new(), (Ok(()), Ok(()))));
    // A list of another authority would have everybody refused.
    let other = Authority::new();
    std::fs::copy(other.0.path().join(pki::REVOKED), path(pki::REVOKED)).unwrap();
    let words = format!("{:#}", a.refresh().unwrap_err());
    assert!(words.contains("is not a list of this host's CA"), "{words}");
    assert_eq!(meet(&a, &b, "b"), (Ok(()), Ok(())));
}

/// Regression: they were used, and no host spoke with this one any more.
#[test]
fn a_certificate_that_no_peer_will_take_is_not_used() {
    const DAY: Duration = Duration::from_secs(24 * 3600);
    let (authority, other) = (Authority::new(), Authority::new());
    let (a, b) = (Arc::new(authority.issue("a")), authority.issue("b"));
    let own = |file| authority.0.path().join(file);
    let written = pki::issue(other.0.path(), "a", 1).unwrap();
    std::fs::copy(written.cert, own("a.pem")).unwrap();
    std::fs::copy(written.key, own("a.key")).unwrap();
    let words = format!("{:#}", a.refresh().unwrap_err());
    assert!(words.contains("a.pem: it is from another CA"), "{words}");
    assert_eq!(meet(&a, &b, "b"), (Ok(()), Ok(())));
    // Until its time comes.
    for file in ["a.pem", "a.key"] {
        std::fs::remove_file(own(file)).unwrap();
    }
    pki::issue_at(SystemTime::now() + 2 * DAY, authority.0.path(), "a", 1).unwrap();
    renewal::start(Arc::downgrade(&a));
    let told = || a.problems().iter().any(|problem| problem.contains("it is not valid yet"));
    let deadline = SystemTime::now() + Duration::from_secs(60);
    while !told() {
        assert!(SystemTime::now() < deadline, "{:?}", a.problems());
        thread::sleep(Duration::from_millis(50));
    }
    assert_eq!(meet(&a, &b, "b"), (Ok(()), Ok(())));
    // One that has expired is not held on to.
    let old = authority.issue_at(SystemTime::now() - 2 * DAY, "old");
    std::fs::copy(other.0.path().join(pki::CA_CERT), own(pki::CA_CERT)).unwrap();
    assert_eq!(old.refresh().unwrap(), Some(0));
}

// Before, nobody's revocation counted until the certificate was put right.
#[test]
fn beside_a_certificate_that_is_not_used_a_revocation_counts() {
    const DAY: Duration = Duration::from_secs(24 * 3600);
    let authority = Authority::new();
    let (a, b) = (authority.heedful("a"), authority.issue("b"));
    for file in ["a.pem", "a.key"] {
        std::fs::remove_file(authority.0.path().join(file)).unwrap();
    }
    pki::issue_at(SystemTime::now() + 2 * DAY, authority.0.path(), "a", 1).unwrap();
    a.refresh().unwrap_err();
    assert_eq!(meet(&a, &b, "b"), (Ok(()), Ok(())));
    pki::revoke(authority.0.path(), "b").unwrap();
    a.refresh().unwrap_err();
    assert_says(meet(&a, &b, "b").0, "it has been revoked");
}

/// Nobody watched it: after ten years no host would have known another one any more.
#[test]
fn the_end_of_an_authority_is_told_in_time() {
    let day = |days: u64| Duration::from_secs(days * 24 * 3600);
    let directory = tempfile::tempdir().unwrap();
    let path = |file: &str| directory.path().join(file);
    pki::init_at(SystemTime::now() - day(3650 - 100), directory.path()).unwrap();
    let written = pki::issue(directory.path(), "a", 40).unwrap();
    let ca = path(pki::CA_CERT);
    let files = TlsFiles { ca: ca.clone(), cert: written.cert, key: written.key, revoked: None };
    let tls = Tls::load(&files, "a").unwrap();
    let told = tls.problems();
    assert!(told.len() == 1 && told[0].contains("the authority"), "{told:?}");
    // A second may have passed, or not.
    assert!(["99", "100"].iter().any(|n| told[0].contains(&format!("in {n} days"))), "{told:?}");
    // Once both know the next one, too, a host of either is known to one of the other.
    let next = Authority::new();
    let own = next.0.path().join(pki::CA_CERT);
    let both = [std::fs::read(&ca).unwrap(), std::fs::read(&own).unwrap()].concat();
    std::fs::write(&ca, both).unwrap();
    tls.refresh().unwrap();
    assert_eq!(tls.problems(), Vec::<String>::new());
    let written = pki::issue(next.0.path(), "b", 40).unwrap();
    let files = TlsFiles { ca, cert: written.cert, key: written.key, revoked: None };
    let renewed = Tls::load(&files, "b").unwrap();
    assert_eq!(meet(&tls, &renewed, "b"), (Ok(()), Ok(())));
}

#[test]
fn a_file_of_anothers_certificates_is_told_of_before_it_expires() {
    let authority = Authority::new();
    let near = pki::issue(authority.0.path(), "near", 20).unwrap();
    let far = pki::issue(authority.0.path(), "far", 40).unwrap();
    let told = expiring(&near.cert).unwrap();
    assert!(told.contains("near.pem expires in "), "{told}");
    assert_eq!(expiring(&far.cert), None);
}
