//! Encryption at rest: who reads the store without the key learns how many chunks of which size
//! there are, which groups have snapshots, and when; who changes it is found out.
//!
//! Every chunk and every manifest is sealed by an AEAD, ChaCha20-Poly1305, together with its name,
//! so that none can stand in another's place. Each is sealed with a key of its own, derived from a
//! random salt of 32 bytes: no nonce ever comes twice. Chunks are named by a keyed hash, for the
//! plain hash of a page tells who knows the page that it is there.

use super::StoreError;
use crate::ChunkId;
use ring::aead::{Aad, CHACHA20_POLY1305, LessSafeKey, Nonce, UnboundKey};
use ring::rand::{SecureRandom, SystemRandom};
use std::fmt;
use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

/// The bytes that every sealed object begins with.
const MAGIC: &[u8; 8] = b"USSEAL1\n";
const SALT_BYTES: usize = 32;
/// A key file is this, 64 hexadecimal digits and a line feed.
const KEY_FILE: &str = "understudy snapshot key 1 ";

/// The secret that a store is sealed with, from a key file.
pub struct StoreKey([u8; 32]);

/// Shows never the secret.
impl fmt::Debug for StoreKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("StoreKey(…)")
    }
}

/// The reason why there is no key.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// The file cannot be read, or made.
    #[error("cannot {action} the snapshot key {}: {source}", path.display())]
    Io {
        /// The action that was tried.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's reason.
        source: io::Error,
    },
    /// A file is there already.
    #[error("{} exists: snapshots may be sealed with it; choose another name", .0.display())]
    Exists(PathBuf),
    /// The file can be read by others.
    #[error(
        "{} is a key that others than its owner may use (mode {mode:04o}): `chmod 600` it",
        path.display()
    )]
    Open {
        /// The file.
        path: PathBuf,
        /// Its mode.
        mode: u32,
    },
    /// The file is of another kind.
    #[error("{} is no snapshot key: `understudy snapshot-key FILE` makes one", .0.display())]
    Foreign(PathBuf),
}

impl StoreKey {
    /// Makes a new key in a file that is not there yet, with mode 0600.
    pub fn make(path: &Path) -> Result<(), KeyError> {
        let failed = |source| KeyError::Io { action: "make", path: path.to_owned(), source };
        let mut secret = [0; 32];
        random(&mut secret).map_err(failed)?;
        let digits = ChunkId(secret);
        let mut options = File::options();
        let file = options.write(true).create_new(true).mode(0o600).open(path);
        let mut file = file.map_err(|source| match source.kind() {
            io::ErrorKind::AlreadyExists => KeyError::Exists(path.to_owned()),
            _ => failed(source),
        })?;
        file.write_all(format!("{KEY_FILE}{digits}\n").as_bytes()).map_err(failed)?;
        file.sync_all().map_err(failed)
    }

    /// Reads a key file, which nobody but its owner may be able to.
    pub fn read(path: &Path) -> Result<StoreKey, KeyError> {
        let failed = |source| KeyError::Io { action: "read", path: path.to_owned(), source };
        let mode = fs::metadata(path).map_err(failed)?.permissions().mode() & 0o777;
        if mode & 0o077 != 0 {
            return Err(KeyError::Open { path: path.to_owned(), mode });
        }
        let bytes = fs::read(path).map_err(failed)?;
        let text = std::str::from_utf8(&bytes).unwrap_or_default();
        let digits = text.strip_prefix(KEY_FILE).map(str::trim_end);
        let secret = digits.and_then(|digits| digits.parse::<ChunkId>().ok());
        Ok(StoreKey(secret.ok_or_else(|| KeyError::Foreign(path.to_owned()))?.0))
    }
}

/// Whether a store is sealed, as its mark says: `encrypted ID PROOF`, or nothing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Mark {
    id: ChunkId,
    proof: ChunkId,
}

impl Mark {
    /// The mark of a new store.
    pub fn new(key: &StoreKey) -> io::Result<Mark> {
        let mut id = ChunkId([0; 32]);
        random(&mut id.0)?;
        Ok(Mark { id, proof: Sealer::new(key, id).proof })
    }

