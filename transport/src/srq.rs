//! Shared receive queues.

use std::{
    fmt,
    future::Future,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll},
};

use parking_lot::Mutex;
use userdma_proto::{
    srq::{Receive, Receives, SharedQueue},
    verbs::{PostError, RecvWr},
};

use crate::{
    cq::{EventHook, Wakers},
    engine::Wakes,
    error::{Error, Result},
    pd::Pd,
};

/// Receives that it may hold at most.
const MAX_WR: usize = 1 << 22;

/// Shared receive queue: receives that several queue pairs take from, so that there need be only as
/// many as messages come in all. Made by [`Pd::create_srq`], given to queue pairs by
/// [`QpInit::srq`](crate::QpInit::srq). Cheap to clone; all clones are the same queue.
///
/// A message takes the oldest receive when its first segment arrives, and completes it in the
/// receiving queue pair's [`recv_cq`](crate::QpInit::recv_cq); [`Wc::qpn`](crate::Wc::qpn) tells
/// which queue pair that was. When a queue pair goes to the error state, what its messages have
/// taken completes as flushed, and what is in the queue stays there for the others. When
/// [`Qp::closed`](crate::Qp::closed) returns, the last such completion is in its queue.
///
/// A SEND that finds the queue empty ends its connection on iWARP (Terminate "no buffer available",
/// RFC 5041 §7.2), and the others go on; on RoCE its sender waits and tries again (RNR NAK). So post
/// early: [`Srq::arm`] tells when few are left.
/// [`Stats::receives`](crate::Stats::receives) tells which peer uses them up.
#[derive(Clone)]
pub struct Srq(Arc<SrqShared>);

/// What the clones and the queue pairs' state machines share.
struct SrqShared {
    pd: Pd,
    state: Mutex<State>,
    /// Events wait in the queue: to be looked at without its lock.
    raised: AtomicBool,
}

struct State {
    queue: SharedQueue,
    /// Queue pairs made with it and not dropped.
    users: usize,
    destroyed: bool,
    /// Events told and not taken yet.
    events: u64,
    /// Futures that sleep until there is an event.
    listening: Wakers,
    hook: Option<EventHook>,
}

impl Srq {
    pub(crate) fn new(pd: Pd, max_wr: usize, max_sge: usize) -> Result<Self> {
        in_range(max_wr)?;
        Ok(Self(Arc::new(SrqShared {
            pd,
            state: Mutex::new(State {
                queue: SharedQueue::new(max_wr, max_sge),
                users: 0,
                destroyed: false,
                events: 0,
                listening: Wakers::default(),
                hook: None,
            }),
            raised: AtomicBool::new(false),
        })))
    }

    /// Posts a receive, for whichever queue pair's message comes next.
    ///
    /// # Errors
    /// Nothing changed: the queue is full or destroyed, or there are too many pieces.
    pub fn post_recv(&self, wr: RecvWr) -> Result<(), PostError> {
        self.post_recv_batch([wr]).map_err(|(_, e)| e)
    }

    /// Posts receives under one lock.
    ///
    /// # Errors
    /// `(n, e)`: the first `n` were posted, number `n` was refused because of `e`.
    pub fn post_recv_batch(
        &self,
        wrs: impl IntoIterator<Item = RecvWr>,
    ) -> Result<(), (usize, PostError)> {
        let mut state = self.0.state.lock();
        if state.destroyed {
            return Err((0, PostError::Invalid("the shared receive queue was destroyed")));
        }
        for (posted, wr) in wrs.into_iter().enumerate() {
            state.queue.post(wr, 0).map_err(|e| (posted, e))?;
        }
        Ok(())
    }

    /// Arms the queue for one event (`SRQ_LIMIT_REACHED` of verbs): it is raised as soon as fewer
    /// than `limit` receives are posted, and the queue is not armed any more then. Where there are
    /// so few already it is raised at once, so nothing that was taken just before is missed. A later
    /// call replaces the limit; 0 disarms.
    ///
    /// # Errors
    /// [`Error::Post`] for a limit above [`Srq::max_wr`], [`Error::State`] where it was destroyed.
    pub fn arm(&self, limit: usize) -> Result<()> {
        let mut wakes = Wakes::default();
        {
            let mut state = self.0.alive()?;
            state.queue.arm(limit)?;
            self.0.tell(&mut state, &mut wakes);
        }
        wakes.call();
        Ok(())
    }

    /// Waits for an event of the armed queue, and takes it. Cancel safe.
    pub async fn limit_reached(&self) {
        LimitReached { srq: &self.0, id: None }.await;
    }

    /// Has `hook` called with each event, in the thread that raises it and with no lock held: to
    /// write to an eventfd, for example. It must not block. It replaces the hook before; events are
    /// counted for [`Srq::limit_reached`] all the same.
    pub fn on_limit(&self, hook: impl Fn() + Send + Sync + 'static) {
        // The hook before is dropped without the lock: what it owns may come back here.
        let _before = self.0.state.lock().hook.replace(Arc::new(hook));
    }

