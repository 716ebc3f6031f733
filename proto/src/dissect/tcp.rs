//! TCP streams: octets in order, whatever the capture's order.
//!
//! One [`Stream`] a connection, with a [`Flow`] for each direction. Only what [`mpa`] wants in
//! order is put in order; of everything else the beginnings of segments are looked at, and nothing
//! is kept.
//!
//! A gap has an end: the missing octets come (later, or again); or the other side acknowledges
//! them, so that it was the capture that lost them; or the capture cut the frame that had them; or
//! too much waits behind it. In the last three cases the stream goes on behind the gap.

use alloc::{
    boxed::Box,
    collections::{BTreeMap, BTreeSet, VecDeque},
    vec::Vec,
};
use core::net::SocketAddr;
use std::collections::HashMap;

use super::mpa::{self, Chunk, Out};

/// Octets, roughly, that wait for the first ones of a stream.
const MAX_FIRST: usize = 64 << 10;

const FIN: u8 = 1;
const SYN: u8 = 2;
const RST: u8 = 4;
const ACK: u8 = 0x10;

/// A TCP segment of a frame.
#[derive(Debug, Clone, Copy)]
pub(super) struct Segment<'a> {
    pub(super) src: SocketAddr,
    pub(super) dst: SocketAddr,
    pub(super) seq: u32,
    pub(super) ack: u32,
    /// As in [`super::TcpInfo::flags`].
    pub(super) flags: u8,
    /// What was captured of the payload.
    pub(super) payload: &'a [u8],
    /// Octets of payload on the wire: more than captured, where the capture cut the frame.
    pub(super) wire_len: u32,
}

/// All streams of a capture.
#[derive(Debug)]
pub(super) struct Streams {
    max_streams: usize,
    max_octets: usize,
    /// Where in `streams` a connection is; the lower end comes first.
    ids: HashMap<(SocketAddr, SocketAddr), usize>,
    streams: Vec<Stream>,
    /// When which stream was heard: those that were heard since are passed over.
    heard: VecDeque<(u64, usize)>,
    clock: u64,
    /// Frames that something may be added to, each with stream and side.
    held: BTreeSet<(u64, usize, usize)>,
}

impl Streams {
    /// Follows `max_streams` connections, each of which keeps `max_octets` behind gaps.
    pub(super) fn new(max_streams: usize, max_octets: usize) -> Self {
        Self {
            max_streams: max_streams.max(1),
            max_octets,
            ids: HashMap::new(),
            streams: Vec::new(),
            heard: VecDeque::new(),
            clock: 0,
            held: BTreeSet::new(),
        }
    }

    /// Takes the segment of frame `number`. What it completes goes to `out`, each with the number
    /// of the frame that completed it: `number`, or an earlier one that waited for the verdict.
    /// Numbers rise from call to call.
    pub(super) fn handle_segment(&mut self, number: u64, segment: &Segment<'_>, out: &mut Out) {
        let (ends, side) = if segment.src <= segment.dst {
            ((segment.src, segment.dst), 0)
        } else {
            ((segment.dst, segment.src), 1)
        };
        let id = self.stream(ends, out);
        self.streams[id].handle(side, number, segment, self.max_octets, out);
        self.update(id);
    }

    /// The lowest frame number that something may still be added to.
    pub(super) fn oldest_undecided(&self) -> Option<u64> {
        self.held.first().map(|&(number, ..)| number)
    }

    /// Decides now what is undecided for frames up to `number`: they can wait no longer. With
    /// [`u64::MAX`] the capture is at its end: gaps are given up too.
    pub(super) fn decide(&mut self, number: u64, out: &mut Out) {
        if number == u64::MAX {
            for id in 0..self.streams.len() {
                self.streams[id].end(out);
                self.update(id);
            }
            return;
        }
        while let Some(&(held, id, side)) = self.held.first() {
            if held > number {
                return;
            }
            self.streams[id].decide(side, number, out);
            self.update(id);
        }
    }

