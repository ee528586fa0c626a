//! The `etcd` arbiter: the record of a key is the value of `PREFIX/owners/KEY`,
//! changed by a transaction that compares the revision that was read. Which
//! arbiter it is stands in `PREFIX/identity`, made in the same way. `PREFIX/leases/KEY/GENERATION`
//! is the owner's last proof that it lives, changed by such transactions, too, and not there once it is withdrawn. A
//! request that an endpoint did not answer may be carried out at any later time: each compares the revision of
//! `PREFIX/withdrawn/KEY/GENERATION` as well, which each withdrawal changes.

use crate::arbiter::{judge, judge_hand_back, stands};
use crate::etcd::{Cluster, Entry, Etcd};
use crate::{ArbiterId, Key, Unreachable};
use understudy_protocol::HostName;
use understudy_protocol::{Generation, Ownership, Renewal, Verdict};

/// Transactions that may be lost to others' before the contest counts as
/// unanswered; each means that the record has changed.
const TRIES: usize = 3;

const IDENTITY: &str = "/identity";
/// Key that there is not, but for a moment after a record changed while that was rehearsed.
const NOTHING: &str = "/rehearsals";

/// The records in one etcd cluster.
#[derive(Clone, Debug)]
pub struct EtcdArbiter {
    etcd: Etcd,
    host: HostName,
}

impl EtcdArbiter {
    pub fn new(etcd: Etcd, host: &HostName) -> EtcdArbiter {
        EtcdArbiter { etcd, host: host.to_owned() }
    }

    pub fn current(&self, key: Key<'_>) -> Result<Option<Ownership>, Unreachable> {
        Ok(self.read(key)?.map(|entry| entry.value))
    }

    pub fn acquire(
        &self,
        key: Key<'_>,
        from: Generation,
        strict: bool,
    ) -> Result<Verdict, Unreachable> {
        self.swap(key, from, Some(&self.host), strict)
    }

    pub fn hand_back(
        &self,
        key: Key<'_>,
        from: Generation,
        to: &HostName,
    ) -> Result<Verdict, Unreachable> {
        let found = self.current(key)?;
        match judge_hand_back(found.as_ref(), (from, &self.host), to) {
            Some(verdict) => Ok(verdict),
            None => self.swap(key, from, Some(to), true),
        }
    }

    pub fn release(&self, key: Key<'_>, from: Generation) -> Result<(), Unreachable> {
        self.swap(key, from, None, false).map(drop)
    }

    /// The last renewal of the lease of that generation's owner.
    pub fn renewal(&self, key: Key<'_>, of: Generation) -> Result<Option<Renewal>, Unreachable> {
        Ok(self.read_lease(key, of)?.and_then(|entry| entry.value))
    }

    pub fn renew(&self, key: Key<'_>, of: Generation, to: &Renewal) -> Result<(), Unreachable> {
        self.change_lease(key, of, Some(to))
    }

    pub fn withdraw(&self, key: Key<'_>, of: Generation) -> Result<(), Unreachable> {
        self.change_lease(key, of, None)
    }

    /// The generations whose owners keep a lease, or withdrew one.
    pub fn tenures(&self, key: Key<'_>) -> Result<Vec<Generation>, Unreachable> {
        let folder = leases(key);
        let found = self.etcd.keys(&folder).map_err(unanswered)?;
        let generation = |key: &String| Some(Generation(key.strip_prefix(&folder)?.parse().ok()?));
        Ok(found.iter().filter_map(generation).collect())
    }

    /// The version before this one withdrew a lease by a `null`.
    fn read_lease(
        &self,
        key: Key<'_>,
        of: Generation,
    ) -> Result<Option<Entry<Option<Renewal>>>, Unreachable> {
        self.etcd.get(&lease(key, of)).map_err(unanswered)
    }

    /// Makes a new revision of a lease, or of its withdrawal, in any case: whatever was asked for before, and not answered,
    /// comes to nothing from then on.
    fn change_lease(
        &self,
        key: Key<'_>,
        of: Generation,
        to: Option<&Renewal>,
    ) -> Result<(), Unreachable> {
        let (lease, withdrawal) = (lease(key, of), format!("/withdrawn/{key}/{of}"));
        for tries in 0..TRIES {
            let seen = self.read_lease(key, of)?;
            let written = seen.as_ref().and_then(|entry| entry.value.as_ref());
            if tries > 0 && to.is_some() && written == to {
                // Carried out, and the answer was lost.
                return Ok(());
            }
            let own = (&*lease, seen.map_or(0, |entry| entry.revision));
            let withdrawn: Option<Entry<bool>> = self.etcd.get(&withdrawal).map_err(unanswered)?;
            let guard = (&*withdrawal, withdrawn.map_or(0, |entry| entry.revision));
            let changed = match to {
                Some(renewal) => self.etcd.swap_guarded(own, guard, renewal),
                None => self.etcd.remove_guarded(own, guard),
            };
            if changed.map_err(unanswered)? {
                return Ok(());
            }
        }
        Err(Unreachable(format!("the lease of {key} kept changing")))
    }

    /// Its identity, if it has one, and the cluster that says so.
    pub fn identity(&self) -> Result<(Option<ArbiterId>, Cluster), Unreachable> {
        let (entry, cluster) = self.etcd.get_from(IDENTITY).map_err(unanswered)?;
        Ok((entry.map(|entry: Entry<ArbiterId>| entry.value), cluster))
    }

    /// Gives the arbiter this identity, unless somebody was first; the one that it has then.
    pub fn name_it(&self, id: ArbiterId) -> Result<ArbiterId, Unreachable> {
        match self.etcd.swap(IDENTITY, 0, &id).map_err(unanswered)? {
            true => Ok(id),
            false => Ok(self.identity()?.0.unwrap_or(id)),
        }
    }

    /// Does what a take-over does, but for the change: a transaction that a majority of the
    /// cluster must agree on, that compares the record's revision, and that a full cluster refuses.
    pub fn rehearse(&self, key: Key<'_>) -> Result<Option<Ownership>, Unreachable> {
        let Some(entry) = self.read(key)? else { return Ok(None) };
        match self.etcd.rehearse(&path(key), entry.revision, NOTHING).map_err(unanswered)? {
            true => Ok(Some(entry.value)),
            false => Err(Unreachable(format!("the record of {key} changed just now"))),
        }
    }

    pub fn etcd(&self) -> &Etcd {
        &self.etcd
    }

    fn read(&self, key: Key<'_>) -> Result<Option<Entry<Ownership>>, Unreachable> {
        self.etcd.get(&path(key)).map_err(unanswered)
    }

    /// An answer that was lost after the grant is found again by reading first:
    /// the record then is this host's, one generation on.
    fn swap(
        &self,
        key: Key<'_>,
        from: Generation,
        host: Option<&HostName>,
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
            let next = Ownership { host: host.cloned(), generation: from.next() };
            if self.etcd.swap(&path(key), revision, &next).map_err(unanswered)? {
                return Ok(Verdict::Granted(from.next()));
            }
        }
        Err(Unreachable(format!("the record of {key} kept changing")))
    }
}

fn lease(key: Key<'_>, of: Generation) -> String {
    format!("{}{of}", leases(key))
}

fn leases(key: Key<'_>) -> String {
    format!("/leases/{key}/")
}

fn path(key: Key<'_>) -> String {
    format!("/owners/{key}")
}

fn unanswered(error: anyhow::Error) -> Unreachable {
    Unreachable(format!("{error:#}"))
}
