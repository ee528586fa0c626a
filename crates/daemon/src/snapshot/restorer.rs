//! The coordinator of a restore: drives `Restorer`.

use super::exchange::Exchange;
use crate::containment::spawn_for_request;
use crate::host::Host;
use crossbeam_channel::{Receiver, Sender};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::thread;
use std::time::Duration;
use tracing::warn;
use understudy_cluster::messages::{Reply, RestoreTask, ToCoordinator, ToMember};
use understudy_protocol::{Generation, Time};
use understudy_replication::clock;
use understudy_replication::moments::pass;
use understudy_report::cluster::{Backoff, RestoreReport, RestoredMember};
use understudy_report::error::{ErrorKind, HostError};
use understudy_snapshot::{
    Decision, Failure, Line, Member, Mode, Order, Report, RestoreAction, RestoreEvent,
    RestorePhase, Restorer,
};

/// Pause before an arbiter that did not answer is asked again.
const AGAIN: Duration = Duration::from_secs(1);

/// Job: what is to be restored, and how.
pub struct Job {
    /// Time at which the command was given: checks come first, and count.
    pub began: Time,
    /// Task of the first member; the others' differ by member and generation.
    pub task: RestoreTask,
    /// The newest generation of each member.
    pub newest: Vec<Generation>,
    /// The order of starts.
    pub line: Line,
    /// Pages that each start waits for.
    pub pages: Vec<u64>,
    /// Pairs of members that had frames in flight between them.
    pub talking: BTreeSet<(Member, Member)>,
    /// Mode in which it is restored; for the report.
    pub mode: Mode,
    /// Whether to wait until all is loaded.
    pub wait: bool,
}

/// Times at which a member got where, since the command.
#[derive(Clone, Copy, Default)]
struct Milestones {
    loaded: Option<Duration>,
    started: Option<Duration>,
    restored: Option<Duration>,
}

/// Word that the coordinator is told.
enum Word {
    Report(Time, Member, Report),
    Whole(Result<(), HostError>),
    Decided(Decision),
}

/// Restores. Returns when all members run, and stay. What `check` says of the snapshot, whether
/// all of it is there, is waited for while members load; none of them starts before.
pub fn run(
    host: &Arc<Host>,
    job: Job,
    check: impl FnOnce() -> Result<(), HostError> + Send + 'static,
) -> Result<RestoreReport, HostError> {
    let (sender, words) = crossbeam_channel::unbounded();
    let reports = sender.clone();
    let reply: Reply = Arc::new(move |heard| {
        if let ToCoordinator::Restore(member, report) = heard {
            // Nobody listens after the end.
            let _ = reports.send(Word::Report(clock::now(), member, report));
        }
    });
    let exchange = Exchange::new(host, &job.task.group.hosts, reply);
    let checked = sender.clone();
    spawn_for_request("check", move || drop(checked.send(Word::Whole(check()))));
    let milestones = vec![Milestones::default(); job.pages.len()];
    let host = host.clone();
    Restore { host, milestones, job, exchange, sender, words, refusal: None }.drive()
}

struct Restore {
    host: Arc<Host>,
    milestones: Vec<Milestones>,
    job: Job,
    exchange: Exchange,
    sender: Sender<Word>,
    words: Receiver<Word>,
    /// Reason why the snapshot cannot be restored.
    refusal: Option<HostError>,
}

impl Restore {
    fn drive(&mut self) -> Result<RestoreReport, HostError> {
        let mut actions = Vec::new();
        let (line, pages) = (self.job.line.clone(), self.job.pages.clone());
        let mut restorer = Restorer::new(line, pages, clock::now(), &mut actions);
        loop {
            for action in actions.drain(..) {
                match action {
                    RestoreAction::Send(member, order) => self.say(member, order),
                    RestoreAction::Decide => self.decide(),
                }
            }
            if matches!(restorer.phase(), RestorePhase::Running) && !self.job.wait {
                break;
            }
            let Some(deadline) = restorer.deadline() else { break };
            let event = match self.words.recv_timeout(deadline - clock::now()) {
                Ok(word) => self.event(word),
                Err(_) => RestoreEvent::Tick,
            };
            restorer.handle(clock::now(), event, &mut actions);
        }
        match (self.refusal.take(), restorer.phase()) {
            (Some(refusal), _) => Err(refusal),
            (None, RestorePhase::Failed(failure)) => Err(self.explain(failure)),
            (None, RestorePhase::Restored(failures)) => Ok(self.report(failures)),
            _ => Ok(self.report(&[])),
        }
    }

