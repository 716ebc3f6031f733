//! MPA start-up frames (RFC 5044 §7.1.1, RFC 6581 §6 and §9).
//!
//! ```text
//!   0                   1                   2                   3
//!   0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  |      Key (16 octets): "MPA ID Req Frame" or "MPA ID Rep Frame" |
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  |M|C|R|S|  Res  |      Rev      |          PD_Length            |
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  |A|B|           IRD             |C|D|           ORD             |  only with S, revision 2
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  |                  Private data (0 to 512 octets)               |
//! ```

use alloc::vec::Vec;

use crate::wire::{Error, Layer};

/// How a request begins.
pub const KEY_REQUEST: [u8; 16] = *b"MPA ID Req Frame";
/// How a reply begins.
pub const KEY_REPLY: [u8; 16] = *b"MPA ID Rep Frame";
/// Octets in front of the private data.
pub const START_LEN: usize = 20;
/// The most that PD_Length may say, in octets; the 4 octets of [`Enhanced`] count
/// (RFC 5044 §7.1.1).
pub const MAX_PRIVATE_DATA: usize = 512;
/// Octets that [`Enhanced`] takes of the private data.
pub const ENHANCED_LEN: usize = 4;
/// IRD or ORD value that says: no automatic negotiation (RFC 6581 §9.1).
pub const NO_NEGOTIATION: u16 = 0x3fff;

bitflags::bitflags! {
    /// The octet after the key. Reserved bits survive.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct StartFlags: u8 {
        /// M: the sender of this frame wants markers in what it receives.
        const MARKERS = 0x80;
        /// C: the sender of this frame wants the CRC. It is left out only if neither side does.
        const CRC = 0x40;
        /// R: a reply that refuses the connection.
        const REJECT = 0x20;
        /// S: [`Enhanced`] precedes the private data (RFC 6581 §6).
        const ENHANCED = 0x10;
        /// A bit that RFC 5044 reserves and Linux siw uses: FPDUs may span TCP segments.
        const GSO_EXP = 0x08;
        const _ = !0;
    }
}

/// Which of the two start-up frames.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum StartKind {
    /// From the initiator.
    Request,
    /// From the responder.
    Reply,
}

impl StartKind {
    /// The 16 octets that such a frame begins with.
    pub const fn key(self) -> &'static [u8; 16] {
        match self {
            Self::Request => &KEY_REQUEST,
            Self::Reply => &KEY_REPLY,
        }
    }
}

/// Queue depths and ready-to-receive flags of a revision 2 start-up (RFC 6581 §9).
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Enhanced {
    /// READs and atomics that the sender serves at a time, 14 bits; see [`NO_NEGOTIATION`].
    pub ird: u16,
    /// READs and atomics that the sender wants to have outstanding, 14 bits; see
    /// [`NO_NEGOTIATION`].
    pub ord: u16,
    /// A: the responder may send first, once it got a ready-to-receive indication.
    /// Without it the three flags below mean nothing.
    pub peer_to_peer: bool,
    /// B: a zero-length SEND may be that indication.
    pub rtr_send: bool,
    /// C: a zero-length WRITE may be that indication.
    pub rtr_write: bool,
    /// D: a zero-length READ may be that indication.
    pub rtr_read: bool,
}

impl Enhanced {
    /// Reads the 4 octets; every value is valid.
    pub const fn from_bytes(bytes: [u8; ENHANCED_LEN]) -> Self {
        let [a, b, c, d] = bytes;
        let (ird, ord) = (u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d]));
        Self {
            ird: ird & 0x3fff,
            ord: ord & 0x3fff,
            peer_to_peer: ird & 0x8000 != 0,
            rtr_send: ird & 0x4000 != 0,
            rtr_write: ord & 0x8000 != 0,
            rtr_read: ord & 0x4000 != 0,
        }
    }

    /// The 4 octets. Of `ird` and `ord` the low 14 bits are taken.
    pub const fn to_bytes(self) -> [u8; ENHANCED_LEN] {
        const fn word(depth: u16, high: bool, low: bool) -> [u8; 2] {
            ((depth & 0x3fff) | (high as u16) << 15 | (low as u16) << 14).to_be_bytes()
        }
        let [a, b] = word(self.ird, self.peer_to_peer, self.rtr_send);
        let [c, d] = word(self.ord, self.rtr_write, self.rtr_read);
        [a, b, c, d]
    }
}

