//! The coordinator of a restore: drives `Restorer`.

use super::exchange::Exchange;
use super::report::{Backoff, RestoreReport, RestoredMember};
use super::words::{Heard, Reply, RestoreTask, Said};
use crate::clock;
use crate::error::{ErrorKind, HostError};
use crate::host::Host;
use crossbeam_channel::Receiver;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use understudy_protocol::{Generation, Time};
use understudy_snapshot::{
    Failure, Line, Member, Mode, Report, RestoreAction, RestoreEvent, RestorePhase, Restorer,
};

/// What is to be restored, and how.
pub struct Job {
    /// When the command was given: checks come first, and count.
    pub began: Time,
    /// Of the first member; the others' differ by member and generation.
    pub task: RestoreTask,
    /// The newest generation of each member.
    pub newest: Vec<Generation>,
    /// The order of starts.
    pub line: Line,
    /// Pages that each start waits for.
    pub pages: Vec<u64>,
    /// Pairs of members that had frames in flight between them.
    pub talking: BTreeSet<(Member, Member)>,
    /// How it is restored; for the report.
    pub mode: Mode,
    /// Whether to wait until all is loaded.
    pub wait: bool,
}

/// When a member got where, since the command.
#[derive(Clone, Copy, Default)]
struct Milestones {
    loaded: Option<Duration>,
    started: Option<Duration>,
    restored: Option<Duration>,
}

/// Restores. Returns when all members run.
pub fn run(host: &Arc<Host>, job: Job) -> Result<RestoreReport, HostError> {
    let (sender, heard) = crossbeam_channel::unbounded();
    let reply: Reply = Arc::new(move |heard| {
        if let Heard::Restore(member, report) = heard {
            // Nobody listens after the end.
            let _ = sender.send((clock::now(), member, report));
        }
    });
    let exchange = Exchange::new(host, &job.task.group.hosts, reply);
    let mut restore =
        Restore { milestones: vec![Milestones::default(); job.pages.len()], job, exchange, heard };
    restore.drive()
}

struct Restore {
    milestones: Vec<Milestones>,
    job: Job,
    exchange: Exchange,
    heard: Receiver<(Time, Member, Report)>,
}

impl Restore {
    fn drive(&mut self) -> Result<RestoreReport, HostError> {
        let mut actions = Vec::new();
        let (line, pages) = (self.job.line.clone(), self.job.pages.clone());
        let mut restorer = Restorer::new(line, pages, clock::now(), &mut actions);
        loop {
            for RestoreAction::Send(member, order) in actions.drain(..) {
                let task = RestoreTask {
                    member,
                    newest: self.job.newest[member.index()],
                    ..self.job.task.clone()
                };
                let host = &self.job.task.group.hosts[member.index()];
                self.exchange.say(host, Said::Restore(task, order));
            }
            if matches!(restorer.phase(), RestorePhase::Running) && !self.job.wait {
                break;
            }
            let Some(deadline) = restorer.deadline() else { break };
            let event = match self.heard.recv_timeout(deadline - clock::now()) {
                Ok((at, member, report)) => {
                    self.note(at, member, &report);
                    RestoreEvent::Report(member, report)
                }
                Err(_) => RestoreEvent::Tick,
            };
            restorer.handle(clock::now(), event, &mut actions);
        }
        match restorer.phase() {
            RestorePhase::Failed(failure) => Err(self.explain(failure)),
            RestorePhase::Restored(failures) => Ok(self.report(failures)),
            _ => Ok(self.report(&[])),
        }
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
            life: task.life,
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
            "snapshot {number} of {group} was not restored, and no member runs; the snapshot is \
             as it was: {}",
            self.name(failure)
        );
        HostError::new(ErrorKind::Internal, message)
    }
}

/// Of the starts of each pair that was talking; of all pairs if none was.
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
