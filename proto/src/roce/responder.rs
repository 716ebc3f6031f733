//! The responder: receive queue, requests of the peer, and for RC what it is answered
//! (IBTA vol. 1, 9.7.4, 9.7.5).
//!
//! A packet whose PSN is the expected one is carried out. One before it came already: it is
//! acknowledged again, and a READ, atomic or FLUSH answered again. One behind it is a gap, which is
//! told once. What comes out of order is dropped, or, where the peer agreed to that, kept until the
//! gap is filled, and carried out then as if it came just now.
//!
//! Receives are the queue pair's own or shared ([`ReceiveQueue`]). A SEND has its receive from its
//! first packet on, a WRITE with immediate looks for one with its last.

use alloc::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
    vec::Vec,
};
use core::time::Duration;

use super::{
    Completion, Qp, Reason, Received, Train,
    requester::{MAX_MESSAGE, is_known_flush},
    transmit::{Limit, Source, packet_len},
};
use crate::{
    mem::{AccessError, AtomicOp, Memory},
    srq::{Receive, ReceiveQueue, Receives},
    time::Instant,
    verbs::{Access, Imm, PostError, RecvWr, Wc, WcOpcode, WcStatus, pieces},
    wire::{
        ids::{Psn, RKey},
        roce::{
            Headers, Packet,
            aeth::{Aeth, NO_CREDITS, NakCode, Syndrome, credit_code, rnr_micros},
            atomic::AtomicAckEth,
            bth::Bth,
            feth::{Placement, Selectivity},
            opcode::{Info, Opcode, Operation, Place},
        },
    },
};

/// A message of several packets, of which some came.
#[derive(Debug)]
pub(super) enum Message {
    /// Its receive is the current one of the queue.
    Send {
        placed: u32,
    },
    Write {
        rkey: RKey,
        addr: u64,
        len: u32,
        placed: u32,
    },
}

/// What a request is answered.
#[derive(Debug)]
enum Answer {
    /// ACK, RNR NAK or NAK.
    Ack { psn: Psn, msn: u32, syndrome: Syndrome },
    /// READ responses `next..packets`.
    Read {
        first: Psn,
        rkey: RKey,
        addr: u64,
        len: u32,
        packets: u32,
        next: u32,
        msn: u32,
        /// It is asked for the first time.
        fresh: bool,
    },
    /// To an atomic: what the word held.
    Atomic { psn: Psn, msn: u32, original: u64 },
    /// To a FLUSH or an ATOMIC_WRITE.
    Done { psn: Psn, msn: u32 },
}

impl Answer {
    /// PSN of its first packet.
    fn psn(&self) -> Psn {
        match *self {
            Self::Ack { psn, .. } | Self::Atomic { psn, .. } | Self::Done { psn, .. } => psn,
            Self::Read { first, .. } => first,
        }
    }
}

/// What was answered to an atomic, a FLUSH or an ATOMIC_WRITE, for when it comes again.
#[derive(Debug, Clone, Copy)]
struct Replay {
    psn: Psn,
    msn: u32,
    original: Option<u64>,
}

/// A request that came before its turn.
#[derive(Debug)]
struct Kept {
    headers: Headers,
    payload: Vec<u8>,
}

impl Kept {
    /// Octets that it takes, about.
    fn octets(&self) -> usize {
        self.payload.len() + size_of::<Self>()
    }
}

/// No request is kept that is further ahead than this, in packets.
const MAX_AHEAD: u32 = 1 << 16;

/// What the peer was told of the packet that is expected, so that it is not told with each that
/// comes instead.
///
/// ```text
///             a gap: NAK                    no receive: RNR NAK
///   Missing ◄──────────── Nothing ───────────────────────► Wait(until)
///      ▲                  ▲     ▲                             │  │
///      │                  └─────┴── the expected packet ──────┘  │
///      └───── a gap, and the time is over: what was sent again is lost: NAK
/// ```
#[derive(Debug, Clone, Copy, Default)]
enum Told {
    #[default]
    Nothing,
    /// That it is missing.
    Missing,
    /// To wait until then. What comes before was sent on the heels of the packet that had no
    /// receive.
    Wait(Instant),
}

/// Why a request is not carried out.
pub(super) enum Refusal {
    /// No receive is posted.
    NotReady,
    /// A rule is broken, or an access is not allowed.
    Nak(NakCode),
}

const INVALID: Refusal = Refusal::Nak(NakCode::INVALID_REQUEST);
const OPERATIONAL: Refusal = Refusal::Nak(NakCode::REMOTE_OPERATIONAL);

