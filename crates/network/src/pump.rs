//! The thread that carries a card's frames, both ways. It waits for whatever can go on: a QEMU that
//! takes no frames holds up those from the bridge, and none that the guest sends.

use crate::buffer::Gate;
use crate::frames::{Frames, Moving};
use crate::header::MAX_BYTES;
use crate::messages::{self, READ_AT_ONCE};
use crate::outbound::Inbound;
use crate::shared::Shared;
use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use std::io;
use std::os::fd::AsFd;
use std::sync::Arc;

/// Inbound frames are gathered until these are exceeded before they go to QEMU.
const INBOUND_BYTES: usize = 256 * 1024;
const INBOUND_FRAMES: usize = 64;

/// The number of full readings of what the guest sends before the other way has its turn: as many
/// frames.
const READINGS: usize = INBOUND_FRAMES / READ_AT_ONCE;

/// A card's frames on their way, and what the thread alone knows of that.
pub(crate) struct Pump {
    shared: Arc<Shared>,
    /// The way of frames to QEMU, while there is one.
    inbound: Option<Inbound>,
    /// The agent waits to hear that the header's length is known.
    answer_due: bool,
    /// Frames from the bridge.
    gathered: Moving,
    /// QEMU's socket takes no more at present. Tap and switch queue meanwhile, as for any card
    /// that is slow.
    is_full: bool,
    is_tap_gone: bool,
}

/// The directions in which the pump can go on.
struct Ready {
    /// The guest has sent something, or QEMU has ended.
    output: bool,
    /// QEMU has read something.
    room: bool,
    /// Whether frames are in the tap.
    bridge: bool,
}

impl Pump {
    pub fn new(shared: Arc<Shared>) -> Pump {
        Pump {
            shared,
            inbound: None,
            answer_due: false,
            gathered: Moving::default(),
            is_full: false,
            is_tap_gone: false,
        }
    }

    /// Runs until the port is dropped.
    pub fn run(mut self) {
        while !self.shared.is_stopping() {
            let ready = self.wait();
            if ready.output {
                self.take_output();
            }
            // An echo may be what it waited for: what is known must be renewed first.
            self.renew();
            if ready.room || !self.is_full {
                self.give(ready.bridge);
            }
        }
    }

    fn wait(&self) -> Ready {
        let wake = self.shared.wakes();
        let nothing = (wake.as_fd(), PollFlags::empty());
        let guest = self.inbound.as_ref().map_or(nothing, |to| {
            let mut wanted = PollFlags::POLLIN;
            wanted.set(PollFlags::POLLOUT, self.is_full);
            (to.connection.as_fd(), wanted)
        });
        let takes = self.inbound.is_some() && self.shared.is_live() && !self.is_full;
        let bridge = match takes && !self.is_tap_gone {
            true => (self.shared.tap.as_fd(), PollFlags::POLLIN),
            false => nothing,
        };
        let mut fds = [(wake.as_fd(), PollFlags::POLLIN), guest, bridge]
            .map(|(fd, wanted)| PollFd::new(fd, wanted));
        // A failure (a signal) only makes the thread look once more.
        let _ = poll(&mut fds, PollTimeout::NONE);
        let [woken, guest, bridge] = fds.map(|fd| fd.revents().unwrap_or(PollFlags::all()));
        if !woken.is_empty() {
            // Fails if a signal came in place of it.
            let _ = wake.read();
        }
        Ready {
            output: guest.intersects(!PollFlags::POLLOUT),
            room: guest.contains(PollFlags::POLLOUT),
            bridge: !bridge.is_empty(),
        }
    }

    /// Takes what the guest has sent, and sends on what may go.
    fn take_output(&self) {
        for _ in 0..READINGS {
            let (received, released) = {
                let mut outbound = self.shared.outbound();
                (self.shared.receive(&mut outbound), outbound.buffer.has_released())
            };
            if received.first_held {
                (self.shared.output_waiting)();
            }
            if released {
                self.shared.flush();
            }
            if !received.full {
                return;
            }
        }
    }

