//! The grammar of the command line; that of `protect` is in [`protect`], that of `events` in
//! [`watch`].

mod import;
mod protect;
mod setup;
mod snapshot;
mod upgrade;
mod watch;

use import::VM_IMPORT_HELP;
pub use import::*;
use protect::PROTECT_HELP;
pub use protect::*;
pub use setup::*;
use setup::{INIT_HELP, JOIN_HELP};
use snapshot::CLUSTER_HELP;
pub use snapshot::*;
use understudy_protocol::{GroupName, VmName};
use upgrade::UPGRADE_HELP;
pub use upgrade::UpgradeArgs;
pub use watch::*;
use watch::{EVENTS_HELP, TOP_HELP};

use clap::{Args, Parser, Subcommand};
use std::convert::Infallible;
use std::path::{Path, PathBuf};
use understudy_client::HostUrl;
use understudy_client::manual::ManualCommand;
use understudy_client::output::OutputOptions;
use understudy_daemon::config::DEFAULT_SOCKET;
use understudy_daemon::custody::SUBCOMMAND;
use understudy_daemon::keeper::order::Order;
use understudy_daemon::pki::HOST_DAYS;

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
    /// End all VMs of this host that have keepers, in order; run by the service manager before the host goes down.
    #[command(hide = true)]
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

