//! IP fragments put together (RFC 791, RFC 8200 §4.5).
//!
//! ```text
//!   offset  0        1480     2960    3500
//!           | piece  |        | piece |      known: the last piece says where the datagram ends
//!           `--------'--gap---'-------'      whole once the pieces cover everything
//! ```
//!
//! Fragments may come in any order, and more than once. Where they overlap, the octets that came
//! first stay for IPv4; an IPv6 datagram is dropped as a whole (RFC 5722). What a capture cut cannot
//! complete a datagram. Memory is bounded: the datagram that was begun first goes first.

use alloc::{collections::BTreeMap, format, string::String, vec::Vec};
use core::net::IpAddr;
use std::collections::HashMap;

use smallvec::SmallVec;

/// Datagrams in the making at a time.
const MAX_DATAGRAMS: usize = 16_384;
/// No datagram's payload is longer, whatever its headers.
const MAX_PAYLOAD: u32 = 65_535;
/// Pieces of a datagram that come later than this belong to another one that was given the same
/// Identification (RFC 8200 §4.5).
const LIFETIME_NS: i128 = 60_000_000_000;
/// What a piece, and a datagram, are taken to need besides their octets.
const PIECE_COST: usize = 64;
const DATAGRAM_COST: usize = 256;

/// What the fragments of one datagram have in common.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) src: IpAddr,
    pub(super) dst: IpAddr,
    /// Identification: 16 bits of IPv4, 32 bits of IPv6.
    pub(super) id: u32,
    /// Of IPv4; 0 for IPv6, where it is no part of the name.
    pub(super) protocol: u8,
    /// How many IP headers are around it: a tunnel's fragments are not those of what it carries.
    pub(super) level: usize,
}

/// A fragment that was captured whole.
#[derive(Debug, Clone, Copy)]
pub(super) struct Fragment<'a> {
    /// In octets.
    pub(super) offset: u32,
    /// Whether it is not the last.
    pub(super) more: bool,
    pub(super) payload: &'a [u8],
    /// What stands in front of it.
    pub(super) head: Head<'a>,
}

