use super::*;
use crate::pack::{Lane, NewChunk, Packer};
use crate::{CHUNK_UNITS, UNIT_BYTES};
use proptest::prelude::*;

const UNITS: u64 = 400;

fn page(index: u64) -> Page {
    Page { block: BlockId(0), index: PageIndex(index) }
}

/// A memory whose page 7n is zero, and its chunks. The queue was packed.
fn memory(queue: &[u64]) -> (AreaMap, HashMap<ChunkId, Vec<u8>>) {
    let mut packer = Packer::new();
    let mut chunks: Vec<NewChunk> = Vec::new();
    let lanes = [(Lane::WorkingSet, queue.to_vec()), (Lane::Rest, (0..UNITS).collect())];
    for (lane, units) in lanes {
        let units =
            units.into_iter().filter(|unit| lane == Lane::WorkingSet || !queue.contains(unit));
        for unit in units {
            let content = match unit % 7 {
                0 => vec![0; UNIT_BYTES],
                _ => unit.to_le_bytes().repeat(UNIT_BYTES / 8),
            };
            chunks.extend(packer.put(unit, &content, lane));
        }
    }
    let (last, map, _) = packer.finish(&AreaMap::zeros(UNITS));
    let chunks = chunks.into_iter().chain(last);
    (map, chunks.map(|chunk| (chunk.id, chunk.content)).collect())
}

fn loader(map: &AreaMap, queue: &[u64], before_start: u64) -> Loader {
    let queue: Vec<Page> = queue.iter().copied().map(page).collect();
    Loader::new(BTreeMap::from([(BlockId(0), map.clone())]), &queue, before_start)
}

proptest! {
    #[test]
    fn every_page_is_filled_with_its_content_whatever_comes_first(
        queue in proptest::collection::vec(0..UNITS, 0..150),
        steps in proptest::collection::vec((0..4u8, 0..UNITS), 0..100),
    ) {
        let (map, chunks) = memory(&queue);
        let mut loader = loader(&map, &queue, 40);
        let mut memory: HashMap<u64, u64> = HashMap::new();
        let mut reading = VecDeque::new();
        let steps = steps.into_iter().chain([(1, 0), (2, 0)].repeat(200));
        for (step, unit) in steps {
            match step {
                0 => {
                    let demand = loader.demand(page(unit));
                    prop_assert_eq!(demand == Demand::Zero, unit % 7 == 0);
                    prop_assert_eq!(demand == Demand::Filled, memory.contains_key(&unit));
                }
                1 => reading.extend(loader.next_chunk()),
                2 => {
                    let Some(id) = reading.pop_front() else { continue };
                    for fill in loader.read(id) {
                        for at in 0..fill.pages.count {
                            let from = (usize::from(fill.slot) + at as usize) * UNIT_BYTES;
                            let value = chunks[&id][from..from + 8].try_into().unwrap();
                            memory.insert(fill.pages.first.0 + at, u64::from_le_bytes(value));
                        }
                    }
                }
                _ => {
                    if let Some(id) = reading.pop_back() {
                        loader.failed(id);
                    }
                }
            }
        }
        prop_assert!(loader.is_complete() && loader.may_start());
        prop_assert_eq!(loader.next_chunk(), None);
        prop_assert_eq!(loader.pages(), memory.len() as u64);
        for unit in (0..UNITS).filter(|unit| unit % 7 != 0) {
            prop_assert_eq!(memory.get(&unit), Some(&unit));
        }
    }
}

#[test]
fn the_queue_comes_first_and_what_is_waited_for_before_it() {
    let queue: Vec<u64> = (100..300).rev().collect();
    let (map, _) = memory(&queue);
    let mut loader = loader(&map, &queue, 70);
    let chunk = |unit| map.find(unit).unwrap().chunk;
    assert_eq!(loader.next_chunk(), Some(chunk(299)));
    assert_eq!(loader.demand(page(5)), Demand::Coming);
    assert_eq!(loader.demand(page(6)), Demand::Coming, "in the same chunk");
    assert_eq!(loader.next_chunk(), Some(chunk(5)));
    assert!(!loader.may_start());
    // 70 pages of the queue, a seventh of them zero: they fit into the first chunk.
    assert!(loader.read(chunk(299)).iter().map(|fill| fill.pages.count).sum::<u64>() == 64);
    assert!(loader.may_start());
    assert_eq!(CHUNK_UNITS, 64);
    loader.failed(chunk(5));
    assert_eq!(loader.next_chunk(), Some(chunk(5)), "somebody waits for it");
}

#[test]
fn before_the_start_nothing_is_read_that_it_does_not_wait_for() {
    let queue: Vec<u64> = (100..300).rev().collect();
    let (map, _) = memory(&queue);
    let chunk = |unit| map.find(unit).unwrap().chunk;
    let mut loader = loader(&map, &queue, 160);
    // Somebody has asked for the second one already.
    loader.demand(page(200));
    assert_eq!(loader.next_demanded(), Some(chunk(200)));
    assert_eq!(loader.next_before_start(), Some(chunk(299)));
    assert_eq!(loader.next_before_start(), Some(chunk(141)), "160 pages, a seventh of them zero");
    assert_eq!(loader.next_before_start(), None);
    for unit in [299, 141, 200] {
        assert!(!loader.may_start());
        loader.read(chunk(unit));
    }
    assert!(loader.may_start());
    assert_eq!(loader.next_before_start(), None);
    assert_eq!(loader.next_chunk(), Some(chunk(1)), "the rest comes as ever");
}

#[test]
fn eager_waits_for_all_and_lazy_for_nothing() {
    let (map, _) = memory(&[]);
    let mut lazy = loader(&map, &[], 0);
    assert_eq!((lazy.may_start(), lazy.next_before_start()), (true, None));
    assert_eq!(lazy.all(), map.stored());
    let mut eager = loader(&map, &[], UNITS);
    while let Some(chunk) = eager.next_before_start() {
        assert!(!eager.may_start());
        eager.read(chunk);
    }
    assert!(eager.may_start() && eager.is_complete());
}
