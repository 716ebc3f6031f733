//! Atomic request and acknowledgement headers.

use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    network_endian::{U32, U64},
};

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