    /// Looks at how frames get to QEMU, if that has changed.
    fn renew(&mut self) {
        if !self.shared.has_changed() {
            return;
        }
        let (inbound, answer_due, is_shut) = {
            let mut outbound = self.shared.outbound();
            let (inbound, answer_due) = outbound.inbound();
            (inbound, answer_due, outbound.buffer.gate() == Gate::Shut)
        };
        let goes_on = match (&self.inbound, &inbound) {
            (Some(before), Some(now)) => Arc::ptr_eq(&before.connection, &now.connection),
            _ => false,
        };
        if is_shut || !goes_on {
            self.forget();
        }
        self.answer_due |= answer_due;
        self.inbound = inbound;
    }

    /// Drops what is on its way to QEMU, which never gets there.
    fn forget(&mut self) {
        self.shared.moving().clear();
        if let Some(to) = &self.inbound {
            tell(&self.gathered.frames, to);
        }
        self.gathered.clear();
        (self.answer_due, self.is_full) = (false, false);
    }

    /// Gives QEMU what is for it, the oldest first, as much as its socket takes.
    fn give(&mut self, from_bridge: bool) {
        match self.try_give(from_bridge) {
            Ok(()) => self.is_full = false,
            Err(Errno::EAGAIN | Errno::EINTR) => self.is_full = true,
            // The connection has ended, which the next reading finds out.
            Err(_) => self.forget(),
        }
    }

    fn try_give(&mut self, from_bridge: bool) -> nix::Result<()> {
        let Some(to) = &self.inbound else { return Ok(()) };
        if self.answer_due {
            messages::answer(&to.connection)?;
            self.answer_due = false;
        }
        give_gathered(&self.shared, &mut self.gathered, to)?;
        let is_live = self.shared.is_live();
        give_inside(&self.shared, is_live, to)?;
        if !from_bridge || !is_live {
            return Ok(());
        }
        if let Err(error) = gather(&self.shared, &mut self.gathered.frames, to) {
            tracing::error!(tap = self.shared.tap.name(), %error, "the tap device is gone");
            self.is_tap_gone = true;
        }
        give_gathered(&self.shared, &mut self.gathered, to)
    }
}

/// Reads frames that wait in the tap. What members sent is not taken twice.
fn gather(shared: &Shared, frames: &mut Frames, inbound: &Inbound) -> io::Result<()> {
    while frames.used() < INBOUND_BYTES && frames.len() < INBOUND_FRAMES {
        let room = frames.room(MAX_BYTES);
        let Some(count) = shared.tap.receive(room)? else {
            break;
        };
        if !inbound.is_echo(&room[..count]) {
            frames.taken(count);
        }
    }
    Ok(())
}

fn give_gathered(shared: &Shared, gathered: &mut Moving, to: &Inbound) -> nix::Result<()> {
    while !gathered.is_done() {
        let count = messages::write(&to.connection, &gathered.frames, gathered.sent, to.header)?;
        shared.count_in(gathered.left().take(count));
        gathered.sent += count;
    }
    tell(&gathered.frames, to);
    gathered.clear();
    Ok(())
}

/// Gives QEMU what members sent: not all of it at once, for the other way has its turn, too. No
/// frame is out of sight at any moment.
fn give_inside(shared: &Shared, is_live: bool, to: &Inbound) -> nix::Result<()> {
    let mut moving = shared.moving();
    if moving.is_done() {
        moving.clear();
        if is_live {
            shared.inside().take(&mut moving.frames);
        }
    }
    if moving.is_done() {
        return Ok(());
    }
    let count = messages::write(&to.connection, &moving.frames, moving.sent, to.header)?;
    shared.count_inside(moving.left().take(count));
    moving.sent += count;
    if !moving.is_done() || !shared.inside().is_empty() {
        shared.look_again();
    }
    Ok(())
}

/// Gives a copy of what came over the bridge to whoever wants it.
fn tell(frames: &Frames, to: &Inbound) {
    if let Some(sink) = &to.sink {
        frames.iter().for_each(|frame| sink(frame));
    }
}
