//! Reliable datagram extended transport header.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

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
