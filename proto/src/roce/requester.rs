//! The requester: send queue, request packets, and for RC what the peer answers to them
//! (IBTA vol. 1, 9.7.2, 9.7.3, 9.7.7).
//!
//! Packets are counted by a number of 64 bits whose low 24 are the PSN:
//!
//! ```text
//!    una: oldest not acknowledged      max: never sent yet
//!     │                                 │
//!  ───┼─────────────┬───────────────────┼──────────────►
//!     │  on the way │ to be sent again  │
//!                   next: sent next; una again after a loss, max where nothing was lost
//! ```
//!
//! Where the peer keeps what comes out of order, the point of sending goes over the same packets after
//! a loss, but passes those that need not be sent again ([`Hole`]).
//!
//! A READ takes as many numbers as its responses are, and is on the way until the last of them
//! came. It is asked for in requests of at most half the window each.

use alloc::collections::VecDeque;
use core::time::Duration;

use super::{
    Attributes, Completion, Config, Qp, Reason, Received, Train, Window,
    load::{LEAST, Load, OVERHEAD, Pool, Starved, weigh},
    qp::canonical,
    responder::scatter,
    transmit::{Limit, Source, packet_len},
};
use crate::{
    mem::Memory,
    time::{Instant, sooner},
    verbs::{
        Access, Payload, PostError, QpState, QpType, SendFlags, SendOp, SendWr, Sge, UdDest, Wc,
        WcStatus,
    },
    wire::{
        ids::Psn,
        roce::{
            Headers,
            aeth::{NakCode, Syndrome, credits, rnr_micros},
            atomic::AtomicEth,
            bth::Bth,
            feth::{Feth, Placement, Selectivity},
            ieth::Ieth,
            immdt::ImmDt,
            opcode::{Opcode, Operation, Transport},
            reth::Reth,
        },
    },
};

/// The longest message (IBTA vol. 1, 9.7.8).
pub(super) const MAX_MESSAGE: u32 = 1 << 31;

/// So long, at most, what was sent counts as on the way where no ACK time-out says otherwise.
const LINGER: Duration = Duration::from_millis(100);

/// The lower end of the space of packet numbers, so that none is below 0.
const FIRST_EPOCH: u64 = 1 << 24;

/// A send work request in the queue.
#[derive(Debug)]
pub(super) struct Work {
    id: u64,
    tag: u64,
    pub(super) op: SendOp,
    payload: Payload,
    flags: SendFlags,
    pub(super) dest: Option<UdDest>,
    /// Octets of the message; of a FLUSH none.
    pub(super) len: u32,
    /// Packet numbers are given: what follows is valid.
    started: bool,
    /// The first packet's number.
    first: u64,
    /// How many packet numbers there are.
    packets: u32,
    /// One READ request asks for so many packets at most. A request never goes beyond a multiple
    /// of them: one that is repeated would ask for more than it did before.
    piece: u32,
    /// Octets on the wire of all work before.
    octets_from: u64,
    /// What all work before counts in receive buffers.
    load_from: Load,
    /// How many messages before took a receive of the peer.
    consumers_before: u64,
}

impl Work {
    fn end(&self) -> u64 {
        self.first + u64::from(self.packets)
    }

    /// Whether the peer must answer with more than an ACK.
    fn awaits_response(&self) -> bool {
        match self.op {
            SendOp::Read(_)
            | SendOp::FetchAdd { .. }
            | SendOp::CmpSwap { .. }
            | SendOp::Flush { .. }
            | SendOp::AtomicWrite(_) => true,
            SendOp::Send
            | SendOp::SendImm(_)
            | SendOp::SendInv(_)
            | SendOp::Write(_)
            | SendOp::WriteImm(..)
            | SendOp::Imm(_)
            | SendOp::LocalInv(_) => false,
        }
    }

    /// Whether it takes a receive of the peer.
    fn consumes(&self) -> bool {
        match self.op {
            SendOp::Send | SendOp::SendImm(_) | SendOp::SendInv(_) | SendOp::WriteImm(..) => true,
            SendOp::Write(_)
            | SendOp::Read(_)
            | SendOp::Imm(_)
            | SendOp::FetchAdd { .. }
            | SendOp::CmpSwap { .. }
            | SendOp::LocalInv(_)
            | SendOp::Flush { .. }
            | SendOp::AtomicWrite(_) => false,
        }
    }

    /// Where octets come from or go to.
    fn sges(&self) -> &[Sge] {
        match &self.payload {
            Payload::Sges(sges) => sges,
            Payload::Inline(_) => &[],
        }
    }

    /// Octets on the wire of its first `packets` packets.
    fn octets(&self, packets: u32, mtu: u32) -> u64 {
        let payload = (u64::from(packets) * u64::from(mtu)).min(self.len.into());
        payload + u64::from(packets) * OVERHEAD
    }

    /// What its first `packets` packets count in receive buffers, with the answers they ask for.
    fn load(&self, packets: u32, mtu: u32) -> Load {
        let octets = match packets.checked_sub(1) {
            Some(before) if packets == self.packets => {
                u64::from(before) * weigh(mtu) + weigh(self.len - before * mtu)
            }
            _ => u64::from(packets) * weigh(mtu),
        };
        match self.op {
            SendOp::Read(_) => {
                let requests = u64::from(packets.div_ceil(self.piece)) * LEAST;
                Load::of(Pool::Own, octets).plus(Load::of(Pool::Requests, requests))
            }
            _ if self.awaits_response() => {
                let octets = u64::from(packets) * LEAST;
                Load::of(Pool::Peer, octets).plus(Load::of(Pool::Results, octets))
            }
            _ => Load::of(Pool::Peer, octets),
        }
    }

    /// Packet numbers that are asked for at a time, from its `sent`-th on: a READ's responses, up to
    /// the end of a piece.
    fn step(&self, sent: u32) -> u32 {
        match self.op {
            SendOp::Read(_) => (self.packets - sent).min(self.piece - sent % self.piece),
            _ => 1,
        }
    }

    fn source(&self, offset: u32, len: u32) -> Source<'_> {
        match &self.payload {
            Payload::Sges(sges) => Source::Local { sges, offset, len },
            Payload::Inline(data) => {
                let from = offset as usize;
                Source::Bytes(data.get(from..from + len as usize).unwrap_or_default())
            }
        }
    }
}

/// A request that the peer refused for good.
#[derive(Debug, Clone, Copy)]
struct Doomed {
    seq: u64,
    status: WcStatus,
    vendor_err: u32,
}

/// After the loss of a request, with a peer that keeps what comes out of order: what is sent again of
/// the packets up to `resume`, where sending goes on.
///
/// ```text
///   una: missing     end                          resume
///    │ sent again      │ kept there, or on the way   │
///  ──┼─────────────────┼─────────────────────────────┼────►
/// ```
#[derive(Debug, Clone, Copy)]
struct Hole {
    end: u64,
    resume: u64,
    /// What all packets before `resume` count in receive buffers.
    load: Load,
    /// Packets on the way since one asked for an acknowledgement.
    unasked: u32,
}

