//! DDP segments: the header that says where a payload belongs (RFC 5041 §4).
//!
//! Tagged, for WRITEs and READ responses; 14 octets:
//!
//! ```text
//!   0                   1                   2                   3
//!   0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//!                                  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!                                  |T|L| Rsvd  |DV | RDMAP control |
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  |                              STag                             |
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  +                       Tagged Offset (64)                      +
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! ```
//!
//! Untagged, for everything else; 18 octets:
//!
//! ```text
//!                                  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!                                  |T|L| Rsvd  |DV | RDMAP control |
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  |           Invalidate STag (RDMAP's; zero where unused)        |
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  |                          Queue Number                         |
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  |                     Message Sequence Number                   |
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  |                         Message Offset                        |
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! ```

use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    network_endian::{U32, U64},
};

use super::rdmap::{self, Opcode};
use crate::wire::{
    Error, Layer,
    ids::{Msn, Stag},
};

/// T: the segment names its place by STag and offset.
pub const TAGGED: u8 = 0x80;
/// L: the message's last segment.
pub const LAST: u8 = 0x40;
/// Bits that are reserved.
pub const RESERVED_MASK: u8 = 0x3c;
/// DV: bits that hold the version.
pub const VERSION_MASK: u8 = 0x03;
/// The version of RFC 5041.
pub const VERSION: u8 = 1;

/// Queue of Sends and Immediates (RFC 5040 §4.1).
pub const QN_SEND: u32 = 0;
/// Queue of Read Requests and Atomic Requests.
pub const QN_READ_REQUEST: u32 = 1;
/// Queue of Terminates.
pub const QN_TERMINATE: u32 = 2;
/// Queue of Atomic Responses (RFC 7306 §4.1).
pub const QN_ATOMIC_RESPONSE: u32 = 3;

/// The control octet of a good segment.
const fn control(tagged: bool, last: bool) -> u8 {
    (if tagged { TAGGED } else { 0 }) | (if last { LAST } else { 0 }) | VERSION
}

/// Header of a segment that names its place by STag and offset.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct TaggedHeader {
    /// [`TAGGED`], [`LAST`], reserved bits, version.
    pub control: u8,
    /// RDMAP's control octet.
    pub rdmap: u8,
    /// The region.
    pub stag: U32,
    /// Address of the payload's first octet in it.
    pub to: U64,
}

const _: () = assert!(size_of::<TaggedHeader>() == 14);

impl TaggedHeader {
    /// Octets on the wire.
    pub const LEN: usize = 14;

    /// Header of a good segment of a message `op` (WRITE or READ response) for address `to` of
    /// `stag`.
    pub fn new(op: Opcode, last: bool, stag: Stag, to: u64) -> Self {
        Self {
            control: control(true, last),
            rdmap: op.control(),
            stag: stag.0.into(),
            to: to.into(),
        }
    }

    /// The region as a key.
    pub fn stag(&self) -> Stag {
        Stag(self.stag.get())
    }
}

/// Header of a segment for the next buffer of a queue.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct UntaggedHeader {
    /// [`LAST`], reserved bits, version.
    pub control: u8,
    /// RDMAP's control octet.
    pub rdmap: u8,
    /// The key that a Send with Invalidate revokes; zero elsewhere.
    pub invalidate_stag: U32,
    /// The queue: [`QN_SEND`] and following.
    pub qn: U32,
    /// Which message of the queue, from 1.
    pub msn: U32,
    /// Offset of the payload's first octet in the message.
    pub mo: U32,
}

const _: () = assert!(size_of::<UntaggedHeader>() == 18);

impl UntaggedHeader {
    /// Octets on the wire.
    pub const LEN: usize = 18;

    /// Header of a good segment of a message `op`. `inv` is zero for messages that revoke
    /// nothing.
    pub fn new(op: Opcode, last: bool, qn: u32, msn: Msn, mo: u32, inv: Stag) -> Self {
        Self {
            control: control(false, last),
            rdmap: op.control(),
            invalidate_stag: inv.0.into(),
            qn: qn.into(),
            msn: msn.0.into(),
            mo: mo.into(),
        }
    }

    /// The message's number.
    pub fn msn(&self) -> Msn {
        Msn(self.msn.get())
    }

    /// The key that the message revokes, if its opcode says so.
    pub fn invalidate_stag(&self) -> Stag {
        Stag(self.invalidate_stag.get())
    }
}

macro_rules! control_getters {
    ($name:ident) => {
        impl $name {
            /// L: whether this is the message's last segment.
            pub const fn last(&self) -> bool {
                self.control & LAST != 0
            }

            /// DV: DDP's version.
            pub const fn version(&self) -> u8 {
                self.control & VERSION_MASK
            }

            /// RV: RDMAP's version.
            pub const fn rdmap_version(&self) -> u8 {
                rdmap::version(self.rdmap)
            }

            /// What the message is.
            pub const fn opcode(&self) -> Opcode {
                Opcode::from_control(self.rdmap)
            }
        }
    };
}

control_getters!(TaggedHeader);
control_getters!(UntaggedHeader);

/// A DDP segment: a view over a received ULPDU.
#[derive(Clone, Copy, Debug)]
pub enum Segment<'a> {
    /// For a place named by STag and offset.
    Tagged {
        /// Its header.
        header: &'a TaggedHeader,
        /// What is to be placed.
        payload: &'a [u8],
    },
    /// For the next buffer of a queue.
    Untagged {
        /// Its header.
        header: &'a UntaggedHeader,
        /// What is to be placed; RDMAP's own headers among it.
        payload: &'a [u8],
    },
}

impl<'a> Segment<'a> {
    /// Splits `ulpdu` into header and payload. Versions and codes are not judged: what is wrong
    /// with them the peer must be told by a Terminate.
    ///
    /// # Errors
    ///
    /// Truncated, of layer DDP, if the header that the T bit announces is not whole.
    #[inline]
    pub fn parse(ulpdu: &'a [u8]) -> Result<Self, Error> {
        let short = |need| Error::truncated(Layer::Ddp, 0, need, ulpdu.len());
        match ulpdu.first() {
            Some(control) if control & TAGGED == 0 => UntaggedHeader::ref_from_prefix(ulpdu)
                .map(|(header, payload)| Self::Untagged { header, payload })
                .map_err(|_| short(UntaggedHeader::LEN)),
            // Without a single octet the shorter header is what is missing.
            _ => TaggedHeader::ref_from_prefix(ulpdu)
                .map(|(header, payload)| Self::Tagged { header, payload })
                .map_err(|_| short(TaggedHeader::LEN)),
        }
    }

    /// DDP's control octet.
    pub const fn control(&self) -> u8 {
        match self {
            Self::Tagged { header, .. } => header.control,
            Self::Untagged { header, .. } => header.control,
        }
    }

    /// RDMAP's control octet.
    pub const fn rdmap_control(&self) -> u8 {
        match self {
            Self::Tagged { header, .. } => header.rdmap,
            Self::Untagged { header, .. } => header.rdmap,
        }
    }

    /// What the message is.
    pub const fn opcode(&self) -> Opcode {
        Opcode::from_control(self.rdmap_control())
    }

    /// L: whether this is the message's last segment.
    pub const fn last(&self) -> bool {
        self.control() & LAST != 0
    }

    /// DV: DDP's version; 1 is RFC 5041's.
    pub const fn ddp_version(&self) -> u8 {
        self.control() & VERSION_MASK
    }

    /// RV: RDMAP's version; 1 is RFC 5040's.
    pub const fn rdmap_version(&self) -> u8 {
        rdmap::version(self.rdmap_control())
    }

    /// The header as it is on the wire: 14 or 18 octets. A Terminate copies them.
    pub fn header_bytes(&self) -> &'a [u8] {
        match self {
            Self::Tagged { header, .. } => header.as_bytes(),
            Self::Untagged { header, .. } => header.as_bytes(),
        }
    }

    /// What follows the header.
    pub const fn payload(&self) -> &'a [u8] {
        match self {
            Self::Tagged { payload, .. } | Self::Untagged { payload, .. } => payload,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hex_literal::hex;
    use proptest::prelude::*;
    use std::{string::ToString, vec::Vec};

    #[test]
    fn tagged_example() {
        // A WRITE of 4 octets.
        let ulpdu = hex!("c140 11223344 0000000000001000 deadbeef");
        let header = TaggedHeader::new(Opcode::WRITE, true, Stag(0x1122_3344), 0x1000);
        assert_eq!(header.as_bytes(), &ulpdu[..14]);
        let segment = Segment::parse(&ulpdu).unwrap();
        let Segment::Tagged { header: found, payload } = segment else { panic!("{segment:?}") };
        assert_eq!((*found, payload), (header, &hex!("deadbeef")[..]));
        assert_eq!((found.stag(), found.to.get()), (Stag(0x1122_3344), 0x1000));
        assert_eq!((segment.opcode(), segment.last()), (Opcode::WRITE, true));
        assert_eq!((segment.ddp_version(), segment.rdmap_version()), (1, 1));
        assert_eq!((segment.header_bytes(), segment.payload()), ulpdu.split_at(14));
    }

    #[test]
    fn untagged_example() {
        // A SEND with invalidate.
        let ulpdu = hex!("4144 0000abcd 00000000 00000002 00000000 78");
        let header = UntaggedHeader::new(Opcode::SEND_INV, true, QN_SEND, Msn(2), 0, Stag(0xabcd));
        assert_eq!(header.as_bytes(), &ulpdu[..18]);
        let segment = Segment::parse(&ulpdu).unwrap();
        let Segment::Untagged { header: found, payload } = segment else { panic!("{segment:?}") };
        assert_eq!((*found, payload), (header, &b"x"[..]));
        assert_eq!((found.invalidate_stag(), found.msn()), (Stag(0xabcd), Msn(2)));
        assert_eq!((segment.control(), segment.rdmap_control()), (0x41, 0x44));
        assert_eq!((segment.header_bytes(), segment.payload()), ulpdu.split_at(18));
    }

    #[test]
    fn a_middle_segment() {
        let ulpdu = hex!("0143 00000000 00000000 00000007 00000400");
        let segment = Segment::parse(&ulpdu).unwrap();
        let Segment::Untagged { header, payload } = segment else { panic!("{segment:?}") };
        assert!(!segment.last() && !header.last() && payload.is_empty());
        assert_eq!(header.mo.get(), 1024);
        let made = UntaggedHeader::new(Opcode::SEND, false, QN_SEND, Msn(7), 1024, Stag(0));
        assert_eq!(*header, made);
    }

    #[test]
    fn a_short_header_says_how_short() {
        for (control, need) in [(0xc1, 14), (0x41, 18)] {
            let ulpdu = [control; 18];
            for have in 1..need {
                let error = Segment::parse(&ulpdu[..have]).unwrap_err();
                assert_eq!(error, Error::truncated(Layer::Ddp, 0, need, have));
            }
            assert!(Segment::parse(&ulpdu[..need]).unwrap().payload().is_empty());
        }
        let error = Segment::parse(&[]).unwrap_err();
        assert_eq!(error.to_string(), "DDP: at offset 0: 14 octets needed, 0 found");
    }

    #[test]
    fn versions_and_reserved_bits_survive() {
        let ulpdu = hex!("fe7f 00000000 0000000000000000");
        let segment = Segment::parse(&ulpdu).unwrap();
        assert_eq!((segment.ddp_version(), segment.rdmap_version()), (2, 1));
        assert_eq!(segment.control() & RESERVED_MASK, 0x3c);
        assert_eq!(segment.opcode(), Opcode(15));
        assert_eq!(segment.header_bytes(), ulpdu);
    }

    proptest! {
        #[test]
        fn tagged_round_trip(op in 0u8..16, last: bool, stag: u32, to: u64, payload: Vec<u8>) {
            let header = TaggedHeader::new(Opcode(op), last, Stag(stag), to);
            let ulpdu = [header.as_bytes(), &payload].concat();
            let segment = Segment::parse(&ulpdu).unwrap();
            let Segment::Tagged { header: found, payload: rest } = segment else {
                return Err(TestCaseError::fail("not tagged"));
            };
            prop_assert_eq!((*found, rest), (header, &payload[..]));
            prop_assert_eq!((found.stag().0, found.to.get()), (stag, to));
            prop_assert_eq!((segment.opcode().0, segment.last()), (op, last));
            prop_assert_eq!((found.version(), found.rdmap_version()), (VERSION, rdmap::VERSION));
        }

        #[test]
        fn untagged_round_trip(
            op in 0u8..16, last: bool, qn: u32, msn: u32, mo: u32, inv: u32, payload: Vec<u8>,
        ) {
            let header = UntaggedHeader::new(Opcode(op), last, qn, Msn(msn), mo, Stag(inv));
            let ulpdu = [header.as_bytes(), &payload].concat();
            let segment = Segment::parse(&ulpdu).unwrap();
            let Segment::Untagged { header: found, payload: rest } = segment else {
                return Err(TestCaseError::fail("tagged"));
            };
            prop_assert_eq!((*found, rest), (header, &payload[..]));
            prop_assert_eq!((found.qn.get(), found.msn().0, found.mo.get()), (qn, msn, mo));
            prop_assert_eq!((found.invalidate_stag().0, segment.opcode().0), (inv, op));
            prop_assert_eq!((found.version(), found.rdmap_version()), (VERSION, rdmap::VERSION));
        }

        #[test]
        fn any_bytes_split_without_loss_or_panic(ulpdu: Vec<u8>) {
            if let Ok(segment) = Segment::parse(&ulpdu) {
                prop_assert_eq!([segment.header_bytes(), segment.payload()].concat(), ulpdu);
            } else {
                prop_assert!(ulpdu.len() < 18);
            }
        }
    }
}
