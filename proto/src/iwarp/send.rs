//! Sending: the send queue, the answers to the peer's READs and atomics, and their segments.

use alloc::{collections::VecDeque, vec::Vec};

use zerocopy::IntoBytes;

use super::{Config, Connection, Established, RtrKinds, Transmit, connection::Phase};
use crate::{
    mem::{AccessError, AtomicOp, Memory, Scope},
    splitmix,
    time::Instant,
    verbs::{Access, Payload, PostError, RemoteAddr, SendFlags, SendOp, SendWr, Sge, WcStatus},
    wire::{
        ids::{Msn, RKey, Stag},
        iwarp::{
            ddp::{
                QN_ATOMIC_RESPONSE, QN_READ_REQUEST, QN_SEND, QN_TERMINATE, Segment, TaggedHeader,
                UntaggedHeader,
            },
            fpdu::{self, MarkerEncoder},
            rdmap::{AtomicOpcode, AtomicRequest, AtomicResponse, Immediate, Opcode, ReadRequest},
            terminate::{HeaderCopy, TermCode, TermLayer, Terminate},
        },
    },
};

pub(super) use crate::verbs::pieces;

/// Payload up to this length is copied next to its headers: cheaper than a part of its own, which
/// costs the kernel an iovec each for the payload and for the trailer behind it.
const COPY_LIMIT: usize = 1024;

/// A transmission holds at most this many parts: `IOV_MAX` is 1024 on Linux, and one work request
/// adds up to a few at a time.
const MAX_PARTS: usize = 960;

/// A zero-length RTR indication names nothing; 0 is refused by some peers, so it says 1.
pub(super) const RTR_STAG: Stag = Stag(1);

/// How far a work request is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    /// Nothing of it has left.
    Queued,
    /// Some segments have left.
    Sending,
    /// The last octet is at `end` of the stream.
    Sent {
        /// Position in the stream, one past its last octet.
        end: u64,
    },
    /// A request is sent; the answer has not come.
    Awaiting,
    /// It has failed, but octets of it are with the driver, up to `end` of the stream: its memory is
    /// still read, so it is over when they are written.
    Leaving {
        /// Position in the stream, one past the last octet handed out.
        end: u64,
        /// How it ends then.
        status: WcStatus,
    },
    /// Over.
    Done(WcStatus),
}

impl Stage {
    /// The stage after a failure, where `queued` octets of the stream were handed out so far.
    fn failed(self, status: WcStatus, queued: u64) -> Self {
        match self {
            Self::Done(status) => Self::Done(status),
            Self::Leaving { end, status } => Self::Leaving { end, status },
            Self::Sent { end } => Self::Leaving { end, status },
            Self::Sending => Self::Leaving { end: queued, status },
            Self::Queued | Self::Awaiting => Self::Done(status),
        }
    }
}

/// A send work request in the queue.
#[derive(Debug)]
pub(super) struct Work {
    pub(super) id: u64,
    pub(super) tag: u64,
    pub(super) op: SendOp,
    pub(super) payload: Payload,
    flags: SendFlags,
    pub(super) len: u32,
    sent: u32,
    msn: Msn,
    pub(super) stage: Stage,
}

impl Work {
    pub(super) fn signaled(&self) -> bool {
        self.flags.contains(SendFlags::SIGNALED)
    }
}

/// A READ or atomic whose answer has not come.
#[derive(Debug, Clone, Copy)]
pub(super) struct Outstanding {
    /// Sequence number of its work request; `None` for a READ that is an RTR indication.
    pub(super) seq: Option<u64>,
    pub(super) kind: Awaited,
}

/// The answer that is due.
#[derive(Debug, Clone, Copy)]
pub(super) enum Awaited {
    /// `size - got` octets for the one-shot sink `stag`, in order.
    Read { stag: Stag, size: u32, got: u32 },
    /// The old value.
    Atomic { request_id: u32 },
}

/// A READ or atomic of the peer that waits for its answer.
#[derive(Debug, Clone, Copy)]
pub(super) enum Inbound {
    /// Octets to send back.
    Read {
        /// The request as it came.
        request: ReadRequest,
        /// Its DDP header as it came, for a Terminate.
        header: UntaggedHeader,
        /// Octets sent back so far.
        sent: u32,
    },
    /// A word to change.
    Atomic {
        /// The request as it came.
        request: AtomicRequest,
        /// Its DDP header as it came, for a Terminate.
        header: UntaggedHeader,
    },
}

/// The message whose segments are being sent: messages of one connection do not interleave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Message {
    Work,
    Response,
}

