//! Custody: a guest that may not end with its daemon, or its keeper, stands still until the next
//! one goes on with it.
//!
//! That is a guest whose memory or disks are still being loaded from a snapshot: it has no
//! backup, and nothing can start on what is there of its images, so that what it did since its
//! start would be lost. And, for a moment, a guest whose keeper is replaced by another one. While
//! that lasts, a small process of its own, the custodian
//! ([`custodian`]), has duplicates of all descriptors by which the daemon holds QEMU. So QEMU
//! does not notice the daemon's death. The custodian does: it stops QEMU (SIGSTOP) and waits for
//! a daemon. If it dies as well, QEMU ends.
//!
//! A daemon that starts looks for custodians before it listens to anybody. What it
//! finds it takes back only if the arbiter says that the VM is still this host's, in the
//! generation in which it was left: so there is at most one live copy, as ever. Each of the two kinds
//! has a socket of its own name, so that nobody takes the one for the other.
//!
//! ```text
//! daemon                                custodian
//!     ── estate, descriptors ─▶
//!     ◀─ READY ───────────────          from here on the guest is kept
//!     ── STOP ────────────────▶         SIGSTOP, if it is left on purpose
//!     ◀─ READY ───────────────
//!     ✝                                 SIGSTOP
//! next daemon
//!     ◀─ estate, descriptors ──
//!     ── GOES_ON ─────────────▶         after SIGCONT
//!     ── END ─────────────────▶         all is loaded, or QEMU has ended
//! ```

mod custodian;
mod transport;

pub use custodian::{SUBCOMMAND, run};

use crate::NotUnderstood;
use anyhow::{Context, ensure};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use tracing::warn;

/// The socket of the custodian of a VM that is being restored, in the VM's directory.
pub const OF_RESTORE: &str = "custodian";
/// Socket of the custodian of a VM whose keeper is being replaced.
pub const OF_KEEPER: &str = "custodian.keeper";

/// Time for a custodian, which only has to start, or to answer.
const PATIENCE: Duration = Duration::from_secs(10);

/// Answer of the custodian: it has everything, or has done what it was told.
const READY: u8 = b'r';
/// Order to it: the guest is to stand still from now on.
const STOP: u8 = b's';
/// Order to it: the guest does not stand still any more.
const GOES_ON: u8 = b'g';
/// Order to it: nothing is to be kept any more.
const END: u8 = b'e';

/// The note that goes with the descriptors, of which the first is QEMU's pidfd.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Estate {
    /// Path of the socket where the custodian listens.
    socket: PathBuf,
    /// Note of what a daemon must know to go on; the custodian does not look into it.
    pub note: Value,
    /// Time for which the guest has stood still, in milliseconds.
    pub still_ms: u64,
}

/// A daemon's connection to a custodian. Dropped, it ends the custodian; only with the daemon's
/// death, or by [`Custody::leave`], it is cut without that.
pub struct Custody {
    custodian: UnixStream,
    /// The process; none if a former daemon has started it.
    child: Option<Child>,
    is_left: bool,
}

impl Custody {
    /// Starts a custodian that is to be found at this socket.
    pub fn begin(
        socket: &Path,
        note: &impl Serialize,
        descriptors: &[OwnedFd],
    ) -> anyhow::Result<Custody> {
        let (custodian, theirs) = UnixStream::pair()?;
        custodian.set_read_timeout(Some(PATIENCE))?;
        let socket = std::path::absolute(socket)?;
        let estate = Estate { socket, note: serde_json::to_value(note)?, still_ms: 0 };
        // Also if the program's file was replaced by another version.
        let child = Command::new("/proc/self/exe")
            .arg(SUBCOMMAND)
            .current_dir("/")
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            .spawn()
            .context("cannot start a custodian")?;
        let custody = Custody { custodian, child: Some(child), is_left: false };
        transport::send(&custody.custodian, &serde_json::to_vec(&estate)?, descriptors)?;
        custody.await_ready()?;
        Ok(custody)
    }

