//! The grammar of `understudy-lab bench`.

use super::checkpoint::BenchCheckpointArgs;
use super::endurance::BenchEnduranceArgs;
use crate::bench::failover::ClientKind;
use crate::bench::suite::{Subject, Variant};
use crate::bench::workloads::Workload;
use crate::bench::{lockstep, restore};
use clap::{Args, Subcommand, ValueEnum};
use serde::Serialize;
use std::path::PathBuf;
use understudy_client::ModeKind;
use understudy_encoding::{DEFAULT_CACHE_PAGES, MOST_CACHE_PAGES};

/// `bench`
#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, after_help = SUITE_HELP)]
pub struct BenchArgs {
    /// One measurement by itself.
    #[command(subcommand)]
    pub command: Option<BenchCommand>,
    /// Without one: the suite.
    #[command(flatten)]
    pub suite: SuiteArgs,
}

pub(super) const SUITE_HELP: &str = "\
Without a subcommand: the suite. Each workload runs in a guest in every variant, one
after the other, round by round, beside an unprotected guest; then the pause, the
compression and fail-over are measured. Two hosts and a client are network
namespaces of this machine; the rest is real. Needs root, and the guests of
`make guests` and `make bench-guest` (compression: guests/toolchain).

Each result goes at once to DIR/samples.jsonl. A suite that was interrupted goes on
where it was if build, guest, machine and scale are the same; results of another
build are kept beside. DIR/report.json and DIR/report.html hold the report.

Exits with 1 if something could not be measured, but for QEMU's COLO (variant colo),
which does not run on every QEMU: then its row has the error that was met.

Examples:
  understudy-lab bench --quick                       a first look: the same work, one round
  understudy-lab bench --runs 1 --variants unprotected,adaptive,plain
  understudy-lab bench --only cpu,web --runs 5
  understudy-lab bench --variants unprotected,adaptive";

/// `bench`, the suite.
#[derive(Debug, Args)]
pub struct SuiteArgs {
    /// Only these.
    #[arg(long, value_name = "NAME,…", value_delimiter = ',')]
    pub only: Vec<Subject>,
    /// Workloads in these variants only.
    #[arg(long, value_name = "NAME,…", value_delimiter = ',')]
    pub variants: Vec<Variant>,
    /// A first look: the same workloads in few variants, one round, few fail-overs.
    #[arg(long)]
    pub quick: bool,
    /// Rounds [default: 3; 1 with --quick].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    pub runs: Option<u32>,
    /// Begin no further round of a workload that does not end within so many minutes, those
    /// of an interrupted run counted; the first round is always whole.
    #[arg(long, value_name = "N", default_value = "80", value_parser = clap::value_parser!(u64).range(1..=10_000))]
    pub minutes: u64,
    /// Give the primary host a processor to itself, and backup and clients another one, as
    /// machines of their own would have; the workloads only.
    #[arg(long)]
    pub pinned: bool,
    /// Begin anew; earlier results are kept beside.
    #[arg(long)]
    pub fresh: bool,
    /// Where results and reports are kept.
    #[arg(long, value_name = "DIR", default_value = "target/bench")]
    pub output: PathBuf,
    /// The test guests' files [default: target/guest of the build].
    #[arg(long, value_name = "DIR", env = "UNDERSTUDY_GUEST")]
    pub guest: Option<PathBuf>,
}