/// The sending half.
#[derive(Debug)]
pub(super) struct Sender {
    queue: VecDeque<Work>,
    /// Sequence number of the queue's front.
    base: u64,
    /// Index of the first work request that is not sent whole.
    next: usize,
    current: Option<Message>,
    /// Whose turn it is when both a response and a work request are ready.
    response_turn: bool,
    /// Octets of the stream handed to the driver, and of those, written by it.
    pub(super) queued: u64,
    pub(super) written: u64,
    send_msn: Msn,
    request_msn: Msn,
    response_msn: Msn,
    request_id: u32,
    random: u64,
    pub(super) outstanding: VecDeque<Outstanding>,
    pub(super) inbound: VecDeque<Inbound>,
    /// The ready-to-receive indication that has to go first.
    pub(super) rtr: Option<RtrKinds>,
    /// An empty WRITE is due ([`Config::nudge`]), and whether FPDUs went out before.
    pub(super) nudge: bool,
    pub(super) started: bool,
    /// Where the start-up frames end and FPDUs begin in the stream.
    pub(super) startup_end: u64,
    /// Layer, type and code of the Terminate that ended it.
    pub(super) blamed: Option<u16>,
}

/// Makes FPDUs.
#[derive(Debug, Default)]
pub(super) struct Framer {
    pub(super) crc: bool,
    pub(super) markers: Option<MarkerEncoder>,
    plain: Vec<u8>,
}

/// Where a segment's payload comes from.
#[derive(Debug, Clone, Copy)]
enum Source<'a> {
    Bytes(&'a [u8]),
    /// `len` octets from `offset` of the list.
    Local {
        sges: &'a [Sge],
        offset: u32,
        len: u32,
    },
    /// Memory that the peer reads.
    Remote {
        rkey: RKey,
        addr: u64,
        len: u32,
    },
}

impl Framer {
    /// Appends one FPDU to `out`. On an error nothing is appended.
    fn put<M: Memory + ?Sized>(
        &mut self,
        header: &[u8],
        source: Source<'_>,
        mem: &M,
        scope: Scope,
        out: &mut Transmit,
    ) -> Result<(), AccessError> {
        if let Some(markers) = &mut self.markers {
            self.plain.clear();
            whole(&mut self.plain, self.crc, header, source, mem, scope)?;
            markers.push(&self.plain, out.bytes_mut());
            out.seal();
            return Ok(());
        }
        if let (Source::Local { sges, offset, len }, false) = (source, self.crc)
            && len as usize > COPY_LIMIT
        {
            for sge in pieces(sges, offset, len) {
                mem.check_local(scope, sge, Access::empty())?;
            }
            let ulpdu_len = header.len() + len as usize;
            let bytes = out.bytes_mut();
            let start = fpdu::begin(bytes);
            bytes.extend_from_slice(header);
            fpdu::set_length(bytes, start, ulpdu_len);
            for sge in pieces(sges, offset, len) {
                out.push_region(sge);
            }
            fpdu::trailer(out.bytes_mut(), ulpdu_len);
            out.seal();
            return Ok(());
        }
        // With CRC the octets that are summed must be the octets that are sent: a snapshot.
        whole(out.bytes_mut(), self.crc, header, source, mem, scope)?;
        out.seal();
        Ok(())
    }
}

/// Appends one FPDU without markers, everything copied.
fn whole<M: Memory + ?Sized>(
    out: &mut Vec<u8>,
    crc: bool,
    header: &[u8],
    source: Source<'_>,
    mem: &M,
    scope: Scope,
) -> Result<(), AccessError> {
    let start = fpdu::begin(out);
    out.extend_from_slice(header);
    let copied = match source {
        Source::Bytes(bytes) => {
            out.extend_from_slice(bytes);
            Ok(())
        }
        Source::Local { sges, offset, len } => {
            pieces(sges, offset, len).try_for_each(|sge| mem.read_local(scope, sge, out))
        }
        Source::Remote { rkey, addr, len } => {
            mem.read_remote(scope, rkey, addr, u64::from(len), out)
        }
    };
    if copied.is_err() {
        out.truncate(start);
        return copied;
    }
    fpdu::finish(out, start, crc);
    Ok(())
}

impl Sender {
    pub(super) fn new(seed: u64) -> Self {
        Self {
            queue: VecDeque::new(),
            base: 0,
            next: 0,
            current: None,
            response_turn: true,
            queued: 0,
            written: 0,
            send_msn: Msn::FIRST,
            request_msn: Msn::FIRST,
            response_msn: Msn::FIRST,
            request_id: 0,
            random: seed,
            outstanding: VecDeque::new(),
            inbound: VecDeque::new(),
            rtr: None,
            nudge: false,
            started: false,
            startup_end: 0,
            blamed: None,
        }
    }

    /// Checks a work request as far as verbs do at the call, and queues it.
    pub(super) fn push(
        &mut self,
        wr: SendWr,
        tag: u64,
        config: &Config,
        established: Option<&Established>,
    ) -> Result<(), PostError> {
        let len = check_post(&wr, config, established)?;
        if self.queue.len() >= config.max_send_wr {
            return Err(PostError::QueueFull { max: config.max_send_wr });
        }
        self.queue.push_back(Work {
            id: wr.id,
            tag,
            op: wr.op,
            payload: wr.payload,
            flags: wr.flags,
            len,
            sent: 0,
            msn: Msn(0),
            stage: Stage::Queued,
        });
        Ok(())
    }

    pub(super) fn front(&self) -> Option<&Work> {
        self.queue.front()
    }

