//! Receiving: what an arriving DDP segment does, and which Terminate answers a bad one.

use zerocopy::FromBytes;

use super::{
    CloseReason, Completion, Connection, RtrKinds, Shutdown,
    connection::Phase,
    send::{Awaited, Inbound, Outstanding, RTR_STAG, Stage, pieces},
};
use crate::{
    mem::{AccessError, Memory, Scope},
    srq::ReceiveQueue,
    time::Instant,
    verbs::{Access, Imm, Payload, Sge, Wc, WcOpcode, WcStatus},
    wire::{
        ids::{Msn, RKey},
        iwarp::{
            ddp::{
                QN_ATOMIC_RESPONSE, QN_READ_REQUEST, QN_SEND, QN_TERMINATE, Segment, TaggedHeader,
                UntaggedHeader,
            },
            rdmap::{AtomicOpcode, AtomicRequest, AtomicResponse, Immediate, Opcode, ReadRequest},
            terminate::{TermCode, TermLayer, Terminate},
        },
    },
};

/// The receiving half.
#[derive(Debug)]
pub(super) struct Receiver {
    pub(super) receives: ReceiveQueue,
    /// Next number expected on each untagged queue (RFC 5041 §5.3: delivered in order; TCP keeps
    /// the order, so anything else is an error).
    send_msn: Msn,
    request_msn: Msn,
    response_msn: Msn,
    /// The SEND whose segments are arriving: its opcode and the octets placed so far.
    message: Option<(Opcode, u32)>,
    /// Whether an FPDU has come.
    started: bool,
}

impl Default for Receiver {
    fn default() -> Self {
        Self {
            receives: ReceiveQueue::own(),
            send_msn: Msn::FIRST,
            request_msn: Msn::FIRST,
            response_msn: Msn::FIRST,
            message: None,
            started: false,
        }
    }
}

impl Receiver {
    /// Whether a SEND is half placed.
    pub(super) fn in_message(&self) -> bool {
        self.message.is_some()
    }
}

/// Why a segment is not taken.
#[derive(Debug)]
enum Refusal {
    /// The peer is told this; the octets of its READ request are copied if there are any.
    Code(TermCode),
    /// The same, for a receive that is at the front: it completes with this status.
    Receive(TermCode, WcStatus),
    /// The same, for the work request with this sequence number.
    Work(TermCode, u64, WcStatus),
}

/// RDMAP's code for a refused access (RFC 5040 Figure 9, RFC 7306 §8.2).
pub(super) const fn rdmap_code(error: AccessError) -> TermCode {
    match error {
        AccessError::InvalidKey => TermCode::RDMAP_INVALID_STAG,
        AccessError::Bounds => TermCode::RDMAP_BOUNDS,
        AccessError::Rights => TermCode::RDMAP_ACCESS,
        AccessError::WrongDomain => TermCode::RDMAP_STAG_NOT_ASSOCIATED,
        AccessError::Wrap => TermCode::RDMAP_TO_WRAP,
        AccessError::Alignment => TermCode::RDMAP_CATASTROPHIC_STREAM,
    }
}

/// DDP's code for a refused tagged segment (RFC 5041 §7.2). Rights are RDMAP's.
const fn ddp_code(error: AccessError) -> TermCode {
    match error {
        AccessError::InvalidKey => TermCode::DDP_TAGGED_INVALID_STAG,
        AccessError::Bounds | AccessError::Alignment => TermCode::DDP_TAGGED_BOUNDS,
        AccessError::WrongDomain => TermCode::DDP_TAGGED_STAG_NOT_ASSOCIATED,
        AccessError::Wrap => TermCode::DDP_TAGGED_TO_WRAP,
        AccessError::Rights => TermCode::RDMAP_ACCESS,
    }
}

impl Connection {
    /// One ULPDU: a DDP segment.
    pub(super) fn handle_ulpdu<M: Memory + ?Sized>(&mut self, now: Instant, ulpdu: &[u8], mem: &M) {
        self.stats.fpdus_received += 1;
        // RFC 5044 §7.1.2 rule 4: an FPDU is received and validated, so a responder may send.
        self.may_send = true;
        self.nudge_at = None;
        let first = !core::mem::replace(&mut self.rx.started, true);
        let Ok(segment) = Segment::parse(ulpdu) else {
            // Too short for a DDP header: nothing of it can be copied back.
            self.stats.protocol_errors += 1;
            return self.terminate(now, Terminate::new(TermCode::DDP_LOCAL_CATASTROPHIC));
        };
        if first && self.take_rtr(&segment) {
            return;
        }
        if let Err(refusal) = self.take_segment(now, &segment, mem) {
            self.refuse(now, &segment, refusal);
        }
    }