/// `bench`, one measurement by itself.
#[derive(Debug, Subcommand)]
pub enum BenchCommand {
    /// How long a checkpoint stops the guest, against the pages that it wrote.
    #[command(after_help = BENCH_PAUSE_HELP)]
    Pause(BenchPauseArgs),
    /// What a checkpoint costs the processors of both hosts, thread by thread.
    #[command(after_help = super::checkpoint::HELP)]
    Checkpoint(BenchCheckpointArgs),
    /// Round trips between two guests: one group, one by one, unprotected.
    #[command(after_help = BENCH_GROUP_HELP)]
    Group(BenchGroupArgs),
    /// What lockstep costs, and its log, beside plain QEMU and checkpoints.
    #[command(after_help = BENCH_LOCKSTEP_HELP)]
    Lockstep(BenchLockstepArgs),
    /// Write the tables of README.md and docs/performance.md from a report.
    #[command(after_help = BENCH_README_HELP)]
    Readme(BenchReadmeArgs),
    /// Snapshots of a VM, and how fast each way has it back, beside plain QEMU's own.
    #[command(after_help = BENCH_RESTORE_HELP)]
    Restore(BenchRestoreArgs),
    /// What becomes of a guest that writes faster than the link carries.
    #[command(after_help = BENCH_THROTTLE_HELP)]
    Throttle(BenchThrottleArgs),
    /// What each way to encode pages gains and costs, while the guest compiles.
    #[command(after_help = BENCH_COMPRESSION_HELP)]
    Compression(BenchCompressionArgs),
    /// What a client waits when the backup is 1 to 50 ms away over 100 Mbit/s.
    #[command(after_help = BENCH_DISTANCE_HELP)]
    Distance(BenchDistanceArgs),
    /// How long clients wait when a host dies, or is cut off.
    #[command(after_help = BENCH_FAILOVER_HELP)]
    Failover(BenchFailoverArgs),
    /// Whether a guest is as fast after many fail-overs as before the first.
    #[command(after_help = super::endurance::HELP)]
    Endurance(BenchEnduranceArgs),
    /// What workloads do in one guest, protected or not.
    #[command(after_help = BENCH_WORKLOAD_HELP)]
    Workload(BenchWorkloadArgs),
}

const BENCH_README_HELP: &str = "\
Replaces what is between the marks in both files, and keeps the part of the report
that the tables need in docs/performance/suite.json. The report must have all
workloads, at least unprotected, adaptive and plain:

  understudy-lab bench --runs 1 --variants unprotected,adaptive,plain
  understudy-lab bench readme target/bench/report.json";

/// `bench readme`
#[derive(Debug, Args)]
pub struct BenchReadmeArgs {
    /// The report: report.json of `understudy-lab bench`, or what was kept of one.
    #[arg(value_name = "REPORT", default_value = "docs/performance/suite.json")]
    pub report: PathBuf,
    /// The commit that was measured [default: the report's].
    #[arg(long)]
    pub commit: Option<String>,
    /// What else a reader must know of the run, in a sentence.
    #[arg(long, value_name = "TEXT")]
    pub note: Option<String>,
    /// A report of a run without `--pinned`, to stand beside one with it.
    #[arg(long, value_name = "REPORT")]
    pub shared: Option<PathBuf>,
    /// The folder of the repository.
    #[arg(long, value_name = "DIR", default_value = ".")]
    pub root: PathBuf,
}

const BENCH_WORKLOAD_HELP: &str = "\
Real programs in a Debian guest, and their clients outside; every time is taken
outside the guest. Parts and conditions as for `bench pause`; the guest is the one
of `make bench-guest`.";

/// `bench workload`
#[derive(Debug, Args)]
pub struct BenchWorkloadArgs {
    /// Which of them, one after the other; all without.
    #[arg(value_enum, value_name = "NAME")]
    pub names: Vec<Workload>,
    /// A part of the work.
    #[arg(long)]
    pub quick: bool,
    /// Protect the guest, with the default policy.
    #[arg(long)]
    pub protected: bool,
    /// Give the primary host a processor to itself, and backup and clients another one, as
    /// machines of their own would have.
    #[arg(long)]
    pub pinned: bool,
    /// How often each is run.
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub runs: u32,
    /// The test guests' files, with a folder `bench` [default: target/guest of the build].
    #[arg(long, value_name = "DIR", env = "UNDERSTUDY_GUEST")]
    pub guest: Option<PathBuf>,
}

const BENCH_COMPRESSION_HELP: &str = "\
Two hosts are network namespaces of this machine; daemons, QEMUs and the guest,
which runs a C compiler over and over, are real. Each way is measured in turn,
round after round. Needs root, and the guest with a compiler that
guests/toolchain builds. Everything is removed at the end.";

