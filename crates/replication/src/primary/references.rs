//! The pages that the backup can read from its mirror (Remus 5, introspection).
//!
//! Blocks that the guest reads are remembered by their content. A page with the same
//! content is sent as a reference, which the backup reads from its mirror twice: when it
//! receives the message and when it applies it. The mirror holds the content both times:
//!
//! - A block with writes that are not [settled] on the backup is not remembered.
//! - A write removes its blocks before it is queued. So a reference that was made before
//!   the removal lies before the write on the wire, and is received and applied first;
//!   after the removal none is made.
//!
//! [settled]: understudy_protocol::wire::Kind::Settled

use std::collections::HashMap;
use std::ops::Range;
use understudy_disk::ReadSink;
use understudy_encoding::{DiskBlock, Page, PageHash, Reference, is_zero_page};
use understudy_protocol::{DiskIndex, Epoch, PAGE_SIZE};
use understudy_threads::{Mutex, lock};

/// Blocks remembered, and as many noted as written: 256 MiB of the disks, for some 12 MB of RAM.
const MOST_BLOCKS: usize = 65_536;

/// An epoch later than any: not in this session.
const NEVER: Epoch = Epoch(u64::MAX);

/// The blocks of one session.
#[derive(Debug)]
pub struct References(Mutex<Table>);

#[derive(Debug)]
struct Table {
    capacity: usize,
    by_hash: HashMap<PageHash, usize>,
    by_block: HashMap<DiskBlock, usize>,
    /// Remembered blocks; the oldest is replaced first.
    slots: Vec<Option<Reference>>,
    next: usize,
    /// The last epoch of the blocks written of late.
    written: HashMap<DiskBlock, Epoch>,
    /// The last epoch of writes that found no room in `written`.
    crowded: Epoch,
    /// The write under way to each disk; its lock admits one.
    under_way: HashMap<DiskIndex, Range<u64>>,
    /// The mirror holds all of this epoch, and of those before.
    settled: Epoch,
}

impl References {
    /// Knows nothing yet.
    pub fn new() -> References {
        References(Mutex::new(Table::new(MOST_BLOCKS)))
    }

    /// The place where the backup has this page, if it is known to have it.
    pub fn find(&self, page: &Page) -> Option<Reference> {
        if lock(&self.0).by_hash.is_empty() {
            return None;
        }
        let hash = PageHash::of(page);
        lock(&self.0).find(hash)
    }

    /// A write to the disk begins.
    pub fn begin_write(&self, disk: DiskIndex, offset: u64, length: u64) {
        lock(&self.0).begin_write(disk, blocks(offset, length));
    }

    /// The disk was written in `epoch`. To be called before the write is queued.
    pub fn wrote(&self, disk: DiskIndex, offset: u64, length: u64, epoch: Epoch) {
        lock(&self.0).wrote(disk, blocks(offset, length), epoch);
    }

    /// The write that began has been noted whole.
    pub fn end_write(&self, disk: DiskIndex) {
        lock(&self.0).under_way.remove(&disk);
    }

    /// Forgets all of a disk's pages for good: the mirror has another medium in its place.
    pub fn forget_disk(&self, disk: DiskIndex) {
        let mut table = lock(&self.0);
        table.forget(disk, &(0..u64::MAX));
        // Nothing is remembered of a range that is being written.
        table.under_way.insert(disk, 0..u64::MAX);
    }

    /// Forgets all pages for good: the mirror is written by others, too, from now on.
    pub fn stop(&self) {
        *lock(&self.0) = Table::new(0);
    }

    /// The mirror holds everything up to `epoch`.
    pub fn settle(&self, epoch: Epoch) {
        lock(&self.0).settle(epoch);
    }
}

impl ReadSink for References {
    /// The settled epoch: what is written from here on belongs to a later one.
    fn begin(&self) -> Option<u64> {
        let settled = lock(&self.0).settled;
        (settled > Epoch(0)).then_some(settled.0)
    }

    fn read(&self, began: u64, disk: DiskIndex, offset: u64, data: &[u8]) {
        let first = offset.next_multiple_of(PAGE_SIZE as u64);
        let Some(data) = data.get((first - offset) as usize..) else { return };
        for (number, page) in (first / PAGE_SIZE as u64..).zip(data.chunks_exact(PAGE_SIZE)) {
            let page: &Page = page.try_into().expect("a whole page");
            let block = DiskBlock { disk, number };
            // A remembered block has not changed.
            if is_zero_page(page) || lock(&self.0).by_block.contains_key(&block) {
                continue;
            }
            let reference = Reference { block, hash: PageHash::of(page) };
            lock(&self.0).insert(reference, Epoch(began));
        }
    }
}

