//! Variant CRC (IBTA vol. 1, 7.8.2): CRC-16 over a whole native packet, from LRH to ICRC. Every
//! link computes it anew.
//!
//! ```text
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  |      VCRC, low octet first    |   x^16 + x^12 + x^3 + x + 1, reflected; ones before, inverted after
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! ```

/// Octets of the VCRC.
pub const VCRC_LEN: usize = 2;

/// The polynomial 0x100b, reflected: its low bit stands for the highest power.
const POLYNOMIAL: u16 = 0xd008;

/// What each octet leaves in the register.
static TABLE: [u16; 256] = {
    let mut table = [0; 256];
    let mut octet = 0;
    while octet < 256 {
        let mut register = octet as u16;
        let mut bit = 0;
        while bit < 8 {
            register = (register >> 1) ^ (POLYNOMIAL * (register & 1));
            bit += 1;
        }
        table[octet] = register;
        octet += 1;
    }
    table
};

/// The two octets as they go out, for a packet from LRH to ICRC.
pub fn vcrc(octets: &[u8]) -> [u8; VCRC_LEN] {
    let register = octets.iter().fold(u16::MAX, |register, &octet| {
        (register >> 8) ^ TABLE[usize::from(register as u8 ^ octet)]
    });
    (!register).to_le_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;
    use hex_literal::hex;
    use proptest::prelude::*;
    use std::vec::Vec;

    /// The definition, bit by bit.
    fn by_definition(octets: &[u8]) -> [u8; 2] {
        let register = octets.iter().fold(u16::MAX, |register, &octet| {
            (0..8).fold(register ^ u16::from(octet), |r, _| (r >> 1) ^ (0xd008 * (r & 1)))
        });
        (!register).to_le_bytes()
    }

    #[test]
    fn example() {
        // The packet of IBTA vol. 1, 7.8.3, on lane 7; the VCRC is by long division of the
        // polynomials.
        let packet = hex!(
            "7012375c000e17d2 0a202487 0087b1b3 000dec2a 01710a1c015d4002 38f27a05 0000000e"
            "bb884d85fd5cfba4728bc0690ed4 0000 9625b75a"
        );
        assert_eq!(vcrc(&packet), hex!("45fa"));
    }

    proptest! {
        #[test]
        fn any_octets_as_the_definition_has_it(octets: Vec<u8>) {
            prop_assert_eq!(vcrc(&octets), by_definition(&octets));
        }
    }
}
