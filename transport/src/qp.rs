//! Queue pairs: the posting face of verbs, and the awaiting one.

use std::{
    fmt,
    future::Future,
    net::SocketAddr,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::task::coop;
use userdma_proto::{
    iwarp::{Config, Established, MpaOptions, Stats},
    mem::PdId,
    roce::{self, Attributes, PathMtu, QpAttr, cm},
    time::Instant,
    verbs::{
        Access, PostError, QpState, QpType, RecvWr, RemoteAddr, SendOp, SendWr, Sge, Wc, WcStatus,
    },
    wire::ids::{Psn, QKey, Qpn},
};

use crate::{
    cq::Cq,
    device::DeviceShared,
    engine::{QpShared, Start, datagram::Member},
    error::{CloseReason, Error, Result},
    mr::{Mr, Region},
    pd::Pd,
    srq::Srq,
};

/// Settings of a queue pair.
#[derive(Debug, Clone)]
pub struct QpInit {
    /// RC, UC or UD. iWARP has RC alone.
    pub kind: QpType,
    /// Where completions of sends, WRITEs, READs and atomics go.
    pub send_cq: Cq,
    /// Where completions of receives go. May be the same queue.
    pub recv_cq: Cq,
    /// Where receives come from, shared with other queue pairs of the same domain; `None`: the
    /// queue pair has a queue of its own, which [`Qp::post_recv`] fills.
    pub srq: Option<Srq>,
    /// Length of the send queue: work that is posted and not completed, unsignalled work too.
    pub max_send_wr: usize,
    /// Length of the receive queue; means nothing where [`QpInit::srq`] is set.
    pub max_recv_wr: usize,
    /// Pieces that a work request may have; of a shared receive, [`Pd::create_srq`] says.
    pub max_sge: usize,
    /// Octets of inline data that a work request may have.
    pub max_inline: usize,
    /// What the peer may do through this queue pair at all, whatever its regions allow:
    /// [`Access::REMOTE_WRITE`], [`Access::REMOTE_READ`], [`Access::REMOTE_ATOMIC`], and of RoCE
    /// [`Access::FLUSH_GLOBAL`], [`Access::FLUSH_PERSISTENT`].
    pub remote_access: Access,
    /// READs and atomics of the peer that are served at a time: 0 to 16,383, of RoCE at most 255.
    pub ird: u16,
    /// READs and atomics that are outstanding at a time, as many at most; others wait in the queue.
    pub ord: u16,
    /// iWARP: what is said in the MPA start-up.
    pub mpa: MpaOptions,
    /// How long opening TCP, and then MPA's start-up, may take each; of RoCE the connection
    /// manager's exchange.
    pub startup_timeout: Duration,
    /// How long a graceful close may take before TCP is reset, or what is outstanding is flushed.
    pub close_timeout: Duration,
    /// RoCE: the path MTU to ask for, bounded by what the route takes; `None`: as much as it takes.
    pub mtu: Option<PathMtu>,
    /// RoCE: code `t` of the time after which a missing acknowledgement is missed, 4.096 µs × 2^t;
    /// 14 (67 ms) by default, at most 31, 0 for never.
    pub timeout: u8,
    /// RoCE: how often it is tried again then, 0 to 7, each time with twice the patience, up to 16
    /// times the first: for 5.7 s by default.
    pub retry_cnt: u8,
    /// RoCE: how often the peer is to try again where no receive is posted, and how often we do, 0
    /// to 7; 7, the default, is for ever.
    pub rnr_retry: u8,
    /// RoCE: code of the time that the peer is to wait where no receive is posted, 0 to 31; 12
    /// (0.64 ms) by default.
    pub min_rnr_timer: u8,
    /// RoCE: traffic class of the connection's packets, the octet of DSCP and ECN.
    pub traffic_class: u8,
}

impl QpInit {
    /// The defaults, with one queue for all completions: 128 sends, 128 receives, 16 pieces, 256
    /// octets inline, 16 READs each way, CRC on, no markers.
    pub fn new(cq: &Cq) -> Self {
        let config = Config::new(PdId(0), Qpn(0), 0);
        let attr = Attributes::default();
        Self {
            kind: QpType::Rc,
            send_cq: cq.clone(),
            recv_cq: cq.clone(),
            srq: None,
            max_send_wr: config.max_send_wr,
            max_recv_wr: config.max_recv_wr,
            max_sge: config.max_sge,
            max_inline: config.max_inline,
            remote_access: config.remote_access | attr.access,
            ird: config.ird,
            ord: config.ord,
            mpa: config.mpa,
            startup_timeout: config.startup_timeout,
            close_timeout: config.close_timeout,
            mtu: None,
            timeout: attr.timeout,
            retry_cnt: attr.retry_cnt,
            rnr_retry: attr.rnr_retry,
            min_rnr_timer: attr.min_rnr_timer,
            traffic_class: 0,
        }
    }

    /// The same settings for a queue pair of another type.
    #[must_use]
    pub fn kind(mut self, kind: QpType) -> Self {
        self.kind = kind;
        self
    }

    /// The same settings, with receives taken from `srq`.
    #[must_use]
    pub fn srq(mut self, srq: &Srq) -> Self {
        self.srq = Some(srq.clone());
        self
    }
}

/// Queue pair: one end of a connection. Cheap to clone; when the last clone is dropped the
/// connection is aborted and work that is outstanding completes as flushed. An end that is under
/// way ([`QpState::Err`]) goes on by itself.
///
/// Posting is what verbs call `ibv_post_send` and `ibv_post_recv`: the call returns at once, and the
/// completion goes to a [`Cq`]. The awaiting calls ([`Qp::send`], [`Qp::write`], [`Qp::submit`], …)
/// post when they are first polled; their completion goes to the future and to no queue. None of
/// them is undone by dropping its future: the operation goes on, its completion is dropped. In that
/// sense they are cancel safe; what a cancelled [`Qp::recv`] receives lands in its memory unseen.
#[derive(Clone)]
pub struct Qp(Arc<Handle>);

/// What the clones share: dropped with the last of them, while the task may live on for a moment.
struct Handle(Arc<QpShared>);

impl Qp {
    pub(crate) fn new(device: Arc<DeviceShared>, pd: Pd, init: QpInit) -> Result<Self> {
        if let Some(cq) = [&init.send_cq, &init.recv_cq].into_iter().find(|cq| cq.is_broken()) {
            return Err(Error::CqOverflow(cq.depth()));
        }
        if let Some(srq) = &init.srq {
            srq.attach(&pd)?;
        }
        let made = Self::make(device, pd, init.clone());
        if let (Err(_), Some(srq)) = (&made, &init.srq) {
            srq.detach();
        }
        let shared = made?;
        shared.init.send_cq.attach(&shared);
        if !shared.init.recv_cq.is(&shared.init.send_cq) {
            shared.init.recv_cq.attach(&shared);
        }
        Ok(Self(Arc::new(Handle(shared))))
    }

    fn make(device: Arc<DeviceShared>, pd: Pd, init: QpInit) -> Result<Arc<QpShared>> {
        let Some(engine) = device.engine().cloned() else {
            if init.kind != QpType::Rc {
                return Err(Error::Unsupported("iWARP has reliable connections only (QpType::Rc)"));
            }
            let qpn = device.allocate()?;
            return Ok(Arc::new(QpShared::over_tcp(device, pd, init, qpn)));
        };
        let config = roce::Config {
            max_send_wr: init.max_send_wr,
            max_recv_wr: init.max_recv_wr,
            max_sge: init.max_sge,
            max_inline: init.max_inline,
            ecn: device.options.roce.ecn,
            backoff: true,
            ..roce::Config::new(init.kind, pd.id(), Qpn(0))
        };
        let qpn = engine.create_qp(config, &init)?;
        let member = Member::new(engine.clone());
        let shared = Arc::new(QpShared::over_udp(device, pd, init, qpn, member));
        engine.adopt(&shared);
        Ok(shared)
    }

    pub(crate) fn shared(&self) -> &Arc<QpShared> {
        &self.0.0
    }

    pub(crate) fn begin(&self) -> Result<Start> {
        if self.shared().member().is_some() {
            return Err(Error::State(
                "the queue pair is one of RoCEv2: an iWARP connection needs one of a tcp:// device",
            ));
        }
        self.shared().begin().map_err(|state| {
            Error::State(match state {
                QpState::Init => "the queue pair is being connected already",
                QpState::Err => "the queue pair is in the error state: make a new one",
                _ => "the queue pair is connected already",
            })
        })
    }

    /// Its number: 24 bits, unique on its device.
    pub fn qpn(&self) -> Qpn {
        self.shared().qpn
    }

    /// Its state. [`QpState::Init`] until it is connected or accepted, [`QpState::Rts`] then;
    /// [`QpState::Sqd`] while it closes and [`QpState::Err`] once the peer has closed, or anything
    /// went wrong.
    pub fn state(&self) -> QpState {
        self.shared().state()
    }

    /// The protection domain.
    pub fn pd(&self) -> &Pd {
        &self.shared().pd
    }

    /// The settings it was made with.
    pub fn init(&self) -> &QpInit {
        &self.shared().init
    }

    /// The peer's TCP address, of RoCE its UDP address, once connected.
    pub fn peer_addr(&self) -> Option<SocketAddr> {
        self.shared().addresses().map(|(_, peer)| peer)
    }

    /// Our own address, once connected.
    pub fn local_addr(&self) -> Option<SocketAddr> {
        self.shared().addresses().map(|(local, _)| local)
    }

    /// Private data of the peer's reply; empty where we accepted, or are not connected.
    pub fn private_data(&self) -> Vec<u8> {
        let terms = self.terms().map(|terms| terms.private_data);
        terms.or_else(|| self.established().map(|e| e.private_data)).unwrap_or_default()
    }

    /// RoCE: what the connection manager settled, once connected; `None` on iWARP.
    pub fn terms(&self) -> Option<cm::Established> {
        self.shared().member()?.terms(self.qpn())
    }

    /// RoCE: the attributes in force, as `ibv_query_qp` shows them; `None` on iWARP.
    pub fn attributes(&self) -> Option<Attributes> {
        Some(self.shared().member()?.look(self.qpn())?.0)
    }

    /// RoCE: the queue pair's counters; `None` on iWARP.
    pub fn roce_stats(&self) -> Option<roce::Stats> {
        Some(self.shared().member()?.look(self.qpn())?.1)
    }

    /// RoCE: sets attributes of the queue pair and moves it, as `ibv_modify_qp` does, for programs
    /// that exchange numbers and addresses by themselves: RESET, INIT, RTR, RTS, and from any state
    /// to ERR. [`QpAttr`] tells what each step needs; where [`QpAttr::local`] is left out it is our
    /// address toward the peer. A queue pair that [`Device::connect`](crate::Device::connect) or
    /// [`ConnRequest::accept`](crate::ConnRequest::accept) brings up needs none of it.
    ///
    /// # Errors
    /// [`Error::Port`] for a step that there is not, a missing attribute or one out of its range,
    /// [`Error::BadAddress`] for a path MTU that the route does not take, [`Error::State`] where the
    /// connection manager has the queue pair, [`Error::Unsupported`] on iWARP. Nothing changed.
    pub fn modify(&self, attr: &QpAttr) -> Result<()> {
        let Some(member) = self.shared().member() else {
            return Err(Error::Unsupported(
                "iWARP queue pairs are moved by their connection alone",
            ));
        };
        member.modify(self.qpn(), attr)
    }

    /// UD: brings the queue pair from RESET or INIT to RTS in one step. It takes datagrams that
    /// carry `qkey`; those that it sends are as long as the path MTU `mtu` at most.
    ///
    /// # Errors
    /// As [`Qp::modify`]. On a device that is bound to all addresses it is not known from which one to
    /// send: do the three steps with [`QpAttr::local`] in the second.
    pub fn open_datagram(&self, qkey: QKey, mtu: PathMtu) -> Result<()> {
        self.modify(&QpAttr { qkey: Some(qkey), ..QpAttr::to(QpState::Init) })?;
        self.modify(&QpAttr { path_mtu: Some(mtu), ..QpAttr::to(QpState::Rtr) })?;
        self.modify(&QpAttr { sq_psn: Some(Psn::new(0)), ..QpAttr::to(QpState::Rts) })
    }

    /// iWARP: what the start-up settled, once connected.
    pub fn established(&self) -> Option<Established> {
        self.shared().with_connection(|conn| conn.established().cloned()).flatten()
    }

    /// iWARP: the connection's counters; all zero before it is connected, and on RoCE
    /// ([`Qp::roce_stats`]).
    pub fn stats(&self) -> Stats {
        self.shared().with_connection(|conn| *conn.stats()).unwrap_or_default()
    }

    /// Posts a send work request, and sends as much as the socket takes.
    ///
    /// In [`QpState::Err`] it is taken and completes as flushed. A request whose keys or bounds are
    /// wrong is taken, completes with an error and breaks the connection, as verbs have it.
    ///
    /// # Errors
    /// Nothing changed: the queue is full, the request cannot be, or the queue pair is not
    /// connected.
    pub fn post_send(&self, wr: SendWr) -> Result<(), PostError> {
        self.shared().post_send([wr]).map_err(|(_, e)| e)
    }

    /// Posts all of `wrs` with one doorbell: many small messages leave in one system call.
    ///
    /// # Errors
    /// `(n, e)`: the first `n` were posted, number `n` was refused because of `e`.
    pub fn post_send_batch(
        &self,
        wrs: impl IntoIterator<Item = SendWr>,
    ) -> Result<(), (usize, PostError)> {
        self.shared().post_send(wrs)
    }

    /// Posts a receive: the place of the peer's next SEND that has none yet. Allowed in every
    /// state; in [`QpState::Err`] it completes as flushed.
    ///
    /// # Errors
    /// Nothing changed: the queue is full, there are too many pieces, or the receives come from an
    /// [`Srq`] ([`PostError::SharedReceives`]).
    pub fn post_recv(&self, wr: RecvWr) -> Result<(), PostError> {
        self.shared().post_recv([wr]).map_err(|(_, e)| e)
    }

    /// Posts receives under one lock.
    ///
    /// # Errors
    /// As [`Qp::post_send_batch`].
    pub fn post_recv_batch(
        &self,
        wrs: impl IntoIterator<Item = RecvWr>,
    ) -> Result<(), (usize, PostError)> {
        self.shared().post_recv(wrs)
    }

    /// Closes in order: what is posted is carried out, then both sides close. Returns how it ended;
    /// a peer that does not close within [`QpInit::close_timeout`] is reset. Dropping the future
    /// does not stop the closing. Meanwhile no send is taken.
    ///
    /// RoCE: once all sends are acknowledged, or the time is over, the connection manager disconnects,
    /// and both sides flush what is left. A peer that does not answer that is asked three times more,
    /// and given up after 4 s ([`CloseReason::Lost`]).
    ///
    /// The peer's side closes by itself once its own work is done: a peer that sends FIN has
    /// nothing more to say, so receives are flushed and the state is [`QpState::Err`], as the
    /// kernel's iWARP and rdma_cm's `DISCONNECTED` have it.
    pub async fn disconnect(&self) -> CloseReason {
        self.shared().close();
        self.closed().await
    }

    /// To the error state at once: outstanding work completes as flushed, TCP is reset.
    pub fn abort(&self) {
        self.shared().abort();
    }

    /// Waits until the connection has ended, whoever ended it, and tells how. Returns at once where
    /// it has. Cancel safe.
    ///
    /// A peer whose host has gone without a word is noticed after two minutes of silence, or, where
    /// octets of ours are on their way, when TCP gives up (some 15 minutes by Linux' defaults).
    pub async fn closed(&self) -> CloseReason {
        let mut ended = self.shared().ended.subscribe();
        match ended.wait_for(Option::is_some).await {
            Ok(reason) => reason.clone().unwrap_or(CloseReason::Lost),
            // The sender lives as long as `self`.
            Err(_) => CloseReason::Lost,
        }
    }

    /// How the connection ended, if it has.
    pub fn close_reason(&self) -> Option<CloseReason> {
        self.shared().ended.borrow().clone()
    }

    /// Sends `sge`; done when its octets may be reused. That proves nothing at the peer: an answer of
    /// its program does, and [`Qp::closed`] tells of a refusal.
    ///
    /// # Errors
    /// [`Error::Post`] where it was not taken, [`Error::Wc`] where it failed.
    pub async fn send(&self, sge: Sge) -> Result<()> {
        self.submit(SendWr::send(0, [sge])).await.map(drop)
    }

    /// Receives the peer's next SEND into `sge`. A queue pair with an [`Srq`] has no receives of its
    /// own to wait for, and refuses this.
    ///
    /// # Errors
    /// As [`Qp::send`].
    pub async fn recv(&self, sge: Sge) -> Result<Wc> {
        let slot = self.shared().post_recv_awaited(RecvWr::new(0, [sge]), None)?;
        succeeded(self.completion(slot).await.0)
    }

    /// Writes `sge` into the peer's memory; done when its octets may be reused. That proves nothing
    /// at the peer, not even that the key was right: a refusal ends the connection, and
    /// [`Qp::closed`] tells why. An answer to a later SEND, or a [`Qp::read`] behind it, proves that
    /// it was placed.
    ///
    /// # Errors
    /// As [`Qp::send`].
    pub async fn write(&self, sge: Sge, remote: RemoteAddr) -> Result<()> {
        self.submit(SendWr::write(0, [sge], remote)).await.map(drop)
    }

    /// Reads the peer's memory into `sge`.
    ///
    /// # Errors
    /// As [`Qp::send`].
    pub async fn read(&self, sge: Sge, remote: RemoteAddr) -> Result<()> {
        self.submit(SendWr::read(0, [sge], remote)).await.map(drop)
    }

    /// Adds `add` to the peer's 8-octet word at `remote` and returns what it was before.
    ///
    /// # Errors
    /// As [`Qp::send`].
    pub async fn fetch_add(&self, remote: RemoteAddr, add: u64) -> Result<u64> {
        self.atomic(SendOp::FetchAdd { remote, add, mask: 0 }).await
    }

    /// Replaces the peer's 8-octet word at `remote` by `swap` where it is `compare`, and returns
    /// what it was before.
    ///
    /// # Errors
    /// As [`Qp::send`].
    pub async fn cmp_swap(&self, remote: RemoteAddr, compare: u64, swap: u64) -> Result<u64> {
        let (compare_mask, swap_mask) = (u64::MAX, u64::MAX);
        self.atomic(SendOp::CmpSwap { remote, compare, swap, compare_mask, swap_mask }).await
    }

    /// Any send work request, awaited, signalled or not.
    ///
    /// # Errors
    /// As [`Qp::send`].
    pub async fn submit(&self, wr: SendWr) -> Result<Wc> {
        let slot = self.shared().post_awaited(wr, None)?;
        succeeded(self.completion(slot).await.0)
    }

    /// Sends a buffer that is moved in and given back: no registered memory is needed. An empty one
    /// is an empty message. Where the future is dropped, so is the buffer, once it is sent.
    pub async fn send_lent(&self, buf: Vec<u8>) -> (Vec<u8>, Result<()>) {
        if buf.is_empty() {
            return (buf, self.submit(SendWr::send(0, [])).await.map(drop));
        }
        let (mr, sge) = match self.lend(buf, Access::empty()) {
            Ok(lent) => lent,
            Err(e) => return (Vec::new(), Err(e)),
        };
        match self.shared().post_awaited(SendWr::send(0, [sge]), Some(mr.clone())) {
            Ok(slot) => {
                drop(mr);
                let (wc, mr) = self.completion(slot).await;
                (give_back(mr), succeeded(wc).map(drop))
            }
            Err(e) => (give_back(Some(mr)), Err(e.into())),
        }
    }

    /// Receives the peer's next SEND into `buf`, up to its length, and gives it back cut to what
    /// came.
    pub async fn recv_lent(&self, buf: Vec<u8>) -> (Vec<u8>, Result<Wc>) {
        let posted = if buf.is_empty() {
            self.shared().post_recv_awaited(RecvWr::default(), None).map_err(|e| (e, buf))
        } else {
            let (mr, sge) = match self.lend(buf, Access::LOCAL_WRITE) {
                Ok(lent) => lent,
                Err(e) => return (Vec::new(), Err(e)),
            };
            let posted = self.shared().post_recv_awaited(RecvWr::new(0, [sge]), Some(mr.clone()));
            posted.map_err(|e| (e, give_back(Some(mr))))
        };
        let slot = match posted {
            Ok(slot) => slot,
            Err((e, buf)) => return (buf, Err(e.into())),
        };
        let (wc, mr) = self.completion(slot).await;
        let mut buf = give_back(mr);
        let result = succeeded(wc);
        if let Ok(wc) = &result {
            buf.truncate(wc.byte_len as usize);
        }
        (buf, result)
    }

    async fn atomic(&self, op: SendOp) -> Result<u64> {
        let (mr, sge) = self.lend(vec![0; 8], Access::LOCAL_WRITE)?;
        let slot = self.shared().post_awaited(SendWr::new(0, op, [sge]), Some(mr))?;
        let (wc, mr) = self.completion(slot).await;
        succeeded(wc)?;
        let mut old = [0; 8];
        if let Some(mr) = mr {
            mr.read_at(0, &mut old)?;
        }
        Ok(u64::from_ne_bytes(old))
    }

    /// Registers a buffer for one operation.
    fn lend(&self, buf: Vec<u8>, access: Access) -> Result<(Mr, Sge)> {
        let mr = self.pd().register(Region::from_vec(buf), access)?;
        // As much as one message can carry; a longer one is refused when it is posted.
        let length = u32::try_from(mr.len())
            .map_err(|_| PostError::TooLong { max: u64::from(u32::MAX), have: mr.len() as u64 })?;
        let sge = Sge::new(mr.addr(), length, mr.lkey());
        Ok((mr, sge))
    }

    fn completion(&self, slot: usize) -> Completion<'_> {
        Completion { qp: self.shared(), slot: Some(slot), spin_until: None, asleep: false }
    }
}

