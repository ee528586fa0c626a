//! Plan of what is measured, in which variants, and when.

use crate::bench::suite::plan::rotated;
use crate::bench::workloads::Workload;
use clap::ValueEnum;
use serde::Serialize;
use std::fmt;

/// Subject that is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Subject {
    /// Prime numbers (sysbench).
    Cpu,
    /// A C project is built.
    Compile,
    /// A bank's transactions (SQLite).
    Database,
    /// Apache, asked by 100 connections at once (ab).
    Web,
    /// One TCP connection out of the guest.
    Transmit,
    /// One TCP connection into the guest.
    Receive,
    /// Request and response, one after the other.
    Latency,
    /// A file is read from the disk, which the backup reads too, or gets with the log.
    #[value(name = "disk_reads")]
    #[serde(rename = "disk_reads")]
    DiskReads,
    /// Nothing: what an idle guest's log is.
    Idle,
}

impl Subject {
    /// Workload of the suite that runs in the guest, or against it.
    pub fn workload(self) -> Option<Workload> {
        Some(match self {
            Subject::Cpu => Workload::Cpu,
            Subject::Compile => Workload::Compile,
            Subject::Database => Workload::Database,
            Subject::Web => Workload::Web,
            Subject::Transmit => Workload::Download,
            Subject::Receive => Workload::Upload,
            Subject::Latency => Workload::Latency,
            Subject::DiskReads | Subject::Idle => return None,
        })
    }

    /// Ways in which the guest is kept while it is measured.
    fn variants(self) -> &'static [Variant] {
        match self {
            Subject::Idle => &[Variant::Lockstep],
            Subject::Latency => &[
                Variant::Tcg,
                Variant::Icount,
                Variant::Record,
                Variant::Lockstep,
                Variant::Checkpoint,
            ],
            Subject::DiskReads => {
                &[Variant::Icount, Variant::Record, Variant::Lockstep, Variant::LockstepLog]
            }
            _ => {
                &[Variant::Tcg, Variant::Icount, Variant::Pair, Variant::Record, Variant::Lockstep]
            }
        }
    }
}

/// Way in which the guest is kept while it works.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Variant {
    /// On plain QEMU.
    Tcg,
    /// On plain QEMU that counts instructions, as lockstep's does: what lockstep is compared with.
    Icount,
    /// The same twice at once, each with its own clients, neither protected: what the machine
    /// has for two such guests. The slower one counts.
    Pair,
    /// In a QEMU that records, behind our data plane, without a backup.
    Record,
    /// Protected in lockstep.
    Lockstep,
    /// Protected by checkpoints, with the policy that one gets.
    Checkpoint,
    /// Protected in lockstep, with what the guest reads from its disks in the log.
    #[value(name = "lockstep-log")]
    #[serde(rename = "lockstep-log")]
    LockstepLog,
}

/// One measurement to make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    /// Number of the round, from 1.
    pub round: u32,
    /// Subject that is measured.
    pub subject: Subject,
    /// Way in which the guest is kept.
    pub variant: Variant,
}

/// Steps, round by round: each subject in each of its variants, one after the other. Nothing asked
/// for is everything.
pub fn plan(subjects: &[Subject], variants: &[Variant], runs: u32) -> Vec<Step> {
    let wanted = |variant: &Variant| variants.is_empty() || variants.contains(variant);
    let measured: Vec<(Subject, Vec<Variant>)> = Subject::value_variants()
        .iter()
        .filter(|subject| subjects.is_empty() || subjects.contains(subject))
        .map(|&subject| (subject, subject.variants().iter().copied().filter(wanted).collect()))
        .collect();
    let mut steps = Vec::new();
    for round in 1..=runs {
        for (n, (subject, variants)) in measured.iter().enumerate() {
            let step = |variant| Step { round, subject: *subject, variant };
            steps.extend(rotated(variants, n + round as usize - 1).map(step));
        }
    }
    steps
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&name(self))
    }
}

impl fmt::Display for Variant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&name(self))
    }
}

impl fmt::Display for Step {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "round {}, {}, {}", self.round, self.subject, self.variant)
    }
}

/// Name as on the command line; the JSON has the same names.
fn name(value: &impl ValueEnum) -> String {
    value.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_subject_meets_its_variants_in_every_round_each_time_in_another_order() {
        let steps = plan(&[], &[], 2);
        let of = |round, subject| {
            let chosen = steps.iter().filter(move |s| (s.round, s.subject) == (round, subject));
            chosen.map(|step| step.variant).collect::<Vec<_>>()
        };
        for &subject in Subject::value_variants() {
            let (mut first, mut second) = (of(1, subject), of(2, subject));
            assert!(first != second || first.len() == 1, "{subject}");
            first.sort();
            second.sort();
            assert_eq!(first, subject.variants());
            assert_eq!(second, subject.variants());
        }
        assert_eq!(of(1, Subject::Idle), [Variant::Lockstep]);
    }

    #[test]
    fn what_was_asked_for_is_measured() {
        let step = Step { round: 1, subject: Subject::Web, variant: Variant::Icount };
        assert_eq!(plan(&[Subject::Web, Subject::Idle], &[Variant::Icount], 1), [step]);
    }
}
