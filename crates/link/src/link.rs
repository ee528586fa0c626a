//! Messages over a connection between two hosts: TCP, with TLS on it where the
//! configuration has certificates.

mod delivered;

use crate::tls::{Closable, NotTls, Tls, TlsStream, explain, part};
use anyhow::{Context, bail, ensure};
use nix::errno::Errno;
use nix::libc::MSG_MORE;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::socket::{MsgFlags, sendmsg, setsockopt, sockopt};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::io::{self, IoSlice, Read};
use std::net::{Shutdown, TcpStream};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;
use std::time::Duration;
use understudy_protocol::Epoch;
use understudy_protocol::HostName;
use understudy_protocol::wire::{HEADER_BYTES, Header, Kind, Message};

/// Time that set-up waits for the peer's next message.
pub const SETUP_TIMEOUT: Duration = Duration::from_secs(20);

/// Bytes that are read at once of a message of which more is to come.
const MOST_AT_ONCE: usize = 64 << 10;

/// Time that a peer's last words may be on their way.
const LAST_WORDS: Duration = Duration::from_secs(1);

/// A peer whose system takes nothing for so long is gone: no writer waits for ever.
const USER_TIMEOUT: Duration = Duration::from_secs(30);

/// Kind of what follows a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Nothing, perhaps: the message leaves at once.
    Unknown,
    /// Another one for certain, immediately: the end of the message may travel with it, so that the peer is
    /// woken once for both, and waits for it.
    Message,
}

impl Next {
    fn flag(self) -> MsgFlags {
        match self {
            Next::Unknown => MsgFlags::empty(),
            Next::Message => MsgFlags::from_bits_retain(MSG_MORE),
        }
    }
}

/// One end of a connection. Clones share the connection: one thread reads,
/// another writes.
#[derive(Clone, Debug)]
pub struct Link(Arc<Connection>);

#[derive(Debug)]
struct Connection {
    socket: TcpStream,
    tls: Option<TlsStream>,
}

impl Link {
    /// Takes over a connection that this host opened to `peer`; carries the TLS
    /// handshake out if there are certificates.
    pub fn dialled(socket: TcpStream, peer: &HostName, tls: Option<&Tls>) -> anyhow::Result<Link> {
        prepare(&socket)?;
        let stream = tls.map(|tls| tls.dial(&socket, peer)).transpose();
        let stream = stream.inspect_err(|_| part(&socket))?;
        Ok(Link::watched(socket, stream, tls))
    }

    /// The same for a connection that a peer opened.
    pub fn accepted(socket: TcpStream, tls: Option<&Tls>) -> anyhow::Result<Link> {
        prepare(&socket)?;
        let result = tls.map(|tls| tls.accept(&socket)).transpose();
        match result {
            Ok(stream) => Ok(Link::watched(socket, stream, tls)),
            Err(error) => {
                let link = Link(Arc::new(Connection { socket, tls: None }));
                if error.is::<NotTls>() {
                    link.refuse("the host speaks TLS: this host's configuration needs [tls], too");
                }
                part(&link.0.socket);
                Err(error)
            }
        }
    }

    /// Begins anew on this connection, whose other end another process of `peer` has by now.
    pub fn begin_anew(&self, peer: &HostName, tls: Option<&Tls>) -> anyhow::Result<Link> {
        self.check_at_rest()?;
        Link::dialled(self.0.socket.try_clone()?, peer, tls)
    }

    /// An error if the peer has gone on already: whoever begins anew would miss what waits here.
    pub fn check_at_rest(&self) -> anyhow::Result<()> {
        let at_rest = self.0.tls.as_ref().is_none_or(TlsStream::is_at_rest);
        ensure!(at_rest, "the peer went on before it was answered");
        Ok(())
    }

    /// A connection that ends when its peer's certificate is revoked.
    fn watched(socket: TcpStream, stream: Option<TlsStream>, tls: Option<&Tls>) -> Link {
        let connection = Arc::new(Connection { socket, tls: stream });
        if let (Some(tls), Some(stream)) = (tls, &connection.tls) {
            let closable: Arc<dyn Closable> = connection.clone();
            tls.watch(stream, Arc::downgrade(&closable));
        }
        Link(connection)
    }

    /// An error if the peer's certificate is not this host's. Without TLS,
    /// everybody is who they say.
    pub fn check_peer(&self, host: &HostName) -> anyhow::Result<()> {
        self.0.tls.as_ref().map_or(Ok(()), |tls| tls.check_peer(host))
    }