    /// Parses a mark; none if the store is not sealed, an error if nobody can tell.
    pub fn parse(body: &str) -> Result<Option<Mark>, &'static str> {
        let words: Vec<&str> = body.split_whitespace().collect();
        match words[..] {
            [] => Ok(None),
            ["encrypted", id, proof] => match (id.parse(), proof.parse()) {
                (Ok(id), Ok(proof)) => Ok(Some(Mark { id, proof })),
                _ => Err("it does not say how the store is encrypted"),
            },
            _ => Err("it says what this version of understudy does not know"),
        }
    }

    pub fn text(&self) -> String {
        format!("encrypted {} {}\n", self.id, self.proof)
    }
}

/// Seals and opens what is in one store.
pub(super) struct Sealer {
    contents: [u8; 32],
    names: [u8; 32],
    /// Tells whether a key is the store's.
    proof: ChunkId,
}

impl fmt::Debug for Sealer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Sealer(…)")
    }
}

impl Sealer {
    fn new(key: &StoreKey, store: ChunkId) -> Sealer {
        let derive = |context: &str| {
            let material = [key.0, store.0].concat();
            blake3::derive_key(context, &material)
        };
        Sealer {
            contents: derive("understudy 2026 snapshot store: contents"),
            names: derive("understudy 2026 snapshot store: names of chunks"),
            proof: ChunkId(derive("understudy 2026 snapshot store: proof of the key")),
        }
    }

    /// The sealer that fits a store with this mark; none if neither it nor whoever asks has a key.
    pub fn fitting(
        location: &str,
        mark: Option<&Mark>,
        key: Option<&StoreKey>,
    ) -> Result<Option<Sealer>, StoreError> {
        match (mark, key) {
            (None, None) => Ok(None),
            (None, Some(_)) => Err(StoreError::NotEncrypted(location.to_owned())),
            (Some(_), None) => Err(StoreError::Encrypted(location.to_owned())),
            (Some(mark), Some(key)) => {
                let sealer = Sealer::new(key, mark.id);
                match sealer.proof == mark.proof {
                    true => Ok(Some(sealer)),
                    false => Err(StoreError::WrongKey(location.to_owned())),
                }
            }
        }
    }

    /// The name of a chunk in the store.
    pub fn name(&self, id: ChunkId) -> ChunkId {
        ChunkId(*blake3::keyed_hash(&self.names, &id.0).as_bytes())
    }

    /// The bytes for the object of this name.
    pub fn seal(&self, name: &str, mut content: Vec<u8>) -> io::Result<Vec<u8>> {
        let mut sealed = [0; MAGIC.len() + SALT_BYTES];
        let (magic, salt) = sealed.split_at_mut(MAGIC.len());
        magic.copy_from_slice(MAGIC);
        random(salt)?;
        let sealing = self.key(salt).seal_in_place_append_tag(nonce(), aad(name), &mut content);
        sealing.map_err(|_| io::Error::other("it is too long to be sealed"))?;
        let mut sealed = sealed.to_vec();
        sealed.append(&mut content);
        Ok(sealed)
    }

    /// Opens what was sealed as the object of this name; none if these bytes were not.
    pub fn open(&self, name: &str, mut sealed: Vec<u8>) -> Option<Vec<u8>> {
        let (magic, rest) = sealed.split_at_mut_checked(MAGIC.len())?;
        let (salt, content) = rest.split_at_mut_checked(SALT_BYTES)?;
        if magic != MAGIC {
            return None;
        }
        let content = self.key(salt).open_in_place(nonce(), aad(name), content).ok()?;
        Some(content.to_vec())
    }

    /// The key of the object with this salt.
    fn key(&self, salt: &[u8]) -> LessSafeKey {
        let key = blake3::keyed_hash(&self.contents, salt);
        let key = UnboundKey::new(&CHACHA20_POLY1305, key.as_bytes());
        LessSafeKey::new(key.expect("the hash is as long as the key"))
    }
}

/// The only one that a key is used with.
fn nonce() -> Nonce {
    Nonce::assume_unique_for_key([0; 12])
}

fn aad(name: &str) -> Aad<&[u8]> {
    Aad::from(name.as_bytes())
}

pub(super) fn random(bytes: &mut [u8]) -> io::Result<()> {
    SystemRandom::new().fill(bytes).map_err(|_| io::Error::other("there are no random numbers"))
}

#[cfg(test)]
#[path = "encryption_tests.rs"]
mod tests;
