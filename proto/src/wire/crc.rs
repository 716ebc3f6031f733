//! CRC32C (CRC-32/ISCSI), the checksum of MPA (RFC 5044 §4.4).
//!
//! The only file that names the crate behind it. With the feature `std` it uses what the CPU
//! offers; without, plain tables.
//!
//! On the wire the four octets of a CRC are its little-endian form: [`u32::to_le_bytes`]
//! (RFC 5044 Figure 5 ends in `52 23 99 83`).

use crc_fast::{CrcAlgorithm, Digest};

/// CRC32C of `data` in one go.
///
/// `crc32c(b"123456789")` is `0xe3069283`, on the wire `83 92 06 e3`.
#[inline]
pub fn crc32c(data: &[u8]) -> u32 {
    crc_fast::crc32_iscsi(data)
}

/// CRC32C of octets that come piece by piece.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Crc32c {
    /// The shift register, before the final inversion.
    state: u32,
}

impl Crc32c {
    /// Nothing summed up yet.
    pub const fn new() -> Self {
        Self { state: u32::MAX }
    }

    /// Takes the next piece; its length does not matter to the result.
    #[inline]
    pub fn update(&mut self, data: &[u8]) {
        let mut digest =
            Digest::new_with_init_state(CrcAlgorithm::Crc32Iscsi, u64::from(self.state));
        digest.update(data);
        // The register of a 32-bit CRC: the upper half is zero.
        self.state = digest.get_state() as u32;
    }

    /// The CRC of everything taken so far. More may follow.
    pub const fn finish(&self) -> u32 {
        !self.state
    }
}

impl Default for Crc32c {
    fn default() -> Self {
        Self::new()
    }
}
