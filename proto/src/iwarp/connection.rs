//! The connection: its state, its inputs and its outputs. Start-up, sending and receiving are in
//! files of their own.

use alloc::{collections::VecDeque, sync::Arc, vec::Vec};

use super::{
    CloseReason, Completion, Config, Established, Event, Role, Shutdown, StartupError, Stats,
    receive::Receiver,
    send::{Framer, Sender, Stage},
};
use crate::{
    mem::Memory,
    srq::{ReceiveQueue, Receives},
    time::Instant,
    verbs::{PostError, QpState, RecvWr, SendWr, Wc, WcStatus},
    wire::iwarp::{
        fpdu::{self, Deframer},
        terminate::{TermCode, Terminate},
    },
};

/// Where a connection is in its life.
///
/// ```text
///  initiator: AwaitReply ───────────────────────────┐
///                                                   ▼
///  responder: AwaitRequest ─► Requested ─accept──► Open ─close/peer's FIN─► Draining ─► FinSent
///                                 │                 │                          │           │
///                               reject      error, Terminate                   │     peer's FIN
///                                 ▼                 ▼                          ▼           ▼
///                              Ending ◄──────── Ending (flushed; bytes leave) ◄┘        Closed
///                                 └──────────────────► Closed
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Phase {
    /// Initiator: the request is on its way or sent, the reply has not come.
    AwaitReply,
    /// Responder: the request has not come.
    AwaitRequest,
    /// Responder: the program has the request and has not answered.
    Requested,
    /// FPDUs flow.
    Open,
    /// No new work: what is posted is carried out, then comes our FIN.
    Draining,
    /// Our FIN is out; the peer's is awaited.
    FinSent,
    /// All is flushed. What is left to say (a reject, a Terminate) is said, then FIN, then the
    /// peer's FIN is awaited so that a reset does not overtake our last words.
    Ending,
    /// Over.
    Closed,
}

/// One iWARP connection. See the [module](super) for the driver's loop.
#[derive(Debug)]
pub struct Connection {
    pub(super) config: Config,
    pub(super) role: Role,
    pub(super) phase: Phase,
    pub(super) stats: Stats,
    /// Start-up frame that waits to be sent.
    pub(super) startup_out: Vec<u8>,
    /// Initiator: something has come.
    pub(super) reply_began: bool,
    /// What the request said, until it is answered.
    pub(super) request: Option<super::startup::Negotiation>,
    pub(super) established: Option<Established>,
    /// FPDUs may leave: an initiator's from the reply on, a responder's from the initiator's first
    /// FPDU on (RFC 5044 §7.1.2 rule 4).
    pub(super) may_send: bool,
    pub(super) emss: usize,
    pub(super) tx: Sender,
    pub(super) rx: Receiver,
    pub(super) deframer: Deframer,
    pub(super) unmarked: Vec<u8>,
    pub(super) framer: Framer,
    /// Our Terminate, until it is sent.
    pub(super) terminate: Option<Terminate>,
    /// Why the connection ends, once that is settled.
    pub(super) reason: Option<CloseReason>,
    pub(super) peer_fin: bool,
    /// Our FIN waits until then, or for the peer's.
    pub(super) fin_at: Option<Instant>,
    pub(super) fin_given: bool,
    pub(super) deadline: Option<Instant>,
    /// When an empty WRITE is due ([`Config::nudge`]).
    pub(super) nudge_at: Option<Instant>,
    pub(super) shutdown: Option<Shutdown>,
    pub(super) events: VecDeque<Event>,
    pub(super) completions: VecDeque<Completion>,
}

/// The segment size assumed until the driver tells: IPv4's least (RFC 9293 §3.7.1).
const DEFAULT_EMSS: usize = 536;

impl Connection {
    /// The side that opened the TCP connection. The request goes out at the next
    /// [`Connection::poll_transmit`]. `private_data`: at most 512 octets, 508 with revision 2.
    pub fn initiator(config: Config, private_data: &[u8], now: Instant) -> Result<Self, PostError> {
        let mut conn = Self::new(config, Role::Initiator, Phase::AwaitReply, now);
        conn.startup_out = conn.request_frame(private_data)?;
        Ok(conn)
    }

