//! Terminate: why a stream ends (RFC 5040 §4.8).
//!
//! ```text
//!   0                   1                   2                   3
//!   0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  | Layer | EType |  Error Code   |M|D|R|        Reserved         |
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  |  DDP Segment Length (if any)  |                               |
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+                               +
//!  //      Terminated DDP Header (14 or 18 octets, with D)        //
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  //      Terminated RDMA Header (28 octets, with R)             //
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//! ```
//!
//! Linux siw, on little-endian machines, swaps the halves of the first octet and puts M, D and R
//! into the low bits of the third (`0x01`, `0x02`, `0x04`). Its form is read as what it means.

use alloc::vec::Vec;
use core::{fmt, ops::Deref};

use zerocopy::{FromBytes, IntoBytes};

use super::{
    ddp::{Segment, TAGGED, TaggedHeader, UntaggedHeader},
    rdmap::ReadRequest,
};
use crate::wire::{Error, Layer};

/// Octets in front of the copied headers.
pub const CONTROL_LEN: usize = 4;
/// The longest Terminate payload: control, segment length, untagged header, Read Request.
pub const MAX_LEN: usize = CONTROL_LEN + 2 + UntaggedHeader::LEN + ReadRequest::LEN;

/// HdrCt bits in the third octet, as RFC 5040 Figure 8 places them.
const M: u8 = 0x80;
const D: u8 = 0x40;
const R: u8 = 0x20;
/// The same bits where siw puts them.
const SIW_M: u8 = 0x01;
const SIW_D: u8 = 0x02;
const SIW_R: u8 = 0x04;

/// The layer that found the error, 4 bits (RFC 5040 Figure 9). Open: an unknown one survives.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct TermLayer(pub u8);

impl TermLayer {
    /// RDMAP (RFC 5040).
    pub const RDMAP: Self = Self(0);
    /// DDP (RFC 5041).
    pub const DDP: Self = Self(1);
    /// The layer below: MPA (RFC 5044).
    pub const LLP: Self = Self(2);

    /// The layer's name, if the code has one.
    pub const fn name(self) -> Option<&'static str> {
        match self {
            Self::RDMAP => Some("RDMAP"),
            Self::DDP => Some("DDP"),
            Self::LLP => Some("MPA"),
            _ => None,
        }
    }
}

impl fmt::Display for TermLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name),
            None => write!(f, "layer {:#x}", self.0),
        }
    }
}

impl fmt::Debug for TermLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TermLayer({self})")
    }
}

/// What went wrong: layer, error type, error code. Open: unknown ones survive and print as hex.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct TermCode {
    /// The layer that found it, 4 bits.
    pub layer: TermLayer,
    /// The error type within the layer, 4 bits.
    pub etype: u8,
    /// The error code within the type.
    pub code: u8,
}

