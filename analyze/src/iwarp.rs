//! MPA, DDP and RDMAP of one stream.

use std::{collections::VecDeque, net::SocketAddr};

use userdma_proto::{
    dissect::{CrcState, DdpHeader, Fpdu, Frame, Iwarp, Markers, Operation, Start},
    wire::iwarp::{
        ddp::Segment,
        mpa::{NO_NEGOTIATION, StartFlags, StartKind},
        rdmap::Opcode,
        terminate::{TermLayer, Terminate},
    },
};

use crate::{
    End, Findings, Kind, between,
    flow::{Message, Traffic},
    span,
};

/// What a start-up waits for its answer at most, before it counts as unanswered.
const REPLY_NS: i128 = 10_000_000_000;

/// READs whose answers are waited for.
const MOST_READS: usize = 4096;

/// One of the two start-up frames.
#[derive(Debug, Clone)]
struct Begun {
    side: usize,
    frame: u64,
    time: Option<i128>,
    start: Start,
}

/// What one side sends.
#[derive(Debug, Default)]
struct Side {
    fpdus: u64,
    /// Next MSN of the queues 0 to 2, and the offset within the message.
    msn: [Option<u32>; 4],
    offset: [u32; 4],
    sequence_told: bool,
    length_told: bool,
    markers_told: bool,
    /// READs of this side that wait for their response.
    reads: VecDeque<u64>,
    outstanding_told: bool,
    /// The last messages: what a TERMINATE may mean.
    last: VecDeque<Sent>,
    /// When the READs were asked for.
    asked: VecDeque<Option<i128>>,
    traffic: Traffic,
}

/// A message that was sent.
#[derive(Debug, Clone)]
struct Sent {
    opcode: Opcode,
    first: u64,
    last: u64,
    octets: u64,
    queue: Option<(u32, u32)>,
}

/// MPA, DDP and RDMAP of a stream.
#[derive(Debug, Default)]
pub(crate) struct Session {
    request: Option<Begun>,
    reply: Option<Begun>,
    sides: [Side; 2],
    told_first: bool,
    told_rtr: bool,
    mid_told: bool,
    terminated: Option<u64>,
    failed: bool,
}

impl Session {
    /// What the stream's end came after, for people.
    pub(crate) fn last_words(&self) -> String {
        match (self.terminated, &self.reply) {
            (Some(frame), _) => format!("after the TERMINATE of frame {frame}"),
            (None, Some(reply)) if reply.start.flags.contains(StartFlags::REJECT) => {
                format!("after the rejecting reply of frame {}", reply.frame)
            }
            _ => {
                let [a, b] = [self.sides[0].fpdus, self.sides[1].fpdus];
                format!("after {} FPDUs, without a TERMINATE", a + b)
            }
        }
    }

    pub(crate) fn items(
        &mut self,
        side: usize,
        frame: &Frame,
        ends: [SocketAddr; 2],
        found: &mut Findings,
    ) {
        for item in &frame.iwarp {
            match item {
                Iwarp::Start(start) => self.start(side, frame, start, ends, found),
                Iwarp::Fpdu(fpdu) => self.fpdu(side, frame, fpdu, ends, found),
                Iwarp::Error(_) => {}
            }
        }
    }

    fn sockets(ends: [SocketAddr; 2], side: usize) -> (End, End) {
        (End::Socket(ends[side]), End::Socket(ends[1 - side]))
    }

    fn start(
        &mut self,
        side: usize,
        frame: &Frame,
        start: &Start,
        ends: [SocketAddr; 2],
        found: &mut Findings,
    ) {
        let begun = Begun { side, frame: frame.number, time: frame.time_ns, start: start.clone() };
        if start.kind == StartKind::Request {
            self.request = Some(begun);
            return;
        }
        let sockets = Self::sockets(ends, side);
        let mut frames = vec![frame.number];
        let odd = |start: &Start| {
            let known =
                StartFlags::MARKERS | StartFlags::CRC | StartFlags::REJECT | StartFlags::ENHANCED;
            start.flags.bits() & !known.bits()
        };
        let request = self.request.as_ref();
        let mut bits = odd(start);
        if let Some(request) = request.filter(|request| odd(&request.start) != 0) {
            bits |= odd(&request.start);
            if odd(start) == 0 {
                frames.clear();
            }
            frames.push(request.frame);
        }
        if bits != 0 {
            let text = if bits == StartFlags::GSO_EXP.bits() {
                "the flag 0x0800, by which Linux's siw asks for FPDUs larger than a segment"
                    .to_owned()
            } else {
                format!("reserved flags {:#06x}", u16::from(bits) << 8)
            };
            found.add(Kind::MpaReservedFlag, frames, frame.time_ns, sockets, text);
        }
        if start.flags.contains(StartFlags::REJECT) {
            found.add(
                Kind::MpaReject,
                [frame.number],
                frame.time_ns,
                sockets,
                rejected(request, start),
            );
        } else if let Some(request) = request
            && let Some(text) = mismatch(&request.start, start)
        {
            found.add(Kind::MpaMismatch, [frame.number], frame.time_ns, sockets, text);
        }
        self.reply = Some(begun);
    }

