//! The primary's side: pages to messages.

use crate::cache::PageCache;
use crate::choice::{Choice, LookUp, saved};
use crate::message::{DELTA, GENERAL, Index, RAW, REFERENCE, ZERO};
use crate::{Counters, EncodingPlan, Methods, Page, Reference, delta, is_zero_page};
use std::ops::Range;
use std::time::Duration;
use understudy_protocol::{BlockId, PAGE_SIZE, PageIndex, PageRun};

/// An encoding larger than this is not worth the decoding: the page goes raw.
const LARGEST_ENCODING: usize = PAGE_SIZE / 16 * 15;

/// The general compressor may do better than a delta larger than this.
const LARGE_DELTA: usize = PAGE_SIZE / 4;

/// Encodes the pages of one session, in the order of the wire.
#[derive(Debug)]
pub struct Encoder {
    cpu_clock: fn() -> Duration,
    choice: Choice,
    cache: PageCache,
    /// The pages that are looked up, and are in the cache once they have been sent.
    cached: LookUp,
    counters: Counters,
    work: Work,
}

/// Buffers, reused from message to message.
#[derive(Debug, Default)]
struct Work {
    plans: Vec<Plan>,
    deltas: Vec<u8>,
    index: Index,
    encoded: Vec<u8>,
    raw: Vec<Range<usize>>,
}

/// Plan for a page, as the first pass found it.
#[derive(Clone, Debug)]
enum Plan {
    Zero,
    Unchanged,
    Delta(Range<usize>),
    Reference(Reference),
    Other,
}

/// The payload of a message, in parts.
#[derive(Debug)]
pub struct EncodedPages<'a> {
    /// The payload's bytes, part after part.
    pub parts: Vec<&'a [u8]>,
}

impl Encoder {
    /// A new session's encoder. `cpu_clock` gives the CPU time that the calling thread has
    /// used.
    pub fn new(plan: EncodingPlan, cpu_clock: fn() -> Duration) -> Encoder {
        Encoder {
            cpu_clock,
            choice: Choice::new(plan),
            cache: PageCache::new(plan.cache_pages),
            cached: LookUp::None,
            counters: Counters::default(),
            work: Work::default(),
        }
    }

    /// Tells how long the link takes for a byte, in seconds.
    pub fn set_link(&mut self, seconds_per_byte: f64) {
        self.choice.set_link(seconds_per_byte);
    }

    /// The methods in use now.
    pub fn methods(&self) -> Methods {
        self.choice.methods()
    }

    /// Counts of what was done since the first synchronisation.
    pub fn counters(&self) -> Counters {
        self.counters
    }

