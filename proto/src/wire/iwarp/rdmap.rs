//! RDMAP: operation codes and the headers behind DDP's (RFC 5040 §4, RFC 7306 §4 to §6).
//!
//! The RDMAP control octet, the second of every DDP segment:
//!
//! ```text
//!   0 1 2 3 4 5 6 7
//!  +-+-+-+-+-+-+-+-+
//!  |RV | R |Opcode |   RV: version (1), R: reserved
//!  +-+-+-+-+-+-+-+-+
//! ```

use core::fmt;

use zerocopy::{
    FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned,
    network_endian::{U32, U64},
};

use crate::wire::{Error, Layer, ids::Stag};

/// The RDMAP version of RFC 5040, as it stands in the control octet's top two bits.
pub const VERSION: u8 = 1;
/// Bits of the control octet that hold the version.
pub const VERSION_MASK: u8 = 0xc0;
/// Bits of the control octet that are reserved.
pub const RESERVED_MASK: u8 = 0x30;
/// Bits of the control octet that hold the opcode.
pub const OPCODE_MASK: u8 = 0x0f;

/// What an RDMA message is, 4 bits (RFC 5040 Figure 5, RFC 7306 §4). Open: an unknown code
/// survives and prints as hex.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Opcode(pub u8);

impl Opcode {
    /// RDMA Write: tagged.
    pub const WRITE: Self = Self(0);
    /// RDMA Read Request: untagged, queue 1.
    pub const READ_REQUEST: Self = Self(1);
    /// RDMA Read Response: tagged.
    pub const READ_RESPONSE: Self = Self(2);
    /// Send: untagged, queue 0.
    pub const SEND: Self = Self(3);
    /// Send with Invalidate.
    pub const SEND_INV: Self = Self(4);
    /// Send with Solicited Event.
    pub const SEND_SE: Self = Self(5);
    /// Send with Solicited Event and Invalidate.
    pub const SEND_SE_INV: Self = Self(6);
    /// Terminate: untagged, queue 2.
    pub const TERMINATE: Self = Self(7);
    /// Immediate Data: untagged, queue 0 (RFC 7306 §6).
    pub const IMMEDIATE: Self = Self(8);
    /// Immediate Data with Solicited Event.
    pub const IMMEDIATE_SE: Self = Self(9);
    /// Atomic Request: untagged, queue 1 (RFC 7306 §5.2.1).
    pub const ATOMIC_REQUEST: Self = Self(10);
    /// Atomic Response: untagged, queue 3 (RFC 7306 §5.2.2).
    pub const ATOMIC_RESPONSE: Self = Self(11);

    /// The opcode in an RDMAP control octet.
    pub const fn from_control(control: u8) -> Self {
        Self(control & OPCODE_MASK)
    }

    /// The control octet of a message with this opcode: version 1, reserved bits zero.
    pub const fn control(self) -> u8 {
        VERSION << 6 | (self.0 & OPCODE_MASK)
    }

    /// The operation's short name, if the code has one.
    pub const fn name(self) -> Option<&'static str> {
        Some(match self {
            Self::WRITE => "WRITE",
            Self::READ_REQUEST => "READ_REQUEST",
            Self::READ_RESPONSE => "READ_RESPONSE",
            Self::SEND => "SEND",
            Self::SEND_INV => "SEND_INV",
            Self::SEND_SE => "SEND_SE",
            Self::SEND_SE_INV => "SEND_SE_INV",
            Self::TERMINATE => "TERMINATE",
            Self::IMMEDIATE => "IMMEDIATE",
            Self::IMMEDIATE_SE => "IMMEDIATE_SE",
            Self::ATOMIC_REQUEST => "ATOMIC_REQUEST",
            Self::ATOMIC_RESPONSE => "ATOMIC_RESPONSE",
            _ => return None,
        })
    }

    /// Whether this is one of the four Sends (not an Immediate).
    pub const fn is_send(self) -> bool {
        matches!(
            self,
            Self::SEND | Self::SEND_INV | Self::SEND_SE | Self::SEND_SE_INV
        )
    }

    /// Whether the message revokes a key of the receiver.
    pub const fn invalidates(self) -> bool {
        matches!(self, Self::SEND_INV | Self::SEND_SE_INV)
    }

    /// Whether the message raises a solicited event at the receiver.
    pub const fn solicited(self) -> bool {
        matches!(self, Self::SEND_SE | Self::SEND_SE_INV | Self::IMMEDIATE_SE)
    }
}

impl fmt::Display for Opcode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name),
            None => write!(f, "{:#03x}", self.0),
        }
    }
}

impl fmt::Debug for Opcode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Opcode({self})")
    }
}

/// The version in an RDMAP control octet.
pub const fn version(control: u8) -> u8 {
    control >> 6
}

