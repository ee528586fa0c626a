//! The reporting of faults in QEMU's memory: the synchronous kind of userfaultfd, in which whoever
//! touches a page waits until it is answered. Snapshots and restores take it; checkpoints have
//! the other kind ([`crate::Userfaultfd`]), and a range of memory has one kind at a time.

mod descriptor;
mod thread;

pub use descriptor::FaultDescriptor;
pub(crate) use descriptor::{Access, Fault, Told};
pub(crate) use thread::FaultThread;
