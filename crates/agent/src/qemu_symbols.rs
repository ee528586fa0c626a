// SPDX-License-Identifier: GPL-2.0-or-later
//! QEMU's own functions. Its program exports them for its loadable modules, so the dynamic
//! linker finds them by name; whether their meaning is known is another matter, which the
//! daemon decides by QEMU's version.

use std::ffi::{CStr, c_void};
use std::mem;
use std::ptr::NonNull;

/// The address of what QEMU exports under this name, or the name.
pub fn address(name: &'static CStr) -> Result<NonNull<c_void>, String> {
    // SAFETY: the call reads a terminated string and the tables of the dynamic linker.
    let found = unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) };
    NonNull::new(found).ok_or_else(|| name.to_string_lossy().into_owned())
}

/// The function that QEMU exports under this name, or the name.
///
/// # Safety
///
/// `F` is the type of a function pointer, and of this function in every version of QEMU
/// that the daemon arms the agent in.
pub unsafe fn function<F: Copy>(name: &'static CStr) -> Result<F, String> {
    const { assert!(mem::size_of::<F>() == mem::size_of::<*mut c_void>()) };
    let address = address(name)?;
    // SAFETY: of one size, and the caller vouches for the type.
    Ok(unsafe { mem::transmute_copy::<NonNull<c_void>, F>(&address) })
}
