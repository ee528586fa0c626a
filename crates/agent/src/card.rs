//! Network cards: QEMU takes a card's socket for a tap, because its questions to the
//! tap are answered here.
//!
//! QEMU's tap backend reads and writes frames by ordinary calls, which a socket of packets
//! takes as well; beside that it asks the tap a few things by `ioctl`. What is asked of a tap on
//! one of the card's descriptors is answered here; everything else is for the kernel. What the
//! daemon must know of the answers goes to it between the frames; `understudy_network`
//! reads the same format.

use std::ffi::{c_int, c_ulong, c_void};
use std::io;
use std::os::fd::{FromRawFd, OwnedFd};
use std::sync::atomic::{AtomicI32, AtomicU32, Ordering};

/// Environment variable with the numbers of the cards' descriptors, parted by commas.
pub const VARIABLE: &str = "UNDERSTUDY_CARDS";

/// Cards that a VM may have, and more.
const MOST_CARDS: usize = 32;

const MAGIC: [u8; 8] = *b"USTDYNET";
const KIND_HEADER: u32 = 1;
const KIND_OFFLOADS: u32 = 2;

/// Lengths of virtio's header: what QEMU begins with, and that with a count of buffers.
const HEADERS: [c_int; 2] = [10, 12];

/// Checksums and long TCP segments, as the daemon has them. The kernels of all hosts know
/// these, so that a guest's card is the same everywhere.
const OFFLOADS: u32 = libc::TUN_F_CSUM | libc::TUN_F_TSO4 | libc::TUN_F_TSO6 | libc::TUN_F_TSO_ECN;

/// The type of all requests to taps (and terminals).
const REQUESTS: u8 = b'T';

struct Card {
    socket: AtomicI32,
    header: AtomicI32,
    offloads: AtomicU32,
}

static CARDS: [Card; MOST_CARDS] = [const {
    Card {
        socket: AtomicI32::new(-1),
        header: AtomicI32::new(HEADERS[0]),
        offloads: AtomicU32::new(0),
    }
}; MOST_CARDS];

/// Answers for these descriptors from now on.
pub fn register(numbers: &str) -> Result<(), String> {
    let wrong = || format!("{VARIABLE} is no list of at most {MOST_CARDS} numbers: {numbers}");
    let sockets: Result<Vec<c_int>, _> = numbers.split(',').map(str::parse).collect();
    let sockets = sockets.map_err(|_| wrong())?;
    if sockets.len() > MOST_CARDS {
        return Err(wrong());
    }
    for (card, socket) in CARDS.iter().zip(sockets) {
        card.socket.store(socket, Ordering::Relaxed);
    }
    Ok(())
}

/// Whether this descriptor is a card's.
#[allow(dead_code)] // A test takes this module by itself.
pub fn is_card(fd: c_int) -> bool {
    fd >= 0 && CARDS.iter().any(|card| card.socket.load(Ordering::Relaxed) == fd)
}

/// Answers what a tap is asked on a card's descriptor; passes everything else on to the kernel.
pub fn ioctl(fd: c_int, request: c_ulong, argument: *mut c_void) -> c_int {
    let answered = if (request >> 8) as u8 == REQUESTS {
        let card = CARDS.iter().find(|card| card.socket.load(Ordering::Relaxed) == fd && fd >= 0);
        card.and_then(|card| card.answer(request as u32, argument))
    } else {
        None
    };
    match answered {
        Some(Ok(())) => 0,
        Some(Err(errno)) => {
            // SAFETY: the location is this thread's own.
            unsafe { *libc::__errno_location() = errno };
            -1
        }
        // SAFETY: the arguments are passed on as they came; the call sets errno itself.
        None => unsafe { libc::syscall(libc::SYS_ioctl, fd, request, argument) as c_int },
    }
}

