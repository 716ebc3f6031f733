//! IPv4 headers of UDP datagrams, for those who must make one though a socket does it for others:
//! captures, and the area in front of a received datagram (RFC 791 §3.1).

use core::net::Ipv4Addr;

/// Octets of an IPv4 header without options.
pub(crate) const IPV4_LEN: usize = 20;
/// Octets of a UDP header.
pub(crate) const UDP_LEN: usize = 8;
/// The protocol number of UDP.
pub(crate) const UDP: u8 = 17;
/// The flag DF, within the 16 bits of flags and fragment offset.
const DONT_FRAGMENT: u16 = 0x4000;

/// What an IPv4 header of a whole UDP datagram says.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ipv4 {
    pub(crate) tos: u8,
    pub(crate) ttl: u8,
    pub(crate) identification: u16,
    pub(crate) dont_fragment: bool,
    pub(crate) src: Ipv4Addr,
    pub(crate) dst: Ipv4Addr,
    /// Octets of UDP header and payload; what goes beyond 16 bits is cut off.
    pub(crate) udp_len: usize,
}

impl Ipv4 {
    /// The header, with its checksum.
    pub(crate) fn octets(&self) -> [u8; IPV4_LEN] {
        let mut ip = [0; IPV4_LEN];
        ip[0] = 0x45;
        ip[1] = self.tos;
        ip[2..4].copy_from_slice(&((IPV4_LEN + self.udp_len) as u16).to_be_bytes());
        ip[4..6].copy_from_slice(&self.identification.to_be_bytes());
        let flags = if self.dont_fragment { DONT_FRAGMENT } else { 0 };
        ip[6..8].copy_from_slice(&flags.to_be_bytes());
        ip[8] = self.ttl;
        ip[9] = UDP;
        ip[12..16].copy_from_slice(&self.src.octets());
        ip[16..20].copy_from_slice(&self.dst.octets());
        let mut sum = Sum::default();
        sum.add(&ip);
        ip[10..12].copy_from_slice(&sum.finish().to_be_bytes());
        ip
    }
}

/// The checksum of the Internet (RFC 1071).
#[derive(Debug, Default)]
pub(crate) struct Sum(u64);

impl Sum {
    /// Of all pieces only the last may have an odd length.
    pub(crate) fn add(&mut self, octets: &[u8]) {
        for pair in octets.chunks(2) {
            let low = pair.get(1).copied().unwrap_or(0);
            self.0 += u64::from(u16::from_be_bytes([pair[0], low]));
        }
    }

    pub(crate) fn finish(self) -> u16 {
        let mut sum = self.0;
        while sum > 0xffff {
            sum = (sum & 0xffff) + (sum >> 16);
        }
        !(sum as u16)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hex_literal::hex;

    /// The header in the example of [`crate::wire::roce::icrc::compute`]: 48 octets from 10.0.0.1 to
    /// 10.0.0.2. Its sum with the checksum in place is all ones.
    #[test]
    fn a_header_sums_up_to_ones() {
        let ip = Ipv4 {
            tos: 2,
            ttl: 64,
            identification: 0,
            dont_fragment: true,
            src: Ipv4Addr::new(10, 0, 0, 1),
            dst: Ipv4Addr::new(10, 0, 0, 2),
            udp_len: 28,
        };
        assert_eq!(ip.octets(), hex!("45020030 00004000 401126b9 0a000001 0a000002"));
        let mut sum = Sum::default();
        sum.add(&ip.octets());
        assert_eq!(sum.finish(), 0);
    }
}