    /// Initiator: nothing has come from the peer.
    pub(super) fn awaits_first_fpdu(&self) -> bool {
        self.role == super::Role::Initiator && !self.rx.started
    }

    /// The agreed ready-to-receive indication (RFC 6581 §9.2). It is the provider's: a SEND takes a
    /// sequence number but no receive of the program (§4.4.2), and what the queue pair's access
    /// flags allow the peer does not matter.
    fn take_rtr(&mut self, segment: &Segment<'_>) -> bool {
        let kinds = match &self.established {
            Some(e) if self.role == super::Role::Responder => e.rtr.unwrap_or(RtrKinds::empty()),
            _ => return false,
        };
        if segment.ddp_version() != 1 || segment.rdmap_version() != 1 || !segment.last() {
            return false;
        }
        match segment {
            Segment::Tagged { payload, .. } => {
                kinds.contains(RtrKinds::WRITE)
                    && segment.opcode() == Opcode::WRITE
                    && payload.is_empty()
            }
            Segment::Untagged { header, payload } if header.msn() == Msn::FIRST => {
                match (header.qn.get(), segment.opcode()) {
                    (QN_SEND, Opcode::SEND)
                        if kinds.contains(RtrKinds::SEND) && payload.is_empty() =>
                    {
                        self.rx.send_msn = self.rx.send_msn.next();
                        true
                    }
                    (QN_READ_REQUEST, Opcode::READ_REQUEST) if kinds.contains(RtrKinds::READ) => {
                        match ReadRequest::parse(payload) {
                            Ok(request) if request.size.get() == 0 => {
                                let (request, header) = (*request, **header);
                                self.queue_inbound(Inbound::Read { request, header, sent: 0 });
                                true
                            }
                            _ => false,
                        }
                    }
                    _ => false,
                }
            }
            Segment::Untagged { .. } => false,
        }
    }

    fn take_segment<M: Memory + ?Sized>(
        &mut self,
        now: Instant,
        segment: &Segment<'_>,
        mem: &M,
    ) -> Result<(), Refusal> {
        // RFC 5041 §7.1 and §7.2: DDP's version first, by buffer model; then RDMAP's (RFC 5040 §7.2).
        if segment.ddp_version() != 1 {
            return Err(Refusal::Code(match segment {
                Segment::Tagged { .. } => TermCode::DDP_TAGGED_INVALID_VERSION,
                Segment::Untagged { .. } => TermCode::DDP_UNTAGGED_INVALID_VERSION,
            }));
        }
        if let Segment::Untagged { header, .. } = segment
            && header.qn.get() > QN_ATOMIC_RESPONSE
        {
            return Err(Refusal::Code(TermCode::DDP_UNTAGGED_INVALID_QN));
        }
        if segment.rdmap_version() != 1 {
            return Err(Refusal::Code(TermCode::RDMAP_INVALID_VERSION));
        }
        let unexpected = Err(Refusal::Code(TermCode::RDMAP_UNEXPECTED_OPCODE));
        match *segment {
            Segment::Tagged { header, payload } => match segment.opcode() {
                Opcode::WRITE => self.take_write(header, payload, mem),
                Opcode::READ_RESPONSE => {
                    self.take_read_response(header, payload, segment.last(), mem)?;
                    // What a close waits for gets on.
                    self.still_draining(now, payload.len());
                    Ok(())
                }
                _ => unexpected,
            },
            Segment::Untagged { header, payload } => match (header.qn.get(), segment.opcode()) {
                (
                    QN_SEND,
                    op @ (Opcode::SEND | Opcode::SEND_INV | Opcode::SEND_SE | Opcode::SEND_SE_INV),
                ) => self.take_send(op, header, payload, segment.last(), mem),
                (QN_SEND, Opcode::IMMEDIATE | Opcode::IMMEDIATE_SE) => {
                    self.take_immediate(segment, header, payload)
                }
                (QN_READ_REQUEST, Opcode::READ_REQUEST) => {
                    self.take_read_request(segment, header, payload, mem)
                }
                (QN_READ_REQUEST, Opcode::ATOMIC_REQUEST) => {
                    self.take_atomic_request(segment, header, payload, mem)
                }
                (QN_TERMINATE, Opcode::TERMINATE) => {
                    self.take_terminate(now, header, payload);
                    Ok(())
                }
                (QN_ATOMIC_RESPONSE, Opcode::ATOMIC_RESPONSE) => {
                    self.take_atomic_response(segment, header, payload, mem)?;
                    self.still_draining(now, payload.len());
                    Ok(())
                }
                _ => unexpected,
            },
        }
    }

