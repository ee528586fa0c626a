//! Tests of what a warm pause must not do: allocate, or fault memory in.

use super::*;
use nix::sys::resource::{UsageWho, getrusage};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// The system's allocator, counting the calls of each thread.
struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

// SAFETY: all is passed on to the system's allocator; the counter does not allocate.
#[allow(unsafe_code)]
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller keeps the contract of `alloc`, which is the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract of `dealloc`, which is the same.
        unsafe { System.dealloc(pointer, layout) }
    }
}

/// Allocations and page faults of this thread while `work` runs.
fn cost(work: impl FnOnce()) -> (u64, i64) {
    let faults = || getrusage(UsageWho::RUSAGE_THREAD).unwrap().minor_page_faults();
    let (allocations_before, faults_before) = (ALLOCATIONS.get(), faults());
    work();
    let (faults_after, allocations_after) = (faults(), ALLOCATIONS.get());
    (allocations_after - allocations_before, faults_after - faults_before)
}

/// Makes an epoch of `pages` scattered pages, then scans and captures it.
fn epoch_cost(pages: u64, epochs: u64) -> (u64, i64) {
    let guest = Guest::new(8192);
    let mut tracker = guest.track(Reprotect::AtOnce);
    let (mut staging, mut dirty) = (staging(), DirtySet::new());
    let mut last = (0, 0);
    for epoch in 0..epochs {
        for page in 0..pages {
            guest.write(page * 3 % 8192, epoch);
        }
        last = cost(|| {
            tracker.scan(&mut dirty).unwrap();
            capture(&guest.blocks, &dirty, &mut staging).unwrap();
        });
        assert!(staging.take().page_count() as u64 >= pages);
    }
    last
}

#[test]
fn a_warm_pause_neither_allocates_nor_faults() {
    assert_eq!(epoch_cost(300, 3), (0, 0));
}

#[test]
fn a_warm_pause_with_helpers_neither_allocates_nor_faults() {
    assert_eq!(epoch_cost(2000, 3), (0, 0));
}

#[test]
fn the_pool_keeps_its_warm_part_and_gives_back_the_rest() {
    let warm = 2 * CHUNK_PAGES * PAGE_SIZE;
    let pool = StagingPool::new(warm).unwrap();
    assert_eq!(pool.free_bytes(), warm);
    let guest = Guest::new(5 * CHUNK_PAGES);
    let mut set = DirtySet::new();
    set.push(run(0, 5 * CHUNK_PAGES as u64));
    let mut staging = PageStaging::new(pool.clone());
    pool.prepare(set.pages()).unwrap();
    assert_eq!(pool.free_bytes(), 5 * CHUNK_PAGES * PAGE_SIZE);
    capture(&guest.blocks, &set, &mut staging).unwrap();
    assert_eq!(pool.free_bytes(), 0);
    let captured = staging.take();
    assert_eq!(captured.chunks.len(), 5);
    drop(captured);
    assert_eq!(pool.free_bytes(), warm);
}

#[test]
fn a_small_guest_has_a_small_warm_part() {
    assert_eq!(warm_bytes(64 << 20), 4 << 20);
    for guest in [512 << 20, 1 << 40, u64::MAX] {
        assert_eq!(warm_bytes(guest), DEFAULT_WARM_BYTES);
    }
}
