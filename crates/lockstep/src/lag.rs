//! The measure of how far the backup is behind (VMware FT, 3.2).

use std::collections::VecDeque;
use std::time::Duration;

/// Number of the latest measurements that count.
const SAMPLES: usize = 1_000;

/// A backup that is further behind than this is waited for: a fail-over would take as long.
pub const MOST_LAG: Duration = Duration::from_secs(2);

/// Measurements of the execution lag.
#[derive(Clone, Debug, Default)]
pub struct Lag {
    samples: VecDeque<Duration>,
}

impl Lag {
    /// Creates one without measurements.
    pub fn new() -> Lag {
        Lag::default()
    }

    /// A measurement: what [`crate::Feed::behind_since`] says was so long ago.
    pub fn measured(&mut self, lag: Duration) {
        if self.samples.len() == SAMPLES {
            self.samples.pop_front();
        }
        self.samples.push_back(lag);
    }

    /// The lag that this part (0 to 1) of the latest measurements does not exceed.
    pub fn quantile(&self, part: f64) -> Option<Duration> {
        let mut sorted: Vec<_> = self.samples.iter().copied().collect();
        sorted.sort_unstable();
        let last = sorted.len().checked_sub(1)?;
        sorted.get((last as f64 * part.clamp(0.0, 1.0)).round() as usize).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles() {
        let mut lag = Lag::new();
        assert_eq!(lag.quantile(0.5), None);
        (0..=100).for_each(|ms| lag.measured(Duration::from_millis(ms)));
        assert_eq!(lag.quantile(0.99), Some(Duration::from_millis(99)));
    }
}
