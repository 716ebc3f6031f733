//! Everything behind one UDP socket, without I/O: many queue pairs, the connection manager on
//! QP 1, and the verdict on each packet's ICRC.
//!
//! ```text
//! input:   handle_datagram(a packet)   handle_timeout
//!          create_qp  share_receives  modify  post_send  post_recv  destroy_qp
//!          connect  listen  accept  reject  disconnect
//! output:  while let Some(destination) = poll_transmit(.., &mut train) { send the train }
//!          poll_completion  to the completion queues
//!          poll_event       to the program
//!          poll_timeout     when handle_timeout wants to be called
//! ```
//!
//! A connection takes its queue pair from RESET or INIT to RTS, with the numbers that both sides
//! told, and at its end to ERR:
//!
//! ```text
//!  connect ── REQ ──►                      Request: accept, the queue pair is in RTS and held:
//!                                          it sends nothing yet, whatever is posted
//!  in RTS            ◄── REP ──
//!  Established       ── RTU ──►            Established, by RTU or by the first packet
//!  disconnect, ERR   ── DREQ ─►            ERR, Disconnected
//!  Disconnected      ◄── DREP ─
//! ```
//!
//! **Whom a packet is for.** Packets are dropped and counted ([`Stats`]) that no queue pair may
//! see: a wrong ICRC, another version or partition, no such queue pair, one of another type or not
//! ready, or one that is connected to somebody else. Over IPv4 a UDP socket does not show all that
//! the ICRC covers (see [`icrc`](crate::wire::roce::icrc)); whether a peer sets DF is learnt from
//! its first good packet, and from then on it is held to that.
//!
//! **Whose turn it is.** MADs go first, then congestion notifications: a connected queue pair whose
//! packets come marked by a router says so to its peer, at most once in 50 µs. Queue pairs that may
//! have something to send stand in a line, and each sends one train; those that have nothing cost
//! nothing, and those that wait for room in a receive buffer stand in a line of their own. Timers
//! stand in a sorted set: [`Port::poll_timeout`] may name a time too early, never one too late.
//!
//! **How much is on the way.** Two bounds. Each RC queue pair has its own [`Window`]. And all that
//! send to one socket of a peer share what its receive buffer takes ([`Port::budget_toward`]): what
//! its token said, or [`Config::stranger`]. What they ask for by READs lands in our own socket, and
//! shares [`Config::window`] ([`Port::own_budget`]). An eighth of each is for READ requests, and for
//! the results of atomics. What we answer to READs of the peer counts in
//! its own budget, not in ours toward it. UC and UD have no bound: nobody says when their packets
//! arrive.
//!
//! Two ports and no socket at all:
//!
//! ```
//! use userdma_proto::{
//!     mem::{NoMemory, PdId},
//!     roce::{self, Port, Train, port::{Accept, Config, Connect, Event, Limits}},
//!     time::Instant,
//!     verbs::{QpType, RecvWr, SendOp, SendWr},
//!     wire::{ids::Qpn, mad::cm::PortSpace},
//! };
//!
//! /// Moves what `from` has to say to `to`.
//! fn carry(now: Instant, from: &mut Port, to: &mut Port) {
//!     let mut train = Train::default();
//!     while let Some(way) = from.poll_transmit(now, &NoMemory, Limits::default(), &mut train) {
//!         for packet in train.octets().chunks(train.segment_len()) {
//!             to.handle_datagram(now, way.from, Some(way.to.ip()), 0, packet, &NoMemory);
//!         }
//!     }
//! }
//!
//! let (now, service) = (Instant::ZERO, PortSpace::TCP.service_id(7174));
//! let ends = ["192.0.2.1:4791", "192.0.2.2:4791"].map(|addr| addr.parse().unwrap());
//! let [mut a, mut b] = [0, 1].map(|i| Port::new(Config::new(ends[i], i as u64)));
//! let [ours, theirs] = [&mut a, &mut b].map(|port| {
//!     port.create_qp(roce::Config::new(QpType::Rc, PdId(0), Qpn(0))).unwrap()
//! });
//!
//! b.listen(service, 16).unwrap();
//! a.connect(now, ours, &Connect::new(ends[1], service)).unwrap();
//! carry(now, &mut a, &mut b);
//! let Some(Event::Request(request)) = b.poll_event() else { panic!("no request") };
//! b.accept(now, &request, theirs, &Accept::default()).unwrap();
//! b.post_recv(theirs, RecvWr::new(7, []), 0).unwrap();
//! carry(now, &mut b, &mut a);
//! assert!(matches!(a.poll_event(), Some(Event::Established { qpn, .. }) if qpn == ours));
//!
//! a.post_send(ours, SendWr::inline(1, SendOp::SendImm(42), b""), 0).unwrap();
//! carry(now, &mut a, &mut b);
//! assert!(matches!(b.poll_event(), Some(Event::Established { qpn, .. }) if qpn == theirs));
//! let (qpn, completion) = b.poll_completion().unwrap();
//! assert_eq!((qpn, completion.wc.id), (theirs, 7));
//! ```

