//! How another host's connection about a VM gets to the VM's keeper: the daemon, which has found out
//! whose it is, passes its descriptor through a socket in the VM's directory, and has nothing to do
//! with it from then on. The keeper begins anew with the peer, as if it had listened itself. By the same way it hears
//! of orders about further VMs of its group.

use crate::gate::{self, await_connection};
use crate::host::Host;
use anyhow::{Context, ensure};
use nix::cmsg_space;
use nix::sys::socket::{
    AddressFamily, ControlMessage, MsgFlags, Shutdown, SockFlag, SockType, UnixAddr, connect,
    getsockopt, sendmsg, shutdown, socket, sockopt,
};
use std::fs;
use std::io::{self, IoSlice, Read, Write};
use std::net::TcpStream;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Weak};
use std::thread;
use std::time::Duration;
use tracing::warn;
use understudy_memory::receive_with_descriptors;

/// For the other process to do its part; a keeper may just be starting.
const PATIENCE: Duration = Duration::from_secs(20);
/// What goes with a connection, and with a socket for an order; what the keeper says when it has it.
const PASSED: u8 = 1;
const ORDERED: u8 = 3;
const TAKEN: u8 = 2;
/// More descriptors than come with a connection, so that too many are noticed.
const MOST_DESCRIPTORS: usize = 4;

/// Gives a connection to the keeper that listens there; returns when it has it.
pub(super) fn pass(keeper: &Path, connection: BorrowedFd<'_>) -> anyhow::Result<()> {
    hand_over(keeper, PASSED, connection)
}

/// Gives a keeper a socket on which it hears an order; returns when it has it.
pub(super) fn order(keeper: &Path, socket: BorrowedFd<'_>) -> anyhow::Result<()> {
    hand_over(keeper, ORDERED, socket)
}

fn hand_over(keeper: &Path, word: u8, descriptor: BorrowedFd<'_>) -> anyhow::Result<()> {
    let mut keeper = dial(keeper).context("its keeper cannot be reached")?;
    let descriptors = [descriptor.as_raw_fd()];
    let beside = [ControlMessage::ScmRights(&descriptors)];
    let word = [word];
    let said = [IoSlice::new(&word)];
    sendmsg::<UnixAddr>(keeper.as_raw_fd(), &said, &beside, MsgFlags::MSG_NOSIGNAL, None)
        .context("it cannot be handed to its keeper")?;
    let mut answer = [0];
    keeper.read_exact(&mut answer).context("its keeper has not taken what it was handed")?;
    ensure!(answer == [TAKEN], "its keeper says {answer:?} to what it was handed");
    Ok(())
}

/// Connects to a keeper; one that hangs is not waited for without a bound.
fn dial(keeper: &Path) -> io::Result<UnixStream> {
    let made = socket(AddressFamily::Unix, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    let stream = UnixStream::from(made);
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    connect(stream.as_raw_fd(), &UnixAddr::new(keeper)?)?;
    Ok(stream)
}

/// The keeper's end of what the daemon passes on.
pub struct Connections(UnixListener);

impl Connections {
    /// In the place of those of the keeper that was there before: this one has the VM's lock.
    pub(super) fn bind(path: &Path) -> io::Result<Connections> {
        match fs::remove_file(path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        let listener = UnixListener::bind(path)?;
        fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
        listener.set_nonblocking(true)?;
        Ok(Connections(listener))
    }

    /// Takes connections for as long as the host lives and what is returned.
    pub(super) fn take_in(self, host: &Arc<Host>) -> io::Result<Listening> {
        let listening = Listening { listener: self.0.try_clone()?, is_over: Arc::default() };
        let (host, is_over) = (Arc::downgrade(host), listening.is_over.clone());
        let run = move || run(&host, &self.0, &is_over);
        thread::Builder::new().name("passed".to_owned()).spawn(run)?;
        Ok(listening)
    }
}

/// Takes no connection any more when dropped.
pub(super) struct Listening {
    listener: UnixListener,
    is_over: Arc<AtomicBool>,
}

impl Drop for Listening {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::Release);
        // Wakes whoever waits for a connection.
        if let Err(error) = shutdown(self.listener.as_raw_fd(), Shutdown::Both) {
            warn!("the socket for connections is not closed: {error}");
        }
    }
}

