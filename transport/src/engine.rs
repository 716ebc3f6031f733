//! Progress: what moves a queue pair, and who calls it.
//!
//! A queue pair is a plain struct behind a lock, its [`Core`]. Four things turn it, all through
//! [`QpShared::turn`]:
//!
//! * a post, in the caller's thread: take the lock, enqueue, send from there;
//! * a program that polls its completion queue, in that program's thread: no hand-over stands
//!   between the socket and the completion;
//! * an awaited operation, for the short time it spins before it sleeps;
//! * a task on the tokio runtime ([`drive`]) that sleeps on the socket and on the connection's
//!   timers: one-sided work of the peer goes on though the program never calls.
//!
//! While somebody polls, the task takes the socket out of epoll and looks again by timer: a waiter
//! in epoll is woken by the very octets that the poller is about to read, and slows it down by a
//! factor of 1.2 to 4.4. Who goes to sleep says so ([`Pollers::sleep`]), and the task puts the
//! socket back.
//!
//! Locks: a core, then a shared receive queue or a completion queue. Wakers are called when all
//! locks are released ([`Wakes`]); no lock is held across an await.

use std::{
    collections::VecDeque,
    fmt,
    net::{SocketAddr, TcpStream},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    task::Waker,
    time::Duration,
};

use parking_lot::Mutex;
use slab::Slab;
use smallvec::SmallVec;
use tokio::{
    io::{Interest, Ready, unix::AsyncFd},
    sync::{Notify, watch},
};
use userdma_proto::{
    iwarp::{CloseReason, Config, Event},
    mem::Scope,
    time::Instant,
    verbs::{PostError, QpState, RecvWr, SendFlags, SendWr, Wc, WcOpcode, WcStatus},
    wire::ids::Qpn,
};

use crate::{
    Mr, QpInit,
    cq::{Cq, EventHook},
    device::DeviceShared,
    net::{
        sys,
        tcp::{Budget, TcpPort, Turn},
    },
    pd::Pd,
};

/// What one turn of the task, and of an inline poller, may move before others get theirs.
const TURN: Budget = Budget { read: 2 << 20, write: 2 << 20 };
/// The same for a post: it sends, and does not receive.
const POST: Budget = Budget { read: 0, write: 4 << 20 };
/// Set in the tag of work whose completion goes to a future and not to the queue.
const AWAITED: u64 = 1 << 63;
/// Polls within [`LOOK`] that make a program one that spins.
const SPINNING: u64 = 16;
/// How long a count of polls is looked at before a new one begins.
const LOOK: Duration = Duration::from_millis(1);
/// A program whose last poll is longer ago does not spin.
const RECENT: Duration = Duration::from_micros(200);

/// After this long without traffic a connection gives its buffers back.
const IDLE: Duration = Duration::from_secs(10);

/// Nanoseconds since the device was opened: the time that state machines are told.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Clock(std::time::Instant);

impl Clock {
    pub(crate) fn start() -> Self {
        Self(std::time::Instant::now())
    }

    pub(crate) fn now(self) -> Instant {
        // 584 years of nanoseconds fit.
        Instant::from_nanos(self.0.elapsed().as_nanos() as u64)
    }

    fn tokio(self, at: Instant) -> tokio::time::Instant {
        (self.0 + Duration::from_nanos(at.as_nanos())).into()
    }
}

/// What has to be called once the locks are released.
#[derive(Default)]
#[must_use]
pub(crate) struct Wakes {
    pub(crate) wakers: SmallVec<[Waker; 4]>,
    pub(crate) hooks: SmallVec<[EventHook; 2]>,
    ended: Option<CloseReason>,
}

impl Wakes {
    fn is_empty(&self) -> bool {
        self.wakers.is_empty() && self.hooks.is_empty() && self.ended.is_none()
    }

    fn fire(mut self, qp: &QpShared) {
        if let Some(reason) = self.ended.take() {
            qp.ended.send_replace(Some(reason));
            qp.kick.notify_one();
        }
        self.call();
    }

