//! pcapng (draft-ietf-opsawg-pcapng).
//!
//! ```text
//!  block      | type | total length | body…, padded to 4 octets | total length |
//!
//!  section header         0x0a0d0d0a  | byte-order magic | version | section length | options
//!  interface description  1           | link type | reserved | snaplen | options
//!  packet (obsolete)      2           | interface, drops | time | captured | on the wire | data…
//!  simple packet          3           | on the wire | data…
//!  enhanced packet        6           | interface | time | captured | on the wire | data… | options
//! ```
//!
//! The blocks are read here and not by the `pcap-parser` crate, from which come the numbers only: its
//! parsers refuse a block whose length does not count its padding (early writers made such, and
//! readers take them), have no Packet Block, read the options in little-endian whatever the
//! section's byte order, know no binary resolution of time, and collect each packet's options on
//! the heap.

use alloc::vec::Vec;
use std::io::Read;

use pcap_parser::pcapng::{EPB_MAGIC, IDB_MAGIC, OptionCode, SHB_MAGIC, SPB_MAGIC};

use super::{Block, Error, LinkType, MAX_BLOCK, input::Input};

/// How a pcapng file begins, in both byte orders.
pub(super) const MAGIC: [u8; 4] = SHB_MAGIC.to_le_bytes();

/// Type of the obsolete Packet Block.
const PB_MAGIC: u32 = 2;

/// Octets of a block without a body.
const EMPTY_BLOCK: usize = 12;

/// Interfaces that a section may have.
const MAX_INTERFACES: usize = 1 << 20;

const BYTE_ORDER_MAGIC: u32 = 0x1a2b_3c4d;

/// A file of which the beginning was looked at.
#[derive(Debug)]
pub(super) struct File {
    /// Byte order of the section's block types and lengths.
    big_endian: bool,
    /// Byte order of what is within its blocks.
    body_big_endian: bool,
    /// Of the section that is being read.
    interfaces: Vec<Interface>,
}

/// What an Interface Description Block says about the packets of its interface.
#[derive(Debug, Clone, Copy)]
struct Interface {
    link: LinkType,
    /// Octets that are captured of a packet; 0: all.
    snaplen: u32,
    unit: Unit,
    /// What is to be added to each time.
    offset_ns: i128,
}

/// What a packet whose section does not describe its interface is taken for.
const UNDECLARED: Interface =
    Interface { link: LinkType::UNDECLARED, snaplen: 0, unit: Unit::MICROSECOND, offset_ns: 0 };

/// Of what the time of an interface's packets is a multiple.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Unit {
    /// So many nanoseconds.
    Times(u32),
    /// One part of so many of a nanosecond.
    Part(u128),
    /// 2^-n seconds.
    Binary(u8),
    /// So small that 64 bits of them are no nanosecond.
    Nothing,
}

impl Unit {
    const MICROSECOND: Self = Self::Times(1000);

    /// That of the option if_tsresol: 10^-n seconds or, with the top bit, 2^-n.
    const fn of(resolution: u8) -> Self {
        match resolution {
            0..=9 => Self::Times(10u32.pow(9 - resolution as u32)),
            10..=28 => Self::Part(10u128.pow(resolution as u32 - 9)),
            29..=0x7f => Self::Nothing,
            0x80.. => Self::Binary(resolution & 0x7f),
        }
    }

    /// `count` of them in nanoseconds, rounded down.
    #[inline]
    const fn ns(self, count: u64) -> i128 {
        let count = count as u128;
        (match self {
            Self::Times(n) => count * n as u128,
            Self::Part(n) => count / n,
            Self::Binary(n) => (count * 1_000_000_000) >> n,
            Self::Nothing => 0,
        }) as i128
    }
}

/// Numbers in the section's byte order.
#[derive(Clone, Copy)]
struct Numbers<'a> {
    octets: &'a [u8],
    big_endian: bool,
}

impl Numbers<'_> {
    #[inline]
    fn u16(self, at: usize) -> Option<u16> {
        let number = self.octets.get(at..)?.first_chunk()?;
        Some(if self.big_endian { u16::from_be_bytes } else { u16::from_le_bytes }(*number))
    }

    #[inline]
    fn u32(self, at: usize) -> Option<u32> {
        let number = self.octets.get(at..)?.first_chunk()?;
        Some(if self.big_endian { u32::from_be_bytes } else { u32::from_le_bytes }(*number))
    }

    fn i64(self, at: usize) -> Option<i64> {
        let number = self.octets.get(at..)?.first_chunk()?;
        Some(if self.big_endian { i64::from_be_bytes } else { i64::from_le_bytes }(*number))
    }

    /// A time: its upper half comes first in either byte order.
    #[inline]
    fn time(self, at: usize) -> Option<u64> {
        Some(u64::from(self.u32(at)?) << 32 | u64::from(self.u32(at + 4)?))
    }
}

