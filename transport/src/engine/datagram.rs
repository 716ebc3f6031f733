//! The engine of RoCEv2: the UDP socket of a device and all queue pairs behind it, under one lock.
//!
//! A turn moves packets both ways and hands out what came of them:
//!
//! ```text
//!   socket ─► GRO split ─► (impairments) ─► (capture) ─► Port::handle_datagram ─► completions, events
//!   socket ◄─ one send call a train ◄─ (capture) ◄─ Port::poll_transmit
//! ```
//!
//! A train that finds no room in the socket is kept and sent before any other.

use std::{
    collections::{BTreeSet, VecDeque},
    fmt,
    future::Future,
    net::{IpAddr, SocketAddr},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    time::Duration,
};

use parking_lot::{Mutex, MutexGuard};
use rustc_hash::FxHashMap;
use tokio::{
    io::{Interest, Ready},
    runtime::Handle,
    sync::{Notify, mpsc, oneshot},
};
use userdma_proto::{
    roce::{
        self, PathMtu, Port, QpAttr, Reason, Train,
        cm::{self, CmError, ConnId, Datagrams, Ended, Established, Reject, Rejected, Resolve},
        port::{self, Connect, Destination, Event, Limits, PortError, Request},
    },
    sim::{Counters as ImpairerCounters, Impairer, Packet},
    time::Instant,
    verbs::{PostError, QpState, RecvWr, SendWr, UdDest, Wc, WcOpcode, WcStatus},
    wire::{
        ids::{QKey, Qpn},
        mad::cm::{PortSpace, Reason as RejectReason, SidrRep},
    },
};

use super::{Clock, LOOK, Pollers, QpShared, Wakes, until};
use crate::{
    capture::Tap,
    cq::Cq,
    datagrams::UdService,
    device::{Counters, count},
    error::{CloseReason, Error, Result},
    mr::Table,
    net::{
        tcp::Turn,
        udp::{Piece, Route, Scratch, SendError, UdpSocket, UdpStats, largest_rdma_mtu},
    },
    qp::QpInit,
    srq::Srq,
    users::Users,
};

/// Receptions and trains of one turn, before others get theirs: about a MiB each way.
const TURN: Budget = Budget { receptions: 16, trains: 16, answers: true };
/// The same for a post: it sends, and does not receive.
const POST: Budget = Budget { receptions: 0, trains: 64, answers: true };
/// A program that polls comes back sooner than this.
const RECENT: Duration = Duration::from_micros(100);
/// And its posts and turns take no longer.
const LONG_POST: Duration = Duration::from_millis(10);
/// How long a peer may take to hear of an error by a NAK, before it is disconnected.
const LAST_WORDS: Duration = Duration::from_millis(500);

/// A program that polls and takes a message gets so long to post its answer, which goes out before
/// the ACK that is owed. Shorter than half a round trip.
const GRACE: Duration = Duration::from_micros(3);
/// How long timers wait at most for what lies in the socket.
const OVERDUE: Duration = Duration::from_millis(500);

/// How far one turn may go.
#[derive(Debug, Clone, Copy)]
struct Budget {
    receptions: usize,
    trains: usize,
    /// Whether answers to peers are sent too.
    answers: bool,
}

/// See the [module](self).
pub(crate) struct Engine {
    core: Mutex<Core>,
    local: SocketAddr,
    peer_udp_port: u16,
    /// The largest path MTU of any connection; `None`: what the route takes.
    mtu: Option<PathMtu>,
    /// Where none is set, 1024 is the most that is asked for.
    modest: bool,
    table: Arc<Table>,
    clock: Clock,
    spin: Duration,
    runtime: Handle,
    counters: Arc<Counters>,
    /// Who awaits operations.
    awaiting: Pollers,
    /// The completion queues of its queue pairs, and of how many each is.
    queues: Mutex<Users<Cq>>,
    /// When somebody last polled, in nanoseconds.
    polled: AtomicU64,
    /// A program's thread posts or polls, and has the lock.
    turning: AtomicBool,
    /// The task is out of epoll.
    unarmed: AtomicBool,
    /// Nobody needs the device any more, or its runtime is gone.
    over: AtomicBool,
    kick: Notify,
}

/// What the lock guards.
struct Core {
    socket: UdpSocket,
    port: Port,
    scratch: Scratch,
    train: Train,
    /// Where `train` goes, and how much of it went: it waits for room in the socket.
    pending: Option<(Destination, usize)>,
    entries: FxHashMap<Qpn, Entry>,
    /// Who takes requests for a service.
    listeners: FxHashMap<u64, mpsc::Sender<Box<Request>>>,
    /// Who waits for the answer of a UD service.
    questions: FxHashMap<ConnId, oneshot::Sender<cm::Event>>,
    srqs: Users<Srq>,
    /// How many queue pairs disconnect when their sends are done.
    closing: usize,
    /// Queue pairs whose sends may be done; empty where none is closing.
    advanced: Vec<Qpn>,
    /// What queue pairs counted that are gone.
    gone: roce::Stats,
    /// When to look after a queue pair that ends: [`Entry::end`] of all.
    ends: BTreeSet<(Instant, Qpn)>,
    impairer: Option<Impairer<Way>>,
    tap: Option<Tap>,
    /// Completions on their way to a queue: empty between turns.
    fresh: Vec<Wc>,
    /// While somebody polls, what is owed to peers waits until then: a post goes out first.
    owed_until: Instant,
    /// The last thing that the socket refused, and to whom.
    trouble: Option<(Option<IpAddr>, String)>,
}

/// Where a packet came from, and where to.
type Way = (SocketAddr, IpAddr);

/// What the engine knows of a queue pair.
struct Entry {
    qp: Arc<QpShared>,
    mode: Mode,
    /// Receives posted before there was a connection, with their tags.
    recvs: VecDeque<(RecvWr, u64)>,
    /// Who waits for the connection.
    connecting: Option<oneshot::Sender<Result<(), Refusal>>>,
    terms: Option<Box<Established>>,
    addresses: Option<(SocketAddr, SocketAddr)>,
    /// It has a connection of the connection manager.
    linked: bool,
    /// It disconnects when its sends are done.
    closing: bool,
    /// The connection manager disconnects it, and tells how that ended.
    parting: bool,
    /// When to look after it.
    end: Option<Instant>,
    /// The last handle is gone: it is forgotten as soon as its end is told.
    released: bool,
}

/// Where a queue pair stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    /// Made, not connected.
    Idle,
    /// Being connected.
    Starting,
    /// In the hands of the port: connected, moved by the program, or at its end.
    Up,
}

/// Why no connection came about.
#[derive(Debug)]
pub(crate) enum Refusal {
    /// The peer said no.
    Rejected(Rejected),
    /// It said nothing.
    Silent,
    /// The queue pair was aborted meanwhile.
    Aborted,
}

/// What a device's engine is made with.
pub(crate) struct Settings {
    pub(crate) peer_udp_port: u16,
    pub(crate) mtu: Option<PathMtu>,
    pub(crate) modest: bool,
    pub(crate) impairer: Option<Impairer<Way>>,
    pub(crate) tap: Option<Tap>,
    pub(crate) table: Arc<Table>,
    pub(crate) clock: Clock,
    pub(crate) spin: Duration,
    pub(crate) runtime: Handle,
    pub(crate) counters: Arc<Counters>,
}

/// What the engine of a `udp://` device did and met.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RoceStats {
    /// The socket's counters.
    pub udp: UdpStats,
    /// The verdicts on packets, and what became of them.
    pub port: port::Stats,
    /// The connection manager's counters.
    pub cm: cm::Stats,
    /// The counters of all queue pairs together, of those that are gone too.
    pub qps: roce::Stats,
    /// What [`RoceOptions::impair`](crate::RoceOptions::impair) did to packets received.
    pub impaired: Option<ImpairerCounters>,
    /// The last thing that the socket refused to send, in words.
    pub trouble: Option<String>,
    /// Why the capture ([`RoceOptions::capture`](crate::RoceOptions::capture)) is not whole, in words.
    pub capture_failure: Option<String>,
}