/// What stands in front of a fragment's payload.
#[derive(Debug, Clone, Copy)]
pub(super) enum Head<'a> {
    /// The header with its options.
    V4(&'a [u8]),
    /// The header and the extension headers in front of the fragment header; where among them is
    /// the Next Header field that names the fragment header, and what it is without one.
    V6 { octets: &'a [u8], next_header_at: usize, next_header: u8 },
}

/// What came of a fragment.
#[derive(Debug)]
pub(super) enum Outcome {
    /// More must come.
    Waiting,
    /// The datagram is whole: header and payload as if it had never been cut.
    Whole(Vec<u8>),
    /// Something is wrong, in words.
    Wrong(String),
}

/// All datagrams that are not whole yet.
#[derive(Debug)]
pub(super) struct Fragments {
    max_octets: usize,
    held: usize,
    begun: u64,
    datagrams: HashMap<Key, Datagram>,
    /// By age: the number of a datagram's beginning.
    ages: BTreeMap<u64, Key>,
}

#[derive(Debug)]
struct Datagram {
    begun: u64,
    time_ns: Option<i128>,
    /// Octets it holds, with what they cost.
    cost: usize,
    /// By offset; none overlaps another.
    pieces: BTreeMap<u32, Vec<u8>>,
    /// Octets of all pieces.
    covered: u32,
    /// Where the last piece so far ends.
    reach: u32,
    /// Where the datagram ends, once it is known.
    total: Option<u32>,
    /// Head of the first fragment, as it was before the datagram was cut, but for its length.
    head: Option<Vec<u8>>,
    /// IPv6 fragments overlapped: everything is dropped, also what is still to come.
    dropped: bool,
}

impl Fragments {
    /// None so far; all together may hold `max_octets`.
    pub(super) fn new(max_octets: usize) -> Self {
        Self { max_octets, held: 0, begun: 0, datagrams: HashMap::new(), ages: BTreeMap::new() }
    }

    /// Takes a fragment.
    pub(super) fn insert(
        &mut self,
        key: Key,
        time_ns: Option<i128>,
        fragment: &Fragment<'_>,
    ) -> Outcome {
        let Fragment { offset, more, payload, .. } = *fragment;
        let end = offset.saturating_add(u32::try_from(payload.len()).unwrap_or(u32::MAX));
        if payload.is_empty() {
            return Outcome::Wrong(String::from("IP fragment: it carries nothing"));
        }
        if more && !payload.len().is_multiple_of(8) {
            return Outcome::Wrong(format!(
                "IP fragment: {} octets, a multiple of 8 expected where more follow",
                payload.len()
            ));
        }
        if end > MAX_PAYLOAD {
            return Outcome::Wrong(format!(
                "IP fragment: it ends at octet {end}, beyond the {MAX_PAYLOAD} of any datagram"
            ));
        }
        if self.datagrams.get(&key).is_some_and(|datagram| datagram.is_older_than(time_ns)) {
            self.remove(&key);
        }
        let datagram = self.datagrams.entry(key).or_insert_with(|| {
            self.begun += 1;
            self.ages.insert(self.begun, key);
            self.held += DATAGRAM_COST;
            Datagram::new(self.begun, time_ns)
        });
        let before = datagram.cost;
        let problem = datagram.insert(fragment, end, key.src.is_ipv6());
        self.held = self.held - before + datagram.cost;
        if let Some(problem) = problem {
            return Outcome::Wrong(problem);
        }
        if datagram.is_whole() {
            return self.remove(&key).map_or(Outcome::Waiting, Datagram::finish);
        }
        while self.held > self.max_octets || self.datagrams.len() > MAX_DATAGRAMS {
            let Some((_, oldest)) = self.ages.first_key_value() else { break };
            let oldest = *oldest;
            self.remove(&oldest);
        }
        Outcome::Waiting
    }

    fn remove(&mut self, key: &Key) -> Option<Datagram> {
        let datagram = self.datagrams.remove(key)?;
        self.ages.remove(&datagram.begun);
        self.held -= datagram.cost;
        Some(datagram)
    }
}

impl Datagram {
    fn new(begun: u64, time_ns: Option<i128>) -> Self {
        Self {
            begun,
            time_ns,
            cost: DATAGRAM_COST,
            pieces: BTreeMap::new(),
            covered: 0,
            reach: 0,
            total: None,
            head: None,
            dropped: false,
        }
    }

    fn is_older_than(&self, time_ns: Option<i128>) -> bool {
        self.time_ns.zip(time_ns).is_some_and(|(then, now)| now.saturating_sub(then) > LIFETIME_NS)
    }

    fn is_whole(&self) -> bool {
        self.head.is_some() && self.total == Some(self.covered)
    }

    /// Takes a fragment that ends at `end`; tells what is wrong with it.
    fn insert(&mut self, fragment: &Fragment<'_>, end: u32, v6: bool) -> Option<String> {
        if self.dropped {
            return None;
        }
        let start = fragment.offset;
        let ends_here = !fragment.more;
        let beyond = self.total.is_some_and(|total| end > total || (ends_here && end != total));
        if beyond || (ends_here && self.reach > end) {
            return Some(format!(
                "IP fragment: octets {start} to {end} do not fit into what other fragments say \
                 about the datagram's length"
            ));
        }
        let gaps = self.gaps(start, end);
        if v6 && gaps.as_slice() != [(start, end)] {
            if self.pieces.get(&start).is_some_and(|piece| piece == fragment.payload) {
                return None; // The same once more: RFC 8200 §4.5 lets it pass.
            }
            self.drop_all();
            return Some(format!(
                "IPv6 fragment: octets {start} to {end} overlap others, the datagram is dropped \
                 (RFC 5722)"
            ));
        }
        for (from, to) in gaps {
            let piece = fragment.payload[(from - start) as usize..(to - start) as usize].to_vec();
            self.cost += PIECE_COST + piece.len();
            self.covered += to - from;
            self.pieces.insert(from, piece);
        }
        self.reach = self.reach.max(end);
        if ends_here {
            self.total = Some(end);
        }
        if start == 0 && self.head.is_none() {
            let head = fragment.head.uncut();
            self.cost += head.len();
            self.head = Some(head);
        }
        None
    }

    /// What of `start..end` is not there yet. Takes time by how many pieces there are within.
    fn gaps(&self, start: u32, end: u32) -> SmallVec<[(u32, u32); 4]> {
        let mut gaps = SmallVec::new();
        let mut at = start;
        if let Some((&from, piece)) = self.pieces.range(..=start).next_back() {
            at = at.max(from + piece.len() as u32);
        }
        for (&from, piece) in self.pieces.range(start..end) {
            if from > at {
                gaps.push((at, from));
            }
            at = at.max(from + piece.len() as u32);
        }
        if at < end {
            gaps.push((at, end));
        }
        gaps
    }

    fn drop_all(&mut self) {
        self.pieces.clear();
        self.head = None;
        self.cost = DATAGRAM_COST;
        self.dropped = true;
    }

    /// The datagram, which is whole.
    fn finish(self) -> Outcome {
        let mut octets = self.head.unwrap_or_default();
        let head_len = octets.len();
        octets.reserve_exact(self.covered as usize);
        for piece in self.pieces.values() {
            octets.extend_from_slice(piece);
        }
        let v4 = octets.first().is_some_and(|first| first >> 4 == 4);
        let (at, len) = if v4 { (2, octets.len()) } else { (4, octets.len().saturating_sub(40)) };
        let Ok(len) = u16::try_from(len) else {
            return Outcome::Wrong(format!(
                "IP fragments: {head_len} octets of headers and {} of payload are more than a \
                 datagram holds",
                self.covered
            ));
        };
        if let Some(field) = octets.get_mut(at..at + 2) {
            field.copy_from_slice(&len.to_be_bytes());
        }
        Outcome::Whole(octets)
    }
}

impl Head<'_> {
    /// As it was before the datagram was cut, but for the length.
    fn uncut(self) -> Vec<u8> {
        match self {
            Self::V4(header) => {
                let mut head = header.to_vec();
                // "More fragments" and the offset go, "don't fragment" stays.
                if let Some([high, low]) = head.get_mut(6..8) {
                    *high &= 0xc0;
                    *low = 0;
                }
                head
            }
            Self::V6 { octets, next_header_at, next_header } => {
                let mut head = octets.to_vec();
                if let Some(field) = head.get_mut(next_header_at) {
                    *field = next_header;
                }
                head
            }
        }
    }
}
