//! The host whose images of a VM are the valid ones (Remus 2.5), from what the hosts and
//! the arbiter have on record.
//!
//! Each host keeps an [`ImageRecord`] beside its images. It is changed, and on stable
//! storage, before the guest first runs on them at a new generation: the paper's
//! activation record. So the images that the guest ran on last are those whose record
//! shows the highest generation among hosts where it ran at all. A mirror that was never
//! activated is not among them, however new it is: a crash may have left it in the midst
//! of an epoch. What can be concluded when somebody does not answer is decided here, and
//! nothing is concluded that is not certain.

use crate::{Generation, HostName, Ownership};
use serde::{Deserialize, Serialize};

/// The role of a VM's images on one host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum ImageRole {
    /// The guest runs on them, or ran until its host died.
    Active,
    /// The guest ran on them until it powered itself off.
    Stopped,
    /// The guest ran on them until its power was cut: it was told to end at once, or did not power
    /// off in time. It finds there what a power failure leaves.
    Cut,
    /// The guest ran on them until this host lost the VM, or gave it up.
    Stale,
    /// A whole mirror of another host's images; the guest never ran on it.
    Mirror,
    /// A mirror that is not whole: its synchronisation was not completed.
    Syncing,
}

/// One host's record of its images of a VM.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImageRecord {
    /// The host.
    pub host: HostName,
    /// The role of its images.
    pub role: ImageRole,
    /// The generation of ownership at which the guest last ran on them; of a mirror, the
    /// generation of its primary.
    pub generation: Generation,
    /// Generation from which the VM was about to be claimed here, when these images were the
    /// newest. What came of it is in `generation`, if the guest ran.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub claimed_from: Option<Generation>,
}

impl ImageRecord {
    /// The newest generation up to which nobody else has run the guest since it ran on these images.
    pub fn newest_until(&self) -> Generation {
        let claimed_from = self.claimed_from.filter(|_| !planted!(ForgetTheClaim));
        self.generation.max(claimed_from.unwrap_or_default())
    }

    /// Whether somebody had the VM since, if this is the newest generation that the arbiter knows. The next one is that of a
    /// hand-back, or of a claim of this host.
    pub fn is_behind(&self, newest: Generation) -> bool {
        newest > self.newest_until().next()
    }

    /// The generation at which the guest ran on these images, if it ever did.
    pub fn ran_at(&self) -> Option<Generation> {
        match self.role {
            ImageRole::Active | ImageRole::Stopped | ImageRole::Cut | ImageRole::Stale => {
                Some(self.generation)
            }
            ImageRole::Mirror if planted!(MirrorCounts) => Some(self.generation),
            ImageRole::Mirror | ImageRole::Syncing => None,
        }
    }
}

/// The arbiter's word about a VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ArbiterWord {
    /// The newest record of ownership; none when no host ever owned the VM.
    Says(Option<Ownership>),
    /// The arbiter cannot be reached, or there is none.
    Silent,
}

impl ArbiterWord {
    /// The newest generation that the arbiter knows.
    pub fn generation(&self) -> Generation {
        match self {
            ArbiterWord::Says(Some(owner)) => owner.generation,
            _ => Generation(0),
        }
    }
}

/// All that could be learnt about a VM.
#[derive(Clone, Debug)]
pub struct Evidence {
    /// The records of the hosts that answered and have one.
    pub records: Vec<ImageRecord>,
    /// The hosts that answered and have no images of the VM.
    pub without: Vec<HostName>,
    /// The hosts that did not answer.
    pub silent: Vec<HostName>,
    /// The arbiter's word.
    pub arbiter: ArbiterWord,
}

impl Evidence {
    /// The arbiter's word, if it counts: whoever answers knows of no generation that the arbiter does not. One that was
    /// set up anew, or restored from an older copy, cannot say who ran the VM last.
    pub fn word(&self) -> &ArbiterWord {
        let known = self.records.iter().map(ImageRecord::newest_until).max().unwrap_or_default();
        match known > self.arbiter.generation() {
            true => &ArbiterWord::Silent,
            false => &self.arbiter,
        }
    }
}

