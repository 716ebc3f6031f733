//! Invariant CRC: CRC-32 over what no router changes (IBTA vol. 1, 7.8.1; for RoCEv2 annex A17.3).
//!
//! The polynomial and its use are Ethernet's. Fields that a router may change count as ones:
//!
//! ```text
//!             in front       IP header or GRH                        UDP        BTH        and then
//!  RoCEv2     8 octets ff    TOS, TTL, checksum of IPv4;             checksum   octet 4    extended headers,
//!                            traffic class, flow label, hop limit               (FECN,     payload, pad
//!                            of IPv6                                            BECN)
//!  RoCEv1     8 octets ff    traffic class, flow label, hop limit    -          octet 4    the same
//!  native     8 octets ff    the same, where there is a GRH          -          octet 4    the same
//!             LRH, VL ff     nothing, where there is none            -          octet 4    the same
//! ```
//!
//! On the wire the four octets stand low octet first.
//!
//! This is the only file that names the crate behind it. It builds without std, and then goes by
//! tables.
//!
//! # A receiver that does not see the IP header
//!
//! The ICRC covers IPv4's Identification and its flag DF, which a UDP socket does not show.
//! [`verify_unknown_id`] checks it all the same. A CRC is linear: what the ICRC found differs from
//! the one computed for Identification 0 is the image of the four octets Identification, flags and
//! fragment offset, moved to the end of the packet. Moved back by that distance it must be those
//! octets again, with nothing in the bits that are known. Of the check's 32 bits 16 remain for the
//! packet.

use core::net::{Ipv4Addr, Ipv6Addr};

use zerocopy::{FromBytes, IntoBytes};

use super::{ICRC_LEN, bth::Bth, grh::Grh};
use crate::wire::{
    Error, Layer, Problem,
    ib::lrh::Lrh,
    ip::{IPV4_LEN, UDP, UDP_LEN},
};

/// An IPv4 header with all options.
const IPV4_MAX_LEN: usize = 60;
const IPV6_LEN: usize = 40;
/// DF in the octet behind Identification.
const DONT_FRAGMENT: u8 = 0x40;
/// What stands in place of the LRH.
const NO_LRH: [u8; Lrh::LEN] = [0xff; Lrh::LEN];

/// An ICRC in the making.
#[derive(Debug, Clone)]
pub struct Icrc(crc32fast::Hasher);

impl Icrc {
    /// RoCEv2 over IPv4: `ip` is the IP header with its options, 20 to 60 octets. Of a longer one
    /// the first 60 octets count.
    #[inline]
    pub fn ipv4(ip: &[u8], udp: &[u8; 8], bth: &Bth) -> Self {
        let mut masked = Masked::new(&NO_LRH);
        let ip = masked.push(&ip[..ip.len().min(IPV4_MAX_LEN)]);
        // TOS, TTL, header checksum.
        for at in [1, 8, 10, 11] {
            if let Some(octet) = ip.get_mut(at) {
                *octet = 0xff;
            }
        }
        masked.push_udp(*udp);
        masked.finish(bth)
    }

    /// RoCEv2 over IPv6: `ip` is the 40-octet header.
    #[inline]
    pub fn ipv6(ip: &[u8; 40], udp: &[u8; 8], bth: &Bth) -> Self {
        let mut masked = Masked::new(&NO_LRH);
        masked.push_ipv6(ip);
        masked.push_udp(*udp);
        masked.finish(bth)
    }

    /// RoCEv1.
    #[inline]
    pub fn grh(grh: &Grh, bth: &Bth) -> Self {
        let mut masked = Masked::new(&NO_LRH);
        masked.push_ipv6(grh.as_bytes());
        masked.finish(bth)
    }

    /// Native InfiniBand. With a GRH the packet may leave its subnet, where all of the LRH
    /// changes; without, only the virtual lane may.
    #[inline]
    pub fn ib(lrh: &Lrh, grh: Option<&Grh>, bth: &Bth) -> Self {
        if let Some(grh) = grh {
            return Self::grh(grh, bth);
        }
        let mut masked = Masked::new(lrh.as_bytes());
        masked.octets[0] |= 0xf0;
        masked.finish(bth)
    }

