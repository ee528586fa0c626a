//! The `etcd` arbiter: the record of a key is the value of `PREFIX/owners/KEY`,
//! changed by a transaction that compares the revision that was read.

use super::{Unreachable, judge, stands};
use crate::etcd::{Entry, Etcd};
use understudy_protocol::{Generation, Ownership, Verdict};

/// Transactions that may be lost to others' before the contest counts as
/// unanswered; each means that the record has changed.
const TRIES: usize = 3;

/// The records in one etcd cluster.
#[derive(Clone, Debug)]
pub struct EtcdArbiter {
    etcd: Etcd,
    host: String,
}

impl EtcdArbiter {
    pub fn new(etcd: Etcd, host: &str) -> EtcdArbiter {
        EtcdArbiter { etcd, host: host.to_owned() }
    }

    pub fn current(&self, key: &str) -> Result<Option<Ownership>, Unreachable> {
        Ok(self.read(key)?.map(|entry| entry.value))
    }

    pub fn acquire(
        &self,
        key: &str,
        from: Generation,
        strict: bool,
    ) -> Result<Verdict, Unreachable> {
        self.swap(key, from, Some(&self.host), strict)
    }

    pub fn release(&self, key: &str, from: Generation) -> Result<(), Unreachable> {
        self.swap(key, from, None, false).map(drop)
    }

    pub fn etcd(&self) -> &Etcd {
        &self.etcd
    }

    fn read(&self, key: &str) -> Result<Option<Entry<Ownership>>, Unreachable> {
        self.etcd.get(&path(key)).map_err(unanswered)
    }

    /// An answer that was lost after the grant is found again by reading first:
    /// the record then is this host's, one generation on.
    fn swap(
        &self,
        key: &str,
        from: Generation,
        host: Option<&str>,
        strict: bool,
    ) -> Result<Verdict, Unreachable> {
        for _ in 0..TRIES {
            let seen = self.read(key)?;
            let owner = seen.as_ref().map(|entry| &entry.value);
            if let Some(owner) = owner.filter(|owner| owner.generation > from) {
                return Ok(judge(owner.clone(), from, host));
            }
            if strict {
                stands(key, owner, from)?;
            }
            let revision = seen.map_or(0, |entry| entry.revision);
            let next = Ownership { host: host.map(str::to_owned), generation: from.next() };
            if self.etcd.swap(&path(key), revision, &next).map_err(unanswered)? {
                return Ok(Verdict::Granted(from.next()));
            }
        }
        Err(Unreachable(format!("the record of {key} kept changing")))
    }
}

fn path(key: &str) -> String {
    format!("/owners/{key}")
}

fn unanswered(error: anyhow::Error) -> Unreachable {
    Unreachable(format!("{error:#}"))
}
