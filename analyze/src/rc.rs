//! RC and UC: what was asked, what was answered, and what became of it.
//!
//! Packets from one host to a queue pair of another are a [`Channel`]; its requests are answered on the channel of
//! the other direction. Which two belong together the connection manager's messages say, or the answers themselves:
//! an answer's PSN is that of a request which is under way.

use std::{collections::VecDeque, fmt::Write as _, net::IpAddr};

use rustc_hash::FxHashMap;
use smallvec::SmallVec;
use userdma_proto::{
    dissect::{Ends, Frame, Roce},
    wire::{
        ids::{Psn, Qpn},
        roce::{
            Headers,
            aeth::{NakCode, Syndrome, rnr_micros},
            opcode::{Info, Operation, Place, Transport},
        },
    },
};

use crate::{
    End, Findings, Kind, between,
    cm::{Cm, Limits},
    flow::{Flow, Message as Counted, Protocol, Span, Traffic},
    order::{Gap, Order},
    span,
};

/// Packets that are remembered behind what was acknowledged, for copies and late ones.
const BEHIND: usize = 64;
/// Packets that are remembered in all, of one channel.
const MOST: usize = 1 << 16;
/// READs whose answers are waited for: where only one direction is in the capture, none comes.
const MOST_READS: usize = 4096;
/// Gaps that wait for what becomes of them.
const MOST_GAPS: usize = 1024;
/// A PSN so far ahead is a new start.
const FAR: u32 = 1 << 20;
/// A gap is settled when nothing has come of it for so long.
const SETTLED_NS: i128 = 1_000_000_000;
/// A NAK is obeyed at once, or not at all.
const AT_ONCE_NS: i128 = 50_000_000;
/// So close together two packets of the same content are one that was copied.
const COPY_NS: i128 = 50_000;
/// So long a flow may be silent with work under way.
const SILENT_NS: i128 = 5_000_000_000;

/// A packet, and what is asked of it.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Packet<'a> {
    pub(crate) frame: u64,
    pub(crate) time: Option<i128>,
    pub(crate) ident: Option<u16>,
    pub(crate) ends: Ends,
    pub(crate) headers: &'a Headers,
    pub(crate) roce: &'a Roce,
    pub(crate) info: Option<&'static Info>,
    pub(crate) dscp: Option<u8>,
    pub(crate) pcp: Option<u8>,
    pub(crate) ecn: u8,
}

impl<'a> Packet<'a> {
    pub(crate) fn new(frame: &Frame, roce: &'a Roce, headers: &'a Headers, ends: Ends) -> Self {
        Self {
            frame: frame.number,
            time: frame.time_ns,
            // Of a train every packet has the datagram's, which is none of its own.
            ident: frame.ip.and_then(|ip| ip.ident).filter(|_| frame.roce.len() == 1),
            ends,
            headers,
            roce,
            info: headers.bth.opcode().info(),
            dscp: frame.ip.map(|ip| ip.dscp),
            pcp: frame.pcp,
            ecn: frame.ip.map_or(0, |ip| ip.ecn),
        }
    }

    /// The same for two copies of a packet alone.
    pub(crate) fn what(&self) -> u64 {
        let bth = &self.headers.bth;
        u64::from(bth.dest_qp().0) << 32
            | u64::from(bth.psn().get()) << 8
            | u64::from(bth.opcode().0)
    }

    pub(crate) fn dest_qp(&self) -> Qpn {
        self.headers.bth.dest_qp()
    }

    fn psn(&self) -> Psn {
        self.headers.bth.psn()
    }
}

/// What a request is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Request {
    Send,
    Write,
    Read,
    Atomic,
    Other,
}

impl Request {
    fn of(operation: Operation) -> Self {
        match operation {
            Operation::Send => Self::Send,
            Operation::Write | Operation::AtomicWrite => Self::Write,
            Operation::ReadRequest => Self::Read,
            Operation::CmpSwap | Operation::FetchAdd => Self::Atomic,
            _ => Self::Other,
        }
    }

    /// Its place in [`Traffic::messages`].
    fn counted(self) -> usize {
        let kind = match self {
            Self::Send => Counted::Send,
            Self::Write => Counted::Write,
            Self::Read => Counted::Read,
            Self::Atomic => Counted::Atomic,
            Self::Other => Counted::Other,
        };
        kind as usize
    }

    fn name(self) -> &'static str {
        match self {
            Self::Send => "SEND",
            Self::Write => "WRITE",
            Self::Read => "READ",
            Self::Atomic => "ATOMIC",
            Self::Other => "request",
        }
    }
}

/// A PSN that was sent, or that is missing (no frame).
#[derive(Debug, Clone, Copy)]
struct Sent {
    frame: u64,
    time: Option<i128>,
    /// The message it belongs to, by its place in [`Half::messages`].
    message: u64,
    /// How often, since the responder last took the flow on ([`Half::epoch`]).
    sends: u8,
    since: u64,
    ack_req: bool,
    /// The rest of the PSNs of a READ.
    more: bool,
}

/// A message of a requester.
#[derive(Debug, Clone)]
struct Message {
    request: Request,
    psn: Psn,
    first_frame: u64,
    last_frame: u64,
    octets: u64,
    /// Address, key and length of its RETH or AtomicETH.
    target: Option<(u64, u32, u32)>,
}

/// A READ, or an ATOMIC, that waits for its answer.
#[derive(Debug, Clone)]
struct Outstanding {
    psn: Psn,
    /// How many packets answer it.
    count: u32,
    /// The next that is expected, counted from `psn`.
    next: u32,
    frame: u64,
}

/// A resend that goes on.
#[derive(Debug, Clone)]
struct Resend {
    frames: Vec<u64>,
    first: Psn,
    last: Psn,
    time: Option<i128>,
    last_time: Option<i128>,
    cause: Cause,
    /// The packet that is sent again was there already; the frame and time of its last copy.
    had: Option<(u64, Option<i128>)>,
}

#[derive(Debug, Clone)]
enum Cause {
    /// The NAK of a frame, so long before.
    Nak(u64),
    /// Answers that skipped a PSN.
    ImpliedNak(u64),
    /// Nothing came; since the frame and its time.
    TimeOut(u64, Option<i128>),
    /// An RNR NAK: its frame, time, and the wait it asks for in µs.
    Rnr(u64, Option<i128>, u32),
}

#[derive(Debug, Clone, Copy)]
struct Nak {
    frame: u64,
    time: Option<i128>,
    psn: Psn,
}

#[derive(Debug, Clone, Copy)]
struct Rnr {
    frame: u64,
    time: Option<i128>,
    psn: Psn,
    micros: u32,
}

/// What one side asks of the other.
#[derive(Debug, Default)]
struct Half {
    next: Option<Psn>,
    /// PSN of the first of `sent`.
    base: Psn24,
    sent: VecDeque<Sent>,
    /// Where an earlier end was not known for sure: the next PSN may be so much more.
    slack: u32,
    messages: VecDeque<Message>,
    /// Number of the first of `messages`.
    first_message: u64,
    /// What the message that is being sent is, if that is known; `Some(None)`: none is.
    within: Option<Option<Request>>,
    /// All of the message under way was seen, and its octets.
    whole: bool,
    octets: u64,
    una: Option<Psn>,
    gaps: Vec<Gap>,
    resend: Option<Resend>,
    nak: Option<Nak>,
    rnr: Option<Rnr>,
    /// RNR NAKs of one PSN: which, and how many.
    rnrs: (Psn24, u32),
    rnr_told: bool,
    exhausted_told: bool,
    storm: Option<Psn>,
    reads: VecDeque<Outstanding>,
    outstanding_told: bool,
    resp_gaps: Vec<Gap>,
    /// The frame whose answer skipped one.
    skipped: Option<(u64, Option<i128>)>,
    last_resp_frame: u64,
    answers: u64,
    requests: u64,
    completed: u64,
    /// Answers that took the flow on, or told it to wait.
    epoch: u64,
    last_request: Option<(u64, Option<i128>)>,
    last_answer: Option<(u64, Option<i128>)>,
    ended: bool,
    traffic: Traffic,
}