/// `bench compression`
#[derive(Debug, Args)]
pub struct BenchCompressionArgs {
    /// How often each way is measured.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub rounds: u32,
    /// Seconds of each measurement.
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u64).range(2..=3600))]
    pub seconds: u64,
    /// Checkpoints a second.
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub hz: u32,
    /// Pages of 4 KiB in the cache that deltas are made against.
    #[arg(long, value_name = "N", default_value_t = DEFAULT_CACHE_PAGES, value_parser = clap::value_parser!(u32).range(1..=i64::from(MOST_CACHE_PAGES)))]
    pub cache_pages: u32,
    /// The test guest's files, with a folder `toolchain` [default: target/guest of the build].
    #[arg(long, value_name = "DIR", env = "UNDERSTUDY_GUEST")]
    pub guest: Option<PathBuf>,
}

const BENCH_DISTANCE_HELP: &str = "\
A client appends records to a file in the guest, each after the last one's
acknowledgement. A relay delays every byte between the hosts, each way. Parts and
conditions as for `bench pause`.";

/// `bench distance`
#[derive(Debug, Args)]
pub struct BenchDistanceArgs {
    /// Seconds of each measurement.
    #[arg(long, value_name = "N", default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=600))]
    pub seconds: u64,
    /// The test guest's files [default: target/guest of the build].
    #[arg(long, value_name = "DIR", env = "UNDERSTUDY_GUEST")]
    pub guest: Option<PathBuf>,
}

const BENCH_FAILOVER_HELP: &str = "\
One guest and one TCP connection live through all failures: the host that failed
becomes the backup for the next one. An outage is the longest time without an
answer. Parts and conditions as for `bench pause`.";

/// `bench failover`
#[derive(Debug, Args)]
pub struct BenchFailoverArgs {
    /// How often everything on the primary's host is killed.
    #[arg(long, value_name = "N", default_value_t = 30, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    pub kills: u32,
    /// How often the primary's host is cut off from the network instead.
    #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(..=10_000))]
    pub cuts: u32,
    /// Kind of client that waits.
    #[arg(long, value_name = "KIND", value_enum, default_value = "records")]
    pub client: ClientKind,
    /// How the guest is protected.
    #[arg(long, value_name = "HOW", default_value = "checkpoint")]
    pub mode: ModeKind,
    /// The test guest's files [default: target/guest of the build].
    #[arg(long, value_name = "DIR", env = "UNDERSTUDY_GUEST")]
    pub guest: Option<PathBuf>,
}

const BENCH_PAUSE_HELP: &str = "\
Two hosts are network namespaces of this machine; daemons, QEMUs and the guest,
which rewrites that many pages in every epoch, are real. Needs root, and the test
guest that `make guests` builds. Everything is removed at the end. Figures mean
little while something else keeps the machine busy.";

const BENCH_GROUP_HELP: &str = "\
One guest asks a server in the other over TCP, each request after the last answer:
alone, and while a client outside asks the first guest likewise. Parts and
conditions as for `bench pause`.";

/// `bench group`
#[derive(Debug, Args)]
pub struct BenchGroupArgs {
    /// Seconds of each measurement.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..=600))]
    pub seconds: u64,
    /// How often everything is measured, in turn; medians are reported.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub repeats: u32,
    /// The test guest's files [default: target/guest of the build].
    #[arg(long, value_name = "DIR", env = "UNDERSTUDY_GUEST")]
    pub guest: Option<PathBuf>,
}

const BENCH_LOCKSTEP_HELP: &str = "\
Real programs in a Debian guest on one vCPU without KVM, as lockstep needs it: on plain
QEMU (tcg), on plain QEMU that counts instructions (icount), on two of these at once, each
with its own clients (pair), on one that records without a backup (record), in lockstep, in
lockstep with disk reads in the log (lockstep-log, disk_reads only), and protected by
checkpoints (latency only); one after the other, round by round. Every time is taken outside
the guest. Parts and conditions as for `bench pause`; the guest is the one of `make
bench-guest`. Exits with 1 if something could not be measured.

