//! One iWARP connection under a script: what its peer, its program and the clock do.

use std::time::Duration;

use userdma_proto::{
    iwarp::{Completion, Config, Connection, Event, RtrKinds, Shutdown, Transmit},
    time::Instant,
    verbs::{Access, Imm, QpState, RecvWr, RemoteAddr, SendFlags, SendOp, SendWr, Sge},
    wire::{
        ids::{Msn, Qpn, RKey, Stag},
        iwarp::{
            ddp::{Segment, TaggedHeader, UntaggedHeader},
            fpdu::{self, Deframer, MarkerEncoder},
            mpa::{Enhanced, Start, StartFlags, StartKind},
            rdmap::{AtomicOpcode, AtomicRequest, AtomicResponse, Opcode, ReadRequest},
            terminate::{TermCode, Terminate},
        },
    },
};
use zerocopy::{IntoBytes, network_endian::U32};

use crate::{
    Choices,
    memory::{Books, DOMAIN, KEYS, Recorder, Touch},
};

/// Three octets of settings, then steps until the input ends. A step is one octet, modulo 16, and
/// what it needs:
///
/// | step | what happens |
/// |---|---|
/// | 0 to 3 | the peer sends an FPDU that is nearly right; see [`Script::fpdu`] |
/// | 4 | the peer sends `n` (one octet) octets of the input as they are |
/// | 5 | the peer sends a start-up frame of the right kind |
/// | 6, 7 | the program posts a send |
/// | 8 | the program posts a receive |
/// | 9, 10 | up to `n` (two octets) octets are written to the socket |
/// | 11 | so many milliseconds pass (two octets); a time-out that is due is told |
/// | 12 | the program accepts, rejects or configures anew |
/// | 13 | the peer's FIN |
/// | 14 | the segment size changes (two octets) |
/// | 15 | something rare: close, abort, reset, a key revoked |
///
/// Nothing panics; memory is touched only where the peer may or a posted request says so; requests
/// complete in their turn and once; queues keep their bounds; nothing is sent behind the FIN; and
/// when the program closes, it ends in time.
pub fn iwarp_connection(data: &[u8]) {
    run(data);
}

fn run(data: &[u8]) -> Script<'_> {
    let mut script = Script::new(Choices::new(data));
    while !script.choices.is_empty() {
        script.step();
    }
    script.end();
    script
}

const QPN: Qpn = Qpn(5);

struct Script<'a> {
    choices: Choices<'a>,
    config: Config,
    conn: Connection,
    mem: Recorder,
    now: Instant,
    initiator: bool,

    /// Octets between the peer and us, and octets received that are not used.
    wire: Vec<u8>,
    incoming: Vec<u8>,
    fed: u64,
    peer_fin: bool,
    /// The peer's next sequence numbers by queue, and its markers.
    msns: [u32; 4],
    encoder: Option<MarkerEncoder>,

    transmit: Transmit,
    outgoing: Vec<u8>,
    /// What was sent: first a start-up frame, then FPDUs.
    sent: Vec<u8>,
    sent_start: bool,
    deframer: Deframer,
    fin: bool,
    /// Sinks of our READs, and numbers of our atomics, that the peer has seen.
    sinks: Vec<Stag>,
    atomics: Vec<u32>,

    tag: u64,
    books: Books,
    written_remotely: u64,
    established: bool,
    rejected: bool,
    ended: bool,
}

impl<'a> Script<'a> {
    fn new(mut choices: Choices<'a>) -> Self {
        let config = settings(&mut choices);
        let initiator = choices.any::<u8>() & 1 == 0;
        let now = Instant::ZERO;
        let conn = if initiator {
            Connection::initiator(config.clone(), b"hello", now)
                .expect("the settings are made to be valid")
        } else {
            Connection::responder(config.clone(), now)
        };
        let remote = Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
        let mem = Recorder::new(remote, QPN);
        Self {
            choices,
            config,
            conn,
            mem,
            now,
            initiator,
            wire: Vec::new(),
            incoming: Vec::new(),
            fed: 0,
            peer_fin: false,
            msns: [1; 4],
            encoder: None,
            transmit: Transmit::default(),
            outgoing: Vec::new(),
            sent: Vec::new(),
            sent_start: false,
            deframer: Deframer::new(false, false),
            fin: false,
            sinks: Vec::new(),
            atomics: Vec::new(),
            tag: 0,
            books: Books::default(),
            written_remotely: 0,
            established: false,
            rejected: false,
            ended: false,
        }
    }

