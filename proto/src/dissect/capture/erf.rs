//! Endace's extensible record format, as pcap's link type 197 carries it.
//!
//! ```text
//!   0                   1                   2                   3
//!   0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//!  |           fraction of a second in 2^-32 (little-endian)       |
//!  |               seconds since 1970 (little-endian)              |
//!  |E|    type     |     flags     |     length of the record      |
//!  |         losses, or colour     |      length on the wire       |
//!  if E: extension headers, 8 octets each; the top bit says that another one follows
//!  Ethernet: 2 octets of offset and pad; channels and AAL2: 4 octets
//! ```

/// Octets of the header without extensions.
const LEN: usize = 16;

/// Type octet: extension headers follow.
const EXTENDED: u8 = 0x80;

/// A record of which the headers were read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Erf<'a> {
    /// Nanoseconds since 1970, rounded to the nearest.
    pub(super) time_ns: i128,
    /// Octets on the wire.
    pub(super) len: u32,
    /// 7 bits.
    pub(super) kind: u8,
    /// What follows the headers, without the pad at its end.
    pub(super) data: &'a [u8],
}

impl<'a> Erf<'a> {
    /// Splits `record`; `None` if its headers are not whole.
    pub(super) fn parse(record: &'a [u8]) -> Option<Self> {
        let header: &[u8; LEN] = record.first_chunk()?;
        let word = |at: usize| {
            u32::from_le_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
        };
        let (fraction, seconds) = (word(0), word(4));
        let ns = (u64::from(fraction) * 1_000_000_000 + (1 << 31)) >> 32;
        let kind = header[8] & !EXTENDED;
        let len = u16::from_be_bytes([header[14], header[15]]);
        let mut more = header[8] & EXTENDED != 0;
        let mut data = &record[LEN..];
        while more {
            let (extension, rest) = data.split_first_chunk::<8>()?;
            more = extension[0] & EXTENDED != 0;
            data = rest;
        }
        let data = data.get(sub_header(kind)..)?;
        Some(Self {
            time_ns: i128::from(seconds) * 1_000_000_000 + i128::from(ns),
            len: len.into(),
            kind,
            // Records are padded to 8 octets.
            data: &data[..data.len().min(len.into())],
        })
    }
}

/// Octets between the headers and the frame.
const fn sub_header(kind: u8) -> usize {
    match kind {
        // Ethernet: plain, with a colour, of a DSM, with a hash.
        2 | 11 | 16 | 20 => 2,
        // Channels of HDLC, ATM, AAL5 and AAL2; AAL2.
        5..=9 | 12 | 17 | 18 => 4,
        _ => 0,
    }
}

/// Whether `front` may be the beginning of a file of nothing but such records. They have no magic:
/// the type must be known, the record long enough for its header, the time between 1996 and 2033.
pub(super) fn is_raw(front: &[u8]) -> bool {
    let Some(header) = front.first_chunk::<LEN>() else { return false };
    let seconds = u32::from_le_bytes([header[4], header[5], header[6], header[7]]);
    let kind = header[8] & !EXTENDED;
    let record_len = u16::from_be_bytes([header[10], header[11]]);
    ((1..=27).contains(&kind) || kind == 48)
        && usize::from(record_len) >= LEN
        && (820_000_000..2_000_000_000).contains(&seconds)
}