/// The responding half.
#[derive(Debug, Default)]
pub(super) struct Responder {
    pub(super) receives: ReceiveQueue,
    pub(super) expected: Psn,
    /// The number of the packet that is expected, which does not wrap.
    seq: u64,
    /// Those that came before their turn, by number: all behind the one that is expected.
    kept: BTreeMap<u64, Kept>,
    kept_octets: usize,
    msn: u32,
    pub(super) message: Option<Message>,
    /// How the receive of the message in hand ends if the queue pair goes down now.
    receive_status: Option<WcStatus>,
    /// What the peer was told of the expected PSN.
    told: Told,
    answers: VecDeque<Answer>,
    replays: VecDeque<Replay>,
    /// The NAK that ended it.
    last_words: Option<(Psn, Syndrome)>,
}

impl Responder {
    pub(super) fn start(&mut self, psn: Psn) {
        self.expected = psn;
    }

    /// Only the acknowledgement of what was carried out remains, unless other answers go before it.
    pub(super) fn forget_answers(&mut self) {
        let is_ack =
            |answer: &Answer| matches!(answer, Answer::Ack { syndrome: Syndrome::Ack(_), .. });
        let acks = self.answers.iter().take_while(|answer| is_ack(answer)).count();
        self.answers.truncate(acks);
    }

    /// Whether answers are to be sent.
    pub(super) fn has_answers(&self) -> bool {
        !self.answers.is_empty()
    }

    pub(super) fn kept_octets(&self) -> usize {
        self.kept_octets
    }

    pub(super) fn forget_kept(&mut self) {
        self.kept.clear();
        self.kept_octets = 0;
    }

    /// Takes out the request whose turn it is, if it is kept. Those whose turn is over came again.
    fn take_kept(&mut self) -> Option<Kept> {
        while let Some(entry) = self.kept.first_entry() {
            let number = *entry.key();
            if number > self.seq {
                break;
            }
            let kept = entry.remove();
            self.kept_octets -= kept.octets();
            if number == self.seq {
                return Some(kept);
            }
        }
        None
    }

    /// Whether it is the receive's own fault that its message was refused: its memory cannot be
    /// written.
    pub(super) fn receive_is_bad(&self) -> bool {
        self.receive_status == Some(WcStatus::LOC_PROT_ERR)
    }

    /// The receive of the message in hand is not to blame.
    pub(super) fn forgive_receive(&mut self) {
        self.receive_status = None;
    }

    /// Receives that are posted to the queue pair and that no message has taken.
    fn posted(&self) -> usize {
        let taken = matches!(self.message, Some(Message::Send { .. }));
        self.receives.len() - usize::from(taken)
    }

    /// READs that wait for their turn or are being answered.
    fn reads(&self) -> usize {
        self.answers.iter().filter(|a| matches!(a, Answer::Read { fresh: true, .. })).count()
    }
}

impl Qp {
    /// Checks a receive and queues it.
    pub(super) fn push_receive(&mut self, wr: RecvWr, tag: u64) -> Result<(), PostError> {
        // The receive of the message in hand is off the queue.
        let in_hand = self.rx.receives.len() - self.rx.posted();
        let (max_wr, max_sge) = (self.config.max_recv_wr + in_hand, self.config.max_sge);
        self.rx.receives.post(wr, tag, max_wr, max_sge).map_err(|error| match error {
            // What the program knows of.
            PostError::QueueFull { .. } => PostError::QueueFull { max: self.config.max_recv_wr },
            error => error,
        })
    }

    /// Takes receives from `source`, which other queue pairs share, instead of a queue of its own:
    /// one with the first packet of each SEND or datagram, or with the last of a WRITE with
    /// immediate. To be called before the peer can send; [`Qp::post_recv`] is refused from then on.
    /// It stays so in RESET.
    ///
    /// Where the queue is empty, RC makes the peer wait (RNR NAK), UC and UD drop the message and
    /// count it ([`Stats::no_receive`](super::Stats::no_receive)). Acknowledgements carry no
    /// credits, whatever [`Config::credits`](super::Config::credits) says: how many receives are
    /// left for this queue pair is not known. Receives completed as flushed are those that a message
    /// has taken already, the others stay where they are.
    ///
    /// # Errors
    /// [`PostError::Invalid`] where receives are posted to the queue pair itself.
    pub fn share_receives(&mut self, source: Arc<dyn Receives>) -> Result<(), PostError> {
        if !self.rx.receives.is_empty() {
            return Err(PostError::Invalid(
                "receives are posted to the queue pair itself: it cannot share others' any more",
            ));
        }
        self.rx.receives = ReceiveQueue::shared(source);
        Ok(())
    }

    /// Whether the receives are those of a queue that others share.
    pub fn shares_receives(&self) -> bool {
        self.rx.receives.is_shared()
    }

    pub(super) fn complete_receive(&mut self, receive: &Receive, wc: Wc) {
        let wc = Wc { id: receive.wr.id, qpn: self.config.scope.qpn, ..wc };
        self.completions.push_back(Completion { tag: receive.tag, wc });
    }

