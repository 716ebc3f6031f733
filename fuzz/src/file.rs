//! A capture file, read and decoded.

use std::{
    collections::hash_map::DefaultHasher,
    fmt::{self, Write},
    hash::Hasher,
    io::{self, Read},
};

use userdma_analyze::Analyser;
use userdma_proto::{
    dissect::{
        Dissector, Frame, Iwarp, Options,
        capture::{Error, Reader},
    },
    wire::iwarp::mpa::MAX_PRIVATE_DATA,
};

use crate::{Choices, mad};

/// Two octets of choices, then the file. The first octet seeds the sizes of reads. The second makes
/// the decoder's bounds small; under `cfg(fuzzing)` its lowest bit says which of both is tried.
///
/// The same frames come out, and the same end, however the file is read (but for damaged gzip); there
/// is one frame for each record, in order, and what it says of itself agrees with the record. With
/// small bounds the frames are the same but for what they carry.
pub fn dissect_file(data: &[u8]) {
    let mut choices = Choices::new(data);
    let (seed, small) = (choices.any::<u8>(), choices.any::<u8>());
    let file = choices.rest();
    let whole = decode(file, Options::default());
    let heads = |decoded: &Decoded| decoded.frames.iter().map(|f| f.head).collect::<Vec<_>>();
    if !cfg!(fuzzing) || small & 1 == 0 {
        let pieces = Pieces { rest: file, seed, interrupted: false };
        let pieces = decode(pieces, Options::default());
        if whole.damaged_gzip || pieces.damaged_gzip {
            // What the unpacker made of a damaged piece is lost; how large pieces are, reads say.
            let both = whole.frames.len().min(pieces.frames.len());
            assert_eq!(heads(&whole)[..both], heads(&pieces)[..both]);
        } else {
            assert_eq!(whole, pieces, "the sizes of reads make a difference");
        }
    }
    if !cfg!(fuzzing) || small & 1 != 0 {
        let bound = usize::from(small);
        let narrow = Options {
            max_streams: 1 + bound % 4,
            max_stream_octets: bound * 16,
            max_fragment_octets: bound * 16,
            max_held_octets: bound * 32,
            max_waiting: bound % 8,
            max_waiting_octets: bound * 64,
            ..Options::default()
        };
        let narrow = decode(file, narrow);
        assert_eq!(whole.end, narrow.end);
        assert_eq!(heads(&whole), heads(&narrow), "bounds are about what frames carry");
    }
}

/// What came out.
#[derive(Debug, PartialEq)]
struct Decoded {
    frames: Vec<Seen>,
    /// The error in words, if the file has no good end.
    end: Option<String>,
    damaged_gzip: bool,
}

/// A frame, as far as it is compared.
#[derive(Debug, PartialEq)]
struct Seen {
    /// Number, time, lengths.
    head: (u64, Option<i128>, u32, u32),
    /// Hash of all it says.
    all: u64,
}

fn decode(input: impl Read, options: Options) -> Decoded {
    let mut frames = Vec::new();
    let mut reader = match Reader::new(input) {
        Ok(reader) => reader,
        Err(error) => {
            let damaged_gzip = matches!(error, Error::Gzip { .. });
            return Decoded { frames, end: Some(told(&error)), damaged_gzip };
        }
    };
    let waiting = options.max_waiting;
    let mut dissector = Dissector::new(options);
    let (mut heads, mut before) = (Vec::new(), reader.position());
    let mut analyser = Analyser::with_flows();
    let mut damaged_gzip = false;
    let end = loop {
        match reader.next_record() {
            Ok(Some(record)) => {
                let caplen = u32::try_from(record.data.len()).expect("a block has 32-bit lengths");
                assert_eq!(record.number, heads.len() as u64 + 1);
                heads.push((record.number, record.time_ns, record.len, caplen));
                dissector.handle_record(&record);
            }
            Ok(None) => break None,
            Err(error) => {
                damaged_gzip = matches!(error, Error::Gzip { .. });
                let error = told(&error);
                // It stays.
                let again = reader.next_record().map(|_| ()).expect_err("an end");
                assert_eq!(told(&again), error);
                break Some(error);
            }
        }
        take(&mut dissector, &mut analyser, &mut frames);
        assert!(heads.len() - frames.len() <= waiting, "too many frames wait");
        assert!(reader.position() > before, "a record takes octets");
        before = reader.position();
    };
    dissector.finish();
    take(&mut dissector, &mut analyser, &mut frames);
    assert_eq!(frames.iter().map(|frame| frame.head).collect::<Vec<_>>(), heads);
    analyser.finish();
    for finding in analyser.take() {
        let named = finding.frames.iter().all(|&frame| (1..=frames.len() as u64).contains(&frame));
        assert!(named && !finding.frames.is_empty() && !finding.text.is_empty(), "{finding:?}");
    }
    for flow in analyser.flows() {
        assert!(flow.frames[0] >= 1 && flow.frames[0] <= flow.frames[1], "{flow:?}");
    }
    Decoded { frames, end, damaged_gzip }
}

fn told(error: &Error) -> String {
    let text = error.to_string();
    assert!(!text.is_empty());
    text
}

fn take(dissector: &mut Dissector, analyser: &mut Analyser, frames: &mut Vec<Seen>) {
    while let Some(frame) = dissector.poll_frame() {
        check(&frame);
        analyser.push(&frame);
        let mut all = Hash(DefaultHasher::new());
        write!(all, "{frame:?}").expect("a hash takes all");
        let head = (frame.number, frame.time_ns, frame.len, frame.caplen);
        frames.push(Seen { head, all: all.0.finish() });
    }
}

/// What a frame says holds together.
fn check(frame: &Frame) {
    for layer in &frame.stack {
        assert!(!layer.name().is_empty());
    }
    for roce in &frame.roce {
        assert!(roce.headers.is_some() || roce.error.is_some(), "{roce:?}");
        if let Some(octets) = &roce.mad {
            mad::check_mad(octets);
        }
    }
    for iwarp in &frame.iwarp {
        match iwarp {
            Iwarp::Start(start) => assert!(start.private_data.len() <= MAX_PRIVATE_DATA),
            Iwarp::Fpdu(fpdu) => {
                assert!(fpdu.header.is_some() || fpdu.error.is_some(), "{fpdu:?}");
                assert!(fpdu.payload_len <= fpdu.ulpdu_len);
            }
            Iwarp::Error(what) => assert!(!what.is_empty()),
        }
    }
    for error in [&frame.error].into_iter().chain(frame.roce.iter().map(|roce| &roce.error)) {
        assert!(error.as_ref().is_none_or(|what| !what.is_empty()));
    }
}

struct Hash(DefaultHasher);

impl Write for Hash {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.0.write(text.as_bytes());
        Ok(())
    }
}

/// Reads that end anywhere, now and then interrupted.
struct Pieces<'a> {
    rest: &'a [u8],
    seed: u8,
    interrupted: bool,
}

impl Read for Pieces<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.seed = self.seed.wrapping_mul(5).wrapping_add(17);
        self.interrupted = self.seed.is_multiple_of(8) && !self.interrupted;
        if self.interrupted {
            return Err(io::ErrorKind::Interrupted.into());
        }
        let size = if self.seed & 4 == 0 { usize::MAX } else { 1 + usize::from(self.seed >> 3) };
        let n = size.min(buffer.len()).min(self.rest.len());
        let (piece, rest) = self.rest.split_at(n);
        buffer[..n].copy_from_slice(piece);
        self.rest = rest;
        Ok(n)
    }
}
