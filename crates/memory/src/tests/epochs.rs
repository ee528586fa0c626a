//! Tests of what is found, copied and rebuilt.

use super::*;
use crate::mapping::PrivateMapping;
use nix::sys::mman::{MmapAdvise, madvise};
use std::os::unix::fs::FileExt;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;

/// Each way to protect again what was written must find the same.
macro_rules! both_ways {
    ($($test:ident),* $(,)?) => {
        mod at_once {
            $(#[test]
            fn $test() {
                super::$test(super::Reprotect::AtOnce);
            })*
        }

        mod by_runs {
            $(#[test]
            fn $test() {
                super::$test(super::Reprotect::Runs);
            })*
        }
    };
}

both_ways!(
    exactly_the_written_pages_are_found_once,
    written_pages_are_counted_and_still_found,
    reading_is_not_writing,
    pages_read_first_and_written_later_are_found,
    untouched_memory_beside_touched_memory_stays_untouched,
    pages_populated_by_a_system_call_are_found,
    writes_to_discarded_pages_are_found,
    more_scattered_pages_than_fit_one_call_are_all_found,
    large_memory_is_scanned_in_parallel_slices_in_order,
    a_written_page_whose_mapping_was_dropped_is_still_found,
    tracking_ends_with_detach_and_can_begin_again,
    auxiliary_blocks_are_tracked_read_and_written,
    blocks_that_cannot_be_tracked_are_compared_or_refused,
    no_write_is_lost_over_many_epochs_with_concurrent_writers,
    a_round_before_the_pause_finds_pages_of_main_memory,
    captures_of_one_epoch_apply_in_order,
);

fn exactly_the_written_pages_are_found_once(reprotect: Reprotect) {
    let guest = Guest::new(1024);
    guest.write(7, 1); // Before arming: part of the first synchronisation, not of an epoch.
    let mut tracker = guest.track(reprotect);
    assert_eq!(scan(&mut tracker), []);

    for page in [3, 4, 5, 700, 1023] {
        guest.write(page, 1);
    }
    assert_eq!(scan(&mut tracker), [run(3, 3), run(700, 1), run(1023, 1)]);
    assert_eq!(scan(&mut tracker), []);

    guest.write(4, 2);
    assert_eq!(scan(&mut tracker), [run(4, 1)]);
}

fn written_pages_are_counted_and_still_found(reprotect: Reprotect) {
    let guest = Guest::new(1024);
    // In every page table, wherever the mapping lies.
    for page in [0, 200, 1023] {
        guest.write(page, 1);
    }
    let mut tracker = guest.track(reprotect);
    assert_eq!(tracker.count().unwrap(), 0);
    for page in [0, 1, 200, 1023] {
        guest.write(page, 2);
    }
    assert_eq!(tracker.count().unwrap(), 4);
    assert_eq!(scan(&mut tracker), [run(0, 2), run(200, 1), run(1023, 1)]);
    assert_eq!(tracker.count().unwrap(), 0);
}

fn reading_is_not_writing(reprotect: Reprotect) {
    let guest = Guest::new(256);
    // In every page table, wherever the mapping lies: memory without content is
    // reported when it is first read.
    for page in [0, 255] {
        guest.write(page, 1);
    }
    let mut tracker = guest.track(reprotect);
    guest.content();
    assert_eq!(scan(&mut tracker), []);
}

/// A page comes into being when it is first read: memory that nobody touched is not watched
/// page by page, so it is reported once.
fn pages_read_first_and_written_later_are_found(reprotect: Reprotect) {
    let guest = Guest::new(2048);
    let mut tracker = guest.track(reprotect);
    guest.read(700);
    assert_eq!(scan(&mut tracker), [run(700, 1)]);
    guest.read(701);
    guest.read(1500);
    guest.write(1501, 1);
    assert_eq!(scan(&mut tracker), [run(1500, 2)]);
    for page in [700, 701, 702, 1500] {
        guest.write(page, 2);
    }
    assert_eq!(scan(&mut tracker), [run(700, 3), run(1500, 1)]);
    assert_eq!(scan(&mut tracker), []);
}