/// A queue pair's way to its engine.
pub(crate) struct Member(Arc<Engine>);

impl Engine {
    pub(crate) fn start(socket: UdpSocket, config: port::Config, settings: Settings) -> Arc<Self> {
        let engine = Arc::new(Self {
            local: socket.local_addr(),
            core: Mutex::new(Core {
                socket,
                port: Port::new(config),
                scratch: Scratch::new(),
                train: Train::default(),
                pending: None,
                entries: FxHashMap::default(),
                listeners: FxHashMap::default(),
                questions: FxHashMap::default(),
                srqs: Users::new(),
                closing: 0,
                advanced: Vec::new(),
                gone: roce::Stats::default(),
                ends: BTreeSet::new(),
                impairer: settings.impairer,
                tap: settings.tap,
                fresh: Vec::new(),
                owed_until: Instant::ZERO,
                trouble: None,
            }),
            peer_udp_port: settings.peer_udp_port,
            mtu: settings.mtu,
            modest: settings.modest,
            table: settings.table,
            clock: settings.clock,
            spin: settings.spin,
            runtime: settings.runtime,
            counters: settings.counters,
            awaiting: Pollers::default(),
            queues: Mutex::new(Users::new()),
            polled: AtomicU64::new(0),
            turning: AtomicBool::new(false),
            unarmed: AtomicBool::new(false),
            over: AtomicBool::new(false),
            kick: Notify::new(),
        });
        engine.runtime.spawn(drive(Driven(engine.clone())));
        engine
    }

    /// Its UDP socket.
    pub(crate) fn local(&self) -> SocketAddr {
        self.local
    }

    pub(crate) fn pollers(&self) -> &Pollers {
        &self.awaiting
    }

    pub(crate) fn stats(&self) -> RoceStats {
        let mut core = self.core.lock();
        let capture_failure = core.tap.as_mut().and_then(Tap::failure);
        let mut qps = core.gone;
        core.port.qps().for_each(|qp| qps += *qp.stats());
        RoceStats {
            udp: core.socket.stats(),
            port: *core.port.stats(),
            cm: core.port.cm_stats(),
            qps,
            impaired: core.impairer.as_ref().map(Impairer::counters).copied(),
            trouble: core.trouble.as_ref().map(|(_, said)| said.clone()),
            capture_failure,
        }
    }

    /// The device is gone: the task ends.
    pub(crate) fn shut_down(&self) {
        self.over.store(true, Ordering::Release);
        self.kick.notify_one();
    }

    /// Runs `f` under the lock, sends what it left to be sent, then tells whom it concerns.
    fn locked<R>(&self, f: impl FnOnce(&mut Core, &mut Wakes) -> R) -> R {
        let mut wakes = Wakes::default();
        let result = {
            let mut core = self.core.lock();
            self.turning.store(true, Ordering::Relaxed);
            let unarmed = self.unarmed.load(Ordering::SeqCst);
            // Out of epoll the task looks by itself.
            let before = (!unarmed).then(|| core.needs());
            let result = f(&mut core, &mut wakes);
            let mut turn = Turn::default();
            let now = self.clock.now();
            // Who polls sends what is owed with the next turn: it turns again soon, or the task does.
            core.transmit(self, now, Budget { answers: !unarmed, ..POST }, &mut turn);
            core.settle(self, now, &mut turn, &mut wakes);
            if let Some(before) = before {
                self.left(before, core.needs(), turn);
            }
            self.turning.store(false, Ordering::Relaxed);
            result
        };
        if !wakes.is_empty() {
            wakes.call();
        }
        result
    }

    /// Moves what can be moved.
    fn turn(&self, now: Instant) -> Turn {
        let core = self.core.lock();
        self.turn_with(core, now, false)
    }

    /// The same for a poller, who does not wait for a lock that others use to do the same.
    pub(crate) fn try_turn(&self, now: Instant) -> Turn {
        self.polled.store(now.as_nanos(), Ordering::Relaxed);
        let Some(core) = self.core.try_lock() else {
            return Turn::default();
        };
        self.turning.store(true, Ordering::Relaxed);
        let turn = self.turn_with(core, now, true);
        if turn.more {
            // It has taken long.
            self.polled.store(self.clock.now().as_nanos(), Ordering::Relaxed);
        }
        self.turning.store(false, Ordering::Relaxed);
        turn
    }

    fn turn_with(&self, mut core: MutexGuard<'_, Core>, now: Instant, polls: bool) -> Turn {
        let mut wakes = Wakes::default();
        // Who polls takes its completions first, and sends what is owed with the next turn: it
        // turns again soon, or the task does.
        let lazy = polls && self.unarmed.load(Ordering::SeqCst);
        // Out of epoll the task looks by itself.
        let before = (polls && !lazy).then(|| core.needs());
        let mut turn = core.turn(self, now, lazy, &mut wakes);
        if let Some(before) = before {
            self.left(before, core.needs(), turn);
        }
        drop(core);
        if !wakes.is_empty() {
            turn.told = true;
            wakes.call();
        }
        turn
    }

    /// Somebody else than the task took a turn. In epoll the task waits for room in the socket, for
    /// a timer, or for what the turn did not get done, only if it is told; out of epoll it looks by
    /// itself.
    fn left(&self, before: Needs, after: Needs, turn: Turn) {
        let sooner = match (before.timer, after.timer) {
            (Some(before), Some(after)) => after < before,
            (before, after) => after.is_some() && before.is_none(),
        };
        let news = (after.room && !before.room) || sooner || turn.more;
        if news && !self.unarmed.load(Ordering::SeqCst) {
            self.kick.notify_one();
        }
    }

    /// Somebody went to sleep who polled before: the task shall watch the socket again.
    pub(crate) fn rouse(&self) {
        if self.unarmed.load(Ordering::SeqCst) {
            self.kick.notify_one();
        }
    }

    /// Whether somebody sleeps until a queue pair brings something.
    fn is_awaited(&self) -> bool {
        let asleep = |pollers: &Pollers| pollers.asleep.load(Ordering::SeqCst) > 0;
        asleep(&self.awaiting) || self.queues.lock().iter().any(|cq| asleep(cq.pollers()))
    }

    /// Whether somebody polls right now, and nobody relies on being woken.
    fn is_polled(&self, now: Instant) -> bool {
        let since = now.saturating_since(Instant::from_nanos(self.polled.load(Ordering::Relaxed)));
        let polls = since < RECENT || self.turning.load(Ordering::Relaxed) && since < LONG_POST;
        polls && !self.is_awaited()
    }

    /// A queue pair in the port, in RESET, with the number that it gives.
    pub(crate) fn create_qp(&self, config: roce::Config, init: &QpInit) -> Result<Qpn> {
        let mut core = self.core.lock();
        // A packet counts 1024 octets at least.
        let octets = core.port.config().window;
        let config = config.keeping(roce::Window { packets: octets / 1024, octets });
        let qpn = core.port.create_qp(config)?;
        let made = core.prepare(qpn, init);
        if made.is_err() {
            let _ = core.port.destroy_qp(self.clock.now(), qpn);
        }
        made.map(|()| qpn)
    }

    /// The queue pair behind the number [`Engine::create_qp`] gave.
    pub(crate) fn adopt(&self, qp: &Arc<QpShared>) {
        {
            let mut queues = self.queues.lock();
            for cq in [&qp.init.send_cq, &qp.init.recv_cq] {
                queues.add(|known| known.is(cq), || cq.clone());
            }
        }
        let mut core = self.core.lock();
        if let Some(srq) = &qp.init.srq {
            core.srqs.add(|known| known.is(srq), || srq.clone());
        }
        core.entries.insert(
            qp.qpn,
            Entry {
                qp: qp.clone(),
                mode: Mode::Idle,
                recvs: VecDeque::new(),
                connecting: None,
                terms: None,
                addresses: None,
                linked: false,
                closing: false,
                parting: false,
                end: None,
                released: false,
            },
        );
    }

