//! The host's watchdog: a device that resets the machine when nobody has petted it for a while.
//!
//! Who pets it is the thread that freezes guests whose leases run out: should that stand still while
//! something else lets output out, the host ends before the lease does.
// The kernel's interface (linux/watchdog.h) is ioctls, hence the unsafe calls.
#![allow(unsafe_code)]

use anyhow::{Context, bail};
use crossbeam_channel::{Receiver, RecvTimeoutError, Sender};
use nix::errno::Errno;
use nix::libc::c_int;
use std::fs::File;
use std::io::Write;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::time::Duration;
use tracing::{error, info, warn};

/// Time for the thread that pets it to leave it.
const LEFT_WITHIN: Duration = Duration::from_secs(5);

#[repr(C)]
struct Info {
    options: u32,
    firmware_version: u32,
    identity: [u8; 32],
}

nix::ioctl_read!(get_support, b'W', 0, Info);
nix::ioctl_readwrite!(set_timeout, b'W', 6, c_int);

/// An armed watchdog.
pub(crate) struct Watchdog {
    file: File,
    path: PathBuf,
}

impl Watchdog {
    /// Arms it: it is to be petted from now on. Its time is half of the lease, or the next longer one
    /// that it takes.
    pub fn arm(path: &Path, lease: Duration) -> anyhow::Result<Watchdog> {
        let file = File::options()
            .write(true)
            .open(path)
            .with_context(|| format!("the watchdog {} cannot be opened", path.display()))?;
        let mut info = Info { options: 0, firmware_version: 0, identity: [0; 32] };
        // SAFETY: the kernel fills the structure, of that layout, while the call lasts.
        unsafe { get_support(file.as_raw_fd(), &raw mut info) }.with_context(|| {
            format!("{} is no watchdog: name one, or leave the line out", path.display())
        })?;
        let watchdog = Watchdog { file, path: path.to_owned() };
        watchdog.limit(lease).inspect_err(|_| watchdog.disarm())?;
        let name = String::from_utf8_lossy(&info.identity);
        info!("the watchdog {} ({}) is armed", path.display(), name.trim_end_matches('\0'));
        Ok(watchdog)
    }

    fn limit(&self, lease: Duration) -> anyhow::Result<()> {
        let (lease, path) = (lease.as_secs() as c_int, self.path.display());
        for seconds in lease / 2..lease {
            match self.take_time(seconds) {
                Ok(taken) if taken < lease => return Ok(()),
                // Some have a shortest time, and say so in one way or the other: that of Intel's
                // chipsets is 3 s.
                Ok(_) | Err(Errno::EINVAL) => {}
                Err(error) => {
                    bail!("the watchdog {path} takes no time: {error}; leave the line out")
                }
            }
        }
        bail!("the watchdog {path} takes no time below {lease} s: lease_seconds must be longer")
    }

    /// Asks for a time, and returns what it took.
    fn take_time(&self, mut seconds: c_int) -> nix::Result<c_int> {
        // SAFETY: the kernel reads and writes one integer while the call lasts.
        unsafe { set_timeout(self.file.as_raw_fd(), &raw mut seconds) }?;
        Ok(seconds)
    }

    /// Says that this host is well.
    pub fn pet(&self) {
        if let Err(error) = (&self.file).write_all(b"\0") {
            warn!("the watchdog {} was not petted: {error}", self.path.display());
        }
    }

    /// Leaves it for good, in order.
    pub fn disarm(&self) {
        // The letter that tells an orderly end from a death.
        if let Err(error) = (&self.file).write_all(b"V") {
            warn!("the watchdog {} stays armed: {error}", self.path.display());
        }
    }
}

/// Orders to the thread that looks at leases, whose the watchdog is.
pub(crate) struct Petting(Sender<Order>, Receiver<Order>);

/// Order about the watchdog.
enum Order {
    /// It is to be petted from now on.
    Pet(Watchdog),
    /// Leases are to be looked at now.
    Look,
    /// It is left; nothing is said to whoever waits for that, but it is let go of.
    Leave(Sender<()>),
}

