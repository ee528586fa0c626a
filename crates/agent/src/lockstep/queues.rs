// SPDX-License-Identifier: GPL-2.0-or-later
//! The queues of virtio devices are made what loading would make them.
//!
//! Of each queue QEMU knows some things that its saved state does not have: the used entry at
//! which it interrupted the guest last, how far it has read the ring ahead, whether it wants to be
//! told of new buffers. A QEMU that loads the state begins without them: it interrupts
//! once more than the other where the guest wanted no interrupt, and every later interrupt comes
//! in place of another. So a primary forgets them, too, where its log begins.

use super::qemu::find;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};

/// Function that is called with each object of QEMU's; another value than zero ends it.
type EachObject = unsafe extern "C" fn(*mut c_void, *mut c_void) -> c_int;

const VIRTIO_DEVICE: &CStr = c"virtio-device";

/// QEMU's functions, found by name.
pub struct Queues {
    root: unsafe extern "C" fn() -> *mut c_void,
    for_each: unsafe extern "C" fn(*mut c_void, EachObject, *mut c_void) -> c_int,
    cast: unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void,
    count: unsafe extern "C" fn(*mut c_void) -> c_int,
    queue: unsafe extern "C" fn(*mut c_void, c_int) -> *mut c_void,
    forget_interrupted: unsafe extern "C" fn(*mut c_void, c_int),
    next_entry: unsafe extern "C" fn(*mut c_void, c_int) -> c_uint,
    set_next_entry: unsafe extern "C" fn(*mut c_void, c_int, c_uint),
    is_empty: unsafe extern "C" fn(*mut c_void) -> c_int,
    notify: unsafe extern "C" fn(*mut c_void, c_int),
}

impl Queues {
    pub fn find() -> Result<Queues, String> {
        Ok(Queues {
            root: find("object_get_root")?,
            for_each: find("object_child_foreach_recursive")?,
            cast: find("object_dynamic_cast")?,
            count: find("virtio_get_num_queues")?,
            queue: find("virtio_get_queue")?,
            forget_interrupted: find("virtio_queue_invalidate_signalled_used")?,
            next_entry: find("virtio_queue_get_last_avail_idx")?,
            set_next_entry: find("virtio_queue_set_last_avail_idx")?,
            is_empty: find("virtio_queue_empty")?,
            notify: find("virtio_queue_set_notification")?,
        })
    }

    /// Forgets what no saved state has. May write to the guest's rings: before its memory is copied.
    ///
    /// # Safety
    /// In the main loop, of a stopped machine no request of which is under way.
    pub unsafe fn forget(&self) {
        unsafe extern "C" fn each(object: *mut c_void, queues: *mut c_void) -> c_int {
            // SAFETY: QEMU gives an object, and the argument is the `Queues` below.
            unsafe {
                let queues = &*queues.cast::<Queues>();
                let device = (queues.cast)(object, VIRTIO_DEVICE.as_ptr());
                if !device.is_null() {
                    queues.forget_of(device);
                }
            }
            0
        }
        let argument = std::ptr::from_ref(self).cast_mut().cast();
        // SAFETY: the caller's word; `each` is done with `self` when the call returns.
        unsafe { (self.for_each)((self.root)(), each, argument) };
    }

    /// # Safety
    /// As above; of a virtio device.
    unsafe fn forget_of(&self, device: *mut c_void) {
        // SAFETY: the caller's word; queues are numbered from zero.
        unsafe {
            for n in 0..(self.count)(device) {
                let queue = (self.queue)(device, n);
                (self.forget_interrupted)(device, n);
                // Forgets what was read ahead; asking whether it is empty reads anew.
                (self.set_next_entry)(device, n, (self.next_entry)(device, n));
                (self.is_empty)(queue);
                (self.notify)(queue, 1);
            }
        }
    }
}