    /// The side that accepted the TCP connection and waits for a request.
    pub fn responder(config: Config, now: Instant) -> Self {
        Self::new(config, Role::Responder, Phase::AwaitRequest, now)
    }

    fn new(config: Config, role: Role, phase: Phase, now: Instant) -> Self {
        let deadline = Some(now + config.startup_timeout);
        Self {
            role,
            phase,
            stats: Stats::default(),
            startup_out: Vec::new(),
            reply_began: false,
            request: None,
            established: None,
            may_send: false,
            emss: DEFAULT_EMSS,
            tx: Sender::new(config.seed),
            rx: Receiver::default(),
            deframer: Deframer::new(false, config.mpa.crc),
            unmarked: Vec::new(),
            framer: Framer::default(),
            terminate: None,
            reason: None,
            peer_fin: false,
            fin_at: None,
            fin_given: false,
            deadline,
            nudge_at: None,
            shutdown: None,
            events: VecDeque::new(),
            completions: VecDeque::new(),
            config,
        }
    }

    /// Replaces the settings of a responder that has not answered yet: a listener takes requests
    /// before it knows the program's queue pair. The markers that the peer was to be asked for and
    /// everything else of the start-up follow the new settings.
    ///
    /// Fails with [`PostError::BadState`] once the request is answered.
    pub fn configure(&mut self, config: Config) -> Result<(), PostError> {
        match self.phase {
            Phase::AwaitRequest | Phase::Requested => {
                self.tx = Sender::new(config.seed);
                self.config = config;
                Ok(())
            }
            _ => Err(PostError::BadState(self.state())),
        }
    }

    /// Tells the effective maximum segment size of the TCP connection (`TCP_MAXSEG`): an FPDU
    /// fills at most one segment (RFC 5044 §4.5). It may change at any time.
    pub fn set_emss(&mut self, emss: usize) {
        self.emss = emss;
    }

    /// The state of the queue pair, as verbs have it.
    pub fn state(&self) -> QpState {
        match self.phase {
            Phase::AwaitReply | Phase::AwaitRequest | Phase::Requested => QpState::Init,
            Phase::Open => QpState::Rts,
            Phase::Draining if !self.peer_fin => QpState::Sqd,
            Phase::Draining | Phase::FinSent | Phase::Ending | Phase::Closed => QpState::Err,
        }
    }

    /// The settings.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// What the start-up settled, once it is done.
    pub fn established(&self) -> Option<&Established> {
        self.established.as_ref()
    }

    /// The counters.
    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    /// Queues a send work request. `tag` comes back in its [`Completion`].
    ///
    /// Taken from [`QpState::Rts`] on; in [`QpState::Err`] it is taken and flushed. A request
    /// whose keys or bounds are wrong is taken, completes with an error and breaks the connection.
    pub fn post_send(&mut self, wr: SendWr, tag: u64) -> Result<(), PostError> {
        match self.state() {
            QpState::Rts | QpState::Err => {}
            state => return Err(PostError::BadState(state)),
        }
        self.tx.push(wr, tag, &self.config, self.established.as_ref())?;
        if self.state() == QpState::Err {
            self.tx.flush_last();
            self.reap();
        }
        Ok(())
    }

    /// Takes receives from `source`, which other connections share, instead of a queue of its own:
    /// one with the first segment of each message that needs one. To be called before the peer can
    /// send; [`Connection::post_recv`] is refused from then on. Receives completed as flushed are
    /// those that a message has taken already, the others stay where they are.
    ///
    /// Fails with [`PostError::Invalid`] where receives are posted to the connection itself.
    pub fn share_receives(&mut self, source: Arc<dyn Receives>) -> Result<(), PostError> {
        if !self.rx.receives.is_empty() {
            return Err(PostError::Invalid(
                "receives are posted to the queue pair itself: it cannot share others' any more",
            ));
        }
        self.rx.receives = ReceiveQueue::shared(source);
        Ok(())
    }

