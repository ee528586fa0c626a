//! Way of another host's connection about a VM to the VM's keeper: the daemon, which has found out
//! whose it is, passes its descriptor through a socket in the VM's directory, and has nothing to do
//! with it from then on. The keeper begins anew with the peer, as if it had listened itself, and takes from it
//! only what the daemon has passed the connection on for. By the same way it hears of orders about further VMs of its
//! group.

use crate::gate::{self, BackOff, await_connection};
use crate::host::Host;
use anyhow::{Context, ensure};
use nix::cmsg_space;
use nix::sys::socket::{
    AddressFamily, ControlMessage, MsgFlags, Shutdown, SockFlag, SockType, UnixAddr, connect,
    getsockopt, sendmsg, shutdown, socket, sockopt,
};
use serde::Deserialize;
use std::fs;
use std::io::{self, BufReader, IoSlice, Read, Write};
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
use understudy_protocol::VmName;
use understudy_protocol::wire::MAX_PAYLOAD;
use understudy_replication::handshake::{Offer, Purpose};
use understudy_report::error::{ErrorKind, HostError};

/// Time for the other process to do its part; a keeper may just be starting.
const PATIENCE: Duration = Duration::from_secs(20);
/// Byte that goes with a connection about the keeper's VM, and the one that the keeper answers when
/// it has it.
const PASSED: u8 = 1;
const TAKEN: u8 = 2;
/// Byte that goes with a socket for an order, and the one with a connection on which a VM is
/// offered; the offer follows.
const ORDERED: u8 = 3;
const OFFERED: u8 = 4;
/// Most bytes of an offer, in JSON: as the daemon writes it, it may be longer than it came.
const MOST_BYTES: u64 = 2 * MAX_PAYLOAD as u64;
/// More descriptors than come with a connection, so that too many are noticed.
const MOST_DESCRIPTORS: usize = 4;

/// Purpose for which the daemon has passed a connection on. The peer says once more what it wants,
/// and might say something else then, which nobody has examined.
#[derive(Debug)]
pub enum Passed {
    /// Requests about this VM, for its keeper.
    About(VmName),
    /// Offer which nothing speaks against.
    Offer(Box<Offer>),
}

impl Passed {
    /// Refuses everything else. `vm_of` names the VM of a session of this process.
    pub fn check(
        &self,
        purpose: &Purpose,
        vm_of: impl FnOnce(&str) -> Option<VmName>,
    ) -> Result<(), HostError> {
        let is_meant = match (self, purpose) {
            (Passed::Offer(examined), Purpose::Protect(offer)) => examined == offer,
            (
                Passed::About(vm),
                Purpose::Heartbeat { session, .. }
                | Purpose::Inbound { session }
                | Purpose::Resume { session, .. },
            ) => vm_of(session).is_none_or(|other| other == *vm),
            (Passed::About(vm), Purpose::Kept { membership, .. }) => {
                membership.members.iter().any(|member| member.vm == *vm)
            }
            _ => false,
        };
        if is_meant {
            return Ok(());
        }
        let message = match self {
            Passed::About(vm) => format!("this is the keeper of {vm}, and answers nothing else"),
            Passed::Offer(offer) => format!(
                "this is the keeper of {}, which waits for what was offered, and answers nothing else",
                offer.definition.name
            ),
        };
        Err(HostError::new(ErrorKind::Conflict, message))
    }
}

/// Gives a connection, on which there is perhaps an offer, to the keeper that listens there; returns when it has it.
pub(super) fn pass(
    keeper: &Path,
    connection: BorrowedFd<'_>,
    offer: Option<&Offer>,
) -> anyhow::Result<()> {
    match offer.map(serde_json::to_vec).transpose()? {
        None => hand_over(keeper, PASSED, connection, &[]),
        Some(offer) => hand_over(keeper, OFFERED, connection, &offer),
    }
}