    /// The stream between two ends, which is then the one heard last.
    fn stream(&mut self, ends: (SocketAddr, SocketAddr), out: &mut Out) -> usize {
        self.clock += 1;
        let id = match self.ids.get(&ends) {
            Some(&id) => id,
            None => self.open(ends, out),
        };
        self.streams[id].heard = self.clock;
        match self.heard.back_mut() {
            Some((clock, last)) if *last == id => *clock = self.clock,
            _ => self.heard.push_back((self.clock, id)),
        }
        if self.heard.len() > 2 * self.streams.len() + 64 {
            let Self { heard, streams, .. } = self;
            heard.retain(|&(clock, id)| streams[id].heard == clock);
        }
        id
    }

    /// A place for a new stream: where there is no room, that of the one silent for longest.
    fn open(&mut self, ends: (SocketAddr, SocketAddr), out: &mut Out) -> usize {
        let id = self.streams.len();
        if id < self.max_streams {
            self.streams.push(Stream::new(ends));
            self.ids.insert(ends, id);
            return id;
        }
        let mut silent = 0;
        while let Some((clock, id)) = self.heard.pop_front() {
            if self.streams[id].heard == clock {
                silent = id;
                break;
            }
        }
        self.streams[silent].end(out);
        self.update(silent);
        self.ids.remove(&self.streams[silent].ends);
        self.streams[silent] = Stream::new(ends);
        self.ids.insert(ends, silent);
        silent
    }

    /// Keeps `held` up to date.
    fn update(&mut self, id: usize) {
        let stream = &mut self.streams[id];
        for side in 0..2 {
            let held = stream.hold(side);
            if held == stream.held[side] {
                continue;
            }
            if let Some(number) = stream.held[side] {
                self.held.remove(&(number, id, side));
            }
            if let Some(number) = held {
                self.held.insert((number, id, side));
            }
            stream.held[side] = held;
        }
    }
}

/// A connection.
#[derive(Debug)]
struct Stream {
    ends: (SocketAddr, SocketAddr),
    /// When it was heard last.
    heard: u64,
    flows: [Flow; 2],
    mpa: mpa::Connection,
    /// What [`Streams::held`] has of it.
    held: [Option<u64>; 2],
}

/// One direction. Places in the stream are sequence numbers that do not wrap: their low 32 bits
/// are those on the wire.
#[derive(Debug, Default)]
struct Flow {
    /// The next octet in order; `None` before the first segment.
    next: Option<u64>,
    /// The first octet, where its SYN was seen.
    start: Option<u64>,
    /// The other side has everything in front of this.
    acked: u64,
    /// Behind the last octet, where its FIN was seen.
    fin: Option<u64>,
    /// It was closed or reset.
    ended: bool,
    /// The capture cut the frame that had the octets from `next` to here.
    cut: u64,
    /// Where a segment ended that came out of nowhere.
    stray: Option<u64>,
    /// Frames up to this one are gone.
    released: u64,
    /// The frame that the latest octets in order were counted to.
    stamp: u64,
    ahead: Ahead,
}

/// Octets behind gaps.
#[derive(Debug, Default)]
struct Ahead {
    /// By their place; they do not overlap.
    pieces: BTreeMap<u64, Piece>,
    /// Frame and place of each piece.
    frames: BTreeSet<(u64, u64)>,
    /// What all of them take.
    octets: usize,
}

#[derive(Debug)]
struct Piece {
    number: u64,
    octets: Box<[u8]>,
    /// Behind the last octet on the wire.
    wire_end: u64,
    /// Whether a segment begins with it.
    starts: bool,
}

/// A segment's payload in the stream.
#[derive(Debug, Clone, Copy)]
struct Placed<'a> {
    number: u64,
    begin: u64,
    octets: &'a [u8],
    /// Behind the last octet on the wire.
    wire_end: u64,
    starts: bool,
}

impl Stream {
    fn new(ends: (SocketAddr, SocketAddr)) -> Self {
        Self {
            ends,
            heard: 0,
            flows: Default::default(),
            mpa: mpa::Connection::default(),
            held: [None; 2],
        }
    }