    pub(super) fn pop_front(&mut self) -> Option<Work> {
        let work = self.queue.pop_front()?;
        self.base += 1;
        self.next = self.next.saturating_sub(1);
        Some(work)
    }

    /// The work request with sequence number `seq`.
    pub(super) fn work_mut(&mut self, seq: u64) -> Option<&mut Work> {
        let index = usize::try_from(seq.checked_sub(self.base)?).ok()?;
        self.queue.get_mut(index)
    }

    /// Its index in the queue.
    pub(super) fn index_of(&self, seq: u64) -> usize {
        usize::try_from(seq.saturating_sub(self.base)).unwrap_or(usize::MAX)
    }

    /// Whether everything is sent and answered.
    pub(super) fn is_idle(&self) -> bool {
        self.queue.is_empty() && self.inbound.is_empty() && self.rtr.is_none()
    }

    /// Whether work of the program is sent or waits for its turn or its answer.
    pub(super) fn has_work(&self) -> bool {
        !self.queue.is_empty()
    }

    pub(super) fn awaits_response(&self) -> bool {
        !self.outstanding.is_empty()
    }

    /// Marks everything that is not over as flushed, what is with the driver too: that drops it.
    pub(super) fn flush_all(&mut self) {
        self.flush();
        for work in &mut self.queue {
            if let Stage::Leaving { status, .. } = work.stage {
                work.stage = Stage::Done(status);
            }
        }
    }

    /// Marks everything that is not over as flushed. What is with the driver is still sent.
    pub(super) fn flush(&mut self) {
        let (queued, written) = (self.queued, self.written);
        // Behind a failure nothing succeeds, whatever became of it.
        let mut good = true;
        for work in &mut self.queue {
            work.stage = match work.stage {
                Stage::Sent { end } if good && end <= written => Stage::Done(WcStatus::SUCCESS),
                stage => stage.failed(WcStatus::WR_FLUSH_ERR, queued),
            };
            good &= work.stage == Stage::Done(WcStatus::SUCCESS);
        }
        self.stop();
    }

    /// The work request at `index` failed: what waits for answers before it, and everything after
    /// it, is flushed.
    pub(super) fn fail_at(&mut self, index: usize, status: WcStatus) {
        let queued = self.queued;
        let mut good = true;
        for (i, work) in self.queue.iter_mut().enumerate() {
            good &= matches!(work.stage, Stage::Sent { .. } | Stage::Done(WcStatus::SUCCESS));
            work.stage = match work.stage {
                stage if good && i < index => stage,
                stage if i == index => stage.failed(status, queued),
                stage => stage.failed(WcStatus::WR_FLUSH_ERR, queued),
            };
        }
        self.stop();
    }

    /// The first work request whose octets have not all been written fails.
    pub(super) fn fail_unwritten(&mut self, status: WcStatus) {
        let written = self.written;
        let unwritten = |work: &Work| match work.stage {
            Stage::Sending => true,
            Stage::Sent { end } => end > written,
            // Nothing leaves before the connection has failed, and then it ends without this.
            Stage::Queued | Stage::Awaiting | Stage::Leaving { .. } | Stage::Done(_) => false,
        };
        if let Some(index) = self.queue.iter().position(unwritten) {
            self.queue[index].stage = Stage::Done(status);
        }
    }

    fn stop(&mut self) {
        self.outstanding.clear();
        self.inbound.clear();
        self.current = None;
        self.rtr = None;
        self.next = self.queue.len();
    }

    /// The last work request is flushed: it was posted in the error state.
    pub(super) fn flush_last(&mut self) {
        if let Some(work) = self.queue.back_mut() {
            work.stage = Stage::Done(WcStatus::WR_FLUSH_ERR);
        }
    }

    /// The peer sends nothing more: work that needs an answer, and what follows it, is flushed.
    pub(super) fn flush_unanswerable(&mut self) {
        let needs_answer = |work: &Work| {
            matches!(work.op, SendOp::Read(_) | SendOp::FetchAdd { .. } | SendOp::CmpSwap { .. })
                && !matches!(work.stage, Stage::Done(_))
        };
        if let Some(first) = self.queue.iter().position(needs_answer) {
            for work in self.queue.iter_mut().skip(first) {
                work.stage = Stage::Done(WcStatus::WR_FLUSH_ERR);
            }
            self.next = self.next.min(first);
        }
    }

    /// Gives the work request that a Terminate speaks of the status it deserves.
    pub(super) fn blame(&mut self, terminate: &Terminate) {
        self.blamed = Some(terminate.term_octets());
        let code = terminate.code;
        let Some(status) = status_of(code) else {
            return;
        };
        let Some(index) = self.find_blamed(terminate) else {
            return;
        };
        let queued = self.queued;
        if let Some(work) = self.queue.get_mut(index) {
            work.stage = work.stage.failed(status, queued);
        }
    }

