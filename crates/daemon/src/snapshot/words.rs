//! What hosts say to each other about snapshots and restores: JSON in messages of the kinds
//! `Snapshot` and `Restore`. Each order names all that it needs, since any may be the first
//! that arrives.

use serde::{Deserialize, Serialize};
use std::sync::Arc;
use understudy_protocol::Generation;
use understudy_qemu::{Accelerator, VmDefinition};
use understudy_snapshot::{
    About, AreaEntry, Blob, Compression, Life, Member, Order, Report, SnapshotNumber, TakeOrder,
    TakeReport,
};

/// Who is in a group, and where.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupPlaces {
    /// The group's name.
    pub name: String,
    /// Its members' VMs, in their order.
    pub vms: Vec<String>,
    /// The host of each.
    pub hosts: Vec<String>,
}

/// A member's part in a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TakeTask {
    /// Its group.
    pub group: GroupPlaces,
    /// Which member.
    pub member: Member,
    /// Where the snapshot is stored.
    pub store: String,
    /// How.
    pub compression: Compression,
    /// How long first accesses are traced after the pause, in milliseconds.
    pub trace_ms: u64,
    /// Whether repeated accesses are traced too, for comparison.
    pub recency: bool,
}

impl TakeTask {
    /// The member's VM.
    pub fn vm(&self) -> &str {
        &self.group.vms[self.member.index()]
    }
}

/// A member's part in a restore.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RestoreTask {
    /// Names the restore; unique.
    pub id: String,
    /// Its group, as it will be.
    pub group: GroupPlaces,
    /// Which member.
    pub member: Member,
    /// Where the snapshot is.
    pub store: String,
    /// Which one.
    pub number: SnapshotNumber,
    /// The newest generation of the VM that anybody knows.
    pub newest: Generation,
    /// The group's life from now on.
    pub life: Life,
    /// Whether the queue is by last access, not by first.
    pub by_recency: bool,
}

impl RestoreTask {
    /// The member's VM.
    pub fn vm(&self) -> &str {
        &self.group.vms[self.member.index()]
    }
}

/// From a coordinator to the host of a member.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Said {
    /// About a snapshot.
    Take(TakeTask, About<TakeOrder>),
    /// About a restore.
    Restore(RestoreTask, Order),
}

/// And back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Heard {
    /// About a snapshot.
    Take(Member, About<TakeReport>),
    /// About a restore.
    Restore(Member, Report),
}

/// Where reports go.
pub type Reply = Arc<dyn Fn(Heard) + Send + Sync>;

/// From a primary to its backup: what it has at the end of this epoch is a snapshot's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeepOrder {
    /// The snapshot's group.
    pub group: String,
    /// Which one.
    pub number: SnapshotNumber,
    /// Where it is stored.
    pub store: String,
    /// How.
    pub compression: Compression,
    /// How long first writes are noted, in milliseconds.
    pub trace_ms: u64,
}

/// And back.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kept {
    /// The snapshot's group.
    pub group: String,
    /// Which one.
    pub number: SnapshotNumber,
    /// Where it is in the store, or why it is not there.
    pub image: Result<KeptImage, String>,
}

/// All of a protected VM that its backup has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptImage {
    /// RAM blocks and disks.
    pub areas: Vec<AreaEntry>,
    /// QEMU's device state.
    pub device_state: Blob,
    /// The queue of first writes.
    pub working_set: Blob,
}

/// A VM as it is saved with its part of a snapshot.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct SavedVm {
    /// Its definition.
    pub definition: VmDefinition,
    /// What executed its instructions.
    pub accelerator: Accelerator,
}
