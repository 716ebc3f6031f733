//! Octets in order that wait, and which frames brought them.

use alloc::{collections::VecDeque, vec::Vec};

/// Octets of a stream, in order.
#[derive(Debug, Clone, Copy)]
pub(in crate::dissect) struct Chunk<'a> {
    /// The frame that made them available.
    pub(in crate::dissect) number: u64,
    /// Their place in the stream: a sequence number that does not wrap.
    pub(in crate::dissect) pos: u64,
    /// Whether a segment begins with them.
    pub(in crate::dissect) starts: bool,
    pub(in crate::dissect) octets: &'a [u8],
}

impl Chunk<'_> {
    pub(super) fn advance(&mut self, len: usize) {
        self.pos += len as u64;
        self.starts &= len == 0;
        self.octets = &self.octets[len..];
    }
}

/// Octets in order that are kept, and which frames brought them.
#[derive(Debug, Default)]
pub(super) struct Backlog {
    octets: Vec<u8>,
    /// What is in front of this is done with.
    base: usize,
    /// Place in the stream of the octet at `base`.
    pub(super) pos: u64,
    /// The first one covers `pos`.
    arrivals: VecDeque<Arrival>,
}

/// From `pos` on, octets came with frame `number`.
#[derive(Debug, Clone, Copy)]
struct Arrival {
    pos: u64,
    number: u64,
    /// Whether a segment begins at `pos`.
    starts: bool,
}

impl Backlog {
    /// The longest buffer that is kept while it is empty.
    const KEEP: usize = 4096;

    pub(super) fn octets(&self) -> &[u8] {
        &self.octets[self.base..]
    }

    pub(super) const fn len(&self) -> usize {
        self.octets.len() - self.base
    }

    /// Octets of memory, roughly.
    pub(super) fn takes(&self) -> usize {
        self.octets.len() + self.arrivals.len() * size_of::<Arrival>()
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Where octets came with another frame: place, and whether a segment begins there.
    pub(super) fn arrivals(&self) -> impl Iterator<Item = (u64, bool)> {
        self.arrivals.iter().map(|arrival| (arrival.pos, arrival.starts))
    }

    /// Appends octets that follow those that are here.
    pub(super) fn append(&mut self, chunk: &Chunk<'_>) {
        if self.is_empty() {
            self.clear();
            self.pos = chunk.pos;
        }
        if chunk.starts || self.arrivals.back().is_none_or(|last| last.number != chunk.number) {
            let Chunk { number, pos, starts, .. } = *chunk;
            self.arrivals.push_back(Arrival { pos, number, starts });
        }
        self.octets.extend_from_slice(chunk.octets);
    }

    /// Lets go of `len` octets at the front.
    pub(super) fn advance(&mut self, len: usize) {
        self.base += len;
        self.pos += len as u64;
        while self.arrivals.get(1).is_some_and(|next| next.pos <= self.pos) {
            self.arrivals.pop_front();
        }
        if self.is_empty() {
            self.clear();
        } else if self.base > self.len() {
            self.octets.drain(..self.base);
            self.base = 0;
        }
    }

    /// Lets go of what precedes the next segment's first octet. False, and empty, if there is none.
    pub(super) fn skip_to_segment(&mut self) -> bool {
        let pos = self.pos;
        let Some(next) = self.arrivals.iter().find(|a| a.starts && a.pos > pos) else {
            self.clear();
            return false;
        };
        self.advance((next.pos - pos) as usize);
        !self.is_empty()
    }

    pub(super) fn clear(&mut self) {
        self.base = 0;
        self.octets.clear();
        self.arrivals.clear();
        if self.octets.capacity() > Self::KEEP {
            self.octets = Vec::new();
        }
        if self.arrivals.capacity() > Self::KEEP / size_of::<Arrival>() {
            self.arrivals = VecDeque::new();
        }
    }

    /// The frame that brought the octet at `offset` from the front.
    pub(super) fn number_at(&self, offset: usize) -> u64 {
        let pos = self.pos + offset as u64;
        let after = self.arrivals.partition_point(|arrival| arrival.pos <= pos);
        after.checked_sub(1).and_then(|at| self.arrivals.get(at)).map_or(0, |found| found.number)
    }

    /// The first frame after `number` that brought any of the octets.
    pub(super) fn first_frame_after(&self, number: u64) -> Option<u64> {
        let after = self.arrivals.partition_point(|arrival| arrival.number <= number);
        self.arrivals.get(after).map(|arrival| arrival.number)
    }
}