impl Card {
    /// Answer that a tap would give; none if a tap is not asked.
    fn answer(&self, request: u32, argument: *mut c_void) -> Option<Result<(), c_int>> {
        const GET_INTERFACE: u32 = libc::TUNGETIFF as u32;
        const GET_HEADER: u32 = libc::TUNGETVNETHDRSZ as u32;
        const SET_HEADER: u32 = libc::TUNSETVNETHDRSZ as u32;
        const SET_OFFLOADS: u32 = libc::TUNSETOFFLOAD as u32;
        const SET_BUFFER: u32 = libc::TUNSETSNDBUF as u32;
        const SET_LITTLE_ENDIAN: u32 = libc::TUNSETVNETLE as u32;
        const SET_BIG_ENDIAN: u32 = libc::TUNSETVNETBE as u32;
        // SAFETY: whoever asks a tap this passes an `int` to read or write.
        let number = || unsafe { argument.cast::<c_int>().read_unaligned() };
        Some(match request {
            GET_INTERFACE => {
                describe(argument.cast());
                Ok(())
            }
            GET_HEADER => {
                let length = self.header.load(Ordering::Relaxed);
                // SAFETY: as above.
                unsafe { argument.cast::<c_int>().write_unaligned(length) };
                Ok(())
            }
            SET_HEADER => self.set_header(number()),
            // This one is passed by value.
            SET_OFFLOADS => self.set_offloads(argument as usize as u32),
            // The socket's was chosen by the daemon.
            SET_BUFFER => Ok(()),
            // The header is little-endian always, as x86's guests have it.
            SET_LITTLE_ENDIAN if number() == 1 => Ok(()),
            SET_BIG_ENDIAN if number() == 0 => Ok(()),
            SET_LITTLE_ENDIAN | SET_BIG_ENDIAN => Err(libc::EINVAL),
            _ if (200..=255).contains(&(request & 0xff)) => Err(libc::EINVAL),
            _ => return None,
        })
    }

    fn set_offloads(&self, offloads: u32) -> Result<(), c_int> {
        if offloads & !OFFLOADS != 0 {
            return Err(libc::EINVAL);
        }
        if self.offloads.swap(offloads, Ordering::Relaxed) != offloads {
            self.tell(KIND_OFFLOADS, offloads)?;
        }
        Ok(())
    }

    /// Returns when the daemon has changed over. Frames that were on their way until then
    /// are discarded: QEMU would read them with the wrong length.
    fn set_header(&self, length: c_int) -> Result<(), c_int> {
        if !HEADERS.contains(&length) {
            return Err(libc::EINVAL);
        }
        if self.header.swap(length, Ordering::Relaxed) != length {
            self.tell(KIND_HEADER, length as u32)?;
            while !self.next_is_answer()? {}
        }
        Ok(())
    }

    fn tell(&self, kind: u32, value: u32) -> Result<(), c_int> {
        let message = [&MAGIC[..], &kind.to_le_bytes(), &value.to_le_bytes()].concat();
        let proof = proof().map_err(errno)?;
        loop {
            let socket = self.socket.load(Ordering::Relaxed);
            match crate::descriptor::send(socket, &message, [&proof]) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.wait_for(libc::POLLOUT)
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => return result.map_err(errno),
            }
        }
    }

    /// Reads one message and forgets it.
    fn next_is_answer(&self) -> Result<bool, c_int> {
        let mut message = [0u8; MAGIC.len()];
        loop {
            let socket = self.socket.load(Ordering::Relaxed);
            let (to, room) = (message.as_mut_ptr().cast(), message.len());
            // MSG_TRUNC: says how long the whole message was.
            let flags = libc::MSG_DONTWAIT | libc::MSG_TRUNC;
            // SAFETY: the buffer is as long as is said, and lives through the call.
            let length = unsafe { libc::recv(socket, to, room, flags) };
            match usize::try_from(length) {
                Ok(0) => return Err(libc::EPIPE),
                Ok(length) => return Ok(length == MAGIC.len() && message == MAGIC),
                Err(_) => match errno(io::Error::last_os_error()) {
                    libc::EAGAIN => self.wait_for(libc::POLLIN),
                    libc::EINTR => {}
                    error => return Err(error),
                },
            }
        }
    }

    fn wait_for(&self, events: i16) {
        let mut socket =
            libc::pollfd { fd: self.socket.load(Ordering::Relaxed), events, revents: 0 };
        // SAFETY: one descriptor, which lives through the call. If it fails, the caller
        // looks once more.
        unsafe { libc::poll(&mut socket, 1, -1) };
    }
}

/// A descriptor that goes beside a message. Any would do: nothing that a guest sends
/// through QEMU has one beside it.
fn proof() -> io::Result<OwnedFd> {
    // SAFETY: the call takes numbers and touches no memory.
    match unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) } {
        fd if fd < 0 => Err(io::Error::last_os_error()),
        // SAFETY: the kernel just gave us this descriptor; nobody else owns it.
        fd => Ok(unsafe { OwnedFd::from_raw_fd(fd) }),
    }
}

fn errno(error: io::Error) -> c_int {
    error.raw_os_error().unwrap_or(libc::EIO)
}

/// Says what kind of interface this is: frames as they are, after virtio's header.
fn describe(interface: *mut libc::ifreq) {
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;
    // SAFETY: whoever asks this passes an `ifreq`, plain data for which all zeroes are valid.
    unsafe {
        interface.write_bytes(0, 1);
        (*interface).ifr_ifru.ifru_flags = flags as libc::c_short;
    }
}