/// What is not known of the packets behind a hole.
#[derive(Debug, Clone, Copy)]
struct Tail {
    /// The hole's end, and where sending went on.
    end: u64,
    resume: u64,
    /// The last packet of the hole is answered, not acknowledged.
    answered: bool,
}

/// So many packets are sent again at a time, at most.
const MOST_AGAIN: u64 = 64;

/// A packet that may be sent next.
struct Plan {
    headers: Headers,
    /// Octets of payload, from this offset of the message.
    offset: u32,
    len: u32,
    /// Packet numbers it takes: those of the responses for a READ.
    packets: u32,
    /// It must ask for an acknowledgement, whatever follows.
    ask: bool,
    /// It is neither the first nor the last of its message.
    middle: bool,
}

/// The requesting half.
#[derive(Debug, Default)]
pub(super) struct Requester {
    queue: VecDeque<Work>,
    /// Index of the work request whose packets are sent next, and how many of its packet numbers
    /// are.
    at: usize,
    sent: u32,
    una: u64,
    next: u64,
    max: u64,
    /// The first packet number that belongs to no work request.
    end: u64,
    octets_end: u64,
    load_end: Load,
    consumers: u64,
    /// Messages that take a receive may be sent while fewer than these were: what the peer's
    /// credits allow. `None`: it gives no credits.
    credit_limit: Option<u64>,
    /// READs, atomics and FLUSHes on the way: the number behind the last response of each.
    outstanding: VecDeque<u64>,
    /// Packets since one asked for an acknowledgement.
    unasked: u32,
    /// The number behind the last packet that asked for one.
    asked_end: u64,
    /// The work request at `at` cannot be carried out: it fails once all before it is done.
    failing: Option<WcStatus>,
    /// Nothing is sent before: the peer has no receive.
    rnr_until: Option<Instant>,
    rnr_tries: u8,
    retries: u8,
    /// When an acknowledgement is missed.
    deadline: Option<Instant>,
    /// The peer said that this packet is missing, and it was sent again: to say so once more means
    /// nothing.
    rewound: Option<u64>,
    hole: Option<Hole>,
    /// The end of what was sent again for the last hole, and how much that was.
    filled: (u64, u64),
    tail: Option<Tail>,
    /// What the peer said that this packet asks for is wrong, while one before it waits for its
    /// answer.
    doomed: Option<Doomed>,
    /// See [`load`](super::load).
    stale: Load,
    spare: Load,
    /// Up to here nothing counts as on the way any more.
    waived: Load,
    /// When that is settled.
    linger: Option<Instant>,
    /// It found no room in a receive buffer.
    pub(super) starved: Option<Starved>,
}

impl Requester {
    pub(super) fn start(&mut self, psn: Psn) {
        let first = FIRST_EPOCH + u64::from(psn.get());
        (self.una, self.next, self.max, self.end) = (first, first, first, first);
    }

    pub(super) fn timeout(&self) -> Option<Instant> {
        sooner(self.deadline, sooner(self.rnr_until, self.linger))
    }

    /// Whether there is work behind the point of sending.
    pub(super) fn has_unsent(&self) -> bool {
        self.at < self.queue.len()
    }

    /// Work that has not completed.
    pub(super) fn unfinished(&self) -> usize {
        self.queue.len()
    }

    /// Whether nothing that was begun is unfinished.
    pub(super) fn is_drained(&self) -> bool {
        self.una == self.end
    }

    /// Octets on the wire up to packet `seq` of work that is in the queue.
    fn octets_at(&self, index: usize, seq: u64, mtu: u32) -> u64 {
        match self.queue.get(index) {
            Some(work) if work.started => {
                let packets = seq.saturating_sub(work.first).min(work.packets.into()) as u32;
                work.octets_from + work.octets(packets, mtu)
            }
            _ => self.octets_end,
        }
    }

    /// What the packets before `seq`, of work that is in the queue, count in receive buffers.
    fn load_at(&self, index: usize, seq: u64, mtu: u32) -> Load {
        match self.queue.get(index) {
            Some(work) if work.started => {
                let packets = seq.saturating_sub(work.first).min(work.packets.into()) as u32;
                work.load_from.plus(work.load(packets, mtu))
            }
            _ => self.load_end,
        }
    }

    /// What is on the way since the last loss.
    fn flight(&self, mtu: u32) -> Load {
        if self.frontier() <= self.una {
            return Load::default();
        }
        let from = self.counted(mtu);
        self.hole
            .map_or_else(|| self.load_at(self.at, self.next, mtu), |hole| hole.load)
            .minus(from)
    }

    /// What all packets that are not on the way any more count.
    fn counted(&self, mtu: u32) -> Load {
        self.load_at(0, self.una, mtu).at_least(self.waived)
    }

    /// The first packet that is not on the way.
    fn frontier(&self) -> u64 {
        self.hole.map_or(self.next, |hole| hole.resume)
    }

    /// Whether an acknowledgement that was asked for is still to come.
    fn awaits_ack(&self) -> bool {
        self.asked_end > self.una
    }

    /// Passes what need not be sent again.
    fn pass(&mut self) {
        while let Some(hole) = self.hole {
            if self.next < hole.end {
                return;
            }
            let work = self.queue.get(self.at).filter(|work| work.started);
            let Some(work) = work.filter(|_| self.next < hole.resume) else {
                self.hole = None;
                self.unasked = self.unasked.max(hole.unasked);
                return;
            };
            let (awaits, end) = (work.awaits_response(), work.end());
            let passed = match work.op {
                SendOp::Read(_) => work.step(self.sent),
                _ => (end.min(hole.resume) - self.next) as u32,
            };
            self.next += u64::from(passed);
            self.sent += passed;
            if awaits {
                self.outstanding.push_back(self.next);
            }
            if self.next >= end {
                self.at += 1;
                self.sent = 0;
            }
        }
    }

    /// Packet `una` is missing, and the peer keeps what follows: only this one is sent again. Where
    /// it is the one behind what was sent again last, so many more are, twice as many each time.
    fn open_hole(&mut self, mtu: u32) {
        let (una, resume) = (self.una, self.frontier());
        let (load, waived) = (self.flight(mtu).plus(self.counted(mtu)), self.waived);
        let unasked = self.unasked.max(self.hole.map_or(0, |hole| hole.unasked));
        let (filled, count) = self.filled;
        let count = if una == filled { (2 * count).min(MOST_AGAIN) } else { 1 };
        self.filled = (una + count, count);
        let end = (una + count).min(resume);
        self.tail = Some(Tail { end, resume, answered: false });
        self.seek(una);
        self.waived = waived;
        self.hole = Some(Hole { end, resume, load, unasked });
    }