    fn event(&mut self, word: Word) -> RestoreEvent {
        match word {
            Word::Report(at, member, report) => {
                self.note(at, member, &report);
                RestoreEvent::Report(member, report)
            }
            Word::Whole(Ok(())) => RestoreEvent::Whole,
            Word::Whole(Err(refusal)) => {
                let why = refusal.to_string();
                self.refusal = Some(refusal);
                RestoreEvent::Refused(why)
            }
            Word::Decided(decision) => RestoreEvent::Decided(decision),
        }
    }

    fn say(&self, member: Member, order: Order) {
        let newest = self.job.newest[member.index()];
        let task = RestoreTask { member, newest, ..self.job.task.clone() };
        let host = &self.job.task.group.hosts[member.index()];
        self.exchange.send_to(host, ToMember::Restore(task, order));
    }

    /// Asks the arbiter until it answers: members run, and may not be taken back unasked.
    fn decide(&self) {
        let (host, sender) = (self.host.clone(), self.sender.clone());
        let (group, incarnation) = (self.job.task.group.name.clone(), self.job.task.incarnation);
        spawn_for_request("decide", move || {
            loop {
                match host.settle_restore(&group, incarnation) {
                    Ok(decision) => {
                        pass("restore-settled");
                        return drop(sender.send(Word::Decided(decision)));
                    }
                    Err(error) => warn!("members of {group} run, but may not stay yet: {error}"),
                }
                thread::sleep(AGAIN);
            }
        });
    }

    fn note(&mut self, at: Time, member: Member, report: &Report) {
        let since = at - self.job.began;
        let own = &mut self.milestones[member.index()];
        match report {
            Report::LoadFin => drop(own.loaded.get_or_insert(since)),
            Report::StartFin => drop(own.started.get_or_insert(since)),
            Report::RestoreFin => {
                own.started.get_or_insert(since);
                own.restored.get_or_insert(since);
            }
            _ => {}
        }
    }

    fn report(&self, failures: &[Failure]) -> RestoreReport {
        let task = &self.job.task;
        let milliseconds = |at: Option<Duration>| at.unwrap_or_default().as_secs_f64() * 1e3;
        let member = |(at, milestones): (usize, &Milestones)| RestoredMember {
            vm: task.group.vms[at].clone(),
            host: task.group.hosts[at].clone(),
            pages_before_start: self.job.pages[at],
            loaded_ms: milliseconds(milestones.loaded),
            started_ms: milliseconds(milestones.started),
            restored_ms: milestones.restored.map(|at| milliseconds(Some(at))),
        };
        let members: Vec<RestoredMember> = self.milestones.iter().enumerate().map(member).collect();
        let starts: Vec<f64> = members.iter().map(|member| member.started_ms).collect();
        RestoreReport {
            group: task.group.name.clone(),
            number: task.number,
            incarnation: task.incarnation,
            mode: self.job.mode,
            backoff_ms: Backoff::of(differences(&starts, &self.job.talking)),
            members,
            warnings: failures.iter().map(|failure| self.name(failure)).collect(),
        }
    }

    fn name(&self, failure: &Failure) -> String {
        let group = &self.job.task.group;
        match failure.member {
            Some(member) => {
                let (vm, host) = (&group.vms[member.index()], &group.hosts[member.index()]);
                format!("{vm} on host {host}: {failure}")
            }
            None => failure.to_string(),
        }
    }

    fn explain(&self, failure: &Failure) -> HostError {
        let (group, number) = (&self.job.task.group.name, self.job.task.number);
        let message = format!(
            "snapshot {number} of {group} was not restored, and no member runs; the snapshot is as it \
             was, and so are the images that the VMs had before: {}",
            self.name(failure)
        );
        HostError::new(ErrorKind::Internal, message)
    }
}

/// Differences of the starts of each pair that was talking; of all pairs if none was.
fn differences(starts: &[f64], talking: &BTreeSet<(Member, Member)>) -> Vec<f64> {
    let of = |(one, other): (usize, usize)| (starts[one] - starts[other]).abs();
    if talking.is_empty() {
        let all = (0..starts.len()).flat_map(|one| (0..one).map(move |other| (one, other)));
        return all.map(of).collect();
    }
    talking.iter().map(|(one, other)| of((one.index(), other.index()))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn back_off_is_between_the_starts_of_those_who_talk() {
        let backoff = |starts: &[f64], talking: &[(u16, u16)]| {
            let pairs = talking.iter().map(|&(one, other)| (Member(one), Member(other)));
            Backoff::of(differences(starts, &pairs.collect()))
        };
        let starts = [10.0, 30.0, 20.0];
        let all = backoff(&starts, &[]);
        assert_eq!((all.max, all.median), (20.0, 10.0));
        assert!((all.mean - 40.0 / 3.0).abs() < 1e-9);
        assert_eq!(backoff(&starts, &[(0, 2)]).max, 10.0);
        assert_eq!(backoff(&[10.0], &[]), Backoff::default());
    }
}
