//! The arbiter of one daemon, of whichever kind.

use crate::ArbiterConfig;
use crate::descriptors::lend;
use crate::etcd::Etcd;
use crate::file::FileArbiter;
use crate::identity::{self, Memory};
use crate::identity::{ArbiterId, ArbiterName};
use crate::in_etcd::EtcdArbiter;
use crate::key::Key;
use std::cell::Cell;
use std::path::Path;
use std::sync::Arc;
use understudy_protocol::{Generation, LeaseAnswer, LeaseErrand, Ownership, Renewal, Verdict};
use understudy_protocol::{HostName, VmName};

/// Reason why an arbiter gave no answer; for people.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Unreachable(pub String);

/// Keeps the ownership records; one per daemon, asked in the name of its host.
#[derive(Clone, Debug)]
pub struct Arbiter {
    kind: Kind,
    /// Host in whose name it is asked.
    host: HostName,
    /// Place where it is, for people.
    place: String,
    /// Memory of the arbiter that this host has used before.
    memory: Arc<Memory>,
}

#[derive(Clone, Debug)]
enum Kind {
    File(FileArbiter),
    Etcd(EtcdArbiter),
}

impl Arbiter {
    /// The configured arbiter, asked in the name of `host`. Does not ask it yet.
    /// An error is about the files that the configuration names.
    pub fn new(config: &ArbiterConfig, host: &HostName) -> anyhow::Result<Arbiter> {
        let (kind, place) = match config {
            ArbiterConfig::File { path } => {
                (Kind::File(FileArbiter::new(path, host)), path.display().to_string())
            }
            ArbiterConfig::Etcd(config) => {
                let place = format!("{}{}", config.endpoints, config.prefix);
                (Kind::Etcd(EtcdArbiter::new(Etcd::new(config)?, host)), place)
            }
        };
        Ok(Arbiter { kind, host: host.clone(), place, memory: Arc::default() })
    }

    /// The same, which remembers in the host's state directory which one it is.
    /// `is_new`: the host has no images, and takes whichever there is.
    pub fn remembered_in(self, state_dir: &Path, is_new: bool) -> anyhow::Result<Arbiter> {
        if is_new {
            identity::forget(state_dir)?;
        }
        Ok(Arbiter { memory: Arc::new(Memory::of(state_dir)?), ..self })
    }

    /// The same for a keeper, which remembers what the host's daemon has noted, and notes nothing itself.
    pub fn recalled_from(self, state_dir: &Path) -> anyhow::Result<Arbiter> {
        Ok(Arbiter { memory: Arc::new(Memory::of_another(state_dir)?), ..self })
    }

    /// Which arbiter it is, and where. One that nobody has used yet gets its identity. An error if
    /// it is not the one that this host has used before.
    pub fn identify(&self) -> Result<ArbiterName, Unreachable> {
        let _lent = lend();
        let found = match self.meet()? {
            Some(found) => found,
            None => {
                let fresh = ArbiterId::fresh().map_err(|error| Unreachable(error.to_string()))?;
                let named = match &self.kind {
                    Kind::File(arbiter) => arbiter.name_it(fresh)?,
                    Kind::Etcd(arbiter) => arbiter.name_it(fresh)?,
                };
                self.memory.recognise(Some(named.clone()), &self.place)?;
                self.meet()?.unwrap_or(named)
            }
        };
        Ok(ArbiterName { id: found, place: self.place.clone() })
    }

    /// Identity of the arbiter, which is the one that this host has used before; none if nobody has used it
    /// yet. What is asked next is asked of the very cluster that said so.
    fn meet(&self) -> Result<Option<ArbiterId>, Unreachable> {
        let Kind::Etcd(arbiter) = &self.kind else {
            return self.memory.meet(|| self.identity(), &self.place);
        };
        let cluster = Cell::new(None);
        let look = || {
            let (id, of) = arbiter.identity()?;
            cluster.set(Some(of));
            Ok(id)
        };
        let met = self.memory.meet(look, &self.place)?;
        if let (Some(_), Some(cluster)) = (&met, cluster.get()) {
            arbiter.etcd().keep_to(cluster);
        }
        Ok(met)
    }

    /// Identity of the arbiter; none if nobody has used it yet.
    pub fn identity(&self) -> Result<Option<ArbiterId>, Unreachable> {
        match &self.kind {
            Kind::File(arbiter) => arbiter.identity(),
            Kind::Etcd(arbiter) => arbiter.identity().map(|(id, _)| id),
        }
    }