type Psn24 = Psn;

/// From one host to one queue pair of another.
#[derive(Debug)]
struct Channel {
    src: IpAddr,
    dst: IpAddr,
    dest_qp: Qpn,
    pair: Option<usize>,
    transport: Transport,
    half: Half,
    mtu: Option<u32>,
    limits: Limits,
    mid_told: bool,
    migreq: Option<bool>,
    migreq_told: bool,
    pkey: Option<u32>,
    pkey_told: bool,
    /// DSCP and VLAN priority, and the frame that first had them.
    qos: [Option<(u8, u64)>; 2],
    qos_told: [bool; 2],
    seen: Span,
}

impl Channel {
    fn new(src: IpAddr, dst: IpAddr, dest_qp: Qpn, transport: Transport) -> Self {
        Self {
            src,
            dst,
            dest_qp,
            pair: None,
            transport,
            half: Half::default(),
            mtu: None,
            limits: Limits::default(),
            mid_told: false,
            migreq: None,
            migreq_told: false,
            pkey: None,
            pkey_told: false,
            qos: [None; 2],
            qos_told: [false; 2],
            seen: Span::default(),
        }
    }
}

/// All flows of RC and UC.
#[derive(Debug, Default)]
pub(crate) struct Flows {
    channels: Vec<Channel>,
    by_key: FxHashMap<(IpAddr, IpAddr, u32), usize>,
    between: FxHashMap<(IpAddr, IpAddr), SmallVec<[usize; 2]>>,
    /// Flows that are over, and datagrams; `None`: nobody asks.
    kept: Option<Kept>,
}

/// What is kept for [`crate::Analyser::flows`].
#[derive(Debug, Default)]
struct Kept {
    over: Vec<Flow>,
    /// By addresses, source and destination queue pair.
    datagrams: FxHashMap<(IpAddr, IpAddr, u32, u32), (Span, Traffic)>,
}

/// The two ends of a connection that the connection manager made.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Made {
    pub(crate) ends: [(IpAddr, Qpn); 2],
    /// The first PSN of what each end asks.
    pub(crate) psns: [Psn; 2],
    pub(crate) mtu: Option<u32>,
    pub(crate) transport: Transport,
    /// Of what each end asks.
    pub(crate) limits: [Limits; 2],
}

impl Flows {
    pub(crate) fn keep_flows(&mut self) {
        self.kept = Some(Kept::default());
    }

    /// A packet of UD, or a CNP: they are counted.
    pub(crate) fn datagram(&mut self, packet: &Packet<'_>) {
        let Some(kept) = &mut self.kept else { return };
        let Some(info) = packet.info else { return };
        let (src, dst) = (packet.ends.src, packet.ends.dst);
        if info.transport == Transport::Cnp {
            // It is for the one who asks on the channel of the other direction.
            if let Some(&at) = self.by_key.get(&(src, dst, packet.dest_qp().0))
                && let Some(pair) = self.channels[at].pair
            {
                self.channels[pair].half.traffic.cnps += 1;
            }
        }
        let Some(deth) = packet.headers.deth.filter(|_| info.transport == Transport::Ud) else {
            return;
        };
        let key = (src, dst, deth.src_qp().0, packet.dest_qp().0);
        let (seen, traffic) = kept.datagrams.entry(key).or_default();
        seen.see(packet.frame, packet.time);
        traffic.packets += 1;
        traffic.octets += u64::from(packet.roce.payload_len);
        traffic.messages[Counted::Send as usize] += 1;
        traffic.marked += u64::from(packet.ecn == 3);
    }

    /// The flow of a channel and its pair.
    fn flow(&self, at: usize) -> Flow {
        let channel = &self.channels[at];
        let traffic =
            |channel: &Channel| Traffic { path_mtu: channel.mtu, ..channel.half.traffic.clone() };
        let (seen, back) = match channel.pair {
            Some(pair) => {
                let pair = &self.channels[pair];
                (channel.seen.with(pair.seen), traffic(pair))
            }
            None => (channel.seen, Traffic::default()),
        };
        let (from, to) = self.ends(at);
        let protocol = if channel.transport == Transport::Uc { Protocol::Uc } else { Protocol::Rc };
        Flow {
            protocol,
            ends: [from, to],
            frames: seen.frames,
            times_ns: seen.times,
            sent: [traffic(channel), back],
        }
    }

    pub(crate) fn take_flows(&mut self) -> Vec<Flow> {
        let Some(mut kept) = self.kept.take() else { return Vec::new() };
        for at in 0..self.channels.len() {
            let first = self.channels[at].pair.is_none_or(|pair| at < pair);
            let flow = self.flow(at);
            if first && flow.frames[0] != 0 {
                kept.over.push(flow);
            }
        }
        for ((src, dst, src_qp, dest_qp), (seen, traffic)) in kept.datagrams {
            kept.over.push(Flow {
                protocol: Protocol::Ud,
                ends: [End::Qp(src, Qpn(src_qp)), End::Qp(dst, Qpn(dest_qp))],
                frames: seen.frames,
                times_ns: seen.times,
                sent: [traffic, Traffic::default()],
            });
        }
        kept.over
    }

    fn channel(&mut self, src: IpAddr, dst: IpAddr, qp: Qpn, transport: Transport) -> usize {
        if let Some(&at) = self.by_key.get(&(src, dst, qp.0)) {
            return at;
        }
        let at = self.channels.len();
        self.channels.push(Channel::new(src, dst, qp, transport));
        self.by_key.insert((src, dst, qp.0), at);
        self.between.entry((src, dst)).or_default().push(at);
        at
    }

    /// The two channels of a connection that was made outside of the capture.
    pub(crate) fn hint(&mut self, ends: [(IpAddr, Qpn); 2]) {
        let [(a, a_qp), (b, b_qp)] = ends;
        let there = self.channel(a, b, b_qp, Transport::Rc);
        let back = self.channel(b, a, a_qp, Transport::Rc);
        self.channels[there].pair = Some(back);
        self.channels[back].pair = Some(there);
    }

    /// A connection was made: its two channels begin anew.
    pub(crate) fn made(&mut self, made: &Made, last: Option<i128>, found: &mut Findings) {
        let [(a, a_qp), (b, b_qp)] = made.ends;
        let there = self.channel(a, b, b_qp, made.transport);
        let back = self.channel(b, a, a_qp, made.transport);
        if self.kept.is_some() {
            let old = self.flow(there);
            if let Some(kept) = self.kept.as_mut().filter(|_| old.frames[0] != 0) {
                kept.over.push(old);
            }
        }
        for (at, other, side) in [(there, back, 0), (back, there, 1)] {
            self.end(at, last, found);
            let old = &self.channels[at];
            let mut new = Channel::new(old.src, old.dst, old.dest_qp, made.transport);
            new.pair = Some(other);
            new.mtu = made.mtu;
            new.limits = made.limits[side];
            new.half.next = Some(made.psns[side]);
            new.half.una = Some(made.psns[side]);
            new.half.base = made.psns[side];
            new.half.within = Some(None);
            self.channels[at] = new;
        }
    }

    /// A connection is over: what is open is settled.
    pub(crate) fn closed(&mut self, ends: [(IpAddr, Qpn); 2], found: &mut Findings) {
        let [(a, a_qp), (b, b_qp)] = ends;
        for key in [(a, b, b_qp.0), (b, a, a_qp.0)] {
            if let Some(&at) = self.by_key.get(&key) {
                self.channels[at].half.ended = true;
                self.given_up(at, found);
                self.channels[at].half.forget();
            }
        }
    }

