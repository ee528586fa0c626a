//! The listening socket and the threads of one disk's server.

use super::connection::{Door, Opened, REST, Served, serve};
use super::handshake::Export;
use super::reading::{ColdRead, reader};
use super::traffic::{Counters, Traffic};
use crate::disk::Disk;
use crate::error::DiskError;
use nix::sys::socket;
use std::fs;
use std::io;
use std::mem;
use std::net::Shutdown;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use understudy_threads::{Crew, Mutex, lock, spawn};

/// Threads for reads that wait for the device. QEMU has at most 16 requests under way.
const READERS: usize = 4;
/// A QEMU has one connection, and for a moment a second one when it reconnects.
pub(super) const MAX_CONNECTIONS: usize = 16;

/// Serves one disk on a unix socket, with threads of its own.
///
/// Clients may come and go. Dropping the server hangs up on them, removes its socket and
/// joins the threads; a write that its sink holds up must be let go first.
pub struct NbdServer {
    socket: PathBuf,
    /// Identity of the file: its directory may have been renamed, and another server's be in its
    /// place.
    file: (u64, u64),
    disk: Arc<Disk>,
    counters: Arc<Counters>,
    aside: Arc<AtomicBool>,
    listener: Arc<UnixListener>,
    stopping: Arc<AtomicBool>,
    clients: Arc<Clients>,
    thread: Option<JoinHandle<()>>,
}

/// Clients that are connected, or were.
#[derive(Default)]
struct Clients(Mutex<Vec<Client>>);

struct Client {
    stream: UnixStream,
    /// None for the one that the server's own thread serves.
    thread: Option<JoinHandle<()>>,
}

impl Client {
    fn has_gone(&self) -> bool {
        self.thread.as_ref().is_some_and(JoinHandle::is_finished)
    }

    fn hang_up(&self) {
        // It fails only if the client has gone already.
        let _ = self.stream.shutdown(Shutdown::Both);
    }
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
        let served = Served {
            disk: disk.clone(),
            export,
            counters: counters.clone(),
            aside: aside.clone(),
            room: Arc::default(),
        };
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
            clients: Arc::default(),
            thread: None,
        };
        let clients = server.clients.clone();
        let entrance = Entrance { listener, stopping, served, readers, clients };
        let thread = spawn(format!("nbd-{name}"), move || entrance.run());
        server.thread = Some(thread.map_err(DiskError::io("start a thread to serve", socket))?);
        Ok(server)
    }

    /// The socket's path, for `-blockdev driver=nbd,server.type=unix,server.path=…`.
    pub fn socket(&self) -> &Path {
        &self.socket
    }

    /// Traffic that has been served so far.
    pub fn traffic(&self) -> Traffic {
        self.counters.now()
    }
}

impl Drop for NbdServer {
    fn drop(&mut self) {
        self.stopping.store(true, Ordering::Release);
        // Wakes the thread, wherever it waits for clients. It cannot fail on a listening socket.
        let _ = socket::shutdown(self.listener.as_raw_fd(), socket::Shutdown::Both);
        lock(&self.clients.0).iter().for_each(Client::hang_up);
        // They wait for blocks that nobody needs any more, perhaps.
        self.disk.give_up_restore();
        if let Some(thread) = self.thread.take() {
            join(thread);
        }
        let clients = mem::take(&mut *lock(&self.clients.0));
        clients.into_iter().filter_map(|client| client.thread).for_each(join);
        if identity(&self.socket).ok() != Some(self.file) {
            return;
        }
        if let Err(error) = fs::remove_file(&self.socket) {
            let socket = self.socket.display();
            tracing::warn!(%socket, %error, "cannot remove the NBD socket");
        }
    }
}

fn join(thread: JoinHandle<()>) {
    let name = thread.thread().name().unwrap_or_default().to_owned();
    if thread.join().is_err() {
        tracing::error!(name, "a thread of the NBD server panicked");
    }
}

/// Identity of this file.
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