    /// Packet `una` is to be sent again, while what was sent behind it is still on the way.
    fn keep_stale(&mut self, mtu: u32) {
        let flight = self.flight(mtu);
        if flight == Load::default() {
            return;
        }
        let Some(work) = self.queue.front() else { return };
        let sent = (self.una - work.first) as u32;
        let again = work.load(sent + work.step(sent), mtu).minus(work.load(sent, mtu));
        self.spare = again.at_most(flight);
        self.stale = flight.minus(self.spare);
    }

    /// Nothing of what was sent before the last loss is on the way any more.
    fn drop_stale(&mut self) {
        (self.stale, self.spare, self.linger) = (Load::default(), Load::default(), None);
    }

    /// Whether the window has room for `packets` more with `octets`.
    fn has_room(&self, after: u64, window: Window, mtu: u32, packets: u32, octets: u64) -> bool {
        if after <= self.una {
            return true;
        }
        let mut index = self.at;
        while self.queue.get(index).is_some_and(|work| work.started && work.end() <= after) {
            index += 1;
        }
        let octets_before =
            self.octets_at(index, after, mtu).saturating_sub(self.octets_at(0, self.una, mtu));
        after - self.una + u64::from(packets) <= window.packets.into()
            && octets_before + octets <= window.octets.into()
    }

    /// Moves the point of sending to packet `seq`, which is `una`.
    fn seek(&mut self, seq: u64) {
        (self.at, self.sent, self.next) = (0, 0, seq);
        while let Some(work) = self.queue.get(self.at) {
            if !work.started {
                break;
            }
            if seq < work.end() {
                self.sent = (seq - work.first) as u32;
                break;
            }
            self.at += 1;
        }
        // Those behind it are sent again; there are none before it.
        self.outstanding.clear();
        (self.unasked, self.asked_end) = (0, 0);
        self.failing = None;
        self.waived = Load::default();
    }

    /// How many packets one READ request asks for.
    fn read_piece(window: Window, mtu: u32) -> u32 {
        let by_octets = u64::from(window.octets) / 2 / (u64::from(mtu) + OVERHEAD);
        (window.packets / 2).min(by_octets as u32).max(1)
    }
}

impl Qp {
    /// Checks a work request as far as verbs do at the call, and queues it.
    pub(super) fn push_send(&mut self, wr: SendWr, tag: u64) -> Result<(), PostError> {
        let len = check_post(&wr, &self.config, &self.attr)?;
        if self.tx.queue.len() >= self.config.max_send_wr {
            return Err(PostError::QueueFull { max: self.config.max_send_wr });
        }
        self.tx.queue.push_back(Work {
            id: wr.id,
            tag,
            op: wr.op,
            payload: wr.payload,
            flags: wr.flags,
            dest: wr.dest,
            len,
            started: false,
            first: 0,
            packets: 0,
            piece: 1,
            octets_from: 0,
            load_from: Load::default(),
            consumers_before: 0,
        });
        Ok(())
    }

    /// Takes the front of the send queue out.
    fn finish_front(&mut self, status: WcStatus, vendor_err: u32) {
        let Some(work) = self.tx.queue.pop_front() else {
            return;
        };
        self.tx.at = self.tx.at.saturating_sub(1);
        if status.is_ok() && !work.flags.contains(SendFlags::SIGNALED) {
            return;
        }
        let wc = Wc {
            id: work.id,
            status,
            opcode: work.op.wc_opcode(),
            byte_len: if status.is_ok() { work.len } else { 0 },
            qpn: self.config.scope.qpn,
            vendor_err,
            ..Wc::default()
        };
        self.completions.push_back(Completion { tag: work.tag, wc });
    }

    pub(super) fn flush_sends(&mut self) {
        while !self.tx.queue.is_empty() {
            self.finish_front(WcStatus::WR_FLUSH_ERR, 0);
        }
        (self.tx.deadline, self.tx.rnr_until) = (None, None);
        self.tx.drop_stale();
    }

    /// What it has in receive buffers, or on the way to them, and what is kept for it there.
    pub(super) fn load(&self) -> Load {
        if self.config.kind != QpType::Rc || !matches!(self.state, QpState::Rts | QpState::Sqd) {
            return Load::default();
        }
        let (tx, mtu) = (&self.tx, self.attr.path_mtu.octets());
        let unasked = tx.unasked.max(tx.hole.map_or(0, |hole| hole.unasked));
        // For one that asks for an acknowledgement where none is to come.
        let reserve = if unasked > 0 && !tx.awaits_ack() { weigh(mtu) } else { 0 };
        let load = tx.stale.plus(tx.spare).plus(tx.flight(mtu));
        load.plus(Load::of(Pool::Peer, reserve))
    }

    /// The work request at `index` fails, and the queue pair with it.
    fn fail_work(&mut self, index: usize, status: WcStatus, vendor_err: u32) {
        // What is before it waits for answers that will not come.
        for _ in 0..index {
            self.finish_front(WcStatus::WR_FLUSH_ERR, 0);
        }
        self.finish_front(status, vendor_err);
        self.enter_error(Reason::Requester);
    }

    /// Everything before `seq` is done, if that takes no more than an acknowledgement. False: a
    /// READ, an atomic or a FLUSH before it has no answer yet.
    fn acknowledge(&mut self, now: Instant, seq: u64) -> bool {
        let before = self.tx.una;
        let mut whole = true;
        while self.tx.una < seq {
            let Some(front) = self.tx.queue.front() else {
                break;
            };
            if front.awaits_response() {
                whole = false;
                break;
            }
            self.tx.una = front.end().min(seq);
            if self.tx.una == front.end() {
                self.finish_front(WcStatus::SUCCESS, 0);
            }
        }
        if self.tx.una > before {
            self.progressed(now);
        }
        whole
    }

    /// One response of the READ, atomic or FLUSH at the front is there.
    fn acknowledge_response(&mut self, now: Instant) {
        self.tx.una += 1;
        if self.tx.queue.front().is_some_and(|front| front.end() <= self.tx.una) {
            self.finish_front(WcStatus::SUCCESS, 0);
        }
        self.progressed(now);
    }

    fn progressed(&mut self, now: Instant) {
        let tx = &mut self.tx;
        (tx.retries, tx.rnr_tries, tx.rewound) = (0, 0, None);
        tx.hole = tx.hole.filter(|hole| hole.resume > tx.una);
        if tx.next < tx.una {
            // Acknowledged before it was sent again.
            tx.seek(tx.una);
        }
        while tx.outstanding.front().is_some_and(|&end| end <= tx.una) {
            tx.outstanding.pop_front();
        }
        tx.deadline = None;
        tx.drop_stale();
        self.arm(now);
    }