impl File {
    /// Looks at the byte order of the first section. Nothing is consumed.
    pub(super) fn open<R: Read>(input: &mut Input<R>) -> Result<Self, Error> {
        let have = input.want(EMPTY_BLOCK)?;
        if have < EMPTY_BLOCK {
            return Err(Error::Truncated { at: 0, need: EMPTY_BLOCK as u64, have: have as u64 });
        }
        let big_endian = byte_order(input.ahead())
            .ok_or(Error::Format("it begins as pcapng does, but has no byte-order magic"))?;
        Ok(Self { big_endian, body_big_endian: big_endian, interfaces: Vec::new() })
    }

    /// The next packet block.
    pub(super) fn next_block<R: Read>(
        &mut self,
        input: &mut Input<R>,
    ) -> Result<Option<Block>, Error> {
        loop {
            let at = input.position();
            let damaged = |what| Error::Damaged { at, what };
            let truncated = |need: usize, have: usize| Error::Truncated {
                at,
                need: need as u64,
                have: have as u64,
            };
            match input.want(EMPTY_BLOCK)? {
                0 => return Ok(None),
                have if have < EMPTY_BLOCK => return Err(truncated(EMPTY_BLOCK, have)),
                _ => {}
            }
            if input.ahead().starts_with(&MAGIC) {
                self.big_endian = byte_order(input.ahead())
                    .ok_or_else(|| damaged("a section header without byte-order magic"))?;
                self.interfaces.clear();
            }
            let front = Numbers { octets: input.ahead(), big_endian: self.big_endian };
            let (Some(kind), Some(len)) = (front.u32(0), front.u32(4)) else {
                return Err(damaged("a block that cannot be read"));
            };
            // Early writers do not count the padding in the length. It is there all the same.
            let total = (len as usize).checked_next_multiple_of(4).unwrap_or(usize::MAX);
            if total < EMPTY_BLOCK {
                return Err(damaged("a block of less than 12 octets"));
            }
            if total > MAX_BLOCK {
                return Err(damaged("a block of more than 256 MiB"));
            }
            let have = input.want(total)?;
            if have < total {
                return Err(truncated(total, have));
            }
            let block = &input.ahead()[..total];
            let block = Numbers { octets: block, big_endian: self.big_endian };
            if !block.u32(total - 4).is_some_and(|last| last == len || last as usize == total) {
                return Err(damaged("a block whose two lengths differ"));
            }
            let big_endian = self.body_big_endian;
            let body = Numbers { octets: &input.ahead()[8..total - 4], big_endian };
            let packet = match kind {
                SHB_MAGIC => {
                    // A writer for big-endian, from before the format was settled, gives only
                    // types, lengths and magic in that order. The version tells it: 256, not 1.
                    let odd = block.u16(12) == Some(1u16.swap_bytes());
                    self.body_big_endian = self.big_endian != odd;
                    None
                }
                IDB_MAGIC => {
                    let interface = interface(body)
                        .ok_or_else(|| damaged("an interface description that is not whole"))?;
                    if self.interfaces.len() == MAX_INTERFACES {
                        return Err(damaged("a section of more than 1,048,576 interfaces"));
                    }
                    self.interfaces.push(interface);
                    None
                }
                EPB_MAGIC | PB_MAGIC | SPB_MAGIC => Some(
                    self.packet(kind, body)
                        .ok_or_else(|| damaged("a packet block that is shorter than its packet"))?,
                ),
                _ => None,
            };
            let Some((packet, from, caplen)) = packet else {
                input.consume(total, 0..0);
                continue;
            };
            let data = input.consume(total, 8 + from..8 + from + caplen);
            return Ok(Some(Block { data, ..packet }));
        }
    }

    /// A packet block, and where in its body how much data is. `None` if it is not whole.
    #[inline]
    fn packet(&self, kind: u32, body: Numbers<'_>) -> Option<(Block, usize, usize)> {
        let interface = |id: u32| {
            usize::try_from(id).ok().and_then(|id| self.interfaces.get(id)).unwrap_or(&UNDECLARED)
        };
        if kind == SPB_MAGIC {
            let interface = interface(0);
            let len = body.u32(0)?;
            let captured = match interface.snaplen {
                0 => len,
                snaplen => len.min(snaplen),
            };
            let captured = (captured as usize).min(body.octets.len() - 4);
            let packet = Block { time_ns: None, len, link: interface.link, data: 0..0 };
            return Some((packet, 4, captured));
        }
        let id = if kind == PB_MAGIC { body.u16(0)?.into() } else { body.u32(0)? };
        let interface = interface(id);
        let time_ns = interface.unit.ns(body.time(4)?) + interface.offset_ns;
        let (captured, len) = (body.u32(12)? as usize, body.u32(16)?);
        if captured > body.octets.len() - 20 {
            return None;
        }
        let packet = Block { time_ns: Some(time_ns), len, link: interface.link, data: 0..0 };
        Some((packet, 20, captured))
    }
}

