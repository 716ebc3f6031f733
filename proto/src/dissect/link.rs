//! Link layers: from a frame's first octet to IP, RoCEv1 or InfiniBand.

use alloc::string::String;

use super::{Pause, Stack, capture::LinkType};

/// What a link layer carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Inner<'a> {
    /// IPv4 or IPv6: the version nibble decides.
    Ip(&'a [u8]),
    /// RoCEv1: from the GRH on.
    RoceV1(&'a [u8]),
    /// Native InfiniBand: from the LRH to the VCRC.
    Ib(&'a [u8]),
    /// Pause or PFC.
    Pause(Pause),
    /// Nothing that is looked into.
    Other,
}

/// Walks from a frame's first octet (`data`, of `wire_len` octets on the wire) to what it carries.
/// Appends the layers it passes to `stack`.
///
/// # Errors
///
/// A header that is not whole, in words.
pub(super) fn walk<'a>(
    _link: LinkType,
    _data: &'a [u8],
    _stack: &mut Stack,
) -> Result<Inner<'a>, String> {
    unimplemented!()
}

/// The same for Ethernet: also what VXLAN, Geneve and GRE carry.
pub(super) fn ethernet<'a>(_data: &'a [u8], _stack: &mut Stack) -> Result<Inner<'a>, String> {
    unimplemented!()
}

/// The same from an EtherType and what follows it: also what GRE and Geneve carry.
pub(super) fn ethertype<'a>(
    _ethertype: u16,
    _data: &'a [u8],
    _stack: &mut Stack,
) -> Result<Inner<'a>, String> {
    unimplemented!()
}
