//! SIDR_REQ and SIDR_REP: which queue pair serves a UD service (IBTA vol. 1, 12.11).
//!
//! ```text
//!   0                   1                   2                   3
//!   0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  |                           Request ID                          |   0  SIDR_REQ
//!  |             P_Key             |            Reserved           |   4
//!  +                         Service ID (64)                       +   8
//!  +                     Private data (216 octets)                 +  16
//!
//!  |                           Request ID                          |   0  SIDR_REP
//!  |     Status    |  Info length  |        Vendor ID, high        |   4
//!  |                      QPN                      |  Vendor ID, L |   8
//!  +                         Service ID (64)                       +  12
//!  |                             Q_Key                             |  20
//!  +             Additional information (72 octets)                +  24
//!  +                     Private data (136 octets)                 +  96
//! ```

use nom::{
    Parser,
    number::complete::{be_u8, be_u16, be_u32, be_u64},
};

use super::codec::{Body, Read, octets, pkey, qkey, qpn};
use crate::wire::ids::{PKey, QKey, Qpn};

/// Request for a UD service.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SidrReq<'a> {
    /// The sender's name for the request.
    pub request_id: u32,
    /// Partition, 16 bits.
    pub pkey: PKey,
    /// What is wanted: for rdma_cm see [`PortSpace`](super::PortSpace).
    pub service_id: u64,
    /// [`Self::PRIVATE_DATA_LEN`] octets: the program's, and what rdma_cm puts in front; see
    /// [`IpCm`](super::IpCm).
    pub private_data: &'a [u8],
}

impl<'a> SidrReq<'a> {
    /// Octets of private data; the program has 180 of them under rdma_cm.
    pub const PRIVATE_DATA_LEN: usize = 216;

    pub(super) fn read(input: &'a [u8]) -> Read<'a, Self> {
        let (rest, (request_id, pkey, _)) = (be_u32, pkey, be_u16).parse(input)?;
        let (rest, service_id) = be_u64(rest)?;
        let (rest, private_data) = octets(Self::PRIVATE_DATA_LEN, rest)?;
        Ok((rest, Self { request_id, pkey, service_id, private_data }))
    }

    pub(super) fn write(&self, out: &mut Body) {
        out.u32(self.request_id);
        out.pkey(self.pkey);
        out.reserved(2);
        out.u64(self.service_id);
        out.octets(self.private_data, Self::PRIVATE_DATA_LEN);
    }
}

/// Reply to a SIDR_REQ.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct SidrRep<'a> {
    /// The receiver's name for the request.
    pub request_id: u32,
    /// [`Self::VALID`], or why not; see [`Self::status_name`].
    pub status: u8,
    /// Octets of `info` that are valid; see [`Self::additional_info`].
    pub info_len: u8,
    /// Vendor whose options the attribute modifier names, 24 bits; 0 for none.
    pub vendor_id: u32,
    /// The service's queue pair, 24 bits.
    pub qpn: Qpn,
    /// The service.
    pub service_id: u64,
    /// Its queue key.
    pub qkey: QKey,
    /// Additional information, [`Self::INFO_LEN`] octets; what it is depends on the status.
    pub info: &'a [u8],
    /// [`Self::PRIVATE_DATA_LEN`] octets.
    pub private_data: &'a [u8],
}

impl<'a> SidrRep<'a> {
    /// Octets of private data.
    pub const PRIVATE_DATA_LEN: usize = 136;
    /// Octets of additional information.
    pub const INFO_LEN: usize = 72;

    /// `status`: queue pair and queue key are valid.
    pub const VALID: u8 = 0;
    /// `status`: there is no such service.
    pub const UNSUPPORTED: u8 = 1;
    /// `status`: the program said no.
    pub const REJECTED: u8 = 2;
    /// `status`: no queue pair is left.
    pub const NO_QP: u8 = 3;
    /// `status`: ask elsewhere; the additional information says where.
    pub const REDIRECT: u8 = 4;
    /// `status`: the class version is not supported.
    pub const UNSUPPORTED_VERSION: u8 = 5;

    /// The status in the field's words; `None` if it is reserved.
    pub const fn status_name(&self) -> Option<&'static str> {
        Some(match self.status {
            Self::VALID => "valid QPN",
            Self::UNSUPPORTED => "service ID is not supported",
            Self::REJECTED => "rejected by service provider",
            Self::NO_QP => "no QP available",
            Self::REDIRECT => "redirected",
            Self::UNSUPPORTED_VERSION => "class version is not supported",
            _ => return None,
        })
    }

    /// The valid octets of `info`: as many as `info_len` says, but not more than there are.
    pub fn additional_info(&self) -> &'a [u8] {
        &self.info[..self.info.len().min(self.info_len.into())]
    }

    pub(super) fn read(input: &'a [u8]) -> Read<'a, Self> {
        let (rest, (request_id, status, info_len)) = (be_u32, be_u8, be_u8).parse(input)?;
        let (rest, (high, qpn, low)) = (be_u16, qpn, be_u8).parse(rest)?;
        let (rest, (service_id, qkey)) = (be_u64, qkey).parse(rest)?;
        let (rest, info) = octets(Self::INFO_LEN, rest)?;
        let (rest, private_data) = octets(Self::PRIVATE_DATA_LEN, rest)?;
        let rep = Self {
            request_id,
            status,
            info_len,
            vendor_id: u32::from(high) << 8 | u32::from(low),
            qpn,
            service_id,
            qkey,
            info,
            private_data,
        };
        Ok((rest, rep))
    }

    pub(super) fn write(&self, out: &mut Body) {
        out.u32(self.request_id);
        out.u8(self.status);
        out.u8(self.info_len);
        out.u16((self.vendor_id >> 8) as u16);
        out.u24(self.qpn.0);
        out.u8(self.vendor_id as u8);
        out.u64(self.service_id);
        out.u32(self.qkey.0);
        out.octets(self.info, Self::INFO_LEN);
        out.octets(self.private_data, Self::PRIVATE_DATA_LEN);
    }
}

