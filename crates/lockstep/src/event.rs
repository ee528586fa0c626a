//! The bounds of events in QEMU's log (version 0xe0200c, QEMU 10.0).
//!
//! An event is one byte, its kind, and what belongs to the kind. Some carry an array: four
//! bytes of length, big-endian, then as many bytes. Nothing else of an event matters here.

use crate::LogPosition;

/// The event that ends a log.
pub const END: u8 = 39;

/// Instructions were executed.
const INSTRUCTIONS: u8 = 0;

/// A disk request has ended.
const DISK_END: u8 = 8;

/// The largest array that a card, a console or a random source can have made.
const LARGEST_ARRAY: u32 = 1 << 20;

/// The longest part of an event before its array.
const LONGEST_HEAD: usize = 10;

/// Bytes that are no event of QEMU's log: the log cannot be replayed beyond them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BadEvent {
    /// No event begins with this byte.
    #[error(
        "the log has an event of unknown kind {kind} at {at}; lockstep needs the same, proven \
         build of QEMU on both hosts"
    )]
    Kind {
        /// The byte.
        kind: u8,
        /// Position at which the event begins.
        at: LogPosition,
    },
    /// An array that QEMU does not write.
    #[error("the log has an event with {bytes} bytes of data at {at}")]
    Array {
        /// Its length.
        bytes: u32,
        /// Position at which the event begins.
        at: LogPosition,
    },
}

/// The parts of an event.
#[derive(Clone, Copy)]
enum Shape {
    /// Fixed number of bytes, the kind included.
    Fixed(usize),
    /// Number of bytes, the last four of which are the length of an array.
    Array(usize),
}

fn shape(kind: u8) -> Option<Shape> {
    Some(match kind {
        // Instructions; the result of writing to a character device.
        0 | 24 => Shape::Fixed(5),
        // Bottom halves, by number; a disk request, by number; clocks; what was written to
        // a character device.
        3 | 4 | 8 | 22 | 28 | 29 => Shape::Fixed(9),
        // Input of a character device, by its number.
        7 => Shape::Array(6),
        // A frame: card and flags before it.
        9 => Shape::Array(10),
        // What was read from a character device.
        23 => Shape::Array(5),
        // Random bytes: the result before them.
        27 => Shape::Array(9),
        // Interrupt, exception; input is synchronised; shutdown requests; an error of a
        // character device comes with 24; checkpoints; the end.
        1 | 2 | 6 | 10..=21 | 30..=END => Shape::Fixed(1),
        // Keyboard and mouse (5), sound (25, 26): no such device is allowed.
        _ => return None,
    })
}

/// Follows the log and knows where its last whole event ends. Takes any pieces.
#[derive(Clone, Debug, Default)]
pub struct EventScanner {
    whole: LogPosition,
    events: u64,
    disk_ends: u64,
    ends_with_instructions: bool,
    /// The head of the event under way, as long as its length is not known yet.
    head: [u8; LONGEST_HEAD],
    head_bytes: usize,
    /// Bytes of it that are still to come, once its length is known.
    missing: usize,
    /// Bytes of it that have come.
    partial: usize,
}

impl EventScanner {
    /// A scanner at the beginning of a log.
    pub fn new() -> EventScanner {
        EventScanner::default()
    }

    /// The position at which the last whole event ends.
    pub fn whole(&self) -> LogPosition {
        self.whole
    }

    /// Bytes seen of the event after that.
    pub fn partial(&self) -> usize {
        self.partial
    }

    /// Whole events so far.
    pub fn events(&self) -> u64 {
        self.events
    }

    /// The number of disk requests that have ended, as the whole events tell.
    pub fn disk_ends(&self) -> u64 {
        self.disk_ends
    }

    /// Whether the last whole event is instructions that were executed.
    pub fn ends_with_instructions(&self) -> bool {
        self.ends_with_instructions
    }

    /// The next bytes of the log. After an error it takes no more.
    pub fn scan(&mut self, mut bytes: &[u8]) -> Result<(), BadEvent> {
        while !bytes.is_empty() {
            let taken = if self.missing > 0 {
                self.missing.min(bytes.len())
            } else {
                self.head[self.head_bytes] = bytes[0];
                self.head_bytes += 1;
                // The byte is counted as one that was missing.
                self.missing = self.still_missing()? + 1;
                1
            };
            self.missing -= taken;
            self.partial += taken;
            bytes = &bytes[taken..];
            if self.missing == 0 && self.is_whole() {
                self.end_event();
            }
        }
        Ok(())
    }

    /// Bytes that follow the head surely; none while the head itself is not whole.
    fn still_missing(&self) -> Result<usize, BadEvent> {
        let (kind, at) = (self.head[0], self.whole);
        match shape(kind).ok_or(BadEvent::Kind { kind, at })? {
            Shape::Fixed(bytes) => Ok(bytes - self.head_bytes),
            Shape::Array(head) if self.head_bytes < head => Ok(0),
            Shape::Array(head) => {
                let length = self.head[head - 4..head].try_into().expect("four bytes");
                match u32::from_be_bytes(length) {
                    bytes if bytes > LARGEST_ARRAY => Err(BadEvent::Array { bytes, at }),
                    bytes => Ok(bytes as usize),
                }
            }
        }
    }

    fn is_whole(&self) -> bool {
        match shape(self.head[0]) {
            Some(Shape::Array(head)) => self.head_bytes == head,
            _ => true,
        }
    }

    fn end_event(&mut self) {
        self.whole = self.whole + self.partial;
        self.events += 1;
        self.disk_ends += u64::from(self.head[0] == DISK_END);
        self.ends_with_instructions = self.head[0] == INSTRUCTIONS;
        (self.head_bytes, self.partial) = (0, 0);
    }
}

#[cfg(test)]
#[path = "event_tests.rs"]
mod tests;