    /// Queues a receive. `tag` comes back in its [`Completion`]. Taken in every state; in
    /// [`QpState::Err`] it is flushed.
    pub fn post_recv(&mut self, wr: RecvWr, tag: u64) -> Result<(), PostError> {
        let (max_wr, max_sge) = (self.config.max_recv_wr, self.config.max_sge);
        self.rx.receives.post(wr, tag, max_wr, max_sge)?;
        if self.state() == QpState::Err {
            self.flush_receives();
        }
        Ok(())
    }

    /// Closes gracefully: what is posted is carried out, then comes FIN, then the peer's FIN is
    /// awaited. Before the start-up is done it gives up.
    pub fn close(&mut self, now: Instant) {
        match self.phase {
            Phase::AwaitReply | Phase::AwaitRequest | Phase::Requested => {
                self.fail_startup(StartupError::Aborted, Shutdown::Abort);
            }
            Phase::Open => self.drain(now),
            Phase::Draining | Phase::FinSent | Phase::Ending | Phase::Closed => {}
        }
    }

    /// Moves to the error state at once: everything is flushed, TCP is reset.
    pub fn abort(&mut self, _now: Instant) {
        match self.phase {
            Phase::AwaitReply | Phase::AwaitRequest | Phase::Requested => {
                self.fail_startup(StartupError::Aborted, Shutdown::Abort);
            }
            Phase::Open | Phase::Draining | Phase::FinSent => {
                self.end(CloseReason::Aborted, Shutdown::Abort);
            }
            Phase::Ending => self.finish(Shutdown::Abort),
            Phase::Closed => {}
        }
    }

    /// The local side cannot go on (its completion queue overflowed, say): everything is flushed,
    /// and the peer is told by a Terminate (RFC 5040 §7.1: a local catastrophic error).
    pub fn fail(&mut self, now: Instant) {
        match self.phase {
            Phase::AwaitReply | Phase::AwaitRequest | Phase::Requested => {
                self.fail_startup(StartupError::Aborted, Shutdown::Abort);
            }
            Phase::Open | Phase::Draining | Phase::FinSent => {
                self.terminate(now, Terminate::new(TermCode::RDMAP_LOCAL_CATASTROPHIC));
            }
            Phase::Ending | Phase::Closed => {}
        }
    }

    /// The driver cannot read a region's octets that it was given to send: the program revoked the
    /// key before the completion. That work fails with [`WcStatus::LOC_PROT_ERR`], what was written
    /// before it is done, everything else is flushed, and TCP is reset.
    pub fn handle_source_revoked(&mut self, _now: Instant) {
        match self.phase {
            Phase::Open | Phase::Draining | Phase::FinSent => {
                self.tx.fail_unwritten(WcStatus::LOC_PROT_ERR);
                self.end(CloseReason::SourceRevoked, Shutdown::Abort);
            }
            Phase::Ending => self.finish(Shutdown::Abort),
            Phase::AwaitReply | Phase::AwaitRequest | Phase::Requested | Phase::Closed => {}
        }
    }

