//! One client: its requests, and the replies in whatever order they come to be done.
//!
//! The connection's thread carries out each request at once, but for two kinds that wait
//! for the device: reads that the page cache cannot serve go to the server's reader
//! threads, flushes to the disk's flusher.

use super::handshake::{ConnectionError, Export, Outcome, negotiate};
use super::protocol::{Command, REQUEST_BYTES, Request, Status, reply};
use super::reading::{ColdRead, UnderWay};
use super::room::Room;
use super::traffic::Counters;
use crate::disk::Disk;
use crate::image::Space;
use crate::lent::Loan;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{setsockopt, sockopt};
use std::cell::RefCell;
use std::io::{self, BufReader, IoSlice, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};
use understudy_threads::{Crew, Mutex};

/// Holds several headers, or a header and a small write, per system call; the rest of a
/// large write goes past it.
const INPUT_BUFFER_BYTES: usize = 16 * 1024;
/// Room for a few of QEMU's largest requests, with what the kernel counts beside them.
const SEND_BUFFER_BYTES: usize = 4 * 1024 * 1024;
/// Buffers for larger requests (rare: QEMU splits them) are given back after use.
const KEPT_BUFFER_BYTES: usize = 2 * 1024 * 1024;
/// Reads from here on are lent to the socket by the page cache; below, a copy costs less.
pub(super) const LENT_BYTES: u32 = 32 * 1024;
/// A client that connects is a QEMU that starts; it does not dawdle.
const HANDSHAKE_PATIENCE: Duration = Duration::from_secs(10);
/// Time that who knocks waits after one who could not be let in.
pub(super) const REST: Duration = Duration::from_millis(100);
/// Time between two looks whether there is room again for requests, which only a client that is no QEMU
/// waits for.
const GLANCE: Duration = Duration::from_millis(10);

/// State that all connections of one server share.
#[derive(Clone)]
pub(super) struct Served {
    pub(super) disk: Arc<Disk>,
    pub(super) export: Export,
    pub(super) counters: Arc<Counters>,
    /// The client is not the guest's QEMU yet.
    pub(super) aside: Arc<AtomicBool>,
    pub(super) room: Arc<Room>,
}

/// Door where other clients knock.
pub(super) trait Door {
    /// Descriptor that is readable when one does, or the door is closed for good.
    fn fd(&self) -> BorrowedFd<'_>;
    /// Lets it in, on a thread of its own. Whoever asks serves a guest: this waits for nothing.
    fn open(&self) -> Opened;
}

/// Outcome of opening a door.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Opened {
    /// The client that knocked is in.
    LetIn,
    /// The client could not be let in, nor could the next one at once.
    NotNow,
    /// The door is closed for good.
    Closed,
}

/// Serves one client until it goes; who knocks meanwhile is let in, if there is a door.
pub(super) fn serve(
    served: &Served,
    stream: UnixStream,
    readers: &Crew<ColdRead>,
    door: Option<&dyn Door>,
) -> Result<(), ConnectionError> {
    make_room(&stream);
    let patience = Some(HANDSHAKE_PATIENCE);
    let requests = Requests { stream: stream.try_clone()?, patience, door, rests_until: None };
    let mut input = BufReader::with_capacity(INPUT_BUFFER_BYTES, requests);
    if negotiate(&mut input, &mut &stream, &served.export)? == Outcome::Abort {
        return Ok(());
    }
    input.get_mut().patience = None;

    let replies = Arc::new(Replies::new(stream, served.disk.clone()));
    let connection = Connection { served, replies, readers, cold: RefCell::default() };
    connection.transmission(&mut input)
}

/// The receiving side.
struct Requests<'a> {
    stream: UnixStream,
    /// Waits so long for the next bytes, or for as long as it takes.
    patience: Option<Duration>,
    door: Option<&'a dyn Door>,
    /// Nobody looks at the door until then: a knock that stays would be seen at each request.
    rests_until: Option<Instant>,
}

impl Requests<'_> {
    /// Waits for room for one more request; false if the client has gone first.
    fn await_room(&self, room: &Room) -> io::Result<bool> {
        while room.is_full() {
            // Its end is told unasked.
            let mut client = [PollFd::new(self.stream.as_fd(), PollFlags::empty())];
            let after = PollTimeout::try_from(GLANCE).unwrap_or(PollTimeout::ZERO);
            match poll(&mut client, after) {
                Ok(0) | Err(Errno::EINTR) => {}
                Ok(_) => return Ok(false),
                Err(error) => return Err(error.into()),
            }
        }
        Ok(true)
    }
}

