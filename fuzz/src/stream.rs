//! A stream of FPDUs, from the first octet behind the start-up frames.

use userdma_proto::wire::{
    Error,
    iwarp::{
        ddp::{Segment, TaggedHeader, UntaggedHeader},
        fpdu::{self, Deframer, MarkerEncoder},
        rdmap::{AtomicRequest, AtomicResponse, Immediate, Opcode, ReadRequest},
        terminate::Terminate,
    },
};

use crate::Choices;

/// One octet of choices (bit 0: markers, bit 1: CRC, upper half: how many cuts), the cuts (two
/// octets each, little endian, taken modulo what is left of the stream), then the stream.
///
/// The FPDUs and the error do not depend on the cuts; made anew from their ULPDUs they take the
/// same room and are read as the same again.
pub fn iwarp_stream(data: &[u8]) {
    let mut choices = Choices::new(data);
    let flags: u8 = choices.any();
    let (markers, crc) = (flags & 1 != 0, flags & 2 != 0);
    let cuts: Vec<u16> = (0..flags >> 4).map(|_| choices.any()).collect();
    let stream = choices.rest();

    let whole = read(stream, Deframer::new(markers, crc), |have| {
        (have < stream.len()).then_some(stream.len())
    });
    let mut cuts = cuts.into_iter();
    let cut = read(stream, Deframer::new(markers, crc), |have| {
        let left = stream.len() - have;
        (left > 0).then(|| have + cuts.next().map_or(left, |cut| 1 + usize::from(cut) % left))
    });
    assert_eq!(whole, cut, "the cuts make a difference");
    by_need(stream, Deframer::new(markers, crc), &whole);

    for ulpdu in &whole.ulpdus {
        check_ulpdu(ulpdu);
    }
    anew(&whole, markers, crc);
}

/// What a stream was read as.
#[derive(Debug, PartialEq, Eq)]
struct Read {
    ulpdus: Vec<Vec<u8>>,
    /// Octets of the stream taken.
    used: usize,
    /// The error, with its offset counted from the stream's start.
    error: Option<Error>,
}

/// Reads a stream that arrives in pieces: `next` is told how many octets are there and says how
/// many will be, `None` at the end.
fn read(
    stream: &[u8],
    mut deframer: Deframer,
    mut next: impl FnMut(usize) -> Option<usize>,
) -> Read {
    let (mut ulpdus, mut used, mut scratch, mut have) = (Vec::new(), 0, Vec::new(), 0);
    loop {
        let input = &stream[used..have];
        let need = deframer.need(input);
        match deframer.next(input, &mut scratch) {
            Ok(Some(found)) => {
                assert!(need <= input.len(), "{need} octets wanted of {}", input.len());
                assert!(found.consumed <= input.len());
                assert!(fpdu::fpdu_len(found.ulpdu.len()) <= found.consumed);
                used += found.consumed;
                ulpdus.push(found.ulpdu.to_vec());
                assert!(scratch.capacity() <= stream.len(), "no more memory than input");
                assert_eq!(deframer.position(), used as u64);
            }
            Ok(None) => {
                assert!(need > input.len(), "{need} octets wanted of {}", input.len());
                match next(have) {
                    Some(more) => have = more,
                    None => return Read { ulpdus, used, error: None },
                }
            }
            Err(mut error) => {
                assert!(!error.to_string().is_empty());
                assert!(error.offset < input.len(), "{error}");
                // It stays.
                assert_eq!(deframer.next(&[], &mut scratch), Err(error));
                assert_eq!((deframer.need(&[]), deframer.need(input)), (0, 0));
                error.offset += used;
                return Read { ulpdus, used, error: Some(error) };
            }
        }
    }
}

