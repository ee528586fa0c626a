//! Encode and send: the queue between the guest's side and the wire.

use super::link_speed::{Burst, gathered};
use super::occupied::{self, OwnTime};
use super::references::References;
use super::session::Session;
use super::stats::Stats;
use crate::clock;
use crate::messages::{PageBatch, Piece, ToBackup};
use crate::moments::strike;
use crate::sync::ByteBudget;
use crossbeam_channel::{Receiver, Sender};
use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use understudy_encoding::{Encoder, EncodingPlan, Page};
use understudy_link::channel::Channel;
use understudy_link::link::Next;
use understudy_memory::CapturedChunk;
use understudy_protocol::wire::{HEADER_BYTES, Header};
use understudy_protocol::{Epoch, EpochDigest, EpochEnd, Time};

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
    /// Wakes the reading end.
    bell: Sender<()>,
    shared: Arc<Shared>,
}

/// The reading end of the queue.
#[derive(Debug)]
pub struct Outflow {
    queue: Receiver<Outgoing>,
    bell: Receiver<()>,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    budget: ByteBudget,
    /// Bytes of disk writes that were queued since the reading end was woken last, about.
    untold: AtomicU64,
    /// So many of them wake it, if nothing else does.
    gathered: AtomicU64,
}

/// A fresh queue.
pub fn queue() -> (Outbox, Outflow) {
    let (queue, items) = crossbeam_channel::unbounded();
    let (bell, rings) = crossbeam_channel::bounded(1);
    let budget = ByteBudget::new(QUEUE_BYTES);
    let shared = Arc::new(Shared { budget, untold: 0.into(), gathered: 0.into() });
    let outbox = Outbox { queue, bell, shared: shared.clone() };
    (outbox, Outflow { queue: items, bell: rings, shared })
}

impl Outbox {
    /// Queues data, waiting while the queue is full: the back-pressure that
    /// slows a guest down to the link's speed.
    pub fn put(&self, item: Outgoing) {
        if self.shared.budget.take(item.bytes()) {
            self.send(item);
        }
    }

    /// Queues without waiting, for the checkpoint itself: the pipeline's depth
    /// bounds these.
    pub fn put_now(&self, item: Outgoing) {
        self.shared.budget.force(item.bytes());
        self.send(item);
    }

    /// Nobody is woken for the disk writes of an epoch alone, unless they are many: its end comes.
    fn send(&self, item: Outgoing) {
        let Shared { untold, gathered, .. } = &*self.shared;
        let may_wait = item.may_wait().is_some_and(|bytes| {
            let all = untold.fetch_add(bytes, Ordering::Relaxed) + bytes;
            all < gathered.load(Ordering::Relaxed)
        });
        // Both fail when the sender is gone with the session, and the bell when it was rung already.
        let _ = self.queue.send(item);
        if !may_wait {
            let _ = self.bell.try_send(());
        }
    }

    /// Lets everybody who waits pass; what is queued is the last to be sent.
    pub fn close(&self) {
        self.shared.budget.close();
        self.send(Outgoing::End);
    }

    /// The time since which somebody has waited for room, and nobody who did has got any.
    pub fn waits_since(&self) -> Option<Time> {
        self.shared.budget.waits_since()
    }

    /// Whether nothing more gets into it.
    pub fn is_closed(&self) -> bool {
        self.shared.budget.is_closed()
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

    /// The bytes of what may wait for what comes next: something does, at the latest the end of its epoch. The
    /// first synchronisation has none.
    fn may_wait(&self) -> Option<u64> {
        match self {
            Outgoing::Piece(epoch, piece @ (Piece::DiskWrite(_) | Piece::DiskZero(_))) => {
                (*epoch > Epoch(0)).then(|| piece.bytes())
            }
            _ => None,
        }
    }
}

impl Outflow {
    /// The next item; none when nobody can send more. Whether it had to be waited for, too.
    fn next(&self) -> Option<(Outgoing, bool)> {
        let mut waited = false;
        loop {
            if let Ok(item) = self.queue.try_recv() {
                return Some((item, waited));
            }
            let is_rung = self.bell.recv().is_ok();
            self.shared.untold.store(0, Ordering::Relaxed);
            waited = true;
            if !is_rung {
                return Some((self.queue.try_recv().ok()?, waited));
            }
        }
    }
}

/// Sends what the queue holds until its end or until the connection fails.
pub fn send_all(outflow: &Outflow, session: &Session) -> io::Result<()> {
    let Session { data: link, stats, references, encoding: plan, .. } = session;
    let references = references.as_deref();
    let encoder = Encoder::new(*plan, occupied::worked);
    let (digests, own) = (HashMap::new(), OwnTime::new());
    let burst = Burst::begin(clock::now(), own.occupied());
    let shared = &*outflow.shared;
    let mut sending =
        Sending { link, stats, plan: *plan, encoder, references, digests, own, burst, shared };
    while let Some(item) = sending.next(outflow) {
        if matches!(item, Outgoing::End) {
            break;
        }
        if matches!(item, Outgoing::EpochEnd(..)) {
            strike("send", &session.vm);
        }
        let bytes = item.bytes();
        let next = if outflow.queue.is_empty() { Next::Unknown } else { Next::Message };
        sending.send(item, next)?;
        outflow.shared.budget.give_back(bytes);
    }
    Ok(())
}

struct Sending<'a> {
    link: &'a Channel,
    stats: &'a Stats,
    plan: EncodingPlan,
    encoder: Encoder,
    references: Option<&'a References>,
    digests: HashMap<Epoch, EpochDigest>,
    own: OwnTime,
    burst: Burst,
    shared: &'a Shared,
}