    pub(super) fn flush_receives(&mut self) {
        let flushed = |status| Wc { status, opcode: WcOpcode::RECV, ..Wc::default() };
        // How the message in hand failed is a matter of its receive, which is the front.
        let mut status = self.rx.receive_status.take().unwrap_or(WcStatus::WR_FLUSH_ERR);
        self.rx.message = None;
        while let Some(receive) = self.rx.receives.finish() {
            self.complete_receive(&receive, flushed(status));
            status = WcStatus::WR_FLUSH_ERR;
        }
    }

    /// Takes a request packet of an RC queue pair.
    pub(super) fn handle_request<M: Memory + ?Sized>(
        &mut self,
        now: Instant,
        received: &Received<'_>,
        mem: &M,
    ) {
        let bth = received.packet.headers.bth;
        let (psn, expected) = (bth.psn(), self.rx.expected);
        if psn.is_before(expected) {
            self.stats.duplicates += 1;
            self.answer_again(received, mem);
            return;
        }
        if psn != expected {
            self.stats.out_of_order += 1;
            if self.attr.out_of_order {
                self.keep(received.packet);
            }
            let silent = match self.rx.told {
                Told::Nothing => false,
                Told::Missing => true,
                Told::Wait(until) => now < until,
            };
            if !silent {
                self.tell_gap();
            }
            return;
        }
        let mut ask = self.take_turn(now, received, mem);
        if ask.is_none() {
            return;
        }
        // What came before its turn has it now.
        while let Some(asked) = ask
            && let Some(kept) = self.rx.take_kept()
        {
            let packet = &Packet {
                headers: kept.headers,
                payload: &kept.payload,
                payload_len: kept.payload.len(),
                icrc: None,
            };
            let more = self.take_turn(now, &Received { packet, ..*received }, mem);
            if more.is_none() && asked {
                self.acknowledge_all();
            }
            ask = more.map(|more| asked || more);
        }
        if ask.is_some() && bth.ack_req() && !self.rx.kept.is_empty() {
            // The peer sent all that it knew to be missing, and there is more.
            self.tell_gap();
        } else if ask == Some(true) {
            self.acknowledge_all();
        }
    }

    /// The expected packet is missing.
    fn tell_gap(&mut self) {
        self.rx.told = Told::Missing;
        self.stats.sequence_naks_sent += 1;
        self.push_ack(self.rx.expected, Syndrome::Nak(NakCode::PSN_SEQUENCE));
    }

    /// Keeps a request that came before its turn, if there is room.
    fn keep(&mut self, packet: &Packet<'_>) {
        let ahead = packet.headers.bth.psn().since(self.rx.expected);
        let is_request = packet.headers.bth.opcode().info().is_some_and(|info| info.request);
        let number = self.rx.seq + u64::from(ahead);
        let octets = packet.payload.len() + size_of::<Kept>();
        if ahead >= MAX_AHEAD
            || !is_request
            || self.rx.kept.len() >= self.config.max_kept
            || self.rx.kept_octets + octets > self.config.max_kept_octets
            || octets > self.room
            || self.rx.kept.contains_key(&number)
        {
            return;
        }
        let kept = Kept { headers: packet.headers, payload: packet.payload.to_vec() };
        self.rx.kept_octets += kept.octets();
        self.rx.kept.insert(number, kept);
        self.stats.kept += 1;
    }

    /// Carries out the packet whose turn it is: whether it asks for an acknowledgement; `None` if it
    /// is not carried out.
    fn take_turn<M: Memory + ?Sized>(
        &mut self,
        now: Instant,
        received: &Received<'_>,
        mem: &M,
    ) -> Option<bool> {
        let (bth, expected) = (received.packet.headers.bth, self.rx.expected);
        if self.rx.answers.len() > self.most_answers() && awaits_answer(bth.opcode()) {
            // More than a peer may ask for before it is answered: as good as lost.
            return None;
        }
        match self.execute(received, mem) {
            Ok(()) => {
                self.rx.told = Told::Nothing;
                // What is answered otherwise is acknowledged by that.
                return Some(bth.ack_req() && !awaits_answer(bth.opcode()));
            }
            Err(Refusal::NotReady) => {
                self.stats.rnr_naks_sent += 1;
                let code = self.attr.min_rnr_timer;
                let wait = Duration::from_micros(rnr_micros(code).into());
                self.rx.told = Told::Wait(now + wait);
                self.push_ack(expected, Syndrome::RnrNak(code));
            }
            Err(Refusal::Nak(code)) => self.refuse(expected, code),
        }
        None
    }

    /// How many answers are queued at most: each resource twice, and acknowledgements between them.
    fn most_answers(&self) -> usize {
        4 * usize::from(self.attr.max_dest_rd_atomic) + 2
    }

