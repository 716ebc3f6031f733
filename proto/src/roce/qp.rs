//! The queue pair: its states, its inputs and its outputs. Requester and responder are in files of
//! their own.

use alloc::collections::VecDeque;
use core::net::SocketAddr;

use super::{
    Attributes, Completion, Config, Event, MAX_TRAIN, ModifyError, QpAttr, Reason, Received, Stats,
    Train, Window, congestion::ReactionPoint, load::Share, requester::Requester,
    responder::Responder, transmit::Limit,
};
use crate::{
    mem::Memory,
    time::{Instant, sooner},
    verbs::{PostError, QpState, QpType, RecvWr, SendWr},
    wire::{
        ids::PKey,
        roce::opcode::{Operation, Transport},
    },
};

/// A queue pair that is held to a rate gives out at once what it may send in one second by so many.
const PAUSES: u64 = 2000;

/// One queue pair. See the [module](super) for the driver's loop and [`QpState`] for its states.
#[derive(Debug)]
pub struct Qp {
    pub(super) config: Config,
    pub(super) state: QpState,
    pub(super) attr: Attributes,
    /// What was ever set.
    given: QpAttr,
    pub(super) window: Window,
    /// What a port lets it have on the way of what its queue pairs share; `None` without a port.
    pub(super) share: Option<Share>,
    /// Octets that a port has room for, of requests out of order.
    pub(super) room: usize,
    pub(super) stats: Stats,
    /// How fast it may send; `None`: as it can.
    reaction: Option<ReactionPoint>,
    pub(super) tx: Requester,
    pub(super) rx: Responder,
    pub(super) completions: VecDeque<Completion>,
    events: VecDeque<Event>,
    /// Whose turn it is when both an answer and a request are ready.
    answers_turn: bool,
    /// Only requests are to go out.
    pub(super) answers_wait: bool,
    established: bool,
    drained: bool,
}

impl Qp {
    /// A queue pair in the state RESET.
    pub fn new(config: Config) -> Self {
        let dcqcn = config.dcqcn.filter(|_| config.kind != QpType::Ud);
        Self {
            reaction: dcqcn.and_then(|dcqcn| ReactionPoint::new(dcqcn).ok()),
            config,
            state: QpState::Reset,
            attr: Attributes::default(),
            given: QpAttr::default(),
            window: Window::default(),
            share: None,
            room: usize::MAX,
            stats: Stats::default(),
            tx: Requester::default(),
            rx: Responder::default(),
            completions: VecDeque::new(),
            events: VecDeque::new(),
            answers_turn: true,
            answers_wait: false,
            established: false,
            drained: false,
        }
    }

    /// The settings.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The state, as verbs have it.
    pub fn state(&self) -> QpState {
        self.state
    }

    /// The attributes in force.
    pub fn attributes(&self) -> &Attributes {
        &self.attr
    }

    /// The counters.
    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    /// How much may be on the way.
    pub fn window(&self) -> Window {
        self.window
    }

    /// Sets how much may be on the way; it may change at any time. What is on the way already
    /// stays.
    pub fn set_window(&mut self, window: Window) {
        let packets = window.packets.clamp(1, 1 << 22);
        self.window = Window { packets, ..window };
    }

