//! TCP below iWARP: what was lost, late, copied or sent again, and how streams end.

use std::net::SocketAddr;

use rustc_hash::{FxHashMap, FxHashSet};
use smallvec::SmallVec;
use userdma_proto::dissect::{Frame, Iwarp, TcpInfo};

use crate::{
    End, Findings, Kind,
    flow::{Flow, Protocol, Span},
    iwarp::Session,
    order::{Gap, Idents, Order},
};

const FIN: u8 = 1;
const SYN: u8 = 2;
const RST: u8 = 4;
const ACK: u8 = 0x10;

/// Without Identifications: a hole that is filled so soon was late, not lost.
const SOON_NS: i128 = 3_000_000;
/// A gap is settled when nothing has come of it for so long.
const SETTLED_NS: i128 = 1_000_000_000;
/// Gaps that wait for what becomes of them.
const MOST_GAPS: usize = 1024;
/// A stream that has carried so many segments and is no iWARP is none.
const PATIENCE: u64 = 64;
/// A sequence number so far away is of another connection.
const FAR: u32 = 1 << 30;

/// One direction.
#[derive(Debug, Default)]
struct Dir {
    idents: Idents,
    /// The first sequence number, and the next.
    start: Option<u32>,
    next: Option<u32>,
    gaps: Vec<Gap>,
    /// The last frame with payload.
    last: u64,
    zero: bool,
    fin: Option<u64>,
}

/// A connection.
#[derive(Debug)]
struct Stream {
    /// The initiator first, where the SYN was seen.
    ends: [SocketAddr; 2],
    dirs: [Dir; 2],
    /// `None`: it may still become iWARP.
    iwarp: Option<bool>,
    segments: u64,
    syn: Option<(u64, Option<i128>)>,
    accepted: bool,
    resets: Vec<u64>,
    reset: Option<(usize, Option<i128>, String)>,
    /// What is found before it is known to be iWARP.
    held: Findings,
    session: Session,
    seen: Span,
    resent: [u64; 2],
}

impl Stream {
    fn new(from: SocketAddr, to: SocketAddr) -> Self {
        Self {
            ends: [from, to],
            dirs: Default::default(),
            iwarp: None,
            segments: 0,
            syn: None,
            accepted: false,
            resets: Vec::new(),
            reset: None,
            held: Findings::default(),
            session: Session::default(),
            seen: Span::default(),
            resent: [0; 2],
        }
    }

    fn sockets(&self, side: usize) -> (End, End) {
        (End::Socket(self.ends[side]), End::Socket(self.ends[1 - side]))
    }
}

/// A SYN that was answered by a reset.
#[derive(Debug)]
struct Refused {
    frame: u64,
    time: Option<i128>,
    ends: (End, End),
    port: u16,
}

/// All connections.
#[derive(Debug, Default)]
pub(crate) struct Streams {
    streams: FxHashMap<(SocketAddr, SocketAddr), Stream>,
    refused: Vec<Refused>,
    /// Ports at which iWARP was met.
    ports: FxHashSet<u16>,
    /// Connections carried something else.
    others: bool,
    /// Flows that are over; `None`: nobody asks.
    kept: Option<Vec<Flow>>,
}

impl Streams {
    pub(crate) fn keep_flows(&mut self) {
        self.kept = Some(Vec::new());
    }

    /// Behind the end of the capture.
    pub(crate) fn take_flows(&mut self) -> Vec<Flow> {
        self.kept.take().unwrap_or_default()
    }

    pub(crate) fn frame(&mut self, frame: &Frame, found: &mut Findings) {
        let (Some(tcp), Some(ends)) = (frame.tcp, frame.ends) else { return };
        let Some((from, to)) = ends.ports else { return };
        let (from, to) = (SocketAddr::new(ends.src, from), SocketAddr::new(ends.dst, to));
        let key = if from < to { (from, to) } else { (to, from) };
        let begins = tcp.flags & (SYN | ACK) == SYN;
        if begins
            && self.streams.get(&key).is_some_and(|old| {
                let side = usize::from(from != old.ends[0]);
                old.dirs[side].start.is_some_and(|start| start != tcp.seq)
            })
            && let Some(old) = self.streams.remove(&key)
        {
            self.end(old, frame.time_ns, found);
        }
        let stream = self.streams.entry(key).or_insert_with(|| Stream::new(from, to));
        if begins && stream.syn.is_none() {
            stream.syn = Some((frame.number, frame.time_ns));
        }
        if stream.iwarp == Some(false) {
            return;
        }
        let side = usize::from(from != stream.ends[0]);
        let was = stream.iwarp;
        if !frame.iwarp.is_empty()
            && stream.iwarp.is_none()
            && frame.iwarp.iter().any(|item| !matches!(item, Iwarp::Error(_)))
        {
            stream.iwarp = Some(true);
            self.ports.insert(stream.ends[1].port());
        }
        stream.seen.see(frame.number, frame.time_ns);
        stream.segment(side, frame, tcp);
        if stream.iwarp == Some(true) {
            stream.session.items(side, frame, stream.ends, &mut stream.held);
            if was == Some(true) || !stream.held.0.is_empty() {
                found.0.append(&mut stream.held.0);
            }
        }
        if stream.iwarp.is_none() && stream.segments > PATIENCE {
            stream.iwarp = Some(false);
            stream.held.0.clear();
            self.others = true;
        }
        // A refusal.
        if tcp.flags & RST != 0
            && !stream.accepted
            && stream.iwarp.is_none()
            && stream.segments == 0
        {
            if let Some(_syn) = stream.syn
                && side == 1
            {
                let refused = Refused {
                    frame: frame.number,
                    time: frame.time_ns,
                    ends: stream.sockets(1),
                    port: stream.ends[1].port(),
                };
                self.refused.push(refused);
            }
            self.streams.remove(&key);
        }
    }