    /// The two ends of what goes over a channel.
    fn ends(&self, at: usize) -> (End, End) {
        let channel = &self.channels[at];
        let from = match channel.pair {
            Some(pair) => End::Qp(channel.src, self.channels[pair].dest_qp),
            None => End::Host(channel.src),
        };
        (from, End::Qp(channel.dst, channel.dest_qp))
    }

    pub(crate) fn packet(
        &mut self,
        packet: &Packet<'_>,
        order: Order,
        max: Option<u16>,
        cm: &mut Cm,
        found: &mut Findings,
    ) {
        let Some(info) = packet.info else { return };
        if !matches!(info.transport, Transport::Rc | Transport::Uc | Transport::Xrc) {
            return;
        }
        let key = (packet.ends.src, packet.ends.dst, packet.dest_qp().0);
        let at = match self.by_key.get(&key) {
            Some(&at) => at,
            None => {
                self.wrong_qp(packet, info, found);
                self.channel(packet.ends.src, packet.ends.dst, packet.dest_qp(), info.transport)
            }
        };
        self.channels[at].seen.see(packet.frame, packet.time);
        if info.request {
            self.channels[at].half.traffic.marked += u64::from(packet.ecn == 3);
            self.request(at, packet, info, order, max, found);
            if info.transport == Transport::Rc {
                cm.data(packet, found);
            }
        } else {
            self.answer(at, packet, info, order, max, found);
        }
        // Behind the answer, which may have shown who belongs together.
        self.fields(at, packet, found);
    }

    /// Of a packet to a queue pair that was never seen: does it continue another's numbers?
    fn wrong_qp(&self, packet: &Packet<'_>, info: &Info, found: &mut Findings) {
        if !info.request {
            return;
        }
        let Some(others) = self.between.get(&(packet.ends.src, packet.ends.dst)) else { return };
        let continued = others.iter().find(|&&at| {
            let channel = &self.channels[at];
            channel.pair.is_some()
                && channel.half.requests > 0
                && channel.transport == info.transport
                && channel.half.next == Some(packet.psn())
        });
        if let Some(&at) = continued {
            let text = format!(
                "PSN {} is the next of QP {:#x}, but goes to QP {:#x}, which no connection in the capture has",
                packet.psn(),
                self.channels[at].dest_qp.0,
                packet.dest_qp().0
            );
            let ends = (self.ends(at).0, End::Qp(packet.ends.dst, packet.dest_qp()));
            found.add(Kind::RoceWrongQp, [packet.frame], packet.time, ends, text);
        }
    }

    /// What must be the same for all packets of a flow.
    fn fields(&mut self, at: usize, packet: &Packet<'_>, found: &mut Findings) {
        let ends = self.ends(at);
        let bth = &packet.headers.bth;
        let (pkey, migreq) = (bth.pkey(), bth.migreq());
        let expected = self.channels[at].limits.pkey;
        let pair = self.channels[at].pair;
        let channel = &mut self.channels[at];
        if let Some(expected) = expected
            && !channel.pkey_told
            && (expected ^ pkey.0) & 0x7fff != 0
        {
            channel.pkey_told = true;
            let text =
                format!("P_Key {:#06x}; the connection was made with {expected:#06x}", pkey.0);
            found.add(Kind::RocePkey, [packet.frame], packet.time, ends, text);
        }
        if channel.pkey.is_none() {
            channel.pkey = Some(pkey.0);
            let other = pair.and_then(|pair| self.channels[pair].pkey);
            let limited = |pkey: u32| pkey & 0x8000 == 0;
            if limited(pkey.0) && other.is_some_and(limited) && !self.channels[at].pkey_told {
                self.channels[at].pkey_told = true;
                let text = format!(
                    "P_Key {:#06x}: both ends are limited members of the partition",
                    pkey.0
                );
                found.add(Kind::RocePkey, [packet.frame], packet.time, ends, text);
            }
        }
        let channel = &mut self.channels[at];
        match channel.migreq {
            Some(before) if before != migreq && !channel.migreq_told => {
                channel.migreq_told = true;
                let text = format!(
                    "MigReq changes from {} to {} within the flow",
                    u8::from(before),
                    u8::from(migreq)
                );
                found.add(Kind::RoceMigReq, [packet.frame], packet.time, ends, text);
            }
            Some(_) => {}
            None => {
                channel.migreq = Some(migreq);
                let other = pair.and_then(|pair| self.channels[pair].migreq);
                if other.is_some_and(|other| other != migreq) {
                    self.channels[at].migreq_told = true;
                    let text = format!(
                        "MigReq is {} here and {} in the other direction",
                        u8::from(migreq),
                        u8::from(!migreq)
                    );
                    found.add(Kind::RoceMigReq, [packet.frame], packet.time, ends, text);
                }
            }
        }
        let each = [
            (packet.dscp, Kind::QosDscpMismatch, "DSCP"),
            (packet.pcp, Kind::QosPcpMismatch, "VLAN priority"),
        ];
        for (which, (value, kind, name)) in each.into_iter().enumerate() {
            let Some(value) = value.filter(|_| self.channels[at].qos[which].is_none()) else {
                continue;
            };
            self.channels[at].qos[which] = Some((value, packet.frame));
            if let Some(pair) = self.channels[at].pair
                && let Some((other, frame)) = self.channels[pair].qos[which]
                && other != value
                && !self.channels[at].qos_told[which]
            {
                self.channels[at].qos_told[which] = true;
                let text = format!(
                    "{name} {value} here and {other} in the other direction (frame {frame})"
                );
                found.add(kind, [packet.frame], packet.time, ends, text);
            }
        }
    }

    // ------------------------------------------------------------------------------- requests

    fn request(
        &mut self,
        at: usize,
        packet: &Packet<'_>,
        info: &'static Info,
        order: Order,
        max: Option<u16>,
        found: &mut Findings,
    ) {
        self.settle(at, packet.time, found);
        let psn = packet.psn();
        let channel = &mut self.channels[at];
        let half = &mut channel.half;
        if half.requests == 0 && !info.place.begins() && !channel.mid_told {
            channel.mid_told = true;
            let text = format!(
                "the first packet of the flow is {}, in the middle of a message",
                info.name
            );
            let ends = self.ends(at);
            found.add(Kind::CapMidFlow, [packet.frame], packet.time, ends, text);
        }
        let half = &mut self.channels[at].half;
        half.requests += 1;
        let next = *half.next.get_or_insert(psn);
        if half.sent.is_empty() {
            half.base = next;
        }
        let ahead = psn.since(next);
        if ahead == 0 {
            self.new_request(at, packet, info, found);
        } else if ahead <= half.slack {
            // A READ whose length in packets was not known.
            let half = &mut self.channels[at].half;
            let extra = ahead;
            half.slack = 0;
            if let Some(&last) = half.sent.back() {
                half.sent.extend((0..extra).map(|_| Sent { more: true, ..last }));
            }
            if let Some(read) = half.reads.back_mut() {
                read.count += extra;
            }
            half.next = Some(psn);
            self.new_request(at, packet, info, found);
        } else if ahead < FAR {
            self.gap(at, packet, order, max, ahead, next);
            self.new_request(at, packet, info, found);
        } else if next.since(psn) < FAR {
            self.old_request(at, packet, info, order, max, found);
        } else {
            // Somewhere else altogether: the queue pair was made anew.
            self.end(at, packet.time, found);
            let half = &mut self.channels[at].half;
            let requests = half.requests;
            let traffic = std::mem::take(&mut half.traffic);
            *half = Half { next: Some(psn), base: psn, requests, traffic, ..Half::default() };
            self.new_request(at, packet, info, found);
        }
        self.channels[at].half.last_request = Some((packet.frame, packet.time));
    }