    /// Something is on the way: sees to it that its acknowledgement is missed in time.
    fn arm(&mut self, now: Instant) {
        if self.tx.frontier() > self.tx.una && self.tx.deadline.is_none() {
            let doublings = if self.config.backoff { self.tx.retries.min(4) } else { 0 };
            let patience = self.attr.ack_timeout().map(|timeout| timeout * (1 << doublings));
            self.tx.deadline = patience.map(|patience| now + patience);
            // For ever is too long for the others.
            // What was waived is not waived once more.
            let mtu = self.attr.path_mtu.octets();
            if self.tx.deadline.is_none()
                && self.share.is_some()
                && self.tx.linger.is_none()
                && self.tx.flight(mtu) != Load::default()
            {
                self.tx.linger = Some(now + LINGER);
            }
        }
    }

    /// The peer says that the request with packet `una` is missing; or it is the answer to that which
    /// is, as what the peer sent shows.
    fn rewind_for_gap(&mut self, request: bool) {
        let una = self.tx.una;
        if self.tx.rewound == Some(una) || self.tx.rnr_until.is_some() {
            return;
        }
        self.stats.sequence_naks_received += 1;
        self.tx.rewound = Some(una);
        self.tx.deadline = None;
        let mtu = self.attr.path_mtu.octets();
        // Answers that follow the one that is lost are not taken: all are asked for again.
        if request && self.attr.out_of_order && self.tx.frontier() > una {
            self.tx.open_hole(mtu);
        } else {
            self.tx.keep_stale(mtu);
            self.tx.hole = None;
            self.tx.seek(una);
        }
    }

    /// A peer that keeps what comes out of order acknowledges everything before `una`, what was missing
    /// too. If it had anything behind that, it would say that `una` is missing. So what was sent
    /// before is lost from there on: it is asked about as if the peer had said so.
    fn look_for_lost_tail(&mut self) {
        let una = self.tx.una;
        let Some(tail) = self.tx.tail.filter(|tail| una >= tail.end) else {
            return;
        };
        self.tx.tail = None;
        if una < tail.resume {
            self.rewind_for_gap(true);
        }
    }

    /// Timers that are due.
    pub(super) fn expire(&mut self, now: Instant) {
        if self.tx.rnr_until.is_some_and(|until| until <= now) {
            (self.tx.rnr_until, self.tx.linger) = (None, None);
        }
        if self.tx.linger.is_some_and(|until| until <= now) {
            self.tx.drop_stale();
            let mtu = self.attr.path_mtu.octets();
            self.tx.waived = self.tx.flight(mtu).plus(self.tx.counted(mtu));
        }
        if self.tx.deadline.is_none_or(|deadline| now < deadline) {
            return;
        }
        self.tx.deadline = None;
        self.stats.timeouts += 1;
        if self.tx.retries >= self.attr.retry_cnt {
            self.give_up();
            return;
        }
        self.tx.retries += 1;
        self.tx.rewound = None;
        let answered = self.tx.queue.front().is_none_or(Work::awaits_response);
        if self.attr.out_of_order && self.tx.retries == 1 && !answered {
            // Most of what follows may be there: the answer to one packet tells.
            self.tx.drop_stale();
            self.tx.open_hole(self.attr.path_mtu.octets());
            return;
        }
        (self.tx.hole, self.tx.tail) = (None, None);
        self.tx.drop_stale();
        self.tx.seek(self.tx.una);
    }

    /// The oldest request stays without its answer. If that is because the peer refused a later one,
    /// its word is told.
    fn give_up(&mut self) {
        let vendor_err = self.tx.doomed.map_or(0, |doomed| doomed.vendor_err);
        self.fail_work(0, WcStatus::RETRY_EXC_ERR, vendor_err);
    }

    /// Takes a response packet of an RC queue pair.
    pub(super) fn handle_response<M: Memory + ?Sized>(
        &mut self,
        now: Instant,
        received: &Received<'_>,
        mem: &M,
    ) {
        if !matches!(self.state, QpState::Rts | QpState::Sqd) {
            self.stats.ghosts += 1;
            return;
        }
        let headers = &received.packet.headers;
        let una = self.tx.una;
        let seq = una + u64::from(headers.bth.psn().since(Psn::new(una as u32)));
        // IBTA vol. 1, 9.7.5.1.1: what answers nothing that is on the way is a ghost.
        let syndrome = headers.aeth.map(|aeth| aeth.syndrome());
        let operation = headers.bth.opcode().info().map(|info| info.operation);
        if seq >= self.tx.max {
            self.stats.ghosts += 1;
            // An answer went before it that acknowledged the same.
            let last = headers.bth.psn() == Psn::new(una as u32).add(0xff_ffff);
            if last && (operation, syndrome.map(is_ack)) == (Some(Operation::Ack), Some(true)) {
                self.look_for_lost_tail();
            }
            return;
        }
        match (operation, syndrome) {
            (Some(Operation::Ack), Some(Syndrome::Ack(code))) => {
                if self.acknowledge(now, seq + 1) {
                    self.take_credits(seq, code);
                    self.look_for_lost_tail();
                } else {
                    self.rewind_for_gap(false);
                }
            }
            (Some(Operation::Ack), Some(Syndrome::RnrNak(code))) => {
                self.handle_rnr(now, seq, code);
            }
            (Some(Operation::Ack), Some(Syndrome::Nak(code))) => {
                self.handle_nak(now, seq, code);
            }
            (Some(Operation::ReadResponse), None | Some(Syndrome::Ack(_)))
            | (Some(Operation::AtomicAck), Some(Syndrome::Ack(_))) => {
                self.handle_answer(now, seq, received, mem);
            }
            _ => self.stats.malformed += 1,
        }
    }

    /// The peer has told how many receives it has beyond what it has done, which is `seq`.
    fn take_credits(&mut self, seq: u64, code: u8) {
        let Some(granted) = credits(code) else {
            self.tx.credit_limit = None;
            return;
        };
        // All that came before `seq` is off the queue, but for the message that it is part of.
        let done = match self.tx.queue.front() {
            Some(work) if work.started => {
                // The receive of an immediate goes with the last packet.
                let begun = work.first <= seq && !matches!(work.op, SendOp::WriteImm(..));
                work.consumers_before + u64::from(begun && work.consumes())
            }
            _ => self.tx.consumers,
        };
        self.tx.credit_limit = Some(done + u64::from(granted));
    }

