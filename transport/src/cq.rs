//! Completion queues.

use std::{
    collections::VecDeque,
    fmt,
    future::Future,
    pin::Pin,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, AtomicU32, AtomicUsize, Ordering},
    },
    task::{Context, Poll, Waker, ready},
    time::Duration,
};

use parking_lot::Mutex;
use tokio::task::coop;
use userdma_proto::{
    time::Instant,
    verbs::{PostError, Wc},
    wire::ids::Qpn,
};

use crate::{
    engine::{Clock, Pollers, QpShared, Wakes, datagram::Engine},
    error::{Error, Result},
    users::Users,
};

/// Queue pairs that one call of [`Cq::poll`] drives at most; the next call goes on behind them.
const DRIVEN: usize = 8;

/// Polls in vain, one after another, after which a poller lets other threads run: on a machine with
/// fewer processors than pollers the peer gets nowhere otherwise. About half a millisecond: less
/// than a time slice, and much more than an answer takes, so that an exchange of messages never
/// yields.
const PATIENCE: u32 = 1000;
/// The same while a socket is full: then it is the peer who has to run.
const BLOCKED_PATIENCE: u32 = 16;

/// What is called when an armed queue raises its event. See [`Cq::on_event`].
pub(crate) type EventHook = Arc<dyn Fn() + Send + Sync>;

/// Completion queue: where the completions of work requests are put, in the order in which the work
/// of each queue pair was done. Cheap to clone; all clones are the same queue.
///
/// # Overflow
/// A queue should be as deep as all work that its queue pairs may have outstanding at a time. Where
/// more completions come than it holds, the queue is in error for good, as verbs have it
/// (`IBV_EVENT_CQ_ERR`), but nothing is lost:
///
/// * every completion is kept, also those beyond the depth, and handed out in order;
/// * the overflow is told by [`Cq::on_overflow`] and by an event ([`Cq::notified`]), armed or not;
///   [`Cq::overflowed`] tells it from then on, and [`Cq::next`] once it has handed out the rest;
/// * the queue pairs that complete into it go to [`QpState::Err`](crate::QpState::Err), their peers
///   are told by a Terminate (RoCE: disconnected), and what was outstanding completes as flushed.
///   Queue pairs of other queues see nothing of it (RFC 5040 §8.1.1);
/// * further posts that would complete into it are refused
///   ([`PostError::CqOverflow`](crate::PostError::CqOverflow)), so that no more is kept than was
///   outstanding.
#[derive(Clone)]
pub struct Cq(Arc<CqShared>);

struct CqShared {
    ring: Mutex<Ring>,
    /// Entries in the ring, to be looked at without its lock.
    len: AtomicUsize,
    depth: usize,
    /// It has overflowed: to be looked at without the ring's lock.
    broken: AtomicBool,
    /// Queue pairs of TCP connections that complete here.
    qps: Mutex<Vec<Weak<QpShared>>>,
    /// Engines of UDP devices whose queue pairs complete here, and how many of each do.
    engines: Mutex<Users<Weak<Engine>>>,
    /// Whether there is an engine: to be looked at without the lock.
    over_udp: AtomicBool,
    /// Which queue pair is driven next.
    turn: AtomicUsize,
    /// Polls in vain since the last completion, up to [`PATIENCE`].
    vain: AtomicU32,
    pollers: Pollers,
    clock: Clock,
    spin: Duration,
}

struct Ring {
    /// More than the depth after an overflow.
    entries: VecDeque<Wc>,
    /// Completions that came when the queue was full.
    excess: u64,
    /// Futures that sleep until there is an entry.
    waiting: Wakers,
    /// Armed; `true`: for solicited completions and errors only.
    armed: Option<bool>,
    /// Events raised and not taken yet.
    events: u64,
    /// Futures that sleep until there is an event.
    listening: Wakers,
    hook: Option<EventHook>,
    overflow_hook: Option<EventHook>,
}

/// Wakers of sleeping futures, each under its future's number.
#[derive(Default)]
pub(crate) struct Wakers {
    list: Vec<(u64, Waker)>,
    next: u64,
}

impl Wakers {
    /// Sets the waker of the future `id`, which gets its number with the first call.
    pub(crate) fn set(&mut self, id: &mut Option<u64>, waker: &Waker) {
        let id = *id.get_or_insert_with(|| {
            self.next += 1;
            self.next
        });
        match self.list.iter_mut().find(|(known, _)| *known == id) {
            Some((_, known)) => known.clone_from(waker),
            None => self.list.push((id, waker.clone())),
        }
    }