    /// Packets between `next` and this one are missing.
    fn gap(
        &mut self,
        at: usize,
        packet: &Packet<'_>,
        order: Order,
        max: Option<u16>,
        count: u32,
        next: Psn,
    ) {
        let channel = &mut self.channels[at];
        let half = &mut channel.half;
        let before = half.last_request.map_or(0, |(frame, _)| frame);
        let idents = match (order, max, packet.ident) {
            // The largest is this one's own by now.
            (Order::Ahead(step), Some(_), Some(ident)) if step > 1 => {
                Some((ident.wrapping_sub(step - 1), ident.wrapping_sub(1)))
            }
            _ => None,
        };
        let hole = Sent {
            frame: 0,
            time: packet.time,
            message: half.first_message + half.messages.len() as u64,
            sends: 0,
            since: half.epoch,
            ack_req: false,
            more: false,
        };
        half.sent.extend((0..count).map(|_| hole));
        let first = u64::from(next.get());
        half.gaps.push(Gap {
            frame: packet.frame,
            time: packet.time,
            before,
            missing: SmallVec::from_slice(&[(first, count.into())]),
            all: count.into(),
            first,
            idents,
            lost: false,
            delivered: false,
            in_resend: false,
        });
        half.next = Some(packet.psn());
        half.within = None;
        half.whole = false;
        half.slack = 0;
    }

    /// One that was not seen before, in its place.
    fn new_request(
        &mut self,
        at: usize,
        packet: &Packet<'_>,
        info: &'static Info,
        found: &mut Findings,
    ) {
        self.resend_ends(at, found);
        self.shape(at, packet, info, found);
        let ends = self.ends(at);
        let channel = &mut self.channels[at];
        let mtu = channel.mtu;
        let half = &mut channel.half;
        let request = Request::of(info.operation);
        half.slack = 0;
        let mut psns = 1;
        if info.place.begins() || half.messages.is_empty() {
            let reth = packet.headers.reth.map(|reth| (reth.va(), reth.rkey().0, reth.dma_len()));
            let atomic = packet.headers.atomic_eth.map(|eth| (eth.va(), eth.rkey().0, 8));
            half.messages.push_back(Message {
                request,
                psn: packet.psn(),
                first_frame: packet.frame,
                last_frame: packet.frame,
                octets: 0,
                target: reth.or(atomic),
            });
        }
        if request == Request::Read {
            let len = packet.headers.reth.map_or(0, |reth| reth.dma_len());
            match mtu {
                Some(mtu) => psns = len.div_ceil(mtu).max(1),
                // 4096 at most for each: so many at least, and with 256 so many at most.
                None => {
                    psns = len.div_ceil(4096).max(1);
                    half.slack = len.div_ceil(256).max(1) - psns;
                }
            }
        }
        half.traffic.packets += 1;
        half.traffic.octets += u64::from(packet.roce.payload_len);
        half.traffic.messages[request.counted()] += u64::from(info.place.ends());
        if let Some(message) = half.messages.back_mut() {
            message.octets += u64::from(packet.roce.payload_len);
            message.last_frame = packet.frame;
        }
        if matches!(request, Request::Read | Request::Atomic) {
            half.reads.push_back(Outstanding {
                psn: packet.psn(),
                count: psns,
                next: 0,
                frame: packet.frame,
            });
            if half.reads.len() > MOST_READS {
                half.reads.pop_front();
            }
            let limit = channel.limits.outstanding;
            if let Some(limit) = limit
                && half.reads.len() > usize::from(limit)
                && !half.outstanding_told
            {
                half.outstanding_told = true;
                let frames: Vec<_> = half.reads.iter().map(|read| read.frame).collect();
                let text = format!(
                    "{} READs and ATOMICs are outstanding; the connection allows {limit}",
                    half.reads.len()
                );
                found.add(Kind::RcOutstanding, [frames[frames.len() - 1]], packet.time, ends, text);
            }
        }
        let sent = Sent {
            frame: packet.frame,
            time: packet.time,
            message: half.first_message + half.messages.len() as u64 - 1,
            sends: 1,
            since: half.epoch,
            ack_req: packet.headers.bth.ack_req() || request == Request::Read,
            more: false,
        };
        half.sent.push_back(sent);
        half.sent.extend((1..psns).map(|_| Sent { more: true, ..sent }));
        half.next = Some(packet.psn().add(psns));
        let uc = channel.transport == Transport::Uc;
        half.trim(uc);
    }

    /// Lengths and the sequence of opcodes.
    fn shape(&mut self, at: usize, packet: &Packet<'_>, info: &'static Info, found: &mut Findings) {
        let ends = self.ends(at);
        let channel = &mut self.channels[at];
        let request = Request::of(info.operation);
        let len = packet.roce.payload_len;
        let say = |kind, text, found: &mut Findings| {
            found.add(kind, [packet.frame], packet.time, ends, text);
        };
        let pad = packet.headers.bth.pad();
        if !(u32::from(pad) + len).is_multiple_of(4) {
            say(Kind::RocePad, format!("PadCnt {pad} with {len} octets of payload"), found);
        }
        if let Some(within) = channel.half.within {
            let right = match (within, info.place) {
                (None, Place::First | Place::Only) => true,
                (Some(kind), Place::Middle | Place::Last) => kind == request,
                _ => false,
            };
            if !right {
                let text = match within {
                    None => format!("{} where no message has begun", info.name),
                    Some(kind) => format!("{} in the middle of a {}", info.name, kind.name()),
                };
                say(Kind::RoceOpcodeSeq, text, found);
            }
        }
        match info.place {
            Place::First | Place::Middle => {
                let mtu = *channel.mtu.get_or_insert(len);
                if len != mtu || !matches!(len, 256 | 512 | 1024 | 2048 | 4096) {
                    let text = format!("{} with {len} octets; the path MTU is {mtu}", info.name);
                    say(Kind::RoceLength, text, found);
                    if !matches!(mtu, 256 | 512 | 1024 | 2048 | 4096) {
                        channel.mtu = None;
                    }
                }
            }
            Place::Last if len == 0 => {
                say(Kind::RoceLength, format!("{} without payload", info.name), found);
            }
            Place::Last | Place::Only if matches!(request, Request::Send | Request::Write) => {
                if let Some(mtu) = channel.mtu.filter(|&mtu| len > mtu) {
                    let text = format!("{} with {len} octets; the path MTU is {mtu}", info.name);
                    say(Kind::RoceLength, text, found);
                }
            }
            _ => {}
        }
        let half = &mut channel.half;
        if info.place.begins() {
            (half.whole, half.octets) = (true, 0);
        }
        half.octets += u64::from(len);
        let whole = half.whole;
        half.within = match info.place {
            Place::First | Place::Middle => Some(Some(request)),
            Place::Last | Place::Only => Some(None),
        };
        // What the RETH said against what came of it.
        let reth = match info.place {
            Place::Only => packet.headers.reth.map(|reth| reth.dma_len()),
            _ => half.messages.back().and_then(|message| message.target).map(|(_, _, len)| len),
        };
        if whole
            && info.place.ends()
            && info.operation == Operation::Write
            && let Some(want) = reth
            && half.octets != u64::from(want)
        {
            let text = format!("the WRITE carries {} octets, its RETH says {want}", half.octets);
            say(Kind::RoceLength, text, found);
        }
    }