    fn handle_rnr(&mut self, now: Instant, seq: u64, code: u8) {
        if !self.acknowledge(now, seq) {
            self.rewind_for_gap(false);
            return;
        }
        // One that waits already has been told twice.
        if self.tx.rnr_until.is_some() {
            return;
        }
        self.stats.rnr_naks_received += 1;
        if self.attr.rnr_retry < 7 {
            if self.tx.rnr_tries >= self.attr.rnr_retry {
                let vendor_err = Syndrome::RnrNak(code).to_octet();
                self.fail_work(0, WcStatus::RNR_RETRY_EXC_ERR, vendor_err.into());
                return;
            }
            self.tx.rnr_tries += 1;
        }
        let wait = Duration::from_micros(rnr_micros(code).into());
        self.tx.rnr_until = Some(now + wait);
        (self.tx.deadline, self.tx.retries) = (None, 0);
        self.tx.rewound = None;
        self.tx.keep_stale(self.attr.path_mtu.octets());
        self.tx.hole = None;
        self.tx.linger = (wait > LINGER && self.share.is_some()).then(|| now + LINGER);
        self.tx.seek(self.tx.una);
    }

    fn handle_nak(&mut self, now: Instant, seq: u64, code: NakCode) {
        let status = match code {
            NakCode::PSN_SEQUENCE => {
                let missing = self.acknowledge(now, seq);
                self.rewind_for_gap(missing);
                return;
            }
            NakCode::INVALID_REQUEST => WcStatus::REM_INV_REQ_ERR,
            NakCode::REMOTE_ACCESS => WcStatus::REM_ACCESS_ERR,
            NakCode::REMOTE_OPERATIONAL => WcStatus::REM_OP_ERR,
            _ => {
                self.stats.malformed += 1;
                return;
            }
        };
        let vendor_err = Syndrome::Nak(code).to_octet().into();
        if self.tx.doomed.is_none_or(|doomed| seq < doomed.seq) {
            self.tx.doomed = Some(Doomed { seq, status, vendor_err });
        }
        self.meet_doom(now);
        // IBTA vol. 1, 9.7.5.1.2: a response behind a READ that has none implies that this is lost.
        // It is asked for again, and completes, or runs out of retries, in its turn; where nobody
        // counts retries it ends here.
        if self.tx.doomed.is_some() {
            if self.attr.ack_timeout().is_none() {
                self.give_up();
            } else {
                self.rewind_for_gap(false);
            }
        }
    }

    /// The request that the peer refused fails as soon as all before it is done.
    fn meet_doom(&mut self, now: Instant) {
        let Some(Doomed { seq, status, vendor_err }) = self.tx.doomed else {
            return;
        };
        let done = self.acknowledge(now, seq);
        let itself = self.tx.queue.front().is_some_and(|work| work.started && seq < work.end());
        if done || itself {
            self.tx.doomed = None;
            self.fail_work(0, status, vendor_err);
        }
    }

    /// A READ response, the answer to an atomic, or that to a FLUSH or ATOMIC_WRITE.
    fn handle_answer<M: Memory + ?Sized>(
        &mut self,
        now: Instant,
        seq: u64,
        received: &Received<'_>,
        mem: &M,
    ) {
        let packet = received.packet;
        let atomic = packet.headers.atomic_ack_eth;
        let Some(work) = self.tx.queue.iter().find(|work| work.started && seq < work.end()) else {
            self.stats.ghosts += 1;
            return;
        };
        let fits = match work.op {
            SendOp::FetchAdd { .. } | SendOp::CmpSwap { .. } => atomic.is_some(),
            SendOp::Read(_) => atomic.is_none(),
            SendOp::Flush { .. } | SendOp::AtomicWrite(_) => {
                packet.headers.bth.opcode() == Opcode::RC_READ_RESP_ONLY
            }
            _ => false,
        };
        if !fits {
            self.stats.malformed += 1;
            return;
        }
        // IBTA vol. 1, 9.7.5.1.2: it acknowledges what came before; if that takes an answer too,
        // the answer is lost.
        if !self.acknowledge(now, seq) || self.tx.una != seq {
            self.rewind_for_gap(false);
            return;
        }
        let Some(work) = self.tx.queue.front() else {
            return;
        };
        let scope = self.config.scope;
        let octets;
        let (offset, data) = match (work.op, atomic) {
            (SendOp::Read(_), _) => {
                // Both below 2^31: the message has no more.
                let offset = (seq - work.first) as u32 * self.attr.path_mtu.octets();
                let expected = (work.len - offset).min(self.attr.path_mtu.octets());
                if packet.payload_len != expected as usize {
                    self.stats.malformed += 1;
                    self.fail_work(0, WcStatus::BAD_RESP_ERR, 0);
                    return;
                }
                (offset, packet.payload)
            }
            (_, Some(answer)) => {
                octets = answer.original().to_ne_bytes();
                (0, &octets[..])
            }
            (_, None) if packet.payload_len != 0 => {
                self.stats.malformed += 1;
                self.fail_work(0, WcStatus::BAD_RESP_ERR, 0);
                return;
            }
            (_, None) => (0, &[][..]),
        };
        if scatter(mem, scope, work.sges(), offset, data).is_err() {
            self.fail_work(0, WcStatus::LOC_ACCESS_ERR, 0);
            return;
        }
        self.stats.payload_received += data.len() as u64;
        self.acknowledge_response(now);
        // Of one that is answered itself nobody knows: its answer may be on the way.
        let known = self.tx.queue.front().is_some_and(|work| !work.awaits_response());
        if known && self.tx.tail.is_some_and(|tail| tail.answered) {
            self.look_for_lost_tail();
        }
        self.meet_doom(now);
    }

    /// Fills `train` with requests.
    pub(super) fn transmit_requests<M: Memory + ?Sized>(
        &mut self,
        now: Instant,
        mem: &M,
        limit: Limit,
        train: &mut Train,
    ) {
        let rc = self.config.kind == QpType::Rc;
        self.tx.starved = None;
        while self.tx.rnr_until.is_none() {
            self.tx.pass();
            if !self.start_work(mem, train.is_empty()) {
                break;
            }
            if self.tx.doomed.is_some_and(|doomed| self.tx.next >= doomed.seq) {
                break;
            }
            let Some(mut plan) = self.plan() else {
                break;
            };
            let Some(work) = self.tx.queue.get(self.tx.at) else {
                break;
            };
            // By reference: they lie in memory, and are looked at for each packet.
            let other = work.dest.map(|dest| canonical(dest.addr));
            let ends = (&self.attr.local, other.as_ref().unwrap_or(&self.attr.peer));
            let len = packet_len(&plan.headers, plan.len);
            if !train.takes(len, ends, limit) || !self.keeps_pace(now, len) {
                break;
            }
            let after = self.tx.next + u64::from(plan.packets);
            let mtu = self.attr.path_mtu.octets();
            let crowded = match self.room_for(&plan, limit) {
                Ok(crowded) => crowded,
                Err(starved) => {
                    self.tx.starved = Some(starved);
                    break;
                }
            };
            let Some(work) = self.tx.queue.get(self.tx.at) else {
                break;
            };
            // One that is to come anyway makes room: to ask for more would only make the trains and
            // the acknowledgements small.
            let awaits = self.tx.awaits_ack();
            let full = u64::from(mtu) + OVERHEAD;
            let ask = rc
                && (plan.ask
                    || self.tx.hole.is_some_and(|hole| after >= hole.end)
                    || self.tx.unasked.saturating_add(1) >= self.config.ack_every
                    || !awaits && (crowded || !self.tx.has_room(after, self.window, mtu, 1, full)));
            if crowded && !ask {
                // What does not ask needs room for one behind it that does.
                self.tx.starved = Some(Starved { pool: Pool::Peer, wants: 2 * weigh(mtu) });
                break;
            }
            plan.headers.bth = plan.headers.bth.with_ack_req(ask);
            let source = work.source(plan.offset, plan.len);
            let ends = (&self.attr.local, other.as_ref().unwrap_or(&self.attr.peer));
            if train.push(ends, &mut plan.headers, source, mem, self.config.scope).is_err() {
                self.tx.failing = Some(WcStatus::LOC_PROT_ERR);
                continue;
            }
            self.stats.payload_sent += u64::from(plan.len);
            self.advance(&plan, ask);
            if rc && !ask && plan.middle {
                self.follow(plan, limit, mem, train);
            }
            if !rc {
                // What is sent is done.
                self.acknowledge(now, self.tx.next);
                self.tx.deadline = None;
            }
        }
        if rc && self.state != QpState::Err {
            self.arm(now);
        }
    }