    /// Encodes the pages of `runs`, whose content is `content`, one after the other.
    ///
    /// All that is encoded must be sent, in this order. `first` says that this is the first
    /// synchronisation: the cache is left alone, since most of its pages do not come again
    /// soon, and nothing is counted.
    ///
    /// `find` is asked where the backup has a page on its mirror: by the time this message
    /// comes to be received, and until it is applied.
    pub fn encode<'a>(
        &'a mut self,
        runs: &[PageRun],
        content: &'a [u8],
        first: bool,
        find: impl Fn(&Page) -> Option<Reference>,
    ) -> EncodedPages<'a> {
        let before = self.counters;
        let methods = self.choice.next_message();
        self.look_up_from_now_on(if first { LookUp::None } else { self.choice.look_up() });
        let start = (self.cpu_clock)();
        self.find_deltas(runs, content);
        let found = (self.cpu_clock)();
        if !first {
            self.judge_deltas(self.counters.lookups - before.lookups, found.saturating_sub(start));
        }
        if !first && methods.references {
            self.find_references(runs, content, find, found);
        }
        let found = (self.cpu_clock)();
        self.fill_message(runs, content, methods, found);
        self.counters.cpu_ns += ((self.cpu_clock)().saturating_sub(start)).as_nanos() as u64;

        let Work { index, encoded, raw, .. } = &mut self.work;
        let mut parts = vec![index.finish(encoded.len())];
        parts.extend((!encoded.is_empty()).then_some(&encoded[..]));
        parts.extend(raw.iter().map(|range| &content[range.clone()]));
        self.counters.bytes += parts.iter().map(|part| part.len() as u64).sum::<u64>();
        if first {
            self.counters = before;
        }
        EncodedPages { parts }
    }

    /// What is sent and not looked up must not be in the cache, which would not know of it.
    fn look_up_from_now_on(&mut self, pages: LookUp) {
        if pages != self.cached && pages != LookUp::All {
            self.cache.clear();
        }
        self.cached = pages;
    }

    /// The first pass: zero pages, and what the cache knows.
    fn find_deltas(&mut self, runs: &[PageRun], content: &[u8]) {
        self.work.plans.clear();
        self.work.deltas.clear();
        for (block, index, page) in pages(runs, content) {
            let is_looked_up = self.cached.has(index);
            let plan = match is_zero_page(page) {
                true => {
                    if let Some(cached) =
                        is_looked_up.then(|| self.cache.get(block, index)).flatten()
                    {
                        cached.fill(0);
                    }
                    Plan::Zero
                }
                false if is_looked_up => self.look_up(block, index, page),
                false => Plan::Other,
            };
            self.work.plans.push(plan);
        }
    }

    /// Finds references for what is left, as far as the backup's mirror has it.
    fn find_references(
        &mut self,
        runs: &[PageRun],
        content: &[u8],
        find: impl Fn(&Page) -> Option<Reference>,
        start: Duration,
    ) {
        let (mut tried, mut found) = (0, 0);
        for (plan, (_, _, page)) in self.work.plans.iter_mut().zip(pages(runs, content)) {
            if let Plan::Other = plan {
                tried += 1;
                if let Some(reference) = find(page) {
                    found += 1;
                    *plan = Plan::Reference(reference);
                }
            }
        }
        let took = (self.cpu_clock)().saturating_sub(start);
        self.choice.references_did(tried, took, found);
    }

    fn judge_deltas(&mut self, looked_up: u64, took: Duration) {
        let saved = self.work.plans.iter().map(Plan::saved).sum();
        self.choice.delta_did(looked_up, took, saved);
    }

    fn look_up(&mut self, block: BlockId, index: PageIndex, page: &Page) -> Plan {
        self.counters.lookups += 1;
        let Some(cached) = self.cache.get(block, index) else {
            self.cache.insert(block, index, page);
            return Plan::Other;
        };
        self.counters.hits += 1;
        let start = self.work.deltas.len();
        match delta::encode(cached, page, LARGEST_ENCODING, &mut self.work.deltas) {
            true if self.work.deltas.len() == start => Plan::Unchanged,
            true => Plan::Delta(start..self.work.deltas.len()),
            false => Plan::Other,
        }
    }

    /// The second pass: the general compressor, and each page's place in the message.
    fn fill_message(
        &mut self,
        runs: &[PageRun],
        content: &[u8],
        methods: Methods,
        start: Duration,
    ) {
        let Work { plans, deltas, index, encoded, raw } = &mut self.work;
        index.clear();
        encoded.clear();
        raw.clear();
        let (mut tried, mut saved_bytes) = (0, 0);
        let mut general = |page: &Page, instead_of: usize, encoded: &mut Vec<u8>| {
            tried += 1;
            let done = push_general(page, instead_of.min(LARGEST_ENCODING), encoded);
            saved_bytes += done.map_or(0, |bytes| (instead_of - bytes) as u64);
            done.is_some()
        };
        let counters = &mut self.counters;
        for (i, (block, page_index, page)) in pages(runs, content).enumerate() {
            counters.pages += 1;
            let kind = match plans[i].clone() {
                Plan::Unchanged => {
                    counters.unchanged += 1;
                    continue;
                }
                Plan::Zero => {
                    counters.zero += 1;
                    ZERO
                }
                Plan::Delta(delta) => {
                    let large = methods.general && delta.len() > LARGE_DELTA;
                    if large && general(page, delta.len(), encoded) {
                        counters.general += 1;
                        GENERAL
                    } else {
                        push_piece(&deltas[delta], encoded);
                        counters.delta += 1;
                        DELTA
                    }
                }
                Plan::Reference(reference) => {
                    encoded.extend_from_slice(&reference.encode());
                    counters.reference += 1;
                    counters.reference_saved_bytes += saved(Reference::BYTES);
                    REFERENCE
                }
                Plan::Other if methods.general && general(page, PAGE_SIZE, encoded) => {
                    counters.general += 1;
                    GENERAL
                }
                Plan::Other => {
                    push_raw(i * PAGE_SIZE, raw);
                    counters.raw += 1;
                    RAW
                }
            };
            index.push(block, page_index, kind);
        }
        if tried > 0 {
            let took = (self.cpu_clock)().saturating_sub(start);
            self.choice.general_did(tried, took, saved_bytes);
        }
    }
}

impl Plan {
    /// Bytes that the cache spared.
    fn saved(&self) -> u64 {
        match self {
            Plan::Unchanged => saved(0),
            Plan::Delta(delta) => saved(delta.len()),
            Plan::Zero | Plan::Reference(_) | Plan::Other => 0,
        }
    }
}

fn pages<'a>(
    runs: &'a [PageRun],
    content: &'a [u8],
) -> impl Iterator<Item = (BlockId, PageIndex, &'a Page)> {
    let places =
        runs.iter().flat_map(|run| (0..run.count).map(|i| (run.block, PageIndex(run.first.0 + i))));
    let content = content.chunks_exact(PAGE_SIZE);
    let content = content.map(|page| page.try_into().expect("a whole page"));
    places.zip(content).map(|((block, index), page)| (block, index, page))
}

/// Appends the compressed page if it is smaller than `limit`, and gives its length.
fn push_general(page: &Page, limit: usize, encoded: &mut Vec<u8>) -> Option<usize> {
    let start = encoded.len();
    let most = lz4_flex::block::get_maximum_output_size(PAGE_SIZE);
    encoded.resize(start + 2 + most, 0);
    // There is room for the worst case, so it does not fail.
    let length = lz4_flex::block::compress_into(page, &mut encoded[start + 2..]).ok();
    let length = length.filter(|&length| length < limit);
    let end = length.map_or(start, |length| start + 2 + length);
    encoded.truncate(end);
    if let Some(length) = length {
        encoded[start..start + 2].copy_from_slice(&(length as u16).to_le_bytes());
    }
    length
}

fn push_piece(piece: &[u8], encoded: &mut Vec<u8>) {
    encoded.extend_from_slice(&(piece.len() as u16).to_le_bytes());
    encoded.extend_from_slice(piece);
}

/// Adjacent raw pages are one part of the message.
fn push_raw(start: usize, raw: &mut Vec<Range<usize>>) {
    match raw.last_mut() {
        Some(last) if last.end == start => last.end += PAGE_SIZE,
        _ => raw.push(start..start + PAGE_SIZE),
    }
}
