//! XRC extended transport header (IBTA vol. 1, annex A14). Every request of XRC has it.
//!
//! ```text
//!   0                   1                   2                   3
//!   0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  |    reserved   |                     XRCSRQ                    |
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! ```

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::u24;

/// XRC extended transport header.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct Xrceth {
    /// Reserved.
    pub reserved: u8,
    /// Shared receive queue number.
    pub srq: [u8; 3],
}

const _: () = assert!(size_of::<Xrceth>() == 4);

impl Xrceth {
    /// Octets on the wire.
    pub const LEN: usize = 4;

    /// A header; of `srq` the low 24 bits go out.
    #[inline]
    pub const fn new(srq: u32) -> Self {
        Self { reserved: 0, srq: u24::to_bytes(srq) }
    }

    /// Number of the shared receive queue at the destination, 24 bits.
    #[inline]
    pub const fn srq(&self) -> u32 {
        u24::from_bytes(self.srq)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hex_literal::hex;
    use proptest::prelude::*;

    #[test]
    fn example() {
        let wire = hex!("00 000033");
        assert_eq!(Xrceth::new(0x33).as_bytes(), wire);
        assert_eq!(Xrceth::read_from_bytes(&wire).unwrap().srq(), 0x33);
    }

    proptest! {
        #[test]
        fn round_trip(srq in 0u32..1 << 24) {
            let found = Xrceth::read_from_bytes(Xrceth::new(srq).as_bytes()).unwrap();
            prop_assert_eq!((found.srq(), found.reserved), (srq, 0));
        }

        #[test]
        fn any_bytes_survive(wire: [u8; 4]) {
            let xrceth = Xrceth::read_from_bytes(&wire).unwrap();
            prop_assert_eq!(xrceth.as_bytes(), wire);
            prop_assert_eq!(Xrceth { reserved: wire[0], ..Xrceth::new(xrceth.srq()) }, xrceth);
        }
    }
}
