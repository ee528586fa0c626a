//! Snapshots of a running group of VMs, and their fast restore (HotSnap, HotRestore). State
//! machines, formats and policies without I/O or clock, but for [`Store`]. What daemon, agent
//! and command line do with them is in docs/cluster.md.
//!
//! | question | where |
//! |---|---|
//! | how is a snapshot taken of all members, or of none? | [`Taker`], [`TakeCohort`], [`Gate`] |
//! | what makes it one moment, though each member is paused at another? | [`Cut`], [`Envelope`] |
//! | which pages will be needed first, and how many? | [`FirstAccess`], [`Sampling`], [`working_set_size`] |
//! | how are they stored, and what costs nothing? | [`Packer`], [`AreaMap`], [`Manifest`] |
//! | where, and how is that checked and cleaned up? | [`Store`], [`Retention`] |
//! | who must start before whom? | [`Segment`], [`StartOrder`] |
//! | how much is loaded before each start? | [`Mode`], [`Plan`] |
//! | how is a group restored, or not at all? | [`Restorer`], [`Cohort`] |
//! | what is read from the store next? | [`Loader`] |
//!
//! Where the order of starts differs from HotRestore's six rules is said at the head of
//! `graph.rs`.

mod contact;
mod cut;
mod format;
mod graph;
mod loader;
mod mode;
mod pack;
mod plan;
mod queue;
#[cfg(test)]
mod random;
mod restore;
mod segment;
mod store;
mod take;
mod units;

pub use contact::{Failure, REPEAT, SILENCE, Standstill};
pub use cut::{BadEnvelope, Cut, CutAction, CutEvent, ENVELOPE_BYTES, Envelope};
pub use format::{
    AreaEntry, AreaMap, BLOB_CHUNK_BYTES, BadChunk, Blob, Builder, CHUNK_UNITS, Compression,
    Extent, InFlightFrame, Machine, Malformed, Manifest, MemberEntry, MemberManifest, Page, Place,
    Unfit, WorkingSet,
};
pub use graph::{Crossing, Ring, StartOrder};
pub use loader::{Demand, Fill, Loader};
pub use mode::{BadTraceTime, BadWorkingSet, Mode, TraceTime, WorkingSetFactor};
pub use pack::{Lane, NewChunk, Packed, Packer, scattered};
pub use plan::{Load, NoPlan, Plan};
pub use queue::{Clock, FirstAccess, Recency, Sampling, Score, working_set_size};
pub use restore::{
    Cohort, CohortAction, CohortEvent, CohortPhase, Decision, Former, Line, Order, Report,
    RestoreAction, RestoreEvent, RestorePhase, Restorer,
};
pub use segment::Segment;
pub use store::{
    KeyError, Listed, NoAddress, Problem, Reading, Retention, SteadyClock, SteadyTime, Store,
    StoreAddress, StoreError, StoreKey, Swept, Verified, Writing,
};
pub use take::{
    About, Gate, Part, TakeAction, TakeCohort, TakeCohortPhase, TakeEvent, TakeOrder, TakeReport,
    Taker, TakerAction, TakerEvent, TakerPhase,
};
pub use units::{Area, BadChunkId, ChunkId, Incarnation, Member, SnapshotNumber, UNIT_BYTES};