    /// Takes octets of the stream, in order. Returns how many were used up; the rest must be
    /// presented again, in front of what follows. An input of 66,064 octets (an FPDU of the
    /// greatest length with its markers) is always used up at least in part.
    pub fn handle_stream<M: Memory + ?Sized>(
        &mut self,
        now: Instant,
        input: &[u8],
        mem: &M,
    ) -> usize {
        let mut used = 0;
        loop {
            let rest = &input[used..];
            match self.phase {
                Phase::AwaitReply | Phase::AwaitRequest => match self.handle_start(now, rest) {
                    0 => return used,
                    n => used += n,
                },
                Phase::Requested if rest.is_empty() => return used,
                // RFC 5044 §7.1.2 rule 3: an initiator sends no FPDU before it has the reply.
                Phase::Requested => {
                    let what = "octets follow the request before it was answered";
                    self.fail_startup(StartupError::Protocol(what), Shutdown::Close);
                }
                Phase::Open | Phase::Draining | Phase::FinSent => {
                    let mut unmarked = core::mem::take(&mut self.unmarked);
                    let step = match self.deframer.next(rest, &mut unmarked) {
                        Ok(Some(fpdu)) => {
                            self.handle_ulpdu(now, fpdu.ulpdu, mem);
                            Some(fpdu.consumed)
                        }
                        Ok(None) => None,
                        Err(error) => {
                            self.handle_bad_fpdu(now, error);
                            Some(0)
                        }
                    };
                    self.unmarked = unmarked;
                    match step {
                        Some(n) => used += n,
                        None => return used,
                    }
                }
                // After an error nothing is delivered any more (RFC 5044 §8, RFC 5041 §7.1).
                Phase::Ending | Phase::Closed => return input.len(),
            }
        }
    }

    /// How many octets, from the front of what [`Connection::handle_stream`] left, it wants to see
    /// before it can go on.
    pub fn need(&self, leftover: &[u8]) -> usize {
        match self.phase {
            Phase::Open | Phase::Draining | Phase::FinSent => self.deframer.need(leftover),
            _ => leftover.len() + 1,
        }
    }

    /// The peer's FIN. `leftover`: octets received that [`Connection::handle_stream`] has not used.
    pub fn handle_eof(&mut self, now: Instant, leftover: usize) {
        if core::mem::replace(&mut self.peer_fin, true) {
            return;
        }
        match self.phase {
            Phase::AwaitReply if !self.reply_began => {
                self.fail_startup(StartupError::ClosedSilently, Shutdown::Close);
            }
            Phase::AwaitReply | Phase::AwaitRequest | Phase::Requested => {
                self.fail_startup(StartupError::Lost, Shutdown::Close);
            }
            Phase::Open | Phase::Draining | Phase::FinSent
                if leftover > 0 || self.rx.in_message() || self.tx.awaits_response() =>
            {
                // A message, or an answer that we wait for, will never be whole.
                self.end(CloseReason::Lost, Shutdown::Close);
            }
            Phase::Open => {
                self.events.push_back(Event::PeerClosed);
                self.flush_unfinishable();
                self.drain(now);
            }
            Phase::Draining => self.flush_unfinishable(),
            Phase::FinSent => self.end_gracefully(),
            // Our last words, if there are any, go out first: a peer that closed its half reads on.
            Phase::Ending => {
                let told = matches!(self.reason, Some(CloseReason::TerminateReceived(_)));
                let said = self.terminate.is_none()
                    && self.startup_out.is_empty()
                    && self.tx.written == self.tx.queued;
                if told || said {
                    self.finish(Shutdown::Close);
                }
            }
            Phase::Closed => {}
        }
    }

    /// The connection broke: a reset, TCP's time-out, a write error.
    pub fn handle_reset(&mut self, _now: Instant) {
        self.peer_fin = true;
        match self.phase {
            // Who closes a socket with octets unread resets it: an old responder that looked at no
            // more of the request than its revision does.
            Phase::AwaitReply if !self.reply_began => {
                self.fail_startup(StartupError::ClosedSilently, Shutdown::Close);
            }
            Phase::AwaitReply | Phase::AwaitRequest | Phase::Requested => {
                self.fail_startup(StartupError::Lost, Shutdown::Close);
            }
            Phase::Open | Phase::Draining | Phase::FinSent => {
                self.end(CloseReason::Lost, Shutdown::Close);
            }
            Phase::Ending => self.finish(Shutdown::Close),
            Phase::Closed => {}
        }
    }

