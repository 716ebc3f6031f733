//! Random numbers by a seed.

use alloc::vec::Vec;

use super::impairments::Probability;
use crate::splitmix::{STEP, draw, mix};

/// A generator.
#[derive(Debug, Clone)]
pub(super) struct Dice(u64);

impl Dice {
    /// One of the generators that a seed stands for.
    pub(super) const fn new(seed: u64, stream: u64) -> Self {
        Self(mix(seed ^ mix(stream.wrapping_add(STEP))))
    }

    pub(super) const fn draw(&mut self) -> u64 {
        draw(&mut self.0)
    }

    /// A number below `n`; 0 if `n` is 0.
    pub(super) const fn below(&mut self, n: u64) -> u64 {
        ((self.draw() as u128 * n as u128) >> 64) as u64
    }

    /// True once in `n` times on average.
    pub(super) const fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// `len` octets.
    pub(super) fn octets(&mut self, len: usize) -> Vec<u8> {
        let mut out = Vec::with_capacity(len + 8);
        while out.len() < len {
            out.extend_from_slice(&self.draw().to_le_bytes());
        }
        out.truncate(len);
        out
    }

    pub(super) fn chance(&mut self, p: Probability) -> bool {
        p > Probability::NEVER && self.below(Probability::ALWAYS.ppb().into()) < p.ppb().into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first numbers for seed 1234567 as published with the algorithm.
    #[test]
    fn numbers_are_those_of_splitmix64() {
        let mut dice = Dice(1_234_567);
        let found = [dice.draw(), dice.draw(), dice.draw()];
        assert_eq!(
            found,
            [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]
        );
    }

    #[test]
    fn chances_are_kept() {
        let mut dice = Dice::new(1, 1);
        let p = Probability::percent(5);
        let hits = (0..100_000).filter(|_| dice.chance(p)).count();
        assert!((4_700..5_300).contains(&hits), "{hits}");
        assert!(!dice.chance(Probability::NEVER) && dice.chance(Probability::ALWAYS));
    }
}
