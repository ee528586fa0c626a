//! The requests to the daemon.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use understudy_encoding::EncodingPlan;
use understudy_protocol::{Output, Policy, VmName};

/// The mode in which a backup keeps up with a VM.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// Checkpoints: the backup gets what the guest wrote, as of a moment, many times a second (Remus).
    #[default]
    Checkpoint,
    /// Lockstep: the backup executes the guest's instructions too, with the same inputs (VMware FT).
    Lockstep,
}

impl Mode {
    /// Whether it is the default.
    pub fn is_checkpoint(&self) -> bool {
        *self == Mode::Checkpoint
    }
}

/// The source from which a backup in lockstep gets what its guest reads from its disks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "kebab-case")]
pub enum DiskReads {
    /// The backup reads its own mirrors.
    #[default]
    Backup,
    /// Data that the primary's guest read travel with the log.
    Log,
}

impl DiskReads {
    /// Whether it is the default.
    pub fn is_backup(&self) -> bool {
        *self == DiskReads::Backup
    }
}

/// The request of `protect`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ProtectRequest {
    /// The backup's host name, one of the hosts that this one knows.
    pub to: String,
    /// The mode in which the backup keeps up.
    #[serde(default, skip_serializing_if = "Mode::is_checkpoint")]
    pub mode: Mode,
    /// The source from which a backup in lockstep gets what its guest reads from its disks.
    #[serde(default, skip_serializing_if = "DiskReads::is_backup")]
    pub disk_reads: DiskReads,
    /// The policy; the VM definition's, else the default, when absent.
    pub policy: Option<Policy>,
    /// The encoding of pages.
    #[serde(default)]
    pub encoding: EncodingPlan,
    /// Whether protection that is lost is restored with another backup.
    #[serde(default = "restored")]
    pub repair: bool,
    /// Whether output waits for its commit. Without that the VM is not protected: the host's
    /// configuration must allow it.
    #[serde(default, skip_serializing_if = "Output::is_held")]
    pub output: Output,
    /// Whether what the guest says on its console waits for its commit, too.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub hold_console: bool,
}

impl ProtectRequest {
    /// The options with which `understudy protect` asks for it.
    pub fn options(&self) -> String {
        let mut options = format!("--to {}", self.to);
        let mut add = |is_so: bool, option: &str| {
            if is_so {
                options += " ";
                options += option;
            }
        };
        add(!self.mode.is_checkpoint(), "--mode lockstep");
        add(!self.disk_reads.is_backup(), "--disk-reads log");
        match self.policy {
            Some(Policy::Interval { hz }) => add(true, &format!("--policy interval --hz {hz}")),
            // Other numbers are the definition's: no option says them.
            Some(policy) => add(policy == Policy::default(), "--policy adaptive"),
            None => {}
        }
        let EncodingPlan { compression, cache_pages } = self.encoding;
        let usual = EncodingPlan::default();
        add(compression != usual.compression, &format!("--compression {compression}"));
        add(cache_pages != usual.cache_pages, &format!("--cache-pages {cache_pages}"));
        add(self.hold_console, "--hold-console");
        add(!self.repair, "--no-repair");
        add(!self.output.is_held(), "--unheld-output");
        options
    }
}

fn restored() -> bool {
    true
}

/// The request to protect a VM again as it was.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AgainRequest {
    /// The backup's host name, one of the hosts that this one knows.
    pub to: String,
}

/// The request of `vm medium`.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct MediumRequest {
    /// The CD-ROM drive: its number among the VM's disks.
    pub drive: u16,
    /// The file to put in, at the same place on every host; none to take out what is in.
    pub medium: Option<PathBuf>,
    /// Whether a drive that the guest has locked is opened, too.
    #[serde(default)]
    pub force: bool,
}

/// The request of `protect --group`.
#[derive(Clone, Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct GroupRequest {
    /// The VMs, at least two.
    pub vms: Vec<VmName>,
    /// The backup's host name, one of the hosts that this one knows.
    pub to: String,
    /// The group's policy; when absent that of the VMs' definitions, which must agree.
    pub policy: Option<Policy>,
    /// The encoding of their pages.
    #[serde(default)]
    pub encoding: EncodingPlan,
    /// Whether protection that is lost is restored with another backup, of all of them.
    #[serde(default = "restored")]
    pub repair: bool,
    /// Whether what their guests say on their consoles waits for its commit, too.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub hold_console: bool,
}

/// The request of `vm start`, which starts the VM of a definition.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct StartRequest {
    /// Whether to start it on the definition's images, whatever is known of others: what the guest
    /// acknowledged since is lost.
    #[serde(default)]
    pub force: bool,
    /// The operator knows that no silent host runs the VM.
    #[serde(default)]
    pub other_host_is_off: bool,
}

/// The request of `recover`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct RecoverRequest {
    /// Name the valid images, and start nothing.
    pub dry_run: bool,
    /// Whether to start the VM on this host's images, whatever is known of them.
    pub force: bool,
    /// The operator knows that no silent host runs the VM.
    #[serde(default)]
    pub other_host_is_off: bool,
}
