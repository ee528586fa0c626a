// SPDX-License-Identifier: Apache-2.0 OR GPL-2.0-or-later
//! The page of memory over which a pause is arranged.

use crate::{DirtyOutcome, DirtyWish, LogErrand, Word};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// Order of the daemon for a pause; see [`PausePage::order`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Order {
    /// Stops the machine and saves its device state; the bell is rung, too.
    Begin = 1,
    /// Lets it run again.
    Resume = 2,
    /// Leaves the machine stopped.
    Stay = 3,
}

/// Progress of the agent; the number is what [`PausePage::answer`] holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Answer {
    /// Nothing has happened yet.
    None = 0,
    /// The machine stands still, its disk requests are answered.
    Stopped = 1,
    /// The device state is in its file.
    Saved = 2,
    /// The device state could not be saved, or what a disk's format kept back could not be written; QEMU has said
    /// why. The machine stands still.
    NotSaved = 3,
    /// The machine runs again: the end of a pause.
    Running = 4,
    /// The machine is left stopped, or was stopped before: the end of a pause.
    Staying = 5,
    /// Nothing was done. The machine did not run, for another reason than a pause, and is
    /// not in lockstep; or it is not in the role for the errand.
    Refused = 6,
    /// End of the log with [`LogErrand::Detach`], before [`Answer::Stopped`]: all of it has left
    /// QEMU, and its requests to disks are waited for.
    Detached = 7,
}

impl Answer {
    /// The answer with this number, if there is one: the number comes from QEMU.
    pub fn from_number(number: u32) -> Option<Answer> {
        use Answer::*;
        let all = [None, Stopped, Saved, NotSaved, Running, Staying, Refused, Detached];
        all.into_iter().find(|&answer| answer as u32 == number)
    }
}

/// Page that both map. The daemon believes nothing in it beyond what it can check: a guest may
/// have taken QEMU over.
#[derive(Debug, Default)]
#[repr(C)]
pub struct PausePage {
    /// An [`Order`], or 0 before the first, in the lowest bits; above them how often the dirty log
    /// was asked for. In one word, so that an agent in the midst of a pause hears of both.
    pub orders: Word,
    /// An [`Answer`].
    pub answer: Word,
    /// A [`LogErrand`], for this pause.
    pub errand: Word,
    /// Length of the device state in its file, once it is [`Answer::Saved`].
    pub device_state_bytes: AtomicU64,
    /// Bytes of log that had passed the agent when the device state was saved (or, for
    /// [`LogErrand::Detach`], before): where an attached log begins, or a detached one ends.
    pub log_position: AtomicU64,
    /// Time at which the daemon rang the bell: nanoseconds of `CLOCK_MONOTONIC`, as below.
    pub rung: AtomicU64,
    /// Times at which each answer was given, by its number. The first is when the agent heard the
    /// bell.
    pub stamps: [AtomicU64; PausePage::STAMPS],
    /// Number of the daemon's last probe. It rings the bell, too.
    pub probe: AtomicU32,
    /// Number of the last probe that the main loop has seen.
    pub echo: AtomicU32,
    /// A [`crate::DirtyWish`]: what the dirty log was asked for last.
    pub dirty_wish: AtomicU32,
    /// A [`crate::DirtyOutcome`]: what became of it.
    pub dirty_outcome: AtomicU32,
    /// Number of times that the dirty log was asked for when that was done.
    pub dirty_done: Word,
    /// Blocks in the table behind the page.
    pub dirty_blocks: AtomicU32,
    /// Time at which the guest last ran on the host that it comes from: nanoseconds of this host's
    /// `CLOCK_MONOTONIC`; 0 if it comes from none. Counts when the machine first runs.
    pub taken: AtomicU64,
    /// Flag that is not 0 if the format of a disk keeps writes back inside QEMU, as qcow2 does with
    /// its tables: a pause then has them written.
    pub writes_back: AtomicU32,
}

/// Bits of [`PausePage::orders`] that are an order.
const ORDER_BITS: u32 = 8;

impl PausePage {
    /// Number of stamps.
    pub const STAMPS: usize = 8;

    /// Size of the memfd.
    pub const BYTES: usize = 4096;

    /// The daemon is about to ring the bell for a new pause.
    pub fn begin(&self, errand: LogErrand) {
        self.answer.put(Answer::None as u32);
        self.errand.put(errand as u32);
        self.rung.store(monotonic(), Ordering::Relaxed);
        self.give(Order::Begin);
    }

