//! Chance with a known seed, so that a failing run can be run again.

#[derive(Clone, Debug)]
pub struct Dice(u64);

impl Dice {
    pub fn new(seed: u64) -> Self {
        // Zero would stay zero for ever.
        Self(seed.max(1))
    }

    /// From 0 to one less than `below`.
    pub fn roll(&mut self, below: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % below.max(1)
    }
}
