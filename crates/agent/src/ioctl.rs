// SPDX-License-Identifier: GPL-2.0-or-later
//! QEMU's requests to the kernel's devices: this library's `ioctl` comes before the C library's.

use crate::{card, kvm_clock};
use std::ffi::{c_int, c_ulong, c_void};

/// The C library's `ioctl`, whose third argument is optional: whoever leaves it out passes
/// something that nobody looks at, as there.
// SAFETY: it has the name and, on the machines that this is built for, the calling
// convention of the function in whose place it is called.
#[unsafe(no_mangle)]
pub extern "C" fn ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
    match kvm_clock::is_kvmclock(request) {
        // SAFETY: the caller passes what belongs to the request.
        true => unsafe { kvm_clock::ioctl(fd, request, argument) },
        false => card::ioctl(fd, request, argument),
    }
}
