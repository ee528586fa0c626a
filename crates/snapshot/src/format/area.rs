//! The map of an area: where in the store the content of each unit is.

use super::bytes::{Malformed, Reader};
use super::chunk::CHUNK_UNITS;
use crate::ChunkId;
use std::collections::HashMap;
use std::ops::Range;

/// The place of the content of one unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Place {
    /// The chunk.
    pub chunk: ChunkId,
    /// Index of the unit in the chunk, from 0.
    pub slot: u16,
}

/// Neighbouring units whose content lies side by side in one chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// The first unit.
    pub first: u64,
    /// Number of units, at least one.
    pub count: u64,
    /// Index of the chunk in the map's list.
    chunk: u32,
    slot: u16,
}

impl Extent {
    /// The unit after the last.
    pub fn end(&self) -> u64 {
        self.first + self.count
    }
}

/// The map of where the content of an area is: of each unit that is not zero, the chunk and the
/// place in it. Several units may have the same place.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AreaMap {
    units: u64,
    chunks: Vec<ChunkId>,
    extents: Vec<Extent>,
}

const EXTENT_BYTES: usize = 8 + 2 + 4 + 2;

/// Most bytes of a map of so many units: each is in a chunk of its own.
pub(crate) fn most_bytes(units: u64) -> u64 {
    units.saturating_mul(32 + EXTENT_BYTES as u64).saturating_add(24)
}

impl AreaMap {
    /// An area of zeros.
    pub fn zeros(units: u64) -> AreaMap {
        AreaMap { units, ..AreaMap::default() }
    }

    /// Units in the area.
    pub fn units(&self) -> u64 {
        self.units
    }

    /// The chunks that the area refers to, each once, in the order of their first use when the
    /// map was made.
    pub fn chunks(&self) -> &[ChunkId] {
        &self.chunks
    }

    /// The extents that are not zero, in the order of the area.
    pub fn extents(&self) -> &[Extent] {
        &self.extents
    }

    /// The place of the first unit of an extent of this map.
    pub fn place(&self, extent: &Extent) -> Place {
        Place { chunk: self.chunks[extent.chunk as usize], slot: extent.slot }
    }

    /// The place of a unit's content; none if it is zero.
    pub fn find(&self, unit: u64) -> Option<Place> {
        let after = self.extents.partition_point(|extent| extent.first <= unit);
        let extent = self.extents[..after].last().filter(|extent| unit < extent.end())?;
        let place = self.place(extent);
        Some(Place { slot: place.slot + (unit - extent.first) as u16, ..place })
    }

    /// The number of units that are not zero.
    pub fn stored(&self) -> u64 {
        self.extents.iter().map(|extent| extent.count).sum()
    }

    /// This map with other content at some units, zero where there is no place. Of several
    /// changes of one unit the last one counts.
    ///
    /// # Panics
    /// If a unit lies outside the area.
    pub fn with(&self, mut changes: Vec<(u64, Option<Place>)>) -> AreaMap {
        changes.sort_by_key(|(unit, _)| *unit);
        let mut builder = Builder::new(self.units);
        let (mut unit, mut rest) = (0, &self.extents[..]);
        for (at, change) in changes.iter().enumerate() {
            let (changed, place) = *change;
            if changes.get(at + 1).is_some_and(|(next, _)| *next == changed) {
                continue;
            }
            rest = self.copy(rest, unit..changed, &mut builder);
            if let Some(place) = place {
                builder.push(changed, 1, place);
            }
            unit = changed + 1;
        }
        self.copy(rest, unit..self.units, &mut builder);
        builder.finish()
    }

    /// The part of this map that lies in these ranges, which are in order and apart; zero
    /// elsewhere.
    pub fn within(&self, ranges: impl IntoIterator<Item = Range<u64>>) -> AreaMap {
        let mut builder = Builder::new(self.units);
        let mut rest = &self.extents[..];
        for range in ranges {
            rest = self.copy(rest, range, &mut builder);
        }
        builder.finish()
    }

