//! Atomic request and acknowledgement headers (IBTA vol. 1, 9.3.4 and 9.5.3).
//!
//! AtomicETH, of compare-and-swap and fetch-and-add:
//!
//! ```text
//!   0                   1                   2                   3
//!   0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  +             Virtual Address (64), a multiple of 8             +
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  |                             R_Key                             |
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  +                    Swap (or Add) Data (64)                    +
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  +               Compare Data (64), unused by fetch-and-add      +
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! ```
//!
//! AtomicAckETH, behind the AETH of the answer:
//!
//! ```text
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  +                 Original Remote Data (64)                     +
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! ```

use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    network_endian::{U32, U64},
};

use crate::wire::ids::RKey;

/// Atomic extended transport header.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct AtomicEth {
    /// Address of the word.
    pub va: U64,
    /// The region's remote key.
    pub rkey: U32,
    /// What to store or to add.
    pub swap_add: U64,
    /// What to compare with.
    pub compare: U64,
}

const _: () = assert!(size_of::<AtomicEth>() == 28);

impl AtomicEth {
    /// Octets on the wire.
    pub const LEN: usize = 28;

    /// A header for the word at address `va`, which must be a multiple of 8. `swap_add` is what to
    /// store or to add; fetch-and-add has no use for `compare`.
    #[inline]
    pub const fn new(va: u64, rkey: RKey, swap_add: u64, compare: u64) -> Self {
        Self {
            va: U64::new(va),
            rkey: U32::new(rkey.0),
            swap_add: U64::new(swap_add),
            compare: U64::new(compare),
        }
    }

    /// Address of the word in the region; one that is no multiple of 8 is an invalid request.
    #[inline]
    pub const fn va(&self) -> u64 {
        self.va.get()
    }

    /// The region's remote key.
    #[inline]
    pub const fn rkey(&self) -> RKey {
        RKey(self.rkey.get())
    }

    /// What to store if the comparison holds, or what to add.
    #[inline]
    pub const fn swap_add(&self) -> u64 {
        self.swap_add.get()
    }

    /// What the word must hold to be swapped.
    #[inline]
    pub const fn compare(&self) -> u64 {
        self.compare.get()
    }
}

/// Atomic acknowledge extended transport header.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct AtomicAckEth {
    /// What the word held before.
    pub original: U64,
}

const _: () = assert!(size_of::<AtomicAckEth>() == 8);

impl AtomicAckEth {
    /// Octets on the wire.
    pub const LEN: usize = 8;

    /// A header that tells what the word held before.
    #[inline]
    pub const fn new(original: u64) -> Self {
        Self { original: U64::new(original) }
    }

    /// What the word held before the operation.
    #[inline]
    pub const fn original(&self) -> u64 {
        self.original.get()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hex_literal::hex;
    use proptest::prelude::*;

    #[test]
    fn request_example() {
        let wire = hex!("00007f0000001000 00001234 0000000000000002 0000000000000001");
        let eth = AtomicEth::new(0x7f00_0000_1000, RKey(0x1234), 2, 1);
        assert_eq!(eth.as_bytes(), wire);
        let found = AtomicEth::read_from_bytes(&wire).unwrap();
        assert_eq!((found.va(), found.rkey()), (0x7f00_0000_1000, RKey(0x1234)));
        assert_eq!((found.swap_add(), found.compare()), (2, 1));
    }

    #[test]
    fn acknowledgement_example() {
        let wire = hex!("000000000000002a");
        assert_eq!(AtomicAckEth::new(42).as_bytes(), wire);
        assert_eq!(AtomicAckEth::read_from_bytes(&wire).unwrap().original(), 42);
    }

    proptest! {
        #[test]
        fn round_trip(va: u64, rkey: u32, swap_add: u64, compare: u64) {
            let eth = AtomicEth::new(va, RKey(rkey), swap_add, compare);
            let found = AtomicEth::read_from_bytes(eth.as_bytes()).unwrap();
            prop_assert_eq!((found.va(), found.rkey().0), (va, rkey));
            prop_assert_eq!((found.swap_add(), found.compare()), (swap_add, compare));
            let found = AtomicAckEth::read_from_bytes(AtomicAckEth::new(va).as_bytes()).unwrap();
            prop_assert_eq!(found.original(), va);
        }

        #[test]
        fn any_bytes_survive(wire: [u8; 28]) {
            let eth = AtomicEth::read_from_bytes(&wire).unwrap();
            prop_assert_eq!(eth.as_bytes(), wire);
            let again = AtomicEth::new(eth.va(), eth.rkey(), eth.swap_add(), eth.compare());
            prop_assert_eq!(again, eth);
        }
    }
}
