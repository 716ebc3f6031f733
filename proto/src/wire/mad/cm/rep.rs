//! REP: reply to a REQ (IBTA vol. 1, 12.6.8).
//!
//! ```text
//!   0                   1                   2                   3
//!   0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  |                     Local communication ID                    |   0
//!  |                     Remote communication ID                   |   4
//!  |                          Local Q_Key                          |   8
//!  |                   Local QPN                   |  Vendor ID, H |  12
//!  |                   Local EECN                  |  Vendor ID, M |  16
//!  |                  Starting PSN                 |  Vendor ID, L |  20
//!  | RespResources | InitiatorDepth|AckDelay |FO |F| RNR |S|  Rsv  |  24
//!  +                       Local CA GUID (64)                      +  28
//!  +                     Private data (196 octets)                 +  36
//! ```
//!
//! Target ACK delay, 5 bits; FO, failover accepted, 2; F, end-to-end flow control; RNR retry count,
//! 3; S, shared receive queue. The vendor ID lies in the gaps behind three 24-bit numbers, its high
//! octet first.

use nom::{
    Parser,
    number::complete::{be_u8, be_u24, be_u64},
};

use super::codec::{Body, Read, bit, bits, comm_ids, flag, octets, psn, qkey, qpn, up};
use crate::wire::ids::{Psn, QKey, Qpn};

/// Reply to a REQ.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Rep<'a> {
    /// The sender's name for the connection.
    pub local_comm_id: u32,
    /// The receiver's.
    pub remote_comm_id: u32,
    /// Queue key of a datagram queue pair; 0 for others.
    pub qkey: QKey,
    /// The sender's queue pair, 24 bits.
    pub qpn: Qpn,
    /// End-to-end context of RD, 24 bits.
    pub eecn: u32,
    /// Vendor whose options the attribute modifier names, 24 bits; 0 for none.
    pub vendor_id: u32,
    /// The PSN that the receiver's first request has to carry: what the sender's queue pair expects.
    pub start_psn: Psn,
    /// READs and atomics that the sender serves at a time.
    pub responder_resources: u8,
    /// READs and atomics that the sender has outstanding.
    pub initiator_depth: u8,
    /// Code of the time until an ACK, 5 bits; see [`timeout`](super::timeout).
    pub target_ack_delay: u8,
    /// The alternate path: 0 accepted, 1 not supported, 2 rejected; 2 bits.
    pub failover: u8,
    /// End-to-end flow control by credits.
    pub flow_control: bool,
    /// RNR retries, 3 bits; 7 is for ever.
    pub rnr_retry_count: u8,
    /// The sender's queue pair has a shared receive queue.
    pub srq: bool,
    /// The sender's adapter.
    pub ca_guid: u64,
    /// [`Self::PRIVATE_DATA_LEN`] octets.
    pub private_data: &'a [u8],
}

impl<'a> Rep<'a> {
    /// Octets of private data.
    pub const PRIVATE_DATA_LEN: usize = 196;

    pub(super) fn read(input: &'a [u8]) -> Read<'a, Self> {
        let (rest, (local_comm_id, remote_comm_id)) = comm_ids(input)?;
        let (rest, (qkey, qpn, high)) = (qkey, qpn, be_u8).parse(rest)?;
        let (rest, (eecn, middle)) = (be_u24, be_u8).parse(rest)?;
        let (rest, (start_psn, low)) = (psn, be_u8).parse(rest)?;
        let (rest, (responder_resources, initiator_depth)) = (be_u8, be_u8).parse(rest)?;
        let (rest, (delay, rnr, ca_guid)) = (be_u8, be_u8, be_u64).parse(rest)?;
        let (rest, private_data) = octets(Self::PRIVATE_DATA_LEN, rest)?;
        let rep = Self {
            local_comm_id,
            remote_comm_id,
            qkey,
            qpn,
            eecn,
            vendor_id: u32::from_be_bytes([0, high, middle, low]),
            start_psn,
            responder_resources,
            initiator_depth,
            target_ack_delay: bits(delay, 3, 5),
            failover: bits(delay, 1, 2),
            flow_control: bit(delay, 0),
            rnr_retry_count: bits(rnr, 5, 3),
            srq: bit(rnr, 4),
            ca_guid,
            private_data,
        };
        Ok((rest, rep))
    }

    pub(super) fn write(&self, out: &mut Body) {
        let [_, high, middle, low] = self.vendor_id.to_be_bytes();
        out.u32(self.local_comm_id);
        out.u32(self.remote_comm_id);
        out.u32(self.qkey.0);
        out.u24(self.qpn.0);
        out.u8(high);
        out.u24(self.eecn);
        out.u8(middle);
        out.u24(self.start_psn.get());
        out.u8(low);
        out.u8(self.responder_resources);
        out.u8(self.initiator_depth);
        let failover = up(self.failover, 1, 2) | flag(self.flow_control, 0);
        out.u8(up(self.target_ack_delay, 3, 5) | failover);
        out.u8(up(self.rnr_retry_count, 5, 3) | flag(self.srq, 4));
        out.u64(self.ca_guid);
        out.octets(self.private_data, Self::PRIVATE_DATA_LEN);
    }
}

#[cfg(test)]
mod tests {
    use super::{super::tests::*, *};
    use crate::wire::mad::cm::{Message, REP};
    use hex_literal::hex;
    use proptest::prelude::*;