macro_rules! codes {
    ($($(#[$doc:meta])* $name:ident = $layer:ident, $etype:literal, $code:literal, $text:literal;)*) => {
        impl TermCode {
            $($(#[$doc])* pub const $name: Self = Self::new(TermLayer::$layer, $etype, $code);)*

            /// Every code that a specification names.
            pub const ALL: &'static [Self] = &[$(Self::$name),*];

            /// The code's name in words, without layer and type, if it has one.
            pub const fn name(self) -> Option<&'static str> {
                match self {
                    $(Self::$name => Some($text),)*
                    _ => None,
                }
            }
        }
    };
}

codes! {
    // RFC 5040 Figure 9.
    /// RDMAP local catastrophic error. Any code may stand with this type.
    RDMAP_LOCAL_CATASTROPHIC = RDMAP, 0, 0x00, "unspecified";
    /// RDMAP remote protection error: invalid STag.
    RDMAP_INVALID_STAG = RDMAP, 1, 0x00, "invalid STag";
    /// RDMAP remote protection error: base or bounds violation.
    RDMAP_BOUNDS = RDMAP, 1, 0x01, "base or bounds violation";
    /// RDMAP remote protection error: access rights violation.
    RDMAP_ACCESS = RDMAP, 1, 0x02, "access rights violation";
    /// RDMAP remote protection error: STag not associated with the RDMAP stream.
    RDMAP_STAG_NOT_ASSOCIATED = RDMAP, 1, 0x03, "STag not associated with the stream";
    /// RDMAP remote protection error: address and length wrap.
    RDMAP_TO_WRAP = RDMAP, 1, 0x04, "tagged offset wraps";
    /// RDMAP remote protection error: STag cannot be invalidated.
    RDMAP_CANNOT_INVALIDATE = RDMAP, 1, 0x09, "STag cannot be invalidated";
    /// RDMAP remote protection error, unspecified.
    RDMAP_PROTECTION_UNSPECIFIED = RDMAP, 1, 0xff, "unspecified";
    /// RDMAP remote operation error: invalid RDMAP version.
    RDMAP_INVALID_VERSION = RDMAP, 2, 0x05, "invalid RDMAP version";
    /// RDMAP remote operation error: unexpected opcode.
    RDMAP_UNEXPECTED_OPCODE = RDMAP, 2, 0x06, "unexpected opcode";
    /// RDMAP remote operation error: catastrophic, localized to the stream. RFC 7306 §8.2 has it
    /// for atomics at an unaligned address.
    RDMAP_CATASTROPHIC_STREAM = RDMAP, 2, 0x07, "catastrophic error, localized to the stream";
    /// RDMAP remote operation error: catastrophic, global.
    RDMAP_CATASTROPHIC_GLOBAL = RDMAP, 2, 0x08, "catastrophic error, global";
    /// RDMAP remote operation error: STag cannot be invalidated.
    RDMAP_OPERATION_CANNOT_INVALIDATE = RDMAP, 2, 0x09, "STag cannot be invalidated";
    /// RDMAP remote operation error, unspecified.
    RDMAP_OPERATION_UNSPECIFIED = RDMAP, 2, 0xff, "unspecified";

    // RFC 5041 §7.2.
    /// DDP local catastrophic error.
    DDP_LOCAL_CATASTROPHIC = DDP, 0, 0x00, "unspecified";
    /// DDP tagged buffer error: invalid STag.
    DDP_TAGGED_INVALID_STAG = DDP, 1, 0x00, "invalid STag";
    /// DDP tagged buffer error: base or bounds violation.
    DDP_TAGGED_BOUNDS = DDP, 1, 0x01, "base or bounds violation";
    /// DDP tagged buffer error: STag not associated with the DDP stream.
    DDP_TAGGED_STAG_NOT_ASSOCIATED = DDP, 1, 0x02, "STag not associated with the stream";
    /// DDP tagged buffer error: address and length wrap.
    DDP_TAGGED_TO_WRAP = DDP, 1, 0x03, "tagged offset wraps";
    /// DDP tagged buffer error: invalid DDP version.
    DDP_TAGGED_INVALID_VERSION = DDP, 1, 0x04, "invalid DDP version";
    /// DDP untagged buffer error: invalid queue number.
    DDP_UNTAGGED_INVALID_QN = DDP, 2, 0x01, "invalid queue number";
    /// DDP untagged buffer error: invalid sequence number, no buffer available.
    DDP_UNTAGGED_NO_BUFFER = DDP, 2, 0x02, "no buffer available";
    /// DDP untagged buffer error: invalid sequence number, not in range.
    DDP_UNTAGGED_MSN_RANGE = DDP, 2, 0x03, "message sequence number out of range";
    /// DDP untagged buffer error: invalid message offset.
    DDP_UNTAGGED_INVALID_MO = DDP, 2, 0x04, "invalid message offset";
    /// DDP untagged buffer error: message too long for the buffer.
    DDP_UNTAGGED_TOO_LONG = DDP, 2, 0x05, "message too long for the buffer";
    /// DDP untagged buffer error: invalid DDP version.
    DDP_UNTAGGED_INVALID_VERSION = DDP, 2, 0x06, "invalid DDP version";

    // RFC 5044 §8.
    /// MPA: TCP connection closed, terminated or lost.
    MPA_CLOSED = LLP, 0, 0x01, "TCP connection closed, terminated or lost";
    /// MPA: CRC mismatch.
    MPA_CRC = LLP, 0, 0x02, "CRC mismatch";
    /// MPA: marker and length field do not agree on the start of an FPDU.
    MPA_MARKER = LLP, 0, 0x03, "marker and ULPDU length do not agree";
    /// MPA: invalid start-up frame.
    MPA_INVALID_START = LLP, 0, 0x04, "invalid MPA request or reply frame";

    // RFC 6581 §8.
    /// MPA start-up: local catastrophic error.
    MPA_LOCAL_CATASTROPHIC = LLP, 0, 0x05, "local catastrophic error";
    /// MPA start-up: insufficient IRD resources.
    MPA_INSUFFICIENT_IRD = LLP, 0, 0x06, "insufficient IRD resources";
    /// MPA start-up: no matching ready-to-receive option.
    MPA_NO_MATCHING_RTR = LLP, 0, 0x07, "no matching RTR option";
}

impl TermCode {
    /// The code of these three numbers. Layer and type have 4 bits each on the wire.
    pub const fn new(layer: TermLayer, etype: u8, code: u8) -> Self {
        Self { layer, etype, code }
    }

    /// The name of the error type within its layer, if it has one.
    pub const fn type_name(self) -> Option<&'static str> {
        match (self.layer, self.etype) {
            (TermLayer::RDMAP | TermLayer::DDP, 0) => Some("local catastrophic error"),
            (TermLayer::RDMAP, 1) => Some("remote protection error"),
            (TermLayer::RDMAP, 2) => Some("remote operation error"),
            (TermLayer::DDP, 1) => Some("tagged buffer error"),
            (TermLayer::DDP, 2) => Some("untagged buffer error"),
            (TermLayer::LLP, 0) => Some("error"),
            _ => None,
        }
    }

    /// The first two octets of a Terminate in RFC 5040's form: layer, type, code.
    pub const fn to_u16(self) -> u16 {
        ((self.layer.0 & 0xf) as u16) << 12 | ((self.etype & 0xf) as u16) << 8 | self.code as u16
    }

    /// From the first two octets of a Terminate in RFC 5040's form.
    pub const fn from_u16(octets: u16) -> Self {
        Self {
            layer: TermLayer((octets >> 12) as u8),
            etype: (octets >> 8 & 0xf) as u8,
            code: octets as u8,
        }
    }

    /// The code that siw means by the same two octets: layer and type exchanged.
    const fn swapped(self) -> Self {
        Self { layer: TermLayer(self.etype), etype: self.layer.0, code: self.code }
    }

    /// Whether RFC 5040 Figure 10 has the DDP header of the offending segment copied.
    pub const fn copies_ddp_header(self) -> bool {
        // Not for a local catastrophic error and not for a layer below DDP. RFC 5041 §7.2 has
        // a local catastrophic error too, where no segment is to blame.
        matches!(self.layer, TermLayer::RDMAP | TermLayer::DDP) && self.etype != 0
    }

    /// Whether RFC 5040 Figure 10 has the header of an offending Read Request copied.
    pub const fn copies_read_request(self) -> bool {
        matches!((self.layer, self.etype), (TermLayer::RDMAP, 1))
    }
}

impl fmt::Display for TermCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.layer)?;
        match self.type_name() {
            Some(name) => write!(f, " {name}: ")?,
            None => write!(f, " error type {:#x}: ", self.etype)?,
        }
        match self.name() {
            Some(name) => f.write_str(name),
            None => write!(f, "code {:#04x}", self.code),
        }
    }
}