    /// Answers a bad segment: the work it concerns fails, everything else is flushed, the
    /// Terminate goes out (RFC 5040 §7.1).
    fn refuse(&mut self, now: Instant, segment: &Segment<'_>, refusal: Refusal) {
        let code = match refusal {
            Refusal::Code(code) => code,
            Refusal::Receive(code, status) => {
                self.complete_receive(Wc { status, opcode: WcOpcode::RECV, ..Wc::default() });
                code
            }
            Refusal::Work(code, seq, status) => {
                if let Some(work) = self.tx.work_mut(seq) {
                    work.stage = Stage::Done(status);
                }
                code
            }
        };
        if matches!((code.layer, code.etype), (TermLayer::RDMAP | TermLayer::DDP, 1)) {
            self.stats.access_errors += 1;
        } else {
            self.stats.protocol_errors += 1;
        }
        let mut terminate = Terminate::new(code);
        // RFC 5040 Figure 10: no headers with a local catastrophic error; the READ request's own
        // header with a remote protection error.
        if code.copies_ddp_header() {
            let header = segment.header_bytes();
            let length = header.len() + segment.payload().len();
            terminate = terminate.with_segment(length as u16, header);
            if segment.opcode() == Opcode::READ_REQUEST
                && code.copies_read_request()
                && let Ok(request) = ReadRequest::parse(segment.payload())
            {
                terminate = terminate.with_read_request(request);
            }
        }
        self.terminate(now, terminate);
    }

    /// RDMA WRITE: each segment is placed by itself (RFC 5041 §5.2).
    fn take_write<M: Memory + ?Sized>(
        &mut self,
        header: &TaggedHeader,
        payload: &[u8],
        mem: &M,
    ) -> Result<(), Refusal> {
        // A nudge (`Config::nudge`) is the peer's provider speaking, like a ready-to-receive
        // indication: the program's access flags are not for it.
        if payload.is_empty() && header.stag() == RTR_STAG && header.to.get() == 0 {
            return Ok(());
        }
        if !self.config.remote_access.contains(Access::REMOTE_WRITE) {
            return Err(Refusal::Code(TermCode::RDMAP_ACCESS));
        }
        // RFC 5041 §7.1: only a segment that is not empty is checked.
        if payload.is_empty() {
            return Ok(());
        }
        let (rkey, to) = (RKey(header.stag.get()), header.to.get());
        mem.write_remote(self.config.scope, rkey, to, payload)
            .map_err(|error| Refusal::Code(ddp_code(error)))?;
        self.stats.payload_received += payload.len() as u64;
        Ok(())
    }

    /// A READ response goes to the one-shot sink of the oldest READ, and only what is due is
    /// taken: right key, right offset, not too long, and the last flag where it belongs.
    fn take_read_response<M: Memory + ?Sized>(
        &mut self,
        header: &TaggedHeader,
        payload: &[u8],
        last: bool,
        mem: &M,
    ) -> Result<(), Refusal> {
        let Some(&Outstanding { seq, kind: Awaited::Read { stag, size, got } }) =
            self.tx.outstanding.front()
        else {
            return Err(Refusal::Code(TermCode::RDMAP_UNEXPECTED_OPCODE));
        };
        let blame = |code| match seq {
            Some(seq) => Refusal::Work(code, seq, WcStatus::BAD_RESP_ERR),
            None => Refusal::Code(code),
        };
        // RFC 5041 §5.2: key and offset of an empty segment mean nothing.
        if !payload.is_empty() && header.stag.get() != stag.0 {
            return Err(blame(TermCode::DDP_TAGGED_INVALID_STAG));
        }
        let len = u32::try_from(payload.len()).unwrap_or(u32::MAX);
        if len > size - got || (len > 0 && header.to.get() != u64::from(got)) {
            return Err(blame(TermCode::DDP_TAGGED_BOUNDS));
        }
        if last != (len == size - got) {
            return Err(blame(TermCode::RDMAP_OPERATION_UNSPECIFIED));
        }
        if let Some(seq) = seq
            && len > 0
            && self.place_answer(seq, got, payload, mem).is_err()
        {
            let code = TermCode::RDMAP_LOCAL_CATASTROPHIC;
            return Err(Refusal::Work(code, seq, WcStatus::LOC_PROT_ERR));
        }
        self.stats.payload_received += u64::from(len);
        if !last {
            if let Some(entry) = self.tx.outstanding.front_mut() {
                entry.kind = Awaited::Read { stag, size, got: got + len };
            }
            return Ok(());
        }
        self.tx.outstanding.pop_front();
        self.answered(seq);
        Ok(())
    }