    /// Calls wakers and hooks: all there is where no queue pair is concerned.
    pub(crate) fn call(self) {
        for waker in self.wakers {
            waker.wake();
        }
        for hook in self.hooks {
            hook();
        }
    }
}

/// Who looks at a queue, and how: by polling, or asleep until woken.
#[derive(Debug, Default)]
pub(crate) struct Pollers {
    polls: AtomicU64,
    last: AtomicU64,
    asleep: AtomicUsize,
    /// Queue pairs that are out of epoll because of these pollers.
    unarmed: AtomicUsize,
}

impl Pollers {
    /// Somebody looked and found nothing.
    pub(crate) fn polled(&self, now: Instant) {
        // Relaxed, and not atomic together: a lost count changes nothing.
        self.polls.store(self.polls.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
        self.last.store(now.as_nanos(), Ordering::Relaxed);
    }

    /// Somebody stops looking and wants to be woken. True: queue pairs that rely on pollers must be
    /// told ([`QpShared::rouse`]). Ends with [`Pollers::awake`].
    pub(crate) fn sleep(&self) -> bool {
        // SeqCst here and in `QpShared::unarm`: of "I sleep" and "I left epoll" one sees the other.
        self.asleep.fetch_add(1, Ordering::SeqCst);
        self.unarmed.load(Ordering::SeqCst) > 0
    }

    pub(crate) fn awake(&self) {
        self.asleep.fetch_sub(1, Ordering::SeqCst);
    }
}

/// The state behind a [`Qp`](crate::Qp): kept by its handles, its task, and for a moment by pollers.
pub(crate) struct QpShared {
    pub(crate) qpn: Qpn,
    pub(crate) device: Arc<DeviceShared>,
    pub(crate) pd: Pd,
    pub(crate) init: QpInit,
    pub(crate) pollers: Pollers,
    core: Mutex<Core>,
    /// The socket is closed: there is nothing to turn.
    over: AtomicBool,
    /// The task is out of epoll.
    unarmed: AtomicBool,
    kick: Notify,
    pub(crate) ended: watch::Sender<Option<CloseReason>>,
}

/// What a lock guards.
pub(crate) struct Core {
    port: Port,
    /// Receives posted before there was a connection, with their tags.
    recvs: VecDeque<(RecvWr, u64)>,
    waiters: Slab<Waiter>,
    /// Completions on their way to a queue: empty between turns.
    fresh: Vec<Wc>,
    addresses: Option<(SocketAddr, SocketAddr)>,
}

/// What carries a queue pair's work. Another transport is another variant.
enum Port {
    /// Made, not connected.
    Idle,
    /// A start-up is under way, outside of the lock.
    Starting,
    /// iWARP over TCP.
    Tcp(Box<TcpPort>),
    /// Ended without ever being connected.
    Dead,
}

/// Somebody who awaits one operation.
struct Waiter {
    state: WaiterState,
    /// Memory that must stay registered until the operation has ended, whoever still waits for it.
    keep: Option<Mr>,
}

enum WaiterState {
    Pending(Option<Waker>),
    Done(Wc),
    /// The future was dropped.
    Nobody,
}

impl QpShared {
    pub(crate) fn new(device: Arc<DeviceShared>, pd: Pd, init: QpInit, qpn: Qpn) -> Self {
        Self {
            qpn,
            device,
            pd,
            init,
            pollers: Pollers::default(),
            core: Mutex::new(Core {
                port: Port::Idle,
                recvs: VecDeque::new(),
                waiters: Slab::new(),
                fresh: Vec::new(),
                addresses: None,
            }),
            over: AtomicBool::new(true),
            unarmed: AtomicBool::new(false),
            kick: Notify::new(),
            ended: watch::Sender::new(None),
        }
    }

    /// The completion queue that has overflowed, if one of its two has.
    pub(crate) fn overflowed(&self) -> Option<&Cq> {
        [&self.init.send_cq, &self.init.recv_cq].into_iter().find(|cq| cq.is_broken())
    }