    /// RoCEv2 over an IPv4 UDP socket, which makes the headers itself: of those only what the
    /// ICRC covers is needed. The header has no options and is no fragment. `len` is the length of
    /// the UDP payload, from the BTH to the ICRC.
    #[inline]
    pub fn socket_v4(path: &PathV4, id: Identification, len: usize, bth: &Bth) -> Self {
        let mut ip = [0; IPV4_LEN];
        ip[0] = 0x45;
        ip[2..4].copy_from_slice(&((IPV4_LEN + UDP_LEN + len) as u16).to_be_bytes());
        ip[4..6].copy_from_slice(&id.identification.to_be_bytes());
        ip[6] = if id.dont_fragment { DONT_FRAGMENT } else { 0 };
        ip[9] = UDP;
        ip[12..16].copy_from_slice(&path.src.octets());
        ip[16..20].copy_from_slice(&path.dst.octets());
        Self::ipv4(&ip, &udp_header(path.src_port, path.dst_port, len), bth)
    }

    /// RoCEv2 over an IPv6 UDP socket: everything that it does not show counts as ones. `len` is
    /// the length of the UDP payload, from the BTH to the ICRC.
    #[inline]
    pub fn socket_v6(path: &PathV6, len: usize, bth: &Bth) -> Self {
        let mut ip = [0; IPV6_LEN];
        ip[0] = 0x60;
        ip[4..6].copy_from_slice(&((UDP_LEN + len) as u16).to_be_bytes());
        ip[6] = UDP;
        ip[8..24].copy_from_slice(&path.src.octets());
        ip[24..40].copy_from_slice(&path.dst.octets());
        Self::ipv6(&ip, &udp_header(path.src_port, path.dst_port, len), bth)
    }

    /// Takes what follows the BTH, up to and with the pad, in pieces of any size.
    #[inline]
    pub fn update(&mut self, octets: &[u8]) {
        self.0.update(octets);
    }

    /// The four octets as they go out.
    #[inline]
    pub fn finish(self) -> [u8; 4] {
        self.0.finalize().to_le_bytes()
    }
}

/// Headers up to the BTH with ones in place of what may change. One update takes them all.
struct Masked {
    octets: [u8; Lrh::LEN + IPV4_MAX_LEN + UDP_LEN + Bth::LEN],
    len: usize,
}

impl Masked {
    #[inline]
    fn new(lrh: &[u8]) -> Self {
        let mut masked = Self { octets: [0; _], len: 0 };
        masked.push(lrh);
        masked
    }

    /// Appends octets, of which there are never more than the longest headers have.
    #[inline]
    fn push(&mut self, octets: &[u8]) -> &mut [u8] {
        let place = &mut self.octets[self.len..][..octets.len()];
        place.copy_from_slice(octets);
        self.len += octets.len();
        place
    }

    /// An IPv6 header or GRH without traffic class, flow label and hop limit.
    #[inline]
    fn push_ipv6(&mut self, header: &[u8]) {
        let header = self.push(header);
        header[0] |= 0x0f;
        header[1..4].fill(0xff);
        header[7] = 0xff;
    }

    /// A UDP header without its checksum.
    #[inline]
    fn push_udp(&mut self, [a, b, c, d, e, f, _, _]: [u8; UDP_LEN]) {
        self.push(&[a, b, c, d, e, f, 0xff, 0xff]);
    }

    #[inline]
    fn finish(mut self, bth: &Bth) -> Icrc {
        self.push(Bth { ecn: 0xff, ..*bth }.as_bytes());
        let mut crc = crc32fast::Hasher::new();
        crc.update(&self.octets[..self.len]);
        Icrc(crc)
    }
}

#[inline]
fn udp_header(src_port: u16, dst_port: u16, len: usize) -> [u8; UDP_LEN] {
    let [a, b] = src_port.to_be_bytes();
    let [c, d] = dst_port.to_be_bytes();
    let [e, f] = ((UDP_LEN + len) as u16).to_be_bytes();
    [a, b, c, d, e, f, 0, 0]
}

/// The ICRC that a packet should end in. `packet` begins with an IPv4 or IPv6 header (RoCEv2) or
/// with a GRH (RoCEv1) and is whole; what follows its ICRC is ignored.
///
/// # Errors
///
/// It is no such packet, it is a fragment, or it is not whole.
///
/// ```
/// use userdma_proto::wire::roce::icrc;
///
/// // An acknowledgement from 10.0.0.1 to 10.0.0.2; the last four octets are its ICRC.
/// let packet = b"\x45\x02\0\x30\0\0\x40\0\x40\x11\x26\xb9\x0a\0\0\x01\x0a\0\0\x02\
///     \xc0\0\x12\xb7\0\x1c\0\0\x11\0\xff\xff\0\0\0\x12\x80\0\x03\x45\x60\0\0\x01\
///     \xd5\xa0\x33\x7f";
/// assert_eq!(icrc::compute(packet)?, [0xd5, 0xa0, 0x33, 0x7f]);
/// icrc::check(packet)?;
/// # Ok::<_, userdma_proto::wire::Error>(())
/// ```
pub fn compute(packet: &[u8]) -> Result<[u8; 4], Error> {
    let (mut icrc, rest) = begin(packet)?;
    icrc.update(&rest[..rest.len() - ICRC_LEN]);
    Ok(icrc.finish())
}