    /// The custodian that listens at this socket, and what it keeps.
    pub fn of_another(socket: &Path) -> anyhow::Result<(Custody, Estate, Vec<OwnedFd>)> {
        let custodian = UnixStream::connect(socket)?;
        custodian.set_read_timeout(Some(PATIENCE))?;
        let (estate, descriptors) = transport::receive(&custodian)?;
        let estate = serde_json::from_slice(&estate)
            .context(NotUnderstood("what it keeps is unknown".to_owned()))?;
        if descriptors.is_empty() {
            return Err(NotUnderstood("it keeps no QEMU".to_owned()).into());
        }
        Ok((Custody { custodian, child: None, is_left: false }, estate, descriptors))
    }

    /// Has a custodian end, and its QEMU with it, whatever it keeps.
    pub fn end(socket: &Path) -> anyhow::Result<()> {
        let custodian = UnixStream::connect(socket)?;
        custodian.set_read_timeout(Some(PATIENCE))?;
        drop(Custody { custodian, child: None, is_left: false });
        Ok(())
    }

    /// Has the guest stand still from now on; the next one hears for how long it did.
    pub fn stop(&self) -> anyhow::Result<()> {
        (&self.custodian).write_all(&[STOP]).context("the custodian has ended")?;
        self.await_ready()
    }

    fn await_ready(&self) -> anyhow::Result<()> {
        let mut answer = [0];
        (&self.custodian).read_exact(&mut answer).context("the custodian has ended")?;
        ensure!(answer == [READY], "the custodian gave an unknown answer");
        Ok(())
    }

    /// Leaves the guest with the custodian, as if this process had died.
    pub fn leave(mut self) {
        self.is_left = true;
    }

    /// The guest does not stand still any more.
    pub fn goes_on(&self) {
        // If it is gone the guest ends with this daemon, as guests do.
        let _ = (&self.custodian).write_all(&[GOES_ON]);
    }
}

/// What it means that nothing was got from a custodian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unfound {
    /// Nobody listens there: it has ended, and QEMU with it.
    Ended,
    /// This program never will get it: another version may.
    Never,
    /// It may the next time: the custodian did not answer in time, or this process had no descriptor left.
    Later,
}

impl Unfound {
    /// By the error of [`Custody::of_another`], or of reading the note that came with it.
    pub fn of(error: &anyhow::Error) -> Unfound {
        if error.is::<NotUnderstood>() {
            return Unfound::Never;
        }
        match error.downcast_ref().map(io::Error::kind) {
            Some(io::ErrorKind::ConnectionRefused | io::ErrorKind::NotFound) => Unfound::Ended,
            _ => Unfound::Later,
        }
    }
}

impl Drop for Custody {
    fn drop(&mut self) {
        if self.is_left {
            return;
        }
        // Fails if it has ended already. Once it has, nobody removes another one's socket.
        let _ = (&self.custodian).write_all(&[END]);
        let _ = (&self.custodian).read(&mut [0]);
        if let Some(Err(error)) = self.child.as_mut().map(Child::wait) {
            warn!("cannot wait for the end of a custodian: {error}");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use anyhow::anyhow;

    /// Regression: one that took too long counted as another version's, and its guest stood still for good.
    #[test]
    fn a_custodian_that_does_not_answer_is_asked_again() {
        let of = |error: io::Error| Unfound::of(&anyhow::Error::from(error).context("it says"));
        assert_eq!(of(io::ErrorKind::ConnectionRefused.into()), Unfound::Ended);
        assert_eq!(of(io::ErrorKind::NotFound.into()), Unfound::Ended);
        for later in
            [io::ErrorKind::WouldBlock, io::ErrorKind::TimedOut, io::ErrorKind::UnexpectedEof]
        {
            assert_eq!(of(later.into()), Unfound::Later, "{later}");
        }
        assert_eq!(of(io::Error::from_raw_os_error(24)), Unfound::Later, "no descriptor is left");
        assert_eq!(Unfound::of(&anyhow!("whatever")), Unfound::Later);
        let unknown = serde_json::from_str::<Estate>("{}").map(drop);
        let unknown = unknown.context(NotUnderstood("what it keeps is unknown".to_owned()));
        assert_eq!(Unfound::of(&unknown.unwrap_err()), Unfound::Never);
        let directory = tempfile::tempdir().unwrap();
        let nobody = Custody::of_another(&directory.path().join("nobody")).map(drop).unwrap_err();
        assert_eq!(Unfound::of(&nobody), Unfound::Ended);
    }
}
