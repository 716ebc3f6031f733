//! FLUSH extended transport header (IBTA vol. 1, annex A19), in front of a RETH.
//!
//! ```text
//!   0                   1                   2                   3
//!   0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  |                        reserved                   |SEL|  PLT  |
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! ```

use core::fmt;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned, network_endian::U32};

bitflags::bitflags! {
    /// PLT, the placement type: how far the octets must have come, 4 bits. Unknown ones survive.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct Placement: u8 {
        /// Every reader at the responder sees them.
        const GLOBAL_VISIBILITY = 0x1;
        /// They outlast a loss of power.
        const PERSISTENCE = 0x2;
        const _ = 0xf;
    }
}

/// SEL, the selectivity level: which octets are meant, 2 bits; open.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Selectivity(pub u8);

impl Selectivity {
    /// The range that the RETH names.
    pub const RANGE: Self = Self(0);
    /// The whole region that the RETH's key names.
    pub const REGION: Self = Self(1);
}

impl fmt::Debug for Selectivity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::RANGE => f.write_str("RANGE"),
            Self::REGION => f.write_str("REGION"),
            Self(code) => write!(f, "Selectivity({code:#x})"),
        }
    }
}

/// FLUSH extended transport header.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct Feth {
    /// Bits 3:0 placement type, bits 5:4 selectivity.
    pub bits: U32,
}

const _: () = assert!(size_of::<Feth>() == 4);

impl Feth {
    /// Octets on the wire.
    pub const LEN: usize = 4;

    /// A header; of `selectivity` the low 2 bits go out.
    #[inline]
    pub const fn new(placement: Placement, selectivity: Selectivity) -> Self {
        let bits = (placement.bits() & 0xf) | ((selectivity.0 & 3) << 4);
        Self { bits: U32::new(bits as u32) }
    }

    /// PLT: how far the octets must have come.
    #[inline]
    pub const fn placement(&self) -> Placement {
        Placement::from_bits_truncate(self.bits.get() as u8 & 0xf)
    }

    /// SEL: which octets are meant.
    #[inline]
    pub const fn selectivity(&self) -> Selectivity {
        Selectivity((self.bits.get() >> 4) as u8 & 3)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hex_literal::hex;
    use proptest::prelude::*;
    use std::format;

    #[test]
    fn example() {
        let wire = hex!("00000013");
        let placement = Placement::GLOBAL_VISIBILITY | Placement::PERSISTENCE;
        let feth = Feth::new(placement, Selectivity::REGION);
        assert_eq!(feth.as_bytes(), wire);
        let found = Feth::read_from_bytes(&wire).unwrap();
        assert_eq!(found.placement(), placement);
        assert_eq!(format!("{:?}", found.selectivity()), "REGION");
    }

    proptest! {
        #[test]
        fn round_trip(placement in 0u8..16, selectivity in 0u8..4) {
            let placement = Placement::from_bits_retain(placement);
            let feth = Feth::new(placement, Selectivity(selectivity));
            let found = Feth::read_from_bytes(feth.as_bytes()).unwrap();
            prop_assert_eq!((found.placement(), found.selectivity().0), (placement, selectivity));
        }

        #[test]
        fn any_bytes_survive(wire: [u8; 4]) {
            let feth = Feth::read_from_bytes(&wire).unwrap();
            prop_assert_eq!(feth.as_bytes(), wire);
            let again = Feth::new(feth.placement(), feth.selectivity());
            prop_assert_eq!(again.bits.get(), feth.bits.get() & 0x3f);
        }
    }
}
