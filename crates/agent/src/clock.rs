// SPDX-License-Identifier: GPL-2.0-or-later
//! The guest's clocks, which must not lose the time in which the guest stands still.
//!
//! QEMU stops them in every pause: a guest with forty checkpoints a second would fall behind by
//! some 2 %, which no NTP makes good. From the first run of a machine on they are therefore kept
//! at one distance from this host's clocks, however the pauses are made:
//!
//! - QEMU's virtual clock, on which its timers and emulated clocks depend, and the time stamp
//!   counter of a guest that it emulates: two numbers in its `timers_state`, the distances. They
//!   are noted when the machine first runs, and put back whenever it runs again;
//! - the clocks of a guest on KVM (`kvm_clock.rs`).
//!
//! A machine that goes on from a checkpoint of another host has lost the time since then. The
//! daemon says when that was ([`PausePage::taken`]), and the distances begin so much further on.

use crate::qemu_symbols::{function, place};
use crate::{kvm_clock, lockstep};
use std::ffi::{c_int, c_void};
use std::ops::Range;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicI64, Ordering};
use understudy_agent_protocol::{PausePage, monotonic};

type StateHandler = extern "C" fn(*mut c_void, bool, c_int);

/// Priority of the handler that a change of the machine's state is told to first: devices start
/// their timers then.
const FIRST: c_int = -1000;

/// Symbols that it takes of QEMU.
struct Clocks {
    page: &'static PausePage,
    get_clock: unsafe extern "C" fn() -> i64,
    get_ticks: unsafe extern "C" fn() -> i64,
    /// QEMU's `timers_state`.
    timers: &'static [AtomicI64],
    /// Places of the distances in it, and their values, once the machine has run; none if
    /// they were not found.
    kept: OnceLock<Option<Kept>>,
    /// Reading of this host's clocks when this began, to know the counter's rate.
    began: Reading,
}

/// The distance of the guest's clocks from this host's.
#[derive(Clone, Copy)]
struct Kept {
    clock: Place,
    ticks: Place,
}

/// A number of `timers_state`.
#[derive(Clone, Copy)]
struct Place {
    index: usize,
    value: i64,
}

/// Reading of this host's clocks at one moment: nanoseconds, and ticks of the time stamp counter.
#[derive(Clone, Copy)]
struct Reading {
    nanoseconds: i64,
    ticks: i64,
}

impl Reading {
    fn now() -> Reading {
        // SAFETY: every processor that this is built for has it.
        let ticks = unsafe { std::arch::x86_64::_rdtsc() };
        Reading { nanoseconds: monotonic() as i64, ticks: ticks as i64 }
    }
}

/// Keeps the guest's clocks from now on, or names what is missing. Does nothing in a QEMU in
/// lockstep, whose time is that of its instructions.
///
/// # Safety
///
/// On QEMU's main thread, in its main loop.
pub unsafe fn keep(page: &'static PausePage) -> Result<(), String> {
    if lockstep::is_on() {
        return Ok(());
    }
    // SAFETY: declared so in QEMU's headers system/cpu-timers.h and system/runstate.h; what the
    // last one returns is not used, and no caller's frame depends on it.
    let (get_clock, get_ticks, on_change) = unsafe {
        type OnChange = unsafe extern "C" fn(StateHandler, *mut c_void, c_int) -> *mut c_void;
        let on_change: OnChange = function(c"qemu_add_vm_change_state_handler_prio")?;
        (function(c"cpu_get_clock")?, function(c"cpu_get_ticks")?, on_change)
    };
    let timers = numbers_at(place(c"timers_state")?);
    let (kept, began) = (OnceLock::new(), Reading::now());
    let clocks = Box::leak(Box::new(Clocks { page, get_clock, get_ticks, timers, kept, began }));
    let opaque = ptr::from_mut(clocks).cast();
    // SAFETY: on the main thread, as the caller vouches; the handler gets what it expects, which
    // lives for good.
    unsafe { on_change(changed, opaque, FIRST) };
    Ok(())
}

/// A variable of QEMU's as numbers.
fn numbers_at(place: Range<usize>) -> &'static [AtomicI64] {
    let (first, count) = (place.start as *const AtomicI64, place.len() / size_of::<i64>());
    // SAFETY: a variable of the program, there as long as the process, aligned as its numbers
    // are; QEMU's other threads read it, and nobody writes it while the main loop has the lock.
    unsafe { std::slice::from_raw_parts(first, count) }
}

/// The machine runs again, or not any more.
extern "C" fn changed(opaque: *mut c_void, running: bool, _state: c_int) {
    // SAFETY: `keep` gave us this; nobody has a mutable reference.
    let clocks = unsafe { &*opaque.cast::<Clocks>() };
    if running {
        clocks.run();
    }
}

impl Clocks {
    /// The machine is about to run; its virtual CPUs still stand.
    fn run(&self) {
        let kept = self.kept.get_or_init(|| self.begin());
        for Place { index, value } in kept.iter().flat_map(|kept| [kept.clock, kept.ticks]) {
            self.timers[index].store(value, Ordering::SeqCst);
        }
    }

    /// Finds the distances, and takes a machine that comes from another host to the present.
    fn begin(&self) -> Option<Kept> {
        let Some((mut clock, mut ticks)) = self.find() else {
            eprintln!("understudy agent: pauses delay the guest's clocks, which were not found");
            return None;
        };
        let now = Reading::now();
        let taken = self.page.taken.load(Ordering::Acquire) as i64;
        if taken != 0 {
            let late = (now.nanoseconds - taken).max(0);
            clock.value += late;
            ticks.value += self.ticks_in(late, now);
            kvm_clock::continue_from(taken as u64, late);
        }
        Some(Kept { clock, ticks })
    }

    /// Finds the numbers of `timers_state` that are the distances of the clock and of the counter.
    /// Each is told by its value, which one number alone can have.
    fn find(&self) -> Option<(Place, Place)> {
        // SAFETY: in the main loop; the calls read variables.
        let (before, clock, ticks, after) =
            unsafe { (Reading::now(), (self.get_clock)(), (self.get_ticks)(), Reading::now()) };
        let clock = self.only(clock - after.nanoseconds..=clock - before.nanoseconds)?;
        let ticks =
            self.only(ticks.wrapping_sub(after.ticks)..=ticks.wrapping_sub(before.ticks))?;
        Some((clock, ticks))
    }

    /// The only number within these bounds.
    fn only(&self, bounds: std::ops::RangeInclusive<i64>) -> Option<Place> {
        let values = self.timers.iter().map(|number| number.load(Ordering::SeqCst)).enumerate();
        let mut fitting = values.filter(|(_, value)| bounds.contains(value));
        let (index, value) = fitting.next()?;
        fitting.next().is_none().then_some(Place { index, value })
    }

    /// Ticks that this host's counter goes in so many nanoseconds.
    fn ticks_in(&self, nanoseconds: i64, now: Reading) -> i64 {
        let passed = (now.nanoseconds - self.began.nanoseconds).max(1);
        let ticks = now.ticks - self.began.ticks;
        (i128::from(nanoseconds) * i128::from(ticks) / i128::from(passed)) as i64
    }
}