    /// Places an answer's octets into the pieces of its work request.
    fn place_answer<M: Memory + ?Sized>(
        &mut self,
        seq: u64,
        offset: u32,
        data: &[u8],
        mem: &M,
    ) -> Result<(), AccessError> {
        let scope = self.config.scope;
        let Some(work) = self.tx.work_mut(seq) else {
            return Ok(());
        };
        let Payload::Sges(sges) = &work.payload else {
            return Ok(());
        };
        scatter(sges, offset, data, scope, mem)
    }

    fn answered(&mut self, seq: Option<u64>) {
        if let Some(work) = seq.and_then(|seq| self.tx.work_mut(seq)) {
            work.stage = Stage::Done(WcStatus::SUCCESS);
        }
        self.reap();
    }

    fn take_send<M: Memory + ?Sized>(
        &mut self,
        opcode: Opcode,
        header: &UntaggedHeader,
        payload: &[u8],
        last: bool,
        mem: &M,
    ) -> Result<(), Refusal> {
        check_msn(header, self.rx.send_msn)?;
        let (message, placed) = self.rx.message.unwrap_or((opcode, 0));
        if message != opcode {
            return Err(Refusal::Code(TermCode::RDMAP_UNEXPECTED_OPCODE));
        }
        let Some(receive) = self.rx.receives.current() else {
            return Err(Refusal::Code(TermCode::DDP_UNTAGGED_NO_BUFFER));
        };
        // RFC 5041 §5.2: segments of a message come in order of their offset over TCP.
        if header.mo.get() != placed {
            return Err(Refusal::Code(TermCode::DDP_UNTAGGED_INVALID_MO));
        }
        let len = u32::try_from(payload.len()).unwrap_or(u32::MAX);
        if len > receive.len - placed {
            return Err(Refusal::Receive(TermCode::DDP_UNTAGGED_TOO_LONG, WcStatus::LOC_LEN_ERR));
        }
        if scatter(&receive.wr.sges, placed, payload, self.config.scope, mem).is_err() {
            let code = TermCode::RDMAP_LOCAL_CATASTROPHIC;
            return Err(Refusal::Receive(code, WcStatus::LOC_PROT_ERR));
        }
        self.stats.payload_received += u64::from(len);
        if !last {
            self.rx.message = Some((opcode, placed + len));
            return Ok(());
        }
        let invalidated = if opcode.invalidates() {
            let rkey = RKey(header.invalidate_stag.get());
            // RFC 5040 §5.3, §7.2: the STag must be valid and of this stream, before delivery.
            mem.invalidate(self.config.scope, rkey).map_err(|error| {
                Refusal::Code(match error {
                    AccessError::InvalidKey => TermCode::RDMAP_INVALID_STAG,
                    _ => TermCode::RDMAP_CANNOT_INVALIDATE,
                })
            })?;
            Some(rkey)
        } else {
            None
        };
        self.rx.message = None;
        self.rx.send_msn = self.rx.send_msn.next();
        self.complete_receive(Wc {
            opcode: WcOpcode::RECV,
            byte_len: placed + len,
            invalidated,
            solicited: opcode.solicited(),
            ..Wc::default()
        });
        Ok(())
    }

