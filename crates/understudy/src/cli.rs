//! The grammar of the command line; that of the benchmarks is in [`bench`], that of
//! `protect` in [`protect`].

mod bench;
mod protect;

#[cfg(test)]
use bench::SUITE_HELP;
pub use bench::*;
use protect::PROTECT_HELP;
pub use protect::*;

use clap::{Args, Parser, Subcommand, ValueEnum};
use serde::Serialize;
use std::path::PathBuf;
use understudy_daemon::config::DEFAULT_SOCKET;

const AFTER_HELP: &str = "\
Examples:
  understudy doctor                        is this machine ready?
  understudy host --config host.toml       run the daemon of this host
  understudy vm start db.toml              start a VM, unprotected
  understudy protect db --to b             keep an understudy of it on host b
  understudy status db                     role, lag, pauses, bandwidth

Exit codes:
  0  done
  1  it failed; the reason is on stderr
  2  the command line is wrong
  3  degraded: protection was asked for and is lost
  4  no such VM or file
  5  the daemon does not answer on its socket

With --json, results go to stdout as JSON, and errors as
{\"error\": {\"kind\": …, \"message\": …}}.";

/// Makes an ordinary virtual machine survive the death of its host.
#[derive(Debug, Parser)]
#[command(version, after_help = AFTER_HELP)]
pub struct Cli {
    /// The daemon's API socket (`host` takes it from its configuration).
    #[arg(long, global = true, env = "UNDERSTUDY_SOCKET", value_name = "PATH", default_value = DEFAULT_SOCKET)]
    pub socket: PathBuf,

    /// Print JSON instead of text.
    #[arg(long, global = true)]
    pub json: bool,

    /// What to log to stderr: error, warn, info, debug or trace, or a filter
    /// such as `warn,understudy_daemon=debug`.
    #[arg(long, global = true, env = "UNDERSTUDY_LOG", value_name = "LEVEL", value_parser = log_filter)]
    pub log: Option<String>,

    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Run this host's daemon in the foreground, until SIGTERM or SIGINT.
    #[command(after_help = HOST_HELP)]
    Host {
        /// The host's configuration (TOML).
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
    },
    /// Start, stop and list VMs, and reach their consoles.
    #[command(subcommand)]
    Vm(VmCommand),
    /// Keep an understudy of a VM, or of a group of VMs, on another host.
    #[command(after_help = PROTECT_HELP)]
    Protect(ProtectArgs),
    /// End the protection of a VM, and of its whole group; it runs on here.
    Unprotect {
        /// The VM's name.
        vm: String,
    },
    /// Hand a VM, and its whole group, over to its backup now, losing nothing.
    Failover {
        /// The VM's name.
        vm: String,
    },
    /// Find a VM's valid disk images after all its hosts were lost, and start it on them.
    #[command(after_help = RECOVER_HELP)]
    Recover(RecoverArgs),
    /// Show this host's VMs, or one of them in full.
    #[command(after_help = "Exits with 3 if VM was to be protected and its protection is lost.")]
    Status {
        /// The VM's name; all VMs without it.
        vm: Option<String>,
    },
    /// Kill a guest's host, here on one machine, and see its connection live on.
    #[command(after_help = DEMO_HELP)]
    Demo(DemoArgs),
    /// Fail hosts at random, here on one machine, and check every promise each time.
    #[command(after_help = CHAOS_HELP)]
    Chaos(ChaosArgs),
    /// Try the protocol on schedules of simulated failures.
    #[command(after_help = SIMULATE_HELP)]
    Simulate(SimulateArgs),
    /// Make the certificates by which hosts recognise each other.
    #[command(subcommand, after_help = PKI_HELP)]
    Pki(PkiCommand),
    /// Measure what protection costs on this machine, on real parts.
    Bench(BenchArgs),
    /// Check whether this machine can run and protect VMs; says what to do if not.
    Doctor {
        /// Check this host's configuration too: the arbiter, the peers.
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
    },
}

/// Work on VMs.
#[derive(Debug, Subcommand)]
pub enum VmCommand {
    /// Start a VM on this host, unprotected.
    #[command(after_help = VM_START_HELP)]
    Start {
        /// The VM's definition (TOML).
        file: PathBuf,
    },
    /// Stop a VM: the guest is asked to power off.
    Stop {
        /// The VM's name.
        name: String,
        /// End it at once, as if its power had been cut.
        #[arg(long)]
        force: bool,
    },
    /// List this host's VMs.
    List,
    /// Connect this terminal to a VM's serial console; Ctrl-] leaves.
    ///
    /// With piped input, every byte of it goes to the console; after its end,
    /// the command leaves once the console has been silent for a second.
    Console {
        /// The VM's name.
        name: String,
    },
}

/// Work on certificates.
#[derive(Debug, Subcommand)]
pub enum PkiCommand {
    /// Make a certificate authority: DIR/ca.pem and DIR/ca.key.
    Init {
        /// Where it is kept.
        #[arg(long, value_name = "DIR", default_value = ".")]
        dir: PathBuf,
    },
    /// Issue a certificate for a host: DIR/NAME.pem and DIR/NAME.key.
    Issue {
        /// The host's name, as in its configuration and its peers'.
        name: String,
        /// Where the authority is kept.
        #[arg(long, value_name = "DIR", default_value = ".")]
        dir: PathBuf,
        /// For how many days it is valid.
        #[arg(long, value_name = "N", default_value_t = 825, value_parser = clap::value_parser!(u32).range(1..=36500))]
        days: u32,
    },
}

const PKI_HELP: &str = "\
Example, for hosts a and b, on any machine that is kept safe:

  understudy pki init
  understudy pki issue a
  understudy pki issue b

Each host gets ca.pem and its own two files, and names them in its configuration:

  [tls]
  ca = \"/etc/understudy/ca.pem\"
  cert = \"/etc/understudy/a.pem\"
  key = \"/etc/understudy/a.key\"        # mode 0600

ca.key belongs on no host: whoever has it can be any host. Nothing that exists
is overwritten.";

const HOST_HELP: &str = "\
Example of a configuration:

  name = \"a\"
  listen = \"10.0.0.1:7788\"           # where peers reach this host

  [arbiter]                          # decides who owns a VM; needed to protect
  kind = \"file\"
  path = \"/srv/understudy/arbiter\"   # on storage that all hosts reach

  [peers]
  b = \"10.0.0.2:7788\"              # or a list: an address for each path to it

  [tls]                              # see `understudy pki`; not needed on loopback
  ca = \"/etc/understudy/ca.pem\"
  cert = \"/etc/understudy/a.pem\"
  key = \"/etc/understudy/a.key\"

Optional: state_dir, socket, qemu, agent (absolute paths), memory = \"64G\" (the
most that VMs and backups may take together; else what is available),
[qemu_process] user = \"NAME\" (else each QEMU is a user of its own), and
[detection] timeout_ms = 100 (50 to 10000), the shortest silence of a peer
after which it is suspected.";

