//! REQ: request for a connection (IBTA vol. 1, 12.6.5).
//!
//! ```text
//!   0                   1                   2                   3
//!   0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  |                     Local communication ID                    |   0
//!  |    Reserved   |                   Vendor ID                   |   4
//!  +                         Service ID (64)                       +   8
//!  +                       Local CA GUID (64)                      +  16
//!  |                            Reserved                           |  24
//!  |                          Local Q_Key                          |  28
//!  |                   Local QPN                   | RespResources |  32
//!  |                   Local EECN                  | InitiatorDepth|  36
//!  |                  Remote EECN                  |RemTimeout |TST|F|  40
//!  |                  Starting PSN                 |LocTimeout |Rty|  44
//!  |             P_Key             |  MTU  |R| RNR |Retries|S| Ext |  48
//!  |        Primary local LID      |       Primary remote LID      |  52
//!  +                    Primary local GID (128)                    +  56
//!  +                   Primary remote GID (128)                    +  72
//!  |           Primary flow label          |  Reserved |    Rate   |  88
//!  | Traffic class |   Hop limit   |   SL  |L| Rsv |AckTimeout| Rsv|  92
//!  +              Alternate path, laid out the same                +  96
//!  +                     Private data (92 octets)                  + 140
//! ```
//!
//! Remote CM response timeout, 5 bits; TST, transport service type, 2; F, end-to-end flow control;
//! local CM response timeout, 5; retry count, 3; R, RDC exists; RNR retry count, 3; maximum CM
//! retries, 4; S, shared receive queue; extended transport type, 3; L, subnet local. The last octet
//! of the alternate path has a bit more than the primary's: bit 2, SAP supported.

use nom::{
    Parser,
    number::complete::{be_u8, be_u24, be_u32, be_u64},
};

use super::{
    codec::{Body, Read, bit, bits, flag, octets, pkey, psn, qkey, qpn, up},
    path::Path,
};
use crate::wire::ids::{PKey, Psn, QKey, Qpn};

/// The bit of the alternate path's last octet that says SAP supported.
const SAP: u32 = 2;

/// Request for a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Req<'a> {
    /// The sender's name for the connection.
    pub local_comm_id: u32,
    /// Vendor whose options the attribute modifier names, 24 bits; 0 for none.
    pub vendor_id: u32,
    /// What is wanted: for rdma_cm see [`PortSpace`](super::PortSpace).
    pub service_id: u64,
    /// The sender's adapter.
    pub ca_guid: u64,
    /// Queue key of a datagram queue pair; 0 for others.
    pub qkey: QKey,
    /// The sender's queue pair, 24 bits.
    pub qpn: Qpn,
    /// READs and atomics that the sender serves at a time.
    pub responder_resources: u8,
    /// End-to-end context of RD, 24 bits.
    pub eecn: u32,
    /// READs and atomics that the sender has outstanding.
    pub initiator_depth: u8,
    /// Remote end-to-end context of RD, 24 bits.
    pub remote_eecn: u32,
    /// Code of how long the receiver may take to answer, 5 bits; see [`timeout`](super::timeout).
    pub remote_cm_timeout: u8,
    /// [`Self::RC`], [`Self::UC`], [`Self::RD`] or [`Self::EXTENDED`]; 2 bits.
    pub transport: u8,
    /// End-to-end flow control by credits.
    pub flow_control: bool,
    /// The PSN that the receiver's first request has to carry: what the sender's queue pair expects.
    pub start_psn: Psn,
    /// Code of how long the sender takes to answer, 5 bits.
    pub local_cm_timeout: u8,
    /// Retries before a connection fails, 3 bits.
    pub retry_count: u8,
    /// Partition, 16 bits.
    pub pkey: PKey,
    /// Path MTU code, 4 bits: 1 to 5 are 256 to 4096 octets; see [`mtu`](super::mtu).
    pub mtu: u8,
    /// RDC exists.
    pub rdc_exists: bool,
    /// RNR retries, 3 bits; 7 is for ever.
    pub rnr_retry_count: u8,
    /// Retries of CM messages, 4 bits.
    pub max_cm_retries: u8,
    /// The sender's queue pair has a shared receive queue.
    pub srq: bool,
    /// With [`Self::EXTENDED`]: [`Self::XRC`]; 3 bits.
    pub extended_transport: u8,
    /// Primary path.
    pub primary: Path,
    /// Alternate path; all zero where there is none.
    pub alternate: Path,
    /// The sender takes suggestions of an alternate path.
    pub sap_supported: bool,
    /// [`Self::PRIVATE_DATA_LEN`] octets: the program's, and what rdma_cm puts in front; see
    /// [`IpCm`](super::IpCm).
    pub private_data: &'a [u8],
}