    /// The last NAK: nothing is carried out from here on.
    fn refuse(&mut self, psn: Psn, code: NakCode) {
        let syndrome = Syndrome::Nak(code);
        if code == NakCode::REMOTE_ACCESS {
            self.stats.access_errors += 1;
        } else {
            self.stats.malformed += 1;
        }
        self.push_ack(psn, syndrome);
        self.rx.last_words = Some((psn, syndrome));
        self.enter_error(Reason::Responder(syndrome));
    }

    /// In the error state: the peer asks on, so the last NAK was lost.
    pub(super) fn repeat_last_words(&mut self, received: &Received<'_>) {
        let bth = &received.packet.headers.bth;
        let is_request = bth.opcode().info().is_none_or(|info| info.request);
        if let Some((psn, syndrome)) = self.rx.last_words
            && is_request
            && self.rx.answers.is_empty()
        {
            self.push_ack(psn, syndrome);
        }
    }

    /// What an answer that is no NAK says. Credits are in all of them, or in none.
    fn positive(&self) -> Syndrome {
        Syndrome::Ack(if self.config.credits && !self.rx.receives.is_shared() {
            credit_code(u32::try_from(self.rx.posted()).unwrap_or(u32::MAX))
        } else {
            NO_CREDITS
        })
    }

    /// Everything before the expected PSN came.
    fn acknowledge_all(&mut self) {
        // IBTA vol. 1, 9.7.5.1.2: the PSN of the last packet that was carried out.
        let last = self.rx.expected.add(0xff_ffff);
        self.push_ack(last, self.positive());
    }

    /// Queues an acknowledgement. Those that are the last in the queue already are replaced: a batch
    /// of packets is acknowledged once. But an ACK does not replace a NAK: what came behind the
    /// packet that it names was dropped, and nothing else says so.
    fn push_ack(&mut self, psn: Psn, syndrome: Syndrome) {
        let new = Answer::Ack { psn, msn: self.rx.msn, syndrome };
        let is_ack = matches!(syndrome, Syndrome::Ack(_));
        while let Some(Answer::Ack { psn: last, syndrome: before, .. }) = self.rx.answers.back() {
            if psn.is_before(*last) {
                return;
            }
            if is_ack && !matches!(before, Syndrome::Ack(_)) {
                break;
            }
            self.rx.answers.pop_back();
        }
        self.rx.answers.push_back(new);
    }

    /// Queues an answer that was given before. Answers keep the order of their PSNs: one that
    /// overtakes another tells the peer that the other is lost.
    fn push_again(&mut self, answer: Answer) {
        let psn = answer.psn();
        let answers = &mut self.rx.answers;
        let at = answers.iter().position(|later| psn.is_before(later.psn()));
        answers.insert(at.unwrap_or(answers.len()), answer);
    }

    fn remember(&mut self, psn: Psn, original: Option<u64>) {
        let msn = self.rx.msn;
        while self.rx.replays.len() >= self.attr.max_dest_rd_atomic.into() {
            self.rx.replays.pop_front();
        }
        self.rx.replays.push_back(Replay { psn, msn, original });
        self.rx.answers.push_back(match original {
            Some(original) => Answer::Atomic { psn, msn, original },
            None => Answer::Done { psn, msn },
        });
    }

    /// A request that came before.
    fn answer_again<M: Memory + ?Sized>(&mut self, received: &Received<'_>, mem: &M) {
        let headers = &received.packet.headers;
        let psn = headers.bth.psn();
        let Some(info) = headers.bth.opcode().info() else {
            return;
        };
        let full = self.rx.answers.len() > self.most_answers();
        match info.operation {
            Operation::ReadRequest => self.read_again(psn, headers, full, mem),
            Operation::CmpSwap
            | Operation::FetchAdd
            | Operation::Flush
            | Operation::AtomicWrite => {
                let replay = self.rx.replays.iter().rfind(|replay| replay.psn == psn).copied();
                let queued = self.rx.answers.iter().any(|answer| match answer {
                    Answer::Atomic { psn: at, .. } | Answer::Done { psn: at, .. } => *at == psn,
                    Answer::Ack { .. } | Answer::Read { .. } => false,
                });
                let Some(Replay { psn, msn, original }) = replay else {
                    return;
                };
                if !queued && !full {
                    self.push_again(match original {
                        Some(original) => Answer::Atomic { psn, msn, original },
                        None => Answer::Done { psn, msn },
                    });
                }
            }
            _ if headers.bth.ack_req() || info.place.ends() => self.acknowledge_all(),
            _ => {}
        }
    }