/// Reading a hole through a mapping allocates it: captures must not.
fn untouched_memory_beside_touched_memory_stays_untouched(reprotect: Reprotect) {
    let guest = Guest::new(4096);
    let mut tracker = guest.track(reprotect);
    guest.write(600, 1);
    guest.write(4095, 1);
    let (mut staging, mut dirty) = (staging(), DirtySet::new());
    for _ in 0..2 {
        tracker.scan(&mut dirty).unwrap();
        capture(&guest.blocks, &dirty, &mut staging).unwrap();
    }
    let runs: Result<Vec<_>, _> = guest.ram.data_runs().collect();
    assert_eq!(runs.unwrap(), [run(600, 1), run(4095, 1)]);
}

/// QEMU writes guest memory by system calls too: disk reads, for example.
fn pages_populated_by_a_system_call_are_found(reprotect: Reprotect) {
    let guest = Guest::new(2048);
    let file = tempfile::tempfile().unwrap();
    file.write_all_at(&[7; 3 * PAGE_SIZE], 0).unwrap();
    let mut tracker = guest.track(reprotect);
    for (first, expected) in [(1000, run(1000, 3)), (1010, run(1010, 3)), (1000, run(1000, 3))] {
        let target = guest.view.address() + first * PAGE_SIZE as u64;
        read_into(&file, target, 3 * PAGE_SIZE);
        assert_eq!(scan(&mut tracker), [expected]);
    }
}

#[allow(unsafe_code)]
pub(super) fn read_into(file: &std::fs::File, address: u64, bytes: usize) {
    use std::os::fd::AsRawFd;
    // SAFETY: the caller's range lies in a shared mapping, into which nobody holds references.
    let read = unsafe { libc::pread(file.as_raw_fd(), address as *mut _, bytes, 0) };
    assert_eq!(read, bytes as isize);
}

/// The tracker sees writes, not discards; but it goes on seeing writes after them.
fn writes_to_discarded_pages_are_found(reprotect: Reprotect) {
    let guest = Guest::new(2048);
    guest.write(3, 1);
    let mut tracker = guest.track(reprotect);
    guest.write(1000, 1);
    scan(&mut tracker);
    guest.blocks[0].clear(PageIndex(3), 1).unwrap();
    guest.blocks[0].clear(PageIndex(1000), 1).unwrap();
    scan(&mut tracker);
    guest.write(3, 2);
    guest.write(1000, 2);
    assert_eq!(scan(&mut tracker), [run(3, 1), run(1000, 1)]);
}

fn more_scattered_pages_than_fit_one_call_are_all_found(reprotect: Reprotect) {
    let guest = Guest::new(16384);
    let mut tracker = guest.track(reprotect);
    for page in (0..16384).step_by(2) {
        guest.write(page, 1);
    }
    let expected: Vec<_> = (0..16384).step_by(2).map(|page| run(page, 1)).collect();
    assert_eq!(scan(&mut tracker), expected);
}

fn large_memory_is_scanned_in_parallel_slices_in_order(reprotect: Reprotect) {
    let guest = Guest::new((300 << 20) / PAGE_SIZE + 77);
    for page in (0..guest.ram.pages()).step_by(256) {
        guest.write(page, 1); // All page tables are in use: enough for several threads.
    }
    let mut tracker = guest.track(reprotect);
    let last = guest.ram.pages() - 1;
    let expected = [
        run(0, 1),
        run(32767, 1), // Either side of the border between two slices:
        run(32768, 1),
        run(50_000, 1),
        run(last, 1),
    ];
    for one in &expected {
        guest.write(one.first.0, 1);
    }
    let found = scan(&mut tracker);
    assert_eq!(found, expected);
    assert_eq!(scan(&mut tracker), []);
}

/// Reclaim and swap drop the mapping of a written page. `MADV_DONTNEED` on shared memory
/// does the same, and keeps the content.
#[allow(unsafe_code)]
fn a_written_page_whose_mapping_was_dropped_is_still_found(reprotect: Reprotect) {
    let guest = Guest::new(1024);
    let mut tracker = guest.track(reprotect);
    guest.write(9, 1);
    let start = NonNull::new(guest.view.address() as *mut _).unwrap();
    // SAFETY: on a shared file mapping this drops page table entries, not content.
    unsafe { madvise(start, 1024 * PAGE_SIZE, MmapAdvise::MADV_DONTNEED) }.unwrap();
    assert!(scan(&mut tracker).contains(&run(9, 1)));
}

