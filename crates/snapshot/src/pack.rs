//! Units become chunks: zeros cost nothing, duplicates are stored once, the working set lies
//! together.

use crate::format::{AreaMap, CHUNK_UNITS, Place};
use crate::{ChunkId, UNIT_BYTES};
use std::collections::HashMap;
use understudy_encoding::is_zero_page;

/// Units that are remembered by content. Beyond that a duplicate is stored again: 64 bytes
/// each, some 64 MiB at most for an area.
const REMEMBERED: usize = 1 << 20;

/// The chunks that a unit goes into.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Lane {
    /// Chunks of the working set: units lie in the order in which they are put here, that of
    /// first accesses.
    WorkingSet,
    /// All others, in the order of the area.
    Rest,
}

/// A chunk that is to be stored.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewChunk {
    /// Its name.
    pub id: ChunkId,
    /// Its content.
    pub content: Vec<u8>,
}

/// The fate of the units of an area.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Packed {
    /// Units that were put.
    pub put: u64,
    /// Zeros among them.
    pub zeros: u64,
    /// Units whose content was there already.
    pub duplicates: u64,
}

/// A chunk by the order of its beginning: its name is known when it is full.
type Ordinal = usize;

/// Packs the units of one area that may have changed since its base.
#[derive(Debug)]
pub struct Packer {
    open: [Open; 2],
    /// Names of chunks by ordinal; none of an open one.
    names: Vec<Option<ChunkId>>,
    /// Places of content, each lane by itself: a unit of the working set that lies elsewhere
    /// too is stored again, among its neighbours in time.
    known: HashMap<(Lane, ChunkId), (Ordinal, u16)>,
    changes: Vec<(u64, Option<(Ordinal, u16)>)>,
    packed: Packed,
}

#[derive(Debug, Default)]
struct Open {
    ordinal: Ordinal,
    content: Vec<u8>,
}

impl Packer {
    /// Creates an empty one.
    pub fn new() -> Packer {
        Packer {
            open: [0, 1].map(|ordinal| Open { ordinal, content: Vec::new() }),
            names: vec![None; 2],
            known: HashMap::new(),
            changes: Vec::new(),
            packed: Packed::default(),
        }
    }

    /// A unit has this content at the cut. Of a unit that is put twice the last place counts.
    /// Returns a chunk that is now full.
    ///
    /// # Panics
    /// If it is not [`UNIT_BYTES`] long.
    pub fn put(&mut self, unit: u64, content: &[u8], lane: Lane) -> Option<NewChunk> {
        assert_eq!(content.len(), UNIT_BYTES, "not a unit");
        self.packed.put += 1;
        if is_zero_page(content) {
            self.packed.zeros += 1;
            self.changes.push((unit, None));
            return None;
        }
        let hash = ChunkId::of(content);
        if let Some(place) = self.find(hash, lane) {
            self.packed.duplicates += 1;
            self.changes.push((unit, Some(place)));
            return None;
        }
        let open = &mut self.open[lane as usize];
        let place = (open.ordinal, (open.content.len() / UNIT_BYTES) as u16);
        open.content.extend(content);
        let full = open.content.len() == CHUNK_UNITS * UNIT_BYTES;
        self.changes.push((unit, Some(place)));
        if self.known.len() < REMEMBERED {
            self.known.insert((lane, hash), place);
        }
        full.then(|| self.seal(lane))
    }

    /// The working set's copy will do for any unit, the rest's for the rest.
    fn find(&self, content: ChunkId, lane: Lane) -> Option<(Ordinal, u16)> {
        let own = self.known.get(&(lane, content));
        own.or_else(|| self.known.get(&(Lane::WorkingSet, content))).copied()
    }

    fn seal(&mut self, lane: Lane) -> NewChunk {
        let next = Open { ordinal: self.names.len(), content: Vec::new() };
        self.names.push(None);
        let open = std::mem::replace(&mut self.open[lane as usize], next);
        let id = ChunkId::of(&open.content);
        self.names[open.ordinal] = Some(id);
        NewChunk { id, content: open.content }
    }

    /// The chunks that are not full, what was packed, and the map: `base` where nothing was
    /// put. A base of another size is grown with zeros, or cut.
    pub fn finish(mut self, base: &AreaMap) -> (Vec<NewChunk>, AreaMap, Packed) {
        let lanes = [Lane::WorkingSet, Lane::Rest];
        let begun = lanes.into_iter().filter(|&lane| !self.open[lane as usize].content.is_empty());
        let last = begun.collect::<Vec<_>>().into_iter().map(|lane| self.seal(lane)).collect();
        let place = |(ordinal, slot): (Ordinal, u16)| Place {
            chunk: self.names[ordinal].expect("all chunks are sealed"),
            slot,
        };
        let changes = self.changes.iter().map(|&(unit, at)| (unit, at.map(place))).collect();
        (last, base.with(changes), self.packed)
    }
}

impl Default for Packer {
    fn default() -> Packer {
        Packer::new()
    }
}

