//! Datagram extended transport header (IBTA vol. 1, 9.3.2): UD, and requests of RD.
//!
//! ```text
//!   0                   1                   2                   3
//!   0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  |                             Q_Key                             |
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  |    reserved   |                   Source QP                   |
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! ```

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned, network_endian::U32};

use super::u24;
use crate::wire::ids::{QKey, Qpn};

/// Datagram extended transport header.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct Deth {
    /// What the receiving queue pair must hold.
    pub qkey: U32,
    /// Reserved.
    pub reserved: u8,
    /// The sending queue pair.
    pub src_qp: [u8; 3],
}

const _: () = assert!(size_of::<Deth>() == 8);

impl Deth {
    /// Octets on the wire.
    pub const LEN: usize = 8;

    /// A header; of `src_qp` the low 24 bits go out.
    #[inline]
    pub const fn new(qkey: QKey, src_qp: Qpn) -> Self {
        Self { qkey: U32::new(qkey.0), reserved: 0, src_qp: u24::to_bytes(src_qp.0) }
    }

    /// The queue key: what the receiving queue pair must hold.
    #[inline]
    pub const fn qkey(&self) -> QKey {
        QKey(self.qkey.get())
    }

    /// The sending queue pair: where an answer goes.
    #[inline]
    pub const fn src_qp(&self) -> Qpn {
        Qpn(u24::from_bytes(self.src_qp))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::mad::{GSI_QKEY, GSI_QPN};
    use hex_literal::hex;
    use proptest::prelude::*;

    #[test]
    fn example() {
        // Of every management datagram.
        let wire = hex!("80010000 00 000001");
        let deth = Deth::new(GSI_QKEY, GSI_QPN);
        assert_eq!(deth.as_bytes(), wire);
        let found = Deth::read_from_bytes(&wire).unwrap();
        assert_eq!((found, found.qkey(), found.src_qp()), (deth, GSI_QKEY, GSI_QPN));
    }

    proptest! {
        #[test]
        fn round_trip(qkey: u32, qpn in 0u32..1 << 24) {
            let deth = Deth::new(QKey(qkey), Qpn(qpn));
            let found = Deth::read_from_bytes(deth.as_bytes()).unwrap();
            prop_assert_eq!((found.qkey().0, found.src_qp().0, found.reserved), (qkey, qpn, 0));
        }

        #[test]
        fn any_bytes_survive(wire: [u8; 8]) {
            let deth = Deth::read_from_bytes(&wire).unwrap();
            prop_assert_eq!(deth.as_bytes(), wire);
            let again = Deth { reserved: wire[4], ..Deth::new(deth.qkey(), deth.src_qp()) };
            prop_assert_eq!(again, deth);
        }
    }
}