mod budgets;
mod connect;
mod grants;
mod peers;
mod slots;
mod types;

use alloc::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
    vec::Vec,
};
use core::net::{IpAddr, SocketAddr};

pub use types::{
    Accept, Budget, Config, Connect, Destination, Event, IcrcPolicy, Limits, PortError, Request,
    Stats,
};

use self::{
    budgets::{Budgets, Purse},
    grants::Grants,
    peers::{Peers, Verdict, specified},
    slots::{Slot, Slots},
};
use super::{
    Completion, Event as QpEvent, PathMtu, Qp, QpAttr, Reason, Received, Train, Window,
    cm::{self, Cm, ConnId},
    load::{Load, Starved},
    qp::{canonical, same_partition},
    transmit::Source,
};
use crate::{
    mem::{Memory, PdId, Scope},
    srq::Receives,
    time::Instant,
    verbs::{QpState, QpType, RecvWr, SendWr},
    wire::{
        ids::{PKey, Psn, Qpn},
        mad::{GSI_QKEY, GSI_QPN, MAD_LEN},
        roce::{
            Headers, Packet,
            bth::Bth,
            cnp::Cnp,
            deth::Deth,
            opcode::{Opcode, Transport},
        },
    },
};

/// The partition of QP 1.
const DEFAULT_PKEY: PKey = PKey(0xffff);

/// ECN bits of a packet that met congestion.
const CONGESTION: u8 = 0b11;

/// Everything behind one UDP socket. See the [module](self) for the driver's loop.
#[derive(Debug)]
pub struct Port {
    config: Config,
    stats: Stats,
    peers: Peers,
    slots: Slots,
    cm: Cm,
    /// Whose connection it is.
    links: BTreeMap<ConnId, Qpn>,
    events: VecDeque<Event>,
    budgets: Budgets,
    grants: Grants,
    /// Queue pairs that may have something to send.
    ready: VecDeque<Qpn>,
    /// Those that had nothing to send but answers, which were not wanted: empty between calls.
    deferred: Vec<Qpn>,
    /// Those that disconnect, and owe an acknowledgement.
    parting: Vec<Qpn>,
    /// Queue pairs whose peer is to be told of congestion.
    cnps: VecDeque<Qpn>,
    /// Queue pairs that have completions.
    finished: VecDeque<Qpn>,
    /// Octets that packets out of order take, of all queue pairs.
    kept: usize,
    /// When to look after whose timer.
    alarms: BTreeSet<(Instant, Qpn)>,
    /// PSNs of the MADs.
    mad_psn: Psn,
}

impl Port {
    /// A port without queue pairs.
    pub fn new(config: Config) -> Self {
        let mut cm = Cm::new(config.cm.clone());
        let mad_psn = Psn::new(cm.word() as u32);
        Self {
            stats: Stats::default(),
            peers: Peers::new(config.max_peers),
            slots: Slots::new(config.max_qps),
            cm,
            links: BTreeMap::new(),
            events: VecDeque::new(),
            budgets: Budgets::new(config.window, config.stranger.octets),
            grants: Grants::new(config.window),
            ready: VecDeque::new(),
            deferred: Vec::new(),
            parting: Vec::new(),
            cnps: VecDeque::new(),
            finished: VecDeque::new(),
            kept: 0,
            alarms: BTreeSet::new(),
            mad_psn,
            config: Config { local: canonical(config.local), ..config },
        }
    }

