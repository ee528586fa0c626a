//! Redundancy restored by itself (VMware FT 3.1): when, and to which host, a VM
//! that should be protected is protected again.
//!
//! Pure like the other machines: the daemon asks the hosts, sets protection up
//! and reads the clock; the jitter comes with each event. It never gives up
//! while the wish stands, and tries every host that would take the VM before it
//! waits.

use crate::{HostName, Time};
use std::time::Duration;

/// The first wait after a round in which no host took the VM; doubles with each.
const FIRST_WAIT: Duration = Duration::from_millis(500);
/// The longest wait between two rounds, before jitter.
const LONGEST_WAIT: Duration = Duration::from_secs(15);
/// Protection that stood for less is a failed attempt as far as waiting goes:
/// a backup that fails again and again must not be copied to without a pause.
const STABLE: Duration = Duration::from_secs(10);
/// Time for which a host whose attempt failed comes after all the others.
const GRUDGE: Duration = Duration::from_secs(60);

/// A host that was replaced as a backup, since it could not take over, is borne with twice as long the next time: what takes
/// every host its time would never be done otherwise. That is forgotten after this time without another.
const FORBEARANCE: Duration = Duration::from_secs(24 * 3_600);
/// The most that it is doubled.
const MOST_DOUBLED: u32 = 10;

/// A host that may become the backup, as it was found in a survey. The own host
/// is never one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Its name.
    pub host: HostName,
    /// Its answer, or the reason why it cannot take the VM: it is silent, or refuses.
    pub answer: Result<Fitness, String>,
}

/// The fitness of a host as a backup.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Fitness {
    /// Bytes of memory that it has to spare.
    pub free_memory: u64,
    /// Runnable threads for each 100 processors.
    pub load_percent: u32,
    /// Whether it may fail together with this host: the same rack, the same power.
    pub same_zone: bool,
}

/// An event that happens to the protection of one VM.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RepairEvent {
    /// The VM runs on this host alone although it should be protected, for this
    /// reason. Also the end of an attempt that failed.
    Lost(String),
    /// The VM is protected to a host that has said for long that it could not take over.
    Sick {
        /// The host.
        host: HostName,
        /// Its reason.
        reason: String,
        /// How many times as long as a host is borne with that was never replaced: each of them is told, from 1 on.
        times: u32,
    },
    /// The hosts' answers to a [`RepairAction::Survey`].
    Surveyed(Vec<Candidate>),
    /// The first synchronisation is complete: to be told as long as that is [awaited](Repair::awaits_protection).
    Protected,
    /// The end: nobody wants protection any more, or the VM has gone.
    Ended,
    /// Time has passed.
    Tick,
}

/// An action that must be taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RepairAction {
    /// Ask all hosts whether, and how well, they could take the VM.
    Survey,
    /// Protect the VM to this host.
    Attempt(HostName),
    /// Give the backup up, for this reason: another host would take the VM.
    Replace(String),
}

/// Whether the loss of a session is history: another one is under way since, and tells of its own.
pub fn is_history<S: PartialEq>(of: &S, under_way: Option<&S>) -> bool {
    under_way.is_some_and(|under_way| under_way != of) && !planted!(ChargeTheNext)
}

/// The phase in which the repair is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RepairPhase {
    /// The VM is protected, or not wanted to be.
    Idle,
    /// The hosts are being asked.
    Surveying,
    /// Protection to this host is being set up.
    Attempting(HostName),
    /// Protected to this host, which could not take over: the others are being asked.
    Replacing(HostName),
    /// No host takes the VM now; the next round is at this time.
    Waiting(Time),
}

/// Decides about one VM's repair.
#[derive(Clone, Debug)]
pub struct Repair {
    phase: RepairPhase,
    /// The reason why the VM is not protected: first the loss, then what the last round met.
    reason: String,
    /// Hosts still to be tried in this round, best first.
    round: Vec<HostName>,
    /// Hosts whose attempts failed, and when.
    failures: Vec<(HostName, Time)>,
    /// Hosts that were replaced, how often, and when last.
    replaced: Vec<(HostName, u32, Time)>,
    /// The host that was to be given up last; it may have stayed.
    proposed: Option<HostName>,
    wait: Duration,
    protected_at: Option<Time>,
}