    /// Forgets a queue pair, in the port too.
    fn forget(&self, core: &mut Core, now: Instant, qpn: Qpn, wakes: &mut Wakes) {
        core.stop_closing(qpn);
        core.end_by_itself(qpn);
        let Some(entry) = core.entries.remove(&qpn) else { return };
        if let Some(qp) = core.port.qp(qpn) {
            core.gone += *qp.stats();
        }
        let _ = core.port.destroy_qp(now, qpn);
        {
            let mut queues = self.queues.lock();
            for cq in [&entry.qp.init.send_cq, &entry.qp.init.recv_cq] {
                queues.remove(|known| known.is(cq));
            }
        }
        if let Some(srq) = &entry.qp.init.srq {
            core.srqs.remove(|known| known.is(srq));
        }
        // The last owner's drop comes back for the locks.
        wakes.later(move || drop(entry));
    }

    /// The largest path MTU toward `peer`, as set or as the route takes.
    pub(crate) fn path_mtu(&self, peer: SocketAddr) -> Result<PathMtu> {
        let route = self.core.lock().socket.path_mtu(peer)?;
        let fits = fitting(route).ok_or_else(|| {
            Error::BadAddress(format!(
                "the route to {} takes packets of {route} octets, and the smallest of RoCE needs 336",
                peer.ip()
            ))
        })?;
        match self.mtu {
            Some(mtu) if mtu > fits => Err(Error::BadAddress(format!(
                "a path MTU of {} octets does not fit the route to {}, whose MTU is {route}: take {} \
                 at most",
                mtu.octets(),
                peer.ip(),
                fits.octets()
            ))),
            Some(mtu) => Ok(mtu),
            None => Ok(fits),
        }
    }

    /// Our address toward `peer`.
    fn source_toward(&self, peer: SocketAddr) -> Result<IpAddr> {
        if self.local.ip().is_unspecified() {
            self.core.lock().socket.source_toward(peer)
        } else {
            Ok(self.local.ip())
        }
    }

    fn same_family(&self, peer: SocketAddr) -> Result<()> {
        if peer.is_ipv4() != self.local.is_ipv4() {
            return Err(Error::BadAddress(format!(
                "cannot reach {peer} from {}: one is IPv4, the other IPv6",
                self.local
            )));
        }
        Ok(())
    }

    /// Connects `qp` to the service at `peer`: its address, and the rdma_cm port.
    pub(crate) async fn connect(
        self: &Arc<Self>,
        qp: &Arc<QpShared>,
        peer: SocketAddr,
        private_data: &[u8],
    ) -> Result<()> {
        let init = &qp.init;
        self.may_begin(qp)?;
        self.same_family(peer)?;
        let mut to = peer;
        to.set_port(self.peer_udp_port);
        let (mtu, local_ip) = (self.path_mtu(peer)?, self.source_toward(peer)?);
        let wanted = Connect {
            local_ip: Some(local_ip),
            mtu: match init.mtu {
                Some(wanted) => wanted.min(mtu),
                None if self.modest && self.mtu.is_none() => mtu.min(PathMtu::Mtu1024),
                None => mtu,
            },
            initiator_depth: depth(init.ord),
            responder_resources: depth(init.ird),
            ack_timeout: init.timeout,
            retry_count: init.retry_cnt,
            rnr_retry_count: init.rnr_retry,
            traffic_class: init.traffic_class,
            private_data,
            ..Connect::new(to, PortSpace::TCP.service_id(peer.port()))
        };
        let (sender, told) = oneshot::channel();
        self.locked(|core, _| {
            let entry =
                core.entries.get_mut(&qp.qpn).ok_or(Error::State("the queue pair is gone"))?;
            entry.may_ask(core.port.qp(qp.qpn).map(roce::Qp::state))?;
            core.port.connect(self.clock.now(), qp.qpn, &wanted)?;
            entry.mode = Mode::Starting;
            entry.linked = true;
            entry.connecting = Some(sender);
            entry.addresses = Some((SocketAddr::new(local_ip, self.local.port()), to));
            Ok::<_, Error>(())
        })?;
        let mut attempt = Attempt { engine: self, qpn: qp.qpn, ended: false };
        let answer = self.within(init.startup_timeout, told).await;
        attempt.ended = answer.is_some();
        drop(attempt);
        match answer {
            Some(Ok(Ok(()))) => Ok(()),
            Some(Ok(Err(Refusal::Rejected(source)))) => Err(Error::Rejected { peer, source }),
            Some(Ok(Err(Refusal::Silent))) | None => Err(self.no_answer(peer)),
            Some(Ok(Err(Refusal::Aborted)) | Err(_)) => {
                Err(PostError::BadState(QpState::Err).into())
            }
        }
    }

    /// What `told` gives within `patience`.
    async fn within<T>(&self, patience: Duration, told: impl Future<Output = T>) -> Option<T> {
        let timeout = {
            // Timers of tokio need its context, which the caller may not have.
            let _entered = self.runtime.enter();
            tokio::time::timeout(patience, told)
        };
        timeout.await.ok()
    }

    fn no_answer(&self, peer: SocketAddr) -> Error {
        let trouble = self.trouble_toward(peer.ip());
        Error::NoAnswer { peer, udp_port: self.peer_udp_port, trouble }
    }

    /// Whether a queue pair is one of ours, and somebody looks after the socket.
    pub(crate) fn may_begin(self: &Arc<Self>, qp: &QpShared) -> Result<()> {
        if !qp.member().is_some_and(|member| Arc::ptr_eq(member.engine(), self)) {
            return Err(Error::State(
                "the queue pair belongs to another device: make it in a domain of this one",
            ));
        }
        self.is_alive()
    }

    fn is_alive(&self) -> Result<()> {
        if self.over.load(Ordering::Acquire) {
            return Err(Error::State("the device's tokio runtime was shut down"));
        }
        Ok(())
    }

    /// What the socket last refused to send to `peer`.
    fn trouble_toward(&self, peer: IpAddr) -> Option<String> {
        let core = self.core.lock();
        core.trouble.as_ref().filter(|(to, _)| *to == Some(peer)).map(|(_, said)| said.clone())
    }

    /// Listens for connections to the rdma_cm port `port`, 0 for a free one, and gives it.
    /// `backlog` requests wait for the program; `half_open` are those that it has taken as well.
    pub(crate) fn listen(
        &self,
        port: u16,
        backlog: usize,
        half_open: usize,
        random: u64,
    ) -> Result<(u16, mpsc::Receiver<Box<Request>>)> {
        self.is_alive()?;
        let (sender, requests) = mpsc::channel(backlog);
        let mut core = self.core.lock();
        let service = |port| PortSpace::TCP.service_id(port);
        let port = take_port(port, random, |port| core.port.listen(service(port), half_open))?;
        core.listeners.insert(service(port), sender);
        Ok((port, requests))
    }

    pub(crate) fn unlisten(&self, port: u16) {
        let service = PortSpace::TCP.service_id(port);
        self.locked(|core, wakes| {
            let listener = core.listeners.remove(&service);
            wakes.later(move || drop(listener));
            core.port.unlisten(self.clock.now(), service);
        });
    }

    /// Tells peers that ask for the rdma_cm port `port` of datagrams, 0 for a free one, of a queue
    /// pair. Gives the port.
    pub(crate) fn listen_datagrams(
        &self,
        port: u16,
        qpn: Qpn,
        qkey: QKey,
        private_data: &[u8],
        random: u64,
    ) -> Result<u16> {
        self.is_alive()?;
        let service = Datagrams { qpn, qkey, private_data: private_data.to_vec() };
        let mut core = self.core.lock();
        take_port(port, random, |port| {
            core.port.listen_datagrams(PortSpace::UDP.service_id(port), service.clone())
        })
    }

    pub(crate) fn unlisten_datagrams(&self, port: u16) {
        let service = PortSpace::UDP.service_id(port);
        self.locked(|core, _| core.port.unlisten(self.clock.now(), service));
    }

