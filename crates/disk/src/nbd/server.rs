//! The listening socket and the threads of one disk's server.

use super::connection::{Served, serve};
use super::handshake::Export;
use super::reading::{ColdRead, reader};
use super::traffic::{Counters, Traffic};
use crate::disk::Disk;
use crate::error::DiskError;
use nix::sys::socket;
use std::fs;
use std::io;
use std::net::Shutdown;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;
use understudy_threads::{Crew, spawn};

/// Threads for reads that wait for the device. QEMU has at most 16 requests under way.
const READERS: usize = 4;
/// A QEMU has one connection, and for a moment a second one when it reconnects.
const MAX_CONNECTIONS: usize = 16;

/// Serves one disk on a unix socket, with threads of its own.
///
/// Clients may come and go. Dropping the server hangs up on them, removes its socket and
/// joins the threads; a write that its sink holds up must be let go first.
pub struct NbdServer {
    socket: PathBuf,
    /// Which file it is: its directory may have been renamed, and another server's be in its place.
    file: (u64, u64),
    disk: Arc<Disk>,
    counters: Arc<Counters>,
    aside: Arc<AtomicBool>,
    listener: Arc<UnixListener>,
    stopping: Arc<AtomicBool>,
    /// The accepting thread ends with the connections that are left.
    acceptor: Option<JoinHandle<Vec<Client>>>,
}

struct Client {
    stream: Arc<UnixStream>,
    thread: JoinHandle<()>,
}

impl NbdServer {
    /// Starts serving `disk` on `socket`, replacing the socket of a server that is gone.
    ///
    /// The export is called `diskN`, and the empty name means it too.
    pub fn serve(disk: Arc<Disk>, socket: impl AsRef<Path>) -> Result<NbdServer, DiskError> {
        Self::start(disk, socket.as_ref(), false)
    }

    /// The same for a QEMU that is to go on in another's place: until [`NbdServer::adopt`] what
    /// it reads is nothing that its guest reads.
    pub fn serve_aside(disk: Arc<Disk>, socket: impl AsRef<Path>) -> Result<NbdServer, DiskError> {
        Self::start(disk, socket.as_ref(), true)
    }

    /// The guest is in this server's QEMU from now on.
    pub fn adopt(&self) {
        self.aside.store(false, Ordering::Release);
    }

    fn start(disk: Arc<Disk>, socket: &Path, aside: bool) -> Result<NbdServer, DiskError> {
        let listener = Arc::new(bind(socket)?);
        let name = format!("disk{}", disk.index());
        let export = Export { name: name.clone(), bytes: disk.export_bytes() };
        let counters = Arc::new(Counters::default());
        let aside = Arc::new(AtomicBool::new(aside));
        let stopping = Arc::new(AtomicBool::new(false));
        let served =
            Served { disk: disk.clone(), export, counters: counters.clone(), aside: aside.clone() };
        let of_readers = served.clone();
        let readers = Arc::new(Crew::new(format!("read-{name}"), READERS, move || {
            reader(of_readers.clone())
        }));
        // From here on an error drops the server, which cleans up.
        let mut server = NbdServer {
            file: identity(socket).map_err(DiskError::io("look at", socket))?,
            socket: socket.into(),
            disk,
            counters,
            aside,
            listener: listener.clone(),
            stopping: stopping.clone(),
            acceptor: None,
        };
        let spawn_failed = || DiskError::io("start a thread to serve", socket);
        let accept = move || accept_clients(&listener, &stopping, &served, &readers);
        let acceptor = spawn(format!("nbd-{name}"), accept).map_err(spawn_failed())?;
        server.acceptor = Some(acceptor);
        Ok(server)
    }

    /// The socket's path, for `-blockdev driver=nbd,server.type=unix,server.path=…`.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// What has been served so far.
    pub fn traffic(&self) -> Traffic {
        self.counters.now()
    }
}

