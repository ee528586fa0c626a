// SPDX-License-Identifier: GPL-2.0-or-later
//! Has accesses to the guest's memory noticed: pages whose mapping is dropped fault when they
//! are touched next, and the daemon's userfaultfd tells it. Only QEMU itself can drop them.

use crate::qemu_symbols::function;
use std::ffi::{c_int, c_void};
use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr;
use understudy_agent_protocol::{DropRange, MemoryRequest};

/// Both ends of a connection that keeps packets apart.
pub fn socket_pair() -> io::Result<(OwnedFd, OwnedFd)> {
    let mut ends: [c_int; 2] = [-1; 2];
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC;
    // SAFETY: the call fills the array with two new descriptors, which are nobody else's.
    unsafe {
        match libc::socketpair(libc::AF_UNIX, kind, 0, ends.as_mut_ptr()) {
            0 => Ok((OwnedFd::from_raw_fd(ends[0]), OwnedFd::from_raw_fd(ends[1]))),
            _ => Err(io::Error::last_os_error()),
        }
    }
}

/// Does what the daemon asks for, until it closes the connection.
pub fn serve(requests: &OwnedFd) {
    let mut packet = vec![0u8; MemoryRequest::MOST_BYTES + 1];
    let socket = requests.as_raw_fd();
    loop {
        // SAFETY: fills at most `packet`.
        let received = unsafe { libc::recv(socket, packet.as_mut_ptr().cast(), packet.len(), 0) };
        let Ok(received) = usize::try_from(received) else {
            match io::Error::last_os_error().kind() {
                io::ErrorKind::Interrupted => continue,
                _ => return,
            }
        };
        if received == 0 {
            return;
        }
        let answer = match MemoryRequest::decode(&packet[..received]) {
            Some(MemoryRequest::Drop(ranges)) => drop_mappings(&ranges),
            Some(MemoryRequest::ForgetCode) => forget_code(),
            None => libc::EINVAL,
        };
        let answer = (answer as u64).to_le_bytes();
        // SAFETY: reads the eight bytes.
        unsafe { libc::send(socket, answer.as_ptr().cast(), answer.len(), libc::MSG_NOSIGNAL) };
    }
}

fn drop_mappings(ranges: &[DropRange]) -> c_int {
    for range in ranges {
        let (start, bytes) = (range.start as *mut c_void, range.bytes as usize);
        // SAFETY: the daemon names mappings of a shared file only, whose content stays.
        if unsafe { libc::madvise(start, bytes, libc::MADV_DONTNEED) } != 0 {
            return io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
        }
    }
    0
}

/// QEMU's vCPU.
type Cpu = *mut c_void;

/// Work for a vCPU; the second argument is a union of a pointer's size, which is not used.
type CpuWork = extern "C" fn(Cpu, *mut c_void);

/// Changes nothing where the processor itself executes the guest.
fn forget_code() -> c_int {
    // SAFETY: declared so in QEMU's header hw/core/cpu.h, and made for any thread: QEMU calls
    // `flush` in a vCPU's thread, at a moment when no vCPU executes.
    unsafe {
        let cpu_of: Result<unsafe extern "C" fn(c_int) -> Cpu, _> = function(c"qemu_get_cpu");
        let run: Result<unsafe extern "C" fn(Cpu, CpuWork, *mut c_void), _> =
            function(c"async_safe_run_on_cpu");
        let (Ok(cpu_of), Ok(run)) = (cpu_of, run) else { return libc::ENOSYS };
        let first = cpu_of(0);
        if first.is_null() {
            return libc::ENODEV;
        }
        run(first, flush, ptr::null_mut());
    }
    0
}

extern "C" fn flush(cpu: Cpu, _: *mut c_void) {
    // SAFETY: declared so in QEMU's header exec/tb-flush.h. No vCPU executes now, without which
    // a machine of one vCPU would have the code thrown away under its feet.
    unsafe {
        if let Ok(flush) = function::<unsafe extern "C" fn(Cpu)>(c"tb_flush") {
            flush(cpu);
        }
    }
}