    fn scope(&self) -> Scope {
        Scope { pd: self.pd.id(), qpn: self.qpn }
    }

    /// The settings of a connection for this queue pair.
    pub(crate) fn config(&self) -> Config {
        let init = &self.init;
        Config {
            mpa: init.mpa,
            remote_access: init.remote_access,
            ird: init.ird,
            ord: init.ord,
            max_send_wr: init.max_send_wr,
            max_recv_wr: init.max_recv_wr,
            max_sge: init.max_sge,
            max_inline: init.max_inline,
            startup_timeout: init.startup_timeout,
            close_timeout: init.close_timeout,
            ..Config::new(self.scope().pd, self.qpn, self.device.random())
        }
    }

    /// Runs `f` under the lock, then tells whom it concerns.
    fn locked<R>(&self, f: impl FnOnce(&mut Core, &mut Wakes) -> R) -> R {
        let mut wakes = Wakes::default();
        let result = f(&mut self.core.lock(), &mut wakes);
        wakes.fire(self);
        result
    }

    /// Moves what can be moved.
    pub(crate) fn turn(&self, now: Instant) -> Turn {
        let mut wakes = Wakes::default();
        let mut turn = self.core.lock().turn(self, now, TURN, &mut wakes);
        turn.told = !wakes.is_empty();
        wakes.fire(self);
        turn
    }

    /// The same for a poller, who does not wait for a lock that others use to do the same.
    pub(crate) fn try_turn(&self, now: Instant) -> Turn {
        if self.over.load(Ordering::Acquire) {
            return Turn::default();
        }
        let mut wakes = Wakes::default();
        let turn = {
            let Some(mut core) = self.core.try_lock() else {
                return Turn::default();
            };
            let before = core.port.needs();
            let turn = core.turn(self, now, TURN, &mut wakes);
            self.left(before, core.port.needs(), turn);
            turn
        };
        wakes.fire(self);
        turn
    }

    /// Posts send work under one lock and with one doorbell. Gives how many were taken.
    pub(crate) fn post_send(
        &self,
        wrs: impl IntoIterator<Item = SendWr>,
    ) -> Result<(), (usize, PostError)> {
        self.locked(|core, wakes| {
            let mut taken = 0;
            let mut result = Ok(());
            for wr in wrs {
                if let Err(e) = core.push_send(self, wr, 0, wakes) {
                    result = Err((taken, e));
                    break;
                }
                taken += 1;
            }
            if taken > 0 {
                core.ring(self, wakes);
            }
            result
        })
    }

    /// Posts receives under one lock.
    pub(crate) fn post_recv(
        &self,
        wrs: impl IntoIterator<Item = RecvWr>,
    ) -> Result<(), (usize, PostError)> {
        self.locked(|core, wakes| {
            for (taken, wr) in wrs.into_iter().enumerate() {
                core.push_recv(self, wr, 0, wakes).map_err(|e| (taken, e))?;
            }
            Ok(())
        })
    }

    /// Posts send work whose completion goes to the slot that is returned.
    pub(crate) fn post_awaited(&self, wr: SendWr, keep: Option<Mr>) -> Result<usize, PostError> {
        let wr = wr.with_flags(SendFlags::SIGNALED);
        self.locked(|core, wakes| {
            let slot = core.waiters.insert(Waiter::new(keep));
            let posted = core.push_send(self, wr, AWAITED | slot as u64, wakes);
            core.posted(self, slot, posted, wakes)
        })
    }

    /// Posts a receive whose completion goes to the slot that is returned.
    pub(crate) fn post_recv_awaited(
        &self,
        wr: RecvWr,
        keep: Option<Mr>,
    ) -> Result<usize, PostError> {
        self.locked(|core, wakes| {
            let slot = core.waiters.insert(Waiter::new(keep));
            let posted = core.push_recv(self, wr, AWAITED | slot as u64, wakes);
            core.posted(self, slot, posted, wakes)
        })
    }