    pub(crate) fn remove(&mut self, id: u64) {
        self.list.retain(|(known, _)| *known != id);
    }

    pub(crate) fn drain(&mut self) -> impl Iterator<Item = Waker> {
        self.list.drain(..).map(|(_, waker)| waker)
    }
}

impl Cq {
    pub(crate) fn new(depth: usize, clock: Clock, spin: Duration) -> Self {
        Self(Arc::new(CqShared {
            ring: Mutex::new(Ring {
                entries: VecDeque::with_capacity(depth),
                excess: 0,
                waiting: Wakers::default(),
                armed: None,
                events: 0,
                listening: Wakers::default(),
                hook: None,
                overflow_hook: None,
            }),
            broken: AtomicBool::new(false),
            len: AtomicUsize::new(0),
            depth,
            qps: Mutex::new(Vec::new()),
            engines: Mutex::new(Users::new()),
            over_udp: AtomicBool::new(false),
            turn: AtomicUsize::new(0),
            vain: AtomicU32::new(0),
            pollers: Pollers::default(),
            clock,
            spin,
        }))
    }

    /// Takes what is there, oldest first, into the front of `wcs`, and returns how many it took.
    ///
    /// Where there is nothing it drives the sockets of the queue pairs (a few a call, in turn) in
    /// the caller's own thread, so that nothing stands between the socket and the completion. It
    /// never waits; called again and again in vain, it yields the processor for a moment, to whom
    /// the completion may depend on.
    pub fn poll(&self, wcs: &mut [Wc]) -> usize {
        if wcs.is_empty() {
            return 0;
        }
        let mut n = self.take(wcs);
        let mut blocked = false;
        if n == 0 {
            blocked = self.advance(self.0.clock.now());
            n = self.take(wcs);
        }
        // Relaxed, and not atomic together: a lost count changes nothing.
        if n > 0 {
            self.0.vain.store(0, Ordering::Relaxed);
        } else {
            let vain = self.0.vain.load(Ordering::Relaxed) + 1;
            self.0.vain.store(vain.min(PATIENCE), Ordering::Relaxed);
            if vain >= PATIENCE || (blocked && vain >= BLOCKED_PATIENCE) {
                std::thread::yield_now();
            }
        }
        n
    }

    /// Waits for the next completion.
    ///
    /// It polls for [`DeviceOptions::spin`](crate::DeviceOptions::spin) before it sleeps. Cancel
    /// safe: a completion is taken only when the future returns it.
    ///
    /// # Errors
    /// [`Error::CqOverflow`], once the queue has overflowed and everything in it was taken.
    pub async fn next(&self) -> Result<Wc> {
        Next { cq: self, id: None, spin_until: None, asleep: false }.await
    }

    /// How many completions came while the queue was full; `None` as long as there were none. They
    /// are handed out behind the others.
    pub fn overflowed(&self) -> Option<u64> {
        let excess = self.0.ring.lock().excess;
        (excess > 0).then_some(excess)
    }

    /// Has `hook` called when the queue overflows, once, in the thread in which it does and with no
    /// lock held; at once where it has overflowed already. It replaces the hook before.
    pub fn on_overflow(&self, hook: impl Fn() + Send + Sync + 'static) {
        let hook: EventHook = Arc::new(hook);
        let (_before, late) = {
            let mut ring = self.0.ring.lock();
            (ring.overflow_hook.replace(hook.clone()), ring.excess > 0)
        };
        if late {
            hook();
        }
    }

    /// Completions it holds at most.
    pub fn depth(&self) -> usize {
        self.0.depth
    }

    /// Arms the queue for one event: the next completion that is put into it raises the event; with
    /// `solicited_only` the next one that failed or whose sender asked for it
    /// ([`SendFlags::SOLICITED`](crate::SendFlags::SOLICITED)). What is in the queue already raises
    /// none: poll once more after arming. Arming for everything is not narrowed by a later call.
    pub fn arm(&self, solicited_only: bool) {
        let newly = {
            let mut ring = self.0.ring.lock();
            let newly = ring.armed.is_none();
            ring.armed = Some(solicited_only && ring.armed.unwrap_or(true));
            newly
        };
        // Who arms is about to sleep, on whatever wakes it: as long as it is armed the sockets are
        // watched.
        if newly {
            self.sleep();
        }
    }

    /// Waits for an event of the armed queue, and takes it. Cancel safe.
    pub async fn notified(&self) {
        Notified { cq: self, id: None }.await;
    }