    /// Asks for the UD service at `peer`: its address, and the rdma_cm port.
    pub(crate) async fn resolve(
        &self,
        peer: SocketAddr,
        private_data: &[u8],
        patience: Duration,
    ) -> Result<UdService> {
        self.is_alive()?;
        self.same_family(peer)?;
        let mut to = peer;
        to.set_port(self.peer_udp_port);
        let local_ip = self.source_toward(peer)?;
        let (sender, told) = oneshot::channel();
        let conn = self.locked(|core, _| {
            let wanted = Resolve {
                peer: to,
                local_ip,
                local_port: 0,
                service_id: PortSpace::UDP.service_id(peer.port()),
                private_data,
                token: Some(core.port.token()),
            };
            let conn = core.port.resolve(self.clock.now(), &wanted)?;
            core.questions.insert(conn, sender);
            Ok::<_, Error>(conn)
        })?;
        let _question = Question { engine: self, conn };
        match self.within(patience, told).await.and_then(Result::ok) {
            Some(cm::Event::Resolved { peer, qpn, qkey, private_data, .. }) => {
                Ok(UdService { dest: UdDest { addr: peer, qpn, qkey }, private_data })
            }
            Some(cm::Event::Unresolved { status, .. }) => {
                let reply = SidrRep { status, ..SidrRep::default() };
                let why = reply.status_name().unwrap_or("an unknown answer");
                Err(Error::NoService { peer, status, why })
            }
            _ => Err(self.no_answer(peer)),
        }
    }

    /// Says yes to `request` with `qp`.
    pub(crate) fn accept(
        self: &Arc<Self>,
        qp: &Arc<QpShared>,
        request: &Request,
        private_data: &[u8],
    ) -> Result<()> {
        self.may_begin(qp)?;
        let init = &qp.init;
        let answer = port::Accept {
            initiator_depth: depth(init.ord),
            responder_resources: depth(init.ird),
            rnr_retry_count: init.rnr_retry,
            private_data,
            ..port::Accept::default()
        };
        self.locked(|core, wakes| {
            let entry =
                core.entries.get_mut(&qp.qpn).ok_or(Error::State("the queue pair is gone"))?;
            entry.may_begin(core.port.qp(qp.qpn).map(roce::Qp::state))?;
            core.port.accept(self.clock.now(), request, qp.qpn, &answer)?;
            entry.linked = true;
            entry.addresses = Some((request.local, request.cm.peer));
            core.bring_up(qp.qpn, wakes);
            Ok(())
        })
    }

    /// Says no to `request`.
    pub(crate) fn reject(&self, request: &Request, private_data: &[u8]) -> Result<()> {
        self.locked(|core, _| {
            Ok(core.port.reject(self.clock.now(), request, &Reject::consumer(private_data))?)
        })
    }

    /// Nobody looks after the socket any more: everything is lost.
    fn abandon(&self) {
        self.over.store(true, Ordering::Release);
        let now = self.clock.now();
        self.locked(|core, wakes| {
            // Who waits for requests hears that none will come.
            let listeners = std::mem::take(&mut core.listeners);
            wakes.later(move || drop(listeners));
            let all: Vec<_> = core.entries.keys().copied().collect();
            for qpn in all {
                core.fail(now, qpn, CloseReason::Lost, wakes);
                if core.entries.get(&qpn).is_some_and(|entry| entry.released) {
                    self.forget(core, now, qpn, wakes);
                }
            }
        });
    }
}

/// An attempt to connect: given up where it is dropped before it has ended.
struct Attempt<'a> {
    engine: &'a Engine,
    qpn: Qpn,
    ended: bool,
}

impl Drop for Attempt<'_> {
    fn drop(&mut self) {
        if !self.ended {
            let now = self.engine.clock.now();
            self.engine.locked(|core, wakes| core.give_up(now, self.qpn, wakes));
        }
    }
}

/// A question for a UD service under way: dropped, nobody waits for its answer.
struct Question<'a> {
    engine: &'a Engine,
    conn: ConnId,
}

impl Drop for Question<'_> {
    fn drop(&mut self) {
        self.engine.locked(|core, _| {
            if core.questions.remove(&self.conn).is_some() {
                core.port.forget_question(self.engine.clock.now(), self.conn);
            }
        });
    }
}

/// Has `listen` take `port`, or for 0 the first that is free of all dynamic ports (RFC 6335), from a
/// random one on. Gives the port.
fn take_port(
    port: u16,
    random: u64,
    mut listen: impl FnMut(u16) -> Result<(), PortError>,
) -> Result<u16> {
    if port != 0 {
        return Ok(listen(port).map(|()| port)?);
    }
    for i in 0..16_384 {
        let candidate = 49_152 + (random.wrapping_add(i) % 16_384) as u16;
        match listen(candidate) {
            Ok(()) => return Ok(candidate),
            Err(PortError::Cm(CmError::InUse(_))) => {}
            Err(e) => return Err(e.into()),
        }
    }
    Err(Error::Limit("all rdma_cm ports are taken"))
}

/// The largest path MTU whose packets fit a route that takes packets of `route` octets.
fn fitting(route: usize) -> Option<PathMtu> {
    PathMtu::from_octets(largest_rdma_mtu(route)? as u32)
}

/// READs and atomics at a time, as an octet says them.
fn depth(n: u16) -> u8 {
    n.min(255) as u8
}

impl Entry {
    /// Whether the queue pair may ask for a connection: where none comes about it is made anew, and
    /// what was posted to it stays with us.
    fn may_ask(&self, state: Option<QpState>) -> Result<()> {
        if self.mode == Mode::Up && state == Some(QpState::Init) {
            return Err(Error::State(
                "the program has moved this queue pair to INIT: move it on, or back to RESET",
            ));
        }
        self.may_begin(state)
    }

    /// Whether a connection may begin.
    fn may_begin(&self, state: Option<QpState>) -> Result<()> {
        Err(Error::State(match (self.mode, state) {
            (Mode::Idle, _) => return Ok(()),
            (Mode::Starting, _) => "the queue pair is being connected already",
            (Mode::Up, Some(QpState::Reset | QpState::Init)) if !self.linked => return Ok(()),
            (Mode::Up, Some(QpState::Err)) => {
                "the queue pair is in the error state: make a new one"
            }
            (Mode::Up, _) => "the queue pair is connected already",
        }))
    }
}

/// What the engine waits for, apart from packets.
#[derive(Debug, Clone, Copy, Default)]
struct Needs {
    room: bool,
    timer: Option<Instant>,
}

impl Core {
    fn needs(&self) -> Needs {
        let impaired = self.impairer.as_ref().and_then(Impairer::poll_timeout);
        let ends = self.ends.first().map(|&(at, _)| at);
        let timer = self.port.poll_timeout().into_iter().chain(impaired).chain(ends).min();
        Needs { room: self.pending.is_some(), timer }
    }

    /// One turn: packets in, timers, packets out, then completions and events to where they belong.
    fn turn(&mut self, engine: &Engine, now: Instant, lazy: bool, wakes: &mut Wakes) -> Turn {
        let mut turn = Turn::default();
        let expired = self.needs().timer.is_some_and(|at| at <= now);
        for n in 0.. {
            if n == TURN.receptions {
                turn.more = true;
                break;
            }
            if !self.receive(engine, now) {
                turn.drained = true;
                break;
            }
            turn.worked = true;
            if lazy && !expired && self.port.has_completions() {
                self.owed_until = now + GRACE;
                self.settle(engine, now, &mut turn, wakes);
                return turn;
            }
            // What several ACKs make room for goes out in whole trains.
            if n % 4 == 3 {
                self.transmit(engine, now, TURN, &mut turn);
            }
        }
        if lazy && !expired && !turn.worked && now < self.owed_until {
            return turn;
        }
        // Behind what has come: an answer that lies in the socket is not missing.
        if expired && (turn.drained || self.is_overdue(now)) {
            self.expire(engine, now, wakes);
            turn.worked = true;
        }
        // Most looks of one who polls end here.
        if turn.worked || self.pending.is_some() || !self.port.is_quiet() {
            self.transmit(engine, now, TURN, &mut turn);
            self.settle(engine, now, &mut turn, wakes);
        }
        if let Some(tap) = &mut self.tap {
            tap.flush();
        }
        turn
    }