impl Petting {
    /// Orders that nobody has given yet.
    pub fn new() -> Petting {
        let (orders, inbox) = crossbeam_channel::unbounded();
        Petting(orders, inbox)
    }

    /// Has it petted from now on.
    pub fn begin(&self, watchdog: Watchdog) {
        // The inbox is this value's own.
        let _ = self.0.send(Order::Pet(watchdog));
    }

    /// Has leases looked at: a VM runs here from now on, or is this host's alone.
    pub fn look(&self) {
        let _ = self.0.send(Order::Look);
    }

    /// Leaves it for good, in order, if there is one; returns when that is done.
    pub fn end(&self) {
        let (leaving, left) = crossbeam_channel::bounded(0);
        let _ = self.0.send(Order::Leave(leaving));
        if left.recv_timeout(LEFT_WITHIN) == Err(RecvTimeoutError::Timeout) {
            error!(
                "leases are not looked at: a watchdog of this host, if there is one, stays armed"
            );
        }
    }

    /// The inbox, for the one who pets it.
    pub(super) fn inbox(&self) -> Petter {
        Petter { watchdog: None, inbox: self.1.clone() }
    }
}

/// Pets the watchdog, if there is one.
pub(super) struct Petter {
    watchdog: Option<Watchdog>,
    inbox: Receiver<Order>,
}

impl Petter {
    /// Whether there is one.
    pub fn is_armed(&self) -> bool {
        self.watchdog.is_some()
    }

    /// Says that this host is well, and looks for orders for so long.
    pub fn pet(&mut self, pause: Duration) {
        if let Some(watchdog) = &self.watchdog {
            watchdog.pet();
        }
        match self.inbox.recv_timeout(pause) {
            Ok(Order::Pet(armed)) => self.watchdog = Some(armed),
            Ok(Order::Leave(leaving)) => {
                if let Some(watchdog) = self.watchdog.take() {
                    watchdog.disarm();
                }
                drop(leaving);
            }
            // If the host has gone its loop finds that out.
            Ok(Order::Look) | Err(RecvTimeoutError::Timeout | RecvTimeoutError::Disconnected) => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Duration = Duration::from_secs(15);

    #[test]
    fn what_is_no_watchdog_is_named_and_left_as_it_is() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for path in [file.path(), Path::new("/dev/null"), Path::new("/nonexistent/watchdog")] {
            let error = format!("{:#}", Watchdog::arm(path, LEASE).err().unwrap());
            assert!(error.contains(&path.display().to_string()), "{error}");
        }
        assert_eq!(std::fs::read(file.path()).unwrap(), b"");
    }

    #[test]
    fn it_hears_that_all_is_well_and_of_an_orderly_end() {
        let heard = tempfile::NamedTempFile::new().unwrap();
        let file = heard.reopen().unwrap();
        let watchdog = Watchdog { file, path: heard.path().to_owned() };
        watchdog.pet();
        watchdog.pet();
        watchdog.disarm();
        assert_eq!(std::fs::read(heard.path()).unwrap(), b"\0\0V");
    }

    #[test]
    fn a_vm_that_comes_is_not_waited_out() {
        let petting = Petting::new();
        let mut petter = petting.inbox();
        assert!(!petter.is_armed());
        petting.look();
        // Whoever does not hear it waits for ever.
        petter.pet(Duration::from_secs(3600));
    }

    #[test]
    fn who_ends_in_order_goes_on_once_it_is_left() {
        let heard = tempfile::NamedTempFile::new().unwrap();
        let file = heard.reopen().unwrap();
        let petting = Petting::new();
        let mut petter = petting.inbox();
        petter.pet(Duration::ZERO);
        petting.begin(Watchdog { file, path: heard.path().to_owned() });
        petter.pet(Duration::ZERO);
        std::thread::scope(|scope| {
            let ends = scope.spawn(|| petting.end());
            assert!(!ends.is_finished(), "nobody has left it");
            petter.pet(LEASE);
            ends.join().unwrap();
        });
        assert_eq!(std::fs::read(heard.path()).unwrap(), b"\0V");
        petter.pet(Duration::ZERO);
        assert_eq!(std::fs::read(heard.path()).unwrap(), b"\0V", "and not petted any more");
    }
}
