//! What the pingpong programs of libibverbs say to each other over TCP: their queue pairs'
//! addresses, as text.
//!
//! ```text
//! LLLL:QQQQQQ:PPPPPP:GGGGGGGGGGGGGGGGGGGGGGGGGGGGGGGG NUL          52 octets
//! LID  QPN    PSN    GID                                           hexadecimal
//! ```
//!
//! The GID is its 16 octets in their order; RoCE over IPv4 has the address mapped in. The LID has a
//! meaning in InfiniBand alone and is 0 in RoCE. A program that was not told a GID index says a GID
//! of zeros.
//!
//! | | rc, uc, ud | srq |
//! |---|---|---|
//! | client | its address | 256 addresses, those beyond its queue pairs all zero |
//! | server | (brings its queue pair up) its address | (brings them up) 256 addresses |
//! | client | `done` and NUL | the same |
//!
//! The programs of rc, uc and ud read each of these by one call and take nothing but the whole, so
//! each is to be sent by one call. Nothing tells which of the four programs it is: see [`why_not`].

use std::fmt;

use userdma::{
    Qpn,
    proto::wire::ids::{Gid, Psn},
};

/// The TCP port of all four programs.
pub(crate) const PORT: u16 = 18515;

/// Octets of an address.
pub(crate) const LEN: usize = 52;

/// Addresses that srq says, however many queue pairs there are.
pub(crate) const SRQ_ADDRESSES: usize = 256;

/// What the client says last.
pub(crate) const DONE: &[u8; 5] = b"done\0";

/// What a queue pair is reached by.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Address {
    /// Local identifier: 0 in RoCE.
    pub(crate) lid: u16,
    /// Its number.
    pub(crate) qpn: Qpn,
    /// The first PSN that it sends.
    pub(crate) psn: Psn,
    /// The host, as an IPv6 address; zeros: not told.
    pub(crate) gid: Gid,
}

/// Why some octets are no address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Malformed {
    /// Something else stands at this offset than a colon, or the final NUL.
    Separator {
        /// From 0.
        at: usize,
        /// What is there.
        found: u8,
    },
    /// No hexadecimal digit at this offset.
    Digit {
        /// From 0.
        at: usize,
        /// What is there.
        found: u8,
    },
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (at, found, wanted) = match *self {
            Self::Separator { at, found } if at == LEN - 1 => (at, found, "the final NUL"),
            Self::Separator { at, found } => (at, found, "a colon"),
            Self::Digit { at, found } => (at, found, "a hexadecimal digit"),
        };
        write!(f, "octet {at} is '{}' instead of {wanted}", found.escape_ascii())
    }
}

impl std::error::Error for Malformed {}

/// Offsets of the four numbers, each behind the separator of the one before.
const QPN: usize = 5;
const PSN: usize = 12;
const GID: usize = 19;

impl Address {
    /// The text.
    pub(crate) fn to_line(self) -> [u8; LEN] {
        let mut line = [0; LEN];
        let Self { lid, qpn, psn, gid } = self;
        put(&mut line[..QPN - 1], lid.into());
        put(&mut line[QPN..PSN - 1], qpn.0);
        put(&mut line[PSN..GID - 1], psn.get());
        for colon in [QPN, PSN, GID] {
            line[colon - 1] = b':';
        }
        for (place, octet) in line[GID..].chunks_exact_mut(2).zip(gid.0) {
            put(place, octet.into());
        }
        line
    }

    /// Reads the text; digits of both cases.
    pub(crate) fn from_line(line: &[u8; LEN]) -> Result<Self, Malformed> {
        let lid = get(line, 0, QPN - 1)?;
        let qpn = get(line, QPN, PSN - 1)?;
        let psn = get(line, PSN, GID - 1)?;
        let mut gid = [0; 16];
        for (i, octet) in gid.iter_mut().enumerate() {
            *octet = get(line, GID + 2 * i, GID + 2 * i + 2)? as u8;
        }
        for (at, wanted) in [(QPN - 1, b':'), (PSN - 1, b':'), (GID - 1, b':'), (LEN - 1, 0)] {
            if line[at] != wanted {
                return Err(Malformed::Separator { at, found: line[at] });
            }
        }
        Ok(Self { lid: lid as u16, qpn: Qpn(qpn), psn: Psn::new(psn), gid: Gid(gid) })
    }

    /// Whether it stands for no queue pair: srq fills up with such.
    pub(crate) fn is_unused(self) -> bool {
        self.qpn == Qpn(0)
    }
}

/// As the programs print it.
impl fmt::Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { lid, qpn, psn, gid } = self;
        write!(f, "LID {lid:#06x}, QPN {:#08x}, PSN {:#08x}, GID {gid}", qpn.0, psn.get())
    }
}

