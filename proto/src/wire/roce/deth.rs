//! Datagram extended transport header.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned, network_endian::U32};

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
    /// The queue key.
    pub fn qkey(&self) -> QKey {
        QKey(self.qkey.get())
    }
    /// The sending queue pair.
    pub const fn src_qp(&self) -> Qpn {
        let [a, b, c] = self.src_qp;
        Qpn(u32::from_be_bytes([0, a, b, c]))
    }
}