    /// Has `hook` called with each event, in the thread that raises it and with no lock held: to
    /// write to an eventfd, for example. It must not block. It replaces the hook before; events are
    /// counted for [`Cq::notified`] all the same.
    pub fn on_event(&self, hook: impl Fn() + Send + Sync + 'static) {
        // The hook before is dropped without the lock: what it owns may come back here.
        let _before = self.0.ring.lock().hook.replace(Arc::new(hook));
    }

    /// Takes the completions of queue pair `qpn` out of the queue and drops them, as destroying a
    /// queue pair does in the verbs of C. Returns how many there were.
    pub fn purge(&self, qpn: Qpn) -> usize {
        let mut ring = self.0.ring.lock();
        let before = ring.entries.len();
        ring.entries.retain(|wc| wc.qpn != qpn);
        let after = ring.entries.len();
        self.0.len.store(after, Ordering::Release);
        before - after
    }

    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Whether it has overflowed: a look without the lock.
    pub(crate) fn is_broken(&self) -> bool {
        self.0.broken.load(Ordering::Relaxed)
    }

    /// Whether work may be posted that completes here.
    pub(crate) fn may_post(&self) -> Result<(), PostError> {
        if self.is_broken() {
            return Err(PostError::CqOverflow { depth: self.0.depth });
        }
        Ok(())
    }

    pub(crate) fn pollers(&self) -> &Pollers {
        &self.0.pollers
    }

    pub(crate) fn attach(&self, qp: &Arc<QpShared>) {
        let Some(member) = qp.member() else {
            self.0.qps.lock().push(Arc::downgrade(qp));
            return;
        };
        let mut engines = self.0.engines.lock();
        let engine = member.engine();
        engines.add(|known| is_same(known, engine), || Arc::downgrade(engine));
        self.0.over_udp.store(true, Ordering::SeqCst);
    }

    pub(crate) fn detach(&self, qp: &Arc<QpShared>) {
        let Some(member) = qp.member() else {
            self.0.qps.lock().retain(|weak| !is_same(weak, qp));
            return;
        };
        let mut engines = self.0.engines.lock();
        engines.remove(|known| is_same(known, member.engine()));
        self.0.over_udp.store(!engines.is_empty(), Ordering::SeqCst);
    }

    /// Somebody goes to sleep until there is a completion.
    fn sleep(&self) {
        // A device over UDP knows by itself whether it is in epoll.
        if self.0.pollers.sleep() || self.0.over_udp.load(Ordering::SeqCst) {
            self.rouse();
        }
    }

    /// Puts `fresh` into the ring, oldest first, and leaves it empty.
    pub(crate) fn push(&self, fresh: &mut Vec<Wc>, wakes: &mut Wakes) {
        if fresh.is_empty() {
            return;
        }
        let mut ring = self.0.ring.lock();
        let ring = &mut *ring;
        // Of each device the queue pairs end, with the first that they bring.
        wakes.overflowed |= ring.excess > 0;
        let mut raises = match ring.armed {
            Some(true) => fresh.iter().any(|wc| wc.solicited || !wc.status.is_ok()),
            Some(false) => true,
            None => false,
        };
        let room = self.0.depth.saturating_sub(ring.entries.len());
        if fresh.len() > room {
            // Told once, to whoever listens in whatever way.
            if ring.excess == 0 {
                self.0.broken.store(true, Ordering::Relaxed);
                wakes.overflowed = true;
                wakes.hooks.extend(ring.overflow_hook.clone());
                raises = true;
            }
            ring.excess += (fresh.len() - room) as u64;
        }
        ring.entries.extend(fresh.drain(..));
        self.0.len.store(ring.entries.len(), Ordering::Release);
        wakes.wakers.extend(ring.waiting.drain());
        if raises {
            if ring.armed.take().is_some() {
                self.0.pollers.awake();
            }
            ring.events += 1;
            wakes.wakers.extend(ring.listening.drain());
            wakes.hooks.extend(ring.hook.clone());
        }
    }

    fn take(&self, wcs: &mut [Wc]) -> usize {
        if self.0.len.load(Ordering::Acquire) == 0 {
            return 0;
        }
        let mut ring = self.0.ring.lock();
        let n = wcs.len().min(ring.entries.len());
        for (place, wc) in wcs.iter_mut().zip(ring.entries.drain(..n)) {
            *place = wc;
        }
        self.0.len.store(ring.entries.len(), Ordering::Release);
        n
    }

    fn take_one(&self) -> Option<Wc> {
        let mut wc = [Wc::default()];
        (self.take(&mut wc) == 1).then_some(wc[0])
    }