    fn handle(
        &mut self,
        side: usize,
        number: u64,
        segment: &Segment<'_>,
        max_octets: usize,
        out: &mut Out,
    ) {
        let &Segment { seq, ack, flags, payload, wire_len, .. } = segment;
        if flags & RST != 0 {
            // Its payload, if any, is no part of the stream.
            return self.end(out);
        }
        let seq = if flags & SYN != 0 {
            self.handle_syn(side, segment, out);
            seq.wrapping_add(1)
        } else {
            seq
        };
        if flags & ACK != 0 {
            self.acknowledge(1 - side, number, ack, max_octets, out);
        }
        if wire_len == 0 && flags & FIN == 0 {
            return;
        }
        let Some(begin) = self.place(side, number, seq, wire_len, max_octets, out) else {
            return;
        };
        let flow = &mut self.flows[side];
        if flow.ended {
            return;
        }
        let mut wire_end = begin + u64::from(wire_len);
        if flags & FIN != 0 {
            flow.fin.get_or_insert(wire_end);
        }
        let mut octets = &payload[..payload.len().min(wire_len as usize)];
        if let Some(fin) = flow.fin {
            let room = fin.saturating_sub(begin);
            octets = &octets[..octets.len().min(usize::try_from(room).unwrap_or(usize::MAX))];
            wire_end = wire_end.min(begin.max(fin));
        }
        if wire_end > begin {
            let placed = Placed { number, begin, octets, wire_end, starts: true };
            self.take(side, &placed, out);
            self.pump(side, Some(number), max_octets, out);
        }
        self.close(side, out);
    }

    /// A SYN opens the connection, or opens it anew.
    fn handle_syn(&mut self, side: usize, segment: &Segment<'_>, out: &mut Out) {
        let first = segment.seq.wrapping_add(1);
        let [flow, other] = [&self.flows[side], &self.flows[1 - side]];
        let same = |place: u64| place as u32 == first;
        if flow.start.is_some_and(same) && !flow.ended {
            return; // once more
        }
        let fresh = flow.start.is_none() && flow.next.is_none_or(same) && !flow.ended;
        // A SYN without ACK comes before everything else.
        let answer = segment.flags & ACK != 0;
        let late = other.ended || other.start.is_none() && other.next.is_some();
        if !fresh || !answer && late {
            let opened = answer && other.start.is_some_and(|start| start as u32 == segment.ack);
            if opened && flow.start.is_none() && !self.mpa.is_known() {
                self.flows[side] = flow.again();
            } else {
                self.restart(out);
            }
        }
        let flow = &mut self.flows[side];
        let start = flow.near(first);
        flow.start = Some(start);
        flow.next = Some(start);
        let other = &mut self.flows[1 - side];
        if answer && other.next.is_none() {
            // The SYN that this one answers is not in the capture.
            other.start = Some(other.near(segment.ack));
            other.next = other.start;
        }
    }

    /// The other side has everything up to `ack`.
    fn acknowledge(
        &mut self,
        side: usize,
        number: u64,
        ack: u32,
        max_octets: usize,
        out: &mut Out,
    ) {
        let flow = &mut self.flows[side];
        let Some(next) = flow.next else {
            return;
        };
        let ack = flow.near(ack);
        // A number out of nowhere must not declare lost what comes in another order.
        if ack <= flow.acked || ack.saturating_sub(next) > max_octets as u64 {
            return;
        }
        flow.acked = ack;
        if ack > next && !flow.ahead.pieces.is_empty() {
            self.pump(side, Some(number), max_octets, out);
        }
        self.close(side, out);
    }

    /// Ends a direction whose FIN was reached, or acknowledged.
    fn close(&mut self, side: usize, out: &mut Out) {
        let flow = &self.flows[side];
        let reached = |fin| flow.next.is_some_and(|next| next >= fin) || flow.acked > fin;
        if !flow.ended && flow.fin.is_some_and(reached) {
            self.end_flow(side, out);
        }
    }