    /// One whose PSN was seen, or is missing.
    fn old_request(
        &mut self,
        at: usize,
        packet: &Packet<'_>,
        info: &'static Info,
        order: Order,
        max: Option<u16>,
        found: &mut Findings,
    ) {
        let ends = self.ends(at);
        let channel = &mut self.channels[at];
        let uc = channel.transport == Transport::Uc;
        let half = &mut channel.half;
        let psn = packet.psn();
        let number = u64::from(psn.get());
        let index = psn.since(half.base) as usize;
        let entry = half.sent.get(index).copied();
        let mut order = order;
        if order == Order::Unknown
            && let Some(entry) = entry
            && entry.frame != 0
            && !entry.more
            && packet.ident.is_none()
            && let (Some(before), Some(now)) = (entry.time, packet.time)
            && now - before < COPY_NS
        {
            order = Order::Copy(entry.frame);
        }
        if let Order::Copy(first) = order {
            let kind = if uc { Kind::UcDuplicate } else { Kind::RcDuplicate };
            let text =
                format!("{} with PSN {psn} is the packet of frame {first} once more", info.name);
            found.add(kind, [packet.frame], packet.time, ends, text);
            return;
        }
        // Without numbers, a hole that is filled soon and before anybody complained is filled late.
        let hole = half.gaps.iter().position(|gap| gap.has(number) && !gap.in_resend);
        let late = match order {
            Order::Late => true,
            Order::Unknown => hole.is_some_and(|gap| {
                let soon = half.gaps[gap]
                    .time
                    .zip(packet.time)
                    .is_some_and(|(gap, now)| now - gap < 2_000_000);
                uc || soon && half.nak.is_none_or(|nak| nak.frame < half.gaps[gap].frame)
            }),
            _ => false,
        };
        let mut filled = false;
        for gap in &mut half.gaps {
            if late && gap.may_hold(packet.ident) && gap.take(number, 1) {
                filled = true;
                break;
            }
        }
        if late {
            let kind = if uc { Kind::UcReorder } else { Kind::RcReorder };
            let after = half.last_request.map_or(0, |(frame, _)| frame);
            let text =
                format!("{} with PSN {psn} was sent before the packet of frame {after}", info.name);
            found.add(kind, [packet.frame], packet.time, ends, text);
        }
        // A first copy, late or sent again.
        if entry.is_some_and(|entry| entry.frame == 0) {
            half.traffic.octets += u64::from(packet.roce.payload_len);
            half.traffic.messages[Request::of(info.operation).counted()] +=
                u64::from(info.place.ends());
        }
        if filled && entry.is_none_or(|entry| entry.frame == 0) {
            if let Some(entry) = half.sent.get_mut(index) {
                *entry = half_filled(entry, packet, info);
            }
            return;
        }
        if uc {
            return;
        }
        for gap in &mut half.gaps {
            if !late && gap.has(number) {
                gap.lost = true;
            }
        }
        self.resent(at, packet, info, (order, max, late), index, found);
    }

    /// A packet that is sent again.
    fn resent(
        &mut self,
        at: usize,
        packet: &Packet<'_>,
        info: &'static Info,
        (order, max, late): (Order, Option<u16>, bool),
        index: usize,
        found: &mut Findings,
    ) {
        let ends = self.ends(at);
        let half = &mut self.channels[at].half;
        half.traffic.resent += 1;
        let psn = packet.psn();
        let new = match &half.resend {
            None => true,
            Some(_) if late => false,
            Some(resend) => {
                let on = psn.since(resend.last);
                let paused = resend
                    .last_time
                    .zip(packet.time)
                    .is_some_and(|(last, now)| now - last > AT_ONCE_NS);
                let newer = half.nak.is_some_and(|nak| nak.frame > resend.frames[0])
                    || half.rnr.is_some_and(|rnr| rnr.frame > resend.frames[0]);
                on == 0 || on > Psn::HALF || paused || newer
            }
        };
        let mut expected = half.resend.as_ref().map(|resend| resend.last.next());
        if new {
            self.resend_ends(at, found);
            let half = &mut self.channels[at].half;
            let since = |time: Option<i128>| packet.time.zip(time).map(|(now, then)| now - then);
            let cause = match (half.rnr.take(), half.nak.take(), half.skipped.take()) {
                (Some(rnr), _, _) if rnr.psn == psn => Cause::Rnr(rnr.frame, rnr.time, rnr.micros),
                (_, Some(nak), _) if since(nak.time).is_none_or(|ns| ns < AT_ONCE_NS) => {
                    expected = Some(nak.psn);
                    Cause::Nak(nak.frame)
                }
                (_, _, Some((frame, time))) if since(time).is_none_or(|ns| ns < AT_ONCE_NS) => {
                    Cause::ImpliedNak(frame)
                }
                _ => {
                    let (frame, time) = latest(half.last_request, half.last_answer);
                    Cause::TimeOut(frame, time)
                }
            };
            let entry = half.sent.get(index).filter(|entry| entry.frame != 0);
            half.resend = Some(Resend {
                frames: Vec::new(),
                first: psn,
                last: psn,
                time: packet.time,
                last_time: packet.time,
                cause,
                had: entry.map(|entry| (entry.frame, entry.time)),
            });
        }
        let half = &mut self.channels[at].half;
        // One that is missing within the resend shows by its Identification alone: a requester may leave out what
        // it knows to have arrived.
        if let (Some(expected), Order::Ahead(step), Some(ident), Some(_)) =
            (expected, order, packet.ident, max)
        {
            let missing = psn.since(expected);
            if (1..64).contains(&missing) && u32::from(step) == missing + 1 {
                let first = u64::from(expected.get());
                half.gaps.push(Gap {
                    frame: packet.frame,
                    time: packet.time,
                    before: half.last_request.map_or(0, |(frame, _)| frame),
                    missing: SmallVec::from_slice(&[(first, missing.into())]),
                    all: missing.into(),
                    first,
                    idents: Some((ident.wrapping_sub(step - 1), ident.wrapping_sub(1))),
                    lost: true,
                    delivered: false,
                    in_resend: true,
                });
            }
        }
        if let Some(resend) = &mut half.resend {
            resend.frames.push(packet.frame);
            if !late {
                resend.last = psn;
                resend.last_time = packet.time;
            }
        }
        let request = Request::of(info.operation);
        if request == Request::Read {
            // It asks for the rest: the answers begin anew there.
            let read = half.reads.iter_mut().find(|read| psn.since(read.psn) < read.count);
            if let Some(read) = read {
                read.next = psn.since(read.psn);
            }
        }
        if let Some(entry) = half.sent.get_mut(index) {
            let before = if entry.since == half.epoch { entry.sends } else { 1 };
            let sends = before.saturating_add(1).max(2);
            let (more, message) = (entry.more, entry.message);
            let since = half.epoch;
            *entry = Sent { sends, since, more, message, ..half_filled(entry, packet, info) };
            if sends == 4 && half.storm != Some(psn) {
                half.storm = Some(psn);
                let text = format!(
                    "PSN {psn} is sent for the fourth time, without an answer that takes the flow on"
                );
                found.add(Kind::RcRetryStorm, [packet.frame], packet.time, ends, text);
            }
        }
    }

    /// A resend is over: it is told.
    fn resend_ends(&mut self, at: usize, found: &mut Findings) {
        let ends = self.ends(at);
        let ack_timeout = self.channels[at].limits.ack_timeout;
        let Some(resend) = self.channels[at].half.resend.take() else { return };
        let packets = match resend.frames.len() {
            1 => format!("PSN {}", resend.first),
            n => format!("{n} packets from PSN {} to {}", resend.first, resend.last),
        };
        let needless = match resend.had {
            Some((frame, _)) => {
                format!("; the packet of frame {frame} had not been lost before the capture point")
            }
            None => String::new(),
        };
        let (kind, text, extra) = match resend.cause {
            Cause::Rnr(frame, time, micros) => (
                Kind::RcRnr,
                format!(
                    "RNR NAK for PSN {}: it asks for a wait of {}, {} passed until it was sent again",
                    resend.first,
                    span(i128::from(micros) * 1000),
                    between(time, resend.time)
                ),
                Some(frame),
            ),
            Cause::Nak(frame) => (
                Kind::RcRetransmit,
                format!("{packets} again because of the NAK of frame {frame}{needless}"),
                None,
            ),
            Cause::ImpliedNak(frame) => (
                Kind::RcRetransmit,
                format!(
                    "{packets} again because the answer of frame {frame} skipped one (implied NAK)"
                ),
                None,
            ),
            Cause::TimeOut(frame, time) => {
                let of = match ack_timeout {
                    Some(code @ 1..=31) => {
                        format!(" (ACK time-out {code}: {})", span((4096i128) << code))
                    }
                    _ => String::new(),
                };
                (
                    Kind::RcRetransmit,
                    format!(
                        "{packets} again by time-out, {} after frame {frame}{of}{needless}",
                        between(time, resend.time)
                    ),
                    None,
                )
            }
        };
        found.add(kind, resend.frames.iter().copied().chain(extra), resend.time, ends, text);
    }

