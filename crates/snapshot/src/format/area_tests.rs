use super::*;
use proptest::prelude::*;
use std::collections::BTreeMap;

const UNITS: u64 = 200;

fn place() -> impl Strategy<Value = Option<Place>> {
    let there = (0..6u8, 0..CHUNK_UNITS as u16)
        .prop_map(|(chunk, slot)| Place { chunk: ChunkId([chunk; 32]), slot });
    proptest::option::weighted(0.7, there)
}

fn changes() -> impl Strategy<Value = Vec<(u64, Option<Place>)>> {
    proptest::collection::vec((0..UNITS, place()), 0..120)
}

fn check(map: &AreaMap, expected: &BTreeMap<u64, Option<Place>>) -> Result<(), TestCaseError> {
    for unit in 0..UNITS {
        prop_assert_eq!(map.find(unit), expected.get(&unit).copied().flatten(), "unit {}", unit);
    }
    prop_assert_eq!(map.stored(), expected.values().flatten().count() as u64);
    Ok(())
}

proptest! {
    #[test]
    fn a_map_with_changes_is_the_old_one_elsewhere(first in changes(), second in changes()) {
        let mut expected = BTreeMap::new();
        expected.extend(first.iter().copied());
        let map = AreaMap::zeros(UNITS).with(first);
        check(&map, &expected)?;
        expected.extend(second.iter().copied());
        let map = map.with(second);
        check(&map, &expected)?;
        // What nothing refers to any more is forgotten, so that it can be swept.
        for chunk in map.chunks() {
            prop_assert!(expected.values().flatten().any(|place| place.chunk == *chunk));
        }
        prop_assert_eq!(AreaMap::decode(&map.encode()), Ok(map));
    }

    #[test]
    fn a_part_of_a_map_is_the_map_there_and_zero_elsewhere(
        content in changes(), bounds in proptest::collection::btree_set(0..=UNITS, 0..12),
    ) {
        let mut expected = BTreeMap::new();
        expected.extend(content.iter().copied());
        let bounds: Vec<u64> = bounds.into_iter().collect();
        let ranges = || bounds.chunks_exact(2).map(|pair| pair[0]..pair[1]);
        expected.retain(|unit, _| ranges().any(|range| range.contains(unit)));
        check(&AreaMap::zeros(UNITS).with(content).within(ranges()), &expected)?;
    }

    #[test]
    fn any_bytes_are_decoded_to_a_sound_map_or_refused(
        bytes in proptest::collection::vec(prop_oneof![Just(0u8), Just(1), any::<u8>()], 0..200),
        first in changes(), at in any::<prop::sample::Index>(), value in any::<u8>(),
    ) {
        let mut damaged = AreaMap::zeros(UNITS).with(first).encode();
        let at = at.index(damaged.len());
        damaged[at] = value;
        for bytes in [bytes, damaged] {
            if let Ok(map) = AreaMap::decode(&bytes) {
                let sound = map.extents().iter().all(|extent| map.find(extent.end() - 1).is_some());
                prop_assert!(sound);
                prop_assert_eq!(map.with(vec![]).stored(), map.stored());
            }
        }
    }
}

#[test]
fn neighbours_in_area_and_chunk_are_one_extent() {
    let chunk = ChunkId([1; 32]);
    let changes = (10..40).map(|unit| (unit, Some(Place { chunk, slot: unit as u16 }))).collect();
    let map = AreaMap::zeros(UNITS).with(changes);
    assert_eq!(map.extents().len(), 1);
    let map = map.with(vec![(20, None)]);
    assert_eq!(map.extents().len(), 2);
    assert_eq!(map.find(21), Some(Place { chunk, slot: 21 }));
}

#[test]
fn a_map_that_claims_more_entries_than_it_has_allocates_nothing() {
    let bytes = [5u64.to_le_bytes(), u64::MAX.to_le_bytes()].concat();
    let told = AreaMap::decode(&bytes).unwrap_err().to_string();
    assert_eq!(told, "it has fewer entries than it says");
}