    /// Sets attributes and moves to another state, as `ibv_modify_qp` does. To RESET everything is
    /// dropped without completions; to ERR everything is flushed.
    ///
    /// # Errors
    /// See [`ModifyError`]; nothing changes then.
    pub fn modify(&mut self, attr: &QpAttr) -> Result<(), ModifyError> {
        use QpState::{Err, Init, Reset, Rtr, Rts, Sqd};
        let (from, to) = (self.state, attr.state.unwrap_or(self.state));
        let allowed = match (from, to) {
            (_, Reset | Err) => true,
            (Reset | Init, Init) | (Init, Rtr) | (Rtr | Rts | Sqd, Rts) | (Rts | Sqd, Sqd) => true,
            (Rtr, Rtr) => attr.state.is_none(),
            (Rtr | Rts | Sqd | Err, Init)
            | (Reset | Rts | Sqd | Err, Rtr)
            | (Reset | Init | Err, Rts)
            | (Reset | Init | Rtr | Err, Sqd) => false,
        };
        if !allowed {
            return Result::Err(ModifyError::Transition { from, to });
        }
        self.check_attr(attr, from)?;
        let given = merged(&self.given, attr);
        self.check_given(&given, from, to)?;

        self.given = given;
        self.attr = in_force(&given);
        if from == to {
            return Ok(());
        }
        match to {
            Reset => {
                let (config, window) = (self.config.clone(), self.window);
                let mut receives = core::mem::take(&mut self.rx.receives);
                receives.reset();
                *self = Self { window, ..Self::new(config) };
                self.rx.receives = receives;
            }
            Init => self.state = Init,
            Rtr => {
                self.rx.start(self.attr.rq_psn);
                self.state = Rtr;
            }
            Rts => {
                if from == Rtr {
                    self.tx.start(self.attr.sq_psn);
                }
                self.state = Rts;
            }
            Sqd => {
                self.state = Sqd;
                self.drained = false;
                self.tell_drained();
            }
            Err => self.enter_error(Reason::Asked),
        }
        Ok(())
    }

    fn check_attr(&self, attr: &QpAttr, state: QpState) -> Result<(), ModifyError> {
        let in_range = |attribute, found: Option<u32>, max| match found {
            Some(found) if found > max => Err(ModifyError::Range { attribute, found, max }),
            _ => Ok(()),
        };
        in_range("pkey", attr.pkey.map(|pkey| pkey.0), 0xffff)?;
        in_range("dest_qp", attr.dest_qp.map(|qpn| qpn.0), 0xff_ffff)?;
        in_range("min_rnr_timer", attr.min_rnr_timer.map(u32::from), 31)?;
        in_range("timeout", attr.timeout.map(u32::from), 31)?;
        in_range("retry_cnt", attr.retry_cnt.map(u32::from), 7)?;
        in_range("rnr_retry", attr.rnr_retry.map(u32::from), 7)?;
        let before = |attribute, set: bool, states: &[QpState]| {
            if set && !states.contains(&state) {
                return Err(ModifyError::Late { attribute, state });
            }
            Ok(())
        };
        let receive = [QpState::Reset, QpState::Init];
        before("local", attr.local.is_some(), &receive)?;
        before("peer", attr.peer.is_some(), &receive)?;
        before("dest_qp", attr.dest_qp.is_some(), &receive)?;
        before("path_mtu", attr.path_mtu.is_some(), &receive)?;
        before("rq_psn", attr.rq_psn.is_some(), &receive)?;
        before("max_dest_rd_atomic", attr.max_dest_rd_atomic.is_some(), &receive)?;
        before("sq_psn", attr.sq_psn.is_some(), &[QpState::Reset, QpState::Init, QpState::Rtr])
    }

    /// Whether everything is there that a step needs.
    fn check_given(&self, given: &QpAttr, from: QpState, to: QpState) -> Result<(), ModifyError> {
        if from == to {
            return Ok(());
        }
        let need = |attribute, is_there| {
            if is_there { Ok(()) } else { Err(ModifyError::Missing { attribute, to }) }
        };
        match (to, self.config.kind) {
            (QpState::Init, QpType::Ud) => need("qkey", given.qkey.is_some()),
            (QpState::Rtr, kind) => {
                need("local", given.local.is_some())?;
                need("path_mtu", given.path_mtu.is_some())?;
                if kind == QpType::Ud {
                    return Ok(());
                }
                need("peer", given.peer.is_some())?;
                need("dest_qp", given.dest_qp.is_some())?;
                need("rq_psn", given.rq_psn.is_some())?;
                match (given.local, given.peer) {
                    (Some(local), Some(peer)) if local.is_ipv4() != peer.is_ipv4() => {
                        Err(ModifyError::Family { local, peer })
                    }
                    _ => Ok(()),
                }
            }
            (QpState::Rts, _) => need("sq_psn", given.sq_psn.is_some()),
            (QpState::Init | QpState::Reset | QpState::Sqd | QpState::Err, _) => Ok(()),
        }
    }