/// The finding which images are valid.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Finding {
    /// The valid images are these, for certain.
    Valid {
        /// The host that has them.
        host: HostName,
        /// The generation at which the guest ran on them.
        generation: Generation,
        /// The reason, for people.
        why: String,
    },
    /// The answer cannot be told, for this reason.
    Undecided(String),
}

/// Finds the images that the guest ran on last.
pub fn judge(evidence: &Evidence) -> Finding {
    let ran = |record: &&ImageRecord| record.ran_at().is_some();
    let mut candidates: Vec<&ImageRecord> = evidence.records.iter().filter(ran).collect();
    candidates.sort_by_key(|record| (record.generation, &record.host));
    let Some(newest) = candidates.pop() else {
        return Finding::Undecided(nobody_ran_it(evidence));
    };
    let (generation, host) = (newest.generation, newest.host.clone());
    if let Some(other) = candidates.pop().filter(|other| other.generation == generation) {
        let other = &other.host;
        return Finding::Undecided(format!(
            "hosts {other} and {host} both claim to have run it at generation {generation}: one of \
             the records is a copy, or the VM ran without an arbiter on both"
        ));
    }
    match newer_possible(evidence, newest) {
        Newer::No(why) => Finding::Valid { host, generation, why },
        Newer::Perhaps(why) => Finding::Undecided(format!(
            "the newest images found are host {host}'s, of generation {generation}, but {why}"
        )),
    }
}

enum Newer {
    No(String),
    Perhaps(String),
}

/// Whether some host may have run the guest after it ran on these images.
fn newer_possible(evidence: &Evidence, images: &ImageRecord) -> Newer {
    let (host, until) = (&images.host, images.newest_until());
    let ran = format!("host {host} ran it at generation {}", images.generation);
    let ArbiterWord::Says(ownership) = evidence.word() else {
        return match evidence.silent.as_slice() {
            _ if planted!(ConcludeFromSilence) => Newer::No(ran),
            [] => Newer::No(format!("{ran}, and no other host ran it later")),
            silent if evidence.arbiter == ArbiterWord::Silent => Newer::Perhaps(format!(
                "neither the arbiter nor {} can be asked: make one of them reachable",
                hosts(silent)
            )),
            silent => Newer::Perhaps(format!(
                "the arbiter has lost its records of it, and {} may have run it since: make them \
                 reachable",
                hosts(silent)
            )),
        };
    };
    let newest = evidence.arbiter.generation();
    if until >= newest {
        return Newer::No(format!("{ran}, the newest that the arbiter knows"));
    }
    let owner = ownership.as_ref().and_then(|owner| owner.host.as_ref());
    // Whoever wins a VM and runs it has a record of it, of a mirror at first: one without has lost what it had.
    let unknown = |owner: &&HostName| !has_record(evidence, owner) && !planted!(SilentNeverRan);
    if let Some(owner) = owner.filter(unknown) {
        return Newer::Perhaps(format!(
            "the arbiter says that host {owner} won it at generation {newest}, and that host {}",
            what_it_lacks(evidence, owner)
        ));
    }
    // Only the owners of the generations in between can have run it since.
    if until.next() == newest {
        match owner {
            None => return Newer::No(format!("{ran}, and {} since", how_it_ended(evidence, host))),
            Some(owner) if owner == host && until > images.generation => {
                return Newer::No(format!(
                    "{ran}, and claimed it for a start at generation {newest} that came to nothing"
                ));
            }
            Some(owner) if owner == host => {
                return Newer::No(format!(
                    "{ran}, and went on with it alone at generation {newest}"
                ));
            }
            Some(owner) => {
                return Newer::No(format!(
                    "{ran}; host {owner} won generation {newest} but never started the guest: it \
                     has no activation record"
                ));
            }
        }
    }
    match evidence.silent.as_slice() {
        [] => Newer::No(format!("{ran}, and no other host ran it later")),
        unknown => Newer::Perhaps(format!(
            "the arbiter knows generation {newest}, and {} may have run it since: make them \
             reachable",
            hosts(unknown)
        )),
    }
}

