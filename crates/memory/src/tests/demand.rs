//! Memory that is filled while it is used.

use super::*;
use std::collections::HashSet;
use std::sync::mpsc;
use std::thread;
use understudy_threads::Mutex;

fn page(value: u8) -> [u8; PAGE_SIZE] {
    [value; PAGE_SIZE]
}

/// Pages below 100 have content, their number; the others are zero.
#[test]
fn whoever_touches_a_page_waits_until_it_is_there() {
    let guest = Guest::new(512);
    guest.ram.write(PageIndex(1), &page(1)); // Loaded before the start.
    let faults = Arc::new(FaultDescriptor::of_this_process());
    let filled: Arc<Mutex<HashSet<u64>>> = Arc::default();
    let (demand, demanded) = mpsc::channel();
    let known = Arc::clone(&filled);
    let pager = DemandPager::attach(&faults, &guest.blocks[0], move |page| {
        if page.0 >= 100 {
            return Missing::Zero;
        }
        if known.lock().unwrap().contains(&page.0) {
            return Missing::Filled;
        }
        demand.send(page).unwrap();
        Missing::Coming
    })
    .unwrap();
    let view = Arc::clone(&guest.view);
    let reader = thread::spawn(move || {
        let mut seen = vec![];
        for index in [1, 5, 6, 300, 301, 70] {
            let mut content = [0; PAGE_SIZE];
            view.copy_out(index * PAGE_SIZE, &mut content);
            seen.push((index, content));
        }
        view.copy_in(71 * PAGE_SIZE + 1, &[200]);
        view.copy_in(301 * PAGE_SIZE + 1, &[200]);
        seen
    });
    assert_eq!(demanded.recv().unwrap(), PageIndex(5));
    assert!(!reader.is_finished());
    // Neighbours come with it, and what is there already stays.
    let fill = |first: u64, count: u64| {
        let content: Vec<u8> = (first..first + count).flat_map(|at| page(at as u8)).collect();
        pager.fill(PageIndex(first), &content).unwrap();
        filled.lock().unwrap().extend(first..first + count);
    };
    fill(0, 10);
    assert_eq!(demanded.recv().unwrap(), PageIndex(70));
    fill(70, 1);
    assert_eq!(demanded.recv().unwrap(), PageIndex(71));
    fill(60, 40);
    fill(10, 50);
    for (index, content) in reader.join().unwrap() {
        assert!(content == page(if index < 100 { index as u8 } else { 0 }), "page {index}");
    }
    pager.finish().unwrap();
    let content = guest.content();
    for index in 0..512 {
        let value = if index < 100 { index as u8 } else { 0 };
        let mut expected = page(value);
        if [71, 301].contains(&index) {
            expected[1] = 200;
        }
        assert!(content[index * PAGE_SIZE..][..PAGE_SIZE] == expected, "page {index}");
    }
    guest.track(Reprotect::AtOnce); // It is as free as any.
}

#[test]
fn who_gives_up_leaves_the_guest_waiting_and_who_takes_over_lets_it_go_on() {
    let guest = Guest::new(64);
    let faults = Arc::new(FaultDescriptor::of_this_process());
    let (demand, demanded) = mpsc::channel();
    let coming = move |page| {
        demand.send(page).unwrap();
        Missing::Coming
    };
    let pager = DemandPager::attach(&faults, &guest.blocks[0], coming).unwrap();
    let view = Arc::clone(&guest.view);
    let reader = thread::spawn(move || {
        let mut byte = [0];
        view.copy_out(9 * PAGE_SIZE, &mut byte);
        byte[0]
    });
    assert_eq!(demanded.recv().unwrap(), PageIndex(9));
    drop(pager);
    let pager = DemandPager::attach(&faults, &guest.blocks[0], |_| Missing::Coming).unwrap();
    assert!(!reader.is_finished(), "it has seen what is not there");
    pager.fill(PageIndex(9), &page(42)).unwrap();
    assert_eq!(reader.join().unwrap(), 42);
    pager.finish().unwrap();
}

#[test]
fn whoever_waits_when_a_pager_is_lost_asks_the_next_one() {
    let guest = Guest::new(16);
    guest.ram.write(PageIndex(0), &page(1));
    let faults = Arc::new(FaultDescriptor::of_this_process());
    let attach = || {
        let (demand, demanded) = mpsc::channel();
        let pager = DemandPager::attach(&faults, &guest.blocks[0], move |page| {
            demand.send(page).unwrap();
            Missing::Coming
        });
        (pager.unwrap(), demanded)
    };
    let (lost, demanded) = attach();
    lost.fill(PageIndex(2), &page(3)).unwrap();
    let view = Arc::clone(&guest.view);
    let reader = thread::spawn(move || {
        let mut content = [0; PAGE_SIZE];
        view.copy_out(4 * PAGE_SIZE, &mut content);
        content
    });
    assert_eq!(demanded.recv().unwrap(), PageIndex(4));
    drop(lost);
    // What is there is what has content, as another process sees it.
    let memfd = guest.ram.fd().try_clone_to_owned().unwrap();
    let ram = GuestRam::adopt(memfd).unwrap();
    let runs: Vec<_> = ram.data_runs().map(|run| run.unwrap().first.0).collect();
    assert_eq!((ram.pages(), runs), (16, vec![0, 2]));
    let (next, demanded) = attach();
    assert_eq!(demanded.recv().unwrap(), PageIndex(4));
    next.fill(PageIndex(4), &page(5)).unwrap();
    assert!(reader.join().unwrap() == page(5));
    next.finish().unwrap();
}
