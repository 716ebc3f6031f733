//! Invalidate extended transport header.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned, network_endian::U32};

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
