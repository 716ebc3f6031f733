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
