//! Staging: the messages of an epoch are kept until the epoch is whole.

use crate::wire::{Kind, Message, WireError};
use crate::{Epoch, Time};
use std::collections::VecDeque;
use std::time::Duration;

/// Counts and digest of an epoch's messages; both sides compute it, and the
/// primary's travels in [`Kind::EpochEnd`].
#[derive(Clone, Debug, Default)]
pub struct EpochDigest {
    messages: u64,
    bytes: u64,
    hasher: crc32fast::Hasher,
}

impl EpochDigest {
    /// Counts one message, by its checksum and payload length.
    pub fn add(&mut self, checksum: u32, length: usize) {
        self.messages += 1;
        self.bytes += length as u64;
        self.hasher.update(&checksum.to_le_bytes());
    }

    /// The payload of the epoch's [`Kind::EpochEnd`], which is sent `age` after its guest stopped.
    pub fn end(&self, age: Duration) -> Vec<u8> {
        let age = u64::try_from(age.as_nanos()).unwrap_or(u64::MAX);
        [&self.encode()[..], &age.to_le_bytes()].concat()
    }

    fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(20);
        bytes.extend_from_slice(&self.messages.to_le_bytes());
        bytes.extend_from_slice(&self.bytes.to_le_bytes());
        bytes.extend_from_slice(&self.hasher.clone().finalize().to_le_bytes());
        bytes
    }
}

/// One epoch, whole and checked.
#[derive(Debug)]
pub struct StagedEpoch {
    /// Which one.
    pub epoch: Epoch,
    /// Its pages, disk writes and device state, in the order they were sent.
    pub messages: Vec<Message>,
    /// Bytes of payload.
    pub bytes: u64,
    /// When its guest stopped, by this host's clock: too late by the time that its end was on its
    /// way.
    pub taken: Time,
}

#[derive(Debug)]
struct Partial {
    epoch: Epoch,
    messages: Vec<Message>,
    digest: EpochDigest,
}

/// Collects epochs. Disk writes of epoch *n + 1* may come before the end of
/// epoch *n*, since epochs overlap; ends come in order.
#[derive(Debug, Default)]
pub struct Staging {
    partial: VecDeque<Partial>,
    ended: Epoch,
    /// The most that epochs which are not whole may have.
    limit: Option<u64>,
}

impl Staging {
    /// An empty staging area; the first epoch to end is 1.
    pub fn new() -> Staging {
        Staging::default()
    }

    /// The same, that refuses what would make it hold more bytes of epochs that are not whole.
    pub fn with_limit(limit: u64) -> Staging {
        Staging { limit: Some(limit), ..Staging::default() }
    }

    /// Bytes that are staged in epochs that are not whole yet.
    pub fn bytes(&self) -> u64 {
        self.partial.iter().map(|partial| partial.digest.bytes).sum()
    }

    /// The same with what messages take beside their payload: empty ones must not be for nothing.
    fn memory(&self) -> u64 {
        let messages: usize = self.partial.iter().map(|partial| partial.messages.len()).sum();
        self.bytes() + (messages * size_of::<Message>()) as u64
    }

    /// This epoch, and all before it, came another way: a batch of log has no end of its own.
    pub fn pass(&mut self, epoch: Epoch) {
        self.ended = self.ended.max(epoch);
        self.partial.retain(|partial| partial.epoch > epoch);
    }

    /// Takes a data message or an epoch's end, which has come `now`; returns the epoch that it
    /// completes.
    pub fn take(&mut self, message: Message, now: Time) -> Result<Option<StagedEpoch>, WireError> {
        let epoch = message.header.epoch;
        // At most the pipeline's depth can be under way, and one that runs.
        let open = self.ended.next()..=Epoch(self.ended.0 + crate::PIPELINE_DEPTH + 1);
        if !open.contains(&epoch) {
            return Err(message.malformed("its epoch is not open"));
        }
        if message.header.kind == Kind::EpochEnd {
            return self.end(message, now).map(Some);
        }
        let staged = self.memory().saturating_add(message.payload.len() as u64);
        if self.limit.is_some_and(|limit| staged > limit) {
            return Err(message.malformed("its epoch has more than any can have"));
        }
        let partial = self.partial_of(epoch);
        partial.digest.add(message.header.checksum(), message.payload.len());
        partial.messages.push(message);
        Ok(None)
    }

    fn end(&mut self, end: Message, now: Time) -> Result<StagedEpoch, WireError> {
        if end.header.epoch != self.ended.next() {
            return Err(end.malformed("an earlier epoch has not ended"));
        }
        self.partial_of(end.header.epoch);
        let partial = self.partial.pop_front().expect("made above, and the oldest");
        let digest = partial.digest.encode();
        let age = end.payload.strip_prefix(&digest[..]).and_then(|age| age.try_into().ok());
        let Some(age) = age.map(u64::from_le_bytes) else {
            return Err(end.malformed("the epoch's messages are not what was sent"));
        };
        self.ended = partial.epoch;
        let bytes = partial.digest.bytes;
        // An age that is too great is that of a guest which has stopped long ago, or a lie.
        let taken = Time(now.0.saturating_sub(Duration::from_nanos(age)));
        Ok(StagedEpoch { epoch: partial.epoch, messages: partial.messages, bytes, taken })
    }