impl Default for Repair {
    fn default() -> Repair {
        Repair {
            phase: RepairPhase::Idle,
            reason: String::new(),
            round: Vec::new(),
            failures: Vec::new(),
            replaced: Vec::new(),
            proposed: None,
            wait: FIRST_WAIT,
            protected_at: None,
        }
    }
}

impl Repair {
    /// The phase in which the repair is.
    pub fn phase(&self) -> &RepairPhase {
        &self.phase
    }

    /// The reason why the VM is not protected, for people.
    pub fn reason(&self) -> &str {
        &self.reason
    }

    /// Whether it matters that the VM is protected, whoever saw to that: [`RepairEvent::Protected`] is to be told.
    pub fn awaits_protection(&self) -> bool {
        match self.phase {
            RepairPhase::Idle | RepairPhase::Replacing(_) => false,
            RepairPhase::Attempting(_) => true,
            RepairPhase::Surveying | RepairPhase::Waiting(_) => !planted!(ChargeTheNext),
        }
    }

    /// Time at which [`RepairEvent::Tick`] is due next, if nothing else happens.
    pub fn deadline(&self) -> Option<Time> {
        match self.phase {
            RepairPhase::Waiting(until) => Some(until).filter(|_| !planted!(GiveUpRepair)),
            _ => None,
        }
    }

    /// Takes one event; appends what must be done to `actions`. `jitter`, 0 to
    /// 1 000, lengthens a wait by up to half: hosts that lost their backup at the
    /// same moment must not come back at the same moment.
    pub fn handle(
        &mut self,
        now: Time,
        jitter: u32,
        event: RepairEvent,
        actions: &mut Vec<RepairAction>,
    ) {
        match event {
            RepairEvent::Lost(reason) => self.lost(now, jitter, reason, actions),
            RepairEvent::Sick { host, reason, times } => {
                if times >= self.forbearance(now, &host) {
                    self.sick(host, reason, actions);
                }
            }
            RepairEvent::Surveyed(found) => self.surveyed(now, jitter, found, actions),
            RepairEvent::Protected => self.protected(now),
            RepairEvent::Ended => *self = Repair::default(),
            RepairEvent::Tick => {
                if self.deadline().is_some_and(|until| now >= until) {
                    self.survey(actions);
                }
            }
        }
    }

    fn lost(&mut self, now: Time, jitter: u32, reason: String, actions: &mut Vec<RepairAction>) {
        match self.phase.clone() {
            RepairPhase::Idle | RepairPhase::Replacing(_) => {
                if let Some(host) = self.proposed.take() {
                    self.was_replaced(now, host);
                }
                let stood = self.protected_at.take().map(|since| now - since);
                self.reason = reason;
                if stood.is_some_and(|stood| stood < STABLE) {
                    return self.wait(now, jitter);
                }
                self.wait = FIRST_WAIT;
                self.survey(actions);
            }
            RepairPhase::Attempting(host) => {
                self.reason = format!("{host}: {reason}");
                self.failed(now, host);
                if planted!(StayWithAttempt) {
                    return;
                }
                self.next_of_round(now, jitter, actions);
            }
            // Said twice.
            RepairPhase::Surveying | RepairPhase::Waiting(_) => {}
        }
    }

    fn sick(&mut self, host: HostName, reason: String, actions: &mut Vec<RepairAction>) {
        if self.phase == RepairPhase::Idle {
            self.proposed = None;
            self.phase = RepairPhase::Replacing(host);
            self.reason = reason;
            actions.push(RepairAction::Survey);
        }
    }

