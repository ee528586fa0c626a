//! Attributes of mounts, of all of a namespace at once: no path is looked up on the way, so that storage which hangs
//! holds nobody up.

#![allow(unsafe_code)] // One call, which the libraries do not wrap.

use nix::errno::Errno;
use nix::libc;
use nix::mount::MsFlags;

/// The kernel's `struct mount_attr`.
#[repr(C)]
#[derive(Default)]
struct Attributes {
    set: u64,
    clear: u64,
    propagation: u64,
    user_namespace: u64,
}

/// `MOUNT_ATTR_NODEV`.
const NO_DEVICES: u64 = 4;

/// From now on mounts of the host come here, and none of here go there.
pub(super) fn only_follow() -> nix::Result<()> {
    change_all(Attributes { propagation: MsFlags::MS_SLAVE.bits(), ..Attributes::default() })
}

/// From now on no device can be opened that lies on what is mounted now.
pub(super) fn have_no_devices() -> nix::Result<()> {
    change_all(Attributes { set: NO_DEVICES, ..Attributes::default() })
}

fn change_all(attributes: Attributes) -> nix::Result<()> {
    // SAFETY: the path ends with a zero, and the kernel reads the structure, of that layout and size, while the call lasts.
    let changed = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            libc::AT_FDCWD,
            c"/".as_ptr(),
            libc::AT_RECURSIVE,
            &raw const attributes,
            size_of::<Attributes>(),
        )
    };
    Errno::result(changed).map(drop)
}
