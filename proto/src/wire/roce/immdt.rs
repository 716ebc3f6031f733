//! Immediate data.

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
