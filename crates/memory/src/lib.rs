//! Guest memory: which pages were written since the last checkpoint, and copies of them.
//!
//! On the primary, the [`agent`] inside QEMU hands over a [`Userfaultfd`]; [`DirtyTracker`]
//! uses it with `PAGEMAP_SCAN` to find the pages written in an epoch; [`capture`] copies
//! them into reusable buffers of a [`StagingPool`] for the sender.
//!
//! For a snapshot, a [`Guard`] has writes wait until the page is copied, and notes which pages
//! are touched first ([`Cut`]); after a restore, a [`DemandPager`] has accesses wait for what
//! is not loaded yet.
//!
//! On the backup, pages are written into [`RamBlock`]s: main memory through the shared
//! [`GuestRam`], QEMU's auxiliary blocks through its [`ProcessMemory`]. A [`StillImage`] is what
//! a snapshot reads of them while later epochs are written.
//!
//! [`probe`] tells whether this kernel can do it at all (Linux 6.7 or later).
//!
//! Paper: Remus (NSDI '08), section 2.3, "memory and CPU"; there with Xen's shadow page
//! tables in the place of userfaultfd.

pub mod agent;
mod area;
mod block;
mod capture;
mod demand;
mod descriptors;
mod dirty;
mod error;
mod fault;
mod fields;
mod guard;
mod kernel;
mod mapping;
mod mappings;
mod probe;
mod process;
mod ram;
mod staging;
mod still;
mod tracker;
mod untracked;
mod workers;

#[cfg(test)]
mod tests;

pub use area::Reprotect;
pub use block::{MAIN_MEMORY, RamBlock};
pub use capture::capture;
pub use demand::{DemandPager, Missing};
pub use descriptors::receive_with_descriptors;
pub use dirty::DirtySet;
pub use error::MemoryError;
pub use fault::FaultDescriptor;
pub use fields::{bytes_in, field_bytes};
pub use guard::{CaptureRequest, CopiedPages, Cut, FirstAccess, Guard, PageCopy, Sample};
pub use kernel::Userfaultfd;
pub use mappings::Mappings;
pub use probe::{KernelSupport, probe};
pub use process::ProcessMemory;
pub use ram::GuestRam;
pub use staging::{
    CHUNK_PAGES, CapturedChunk, CapturedPage, CapturedPages, DEFAULT_WARM_BYTES, PageStaging,
    StagingPool, warm_bytes,
};
pub use still::{StillImage, StillPage};
pub use tracker::DirtyTracker;
