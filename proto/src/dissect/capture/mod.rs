//! Capture files: pcap and pcapng, gzip'd or not.
//!
//! [`Reader`] takes octets from anything that is [`Read`] and never goes back, so that a capture may
//! come through a pipe while it is still being made. It hands out [`Record`]s, one a packet block,
//! whose octets lie in the reader's own buffer.
//!
//! What it reads, and how it takes what a format leaves open:
//!
//! * pcap in both byte orders, with microseconds or nanoseconds, and the "modified" variant whose
//!   record headers have 24 octets. Versions are not judged. The snaplen is not enforced.
//! * pcapng: any number of sections, each with a byte order and interfaces of its own. Frames are
//!   Enhanced, Simple and (obsolete) Packet Blocks; all others are passed over.
//! * Some link types put a header in front of the frame that was never on the wire. It is taken
//!   off, and neither `len` nor `data` counts it, as in Wireshark: see [`LinkType::pseudo_header`].
//!   From ERF's header come time, length and type of the record.

mod erf;
mod input;
mod pcap;
mod pcapng;

use core::ops::Range;
use std::{
    io::{self, Read},
    string::ToString,
};

use input::Input;

/// Octets that one block of a capture may have; beyond, the file is damaged.
pub const MAX_BLOCK: usize = 256 << 20;

/// A link type (LINKTYPE_ of tcpdump.org), 16 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LinkType(pub u16);

impl LinkType {
    /// BSD loopback: an address family in the byte order of the host that captured.
    pub const NULL: Self = Self(0);
    /// Ethernet, II or 802.3.
    pub const ETHERNET: Self = Self(1);
    /// OpenBSD's loopback: an address family in network byte order.
    pub const LOOP: Self = Self(108);
    /// Linux cooked capture.
    pub const LINUX_SLL: Self = Self(113);
    /// Endace extensible record format: [`Record::erf`] says what `data` is.
    pub const ERF: Self = Self(197);
    /// InfiniBand, from the local route header on.
    pub const INFINIBAND: Self = Self(247);
    /// Linux cooked capture, version 2.
    pub const LINUX_SLL2: Self = Self(276);
    /// Not a link type: the packet block names an interface that its section does not describe.
    pub const UNDECLARED: Self = Self(u16::MAX);

    /// Octets of the header that captures of this link type have before each frame and that was
    /// never on the wire; 0 for most, and for ERF, whose header varies.
    ///
    /// | link type | octets | what they say |
    /// | --- | --- | --- |
    /// | 123 `SUNATM` | 4 | direction, kind, VPI and VCI |
    /// | 140 `MTP2_WITH_PHDR` | 4 | direction, link number |
    /// | 144 `LINUX_IRDA` | 16 | a cooked header: direction |
    /// | 177 `LINUX_LAPD` | 16 | a cooked header: direction |
    /// | 196 `SITA` | 5 | direction, signals, errors, protocol |
    /// | 201 `BLUETOOTH_HCI_H4_WITH_PHDR` | 4 | direction |
    /// | 204 `PPP_WITH_DIR` | 1 | direction |
    /// | 209 `I2C_LINUX` | 5 | bus and flags |
    /// | 245 `NFC_LLCP` | 2 | adapter, direction |
    /// | 254 `BLUETOOTH_LINUX_MONITOR` | 4 | adapter, kind |
    pub const fn pseudo_header(self) -> usize {
        match self.0 {
            123 | 140 | 201 | 254 => 4,
            144 | 177 => 16,
            196 | 209 => 5,
            204 => 1,
            245 => 2,
            _ => 0,
        }
    }
}

