//! Base transport header (IBTA vol. 1, 9.2).
//!
//! ```text
//!   0                   1                   2                   3
//!   0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  |     OpCode    |S|M|Pad| TVer  |             P_Key             |
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  |F|B| reserved  |               Destination QP                  |
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  |A|  reserved   |            Packet Sequence Number             |
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! ```
//!
//! The octet with F (FECN) and B (BECN) counts as ones in the ICRC: routers may change it.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned, network_endian::U16};

use super::{opcode::Opcode, u24};
use crate::wire::ids::{PKey, Psn, Qpn};

/// SE: the receiver's completion is solicited.
pub const SOLICITED: u8 = 0x80;
/// M: the sender is in the state "migrated".
pub const MIGREQ: u8 = 0x40;
/// PadCnt.
pub const PAD_MASK: u8 = 0x30;
/// TVer.
pub const TVER_MASK: u8 = 0x0f;
/// F: congestion was met on the way.
pub const FECN: u8 = 0x80;
/// B: the other direction met congestion.
pub const BECN: u8 = 0x40;
/// A: an acknowledgement is asked for.
pub const ACK_REQ: u8 = 0x80;

/// Base transport header.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct Bth {
    /// What the packet is.
    pub opcode: u8,
    /// [`SOLICITED`], [`MIGREQ`], PadCnt ([`PAD_MASK`]), TVer ([`TVER_MASK`]).
    pub flags: u8,
    /// Partition key.
    pub pkey: U16,
    /// [`FECN`], [`BECN`], six reserved bits.
    pub ecn: u8,
    /// Destination queue pair.
    pub dest_qp: [u8; 3],
    /// [`ACK_REQ`], seven reserved bits.
    pub ack: u8,
    /// Packet sequence number.
    pub psn: [u8; 3],
}

const _: () = assert!(size_of::<Bth>() == 12);

impl Bth {
    /// Octets on the wire.
    pub const LEN: usize = 12;

    /// A header with MigReq set and everything else that is not named clear: SE, PadCnt, TVer,
    /// FECN, BECN, AckReq.
    ///
    /// MigReq means "migrated", the state of a connection without automatic path migration.
    /// Hardware sends 1, Linux rxe 0; every receiver takes both.
    ///
    /// Of `pkey` the low 16 bits go out, of `dest_qp` the low 24.
    #[inline]
    pub const fn new(opcode: Opcode, pkey: PKey, dest_qp: Qpn, psn: Psn) -> Self {
        Self {
            opcode: opcode.0,
            flags: MIGREQ,
            pkey: U16::new(pkey.0 as u16),
            ecn: 0,
            dest_qp: u24::to_bytes(dest_qp.0),
            ack: 0,
            psn: u24::to_bytes(psn.get()),
        }
    }

    /// With SE, the solicited event, set or clear.
    #[must_use]
    #[inline]
    pub const fn with_solicited(mut self, on: bool) -> Self {
        self.flags = with(self.flags, SOLICITED, on);
        self
    }

    /// With MigReq set or clear.
    #[must_use]
    #[inline]
    pub const fn with_migreq(mut self, on: bool) -> Self {
        self.flags = with(self.flags, MIGREQ, on);
        self
    }

    /// With PadCnt `octets`, of which the low two bits are taken.
    #[must_use]
    #[inline]
    pub const fn with_pad(mut self, octets: u8) -> Self {
        self.flags = (self.flags & !PAD_MASK) | ((octets & 3) << 4);
        self
    }

    /// With AckReq set or clear.
    #[must_use]
    #[inline]
    pub const fn with_ack_req(mut self, on: bool) -> Self {
        self.ack = with(self.ack, ACK_REQ, on);
        self
    }

    /// With FECN set or clear.
    #[must_use]
    #[inline]
    pub const fn with_fecn(mut self, on: bool) -> Self {
        self.ecn = with(self.ecn, FECN, on);
        self
    }

    /// With BECN set or clear.
    #[must_use]
    #[inline]
    pub const fn with_becn(mut self, on: bool) -> Self {
        self.ecn = with(self.ecn, BECN, on);
        self
    }

    /// With another PSN: what differs between the packets of a message.
    #[must_use]
    #[inline]
    pub const fn with_psn(mut self, psn: Psn) -> Self {
        self.psn = u24::to_bytes(psn.get());
        self
    }

    /// What the packet is.
    #[inline]
    pub const fn opcode(&self) -> Opcode {
        Opcode(self.opcode)
    }
    /// SE: the receiver's completion is solicited.
    #[inline]
    pub const fn solicited(&self) -> bool {
        self.flags & SOLICITED != 0
    }
    /// M: path migration state.
    #[inline]
    pub const fn migreq(&self) -> bool {
        self.flags & MIGREQ != 0
    }
    /// PadCnt: 0 to 3 octets behind the payload.
    #[inline]
    pub const fn pad(&self) -> u8 {
        (self.flags & PAD_MASK) >> 4
    }
    /// TVer: transport header version, 0.
    #[inline]
    pub const fn tver(&self) -> u8 {
        self.flags & TVER_MASK
    }
    /// Partition key.
    #[inline]
    pub const fn pkey(&self) -> PKey {
        PKey(self.pkey.get() as u32)
    }
    /// FECN: congestion was met on the way.
    #[inline]
    pub const fn fecn(&self) -> bool {
        self.ecn & FECN != 0
    }
    /// BECN: the other direction met congestion.
    #[inline]
    pub const fn becn(&self) -> bool {
        self.ecn & BECN != 0
    }
    /// Destination queue pair.
    #[inline]
    pub const fn dest_qp(&self) -> Qpn {
        Qpn(u24::from_bytes(self.dest_qp))
    }
    /// AckReq: an acknowledgement is asked for.
    #[inline]
    pub const fn ack_req(&self) -> bool {
        self.ack & ACK_REQ != 0
    }
    /// Packet sequence number.
    #[inline]
    pub const fn psn(&self) -> Psn {
        Psn::new(u24::from_bytes(self.psn))
    }
}

const fn with(octet: u8, bit: u8, on: bool) -> u8 {
    if on { octet | bit } else { octet & !bit }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hex_literal::hex;
    use proptest::prelude::*;

    #[test]
    fn example() {
        // A padded SEND that is solicited, on its way through congestion.
        let wire = hex!("05 e0 ffff 80 000012 80 000345");
        let bth = Bth::new(Opcode::RC_SEND_ONLY_IMM, PKey(0xffff), Qpn(0x12), Psn::new(0x345))
            .with_solicited(true)
            .with_pad(2)
            .with_fecn(true)
            .with_ack_req(true);
        assert_eq!(bth.as_bytes(), wire);
        let found = Bth::read_from_bytes(&wire).unwrap();
        assert_eq!(found, bth);
        assert_eq!(found.opcode(), Opcode::RC_SEND_ONLY_IMM);
        assert!(found.solicited() && found.migreq() && found.fecn() && found.ack_req());
        assert_eq!((found.becn(), found.pad(), found.tver()), (false, 2, 0));
        assert_eq!((found.pkey(), found.dest_qp()), (PKey(0xffff), Qpn(0x12)));
        assert_eq!(found.psn(), Psn::new(0x345));
    }

    #[test]
    fn a_flag_is_taken_back() {
        let bth = Bth::new(Opcode::RC_ACK, PKey(0), Qpn(0), Psn::new(0));
        let set = bth.with_solicited(true).with_pad(3).with_ack_req(true).with_fecn(true);
        let set = set.with_becn(true);
        let clear = set.with_solicited(false).with_pad(0).with_ack_req(false).with_fecn(false);
        assert_eq!(clear.with_becn(false), bth);
        assert!(bth.migreq() && !bth.with_migreq(false).migreq());
        assert_eq!(bth.with_psn(Psn::new(7)).psn(), Psn::new(7));
    }

    #[test]
    fn numbers_too_wide_are_cut() {
        let bth = Bth::new(Opcode(0), PKey(0xffff_1234), Qpn(0xff00_0001), Psn::new(0));
        assert_eq!((bth.pkey(), bth.dest_qp()), (PKey(0x1234), Qpn(1)));
    }

    proptest! {
        #[test]
        fn round_trip(
            opcode: u8, pkey: u16, qpn in 0u32..1 << 24, psn in 0u32..1 << 24, pad in 0u8..4,
            flags: [bool; 5],
        ) {
            let [solicited, migreq, ack_req, fecn, becn] = flags;
            let bth = Bth::new(Opcode(opcode), PKey(pkey.into()), Qpn(qpn), Psn::new(psn))
                .with_solicited(solicited)
                .with_migreq(migreq)
                .with_pad(pad)
                .with_ack_req(ack_req)
                .with_fecn(fecn)
                .with_becn(becn);
            let found = Bth::read_from_bytes(bth.as_bytes()).unwrap();
            prop_assert_eq!(found.opcode().0, opcode);
            prop_assert_eq!((found.pkey().0, found.dest_qp().0), (pkey.into(), qpn));
            prop_assert_eq!((found.psn().get(), found.pad(), found.tver()), (psn, pad, 0));
            let read = [found.solicited(), found.migreq(), found.ack_req(), found.fecn(), found.becn()];
            prop_assert_eq!(read, flags);
        }

        #[test]
        fn any_bytes_survive(wire: [u8; 12]) {
            let bth = Bth::read_from_bytes(&wire).unwrap();
            prop_assert_eq!(bth.as_bytes(), wire);
            let again = bth
                .with_solicited(bth.solicited())
                .with_migreq(bth.migreq())
                .with_pad(bth.pad())
                .with_ack_req(bth.ack_req())
                .with_fecn(bth.fecn())
                .with_becn(bth.becn())
                .with_psn(bth.psn());
            prop_assert_eq!(again, bth);
        }
    }
}
