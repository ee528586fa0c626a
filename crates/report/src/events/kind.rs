//! The kinds of events, how grave they are, and their sentences.

use crate::status::TakeoverReport;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::mem::discriminant;
use std::net::IpAddr;
use std::path::PathBuf;
use understudy_protocol::{GroupName, HostName};
use understudy_snapshot::SnapshotNumber;

/// Severity of an event.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "kebab-case")]
pub enum Severity {
    /// All is as it should be.
    Info,
    /// Redundancy is less than was asked for, or will be soon.
    Warning,
    /// A VM stands still, or has lost its protection.
    Error,
}

/// The kind of an event: what happened.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum EventKind {
    /// The VM was started on this host.
    Started,
    /// The VM came up with its host, or after its keeper was killed.
    CameUp,
    /// The VM is to come up with its host, and does not yet.
    StartAwaited {
        /// The reason why it waits.
        reason: String,
    },
    /// The VM was stopped.
    Stopped {
        /// Whether its power was cut.
        cut: bool,
    },
    /// The guest powered off by itself.
    PoweredOff,
    /// The guest rebooted.
    Rebooted,
    /// The guest's kernel panicked.
    GuestPanicked,
    /// QEMU ended, or does nothing.
    GuestDied {
        /// Its last words.
        reason: String,
    },
    /// The first synchronisation begins.
    Synchronising {
        /// The backup.
        peer: HostName,
    },
    /// The disks were copied.
    Copied {
        /// Bytes that were sent.
        bytes: u64,
        /// Time taken, in seconds.
        seconds: f64,
        /// The reason why all was copied; none if only what may have changed was.
        full_because: Option<String>,
    },
    /// Every output waits for the backup from now on.
    Protected {
        /// The backup.
        peer: HostName,
    },
    /// A backup follows without holding output, as asked for.
    Unheld {
        /// The backup.
        peer: HostName,
    },
    /// The backup is silent, or the VM's QEMU: the arbiter is asked.
    Contested {
        /// The reason.
        reason: String,
    },
    /// The backup could not take over now.
    BackupUnfit {
        /// The backup.
        peer: HostName,
        /// The reason.
        reason: String,
    },
    /// The backup could take over again.
    BackupFit {
        /// The backup.
        peer: HostName,
    },
    /// The VM runs alone although it should be protected.
    ProtectionLost {
        /// The reason.
        reason: String,
    },
    /// No host could be found as the next backup.
    NoBackup {
        /// The reason, host by host.
        reason: String,
    },
    /// Protection ended as asked for.
    Unprotected,
    /// This host has taken the VM over.
    TookOver {
        /// The reason.
        reason: String,
        /// The parts of its time.
        phases: TakeoverReport,
    },
    /// The VM was handed over to this host as planned.
    CameOver {
        /// The host that it came from.
        from: HostName,
        /// The parts of its time.
        phases: TakeoverReport,
    },
    /// This host has won the VM and could not start it.
    TakeOverFailed {
        /// The reason: what went wrong.
        reason: String,
    },
    /// The VM went to its backup as planned.
    HandedOver {
        /// The host that runs it now.
        peer: HostName,
    },
    /// This host's copy of the VM is halted.
    Fenced {
        /// The reason.
        reason: String,
    },
    /// The VM has another keeper, and its guest goes on.
    KeeperReplaced {
        /// The last keeper's process.
        former: u32,
        /// The process that keeps it now.
        keeper: u32,
        /// Time for which the guest stood still, in milliseconds.
        still_ms: u64,
    },
    /// The VM's last keeper has left its guest, which stands still, and no other goes on with it.
    WithoutKeeper {
        /// The reason.
        reason: String,
    },
    /// This host is the VM's backup from now on.
    StandingBy {
        /// The host that runs it.
        primary: HostName,
    },
    /// This host is its backup no more.
    StoodDown,
    /// A path to the other host is down.
    PathDown {
        /// The path.
        path: String,
        /// The reason.
        reason: String,
        /// Paths that are left.
        left: usize,
        /// All paths.
        all: usize,
    },
    /// The path is up again.
    PathUp {
        /// The path.
        path: String,
        /// Paths that are up.
        up: usize,
        /// All paths.
        all: usize,
    },
    /// A disk of the VM fails.
    DiskError {
        /// The disk and its error.
        error: String,
        /// The outcome for the guest.
        outcome: String,
    },
    /// The VM runs here alone, another host has a copy, and this host could not show the arbiter
    /// that it lives: the guest stands still.
    LeaseRanOut {
        /// The reason.
        reason: String,
    },
    /// The VM is still this host's, and goes on.
    LeaseRenewed,
    /// This host, or its daemon, did nothing for a while.
    StoodStill {
        /// Time for which they did, in seconds.
        seconds: f64,
        /// Whether its clocks stood still, too, so that only other hosts could tell.
        clocks_too: bool,
    },
    /// A CD-ROM drive has another medium.
    MediumChanged {
        /// The drive, like `disk1`.
        drive: String,
        /// The medium in it; none if it is empty.
        medium: Option<PathBuf>,
    },
    /// A snapshot was taken.
    Snapshot {
        /// The VM or group.
        group: GroupName,
        /// Its number. Not `number`, which the event has.
        #[serde(rename = "snapshot")]
        number: SnapshotNumber,
        /// The store where it is.
        store: String,
    },
    /// A snapshot that was due was not taken.
    SnapshotFailed {
        /// The VM or group.
        group: GroupName,
        /// The reason.
        reason: String,
    },
    /// Nothing is removed from a snapshot store any more, whatever is deleted.
    NotSwept {
        /// The store.
        store: String,
        /// The reason.
        reason: String,
    },
    /// The VM runs as of a snapshot.
    Restored {
        /// The VM or group that was restored.
        group: GroupName,
        /// The snapshot.
        #[serde(rename = "snapshot")]
        number: SnapshotNumber,
    },
    /// Wrong tokens in great number have come to the API from one address, from which none counts
    /// for a while.
    WrongTokens {
        /// The address.
        from: IpAddr,
    },
    /// The certificate of this host has to be seen to.
    Certificate {
        /// The problem, and what to do.
        problem: String,
    },
    /// The arbiter cannot be used.
    ArbiterLost {
        /// The reason.
        reason: String,
    },
    /// The arbiter can be used again.
    ArbiterFound {
        /// The arbiter, by its kind and place.
        arbiter: String,
    },
    /// A note of something else.
    Note {
        /// The sentence. Not `text`, which every event has.
        #[serde(rename = "note")]
        text: String,
    },
}