/// Units of a queue that lie scattered in the chunks of `base`: fewer than half of their chunk's
/// units in use are of the queue, so that loading them would load mostly others. They are to be
/// put again, in the order of the queue, although they have not changed.
pub fn scattered(base: &AreaMap, queue: &[u64]) -> Vec<u64> {
    let mut in_use: HashMap<ChunkId, u64> = HashMap::new();
    for extent in base.extents() {
        *in_use.entry(base.place(extent).chunk).or_default() += extent.count;
    }
    let mut wanted: HashMap<ChunkId, u64> = HashMap::new();
    for place in queue.iter().filter_map(|&unit| base.find(unit)) {
        *wanted.entry(place.chunk).or_default() += 1;
    }
    let lies_scattered = |unit: &u64| {
        base.find(*unit).is_some_and(|place| wanted[&place.chunk] * 2 < in_use[&place.chunk])
    };
    queue.iter().copied().filter(lies_scattered).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn unit(content: u8) -> Vec<u8> {
        vec![content; UNIT_BYTES]
    }

    fn read(chunks: &BTreeMap<ChunkId, Vec<u8>>, map: &AreaMap, unit: u64) -> u8 {
        map.find(unit).map_or(0, |place| chunks[&place.chunk][usize::from(place.slot) * UNIT_BYTES])
    }

    proptest! {
        #[test]
        fn every_unit_reads_as_it_was_put(
            rounds in proptest::collection::vec(
                proptest::collection::vec((0..300u64, 0..90u8, any::<bool>()), 0..250), 1..4,
            ),
        ) {
            let (mut map, mut chunks) = (AreaMap::zeros(300), BTreeMap::new());
            let mut expected = BTreeMap::new();
            for round in rounds {
                let mut packer = Packer::new();
                for &(at, content, hot) in &round {
                    let lane = if hot { Lane::WorkingSet } else { Lane::Rest };
                    let full = packer.put(at, &unit(content), lane);
                    chunks.extend(full.map(|chunk| (chunk.id, chunk.content)));
                    expected.insert(at, content);
                }
                let (last, next, packed) = packer.finish(&map);
                chunks.extend(last.into_iter().map(|chunk| (chunk.id, chunk.content)));
                map = next;
                prop_assert_eq!(packed.put, round.len() as u64);
                for at in 0..300 {
                    let content = expected.get(&at).copied().unwrap_or(0);
                    prop_assert_eq!(read(&chunks, &map, at), content, "unit {}", at);
                }
            }
        }
    }

    #[test]
    fn zeros_and_duplicates_cost_nothing() {
        let mut packer = Packer::new();
        for at in 0..1000 {
            assert_eq!(packer.put(at, &unit((at % 3) as u8), Lane::Rest), None);
        }
        let (chunks, map, packed) = packer.finish(&AreaMap::zeros(1000));
        assert_eq!((chunks.len(), chunks[0].content.len()), (1, 2 * UNIT_BYTES));
        assert_eq!((packed.zeros, packed.duplicates), (334, 664));
        assert_eq!(map.stored(), 666);
    }

    #[test]
    fn the_working_set_lies_in_the_order_of_accesses() {
        let mut packer = Packer::new();
        let content = |at: u64| {
            let hash = *blake3::hash(&at.to_le_bytes()).as_bytes();
            hash.repeat(UNIT_BYTES / 32)
        };
        let mut chunks = Vec::new();
        (0..200).for_each(|at| chunks.extend(packer.put(at, &content(at), Lane::Rest)));
        let queue = [150, 3, 199, 4, 77];
        for at in queue {
            // Copied before, and touched now: it moves to where it is looked for.
            chunks.extend(packer.put(at, &content(at), Lane::WorkingSet));
        }
        let (last, map, _) = packer.finish(&AreaMap::zeros(200));
        let places: Vec<_> = queue.iter().map(|&at| map.find(at).unwrap()).collect();
        assert!(places.iter().all(|place| place.chunk == last[0].id));
        assert_eq!(places.iter().map(|place| place.slot).collect::<Vec<_>>(), [0, 1, 2, 3, 4]);
    }

    #[test]
    fn what_lies_scattered_is_packed_again_once() {
        let mut packer = Packer::new();
        let content = |at: u64| {
            let hash = *blake3::hash(&at.to_le_bytes()).as_bytes();
            hash.repeat(UNIT_BYTES / 32)
        };
        (0..256).for_each(|at| drop(packer.put(at, &content(at), Lane::Rest)));
        let (_, base, _) = packer.finish(&AreaMap::zeros(300));
        // 50 of the first 64 units, a few of the others, and one that is zero.
        let queue: Vec<u64> = (5..55).chain([70, 140, 141, 250, 299]).collect();
        assert_eq!(scattered(&base, &queue), [70, 140, 141, 250]);
        let mut packer = Packer::new();
        for unit in scattered(&base, &queue) {
            packer.put(unit, &content(unit), Lane::WorkingSet);
        }
        let (_, map, _) = packer.finish(&base);
        assert_eq!(scattered(&map, &queue), Vec::<u64>::new());
    }
}
