//! Base transport header.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned, network_endian::U16};

use super::opcode::Opcode;
use crate::wire::ids::{PKey, Psn, Qpn};

/// Base transport header.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct Bth {
    /// What the packet is.
    pub opcode: u8,
    /// SE, MigReq, PadCnt, TVer.
    pub flags: u8,
    /// Partition key.
    pub pkey: U16,
    /// FECN, BECN, six reserved bits.
    pub ecn: u8,
    /// Destination queue pair.
    pub dest_qp: [u8; 3],
    /// AckReq, seven reserved bits.
    pub ack: u8,
    /// Packet sequence number.
    pub psn: [u8; 3],
}

const _: () = assert!(size_of::<Bth>() == 12);

impl Bth {
    /// Octets on the wire.
    pub const LEN: usize = 12;

    /// What the packet is.
    pub const fn opcode(&self) -> Opcode {
        Opcode(self.opcode)
    }
    /// SE: the receiver's completion is solicited.
    pub const fn solicited(&self) -> bool {
        self.flags & 0x80 != 0
    }
    /// M: path migration state.
    pub const fn migreq(&self) -> bool {
        self.flags & 0x40 != 0
    }
    /// PadCnt: 0 to 3 octets behind the payload.
    pub const fn pad(&self) -> u8 {
        (self.flags >> 4) & 3
    }
    /// TVer: transport header version, 0.
    pub const fn tver(&self) -> u8 {
        self.flags & 0x0f
    }
    /// Partition key.
    pub fn pkey(&self) -> PKey {
        PKey(self.pkey.get().into())
    }
    /// FECN: congestion was met on the way.
    pub const fn fecn(&self) -> bool {
        self.ecn & 0x80 != 0
    }
    /// BECN: the other direction met congestion.
    pub const fn becn(&self) -> bool {
        self.ecn & 0x40 != 0
    }
    /// Destination queue pair.
    pub const fn dest_qp(&self) -> Qpn {
        let [a, b, c] = self.dest_qp;
        Qpn(u32::from_be_bytes([0, a, b, c]))
    }
    /// AckReq: an acknowledgement is asked for.
    pub const fn ack_req(&self) -> bool {
        self.ack & 0x80 != 0
    }
    /// Packet sequence number.
    pub const fn psn(&self) -> Psn {
        let [a, b, c] = self.psn;
        Psn::new(u32::from_be_bytes([0, a, b, c]))
    }
}