/// One packet block of a capture.
#[derive(Debug, Clone, Copy)]
pub struct Record<'a> {
    /// Its number, from 1.
    pub number: u64,
    /// Nanoseconds since 1970; `None` where the block has no time.
    pub time_ns: Option<i128>,
    /// Octets on the wire; may be less than `data` in a damaged file.
    pub len: u32,
    /// What was captured, without what [`LinkType::pseudo_header`] says. For ERF: without its
    /// header, extension headers and, for Ethernet, pad.
    pub data: &'a [u8],
    /// How `data` begins.
    pub link: LinkType,
    /// ERF's record type, 7 bits: 2 is Ethernet, 21 InfiniBand. `None` for other link types, and
    /// where ERF's header is not whole: it is still in `data` then.
    pub erf: Option<u8>,
}

/// Which file format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// Classic pcap, in any of its variants.
    Pcap,
    /// pcapng.
    Pcapng,
}

/// Why a capture cannot be read, or not further.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Not a capture at all, or one of a format that is not read: its name, if it is known.
    #[error("not a pcap or pcapng capture: {0}")]
    Format(&'static str),
    /// The file ends within a block.
    #[error("the capture ends early: at octet {at}, {need} octets needed, {have} left")]
    Truncated {
        /// Where the block begins that is not whole.
        at: u64,
        /// Octets of it that are needed.
        need: u64,
        /// Octets that are there.
        have: u64,
    },
    /// A block that cannot be.
    #[error("the capture is damaged: at octet {at}: {what}")]
    Damaged {
        /// Where the block begins.
        at: u64,
        /// What is wrong.
        what: &'static str,
    },
    /// The file is gzip'd, and cannot be unpacked to its end.
    #[error("the gzip stream is damaged or cut off: {at} octets of the capture came out: {why}")]
    Gzip {
        /// Octets of the capture that were unpacked.
        at: u64,
        /// What is wrong.
        why: io::Error,
    },
    /// The input could not be read.
    #[error("{0}")]
    Io(#[from] io::Error),
}

impl Error {
    /// The same once more.
    fn again(&self) -> Self {
        let copy = |error: &io::Error| io::Error::new(error.kind(), error.to_string());
        match self {
            Self::Format(name) => Self::Format(name),
            &Self::Truncated { at, need, have } => Self::Truncated { at, need, have },
            &Self::Damaged { at, what } => Self::Damaged { at, what },
            Self::Gzip { at, why } => Self::Gzip { at: *at, why: copy(why) },
            Self::Io(error) => Self::Io(copy(error)),
        }
    }
}

/// Reads the packet blocks of a capture, one by one.
///
/// Memory: a buffer of 1 MiB, which grows for a larger block as its octets come in, and a pcapng
/// section's interfaces.
pub struct Reader<R> {
    input: Input<R>,
    file: File,
    number: u64,
    end: End,
}

enum File {
    Pcap(pcap::File),
    Pcapng(pcapng::File),
}

enum End {
    NotYet,
    Good,
    Bad(Error),
}

/// A packet block as its container tells it.
struct Block {
    time_ns: Option<i128>,
    len: u32,
    link: LinkType,
    /// Where its octets are in the input's buffer.
    data: Range<usize>,
}

impl<R> core::fmt::Debug for Reader<R> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Reader")
            .field("format", &self.format())
            .field("number", &self.number)
            .field("position", &self.position())
            .finish_non_exhaustive()
    }
}

impl<R> Reader<R> {
    /// Which format the front of the input told.
    pub const fn format(&self) -> Format {
        match self.file {
            File::Pcap(_) => Format::Pcap,
            File::Pcapng(_) => Format::Pcapng,
        }
    }

    /// Octets of the capture that are behind us, as unpacked: where the next block begins.
    pub const fn position(&self) -> u64 {
        self.input.position()
    }
}

