//! The manager: what the program asks for, the timers, and what comes out. Messages come in in a
//! file of their own.

use alloc::{
    boxed::Box,
    collections::{BTreeMap, BTreeSet, VecDeque},
    vec::Vec,
};
use core::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use super::{
    Accept, Awaited, CmError, Config, ConnId, Connect, Datagrams, Ended, Event, Reject, Resolve,
    Stats, Token, Transport,
    connection::{Conn, State, Terms},
    ids::Ids,
    types::mtu_code,
};
use crate::{
    time::Instant,
    wire::{
        ids::{Gid, PKey, Qpn},
        mad::{
            MAD_LEN, METHOD_SEND,
            cm::{self, Dreq, IpCm, Message, Mra, Path, PortSpace, Reason, Rej, Rep, Req, SidrReq},
        },
    },
};

/// The default partition, full member.
const DEFAULT_PKEY: PKey = PKey(0xffff);

/// The connection manager of one port. See the [module](super) for the driver's loop.
#[derive(Debug)]
pub struct Cm {
    pub(super) config: Config,
    pub(super) ids: Ids,
    pub(super) stats: Stats,
    pub(super) conns: BTreeMap<ConnId, Conn>,
    pub(super) listeners: BTreeMap<u64, Listener>,
    pub(super) index: Index,
    pub(super) outbox: Outbox,
    pub(super) events: VecDeque<Event>,
    last: u64,
}

/// Who waits for requests for a service.
#[derive(Debug)]
pub(super) enum Listener {
    /// A program that accepts or rejects connections.
    Connections {
        /// So many requests may wait for its answer.
        backlog: usize,
        /// Those that do.
        waiting: BTreeSet<ConnId>,
    },
    /// A queue pair that takes datagrams.
    Datagrams(Datagrams),
}

/// Ways to find a connection.
#[derive(Debug, Default)]
pub(super) struct Index {
    /// By our name for it.
    pub(super) comm_id: BTreeMap<u32, ConnId>,
    /// By the peer's address, its name for it, its UDP port. Passive ones until they are gone,
    /// active ones while they live.
    pub(super) remote: BTreeMap<(IpAddr, u32, u16), ConnId>,
    /// By the peer's address, UDP port and queue pair: those that are not over.
    pub(super) remote_qpn: BTreeMap<(IpAddr, u16, Qpn), ConnId>,
    /// By our queue pair: those that wait for RTU.
    pub(super) awaiting_rtu: BTreeMap<Qpn, ConnId>,
    /// Half-open ones, the oldest first.
    pub(super) half_open: BTreeSet<ConnId>,
    /// Those of which only the IDs are left, the first to go first.
    pub(super) over: BTreeSet<(Instant, ConnId)>,
    /// All that wait for a time.
    pub(super) timers: BTreeSet<(Instant, ConnId)>,
}

/// MADs that wait to be sent.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    pub(super) mads: VecDeque<(SocketAddr, [u8; MAD_LEN])>,
    pub(super) most: usize,
    pub(super) lost: u64,
}

impl Outbox {
    pub(super) fn push(&mut self, to: SocketAddr, mad: [u8; MAD_LEN]) {
        if self.mads.len() >= self.most {
            self.mads.pop_front();
            self.lost += 1;
        }
        self.mads.push_back((to, mad));
    }

    /// Sends a message that is not kept.
    pub(super) fn message<'m>(
        &mut self,
        to: SocketAddr,
        tid: u64,
        message: impl Into<Message<'m>>,
    ) -> [u8; MAD_LEN] {
        let mad = mad(tid, message);
        self.push(to, mad);
        mad
    }
}

/// The MAD of a message.
pub(super) fn mad<'m>(tid: u64, message: impl Into<Message<'m>>) -> [u8; MAD_LEN] {
    let mut out = [0; MAD_LEN];
    message.into().emit_mad(tid, METHOD_SEND, &mut out);
    out
}

