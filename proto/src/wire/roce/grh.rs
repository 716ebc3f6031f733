//! Global route header (IBTA vol. 1, 8.3): an IPv6 header in form. In RoCEv1 it stands behind the
//! EtherType, in native InfiniBand behind the LRH.
//!
//! ```text
//!   0                   1                   2                   3
//!   0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  | IPVer | Traffic Class |              Flow Label               |
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  |         Payload Length        |  Next Header  |   Hop Limit   |
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  +                           SGID (128)                          +
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  +                           DGID (128)                          +
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! ```

use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    network_endian::{U16, U32},
};

use crate::wire::ids::Gid;

/// NxtHdr of a GRH with a BTH behind it.
pub const NEXT_HEADER_BTH: u8 = 0x1b;
/// IPVer.
pub const VERSION: u8 = 6;
/// Hop limit of [`Grh::new`].
pub const HOP_LIMIT: u8 = 64;

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
    /// [`NEXT_HEADER_BTH`]: a BTH follows.
    pub next_header: u8,
    /// Hop limit.
    pub hop_limit: u8,
    /// Source.
    pub sgid: Gid,
    /// Destination.
    pub dgid: Gid,
}

const _: () = assert!(size_of::<Grh>() == 40);

impl Grh {
    /// Octets on the wire.
    pub const LEN: usize = 40;

    /// A header in front of a BTH, with traffic class and flow label 0 and [`HOP_LIMIT`] hops.
    /// `payload_len` counts the octets from the BTH to the ICRC, both included.
    #[inline]
    pub const fn new(sgid: Gid, dgid: Gid, payload_len: u16) -> Self {
        Self {
            word: U32::new((VERSION as u32) << 28),
            payload_len: U16::new(payload_len),
            next_header: NEXT_HEADER_BTH,
            hop_limit: HOP_LIMIT,
            sgid,
            dgid,
        }
    }

    /// With another traffic class.
    #[must_use]
    #[inline]
    pub const fn with_traffic_class(mut self, class: u8) -> Self {
        self.word = U32::new((self.word.get() & !0x0ff0_0000) | (class as u32) << 20);
        self
    }

    /// With another flow label, of which the low 20 bits are taken.
    #[must_use]
    #[inline]
    pub const fn with_flow_label(mut self, label: u32) -> Self {
        self.word = U32::new((self.word.get() & !0x000f_ffff) | (label & 0x000f_ffff));
        self
    }

    /// With another hop limit.
    #[must_use]
    #[inline]
    pub const fn with_hop_limit(mut self, hops: u8) -> Self {
        self.hop_limit = hops;
        self
    }

    /// IPVer: 6.
    #[inline]
    pub const fn version(&self) -> u8 {
        (self.word.get() >> 28) as u8
    }

    /// Traffic class: DSCP in the upper six bits, ECN in the lower two.
    #[inline]
    pub const fn traffic_class(&self) -> u8 {
        (self.word.get() >> 20) as u8
    }

    /// Flow label, 20 bits.
    #[inline]
    pub const fn flow_label(&self) -> u32 {
        self.word.get() & 0x000f_ffff
    }

    /// Octets behind this header, the ICRC included.
    #[inline]
    pub const fn payload_len(&self) -> usize {
        self.payload_len.get() as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use core::net::IpAddr;
    use hex_literal::hex;
    use proptest::prelude::*;

    #[test]
    fn example() {
        let wire = hex!(
            "61200345 0028 1b 40"
            "00000000000000000000ffffc0000201 00000000000000000000ffffc0000202"
        );
        let [sgid, dgid] = [1, 2].map(|host| Gid::from(IpAddr::from([192, 0, 2, host])));
        let grh = Grh::new(sgid, dgid, 40).with_traffic_class(0x12).with_flow_label(0x345);
        assert_eq!(grh.as_bytes(), wire);
        let found = Grh::read_from_bytes(&wire).unwrap();
        assert_eq!((found.version(), found.traffic_class(), found.flow_label()), (6, 0x12, 0x345));
        assert_eq!((found.payload_len(), found.next_header), (40, NEXT_HEADER_BTH));
        assert_eq!((found.hop_limit, found.sgid, found.dgid), (HOP_LIMIT, sgid, dgid));
    }

    proptest! {
        #[test]
        fn round_trip(
            sgid: [u8; 16], dgid: [u8; 16], len: u16, class: u8, label in 0u32..1 << 20, hops: u8,
        ) {
            let grh = Grh::new(Gid(sgid), Gid(dgid), len)
                .with_flow_label(label)
                .with_traffic_class(class)
                .with_hop_limit(hops);
            let found = Grh::read_from_bytes(grh.as_bytes()).unwrap();
            prop_assert_eq!((found.version(), found.next_header), (VERSION, NEXT_HEADER_BTH));
            prop_assert_eq!((found.traffic_class(), found.flow_label()), (class, label));
            prop_assert_eq!((found.payload_len(), found.hop_limit), (len.into(), hops));
            prop_assert_eq!((found.sgid.0, found.dgid.0), (sgid, dgid));
        }

        #[test]
        fn any_bytes_survive(wire: [u8; 40]) {
            let grh = Grh::read_from_bytes(&wire).unwrap();
            prop_assert_eq!(grh.as_bytes(), wire);
            let again = grh
                .with_traffic_class(grh.traffic_class())
                .with_flow_label(grh.flow_label())
                .with_hop_limit(grh.hop_limit);
            prop_assert_eq!(again, grh);
        }
    }
}