    /// The completion in `slot`, which is free then; else `waker` (if any) is called when it comes.
    pub(crate) fn take(&self, slot: usize, waker: Option<&Waker>) -> Option<(Wc, Option<Mr>)> {
        let mut core = self.core.lock();
        let waiter = &mut core.waiters[slot];
        match &mut waiter.state {
            WaiterState::Done(wc) => {
                let wc = *wc;
                let waiter = core.waiters.remove(slot);
                Some((wc, waiter.keep))
            }
            WaiterState::Pending(known) => {
                if let Some(waker) = waker {
                    known.get_or_insert_with(|| waker.clone()).clone_from(waker);
                }
                None
            }
            WaiterState::Nobody => None,
        }
    }

    /// Nobody waits for `slot` any more. The operation goes on.
    pub(crate) fn forget(&self, slot: usize) {
        let mut core = self.core.lock();
        let gone = match core.waiters.get_mut(slot) {
            Some(Waiter { state: WaiterState::Done(_), .. }) => Some(core.waiters.remove(slot)),
            Some(waiter) => {
                waiter.state = WaiterState::Nobody;
                None
            }
            None => None,
        };
        drop(core);
        // Its memory is deregistered here, outside of the lock.
        drop(gone);
    }

    /// Begins a start-up.
    ///
    /// # Errors
    /// The state, where it is not [`QpState::Init`] or another start-up is under way.
    pub(crate) fn begin(self: &Arc<Self>) -> Result<Start, QpState> {
        let mut core = self.core.lock();
        match core.port {
            Port::Idle => core.port = Port::Starting,
            Port::Starting => return Err(QpState::Init),
            Port::Tcp(_) | Port::Dead => {
                let state = core.port.state();
                return Err(state);
            }
        }
        Ok(Start { qp: self.clone(), done: false })
    }

    pub(crate) fn state(&self) -> QpState {
        self.core.lock().port.state()
    }

    /// Local and peer's address, once connected.
    pub(crate) fn addresses(&self) -> Option<(SocketAddr, SocketAddr)> {
        self.core.lock().addresses
    }

    /// Looks at the connection, if there is or was one.
    pub(crate) fn with_connection<R>(
        &self,
        f: impl FnOnce(&userdma_proto::iwarp::Connection) -> R,
    ) -> Option<R> {
        match &self.core.lock().port {
            Port::Tcp(port) => Some(f(port.conn())),
            Port::Idle | Port::Starting | Port::Dead => None,
        }
    }

    /// Closes in order: what is posted is carried out first.
    pub(crate) fn close(&self) {
        let now = self.device.clock.now();
        self.locked(|core, wakes| match &mut core.port {
            Port::Tcp(port) => {
                port.conn_mut().close(now);
                core.turn(self, now, TURN, wakes);
            }
            Port::Idle | Port::Starting | Port::Dead => core.die(self, wakes),
        });
        self.kick.notify_one();
    }

    /// To the error state at once; TCP is reset.
    pub(crate) fn abort(&self) {
        let now = self.device.clock.now();
        self.locked(|core, wakes| match &mut core.port {
            Port::Tcp(port) => {
                port.conn_mut().abort(now);
                core.turn(self, now, POST, wakes);
            }
            Port::Idle | Port::Starting | Port::Dead => core.die(self, wakes),
        });
        self.kick.notify_one();
    }

    /// Nobody looks after the connection any more: it is lost. What the kernel has taken still goes
    /// out, and FIN behind it.
    fn abandon(&self) {
        let now = self.device.clock.now();
        self.locked(|core, wakes| {
            if let Port::Tcp(port) = &mut core.port {
                port.conn_mut().handle_reset(now);
                core.turn(self, now, POST, wakes);
            }
        });
    }