    // -------------------------------------------------------------------------------- answers

    /// The channel whose requests an answer on channel `at` is for.
    fn asked(&mut self, at: usize, packet: &Packet<'_>) -> Option<usize> {
        if let Some(pair) = self.channels[at].pair {
            return Some(pair);
        }
        let channel = &self.channels[at];
        let candidates = self.between.get(&(channel.dst, channel.src))?;
        let psn = packet.psn();
        let mut fits = candidates.iter().copied().filter(|&other| {
            let half = &self.channels[other].half;
            self.channels[other].pair.is_none()
                && self.channels[other].transport == Transport::Rc
                && (psn.since(half.base) as usize) < half.sent.len()
        });
        let first = fits.next()?;
        if fits.next().is_some() {
            return None;
        }
        self.channels[at].pair = Some(first);
        self.channels[first].pair = Some(at);
        Some(first)
    }

    fn answer(
        &mut self,
        at: usize,
        packet: &Packet<'_>,
        info: &'static Info,
        order: Order,
        max: Option<u16>,
        found: &mut Findings,
    ) {
        let Some(asker) = self.asked(at, packet) else { return };
        self.settle(asker, packet.time, found);
        let ends = self.ends(at);
        let psn = packet.psn();
        if let Order::Copy(first) = order {
            let text =
                format!("{} with PSN {psn} is the packet of frame {first} once more", info.name);
            found.add(Kind::RcDuplicate, [packet.frame], packet.time, ends, text);
            return;
        }
        let learnt = match (info.operation, info.place) {
            (Operation::ReadResponse, Place::First | Place::Middle) => {
                Some(packet.roce.payload_len)
            }
            _ => None,
        };
        if let Some(mtu) = learnt
            && self.channels[asker].mtu.is_none()
            && matches!(mtu, 256 | 512 | 1024 | 2048 | 4096)
        {
            self.channels[asker].mtu = Some(mtu);
            self.channels[asker].half.read_length_known(mtu);
        }
        self.answer_shape(asker, packet, info, ends, found);
        let half = &mut self.channels[asker].half;
        half.answers += 1;
        let late = order == Order::Late;
        if late {
            let text = format!(
                "{} with PSN {psn} was sent before the packet of frame {}",
                info.name, half.last_resp_frame
            );
            found.add(Kind::RcReorder, [packet.frame], packet.time, ends, text);
        }
        if matches!(info.operation, Operation::ReadResponse | Operation::AtomicAck) {
            half.traffic.read_octets += u64::from(packet.roce.payload_len);
            if info.place.ends() && info.operation == Operation::ReadResponse {
                half.measure_read(psn, packet.time);
            }
            half.response(packet, info, order, max, late);
        }
        let syndrome = packet.headers.aeth.map(|aeth| aeth.syndrome());
        match syndrome {
            Some(Syndrome::Nak(code)) => self.nak(asker, ends, packet, code, found),
            Some(Syndrome::RnrNak(code)) => self.rnr(asker, ends, packet, code, found),
            Some(Syndrome::Ack(_)) if info.operation == Operation::Ack => {
                if self.kept.is_some() {
                    self.channels[asker].half.measure(psn.next(), packet.time);
                }
                self.channels[asker].half.acknowledged(psn);
            }
            Some(Syndrome::Reserved(octet)) => {
                let text = format!("an AETH with the reserved syndrome {octet:#04x}");
                found.add(Kind::RcNakOther, [packet.frame], packet.time, ends, text);
            }
            _ => {
                // An answer to a READ acknowledges what was asked before it.
                self.channels[asker].half.acknowledged(psn);
            }
        }
        let half = &mut self.channels[asker].half;
        half.last_answer = Some((packet.frame, packet.time));
        half.last_resp_frame = packet.frame;
    }

    fn answer_shape(
        &self,
        asker: usize,
        packet: &Packet<'_>,
        info: &'static Info,
        ends: (End, End),
        found: &mut Findings,
    ) {
        if info.operation != Operation::ReadResponse {
            return;
        }
        let len = packet.roce.payload_len;
        let pad = packet.headers.bth.pad();
        if !(u32::from(pad) + len).is_multiple_of(4) {
            let text = format!("PadCnt {pad} with {len} octets of payload");
            found.add(Kind::RocePad, [packet.frame], packet.time, ends, text);
        }
        let Some(mtu) = self.channels[asker].mtu else { return };
        let wrong = match info.place {
            Place::First | Place::Middle => len != mtu,
            Place::Last => len == 0 || len > mtu,
            Place::Only => len > mtu,
        };
        if wrong {
            let text = format!("{} with {len} octets; the path MTU is {mtu}", info.name);
            found.add(Kind::RoceLength, [packet.frame], packet.time, ends, text);
        }
    }

    fn nak(
        &mut self,
        asker: usize,
        ends: (End, End),
        packet: &Packet<'_>,
        code: NakCode,
        found: &mut Findings,
    ) {
        let psn = packet.psn();
        let half = &mut self.channels[asker].half;
        half.traffic.naks += 1;
        if code == NakCode::PSN_SEQUENCE {
            // What comes before it is acknowledged.
            half.acknowledged_before(psn);
            half.nak = Some(Nak { frame: packet.frame, time: packet.time, psn });
            let text = format!("NAK, PSN sequence error: PSN {psn} was expected");
            found.add(Kind::RcNakSeq, [packet.frame], packet.time, ends, text);
            return;
        }
        let message = half.message_of(psn).cloned();
        let what = match &message {
            Some(message) => message.words(),
            None => format!("the request with PSN {psn}, which is not in the capture"),
        };
        let kind = match code {
            NakCode::INVALID_REQUEST => Kind::RcNakInvalid,
            NakCode::REMOTE_ACCESS => Kind::RcNakAccess,
            NakCode::REMOTE_OPERATIONAL => Kind::RcNakOp,
            _ => Kind::RcNakOther,
        };
        half.acknowledged_before(psn);
        half.ended = true;
        let name = code.name().unwrap_or("of a reserved code");
        let text = format!("NAK, {name} ({:#04x}), at PSN {psn}: {what}", 0x60 | code.0);
        found.add(kind, [packet.frame], packet.time, ends, text);
        if matches!(code, NakCode::INVALID_REQUEST | NakCode::REMOTE_OPERATIONAL)
            && message.as_ref().is_some_and(|message| message.request == Request::Send)
        {
            let text = format!("{what}, may be longer than the receive that was posted for it");
            found.add(Kind::RcRecvTooSmall, [packet.frame], packet.time, ends, text);
        }
    }

