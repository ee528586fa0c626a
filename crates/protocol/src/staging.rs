//! Staging: what belongs to an epoch is kept until the epoch is whole.

use crate::wire::{Header, Message, WireError};
use crate::{Epoch, Time};
use std::collections::VecDeque;
use std::time::Duration;

/// Sums over an epoch's messages; both sides make them, and the primary's travel in an
/// [`EpochEnd`].
#[derive(Clone, Debug, Default)]
pub struct EpochDigest {
    messages: u64,
    bytes: u64,
    hasher: crc32fast::Hasher,
}

impl EpochDigest {
    /// Counts the message with this header.
    pub fn add(&mut self, header: &Header) {
        self.messages += 1;
        self.bytes += header.length as u64;
        self.hasher.update(&header.checksum().to_le_bytes());
    }

    /// The sums so far.
    pub fn sums(&self) -> EpochSums {
        let checksum = self.hasher.clone().finalize();
        EpochSums { messages: self.messages, bytes: self.bytes, checksum }
    }
}

/// The sums of an epoch's messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EpochSums {
    /// Number of messages.
    pub messages: u64,
    /// Bytes of payload.
    pub bytes: u64,
    /// CRC-32 over their checksums.
    pub checksum: u32,
}

/// The last message of an epoch, a [`Kind::EpochEnd`](crate::wire::Kind::EpochEnd).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EpochEnd {
    /// The epoch.
    pub epoch: Epoch,
    /// Sums of what came before.
    pub sums: EpochSums,
    /// Time since its guest stopped.
    pub age: Duration,
}

impl EpochEnd {
    /// Bytes of the payload.
    const BYTES: usize = 28;

    /// The message's payload.
    pub fn encode(&self) -> Vec<u8> {
        let age = u64::try_from(self.age.as_nanos()).unwrap_or(u64::MAX);
        let mut bytes = Vec::with_capacity(EpochEnd::BYTES);
        bytes.extend_from_slice(&self.sums.messages.to_le_bytes());
        bytes.extend_from_slice(&self.sums.bytes.to_le_bytes());
        bytes.extend_from_slice(&self.sums.checksum.to_le_bytes());
        bytes.extend_from_slice(&age.to_le_bytes());
        bytes
    }

    /// Reads a message.
    pub fn decode(message: &Message) -> Result<EpochEnd, WireError> {
        let payload: &[u8; EpochEnd::BYTES] =
            message.payload[..].try_into().map_err(|_| message.malformed("another length"))?;
        let word = |at: usize| u64::from_le_bytes(*payload[at..].first_chunk().expect("a word"));
        let checksum = u32::from_le_bytes(*payload[16..].first_chunk().expect("four bytes"));
        Ok(EpochEnd {
            epoch: message.header.epoch,
            sums: EpochSums { messages: word(0), bytes: word(8), checksum },
            age: Duration::from_nanos(word(20)),
        })
    }

    fn malformed(what: &'static str) -> WireError {
        WireError::Malformed { kind: crate::wire::Kind::EpochEnd, what: what.into() }
    }
}

/// One epoch, whole and checked.
#[derive(Debug)]
pub struct StagedEpoch<Piece> {
    /// The epoch.
    pub epoch: Epoch,
    /// Its pages, disk writes and device state, in the order they were sent.
    pub pieces: Vec<Piece>,
    /// Bytes of payload.
    pub bytes: u64,
    /// Time at which its guest stopped, by this host's clock: too late by the time that its end was
    /// on its way.
    pub taken: Time,
}

#[derive(Debug)]
struct Partial<Piece> {
    epoch: Epoch,
    pieces: Vec<Piece>,
    digest: EpochDigest,
    /// Bytes that the pieces take here.
    memory: u64,
}

/// Collects epochs, of pieces which are what messages say. Disk writes of epoch *n + 1* may come
/// before the end of epoch *n*, since epochs overlap; ends come in order.
#[derive(Debug)]
pub struct Staging<Piece> {
    partial: VecDeque<Partial<Piece>>,
    ended: Epoch,
    /// The most that epochs which are not whole may have.
    limit: Option<u64>,
}

impl<Piece> Default for Staging<Piece> {
    fn default() -> Self {
        Staging { partial: VecDeque::new(), ended: Epoch::default(), limit: None }
    }
}

