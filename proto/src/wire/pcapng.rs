//! Datagrams written as a capture: pcapng (draft-ietf-opsawg-pcapng), from which Wireshark and
//! `dissect` read them.
//!
//! ```text
//!   Section Header   Interface Description (raw IP, nanoseconds)   Enhanced Packet   …
//!
//!   0                   1                   2                   3
//!   0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  |                          Block Type                           |
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  |                      Block Total Length                       |
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  /          Block Body, options at its end; multiple of 4        /
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  |                      Block Total Length                       |
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! ```
//!
//! All numbers are little endian. A socket does not show IP and UDP headers: [`Datagram`] makes
//! those that were, or would have been, on the wire.
//!
//! A driver writes [`Writer::octets`] to its file and calls [`Writer::clear`].
//!
//! ```
//! use userdma_proto::wire::pcapng::{Datagram, Direction, Writer};
//!
//! let mut capture = Writer::new("an example");
//! let socket = capture.interface("socket");
//! let hello = Datagram::new("10.0.0.1:4791".parse()?, "10.0.0.2:4791".parse()?, b"hello");
//! capture.datagram(socket, 1_000_000, Direction::Outbound, &hello, "")?;
//! assert_eq!(&capture.octets()[..4], b"\x0a\x0d\x0d\x0a");
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

use alloc::vec::Vec;
use core::net::SocketAddr;

use super::ip::{IPV4_LEN, Ipv4, Sum, UDP, UDP_LEN};

const SECTION_HEADER: u32 = 0x0a0d_0d0a;
const INTERFACE_DESCRIPTION: u32 = 1;
const ENHANCED_PACKET: u32 = 6;
const BYTE_ORDER_MAGIC: u32 = 0x1a2b_3c4d;
/// LINKTYPE_RAW: the frame begins with an IP header, of either version.
const RAW_IP: u16 = 101;

const OPT_END: u16 = 0;
const OPT_COMMENT: u16 = 1;
const SHB_USERAPPL: u16 = 4;
const IF_NAME: u16 = 2;
const IF_TSRESOL: u16 = 9;
const EPB_FLAGS: u16 = 2;
/// The longest text of an option: a multiple of 4 that 16 bits hold.
const MAX_TEXT: usize = 65_532;

/// Which way a datagram went, as the one who captured sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Direction {
    /// Received.
    Inbound,
    /// Sent.
    Outbound,
    /// A bystander captured.
    Unknown,
}

/// An interface of a [`Writer`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Interface(u32);

/// A UDP datagram and what of its IP header matters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Datagram<'a> {
    /// Where from.
    pub src: SocketAddr,
    /// Where to, of the same family.
    pub dst: SocketAddr,
    /// TOS or traffic class: DSCP in the upper 6 bits, ECN in the lower 2. 0.
    pub tos: u8,
    /// TTL or hop limit: 64.
    pub ttl: u8,
    /// IPv4's Identification: 0. In a train made by GSO packet i has i.
    pub identification: u16,
    /// IPv4's DF: true.
    pub dont_fragment: bool,
    /// What UDP carries.
    pub payload: &'a [u8],
}

/// Why a datagram cannot be one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DatagramError {
    /// One end speaks IPv4, the other IPv6.
    #[error("a datagram from {src} to {dst}: the addresses are of two families")]
    Families {
        /// Where from.
        src: SocketAddr,
        /// Where to.
        dst: SocketAddr,
    },
    /// More than UDP can carry.
    #[error("a datagram of {len} octets of payload: UDP carries at most {max} here")]
    TooLong {
        /// Octets of the payload.
        len: usize,
        /// Octets that fit, by address family.
        max: usize,
    },
}

impl<'a> Datagram<'a> {
    /// A datagram as an ordinary UDP socket sends it.
    pub const fn new(src: SocketAddr, dst: SocketAddr, payload: &'a [u8]) -> Self {
        Self { src, dst, tos: 0, ttl: 64, identification: 0, dont_fragment: true, payload }
    }