    /// Drives some of the queue pairs, until there is a completion. Whether one of their sockets is
    /// full.
    fn advance(&self, now: Instant) -> bool {
        let shared = &*self.0;
        shared.pollers.polled(now);
        let mut blocked = false;
        if shared.over_udp.load(Ordering::Relaxed) {
            for i in 0.. {
                let (engine, last) = {
                    let engines = shared.engines.lock();
                    (engines.get(i).and_then(Weak::upgrade), i + 1 >= engines.len())
                };
                if let Some(engine) = engine {
                    blocked |= engine.try_turn(now).blocked;
                }
                if last {
                    break;
                }
            }
        }
        for _ in 0..DRIVEN {
            let (qp, last) = {
                let mut qps = shared.qps.lock();
                let count = qps.len();
                if count == 0 {
                    return blocked;
                }
                let turn = shared.turn.load(Ordering::Relaxed);
                let index = if turn < count { turn } else { 0 };
                shared.turn.store(index + 1, Ordering::Relaxed);
                let qp = qps[index].upgrade();
                if qp.is_none() {
                    qps.swap_remove(index);
                }
                (qp, index + 1 >= count)
            };
            if let Some(qp) = qp {
                blocked |= qp.try_turn(now).blocked;
            }
            if last || shared.len.load(Ordering::Acquire) > 0 {
                break;
            }
        }
        blocked
    }

    /// Tells whatever drives the queue pairs that somebody sleeps now.
    fn rouse(&self) {
        for engine in self.0.engines.lock().iter() {
            if let Some(engine) = engine.upgrade() {
                engine.rouse();
            }
        }
        let mut qps = self.0.qps.lock();
        qps.retain(|weak| match weak.upgrade() {
            Some(qp) => {
                qp.rouse();
                true
            }
            None => false,
        });
    }
}

impl fmt::Debug for Cq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cq")
            .field("depth", &self.0.depth)
            .field("len", &self.0.len.load(Ordering::Relaxed))
            .finish_non_exhaustive()
    }
}

fn is_same<T>(weak: &Weak<T>, strong: &Arc<T>) -> bool {
    std::ptr::eq(weak.as_ptr(), Arc::as_ptr(strong))
}

struct Next<'a> {
    cq: &'a Cq,
    id: Option<u64>,
    spin_until: Option<Instant>,
    asleep: bool,
}

impl Future for Next<'_> {
    type Output = Result<Wc>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = &mut *self;
        let shared = &*this.cq.0;
        // A loop over a queue that is never empty must let the runtime's other tasks run.
        let cooperation = ready!(coop::poll_proceed(cx));
        let now = shared.clock.now();
        let mut taken = this.cq.take_one();
        if taken.is_none() {
            this.cq.advance(now);
            taken = this.cq.take_one();
        }
        if let Some(wc) = taken {
            cooperation.made_progress();
            return Poll::Ready(Ok(wc));
        }
        let spin_until = *this.spin_until.get_or_insert(now + shared.spin);
        if now < spin_until {
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        {
            let mut ring = shared.ring.lock();
            if !ring.entries.is_empty() {
                // It came in between.
                cx.waker().wake_by_ref();
                return Poll::Pending;
            }
            if ring.excess > 0 {
                return Poll::Ready(Err(Error::CqOverflow(shared.depth)));
            }
            ring.waiting.set(&mut this.id, cx.waker());
        }
        if !this.asleep {
            this.asleep = true;
            this.cq.sleep();
        }
        Poll::Pending
    }
}

impl Drop for Next<'_> {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            self.cq.0.ring.lock().waiting.remove(id);
        }
        if self.asleep {
            self.cq.0.pollers.awake();
        }
    }
}

struct Notified<'a> {
    cq: &'a Cq,
    id: Option<u64>,
}

impl Future for Notified<'_> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = &mut *self;
        let mut ring = this.cq.0.ring.lock();
        if ring.events > 0 {
            ring.events -= 1;
            return Poll::Ready(());
        }
        ring.listening.set(&mut this.id, cx.waker());
        Poll::Pending
    }
}