    /// Queues a send work request. `tag` comes back in its [`Completion`].
    ///
    /// Taken in RTS and SQD; in ERR it is taken and flushed. A request whose keys or bounds are
    /// wrong is taken, completes with an error and breaks the queue pair.
    ///
    /// # Errors
    /// See [`PostError`]; nothing changes then.
    pub fn post_send(&mut self, wr: SendWr, tag: u64) -> Result<(), PostError> {
        if !matches!(self.state, QpState::Rts | QpState::Sqd | QpState::Err) {
            return Err(PostError::BadState(self.state));
        }
        self.push_send(wr, tag)?;
        if self.state == QpState::Err {
            self.flush_sends();
        }
        Ok(())
    }

    /// Queues a receive. `tag` comes back in its [`Completion`]. Taken from INIT on; in ERR it is
    /// flushed.
    ///
    /// # Errors
    /// See [`PostError`]; nothing changes then.
    pub fn post_recv(&mut self, wr: RecvWr, tag: u64) -> Result<(), PostError> {
        if self.state == QpState::Reset {
            return Err(PostError::BadState(self.state));
        }
        self.push_receive(wr, tag)?;
        if self.state == QpState::Err {
            self.flush_receives();
        }
        Ok(())
    }

    /// Takes a packet whose destination is this queue pair and whose ICRC is good.
    pub fn handle_packet<M: Memory + ?Sized>(
        &mut self,
        now: Instant,
        received: &Received<'_>,
        mem: &M,
    ) {
        self.stats.packets_received += 1;
        self.stats.ce_marked += u64::from(received.ecn & 3 == 3);
        match self.state {
            QpState::Reset | QpState::Init => return,
            QpState::Rtr | QpState::Rts | QpState::Sqd | QpState::Err => {}
        }
        let bth = &received.packet.headers.bth;
        let kind = self.config.kind;
        let transport = match kind {
            QpType::Rc => Transport::Rc,
            QpType::Uc => Transport::Uc,
            QpType::Ud => Transport::Ud,
        };
        let stranger =
            kind != QpType::Ud && received.from.ip().to_canonical() != self.attr.peer.ip();
        let is_cnp = bth.opcode().info().is_some_and(|info| info.operation == Operation::Cnp);
        if stranger
            || !is_cnp && bth.opcode().0 & 0xe0 != transport.bits()
            || bth.tver() != 0
            || !same_partition(bth.pkey(), self.attr.pkey)
        {
            self.stats.malformed += 1;
            return;
        }
        if is_cnp {
            // To tell the peer of congestion is the port's, to be told of it the queue pair's.
            self.stats.cnps_received += 1;
            if let Some(reaction) = &mut self.reaction {
                reaction.on_cnp(now);
            }
            return;
        }
        if self.state == QpState::Err {
            self.repeat_last_words(received);
            return;
        }
        if self.state == QpState::Rtr && !core::mem::replace(&mut self.established, true) {
            self.events.push_back(Event::Established);
        }
        match (kind, bth.opcode().info()) {
            (QpType::Rc, Some(info)) if !info.request => self.handle_response(now, received, mem),
            (QpType::Rc, _) => self.handle_request(now, received, mem),
            (QpType::Uc, Some(info)) => self.handle_uc(received, info, mem),
            (QpType::Ud, Some(_)) => self.handle_ud(received, mem),
            (QpType::Uc | QpType::Ud, None) => self.stats.malformed += 1,
        }
        self.tell_drained();
    }

    /// The time that [`Qp::poll_timeout`] named has come.
    pub fn handle_timeout(&mut self, now: Instant) {
        if let Some(reaction) = &mut self.reaction {
            reaction.handle_timeout(now);
        }
        if matches!(self.state, QpState::Rts | QpState::Sqd) {
            self.expire(now);
        }
    }