impl Drop for NbdServer {
    fn drop(&mut self) {
        self.stopping.store(true, Ordering::Release);
        // Wakes accept(). It cannot fail on a listening socket.
        let _ = socket::shutdown(self.listener.as_raw_fd(), socket::Shutdown::Both);
        let clients = self.acceptor.take().and_then(join).unwrap_or_default();
        for client in &clients {
            // It fails only if the client has gone already.
            let _ = client.stream.shutdown(Shutdown::Both);
        }
        // They wait for blocks that nobody needs any more, perhaps.
        self.disk.give_up_restore();
        for client in clients {
            join(client.thread);
        }
        if identity(&self.socket).ok() != Some(self.file) {
            return;
        }
        if let Err(error) = fs::remove_file(&self.socket) {
            let socket = self.socket.display();
            tracing::warn!(%socket, %error, "cannot remove the NBD socket");
        }
    }
}

fn join<T>(thread: JoinHandle<T>) -> Option<T> {
    let name = thread.thread().name().unwrap_or_default().to_owned();
    thread.join().inspect_err(|_| tracing::error!(name, "a thread of the NBD server panicked")).ok()
}

/// Which file this is.
fn identity(path: &Path) -> io::Result<(u64, u64)> {
    let file = fs::symlink_metadata(path)?;
    Ok((file.dev(), file.ino()))
}

/// Binds the socket; one that nobody listens on any more is replaced.
fn bind(path: &Path) -> Result<UnixListener, DiskError> {
    let in_use = match UnixListener::bind(path) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => error,
        result => return result.map_err(DiskError::io("listen on", path)),
    };
    match UnixStream::connect(path) {
        Ok(_) => Err(DiskError::SocketInUse { path: path.into() }),
        // Also what connect() says to a file that is no socket: that one must stay.
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused && is_socket(path) => {
            fs::remove_file(path).map_err(DiskError::io("remove the stale socket", path))?;
            UnixListener::bind(path).map_err(DiskError::io("listen on", path))
        }
        Err(_) => Err(DiskError::io("listen on", path)(in_use)),
    }
}

fn is_socket(path: &Path) -> bool {
    use std::os::unix::fs::FileTypeExt;
    fs::symlink_metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket())
}

/// Accepts clients until told to stop; returns those that may still be connected.
fn accept_clients(
    listener: &UnixListener,
    stopping: &AtomicBool,
    served: &Served,
    readers: &Arc<Crew<ColdRead>>,
) -> Vec<Client> {
    let mut clients: Vec<Client> = Vec::new();
    loop {
        let accepted = listener.accept();
        if stopping.load(Ordering::Acquire) {
            return clients;
        }
        // A finished thread has nothing left to join but its memory.
        clients.retain(|client| !client.thread.is_finished());
        let started = accepted.and_then(|(stream, _)| {
            if clients.len() >= MAX_CONNECTIONS {
                return Err(io::Error::other("too many connections to one disk"));
            }
            start_client(stream, served.clone(), readers.clone())
        });
        match started {
            Ok(client) => clients.push(client),
            Err(error) => {
                let disk = served.disk.index();
                tracing::error!(%disk, %error, "cannot take an NBD connection");
                // Out of descriptors, say: do not spin.
                thread::sleep(Duration::from_millis(20));
            }
        }
    }
}

fn start_client(
    stream: UnixStream,
    served: Served,
    readers: Arc<Crew<ColdRead>>,
) -> io::Result<Client> {
    let kept = Arc::new(stream.try_clone()?);
    let hang_up = kept.clone();
    let disk = served.disk.index();
    let thread = spawn(format!("nbd-disk{disk}-io"), move || {
        tracing::debug!(%disk, "NBD client connected");
        served.disk.set_server_thread();
        match serve(&served, stream, &readers) {
            Ok(()) => tracing::debug!(%disk, "NBD client has gone"),
            Err(error) => tracing::warn!(%disk, %error, "dropped the NBD connection"),
        }
        // The acceptor keeps a descriptor of the connection, but the client must see its
        // end now. This fails only if the client has gone already.
        let _ = hang_up.shutdown(Shutdown::Both);
    })?;
    Ok(Client { stream: kept, thread })
}