/// The end of the guest of `host` before the VM was given back.
fn how_it_ended(evidence: &Evidence, host: &HostName) -> &'static str {
    let own = evidence.records.iter().find(|record| record.host == *host);
    match own.map(|record| record.role) {
        Some(ImageRole::Stopped) => "it was stopped in order",
        Some(ImageRole::Cut) => "its power was cut",
        _ => "it was given up",
    }
}

fn has_record(evidence: &Evidence, host: &HostName) -> bool {
    evidence.records.iter().any(|record| record.host == *host)
}

/// Reason why nothing can be concluded of a VM's owner, and what its operator can do.
fn what_it_lacks(evidence: &Evidence, owner: &HostName) -> &'static str {
    match evidence.without.contains(owner) {
        true => {
            "has no record of it: is its state directory mounted? If what it had is gone for good, \
             `recover --force` starts what is left"
        }
        false => "does not answer: start its daemon",
    }
}

fn nobody_ran_it(evidence: &Evidence) -> String {
    let mirrors: Vec<HostName> =
        evidence.records.iter().map(|record| record.host.clone()).collect();
    let silent = match evidence.silent.as_slice() {
        [] => String::new(),
        silent => format!("; {} cannot be asked", hosts(silent)),
    };
    match mirrors.as_slice() {
        [] => format!("no host that answers has images of it{silent}"),
        mirrors => format!(
            "{} has a mirror that the guest never ran on, and the images that it ran on are not to \
             be found{silent}",
            hosts(mirrors)
        ),
    }
}

fn hosts(names: &[HostName]) -> String {
    match names {
        [one] => format!("host {one}"),
        many => format!("hosts {}", many.join(", ")),
    }
}

/// Whether `host` may start the VM afresh on its own images; the error says why not.
/// Nobody else is asked: what is refused here, [`judge`] may still find valid. Of a host without an
/// arbiter only its own record counts.
pub fn may_start(
    host: &HostName,
    own: Option<&ImageRecord>,
    arbiter: &ArbiterWord,
) -> Result<(), String> {
    let ownership = match arbiter {
        ArbiterWord::Says(ownership) => ownership.as_ref(),
        ArbiterWord::Silent => None,
    };
    if let Some(owner) = ownership.and_then(|owner| owner.host.as_ref()) {
        if owner != host && !planted!(StartForeign) {
            return Err(format!(
                "it belongs to host {owner} (generation {}): its newest state is there",
                ownership.map_or(Generation(0), |owner| owner.generation)
            ));
        }
    }
    // Images that Understudy knows nothing about are the user's to judge.
    let Some(own) = own else { return Ok(()) };
    let generation = own.generation;
    match own.role {
        ImageRole::Active | ImageRole::Stopped | ImageRole::Cut => {}
        // Given up, and nobody took it.
        ImageRole::Stale if ownership.is_some_and(|owner| owner.generation == generation) => {}
        ImageRole::Stale => {
            return Err(format!(
                "its images on host {host} are stale: they are of generation {generation}, and \
                 this host lost it then"
            ));
        }
        ImageRole::Mirror => {
            return Err(format!(
                "its images on host {host} are a mirror that never took over, of the primary at \
                 generation {generation}"
            ));
        }
        ImageRole::Syncing => {
            return Err(format!(
                "its images on host {host} are a mirror whose synchronisation was not completed"
            ));
        }
    }
    let newest = arbiter.generation();
    if *arbiter != ArbiterWord::Silent && own.newest_until() > newest {
        return Err(format!(
            "the images on host {host} are of generation {generation}, and the arbiter knows only \
             generation {newest}: it is a new one, or has lost its records, and another host may have \
             run it since"
        ));
    }
    if own.is_behind(newest) {
        return Err(format!(
            "its images on host {host} are stale: they are of generation {generation}, and the \
             arbiter knows generation {newest}"
        ));
    }
    Ok(())
}

#[cfg(test)]
#[path = "validity_tests.rs"]
mod tests;
