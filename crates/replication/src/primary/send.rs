//! Encode and send: the queue between the guest's side and the wire.

use super::epoch_room::{EPOCH_DISK_BYTES, Room};
use super::link_speed::Burst;
use super::references::References;
use super::session::Session;
use super::stats::Stats;
use crate::clock;
use crate::messages::{PageBatch, Piece, ToBackup};
use crate::moments::strike;
use crossbeam_channel::{Receiver, Sender};
use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use understudy_encoding::{Encoder, EncodingPlan, Page};
use understudy_link::channel::Channel;
use understudy_link::link::Next;
use understudy_memory::CapturedChunk;
use understudy_protocol::wire::{HEADER_BYTES, Header};
use understudy_protocol::{Epoch, EpochDigest, EpochEnd, EpochRoom, Time};

/// Bytes that may wait to be sent, beside captured pages.
const QUEUE_BYTES: u64 = 32 << 20;

/// A thing that waits to be sent, in the order of the wire.
#[derive(Debug)]
pub enum Outgoing {
    /// Captured pages.
    Pages(Epoch, CapturedChunk),
    /// Another piece of an epoch.
    Piece(Epoch, Piece<'static>),
    /// The backup's memory has changed by other means: what was sent before is no base for deltas.
    Forget,
    /// The end of the epoch, of which everything went before.
    EpochEnd(Epoch, Time),
    /// A message that belongs to no epoch.
    Message(ToBackup<'static>),
    /// The end, after which nothing comes.
    End,
}

/// The writing end of the queue.
#[derive(Clone, Debug)]
pub struct Outbox {
    queue: Sender<Outgoing>,
    /// Room in it, and for what the guest writes to its disks in the epoch that runs.
    pub(super) room: Arc<Room>,
}

/// The reading end of the queue.
#[derive(Debug)]
pub struct Outflow {
    queue: Receiver<Outgoing>,
    /// The item that comes next, if it has been looked at already.
    next: Option<Outgoing>,
    room: Arc<Room>,
}

/// A fresh queue.
pub fn queue() -> (Outbox, Outflow) {
    let (sender, receiver) = crossbeam_channel::unbounded();
    let room = Arc::new(Room::with(QUEUE_BYTES, EpochRoom::new(EPOCH_DISK_BYTES)));
    let outflow = Outflow { queue: receiver, next: None, room: room.clone() };
    (Outbox { queue: sender, room }, outflow)
}

impl Outbox {
    /// Queues data, waiting while the queue is full: the back-pressure that
    /// slows a guest down to the link's speed.
    pub fn put(&self, item: Outgoing) {
        if self.room.take(item.bytes()) {
            // Fails only when the sender is gone with the session.
            let _ = self.queue.send(item);
        }
    }

    /// Queues without waiting, for the checkpoint itself: the pipeline's depth
    /// bounds these.
    pub fn put_now(&self, item: Outgoing) {
        self.room.force(item.bytes());
        let _ = self.queue.send(item);
    }

    /// Lets everybody who waits pass; what is queued is the last to be sent.
    pub fn close(&self) {
        self.room.close();
        let _ = self.queue.send(Outgoing::End);
    }

    /// The time since which somebody has waited for room, and nobody who did has got any.
    pub fn waits_since(&self) -> Option<Time> {
        self.room.waits_since()
    }

    /// Whether nothing more gets into it.
    pub fn is_closed(&self) -> bool {
        self.room.is_closed()
    }
}

impl Outflow {
    fn try_take(&mut self) -> Option<Outgoing> {
        self.next.take().or_else(|| self.queue.try_recv().ok())
    }

    /// What goes out behind the item that was taken last.
    fn next(&mut self) -> Next {
        self.next = self.try_take();
        match self.next {
            None | Some(Outgoing::Forget | Outgoing::End) => Next::Unknown,
            Some(_) => Next::Message,
        }
    }
}

impl Outgoing {
    fn bytes(&self) -> u64 {
        match self {
            Outgoing::Pages(_, chunk) => chunk.bytes().len() as u64,
            Outgoing::Piece(_, piece) => piece.bytes(),
            Outgoing::Forget | Outgoing::EpochEnd(..) | Outgoing::Message(_) | Outgoing::End => 0,
        }
    }
}

/// Sends what the queue holds until its end or until the connection fails.
pub fn send_all(outflow: &mut Outflow, session: &Session) -> io::Result<()> {
    let Session { data: link, stats, references, encoding: plan, .. } = session;
    let references = references.as_deref();
    let encoder = Encoder::new(*plan, thread_cpu_time);
    let (digests, burst) = (HashMap::new(), Burst::begin(clock::now()));
    let mut sending = Sending { link, stats, plan: *plan, encoder, references, digests, burst };
    while let Some(item) = sending.next(outflow) {
        if matches!(item, Outgoing::End) {
            break;
        }
        let is_end = matches!(item, Outgoing::EpochEnd(..));
        strike(if is_end { "send" } else { "copy" }, &session.vm);
        let bytes = item.bytes();
        let next = outflow.next();
        sending.send(item, next)?;
        outflow.room.give_back(bytes);
    }
    Ok(())
}

/// The CPU time that this thread has used.
fn thread_cpu_time() -> Duration {
    let clock = nix::time::ClockId::CLOCK_THREAD_CPUTIME_ID;
    // Every Linux has this clock; without it methods would seem to cost nothing.
    nix::time::clock_gettime(clock).map_or(Duration::ZERO, Duration::from)
}

struct Sending<'a> {
    link: &'a Channel,
    stats: &'a Stats,
    plan: EncodingPlan,
    encoder: Encoder,
    references: Option<&'a References>,
    digests: HashMap<Epoch, EpochDigest>,
    burst: Burst,
}

impl Sending<'_> {
    /// The queue's next item; none when nobody can send more.
    fn next(&mut self, outflow: &mut Outflow) -> Option<Outgoing> {
        if let Some(item) = outflow.try_take() {
            return Some(item);
        }
        let item = outflow.queue.recv().ok();
        self.burst = Burst::begin(clock::now());
        item
    }

