//! Places in the log.

use std::fmt;
use std::ops::Add;

/// A place in the log: the bytes before it, since the backup was attached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LogPosition(pub u64);

impl LogPosition {
    /// Bytes of log since `earlier`; 0 if it is later.
    pub fn bytes_since(self, earlier: LogPosition) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

impl Add<usize> for LogPosition {
    type Output = LogPosition;
    fn add(self, bytes: usize) -> LogPosition {
        LogPosition(self.0 + bytes as u64)
    }
}

impl fmt::Display for LogPosition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}