    /// Takes what one call of the socket gives. False: nothing.
    fn receive(&mut self, engine: &Engine, now: Instant) -> bool {
        let Self { socket, port, scratch, impairer, tap, trouble, closing, advanced, .. } = self;
        let datagram = match socket.recv_batch(scratch) {
            Ok(Some(datagram)) => datagram,
            Ok(None) => return false,
            Err(e) => {
                *trouble = Some((None, e.to_string()));
                return false;
            }
        };
        let way = (datagram.from, datagram.to);
        for octets in datagram.packets() {
            match impairer {
                None => {
                    if *closing > 0 {
                        advanced.extend(dest_qp(octets));
                    }
                    hand_over(port, tap, engine, now, way, datagram.ecn, octets);
                }
                Some(impairer) => {
                    let packet = Packet::with_meta(octets.to_vec(), way).with_ecn(datagram.ecn);
                    impairer.handle(now, packet);
                }
            }
        }
        self.hand_over_due(engine, now);
        true
    }

    /// Hands over the impaired packets whose time has come.
    fn hand_over_due(&mut self, engine: &Engine, now: Instant) {
        let Self { port, impairer: Some(impairer), tap, closing, advanced, .. } = self else {
            return;
        };
        while let Some((_, packet)) = impairer.poll_due(now) {
            if *closing > 0 {
                advanced.extend(dest_qp(&packet.octets));
            }
            hand_over(port, tap, engine, now, packet.meta, packet.ecn, &packet.octets);
        }
    }

    /// Whether a timer has waited long enough for the socket to be empty.
    fn is_overdue(&self, now: Instant) -> bool {
        self.needs().timer.is_some_and(|at| now.saturating_since(at) >= OVERDUE)
    }

    fn expire(&mut self, engine: &Engine, now: Instant, wakes: &mut Wakes) {
        self.hand_over_due(engine, now);
        if self.port.poll_timeout().is_some_and(|at| at <= now) {
            self.port.handle_timeout(now);
        }
        while let Some(&(at, qpn)) = self.ends.first().filter(|(at, _)| *at <= now) {
            self.ends.remove(&(at, qpn));
            if let Some(entry) = self.entries.get_mut(&qpn) {
                entry.end = None;
            }
            self.finish(engine, now, qpn, wakes);
        }
    }

    /// Sends what there is to be sent, as far as the socket takes it.
    fn transmit(&mut self, engine: &Engine, now: Instant, budget: Budget, turn: &mut Turn) {
        for n in 0.. {
            if let Some((way, sent)) = self.pending {
                if !self.send(engine, way, sent) {
                    turn.blocked = true;
                    return;
                }
                turn.worked = true;
                if self.pending.is_some() {
                    continue;
                }
            }
            if n >= budget.trains {
                turn.more = true;
                return;
            }
            let limits = Limits {
                max_packets: self.socket.max_packets(),
                answers: budget.answers,
                ..Limits::default()
            };
            let Self { port, train, .. } = self;
            match port.poll_transmit(now, &*engine.table, limits, train) {
                Some(way) => {
                    if let Some(tap) = &mut self.tap {
                        tap.outbound(&way, train);
                    }
                    if self.closing > 0 {
                        self.advanced.push(way.scope.qpn);
                    }
                    self.pending = Some((way, 0));
                }
                None => return,
            }
        }
    }

    /// Sends the pending train on. False: the socket takes no more.
    fn send(&mut self, engine: &Engine, way: Destination, sent: usize) -> bool {
        let Self { socket, train, .. } = self;
        let route = Route {
            to: way.to,
            from: engine.local.ip().is_unspecified().then_some(way.from.ip()),
            tos: way.tos,
            segment: train.segment_len(),
        };
        let pieces = std::iter::once(Piece::Bytes(train.octets()));
        match socket.send_train(&route, pieces, sent, &engine.table, way.scope) {
            Ok(n) if sent + n < train.len() => self.pending = Some((way, sent + n)),
            Ok(_) => self.pending = None,
            Err(SendError::WouldBlock) => return false,
            // It is lost like a packet on the way: it is sent again, or its work fails.
            Err(e) => {
                self.trouble = Some((Some(way.to.ip()), e.to_string()));
                self.pending = None;
            }
        }
        true
    }

    /// Completions to their futures and queues, events to whom they concern. Where a completion
    /// queue has overflowed, that is the end of its queue pairs. What that leads to is sent.
    fn settle(&mut self, engine: &Engine, now: Instant, turn: &mut Turn, wakes: &mut Wakes) {
        let mut acted = false;
        loop {
            self.deliver(wakes);
            let mut quiet = true;
            while let Some(event) = self.port.poll_event() {
                quiet = false;
                self.take_event(engine, now, event, wakes);
            }
            if self.fail_overflowed(now, wakes) {
                quiet = false;
            }
            while let Some(qpn) = self.advanced.pop() {
                let is_closing = self.entries.get(&qpn).is_some_and(|entry| entry.closing);
                if is_closing && self.port.qp(qpn).is_none_or(|qp| qp.unfinished_sends() == 0) {
                    self.stop_closing(qpn);
                    self.disconnect(now, qpn);
                    quiet = false;
                }
            }
            if quiet {
                break;
            }
            acted = true;
        }
        for srq in self.srqs.iter() {
            srq.settle(wakes);
        }
        if acted {
            self.transmit(engine, now, POST, turn);
        }
    }

    fn deliver(&mut self, wakes: &mut Wakes) {
        let Self { port, entries, fresh, .. } = self;
        let mut to: Option<&Cq> = None;
        let mut of: Option<&Entry> = None;
        while let Some((qpn, completion)) = port.poll_completion() {
            if of.is_none_or(|entry| entry.qp.qpn != qpn) {
                of = entries.get(&qpn);
            }
            let Some(entry) = of else { continue };
            let (qp, wc) = (&entry.qp, completion.wc);
            if qp.completes_awaited(completion.tag, wc, wakes) {
                continue;
            }
            let cq = if wc.opcode.is_recv() { &qp.init.recv_cq } else { &qp.init.send_cq };
            match to {
                Some(same) if same.is(cq) => {}
                Some(other) => {
                    other.push(fresh, wakes);
                    to = Some(cq);
                }
                None => to = Some(cq),
            }
            fresh.push(wc);
        }
        if let Some(cq) = to {
            cq.push(fresh, wakes);
        }
    }

    /// Queue pairs of completion queues that have overflowed go to the error state.
    fn fail_overflowed(&mut self, now: Instant, wakes: &mut Wakes) -> bool {
        // A look at one flag where nothing is wrong.
        if !wakes.overflowed {
            return false;
        }
        wakes.overflowed = false;
        let broken: Vec<_> = self
            .entries
            .values()
            .filter(|entry| entry.mode == Mode::Up && entry.qp.overflowed().is_some())
            .map(|entry| entry.qp.qpn)
            .collect();
        for &qpn in &broken {
            if self.port.qp(qpn).is_some_and(|qp| qp.state() != QpState::Err) {
                self.fail(now, qpn, CloseReason::Aborted, wakes);
            }
        }
        !broken.is_empty()
    }

    fn take_event(&mut self, engine: &Engine, now: Instant, event: Event, wakes: &mut Wakes) {
        match event {
            Event::Request(request) => self.take_request(engine, now, request, wakes),
            Event::Established { qpn, terms } => self.establish(engine, qpn, terms, wakes),
            Event::Rejected { qpn: Some(qpn), rejected } => {
                self.refused(now, qpn, Refusal::Rejected(rejected), wakes);
            }
            Event::TimedOut { qpn: Some(qpn), .. } | Event::Dropped { qpn: Some(qpn), .. } => {
                self.refused(now, qpn, Refusal::Silent, wakes);
            }
            Event::TimedOut { qpn: None, conn, .. } => {
                // Dropped, it tells that nobody answered.
                if let Some(asker) = self.questions.remove(&conn) {
                    wakes.later(move || drop(asker));
                }
            }
            Event::Disconnected { qpn, ended } => {
                let reason = match ended {
                    Ended::Local | Ended::Peer => CloseReason::Graceful,
                    Ended::TimedOut | Ended::Stale | Ended::Rejected(_) => CloseReason::Lost,
                };
                self.unlinked(engine, now, qpn, reason, wakes);
            }
            Event::QpError { qpn, reason } => self.take_error(now, qpn, reason, wakes),
            Event::Rejected { qpn: None, .. }
            | Event::Dropped { qpn: None, .. }
            | Event::FirstPacket { .. }
            | Event::Drained { .. } => {}
            Event::Service(event) => match &event {
                cm::Event::Resolved { conn, .. } | cm::Event::Unresolved { conn, .. } => {
                    if let Some(asker) = self.questions.remove(conn) {
                        wakes.later(move || drop(asker.send(event)));
                    }
                }
                _ => {}
            },
            _ => {}
        }
    }

