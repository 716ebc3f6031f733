//! Classic pcap.
//!
//! ```text
//!  file    | magic | major, minor | thiszone | sigfigs | snaplen | network |   24 octets
//!  record  | seconds | µs or ns | captured | on the wire |  data…             16 octets
//!  modified variant, behind the record's 16 octets: interface, protocol, packet type   8
//! ```

use std::io::Read;

use pcap_parser::{LegacyPcapBlock, PcapError, nom};

use super::{Block, Error, LinkType, MAX_BLOCK, input::Input};

/// Octets of the file header.
const FILE_HEADER: usize = 24;

/// What the magic tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Variant {
    big_endian: bool,
    nanoseconds: bool,
    modified: bool,
}

impl Variant {
    /// That of a file that begins with `front`.
    pub(super) fn of(front: &[u8]) -> Option<Self> {
        let &[a, b, c, d, ..] = front else { return None };
        let magic = |[a, b, c, d]: [u8; 4], big_endian| match u32::from_be_bytes([a, b, c, d]) {
            0xa1b2_c3d4 => Some(Self { big_endian, nanoseconds: false, modified: false }),
            0xa1b2_3c4d => Some(Self { big_endian, nanoseconds: true, modified: false }),
            0xa1b2_cd34 => Some(Self { big_endian, nanoseconds: false, modified: true }),
            _ => None,
        };
        magic([a, b, c, d], true).or_else(|| magic([d, c, b, a], false))
    }

    /// The number at the front of `octets`, of which there are at least four.
    #[inline]
    fn word(self, octets: &[u8]) -> u32 {
        let word = [octets[0], octets[1], octets[2], octets[3]];
        if self.big_endian { u32::from_be_bytes(word) } else { u32::from_le_bytes(word) }
    }
}

/// Whether the two lengths of a record are in each other's place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Swapped {
    Never,
    /// Where the first one is the larger: version 2.3 was written both ways.
    WhereLarger,
    Always,
}

impl Swapped {
    fn of(variant: Variant, major: u32, minor: u32) -> Self {
        // Nobody wrote nanoseconds before version 2.4: such a file has a wrong version, not
        // swapped lengths.
        if variant.nanoseconds {
            return Self::Never;
        }
        match (major, minor) {
            // DG/UX.
            (543, 0) => Self::Always,
            version if version < (2, 3) => Self::Always,
            (2, 3) => Self::WhereLarger,
            _ => Self::Never,
        }
    }
}

type Parsed<'a> = nom::IResult<&'a [u8], LegacyPcapBlock<'a>, PcapError<&'a [u8]>>;

/// A file of which the header was read.
#[derive(Debug)]
pub(super) struct File {
    variant: Variant,
    swapped: Swapped,
    link: LinkType,
}

impl File {
    /// Reads the file header.
    pub(super) fn open<R: Read>(variant: Variant, input: &mut Input<R>) -> Result<Self, Error> {
        let have = input.want(FILE_HEADER)?;
        if have < FILE_HEADER {
            return Err(Error::Truncated { at: 0, need: FILE_HEADER as u64, have: have as u64 });
        }
        let header = input.ahead();
        let word = |at: usize| variant.word(&header[at..]);
        // Two 16-bit numbers, each in the file's byte order.
        let (major, minor) = match (word(4), variant.big_endian) {
            (both, true) => (both >> 16, both & 0xffff),
            (both, false) => (both & 0xffff, both >> 16),
        };
        let swapped = Swapped::of(variant, major, minor);
        // The upper half tells of frame check sequences.
        let link = LinkType(word(20) as u16);
        input.consume(FILE_HEADER, 0..0);
        Ok(Self { variant, swapped, link })
    }

    /// The next record.
    pub(super) fn next_block<R: Read>(&self, input: &mut Input<R>) -> Result<Option<Block>, Error> {
        loop {
            let ahead = input.ahead();
            let missing = match self.parse(ahead) {
                Ok((rest, record)) => {
                    let total = ahead.len() - rest.len();
                    let data = total - record.data.len()..total;
                    let (time_ns, len) = (Some(self.time_ns(&record)), record.origlen);
                    let data = input.consume(total, data);
                    return Ok(Some(Block { time_ns, len, link: self.link, data }));
                }
                Err(nom::Err::Incomplete(nom::Needed::Size(missing))) => missing.get(),
                // The parsers have no other; should one come to them, it is told.
                Err(_) => {
                    let at = input.position();
                    return Err(Error::Damaged { at, what: "a record that cannot be read" });
                }
            };
            let at = input.position();
            let need = ahead.len().saturating_add(missing);
            if need > MAX_BLOCK {
                return Err(Error::Damaged { at, what: "a record of more than 256 MiB" });
            }
            match input.want(need)? {
                0 => return Ok(None),
                have if have < need => {
                    return Err(Error::Truncated { at, need: need as u64, have: have as u64 });
                }
                _ => {}
            }
        }
    }