    fn partial_of(&mut self, epoch: Epoch) -> &mut Partial {
        let at = self.partial.partition_point(|partial| partial.epoch < epoch);
        if self.partial.get(at).is_none_or(|partial| partial.epoch != epoch) {
            let digest = EpochDigest::default();
            self.partial.insert(at, Partial { epoch, messages: Vec::new(), digest });
        }
        &mut self.partial[at]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Time = Time(Duration::from_secs(60));
    const AGE: Duration = Duration::from_millis(3);

    fn data(epoch: u64, byte: u8) -> Message {
        Message::new(Kind::DeviceState, Epoch(epoch), vec![byte; 10])
    }

    fn end(epoch: u64, messages: &[Message]) -> Message {
        let mut digest = EpochDigest::default();
        for message in messages {
            digest.add(message.header.checksum(), message.payload.len());
        }
        Message::new(Kind::EpochEnd, Epoch(epoch), digest.end(AGE))
    }

    #[test]
    fn epochs_that_came_another_way_are_not_waited_for() {
        let mut staging = Staging::new();
        staging.take(end(1, &[]), NOW).unwrap().unwrap();
        assert!(staging.take(data(9, 1), NOW).is_err(), "it is not open");
        staging.pass(Epoch(8));
        assert!(staging.take(data(8, 1), NOW).is_err(), "it is over");
        let first = data(9, 1);
        staging.take(first.clone(), NOW).unwrap();
        staging.pass(Epoch(8));
        assert_eq!(staging.take(end(9, &[first]), NOW).unwrap().unwrap().messages.len(), 1);
    }

    #[test]
    fn an_epoch_is_staged_when_whole_and_the_next_may_overlap() {
        let mut staging = Staging::new();
        let first = data(1, 1);
        assert!(staging.take(first.clone(), NOW).unwrap().is_none());
        assert!(staging.take(data(2, 2), NOW).unwrap().is_none(), "a write of the next epoch");
        let whole = staging.take(end(1, &[first]), NOW).unwrap().unwrap();
        assert_eq!((whole.epoch, whole.messages.len()), (Epoch(1), 1));
        assert_eq!(whole.taken, Time(NOW.0 - AGE));
        assert_eq!(staging.bytes(), 10, "the next epoch's write stays staged");
        let whole = staging.take(end(2, &[data(2, 2)]), NOW).unwrap().unwrap();
        assert_eq!(whole.epoch, Epoch(2));
    }

    #[test]
    fn a_lost_a_foreign_or_a_swapped_message_is_refused() {
        let (one, two) = (data(1, 1), data(1, 2));
        for arrived in [vec![], vec![one.clone()], vec![two.clone(), one.clone()]] {
            let mut staging = Staging::new();
            for message in arrived {
                staging.take(message, NOW).unwrap();
            }
            assert!(staging.take(end(1, &[one.clone(), two.clone()]), NOW).is_err());
        }
    }

    #[test]
    fn an_end_without_its_age_is_refused_and_one_of_any_age_taken() {
        let mut short = end(1, &[]);
        short.payload.pop();
        assert!(Staging::new().take(short, NOW).is_err());
        let digest = EpochDigest::default().end(Duration::from_secs(u64::MAX));
        let oldest = Message::new(Kind::EpochEnd, Epoch(1), digest);
        let taken = Staging::new().take(oldest, NOW).unwrap().unwrap().taken;
        assert_eq!(taken, Time(Duration::ZERO));
    }

    #[test]
    fn epochs_that_never_end_are_refused_before_they_fill_the_memory() {
        let each = size_of::<Message>() as u64;
        let mut staging = Staging::with_limit(35 + 3 * each);
        let first = [data(1, 1), data(1, 2)];
        for message in &first {
            staging.take(message.clone(), NOW).unwrap();
        }
        staging.take(data(2, 1), NOW).unwrap();
        assert!(staging.take(data(2, 2), NOW).is_err(), "35 bytes of both");
        assert!(staging.take(end(1, &first), NOW).unwrap().is_some());
        staging.take(data(2, 2), NOW).unwrap();
        assert_eq!(staging.bytes(), 20);
    }

    /// They had no bytes, so that there could be any number of them.
    #[test]
    fn empty_messages_are_counted_too() {
        let empty = || Message::new(Kind::DeviceState, Epoch(1), Vec::new());
        let mut staging = Staging::with_limit(1 << 12);
        let taken = (0..1 << 12).take_while(|_| staging.take(empty(), NOW).is_ok()).count();
        assert!(taken < 1 << 8, "{taken}");
    }

    #[test]
    fn epochs_outside_the_pipeline_are_refused() {
        let mut staging = Staging::new();
        assert!(staging.take(data(0, 0), NOW).is_err());
        assert!(staging.take(data(5, 0), NOW).is_err());
        assert!(staging.take(end(2, &[]), NOW).is_err(), "epoch 1 has not ended");
    }
}