/// Whether a packet ends in the ICRC that it should end in. `packet` is what [`compute`] takes.
///
/// # Errors
///
/// As for [`compute`]; and [`Problem::Crc`] where the ICRC is another, with both as numbers whose
/// upper octet goes out first.
pub fn check(packet: &[u8]) -> Result<(), Error> {
    let (mut icrc, rest) = begin(packet)?;
    // `begin` found it to be there.
    let (covered, found) = rest.split_at(rest.len() - ICRC_LEN);
    icrc.update(covered);
    let computed = icrc.finish();
    if found == computed || cfg!(fuzzing) {
        return Ok(());
    }
    let found = found.iter().fold(0, |number, &octet| number << 8 | u32::from(octet));
    let problem = Problem::Crc { found, computed: u32::from_be_bytes(computed) };
    let offset = rest.as_ptr().addr() - packet.as_ptr().addr() + covered.len();
    Err(Error { layer: Layer::Icrc, offset, problem })
}

/// The ICRC up to the BTH, and what follows the BTH: at least the four octets of the ICRC.
fn begin(packet: &[u8]) -> Result<(Icrc, &[u8]), Error> {
    let field = |at, name, found: u8, expected| {
        Err(Error::field(Layer::Icrc, at, name, found.into(), expected))
    };
    let short = |need| Error::truncated(Layer::Icrc, 0, need, packet.len());
    let version = packet.first().ok_or(short(1))? >> 4;
    let ip_len = match version {
        4 => usize::from(packet[0] & 0x0f) * 4,
        6 => IPV6_LEN,
        _ => return field(0, "IP version", version, "4 or 6"),
    };
    if ip_len < IPV4_LEN {
        return field(0, "IHL", packet[0] & 0x0f, "5 or more");
    }
    let (ip, _) = packet.split_at_checked(ip_len).ok_or(short(ip_len))?;
    let (len, protocol_at) = match version {
        4 => (usize::from(u16::from_be_bytes([ip[2], ip[3]])), 9),
        _ => (IPV6_LEN + usize::from(u16::from_be_bytes([ip[4], ip[5]])), 6),
    };
    if version == 4 && (ip[6] & 0x3f, ip[7]) != (0, 0) {
        return field(6, "fragment offset", ip[6], "a whole datagram");
    }
    let is_grh = version == 6 && ip[protocol_at] == super::grh::NEXT_HEADER_BTH;
    if ip[protocol_at] != UDP && !is_grh {
        return field(protocol_at, "protocol", ip[protocol_at], "17 for UDP, 27 for a BTH");
    }
    let body = packet.get(ip_len..len).ok_or(short(len.max(ip_len)))?;

    let (udp, body) = match body.split_first_chunk::<UDP_LEN>() {
        Some((udp, body)) if !is_grh => (udp, body),
        _ => (&[0; UDP_LEN], body),
    };
    let least = Bth::LEN + ICRC_LEN;
    let (bth, rest) = match Bth::read_from_prefix(body) {
        Ok((bth, rest)) if rest.len() >= ICRC_LEN => (bth, rest),
        _ => return Err(Error::truncated(Layer::Bth, len - body.len(), least, body.len())),
    };
    let icrc = match (ip.first_chunk::<IPV6_LEN>(), Grh::ref_from_bytes(ip)) {
        (_, Ok(grh)) if is_grh => Icrc::grh(grh, &bth),
        (Some(ip), _) if version == 6 => Icrc::ipv6(ip, udp, &bth),
        _ => Icrc::ipv4(ip, udp, &bth),
    };
    Ok((icrc, rest))
}

/// From where to where a datagram goes, as an IPv4 UDP socket knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PathV4 {
    /// The sender's address.
    pub src: Ipv4Addr,
    /// The receiver's address.
    pub dst: Ipv4Addr,
    /// The sender's port.
    pub src_port: u16,
    /// The receiver's port; 4791 of a RoCEv2 device, unless configured.
    pub dst_port: u16,
}