/// Gives a keeper a socket on which it hears an order; returns when it has it.
pub(super) fn order(keeper: &Path, socket: BorrowedFd<'_>) -> anyhow::Result<()> {
    hand_over(keeper, ORDERED, socket, &[])
}

fn hand_over(
    keeper: &Path,
    word: u8,
    descriptor: BorrowedFd<'_>,
    further: &[u8],
) -> anyhow::Result<()> {
    let mut keeper = dial(keeper).context("its keeper cannot be reached")?;
    let descriptors = [descriptor.as_raw_fd()];
    let beside = [ControlMessage::ScmRights(&descriptors)];
    let word = [word];
    let said = [IoSlice::new(&word)];
    sendmsg::<UnixAddr>(keeper.as_raw_fd(), &said, &beside, MsgFlags::MSG_NOSIGNAL, None)
        .context("it cannot be handed to its keeper")?;
    keeper.write_all(further).context("its keeper does not hear what it was handed")?;
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
    /// Binds in the place of those of the keeper that was there before: this one has the VM's lock.
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

    /// Takes connections about a VM for as long as the host lives and what is returned.
    pub(super) fn take_in(self, host: &Arc<Host>, vm: &VmName) -> io::Result<Listening> {
        let listening = Listening { listener: self.0.try_clone()?, is_over: Arc::default() };
        let (host, vm, is_over) = (Arc::downgrade(host), vm.clone(), listening.is_over.clone());
        let run = move || run(&host, &vm, &self.0, &is_over);
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

fn run(host: &Weak<Host>, vm: &VmName, listener: &UnixListener, is_over: &AtomicBool) {
    let (mut deadline, mut back_off) = (None, BackOff::default());
    loop {
        await_connection(listener, deadline);
        if is_over.load(Ordering::Acquire) {
            return;
        }
        let Some(host) = host.upgrade() else { return };
        match listener.accept() {
            Ok((daemon, _)) => {
                back_off.end();
                if let Err(error) = take(&host, vm, daemon) {
                    warn!("what was passed on to this keeper is not taken: {error:#}");
                }
            }
            Err(error) => back_off.rest_if_exhausted(&host.lobby, &error),
        }
        deadline = host.lobby.end_overdue();
    }
}

fn take(host: &Arc<Host>, vm: &VmName, mut daemon: UnixStream) -> anyhow::Result<()> {
    daemon.set_nonblocking(false)?;
    daemon.set_read_timeout(Some(PATIENCE))?;
    match receive(&daemon)? {
        (PASSED, descriptor) => admit(host, descriptor, Passed::About(vm.clone()))?,
        (OFFERED, descriptor) => admit(host, descriptor, Passed::Offer(hear_offer(&daemon)?))?,
        (_, descriptor) => {
            let socket = UnixStream::from(descriptor);
            socket.local_addr().context("it is no socket of the daemon")?;
            socket.set_read_timeout(Some(PATIENCE))?;
            host.take_further_order(socket)?;
        }
    }
    Ok(daemon.write_all(&[TAKEN])?)
}

fn admit(host: &Arc<Host>, connection: OwnedFd, passed: Passed) -> anyhow::Result<()> {
    let connection = TcpStream::from(connection);
    let from = connection.peer_addr().context("it is no connection of another host")?;
    Ok(gate::admit(host, connection, from, Some(passed))?)
}

fn hear_offer(daemon: &UnixStream) -> anyhow::Result<Box<Offer>> {
    let said = BufReader::new(daemon.take(MOST_BYTES));
    // Up to its end: the daemon waits for an answer, and does not hang up.
    let offer = Offer::deserialize(&mut serde_json::Deserializer::from_reader(said));
    Ok(Box::new(offer.context("the offer is not understood")?))
}

/// One socket, and what it is.
fn receive(daemon: &UnixStream) -> anyhow::Result<(u8, OwnedFd)> {
    let (mut word, mut control) = ([0], cmsg_space!([RawFd; MOST_DESCRIPTORS]));
    let (bytes, mut descriptors) =
        receive_with_descriptors(daemon, &mut word, &mut control, MsgFlags::empty())?;
    let is_known = matches!(word, [PASSED | ORDERED | OFFERED]);
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
    use serde_json::json;
    use std::net::{TcpListener, UdpSocket};
    use std::os::fd::AsFd;
    use understudy_protocol::{Generation, PathIndex, literal};
    use understudy_replication::membership::{Member, Membership};

    /// Socket that a keeper makes of something that is passed to it.
    fn passed(what: BorrowedFd<'_>) -> anyhow::Result<TcpStream> {
        let directory = tempfile::tempdir()?;
        let path = directory.path().join("peers.sock");
        let Connections(listener) = Connections::bind(&path)?;
        thread::scope(|scope| {
            let daemon = scope.spawn(|| pass(&path, what, None));
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
        let nowhere = directory.path().join("peers.sock");
        let error = pass(&nowhere, connection.as_fd(), None).unwrap_err();
        assert!(error.to_string().contains("cannot be reached"), "{error:#}");
    }

    fn offer(vm: &str, memory: &str) -> Box<Offer> {
        let offer = json!({
            "session": "s",
            "definition": {
                "name": vm, "memory": memory, "vcpus": 1,
                "disk": [{ "path": "/d.img", "format": "raw" }],
            },
            "machine_type": "pc", "accelerator": "tcg", "qemu_version": "7.2.0", "generation": 1,
            "arbiter": { "id": "0".repeat(32), "place": "/arbiter" }, "disk_bytes": [1], "files": [], "paths": ["10.0.0.1:7700"],
            "path": 0,
        });
        Box::new(serde_json::from_value(offer).unwrap())
    }

    #[test]
    fn an_offer_is_the_same_one_in_the_keeper() {
        let (daemon, keeper) = UnixStream::pair().unwrap();
        let (one, other) = (offer("db", "64M"), offer("db", "66M"));
        (&daemon).write_all(&serde_json::to_vec(&*one).unwrap()).unwrap();
        assert_eq!(hear_offer(&keeper).unwrap(), one);
        let passed = Passed::Offer(one.clone());
        let check = |purpose: Purpose| passed.check(&purpose, |_| None);
        check(Purpose::Protect(one)).unwrap();
        for wrong in [Purpose::Protect(other), Purpose::Protect(offer("web", "64M")), beats()] {
            let error = check(wrong).unwrap_err();
            assert!(error.message.contains("keeper of db"), "{error}");
        }
    }

    fn beats() -> Purpose {
        Purpose::Heartbeat { session: "s".to_owned(), path: PathIndex(0) }
    }

    /// Regression: what was about one VM of a group could be about any, and an offer of any VM.
    #[test]
    fn a_connection_is_about_the_vm_for_which_it_was_passed_on() {
        let passed = Passed::About(literal("db"));
        let check = |purpose: &Purpose, vm: Option<&str>| {
            passed.check(purpose, |_| vm.map(|vm| vm.parse().unwrap())).is_ok()
        };
        let kept = |vms: &[&str]| {
            let member = |vm: &&str| Member { vm: vm.parse().unwrap(), generation: Generation(1) };
            let members = vms.iter().map(member).collect();
            let membership = Membership { name: Some(literal("pair")), members };
            Purpose::Kept { membership, from: Generation(1) }
        };
        // Of a session that is not there others say that.
        assert!(check(&beats(), Some("db")) && check(&beats(), None));
        assert!(!check(&beats(), Some("web")));
        assert!(check(&kept(&["db"]), None) && !check(&kept(&["web"]), None));
        assert!(check(&kept(&["web", "db"]), None), "the leader may be in it no more");
        assert!(!check(&Purpose::Protect(offer("db", "64M")), None));
        assert!(!check(&Purpose::Probe, None));
    }
}
