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
    fn msn_wraps() {
        assert_eq!(Msn(u32::MAX).next(), Msn(0));
        assert_eq!(Msn(2).since(Msn(u32::MAX)), 3);
    }
}
