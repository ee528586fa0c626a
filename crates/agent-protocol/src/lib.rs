// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-or-later
//! Protocol between the daemon and the agent inside QEMU.
//!
//! 1. The agent connects to the daemon's socket while QEMU starts, and sends a [`Hello`]
//!    with [`HELLO_DESCRIPTORS`] beside it: two userfaultfds (to track writes; to be told of
//!    faults) and a socket for [`MemoryRequest`]s. From then on the end of the connection,
//!    however it comes about, ends QEMU.
//! 2. If the agent can pause the machine, the daemon may send [`ARM`], once, when QEMU's
//!    monitors answer, with three descriptors beside it: a memfd with a [`PausePage`] (and a
//!    [`DirtyArea`] behind it), a bell, at which eight bytes are read when it rings, and the
//!    file for the device state.
//! 3. A pause: the daemon writes [`Order::Begin`] into the page and rings the bell. The
//!    agent stops the machine in QEMU's main loop ([`Answer::Stopped`]), saves the device
//!    state ([`Answer::Saved`]) and waits for [`Order::Resume`] ([`Answer::Running`]) or
//!    [`Order::Stay`] ([`Answer::Staying`]). A machine that does not run is left as it is
//!    ([`Answer::Refused`]).
//! 4. On KVM the daemon asks for QEMU's dirty log ([`DirtyWish`]) through the same page, in a pause
//!    or, with the bell, outside one. What was written is in bitmaps behind the page.
//! 5. A QEMU in lockstep ([`LOCKSTEP_VARIABLE`]) shows a [`LogPage`], is asked for
//!    [`Request`]s, and is paused with a [`LogErrand`], also when it does not run. Where its log
//!    ends, [`Answer::Detached`] comes first.
//!
//! Numbers are little-endian. A machine whose agent and daemon are of different releases is
//! refused by the version in the hello, so the rest needs none.
#![allow(unsafe_code)] // Sleeping on a word of shared memory is a system call.

mod dirty;
mod hello;
mod lockstep;
mod memory;
mod page;
mod word;

pub use dirty::{
    DirtyArea, DirtyBlock, DirtyOutcome, DirtyWish, PAGES_PER_WORD, area_bytes, bitmap_words,
};
pub use hello::{Hello, HelloError};
pub use lockstep::{
    CONSOLE_VARIABLE, LOCKSTEP_VARIABLE, LOG_NAME, LogErrand, LogPage, LogRole, Request,
    TICKS_VARIABLE,
};
pub use memory::{DropRange, MOST_RANGES, MemoryRequest};
pub use page::{Answer, Order, PausePage, monotonic, time_of};
pub use word::Word;

/// Environment variable with the path of the daemon's socket.
pub const SOCKET_VARIABLE: &str = "UNDERSTUDY_AGENT";

/// Environment variable with the number of an inherited `/dev/userfaultfd`: what it makes
/// belongs to the process that asks, which thus needs no right of its own.
pub const DEVICE_VARIABLE: &str = "UNDERSTUDY_USERFAULTFD";

/// Number of descriptors beside the [`Hello`].
pub const HELLO_DESCRIPTORS: usize = 3;

/// The daemon's only message: pauses will be asked for through the descriptors beside it.
pub const ARM: [u8; 8] = *b"USTDYARM";

/// Number of descriptors beside [`ARM`].
pub const ARM_DESCRIPTORS: usize = 3;
