//! A long line between two hosts: it delays and limits what goes through, by a
//! relay, since not every kernel can delay frames itself.
//!
//! Connections end at the relay, so TCP itself sees no delay: what is delayed
//! are the bytes, each way alike.

use crate::lab::{CLIENT_ADDRESS, Lab};
use crate::namespace::{Namespace, in_namespace};
use anyhow::Result;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

const PORT: u16 = 7801;
/// Bytes that are read, timed and written together.
const PIECE_BYTES: usize = 16 << 10;
/// Pieces on the line at once: 100 Mbit/s for over 300 ms.
const PIECES: usize = 256;

/// The line to one host; removed when dropped.
pub struct LongLine {
    line: Arc<Line>,
    client: Namespace,
}

struct Line {
    target: SocketAddr,
    delay_us: AtomicU64,
    bits_per_second: u64,
    /// Times at which each direction has carried what it was given.
    free_at: [Mutex<Instant>; 2],
    stopping: AtomicBool,
    sockets: Mutex<Vec<TcpStream>>,
}

impl LongLine {
    /// Lays a line to `host`'s daemon that carries `bits_per_second` each way.
    pub fn lay(lab: &Lab, host: &str, bits_per_second: u64) -> Result<LongLine> {
        let client = lab.client();
        let line = Arc::new(Line {
            target: lab.peer_addresses(host)?[0],
            delay_us: AtomicU64::new(0),
            bits_per_second,
            free_at: [Mutex::new(Instant::now()), Mutex::new(Instant::now())],
            stopping: AtomicBool::new(false),
            sockets: Mutex::new(Vec::new()),
        });
        let listener = in_namespace(&client, || TcpListener::bind(LongLine::address()))??;
        let (accepting, namespace) = (line.clone(), client.clone());
        thread::spawn(move || {
            for dialler in listener.incoming().flatten() {
                if accepting.stopping.load(Ordering::Acquire) {
                    return;
                }
                // A host that does not answer is what the dialler sees, too.
                let _ = accepting.join(&namespace, dialler);
            }
        });
        Ok(LongLine { line, client })
    }

    /// Address where the line begins: the one to dial instead of the host's.
    pub fn address() -> SocketAddr {
        (CLIENT_ADDRESS, PORT).into()
    }

    /// Every byte takes so long from now on, each way.
    pub fn set_delay(&self, delay: Duration) {
        self.line.delay_us.store(delay.as_micros() as u64, Ordering::Release);
    }
}

impl Drop for LongLine {
    fn drop(&mut self) {
        self.line.stopping.store(true, Ordering::Release);
        let sockets = self.line.sockets.lock().unwrap_or_else(PoisonError::into_inner);
        for socket in sockets.iter() {
            // It may have ended by itself.
            let _ = socket.shutdown(Shutdown::Both);
        }
        // Wakes the accepting thread.
        let _ = in_namespace(&self.client, || TcpStream::connect(LongLine::address()));
    }
}

impl Line {
    /// Two threads for each direction, which end with the connection.
    fn join(self: &Arc<Line>, namespace: &Namespace, dialler: TcpStream) -> Result<()> {
        let target = in_namespace(namespace, || TcpStream::connect(self.target))??;
        for socket in [&dialler, &target] {
            socket.set_nodelay(true)?;
            let mut sockets = self.sockets.lock().unwrap_or_else(PoisonError::into_inner);
            sockets.push(socket.try_clone()?);
        }
        let ways = [(dialler.try_clone()?, target.try_clone()?), (target, dialler)];
        for (direction, (from, to)) in ways.into_iter().enumerate() {
            let (sender, receiver) = sync_channel(PIECES);
            let line = self.clone();
            thread::spawn(move || {
                // However it ended: the piece that is on its way arrives first.
                let _ = line.take(&from, direction, &sender);
            });
            thread::spawn(move || {
                let _ = deliver(&to, &receiver);
                let _ = to.shutdown(Shutdown::Both);
            });
        }
        Ok(())
    }

    fn take(
        &self,
        mut from: &TcpStream,
        direction: usize,
        sender: &SyncSender<(Instant, Vec<u8>)>,
    ) -> io::Result<()> {
        loop {
            let mut piece = vec![0; PIECE_BYTES];
            let length = from.read(&mut piece)?;
            if length == 0 {
                return Ok(());
            }
            piece.truncate(length);
            let sent = self.carry(direction, length);
            let delay = Duration::from_micros(self.delay_us.load(Ordering::Acquire));
            if sender.send((sent + delay, piece)).is_err() {
                return Ok(());
            }
            thread::sleep(sent.saturating_duration_since(Instant::now()));
        }
    }

    /// Time at which the line has taken so many more bytes.
    fn carry(&self, direction: usize, bytes: usize) -> Instant {
        let takes = Duration::from_secs_f64(bytes as f64 * 8.0 / self.bits_per_second as f64);
        let mut free_at = self.free_at[direction].lock().unwrap_or_else(PoisonError::into_inner);
        *free_at = (*free_at).max(Instant::now()) + takes;
        *free_at
    }
}

fn deliver(mut to: &TcpStream, receiver: &Receiver<(Instant, Vec<u8>)>) -> io::Result<()> {
    for (due, piece) in receiver {
        thread::sleep(due.saturating_duration_since(Instant::now()));
        to.write_all(&piece)?;
    }
    Ok(())
}
