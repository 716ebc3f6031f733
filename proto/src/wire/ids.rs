//! Numbers with a meaning.

use core::fmt;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident, $width:literal) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        pub struct $name(pub u32);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!("{:#0", $width, "x}"), self.0)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($name), "({})"), self)
            }
        }
    };
}

id! {
    /// Local key: names a region in the program's own work requests.
    LKey, 10
}

id! {
    /// Remote key: names a region to peers.
    RKey, 10
}

id! {
    /// Steering tag: what iWARP calls a remote key, and the name of a READ's sink on the wire
    /// (RFC 5041 §2.3).
    Stag, 10
}

id! {
    /// Queue pair number, 24 bits.
    Qpn, 8
}

id! {
    /// Queue key: what a UD packet must carry to be taken by a queue pair.
    QKey, 10
}

id! {
    /// Partition key, 16 bits; bit 15 says full member.
    PKey, 6
}

/// Packet sequence number, 24 bits: arithmetic wraps, and "after" means within the next 2^23
/// (IBTA vol. 1, 9.7.2).
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Psn(u32);

impl Psn {
    /// Half of the space: a number this far ahead counts as behind.
    pub const HALF: u32 = 1 << 23;

    /// The low 24 bits of `value`.
    pub const fn new(value: u32) -> Self {
        Self(value & 0xff_ffff)
    }

    /// The number, below 2^24.
    pub const fn get(self) -> u32 {
        self.0
    }

    /// The number after this one.
    #[must_use]
    pub const fn next(self) -> Self {
        self.add(1)
    }

    /// The number `n` after this one.
    #[must_use]
    pub const fn add(self, n: u32) -> Self {
        Self::new(self.0.wrapping_add(n))
    }

    /// How many numbers this one is after `base`, modulo 2^24.
    pub const fn since(self, base: Self) -> u32 {
        self.0.wrapping_sub(base.0) & 0xff_ffff
    }

    /// Whether this number comes before `other`: at most 2^23 behind it.
    pub const fn is_before(self, other: Self) -> bool {
        let ahead = other.since(self);
        ahead != 0 && ahead <= Self::HALF
    }
}

impl fmt::Display for Psn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0)
    }
}

impl fmt::Debug for Psn {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Psn({})", self.0)
    }
}

/// Global identifier of a port: 16 octets, written as an IPv6 address; RoCE has IPv4 mapped in
/// (`::ffff:192.0.2.1`).
#[derive(
    Clone,
    Copy,
    PartialEq,
    Eq,
    Hash,
    Default,
    zerocopy::FromBytes,
    zerocopy::IntoBytes,
    zerocopy::KnownLayout,
    zerocopy::Immutable,
    zerocopy::Unaligned,
)]
#[repr(transparent)]
pub struct Gid(pub [u8; 16]);

impl Gid {
    /// The address as RoCE means it: IPv4 where it is mapped in.
    pub fn to_ip(self) -> core::net::IpAddr {
        core::net::Ipv6Addr::from(self.0).to_canonical()
    }
}

impl From<core::net::IpAddr> for Gid {
    fn from(ip: core::net::IpAddr) -> Self {
        Self(match ip {
            core::net::IpAddr::V4(v4) => v4.to_ipv6_mapped().octets(),
            core::net::IpAddr::V6(v6) => v6.octets(),
        })
    }
}

impl fmt::Display for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", core::net::Ipv6Addr::from(self.0))
    }
}

impl fmt::Debug for Gid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Gid({self})")
    }
}

impl From<RKey> for Stag {
    fn from(key: RKey) -> Self {
        Self(key.0)
    }
}

impl From<Stag> for RKey {
    fn from(stag: Stag) -> Self {
        Self(stag.0)
    }
}

/// DDP message sequence number: counts the messages of one untagged queue from 1, and wraps at
/// 2^32 (RFC 5041 §4.3).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Msn(pub u32);

impl Msn {
    /// The first number of every queue.
    pub const FIRST: Self = Self(1);

    /// The number after this one.
    #[must_use]
    pub const fn next(self) -> Self {
        Self(self.0.wrapping_add(1))
    }

    /// How many messages this number is after `base`, modulo 2^32.
    pub const fn since(self, base: Self) -> u32 {
        self.0.wrapping_sub(base.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::format;

    #[test]
    fn keys_print_as_hex() {
        assert_eq!(format!("{}", RKey(0xab)), "0x000000ab");
        assert_eq!(format!("{:?}", Qpn(0x11)), "Qpn(0x000011)");
    }

    #[test]
    fn psn_is_serial() {
        let (last, zero) = (Psn::new(0xff_ffff), Psn::new(0x100_0000));
        assert_eq!((zero.get(), last.next(), zero.since(last)), (0, zero, 1));
        assert!(last.is_before(zero) && !zero.is_before(last) && !zero.is_before(zero));
        assert!(zero.is_before(Psn::new(Psn::HALF)));
        assert!(!zero.is_before(Psn::new(Psn::HALF + 1)));
    }

    #[test]
    fn gids_are_addresses() {
        for ip in ["192.0.2.1", "fe80::1"].map(|ip| ip.parse::<core::net::IpAddr>().unwrap()) {
            let gid = Gid::from(ip);
            assert_eq!(gid.to_ip(), ip);
        }
        assert_eq!(
            format!("{}", Gid::from(core::net::IpAddr::from([192, 0, 2, 1]))),
            "::ffff:192.0.2.1"
        );
    }

    #[test]
    fn msn_wraps() {
        assert_eq!(Msn(u32::MAX).next(), Msn(0));
        assert_eq!(Msn(2).since(Msn(u32::MAX)), 3);
    }
}
