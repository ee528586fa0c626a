//! Who owns a VM: one (host, generation) record for each key, changed by
//! compare-and-swap only.
//!
//! A key is a plain string: the name of a VM, or of a group that is owned as
//! one. Every answer that does not come is [`Verdict::Unreachable`]: nothing may
//! be concluded from it.

mod etcd;
mod file;

use crate::config::ArbiterConfig;
use crate::etcd::Etcd;
use etcd::EtcdArbiter;
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
    Etcd(EtcdArbiter),
}

impl Arbiter {
    /// The configured arbiter, asked in the name of `host`. Does not ask it yet.
    /// An error is about the files that the configuration names.
    pub fn new(config: &ArbiterConfig, host: &str) -> anyhow::Result<Arbiter> {
        Ok(Arbiter(match config {
            ArbiterConfig::File { path } => Kind::File(FileArbiter::new(path, host)),
            ArbiterConfig::Etcd(config) => Kind::Etcd(EtcdArbiter::new(Etcd::new(config)?, host)),
        }))
    }

    /// The newest record; none when no host ever owned the key.
    pub fn current(&self, key: &str) -> Result<Option<Ownership>, Unreachable> {
        match &self.0 {
            Kind::File(arbiter) => arbiter.current(key),
            Kind::Etcd(arbiter) => arbiter.current(key),
        }
    }

    /// Contests a key: makes this host the owner at the generation after `from`,
    /// unless another host was first. Asking again for what this host already won
    /// is granted. The record must stand at `from`: an arbiter that has lost it
    /// (an empty directory where the shared one should be mounted, a cluster set
    /// up anew) decides nothing.
    pub fn acquire(&self, key: &str, from: Generation) -> Verdict {
        self.ask(key, from, true)
    }

    /// The same for a VM that is being started: nobody contests it, and a record
    /// that is older than the VM's images is brought up to date.
    pub fn claim(&self, key: &str, from: Generation) -> Verdict {
        self.ask(key, from, false)
    }

    fn ask(&self, key: &str, from: Generation, strict: bool) -> Verdict {
        let verdict = match &self.0 {
            Kind::File(arbiter) => arbiter.acquire(key, from, strict),
            Kind::Etcd(arbiter) => arbiter.acquire(key, from, strict),
        };
        verdict.unwrap_or_else(|Unreachable(reason)| Verdict::Unreachable(reason))
    }

    /// Gives the key up after a clean stop: any host may take it then.
    pub fn release(&self, key: &str, from: Generation) -> Result<(), Unreachable> {
        match &self.0 {
            Kind::File(arbiter) => arbiter.release(key, from),
            Kind::Etcd(arbiter) => arbiter.release(key, from),
        }
    }

    /// The cluster behind an `etcd` arbiter, which also knows the hosts.
    pub fn etcd(&self) -> Option<&Etcd> {
        match &self.0 {
            Kind::File(_) => None,
            Kind::Etcd(arbiter) => Some(arbiter.etcd()),
        }
    }
}

/// A record is beyond the generation that was asked from: whose is it?
fn judge(owner: Ownership, from: Generation, host: Option<&str>) -> Verdict {
    let asked_again = owner.generation == from.next() && owner.host.as_deref() == host;
    if asked_again { Verdict::Granted(owner.generation) } else { Verdict::Taken(owner) }
}

/// Refuses to decide with a record that has been lost.
fn stands(key: &str, owner: Option<&Ownership>, from: Generation) -> Result<(), Unreachable> {
    let known = owner.map_or(Generation(0), |owner| owner.generation);
    if known == from {
        return Ok(());
    }
    Err(Unreachable(format!(
        "the arbiter's record of {key} is of generation {known}, and it was {from} before: is this \
         the arbiter that all hosts share, and has it lost its data?"
    )))
}
