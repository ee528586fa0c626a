//! Snapshots of memory that is written all the time.

use super::*;
use crate::guard::CaptureRequest;
use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::SeqCst};
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::Duration;
use understudy_protocol::BaseId;
use understudy_threads::RwLock;

const PAGES: u64 = 2000;

const EVERYTHING: CaptureRequest =
    CaptureRequest { since: None, trace: 0, every_access: false, most_copies: usize::MAX };
const BASE: BaseId = BaseId(7);
const CHANGES: CaptureRequest = CaptureRequest { since: Some(BASE), ..EVERYTHING };

fn guard(guest: &Guest) -> Arc<Guard> {
    let faults = Arc::new(FaultDescriptor::of_this_process());
    let mappings = Arc::new(Mappings::of_this_process());
    Arc::new(Guard::attach(&faults, &mappings, &guest.blocks[0]).unwrap())
}

/// A vCPU that writes, and reads, everywhere until it is told to end.
struct Writer {
    running: Arc<RwLock<()>>,
    steps: Arc<AtomicU64>,
    end: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Writer {
    fn start(guest: &Guest, pages: u64) -> Writer {
        let (running, steps, end) = (Arc::default(), Arc::default(), Arc::default());
        let mut writer = Writer { running, steps, end, thread: None };
        let view = Arc::clone(&guest.view);
        let (running, steps, end) =
            (Arc::clone(&writer.running), Arc::clone(&writer.steps), Arc::clone(&writer.end));
        writer.thread = Some(thread::spawn(move || {
            let mut random = 88172645463325252u64;
            while !end.load(SeqCst) {
                let _runs = running.read().unwrap();
                random ^= random << 13;
                random ^= random >> 7;
                random ^= random << 17;
                let page = (random % pages) as usize * PAGE_SIZE;
                match random >> 60 {
                    // Zeros too, and the whole of a page.
                    0 => view.copy_in(page, &[0; PAGE_SIZE]),
                    1..4 => view.copy_out(page + 8, &mut [0; 64]),
                    _ => view.copy_in(page + (random >> 32) as usize % 4000, &random.to_ne_bytes()),
                }
                steps.fetch_add(1, SeqCst);
            }
        }));
        writer
    }

    /// Returns when it has done something more.
    fn await_steps(&self, count: u64) {
        let goal = self.steps.load(SeqCst) + count;
        while self.steps.load(SeqCst) < goal {
            thread::sleep(Duration::from_micros(50));
        }
    }

    fn paused<T>(&self, work: impl FnOnce() -> T) -> T {
        let _stands_still = self.running.write().unwrap();
        work()
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.end.store(true, SeqCst);
        self.thread.take().unwrap().join().unwrap();
    }
}

/// The memory, through the mapping that nobody protects; holes stay holes.
fn truth(guest: &Guest) -> Vec<u8> {
    let mut content = vec![0; guest.ram.bytes() as usize];
    let mut set = DirtySet::new();
    guest.blocks[0].add_content_to(&mut set).unwrap();
    for run in set.runs() {
        let offset = run.first.byte_offset() as usize;
        guest.ram.read(run.first, &mut content[offset..][..run.count as usize * PAGE_SIZE]);
    }
    content
}

fn store(page: PageIndex, content: &[u8], image: &mut [u8]) {
    image[page.byte_offset() as usize..][..PAGE_SIZE].copy_from_slice(content);
}

/// Saves a cut into `image`, as it was at the one before: all that it is to save, and no more.
fn save(cut: &mut Cut, image: &mut [u8], writer: &Writer) {
    let mut saved = HashSet::new();
    while let Some(copies) = cut.copy_some().unwrap() {
        for PageCopy { page, content } in &copies.pages {
            assert!(cut.is_changed(*page));
            assert!(saved.insert(*page), "{page} was copied twice");
            store(*page, content, image);
        }
        if !copies.by_faults {
            writer.await_steps(20);
        }
    }
    for first in cut.end_trace() {
        if cut.is_changed(first.page) {
            saved.insert(first.page); // Perhaps again.
        }
        let content = first.content.expect("nothing was written before it was seen");
        if !cut.is_changed(first.page) {
            let offset = first.page.byte_offset() as usize;
            assert!(image[offset..][..PAGE_SIZE] == *content, "{} did not change", first.page);
        }
        store(first.page, &content, image);
    }
    assert_eq!(saved.len() as u64, cut.changed());
}

fn snapshots_equal_paused_copies(trace: usize) {
    let guest = Guest::new(PAGES as usize);
    // Half of the memory is never touched, some was before.
    (0..300).for_each(|page| guest.write(page, page + 1));
    let writer = Writer::start(&guest, PAGES / 2);
    let guard = guard(&guest);
    let mut image = vec![0; guest.ram.bytes() as usize];
    for round in 0..12 {
        writer.await_steps(200);
        let everything = round % 5 == 0;
        let (since, every_access) = ((!everything).then_some(BASE), round % 2 == 0);
        if everything {
            image.fill(0);
        }
        let mut cut =
            guard.arm(CaptureRequest { since, trace, every_access, ..EVERYTHING }).unwrap();
        writer.await_steps(50);
        let truth = writer.paused(|| {
            cut.take().unwrap();
            truth(&guest)
        });
        let before = image.clone();
        save(&mut cut, &mut image, &writer);
        assert!(image == truth, "round {round}");
        if round % 4 == 3 {
            drop(cut); // It came to nothing: what it took is to be saved again.
            image = before;
        } else {
            cut.commit(BASE);
        }
    }
    assert!(guest.ram.data_runs().all(|run| run.unwrap().first.0 < PAGES / 2));
}

#[test]
fn snapshots_of_written_memory_equal_paused_copies() {
    snapshots_equal_paused_copies(0);
}

#[test]
fn traced_snapshots_equal_paused_copies() {
    snapshots_equal_paused_copies(150);
    snapshots_equal_paused_copies(usize::MAX);
}

#[test]
fn only_what_was_written_since_the_last_one_is_saved() {
    let guest = Guest::new(512);
    (0..200).for_each(|page| guest.write(page, 1));
    let guard = guard(&guest);
    let take = |request| {
        let mut cut = guard.arm(request).unwrap();
        cut.take().unwrap();
        let mut pages = vec![];
        while let Some(copies) = cut.copy_some().unwrap() {
            pages.extend(copies.pages.iter().map(|copy| copy.page.0));
        }
        (pages, cut)
    };
    let (pages, cut) = take(CHANGES);
    assert_eq!(pages, (0..200).collect::<Vec<_>>());
    cut.commit(BASE);
    guest.write(7, 2);
    guest.write(300, 2);
    guest.read(9);
    guest.read(400);
    assert_eq!(guard.written(), 2);
    let (pages, cut) = take(CHANGES);
    assert_eq!(pages, [7, 300]);
    guest.write(8, 2);
    drop(cut);
    let (pages, cut) = take(CHANGES);
    assert_eq!(pages, [7, 8, 300]);
    cut.commit(BASE);
    assert!(take(CHANGES).0.is_empty());
    let content: u64 = guest.ram.data_runs().map(|run| run.unwrap().count).sum();
    assert_eq!(take(EVERYTHING).0.len() as u64, content);
}

#[test]
fn first_accesses_are_told_in_their_order_with_their_content() {
    let guest = Guest::new(512);
    (0..200).for_each(|page| guest.write(page, 100 + page));
    let guard = guard(&guest);
    let mut cut = guard.arm(CaptureRequest { trace: 6, ..EVERYTHING }).unwrap();
    guest.read(3); // Before the cut: this is no access after it.
    guest.write(4, 104);
    cut.take().unwrap();
    assert!(!cut.trace_is_full());
    guest.read(150);
    guest.write(3, 7);
    guest.read(3);
    guest.write(150, 7);
    guest.read(4);
    guest.write(300, 1); // A hole, and zero at the cut.
    guest.read(10);
    guest.read(11);
    guest.read(12);
    assert!(cut.trace_is_full());
    assert_eq!(guard.written(), 3);
    let first: Vec<_> = cut.end_trace();
    let number = |content: &[u8]| u64::from_ne_bytes(content[..8].try_into().unwrap());
    let told: Vec<_> =
        first.iter().map(|f| (f.page.0, number(f.content.as_ref().unwrap()))).collect();
    assert_eq!(told, [(150, 250), (3, 103), (4, 104), (300, 0), (10, 110), (11, 111)]);
    // They are not brought twice.
    let mut others = vec![];
    while let Some(copies) = cut.copy_some().unwrap() {
        others.extend(copies.pages.iter().map(|copy| copy.page.0));
    }
    assert!(others.iter().all(|page| ![150, 3, 4, 10, 11].contains(page)));
    assert_eq!(others.len(), 200 - 5);
}

/// Regression: a store that did not answer had all of a guest's memory copied.
#[test]
fn no_more_pages_are_copied_than_there_is_room_for() {
    let guest = Guest::new(512);
    (0..200).for_each(|page| guest.write(page, 1));
    let guard = guard(&guest);
    let mut cut = guard.arm(CaptureRequest { most_copies: 2, ..EVERYTHING }).unwrap();
    cut.take().unwrap();
    [150, 151].into_iter().for_each(|page| guest.write(page, 2));
    let copied = cut.copy_some().unwrap().unwrap();
    assert!(copied.by_faults && copied.pages.len() == 2);
    [160, 161, 162].into_iter().for_each(|page| guest.write(page, 2));
    let failed = cut.copy_some().unwrap_err();
    assert!(matches!(failed, MemoryError::TooManyCopies), "{failed}");
    // The guest went on, and so does the next snapshot.
    guest.write(163, 2);
    drop(cut);
    let mut cut = guard.arm(EVERYTHING).unwrap();
    cut.take().unwrap();
    let mut pages = 0;
    while let Some(copied) = cut.copy_some().unwrap() {
        pages += copied.pages.len();
    }
    assert_eq!(pages, 200);
}

#[test]
fn repeated_accesses_are_told_where_they_are_wanted() {
    let guest = Guest::new(512);
    (0..200).for_each(|page| guest.write(page, 1));
    let guard = guard(&guest);
    let request = CaptureRequest { trace: 10, every_access: true, ..EVERYTHING };
    let mut cut = guard.arm(request).unwrap();
    cut.take().unwrap();
    for _ in 0..2 {
        guest.read(5);
        guest.read(5);
        guest.write(70, 1);
        assert_eq!(cut.accesses(), [5, 70].map(PageIndex));
        cut.watch_again().unwrap();
    }
    guest.write(5, 1);
    assert_eq!(cut.accesses(), [PageIndex(5)]);
    assert_eq!(cut.end_trace().len(), 2);
}

#[test]
fn watched_pages_tell_of_accesses() {
    let guest = Guest::new(512);
    (0..200).for_each(|page| guest.write(page, 1));
    let guard = guard(&guest);
    let sample = guard.sample(&[3, 5, 7, 400].map(PageIndex)).unwrap();
    assert!(matches!(guard.arm(EVERYTHING), Err(MemoryError::FaultsTaken)));
    [5, 6, 5].into_iter().for_each(|page| guest.read(page));
    guest.write(3, 2);
    assert_eq!(sample.end(), [5, 3].map(PageIndex));
    assert!(guard.arm(EVERYTHING).is_ok());
}

/// The guest runs on at full speed, whatever is given up, and whenever.
#[test]
fn a_snapshot_that_is_given_up_leaves_no_page_armed_and_nobody_waiting() {
    for phase in 0..6 {
        let guest = Guest::new(PAGES as usize);
        let writer = Writer::start(&guest, PAGES);
        let guard = guard(&guest);
        if phase > 0 {
            let request = CaptureRequest { trace: 1000, ..EVERYTHING };
            let mut cut = guard.arm(request).unwrap();
            if phase > 1 {
                writer.await_steps(20);
                writer.paused(|| cut.take()).unwrap();
            }
            if phase > 2 {
                writer.await_steps(100);
                cut.copy_some().unwrap();
            }
            if phase > 3 {
                while cut.copy_some().unwrap().is_some() {}
            }
            if phase > 4 {
                cut.end_trace();
            }
            drop(cut);
            writer.await_steps(100);
        }
        drop(guard);
        writer.await_steps(1000);
        drop(writer);
        // Nothing is registered: the other kind of watching can begin.
        guest.track(Reprotect::AtOnce);
    }
}

#[test]
fn memory_has_one_kind_of_watching_at_a_time() {
    let guest = Guest::new(512); // Smaller memory would be compared instead.
    let tracker = guest.track(Reprotect::AtOnce);
    let faults = Arc::new(FaultDescriptor::of_this_process());
    let mappings = Arc::new(Mappings::of_this_process());
    let attach = || Guard::attach(&faults, &mappings, &guest.blocks[0]);
    assert!(matches!(attach(), Err(MemoryError::FaultsTaken)));
    tracker.detach().unwrap();
    let guard = attach().unwrap();
    assert!(matches!(attach(), Err(MemoryError::FaultsTaken)));
    let userfaultfd = Arc::new(Userfaultfd::of_this_process().unwrap());
    let tracker =
        DirtyTracker::attach(this_process(), userfaultfd, &guest.blocks, Reprotect::AtOnce);
    assert!(tracker.is_err());
    drop(guard);
    attach().unwrap();
}

/// Data that the guest reads from its disk are written by a system call of QEMU.
#[test]
fn a_system_call_that_writes_a_protected_page_waits_too() {
    let guest = Guest::new(512);
    (0..64).for_each(|page| guest.write(page, 100 + page));
    let guard = guard(&guest);
    let mut cut = guard.arm(EVERYTHING).unwrap();
    cut.take().unwrap();
    let mut file = tempfile::tempfile().unwrap();
    std::io::Write::write_all(&mut file, &[9; 4 * PAGE_SIZE]).unwrap();
    super::epochs::read_into(&file, guest.view.address() + 10 * PAGE_SIZE as u64, 4 * PAGE_SIZE);
    let copies = cut.copy_some().unwrap().unwrap();
    assert!(copies.by_faults);
    let saved: Vec<_> = copies.pages.iter().map(|copy| (copy.page.0, copy.content[0])).collect();
    assert_eq!(saved, [(10, 110), (11, 111), (12, 112), (13, 113)]);
    assert_eq!(guest.content()[10 * PAGE_SIZE], 9);
}

/// The vCPU waits in a fault while its page is being answered by nobody: it must not be for
/// long after the guard is gone.
#[test]
fn many_guards_come_and_go_under_a_writer() {
    let guest = Guest::new(256);
    let writer = Writer::start(&guest, 256);
    let (told, heard) = mpsc::channel();
    for _ in 0..100 {
        let guard = guard(&guest);
        writer.await_steps(5);
        drop(guard);
        told.send(()).unwrap();
    }
    assert_eq!(heard.try_iter().count(), 100);
    writer.await_steps(1000);
}