    /// Copies what lies in `range`; returns the extents that reach beyond it.
    fn copy<'a>(
        &self,
        mut rest: &'a [Extent],
        range: Range<u64>,
        builder: &mut Builder,
    ) -> &'a [Extent] {
        while let Some((extent, others)) = rest.split_first() {
            let (first, end) = (extent.first.max(range.start), extent.end().min(range.end));
            if first < end {
                let place = self.place(extent);
                let slot = place.slot + (first - extent.first) as u16;
                builder.push(first, end - first, Place { slot, ..place });
            }
            if extent.end() > range.end {
                break;
            }
            rest = others;
        }
        rest
    }

    /// Encodes it as it is stored.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(24 + self.chunks.len() * 32);
        bytes.extend(self.units.to_le_bytes());
        bytes.extend((self.chunks.len() as u64).to_le_bytes());
        self.chunks.iter().for_each(|id| bytes.extend(id.0));
        bytes.extend((self.extents.len() as u64).to_le_bytes());
        for extent in &self.extents {
            bytes.extend(extent.first.to_le_bytes());
            bytes.extend((extent.count as u16).to_le_bytes());
            bytes.extend(extent.chunk.to_le_bytes());
            bytes.extend(extent.slot.to_le_bytes());
        }
        bytes
    }

    /// Decodes what [`AreaMap::encode`] made; everything is checked that other methods rely on.
    pub fn decode(bytes: &[u8]) -> Result<AreaMap, Malformed> {
        let mut reader = Reader(bytes);
        let units = reader.u64()?;
        let chunks = (0..reader.count(32)?)
            .map(|_| reader.hash().map(ChunkId))
            .collect::<Result<Vec<_>, _>>()?;
        let count = reader.count(EXTENT_BYTES)?;
        let (mut extents, mut end) = (Vec::with_capacity(count), 0);
        for _ in 0..count {
            let first = reader.u64()?;
            let count = reader.u16()?.into();
            let extent = Extent { first, count, chunk: reader.u32()?, slot: reader.u16()? };
            let inside = first >= end && count > 0 && first < units && count <= units - first;
            let slots = u64::from(extent.slot) + count <= CHUNK_UNITS as u64;
            if !inside || !slots || extent.chunk as usize >= chunks.len() {
                return Err(Malformed("an entry of the map is out of bounds"));
            }
            end = extent.end();
            extents.push(extent);
        }
        reader.end()?;
        Ok(AreaMap { units, chunks, extents })
    }
}

/// Makes a map from the first unit to the last.
#[derive(Debug)]
pub struct Builder {
    map: AreaMap,
    known: HashMap<ChunkId, u32>,
}

impl Builder {
    /// Creates one for an area of so many units, zero where nothing is pushed.
    pub fn new(units: u64) -> Builder {
        Builder { map: AreaMap::zeros(units), known: HashMap::new() }
    }

    /// `count` units from `first` on, behind all that were pushed before, lie side by side from
    /// `place` on.
    ///
    /// # Panics
    /// If they overlap what was pushed, or leave the area or the chunk.
    pub fn push(&mut self, first: u64, count: u64, place: Place) {
        let end = self.map.extents.last().map_or(0, Extent::end);
        assert!(first >= end && first + count <= self.map.units, "unit {first} is out of order");
        assert!(u64::from(place.slot) + count <= CHUNK_UNITS as u64, "past the end of a chunk");
        let next = self.map.chunks.len() as u32;
        let chunk = *self.known.entry(place.chunk).or_insert(next);
        if chunk == next {
            self.map.chunks.push(place.chunk);
        }
        if let Some(last) = self.map.extents.last_mut() {
            let adjoins = u64::from(last.slot) + last.count == u64::from(place.slot);
            if last.end() == first && last.chunk == chunk && adjoins {
                last.count += count;
                return;
            }
        }
        self.map.extents.push(Extent { first, count, chunk, slot: place.slot });
    }

    /// The map.
    pub fn finish(self) -> AreaMap {
        self.map
    }
}

#[cfg(test)]
#[path = "area_tests.rs"]
mod tests;
