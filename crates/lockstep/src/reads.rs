//! Disk reads whose data travel with the log (VMware FT, 4.2).
//!
//! The guest's reads of a disk come in one order on both hosts, since both guests do the same:
//! each is known by its number. The primary's answers come in any order.

use std::collections::BTreeMap;
use understudy_protocol::DiskIndex;

/// Bytes of a read in the stream before its data.
const HEAD_BYTES: usize = 32;

/// The largest read that a guest's disk takes.
const MOST_BYTES: u32 = 32 << 20;

/// A read of a disk, as both guests ask for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskRead {
    /// The disk.
    pub disk: DiskIndex,
    /// Reads of the disk before it, since the log began.
    pub number: u64,
    /// First byte.
    pub offset: u64,
    /// Bytes.
    pub length: u32,
}

/// The outcome of a read: its data, or the number of its error.
pub type ReadOutcome<Data = Vec<u8>> = Result<Data, u32>;

/// Data that are no stream of reads, or not of this guest's reads.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadRead {
    /// The bytes make no sense.
    #[error("malformed DiskReads message: {0}")]
    Malformed(&'static str),
    /// The backup's guest reads something else than the primary's did.
    #[error("read {} of disk {} is of {} bytes at {} here, and was of {} at {} on the primary",
        .here.number, .here.disk, .here.length, .here.offset, .there.length, .there.offset)]
    Differs {
        /// The read that this guest asks for.
        here: DiskRead,
        /// The read that the primary's guest asked for.
        there: DiskRead,
    },
}

impl DiskRead {
    /// Appends the read and what it gave to a stream.
    pub fn put(&self, outcome: ReadOutcome<&[u8]>, stream: &mut Vec<u8>) {
        stream.extend_from_slice(&self.disk.0.to_le_bytes());
        stream.extend_from_slice(&[0; 2]);
        stream.extend_from_slice(&outcome.err().unwrap_or(0).to_le_bytes());
        stream.extend_from_slice(&self.number.to_le_bytes());
        stream.extend_from_slice(&self.offset.to_le_bytes());
        stream.extend_from_slice(&u64::from(self.length).to_le_bytes());
        stream.extend_from_slice(outcome.unwrap_or_default());
    }

    /// The read of a head, and the number of its error, 0 for none.
    fn of_head(head: &[u8; HEAD_BYTES]) -> Result<(DiskRead, u32), BadRead> {
        let eight = |at: usize| u64::from_le_bytes(head[at..at + 8].try_into().expect("8 bytes"));
        let error = u32::from_le_bytes(head[4..8].try_into().expect("4 bytes"));
        let length = u32::try_from(eight(24)).ok().filter(|&length| length <= MOST_BYTES);
        let length = length.ok_or(BadRead::Malformed("a read is larger than any"))?;
        let disk = DiskIndex(u16::from_le_bytes([head[0], head[1]]));
        Ok((DiskRead { disk, number: eight(8), offset: eight(16), length }, error))
    }
}

/// Puts the pieces of a stream together again.
#[derive(Debug, Default)]
pub struct ReadDecoder {
    bytes: Vec<u8>,
}

impl ReadDecoder {
    /// The next piece of the stream, cut anywhere; gives the reads that are whole now.
    pub fn push(&mut self, piece: &[u8]) -> Result<Vec<(DiskRead, ReadOutcome)>, BadRead> {
        self.bytes.extend_from_slice(piece);
        let (mut whole, mut at) = (Vec::new(), 0);
        while let Some(head) = self.bytes[at..].first_chunk() {
            let (read, error) = DiskRead::of_head(head)?;
            let begins = at + HEAD_BYTES;
            let ends = begins + if error == 0 { read.length as usize } else { 0 };
            let Some(data) = self.bytes.get(begins..ends) else { break };
            whole.push((read, if error == 0 { Ok(data.to_vec()) } else { Err(error) }));
            at = ends;
        }
        self.bytes.drain(..at);
        Ok(whole)
    }
}

/// The outcomes of the primary's reads, as far as the backup's guest has not asked for it yet.
#[derive(Debug)]
pub struct ReadScript {
    disks: Vec<Script>,
    bytes: u64,
}

#[derive(Debug, Default)]
struct Script {
    asked: u64,
    came: BTreeMap<u64, (DiskRead, ReadOutcome)>,
}