    /// The time that [`Connection::poll_timeout`] named has come.
    pub fn handle_timeout(&mut self, now: Instant) {
        if self.nudge_at.is_some_and(|at| at <= now) {
            self.nudge_at = None;
            self.tx.nudge = matches!(self.phase, Phase::Open | Phase::Draining);
        }
        self.fin_at = self.fin_at.filter(|&at| now < at);
        if self.deadline.is_none_or(|deadline| now < deadline) {
            return;
        }
        self.deadline = None;
        match self.phase {
            Phase::AwaitReply | Phase::AwaitRequest => {
                let limit = self.config.startup_timeout;
                self.fail_startup(StartupError::TimedOut(limit), Shutdown::Abort);
            }
            Phase::Draining | Phase::FinSent => self.end(CloseReason::Lost, Shutdown::Abort),
            Phase::Ending => self.finish(Shutdown::Abort),
            Phase::Requested | Phase::Open | Phase::Closed => {}
        }
    }

    /// What the driver has to do with the socket. Ask when everything that
    /// [`Connection::poll_transmit`] gave is written.
    pub fn poll_shutdown(&mut self) -> Option<Shutdown> {
        if let Some(shutdown) = self.shutdown.take() {
            return Some(shutdown);
        }
        if self.tx.written != self.tx.queued || !self.startup_out.is_empty() {
            return None;
        }
        match self.phase {
            Phase::Draining if self.tx.is_idle() && !self.fin_given => {
                self.fin_given = true;
                if self.peer_fin {
                    self.end_gracefully();
                    return self.shutdown.take();
                }
                self.phase = Phase::FinSent;
                Some(Shutdown::Write)
            }
            Phase::Ending if self.fin_at.is_some() && !self.peer_fin => None,
            Phase::Ending if self.terminate.is_none() && !self.fin_given => {
                self.fin_given = true;
                if self.peer_fin {
                    self.finish(Shutdown::Close);
                    return self.shutdown.take();
                }
                Some(Shutdown::Write)
            }
            _ => None,
        }
    }

    /// The next finished work request.
    pub fn poll_completion(&mut self) -> Option<Completion> {
        self.completions.pop_front()
    }

    /// The next thing the program has to know.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// When [`Connection::handle_timeout`] wants to be called.
    pub fn poll_timeout(&self) -> Option<Instant> {
        [self.deadline, self.nudge_at, self.fin_at].into_iter().flatten().min()
    }

    /// The peer sends nothing more: what needs something of it is flushed.
    fn flush_unfinishable(&mut self) {
        self.flush_receives();
        // A responder that has received no FPDU will never be allowed to send one.
        if self.may_send {
            self.tx.flush_unanswerable();
        } else {
            self.tx.flush_all();
        }
        self.reap();
    }

    /// No new work; FIN follows what is posted.
    fn drain(&mut self, now: Instant) {
        self.phase = Phase::Draining;
        self.deadline = Some(now + self.config.close_timeout);
    }

    /// A close may take as long as the work that was posted before it, if that gets on.
    pub(super) fn still_draining(&mut self, now: Instant, progress: usize) {
        if self.phase == Phase::Draining && progress > 0 {
            self.deadline = Some(now + self.config.close_timeout);
        }
    }

    fn end_gracefully(&mut self) {
        self.end(CloseReason::Graceful, Shutdown::Close);
    }

    /// Ends with nothing more to say: everything is flushed.
    pub(super) fn end(&mut self, reason: CloseReason, shutdown: Shutdown) {
        self.reason = Some(reason);
        self.finish(shutdown);
    }

    /// The last step: the socket is closed, the program is told.
    pub(super) fn finish(&mut self, shutdown: Shutdown) {
        if self.phase == Phase::Closed {
            return;
        }
        self.phase = Phase::Closed;
        self.flush_all();
        (self.deadline, self.nudge_at, self.fin_at) = (None, None, None);
        self.terminate = None;
        self.startup_out.clear();
        self.shutdown = Some(shutdown);
        if let Some(reason) = self.reason.clone() {
            self.events.push_back(Event::Closed(reason));
        }
    }

    /// We found an error: everything is flushed, the Terminate is sent, then FIN.
    pub(super) fn terminate(&mut self, now: Instant, terminate: Terminate) {
        self.flush();
        self.say_last_words(now, terminate);
    }