    /// Whether both are the same connection.
    pub fn is(&self, other: &Link) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Bounds every later read; none waits for ever.
    pub fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.0.socket.set_read_timeout(timeout)
    }

    /// Bounds every later write; none waits for ever.
    pub fn set_write_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        self.0.socket.set_write_timeout(timeout)
    }

    /// Sees to it that from now on neither reads nor writes wait. For [`Link::receive_arrived`],
    /// and for messages that there [is room](Link::has_room) for.
    pub fn never_wait(&self) -> io::Result<()> {
        self.0.socket.set_nonblocking(true)
    }

    /// Whether the system takes a short message now, so that sending it does not wait.
    pub fn has_room(&self) -> bool {
        let mut socket = [PollFd::new(self.0.socket.as_fd(), PollFlags::POLLOUT)];
        poll(&mut socket, PollTimeout::ZERO).is_ok_and(|ready| ready > 0)
    }

    /// Bytes that have arrived at the peer's system since the connection began.
    pub fn delivered(&self) -> u64 {
        delivered::delivered(&self.0.socket).unwrap_or_default()
    }

    /// Position where what was sent so far ends, as [`Link::delivered`] counts; none where it is
    /// not known.
    pub fn sent(&self) -> Option<u64> {
        delivered::sent(&self.0.socket)
    }

    /// Ends the connection in both directions; wakes whoever reads or writes.
    pub fn close(&self) {
        self.0.close();
    }

    /// The next message, its checksum checked. The error says why the
    /// connection must be dropped.
    pub fn receive(&self) -> anyhow::Result<Message> {
        self.receive_behind([0; HEADER_BYTES], 0)
    }

    /// The first message; none of a peer that hangs up before it has said anything: it has reached
    /// this host on another path first.
    pub fn receive_first(&self) -> anyhow::Result<Option<Message>> {
        let mut header = [0; HEADER_BYTES];
        match self.0.read(&mut header) {
            Ok(0) => Ok(None),
            Ok(read) => self.receive_behind(header, read).map(Some),
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => Ok(None),
            Err(error) => Err(explain_end(error)),
        }
    }

    /// The message of whose header so many bytes have been read.
    fn receive_behind(
        &self,
        mut header: [u8; HEADER_BYTES],
        read: usize,
    ) -> anyhow::Result<Message> {
        self.0.read_exact(&mut header[read..]).map_err(explain_end)?;
        let header = Header::decode(&header)?;
        let mut payload = vec![0; header.length];
        self.0.read_exact(&mut payload).map_err(explain_end)?;
        header.check(&payload)?;
        Ok(Message { header, payload })
    }

    /// The same of a connection that [never waits](Link::never_wait): none if the rest of a message
    /// is still to come, of which `partial` keeps the beginning.
    pub fn receive_arrived(&self, partial: &mut Vec<u8>) -> anyhow::Result<Option<Message>> {
        loop {
            let header = partial.first_chunk().map(Header::decode).transpose()?;
            let wanted = HEADER_BYTES + header.as_ref().map_or(0, |header| header.length);
            if let Some(header) = header.filter(|_| partial.len() == wanted) {
                let payload = partial.split_off(HEADER_BYTES);
                partial.clear();
                header.check(&payload)?;
                return Ok(Some(Message { header, payload }));
            }
            let there = partial.len();
            // Not for all that was announced: each piece would have the rest cleared anew.
            partial.resize(wanted.min(there + MOST_AT_ONCE), 0);
            let read = self.0.read(&mut partial[there..]);
            partial.truncate(there + read.as_ref().copied().unwrap_or_default());
            match read {
                Ok(0) => return Err(explain_end(io::ErrorKind::UnexpectedEof.into())),
                Ok(_) => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) => return Err(explain_end(error)),
            }
        }
    }

    /// Reason why the peer hung up, if it said so before.
    pub fn last_words(&self) -> Option<anyhow::Error> {
        self.set_read_timeout(Some(LAST_WORDS)).ok()?;
        let said = self.receive().ok().filter(|message| message.header.kind == Kind::Refuse)?;
        read_json::<serde_json::Value>(&said, Kind::Welcome).err()
    }

    /// Sends one message made of `parts`, without joining them first. Returns
    /// its header. An error ends the connection: what was sent of the message, or
    /// was sealed and not sent, would make nonsense of the next.
    pub fn send_parts(&self, kind: Kind, epoch: Epoch, parts: &[&[u8]]) -> io::Result<Header> {
        let header = Header::for_payload(kind, epoch, parts);
        let header = header.inspect_err(|_| self.close()).map_err(io::Error::other)?;
        self.send_with(&header, parts, Next::Unknown)?;
        Ok(header)
    }

    /// The same with a header that is known already, and with what is known of the next message.
    pub fn send_with(&self, header: &Header, parts: &[&[u8]], next: Next) -> io::Result<()> {
        let bytes = header.encode();
        let mut slices: Vec<IoSlice> = Vec::with_capacity(parts.len() + 1);
        slices.push(IoSlice::new(&bytes));
        slices.extend(parts.iter().map(|part| IoSlice::new(part)));
        self.0.write_all(&mut slices, next).inspect_err(|_| self.close())
    }

    /// Sends a message without a payload.
    pub fn send_signal(&self, kind: Kind, epoch: Epoch) -> io::Result<()> {
        self.send_parts(kind, epoch, &[]).map(|_| ())
    }

    /// Sends `body` as JSON.
    pub fn send_json(&self, kind: Kind, body: &impl Serialize) -> anyhow::Result<()> {
        self.send_parts(kind, Epoch(0), &[&serde_json::to_vec(body)?])?;
        Ok(())
    }

    /// Receives a JSON message of `kind`; a refusal becomes an error with the
    /// peer's words.
    pub fn expect_json<T: DeserializeOwned>(&self, kind: Kind) -> anyhow::Result<T> {
        read_json(&self.receive()?, kind)
    }

    /// Tells the peer why this side gives up. Best effort: it may be gone.
    pub fn refuse(&self, reason: &str) {
        let _ = self.send_parts(Kind::Refuse, Epoch(0), &[reason.as_bytes()]);
    }
}