    fn step(&mut self) {
        match self.choices.below(16) {
            0..=3 => {
                let fpdu = self.fpdu();
                self.peer_sends(&fpdu);
            }
            4 => {
                let len = self.choices.any::<u8>();
                let octets = self.choices.octets(len.into());
                self.peer_sends(octets);
            }
            5 => {
                let start = self.start_frame();
                self.peer_sends(&start);
            }
            6 | 7 => self.post_send(),
            8 => self.post_recv(),
            9 | 10 => {
                let n = self.choices.any::<u16>();
                self.drain(n.into());
            }
            11 => {
                self.now = self.now + Duration::from_millis(self.choices.any::<u16>().into());
                self.time();
            }
            12 => self.answer(),
            13 => self.eof(),
            14 => self.conn.set_emss(self.choices.any::<u16>().into()),
            _ => self.rare(),
        }
        self.collect();
    }

    // ------------------------------------------------------------------------------- the peer

    /// A DDP segment in an FPDU. One octet: bit 0 tagged, bit 1 not the last, bits 4 to 7 the
    /// opcode; then what the kind of segment needs. Numbers are the expected ones plus an octet
    /// that is mostly 0.
    fn fpdu(&mut self) -> Vec<u8> {
        let what: u8 = self.choices.any();
        let (tagged, last, op) = (what & 1 != 0, what & 2 == 0, Opcode(what >> 4));
        let mut ulpdu = if tagged {
            let stag = self.stag();
            let to = self.choices.address();
            TaggedHeader::new(op, last, stag, to).as_bytes().to_vec()
        } else {
            let qn = self.queue(op);
            let next = self.msns.get_mut(qn as usize);
            let (ahead, mo) = (self.choices.any::<u8>(), self.choices.any::<u8>());
            let msn = next.map_or(1, |next| {
                let msn = next.wrapping_add(ahead.into());
                *next += u32::from(last);
                msn
            });
            let inv = Stag(self.choices.one_of(&KEYS));
            UntaggedHeader::new(op, last, qn, Msn(msn), mo.into(), inv).as_bytes().to_vec()
        };
        ulpdu.extend(self.payload(op));
        let crc = self.conn.established().is_some_and(|e| e.crc);
        let mut plain = Vec::new();
        let start = fpdu::begin(&mut plain);
        plain.extend(ulpdu);
        fpdu::finish(&mut plain, start, crc);
        let Some(encoder) = &mut self.encoder else { return plain };
        let mut marked = Vec::new();
        encoder.push(&plain, &mut marked);
        marked
    }

    /// The operation's own queue, or another one.
    fn queue(&mut self, op: Opcode) -> u32 {
        let own = match op {
            Opcode::READ_REQUEST | Opcode::ATOMIC_REQUEST => 1,
            Opcode::TERMINATE => 2,
            Opcode::ATOMIC_RESPONSE => 3,
            _ => 0,
        };
        own ^ u32::from(self.choices.any::<u8>() / 0x40)
    }

    /// A region's key, or the sink of one of our READs.
    fn stag(&mut self) -> Stag {
        let choice: u8 = self.choices.any();
        match choice {
            0..0x80 => Stag(KEYS[usize::from(choice) % KEYS.len()]),
            _ if self.sinks.is_empty() => Stag(choice.into()),
            // The oldest one is the one that is due.
            0x80..0xf0 => self.sinks.remove(0),
            _ => self.sinks[usize::from(choice) % self.sinks.len()],
        }
    }