    fn fpdu(
        &mut self,
        side: usize,
        frame: &Frame,
        fpdu: &Fpdu,
        ends: [SocketAddr; 2],
        found: &mut Findings,
    ) {
        let sockets = Self::sockets(ends, side);
        let mut say =
            |kind, text: String| found.add(kind, [frame.number], frame.time_ns, sockets, text);
        if self.request.is_none() && self.reply.is_none() && !self.mid_told {
            self.mid_told = true;
            say(Kind::CapMidFlow, "the stream's start-up is not in the capture".into());
        }
        if fpdu.crc_in_use == Some(true) && fpdu.crc != CrcState::Good {
            let how = if fpdu.crc == CrcState::Zero { "zero" } else { "wrong" };
            say(Kind::IwCrcBad, format!("the CRC is {how}, though the start-up turned it on"));
        }
        if fpdu.markers == Markers::OffGrid && !self.sides[side].markers_told {
            self.sides[side].markers_told = true;
            say(
                Kind::MpaMarkerOffGrid,
                "a marker is not at a multiple of 512 octets of the stream".into(),
            );
        }
        if let Some(error) = &fpdu.error
            && !self.sides[side].length_told
        {
            self.sides[side].length_told = true;
            say(Kind::IwLength, error.clone());
        }
        let Some(header) = fpdu.header else { return };
        let opcode = header.opcode();
        // Who begins.
        let initiator = self.request.as_ref().map(|request| request.side);
        if let (Some(initiator), Some(reply)) = (initiator, &self.reply) {
            let p2p = reply.start.enhanced.filter(|enhanced| enhanced.peer_to_peer);
            if side != initiator && self.sides[initiator].fpdus == 0 && !self.told_first {
                self.told_first = true;
                let text = format!(
                    "the responder's {} comes {} after its reply, before any FPDU of the initiator",
                    name(opcode),
                    between(reply.time, frame.time_ns)
                );
                say(Kind::MpaResponderFirst, text);
            }
            if let Some(p2p) = p2p
                && side == initiator
                && self.sides[initiator].fpdus == 0
                && !self.told_rtr
            {
                self.told_rtr = true;
                let empty = match &fpdu.operation {
                    Operation::ReadRequest(read) => read.size.get() == 0,
                    _ => fpdu.payload_len == 0,
                };
                let chosen = match opcode {
                    Opcode::WRITE => p2p.rtr_write,
                    Opcode::READ_REQUEST => p2p.rtr_read,
                    Opcode::SEND => p2p.rtr_send,
                    _ => false,
                };
                if !empty || !chosen {
                    let text = format!(
                        "the initiator's first FPDU is a {} of {} octets, which is not the ready-to-receive message that the reply chose",
                        name(opcode),
                        fpdu.payload_len
                    );
                    say(Kind::MpaRtr, text);
                }
            }
        }
        self.sides[side].fpdus += 1;
        self.count(side, frame, fpdu, header);
        self.sequence(side, frame, fpdu, header, sockets, found);
        self.reads(side, frame, fpdu, opcode, sockets, found);
        if let Operation::Terminate(terminate, _) = &fpdu.operation {
            self.terminate(side, frame, terminate, sockets, found);
        }
    }