/// A start-up frame.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Start<'a> {
    /// Request or reply.
    pub kind: StartKind,
    /// The flags as they are on the wire.
    pub flags: StartFlags,
    /// Rev: 0 and 1 are RFC 5044's and older, 2 is RFC 6581's. Judging it is the receiver's work.
    pub revision: u8,
    /// The queue depths, with S and revision 2 or higher.
    pub enhanced: Option<Enhanced>,
    /// The program's private data, without the 4 octets of `enhanced`.
    pub private_data: &'a [u8],
}

impl<'a> Start<'a> {
    /// Reads a frame from the front of `input`, and says how many octets it took.
    ///
    /// `Ok(None)`: a good beginning, more octets are needed.
    ///
    /// # Errors
    ///
    /// As soon as no frame can come of it: an octet of the key is wrong (the offset says which),
    /// PD_Length is above 512, or below 4 where S says that 4 octets are there. The S bit of a
    /// frame before revision 2 is one of the reserved bits (RFC 5044 §7.1.1): it stays in the
    /// flags and means nothing.
    pub fn parse(input: &'a [u8]) -> Result<Option<(Self, usize)>, Error> {
        let Some(kind) = match_key(input)? else {
            return Ok(None);
        };
        let Some((&[flags, revision, high, low], rest)) =
            input[KEY_REQUEST.len()..].split_first_chunk()
        else {
            return Ok(None);
        };
        let flags = StartFlags::from_bits_retain(flags);
        let is_enhanced = flags.contains(StartFlags::ENHANCED) && revision >= 2;
        let length = u16::from_be_bytes([high, low]);
        let refused =
            |expected| Error::field(Layer::MpaStart, 18, "PD_Length", length.into(), expected);
        let length = usize::from(length);
        // RFC 5044 §7.1.1: at most 512 octets.
        if length > MAX_PRIVATE_DATA {
            return Err(refused("at most 512"));
        }
        if is_enhanced && length < ENHANCED_LEN {
            return Err(refused("at least 4, because S is set"));
        }
        let Some(data) = rest.get(..length) else {
            return Ok(None);
        };
        let (enhanced, private_data) = match data.split_first_chunk() {
            Some((&octets, data)) if is_enhanced => (Some(Enhanced::from_bytes(octets)), data),
            _ => (None, data),
        };
        let frame = Self { kind, flags, revision, enhanced, private_data };
        Ok(Some((frame, START_LEN + length)))
    }

    /// Appends the frame. S says whether `enhanced` is there; where S means nothing (revisions
    /// before 2) and `enhanced` is not there, it goes out as it is in `flags`.
    ///
    /// `private_data` and `enhanced` together take at most [`MAX_PRIVATE_DATA`] octets; what is
    /// beyond is not sent.
    pub fn emit(&self, out: &mut Vec<u8>) {
        let taken = if self.enhanced.is_some() { ENHANCED_LEN } else { 0 };
        let room = MAX_PRIVATE_DATA - taken;
        debug_assert!(self.private_data.len() <= room, "private data beyond {room} octets");
        let data = &self.private_data[..self.private_data.len().min(room)];
        let mut flags = self.flags;
        if self.enhanced.is_some() || self.revision >= 2 {
            flags.set(StartFlags::ENHANCED, self.enhanced.is_some());
        }
        // At most 512: see `room`.
        let length = (taken + data.len()) as u16;
        out.extend_from_slice(self.kind.key());
        out.extend_from_slice(&[flags.bits(), self.revision]);
        out.extend_from_slice(&length.to_be_bytes());
        if let Some(enhanced) = self.enhanced {
            out.extend_from_slice(&enhanced.to_bytes());
        }
        out.extend_from_slice(data);
    }
}

