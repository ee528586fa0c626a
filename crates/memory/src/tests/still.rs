//! A standby's memory at one moment, while epochs are applied.

use super::*;
use std::collections::BTreeMap;
use std::thread;

const PAGES: u64 = 700;

fn content(page: u64, epoch: u64) -> Vec<u8> {
    [page, epoch].map(u64::to_ne_bytes).concat().repeat(PAGE_SIZE / 16)
}

/// Main memory, every third page of which is a hole, and a block of another kind.
fn standby() -> (Guest, Vec<u8>) {
    let mut guest = Guest::new(PAGES as usize);
    let rom = content(0, 7).repeat(5);
    guest.blocks.push(auxiliary(1, &rom, rom.len() as u64));
    for page in (0..PAGES).filter(|page| page % 3 != 0) {
        guest.blocks[0].write(PageIndex(page), &content(page, 0)).unwrap();
    }
    (guest, rom)
}

fn apply_page(guest: &Guest, image: &StillImage, block: u16, page: u64, epoch: u64) {
    image.before_write(BlockId(block), PageIndex(page));
    let block = &guest.blocks[usize::from(block)];
    match page % 5 {
        0 if epoch % 2 == 1 => block.clear(PageIndex(page), 1).unwrap(),
        _ => block.write(PageIndex(page), &content(page, epoch)).unwrap(),
    }
}

/// Reads what a reader gets, each page once.
fn read(image: &StillImage, mut between: impl FnMut()) -> BTreeMap<(u16, u64), Vec<u8>> {
    let mut all = BTreeMap::new();
    while let Some(pages) = image.copy_some().unwrap() {
        for StillPage { block, page, content } in pages {
            assert!(all.insert((block.0, page.0), content.into()).is_none(), "page {page} twice");
        }
        between();
    }
    all
}

fn check(read: &BTreeMap<(u16, u64), Vec<u8>>) {
    for page in 0..PAGES {
        let read = read.get(&(0, page)).cloned().unwrap_or_else(|| vec![0; PAGE_SIZE]);
        let expected = if page % 3 == 0 { vec![0; PAGE_SIZE] } else { content(page, 0) };
        assert_eq!(read, expected, "page {page}");
    }
    let rom = (0..5).map(|page| read[&(1, page)].clone()).collect::<Vec<_>>();
    assert_eq!(rom, vec![content(0, 7); 5]);
}

#[test]
fn later_epochs_do_not_change_an_image_that_is_being_read() {
    let (guest, _rom) = standby();
    let image = StillImage::take(&guest.blocks, 0, usize::MAX).unwrap();
    let (guest, image) = (&guest, &image);
    let all = thread::scope(|scope| {
        let writer = scope.spawn(move || {
            for epoch in 1..40 {
                (0..PAGES).for_each(|page| apply_page(guest, image, 0, page * 11 % PAGES, epoch));
                (0..5).for_each(|page| apply_page(guest, image, 1, page, epoch));
            }
        });
        let mut all = read(image, thread::yield_now);
        writer.join().unwrap();
        // What the writer has copied meanwhile.
        all.append(&mut read(image, || ()));
        all
    });
    check(&all);
}

#[test]
fn what_is_written_first_comes_in_its_order_with_what_was_there() {
    let (guest, _rom) = standby();
    let image = StillImage::take(&guest.blocks, 3, usize::MAX).unwrap();
    // A page that was read already, one that was not, a hole, one too many, one again.
    image.copy_some().unwrap();
    [4, 400, 3, 401, 4].into_iter().for_each(|page| apply_page(&guest, &image, 0, page, 1));
    let trace = image.end_trace();
    let order: Vec<u64> = trace.iter().map(|page| page.page.0).collect();
    assert_eq!(order, [4, 400, 3]);
    assert_eq!(&*trace[0].content, content(4, 0));
    assert_eq!(&*trace[1].content, content(400, 0));
    assert_eq!(&*trace[2].content, [0; PAGE_SIZE]);
    let rest = read(&image, || ());
    assert_eq!(rest[&(0, 401)], content(401, 0));
    assert!(!rest.contains_key(&(0, 400)), "the trace has it");
}

#[test]
fn nothing_is_read_of_memory_that_a_guest_runs_on() {
    let (guest, _rom) = standby();
    let image = StillImage::take(&guest.blocks, 10, usize::MAX).unwrap();
    assert!(image.copy_some().unwrap().is_some());
    apply_page(&guest, &image, 0, 400, 1);
    image.end();
    assert!(image.copy_some().is_err() && image.copy_some().is_err());
    assert_eq!(image.end_trace(), []);
}

/// Regression: a store that did not answer had all of a guest's memory copied.
#[test]
fn no_more_pages_are_copied_than_there_is_room_for() {
    let (guest, _rom) = standby();
    let image = StillImage::take(&guest.blocks, 1, 2).unwrap();
    // The first one is the trace's.
    [1, 2, 4].into_iter().for_each(|page| apply_page(&guest, &image, 0, page, 1));
    let copied = image.copy_some().unwrap().unwrap();
    assert_eq!(copied.iter().map(|page| page.page.0).collect::<Vec<_>>(), [2, 4]);
    // There is room again.
    [7, 8].into_iter().for_each(|page| apply_page(&guest, &image, 0, page, 1));
    assert!(image.copy_some().is_ok());
    [11, 13, 14].into_iter().for_each(|page| apply_page(&guest, &image, 0, page, 1));
    let failed = image.copy_some().unwrap_err();
    assert!(matches!(failed, MemoryError::TooManyCopies), "{failed}");
    assert!(image.copy_some().is_err(), "it is not whole any more");
    let mut written = vec![0; PAGE_SIZE];
    guest.blocks[0].read(PageIndex(14), &mut written).unwrap();
    assert_eq!(written, content(14, 1), "what was written is there");
}