    /// The rate in octets per second to which congestion holds it; `None`: it is free.
    pub fn rate(&mut self, now: Instant) -> Option<u64> {
        self.reaction.as_mut().and_then(|reaction| reaction.rate(now))
    }

    /// Whether a packet of `octets` may go by the rate; else its time is kept as a timer.
    pub(super) fn keeps_pace(&mut self, now: Instant, octets: usize) -> bool {
        let Some(reaction) = &mut self.reaction else { return true };
        let may = reaction.may_send(now, octets as u64).is_ok();
        self.stats.paced += u64::from(!may);
        may
    }

    /// Replaces what is in `train` by what may be sent now: about `budget` octets, but at least one
    /// packet. False: there is nothing.
    pub fn poll_transmit<M: Memory + ?Sized>(
        &mut self,
        now: Instant,
        mem: &M,
        budget: usize,
        train: &mut Train,
    ) -> bool {
        train.clear();
        // Of a low rate no more goes at once than makes a short pause: the peer has its timers.
        let at_once = self.rate(now).map_or(u64::MAX, |rate| rate / PAUSES);
        let octets = budget.min(usize::try_from(at_once).unwrap_or(usize::MAX)).max(1);
        let limit = Limit { packets: self.config.max_train.clamp(1, MAX_TRAIN), octets };
        for _ in 0..2 {
            let answers = self.answers_turn;
            self.answers_turn = !answers;
            if answers && self.answers_wait {
                continue;
            }
            if answers {
                self.transmit_answers(now, mem, limit, train);
            } else if matches!(self.state, QpState::Rts | QpState::Sqd) {
                self.transmit_requests(now, mem, limit, train);
                if !train.is_empty() && !self.answers_wait {
                    // What is short enough to be the last of the train rides along: an ACK costs
                    // no send call of its own.
                    self.transmit_answers(now, mem, limit, train);
                }
            }
            if !train.is_empty() {
                break;
            }
        }
        if train.is_empty() {
            // After a pause what the program posts goes first: an ACK can wait for it, and the
            // peer's program need not wait for the ACK.
            self.answers_turn = false;
        }
        train.ecn = self.config.ecn;
        self.stats.packets_sent += train.packets() as u64;
        if let Some(reaction) = self.reaction.as_mut().filter(|_| !train.is_empty()) {
            reaction.on_sent(now, train.len() as u64);
        }
        self.tell_drained();
        !train.is_empty()
    }

    /// Whether there is work whose packets have not all gone out.
    pub(super) fn has_requests(&self) -> bool {
        self.tx.has_unsent()
    }

    /// The PSN of the request whose turn it is.
    #[cfg(feature = "sim")]
    pub(crate) fn expected_psn(&self) -> crate::wire::ids::Psn {
        self.rx.expected
    }

    /// Octets that requests out of order take.
    pub(super) fn kept_octets(&self) -> usize {
        self.rx.kept_octets()
    }

    /// Whether answers to the peer are to be sent.
    pub(super) fn has_answers(&self) -> bool {
        self.rx.has_answers()
    }

    /// Send work that was posted and is not done, whether it was begun or not.
    pub fn unfinished_sends(&self) -> usize {
        self.tx.unfinished()
    }

    /// The next finished work request.
    pub fn poll_completion(&mut self) -> Option<Completion> {
        self.completions.pop_front()
    }

    /// The next thing the program has to know.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// When [`Qp::handle_timeout`] wants to be called.
    pub fn poll_timeout(&self) -> Option<Instant> {
        let pace = self.reaction.as_ref().and_then(ReactionPoint::poll_timeout);
        match self.state {
            QpState::Rts | QpState::Sqd => sooner(self.tx.timeout(), pace),
            // It answers.
            QpState::Rtr => pace,
            QpState::Reset | QpState::Init | QpState::Err => None,
        }
    }

    /// From where to where a connected queue pair sends.
    pub(super) fn ends(&self) -> (SocketAddr, SocketAddr) {
        (self.attr.local, self.attr.peer)
    }

