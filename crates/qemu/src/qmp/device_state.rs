//! The device state of a machine: what QEMU saves and loads beside memory.

use nix::sys::memfd::{MFdFlags, memfd_create};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::FileExt;

/// The most that a device state may have, which is copied in each pause. A small one has some 30 KiB; a
/// virtio graphics card adds the pictures that its guest keeps there, a disk the requests that wait.
const MOST_BYTES: u64 = 64 << 20;

/// A file in memory that QEMU inherits and saves its device state to, or loads
/// it from. The contents are QEMU's business: about 32 KiB for a small q35.
#[derive(Debug)]
pub struct DeviceState {
    file: File,
    /// Its number in QEMU.
    inherited: RawFd,
}

impl DeviceState {
    /// An empty one.
    pub fn create() -> io::Result<DeviceState> {
        let fd = memfd_create(c"device-state", MFdFlags::MFD_CLOEXEC)?;
        let inherited = fd.as_raw_fd();
        Ok(DeviceState { file: fd.into(), inherited })
    }

    /// Adopts one that QEMU has inherited from another process, under this number.
    pub fn adopt(fd: OwnedFd, inherited: RawFd) -> DeviceState {
        DeviceState { file: fd.into(), inherited }
    }

    /// Its number in QEMU.
    pub fn inherited(&self) -> RawFd {
        self.inherited
    }

    /// Replaces the contents: before [`crate::Monitor::go_live`].
    pub fn fill(&self, contents: &[u8]) -> io::Result<()> {
        self.file.set_len(0)?;
        self.file.write_all_at(contents, 0)
    }

    /// Reads the contents into `contents`, replacing what it held: after
    /// [`crate::qmp::Checkpoint::saved`].
    pub fn read_into(&self, contents: &mut Vec<u8>) -> io::Result<()> {
        self.read_first(self.file.metadata()?.len(), contents)
    }

    /// Reads so many bytes of the contents into `contents`, replacing what it held: after
    /// [`crate::pause::AgentPause::saved`].
    pub fn read_first(&self, bytes: u64, contents: &mut Vec<u8>) -> io::Result<()> {
        if bytes > MOST_BYTES {
            return Err(io::Error::other(format!(
                "the state of the VM's devices has {} MiB, and may have {}: what its guest keeps in a virtio \
                 graphics card is part of it, and so are requests that wait for a full disk; make room on the \
                 disk's file system, or stop the VM and start it with another `vga`",
                bytes >> 20,
                MOST_BYTES >> 20
            )));
        }
        let bytes = usize::try_from(bytes).map_err(io::Error::other)?;
        contents.resize(bytes, 0);
        self.file.read_exact_at(contents, 0)
    }

    /// Its name inside a QEMU that inherited it. Every open there gets a file
    /// position of its own, so that save and load begin at 0.
    pub(crate) fn path_in_qemu(&self) -> String {
        format!("/proc/self/fd/{}", self.inherited)
    }
}

impl AsFd for DeviceState {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_that_is_too_large_is_an_error_that_says_so() {
        let (state, mut contents) = (DeviceState::create().unwrap(), Vec::new());
        state.file.set_len(MOST_BYTES).unwrap();
        state.read_into(&mut contents).unwrap();
        assert_eq!(contents.len() as u64, MOST_BYTES);
        state.file.set_len(MOST_BYTES + (1 << 20)).unwrap();
        let error = state.read_into(&mut contents).unwrap_err().to_string();
        assert!(error.contains("has 65 MiB, and may have 64"), "{error}");
    }
}