/// Whether the section whose header is at the front of `octets` is in big-endian.
fn byte_order(octets: &[u8]) -> Option<bool> {
    let magic = octets.get(8..)?.first_chunk()?;
    if u32::from_be_bytes(*magic) == BYTE_ORDER_MAGIC {
        Some(true)
    } else if u32::from_le_bytes(*magic) == BYTE_ORDER_MAGIC {
        Some(false)
    } else {
        None
    }
}

/// Reads an interface description. Options of a wrong length count for nothing.
fn interface(body: Numbers<'_>) -> Option<Interface> {
    let (link, snaplen) = (LinkType(body.u16(0)?), body.u32(4)?);
    let mut interface = Interface { link, snaplen, ..UNDECLARED };
    let mut at = 8;
    while let (Some(code), Some(len)) = (body.u16(at), body.u16(at + 2)) {
        match (OptionCode(code), len) {
            (OptionCode::EndOfOpt, _) => break,
            (OptionCode::IfTsresol, 1) => {
                if let Some(&resolution) = body.octets.get(at + 4) {
                    interface.unit = Unit::of(resolution);
                }
            }
            (OptionCode::IfTsoffset, 8) => {
                if let Some(seconds) = body.i64(at + 4) {
                    interface.offset_ns = i128::from(seconds) * 1_000_000_000;
                }
            }
            _ => {}
        }
        at += 4 + usize::from(len).next_multiple_of(4);
    }
    Some(interface)
}

#[cfg(test)]
mod tests {
    use super::{super::tests::*, *};
    use hex_literal::hex;
    use std::vec;

    const LITTLE: [u8; 28] = hex!("0a0d0d0a 1c000000 4d3c2b1a 0100 0000 ffffffffffffffff 1c000000");
    const BIG: [u8; 28] = hex!("0a0d0d0a 0000001c 1a2b3c4d 0001 0000 ffffffffffffffff 0000001c");
    /// Ethernet, nothing else said.
    const ETHERNET: [u8; 20] = hex!("01000000 14000000 0100 0000 00000000 14000000");
    /// At 1 s and 2 units, 3 octets of 4.
    const PACKET: [u8; 36] =
        hex!("06000000 24000000 00000000 00000000 42420f00 03000000 04000000 aabbcc00 24000000");

    fn seen(time_ns: Option<i128>, len: u32, data: &[u8], link: u16) -> Seen {
        Seen { time_ns, len, data: data.to_vec(), link }
    }

    fn usual(link: u16) -> Seen {
        seen(Some(1_000_002_000), 4, &hex!("aabbcc"), link)
    }

    #[test]
    fn sections_change_byte_order_and_interfaces() {
        let big_interface = hex!("00000001 00000014 0071 0000 00000000 00000014");
        let big_packet = hex!(
            "00000006 00000024 00000000 00000000 000f4242 00000003 00000004 aabbcc00 00000024"
        );
        let octets = [
            &LITTLE[..],
            &ETHERNET,
            &PACKET,
            &BIG,
            &big_interface,
            &big_packet,
            &LITTLE,
            // No interface in this section.
            &PACKET,
        ]
        .concat();
        assert_eq!(good(&octets), [usual(1), usual(113), usual(LinkType::UNDECLARED.0)]);
    }

    #[test]
    fn each_interface_has_its_unit_and_link_type() {
        let second = hex!(
            "01000000 20000000 7100 0000 00000000"
            "0900 0100 09000000 0000 0000 20000000"
        );
        let mut packet = PACKET;
        packet[8] = 1;
        let octets = [&LITTLE[..], &ETHERNET, &second, &PACKET, &packet].concat();
        assert_eq!(good(&octets), [usual(1), seen(Some(1_000_002), 4, &hex!("aabbcc"), 113)]);
    }