    fn payload(&mut self, op: Opcode) -> Vec<u8> {
        let kind: u8 = self.choices.any();
        if kind & 0x80 == 0 {
            match op {
                Opcode::READ_REQUEST => {
                    let (sink, size) = (self.choices.any::<u8>(), self.choices.any::<u16>());
                    let (source, to) = (self.stag(), self.choices.address());
                    let request =
                        ReadRequest::new((Stag(sink.into()), 0), size.into(), (source, to));
                    return request.as_bytes().to_vec();
                }
                Opcode::ATOMIC_REQUEST => {
                    let mut octets = self.choices.octets(AtomicRequest::LEN).to_vec();
                    octets.resize(AtomicRequest::LEN, 0);
                    let mut request = *AtomicRequest::parse(&octets).expect("its length");
                    let op = AtomicOpcode(self.choices.below(3) * 2);
                    request.opcode = U32::new(op.0.into());
                    request.stag = self.stag().0.into();
                    request.to = self.choices.address().into();
                    return request.as_bytes().to_vec();
                }
                Opcode::ATOMIC_RESPONSE => {
                    let id = if self.atomics.is_empty() { 7 } else { self.atomics.remove(0) };
                    let response = AtomicResponse {
                        request_id: id.into(),
                        original: self.choices.any::<u64>().into(),
                    };
                    return response.as_bytes().to_vec();
                }
                Opcode::TERMINATE => {
                    let code = TermCode::ALL[usize::from(kind) % TermCode::ALL.len()];
                    let (len, header) = (self.choices.any(), self.choices.octets(18));
                    let mut out = Vec::new();
                    Terminate::new(code).with_segment(len, header).emit(&mut out);
                    return out;
                }
                _ => {}
            }
        }
        let len: u16 = self.choices.any();
        if kind & 1 == 0 {
            return vec![kind; usize::from(len) % 60_000];
        }
        self.choices.octets(usize::from(len) % 256).to_vec()
    }

    /// A start-up frame of the kind that is awaited: one octet of flags, one of the revision, four
    /// of depths and ready-to-receive flags.
    fn start_frame(&mut self) -> Vec<u8> {
        let kind = if self.initiator { StartKind::Reply } else { StartKind::Request };
        let flags = StartFlags::from_bits_retain(self.choices.any());
        let revision = match self.choices.any::<u8>() {
            0..0xe0 => self.config.mpa.revision,
            other => other & 3,
        };
        let depths: [u8; 4] = core::array::from_fn(|_| self.choices.any());
        let enhanced = (revision >= 2).then(|| Enhanced::from_bytes(depths));
        let mut out = Vec::new();
        Start { kind, flags, revision, enhanced, private_data: b"data" }.emit(&mut out);
        out
    }

    /// Octets go onto the wire; all, or only some of what is there arrives (one octet of choice).
    fn peer_sends(&mut self, octets: &[u8]) {
        if self.peer_fin {
            return;
        }
        self.wire.extend_from_slice(octets);
        let most = match self.choices.any::<u8>() {
            0..0x80 => self.wire.len(),
            choice => usize::from(choice & 0x7f),
        };
        self.arrive(most);
    }

    fn arrive(&mut self, most: usize) {
        let n = most.min(self.wire.len());
        self.fed += n as u64;
        self.incoming.extend(self.wire.drain(..n));
        let used = self.conn.handle_stream(self.now, &self.incoming, &self.mem);
        self.incoming.drain(..used);
        let left = self.incoming.len();
        let need = self.conn.need(&self.incoming);
        assert!(need > left, "{need} octets are needed, and {left} are left over");
        assert!(left < 66_064, "octets that are enough for an FPDU are left over");
    }

    fn eof(&mut self) {
        if !self.peer_fin {
            self.arrive(usize::MAX);
            self.peer_fin = true;
            self.conn.handle_eof(self.now, self.incoming.len());
        }
    }

    // ---------------------------------------------------------------------------- the program

