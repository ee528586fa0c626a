//! Copies both ways between a user and a guest's console.

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::unistd::{read, write};
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;

/// Ctrl-]
const ESCAPE: u8 = 0x1d;
/// Silence after which the console is left once piped input has ended.
const SILENCE_MS: u16 = 1000;
const BUFFER_BYTES: usize = 4096;

/// One connection between a user and a console.
pub struct Relay<'a> {
    console: BorrowedFd<'a>,
    input: BorrowedFd<'a>,
    output: BorrowedFd<'a>,
    /// Whether the input is a terminal, where Ctrl-] leaves.
    terminal: bool,
    /// Whether the input has ended.
    input_ended: bool,
    /// Input that the guest has not taken yet.
    pending: Vec<u8>,
    buffer: [u8; BUFFER_BYTES],
}

/// The things that can be done without waiting.
struct Ready {
    console_read: bool,
    console_write: bool,
    input: bool,
}

/// Whether the relay goes on.
#[derive(PartialEq, Eq)]
enum Next {
    GoOn,
    Leave,
}

impl<'a> Relay<'a> {
    /// A relay between `console` and the user's `input` and `output`.
    pub fn new(
        console: &'a UnixStream,
        input: BorrowedFd<'a>,
        output: BorrowedFd<'a>,
        terminal: bool,
    ) -> io::Result<Relay<'a>> {
        // A guest that takes no input must not keep the user from leaving.
        console.set_nonblocking(true)?;
        Ok(Relay {
            console: console.as_fd(),
            input,
            output,
            terminal,
            input_ended: false,
            pending: Vec::new(),
            buffer: [0; BUFFER_BYTES],
        })
    }

    /// Copies until the guest hangs up, the user leaves, or piped input has
    /// ended and the console is silent.
    pub fn run(&mut self) -> nix::Result<()> {
        while let Some(ready) = self.wait()? {
            if ready.console_write {
                self.pass_input_on()?;
            }
            if ready.console_read && self.show_output()? == Next::Leave {
                return Ok(());
            }
            if ready.input && self.take_input()? == Next::Leave {
                return Ok(());
            }
        }
        Ok(())
    }

    /// Waits for something to do; none when the console has been silent.
    fn wait(&self) -> nix::Result<Option<Ready>> {
        let mut wanted = PollFlags::POLLIN;
        wanted.set(PollFlags::POLLOUT, !self.pending.is_empty());
        let mut fds =
            [PollFd::new(self.console, wanted), PollFd::new(self.input, PollFlags::POLLIN)];
        // A pipe is read no faster than the guest takes it; a terminal always,
        // or Ctrl-] would not be seen.
        let takes_input = !self.input_ended && (self.terminal || self.pending.is_empty());
        let watched = if takes_input { &mut fds[..] } else { &mut fds[..1] };
        let waits_for_silence = self.input_ended && self.pending.is_empty();
        let timeout =
            if waits_for_silence { PollTimeout::from(SILENCE_MS) } else { PollTimeout::NONE };
        let count = loop {
            match poll(watched, timeout) {
                Err(Errno::EINTR) => {}
                result => break result?,
            }
        };
        let [console, input] = fds.map(|fd| fd.revents().unwrap_or(PollFlags::empty()));
        Ok((count > 0).then_some(Ready {
            console_read: console.intersects(!PollFlags::POLLOUT),
            console_write: console.contains(PollFlags::POLLOUT),
            input: takes_input && !input.is_empty(),
        }))
    }

    fn pass_input_on(&mut self) -> nix::Result<()> {
        match write(self.console, &self.pending) {
            Ok(taken) => drop(self.pending.drain(..taken)),
            // Reading tells that the guest has hung up, after its last words.
            Err(Errno::EAGAIN | Errno::EINTR | Errno::EPIPE) => {}
            Err(errno) => return Err(errno),
        }
        Ok(())
    }

    fn show_output(&mut self) -> nix::Result<Next> {
        match read(self.console, &mut self.buffer) {
            Ok(0) | Err(Errno::ECONNRESET) => Ok(Next::Leave),
            Ok(length) => self.write_output(length),
            Err(Errno::EAGAIN | Errno::EINTR) => Ok(Next::GoOn),
            Err(errno) => Err(errno),
        }
    }

    fn write_output(&self, length: usize) -> nix::Result<Next> {
        let mut rest = &self.buffer[..length];
        while !rest.is_empty() {
            match write(self.output, rest) {
                Ok(written) => rest = &rest[written..],
                Err(Errno::EINTR) => {}
                // The reader of a pipe has seen enough.
                Err(Errno::EPIPE) => return Ok(Next::Leave),
                Err(errno) => return Err(errno),
            }
        }
        Ok(Next::GoOn)
    }

    fn take_input(&mut self) -> nix::Result<Next> {
        let length = match read(self.input, &mut self.buffer) {
            Ok(length) => length,
            Err(Errno::EAGAIN | Errno::EINTR) => return Ok(Next::GoOn),
            // What a terminal that was closed says.
            Err(Errno::EIO) => 0,
            Err(errno) => return Err(errno),
        };
        let typed = &self.buffer[..length];
        self.input_ended = length == 0;
        if self.terminal && (self.input_ended || typed.contains(&ESCAPE)) {
            return Ok(Next::Leave);
        }
        self.pending.extend_from_slice(typed);
        Ok(Next::GoOn)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::io::{Read, Write};
    use std::net::Shutdown;
    use std::thread;

    struct Ends {
        guest: UnixStream,
        keyboard: UnixStream,
        screen: UnixStream,
    }

    /// A relay in its own thread, and the ends that it joins.
    fn relay(terminal: bool) -> (Ends, thread::JoinHandle<nix::Result<()>>) {
        let (guest, console) = UnixStream::pair().unwrap();
        let (keyboard, input) = UnixStream::pair().unwrap();
        let (screen, output) = UnixStream::pair().unwrap();
        let thread = thread::spawn(move || {
            Relay::new(&console, input.as_fd(), output.as_fd(), terminal).unwrap().run()
        });
        (Ends { guest, keyboard, screen }, thread)
    }

    fn expect(mut from: &UnixStream, text: &str) {
        let mut got = vec![0; text.len()];
        from.read_exact(&mut got).unwrap();
        assert_eq!(String::from_utf8_lossy(&got), text);
    }

    #[test]
    fn both_ways_until_the_guest_hangs_up() {
        let (mut ends, thread) = relay(false);
        ends.keyboard.write_all(b"uname\n").unwrap();
        expect(&ends.guest, "uname\n");
        ends.guest.write_all(b"Linux\n").unwrap();
        expect(&ends.screen, "Linux\n");
        ends.guest.shutdown(Shutdown::Both).unwrap();
        thread.join().unwrap().unwrap();
    }

    #[test]
    fn the_escape_key_leaves_a_terminal() {
        let (mut ends, thread) = relay(true);
        ends.keyboard.write_all(b"a").unwrap();
        expect(&ends.guest, "a");
        ends.keyboard.write_all(&[b'b', ESCAPE]).unwrap();
        thread.join().unwrap().unwrap();
    }

    #[test]
    fn a_pipe_may_hold_the_escape_byte() {
        let (mut ends, thread) = relay(false);
        ends.keyboard.write_all(&[ESCAPE]).unwrap();
        expect(&ends.guest, "\x1d");
        drop(ends.keyboard);
        thread.join().unwrap().unwrap();
    }

    #[test]
    fn the_answer_to_the_last_input_is_still_shown() {
        let (mut ends, thread) = relay(false);
        ends.keyboard.write_all(b"last\n").unwrap();
        drop(ends.keyboard);
        expect(&ends.guest, "last\n");
        ends.guest.write_all(b"answer\n").unwrap();
        thread.join().unwrap().unwrap();
        expect(&ends.screen, "answer\n");
    }

    #[test]
    fn more_input_than_the_guest_takes_at_once_arrives_whole() {
        let (mut ends, thread) = relay(false);
        let sent: Vec<u8> = (0..3_000_000u32).map(|i| i as u8).collect();
        let copy = sent.clone();
        let mut keyboard = ends.keyboard;
        let typist = thread::spawn(move || keyboard.write_all(&copy).unwrap());
        let mut got = vec![0; sent.len()];
        ends.guest.read_exact(&mut got).unwrap();
        assert!(got == sent);
        typist.join().unwrap();
        thread.join().unwrap().unwrap();
    }

    #[test]
    fn a_reader_that_has_seen_enough_is_no_error() {
        let (guest, console) = UnixStream::pair().unwrap();
        let (_keyboard, input) = UnixStream::pair().unwrap();
        let (screen, output) = UnixStream::pair().unwrap();
        drop(screen);
        (&guest).write_all(b"words").unwrap();
        Relay::new(&console, input.as_fd(), output.as_fd(), false).unwrap().run().unwrap();
        let full = File::options().write(true).open("/dev/full").unwrap();
        (&guest).write_all(b"words").unwrap();
        let error = Relay::new(&console, input.as_fd(), full.as_fd(), false).unwrap().run();
        assert_eq!(error, Err(Errno::ENOSPC), "a full disk is one");
    }
}
