//! Invalidate extended transport header (IBTA vol. 1, 9.3.7): of SENDs with invalidate.
//!
//! ```text
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  |                             R_Key                             |
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! ```

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned, network_endian::U32};

use crate::wire::ids::RKey;

/// Invalidate extended transport header.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct Ieth {
    /// The key to revoke.
    pub rkey: U32,
}

const _: () = assert!(size_of::<Ieth>() == 4);

impl Ieth {
    /// Octets on the wire.
    pub const LEN: usize = 4;

    /// A header that revokes `rkey` at the receiver.
    #[inline]
    pub const fn new(rkey: RKey) -> Self {
        Self { rkey: U32::new(rkey.0) }
    }

    /// The receiver's key that is to be revoked.
    #[inline]
    pub const fn rkey(&self) -> RKey {
        RKey(self.rkey.get())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hex_literal::hex;
    use proptest::prelude::*;

    #[test]
    fn example() {
        let wire = hex!("0000abcd");
        assert_eq!(Ieth::new(RKey(0xabcd)).as_bytes(), wire);
        assert_eq!(Ieth::read_from_bytes(&wire).unwrap().rkey(), RKey(0xabcd));
    }

    proptest! {
        #[test]
        fn any_key_goes_round(rkey: u32) {
            let wire = rkey.to_be_bytes();
            let ieth = Ieth::new(RKey(rkey));
            prop_assert_eq!(ieth.as_bytes(), wire);
            prop_assert_eq!(Ieth::read_from_bytes(&wire).unwrap().rkey(), RKey(rkey));
        }
    }
}
