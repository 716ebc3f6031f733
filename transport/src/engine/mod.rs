//! Progress: what moves queue pairs, and who calls it.
//!
//! What carries a queue pair's work stands behind a lock: over TCP a connection, one a queue pair
//! ([`stream`]); over UDP the device's socket with all of its queue pairs ([`datagram`]). Four
//! things turn it:
//!
//! * a post, in the caller's thread: take the lock, enqueue, send from there;
//! * a program that polls its completion queue, in that program's thread: no hand-over stands
//!   between the socket and the completion;
//! * an awaited operation, for the short time it spins before it sleeps;
//! * a task on the tokio runtime that sleeps on the socket and on the timers: one-sided work of the
//!   peer goes on though the program never calls.
//!
//! While somebody polls, the task takes the socket out of epoll and looks again by timer: a waiter
//! in epoll is woken by the very octets that the poller is about to read, and slows it down by a
//! factor of 1.2 to 4.4. Who goes to sleep says so ([`Pollers::sleep`]), and the task puts the
//! socket back.
//!
//! Locks: a carrier's, then a shared receive queue's, a completion queue's or that of a queue pair's
//! waiters. Wakers are called when all locks are released ([`Wakes`]); no lock is held across an
//! await.

pub(crate) mod datagram;
mod stream;

use std::{
    fmt,
    net::SocketAddr,
    sync::{
        Arc,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    task::Waker,
    time::Duration,
};

use parking_lot::Mutex;
use slab::Slab;
use smallvec::SmallVec;
use tokio::sync::watch;
use userdma_proto::{
    iwarp::{Config, Connection},
    mem::Scope,
    time::Instant,
    verbs::{PostError, QpState, RecvWr, SendFlags, SendWr, Wc, WcOpcode, WcStatus},
    wire::ids::Qpn,
};

pub(crate) use self::stream::Start;
use self::{datagram::Member, stream::Stream};
use crate::{
    Mr, QpInit,
    cq::{Cq, EventHook},
    device::DeviceShared,
    error::CloseReason,
    net::tcp::Turn,
    pd::Pd,
};

/// Set in the tag of work whose completion goes to a future and not to the queue.
const AWAITED: u64 = 1 << 63;
/// How long a task that is out of epoll sleeps before it looks again.
const LOOK: Duration = Duration::from_millis(1);

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
    /// The queue pair of a TCP connection has ended ([`QpShared::decide_end`]).
    ended: bool,
    /// Queue pairs of a UDP device that have.
    ends: SmallVec<[Arc<QpShared>; 1]>,
    /// What is rare.
    rest: Vec<Box<dyn FnOnce() + Send>>,
    /// A completion queue has overflowed just now.
    pub(crate) overflowed: bool,
}

impl Wakes {
    fn is_empty(&self) -> bool {
        self.wakers.is_empty()
            && self.hooks.is_empty()
            && !self.ended
            && self.ends.is_empty()
            && self.rest.is_empty()
    }

    /// Has `call` called with the others.
    fn later(&mut self, call: impl FnOnce() + Send + 'static) {
        self.rest.push(Box::new(call));
    }

    /// A queue pair of a UDP device has ended so.
    fn end(&mut self, qp: &Arc<QpShared>, reason: CloseReason) {
        qp.decide_end(reason);
        self.ends.push(qp.clone());
    }

    /// The queue pair of a TCP connection has.
    fn end_of_stream(&mut self, qp: &QpShared, reason: CloseReason) {
        qp.decide_end(reason);
        self.ended = true;
    }

    fn fire(self, qp: &QpShared) {
        if self.ended {
            qp.tell_end();
        }
        self.call();
    }

