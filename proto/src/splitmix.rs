//! SplitMix64 (Steele, Lea and Flood 2014): random numbers by a seed, a counter well mixed. Nothing
//! to keep a secret with.

/// Step of the counter: 2^64 over the golden ratio.
pub(crate) const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// The next number; `state` is the seed at first.
pub(crate) const fn draw(state: &mut u64) -> u64 {
    *state = state.wrapping_add(STEP);
    mix(*state)
}

/// Every bit of `z` changes each bit of the result in half of the cases.
pub(crate) const fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
