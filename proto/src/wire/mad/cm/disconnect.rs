//! DREQ and DREP: a connection's end (IBTA vol. 1, 12.6.10 and 12.6.11).
//!
//! ```text
//!   0                   1                   2                   3
//!   0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  |                     Local communication ID                    |   0
//!  |                     Remote communication ID                   |   4
//!  |              Remote QPN or EECN               |    Reserved   |   8  DREQ only
//!  +         Private data (DREQ 220 octets, DREP 224)              +  12, 8
//! ```

use nom::{Parser, number::complete::be_u8};

use super::codec::{Body, Read, comm_ids, octets, qpn};
use crate::wire::ids::Qpn;

/// Request to disconnect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Dreq<'a> {
    /// The sender's name for the connection.
    pub local_comm_id: u32,
    /// The receiver's.
    pub remote_comm_id: u32,
    /// The receiver's queue pair (of RD its end-to-end context), 24 bits.
    pub remote_qpn: Qpn,
    /// [`Self::PRIVATE_DATA_LEN`] octets.
    pub private_data: &'a [u8],
}

impl<'a> Dreq<'a> {
    /// Octets of private data.
    pub const PRIVATE_DATA_LEN: usize = 220;

    pub(super) fn read(input: &'a [u8]) -> Read<'a, Self> {
        let (rest, (local_comm_id, remote_comm_id)) = comm_ids(input)?;
        let (rest, (remote_qpn, _)) = (qpn, be_u8).parse(rest)?;
        let (rest, private_data) = octets(Self::PRIVATE_DATA_LEN, rest)?;
        Ok((rest, Self { local_comm_id, remote_comm_id, remote_qpn, private_data }))
    }

    pub(super) fn write(&self, out: &mut Body) {
        out.u32(self.local_comm_id);
        out.u32(self.remote_comm_id);
        out.u24(self.remote_qpn.0);
        out.reserved(1);
        out.octets(self.private_data, Self::PRIVATE_DATA_LEN);
    }
}

/// Reply to a DREQ.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Drep<'a> {
    /// The sender's name for the connection.
    pub local_comm_id: u32,
    /// The receiver's.
    pub remote_comm_id: u32,
    /// [`Self::PRIVATE_DATA_LEN`] octets.
    pub private_data: &'a [u8],
}

impl<'a> Drep<'a> {
    /// Octets of private data.
    pub const PRIVATE_DATA_LEN: usize = 224;

    pub(super) fn read(input: &'a [u8]) -> Read<'a, Self> {
        let (rest, (local_comm_id, remote_comm_id)) = comm_ids(input)?;
        let (rest, private_data) = octets(Self::PRIVATE_DATA_LEN, rest)?;
        Ok((rest, Self { local_comm_id, remote_comm_id, private_data }))
    }

    pub(super) fn write(&self, out: &mut Body) {
        out.u32(self.local_comm_id);
        out.u32(self.remote_comm_id);
        out.octets(self.private_data, Self::PRIVATE_DATA_LEN);
    }
}

#[cfg(test)]
mod tests {
    use super::{super::tests::*, *};
    use crate::wire::mad::cm::{DREP, DREQ, Message};
    use hex_literal::hex;
    use proptest::prelude::*;

    #[test]
    fn a_dreq_and_a_drep_of_linux() {
        let octets = body(&hex!("c804b188 5b6344c8 000029 00"));
        let dreq = Dreq {
            local_comm_id: 0xc804_b188,
            remote_comm_id: 0x5b63_44c8,
            remote_qpn: Qpn(0x29),
            private_data: &octets[12..],
        };
        both_ways(DREQ, Message::Dreq(dreq), &octets);

        let octets = body(&hex!("5b6344c8 c804b188"));
        let drep = Drep {
            local_comm_id: 0x5b63_44c8,
            remote_comm_id: 0xc804_b188,
            private_data: &octets[8..],
        };
        both_ways(DREP, Message::Drep(drep), &octets);
    }

    #[test]
    fn truncated() {
        short_bodies(DREQ, &[(0, 0), (10, 8), (11, 11), (12, 12), (231, 12)]);
        short_bodies(DREP, &[(0, 0), (7, 4), (8, 8), (231, 8)]);
    }

    proptest! {
        #[test]
        fn dreq_round_trip(
            local_comm_id: u32, remote_comm_id: u32, qpn in 0u32..1 << 24,
            data in octets_of(Dreq::PRIVATE_DATA_LEN),
        ) {
            let (remote_qpn, private_data) = (Qpn(qpn), &data[..]);
            let dreq = Dreq { local_comm_id, remote_comm_id, remote_qpn, private_data };
            comes_back(Message::Dreq(dreq))?;
        }

        #[test]
        fn drep_round_trip(
            local_comm_id: u32, remote_comm_id: u32, data in octets_of(Drep::PRIVATE_DATA_LEN),
        ) {
            comes_back(Message::Drep(Drep { local_comm_id, remote_comm_id, private_data: &data }))?;
        }

        #[test]
        fn any_bytes_are_emitted_as_they_were(octets in any_body()) {
            survives(DREQ, &octets, &[(11, 0xff)])?;
            survives(DREP, &octets, &[])?;
        }
    }
}
