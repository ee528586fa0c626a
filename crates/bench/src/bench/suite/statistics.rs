//! Medians, spread, and ratios.
//!
//! The spread is half the distance between the least and the greatest of the runs. With the
//! three or five runs that there are, quartiles would be made of one or two of them; this
//! hides nothing, and one bad run shows.

use crate::bench::workloads::Better;

/// Runs of one workload in one variant.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Summary {
    /// The middle one; the mean of the two middle ones of an even number.
    pub median: f64,
    /// The least.
    pub min: f64,
    /// The greatest.
    pub max: f64,
    /// Number of values.
    pub runs: usize,
}

impl Summary {
    /// Summary of `values`; none of nothing.
    pub fn of(values: &[f64]) -> Option<Summary> {
        let mut sorted = values.to_vec();
        sorted.sort_by(f64::total_cmp);
        let (&min, &max) = (sorted.first()?, sorted.last()?);
        let half = sorted.len() / 2;
        let median = match sorted.len() % 2 {
            0 => f64::midpoint(sorted[half - 1], sorted[half]),
            _ => sorted[half],
        };
        Some(Summary { median, min, max, runs: sorted.len() })
    }

    /// Half the distance between the least and the greatest.
    pub fn spread(&self) -> f64 {
        (self.max - self.min) / 2.0
    }
}

/// The median of `values`; none of nothing.
pub fn median(values: &[f64]) -> Option<f64> {
    Summary::of(values).map(|summary| summary.median)
}

/// The smallest of `values` that at least `share` of them do not exceed; none of nothing.
pub fn quantile(values: &[f64], share: f64) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let rank = (sorted.len() as f64 * share).ceil() as usize;
    sorted.get(rank.clamp(1, sorted.len().max(1)) - 1).copied()
}

/// Speed of `value` beside `base`: 1 is as fast, less is slower, whichever way the
/// figure is good. None if one of them is nothing, which no ratio can be made of.
pub fn ratio(value: f64, base: f64, better: Better) -> Option<f64> {
    let (above, below) = match better {
        Better::Higher => (value, base),
        Better::Lower => (base, value),
    };
    (above > 0.0 && below > 0.0).then(|| above / below)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn median_and_spread() {
        let three = Summary::of(&[9.0, 1.0, 2.0]).unwrap();
        assert_eq!((three.median, three.min, three.max, three.runs), (2.0, 1.0, 9.0, 3));
        assert_eq!(three.spread(), 4.0);
        assert_eq!(median(&[4.0, 1.0, 2.0, 3.0]), Some(2.5));
        assert_eq!(Summary::of(&[7.0]).unwrap().spread(), 0.0);
        assert_eq!(Summary::of(&[]), None);
    }

    #[test]
    fn quantiles_are_values_that_were_measured() {
        let values: Vec<f64> = (1..=200).rev().map(f64::from).collect();
        assert_eq!(quantile(&values, 0.5), Some(100.0));
        assert_eq!(quantile(&values, 0.99), Some(198.0));
        assert_eq!(quantile(&[7.0], 0.99), Some(7.0));
        assert_eq!(quantile(&[], 0.5), None);
    }

    #[test]
    fn slower_is_below_one_in_both_directions() {
        // Half as many a second, and twice the seconds.
        assert_eq!(ratio(50.0, 100.0, Better::Higher), Some(0.5));
        assert_eq!(ratio(20.0, 10.0, Better::Lower), Some(0.5));
        assert_eq!(ratio(10.0, 10.0, Better::Lower), Some(1.0));
        assert_eq!(ratio(1.0, 0.0, Better::Higher), None);
        assert_eq!(ratio(0.0, 1.0, Better::Higher), None);
    }
}