impl<R: Read> Reader<R> {
    /// Looks at the front of `input`, which may be gzip'd.
    ///
    /// # Errors
    ///
    /// [`Error::Format`] if it is no capture that is read, [`Error::Truncated`] if it ends within
    /// the file header; [`Error::Gzip`], [`Error::Io`].
    pub fn new(input: R) -> Result<Self, Error> {
        let mut input = Input::new(input)?;
        input.want(4)?;
        let file = if input.ahead().starts_with(&pcapng::MAGIC) {
            File::Pcapng(pcapng::File::open(&mut input)?)
        } else if let Some(variant) = pcap::Variant::of(input.ahead()) {
            File::Pcap(pcap::File::open(variant, &mut input)?)
        } else {
            input.want(LONGEST_MAGIC)?;
            return Err(Error::Format(name_of(input.ahead())));
        };
        Ok(Self { input, file, number: 0, end: End::NotYet })
    }

    /// The next packet block; `None` at a good end.
    ///
    /// # Errors
    ///
    /// What ends the capture early. The same comes ever after.
    #[inline]
    pub fn next_record(&mut self) -> Result<Option<Record<'_>>, Error> {
        match &self.end {
            End::NotYet => {}
            End::Good => return Ok(None),
            End::Bad(error) => return Err(error.again()),
        }
        let found = match &mut self.file {
            File::Pcap(file) => file.next_block(&mut self.input),
            File::Pcapng(file) => file.next_block(&mut self.input),
        };
        match found {
            Ok(Some(block)) => {
                self.number += 1;
                let data = self.input.octets(block.data.clone());
                Ok(Some(record(self.number, &block, data)))
            }
            Ok(None) => {
                self.end = End::Good;
                Ok(None)
            }
            Err(error) => {
                self.end = End::Bad(error.again());
                Err(error)
            }
        }
    }
}

/// Takes off what is in front of the frame.
#[inline]
fn record<'a>(number: u64, block: &Block, data: &'a [u8]) -> Record<'a> {
    let &Block { time_ns, len, link, .. } = block;
    if link == LinkType::ERF
        && let Some(erf) = erf::Erf::parse(data)
    {
        return Record {
            number,
            time_ns: Some(erf.time_ns),
            len: erf.len,
            data: erf.data,
            link,
            erf: Some(erf.kind),
        };
    }
    let front = link.pseudo_header();
    match data.get(front..) {
        Some(data) => {
            let len = len.saturating_sub(front as u32);
            Record { number, time_ns, len, data, link, erf: None }
        }
        // Not even the pseudo header is whole.
        None => Record { number, time_ns, len, data, link, erf: None },
    }
}

/// Octets that [`name_of`] looks at.
const LONGEST_MAGIC: usize = 40;

/// What a file that begins like this is called.
fn name_of(front: &[u8]) -> &'static str {
    const KNOWN: [(&[u8], &str); 24] = [
        (b"snoop\0\0\0", "it is a snoop file"),
        (b"btsnoop\0", "it is a btsnoop file"),
        (b"TRSNIFF data    \x1a", "it is an ngsniffer (Network General Sniffer) file"),
        (b"XCP\0", "it is a NetXRay (Sniffer for Windows) file"),
        (b"VL\0\0", "it is an old NetXRay file"),
        (b"RTSS", "it is a Microsoft Network Monitor 1 file"),
        (b"GMBU", "it is a Microsoft Network Monitor 2 file"),
        (b"\x05VNF", "it is a Visual Networks file"),
        (b"iptrace 1.0", "it is an AIX iptrace file"),
        (b"iptrace 2.0", "it is an AIX iptrace file"),
        (b"\x54\x52\x00\x64\x00", "it is an HP-UX nettl file"),
        (b"\0\0\x02\0\x12\x05\0\x10", "it is a Tektronix k12 file"),
        (b"+---------+---------------+----------+", "it is a k12 text file"),
        (b"\xaa\xaa\xaa\xaa", "it is a 5Views file"),
        (b"\x1c\x00\x01\xac", "it is an Ixia lcap file"),
        (b"\x1c\x00\x01\xab", "it is an Ixia lcap file"),
        (b"\xac\x01\x00\x1c", "it is an Ixia lcap file"),
        (b"\xab\x01\x00\x1c", "it is an Ixia lcap file"),
        (b"\x28\xb5\x2f\xfd", "it is packed by zstd: unpack it first"),
        (b"\xfd7zXZ\0", "it is packed by xz: unpack it first"),
        (b"BZh", "it is packed by bzip2: unpack it first"),
        (b"\x04\x22\x4d\x18", "it is packed by lz4: unpack it first"),
        (b"PK\x03\x04", "it is a zip archive: unpack it first"),
        (b"7z\xbc\xaf\x27\x1c", "it is a 7z archive: unpack it first"),
    ];
    if front.is_empty() {
        return "it is empty";
    }
    if front.len() < 4 {
        return "it has less than 4 octets";
    }
    if let Some((_, name)) = KNOWN.iter().find(|(magic, _)| front.starts_with(magic)) {
        return name;
    }
    if front.windows(9).any(|part| part == b"NetScaler") {
        return "it is a NetScaler trace";
    }
    if is_hcidump(front) {
        return "it is an hcidump file, as far as that can be told";
    }
    if erf::is_raw(front) {
        return "it is an ERF file, as far as that can be told";
    }
    "its format is unknown"
}