    fn rnr(
        &mut self,
        asker: usize,
        ends: (End, End),
        packet: &Packet<'_>,
        code: u8,
        found: &mut Findings,
    ) {
        let psn = packet.psn();
        let requester = self.ends(asker);
        let limit = self.channels[asker].limits.rnr_retry;
        let half = &mut self.channels[asker].half;
        half.acknowledged_before(psn);
        half.rnr_unanswered(requester, found);
        half.traffic.rnr_naks += 1;
        half.epoch += 1;
        let micros = rnr_micros(code);
        half.rnr = Some(Rnr { frame: packet.frame, time: packet.time, psn, micros });
        half.rnrs = if half.rnrs.0 == psn { (psn, half.rnrs.1 + 1) } else { (psn, 1) };
        let first = packet.headers.aeth.is_some_and(|aeth| aeth.msn() == 0)
            || half.completed == 0 && half.requests < 8;
        if first && !half.rnr_told {
            half.rnr_told = true;
            let text = format!(
                "the RNR NAK answers the first message of the connection (PSN {psn}): receives are posted late"
            );
            found.add(Kind::RcRnrEarly, [packet.frame], packet.time, ends, text);
        }
        if let Some(limit) = limit.filter(|&limit| limit < 7)
            && half.rnrs.1 > u32::from(limit)
            && !half.exhausted_told
        {
            half.exhausted_told = true;
            half.ended = true;
            let text =
                format!("RNR NAK number {} of PSN {psn}, where rnr_retry is {limit}", half.rnrs.1);
            found.add(Kind::RcRnrExhausted, [packet.frame], packet.time, ends, text);
        }
    }

    // ----------------------------------------------------------------------------- settlement

    /// Gaps that nothing will come of any more.
    fn settle(&mut self, at: usize, now: Option<i128>, found: &mut Findings) {
        let half = &self.channels[at].half;
        if half.gaps.is_empty() && half.resp_gaps.is_empty() {
            return;
        }
        let full = half.gaps.len().max(half.resp_gaps.len()) > MOST_GAPS;
        let over = |gap: &Gap| match (gap.time, now) {
            (Some(then), Some(now)) => full || now - then > SETTLED_NS,
            _ => full,
        };
        let uc = self.channels[at].transport == Transport::Uc;
        let ends = self.ends(at);
        let back = self.channels[at].pair.map_or((ends.1, ends.0), |pair| self.ends(pair));
        let half = &mut self.channels[at].half;
        half.gaps.retain(|gap| {
            let empty = gap.missing.is_empty();
            if !empty && over(gap) {
                tell_gap(gap, if uc { Kind::UcPsnGap } else { Kind::RcPsnGap }, ends, found);
            }
            !empty && !over(gap)
        });
        half.resp_gaps.retain(|gap| {
            let empty = gap.missing.is_empty();
            if !empty && over(gap) {
                tell_gap(gap, Kind::RcRespGap, back, found);
            }
            !empty && !over(gap)
        });
    }

    /// The requester asked several times and got nothing, and now it is over.
    fn given_up(&mut self, at: usize, found: &mut Findings) {
        self.resend_ends(at, found);
        let ends = self.ends(at);
        let limit = self.channels[at].limits.retry;
        let half = &mut self.channels[at].half;
        if half.exhausted_told {
            return;
        }
        let Some(oldest) = half.oldest() else { return };
        let tries = if oldest.1.since == half.epoch { oldest.1.sends.saturating_sub(1) } else { 0 };
        if let Some(limit) = limit
            && limit > 0
            && tries >= limit
        {
            half.exhausted_told = true;
            let text = format!(
                "PSN {} was sent {} times without an answer; retry_cnt is {limit}",
                oldest.0,
                tries + 1
            );
            let (frame, time) = half.last_request.unwrap_or((oldest.1.frame, oldest.1.time));
            found.add(Kind::RcRetryExhausted, [frame], time, ends, text);
        }
    }

    /// The end of a channel: everything is settled.
    fn end(&mut self, at: usize, last: Option<i128>, found: &mut Findings) {
        self.given_up(at, found);
        let uc = self.channels[at].transport == Transport::Uc;
        let ends = self.ends(at);
        let back = self.channels[at].pair.map_or((ends.1, ends.0), |pair| self.ends(pair));
        let paired = self.channels[at].pair.is_some();
        let half = &mut self.channels[at].half;
        half.rnr_unanswered(ends, found);
        for gap in half.gaps.drain(..).filter(|gap| !gap.missing.is_empty()) {
            tell_gap(&gap, if uc { Kind::UcPsnGap } else { Kind::RcPsnGap }, ends, found);
        }
        for gap in half.resp_gaps.drain(..).filter(|gap| !gap.missing.is_empty()) {
            tell_gap(&gap, Kind::RcRespGap, back, found);
        }
        if uc || half.requests == 0 {
            return;
        }
        let asked = half.sent.iter().any(|sent| sent.ack_req);
        if half.answers == 0 && !paired && asked {
            let (frame, time) = half.last_request.unwrap_or_default();
            let text = format!("{} requests, and not one answer in the capture", half.requests);
            found.add(Kind::CapOneWay, [frame], time, ends, text);
            return;
        }
        if half.ended || half.exhausted_told {
            return;
        }
        let Some((psn, oldest)) = half.oldest() else { return };
        let since = |time: Option<i128>| last.zip(time).map_or(0, |(last, time)| last - time);
        let request = half.last_request.and_then(|(_, time)| time);
        let answer = half.last_answer.and_then(|(_, time)| time);
        if since(request).min(since(answer.or(request))) > SILENT_NS {
            let who = if answer > request { "requester" } else { "responder" };
            let text = format!(
                "PSN {psn} (frame {}) was not answered, and for {} nothing comes of the {who}",
                oldest.frame,
                span(since(request).min(since(answer.or(request))))
            );
            found.add(Kind::FlowStalled, [oldest.frame], oldest.time, ends, text);
        } else if since(oldest.time) > SILENT_NS && oldest.ack_req {
            let text =
                format!("PSN {psn} asked for an ACK and got none in {}", span(since(oldest.time)));
            found.add(Kind::RcAckReqUnanswered, [oldest.frame], oldest.time, ends, text);
        }
    }

    pub(crate) fn finish(&mut self, last: Option<i128>, found: &mut Findings) {
        for at in 0..self.channels.len() {
            self.end(at, last, found);
        }
    }
}

/// The later of two.
fn latest(a: Option<(u64, Option<i128>)>, b: Option<(u64, Option<i128>)>) -> (u64, Option<i128>) {
    match (a, b) {
        (Some(a), Some(b)) => {
            if a.0 >= b.0 {
                a
            } else {
                b
            }
        }
        (a, b) => a.or(b).unwrap_or_default(),
    }
}

/// The entry of a PSN that came after all, or again.
fn half_filled(entry: &Sent, packet: &Packet<'_>, info: &'static Info) -> Sent {
    let request = Request::of(info.operation);
    Sent {
        frame: packet.frame,
        time: packet.time,
        message: entry.message,
        sends: entry.sends.max(1),
        since: entry.since,
        ack_req: packet.headers.bth.ack_req() || request == Request::Read,
        more: entry.more,
    }
}

fn tell_gap(gap: &Gap, kind: Kind, ends: (End, End), found: &mut Findings) {
    let psns = if gap.all == 1 {
        format!("PSN {}", gap.first)
    } else {
        format!("{} packets from PSN {} on", gap.all, gap.first)
    };
    if gap.delivered && !gap.lost {
        let text = format!("{psns} in front of this one are acknowledged, but not in the capture");
        found.add(Kind::CapFramesMissing, [gap.frame], gap.time, ends, text);
        return;
    }
    let mut text = format!("{psns} missing in front of this packet");
    if gap.in_resend {
        text.push_str(", within a resend");
    }
    if let Some((first, last)) = gap.idents {
        let _ = match first == last {
            true => write!(text, "; so is the IPv4 Identification {first}"),
            false => write!(text, "; so are the IPv4 Identifications {first} to {last}"),
        };
    }
    found.add(kind, [gap.frame], gap.time, ends, text);
}