    /// What goes where, for the table of flows.
    fn count(&mut self, side: usize, frame: &Frame, fpdu: &Fpdu, header: DdpHeader) {
        let opcode = header.opcode();
        let octets = u64::from(fpdu.payload_len);
        if opcode == Opcode::READ_RESPONSE {
            let asker = &mut self.sides[1 - side];
            asker.traffic.read_octets += octets;
            if header.last()
                && let Some(Some(then)) = asker.asked.pop_front()
                && let Some(now) = frame.time_ns
            {
                asker.traffic.read_to_last.add(now - then);
            }
            return;
        }
        let this = &mut self.sides[side];
        let kind = match opcode {
            Opcode::WRITE => Message::Write,
            Opcode::READ_REQUEST => Message::Read,
            op if op.is_send() => Message::Send,
            _ => Message::Other,
        };
        this.traffic.packets += 1;
        if matches!(kind, Message::Send | Message::Write) {
            this.traffic.octets += octets;
        }
        this.traffic.messages[kind as usize] += u64::from(header.last());
        if kind == Message::Read {
            this.asked.push_back(frame.time_ns);
            if this.asked.len() > MOST_READS {
                this.asked.pop_front();
            }
        }
    }

    pub(crate) fn take_traffic(&mut self) -> [Traffic; 2] {
        let [a, b] = &mut self.sides;
        [std::mem::take(&mut a.traffic), std::mem::take(&mut b.traffic)]
    }

    /// Queue numbers, MSNs and offsets.
    fn sequence(
        &mut self,
        side: usize,
        frame: &Frame,
        fpdu: &Fpdu,
        header: DdpHeader,
        sockets: (End, End),
        found: &mut Findings,
    ) {
        let this = &mut self.sides[side];
        let opcode = header.opcode();
        let payload = u64::from(fpdu.payload_len);
        let queue = match header {
            DdpHeader::Untagged(untagged) => Some((untagged.qn.get(), untagged.msn().0)),
            DdpHeader::Tagged(_) => None,
        };
        let continues = this
            .last
            .back()
            .is_some_and(|last| last.opcode == opcode && last.queue == queue && !last_ended(last));
        if continues {
            if let Some(last) = this.last.back_mut() {
                last.last = frame.number;
                last.octets += payload;
            }
        } else {
            this.last.push_back(Sent {
                opcode,
                first: frame.number,
                last: frame.number,
                octets: payload,
                queue,
            });
            if this.last.len() > 64 {
                this.last.pop_front();
            }
        }
        if header.last()
            && let Some(last) = this.last.back_mut()
        {
            last.octets |= ENDED;
        }
        let DdpHeader::Untagged(untagged) = header else { return };
        let (qn, msn, mo) = (untagged.qn.get(), untagged.msn().0, untagged.mo.get());
        let mut wrong = None;
        let right_queue = match opcode {
            Opcode::READ_REQUEST => qn == 1,
            Opcode::TERMINATE => qn == 2,
            op if op.is_send() => qn == 0,
            _ => true,
        };
        if !right_queue {
            wrong = Some(format!("a {} on queue {qn}", name(opcode)));
        } else if let Some(at) = usize::try_from(qn).ok().filter(|&at| at < 4) {
            let expected = this.msn[at];
            if let Some(expected) = expected {
                if msn != expected {
                    wrong = Some(format!("MSN {msn} on queue {qn}, where {expected} is due"));
                } else if mo != this.offset[at] {
                    wrong = Some(format!(
                        "message offset {mo} in MSN {msn} of queue {qn}, where {} is due",
                        this.offset[at]
                    ));
                }
            } else if self.reply.is_some() && msn != 1 {
                wrong = Some(format!("the first MSN of queue {qn} is {msn}, not 1"));
            }
            let this = &mut self.sides[side];
            if untagged.last() {
                this.msn[at] = Some(msn.wrapping_add(1));
                this.offset[at] = 0;
            } else {
                this.msn[at] = Some(msn);
                this.offset[at] = mo.wrapping_add(fpdu.payload_len.into());
            }
        }
        let this = &mut self.sides[side];
        if let Some(text) = wrong.filter(|_| !this.sequence_told) {
            this.sequence_told = true;
            found.add(Kind::IwSequence, [frame.number], frame.time_ns, sockets, text);
        }
    }