fn tracking_ends_with_detach_and_can_begin_again(reprotect: Reprotect) {
    let guest = Guest::new(64);
    let userfaultfd = Arc::new(Userfaultfd::of_this_process().unwrap());
    for _ in 0..3 {
        let attach = DirtyTracker::attach(
            this_process(),
            Arc::clone(&userfaultfd),
            &guest.blocks,
            reprotect,
        );
        let mut tracker = attach.unwrap();
        tracker.arm().unwrap();
        guest.write(1, 1);
        assert_eq!(scan(&mut tracker), [run(1, 1)]);
        tracker.detach().unwrap();
        guest.write(2, 1);
    }
}

#[test]
fn holes_are_neither_listed_nor_allocated() {
    let guest = Guest::new(4096);
    guest.write(10, 1);
    guest.write(11, 1);
    guest.write(4095, 1);
    let mut set = DirtySet::new();
    guest.blocks[0].add_content_to(&mut set).unwrap();
    assert_eq!(set.runs(), [run(10, 2), run(4095, 1)]);

    let mut staging = staging();
    capture(&guest.blocks, &set, &mut staging).unwrap();
    assert_eq!(staging.take().page_count(), 3);
    let runs: Result<Vec<_>, _> = guest.ram.data_runs().collect();
    assert_eq!(runs.unwrap(), [run(10, 2), run(4095, 1)]);
}

#[test]
fn whoever_peeks_finds_zeroes_in_holes_and_leaves_them() {
    let guest = Guest::new(64);
    guest.write(3, 7);
    let mut seen = vec![1; 5 * PAGE_SIZE];
    guest.blocks[0].peek(PageIndex(1), &mut seen).unwrap();
    let content = |page: usize| &seen[page * PAGE_SIZE..][..PAGE_SIZE];
    assert_eq!(content(2)[0], 7);
    assert!([0, 1, 3, 4].iter().all(|&page| content(page).iter().all(|&byte| byte == 0)));
    let runs: Result<Vec<_>, _> = guest.ram.data_runs().collect();
    assert_eq!(runs.unwrap(), [run(3, 1)]);
    assert!(guest.blocks[0].peek(PageIndex(60), &mut seen).is_err(), "beyond the end");
}

#[test]
fn cleared_pages_are_given_back() {
    let guest = Guest::new(16);
    for page in 0..16 {
        guest.write(page, 1);
    }
    guest.blocks[0].clear(PageIndex(4), 8).unwrap();
    let runs: Result<Vec<_>, _> = guest.ram.data_runs().collect();
    assert_eq!(runs.unwrap(), [run(0, 4), run(12, 4)]);
    assert!(is_zero_page(&guest.content()[4 * PAGE_SIZE..12 * PAGE_SIZE]));
}

#[test]
fn memory_of_an_impossible_size_is_refused() {
    for bytes in [0, 1, PAGE_SIZE as u64 + 1, u64::MAX] {
        assert!(matches!(GuestRam::create(bytes), Err(MemoryError::RamSize(b)) if b == bytes));
    }
    assert!(matches!(GuestRam::create(1 << 63), Err(MemoryError::Ram { .. })));
}

#[test]
fn pages_outside_a_block_are_refused() {
    let guest = Guest::new(4);
    let block = &guest.blocks[0];
    let mut page = [0; PAGE_SIZE];
    for first in [4, u64::MAX] {
        let first = PageIndex(first);
        assert!(matches!(block.read(first, &mut page), Err(MemoryError::OutsideBlock { .. })));
        assert!(block.write(first, &page).is_err());
        assert!(block.clear(first, 1).is_err());
    }
    let unknown = PageRun { block: BlockId(9), ..run(0, 1) };
    let mut set = DirtySet::new();
    set.push(run(0, 1));
    set.push(unknown);
    let mut staging = staging();
    let result = capture(&guest.blocks, &set, &mut staging);
    assert!(matches!(result, Err(MemoryError::UnknownBlock(BlockId(9)))));
    assert_eq!(staging.take().page_count(), 0, "nothing half captured");
}