impl Message {
    /// For people.
    fn words(&self) -> String {
        let frames = if self.first_frame == self.last_frame {
            format!("frame {}", self.first_frame)
        } else {
            format!("frames {} to {}", self.first_frame, self.last_frame)
        };
        match self.target {
            Some((va, rkey, len)) => {
                format!(
                    "the {} of {frames}, {len} octets at {va:#x} with R_Key {rkey:#x}",
                    self.request.name()
                )
            }
            None => {
                format!("the {} of {frames}, {} octets so far", self.request.name(), self.octets)
            }
        }
    }
}

impl Half {
    /// The connection is over: what is not open any more is forgotten.
    fn forget(&mut self) {
        if self.gaps.is_empty() && self.resp_gaps.is_empty() && self.oldest().is_none() {
            self.base = self.base.add(self.sent.len() as u32);
            self.first_message += self.messages.len() as u64;
            self.sent = VecDeque::new();
            self.messages = VecDeque::new();
        }
    }

    /// Forgets what is acknowledged and long gone.
    fn trim(&mut self, uc: bool) {
        let una = match (uc, self.una) {
            (true, _) => self.sent.len(),
            (false, Some(una)) => {
                let done = una.since(self.base);
                if done < FAR { (done as usize).min(self.sent.len()) } else { 0 }
            }
            (false, None) => 0,
        };
        let spare = una.saturating_sub(BEHIND).max(self.sent.len().saturating_sub(MOST));
        if spare == 0 {
            return;
        }
        self.sent.drain(..spare);
        self.base = self.base.add(spare as u32);
        let oldest = self.sent.front().map_or(u64::MAX, |sent| sent.message);
        while self.first_message < oldest && self.messages.len() > 1 {
            self.messages.pop_front();
            self.first_message += 1;
        }
    }

    /// An ACK comes of everything before `until`: how long did it take?
    fn measure(&mut self, until: Psn, time: Option<i128>) {
        let Some(time) = time else { return };
        let from = self.una.unwrap_or(self.base);
        let (first, count) = (from.since(self.base) as usize, until.since(from) as usize);
        if count > self.sent.len() {
            return;
        }
        let mut last = u64::MAX;
        for sent in self.sent.iter().skip(first).take(count).rev() {
            // The last packet of each message, if it was sent once.
            let new = sent.message != last;
            last = sent.message;
            let (true, Some(then)) = (new && sent.sends == 1, sent.time) else { continue };
            let message = sent
                .message
                .checked_sub(self.first_message)
                .and_then(|at| self.messages.get(usize::try_from(at).ok()?));
            match message.map(|message| message.request) {
                Some(Request::Send) => self.traffic.send_to_ack.add(time - then),
                Some(Request::Write) => self.traffic.write_to_ack.add(time - then),
                _ => {}
            }
        }
    }

    /// The last answer to a READ.
    fn measure_read(&mut self, psn: Psn, time: Option<i128>) {
        let read = self.reads.iter().find(|read| psn.since(read.psn) < read.count);
        let asked = read.and_then(|read| self.sent.get(read.psn.since(self.base) as usize));
        if let (Some(time), Some(sent)) = (time, asked)
            && sent.sends == 1
            && let Some(then) = sent.time
        {
            self.traffic.read_to_last.add(time - then);
        }
    }

    /// Everything up to this PSN is done.
    fn acknowledged(&mut self, psn: Psn) {
        self.acknowledged_before(psn.next());
    }

    fn acknowledged_before(&mut self, psn: Psn) {
        let done = psn.since(self.base);
        if done as usize > self.sent.len() {
            // Of something that was not seen, or long ago.
            return;
        }
        if self.una.is_some_and(|una| !una.is_before(psn)) {
            return;
        }
        self.una = Some(psn);
        self.completed += 1;
        self.epoch += 1;
        while let Some(read) = self.reads.front() {
            let end = read.psn.add(read.count);
            if end != psn && psn.is_before(end) {
                break;
            }
            self.reads.pop_front();
        }
        for gap in &mut self.gaps {
            for &(first, count) in &gap.missing {
                let end = Psn::new(first as u32).add(count as u32);
                if end == psn || end.is_before(psn) {
                    gap.delivered = true;
                }
            }
        }
        self.nak = None;
        self.storm = None;
    }

    /// A READ response, or an atomic's: is it the next?
    fn response(
        &mut self,
        packet: &Packet<'_>,
        info: &'static Info,
        order: Order,
        max: Option<u16>,
        late: bool,
    ) {
        let psn = packet.psn();
        let number = u64::from(psn.get());
        if late {
            for gap in &mut self.resp_gaps {
                if gap.may_hold(packet.ident) && gap.take(number, 1) {
                    return;
                }
            }
        }
        let Some(which) = self.reads.iter().position(|read| psn.since(read.psn) < read.count)
        else {
            // The answer to a repeated request that was answered already.
            return;
        };
        let mut missing = SmallVec::<[(u64, u64); 2]>::new();
        for read in self.reads.iter().take(which) {
            if read.next < read.count {
                missing
                    .push((read.psn.add(read.next).get().into(), (read.count - read.next).into()));
            }
        }
        let read = &mut self.reads[which];
        let offset = psn.since(read.psn);
        if offset > read.next {
            missing.push((read.psn.add(read.next).get().into(), (offset - read.next).into()));
        }
        if offset >= read.next {
            read.next = offset + 1;
        }
        if info.place.ends() && read.next >= read.count {
            self.reads.drain(..which);
        }
        if let Some(&(first, _)) = missing.first() {
            let idents = match (order, max, packet.ident) {
                (Order::Ahead(step), Some(_), Some(ident)) if step > 1 => {
                    Some((ident.wrapping_sub(step - 1), ident.wrapping_sub(1)))
                }
                _ => None,
            };
            self.skipped = Some((packet.frame, packet.time));
            self.resp_gaps.push(Gap {
                frame: packet.frame,
                time: packet.time,
                before: self.last_resp_frame,
                all: missing.iter().map(|(_, count)| count).sum(),
                missing,
                first,
                idents,
                lost: true,
                delivered: false,
                in_resend: false,
            });
        }
    }

    /// The path MTU is known at last: READs that were counted without it.
    fn read_length_known(&mut self, mtu: u32) {
        let Some(read) = self.reads.back_mut() else { return };
        let message = self.messages.iter().rev().find(|message| message.psn == read.psn);
        let Some((_, _, len)) = message.and_then(|message| message.target) else { return };
        let count = len.div_ceil(mtu).max(1);
        if self.slack > 0 && count > read.count && self.next == Some(read.psn.add(read.count)) {
            let extra = count - read.count;
            if let Some(&last) = self.sent.back() {
                self.sent.extend((0..extra).map(|_| Sent { more: true, ..last }));
            }
            read.count = count;
            self.next = Some(read.psn.add(count));
        }
        self.slack = 0;
    }

    fn message_of(&self, psn: Psn) -> Option<&Message> {
        let sent = self.sent.get(psn.since(self.base) as usize)?;
        self.messages.get(usize::try_from(sent.message.checked_sub(self.first_message)?).ok()?)
    }

    /// The oldest that is not acknowledged.
    fn oldest(&self) -> Option<(Psn, Sent)> {
        let una = self.una.unwrap_or(self.base);
        let at = una.since(self.base) as usize;
        let sent = self.sent.get(at)?;
        // A READ is not done before its last answer.
        Some((una, *sent))
    }

    /// An RNR NAK behind which nothing was sent again.
    fn rnr_unanswered(&mut self, ends: (End, End), found: &mut Findings) {
        if let Some(rnr) = self.rnr.take() {
            let text = format!(
                "RNR NAK for PSN {}: it asks for a wait of {}; it was not sent again",
                rnr.psn,
                span(i128::from(rnr.micros) * 1000)
            );
            found.add(Kind::RcRnr, [rnr.frame], rnr.time, ends, text);
        }
    }
}
