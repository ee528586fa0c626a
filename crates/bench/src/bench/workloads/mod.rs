//! The workloads of the suite: what each runs, and what it measures.
//!
//! | module       | workloads |
//! |--------------|-----------|
//! | `sysbench`   | `cpu`, `memory`, `fileio` |
//! | `compile`    | `compile` |
//! | `database`   | `database` |
//! | `postmark`   | `postmark` |
//! | `transfer`   | `upload`, `download` |
//! | `web`        | `web` |
//! | `tbench`     | `tbench` |
//! | `latency`    | `latency` |
//! | `postgresql` | `pgbench1`, `pgbench4`, `pgbench32` |
//! | `redis`      | `redis` |
//! | `outside`    | programs on the client's side, with a deadline |
//!
//! Each does the same work on every variant of the guest, and leaves nothing behind in
//! it for the next. Every time is taken by this machine's clock: the guest's stands still
//! while the guest does, so that it would leave out the pauses.

mod compile;
mod database;
mod latency;
mod outside;
mod postgresql;
mod postmark;
mod redis;
mod sysbench;
mod tbench;
mod transfer;
mod web;

pub use transfer::MEGABYTES as TRANSFER;

use crate::bench::clock::Clock;
use anyhow::{Context, Result, bail};
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::time::{Duration, Instant};
use understudy_lab::scene::SHELL_PORT;
use understudy_lab::{Console, ConsoleOutput, GuestOutput, GuestShell, Lab};

/// Time for what is not measured: preparing and cleaning up, on a busy machine.
const ASIDE_LIMIT: Duration = Duration::from_secs(240);

/// Workload that runs in the guest, or against it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Workload {
    /// sysbench looks for the primes up to 10 000, a fixed number of times.
    Cpu,
    /// sysbench writes a fixed amount to memory in blocks of 1 KB.
    Memory,
    /// sysbench reads and writes at random in a set of files, a fixed number of times.
    Fileio,
    /// gcc builds zlib.
    Compile,
    /// SQLite: a bank's transactions, each on the disk before the next.
    Database,
    /// Postmark: a mail server's small files, 10 000 transactions.
    Postmark,
    /// 50 MB from the client to the guest over one TCP connection.
    Upload,
    /// 50 MB from the guest to the client over one TCP connection.
    Download,
    /// Apache and 100 clients that fetch a page of 72 950 bytes.
    Web,
    /// The traffic of a file server's clients (dbench's tbench).
    Tbench,
    /// Request and response, with an idle guest and with a busy one.
    Latency,
    /// PostgreSQL and pgbench: a bank's transactions, of one client over the network.
    Pgbench1,
    /// The same, of 4 clients.
    Pgbench4,
    /// The same, of 32 clients.
    Pgbench32,
    /// Redis, each change on the disk before its answer, and 8 clients.
    Redis,
}

/// Direction in which a figure is to go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Better {
    /// A rate.
    Higher,
    /// A time.
    Lower,
}

/// Amount of work that a workload does: the same for every variant of the guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scale {
    /// Some 10 to 20 seconds on an unprotected guest under emulation; a transfer takes as
    /// long as its 50 MB do.
    Full,
    /// A few seconds.
    Quick,
}

impl Scale {
    /// One of two amounts.
    pub fn of<T>(self, full: T, quick: T) -> T {
        match self {
            Scale::Full => full,
            Scale::Quick => quick,
        }
    }
}

/// The guest that a workload runs on, whoever runs the guest.
#[derive(Clone, Copy)]
pub struct Bed<'a> {
    /// The laboratory; clients run in its client's namespace.
    pub lab: &'a Lab,
    /// The guest's address.
    pub address: Ipv4Addr,
    /// Door by which shell lines come to it.
    pub door: Door<'a>,
    /// Path of the guests' files, with programs for the client's side.
    pub guest_files: &'a Path,
}

