//! Who sends when: the counting of a ping-pong, without a socket.
//!
//! The client sends first on every queue pair. On each of them a side sends again once its message
//! before is acknowledged and an answer has come. A side is through when it has had as many
//! completions of sends and of receives as asked for, of all queue pairs together.
//!
//! Receives are posted a whole stock at a time: at the beginning, and when no more than one is left
//! (with a shared queue: one for each queue pair).

/// The state of one side.
#[derive(Debug)]
pub(super) struct Rally {
    iters: u64,
    /// Receives that are posted when the stock is full.
    depth: usize,
    /// Receives that are posted now.
    posted: usize,
    sent: u64,
    received: u64,
    waits: Vec<Waits>,
}

/// What a queue pair waits for before it sends again.
#[derive(Clone, Copy, Debug, Default)]
struct Waits {
    acknowledgement: bool,
    message: bool,
}

impl Rally {
    /// A side of `iters` messages each way, over `qps` queue pairs, with a stock of `depth`
    /// receives, all of them posted. A `client` has sent the first message of each queue pair.
    pub(super) fn new(iters: u64, qps: usize, depth: usize, client: bool) -> Self {
        let waits = vec![Waits { acknowledgement: client, message: true }; qps];
        Self { iters, depth, posted: depth, sent: 0, received: 0, waits }
    }

    /// A message of queue pair `qp` is out; whether it is to send another one now.
    pub(super) fn sent(&mut self, qp: usize) -> bool {
        self.sent += 1;
        self.waits[qp].acknowledgement = false;
        self.again(qp)
    }

    /// A message came to queue pair `qp`; whether it is to send now.
    pub(super) fn received(&mut self, qp: usize) -> bool {
        self.received += 1;
        self.posted = self.posted.saturating_sub(1);
        self.waits[qp].message = false;
        self.again(qp)
    }

    fn again(&mut self, qp: usize) -> bool {
        let waits = &mut self.waits[qp];
        if waits.acknowledgement || waits.message || self.sent >= self.iters {
            return false;
        }
        *waits = Waits { acknowledgement: true, message: true };
        true
    }

    /// How many receives are to be posted now.
    pub(super) fn refill(&mut self) -> usize {
        if self.posted > self.waits.len() {
            return 0;
        }
        let missing = self.depth - self.posted;
        self.posted = self.depth;
        missing
    }

    /// Whether this side is through.
    pub(super) const fn is_over(&self) -> bool {
        self.sent >= self.iters && self.received >= self.iters
    }

    /// Messages that came.
    pub(super) const fn received_so_far(&self) -> u64 {
        self.received
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use super::*;

    #[derive(Clone, Copy, Debug)]
    enum Event {
        /// The acknowledgement of the side's message on this queue pair.
        Acknowledged(usize),
        Message(usize),
    }

    /// Two sides over a network that loses nothing, whose deliveries are in an order by `seed`:
    /// messages sent by each.
    fn play(iters: u64, qps: usize, depth: usize, seed: u64) -> [u64; 2] {
        let mut sides = [true, false].map(|client| Rally::new(iters, qps, depth, client));
        let mut network: [VecDeque<Event>; 2] = Default::default();
        let mut receives = [depth, depth];
        let mut posted = [0, 0];
        let mut random = userdma_tests::Rng::new(seed);
        for qp in 0..qps {
            network[1].push_back(Event::Message(qp));
            network[0].push_back(Event::Acknowledged(qp));
            posted[0] += 1;
        }
        let bound = 20 * (iters + qps as u64);
        for turn in 0.. {
            assert!(turn < bound, "it does not end: {sides:?}");
            if sides.iter().all(Rally::is_over) {
                return posted;
            }
            let here = match [network[0].is_empty(), network[1].is_empty()] {
                [true, true] => panic!("nobody has anything to do: {sides:?}"),
                [true, false] => 1,
                [false, true] => 0,
                [false, false] => random.below(2) as usize,
            };
            // Between queue pairs order means nothing.
            let at = random.below(network[here].len() as u64) as usize;
            let Some(event) = network[here].remove(at) else { unreachable!() };
            if sides[here].is_over() {
                continue;
            }
            let (qp, send) = match event {
                Event::Acknowledged(qp) => (qp, sides[here].sent(qp)),
                Event::Message(qp) => {
                    assert!(receives[here] > 0, "a message without a receive");
                    receives[here] -= 1;
                    (qp, sides[here].received(qp))
                }
            };
            receives[here] += sides[here].refill();
            assert!(receives[here] <= depth);
            if send {
                posted[here] += 1;
                network[1 - here].push_back(Event::Message(qp));
                network[here].push_back(Event::Acknowledged(qp));
            }
        }
        unreachable!()
    }

    #[test]
    fn one_queue_pair_sends_exactly_as_often_as_asked_for() {
        for iters in [1, 2, 3, 1000] {
            for depth in [1, 2, 3, 500] {
                for seed in 0..10 {
                    assert_eq!(play(iters, 1, depth, seed), [iters; 2], "{iters} {depth} {seed}");
                }
            }
        }
    }

    /// As many more as there are queue pairs may be under way when a side is through.
    #[test]
    fn several_queue_pairs_come_to_an_end_together() {
        for (iters, qps, depth) in [(1, 16, 16), (1000, 16, 500), (20, 4, 5), (7, 255, 255)] {
            for seed in 0..20 {
                for posted in play(iters, qps, depth, seed) {
                    assert!((iters..=iters + qps as u64).contains(&posted), "{iters} {qps} {seed}");
                }
            }
        }
    }

    #[test]
    fn receives_are_posted_by_the_stock() {
        let mut rally = Rally::new(1000, 1, 3, false);
        assert_eq!(rally.refill(), 0);
        assert!(rally.received(0));
        assert_eq!(rally.refill(), 0);
        assert!(!rally.sent(0));
        assert!(rally.received(0));
        // One is left.
        assert_eq!((rally.refill(), rally.refill()), (2, 0));
        assert_eq!(rally.received_so_far(), 2);
    }

    /// A peer that sends more than its turn allows changes nothing but the count.
    #[test]
    fn messages_out_of_turn_are_not_answered_twice() {
        let mut rally = Rally::new(1000, 1, 8, false);
        assert!(rally.received(0));
        assert!(!rally.received(0));
        assert!(rally.sent(0), "the second message is answered when the first answer is out");
        assert!(!rally.sent(0));
    }
}