impl<Piece> Staging<Piece> {
    /// An empty staging area; the first epoch to end is 1.
    pub fn new() -> Self {
        Staging::default()
    }

    /// The same, that refuses what would make it hold more bytes of epochs that are not whole.
    pub fn with_limit(limit: u64) -> Self {
        Staging { limit: Some(limit), ..Staging::default() }
    }

    /// Bytes that are staged in epochs that are not whole yet.
    pub fn bytes(&self) -> u64 {
        self.partial.iter().map(|partial| partial.digest.bytes).sum()
    }

    fn memory(&self) -> u64 {
        self.partial.iter().map(|partial| partial.memory).sum()
    }

    /// Passes this epoch, and all before it, which came another way: a batch of log has no end of
    /// its own.
    pub fn pass(&mut self, epoch: Epoch) {
        self.ended = self.ended.max(epoch);
        self.partial.retain(|partial| partial.epoch > epoch);
    }

    /// Takes what the message with this header, which names the epoch, says. It has `bytes` now.
    pub fn take(&mut self, header: &Header, bytes: u64, piece: Piece) -> Result<(), WireError> {
        let epoch = header.epoch;
        if !self.is_open(epoch) {
            return Err(header.malformed("its epoch is not open"));
        }
        // What a piece takes beside its bytes counts, too: empty ones must not be for nothing.
        let takes = bytes.saturating_add(size_of::<Piece>() as u64);
        if self.limit.is_some_and(|limit| self.memory().saturating_add(takes) > limit) {
            return Err(header.malformed("its epoch has more than any can have"));
        }
        let epoch = if planted!(MixEpochs) { self.ended.next() } else { epoch };
        let partial = self.partial_of(epoch);
        partial.digest.add(header);
        partial.memory += takes;
        partial.pieces.push(piece);
        Ok(())
    }

    /// An epoch's end has come `now`: gives the epoch that it completes.
    pub fn end(&mut self, end: &EpochEnd, now: Time) -> Result<StagedEpoch<Piece>, WireError> {
        if !self.is_open(end.epoch) {
            return Err(EpochEnd::malformed("its epoch is not open"));
        }
        if end.epoch != self.ended.next() {
            return Err(EpochEnd::malformed("an earlier epoch has not ended"));
        }
        self.partial_of(end.epoch);
        let partial = self.partial.pop_front().expect("made above, and the oldest");
        if partial.digest.sums() != end.sums {
            return Err(EpochEnd::malformed("the epoch's messages are not what was sent"));
        }
        self.ended = partial.epoch;
        let bytes = partial.digest.bytes;
        // An age that is too great is that of a guest which has stopped long ago, or a lie.
        let taken = Time(now.0.saturating_sub(end.age));
        Ok(StagedEpoch { epoch: partial.epoch, pieces: partial.pieces, bytes, taken })
    }

    /// Whether it is open: at most the pipeline's depth can be under way, and one that runs.
    fn is_open(&self, epoch: Epoch) -> bool {
        let last = Epoch(self.ended.0 + crate::PIPELINE_DEPTH + 1);
        (self.ended.next()..=last).contains(&epoch)
    }

