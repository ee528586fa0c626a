//! The words of a guest on its console, until they may be heard.
//!
//! As what it sends (`understudy_network::OutputBuffer`), if that was asked for: bytes of an
//! epoch leave the daemon, to whoever listens and to the console's log, when the epoch is on the
//! backup. Else they leave at once.

use nix::sys::eventfd::{EfdFlags, EventFd};
use std::io::{self, ErrorKind, Read};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use understudy_network::{FrameBatch, Gate, OutputBuffer, Pushed};
use understudy_protocol::Epoch;
use understudy_threads::{Mutex, lock};

pub(super) const AT_ONCE: usize = 4096;

/// The bytes, waiting for a commit or to be heard, above which no more is read, and the guest's
/// port waits. In lockstep the bounds of the log come first: a byte that is said is an event of
/// several.
pub(super) const MOST_BYTES: usize = 4 << 20;

/// Callback, called when the first bytes of an epoch wait.
pub type Waiting = Box<dyn Fn() + Send + Sync>;

/// The way of a guest's words out of the daemon. Nothing here waits.
pub struct ConsoleOutput {
    output: Mutex<Output>,
    /// Event that there may be something to take, or room.
    changed: EventFd,
    waiting: Waiting,
}

struct Output {
    qemu: UnixStream,
    buffer: OutputBuffer,
}

impl ConsoleOutput {
    /// Makes the output of the QEMU at the other end of `qemu`, which does not block.
    pub(crate) fn new(qemu: UnixStream, waiting: Waiting) -> io::Result<ConsoleOutput> {
        let buffer = OutputBuffer::new(Gate::Open, MOST_BYTES);
        let flags = EfdFlags::EFD_CLOEXEC | EfdFlags::EFD_NONBLOCK;
        Ok(ConsoleOutput {
            output: Mutex::new(Output { qemu, buffer }),
            changed: EventFd::from_flags(flags)?,
            waiting,
        })
    }

    /// Protection begins while the guest stands still: what it says from now on belongs to
    /// `current`, and waits.
    pub fn hold(&self, current: Epoch) {
        let mut output = lock(&self.output);
        output.drain();
        output.buffer.hold(current);
        drop(output);
        self.ring();
    }

    /// Puts what was read until now into the epoch that ends, and what was not into `next`: for
    /// batches of a log. Words that belong to a later one than they could wait longer.
    pub fn barrier(&self, next: Epoch) {
        lock(&self.output).buffer.barrier(next);
    }

    /// The guest stands still: all that it has said belongs to the epoch that ends, but for what is over the bound, which
    /// waits for a later one.
    pub fn drain_and_barrier(&self, next: Epoch) {
        let mut output = lock(&self.output);
        output.drain();
        output.buffer.barrier(next);
    }

    /// The backup has `epoch` and all before it.
    pub fn release_through(&self, epoch: Epoch) {
        let mut output = lock(&self.output);
        output.buffer.release_through(epoch);
        let has_any = output.buffer.has_released();
        drop(output);
        if has_any {
            self.ring();
        }
    }

    /// Opens it, as this host is the sole owner: all may be heard, from now on at once.
    pub fn open(&self) {
        lock(&self.output).buffer.open();
        self.ring();
    }

    /// Another host owns the VM: what waits is never heard from here.
    pub fn shut(&self) {
        lock(&self.output).buffer.shut();
    }

    /// Says what the guest said on its former host, before it runs here.
    pub fn say(&self, words: &[u8]) {
        lock(&self.output).buffer.push_always(words);
        self.ring();
    }

    /// The bytes that wait for the commit of this epoch.
    pub fn held_of(&self, epoch: Epoch) -> Vec<u8> {
        lock(&self.output).buffer.held_of(epoch).collect::<Vec<_>>().concat()
    }

    /// Bytes that wait for a commit.
    pub fn held_bytes(&self) -> usize {
        lock(&self.output).buffer.held_bytes()
    }

    /// Bytes that wait, for a commit or to be heard.
    #[cfg(test)]
    pub(crate) fn bytes(&self) -> usize {
        lock(&self.output).buffer.bytes()
    }

    /// Takes what QEMU has, once. Returns whether QEMU is there.
    pub(crate) fn take(&self) -> io::Result<bool> {
        let taken = lock(&self.output).take()?;
        if taken == Some(Pushed::FirstHeld) {
            (self.waiting)();
        }
        Ok(taken.is_some())
    }

    /// Takes all that QEMU has said, and whoever ends waits for no more.
    pub(crate) fn take_rest(&self) {
        lock(&self.output).drain();
    }

    /// Whether more may be taken.
    pub(crate) fn has_room(&self) -> bool {
        lock(&self.output).has_room()
    }

    /// The next words that may be heard; to be given back to [`ConsoleOutput::heard`].
    pub(crate) fn released(&self) -> Option<FrameBatch> {
        lock(&self.output).buffer.take_released()
    }

    pub(crate) fn heard(&self, batch: FrameBatch) {
        lock(&self.output).buffer.recycle(batch);
    }

    /// Readable when there may be something to take.
    pub(crate) fn changed(&self) -> BorrowedFd<'_> {
        self.changed.as_fd()
    }

    pub(crate) fn clear(&self) {
        // Fails if nothing has changed.
        let _ = self.changed.read();
    }

    fn ring(&self) {
        // Fails only if it was rung 2^64 times.
        let _ = self.changed.write(1);
    }
}

impl Output {
    fn has_room(&self) -> bool {
        self.buffer.bytes() < MOST_BYTES
    }

    /// Takes what QEMU sent; none if it has ended.
    fn take(&mut self) -> io::Result<Option<Pushed>> {
        let mut words = [0; AT_ONCE];
        match self.qemu.read(&mut words) {
            Ok(0) => Ok(None),
            Ok(count) => Ok(Some(self.buffer.push_always(&words[..count]))),
            Err(error) if is_passing(&error) => Ok(Some(Pushed::Held)),
            Err(error) => Err(error),
        }
    }

    /// All that is there, as far as there is room. That QEMU has ended the relay finds out.
    fn drain(&mut self) {
        let mut words = [0; AT_ONCE];
        while self.has_room() {
            match self.qemu.read(&mut words) {
                Ok(count) if count > 0 => {
                    self.buffer.push_always(&words[..count]);
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                _ => return,
            }
        }
    }
}

pub(crate) fn is_passing(error: &io::Error) -> bool {
    matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}