/// Lets clients in. The first one is served by the thread that does, others by their own.
struct Entrance {
    listener: Arc<UnixListener>,
    stopping: Arc<AtomicBool>,
    served: Served,
    readers: Arc<Crew<ColdRead>>,
    clients: Arc<Clients>,
}

impl Entrance {
    /// Serves clients until told to stop.
    fn run(self) {
        while !self.is_closed() {
            if let Err(error) = self.serve_next()
                && !self.is_closed()
            {
                self.complain(&error);
                // Out of descriptors, say: do not spin. This thread serves nobody meanwhile.
                thread::sleep(REST);
            }
        }
    }

    fn is_closed(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    fn serve_next(&self) -> io::Result<()> {
        let stream = self.accept()?;
        self.note(Client { stream: stream.try_clone()?, thread: None });
        serve_client(&self.served, stream, &self.readers, Some(self));
        lock(&self.clients.0).retain(|client| client.thread.is_some());
        Ok(())
    }

    fn serve_beside(&self) -> io::Result<()> {
        let stream = self.accept()?;
        let kept = stream.try_clone()?;
        let (served, readers) = (self.served.clone(), self.readers.clone());
        let body = move || serve_client(&served, stream, &readers, None);
        let name = format!("nbd-disk{}-io", self.served.disk.index());
        self.note(Client { stream: kept, thread: Some(spawn(name, body)?) });
        Ok(())
    }

    /// The next client; one too many is hung up on, and forgotten.
    fn accept(&self) -> io::Result<UnixStream> {
        let (stream, _) = self.listener.accept()?;
        let mut clients = lock(&self.clients.0);
        // A finished thread has nothing left to join but its memory.
        clients.retain(|client| !client.has_gone());
        match clients.len() < MAX_CONNECTIONS {
            true => Ok(stream),
            false => Err(io::Error::other("too many connections to one disk")),
        }
    }

    fn note(&self, client: Client) {
        let mut clients = lock(&self.clients.0);
        // Whoever stops this has hung up on those that it found here.
        if self.is_closed() {
            client.hang_up();
        }
        clients.push(client);
    }

    fn complain(&self, error: &io::Error) {
        let disk = self.served.disk.index();
        tracing::error!(%disk, %error, "cannot take an NBD connection");
    }
}

impl Door for Entrance {
    fn fd(&self) -> BorrowedFd<'_> {
        self.listener.as_fd()
    }

    fn open(&self) -> Opened {
        match self.serve_beside() {
            _ if self.is_closed() => Opened::Closed,
            Ok(()) => Opened::LetIn,
            Err(error) => {
                self.complain(&error);
                Opened::NotNow
            }
        }
    }
}

