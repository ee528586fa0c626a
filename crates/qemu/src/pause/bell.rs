//! The bell by which QEMU's main loop is woken: whoever took QEMU over has its end, and must not be able to make
//! ringing wait.

use nix::errno::Errno;
use nix::fcntl::{FcntlArg, OFlag, fcntl, open};
use nix::sys::stat::Mode;
use nix::unistd::{pipe2, write};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

/// This process's end of a pipe in which there is room for one ring; another before it is heard is the same.
///
/// `O_NONBLOCK` belongs to an open file, of which an eventfd has one for all: QEMU could fill it and take that away.
/// Here each end has an open file of its own, which reads and writes: neither sees the other's end go.
#[derive(Debug)]
pub(crate) struct Bell(OwnedFd);

impl Bell {
    /// The bell, and QEMU's end, at which eight bytes are read when it rings.
    pub fn new() -> io::Result<(Bell, OwnedFd)> {
        let flags = OFlag::O_CLOEXEC | OFlag::O_NONBLOCK;
        let (pipe, _) = pipe2(flags)?;
        let end = || {
            let path = format!("/proc/self/fd/{}", pipe.as_raw_fd());
            open(path.as_str(), OFlag::O_RDWR | flags, Mode::empty())
        };
        let (own, qemus) = (end()?, end()?);
        // Each ring takes all of the one page that the pipe has.
        fcntl(&own, FcntlArg::F_SETPIPE_SZ(1))?;
        fcntl(&own, FcntlArg::F_SETFL(OFlag::O_NONBLOCK | OFlag::O_DIRECT))?;
        Ok((Bell(own), qemus))
    }

    /// The bell of another process, perhaps of a version whose bells are eventfds.
    pub fn adopt(bell: OwnedFd) -> Bell {
        Bell(bell)
    }

    /// The bell, for another process to adopt.
    pub fn duplicate(&self) -> io::Result<OwnedFd> {
        self.0.try_clone()
    }

    /// Rings. Whatever was written before this is seen by who hears it.
    pub fn ring(&self) -> Result<(), Errno> {
        match write(&self.0, &1u64.to_ne_bytes()) {
            // It has rung already, and nobody has heard it yet.
            Ok(_) | Err(Errno::EAGAIN) => Ok(()),
            Err(error) => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nix::unistd::read;

    /// Reads at QEMU's end, as the agent does.
    fn heard(qemus: &OwnedFd) -> bool {
        let mut count = [0; 8];
        match read(qemus, &mut count) {
            Ok(8) => true,
            Err(Errno::EAGAIN) => false,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn it_rings_once_until_it_is_heard() {
        let (bell, qemus) = Bell::new().unwrap();
        assert!(!heard(&qemus));
        for _ in 0..3 {
            bell.ring().unwrap();
            bell.ring().unwrap();
            assert!(heard(&qemus));
            assert!(!heard(&qemus));
        }
        let next = Bell::adopt(bell.duplicate().unwrap());
        drop(bell);
        assert!(!heard(&qemus), "nor does its end look like a ring");
        next.ring().unwrap();
        assert!(heard(&qemus));
        drop(qemus);
        next.ring().expect("the end of QEMU is heard elsewhere");
    }

    /// Regression: the thread that rang waited for ever, and with it all that want the monitor.
    #[test]
    fn qemu_cannot_make_it_wait() {
        let (bell, qemus) = Bell::new().unwrap();
        while write(&qemus, &[7; 8]).is_ok() {}
        fcntl(&qemus, FcntlArg::F_SETFL(OFlag::empty())).unwrap();
        let (told, rung) = std::sync::mpsc::channel();
        std::thread::spawn(move || told.send(bell.ring()));
        let rung = rung.recv_timeout(std::time::Duration::from_secs(20));
        assert_eq!(rung, Ok(Ok(())), "it waits");
    }
}
