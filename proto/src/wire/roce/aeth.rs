//! ACK extended transport header (IBTA vol. 1, 9.3.5; codes: 9.7.5.1 and 9.7.5.2).
//!
//! ```text
//!   0                   1                   2                   3
//!   0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  |0|typ|  value  |            Message Sequence Number            |
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!
//!   typ 00: ACK, value is a credit code     01: RNR NAK, value is a timer code
//!       10: reserved                        11: NAK, value is a reason
//! ```

use core::fmt;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use super::u24;

/// ACK extended transport header.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned,
)]
#[repr(C)]
pub struct Aeth {
    /// What is acknowledged or refused; [`Aeth::syndrome`] decodes it.
    pub syndrome: u8,
    /// How many messages are done, 24 bits.
    pub msn: [u8; 3],
}

const _: () = assert!(size_of::<Aeth>() == 4);

impl Aeth {
    /// Octets on the wire.
    pub const LEN: usize = 4;

    /// A header; of `msn` the low 24 bits go out.
    #[inline]
    pub const fn new(syndrome: Syndrome, msn: u32) -> Self {
        Self { syndrome: syndrome.to_octet(), msn: u24::to_bytes(msn) }
    }

    /// What the syndrome says.
    #[inline]
    pub const fn syndrome(&self) -> Syndrome {
        Syndrome::from_octet(self.syndrome)
    }

    /// How many messages are done, modulo 2^24.
    #[inline]
    pub const fn msn(&self) -> u32 {
        u24::from_bytes(self.msn)
    }
}

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

impl Syndrome {
    /// ACK without credit information: flow control is off.
    pub const ACK: Self = Self::Ack(NO_CREDITS);

    /// Reads the octet; every value is something. One with bit 7 set is reserved.
    #[inline]
    pub const fn from_octet(octet: u8) -> Self {
        let value = octet & 0x1f;
        match octet >> 5 {
            0b000 => Self::Ack(value),
            0b001 => Self::RnrNak(value),
            0b011 => Self::Nak(NakCode(value)),
            _ => Self::Reserved(octet),
        }
    }

    /// The octet. Of codes the low 5 bits are taken.
    #[inline]
    pub const fn to_octet(self) -> u8 {
        match self {
            Self::Ack(code) => code & 0x1f,
            Self::RnrNak(code) => 0x20 | (code & 0x1f),
            Self::Reserved(octet) => octet,
            Self::Nak(code) => 0x60 | (code.0 & 0x1f),
        }
    }
}

/// Why a request was refused; open.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct NakCode(pub u8);

impl NakCode {
    /// A PSN was skipped: send again from the PSN of this NAK.
    pub const PSN_SEQUENCE: Self = Self(0);
    /// The request has a form that is not allowed.
    pub const INVALID_REQUEST: Self = Self(1);
    /// Key, protection domain, rights or bounds do not allow it.
    pub const REMOTE_ACCESS: Self = Self(2);
    /// The responder itself failed.
    pub const REMOTE_OPERATIONAL: Self = Self(3);
    /// An RD request for a queue pair or context that does not take it.
    pub const INVALID_RD_REQUEST: Self = Self(4);

    /// The name in the field's words, such as `PSN sequence error`.
    pub const fn name(self) -> Option<&'static str> {
        Some(match self {
            Self::PSN_SEQUENCE => "PSN sequence error",
            Self::INVALID_REQUEST => "invalid request",
            Self::REMOTE_ACCESS => "remote access error",
            Self::REMOTE_OPERATIONAL => "remote operational error",
            Self::INVALID_RD_REQUEST => "invalid RD request",
            _ => return None,
        })
    }
}

impl fmt::Display for NakCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name),
            None => write!(f, "NAK code {:#04x}", self.0),
        }
    }
}

impl fmt::Debug for NakCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Credit code of an ACK that tells no credits.
pub const NO_CREDITS: u8 = 31;

/// What each credit code grants, in messages.
static CREDITS: [u16; 31] = [
    0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536,
    2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768,
];

/// What each RNR timer code stands for, in units of 10 µs.
static RNR_TIMER: [u32; 32] = [
    65536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536,
    2048, 3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152,
];

/// How many messages an ACK's credit code lets the requester have outstanding; `None` for
/// [`NO_CREDITS`]. Of `code` the low 5 bits are taken.
pub const fn credits(code: u8) -> Option<u16> {
    match code & 0x1f {
        NO_CREDITS => None,
        code => Some(CREDITS[code as usize]),
    }
}

/// The credit code that grants as much as possible of `messages`, and no more.
pub fn credit_code(messages: u32) -> u8 {
    let above = CREDITS.partition_point(|&granted| u32::from(granted) <= messages);
    // The first code grants 0, so at least one is not above.
    above as u8 - 1
}