fn serve_client(
    served: &Served,
    stream: UnixStream,
    readers: &Crew<ColdRead>,
    door: Option<&dyn Door>,
) {
    let disk = served.disk.index();
    tracing::debug!(%disk, "NBD client connected");
    served.disk.set_server_thread();
    let hang_up = stream.try_clone();
    match serve(served, stream, readers, door) {
        Ok(()) => tracing::debug!(%disk, "NBD client has gone"),
        Err(error) => tracing::warn!(%disk, %error, "dropped the NBD connection"),
    }
    // Others keep a descriptor of the connection, but the client must see its end now. This fails
    // only if the client has gone already.
    let _ = hang_up.map(|stream| stream.shutdown(Shutdown::Both));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::nbd::protocol::GREETING_BYTES;
    use crate::nbd::reading::AwaitedRead;
    use crate::nbd::room::PLACES;
    use crate::reads::{ReadFollower, Reads, Span};
    use std::io::{Read, Write};
    use std::sync::atomic::AtomicUsize;
    use std::time::{Duration, Instant};
    use understudy_protocol::DiskIndex;
    use understudy_threads::Waitable;

    fn disk(directory: &Path) -> Disk {
        let image = directory.join("image");
        fs::write(&image, b"").unwrap();
        Disk::open(DiskIndex(0), &image, 1 << 20).unwrap()
    }

    /// Whether a client sends 100 000 of these without a reply.
    fn takes_any_number(server: &NbdServer, command: u8) -> bool {
        let mut client = UnixStream::connect(server.socket()).unwrap();
        client.read_exact(&mut [0; GREETING_BYTES]).unwrap();
        client.write_all(b"\0\0\0\x03IHAVEOPT\0\0\0\x01\0\0\0\0").unwrap();
        client.read_exact(&mut [0; 10]).unwrap();
        let mut request = vec![0x25, 0x60, 0x95, 0x13, 0, 0, 0, command];
        request.resize(28, 0);
        request[26] = 2; // Half a KiB, where it is a read.
        client.set_write_timeout(Some(Duration::from_secs(1))).unwrap();
        client.write_all(&request.repeat(100_000)).is_ok()
    }

    /// Regression: whoever had taken a QEMU over filled the daemon's memory: each took 150 bytes, at
    /// millions a second.
    #[test]
    fn no_more_flushes_are_read_than_may_wait_for_a_disk() {
        let directory = tempfile::tempdir().unwrap();
        let (gate, syncs) = (Arc::new(Waitable::new(false)), Arc::new(AtomicUsize::new(0)));
        let (waits, counted) = (gate.clone(), syncs.clone());
        let sync = move || {
            counted.fetch_add(1, Ordering::Relaxed);
            drop(waits.wait_while(waits.lock(), |open| !*open));
            Ok(())
        };
        let disk = Arc::new(disk(directory.path()).with_sync(Box::new(sync)));
        let server = NbdServer::serve(disk.clone(), directory.path().join("nbd")).unwrap();
        assert!(!takes_any_number(&server, 3));
        assert_eq!(syncs.load(Ordering::Relaxed), 1, "it hangs");
        // It waits for room, and hears that it is over.
        drop(server);
        gate.change(|open| *open = true);
        let deadline = Instant::now() + Duration::from_secs(20);
        while disk.has_requests() {
            assert!(Instant::now() < deadline, "all are answered");
            thread::sleep(Duration::from_millis(5));
        }
    }

    /// Keeps what was read.
    #[derive(Default)]
    struct Keeping(Mutex<Vec<AwaitedRead>>);

    impl ReadFollower for Keeping {
        fn came(&self, read: AwaitedRead) -> Option<AwaitedRead> {
            lock(&self.0).push(read);
            None
        }

        fn failed(&self, _: DiskIndex, _: Span, _: &io::Error) {}
    }

    #[test]
    fn no_more_reads_are_taken_than_may_wait_for_the_other_host() {
        let directory = tempfile::tempdir().unwrap();
        let (disk, kept) = (Arc::new(disk(directory.path())), Arc::new(Keeping::default()));
        disk.set_reads(Reads::Followed(kept.clone()));
        let server = NbdServer::serve(disk, directory.path().join("nbd")).unwrap();
        assert!(!takes_any_number(&server, 0));
        assert_eq!(lock(&kept.0).len(), PLACES);
        // There is room again for who comes next.
        lock(&kept.0).clear();
        assert!(!takes_any_number(&server, 0));
        assert_eq!(lock(&kept.0).len(), PLACES);
        drop(server);
    }

    /// Regression: such clients were remembered for as long as the server lived.
    #[test]
    fn a_client_that_is_one_too_many_is_hung_up_on_and_forgotten() {
        let directory = tempfile::tempdir().unwrap();
        let disk = Arc::new(disk(directory.path()));
        let server = NbdServer::serve(disk, directory.path().join("nbd")).unwrap();
        let connect = || UnixStream::connect(server.socket()).unwrap();
        let mut clients: Vec<UnixStream> = (0..MAX_CONNECTIONS).map(|_| connect()).collect();
        for client in &mut clients {
            client.read_exact(&mut [0; GREETING_BYTES]).expect("it is served");
        }
        for _ in 0..3 {
            assert_eq!(connect().read(&mut [0]).unwrap(), 0, "it is served, too");
        }
        assert_eq!(lock(&server.clients.0).len(), MAX_CONNECTIONS);
    }
}
