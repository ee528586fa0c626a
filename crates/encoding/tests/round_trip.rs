//! Tests that from what the encoder makes of any history of pages the reader makes those pages
//! again.

use proptest::prelude::*;
use std::time::Duration;
use understudy_encoding::{
    Compression, DiskBlock, Encoder, EncodingError, EncodingPlan, MOST_PAGES, Page, PageData,
    PageHash, Reference, read_pages,
};
use understudy_protocol::{BlockId, DiskIndex, PAGE_SIZE, PageIndex, PageRun};

const PAGES: u64 = 24;
const BLOCK: BlockId = BlockId(2);

const MODES: [Compression; 5] = [
    Compression::Auto,
    Compression::None,
    Compression::General,
    Compression::Xor,
    Compression::Hybrid,
];

fn no_time() -> Duration {
    Duration::ZERO
}

fn new_encoder(compression: Compression, cache_pages: u32) -> Encoder {
    Encoder::new(EncodingPlan { compression, cache_pages }, no_time)
}

/// Change that a guest makes to a page between two messages.
#[derive(Clone, Debug)]
enum Write {
    Zero,
    Byte(usize, u8),
    /// Compresses well.
    Fill(u8),
    /// Does not.
    Noise(u64),
    Nothing,
}

fn write() -> impl Strategy<Value = Write> {
    prop_oneof![
        Just(Write::Zero),
        (0..PAGE_SIZE, any::<u8>()).prop_map(|(at, byte)| Write::Byte(at, byte)),
        any::<u8>().prop_map(Write::Fill),
        any::<u64>().prop_map(Write::Noise),
        Just(Write::Nothing),
    ]
}

impl Write {
    fn perform(&self, page: &mut Page) {
        match *self {
            Write::Zero => page.fill(0),
            Write::Byte(at, byte) => page[at] = byte,
            Write::Fill(byte) => page[..4000].fill(byte),
            Write::Noise(seed) => fill_with_noise(page, seed),
            Write::Nothing => {}
        }
    }
}

fn fill_with_noise(page: &mut Page, seed: u64) {
    let mut state = seed | 1;
    for byte in page.iter_mut() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        *byte = (state >> 56) as u8;
    }
}

fn encode(encoder: &mut Encoder, pages: &[(u64, Page)], first: bool) -> Vec<u8> {
    let run = |&(page, _): &(u64, Page)| PageRun { block: BLOCK, first: PageIndex(page), count: 1 };
    let runs: Vec<PageRun> = pages.iter().map(run).collect();
    let content: Vec<u8> = pages.iter().flat_map(|(_, page)| *page).collect();
    encoder.encode(&runs, &content, first, |_| None).parts.concat()
}

fn apply(payload: &[u8], memory: &mut [Page]) -> Result<(), EncodingError> {
    read_pages(payload, |block, page, data| {
        assert_eq!(block, BLOCK);
        check_and_apply(&data, &mut memory[page.0 as usize])
    })
}

fn check_and_apply(data: &PageData<'_>, page: &mut Page) -> Result<(), EncodingError> {
    let checked = data.check(&mut [0; PAGE_SIZE], no_disk);
    let applied = data.apply(page, no_disk);
    assert_eq!(checked, applied, "{data:?}");
    applied
}

/// The disk of messages that refer to none, or to anything.
fn no_disk(block: DiskBlock, page: &mut Page) -> Result<(), EncodingError> {
    page.fill(block.number as u8);
    Ok(())
}

fn mode() -> impl Strategy<Value = Compression> {
    (0..MODES.len()).prop_map(|i| MODES[i])
}