    /// Calls all of them but for what concerns the queue pair of a TCP connection.
    pub(crate) fn call(self) {
        for waker in self.wakers {
            waker.wake();
        }
        for hook in self.hooks {
            hook();
        }
        for qp in self.ends {
            qp.tell_end();
        }
        for call in self.rest {
            call();
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

/// The state behind a [`Qp`](crate::Qp): kept by its handles, its carrier's task, and for a moment
/// by pollers.
pub(crate) struct QpShared {
    pub(crate) qpn: Qpn,
    pub(crate) device: Arc<DeviceShared>,
    pub(crate) pd: Pd,
    pub(crate) init: QpInit,
    carrier: Carrier,
    /// Those who await an operation of a TCP connection; over UDP the device's engine has them.
    pollers: Pollers,
    waiters: Mutex<Slab<Waiter>>,
    pub(crate) ended: watch::Sender<Option<CloseReason>>,
}

/// What carries a queue pair's work. Another transport is another variant.
enum Carrier {
    /// iWARP: a TCP connection of its own.
    Stream(Stream),
    /// RoCEv2: the socket of the device.
    Datagram(Member),
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
    /// A queue pair of a `tcp://` device.
    pub(crate) fn over_tcp(device: Arc<DeviceShared>, pd: Pd, init: QpInit, qpn: Qpn) -> Self {
        Self::new(device, pd, init, qpn, Carrier::Stream(Stream::new()))
    }

    /// A queue pair of a `udp://` device, whose port has it already.
    pub(crate) fn over_udp(
        device: Arc<DeviceShared>,
        pd: Pd,
        init: QpInit,
        qpn: Qpn,
        member: Member,
    ) -> Self {
        Self::new(device, pd, init, qpn, Carrier::Datagram(member))
    }

    fn new(device: Arc<DeviceShared>, pd: Pd, init: QpInit, qpn: Qpn, carrier: Carrier) -> Self {
        Self {
            qpn,
            device,
            pd,
            init,
            carrier,
            pollers: Pollers::default(),
            waiters: Mutex::new(Slab::new()),
            ended: watch::Sender::new(None),
        }
    }

    /// The completion queue that has overflowed, if one of its two has.
    pub(crate) fn overflowed(&self) -> Option<&Cq> {
        [&self.init.send_cq, &self.init.recv_cq].into_iter().find(|cq| cq.is_broken())
    }

    pub(crate) fn scope(&self) -> Scope {
        Scope { pd: self.pd.id(), qpn: self.qpn }
    }

    /// The settings of an iWARP connection for this queue pair.
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

    /// What carries it over UDP, if that is what it has.
    pub(crate) fn member(&self) -> Option<&Member> {
        match &self.carrier {
            Carrier::Datagram(member) => Some(member),
            Carrier::Stream(_) => None,
        }
    }

    /// Moves what can be moved, for a poller, who does not wait for a lock that others use to do
    /// the same.
    pub(crate) fn try_turn(&self, now: Instant) -> Turn {
        match &self.carrier {
            Carrier::Stream(stream) => stream.try_turn(self, now),
            Carrier::Datagram(member) => member.engine().try_turn(now),
        }
    }

    /// Posts send work under one lock and with one doorbell.
    ///
    /// # Errors
    /// How many were taken, and why the next was not.
    pub(crate) fn post_send(
        &self,
        wrs: impl IntoIterator<Item = SendWr>,
    ) -> Result<(), (usize, PostError)> {
        self.push_sends(wrs.into_iter().map(|wr| (wr, 0)))
    }

    fn push_sends(
        &self,
        wrs: impl Iterator<Item = (SendWr, u64)>,
    ) -> Result<(), (usize, PostError)> {
        match &self.carrier {
            Carrier::Stream(stream) => stream.post_send(self, wrs),
            Carrier::Datagram(member) => member.post_send(self, wrs),
        }
    }

    /// Posts receives under one lock.
    ///
    /// # Errors
    /// As [`QpShared::post_send`].
    pub(crate) fn post_recv(
        &self,
        wrs: impl IntoIterator<Item = RecvWr>,
    ) -> Result<(), (usize, PostError)> {
        self.push_recvs(wrs.into_iter().map(|wr| (wr, 0)))
    }

    fn push_recvs(
        &self,
        wrs: impl Iterator<Item = (RecvWr, u64)>,
    ) -> Result<(), (usize, PostError)> {
        match &self.carrier {
            Carrier::Stream(stream) => stream.post_recv(self, wrs),
            Carrier::Datagram(member) => member.post_recv(self, wrs),
        }
    }

    /// Posts send work whose completion goes to the slot that is returned.
    pub(crate) fn post_awaited(&self, wr: SendWr, keep: Option<Mr>) -> Result<usize, PostError> {
        let wr = wr.with_flags(SendFlags::SIGNALED);
        self.awaited(keep, |tag| self.push_sends(std::iter::once((wr, tag))))
    }

    /// Posts a receive whose completion goes to the slot that is returned.
    pub(crate) fn post_recv_awaited(
        &self,
        wr: RecvWr,
        keep: Option<Mr>,
    ) -> Result<usize, PostError> {
        self.awaited(keep, |tag| self.push_recvs(std::iter::once((wr, tag))))
    }

    /// A slot for the completion of what `post` posts with a tag; free again if that is refused.
    fn awaited(
        &self,
        keep: Option<Mr>,
        post: impl FnOnce(u64) -> Result<(), (usize, PostError)>,
    ) -> Result<usize, PostError> {
        let slot = self.waiters.lock().insert(Waiter::new(keep));
        post(AWAITED | slot as u64).map_err(|(_, e)| {
            let refused = self.waiters.lock().remove(slot);
            // Its memory is deregistered outside of the lock.
            drop(refused);
            e
        })?;
        Ok(slot)
    }

    /// The completion in `slot`, which is free then; else `waker` (if any) is called when it comes.
    pub(crate) fn take(&self, slot: usize, waker: Option<&Waker>) -> Option<(Wc, Option<Mr>)> {
        let mut waiters = self.waiters.lock();
        let waiter = &mut waiters[slot];
        match &mut waiter.state {
            WaiterState::Done(wc) => {
                let wc = *wc;
                let waiter = waiters.remove(slot);
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
        let mut waiters = self.waiters.lock();
        let gone = match waiters.get_mut(slot) {
            Some(Waiter { state: WaiterState::Done(_), .. }) => Some(waiters.remove(slot)),
            Some(waiter) => {
                waiter.state = WaiterState::Nobody;
                None
            }
            None => None,
        };
        drop(waiters);
        // Its memory is deregistered here, outside of the lock.
        drop(gone);
    }

    /// Whether `tag` is that of an awaited operation: then its completion goes to its future.
    fn completes_awaited(&self, tag: u64, wc: Wc, wakes: &mut Wakes) -> bool {
        if tag & AWAITED == 0 {
            return false;
        }
        let (slot, mut waiters) = ((tag & !AWAITED) as usize, self.waiters.lock());
        match std::mem::replace(&mut waiters[slot].state, WaiterState::Done(wc)) {
            WaiterState::Pending(waker) => wakes.wakers.extend(waker),
            WaiterState::Nobody => drop(waiters.remove(slot)),
            WaiterState::Done(_) => debug_assert!(false, "an operation completed twice"),
        }
        true
    }

    /// Whether work may be posted that completes in one of the queues.
    fn may_post(&self, tag: u64, cq: &Cq) -> Result<(), PostError> {
        if tag & AWAITED == 0 { cq.may_post() } else { Ok(()) }
    }

    /// Completes work that was never carried out.
    fn flush(&self, id: u64, tag: u64, opcode: WcOpcode, wakes: &mut Wakes) {
        let status = WcStatus::WR_FLUSH_ERR;
        let wc = Wc { id, status, opcode, qpn: self.qpn, ..Wc::default() };
        if self.completes_awaited(tag, wc, wakes) {
            return;
        }
        let cq = if opcode.is_recv() { &self.init.recv_cq } else { &self.init.send_cq };
        cq.push(&mut vec![wc], wakes);
    }

    /// Begins a start-up of iWARP.
    ///
    /// # Errors
    /// The state, where it is not [`QpState::Init`] or another start-up is under way.
    pub(crate) fn begin(self: &Arc<Self>) -> Result<Start, QpState> {
        match &self.carrier {
            Carrier::Stream(stream) => stream.begin(self),
            Carrier::Datagram(_) => Err(self.state()),
        }
    }

    pub(crate) fn state(&self) -> QpState {
        match &self.carrier {
            Carrier::Stream(stream) => stream.state(),
            Carrier::Datagram(member) => member.state(self.qpn),
        }
    }

    /// Local and peer's address, once connected.
    pub(crate) fn addresses(&self) -> Option<(SocketAddr, SocketAddr)> {
        match &self.carrier {
            Carrier::Stream(stream) => stream.addresses(),
            Carrier::Datagram(member) => member.addresses(self.qpn),
        }
    }

    /// Looks at the iWARP connection, if there is or was one.
    pub(crate) fn with_connection<R>(&self, f: impl FnOnce(&Connection) -> R) -> Option<R> {
        match &self.carrier {
            Carrier::Stream(stream) => stream.with_connection(f),
            Carrier::Datagram(_) => None,
        }
    }

    /// Closes in order: what is posted is carried out first.
    pub(crate) fn close(&self) {
        match &self.carrier {
            Carrier::Stream(stream) => stream.close(self),
            Carrier::Datagram(member) => member.close(self.qpn),
        }
    }

    /// To the error state at once.
    pub(crate) fn abort(&self) {
        match &self.carrier {
            Carrier::Stream(stream) => stream.abort(self),
            Carrier::Datagram(member) => member.abort(self.qpn),
        }
    }

    /// The last handle is gone.
    pub(crate) fn released(&self) {
        match &self.carrier {
            // An end under way goes on: a reset would overtake its Terminate.
            Carrier::Stream(stream) if stream.state() != QpState::Err => stream.abort(self),
            Carrier::Stream(_) => {}
            Carrier::Datagram(member) => member.release(self.qpn),
        }
    }

    /// Settles how it ended; only the first time counts. Under the lock of what carries it: two threads
    /// that tell of two ends would tell them in any order.
    fn decide_end(&self, reason: CloseReason) {
        self.ended.send_if_modified(|ended| {
            ended.get_or_insert(reason);
            false
        });
    }

    /// Tells those who wait that it has ended.
    fn tell_end(&self) {
        self.ended.send_if_modified(|_| true);
        if let Carrier::Stream(stream) = &self.carrier {
            stream.kick.notify_one();
        }
    }

    /// It was moved back to where it began: how it ended before is forgotten.
    fn begin_again(&self) {
        self.ended.send_if_modified(|ended| {
            *ended = None;
            false
        });
    }

    /// Somebody polls for an awaited operation, and found nothing.
    pub(crate) fn polled(&self, now: Instant) {
        // A device over UDP knows of it by the turns that are taken.
        if let Carrier::Stream(_) = self.carrier {
            self.pollers.polled(now);
        }
    }

    /// Who awaits an operation goes to sleep. Ends with [`QpShared::awake`].
    pub(crate) fn sleep(&self) {
        // A device over UDP knows by itself whether it is in epoll.
        if self.waiting().sleep() || self.member().is_some() {
            self.rouse();
        }
    }

    pub(crate) fn awake(&self) {
        self.waiting().awake();
    }

    fn waiting(&self) -> &Pollers {
        match &self.carrier {
            Carrier::Stream(_) => &self.pollers,
            Carrier::Datagram(member) => member.engine().pollers(),
        }
    }

    /// Somebody went to sleep who polled before: the task shall watch the socket again.
    pub(crate) fn rouse(&self) {
        match &self.carrier {
            Carrier::Stream(stream) => stream.rouse(),
            Carrier::Datagram(member) => member.engine().rouse(),
        }
    }
}

impl Waiter {
    fn new(keep: Option<Mr>) -> Self {
        Self { state: WaiterState::Pending(None), keep }
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
        if let Carrier::Stream(_) = self.carrier {
            self.device.release(self.qpn);
        }
    }
}

impl fmt::Debug for QpShared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Qp").field("qpn", &self.qpn).field("state", &self.state()).finish()
    }
}
