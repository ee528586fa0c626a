//! The cost of scans and captures on this machine. Not a test of anything: run it with
//! `cargo test --release -p understudy-memory -- --ignored --nocapture cost`.

use super::*;
use std::time::{Duration, Instant};

const EPOCHS: usize = 50;

#[test]
#[ignore = "measures, asserts nothing"]
fn cost_of_scan_and_capture() {
    for mebibytes in [512, 1024, 2048] {
        measure(mebibytes);
    }
}

#[test]
#[ignore = "measures, asserts nothing"]
fn cost_of_a_scan_of_mostly_idle_memory() {
    for gibibytes in [1, 2, 4, 8, 16] {
        let guest = Guest::new((gibibytes << 30) / PAGE_SIZE);
        let touched = (256 << 20) / PAGE_SIZE as u64;
        // A third in one piece, the rest in pieces all over.
        let place = |page: u64| match page % 3 {
            0 => page,
            _ => page % 512 + (page / 512 * 7919 * 512) % guest.ram.pages(),
        };
        for page in 0..touched {
            guest.write(place(page), page + 1);
        }
        let mut tracker = guest.track(Reprotect::AtOnce);
        let mut dirty = DirtySet::new();
        let scans = (0..EPOCHS as u64).map(|epoch| {
            for page in 0..100 {
                guest.write(place(page * 99), epoch);
            }
            let started = Instant::now();
            tracker.scan(&mut dirty).unwrap();
            started.elapsed()
        });
        println!("{gibibytes} GiB, 256 MiB touched: scan {}", summary(scans.collect()));
    }
}

fn measure(mebibytes: usize) {
    let pages = (mebibytes << 20) / PAGE_SIZE;
    let guest = Guest::new(pages);
    for page in 0..pages as u64 {
        guest.write(page, page + 1);
    }
    // The daemon's mapping is warm after the first synchronisation.
    let mut page = [0; PAGE_SIZE];
    for index in 0..pages as u64 {
        guest.blocks[0].read(PageIndex(index), &mut page).unwrap();
    }
    let started = Instant::now();
    let mut tracker = guest.track(Reprotect::AtOnce);
    println!("{mebibytes} MiB: arm {:?}", started.elapsed());
    let pool = StagingPool::new(DEFAULT_WARM_BYTES).unwrap();
    let mut staging = PageStaging::new(pool.clone());
    let mut dirty = DirtySet::new();
    for count in [0, 300, 600, 1_000, 10_000, 50_000] {
        let (mut scans, mut copies) = (Vec::new(), Vec::new());
        for epoch in 0..EPOCHS as u64 {
            for i in 0..count {
                guest.write((i * 7919) % pages as u64, epoch + i);
            }
            pool.prepare(count).unwrap();
            let started = Instant::now();
            tracker.scan(&mut dirty).unwrap();
            let scanned = Instant::now();
            capture(&guest.blocks, &dirty, &mut staging).unwrap();
            let copied = Instant::now();
            assert_eq!(staging.take().page_count() as u64, count);
            scans.push(scanned - started);
            copies.push(copied - scanned);
        }
        println!(
            "{mebibytes} MiB, {count} pages: scan {}, copy {}",
            summary(scans),
            summary(copies)
        );
    }
}

fn summary(mut times: Vec<Duration>) -> String {
    times.sort_unstable();
    format!("{:?} (least {:?})", times[times.len() / 2], times[0])
}

/// 256 pages of 512 MiB, all of which the guest then accesses: the worst that a period costs it.
#[test]
#[ignore = "measures, asserts nothing"]
fn cost_of_a_sample() {
    const WATCHED: u64 = 256;
    let guest = Guest::new((512 << 20) / PAGE_SIZE);
    let all = guest.ram.pages();
    (0..all).for_each(|page| guest.write(page, page + 1));
    let faults = Arc::new(FaultDescriptor::of_this_process());
    let mappings = Arc::new(Mappings::of_this_process());
    let guard = Arc::new(Guard::attach(&faults, &mappings, &guest.blocks[0]).unwrap());
    let pages: Vec<_> = (0..WATCHED).map(|n| PageIndex(n * 7919 % all)).collect();
    let (mut begins, mut accesses, mut plain) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..EPOCHS {
        let read_all = || {
            let started = Instant::now();
            pages.iter().for_each(|page| guest.read(page.0));
            started.elapsed()
        };
        let started = Instant::now();
        let sample = guard.sample(&pages).unwrap();
        begins.push(started.elapsed());
        accesses.push(read_all());
        assert_eq!(sample.end().len(), pages.len());
        plain.push(read_all());
    }
    println!(
        "to watch {WATCHED} pages {}; their accesses {}, without {}",
        summary(begins),
        summary(accesses),
        summary(plain)
    );
}