    fn take_request(
        &mut self,
        engine: &Engine,
        now: Instant,
        request: Box<Request>,
        wakes: &mut Wakes,
    ) {
        let max = self
            .socket
            .path_mtu(request.cm.peer)
            .ok()
            .and_then(fitting)
            .map_or(PathMtu::Mtu256, |mtu| engine.mtu.map_or(mtu, |own| own.min(mtu)))
            .octets() as u16;
        if request.cm.mtu > max {
            count(&engine.counters.refused);
            let _ = self.port.reject(now, &request, &Reject::mtu(max));
            return;
        }
        let listener = self.listeners.get(&request.cm.service_id);
        match listener.map(|listener| listener.clone().try_reserve_owned()) {
            // Whoever waits for it is woken, and so without the lock.
            Some(Ok(place)) => wakes.later(move || drop(place.send(request))),
            Some(Err(_)) | None => {
                count(&engine.counters.refused);
                let crowded =
                    Reject { reason: RejectReason::NO_RESOURCES, ..Reject::consumer(&[]) };
                let _ = self.port.reject(now, &request, &crowded);
            }
        }
    }

    fn establish(&mut self, engine: &Engine, qpn: Qpn, terms: Box<Established>, wakes: &mut Wakes) {
        let Some(entry) = self.entries.get_mut(&qpn) else { return };
        count(&engine.counters.connections);
        entry.addresses = entry.addresses.map(|(local, _)| (local, terms.peer));
        entry.terms = Some(terms);
        let connecting = entry.connecting.take();
        self.bring_up(qpn, wakes);
        if let Some(connecting) = connecting {
            wakes.later(move || drop(connecting.send(Ok(()))));
        }
    }

    /// No connection came about. A queue pair that asked for it is as it was before.
    fn refused(&mut self, now: Instant, qpn: Qpn, refusal: Refusal, wakes: &mut Wakes) {
        let Some(entry) = self.entries.get_mut(&qpn) else { return };
        entry.linked = false;
        match entry.connecting.take() {
            Some(connecting) => {
                self.make_idle(qpn);
                wakes.later(move || drop(connecting.send(Err(refusal))));
            }
            None => self.fail(now, qpn, CloseReason::Lost, wakes),
        }
    }

    /// Gives a queue pair whose connection did not come about back to the program.
    fn make_idle(&mut self, qpn: Qpn) {
        let Some(entry) = self.entries.get_mut(&qpn) else { return };
        (entry.mode, entry.linked, entry.addresses) = (Mode::Idle, false, None);
        entry.parting = false;
        let qp = entry.qp.clone();
        let reset = self.port.modify(qpn, &QpAttr::to(QpState::Reset));
        debug_assert_eq!(reset, Ok(()), "every state leads to RESET");
        let prepared = self.prepare(qpn, &qp.init);
        debug_assert!(prepared.is_ok(), "it was prepared before");
    }

    /// What the program set, before anything else happens to a queue pair in RESET.
    fn prepare(&mut self, qpn: Qpn, init: &QpInit) -> Result<()> {
        let attr = QpAttr {
            access: Some(init.remote_access),
            min_rnr_timer: Some(init.min_rnr_timer),
            timeout: Some(init.timeout),
            retry_cnt: Some(init.retry_cnt),
            rnr_retry: Some(init.rnr_retry),
            max_rd_atomic: Some(depth(init.ord)),
            max_dest_rd_atomic: Some(depth(init.ird)),
            ..QpAttr::default()
        };
        self.port.modify(qpn, &attr)?;
        if let Some(srq) = &init.srq {
            self.port.share_receives(qpn, srq.receives())?;
        }
        Ok(())
    }

    /// Nobody waits for the connection any more.
    fn give_up(&mut self, now: Instant, qpn: Qpn, wakes: &mut Wakes) {
        let Some(entry) = self.entries.get_mut(&qpn) else { return };
        match entry.mode {
            Mode::Starting => {
                entry.connecting = None;
                // `Event::Disconnected` follows.
                let _ = self.port.disconnect(now, qpn);
            }
            // It came about just now.
            Mode::Up => self.fail(now, qpn, CloseReason::Aborted, wakes),
            Mode::Idle => {}
        }
    }

    /// The port has the queue pair from here on, with the receives posted so far.
    fn bring_up(&mut self, qpn: Qpn, wakes: &mut Wakes) {
        let Some(entry) = self.entries.get_mut(&qpn) else { return };
        entry.mode = Mode::Up;
        while let Some((wr, tag)) = entry.recvs.pop_front() {
            // It fits: it was checked against the same limits when it was posted.
            if self.port.post_recv(qpn, wr.clone(), tag).is_err() {
                entry.qp.flush(wr.id, tag, WcOpcode::RECV, wakes);
            }
        }
    }

    /// Our queue pair went to the error state by itself.
    fn take_error(&mut self, now: Instant, qpn: Qpn, reason: Reason, wakes: &mut Wakes) {
        let Some(entry) = self.entries.get(&qpn) else { return };
        let told = match reason {
            Reason::Responder(syndrome) => CloseReason::NakSent(syndrome),
            Reason::Receive => CloseReason::ReceiveFailed,
            _ => CloseReason::WorkFailed,
        };
        wakes.end(&entry.qp, told);
        self.stop_closing(qpn);
        // A NAK is to come before the end of the connection.
        let nak = matches!(reason, Reason::Responder(_));
        self.end_at(if nak { now + LAST_WORDS } else { now }, qpn);
    }

    /// Has a queue pair looked after at `at`, and not when it was said before.
    fn end_at(&mut self, at: Instant, qpn: Qpn) {
        let Some(entry) = self.entries.get_mut(&qpn) else { return };
        if let Some(before) = entry.end.replace(at) {
            self.ends.remove(&(before, qpn));
        }
        self.ends.insert((at, qpn));
    }

    /// There is no need to look after a queue pair any more.
    fn end_by_itself(&mut self, qpn: Qpn) {
        if let Some(entry) = self.entries.get_mut(&qpn)
            && let Some(at) = entry.end.take()
        {
            self.ends.remove(&(at, qpn));
        }
    }

    /// It does not wait for its sends any more.
    fn stop_closing(&mut self, qpn: Qpn) {
        if let Some(entry) = self.entries.get_mut(&qpn)
            && std::mem::take(&mut entry.closing)
        {
            self.closing -= 1;
        }
    }

    /// To the error state at once; the peer is told that the connection is over.
    fn fail(&mut self, now: Instant, qpn: Qpn, reason: CloseReason, wakes: &mut Wakes) {
        let Some(entry) = self.entries.get_mut(&qpn) else { return };
        wakes.end(&entry.qp, reason);
        if let Some(connecting) = entry.connecting.take() {
            wakes.later(move || drop(connecting.send(Err(Refusal::Aborted))));
        }
        while let Some((wr, tag)) = entry.recvs.pop_front() {
            entry.qp.flush(wr.id, tag, WcOpcode::RECV, wakes);
        }
        entry.mode = Mode::Up;
        self.stop_closing(qpn);
        self.disconnect(now, qpn);
        self.deliver(wakes);
    }

    /// Ends a connection; a queue pair without one goes to the error state.
    fn disconnect(&mut self, now: Instant, qpn: Qpn) {
        let Some(entry) = self.entries.get_mut(&qpn) else { return };
        if entry.linked && self.port.disconnect(now, qpn).is_ok() {
            // `Event::Disconnected` follows, when the peer has answered or was asked often enough.
            entry.parting = true;
            self.end_by_itself(qpn);
            return;
        }
        entry.linked = false;
        let _ = self.port.modify(qpn, &QpAttr::to(QpState::Err));
        self.end_at(now, qpn);
    }