impl fmt::Debug for TermCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "TermCode({:#06x}: {self})", self.to_u16())
    }
}

/// A copied DDP header: 14 octets of a tagged one or 18 of an untagged one.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct HeaderCopy {
    octets: [u8; UntaggedHeader::LEN],
    /// 14 or 18.
    len: u8,
}

impl HeaderCopy {
    /// The header that `octets` begin with. `None` if it is not whole.
    pub fn new(octets: &[u8]) -> Option<Self> {
        let len = header_len(*octets.first()?);
        let mut copy = [0; UntaggedHeader::LEN];
        copy[..len].copy_from_slice(octets.get(..len)?);
        Some(Self { octets: copy, len: len as u8 })
    }

    /// The header in its fields; the payload is empty.
    pub fn segment(&self) -> Option<Segment<'_>> {
        Segment::parse(self).ok()
    }
}

/// Length of the DDP header that begins with the octet `control`.
const fn header_len(control: u8) -> usize {
    if control & TAGGED != 0 { TaggedHeader::LEN } else { UntaggedHeader::LEN }
}

impl Deref for HeaderCopy {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.octets[..usize::from(self.len)]
    }
}

impl fmt::Debug for HeaderCopy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("HeaderCopy(")?;
        self.iter().try_for_each(|octet| write!(f, "{octet:02x}"))?;
        f.write_str(")")
    }
}

