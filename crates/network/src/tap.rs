//! Tap devices: the guest's card as the host's bridge sees it.
#![allow(unsafe_code)]

use crate::error::NetworkError;
use crate::header::{HEADER_BYTES, MAX_BYTES, Offloads};
use crate::mac::MacAddress;
use crate::netlink;
use crate::vlan::Vlans;
use nix::errno::Errno;
use nix::libc;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;
use std::sync::atomic::{AtomicU32, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// The most frames that are discarded, more than a tap queues (1000), so that this ends even while
/// new frames arrive.
const DISCARD_AT_MOST: usize = 2000;

/// Time for which a tap that was dropped may still be there, on a busy host.
const VANISHES_WITHIN: Duration = Duration::from_secs(1);
const LOOK_AGAIN: Duration = Duration::from_millis(2);

/// A tap device. It vanishes from the host when this is dropped, or a moment later: a program
/// that another thread is just starting has a copy of each descriptor until it runs.
///
/// Frames have the header of [`HEADER_BYTES`] before them, both ways. Long TCP
/// segments and frames without their checksum may be sent always; they are
/// received once [`set_offloads`](Self::set_offloads) says so.
#[derive(Debug)]
pub struct Tap {
    file: File,
    name: String,
    offloads: AtomicU32,
}

impl Tap {
    /// Makes a tap named `name` a port of `bridge` and sets it up, for a guest's
    /// card with the address `guest`. Blocks for some milliseconds.
    ///
    /// # Errors
    /// If the bridge is missing, the name is taken or impossible, or the process
    /// may not do this. Nothing is left behind then.
    pub fn open(name: &str, bridge: &str, guest: MacAddress) -> Result<Tap, NetworkError> {
        Tap::open_in(name, bridge, guest, &Vlans::default())
    }

    /// The same, for a card in these VLANs. If it is in any, the bridge must filter them, and the
    /// port carries no other.
    ///
    /// # Errors
    /// As [`Tap::open`], and if the bridge does not filter.
    pub fn open_in(
        name: &str,
        bridge: &str,
        guest: MacAddress,
        vlans: &Vlans,
    ) -> Result<Tap, NetworkError> {
        check_name(name)?;
        netlink::check_bridge(bridge, vlans)?;
        let tap = Tap::create(name)?;
        silence_ipv6(name);
        netlink::attach(name, bridge, guest.for_tap(), vlans)?;
        Ok(tap)
    }

    /// The tap named `name` of a process that has ended, whose [`descriptor`](Self::duplicate) was kept. What
    /// the bridge has sent since waits in it.
    ///
    /// That it is this tap's is not looked at: to ask the kernel takes the lock of all network devices, for
    /// which a guest would stand still.
    ///
    /// # Errors
    /// If that can be no tap's name.
    pub fn adopt(descriptor: OwnedFd, name: &str) -> Result<Tap, NetworkError> {
        check_name(name)?;
        let (file, offloads) = (File::from(descriptor), AtomicU32::new(0));
        Ok(Tap { file, name: name.to_owned(), offloads })
    }

    /// The kernel leaves this to the guest's driver already.
    pub(crate) fn assume_offloads(&self, offloads: Offloads) {
        self.offloads.store(offloads.bits(), Ordering::Release);
    }

    /// Its descriptor once more, for [`Tap::adopt`]. The device lives as long as one of them.
    ///
    /// # Errors
    /// If there are no more descriptors.
    pub fn duplicate(&self) -> io::Result<OwnedFd> {
        Ok(self.file.try_clone()?.into())
    }

    /// The device's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Has the kernel leave to the guest's driver what that takes upon itself.
    ///
    /// # Errors
    /// If the kernel does not know one of the offloads.
    pub fn set_offloads(&self, offloads: Offloads) -> io::Result<()> {
        if self.offloads.load(Ordering::Acquire) == offloads.bits() {
            return Ok(());
        }
        // SAFETY: TUNSETOFFLOAD takes a number and touches no memory.
        let result = unsafe {
            libc::ioctl(self.file.as_raw_fd(), libc::TUNSETOFFLOAD as _, offloads.bits())
        };
        Errno::result(result)?;
        self.offloads.store(offloads.bits(), Ordering::Release);
        Ok(())
    }

    /// The offloads that the guest's driver does itself.
    pub fn offloads(&self) -> Offloads {
        Offloads::from_bits(self.offloads.load(Ordering::Acquire)).unwrap_or_default()
    }

    /// Sends one frame to the bridge, without blocking.
    ///
    /// # Errors
    /// If the kernel does not take it, for instance for want of memory.
    pub fn send(&self, packet: &[u8]) -> io::Result<()> {
        (&self.file).write(packet).map(drop)
    }

    /// Takes one frame that the bridge sent, if there is one. Up to [`MAX_BYTES`]
    /// long.
    ///
    /// # Errors
    /// If the device is gone.
    pub fn receive(&self, packet: &mut [u8]) -> io::Result<Option<usize>> {
        match (&self.file).read(packet) {
            Ok(length) => Ok(Some(length)),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Throws away what the bridge sent while nobody listened. Returns how many
    /// frames that were.
    pub fn discard_queued(&self) -> usize {
        let mut packet = vec![0; MAX_BYTES];
        let received = |_: &usize| matches!(self.receive(&mut packet), Ok(Some(_)));
        (0..DISCARD_AT_MOST).take_while(received).count()
    }

    /// Creates the device, down and on no bridge.
    fn create(name: &str) -> Result<Tap, NetworkError> {
        let deadline = Instant::now() + VANISHES_WITHIN;
        loop {
            match Tap::try_create(name) {
                // Perhaps the last of it: see `Tap`.
                Err(NetworkError::TapInUse { .. }) if Instant::now() < deadline => {
                    thread::sleep(LOOK_AGAIN);
                }
                result => return result,
            }
        }
    }

    fn try_create(name: &str) -> Result<Tap, NetworkError> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NONBLOCK)
            .open("/dev/net/tun")
            .map_err(|source| match source.kind() {
                io::ErrorKind::NotFound => NetworkError::NoTun,
                _ => NetworkError::system("open /dev/net/tun", source),
            })?;
        match set_interface(&file, name) {
            Ok(()) => Ok(Tap { file, name: name.to_owned(), offloads: AtomicU32::new(0) }),
            // EINVAL: the interface of that name is no tap.
            Err(Errno::EBUSY | Errno::EEXIST | Errno::EINVAL) => {
                Err(NetworkError::TapInUse { tap: name.to_owned() })
            }
            Err(errno) => Err(NetworkError::system(format!("create tap device {name}"), errno)),
        }
    }
}

impl AsFd for Tap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

fn check_name(name: &str) -> Result<(), NetworkError> {
    let allowed = |byte: u8| byte.is_ascii_graphic() && !b"/:%".contains(&byte);
    let fits = (1..libc::IFNAMSIZ).contains(&name.len());
    if fits && name.bytes().all(allowed) && name != "." && name != ".." {
        return Ok(());
    }
    Err(NetworkError::BadTapName { tap: name.to_owned() })
}

fn set_interface(file: &File, name: &str) -> Result<(), Errno> {
    // SAFETY: an ifreq is plain old data; all zero is a valid value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    // The name is shorter than the array (check_name), so a final zero stays.
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    // TUN_EXCL: never take over a device that somebody else has made.
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR | libc::IFF_TUN_EXCL;
    request.ifr_ifru.ifru_flags = flags as libc::c_short;
    // SAFETY: TUNSETIFF reads and writes one ifreq, which lives through the call.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF as _, &mut request) };
    Errno::result(result)?;
    let header = HEADER_BYTES as libc::c_int;
    // SAFETY: TUNSETVNETHDRSZ reads one int, which lives through the call.
    let result = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETVNETHDRSZ as _, &header) };
    Errno::result(result).map(drop)
}

/// Keeps the host from sending router solicitations and the like to the guest:
/// the tap is the guest's card, not an interface of the host's own.
fn silence_ipv6(name: &str) {
    let path = format!("/proc/sys/net/ipv6/conf/{name}/disable_ipv6");
    match std::fs::write(&path, "1") {
        Ok(()) => {}
        // A kernel without IPv6.
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => tracing::warn!(
            %path, %error,
            "cannot turn IPv6 off on the tap: the guest will see this host's neighbour discovery"
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn impossible_names_are_refused_before_the_kernel_is_asked() {
        for name in ["", "sixteen-letters!", "a/b", "a b", "tap%d", "..", "ä"] {
            let error = check_name(name).unwrap_err().to_string();
            assert!(error.contains("cannot be the name of a tap"), "{name}: {error}");
        }
        for name in ["t", "fifteen-letters", "us.vm-0_1"] {
            assert!(check_name(name).is_ok(), "{name}");
        }
    }
}
