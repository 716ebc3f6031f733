//! Receives: where a queue pair's come from, and the queue that several share.
//!
//! ```text
//!            ┌ own:    post ─► [ r r r ] ─┐
//!  queue pair│                            ├─► current() … current() ─► finish() ─► completion
//!            └ shared:      Receives::take┘   first segment … last       with the QP's number
//!                                 ▲
//!   SharedQueue, behind the driver's lock: post ─► [ r r r r r r ], arm(limit) ─► one event
//! ```
//!
//! A state machine holds one [`ReceiveQueue`] and does not care which kind it is: it asks for the
//! [current](ReceiveQueue::current) receive with each segment of a message, and
//! [finishes](ReceiveQueue::finish) it with the last. A queue of its own costs neither a lock nor an
//! allocation. A shared one is reached through [`Receives`], which the driver implements: it keeps a
//! [`SharedQueue`] behind a lock, which is held for the moment of one `take`.
//!
//! In the order of verbs a shared receive belongs to the queue pair whose message's first segment
//! came first; from then on it is that queue pair's alone. In the error state a queue pair flushes
//! what is its own: all of an own queue, of a shared one the receive under way and nothing else.
//! In RoCEv2 that is so for the packets of a SEND; a WRITE with immediate takes its receive with the
//! last packet, where a responder first looks whether there is one.

use alloc::{collections::VecDeque, sync::Arc};
use core::fmt;

use crate::verbs::{PostError, RecvWr};

/// A receive that was posted and checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Receive {
    /// What was posted.
    pub wr: RecvWr,
    /// The driver's own number from the post.
    pub tag: u64,
    /// Octets that the pieces take in all.
    pub len: u32,
}

impl Receive {
    /// A receive for a queue that allows `max_sge` pieces.
    ///
    /// # Errors
    /// As [`RecvWr::check`].
    pub fn new(wr: RecvWr, tag: u64, max_sge: usize) -> Result<Self, PostError> {
        let len = wr.check(max_sge)?;
        Ok(Self { wr, tag, len })
    }
}

/// A source of receives that several queue pairs share: the driver's shared receive queue, which
/// is a [`SharedQueue`] behind a lock.
pub trait Receives: fmt::Debug + Send + Sync {
    /// Takes the oldest receive, for good: it never comes back. `None`: there is none now.
    ///
    /// It is called from within a state machine, so it must not call into one. An event of the
    /// queue's limit is to be told when that state machine has returned.
    fn take(&self) -> Option<Receive>;
}

/// The receives of one queue pair: its own, or those of a queue that it shares.
#[derive(Debug)]
pub struct ReceiveQueue(Source);

#[derive(Debug)]
enum Source {
    /// Oldest first; the front is the one under way.
    Own(VecDeque<Receive>),
    Shared {
        from: Arc<dyn Receives>,
        /// Taken by a message that is not whole yet.
        current: Option<Receive>,
    },
}

impl Default for ReceiveQueue {
    fn default() -> Self {
        Self::own()
    }
}

impl ReceiveQueue {
    /// A queue of the queue pair's own, empty.
    pub const fn own() -> Self {
        Self(Source::Own(VecDeque::new()))
    }

    /// Takes what it needs from a shared queue.
    pub const fn shared(from: Arc<dyn Receives>) -> Self {
        Self(Source::Shared { from, current: None })
    }

    /// Whether the receives are shared: such a queue pair takes no post, and grants its peer no
    /// credits, as it does not know how many are left for it.
    pub const fn is_shared(&self) -> bool {
        matches!(self.0, Source::Shared { .. })
    }

    /// Receives that this queue pair holds: all of an own queue, of a shared one 0 or 1.
    pub fn len(&self) -> usize {
        match &self.0 {
            Source::Own(queue) => queue.len(),
            Source::Shared { current, .. } => usize::from(current.is_some()),
        }
    }