/// The digits of `value`, as many as there are places, which is enough.
fn put(places: &mut [u8], mut value: u32) {
    for place in places.iter_mut().rev() {
        *place = b"0123456789abcdef"[(value & 15) as usize];
        value >>= 4;
    }
}

/// The number that stands at `from..to`, at most 8 digits.
fn get(line: &[u8; LEN], from: usize, to: usize) -> Result<u32, Malformed> {
    let mut value = 0;
    for (at, &found) in line.iter().enumerate().take(to).skip(from) {
        let digit = char::from(found).to_digit(16).ok_or(Malformed::Digit { at, found })?;
        value = value << 4 | digit;
    }
    Ok(value)
}

/// What to suspect where the peer's part of the exchange went wrong after `heard` of `wanted`
/// addresses; empty if nothing.
pub(crate) const fn why_not(heard: usize, wanted: usize) -> &'static str {
    if wanted > 1 && heard == 1 {
        " (one address is what ibv_rc_pingpong, ibv_uc_pingpong and ibv_ud_pingpong say: is --type right?)"
    } else if wanted == 1 && heard > 1 {
        " (many addresses are what ibv_srq_pingpong says: is --type right?)"
    } else {
        ""
    }
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;

    fn address(qpn: u32, psn: u32, ip: &str) -> Address {
        let gid = Gid::from(ip.parse::<IpAddr>().unwrap());
        Address { lid: 0, qpn: Qpn(qpn), psn: Psn::new(psn), gid }
    }

    /// What ibv_rc_pingpong said over rxe at 10.99.0.2.
    #[test]
    fn the_text_is_that_of_the_programs() {
        let line = b"0000:000011:084c82:00000000000000000000ffff0a630002\0";
        let address = address(0x11, 0x08_4c82, "10.99.0.2");
        assert_eq!(Address::from_line(line), Ok(address));
        assert_eq!(address.to_line(), *line);
        assert_eq!(
            address.to_string(),
            "LID 0x0000, QPN 0x000011, PSN 0x084c82, GID ::ffff:10.99.0.2"
        );
        assert_eq!(address.gid.to_ip(), IpAddr::from([10, 99, 0, 2]));
    }

    #[test]
    fn both_families_and_both_ends_of_the_ranges() {
        for ip in ["0.0.0.0", "255.255.255.255", "::", "fe80::1", "2001:db8::ffff:1"] {
            for (lid, qpn, psn) in [(0, 0, 0), (1, 2, 3), (0xffff, 0xff_ffff, 0xff_ffff)] {
                let address = Address { lid, ..address(qpn, psn, ip) };
                assert_eq!(Address::from_line(&address.to_line()), Ok(address), "{address}");
            }
        }
        let line = b"00aB:00CDEF:abcdef:FE80000000000000000000000000000F\0";
        let found = Address::from_line(line).unwrap();
        assert_eq!((found.lid, found.qpn, found.psn.get()), (0xab, Qpn(0xcdef), 0xab_cdef));
        assert_eq!(found.gid.to_ip(), "fe80::f".parse::<IpAddr>().unwrap());
    }

    #[test]
    fn an_unused_address_is_zeros() {
        let line = b"0000:000000:000000:00000000000000000000000000000000\0";
        assert_eq!(Address::default().to_line(), *line);
        assert!(Address::from_line(line).unwrap().is_unused());
        assert!(!address(1, 0, "::1").is_unused());
    }

    /// Every octet matters: whatever else stands in its place is refused, and said where.
    #[test]
    fn what_is_no_address_says_where() {
        let good = address(0x123, 0x456, "192.0.2.1").to_line();
        for at in 0..LEN {
            for wrong in [b'g', b' ', b'-', b'+', b'x', 0x80, b'\n', 0xff] {
                let mut line = good;
                line[at] = wrong;
                let error = Address::from_line(&line).unwrap_err();
                let is_separator = [4, 11, 18, 51].contains(&at);
                let expected = match is_separator {
                    true => Malformed::Separator { at, found: wrong },
                    false => Malformed::Digit { at, found: wrong },
                };
                assert_eq!(error, expected);
                assert!(error.to_string().contains(&format!("octet {at} ")), "{error}");
            }
        }
        let mut line = good;
        line[51] = b'0';
        let error = Address::from_line(&line).unwrap_err().to_string();
        assert_eq!(error, "octet 51 is '0' instead of the final NUL");
    }

    #[test]
    fn what_to_suspect() {
        assert!(why_not(1, SRQ_ADDRESSES).contains("ibv_rc_pingpong"));
        assert!(why_not(2, 1).contains("ibv_srq_pingpong"));
        for (heard, wanted) in [(0, 1), (1, 1), (0, SRQ_ADDRESSES), (2, SRQ_ADDRESSES)] {
            assert_eq!(why_not(heard, wanted), "");
        }
    }
}