    /// Makes the queue longer or shorter. What is posted stays, and a queue that is armed stays so.
    ///
    /// # Errors
    /// [`Error::Post`] where more receives than `max_wr` are posted, [`Error::Limit`] for a length of
    /// 0 or above 4,194,304, [`Error::State`] where it was destroyed.
    pub fn resize(&self, max_wr: usize) -> Result<()> {
        in_range(max_wr)?;
        Ok(self.0.alive()?.queue.resize(max_wr)?)
    }

    /// Ends the queue: receives that are posted are dropped without a completion, later posts are
    /// refused. Returns how many were dropped. Not called, the same happens when the last clone and
    /// the last of its queue pairs are dropped.
    ///
    /// # Errors
    /// [`Error::State`] as long as a queue pair made with it has not been dropped, or where it was
    /// destroyed already.
    pub fn destroy(&self) -> Result<usize> {
        let mut state = self.0.alive()?;
        if state.users > 0 {
            return Err(Error::State(
                "queue pairs still take receives from this shared receive queue: drop them first",
            ));
        }
        state.destroyed = true;
        Ok(state.queue.clear())
    }

    /// Receives that are posted and not taken.
    pub fn posted(&self) -> usize {
        self.0.state.lock().queue.len()
    }

    /// Receives it holds at most.
    pub fn max_wr(&self) -> usize {
        self.0.state.lock().queue.max_wr()
    }

    /// Pieces that a receive may have.
    pub fn max_sge(&self) -> usize {
        self.0.state.lock().queue.max_sge()
    }

    /// The limit it is armed with; 0 where it is not armed.
    pub fn limit(&self) -> usize {
        self.0.state.lock().queue.limit()
    }

    /// Queue pairs that use it.
    pub fn users(&self) -> usize {
        self.0.state.lock().users
    }

    /// The protection domain: that of its queue pairs, too.
    pub fn pd(&self) -> &Pd {
        &self.0.pd
    }

    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// One more queue pair, of the domain `pd`, uses it.
    pub(crate) fn attach(&self, pd: &Pd) -> Result<()> {
        if !self.0.pd.is(pd) {
            return Err(Error::State(
                "the shared receive queue belongs to another protection domain than the queue pair",
            ));
        }
        self.0.alive()?.users += 1;
        Ok(())
    }

    pub(crate) fn detach(&self) {
        self.0.state.lock().users -= 1;
    }

    /// For a state machine to take receives from.
    pub(crate) fn receives(&self) -> Arc<dyn Receives> {
        self.0.clone()
    }

    /// Events that a state machine has raised meanwhile, to whom they concern.
    pub(crate) fn settle(&self, wakes: &mut Wakes) {
        if self.0.raised.load(Ordering::Acquire) {
            self.0.tell(&mut self.0.state.lock(), wakes);
        }
    }
}

fn in_range(max_wr: usize) -> Result<()> {
    if max_wr == 0 || max_wr > MAX_WR {
        return Err(Error::Limit("a shared receive queue holds 1 to 4,194,304 receives"));
    }
    Ok(())
}

impl SrqShared {
    fn alive(&self) -> Result<parking_lot::MutexGuard<'_, State>> {
        let state = self.state.lock();
        if state.destroyed {
            return Err(Error::State("the shared receive queue was destroyed"));
        }
        Ok(state)
    }

    fn tell(&self, state: &mut State, wakes: &mut Wakes) {
        self.raised.store(false, Ordering::Release);
        while state.queue.poll_event() {
            state.events += 1;
            wakes.wakers.extend(state.listening.drain());
            wakes.hooks.extend(state.hook.clone());
        }
    }
}

impl Receives for SrqShared {
    fn take(&self) -> Option<Receive> {
        let mut state = self.state.lock();
        let armed = state.queue.limit();
        let receive = state.queue.take();
        if state.queue.limit() != armed {
            // The lock of a queue pair is held: it tells when its state machine has returned.
            self.raised.store(true, Ordering::Release);
        }
        receive
    }
}

impl fmt::Debug for SrqShared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.state.lock();
        f.debug_struct("Srq")
            .field("posted", &state.queue.len())
            .field("max_wr", &state.queue.max_wr())
            .field("limit", &state.queue.limit())
            .field("users", &state.users)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Srq {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

struct LimitReached<'a> {
    srq: &'a SrqShared,
    id: Option<u64>,
}

impl Future for LimitReached<'_> {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let this = &mut *self;
        let mut state = this.srq.state.lock();
        if state.events > 0 {
            state.events -= 1;
            return Poll::Ready(());
        }
        state.listening.set(&mut this.id, cx.waker());
        Poll::Pending
    }
}

impl Drop for LimitReached<'_> {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            self.srq.state.lock().listening.remove(id);
        }
    }
}