/// The program's area of REQ or SIDR_REQ, filled: rdma_cm's header if the service has one, private
/// data, and the token if there is room. Also says whether there was.
fn request_data(
    service_id: u64,
    (local, port, peer): (IpAddr, u16, IpAddr),
    private_data: &[u8],
    token: Option<Token>,
    whole: usize,
) -> Result<(Vec<u8>, Option<Token>), CmError> {
    let (local, peer) = (local.to_canonical(), peer.to_canonical());
    let ip = IpCm::new(local, port, peer).ok_or(CmError::IpVersions { local, peer })?;
    let mut area = Vec::new();
    if PortSpace::of_service_id(service_id).is_some() {
        area.extend_from_slice(&ip.to_bytes());
    }
    fits(private_data, whole - area.len())?;
    area.extend_from_slice(private_data);
    let token = token.filter(|token| token.append(&mut area, whole));
    Ok((area, token))
}

fn fits(private_data: &[u8], room: usize) -> Result<(), CmError> {
    match private_data.len() {
        len if len > room => Err(CmError::PrivateData { len, room }),
        _ => Ok(()),
    }
}

impl Cm {
    /// A manager without connections and listeners.
    pub fn new(config: Config) -> Self {
        let outbox = Outbox { most: config.max_queued.max(1), ..Outbox::default() };
        Self {
            ids: Ids::new(config.seed),
            stats: Stats::default(),
            conns: BTreeMap::new(),
            listeners: BTreeMap::new(),
            index: Index::default(),
            outbox,
            events: VecDeque::new(),
            last: 0,
            config,
        }
    }

    /// Asks a peer for a connection. [`Event::Established`], [`Event::Rejected`] or
    /// [`Event::TimedOut`] follows. A peer that names a smaller path MTU is asked once more.
    ///
    /// # Errors
    ///
    /// Private data too long, no path MTU, addresses of two kinds, or too many connections.
    pub fn connect(&mut self, now: Instant, wanted: &Connect<'_>) -> Result<ConnId, CmError> {
        let mtu = mtu_code(wanted.mtu).ok_or(CmError::Mtu(wanted.mtu))?;
        let ends = (wanted.local_ip, wanted.local_port, wanted.peer.ip());
        let (area, own_token) = request_data(
            wanted.service_id,
            ends,
            wanted.private_data,
            wanted.token,
            Req::PRIVATE_DATA_LEN,
        )?;
        self.make_room()?;
        let (local_id, tid, flow_label) = self.new_ids();
        let (qp, transport) = (wanted.qp, wanted.transport);
        let path = Path::roce(Gid::from(wanted.local_ip), Gid::from(wanted.peer.ip()));
        let req = Req {
            local_comm_id: local_id,
            service_id: wanted.service_id,
            ca_guid: self.config.ca_guid,
            qpn: qp.qpn,
            responder_resources: qp.responder_resources,
            initiator_depth: qp.initiator_depth,
            remote_cm_timeout: self.config.response_timeout,
            transport: match transport {
                Transport::Rc => Req::RC,
                Transport::Uc => Req::UC,
            },
            flow_control: qp.flow_control,
            start_psn: qp.start_psn,
            local_cm_timeout: self.config.response_timeout,
            retry_count: wanted.retry_count,
            pkey: DEFAULT_PKEY,
            mtu,
            rnr_retry_count: qp.rnr_retry_count,
            max_cm_retries: self.config.max_retries,
            srq: qp.srq,
            primary: Path {
                flow_label,
                traffic_class: wanted.traffic_class,
                ack_timeout: wanted.ack_timeout,
                ..path
            },
            private_data: &area,
            ..Req::default()
        };
        let terms = Terms {
            transport,
            mtu: wanted.mtu,
            // The peer's REP says it.
            send_psn: qp.start_psn,
            expect_psn: qp.start_psn,
            initiator_depth: qp.initiator_depth,
            responder_resources: qp.responder_resources,
            peer_resources: 0,
            ack_timeout: wanted.ack_timeout,
            retry_count: wanted.retry_count,
            rnr_retry_count: qp.rnr_retry_count,
            flow_label,
            traffic_class: wanted.traffic_class,
            flow_control: false,
            own_token,
            peer_token: None,
        };
        let conn = Conn {
            local_qpn: qp.qpn,
            terms: Some(Box::new(terms)),
            ..self.new_conn(now, State::ReqSent, wanted.peer, local_id, tid)
        };
        let id = self.insert(conn);
        self.send_until_answered(now, id, State::ReqSent, tid, req);
        Ok(id)
    }

