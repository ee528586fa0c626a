//! Two machines, compared at one place of the log.
//!
//! The primary stands still for a moment, at a place that its log tells, and gives the checksums
//! of some of its memory and disks there. The backup executes the log up to that place, and
//! compares. Not every difference is one of the guests: a disk read that is under way may have
//! come to memory on one host and not on the other, and of the log's last event QEMU may have
//! read everything and done nothing. [`Place::is_certain`] says which differences count.

use crate::{LogPosition, Mark};
use understudy_protocol::PAGE_SIZE;

/// Bytes of a checksum.
pub const CHECKSUM_BYTES: usize = 16;

/// Bytes of disk that are compared as one.
pub const EXTENT_BYTES: u64 = 64 << 10;

/// The most spots of one comparison: the guest stands still while they are read.
pub const MOST_SPOTS: usize = 1024;

const PLACE_BYTES: usize = 32;
const SPOT_BYTES: usize = 12;
const READING_BYTES: usize = SPOT_BYTES + 1 + CHECKSUM_BYTES;
const FINDING_BYTES: usize = SPOT_BYTES + 1;

/// A unit of what is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Spot {
    /// A page of a RAM block, both by number.
    Page {
        /// The block.
        block: u16,
        /// The page.
        index: u64,
    },
    /// [`EXTENT_BYTES`] of a disk, or what is left of it.
    Extent {
        /// The disk.
        disk: u16,
        /// The extent.
        index: u64,
    },
}

/// A spot as the primary has it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reading {
    /// The spot.
    pub spot: Spot,
    /// The beginning of its BLAKE3 hash.
    pub checksum: [u8; CHECKSUM_BYTES],
    /// The primary had the same there at an earlier place of the log.
    pub is_steady: bool,
}

/// The point at which the primary stood.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// Number of the comparison, among those of the session.
    pub number: u64,
    /// The log that led there.
    pub position: LogPosition,
    /// Instructions that it had executed, as QEMU counts them.
    pub instructions: u64,
    /// Requests to its disks that had begun since the log did.
    pub disk_requests: u64,
}

/// The comparison that the backup is asked to make.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Comparison {
    /// The point at which they are compared.
    pub place: Place,
    /// The primary's readings there.
    pub readings: Vec<Reading>,
}

/// A spot that differed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The spot.
    pub spot: Spot,
    /// Whether that is no matter of when something was done.
    pub is_certain: bool,
}

/// The result of the backup's comparison.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Findings {
    /// Number of the comparison.
    pub number: u64,
    /// Whether it could be compared at all.
    pub was_compared: bool,
    /// The differences.
    pub differences: Vec<Finding>,
}

/// A message that is no comparison, and no findings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct BadComparison(&'static str);

impl Place {
    /// Whether a difference at this place is one of the guests; `mark` is what the log tells of it.
    ///
    /// Without a disk request under way an image is settled, and no read comes to memory. For
    /// memory, the log's last event counts: QEMU reads the next one before it does what an
    /// event tells, but after it has executed instructions. A page that the primary has not
    /// changed for longer than that event does not come of it.
    pub fn is_certain(&self, mark: &Mark, reading: &Reading) -> bool {
        let disks_rest = mark.disk_ends == self.disk_requests;
        disks_rest
            && match reading.spot {
                Spot::Page { .. } => mark.ends_with_instructions || reading.is_steady,
                Spot::Extent { .. } => true,
            }
    }
}

impl Spot {
    /// The number of bytes to read, at most.
    pub fn bytes(&self) -> u64 {
        match self {
            Spot::Page { .. } => PAGE_SIZE as u64,
            Spot::Extent { .. } => EXTENT_BYTES,
        }
    }

    /// The offset at which it begins in its block or on its disk, in bytes.
    pub fn offset(&self) -> u64 {
        match self {
            Spot::Page { index, .. } | Spot::Extent { index, .. } => {
                index.saturating_mul(self.bytes())
            }
        }
    }

    fn put(&self, bytes: &mut Vec<u8>) {
        let (kind, of, index) = match *self {
            Spot::Page { block, index } => (0u16, block, index),
            Spot::Extent { disk, index } => (1, disk, index),
        };
        bytes.extend_from_slice(&kind.to_le_bytes());
        bytes.extend_from_slice(&of.to_le_bytes());
        bytes.extend_from_slice(&index.to_le_bytes());
    }

    fn take(bytes: &[u8; SPOT_BYTES]) -> Result<Spot, BadComparison> {
        let [k0, k1, o0, o1, index @ ..] = *bytes;
        let (of, index) = (u16::from_le_bytes([o0, o1]), u64::from_le_bytes(index));
        match u16::from_le_bytes([k0, k1]) {
            0 => Ok(Spot::Page { block: of, index }),
            1 => Ok(Spot::Extent { disk: of, index }),
            _ => Err(BadComparison("an unknown kind of spot")),
        }
    }
}

impl Comparison {
    /// Encodes it as a message.
    pub fn encode(&self) -> Vec<u8> {
        let Place { number, position, instructions, disk_requests } = self.place;
        let words = [number, position.0, instructions, disk_requests];
        let mut bytes = words.map(u64::to_le_bytes).concat();
        for reading in &self.readings {
            reading.spot.put(&mut bytes);
            bytes.push(reading.is_steady.into());
            bytes.extend_from_slice(&reading.checksum);
        }
        bytes
    }