    fn say_last_words(&mut self, now: Instant, terminate: Terminate) {
        self.reason = Some(CloseReason::TerminateSent(terminate));
        self.terminate = Some(terminate);
        self.phase = Phase::Ending;
        self.deadline = Some(now + self.config.close_timeout);
        // Without a first FPDU of the initiator a responder may not send even this; and behind our
        // FIN nothing can be said.
        if !self.may_send || self.fin_given {
            self.terminate = None;
        }
    }

    /// The peer found an error: the work it blames fails, everything else is flushed.
    pub(super) fn handle_terminate(&mut self, now: Instant, terminate: Terminate) {
        self.tx.blame(&terminate);
        self.flush();
        self.reason = Some(CloseReason::TerminateReceived(terminate));
        self.phase = Phase::Ending;
        self.deadline = Some(now + self.config.close_timeout);
    }

    /// An FPDU that cannot be framed or whose CRC is wrong.
    fn handle_bad_fpdu(&mut self, now: Instant, error: crate::wire::Error) {
        // RFC 5044 §8: codes 2 (CRC) and 3 (markers and lengths disagree).
        let code = match error.problem {
            crate::wire::Problem::Crc { .. } => {
                self.stats.crc_errors += 1;
                TermCode::MPA_CRC
            }
            _ => {
                self.stats.protocol_errors += 1;
                TermCode::MPA_MARKER
            }
        };
        self.terminate(now, Terminate::new(code));
    }

    /// A work request of our own cannot be carried out: it fails, what follows it is flushed.
    pub(super) fn fail_local(&mut self, now: Instant, index: usize, status: WcStatus) {
        // What was handed out before it still reaches the socket, and completes then.
        self.tx.fail_at(index, status);
        self.reap();
        self.flush_receives();
        // RFC 5040 §7.1 case 1: a Terminate goes out instead of the request, without headers.
        self.say_last_words(now, Terminate::new(TermCode::RDMAP_LOCAL_CATASTROPHIC));
    }

    pub(super) fn flush_all(&mut self) {
        self.tx.flush_all();
        self.reap();
        self.flush_receives();
    }

    /// The same, but what is with the driver goes out first, and is over then.
    fn flush(&mut self) {
        self.tx.flush();
        self.reap();
        self.flush_receives();
    }

    /// Moves send work that is done from the front of the queue to the completions, in order.
    pub(super) fn reap(&mut self) {
        while let Some(front) = self.tx.front() {
            let status = match front.stage {
                Stage::Done(status) => status,
                // RFC 5040 §5.5: a SEND or WRITE completes when its source may be reused. The
                // socket has taken its last octet, so it may.
                Stage::Sent { end } if end <= self.tx.written => WcStatus::SUCCESS,
                Stage::Leaving { end, status } if end <= self.tx.written => status,
                Stage::Sent { .. }
                | Stage::Leaving { .. }
                | Stage::Queued
                | Stage::Sending
                | Stage::Awaiting => return,
            };
            let Some(work) = self.tx.pop_front() else {
                return;
            };
            if status.is_ok() && !work.signaled() {
                continue;
            }
            let wc = Wc {
                id: work.id,
                status,
                opcode: work.op.wc_opcode(),
                byte_len: if status.is_ok() { work.len } else { 0 },
                qpn: self.config.scope.qpn,
                vendor_err: if status.is_ok() { 0 } else { self.vendor_err() },
                ..Wc::default()
            };
            self.completions.push_back(Completion { tag: work.tag, wc });
        }
    }

    fn vendor_err(&self) -> u32 {
        self.tx.blamed.map_or(0, u32::from)
    }

    /// The payload that one FPDU carries behind a DDP header of `header` octets, where more is to
    /// follow: whole words, in long segments whole cache lines, so that a message which starts at
    /// a word goes on at a word in every segment. No word is then placed in two halves.
    pub(super) fn room(&self, header: usize) -> usize {
        let room = fpdu::mulpdu(self.emss, self.framer.markers.is_some()) - header;
        if room < 4096 { room & !7 } else { room & !63 }
    }
}