impl ReadScript {
    /// Creates one for a guest with so many disks, at the beginning of its log.
    pub fn new(disks: usize) -> ReadScript {
        let disks = std::iter::repeat_with(Script::default).take(disks).collect();
        ReadScript { disks, bytes: 0 }
    }

    /// Adds the outcome of a read, which has come.
    pub fn put(&mut self, read: DiskRead, outcome: ReadOutcome) -> Result<(), BadRead> {
        let script = self.disks.get_mut(usize::from(read.disk.0));
        let script = script.ok_or(BadRead::Malformed("a read of a disk that there is not"))?;
        self.bytes += u64::from(read.length);
        match script.came.insert(read.number, (read, outcome)) {
            None => Ok(()),
            Some(_) => Err(BadRead::Malformed("a read came twice")),
        }
    }

    /// The guest asks: the read gets its number.
    ///
    /// # Panics
    /// If there is no such disk.
    pub fn ask(&mut self, disk: DiskIndex, offset: u64, length: u32) -> DiskRead {
        let script = &mut self.disks[usize::from(disk.0)];
        script.asked += 1;
        DiskRead { disk, number: script.asked - 1, offset, length }
    }

    /// Takes the outcome of a read that was asked for, once it has come.
    pub fn take(&mut self, read: &DiskRead) -> Result<Option<ReadOutcome>, BadRead> {
        let script = &mut self.disks[usize::from(read.disk.0)];
        let Some((there, outcome)) = script.came.remove(&read.number) else { return Ok(None) };
        self.bytes -= u64::from(there.length);
        if there != *read {
            return Err(BadRead::Differs { here: *read, there });
        }
        Ok(Some(outcome))
    }

    /// Bytes of reads that wait here.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn read(disk: u16, number: u64, length: u32) -> DiskRead {
        DiskRead { disk: DiskIndex(disk), number, offset: 4096 * number, length }
    }

    proptest! {
        #[test]
        fn a_stream_comes_back_however_it_is_cut(
            reads in proptest::collection::vec((0..3u16, 0..300u32, any::<bool>()), 0..20),
            cut in 1..100usize,
        ) {
            let outcome = |length: u32, fails| match fails {
                true => Err(5),
                false => Ok(vec![length as u8; length as usize]),
            };
            let sent: Vec<_> = (0..).zip(&reads)
                .map(|(n, &(disk, length, fails))| (read(disk, n, length), outcome(length, fails)))
                .collect();
            let mut stream = Vec::new();
            for (read, outcome) in &sent {
                read.put(outcome.as_deref().map_err(|&error| error), &mut stream);
            }
            let mut decoder = ReadDecoder::default();
            let pieces = stream.chunks(cut).map(|piece| decoder.push(piece).unwrap());
            prop_assert_eq!(pieces.flatten().collect::<Vec<_>>(), sent);
        }

        #[test]
        fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = ReadDecoder::default().push(&bytes);
        }
    }

    #[test]
    fn answers_that_come_in_another_order_find_their_reads() {
        let mut script = ReadScript::new(2);
        let ask = |script: &mut ReadScript| script.ask(DiskIndex(1), 0, 8);
        let (first, second) = (ask(&mut script), script.ask(DiskIndex(1), 4096, 8));
        script.put(read(1, 1, 8), Ok(vec![2; 8])).unwrap();
        assert_eq!(script.take(&first), Ok(None));
        assert_eq!((script.take(&second), script.bytes()), (Ok(Some(Ok(vec![2; 8]))), 0));
        script.put(read(1, 0, 8), Err(5)).unwrap();
        assert_eq!(script.take(&first), Ok(Some(Err(5))));
        assert_eq!(script.ask(DiskIndex(0), 0, 8).number, 0, "each disk has its own numbers");
    }

    #[test]
    fn another_read_than_the_primarys_is_told() {
        let mut script = ReadScript::new(1);
        script.put(read(0, 0, 8), Ok(vec![1; 8])).unwrap();
        let other = script.ask(DiskIndex(0), 0, 512);
        let error = script.take(&other).unwrap_err().to_string();
        assert!(error.contains("512 bytes at 0 here, and was of 8 at 0"), "{error}");
        assert!(script.put(read(1, 0, 8), Ok(vec![1; 8])).is_err(), "there is no disk 1");
        script.put(read(0, 3, 8), Ok(vec![1; 8])).unwrap();
        assert!(script.put(read(0, 3, 8), Ok(vec![1; 8])).is_err(), "twice");
    }
}