    #[test]
    fn simple_packets_have_no_time() {
        let cut_to_2 = hex!("01000000 14000000 0100 0000 02000000 14000000");
        let simple = hex!("03000000 14000000 03000000 aabbcc00 14000000");
        let octets = [&LITTLE[..], &ETHERNET, &simple].concat();
        assert_eq!(good(&octets), [seen(None, 3, &hex!("aabbcc"), 1)]);
        let octets = [&LITTLE[..], &cut_to_2, &simple].concat();
        assert_eq!(good(&octets), [seen(None, 3, &hex!("aabb"), 1)]);
        // More on the wire than the block holds: all of it was captured, pad or not.
        let long = hex!("03000000 14000000 09000000 aabbccdd 14000000");
        let octets = [&LITTLE[..], &ETHERNET, &long].concat();
        assert_eq!(good(&octets), [seen(None, 9, &hex!("aabbccdd"), 1)]);
        let octets = [&LITTLE[..], &simple].concat();
        assert_eq!(good(&octets), [seen(None, 3, &hex!("aabbcc"), LinkType::UNDECLARED.0)]);
    }

    #[test]
    fn the_obsolete_packet_block() {
        let packet = hex!(
            "02000000 24000000 0000 ffff 00000000 42420f00 03000000 04000000 aabbcc00 24000000"
        );
        let octets = [&LITTLE[..], &ETHERNET, &packet].concat();
        assert_eq!(good(&octets), [usual(1)]);
        let packet = hex!(
            "00000002 00000024 0000 ffff 00000000 000f4242 00000003 00000004 aabbcc00 00000024"
        );
        let octets = [&BIG[..], &packet].concat();
        assert_eq!(good(&octets), [usual(LinkType::UNDECLARED.0)]);
    }

    #[test]
    fn offsets_count_in_seconds_and_may_be_negative() {
        let little = hex!(
            "01000000 20000000 0100 0000 00000000"
            "0e00 0800 fdffffffffffffff 20000000"
        );
        let octets = [&LITTLE[..], &little, &PACKET].concat();
        assert_eq!(good(&octets)[0].time_ns, Some(-1_999_998_000));
        // In big-endian, without an end of options, and with the unit behind it.
        let big = hex!(
            "00000001 00000028 0001 0000 00000000"
            "000e 0008 fffffffffffffffd 0009 0001 09000000 00000028"
        );
        let packet =
            hex!("00000006 00000020 00000000 00000000 00000005 00000000 00000000 00000020");
        let octets = [&BIG[..], &big, &packet].concat();
        assert_eq!(good(&octets), [seen(Some(-2_999_999_995), 0, &[], 1)]);
        // The ends of the range.
        for (seconds, ns) in [
            (i64::MIN, -9_223_372_036_854_775_808_000_000_000i128),
            (i64::MAX, 9_223_372_036_854_775_807_000_000_000),
        ] {
            let mut option = little;
            option[20..28].copy_from_slice(&seconds.to_le_bytes());
            let octets = [&LITTLE[..], &option, &PACKET].concat();
            assert_eq!(good(&octets)[0].time_ns, Some(ns + 1_000_002_000));
        }
    }

    #[test]
    fn options_of_a_wrong_length_count_for_nothing() {
        let unit = hex!(
            "01000000 24000000 0100 0000 00000000"
            "0900 0200 09090000 0e00 0400 01000000 24000000"
        );
        let octets = [&LITTLE[..], &unit, &PACKET].concat();
        assert_eq!(good(&octets), [usual(1)]);
        // An option that goes beyond its block; one behind the end of options.
        let beyond = hex!("01000000 1c000000 0100 0000 00000000 0900 ffff 09000000 1c000000");
        let octets = [&LITTLE[..], &beyond, &PACKET].concat();
        assert_eq!(good(&octets), [usual(1)]);
        let behind =
            hex!("01000000 20000000 0100 0000 00000000 0000 0000 0900 0100 09000000 20000000");
        let octets = [&LITTLE[..], &behind, &PACKET].concat();
        assert_eq!(good(&octets), [usual(1)]);
    }

    #[test]
    fn every_unit() {
        assert_eq!(Unit::of(6), Unit::MICROSECOND);
        assert_eq!(Unit::of(0).ns(u64::MAX), 18_446_744_073_709_551_615_000_000_000);
        assert_eq!(Unit::of(9).ns(7), 7);
        assert_eq!(Unit::of(10).ns(79), 7);
        assert_eq!(Unit::of(19).ns(u64::MAX), 1_844_674_407);
        assert_eq!(Unit::of(28).ns(u64::MAX), 1);
        assert_eq!(Unit::of(29).ns(u64::MAX), 0);
        assert_eq!(Unit::of(0x7f).ns(u64::MAX), 0);
        assert_eq!(Unit::of(0x80).ns(3), 3_000_000_000);
        assert_eq!(Unit::of(0x80 | 8).ns(384), 1_500_000_000);
        // One unit less than a second.
        assert_eq!(Unit::of(0x80 | 63).ns(u64::MAX >> 1), 999_999_999);
        assert_eq!(Unit::of(0x80 | 93).ns(u64::MAX), 1);
        assert_eq!(Unit::of(0xff).ns(u64::MAX), 0);
        // Rising in what they count.
        for resolution in 0..=255 {
            let unit = Unit::of(resolution);
            assert_eq!(unit.ns(0), 0);
            assert!(unit.ns(1 << 40) <= unit.ns(u64::MAX));
        }
    }