    /// Asks a peer for the queue pair of a UD service. [`Event::Resolved`], [`Event::Unresolved`]
    /// or [`Event::TimedOut`] follows.
    ///
    /// # Errors
    ///
    /// Private data too long, addresses of two kinds, or too many connections.
    pub fn resolve(&mut self, now: Instant, wanted: &Resolve<'_>) -> Result<ConnId, CmError> {
        let ends = (wanted.local_ip, wanted.local_port, wanted.peer.ip());
        let (area, _) = request_data(
            wanted.service_id,
            ends,
            wanted.private_data,
            wanted.token,
            SidrReq::PRIVATE_DATA_LEN,
        )?;
        self.make_room()?;
        let (request_id, tid, _) = self.new_ids();
        let req = SidrReq {
            request_id,
            pkey: DEFAULT_PKEY,
            service_id: wanted.service_id,
            private_data: &area,
        };
        let conn = self.new_conn(now, State::SidrSent, wanted.peer, request_id, tid);
        let id = self.insert(conn);
        self.send_until_answered(now, id, State::SidrSent, tid, req);
        Ok(id)
    }

    /// Takes requests for a service: [`Event::Request`]. Up to `backlog` of them (at least one)
    /// wait for an answer; one more, and the oldest is dropped.
    ///
    /// # Errors
    ///
    /// The service has a listener already.
    pub fn listen(&mut self, service_id: u64, backlog: usize) -> Result<(), CmError> {
        let waiting = BTreeSet::new();
        self.add_listener(service_id, Listener::Connections { backlog: backlog.max(1), waiting })
    }

    /// Tells peers, from now on and without the program, which queue pair serves a UD service:
    /// [`Event::Queried`].
    ///
    /// # Errors
    ///
    /// Private data too long, or the service has a listener already.
    pub fn listen_datagrams(&mut self, service_id: u64, service: Datagrams) -> Result<(), CmError> {
        fits(&service.private_data, Datagrams::MAX_PRIVATE_DATA)?;
        self.add_listener(service_id, Listener::Datagrams(service))
    }

    fn add_listener(&mut self, service_id: u64, listener: Listener) -> Result<(), CmError> {
        if self.listeners.contains_key(&service_id) {
            return Err(CmError::InUse(service_id));
        }
        self.listeners.insert(service_id, listener);
        Ok(())
    }

    /// Takes no more requests for a service. Those that wait are dropped, and their peers are told
    /// that nobody listens. False: nobody listened.
    pub fn unlisten(&mut self, service_id: u64) -> bool {
        let Some(listener) = self.listeners.remove(&service_id) else { return false };
        if let Listener::Connections { waiting, .. } = listener {
            for id in waiting {
                self.drop_half_open(id, Some(Reason::INVALID_SERVICE_ID));
            }
        }
        true
    }

