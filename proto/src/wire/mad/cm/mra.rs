//! MRA: message receipt acknowledgement (IBTA vol. 1, 12.6.6). A message has come; the answer takes
//! longer than was asked for.
//!
//! ```text
//!   0                   1                   2                   3
//!   0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  |                     Local communication ID                    |   0
//!  |                     Remote communication ID                   |   4
//!  |MSG|  Reserved | Timeout | Rsv |                               |   8
//!  +                     Private data (222 octets)                 +  10
//! ```

use nom::{Parser, number::complete::be_u8};

use super::codec::{Body, Read, bits, comm_ids, octets, up};

/// Message receipt acknowledgement.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Mra<'a> {
    /// The sender's name for the connection.
    pub local_comm_id: u32,
    /// The receiver's.
    pub remote_comm_id: u32,
    /// What was received: [`Self::REQ`], [`Self::REP`] or [`Self::LAP`]; 2 bits.
    pub message: u8,
    /// Code of the time asked for, 5 bits; see [`timeout`](super::timeout).
    pub service_timeout: u8,
    /// [`Self::PRIVATE_DATA_LEN`] octets.
    pub private_data: &'a [u8],
}

impl<'a> Mra<'a> {
    /// Octets of private data.
    pub const PRIVATE_DATA_LEN: usize = 222;

    /// `message`: a REQ was received.
    pub const REQ: u8 = 0;
    /// `message`: a REP was received.
    pub const REP: u8 = 1;
    /// `message`: a LAP was received.
    pub const LAP: u8 = 2;

    /// What was received, by name.
    pub const fn message_name(&self) -> Option<&'static str> {
        match self.message {
            Self::REQ => Some("REQ"),
            Self::REP => Some("REP"),
            Self::LAP => Some("LAP"),
            _ => None,
        }
    }

    pub(super) fn read(input: &'a [u8]) -> Read<'a, Self> {
        let (rest, (local_comm_id, remote_comm_id)) = comm_ids(input)?;
        let (rest, (message, timeout)) = (be_u8, be_u8).parse(rest)?;
        let (rest, private_data) = octets(Self::PRIVATE_DATA_LEN, rest)?;
        let (message, service_timeout) = (bits(message, 6, 2), bits(timeout, 3, 5));
        Ok((rest, Self { local_comm_id, remote_comm_id, message, service_timeout, private_data }))
    }

    pub(super) fn write(&self, out: &mut Body) {
        out.u32(self.local_comm_id);
        out.u32(self.remote_comm_id);
        out.u8(up(self.message, 6, 2));
        out.u8(up(self.service_timeout, 3, 5));
        out.octets(self.private_data, Self::PRIVATE_DATA_LEN);
    }
}

#[cfg(test)]
mod tests {
    use super::{super::tests::*, *};
    use crate::wire::mad::cm::{MRA, Message};
    use hex_literal::hex;
    use proptest::prelude::*;

    #[test]
    fn every_field_has_its_place() {
        let octets = body(&hex!("01020304 05060708 80 a8 7e7e7e"));
        let mra = Mra {
            local_comm_id: 0x0102_0304,
            remote_comm_id: 0x0506_0708,
            message: Mra::LAP,
            service_timeout: 21,
            private_data: &octets[10..],
        };
        both_ways(MRA, Message::Mra(mra), &octets);
        assert_eq!(mra.message_name(), Some("LAP"));
        assert_eq!(Mra { message: 3, ..mra }.message_name(), None);
    }

    #[test]
    fn truncated() {
        short_bodies(MRA, &[(0, 0), (3, 0), (9, 9), (10, 10), (231, 10)]);
    }

    proptest! {
        #[test]
        fn round_trip(
            local_comm_id: u32, remote_comm_id: u32, message in 0u8..4, service_timeout in 0u8..32,
            data in octets_of(Mra::PRIVATE_DATA_LEN),
        ) {
            let private_data = &data;
            let mra = Mra { local_comm_id, remote_comm_id, message, service_timeout, private_data };
            comes_back(Message::Mra(mra))?;
        }

        #[test]
        fn any_bytes_are_emitted_as_they_were(octets in any_body()) {
            survives(MRA, &octets, &[(8, 0x3f), (9, 0x07)])?;
        }
    }
}