    /// The connection manager has no connection for it any more.
    fn unlinked(
        &mut self,
        engine: &Engine,
        now: Instant,
        qpn: Qpn,
        reason: CloseReason,
        wakes: &mut Wakes,
    ) {
        let Some(entry) = self.entries.get_mut(&qpn) else { return };
        (entry.linked, entry.parting) = (false, false);
        if entry.mode == Mode::Starting {
            let connecting = entry.connecting.take();
            self.make_idle(qpn);
            if let Some(connecting) = connecting {
                wakes.later(move || drop(connecting.send(Err(Refusal::Silent))));
            }
            return;
        }
        wakes.end(&entry.qp, reason);
        let released = entry.released;
        self.stop_closing(qpn);
        self.end_by_itself(qpn);
        if released {
            self.deliver(wakes);
            engine.forget(self, now, qpn, wakes);
        }
    }

    /// The time has come to be done with a queue pair that ends.
    fn finish(&mut self, engine: &Engine, now: Instant, qpn: Qpn, wakes: &mut Wakes) {
        let Some(entry) = self.entries.get(&qpn) else { return };
        let state = self.port.qp(qpn).map(roce::Qp::state);
        if entry.closing {
            // Its sends were not done in time.
            self.fail(now, qpn, CloseReason::Lost, wakes);
            return;
        }
        if state != Some(QpState::Err) {
            return;
        }
        if entry.linked {
            self.disconnect(now, qpn);
            return;
        }
        let released = entry.released;
        wakes.end(&entry.qp, CloseReason::Graceful);
        if released {
            self.deliver(wakes);
            engine.forget(self, now, qpn, wakes);
        }
    }
}

/// Hands a packet to the port.
fn hand_over(
    port: &mut Port,
    tap: &mut Option<Tap>,
    engine: &Engine,
    now: Instant,
    (from, to): Way,
    ecn: u8,
    octets: &[u8],
) {
    if let Some(tap) = tap {
        tap.inbound(from, SocketAddr::new(to, engine.local.port()), ecn, octets);
    }
    port.handle_datagram(now, from, Some(to), ecn, octets, &*engine.table);
}

/// The queue pair that a packet is for (IBTA vol. 1, 9.2: octets 5 to 7 of the BTH).
fn dest_qp(octets: &[u8]) -> Option<Qpn> {
    let &[a, b, c] = octets.get(5..8)? else { return None };
    Some(Qpn(u32::from_be_bytes([0, a, b, c])))
}

impl Member {
    pub(crate) fn new(engine: Arc<Engine>) -> Self {
        Self(engine)
    }

    pub(crate) fn engine(&self) -> &Arc<Engine> {
        &self.0
    }

    /// Posts send work with its tags under one lock and with one doorbell.
    pub(super) fn post_send(
        &self,
        qp: &QpShared,
        wrs: impl Iterator<Item = (SendWr, u64)>,
    ) -> Result<(), (usize, PostError)> {
        self.0.locked(|core, _| {
            let refused = match core.entries.get(&qp.qpn) {
                Some(entry) if entry.mode != Mode::Up => Some(QpState::Init),
                Some(entry) if entry.closing => Some(QpState::Sqd),
                _ => None,
            };
            for (taken, (wr, tag)) in wrs.enumerate() {
                let posted = qp.may_post(tag, &qp.init.send_cq).and_then(|()| {
                    if let Some(state) = refused {
                        return Err(PostError::BadState(state));
                    }
                    core.port.post_send(qp.qpn, wr, tag).map_err(post_error)
                });
                posted.map_err(|e| (taken, e))?;
            }
            Ok(())
        })
    }

    /// Posts receives with their tags under one lock.
    pub(super) fn post_recv(
        &self,
        qp: &QpShared,
        wrs: impl Iterator<Item = (RecvWr, u64)>,
    ) -> Result<(), (usize, PostError)> {
        let mut wakes = Wakes::default();
        let result = {
            let mut core = self.0.core.lock();
            let posted = core.post_recvs(qp, wrs);
            // In the error state they complete at once; otherwise there is nothing to send.
            if core.port.has_completions() {
                let (before, mut turn) = (core.needs(), Turn::default());
                core.settle(&self.0, self.0.clock.now(), &mut turn, &mut wakes);
                self.0.left(before, core.needs(), turn);
            }
            posted
        };
        wakes.call();
        result
    }

    pub(super) fn state(&self, qpn: Qpn) -> QpState {
        let core = self.0.core.lock();
        match (core.entries.get(&qpn), core.port.qp(qpn)) {
            // As verbs show it that have a connection manager.
            (Some(entry), _) if entry.mode != Mode::Up => QpState::Init,
            (Some(entry), Some(_)) if entry.closing => QpState::Sqd,
            (_, Some(qp)) => qp.state(),
            (_, None) => QpState::Err,
        }
    }

    pub(super) fn addresses(&self, qpn: Qpn) -> Option<(SocketAddr, SocketAddr)> {
        let core = self.0.core.lock();
        core.entries.get(&qpn).filter(|entry| entry.mode == Mode::Up)?.addresses
    }

    /// What the connection manager settled.
    pub(crate) fn terms(&self, qpn: Qpn) -> Option<Established> {
        self.0.core.lock().entries.get(&qpn)?.terms.as_deref().cloned()
    }

    /// The attributes in force, and the counters.
    pub(crate) fn look(&self, qpn: Qpn) -> Option<(roce::Attributes, roce::Stats)> {
        let core = self.0.core.lock();
        core.port.qp(qpn).map(|qp| (*qp.attributes(), *qp.stats()))
    }

    /// Moves the queue pair as the program says.
    pub(crate) fn modify(&self, qpn: Qpn, attr: &QpAttr) -> Result<()> {
        if let (Some(mtu), Some(peer)) = (attr.path_mtu, attr.peer) {
            let fits = self.0.path_mtu(peer)?;
            if mtu > fits {
                return Err(Error::BadAddress(format!(
                    "a path MTU of {} octets does not fit the route to {}: take {} at most",
                    mtu.octets(),
                    peer.ip(),
                    fits.octets()
                )));
            }
        }
        let mut attr = *attr;
        if let (None, Some(peer)) = (attr.local, attr.peer) {
            let local = self.0.source_toward(peer)?;
            attr.local = Some(SocketAddr::new(local, self.0.local.port()));
        }
        self.0.locked(|core, wakes| {
            let mode = core.mode(qpn);
            if mode == Some(Mode::Starting) || core.entries.get(&qpn).is_some_and(|e| e.linked) {
                return Err(Error::State("the connection manager moves this queue pair"));
            }
            if attr.state == Some(QpState::Reset) {
                return core.reset(qpn, &attr, wakes);
            }
            core.port.modify(qpn, &attr)?;
            let Some(entry) = core.entries.get_mut(&qpn) else { return Ok(()) };
            if let Some((local, peer)) = attr.local.zip(attr.peer) {
                entry.addresses = Some((local, peer));
            }
            match attr.state {
                // From INIT on the port takes receives.
                Some(_) if mode == Some(Mode::Idle) => core.bring_up(qpn, wakes),
                Some(_) | None => {}
            }
            if attr.state == Some(QpState::Err) {
                core.fail(self.0.clock.now(), qpn, CloseReason::Aborted, wakes);
            }
            Ok(())
        })
    }

    pub(super) fn close(&self, qpn: Qpn) {
        let now = self.0.clock.now();
        self.0.locked(|core, wakes| {
            let Some(entry) = core.entries.get(&qpn) else { return };
            let state = core.port.qp(qpn).map(roce::Qp::state);
            match entry.mode {
                Mode::Idle | Mode::Starting => core.fail(now, qpn, CloseReason::Aborted, wakes),
                // An end under way goes on: a NAK comes before the disconnect.
                Mode::Up if entry.ends() => {}
                Mode::Up if state == Some(QpState::Err) => core.disconnect(now, qpn),
                Mode::Up => {
                    let until = now + entry.qp.init.close_timeout;
                    core.begin_closing(until, qpn);
                }
            }
        });
        self.0.kick.notify_one();
    }

