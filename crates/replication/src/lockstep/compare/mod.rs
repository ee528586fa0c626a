//! Both machines compared while they run: checksums of memory and disks at a place of the log.
//!
//! | | |
//! |---|---|
//! | [`primary`] | chooses places and spots, stands still there, judges what the backup found |
//! | [`comparer`] | what is shared of that by the primary's threads |
//! | [`backup`] | stops at the place, and compares |
//!
//! Which differences count is decided by `understudy_lockstep` ([`Place::is_certain`],
//! [`Inquiry`]).
//!
//! [`Place::is_certain`]: understudy_lockstep::Place::is_certain
//! [`Inquiry`]: understudy_lockstep::Inquiry

pub mod backup;
pub mod comparer;
pub mod primary;

use anyhow::Context;
use understudy_lockstep::{CHECKSUM_BYTES, EXTENT_BYTES, Spot};
use understudy_machine::Machine;
use understudy_protocol::PageIndex;

/// Spots that differ, with what this host has there.
pub type Differing = Vec<(Spot, Vec<u8>)>;

/// Every spot of a machine: its memory, then its disks.
fn all_spots(machine: &Machine) -> impl Iterator<Item = Spot> + use<> {
    spots_of(&sizes(machine))
}

/// The number of spots that a RAM block or a disk has; its first spot names it.
type Size = (Spot, u64);

fn sizes(machine: &Machine) -> Vec<Size> {
    let block = |block: &understudy_memory::RamBlock| {
        (Spot::Page { block: block.id().0, index: 0 }, block.pages())
    };
    let disk = |disk: &std::sync::Arc<understudy_disk::Disk>| {
        let extents = disk.export_bytes().div_ceil(EXTENT_BYTES);
        (Spot::Extent { disk: disk.index().0, index: 0 }, extents)
    };
    let disks = machine.disks();
    machine.blocks().iter().map(block).chain(disks.iter().map(disk)).collect()
}

fn spots_of(sizes: &[Size]) -> impl Iterator<Item = Spot> + use<> {
    let sizes = sizes.to_vec();
    sizes.into_iter().flat_map(|(first, many)| (0..many).map(move |index| at(first, index)))
}

fn at(first: Spot, index: u64) -> Spot {
    match first {
        Spot::Page { block, .. } => Spot::Page { block, index },
        Spot::Extent { disk, .. } => Spot::Extent { disk, index },
    }
}

/// Some spots of each kind, by chance; `seed` says which.
fn sample(sizes: &[Size], pages: usize, extents: usize, seed: u64) -> Vec<Spot> {
    let (memory, disks): (Vec<Size>, Vec<Size>) =
        sizes.iter().copied().partition(|(first, _)| matches!(first, Spot::Page { .. }));
    let mut spots = pick(&memory, pages, seed);
    spots.extend(pick(&disks, extents, !seed));
    spots.sort_unstable();
    spots.dedup();
    spots
}

fn pick(sizes: &[Size], many: usize, seed: u64) -> Vec<Spot> {
    let total: u64 = sizes.iter().map(|(_, spots)| spots).sum();
    let mut chance = blake3::Hasher::new().update(&seed.to_le_bytes()).finalize_xof();
    let mut draw = || {
        let mut bytes = [0; 8];
        chance.fill(&mut bytes);
        let mut index = u64::from_le_bytes(bytes) % total;
        for &(first, spots) in sizes {
            if index < spots {
                return at(first, index);
            }
            index -= spots;
        }
        unreachable!("the index is below the sum")
    };
    (0..if total == 0 { 0 } else { many }).map(|_| draw()).collect()
}

/// Reads a spot: appends its content.
fn read(machine: &Machine, spot: Spot, into: &mut Vec<u8>) -> anyhow::Result<()> {
    match spot {
        Spot::Page { block, index } => {
            let block = machine.blocks().get(usize::from(block));
            let block = block.with_context(|| format!("there is no RAM block for {spot:?}"))?;
            let mut content = vec![0; spot.bytes() as usize];
            block.peek(PageIndex(index), &mut content)?;
            into.append(&mut content);
        }
        Spot::Extent { disk, .. } => {
            let disks = machine.disks();
            let disk = disks.get(usize::from(disk));
            let disk = disk.with_context(|| format!("there is no disk for {spot:?}"))?;
            let left = disk.export_bytes().saturating_sub(spot.offset());
            let mut content = vec![0; left.min(spot.bytes()) as usize];
            disk.read(spot.offset(), &mut content)
                .with_context(|| format!("cannot read {}", disk.path().display()))?;
            into.append(&mut content);
        }
    }
    Ok(())
}

fn checksum(content: &[u8]) -> [u8; CHECKSUM_BYTES] {
    *blake3::hash(content).as_bytes().first_chunk().expect("it has 32 bytes")
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMORY: Size = (Spot::Page { block: 0, index: 0 }, 1000);
    const ROM: Size = (Spot::Page { block: 1, index: 0 }, 2);
    const DISK: Size = (Spot::Extent { disk: 0, index: 0 }, 10);

    #[test]
    fn all_spots_come_once() {
        let spots: Vec<Spot> = spots_of(&[MEMORY, ROM, DISK]).collect();
        assert_eq!(spots.len(), 1012);
        assert_eq!(spots[1001], Spot::Page { block: 1, index: 1 });
        assert_eq!(spots[1011], Spot::Extent { disk: 0, index: 9 });
    }

    #[test]
    fn samples_are_of_the_machine_and_others_each_time() {
        let sizes = [MEMORY, ROM, DISK];
        let all: Vec<Spot> = spots_of(&sizes).collect();
        let one = sample(&sizes, 100, 4, 1);
        assert!(one.len() > 80 && one.iter().all(|spot| all.contains(spot)));
        assert!(one.iter().any(|spot| matches!(spot, Spot::Extent { .. })));
        assert_ne!(one, sample(&sizes, 100, 4, 2));
        assert_eq!(sample(&[MEMORY], 0, 4, 1), [], "a machine without disks");
    }
}
