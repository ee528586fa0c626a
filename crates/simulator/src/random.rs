//! The one source of chance: a seed gives the same numbers for ever.

use rand_chacha::ChaCha8Rng;
use rand_chacha::rand_core::{RngCore, SeedableRng};
use std::time::Duration;

/// ChaCha8, whose stream is the same on every platform and in every version;
/// what is made of the stream is here, so that no library's update changes it.
#[derive(Clone, Debug)]
pub struct Random(ChaCha8Rng);

impl Random {
    /// The numbers of `seed`; each `stream` of a seed is independent.
    pub fn new(seed: u64, stream: u64) -> Random {
        let mut key = [0; 32];
        key[..8].copy_from_slice(&seed.to_le_bytes());
        key[8..16].copy_from_slice(&stream.to_le_bytes());
        Random(ChaCha8Rng::from_seed(key))
    }

    /// A number below `bound`, which is not zero.
    pub fn below(&mut self, bound: u64) -> u64 {
        ((u128::from(self.0.next_u64()) * u128::from(bound)) >> 64) as u64
    }

    /// An index into a collection of `length`, which is not zero.
    pub fn index(&mut self, length: usize) -> usize {
        self.below(length as u64) as usize
    }

    /// True in so many cases of a hundred.
    pub fn percent(&mut self, chance: u64) -> bool {
        self.below(100) < chance
    }

    /// Microseconds from `low` to below `high`.
    pub fn micros(&mut self, low: u64, high: u64) -> Duration {
        Duration::from_micros(low + self.below(high - low))
    }

    /// Milliseconds from `low` to below `high`, fractions included.
    pub fn millis(&mut self, low: u64, high: u64) -> Duration {
        self.micros(low * 1000, high * 1000)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_the_same_numbers_for_ever() {
        let mut random = Random::new(7, 0);
        let numbers: Vec<u64> = (0..6).map(|_| random.below(1000)).collect();
        assert_eq!(numbers, [764, 465, 5, 301, 386, 336]);
    }
}