impl EventKind {
    /// The severity of the event.
    pub fn severity(&self) -> Severity {
        use EventKind::*;
        match self {
            Contested { .. }
            | BackupUnfit { .. }
            | StartAwaited { .. }
            | Unheld { .. }
            | NoBackup { .. }
            | TookOver { .. }
            | PathDown { .. }
            | Certificate { .. }
            | WrongTokens { .. }
            | GuestPanicked
            | StoodStill { .. }
            | SnapshotFailed { .. }
            | NotSwept { .. } => Severity::Warning,
            ProtectionLost { .. }
            | TakeOverFailed { .. }
            | Fenced { .. }
            | GuestDied { .. }
            | DiskError { .. }
            | LeaseRanOut { .. }
            | WithoutKeeper { .. }
            | ArbiterLost { .. } => Severity::Error,
            _ => Severity::Info,
        }
    }

    /// Whether it changes where the VM runs or how it is protected.
    pub fn is_a_turn(&self) -> bool {
        use EventKind::*;
        matches!(
            self,
            Started
                | Stopped { .. }
                | PoweredOff
                | Synchronising { .. }
                | Protected { .. }
                | Unheld { .. }
                | Contested { .. }
                | BackupUnfit { .. }
                | BackupFit { .. }
                | ProtectionLost { .. }
                | Unprotected
                | TookOver { .. }
                | CameOver { .. }
                | TakeOverFailed { .. }
                | HandedOver { .. }
                | Fenced { .. }
                | LeaseRanOut { .. }
                | LeaseRenewed
                | WithoutKeeper { .. }
                | StandingBy { .. }
                | Restored { .. }
        )
    }
}

impl EventKind {
    /// Whether this says of something that goes on what `other` has said of it: what they have measured may differ.
    pub fn says_the_same(&self, other: &EventKind) -> bool {
        if discriminant(self) != discriminant(other) {
            return false;
        }
        let (own, others) = (self.to_string(), other.to_string());
        own.split_whitespace().map(word).eq(others.split_whitespace().map(word))
    }
}

/// A word, whose number does not count if it is one by itself: `host-2` and `disk1` are names.
fn word(word: &str) -> &str {
    let bare = word.trim_matches(|c: char| c.is_ascii_punctuation());
    let is_number = bare.starts_with(|c: char| c.is_ascii_digit()) && bare.parse::<f64>().is_ok();
    if is_number { "N" } else { word }
}

