//! LAP and APR: a new alternate path for a connection (IBTA vol. 1, 12.8).
//!
//! ```text
//!   0                   1                   2                   3
//!   0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  |                     Local communication ID                    |   0  LAP
//!  |                     Remote communication ID                   |   4
//!  |                            Reserved                           |   8
//!  |              Remote QPN or EECN               | Timeout | Rsv |  12
//!  |                            Reserved                           |  16
//!  |       Alternate local LID     |      Alternate remote LID     |  20
//!  +                   Alternate local GID (128)                   +  24
//!  +                   Alternate remote GID (128)                  +  40
//!  |          Alternate flow label         |  Rsv  | Traffic class |  56
//!  |   Hop limit   |Rsv|   Rate    |   SL  |L| Rsv |AckTimeout| Rsv|  60
//!  +                     Private data (168 octets)                 +  64
//!
//!  |                     Local communication ID                    |   0  APR
//!  |                     Remote communication ID                   |   4
//!  |  Info length  |   AP status   |            Reserved           |   8
//!  +             Additional information (72 octets)                +  12
//!  +                     Private data (148 octets)                 +  84
//! ```

use nom::{
    Parser,
    number::complete::{be_u8, be_u16, be_u32},
};

use super::{
    codec::{Body, Read, bits, comm_ids, octets, qpn, up},
    path::Path,
};
use crate::wire::ids::Qpn;

/// Load alternate path.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Lap<'a> {
    /// The sender's name for the connection.
    pub local_comm_id: u32,
    /// The receiver's.
    pub remote_comm_id: u32,
    /// The receiver's queue pair (of RD its end-to-end context), 24 bits.
    pub remote_qpn: Qpn,
    /// Code of how long the receiver may take, 5 bits; see [`timeout`](super::timeout).
    pub remote_cm_timeout: u8,
    /// The path.
    pub alternate: Path,
    /// [`Self::PRIVATE_DATA_LEN`] octets.
    pub private_data: &'a [u8],
}

impl<'a> Lap<'a> {
    /// Octets of private data.
    pub const PRIVATE_DATA_LEN: usize = 168;

    pub(super) fn read(input: &'a [u8]) -> Read<'a, Self> {
        let (rest, (local_comm_id, remote_comm_id)) = comm_ids(input)?;
        let (rest, (_, remote_qpn, timeout, _)) = (be_u32, qpn, be_u8, be_u32).parse(rest)?;
        let (rest, alternate) = Path::read_lap(rest)?;
        let (rest, private_data) = octets(Self::PRIVATE_DATA_LEN, rest)?;
        let lap = Self {
            local_comm_id,
            remote_comm_id,
            remote_qpn,
            remote_cm_timeout: bits(timeout, 3, 5),
            alternate,
            private_data,
        };
        Ok((rest, lap))
    }

    pub(super) fn write(&self, out: &mut Body) {
        out.u32(self.local_comm_id);
        out.u32(self.remote_comm_id);
        out.reserved(4);
        out.u24(self.remote_qpn.0);
        out.u8(up(self.remote_cm_timeout, 3, 5));
        out.reserved(4);
        self.alternate.write_lap(out);
        out.octets(self.private_data, Self::PRIVATE_DATA_LEN);
    }
}

/// Reply to a LAP: alternate path response.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Apr<'a> {
    /// The sender's name for the connection.
    pub local_comm_id: u32,
    /// The receiver's.
    pub remote_comm_id: u32,
    /// Octets of `info` that are valid; see [`Self::additional_info`].
    pub info_len: u8,
    /// [`Self::LOADED`], or why not; see [`Self::status_name`].
    pub status: u8,
    /// Additional information, [`Self::INFO_LEN`] octets; what it is depends on the status.
    pub info: &'a [u8],
    /// [`Self::PRIVATE_DATA_LEN`] octets.
    pub private_data: &'a [u8],
}

impl<'a> Apr<'a> {
    /// Octets of private data.
    pub const PRIVATE_DATA_LEN: usize = 148;
    /// Octets of additional information.
    pub const INFO_LEN: usize = 72;

    /// `status`: the path is loaded.
    pub const LOADED: u8 = 0;

    /// The status in the field's words; `None` if it is reserved.
    pub const fn status_name(&self) -> Option<&'static str> {
        Some(match self.status {
            Self::LOADED => "alternate path loaded",
            1 => "invalid communication ID",
            2 => "alternate paths are not supported",
            3 => "rejected",
            4 => "redirected",
            5 => "proposed path is the current one",
            6 => "QPN or EECN and communication ID do not match",
            7 => "alternate remote port LID rejected",
            8 => "alternate remote port GID rejected",
            9 => "alternate flow label rejected",
            10 => "alternate traffic class rejected",
            11 => "alternate hop limit rejected",
            12 => "alternate packet rate rejected",
            13 => "alternate SL rejected",
            _ => return None,
        })
    }

    /// The valid octets of `info`: as many as `info_len` says, but not more than there are.
    pub fn additional_info(&self) -> &'a [u8] {
        &self.info[..self.info.len().min(self.info_len.into())]
    }

    pub(super) fn read(input: &'a [u8]) -> Read<'a, Self> {
        let (rest, (local_comm_id, remote_comm_id)) = comm_ids(input)?;
        let (rest, (info_len, status, _)) = (be_u8, be_u8, be_u16).parse(rest)?;
        let (rest, info) = octets(Self::INFO_LEN, rest)?;
        let (rest, private_data) = octets(Self::PRIVATE_DATA_LEN, rest)?;
        Ok((rest, Self { local_comm_id, remote_comm_id, info_len, status, info, private_data }))
    }

    pub(super) fn write(&self, out: &mut Body) {
        out.u32(self.local_comm_id);
        out.u32(self.remote_comm_id);
        out.u8(self.info_len);
        out.u8(self.status);
        out.reserved(2);
        out.octets(self.info, Self::INFO_LEN);
        out.octets(self.private_data, Self::PRIVATE_DATA_LEN);
    }
}

