// SPDX-License-Identifier: GPL-2.0-or-later
//! The guest's time stamp counter, for a guest that has known another one.
//!
//! A QEMU that counts instructions has the counter count nanoseconds. A guest that was moved
//! into it was told the rate of its former host's counter, and takes time from it: its time
//! would go wrong. So the agent puts its own function in the place of QEMU's.

use std::ffi::{c_char, c_void};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicPtr, Ordering};
use understudy_agent_protocol::TICKS_VARIABLE as VARIABLE;

/// Offset at which QEMU 10.0 has the function `get_elapsed_ticks` among those of an accelerator
/// (`AccelOpsClass`).
const PLACE: usize = 0xd0;

type Clock = unsafe extern "C" fn() -> i64;

static TICKS: OnceLock<Ticks> = OnceLock::new();

struct Ticks {
    /// Ticks in 2^32 ns.
    rate: u64,
    /// The guest's clock in nanoseconds: `icount_get`.
    clock: Clock,
    operations: unsafe extern "C" fn(*const c_char) -> *mut c_void,
}

/// Notes the rate, if the daemon asked for one. Before `main`, on its only thread.
pub fn start() -> Result<(), String> {
    let Ok(wish) = std::env::var(VARIABLE) else { return Ok(()) };
    // SAFETY: before `main`; no other thread reads the environment.
    unsafe { std::env::remove_var(VARIABLE) };
    let rate = wish.parse().map_err(|_| format!("{VARIABLE}={wish}: no number"))?;
    let ticks = Ticks {
        rate,
        clock: super::qemu::find("icount_get")?,
        operations: super::qemu::find("object_class_by_name")?,
    };
    TICKS.get_or_init(|| ticks);
    Ok(())
}

/// Puts the function into its place, once QEMU's accelerator is ready. Called each time that
/// the main loop waits: it did often before it hears that the guest may run.
pub fn install() {
    static DONE: AtomicBool = AtomicBool::new(false);
    let Some(ticks) = TICKS.get().filter(|_| !DONE.load(Ordering::Relaxed)) else { return };
    // SAFETY: the function of QEMU's that finds a class by its name, which is copied.
    let class = unsafe { (ticks.operations)(c"tcg-accel-ops".as_ptr()) };
    if class.is_null() {
        fail();
    }
    // SAFETY: in the builds that are proven the class is longer than that, and the pointer
    // aligned; QEMU reads it on the vCPU's thread, which does not run yet.
    let place = unsafe { &*class.cast::<u8>().add(PLACE).cast::<AtomicPtr<c_void>>() };
    let (theirs, own) = (ticks.clock as *mut c_void, elapsed as *mut c_void);
    match place.compare_exchange(theirs, own, Ordering::AcqRel, Ordering::Relaxed) {
        Ok(_) => DONE.store(true, Ordering::Relaxed),
        Err(found) if found.is_null() => {}
        Err(_) => fail(),
    }
}

fn fail() -> ! {
    eprintln!("understudy: this QEMU has its time stamp counter elsewhere");
    crate::exit_now(crate::EXIT_FAILED)
}

/// Stands in for `icount_get` as QEMU's time stamp counter.
unsafe extern "C" fn elapsed() -> i64 {
    let Some(ticks) = TICKS.get() else { return 0 };
    // SAFETY: QEMU's own function, called where QEMU would call it.
    let now = unsafe { (ticks.clock)() };
    ((i128::from(now) * i128::from(ticks.rate)) >> 32) as i64
}