    /// Immediate data takes a receive, and its octets go to the completion (RFC 7306 §6).
    fn take_immediate(
        &mut self,
        segment: &Segment<'_>,
        header: &UntaggedHeader,
        payload: &[u8],
    ) -> Result<(), Refusal> {
        check_msn(header, self.rx.send_msn)?;
        if self.rx.message.is_some() {
            return Err(Refusal::Code(TermCode::RDMAP_UNEXPECTED_OPCODE));
        }
        if self.rx.receives.current().is_none() {
            return Err(Refusal::Code(TermCode::DDP_UNTAGGED_NO_BUFFER));
        }
        let immediate: &Immediate = whole_message(segment, header, payload)?;
        self.rx.send_msn = self.rx.send_msn.next();
        self.complete_receive(Wc {
            opcode: WcOpcode::RECV_IMM,
            imm: Some(Imm(immediate.data.get())),
            solicited: segment.opcode().solicited(),
            ..Wc::default()
        });
        Ok(())
    }

    /// Completes the receive under way: a message of the peer took it.
    fn complete_receive(&mut self, wc: Wc) {
        if let Some(receive) = self.rx.receives.finish() {
            self.stats.receives += 1;
            let wc = Wc { id: receive.wr.id, qpn: self.config.scope.qpn, ..wc };
            self.completions.push_back(Completion { tag: receive.tag, wc });
        }
    }

    /// Flushes what is this queue pair's alone: what is in a shared queue stays there.
    pub(super) fn flush_receives(&mut self) {
        while let Some(receive) = self.rx.receives.finish() {
            let wc = Wc {
                id: receive.wr.id,
                status: WcStatus::WR_FLUSH_ERR,
                opcode: WcOpcode::RECV,
                qpn: self.config.scope.qpn,
                ..Wc::default()
            };
            self.completions.push_back(Completion { tag: receive.tag, wc });
        }
    }

    /// RFC 5040 §5.2.1, §7.2: the source is checked whole before the first octet is sent.
    fn take_read_request<M: Memory + ?Sized>(
        &mut self,
        segment: &Segment<'_>,
        header: &UntaggedHeader,
        payload: &[u8],
        mem: &M,
    ) -> Result<(), Refusal> {
        let request: &ReadRequest = self.take_request(segment, header, payload)?;
        let size = u64::from(request.size.get());
        if !self.config.remote_access.contains(Access::REMOTE_READ) {
            return Err(Refusal::Code(TermCode::RDMAP_ACCESS));
        }
        if size > 0 {
            let (rkey, addr) = (RKey(request.source_stag.get()), request.source_to.get());
            mem.check_remote(self.config.scope, rkey, addr, size, Access::REMOTE_READ)
                .map_err(|error| Refusal::Code(rdmap_code(error)))?;
        }
        let inbound = Inbound::Read { request: *request, header: *header, sent: 0 };
        self.queue_inbound(inbound);
        Ok(())
    }

    fn take_atomic_request<M: Memory + ?Sized>(
        &mut self,
        segment: &Segment<'_>,
        header: &UntaggedHeader,
        payload: &[u8],
        mem: &M,
    ) -> Result<(), Refusal> {
        let request: &AtomicRequest = self.take_request(segment, header, payload)?;
        if !matches!(request.operation(), AtomicOpcode::FETCH_ADD | AtomicOpcode::CMP_SWAP) {
            return Err(Refusal::Code(TermCode::RDMAP_UNEXPECTED_OPCODE));
        }
        if !self.config.remote_access.contains(Access::REMOTE_ATOMIC) {
            return Err(Refusal::Code(TermCode::RDMAP_ACCESS));
        }
        let (rkey, addr) = (RKey(request.stag.get()), request.to.get());
        mem.check_remote(self.config.scope, rkey, addr, 8, Access::REMOTE_ATOMIC)
            .map_err(|error| Refusal::Code(rdmap_code(error)))?;
        self.queue_inbound(Inbound::Atomic { request: *request, header: *header });
        Ok(())
    }

