//! Octets of a capture: a buffer in front of any reader, unpacked where they are gzip'd.

use alloc::{boxed::Box, vec, vec::Vec};
use core::ops::Range;
use std::io::{self, Chain, Cursor, Read};

use flate2::read::MultiGzDecoder;

use super::Error;

/// Size of the buffer, and the most that is asked of the source at a time. A fuzzer's files are
/// small: with a small one they fill it.
const CHUNK: usize = if cfg!(fuzzing) { 1 << 10 } else { 1 << 20 };

/// The most that is asked of the unpacker at a time: what it says to be damaged, it does not hand
/// out up to the damage, and so this much may be lost in front of it.
const GZIP_STEP: usize = 1024;

const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

/// A window into the octets of a capture that moves forward only.
pub(super) struct Input<R> {
    source: Source<R>,
    /// Always as long as it may be used.
    buffer: Vec<u8>,
    /// What lies ahead of us in `buffer`.
    start: usize,
    end: usize,
    /// Where `start` is in the capture.
    position: u64,
}

enum Source<R> {
    Plain(R),
    Gzip(Box<MultiGzDecoder<Chain<Cursor<Vec<u8>>, R>>>),
}

impl<R> Input<R> {
    /// Octets of the capture that were consumed.
    pub(super) const fn position(&self) -> u64 {
        self.position
    }

    /// The octets that lie ahead, as far as they have been read.
    #[inline]
    pub(super) fn ahead(&self) -> &[u8] {
        &self.buffer[self.start..self.end]
    }

    /// Goes on by `n` octets of [`Input::ahead`]. They stay in the buffer until the next
    /// [`Input::want`]; the range of `part` of them is given back for [`Input::octets`].
    #[inline]
    pub(super) fn consume(&mut self, n: usize, part: Range<usize>) -> Range<usize> {
        debug_assert!(n <= self.end - self.start);
        let range = self.start + part.start..self.start + part.end;
        self.start += n;
        self.position += n as u64;
        range
    }

    /// Octets that were consumed.
    #[inline]
    pub(super) fn octets(&self, range: Range<usize>) -> &[u8] {
        &self.buffer[range]
    }
}

impl<R: Read> Input<R> {
    /// Looks whether `inner` is gzip'd.
    pub(super) fn new(mut inner: R) -> Result<Self, Error> {
        let mut buffer = vec![0; CHUNK];
        let mut end = 0;
        while end < GZIP_MAGIC.len() {
            match read(&mut inner, &mut buffer[end..])? {
                0 => break,
                n => end += n,
            }
        }
        let source = if buffer[..end].starts_with(&GZIP_MAGIC) {
            let front = Cursor::new(buffer[..end].to_vec());
            end = 0;
            Source::Gzip(Box::new(MultiGzDecoder::new(front.chain(inner))))
        } else {
            Source::Plain(inner)
        };
        Ok(Self { source, buffer, start: 0, end, position: 0 })
    }

    /// Sees to it that `need` octets lie ahead, if the capture has them. Says how many do.
    #[inline]
    pub(super) fn want(&mut self, need: usize) -> Result<usize, Error> {
        let have = self.end - self.start;
        if have >= need { Ok(have) } else { self.refill(need) }
    }

    #[cold]
    fn refill(&mut self, need: usize) -> Result<usize, Error> {
        self.buffer.copy_within(self.start..self.end, 0);
        self.end -= self.start;
        self.start = 0;
        while self.end < need {
            if self.end == self.buffer.len() {
                // Doubled at most: a length is believed only as far as octets follow it.
                let len = (2 * self.buffer.len()).min(need.next_multiple_of(CHUNK));
                self.buffer.resize(len, 0);
            }
            match self.read()? {
                0 => break,
                n => self.end += n,
            }
        }
        Ok(self.end)
    }

    fn read(&mut self) -> Result<usize, Error> {
        let room = &mut self.buffer[self.end..];
        match &mut self.source {
            Source::Plain(source) => {
                let most = room.len().min(CHUNK);
                Ok(read(source, &mut room[..most])?)
            }
            Source::Gzip(source) => {
                let most = room.len().min(GZIP_STEP);
                read(source, &mut room[..most]).map_err(|why| match why.kind() {
                    io::ErrorKind::UnexpectedEof
                    | io::ErrorKind::InvalidInput
                    | io::ErrorKind::InvalidData => {
                        Error::Gzip { at: self.position + self.end as u64, why }
                    }
                    _ => Error::Io(why),
                })
            }
        }
    }
}