fn run(host: &Weak<Host>, listener: &UnixListener, is_over: &AtomicBool) {
    let mut deadline = None;
    loop {
        await_connection(listener, deadline);
        if is_over.load(Ordering::Acquire) {
            return;
        }
        let Some(host) = host.upgrade() else { return };
        if let Ok((daemon, _)) = listener.accept()
            && let Err(error) = take(&host, daemon)
        {
            warn!("what was passed on to this keeper is not taken: {error:#}");
        }
        deadline = host.lobby.end_overdue();
    }
}

fn take(host: &Arc<Host>, mut daemon: UnixStream) -> anyhow::Result<()> {
    daemon.set_nonblocking(false)?;
    daemon.set_read_timeout(Some(PATIENCE))?;
    match receive(&daemon)? {
        (PASSED, descriptor) => {
            let connection = TcpStream::from(descriptor);
            let from = connection.peer_addr().context("it is no connection of another host")?;
            gate::admit(host, connection, from)?;
        }
        (_, descriptor) => {
            let socket = UnixStream::from(descriptor);
            socket.local_addr().context("it is no socket of the daemon")?;
            socket.set_read_timeout(Some(PATIENCE))?;
            host.take_further_order(socket)?;
        }
    }
    Ok(daemon.write_all(&[TAKEN])?)
}

/// One socket, and what it is.
fn receive(daemon: &UnixStream) -> anyhow::Result<(u8, OwnedFd)> {
    let (mut word, mut control) = ([0], cmsg_space!([RawFd; MOST_DESCRIPTORS]));
    let (bytes, mut descriptors) =
        receive_with_descriptors(daemon, &mut word, &mut control, MsgFlags::empty())?;
    let is_known = matches!(word, [PASSED | ORDERED]);
    ensure!(bytes == 1 && is_known, "the daemon says {:?}", &word[..bytes]);
    ensure!(descriptors.len() == 1, "{} descriptors came with it", descriptors.len());
    let descriptor = descriptors.remove(0);
    let kind = getsockopt(&descriptor, sockopt::SockType).context("it is no socket")?;
    ensure!(kind == SockType::Stream, "it is no connection");
    Ok((word[0], descriptor))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{TcpListener, UdpSocket};
    use std::os::fd::AsFd;

    /// What a keeper makes of something that is passed to it.
    fn passed(what: BorrowedFd<'_>) -> anyhow::Result<TcpStream> {
        let directory = tempfile::tempdir()?;
        let path = directory.path().join("peers.sock");
        let Connections(listener) = Connections::bind(&path)?;
        thread::scope(|scope| {
            let daemon = scope.spawn(|| pass(&path, what));
            await_connection(&listener, None);
            let mut stream = listener.accept()?.0;
            stream.set_nonblocking(false)?;
            let received = receive(&stream).and_then(|(word, descriptor)| {
                assert_eq!(word, PASSED);
                let connection = TcpStream::from(descriptor);
                connection.peer_addr().context("it is no connection of another host")?;
                Ok(connection)
            });
            if received.is_ok() {
                stream.write_all(&[TAKEN])?;
            }
            drop(stream);
            assert_eq!(daemon.join().unwrap().is_ok(), received.is_ok());
            received
        })
    }

    #[test]
    fn a_connection_goes_on_in_the_process_that_got_it() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let accepted = listener.accept().unwrap().0;
        let mut got = passed(accepted.as_fd()).unwrap();
        drop(accepted);
        got.write_all(b"hello").unwrap();
        let mut said = [0; 5];
        peer.read_exact(&mut said).unwrap();
        assert_eq!(&said, b"hello");
    }

    #[test]
    fn what_is_no_connection_is_not_taken() {
        let file = tempfile::tempfile().unwrap();
        let datagrams = UdpSocket::bind("127.0.0.1:0").unwrap();
        let (local, _other) = UnixStream::pair().unwrap();
        for (what, words) in [
            (file.as_fd(), "no socket"),
            (datagrams.as_fd(), "no connection"),
            (local.as_fd(), "no connection of another host"),
        ] {
            let error = format!("{:#}", passed(what).unwrap_err());
            assert!(error.contains(words), "{error}");
        }
    }

    #[test]
    fn a_keeper_that_is_not_there_is_said_to_be() {
        let directory = tempfile::tempdir().unwrap();
        let (connection, _other) = UnixStream::pair().unwrap();
        let error = pass(&directory.path().join("peers.sock"), connection.as_fd()).unwrap_err();
        assert!(error.to_string().contains("cannot be reached"), "{error:#}");
    }
}