    /// Gives an order to an agent in the midst of a pause.
    pub fn give(&self, order: Order) {
        self.orders.update(|orders| orders >> ORDER_BITS << ORDER_BITS | order as u32);
    }

    /// The last order.
    pub fn order(&self) -> u32 {
        self.orders.get() & ((1 << ORDER_BITS) - 1)
    }

    /// Asks for something of the dirty log; gives the number of the request. An agent that is not
    /// in a pause must be woken by the bell.
    pub fn ask_dirty_log(&self, wish: DirtyWish) -> u32 {
        self.dirty_wish.store(wish as u32, Ordering::Relaxed);
        self.orders.update(|orders| orders.wrapping_add(1 << ORDER_BITS)) >> ORDER_BITS
    }

    /// The number of the last such request.
    pub fn dirty_asked(&self) -> u32 {
        self.orders.get() >> ORDER_BITS
    }

    /// Carries the last such request out, unless it is done already.
    pub fn serve_dirty_log(&self, serve: impl FnOnce(Option<DirtyWish>) -> DirtyOutcome) {
        let asked = self.dirty_asked();
        if self.dirty_done.get() != asked {
            let wish = DirtyWish::from_number(self.dirty_wish.load(Ordering::Relaxed));
            self.dirty_outcome.store(serve(wish) as u32, Ordering::Relaxed);
            self.dirty_done.set(asked);
        }
    }

    /// The main loop lives: answers the daemon's probe, if there is one.
    pub fn echo(&self) {
        self.echo.store(self.probe.load(Ordering::Acquire), Ordering::Release);
    }

    /// Notes the time, then tells.
    pub fn tell(&self, answer: Answer) {
        self.stamp(answer);
        self.answer.set(answer as u32);
    }

    /// Notes the time.
    pub fn stamp(&self, answer: Answer) {
        self.stamps[answer as usize].store(monotonic(), Ordering::Relaxed);
    }
}

const _: () = assert!(size_of::<PausePage>() <= PausePage::BYTES);

/// The monotonic clock, in nanoseconds.
pub fn monotonic() -> u64 {
    time_of(libc::CLOCK_MONOTONIC)
}

/// A clock that every Linux has, in nanoseconds.
pub fn time_of(clock: libc::clockid_t) -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call fills `time`.
    unsafe { libc::clock_gettime(clock, &mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_from_qemu_are_checked() {
        assert_eq!(Answer::from_number(Answer::Saved as u32), Some(Answer::Saved));
        assert_eq!(Answer::from_number(8), None);
        assert_eq!(Answer::from_number(u32::MAX), None);
    }

    #[test]
    fn a_probe_is_answered_with_its_number() {
        let page = PausePage::default();
        page.probe.store(u32::MAX, Ordering::Release);
        page.echo();
        assert_eq!(page.echo.load(Ordering::Acquire), u32::MAX);
    }

    #[test]
    fn orders_and_requests_do_not_disturb_each_other() {
        let page = PausePage::default();
        page.begin(LogErrand::None);
        assert_eq!(page.ask_dirty_log(DirtyWish::Collect), 1);
        assert_eq!(page.order(), Order::Begin as u32);
        page.give(Order::Resume);
        assert_eq!((page.order(), page.dirty_asked()), (Order::Resume as u32, 1));
        let mut served = Vec::new();
        for _ in 0..2 {
            page.serve_dirty_log(|wish| {
                served.push(wish);
                DirtyOutcome::Refused
            });
        }
        assert_eq!(served, [Some(DirtyWish::Collect)]);
        assert_eq!(page.dirty_done.get(), 1);
        assert_eq!(page.dirty_outcome.load(Ordering::Relaxed), DirtyOutcome::Refused as u32);
        // The number begins anew above the order.
        page.orders.set(u32::MAX << 8 | Order::Stay as u32);
        assert_eq!(page.ask_dirty_log(DirtyWish::Begin), 0);
        assert_eq!(page.order(), Order::Stay as u32);
    }

    #[test]
    fn an_answer_has_its_time() {
        let page = PausePage::default();
        page.tell(Answer::Stopped);
        assert_eq!(page.answer.get(), Answer::Stopped as u32);
        assert!(page.stamps[Answer::Stopped as usize].load(Ordering::Relaxed) > 0);
    }
}