    /// The settings.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The route's MTU changed: what is the largest path MTU from now on.
    pub fn set_max_mtu(&mut self, mtu: PathMtu) {
        self.config.max_mtu = mtu;
    }

    /// The counters.
    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    /// The connection manager's counters.
    pub fn cm_stats(&self) -> cm::Stats {
        self.cm.stats()
    }

    /// The queue pairs.
    pub fn qps(&self) -> impl Iterator<Item = &Qp> {
        self.slots.iter().map(|slot| &slot.qp)
    }

    /// One of them.
    pub fn qp(&self, qpn: Qpn) -> Option<&Qp> {
        self.slots.get(qpn).map(|slot| &slot.qp)
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// Whether there is no queue pair.
    pub fn is_empty(&self) -> bool {
        self.slots.len() == 0
    }

    /// Peers of which something is remembered.
    pub fn peers(&self) -> usize {
        self.peers.len()
    }

    /// Connections of any state, those included that are over but whose IDs are kept.
    pub fn connections(&self) -> usize {
        self.cm.connections()
    }

    /// Makes a queue pair in RESET. Its number is the port's choice, whatever `config` says: 24
    /// bits, neither 0 nor 1, and not given out again soon.
    ///
    /// # Errors
    /// There are too many, or [`Config::dcqcn`](super::Config::dcqcn) is out of range.
    pub fn create_qp(&mut self, config: super::Config) -> Result<Qpn, PortError> {
        config.dcqcn.map_or(Ok(()), |dcqcn| dcqcn.check())?;
        let generation = self.cm.word() as u8;
        let most = self.slots.most();
        self.slots.insert(config, generation).ok_or(PortError::TooManyQps(most))
    }

    /// Forgets a queue pair: its work, and completions that were not polled. A connection is
    /// disconnected, and no more is told of it.
    ///
    /// # Errors
    /// There is none.
    pub fn destroy_qp(&mut self, now: Instant, qpn: Qpn) -> Result<(), PortError> {
        self.give_back(qpn);
        let slot = self.slots.remove(qpn).ok_or(PortError::UnknownQp(qpn))?;
        self.kept -= slot.kept;
        if let Some(at) = slot.alarm {
            self.alarms.remove(&(at, qpn));
        }
        if let Some((_, purse)) = slot.socket {
            self.budgets.leave(purse, qpn);
            self.wake(purse);
        }
        if let Some(conn) = slot.conn {
            self.links.remove(&conn);
            // An answer that waits is the program's still; there is no other reason to fail.
            let _ = self.cm.disconnect(now, conn);
            self.pump(now, None);
        }
        Ok(())
    }

    /// Sets attributes of a queue pair and moves it, as [`Qp::modify`] does: what
    /// [`Port::connect`] and [`Port::accept`] do otherwise. Where `local` was never set it is the
    /// socket's address, if that is one.
    ///
    /// # Errors
    /// There is no such queue pair, or see [`ModifyError`](super::ModifyError); nothing changes then.
    pub fn modify(&mut self, qpn: Qpn, attr: &QpAttr) -> Result<(), PortError> {
        let slot = self.slots.get_mut(qpn).ok_or(PortError::UnknownQp(qpn))?;
        let mut attr = *attr;
        let unset = slot.qp.attributes().local.port() == 0;
        if attr.state == Some(QpState::Rtr)
            && attr.local.is_none()
            && unset
            && specified(self.config.local.ip()).is_some()
        {
            attr.local = Some(self.config.local);
        }
        let changed = slot.qp.modify(&attr);
        // A notification is for the peer whose packets were marked.
        slot.cnp_due &= slot.qp.state() != QpState::Reset;
        self.touch(qpn);
        Ok(changed?)
    }

    /// Sets how much a queue pair may have on the way. A connection sets it when it is
    /// established.
    ///
    /// # Errors
    /// There is no such queue pair.
    pub fn set_window(&mut self, qpn: Qpn, window: Window) -> Result<(), PortError> {
        let slot = self.slots.get_mut(qpn).ok_or(PortError::UnknownQp(qpn))?;
        slot.qp.set_window(window);
        self.touch(qpn);
        Ok(())
    }

    /// The socket that a queue pair is connected to takes so many octets: its budget, for all queue
    /// pairs that are connected there. A connection sets it where the peer's token tells; this is for
    /// what was told otherwise. It is forgotten when the last of them leaves the states RTS and SQD.
    ///
    /// # Errors
    /// There is no such queue pair, or it is not RC in RTS or SQD.
    pub fn set_peer_window(&mut self, qpn: Qpn, octets: u32) -> Result<(), PortError> {
        let slot = self.slots.get(qpn).ok_or(PortError::UnknownQp(qpn))?;
        let (_, purse) = slot.socket.ok_or(PortError::NotConnected(qpn))?;
        self.budgets.set(purse, octets);
        self.wake(purse);
        Ok(())
    }

    /// How much is on the way to the socket `peer`; `None` while no RC queue pair can send there.
    pub fn budget_toward(&self, peer: SocketAddr) -> Option<Budget> {
        self.budgets.toward(canonical(peer))
    }

    /// How much of what was asked for by READs and the like is on the way to our own socket.
    pub fn own_budget(&self) -> Budget {
        self.budgets.own()
    }

    /// Queues a send work request, as [`Qp::post_send`] does.
    ///
    /// # Errors
    /// There is no such queue pair, or see [`PostError`](crate::verbs::PostError).
    pub fn post_send(&mut self, qpn: Qpn, wr: SendWr, tag: u64) -> Result<(), PortError> {
        let slot = self.slots.get_mut(qpn).ok_or(PortError::UnknownQp(qpn))?;
        slot.qp.post_send(wr, tag)?;
        // Of one that is to send anyway a further request changes nothing, unless it has ended already.
        if !slot.ready || !slot.qp.completions.is_empty() {
            self.enlist(qpn, true);
        }
        Ok(())
    }

    /// Queues a receive, as [`Qp::post_recv`] does.
    ///
    /// # Errors
    /// There is no such queue pair, or see [`PostError`](crate::verbs::PostError).
    pub fn post_recv(&mut self, qpn: Qpn, wr: RecvWr, tag: u64) -> Result<(), PortError> {
        let slot = self.slots.get_mut(qpn).ok_or(PortError::UnknownQp(qpn))?;
        slot.qp.post_recv(wr, tag)?;
        if slot.qp.state() == QpState::Err {
            self.touch(qpn);
        }
        Ok(())
    }

    /// Has a queue pair take its receives from a queue that others share, as
    /// [`Qp::share_receives`] does. A connection made afterwards says so to the peer.
    ///
    /// # Errors
    /// There is no such queue pair, or receives are posted to it already.
    pub fn share_receives(&mut self, qpn: Qpn, source: Arc<dyn Receives>) -> Result<(), PortError> {
        let slot = self.slots.get_mut(qpn).ok_or(PortError::UnknownQp(qpn))?;
        Ok(slot.qp.share_receives(source)?)
    }

    /// Takes one packet, from its BTH to its ICRC: `from` whom, `to` which of our addresses where
    /// the socket knows, and the lower two bits of IPv4's TOS or IPv6's traffic class.
    pub fn handle_datagram<M: Memory + ?Sized>(
        &mut self,
        now: Instant,
        from: SocketAddr,
        to: Option<IpAddr>,
        ecn: u8,
        octets: &[u8],
        mem: &M,
    ) {
        self.stats.received += 1;
        self.stats.received_octets += octets.len() as u64;
        let from = canonical(from);
        let to = to.and_then(specified).or_else(|| specified(self.config.local.ip()));
        if !self.passes(from, to, octets) {
            return;
        }
        let Ok(packet) = Packet::parse(octets) else {
            self.stats.malformed += 1;
            return;
        };
        let bth = &packet.headers.bth;
        if bth.tver() != 0 {
            self.stats.bad_version += 1;
        } else if bth.dest_qp() == GSI_QPN {
            self.handle_mad(now, from, to, &packet);
        } else {
            self.handle_packet(
                now,
                &Received { packet: &packet, from, len: octets.len(), ecn },
                mem,
            );
        }
    }

    /// Whether a packet's ICRC lets it in.
    fn passes(&mut self, from: SocketAddr, to: Option<IpAddr>, octets: &[u8]) -> bool {
        let stats = &mut self.stats;
        match self.peers.judge(from, to, self.config.local.port(), octets) {
            Verdict::Good => {}
            Verdict::Learnt => stats.df_learnt += 1,
            Verdict::Relearnt => stats.df_relearnt += 1,
            verdict @ (Verdict::OtherDf | Verdict::Bad | Verdict::Unknown) => {
                match verdict {
                    Verdict::OtherDf => stats.icrc_other_df += 1,
                    Verdict::Unknown => stats.icrc_unknown += 1,
                    _ => stats.icrc_bad += 1,
                }
                let lenient = self.config.icrc == IcrcPolicy::Lenient;
                stats.icrc_lenient += u64::from(lenient);
                return lenient;
            }
        }
        stats.icrc_good += 1;
        true
    }

    fn handle_mad(
        &mut self,
        now: Instant,
        from: SocketAddr,
        to: Option<IpAddr>,
        packet: &Packet<'_>,
    ) {
        let headers = &packet.headers;
        if !same_partition(headers.bth.pkey(), DEFAULT_PKEY) {
            self.stats.bad_pkey += 1;
            return;
        }
        let is_mad = headers.bth.opcode() == Opcode::UD_SEND_ONLY
            && headers.deth.is_some_and(|deth| deth.qkey() == GSI_QKEY)
            && packet.payload.len() == MAD_LEN
            && packet.check_form().is_ok();
        if !is_mad {
            self.stats.bad_mad += 1;
            return;
        }
        self.stats.mads_received += 1;
        self.cm.handle_mad(now, from, packet.payload);
        self.pump(now, to);
    }

    fn handle_packet<M: Memory + ?Sized>(
        &mut self,
        now: Instant,
        received: &Received<'_>,
        mem: &M,
    ) {
        let bth = &received.packet.headers.bth;
        let qpn = bth.dest_qp();
        let Some(slot) = self.slots.get_mut(qpn) else {
            self.stats.unknown_qp += 1;
            return;
        };
        let (kind, attr) = (slot.qp.config().kind, slot.qp.attributes());
        let transport = match kind {
            QpType::Rc => Transport::Rc,
            QpType::Uc => Transport::Uc,
            QpType::Ud => Transport::Ud,
        };
        let is_cnp = bth.opcode() == Opcode::CNP;
        let drop = if matches!(slot.qp.state(), QpState::Reset | QpState::Init) {
            Some(&mut self.stats.not_ready)
        } else if !same_partition(bth.pkey(), attr.pkey) {
            Some(&mut self.stats.bad_pkey)
        } else if !is_cnp && bth.opcode().0 & 0xe0 != transport.bits() {
            Some(&mut self.stats.wrong_type)
        } else if kind != QpType::Ud && received.from.ip() != attr.peer.ip() {
            Some(&mut self.stats.wrong_peer)
        } else {
            None
        };
        if let Some(counter) = drop {
            *counter += 1;
            return;
        }
        self.stats.cnps_received += u64::from(is_cnp);
        let is_marked = received.ecn & 0b11 == CONGESTION && !is_cnp && kind != QpType::Ud;
        if is_marked && slot.notification.on_marked(now) && !slot.cnp_due {
            slot.cnp_due = true;
            self.cnps.push_back(qpn);
        }
        if slot.held && !is_cnp {
            // As good as the RTU.
            self.cm.handle_established(qpn);
            self.pump(now, None);
        }
        let Some(slot) = self.slots.get_mut(qpn) else { return };
        let before = slot.qp.state();
        slot.qp.room = self.config.max_kept_octets.saturating_sub(self.kept);
        slot.qp.handle_packet(now, received, mem);
        let is_request = bth.opcode().info().is_some_and(|info| info.request);
        if is_request && slot.qp.state() == before {
            // What is on the way from here is what it was.
            self.enlist(qpn, true);
        } else {
            self.touch(qpn);
        }
    }

    /// The time that [`Port::poll_timeout`] named has come.
    pub fn handle_timeout(&mut self, now: Instant) {
        self.cm.handle_timeout(now);
        self.pump(now, None);
        for _ in 0..self.alarms.len() {
            let Some(&(_, qpn)) = self.alarms.first().filter(|(at, _)| *at <= now) else { return };
            self.alarms.pop_first();
            let Some(slot) = self.slots.get_mut(qpn) else { continue };
            slot.alarm = None;
            if slot.qp.poll_timeout().is_some_and(|at| at <= now) {
                slot.qp.handle_timeout(now);
            }
            self.touch(qpn);
        }
    }

    /// When [`Port::handle_timeout`] wants to be called.
    pub fn poll_timeout(&self) -> Option<Instant> {
        let alarm = self.alarms.first().map(|&(at, _)| at);
        alarm.into_iter().chain(self.cm.poll_timeout()).min()
    }

    /// Replaces what is in `train` by what may be sent now, and says where it goes. `None`: there
    /// is nothing.
    pub fn poll_transmit<M: Memory + ?Sized>(
        &mut self,
        now: Instant,
        mem: &M,
        limits: Limits,
        train: &mut Train,
    ) -> Option<Destination> {
        let first = self.transmit_last_acks(now, mem, limits, train);
        let first = first.or_else(|| self.transmit_mad(mem, train));
        let first = first.or_else(|| self.transmit_cnp(now, mem, train));
        let sent = first.or_else(|| {
            // Each has its turn at most once: who has nothing leaves the line.
            while let Some(qpn) = self.ready.pop_front() {
                if let Some(destination) = self.transmit_qp(now, qpn, mem, limits, train) {
                    return Some(destination);
                }
                if !limits.answers {
                    self.deferred.push(qpn);
                }
            }
            // With answers they have their turn again.
            while let Some(qpn) = self.deferred.pop() {
                if self.slots.get(qpn).is_some_and(|slot| slot.qp.has_answers()) {
                    self.enlist(qpn, true);
                }
            }
            None
        })?;
        self.stats.trains_sent += 1;
        self.stats.packets_sent += train.packets() as u64;
        self.stats.sent_octets += train.len() as u64;
        Some(sent)
    }

    /// The acknowledgements of a queue pair that disconnects.
    fn transmit_last_acks<M: Memory + ?Sized>(
        &mut self,
        now: Instant,
        mem: &M,
        limits: Limits,
        train: &mut Train,
    ) -> Option<Destination> {
        while let Some(qpn) = self.parting.pop() {
            let limits = Limits { answers: true, ..limits };
            if let Some(destination) = self.transmit_qp(now, qpn, mem, limits, train) {
                return Some(destination);
            }
        }
        None
    }

    /// The next MAD, as a train of one packet.
    fn transmit_mad<M: Memory + ?Sized>(
        &mut self,
        mem: &M,
        train: &mut Train,
    ) -> Option<Destination> {
        if !self.cm.has_mads() {
            return None;
        }
        let mut mad = [0; MAD_LEN];
        while let Some(to) = self.cm.poll_mad(&mut mad) {
            let to = canonical(to);
            let Some(from) = self.local_toward(to.ip()) else {
                self.stats.unroutable += 1;
                continue;
            };
            // As Linux sends it.
            let psn = self.mad_psn;
            self.mad_psn = psn.next();
            let bth = Bth::new(Opcode::UD_SEND_ONLY, DEFAULT_PKEY, GSI_QPN, psn)
                .with_migreq(false)
                .with_ack_req(true);
            let mut headers = Headers::new(bth);
            headers.deth = Some(Deth::new(GSI_QKEY, GSI_QPN));
            let scope = Scope { pd: PdId(0), qpn: GSI_QPN };
            train.clear();
            if train.push((&from, &to), &mut headers, Source::Bytes(&mad), mem, scope).is_ok() {
                return Some(Destination { to, from, tos: 0, scope });
            }
        }
        None
    }

    /// The next congestion notification (IBTA vol. 1, annex A17.9.1).
    fn transmit_cnp<M: Memory + ?Sized>(
        &mut self,
        now: Instant,
        mem: &M,
        train: &mut Train,
    ) -> Option<Destination> {
        while let Some(qpn) = self.cnps.pop_front() {
            let Some(slot) = self.slots.get_mut(qpn) else { continue };
            if !core::mem::take(&mut slot.cnp_due) {
                continue;
            }
            let (attr, scope) = (slot.qp.attributes(), slot.qp.config().scope);
            if matches!(slot.qp.state(), QpState::Reset | QpState::Init) {
                continue;
            }
            let cnp = Cnp::new(attr.pkey, attr.dest_qp);
            let (mut headers, ends) = (Headers::new(cnp.bth), (attr.local, attr.peer));
            train.clear();
            if train
                .push((&ends.0, &ends.1), &mut headers, Source::Bytes(&cnp.reserved), mem, scope)
                .is_ok()
            {
                self.stats.cnps_sent += 1;
                slot.notification.on_sent(now);
                let tos = slot.traffic_class & !0b11;
                return Some(Destination { to: attr.peer, from: attr.local, tos, scope });
            }
        }
        None
    }

    fn transmit_qp<M: Memory + ?Sized>(
        &mut self,
        now: Instant,
        qpn: Qpn,
        mem: &M,
        limits: Limits,
        train: &mut Train,
    ) -> Option<Destination> {
        let slot = self.slots.get_mut(qpn)?;
        slot.ready = false;
        if slot.held {
            return None;
        }
        slot.qp.share = slot.socket.and_then(|(_, purse)| self.budgets.share(purse, qpn));
        slot.qp.config.max_train = slot.max_train.min(limits.max_packets).max(1);
        slot.qp.answers_wait = !limits.answers;
        let some = slot.qp.poll_transmit(now, mem, limits.max_octets, train);
        slot.qp.config.max_train = slot.max_train;
        let ecn = if train.ecn_capable() { 0b10 } else { 0 };
        let (tos, scope) = (slot.traffic_class & !0b11 | ecn, slot.qp.config().scope);
        let ends = train.local().zip(train.peer());
        let starved = slot.qp.tx.starved;
        self.balance(qpn);
        debug_assert!(self.keeps_its_share(qpn), "{:?}", self.slots.get(qpn));
        self.stand_in_line(qpn, starved);
        // With requests alone wanted, who has sent its last is done.
        let more = some && (limits.answers || self.has_requests(qpn));
        if some && !more {
            self.deferred.push(qpn);
        }
        self.enlist(qpn, more);
        let (from, to) = ends.filter(|_| some)?;
        Some(Destination { to, from, tos, scope })
    }

    fn has_requests(&self, qpn: Qpn) -> bool {
        self.slots.get(qpn).is_some_and(|slot| slot.qp.has_requests())
    }

    /// Whether a queue pair that has just sent has no more on the way than it was allowed.
    fn keeps_its_share(&self, qpn: Qpn) -> bool {
        let Some(slot) = self.slots.get(qpn) else { return true };
        slot.qp.share.is_none_or(|share| share.is_kept(slot.qp.load()))
    }

    /// The next finished work request, and whose it is.
    pub fn poll_completion(&mut self) -> Option<(Qpn, Completion)> {
        while let Some(&qpn) = self.finished.front() {
            if let Some(slot) = self.slots.get_mut(qpn) {
                if let Some(completion) = slot.qp.poll_completion() {
                    return Some((qpn, completion));
                }
                slot.finished = false;
            }
            self.finished.pop_front();
        }
        None
    }

    /// Whether there is nothing to send, to complete and to tell: as long as nothing is put in and no
    /// timer is due.
    pub fn is_quiet(&self) -> bool {
        self.ready.is_empty()
            && self.deferred.is_empty()
            && self.parting.is_empty()
            && self.cnps.is_empty()
            && self.finished.is_empty()
            && self.events.is_empty()
            && !self.cm.has_mads()
    }

    /// Whether [`Port::poll_completion`] may have something.
    pub fn has_completions(&self) -> bool {
        !self.finished.is_empty()
    }

    /// Octets that packets out of order take now: at most [`Config::max_kept_octets`].
    pub fn kept_octets(&self) -> usize {
        self.kept
    }

    /// The next thing the program has to know.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// Something happened to a queue pair: it may have something to send, to tell, to wait for.
    fn touch(&mut self, qpn: Qpn) {
        self.balance(qpn);
        self.enlist(qpn, true);
    }

    /// What a queue pair has on the way may have changed, or to whom.
    fn balance(&mut self, qpn: Qpn) {
        let Some(slot) = self.slots.get_mut(qpn) else { return };
        let can_send = matches!(slot.qp.state(), QpState::Rts | QpState::Sqd);
        let socket =
            (can_send && slot.qp.config().kind == QpType::Rc).then(|| slot.qp.attributes().peer);
        let (load, before) = (slot.qp.load(), slot.load);
        let known = slot.socket.map(|(socket, _)| socket);
        slot.load = load;
        if known == socket {
            if let Some((_, purse)) = slot.socket.filter(|_| load != before) {
                self.budgets.hold(purse, qpn, before, load);
                self.wake(purse);
            }
            return;
        }
        slot.waits = false;
        if let Some((_, old)) = slot.socket.take() {
            self.budgets.leave(old, qpn);
            self.wake(old);
        }
        if let Some(new) = socket {
            let purse = self.budgets.join(new);
            self.budgets.hold(purse, qpn, Load::default(), load);
            if let Some(slot) = self.slots.get_mut(qpn) {
                slot.socket = Some((new, purse));
            }
        }
    }

    /// A queue pair had its turn: it waits for room, or leaves the line.
    fn stand_in_line(&mut self, qpn: Qpn, starved: Option<Starved>) {
        let Some(slot) = self.slots.get_mut(qpn) else { return };
        // One that went to the error state has left already.
        if let Some((_, purse)) = slot.socket
            && (starved.is_some() || slot.waits)
        {
            slot.waits = starved.is_some();
            self.budgets.wait(purse, qpn, starved);
            self.wake(purse);
        }
    }

    /// There may be room again: whose turn it is sends.
    fn wake(&mut self, purse: Purse) {
        for qpn in self.budgets.next(purse) {
            let Some(slot) = self.slots.get_mut(qpn) else { continue };
            if !slot.ready {
                slot.ready = true;
                self.ready.push_back(qpn);
            }
        }
    }

    /// Puts a queue pair into the lists of those that have something.
    fn enlist(&mut self, qpn: Qpn, may_send: bool) {
        let Some(slot) = self.slots.get_mut(qpn) else { return };
        let kept = slot.qp.kept_octets();
        self.kept = self.kept - slot.kept + kept;
        slot.kept = kept;
        if may_send && !slot.held && !slot.ready {
            slot.ready = true;
            self.ready.push_back(qpn);
        }
        if !slot.finished && !slot.qp.completions.is_empty() {
            slot.finished = true;
            self.finished.push_back(qpn);
        }
        while let Some(event) = slot.qp.poll_event() {
            self.events.push_back(match event {
                QpEvent::Established => Event::FirstPacket { qpn },
                QpEvent::Drained => Event::Drained { qpn },
                // Who asked knows; and of the end of a connection there is an event.
                QpEvent::Error(Reason::Asked) => continue,
                QpEvent::Error(reason) => Event::QpError { qpn, reason },
            });
        }
        // An alarm that rings too early costs less than to move it with every packet.
        if let Some(at) = slot.qp.poll_timeout()
            && !slot.held
            && slot.alarm.is_none_or(|alarm| at < alarm)
        {
            if let Some(old) = slot.alarm.replace(at) {
                self.alarms.remove(&(old, qpn));
            }
            self.alarms.insert((at, qpn));
        }
    }

    /// Our own socket, as the peer at `ip` sees it.
    fn local_toward(&self, ip: IpAddr) -> Option<SocketAddr> {
        let bound = specified(self.config.local.ip());
        let local = bound.or_else(|| self.peers.local(ip.to_canonical()))?;
        let same_family = local.is_ipv4() == ip.to_canonical().is_ipv4();
        same_family.then(|| SocketAddr::new(local, self.config.local.port()))
    }
}
