//! Counters of what an encoder did.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::ops::Sub;
use std::time::Duration;
use understudy_protocol::PAGE_SIZE;

/// Counts of pages and bytes since the first synchronisation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Counters {
    /// Pages given to the encoder.
    pub pages: u64,
    /// Pages of them that were sent as zero pages.
    pub zero: u64,
    /// Pages that were not sent: equal to what the backup has.
    pub unchanged: u64,
    /// Pages that were sent as deltas.
    pub delta: u64,
    /// Pages that were sent as references to blocks of a disk.
    pub reference: u64,
    /// Bytes that these would have taken more, raw.
    pub reference_saved_bytes: u64,
    /// Pages that were sent through the general compressor.
    pub general: u64,
    /// Pages that were sent as they are.
    pub raw: u64,
    /// Pages that were looked up in the cache.
    pub lookups: u64,
    /// Pages that were found there.
    pub hits: u64,
    /// Bytes of all the messages' payloads.
    pub bytes: u64,
    /// CPU time of encoding, in nanoseconds.
    pub cpu_ns: u64,
}

impl Counters {
    /// Bytes of pages for each byte sent; none before anything was.
    pub fn ratio(&self) -> Option<f64> {
        (self.bytes > 0).then(|| self.page_bytes() / self.bytes as f64)
    }

    /// The share of looked-up pages that were in the cache, 0 to 1; none without look-ups.
    pub fn hit_rate(&self) -> Option<f64> {
        (self.lookups > 0).then(|| self.hits as f64 / self.lookups as f64)
    }

    /// Milliseconds of CPU time for each MB (10⁶ bytes) of pages.
    pub fn cpu_ms_per_mb(&self) -> Option<f64> {
        (self.pages > 0).then(|| self.cpu_ns as f64 / self.page_bytes())
    }

    /// CPU time of encoding.
    pub fn cpu(&self) -> Duration {
        Duration::from_nanos(self.cpu_ns)
    }

    fn page_bytes(&self) -> f64 {
        (self.pages * PAGE_SIZE as u64) as f64
    }
}

impl Sub for Counters {
    type Output = Counters;

    /// Counts since `earlier`.
    fn sub(self, earlier: Counters) -> Counters {
        Counters {
            pages: self.pages - earlier.pages,
            zero: self.zero - earlier.zero,
            unchanged: self.unchanged - earlier.unchanged,
            delta: self.delta - earlier.delta,
            reference: self.reference - earlier.reference,
            reference_saved_bytes: self.reference_saved_bytes - earlier.reference_saved_bytes,
            general: self.general - earlier.general,
            raw: self.raw - earlier.raw,
            lookups: self.lookups - earlier.lookups,
            hits: self.hits - earlier.hits,
            bytes: self.bytes - earlier.bytes,
            cpu_ns: self.cpu_ns - earlier.cpu_ns,
        }
    }
}
