//! Local route header.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned, network_endian::U16};

/// Local route header.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct Lrh {
    /// Virtual lane, link version.
    pub lane: u8,
    /// Service level, what follows (LNH).
    pub service: u8,
    /// Destination local identifier.
    pub dlid: U16,
    /// 4-octet words from here to the ICRC, 11 bits.
    pub len: U16,
    /// Source local identifier.
    pub slid: U16,
}

const _: () = assert!(size_of::<Lrh>() == 8);

impl Lrh {
    /// LNH: 0 raw, 1 IPv6 raw, 2 BTH, 3 GRH.
    pub const fn next_header(&self) -> u8 {
        self.service & 3
    }
    /// Virtual lane.
    pub const fn virtual_lane(&self) -> u8 {
        self.lane >> 4
    }
    /// Service level.
    pub const fn service_level(&self) -> u8 {
        self.service >> 4
    }
    /// Octets from the LRH to the ICRC, both included.
    pub fn packet_len(&self) -> usize {
        usize::from(self.len.get() & 0x7ff) * 4
    }
}
