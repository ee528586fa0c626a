//! A relay on the way from one host to another that understands enough of the
//! wire format to damage exactly one message.

use crate::stage::{Calm, LIMIT, daemon_with_peers};
use anyhow::{Context, Result};
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use understudy_lab::{
    CLIENT_ADDRESS, HostOptions, Namespace, PEER_PORT, Scene, in_namespace, wait_for,
};
use understudy_protocol::wire::{HEADER_BYTES, Header, Kind};

const PORT: u16 = 7800;

/// A fault that happens to the first message that fits.
pub struct Fault {
    /// Whether it is one that the primary sends, or one that the backup sends.
    pub from_primary: bool,
    /// Whether a message of the data connection fits.
    pub fits: fn(&Header) -> bool,
    /// Damage to its bytes, header included, and what becomes of the connection.
    pub damage: fn(&mut Vec<u8>) -> Then,
}

/// The fate of the connection after the damaged message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Then {
    /// The connection goes on.
    Forward,
    /// The connection ends.
    Close,
    /// The connection carries no more this way; it stays open.
    Hold,
}

/// Forwards connections to host b; removed when dropped.
pub struct Relay {
    shared: Arc<Shared>,
    client: Namespace,
}

struct Shared {
    target: SocketAddr,
    stopping: AtomicBool,
    fault: Mutex<Option<Fault>>,
    struck: AtomicBool,
    streams: Mutex<Vec<TcpStream>>,
    stopped: Condvar,
}

impl Relay {
    /// The options of a host that reaches host b through the relay.
    pub fn options() -> HostOptions {
        // In the clear: the relay reads along.
        let peers = format!("b = \"{CLIENT_ADDRESS}:{PORT}\"");
        HostOptions { insecure: true, ..daemon_with_peers(&peers).calm() }
    }

    /// Starts the relay in the namespace of the laboratory's client.
    pub fn start(scene: &Scene) -> Result<Relay> {
        let client = scene.lab().client();
        let target = SocketAddr::from((scene.lab().host_address("b")?, PEER_PORT));
        let shared = Arc::new(Shared {
            target,
            stopping: AtomicBool::new(false),
            fault: Mutex::new(None),
            struck: AtomicBool::new(false),
            streams: Mutex::new(Vec::new()),
            stopped: Condvar::new(),
        });
        let listener = in_namespace(&client, || TcpListener::bind((CLIENT_ADDRESS, PORT)))??;
        let (acceptor, namespace) = (Arc::clone(&shared), client.clone());
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if acceptor.stopping.load(Ordering::Acquire) {
                    return;
                }
                // A target that does not answer is what the dialler sees too.
                let _ = connect(&acceptor, &namespace, stream);
            }
        });
        Ok(Relay { shared, client })
    }

    /// Has the first message from now on that fits damaged; only once.
    pub fn arm(&self, fault: Fault) {
        self.shared.struck.store(false, Ordering::Release);
        *lock(&self.shared.fault) = Some(fault);
    }

    /// Waits until the fault has struck.
    pub fn await_strike(&self) -> Result<()> {
        wait_for("the message that is to be damaged", LIMIT, || {
            Ok(self.shared.struck.load(Ordering::Acquire).then_some(()))
        })
    }
}

impl Drop for Relay {
    fn drop(&mut self) {
        let streams = lock(&self.shared.streams);
        self.shared.stopping.store(true, Ordering::Release);
        for stream in streams.iter() {
            // It may have ended by itself.
            let _ = stream.shutdown(Shutdown::Both);
        }
        drop(streams);
        self.shared.stopped.notify_all();
        // Wakes the accepting thread.
        let _ = in_namespace(&self.client, || TcpStream::connect((CLIENT_ADDRESS, PORT)));
    }
}

/// Joins a dialler with the target: two threads, which end with the connection.
fn connect(shared: &Arc<Shared>, client: &Namespace, dialler: TcpStream) -> Result<()> {
    let target = in_namespace(client, || TcpStream::connect(shared.target))??;
    let mut dialler = dialler;
    for stream in [&dialler, &target] {
        stream.set_nodelay(true)?;
        lock(&shared.streams).push(stream.try_clone()?);
    }
    let (hello, bytes) = read_message(&mut dialler)?.context("the dialler hung up")?;
    (&target).write_all(&bytes)?;
    // Its purpose is in the first words that a connection carries.
    let data = hello.kind == Kind::Hello && contains(&bytes, b"\"protect\"");
    for (from, to, from_primary) in [
        (dialler.try_clone()?, target.try_clone()?, true),
        (target.try_clone()?, dialler.try_clone()?, false),
    ] {
        let shared = Arc::clone(shared);
        thread::spawn(move || {
            let (from, to) = (&mut &from, &mut &to);
            // However it ended: the other side is to see it.
            let _ = if data {
                forward_messages(&shared, from, to, from_primary)
            } else {
                io::copy(from, to).map(drop)
            };
            let _ = to.shutdown(Shutdown::Both);
            let _ = from.shutdown(Shutdown::Both);
        });
    }
    Ok(())
}

fn contains(bytes: &[u8], words: &[u8]) -> bool {
    bytes.windows(words.len()).any(|window| window == words)
}

fn forward_messages(
    shared: &Shared,
    from: &mut &TcpStream,
    to: &mut &TcpStream,
    from_primary: bool,
) -> io::Result<()> {
    while let Some((header, mut bytes)) = read_message(from)? {
        let then = strike(shared, from_primary, &header, &mut bytes);
        if then == Then::Hold {
            wait_until_stopped(shared);
            return Ok(());
        }
        to.write_all(&bytes)?;
        if then == Then::Close {
            return Ok(());
        }
    }
    Ok(())
}

fn strike(shared: &Shared, from_primary: bool, header: &Header, bytes: &mut Vec<u8>) -> Then {
    let mut armed = lock(&shared.fault);
    let fits = |fault: &mut Fault| fault.from_primary == from_primary && (fault.fits)(header);
    let Some(fault) = armed.take_if(fits) else { return Then::Forward };
    let then = (fault.damage)(bytes);
    shared.struck.store(true, Ordering::Release);
    then
}

/// The next message, as it is on the wire; none at the connection's end.
fn read_message(from: &mut impl Read) -> io::Result<Option<(Header, Vec<u8>)>> {
    let mut first = [0; HEADER_BYTES];
    match from.read_exact(&mut first) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(None),
        result => result?,
    }
    let header = Header::decode(&first).map_err(io::Error::other)?;
    // Zeroes of the system's: a test is not optimised, and would write them one by one.
    let mut bytes = vec![0; HEADER_BYTES + header.length];
    bytes[..HEADER_BYTES].copy_from_slice(&first);
    from.read_exact(&mut bytes[HEADER_BYTES..])?;
    Ok(Some((header, bytes)))
}

fn wait_until_stopped(shared: &Shared) {
    let streams = lock(&shared.streams);
    let stopped = |_: &mut Vec<TcpStream>| !shared.stopping.load(Ordering::Acquire);
    drop(shared.stopped.wait_while(streams, stopped));
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