impl Read for Requests<'_> {
    /// Waits by `poll`: a thread that sleeps in `recv` the kernel wakes for nothing each time
    /// that the client has taken a reply out of the socket.
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let readable = |fd| PollFd::new(fd, PollFlags::POLLIN);
        let deadline = self.patience.map(|patience| Instant::now() + patience);
        loop {
            self.rests_until = self.rests_until.filter(|until| Instant::now() < *until);
            let door = self.door.filter(|_| self.rests_until.is_none());
            let mut both =
                [self.stream.as_fd(), door.map_or(self.stream.as_fd(), Door::fd)].map(readable);
            let fds = if door.is_some() { &mut both[..] } else { &mut both[..1] };
            if poll(fds, until(deadline.into_iter().chain(self.rests_until).min()))? == 0 {
                match deadline.is_some_and(|deadline| deadline <= Instant::now()) {
                    true => return Err(io::ErrorKind::TimedOut.into()),
                    false => continue,
                }
            }
            let [stream, knocks] = both.map(|fd| fd.any().unwrap_or(true));
            match door.filter(|_| knocks).map(Door::open) {
                Some(Opened::Closed) => return Ok(0),
                Some(Opened::NotNow) => self.rests_until = Some(Instant::now() + REST),
                Some(Opened::LetIn) | None => {}
            }
            if stream {
                return self.stream.read(buffer);
            }
        }
    }
}

/// The time that is left, for `poll`.
fn until(instant: Option<Instant>) -> PollTimeout {
    instant.map_or(PollTimeout::NONE, |instant| {
        let left = instant.saturating_duration_since(Instant::now()) + Duration::from_millis(1);
        PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)
    })
}

/// Lets whole replies wait in the socket, whose room is the sender's.
fn make_room(stream: &UnixStream) {
    // The first is for a daemon with CAP_NET_ADMIN, the second as much as others may have.
    if setsockopt(stream, sockopt::SndBufForce, &SEND_BUFFER_BYTES).is_err() {
        if let Err(error) = setsockopt(stream, sockopt::SndBuf, &SEND_BUFFER_BYTES) {
            tracing::debug!(%error, "an NBD connection keeps its small buffer");
        }
    }
}

impl Served {
    pub(super) fn answer(&self, request: &Request, result: io::Result<()>, replies: &Arc<Replies>) {
        let (status, handle) = (Status::from(&result), request.handle);
        let Err(error) = result else { return replies.send(status, handle, &[]) };
        // Expected of the warm QEMU; not worth a line each.
        if status != Status::NotPermitted {
            tracing::warn!(disk = %self.disk.index(), ?request, %error, "request failed");
        }
        if !status.is_fault() {
            return replies.send(status, handle, &[]);
        }
        let (replies, disk) = (Arc::downgrade(replies), Arc::downgrade(&self.disk));
        let place = self.room.place();
        let answer = move || {
            match (replies.upgrade(), disk.upgrade()) {
                (Some(replies), _) => replies.send(status, handle, &[]),
                // Nobody needs an answer whose connection has ended before.
                (None, Some(disk)) => disk.request_ends(),
                (None, None) => {}
            }
            drop(place);
        };
        self.disk.withheld.answer(&error, Box::new(answer));
    }
}

pub(super) struct Connection<'a> {
    pub(super) served: &'a Served,
    pub(super) replies: Arc<Replies>,
    pub(super) readers: &'a Crew<ColdRead>,
    /// Reads that changes of the same wait for.
    pub(super) cold: RefCell<Vec<UnderWay>>,
}