    /// A READ that came before, or the rest of one: it is carried out once more.
    fn read_again<M: Memory + ?Sized>(&mut self, psn: Psn, headers: &Headers, full: bool, mem: &M) {
        let Some(reth) = headers.reth else {
            return;
        };
        let packets = reth.dma_len().div_ceil(self.attr.path_mtu.octets()).max(1);
        // It asks for no more than it asked for before.
        let beyond = self.rx.expected.since(psn) < packets;
        if beyond || reth.dma_len() > MAX_MESSAGE {
            return;
        }
        let mtu = self.attr.path_mtu.octets();
        for answer in &mut self.rx.answers {
            // It is being answered: what is before this packet has come, and it begins anew here.
            if let Answer::Read { first, packets, next, rkey, fresh, addr, len, .. } = answer
                && psn.since(*first) < *packets
                && *rkey == reth.rkey()
            {
                // The peer may have all of it by now, and its next READ needs the place.
                *fresh = false;
                let skip = psn.since(*first);
                (*first, *packets, *next) = (psn, *packets - skip, 0);
                (*addr, *len) = (addr.wrapping_add((skip * mtu).into()), *len - skip * mtu);
                return;
            }
        }
        let (rkey, addr, len) = (reth.rkey(), reth.va(), reth.dma_len());
        let allowed =
            mem.check_remote(self.config.scope, rkey, addr, len.into(), Access::REMOTE_READ);
        // The key may be gone since: the peer has what it needs then, or never gets it.
        if allowed.is_err() || full || !self.attr.access.contains(Access::REMOTE_READ) {
            return;
        }
        let msn = self.rx.msn;
        let answer =
            Answer::Read { first: psn, rkey, addr, len, packets, next: 0, msn, fresh: false };
        self.push_again(answer);
    }

    /// Carries out the request whose turn it is.
    fn execute<M: Memory + ?Sized>(
        &mut self,
        received: &Received<'_>,
        mem: &M,
    ) -> Result<(), Refusal> {
        let packet = received.packet;
        let Some(info) = packet.headers.bth.opcode().info() else {
            return Err(INVALID);
        };
        if packet.check_form().is_err() {
            return Err(INVALID);
        }
        let psns = match info.operation {
            Operation::Send => self.take_send(received, info, mem).map(|()| 1)?,
            Operation::Write => self.take_write(received, info, mem).map(|()| 1)?,
            // Messages do not interleave.
            _ if self.rx.message.is_some() => return Err(INVALID),
            Operation::ReadRequest => self.take_read(&packet.headers, mem)?,
            Operation::CmpSwap | Operation::FetchAdd => {
                self.take_atomic(&packet.headers, info.operation, mem).map(|()| 1)?
            }
            Operation::Flush => self.take_flush(&packet.headers, mem).map(|()| 1)?,
            Operation::AtomicWrite => {
                self.take_atomic_write(&packet.headers, packet.payload, mem).map(|()| 1)?
            }
            _ => return Err(INVALID),
        };
        self.rx.expected = self.rx.expected.add(psns);
        self.rx.seq += u64::from(psns);
        Ok(())
    }

    fn count_message(&mut self) {
        self.rx.msn = (self.rx.msn + 1) & 0xff_ffff;
    }

    /// Whether a packet has as much payload as its place in a message asks for.
    fn check_length(&self, place: Place, len: usize) -> Result<u32, Refusal> {
        let mtu = self.attr.path_mtu.octets();
        let good = match (place, u32::try_from(len)) {
            (Place::First | Place::Middle, Ok(len)) => len == mtu,
            (Place::Last, Ok(len)) => (1..=mtu).contains(&len),
            (Place::Only, Ok(len)) => len <= mtu,
            (_, Err(_)) => false,
        };
        if good { Ok(len as u32) } else { Err(INVALID) }
    }

