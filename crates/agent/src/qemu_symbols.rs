// SPDX-License-Identifier: GPL-2.0-or-later
//! QEMU's own functions. Its program exports them for its loadable modules, so the dynamic
//! linker finds them by name; whether their meaning is known is another matter, which the
//! daemon decides by QEMU's version.

use std::ffi::{CStr, c_int, c_void};
use std::mem;
use std::ops::Range;
use std::ptr::{self, NonNull};

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

/// Place where a variable or a function of QEMU's is, by name.
pub fn place(name: &CStr) -> Result<Range<usize>, String> {
    const WANT_SYMBOL: c_int = 1; // RTLD_DL_SYMENT
    // SAFETY: the name ends with a zero byte; the structures are filled before they are read,
    // and the symbol is one of the dynamic linker's, which stays.
    let (address, bytes) = unsafe {
        let address = libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr());
        let mut info: libc::Dl_info = mem::zeroed();
        let mut symbol: *mut c_void = ptr::null_mut();
        let bytes = match libc::dladdr1(address, &mut info, &mut symbol, WANT_SYMBOL) {
            0 => None,
            _ => symbol.cast::<libc::Elf64_Sym>().as_ref().map(|symbol| symbol.st_size as usize),
        };
        (address.addr(), bytes)
    };
    let bytes = bytes.ok_or_else(|| format!("no size of {}", name.to_string_lossy()))?;
    Ok(address..address + bytes)
}
