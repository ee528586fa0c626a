//! One path's heartbeats, as the heart sees them. Nothing here waits.

use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Instant;
use understudy_link::link::Link;
use understudy_protocol::wire::Kind;
use understudy_protocol::{Epoch, PathIndex};

/// Messages that are heard at once: other paths' come in between.
const AT_ONCE: usize = 64;

/// A path.
pub struct Line {
    path: PathIndex,
    state: State,
}

enum State {
    /// No connection is there; whoever has one brings it.
    Down,
    /// The peer is to be dialled then.
    Due(Instant),
    /// A thread dials it.
    Dialling,
    Up {
        link: Link,
        /// The beginning of a message.
        partial: Vec<u8>,
        /// Whether there may be more than was heard.
        more: bool,
    },
}

/// The thing that came over a path.
#[derive(Debug, PartialEq, Eq)]
pub enum Heard {
    /// No message, or a part of one.
    Nothing,
    /// Signs of life.
    Signs,
    /// The end of the connection, for this reason.
    End(String),
}

impl Line {
    /// A line without a connection.
    pub fn new(path: PathIndex) -> Line {
        Line { path, state: State::Down }
    }

    /// The same, to be dialled then.
    pub fn due_at(self, then: Instant) -> Line {
        Line { state: State::Due(then), ..self }
    }

    pub fn path(&self) -> PathIndex {
        self.path
    }

    /// Has this connection from now on. It replaces an earlier one, whose end is not the path's.
    pub fn connect(&mut self, link: Link) -> io::Result<()> {
        self.close();
        link.never_wait()?;
        self.state = State::Up { link, partial: Vec::new(), more: true };
        Ok(())
    }

    fn link(&self) -> Option<&Link> {
        match &self.state {
            State::Up { link, .. } => Some(link),
            _ => None,
        }
    }

    /// Readable when something comes.
    pub fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.link().map(AsFd::as_fd)
    }

    /// Whether it is to be heard whatever its descriptor says.
    pub fn has_more(&self) -> bool {
        matches!(self.state, State::Up { more: true, .. })
    }

    /// Hears what has come.
    pub fn hear(&mut self) -> Heard {
        let State::Up { link, partial, more } = &mut self.state else { return Heard::Nothing };
        *more = false;
        for count in 0..AT_ONCE {
            match link.receive_arrived(partial) {
                Ok(Some(message)) if message.header.kind == Kind::Heartbeat => {}
                Ok(Some(message)) => return Heard::End(unexpected(message.header.kind)),
                Ok(None) if count == 0 => return Heard::Nothing,
                Ok(None) => return Heard::Signs,
                Err(error) => return Heard::End(format!("{error:#}")),
            }
        }
        *more = true;
        Heard::Signs
    }

    /// Sends a sign of life. Where nothing leaves any more enough of them wait already: one that
    /// had to be given up would make nonsense of the next.
    pub fn beat(&self) {
        if let Some(link) = self.link().filter(|link| link.has_room()) {
            // A broken connection shows when it is heard.
            let _ = link.send_signal(Kind::Heartbeat, Epoch(0));
        }
    }

    /// Ends the connection; that is heard of afterwards.
    pub fn close(&self) {
        if let Some(link) = self.link() {
            link.close();
        }
    }

    /// The connection has ended: the peer would go on to write to one that nobody reads.
    pub fn end(&mut self) {
        self.close();
        self.state = State::Down;
    }

    /// Whether it is to be dialled now; whoever asks does.
    pub fn begin_dialling(&mut self) -> bool {
        let due = matches!(self.state, State::Due(then) if then <= Instant::now());
        if due {
            self.state = State::Dialling;
        }
        due
    }
}

/// A peer that says something else here is not the one that this host has agreed with on what the connection is for.
fn unexpected(kind: Kind) -> String {
    format!("it has {kind:?} where there are only heartbeats")
}