    fn find_blamed(&self, terminate: &Terminate) -> Option<usize> {
        let by_seq = |entry: &Outstanding| entry.seq.map(|seq| self.index_of(seq));
        if let Some(request) = terminate.read_request() {
            let sink = Stag(request.sink_stag.get());
            return self.outstanding.iter().find_map(|entry| match entry.kind {
                Awaited::Read { stag, .. } if stag == sink => by_seq(entry),
                _ => None,
            });
        }
        let header = terminate.ddp_header.as_ref().and_then(HeaderCopy::segment);
        let open = |work: &Work| {
            !matches!(work.stage, Stage::Queued | Stage::Leaving { .. } | Stage::Done(_))
        };
        match header {
            Some(Segment::Tagged { header, .. }) => self.queue.iter().position(|work| {
                let (SendOp::Write(remote) | SendOp::WriteImm(remote, _)) = work.op else {
                    return false;
                };
                open(work)
                    && remote.rkey.0 == header.stag.get()
                    && header.to.get().wrapping_sub(remote.addr) <= u64::from(work.len)
            }),
            Some(Segment::Untagged { header, .. }) => self.queue.iter().position(|work| {
                let queue = match work.op {
                    SendOp::Read(_) | SendOp::FetchAdd { .. } | SendOp::CmpSwap { .. } => {
                        QN_READ_REQUEST
                    }
                    SendOp::Write(_)
                    | SendOp::LocalInv(_)
                    | SendOp::Flush { .. }
                    | SendOp::AtomicWrite(_) => return false,
                    SendOp::Send
                    | SendOp::SendImm(_)
                    | SendOp::SendInv(_)
                    | SendOp::WriteImm(..)
                    | SendOp::Imm(_) => QN_SEND,
                };
                open(work) && queue == header.qn.get() && work.msn.0 == header.msn.get()
            }),
            // No header: where only one thing waits for an answer, it is that.
            None => self.outstanding.front().and_then(by_seq),
        }
    }

    /// A key for a one-shot sink: spread by a seed from the system's generator, and never 0. What
    /// protects a sink is that only the answer due is taken, not that its key is secret.
    fn fresh_stag(&mut self) -> Stag {
        loop {
            let stag = Stag((splitmix::draw(&mut self.random) >> 32) as u32);
            if stag.0 != 0
                && !self
                    .outstanding
                    .iter()
                    .any(|o| matches!(o.kind, Awaited::Read { stag: s, .. } if s == stag))
            {
                return stag;
            }
        }
    }

    /// Whether the next work request may start or go on.
    fn work_ready(&self, ord: u16) -> bool {
        let Some(work) = self.queue.get(self.next) else {
            return false;
        };
        if matches!(work.stage, Stage::Done(_)) {
            return false;
        }
        // Fence: READs and atomics before it must be answered (RFC 5040 §5.5, footnote 2).
        if work.flags.contains(SendFlags::FENCE)
            && self.outstanding.iter().any(|entry| entry.seq.is_some())
        {
            return false;
        }
        match work.op {
            // RFC 6581 §9.1, RFC 7306 §5.2: READs and atomics share the outbound depth.
            SendOp::Read(_) | SendOp::FetchAdd { .. } | SendOp::CmpSwap { .. } => {
                self.outstanding.len() < usize::from(ord)
            }
            // Nothing before it may still refer to the key: all of it is written and done.
            SendOp::LocalInv(_) => self.next == 0,
            SendOp::Send
            | SendOp::SendImm(_)
            | SendOp::SendInv(_)
            | SendOp::Write(_)
            | SendOp::WriteImm(..)
            | SendOp::Imm(_)
            | SendOp::Flush { .. }
            | SendOp::AtomicWrite(_) => true,
        }
    }

    fn choose(&self, ord: u16) -> Option<Message> {
        if self.current.is_some() {
            return self.current;
        }
        let response = !self.inbound.is_empty();
        let work = self.work_ready(ord);
        match (response, work) {
            (false, false) => None,
            (true, false) => Some(Message::Response),
            (false, true) => Some(Message::Work),
            (true, true) if self.response_turn => Some(Message::Response),
            (true, true) => Some(Message::Work),
        }
    }
}

/// What a Terminate's code means for the work it speaks of; `None` where it speaks of none.
fn status_of(code: TermCode) -> Option<WcStatus> {
    match (code.layer, code.etype) {
        // RDMAP remote protection, DDP tagged buffer.
        (TermLayer::RDMAP | TermLayer::DDP, 1) => Some(WcStatus::REM_ACCESS_ERR),
        (TermLayer::DDP, 2) if code == TermCode::DDP_UNTAGGED_TOO_LONG => {
            Some(WcStatus::REM_INV_REQ_ERR)
        }
        (TermLayer::RDMAP | TermLayer::DDP, 2) => Some(WcStatus::REM_OP_ERR),
        _ => None,
    }
}