    /// Somebody else than the task took a turn. In epoll the task waits for room in the socket, for
    /// a timer, or for what the turn did not get done, only if it is told; out of epoll it looks by
    /// itself.
    fn left(&self, before: Needs, after: Needs, turn: Turn) {
        let news = (after.room && !before.room) || after.timer != before.timer || turn.more;
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

    /// The places where somebody may poll for this queue pair.
    fn all_pollers(&self) -> impl Iterator<Item = &Pollers> {
        let recv = (!self.init.recv_cq.is(&self.init.send_cq)).then(|| self.init.recv_cq.pollers());
        [&self.pollers, self.init.send_cq.pollers()].into_iter().chain(recv)
    }

    /// Whether somebody polls right now, and nobody relies on being woken.
    fn is_polled(&self, look: &mut Look, now: Instant) -> bool {
        if self.is_awaited() {
            return false;
        }
        let (mut polls, mut last) = (0u64, 0);
        for pollers in self.all_pollers() {
            polls = polls.wrapping_add(pollers.polls.load(Ordering::Relaxed));
            last = last.max(pollers.last.load(Ordering::Relaxed));
        }
        let spins = polls.wrapping_sub(look.polls) >= SPINNING
            && now.saturating_since(Instant::from_nanos(last)) < RECENT;
        if now.saturating_since(look.at) >= LOOK {
            *look = Look { polls, at: now };
        }
        spins
    }

    /// Whether somebody sleeps until this queue pair brings something.
    fn is_awaited(&self) -> bool {
        self.all_pollers().any(|pollers| pollers.asleep.load(Ordering::SeqCst) > 0)
    }

    /// The task leaves epoll (`true`) or will look again by itself (`false`).
    fn unarm(&self, unarmed: bool) {
        self.unarmed.store(unarmed, Ordering::SeqCst);
        for pollers in self.all_pollers() {
            if unarmed {
                pollers.unarmed.fetch_add(1, Ordering::SeqCst);
            } else {
                pollers.unarmed.fetch_sub(1, Ordering::SeqCst);
            }
        }
    }
}

impl Core {
    /// One turn of the port, then completions and events to where they belong.
    fn turn(&mut self, qp: &QpShared, now: Instant, budget: Budget, wakes: &mut Wakes) -> Turn {
        let Port::Tcp(port) = &mut self.port else {
            return Turn::default();
        };
        let turn = port.turn(now, &qp.device.table, budget);
        if turn.worked {
            self.settle(qp, wakes);
        }
        turn
    }

    fn push_send(
        &mut self,
        qp: &QpShared,
        wr: SendWr,
        tag: u64,
        wakes: &mut Wakes,
    ) -> Result<(), PostError> {
        if tag & AWAITED == 0 {
            qp.init.send_cq.may_post()?;
        }
        match &mut self.port {
            Port::Tcp(port) => port.conn_mut().post_send(wr, tag),
            Port::Idle | Port::Starting => Err(PostError::BadState(QpState::Init)),
            Port::Dead => {
                self.flush(qp, wr.id, tag, wr.op.wc_opcode(), wakes);
                Ok(())
            }
        }
    }

    fn push_recv(
        &mut self,
        qp: &QpShared,
        wr: RecvWr,
        tag: u64,
        wakes: &mut Wakes,
    ) -> Result<(), PostError> {
        if qp.init.srq.is_some() {
            return Err(PostError::SharedReceives);
        }
        if tag & AWAITED == 0 {
            qp.init.recv_cq.may_post()?;
        }
        match &mut self.port {
            Port::Tcp(port) => {
                port.conn_mut().post_recv(wr, tag)?;
                if port.conn().state() == QpState::Err {
                    self.settle(qp, wakes);
                }
                Ok(())
            }
            Port::Idle | Port::Starting => {
                wr.check(qp.init.max_sge)?;
                if self.recvs.len() >= qp.init.max_recv_wr {
                    return Err(PostError::QueueFull { max: qp.init.max_recv_wr });
                }
                self.recvs.push_back((wr, tag));
                Ok(())
            }
            Port::Dead => {
                self.flush(qp, wr.id, tag, WcOpcode::RECV, wakes);
                Ok(())
            }
        }
    }