Examples:
  understudy-lab bench lockstep --quick
  understudy-lab bench lockstep --only cpu,web --runs 5 --json";

/// `bench lockstep`
#[derive(Debug, Args)]
pub struct BenchLockstepArgs {
    /// Only these.
    #[arg(long, value_name = "NAME,…", value_delimiter = ',')]
    pub only: Vec<lockstep::Subject>,
    /// In these variants only.
    #[arg(long, value_name = "NAME,…", value_delimiter = ',')]
    pub variants: Vec<lockstep::Variant>,
    /// A part of the work, one round: a first look.
    #[arg(long)]
    pub quick: bool,
    /// Rounds [default: 3; 1 with --quick].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    pub runs: Option<u32>,
    /// The test guests' files, with a folder `bench` [default: target/guest of the build].
    #[arg(long, value_name = "DIR", env = "UNDERSTUDY_GUEST")]
    pub guest: Option<PathBuf>,
}

const BENCH_RESTORE_HELP: &str = "\
Sections, each in a laboratory of its own, one after the other:
  modes    a guest with data in two fifths of its memory, which reads a twelfth again and again, is
           snapshotted, ended, and restored in each way; beside plain QEMU's `migrate file:` and
           `-incoming` with the same load
  queue    programs in the bench guest: which pages are touched after a snapshot, and after its
           restore; first access, LRU and CLOCK by what they would have loaded
  group    8, 12 and 16 small guests that pay each other over TCP, on four hosts: latency of each
           VM, back-off, silence of TCP
  queries  a search service in two guests: the first 20 answers to each of ten clients
  distcc   one guest compiles zlib through distcc on two others, over and over: they are snapshotted in a
           build, and after the restore it goes on and ends
  cost     pause, duration and slow-down of a snapshot; beside savevm and `migrate file:`
Every time is taken outside the guests, but for the silence. Parts and conditions as for `bench
pause`; queue and distcc need the guest of `make bench-guest`. Exits with 1 if something could not be
measured.

Examples:
  understudy-lab bench restore --quick
  understudy-lab bench restore --only modes --ways eager,hot --store-speed 50 --json
  understudy-lab bench restore --only group --vms 8";

/// `bench restore`
#[derive(Debug, Args)]
pub struct BenchRestoreArgs {
    /// Only these sections.
    #[arg(long, value_name = "SECTION,…", value_delimiter = ',')]
    pub only: Vec<restore::Section>,
    /// Of `modes`, only these ways.
    #[arg(long, value_name = "WAY,…", value_delimiter = ',')]
    pub ways: Vec<restore::Way>,
    /// Of `queue`, only these programs.
    #[arg(long, value_name = "NAME,…", value_delimiter = ',')]
    pub workloads: Vec<restore::Load>,
    /// Of `group`, these numbers of VMs; all modes with the first [default: 8,12,16].
    #[arg(long, value_name = "N,…", value_delimiter = ',', value_parser = vms)]
    pub vms: Vec<usize>,
    /// One round, and less of each section: a first look.
    #[arg(long)]
    pub quick: bool,
    /// Rounds [default: 5 of modes, 3 of the others; 1 with --quick].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=100))]
    pub runs: Option<u32>,
    /// Megabytes a second that come from the store to each host [default: as many as it gives].
    #[arg(long, value_name = "MB", value_parser = speed)]
    pub store_speed: Option<f64>,
    /// Memory of the guest of modes, queue and cost.
    #[arg(long, value_name = "MIB", default_value_t = 512,
          value_parser = clap::value_parser!(u32).range(192..=16384))]
    pub memory_mib: u32,
    /// The test guests' files, with a folder `bench` [default: target/guest of the build].
    #[arg(long, value_name = "DIR", env = "UNDERSTUDY_GUEST")]
    pub guest: Option<PathBuf>,
}

fn vms(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(vms) if (2..=restore::MOST_VMS).contains(&vms) => Ok(vms),
        _ => Err(format!("give 2 to {} VMs", restore::MOST_VMS)),
    }
}