impl Connection<'_> {
    fn transmission(&self, input: &mut BufReader<Requests<'_>>) -> Result<(), ConnectionError> {
        let (mut buffer, mut loan) = (Buffer::default(), Loan::default());
        loop {
            if !input.get_ref().await_room(&self.served.room)? {
                return Ok(());
            }
            let mut header = [0; REQUEST_BYTES];
            if !read_header(input, &mut header)? {
                return Ok(());
            }
            let request = Request::parse(&header)?;
            let payload = buffer.get(request.payload_bytes()?);
            input.read_exact(payload)?;
            let command = request.command(self.served.disk.export_bytes());
            if command == Ok(Command::Disconnect) {
                return Ok(());
            }
            self.served.disk.request_begins();
            match command {
                Ok(Command::Read) => self.read(request, &mut buffer, &mut loan),
                Ok(command) => self.change(request, command, payload),
                Err(status) => {
                    tracing::warn!(?request, ?status, "refused a request");
                    self.served.disk.note_failure();
                    self.replies.send(status, request.handle, &[]);
                }
            }
        }
    }

    /// Carries out a command that changes the disk, or a flush.
    fn change(&self, request: Request, command: Command, payload: &[u8]) {
        match self.try_change(&request, command, payload) {
            Ok(Durable::Later) => self.served.answer(&request, Ok(()), &self.replies),
            Ok(Durable::BeforeReply) => {
                let (served, replies) = (self.served.clone(), self.replies.clone());
                let place = served.room.place();
                self.served.disk.flush(Box::new(move |result| {
                    served.counters.flushed();
                    if result.is_err() {
                        served.disk.note_failure();
                    }
                    served.answer(&request, result, &replies);
                    drop(place);
                }));
            }
            Err(error) => {
                self.served.disk.note_failed_write();
                self.served.answer(&request, Err(error), &self.replies);
            }
        }
    }

    fn try_change(
        &self,
        request: &Request,
        command: Command,
        payload: &[u8],
    ) -> io::Result<Durable> {
        let (offset, len) = (request.offset, u64::from(request.length));
        let counters = &self.served.counters;
        let disk = &self.served.disk;
        let guest = || {
            self.await_reads_of(request);
            // Before the lock, which others need while this waits.
            disk.await_edges(offset, len)?;
            disk.ordered_for_guest()
        };
        match command {
            Command::Write { fua } => {
                guest()?.write(offset, payload)?;
                counters.wrote(request.length);
                Ok(Durable::from_fua(fua))
            }
            Command::WriteZeroes { fua, no_hole } => {
                let space = if no_hole { Space::Reserve } else { Space::Release };
                guest()?.zero(offset, len, space)?;
                counters.zeroed();
                Ok(Durable::from_fua(fua))
            }
            Command::Trim { fua } => {
                guest()?.trim(offset, len)?;
                counters.zeroed();
                Ok(Durable::from_fua(fua))
            }
            Command::Flush => Ok(Durable::BeforeReply),
            Command::Read | Command::Disconnect => unreachable!("handled by the caller"),
        }
    }
}

/// Time at which a change must be on stable storage.
enum Durable {
    BeforeReply,
    Later,
}

impl Durable {
    fn from_fua(fua: bool) -> Durable {
        if fua { Durable::BeforeReply } else { Durable::Later }
    }
}

/// Reads a header; false if the client has hung up between two requests.
fn read_header(input: &mut impl Read, header: &mut [u8; REQUEST_BYTES]) -> io::Result<bool> {
    let mut done = 0;
    while done < header.len() {
        match input.read(&mut header[done..]) {
            Ok(0) if done == 0 => return Ok(false),
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(count) => done += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}

/// The sending side, shared by the threads that finish this client's requests.
pub(super) struct Replies {
    stream: Mutex<UnixStream>,
    disk: Arc<Disk>,
}

impl Replies {
    fn new(stream: UnixStream, disk: Arc<Disk>) -> Replies {
        Replies { stream: Mutex::new(stream), disk }
    }

    /// Sends the one reply to a request.
    pub(super) fn send(&self, status: Status, handle: u64, data: &[u8]) {
        let header = reply(status, handle);
        let mut parts = [IoSlice::new(&header), IoSlice::new(data)];
        self.send_with(|mut stream| write_all_vectored(&mut stream, &mut parts));
    }

    /// Sends it by whatever means. If that fails the connection is shut down, which its thread sees.
    pub(super) fn send_with(&self, send: impl FnOnce(&UnixStream) -> io::Result<()>) {
        self.disk.request_ends();
        let stream = self.stream.lock().unwrap_or_else(understudy_threads::poisoned);
        if let Err(error) = send(&stream) {
            tracing::debug!(%error, "cannot send a reply; the client has gone");
            // It fails only if the connection is shut down already.
            let _ = stream.shutdown(Shutdown::Both);
        }
    }
}

fn write_all_vectored(output: &mut impl Write, mut parts: &mut [IoSlice<'_>]) -> io::Result<()> {
    IoSlice::advance_slices(&mut parts, 0); // drops empty parts
    while !parts.is_empty() {
        match output.write_vectored(parts) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(count) => IoSlice::advance_slices(&mut parts, count),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Memory for one request's data, used again for the next.
#[derive(Default)]
pub(super) struct Buffer(Vec<u8>);

impl Buffer {
    /// `len` bytes of unspecified content.
    pub(super) fn get(&mut self, len: usize) -> &mut [u8] {
        if self.0.len() > KEPT_BUFFER_BYTES && len <= KEPT_BUFFER_BYTES {
            self.0 = Vec::new();
        }
        if self.0.len() < len {
            self.0.resize(len, 0);
        }
        &mut self.0[..len]
    }
}

#[cfg(test)]
#[path = "connection_tests.rs"]
mod tests;