impl Sending<'_> {
    /// The queue's next item; none when nobody can send more.
    fn next(&mut self, outflow: &Outflow) -> Option<Outgoing> {
        let (item, waited) = outflow.next()?;
        if waited {
            self.burst = Burst::begin(clock::now(), self.own.occupied());
        }
        Some(item)
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
                let occupied = self.own.occupied();
                self.stats.link(|link| link.ended(epoch, &self.burst, occupied));
                fail::fail_point!("after-epoch-end");
                Ok(())
            }
            Outgoing::Forget => {
                self.encoder = Encoder::new(self.plan, occupied::worked);
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
            self.shared.gathered.store(gathered(seconds), Ordering::Relaxed);
        }
        let references = self.references;
        let find = |page: &Page| references?.find(page);
        let encoded = self.encoder.encode(chunk.runs(), chunk.bytes(), epoch == Epoch(0), find);
        let before = (epoch == Epoch(0)).then(|| (clock::now(), self.own.occupied()));
        let pages = Piece::Pages(PageBatch::encoded(&encoded.parts));
        let header = ToBackup::Piece(epoch, pages).send(self.link, next)?;
        self.sent(epoch, &header);
        if let Some((began, occupied)) = before {
            let occupied = self.own.occupied().saturating_sub(occupied);
            let took = (clock::now() - began).saturating_sub(occupied);
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
    use std::thread;
    use std::time::Duration;
    use understudy_protocol::DiskIndex;
    use understudy_protocol::wire::DiskWrite;

    fn write(epoch: u64, bytes: usize) -> Outgoing {
        let write = DiskWrite::new(DiskIndex(0), 0, &vec![7; bytes]);
        Outgoing::Piece(Epoch(epoch), Piece::DiskWrite(write))
    }

    fn end(epoch: u64) -> Outgoing {
        Outgoing::EpochEnd(Epoch(epoch), clock::now())
    }

    /// A queue that gathers so many bytes.
    fn gathering(bytes: u64) -> (Outbox, Outflow) {
        let (outbox, outflow) = queue();
        outbox.shared.gathered.store(bytes, Ordering::Relaxed);
        (outbox, outflow)
    }

    /// Whether a sender that sleeps was woken.
    fn is_woken(outflow: &Outflow) -> bool {
        outflow.bell.try_recv().is_ok()
    }

    #[test]
    fn disk_writes_wait_for_what_comes_next_and_go_before_it() {
        let (outbox, outflow) = gathering(10_000);
        outbox.put(write(1, 1_000));
        outbox.put(write(1, 2_000));
        assert!(!is_woken(&outflow));
        outbox.put_now(end(1));
        outbox.put(write(2, 3_000));
        assert!(is_woken(&outflow));
        let items = std::iter::from_fn(|| outflow.queue.try_recv().ok());
        let came: Vec<_> = items.map(|item| item.bytes() / 1_000).collect();
        assert_eq!(came, [1, 2, 0, 3], "the end, which has no bytes, comes third");
    }

    #[test]
    fn many_disk_writes_do_not_wait() {
        let (outbox, outflow) = gathering(10_000);
        for write_of in [1, 2, 3] {
            (0..9).for_each(|_| outbox.put(write(write_of, 1_000)));
            assert!(!is_woken(&outflow));
            outbox.put(write(write_of, 1_000));
            assert!(is_woken(&outflow), "enough for a message");
            outflow.shared.untold.store(0, Ordering::Relaxed);
        }
        outbox.close();
        assert!(is_woken(&outflow), "what is queued is the last to be sent");
    }

    #[test]
    fn a_first_synchronisation_and_a_link_that_is_not_known_gather_nothing() {
        for (gathers, epoch) in [(10_000, 0), (0, 1)] {
            let (outbox, outflow) = gathering(gathers);
            outbox.put(write(epoch, 1_000));
            assert!(is_woken(&outflow), "epoch {epoch}");
        }
    }

    #[test]
    fn a_sender_that_sleeps_counts_anew_and_one_that_nobody_feeds_ends() {
        let (outbox, outflow) = gathering(10_000);
        outbox.put(write(1, 4_000));
        assert!(!outflow.next().unwrap().1, "it was there");
        // Sooner or later it is put while this thread sleeps.
        let sleeps = |delay| {
            thread::scope(|scope| {
                scope.spawn(|| {
                    thread::sleep(Duration::from_millis(delay));
                    outbox.put_now(end(1));
                });
                outflow.next().unwrap().1
            })
        };
        assert!([1, 10, 100, 1_000, 10_000].into_iter().any(sleeps));
        assert_eq!(outflow.shared.untold.load(Ordering::Relaxed), 0);
        outbox.put(write(2, 1_000));
        drop(outbox);
        assert!(outflow.next().is_some(), "what was queued comes");
        assert!(outflow.next().is_none());
    }
}
