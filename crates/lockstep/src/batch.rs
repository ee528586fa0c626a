//! The primary's side of the logging channel: the log is cut into batches.

use crate::LogPosition;
use std::collections::VecDeque;
use understudy_protocol::Epoch;

/// The parts of the log that each batch has, and how much of it is not acknowledged yet.
///
/// The order in which a batch is cut keeps the output rule (VMware FT, 2.2):
///
/// 1. the output buffer's barrier: frames that were read so far belong to this batch;
/// 2. read what there is of the log: a frame's log leaves QEMU before the frame does;
/// 3. [`Batcher::cut`], and send.
#[derive(Clone, Debug)]
pub struct Batcher {
    limit: u64,
    end: LogPosition,
    acknowledged: LogPosition,
    last: Epoch,
    in_flight: VecDeque<(Epoch, LogPosition)>,
}

impl Batcher {
    /// A primary whose log begins after batch `machine`, the copy of the machine. It reads
    /// no more log from QEMU while `limit` bytes are not acknowledged.
    pub fn new(machine: Epoch, limit: u64) -> Batcher {
        Batcher {
            limit,
            end: LogPosition(0),
            acknowledged: LogPosition(0),
            last: machine,
            in_flight: VecDeque::new(),
        }
    }

    /// Bytes of log that may be read from QEMU now. QEMU, and with it the guest, waits
    /// while there is no room.
    pub fn room(&self) -> u64 {
        self.limit.saturating_sub(self.unacknowledged())
    }

    /// Bytes that were sent and not acknowledged.
    pub fn unacknowledged(&self) -> u64 {
        self.end.bytes_since(self.acknowledged)
    }

    /// The end of the log that was sent.
    pub fn end(&self) -> LogPosition {
        self.end
    }

    /// Closes a batch of so many bytes and gives its number. Frames may be all that it has:
    /// what leads to them was in an earlier one then.
    pub fn cut(&mut self, bytes: usize) -> Epoch {
        self.end = self.end + bytes;
        self.last = self.last.next();
        self.in_flight.push_back((self.last, self.end));
        self.last
    }

    /// The rest of a log that ends there, which all that was read behind the last batch must be:
    /// output that waits for it would leave, and writes be forgotten, whose log the backup never gets.
    pub fn end_of_log(&self, rest: Vec<u8>, ends: LogPosition) -> Result<LogEnd, NotTheEnd> {
        let read = self.end + rest.len();
        if read == ends { Ok(LogEnd(rest)) } else { Err(NotTheEnd { read, ends }) }
    }

    /// The backup has this batch and all before it.
    pub fn acknowledged(&mut self, batch: Epoch) {
        while let Some(&(number, end)) = self.in_flight.front() {
            if number > batch {
                return;
            }
            self.acknowledged = end;
            self.in_flight.pop_front();
        }
    }
}

/// The last of a log that has ended, in no batch yet: nothing of it is left in QEMU or on the way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LogEnd(Vec<u8>);

impl LogEnd {
    /// The log that it is.
    pub fn log(&self) -> &[u8] {
        &self.0
    }

    /// The same, given away.
    pub fn into_log(self) -> Vec<u8> {
        self.0
    }
}

/// Log that was read up to `read`, and ends elsewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the log was read up to {read}, and ends at {ends}")]
pub struct NotTheEnd {
    read: LogPosition,
    ends: LogPosition,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_channel_has_no_room_until_it_is_acknowledged() {
        let mut batcher = Batcher::new(Epoch(1), 100);
        assert_eq!(batcher.cut(60), Epoch(2));
        assert_eq!(batcher.cut(70), Epoch(3));
        assert_eq!((batcher.room(), batcher.unacknowledged()), (0, 130));
        batcher.acknowledged(Epoch(2));
        assert_eq!(batcher.room(), 30);
        batcher.acknowledged(Epoch(3));
        assert_eq!((batcher.room(), batcher.end()), (100, LogPosition(130)));
    }

    #[test]
    fn a_log_ends_with_all_of_it_or_not_at_all() {
        let mut batcher = Batcher::new(Epoch(1), 100);
        batcher.cut(60);
        let ends = |bytes: usize| batcher.end_of_log(vec![7; bytes], LogPosition(70));
        assert_eq!(ends(10).unwrap().into_log(), vec![7; 10]);
        for short_or_long in [0, 9, 11] {
            assert!(ends(short_or_long).is_err(), "{short_or_long}");
        }
    }
}