/// The blocks that a range of bytes touches.
fn blocks(offset: u64, length: u64) -> Range<u64> {
    offset / PAGE_SIZE as u64..(offset + length).div_ceil(PAGE_SIZE as u64)
}

impl Table {
    fn new(capacity: usize) -> Table {
        Table {
            capacity,
            by_hash: HashMap::new(),
            by_block: HashMap::new(),
            slots: Vec::new(),
            next: 0,
            written: HashMap::new(),
            crowded: Epoch(0),
            under_way: HashMap::new(),
            settled: Epoch(0),
        }
    }

    fn find(&self, hash: PageHash) -> Option<Reference> {
        self.slots[*self.by_hash.get(&hash)?]
    }

    /// Remembers a block, unless what a read that began after `began` was settled got
    /// may not be what the mirror holds.
    fn insert(&mut self, reference: Reference, began: Epoch) {
        let Reference { block, hash } = reference;
        // Had more been settled since, a write during the read might be forgotten already.
        let current = began == self.settled && self.crowded <= self.settled;
        let written = self.written.get(&block).is_some_and(|&epoch| epoch > self.settled);
        let under_way = self.under_way.get(&block.disk);
        let under_way = under_way.is_some_and(|range| range.contains(&block.number));
        let known = self.by_hash.contains_key(&hash) || self.by_block.contains_key(&block);
        if !current || written || under_way || known || self.capacity == 0 {
            return;
        }
        if self.slots.len() < self.capacity {
            self.slots.push(None);
        }
        let place = self.next;
        self.next = (place + 1) % self.capacity;
        self.remove(place);
        self.slots[place] = Some(reference);
        self.by_hash.insert(hash, place);
        self.by_block.insert(block, place);
    }

    fn remove(&mut self, place: usize) {
        if let Some(Reference { block, hash }) = self.slots[place].take() {
            self.by_hash.remove(&hash);
            self.by_block.remove(&block);
        }
    }

    fn forget(&mut self, disk: DiskIndex, range: &Range<u64>) {
        let holds = |block: &DiskBlock| block.disk == disk && range.contains(&block.number);
        let places: Vec<usize> = if range.end - range.start < self.by_block.len() as u64 {
            let block = |number| DiskBlock { disk, number };
            range.clone().filter_map(|number| self.by_block.get(&block(number)).copied()).collect()
        } else {
            let held = self.by_block.iter().filter(|(block, _)| holds(block));
            held.map(|(_, &place)| place).collect()
        };
        places.into_iter().for_each(|place| self.remove(place));
    }

    fn begin_write(&mut self, disk: DiskIndex, range: Range<u64>) {
        self.forget(disk, &range);
        if let Some(failed) = self.under_way.insert(disk, range) {
            // It never came to be mirrored: who knows what the image holds there.
            self.note(disk, failed, NEVER);
        }
    }

    fn wrote(&mut self, disk: DiskIndex, range: Range<u64>, epoch: Epoch) {
        self.forget(disk, &range);
        self.note(disk, range, epoch);
    }

    fn note(&mut self, disk: DiskIndex, range: Range<u64>, epoch: Epoch) {
        let room = (self.capacity - self.written.len()) as u64;
        if range.end - range.start > room {
            self.crowded = self.crowded.max(epoch);
            return;
        }
        for number in range {
            let last = self.written.entry(DiskBlock { disk, number }).or_insert(epoch);
            *last = epoch.max(*last);
        }
    }

