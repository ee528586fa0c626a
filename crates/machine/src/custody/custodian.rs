//! The custodian's process. It knows nothing of VMs: it has descriptors and a text, and gives
//! them to whoever comes when the one who brought them is gone.

use super::{END, Estate, GOES_ON, READY, STOP, transport};
use anyhow::{Context, ensure};
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;
use nix::unistd::setsid;
use std::fs;
use std::io::{self, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::time::Instant;
use understudy_qemu::process::signal;

/// The command of the program that is one; not for people.
pub const SUBCOMMAND: &str = "custodian";

/// A custodian's life. Its standard input is the socket to the daemon that has started it.
pub fn run() -> anyhow::Result<()> {
    #[cfg(feature = "fail-points")]
    std::mem::forget(fail::FailScenario::setup());
    // A signal from the daemon's terminal is not for it. Fails if it leads a session already.
    let _ = setsid();
    let daemon = UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?);
    let (estate, descriptors) = transport::receive(&daemon).context("nothing to keep")?;
    let estate: Estate = serde_json::from_slice(&estate)?;
    ensure!(!descriptors.is_empty(), "nothing to keep");
    let socket = estate.socket.clone();
    let listener =
        listen(&socket).with_context(|| format!("cannot listen at {}", socket.display()))?;
    let mut custodian = Custodian { estate, descriptors, listener, daemon, still: None };
    let kept = custodian.keep();
    fail::fail_point!("custodian-ends");
    // While it still listens, and its daemon still has it: once it has ended nobody removes another one's socket.
    fs::remove_file(&socket).with_context(|| format!("cannot remove {}", socket.display()))?;
    drop(custodian);
    kept
}

fn listen(socket: &Path) -> io::Result<UnixListener> {
    match fs::remove_file(socket) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => UnixListener::bind(socket),
    }
}

struct Custodian {
    estate: Estate,
    /// QEMU's pidfd comes first.
    descriptors: Vec<OwnedFd>,
    listener: UnixListener,
    /// Whoever the guest goes on with.
    daemon: UnixStream,
    /// Time since which the guest has stood still.
    still: Option<Instant>,
}

impl Custodian {
    /// Keeps everything until it is told to end, or QEMU has ended.
    fn keep(&mut self) -> anyhow::Result<()> {
        self.daemon.write_all(&[READY])?;
        while self.attend()? {
            // The daemon is gone. An error: so is QEMU.
            if self.stop().is_err() {
                return Ok(());
            }
            if !self.readable(self.listener.as_fd())? {
                return Ok(());
            }
            self.daemon = self.listener.accept()?.0;
            // One that dies at once is missed at once.
            let _ = self.hand_over();
        }
        Ok(())
    }

    fn stop(&mut self) -> io::Result<()> {
        signal(self.qemu(), Signal::SIGSTOP)?;
        self.still.get_or_insert_with(Instant::now);
        Ok(())
    }

    /// Hears the daemon; true if it is gone, false if there is nothing to keep any more.
    fn attend(&mut self) -> io::Result<bool> {
        while self.readable(self.daemon.as_fd())? {
            let mut word = [0];
            match self.daemon.read(&mut word) {
                Ok(1) if word == [GOES_ON] => self.still = None,
                Ok(1) if word == [STOP] => match self.stop() {
                    // Whoever dies meanwhile is missed at the next look.
                    Ok(()) => drop(self.daemon.write_all(&[READY])),
                    // QEMU has ended.
                    Err(_) => return Ok(false),
                },
                Ok(1) if word == [END] => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                _ => return Ok(true),
            }
        }
        Ok(false)
    }

    fn hand_over(&mut self) -> anyhow::Result<()> {
        let still = self.still.map_or(0, |since| since.elapsed().as_millis() as u64);
        self.estate.still_ms = still;
        transport::send(&self.daemon, &serde_json::to_vec(&self.estate)?, &self.descriptors)?;
        Ok(())
    }

