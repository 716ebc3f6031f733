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

#[cfg(test)]
mod tests {
    use super::*;
    use hex_literal::hex;
    use proptest::prelude::*;
    use std::vec::Vec;

    #[test]
    fn infiniband() {
        // Half a second; 18 octets on the wire, 16 captured with 2 of pad behind them.
        let record = hex!(
            "00000080 5c412b48 15 04 0022 0000 0010"
            "f0020000 00000000 00000000 00000001 0000"
        );
        let erf = Erf::parse(&record).unwrap();
        assert_eq!(erf.time_ns, 1_210_794_332_500_000_000);
        assert_eq!((erf.kind, erf.len, erf.data), (21, 16, &record[16..32]));
        assert!(is_raw(&record));
    }

    #[test]
    fn times_round_to_the_nearest() {
        let time = |fraction: u32| {
            let mut record = hex!("00000000 01000000 15 04 0010 0000 0000");
            record[..4].copy_from_slice(&fraction.to_le_bytes());
            Erf::parse(&record).unwrap().time_ns
        };
        assert_eq!(time(0), 1_000_000_000);
        assert_eq!(time(4), 1_000_000_001);
        assert_eq!(time(u32::MAX), 2_000_000_000);
    }

    #[test]
    fn extension_headers_and_the_pad_of_ethernet() {
        let record = hex!(
            "00000000 01000000 82 04 0028 0000 0004"
            "83000000 00000000 03000000 00000000 0000 a1a2a3a4"
        );
        let erf = Erf::parse(&record).unwrap();
        assert_eq!((erf.kind, erf.len, erf.data), (2, 4, &hex!("a1a2a3a4")[..]));
        // Cut within the pad, an extension header, the header.
        for have in [0, 15, 16, 23, 31, 33] {
            assert_eq!(Erf::parse(&record[..have]), None, "{have} octets");
        }
        assert_eq!(Erf::parse(&record[..35]).unwrap().data, [0xa1]);
    }

    proptest! {
        #[test]
        fn any_bytes_split_without_panic(record: Vec<u8>) {
            if let Some(erf) = Erf::parse(&record) {
                prop_assert!(erf.data.len() + LEN <= record.len());
                prop_assert!(erf.data.len() <= erf.len as usize);
            }
            is_raw(&record);
        }
    }
}