/// From where to where a datagram goes, as an IPv6 UDP socket knows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PathV6 {
    /// The sender's address.
    pub src: Ipv6Addr,
    /// The receiver's address.
    pub dst: Ipv6Addr,
    /// The sender's port.
    pub src_port: u16,
    /// The receiver's port; 4791 of a RoCEv2 device, unless configured.
    pub dst_port: u16,
}

/// What the ICRC covers of IPv4's fields for fragmentation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Identification {
    /// Identification.
    pub identification: u16,
    /// DF: routers must not fragment the datagram.
    pub dont_fragment: bool,
}

/// Checks the ICRC of a packet that an IPv4 UDP socket received, and finds the Identification and
/// the flag DF that it was sent with. `None`: the ICRC is wrong, or `payload` cannot be a packet.
///
/// `payload` is the datagram's, from the BTH to the ICRC. The header is taken to have no options
/// and to be no fragment. `dont_fragment` is what is known of DF: with `None` the packet may have
/// been sent with it or without. Which it was holds for the peer, and should be given from then
/// on: up to 9,000 octets there is no bit that, flipped alone, goes unnoticed when DF is known,
/// and there are two when it is not.
pub fn verify_unknown_id(
    path: &PathV4,
    payload: &[u8],
    dont_fragment: Option<bool>,
) -> Option<Identification> {
    let (covered, found) = payload.split_last_chunk::<ICRC_LEN>()?;
    let (bth, rest) = Bth::read_from_prefix(covered).ok()?;
    if payload.len() > usize::from(u16::MAX) - IPV4_LEN - UDP_LEN {
        return None;
    }
    // Most peers send with DF.
    let assumed = dont_fragment.unwrap_or(true);
    let id = Identification { identification: 0, dont_fragment: assumed };
    let mut icrc = Icrc::socket_v4(path, id, payload.len(), &bth);
    icrc.update(rest);
    let difference = u32::from_le_bytes(icrc.finish()) ^ u32::from_le_bytes(*found);
    let recovered = recover(difference, payload.len(), assumed, dont_fragment.is_none());
    recovered.or(cfg!(fuzzing).then_some(id))
}

/// The Identification and DF of a packet with `payload_len` octets of UDP payload whose ICRC
/// differs by `difference` from the one computed for Identification 0 and DF as `assumed`.
/// `either`: DF may be the other one.
fn recover(
    difference: u32,
    payload_len: usize,
    assumed: bool,
    either: bool,
) -> Option<Identification> {
    // From Identification to the last octet that the ICRC covers; 16 octets are left of the IP
    // header there.
    let distance = 16 + UDP_LEN + payload_len - ICRC_LEN;
    let [a, b, flags, offset] = back::octets(difference, distance).to_le_bytes();
    let other = flags == DONT_FRAGMENT && either;
    if offset != 0 || (flags != 0 && !other) {
        return None;
    }
    let identification = u16::from_be_bytes([a, b]);
    Some(Identification { identification, dont_fragment: assumed != other })
}

/// A field that the ICRC covers, or that a sender may have covered though it must not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Field {
    /// IPv4's Identification.
    Identification,
    /// UDP's source port.
    SourcePort,
    /// UDP's destination port.
    DestinationPort,
    /// IPv4's time to live, which counts as ones.
    Ttl,
    /// IPv4's DSCP and ECN, which count as ones.
    Tos,
}

/// What would make a wrong ICRC right, alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Rewrite {
    /// A field, and the value with which the ICRC was made. It is named where nothing else of its
    /// four octets had to change: by chance that happens once in 2^16 damaged packets or less.
    pub field: Option<(Field, u16)>,
    /// The source address with which the ICRC would be right. There always is one: it says
    /// something only where several packets agree on it.
    pub src: Ipv4Addr,
    /// The same of the destination address.
    pub dst: Ipv4Addr,
}

