//! Local route header (IBTA vol. 1, 7.7).
//!
//! ```text
//!   0                   1                   2                   3
//!   0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  |   VL  |  LVer |   SL  |rsv|LNH|  Destination Local Identifier |
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  | reserved|    Packet Length    |    Source Local Identifier    |
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! ```

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned, network_endian::U16};

/// LNH: a raw packet with an EtherType.
pub const RAW: u8 = 0;
/// LNH: a raw IPv6 packet.
pub const RAW_IPV6: u8 = 1;
/// LNH: a BTH follows.
pub const BTH: u8 = 2;
/// LNH: a GRH follows, and a BTH behind it.
pub const GRH: u8 = 3;

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
    /// Octets on the wire.
    pub const LEN: usize = 8;

    /// A header of virtual lane 0, link version 0, service level 0. `next_header` is [`BTH`] or
    /// [`GRH`] and so on; `octets` counts from the LRH to the ICRC, both included, and is taken in
    /// whole words up to 2047 of them.
    #[inline]
    pub const fn new(next_header: u8, dlid: u16, slid: u16, octets: usize) -> Self {
        Self {
            lane: 0,
            service: next_header & 3,
            dlid: U16::new(dlid),
            len: U16::new((octets / 4) as u16 & 0x7ff),
            slid: U16::new(slid),
        }
    }

    /// With another virtual lane, of which the low 4 bits are taken.
    #[must_use]
    #[inline]
    pub const fn with_virtual_lane(mut self, lane: u8) -> Self {
        self.lane = (self.lane & 0x0f) | (lane << 4);
        self
    }

    /// With another service level, of which the low 4 bits are taken.
    #[must_use]
    #[inline]
    pub const fn with_service_level(mut self, level: u8) -> Self {
        self.service = (self.service & 0x0f) | (level << 4);
        self
    }

    /// LNH, what follows: [`RAW`], [`RAW_IPV6`], [`BTH`] or [`GRH`].
    #[inline]
    pub const fn next_header(&self) -> u8 {
        self.service & 3
    }

    /// Virtual lane, which switches may change: the ICRC takes it as ones.
    #[inline]
    pub const fn virtual_lane(&self) -> u8 {
        self.lane >> 4
    }

    /// LVer: link version, 0.
    #[inline]
    pub const fn link_version(&self) -> u8 {
        self.lane & 0x0f
    }

    /// Service level.
    #[inline]
    pub const fn service_level(&self) -> u8 {
        self.service >> 4
    }

    /// Destination local identifier.
    #[inline]
    pub const fn dlid(&self) -> u16 {
        self.dlid.get()
    }

    /// Source local identifier.
    #[inline]
    pub const fn slid(&self) -> u16 {
        self.slid.get()
    }

    /// Octets from the LRH to the ICRC, both included.
    #[inline]
    pub const fn packet_len(&self) -> usize {
        (self.len.get() & 0x7ff) as usize * 4
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hex_literal::hex;
    use proptest::prelude::*;

    #[test]
    fn example() {
        // A management datagram on lane 15: 288 octets.
        let wire = hex!("f0 02 ffff 0048 0001");
        let lrh = Lrh::new(BTH, 0xffff, 1, 288).with_virtual_lane(15);
        assert_eq!(lrh.as_bytes(), wire);
        let found = Lrh::read_from_bytes(&wire).unwrap();
        assert_eq!((found.virtual_lane(), found.link_version(), found.service_level()), (15, 0, 0));
        assert_eq!((found.next_header(), found.packet_len()), (BTH, 288));
        assert_eq!((found.dlid(), found.slid()), (0xffff, 1));
    }

    proptest! {
        #[test]
        fn round_trip(
            next in 0u8..4, dlid: u16, slid: u16, words in 0usize..1 << 11, lane in 0u8..16,
            level in 0u8..16,
        ) {
            let lrh = Lrh::new(next, dlid, slid, words * 4)
                .with_virtual_lane(lane)
                .with_service_level(level);
            let found = Lrh::read_from_bytes(lrh.as_bytes()).unwrap();
            prop_assert_eq!((found.next_header(), found.packet_len()), (next, words * 4));
            prop_assert_eq!((found.dlid(), found.slid()), (dlid, slid));
            prop_assert_eq!((found.virtual_lane(), found.service_level()), (lane, level));
        }

        #[test]
        fn any_bytes_survive(wire: [u8; 8]) {
            let lrh = Lrh::read_from_bytes(&wire).unwrap();
            prop_assert_eq!(lrh.as_bytes(), wire);
            let again = lrh
                .with_virtual_lane(lrh.virtual_lane())
                .with_service_level(lrh.service_level());
            prop_assert_eq!(again, lrh);
            prop_assert!(lrh.packet_len() <= 8188);
        }
    }
}