    /// Says yes to a request. [`Event::Established`], [`Event::Rejected`] or [`Event::TimedOut`]
    /// follows. What comes for the queue pair before that is told to [`Cm::handle_established`].
    ///
    /// # Errors
    ///
    /// No such request, or private data too long.
    pub fn accept(&mut self, now: Instant, id: ConnId, answer: &Accept<'_>) -> Result<(), CmError> {
        let conn = requested(&mut self.conns, id)?;
        fits(answer.private_data, Accept::MAX_PRIVATE_DATA)?;
        let (Some(remote_id), Some(terms)) = (conn.remote_id, &mut conn.terms) else {
            return Err(CmError::NotRequested(id));
        };
        let mut area = answer.private_data.to_vec();
        let wanted = answer.token.filter(|_| terms.peer_token.is_some());
        terms.own_token = wanted.filter(|t| t.append(&mut area, Accept::MAX_PRIVATE_DATA));
        terms.initiator_depth = answer.qp.initiator_depth.min(terms.peer_resources);
        terms.responder_resources = answer.qp.responder_resources;
        terms.expect_psn = answer.qp.start_psn;
        conn.local_qpn = answer.qp.qpn;
        let rep = Rep {
            local_comm_id: conn.local_id,
            remote_comm_id: remote_id,
            qpn: answer.qp.qpn,
            start_psn: answer.qp.start_psn,
            responder_resources: answer.qp.responder_resources,
            initiator_depth: terms.initiator_depth,
            target_ack_delay: answer.target_ack_delay,
            flow_control: answer.qp.flow_control,
            rnr_retry_count: answer.qp.rnr_retry_count,
            srq: answer.qp.srq,
            ca_guid: self.config.ca_guid,
            private_data: &area,
            ..Rep::default()
        };
        let tid = conn.tid;
        self.send_until_answered(now, id, State::RepSent, tid, rep);
        Ok(())
    }

    /// Says no to a request. Nothing follows.
    ///
    /// # Errors
    ///
    /// No such request, private data or reject information too long.
    pub fn reject(&mut self, now: Instant, id: ConnId, answer: &Reject<'_>) -> Result<(), CmError> {
        requested(&mut self.conns, id)?;
        fits(answer.private_data, Reject::MAX_PRIVATE_DATA)?;
        if answer.info.len() > Rej::ARI_LEN {
            return Err(CmError::RejectInfo(answer.info.len()));
        }
        self.refuse(now, id, answer.reason, &answer.info, answer.private_data);
        Ok(())
    }

    /// Ends a connection, or gives up one that is not established yet, or a question. Where it is
    /// not over already [`Event::Disconnected`] follows; the queue pair is to be put into error
    /// before.
    ///
    /// # Errors
    ///
    /// No such connection, or a request that waits for an answer.
    pub fn disconnect(&mut self, now: Instant, id: ConnId) -> Result<(), CmError> {
        let conn = self.conns.get(&id).ok_or(CmError::Unknown(id))?;
        match conn.state {
            State::ReqSent => {
                self.reject_as_timed_out(id);
                self.end(now, id, Event::Disconnected { conn: id, ended: Ended::Local });
            }
            State::SidrSent => {
                self.end(now, id, Event::Disconnected { conn: id, ended: Ended::Local });
            }
            State::Requested { .. } => return Err(CmError::Unanswered(id)),
            State::RepSent | State::Established => self.send_dreq(now, id, Ended::Local),
            State::DreqSent | State::Refused | State::TimeWait => {}
        }
        Ok(())
    }

    /// A packet came for the queue pair `qpn` from its peer: as good as RTU, which may be lost
    /// (IBTA vol. 1, 12.9).
    pub fn handle_established(&mut self, qpn: Qpn) {
        if let Some(&id) = self.index.awaiting_rtu.get(&qpn) {
            self.establish(id, &[]);
        }
    }

    /// Does what is due.
    pub fn handle_timeout(&mut self, now: Instant) {
        while let Some(&(at, id)) = self.index.timers.first() {
            if at > now {
                return;
            }
            self.expire(now, id);
        }
    }

