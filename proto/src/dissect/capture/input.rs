//! Octets of a capture: a buffer in front of any reader, unpacked where they are gzip'd.

use alloc::{boxed::Box, vec, vec::Vec};
use core::ops::Range;
use std::io::{self, Chain, Cursor, Read};

use flate2::read::MultiGzDecoder;

use super::Error;

/// Size of the buffer, and the most that is asked of the source at a time.
const CHUNK: usize = 1 << 20;

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