    /// Whether it holds none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Drops what it holds without a completion, as a queue pair does that is reset. It stays what
    /// it is, its own or shared.
    pub fn reset(&mut self) {
        match &mut self.0 {
            Source::Own(queue) => queue.clear(),
            Source::Shared { current, .. } => *current = None,
        }
    }

    /// Appends a receive to an own queue of at most `max_wr`, each of at most `max_sge` pieces.
    ///
    /// # Errors
    /// [`PostError::SharedReceives`], [`PostError::QueueFull`], or as [`RecvWr::check`].
    pub fn post(
        &mut self,
        wr: RecvWr,
        tag: u64,
        max_wr: usize,
        max_sge: usize,
    ) -> Result<(), PostError> {
        let Source::Own(queue) = &mut self.0 else {
            return Err(PostError::SharedReceives);
        };
        let receive = Receive::new(wr, tag, max_sge)?;
        if queue.len() >= max_wr {
            return Err(PostError::QueueFull { max: max_wr });
        }
        queue.push_back(receive);
        Ok(())
    }

    /// The receive of the message under way. Where none is, it is the oldest one, which a shared
    /// queue gives to this queue pair now and for good; it stays until [`ReceiveQueue::finish`].
    /// `None`: no receive is ready (iWARP: Terminate; RoCE: RNR NAK, or the message is dropped).
    pub fn current(&mut self) -> Option<&Receive> {
        match &mut self.0 {
            Source::Own(queue) => queue.front(),
            Source::Shared { from, current } => {
                if current.is_none() {
                    *current = from.take();
                }
                current.as_ref()
            }
        }
    }

    /// Takes out the receive under way, to be completed: with the last segment, with an error, or,
    /// called until there is none, as flushed. Of an own queue that is the front, of a shared one
    /// only what [`ReceiveQueue::current`] has taken.
    pub fn finish(&mut self) -> Option<Receive> {
        match &mut self.0 {
            Source::Own(queue) => queue.pop_front(),
            Source::Shared { current, .. } => current.take(),
        }
    }
}

/// A shared receive queue: plain data, which a driver keeps behind a lock and gives to its queue
/// pairs as [`Receives`].
#[derive(Debug)]
pub struct SharedQueue {
    queue: VecDeque<Receive>,
    max_wr: usize,
    max_sge: usize,
    /// Armed where it is above 0.
    limit: usize,
    /// Events that were raised and not taken.
    events: usize,
}

impl SharedQueue {
    /// An empty queue of at most `max_wr` receives, each of at most `max_sge` pieces.
    pub const fn new(max_wr: usize, max_sge: usize) -> Self {
        Self { queue: VecDeque::new(), max_wr, max_sge, limit: 0, events: 0 }
    }