/// A Terminate, owned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Terminate {
    /// What went wrong.
    pub code: TermCode,
    /// M: length of the offending DDP segment in octets. (siw puts the payload's length here.)
    pub ddp_segment_len: Option<u16>,
    /// D: its DDP header.
    pub ddp_header: Option<HeaderCopy>,
    /// R: the header of the Read Request that it belongs to; see [`Terminate::read_request`].
    pub read_request: Option<[u8; ReadRequest::LEN]>,
    /// Whether it was read from siw's form, and is written in it.
    pub swapped: bool,
}

impl Terminate {
    /// A Terminate without copied headers.
    pub const fn new(code: TermCode) -> Self {
        Self { code, ddp_segment_len: None, ddp_header: None, read_request: None, swapped: false }
    }

    /// With the length of the offending DDP segment in octets (header and payload) and a copy of
    /// the DDP header that `ddp_header` begins with, where RFC 5040 Figure 10 wants them: nothing
    /// changes for a local catastrophic error and for errors of MPA, and a header that is not
    /// whole is left out.
    #[must_use]
    pub fn with_segment(mut self, segment_len: u16, ddp_header: &[u8]) -> Self {
        if self.code.copies_ddp_header() {
            self.ddp_segment_len = Some(segment_len);
            self.ddp_header = HeaderCopy::new(ddp_header);
        }
        self
    }

    /// With a copy of the offending Read Request, where RFC 5040 Figure 10 wants it: nothing
    /// changes unless the code is a remote protection error of RDMAP.
    #[must_use]
    pub fn with_read_request(mut self, request: &ReadRequest) -> Self {
        if self.code.copies_read_request() {
            self.read_request = Some(zerocopy::transmute!(*request));
        }
        self
    }

    /// The copied Read Request in its fields.
    pub fn read_request(&self) -> Option<&ReadRequest> {
        // The array has the header's length.
        self.read_request.as_ref().and_then(|octets| ReadRequest::ref_from_bytes(octets).ok())
    }

    /// The first two octets in RFC 5040's form (layer, type, code), as for
    /// [`Wc::vendor_err`](crate::verbs::Wc::vendor_err).
    pub const fn term_octets(&self) -> u16 {
        self.code.to_u16()
    }

    /// Appends the Terminate as it follows the untagged DDP header.
    pub fn emit(&self, out: &mut Vec<u8>) {
        let (code, bits) = if self.swapped {
            (self.code.swapped(), [SIW_M, SIW_D, SIW_R])
        } else {
            (self.code, [M, D, R])
        };
        let set = [
            self.ddp_segment_len.is_some(),
            self.ddp_header.is_some(),
            self.read_request.is_some(),
        ];
        let header_control =
            bits.iter().zip(set).fold(0, |acc, (bit, on)| if on { acc | bit } else { acc });
        out.extend_from_slice(&code.to_u16().to_be_bytes());
        out.extend_from_slice(&[header_control, 0]);
        if header_control != 0 {
            // RFC 5040 §4.8: the length field is there also where only D is set. What R alone
            // would look like is not said; Figure 7 draws the field before both headers.
            let length = self.ddp_segment_len.unwrap_or(0);
            out.extend_from_slice(&length.to_be_bytes());
        }
        if let Some(header) = &self.ddp_header {
            out.extend_from_slice(header);
        }
        if let Some(request) = &self.read_request {
            out.extend_from_slice(request.as_bytes());
        }
    }

