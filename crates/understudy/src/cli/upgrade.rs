//! The grammar of `upgrade`.

use clap::Args;

pub(super) const UPGRADE_HELP: &str = "\
Run it on the host whose daemon is to be restarted, with the new program: --plan says
what a restart does to each VM, which wire versions are spoken with the other hosts,
now and by this program, and whether their QEMU takes the state of this host's VMs.
Nothing is changed. --evacuate hands over what can be, one VM after the other, and
says whether the daemon may be restarted.

Exits with 1 if somebody must see to a VM first; the plan says to which, and how.

Example:
  apt-get install ./understudy_*.deb
  understudy upgrade --plan
  understudy upgrade --evacuate
  systemctl restart understudy";

/// `upgrade`
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
pub struct UpgradeArgs {
    /// Say what a restart of the daemon would do to each VM; change nothing.
    #[arg(long)]
    pub plan: bool,
    /// Hand all protected VMs to their backups, one after the other, and say whether the daemon may be
    /// restarted.
    #[arg(long)]
    pub evacuate: bool,
}
