//! One FPDU at the front of octets that may be one: where its markers are, whether it can be, what it
//! says.

use alloc::{
    boxed::Box,
    format,
    string::{String, ToString},
};

use smallvec::SmallVec;

use super::super::{CrcState, DdpHeader, Fpdu, Markers, Operation};
use crate::wire::{
    crc::crc32c,
    iwarp::{
        ddp::{self, Segment},
        fpdu::{CRC_LEN, LENGTH_LEN, MARKER_LEN, MARKER_SPACING, fpdu_len, marked_len},
        rdmap::{self, AtomicRequest, AtomicResponse, Opcode, ReadRequest},
        terminate::{self, Terminate},
    },
};

/// Octets of a ULPDU that are read: DDP header and the longest RDMAP header.
const ULPDU_PEEK: usize = ddp::UntaggedHeader::LEN + AtomicRequest::LEN;

/// How FPDUs and markers lie in the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Framing {
    /// Without markers.
    Plain,
    /// A marker at every 512th octet from here (RFC 5044 §4.3).
    Grid(u64),
    /// A marker at every 512th octet of a count that leaves out the CRC of each FPDU before. This
    /// is the count at the next FPDU's first octet. softiwarp did so in 2008, and wrote FPDUPTR in
    /// the host's byte order.
    OffGrid(u64),
}

impl Framing {
    /// Octets from `pos`, where an FPDU begins, to the next marker.
    pub(super) const fn to_marker(self, pos: u64) -> Option<usize> {
        let distance = match self {
            Self::Plain => return None,
            Self::Grid(origin) => origin.wrapping_sub(pos),
            Self::OffGrid(count) => count.wrapping_neg(),
        };
        Some((distance % MARKER_SPACING as u64) as usize)
    }

    /// The framing behind an FPDU that took `len` octets.
    pub(super) const fn after(self, len: usize) -> Self {
        match self {
            Self::OffGrid(count) => Self::OffGrid(count.wrapping_add((len - CRC_LEN) as u64)),
            other => other,
        }
    }

    pub(super) const fn markers(self) -> Markers {
        match self {
            Self::Plain => Markers::None,
            Self::Grid(_) => Markers::Right,
            Self::OffGrid(_) => Markers::OffGrid,
        }
    }
}

/// An FPDU at the front of some octets, whole or not.
#[derive(Debug)]
pub(super) struct View<'a> {
    input: &'a [u8],
    framing: Framing,
    /// Octets in front of the length field: a marker, or nothing.
    head: usize,
    /// Offset of the first marker.
    first: Option<usize>,
    pub(super) ulpdu_len: usize,
    /// Octets that the FPDU takes, markers among them.
    pub(super) total: usize,
}

impl<'a> View<'a> {
    /// The FPDU that begins with `input`, at `pos`. `Err`: so many octets must be there.
    #[inline]
    pub(super) fn new(framing: Framing, pos: u64, input: &'a [u8]) -> Result<Self, usize> {
        let first = framing.to_marker(pos);
        let head = if first == Some(0) { MARKER_LEN } else { 0 };
        let length = input.get(head..).and_then(|octets| octets.first_chunk());
        let Some(&length) = length else {
            return Err(head + LENGTH_LEN);
        };
        let ulpdu_len = usize::from(u16::from_be_bytes(length));
        let total = match first {
            None => fpdu_len(ulpdu_len),
            // As many octets in front of a marker as `first` says.
            Some(first) => marked_len(ulpdu_len, (MARKER_SPACING - first) as u64),
        };
        let mut view = Self { input, framing, head, first, ulpdu_len, total };
        if matches!(framing, Framing::OffGrid(_)) && view.ends_at_a_marker() {
            // On the grid this marker precedes the CRC. Off the grid it may as well come behind.
            let at = total - CRC_LEN - MARKER_LEN;
            if input.len() >= at + MARKER_LEN && !view.points_back(at) {
                view.total -= MARKER_LEN;
            }
        }
        Ok(view)
    }

    pub(super) const fn is_whole(&self) -> bool {
        self.input.len() >= self.total
    }

    /// Whether a marker is due between pad and CRC.
    fn ends_at_a_marker(&self) -> bool {
        self.first.is_some_and(|first| {
            let body = fpdu_len(self.ulpdu_len) - CRC_LEN;
            body >= first && (body - first).is_multiple_of(MARKER_SPACING - MARKER_LEN)
        })
    }

    /// Offsets of the markers.
    pub(super) fn markers(&self) -> impl Iterator<Item = usize> + use<> {
        let end = self.total - CRC_LEN;
        (self.first.unwrap_or(end)..end).step_by(MARKER_SPACING)
    }

