//! Immediate data (IBTA vol. 1, 9.3.6): four octets for the receiver's completion.
//!
//! ```text
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  |                         Immediate Data                        |
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! ```

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned, network_endian::U32};

/// Immediate data: four octets for the receiver's completion.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct ImmDt {
    /// The octets as a big-endian number.
    pub data: U32,
}

const _: () = assert!(size_of::<ImmDt>() == 4);

impl ImmDt {
    /// Octets on the wire.
    pub const LEN: usize = 4;

    /// The number goes out big endian.
    #[inline]
    pub const fn new(data: u32) -> Self {
        Self { data: U32::new(data) }
    }

    /// The octets as a big-endian number.
    #[inline]
    pub const fn data(&self) -> u32 {
        self.data.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hex_literal::hex;
    use proptest::prelude::*;

    #[test]
    fn example() {
        let wire = hex!("deadbeef");
        assert_eq!(ImmDt::new(0xdead_beef).as_bytes(), wire);
        assert_eq!(ImmDt::read_from_bytes(&wire).unwrap().data(), 0xdead_beef);
    }

    proptest! {
        #[test]
        fn any_number_goes_round(data: u32) {
            let wire = data.to_be_bytes();
            let immdt = ImmDt::new(data);
            prop_assert_eq!(immdt.as_bytes(), wire);
            prop_assert_eq!(ImmDt::read_from_bytes(&wire).unwrap().data(), data);
        }
    }
}