    /// Reads what follows the untagged DDP header of a Terminate, in RFC 5040's form or siw's.
    /// Reserved bits and octets behind the Terminate are ignored.
    ///
    /// Which form it is, M, D and R say. Where none of them is set in either place the form is
    /// RFC 5040's, unless its code is not defined there and would be in siw's: siw reports CRC
    /// errors so.
    ///
    /// siw sets R for a SEND with invalidate too, and then copies no Read Request: R is taken as
    /// not set.
    ///
    /// # Errors
    ///
    /// Truncated, of layer RDMAP: the 4 octets of control or a header that M, D or R announce are
    /// not whole. [`Terminate::parse_code`] still gives the code.
    pub fn parse(payload: &[u8]) -> Result<Self, Error> {
        let (mut terminate, bits) = Self::parse_control(payload)?;
        let mut reader = Reader { input: payload, at: CONTROL_LEN };
        if bits.iter().any(|&set| set) {
            let length = u16::from_be_bytes(reader.array()?);
            terminate.ddp_segment_len = bits[0].then_some(length);
        }
        if bits[1] {
            let control = reader.peek()?;
            terminate.ddp_header = HeaderCopy::new(reader.take(header_len(control))?);
        }
        if bits[2] && !(terminate.swapped && bits[1] && reader.is_at_end()) {
            terminate.read_request = Some(reader.array()?);
        }
        Ok(terminate)
    }

    /// Reads the code alone, whatever became of the copied headers.
    ///
    /// # Errors
    ///
    /// Truncated, of layer RDMAP, if there are less than 4 octets.
    pub fn parse_code(payload: &[u8]) -> Result<TermCode, Error> {
        Self::parse_control(payload).map(|(terminate, _)| terminate.code)
    }

    /// The code, the form, and whether M, D and R are set.
    fn parse_control(payload: &[u8]) -> Result<(Self, [bool; 3]), Error> {
        let [first, code, third, _] = Reader { input: payload, at: 0 }.array()?;
        let as_rfc = TermCode::from_u16(u16::from_be_bytes([first, code]));
        let in_rfc = [M, D, R].map(|bit| third & bit != 0);
        let in_siw = [SIW_M, SIW_D, SIW_R].map(|bit| third & bit != 0);
        let swapped = match (in_rfc.contains(&true), in_siw.contains(&true)) {
            (true, _) => false,
            (false, true) => true,
            (false, false) => !as_rfc.is_defined() && as_rfc.swapped().is_defined(),
        };
        let code = if swapped { as_rfc.swapped() } else { as_rfc };
        Ok((Self { swapped, ..Self::new(code) }, if swapped { in_siw } else { in_rfc }))
    }
}

impl TermCode {
    /// Whether a specification gives the three numbers a meaning.
    const fn is_defined(self) -> bool {
        // RFC 5040 Figure 9: any code goes with RDMAP's local catastrophic error.
        self.name().is_some() || matches!((self.layer, self.etype), (TermLayer::RDMAP, 0))
    }
}

impl fmt::Display for Terminate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.code)?;
        match self.ddp_header.as_ref().and_then(HeaderCopy::segment) {
            Some(segment @ Segment::Tagged { header, .. }) => {
                write!(f, " ({} to {} at {:#x})", segment.opcode(), header.stag(), header.to)
            }
            Some(segment @ Segment::Untagged { header, .. }) => {
                write!(f, " ({}, message {} of queue {})", segment.opcode(), header.msn, header.qn)
            }
            None => Ok(()),
        }
    }
}