    #[test]
    fn blocks_that_are_no_frames() {
        let mut octets = [&LITTLE[..], &ETHERNET].concat();
        // Names, statistics, journal, secrets, custom (both kinds), one that nobody knows.
        for kind in [4u32, 5, 9, 10, 0xbad, 0x4000_0bad, 0x7777_7777] {
            octets.extend(kind.to_le_bytes());
            octets.extend(hex!("14000000 0000e4cd aabbccdd 14000000"));
        }
        octets.extend(PACKET);
        assert_eq!(good(&octets), [usual(1)]);
    }

    #[test]
    fn a_length_may_leave_out_the_padding() {
        // Of 3 octets of data, in the packet's block and in both of its lengths.
        let mut packet = PACKET;
        packet[4] = 0x23;
        packet[32] = 0x23;
        let octets = [&LITTLE[..], &ETHERNET, &packet, &PACKET].concat();
        assert_eq!(good(&octets), [usual(1), usual(1)]);
        packet[32] = 0x24;
        let octets = [&LITTLE[..], &ETHERNET, &packet, &PACKET].concat();
        assert_eq!(good(&octets), [usual(1), usual(1)]);
    }

    #[test]
    fn an_early_writer_gives_big_endian_to_the_frames_of_blocks_only() {
        let octets = hex!(
            "0a0d0d0a 0000001c 1a2b3c4d 0100 0000 c867000000000000 0000001c"
            "00000001 00000014 0100 0000 ffff0000 00000014"
            "00000002 00000024 0000 ffff 00000000 42420f00 03000000 04000000 aabbcc00 00000024"
        );
        assert_eq!(good(&octets), [usual(1)]);
    }

    #[test]
    fn blocks_that_cannot_be() {
        let after = |block: &[u8]| {
            let (frames, error) = all(&[&LITTLE[..], &ETHERNET, &PACKET, block].concat()[..]);
            assert_eq!(frames, [usual(1)]);
            let error = error.unwrap();
            let what = error.strip_prefix("the capture is damaged: at octet 84: ");
            vec::Vec::from(what.unwrap_or_else(|| panic!("{error}")))
        };
        let mut packet = PACKET;
        packet[32] = 0x20;
        assert_eq!(after(&packet), b"a block whose two lengths differ");
        let mut packet = PACKET;
        packet[20] = 5;
        assert_eq!(after(&packet), b"a packet block that is shorter than its packet");
        packet[20..24].copy_from_slice(&hex!("ffffffff"));
        assert_eq!(after(&packet), b"a packet block that is shorter than its packet");
        let empty = hex!("06000000 0c000000 0c000000");
        assert_eq!(after(&empty), b"a packet block that is shorter than its packet");
        let empty = hex!("03000000 0c000000 0c000000");
        assert_eq!(after(&empty), b"a packet block that is shorter than its packet");
        let empty = hex!("01000000 0c000000 0c000000");
        assert_eq!(after(&empty), b"an interface description that is not whole");
        let short = hex!("05000000 08000000 08000000");
        assert_eq!(after(&short), b"a block of less than 12 octets");
        let none = hex!("05000000 00000000 00000000");
        assert_eq!(after(&none), b"a block of less than 12 octets");
        let long = hex!("05000000 04000010 00000000");
        assert_eq!(after(&long), b"a block of more than 256 MiB");
        let long = hex!("05000000 ffffffff 00000000");
        assert_eq!(after(&long), b"a block of more than 256 MiB");
        let no_order = hex!("0a0d0d0a 1c000000 00000000");
        assert_eq!(after(&no_order), b"a section header without byte-order magic");
    }

    #[test]
    fn interfaces_have_a_bound() {
        let mut octets = LITTLE.to_vec();
        for _ in 0..MAX_INTERFACES {
            octets.extend(ETHERNET);
        }
        assert_eq!(good(&octets), []);
        octets.extend(ETHERNET);
        let error = all(&octets[..]).1.unwrap();
        assert!(error.ends_with("a section of more than 1,048,576 interfaces"), "{error}");
    }
}