    /// Where a segment belongs in its stream. `None`: out of nowhere.
    fn place(
        &mut self,
        side: usize,
        number: u64,
        seq: u32,
        wire_len: u32,
        max_octets: usize,
        out: &mut Out,
    ) -> Option<u64> {
        let flow = &mut self.flows[side];
        let begin = flow.near(seq);
        let Some(next) = flow.next else {
            flow.next = Some(begin);
            return Some(begin);
        };
        if begin.abs_diff(next) <= max_octets as u64 {
            flow.stray = None;
            return Some(begin);
        }
        // A second one that goes on where the first ended is believed: the capture lost much, or
        // it lost the SYN of a connection between the same ends.
        if wire_len == 0 || flow.stray != Some(begin) {
            flow.stray = Some(begin + u64::from(wire_len));
            return None;
        }
        flow.stray = None;
        if begin < next || flow.ended {
            self.restart(out);
            let flow = &mut self.flows[side];
            let begin = flow.near(seq);
            flow.next = Some(begin);
            return Some(begin);
        }
        self.flush(side, out);
        if self.mpa.is_ordered(side) {
            self.mpa.gap(side, number, begin - next, out);
        }
        self.flows[side].next = Some(begin);
        Some(begin)
    }

    /// Takes octets: those in order go on, those ahead are kept.
    fn take(&mut self, side: usize, placed: &Placed<'_>, out: &mut Out) {
        let flow = &mut self.flows[side];
        let &Placed { number, begin, octets, wire_end, starts } = placed;
        // `place` has set it.
        let mut next = flow.next.unwrap_or(begin);
        if flow.awaits_first(&self.mpa, side) && begin > next {
            flow.ahead.insert(placed);
            return;
        }
        if !self.mpa.is_ordered(side) {
            let first = flow.start == Some(begin);
            // What was followed once is not looked at again.
            let old = self.mpa.is_known() && wire_end <= next;
            if old || !starts || !self.mpa.look(side, begin, first, octets) {
                flow.next = Some(next.max(wire_end));
                return;
            }
            next = begin;
        }
        let end = begin + octets.len() as u64;
        if begin > next {
            flow.next = Some(next);
            flow.ahead.insert(placed);
            return;
        }
        flow.next = Some(next.max(end));
        if next.max(end) < wire_end {
            flow.cut = flow.cut.max(wire_end);
        }
        if end > next {
            flow.stamp = flow.stamp.max(number);
            // Not more than the octets are: `next` lies within them.
            let known = (next - begin) as usize;
            let chunk = Chunk {
                number: flow.stamp,
                pos: next,
                starts: starts && known == 0,
                octets: &octets[known..],
            };
            self.mpa.deliver(side, &chunk, out);
        }
    }

    /// Takes what waits behind a gap, as far as the gap is filled or given up. `now`: the frame at
    /// hand; without one all gaps are given up, and so is what came with frames that are gone.
    fn pump(&mut self, side: usize, now: Option<u64>, max_octets: usize, out: &mut Out) {
        // Whether the frame at hand filled the gap.
        let mut filled = now;
        loop {
            let flow = &mut self.flows[side];
            let awaits_first = flow.awaits_first(&self.mpa, side);
            let (Some(next), Some(begin)) = (flow.next, flow.ahead.first()) else {
                return;
            };
            if now.is_none() && flow.ahead.number(begin).is_some_and(|n| n <= flow.released) {
                flow.ahead.pop_first(begin);
                continue;
            }
            if (awaits_first || self.mpa.is_ordered(side)) && begin > next {
                let max = if awaits_first { max_octets.min(MAX_FIRST) } else { max_octets };
                let given_up = now.is_none()
                    || flow.acked >= begin
                    || flow.cut == begin
                    || flow.ahead.octets > max;
                if !given_up {
                    return;
                }
                filled = None;
                let number = flow.ahead.number(begin).unwrap_or(0);
                let number = flow.frame(number, now);
                flow.stamp = flow.stamp.max(number);
                self.mpa.gap(side, flow.stamp, begin - next, out);
                flow.next = Some(begin);
                continue;
            }
            let Some(piece) = flow.ahead.pop_first(begin) else {
                return;
            };
            let placed = Placed {
                number: filled.unwrap_or_else(|| flow.frame(piece.number, now)),
                begin,
                octets: &piece.octets,
                wire_end: piece.wire_end,
                starts: piece.starts,
            };
            self.take(side, &placed, out);
        }
    }

