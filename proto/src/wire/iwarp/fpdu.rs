//! FPDUs: how MPA frames DDP segments in the TCP stream (RFC 5044 §4).
//!
//! ```text
//!   0                   1                   2                   3
//!   0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  |         ULPDU Length          |                               |
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+                               +
//!  //                    ULPDU (one DDP segment)                  //
//!  |                               +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  |                               |          Pad (0 to 3 octets)  |
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  |              CRC32C (little endian; always there)             |
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! ```
//!
//! Where the receiver asked for them, a marker stands at every 512th octet of the stream, the
//! first one in front of the first FPDU:
//!
//! ```text
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  |           Reserved            |            FPDUPTR            |
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! ```
//!
//! An FPDU is a multiple of four octets, and so is the distance of markers: a marker never splits
//! the length field, the CRC or another marker.

use alloc::vec::Vec;

use crate::wire::{Error, Layer, Problem, crc::crc32c};

/// Octets of the ULPDU Length field.
pub const LENGTH_LEN: usize = 2;
/// Octets of the CRC field.
pub const CRC_LEN: usize = 4;
/// Octets of a marker.
pub const MARKER_LEN: usize = 4;
/// Octets of the stream from one marker's first octet to the next one's.
pub const MARKER_SPACING: usize = 512;
/// The longest ULPDU that the length field can say.
pub const MAX_ULPDU: usize = 65_535;
/// The longest ULPDU that DDP may hand to MPA, in octets (RFC 5044 §3).
pub const MAX_MULPDU: usize = 64_768;
/// The shortest MULPDU that MPA may report, in octets (RFC 5044 §4.5).
pub const MIN_MULPDU: usize = 128;

/// Payload octets between two markers.
const BETWEEN_MARKERS: usize = MARKER_SPACING - MARKER_LEN;

/// Pad octets (0 to 3) that make length field and ULPDU a multiple of 4.
pub const fn padding(ulpdu_len: usize) -> usize {
    (LENGTH_LEN + ulpdu_len).wrapping_neg() % 4
}

/// Octets of an FPDU without markers: length field, ULPDU, pad, CRC.
pub const fn fpdu_len(ulpdu_len: usize) -> usize {
    LENGTH_LEN + ulpdu_len + padding(ulpdu_len) + CRC_LEN
}

/// Octets that an FPDU takes of the stream where its first octet is the `position`th after the
/// start-up frames: [`fpdu_len`] and the markers within and right before it.
pub const fn marked_len(ulpdu_len: usize, position: u64) -> usize {
    let plain = fpdu_len(ulpdu_len);
    let to_marker = to_marker(position);
    // RFC 5044 §4.3: a marker between FPDUs belongs to the following one, so that one which
    // falls right after this FPDU is not ours.
    let markers =
        if plain <= to_marker { 0 } else { (plain - to_marker).div_ceil(BETWEEN_MARKERS) };
    plain + markers * MARKER_LEN
}

/// Octets from `position` to the next marker; 0 where one is due.
const fn to_marker(position: u64) -> usize {
    (position.wrapping_neg() % MARKER_SPACING as u64) as usize
}

/// The longest ULPDU whose FPDU fits into one TCP segment of `emss` octets (RFC 5044 §4.5).
///
/// Never below 128, where the FPDU then spans segments, and never above 64,768 (§3).
pub const fn mulpdu(emss: usize, markers: bool) -> usize {
    let fit = if markers {
        emss.saturating_sub(6 + 4 * emss.div_ceil(MARKER_SPACING) + emss % 4)
    } else {
        emss.saturating_sub(6 + emss % 4)
    };
    if fit < MIN_MULPDU {
        MIN_MULPDU
    } else if fit > MAX_MULPDU {
        MAX_MULPDU
    } else {
        fit
    }
}

/// Begins an FPDU without markers: appends room for its length and returns where it starts.
/// Append the ULPDU to `out`, then call [`finish`].
pub fn begin(out: &mut Vec<u8>) -> usize {
    let start = out.len();
    out.extend_from_slice(&[0; LENGTH_LEN]);
    start
}

/// Ends the FPDU that began at `start`: its ULPDU is what was appended since. Fills in the
/// length, appends the pad and the CRC (zero without `crc`: RFC 5044 §4.1 lets it be anything).
///
/// The ULPDU is at most [`MAX_ULPDU`] octets long.
pub fn finish(out: &mut Vec<u8>, start: usize, crc: bool) {
    let ulpdu_len = out.len() - start - LENGTH_LEN;
    set_length(out, start, ulpdu_len);
    if !crc {
        return trailer(out, ulpdu_len);
    }
    out.extend_from_slice(&[0; 3][..padding(ulpdu_len)]);
    let crc = crc32c(&out[start..]);
    out.extend_from_slice(&crc.to_le_bytes());
}

/// Fills in the length of the FPDU that began at `start` where the end of its ULPDU is not in
/// `out` but follows it on the wire. `ulpdu_len` is the whole length, at most [`MAX_ULPDU`].
pub fn set_length(out: &mut [u8], start: usize, ulpdu_len: usize) {
    debug_assert!(ulpdu_len <= MAX_ULPDU, "a ULPDU of {ulpdu_len} octets");
    out[start..start + LENGTH_LEN].copy_from_slice(&(ulpdu_len as u16).to_be_bytes());
}

/// Appends pad and a CRC field of zero: what follows a ULPDU of `ulpdu_len` octets where no CRC
/// is in use.
pub fn trailer(out: &mut Vec<u8>, ulpdu_len: usize) {
    out.extend_from_slice(&[0; 3 + CRC_LEN][..padding(ulpdu_len) + CRC_LEN]);
}

/// Puts markers into a stream of finished FPDUs (RFC 5044 §4.3).
#[derive(Debug, Clone)]
pub struct MarkerEncoder {
    crc: bool,
    position: u64,
}

impl MarkerEncoder {
    /// At the first octet after the start-up frames. `crc`: whether the CRC is in use.
    pub const fn new(crc: bool) -> Self {
        Self { crc, position: 0 }
    }

    /// Octets made so far, markers among them: where the next FPDU starts in the stream.
    pub const fn position(&self) -> u64 {
        self.position
    }

    /// Appends `fpdu`, one finished FPDU without markers, to `out` with the markers that are due
    /// within and right before it. Its CRC is made anew, because it covers them; it is zero where
    /// no CRC is in use.
    pub fn push(&mut self, fpdu: &[u8], out: &mut Vec<u8>) {
        debug_assert!(
            fpdu.len() >= 8 && fpdu.len().is_multiple_of(4),
            "no FPDU: {} octets",
            fpdu.len()
        );
        let begin = out.len();
        let mut body = &fpdu[..fpdu.len() - CRC_LEN];
        let mut header_at = None;
        loop {
            if to_marker(self.position) == 0 {
                // RFC 5044 §4.3: the distance from the length field in the stream, 0 if the
                // field follows.
                let pointer = self.position - header_at.unwrap_or(self.position);
                out.extend_from_slice(&(pointer as u32 & 0xffff).to_be_bytes());
                self.position += MARKER_LEN as u64;
            }
            // A marker right after the pad comes before the CRC and is covered by it
            // (RFC 5044 §4.4), hence the look for one above also where no octet is left.
            if body.is_empty() {
                break;
            }
            header_at.get_or_insert(self.position);
            let (piece, rest) = body.split_at(body.len().min(to_marker(self.position)));
            out.extend_from_slice(piece);
            self.position += piece.len() as u64;
            body = rest;
        }
        let crc = if self.crc { crc32c(&out[begin..]) } else { 0 };
        out.extend_from_slice(&crc.to_le_bytes());
        self.position += CRC_LEN as u64;
    }
}

/// A received FPDU.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fpdu<'a> {
    /// The DDP segment, without markers, pad and CRC.
    pub ulpdu: &'a [u8],
    /// Octets of the input that the FPDU took.
    pub consumed: usize,
}

/// Takes a received stream apart into FPDUs.
#[derive(Debug, Clone)]
pub struct Deframer {
    markers: bool,
    crc: bool,
    /// Where the input begins in the stream.
    position: u64,
    failed: Option<Error>,
}

impl Deframer {
    /// At the first octet after the start-up frames. `markers`, `crc`: whether they are in use.
    pub const fn new(markers: bool, crc: bool) -> Self {
        Self { markers, crc, position: 0, failed: None }
    }

    /// The FPDU at the front of `input`, checked. `Ok(None)`: it is not whole yet.
    ///
    /// The next call's input begins right after the octets that this one consumed. `scratch` is
    /// used only with markers, where the ULPDU is copied without them.
    ///
    /// Without CRC its field is not looked at (RFC 5044 §4.1: it may hold anything). Pad octets
    /// are not looked at either, but the CRC covers them.
    ///
    /// # Errors
    ///
    /// A CRC that does not match, or an FPDUPTR that does not point to the FPDU. Nothing good can
    /// follow in the stream (RFC 5044 §8), so the same error is returned ever after. Offsets count
    /// from the start of `input`.
    #[inline]
    pub fn next<'a>(
        &mut self,
        input: &'a [u8],
        scratch: &'a mut Vec<u8>,
    ) -> Result<Option<Fpdu<'a>>, Error> {
        if let Some(error) = self.failed {
            return Err(error);
        }
        let found = if self.markers {
            take_marked(input, self.position, self.crc, scratch)
        } else {
            take_plain(input, self.crc)
        };
        match found {
            Ok(Some(fpdu)) => self.position += fpdu.consumed as u64,
            Ok(None) => {}
            Err(error) => self.failed = Some(error),
        }
        found
    }

    /// How many octets the input must have, counted from its front, before [`Deframer::next`] can
    /// say more than `Ok(None)`. It grows once the length field is there.
    pub fn need(&self, input: &[u8]) -> usize {
        if self.failed.is_some() {
            return 0;
        }
        let header = if self.markers && to_marker(self.position) == 0 { MARKER_LEN } else { 0 };
        let ulpdu_len = input.get(header..).and_then(length_field).unwrap_or(0);
        if self.markers { marked_len(ulpdu_len, self.position) } else { fpdu_len(ulpdu_len) }
    }

    /// Octets of the stream taken so far, markers among them.
    pub const fn position(&self) -> u64 {
        self.position
    }
}

/// The length that `octets` begin with.
#[inline]
fn length_field(octets: &[u8]) -> Option<usize> {
    octets.first_chunk().map(|&length| usize::from(u16::from_be_bytes(length)))
}

/// The FPDU at the front of a stream without markers.
#[inline]
fn take_plain(input: &[u8], crc: bool) -> Result<Option<Fpdu<'_>>, Error> {
    let Some(length) = length_field(input) else {
        return Ok(None);
    };
    let Some(whole) = input.get(..fpdu_len(length)) else {
        return Ok(None);
    };
    if crc {
        check_crc(whole)?;
    }
    Ok(Some(Fpdu { ulpdu: &whole[LENGTH_LEN..LENGTH_LEN + length], consumed: whole.len() }))
}

/// The FPDU at the front of a stream with markers, `position` octets after its start.
fn take_marked<'a>(
    input: &'a [u8],
    position: u64,
    crc: bool,
    scratch: &'a mut Vec<u8>,
) -> Result<Option<Fpdu<'a>>, Error> {
    let first = to_marker(position);
    let header = if first == 0 { MARKER_LEN } else { 0 };
    let Some(length) = input.get(header..).and_then(length_field) else {
        return Ok(None);
    };
    let Some(whole) = input.get(..marked_len(length, position)) else {
        return Ok(None);
    };
    // RFC 5044 §4.4: the CRC covers the markers, so all octets before it.
    // §8: a marker is judged where the CRC is valid.
    if crc {
        check_crc(whole)?;
    }
    for at in (first..whole.len()).step_by(MARKER_SPACING) {
        check_marker(whole, at, header)?;
    }
    let consumed = whole.len();
    let covered = &whole[header..consumed - CRC_LEN];
    // The first marker behind the length field.
    let inner = first + if first == 0 { MARKER_SPACING } else { 0 } - header;
    if inner >= LENGTH_LEN + length {
        return Ok(Some(Fpdu { ulpdu: &covered[LENGTH_LEN..LENGTH_LEN + length], consumed }));
    }
    scratch.clear();
    scratch.reserve_exact(fpdu_len(length) - LENGTH_LEN - CRC_LEN);
    scratch.extend_from_slice(&covered[LENGTH_LEN..inner]);
    for chunk in covered[inner..].chunks(MARKER_SPACING) {
        // A chunk begins with its marker: where one is due in front of the CRC, it is covered.
        scratch.extend_from_slice(&chunk[MARKER_LEN..]);
    }
    scratch.truncate(length);
    Ok(Some(Fpdu { ulpdu: scratch, consumed }))
}

/// Checks the CRC that `whole`, an FPDU with its markers, ends with.
#[inline]
fn check_crc(whole: &[u8]) -> Result<(), Error> {
    let offset = whole.len() - CRC_LEN;
    let (covered, field) = whole.split_at(offset);
    let computed = crc32c(covered);
    // An FPDU is at least 8 octets long, so that the field has its 4.
    let found = field.first_chunk().map_or(!computed, |&octets| u32::from_le_bytes(octets));
    // A fuzzer cannot guess a CRC: let it through to the code behind.
    if found == computed || cfg!(fuzzing) {
        return Ok(());
    }
    Err(Error { layer: Layer::Mpa, offset, problem: Problem::Crc { found, computed } })
}

/// Checks the marker at `at`, within an FPDU whose length field is at `header`.
fn check_marker(whole: &[u8], at: usize, header: usize) -> Result<(), Error> {
    // RFC 5044 §4.2: the upper half is ignored, and so are the two lowest bits.
    let found = u16::from_be_bytes([whole[at + 2], whole[at + 3]]) & !3;
    // The marker in front of the length field says 0. Above 2^16, which only an FPDU longer
    // than any TCP segment reaches, the pointer keeps its low 16 bits.
    let distance = at.saturating_sub(header) as u16;
    if found == distance {
        return Ok(());
    }
    let expected = "the distance from the ULPDU Length field to this marker";
    Err(Error::field(Layer::Mpa, at, "FPDUPTR", found.into(), expected))
}

#[cfg(test)]
mod tests {
    use super::*;
    use hex_literal::hex;
    use proptest::{prelude::*, sample::Index};
    use std::{string::ToString, vec};

    /// RFC 5044 Figure 5: the first FPDU of a stream, so that a marker precedes it.
    const FIGURE_5: [u8; 52] = hex!(
        "00000000 002a 4143 00000000 00000000 00000001 00000000"
        "000000000000000000000000000000000000000000000000 52239983"
    );
    /// RFC 5044 Figure 6: at octet 0x1ec of the stream, with a marker at 0x200.
    const FIGURE_6: [u8; 52] = hex!(
        "002a 4143 00000000 00000000 00000002 00000000 00000014"
        "000000000000000000000000000000000000000000000000 84925898"
    );

    /// ULPDUs, and their FPDUs without markers: one of each operation of RFC 5040 and RFC 7306.
    /// The CRCs come from another implementation.
    #[rustfmt::skip]
    const EXAMPLES: &[(&str, &[u8], &[u8])] = &[
        ("Write",
         &hex!("c140112233440000000000001000deadbeef"),
         &hex!("0012c140112233440000000000001000deadbeefb75a39ef")),
        ("Read Request",
         &hex!("41410000000000000001000000010000000000000055000000000000200000000040000000660000000000003000"),
         &hex!("002e414100000000000000010000000100000000000000550000000000002000000000400000006600000000000030008dee9e43")),
        ("Read Response",
         &hex!("c14200000055000000000000200068656c6c6f"),
         &hex!("0013c14200000055000000000000200068656c6c6f00000065c387e7")),
        ("Send",
         &hex!("4143000000000000000000000001000000006869"),
         &hex!("0014414300000000000000000000000100000000686900000b3ab392")),
        ("Send with Invalidate",
         &hex!("41440000abcd00000000000000020000000078"),
         &hex!("001341440000abcd00000000000000020000000078000000601c848f")),
        ("Send with SE",
         &hex!("414500000000000000000000000300000000616263"),
         &hex!("0015414500000000000000000000000300000000616263004ba6c969")),
        ("Send with SE and Invalidate",
         &hex!("41460000007700000000000000040000000061626364"),
         &hex!("001641460000007700000000000000040000000061626364866e6494")),
        ("Terminate",
         &hex!("41470000000000000002000000010000000001010000"),
         &hex!("0016414700000000000000020000000100000000010100003f9a6b65")),
        ("Immediate Data",
         &hex!("4148000000000000000000000005000000001122334455667788"),
         &hex!("001a41480000000000000000000000050000000011223344556677886e9fa854")),
        ("Immediate Data with SE",
         &hex!("4149000000000000000000000006000000000000000000000001"),
         &hex!("001a4149000000000000000000000006000000000000000000000001a88ee881")),
        ("Atomic Request",
         &hex!("414a0000000000000001000000020000000000000000000000070000abcd00000000000010000000000000000005000000000000000000000000000000000000000000000000"),
         &hex!("0046414a0000000000000001000000020000000000000000000000070000abcd00000000000010000000000000000005000000000000000000000000000000000000000000000000ce206fb4")),
        ("Atomic Response",
         &hex!("414b0000000000000003000000010000000000000007000000000000002a"),
         &hex!("001e414b0000000000000003000000010000000000000007000000000000002a4d18fffb")),
        ("Write of nothing",
         &hex!("c140000000000000000000000000"),
         &hex!("000ec140000000000000000000000000a30572ab")),
        ("Read Request of nothing",
         &hex!("41410000000000000001000000010000000000000000000000000000000000000000000000000000000000000000"),
         &hex!("002e41410000000000000001000000010000000000000000000000000000000000000000000000000000000000000000f2c6dd3d")),
    ];

    fn frame(ulpdu: &[u8], crc: bool) -> Vec<u8> {
        let mut out = Vec::new();
        let start = begin(&mut out);
        out.extend_from_slice(ulpdu);
        finish(&mut out, start, crc);
        out
    }

    /// The stream of these ULPDUs.
    fn encode(ulpdus: &[Vec<u8>], markers: bool, crc: bool) -> Vec<u8> {
        let mut encoder = MarkerEncoder::new(crc);
        let mut stream = Vec::new();
        for ulpdu in ulpdus {
            let fpdu = frame(ulpdu, crc);
            if markers {
                encoder.push(&fpdu, &mut stream);
                assert_eq!(encoder.position(), stream.len() as u64);
            } else {
                stream.extend_from_slice(&fpdu);
            }
        }
        stream
    }

    /// All that can be had from `stream`, given to the deframer in pieces that end at `cuts`.
    fn decode(
        stream: &[u8],
        cuts: &[usize],
        mut deframer: Deframer,
    ) -> (Vec<Vec<u8>>, Result<(), Error>) {
        let (mut found, mut used, mut scratch) = (Vec::new(), 0, Vec::new());
        for &cut in cuts.iter().chain([&stream.len()]) {
            loop {
                let input = &stream[used..cut];
                let need = deframer.need(input);
                match deframer.next(input, &mut scratch) {
                    Ok(Some(fpdu)) => {
                        assert!(need <= input.len());
                        let ulpdu = fpdu.ulpdu.to_vec();
                        used += fpdu.consumed;
                        found.push(ulpdu);
                        assert!(scratch.capacity() <= stream.len());
                    }
                    Ok(None) => {
                        assert!(need > input.len(), "{need} octets wanted of {}", input.len());
                        break;
                    }
                    Err(error) => {
                        // It stays.
                        assert_eq!(deframer.next(input, &mut scratch), Err(error));
                        assert_eq!(deframer.next(&[], &mut scratch), Err(error));
                        assert_eq!(deframer.need(&[]), 0);
                        return (found, Err(error));
                    }
                }
                assert_eq!(deframer.position(), used as u64);
            }
        }
        (found, Ok(()))
    }

    #[test]
    fn figure_5() {
        let plain = frame(&FIGURE_5[6..48], true);
        let mut out = Vec::new();
        MarkerEncoder::new(true).push(&plain, &mut out);
        assert_eq!(out, FIGURE_5);
        let mut scratch = Vec::new();
        let mut deframer = Deframer::new(true, true);
        let fpdu = deframer.next(&FIGURE_5, &mut scratch).unwrap().unwrap();
        assert_eq!((fpdu.ulpdu, fpdu.consumed), (&FIGURE_5[6..48], 52));
    }

    #[test]
    fn figure_6() {
        let ulpdu = [&FIGURE_6[2..20], &FIGURE_6[24..48]].concat();
        // The first FPDU took 492 octets, its marker among them.
        let first = vec![0x41; 492 - MARKER_LEN - LENGTH_LEN - CRC_LEN];
        let stream = encode(&[first.clone(), ulpdu.clone()], true, true);
        assert_eq!(stream[492..], FIGURE_6);
        let (found, end) = decode(&stream, &[], Deframer::new(true, true));
        assert_eq!((found, end), (vec![first, ulpdu], Ok(())));
    }

    #[test]
    fn examples_in_both_directions() {
        let mut stream = Vec::new();
        for &(name, ulpdu, fpdu) in EXAMPLES {
            assert_eq!(frame(ulpdu, true), fpdu, "{name}");
            assert_eq!(fpdu.len(), fpdu_len(ulpdu.len()), "{name}");
            stream.extend_from_slice(fpdu);
        }
        let (found, end) = decode(&stream, &[], Deframer::new(false, true));
        let ulpdus: Vec<_> = EXAMPLES.iter().map(|&(_, ulpdu, _)| ulpdu).collect();
        assert_eq!((found.iter().map(|u| &u[..]).collect(), end), (ulpdus, Ok(())));
    }

    #[test]
    fn figure_4() {
        // A marker 12 octets behind the length field of a 16-octet ULPDU.
        let ulpdu = [0x55; 16];
        let mut encoder = MarkerEncoder { crc: true, position: 512 - 12 };
        let mut out = Vec::new();
        encoder.push(&frame(&ulpdu, true), &mut out);
        assert_eq!(out[..2], hex!("0010"));
        assert_eq!(out[12..16], hex!("0000000c"));
        assert_eq!((out.len(), &out[16..22], &out[22..24]), (28, &ulpdu[10..], &[0, 0][..]));
        let mut deframer = Deframer { position: 512 - 12, ..Deframer::new(true, true) };
        let mut scratch = Vec::new();
        assert_eq!(deframer.next(&out, &mut scratch).unwrap().unwrap().ulpdu, ulpdu);
    }

    #[test]
    fn a_marker_after_the_pad_belongs_to_the_crc_before_it_and_one_after_the_crc_to_the_next() {
        let ulpdu = vec![9; 21];
        let plain = frame(&ulpdu, true);
        // With 24 octets to go the marker comes right before the CRC, with 28 right after.
        assert_eq!(plain.len(), 28);
        for (to_go, len) in [(24, 32), (28, 28)] {
            let mut encoder = MarkerEncoder { crc: true, position: 512 - to_go };
            let mut out = Vec::new();
            encoder.push(&plain, &mut out);
            assert_eq!(out.len(), len);
            assert_eq!(marked_len(21, 512 - to_go), len);
            let covered = &out[..len - CRC_LEN];
            assert_eq!(out[len - CRC_LEN..], crc32c(covered).to_le_bytes());
            if to_go == 24 {
                assert_eq!(out[24..28], hex!("00000018"));
            }
            let end = out.len();
            encoder.push(&plain, &mut out);
            if to_go == 28 {
                // Between FPDUs: the pointer is 0.
                assert_eq!(out[end..end + 6], hex!("00000000 0015"));
                let second = &out[end..];
                let (covered, crc) = second.split_at(second.len() - CRC_LEN);
                assert_eq!(crc, crc32c(covered).to_le_bytes());
            }
            let deframer = Deframer { position: 512 - to_go, ..Deframer::new(true, true) };
            let (mut deframer, mut scratch, mut rest) = (deframer, Vec::new(), &out[..]);
            for _ in 0..2 {
                let fpdu = deframer.next(rest, &mut scratch).unwrap().unwrap();
                assert_eq!(fpdu.ulpdu, ulpdu);
                rest = &rest[fpdu.consumed..];
            }
            assert!(rest.is_empty());
        }
    }

    #[test]
    fn lengths() {
        assert_eq!([0, 1, 2, 3, 4, 5, 6].map(padding), [2, 1, 0, 3, 2, 1, 0]);
        assert_eq!((fpdu_len(0), fpdu_len(2), fpdu_len(14)), (8, 8, 20));
        assert_eq!(fpdu_len(MAX_ULPDU), 65_544);
        assert_eq!((marked_len(42, 0), marked_len(42, 492)), (52, 52));
    }

    #[test]
    fn mulpdu_of_usual_segments() {
        // RFC 5044 §4.5: EMSS 1460 gives 1454 without markers, and 12 less with three.
        assert_eq!((mulpdu(1460, false), mulpdu(1460, true)), (1454, 1442));
        // What siw makes of 1448: an untagged payload of 1424 octets.
        assert_eq!(mulpdu(1448, false), 1424 + 18);
        assert_eq!((mulpdu(1449, false), mulpdu(1451, false)), (1442, 1442));
        // Never below 128.
        for emss in [0, 1, 100, 133, 134] {
            assert_eq!((mulpdu(emss, false), mulpdu(emss, true)), (128, 128), "{emss}");
        }
        assert_eq!((mulpdu(140, false), mulpdu(142, true)), (134, 130));
        // Never beyond the length field. 65,483 is the loopback's.
        assert_eq!((mulpdu(65_483, false), mulpdu(65_483, true)), (64_768, 64_768));
        assert_eq!(mulpdu(64_775, false), 64_766, "the last one below RFC 5044's limit");
        assert_eq!((mulpdu(usize::MAX, false), mulpdu(usize::MAX, true)), (64_768, 64_768));
    }

    #[test]
    fn without_crc_its_field_and_the_pad_are_not_looked_at() {
        let mut stream = frame(b"x", false);
        assert_eq!(stream, hex!("0001 78 00 00000000"));
        stream[3..].copy_from_slice(&hex!("40 deadbeef"));
        let (found, end) = decode(&stream, &[], Deframer::new(false, false));
        assert_eq!((found, end), (vec![b"x".to_vec()], Ok(())));
    }

    #[test]
    fn a_length_and_a_trailer_around_a_payload_that_is_elsewhere() {
        for len in 18..40 {
            let ulpdu: Vec<u8> = (0..len).collect();
            let mut head = vec![1, 2, 3];
            let start = begin(&mut head);
            head.extend_from_slice(&ulpdu[..18]);
            set_length(&mut head, start, ulpdu.len());
            let mut tail = Vec::new();
            trailer(&mut tail, ulpdu.len());
            let stream = [&head[3..], &ulpdu[18..], &tail].concat();
            assert_eq!(stream, frame(&ulpdu, false));
        }
    }

    #[test]
    fn a_wrong_crc_is_told_with_both_values() {
        let mut stream = frame(b"123456", true);
        let good = u32::from_le_bytes(*stream.last_chunk().unwrap());
        stream[11] ^= 0x80;
        let (found, end) = decode(&stream, &[], Deframer::new(false, true));
        let problem = Problem::Crc { found: good ^ 0x8000_0000, computed: good };
        assert_eq!((found.len(), end), (0, Err(Error { layer: Layer::Mpa, offset: 8, problem })));
    }

    #[test]
    fn markers_are_judged_after_the_crc() {
        let ulpdu = vec![7; 600];
        let good = encode(core::slice::from_ref(&ulpdu), true, true);
        let with = |at: usize, octets: [u8; 4], fix_crc: bool| {
            let mut stream = good.clone();
            stream[at..at + 4].copy_from_slice(&octets);
            if fix_crc {
                let (covered, crc) = stream.split_at_mut(good.len() - CRC_LEN);
                crc.copy_from_slice(&crc32c(covered).to_le_bytes());
            }
            decode(&stream, &[], Deframer::new(true, true))
        };
        // The pointer at octet 512 counts from the length field at 4.
        assert_eq!(good[512..516], hex!("000001fc"));
        let (_, end) = with(512, hex!("000001f8"), false);
        assert!(matches!(end.unwrap_err().problem, Problem::Crc { .. }));
        let (_, end) = with(512, hex!("000001f8"), true);
        assert_eq!(
            end.unwrap_err().to_string(),
            "MPA: at offset 512: FPDUPTR is 0x1f8, expected the distance from the ULPDU Length \
             field to this marker"
        );
        let (_, end) = with(0, hex!("00000004"), true);
        assert_eq!(end.unwrap_err().offset, 0);
        // RFC 5044 §4.2: reserved octets and the two lowest bits do not count.
        let (found, end) = with(512, hex!("abcd01ff"), true);
        assert_eq!((found, end), (vec![ulpdu.clone()], Ok(())));
        // Without CRC too the pointers count.
        let stream = encode(&[ulpdu], true, false);
        let mut bad = stream.clone();
        bad[515] ^= 8;
        assert!(decode(&stream, &[], Deframer::new(true, false)).1.is_ok());
        assert!(decode(&bad, &[], Deframer::new(true, false)).1.is_err());
    }

    #[test]
    fn the_longest_ulpdu() {
        let ulpdus = vec![vec![0xa5; MAX_ULPDU], vec![], vec![1], vec![0x5a; MAX_ULPDU]];
        for (markers, crc) in [(false, false), (false, true), (true, false), (true, true)] {
            let stream = encode(&ulpdus, markers, crc);
            let (found, end) = decode(&stream, &[], Deframer::new(markers, crc));
            assert!(found == ulpdus && end.is_ok(), "markers {markers}, CRC {crc}");
        }
    }

    #[test]
    fn no_flipped_bit_gives_a_wrong_ulpdu() {
        let ulpdus: Vec<Vec<u8>> = [10, 0, 33, 480, 18, 7, 5]
            .iter()
            .map(|&len| (0..len).map(|i| i as u8).collect())
            .collect();
        for markers in [false, true] {
            let stream = encode(&ulpdus, markers, true);
            for bit in 0..stream.len() * 8 {
                let mut bad = stream.clone();
                bad[bit / 8] ^= 1 << (bit % 8);
                let (found, _) = decode(&bad, &[], Deframer::new(markers, true));
                assert!(found.len() < ulpdus.len(), "bit {bit}");
                assert_eq!(found, ulpdus[..found.len()], "bit {bit}");
            }
        }
    }

    /// RFC 5044 §4.3, octet by octet: a marker wherever the position is a multiple of 512.
    fn count_markers(plain: usize, position: u64) -> usize {
        let (mut at, mut left, mut markers) = (position, plain, 0);
        while left > 0 {
            if at % 512 == 0 {
                markers += 1;
                at += 4;
            }
            at += 1;
            left -= 1;
        }
        markers
    }

    fn ulpdus(least: usize) -> impl Strategy<Value = Vec<Vec<u8>>> {
        let len = prop_oneof![4 => 0usize..60, 2 => 440usize..560, 1 => 0usize..3000];
        prop::collection::vec(
            len.prop_flat_map(|len| prop::collection::vec(any::<u8>(), len)),
            least..12,
        )
    }

    proptest! {
        #[test]
        fn a_stream_cut_anywhere_gives_its_ulpdus(
            ulpdus in ulpdus(0), markers: bool, crc: bool, cuts in prop::collection::vec(any::<Index>(), 0..20),
        ) {
            let stream = encode(&ulpdus, markers, crc);
            let mut cuts: Vec<_> = cuts.iter().map(|cut| cut.index(stream.len() + 1)).collect();
            cuts.sort_unstable();
            let (found, end) = decode(&stream, &cuts, Deframer::new(markers, crc));
            prop_assert_eq!((found, end), (ulpdus, Ok(())));
        }

        #[test]
        fn what_need_says_suffices(ulpdus in ulpdus(0), markers: bool, crc: bool) {
            let stream = encode(&ulpdus, markers, crc);
            let (mut deframer, mut scratch) = (Deframer::new(markers, crc), Vec::new());
            let (mut used, mut have, mut found) = (0, 0, Vec::new());
            while found.len() < ulpdus.len() {
                // At most one more look per FPDU, once its length is there.
                for _ in 0..2 {
                    have = have.max(used + deframer.need(&stream[used..have]));
                }
                let fpdu = deframer.next(&stream[used..have], &mut scratch).unwrap().unwrap();
                prop_assert_eq!(used + fpdu.consumed, have);
                used = have;
                found.push(fpdu.ulpdu.to_vec());
            }
            prop_assert_eq!(found, ulpdus);
            prop_assert_eq!(used, stream.len());
        }

        #[test]
        fn a_flipped_bit_gives_no_wrong_ulpdu(ulpdus in ulpdus(1), markers: bool, bit: Index) {
            let mut stream = encode(&ulpdus, markers, true);
            let bit = bit.index(stream.len() * 8);
            stream[bit / 8] ^= 1 << (bit % 8);
            let (found, _) = decode(&stream, &[], Deframer::new(markers, true));
            prop_assert!(found.len() < ulpdus.len());
            prop_assert_eq!(&found[..], &ulpdus[..found.len()]);
        }

        #[test]
        fn marked_len_counts_markers(ulpdu_len in 0..=MAX_ULPDU, position in (0u64..5000).prop_map(|p| p * 4)) {
            let plain = fpdu_len(ulpdu_len);
            let want = plain + MARKER_LEN * count_markers(plain, position);
            prop_assert_eq!(marked_len(ulpdu_len, position), want);
        }

        #[test]
        fn an_fpdu_of_mulpdu_fits_its_segment(emss in 150usize..70_000, position in (0u64..200).prop_map(|p| p * 4)) {
            prop_assert!(fpdu_len(mulpdu(emss, false)) <= emss);
            let marked = marked_len(mulpdu(emss, true), position);
            prop_assert!(marked <= emss.min(65_535));
        }

        #[test]
        fn any_bytes_do_not_panic(
            input: Vec<u8>, markers: bool, crc: bool, position in (0u64..400).prop_map(|p| p * 4),
        ) {
            let mut deframer = Deframer { position, ..Deframer::new(markers, crc) };
            let (mut scratch, mut rest) = (Vec::new(), &input[..]);
            while let Ok(Some(fpdu)) = deframer.next(rest, &mut scratch) {
                prop_assert!(fpdu.ulpdu.len() + 8 <= fpdu.consumed + 2);
                rest = &rest[fpdu.consumed..];
            }
            prop_assert!(scratch.capacity() <= input.len());
        }
    }
}
