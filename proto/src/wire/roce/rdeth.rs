//! Reliable datagram extended transport header (IBTA vol. 1, 9.3.1). Every packet of RD has it.
//!
//! ```text
//!   0                   1                   2                   3
//!   0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  |    reserved   |                   EE-Context                  |
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! ```

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::u24;

/// Reliable datagram extended transport header.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct Rdeth {
    /// Reserved.
    pub reserved: u8,
    /// End-to-end context.
    pub ee_context: [u8; 3],
}

const _: () = assert!(size_of::<Rdeth>() == 4);

impl Rdeth {
    /// Octets on the wire.
    pub const LEN: usize = 4;

    /// A header; of `ee_context` the low 24 bits go out.
    #[inline]
    pub const fn new(ee_context: u32) -> Self {
        Self { reserved: 0, ee_context: u24::to_bytes(ee_context) }
    }

    /// End-to-end context at the destination, 24 bits.
    #[inline]
    pub const fn ee_context(&self) -> u32 {
        u24::from_bytes(self.ee_context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hex_literal::hex;
    use proptest::prelude::*;

    #[test]
    fn example() {
        let wire = hex!("00 012345");
        assert_eq!(Rdeth::new(0x1_2345).as_bytes(), wire);
        assert_eq!(Rdeth::read_from_bytes(&wire).unwrap().ee_context(), 0x1_2345);
    }

    proptest! {
        #[test]
        fn round_trip(context in 0u32..1 << 24) {
            let found = Rdeth::read_from_bytes(Rdeth::new(context).as_bytes()).unwrap();
            prop_assert_eq!((found.ee_context(), found.reserved), (context, 0));
        }

        #[test]
        fn any_bytes_survive(wire: [u8; 4]) {
            let rdeth = Rdeth::read_from_bytes(&wire).unwrap();
            prop_assert_eq!(rdeth.as_bytes(), wire);
            prop_assert_eq!(Rdeth { reserved: wire[0], ..Rdeth::new(rdeth.ee_context()) }, rdeth);
        }
    }
}
