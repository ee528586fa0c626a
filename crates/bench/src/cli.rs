//! The grammar of the command line; that of the benchmarks is in [`bench`], that of the rest in
//! [`trial`].

mod bench;
mod checkpoint;
mod endurance;
mod trial;

#[cfg(test)]
use bench::SUITE_HELP;
pub use bench::*;
pub use checkpoint::BenchCheckpointArgs;
pub use endurance::BenchEnduranceArgs;
pub use trial::*;
use trial::{CHAOS_HELP, DEMO_HELP, SIMULATE_HELP};

use clap::{Parser, Subcommand};
use understudy_client::manual::ManualCommand;
use understudy_client::output::OutputOptions;

const AFTER_HELP: &str = "\
Examples:
  understudy-lab demo                          kill a VM's host under your eyes
  understudy-lab chaos --runs 20 --seed 1      fail hosts at random, check every promise
  understudy-lab simulate --seeds 10000        the same to the protocol alone; needs nothing
  understudy-lab bench --quick                 what protection costs on this machine

The hosts run the program `understudy`: the one beside this one, else the first on the
PATH. All but `simulate` need root and test guests, which are not part of the package:
`make guests` and `make bench-guest` build them in the source tree; --guest DIR or
UNDERSTUDY_GUEST=DIR says where they are.

Exit codes:
  0  done
  1  it failed, or a promise was broken; the reason is on stderr
  2  the command line is wrong
  4  no such file: the product, or a test guest

With --json, results go to stdout as JSON, and errors as
{\"error\": {\"kind\": …, \"message\": …}}.";

/// Tries Understudy out on this machine: kills and cuts hosts under a guest, measures what protection costs.
#[derive(Debug, Parser)]
#[command(name = env!("CARGO_BIN_NAME"), version, after_help = AFTER_HELP)]
pub struct Cli {
    /// How it answers.
    #[command(flatten)]
    pub output: OutputOptions,

    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Kill a guest's host, here on one machine, and see its connection live on.
    #[command(after_help = DEMO_HELP)]
    Demo(DemoArgs),
    /// Fail hosts at random, here on one machine, and check every promise each time.
    #[command(after_help = CHAOS_HELP)]
    Chaos(ChaosArgs),
    /// Try the protocol on schedules of simulated failures.
    #[command(after_help = SIMULATE_HELP)]
    Simulate(SimulateArgs),
    /// Measure what protection costs on this machine, on real parts.
    Bench(Box<BenchArgs>),
    /// What packages are made with.
    #[command(flatten)]
    Manual(ManualCommand),
}

#[cfg(test)]
mod tests;