impl<'a> Req<'a> {
    /// Octets of private data; the program has 56 of them under rdma_cm.
    pub const PRIVATE_DATA_LEN: usize = 92;

    /// `transport`: reliable connection.
    pub const RC: u8 = 0;
    /// `transport`: unreliable connection.
    pub const UC: u8 = 1;
    /// `transport`: reliable datagram.
    pub const RD: u8 = 2;
    /// `transport`: what `extended_transport` says.
    pub const EXTENDED: u8 = 3;
    /// `extended_transport`: extended reliable connection (annex A14).
    pub const XRC: u8 = 1;

    pub(super) fn read(input: &'a [u8]) -> Read<'a, Self> {
        let (rest, (local_comm_id, _, vendor_id)) = (be_u32, be_u8, be_u24).parse(input)?;
        let (rest, (service_id, ca_guid, _, qkey)) = (be_u64, be_u64, be_u32, qkey).parse(rest)?;
        let (rest, (qpn, responder_resources)) = (qpn, be_u8).parse(rest)?;
        let (rest, (eecn, initiator_depth)) = (be_u24, be_u8).parse(rest)?;
        let (rest, (remote_eecn, service)) = (be_u24, be_u8).parse(rest)?;
        let (rest, (start_psn, retry)) = (psn, be_u8).parse(rest)?;
        let (rest, (pkey, mtu, cm)) = (pkey, be_u8, be_u8).parse(rest)?;
        let (rest, (primary, _)) = Path::read_req(rest)?;
        let (rest, (alternate, low)) = Path::read_req(rest)?;
        let (rest, private_data) = octets(Self::PRIVATE_DATA_LEN, rest)?;
        let req = Self {
            local_comm_id,
            vendor_id,
            service_id,
            ca_guid,
            qkey,
            qpn,
            responder_resources,
            eecn,
            initiator_depth,
            remote_eecn,
            remote_cm_timeout: bits(service, 3, 5),
            transport: bits(service, 1, 2),
            flow_control: bit(service, 0),
            start_psn,
            local_cm_timeout: bits(retry, 3, 5),
            retry_count: bits(retry, 0, 3),
            pkey,
            mtu: bits(mtu, 4, 4),
            rdc_exists: bit(mtu, 3),
            rnr_retry_count: bits(mtu, 0, 3),
            max_cm_retries: bits(cm, 4, 4),
            srq: bit(cm, 3),
            extended_transport: bits(cm, 0, 3),
            primary,
            alternate,
            sap_supported: bit(low, SAP),
            private_data,
        };
        Ok((rest, req))
    }

    pub(super) fn write(&self, out: &mut Body) {
        out.u32(self.local_comm_id);
        out.reserved(1);
        out.u24(self.vendor_id);
        out.u64(self.service_id);
        out.u64(self.ca_guid);
        out.reserved(4);
        out.u32(self.qkey.0);
        out.u24(self.qpn.0);
        out.u8(self.responder_resources);
        out.u24(self.eecn);
        out.u8(self.initiator_depth);
        out.u24(self.remote_eecn);
        let transport = up(self.transport, 1, 2) | flag(self.flow_control, 0);
        out.u8(up(self.remote_cm_timeout, 3, 5) | transport);
        out.u24(self.start_psn.get());
        out.u8(up(self.local_cm_timeout, 3, 5) | up(self.retry_count, 0, 3));
        out.pkey(self.pkey);
        let rnr = flag(self.rdc_exists, 3) | up(self.rnr_retry_count, 0, 3);
        out.u8(up(self.mtu, 4, 4) | rnr);
        let transport = flag(self.srq, 3) | up(self.extended_transport, 0, 3);
        out.u8(up(self.max_cm_retries, 4, 4) | transport);
        self.primary.write_req(0, out);
        self.alternate.write_req(flag(self.sap_supported, SAP), out);
        out.octets(self.private_data, Self::PRIVATE_DATA_LEN);
    }
}

#[cfg(test)]
mod tests {
    use super::{super::tests::*, *};
    use crate::wire::{
        ids::Gid,
        mad::cm::{IpCm, Message, PortSpace, REQ, path::tests::any_path},
    };
    use hex_literal::hex;
    use proptest::prelude::*;

