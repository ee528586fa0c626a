//! The grammar of `understudy-lab bench endurance`.

use crate::bench::workloads::Workload;
use clap::Args;
use std::path::PathBuf;

pub(super) const HELP: &str = "\
One protected guest: each workload runs; then everything on the host that has the
guest is killed, again and again, the dead host becoming the backup for the next
time; and each workload runs once more, on the host where it was at first. Parts and
conditions as for `bench pause`; the guest is the one of `make bench-guest`.

Examples:
  understudy-lab bench endurance web pgbench4 --pinned";

/// `bench endurance`
#[derive(Debug, Args)]
pub struct BenchEnduranceArgs {
    /// Which workloads [default: web].
    #[arg(value_enum, value_name = "NAME")]
    pub names: Vec<Workload>,
    /// Fail-overs between two measurements: an even number.
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = even)]
    pub failovers: u32,
    /// How often there are so many.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rounds: u32,
    /// How often each workload is run, each time, beside a first run that does not count.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub runs: u32,
    /// Give the first host a processor to itself, and the second one and clients another one, as
    /// machines of their own would have.
    #[arg(long)]
    pub pinned: bool,
    /// The test guests' files, with a folder `bench` [default: target/guest of the build].
    #[arg(long, value_name = "DIR", env = "UNDERSTUDY_GUEST")]
    pub guest: Option<PathBuf>,
}

fn even(text: &str) -> Result<u32, String> {
    match text.parse() {
        Ok(number) if number % 2 == 0 && (2..=1000).contains(&number) => Ok(number),
        _ => Err("give an even number from 2 to 1000".to_owned()),
    }
}
