//! The grammar of the command line; that of `vm` is in [`vm`], that of `protect` in [`protect`], and so on.

mod import;
mod pki;
mod protect;
mod setup;
mod snapshot;
mod upgrade;
mod vm;
mod watch;

pub use import::*;
use pki::PKI_HELP;
pub use pki::PkiCommand;
use protect::PROTECT_HELP;
pub use protect::*;
pub use setup::*;
use setup::{INIT_HELP, JOIN_HELP};
use snapshot::CLUSTER_HELP;
pub use snapshot::*;
use understudy_protocol::{GroupName, VmName};
use upgrade::UPGRADE_HELP;
pub use upgrade::UpgradeArgs;
pub use vm::{Startable, VmCommand};
pub use watch::*;
use watch::{EVENTS_HELP, TOP_HELP};

use clap::{Args, Parser, Subcommand};
use std::path::PathBuf;
use understudy_client::HostUrl;
use understudy_client::manual::ManualCommand;
use understudy_client::output::OutputOptions;
use understudy_daemon::config::DEFAULT_SOCKET;
use understudy_daemon::custody::SUBCOMMAND;
use understudy_daemon::keeper::order::Order;

const REMOTE: &str = "On another machine";

const AFTER_HELP: &str = "\
Examples:
  understudy doctor                        is this machine ready?
  understudy init                          set the first host up, and invite the other
  understudy host --config host.toml       run the daemon of this host
  understudy vm start db.toml              start a VM, unprotected
  understudy protect db --to b             keep an understudy of it on host b
  understudy status db                     role, lag, pauses, bandwidth
  understudy --host https://a:7780 --ca ca.pem --token-file token status
                                           the same from another machine

Exit codes:
  0  done
  1  it failed; the reason is on stderr
  2  the command line is wrong
  3  degraded: protection was asked for and is lost, or given up by
     --unheld-output; or the VM stands still (its disk, its host's lease)
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

    /// The daemon of another machine, instead of the socket: https://NAME:PORT, or NAME=ADDRESS:PORT.
    #[arg(long, global = true, env = "UNDERSTUDY_HOST", value_name = "URL", help_heading = REMOTE)]
    pub host: Option<HostUrl>,

    /// With --host: certificates of the authority that the host's is of (ca.pem).
    #[arg(long, global = true, env = "UNDERSTUDY_CA", value_name = "FILE", help_heading = REMOTE)]
    pub ca: Option<PathBuf>,

    /// With --host: file with the token to show, readable by nobody else.
    #[arg(long, global = true, env = "UNDERSTUDY_TOKEN_FILE", value_name = "FILE", help_heading = REMOTE)]
    pub token_file: Option<PathBuf>,

    /// With --host: the certificate to show, instead of a token.
    #[arg(long, global = true, env = "UNDERSTUDY_CERT", value_name = "FILE", help_heading = REMOTE)]
    pub cert: Option<PathBuf>,

    /// With --host: the certificate's key.
    #[arg(long, global = true, env = "UNDERSTUDY_KEY", value_name = "FILE", help_heading = REMOTE)]
    pub key: Option<PathBuf>,

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
    /// Run this host's daemon in the foreground, until SIGTERM, SIGINT or SIGHUP.
    #[command(after_help = HOST_HELP)]
    Host {
        /// The host's configuration (TOML).
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
    },
    /// Set this host up as the first one, and invite the other.
    #[command(after_help = INIT_HELP)]
    Init(InitArgs),
    /// Invite another host to join: prints the command to run there, and waits for it.
    Invite(InviteArgs),
    /// Set this host up by the invitation of another one.
    #[command(after_help = JOIN_HELP)]
    Join(JoinArgs),
    /// Keep a guest when its daemon dies; started by the daemon.
    #[command(hide = true, name = SUBCOMMAND)]
    Custodian,
    /// Run one VM beside the daemon, and outlive it; started by the daemon.
    #[command(hide = true, name = understudy_daemon::keeper::start::SUBCOMMAND)]
    Keep {
        /// The host's configuration.
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
        /// The agent's library, as the daemon has it.
        #[arg(long, value_name = "FILE")]
        agent: PathBuf,
        /// The VM.
        #[arg(long)]
        vm: VmName,
        /// The group whose other VMs may come into it.
        #[arg(long)]
        group: Option<GroupName>,
        /// What to do about it first.
        #[arg(long, value_name = "JSON")]
        order: Option<Order>,
        /// A disk of the VM.
        #[arg(long, value_name = "PATH")]
        disk: Vec<PathBuf>,
        /// A device that its QEMU reads by itself.
        #[arg(long, value_name = "PATH")]
        read: Vec<PathBuf>,
    },
    /// End all VMs of this host that have keepers, in order.
    ///
    /// They go on when the daemon is ended by hand. The service manager ends them before the host goes down.
    EndKeepers {
        /// The host's configuration.
        #[arg(long, value_name = "FILE")]
        config: PathBuf,
    },
    /// What packages are made with.
    #[command(flatten)]
    Manual(ManualCommand),
    /// Start, stop and list VMs, and reach their consoles.
    #[command(subcommand)]
    Vm(VmCommand),
    /// Protect a VM, or a group of VMs, by a backup on another host.
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
    /// Verify VMs in lockstep.
    #[command(subcommand)]
    Lockstep(LockstepCommand),
    /// Find a VM's valid disk images after all its hosts were lost, and start it from them.
    #[command(after_help = RECOVER_HELP)]
    Recover(RecoverArgs),
    /// Take snapshots of several VMs as one, and restore them.
    #[command(subcommand, after_help = CLUSTER_HELP)]
    Cluster(ClusterCommand),
    /// Say what a restart of the daemon for an upgrade does to each VM, or hand all over before it.
    #[command(after_help = UPGRADE_HELP)]
    Upgrade(UpgradeArgs),
    /// Show this host's VMs, or one of them in full.
    #[command(
        after_help = "Exits with 3 if VM was to be protected and its protection is lost, is being restored, or is none \
                      (--unheld-output); and, protected or not, if it stands still: an error of its disk, or this \
                      host's lease has run out."
    )]
    Status {
        /// The VM's name; all VMs without it.
        vm: Option<String>,
    },
    /// Watch this host in a terminal: who protects whom, what it costs, what happens.
    #[command(after_help = TOP_HELP)]
    Top,
    /// Show what has happened on this host, and what happens.
    #[command(after_help = EVENTS_HELP)]
    Events(EventsArgs),
    /// Make the certificates by which hosts recognise each other.
    #[command(subcommand, after_help = PKI_HELP)]
    Pki(PkiCommand),
    /// Make the key of an encrypted snapshot store, for [snapshot_keys] of every host that uses it.
    SnapshotKey {
        /// The file; none may be there yet.
        file: PathBuf,
    },
    /// Check whether this machine can run and protect VMs; says what to do if not.
    Doctor {
        /// Check this host's configuration too: the arbiter, the peers.
        #[arg(long, value_name = "FILE")]
        config: Option<PathBuf>,
    },
}