    /// A packet of a SEND.
    pub(super) fn take_send<M: Memory + ?Sized>(
        &mut self,
        received: &Received<'_>,
        info: &Info,
        mem: &M,
    ) -> Result<(), Refusal> {
        let packet = received.packet;
        let in_send = match &self.rx.message {
            Some(Message::Send { .. }) => true,
            Some(Message::Write { .. }) => return Err(INVALID),
            None => false,
        };
        if in_send == info.place.begins() {
            return Err(INVALID);
        }
        let len = self.check_length(info.place, packet.payload_len)?;
        if info.place.begins() {
            self.rx.receives.current().ok_or(Refusal::NotReady)?;
            self.rx.message = Some(Message::Send { placed: 0 });
        }
        let scope = self.config.scope;
        let (Some(Message::Send { placed }), Some(receive)) =
            (&mut self.rx.message, self.rx.receives.current())
        else {
            return Err(INVALID);
        };
        let sges = &receive.wr.sges;
        let writable = |&sge| mem.check_local(scope, sge, Access::LOCAL_WRITE).is_ok();
        if info.place.begins() && !sges.iter().all(writable) {
            self.rx.receive_status = Some(WcStatus::LOC_PROT_ERR);
            return Err(OPERATIONAL);
        }
        let total = u64::from(*placed) + u64::from(len);
        if total > receive.len.into() || total > MAX_MESSAGE.into() {
            self.rx.receive_status = Some(WcStatus::LOC_LEN_ERR);
            return Err(INVALID);
        }
        if scatter(mem, scope, sges, *placed, packet.payload).is_err() {
            self.rx.receive_status = Some(WcStatus::LOC_PROT_ERR);
            return Err(OPERATIONAL);
        }
        *placed += len;
        self.stats.payload_received += u64::from(len);
        if !info.place.ends() {
            return Ok(());
        }
        let invalidated = packet.headers.ieth.map(|ieth| ieth.rkey());
        if let Some(rkey) = invalidated {
            mem.invalidate(scope, rkey).map_err(nak)?;
        }
        self.count_message();
        if let Some(Message::Send { placed }) = self.rx.message.take()
            && let Some(receive) = self.rx.receives.finish()
        {
            let wc = Wc {
                opcode: WcOpcode::RECV,
                byte_len: placed,
                imm: packet.headers.immdt.map(|imm| Imm::from_u32(imm.data())),
                invalidated,
                solicited: packet.headers.bth.solicited(),
                ..Wc::default()
            };
            self.complete_receive(&receive, wc);
        }
        Ok(())
    }

    /// A packet of a WRITE.
    pub(super) fn take_write<M: Memory + ?Sized>(
        &mut self,
        received: &Received<'_>,
        info: &Info,
        mem: &M,
    ) -> Result<(), Refusal> {
        let packet = received.packet;
        let len = self.check_length(info.place, packet.payload_len)?;
        let (rkey, addr, whole, placed) = match (&self.rx.message, packet.headers.reth) {
            (None, Some(reth)) => (reth.rkey(), reth.va(), reth.dma_len(), 0),
            (&Some(Message::Write { rkey, addr, len, placed }), None) => (rkey, addr, len, placed),
            _ => return Err(INVALID),
        };
        // Nothing is left behind the last packet, something behind all others.
        let left = u64::from(whole).checked_sub(u64::from(placed) + u64::from(len));
        if whole > MAX_MESSAGE || left.is_none_or(|left| (left == 0) != info.place.ends()) {
            return Err(INVALID);
        }
        let scope = self.config.scope;
        if info.place.begins() {
            if !self.attr.access.contains(Access::REMOTE_WRITE) {
                return Err(INVALID);
            }
            // Of one packet the write itself looks at all of it; a receive that is missing comes behind that.
            let at_once = info.place == Place::Only && !info.takes_receive;
            if whole > 0 && !at_once {
                mem.check_remote(scope, rkey, addr, whole.into(), Access::REMOTE_WRITE)
                    .map_err(nak)?;
            }
        }
        if info.takes_receive && self.rx.receives.current().is_none() {
            return Err(Refusal::NotReady);
        }
        if len > 0 {
            let at = addr.wrapping_add(placed.into());
            mem.write_remote(scope, rkey, at, packet.payload).map_err(nak)?;
        }
        self.stats.payload_received += u64::from(len);
        if !info.place.ends() {
            self.rx.message = Some(Message::Write { rkey, addr, len: whole, placed: placed + len });
            return Ok(());
        }
        self.rx.message = None;
        self.count_message();
        if info.takes_receive
            && let Some(receive) = self.rx.receives.finish()
        {
            let wc = Wc {
                opcode: WcOpcode::RECV_IMM,
                byte_len: whole,
                imm: packet.headers.immdt.map(|imm| Imm::from_u32(imm.data())),
                solicited: packet.headers.bth.solicited(),
                ..Wc::default()
            };
            self.complete_receive(&receive, wc);
        }
        Ok(())
    }

    /// A READ: how many responses it has.
    fn take_read<M: Memory + ?Sized>(
        &mut self,
        headers: &Headers,
        mem: &M,
    ) -> Result<u32, Refusal> {
        let reth = headers.reth.ok_or(INVALID)?;
        let (rkey, addr, len) = (reth.rkey(), reth.va(), reth.dma_len());
        if len > MAX_MESSAGE
            || !self.attr.access.contains(Access::REMOTE_READ)
            || self.rx.reads() >= self.attr.max_dest_rd_atomic.into()
        {
            return Err(INVALID);
        }
        if len > 0 {
            mem.check_remote(self.config.scope, rkey, addr, len.into(), Access::REMOTE_READ)
                .map_err(nak)?;
        }
        self.count_message();
        let packets = len.div_ceil(self.attr.path_mtu.octets()).max(1);
        let (first, msn) = (self.rx.expected, self.rx.msn);
        let answer = Answer::Read { first, rkey, addr, len, packets, next: 0, msn, fresh: true };
        self.rx.answers.push_back(answer);
        Ok(packets)
    }

