// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-or-later
//! The agent's first and only message.

use std::fmt;
use std::ops::RangeInclusive;

const MAGIC: [u8; 8] = *b"USTDYAGT";

/// Changes with anything in this crate.
const VERSION: u32 = 9;

/// Longest name of a function that can be reported.
const NAME_BYTES: usize = 64;

/// Greeting of the agent: magic, version, and the names of what it misses in QEMU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hello {
    /// The agent's version.
    pub version: u32,
    /// Name of what QEMU lacks for pauses by the agent; none if it lacks nothing.
    pub missing: Option<String>,
    /// Name of what QEMU lacks, or has otherwise, for lockstep; none if it is as it should be.
    pub missing_for_lockstep: Option<String>,
}

/// Reason why bytes are no hello of this version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HelloError {
    /// Something else was sent, of so many bytes.
    Unknown(usize),
    /// The agent is of another release.
    Version(u32),
}

impl Default for Hello {
    /// Hello of an agent of this version, which misses nothing.
    fn default() -> Hello {
        Hello { version: VERSION, missing: None, missing_for_lockstep: None }
    }
}

impl Hello {
    /// Length of every hello.
    pub const BYTES: usize = MAGIC.len() + 4 + 2 * NAME_BYTES;

    /// The versions whose agents a daemon goes on with that another one has started, outside lockstep: there 9
    /// says nothing that 8 does not.
    pub const ADOPTED: RangeInclusive<u32> = 8..=VERSION;

    /// The message. A long name is cut.
    pub fn encode(&self) -> [u8; Hello::BYTES] {
        let mut bytes = [0; Hello::BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&self.version.to_le_bytes());
        let names = bytes[12..].chunks_exact_mut(NAME_BYTES);
        for (to, name) in names.zip([&self.missing, &self.missing_for_lockstep]) {
            let name = name.as_deref().unwrap_or_default().as_bytes();
            let length = name.len().min(NAME_BYTES);
            to[..length].copy_from_slice(&name[..length]);
        }
        bytes
    }

    /// Understands what [`Hello::encode`] made of an agent of this version.
    pub fn decode(bytes: &[u8]) -> Result<Hello, HelloError> {
        Hello::decode_one_of(VERSION..=VERSION, bytes)
    }

    /// Understands what an agent has said to another daemon.
    pub fn decode_adopted(bytes: &[u8]) -> Result<Hello, HelloError> {
        Hello::decode_one_of(Hello::ADOPTED, bytes)
    }

    fn decode_one_of(known: RangeInclusive<u32>, bytes: &[u8]) -> Result<Hello, HelloError> {
        let unknown = HelloError::Unknown(bytes.len());
        let rest = bytes.strip_prefix(&MAGIC).ok_or(unknown)?;
        let (version, names) = rest.split_first_chunk::<4>().ok_or(unknown)?;
        let version = u32::from_le_bytes(*version);
        match known.contains(&version) {
            true if bytes.len() == Hello::BYTES => {}
            true => return Err(unknown),
            false => return Err(HelloError::Version(version)),
        }
        let mut names = names.chunks_exact(NAME_BYTES).map(|name| {
            let name = String::from_utf8_lossy(name);
            let name = name.trim_end_matches('\0');
            (!name.is_empty()).then(|| name.to_owned())
        });
        let mut next = || names.next().flatten();
        Ok(Hello { version, missing: next(), missing_for_lockstep: next() })
    }
}

impl fmt::Display for HelloError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            HelloError::Unknown(bytes) => write!(f, "it began with {bytes} unknown bytes"),
            HelloError::Version(other) => write!(
                f,
                "it has version {other}, this daemon {VERSION}; install daemon and agent library \
                 from the same release"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_hello_says_what_is_missing() {
        for missing in [None, Some("vm_state_notify".to_owned())] {
            let missing_for_lockstep = Some("a".to_owned());
            let hello = Hello { missing, missing_for_lockstep, ..Hello::default() };
            assert_eq!(Hello::decode(&hello.encode()), Ok(hello));
        }
        let long = Hello { missing: Some("x".repeat(200)), ..Hello::default() };
        assert_eq!(Hello::decode(&long.encode()).unwrap().missing.unwrap().len(), NAME_BYTES);
    }

    #[test]
    fn anything_else_is_refused() {
        assert_eq!(Hello::decode(b""), Err(HelloError::Unknown(0)));
        assert_eq!(Hello::decode(b"GET / HTTP/1.1"), Err(HelloError::Unknown(14)));
        let mut bytes = Hello::default().encode();
        assert_eq!(Hello::decode(&bytes[..20]), Err(HelloError::Unknown(20)));
        bytes[8] = 1;
        assert_eq!(Hello::decode(&bytes[..12]), Err(HelloError::Version(1)));
    }

    #[test]
    fn an_agent_of_the_version_before_is_adopted_and_stays_of_it() {
        let [least, highest] = [*Hello::ADOPTED.start(), *Hello::ADOPTED.end()];
        assert_eq!(highest, VERSION);
        let older = Hello { version: least, ..Hello::default() };
        assert_eq!(Hello::decode(&older.encode()), Err(HelloError::Version(least)));
        assert_eq!(Hello::decode_adopted(&older.encode()), Ok(older));
        for version in [least - 1, highest + 1] {
            let other = Hello { version, ..Hello::default() };
            assert_eq!(Hello::decode_adopted(&other.encode()), Err(HelloError::Version(version)));
        }
    }
}