    /// With this TOS or traffic class: DSCP · 4 + ECN.
    pub const fn with_tos(self, tos: u8) -> Self {
        Self { tos, ..self }
    }

    /// With this Identification, which IPv6 does not have.
    pub const fn with_identification(self, identification: u16) -> Self {
        Self { identification, ..self }
    }

    /// Appends IP header, UDP header and payload, both checksums right.
    ///
    /// # Errors
    ///
    /// Nothing is appended if the families differ or the payload is too long.
    pub fn emit(&self, out: &mut Vec<u8>) -> Result<(), DatagramError> {
        let &Self { src, dst, payload, .. } = self;
        let head = match dst {
            SocketAddr::V4(_) => IPV4_LEN + UDP_LEN,
            SocketAddr::V6(_) => UDP_LEN,
        };
        let max = usize::from(u16::MAX) - head;
        if payload.len() > max {
            return Err(DatagramError::TooLong { len: payload.len(), max });
        }
        let udp_len = (UDP_LEN + payload.len()) as u16;
        let mut sum = Sum::default();
        match (src, dst) {
            (SocketAddr::V4(src), SocketAddr::V4(dst)) => {
                let ip = Ipv4 {
                    tos: self.tos,
                    ttl: self.ttl,
                    identification: self.identification,
                    dont_fragment: self.dont_fragment,
                    src: *src.ip(),
                    dst: *dst.ip(),
                    udp_len: udp_len.into(),
                }
                .octets();
                sum.add(&ip[12..20]);
                out.extend_from_slice(&ip);
            }
            (SocketAddr::V6(src), SocketAddr::V6(dst)) => {
                let first = 6 << 28 | u32::from(self.tos) << 20;
                out.extend_from_slice(&first.to_be_bytes());
                out.extend_from_slice(&udp_len.to_be_bytes());
                out.extend_from_slice(&[UDP, self.ttl]);
                for ip in [src.ip().octets(), dst.ip().octets()] {
                    sum.add(&ip);
                    out.extend_from_slice(&ip);
                }
            }
            _ => return Err(DatagramError::Families { src, dst }),
        }
        let mut udp = [0; UDP_LEN];
        udp[0..2].copy_from_slice(&src.port().to_be_bytes());
        udp[2..4].copy_from_slice(&dst.port().to_be_bytes());
        udp[4..6].copy_from_slice(&udp_len.to_be_bytes());
        // The pseudo header (RFC 768, RFC 8200 §8.1), then everything.
        sum.add(&[0, UDP]);
        sum.add(&udp_len.to_be_bytes());
        sum.add(&udp);
        sum.add(payload);
        let checksum = match sum.finish() {
            // 0 would say that there is none.
            0 => 0xffff,
            sum => sum,
        };
        udp[6..8].copy_from_slice(&checksum.to_be_bytes());
        out.extend_from_slice(&udp);
        out.extend_from_slice(payload);
        Ok(())
    }
}

/// Writes a capture of one section into memory.
#[derive(Debug, Clone)]
pub struct Writer {
    octets: Vec<u8>,
    interfaces: u32,
    frame: Vec<u8>,
}

impl Writer {
    /// A capture whose header names the program that made it.
    pub fn new(application: &str) -> Self {
        let mut writer = Self { octets: Vec::new(), interfaces: 0, frame: Vec::new() };
        writer.block(SECTION_HEADER, |out| {
            out.extend_from_slice(&BYTE_ORDER_MAGIC.to_le_bytes());
            // Version 1.0; the section's length is not told.
            out.extend_from_slice(&[1, 0, 0, 0]);
            out.extend_from_slice(&u64::MAX.to_le_bytes());
            text(out, SHB_USERAPPL, application);
            option(out, OPT_END, &[]);
        });
        writer
    }