    /// READs under way against what was agreed on.
    fn reads(
        &mut self,
        side: usize,
        frame: &Frame,
        fpdu: &Fpdu,
        opcode: Opcode,
        sockets: (End, End),
        found: &mut Findings,
    ) {
        if opcode == Opcode::READ_RESPONSE {
            if fpdu.header.is_some_and(|header| header.last()) {
                self.sides[1 - side].reads.pop_front();
            }
            return;
        }
        if opcode != Opcode::READ_REQUEST {
            return;
        }
        self.sides[side].reads.push_back(frame.number);
        // Where only one direction is in the capture, no answer comes.
        if self.sides[side].reads.len() > MOST_READS {
            self.sides[side].reads.pop_front();
        }
        let limit = self.read_limit(side);
        let this = &mut self.sides[side];
        if let Some(limit) = limit
            && this.reads.len() > usize::from(limit)
            && !this.outstanding_told
            // An answer that the capture lacks would be counted for ever.
            && self.terminated.is_none()
        {
            // The ready-to-receive READ comes before depths count.
            let Operation::ReadRequest(read) = &fpdu.operation else { return };
            if this.fpdus == 1 && read.size.get() == 0 {
                return;
            }
            this.outstanding_told = true;
            let text =
                format!("{} READs are outstanding; the start-up allows {limit}", this.reads.len());
            found.add(Kind::IwOutstanding, [frame.number], frame.time_ns, sockets, text);
        }
    }

    /// How many READs this side may have under way.
    fn read_limit(&self, side: usize) -> Option<u16> {
        let (request, reply) = (self.request.as_ref()?, self.reply.as_ref()?);
        let (own, other) = if side == request.side {
            (&request.start, &reply.start)
        } else {
            (&reply.start, &request.start)
        };
        let (own, other) = (own.enhanced?, other.enhanced?);
        if own.ord == NO_NEGOTIATION || other.ird == NO_NEGOTIATION {
            return None;
        }
        Some(own.ord.min(other.ird))
    }

    fn terminate(
        &mut self,
        side: usize,
        frame: &Frame,
        terminate: &Terminate,
        sockets: (End, End),
        found: &mut Findings,
    ) {
        self.terminated = Some(frame.number);
        let code = terminate.code;
        let segment = terminate.ddp_header.as_ref().and_then(|header| header.segment());
        let drew = self.drew(1 - side, segment.as_ref(), terminate);
        let what = match &drew {
            Some(sent) => {
                let frames = if sent.first == sent.last {
                    format!("frame {}", sent.first)
                } else {
                    format!("frames {} to {}", sent.first, sent.last)
                };
                format!(
                    "; it answers the {} of {frames}, {} octets",
                    name(sent.opcode),
                    sent.octets & !ENDED
                )
            }
            None => String::new(),
        };
        let aim = match segment {
            Some(Segment::Tagged { header, .. }) => {
                format!(", STag {:#010x} at {:#x}", header.stag().0, header.to.get())
            }
            Some(Segment::Untagged { header, .. }) => {
                format!(", queue {} MSN {}", header.qn.get(), header.msn().0)
            }
            None => String::new(),
        };
        let read = match terminate.read_request() {
            Some(read) => format!(", source STag {:#010x}", read.source_stag.get()),
            None => String::new(),
        };
        let text = format!("{code}{aim}{read}{what}");
        found.add(Kind::IwTerminate, [frame.number], frame.time_ns, sockets, text);
        if terminate.swapped {
            let text = "layer and type are swapped, and M, D, R at the other end of their octet"
                .to_owned();
            found.add(Kind::IwTerminateOrder, [frame.number], frame.time_ns, sockets, text);
        }
        if code.layer == TermLayer::DDP && code.etype == 2 && matches!(code.code, 2 | 5) {
            let text = match code.code {
                5 => "the SEND is longer than the receive that was posted for it".to_owned(),
                _ => "no receive was posted for the SEND, or, as Linux's siw says it, a receive too small".to_owned(),
            };
            found.add(Kind::IwRecvMissing, [frame.number], frame.time_ns, sockets, text);
        }
    }

    /// The message that drew a TERMINATE, of the side that did not send it.
    fn drew(
        &self,
        side: usize,
        segment: Option<&Segment<'_>>,
        terminate: &Terminate,
    ) -> Option<Sent> {
        let last = &self.sides[side].last;
        if terminate.read_request().is_some() {
            return last.iter().rev().find(|sent| sent.opcode == Opcode::READ_REQUEST).cloned();
        }
        match segment {
            Some(Segment::Untagged { header, .. }) => {
                let queue = (header.qn.get(), header.msn().0);
                last.iter().rev().find(|sent| sent.queue == Some(queue)).or(last.back()).cloned()
            }
            Some(Segment::Tagged { .. }) => {
                last.iter().rev().find(|sent| sent.queue.is_none()).cloned()
            }
            None => last.back().cloned(),
        }
    }

