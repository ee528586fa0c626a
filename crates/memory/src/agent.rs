//! The daemon's side of the agent that is preloaded into QEMU (crate `understudy-agent`).

use crate::mappings::Mappings;
use crate::{FaultDescriptor, MemoryError, Userfaultfd, receive_with_descriptors};
use nix::cmsg_space;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{MsgFlags, getsockopt, sockopt::PeerCredentials};
use std::fs;
use std::io;
use std::ops::RangeInclusive;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};
use understudy_agent_protocol::{HELLO_DESCRIPTORS, Hello};

/// Number of descriptors that a link has.
pub const LINK_DESCRIPTORS: usize = 4;

/// The versions of agents with which [`AgentLink::adopt`] goes on.
pub const ADOPTED_AGENTS: RangeInclusive<u32> = Hello::ADOPTED;

/// Makes userfaultfds for whoever holds it open.
pub const DEVICE: &str = "/dev/userfaultfd";

/// Waits for the agent of one QEMU that the daemon is starting.
///
/// Start QEMU with `LD_PRELOAD` naming the agent library and [`AgentListener::VARIABLE`]
/// holding this listener's path, and without `-daemonize` (the agent's thread would not
/// survive the fork).
#[derive(Debug)]
pub struct AgentListener {
    listener: UnixListener,
    path: PathBuf,
}

impl AgentListener {
    /// The environment variable that tells the agent where the daemon listens.
    pub const VARIABLE: &'static str = understudy_agent_protocol::SOCKET_VARIABLE;

    /// The environment variable with the number of an inherited [`DEVICE`], for a QEMU
    /// without the right to make a userfaultfd by itself.
    pub const DEVICE_VARIABLE: &'static str = understudy_agent_protocol::DEVICE_VARIABLE;

    /// Listens at `path`, which must not exist; it is removed when the listener is dropped.
    pub fn bind(path: impl Into<PathBuf>) -> Result<AgentListener, MemoryError> {
        let path = path.into();
        let listen = || {
            let listener = UnixListener::bind(&path)?;
            listener.set_nonblocking(true)?;
            Ok(listener)
        };
        match listen() {
            Ok(listener) => Ok(AgentListener { listener, path }),
            Err(source) => Err(MemoryError::Listen { path, source }),
        }
    }

    /// Path of the socket.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Waits until `deadline` for the agent to connect and hand over its userfaultfds.
    pub fn accept(&self, deadline: Instant) -> Result<AgentLink, MemoryError> {
        let started = Instant::now();
        let silent =
            || MemoryError::AgentSilent { path: self.path.clone(), waited: started.elapsed() };
        let stream = loop {
            match self.listener.accept() {
                Ok((stream, _)) => break stream,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    if !readable_before(&self.listener, deadline)? {
                        return Err(silent());
                    }
                }
                Err(e) => return Err(MemoryError::AgentLink(e)),
            }
        };
        if !readable_before(&stream, deadline)? {
            return Err(silent());
        }
        AgentLink::greet(stream)
    }
}

impl Drop for AgentListener {
    fn drop(&mut self) {
        if let Err(e) = fs::remove_file(&self.path) {
            tracing::warn!("cannot remove {}: {e}", self.path.display());
        }
    }
}

/// The connection to the agent inside a QEMU.
///
/// **Dropping it ends that QEMU at once**, as does the daemon's death by any cause: a guest
/// must not outlive its daemon, which alone knows whether its copy may live. Unless somebody
/// else has its descriptors ([`AgentLink::duplicate`]), who then has the guest stand still.
#[derive(Debug)]
pub struct AgentLink {
    /// Connection that only has to be open; see [`AgentLink::socket`].
    stream: UnixStream,
    hello: Hello,
    pid: i32,
    userfaultfd: Arc<Userfaultfd>,
    faults: Arc<FaultDescriptor>,
    mappings: Arc<Mappings>,
}

impl AgentLink {
    /// QEMU's process, as the kernel vouches for it.
    pub fn pid(&self) -> i32 {
        self.pid
    }

    /// The userfaultfd of QEMU's address space that tracks writes.
    pub fn userfaultfd(&self) -> &Arc<Userfaultfd> {
        &self.userfaultfd
    }