    /// Adds an interface; its datagrams are [`Interface`]'s.
    pub fn interface(&mut self, name: &str) -> Interface {
        self.block(INTERFACE_DESCRIPTION, |out| {
            out.extend_from_slice(&RAW_IP.to_le_bytes());
            // Reserved, and no bound of the frames' length.
            out.extend_from_slice(&[0; 6]);
            text(out, IF_NAME, name);
            // Nanoseconds: 10^-9 s.
            option(out, IF_TSRESOL, &[9]);
            option(out, OPT_END, &[]);
        });
        self.interfaces += 1;
        Interface(self.interfaces - 1)
    }

    /// Adds a datagram at `time_ns` nanoseconds since 1970, with a comment unless that is empty.
    ///
    /// # Errors
    ///
    /// As [`Datagram::emit`]; the capture is unchanged.
    pub fn datagram(
        &mut self,
        interface: Interface,
        time_ns: u64,
        direction: Direction,
        datagram: &Datagram<'_>,
        comment: &str,
    ) -> Result<(), DatagramError> {
        let mut frame = core::mem::take(&mut self.frame);
        frame.clear();
        let made = datagram.emit(&mut frame);
        if made.is_ok() {
            self.packet(interface, time_ns, direction, &frame, comment);
        }
        self.frame = frame;
        made
    }

    /// What has been written since the last [`clear`](Self::clear).
    pub fn octets(&self) -> &[u8] {
        &self.octets
    }

    /// Forgets what has been written; what comes next continues the same capture.
    pub fn clear(&mut self) {
        self.octets.clear();
    }

    /// The same as [`octets`](Self::octets), owned.
    pub fn into_octets(self) -> Vec<u8> {
        self.octets
    }

    fn packet(
        &mut self,
        interface: Interface,
        time_ns: u64,
        direction: Direction,
        frame: &[u8],
        comment: &str,
    ) {
        let flags: u32 = match direction {
            Direction::Unknown => 0,
            Direction::Inbound => 1,
            Direction::Outbound => 2,
        };
        self.block(ENHANCED_PACKET, |out| {
            // At most 65,575 octets: a datagram.
            let len = frame.len() as u32;
            let words = [interface.0, (time_ns >> 32) as u32, time_ns as u32, len, len];
            words.iter().for_each(|word| out.extend_from_slice(&word.to_le_bytes()));
            out.extend_from_slice(frame);
            pad(out, frame.len());
            if !comment.is_empty() {
                text(out, OPT_COMMENT, comment);
            }
            option(out, EPB_FLAGS, &flags.to_le_bytes());
            option(out, OPT_END, &[]);
        });
    }

    fn block(&mut self, kind: u32, body: impl FnOnce(&mut Vec<u8>)) {
        let out = &mut self.octets;
        let start = out.len();
        out.extend_from_slice(&kind.to_le_bytes());
        out.extend_from_slice(&[0; 4]);
        body(out);
        // Bodies are bounded: a datagram and options of 64 KiB each.
        let len = ((out.len() - start + 4) as u32).to_le_bytes();
        out[start + 4..start + 8].copy_from_slice(&len);
        out.extend_from_slice(&len);
    }
}

fn option(out: &mut Vec<u8>, code: u16, value: &[u8]) {
    out.extend_from_slice(&code.to_le_bytes());
    out.extend_from_slice(&(value.len() as u16).to_le_bytes());
    out.extend_from_slice(value);
    pad(out, value.len());
}

/// A text, cut where an option ends.
fn text(out: &mut Vec<u8>, code: u16, value: &str) {
    let mut end = value.len().min(MAX_TEXT);
    while !value.is_char_boundary(end) {
        end -= 1;
    }
    option(out, code, &value.as_bytes()[..end]);
}

fn pad(out: &mut Vec<u8>, len: usize) {
    out.extend_from_slice(&[0; 3][..len.wrapping_neg() % 4]);
}

#[cfg(test)]
mod tests {
    use super::*;
    use hex_literal::hex;
    use proptest::prelude::*;
    use std::{string::ToString, vec};

    fn v4() -> (SocketAddr, SocketAddr) {
        ("10.99.0.1:49152".parse().unwrap(), "10.99.0.2:4791".parse().unwrap())
    }