    /// How many times as long this host is borne with.
    fn forbearance(&mut self, now: Time, host: &HostName) -> u32 {
        self.replaced.retain(|(.., at)| now - *at < FORBEARANCE);
        let of_host = self.replaced.iter().find(|(other, ..)| other == host);
        of_host.map_or(1, |(_, often, _)| 1 << (*often).min(MOST_DOUBLED))
    }

    fn was_replaced(&mut self, now: Time, host: HostName) {
        match self.replaced.iter_mut().find(|(other, ..)| *other == host) {
            Some((_, often, at)) => (*often, *at) = (*often + 1, now),
            None => self.replaced.push((host, 1, now)),
        }
    }

    /// A backup that could not take over is better than none, and than a copy to one that is no better.
    fn replace(
        &mut self,
        now: Time,
        host: HostName,
        found: &[Candidate],
        actions: &mut Vec<RepairAction>,
    ) {
        self.phase = RepairPhase::Idle;
        let would_take = |other: &&Candidate| other.answer.is_ok() && other.host != host;
        if let Some(other) = found.iter().find(would_take) {
            let words = format!("host {host} could not take over: {}", self.reason);
            let other = &other.host;
            actions.push(RepairAction::Replace(format!("{words}; host {other} would take it")));
            self.proposed = Some(host.clone());
            self.failed(now, host);
        }
    }

    /// It comes after all the others for a while.
    fn failed(&mut self, now: Time, host: HostName) {
        self.failures.retain(|(other, _)| *other != host);
        self.failures.push((host, now));
    }

    fn survey(&mut self, actions: &mut Vec<RepairAction>) {
        self.phase = RepairPhase::Surveying;
        actions.push(RepairAction::Survey);
    }

    fn surveyed(
        &mut self,
        now: Time,
        jitter: u32,
        found: Vec<Candidate>,
        actions: &mut Vec<RepairAction>,
    ) {
        if let RepairPhase::Replacing(host) = self.phase.clone() {
            return self.replace(now, host, &found, actions);
        }
        if self.phase != RepairPhase::Surveying {
            return;
        }
        self.failures.retain(|(_, at)| now - *at < GRUDGE);
        let mut fit = Vec::new();
        let mut unfit = Vec::new();
        for candidate in found {
            match candidate.answer {
                Ok(fitness) => fit.push((candidate.host, fitness)),
                Err(why) => unfit.push(format!("{}: {why}", candidate.host)),
            }
        }
        if fit.is_empty() {
            self.reason = match unfit.is_empty() {
                true => "there is no other host".to_owned(),
                false => unfit.join("; "),
            };
        }
        fit.sort_by_key(|(host, fitness)| self.rank(host, fitness));
        self.round = fit.into_iter().map(|(host, _)| host).collect();
        self.next_of_round(now, jitter, actions);
    }

    /// The rank of a host: lower is better. Load counts in coarse steps, so that memory decides
    /// between hosts that are about as busy.
    fn rank(&self, host: &HostName, fitness: &Fitness) -> impl Ord + use<> {
        let failed = self.failures.iter().position(|(other, _)| other == host);
        let free = std::cmp::Reverse(fitness.free_memory);
        (failed.map(|at| at + 1), fitness.same_zone, fitness.load_percent / 50, free)
    }

    fn next_of_round(&mut self, now: Time, jitter: u32, actions: &mut Vec<RepairAction>) {
        if self.round.is_empty() {
            return self.wait(now, jitter);
        }
        let host = self.round.remove(0);
        self.phase = RepairPhase::Attempting(host.clone());
        actions.push(RepairAction::Attempt(host));
    }

    fn wait(&mut self, now: Time, jitter: u32) {
        let wait = self.wait + self.wait * jitter.min(1_000) / 2_000;
        self.phase = RepairPhase::Waiting(now + wait);
        self.wait = (self.wait * 2).min(LONGEST_WAIT);
    }

    fn protected(&mut self, now: Time) {
        self.phase = RepairPhase::Idle;
        self.round.clear();
        self.protected_at = Some(now);
    }
}

#[cfg(test)]
#[path = "repair_tests.rs"]
mod tests;
