//! A small generator for random schedules in tests.

/// The seed is the schedule.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        // Seeds that follow each other give sequences that do not; zero would stay zero.
        Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}