    fn v6() -> (SocketAddr, SocketAddr) {
        ("[fd00::1]:49152".parse().unwrap(), "[fd00::2]:4791".parse().unwrap())
    }

    #[test]
    fn example() {
        let mut capture = Writer::new("me");
        let tap = capture.interface("tap");
        let (src, dst) = v4();
        let datagram = Datagram::new(src, dst, b"abc").with_tos(2).with_identification(7);
        capture.datagram(tap, 0x1_0000_0002, Direction::Outbound, &datagram, "hi").unwrap();
        let expected = hex!(
            "0a0d0d0a 28000000 4d3c2b1a 01000000 ffffffffffffffff 0400 0200 6d650000 00000000 28000000"
            "01000000 28000000 6500 0000 00000000 0200 0300 74617000 0900 0100 09000000 00000000 28000000"
            "06000000 54000000 00000000 01000000 02000000 1f000000 1f000000"
            "4502001f 00074000 4011 25fd 0a630001 0a630002 c00012b7 000b 53f5 616263 00"
            "0100 0200 68690000 0200 0400 02000000 00000000 54000000"
        );
        assert_eq!(capture.octets(), expected);
        capture.clear();
        assert_eq!((capture.interface("more"), capture.octets().len()), (Interface(1), 40));
    }

    /// A header with its checksum sums to nothing, an independent way to say that it is right.
    fn sums_to_zero(pieces: &[&[u8]]) -> bool {
        let all: Vec<u8> = pieces.concat();
        let sum = all.chunks(2).fold(0u32, |sum, pair| {
            sum + (u32::from(pair[0]) << 8 | u32::from(*pair.get(1).unwrap_or(&0)))
        });
        (sum >> 16) + (sum & 0xffff) == 0xffff
    }

    proptest! {
        #[test]
        fn checksums_are_right(
            payload in prop::collection::vec(any::<u8>(), 0..300), tos: u8, id: u16, six: bool,
        ) {
            let (src, dst) = if six { v6() } else { v4() };
            let mut ip = vec![];
            let datagram = Datagram::new(src, dst, &payload).with_tos(tos).with_identification(id);
            datagram.emit(&mut ip).unwrap();
            let (head, addresses) = if six { (40, 8..40) } else { (20, 12..20) };
            prop_assert_eq!(ip.len(), head + 8 + payload.len());
            prop_assert!(six || sums_to_zero(&[&ip[..20]]));
            let pseudo = [0, 17, ip[head + 4], ip[head + 5]];
            prop_assert!(sums_to_zero(&[&ip[addresses], &pseudo, &ip[head..]]));
            prop_assert!(ip[head + 6..head + 8] != [0, 0]);
        }
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let ((src, dst), (_, other)) = (v4(), v6());
        let mut capture = Writer::new("");
        let tap = capture.interface("");
        let before = capture.octets().len();
        let mut put = |datagram| {
            let error = capture.datagram(tap, 0, Direction::Unknown, &datagram, "").unwrap_err();
            assert_eq!(capture.octets().len(), before);
            error.to_string()
        };
        assert_eq!(
            put(Datagram::new(src, other, b"")),
            "a datagram from 10.99.0.1:49152 to [fd00::2]:4791: the addresses are of two families"
        );
        let long = vec![0; 65_508];
        assert_eq!(
            put(Datagram::new(src, dst, &long)),
            "a datagram of 65508 octets of payload: UDP carries at most 65507 here"
        );
        capture
            .datagram(tap, 0, Direction::Unknown, &Datagram::new(src, dst, &long[1..]), "")
            .unwrap();
    }

    #[test]
    fn long_comments_are_cut_between_characters() {
        let mut out = vec![];
        text(&mut out, OPT_COMMENT, &"aä".repeat(40_000));
        let len = usize::from(u16::from_le_bytes([out[2], out[3]]));
        assert!(len <= MAX_TEXT && len > MAX_TEXT - 2);
        assert!(core::str::from_utf8(&out[4..4 + len]).is_ok());
        assert_eq!(out.len() % 4, 0);
    }
}