fn succeeded(wc: Wc) -> Result<Wc> {
    let Wc { status, opcode, .. } = wc;
    if status.is_ok() { Ok(wc) } else { Err(Error::Wc { status, opcode }) }
}

/// The buffer inside a lent region. Nobody else has a clone of it once its operation has ended.
fn give_back(mr: Option<Mr>) -> Vec<u8> {
    mr.and_then(|mr| mr.into_vec().ok()).unwrap_or_default()
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.0.released();
        self.0.init.send_cq.detach(&self.0);
        self.0.init.recv_cq.detach(&self.0);
        if let Some(srq) = &self.0.init.srq {
            srq.detach();
        }
    }
}

impl fmt::Debug for Qp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.shared().fmt(f)
    }
}

/// The completion of one awaited operation: drives the queue pair itself for a while, then sleeps.
struct Completion<'a> {
    qp: &'a Arc<QpShared>,
    /// None once it was taken.
    slot: Option<usize>,
    spin_until: Option<Instant>,
    asleep: bool,
}

impl Future for Completion<'_> {
    type Output = (Wc, Option<Mr>);

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        let Some(slot) = this.slot else {
            // Polled again after it was ready, which futures need not answer.
            return Poll::Ready((flushed(), None));
        };
        // A loop of operations that are done at once must let the runtime's other tasks run, those
        // that read this very socket among them.
        let cooperation = ready!(coop::poll_proceed(cx));
        let mut taken = this.qp.take(slot, None);
        if taken.is_none() {
            let now = this.qp.device.clock.now();
            this.qp.polled(now);
            this.qp.try_turn(now);
            let spin = this.qp.device.options.spin;
            let spins = now < *this.spin_until.get_or_insert(now + spin);
            taken = this.qp.take(slot, (!spins).then(|| cx.waker()));
            if taken.is_none() && spins {
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
        }
        if let Some(done) = taken {
            this.slot = None;
            cooperation.made_progress();
            return Poll::Ready(done);
        }
        if !this.asleep {
            this.asleep = true;
            this.qp.sleep();
        }
        Poll::Pending
    }
}

fn flushed() -> Wc {
    Wc { status: WcStatus::WR_FLUSH_ERR, ..Wc::default() }
}

impl Drop for Completion<'_> {
    fn drop(&mut self) {
        if let Some(slot) = self.slot {
            self.qp.forget(slot);
        }
        if self.asleep {
            self.qp.awake();
        }
    }
}