/// A way for shell lines into a guest.
#[derive(Clone, Copy)]
pub enum Door<'a> {
    /// The socket of its serial console, with nobody connected to it: makes no frames.
    Console(&'a Path),
    /// Its server of shell lines.
    Network,
}

/// A shell in the guest.
pub enum Shell {
    /// Shell on its console.
    Console(Console),
    /// Shell over its network.
    Network(GuestShell),
}

impl Shell {
    /// Runs one line of shell to its end; an error after `limit`, or the server's own.
    pub fn run(&mut self, line: &str, limit: Duration) -> Result<ConsoleOutput> {
        match self {
            Shell::Console(console) => console.run(line, limit),
            Shell::Network(shell) => {
                let begun = Instant::now();
                let GuestOutput { code, text } = shell.run(line)?;
                Ok(ConsoleOutput { code, text, took: begun.elapsed() })
            }
        }
    }
}

impl Bed<'_> {
    fn server(&self, port: u16) -> SocketAddr {
        SocketAddr::from((self.address, port))
    }

    /// A shell in the guest.
    pub fn shell(&self) -> Result<Shell> {
        match self.door {
            Door::Console(socket) => Console::connect(socket).map(Shell::Console),
            Door::Network => {
                GuestShell::connect(self.lab, self.server(SHELL_PORT)).map(Shell::Network)
            }
        }
    }
}

/// Figures that one run of a workload measured.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Sample {
    /// The workload's figure, in its [`Workload::unit`].
    pub value: f64,
    /// Figures that it measured beside that.
    pub more: Vec<Figure>,
}

/// A further figure of a workload.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Figure {
    /// Name, a word or two: `p99_idle`.
    pub name: &'static str,
    /// Its unit.
    pub unit: &'static str,
    /// Direction in which it is to go.
    pub better: Better,
    /// The figure.
    pub value: f64,
}

impl Sample {
    fn seconds(took: Duration) -> Sample {
        Sample { value: took.as_secs_f64(), more: Vec::new() }
    }
}

impl Workload {
    /// All of them, in the order of the reports.
    pub const ALL: [Workload; 15] = [
        Workload::Cpu,
        Workload::Memory,
        Workload::Fileio,
        Workload::Compile,
        Workload::Database,
        Workload::Postmark,
        Workload::Upload,
        Workload::Download,
        Workload::Web,
        Workload::Tbench,
        Workload::Latency,
        Workload::Pgbench1,
        Workload::Pgbench4,
        Workload::Pgbench32,
        Workload::Redis,
    ];