    /// Awaited work was posted, or refused: then its slot is free again.
    fn posted(
        &mut self,
        qp: &QpShared,
        slot: usize,
        posted: Result<(), PostError>,
        wakes: &mut Wakes,
    ) -> Result<usize, PostError> {
        if let Err(e) = posted {
            self.waiters.remove(slot);
            return Err(e);
        }
        self.ring(qp, wakes);
        Ok(slot)
    }

    /// The doorbell: sends what was posted.
    fn ring(&mut self, qp: &QpShared, wakes: &mut Wakes) {
        let Port::Tcp(port) = &mut self.port else {
            return;
        };
        let before = Needs::of(port);
        let turn = port.turn(qp.device.clock.now(), &qp.device.table, POST);
        qp.left(before, Needs::of(port), turn);
        self.settle(qp, wakes);
    }

    /// Completions to their futures and queues, events to whom they concern. Where a completion
    /// queue has overflowed, that is the end of the connection.
    fn settle(&mut self, qp: &QpShared, wakes: &mut Wakes) {
        self.deliver(qp, wakes);
        if qp.overflowed().is_none() {
            return;
        }
        let Port::Tcp(port) = &mut self.port else {
            return;
        };
        if port.conn().state() == QpState::Err {
            return;
        }
        let now = qp.device.clock.now();
        port.conn_mut().fail(now);
        // The Terminate goes out; the task waits for the peer's FIN.
        port.turn(now, &qp.device.table, POST);
        qp.kick.notify_one();
        self.deliver(qp, wakes);
    }

    fn deliver(&mut self, qp: &QpShared, wakes: &mut Wakes) {
        let Port::Tcp(port) = &mut self.port else {
            return;
        };
        let (send_cq, recv_cq) = (&qp.init.send_cq, &qp.init.recv_cq);
        let mut to = send_cq;
        while let Some(completion) = port.conn_mut().poll_completion() {
            let wc = completion.wc;
            if completion.tag & AWAITED != 0 {
                complete(&mut self.waiters, (completion.tag & !AWAITED) as usize, wc, wakes);
                continue;
            }
            let cq = if wc.opcode.is_recv() { recv_cq } else { send_cq };
            if !cq.is(to) {
                to.push(&mut self.fresh, wakes);
                to = cq;
            }
            self.fresh.push(wc);
        }
        to.push(&mut self.fresh, wakes);
        if let Some(srq) = &qp.init.srq {
            srq.settle(wakes);
        }
        while let Some(event) = port.conn_mut().poll_event() {
            match event {
                Event::Closed(reason) => wakes.ended = Some(reason),
                Event::StartupFailed(_) => wakes.ended = Some(CloseReason::Lost),
                // `Connection::established` tells the rest; after the peer's FIN the connection
                // carries out what is posted and closes by itself.
                Event::Request(_) | Event::Established(_) | Event::PeerClosed => {}
                _ => {}
            }
        }
        if port.socket().is_none() {
            qp.over.store(true, Ordering::Release);
        }
    }

    /// From Init to the error state, where no connection will ever be.
    fn die(&mut self, qp: &QpShared, wakes: &mut Wakes) {
        if matches!(self.port, Port::Dead) {
            return;
        }
        self.port = Port::Dead;
        while let Some((wr, tag)) = self.recvs.pop_front() {
            self.flush(qp, wr.id, tag, WcOpcode::RECV, wakes);
        }
        wakes.ended = Some(CloseReason::Aborted);
    }

    fn flush(&mut self, qp: &QpShared, id: u64, tag: u64, opcode: WcOpcode, wakes: &mut Wakes) {
        let status = WcStatus::WR_FLUSH_ERR;
        let wc = Wc { id, status, opcode, qpn: qp.qpn, ..Wc::default() };
        if tag & AWAITED != 0 {
            complete(&mut self.waiters, (tag & !AWAITED) as usize, wc, wakes);
            return;
        }
        let cq = if opcode.is_recv() { &qp.init.recv_cq } else { &qp.init.send_cq };
        self.fresh.push(wc);
        cq.push(&mut self.fresh, wakes);
    }
}

/// What a connection waits for, apart from octets.
#[derive(Debug, Clone, Copy, Default)]
struct Needs {
    room: bool,
    timer: Option<Instant>,
}

impl Needs {
    fn of(port: &TcpPort) -> Self {
        Self { room: port.wants_write(), timer: port.conn().poll_timeout() }
    }
}

impl Port {
    fn needs(&self) -> Needs {
        match self {
            Self::Tcp(port) => Needs::of(port),
            Self::Idle | Self::Starting | Self::Dead => Needs::default(),
        }
    }

