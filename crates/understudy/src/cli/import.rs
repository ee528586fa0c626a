//! The grammar of `vm import`.

use clap::Args;
use std::path::PathBuf;
use understudy_protocol::VmName;

pub(super) const VM_IMPORT_HELP: &str = "\
Everything in it is taken over, changed, left out or refused, each with its line and
the reason. If anything is refused there is no definition, and the exit code is 1. Nothing of
the VM is touched: shut it down where it is before you start it here.

Examples:
  understudy vm import --libvirt db --output db.toml   a domain of this host's libvirt
  understudy vm import --libvirt db.xml                of a file, to look at
  understudy vm import --proxmox 100 --bridge vmbr0=br0 --output web.toml";

/// What is imported, and where to.
#[derive(Clone, Debug, Args)]
pub struct ImportArgs {
    /// Where the VM is at home.
    #[command(flatten)]
    pub source: ImportSource,
    /// Writes the definition there, which must not exist; else it goes to stdout.
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,
    /// The VM's name here, if not the one that it has.
    #[arg(long)]
    pub name: Option<VmName>,
    /// Which bridge a network of the manager's is, on every host.
    #[arg(long, value_name = "NETWORK=BRIDGE", value_parser = pair)]
    pub bridge: Vec<(String, String)>,
    /// Where a volume of Proxmox's lies, or one of libvirt's (POOL/VOLUME).
    #[arg(long, value_name = "VOLUME=PATH", value_parser = pair)]
    pub volume: Vec<(String, String)>,
}

/// Where an imported VM is at home.
#[derive(Clone, Debug, Args)]
#[group(required = true, multiple = false)]
pub struct ImportSource {
    /// A file of libvirt's domain XML, or the name of a domain (`virsh dumpxml`).
    #[arg(long, value_name = "FILE|DOMAIN")]
    pub libvirt: Option<String>,
    /// A configuration file of Proxmox's, or a VM's number (`qm config`).
    #[arg(long, value_name = "FILE|ID")]
    pub proxmox: Option<String>,
    /// A command line of QEMU's, in one argument, as a script has it.
    #[arg(long, value_name = "ARGS", allow_hyphen_values = true)]
    pub qemu: Option<String>,
}

fn pair(text: &str) -> Result<(String, String), String> {
    let parts = text.split_once('=').filter(|(from, to)| !from.is_empty() && !to.is_empty());
    let parts = parts.map(|(from, to)| (from.to_owned(), to.to_owned()));
    parts.ok_or_else(|| format!("{text:?} has no name on each side of a ="))
}
