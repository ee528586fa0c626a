//! The grammar of `cluster`, `vm snapshot` and `vm restore`.

use clap::{Args, Subcommand};
use std::str::FromStr;
use understudy_protocol::{GroupName, HostName, NameError};
use understudy_report::cluster::{RestoreRequest, SnapshotRequest};
use understudy_snapshot::{Compression, Mode, SnapshotNumber, TraceTime, WorkingSetFactor};

pub(super) const CLUSTER_HELP: &str = "\
A cluster is several VMs that are snapshotted, and restored, as one; each of its
hosts has it in its configuration:

  [cluster.shop]
  members = { web = \"a\", db = \"b\" }   # VMs, and the host that each belongs on
  store = \"/srv/snapshots\"            # that all hosts reach

A schedule, on one host only: every_minutes = 60, keep = 24, keep_hours = 48.
Snapshots with a label are never deleted by it.

Examples:
  understudy cluster snapshot shop --label before-upgrade
  understudy cluster snapshots shop
  understudy cluster verify shop@3
  understudy cluster restore shop@3
  understudy cluster restore shop --onto c,d --mode hot --working-set 0.7
  understudy cluster delete shop@2";

/// Work on clusters.
#[derive(Debug, Subcommand)]
pub enum ClusterCommand {
    /// Take a snapshot of all its VMs as of one moment, while they run.
    Snapshot {
        /// The cluster's name.
        name: GroupName,
        /// How it is taken.
        #[command(flatten)]
        args: SnapshotArgs,
    },
    /// Start all its VMs as they were in a snapshot; none may be running.
    Restore {
        /// The cluster's name, and the snapshot: NAME@NUMBER; the last one without.
        #[arg(value_name = "NAME[@ID]")]
        which: Which<GroupName>,
        /// The hosts to restore on; by default where the VMs ran.
        #[arg(long, value_name = "HOSTS", value_delimiter = ',')]
        onto: Vec<HostName>,
        /// How it is restored.
        #[command(flatten)]
        args: RestoreArgs,
    },
    /// List the snapshots.
    Snapshots {
        /// The cluster's name; all without.
        name: Option<GroupName>,
        /// Where they are; by default the cluster's store.
        #[arg(long, value_name = "URL", value_parser = location)]
        store: Option<String>,
    },
    /// Delete a snapshot.
    Delete {
        /// The cluster's name and the snapshot's number.
        #[arg(value_name = "NAME@ID")]
        which: Which<GroupName>,
        /// Where it is; by default the cluster's store.
        #[arg(long, value_name = "URL", value_parser = location)]
        store: Option<String>,
        /// Even while a host restores from it, so far as the store knows: a guest that still needs it
        /// stands still for good.
        #[arg(long)]
        force: bool,
    },
    /// Read and check every chunk of a snapshot.
    #[command(after_help = "Exits with 1 if the snapshot cannot be restored.")]
    Verify {
        /// The cluster's name, and the snapshot's number; the last one without.
        #[arg(value_name = "NAME[@ID]")]
        which: Which<GroupName>,
        /// Where it is; by default the cluster's store.
        #[arg(long, value_name = "URL", value_parser = location)]
        store: Option<String>,
    },
}

/// How a snapshot is taken.
#[derive(Debug, Args)]
pub struct SnapshotArgs {
    /// Where it goes: a directory or a URL; by default the cluster's store.
    #[arg(long, value_name = "URL", value_parser = location)]
    pub store: Option<String>,
    /// A label; a labelled snapshot is never deleted by a schedule.
    #[arg(long, value_name = "TEXT")]
    pub label: Option<String>,
    /// Compression: none or lz4.
    #[arg(long, value_name = "HOW", default_value = "lz4", value_parser = Compression::from_str)]
    pub compression: Compression,
    /// Seconds, 0 to 60, for which the pages that the guest touches first are traced; they are loaded
    /// first at a restore.
    #[arg(long, value_name = "SECONDS", default_value = "7", value_parser = TraceTime::from_str)]
    pub trace: TraceTime,
    /// Trace repeated accesses too, for `restore --mode working-set`.
    #[arg(long)]
    pub recency: bool,
}

impl SnapshotArgs {
    /// The request as the daemon is asked.
    pub fn request(&self) -> SnapshotRequest {
        SnapshotRequest {
            store: self.store.clone(),
            label: self.label.clone(),
            compression: self.compression,
            trace_ms: Some(self.trace),
            recency: self.recency,
        }
    }
}

/// How a snapshot is restored.
#[derive(Debug, Args)]
pub struct RestoreArgs {
    /// Where it is; by default the cluster's store.
    #[arg(long, value_name = "URL", value_parser = location)]
    pub store: Option<String>,
    /// eager, lazy, working-set, hot-no-line or hot.
    #[arg(long, value_name = "M", default_value = "hot", value_parser = Mode::from_str)]
    pub mode: Mode,
    /// Share of the working set that is loaded before the start, 0 to 2.
    #[arg(long, value_name = "F", default_value = "0.5", value_parser = WorkingSetFactor::from_str)]
    pub working_set: WorkingSetFactor,
    /// Hosts that do not answer are down for good: what they ran does not run any more.
    #[arg(long)]
    pub force: bool,
    /// Return only when all of the memory is loaded.
    #[arg(long)]
    pub wait: bool,
}

impl RestoreArgs {
    /// The request as the daemon is asked.
    pub fn request(&self, number: Option<SnapshotNumber>, onto: &[HostName]) -> RestoreRequest {
        RestoreRequest {
            number,
            store: self.store.clone(),
            mode: self.mode,
            working_set: self.working_set,
            onto: onto.to_vec(),
            force: self.force,
            wait: self.wait,
        }
    }
}

/// A group, and a snapshot of it if one is named.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Which<N> {
    /// The group, or the VM.
    pub name: N,
    /// The snapshot.
    pub number: Option<SnapshotNumber>,
}

impl<N: FromStr<Err = NameError>> FromStr for Which<N> {
    type Err = String;

    fn from_str(text: &str) -> Result<Which<N>, String> {
        let parse = |name: &str| name.parse().map_err(|error: NameError| error.to_string());
        let Some((name, number)) = text.split_once('@') else {
            return Ok(Which { name: parse(text)?, number: None });
        };
        let number = number.parse().map_err(|_| {
            format!("{number:?} is no snapshot's number; write for example {name}@3")
        })?;
        Ok(Which { name: parse(name)?, number: Some(SnapshotNumber(number)) })
    }
}

/// A path is the caller's, not the daemon's.
fn location(text: &str) -> Result<String, String> {
    if text.contains("://") {
        return Ok(text.to_owned());
    }
    let path = std::path::absolute(text).map_err(|error| error.to_string())?;
    Ok(path.display().to_string())
}