type Message = Vec<(u64, Write)>;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn the_backup_has_what_was_captured(
        mode in mode(),
        cache_pages in 1u32..40,
        link in prop_oneof![Just(0.0), Just(1e-7)],
        first_messages in 0usize..3,
        history in proptest::collection::vec(
            proptest::collection::vec((0..PAGES, write()), 0..20), 1..20,
        ),
    ) {
        let history: Vec<Message> = history;
        let mut encoder = new_encoder(mode, cache_pages);
        encoder.set_link(link);
        let mut guest = vec![[0; PAGE_SIZE]; PAGES as usize];
        let mut backup = guest.clone();
        for (i, message) in history.into_iter().enumerate() {
            let captured: Vec<(u64, Page)> = message
                .into_iter()
                .map(|(page, write)| {
                    write.perform(&mut guest[page as usize]);
                    (page, guest[page as usize])
                })
                .collect();
            let payload = encode(&mut encoder, &captured, i < first_messages);
            apply(&payload, &mut backup).unwrap();
            prop_assert!(guest == backup, "after message {i}");
        }
    }

    #[test]
    fn random_bytes_are_refused_or_read(bytes in proptest::collection::vec(any::<u8>(), 0..9000)) {
        let mut page = [0; PAGE_SIZE];
        let _ = read_pages(&bytes, |_, _, data| check_and_apply(&data, &mut page));
    }

    /// A right message, a little wrong: gets much further than random bytes.
    #[test]
    fn damaged_messages_are_refused_or_read(
        mode in mode(),
        damage in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        cut in any::<Option<prop::sample::Index>>(),
    ) {
        let mut encoder = new_encoder(mode, 8);
        let mut noise = [0; PAGE_SIZE];
        fill_with_noise(&mut noise, 5);
        let (mut pages, mut text) = (vec![(1, noise), (2, [0; PAGE_SIZE])], [b'a'; PAGE_SIZE]);
        text[..2000].copy_from_slice(&noise[..2000]);
        pages.push((3, text));
        encode(&mut encoder, &pages, false);
        for (_, page) in &mut pages {
            page[100..110].fill(9);
        }
        let mut payload = encode(&mut encoder, &pages, false);
        for (at, byte) in damage {
            let at = at.index(payload.len().min(200));
            payload[at] ^= byte;
        }
        if let Some(cut) = cut {
            payload.truncate(cut.index(payload.len()));
        }
        let (mut one, mut other) = ([0; PAGE_SIZE], [255; PAGE_SIZE]);
        let checked = read_pages(&payload, |_, _, data| data.check(&mut one, no_disk));
        let applied = read_pages(&payload, |_, _, data| data.apply(&mut other, no_disk));
        prop_assert_eq!(checked, applied, "the check does not depend on the page");
    }
}

#[test]
fn a_small_change_is_small_and_none_is_nothing() {
    let mut encoder = new_encoder(Compression::Hybrid, 8);
    let mut page = [0; PAGE_SIZE];
    fill_with_noise(&mut page, 1);
    assert!(encode(&mut encoder, &[(0, page)], false).len() > PAGE_SIZE);
    page[77] ^= 1;
    assert!(encode(&mut encoder, &[(0, page)], false).len() < 30);
    let nothing = encode(&mut encoder, &[(0, page)], false);
    assert_eq!(nothing.len(), 8, "only the empty index");
    let counters = encoder.counters();
    assert_eq!((counters.raw, counters.delta, counters.unchanged), (1, 1, 1));
    assert_eq!((counters.lookups, counters.hits, counters.pages), (3, 2, 3));
}

#[test]
fn what_comes_twice_in_a_message_is_encoded_against_the_first() {
    let mut encoder = new_encoder(Compression::Xor, 8);
    let (mut early, mut backup) = ([3; PAGE_SIZE], [[0; PAGE_SIZE]]);
    early[9] = 1;
    let mut late = early;
    late[4000] = 1;
    let payload = encode(&mut encoder, &[(0, early), (0, late)], false);
    assert!(payload.len() < PAGE_SIZE + 100);
    apply(&payload, &mut backup).unwrap();
    assert!(backup[0] == late);
}

#[test]
fn the_first_synchronisation_is_not_counted_and_not_cached() {
    let mut encoder = new_encoder(Compression::Xor, 8);
    encode(&mut encoder, &[(0, [1; PAGE_SIZE])], true);
    assert_eq!(encoder.counters(), Default::default());
    assert!(encode(&mut encoder, &[(0, [1; PAGE_SIZE])], false).len() > PAGE_SIZE);
}

#[test]
fn a_reader_is_bounded_before_it_does_anything() {
    let refuse = |payload: &[u8], words: &str| {
        let error = apply(payload, &mut []).unwrap_err().to_string();
        assert!(error.contains(words), "{error}");
    };
    refuse(&[0; 7], "no room");
    refuse(&[&(MOST_PAGES as u32 + 1).to_le_bytes()[..], &[0; 9000]].concat(), "more pages");
    refuse(&[2, 0, 0, 0, 0, 0, 0, 0, 0], "index is longer");
    refuse(&[0, 0, 0, 0, 9, 0, 0, 0, 0], "encoded part is longer");
    refuse(&[1, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0, 0, 0, 2, 0], "unknown kind");
    refuse(&[1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 2, 0], "raw page is missing");
    refuse(&[1, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 0, 0, 2, 0, 9], "encoded page is missing");
    refuse(&[1, 0, 0, 0, 1, 0, 0, 0, 4, 0, 0, 0, 0, 0, 2, 0, 9], "reference is missing");
    refuse(&[1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 0, 9], "more bytes");
}

