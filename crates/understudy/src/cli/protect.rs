//! The grammar of `protect`.

use clap::{Args, ValueEnum};
use understudy_client::ModeKind;
use understudy_encoding::{Compression, DEFAULT_CACHE_PAGES, EncodingPlan, MOST_CACHE_PAGES};
use understudy_protocol::VmName;
use understudy_protocol::{Output, Policy};
use understudy_report::DiskReads;

/// Checkpoints a second of `--policy interval` without `--hz`: Remus's own rate.
const DEFAULT_HZ: u32 = 40;

pub(super) const PROTECT_HELP: &str = "\
The VM runs on while its memory and disks are copied; from then on, nothing that
it sends leaves this host before the backup holds what led to it. Interrupting
the command does not interrupt the copy.

On a VM that is protected to the same host already, another --mode turns it to that
mode: it stays protected all through, and keeps its policy and its compression.

VMs of one group take their checkpoints together, so that what they say to each
other need not wait; only what leaves the group does. They run on one host, have
one backup, and are taken over, failed over and unprotected as one.

Examples:
  understudy protect db --to b
  understudy protect db --to b --policy interval --hz 100
  understudy protect db --to b --compression hybrid --cache-pages 65536
  understudy protect db --to b --mode lockstep
  understudy protect db --to b --mode lockstep --disk-reads log
  understudy protect db --to b --hold-console
  understudy protect db web --group shop --to b";

/// `protect`
#[derive(Debug, Args)]
pub struct ProtectArgs {
    /// The VM's name; several with --group.
    #[arg(required = true, value_name = "VM")]
    pub vms: Vec<VmName>,
    /// Protect the VMs as one group of this name.
    #[arg(long, value_name = "NAME")]
    pub group: Option<String>,
    /// The backup: one of this host's peers.
    #[arg(long, value_name = "HOST")]
    pub to: String,
    /// Replication mode.
    #[arg(long, value_name = "HOW", default_value = "checkpoint")]
    pub mode: ModeKind,
    /// In lockstep: where the backup gets what its guest reads from its disks.
    #[arg(long, value_name = "WHERE", default_value = "backup")]
    pub disk_reads: DiskReadsKind,
    /// When to checkpoint; by default what the VM's definition says, else adaptive.
    #[arg(long)]
    pub policy: Option<PolicyKind>,
    /// Checkpoints a second, 1 to 1000, of `--policy interval` (by default 40).
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub hz: Option<u32>,
    /// How written pages are encoded.
    #[arg(long, value_name = "HOW", default_value = "auto")]
    pub compression: CompressionKind,
    /// Pages of 4 KiB in the cache that deltas are made against.
    #[arg(long, value_name = "N", default_value_t = DEFAULT_CACHE_PAGES, value_parser = clap::value_parser!(u32).range(1..=i64::from(MOST_CACHE_PAGES)))]
    pub cache_pages: u32,
    /// Hold the console's output until its checkpoint is committed, too, its log included.
    #[arg(long, conflicts_with = "unheld_output")]
    pub hold_console: bool,
    /// Return as soon as the copy has begun.
    #[arg(long)]
    pub no_wait: bool,
    /// Do not look for another backup when protection is lost.
    #[arg(long)]
    pub no_repair: bool,
    /// For measurements: what the guest sends leaves at once. The VM is NOT protected then, and
    /// this exits with 3; this host's configuration must allow it under [experiments].
    #[arg(long, conflicts_with = "group")]
    pub unheld_output: bool,
}

/// Where a backup in lockstep gets what its guest reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DiskReadsKind {
    /// The backup reads its own mirrors: little travels.
    Backup,
    /// What the primary's guest read travels with the log: the backup's disks are only written.
    Log,
}

impl From<DiskReadsKind> for DiskReads {
    fn from(kind: DiskReadsKind) -> DiskReads {
        match kind {
            DiskReadsKind::Backup => DiskReads::Backup,
            DiskReadsKind::Log => DiskReads::Log,
        }
    }
}