    /// Whether the receive buffers have room for a planned packet: Ok(true) if it is the last one,
    /// so that it has to ask for an acknowledgement.
    fn room_for(&self, plan: &Plan, limit: Limit) -> Result<bool, Starved> {
        let (Some(share), Some(work)) = (&self.share, self.tx.queue.get(self.tx.at)) else {
            return Ok(false);
        };
        // It has its room, and what was lost is not there.
        if self.tx.hole.is_some() {
            return Ok(false);
        }
        let (tx, mtu) = (&self.tx, self.attr.path_mtu.octets());
        let before = work.load(tx.sent, mtu);
        let cost = work.load(tx.sent + plan.packets, mtu).minus(before);
        let load = tx.stale.plus(tx.flight(mtu));
        if let Err(pool) = share.takes(load, cost) {
            // No small trains where large ones wait: the rest of the message, or a train.
            let rest = match pool {
                Pool::Peer => work.load(work.packets, mtu).minus(before).get(pool),
                Pool::Own | Pool::Requests | Pool::Results => 0,
            };
            let wants = rest.min(limit.octets as u64).max(cost.get(pool));
            return Err(Starved { pool, wants });
        }
        let next = Load::of(Pool::Peer, weigh(mtu));
        Ok(share.takes(load.plus(cost), next).is_err())
    }

    /// The planned packet is in the train.
    fn advance(&mut self, plan: &Plan, ask: bool) {
        let tx = &mut self.tx;
        if tx.next < tx.max {
            self.stats.packets_resent += 1;
        }
        tx.next += u64::from(plan.packets);
        tx.max = tx.max.max(tx.next);
        tx.sent += plan.packets;
        // The last packet of a hole asks in any case.
        tx.unasked = if ask || tx.hole.is_some() { 0 } else { tx.unasked.saturating_add(1) };
        if ask {
            tx.asked_end = tx.next;
        }
        tx.spare = Load::default();
        let Some(work) = tx.queue.get(tx.at) else {
            return;
        };
        if work.awaits_response() {
            tx.outstanding.push_back(tx.next);
            if let Some(tail) = tx.tail.as_mut().filter(|_| tx.hole.is_some()) {
                tail.answered |= tx.next >= tail.end;
            }
        }
        if tx.next >= work.end() {
            tx.at += 1;
            tx.sent = 0;
        }
    }

    /// Sends on behind a packet of the middle of an RC message, which is in the train: those that may
    /// follow just so are not looked at one by one.
    fn follow<M: Memory + ?Sized>(
        &mut self,
        mut plan: Plan,
        limit: Limit,
        mem: &M,
        train: &mut Train,
    ) {
        let packets = self.followers(limit, train);
        let ends = (&self.attr.local, &self.attr.peer);
        let (scope, headers) = (self.config.scope, &mut plan.headers);
        let tx = &mut self.tx;
        let Some(work) = tx.queue.get(tx.at) else { return };
        for _ in 0..packets {
            plan.offset += plan.len;
            headers.bth = headers.bth.with_psn(headers.bth.psn().next());
            let source = work.source(plan.offset, plan.len);
            if train.push(ends, headers, source, mem, scope).is_err() {
                tx.failing = Some(WcStatus::LOC_PROT_ERR);
                break;
            }
            self.stats.payload_sent += u64::from(plan.len);
            (tx.next, tx.sent, tx.unasked) = (tx.next + 1, tx.sent + 1, tx.unasked + 1);
        }
        tx.max = tx.max.max(tx.next);
    }

    /// How many packets may follow one of the middle of a message that are like it: none of them
    /// has to ask for an acknowledgement, and behind the last one there is room for one more.
    fn followers(&self, limit: Limit, train: &Train) -> u32 {
        let (tx, mtu) = (&self.tx, self.attr.path_mtu.octets());
        let Some(work) = tx.queue.get(tx.at) else { return 0 };
        let doomed = tx.doomed.is_some() || tx.hole.is_some() || tx.next != tx.max;
        if doomed || self.state != QpState::Rts {
            return 0;
        }
        let middle = (work.packets - tx.sent).saturating_sub(1).into();
        let asks = self.config.ack_every.saturating_sub(tx.unasked).saturating_sub(1).into();
        let train = train.room_for_alike(limit) as u64;

        let on_the_way =
            tx.octets_at(tx.at, tx.next, mtu).saturating_sub(tx.octets_at(0, tx.una, mtu));
        let octets = u64::from(self.window.octets).saturating_sub(on_the_way);
        let packets = u64::from(self.window.packets).saturating_sub(tx.next - tx.una);
        let window = packets.min(octets / (u64::from(mtu) + OVERHEAD)).saturating_sub(1);

        let buffer = self.share.map_or(u64::MAX, |share| {
            let load = tx.stale.plus(tx.flight(mtu)).get(Pool::Peer);
            let room = share.pools[Pool::Peer as usize].most.saturating_sub(load);
            (room / weigh(mtu)).saturating_sub(1)
        });
        // At most a train.
        [middle, asks, train, window, buffer].into_iter().min().unwrap_or(0) as u32
    }