/// Microseconds that an RNR NAK's timer code asks to wait; code 0 is the longest time. Of `code`
/// the low 5 bits are taken.
pub const fn rnr_micros(code: u8) -> u32 {
    RNR_TIMER[(code & 0x1f) as usize] * 10
}

/// The timer code of the shortest time that is at least `micros`; the longest there is (655.36 ms)
/// where none is.
pub fn rnr_code(micros: u32) -> u8 {
    (1..32).find(|&code| rnr_micros(code) >= micros).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use hex_literal::hex;
    use proptest::prelude::*;
    use std::{format, vec::Vec};

    #[test]
    fn example() {
        let wire = hex!("62 000001");
        let aeth = Aeth::new(Syndrome::Nak(NakCode::REMOTE_ACCESS), 1);
        assert_eq!(aeth.as_bytes(), wire);
        let found = Aeth::read_from_bytes(&wire).unwrap();
        assert_eq!((found, found.msn()), (aeth, 1));
        assert_eq!(format!("{:?}", found.syndrome()), "Nak(remote access error)");
        assert_eq!(Aeth::new(Syndrome::ACK, 0x0100_0002).as_bytes(), hex!("1f 000002"));
        assert_eq!(Aeth::new(Syndrome::RnrNak(12), 1).as_bytes(), hex!("2c 000001"));
    }

    #[test]
    fn every_octet_is_something_and_goes_round() {
        for octet in 0..=255 {
            let syndrome = Syndrome::from_octet(octet);
            assert_eq!(syndrome.to_octet(), octet);
            let reserved = octet & 0x80 != 0 || octet & 0x60 == 0x40;
            assert_eq!(syndrome == Syndrome::Reserved(octet), reserved, "{octet:#x}");
        }
        assert_eq!(Syndrome::Ack(0xff).to_octet(), 0x1f);
        assert_eq!(Syndrome::Nak(NakCode(0xff)).to_octet(), 0x7f);
    }

    #[test]
    fn reasons_have_names() {
        let names: Vec<_> = (0..6).map(|code| format!("{}", NakCode(code))).collect();
        let expected = [
            "PSN sequence error",
            "invalid request",
            "remote access error",
            "remote operational error",
            "invalid RD request",
            "NAK code 0x05",
        ];
        assert_eq!(names, expected);
    }

    #[test]
    fn credit_codes() {
        // IBTA: codes come in pairs, 2^n and 1.5 × 2^n.
        for code in 3..30 {
            assert_eq!(
                credits(code + 2).unwrap_or(0),
                credits(code).unwrap() * 2 * u16::from(code < 29)
            );
        }
        assert_eq!([0, 1, 2, 3, 4, 5].map(|c| credits(c).unwrap()), [0, 1, 2, 3, 4, 6]);
        assert_eq!((credits(30), credits(NO_CREDITS), credits(0x20)), (Some(32768), None, Some(0)));
        for (messages, code) in [(0, 0), (1, 1), (5, 4), (6, 5), (7, 5), (100, 13), (u32::MAX, 30)]
        {
            assert_eq!(credit_code(messages), code, "{messages}");
        }
    }

    #[test]
    fn rnr_timers() {
        let micros: Vec<_> = (0..32).map(rnr_micros).collect();
        let expected = [
            655_360, 10, 20, 30, 40, 60, 80, 120, 160, 240, 320, 480, 640, 960, 1280, 1920, 2560,
            3840, 5120, 7680, 10_240, 15_360, 20_480, 30_720, 40_960, 61_440, 81_920, 122_880,
            163_840, 245_760, 327_680, 491_520,
        ];
        assert_eq!(micros, expected);
        assert_eq!(rnr_micros(0x2c), 640);
        for code in 0..32 {
            assert_eq!(rnr_code(rnr_micros(code)), code);
        }
        assert_eq!([0, 11, 491_521, u32::MAX].map(rnr_code), [1, 2, 0, 0]);
    }

    proptest! {
        #[test]
        fn any_bytes_survive(wire: [u8; 4]) {
            let aeth = Aeth::read_from_bytes(&wire).unwrap();
            prop_assert_eq!(aeth.as_bytes(), wire);
            prop_assert_eq!(Aeth::new(aeth.syndrome(), aeth.msn()), aeth);
        }

        #[test]
        fn credit_codes_never_grant_too_much(messages: u32) {
            let code = credit_code(messages);
            prop_assert!(u32::from(credits(code).unwrap()) <= messages);
            prop_assert!(credits(code + 1).is_none_or(|more| u32::from(more) > messages));
        }
    }
}
