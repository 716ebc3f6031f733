//! TCP streams: octets in order, whatever the capture's order.
//!
//! One [`Stream`] a connection, with a [`Flow`] for each direction. Only what [`mpa`] wants in
//! order is put in order; of everything else the beginnings of segments are looked at, and nothing
//! is kept.
//!
//! A gap has an end: the missing octets come (later, or again); or the other side acknowledges
//! them, so that it was the capture that lost them; or the capture cut the frame that had them; or
//! too much waits behind it; or the other side is not in the capture at all, and frames behind the
//! gap can wait no longer. In the last four cases the stream goes on behind the gap.
//!
//! What came with frames that are gone can be told where the gap is filled, and nowhere else: if it
//! never is, it is counted as lost, and the stream's next segment tells so.

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

pub(super) const FIN: u8 = 1;
pub(super) const SYN: u8 = 2;
pub(super) const RST: u8 = 4;
pub(super) const ACK: u8 = 0x10;

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
    /// What all of them may keep.
    max_kept: usize,
    /// What all of them keep.
    kept: usize,
    /// Those that keep octets, by the time since when.
    keeping: BTreeSet<(u64, usize)>,
    /// Octets of iWARP streams that could be told nowhere.
    lost: u64,
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
    /// Follows `max_streams` connections, each of which keeps `max_octets` behind gaps; all of them
    /// together keep `max_kept`.
    pub(super) fn new(max_streams: usize, max_octets: usize, max_kept: usize) -> Self {
        Self {
            max_streams: max_streams.max(1),
            max_octets,
            max_kept,
            kept: 0,
            keeping: BTreeSet::new(),
            lost: 0,
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
        while self.kept > self.max_kept
            && let Some(&(_, id)) = self.keeping.first()
        {
            self.streams[id].let_go(out);
            self.update(id);
        }
    }

    /// Octets of iWARP streams that could be told nowhere: what precedes them never came, and their
    /// frames could not wait. Complete once everything is decided.
    pub(super) const fn lost(&self) -> u64 {
        self.lost
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
                self.lost += self.streams[id].take_lost();
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
        self.lost += self.streams[silent].take_lost();
        self.update(silent);
        self.ids.remove(&self.streams[silent].ends);
        self.streams[silent] = Stream::new(ends);
        self.ids.insert(ends, silent);
        silent
    }

    /// Keeps `held` and `kept` up to date.
    fn update(&mut self, id: usize) {
        let stream = &mut self.streams[id];
        let kept = stream.keeps();
        self.kept = self.kept - stream.kept + kept;
        if (stream.kept == 0) != (kept == 0) {
            if kept == 0 {
                self.keeping.remove(&(stream.kept_since, id));
            } else {
                stream.kept_since = self.clock;
                self.keeping.insert((self.clock, id));
            }
        }
        stream.kept = kept;
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
    /// What [`Streams::kept`] has of it, and since when there is any.
    kept: usize,
    kept_since: u64,
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
    /// Octets of iWARP whose frames are gone, and that nobody was told about.
    lost: u64,
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
            kept: 0,
            kept_since: 0,
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
        self.tell_lost(side, number, out);
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
        // Octets that are here already are not replaced.
        if begin > next || flow.ahead.first().is_some_and(|place| place < end) {
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
                let piece = flow.ahead.pop_first(begin);
                if self.mpa.is_known() {
                    flow.lost += piece.map_or(0, |piece| piece.octets.len() as u64);
                }
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
        self.mpa.stop(side, out);
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

    /// Octets that are kept, and what it takes to keep them.
    fn keeps(&self) -> usize {
        (0..2).map(|side| self.flows[side].ahead.octets + self.mpa.keeps(side)).sum()
    }

    /// Keeps nothing any more: what comes next is looked at anew.
    fn let_go(&mut self, out: &mut Out) {
        for side in 0..2 {
            self.flush(side, out);
            self.flows[side].lost += self.mpa.unread(side) as u64;
            self.mpa.stop(side, out);
        }
    }

    /// Tells what was lost, at frame `number`.
    fn tell_lost(&mut self, side: usize, number: u64, out: &mut Out) {
        if self.flows[side].lost > 0 && self.mpa.is_known() {
            let lost = core::mem::take(&mut self.flows[side].lost);
            self.mpa.lost(side, number, lost, out);
        }
    }

    fn take_lost(&mut self) -> u64 {
        self.flows.iter_mut().map(|flow| core::mem::take(&mut flow.lost)).sum()
    }

    fn hold(&self, side: usize) -> Option<u64> {
        let flow = &self.flows[side];
        let ahead = flow.ahead.first_frame_after(flow.released);
        ahead.into_iter().chain(self.mpa.hold(side)).min()
    }

    fn decide(&mut self, side: usize, number: u64, out: &mut Out) {
        if self.flows[side].acked == 0 {
            // Nobody will say whether it is late or lost.
            self.flush(side, out);
        }
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
        let Self { released, stamp, lost, .. } = *self;
        Self { released, stamp, lost, ..Self::default() }
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

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::{
        dissect::{DdpHeader, Iwarp},
        wire::{
            ids::{Msn, Stag},
            iwarp::{
                ddp::{TaggedHeader, UntaggedHeader},
                fpdu::{self, MarkerEncoder},
                mpa::{Start, StartFlags, StartKind},
                rdmap::Opcode,
            },
        },
    };
    use proptest::prelude::*;
    use std::{format, string::String, vec, vec::Vec};
    use zerocopy::IntoBytes;

    /// Sides of a connection in tests.
    pub(in crate::dissect) const CLIENT: usize = 0;
    pub(in crate::dissect) const SERVER: usize = 1;

    /// A segment to be captured.
    #[derive(Debug, Clone)]
    pub(in crate::dissect) struct Sent {
        pub(in crate::dissect) side: usize,
        pub(in crate::dissect) seq: u32,
        pub(in crate::dissect) ack: u32,
        pub(in crate::dissect) flags: u8,
        pub(in crate::dissect) payload: Vec<u8>,
        /// Octets that the capture cut off.
        pub(in crate::dissect) cut: u32,
        /// Which connection: a port.
        pub(in crate::dissect) port: u16,
    }

    /// Two ends that send.
    #[derive(Debug)]
    pub(in crate::dissect) struct Talk {
        pub(in crate::dissect) port: u16,
        pub(in crate::dissect) next: [u32; 2],
        pub(in crate::dissect) sent: Vec<Sent>,
    }

    impl Talk {
        /// Opened, with these initial sequence numbers.
        pub(in crate::dissect) fn open(client: u32, server: u32) -> Self {
            let mut talk = Self { port: 40_000, next: [client, server], sent: Vec::new() };
            talk.push(CLIENT, SYN, &[]);
            talk.push(SERVER, SYN | ACK, &[]);
            talk.push(CLIENT, ACK, &[]);
            talk
        }

        /// Under way when the capture begins.
        pub(in crate::dissect) fn under_way() -> Self {
            Self { port: 40_000, next: [77_777, 888_888], sent: Vec::new() }
        }

        pub(in crate::dissect) fn push(&mut self, side: usize, flags: u8, payload: &[u8]) {
            self.sent.push(Sent {
                side,
                seq: self.next[side],
                ack: self.next[1 - side],
                flags,
                payload: payload.to_vec(),
                cut: 0,
                port: self.port,
            });
            let phantom = u32::from(flags & (SYN | FIN) != 0);
            self.next[side] = self.next[side].wrapping_add(payload.len() as u32 + phantom);
        }

        /// Sends octets in segments of `mss`.
        pub(in crate::dissect) fn send(&mut self, side: usize, octets: &[u8], mss: usize) {
            for part in octets.chunks(mss) {
                self.push(side, ACK, part);
            }
        }

        /// Opened, and with these flags in request and reply.
        pub(in crate::dissect) fn started(request: StartFlags, reply: StartFlags) -> Self {
            let mut talk = Self::open(1000, 0xffff_ff00);
            talk.push(CLIENT, ACK, &start(StartKind::Request, request));
            talk.push(SERVER, ACK, &start(StartKind::Reply, reply));
            talk
        }
    }

    pub(in crate::dissect) fn start(kind: StartKind, flags: StartFlags) -> Vec<u8> {
        let mut out = Vec::new();
        Start { kind, flags, revision: 1, enhanced: None, private_data: b"hello" }.emit(&mut out);
        out
    }

    /// The capture of some segments, and what comes of them. Checks that nothing is told at a
    /// frame that nobody waited for.
    #[derive(Debug)]
    pub(in crate::dissect) struct Capture {
        pub(in crate::dissect) streams: Streams,
        pub(in crate::dissect) number: u64,
        gone: u64,
        /// The most frames that waited.
        pub(in crate::dissect) waited: u64,
        pub(in crate::dissect) told: Out,
    }

    impl Capture {
        pub(in crate::dissect) fn new() -> Self {
            Self::bounded(16, 1 << 20)
        }

        pub(in crate::dissect) fn bounded(max_streams: usize, max_octets: usize) -> Self {
            let streams = Streams::new(max_streams, max_octets, usize::MAX);
            Self { streams, number: 0, gone: 0, waited: 0, told: Vec::new() }
        }

        pub(in crate::dissect) fn take(&mut self, sent: &Sent) {
            self.number += 1;
            let client = SocketAddr::from(([10, 0, 0, 2], sent.port));
            let server = SocketAddr::from(([10, 0, 0, 1], 18_515));
            let (src, dst) = if sent.side == CLIENT { (client, server) } else { (server, client) };
            let captured = sent.payload.len() - sent.cut as usize;
            let segment = Segment {
                src,
                dst,
                seq: sent.seq,
                ack: sent.ack,
                flags: sent.flags,
                payload: &sent.payload[..captured],
                wire_len: sent.payload.len() as u32,
            };
            let before = self.told.len();
            self.streams.handle_segment(self.number, &segment, &mut self.told);
            self.check(before);
        }

        fn check(&mut self, before: usize) {
            for (number, what) in &self.told[before..] {
                assert!(
                    *number > self.gone && *number <= self.number,
                    "frame {number} after {}, {} gone: {what:?}",
                    self.number,
                    self.gone
                );
            }
            let kept = self.streams.oldest_undecided().unwrap_or(self.number + 1);
            self.gone = self.gone.max(kept - 1);
            self.waited = self.waited.max(self.number - self.gone);
        }

        pub(in crate::dissect) fn decide(&mut self, number: u64) {
            let before = self.told.len();
            self.streams.decide(number, &mut self.told);
            let waits = self.streams.oldest_undecided();
            assert!(waits.is_none_or(|oldest| oldest > number), "{waits:?} after {number}");
            self.check(before);
        }

        pub(in crate::dissect) fn of(sent: &[Sent]) -> Self {
            let mut capture = Self::new();
            sent.iter().for_each(|sent| capture.take(sent));
            capture
        }

        /// All of it, to the end.
        pub(in crate::dissect) fn whole(sent: &[Sent]) -> Self {
            let mut capture = Self::of(sent);
            capture.decide(u64::MAX);
            capture
        }

        /// Each FPDU: its frame, and what [`describe`] says.
        pub(in crate::dissect) fn fpdus(&self) -> Vec<(u64, String)> {
            let fpdu = |(number, what): &(u64, Iwarp)| match what {
                Iwarp::Fpdu(_) => Some((*number, describe(what))),
                _ => None,
            };
            self.told.iter().filter_map(fpdu).collect()
        }

        pub(in crate::dissect) fn described(&self) -> Vec<String> {
            self.told.iter().map(|(number, what)| format!("{number}: {}", describe(what))).collect()
        }
    }

    /// In a few words.
    pub(in crate::dissect) fn describe(what: &Iwarp) -> String {
        match what {
            Iwarp::Start(start) => format!("{:?}", start.kind),
            Iwarp::Error(error) => format!("error: {error}"),
            Iwarp::Fpdu(fpdu) => {
                let place = match &fpdu.header {
                    Some(DdpHeader::Tagged(header)) => format!("{:#x}", header.to),
                    Some(DdpHeader::Untagged(header)) => format!("{}", header.msn),
                    None => "-".into(),
                };
                let op = fpdu.header.map_or(Opcode(15), |header| header.opcode());
                let error = fpdu.error.as_deref().map(|e| format!(" ({e})")).unwrap_or_default();
                format!("{op} {place} {} {:?}{error}", fpdu.payload_len, fpdu.crc)
            }
        }
    }

    /// A WRITE of `len` octets; `n` tells it from others.
    pub(in crate::dissect) fn write(n: u64, len: usize) -> Vec<u8> {
        let header = TaggedHeader::new(Opcode::WRITE, true, Stag(0x1234), n);
        [header.as_bytes(), &vec![n as u8; len]].concat()
    }

    /// A SEND of `len` octets.
    pub(in crate::dissect) fn send(n: u32, len: usize) -> Vec<u8> {
        let header = UntaggedHeader::new(Opcode::SEND, true, 0, Msn(n), 0, Stag(0));
        [header.as_bytes(), &vec![n as u8; len]].concat()
    }

    /// The stream of these ULPDUs.
    pub(in crate::dissect) fn frame(ulpdus: &[Vec<u8>], markers: bool, crc: bool) -> Vec<u8> {
        let (mut out, mut encoder) = (Vec::new(), MarkerEncoder::new(crc));
        for ulpdu in ulpdus {
            let mut one = Vec::new();
            let begin = fpdu::begin(&mut one);
            one.extend_from_slice(ulpdu);
            fpdu::finish(&mut one, begin, crc);
            if markers { encoder.push(&one, &mut out) } else { out.extend_from_slice(&one) }
        }
        out
    }

    pub(in crate::dissect) const NONE: StartFlags = StartFlags::empty();

    /// `n` WRITEs and SENDs by turns.
    pub(in crate::dissect) fn mixed(n: usize, len: impl Fn(usize) -> usize) -> Vec<Vec<u8>> {
        let one = |i: usize| match i % 2 {
            0 => write(i as u64, len(i)),
            _ => send(i as u32, len(i)),
        };
        (1..=n).map(one).collect()
    }

    fn words(told: &[(u64, String)]) -> Vec<&str> {
        told.iter().map(|(_, words)| &words[..]).collect()
    }

    #[test]
    fn a_conversation_from_its_beginning() {
        let mut talk = Talk::started(StartFlags::CRC, NONE);
        talk.push(CLIENT, ACK, &frame(&[write(0x10, 8), send(1, 3)], false, true));
        talk.push(SERVER, ACK, &frame(&[send(1, 0)], false, true));
        let capture = Capture::of(&talk.sent);
        assert_eq!(
            capture.described(),
            [
                "4: Request",
                "5: Reply",
                "6: WRITE 0x10 8 Good",
                "6: SEND 1 3 Good",
                "7: SEND 1 0 Good"
            ]
        );
        assert_eq!(capture.waited, 0);
    }

    #[test]
    fn fpdus_are_told_at_the_segment_that_completes_them() {
        let mut talk = Talk::started(NONE, NONE);
        let octets = frame(&[write(1, 300), write(2, 10), write(3, 500)], false, false);
        assert_eq!(octets.len(), 320 + 32 + 520);
        talk.send(CLIENT, &octets, 300); // 6, 7, 8
        let capture = Capture::of(&talk.sent);
        let fpdus = capture.fpdus();
        assert_eq!(fpdus.iter().map(|(n, _)| *n).collect::<Vec<_>>(), [7, 7, 8]);
        assert_eq!(
            words(&fpdus),
            ["WRITE 0x1 300 Zero", "WRITE 0x2 10 Zero", "WRITE 0x3 500 Zero"]
        );
    }

    #[test]
    fn a_retransmission_and_a_late_segment() {
        let mut talk = Talk::started(NONE, NONE);
        let octets = frame(&mixed(6, |_| 100), false, false);
        talk.send(CLIENT, &octets, 240);
        let inorder = Capture::of(&talk.sent);
        let mut sent = talk.sent.clone();
        // The first part comes last, and the second one twice.
        let first = sent.remove(5);
        let again = sent[5].clone();
        sent.extend([again, first]);
        let capture = Capture::of(&sent);
        assert_eq!(words(&capture.fpdus()), words(&inorder.fpdus()));
        let last = capture.number;
        assert!(capture.fpdus().iter().all(|(n, _)| *n == last), "{:?}", capture.fpdus());
        // They waited, in case the first part never comes.
        assert_eq!(capture.streams.oldest_undecided(), None);
        assert!(capture.waited > 2);
    }

    #[test]
    fn the_first_copy_of_an_octet_counts() {
        let mut talk = Talk::started(NONE, NONE);
        talk.push(CLIENT, ACK, &frame(&[write(1, 8), write(2, 8)], false, true));
        let mut sent = talk.sent.clone();
        let whole = sent.pop().unwrap();
        let part = |from: usize, to: usize, with: u8| Sent {
            seq: whole.seq.wrapping_add(from as u32),
            payload: whole.payload[from..to].iter().map(|o| o ^ with).collect(),
            ..whole.clone()
        };
        // Each octet comes good first, but for the last eight of the first FPDU.
        let (good, bad) = (0, 0xff);
        sent.extend([
            part(12, 20, good),
            part(10, 14, good),
            part(20, 28, bad),
            part(28, 56, good),
        ]);
        let mut last = part(0, 56, good);
        last.payload[10..].iter_mut().for_each(|octet| *octet ^= bad);
        sent.push(last);
        let capture = Capture::of(&sent);
        assert_eq!(words(&capture.fpdus()), ["WRITE 0x1 8 Bad", "WRITE 0x2 8 Good"]);
    }

    #[test]
    fn sequence_numbers_wrap() {
        for at in [0xffff_fff0_u32, 0xffff_ffff, 0xffff_ff80, 0] {
            let mut talk = Talk::open(at, at.wrapping_sub(300));
            talk.push(CLIENT, ACK, &start(StartKind::Request, NONE));
            talk.push(SERVER, ACK, &start(StartKind::Reply, NONE));
            talk.send(CLIENT, &frame(&mixed(9, |i| i * 7), false, false), 50);
            talk.sent[5..].reverse();
            talk.send(SERVER, &frame(&mixed(9, |i| i * 9), false, false), 50);
            assert_eq!(Capture::of(&talk.sent).fpdus().len(), 18, "from {at:#x}");
        }
    }

    #[test]
    fn keep_alives_and_empty_segments_change_nothing() {
        let mut talk = Talk::started(NONE, NONE);
        for i in 1..4 {
            let probe = Sent { seq: talk.next[CLIENT].wrapping_sub(1), ..talk.sent[5 - 1].clone() };
            talk.sent.push(Sent { side: CLIENT, payload: vec![0], ..probe.clone() });
            talk.sent.push(Sent { side: CLIENT, payload: vec![], ..probe });
            talk.push(SERVER, ACK, &[]);
            talk.push(CLIENT, ACK, &frame(&[write(i, 4)], false, false));
        }
        assert_eq!(
            words(&Capture::of(&talk.sent).fpdus()),
            ["WRITE 0x1 4 Zero", "WRITE 0x2 4 Zero", "WRITE 0x3 4 Zero"]
        );
    }

    #[test]
    fn what_the_capture_lost_is_given_up_once_it_is_acknowledged() {
        let mut talk = Talk::started(StartFlags::CRC, StartFlags::CRC);
        for i in 1..=6 {
            talk.push(CLIENT, ACK, &frame(&[write(i, 40)], false, true));
        }
        talk.push(SERVER, ACK, &[]);
        talk.push(CLIENT, ACK, &frame(&[write(7, 40)], false, true));
        let mut sent = talk.sent;
        sent.drain(6..8); // WRITEs 2 and 3
        let mut capture = Capture::of(&sent[..9]);
        assert_eq!(capture.fpdus().len(), 1);
        assert_eq!(capture.streams.oldest_undecided(), Some(7));
        capture.take(&sent[9]);
        assert_eq!(capture.streams.oldest_undecided(), None);
        capture.take(&sent[10]);
        assert_eq!(
            capture.described()[2..],
            [
                "6: WRITE 0x1 40 Good",
                "7: error: 120 octets are missing from the capture: FPDUs there are lost, the next \
                 one is looked for",
                "7: WRITE 0x4 40 Good",
                "8: WRITE 0x5 40 Good",
                "9: WRITE 0x6 40 Good",
                "11: WRITE 0x7 40 Good"
            ]
        );
    }

    #[test]
    fn a_gap_that_is_not_acknowledged_is_given_up_over_the_bound_and_at_the_end() {
        let mut talk = Talk::started(NONE, NONE);
        for i in 1..=100 {
            talk.push(CLIENT, ACK, &frame(&[write(i, 400)], false, false));
        }
        talk.sent.remove(5);
        let mut capture = Capture::bounded(4, 20_000);
        talk.sent.iter().for_each(|sent| capture.take(sent));
        let fpdus = capture.fpdus();
        assert_eq!((fpdus.len(), fpdus[0].0, &fpdus[0].1[..]), (99, 6, "WRITE 0x2 400 Zero"));
        let mut capture = Capture::of(&talk.sent);
        assert_eq!(capture.fpdus(), []);
        capture.decide(50);
        assert_eq!(capture.fpdus(), []);
        capture.decide(u64::MAX);
        // What came with frames that are gone cannot be told.
        let fpdus = capture.fpdus();
        assert_eq!((fpdus.len(), fpdus[0].0), (54, 51));
    }

    #[test]
    fn a_forced_verdict_does_not_lose_what_is_retransmitted() {
        let mut talk = Talk::started(NONE, NONE);
        for i in 1..=4 {
            talk.push(CLIENT, ACK, &frame(&[write(i, 40)], false, false));
        }
        let first = talk.sent.remove(5);
        let mut capture = Capture::of(&talk.sent);
        capture.decide(7);
        assert_eq!(capture.streams.oldest_undecided(), Some(8));
        capture.take(&first);
        let numbers: Vec<u64> = capture.fpdus().iter().map(|(n, _)| *n).collect();
        assert_eq!(numbers, [9; 4]);
    }

    #[test]
    fn frames_that_the_capture_cut_are_gaps() {
        let mut talk = Talk::started(NONE, NONE);
        for i in 1..=8 {
            let two = frame(&[send(2 * i, 4), write(u64::from(i), 1000)], false, false);
            talk.push(CLIENT, ACK, &two);
        }
        for sent in &mut talk.sent[5..] {
            sent.cut = sent.payload.len() as u32 - 100;
        }
        let capture = Capture::of(&talk.sent);
        // The first of the two is whole in each frame; nobody waits for an acknowledgement.
        assert!(capture.waited <= 2, "{}", capture.waited);
        let fpdus = Capture::whole(&talk.sent).fpdus();
        assert_eq!(fpdus.len(), 8, "{fpdus:?}");
        assert!(fpdus.iter().enumerate().all(|(i, (n, _))| *n == 6 + i as u64), "{fpdus:?}");
    }

    #[test]
    fn a_cut_frame_that_is_sent_again_is_whole() {
        let mut talk = Talk::started(NONE, NONE);
        talk.push(CLIENT, ACK, &frame(&[write(1, 1000)], false, false));
        let again = talk.sent[5].clone();
        talk.sent[5].cut = 900;
        talk.sent.push(again);
        talk.push(CLIENT, ACK, &frame(&[write(2, 10)], false, false));
        let fpdus = Capture::of(&talk.sent).fpdus();
        assert_eq!(fpdus, [(7, "WRITE 0x1 1000 Zero".into()), (8, "WRITE 0x2 10 Zero".into())]);
    }

    #[test]
    fn ports_are_used_again() {
        let mut all = Vec::new();
        for (i, isn) in [100_u32, 5_000_000, 90].into_iter().enumerate() {
            let mut talk = Talk::open(isn, isn.wrapping_mul(77));
            talk.push(CLIENT, ACK, &start(StartKind::Request, NONE));
            talk.push(SERVER, ACK, &start(StartKind::Reply, NONE));
            talk.push(CLIENT, ACK, &frame(&[write(i as u64, 4)], false, false));
            match i {
                0 => talk.push(CLIENT, RST, b"reset text"),
                _ => {
                    // With a FIN, or with nothing at all.
                    talk.push(CLIENT, ACK | FIN, &[]);
                }
            }
            // Nothing of this counts.
            talk.push(CLIENT, ACK, &frame(&[write(9, 4)], false, false));
            all.extend(talk.sent);
        }
        let capture = Capture::whole(&all);
        assert_eq!(
            words(&capture.fpdus()),
            ["WRITE 0x0 4 Zero", "WRITE 0x1 4 Zero", "WRITE 0x2 4 Zero"]
        );
        assert_eq!(capture.told.len(), 9);
    }

    #[test]
    fn a_syn_that_comes_twice_opens_once() {
        let mut talk = Talk::started(NONE, NONE);
        let again = talk.sent[0].clone();
        talk.sent.insert(1, again.clone());
        talk.push(CLIENT, ACK, &frame(&[write(1, 4)], false, false));
        talk.sent.push(again);
        talk.push(CLIENT, ACK, &frame(&[write(2, 4)], false, false));
        assert_eq!(Capture::of(&talk.sent).told.len(), 4);
    }

    #[test]
    fn a_connection_whose_syn_is_missing_between_the_same_ends() {
        let mut talk = Talk::started(NONE, NONE);
        talk.push(CLIENT, ACK, &frame(&[write(1, 4)], false, false));
        let mut all = talk.sent;
        // 3 GB away, either way.
        for far in [0x6000_0000_u32, 0x9000_0000] {
            let mut talk = Talk::under_way();
            talk.next = talk.next.map(|next| next.wrapping_add(far));
            for i in 1..=4 {
                talk.push(CLIENT, ACK, &frame(&[write(i, 4)], false, true));
            }
            all.extend(talk.sent);
        }
        // The first of each is not believed.
        let fpdus = Capture::of(&all).fpdus();
        let three = ["WRITE 0x2 4 Good", "WRITE 0x3 4 Good", "WRITE 0x4 4 Good"];
        assert_eq!(words(&fpdus), [&["WRITE 0x1 4 Zero"][..], &three, &three].concat());
    }

    #[test]
    fn one_segment_out_of_nowhere_does_no_harm() {
        let mut talk = Talk::started(NONE, NONE);
        talk.push(CLIENT, ACK, &frame(&[write(1, 4)], false, false));
        let mut stray = talk.sent[5].clone();
        stray.seq = stray.seq.wrapping_add(0x5000_0000);
        stray.ack = stray.ack.wrapping_add(0x5000_0000);
        talk.sent.push(stray);
        talk.push(CLIENT, ACK, &frame(&[write(2, 4)], false, false));
        talk.push(SERVER, ACK, &frame(&[write(3, 4)], false, false));
        assert_eq!(Capture::of(&talk.sent).fpdus().len(), 3);
    }

    #[test]
    fn the_one_silent_for_longest_makes_room() {
        let mut capture = Capture::bounded(3, 1 << 16);
        let mut talks: Vec<Talk> = (0..4)
            .map(|i| {
                let mut talk = Talk::open(i, i);
                talk.port = 1000 + i as u16;
                talk.sent.iter_mut().for_each(|sent| sent.port = talk.port);
                talk.push(CLIENT, ACK, &start(StartKind::Request, NONE));
                talk.push(SERVER, ACK, &start(StartKind::Reply, NONE));
                talk
            })
            .collect();
        for i in [0, 1, 2, 0, 3] {
            // 0 is heard again before 3 comes: 1 has to go.
            let sent = core::mem::take(&mut talks[i].sent);
            sent.iter().for_each(|sent| capture.take(sent));
            talks[i].push(CLIENT, ACK, &frame(&[write(i as u64, 4)], false, false));
        }
        let before = capture.fpdus().len();
        for i in [0, 2, 3, 1] {
            let sent = core::mem::take(&mut talks[i].sent);
            sent.iter().for_each(|sent| capture.take(sent));
        }
        let fpdus = capture.fpdus();
        assert_eq!(before, 1);
        assert_eq!(
            words(&fpdus[1..]),
            ["WRITE 0x0 4 Zero", "WRITE 0x2 4 Zero", "WRITE 0x3 4 Zero"]
        );
        assert_eq!((capture.streams.ids.len(), capture.streams.streams.len()), (3, 3));
    }

    #[test]
    fn waiting_for_an_fpdu_that_cannot_be_one_is_told_at_once() {
        let mut talk = Talk::started(NONE, NONE);
        talk.push(CLIENT, ACK, &[0xff; 60]);
        talk.push(CLIENT, ACK, &frame(&mixed(3, |_| 100), false, false));
        let told = Capture::whole(&talk.sent).described();
        assert_eq!(told.len(), 3, "{told:?}"); // and that once
        assert!(told[2].starts_with("6: error: MPA: an FPDU of 65535 octets is due"), "{told:?}");
        // A long one that is in order is waited for in silence.
        let mut talk = Talk::started(NONE, NONE);
        talk.push(CLIENT, ACK, &frame(&[write(1, 60_000)], false, false)[..100]);
        assert_eq!(Capture::whole(&talk.sent).told.len(), 2);
    }

    #[test]
    fn what_is_lost_with_its_frames_is_told() {
        let mut talk = Talk::started(NONE, NONE);
        talk.send(CLIENT, &frame(&mixed(6, |_| 100), false, false), 120);
        talk.sent.remove(5); // the first FPDU never comes
        let mut capture = Capture::of(&talk.sent);
        capture.decide(capture.number);
        // At the end.
        let mut streams = Capture::of(&talk.sent);
        streams.decide(streams.number);
        streams.decide(u64::MAX);
        let lost = streams.streams.lost();
        assert_eq!(
            (lost, streams.fpdus().len()),
            (talk.sent[5..].iter().map(|s| s.payload.len() as u64).sum(), 0)
        );
        // With the stream's next segment, where there is one.
        capture.streams.streams[0].let_go(&mut capture.told);
        capture.streams.update(0);
        talk.sent.clear();
        talk.send(CLIENT, &frame(&mixed(4, |_| 100), false, false), 1000);
        talk.sent.iter().for_each(|sent| capture.take(sent));
        capture.decide(u64::MAX);
        assert_eq!(
            capture.described()[2],
            format!(
                "{}: error: {lost} octets were captured and given up, as others before them did \
                 not come in time: FPDUs there are lost",
                capture.number
            )
        );
        assert_eq!((capture.fpdus().len(), capture.streams.lost()), (4, 0));
    }

    #[test]
    fn where_one_side_is_missing_gaps_are_given_up_with_their_frames() {
        let mut talk = Talk::started(NONE, NONE);
        for i in 1..=9 {
            talk.push(CLIENT, ACK, &frame(&[write(i, 40)], false, false));
        }
        talk.sent.retain(|sent| sent.side == CLIENT);
        let lost = talk.sent.remove(3 + 4);
        let mut capture = Capture::of(&talk.sent);
        assert_eq!(capture.fpdus().len(), 4);
        let waiting = capture.streams.oldest_undecided().unwrap();
        capture.decide(waiting);
        let fpdus = capture.fpdus();
        assert!(fpdus.len() == 8, "{fpdus:?}");
        assert!(capture.described()[5].contains("60 octets are missing"), "{:?}", capture.told);
        capture.take(&lost); // too late
        assert_eq!(capture.streams.oldest_undecided(), None);
        capture.decide(u64::MAX);
        assert_eq!(capture.streams.lost(), 0);
    }

    #[test]
    fn all_streams_together_keep_no_more_than_the_bound() {
        let mut capture = Capture::bounded(1000, 1 << 20);
        capture.streams.max_kept = 200_000;
        for port in 1..=300 {
            let mut talk = Talk::started(NONE, NONE);
            // Half of a long FPDU, or what is behind a gap.
            let octets = frame(&[write(1, 60_000), write(2, 30_000)], false, false);
            talk.send(CLIENT, &octets, 10_000);
            talk.sent.truncate(10);
            if port % 2 == 0 {
                talk.sent.remove(5);
            }
            for sent in &mut talk.sent {
                sent.port = port;
                capture.take(sent);
                let Streams { kept, streams, keeping, .. } = &capture.streams;
                assert!(*kept <= 200_000);
                assert_eq!(*kept, streams.iter().map(Stream::keeps).sum::<usize>());
                assert_eq!(keeping.len(), streams.iter().filter(|s| s.keeps() > 0).count());
            }
            // Frames can wait no longer.
            capture.decide(capture.number);
        }
        capture.decide(u64::MAX);
        assert_eq!((capture.streams.kept, capture.streams.keeping.len()), (0, 0));
        assert!(capture.streams.lost() > 300 * 20_000);
    }

    #[test]
    fn a_hundred_thousand_connections_cost_no_more_than_the_bound() {
        let mut streams = Streams::new(50, 1000, usize::MAX);
        let mut out = Vec::new();
        for i in 0..100_000_u32 {
            let segment = Segment {
                src: SocketAddr::from((i.to_be_bytes(), 1)),
                dst: SocketAddr::from(([1, 2, 3, 4], 5)),
                seq: i,
                ack: 0,
                flags: ACK,
                payload: b"M",
                wire_len: 1,
            };
            streams.handle_segment(u64::from(i) + 1, &segment, &mut out);
        }
        assert_eq!((streams.streams.len(), streams.ids.len(), out.len()), (50, 50, 0));
        assert!(streams.heard.len() < 1000 && streams.held.len() <= 100);
    }

    #[test]
    fn tiny_segments_out_of_order_stay_within_bound_and_time() {
        let mut talk = Talk::started(NONE, NONE);
        talk.push(CLIENT, ACK, &frame(&[write(1, 60_000)], false, false));
        let big = talk.sent.pop().unwrap();
        let mut capture = Capture::bounded(4, 300_000);
        talk.sent.iter().for_each(|sent| capture.take(sent));
        let mut one = big.clone();
        for round in 0..4 {
            // Every other octet, backwards; then all of them, again and again.
            for at in (1..60_000).rev().filter(|at| at % 2 == round % 2) {
                one.seq = big.seq.wrapping_add(at as u32);
                one.payload = vec![big.payload[at]];
                capture.take(&one);
                let ahead = capture.streams.streams[0].flows.iter().map(|flow| flow.ahead.octets);
                assert!(ahead.max() <= Some(300_000 + 200));
            }
            let tail = Sent {
                seq: big.seq.wrapping_add(1),
                payload: big.payload[1..].to_vec(),
                ..big.clone()
            };
            capture.take(&tail);
        }
        assert!(capture.number > 120_000);
    }

    /// What of a direction is there, frame by frame: the model of reassembly.
    fn completed_at(sent: &[Sent], side: usize, first: u32, ends: &[usize]) -> Vec<u64> {
        let last = ends.last().copied().unwrap_or(0);
        let mut have = vec![false; last];
        let (mut prefix, mut out) = (0, Vec::new());
        for (number, sent) in (1_u64..).zip(sent) {
            if sent.side != side || sent.flags & SYN != 0 {
                continue;
            }
            let at = sent.seq.wrapping_sub(first) as usize;
            let end = (at + sent.payload.len()).min(last);
            have[at.min(end)..end].fill(true);
            while prefix < last && have[prefix] {
                prefix += 1;
            }
            while out.len() < ends.len() && ends[out.len()] <= prefix {
                out.push(number);
            }
        }
        out
    }

    prop_compose! {
        /// Lengths of payloads, sizes of segments, and how they are shuffled.
        fn any_delivery()(
            lens in prop::collection::vec(0_usize..900, 1..20),
            cuts in prop::collection::vec(1_usize..700, 1..20),
            moves in prop::collection::vec((any::<prop::sample::Index>(), 0_usize..6), 0..30),
            copies in prop::collection::vec((any::<prop::sample::Index>(), 0_usize..6, 0_u32..300), 0..8),
            isn: u32, markers: bool, crc: bool,
        ) -> (Talk, Vec<Sent>, Vec<Vec<u8>>, bool, bool) {
            let ulpdus = mixed(lens.len(), |i| lens[i - 1]);
            let mut talk = Talk::open(isn, !isn);
            let flags = |markers| {
                let mut flags = NONE;
                flags.set(StartFlags::MARKERS, markers);
                flags.set(StartFlags::CRC, crc);
                flags
            };
            talk.push(CLIENT, ACK, &start(StartKind::Request, flags(false)));
            talk.push(SERVER, ACK, &start(StartKind::Reply, flags(markers)));
            let begin = talk.sent.len();
            let octets = frame(&ulpdus, markers, crc);
            let (mut rest, mut cuts) = (&octets[..], cuts.iter().cycle());
            while let Some(cut) = cuts.next().filter(|_| !rest.is_empty()) {
                let (part, after) = rest.split_at((*cut).min(rest.len()));
                talk.push(CLIENT, ACK, part);
                rest = after;
            }
            let mut sent = talk.sent[begin..].to_vec();
            for (from, by) in &moves {
                let from = from.index(sent.len());
                let one = sent.remove(from);
                sent.insert((from + by).min(sent.len()), one);
            }
            // Later copies, some longer to the front.
            for (from, by, more) in &copies {
                let from = from.index(sent.len());
                let mut copy = sent[from].clone();
                let first = talk.sent[begin].seq;
                let more = (*more).min(copy.seq.wrapping_sub(first));
                let at = copy.seq.wrapping_sub(first) as usize;
                copy.seq = copy.seq.wrapping_sub(more);
                copy.payload.splice(..0, octets[at - more as usize..at].iter().copied());
                sent.insert((from + 1 + by).min(sent.len()), copy);
            }
            let sent = talk.sent[..begin].iter().cloned().chain(sent).collect();
            (talk, sent, ulpdus, markers, crc)
        }
    }

    proptest! {
        #[test]
        fn any_order_gives_what_the_right_one_gives(
            (talk, sent, ulpdus, markers, crc) in any_delivery(), reply_last: bool,
        ) {
            let mut sent = sent;
            if reply_last && !markers {
                // The capture shows the answer after what it answers to.
                let reply = sent.remove(4);
                sent.push(reply);
            }
            let capture = Capture::whole(&sent);
            let state = if crc { "Good" } else { "Zero" };
            let want: Vec<String> = ulpdus
                .iter()
                .enumerate()
                .map(|(i, ulpdu)| match (i + 1) % 2 {
                    0 => format!("WRITE {:#x} {} {state}", i + 1, ulpdu.len() - 14),
                    _ => format!("SEND {} {} {state}", i + 1, ulpdu.len() - 18),
                })
                .collect();
            let fpdus = capture.fpdus();
            prop_assert_eq!(words(&fpdus), want.iter().map(|w| &w[..]).collect::<Vec<_>>());
            let mut ends = vec![];
            for i in 1..=ulpdus.len() {
                ends.push(frame(&ulpdus[..i], markers, crc).len());
            }
            let first = talk.sent[5].seq;
            let numbers: Vec<u64> = fpdus.iter().map(|(number, _)| *number).collect();
            prop_assert_eq!(numbers, completed_at(&sent, CLIENT, first, &ends));
            prop_assert_eq!(capture.streams.oldest_undecided(), None);
        }

        #[test]
        fn whatever_is_lost_the_rest_is_true(
            (_, sent, ulpdus, _, crc) in any_delivery(),
            lost in prop::collection::vec(any::<prop::sample::Index>(), 1..5),
            decide in prop::option::of(0_u64..40), acked: bool,
        ) {
            let mut sent = sent;
            for lost in &lost {
                sent.remove(lost.index(sent.len()));
            }
            if acked && let Some(last) = sent.last().cloned() {
                let ack = last.seq.wrapping_add(last.payload.len() as u32);
                sent.push(Sent { side: SERVER, ack, seq: last.ack, flags: ACK, payload: vec![], ..last });
            }
            let mut capture = Capture::new();
            for sent in &sent {
                capture.take(sent);
                if decide == Some(capture.number % 40) {
                    capture.decide(capture.number - 1);
                }
            }
            capture.decide(u64::MAX);
            // Each is one that was sent, and they rise.
            let mut left = ulpdus.iter().enumerate().map(|(i, ulpdu)| match (i + 1) % 2 {
                0 => format!("WRITE {:#x} {}", i + 1, ulpdu.len() - 14),
                _ => format!("SEND {} {}", i + 1, ulpdu.len() - 18),
            });
            for (_, found) in capture.fpdus() {
                prop_assert!(left.any(|sent| found.starts_with(&sent)), "{found}");
                prop_assert!(!crc || found.ends_with("Good"), "{found}");
            }
        }

        #[test]
        fn any_segments_do_no_harm(
            segments in prop::collection::vec(
                (0_usize..2, 0_u32..5000, 0_u32..5000, any::<u8>(), 0_usize..600, 0_usize..900, any::<bool>()),
                0..60,
            ),
            octets in prop::collection::vec(any::<u8>(), 1500),
            decide in 1_u64..20,
        ) {
            let mut capture = Capture::bounded(2, 4000);
            let good = frame(&mixed(40, |i| i * 3), false, false);
            for (side, seq, ack, flags, from, len, noise) in segments {
                let source = if noise { &octets } else { &good };
                let payload = source[from..from + len].to_vec();
                // SYN, FIN and RST less often than not.
                let flags = if flags < 200 { ACK } else { flags };
                let cut = (payload.len() as u32 / 2) * u32::from(flags & 0x40 != 0);
                let port = u16::from(seq % 50 == 0) + u16::from(seq % 70 == 0);
                capture.take(&Sent { side, seq: seq.wrapping_sub(2000), ack, flags, payload, cut, port });
                if capture.number.is_multiple_of(decide) {
                    capture.decide(capture.number - 1);
                }
            }
            capture.decide(u64::MAX);
            prop_assert_eq!(capture.streams.oldest_undecided(), None);
        }
    }
}