#[test]
fn data_that_do_not_make_a_page_are_refused() {
    let mut page = [0; PAGE_SIZE];
    let short = lz4_flex::block::compress(&[1; PAGE_SIZE - 1]);
    let long = lz4_flex::block::compress(&[1; PAGE_SIZE + 1]);
    for bytes in [&short[..], &long, &[], &[0xff; 300]] {
        assert!(PageData::General(bytes).apply(&mut page, no_disk).is_err());
        assert!(PageData::General(bytes).check(&mut page, no_disk).is_err());
    }
    for bytes in [&[0u8, 0][..], &[0, 5, 1], &[0xff, 0xff, 1], &[0xff, 0x20, 1, 7], &[5]] {
        assert!(PageData::Delta(bytes).apply(&mut page, no_disk).is_err(), "{bytes:?}");
        assert!(PageData::Delta(bytes).check(&mut page, no_disk).is_err(), "{bytes:?}");
    }
}

/// Blocks of one disk, each with noise of its own.
fn disk() -> Vec<Page> {
    let mut disk = vec![[0; PAGE_SIZE]; 8];
    (1..).zip(&mut disk).for_each(|(seed, block)| fill_with_noise(block, seed));
    disk
}

fn find(disk: &[Page], page: &Page) -> Option<Reference> {
    let number = disk.iter().position(|block| block == page)? as u64;
    Some(Reference { block: DiskBlock { disk: DiskIndex(1), number }, hash: PageHash::of(page) })
}

fn read_block(disk: &[Page], block: DiskBlock, page: &mut Page) -> Result<(), EncodingError> {
    assert_eq!(block.disk, DiskIndex(1));
    *page = disk[block.number as usize];
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(60))]

    #[test]
    fn pages_that_a_disk_holds_are_read_from_it(
        mode in mode(),
        history in proptest::collection::vec(
            proptest::collection::vec((0..PAGES, any::<Option<(prop::sample::Index, bool)>>()), 0..20),
            1..12,
        ),
    ) {
        let disk = disk();
        let mut encoder = new_encoder(mode, 16);
        let mut guest = vec![[0; PAGE_SIZE]; PAGES as usize];
        let mut backup = guest.clone();
        for message in history {
            let mut captured = Vec::new();
            for (page, from) in message {
                let content = &mut guest[page as usize];
                match from {
                    Some((block, changed)) => {
                        *content = disk[block.index(disk.len())];
                        content[9] ^= u8::from(changed);
                    }
                    None => content[77] ^= 1,
                }
                captured.push((PageRun { block: BLOCK, first: PageIndex(page), count: 1 }, *content));
            }
            let (runs, content): (Vec<PageRun>, Vec<Page>) = captured.into_iter().unzip();
            let content = content.concat();
            let payload =
                encoder.encode(&runs, &content, false, |page| find(&disk, page)).parts.concat();
            read_pages(&payload, |_, page, data| {
                data.apply(&mut backup[page.0 as usize], |block, page| read_block(&disk, block, page))
            })
            .unwrap();
            prop_assert!(guest == backup);
        }
    }
}

#[test]
fn a_mirror_that_holds_something_else_is_found_out() {
    let mut disk = disk();
    let mut encoder = new_encoder(Compression::Hybrid, 16);
    let runs = [PageRun { block: BLOCK, first: PageIndex(3), count: 1 }];
    let content = disk[5];
    let payload = encoder.encode(&runs, &content, false, |page| find(&disk, page)).parts.concat();
    assert!(payload.len() < 100, "it is a reference");
    let counters = encoder.counters();
    assert_eq!((counters.reference, counters.reference_saved_bytes), (1, 4096 - 26));
    assert_eq!((counters.raw, counters.general), (0, 0));
    let read = |disk: &[Page]| {
        let mut page = [0; PAGE_SIZE];
        read_pages(&payload, |_, _, data| {
            data.apply(&mut page, |block, page| read_block(disk, block, page))
        })
        .map(|()| page)
    };
    assert_eq!(read(&disk), Ok(content));
    disk[5][4095] ^= 1;
    let error = read(&disk).unwrap_err().to_string();
    assert!(error.contains("does not hold the page"), "{error}");
}