impl fmt::Display for EventKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        use EventKind::*;
        match self {
            Started => write!(f, "started"),
            CameUp => write!(f, "came up by itself"),
            StartAwaited { reason } => write!(f, "does not come up with its host yet: {reason}"),
            Stopped { cut: false } => write!(f, "stopped"),
            Stopped { cut: true } => write!(f, "its power was cut"),
            PoweredOff => write!(f, "the guest powered off"),
            Rebooted => write!(f, "the guest rebooted"),
            GuestPanicked => write!(f, "the guest's kernel panicked"),
            GuestDied { reason } => write!(f, "QEMU ended: {reason}"),
            Synchronising { peer } => write!(f, "protection to {peer} begins"),
            KeeperReplaced { former, keeper, still_ms } => write!(
                f,
                "keeper {former} is replaced by {keeper}; the guest stood still for {still_ms} ms"
            ),
            WithoutKeeper { reason } => {
                write!(f, "the guest stands still, left by its last keeper: {reason}")
            }
            Copied { bytes, seconds, full_because } => {
                let mib = *bytes as f64 / f64::from(1 << 20);
                write!(f, "{mib:.1} MiB of disks copied in {seconds:.1} s: ")?;
                match full_because {
                    Some(why) => write!(f, "all data, {why}"),
                    None => write!(f, "only what had changed"),
                }
            }
            Protected { peer } => write!(f, "protected: {peer} stands by"),
            Unheld { peer } => write!(
                f,
                "NOT PROTECTED: {peer} follows, but output is not held, as asked for; a fail-over \
                 undoes what clients have seen"
            ),
            // Why is told with what the arbiter decides, mostly a moment later.
            Contested { .. } => write!(f, "output is held until the arbiter decides who goes on"),
            BackupUnfit { peer, reason } => {
                write!(f, "host {peer} could not take over now: {reason}")
            }
            BackupFit { peer } => write!(f, "host {peer} could take over again"),
            ProtectionLost { reason } => write!(f, "not protected any more: {reason}"),
            NoBackup { reason } => write!(f, "still unprotected: {reason}"),
            Unprotected => write!(f, "protection ended as asked for"),
            TookOver { reason, phases } => {
                write!(f, "took over: {reason}; clients waited {:.0} ms at most", phases.outage_ms)
            }
            CameOver { from, phases } => {
                let ms = phases.outage_ms;
                write!(f, "came over from {from} as planned; clients waited {ms:.0} ms at most")
            }
            TakeOverFailed { reason } => write!(f, "won the VM and could not start it: {reason}"),
            HandedOver { peer } => write!(f, "handed over to {peer}, which runs it now"),
            Fenced { reason } => write!(f, "does not run here any more: {reason}"),
            StandingBy { primary } => write!(f, "standing by for {primary}"),
            StoodDown => write!(f, "this host is its backup no more"),
            PathDown { path, reason, left, all } => write!(
                f,
                "{path} is down: {reason}; redundancy is degraded: {left} of {all} paths left"
            ),
            PathUp { path, up, all } => write!(f, "{path} is up again: {up} of {all} paths"),
            DiskError { error, outcome } => write!(f, "{error}; {outcome}"),
            LeaseRanOut { reason } => write!(f, "the guest stands still: {reason}"),
            LeaseRenewed => {
                write!(f, "the guest goes on: the arbiter says that it is still this host's")
            }
            StoodStill { seconds, clocks_too } => {
                let how = match clocks_too {
                    false => "it slept, or it, or its daemon, was stopped",
                    true => "its clocks, too, as other hosts' tell: its hypervisor was paused",
                };
                write!(f, "this host stood still for about {seconds:.1} s ({how})")
            }
            MediumChanged { drive, medium: Some(medium) } => {
                write!(f, "{drive} has {} in it", medium.display())
            }
            MediumChanged { drive, medium: None } => write!(f, "{drive} is empty"),
            Snapshot { group, number, store } => {
                write!(f, "snapshot {number} of {group} is in {store}")
            }
            SnapshotFailed { group, reason } => {
                write!(f, "the snapshot of {group} that was due: {reason}")
            }
            NotSwept { store, reason } => {
                write!(f, "nothing is removed from the snapshot store {store} any more: {reason}")
            }
            Restored { group, number } => write!(f, "runs as of snapshot {number} of {group}"),
            WrongTokens { from } => write!(
                f,
                "{from} shows wrong tokens to the API: none counts from there for a minute; see who \
                 that is"
            ),
            Certificate { problem } => write!(f, "{problem}"),
            ArbiterLost { reason } => write!(f, "{reason}"),
            ArbiterFound { arbiter } => write!(f, "arbiter: {arbiter} again"),
            Note { text } => write!(f, "{text}"),
        }
    }
}
