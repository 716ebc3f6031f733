//! XRC extended transport header.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

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