/// Gives the headers below their `parse`.
macro_rules! header {
    ($name:ident, $len:literal) => {
        const _: () = assert!(size_of::<$name>() == $len);

        impl $name {
            /// Octets on the wire.
            pub const LEN: usize = $len;

            /// Views the front of `payload`, what follows the DDP header, as this header. Octets
            /// behind it are not looked at.
            ///
            /// # Errors
            ///
            /// Truncated, of layer RDMAP, if `payload` is too short.
            pub fn parse(payload: &[u8]) -> Result<&Self, Error> {
                let short = Error::truncated(Layer::Rdmap, 0, Self::LEN, payload.len());
                Self::ref_from_prefix(payload)
                    .map(|(header, _)| header)
                    .map_err(|_| short)
            }
        }
    };
}

/// Asks for octets of the peer's memory (RFC 5040 §4.4).
///
/// ```text
///  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
///  |                     Data Sink STag (SinkSTag)                 |
///  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
///  +                  Data Sink Tagged Offset (64)                 +
///  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
///  |                   RDMA Read Message Size                      |
///  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
///  |                     Data Source STag                          |
///  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
///  +                 Data Source Tagged Offset (64)                +
///  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
/// ```
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct ReadRequest {
    /// Where the octets go: a key of the requester.
    pub sink_stag: U32,
    /// Where the octets go: address in `sink_stag`.
    pub sink_to: U64,
    /// How many octets.
    pub size: U32,
    /// Where the octets are: a key of the responder.
    pub source_stag: U32,
    /// Where the octets are: address in `source_stag`.
    pub source_to: U64,
}

header!(ReadRequest, 28);

impl ReadRequest {
    /// A request for `size` octets at `source`, to be placed at `sink`.
    pub fn new(sink: (Stag, u64), size: u32, source: (Stag, u64)) -> Self {
        Self {
            sink_stag: sink.0.0.into(),
            sink_to: sink.1.into(),
            size: size.into(),
            source_stag: source.0.0.into(),
            source_to: source.1.into(),
        }
    }
}

/// Which atomic operation, 4 bits (RFC 7306 §5.2.1). Open: an unknown code survives.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct AtomicOpcode(pub u8);

impl AtomicOpcode {
    /// Masked add (§5.1.1).
    pub const FETCH_ADD: Self = Self(0);
    /// Masked compare and swap (§5.1.2).
    pub const CMP_SWAP: Self = Self(2);

    /// The operation's name, if the code has one.
    pub const fn name(self) -> Option<&'static str> {
        match self {
            Self::FETCH_ADD => Some("FETCH_ADD"),
            Self::CMP_SWAP => Some("CMP_SWAP"),
            _ => None,
        }
    }
}

impl fmt::Display for AtomicOpcode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name),
            None => write!(f, "{:#03x}", self.0),
        }
    }
}

impl fmt::Debug for AtomicOpcode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AtomicOpcode({self})")
    }
}

/// Asks the peer to read, modify and write one 8-octet word (RFC 7306 §5.2.1).
///
/// ```text
///  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
///  |                      Reserved (Not Used)              |AOpCode|
///  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
///  |                       Request Identifier                      |
///  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
///  |                          Remote STag                          |
///  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
///  +                   Remote Tagged Offset (64)                   +
///  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
///  +                   Add or Swap Data (64)                       +
///  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
///  +                   Add or Swap Mask (64)                       +
///  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
///  +                   Compare Data (64)                           +
///  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
///  +                   Compare Mask (64)                           +
///  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
/// ```
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct AtomicRequest {
    /// Reserved bits and, in the low 4, the operation: see [`AtomicRequest::operation`].
    pub opcode: U32,
    /// The requester's number, given back in the response.
    pub request_id: U32,
    /// The word: a key of the responder.
    pub stag: U32,
    /// The word: address in `stag`.
    pub to: U64,
    /// What is added, or what replaces the word.
    pub add_swap_data: U64,
    /// Field boundaries of an addition, or which bits are replaced.
    pub add_swap_mask: U64,
    /// What the word is compared with.
    pub compare_data: U64,
    /// Which bits are compared.
    pub compare_mask: U64,
}

header!(AtomicRequest, 52);

impl AtomicRequest {
    /// The operation: the low 4 bits of `opcode`.
    pub fn operation(&self) -> AtomicOpcode {
        AtomicOpcode((self.opcode.get() & 0xf) as u8)
    }
}

/// The word as it was before an atomic operation (RFC 7306 §5.2.2).
///
/// ```text
///  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
///  |                  Original Request Identifier                  |
///  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
///  +                  Original Remote Value (64)                   +
///  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
/// ```
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct AtomicResponse {
    /// The request's number.
    pub request_id: U32,
    /// The word before the operation.
    pub original: U64,
}

header!(AtomicResponse, 12);

/// Immediate data: 8 octets for the receiving program (RFC 7306 §6.1).
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct Immediate {
    /// The octets, in the program's order.
    pub data: U64,
}

header!(Immediate, 8);
