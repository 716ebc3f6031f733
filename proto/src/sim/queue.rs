//! What happens next, in virtual time.

use alloc::collections::BinaryHeap;
use core::{cmp::Ordering, time::Duration};

use crate::time::Instant;

/// Events in the order of their time; those of one instant in the order in which they were put in.
/// Taking one out moves the clock there.
#[derive(Debug, Clone)]
pub struct EventQueue<E> {
    heap: BinaryHeap<Entry<E>>,
    now: Instant,
    put: u64,
}

#[derive(Debug, Clone)]
struct Entry<E> {
    at: Instant,
    order: u64,
    event: E,
}

impl<E> EventQueue<E> {
    /// Nothing happens; the clock shows `now`.
    pub const fn new(now: Instant) -> Self {
        Self { heap: BinaryHeap::new(), now, put: 0 }
    }

    /// The time of the last event that was taken.
    pub const fn now(&self) -> Instant {
        self.now
    }

    /// `event` happens at `at`; now, if that is past.
    pub fn at(&mut self, at: Instant, event: E) {
        self.put += 1;
        self.heap.push(Entry { at: at.max(self.now), order: self.put, event });
    }

    /// `event` happens `after` from now.
    pub fn after(&mut self, after: Duration, event: E) {
        self.at(self.now + after, event);
    }

    /// When the next event happens.
    pub fn peek(&self) -> Option<Instant> {
        self.heap.peek().map(|entry| entry.at)
    }

    /// The next event that happens until `limit`; the clock moves to it.
    pub fn next_until(&mut self, limit: Instant) -> Option<(Instant, E)> {
        if self.peek()? > limit {
            return None;
        }
        let Entry { at, event, .. } = self.heap.pop()?;
        self.now = at;
        Some((at, event))
    }

    /// Events that are to come.
    pub fn len(&self) -> usize {
        self.heap.len()
    }

    /// Nothing is to come.
    pub fn is_empty(&self) -> bool {
        self.heap.is_empty()
    }
}

/// The next event, whenever it is; the clock moves to it. There may be more after `None`.
impl<E> Iterator for EventQueue<E> {
    type Item = (Instant, E);

    fn next(&mut self) -> Option<Self::Item> {
        self.next_until(Instant::from_nanos(u64::MAX))
    }
}

impl<E> Entry<E> {
    fn key(&self) -> (Instant, u64) {
        (self.at, self.order)
    }
}

// The heap has the greatest on top; we want the earliest.
impl<E> Ord for Entry<E> {
    fn cmp(&self, other: &Self) -> Ordering {
        other.key().cmp(&self.key())
    }
}

impl<E> PartialOrd for Entry<E> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> PartialEq for Entry<E> {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl<E> Eq for Entry<E> {}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::vec::Vec;

    #[test]
    fn clock_follows_the_events() {
        let mut queue = EventQueue::new(Instant::from_nanos(10));
        queue.after(Duration::from_nanos(5), 'b');
        queue.at(Instant::ZERO, 'a');
        assert_eq!((queue.peek(), queue.len()), (Some(Instant::from_nanos(10)), 2));
        assert_eq!(queue.next(), Some((Instant::from_nanos(10), 'a')));
        assert_eq!(queue.next_until(Instant::from_nanos(14)), None);
        assert_eq!(queue.next(), Some((Instant::from_nanos(15), 'b')));
        assert_eq!((queue.now(), queue.is_empty()), (Instant::from_nanos(15), true));
    }

    proptest! {
        #[test]
        fn order_is_that_of_a_stable_sort(times in prop::collection::vec(0u64..20, 0..100)) {
            let mut queue = EventQueue::new(Instant::ZERO);
            let mut expected: Vec<_> =
                times.iter().map(|&t| Instant::from_nanos(t)).zip(0usize..).collect();
            expected.iter().for_each(|&(at, i)| queue.at(at, i));
            expected.sort_by_key(|&(at, _)| at);
            prop_assert_eq!(queue.collect::<Vec<_>>(), expected);
        }
    }
}