    fn qemu(&self) -> BorrowedFd<'_> {
        self.descriptors[0].as_fd()
    }

    /// Waits until there is something to read; false if QEMU has ended.
    fn readable(&self, from: BorrowedFd<'_>) -> io::Result<bool> {
        let mut waited = [from, self.qemu()].map(|fd| PollFd::new(fd, PollFlags::POLLIN));
        loop {
            match poll(&mut waited, PollTimeout::NONE) {
                Err(Errno::EINTR) => continue,
                Err(error) => return Err(error.into()),
                Ok(_) => return Ok(!waited[1].any().unwrap_or(true)),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;
    use std::process::{Child, Command};
    use std::thread::{self, JoinHandle};
    use std::time::Duration;

    /// A process in QEMU's place, and its custodian, in a thread.
    struct Stage {
        qemu: Child,
        custodian: JoinHandle<anyhow::Result<()>>,
        directory: tempfile::TempDir,
        /// The other end of a pipe that is kept.
        pipe: io::PipeReader,
    }

    fn pidfd_of(qemu: &Child) -> OwnedFd {
        use std::os::fd::FromRawFd;
        // SAFETY: the child is not reaped yet; the descriptor is made for us alone.
        #[allow(unsafe_code)]
        unsafe {
            let fd = nix::libc::syscall(nix::libc::SYS_pidfd_open, qemu.id(), 0);
            OwnedFd::from_raw_fd(Errno::result(fd).unwrap() as i32)
        }
    }

    impl Stage {
        fn new() -> (Stage, UnixStream) {
            let qemu = Command::new("sleep").arg("1000").spawn().unwrap();
            let directory = tempfile::tempdir().unwrap();
            let socket = directory.path().join("custodian");
            let (pipe, writer) = io::pipe().unwrap();
            let estate = Estate { socket: socket.clone(), note: json!({"vm": "db"}), still_ms: 0 };
            let descriptors = vec![pidfd_of(&qemu), writer.into()];
            let (daemon, theirs) = UnixStream::pair().unwrap();
            let listener = listen(&socket).unwrap();
            let mut custodian =
                Custodian { estate, descriptors, listener, daemon: theirs, still: None };
            let custodian = thread::spawn(move || custodian.keep());
            let mut ready = [0];
            (&daemon).read_exact(&mut ready).unwrap();
            assert_eq!(ready, [READY]);
            (Stage { qemu, custodian, directory, pipe }, daemon)
        }

        fn state(&self) -> char {
            let stat = fs::read_to_string(format!("/proc/{}/stat", self.qemu.id())).unwrap();
            stat.rsplit(") ").next().unwrap().chars().next().unwrap()
        }

        fn await_state(&self, state: char) {
            let deadline = Instant::now() + Duration::from_secs(30);
            while self.state() != state {
                assert!(Instant::now() < deadline, "it is {:?}, not {state:?}", self.state());
                thread::yield_now();
            }
        }

        fn next_daemon(&self) -> (UnixStream, Estate, Vec<OwnedFd>) {
            let daemon = UnixStream::connect(self.directory.path().join("custodian")).unwrap();
            let (estate, descriptors) = transport::receive(&daemon).unwrap();
            (daemon, serde_json::from_slice(&estate).unwrap(), descriptors)
        }

        fn end(mut self) {
            self.custodian.join().unwrap().unwrap();
            self.qemu.kill().unwrap();
            self.qemu.wait().unwrap();
            let mut rest = Vec::new();
            self.pipe.read_to_end(&mut rest).unwrap();
        }
    }

    #[test]
    fn a_guest_stands_still_from_a_daemons_death_until_the_next_one_goes_on() {
        let (stage, daemon) = Stage::new();
        assert_ne!(stage.state(), 'T');
        drop(daemon);
        stage.await_state('T');
        // One that dies before it has done anything changes nothing.
        drop(stage.next_daemon());
        let (mut daemon, estate, descriptors) = stage.next_daemon();
        assert_eq!((stage.state(), &estate.note["vm"]), ('T', &json!("db")));
        assert_eq!(descriptors.len(), 2);
        signal(descriptors[0].as_fd(), Signal::SIGCONT).unwrap();
        stage.await_state('S');
        daemon.write_all(&[GOES_ON]).unwrap();
        // It is kept as before.
        drop((daemon, descriptors));
        stage.await_state('T');
        let (mut daemon, again, descriptors) = stage.next_daemon();
        assert!(again.still_ms <= 30_000, "{again:?}");
        signal(descriptors[0].as_fd(), Signal::SIGCONT).unwrap();
        daemon.write_all(&[END]).unwrap();
        drop(descriptors);
        stage.end();
    }

    #[test]
    fn a_guest_that_is_left_on_purpose_stands_still_before_it_is() {
        let (stage, mut daemon) = Stage::new();
        daemon.write_all(&[STOP]).unwrap();
        let mut ready = [0];
        daemon.read_exact(&mut ready).unwrap();
        assert_eq!(ready, [READY]);
        stage.await_state('T');
        thread::sleep(Duration::from_millis(20));
        drop(daemon);
        let (mut daemon, estate, descriptors) = stage.next_daemon();
        assert!(estate.still_ms >= 20, "not since it was stopped: {estate:?}");
        signal(descriptors[0].as_fd(), Signal::SIGCONT).unwrap();
        daemon.write_all(&[GOES_ON, END]).unwrap();
        drop(descriptors);
        stage.end();
    }

    #[test]
    fn a_custodian_ends_with_its_qemu() {
        let (mut stage, daemon) = Stage::new();
        stage.qemu.kill().unwrap();
        stage.end();
        drop(daemon);
        let (mut stage, daemon) = Stage::new();
        drop(daemon);
        stage.await_state('T');
        stage.qemu.kill().unwrap();
        stage.end();
    }
}
