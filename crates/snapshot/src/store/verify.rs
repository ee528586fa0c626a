//! Reading every chunk of a snapshot, to know that it can be restored.

use super::{CONCURRENT, Store, StoreError};
use crate::format::{AreaMap, Manifest};
use crate::{ChunkId, UNIT_BYTES};
use futures_util::{StreamExt, stream};
use std::collections::BTreeMap;

/// A problem of a snapshot.
#[derive(Debug)]
pub struct Problem {
    /// Part that it concerns: which member's what.
    pub part: String,
    /// Error that it is.
    pub error: StoreError,
}

/// The result of a verification.
#[derive(Debug, Default)]
pub struct Verified {
    /// Chunks that were read.
    pub chunks: u64,
    /// Bytes that they unpack to.
    pub bytes: u64,
    /// All that is wrong; restorable if nothing is.
    pub problems: Vec<Problem>,
}

/// The uses of chunks: what each is for, and how many bytes of it are used.
type Uses = BTreeMap<ChunkId, (String, usize)>;

impl Store {
    /// Reads and checks everything that a snapshot consists of. An error is one of the store
    /// itself; what is wrong with the snapshot is in the result.
    pub fn verify(&self, manifest: &Manifest) -> Result<Verified, StoreError> {
        let mut verified = Verified::default();
        let mut uses = Uses::new();
        for entry in &manifest.members {
            let part = format!("the description of {}", entry.name);
            match self.member(entry) {
                Ok(member) => {
                    let name = &member.name;
                    let state = format!("the device state of {name}");
                    note(&mut uses, &state, &member.device_state.chunks);
                    let firmware = ("firmware", &member.firmware);
                    let kernel = ("kernel", &member.kernel);
                    for (what, blob) in [firmware, kernel, ("initrd", &member.initrd)] {
                        let chunks = blob.iter().flat_map(|blob| &blob.chunks).copied();
                        let part = format!("the {what} of {name}");
                        note(&mut uses, &part, &chunks.collect::<Vec<_>>());
                    }
                    verified.check(format!("{name}'s frames"), self.frames(&member))?;
                    verified.check(format!("{name}'s working set"), self.working_set(&member))?;
                    verified.check(format!("{name}'s recent pages"), self.recent(&member))?;
                    verified.check(format!("{name}'s pages by CLOCK"), self.by_clock(&member))?;
                    for area in &member.areas {
                        let part = format!("{} of {name}", area.name);
                        if let Some(map) = verified.check(part.clone(), self.area(area))? {
                            note_area(&mut uses, &part, &map);
                        }
                    }
                }
                Err(error) => {
                    verified.check::<()>(part, Err(error))?;
                }
            }
        }
        self.read_all(&uses, &mut verified)?;
        Ok(verified)
    }

    fn read_all(&self, uses: &Uses, verified: &mut Verified) -> Result<(), StoreError> {
        let mut contents = stream::iter(uses)
            .map(async |(id, used)| (*id, used, self.read_chunk(*id).await))
            .buffer_unordered(CONCURRENT)
            .boxed();
        while let Some((id, (part, used), read)) = self.block(contents.next()) {
            let whole = read.and_then(|content| match content.len() >= *used {
                true => Ok(content.len() as u64),
                false => Err(StoreError::damaged(format!("chunk {id}"), "it is too short")),
            });
            if let Some(bytes) = verified.check(part.clone(), whole)? {
                verified.bytes += bytes;
            }
            verified.chunks += 1;
        }
        Ok(())
    }
}

impl Verified {
    /// Notes what is wrong; a store that cannot be read is not the snapshot's fault.
    fn check<T>(
        &mut self,
        part: String,
        result: Result<T, StoreError>,
    ) -> Result<Option<T>, StoreError> {
        match result {
            Ok(value) => Ok(Some(value)),
            Err(error @ StoreError::Failed { .. }) => Err(error),
            Err(error) => {
                self.problems.push(Problem { part, error });
                Ok(None)
            }
        }
    }
}

fn note(uses: &mut Uses, part: &str, chunks: &[ChunkId]) {
    for id in chunks {
        uses.entry(*id).or_insert_with(|| (part.to_owned(), 0));
    }
}

fn note_area(uses: &mut Uses, part: &str, map: &AreaMap) {
    for extent in map.extents() {
        let place = map.place(extent);
        let end = (usize::from(place.slot) + extent.count as usize) * UNIT_BYTES;
        let (_, used) = uses.entry(place.chunk).or_insert_with(|| (part.to_owned(), 0));
        *used = end.max(*used);
    }
}