/// Which key `input` begins with; `None` while both, or one of them unfinished, are possible.
fn match_key(input: &[u8]) -> Result<Option<StartKind>, Error> {
    let head = &input[..input.len().min(KEY_REQUEST.len())];
    let common = |key: &[u8; 16]| head.iter().zip(key).take_while(|(a, b)| a == b).count();
    let (request, reply) = (common(&KEY_REQUEST), common(&KEY_REPLY));
    let good = request.max(reply);
    if good < head.len() {
        let expected = "\"MPA ID Req Frame\" or \"MPA ID Rep Frame\"";
        return Err(Error::field(Layer::MpaStart, good, "Key", head[good].into(), expected));
    }
    Ok(match good {
        16 if request == 16 => Some(StartKind::Request),
        16 => Some(StartKind::Reply),
        _ => None,
    })
}

/// IRD and ORD as SMB Direct programs put them into the private data of a revision 1 start-up:
/// 8 octets, two big-endian numbers. Old Linux clients sent them in little-endian order.
///
/// This is a guess about a program's private data, for showing: nothing on the wire tells such
/// 8 octets from others. `None` unless there are exactly 8 octets and one byte order makes both
/// numbers at most 0x3fff, what revision 2 could say; no 8 octets do so in both orders, unless
/// all are zero.
pub fn legacy_ird_ord(private_data: &[u8]) -> Option<(u32, u32)> {
    let &[a, b, c, d, e, f, g, h] = private_data else {
        return None;
    };
    let (ird, ord) = ([a, b, c, d], [e, f, g, h]);
    let big = (u32::from_be_bytes(ird), u32::from_be_bytes(ord));
    let little = (u32::from_le_bytes(ird), u32::from_le_bytes(ord));
    let plausible = |&(ird, ord): &(u32, u32)| ird.max(ord) <= u32::from(NO_NEGOTIATION);
    Some(big).filter(plausible).or(Some(little).filter(plausible))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::Problem;
    use hex_literal::hex;
    use proptest::prelude::*;
    use std::{string::ToString, vec};

    fn start(kind: StartKind, flags: StartFlags, revision: u8) -> Start<'static> {
        Start { kind, flags, revision, enhanced: None, private_data: &[] }
    }

    /// Frames and what they say: RFC 5044 and RFC 6581 spelled out by hand, and Linux siw's.
    fn examples() -> Vec<(&'static [u8], Start<'static>)> {
        use StartFlags as F;
        use StartKind::{Reply, Request};
        let rtr = Enhanced { ird: 4, ord: 4, peer_to_peer: true, ..Enhanced::default() };
        let siw = Enhanced { ird: 8, ord: 8, ..Enhanced::default() };
        vec![
            (&hex!("4d504120494420526571204672616d65 40 01 0000"), start(Request, F::CRC, 1)),
            (
                &hex!("4d504120494420526570204672616d65 60 01 0000"),
                start(Reply, F::CRC | F::REJECT, 1),
            ),
            (
                &hex!("4d504120494420526571204672616d65 50 02 0004 8004c004"),
                Start {
                    enhanced: Some(Enhanced { rtr_write: true, rtr_read: true, ..rtr }),
                    ..start(Request, F::CRC | F::ENHANCED, 2)
                },
            ),
            (
                &hex!("4d504120494420526570204672616d65 50 02 0004 80044004"),
                Start {
                    enhanced: Some(Enhanced { rtr_read: true, ..rtr }),
                    ..start(Reply, F::CRC | F::ENHANCED, 2)
                },
            ),
            // siw: no CRC, depths 8 and 8; its reply carries private data.
            (
                &hex!("4d504120494420526571204672616d65 10 02 0004 00080008"),
                Start { enhanced: Some(siw), ..start(Request, F::ENHANCED, 2) },
            ),
            (
                &hex!(
                    "4d504120494420526570204672616d65 10 02 001c 00080008"
                    "00007f712c0970002340f100001000000000000056455242"
                ),
                Start {
                    enhanced: Some(siw),
                    private_data: &hex!("00007f712c0970002340f100001000000000000056455242"),
                    ..start(Reply, F::ENHANCED, 2)
                },
            ),
            // siw with try_gso uses a reserved bit.
            (
                &hex!("4d504120494420526571204672616d65 18 02 0004 00080008"),
                Start { enhanced: Some(siw), ..start(Request, F::ENHANCED | F::GSO_EXP, 2) },
            ),
            // S before revision 2 means nothing: all octets are the program's.
            (
                &hex!("4d504120494420526571204672616d65 90 01 0005 0102030405"),
                Start {
                    private_data: &[1, 2, 3, 4, 5],
                    ..start(Request, F::MARKERS | F::ENHANCED, 1)
                },
            ),
        ]
    }

    #[test]
    fn examples_in_both_directions() {
        for (frame, says) in examples() {
            assert_eq!(Start::parse(frame), Ok(Some((says, frame.len()))));
            let mut out = vec![0xee];
            says.emit(&mut out);
            assert_eq!(out[1..], *frame, "{says:?}");
        }
    }

    #[test]
    fn octets_behind_the_frame_are_left_alone() {
        for (frame, says) in examples() {
            let mut stream = frame.to_vec();
            stream.extend_from_slice(frame);
            assert_eq!(Start::parse(&stream), Ok(Some((says, frame.len()))));
        }
    }

    #[test]
    fn every_cut_wants_more() {
        for (frame, _) in examples() {
            for len in 0..frame.len() {
                assert_eq!(Start::parse(&frame[..len]), Ok(None), "{len} octets");
            }
        }
    }

    #[test]
    fn a_wrong_key_is_told_at_its_first_wrong_octet() {
        let (frame, _) = examples()[0];
        for wrong in 0..KEY_REQUEST.len() {
            let mut bad = frame.to_vec();
            bad[wrong] ^= 0x20;
            for len in wrong + 1..bad.len() {
                let error = Start::parse(&bad[..len]).unwrap_err();
                assert_eq!((error.layer, error.offset), (Layer::MpaStart, wrong), "{len} octets");
            }
        }
        let error = Start::parse(b"MPA ID Rex").unwrap_err();
        assert_eq!(
            error.to_string(),
            "MPA start-up frame: at offset 9: Key is 0x78, expected \"MPA ID Req Frame\" or \
             \"MPA ID Rep Frame\""
        );
    }

    #[test]
    fn a_key_does_not_change_its_mind() {
        // "Req" commits to the request's key, and its rest is the reply's as well.
        assert_eq!(Start::parse(b"MPA ID Req Frame"), Ok(None));
        assert_eq!(Start::parse(b"HTTP/1.1 400 Bad Request").unwrap_err().offset, 0);
    }

    fn with_length(flags: u8, revision: u8, length: u16) -> Vec<u8> {
        let mut frame = KEY_REQUEST.to_vec();
        frame.extend([flags, revision]);
        frame.extend(length.to_be_bytes());
        frame
    }

    #[test]
    fn private_data_ends_at_512_octets() {
        let mut frame = with_length(0x40, 1, 512);
        frame.resize(START_LEN + 512, 7);
        let (start, used) = Start::parse(&frame).unwrap().unwrap();
        assert_eq!((start.private_data.len(), used), (512, 532));
        // The header alone tells that the frame is bad.
        let error = Start::parse(&with_length(0x40, 1, 513)).unwrap_err();
        assert_eq!(error, Error::field(Layer::MpaStart, 18, "PD_Length", 513, "at most 512"));
    }

    #[test]
    fn enhanced_needs_four_octets() {
        for length in 0..4 {
            let error = Start::parse(&with_length(0x50, 2, length)).unwrap_err();
            assert_eq!(error.offset, 18);
            assert!(
                matches!(error.problem, Problem::Field { found, .. } if found == u64::from(length))
            );
            // Without S, or before revision 2, nothing is missing.
            for (flags, revision) in [(0x40, 2), (0x50, 1), (0x50, 0)] {
                let mut frame = with_length(flags, revision, length);
                frame.resize(START_LEN + usize::from(length), 9);
                let (start, _) = Start::parse(&frame).unwrap().unwrap();
                assert_eq!(start.enhanced, None);
            }
        }
    }

    #[test]
    fn revision_3_parses_as_2_does() {
        let frame = hex!("4d504120494420526571204672616d65 50 03 0005 ffff7fff aa");
        let (start, _) = Start::parse(&frame).unwrap().unwrap();
        let enhanced = start.enhanced.unwrap();
        assert_eq!((start.revision, start.private_data), (3, &[0xaa][..]));
        assert_eq!((enhanced.ird, enhanced.ord), (NO_NEGOTIATION, NO_NEGOTIATION));
        assert!(enhanced.peer_to_peer && enhanced.rtr_send && enhanced.rtr_read);
        assert!(!enhanced.rtr_write);
    }

    #[test]
    fn legacy_depths_in_either_byte_order() {
        assert_eq!(legacy_ird_ord(&hex!("00000020 00000001")), Some((32, 1)));
        assert_eq!(legacy_ird_ord(&hex!("20000000 01000000")), Some((32, 1)));
        assert_eq!(legacy_ird_ord(&hex!("00003fff 00000000")), Some((0x3fff, 0)));
        assert_eq!(legacy_ird_ord(&[0; 8]), Some((0, 0)));
        // One number in each order, too large, or not 8 octets.
        assert_eq!(legacy_ird_ord(&hex!("00000020 01000000")), None);
        assert_eq!(legacy_ird_ord(b"UDMA\x01\x01\x00\x00"), None);
        assert_eq!(legacy_ird_ord(&[0; 9]), None);
        assert_eq!(legacy_ird_ord(&[]), None);
    }

    prop_compose! {
        fn any_enhanced()(octets: [u8; 4]) -> Enhanced {
            Enhanced::from_bytes(octets)
        }
    }

    proptest! {
        #[test]
        fn enhanced_round_trip(octets: [u8; 4]) {
            prop_assert_eq!(Enhanced::from_bytes(octets).to_bytes(), octets);
        }

        #[test]
        fn round_trip(
            request: bool,
            flags: u8,
            revision: u8,
            enhanced in prop::option::of(any_enhanced()),
            data in prop::collection::vec(any::<u8>(), 0..=508),
        ) {
            let kind = if request { StartKind::Request } else { StartKind::Reply };
            let enhanced = enhanced.filter(|_| revision >= 2);
            let mut flags = StartFlags::from_bits_retain(flags);
            if revision >= 2 {
                flags.set(StartFlags::ENHANCED, enhanced.is_some());
            }
            let start = Start { kind, flags, revision, enhanced, private_data: &data };
            let mut frame = Vec::new();
            start.emit(&mut frame);
            prop_assert_eq!(Start::parse(&frame), Ok(Some((start, frame.len()))));
        }

        #[test]
        fn what_parses_is_emitted_as_it_was(
            head: [u8; 3], length in 0u16..600, data in prop::collection::vec(any::<u8>(), 600),
        ) {
            let mut frame = KEY_REPLY.to_vec();
            frame.extend(&head[..2]);
            frame.extend(length.to_be_bytes());
            frame.extend(&data);
            if let Ok(Some((start, used))) = Start::parse(&frame) {
                let mut out = Vec::new();
                start.emit(&mut out);
                prop_assert_eq!(&out[..], &frame[..used]);
            } else {
                prop_assert!(!(4..=512).contains(&length));
            }
        }

        #[test]
        fn any_bytes_do_not_panic(input: Vec<u8>) {
            let _ = Start::parse(&input);
            let _ = legacy_ird_ord(&input);
        }
    }
}