    fn take_atomic<M: Memory + ?Sized>(
        &mut self,
        headers: &Headers,
        operation: Operation,
        mem: &M,
    ) -> Result<(), Refusal> {
        let eth = headers.atomic_eth.ok_or(INVALID)?;
        if !self.attr.access.contains(Access::REMOTE_ATOMIC)
            || self.attr.max_dest_rd_atomic == 0
            || !eth.va().is_multiple_of(8)
        {
            return Err(INVALID);
        }
        let op = match operation {
            Operation::FetchAdd => AtomicOp::FetchAdd { add: eth.swap_add(), mask: 0 },
            _ => AtomicOp::CmpSwap {
                compare: eth.compare(),
                swap: eth.swap_add(),
                compare_mask: u64::MAX,
                swap_mask: u64::MAX,
            },
        };
        let original = mem.atomic(self.config.scope, eth.rkey(), eth.va(), op).map_err(nak)?;
        self.count_message();
        self.remember(self.rx.expected, Some(original));
        Ok(())
    }

    /// Everything written before is in memory already, where every reader sees it. What is
    /// registered as persistent is so by the promise of who registered it.
    fn take_flush<M: Memory + ?Sized>(
        &mut self,
        headers: &Headers,
        mem: &M,
    ) -> Result<(), Refusal> {
        let (Some(feth), Some(reth)) = (headers.feth, headers.reth) else {
            return Err(INVALID);
        };
        let (placement, selectivity) = (feth.placement(), feth.selectivity());
        if !is_known_flush(placement, selectivity) || self.attr.max_dest_rd_atomic == 0 {
            return Err(INVALID);
        }
        let mut access = Access::empty();
        access.set(Access::FLUSH_GLOBAL, placement.contains(Placement::GLOBAL_VISIBILITY));
        access.set(Access::FLUSH_PERSISTENT, placement.contains(Placement::PERSISTENCE));
        if !self.attr.access.contains(access) {
            return Err(INVALID);
        }
        // IBTA annex A19: of a whole region address and length mean nothing. The key, its domain and
        // its rights are checked before both.
        let whole = selectivity == Selectivity::REGION;
        let len = if whole { 1 } else { reth.dma_len().into() };
        if len > 0 {
            match mem.check_remote(self.config.scope, reth.rkey(), reth.va(), len, access) {
                Err(AccessError::Wrap | AccessError::Bounds) if whole => {}
                checked => checked.map_err(nak)?,
            }
        }
        self.count_message();
        self.remember(self.rx.expected, None);
        Ok(())
    }

    fn take_atomic_write<M: Memory + ?Sized>(
        &mut self,
        headers: &Headers,
        word: &[u8],
        mem: &M,
    ) -> Result<(), Refusal> {
        let reth = headers.reth.ok_or(INVALID)?;
        if !self.attr.access.contains(Access::REMOTE_WRITE)
            || self.attr.max_dest_rd_atomic == 0
            || reth.dma_len() != 8
            || word.len() != 8
            || !reth.va().is_multiple_of(8)
        {
            return Err(INVALID);
        }
        mem.write_remote(self.config.scope, reth.rkey(), reth.va(), word).map_err(nak)?;
        self.stats.payload_received += 8;
        self.count_message();
        self.remember(self.rx.expected, None);
        Ok(())
    }