    /// What READ and atomic requests share: number, room in the queue, one whole segment.
    fn take_request<'a, T>(
        &self,
        segment: &Segment<'a>,
        header: &UntaggedHeader,
        payload: &'a [u8],
    ) -> Result<&'a T, Refusal>
    where
        T: FromBytes + zerocopy::KnownLayout + zerocopy::Immutable + zerocopy::Unaligned,
    {
        check_msn(header, self.rx.request_msn)?;
        // The queue of READ requests is as long as was negotiated (RFC 5040 §8.1 rule 7).
        let ird = self.established.as_ref().map_or(0, |e| e.ird);
        if self.tx.inbound.len() >= usize::from(ird) {
            return Err(Refusal::Code(TermCode::DDP_UNTAGGED_NO_BUFFER));
        }
        whole_message(segment, header, payload)
    }

    fn queue_inbound(&mut self, inbound: Inbound) {
        self.rx.request_msn = self.rx.request_msn.next();
        // After our FIN nothing can be sent: the peer, which has it or will have it, gets no answer.
        // Nor does a request that came when nothing but answers stood between us and that FIN, or
        // a peer that always has some outstanding would keep us from closing.
        let answered = match self.phase {
            Phase::Draining => self.tx.has_work(),
            phase => phase == Phase::Open,
        };
        if answered {
            self.tx.inbound.push_back(inbound);
        }
    }

    fn take_atomic_response<M: Memory + ?Sized>(
        &mut self,
        segment: &Segment<'_>,
        header: &UntaggedHeader,
        payload: &[u8],
        mem: &M,
    ) -> Result<(), Refusal> {
        check_msn(header, self.rx.response_msn)?;
        let Some(&Outstanding { seq: Some(seq), kind: Awaited::Atomic { request_id } }) =
            self.tx.outstanding.front()
        else {
            return Err(Refusal::Code(TermCode::DDP_UNTAGGED_NO_BUFFER));
        };
        let response: &AtomicResponse = whole_message(segment, header, payload)?;
        if response.request_id.get() != request_id {
            let code = TermCode::RDMAP_OPERATION_UNSPECIFIED;
            return Err(Refusal::Work(code, seq, WcStatus::BAD_RESP_ERR));
        }
        self.rx.response_msn = self.rx.response_msn.next();
        // The program sees the old value as a number of its own machine (RFC 7306 §5.1).
        let original = response.original.get().to_ne_bytes();
        if self.place_answer(seq, 0, &original, mem).is_err() {
            let code = TermCode::RDMAP_LOCAL_CATASTROPHIC;
            return Err(Refusal::Work(code, seq, WcStatus::LOC_PROT_ERR));
        }
        self.stats.payload_received += 8;
        self.tx.outstanding.pop_front();
        self.answered(Some(seq));
        Ok(())
    }

    fn take_terminate(&mut self, now: Instant, header: &UntaggedHeader, payload: &[u8]) {
        // Whatever it says, a Terminate is not answered by another one.
        match Terminate::parse(payload) {
            Ok(terminate) if header.msn() == Msn::FIRST => self.handle_terminate(now, terminate),
            Ok(_) | Err(_) => {
                self.stats.protocol_errors += 1;
                self.end(CloseReason::Lost, Shutdown::Close);
            }
        }
    }
}

/// Stores `data` into the pieces of a scatter list, from `offset` of it on.
fn scatter<M: Memory + ?Sized>(
    sges: &[Sge],
    offset: u32,
    mut data: &[u8],
    scope: Scope,
    mem: &M,
) -> Result<(), AccessError> {
    for sge in pieces(sges, offset, data.len() as u32) {
        let (piece, rest) = data.split_at(sge.length as usize);
        mem.write_local(scope, sge.lkey, sge.addr, piece)?;
        data = rest;
    }
    Ok(())
}

fn check_msn(header: &UntaggedHeader, expected: Msn) -> Result<(), Refusal> {
    if header.msn.get() == expected.0 {
        Ok(())
    } else {
        Err(Refusal::Code(TermCode::DDP_UNTAGGED_MSN_RANGE))
    }
}

/// The header of a message that must be one segment of exactly its length.
fn whole_message<'a, T>(
    segment: &Segment<'a>,
    header: &UntaggedHeader,
    payload: &'a [u8],
) -> Result<&'a T, Refusal>
where
    T: FromBytes + zerocopy::KnownLayout + zerocopy::Immutable + zerocopy::Unaligned,
{
    if header.mo.get() != 0 {
        return Err(Refusal::Code(TermCode::DDP_UNTAGGED_INVALID_MO));
    }
    if payload.len() > size_of::<T>() {
        return Err(Refusal::Code(TermCode::DDP_UNTAGGED_TOO_LONG));
    }
    match T::ref_from_bytes(payload) {
        Ok(whole) if segment.last() => Ok(whole),
        // Too short, or more is to come: these messages are never segmented (RFC 5040 §5).
        _ => Err(Refusal::Code(TermCode::RDMAP_OPERATION_UNSPECIFIED)),
    }
}