    fn post_send(&mut self) {
        let remote = RemoteAddr::new(self.choices.address(), RKey(self.choices.any::<u8>().into()));
        let kind: u8 = self.choices.any();
        let word = u64::from(kind);
        let op = match kind & 15 {
            0..=2 => SendOp::Send,
            3 => SendOp::SendInv(RKey(9)),
            4 => SendOp::SendImm(4),
            5 | 6 => SendOp::Write(remote),
            7 => SendOp::WriteImm(remote, 7),
            8..=10 => SendOp::Read(remote),
            11 => SendOp::Imm(Imm(word)),
            12 => SendOp::FetchAdd { remote, add: word, mask: word << 32 },
            13 | 14 => SendOp::CmpSwap {
                remote,
                compare: word,
                swap: word,
                compare_mask: u64::MAX,
                swap_mask: word,
            },
            _ => SendOp::LocalInv(RKey(self.choices.one_of(&KEYS))),
        };
        let id = self.tag;
        let wr = match (op, kind & 0x10) {
            (SendOp::Imm(_) | SendOp::LocalInv(_), _) => SendWr::new(id, op, []),
            (SendOp::FetchAdd { .. } | SendOp::CmpSwap { .. }, _) => {
                let sge = self.choices.sge();
                SendWr::new(id, op, [Sge { length: 8, ..sge }])
            }
            (_, 0) => SendWr::new(id, op, self.choices.sges()),
            _ => {
                let len: u8 = self.choices.any();
                SendWr::inline(id, op, self.choices.octets(len.into()))
            }
        };
        let mut wr = if kind & 0x20 == 0 { wr } else { wr.unsignaled() };
        wr.flags.set(SendFlags::FENCE, kind & 0x40 != 0);
        wr.flags.set(SendFlags::SOLICITED, kind & 0x80 != 0);
        let state = self.conn.state();
        match self.conn.post_send(wr.clone(), self.tag) {
            Ok(()) => {
                assert!(matches!(state, QpState::Rts | QpState::Err), "taken in {state:?}");
                self.books.sent(&wr);
                self.tag += 1;
            }
            Err(error) => self.books.refused(error, false, self.config.max_send_wr),
        }
    }

    fn post_recv(&mut self) {
        let wr = RecvWr::new(self.tag, self.choices.sges());
        match self.conn.post_recv(wr.clone(), self.tag) {
            Ok(()) => {
                self.books.received(&wr);
                self.tag += 1;
            }
            Err(error) => self.books.refused(error, true, self.config.max_recv_wr),
        }
    }

    fn answer(&mut self) {
        match self.choices.below(8) {
            0..=4 => drop(self.conn.accept(b"welcome", self.now)),
            // The program knows that it is over: no event tells it.
            5 => self.rejected |= self.conn.reject(b"no", self.now).is_ok(),
            _ => {
                let config = settings(&mut self.choices);
                // The queues keep what they hold.
                let config = Config {
                    max_send_wr: self.config.max_send_wr,
                    max_recv_wr: self.config.max_recv_wr,
                    ..config
                };
                if self.conn.configure(config.clone()).is_ok() {
                    self.config = config;
                }
            }
        }
    }

    fn rare(&mut self) {
        match self.choices.any::<u8>() {
            0..0x40 => self.conn.close(self.now),
            0x40..0x50 => self.conn.abort(self.now),
            0x50..0x60 => self.conn.handle_reset(self.now),
            0x60..0x80 => self.mem.plain.remove(self.choices.one_of(&KEYS)),
            // As if what was given out last had a region in it that is gone by now.
            0x80..0x88 => {
                self.outgoing.clear();
                self.conn.handle_source_revoked(self.now);
            }
            // Whether or not it is due.
            _ => self.conn.handle_timeout(self.now),
        }
    }

    fn time(&mut self) {
        if self.conn.poll_timeout().is_some_and(|at| at <= self.now) {
            self.conn.handle_timeout(self.now);
        }
    }

    // ----------------------------------------------------------------------------- the socket