/// Kinds of checkpoint policies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PolicyKind {
    /// As soon as there is output to release, within a pause budget.
    Adaptive,
    /// At a fixed rate.
    Interval,
}

/// Page encodings. Zero pages take no room in any.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum CompressionKind {
    /// What saves more time on the link than it costs of the CPU.
    Auto,
    /// Pages as they are.
    None,
    /// A general compressor.
    General,
    /// What changed since a page was last sent.
    Xor,
    /// What changed, and the general compressor where that does not fit.
    Hybrid,
}

impl From<CompressionKind> for Compression {
    fn from(kind: CompressionKind) -> Compression {
        match kind {
            CompressionKind::Auto => Compression::Auto,
            CompressionKind::None => Compression::None,
            CompressionKind::General => Compression::General,
            CompressionKind::Xor => Compression::Xor,
            CompressionKind::Hybrid => Compression::Hybrid,
        }
    }
}

impl ProtectArgs {
    /// The rule for what the guest sends.
    pub fn output(&self) -> Output {
        if self.unheld_output { Output::Unheld } else { Output::Held }
    }

    /// The encoding of pages.
    pub fn encoding(&self) -> EncodingPlan {
        EncodingPlan { compression: self.compression.into(), cache_pages: self.cache_pages }
    }

    /// The policy asked for, if any; or what is wrong with it.
    pub fn policy(&self) -> Result<Option<Policy>, &'static str> {
        match (self.policy, self.hz) {
            (None, None) => Ok(None),
            (Some(PolicyKind::Adaptive), None) => Ok(Some(Policy::default())),
            (Some(PolicyKind::Adaptive), Some(_)) => {
                Err("--hz is the rate of --policy interval; adaptive has none")
            }
            (Some(PolicyKind::Interval) | None, hz) => {
                Ok(Some(Policy::Interval { hz: hz.unwrap_or(DEFAULT_HZ) }))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};
    use clap::Parser;
    use understudy_report::Mode;

    fn read(line: &str) -> ProtectArgs {
        match Cli::try_parse_from(line.split_whitespace()).unwrap().command {
            Command::Protect(args) => args,
            other => panic!("{other:?} is not protect"),
        }
    }

    fn policy(line: &str) -> Result<Option<Policy>, &'static str> {
        read(line).policy()
    }

    #[test]
    fn policies_are_read() {
        assert_eq!(policy("understudy protect db --to b"), Ok(None));
        let adaptive = policy("understudy protect db --to b --policy adaptive");
        assert_eq!(adaptive, Ok(Some(Policy::default())));
        let interval = policy("understudy protect db --to b --policy interval");
        assert_eq!(interval, Ok(Some(Policy::Interval { hz: 40 })));
        let rate = policy("understudy protect db --to b --hz 100");
        assert_eq!(rate, Ok(Some(Policy::Interval { hz: 100 })));
        assert!(policy("understudy protect db --to b --policy adaptive --hz 5").is_err());
    }

    #[test]
    fn checkpoints_are_the_default() {
        let mode = |line| Mode::from(read(line).mode);
        assert_eq!(mode("understudy protect db --to b"), Mode::Checkpoint);
        assert_eq!(mode("understudy protect db --to b --mode lockstep"), Mode::Lockstep);
    }

    #[test]
    fn the_console_is_held_if_asked_for_and_not_beside_output_that_is_not() {
        assert!(!read("understudy protect db --to b").hold_console);
        assert!(read("understudy protect db web --group g --to b --hold-console").hold_console);
        let both = "understudy protect db --to b --hold-console --unheld-output";
        assert!(Cli::try_parse_from(both.split_whitespace()).is_err());
    }

    #[test]
    fn a_backup_in_lockstep_reads_its_own_disks_by_default() {
        let reads = |line| DiskReads::from(read(line).disk_reads);
        assert_eq!(reads("understudy protect db --to b --mode lockstep"), DiskReads::Backup);
        let logged = "understudy protect db --to b --mode lockstep --disk-reads log";
        assert_eq!(reads(logged), DiskReads::Log);
    }
}