    /// Proves that this host could take a key over from `owner`: that it reads this record, of
    /// this generation, and could write the next one. Changes nothing.
    pub fn prove<'a>(
        &self,
        key: impl Into<Key<'a>>,
        owner: &HostName,
        generation: Generation,
    ) -> Result<(), Unreachable> {
        let key = key.into();
        let _lent = lend();
        self.identify()?;
        let record = match &self.kind {
            Kind::File(arbiter) => arbiter.rehearse(key),
            Kind::Etcd(arbiter) => arbiter.rehearse(key),
        }?;
        match record {
            Some(found) if found.host.as_ref() == Some(owner) && found.generation == generation => {
                Ok(())
            }
            found => {
                let found = match found {
                    None => "it has no record of it".to_owned(),
                    Some(Ownership { host: Some(host), generation }) => {
                        format!("its record says {host}, generation {generation}")
                    }
                    Some(Ownership { host: None, generation }) => {
                        format!("its record says that it was stopped at generation {generation}")
                    }
                };
                Err(Unreachable(format!(
                    "the arbiter at {} does not say that {owner} owns {key} at generation \
                     {generation}: {found}",
                    self.place
                )))
            }
        }
    }

    /// The newest record; none when no host ever owned the key.
    pub fn current<'a>(&self, key: impl Into<Key<'a>>) -> Result<Option<Ownership>, Unreachable> {
        let key = key.into();
        let _lent = lend();
        self.identify()?;
        match &self.kind {
            Kind::File(arbiter) => arbiter.current(key),
            Kind::Etcd(arbiter) => arbiter.current(key),
        }
    }

    /// Whether this host owns a key, at this generation.
    pub fn owns<'a>(
        &self,
        key: impl Into<Key<'a>>,
        generation: Generation,
    ) -> Result<bool, Unreachable> {
        let own = Ownership { host: Some(self.host.clone()), generation };
        Ok(self.current(key)? == Some(own))
    }

    /// Contests a key: makes this host the owner at the generation after `from`,
    /// unless another host was first. Asking again for what this host already won
    /// is granted; what was handed back to it since is returned. The record must stand at `from`: an arbiter that has lost it
    /// (an empty directory where the shared one should be mounted, a cluster set
    /// up anew) decides nothing.
    pub fn acquire<'a>(&self, key: impl Into<Key<'a>>, from: Generation) -> Verdict {
        match self.ask(key.into(), from, true) {
            Verdict::Taken(owner) if owner.host.as_ref() == Some(&self.host) => {
                Verdict::Returned(owner.generation)
            }
            verdict => verdict,
        }
    }

    /// Makes `to` the owner of a key that this host has won at `from`, and can do nothing with.
    /// Asking again is harmless.
    pub fn hand_back<'a>(
        &self,
        key: impl Into<Key<'a>>,
        from: Generation,
        to: &HostName,
    ) -> Verdict {
        let key = key.into();
        let _lent = lend();
        let verdict = self.identify().and_then(|_| match &self.kind {
            Kind::File(arbiter) => arbiter.hand_back(key, from, to),
            Kind::Etcd(arbiter) => arbiter.hand_back(key, from, to),
        });
        verdict.unwrap_or_else(|Unreachable(reason)| Verdict::Unreachable(reason))
    }

    /// The same for a VM that is being started: nobody contests it, and a record
    /// that is older than the VM's images is brought up to date.
    pub fn claim<'a>(&self, key: impl Into<Key<'a>>, from: Generation) -> Verdict {
        self.ask(key.into(), from, false)
    }

    fn ask(&self, key: Key<'_>, from: Generation, strict: bool) -> Verdict {
        let _lent = lend();
        let verdict = self.identify().and_then(|_| match &self.kind {
            Kind::File(arbiter) => arbiter.acquire(key, from, strict),
            Kind::Etcd(arbiter) => arbiter.acquire(key, from, strict),
        });
        verdict.unwrap_or_else(|Unreachable(reason)| Verdict::Unreachable(reason))
    }

    /// Gives the key up after a clean stop: any host may take it then.
    pub fn release<'a>(
        &self,
        key: impl Into<Key<'a>>,
        from: Generation,
    ) -> Result<(), Unreachable> {
        let key = key.into();
        let _lent = lend();
        self.identify()?;
        match &self.kind {
            Kind::File(arbiter) => arbiter.release(key, from),
            Kind::Etcd(arbiter) => arbiter.release(key, from),
        }
    }

    /// The last renewal of the lease of who owns a VM, or owned it, at that generation; none if
    /// it keeps none.
    pub fn renewal(&self, vm: &VmName, of: Generation) -> Result<Option<Renewal>, Unreachable> {
        let _lent = lend();
        self.identify()?;
        self.last_renewal(vm, of)
    }

    /// The same of an arbiter that is identified.
    fn last_renewal(&self, vm: &VmName, of: Generation) -> Result<Option<Renewal>, Unreachable> {
        match &self.kind {
            Kind::File(arbiter) => arbiter.renewal(vm.into(), of),
            Kind::Etcd(arbiter) => arbiter.renewal(vm.into(), of),
        }
    }

    /// The last renewals of the owners of a VM that kept a lease, at one of these generations, oldest first, but for those that
    /// were withdrawn. What others have left need not be readable.
    pub fn renewals(
        &self,
        vm: &VmName,
        is_meant: impl Fn(Generation) -> bool,
    ) -> Result<Vec<(Generation, Renewal)>, Unreachable> {
        let _lent = lend();
        self.identify()?;
        let mut meant = match &self.kind {
            Kind::File(arbiter) => arbiter.tenures(vm.into()),
            Kind::Etcd(arbiter) => arbiter.tenures(vm.into()),
        }?;
        meant.retain(|of| is_meant(*of));
        meant.sort();
        let mut renewals = Vec::new();
        for of in meant {
            // It may have been withdrawn.
            renewals.extend(self.last_renewal(vm, of)?.map(|renewal| (of, renewal)));
        }
        Ok(renewals)
    }

    /// Renews or withdraws the lease of a VM that this host owns at `of`, then reads whether it
    /// does. Whoever takes the VM meanwhile sees, after it has, that the lease has changed.
    pub fn tend(
        &self,
        vm: &VmName,
        of: Generation,
        errand: LeaseErrand,
        to: &Renewal,
    ) -> LeaseAnswer {
        let _lent = lend();
        let done = self.identify().and_then(|_| match (&self.kind, errand) {
            (Kind::File(arbiter), LeaseErrand::Renew) => arbiter.renew(vm.into(), of, to),
            (Kind::File(arbiter), LeaseErrand::Withdraw) => arbiter.withdraw(vm.into(), of),
            (Kind::Etcd(arbiter), LeaseErrand::Renew) => arbiter.renew(vm.into(), of, to),
            (Kind::Etcd(arbiter), LeaseErrand::Withdraw) => arbiter.withdraw(vm.into(), of),
        });
        match done.and_then(|()| self.current(vm)) {
            Err(Unreachable(reason)) => LeaseAnswer::Unreachable(reason),
            Ok(Some(Ownership { host: Some(host), generation }))
                if host == self.host && generation == of =>
            {
                LeaseAnswer::Own
            }
            // Lost data is no word: see `stands`.
            Ok(found) if found.as_ref().is_none_or(|found| found.generation < of) => {
                LeaseAnswer::Unreachable(format!(
                    "the arbiter at {} has no record of generation {of}: has it lost its data?",
                    self.place
                ))
            }
            Ok(found) => {
                let to = found.and_then(|found| found.host);
                let why = match &to {
                    Some(host) if *host == self.host => {
                        "this host has it at a later generation, by another daemon".to_owned()
                    }
                    Some(host) => format!("host {host} was given it while this host was silent"),
                    None => "it was given up while this host was silent".to_owned(),
                };
                LeaseAnswer::Moved { to, why }
            }
        }
    }

    /// The cluster behind an `etcd` arbiter, which also knows the hosts.
    pub fn etcd(&self) -> Option<&Etcd> {
        match &self.kind {
            Kind::File(_) => None,
            Kind::Etcd(arbiter) => Some(arbiter.etcd()),
        }
    }
}

