//! Stock QEMU: VM definitions, command line, QMP, capabilities of the installed build.
//!
//! From top to bottom, the life of a VM on one host:
//! - [`definition`]: what the user wrote, checked;
//! - [`programs`]: where QEMU and the agent library are found;
//! - [`capabilities`]: what the installed QEMU can do, and [`cache`]: what it said before; [`Installed`]: whether it is still that;
//! - [`processor`]: the processor that the guest sees, and whether a host has it;
//! - [`tsc`]: the rate of its time stamp counter, and whether a host has that;
//! - [`command`]: the command line, a pure function of definition and resources;
//! - [`release`]: whether two of them read each other's device state;
//! - [`user`]: who it runs as;
//! - [`lockstep`]: what lockstep needs of it, and the way of its log;
//! - [`counting`]: the device state of a VM that is moved into a QEMU that counts instructions;
//! - [`tpm_state`]: the part of it that outlives a TPM's power-off;
//! - [`process`]: the running QEMU and its end;
//! - [`qmp`]: its monitor: checkpoints, resumption, events;
//! - [`pause`]: the pause of a checkpoint through the agent inside QEMU;
//! - [`dirty_log`]: what a guest on KVM has written, through the same agent;
//! - [`urgency`]: priority for the length of a checkpoint's pause.

mod build_id;
pub mod cache;
pub mod capabilities;
mod clock;
pub mod command;
pub mod counting;
pub mod definition;
pub mod directory;
pub mod dirty_log;
pub mod hold;
mod installed;
mod kvm;
pub mod lockstep;
pub mod pause;
pub mod process;
pub mod processor;
pub mod programs;
pub mod qmp;
pub mod release;
pub mod tpm_state;
pub mod tsc;
pub mod urgency;
pub mod user;

pub use build_id::{build_id, peer_obstacle};
pub use capabilities::{Accelerator, Capabilities};
pub use clock::{ClockBase, TickRate};
pub use command::{Resources, Role, command_line};
pub use definition::{CheckedDefinition, DefinitionError, VmDefinition};
pub use installed::Installed;
pub use kvm::{Kvm, Obstacle};
pub use pause::AgentPauser;
pub use process::Qemu;
pub use processor::{CpuNeeds, Vendor};
pub use qmp::Monitor;
pub use release::Release;
pub use urgency::Urgency;
pub use user::RunAs;