impl Drop for Notified<'_> {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            self.cq.0.ring.lock().listening.remove(id);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use userdma_proto::verbs::WcStatus;

    fn cq(depth: usize) -> Cq {
        Cq::new(depth, Clock::start(), Duration::ZERO)
    }

    fn push(cq: &Cq, wcs: impl IntoIterator<Item = Wc>) -> Wakes {
        let mut wakes = Wakes::default();
        cq.push(&mut wcs.into_iter().collect(), &mut wakes);
        wakes
    }

    fn wc(id: u64) -> Wc {
        Wc { id, ..Wc::default() }
    }

    fn ids(cq: &Cq, max: usize) -> Vec<u64> {
        let mut wcs = vec![Wc::default(); max];
        let n = cq.poll(&mut wcs);
        wcs[..n].iter().map(|wc| wc.id).collect()
    }

    #[test]
    fn completions_come_out_in_order() {
        let cq = cq(8);
        let _ = push(&cq, (0..3).map(wc));
        let _ = push(&cq, (3..5).map(wc));
        assert_eq!(ids(&cq, 2), [0, 1]);
        assert_eq!(ids(&cq, 8), [2, 3, 4]);
        assert_eq!(ids(&cq, 8), []);
        assert_eq!(cq.poll(&mut []), 0);
    }

    #[tokio::test]
    async fn an_overflow_is_counted_and_nothing_is_lost() {
        let cq = cq(3);
        let _ = push(&cq, (0..2).map(wc));
        assert_eq!(cq.overflowed(), None);
        let _ = push(&cq, (2..7).map(wc));
        assert_eq!(cq.overflowed(), Some(4));
        assert_eq!(ids(&cq, 2), [0, 1]);
        assert_eq!(cq.next().await.unwrap().id, 2);
        assert_eq!(ids(&cq, 8), [3, 4, 5, 6], "what had no room is kept");
        assert!(matches!(cq.next().await, Err(Error::CqOverflow(3))));
        // It is sticky, but what comes later is handed out.
        let _ = push(&cq, [wc(9)]);
        assert_eq!(cq.next().await.unwrap().id, 9);
        assert_eq!(cq.overflowed(), Some(4));
    }

    #[test]
    fn an_overflow_is_told_once_armed_or_not() {
        use std::sync::atomic::AtomicU32;
        let cq = cq(2);
        let told = Arc::new(AtomicU32::new(0));
        let hook = |told: &Arc<AtomicU32>| {
            let told = told.clone();
            move || {
                told.fetch_add(1, Ordering::Relaxed);
            }
        };
        cq.on_overflow(hook(&told));
        push(&cq, (0..2).map(wc)).call();
        assert_eq!((cq.0.ring.lock().events, told.load(Ordering::Relaxed)), (0, 0));
        assert!(!cq.is_broken() && cq.may_post().is_ok());
        for id in 2..5 {
            push(&cq, [wc(id)]).call();
            assert_eq!((cq.0.ring.lock().events, told.load(Ordering::Relaxed)), (1, 1));
        }
        assert_eq!(cq.may_post(), Err(PostError::CqOverflow { depth: 2 }));
        assert_eq!(cq.overflowed(), Some(3));
        // It is emptied, and remains in error; who asks late is told at once.
        assert_eq!(ids(&cq, 8), [0, 1, 2, 3, 4]);
        assert!(cq.is_broken());
        cq.on_overflow(hook(&told));
        assert_eq!(told.load(Ordering::Relaxed), 2);
        // Events go on as before.
        cq.arm(false);
        push(&cq, [wc(9)]).call();
        assert_eq!(cq.0.ring.lock().events, 2);
        assert!(!cq.0.pollers.sleep(), "nobody relies on being woken");
    }

    #[test]
    fn an_armed_queue_raises_one_event() {
        let cq = cq(16);
        let _ = push(&cq, [wc(0)]);
        assert_eq!(cq.0.ring.lock().events, 0, "not armed");
        cq.arm(false);
        let _ = push(&cq, [wc(1)]);
        let _ = push(&cq, [wc(2)]);
        assert_eq!(cq.0.ring.lock().events, 1);
        cq.arm(true);
        let _ = push(&cq, [wc(3)]);
        assert_eq!(cq.0.ring.lock().events, 1, "not solicited");
        let _ = push(&cq, [Wc { solicited: true, ..wc(4) }]);
        assert_eq!(cq.0.ring.lock().events, 2);
        cq.arm(true);
        let _ = push(&cq, [Wc { status: WcStatus::WR_FLUSH_ERR, ..wc(5) }]);
        assert_eq!(cq.0.ring.lock().events, 3, "errors count as solicited");
        cq.arm(false);
        cq.arm(true);
        let _ = push(&cq, [wc(6)]);
        assert_eq!(cq.0.ring.lock().events, 4, "arming for all is not narrowed");
    }

    #[test]
    fn purging_drops_one_queue_pairs_completions() {
        let cq = cq(8);
        let of = |qpn, id| Wc { qpn: Qpn(qpn), ..wc(id) };
        let _ = push(&cq, [of(1, 0), of(2, 1), of(1, 2)]);
        assert_eq!(cq.purge(Qpn(1)), 2);
        assert_eq!(ids(&cq, 8), [1]);
    }
}
