//! A TLS connection that one thread reads while another writes.
//!
//! The TLS state has one lock, held only to seal and open: never during a
//! system call on the socket, or a full send buffer would keep acknowledgements
//! from being read. Whoever reads has the buffer for what comes meanwhile, and whoever
//! writes that for what goes.

use super::{explain, names};
use crate::link::{Next, write_all};
use anyhow::{Context, anyhow};
use rustls::Connection;
use rustls::pki_types::CertificateDer;
use std::io::{self, IoSlice, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::time::Duration;
use understudy_threads::{Mutex, lock};

/// Bytes that are read from the socket at once.
const READ_BYTES: usize = 128 << 10;

/// Bytes that are sealed at once: the lock is held for so long.
const SEAL_BYTES: usize = 128 << 10;

/// Sealed bytes that may wait for the next message, so that the system is called once for both.
pub(super) const MOST_WAITING: usize = 64 << 10;

/// Longest time, and most reads, for which bytes of a peer that is refused are still taken.
const PARTING: Duration = Duration::from_millis(500);
const MOST_PARTING_READS: u32 = 16;

/// The peer said something else.
#[derive(Debug, thiserror::Error)]
#[error("the peer does not speak TLS: does its configuration have [tls]?")]
pub struct NotTls;

/// The TLS state of a connection; the socket stays its owner's.
pub struct TlsStream {
    state: Mutex<State>,
    /// Certificate of the peer, and those between it and the authority's, as it shows them.
    peer: Vec<CertificateDer<'static>>,
}

struct State {
    connection: Connection,
    /// What came from the socket and is not opened yet; none while somebody reads more.
    incoming: Option<Incoming>,
    /// What is sealed and waits for the next message; none while somebody writes, so that all goes in order.
    outgoing: Option<Vec<u8>>,
}

struct Incoming {
    bytes: Vec<u8>,
    next: usize,
    end: usize,
}

impl TlsStream {
    /// Carries the handshake out; the socket's time-outs bound it.
    pub fn handshake(mut socket: &TcpStream, mut connection: Connection) -> anyhow::Result<Self> {
        while connection.is_handshaking() {
            if let Err(error) = connection.complete_io(&mut socket) {
                // An alert may wait to be sent: it tells the peer what is wrong.
                let _ = connection.write_tls(&mut socket);
                return Err(explain_handshake(error));
            }
        }
        connection.set_buffer_limit(None);
        let shown = connection.peer_certificates().filter(|chain| !chain.is_empty());
        let peer = shown.context("the peer shows no certificate")?.to_vec();
        let incoming = Incoming { bytes: vec![0; READ_BYTES], next: 0, end: 0 };
        let state = State { connection, incoming: Some(incoming), outgoing: Some(Vec::new()) };
        Ok(TlsStream { state: Mutex::new(state), peer })
    }

    /// An error unless the peer's certificate is this host's.
    pub fn check_peer(&self, host: &str) -> anyhow::Result<()> {
        names(&self.peer[0], host)
            .context("the peer's certificate is not that of the host it names")
    }

    /// The peer's certificate, and those between it and the authority's.
    pub fn peer(&self) -> &[CertificateDer<'static>] {
        &self.peer
    }

    /// Reads what is there, at least one byte; none at the connection's end. One thread at a time.
    pub fn read(&self, mut socket: &TcpStream, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let mut incoming = {
                let mut state = lock(&self.state);
                let mut incoming = state.incoming.take().ok_or_else(another_reads)?;
                let opened = state.open(&mut incoming, buffer);
                if !matches!(opened, Ok(None)) {
                    state.incoming = Some(incoming);
                    return opened.map(Option::unwrap_or_default);
                }
                incoming
            };
            // What was there is opened, also if nothing comes now.
            (incoming.next, incoming.end) = (0, 0);
            let read = socket.read(&mut incoming.bytes);
            incoming.end = read.as_ref().copied().unwrap_or_default();
            lock(&self.state).incoming = Some(incoming);
            if read? == 0 {
                return Ok(0);
            }
        }
    }

    /// Whether nothing that came from the peer waits to be read, and nobody reads.
    pub fn is_at_rest(&self) -> bool {
        let mut state = lock(&self.state);
        let opened = state.connection.process_new_packets();
        state.incoming.as_ref().is_some_and(|incoming| incoming.next == incoming.end)
            && opened.is_ok_and(|opened| opened.plaintext_bytes_to_read() == 0)
    }

    /// Writes everything; a small rest waits for what comes [next](Next::Message). One thread at a time.
    pub fn write_all(
        &self,
        socket: &TcpStream,
        slices: &[IoSlice<'_>],
        next: Next,
    ) -> io::Result<()> {
        let mut outgoing = lock(&self.state).outgoing.take().ok_or_else(another_writes)?;
        let written = self.write_with(&mut outgoing, socket, slices, next);
        lock(&self.state).outgoing = Some(outgoing);
        written
    }

    fn write_with(
        &self,
        outgoing: &mut Vec<u8>,
        socket: &TcpStream,
        slices: &[IoSlice<'_>],
        next: Next,
    ) -> io::Result<()> {
        let mut batch = Vec::with_capacity(slices.len());
        let mut bytes = 0;
        for slice in slices {
            for piece in slice.chunks(SEAL_BYTES) {
                if bytes + piece.len() > SEAL_BYTES {
                    self.seal(&batch, outgoing)?;
                    flush(socket, outgoing, next)?;
                    batch.clear();
                    bytes = 0;
                }
                batch.push(IoSlice::new(piece));
                bytes += piece.len();
            }
        }
        self.seal(&batch, outgoing)?;
        if next == Next::Message && outgoing.len() <= MOST_WAITING {
            return Ok(());
        }
        flush(socket, outgoing, next)
    }

    /// Seals small parts together: each record costs some time and bytes of its own.
    fn seal(&self, batch: &[IoSlice<'_>], outgoing: &mut Vec<u8>) -> io::Result<()> {
        let connection = &mut lock(&self.state).connection;
        let (sealed, all) = (connection.writer().write_vectored(batch)?, bytes_of(batch));
        if sealed < all {
            return Err(io::Error::other("the TLS connection has a limit again"));
        }
        while connection.wants_write() {
            connection.write_tls(outgoing)?;
        }
        Ok(())
    }
}

impl State {
    /// Returns opened bytes, or none if the socket must be read first.
    fn open(&mut self, incoming: &mut Incoming, buffer: &mut [u8]) -> io::Result<Option<usize>> {
        loop {
            match self.connection.reader().read(buffer) {
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                result => return result.map(Some),
            }
            if incoming.next == incoming.end {
                return Ok(None);
            }
            let mut rest = &incoming.bytes[incoming.next..incoming.end];
            incoming.next += self.connection.read_tls(&mut rest)?;
            self.connection.process_new_packets().map_err(io::Error::other)?;
        }
    }
}

/// Writes what was sealed; after an error the connection is of no use.
fn flush(socket: &TcpStream, outgoing: &mut Vec<u8>, next: Next) -> io::Result<()> {
    let written = write_all(socket, &mut [IoSlice::new(outgoing)], next);
    outgoing.clear();
    written
}

fn another_reads() -> io::Error {
    io::Error::other("another thread reads this connection")
}

fn another_writes() -> io::Error {
    io::Error::other("another thread writes to this connection")
}

fn bytes_of(batch: &[IoSlice<'_>]) -> usize {
    batch.iter().map(|piece| piece.len()).sum()
}

/// Hangs up so that the peer can still read what was said last: a connection
/// that is closed with unread bytes is reset. Nothing here may fail, or matters.
pub fn part(mut socket: &TcpStream) {
    let _ = socket.shutdown(Shutdown::Write);
    let _ = socket.set_read_timeout(Some(PARTING));
    let mut unread = [0; 16 << 10];
    for _ in 0..MOST_PARTING_READS {
        if !matches!(socket.read(&mut unread), Ok(1..)) {
            return;
        }
    }
}

fn explain_handshake(error: io::Error) -> anyhow::Error {
    let tls = error.get_ref().and_then(|error| error.downcast_ref());
    match error.kind() {
        _ if matches!(tls, Some(rustls::Error::InvalidMessage(_))) => NotTls.into(),
        _ if explain(&error).is_some() => anyhow!(explain(&error).unwrap_or_default()),
        io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset => {
            anyhow!("the peer hung up during the TLS handshake: does its configuration have [tls]?")
        }
        io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => {
            anyhow!("the peer did not go on with the TLS handshake in time")
        }
        _ => anyhow::Error::new(error).context("the connection failed in the TLS handshake"),
    }
}

impl std::fmt::Debug for TlsStream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("TlsStream")
    }
}