    fn state(&self) -> QpState {
        match self {
            Self::Idle | Self::Starting => QpState::Init,
            Self::Tcp(port) => port.conn().state(),
            Self::Dead => QpState::Err,
        }
    }
}

impl Waiter {
    fn new(keep: Option<Mr>) -> Self {
        Self { state: WaiterState::Pending(None), keep }
    }
}

fn complete(waiters: &mut Slab<Waiter>, slot: usize, wc: Wc, wakes: &mut Wakes) {
    match std::mem::replace(&mut waiters[slot].state, WaiterState::Done(wc)) {
        WaiterState::Pending(waker) => wakes.wakers.extend(waker),
        WaiterState::Nobody => drop(waiters.remove(slot)),
        WaiterState::Done(_) => debug_assert!(false, "an operation completed twice"),
    }
}

/// A start-up under way. Dropped before [`Start::finish`], the queue pair is as it was before.
pub(crate) struct Start {
    qp: Arc<QpShared>,
    done: bool,
}

impl Start {
    pub(crate) fn qp(&self) -> &Arc<QpShared> {
        &self.qp
    }

    /// The connection stands (at a responder: it is accepted): from here on the queue pair has it,
    /// with the receives posted so far.
    ///
    /// # Errors
    /// The queue pair was aborted meanwhile.
    pub(crate) fn finish(mut self, mut port: Box<TcpPort>) -> Result<(), PostError> {
        let qp = self.qp.clone();
        let Some(socket) = port.socket().cloned() else {
            return Err(PostError::BadState(QpState::Err));
        };
        qp.locked(|core, wakes| {
            if !matches!(core.port, Port::Starting) {
                return Err(PostError::BadState(core.port.state()));
            }
            core.addresses = port.addresses().ok();
            if let Some(srq) = &qp.init.srq {
                port.conn_mut().share_receives(srq.receives())?;
            }
            while let Some((wr, tag)) = core.recvs.pop_front() {
                // It fits: it was checked against the same limits when it was posted.
                let _fits = port.conn_mut().post_recv(wr, tag);
                debug_assert_eq!(_fits, Ok(()));
            }
            core.port = Port::Tcp(port);
            self.done = true;
            qp.over.store(false, Ordering::Release);
            core.turn(&qp, qp.device.clock.now(), TURN, wakes);
            core.settle(&qp, wakes);
            Ok(())
        })?;
        qp.device.runtime.spawn(drive(Driven(qp.clone()), socket));
        Ok(())
    }
}

impl Drop for Start {
    fn drop(&mut self) {
        if self.done {
            return;
        }
        let mut core = self.qp.core.lock();
        if matches!(core.port, Port::Starting) {
            core.port = Port::Idle;
        }
    }
}

/// What the task saw of the pollers when it last began to count.
#[derive(Debug, Clone, Copy)]
struct Look {
    polls: u64,
    at: Instant,
}

/// What the task has to wait for.
struct Wait {
    read: bool,
    write: bool,
    deadline: Option<Instant>,
}

impl QpShared {
    fn trim(&self) {
        if let Port::Tcp(port) = &mut self.core.lock().port {
            port.trim();
        }
    }

