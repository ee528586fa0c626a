//! Who owns a VM: one (host, generation) record for each key, changed by
//! compare-and-swap only.
//!
//! A key is a plain string: the name of a VM, or of a group that is owned as
//! one. Every answer that does not come is [`Verdict::Unreachable`]: nothing may
//! be concluded from it.

mod file;

use crate::config::ArbiterConfig;
use file::FileArbiter;
use understudy_protocol::{Generation, Ownership, Verdict};

/// Why an arbiter gave no answer; for people.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Unreachable(pub String);

/// Keeps the ownership records; one per daemon, asked in the name of its host.
#[derive(Clone, Debug)]
pub struct Arbiter(Kind);

#[derive(Clone, Debug)]
enum Kind {
    File(FileArbiter),
}

impl Arbiter {
    /// The configured arbiter, asked in the name of `host`. Does not ask it yet.
    pub fn new(config: &ArbiterConfig, host: &str) -> Arbiter {
        match config {
            ArbiterConfig::File { path } => Arbiter(Kind::File(FileArbiter::new(path, host))),
        }
    }

    /// The newest record; none when no host ever owned the key.
    pub fn current(&self, key: &str) -> Result<Option<Ownership>, Unreachable> {
        match &self.0 {
            Kind::File(arbiter) => arbiter.current(key),
        }
    }

    /// Makes this host the owner at the generation after `from`, unless another
    /// host was first. Asking again for what this host already won is granted.
    pub fn acquire(&self, key: &str, from: Generation) -> Verdict {
        let verdict = match &self.0 {
            Kind::File(arbiter) => arbiter.acquire(key, from),
        };
        verdict.unwrap_or_else(|Unreachable(reason)| Verdict::Unreachable(reason))
    }

    /// Gives the key up after a clean stop: any host may take it then.
    pub fn release(&self, key: &str, from: Generation) -> Result<(), Unreachable> {
        match &self.0 {
            Kind::File(arbiter) => arbiter.release(key, from),
        }
    }
}