impl AsFd for Link {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.socket.as_fd()
    }
}

/// The JSON of a message that must be of `kind`; a refusal becomes an error with
/// the peer's words.
pub fn read_json<T: DeserializeOwned>(message: &Message, kind: Kind) -> anyhow::Result<T> {
    if message.header.kind == Kind::Refuse {
        return Err(Refused(String::from_utf8_lossy(&message.payload).into_owned()).into());
    }
    if message.header.kind != kind {
        bail!("the peer sent {:?} where {kind:?} was due", message.header.kind);
    }
    serde_json::from_slice(&message.payload).context("malformed JSON from the peer")
}

/// The peer said no, with these words.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Refused(pub String);

/// Prepares a socket for the handshake: whoever does not go on with it is not waited for.
fn prepare(socket: &TcpStream) -> io::Result<()> {
    // Acknowledgements and ends of epochs must not wait for more bytes.
    socket.set_nodelay(true)?;
    setsockopt(socket, sockopt::TcpUserTimeout, &(USER_TIMEOUT.as_millis() as u32))?;
    socket.set_read_timeout(Some(SETUP_TIMEOUT))
}

impl Closable for Connection {
    fn close(&self) {
        // An error means that it is closed already.
        let _ = self.socket.shutdown(Shutdown::Both);
    }
}

impl Connection {
    fn read_exact(&self, buffer: &mut [u8]) -> io::Result<()> {
        let mut filled = 0;
        while filled < buffer.len() {
            match self.read(&mut buffer[filled..])? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                length => filled += length,
            }
        }
        Ok(())
    }

    /// Reads what is there, at least one byte; none at the connection's end.
    fn read(&self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let read = match &self.tls {
                Some(tls) => tls.read(&self.socket, buffer),
                None => (&self.socket).read(buffer),
            };
            match read {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                read => return read,
            }
        }
    }

    fn write_all(&self, slices: &mut [IoSlice<'_>], next: Next) -> io::Result<()> {
        match &self.tls {
            Some(tls) => tls.write_all(&self.socket, slices, next),
            None => write_all(&self.socket, slices, next),
        }
    }
}

fn explain_end(error: io::Error) -> anyhow::Error {
    if let Some(words) = explain(&error) {
        return anyhow::anyhow!(words);
    }
    match error.kind() {
        io::ErrorKind::UnexpectedEof => anyhow::anyhow!("the peer closed the connection"),
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
            anyhow::anyhow!("the peer did not answer in time")
        }
        _ => anyhow::Error::new(error).context("the connection failed"),
    }
}

