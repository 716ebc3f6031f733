//! The header that every management datagram begins with (IBTA vol. 1, 13.4.3).
//!
//! ```text
//!   0                   1                   2                   3
//!   0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  |  BaseVersion  |   MgmtClass   |  ClassVersion |R|    Method   |
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  |             Status            |        Class-specific         |
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  +                      Transaction ID (64)                      +
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  |          AttributeID          |            Reserved           |
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  |                       AttributeModifier                       |
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! ```
//!
//! In a directed-route SMP bit 15 of the status is D, the direction, and the class-specific octets
//! are the hop pointer and the hop count (IBTA vol. 1, 14.2.1.2).

use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    network_endian::{U16, U32, U64},
};

use super::{CLASS_CM, CLASS_SM_DIRECTED};

/// Octets of a whole MAD: the header and 232 more.
pub const MAD_LEN: usize = 256;

/// Common MAD header.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct MadHeader {
    /// [`Self::BASE_VERSION`], if this is a MAD.
    pub base_version: u8,
    /// Management class: [`CLASS_CM`] and its like.
    pub mgmt_class: u8,
    /// Version of the class: 2 for CM and SA, 1 for SMPs.
    pub class_version: u8,
    /// Method; bit 7 says response.
    pub method: u8,
    /// Status of a response; bit 15 of a directed-route SMP is its direction.
    pub status: U16,
    /// Class-specific; hop pointer and hop count of a directed-route SMP.
    pub class_specific: U16,
    /// Transaction: what a response has in common with its request.
    pub tid: U64,
    /// Attribute: what the body is.
    pub attribute_id: U16,
    /// Reserved.
    pub reserved: U16,
    /// Attribute modifier: which of several such attributes.
    pub attribute_modifier: U32,
}

const _: () = assert!(size_of::<MadHeader>() == 24);

impl MadHeader {
    /// Octets on the wire.
    pub const LEN: usize = 24;
    /// The only version there is.
    pub const BASE_VERSION: u8 = 1;
    /// Bit of the method: this is a response.
    pub const RESPONSE: u8 = 0x80;
    /// Bit of a directed-route SMP's status: it is on its way back.
    pub const DIRECTION: u16 = 0x8000;

    /// Header of a MAD; status, class-specific octets and attribute modifier are zero.
    pub fn new(mgmt_class: u8, class_version: u8, method: u8, tid: u64, attribute: u16) -> Self {
        Self {
            base_version: Self::BASE_VERSION,
            mgmt_class,
            class_version,
            method,
            status: 0.into(),
            class_specific: 0.into(),
            tid: tid.into(),
            attribute_id: attribute.into(),
            reserved: 0.into(),
            attribute_modifier: 0.into(),
        }
    }

    /// Header of a communication management message: class 7 in its version 2.
    pub fn cm(method: u8, tid: u64, attribute: u16) -> Self {
        Self::new(CLASS_CM, super::cm::CLASS_VERSION, method, tid, attribute)
    }

    /// Status: zero is good. D, the direction of a directed-route SMP, is not part of it.
    pub fn status(&self) -> u16 {
        match self.mgmt_class {
            CLASS_SM_DIRECTED => self.status.get() & !Self::DIRECTION,
            _ => self.status.get(),
        }
    }

    /// Transaction.
    pub fn tid(&self) -> u64 {
        self.tid.get()
    }

    /// Attribute: what the body is.
    pub fn attribute_id(&self) -> u16 {
        self.attribute_id.get()
    }

    /// Attribute modifier: which of several such attributes.
    pub fn attribute_modifier(&self) -> u32 {
        self.attribute_modifier.get()
    }

    /// Whether the method is a response.
    pub const fn is_response(&self) -> bool {
        self.method & Self::RESPONSE != 0
    }

    /// Hop pointer and hop count of a directed-route SMP; `None` for every other class.
    pub fn hops(&self) -> Option<(u8, u8)> {
        let [pointer, count] = self.class_specific.get().to_be_bytes();
        (self.mgmt_class == CLASS_SM_DIRECTED).then_some((pointer, count))
    }

    /// D: whether a directed-route SMP is on its way back; `None` for every other class.
    pub fn returning(&self) -> Option<bool> {
        let set = self.status.get() & Self::DIRECTION != 0;
        (self.mgmt_class == CLASS_SM_DIRECTED).then_some(set)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::mad::{CLASS_SA, METHOD_SEND, cm};
    use hex_literal::hex;
    use proptest::prelude::*;

    #[test]
    fn a_req_of_linux() {
        // rping's REQ.
        let octets = hex!("01070203 00000000 0000000c88b104c8 0010 0000 00000000");
        let header = MadHeader::cm(METHOD_SEND, 0x0c_88b1_04c8, cm::REQ);
        assert_eq!(header.as_bytes(), octets);
        let found = MadHeader::ref_from_bytes(&octets).unwrap();
        assert_eq!((found.tid(), found.attribute_id()), (0x0c_88b1_04c8, 0x10));
        assert_eq!((found.status(), found.attribute_modifier()), (0, 0));
        assert!(!found.is_response());
        assert_eq!((found.hops(), found.returning()), (None, None));
    }

    #[test]
    fn a_directed_route_smp_has_hops_and_a_direction() {
        // GetResp(SMInfo) on its way back over 3 hops, busy.
        let octets = hex!("01810181 80010203 0000000000001234 0020 0000 00000000");
        let header = MadHeader::ref_from_bytes(&octets).unwrap();
        assert!(header.is_response());
        assert_eq!((header.hops(), header.returning()), (Some((2, 3)), Some(true)));
        assert_eq!(header.status(), 1);
        // In any other class the bit is the status's.
        let header = MadHeader { mgmt_class: CLASS_SA, ..*header };
        assert_eq!(header.status(), 0x8001);
    }

    proptest! {
        #[test]
        fn round_trip(class: u8, version: u8, method: u8, tid: u64, attribute: u16) {
            let header = MadHeader::new(class, version, method, tid, attribute);
            let found = MadHeader::read_from_bytes(header.as_bytes()).unwrap();
            prop_assert_eq!(found, header);
            prop_assert_eq!((found.base_version, found.mgmt_class), (1, class));
            prop_assert_eq!((found.class_version, found.method), (version, method));
            prop_assert_eq!((found.tid(), found.attribute_id()), (tid, attribute));
            prop_assert_eq!(found.is_response(), method >= 0x80);
        }
    }
}
