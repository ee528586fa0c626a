//! The ledger: which certificates the authority has issued, and for whom. Wherever one is by now, it can be revoked.

use super::{CA_CERT, REVOKED, revocation};
use crate::tls::certificate::{self, Facts};
use nix::fcntl::{Flock, FlockArg};
use rustls::pki_types::CertificateDer;
use std::fs::{self, File};
use std::io;
use std::path::Path;
use understudy_report::error::{ErrorKind, HostError, cannot};

/// A line for each certificate: its number, the second of its end, and whom it names.
pub(super) const LEDGER: &str = "issued.txt";

/// A certificate that was issued.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Issued {
    /// Its number, in hexadecimal digits.
    pub serial: String,
    /// When it expires, in seconds since 1970.
    pub not_after: i64,
    /// Whom it names.
    name: String,
}

/// One process at a time changes what the authority in `directory` keeps, until this is dropped.
pub(super) fn turn(directory: &Path) -> Result<Flock<File>, HostError> {
    let opened = File::open(directory).map_err(|error| cannot("open", directory, &error))?;
    Flock::lock(opened, FlockArg::LockExclusive)
        .map_err(|(_, error)| cannot("lock", directory, &error.into()))
}

/// Notes a certificate. To be called before anybody gets it.
pub(super) fn note(directory: &Path, certificate: &CertificateDer<'_>) -> Result<(), HostError> {
    let facts = certificate::parse(certificate)
        .map_err(|error| HostError::new(ErrorKind::Internal, error.to_string()))?;
    let _turn = turn(directory)?;
    let mut known = read(directory)?;
    known.extend(of(&facts));
    let line = |it: &Issued| format!("{} {} {}\n", it.serial, it.not_after, it.name);
    revocation::replace(&directory.join(LEDGER), &known.iter().map(line).collect::<String>())
}

/// All that was issued for a name, in whatever case.
pub(super) fn issued_for(directory: &Path, name: &str) -> Result<Vec<Issued>, HostError> {
    let mut known = read(directory)?;
    known.retain(|it| it.name.eq_ignore_ascii_case(name));
    Ok(known)
}

fn of(facts: &Facts) -> Option<Issued> {
    let name = facts.name.clone().filter(|name| !name.contains(char::is_whitespace))?;
    Some(Issued { serial: revocation::hex(&facts.serial), not_after: facts.not_after, name })
}

fn read(directory: &Path) -> Result<Vec<Issued>, HostError> {
    let path = directory.join(LEDGER);
    let text = match fs::read_to_string(&path) {
        Ok(text) => text,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return seed(directory),
        Err(error) => return Err(cannot("read", &path, &error)),
    };
    revocation::entries(&path, &text, "NUMBER SECONDS NAME", entry)
}

fn entry(line: &str) -> Option<Issued> {
    let mut words = line.split(' ');
    let (serial, end, name) = (words.next()?, words.next()?, words.next()?);
    revocation::unhex(serial)?;
    let issued =
        Issued { serial: serial.to_owned(), not_after: end.parse().ok()?, name: name.to_owned() };
    words.next().is_none().then_some(issued)
}

/// What an authority without a ledger is known to have issued: the certificates that still lie in its directory.
fn seed(directory: &Path) -> Result<Vec<Issued>, HostError> {
    let unreadable = |error| cannot("read", directory, &error);
    let mut known = Vec::new();
    for entry in fs::read_dir(directory).map_err(unreadable)? {
        let path = entry.map_err(unreadable)?.path();
        let name = path.file_name().unwrap_or_default();
        if name == CA_CERT || name == REVOKED || path.extension().is_none_or(|it| it != "pem") {
            continue;
        }
        known.extend(revocation::issued_in(directory, &path)?.iter().filter_map(of));
    }
    Ok(known)
}