    #[test]
    fn a_rep_of_linux() {
        // rping's, from Linux 6.1.
        let octets = body(&hex!(
            "5b6344c8 c804b188 00000000 000029 00 000000 00 964195 00 01 01 78 e0 505400fffe990003"
        ));
        let rep = Rep {
            local_comm_id: 0x5b63_44c8,
            remote_comm_id: 0xc804_b188,
            qpn: Qpn(0x29),
            start_psn: Psn::new(0x96_4195),
            responder_resources: 1,
            initiator_depth: 1,
            target_ack_delay: 15,
            rnr_retry_count: 7,
            ca_guid: 0x5054_00ff_fe99_0003,
            private_data: &octets[36..],
            ..Rep::default()
        };
        both_ways(REP, Message::Rep(rep), &octets);
    }

    #[test]
    fn every_field_has_its_place() {
        let octets = body(&hex!(
            "01020304 05060708 11121314 212223 0a 313233 0b 414243 0c 51 52 95 b0 6162636465666768"
            "7e"
        ));
        let rep = Rep {
            local_comm_id: 0x0102_0304,
            remote_comm_id: 0x0506_0708,
            qkey: QKey(0x1112_1314),
            qpn: Qpn(0x21_2223),
            eecn: 0x31_3233,
            vendor_id: 0x0a_0b0c,
            start_psn: Psn::new(0x41_4243),
            responder_resources: 0x51,
            initiator_depth: 0x52,
            target_ack_delay: 18,
            failover: 2,
            flow_control: true,
            rnr_retry_count: 5,
            srq: true,
            ca_guid: 0x6162_6364_6566_6768,
            private_data: &octets[36..],
        };
        both_ways(REP, Message::Rep(rep), &octets);
    }

    #[test]
    fn truncated() {
        short_bodies(REP, &[(0, 0), (11, 8), (14, 12), (35, 28), (36, 36), (231, 36)]);
    }

    proptest! {
        #[test]
        fn round_trip(
            ids: (u32, u32, u32, u64), numbers in prop::array::uniform3(0u32..1 << 24), psn: u32,
            octets: [u8; 5], flags: [bool; 2], data in octets_of(Rep::PRIVATE_DATA_LEN),
        ) {
            comes_back(Message::Rep(Rep {
                local_comm_id: ids.0,
                remote_comm_id: ids.1,
                qkey: QKey(ids.2),
                qpn: Qpn(numbers[0]),
                eecn: numbers[1],
                vendor_id: numbers[2],
                start_psn: Psn::new(psn),
                responder_resources: octets[0],
                initiator_depth: octets[1],
                target_ack_delay: octets[2] >> 3,
                failover: octets[3] & 3,
                flow_control: flags[0],
                rnr_retry_count: octets[4] & 7,
                srq: flags[1],
                ca_guid: ids.3,
                private_data: &data,
            }))?;
        }

        #[test]
        fn any_bytes_are_emitted_as_they_were(octets in any_body()) {
            survives(REP, &octets, &[(27, 0x0f)])?;
        }
    }
}
