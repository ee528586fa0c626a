//! Connections with a deadline for all that is said on them.

use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

/// A socket that waits for so long at most.
pub(crate) trait Patient: Read + Write {
    /// Sets how long it waits for bytes.
    fn wait_to_read(&self, patience: Duration) -> io::Result<()>;
    /// Sets how long it waits for room.
    fn wait_to_write(&self, patience: Duration) -> io::Result<()>;
}

impl Patient for TcpStream {
    fn wait_to_read(&self, patience: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(patience))
    }

    fn wait_to_write(&self, patience: Duration) -> io::Result<()> {
        self.set_write_timeout(Some(patience))
    }
}

impl Patient for UnixStream {
    fn wait_to_read(&self, patience: Duration) -> io::Result<()> {
        self.set_read_timeout(Some(patience))
    }

    fn wait_to_write(&self, patience: Duration) -> io::Result<()> {
        self.set_write_timeout(Some(patience))
    }
}

/// A connection that ends at its deadline, however little comes at a time.
pub(crate) struct Bounded<S> {
    socket: S,
    until: Instant,
}

impl<S: Patient> Bounded<S> {
    /// Bounds a socket for so long from now on.
    pub fn new(socket: S, limit: Duration) -> Bounded<S> {
        Bounded { socket, until: Instant::now() + limit }
    }

    fn left(&self) -> io::Result<Duration> {
        let left = self.until.saturating_duration_since(Instant::now());
        match left.is_zero() {
            true => Err(io::ErrorKind::TimedOut.into()),
            false => Ok(left),
        }
    }
}

impl<S: Patient> Read for Bounded<S> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.socket.wait_to_read(self.left()?)?;
        self.socket.read(buffer)
    }
}

impl<S: Patient> Write for Bounded<S> {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        self.socket.wait_to_write(self.left()?)?;
        self.socket.write(buffer)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.socket.flush()
    }
}
