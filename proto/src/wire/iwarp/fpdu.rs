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
    let markers = if plain <= to_marker {
        0
    } else {
        (plain - to_marker).div_ceil(BETWEEN_MARKERS)
    };
    plain + markers * MARKER_LEN
}

/// Octets from `position` to the next marker; 0 where one is due.
const fn to_marker(position: u64) -> usize {
    (position.wrapping_neg() % MARKER_SPACING as u64) as usize
}

/// The longest ULPDU whose FPDU fits into one TCP segment of `emss` octets (RFC 5044 §4.5).
///
/// Never below 128 (there the FPDU spans segments), and never so long that the length field or,
/// with markers, FPDUPTR could not say it.
pub const fn mulpdu(emss: usize, markers: bool) -> usize {
    let fit = if markers {
        // The whole FPDU stays below 2^16, and with it every FPDUPTR.
        let emss = if emss > 65_535 { 65_535 } else { emss };
        emss.saturating_sub(6 + 4 * emss.div_ceil(MARKER_SPACING) + emss % 4)
    } else {
        emss.saturating_sub(6 + emss % 4)
    };
    if fit < MIN_MULPDU {
        MIN_MULPDU
    } else if fit > MAX_ULPDU {
        MAX_ULPDU
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
        Self {
            markers,
            crc,
            position: 0,
            failed: None,
        }
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
        let header = if self.markers && to_marker(self.position) == 0 {
            MARKER_LEN
        } else {
            0
        };
        let ulpdu_len = input.get(header..).and_then(length_field).unwrap_or(0);
        if self.markers {
            marked_len(ulpdu_len, self.position)
        } else {
            fpdu_len(ulpdu_len)
        }
    }

    /// Octets of the stream taken so far, markers among them.
    pub const fn position(&self) -> u64 {
        self.position
    }
}

/// The length that `octets` begin with.
#[inline]
fn length_field(octets: &[u8]) -> Option<usize> {
    octets
        .first_chunk()
        .map(|&length| usize::from(u16::from_be_bytes(length)))
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
    Ok(Some(Fpdu {
        ulpdu: &whole[LENGTH_LEN..LENGTH_LEN + length],
        consumed: whole.len(),
    }))
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
        return Ok(Some(Fpdu {
            ulpdu: &covered[LENGTH_LEN..LENGTH_LEN + length],
            consumed,
        }));
    }
    scratch.clear();
    scratch.extend_from_slice(&covered[LENGTH_LEN..inner]);
    for chunk in covered[inner..].chunks(MARKER_SPACING) {
        // A chunk begins with its marker, because the CRC is never the first after a boundary
        // that is still in front of it.
        scratch.extend_from_slice(&chunk[MARKER_LEN..]);
    }
    scratch.truncate(length);
    Ok(Some(Fpdu {
        ulpdu: scratch,
        consumed,
    }))
}

/// Checks the CRC that `whole`, an FPDU with its markers, ends with.
#[inline]
fn check_crc(whole: &[u8]) -> Result<(), Error> {
    let offset = whole.len() - CRC_LEN;
    let (covered, field) = whole.split_at(offset);
    let computed = crc32c(covered);
    // An FPDU is at least 8 octets long, so that the field has its 4.
    let found = field
        .first_chunk()
        .map_or(!computed, |&octets| u32::from_le_bytes(octets));
    // A fuzzer cannot guess a CRC: let it through to the code behind.
    if found == computed || cfg!(fuzzing) {
        return Ok(());
    }
    Err(Error {
        layer: Layer::Mpa,
        offset,
        problem: Problem::Crc { found, computed },
    })
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
    Err(Error::field(
        Layer::Mpa,
        at,
        "FPDUPTR",
        found.into(),
        expected,
    ))
}
