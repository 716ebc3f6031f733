//! ACK extended transport header.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// ACK extended transport header.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct Aeth {
    /// What is acknowledged or refused.
    pub syndrome: u8,
    /// How many messages are done, 24 bits.
    pub msn: [u8; 3],
}

const _: () = assert!(size_of::<Aeth>() == 4);

/// What an AETH's syndrome says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Syndrome {
    /// ACK with a credit code, 0 to 31; 31 gives no credit information.
    Ack(u8),
    /// Receiver not ready, with a timer code, 0 to 31.
    RnrNak(u8),
    /// Reserved: the octet.
    Reserved(u8),
    /// NAK with a code; see [`NakCode`].
    Nak(NakCode),
}

/// Why a request was refused; open.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct NakCode(pub u8);

impl Aeth {
    /// What the syndrome says.
    pub const fn syndrome(&self) -> Syndrome {
        unimplemented!()
    }
    /// How many messages are done, modulo 2^24.
    pub const fn msn(&self) -> u32 {
        let [a, b, c] = self.msn;
        u32::from_be_bytes([0, a, b, c])
    }
}

/// The credits that an ACK's code grants; `None` for 31, no credit information.
pub const fn credits(_code: u8) -> Option<u16> {
    unimplemented!()
}

/// Microseconds that an RNR NAK's timer code (0 to 31) asks to wait.
pub const fn rnr_micros(_code: u8) -> u32 {
    unimplemented!()
}

impl NakCode {
    /// The name in the field's words, such as `PSN sequence error`.
    pub const fn name(self) -> Option<&'static str> {
        unimplemented!()
    }
}