fn check_post(
    wr: &SendWr,
    config: &Config,
    established: Option<&Established>,
) -> Result<u32, PostError> {
    let have = wr.payload.len();
    let Ok(len) = u32::try_from(have) else {
        // The message offset of RFC 5041 §4.3 has 32 bits.
        return Err(PostError::TooLong { max: u64::from(u32::MAX), have });
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
    let inline = matches!(wr.payload, Payload::Inline(_));
    if wr.dest.is_some() {
        return Err(PostError::Invalid("a connection has its peer: only UD requests name one"));
    }
    match wr.op {
        SendOp::SendImm(_) | SendOp::Flush { .. } | SendOp::AtomicWrite(_) => {
            return Err(PostError::Unsupported { op: wr.op.name(), transport: "iWARP" });
        }
        SendOp::Send | SendOp::SendInv(_) | SendOp::Write(_) | SendOp::WriteImm(..) => {}
        SendOp::Imm(_) | SendOp::LocalInv(_) if have > 0 => {
            return Err(PostError::Invalid("this operation carries no payload"));
        }
        SendOp::Imm(_) | SendOp::LocalInv(_) => {}
        SendOp::Read(_) if inline => {
            return Err(PostError::Invalid("a READ needs registered memory to read into"));
        }
        SendOp::FetchAdd { .. } | SendOp::CmpSwap { .. } if inline || have != 8 => {
            return Err(PostError::Invalid("an atomic needs exactly 8 octets for the old value"));
        }
        SendOp::Read(_) | SendOp::FetchAdd { .. } | SendOp::CmpSwap { .. }
            if established.is_some_and(|e| e.ord == 0) =>
        {
            return Err(PostError::Invalid(
                "READs and atomics are off: an outbound depth (ORD) of 0 was negotiated",
            ));
        }
        SendOp::Read(_) | SendOp::FetchAdd { .. } | SendOp::CmpSwap { .. } => {}
    }
    Ok(len)
}

impl Connection {
    /// Appends what may be sent now to `out`, until it holds about `budget` octets. False: nothing
    /// was appended.
    ///
    /// `out` must be written before the memory it refers to may change: that is what the program
    /// promises of SEND and WRITE sources until their completion.
    pub fn poll_transmit<M: Memory + ?Sized>(
        &mut self,
        now: Instant,
        mem: &M,
        budget: usize,
        out: &mut Transmit,
    ) -> bool {
        let before = self.tx.queued;
        if !self.startup_out.is_empty() {
            out.bytes_mut().append(&mut self.startup_out);
            self.tx.queued += out.seal() as u64;
            self.tx.startup_end = self.tx.queued;
        }
        while out.len() < budget && out.parts().len() < MAX_PARTS {
            if !self.transmit_one(now, mem, out) {
                break;
            }
        }
        self.tx.queued != before
    }

    /// The socket took the next `n` octets of what [`Connection::poll_transmit`] gave.
    pub fn handle_written(&mut self, now: Instant, n: usize) {
        self.tx.written += n as u64;
        if !self.tx.started && self.may_send && self.tx.written > self.tx.startup_end {
            self.tx.started = true;
            self.nudge_at = self.config.nudge.filter(|_| self.awaits_first_fpdu()).map(|d| now + d);
        }
        self.still_draining(now, n);
        debug_assert!(self.tx.written <= self.tx.queued, "more written than was given out");
        self.reap();
    }

    /// Appends one FPDU, if one may be sent.
    fn transmit_one<M: Memory + ?Sized>(
        &mut self,
        now: Instant,
        mem: &M,
        out: &mut Transmit,
    ) -> bool {
        if self.phase == Phase::Ending {
            let Some(terminate) = self.terminate.take() else {
                return false;
            };
            let mut payload = Vec::new();
            terminate.emit(&mut payload);
            let header =
                UntaggedHeader::new(Opcode::TERMINATE, true, QN_TERMINATE, Msn::FIRST, 0, Stag(0));
            return self.put(header.as_bytes(), Source::Bytes(&payload), mem, out).is_ok();
        }
        if !matches!(self.phase, Phase::Open | Phase::Draining) || !self.may_send {
            return false;
        }
        if let Some(kind) = self.tx.rtr.take() {
            self.transmit_rtr(kind, mem, out);
            return true;
        }
        // Not between the segments of a message: siw, for one, takes it for a part of the WRITE
        // under way. What follows of that message serves as well.
        if self.tx.current.is_none() && core::mem::take(&mut self.tx.nudge) {
            self.transmit_rtr(RtrKinds::WRITE, mem, out);
            return true;
        }
        let ord = self.established.as_ref().map_or(0, |e| e.ord);
        match self.tx.choose(ord) {
            Some(Message::Response) => self.transmit_response(now, mem, out),
            Some(Message::Work) => self.transmit_work(now, mem, out),
            None => return false,
        }
        true
    }

    fn put<M: Memory + ?Sized>(
        &mut self,
        header: &[u8],
        source: Source<'_>,
        mem: &M,
        out: &mut Transmit,
    ) -> Result<(), AccessError> {
        let before = out.len();
        self.framer.put(header, source, mem, self.config.scope, out)?;
        self.tx.queued += (out.len() - before) as u64;
        self.stats.fpdus_sent += 1;
        Ok(())
    }

    /// RFC 6581 §9.2: a zero-length message that lets the responder send.
    fn transmit_rtr<M: Memory + ?Sized>(&mut self, kind: RtrKinds, mem: &M, out: &mut Transmit) {
        let nothing = Source::Bytes(&[]);
        if kind == RtrKinds::SEND {
            let msn = bump(&mut self.tx.send_msn);
            let header = UntaggedHeader::new(Opcode::SEND, true, QN_SEND, msn, 0, Stag(0));
            let _never_fails = self.put(header.as_bytes(), nothing, mem, out);
        } else if kind == RtrKinds::READ {
            let stag = self.tx.fresh_stag();
            let request = ReadRequest::new((stag, 0), 0, (RTR_STAG, 0));
            let kind = Awaited::Read { stag, size: 0, got: 0 };
            self.put_request(Opcode::READ_REQUEST, request.as_bytes(), None, kind, mem, out);
        } else {
            let header = TaggedHeader::new(Opcode::WRITE, true, RTR_STAG, 0);
            let _never_fails = self.put(header.as_bytes(), nothing, mem, out);
        }
    }

    /// The next segment of the work request whose turn it is.
    fn transmit_work<M: Memory + ?Sized>(&mut self, now: Instant, mem: &M, out: &mut Transmit) {
        let index = self.tx.next;
        let Some(work) = self.tx.queue.get(index) else {
            return;
        };
        match work.op {
            SendOp::Send | SendOp::SendInv(_) | SendOp::Write(_) | SendOp::WriteImm(..) => {
                self.transmit_payload(now, index, mem, out);
            }
            SendOp::Imm(imm) => self.transmit_immediate(index, imm.0, mem, out),
            SendOp::Read(remote) => self.transmit_read(now, index, remote, mem, out),
            SendOp::FetchAdd { remote, add, mask } => {
                let op = AtomicOp::FetchAdd { add, mask };
                self.transmit_atomic(now, index, remote, op, mem, out);
            }
            SendOp::CmpSwap { remote, compare, swap, compare_mask, swap_mask } => {
                let op = AtomicOp::CmpSwap { compare, swap, compare_mask, swap_mask };
                self.transmit_atomic(now, index, remote, op, mem, out);
            }
            SendOp::LocalInv(rkey) => match mem.invalidate(self.config.scope, rkey) {
                Ok(()) => {
                    self.finish_work(index, Stage::Done(WcStatus::SUCCESS));
                    self.reap();
                }
                Err(_) => self.fail_local(now, index, WcStatus::LOC_PROT_ERR),
            },
            // `post_send` refuses it.
            SendOp::SendImm(_) | SendOp::Flush { .. } | SendOp::AtomicWrite(_) => {
                self.fail_local(now, index, WcStatus::LOC_QP_OP_ERR);
            }
        }
    }

    /// A work request left the sending part.
    fn finish_work(&mut self, index: usize, stage: Stage) {
        if let Some(work) = self.tx.queue.get_mut(index) {
            work.stage = stage;
        }
        self.tx.next = index + 1;
        self.tx.current = None;
        self.tx.response_turn = true;
    }

    /// One segment of a SEND or WRITE, or the Immediate behind a WRITE with immediate.
    fn transmit_payload<M: Memory + ?Sized>(
        &mut self,
        now: Instant,
        index: usize,
        mem: &M,
        out: &mut Transmit,
    ) {
        let solicited = |flags: SendFlags| flags.contains(SendFlags::SOLICITED);
        let (tagged_room, untagged_room) =
            (self.room(size_of::<TaggedHeader>()), self.room(size_of::<UntaggedHeader>()));
        let work = &mut self.tx.queue[index];
        let left = work.len - work.sent;
        if let (SendOp::WriteImm(_, imm), 0, Stage::Sending) = (work.op, left, work.stage) {
            let imm = crate::verbs::Imm::from_u32(imm);
            return self.transmit_immediate(index, imm.0, mem, out);
        }
        let first = work.stage == Stage::Queued;
        let (tagged, untagged);
        let (header, len) = match work.op {
            SendOp::Write(remote) | SendOp::WriteImm(remote, _) => {
                let len = left.min(tagged_room as u32);
                let to = remote.addr.wrapping_add(u64::from(work.sent));
                tagged = TaggedHeader::new(Opcode::WRITE, len == left, remote.rkey.into(), to);
                (tagged.as_bytes(), len)
            }
            op => {
                let len = left.min(untagged_room as u32);
                let (opcode, stag) = match (op, solicited(work.flags)) {
                    (SendOp::SendInv(rkey), false) => (Opcode::SEND_INV, rkey.into()),
                    (SendOp::SendInv(rkey), true) => (Opcode::SEND_SE_INV, rkey.into()),
                    (_, false) => (Opcode::SEND, Stag(0)),
                    (_, true) => (Opcode::SEND_SE, Stag(0)),
                };
                if first {
                    work.msn = bump(&mut self.tx.send_msn);
                }
                untagged =
                    UntaggedHeader::new(opcode, len == left, QN_SEND, work.msn, work.sent, stag);
                (untagged.as_bytes(), len)
            }
        };
        let source = match &work.payload {
            Payload::Sges(sges) => Source::Local { sges, offset: work.sent, len },
            Payload::Inline(data) => {
                let from = work.sent as usize;
                Source::Bytes(&data[from..from + len as usize])
            }
        };
        let before = out.len();
        let scope = self.config.scope;
        if self.framer.put(header, source, mem, scope, out).is_err() {
            self.stats.access_errors += 1;
            return self.fail_local(now, index, WcStatus::LOC_PROT_ERR);
        }
        self.tx.queued += (out.len() - before) as u64;
        self.stats.fpdus_sent += 1;
        self.stats.payload_sent += u64::from(len);
        work.sent += len;
        work.stage = Stage::Sending;
        self.tx.current = Some(Message::Work);
        if len == left && !matches!(work.op, SendOp::WriteImm(..)) {
            let end = self.tx.queued;
            self.finish_work(index, Stage::Sent { end });
        }
    }

    /// Immediate data (RFC 7306 §6): alone, or behind its WRITE.
    fn transmit_immediate<M: Memory + ?Sized>(
        &mut self,
        index: usize,
        imm: u64,
        mem: &M,
        out: &mut Transmit,
    ) {
        let work = &mut self.tx.queue[index];
        let opcode = if work.flags.contains(SendFlags::SOLICITED) {
            Opcode::IMMEDIATE_SE
        } else {
            Opcode::IMMEDIATE
        };
        work.msn = bump(&mut self.tx.send_msn);
        let header = UntaggedHeader::new(opcode, true, QN_SEND, work.msn, 0, Stag(0));
        let payload = Immediate { data: imm.into() };
        let _never_fails = self.put(header.as_bytes(), Source::Bytes(payload.as_bytes()), mem, out);
        let end = self.tx.queued;
        self.finish_work(index, Stage::Sent { end });
    }

    fn transmit_read<M: Memory + ?Sized>(
        &mut self,
        now: Instant,
        index: usize,
        remote: RemoteAddr,
        mem: &M,
        out: &mut Transmit,
    ) {
        if !self.sink_is_writable(index, mem) {
            return self.fail_local(now, index, WcStatus::LOC_PROT_ERR);
        }
        let (stag, size) = (self.tx.fresh_stag(), self.tx.queue[index].len);
        let request = ReadRequest::new((stag, 0), size, (remote.rkey.into(), remote.addr));
        let kind = Awaited::Read { stag, size, got: 0 };
        let request = request.as_bytes();
        self.put_request(Opcode::READ_REQUEST, request, Some(index), kind, mem, out);
    }

    fn transmit_atomic<M: Memory + ?Sized>(
        &mut self,
        now: Instant,
        index: usize,
        remote: RemoteAddr,
        op: AtomicOp,
        mem: &M,
        out: &mut Transmit,
    ) {
        if !self.sink_is_writable(index, mem) {
            return self.fail_local(now, index, WcStatus::LOC_PROT_ERR);
        }
        self.tx.request_id = self.tx.request_id.wrapping_add(1);
        let request_id = self.tx.request_id;
        let request = atomic_request(request_id, remote, op);
        let kind = Awaited::Atomic { request_id };
        let request = request.as_bytes();
        self.put_request(Opcode::ATOMIC_REQUEST, request, Some(index), kind, mem, out);
    }

    /// A READ or atomic request, which share a queue (RFC 7306 §5.2): for the work request at
    /// `index`, or for nobody. From now on its answer is awaited.
    fn put_request<M: Memory + ?Sized>(
        &mut self,
        opcode: Opcode,
        request: &[u8],
        index: Option<usize>,
        kind: Awaited,
        mem: &M,
        out: &mut Transmit,
    ) {
        let msn = bump(&mut self.tx.request_msn);
        let header = UntaggedHeader::new(opcode, true, QN_READ_REQUEST, msn, 0, Stag(0));
        let seq = index.map(|index| self.tx.base + index as u64);
        self.tx.outstanding.push_back(Outstanding { seq, kind });
        let _never_fails = self.put(header.as_bytes(), Source::Bytes(request), mem, out);
        if let Some(index) = index {
            self.tx.queue[index].msn = msn;
            self.finish_work(index, Stage::Awaiting);
        }
    }

    fn sink_is_writable<M: Memory + ?Sized>(&mut self, index: usize, mem: &M) -> bool {
        let Payload::Sges(sges) = &self.tx.queue[index].payload else {
            return false;
        };
        let ok = sges
            .iter()
            .all(|sge| mem.check_local(self.config.scope, *sge, Access::LOCAL_WRITE).is_ok());
        if !ok {
            self.stats.access_errors += 1;
        }
        ok
    }

    /// The next segment of the answer that is due.
    fn transmit_response<M: Memory + ?Sized>(&mut self, now: Instant, mem: &M, out: &mut Transmit) {
        match self.tx.inbound.front().copied() {
            Some(Inbound::Read { request, header, sent }) => {
                self.transmit_read_response(now, &request, &header, sent, mem, out);
            }
            Some(Inbound::Atomic { request, header }) => {
                self.transmit_atomic_response(now, &request, &header, mem, out);
            }
            None => self.tx.current = None,
        }
    }

    fn transmit_read_response<M: Memory + ?Sized>(
        &mut self,
        now: Instant,
        request: &ReadRequest,
        request_header: &UntaggedHeader,
        sent: u32,
        mem: &M,
        out: &mut Transmit,
    ) {
        let left = request.size.get() - sent;
        let len = left.min(self.room(size_of::<TaggedHeader>()) as u32);
        let offset = u64::from(sent);
        let sink = Stag(request.sink_stag.get());
        let to = request.sink_to.get().wrapping_add(offset);
        let header = TaggedHeader::new(Opcode::READ_RESPONSE, len == left, sink, to);
        let source = Source::Remote {
            rkey: RKey(request.source_stag.get()),
            addr: request.source_to.get().wrapping_add(offset),
            len,
        };
        if let Err(error) = self.put(header.as_bytes(), source, mem, out) {
            // RFC 5040 §4.8: the request's header tells how far it got.
            self.stats.access_errors += 1;
            let source =
                (Stag(request.source_stag.get()), request.source_to.get().wrapping_add(offset));
            let rest = ReadRequest::new((sink, to), left, source);
            let length = size_of::<UntaggedHeader>() + size_of::<ReadRequest>();
            let terminate = Terminate::new(super::receive::rdmap_code(error))
                .with_segment(length as u16, request_header.as_bytes())
                .with_read_request(&rest);
            return self.terminate(now, terminate);
        }
        self.stats.payload_sent += u64::from(len);
        if len == left {
            self.tx.inbound.pop_front();
            self.tx.current = None;
            self.tx.response_turn = false;
        } else {
            self.tx.current = Some(Message::Response);
            if let Some(Inbound::Read { sent, .. }) = self.tx.inbound.front_mut() {
                *sent += len;
            }
        }
    }

    /// RFC 7306 §5.4 rules 5 and 8: executed in the order they came, when the answer is made.
    fn transmit_atomic_response<M: Memory + ?Sized>(
        &mut self,
        now: Instant,
        request: &AtomicRequest,
        request_header: &UntaggedHeader,
        mem: &M,
        out: &mut Transmit,
    ) {
        let op = atomic_op(request);
        let rkey = RKey(request.stag.get());
        match mem.atomic(self.config.scope, rkey, request.to.get(), op) {
            Ok(original) => {
                let msn = bump(&mut self.tx.response_msn);
                let header = UntaggedHeader::new(
                    Opcode::ATOMIC_RESPONSE,
                    true,
                    QN_ATOMIC_RESPONSE,
                    msn,
                    0,
                    Stag(0),
                );
                let response =
                    AtomicResponse { request_id: request.request_id, original: original.into() };
                let source = Source::Bytes(response.as_bytes());
                let _never_fails = self.put(header.as_bytes(), source, mem, out);
                self.tx.inbound.pop_front();
                self.tx.response_turn = false;
            }
            Err(error) => {
                self.stats.access_errors += 1;
                let length = size_of::<UntaggedHeader>() + size_of::<AtomicRequest>();
                let terminate = Terminate::new(super::receive::rdmap_code(error))
                    .with_segment(length as u16, request_header.as_bytes());
                self.terminate(now, terminate);
            }
        }
    }
}

/// The request for `op` on the word at `remote`.
fn atomic_request(request_id: u32, remote: RemoteAddr, op: AtomicOp) -> AtomicRequest {
    let (code, data, mask, compare, compare_mask) = match op {
        // RFC 7306 §5.2.1: what an addition does not use is 0 and all ones.
        AtomicOp::FetchAdd { add, mask } => (AtomicOpcode::FETCH_ADD, add, mask, 0, u64::MAX),
        AtomicOp::CmpSwap { compare, swap, compare_mask, swap_mask } => {
            (AtomicOpcode::CMP_SWAP, swap, swap_mask, compare, compare_mask)
        }
    };
    AtomicRequest {
        opcode: u32::from(code.0).into(),
        request_id: request_id.into(),
        stag: remote.rkey.0.into(),
        to: remote.addr.into(),
        add_swap_data: data.into(),
        add_swap_mask: mask.into(),
        compare_data: compare.into(),
        compare_mask: compare_mask.into(),
    }
}

/// What a request asks for. [`Connection::handle_stream`] lets only known codes in.
fn atomic_op(request: &AtomicRequest) -> AtomicOp {
    let (data, mask) = (request.add_swap_data.get(), request.add_swap_mask.get());
    if request.operation() == AtomicOpcode::FETCH_ADD {
        AtomicOp::FetchAdd { add: data, mask }
    } else {
        AtomicOp::CmpSwap {
            compare: request.compare_data.get(),
            swap: data,
            compare_mask: request.compare_mask.get(),
            swap_mask: mask,
        }
    }
}

/// Takes the next number of a queue.
fn bump(msn: &mut Msn) -> Msn {
    let taken = *msn;
    *msn = taken.next();
    taken
}