    /// Up to `most` octets are written. Returns how many were.
    fn drain(&mut self, most: usize) -> usize {
        if self.outgoing.is_empty() {
            let budget = 1 + most;
            self.transmit.clear();
            self.conn.poll_transmit(self.now, &self.mem, budget, &mut self.transmit);
            assert!(self.transmit.len() < budget + 66_064 + 1024, "far above the budget");
            self.collect();
            let scope = self.conn.config().scope;
            if self.transmit.copy_to(&self.mem, scope, &mut self.outgoing).is_err() {
                // The program took the memory away: nothing of it can be written.
                self.outgoing.clear();
                self.conn.handle_source_revoked(self.now);
                self.collect();
                return 0;
            }
            assert_eq!(self.outgoing.len(), self.transmit.len(), "the parts add up");
        }
        if self.ended {
            // The socket is closed: what it has not taken is gone.
            self.outgoing.clear();
        }
        let n = most.min(self.outgoing.len());
        assert!(n == 0 || !self.fin, "{n} octets behind the FIN");
        self.sent.extend(self.outgoing.drain(..n));
        self.peer_sees();
        self.conn.handle_written(self.now, n);
        if self.outgoing.is_empty() {
            self.shutdown();
        }
        self.collect();
        n
    }

    fn shutdown(&mut self) {
        match self.conn.poll_shutdown() {
            Some(Shutdown::Write) => {
                assert!(!self.fin, "two FINs");
                self.fin = true;
            }
            Some(Shutdown::Close | Shutdown::Abort) | None => {}
        }
    }

    /// What was sent is well-formed.
    fn peer_sees(&mut self) {
        if !self.sent_start {
            let Some((_, used)) = Start::parse(&self.sent).expect("a start-up frame") else {
                return;
            };
            self.sent.drain(..used);
            self.sent_start = true;
        }
        let Some(established) = self.conn.established() else { return };
        if self.deframer.position() == 0 {
            self.deframer = Deframer::new(established.markers_out, established.crc);
        }
        let (mut scratch, mut used) = (Vec::new(), 0);
        while let Some(fpdu) =
            self.deframer.next(&self.sent[used..], &mut scratch).expect("good FPDUs")
        {
            let segment = Segment::parse(fpdu.ulpdu).expect("a whole header");
            match segment.opcode() {
                Opcode::READ_REQUEST => {
                    let request = ReadRequest::parse(segment.payload()).expect("whole");
                    self.sinks.push(Stag(request.sink_stag.get()));
                }
                Opcode::ATOMIC_REQUEST => {
                    let request = AtomicRequest::parse(segment.payload()).expect("whole");
                    self.atomics.push(request.request_id.get());
                }
                _ => assert!(segment.opcode().name().is_some(), "{}", segment.opcode()),
            }
            used += fpdu.consumed;
        }
        self.sent.drain(..used);
    }

    // ----------------------------------------------------------------------------- what holds

    /// Takes completions and events, and judges them and the memory that was touched.
    fn collect(&mut self) {
        for (qpn, touch) in self.mem.take() {
            assert_eq!(qpn, QPN);
            self.judge(touch);
        }
        while let Some(Completion { tag, wc }) = self.conn.poll_completion() {
            self.books.complete(tag, &wc, QPN);
        }
        while let Some(event) = self.conn.poll_event() {
            assert!(!self.ended && !self.rejected, "{event:?} behind the end");
            match event {
                Event::Request(_) => assert!(!self.initiator && !self.established),
                Event::Established(established) => {
                    assert!(!core::mem::replace(&mut self.established, true), "twice");
                    assert!(established.ird <= 16_383 && established.ord <= 16_383);
                    self.encoder =
                        established.markers_in.then(|| MarkerEncoder::new(established.crc));
                }
                Event::PeerClosed => assert!(self.peer_fin && self.established),
                Event::StartupFailed(error) => {
                    assert!(!self.established && !error.to_string().is_empty());
                    self.ended = true;
                }
                Event::Closed(_) => self.ended = true,
                _ => {}
            }
        }
    }