fn speed(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(speed) if (1.0..=100_000.0).contains(&speed) => Ok(speed),
        _ => Err("give 1 to 100000 megabytes a second".to_owned()),
    }
}

/// How the load of `bench pause` writes its pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Writer {
    /// All of them a little more often than there are epochs, then a rest.
    Bursts,
    /// Over and over, without rest.
    Continuous,
}

impl Writer {
    /// Its name, as in the report.
    pub fn name(self) -> &'static str {
        match self {
            Writer::Bursts => "bursts",
            Writer::Continuous => "continuous",
        }
    }
}

/// `bench pause`
#[derive(Debug, Args)]
pub struct BenchPauseArgs {
    /// Checkpoints to measure at each point.
    #[arg(long, value_name = "N", default_value_t = 100, value_parser = epochs)]
    pub epochs: usize,
    /// Pages that the guest writes in each epoch; 0 is an idle guest.
    #[arg(
        long,
        value_name = "N,…",
        value_delimiter = ',',
        default_value = "0,100,1000,10000,50000"
    )]
    pub points: Vec<u64>,
    /// The guest's memory, in MiB or with a unit; all points are measured with each size.
    #[arg(
        long,
        value_name = "SIZE,…",
        value_delimiter = ',',
        default_value = "512M",
        value_parser = memory_mib
    )]
    pub memory: Vec<u32>,
    /// How the guest writes its pages: in bursts, with a rest after each until the next epoch, or
    /// over and over without any; all points but 0 are measured with each.
    #[arg(
        long,
        value_name = "WRITER,…",
        value_delimiter = ',',
        default_value = "bursts,continuous"
    )]
    pub writers: Vec<Writer>,
    /// Live migrations of the same guest at each point, for comparison, with each of two
    /// settings; 0 for none.
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u32).range(0..=100))]
    pub migrations: u32,
    /// The test guest's files [default: target/guest of the build].
    #[arg(long, value_name = "DIR", env = "UNDERSTUDY_GUEST")]
    pub guest: Option<PathBuf>,
}

const BENCH_THROTTLE_HELP: &str = "\
The same laboratory as in `bench pause`, with a slow link between the hosts. Measured
twice: where control groups are hidden from the daemon, so that it cannot slow the
guest down, and where they are not.";

/// `bench throttle`
#[derive(Debug, Args)]
pub struct BenchThrottleArgs {
    /// Speed of the link between the hosts, in Mbit/s.
    #[arg(long, value_name = "MBITS", default_value_t = 100, value_parser = clap::value_parser!(u32).range(10..=10_000))]
    pub link: u32,
    /// Pages that the guest fills with noise without rest.
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(16..=20_000))]
    pub pages: u64,
    /// How long to measure, each time.
    #[arg(long, value_name = "S", default_value_t = 30, value_parser = clap::value_parser!(u64).range(5..=600))]
    pub seconds: u64,
    /// The test guest's files [default: target/guest of the build].
    #[arg(long, value_name = "DIR", env = "UNDERSTUDY_GUEST")]
    pub guest: Option<PathBuf>,
}

/// `512`, `512M` or `4G`.
fn memory_mib(text: &str) -> Result<u32, String> {
    let (number, unit) = match text.strip_suffix('G') {
        Some(number) => (number, 1024),
        None => (text.strip_suffix('M').unwrap_or(text), 1),
    };
    let mib = number.parse::<u32>().ok().and_then(|number| number.checked_mul(unit));
    match mib {
        Some(mib) if (256..=65536).contains(&mib) => Ok(mib),
        _ => Err("it must be 256M to 64G".to_owned()),
    }
}

fn epochs(text: &str) -> Result<usize, String> {
    match text.parse() {
        // The daemon keeps the timings of 4 096 checkpoints.
        Ok(epochs) if (10..=4000).contains(&epochs) => Ok(epochs),
        _ => Err("it must be a number from 10 to 4000".to_owned()),
    }
}
