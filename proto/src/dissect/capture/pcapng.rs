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