    /// Its name in reports and on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Workload::Cpu => "cpu",
            Workload::Memory => "memory",
            Workload::Fileio => "fileio",
            Workload::Compile => "compile",
            Workload::Database => "database",
            Workload::Postmark => "postmark",
            Workload::Upload => "upload",
            Workload::Download => "download",
            Workload::Web => "web",
            Workload::Tbench => "tbench",
            Workload::Latency => "latency",
            Workload::Pgbench1 => "pgbench1",
            Workload::Pgbench4 => "pgbench4",
            Workload::Pgbench32 => "pgbench32",
            Workload::Redis => "redis",
        }
    }

    /// The unit of its figure.
    pub fn unit(self) -> &'static str {
        match self {
            Workload::Web | Workload::Redis => "requests/s",
            Workload::Tbench => "MB/s",
            Workload::Latency => "ms",
            Workload::Pgbench1 | Workload::Pgbench4 | Workload::Pgbench32 => "transactions/s",
            _ => "s",
        }
    }

    /// Whether it runs for a time, and does what it can; else its work is fixed.
    pub fn is_timed(self) -> bool {
        use Workload::{Pgbench1, Pgbench4, Pgbench32, Tbench, Web};
        matches!(self, Web | Tbench | Pgbench1 | Pgbench4 | Pgbench32)
    }

    /// Direction in which its figure is to go.
    pub fn better(self) -> Better {
        match self {
            Workload::Web | Workload::Tbench | Workload::Redis => Better::Higher,
            Workload::Pgbench1 | Workload::Pgbench4 | Workload::Pgbench32 => Better::Higher,
            _ => Better::Lower,
        }
    }

    /// Makes what it finds in the guest when it runs, unless that is there: a long work, which
    /// is to fall into no figure.
    pub fn prepare(self, bed: &Bed<'_>) -> Result<()> {
        match self {
            Workload::Pgbench1 | Workload::Pgbench4 | Workload::Pgbench32 => {
                postgresql::create(bed)
            }
            _ => Ok(()),
        }
        .with_context(|| format!("the preparation of `{}`", self.name()))
    }

    /// Runs it once, in a guest that it was prepared in. An error says what went wrong and shows
    /// what the program printed; the guest may then need to be started anew. So is it an error if this
    /// machine's clock was set meanwhile.
    pub fn run(self, bed: &Bed<'_>, scale: Scale) -> Result<Sample> {
        let clock = Clock::look()?;
        let sample = match self {
            Workload::Cpu => sysbench::cpu(bed, scale),
            Workload::Memory => sysbench::memory(bed, scale),
            Workload::Fileio => sysbench::fileio(bed, scale),
            Workload::Compile => compile::run(bed, scale),
            Workload::Database => database::run(bed, scale),
            Workload::Postmark => postmark::run(bed, scale),
            Workload::Upload => transfer::upload(bed, scale),
            Workload::Download => transfer::download(bed, scale),
            Workload::Web => web::run(bed, scale),
            Workload::Tbench => tbench::run(bed, scale),
            Workload::Latency => latency::run(bed, scale),
            Workload::Pgbench1 => postgresql::run(bed, scale, 1),
            Workload::Pgbench4 => postgresql::run(bed, scale, 4),
            Workload::Pgbench32 => postgresql::run(bed, scale, 32),
            Workload::Redis => redis::run(bed, scale),
        };
        let sound = |sample| clock.check().map(|()| sample);
        sample.and_then(sound).with_context(|| format!("the workload `{}`", self.name()))
    }

    /// [`run`](Workload::run), with the processor seconds of each side among its figures: those
    /// of the first host (daemon and QEMU), and of the second, the backup. They are over all that
    /// the workload does in the guest.
    pub fn run_accounted(self, bed: &Bed<'_>, scale: Scale) -> Result<Sample> {
        let before = sides(bed.lab)?;
        let mut sample = self.run(bed, scale)?;
        let after = sides(bed.lab)?;
        for (name, side) in [("cpu_primary", 0), ("cpu_backup", 1)] {
            let value = after[side].saturating_sub(before[side]).as_secs_f64();
            sample.more.push(Figure { name, unit: "s", better: Better::Lower, value });
        }
        Ok(sample)
    }
}

/// The processor time of each side, the first host's first.
fn sides(lab: &Lab) -> Result<[Duration; 2]> {
    let [first, second, ..] = lab.hosts() else { bail!("a workload needs two hosts") };
    Ok([lab.host(first)?.processor_time()?, lab.host(second)?.processor_time()?])
}

/// Runs a line that is not measured, and that must succeed.
pub fn aside(shell: &mut Shell, line: &str) -> Result<ConsoleOutput> {
    shell.run(line, ASIDE_LIMIT)?.expect_success(line)
}

/// The first word of what follows `label` in an output.
fn after<'a>(text: &'a str, label: &str) -> Option<&'a str> {
    let (_, rest) = text.split_once(label)?;
    rest.split_whitespace().next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_command_line() {
        for workload in Workload::ALL {
            let value = workload.to_possible_value().expect("every workload can be asked for");
            assert_eq!(value.get_name(), workload.name());
        }
        assert_eq!(Workload::ALL.len(), Workload::value_variants().len());
    }
}