/// A record is beyond the generation that was asked from: whose is it?
pub(crate) fn judge(owner: Ownership, from: Generation, host: Option<&HostName>) -> Verdict {
    let asked_again = owner.generation == from.next() && owner.host.as_ref() == host;
    if asked_again { Verdict::Granted(owner.generation) } else { Verdict::Taken(owner) }
}

/// Verdict on a hand-back, where the record is not this host's at `from`; none where it is.
pub(crate) fn judge_hand_back(
    found: Option<&Ownership>,
    (from, host): (Generation, &HostName),
    to: &HostName,
) -> Option<Verdict> {
    let found = found?;
    let own = found.generation == from && found.host.as_ref() == Some(host);
    (!own).then(|| judge(found.clone(), from, Some(to)))
}

/// Refuses to decide with a record that has been lost.
pub(crate) fn stands(
    key: Key<'_>,
    owner: Option<&Ownership>,
    from: Generation,
) -> Result<(), Unreachable> {
    let known = owner.map_or(Generation(0), |owner| owner.generation);
    if known == from {
        return Ok(());
    }
    Err(Unreachable(format!(
        "the arbiter's record of {key} is of generation {known}, and it was {from} before: is this \
         the arbiter that all hosts share, and has it lost its data?"
    )))
}

#[cfg(test)]
#[path = "arbiter_tests.rs"]
mod tests;