    /// The stream is reset by `side`: a start-up that failed?
    pub(crate) fn reset(
        &mut self,
        side: usize,
        frame: &Frame,
        ends: [SocketAddr; 2],
        found: &mut Findings,
    ) {
        let (Some(request), Some(reply)) = (&self.request, &self.reply) else { return };
        let refused = reply.start.flags.contains(StartFlags::REJECT);
        if refused || self.failed || self.terminated.is_some() || self.sides[request.side].fpdus > 0
        {
            return;
        }
        self.failed = true;
        let who = if side == request.side { "initiator" } else { "responder" };
        let text = format!(
            "the {who} resets the stream {} after the reply; the initiator has not sent one FPDU, the responder {}",
            between(reply.time, frame.time_ns),
            self.sides[reply.side].fpdus
        );
        found.add(
            Kind::MpaSetupFailed,
            [frame.number],
            frame.time_ns,
            Self::sockets(ends, side),
            text,
        );
    }

    pub(crate) fn finish(
        &mut self,
        last: Option<i128>,
        ends: [SocketAddr; 2],
        found: &mut Findings,
    ) {
        if let (Some(request), None) = (&self.request, &self.reply) {
            let waited = last.zip(request.time).map_or(0, |(last, time)| last - time);
            if waited > REPLY_NS {
                let text = format!("the MPA request was not answered in {}", span(waited));
                let sockets = Self::sockets(ends, request.side);
                found.add(Kind::MpaTimeout, [request.frame], request.time, sockets, text);
            }
        }
    }
}

/// In [`Sent::octets`]: the message has ended.
const ENDED: u64 = 1 << 63;

fn last_ended(sent: &Sent) -> bool {
    sent.octets & ENDED != 0
}

fn name(opcode: Opcode) -> &'static str {
    opcode.name().unwrap_or("message")
}

fn rejected(request: Option<&Begun>, reply: &Start) -> String {
    let words: String = reply
        .private_data
        .iter()
        .take_while(|octet| octet.is_ascii_graphic() || **octet == b' ')
        .map(|&octet| char::from(octet))
        .collect();
    let mut text = String::from("the reply refuses the connection");
    if words.len() >= 3 {
        text += &format!(", with the private data {words:?}");
    }
    if let Some(request) = request {
        let asked = request.start.flags;
        if asked.contains(StartFlags::CRC) && !reply.flags.contains(StartFlags::CRC) {
            text += "; the request wants a CRC, the reply does not";
        }
        if asked.contains(StartFlags::MARKERS) {
            text += "; the request wants markers";
        }
        if request.start.revision != reply.revision {
            text += &format!(
                "; revision {} was asked for, {} answered",
                request.start.revision, reply.revision
            );
        }
    }
    text
}

/// What request and reply do not agree on.
fn mismatch(request: &Start, reply: &Start) -> Option<String> {
    if request.revision != reply.revision {
        return Some(format!(
            "revision {} was asked for, {} answered",
            request.revision, reply.revision
        ));
    }
    let (Some(asked), Some(given)) = (request.enhanced, reply.enhanced) else {
        return (request.enhanced.is_some() != reply.enhanced.is_some())
            .then(|| "only one of both frames has queue depths (S)".into());
    };
    if given.ord > asked.ird && given.ord != NO_NEGOTIATION && asked.ird != NO_NEGOTIATION {
        return Some(format!(
            "the responder's ORD {} is above the initiator's IRD {}",
            given.ord, asked.ird
        ));
    }
    if asked.peer_to_peer != given.peer_to_peer {
        let who = if asked.peer_to_peer { "request" } else { "reply" };
        return Some(format!("only the {who} wants peer-to-peer"));
    }
    if asked.peer_to_peer {
        let common = asked.rtr_send && given.rtr_send
            || asked.rtr_write && given.rtr_write
            || asked.rtr_read && given.rtr_read;
        if !common {
            return Some(
                "the reply chooses no ready-to-receive message that the request offers".into(),
            );
        }
    }
    None
}