    /// Sees to it that the work request at the point of sending has packet numbers, and carries
    /// out what needs none: `idle`, that is with nothing in the train, which may refer to the key
    /// that goes. False: nothing may be sent now.
    fn start_work<M: Memory + ?Sized>(&mut self, mem: &M, idle: bool) -> bool {
        loop {
            if self.state != QpState::Rts && self.state != QpState::Sqd {
                return false;
            }
            if let Some(status) = self.tx.failing {
                // All before it goes first.
                if self.tx.at == 0 {
                    self.tx.failing = None;
                    self.fail_work(0, status, 0);
                }
                return false;
            }
            let Some(work) = self.tx.queue.get(self.tx.at) else {
                return false;
            };
            if work.started {
                return true;
            }
            // IBTA vol. 1, 10.8.3.3: a fence waits for READs and atomics.
            let fenced = work.flags.contains(SendFlags::FENCE) && !self.tx.outstanding.is_empty();
            let no_credit = work.consumes()
                && self.tx.una != self.tx.next
                && self.tx.credit_limit.is_some_and(|limit| self.tx.consumers >= limit);
            if self.state == QpState::Sqd || fenced || no_credit {
                return false;
            }
            if let SendOp::LocalInv(rkey) = work.op {
                if self.tx.at > 0 || !idle {
                    return false;
                }
                match mem.invalidate(self.config.scope, rkey) {
                    Ok(()) => self.finish_front(WcStatus::SUCCESS, 0),
                    Err(_) => self.fail_work(0, WcStatus::LOC_PROT_ERR, 0),
                }
                continue;
            }
            let access = match work.op {
                SendOp::Read(_) | SendOp::FetchAdd { .. } | SendOp::CmpSwap { .. } => {
                    Access::LOCAL_WRITE
                }
                _ => Access::empty(),
            };
            let scope = self.config.scope;
            if work.sges().iter().any(|&sge| mem.check_local(scope, sge, access).is_err()) {
                self.tx.failing = Some(WcStatus::LOC_PROT_ERR);
                continue;
            }
            let mtu = self.attr.path_mtu.octets();
            let tx = &mut self.tx;
            let Some(work) = tx.queue.get_mut(tx.at) else {
                return false;
            };
            work.started = true;
            work.first = tx.end;
            work.packets = work.len.div_ceil(mtu).max(1);
            work.piece = Requester::read_piece(self.window, mtu);
            if let Some(share) = &self.share {
                let most = u32::try_from(share.read / weigh(mtu)).unwrap_or(u32::MAX);
                work.piece = work.piece.min(most).max(1);
            }
            work.octets_from = tx.octets_end;
            work.load_from = tx.load_end;
            work.consumers_before = tx.consumers;
            tx.end = work.end();
            tx.octets_end += work.octets(work.packets, mtu);
            tx.load_end = tx.load_end.plus(work.load(work.packets, mtu));
            tx.consumers += u64::from(work.consumes());
            return true;
        }
    }

    /// The packet at the point of sending; `None`: it has to wait. Inlined, for its result is written in small
    /// pieces, and to copy that in large ones costs more than all the rest of it.
    #[inline(always)]
    fn plan(&self) -> Option<Plan> {
        let work = self.tx.queue.get(self.tx.at)?;
        let (tx, mtu) = (&self.tx, self.attr.path_mtu.octets());
        let left = work.packets - tx.sent;
        let response = work.awaits_response();
        let packets = work.step(tx.sent);
        if self.config.kind == QpType::Rc {
            let octets = work.octets(tx.sent + packets, mtu) - work.octets(tx.sent, mtu);
            // The window may have become smaller: then one more goes, and asks for an
            // acknowledgement, where none on the way does.
            let room = tx.hole.is_some()
                || tx.unasked > 0 && !tx.awaits_ack()
                || tx.has_room(tx.next, self.window, mtu, packets, octets);
            if !room
                // What was taken at the post goes out, even if they are off by now.
                || response && tx.outstanding.len() >= self.attr.max_rd_atomic.max(1).into()
            {
                return None;
            }
        }
        let (first, last) = (tx.sent == 0, packets == left);
        let offset = tx.sent * mtu;
        // The octets of READs and atomics come back.
        let len = match work.op {
            SendOp::Read(_) | SendOp::FetchAdd { .. } | SendOp::CmpSwap { .. } => 0,
            _ => (work.len - offset).min(mtu),
        };
        let (opcode, transport) = match self.config.kind {
            QpType::Rc => (rc_opcode(&work.op, first, last), Transport::Rc),
            QpType::Uc => (rc_opcode(&work.op, first, last), Transport::Uc),
            QpType::Ud => (rc_opcode(&work.op, first, last), Transport::Ud),
        };
        let opcode = Opcode(opcode.0 | transport.bits());
        let dest_qp = work.dest.map_or(self.attr.dest_qp, |dest| dest.qpn);
        let bth = Bth::new(opcode, self.attr.pkey, dest_qp, Psn::new(tx.next as u32))
            .with_migreq(self.attr.migreq)
            .with_solicited(last && work.consumes() && work.flags.contains(SendFlags::SOLICITED));
        let mut headers = Headers::new(bth);
        headers.deth = work.dest.map(|dest| self.deth(&dest));
        match work.op {
            SendOp::Send => {}
            SendOp::SendImm(imm) => headers.immdt = Some(ImmDt::new(imm)),
            SendOp::SendInv(rkey) => headers.ieth = Some(Ieth::new(rkey)),
            SendOp::Write(remote) => {
                headers.reth = Some(Reth::new(remote.addr, remote.rkey, work.len));
            }
            SendOp::WriteImm(remote, imm) => {
                headers.reth = Some(Reth::new(remote.addr, remote.rkey, work.len));
                headers.immdt = Some(ImmDt::new(imm));
            }
            SendOp::Read(remote) => {
                let octets = (work.len - offset).min(packets.saturating_mul(mtu));
                let va = remote.addr.wrapping_add(offset.into());
                headers.reth = Some(Reth::new(va, remote.rkey, octets));
            }
            SendOp::FetchAdd { remote, add, .. } => {
                headers.atomic_eth = Some(AtomicEth::new(remote.addr, remote.rkey, add, 0));
            }
            SendOp::CmpSwap { remote, compare, swap, .. } => {
                headers.atomic_eth = Some(AtomicEth::new(remote.addr, remote.rkey, swap, compare));
            }
            SendOp::Flush { remote, len, placement, selectivity } => {
                headers.feth = Some(Feth::new(placement, selectivity));
                headers.reth = Some(Reth::new(remote.addr, remote.rkey, len));
            }
            SendOp::AtomicWrite(remote) => {
                headers.reth = Some(Reth::new(remote.addr, remote.rkey, work.len));
            }
            // Never started: not taken at the post, or carried out without a packet.
            SendOp::Imm(_) | SendOp::LocalInv(_) => return None,
        }
        let (ask, middle) = (last || response, !first && !last && !response);
        Some(Plan { headers, offset, len, packets, ask, middle })
    }
}

