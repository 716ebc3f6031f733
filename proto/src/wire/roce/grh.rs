//! Global route header.

use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    network_endian::{U16, U32},
};

use crate::wire::ids::Gid;

/// Global route header: an IPv6 header in form.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct Grh {
    /// IP version (6), traffic class, flow label.
    pub word: U32,
    /// Octets behind this header, the ICRC included.
    pub payload_len: U16,
    /// 0x1b: a BTH follows.
    pub next_header: u8,
    /// Hop limit.
    pub hop_limit: u8,
    /// Source.
    pub sgid: Gid,
    /// Destination.
    pub dgid: Gid,
}

const _: () = assert!(size_of::<Grh>() == 40);