    fn judge(&mut self, touch: Touch) {
        // Many segments may have come at once.
        self.books.judge(touch, usize::MAX);
        let Touch::Remote(access, len) = touch else { return };
        if len == 0 {
            return;
        }
        assert!(self.config.remote_access.contains(access), "{access:?} is not granted");
        if access == Access::REMOTE_WRITE {
            self.written_remotely += len;
            assert!(self.written_remotely <= self.fed, "more than came was written");
        }
    }

    /// The program closes; the peer does nothing more at all.
    fn end(&mut self) {
        self.conn.close(self.now);
        self.collect();
        for _ in 0..8 {
            while self.drain(1 << 20) > 0 {}
            let Some(at) = self.conn.poll_timeout() else { break };
            self.now = at.max(self.now);
            self.conn.handle_timeout(self.now);
            self.collect();
        }
        self.drain(1);
        assert!(self.ended != self.rejected, "it does not end: {:?}", self.conn);
        assert_eq!((self.conn.state(), self.conn.poll_timeout()), (QpState::Err, None));
        self.books.check_done();
        self.mem.check_untouched();
        // In the error state work is taken and flushed.
        self.post_recv();
        self.post_send();
        self.collect();
        self.books.check_done();
    }
}

/// Two octets: what the start-up asks for, and what the peer may do; the queues are short.
fn settings(choices: &mut Choices<'_>) -> Config {
    let (mpa, bounds) = (choices.any::<u8>(), choices.any::<u8>());
    let mut config = Config::new(DOMAIN, QPN, u64::from(bounds));
    config.mpa.crc = mpa & 1 != 0;
    config.mpa.markers = mpa & 2 != 0;
    config.mpa.revision = if mpa & 4 == 0 { 2 } else { 1 };
    config.mpa.peer_to_peer = mpa & 0xc == 8;
    config.mpa.rtr = match RtrKinds::from_bits_truncate(mpa >> 4) {
        none if none.is_empty() => RtrKinds::all(),
        some => some,
    };
    let rights = Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
    config.remote_access = Access::from_bits_truncate((!bounds & 0xe).into()) & rights;
    (config.ird, config.ord) = (u16::from(bounds >> 6) * 2, u16::from(bounds >> 4 & 3));
    (config.max_send_wr, config.max_recv_wr) = (6, 6);
    (config.max_sge, config.max_inline) = (2, 64);
    if bounds & 1 != 0 {
        config.nudge = None;
    }
    config
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A seed that stops early would be worth little, and nobody would see it.
    #[test]
    fn the_seeds_get_where_their_names_say() {
        for (name, established, succeeded, written, crc, markers) in [
            ("initiator_sends_and_reads", true, 3, 0, false, false),
            ("responder_serves", true, 2, 24, false, false),
            ("crc_and_markers_both_ways", true, 3, 24, true, true),
            ("peer_to_peer", true, 2, 0, false, false),
            ("revision_1", true, 2, 0, true, false),
            ("no_receive_posted", true, 0, 0, false, false),
            ("write_refused", true, 0, 0, false, false),
            ("peer_terminates", true, 1, 0, false, false),
            ("rejected_by_the_program", false, 0, 0, false, false),
            ("start_up_times_out", false, 0, 0, false, false),
            ("peer_invalidates", true, 1, 24, false, false),
            ("payload_from_a_region", true, 1, 0, false, false),
            ("source_is_gone", true, 0, 0, false, false),
        ] {
            let input = crate::seed("iwarp_connection", name);
            let script = run(&input);
            assert_eq!(script.established, established, "{name}");
            assert_eq!(
                (script.books.succeeded, script.written_remotely),
                (succeeded, written),
                "{name}"
            );
            if let Some(e) = script.conn.established() {
                assert_eq!((e.crc, e.markers_in, e.markers_out), (crc, markers, markers), "{name}");
            }
        }
    }
}