#[cfg(test)]
mod tests {
    use super::{super::tests::*, *};
    use crate::wire::{
        ids::Gid,
        mad::cm::{APR, LAP, Message, path::tests::any_path},
    };
    use hex_literal::hex;
    use proptest::prelude::*;

    #[test]
    fn every_field_of_a_lap_has_its_place() {
        let octets = body(&hex!(
            "01020304 05060708 00000000 212223 a8 00000000 3132 3334"
            "a1a2a3a4a5a6a7a8a9aaabacadaeafa0 b1b2b3b4b5b6b7b8b9babbbcbdbebfb0"
            "c1c2c 0 d1 d2 2d e8 98 7e"
        ));
        let lap = Lap {
            local_comm_id: 0x0102_0304,
            remote_comm_id: 0x0506_0708,
            remote_qpn: Qpn(0x21_2223),
            remote_cm_timeout: 21,
            alternate: Path {
                local_lid: 0x3132,
                remote_lid: 0x3334,
                local_gid: Gid(hex!("a1a2a3a4a5a6a7a8a9aaabacadaeafa0")),
                remote_gid: Gid(hex!("b1b2b3b4b5b6b7b8b9babbbcbdbebfb0")),
                flow_label: 0xc_1c2c,
                rate: 0x2d,
                traffic_class: 0xd1,
                hop_limit: 0xd2,
                service_level: 14,
                subnet_local: true,
                ack_timeout: 19,
            },
            private_data: &octets[64..],
        };
        both_ways(LAP, Message::Lap(lap), &octets);
    }

    #[test]
    fn every_field_of_an_apr_has_its_place() {
        let mut octets = body(&hex!("01020304 05060708 03 09 0000 515253"));
        octets[83..85].copy_from_slice(&[0x61, 0x62]);
        let apr = Apr {
            local_comm_id: 0x0102_0304,
            remote_comm_id: 0x0506_0708,
            info_len: 3,
            status: 9,
            info: &octets[12..84],
            private_data: &octets[84..],
        };
        both_ways(APR, Message::Apr(apr), &octets);
        assert_eq!(apr.additional_info(), hex!("515253"));
        assert_eq!(Apr { info_len: 73, ..apr }.additional_info(), apr.info);
        assert_eq!(apr.status_name(), Some("alternate flow label rejected"));
        assert_eq!(Apr { status: 14, ..apr }.status_name(), None);
    }

    #[test]
    fn truncated() {
        short_bodies(LAP, &[(0, 0), (11, 8), (15, 15), (25, 24), (63, 63), (231, 64)]);
        short_bodies(APR, &[(0, 0), (11, 10), (83, 12), (231, 84)]);
    }

    proptest! {
        #[test]
        fn lap_round_trip(
            local_comm_id: u32, remote_comm_id: u32, qpn in 0u32..1 << 24,
            remote_cm_timeout in 0u8..32, alternate in any_path(),
            data in octets_of(Lap::PRIVATE_DATA_LEN),
        ) {
            let (remote_qpn, private_data) = (Qpn(qpn), &data[..]);
            comes_back(Message::Lap(Lap {
                local_comm_id, remote_comm_id, remote_qpn, remote_cm_timeout, alternate,
                private_data,
            }))?;
        }

        #[test]
        fn apr_round_trip(
            local_comm_id: u32, remote_comm_id: u32, info_len: u8, status: u8,
            info in octets_of(Apr::INFO_LEN), data in octets_of(Apr::PRIVATE_DATA_LEN),
        ) {
            let (info, private_data) = (&info[..], &data[..]);
            comes_back(Message::Apr(Apr {
                local_comm_id, remote_comm_id, info_len, status, info, private_data,
            }))?;
        }

        #[test]
        fn any_bytes_are_emitted_as_they_were(octets in any_body()) {
            survives(LAP, &octets, &[
                (8, 0xff), (9, 0xff), (10, 0xff), (11, 0xff), (15, 0x07),
                (16, 0xff), (17, 0xff), (18, 0xff), (19, 0xff),
                (58, 0x0f), (61, 0xc0), (62, 0x07), (63, 0x07),
            ])?;
            survives(APR, &octets, &[(10, 0xff), (11, 0xff)])?;
        }
    }
}