    fn settle(&mut self, epoch: Epoch) {
        if epoch > self.settled {
            self.settled = epoch;
            self.written.retain(|_, last| *last > epoch);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DISK: DiskIndex = DiskIndex(0);
    const BLOCK: u64 = PAGE_SIZE as u64;

    fn page(content: u8) -> Page {
        [content; PAGE_SIZE]
    }

    /// The guest reads block `number`, which holds `content`.
    fn read(references: &References, number: u64, content: u8) {
        if let Some(began) = references.begin() {
            references.read(began, DISK, number * BLOCK, &page(content));
        }
    }

    fn write(references: &References, number: u64, epoch: u64) {
        references.begin_write(DISK, number * BLOCK, BLOCK);
        references.wrote(DISK, number * BLOCK, BLOCK, Epoch(epoch));
        references.end_write(DISK);
    }

    fn found(references: &References, content: u8) -> Option<u64> {
        references.find(&page(content)).map(|reference| reference.block.number)
    }

    fn settled(epoch: u64) -> References {
        settled_with(epoch, MOST_BLOCKS)
    }

    fn settled_with(epoch: u64, capacity: usize) -> References {
        let references = References(Mutex::new(Table::new(capacity)));
        references.settle(Epoch(epoch));
        references
    }

    #[test]
    fn nothing_is_remembered_before_the_mirror_is_whole() {
        let references = References::new();
        read(&references, 3, 7);
        assert_eq!(found(&references, 7), None);
        references.settle(Epoch(1));
        assert_eq!(found(&references, 7), None);
        read(&references, 3, 7);
        assert_eq!(found(&references, 7), Some(3));
    }

    #[test]
    fn only_whole_blocks_with_content_count() {
        let references = settled(1);
        let began = references.begin().unwrap();
        references.read(
            began,
            DISK,
            5 * BLOCK - 512,
            &[[1; 512].as_slice(), &page(2), &[3; 9]].concat(),
        );
        references.read(began, DISK, 8 * BLOCK, &page(0));
        references.read(began, DISK, 9 * BLOCK + 1, &[4; 20]);
        assert_eq!(found(&references, 2), Some(5));
        assert_eq!(lock(&references.0).by_block.len(), 1);
    }

    #[test]
    fn a_write_removes_every_block_that_it_touches() {
        for from in [0, BLOCK - 1, 100 * BLOCK] {
            let references = settled(1);
            for number in 0..4 {
                read(&references, number, number as u8 + 1);
            }
            references.begin_write(DISK, from, BLOCK + 1);
            let left = (0..4).filter(|&number| found(&references, number as u8 + 1).is_some());
            assert_eq!(
                left.collect::<Vec<_>>(),
                if from < BLOCK { vec![2, 3] } else { vec![0, 1, 2, 3] }
            );
        }
        let references = settled(1);
        read(&references, 3, 7);
        references.begin_write(DiskIndex(1), 0, 100 * BLOCK);
        assert_eq!(found(&references, 7), Some(3), "it is another disk's");
        references.begin_write(DISK, 0, 100 * BLOCK);
        assert_eq!(found(&references, 7), None);
    }

    #[test]
    fn a_written_block_is_left_out_until_its_epoch_is_settled() {
        let references = settled(1);
        write(&references, 3, 4);
        for epoch in 1..4 {
            references.settle(Epoch(epoch));
            read(&references, 3, 7);
            assert_eq!(found(&references, 7), None, "settled: {epoch}");
        }
        references.settle(Epoch(4));
        read(&references, 3, 7);
        assert_eq!(found(&references, 7), Some(3));
    }

    #[test]
    fn a_write_during_a_read_counts_whatever_is_settled() {
        for settles in [false, true] {
            let references = settled(1);
            let began = references.begin().unwrap();
            write(&references, 3, 2);
            if settles {
                references.settle(Epoch(2));
            }
            references.read(began, DISK, 3 * BLOCK, &page(7));
            assert_eq!(found(&references, 7), None);
        }
    }

    #[test]
    fn a_write_under_way_or_failed_leaves_its_blocks_out() {
        let references = settled(1);
        references.begin_write(DISK, 3 * BLOCK, BLOCK);
        read(&references, 3, 7);
        assert_eq!(found(&references, 7), None, "under way");
        write(&references, 4, 1);
        references.settle(Epoch(9));
        read(&references, 3, 7);
        assert_eq!(found(&references, 7), None, "failed");
        read(&references, 4, 8);
        assert_eq!(found(&references, 8), Some(4));
    }

    #[test]
    fn too_many_writes_stop_it_until_they_are_settled() {
        let references = settled_with(1, 4);
        for number in 10..16 {
            write(&references, number, number);
        }
        references.settle(Epoch(14));
        read(&references, 1, 1);
        assert_eq!(found(&references, 1), None);
        references.settle(Epoch(15));
        read(&references, 1, 1);
        assert_eq!(found(&references, 1), Some(1));
    }

    #[test]
    fn once_stopped_it_knows_nothing_any_more() {
        let references = settled(1);
        read(&references, 3, 7);
        references.stop();
        assert_eq!(found(&references, 7), None);
        write(&references, 4, 2);
        references.settle(Epoch(9));
        read(&references, 3, 7);
        assert_eq!(found(&references, 7), None);
    }

    #[test]
    fn a_full_table_drops_the_oldest() {
        let references = settled_with(1, 4);
        for number in 1..=6 {
            read(&references, number, number as u8);
        }
        let left: Vec<u8> = (1..=6).filter(|&page| found(&references, page).is_some()).collect();
        assert_eq!(left, [3, 4, 5, 6]);
    }
}