    /// Everything is flushed: sends first, then receives, each in the order of their posts.
    pub(super) fn enter_error(&mut self, reason: Reason) {
        if self.state == QpState::Err {
            return;
        }
        self.state = QpState::Err;
        self.rx.forget_kept();
        if !matches!(reason, Reason::Responder(_)) {
            self.rx.forget_answers();
        }
        self.flush_sends();
        self.flush_receives();
        self.events.push_back(Event::Error(reason));
    }

    fn tell_drained(&mut self) {
        if self.state == QpState::Sqd && !self.drained && self.tx.is_drained() {
            self.drained = true;
            self.events.push_back(Event::Drained);
        }
    }
}

/// IBTA vol. 1, 10.9.3: the same partition, and at least one of both a full member.
pub(super) fn same_partition(a: PKey, b: PKey) -> bool {
    (a.0 ^ b.0) & 0x7fff == 0 && (a.0 | b.0) & 0x8000 != 0
}

/// `old` with what `new` sets.
fn merged(old: &QpAttr, new: &QpAttr) -> QpAttr {
    QpAttr {
        state: None,
        pkey: new.pkey.or(old.pkey),
        qkey: new.qkey.or(old.qkey),
        access: new.access.or(old.access),
        local: new.local.map(canonical).or(old.local),
        peer: new.peer.map(canonical).or(old.peer),
        dest_qp: new.dest_qp.or(old.dest_qp),
        path_mtu: new.path_mtu.or(old.path_mtu),
        rq_psn: new.rq_psn.or(old.rq_psn),
        sq_psn: new.sq_psn.or(old.sq_psn),
        max_rd_atomic: new.max_rd_atomic.or(old.max_rd_atomic),
        max_dest_rd_atomic: new.max_dest_rd_atomic.or(old.max_dest_rd_atomic),
        min_rnr_timer: new.min_rnr_timer.or(old.min_rnr_timer),
        timeout: new.timeout.or(old.timeout),
        retry_cnt: new.retry_cnt.or(old.retry_cnt),
        rnr_retry: new.rnr_retry.or(old.rnr_retry),
        migreq: new.migreq.or(old.migreq),
        out_of_order: new.out_of_order.or(old.out_of_order),
    }
}

/// IPv4 mapped into IPv6 is IPv4 on the wire.
pub(super) fn canonical(addr: SocketAddr) -> SocketAddr {
    match addr {
        SocketAddr::V6(v6) if v6.ip().to_ipv4_mapped().is_some() => {
            SocketAddr::new(addr.ip().to_canonical(), addr.port())
        }
        addr => addr,
    }
}

fn in_force(given: &QpAttr) -> Attributes {
    let default = Attributes::default();
    Attributes {
        pkey: given.pkey.unwrap_or(default.pkey),
        qkey: given.qkey.unwrap_or(default.qkey),
        access: given.access.unwrap_or(default.access),
        local: given.local.unwrap_or(default.local),
        peer: given.peer.unwrap_or(default.peer),
        dest_qp: given.dest_qp.unwrap_or(default.dest_qp),
        path_mtu: given.path_mtu.unwrap_or(default.path_mtu),
        rq_psn: given.rq_psn.unwrap_or(default.rq_psn),
        sq_psn: given.sq_psn.unwrap_or(default.sq_psn),
        max_rd_atomic: given.max_rd_atomic.unwrap_or(default.max_rd_atomic),
        max_dest_rd_atomic: given.max_dest_rd_atomic.unwrap_or(default.max_dest_rd_atomic),
        min_rnr_timer: given.min_rnr_timer.unwrap_or(default.min_rnr_timer),
        timeout: given.timeout.unwrap_or(default.timeout),
        retry_cnt: given.retry_cnt.unwrap_or(default.retry_cnt),
        rnr_retry: given.rnr_retry.unwrap_or(default.rnr_retry),
        migreq: given.migreq.unwrap_or(default.migreq),
        out_of_order: given.out_of_order.unwrap_or(default.out_of_order),
    }
}
