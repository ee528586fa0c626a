//! The grammar of `vm`.

use super::import::{ImportArgs, VM_IMPORT_HELP};
use super::snapshot::{RestoreArgs, SnapshotArgs, Which};
use clap::Subcommand;
use std::convert::Infallible;
use std::path::{Path, PathBuf};
use understudy_protocol::VmName;

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

pub(super) const VM_START_HELP: &str = "\
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

fn drive(text: &str) -> Result<u16, String> {
    let number = text.strip_prefix("disk").unwrap_or(text);
    number.parse().map_err(|_| "a drive is called like `disk1`, by its number".to_owned())
}
