//! Raw packet sockets: the system calls that `nix` has no safe form for.

#![allow(unsafe_code)]

use anyhow::{Context, Result};
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, ControlMessageOwned, LinkAddr, MsgFlags, SockFlag, SockType, recvmsg,
    setsockopt, socket, sockopt,
};
use nix::{cmsg_space, libc};
use std::io::IoSliceMut;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant, SystemTime};

/// Kernel memory for frames not read yet: tens of thousands of them.
const RECEIVE_BUFFER: usize = 64 * 1024 * 1024;
/// Bytes of a frame that are enough for its addresses.
const SNAP: usize = 64;

/// A frame seen on an interface.
pub(crate) struct SeenFrame {
    /// Time at which the kernel saw it.
    pub(crate) at: Instant,
    /// The source address.
    pub(crate) source: [u8; 6],
    /// The EtherType.
    pub(crate) kind: u16,
    /// Whether it was sent by this machine through the interface, not received on it.
    pub(crate) outgoing: bool,
}

/// A socket that sees every frame of one interface.
pub(crate) struct PacketSocket {
    socket: OwnedFd,
}

impl PacketSocket {
    /// Opens it on the calling thread's namespace.
    pub(crate) fn open(interface: &str) -> Result<PacketSocket> {
        // Without a protocol it receives nothing before it is bound.
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let socket = socket(AddressFamily::Packet, SockType::Raw, flags, None)
            .context("cannot open a packet socket")?;
        setsockopt(&socket, sockopt::RcvBufForce, &RECEIVE_BUFFER)?;
        setsockopt(&socket, sockopt::ReceiveTimestampns, &true)?;
        let index = nix::net::if_::if_nametoindex(interface)
            .with_context(|| format!("no interface `{interface}`"))?;
        bind(&socket, index).with_context(|| format!("cannot watch `{interface}`"))?;
        Ok(PacketSocket { socket })
    }

    /// The next frame; `None` when none is waiting.
    pub(crate) fn next(&self) -> Result<Option<SeenFrame>> {
        let mut bytes = [0; SNAP];
        let mut parts = [IoSliceMut::new(&mut bytes)];
        let mut control = cmsg_space!(libc::timespec);
        let received = recvmsg::<LinkAddr>(
            self.socket.as_raw_fd(),
            &mut parts,
            Some(&mut control),
            MsgFlags::empty(),
        );
        let message = match received {
            Err(Errno::EAGAIN | Errno::EINTR) => return Ok(None),
            // The interface went down or away, as a dead host's tap does: told
            // once, before the frames that still wait.
            Err(Errno::ENETDOWN) => return self.next(),
            result => result.context("cannot read from the packet socket")?,
        };
        let at = message.cmsgs()?.find_map(|message| match message {
            ControlMessageOwned::ScmTimestampns(time) => Some(monotonic(time.into())),
            _ => None,
        });
        let sender = message.address.context("a frame without its link address")?;
        let outgoing = sender.pkttype() == libc::PACKET_OUTGOING;
        let mut source = [0; 6];
        source.copy_from_slice(&bytes[6..12]);
        let kind = u16::from_be_bytes([bytes[12], bytes[13]]);
        let at = at.context("a frame without its time")?;
        Ok(Some(SeenFrame { at, source, kind, outgoing }))
    }

    /// Frames that the kernel has dropped since the last call, for want of room.
    pub(crate) fn dropped(&self) -> Result<u64> {
        let mut statistics = libc::tpacket_stats { tp_packets: 0, tp_drops: 0 };
        let mut length = size_of::<libc::tpacket_stats>() as libc::socklen_t;
        // SAFETY: both pointers are to locals that live through the call, and
        // the length is that of the structure which the kernel fills in.
        let result = unsafe {
            libc::getsockopt(
                self.socket.as_raw_fd(),
                libc::SOL_PACKET,
                libc::PACKET_STATISTICS,
                std::ptr::from_mut(&mut statistics).cast(),
                &mut length,
            )
        };
        Errno::result(result).context("cannot ask for dropped frames")?;
        Ok(u64::from(statistics.tp_drops))
    }
}

impl AsFd for PacketSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Both clocks are read within so short a time, or once more.
const AT_ONCE: Duration = Duration::from_micros(5);
/// Number of readings of which the closest counts, on a machine that never gets there.
const MOST_READINGS: usize = 100;

/// The kernel stamps frames with the wall clock; everything else here is
/// measured on the monotonic one.
fn monotonic(wall: Duration) -> Instant {
    let read = || {
        let before = Instant::now();
        let wall_now = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
        (before, wall_now, Instant::now())
    };
    let (now, wall_now) = at_once(read);
    now - wall_now.saturating_sub(wall)
}

/// The wall clock between two instants.
type Reading = (Instant, Duration, Instant);

/// Both clocks at one instant, or the monotonic one hardly later: whoever is held up between them has a
/// frame come too late by as long. Never too early, before what has it sent.
fn at_once(mut read: impl FnMut() -> Reading) -> (Instant, Duration) {
    let mut closest = read();
    let took = |reading: &Reading| reading.2 - reading.0;
    for _ in 1..MOST_READINGS {
        if took(&closest) <= AT_ONCE {
            break;
        }
        closest = std::cmp::min_by_key(closest, read(), took);
    }
    (closest.2, closest.1)
}

fn bind(socket: &OwnedFd, interface: u32) -> nix::Result<()> {
    // SAFETY: sockaddr_ll is plain data, for which all zeroes are valid.
    let mut address: libc::sockaddr_ll = unsafe { std::mem::zeroed() };
    address.sll_family = libc::AF_PACKET as u16;
    address.sll_protocol = (libc::ETH_P_ALL as u16).to_be();
    address.sll_ifindex = interface as i32;
    // SAFETY: the pointer is to a whole sockaddr_ll that lives through the
    // call, and the length is its own.
    let result = unsafe {
        libc::bind(
            socket.as_raw_fd(),
            std::ptr::from_ref(&address).cast(),
            size_of::<libc::sockaddr_ll>() as libc::socklen_t,
        )
    };
    Errno::result(result).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reading_that_was_held_up_does_not_count() {
        let began = Instant::now();
        let ms = Duration::from_millis;
        let mut held_up = [300, 0, 7].into_iter();
        let both = at_once(|| {
            let held_up = held_up.next().expect("the second is close enough");
            (began, ms(5), began + ms(held_up))
        });
        assert_eq!((both, held_up.len()), ((began, ms(5)), 1));
        // Never close enough: the closest.
        let mut held_up = (1..=MOST_READINGS as u64).rev();
        let closest = at_once(|| {
            let held_up = held_up.next().expect("no more readings");
            (began, ms(held_up), began + ms(held_up))
        });
        assert_eq!(closest, (began + ms(1), ms(1)));
    }
}