fn auxiliary_blocks_are_tracked_read_and_written(reprotect: Reprotect) {
    let rom = PrivateMapping::populated(NonZeroUsize::new(8 * PAGE_SIZE).unwrap()).unwrap();
    let bytes = 7 * PAGE_SIZE as u64 + 100; // The last page is cut short.
    let mut guest = Guest::new(16);
    guest.blocks.push(auxiliary(1, &rom, bytes));
    let block = guest.blocks[1].clone();
    assert_eq!(block.pages(), 8);
    let mut tracker = guest.track(reprotect);

    block.write(PageIndex(2), &[5; PAGE_SIZE]).unwrap();
    block.write(PageIndex(7), &[6; PAGE_SIZE]).unwrap();
    assert_eq!(rom[2 * PAGE_SIZE], 5);
    assert_eq!(rom[7 * PAGE_SIZE + 99], 6);
    assert_eq!(rom[7 * PAGE_SIZE + 100], 0, "not written beyond the end");

    let mut dirty = DirtySet::new();
    tracker.scan(&mut dirty).unwrap();
    let pages: Vec<_> = dirty.runs().iter().map(|r| (r.block.0, r.first.0, r.count)).collect();
    assert_eq!(pages, [(1, 2, 1), (1, 7, 1)]);

    let mut staging = staging();
    capture(&guest.blocks, &dirty, &mut staging).unwrap();
    let captured = staging.take();
    let copies: Vec<_> = captured.chunks[0].pages().collect();
    assert_eq!(copies[0].bytes, [5; PAGE_SIZE]);
    assert_eq!(copies[1].bytes[..100], [6; 100]);
    assert!(is_zero_page(&copies[1].bytes[100..]));

    block.clear(PageIndex(7), 1).unwrap();
    assert!(is_zero_page(&rom[7 * PAGE_SIZE..]));
}

#[test]
fn a_part_of_a_page_is_written_and_the_rest_stays() {
    let rom = PrivateMapping::populated(NonZeroUsize::new(2 * PAGE_SIZE).unwrap()).unwrap();
    let mut guest = Guest::new(16);
    guest.blocks.push(auxiliary(1, &rom, PAGE_SIZE as u64 + 100));
    for block in &guest.blocks {
        block.write(PageIndex(1), &[5; PAGE_SIZE]).unwrap();
        block.write_part(PageIndex(1), 90, &[6; 20]).unwrap();
        let mut page = [0; PAGE_SIZE];
        block.read(PageIndex(1), &mut page).unwrap();
        assert_eq!((page[89], page[90], page[99]), (5, 6, 6));
        let behind = if block.id() == MAIN_MEMORY { [6, 5] } else { [0, 0] };
        assert_eq!([page[109], page[110]], behind, "what lies beyond the end is dropped");
        block.write_part(PageIndex(1), PAGE_SIZE - 1, &[7]).unwrap();
        assert!(block.write_part(PageIndex(block.pages()), 0, &[7]).is_err());
    }
    assert_eq!(guest.content()[2 * PAGE_SIZE - 1], 7);
    assert_eq!(rom[PAGE_SIZE + 100], 0);
}

/// A private mapping of a file cannot be registered: small ones are compared instead.
#[allow(unsafe_code)]
fn blocks_that_cannot_be_tracked_are_compared_or_refused(reprotect: Reprotect) {
    use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
    let file = tempfile::tempfile().unwrap();
    let large = NonZeroUsize::new(2 << 20).unwrap();
    file.set_len(large.get() as u64).unwrap();
    file.write_all_at(&[1; PAGE_SIZE], 0).unwrap();
    let protection = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
    // SAFETY: a new private mapping, unmapped at the end of the test.
    let start = unsafe { mmap(None, large, protection, MapFlags::MAP_PRIVATE, &file, 0) }.unwrap();
    // SAFETY: the mapping above, only read through this slice's address.
    let memory = unsafe { std::slice::from_raw_parts(start.as_ptr().cast::<u8>(), large.get()) };

    let mut guest = Guest::new(16);
    guest.blocks.push(auxiliary(1, memory, 64 << 10));
    let mut tracker = guest.track(reprotect);
    assert_eq!(scan(&mut tracker), []);
    guest.blocks[1].write(PageIndex(3), &[9; PAGE_SIZE]).unwrap();
    let expected = PageRun { block: BlockId(1), ..run(3, 1) };
    assert_eq!(scan(&mut tracker), [expected]);
    assert_eq!(scan(&mut tracker), []);

    let blocks = [auxiliary(1, memory, large.get() as u64)];
    let userfaultfd = Arc::new(Userfaultfd::of_this_process().unwrap());
    let refused = DirtyTracker::attach(this_process(), userfaultfd, &blocks, reprotect);
    assert!(matches!(refused, Err(MemoryError::NotTrackable { .. })));
    // SAFETY: `memory` is not used after this.
    unsafe { munmap(start, large.get()) }.unwrap();
}

