//! Invariant CRC: CRC-32 over what no router changes.

use super::{bth::Bth, grh::Grh};
use crate::wire::ib::lrh::Lrh;

/// An ICRC in the making.
#[derive(Debug, Clone)]
pub struct Icrc(crc32fast::Hasher);

impl Icrc {
    /// RoCEv2 over IPv4: `ip` is the IP header with its options.
    pub fn ipv4(_ip: &[u8], _udp: &[u8; 8], _bth: &Bth) -> Self {
        unimplemented!()
    }
    /// RoCEv2 over IPv6: `ip` is the 40-octet header.
    pub fn ipv6(_ip: &[u8; 40], _udp: &[u8; 8], _bth: &Bth) -> Self {
        unimplemented!()
    }
    /// RoCEv1.
    pub fn grh(_grh: &Grh, _bth: &Bth) -> Self {
        unimplemented!()
    }
    /// Native InfiniBand.
    pub fn ib(_lrh: &Lrh, _grh: Option<&Grh>, _bth: &Bth) -> Self {
        unimplemented!()
    }
    /// Takes what follows the BTH, up to and with the pad, in pieces of any size.
    #[inline]
    pub fn update(&mut self, octets: &[u8]) {
        self.0.update(octets);
    }
    /// The four octets as they go out.
    pub fn finish(self) -> [u8; 4] {
        self.0.finalize().to_le_bytes()
    }
}