    fn wait(&self) -> Option<Wait> {
        match &self.core.lock().port {
            Port::Tcp(port) if port.socket().is_some() => Some(Wait {
                read: port.wants_read(),
                write: port.wants_write(),
                deadline: port.conn().poll_timeout(),
            }),
            Port::Tcp(_) | Port::Idle | Port::Starting | Port::Dead => None,
        }
    }
}

/// A queue pair in the hands of its task. Where the task goes first, with its runtime, nobody would
/// watch the socket any more, and who sleeps would sleep for ever: the connection ends then.
struct Driven(Arc<QpShared>);

impl Drop for Driven {
    fn drop(&mut self) {
        if !self.0.over.load(Ordering::Acquire) {
            self.0.abandon();
        }
    }
}

/// The task of a connected queue pair. Ends when the socket is closed.
async fn drive(driven: Driven, socket: Arc<TcpStream>) {
    let qp = &driven.0;
    let clock = qp.device.clock;
    let spin = qp.device.options.spin;
    let mut armed: Option<AsyncFd<Arc<TcpStream>>> = None;
    let mut look = Look { polls: 0, at: clock.now() };
    let mut spin_until = look.at;
    let mut fat = false;
    let mut turn = Turn { more: true, ..Turn::default() };
    loop {
        let now = clock.now();
        if turn.told {
            // Somebody was woken who spins himself; spinning here would take his processor.
            spin_until = now;
        } else if turn.worked {
            spin_until = now + spin;
        }
        fat |= turn.worked;
        if turn.more {
            // One bounded turn after another, with the runtime's other tasks in between.
            tokio::task::yield_now().await;
            turn = qp.turn(clock.now());
            continue;
        }
        let Some(wait) = qp.wait() else { return };
        if qp.is_polled(&mut look, now) {
            armed = None;
            qp.unarm(true);
            // Who went to sleep before `unarm` was seen did not kick: look once more.
            if !qp.is_awaited() {
                qp.pause(&wait).await;
            }
            qp.unarm(false);
            turn = qp.turn(clock.now());
            continue;
        }
        if now < spin_until {
            tokio::task::yield_now().await;
            turn = qp.turn(clock.now());
            continue;
        }
        let interest = match (wait.read, wait.write) {
            (true, true) => Some(Interest::READABLE | Interest::WRITABLE),
            (true, false) => Some(Interest::READABLE),
            (false, true) => Some(Interest::WRITABLE),
            (false, false) => None,
        };
        let fd = match armed.take() {
            Some(fd) => fd,
            None => match sys::watch(socket.clone()) {
                Ok(fd) => fd,
                // No room in epoll: look by timer.
                Err(_) => {
                    qp.pause(&wait).await;
                    turn = qp.turn(clock.now());
                    continue;
                }
            },
        };
        let ready = async {
            match interest {
                Some(interest) => fd.ready(interest).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            guard = ready => {
                turn = qp.turn(clock.now());
                if let Ok(mut guard) = guard {
                    if turn.drained {
                        guard.clear_ready_matching(Ready::READABLE);
                    }
                    if turn.blocked {
                        guard.clear_ready_matching(Ready::WRITABLE);
                    }
                }
            }
            () = qp.kick.notified() => turn = qp.turn(clock.now()),
            () = until(clock, wait.deadline) => turn = qp.turn(clock.now()),
            () = tokio::time::sleep(IDLE), if fat => {
                fat = false;
                qp.trim();
            }
        }
        armed = Some(fd);
    }
}

impl QpShared {
    /// A short sleep without the socket. Longer where there are many queue pairs, so that their
    /// looking stays a small part of the processor.
    async fn pause(&self, wait: &Wait) {
        let many = self.device.qp_count() as u32;
        let pause = LOOK.max(LOOK / 64 * many);
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = self.kick.notified() => {}
            () = until(self.device.clock, wait.deadline) => {}
        }
    }
}

pub(crate) async fn until(clock: Clock, deadline: Option<Instant>) {
    match deadline {
        Some(deadline) => tokio::time::sleep_until(clock.tokio(deadline)).await,
        None => std::future::pending().await,
    }
}

impl Drop for QpShared {
    fn drop(&mut self) {
        self.device.release(self.qpn);
    }
}

impl fmt::Debug for QpShared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Qp").field("qpn", &self.qpn).field("state", &self.state()).finish()
    }
}
