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

#[cfg(test)]
mod tests {
    use super::*;
    use hex_literal::hex;
    use proptest::{prelude::*, sample::Index};
    use std::{
        time::{Duration, Instant},
        vec,
    };

    const HEADER: [u8; 20] = hex!("4500 05dc 1234 2000 4011 0000 0a630002 0a630003");

    fn key(id: u32) -> Key {
        let [src, dst] = [[10, 99, 0, 2], [10, 99, 0, 3]].map(IpAddr::from);
        Key { src, dst, id, protocol: 17, level: 1 }
    }

    fn key6() -> Key {
        let [src, dst] = ["fd99::2", "fd99::3"].map(|ip| ip.parse().unwrap());
        Key { src, dst, id: 7, protocol: 0, level: 1 }
    }

    fn piece(offset: usize, more: bool, payload: &[u8]) -> Fragment<'_> {
        Fragment { offset: offset as u32, more, payload, head: Head::V4(&HEADER) }
    }

    /// `payload` cut after each of `cuts` multiples of 8 octets.
    fn cut<'a>(payload: &'a [u8], cuts: &[Index]) -> Vec<Fragment<'a>> {
        let words = payload.len().div_ceil(8);
        let mut at: Vec<usize> = cuts.iter().map(|cut| cut.index(words) * 8).collect();
        at.extend([0, payload.len()]);
        at.sort_unstable();
        at.dedup();
        at.windows(2)
            .map(|ends| piece(ends[0], ends[1] < payload.len(), &payload[ends[0]..ends[1]]))
            .collect()
    }

    fn octets(outcome: Outcome) -> Vec<u8> {
        match outcome {
            Outcome::Whole(octets) => octets,
            other => panic!("{other:?}"),
        }
    }

    fn problem(outcome: Outcome) -> String {
        match outcome {
            Outcome::Wrong(what) => what,
            other => panic!("{other:?}"),
        }
    }

    proptest! {
        #[test]
        fn fragments_in_any_order_and_twice_make_the_datagram(
            payload in prop::collection::vec(any::<u8>(), 9..2000),
            cuts in prop::collection::vec(any::<Index>(), 1..20),
            order in any::<u64>(),
            v6 in any::<bool>(),
        ) {
            let mut pieces = cut(&payload, &cuts);
            let again = pieces.clone();
            pieces.extend(again);
            let mut rank = order;
            pieces.sort_by_cached_key(|_| {
                rank = rank.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                rank >> 32
            });
            let key = if v6 { key6() } else { key(1) };
            let mut fragments = Fragments::new(1 << 20);
            let mut whole = Vec::new();
            for piece in &pieces {
                match fragments.insert(key, None, piece) {
                    Outcome::Whole(octets) => whole.push(octets),
                    Outcome::Waiting => {}
                    Outcome::Wrong(what) => prop_assert!(false, "{what}"),
                }
            }
            // The second copies may make a second datagram, or be what is left over.
            prop_assert!(!whole.is_empty());
            for octets in whole {
                prop_assert_eq!(&octets[20..], &payload);
                prop_assert_eq!(&octets[2..4], &(octets.len() as u16).to_be_bytes());
                prop_assert_eq!(&octets[6..8], &[0, 0]);
            }
        }

        #[test]
        fn the_first_octets_win_over_ipv4(
            pieces in prop::collection::vec((0usize..30, 1usize..12, any::<u8>()), 1..60),
        ) {
            // The model: one octet a place, taken by who comes first.
            let mut model = vec![None; 42 * 8];
            let mut fragments = Fragments::new(1 << 20);
            for (from, len, fill) in pieces {
                let payload = vec![fill; len * 8];
                let outcome = fragments.insert(key(1), None, &piece(from * 8, true, &payload));
                prop_assert!(matches!(outcome, Outcome::Waiting));
                for octet in &mut model[from * 8..(from + len) * 8] {
                    octet.get_or_insert(fill);
                }
            }
            // What is missing is filled, the last piece ends it.
            let blank = vec![0xee; model.len()];
            let outcome = fragments.insert(key(1), None, &piece(0, true, &blank));
            prop_assert!(matches!(outcome, Outcome::Waiting));
            let whole = octets(fragments.insert(key(1), None, &piece(model.len(), false, b"end")));
            let want: Vec<u8> = model.into_iter().map(|octet| octet.unwrap_or(0xee)).collect();
            prop_assert_eq!(&whole[20..], &[&want[..], b"end"].concat());
        }

        #[test]
        fn memory_stays_within_its_bound(
            pieces in prop::collection::vec(
                (0u32..40, 0usize..200, 1usize..20, any::<bool>(), any::<bool>()), 1..300),
        ) {
            let mut fragments = Fragments::new(20_000);
            let octets = [0; 160];
            for (id, from, len, more, v6) in pieces {
                let key = if v6 { Key { id, ..key6() } } else { key(id) };
                fragments.insert(key, None, &piece(from * 8, more, &octets[..len * 8]));
                let cost: usize = fragments.datagrams.values().map(|datagram| datagram.cost).sum();
                prop_assert_eq!(fragments.held, cost);
                prop_assert_eq!(fragments.ages.len(), fragments.datagrams.len());
                prop_assert!(fragments.held <= 20_000);
                for datagram in fragments.datagrams.values().filter(|datagram| !datagram.dropped) {
                    let covered: usize = datagram.pieces.values().map(Vec::len).sum();
                    prop_assert_eq!(datagram.covered as usize, covered);
                }
            }
        }
    }

    #[test]
    fn dont_fragment_and_options_stay() {
        let header =
            hex!("4800 0000 1234 6000 4011 0000 0a630002 0a630003 94040000 01010101 01010100");
        let mut fragments = Fragments::new(1 << 20);
        let first = Fragment { offset: 0, more: true, payload: &[1; 8], head: Head::V4(&header) };
        let last = Fragment { offset: 8, more: false, payload: &[2], head: Head::V4(&HEADER) };
        assert!(matches!(fragments.insert(key(1), None, &last), Outcome::Waiting));
        let whole = octets(fragments.insert(key(1), None, &first));
        assert_eq!(
            whole,
            hex!(
                "4800 0029 1234 4000 4011 0000 0a630002 0a630003 94040000 01010101 01010100"
                "01010101 01010101 02"
            )
        );
    }

    #[test]
    fn ipv6_names_what_follows_the_fragment_header() {
        let head = hex!(
            "60000000 0000 0040 fd990000000000000000000000000002 fd990000000000000000000000000003"
            "2c 00 0104 00000000"
        );
        let head = Head::V6 { octets: &head, next_header_at: 40, next_header: 17 };
        let mut fragments = Fragments::new(1 << 20);
        let last = Fragment { offset: 8, more: false, payload: &[2], head };
        assert!(matches!(fragments.insert(key6(), None, &last), Outcome::Waiting));
        let first = Fragment { offset: 0, more: true, payload: &[1; 8], head };
        let whole = octets(fragments.insert(key6(), None, &first));
        assert_eq!((whole.len(), &whole[4..6], whole[40]), (57, &[0, 17][..], 17));
    }

    #[test]
    fn an_overlap_drops_a_datagram_of_ipv6() {
        let mut fragments = Fragments::new(1 << 20);
        let mut insert = |offset, more, payload: &[u8]| {
            fragments.insert(key6(), None, &piece(offset, more, payload))
        };
        assert!(matches!(insert(8, true, &[1; 16]), Outcome::Waiting));
        assert!(matches!(insert(8, true, &[1; 16]), Outcome::Waiting), "the same once more");
        assert_eq!(
            problem(insert(16, true, &[1; 16])),
            "IPv6 fragment: octets 16 to 32 overlap others, the datagram is dropped (RFC 5722)"
        );
        for (offset, more, len) in [(0, true, 8), (24, false, 8), (8, true, 16)] {
            assert!(matches!(insert(offset, more, &vec![1; len]), Outcome::Waiting));
        }
    }

    #[test]
    fn what_cannot_be_is_told() {
        let mut fragments = Fragments::new(1 << 20);
        let mut insert = |offset, more, payload: &[u8]| {
            problem(fragments.insert(key(1), None, &piece(offset, more, payload)))
        };
        assert_eq!(insert(0, true, &[]), "IP fragment: it carries nothing");
        assert_eq!(
            insert(0, true, &[0; 15]),
            "IP fragment: 15 octets, a multiple of 8 expected where more follow"
        );
        assert_eq!(
            insert(65_528, false, &[0; 8]),
            "IP fragment: it ends at octet 65536, beyond the 65535 of any datagram"
        );
        let mut insert = |offset, more, payload: &[u8]| {
            fragments.insert(key(1), None, &piece(offset, more, payload))
        };
        assert!(matches!(insert(16, false, &[0; 8]), Outcome::Waiting));
        for (offset, more, len) in [(24, true, 8), (16, false, 7), (32, false, 8)] {
            let what = problem(insert(offset, more, &vec![0; len]));
            assert!(what.contains("do not fit into what other fragments say"), "{what}");
        }
        // Headers and payload together are too long for the length field.
        let mut fragments = Fragments::new(1 << 20);
        let payload = [0; 65_520];
        let mut insert = |offset, more, payload: &[u8]| {
            fragments.insert(key(1), None, &piece(offset, more, payload))
        };
        assert!(matches!(insert(8, false, &payload[8..]), Outcome::Waiting));
        assert_eq!(
            problem(insert(0, true, &payload[..8])),
            "IP fragments: 20 octets of headers and 65520 of payload are more than a datagram holds"
        );
    }

    #[test]
    fn an_old_identification_is_another_datagram() {
        let mut fragments = Fragments::new(1 << 20);
        let second = 1_000_000_000;
        let mut insert = |at: i128, offset, more, fill| {
            fragments.insert(key(1), Some(at * second), &piece(offset, more, &[fill; 8]))
        };
        assert!(matches!(insert(0, 0, true, 1), Outcome::Waiting));
        assert!(matches!(insert(61, 8, false, 2), Outcome::Waiting));
        assert_eq!(octets(insert(62, 0, true, 3))[20..], [[3; 8], [2; 8]].concat());
    }

    #[test]
    fn the_oldest_goes_first() {
        let mut fragments = Fragments::new(2 * (DATAGRAM_COST + PIECE_COST + 20 + 8));
        for id in 1..=3 {
            assert!(matches!(
                fragments.insert(key(id), None, &piece(0, true, &[id as u8; 8])),
                Outcome::Waiting
            ));
        }
        assert_eq!(octets(fragments.insert(key(2), None, &piece(8, false, &[0]))).len(), 29);
        assert!(matches!(fragments.insert(key(1), None, &piece(8, false, &[0])), Outcome::Waiting));
        assert_eq!(octets(fragments.insert(key(3), None, &piece(8, false, &[0]))).len(), 29);
    }

    #[test]
    fn many_small_pieces_take_no_quadratic_time() {
        let begun = Instant::now();
        let mut fragments = Fragments::new(64 << 20);
        let big = [0; 65_504];
        for round in 0..20 {
            for offset in (0..65_000).step_by(16) {
                fragments.insert(key(round), None, &piece(offset, true, &[1; 8]));
            }
            for _ in 0..10 {
                fragments.insert(key(round), None, &piece(0, true, &big));
            }
            let whole = octets(fragments.insert(key(round), None, &piece(big.len(), false, &[2])));
            assert_eq!((whole.len(), whole[20], whole[28]), (20 + big.len() + 1, 1, 0));
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
    }
}