/// Several vCPUs write while epochs go by; the replica built from captures alone must end
/// up equal to the original.
fn no_write_is_lost_over_many_epochs_with_concurrent_writers(reprotect: Reprotect) {
    const PAGES: u64 = 4096;
    const EPOCHS: u64 = 200;
    let guest = Arc::new(Guest::new(PAGES as usize));
    let replica = Guest::new(PAGES as usize);
    let stop = Arc::new(AtomicBool::new(false));
    let writes = Arc::new(AtomicU64::new(0));
    // Half of it has content before, the rest comes into being on the way.
    for page in 0..PAGES / 2 {
        guest.write(page, page);
    }

    let mut tracker = guest.track(reprotect);
    let vcpus: Vec<_> = (0..3)
        .map(|vcpu| {
            let (guest, stop, writes) =
                (Arc::clone(&guest), Arc::clone(&stop), Arc::clone(&writes));
            thread::spawn(move || run_vcpu(vcpu, &guest, &stop, &writes))
        })
        .collect();

    let (mut staging, mut dirty) = (staging(), DirtySet::new());
    let mut send = |dirty: &DirtySet| {
        capture(&guest.blocks, dirty, &mut staging).unwrap();
        apply(&staging.take(), &replica.blocks);
    };
    guest.blocks[0].add_content_to(&mut dirty).unwrap();
    send(&dirty);
    let mut epochs = 0;
    while epochs < EPOCHS || writes.load(Ordering::Relaxed) < 100_000 {
        tracker.scan(&mut dirty).unwrap();
        send(&dirty);
        epochs += 1;
    }
    stop.store(true, Ordering::Relaxed);
    vcpus.into_iter().for_each(|vcpu| vcpu.join().unwrap());
    tracker.scan(&mut dirty).unwrap();
    send(&dirty);

    let (original, copy) = (guest.content(), replica.content());
    let differing = (0..PAGES as usize)
        .filter(|page| {
            let range = page * PAGE_SIZE..(page + 1) * PAGE_SIZE;
            original[range.clone()] != copy[range]
        })
        .count();
    assert_eq!(differing, 0, "pages differ after {epochs} epochs");
}

/// What it leaves is found in the pause.
fn a_round_before_the_pause_finds_pages_of_main_memory(reprotect: Reprotect) {
    let memory = PrivateMapping::populated(NonZeroUsize::new(8 * PAGE_SIZE).unwrap()).unwrap();
    let mut guest = Guest::new(1024);
    guest.write(0, 1);
    guest.blocks.push(auxiliary(1, &memory, 8 * PAGE_SIZE as u64));
    let mut tracker = guest.track(reprotect);
    guest.write(7, 1);
    guest.blocks[1].write(PageIndex(2), &[5; PAGE_SIZE]).unwrap();
    let mut dirty = DirtySet::new();
    tracker.scan_before(&mut dirty).unwrap();
    assert_eq!(dirty.runs(), [run(7, 1)]);
    guest.write(8, 1);
    assert_eq!(scan(&mut tracker), [run(8, 1), PageRun { block: BlockId(1), ..run(2, 1) }]);
}

/// Writes counters, and now and then zeroes, all over the guest's pages.
fn run_vcpu(vcpu: u64, guest: &Guest, stop: &AtomicBool, writes: &AtomicU64) {
    let mut random = vcpu + 1;
    let mut count = 0u64;
    while !stop.load(Ordering::Relaxed) {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        count += 1;
        let value = if random % 11 == 0 { 0 } else { count };
        let place = (random >> 8) as usize % (guest.ram.bytes() as usize - 8);
        guest.view.copy_in(place, &value.to_ne_bytes());
        writes.fetch_add(1, Ordering::Relaxed);
    }
}

/// Pre-copy in the same epoch: the later copy of a page wins.
fn captures_of_one_epoch_apply_in_order(reprotect: Reprotect) {
    let guest = Guest::new(2048);
    let replica = Guest::new(2048);
    let mut tracker = guest.track(reprotect);
    let (mut staging, mut dirty) = (staging(), DirtySet::new());
    for page in 0..2048 {
        guest.write(page, 1);
    }
    tracker.scan(&mut dirty).unwrap();
    capture(&guest.blocks, &dirty, &mut staging).unwrap();
    for page in 100..400 {
        guest.write(page, 2);
    }
    tracker.scan(&mut dirty).unwrap();
    capture(&guest.blocks, &dirty, &mut staging).unwrap();

    let captured = staging.take();
    assert_eq!(captured.page_count(), 2048 + 300);
    apply(&captured, &replica.blocks);
    assert!(guest.content() == replica.content());
}