    /// Takes everything that waits behind gaps.
    fn flush(&mut self, side: usize, out: &mut Out) {
        self.pump(side, None, 0, out);
    }

    fn end_flow(&mut self, side: usize, out: &mut Out) {
        self.flush(side, out);
        self.mpa.end(side, out);
        self.flows[side].ended = true;
    }

    /// Nothing more comes from either side.
    fn end(&mut self, out: &mut Out) {
        self.end_flow(0, out);
        self.end_flow(1, out);
    }

    /// Another connection between the same ends.
    fn restart(&mut self, out: &mut Out) {
        self.end(out);
        for flow in &mut self.flows {
            *flow = flow.again();
        }
        self.mpa = mpa::Connection::default();
    }

    fn hold(&self, side: usize) -> Option<u64> {
        let flow = &self.flows[side];
        let ahead = flow.ahead.first_frame_after(flow.released);
        ahead.into_iter().chain(self.mpa.hold(side)).min()
    }

    fn decide(&mut self, side: usize, number: u64, out: &mut Out) {
        let flow = &mut self.flows[side];
        flow.released = flow.released.max(number);
        self.mpa.decide(side, number, out);
    }
}

impl Flow {
    /// Far from both ends of the numbers.
    const BASE: u64 = 1 << 62;

    /// The place with these low 32 bits that is nearest to where the stream is.
    const fn near(&self, seq: u32) -> u64 {
        match self.next {
            Some(next) => next.wrapping_add_signed(seq.wrapping_sub(next as u32) as i32 as i64),
            None => Self::BASE + seq as u64,
        }
    }

    /// Whether what comes next are the stream's first octets, and they matter.
    fn awaits_first(&self, mpa: &mpa::Connection, side: usize) -> bool {
        self.start.is_some() && self.start == self.next && mpa.wants_first(side)
    }

    /// One for another connection.
    fn again(&self) -> Self {
        Self { released: self.released, stamp: self.stamp, ..Self::default() }
    }

    /// The frame to tell at what frame `number` brought: itself, if it still waits.
    fn frame(&self, number: u64, now: Option<u64>) -> u64 {
        if number > self.released { number } else { now.unwrap_or(number) }
    }
}

impl Ahead {
    /// What a piece takes beside its octets, roughly.
    const OVERHEAD: usize = 128;

    /// Keeps those of the octets that are not here yet.
    fn insert(&mut self, placed: &Placed<'_>) {
        let &Placed { number, begin, octets, wire_end, starts } = placed;
        let end = begin + octets.len() as u64;
        let mut at = begin;
        if let Some((&before, piece)) = self.pieces.range(..=begin).next_back() {
            at = at.max(before + piece.octets.len() as u64);
        }
        while at < end {
            let next = self.pieces.range(at..end).next();
            let (stop, beyond) = match next {
                Some((&place, piece)) => (place, place + piece.octets.len() as u64),
                None => (end, end),
            };
            if stop > at {
                let piece = Piece {
                    number,
                    octets: octets[(at - begin) as usize..(stop - begin) as usize].into(),
                    wire_end: if stop == end { wire_end } else { stop },
                    starts: starts && at == begin,
                };
                self.octets += piece.octets.len() + Self::OVERHEAD;
                self.pieces.insert(at, piece);
                self.frames.insert((number, at));
            }
            at = beyond;
        }
    }

    fn first(&self) -> Option<u64> {
        self.pieces.first_key_value().map(|(&place, _)| place)
    }

    fn number(&self, place: u64) -> Option<u64> {
        self.pieces.get(&place).map(|piece| piece.number)
    }

    fn pop_first(&mut self, place: u64) -> Option<Piece> {
        let piece = self.pieces.remove(&place)?;
        self.frames.remove(&(piece.number, place));
        self.octets -= piece.octets.len() + Self::OVERHEAD;
        Some(piece)
    }

    /// The lowest frame above `number` that brought any of the octets.
    fn first_frame_after(&self, number: u64) -> Option<u64> {
        if self.frames.is_empty() {
            return None;
        }
        self.frames.range((number + 1, 0)..).next().map(|&(number, _)| number)
    }
}