#[cfg(test)]
mod tests {
    use super::{super::tests::*, *};
    use crate::wire::mad::cm::{IpCm, Message, PortSpace, SIDR_REP, SIDR_REQ};
    use hex_literal::hex;
    use proptest::prelude::*;

    #[test]
    fn a_request_and_its_reply_of_linux() {
        // udaddy's, from Linux 6.1.
        let octets = body(&hex!(
            "d704b188 ffff 0000 0000000001111c06"
            "00 40 d88c 0000000000000000000000000a630002 0000000000000000000000000a630003"
        ));
        let req = SidrReq {
            request_id: 0xd704_b188,
            pkey: PKey(0xffff),
            service_id: PortSpace::UDP.service_id(7174),
            private_data: &octets[16..],
        };
        both_ways(SIDR_REQ, Message::SidrReq(req), &octets);
        let (ip, rest) = IpCm::parse(req.private_data).unwrap();
        assert_eq!((ip.src_port, rest.len()), (0xd88c, 180));

        let octets = body(&hex!("d704b188 00 00 0000 000011 00 0000000001111c06 01234567"));
        let rep = SidrRep {
            request_id: 0xd704_b188,
            qpn: Qpn(0x11),
            service_id: PortSpace::UDP.service_id(7174),
            qkey: QKey(0x0123_4567),
            info: &octets[24..96],
            private_data: &octets[96..],
            ..SidrRep::default()
        };
        both_ways(SIDR_REP, Message::SidrRep(rep), &octets);
        assert_eq!(rep.status_name(), Some("valid QPN"));
        assert_eq!(SidrRep { status: 6, ..rep }.status_name(), None);
    }

    #[test]
    fn every_field_has_its_place() {
        let mut octets =
            body(&hex!("01020304 04 06 0a0b 212223 0c 3132333435363738 41424344 515253"));
        octets[95..97].copy_from_slice(&[0x61, 0x62]);
        let rep = SidrRep {
            request_id: 0x0102_0304,
            status: SidrRep::REDIRECT,
            info_len: 6,
            vendor_id: 0x0a_0b0c,
            qpn: Qpn(0x21_2223),
            service_id: 0x3132_3334_3536_3738,
            qkey: QKey(0x4142_4344),
            info: &octets[24..96],
            private_data: &octets[96..],
        };
        both_ways(SIDR_REP, Message::SidrRep(rep), &octets);
        assert_eq!((rep.info[71], rep.private_data[0]), (0x61, 0x62));
        assert_eq!(rep.additional_info(), hex!("515253 000000"));
        assert_eq!(SidrRep { info_len: 255, ..rep }.additional_info(), rep.info);
    }

    #[test]
    fn truncated() {
        short_bodies(SIDR_REQ, &[(0, 0), (5, 4), (7, 6), (15, 8), (231, 16)]);
        short_bodies(SIDR_REP, &[(0, 0), (5, 5), (9, 8), (23, 20), (95, 24), (231, 96)]);
    }

    proptest! {
        #[test]
        fn request_round_trip(
            request_id: u32, key: u16, service_id: u64,
            data in octets_of(SidrReq::PRIVATE_DATA_LEN),
        ) {
            let (pkey, private_data) = (PKey(key.into()), &data[..]);
            comes_back(Message::SidrReq(SidrReq { request_id, pkey, service_id, private_data }))?;
        }

        #[test]
        fn reply_round_trip(
            request_id: u32, status: u8, info_len: u8, vendor_id in 0u32..1 << 24,
            qpn in 0u32..1 << 24, service_id: u64, key: u32,
            info in octets_of(SidrRep::INFO_LEN), data in octets_of(SidrRep::PRIVATE_DATA_LEN),
        ) {
            let (qpn, qkey, info, private_data) = (Qpn(qpn), QKey(key), &info[..], &data[..]);
            comes_back(Message::SidrRep(SidrRep {
                request_id, status, info_len, vendor_id, qpn, service_id, qkey, info, private_data,
            }))?;
        }

        #[test]
        fn any_bytes_are_emitted_as_they_were(octets in any_body()) {
            survives(SIDR_REQ, &octets, &[(6, 0xff), (7, 0xff)])?;
            survives(SIDR_REP, &octets, &[])?;
        }
    }
}