    /// Whether the marker at `at` points to the length field. One that is not there yet does.
    fn points_back(&self, at: usize) -> bool {
        let Some(&[_, _, high, low]) = self.input.get(at..).and_then(|o| o.first_chunk()) else {
            return true;
        };
        // The pointer has 16 bits, of which RFC 5044 §4.3 ignores the lowest two.
        let distance = at.saturating_sub(self.head) as u16;
        let big = u16::from_be_bytes([high, low]) & !3 == distance;
        let little = u16::from_le_bytes([high, low]) & !3 == distance;
        big || little && matches!(self.framing, Framing::OffGrid(_))
    }

    /// Whether the octets that are there can be an FPDU's: markers and headers.
    #[inline]
    pub(super) fn is_plausible(&self) -> bool {
        self.has_header() && self.markers().all(|at| self.points_back(at))
    }

    /// Whether the headers, as far as they are there, agree with each other.
    #[inline]
    pub(super) fn has_header(&self) -> bool {
        let mut buffer = SmallVec::new();
        is_header(self.ulpdu(ULPDU_PEEK.min(self.ulpdu_len), &mut buffer), self.ulpdu_len)
    }

    /// The first `len` octets of the ULPDU, or as many as there are.
    fn ulpdu<'b>(&self, len: usize, buffer: &'b mut SmallVec<[u8; 128]>) -> &'b [u8]
    where
        'a: 'b,
    {
        let begin = self.head + LENGTH_LEN;
        let body = &self.input[begin..self.input.len().min(self.total - CRC_LEN).max(begin)];
        // Octets to the first marker behind the length field.
        let to_marker = match self.first {
            None => usize::MAX,
            Some(0) => MARKER_SPACING - begin,
            Some(first) => first.saturating_sub(begin),
        };
        if to_marker >= len {
            return &body[..len.min(body.len())];
        }
        let (front, rest) = body.split_at(to_marker.min(body.len()));
        buffer.extend_from_slice(front);
        for part in rest.chunks(MARKER_SPACING) {
            buffer.extend_from_slice(&part[MARKER_LEN.min(part.len())..]);
            if buffer.len() >= len {
                break;
            }
        }
        buffer.truncate(len);
        buffer
    }

    /// The CRC field's state. The FPDU is whole.
    fn crc(&self) -> CrcState {
        let (covered, field) = self.input[..self.total].split_at(self.total - CRC_LEN);
        let computed = crc32c(covered).to_le_bytes();
        // A fuzzer cannot guess a CRC: let it through to the code behind.
        if field == computed || cfg!(fuzzing) && field != [0; 4] {
            CrcState::Good
        } else if field == [0; 4] {
            CrcState::Zero
        } else {
            CrcState::Bad
        }
    }

    pub(super) fn crc_is_bad(&self) -> bool {
        self.crc() == CrcState::Bad
    }

    /// All that the FPDU says. It is whole.
    pub(super) fn read(&self, crc_in_use: Option<bool>) -> Fpdu {
        let mut fpdu = Fpdu {
            // From a field of 16 bits.
            ulpdu_len: self.ulpdu_len as u16,
            crc: self.crc(),
            crc_in_use,
            markers: self.framing.markers(),
            header: None,
            payload_len: 0,
            operation: Operation::None,
            error: self.marker_fault(),
        };
        let mut buffer = SmallVec::new();
        let front = self.ulpdu(ULPDU_PEEK.min(self.ulpdu_len), &mut buffer);
        let segment = match Segment::parse(front) {
            Ok(segment) => segment,
            Err(error) => {
                fpdu.error.get_or_insert_with(|| error.to_string());
                return fpdu;
            }
        };
        let header_len = segment.header_bytes().len();
        fpdu.payload_len = (self.ulpdu_len - header_len) as u16;
        fpdu.header = Some(match segment {
            Segment::Tagged { header, .. } => DdpHeader::Tagged(*header),
            Segment::Untagged { header, .. } => DdpHeader::Untagged(*header),
        });
        if let Some(fault) = fault(&segment) {
            fpdu.error.get_or_insert(fault);
        }
        let operation = if segment.opcode() == Opcode::TERMINATE {
            let mut whole = SmallVec::new();
            let ulpdu = self.ulpdu(self.ulpdu_len, &mut whole);
            let octets = &ulpdu[header_len.min(ulpdu.len())..];
            Terminate::parse(octets)
                .map(|parsed| Operation::Terminate(Box::new(parsed), octets.to_vec()))
                .map_err(|error| error.to_string())
        } else {
            operation(&segment)
        };
        match operation {
            Ok(operation) => fpdu.operation = operation,
            Err(error) => {
                fpdu.error.get_or_insert(error);
            }
        }
        fpdu
    }

    /// What is wrong with the markers, in words.
    fn marker_fault(&self) -> Option<String> {
        let at = self.markers().find(|&at| !self.points_back(at))?;
        let field = self.input.get(at + 2..)?.first_chunk()?;
        Some(format!(
            "MPA: at offset {at}: FPDUPTR is {:#x}, expected {:#x}",
            u16::from_be_bytes(*field),
            at.saturating_sub(self.head) as u16
        ))
    }
}