    fn send(&mut self, item: Outgoing, next: Next) -> io::Result<()> {
        match item {
            Outgoing::Pages(epoch, chunk) => self.send_pages(epoch, &chunk, next),
            Outgoing::Piece(epoch, piece) => {
                let header = ToBackup::Piece(epoch, piece).send(self.link, next)?;
                self.sent(epoch, &header);
                Ok(())
            }
            Outgoing::EpochEnd(epoch, stopped) => {
                fail::fail_point!("before-epoch-end");
                let sums = self.digests.remove(&epoch).unwrap_or_default().sums();
                let end = EpochEnd { epoch, sums, age: clock::now() - stopped };
                let header = ToBackup::EpochEnd(end).send(self.link, Next::Unknown)?;
                self.link.note_end(epoch);
                self.count(&header);
                self.stats.link(|link| link.ended(epoch, &self.burst));
                fail::fail_point!("after-epoch-end");
                Ok(())
            }
            Outgoing::Forget => {
                self.encoder = Encoder::new(self.plan, thread_cpu_time);
                Ok(())
            }
            // Never held back: nobody may wait for what does not come.
            Outgoing::Message(message) => message.send(self.link, Next::Unknown).map(drop),
            Outgoing::End => Ok(()),
        }
    }

    fn send_pages(&mut self, epoch: Epoch, chunk: &CapturedChunk, next: Next) -> io::Result<()> {
        if let Some(seconds) = self.stats.link(|link| link.seconds_per_byte()) {
            self.encoder.set_link(seconds);
        }
        let began = clock::now();
        let references = self.references;
        let find = |page: &Page| references?.find(page);
        let encoded = self.encoder.encode(chunk.runs(), chunk.bytes(), epoch == Epoch(0), find);
        let encoding_ended = clock::now();
        let pages = Piece::Pages(PageBatch::encoded(&encoded.parts));
        let header = ToBackup::Piece(epoch, pages).send(self.link, next)?;
        self.sent(epoch, &header);
        self.burst.encoded(encoding_ended - began);
        if epoch == Epoch(0) {
            let took = clock::now() - encoding_ended;
            self.stats.link(|link| link.sent_in_bulk(header.length as u64, took));
        }
        self.stats.encoded(self.encoder.counters(), self.encoder.methods());
        Ok(())
    }

    /// A data message of `epoch` was sent.
    fn sent(&mut self, epoch: Epoch, header: &Header) {
        // Epoch 0, the first synchronisation, has no end and so no digest.
        if epoch > Epoch(0) {
            self.digests.entry(epoch).or_default().add(header);
        }
        self.count(header);
    }

    fn count(&mut self, header: &Header) {
        let bytes = (HEADER_BYTES + header.length) as u64;
        self.burst.add(bytes);
        self.stats.sent(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What [`Next::Message`] says must be true: the link holds bytes back for it.
    #[test]
    fn a_message_is_announced_only_if_one_goes_out() {
        let (outbox, mut outflow) = queue();
        let message = || Outgoing::Message(ToBackup::StandDown);
        for item in [
            message(),
            message(),
            Outgoing::Forget,
            message(),
            Outgoing::EpochEnd(Epoch(1), Time::default()),
        ] {
            outbox.put_now(item);
        }
        outbox.close();
        let announced: Vec<Next> =
            std::iter::from_fn(|| outflow.try_take().map(|_| outflow.next())).collect();
        let (yes, no) = (Next::Message, Next::Unknown);
        assert_eq!(announced, [yes, no, yes, yes, no, no]);
    }
}
