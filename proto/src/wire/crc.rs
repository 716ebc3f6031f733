//! CRC32C (CRC-32/ISCSI), the checksum of MPA (RFC 5044 §4.4).
//!
//! The only file that names the crate behind it. With the feature `std` that is `crc-fast`, which
//! uses what the CPU offers. Without, it is tables: `crc-fast` 1.10 does not build without std on
//! x86-64, and on no hosted target as a dependency (it insists on being a shared library too).
//!
//! On the wire the four octets of a CRC are its little-endian form: [`u32::to_le_bytes`]
//! (RFC 5044 Figure 5 ends in `52 23 99 83`).

/// CRC32C of `data` in one go.
///
/// ```
/// # use userdma_proto::wire::crc::crc32c;
/// assert_eq!(crc32c(b"123456789"), 0xe306_9283);
/// assert_eq!(crc32c(b"123456789").to_le_bytes(), [0x83, 0x92, 0x06, 0xe3]);
/// ```
#[inline]
pub fn crc32c(data: &[u8]) -> u32 {
    #[cfg(feature = "std")]
    return crc_fast::crc32_iscsi(data);
    #[cfg(not(feature = "std"))]
    return !tables::update(u32::MAX, data);
}

/// CRC32C of octets that come piece by piece.
///
/// ```
/// # use userdma_proto::wire::crc::{Crc32c, crc32c};
/// let mut crc = Crc32c::new();
/// crc.update(b"1234");
/// crc.update(b"56789");
/// assert_eq!(crc.finish(), crc32c(b"123456789"));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Crc32c {
    /// The shift register, before the final inversion.
    register: u32,
}

impl Crc32c {
    /// Nothing summed up yet.
    pub const fn new() -> Self {
        Self { register: u32::MAX }
    }

    /// Takes the next piece; where pieces begin and end does not matter to the result.
    #[inline]
    pub fn update(&mut self, data: &[u8]) {
        self.register = update(self.register, data);
    }

    /// The CRC of everything taken so far. More may follow.
    pub const fn finish(&self) -> u32 {
        !self.register
    }
}

impl Default for Crc32c {
    fn default() -> Self {
        Self::new()
    }
}

/// The register after `data` went through.
#[cfg(feature = "std")]
#[inline]
fn update(register: u32, data: &[u8]) -> u32 {
    use crc_fast::{CrcAlgorithm, Digest};

    let mut digest = Digest::new_with_init_state(CrcAlgorithm::Crc32Iscsi, u64::from(register));
    digest.update(data);
    // The register of a 32-bit CRC: the upper half is zero.
    digest.get_state() as u32
}

#[cfg(not(feature = "std"))]
use tables::update;

/// Eight octets a step by eight tables ("slicing by 8").
#[cfg(any(test, not(feature = "std")))]
mod tables {
    /// The polynomial of CRC32C, reflected: its low bit stands for the highest power.
    const POLYNOMIAL: u32 = 0x82f6_3b78;

    /// `TABLES[n][b]`: what octet `b` leaves in the register `n` octets later.
    static TABLES: [[u32; 256]; 8] = {
        let mut tables = [[0; 256]; 8];
        let mut octet = 0;
        while octet < 256 {
            let mut register = octet as u32;
            let mut bit = 0;
            while bit < 8 {
                let out = register & 1;
                register = (register >> 1) ^ (POLYNOMIAL * out);
                bit += 1;
            }
            tables[0][octet] = register;
            octet += 1;
        }
        let mut later = 1;
        while later < 8 {
            let mut octet = 0;
            while octet < 256 {
                let before = tables[later - 1][octet];
                tables[later][octet] = (before >> 8) ^ tables[0][(before & 0xff) as usize];
                octet += 1;
            }
            later += 1;
        }
        tables
    };

    /// The register after `data` went through.
    pub(super) fn update(mut register: u32, data: &[u8]) -> u32 {
        let (chunks, rest) = data.as_chunks::<8>();
        for chunk in chunks {
            let word = u64::from_le_bytes(*chunk) ^ u64::from(register);
            let octets = word.to_le_bytes().into_iter();
            // The first octet has seven more behind it.
            register = octets
                .zip(TABLES.iter().rev())
                .fold(0, |acc, (octet, table)| acc ^ table[usize::from(octet)]);
        }
        for &octet in rest {
            register = (register >> 8) ^ TABLES[0][((register ^ u32::from(octet)) & 0xff) as usize];
        }
        register
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hex_literal::hex;
    use proptest::prelude::*;
    use std::vec::Vec;

    /// Published examples: input, and the CRC as it goes out.
    #[rustfmt::skip]
    const EXAMPLES: &[(&str, &[u8], [u8; 4])] = &[
        ("RFC 3720 B.4: 32 zeros", &[0; 32], hex!("aa36918a")),
        ("RFC 3720 B.4: 32 ones", &[0xff; 32], hex!("43aba862")),
        ("RFC 3720 B.4: rising",
         &hex!("000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"), hex!("4e79dd46")),
        ("RFC 3720 B.4: falling",
         &hex!("1f1e1d1c1b1a191817161514131211100f0e0d0c0b0a09080706050403020100"), hex!("5cdb3f11")),
        ("RFC 3720 B.4: iSCSI Read(10)",
         &hex!("01c000000000000000000000000000001400000000000400000000140000001828000000000000000200000000000000"),
         hex!("563a96d9")),
        ("the check value of the CRC catalogue", b"123456789", hex!("839206e3")),
    ];

    #[test]
    fn published_examples() {
        for &(name, input, wire) in EXAMPLES {
            assert_eq!(crc32c(input).to_le_bytes(), wire, "{name}");
            assert_eq!((!tables::update(u32::MAX, input)).to_le_bytes(), wire, "{name}, tables");
        }
    }

    /// The definition, bit by bit.
    fn by_definition(data: &[u8]) -> u32 {
        !data.iter().fold(u32::MAX, |register, &octet| {
            (0..8).fold(register ^ u32::from(octet), |r, _| (r >> 1) ^ (0x82f6_3b78 * (r & 1)))
        })
    }

    #[test]
    fn every_length_up_to_beyond_the_widest_vector_path() {
        let data: Vec<u8> = (0..1200u32).map(|i| (i * 7 + i / 256) as u8).collect();
        for len in 0..data.len() {
            let want = by_definition(&data[..len]);
            assert_eq!(crc32c(&data[..len]), want, "{len} octets");
            assert_eq!(!tables::update(u32::MAX, &data[..len]), want, "{len} octets, tables");
        }
    }

    proptest! {
        #[test]
        fn pieces_make_the_whole(data: Vec<u8>, cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..5)) {
            let mut cuts: Vec<_> = cuts.iter().map(|cut| cut.index(data.len() + 1)).collect();
            cuts.extend([0, data.len()]);
            cuts.sort_unstable();
            let (mut crc, mut register) = (Crc32c::new(), u32::MAX);
            for pair in cuts.windows(2) {
                crc.update(&data[pair[0]..pair[1]]);
                register = tables::update(register, &data[pair[0]..pair[1]]);
            }
            prop_assert_eq!(crc.finish(), by_definition(&data));
            prop_assert_eq!(crc.finish(), crc32c(&data));
            prop_assert_eq!(!register, crc32c(&data));
        }
    }
}
