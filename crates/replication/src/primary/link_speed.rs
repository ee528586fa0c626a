//! The time that the link takes for a byte, from what it did: the encoder's measure of
//! what a byte less is worth.
//!
//! A burst is what the sending thread sends without having to wait for more. Its epoch's
//! acknowledgement tells when all of it had arrived: writing to a socket says little, since
//! the system takes a small epoch whole, whatever the link. The time that a burst of
//! almost nothing takes is the way there and back, and no byte's fault.

use std::collections::VecDeque;
use std::time::Duration;
use understudy_protocol::{Epoch, Time};

/// The size below which a burst says more about delay than about speed …
const LEAST_BYTES: u64 = 64 << 10;

/// … and bursts smaller than this say what the delay is.
const SMALL_BYTES: u64 = 16 << 10;

/// The first synchronisation is measured over so many bytes at a time.
const BULK_BYTES: u64 = 4 << 20;

/// Speed and delay are those of so many last bursts …
const KEPT: usize = 15;

/// … of which the fastest one of so many counts: a busy machine delays most of them, and no link
/// is faster than it is.
const ONE_OF: usize = 5;

/// A burst, which is being sent without interruption.
#[derive(Clone, Debug)]
pub struct Burst {
    began: Time,
    bytes: u64,
    encoding: Duration,
}

impl Burst {
    /// The queue was empty until `now`.
    pub fn begin(now: Time) -> Burst {
        Burst { began: now, bytes: 0, encoding: Duration::ZERO }
    }

    /// `bytes` were sent.
    pub fn add(&mut self, bytes: u64) {
        self.bytes += bytes;
    }

    /// Notes how long the link waited for the encoder.
    pub fn encoded(&mut self, took: Duration) {
        self.encoding += took;
    }
}

/// The speed that was learned of the link of one session.
#[derive(Debug, Default)]
pub struct LinkSpeed {
    in_flight: VecDeque<(Epoch, Burst)>,
    bulk: (u64, Duration),
    delays: VecDeque<f64>,
    seconds_per_byte: VecDeque<f64>,
}

impl LinkSpeed {
    /// All of `epoch` was sent.
    pub fn ended(&mut self, epoch: Epoch, burst: &Burst) {
        self.in_flight.push_back((epoch, burst.clone()));
    }

    /// The backup's acknowledgement of `epoch` came at `now`.
    pub fn acknowledged(&mut self, epoch: Epoch, now: Time) {
        while self.in_flight.front().is_some_and(|(first, _)| *first <= epoch) {
            let Some((of, burst)) = self.in_flight.pop_front() else { return };
            if of == epoch {
                self.arrived(&burst, (now - burst.began).saturating_sub(burst.encoding));
            }
        }
    }

    /// Part of the first synchronisation, which nobody acknowledges: `took` is how long
    /// the system refused more. Right for so much data.
    pub fn sent_in_bulk(&mut self, bytes: u64, took: Duration) {
        self.bulk.0 += bytes;
        self.bulk.1 += took;
        if self.bulk.0 >= BULK_BYTES {
            let (bytes, took) = std::mem::take(&mut self.bulk);
            keep(&mut self.seconds_per_byte, took.as_secs_f64() / bytes as f64);
        }
    }

    /// Seconds that a byte takes; none as long as nothing is known.
    pub fn seconds_per_byte(&self) -> Option<f64> {
        let mut sorted: Vec<f64> = self.seconds_per_byte.iter().copied().collect();
        sorted.sort_by(f64::total_cmp);
        sorted.get(sorted.len().saturating_sub(1) / ONE_OF).copied()
    }

    fn arrived(&mut self, burst: &Burst, took: Duration) {
        let took = took.as_secs_f64();
        if burst.bytes <= SMALL_BYTES {
            keep(&mut self.delays, took);
        } else if burst.bytes >= LEAST_BYTES {
            let delay = self.delays.iter().copied().reduce(f64::min).unwrap_or(0.0);
            keep(&mut self.seconds_per_byte, (took - delay).max(0.0) / burst.bytes as f64);
        }
    }
}

fn keep(values: &mut VecDeque<f64>, value: f64) {
    if values.len() == KEPT {
        values.pop_front();
    }
    values.push_back(value);
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEGABYTE_PER_SECOND: f64 = 1e-6;

    fn at(milliseconds: u64) -> Time {
        Time(Duration::from_millis(milliseconds))
    }

    /// Sends a burst at once, which arrives `took` later.
    fn burst(link: &mut LinkSpeed, epoch: u64, bytes: u64, took: u64) {
        let mut burst = Burst::begin(at(epoch * 1000));
        burst.add(bytes);
        link.ended(Epoch(epoch), &burst);
        link.acknowledged(Epoch(epoch), at(epoch * 1000 + took));
    }

    fn assert_speed(link: &LinkSpeed, expected: f64) {
        let found = link.seconds_per_byte().unwrap();
        assert!((found - expected).abs() < expected / 100.0, "{found}, not {expected}");
    }

    #[test]
    fn the_delay_is_not_the_bytes_fault() {
        let mut link = LinkSpeed::default();
        assert_eq!(link.seconds_per_byte(), None);
        burst(&mut link, 1, 1000, 50);
        assert_eq!(link.seconds_per_byte(), None);
        burst(&mut link, 2, 100_000, 150);
        assert_speed(&link, MEGABYTE_PER_SECOND);
    }

    #[test]
    fn one_late_answer_changes_nothing() {
        let mut link = LinkSpeed::default();
        for epoch in 1..10 {
            burst(&mut link, epoch, 100_000, if epoch == 5 { 900 } else { 100 });
        }
        assert_speed(&link, MEGABYTE_PER_SECOND);
    }

    #[test]
    fn a_busy_machine_is_no_slow_link() {
        let mut link = LinkSpeed::default();
        for epoch in 1..16 {
            burst(&mut link, epoch, 100_000, if epoch % 4 == 0 { 100 } else { 400 });
        }
        assert_speed(&link, MEGABYTE_PER_SECOND);
    }

    #[test]
    fn the_encoders_time_is_not_the_links() {
        let mut link = LinkSpeed::default();
        let mut burst = Burst::begin(at(0));
        burst.add(100_000);
        burst.encoded(Duration::from_millis(400));
        link.ended(Epoch(1), &burst);
        link.acknowledged(Epoch(1), at(500));
        assert_speed(&link, MEGABYTE_PER_SECOND);
    }

    #[test]
    fn the_first_synchronisation_counts_by_its_writes() {
        let mut link = LinkSpeed::default();
        for _ in 0..8 {
            link.sent_in_bulk(1 << 20, Duration::from_secs_f64(1.048_576));
        }
        assert_speed(&link, MEGABYTE_PER_SECOND);
    }
}