/// Takes octets off the front, and says where they ended too early.
struct Reader<'a> {
    input: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn rest(&self) -> &'a [u8] {
        self.input.get(self.at..).unwrap_or_default()
    }

    fn is_at_end(&self) -> bool {
        self.rest().is_empty()
    }

    fn short(&self, need: usize) -> Error {
        Error::truncated(Layer::Rdmap, self.at, need, self.rest().len())
    }

    fn peek(&self) -> Result<u8, Error> {
        self.rest().first().copied().ok_or(self.short(1))
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8], Error> {
        let octets = self.rest().get(..len).ok_or(self.short(len))?;
        self.at += len;
        Ok(octets)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Error> {
        let octets = self.rest().first_chunk().copied().ok_or(self.short(N))?;
        self.at += N;
        Ok(octets)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::iwarp::rdmap::Opcode;
    use hex_literal::hex;
    use proptest::prelude::*;
    use std::{string::ToString, vec};

    fn octets(terminate: &Terminate) -> Vec<u8> {
        let mut out = Vec::new();
        terminate.emit(&mut out);
        out
    }

    /// Terminates that Linux siw sent, and what it meant: code, segment length, whether a Read
    /// Request is in it, words.
    #[rustfmt::skip]
    const SIW: &[(&[u8], TermCode, u16, bool, &str)] = &[
        // WRITE to a wrong STag.
        (&hex!("11000300 0064 c140 2340a400 00007f712c097000"),
         TermCode::DDP_TAGGED_INVALID_STAG, 100, false,
         "DDP tagged buffer error: invalid STag (WRITE to 0x2340a400 at 0x7f712c097000)"),
        // WRITE beyond the end.
        (&hex!("11010300 0594 81409326680000007f485e1cbdc4"),
         TermCode::DDP_TAGGED_BOUNDS, 1428, false,
         "DDP tagged buffer error: base or bounds violation \
          (WRITE to 0x93266800 at 0x7f485e1cbdc4)"),
        // READ of a wrong STag. The "message number" is the READ's size: siw rebuilt the header.
        (&hex!("10000700 0000 4141 00000000 00000001 00000064 00000000
                2505a100 00007f5204696000 00000064 3ed70600 00007fa62594e000"),
         TermCode::RDMAP_INVALID_STAG, 0, true,
         "RDMAP remote protection error: invalid STag (READ_REQUEST, message 100 of queue 1)"),
        // SEND that is longer than the receive.
        (&hex!("21020300 0590 0143 00000000 00000000 00000002 00000000"),
         TermCode::DDP_UNTAGGED_NO_BUFFER, 1424, false,
         "DDP untagged buffer error: no buffer available (SEND, message 2 of queue 0)"),
        // SEND without a receive.
        (&hex!("21020300 000a 4143 00000000 00000000 00000001 00000000"),
         TermCode::DDP_UNTAGGED_NO_BUFFER, 10, false,
         "DDP untagged buffer error: no buffer available (SEND, message 1 of queue 0)"),
        // READ where the peer serves none (IRD 0).
        (&hex!("20070300 0000 4141 00000000 00000001 00000001 00000000"),
         TermCode::RDMAP_CATASTROPHIC_STREAM, 0, false,
         "RDMAP remote operation error: catastrophic error, localized to the stream \
          (READ_REQUEST, message 1 of queue 1)"),
        // WRITE to an STag that a SEND had invalidated.
        (&hex!("11000300 000a c140 72b7b400 00007f6326377000"),
         TermCode::DDP_TAGGED_INVALID_STAG, 10, false,
         "DDP tagged buffer error: invalid STag (WRITE to 0x72b7b400 at 0x7f6326377000)"),
    ];

    #[test]
    fn siw_is_read_as_what_it_means() {
        for &(payload, code, segment_len, with_request, words) in SIW {
            let terminate = Terminate::parse(payload).unwrap();
            assert_eq!(terminate.code, code);
            assert!(terminate.swapped);
            assert_eq!(terminate.ddp_segment_len, Some(segment_len));
            let header_len = header_len(payload[6]);
            assert_eq!(*terminate.ddp_header.unwrap(), payload[6..6 + header_len]);
            assert_eq!(terminate.read_request().is_some(), with_request);
            assert_eq!(terminate.to_string(), words);
            assert_eq!(octets(&terminate), payload, "{words}");
        }
        let read = Terminate::parse(SIW[2].0).unwrap();
        let request = read.read_request().unwrap();
        assert_eq!((request.sink_stag.get(), request.size.get()), (0x2505_a100, 100));
        assert_eq!(request.source_to.get(), 0x7fa6_2594_e000);
        assert_eq!(read.term_octets(), 0x0100);
    }

    #[test]
    fn siw_without_headers() {
        // siw copies no header for errors of MPA; the code decides. RFC 5040 defines no code 2 of
        // a remote operation error.
        let terminate = Terminate::parse(&hex!("02020000")).unwrap();
        assert_eq!((terminate.code, terminate.swapped), (TermCode::MPA_CRC, true));
        assert_eq!(octets(&terminate), hex!("02020000"));
        // What RFC 5040 defines, and what neither does, is taken by its word.
        let same = [("02050000", TermCode::RDMAP_INVALID_VERSION), ("20020000", TermCode::MPA_CRC)];
        for (payload, code) in same.map(|(p, c)| (u32::from_str_radix(p, 16).unwrap(), c)) {
            let terminate = Terminate::parse(&payload.to_be_bytes()).unwrap();
            assert_eq!((terminate.code, terminate.swapped), (code, false));
        }
        let terminate = Terminate::parse(&hex!("01770000")).unwrap();
        assert_eq!((terminate.code, terminate.swapped), (TermCode::from_u16(0x0177), false));
        // siw's way to say "the program closed": local catastrophic error, any code.
        assert!(!Terminate::parse(&hex!("00ff0000")).unwrap().swapped);
    }

    #[test]
    fn siw_announces_a_read_request_after_a_send_and_copies_none() {
        // RDMAP remote protection error, STag cannot be invalidated: M, D, R and an untagged header.
        let payload = hex!("10090700 0004 4144 00000099 00000000 00000003 00000000");
        let terminate = Terminate::parse(&payload).unwrap();
        assert_eq!(terminate.code, TermCode::RDMAP_CANNOT_INVALIDATE);
        assert_eq!(terminate.read_request, None);
        assert_eq!(terminate.ddp_header.unwrap().segment().unwrap().opcode(), Opcode::SEND_INV);
        // In RFC 5040's form R means what it says.
        let payload = hex!("0109e000 0004 4144 00000099 00000000 00000003 00000000");
        let error = Terminate::parse(&payload).unwrap_err();
        assert_eq!(error, Error::truncated(Layer::Rdmap, 24, 28, 0));
        assert_eq!(Terminate::parse_code(&payload), Ok(TermCode::RDMAP_CANNOT_INVALIDATE));
    }

    #[test]
    fn examples_in_rfc_form() {
        let bare = Terminate::new(TermCode::RDMAP_BOUNDS);
        assert_eq!(octets(&bare), hex!("01010000"));
        let write = hex!("c140 11223344 0000000000001000");
        let tagged = Terminate::new(TermCode::DDP_TAGGED_BOUNDS).with_segment(18, &write);
        assert_eq!(octets(&tagged), hex!("1101c000 0012 c140 11223344 0000000000001000"));
        assert_eq!(tagged.term_octets(), 0x1101);
        let header = hex!("4141 00000000 00000001 00000001 00000000");
        let request = hex!("00000055 0000000000002000 00000040 00000066 0000000000003000");
        let read = Terminate::new(TermCode::RDMAP_ACCESS)
            .with_segment(46, &header)
            .with_read_request(ReadRequest::parse(&request).unwrap());
        let want = [&hex!("0102e000 002e")[..], &header, &request].concat();
        assert_eq!(octets(&read), want);
        assert_eq!(want.len(), MAX_LEN);
        for terminate in [bare, tagged, read] {
            assert_eq!(Terminate::parse(&octets(&terminate)), Ok(terminate));
        }
    }

    #[test]
    fn headers_are_copied_where_figure_10_wants_them() {
        let header = hex!("4141 00000000 00000001 00000001 00000000");
        let request = ReadRequest::parse(&[7; 28]).unwrap();
        for &code in TermCode::ALL {
            let terminate =
                Terminate::new(code).with_segment(46, &header).with_read_request(request);
            let (with_header, with_request) = match (code.layer, code.etype) {
                (TermLayer::RDMAP, 1) => (true, true),
                (TermLayer::RDMAP, 2) | (TermLayer::DDP, 1 | 2) => (true, false),
                _ => (false, false),
            };
            assert_eq!(terminate.ddp_segment_len.is_some(), with_header, "{code}");
            assert_eq!(terminate.ddp_header.is_some(), with_header, "{code}");
            assert_eq!(terminate.read_request.is_some(), with_request, "{code}");
        }
        // A header that never came whole is left out; its length is not.
        let short = Terminate::new(TermCode::DDP_UNTAGGED_INVALID_QN).with_segment(5, &header[..5]);
        assert_eq!(octets(&short), hex!("12018000 0005"));
        assert_eq!(Terminate::parse(&octets(&short)), Ok(short));
    }

    #[test]
    fn the_length_field_is_there_with_d_alone() {
        let payload = hex!("11004000 beef c140 11223344 0000000000001000");
        let terminate = Terminate::parse(&payload).unwrap();
        // Not valid without M.
        assert_eq!(terminate.ddp_segment_len, None);
        assert_eq!(*terminate.ddp_header.unwrap(), payload[6..]);
        assert_eq!(octets(&terminate)[4..6], [0, 0]);
    }

    #[test]
    fn reserved_bits_and_what_follows_are_ignored() {
        let payload = hex!("1100 1fff aabb");
        let terminate = Terminate::parse(&hex!("110010ff aabb")).unwrap();
        assert_eq!(terminate, Terminate::new(TermCode::DDP_TAGGED_INVALID_STAG));
        // The low three bits of the third octet are siw's M, D and R.
        assert!(Terminate::parse(&payload).is_err());
    }

    #[test]
    fn every_cut_is_told() {
        for &(payload, code, ..) in SIW {
            for len in 0..payload.len() {
                let cut = Terminate::parse(&payload[..len]);
                // Where siw's Read Request would begin, see above.
                if payload.len() == MAX_LEN && len == 24 {
                    assert_eq!(cut.unwrap().read_request, None);
                    continue;
                }
                let error = cut.unwrap_err();
                assert_eq!(error.layer, Layer::Rdmap);
                assert!(error.offset <= len, "{error}");
                assert_eq!(Terminate::parse_code(&payload[..len]).ok(), (len >= 4).then_some(code));
            }
        }
    }

    #[test]
    fn codes_are_distinct_and_have_words() {
        let mut numbers: Vec<_> = TermCode::ALL.iter().map(|code| code.to_u16()).collect();
        numbers.sort_unstable();
        numbers.dedup();
        assert_eq!(numbers.len(), 33);
        for &code in TermCode::ALL {
            assert_eq!(TermCode::from_u16(code.to_u16()), code);
            assert!(code.name().is_some() && code.type_name().is_some(), "{code}");
        }
        let words = |octets| TermCode::from_u16(octets).to_string();
        assert_eq!(words(0x0100), "RDMAP remote protection error: invalid STag");
        assert_eq!(words(0x2002), "MPA error: CRC mismatch");
        assert_eq!(words(0x0142), "RDMAP remote protection error: code 0x42");
        assert_eq!(words(0x1501), "DDP error type 0x5: code 0x01");
        assert_eq!(words(0xfabc), "layer 0xf error type 0xa: code 0xbc");
    }

    prop_compose! {
        fn any_terminate()(
            code: u16,
            segment_len: Option<u16>,
            header in prop::option::of(prop::array::uniform18(any::<u8>())),
            request in prop::option::of(prop::array::uniform28(any::<u8>())),
        ) -> Terminate {
            Terminate {
                ddp_segment_len: segment_len,
                ddp_header: header.and_then(|octets| HeaderCopy::new(&octets)),
                read_request: request,
                ..Terminate::new(TermCode::from_u16(code))
            }
        }
    }

    proptest! {
        #[test]
        fn round_trip(terminate in any_terminate(), swapped: bool) {
            // Without M, D and R the form is guessed: see the examples.
            let bare = terminate.ddp_header.is_none() && terminate.read_request.is_none();
            let ddp_segment_len = terminate.ddp_segment_len.or(bare.then_some(0));
            let terminate = Terminate { swapped, ddp_segment_len, ..terminate };
            prop_assert_eq!(Terminate::parse(&octets(&terminate)), Ok(terminate));
        }

        #[test]
        fn any_code_survives_on_the_wire(code: u16) {
            let payload = [&code.to_be_bytes()[..], &[0, 0]].concat();
            prop_assert_eq!(octets(&Terminate::parse(&payload).unwrap()), payload);
        }

        #[test]
        fn any_bytes_do_not_panic(payload in prop::collection::vec(any::<u8>(), 0..80)) {
            if let Ok(terminate) = Terminate::parse(&payload) {
                let _ = std::format!("{terminate} {terminate:?}");
                let again = octets(&terminate);
                prop_assert!(again.len() <= MAX_LEN.min(payload.len()));
                prop_assert_eq!(Terminate::parse(&again), Ok(terminate));
            }
        }
    }

    #[test]
    fn named_codes_survive_bare() {
        for &code in TermCode::ALL {
            let terminate = Terminate::new(code);
            assert_eq!(Terminate::parse(&octets(&terminate)), Ok(terminate), "{code}");
        }
        assert_eq!(octets(&Terminate::new(TermCode::MPA_CRC)), vec![0x20, 0x02, 0, 0]);
    }
}