/// Work on VMs in lockstep.
#[derive(Debug, Subcommand)]
pub enum LockstepCommand {
    /// Compare a VM with its backup, all of memory and disks, while both run.
    #[command(after_help = LOCKSTEP_VERIFY_HELP)]
    Verify {
        /// The VM's name.
        vm: String,
    },
}

const LOCKSTEP_VERIFY_HELP: &str = "\
Run it on the host that the VM runs on. The guest stands still for some
milliseconds again and again, never for long. Exits with 0 if both are the same,
with 1 if they differ: then the backup has diverged and is given up, and the VM
is protected anew.

Example:
  understudy lockstep verify db --json";

const HOST_HELP: &str = "\
Example of a configuration:

  name = \"a\"
  listen = \"10.0.0.1:7700\"           # where peers reach this host

  [arbiter]                          # decides who owns a VM; needed to protect
  kind = \"file\"
  path = \"/srv/understudy/arbiter\"   # on storage that all hosts reach

  [peers]
  b = \"10.0.0.2:7700\"              # or a list: an address for each path to it

  [tls]                              # see `understudy pki`; not needed on loopback
  ca = \"/etc/understudy/ca.pem\"
  cert = \"/etc/understudy/a.pem\"
  key = \"/etc/understudy/a.key\"
  revoked = \"/etc/understudy/revoked.pem\"

Optional: state_dir, socket, qemu, agent (absolute paths), memory = \"64G\" (the
most that VMs and backups may take together; else what is available),
[api] listen = \"0.0.0.0:7780\" (the API and a dashboard over TLS) with [api.tokens]
admin = \"/etc/understudy/admin.token\" (mode 0600, a token a line; roles are
read, operate, admin) or [api.certificates] NAME = \"operate\",
[webhook] url = \"https://…\" (each event is posted there as JSON),
[qemu_process] user = \"NAME\" (else each QEMU is a user of its own), and the most
that each QEMU may use: memory_beside = \"512M\" (beside the guest's; 1536M under
emulation), descriptors = 4096, threads = 256,
[detection] timeout_ms = 100 (50 to 10000), the shortest silence of a peer
after which it is suspected, epoch_timeout_ms = 1000 (100 to 60000), how long an
epoch may be on its way to the backup without any movement, and qemu_timeout_ms =
1000 (200 to 15000), the silence of a protected VM's own QEMU, [shutdown] power_off_seconds = 60 (0 to 3600).

SIGTERM, SIGINT or SIGHUP ends the daemon. VMs with keepers go on (`understudy
end-keepers --config FILE` ends them in order). Of the others the protected ones are
handed to their backups, as are those that are protected again within power_off_seconds;
the other guests are asked to power off (ACPI), and what still runs after
power_off_seconds more is cut, as it is at once after a second SIGTERM or SIGINT. The
log says which were. A service manager must wait for longer than both, and kill nothing
else: under systemd, which is told, KillMode=process and TimeoutStopSec=180.

All fields: /usr/share/doc/understudy/FILES.md.gz.";

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
    /// You have made sure that every host that does not answer is off. Without it a host that
    /// keeps no lease is not taken for dead.
    #[arg(long, requires = "force")]
    pub other_host_is_off: bool,
}

impl Cli {
    /// The level that is logged unless the user says otherwise.
    pub fn default_log(&self) -> &'static str {
        match self.command {
            Command::Host { .. } | Command::Keep { .. } | Command::EndKeepers { .. } => "info",
            _ => "warn",
        }
    }
}

#[cfg(test)]
mod tests;