    /// Fills `train` with answers, in the order of the requests.
    pub(super) fn transmit_answers<M: Memory + ?Sized>(
        &mut self,
        now: Instant,
        mem: &M,
        limit: Limit,
        train: &mut Train,
    ) {
        while let Some(answer) = self.rx.answers.front() {
            let mtu = self.attr.path_mtu.octets();
            let aeth = |syndrome, msn| Some(Aeth::new(syndrome, msn));
            let headers = |opcode, psn| {
                let bth = Bth::new(opcode, self.attr.pkey, self.attr.dest_qp, psn);
                Headers::new(bth.with_migreq(self.attr.migreq))
            };
            let (mut headers, source, done) = match *answer {
                Answer::Ack { psn, msn, syndrome } => {
                    let mut headers = headers(Opcode::RC_ACK, psn);
                    headers.aeth = aeth(syndrome, msn);
                    (headers, Source::Bytes(&[]), true)
                }
                Answer::Atomic { psn, msn, original } => {
                    let mut headers = headers(Opcode::RC_ATOMIC_ACK, psn);
                    headers.aeth = aeth(self.positive(), msn);
                    headers.atomic_ack_eth = Some(AtomicAckEth::new(original));
                    (headers, Source::Bytes(&[]), true)
                }
                Answer::Done { psn, msn } => {
                    let mut headers = headers(Opcode::RC_READ_RESP_ONLY, psn);
                    headers.aeth = aeth(self.positive(), msn);
                    (headers, Source::Bytes(&[]), true)
                }
                Answer::Read { first, rkey, addr, len, packets, next, msn, .. } => {
                    let opcode = match (next == 0, next + 1 == packets) {
                        (true, true) => Opcode::RC_READ_RESP_ONLY,
                        (true, false) => Opcode::RC_READ_RESP_FIRST,
                        (false, true) => Opcode::RC_READ_RESP_LAST,
                        (false, false) => Opcode::RC_READ_RESP_MIDDLE,
                    };
                    let mut headers = headers(opcode, first.add(next));
                    headers.aeth = aeth(self.positive(), msn);
                    let offset = next * mtu;
                    let source = match (len - offset).min(mtu) {
                        0 => Source::Bytes(&[][..]),
                        len => Source::Remote { rkey, addr: addr.wrapping_add(offset.into()), len },
                    };
                    (headers, source, next + 1 == packets)
                }
            };
            let payload = source.len() as u32;
            let ends = self.ends();
            let len = packet_len(&headers, payload);
            if !train.takes(len, (&ends.0, &ends.1), limit)
                || payload > 0 && !self.keeps_pace(now, len)
            {
                return;
            }
            let pushed =
                train.push((&ends.0, &ends.1), &mut headers, source, mem, self.config.scope);
            match self.rx.answers.front_mut() {
                // The key was revoked since it was checked.
                Some(&mut Answer::Read { first, next, fresh, .. }) if pushed.is_err() => {
                    self.rx.answers.pop_front();
                    if fresh {
                        self.rx.answers.clear();
                        self.refuse(first.add(next), NakCode::REMOTE_ACCESS);
                    }
                    continue;
                }
                Some(Answer::Read { next, .. }) => *next += 1,
                Some(Answer::Ack { .. }) => self.stats.acks_sent += 1,
                _ => {}
            }
            self.stats.payload_sent += u64::from(payload);
            if done {
                self.rx.answers.pop_front();
            }
        }
    }
}

/// Whether a request is answered by more than an ACK.
fn awaits_answer(opcode: Opcode) -> bool {
    opcode.info().is_some_and(|info| !matches!(info.operation, Operation::Send | Operation::Write))
}

/// Stores `data` from `offset` of the list on.
pub(super) fn scatter<M: Memory + ?Sized>(
    mem: &M,
    scope: crate::mem::Scope,
    sges: &[crate::verbs::Sge],
    offset: u32,
    data: &[u8],
) -> Result<(), AccessError> {
    let mut rest = data;
    pieces(sges, offset, data.len() as u32).try_for_each(|sge| {
        let (now, later) = rest.split_at_checked(sge.length as usize).unwrap_or((rest, &[]));
        rest = later;
        mem.write_local(scope, sge.lkey, sge.addr, now)
    })
}

/// What the peer is told of an access that memory refused.
fn nak(error: AccessError) -> Refusal {
    match error {
        AccessError::Alignment => INVALID,
        AccessError::InvalidKey
        | AccessError::WrongDomain
        | AccessError::Rights
        | AccessError::Wrap
        | AccessError::Bounds => Refusal::Nak(NakCode::REMOTE_ACCESS),
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use super::*;
    use crate::{
        mem::{NoMemory, PdId},
        roce::Config,
        verbs::QpType,
        wire::{
            ids::{PKey, Qpn},
            roce::atomic::AtomicEth,
        },
    };

    /// PSNs come round: a result stored 2^24 packets ago is not that of the atomic which has the
    /// number now.
    #[test]
    fn the_newest_result_of_a_psn_is_repeated() {
        let mut qp = Qp::new(Config::new(QpType::Rc, PdId(0), Qpn(1)));
        let psn = Psn::new(5);
        qp.remember(psn, Some(1));
        qp.remember(psn, Some(2));
        qp.rx.answers.clear();
        qp.rx.expected = psn.next();

        let mut headers = Headers::new(Bth::new(Opcode::RC_FETCH_ADD, PKey(0xffff), Qpn(1), psn));
        headers.atomic_eth = Some(AtomicEth::new(0, RKey(1), 1, 0));
        let mut octets = Vec::new();
        headers.emit_packet(&[], &mut octets);
        octets.extend([0; 4]);
        let packet = &Packet::parse(&octets).unwrap();
        let from = ([192, 0, 2, 2], 4791).into();
        let received = Received { packet, from, len: octets.len(), ecn: 0 };
        qp.handle_request(Instant::ZERO, &received, &NoMemory);
        let again: Vec<_> = qp.rx.answers.drain(..).collect();
        assert!(matches!(again[..], [Answer::Atomic { original: 2, .. }]), "{again:?}");
    }
}