    /// rping's REQ, from Linux 6.1.
    const RPING: [u8; 176] = hex!(
        "c804b188 00000000 0000000001061c06 505400fffe990002 00000000 00000000"
        "000029 01 000000 01 000000 a0 b2a1ba a7 ffff 37 f0"
        "ffff ffff 00000000000000000000ffff0a630002 00000000000000000000ffff0a630003"
        "3490b 0 00 00 40 00 98"
        "0000 0000 00000000000000000000000000000000 00000000000000000000000000000000"
        "00000 0 00 00 00 00 00"
        "00 40 9e5b 0000000000000000000000000a630002 0000000000000000000000000a630003"
    );

    #[test]
    fn a_req_of_linux() {
        let octets = body(&RPING);
        let [local, remote] = ["10.99.0.2", "10.99.0.3"].map(|ip| ip.parse().unwrap());
        let primary = Path {
            flow_label: 0x3_490b,
            ack_timeout: 19,
            ..Path::roce(Gid::from(local), Gid::from(remote))
        };
        let req = Req {
            local_comm_id: 0xc804_b188,
            service_id: PortSpace::TCP.service_id(7174),
            ca_guid: 0x5054_00ff_fe99_0002,
            qpn: Qpn(0x29),
            responder_resources: 1,
            initiator_depth: 1,
            remote_cm_timeout: 20,
            transport: Req::RC,
            start_psn: Psn::new(0xb2_a1ba),
            local_cm_timeout: 20,
            retry_count: 7,
            pkey: PKey(0xffff),
            mtu: 3,
            rnr_retry_count: 7,
            max_cm_retries: 15,
            primary,
            private_data: &octets[140..],
            ..Req::default()
        };
        both_ways(REQ, Message::Req(req), &octets);

        let (ip, rest) = IpCm::parse(req.private_data).unwrap();
        assert_eq!(ip.addresses(), Some((local, remote)));
        assert_eq!((ip.src_port, rest.len()), (0x9e5b, 56));
    }

    #[test]
    fn every_field_has_its_place() {
        // Each octet by hand; no two fields hold the same.
        let octets = body(&hex!(
            "01020304 00 0a0b0c 1112131415161718 2122232425262728 00000000 31323334"
            "414243 44 515253 54 616263 8d 717273 9e 8182 5c a9"
            "9192 9394 a1a2a3a4a5a6a7a8a9aaabacadaeafa0 b1b2b3b4b5b6b7b8b9babbbcbdbebfb0"
            "c1c2c 0 2d d1 d2 e8 f8"
            "0102 0304 e1e2e3e4e5e6e7e8e9eaebecedeeefe0 f1f2f3f4f5f6f7f8f9fafbfcfdfefff0"
            "12345 0 16 78 9a b0 bc"
            "7e7e7e"
        ));
        let req = Req {
            local_comm_id: 0x0102_0304,
            vendor_id: 0x0a_0b0c,
            service_id: 0x1112_1314_1516_1718,
            ca_guid: 0x2122_2324_2526_2728,
            qkey: QKey(0x3132_3334),
            qpn: Qpn(0x41_4243),
            responder_resources: 0x44,
            eecn: 0x51_5253,
            initiator_depth: 0x54,
            remote_eecn: 0x61_6263,
            remote_cm_timeout: 17,
            transport: Req::RD,
            flow_control: true,
            start_psn: Psn::new(0x71_7273),
            local_cm_timeout: 19,
            retry_count: 6,
            pkey: PKey(0x8182),
            mtu: 5,
            rdc_exists: true,
            rnr_retry_count: 4,
            max_cm_retries: 10,
            srq: true,
            extended_transport: Req::XRC,
            primary: Path {
                local_lid: 0x9192,
                remote_lid: 0x9394,
                local_gid: Gid(hex!("a1a2a3a4a5a6a7a8a9aaabacadaeafa0")),
                remote_gid: Gid(hex!("b1b2b3b4b5b6b7b8b9babbbcbdbebfb0")),
                flow_label: 0xc_1c2c,
                rate: 0x2d,
                traffic_class: 0xd1,
                hop_limit: 0xd2,
                service_level: 14,
                subnet_local: true,
                ack_timeout: 31,
            },
            alternate: Path {
                local_lid: 0x0102,
                remote_lid: 0x0304,
                local_gid: Gid(hex!("e1e2e3e4e5e6e7e8e9eaebecedeeefe0")),
                remote_gid: Gid(hex!("f1f2f3f4f5f6f7f8f9fafbfcfdfefff0")),
                flow_label: 0x1_2345,
                rate: 0x16,
                traffic_class: 0x78,
                hop_limit: 0x9a,
                service_level: 11,
                subnet_local: false,
                ack_timeout: 23,
            },
            sap_supported: true,
            private_data: &octets[140..],
        };
        both_ways(REQ, Message::Req(req), &octets);
    }

