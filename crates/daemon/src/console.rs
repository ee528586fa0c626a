//! A guest's console: QEMU has one end of it, whoever connects to its socket the other.
//!
//! The daemon stands between, so that QEMU's end is always connected: a port that nobody
//! listens to takes no byte, and in lockstep the backup would show nothing of what was said.

use anyhow::Context;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::eventfd::{EfdFlags, EventFd};
use std::io::{self, ErrorKind, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::Duration;

const AT_ONCE: usize = 4096;

/// A client that takes nothing for so long is disconnected: the guest waits meanwhile.
const PATIENCE: Duration = Duration::from_secs(1);

/// Serves one console until it is dropped.
pub(crate) struct ConsoleServer {
    stop: Arc<EventFd>,
    thread: Option<JoinHandle<()>>,
}

impl ConsoleServer {
    /// Listens at `path`, where nothing may be yet; returns QEMU's end, too.
    pub fn serve(path: &Path) -> anyhow::Result<(ConsoleServer, UnixStream)> {
        let listen = || {
            let listener = UnixListener::bind(path)?;
            listener.set_nonblocking(true)?;
            let (qemu, qemus) = UnixStream::pair()?;
            qemu.set_nonblocking(true)?;
            let stop = Arc::new(EventFd::from_flags(EfdFlags::EFD_CLOEXEC)?);
            let relay =
                Relay { qemu, listener, client: None, typed: Vec::new(), stop: Arc::clone(&stop) };
            let thread =
                thread::Builder::new().name("console".to_owned()).spawn(move || relay.run())?;
            io::Result::Ok((ConsoleServer { stop, thread: Some(thread) }, qemus))
        };
        listen().with_context(|| format!("cannot serve the console {}", path.display()))
    }
}

impl Drop for ConsoleServer {
    fn drop(&mut self) {
        // Fails only if it is signalled 2^64 times already.
        let _ = self.stop.write(1);
        if let Some(thread) = self.thread.take() {
            // A panic of the thread has already been reported.
            let _ = thread.join();
        }
    }
}

struct Relay {
    qemu: UnixStream,
    listener: UnixListener,
    /// One at a time; others wait to be accepted.
    client: Option<UnixStream>,
    /// What the client sent and QEMU has not taken.
    typed: Vec<u8>,
    stop: Arc<EventFd>,
}

impl Relay {
    /// Until QEMU ends, or the server is dropped.
    fn run(mut self) {
        while let Ok(true) = self.turn() {}
    }

    /// Waits for something, and sees to it. Returns whether there is more to come.
    fn turn(&mut self) -> io::Result<bool> {
        let (from_qemu, from_client) = {
            let mut of_qemu = PollFlags::POLLIN;
            of_qemu.set(PollFlags::POLLOUT, !self.typed.is_empty());
            let other = self.client.as_ref().map_or(self.listener.as_fd(), AsFd::as_fd);
            let of_client =
                if self.typed.is_empty() { PollFlags::POLLIN } else { PollFlags::empty() };
            let mut fds = [
                PollFd::new(self.stop.as_fd(), PollFlags::POLLIN),
                PollFd::new(self.qemu.as_fd(), of_qemu),
                PollFd::new(other, of_client),
            ];
            // A signal only makes us look once more.
            let _ = poll(&mut fds, PollTimeout::NONE);
            let [stop, qemu, client] = fds.map(|fd| fd.any().unwrap_or(true));
            if stop {
                return Ok(false);
            }
            (qemu, client)
        };
        if from_qemu {
            self.pass_on_typed()?;
            if !self.show()? {
                return Ok(false);
            }
        }
        if from_client {
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

    /// Gives the client what the guest says. Returns whether QEMU is there.
    fn show(&mut self) -> io::Result<bool> {
        let mut said = [0; AT_ONCE];
        match self.qemu.read(&mut said) {
            Ok(0) => Ok(false),
            Ok(count) => {
                if let Some(client) = &mut self.client {
                    if client.write_all(&said[..count]).is_err() {
                        self.client = None;
                    }
                }
                Ok(true)
            }
            Err(error) if is_passing(&error) => Ok(true),
            Err(error) => Err(error),
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

fn is_passing(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn expect(stream: &mut UnixStream, bytes: &[u8]) {
        stream.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let mut read = vec![0; bytes.len()];
        stream.read_exact(&mut read).unwrap();
        assert_eq!(read, bytes);
    }

    #[test]
    fn what_is_said_and_typed_goes_to_the_other_side() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("console");
        let (server, mut qemu) = ConsoleServer::serve(&path).unwrap();
        for _ in 0..2 {
            // Nobody hears it, and QEMU is not held up.
            qemu.write_all(&[b'x'; 3 * AT_ONCE]).unwrap();
            let mut client = UnixStream::connect(&path).unwrap();
            client.write_all(b"ls\n").unwrap();
            expect(&mut qemu, b"ls\n");
            qemu.write_all(b"bin dev\n").unwrap();
            let mut said = Vec::new();
            while !said.ends_with(b"bin dev\n") {
                let mut byte = [0];
                client.read_exact(&mut byte).unwrap();
                said.push(byte[0]);
            }
        }
        drop(server);
        assert_eq!(qemu.read(&mut [0]).unwrap(), 0, "QEMU sees the end");
    }

    #[test]
    fn it_ends_with_qemu() {
        let folder = tempfile::tempdir().unwrap();
        let (server, qemu) = ConsoleServer::serve(&folder.path().join("console")).unwrap();
        drop(qemu);
        let thread = { server }.thread.take().unwrap();
        thread.join().unwrap();
    }

    #[test]
    fn a_path_that_is_taken_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("console");
        let _first = ConsoleServer::serve(&path).unwrap();
        let error = ConsoleServer::serve(&path).err().unwrap();
        assert!(format!("{error:#}").contains("cannot serve the console"), "{error:#}");
    }
}