/// The header that follows DDP's, of all operations but a Terminate.
fn operation(segment: &Segment<'_>) -> Result<Operation, String> {
    let payload = segment.payload();
    match segment.opcode() {
        Opcode::READ_REQUEST => ReadRequest::parse(payload).copied().map(Operation::ReadRequest),
        Opcode::ATOMIC_REQUEST => {
            AtomicRequest::parse(payload).copied().map(Operation::AtomicRequest)
        }
        Opcode::ATOMIC_RESPONSE => {
            AtomicResponse::parse(payload).copied().map(Operation::AtomicResponse)
        }
        Opcode::IMMEDIATE | Opcode::IMMEDIATE_SE => match payload.first_chunk() {
            Some(octets) => Ok(Operation::Immediate(u64::from_be_bytes(*octets))),
            None => {
                let have = payload.len();
                return Err(format!("RDMAP: at offset 0: 8 octets needed, {have} found"));
            }
        },
        _ => Ok(Operation::None),
    }
    .map_err(|error| error.to_string())
}

/// The queue of an untagged message (RFC 5040 §4.1, RFC 7306 §4.1); `None` for tagged ones and
/// unknown codes.
const fn queue(opcode: Opcode) -> Option<u32> {
    match opcode {
        Opcode::READ_REQUEST | Opcode::ATOMIC_REQUEST => Some(ddp::QN_READ_REQUEST),
        Opcode::TERMINATE => Some(ddp::QN_TERMINATE),
        Opcode::ATOMIC_RESPONSE => Some(ddp::QN_ATOMIC_RESPONSE),
        Opcode::IMMEDIATE | Opcode::IMMEDIATE_SE => Some(ddp::QN_SEND),
        _ if opcode.is_send() => Some(ddp::QN_SEND),
        _ => None,
    }
}

/// What is wrong with a segment's header, in words.
fn fault(segment: &Segment<'_>) -> Option<String> {
    let opcode = segment.opcode();
    let queue = queue(opcode);
    if segment.ddp_version() != ddp::VERSION {
        return Some(format!("DDP: version is {}, expected 1", segment.ddp_version()));
    }
    if segment.rdmap_version() != rdmap::VERSION {
        return Some(format!("RDMAP: version is {}, expected 1", segment.rdmap_version()));
    }
    if opcode.name().is_none() {
        return Some(format!("RDMAP: opcode {opcode} is not known"));
    }
    match segment {
        Segment::Tagged { .. } if queue.is_some() => {
            Some(format!("RDMAP: {opcode} in a tagged segment"))
        }
        Segment::Untagged { .. } if queue.is_none() => {
            Some(format!("RDMAP: {opcode} in an untagged segment"))
        }
        Segment::Untagged { header, .. } if queue != Some(header.qn.get()) => {
            Some(format!("RDMAP: {opcode} on queue {}", header.qn))
        }
        _ => None,
    }
}

/// Whether `octet` may be the first one of a DDP header: version 1, nothing reserved.
#[inline]
pub(super) const fn is_control(octet: u8) -> bool {
    octet & (ddp::RESERVED_MASK | ddp::VERSION_MASK) == ddp::VERSION
}

/// Whether `front`, the first octets of a ULPDU of `len`, are those of a DDP segment that RFC 5040
/// and RFC 7306 allow. Octets that are not there are right.
#[inline]
fn is_header(front: &[u8], len: usize) -> bool {
    // The shorter of the two headers.
    if len < ddp::TaggedHeader::LEN {
        return false;
    }
    let Some(&control) = front.first() else {
        return true;
    };
    if !is_control(control) {
        return false;
    }
    let tagged = control & ddp::TAGGED != 0;
    if !tagged && len < ddp::UntaggedHeader::LEN {
        return false;
    }
    let Some(&rdmap_control) = front.get(1) else {
        return true;
    };
    let opcode = Opcode::from_control(rdmap_control);
    let queue = queue(opcode);
    if rdmap_control != opcode.control() || opcode.name().is_none() || tagged != queue.is_none() {
        return false;
    }
    let Some(queue) = queue else {
        return true;
    };
    // QN follows the octets that RDMAP has for itself.
    let qn = front.get(6..).unwrap_or_default();
    let qn = &qn[..qn.len().min(4)];
    if *qn != queue.to_be_bytes()[..qn.len()] {
        return false;
    }
    let last = control & ddp::LAST != 0;
    let payload = len - ddp::UntaggedHeader::LEN;
    match opcode {
        Opcode::READ_REQUEST => last && payload == ReadRequest::LEN,
        Opcode::ATOMIC_REQUEST => last && payload == AtomicRequest::LEN,
        Opcode::ATOMIC_RESPONSE => last && payload == AtomicResponse::LEN,
        Opcode::IMMEDIATE | Opcode::IMMEDIATE_SE => last && payload == 8,
        Opcode::TERMINATE => {
            last && (terminate::CONTROL_LEN..=terminate::MAX_LEN).contains(&payload)
        }
        _ => true,
    }
}