const VM_START_HELP: &str = "\
Example of a definition:

  name = \"db\"
  memory = \"512M\"
  vcpus = 2

  [[disk]]
  path = \"db.img\"
  format = \"raw\"

  [[card]]
  mac = \"52:54:00:12:34:56\"
  bridge = \"br0\"

The guest boots from its first disk, or a Linux kernel directly with kernel,
initrd and append. Relative paths count from the definition's folder.";

const RECOVER_HELP: &str = "\
Asks this host, its peers' daemons and the arbiter for their records, says whose
images the guest ran on last and why, and starts the VM if they are this host's.
If they are another's, the command is to be run there. Nothing is started while
it is not certain: a host that does not answer may have newer images.

Examples:
  understudy recover db --dry-run
  understudy recover db";

/// `recover`
#[derive(Debug, Args)]
pub struct RecoverArgs {
    /// The VM's name.
    pub vm: String,
    /// Only say which images are valid, and why.
    #[arg(long)]
    pub dry_run: bool,
    /// Start it on this host's images even if others are, or may be, newer: what the
    /// guest acknowledged since is lost.
    #[arg(long, conflicts_with = "dry_run")]
    pub force: bool,
}

const DEMO_HELP: &str = "\
Two hosts and a client are network namespaces of this machine; the rest is real.
Needs root, and the test guest that `make guests` builds. Everything is removed
at the end. Exits with 0 only if no acknowledged record was lost and the
client's one connection survived.";

/// `demo`
#[derive(Debug, Args)]
pub struct DemoArgs {
    /// How the backup keeps up.
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

const CHAOS_HELP: &str = "\
Each run: a guest under load on disk, memory and network, protected; one failure
drawn from the run's seed (a process or a host is killed, stalls and comes back,
is cut off, loses its cable, at any moment); then every promise is checked: the
clients' connections live on, no acknowledged record is lost, the file system is
sound, and never do both copies answer.

Two hosts and a client are network namespaces of this machine; the rest is real.
Needs root, and the test guest that `make guests` builds. Logs of a run that went
wrong are kept. Exits with 0 only if every promise was kept.

Examples:
  understudy chaos --runs 200
  understudy chaos --runs 1 --seed 117     that run of seed 117, again";