    fn end(&mut self, mut stream: Stream, last: Option<i128>, found: &mut Findings) {
        if stream.iwarp != Some(true) {
            self.others |= stream.segments > 0;
            return;
        }
        stream.finish(last, found);
        if let Some(kept) = &mut self.kept {
            let mut sent = stream.session.take_traffic();
            for (traffic, resent) in sent.iter_mut().zip(stream.resent) {
                traffic.resent = resent;
            }
            kept.push(Flow {
                protocol: Protocol::Iwarp,
                ends: stream.ends.map(End::Socket),
                frames: stream.seen.frames,
                times_ns: stream.seen.times,
                sent,
            });
        }
    }

    pub(crate) fn finish(&mut self, last: Option<i128>, found: &mut Findings) {
        for (_, stream) in std::mem::take(&mut self.streams) {
            self.end(stream, last, found);
        }
        // Of a refused connection nobody knows what it would have been: where other things go on, it is not told.
        for refused in self.refused.drain(..) {
            if !self.others || self.ports.contains(&refused.port) {
                let text = format!(
                    "the SYN was answered by a reset: nobody listens at port {}",
                    refused.port
                );
                found.add(Kind::TcpRefused, [refused.frame], refused.time, refused.ends, text);
            }
        }
    }
}

impl Stream {
    fn segment(&mut self, side: usize, frame: &Frame, tcp: TcpInfo) {
        let ends = self.sockets(side);
        let ident = frame.ip.and_then(|ip| ip.ident);
        let what = u64::from(tcp.seq) << 32
            | u64::from(tcp.ack) ^ u64::from(tcp.payload_len) << 16 ^ u64::from(tcp.flags);
        let held = &mut self.held;
        let dir = &mut self.dirs[side];
        // A SYN, and a reset, may have an Identification that is not the connection's.
        let order = if tcp.flags & (SYN | RST) != 0 {
            Order::Unknown
        } else {
            dir.idents.see(ident, what, frame.number)
        };
        if tcp.flags & SYN != 0 {
            dir.start = Some(tcp.seq);
            dir.next = Some(tcp.seq.wrapping_add(1));
            if tcp.flags & ACK != 0 {
                self.accepted = true;
            }
            return;
        }
        if tcp.flags & RST != 0 {
            self.resets.push(frame.number);
            if self.reset.is_none() {
                let after = self.session.last_words();
                self.reset = Some((side, frame.time_ns, after));
            }
            self.session.reset(side, frame, self.ends, held);
            return;
        }
        if tcp.window == 0 && tcp.flags & FIN == 0 {
            if !dir.zero {
                dir.zero = true;
                let text = "the window is closed: nobody takes the data".to_owned();
                held.add(Kind::TcpZeroWindow, [frame.number], frame.time_ns, ends, text);
            }
        } else {
            dir.zero = false;
        }
        if tcp.flags & FIN != 0 {
            dir.fin.get_or_insert(frame.number);
        }
        if tcp.payload_len > 0 {
            self.settle(side, frame.time_ns);
            self.segments += 1;
            self.payload(side, frame, tcp, ident, order);
        }
        if tcp.flags & ACK != 0 {
            self.acked(1 - side, tcp.ack);
        }
    }

