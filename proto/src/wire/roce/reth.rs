//! RDMA extended transport header (IBTA vol. 1, 9.3.3): where a WRITE, READ, FLUSH or atomic WRITE
//! goes.
//!
//! ```text
//!   0                   1                   2                   3
//!   0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  +                      Virtual Address (64)                     +
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  |                             R_Key                             |
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  |                           DMA Length                          |
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! ```

use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    network_endian::{U32, U64},
};

use crate::wire::ids::RKey;

/// RDMA extended transport header.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct Reth {
    /// Address of the first octet.
    pub va: U64,
    /// The region's remote key.
    pub rkey: U32,
    /// Octets of the whole message.
    pub len: U32,
}

const _: () = assert!(size_of::<Reth>() == 16);

impl Reth {
    /// Octets on the wire.
    pub const LEN: usize = 16;

    /// A header for a message of `len` octets (at most 2^31) at address `va`.
    #[inline]
    pub const fn new(va: u64, rkey: RKey, len: u32) -> Self {
        Self { va: U64::new(va), rkey: U32::new(rkey.0), len: U32::new(len) }
    }

    /// Address of the first octet in the region.
    #[inline]
    pub const fn va(&self) -> u64 {
        self.va.get()
    }

    /// The region's remote key.
    #[inline]
    pub const fn rkey(&self) -> RKey {
        RKey(self.rkey.get())
    }

    /// Octets of the whole message, whatever this packet carries of them.
    #[inline]
    pub const fn dma_len(&self) -> u32 {
        self.len.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hex_literal::hex;
    use proptest::prelude::*;

    #[test]
    fn example() {
        let wire = hex!("00007f0000001000 00001234 00000008");
        let reth = Reth::new(0x7f00_0000_1000, RKey(0x1234), 8);
        assert_eq!(reth.as_bytes(), wire);
        let found = Reth::read_from_bytes(&wire).unwrap();
        assert_eq!((found.va(), found.rkey()), (0x7f00_0000_1000, RKey(0x1234)));
        assert_eq!(found.dma_len(), 8);
    }

    proptest! {
        #[test]
        fn round_trip(va: u64, rkey: u32, len: u32) {
            let found = Reth::read_from_bytes(Reth::new(va, RKey(rkey), len).as_bytes()).unwrap();
            prop_assert_eq!((found.va(), found.rkey().0, found.dma_len()), (va, rkey, len));
        }

        #[test]
        fn any_bytes_survive(wire: [u8; 16]) {
            let reth = Reth::read_from_bytes(&wire).unwrap();
            prop_assert_eq!(reth.as_bytes(), wire);
            prop_assert_eq!(Reth::new(reth.va(), reth.rkey(), reth.dma_len()), reth);
        }
    }
}
