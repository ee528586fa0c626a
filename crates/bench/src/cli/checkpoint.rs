//! The grammar of `understudy-lab bench checkpoint`.

use crate::bench::workloads::Workload;
use clap::Args;
use std::path::PathBuf;

pub(super) const HELP: &str = "\
For each checkpoint, on average: how long each thread of both daemons and of the
primary's QEMU ran and how long it waited for a processor (the kernel's schedstat),
how often it slept, its page faults, with --calls its system calls (counted by
`perf`, which costs some time itself), and bytes to the backup; the pause and the
commit. Parts and conditions as for `bench pause`; with --workload the guest is the
one of `make bench-guest`, under the default policy.

With --keepers each round is on hosts of its own; the last lines are those with
keepers to those without, by the medians of the rounds.

Examples:
  understudy-lab bench checkpoint
  understudy-lab bench checkpoint --workload pgbench4 --rounds 3
  understudy-lab bench checkpoint --keepers --pinned --rounds 5";

/// `bench checkpoint`
#[derive(Debug, Args)]
pub struct BenchCheckpointArgs {
    /// Pages that the guest writes between two checkpoints.
    #[arg(long, value_name = "N", default_value_t = 450, value_parser = clap::value_parser!(u64).range(1..=20_000))]
    pub pages: u64,
    /// Checkpoints a second.
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=200))]
    pub hz: u32,
    /// Seconds of each round.
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=20))]
    pub seconds: u64,
    /// Instead of a known number of pages, this workload of the suite.
    #[arg(long, value_enum, value_name = "NAME", conflicts_with_all = ["pages", "hz", "seconds"])]
    pub workload: Option<Workload>,
    /// Rounds.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rounds: u32,
    /// Count system calls, too.
    #[arg(long)]
    pub calls: bool,
    /// Each round twice: on hosts without keepers, and on hosts with them.
    #[arg(long)]
    pub keepers: bool,
    /// Give the primary host a processor to itself, and backup and clients another one.
    #[arg(long)]
    pub pinned: bool,
    /// The test guests' files [default: target/guest of the build].
    #[arg(long, value_name = "DIR", env = "UNDERSTUDY_GUEST")]
    pub guest: Option<PathBuf>,
}
