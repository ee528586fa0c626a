//! A session's messages in both directions, over one connection at a time.
//!
//! With one path between the hosts, a channel is its connection: when that
//! breaks, so does the channel. With several, the channel outlives its
//! connections: what the peer has not confirmed is kept, and the primary dials
//! the next path and goes on there (`understudy_protocol::SendWindow`).

use crate::link::{Link, Next, Refused};
use anyhow::{Context, bail};
use serde::Serialize;
use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};
use tracing::{info, warn};
use understudy_protocol::wire::{HEADER_BYTES, Header, Kind, Message};
use understudy_protocol::{Count, Epoch, ReceiveWindow, SendWindow};
use understudy_threads::spawn;
use understudy_threads::{Mutex, MutexGuard, Waitable, lock};

/// A broken connection must be followed by another one within this time. The
/// backup should win when both give up: the primary waits longer.
const BACKUP_PATIENCE: Duration = Duration::from_secs(4);
const PRIMARY_PATIENCE: Duration = Duration::from_secs(6);

/// Connections in a row that broke before anything came over them.
const MOST_FRUITLESS: u32 = 8;

/// Ends of epochs that are noted at a time: as many as there are checkpoints on their way.
const MOST_ENDS: usize = 2;

/// Pause between two rounds over the paths that are up.
const REDIAL_PAUSE: Duration = Duration::from_millis(20);

/// A new connection, and how many messages the peer has got.
pub type Resumption = (Link, Count);

/// Asks the peer to go on after this many of its messages; none while no path
/// is up.
pub type Dial = Box<dyn Fn(Count) -> anyhow::Result<Option<Resumption>> + Send + Sync>;

/// Way in which a channel comes by its next connection.
pub enum Renewal {
    /// No renewal: there is one path.
    Never,
    /// The primary dials.
    Dial(Dial),
    /// The backup waits for [`Channel::resume`].
    Await,
}

/// One end of a session's messages. One thread receives; any may send.
pub struct Channel {
    renewal: Renewal,
    state: Waitable<State>,
    /// A lock for the time of a message, so that one follows the other. None
    /// until the unconfirmed messages went over the present connection.
    writing: Mutex<Option<Link>>,
}

struct State {
    /// The connection; none between two.
    link: Option<Link>,
    closed: bool,
    sent: SendWindow<Arc<Message>>,
    received: ReceiveWindow,
    fruitless: u32,
    /// Connections after the first.
    renewals: u64,
    delivered: Delivered,
}

/// Bytes that have arrived at the peer's system, over whatever connection.
#[derive(Default)]
struct Delivered {
    /// Bytes over the present one, as far as it was looked at.
    present: u64,
    all: u64,
    /// Ends of epochs, of those that have not wholly arrived over the present one.
    ends: VecDeque<(Epoch, u64)>,
    whole: Epoch,
}

impl Delivered {
    fn look(&mut self, present: u64) {
        self.all += present.saturating_sub(self.present);
        self.present = present;
        while let Some((epoch, end)) = self.ends.front()
            && *end <= present
        {
            self.whole = self.whole.max(*epoch);
            self.ends.pop_front();
        }
    }
}

impl Channel {
    /// A channel that begins on `link`, from its next message in each direction.
    pub fn new(link: Link, renewal: Renewal) -> Arc<Channel> {
        let state = State {
            link: Some(link.clone()),
            closed: false,
            sent: SendWindow::default(),
            received: ReceiveWindow::default(),
            fruitless: 0,
            renewals: 0,
            delivered: Delivered::default(),
        };
        Arc::new(Channel { renewal, state: Waitable::new(state), writing: Mutex::new(Some(link)) })
    }

