//! Keys that nobody can guess.

use super::RegisterError;

/// Keys drawn from the system at once: a call costs about as much as a hundred keys.
const BATCH: usize = 64;

/// Unpredictable 32-bit numbers.
///
/// A peer that guesses a key reaches what it was not told of, so keys are neither counted up nor
/// drawn from a generator whose state could be worked out from the keys seen (RFC 5040 §8.1.1 and
/// RFC 5042 §6.1.1: hard to predict, sparse over the whole range). All come from the system.
#[derive(Default)]
pub(super) struct KeySource {
    batch: Vec<u8>,
}

impl KeySource {
    /// The next number, never 0.
    pub(super) fn next(&mut self) -> Result<u32, RegisterError> {
        loop {
            let Some((rest, key)) = self.batch.split_last_chunk::<4>() else {
                self.refill()?;
                continue;
            };
            let key = u32::from_ne_bytes(*key);
            let left = rest.len();
            self.batch.truncate(left);
            if key != 0 {
                return Ok(key);
            }
        }
    }

    fn refill(&mut self) -> Result<(), RegisterError> {
        let mut fresh = [0; BATCH * 4];
        getrandom::fill(&mut fresh).map_err(RegisterError::Random)?;
        self.batch.clear();
        self.batch.extend_from_slice(&fresh);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustc_hash::FxHashSet;

    #[test]
    fn keys_are_spread_over_all_bits() {
        let mut source = KeySource::default();
        let keys: Vec<u32> = (0..4096).map(|_| source.next().unwrap()).collect();
        assert!(!keys.contains(&0));
        // Two equal ones of 4096 are expected 0.002 times.
        assert!(keys.iter().collect::<FxHashSet<_>>().len() >= 4094);
        for bit in 0..32 {
            let ones = keys.iter().filter(|key| **key >> bit & 1 == 1).count();
            // 2048 ± 32 (σ); 10 σ never happens.
            assert!((1728..=2368).contains(&ones), "bit {bit}: {ones} ones of 4096");
        }
    }
}