    fn payload(
        &mut self,
        side: usize,
        frame: &Frame,
        tcp: TcpInfo,
        ident: Option<u16>,
        order: Order,
    ) {
        let ends = self.sockets(side);
        let (dir, held) = (&mut self.dirs[side], &mut self.held);
        let start = *dir.start.get_or_insert(tcp.seq.wrapping_sub(1));
        let next = *dir.next.get_or_insert(tcp.seq);
        let len = u64::from(tcp.payload_len);
        let relative = |seq: u32| u64::from(seq.wrapping_sub(start));
        let ahead = tcp.seq.wrapping_sub(next);
        let end = tcp.seq.wrapping_add(tcp.payload_len);
        if ahead == 0 {
            dir.next = Some(end);
        } else if ahead < FAR {
            let idents = match (order, ident) {
                (Order::Ahead(step), Some(ident)) if step > 1 => {
                    Some((ident.wrapping_sub(step - 1), ident.wrapping_sub(1)))
                }
                _ => None,
            };
            dir.gaps.push(Gap {
                frame: frame.number,
                time: frame.time_ns,
                before: dir.last,
                missing: SmallVec::from_slice(&[(relative(next), ahead.into())]),
                all: ahead.into(),
                first: relative(next),
                idents,
                lost: false,
                delivered: false,
                in_resend: false,
            });
            dir.next = Some(end);
        } else if next.wrapping_sub(tcp.seq) < FAR {
            let at = relative(tcp.seq);
            let range = format!("octets {at} to {} of the stream", at + len);
            if let Order::Copy(first) = order {
                let text = format!("{range} are the segment of frame {first} once more");
                held.add(Kind::TcpDuplicate, [frame.number], frame.time_ns, ends, text);
                return;
            }
            let hole = dir.gaps.iter().position(|gap| gap.has(at));
            let late = match (order, hole) {
                (Order::Late, Some(_)) => true,
                (Order::Unknown, Some(hole)) => {
                    let gap = &dir.gaps[hole];
                    gap.time.zip(frame.time_ns).is_some_and(|(then, now)| now - then < SOON_NS)
                }
                _ => false,
            };
            let mut of = None;
            for gap in &mut dir.gaps {
                if late {
                    if gap.take(at, len) {
                        of = Some(gap.frame);
                        break;
                    }
                } else if gap.has(at) {
                    gap.lost = true;
                    // What is sent again is not late any more.
                    of = Some(gap.frame);
                }
            }
            if late {
                let text = format!(
                    "{range} were sent before the segment of frame {}",
                    of.unwrap_or(dir.last)
                );
                held.add(Kind::TcpReorder, [frame.number], frame.time_ns, ends, text);
            } else {
                let why = match of {
                    Some(gap) => format!(", which were missing since frame {gap}"),
                    None => ", which had been seen before".into(),
                };
                let text = format!("{range} are sent again{why}");
                self.resent[side] += 1;
                held.add(Kind::TcpRetransmit, [frame.number], frame.time_ns, ends, text);
            }
            if end.wrapping_sub(next) < FAR {
                dir.next = Some(end);
            }
        }
        dir.last = frame.number;
    }

    /// The other side has everything before `ack`.
    fn acked(&mut self, side: usize, ack: u32) {
        let dir = &mut self.dirs[side];
        let Some(start) = dir.start else { return };
        let ack = u64::from(ack.wrapping_sub(start));
        for gap in &mut dir.gaps {
            if gap.missing.iter().any(|&(first, count)| first + count <= ack) {
                gap.delivered = true;
            }
        }
    }

    /// Gaps that nothing will come of any more.
    fn settle(&mut self, side: usize, now: Option<i128>) {
        let gaps = &self.dirs[side].gaps;
        let Some(first) = gaps.first() else { return };
        let old = first.time.zip(now).is_some_and(|(then, now)| now - then > SETTLED_NS);
        // What is acknowledged has come, late or again.
        if gaps.len() > MOST_GAPS || old && (first.delivered || first.missing.is_empty()) {
            let gap = self.dirs[side].gaps.remove(0);
            self.tell_gap(side, &gap);
        }
    }

    fn tell_gap(&mut self, side: usize, gap: &Gap) {
        if gap.missing.is_empty() {
            return;
        }
        let ends = self.sockets(side);
        let range = format!("octets {} to {}", gap.first, gap.first + gap.all);
        let (kind, text) = if gap.delivered && !gap.lost {
            (
                Kind::CapFramesMissing,
                format!("{range} of the stream are acknowledged, but not in the capture"),
            )
        } else {
            (
                Kind::TcpGap,
                format!(
                    "{range} of the stream are missing in front of this segment (the one before: frame {})",
                    gap.before
                ),
            )
        };
        self.held.add(kind, [gap.frame], gap.time, ends, text);
    }

    fn finish(&mut self, last: Option<i128>, found: &mut Findings) {
        for side in 0..2 {
            for gap in std::mem::take(&mut self.dirs[side].gaps) {
                self.tell_gap(side, &gap);
            }
        }
        if let Some((side, time, after)) = self.reset.take() {
            let ends = self.sockets(side);
            let resets = std::mem::take(&mut self.resets);
            let text = format!("the connection was reset, {after}");
            self.held.add(Kind::TcpReset, resets, time, ends, text);
        }
        self.session.finish(last, self.ends, &mut self.held);
        found.0.append(&mut self.held.0);
    }
}