    /// Bounds every later read of the present connection; none waits for ever.
    pub fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        match &self.state.lock().link {
            Some(link) => link.set_read_timeout(timeout),
            None => Ok(()),
        }
    }

    /// Bytes that have arrived at the peer's system since the channel began.
    pub fn delivered(&self) -> u64 {
        let mut state = self.state.lock();
        if let Some(present) = state.link.as_ref().map(Link::delivered) {
            state.delivered.look(present);
        }
        state.delivered.all
    }

    /// The last epoch of which all has arrived there, of those that it is known of.
    pub fn whole(&self) -> Epoch {
        self.state.lock().delivered.whole
    }

    /// Notes that what was sent so far has the end of an epoch. Of many that are on their way the
    /// first are noted: of the others it is known once later ones have arrived.
    pub fn note_end(&self, epoch: Epoch) {
        let mut state = self.state.lock();
        if state.delivered.ends.len() < MOST_ENDS
            && let Some(end) = state.link.as_ref().and_then(Link::sent)
        {
            state.delivered.ends.push_back((epoch, end));
        }
    }

    /// Number of times that it went on over another connection.
    pub fn renewals(&self) -> u64 {
        self.state.lock().renewals
    }

    /// Ends the channel in both directions; wakes whoever uses it.
    pub fn close(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        if let Some(link) = state.link.take() {
            link.close();
        }
        self.state.wake();
    }

    /// Ends the present connection, so that the channel goes on over another.
    pub fn abandon(&self) {
        if let Some(link) = &self.state.lock().link {
            link.close();
        }
    }

    /// The next message. The error says why the channel is of no more use.
    pub fn receive(self: &Arc<Self>) -> anyhow::Result<Message> {
        loop {
            let link = match &self.state.lock().link {
                Some(link) => link.clone(),
                None => bail!("the connection was closed"),
            };
            match link.receive() {
                Ok(message) if self.is_single() => return Ok(message),
                Ok(message) => {
                    if let Some(message) = self.take(&link, message)? {
                        return Ok(message);
                    }
                }
                Err(error) if self.is_single() => return Err(error),
                Err(error) => self.renew(&link, error)?,
            }
        }
    }

    fn is_single(&self) -> bool {
        matches!(self.renewal, Renewal::Never)
    }

    /// Counts a message, unless its connection is no longer the channel's: then
    /// the peer sends it again.
    fn take(&self, link: &Link, message: Message) -> anyhow::Result<Option<Message>> {
        let mut state = self.state.lock();
        if !state.link.as_ref().is_some_and(|present| present.is(link)) {
            return Ok(None);
        }
        state.fruitless = 0;
        if message.header.kind == Kind::Received {
            state.sent.confirm(message.header.epoch.0)?;
            self.state.wake();
            return Ok(None);
        }
        state.received.receive(bytes_of(&message.header));
        let due = state.received.confirmation_is_due();
        drop(state);
        // Whoever writes just now does it afterwards: reading never waits for writing.
        if due && let Ok(mut writing) = self.writing.try_lock() {
            self.confirm(&mut writing);
        }
        Ok(Some(message))
    }

    /// Sends one message made of `parts`; returns its header. With several
    /// paths it is on its way for good once this returns: on this connection
    /// or on a later one.
    pub fn send_parts(&self, kind: Kind, epoch: Epoch, parts: &[&[u8]]) -> io::Result<Header> {
        self.send_before(Next::Unknown, kind, epoch, parts)
    }

    /// The same for a message of which it is known what comes next.
    pub fn send_before(
        &self,
        next: Next,
        kind: Kind,
        epoch: Epoch,
        parts: &[&[u8]],
    ) -> io::Result<Header> {
        if self.is_single() {
            let writing = lock(&self.writing);
            let link = writing.as_ref().ok_or(io::ErrorKind::NotConnected)?;
            let header = Header::for_payload(kind, epoch, parts).map_err(io::Error::other)?;
            return link.send_with(&header, parts, next).map(|()| header);
        }
        let header = Header::for_payload(kind, epoch, parts).map_err(io::Error::other)?;
        let message = Arc::new(Message { header, payload: parts.concat() });
        self.wait_for_room()?;
        let mut writing = lock(&self.writing);
        self.state.lock().sent.push(message.clone(), bytes_of(&header));
        if let Some(link) = &*writing
            && link.send_with(&header, &[&message.payload], next).is_err()
        {
            // Wakes the receiving thread, which sees to the next connection.
            link.close();
            *writing = None;
        }
        self.confirm(&mut writing);
        Ok(header)
    }

    /// Waits for room, not with `writing` held: the unconfirmed messages have to go out first.
    fn wait_for_room(&self) -> io::Result<()> {
        let mut state = self.state.lock();
        while !state.closed && !state.sent.has_room() {
            state = self.state.wait(state);
        }
        if state.closed { Err(io::ErrorKind::NotConnected.into()) } else { Ok(()) }
    }

    /// Confirms what has been received, if it is time to.
    fn confirm(&self, writing: &mut MutexGuard<'_, Option<Link>>) {
        let Some(link) = &**writing else { return };
        let count = {
            let mut state = self.state.lock();
            if !state.received.confirmation_is_due() {
                return;
            }
            state.received.confirm()
        };
        if link.send_signal(Kind::Received, Epoch(count)).is_err() {
            link.close();
            **writing = None;
        }
    }

    /// Sends `body` as JSON.
    pub fn send_json(&self, kind: Kind, body: &impl Serialize) -> anyhow::Result<()> {
        self.send_parts(kind, Epoch(0), &[&serde_json::to_vec(body)?])?;
        Ok(())
    }

    /// The connection broke: waits for the next one, or dials it.
    fn renew(self: &Arc<Self>, broken: &Link, error: anyhow::Error) -> anyhow::Result<()> {
        broken.close();
        {
            let mut state = self.state.lock();
            if state.closed {
                return Err(error);
            }
            if state.link.as_ref().is_some_and(|present| !present.is(broken)) {
                return Ok(());
            }
            state.link = None;
            state.fruitless += 1;
            if state.fruitless > MOST_FRUITLESS {
                return Err(error.context("nothing comes over any connection"));
            }
        }
        info!("the session's connection broke: {error:#}");
        match &self.renewal {
            Renewal::Never => Err(error),
            Renewal::Await => self.await_link(error),
            Renewal::Dial(dial) => self.redial(dial, error),
        }
    }

    fn await_link(&self, error: anyhow::Error) -> anyhow::Result<()> {
        let waits = |state: &mut State| !state.closed && state.link.is_none();
        let state = self.state.wait_while_for(self.state.lock(), BACKUP_PATIENCE, waits);
        match state.link {
            Some(_) => Ok(()),
            None => Err(error.context("the session did not go on over another path")),
        }
    }

    fn redial(self: &Arc<Self>, dial: &Dial, error: anyhow::Error) -> anyhow::Result<()> {
        let deadline = Instant::now() + PRIMARY_PATIENCE;
        while !self.state.lock().closed && Instant::now() < deadline {
            let count = self.state.lock().received.received();
            match dial(count) {
                Ok(Some((link, peers_count))) => {
                    let channel = self.clone();
                    self.connect(link.clone(), peers_count)?;
                    // Not here: the peer may have as much to send again.
                    spawn("send-again", move || channel.send_again(&link))
                        .context("cannot start a thread")?;
                    return Ok(());
                }
                Ok(None) => {}
                Err(refusal) if refusal.is::<Refused>() => return Err(refusal),
                Err(error) => warn!("cannot resume the session: {error:#}"),
            }
            thread::sleep(REDIAL_PAUSE);
        }
        Err(error.context("the session could not be resumed over any path"))
    }

    /// The peer goes on over this connection; it has got `count` messages.
    /// `answer` gets how many have been received here. Returns when everything
    /// that the peer lacks was sent.
    pub fn resume(
        &self,
        link: &Link,
        count: Count,
        answer: impl FnOnce(Count) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        // Before the answer: what comes over the old connection counts no more.
        let received = self.connect(link.clone(), count)?;
        answer(received)?;
        self.send_again(link);
        Ok(())
    }

    /// Makes `link` the channel's connection; returns how many messages have
    /// been received before.
    fn connect(&self, link: Link, peers_count: Count) -> anyhow::Result<Count> {
        let mut state = self.state.lock();
        if state.closed {
            bail!("the session is over");
        }
        state.sent.confirm(peers_count)?;
        state.renewals += 1;
        state.delivered.present = 0;
        state.delivered.ends.clear();
        if let Some(old) = state.link.replace(link) {
            old.close();
        }
        self.state.wake();
        Ok(state.received.confirm())
    }

    /// Sends what the peer lacks over `link`, unless that is history by now.
    fn send_again(&self, link: &Link) {
        let mut writing = lock(&self.writing);
        let messages: Vec<Arc<Message>> = {
            let state = self.state.lock();
            if !state.link.as_ref().is_some_and(|present| present.is(link)) {
                return;
            }
            state.sent.unconfirmed().cloned().collect()
        };
        let send = |message: &Arc<Message>| {
            link.send_with(&message.header, &[&message.payload], Next::Unknown)
        };
        if messages.iter().try_for_each(send).is_err() {
            link.close();
            return;
        }
        *writing = Some(link.clone());
        // The reading thread left it to whoever was writing; the peer may wait for it.
        self.confirm(&mut writing);
    }
}

fn bytes_of(header: &Header) -> u64 {
    (HEADER_BYTES + header.length) as u64
}

#[cfg(test)]
mod tests;