/// What would make the ICRC of a RoCEv2 packet over IPv4 right: its IP header without options, its
/// UDP header, and what lies in it, from the BTH to the ICRC. `None` where it is right, or where
/// this is no such packet.
pub fn rewritten(ip: &[u8; IPV4_LEN], udp: &[u8; 8], payload: &[u8]) -> Option<Rewrite> {
    let (covered, found) = payload.split_last_chunk::<ICRC_LEN>()?;
    let (bth, rest) = Bth::read_from_prefix(covered).ok()?;
    let mut icrc = Icrc::ipv4(ip, udp, &bth);
    icrc.update(rest);
    let difference = u32::from_le_bytes(icrc.finish()) ^ u32::from_le_bytes(*found);
    if difference == 0 || payload.len() > usize::from(u16::MAX) {
        return None;
    }
    // How the four octets that begin so far into both headers would have to differ.
    let octets = |at: usize| {
        let distance = IPV4_LEN + UDP_LEN - at + payload.len() - ICRC_LEN;
        back::octets(difference, distance).to_le_bytes()
    };
    let word = |a: u8, b: u8| u16::from_be_bytes([a, b]);
    let field = match (octets(4), octets(IPV4_LEN), octets(8), octets(0)) {
        ([a, b, 0, 0], ..) => Some((Field::Identification, word(ip[4], ip[5]) ^ word(a, b))),
        (_, [a, b, 0, 0], ..) => Some((Field::SourcePort, word(udp[0], udp[1]) ^ word(a, b))),
        (_, [0, 0, a, b], ..) => Some((Field::DestinationPort, word(udp[2], udp[3]) ^ word(a, b))),
        (_, _, [a, 0, 0, 0], _) => Some((Field::Ttl, word(0, 0xff ^ a))),
        (_, _, _, [0, a, 0, 0]) => Some((Field::Tos, word(0, 0xff ^ a))),
        _ => None,
    };
    let address = |at: usize| {
        let [a, b, c, d] = octets(at);
        Ipv4Addr::new(ip[at] ^ a, ip[at + 1] ^ b, ip[at + 2] ^ c, ip[at + 3] ^ d)
    };
    Some(Rewrite { field, src: address(12), dst: address(16) })
}

/// Arithmetic with polynomials modulo that of the CRC-32. They are written as the CRC's register
/// holds them: the high bit is the coefficient of 1, the low bit that of x^31. An octet of zeros
/// that goes through the register multiplies it by x^8.
mod back {
    const POLYNOMIAL: u32 = 0xedb8_8320;
    const ONE: u32 = 0x8000_0000;

    /// A polynomial times each of those with a degree below 4: all that it takes to multiply by
    /// it four bits at a time.
    type Multiples = [u32; 16];

    /// x^(-8 n) for n below 256.
    static LOW: [Multiples; 256] = powers(EIGHT_BACK);
    /// x^(-8 · 256 n) for n below 256.
    static HIGH: [Multiples; 256] = powers(times(&LOW[255], EIGHT_BACK));

    /// x^-8: eight steps that take back what a step does.
    const EIGHT_BACK: u32 = {
        let (mut power, mut steps) = (ONE, 0);
        while steps < 8 {
            // A step forward shifts right, and adds the polynomial if a bit fell out: then, and
            // only then, the high bit is set.
            power = if power & ONE != 0 { (power ^ POLYNOMIAL) << 1 | 1 } else { power << 1 };
            steps += 1;
        }
        power
    };

    /// What the four bits that fall out of the register leave in it.
    static FALLEN: Multiples = {
        let (mut fallen, mut bits) = ([0; 16], 0);
        while bits < 16 {
            fallen[bits as usize] = step(step(step(step(bits))));
            bits += 1;
        }
        fallen
    };

    /// Times x.
    const fn step(register: u32) -> u32 {
        (register >> 1) ^ (POLYNOMIAL & (register & 1).wrapping_neg())
    }

    const fn multiples(of: u32) -> Multiples {
        // The bits of an index are the coefficients of 1, x, x^2, x^3, from the high one on.
        let by = [step(step(step(of))), step(step(of)), step(of), of];
        let (mut multiples, mut index) = ([0; 16], 0);
        while index < 16 {
            let mut bit = 0;
            while bit < 4 {
                if index >> bit & 1 != 0 {
                    multiples[index] ^= by[bit];
                }
                bit += 1;
            }
            index += 1;
        }
        multiples
    }

    const fn powers(of: u32) -> [Multiples; 256] {
        let mut powers = [multiples(ONE); 256];
        let mut n = 1;
        while n < 256 {
            powers[n] = multiples(times(&powers[n - 1], of));
            n += 1;
        }
        powers
    }

    /// The product of two polynomials.
    #[inline]
    const fn times(a: &Multiples, b: u32) -> u32 {
        let (mut product, mut bit) = (0, 0);
        while bit < 32 {
            product = (product >> 4) ^ FALLEN[(product & 15) as usize];
            product ^= a[(b >> bit & 15) as usize];
            bit += 4;
        }
        product
    }

