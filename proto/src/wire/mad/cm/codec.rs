//! What the messages are read and written with.

use nom::{
    IResult, Parser,
    bytes::complete::take,
    combinator::map,
    number::complete::{be_u16, be_u24, be_u32, be_u128},
};

use super::BODY_LEN;
use crate::wire::ids::{Gid, PKey, Psn, QKey, Qpn};

/// What is left of the body, and what was read. The error holds what was left where octets are
/// missing.
pub(super) type Read<'a, T> = IResult<&'a [u8], T>;

pub(super) fn qpn(input: &[u8]) -> Read<'_, Qpn> {
    map(be_u24, Qpn).parse(input)
}

pub(super) fn psn(input: &[u8]) -> Read<'_, Psn> {
    map(be_u24, Psn::new).parse(input)
}

pub(super) fn qkey(input: &[u8]) -> Read<'_, QKey> {
    map(be_u32, QKey).parse(input)
}

pub(super) fn pkey(input: &[u8]) -> Read<'_, PKey> {
    map(be_u16, |key| PKey(key.into())).parse(input)
}

pub(super) fn gid(input: &[u8]) -> Read<'_, Gid> {
    map(be_u128, |gid| Gid(gid.to_be_bytes())).parse(input)
}

/// Local and remote communication ID: all but REQ and the SIDR messages begin with them.
pub(super) fn comm_ids(input: &[u8]) -> Read<'_, (u32, u32)> {
    (be_u32, be_u32).parse(input)
}

/// `len` octets as they are.
pub(super) fn octets(len: usize, input: &[u8]) -> Read<'_, &[u8]> {
    take(len)(input)
}

/// `width` bits of an octet from bit `low` up.
pub(super) const fn bits(octet: u8, low: u32, width: u32) -> u8 {
    (octet >> low) & ((1 << width) - 1)
}

/// Bit `low` of an octet.
pub(super) const fn bit(octet: u8, low: u32) -> bool {
    octet >> low & 1 != 0
}

/// The low `width` bits of `value`, moved up to bit `low`.
pub(super) const fn up(value: u8, low: u32, width: u32) -> u8 {
    (value & ((1 << width) - 1)) << low
}

/// Bit `low`, if `set`.
pub(super) const fn flag(set: bool, low: u32) -> u8 {
    (set as u8) << low
}

/// A body that is being written, from its first octet to its last.
pub(super) struct Body {
    octets: [u8; BODY_LEN],
    at: usize,
}

impl Body {
    pub(super) const fn new() -> Self {
        Self { octets: [0; BODY_LEN], at: 0 }
    }

    fn put(&mut self, octets: &[u8]) {
        self.octets(octets, octets.len());
    }

    pub(super) fn u8(&mut self, value: u8) {
        self.put(&[value]);
    }

    pub(super) fn u16(&mut self, value: u16) {
        self.put(&value.to_be_bytes());
    }

    /// The low 24 bits.
    pub(super) fn u24(&mut self, value: u32) {
        self.put(&value.to_be_bytes()[1..]);
    }

    pub(super) fn u32(&mut self, value: u32) {
        self.put(&value.to_be_bytes());
    }

    pub(super) fn u64(&mut self, value: u64) {
        self.put(&value.to_be_bytes());
    }

    /// The low 16 bits.
    pub(super) fn pkey(&mut self, key: PKey) {
        self.u16(key.0 as u16);
    }

    pub(super) fn gid(&mut self, gid: Gid) {
        self.put(&gid.0);
    }

    /// `len` octets: what `octets` lacks is zero, what it has too much is left out.
    pub(super) fn octets(&mut self, octets: &[u8], len: usize) {
        let octets = &octets[..octets.len().min(len)];
        self.octets[self.at..][..octets.len()].copy_from_slice(octets);
        self.at += len;
    }

    /// Octets that are reserved: zero.
    pub(super) fn reserved(&mut self, len: usize) {
        self.octets(&[], len);
    }

    /// The body, complete.
    pub(super) fn finish(self) -> [u8; BODY_LEN] {
        debug_assert_eq!(self.at, BODY_LEN, "a message is as long as its layout");
        self.octets
    }
}
