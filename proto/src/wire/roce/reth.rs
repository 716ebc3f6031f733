//! RDMA extended transport header: where a WRITE or READ goes.

use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    network_endian::{U32, U64},
};

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