    /// What the register held before `n` octets of zeros went through it; `n` is below 65,536.
    #[inline]
    pub(super) fn octets(register: u32, n: usize) -> u32 {
        if register == 0 {
            return 0;
        }
        let low = times(&LOW[n & 0xff], register);
        // Small packets need no more.
        if n < 256 { low } else { times(&HIGH[n >> 8 & 0xff], low) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hex_literal::hex;
    use proptest::prelude::*;
    use std::{string::ToString, vec, vec::Vec};

    /// A WRITE over IPv4 and one over IPv6, computed by another program.
    const V4: &[u8] = &hex!(
        "4502004400004000401126a50a0000010a000002 c00012b700300000"
        "2a00ffff0000001280000345 00007f0000001000 00001234 00000008 3132333435363738 0b8b5cb9"
    );
    const V6: &[u8] = &hex!(
        "6000000000301140 fd000000000000000000000000000001 fd000000000000000000000000000002"
        "c00012b700300000 0a00ffff0000001280000345 00007f0000001000 00001234 00000008"
        "3132333435363738 7b73997e"
    );
    const PATH: PathV4 = PathV4 {
        src: Ipv4Addr::new(10, 0, 0, 1),
        dst: Ipv4Addr::new(10, 0, 0, 2),
        src_port: 0xc000,
        dst_port: 4791,
    };

    #[test]
    fn native_example() {
        // The packet of IBTA vol. 1, 7.8.3.
        let lrh = Lrh::read_from_bytes(&hex!("7012375c000e17d2")).unwrap();
        let bth = Bth::read_from_bytes(&hex!("0a2024870087b1b3000dec2a")).unwrap();
        let mut icrc = Icrc::ib(&lrh, None, &bth);
        icrc.update(&hex!("01710a1c015d400238f27a050000000e"));
        icrc.update(&hex!("bb884d85fd5cfba4728bc0690ed4 0000"));
        assert_eq!(icrc.finish(), hex!("9625b75a"));
    }

    #[test]
    fn whole_packets() {
        for packet in [V4, V6] {
            let (_, wire) = packet.split_last_chunk().unwrap();
            assert_eq!((compute(packet), check(packet)), (Ok(*wire), Ok(())));
            let longer = [packet, &[0; 9]].concat();
            assert_eq!(check(&longer), Ok(()));
        }
    }

    /// Flips of octets that routers may change: behind the start of the IP header.
    const FREE_V4: &[usize] = &[1, 8, 10, 11, 26, 27, 32];
    const FREE_V6: &[usize] = &[1, 2, 3, 7, 46, 47, 52];

    #[test]
    fn each_octet_is_covered_but_those_that_may_change() {
        for (packet, free) in [(V4, FREE_V4), (V6, FREE_V6)] {
            // The octets that say how the packet is to be read are left alone.
            let read = if packet == V4 { [0, 2, 3, 6, 7, 9].as_slice() } else { &[0, 4, 5, 6] };
            for at in (0..packet.len()).filter(|at| !read.contains(at)) {
                let mut flipped = packet.to_vec();
                flipped[at] ^= 0x80;
                assert_eq!(check(&flipped).is_ok(), free.contains(&at), "octet {at}");
            }
        }
        // The flow label's share of the first octets, and the traffic class.
        let mut class = V6.to_vec();
        class[0] |= 0x0f;
        assert_eq!(check(&class), Ok(()));
    }

    #[test]
    fn a_wrong_icrc_is_told_with_both_numbers() {
        let mut packet = V4.to_vec();
        packet[64] = 0;
        let message = "ICRC: at offset 64: CRC is 0x008b5cb9, computed 0x0b8b5cb9";
        assert_eq!(check(&packet).unwrap_err().to_string(), message);
    }

    #[test]
    fn what_is_no_packet_is_told() {
        let with = |at: usize, octet: u8| {
            let mut packet = V4.to_vec();
            packet[at] = octet;
            check(&packet).unwrap_err().to_string()
        };
        assert_eq!(with(0, 0x55), "ICRC: at offset 0: IP version is 0x5, expected 4 or 6");
        assert_eq!(with(0, 0x44), "ICRC: at offset 0: IHL is 0x4, expected 5 or more");
        assert_eq!(
            with(6, 0x20),
            "ICRC: at offset 6: fragment offset is 0x20, expected a whole datagram"
        );
        assert_eq!(
            with(9, 6),
            "ICRC: at offset 9: protocol is 0x6, expected 17 for UDP, 27 for a BTH"
        );
        assert_eq!(with(3, 43), "BTH: at offset 28: 16 octets needed, 15 found");
        for packet in [V4, V6] {
            for len in 0..packet.len() {
                assert!(check(&packet[..len]).is_err(), "{len}");
            }
        }
    }

    #[test]
    fn sockets() {
        let payload = &V4[28..];
        let (bth, rest) = Bth::read_from_prefix(payload).unwrap();
        let id = Identification { identification: 0, dont_fragment: true };
        let mut icrc = Icrc::socket_v4(&PATH, id, payload.len(), &bth);
        icrc.update(&rest[..rest.len() - 4]);
        assert_eq!(icrc.finish(), V4[V4.len() - 4..]);

        let payload = &V6[48..];
        let (bth, rest) = Bth::read_from_prefix(payload).unwrap();
        let address = |host| Ipv6Addr::new(0xfd00, 0, 0, 0, 0, 0, 0, host);
        let path = PathV6 { src: address(1), dst: address(2), src_port: 0xc000, dst_port: 4791 };
        let mut icrc = Icrc::socket_v6(&path, payload.len(), &bth);
        icrc.update(&rest[..rest.len() - 4]);
        assert_eq!(icrc.finish(), V6[V6.len() - 4..]);
    }

    /// A packet of `len` octets from BTH to ICRC, as sent with `id`.
    fn made(len: usize, id: Identification) -> Vec<u8> {
        let mut payload: Vec<_> = (0..len).map(|n| (n * 7 + n / 256) as u8).collect();
        let (bth, rest) = Bth::read_from_prefix(&payload).unwrap();
        let mut icrc = Icrc::socket_v4(&PATH, id, len, &bth);
        icrc.update(&rest[..rest.len() - 4]);
        payload[len - 4..].copy_from_slice(&icrc.finish());
        payload
    }

    #[test]
    fn an_unknown_identification_is_found() {
        for len in [16, 20, 60, 288, 1044, 4120, 9000, 65_507] {
            for identification in [0, 1, 0x80, 0x1234, 0xffff] {
                for dont_fragment in [false, true] {
                    let id = Identification { identification, dont_fragment };
                    let payload = made(len, id);
                    let found = |df| verify_unknown_id(&PATH, &payload, df);
                    assert_eq!(found(None), Some(id), "{len}");
                    assert_eq!(found(Some(dont_fragment)), Some(id), "{len}");
                    assert_eq!(found(Some(!dont_fragment)), None, "{len}");
                    let other = PathV4 { src_port: 0xc001, ..PATH };
                    assert_eq!(verify_unknown_id(&other, &payload, None), None, "{len}");
                }
            }
        }
        assert_eq!(verify_unknown_id(&PATH, &[0; 15], None), None);
        assert_eq!(verify_unknown_id(&PATH, &vec![0; 65_508], None), None);
    }

    /// A bit of a packet: octet from the BTH, and bit of it.
    type Bit = (usize, u32);

    /// The bits of a packet of `len` octets, sent with DF as `df`, that pass when flipped alone, by
    /// what [`recover`] says of the difference that each makes. FECN, BECN and the bits beside
    /// them are not covered at all, and left out.
    fn unnoticed(len: usize, df: bool, df_is_known: bool) -> Vec<Bit> {
        let assumed = df || !df_is_known;
        let end = |identification, dont_fragment| {
            let packet = made(len, Identification { identification, dont_fragment });
            u32::from_le_bytes(*packet.last_chunk().unwrap())
        };
        let difference = end(0x1234, df) ^ end(0, assumed);
        let passes = |flip| recover(difference ^ flip, len, assumed, !df_is_known).is_some();
        assert!(passes(0));

        let mut unnoticed = Vec::new();
        for (at, bit) in (0..len).flat_map(|at| (0..8).map(move |bit| (at, bit))) {
            let flip = match at.checked_sub(len - 4) {
                // A bit of the ICRC itself.
                Some(octet) => 1 << (8 * octet as u32 + bit),
                None => image(1 << bit, len - 4 - at),
            };
            if at != 4 && passes(flip) {
                unnoticed.push((at, bit));
            }
        }
        unnoticed
    }

    /// What `octet` leaves in the register after it and `n - 1` octets of zeros: by a table that
    /// grows an octet at a time.
    fn image(octet: u32, n: usize) -> u32 {
        use std::{cell::RefCell, thread_local};
        thread_local! { static IMAGES: RefCell<Vec<[u32; 8]>> = const { RefCell::new(Vec::new()) }; }
        let step = |r: u32| (0..8).fold(r, |r, _| (r >> 1) ^ (0xedb8_8320 * (r & 1)));
        IMAGES.with_borrow_mut(|images| {
            while images.len() < n {
                let before = images.last().copied();
                images.push(std::array::from_fn(|bit| {
                    step(before.map_or(1 << bit, |octet| octet[bit]))
                }));
            }
            images[n - 1][octet.trailing_zeros() as usize]
        })
    }

    #[test]
    fn every_single_flipped_bit_is_noticed_when_df_is_known() {
        for len in [16, 20, 24, 60, 288, 1044, 2068, 4120, 9000] {
            for df in [true, false] {
                assert_eq!(unnoticed(len, df, true), [], "{len} octets");
            }
        }
    }

    /// What passes when DF may be either: the image of DF and some bits of Identification happens
    /// to be that of one bit there.
    const TWO: [Bit; 2] = [(173, 3), (1834, 6)];

    #[test]
    fn two_single_flipped_bits_are_not_when_df_is_unknown() {
        for len in [16, 60, 288, 1044, 2068, 4120, 9000] {
            let expected: Vec<_> = TWO.into_iter().filter(|&(at, _)| at < len).collect();
            for df in [true, false] {
                assert_eq!(unnoticed(len, df, false), expected, "{len} octets");
            }
        }
        let sent = Identification { identification: 0x1234, dont_fragment: true };
        for (at, bit) in TWO {
            let mut payload = made(2068, sent);
            payload[at] ^= 1 << bit;
            assert_eq!(verify_unknown_id(&PATH, &payload, Some(true)), None);
            let found = verify_unknown_id(&PATH, &payload, None).unwrap();
            assert!(!found.dont_fragment && found.identification != sent.identification);
        }
    }

    #[test]
    fn bits_of_the_icrc_are_as_others_at_every_length() {
        // How far the ICRC is from Identification depends on the length; of all other bits the two
        // tests above have every distance.
        for len in 16..=9000 {
            for bit in 0..32 {
                assert_eq!(recover(1 << bit, len, true, false), None, "{len} {bit}");
                let place = (len - 4 + bit / 8, bit as u32 % 8);
                let passes = recover(1 << bit, len, true, true).is_some();
                assert_eq!(passes, TWO.contains(&place), "{len} {bit}");
            }
        }
    }

    #[test]
    fn bits_flipped_in_earnest() {
        // The same without any arithmetic but the CRC's own.
        let sent = Identification { identification: 0xbeef, dont_fragment: true };
        let mut payload = made(288, sent);
        for (at, bit) in (0..288).flat_map(|at| (0..8).map(move |bit| (at, bit))) {
            payload[at] ^= 1 << bit;
            let [known, free] =
                [Some(true), None].map(|df| verify_unknown_id(&PATH, &payload, df).is_some());
            assert_eq!(known, at == 4, "{at} {bit}");
            assert_eq!(free, at == 4 || TWO.contains(&(at, bit)), "{at} {bit}");
            payload[at] ^= 1 << bit;
        }
    }

    proptest! {
        #[test]
        fn pieces_make_the_whole(data: Vec<u8>, cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..5)) {
            let bth = Bth::read_from_bytes(&V4[28..40]).unwrap();
            let mut cuts: Vec<_> = cuts.iter().map(|cut| cut.index(data.len() + 1)).collect();
            cuts.extend([0, data.len()]);
            cuts.sort_unstable();
            let mut whole = Icrc::ipv4(&V4[..20], V4[20..28].try_into().unwrap(), &bth);
            let mut pieces = whole.clone();
            whole.update(&data);
            for pair in cuts.windows(2) {
                pieces.update(&data[pair[0]..pair[1]]);
            }
            prop_assert_eq!(pieces.finish(), whole.finish());
        }

        #[test]
        fn any_octets_do_not_panic(mut octets: Vec<u8>, version in 0u8..16) {
            let bth = Bth::read_from_bytes(&V4[28..40]).unwrap();
            let _ = check(&octets);
            let _ = verify_unknown_id(&PATH, &octets, None);
            let _ = Icrc::ipv4(&octets, &[0; 8], &bth);
            if let Some(first) = octets.first_mut() {
                *first = *first & 0x0f | version << 4;
            }
            let _ = check(&octets);
        }
    }
}