fn read(source: &mut impl Read, room: &mut [u8]) -> io::Result<usize> {
    loop {
        match source.read(room) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::tests::all, *};
    use flate2::{Compression, write::GzEncoder};
    use hex_literal::hex;
    use std::{format, io::Write};

    fn gzip(octets: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
        encoder.write_all(octets).unwrap();
        encoder.finish().unwrap()
    }

    /// `n` frames of 8 octets that do not pack well.
    fn capture(n: u64) -> Vec<u8> {
        let mut octets = hex!("d4c3b2a1 0200 0400 00000000 00000000 00000400 01000000").to_vec();
        for i in 0..n {
            octets.extend(hex!("01000000 02000000 08000000 08000000"));
            octets.extend(i.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
        }
        octets
    }

    #[test]
    fn what_comes_out_of_gzip_is_the_same() {
        let octets = capture(3000);
        assert_eq!(all(&gzip(&octets)[..]), all(&octets[..]));
        // In several members, cut anywhere.
        let (a, b) = octets.split_at(25_001);
        assert_eq!(all(&[gzip(a), gzip(b)].concat()[..]), all(&octets[..]));
    }

    #[test]
    fn what_comes_before_the_end_of_a_cut_gzip_is_read() {
        let octets = capture(100);
        let whole = all(&octets[..]).0;
        let packed = gzip(&octets);
        let mut most = 0;
        for have in 2..packed.len() {
            let (frames, error) = all(&packed[..have]);
            assert_eq!(frames, whole[..frames.len()]);
            let error = error.unwrap();
            let told = "the gzip stream is damaged or cut off: ";
            assert!(error.starts_with(told), "{have} octets: {error}");
            // Not less than with one octet less.
            assert!(frames.len() >= most);
            most = frames.len();
        }
        // Without the last octet of the trailer all is there.
        assert_eq!(most, 100);
    }

    #[test]
    fn what_comes_before_the_damage_of_a_gzip_is_read() {
        let octets = capture(20_000);
        let mut packed = gzip(&octets);
        let at = packed.len() / 2;
        packed[at..at + 64].fill(0xff);
        let (frames, error) = all(&packed[..]);
        assert!(frames.len() > 5000, "{} frames", frames.len());
        assert!(error.is_some());
        // A wrong checksum comes to light after everything else.
        let mut packed = gzip(&octets);
        let at = packed.len() - 8;
        packed[at] ^= 1;
        let (frames, error) = all(&packed[..]);
        assert_eq!(frames.len(), 20_000);
        let told = format!("the gzip stream is damaged or cut off: {} octets of", octets.len());
        assert!(error.unwrap().starts_with(&told));
    }

    #[test]
    fn the_buffer_grows_only_as_octets_come() {
        let octets = vec![7; 3 * CHUNK];
        let mut input = Input::new(&octets[..]).unwrap();
        assert_eq!(input.want(200 << 20).unwrap(), octets.len());
        assert!(input.buffer.len() <= 2 * octets.len());
        assert_eq!(input.ahead(), octets);
    }

    #[test]
    fn the_buffer_stays_as_it_is_over_many_records() {
        let octets = vec![7; 20 * CHUNK];
        let mut input = Input::new(&octets[..]).unwrap();
        for n in (1..100_000).cycle().step_by(997) {
            if input.want(n).unwrap() < n {
                break;
            }
            let range = input.consume(n, 0..n);
            assert_eq!(input.octets(range).len(), n);
        }
        assert!(input.position() > 19 * CHUNK as u64);
        assert_eq!(input.buffer.len(), CHUNK);
    }

    #[test]
    fn an_interrupted_read_is_tried_again() {
        struct Interrupted<'a>(&'a [u8], bool);
        impl Read for Interrupted<'_> {
            fn read(&mut self, room: &mut [u8]) -> io::Result<usize> {
                self.1 = !self.1;
                if self.1 { Err(io::ErrorKind::Interrupted.into()) } else { self.0.read(room) }
            }
        }
        let octets = capture(5);
        assert_eq!(all(Interrupted(&octets, false)), all(&octets[..]));
    }
}