    /// When [`Cm::handle_timeout`] wants to be called.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.index.timers.first().map(|&(at, _)| at)
    }

    /// Whether [`Cm::poll_mad`] has something.
    pub(in crate::roce) fn has_mads(&self) -> bool {
        !self.outbox.mads.is_empty()
    }

    /// The next MAD for QP 1 of the peer at the address given back.
    pub fn poll_mad(&mut self, out: &mut [u8; MAD_LEN]) -> Option<SocketAddr> {
        let (to, mad) = self.outbox.mads.pop_front()?;
        *out = mad;
        self.stats.sent += 1;
        Some(to)
    }

    /// What the port has to know next.
    pub fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    /// The counters.
    pub fn stats(&self) -> Stats {
        Stats { overflowed: self.outbox.lost, ..self.stats }
    }

    /// Connections and questions of any state, those included that are over but kept.
    pub fn connections(&self) -> usize {
        self.conns.len()
    }

    /// Requests of peers that are not established yet.
    pub fn half_open(&self) -> usize {
        self.index.half_open.len()
    }

    /// The settings.
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// 64 bits that strangers cannot guess, for the port that the manager is part of.
    pub(in crate::roce) fn word(&mut self) -> u64 {
        self.ids.word()
    }

    // What follows is for the manager itself.

    pub(super) fn new_ids(&mut self) -> (u32, u64, u32) {
        let flow_label = (self.ids.word() >> 44) as u32;
        (self.ids.comm_id(), self.ids.word(), flow_label)
    }

    pub(super) fn new_conn(
        &self,
        now: Instant,
        state: State,
        peer: SocketAddr,
        local_id: u32,
        tid: u64,
    ) -> Conn {
        Conn {
            state,
            passive: false,
            established: false,
            peer,
            service_id: 0,
            tid,
            local_id,
            remote_id: None,
            local_qpn: Qpn(0),
            remote_qpn: Qpn(0),
            terms: None,
            mad: None,
            sends: 0,
            retries: self.config.max_retries,
            longest: cm::timeout(self.config.response_timeout),
            deadline: None,
            patience: now + self.config.max_service_time,
            mtu_lowered: false,
            ended: Ended::Local,
        }
    }

    /// Makes room for one more connection: the oldest of those that are over goes.
    pub(super) fn make_room(&mut self) -> Result<(), CmError> {
        if self.conns.len() < self.config.max_connections {
            return Ok(());
        }
        let Some(&(_, id)) = self.index.over.first() else {
            return Err(CmError::TooMany(self.conns.len()));
        };
        self.remove(id);
        Ok(())
    }

    pub(super) fn insert(&mut self, conn: Conn) -> ConnId {
        self.last += 1;
        let id = ConnId(self.last);
        self.index.comm_id.insert(conn.local_id, id);
        self.conns.insert(id, conn);
        id
    }

    /// The peer is known by its own IDs, too.
    pub(super) fn index_peer(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get(&id) else { return };
        let (ip, port) = (conn.peer.ip().to_canonical(), conn.peer.port());
        if let Some(remote_id) = conn.remote_id {
            self.index.remote.insert((ip, remote_id, port), id);
        }
        self.index.remote_qpn.insert((ip, port, conn.remote_qpn), id);
    }

    fn forget_remote_qpn(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get(&id) else { return };
        let key = (conn.peer.ip().to_canonical(), conn.peer.port(), conn.remote_qpn);
        if self.index.remote_qpn.get(&key) == Some(&id) {
            self.index.remote_qpn.remove(&key);
        }
    }

    /// The only way into another state: all that depends on it follows.
    pub(super) fn enter(&mut self, id: ConnId, state: State, deadline: Option<Instant>) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        if let Some(at) = conn.deadline {
            self.index.timers.remove(&(at, id));
            self.index.over.remove(&(at, id));
        }
        conn.state = state;
        conn.deadline = deadline;
        self.index.timers.extend(deadline.map(|at| (at, id)));
        let (service_id, local_qpn) = (conn.service_id, conn.local_qpn);
        if state.half_open() {
            self.index.half_open.insert(id);
        } else {
            self.index.half_open.remove(&id);
        }
        if let Some(Listener::Connections { waiting, .. }) = self.listeners.get_mut(&service_id) {
            if matches!(state, State::Requested { .. }) {
                waiting.insert(id);
            } else {
                waiting.remove(&id);
            }
        }
        if state == State::RepSent {
            self.index.awaiting_rtu.insert(local_qpn, id);
        } else if self.index.awaiting_rtu.get(&local_qpn) == Some(&id) {
            self.index.awaiting_rtu.remove(&local_qpn);
        }
        if state.over() {
            self.index.over.extend(deadline.map(|at| (at, id)));
            self.forget_remote_qpn(id);
        }
    }

    /// Forgets a connection.
    pub(super) fn remove(&mut self, id: ConnId) {
        self.enter(id, State::TimeWait, None);
        let Some(conn) = self.conns.remove(&id) else { return };
        self.index.comm_id.remove(&conn.local_id);
        if let Some(remote_id) = conn.remote_id {
            let key = (conn.peer.ip().to_canonical(), remote_id, conn.peer.port());
            if self.index.remote.get(&key) == Some(&id) {
                self.index.remote.remove(&key);
            }
        }
        if conn.established {
            self.events.push_back(Event::Released { conn: id, local_qpn: conn.local_qpn });
        }
    }

    /// Sends a message, and again until something comes.
    fn send_until_answered<'m>(
        &mut self,
        now: Instant,
        id: ConnId,
        state: State,
        tid: u64,
        message: impl Into<Message<'m>>,
    ) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        conn.mad = Some(Box::new(mad(tid, message)));
        conn.sends = 0;
        self.send_kept(now, id, state);
    }

    /// Sends the message that is kept, and sets the time for the next one: each waits twice as
    /// long as the one before.
    pub(super) fn send_kept(&mut self, now: Instant, id: ConnId, state: State) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        let Some(mad) = &conn.mad else { return };
        self.outbox.push(conn.peer, **mad);
        let first = self.config.resend_after.max(Duration::from_millis(1));
        let wait = first.saturating_mul(1 << conn.sends.min(20)).min(conn.longest.max(first));
        conn.sends = conn.sends.saturating_add(1);
        self.enter(id, state, Some(now + wait));
    }

    fn expire(&mut self, now: Instant, id: ConnId) {
        let Some(conn) = self.conns.get(&id) else { return };
        let state = conn.state;
        let exhausted = conn.sends > conn.retries;
        match state {
            State::ReqSent if exhausted => {
                self.reject_as_timed_out(id);
                self.end(now, id, Event::TimedOut { conn: id, awaited: Awaited::Reply });
            }
            State::SidrSent if exhausted => {
                self.end(now, id, Event::TimedOut { conn: id, awaited: Awaited::Resolution });
            }
            State::RepSent if exhausted => {
                self.refuse(now, id, Reason::TIMEOUT, &[], &[]);
                self.events.push_back(Event::TimedOut { conn: id, awaited: Awaited::ReadyToUse });
            }
            State::DreqSent if exhausted => {
                let ended = match conn.ended {
                    Ended::Local => Ended::TimedOut,
                    ended @ (Ended::TimedOut | Ended::Peer | Ended::Stale | Ended::Rejected(_)) => {
                        ended
                    }
                };
                self.end(now, id, Event::Disconnected { conn: id, ended });
            }
            State::ReqSent | State::SidrSent | State::RepSent | State::DreqSent => {
                self.stats.resent += 1;
                self.send_kept(now, id, state);
            }
            State::Requested { mra: false } => self.send_mra(now, id),
            State::Requested { mra: true } => {
                self.refuse(now, id, Reason::TIMEOUT, &[], &[]);
                self.events.push_back(Event::TimedOut { conn: id, awaited: Awaited::Answer });
            }
            State::Established => self.enter(id, State::Established, None),
            State::Refused | State::TimeWait => self.remove(id),
        }
    }

    /// Tells the program that it is over. What a peer's late message could be taken for something
    /// new without is kept for the time-wait.
    pub(super) fn end(&mut self, now: Instant, id: ConnId, event: Event) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        self.events.push_back(event);
        if conn.passive || conn.established {
            conn.mad = None;
            conn.terms = None;
            self.enter(id, State::TimeWait, Some(now + self.config.time_wait));
        } else {
            self.remove(id);
        }
    }

    pub(super) fn establish(&mut self, id: ConnId, private_data: &[u8]) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        let Some(ready) = conn.ready(id, private_data) else { return };
        conn.established = true;
        conn.mad = None;
        conn.terms = None;
        self.events.push_back(Event::Established(ready));
        self.enter(id, State::Established, None);
    }

    /// A REJ that is kept and told again to who asks again. The program is told by the caller.
    pub(super) fn refuse(
        &mut self,
        now: Instant,
        id: ConnId,
        reason: Reason,
        info: &[u8],
        private_data: &[u8],
    ) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        let message = match conn.state {
            State::Requested { .. } => Rej::REQ,
            State::RepSent
            | State::ReqSent
            | State::SidrSent
            | State::Established
            | State::DreqSent
            | State::Refused
            | State::TimeWait => Rej::NONE,
        };
        let rej = Rej {
            local_comm_id: conn.local_id,
            remote_comm_id: conn.remote_id.unwrap_or(0),
            message,
            info_len: info.len() as u8,
            reason,
            ari: info,
            private_data,
        };
        conn.mad = Some(Box::new(self.outbox.message(conn.peer, conn.tid, rej)));
        conn.terms = None;
        self.enter(id, State::Refused, Some(now + self.config.time_wait));
    }

    /// Active: the peer need not answer any more. It knows us by our GUID and our name alone.
    fn reject_as_timed_out(&mut self, id: ConnId) {
        let Some(conn) = self.conns.get(&id) else { return };
        let guid = self.config.ca_guid.to_be_bytes();
        let rej = Rej {
            local_comm_id: conn.local_id,
            message: Rej::NONE,
            info_len: guid.len() as u8,
            reason: Reason::TIMEOUT,
            ari: &guid,
            ..Rej::default()
        };
        self.outbox.message(conn.peer, conn.tid, rej);
    }

    /// Tells an initiator to wait, for as long as the program may take.
    pub(super) fn send_mra(&mut self, now: Instant, id: ConnId) {
        let Some(conn) = self.conns.get(&id) else { return };
        let mra = Mra {
            local_comm_id: conn.local_id,
            remote_comm_id: conn.remote_id.unwrap_or(0),
            message: Mra::REQ,
            service_timeout: self.config.service_timeout,
            private_data: &[],
        };
        self.outbox.message(conn.peer, conn.tid, mra);
        if conn.state != (State::Requested { mra: true }) {
            let until = now + cm::timeout(self.config.service_timeout);
            self.enter(id, State::Requested { mra: true }, Some(until));
        }
    }

    pub(super) fn send_dreq(&mut self, now: Instant, id: ConnId, ended: Ended) {
        let tid = self.ids.word();
        let Some(conn) = self.conns.get_mut(&id) else { return };
        conn.ended = ended;
        conn.terms = None;
        conn.retries = self.config.disconnect_retries;
        let dreq = Dreq {
            local_comm_id: conn.local_id,
            remote_comm_id: conn.remote_id.unwrap_or(0),
            remote_qpn: conn.remote_qpn,
            private_data: &[],
        };
        self.send_until_answered(now, id, State::DreqSent, tid, dreq);
    }

    /// Drops a half-open connection at once. The peer is told why, if it is to be.
    pub(super) fn drop_half_open(&mut self, id: ConnId, reason: Option<Reason>) {
        let Some(conn) = self.conns.get(&id) else { return };
        if let Some(reason) = reason {
            let rej = Rej {
                local_comm_id: conn.local_id,
                remote_comm_id: conn.remote_id.unwrap_or(0),
                message: Rej::REQ,
                reason,
                ..Rej::default()
            };
            self.outbox.message(conn.peer, conn.tid, rej);
        }
        self.events.push_back(Event::Dropped { conn: id });
        self.remove(id);
    }
}

fn requested(conns: &mut BTreeMap<ConnId, Conn>, id: ConnId) -> Result<&mut Conn, CmError> {
    let conn = conns.get_mut(&id).ok_or(CmError::Unknown(id))?;
    match conn.state {
        State::Requested { .. } => Ok(conn),
        State::ReqSent
        | State::SidrSent
        | State::RepSent
        | State::Established
        | State::DreqSent
        | State::Refused
        | State::TimeWait => Err(CmError::NotRequested(id)),
    }
}