    fn partial_of(&mut self, epoch: Epoch) -> &mut Partial<Piece> {
        let at = self.partial.partition_point(|partial| partial.epoch < epoch);
        if self.partial.get(at).is_none_or(|partial| partial.epoch != epoch) {
            let digest = EpochDigest::default();
            self.partial.insert(at, Partial { epoch, pieces: Vec::new(), digest, memory: 0 });
        }
        &mut self.partial[at]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Kind;

    const NOW: Time = Time(Duration::from_secs(60));
    const AGE: Duration = Duration::from_millis(3);

    fn data(epoch: u64, byte: u8) -> Message {
        Message::new(Kind::DeviceState, Epoch(epoch), vec![byte; 10])
    }

    fn end(epoch: u64, messages: &[Message]) -> EpochEnd {
        let mut digest = EpochDigest::default();
        for message in messages {
            digest.add(&message.header);
        }
        EpochEnd { epoch: Epoch(epoch), sums: digest.sums(), age: AGE }
    }

    fn take(staging: &mut Staging<Message>, message: Message) -> Result<(), WireError> {
        let header = message.header;
        staging.take(&header, header.length as u64, message)
    }

    #[test]
    fn epochs_that_came_another_way_are_not_waited_for() {
        let mut staging: Staging<Message> = Staging::new();
        staging.end(&end(1, &[]), NOW).unwrap();
        assert!(take(&mut staging, data(9, 1)).is_err(), "it is not open");
        staging.pass(Epoch(8));
        assert!(take(&mut staging, data(8, 1)).is_err(), "it is over");
        let first = data(9, 1);
        take(&mut staging, first.clone()).unwrap();
        staging.pass(Epoch(8));
        assert_eq!(staging.end(&end(9, &[first]), NOW).unwrap().pieces.len(), 1);
    }

    #[test]
    fn an_epoch_is_staged_when_whole_and_the_next_may_overlap() {
        let mut staging = Staging::new();
        let first = data(1, 1);
        take(&mut staging, first.clone()).unwrap();
        take(&mut staging, data(2, 2)).expect("a write of the next epoch");
        let whole = staging.end(&end(1, &[first]), NOW).unwrap();
        assert_eq!((whole.epoch, whole.pieces.len()), (Epoch(1), 1));
        assert_eq!(whole.taken, Time(NOW.0 - AGE));
        assert_eq!(staging.bytes(), 10, "the next epoch's write stays staged");
        let whole = staging.end(&end(2, &[data(2, 2)]), NOW).unwrap();
        assert_eq!(whole.epoch, Epoch(2));
    }

    #[test]
    fn a_lost_a_foreign_or_a_swapped_message_is_refused() {
        let (one, two) = (data(1, 1), data(1, 2));
        for arrived in [vec![], vec![one.clone()], vec![two.clone(), one.clone()]] {
            let mut staging = Staging::new();
            for message in arrived {
                take(&mut staging, message).unwrap();
            }
            assert!(staging.end(&end(1, &[one.clone(), two.clone()]), NOW).is_err());
        }
    }

    #[test]
    fn an_end_without_its_age_is_refused_and_one_of_any_age_taken() {
        let oldest = EpochEnd { age: Duration::from_secs(u64::MAX), ..end(1, &[]) };
        let message = Message::new(Kind::EpochEnd, Epoch(1), oldest.encode());
        let decoded = EpochEnd::decode(&message).unwrap();
        let taken = Staging::<Message>::new().end(&decoded, NOW).unwrap().taken;
        assert_eq!(taken, Time(Duration::ZERO));
        let mut short = message;
        short.payload.pop();
        assert!(EpochEnd::decode(&short).is_err());
        let end = end(3, &[data(3, 1)]);
        let message = Message::new(Kind::EpochEnd, end.epoch, end.encode());
        assert_eq!(EpochEnd::decode(&message), Ok(end));
    }

    #[test]
    fn epochs_that_never_end_are_refused_before_they_fill_the_memory() {
        let each = size_of::<Message>() as u64;
        let mut staging = Staging::with_limit(35 + 3 * each);
        let first = [data(1, 1), data(1, 2)];
        for message in &first {
            take(&mut staging, message.clone()).unwrap();
        }
        take(&mut staging, data(2, 1)).unwrap();
        assert!(take(&mut staging, data(2, 2)).is_err(), "35 bytes of both");
        staging.end(&end(1, &first), NOW).unwrap();
        take(&mut staging, data(2, 2)).unwrap();
        assert_eq!(staging.bytes(), 20);
    }

    /// Empty messages were not counted: there could be any number of them.
    #[test]
    fn empty_messages_are_counted_too() {
        let empty = || Message::new(Kind::DeviceState, Epoch(1), Vec::new());
        let mut staging = Staging::with_limit(1 << 12);
        let taken = (0..1 << 12).take_while(|_| take(&mut staging, empty()).is_ok()).count();
        assert!(taken < 1 << 8, "{taken}");
    }

    #[test]
    fn epochs_outside_the_pipeline_are_refused() {
        let mut staging = Staging::new();
        assert!(take(&mut staging, data(0, 0)).is_err());
        assert!(take(&mut staging, data(5, 0)).is_err());
        assert!(staging.end(&end(2, &[]), NOW).is_err(), "epoch 1 has not ended");
        staging.end(&end(1, &[]), NOW).unwrap();
        let twice = staging.end(&end(1, &[]), NOW).unwrap_err().to_string();
        assert!(twice.contains("its epoch is not open"), "{twice}");
    }
}
