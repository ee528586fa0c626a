//! The grammar of the commands that try the product out: `demo`, `chaos`, `simulate`.

use clap::{Args, ValueEnum};
use serde::Serialize;
use std::path::PathBuf;
use understudy_client::ModeKind;

pub(super) const DEMO_HELP: &str = "\
Two hosts and a client are network namespaces of this machine; the rest is real.
Needs root, and the test guest that `make guests` builds. Everything is removed
at the end. Exits with 0 only if no acknowledged record was lost and the
client's one connection survived.";

/// `demo`
#[derive(Debug, Args)]
pub struct DemoArgs {
    /// Replication mode.
    #[arg(long, value_name = "HOW", default_value = "checkpoint")]
    pub mode: ModeKind,
    /// Cut the host off instead of killing it.
    #[arg(long, value_name = "WHAT")]
    pub cut: Option<Cut>,
    /// Seconds of work under protection before the failure.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub seconds: u64,
    /// The test guest's files [default: target/guest of the build].
    #[arg(long, value_name = "DIR", env = "UNDERSTUDY_GUEST")]
    pub guest: Option<PathBuf>,
}

/// What can be cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Cut {
    /// The host's network, silently: its link stays up.
    Network,
}

pub(super) const CHAOS_HELP: &str = "\
Each run: a guest under load on disk, memory and network, protected; one failure
drawn from the run's seed (a process or a host is killed, stalls and comes back,
is cut off, loses its cable, at any moment); then every promise is checked: the
clients' connections live on, no acknowledged record is lost, the file system is
sound, and never do both copies answer.

Two hosts and a client are network namespaces of this machine; the rest is real.
Needs root, and the test guest that `make guests` builds. Logs of a run that went
wrong are kept. Exits with 0 only if every promise was kept.

Examples:
  understudy-lab chaos --runs 200
  understudy-lab chaos --runs 1 --seed 117     that run of seed 117, again";

/// `chaos`
#[derive(Debug, Args)]
pub struct ChaosArgs {
    /// Number of failures.
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub runs: u64,
    /// The first run's seed; the others count on from it.
    #[arg(long, value_name = "S", default_value_t = 1)]
    pub seed: u64,
    /// The test guest's files [default: target/guest of the build].
    #[arg(long, value_name = "DIR", env = "UNDERSTUDY_GUEST")]
    pub guest: Option<PathBuf>,
}

pub(super) const SIMULATE_HELP: &str = "\
The state machines that decide about output and ownership, the same code that the
daemon runs, in a world of virtual time: hosts, an arbiter and the connections
between them are simulated, and a seed decides what fails and when. Every
invariant is checked at every step. Then known bugs are planted, one after the
other, and must be found by the same seeds. Needs no privileges.

Exits with 0 only if no invariant was broken and every planted bug was found.

Examples:
  understudy-lab simulate --seeds 100000
  understudy-lab simulate --seed 4711          what happens in that schedule, line by line";

/// `simulate`
#[derive(Debug, Args)]
pub struct SimulateArgs {
    /// Number of schedules.
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
    pub seeds: u64,
    /// The first seed.
    #[arg(long, value_name = "S", default_value_t = 0, value_parser = clap::value_parser!(u64).range(..=u64::MAX / 2))]
    pub from: u64,
    /// Replay this one seed and print every step.
    #[arg(long, value_name = "S", conflicts_with_all = ["seeds", "from"])]
    pub seed: Option<u64>,
}