/// Work on VMs.
#[derive(Debug, Subcommand)]
pub enum VmCommand {
    /// Start a VM on this host, unprotected.
    #[command(after_help = VM_START_HELP)]
    Start {
        /// The VM's definition (TOML), or the name of a VM that ran on this host before.
        #[arg(value_name = "FILE|NAME", value_parser = Startable::parse)]
        what: Startable,
        /// Start it on FILE's images, a backup's say, although its newest ones are, or may be, another host's or in
        /// another place: what the guest acknowledged since is lost.
        #[arg(long)]
        force: bool,
        /// You have made sure that every host that does not answer is off. Without it a host that
        /// keeps no lease is not taken for dead.
        #[arg(long, requires = "force")]
        other_host_is_off: bool,
    },
    /// Make a definition of a VM that libvirt, Proxmox or QEMU runs, and say what becomes of each part.
    #[command(after_help = VM_IMPORT_HELP)]
    Import(ImportArgs),
    /// Print a VM's definition as it is on this host (TOML).
    Show {
        /// The VM's name.
        name: String,
    },
    /// Put another medium into a VM's CD-ROM drive while it runs, protected or not.
    #[command(after_help = VM_MEDIUM_HELP)]
    Medium {
        /// The VM's name.
        name: String,
        /// The drive, by its number among the disks: disk1, for example (`understudy vm show NAME`).
        #[arg(value_parser = drive)]
        drive: u16,
        /// The medium: an image file, or a block device, that every host has at the same place.
        #[arg(value_name = "FILE", required_unless_present = "eject", conflicts_with = "eject")]
        file: Option<PathBuf>,
        /// Take out what is in it, and leave it empty.
        #[arg(long)]
        eject: bool,
        /// Even if the guest has locked the drive, as it does with a medium that is mounted.
        #[arg(long)]
        force: bool,
    },
    /// Stop a VM: the guest is asked to power off.
    Stop {
        /// The VM's name.
        name: String,
        /// End it at once, as if its power had been cut.
        #[arg(long)]
        force: bool,
    },
    /// Take a snapshot of a VM while it runs.
    Snapshot {
        /// The VM's name.
        name: VmName,
        /// How it is taken.
        #[command(flatten)]
        args: SnapshotArgs,
    },
    /// Start a VM on this host as it was in a snapshot; it must not be running.
    Restore {
        /// The VM's name, and the snapshot: NAME@NUMBER; the last one without.
        #[arg(value_name = "NAME[@ID]")]
        which: Which<VmName>,
        /// How it is restored.
        #[command(flatten)]
        args: RestoreArgs,
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

/// The thing that `vm start` starts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Startable {
    /// The VM of this definition file.
    File(PathBuf),
    /// The VM of this name, as the host's record says.
    Name(String),
}

impl Startable {
    fn parse(text: &str) -> Result<Startable, Infallible> {
        let is_file = text.contains('/') || text.ends_with(".toml") || Path::new(text).is_file();
        Ok(if is_file { Startable::File(text.into()) } else { Startable::Name(text.to_owned()) })
    }
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

/// Work on certificates.
#[derive(Debug, Subcommand)]
pub enum PkiCommand {
    /// Make a certificate authority: DIR/ca.pem and DIR/ca.key.
    Init {
        /// Where it is kept.
        #[arg(long, value_name = "DIR", default_value = ".")]
        dir: PathBuf,
    },
    /// Issue a certificate for a host, the first or a newer one: NAME.pem and NAME.key.
    Issue {
        /// The host's name, as in its configuration and its peers'.
        name: String,
        /// Where the authority is kept.
        #[arg(long, value_name = "DIR", default_value = ".")]
        dir: PathBuf,
        /// For how many days it is valid.
        #[arg(long, value_name = "N", default_value_t = HOST_DAYS, value_parser = clap::value_parser!(u32).range(1..=36500))]
        days: u32,
        /// Where both are put [default: beside the authority].
        #[arg(long, value_name = "DIR")]
        out: Option<PathBuf>,
    },
    /// Revoke certificates: puts them on the list DIR/revoked.pem.
    Revoke {
        /// The host's name, for all that were issued for it; or a file that holds the certificate.
        #[arg(value_name = "NAME|FILE")]
        which: String,
        /// Where the authority is kept.
        #[arg(long, value_name = "DIR", default_value = ".")]
        dir: PathBuf,
    },
}

const LOCKSTEP_VERIFY_HELP: &str = "\
Run it on the host that the VM runs on. The guest stands still for some
milliseconds again and again, never for long. Exits with 0 if both are the same,
with 1 if they differ: then the backup has diverged and is given up, and the VM
is protected anew.

Example:
  understudy lockstep verify db --json";

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
  revoked = \"/etc/understudy/revoked.pem\"

A certificate is renewed with --out, `understudy pki issue a --out new`, and both
files put in the place of the old ones. A daemon notices new files by itself. After `understudy pki revoke a`, copy
revoked.pem to every host.

ca.key belongs on no host: whoever has it can be any host. Nothing that exists
is overwritten.";

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

SIGTERM, SIGINT or SIGHUP ends the daemon: protected VMs are handed to their backups, as
are those that are protected again within power_off_seconds; the other guests
are asked to power off (ACPI), and what still runs after power_off_seconds more is
cut, as it is at once after a second SIGTERM or SIGINT. The log says which were. A
service manager must wait for longer than both, and kill nothing else: under systemd,
which is told, KillMode=process and TimeoutStopSec=180.

All fields: /usr/share/doc/understudy/FILES.md.gz.";

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
initrd and append. Relative paths count from the definition's folder.

An argument that has a '/', ends in .toml, or is a file that exists is a
definition. Anything else is the name of a VM that this host has a record of: it
starts on the images that it ran on last, wherever a take-over or a restore has
put them (`understudy vm show NAME` prints where).

Its host is gone for good, and there is a backup of its disks: name that in a
definition, and start it with --force, which waits until a host that may run it
lets nothing out any more. Never while a host that answers has it.";

const VM_MEDIUM_HELP: &str = "\
A protected VM stays so: its backup must have the same file at the same place,
and puts it in, too. Run it on the host that the VM runs on. A drive that was
defined without a medium has its number behind the disks.

Examples:
  understudy vm medium db disk1 /srv/iso/drivers.iso
  understudy vm medium db disk1 --eject";

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

fn drive(text: &str) -> Result<u16, String> {
    let number = text.strip_prefix("disk").unwrap_or(text);
    number.parse().map_err(|_| "a drive is called like `disk1`, by its number".to_owned())
}

#[cfg(test)]
mod tests;