    /// What is reserved: octets and bits of them.
    const RESERVED: &[(usize, u8)] = &[
        (4, 0xff),
        (24, 0xff),
        (25, 0xff),
        (26, 0xff),
        (27, 0xff),
        (90, 0x0f),
        (91, 0xc0),
        (94, 0x07),
        (95, 0x07),
        (134, 0x0f),
        (135, 0xc0),
        (138, 0x07),
        (139, 0x03),
    ];

    #[test]
    fn truncated() {
        short_bodies(REQ, &[(0, 0), (5, 5), (7, 5), (60, 56), (95, 95), (231, 140)]);
    }

    prop_compose! {
        fn any_req()(
            ids: (u32, u64, u64, u32),
            numbers in prop::array::uniform4(0u32..1 << 24),
            psn: u32,
            octets: [u8; 8],
            flags: [bool; 4],
            primary in any_path(),
            alternate in any_path(),
            key: u16,
        ) -> Req<'static> {
            Req {
                local_comm_id: ids.0,
                vendor_id: numbers[0],
                service_id: ids.1,
                ca_guid: ids.2,
                qkey: QKey(ids.3),
                qpn: Qpn(numbers[1]),
                responder_resources: octets[0],
                eecn: numbers[2],
                initiator_depth: octets[1],
                remote_eecn: numbers[3],
                remote_cm_timeout: octets[2] >> 3,
                transport: octets[2] & 3,
                flow_control: flags[0],
                start_psn: Psn::new(psn),
                local_cm_timeout: octets[3] >> 3,
                retry_count: octets[3] & 7,
                pkey: PKey(key.into()),
                mtu: octets[4] >> 4,
                rdc_exists: flags[1],
                rnr_retry_count: octets[5] & 7,
                max_cm_retries: octets[6] >> 4,
                srq: flags[2],
                extended_transport: octets[7] & 7,
                primary,
                alternate,
                sap_supported: flags[3],
                private_data: &[],
            }
        }
    }

    proptest! {
        #[test]
        fn round_trip(req in any_req(), data in octets_of(Req::PRIVATE_DATA_LEN)) {
            comes_back(Message::Req(Req { private_data: &data, ..req }))?;
        }

        #[test]
        fn any_bytes_are_emitted_as_they_were(octets in any_body()) {
            survives(REQ, &octets, RESERVED)?;
        }

        #[test]
        fn fields_that_are_too_wide_do_not_spill(req in any_req(), wide: [u8; 9], high: [u32; 5]) {
            let path = |path: Path, n: usize| Path {
                flow_label: path.flow_label | high[n] << 20,
                rate: path.rate | wide[n] << 6,
                service_level: path.service_level | wide[n] << 4,
                ack_timeout: path.ack_timeout | wide[n] << 5,
                ..path
            };
            let spilt = Req {
                vendor_id: req.vendor_id | high[0] << 24,
                qpn: Qpn(req.qpn.0 | high[1] << 24),
                eecn: req.eecn | high[2] << 24,
                remote_eecn: req.remote_eecn | high[3] << 24,
                pkey: PKey(req.pkey.0 | high[4] << 16),
                remote_cm_timeout: req.remote_cm_timeout | wide[0] << 5,
                transport: req.transport | wide[1] << 2,
                local_cm_timeout: req.local_cm_timeout | wide[2] << 5,
                retry_count: req.retry_count | wide[3] << 3,
                mtu: req.mtu | wide[4] << 4,
                rnr_retry_count: req.rnr_retry_count | wide[5] << 3,
                max_cm_retries: req.max_cm_retries | wide[6] << 4,
                extended_transport: req.extended_transport | wide[7] << 3,
                primary: path(req.primary, 0),
                alternate: path(req.alternate, 1),
                ..req
            };
            prop_assert_eq!(Message::Req(spilt).to_body(), Message::Req(req).to_body());
        }
    }
}
