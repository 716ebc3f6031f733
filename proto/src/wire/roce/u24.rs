//! Numbers of 24 bits: queue pairs, PSNs, MSNs.

/// The low 24 bits of `number`, big endian.
#[inline]
pub(super) const fn to_bytes(number: u32) -> [u8; 3] {
    let [_, a, b, c] = number.to_be_bytes();
    [a, b, c]
}

/// The number, below 2^24.
#[inline]
pub(super) const fn from_bytes(octets: [u8; 3]) -> u32 {
    let [a, b, c] = octets;
    u32::from_be_bytes([0, a, b, c])
}
