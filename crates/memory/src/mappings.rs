//! QEMU's mappings of guest memory, which only the agent inside it can change.

use crate::MemoryError;
use crate::kernel::AddressRange;
use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, recv, send, setsockopt, sockopt::ReceiveTimeout};
use nix::sys::time::TimeVal;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::PoisonError;
use understudy_agent_protocol::{DropRange, MOST_RANGES, MemoryRequest};
use understudy_threads::Mutex;

/// The agent's thread does nothing else: an answer takes a few milliseconds per GiB.
const TIMEOUT: TimeVal = TimeVal::new(10, 0);

/// Asks the agent.
#[derive(Debug)]
pub struct Mappings {
    /// Socket, for one request at a time.
    socket: Mutex<OwnedFd>,
}

impl Mappings {
    pub(crate) fn new(socket: OwnedFd) -> Result<Mappings, MemoryError> {
        let set = setsockopt(&socket, ReceiveTimeout, &TIMEOUT);
        set.map_err(|e| MemoryError::AgentLink(e.into()))?;
        Ok(Mappings { socket: Mutex::new(socket) })
    }

    pub(crate) fn duplicate(&self) -> io::Result<OwnedFd> {
        self.socket.lock().unwrap_or_else(PoisonError::into_inner).try_clone()
    }

    /// Forgets where the pages of a shared file are: the next access to each is a fault.
    pub(crate) fn drop_ranges(&self, ranges: &[AddressRange]) -> Result<(), MemoryError> {
        for ranges in ranges.chunks(MOST_RANGES) {
            let ranges = ranges.iter().map(|r| DropRange { start: r.start, bytes: r.bytes });
            self.ask(&MemoryRequest::Drop(ranges.collect()), "drop mappings of guest memory")?;
        }
        Ok(())
    }

    /// Has emulated vCPUs read the guest's code again; nothing where they are not emulated.
    pub(crate) fn forget_code(&self) -> Result<(), MemoryError> {
        self.ask(&MemoryRequest::ForgetCode, "have QEMU read the guest's code anew")
    }

    fn ask(&self, request: &MemoryRequest, what: &'static str) -> Result<(), MemoryError> {
        self.exchange(request).map_err(|source| MemoryError::Mappings { what, source })
    }

    fn exchange(&self, request: &MemoryRequest) -> io::Result<()> {
        // An exchange that panicked would have left nothing half done here.
        let socket = self.socket.lock().unwrap_or_else(PoisonError::into_inner);
        send(socket.as_raw_fd(), &request.encode(), MsgFlags::MSG_NOSIGNAL)?;
        let mut answer = [0; 8];
        match recv(socket.as_raw_fd(), &mut answer, MsgFlags::empty()) {
            Ok(8) => {}
            Ok(_) => return Err(Errno::EPIPE.into()),
            Err(e) => return Err(e.into()),
        }
        match i32::try_from(u64::from_le_bytes(answer)) {
            Ok(0) => Ok(()),
            Ok(error) => Err(io::Error::from_raw_os_error(error)),
            Err(_) => Err(Errno::EPROTO.into()),
        }
    }

    /// The mappings of this process, for tests: an agent like that in QEMU.
    #[cfg(test)]
    pub(crate) fn of_this_process() -> Mappings {
        use nix::sys::mman::{MmapAdvise, madvise};
        use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
        use std::ptr::NonNull;
        let flags = SockFlag::SOCK_CLOEXEC;
        let (ours, agents) =
            socketpair(AddressFamily::Unix, SockType::SeqPacket, None, flags).unwrap();
        std::thread::spawn(move || {
            let mut packet = vec![0; MemoryRequest::MOST_BYTES];
            while let Ok(length @ 1..) = recv(agents.as_raw_fd(), &mut packet, MsgFlags::empty()) {
                if let Some(MemoryRequest::Drop(ranges)) = MemoryRequest::decode(&packet[..length])
                {
                    for range in ranges {
                        let start = NonNull::new(range.start as *mut _).unwrap();
                        let advice = MmapAdvise::MADV_DONTNEED;
                        // SAFETY: of a shared file mapping: page table entries go, not content.
                        #[allow(unsafe_code)]
                        unsafe { madvise(start, range.bytes as usize, advice) }.unwrap();
                    }
                }
                let _ = send(agents.as_raw_fd(), &[0; 8], MsgFlags::MSG_NOSIGNAL);
            }
        });
        Mappings::new(ours).unwrap()
    }
}
