//! The machine that a guest runs on, on one host: [`Machine`], a QEMU with everything around it.
//!
//! | part | what it owns |
//! |---|---|
//! | [`Machine`] (`machine`, `launch`, `process`) | QEMU's process and monitor, the guest's memory, disks and ports |
//! | `watching`, `tracking` | how writes to its memory are seen: scans, KVM's log, or a snapshot's guard |
//! | [`pause`] | stop, save devices, go on: by the agent, else by QMP |
//! | [`attention`] | whether QEMU does its work |
//! | [`disk_error`] | a guest that stands still at an error of its disk |
//! | [`home`] | the directory that QEMU works in, and what it is handed open |
//! | `hearing` | what QEMU says by itself |
//! | `running` | whether the guest runs between checkpoints: held, passed on, let go |
//! | [`console`] | what the guest says on its serial console: held, logged, relayed |
//! | [`succession`] | a guest moved to another QEMU on this host |
//! | `medium` | the medium of a CD-ROM drive, changed while the guest runs |
//! | [`tpm`] | its TPM, a process, and that TPM's state on this host's disk |
//! | [`custody`] | a guest that may not end with its daemon |
//! | [`cgroup`] | how much of a processor its vCPUs get, and of memory and threads its QEMU |
//!
//! It knows nothing of other hosts: what has to happen to a guest, and when, is its caller's.

mod adopt;
pub mod attention;
#[cfg(feature = "fail-points")]
pub mod booted;
pub mod cgroup;
pub mod console;
pub mod custody;
pub mod disk_error;
pub mod doorbell;
mod hearing;
pub mod home;
mod launch;
mod machine;
mod medium;
pub mod pause;
mod process;
pub mod qemu_log;
mod running;
pub mod succession;
pub mod tpm;
mod tracking;
mod watching;

pub use adopt::{Adoption, MachineNote, NotUnderstood};
pub use launch::Plan;
pub use machine::{Machine, MachineEvent, OnEvent};
pub use medium::Medium;
pub use tracking::{LogTracker, Tracker, main_memory};
pub use watching::Tracking;
