//! The relay between QEMU and whoever is connected to a console, while somebody speaks. A log on
//! a slow disk and a client that takes nothing hold it up.

use super::PATIENCE;
use super::log::ConsoleLog;
use super::output::{ConsoleOutput, is_passing};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::EventFd;
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::sync::Arc;
use tracing::warn;

const AT_ONCE: usize = 4096;

/// Milliseconds after which nobody speaks any more.
const QUIET: u16 = 2000;

pub(crate) struct Relay {
    pub output: Arc<ConsoleOutput>,
    pub qemu: UnixStream,
    pub listener: UnixListener,
    /// The client, one at a time; others wait to be accepted.
    pub client: Option<UnixStream>,
    /// Bytes that the client sent and QEMU has not taken.
    pub typed: Vec<u8>,
    /// All that may be heard; none after it could not be written to.
    pub log: Option<ConsoleLog>,
}

/// The work that there is to do.
struct Turn {
    stop: bool,
    qemu: bool,
    changed: bool,
    client: bool,
}

impl Turn {
    fn is_quiet(&self) -> bool {
        !(self.stop || self.qemu || self.changed || self.client)
    }
}

impl Relay {
    /// Sees to all that is said and typed until nobody speaks any more. None once QEMU has ended,
    /// or `stop` says so.
    pub fn run(mut self, stop: &EventFd) -> Option<Relay> {
        loop {
            let turn = self.wait(stop);
            if turn.is_quiet() {
                return Some(self);
            }
            if !matches!(self.take_turn(&turn), Ok(true)) {
                self.end();
                return None;
            }
        }
    }

    /// Ends it: nothing is taken from QEMU any more, except what is there already.
    pub fn end(mut self) {
        self.output.take_rest();
        self.show();
    }

    /// The descriptors at which to wait: QEMU, the output, and a client.
    pub fn waits_for(&self) -> [(BorrowedFd<'_>, PollFlags); 3] {
        let mut of_qemu = PollFlags::empty();
        of_qemu.set(PollFlags::POLLIN, self.output.has_room());
        of_qemu.set(PollFlags::POLLOUT, !self.typed.is_empty());
        let other = self.client.as_ref().map_or(self.listener.as_fd(), AsFd::as_fd);
        let of_client = if self.typed.is_empty() { PollFlags::POLLIN } else { PollFlags::empty() };
        [
            (self.qemu.as_fd(), of_qemu),
            (self.output.changed(), PollFlags::POLLIN),
            (other, of_client),
        ]
    }

    fn wait(&self, stop: &EventFd) -> Turn {
        let [qemu, changed, client] = self.waits_for();
        let stop = (stop.as_fd(), PollFlags::POLLIN);
        let mut fds = [stop, qemu, changed, client].map(|(fd, wanted)| PollFd::new(fd, wanted));
        // A signal only makes us look once more.
        let _ = poll(&mut fds, PollTimeout::from(QUIET));
        let [stop, qemu, changed, client] = fds.map(|fd| fd.any().unwrap_or(true));
        Turn { stop, qemu, changed, client }
    }

    /// Returns whether there is more to come.
    fn take_turn(&mut self, turn: &Turn) -> io::Result<bool> {
        if turn.stop {
            return Ok(false);
        }
        if turn.changed {
            self.output.clear();
        }
        if turn.qemu {
            self.pass_on_typed()?;
            if !self.output.take()? {
                return Ok(false);
            }
        }
        self.show();
        if turn.client {
            self.listen();
        }
        Ok(true)
    }

    /// Gives QEMU what was typed, as much as it takes.
    fn pass_on_typed(&mut self) -> io::Result<()> {
        while !self.typed.is_empty() {
            match self.qemu.write(&self.typed) {
                Ok(taken) => drop(self.typed.drain(..taken)),
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Gives log and client what may be heard.
    fn show(&mut self) {
        while let Some(batch) = self.output.released() {
            let words = batch.frames().iter().collect::<Vec<_>>().concat();
            self.output.heard(batch);
            if let Some(Err(error)) = self.log.as_mut().map(|log| log.write(&words)) {
                warn!("a console's log ends here, it cannot be written to: {error}");
                self.log = None;
            }
            if let Some(Err(_)) = self.client.as_mut().map(|client| client.write_all(&words)) {
                self.client = None;
            }
        }
    }

    /// Takes what the client sends, or a client.
    fn listen(&mut self) {
        let Some(client) = &mut self.client else {
            let patient = |client: &UnixStream| client.set_write_timeout(Some(PATIENCE)).is_ok();
            self.client = self.listener.accept().ok().map(|(client, _)| client).filter(patient);
            return;
        };
        let mut typed = [0; AT_ONCE];
        match client.read(&mut typed) {
            Ok(count) if count > 0 => self.typed.extend_from_slice(&typed[..count]),
            Err(error) if is_passing(&error) => {}
            // Gone.
            _ => self.client = None,
        }
    }
}