    /// Reads what [`Comparison::encode`] made.
    pub fn decode(bytes: &[u8]) -> Result<Comparison, BadComparison> {
        let (head, rest) =
            bytes.split_first_chunk::<PLACE_BYTES>().ok_or(BadComparison("it has no place"))?;
        let word = |n: usize| u64_at(head, 8 * n);
        let place = Place {
            number: word(0),
            position: LogPosition(word(1)),
            instructions: word(2),
            disk_requests: word(3),
        };
        let readings = each::<READING_BYTES, _>(rest, |bytes| {
            let (spot, rest) = bytes.split_first_chunk().expect("it is longer");
            let (&steady, checksum) = rest.split_first().expect("it is longer");
            let checksum = checksum.try_into().expect("what is left");
            Ok(Reading { spot: Spot::take(spot)?, checksum, is_steady: flag(steady)? })
        })?;
        Ok(Comparison { place, readings })
    }
}

impl Findings {
    /// Encodes them as a message.
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = self.number.to_le_bytes().to_vec();
        bytes.push(self.was_compared.into());
        for finding in &self.differences {
            finding.spot.put(&mut bytes);
            bytes.push(finding.is_certain.into());
        }
        bytes
    }

    /// Reads what [`Findings::encode`] made.
    pub fn decode(bytes: &[u8]) -> Result<Findings, BadComparison> {
        let (number, rest) = bytes.split_first_chunk().ok_or(BadComparison("it has no number"))?;
        let (&compared, rest) = rest.split_first().ok_or(BadComparison("it has no result"))?;
        let differences = each::<FINDING_BYTES, _>(rest, |bytes| {
            let (spot, certain) = bytes.split_first_chunk().expect("it is longer");
            Ok(Finding { spot: Spot::take(spot)?, is_certain: flag(certain[0])? })
        })?;
        Ok(Findings {
            number: u64::from_le_bytes(*number),
            was_compared: flag(compared)?,
            differences,
        })
    }
}

/// Reads items of `N` bytes each, [`MOST_SPOTS`] at most.
fn each<const N: usize, T>(
    bytes: &[u8],
    read: impl Fn(&[u8; N]) -> Result<T, BadComparison>,
) -> Result<Vec<T>, BadComparison> {
    let items = bytes.chunks_exact(N);
    if !items.remainder().is_empty() || items.len() > MOST_SPOTS {
        return Err(BadComparison("it has another length"));
    }
    items.map(|item| read(item.try_into().expect("exactly so many"))).collect()
}

fn flag(byte: u8) -> Result<bool, BadComparison> {
    match byte {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(BadComparison("neither yes nor no")),
    }
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("eight bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const PAGE: Spot = Spot::Page { block: 0, index: 7 };
    const EXTENT: Spot = Spot::Extent { disk: 1, index: 9 };

    fn reading(spot: Spot, is_steady: bool) -> Reading {
        Reading { spot, checksum: [3; CHECKSUM_BYTES], is_steady }
    }

    fn mark(disk_ends: u64, ends_with_instructions: bool) -> Mark {
        Mark { position: LogPosition(100), disk_ends, ends_with_instructions }
    }

    #[test]
    fn a_page_counts_behind_instructions_or_if_it_was_the_same_before() {
        let place = Place { disk_requests: 5, ..Default::default() };
        for (instructions, steady, counts) in
            [(true, false, true), (false, true, true), (false, false, false)]
        {
            let found = place.is_certain(&mark(5, instructions), &reading(PAGE, steady));
            assert_eq!(found, counts, "instructions {instructions}, steady {steady}");
        }
        assert!(place.is_certain(&mark(5, false), &reading(EXTENT, false)));
    }

    #[test]
    fn nothing_counts_while_a_disk_works() {
        let place = Place { disk_requests: 5, ..Default::default() };
        for spot in [PAGE, EXTENT] {
            assert!(!place.is_certain(&mark(4, true), &reading(spot, true)));
        }
    }

    #[test]
    fn messages_come_back_and_malformed_ones_do_not() {
        let place =
            Place { number: 1, position: LogPosition(2), instructions: u64::MAX, disk_requests: 4 };
        let readings = vec![reading(PAGE, true), reading(EXTENT, false)];
        let comparison = Comparison { place, readings };
        let bytes = comparison.encode();
        assert_eq!(Comparison::decode(&bytes), Ok(comparison));
        assert!(Comparison::decode(&bytes[1..]).is_err());
        let differences = vec![Finding { spot: EXTENT, is_certain: true }];
        let findings = Findings { number: 8, was_compared: true, differences };
        let bytes = findings.encode();
        assert_eq!(Findings::decode(&bytes), Ok(findings));
        assert!(Findings::decode(&bytes[..bytes.len() - 1]).is_err());
        let many = vec![Finding { spot: PAGE, is_certain: true }; MOST_SPOTS + 1];
        let findings = Findings { differences: many, ..Default::default() };
        assert!(Findings::decode(&findings.encode()).is_err(), "more than any");
    }

    proptest! {
        #[test]
        fn any_bytes_are_taken_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            if let Ok(comparison) = Comparison::decode(&bytes) {
                prop_assert_eq!(comparison.encode(), bytes.clone());
            }
            if let Ok(findings) = Findings::decode(&bytes) {
                prop_assert_eq!(findings.encode(), bytes);
            }
        }
    }
}