fn is_ack(syndrome: Syndrome) -> bool {
    matches!(syndrome, Syndrome::Ack(_))
}

/// The opcode of a request packet, as RC has it.
fn rc_opcode(op: &SendOp, first: bool, last: bool) -> Opcode {
    let one_of = |only, of_many, last_of_many, middle| match (first, last) {
        (true, true) => only,
        (true, false) => of_many,
        (false, true) => last_of_many,
        (false, false) => middle,
    };
    let send = |only, end| one_of(only, Opcode::RC_SEND_FIRST, end, Opcode::RC_SEND_MIDDLE);
    let write = |only, end| one_of(only, Opcode::RC_WRITE_FIRST, end, Opcode::RC_WRITE_MIDDLE);
    match op {
        SendOp::Send | SendOp::Imm(_) | SendOp::LocalInv(_) => {
            send(Opcode::RC_SEND_ONLY, Opcode::RC_SEND_LAST)
        }
        SendOp::SendImm(_) => send(Opcode::RC_SEND_ONLY_IMM, Opcode::RC_SEND_LAST_IMM),
        SendOp::SendInv(_) => send(Opcode::RC_SEND_ONLY_INV, Opcode::RC_SEND_LAST_INV),
        SendOp::Write(_) => write(Opcode::RC_WRITE_ONLY, Opcode::RC_WRITE_LAST),
        SendOp::WriteImm(..) => write(Opcode::RC_WRITE_ONLY_IMM, Opcode::RC_WRITE_LAST_IMM),
        SendOp::Read(_) => Opcode::RC_READ_REQUEST,
        SendOp::FetchAdd { .. } => Opcode::RC_FETCH_ADD,
        SendOp::CmpSwap { .. } => Opcode::RC_CMP_SWAP,
        SendOp::Flush { .. } => Opcode::RC_FLUSH,
        SendOp::AtomicWrite(_) => Opcode::RC_ATOMIC_WRITE,
    }
}

/// What is wrong with a request is said at the call; its length where nothing is.
fn check_post(wr: &SendWr, config: &Config, attr: &Attributes) -> Result<u32, PostError> {
    let transport = match config.kind {
        QpType::Rc => "RoCEv2 RC",
        QpType::Uc => "RoCEv2 UC",
        QpType::Ud => "RoCEv2 UD",
    };
    let unsupported = Err(PostError::Unsupported { op: wr.op.name(), transport });
    match (config.kind, wr.op) {
        (_, SendOp::Imm(_)) => return unsupported,
        (_, SendOp::FetchAdd { mask, .. }) if mask != 0 => return unsupported,
        (_, SendOp::CmpSwap { compare_mask, swap_mask, .. })
            if (compare_mask, swap_mask) != (u64::MAX, u64::MAX) =>
        {
            return unsupported;
        }
        (QpType::Rc, _) => {}
        (_, SendOp::Send | SendOp::SendImm(_)) => {}
        (QpType::Uc, SendOp::Write(_) | SendOp::WriteImm(..) | SendOp::LocalInv(_)) => {}
        (QpType::Uc | QpType::Ud, _) => return unsupported,
    }
    let have = wr.payload.len();
    let max = match config.kind {
        QpType::Rc | QpType::Uc => MAX_MESSAGE,
        QpType::Ud => attr.path_mtu.octets(),
    };
    let len = match u32::try_from(have) {
        Ok(len) if len <= max => len,
        _ => return Err(PostError::TooLong { max: max.into(), have }),
    };
    match &wr.payload {
        Payload::Sges(sges) if sges.len() > config.max_sge => {
            return Err(PostError::TooManySges { max: config.max_sge, have: sges.len() });
        }
        Payload::Inline(data) if data.len() > config.max_inline => {
            return Err(PostError::InlineTooLong { max: config.max_inline, have: data.len() });
        }
        Payload::Sges(_) | Payload::Inline(_) => {}
    }
    if wr.dest.is_some() != (config.kind == QpType::Ud) {
        return Err(PostError::Invalid(match config.kind {
            QpType::Ud => "a datagram needs a destination (SendWr::to)",
            QpType::Rc | QpType::Uc => "a connection has its peer: only UD requests name one",
        }));
    }
    if wr.dest.is_some_and(|to| canonical(to.addr).is_ipv4() != attr.local.is_ipv4()) {
        return Err(PostError::Invalid(
            "the destination is not of the queue pair's address family",
        ));
    }
    let inline = matches!(wr.payload, Payload::Inline(_));
    let aligned = |addr: u64| {
        if addr.is_multiple_of(8) {
            return Ok(());
        }
        Err(PostError::Invalid("the address of an atomic must be a multiple of 8"))
    };
    match wr.op {
        SendOp::LocalInv(_) | SendOp::Flush { .. } if have > 0 => {
            return Err(PostError::Invalid("this operation carries no payload"));
        }
        SendOp::Read(_) if inline => {
            return Err(PostError::Invalid("a READ needs registered memory to read into"));
        }
        SendOp::FetchAdd { .. } | SendOp::CmpSwap { .. } if inline || have != 8 => {
            return Err(PostError::Invalid("an atomic needs exactly 8 octets for the old value"));
        }
        SendOp::AtomicWrite(_) if have != 8 => {
            return Err(PostError::Invalid("an ATOMIC_WRITE has exactly 8 octets"));
        }
        SendOp::FetchAdd { remote, .. } | SendOp::CmpSwap { remote, .. } => aligned(remote.addr)?,
        SendOp::AtomicWrite(remote) => aligned(remote.addr)?,
        SendOp::Flush { placement, selectivity, .. } if !is_known_flush(placement, selectivity) => {
            return Err(PostError::Invalid("FLUSH needs a known placement and selectivity"));
        }
        SendOp::Send
        | SendOp::SendImm(_)
        | SendOp::SendInv(_)
        | SendOp::Write(_)
        | SendOp::WriteImm(..)
        | SendOp::Read(_)
        | SendOp::Imm(_)
        | SendOp::LocalInv(_)
        | SendOp::Flush { .. } => {}
    }
    let awaits = matches!(
        wr.op,
        SendOp::Read(_)
            | SendOp::FetchAdd { .. }
            | SendOp::CmpSwap { .. }
            | SendOp::Flush { .. }
            | SendOp::AtomicWrite(_)
    );
    if awaits && attr.max_rd_atomic == 0 {
        return Err(PostError::Invalid("READs and atomics are off: max_rd_atomic is 0"));
    }
    Ok(len)
}

/// Placement types and selectivity levels that annex A19 defines.
pub(super) fn is_known_flush(placement: Placement, selectivity: Selectivity) -> bool {
    let known = Placement::GLOBAL_VISIBILITY | Placement::PERSISTENCE;
    !placement.is_empty()
        && known.contains(placement)
        && matches!(selectivity, Selectivity::RANGE | Selectivity::REGION)
}
