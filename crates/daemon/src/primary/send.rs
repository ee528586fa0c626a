//! Encode and send: the queue between the guest's side and the wire.

use super::stats::Stats;
use crate::channel::Channel;
use crate::sync::ByteBudget;
use crossbeam_channel::{Receiver, Sender};
use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use understudy_memory::{CapturedChunk, is_zero_page};
use understudy_protocol::wire::{HEADER_BYTES, Header, Kind, PagesIndex};
use understudy_protocol::{Epoch, EpochDigest, PAGE_SIZE};

/// Bytes that may wait to be sent, beside captured pages.
const QUEUE_BYTES: u64 = 32 << 20;

/// What waits to be sent, in the order of the wire.
#[derive(Debug)]
pub enum Outgoing {
    /// Captured pages.
    Pages(Epoch, CapturedChunk),
    /// A disk write, a zeroed range or the device state.
    Data(Kind, Epoch, Vec<u8>),
    /// Everything of the epoch went before.
    EpochEnd(Epoch),
    /// A message without payload.
    Signal(Kind),
    /// Nothing comes after this.
    End,
}

/// The writing end of the queue.
#[derive(Clone, Debug)]
pub struct Outbox {
    queue: Sender<Outgoing>,
    budget: Arc<ByteBudget>,
}

/// The reading end of the queue.
#[derive(Debug)]
pub struct Outflow {
    queue: Receiver<Outgoing>,
    budget: Arc<ByteBudget>,
}

/// A fresh queue.
pub fn queue() -> (Outbox, Outflow) {
    let (sender, receiver) = crossbeam_channel::unbounded();
    let budget = Arc::new(ByteBudget::new(QUEUE_BYTES));
    (Outbox { queue: sender, budget: budget.clone() }, Outflow { queue: receiver, budget })
}

impl Outbox {
    /// Queues data, waiting while the queue is full: the back-pressure that
    /// slows a guest down to the link's speed.
    pub fn put(&self, item: Outgoing) {
        if self.budget.take(item.bytes()) {
            // Fails only when the sender is gone with the session.
            let _ = self.queue.send(item);
        }
    }

    /// Queues without waiting, for the checkpoint itself: the pipeline's depth
    /// bounds these.
    pub fn put_now(&self, item: Outgoing) {
        self.budget.force(item.bytes());
        let _ = self.queue.send(item);
    }

    /// Lets everybody who waits pass; what is queued is the last to be sent.
    pub fn close(&self) {
        self.budget.close();
        let _ = self.queue.send(Outgoing::End);
    }
}

impl Outgoing {
    fn bytes(&self) -> u64 {
        match self {
            Outgoing::Pages(_, chunk) => chunk.bytes().len() as u64,
            Outgoing::Data(_, _, payload) => payload.len() as u64,
            Outgoing::EpochEnd(_) | Outgoing::Signal(_) | Outgoing::End => 0,
        }
    }
}

/// Sends what the queue holds until its end or until the connection fails.
pub fn send_all(outflow: &Outflow, link: &Channel, stats: &Stats) -> io::Result<()> {
    let mut encoder = Encoder { link, stats, digests: HashMap::new() };
    for item in &outflow.queue {
        if matches!(item, Outgoing::End) {
            break;
        }
        let bytes = item.bytes();
        encoder.send(item)?;
        outflow.budget.give_back(bytes);
    }
    Ok(())
}

struct Encoder<'a> {
    link: &'a Channel,
    stats: &'a Stats,
    digests: HashMap<Epoch, EpochDigest>,
}

impl Encoder<'_> {
    fn send(&mut self, item: Outgoing) -> io::Result<()> {
        match item {
            Outgoing::Pages(epoch, chunk) => self.send_pages(epoch, &chunk),
            Outgoing::Data(kind, epoch, payload) => self.send_data(kind, epoch, &[&payload]),
            Outgoing::EpochEnd(epoch) => {
                fail::fail_point!("before-epoch-end");
                let digest = self.digests.remove(&epoch).unwrap_or_default();
                let header = self.link.send_parts(Kind::EpochEnd, epoch, &[&digest.encode()])?;
                self.count(&header);
                fail::fail_point!("after-epoch-end");
                Ok(())
            }
            Outgoing::Signal(kind) => self.link.send_signal(kind, Epoch(0)),
            Outgoing::End => Ok(()),
        }
    }

    /// One message: the index, then the pages that are not zero.
    fn send_pages(&mut self, epoch: Epoch, chunk: &CapturedChunk) -> io::Result<()> {
        let mut index = PagesIndex::with_capacity(chunk.page_count());
        let mut parts: Vec<&[u8]> = vec![&[]];
        let mut run_start = 0;
        for (i, page) in chunk.pages().enumerate() {
            let zero = is_zero_page(page.bytes);
            index.push(page.block, page.index, zero);
            if zero {
                push_part(&mut parts, &chunk.bytes()[run_start..i * PAGE_SIZE]);
                run_start = (i + 1) * PAGE_SIZE;
            }
        }
        push_part(&mut parts, &chunk.bytes()[run_start..]);
        let index = index.finish();
        parts[0] = &index;
        self.send_data(Kind::Pages, epoch, &parts)
    }

    fn send_data(&mut self, kind: Kind, epoch: Epoch, parts: &[&[u8]]) -> io::Result<()> {
        let header = self.link.send_parts(kind, epoch, parts)?;
        // Epoch 0, the first synchronisation, has no end and so no digest.
        if epoch > Epoch(0) {
            self.digests.entry(epoch).or_default().add(header.checksum(), header.length);
        }
        self.count(&header);
        Ok(())
    }

    fn count(&self, header: &Header) {
        self.stats.sent((HEADER_BYTES + header.length) as u64);
    }
}

fn push_part<'a>(parts: &mut Vec<&'a [u8]>, part: &'a [u8]) {
    if !part.is_empty() {
        parts.push(part);
    }
}
