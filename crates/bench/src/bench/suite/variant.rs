//! Subjects that are measured, and variants of the guest meanwhile.

use crate::bench::workloads::Workload;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use std::fmt;
use understudy_protocol::{Output, Policy};
use understudy_report::ProtectRequest;

/// Everything that the suite measures: workloads of the papers in a guest, and three
/// figures that have a laboratory of their own.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, ValueEnum, Serialize, Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum Subject {
    /// Prime numbers (sysbench).
    Cpu,
    /// Blocks of 1 KiB written to memory (sysbench).
    Memory,
    /// Random reads and writes of files (sysbench).
    Fileio,
    /// A C project is built.
    Compile,
    /// A mail server's small files (postmark).
    Postmark,
    /// One TCP connection into the guest.
    Upload,
    /// One TCP connection out of the guest.
    Download,
    /// Apache, asked by 100 connections at once (ab).
    Web,
    /// A file server's requests over TCP (tbench).
    Tbench,
    /// Request and response, one after the other.
    Latency,
    /// PostgreSQL, asked by one client over the network (pgbench).
    Pgbench1,
    /// The same, by 4 clients.
    Pgbench4,
    /// The same, by 32 clients.
    Pgbench32,
    /// Redis with an fsync of each change, asked by 8 clients (redis-benchmark).
    Redis,
    /// The checkpoint's pause against the pages written (Remus, figure 5).
    Pause,
    /// What each way to encode pages gains (Remus, figure 10).
    Compression,
    /// For how long a client waits when the guest's host dies.
    Failover,
}

impl Subject {
    /// Subjects, all of them, in the order of the report.
    pub fn all() -> &'static [Subject] {
        Subject::value_variants()
    }

    /// Workload that runs in the guest, or against it; none for a figure with a laboratory of its
    /// own.
    pub fn workload(self) -> Option<Workload> {
        Some(match self {
            Subject::Cpu => Workload::Cpu,
            Subject::Memory => Workload::Memory,
            Subject::Fileio => Workload::Fileio,
            Subject::Compile => Workload::Compile,
            Subject::Postmark => Workload::Postmark,
            Subject::Upload => Workload::Upload,
            Subject::Download => Workload::Download,
            Subject::Web => Workload::Web,
            Subject::Tbench => Workload::Tbench,
            Subject::Latency => Workload::Latency,
            Subject::Pgbench1 => Workload::Pgbench1,
            Subject::Pgbench4 => Workload::Pgbench4,
            Subject::Pgbench32 => Workload::Pgbench32,
            Subject::Redis => Workload::Redis,
            Subject::Pause | Subject::Compression | Subject::Failover => return None,
        })
    }

    /// The variant under which a figure with a laboratory of its own is reported; none for
    /// a workload, which is measured in each variant.
    pub fn own_variant(self) -> Option<Variant> {
        match self {
            Subject::Pause | Subject::Failover => Some(Variant::Adaptive),
            Subject::Compression => Some(Variant::Hz20),
            _ => None,
        }
    }
}

/// Way in which the guest is kept while it works.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, ValueEnum, Serialize, Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum Variant {
    /// Behind our data plane, without a backup: what the others are compared with.
    Unprotected,
    /// Protected, with the policy that one gets.
    Adaptive,
    /// Protected, 10 checkpoints a second.
    #[value(name = "10")]
    #[serde(rename = "10")]
    Hz10,
    /// Protected, 20 checkpoints a second.
    #[value(name = "20")]
    #[serde(rename = "20")]
    Hz20,
    /// Protected, 30 checkpoints a second.
    #[value(name = "30")]
    #[serde(rename = "30")]
    Hz30,
    /// Protected, 40 checkpoints a second.
    #[value(name = "40")]
    #[serde(rename = "40")]
    Hz40,
    /// Adaptive, but output leaves at once: a measure of what holding it costs, and no
    /// protection that anybody should rely on.
    #[value(name = "nobuffer")]
    NoBuffer,
    /// The same guest in a QEMU of its own: tap and raw file, nothing of ours.
    Plain,
    /// The same guest under QEMU's own fault tolerance, where that runs.
    Colo,
}

impl Variant {
    /// Variants, all of them, in the order of the report.
    pub fn all() -> &'static [Variant] {
        Variant::value_variants()
    }

    /// Variants of `--quick`.
    pub const QUICK: [Variant; 4] =
        [Variant::Unprotected, Variant::Adaptive, Variant::Hz40, Variant::Plain];

    /// Request to the daemon; none where it does not protect the guest.
    pub fn protection(self) -> Option<ProtectRequest> {
        let interval = |hz| Some(Policy::Interval { hz });
        let policy = match self {
            Variant::Unprotected | Variant::Plain | Variant::Colo => return None,
            Variant::Adaptive | Variant::NoBuffer => Some(Policy::default()),
            Variant::Hz10 => interval(10),
            Variant::Hz20 => interval(20),
            Variant::Hz30 => interval(30),
            Variant::Hz40 => interval(40),
        };
        let output = if self == Variant::NoBuffer { Output::Unheld } else { Output::Held };
        Some(ProtectRequest {
            to: "b".to_owned(),
            policy,
            output,
            // A backup that is lost is to be seen, not replaced.
            repair: false,
            ..Default::default()
        })
    }
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

/// Name as on the command line; the JSON has the same names.
fn name(value: &impl ValueEnum) -> String {
    value.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn same_names<T: ValueEnum + Serialize>() {
        for value in T::value_variants() {
            assert_eq!(serde_json::to_value(value).unwrap(), name(value));
        }
    }

    #[test]
    fn the_command_line_and_the_json_have_the_same_names() {
        same_names::<Subject>();
        same_names::<Variant>();
        let names: Vec<String> = Variant::all().iter().map(Variant::to_string).collect();
        let documented =
            ["unprotected", "adaptive", "10", "20", "30", "40", "nobuffer", "plain", "colo"];
        assert_eq!(names, documented);
    }

    #[test]
    fn only_the_daemons_own_variants_ask_it_for_protection() {
        let asks = |variant: &&Variant| variant.protection().is_some();
        assert_eq!(Variant::all().iter().filter(asks).count(), 6);
        let hz40 = Variant::Hz40.protection().unwrap();
        assert_eq!(hz40.policy, Some(Policy::Interval { hz: 40 }));
        // Only the variant that says so gives output commit up.
        let held =
            |variant: &&Variant| variant.protection().is_none_or(|asks| asks.output.is_held());
        let without = Variant::all().iter().filter(|variant| !held(variant));
        assert_eq!(without.collect::<Vec<_>>(), [&Variant::NoBuffer]);
    }

    #[test]
    fn every_subject_is_a_workload_or_has_a_laboratory_of_its_own() {
        for subject in Subject::all() {
            assert_eq!(subject.workload().is_none(), subject.own_variant().is_some());
            let same_name = |workload: Workload| workload.name() == subject.to_string();
            assert!(subject.workload().is_none_or(same_name), "{subject}");
        }
    }
}
