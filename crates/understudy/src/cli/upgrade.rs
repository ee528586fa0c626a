//! The grammar of `upgrade`.

use clap::Args;
use understudy_protocol::VmName;

pub(super) const UPGRADE_HELP: &str = "\
Run it on the host whose daemon is to be restarted, with the new program: --plan says
what a restart does to each VM, which wire versions are spoken with the other hosts,
now and by this program, and whether their QEMU takes the state of this host's VMs.
Nothing is changed. --evacuate hands over what can be, one VM after the other, also
those of keepers, and says whether anything still runs here.

A VM with a keeper (keepers = true) runs on while the daemon is restarted, and its keeper
stays of its release. --keepers replaces it then by a process of the daemon's program, one
VM after the other: the guest stands still for a moment, its connections live on, and it is
not protected until it has been brought up to date. Without names that is done to all whose
keeper runs another program than the daemon, but for backups, whose keepers come with their
VMs': so restart the daemon on each host first.

Exits with 1 if somebody must see to a VM first; the plan says to which, and how.

Example:
  apt-get install ./understudy_*.deb
  understudy upgrade --plan
  understudy upgrade --evacuate
  systemctl restart understudy
and, once that is done on each host, on each:
  understudy upgrade --keepers
or of some VMs only:
  understudy upgrade --keepers db web";

/// `upgrade`
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub struct UpgradeArgs {
    /// Say what a restart of the daemon would do to each VM; change nothing.
    #[arg(long)]
    pub plan: bool,
    /// Hand all protected VMs to their backups, one after the other, also those of keepers, and say whether
    /// anything still runs here.
    #[arg(long)]
    pub evacuate: bool,
    /// Replace the keepers of these VMs by processes of the daemon's program, while the guests run; without
    /// names those that run another one, but for backups'.
    #[arg(long, value_name = "VM", num_args = 0..)]
    pub keepers: Option<Vec<VmName>>,
}