    /// The one that reports faults.
    pub fn faults(&self) -> &Arc<FaultDescriptor> {
        &self.faults
    }

    /// QEMU's mappings.
    pub fn mappings(&self) -> &Arc<Mappings> {
        &self.mappings
    }

    /// The agent's description of itself.
    pub fn hello(&self) -> &Hello {
        &self.hello
    }

    /// The connection, for `understudy_qemu::pause`; anything else that is sent ends QEMU.
    pub fn socket(&self) -> BorrowedFd<'_> {
        self.stream.as_fd()
    }

    /// Its descriptors, for [`AgentLink::adopt`] in another process. As long as one of them has
    /// the first, QEMU does not end with this one.
    pub fn duplicate(&self) -> io::Result<[OwnedFd; LINK_DESCRIPTORS]> {
        Ok([
            self.stream.try_clone()?.into(),
            self.userfaultfd.duplicate()?,
            self.faults.duplicate()?,
            self.mappings.duplicate()?,
        ])
    }

    /// The link of a daemon that has died, whose agent said `hello` to it.
    pub fn adopt(
        descriptors: [OwnedFd; LINK_DESCRIPTORS],
        hello: &[u8],
        pid: i32,
    ) -> Result<AgentLink, MemoryError> {
        let [stream, tracking, faults, requests] = descriptors;
        Ok(AgentLink {
            stream: stream.into(),
            hello: Hello::decode_adopted(hello)
                .map_err(|e| MemoryError::AgentHello(e.to_string()))?,
            pid,
            userfaultfd: Arc::new(Userfaultfd::adopt(tracking)),
            faults: Arc::new(FaultDescriptor::adopt(faults)),
            mappings: Arc::new(Mappings::new(requests)?),
        })
    }

    fn greet(stream: UnixStream) -> Result<AgentLink, MemoryError> {
        let (hello, [tracking, faults, requests]) = receive_hello(&stream)?;
        let peer = getsockopt(&stream, PeerCredentials).map_err(link_error)?;
        Ok(AgentLink {
            stream,
            hello,
            pid: peer.pid(),
            userfaultfd: Arc::new(Userfaultfd::negotiate(tracking)?),
            faults: Arc::new(FaultDescriptor::negotiate(faults)?),
            mappings: Arc::new(Mappings::new(requests)?),
        })
    }
}

fn link_error(error: nix::Error) -> MemoryError {
    MemoryError::AgentLink(error.into())
}

/// Waits for `socket` to be readable; false if it is not by the deadline.
fn readable_before(socket: impl AsFd, deadline: Instant) -> Result<bool, MemoryError> {
    loop {
        // Rounded up to the poll's milliseconds, so that it does not spin at the end.
        let left = deadline.saturating_duration_since(Instant::now()) + Duration::from_micros(999);
        let timeout = PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX);
        let mut events = [PollFd::new(socket.as_fd(), PollFlags::POLLIN)];
        match poll(&mut events, timeout) {
            Ok(0) if Instant::now() >= deadline => return Ok(false),
            Ok(0) | Err(nix::Error::EINTR) => continue,
            Ok(_) => return Ok(true),
            Err(e) => return Err(link_error(e)),
        }
    }
}

/// Receives the hello and exactly its descriptors beside it.
fn receive_hello(
    stream: &UnixStream,
) -> Result<(Hello, [OwnedFd; HELLO_DESCRIPTORS]), MemoryError> {
    // One more, so that a longer message is not taken for a hello.
    let mut hello = [0; Hello::BYTES + 1];
    let mut control = cmsg_space!([RawFd; HELLO_DESCRIPTORS + 1]);
    let (bytes, descriptors) =
        receive_with_descriptors(stream, &mut hello, &mut control, MsgFlags::MSG_DONTWAIT)
            .map_err(link_error)?;
    let hello =
        Hello::decode(&hello[..bytes]).map_err(|e| MemoryError::AgentHello(e.to_string()))?;
    let descriptors = descriptors.try_into().map_err(|descriptors: Vec<OwnedFd>| {
        let count = descriptors.len();
        MemoryError::AgentHello(format!("{count} descriptors instead of {HELLO_DESCRIPTORS}"))
    })?;
    Ok((hello, descriptors))
}
