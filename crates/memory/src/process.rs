//! QEMU's own memory, for the RAM blocks that are not shared with the daemon.

use crate::MemoryError;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

/// The memory of a QEMU process, through `/proc/PID/mem`.
///
/// The open file stays tied to that very process: once it has ended, reads and writes fail,
/// even if its pid is used again.
#[derive(Debug)]
pub struct ProcessMemory {
    pid: i32,
    file: File,
}

impl ProcessMemory {
    /// Opens the memory of process `pid`; needs root, or the same user.
    pub fn open(pid: i32) -> Result<ProcessMemory, MemoryError> {
        File::options()
            .read(true)
            .write(true)
            .open(format!("/proc/{pid}/mem"))
            .map(|file| ProcessMemory { pid, file })
            .map_err(|source| MemoryError::Process {
                action: "open",
                pid,
                address: 0,
                bytes: 0,
                source,
            })
    }

    /// The process.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// Reads `into.len()` bytes at `address` of the process.
    pub fn read(&self, address: u64, into: &mut [u8]) -> Result<(), MemoryError> {
        let bytes = into.len();
        self.file
            .read_exact_at(into, address)
            .map_err(|source| self.error("read", address, bytes, source))
    }

    /// Writes `from` at `address` of the process.
    pub fn write(&self, address: u64, from: &[u8]) -> Result<(), MemoryError> {
        self.file
            .write_all_at(from, address)
            .map_err(|source| self.error("write", address, from.len(), source))
    }

    fn error(
        &self,
        action: &'static str,
        address: u64,
        bytes: usize,
        source: io::Error,
    ) -> MemoryError {
        MemoryError::Process { action, pid: self.pid, address, bytes, source }
    }
}
