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
        matches!(self, Self::SEND | Self::SEND_INV | Self::SEND_SE | Self::SEND_SE_INV)
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
                Self::ref_from_prefix(payload).map(|(header, _)| header).map_err(|_| short)
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

#[cfg(test)]
mod tests {
    use super::*;
    use hex_literal::hex;
    use proptest::prelude::*;
    use std::{format, string::ToString, vec::Vec};

    #[test]
    fn read_request_example() {
        let payload = hex!("00000055 0000000000002000 00000040 00000066 0000000000003000");
        let request = ReadRequest::new((Stag(0x55), 0x2000), 64, (Stag(0x66), 0x3000));
        assert_eq!(request.as_bytes(), payload);
        assert_eq!(ReadRequest::parse(&payload), Ok(&request));
    }

    #[test]
    fn atomic_request_examples() {
        // FetchAdd of 5, plain.
        let payload = hex!(
            "00000000 00000007 0000abcd 0000000000001000 0000000000000005"
            "0000000000000000 0000000000000000 0000000000000000"
        );
        let request = AtomicRequest::parse(&payload).unwrap();
        assert_eq!(request.operation(), AtomicOpcode::FETCH_ADD);
        assert_eq!((request.request_id.get(), request.stag.get()), (7, 0xabcd));
        assert_eq!((request.to.get(), request.add_swap_data.get()), (0x1000, 5));
        // CmpSwap, with reserved bits set: they survive and are no part of the code.
        let payload = hex!(
            "fffffff2 00000001 00000002 0000000000000003 0000000000000004"
            "0000000000000005 0000000000000006 0000000000000007"
        );
        let request = AtomicRequest::parse(&payload).unwrap();
        assert_eq!(request.operation(), AtomicOpcode::CMP_SWAP);
        assert_eq!((request.add_swap_data.get(), request.add_swap_mask.get()), (4, 5));
        assert_eq!((request.compare_data.get(), request.compare_mask.get()), (6, 7));
        assert_eq!(request.as_bytes(), payload);
    }

    #[test]
    fn atomic_response_and_immediate_examples() {
        let payload = hex!("00000007 000000000000002a");
        let response = AtomicResponse { request_id: 7.into(), original: 42.into() };
        assert_eq!(response.as_bytes(), payload);
        assert_eq!(AtomicResponse::parse(&payload), Ok(&response));
        let payload = hex!("1122334455667788");
        let immediate = Immediate { data: 0x1122_3344_5566_7788.into() };
        assert_eq!(immediate.as_bytes(), payload);
        assert_eq!(Immediate::parse(&payload), Ok(&immediate));
    }

    #[test]
    fn a_short_header_says_how_short() {
        let payload = [0; 52];
        for have in 0..52 {
            let short = |need| Err(Error::truncated(Layer::Rdmap, 0, need, have));
            let payload = &payload[..have];
            if have < 8 {
                assert_eq!(Immediate::parse(payload).map(|_| ()), short(8));
            }
            if have < 12 {
                assert_eq!(AtomicResponse::parse(payload).map(|_| ()), short(12));
            }
            if have < 28 {
                assert_eq!(ReadRequest::parse(payload).map(|_| ()), short(28));
            }
            assert_eq!(AtomicRequest::parse(payload).map(|_| ()), short(52));
        }
        let error = ReadRequest::parse(&payload[..3]).unwrap_err();
        assert_eq!(error.to_string(), "RDMAP: at offset 0: 28 octets needed, 3 found");
    }

    #[test]
    fn opcodes_by_kind() {
        let all: Vec<_> = (0..16).map(Opcode).collect();
        let those = |test: fn(Opcode) -> bool| -> Vec<u8> {
            all.iter().filter(|&&op| test(op)).map(|op| op.0).collect()
        };
        assert_eq!(those(Opcode::is_send), [3, 4, 5, 6]);
        assert_eq!(those(Opcode::invalidates), [4, 6]);
        assert_eq!(those(Opcode::solicited), [5, 6, 9]);
        assert_eq!(those(|op| op.name().is_none()), [12, 13, 14, 15]);
        for op in all {
            assert_eq!(op.control(), 0x40 | op.0);
            assert_eq!(Opcode::from_control(op.control() | RESERVED_MASK), op);
            assert_eq!(version(op.control()), VERSION);
        }
    }

    #[test]
    fn unknown_codes_print_as_hex() {
        assert_eq!(format!("{} {:?}", Opcode::SEND_SE_INV, Opcode(13)), "SEND_SE_INV Opcode(0xd)");
        assert_eq!(
            format!("{} {:?}", AtomicOpcode::CMP_SWAP, AtomicOpcode(1)),
            "CMP_SWAP AtomicOpcode(0x1)"
        );
    }

    proptest! {
        #[test]
        fn round_trips(octets: [[u8; 26]; 2], tail: Vec<u8>) {
            let payload = [octets.as_flattened(), &tail].concat();
            prop_assert_eq!(ReadRequest::parse(&payload).unwrap().as_bytes(), &payload[..28]);
            prop_assert_eq!(AtomicRequest::parse(&payload).unwrap().as_bytes(), &payload[..52]);
            prop_assert_eq!(AtomicResponse::parse(&payload).unwrap().as_bytes(), &payload[..12]);
            prop_assert_eq!(Immediate::parse(&payload).unwrap().as_bytes(), &payload[..8]);
        }

        #[test]
        fn read_request_keeps_its_fields(sink: (u32, u64), size: u32, source: (u32, u64)) {
            let request = ReadRequest::new((Stag(sink.0), sink.1), size, (Stag(source.0), source.1));
            let octets = request.as_bytes();
            prop_assert_eq!(&octets[..4], &sink.0.to_be_bytes());
            prop_assert_eq!(&octets[4..12], &sink.1.to_be_bytes());
            prop_assert_eq!(&octets[12..16], &size.to_be_bytes());
            prop_assert_eq!(&octets[16..20], &source.0.to_be_bytes());
            prop_assert_eq!(&octets[20..], &source.1.to_be_bytes());
        }

        #[test]
        fn any_bytes_do_not_panic(payload: Vec<u8>) {
            prop_assert_eq!(ReadRequest::parse(&payload).is_ok(), payload.len() >= 28);
            prop_assert_eq!(AtomicRequest::parse(&payload).is_ok(), payload.len() >= 52);
            prop_assert_eq!(AtomicResponse::parse(&payload).is_ok(), payload.len() >= 12);
            prop_assert_eq!(Immediate::parse(&payload).is_ok(), payload.len() >= 8);
        }
    }
}