    /// Receives that are posted and not taken.
    pub fn len(&self) -> usize {
        self.queue.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// Receives that it holds at most.
    pub const fn max_wr(&self) -> usize {
        self.max_wr
    }

    /// Pieces that a receive may have.
    pub const fn max_sge(&self) -> usize {
        self.max_sge
    }

    /// The limit it is armed with, 0 where it is not.
    pub const fn limit(&self) -> usize {
        self.limit
    }

    /// Appends a receive. `tag` comes back in its completion.
    ///
    /// # Errors
    /// [`PostError::QueueFull`], or as [`RecvWr::check`].
    pub fn post(&mut self, wr: RecvWr, tag: u64) -> Result<(), PostError> {
        let receive = Receive::new(wr, tag, self.max_sge)?;
        if self.queue.len() >= self.max_wr {
            return Err(PostError::QueueFull { max: self.max_wr });
        }
        self.queue.push_back(receive);
        Ok(())
    }

    /// Takes the oldest receive; where fewer than the limit are left then, the event is raised and
    /// the queue is no longer armed.
    pub fn take(&mut self) -> Option<Receive> {
        let receive = self.queue.pop_front();
        self.look();
        receive
    }

    /// Arms the queue for one event: raised as soon as fewer than `limit` receives are posted, which
    /// is at once where so few are posted now, so that nothing taken before this call is missed. It
    /// replaces the limit before; 0 disarms.
    ///
    /// # Errors
    /// [`PostError::Invalid`] for a limit above [`SharedQueue::max_wr`].
    pub fn arm(&mut self, limit: usize) -> Result<(), PostError> {
        if limit > self.max_wr {
            return Err(PostError::Invalid(
                "the limit of a shared receive queue is at most its length",
            ));
        }
        self.limit = limit;
        self.look();
        Ok(())
    }

    /// Takes one event of the limit. True: there was one.
    pub fn poll_event(&mut self) -> bool {
        let raised = self.events > 0;
        self.events -= usize::from(raised);
        raised
    }

    /// Changes the length. What is posted stays.
    ///
    /// # Errors
    /// [`PostError::QueueFull`] where more receives than `max_wr` are posted. An armed limit is
    /// never above what is posted, so it stands in no way.
    pub fn resize(&mut self, max_wr: usize) -> Result<(), PostError> {
        if self.queue.len() > max_wr {
            return Err(PostError::QueueFull { max: max_wr });
        }
        self.max_wr = max_wr;
        Ok(())
    }

    /// Drops what is posted, and the arming: the queue ends. Returns how many receives there were.
    pub fn clear(&mut self) -> usize {
        self.limit = 0;
        self.events = 0;
        core::mem::take(&mut self.queue).len()
    }

    fn look(&mut self) {
        if self.queue.len() < self.limit {
            self.limit = 0;
            self.events += 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::{Mutex, PoisonError},
        vec::Vec,
    };

    use super::*;
    use crate::{verbs::Sge, wire::ids::LKey};

    #[derive(Debug)]
    struct Locked(Mutex<SharedQueue>);

    impl Receives for Locked {
        fn take(&self) -> Option<Receive> {
            self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
        }
    }

    fn wr(id: u64) -> RecvWr {
        RecvWr::new(id, [Sge::new(0, 8, LKey(1)), Sge::new(8, 3, LKey(1))])
    }

    fn id(receive: Option<Receive>) -> Option<u64> {
        receive.map(|receive| receive.wr.id)
    }

    fn shared(max_wr: usize, posted: u64) -> SharedQueue {
        let mut queue = SharedQueue::new(max_wr, 2);
        (0..posted).for_each(|id| queue.post(wr(id), 0).unwrap());
        queue
    }

    #[test]
    fn an_own_queue_is_finished_from_the_front_to_the_last() {
        let mut queue = ReceiveQueue::own();
        assert_eq!(queue.current(), None);
        for id in 0..3 {
            queue.post(wr(id), 100 + id, 3, 2).unwrap();
        }
        assert_eq!(queue.post(wr(3), 0, 3, 2), Err(PostError::QueueFull { max: 3 }));
        assert_eq!(
            queue.post(wr(3), 0, 4, 1),
            Err(PostError::TooManySges { max: 1, have: 2 }),
            "told first, whether or not there is room"
        );
        let current = queue.current().unwrap().clone();
        assert_eq!((current.wr.id, current.tag, current.len), (0, 100, 11));
        assert_eq!((queue.len(), queue.is_shared()), (3, false));
        assert_eq!([queue.finish(), queue.finish(), queue.finish()].map(id), [0, 1, 2].map(Some));
        assert_eq!((queue.finish(), queue.is_empty()), (None, true));
    }

    #[test]
    fn who_begins_first_takes_first_and_keeps_it() {
        let srq = Arc::new(Locked(Mutex::new(shared(8, 4))));
        let mut queues = [0; 3].map(|_| ReceiveQueue::shared(srq.clone()));
        let began = |queue: &mut ReceiveQueue| queue.current().map(|receive| receive.wr.id);
        assert_eq!(began(&mut queues[1]), Some(0));
        assert_eq!(began(&mut queues[0]), Some(1));
        // Segments that follow are of the same message.
        assert_eq!(began(&mut queues[1]), Some(0));
        assert_eq!(id(queues[0].finish()), Some(1));
        assert_eq!(began(&mut queues[0]), Some(2));
        // Flushed: what is under way, and nothing that is still in the queue.
        assert_eq!((queues[1].len(), queues[2].len()), (1, 0));
        assert_eq!(
            [queues[1].finish(), queues[1].finish(), queues[2].finish()].map(id),
            [Some(0), None, None]
        );
        assert_eq!(srq.0.lock().unwrap().len(), 1);
        assert_eq!(queues[0].post(wr(9), 0, 8, 8), Err(PostError::SharedReceives));
        assert_eq!(began(&mut queues[2]), Some(3));
        assert_eq!(began(&mut queues[1]), None, "there is none left");
        srq.0.lock().unwrap().post(wr(7), 0).unwrap();
        assert_eq!(began(&mut queues[1]), Some(7), "asked again, there is one");
        // A reset drops it, and the queue stays shared.
        queues[1].reset();
        assert_eq!((queues[1].len(), queues[1].is_shared()), (0, true));
        assert_eq!(began(&mut queues[1]), None);
    }

    #[test]
    fn the_limit_raises_one_event_an_arming() {
        let mut queue = shared(8, 5);
        let take = |queue: &mut SharedQueue| {
            queue.take().unwrap();
            queue.poll_event()
        };
        assert!(!take(&mut queue), "not armed");
        queue.arm(3).unwrap();
        // 4 posted: 3 are left, then 2.
        assert_eq!([take(&mut queue), take(&mut queue), take(&mut queue)], [false, true, false]);
        assert_eq!(queue.limit(), 0);
        // Armed with too few posted already: at once. It does not rise again with posts.
        queue.arm(2).unwrap();
        assert!(queue.poll_event() && !queue.poll_event());
        queue.post(wr(9), 0).unwrap();
        queue.post(wr(10), 0).unwrap();
        queue.arm(2).unwrap();
        queue.arm(0).unwrap();
        assert_eq!([take(&mut queue), take(&mut queue), take(&mut queue)], [false; 3], "disarmed");
        assert!(queue.take().is_none() && !queue.poll_event());
        // Two armings that nobody asked after are two events.
        queue.arm(1).unwrap();
        queue.arm(8).unwrap();
        assert_eq!([(); 3].map(|()| queue.poll_event()), [true, true, false]);
        assert!(matches!(queue.arm(9), Err(PostError::Invalid(why)) if why.contains("at most")));
    }

    #[test]
    fn it_is_resized_as_far_as_what_is_in_it_allows() {
        let mut queue = shared(4, 4);
        assert_eq!(queue.post(wr(4), 0), Err(PostError::QueueFull { max: 4 }));
        assert_eq!(queue.resize(3), Err(PostError::QueueFull { max: 3 }));
        queue.resize(5).unwrap();
        queue.post(wr(4), 0).unwrap();
        queue.arm(5).unwrap();
        let left: Vec<_> = core::iter::from_fn(|| id(queue.take())).collect();
        assert_eq!((left, queue.poll_event()), ((0..5).collect(), true));
        assert_eq!((queue.max_wr(), queue.max_sge(), queue.is_empty()), (5, 2, true));
    }

    #[test]
    fn an_end_drops_what_is_posted_and_the_arming() {
        let mut queue = shared(4, 3);
        queue.arm(3).unwrap();
        assert!(!queue.poll_event(), "three are not fewer than three");
        assert_eq!((queue.clear(), queue.len(), queue.limit()), (3, 0, 0));
        assert_eq!((queue.take(), queue.poll_event()), (None, false));
    }
}
