// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-or-later
//! Protocol of lockstep: what the agent is told at its start, what it is asked for, what it shows.

use crate::page::monotonic;
use std::sync::atomic::{AtomicU64, Ordering};

/// Environment variable with `ROLE,LOG,PAGE,CONTROL`: `record` or `replay`, then the numbers of
/// inherited descriptors: the log's socket, a memfd with a [`LogPage`], and the socket on which
/// [`Request`]s come.
pub const LOCKSTEP_VARIABLE: &str = "UNDERSTUDY_LOCKSTEP";

/// Environment variable with the number of the descriptor that a QEMU in lockstep has its guest's
/// console on; without it, it has none.
pub const CONSOLE_VARIABLE: &str = "UNDERSTUDY_CONSOLE";

/// Environment variable with the rate of the guest's time stamp counter, in ticks in 2^32 ns;
/// without it, it counts nanoseconds.
pub const TICKS_VARIABLE: &str = "UNDERSTUDY_TICKS";

/// The log's name for QEMU (`rrfile=`). No file of that name is ever opened.
pub const LOG_NAME: &str = "understudy-log";

/// Task of a QEMU in lockstep with its log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogRole {
    /// A primary: writes it.
    Record,
    /// A backup: executes it.
    Replay,
}

impl LogRole {
    /// Name in QEMU and in [`LOCKSTEP_VARIABLE`].
    pub fn name(self) -> &'static str {
        match self {
            LogRole::Record => "record",
            LogRole::Replay => "replay",
        }
    }

    /// The role of that name.
    pub fn from_name(name: &str) -> Option<LogRole> {
        [LogRole::Record, LogRole::Replay].into_iter().find(|role| role.name() == name)
    }
}

/// Request to the agent on its control socket: one byte, answered by eight: the bytes of
/// log that have passed it so far, or [`Request::REFUSED`]. All but [`Request::Detach`],
/// [`Request::Hold`] and [`Request::LetGo`] are done in QEMU's main loop, which on a backup may be
/// waiting for log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Request {
    /// Detaches the log of a primary, which has no backup any more: it goes nowhere from here on.
    Detach = b'd',
    /// Flushes the log of a primary up to this instruction.
    Flush = b's',
    /// Halts a primary at a place of the log, as soon as the main loop comes to it, without
    /// stopping the machine, which would be no part of the log. Answered at once, with the
    /// number of the hold: the [`LogPage`] shows when the machine stands still, and where.
    Hold = b'h',
    /// Lets a primary go: the hold has ended, or is not wanted any more.
    LetGo = b'g',
    /// Lets a backup, loaded and stopped, follow the log, which comes from the daemon from here on.
    /// Waits for its first bytes.
    Follow = b'f',
    /// Lets a backup, stopped at the end of its log, go live: an ordinary machine from here on.
    GoLive = b'l',
}

impl Request {
    /// The answer to what the agent cannot do in its role.
    pub const REFUSED: u64 = u64::MAX;

    /// The request with this number.
    pub fn from_byte(byte: u8) -> Option<Request> {
        use Request::*;
        [Detach, Flush, Hold, LetGo, Follow, GoLive]
            .into_iter()
            .find(|&request| request as u8 == byte)
    }
}

/// Errand of a pause with the log of a primary, in QEMU's main loop, between stopping the
/// machine and letting it go.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u32)]
pub enum LogErrand {
    /// No errand.
    #[default]
    None = 0,
    /// The log goes to the daemon from the device state of this pause on: the two are what a
    /// backup needs.
    Attach = 1,
    /// The log goes to nowhere from the instruction of this pause on. The frames that the
    /// machine has sent since the last log was read are covered by the device state and the
    /// memory of this pause, not by the log.
    Detach = 2,
}

impl LogErrand {
    /// The errand with this number.
    pub fn from_number(number: u32) -> Option<LogErrand> {
        use LogErrand::*;
        [None, Attach, Detach].into_iter().find(|&errand| errand as u32 == number)
    }
}

/// View of the log that the daemon has without asking. The agent alone writes.
#[derive(Debug, Default)]
#[repr(C)]
pub struct LogPage {
    /// Bytes of log that a primary's QEMU has written and that left through the agent, or that a
    /// backup's QEMU has taken, without what its buffer still holds.
    pub position: AtomicU64,
    /// Time since which QEMU stands still for the log (primary: no room, backup: none left), in
    /// nanoseconds of the monotonic clock; 0 if it does not.
    pub blocked_since: AtomicU64,
    /// Nanoseconds that it stood still, without the present wait.
    pub blocked: AtomicU64,
    /// Instructions executed, as of the last event.
    pub instructions: AtomicU64,
    /// Kind of the event that replay waits to execute.
    pub event: AtomicU64,
    /// Frames that the guest has sent.
    pub frames: AtomicU64,
    /// Number of the [`Request::Hold`] for which the primary stands still; 0 if it does not. The
    /// following fields are of that hold.
    pub held: AtomicU64,
    /// Bytes of log, since it was attached, that lead to where it stands.
    pub held_position: AtomicU64,
    /// Instructions executed there.
    pub held_instructions: AtomicU64,
    /// Requests to disks begun there, since the log was attached.
    pub held_disk_requests: AtomicU64,
}

impl LogPage {
    /// Size of the memfd.
    pub const BYTES: usize = 4096;

    /// QEMU begins to stand still, unless it does already.
    pub fn begin_block(&self) {
        let (begun, waits) = (Ordering::Release, Ordering::Relaxed);
        let _ = self.blocked_since.compare_exchange(0, monotonic(), begun, waits);
    }

    /// Ends the standstill, if QEMU stands still.
    pub fn end_block(&self) {
        let since = self.blocked_since.swap(0, Ordering::AcqRel);
        if since != 0 {
            self.blocked.fetch_add(monotonic().saturating_sub(since), Ordering::Relaxed);
        }
    }
}

const _: () = assert!(size_of::<LogPage>() <= LogPage::BYTES);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_is_understood() {
        use Request::*;
        for request in [Detach, Flush, Hold, LetGo, Follow, GoLive] {
            assert_eq!(Request::from_byte(request as u8), Some(request));
        }
        assert_eq!(Request::from_byte(b'x'), None);
        for errand in [LogErrand::None, LogErrand::Attach, LogErrand::Detach] {
            assert_eq!(LogErrand::from_number(errand as u32), Some(errand));
        }
        assert_eq!(LogErrand::from_number(3), None);
        assert_eq!(LogRole::from_name("replay"), Some(LogRole::Replay));
        assert_eq!(LogRole::from_name("rewind"), None);
    }

    #[test]
    fn the_time_of_a_wait_is_counted_once_it_is_over() {
        let page = LogPage::default();
        page.end_block();
        assert_eq!(page.blocked.load(Ordering::Relaxed), 0);
        page.begin_block();
        assert_ne!(page.blocked_since.load(Ordering::Relaxed), 0);
        page.end_block();
        assert_eq!(page.blocked_since.load(Ordering::Relaxed), 0);
    }
}
