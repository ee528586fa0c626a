// SPDX-License-Identifier: GPL-2.0-or-later
//! Work in QEMU's main loop: on its main thread, with the big lock held.
//!
//! Always in the context of I/O handlers (`iohandler_get_aio_context`). Of QEMU's contexts
//! only this one is never served from within an operation that waits for disk requests, such
//! as a reset of the machine: what runs here finds the machine whole.

use crate::qemu_symbols::function;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::os::fd::{AsRawFd, BorrowedFd};

/// Function that the main loop calls, with the pointer given for it.
pub type Callback = extern "C" fn(*mut c_void);

/// QEMU's main loop.
#[derive(Clone, Copy)]
pub struct MainLoop {
    context: unsafe extern "C" fn() -> *mut c_void,
    schedule: unsafe extern "C" fn(*mut c_void, Callback, *mut c_void, *const c_char),
    watch: unsafe extern "C" fn(c_int, Option<Callback>, Option<Callback>, *mut c_void),
}

impl MainLoop {
    /// Finds it, or names what is missing.
    pub fn find() -> Result<MainLoop, String> {
        // SAFETY: declared so in QEMU's block/aio.h and qemu/main-loop.h.
        unsafe {
            Ok(MainLoop {
                context: function(c"iohandler_get_aio_context")?,
                schedule: function(c"aio_bh_schedule_oneshot_full")?,
                watch: function(c"qemu_set_fd_handler")?,
            })
        }
    }

    /// Has `callback` called once, soon. From any thread.
    ///
    /// # Safety
    ///
    /// QEMU is initialised, and `opaque` is what `callback` expects.
    pub unsafe fn run(&self, callback: Callback, opaque: *mut c_void) {
        const NAME: &CStr = c"understudy";
        // SAFETY: made for being called from any thread; QEMU keeps the pointers only.
        unsafe { (self.schedule)((self.context)(), callback, opaque, NAME.as_ptr()) }
    }

    /// Has `callback` called whenever `descriptor` can be read. In the main loop only.
    ///
    /// # Safety
    ///
    /// The caller runs in the main loop, `descriptor` stays open for good, and `opaque` is
    /// always what `callback` expects.
    pub unsafe fn watch(&self, descriptor: BorrowedFd, callback: Callback, opaque: *mut c_void) {
        // SAFETY: as the caller vouches.
        unsafe { (self.watch)(descriptor.as_raw_fd(), Some(callback), None, opaque) }
    }
}
