//! MAD header.

use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    network_endian::{U16, U32, U64},
};

/// Octets of a whole MAD.
pub const MAD_LEN: usize = 256;

/// Common MAD header.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct MadHeader {
    /// 1.
    pub base_version: u8,
    /// Management class.
    pub mgmt_class: u8,
    /// Version of the class.
    pub class_version: u8,
    /// Method; bit 7 says response.
    pub method: u8,
    /// Status.
    pub status: U16,
    /// Class-specific; hop pointer and count of a directed-route SMP.
    pub class_specific: U16,
    /// Transaction.
    pub tid: U64,
    /// Attribute.
    pub attribute_id: U16,
    /// Reserved.
    pub reserved: U16,
    /// Attribute modifier.
    pub attribute_modifier: U32,
}

const _: () = assert!(size_of::<MadHeader>() == 24);