/// `chaos`
#[derive(Debug, Args)]
pub struct ChaosArgs {
    /// How many failures.
    #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u64).range(1..=1_000_000))]
    pub runs: u64,
    /// The first run's seed; the others count on from it.
    #[arg(long, value_name = "S", default_value_t = 1)]
    pub seed: u64,
    /// The test guest's files [default: target/guest of the build].
    #[arg(long, value_name = "DIR", env = "UNDERSTUDY_GUEST")]
    pub guest: Option<PathBuf>,
}

const SIMULATE_HELP: &str = "\
The state machines that decide about output and ownership, the same code that the
daemon runs, in a world of virtual time: hosts, an arbiter and the connections
between them are simulated, and a seed decides what fails and when. Every
invariant is checked at every step. Then known bugs are planted, one after the
other, and must be found by the same seeds. Needs no privileges.

Exits with 0 only if no invariant was broken and every planted bug was found.

Examples:
  understudy simulate --seeds 100000
  understudy simulate --seed 4711          what happens in that schedule, line by line";

/// `simulate`
#[derive(Debug, Args)]
pub struct SimulateArgs {
    /// How many schedules.
    #[arg(long, value_name = "N", default_value_t = 10_000, value_parser = clap::value_parser!(u64).range(1..=1_000_000_000))]
    pub seeds: u64,
    /// The first seed.
    #[arg(long, value_name = "S", default_value_t = 0, value_parser = clap::value_parser!(u64).range(..=u64::MAX / 2))]
    pub from: u64,
    /// Replay this one seed and tell its story.
    #[arg(long, value_name = "S", conflicts_with_all = ["seeds", "from"])]
    pub seed: Option<u64>,
}

fn log_filter(text: &str) -> Result<String, String> {
    tracing_subscriber::EnvFilter::try_new(text)
        .map(|_| text.to_owned())
        .map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;
    use clap::error::ErrorKind;
    use understudy_daemon::config::HostConfig;
    use understudy_qemu::VmDefinition;

    fn parse(line: &str) -> Result<Cli, clap::Error> {
        Cli::try_parse_from(line.split_whitespace())
    }

    #[test]
    fn the_grammar_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn global_options_stand_anywhere() {
        let before = parse("understudy --json --socket /x status db").unwrap();
        let after = parse("understudy status db --socket /x --json").unwrap();
        for cli in [before, after] {
            assert!(cli.json);
            assert_eq!(cli.socket, PathBuf::from("/x"));
            assert!(matches!(cli.command, Command::Status { vm: Some(vm) } if vm == "db"));
        }
    }

    #[test]
    fn wrong_command_lines_are_refused() {
        let cases = [
            ("understudy", ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand),
            ("understudy protect db", ErrorKind::MissingRequiredArgument),
            ("understudy protect db --to b --hz 0", ErrorKind::ValueValidation),
            ("understudy protect db --to b --hz 1001", ErrorKind::ValueValidation),
            ("understudy protect db --to b --policy often", ErrorKind::InvalidValue),
            ("understudy host", ErrorKind::MissingRequiredArgument),
            ("understudy vm destroy db", ErrorKind::InvalidSubcommand),
            ("understudy status --log =x= db", ErrorKind::ValueValidation),
        ];
        for (line, kind) in cases {
            assert_eq!(parse(line).unwrap_err().kind(), kind, "{line}");
        }
    }

    /// The indented lines of a help text.
    fn example(help: &str) -> String {
        help.lines().filter_map(|line| line.strip_prefix("  ")).map(|l| format!("{l}\n")).collect()
    }

    #[test]
    fn the_examples_in_the_help_are_right() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("db.img"), [0; 512]).unwrap();
        let file = &folder.path().join("example.toml");
        let host = HostConfig::from_toml(&example(HOST_HELP), file).unwrap();
        assert_eq!((host.peers.len(), host.arbiter.is_some()), (1, true));
        let vm = VmDefinition::from_toml(&example(VM_START_HELP), file).unwrap();
        assert_eq!((vm.disks.len(), vm.cards.len()), (1, 1));
        let helps = [AFTER_HELP, SIMULATE_HELP, PROTECT_HELP, RECOVER_HELP, CHAOS_HELP, SUITE_HELP];
        for help in helps {
            let lines = example(help);
            for line in lines.lines().filter(|line| line.starts_with("understudy ")) {
                let command = line.split("  ").next().unwrap();
                parse(command).unwrap_or_else(|error| panic!("{command}: {error}"));
            }
        }
    }

    #[test]
    fn the_help_documents_the_exit_codes() {
        let help = Cli::command().render_long_help().to_string();
        for code in 0..=5 {
            assert!(
                help.contains(&format!("\n  {code}  ")),
                "exit code {code} is missing:\n{help}"
            );
        }
    }
}