/// Reads a stream by giving the deframer what it says it needs, and no more.
fn by_need(stream: &[u8], mut deframer: Deframer, whole: &Read) {
    let (mut used, mut have, mut scratch, mut found) = (0, 0, Vec::new(), 0);
    loop {
        // Two looks an FPDU: for its length, for the rest.
        for _ in 0..2 {
            have = have.max(used + deframer.need(&stream[used..have]));
            if have > stream.len() {
                assert_eq!((used, found, whole.error), (whole.used, whole.ulpdus.len(), None));
                return;
            }
        }
        match deframer.next(&stream[used..have], &mut scratch) {
            Ok(Some(fpdu)) => {
                assert_eq!(used + fpdu.consumed, have, "it needed more than it took");
                assert_eq!(fpdu.ulpdu, whole.ulpdus[found]);
                (used, found) = (have, found + 1);
            }
            Ok(None) => panic!("{have} octets were said to be enough"),
            Err(error) => {
                let error = Error { offset: error.offset + used, ..error };
                assert_eq!((used, Some(error)), (whole.used, whole.error));
                return;
            }
        }
    }
}

/// Frames the ULPDUs again.
fn anew(read: &Read, markers: bool, crc: bool) {
    let (mut encoder, mut stream) = (MarkerEncoder::new(crc), Vec::new());
    for ulpdu in &read.ulpdus {
        let mut plain = Vec::new();
        let start = fpdu::begin(&mut plain);
        plain.extend_from_slice(ulpdu);
        fpdu::finish(&mut plain, start, crc);
        assert_eq!(plain.len(), fpdu::fpdu_len(ulpdu.len()));
        if markers {
            let len = fpdu::marked_len(ulpdu.len(), stream.len() as u64);
            let before = stream.len();
            encoder.push(&plain, &mut stream);
            assert_eq!(stream.len() - before, len);
            assert_eq!(encoder.position(), stream.len() as u64);
        } else {
            stream.extend_from_slice(&plain);
        }
    }
    assert_eq!(stream.len(), read.used, "the same room");
    let again = self::read(&stream, Deframer::new(markers, crc), |have| {
        (have < stream.len()).then_some(stream.len())
    });
    assert_eq!(again.ulpdus, read.ulpdus);
    assert_eq!(again.error, None);
}

/// A ULPDU: its DDP header, and what its operation has behind it.
pub(crate) fn check_ulpdu(ulpdu: &[u8]) {
    let segment = match Segment::parse(ulpdu) {
        Ok(segment) => segment,
        Err(error) => {
            assert!(ulpdu.len() < UntaggedHeader::LEN, "{error}");
            return;
        }
    };
    assert_eq!([segment.header_bytes(), segment.payload()].concat(), ulpdu);
    let tagged = matches!(segment, Segment::Tagged { .. });
    let len = if tagged { TaggedHeader::LEN } else { UntaggedHeader::LEN };
    assert_eq!(segment.header_bytes().len(), len);
    assert!(!segment.opcode().to_string().is_empty());
    let payload = segment.payload();
    match segment.opcode() {
        Opcode::READ_REQUEST => {
            assert_eq!(ReadRequest::parse(payload).is_ok(), payload.len() >= ReadRequest::LEN);
        }
        Opcode::ATOMIC_REQUEST => {
            assert_eq!(AtomicRequest::parse(payload).is_ok(), payload.len() >= AtomicRequest::LEN);
        }
        Opcode::ATOMIC_RESPONSE => {
            let whole = payload.len() >= AtomicResponse::LEN;
            assert_eq!(AtomicResponse::parse(payload).is_ok(), whole);
        }
        Opcode::IMMEDIATE | Opcode::IMMEDIATE_SE => {
            assert_eq!(Immediate::parse(payload).is_ok(), payload.len() >= Immediate::LEN);
        }
        Opcode::TERMINATE => check_terminate(payload),
        _ => {}
    }
}

/// A Terminate's payload: what was read goes out, and is read as the same.
pub(crate) fn check_terminate(payload: &[u8]) {
    let terminate = match Terminate::parse(payload) {
        Ok(terminate) => terminate,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            assert!(payload.len() < userdma_proto::wire::iwarp::terminate::MAX_LEN, "{error}");
            return;
        }
    };
    assert!(!terminate.to_string().is_empty() && !format!("{terminate:?}").is_empty());
    assert_eq!(Terminate::parse_code(payload), Ok(terminate.code));
    let mut out = Vec::new();
    terminate.emit(&mut out);
    assert_eq!(Terminate::parse(&out), Ok(terminate), "{out:02x?}");
}