    pub(super) fn abort(&self, qpn: Qpn) {
        let now = self.0.clock.now();
        self.0.locked(|core, wakes| core.fail(now, qpn, CloseReason::Aborted, wakes));
        self.0.kick.notify_one();
    }

    /// The last handle is gone. An end that is under way goes on.
    pub(super) fn release(&self, qpn: Qpn) {
        let now = self.0.clock.now();
        self.0.locked(|core, wakes| {
            let Some(entry) = core.entries.get_mut(&qpn) else { return };
            entry.released = true;
            if !entry.ends() {
                core.fail(now, qpn, CloseReason::Aborted, wakes);
            }
            // Without the task nobody would come back for it.
            if self.0.over.load(Ordering::Acquire) {
                self.0.forget(core, now, qpn, wakes);
            }
        });
        self.0.kick.notify_one();
    }
}

impl Core {
    fn mode(&self, qpn: Qpn) -> Option<Mode> {
        self.entries.get(&qpn).map(|entry| entry.mode)
    }

    /// A queue pair disconnects when its sends are done, or at `until`.
    fn begin_closing(&mut self, until: Instant, qpn: Qpn) {
        let Some(entry) = self.entries.get_mut(&qpn) else { return };
        entry.closing = true;
        self.closing += 1;
        self.advanced.push(qpn);
        self.end_at(until, qpn);
    }

    /// To RESET, as it was made: what is posted is dropped without completions. Who awaits some of
    /// it hears of that all the same.
    fn reset(&mut self, qpn: Qpn, attr: &QpAttr, wakes: &mut Wakes) -> Result<()> {
        // All that may be wrong with it.
        self.port.modify(qpn, &QpAttr { state: None, ..*attr })?;
        self.stop_closing(qpn);
        self.end_by_itself(qpn);
        let Some(entry) = self.entries.get_mut(&qpn) else { return Ok(()) };
        (entry.mode, entry.addresses, entry.terms) = (Mode::Up, None, None);
        let qp = entry.qp.clone();
        let flushed = |wr: RecvWr| Wc {
            id: wr.id,
            status: WcStatus::WR_FLUSH_ERR,
            opcode: WcOpcode::RECV,
            qpn,
            ..Wc::default()
        };
        for (wr, tag) in entry.recvs.drain(..) {
            qp.completes_awaited(tag, flushed(wr), wakes);
        }
        // Those of other queue pairs went to their queues before the lock was given up.
        self.port.modify(qpn, &QpAttr::to(QpState::Err))?;
        while let Some((_, completion)) = self.port.poll_completion() {
            qp.completes_awaited(completion.tag, completion.wc, wakes);
        }
        self.port.modify(qpn, &QpAttr::to(QpState::Reset))?;
        self.prepare(qpn, &qp.init)?;
        self.port.modify(qpn, &QpAttr { state: None, ..*attr })?;
        qp.begin_again();
        Ok(())
    }

    fn post_recvs(
        &mut self,
        qp: &QpShared,
        wrs: impl Iterator<Item = (RecvWr, u64)>,
    ) -> Result<(), (usize, PostError)> {
        let Self { entries, port, .. } = self;
        let mut entry = entries.get_mut(&qp.qpn);
        for (taken, (wr, tag)) in wrs.enumerate() {
            let posted = qp.may_post(tag, &qp.init.recv_cq).and_then(|()| match &mut entry {
                Some(entry) if entry.mode != Mode::Up => entry.keep(wr, tag),
                _ => port.post_recv(qp.qpn, wr, tag).map_err(post_error),
            });
            posted.map_err(|e| (taken, e))?;
        }
        Ok(())
    }
}

impl Entry {
    /// Whether an end is under way.
    fn ends(&self) -> bool {
        self.closing || self.parting && self.linked || self.end.is_some()
    }

    /// Keeps a receive until there is a connection.
    fn keep(&mut self, wr: RecvWr, tag: u64) -> Result<(), PostError> {
        let init = &self.qp.init;
        if init.srq.is_some() {
            return Err(PostError::SharedReceives);
        }
        wr.check(init.max_sge)?;
        if self.recvs.len() >= init.max_recv_wr {
            return Err(PostError::QueueFull { max: init.max_recv_wr });
        }
        self.recvs.push_back((wr, tag));
        Ok(())
    }
}

/// What the port says of a post.
fn post_error(e: PortError) -> PostError {
    match e {
        PortError::Post(e) => e,
        // It is there as long as its handle.
        _ => PostError::BadState(QpState::Err),
    }
}

/// An engine in the hands of its task. Where the task goes first, with its runtime, nobody would
/// watch the socket any more, and who sleeps would sleep for ever: everything ends then.
struct Driven(Arc<Engine>);

impl Drop for Driven {
    fn drop(&mut self) {
        if !self.0.over.load(Ordering::Acquire) {
            self.0.abandon();
        }
    }
}

/// The task of a device. Ends with it.
async fn drive(driven: Driven) {
    let engine = &*driven.0;
    let clock = engine.clock;
    let mut armed = None;
    let mut spin_until = clock.now();
    let mut turn = Turn { more: true, ..Turn::default() };
    loop {
        let now = clock.now();
        if engine.over.load(Ordering::Acquire) {
            return;
        }
        if turn.told {
            // Somebody was woken who spins himself; spinning here would take his processor.
            spin_until = now;
        } else if turn.worked {
            spin_until = now + engine.spin;
        }
        if engine.is_polled(now) {
            armed = None;
            engine.unarmed.store(true, Ordering::SeqCst);
            // Who went to sleep before this was seen did not kick: look once more.
            if !engine.is_awaited() {
                engine.pause().await;
            }
            // Where the lock is taken somebody turns already, and to wait for it would cost him
            // more than it brings.
            turn = engine.turn_beside(clock.now());
            continue;
        }
        if engine.unarmed.swap(false, Ordering::SeqCst) {
            // Whoever polled last may have left something to be sent, and held the lock when the
            // task came by.
            turn = engine.turn(clock.now());
            continue;
        }
        if turn.more {
            // One bounded turn after another, with the runtime's other tasks in between.
            tokio::task::yield_now().await;
            turn = engine.turn(clock.now());
            continue;
        }
        if now < spin_until {
            tokio::task::yield_now().await;
            turn = engine.turn(clock.now());
            continue;
        }
        let needs = engine.core.lock().needs();
        let fd = match armed.take() {
            Some(fd) => fd,
            None => {
                let watched = engine.core.lock().socket.watch();
                match watched {
                    Ok(fd) => fd,
                    // No room in epoll: look by timer.
                    Err(_) => {
                        engine.pause().await;
                        turn = engine.turn(clock.now());
                        continue;
                    }
                }
            }
        };
        let interest =
            if needs.room { Interest::READABLE | Interest::WRITABLE } else { Interest::READABLE };
        tokio::select! {
            guard = fd.ready(interest) => {
                turn = engine.turn(clock.now());
                if let Ok(mut guard) = guard {
                    if turn.drained {
                        guard.clear_ready_matching(Ready::READABLE);
                    }
                    if turn.blocked {
                        guard.clear_ready_matching(Ready::WRITABLE);
                    }
                }
            }
            () = engine.kick.notified() => turn = engine.turn(clock.now()),
            () = until(clock, needs.timer) => turn = engine.turn(clock.now()),
        }
        armed = Some(fd);
    }
}

impl Engine {
    /// A turn of the task, unless somebody else turns.
    fn turn_beside(&self, now: Instant) -> Turn {
        match self.core.try_lock() {
            Some(core) => self.turn_with(core, now, false),
            None => Turn::default(),
        }
    }

    /// A short sleep without the socket. Timers wait for its end at most, and who polls sees to
    /// them before.
    async fn pause(&self) {
        tokio::select! {
            () = tokio::time::sleep(LOOK) => {}
            () = self.kick.notified() => {}
        }
    }
}

impl fmt::Debug for Engine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Engine").field("local", &self.local).finish_non_exhaustive()
    }
}