/// hcidump has no magic: length (16 bits), direction, zero, seconds, microseconds, and then a
/// packet whose first octet is 1 to 4.
fn is_hcidump(front: &[u8]) -> bool {
    let &[n0, n1, direction, 0, _, _, _, _, u0, u1, u2, u3, kind, ..] = front else {
        return false;
    };
    u16::from_le_bytes([n0, n1]) > 0
        && direction <= 1
        && u32::from_le_bytes([u0, u1, u2, u3]) < 1_000_000
        && (1..=4).contains(&kind)
}

#[cfg(test)]
mod tests {
    use super::*;
    use hex_literal::hex;
    use proptest::prelude::*;
    use std::{format, string::String, vec, vec::Vec};

    /// A frame without its number.
    #[derive(Debug, PartialEq, Eq)]
    pub(super) struct Seen {
        pub(super) time_ns: Option<i128>,
        pub(super) len: u32,
        pub(super) data: Vec<u8>,
        pub(super) link: u16,
    }

    /// All frames of a capture, and in words what ended it, if anything did.
    pub(super) fn all(input: impl Read) -> (Vec<Seen>, Option<String>) {
        let mut reader = match Reader::new(input) {
            Ok(reader) => reader,
            Err(error) => return (vec![], Some(error.to_string())),
        };
        let mut frames = vec![];
        loop {
            match reader.next_record() {
                Ok(Some(record)) => {
                    assert_eq!(record.number, frames.len() as u64 + 1);
                    let (data, link) = (record.data.to_vec(), record.link.0);
                    frames.push(Seen { time_ns: record.time_ns, len: record.len, data, link });
                }
                Ok(None) => {
                    assert!(reader.next_record().unwrap().is_none());
                    return (frames, None);
                }
                Err(error) => {
                    let told = error.to_string();
                    assert_eq!(reader.next_record().unwrap_err().to_string(), told);
                    return (frames, Some(told));
                }
            }
        }
    }

    /// All frames of a capture that ends well.
    pub(super) fn good(octets: &[u8]) -> Vec<Seen> {
        let (frames, error) = all(octets);
        assert_eq!(error, None);
        frames
    }