    #[inline]
    fn parse<'a>(&self, octets: &'a [u8]) -> Parsed<'a> {
        match (self.swapped, self.variant.modified, self.variant.big_endian) {
            (Swapped::Never, false, false) => pcap_parser::parse_pcap_frame(octets),
            (Swapped::Never, false, true) => pcap_parser::parse_pcap_frame_be(octets),
            (Swapped::Never, true, false) => pcap_parser::parse_pcap_frame_modified(octets),
            _ => self.parse_rare(octets),
        }
    }

    /// What the crate has no parser for: the modified variant in big-endian, and lengths in each
    /// other's place. There the crate would wait for as many octets as were on the wire.
    fn parse_rare<'a>(&self, octets: &'a [u8]) -> Parsed<'a> {
        let header = if self.variant.modified { 24 } else { 16 };
        let incomplete = |need: usize| {
            Err(nom::Err::Incomplete(nom::Needed::new(need.saturating_sub(octets.len()))))
        };
        if octets.len() < header {
            return incomplete(header);
        }
        let word = |at: usize| self.variant.word(&octets[at..]);
        let (first, second) = (word(8), word(12));
        let (caplen, origlen) = match self.swapped {
            Swapped::Always => (second, first),
            Swapped::WhereLarger if first > second => (second, first),
            Swapped::WhereLarger | Swapped::Never => (first, second),
        };
        let total = header.saturating_add(caplen as usize);
        let Some(data) = octets.get(header..total) else { return incomplete(total) };
        let (ts_sec, ts_usec) = (word(0), word(4));
        Ok((&octets[total..], LegacyPcapBlock { ts_sec, ts_usec, caplen, origlen, data }))
    }

    /// Seconds are unsigned, and last until 2106.
    #[inline]
    fn time_ns(&self, record: &LegacyPcapBlock<'_>) -> i128 {
        // Above 999,999 the microseconds mean nothing. As nanoseconds they are held in 32 bits, as
        // by Wireshark, so that the same frame has the same time in both.
        let scale = if self.variant.nanoseconds { 1 } else { 1000 };
        i128::from(record.ts_sec) * 1_000_000_000 + i128::from(record.ts_usec.wrapping_mul(scale))
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{Seen, all, good};
    use hex_literal::hex;
    use std::vec::Vec;

    /// One frame of 2 octets, cut from 3.
    fn one(ns: i128, link: u16) -> [Seen; 1] {
        [Seen { time_ns: Some(ns), len: 3, data: hex!("aabb").to_vec(), link }]
    }

    #[test]
    fn every_magic_in_both_byte_orders() {
        let little = hex!(
            "d4c3b2a1 0200 0400 00000000 00000000 00000400 01000000"
            "01000000 02000000 02000000 03000000 aabb"
        );
        assert_eq!(good(&little), one(1_000_002_000, 1));
        let big = hex!(
            "a1b2c3d4 0002 0004 00000000 00000000 00040000 00000001"
            "00000001 00000002 00000002 00000003 aabb"
        );
        assert_eq!(good(&big), one(1_000_002_000, 1));
        let mut ns = little;
        ns[..4].copy_from_slice(&hex!("4d3cb2a1"));
        assert_eq!(good(&ns), one(1_000_000_002, 1));
        let mut ns = big;
        ns[..4].copy_from_slice(&hex!("a1b23c4d"));
        assert_eq!(good(&ns), one(1_000_000_002, 1));
        let modified = hex!(
            "34cdb2a1 0200 0400 00000000 00000000 00000400 01000000"
            "01000000 02000000 02000000 03000000 07000000 0800 00 00 aabb"
        );
        assert_eq!(good(&modified), one(1_000_002_000, 1));
        let modified = hex!(
            "a1b2cd34 0002 0004 00000000 00000000 00040000 00000001"
            "00000001 00000002 00000002 00000003 00000007 0800 00 00 aabb"
        );
        assert_eq!(good(&modified), one(1_000_002_000, 1));
    }

    #[test]
    fn lengths_in_each_others_place() {
        let file = |version: [u8; 4], lengths: [u8; 8]| {
            let mut octets = hex!(
                "d4c3b2a1 0200 0400 00000000 00000000 00000400 01000000"
                "01000000 02000000 02000000 03000000 aabb"
            );
            octets[4..8].copy_from_slice(&version);
            octets[32..40].copy_from_slice(&lengths);
            octets
        };
        let (right, swapped) = (hex!("02000000 03000000"), hex!("03000000 02000000"));
        // Before 2.3 always, in 2.3 where the first one is the larger, then never; and by DG/UX.
        for version in [hex!("0200 0000"), hex!("0200 0200"), hex!("0100 0400"), hex!("1f02 0000")]
        {
            assert_eq!(good(&file(version, swapped)), one(1_000_002_000, 1));
            let (frames, error) = all(&file(version, right)[..]);
            assert!(frames.is_empty() && error.unwrap().contains("19 octets needed, 18 left"));
        }
        assert_eq!(good(&file(hex!("0200 0300"), swapped)), one(1_000_002_000, 1));
        assert_eq!(good(&file(hex!("0200 0300"), right)), one(1_000_002_000, 1));
        for version in [hex!("0200 0400"), hex!("0200 0500"), hex!("3030 3030")] {
            assert_eq!(good(&file(version, right)), one(1_000_002_000, 1));
            let (frames, error) = all(&file(version, swapped)[..]);
            assert!(frames.is_empty() && error.unwrap().contains("19 octets needed, 18 left"));
        }
        // In big-endian, too.
        let big = hex!(
            "a1b2c3d4 0002 0002 00000000 00000000 00040000 00000001"
            "00000001 00000002 00000003 00000002 aabb"
        );
        assert_eq!(good(&big), one(1_000_002_000, 1));
        // Nanoseconds are younger than that.
        let mut ns = file(hex!("0200 0000"), right);
        ns[..4].copy_from_slice(&hex!("4d3cb2a1"));
        assert_eq!(good(&ns), one(1_000_000_002, 1));
    }

    #[test]
    fn an_old_file_may_end_anywhere() {
        let octets = hex!(
            "d4c3b2a1 0200 0200 00000000 00000000 00000400 01000000"
            "01000000 02000000 03000000 02000000 aabb"
        );
        for have in 25..octets.len() {
            let (frames, error) = all(&octets[..have]);
            assert!(frames.is_empty());
            assert!(error.unwrap().starts_with("the capture ends early: at octet 24, "));
        }
    }

    #[test]
    fn link_type_and_snaplen() {
        // Upper bits of the network field are no link type, and more is captured than the snaplen.
        let octets = hex!(
            "d4c3b2a1 0200 0400 00000000 00000000 01000000 65000014"
            "01000000 02000000 02000000 03000000 aabb"
        );
        assert_eq!(good(&octets), one(1_000_002_000, 101));
    }

    #[test]
    fn times_at_the_edges() {
        let time = |seconds: u32, micros: u32| {
            let mut octets = hex!(
                "d4c3b2a1 0200 0400 00000000 00000000 01000000 01000000"
                "01000000 02000000 00000000 00000000"
            );
            octets[24..28].copy_from_slice(&seconds.to_le_bytes());
            octets[28..32].copy_from_slice(&micros.to_le_bytes());
            good(&octets)[0].time_ns.unwrap()
        };
        assert_eq!(time(0, 0), 0);
        assert_eq!(time(u32::MAX, 999_999), 4_294_967_295_999_999_000);
        // Out of range: added where it fits into 32 bits, and wrapped where not.
        assert_eq!(time(1, 1_000_000), 2_000_000_000);
        assert_eq!(time(0x3030_3030, 0x3030_3030), 808_464_433_010_580_352);
    }

    #[test]
    fn lengths_that_cannot_be() {
        let mut octets = hex!(
            "d4c3b2a1 0200 0400 00000000 00000000 00000400 01000000"
            "01000000 02000000 00000010 00000010 aabb"
        );
        // 256 MiB with its header are too many, ...
        let error = all(&octets[..]).1.unwrap();
        assert_eq!(error, "the capture is damaged: at octet 24: a record of more than 256 MiB");
        octets[32..36].copy_from_slice(&u32::MAX.to_le_bytes());
        assert_eq!(all(&octets[..]).1.unwrap(), error);
        // ... and as many as may be are waited for.
        octets[32..36].copy_from_slice(&((256 << 20) - 16u32).to_le_bytes());
        let error = all(&octets[..]).1.unwrap();
        assert!(error.ends_with("at octet 24, 268435456 octets needed, 18 left"), "{error}");
    }

    #[test]
    fn a_record_larger_than_the_buffer() {
        let mut octets = hex!(
            "d4c3b2a1 0200 0400 00000000 00000000 00000400 01000000"
            "01000000 02000000 21430500 21430500"
        )
        .to_vec();
        let len = 0x54321;
        let data: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
        let record = octets[24..].to_vec();
        octets.extend(&data);
        for _ in 0..9 {
            octets.extend(&record);
            octets.extend(&data);
        }
        let frames = good(&octets);
        assert_eq!(frames.len(), 10);
        assert!(frames.iter().all(|frame| frame.data == data));
    }
}
