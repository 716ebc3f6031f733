//! FLUSH extended transport header.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned, network_endian::U32};

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
