//! Congestion notification packet (IBTA vol. 1, annex A17.9.1): tells the sender of a queue pair
//! that its packets were marked on the way. It carries nothing but zeros.
//!
//! ```text
//!   0                   1                   2                   3
//!   0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  | OpCode = 0x81 |0|0| 0 |   0   |             P_Key             |  BTH
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  |0|1|     0     |         QP that is to slow down               |
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  |0|      0      |                    PSN = 0                    |
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  +                       16 octets of zeros                      +
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! ```

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::{CNP_LEN, bth::Bth, opcode::Opcode};
use crate::wire::ids::{PKey, Psn, Qpn};

/// A congestion notification packet from its BTH to the ICRC, which follows.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct Cnp {
    /// Base transport header; BECN is set.
    pub bth: Bth,
    /// Zeros.
    pub reserved: [u8; CNP_LEN],
}

const _: () = assert!(size_of::<Cnp>() == 28);

impl Cnp {
    /// Octets on the wire, without the ICRC.
    pub const LEN: usize = 28;

    /// A packet that asks the sender of queue pair `dest_qp` at the destination to slow down.
    /// MigReq is 0, as hardware sends it in these (seen of a ConnectX-4 Lx).
    pub const fn new(pkey: PKey, dest_qp: Qpn) -> Self {
        let bth = Bth::new(Opcode::CNP, pkey, dest_qp, Psn::new(0));
        Self { bth: bth.with_migreq(false).with_becn(true), reserved: [0; CNP_LEN] }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hex_literal::hex;
    use proptest::prelude::*;

    #[test]
    fn example() {
        let wire = hex!("81 00 ffff 40 000118 00 000000 00000000000000000000000000000000");
        let cnp = Cnp::new(PKey(0xffff), Qpn(0x118));
        assert_eq!(cnp.as_bytes(), wire);
        let found = Cnp::read_from_bytes(&wire).unwrap();
        assert_eq!((found, found.bth.opcode()), (cnp, Opcode::CNP));
        assert!(found.bth.becn() && !found.bth.fecn() && !found.bth.ack_req());
    }

    proptest! {
        #[test]
        fn round_trip(pkey: u16, qpn in 0u32..1 << 24) {
            let cnp = Cnp::new(PKey(pkey.into()), Qpn(qpn));
            let found = Cnp::read_from_bytes(cnp.as_bytes()).unwrap();
            prop_assert_eq!((found.bth.pkey().0, found.bth.dest_qp().0), (pkey.into(), qpn));
            prop_assert_eq!((found.bth.psn(), found.reserved), (Psn::new(0), [0; 16]));
        }

        #[test]
        fn any_bytes_survive(wire: [u8; 28]) {
            let cnp = Cnp::read_from_bytes(&wire).unwrap();
            prop_assert_eq!(cnp.as_bytes(), wire);
        }
    }
}
