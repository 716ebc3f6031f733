//! RTU: ready to use (IBTA vol. 1, 12.6.9).
//!
//! ```text
//!   0                   1                   2                   3
//!   0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  |                     Local communication ID                    |   0
//!  |                     Remote communication ID                   |   4
//!  +                     Private data (224 octets)                 +   8
//! ```

use super::codec::{Body, Read, comm_ids, octets};

/// Ready to use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Rtu<'a> {
    /// The sender's name for the connection.
    pub local_comm_id: u32,
    /// The receiver's.
    pub remote_comm_id: u32,
    /// [`Self::PRIVATE_DATA_LEN`] octets.
    pub private_data: &'a [u8],
}

impl<'a> Rtu<'a> {
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
    use crate::wire::mad::cm::{Message, RTU};
    use hex_literal::hex;
    use proptest::prelude::*;

    #[test]
    fn an_rtu_of_linux() {
        let octets = body(&hex!("c804b188 5b6344c8"));
        let rtu = Rtu {
            local_comm_id: 0xc804_b188,
            remote_comm_id: 0x5b63_44c8,
            private_data: &octets[8..],
        };
        both_ways(RTU, Message::Rtu(rtu), &octets);
    }

    #[test]
    fn truncated() {
        short_bodies(RTU, &[(0, 0), (7, 4), (8, 8), (231, 8)]);
    }

    proptest! {
        #[test]
        fn round_trip(
            local_comm_id: u32, remote_comm_id: u32, data in octets_of(Rtu::PRIVATE_DATA_LEN),
        ) {
            comes_back(Message::Rtu(Rtu { local_comm_id, remote_comm_id, private_data: &data }))?;
        }

        #[test]
        fn any_bytes_are_emitted_as_they_were(octets in any_body()) {
            survives(RTU, &octets, &[])?;
        }
    }
}