    /// Gives one octet at a time.
    struct Drip<'a>(&'a [u8]);

    impl Read for Drip<'_> {
        fn read(&mut self, room: &mut [u8]) -> io::Result<usize> {
            let n = room.len().min(1);
            self.0.read(&mut room[..n])
        }
    }

    /// Two frames of 3 and 2 octets, the second one cut from 9.
    const PCAP: [u8; 61] = hex!(
        "d4c3b2a1 0200 0400 00000000 00000000 00000400 01000000"
        "01000000 02000000 03000000 03000000 aabbcc"
        "01000000 03000000 02000000 09000000 ddee"
    );

    /// The same frames.
    const PCAPNG: [u8; 124] = hex!(
        "0a0d0d0a 1c000000 4d3c2b1a 0100 0000 ffffffffffffffff 1c000000"
        "01000000 14000000 0100 0000 00000000 14000000"
        "06000000 24000000 00000000 00000000 42420f00 03000000 03000000 aabbcc00 24000000"
        "06000000 28000000 00000000 00000000 43420f00 02000000 09000000 ddee0000 00000000 28000000"
    );

    fn seen(ns: i128, len: u32, data: &[u8]) -> Seen {
        Seen { time_ns: Some(ns), len, data: data.to_vec(), link: 1 }
    }

    fn both_frames() -> Vec<Seen> {
        vec![seen(1_000_002_000, 3, &hex!("aabbcc")), seen(1_000_003_000, 9, &hex!("ddee"))]
    }

    #[test]
    fn both_formats_tell_the_same() {
        for (octets, format) in [(&PCAP[..], Format::Pcap), (&PCAPNG, Format::Pcapng)] {
            let mut reader = Reader::new(octets).unwrap();
            assert_eq!(reader.format(), format);
            while reader.next_record().unwrap().is_some() {}
            assert_eq!(reader.position(), octets.len() as u64);
            assert_eq!(good(octets), both_frames());
            assert_eq!(all(Drip(octets)), (both_frames(), None));
        }
    }

    #[test]
    fn a_capture_may_end_anywhere() {
        // After its last whole frame, an error says what is missing.
        for (octets, front, ends) in
            [(&PCAP[..], 24, &[24, 43, 61][..]), (&PCAPNG, 12, &[28, 48, 84, 124])]
        {
            let whole = |n: usize| both_frames().into_iter().take(n).collect::<Vec<_>>();
            for have in 0..octets.len() {
                let (frames, error) = all(&octets[..have]);
                let passed = ends.iter().filter(|end| **end <= have).count();
                let frame_count = passed.saturating_sub(ends.len() - 2);
                assert_eq!(frames, whole(frame_count), "{have} octets");
                if ends.contains(&have) {
                    assert_eq!(error, None, "{have} octets");
                } else if have >= front {
                    let at = ends.iter().rev().find(|end| **end <= have).unwrap_or(&0);
                    let error = error.unwrap();
                    let told = format!("the capture ends early: at octet {at}, ");
                    assert!(error.starts_with(&told), "{have} octets: {error}");
                    assert!(error.ends_with(&format!(", {} left", have - at)), "{error}");
                } else {
                    assert!(error.is_some(), "{have} octets");
                }
            }
        }
        assert_eq!(
            all(&PCAP[..60]).1.unwrap(),
            "the capture ends early: at octet 43, 18 octets needed, 17 left"
        );
    }

    #[test]
    fn other_formats_are_named() {
        let of = |octets: &[u8]| all(octets).1.unwrap();
        assert_eq!(of(b""), "not a pcap or pcapng capture: it is empty");
        assert_eq!(of(b"ab"), "not a pcap or pcapng capture: it has less than 4 octets");
        assert!(of(b"GIF89a").ends_with("its format is unknown"));
        assert!(of(b"snoop\0\0\0\0\0\0\x02\0\0\0\x04").ends_with("it is a snoop file"));
        assert!(of(b"TRSNIFF data    \x1a").contains("ngsniffer"));
        assert!(of(b"btsnoop\0").contains("btsnoop"));
        assert!(of(b"\x28\xb5\x2f\xfd").contains("zstd"));
        assert!(of(b"\x10\0NetScaler V20 Performance Data").contains("NetScaler"));
        let hcidump = hex!("0400 01 00 7d273a44 9e920e00 04010100");
        assert!(of(&hcidump).contains("hcidump"));
        // The ERF record of the test in erf.rs, 40 octets, in a file of its own.
        let erf = hex!("00000080 5c412b48 1504 0028 0000 0012 f0020000");
        assert!(of(&erf).contains("an ERF file"));
        let no_order = hex!("0a0d0d0a 1c000000 00000000 01000000");
        assert!(of(&no_order).contains("no byte-order magic"));
    }

    #[test]
    fn pseudo_headers_are_taken_off() {
        for link in 0..=300 {
            let front = LinkType(link).pseudo_header();
            let mut octets = hex!(
                "a1b2c3d4 0002 0004 00000000 00000000 00000000 00000000"
                "00000000 00000000 00000020 00000040"
            )
            .to_vec();
            octets[22..24].copy_from_slice(&link.to_be_bytes());
            octets.extend(0..32u8);
            // A frame that has not even the header stays as it is.
            octets.extend(hex!("00000000 00000000 00000000 00000000"));
            let frames = good(&octets);
            if link == LinkType::ERF.0 {
                continue;
            }
            assert_eq!(frames[0].len, 64 - front as u32, "link type {link}");
            assert_eq!(frames[0].data[0], front as u8, "link type {link}");
            assert_eq!((frames[1].len, frames[1].data.len()), (0, 0));
        }
        assert_eq!(LinkType(144).pseudo_header(), 16);
        assert_eq!(LinkType(196).pseudo_header(), 5);
    }

    #[test]
    fn erf_has_its_own_header() {
        let octets = hex!(
            "d4c3b2a1 0200 0400 00000000 00000000 ffff0000 c5000000"
            "ef412b48 ed9f0700 16000000 16000000"
            "00000080 05000000 15 04 0018 0000 0004 a1a2a3a4 0000"
            // Of the second one not even the header is whole.
            "07000000 01000000 03000000 16000000 a1a2a3"
        );
        let mut reader = Reader::new(&octets[..]).unwrap();
        let record = reader.next_record().unwrap().unwrap();
        assert_eq!((record.link, record.erf), (LinkType::ERF, Some(21)));
        assert_eq!((record.time_ns, record.len), (Some(5_500_000_000), 4));
        assert_eq!(record.data, hex!("a1a2a3a4"));
        let record = reader.next_record().unwrap().unwrap();
        assert_eq!((record.link, record.erf), (LinkType::ERF, None));
        assert_eq!((record.time_ns, record.len), (Some(7_000_001_000), 22));
        assert_eq!(record.data, hex!("a1a2a3"));
    }

    #[test]
    fn an_input_that_fails_is_told_after_what_came_before() {
        struct Fails;
        impl Read for Fails {
            fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
                Err(io::Error::other("the disk is gone"))
            }
        }
        let (frames, error) = all(PCAP[..50].chain(Fails));
        assert_eq!(frames, both_frames()[..1]);
        assert_eq!(error.unwrap(), "the disk is gone");
        assert_eq!(all(Fails).1.unwrap(), "the disk is gone");
    }

    proptest! {
        #[test]
        fn any_octets_end_somehow(mut octets: Vec<u8>, which in 0..4, at in 0..124usize) {
            // Behind a good beginning, or in the middle of good blocks.
            let octets = match which {
                0 => octets,
                1 => [&PCAP[..at.min(61)], &octets].concat(),
                2 => [&PCAPNG[..at], &octets].concat(),
                _ => {
                    let mut good = PCAPNG.to_vec();
                    let n = octets.len().min(good.len() - at);
                    good[at..at + n].swap_with_slice(&mut octets[..n]);
                    good
                }
            };
            let (frames, _) = all(&octets[..]);
            let captured: usize = frames.iter().map(|frame| frame.data.len()).sum();
            prop_assert!(captured <= octets.len());
            prop_assert_eq!(frames, all(Drip(&octets)).0);
        }
    }
}