/// Writes all of `slices` to a socket.
pub fn write_all(stream: &TcpStream, mut slices: &mut [IoSlice<'_>], next: Next) -> io::Result<()> {
    let flags = MsgFlags::MSG_NOSIGNAL | next.flag();
    // None may be empty, or it would look as if the socket took nothing.
    IoSlice::advance_slices(&mut slices, 0);
    while !slices.is_empty() {
        match sendmsg::<()>(stream.as_raw_fd(), slices, &[], flags, None) {
            Ok(0) => return Err(io::ErrorKind::WriteZero.into()),
            Ok(written) => IoSlice::advance_slices(&mut slices, written),
            Err(Errno::EINTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::net::TcpListener;
    use understudy_protocol::literal;

    #[test]
    fn a_message_that_cannot_be_sent_whole_ends_the_connection() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let dialled = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let link = Link::dialled(dialled, &literal("b"), None).unwrap();
        let peer = Link::accepted(listener.accept().unwrap().0, None).unwrap();
        link.set_write_timeout(Some(Duration::from_millis(10))).unwrap();
        link.send_signal(Kind::Heartbeat, Epoch(0)).unwrap();
        assert!(link.has_room());
        // More than the system keeps for a peer that reads nothing.
        let much = vec![0; 4 << 20];
        while link.send_parts(Kind::Pages, Epoch(0), &[&much]).is_ok() {}
        let mut received = std::iter::repeat_with(|| peer.receive());
        let end = received.find_map(Result::err).unwrap().to_string();
        assert_eq!(end, "the peer closed the connection");
        assert!(link.send_signal(Kind::Heartbeat, Epoch(0)).is_err(), "it goes on");
    }

    #[test]
    fn a_peer_that_hangs_up_without_a_word_is_told_from_one_that_breaks_off() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let header = Header::for_payload(Kind::Hello, Epoch(0), &[b"hello"]).unwrap().encode();
        let said = |words: &[u8]| {
            let mut dialled = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
            dialled.write_all(words).unwrap();
            drop(dialled);
            Link::accepted(listener.accept().unwrap().0, None).unwrap().receive_first()
        };
        assert_eq!(said(b"").unwrap(), None);
        for cut in [1, HEADER_BYTES] {
            let error = said(&header[..cut]).unwrap_err().to_string();
            assert_eq!(error, "the peer closed the connection");
        }
        let whole = said(&[&header[..], b"hello"].concat()).unwrap().unwrap();
        assert_eq!(whole.payload, b"hello");
    }

    #[test]
    fn a_message_before_another_arrives_with_it_and_also_without() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let dialled = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let link = Link::dialled(dialled, &literal("b"), None).unwrap();
        let peer = Link::accepted(listener.accept().unwrap().0, None).unwrap();
        let epoch = || peer.receive().unwrap().header.epoch;
        let send_before_another = |epoch, parts: &[&[u8]]| {
            let header = Header::for_payload(Kind::Pages, epoch, parts).unwrap();
            link.send_with(&header, parts, Next::Message).unwrap();
        };
        send_before_another(Epoch(1), &[b"page"]);
        link.send_signal(Kind::EpochEnd, Epoch(2)).unwrap();
        assert_eq!((epoch(), epoch()), (Epoch(1), Epoch(2)));
        send_before_another(Epoch(3), &[]);
        assert_eq!(epoch(), Epoch(3));
    }

    #[test]
    fn a_message_that_comes_piece_by_piece_is_waited_for_by_nobody() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut peer = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let link = Link::accepted(listener.accept().unwrap().0, None).unwrap();
        link.never_wait().unwrap();
        let header = Header::for_payload(Kind::File, Epoch(7), &[b"content"]).unwrap();
        let (bytes, mut partial) = ([&header.encode()[..], b"content"].concat(), Vec::new());
        assert_eq!(link.receive_arrived(&mut partial).unwrap(), None);
        let mut next = || loop {
            if let Some(message) = link.receive_arrived(&mut partial)? {
                return anyhow::Ok(message);
            }
            std::thread::yield_now();
        };
        for pieces in [&bytes[..], &bytes.repeat(2)].map(|bytes| bytes.chunks(5)) {
            pieces.for_each(|piece| peer.write_all(piece).unwrap());
            assert_eq!(next().unwrap().payload, b"content");
        }
        assert_eq!(next().unwrap().header.epoch, Epoch(7));
        drop(peer);
        assert_eq!(next().unwrap_err().to_string(), "the peer closed the connection");
    }

    #[test]
    fn a_connection_that_takes_no_more_has_no_room() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut filler = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let peer = listener.accept().unwrap().0;
        let link = Link::dialled(filler.try_clone().unwrap(), &literal("b"), None).unwrap();
        filler.set_nonblocking(true).unwrap();
        while filler.write(&[0; 64 << 10]).is_ok() {}
        assert!(!link.has_room());
        drop(peer);
    }
}
