//! How many octets may be on their way to one receive buffer.
//!
//! What fits into a socket's buffer without being read was measured on Linux (payload as a share of
//! what `SO_RCVBUF` reports): 0.9 for trains that GRO keeps together, 0.45 for single packets of 1
//! to 4 KiB, and for small packets less and less, because each occupies some hundred octets more
//! than it carries. The budgets stay below that.
//!
//! | packets | fits | budget here |
//! | --- | --- | --- |
//! | trains received with GRO | 0.91 | 0.7 |
//! | single, 4,116 octets | 0.48 | 0.37 |
//! | single, 1,044 octets | 0.45 | 0.31 |
//! | single, 40 octets | 0.05 | 0.047 |

use alloc::collections::BTreeMap;

/// What a single packet occupies of a receive buffer besides its own octets, in the budget of 0.4.
const SINGLE_OVERHEAD: u64 = 300;

/// The room that a receive buffer offers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    budget: u64,
    overhead: u64,
}

impl Room {
    /// A peer that says itself how many octets may be on their way to it: a token's window.
    pub const fn told(budget: u64) -> Self {
        Self { budget, overhead: 0 }
    }

    /// A peer that receives trains as such (GRO): 0.7 of `rcvbuf`, which is what its `SO_RCVBUF`
    /// reports (twice what was set). At least `train` octets, or nothing would ever go.
    pub fn trains(rcvbuf: u64, train: u64) -> Self {
        Self { budget: part(rcvbuf, 7).max(train), overhead: 0 }
    }

    /// A stranger, of whom it must be assumed that each packet lies in its buffer for itself: 0.4
    /// of `rcvbuf`, where each packet counts some hundred octets more than it has.
    pub fn singles(rcvbuf: u64, train: u64) -> Self {
        Self { budget: part(rcvbuf, 4).max(train), overhead: SINGLE_OVERHEAD }
    }

    /// Octets that may be on their way.
    pub const fn budget(&self) -> u64 {
        self.budget
    }

    /// What `packets` packets count that have `octets` octets together.
    pub const fn charge(&self, octets: u64, packets: u32) -> u64 {
        octets.saturating_add(self.overhead.saturating_mul(packets as u64))
    }
}

/// `tenths` tenths of `n`.
fn part(n: u64, tenths: u64) -> u64 {
    n / 10 * tenths + n % 10 * tenths / 10
}

/// The octets on their way to one receive buffer, shared by all queue pairs (`K` names one) that
/// send there. What arrived is given back; who found no room waits for its turn.
///
/// ```text
///   take(qp, n) ── true: send n ────────────────────> release(qp, n) when it is acknowledged
///               └─ false: wait in line ──> next() says whose turn it is ──> take(qp, n)
///                                                                       └─> withdraw(qp)
/// ```
///
/// Fair: while others wait, nobody is served twice before they are, and whoever is at the head of
/// the line keeps the room that others would take from it. One train always goes when nothing is on
/// its way, however small the budget.
///
/// Whom [`next`](Self::next) names must [`take`](Self::take) or [`withdraw`](Self::withdraw):
/// everybody else waits for it.
///
/// Who finds out only while it builds a train how long that becomes asks for its
/// [`allowance`](Self::allowance), says with [`hold`](Self::hold) what it has on the way afterwards,
/// and stands in [`line`](Self::wait) where that was not enough.
///
/// Everything is done in a time that grows with the logarithm of how many there are.
#[derive(Debug, Clone)]
pub struct Window<K> {
    room: Room,
    used: u64,
    holders: BTreeMap<K, Holder>,
    /// Who waits, by number; the lowest is the head.
    line: BTreeMap<u64, K>,
    /// The number that is drawn next.
    number: u64,
}

#[derive(Debug, Clone, Default)]
struct Holder {
    used: u64,
    /// What it waits for; 0 if it does not.
    wants: u64,
    /// Its number in the line, if it waits.
    number: u64,
}

/// How much one sender may have on its way, see [`Window::allowance`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Allowance {
    /// Octets in all, those included that it has on the way; never less than these.
    pub most: u64,
    /// Nobody else has anything on the way, or stands before it: one packet goes, however small the
    /// budget.
    pub alone: bool,
}

impl<K: Ord + Copy> Window<K> {
    /// Nothing is on its way.
    pub const fn new(room: Room) -> Self {
        Self { room, used: 0, holders: BTreeMap::new(), line: BTreeMap::new(), number: 0 }
    }

    /// The budget changed, because the peer told its buffer. What is on its way stays so.
    pub const fn set_room(&mut self, room: Room) {
        self.room = room;
    }

    /// The room of the peer; [`Room::charge`] gives what to [`take`](Self::take).
    pub const fn room(&self) -> &Room {
        &self.room
    }

    /// `who` wants to send `octets` (more than 0), as [`Room::charge`] counts them. True: they are
    /// on their way now. False: `who` is in line.
    pub fn take(&mut self, who: K, octets: u64) -> bool {
        if self.is_first(who)
            && (self.used == 0 || self.used.saturating_add(octets) <= self.room.budget)
        {
            self.hold(who, self.used_by(who).saturating_add(octets));
            return true;
        }
        self.wait(who, octets);
        false
    }

    /// How much `who` may have on its way now: what the others leave of the budget, but no more than
    /// it has where others stand in line before it.
    pub fn allowance(&self, who: K) -> Allowance {
        let used = self.used_by(who);
        if !self.is_first(who) {
            return Allowance { most: used, alone: false };
        }
        self.allowance_in_passing(who)
    }

    /// The same, whoever stands in line. Those who take it so never wait for two windows in turn,
    /// each of which gives it a place behind those who wait for the other.
    pub fn allowance_in_passing(&self, who: K) -> Allowance {
        let used = self.used_by(who);
        let others = self.used.saturating_sub(used);
        Allowance { most: used.max(self.room.budget.saturating_sub(others)), alone: others == 0 }
    }

    /// `who` has so many octets on their way, whether that is more than before or less. One that
    /// gets more was served, and leaves the line.
    pub fn hold(&mut self, who: K, octets: u64) {
        let holder = self.holders.entry(who).or_default();
        let served = octets > holder.used;
        self.used = self.used.saturating_sub(holder.used).saturating_add(octets);
        holder.used = octets;
        if served {
            self.leave(who);
        }
        self.tidy(who);
    }

    /// `who` waits until there is room for `octets` more. It keeps its place if it waits already.
    pub fn wait(&mut self, who: K, octets: u64) {
        let holder = self.holders.entry(who).or_default();
        if holder.wants == 0 {
            holder.number = self.number;
            self.line.insert(self.number, who);
            self.number += 1;
        }
        holder.wants = octets.max(1);
    }

    /// Whose turn it is: the head of the line, if there is room for what it waits for.
    pub fn next(&self) -> Option<K> {
        let (_, &who) = self.line.first_key_value()?;
        let wants = self.holders.get(&who)?.wants;
        let fits = self.used == 0 || self.used.saturating_add(wants) <= self.room.budget;
        fits.then_some(who)
    }

    /// `octets` that `who` took are no longer on their way: acknowledged, or given up. More than it
    /// has is all it has.
    pub fn release(&mut self, who: K, octets: u64) {
        let Some(holder) = self.holders.get_mut(&who) else {
            return;
        };
        let octets = octets.min(holder.used);
        holder.used -= octets;
        self.used = self.used.saturating_sub(octets);
        self.tidy(who);
    }

    fn is_first(&self, who: K) -> bool {
        self.line.first_key_value().is_none_or(|(_, &first)| first == who)
    }

    fn leave(&mut self, who: K) {
        if let Some(holder) = self.holders.get_mut(&who)
            && core::mem::take(&mut holder.wants) > 0
        {
            self.line.remove(&holder.number);
        }
    }

    /// `who` has nothing to send any more: it leaves the line.
    pub fn withdraw(&mut self, who: K) {
        self.leave(who);
        self.tidy(who);
    }

    /// `who` is gone, or starts anew: what it had on its way is free again.
    pub fn forget(&mut self, who: K) {
        self.withdraw(who);
        self.release(who, u64::MAX);
    }

    /// Octets on their way.
    pub const fn used(&self) -> u64 {
        self.used
    }

    /// Octets of `who` on their way.
    pub fn used_by(&self, who: K) -> u64 {
        self.holders.get(&who).map_or(0, |holder| holder.used)
    }

    /// How many wait.
    pub fn waiting(&self) -> usize {
        self.line.len()
    }

    fn tidy(&mut self, who: K) {
        if self.holders.get(&who).is_some_and(|holder| holder.used == 0 && holder.wants == 0) {
            self.holders.remove(&who);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::{collections::VecDeque, vec, vec::Vec};

    #[test]
    fn budgets() {
        assert_eq!(Room::trains(4_194_304, 65_507).budget(), 2_936_012);
        assert_eq!(Room::singles(212_992, 65_507).budget(), 85_196);
        assert_eq!(Room::singles(2_304, 65_507).budget(), 65_507, "at least a train");
        assert_eq!(Room::trains(u64::MAX, 1).budget(), 12_912_720_851_596_686_130);
        assert_eq!(Room::trains(1 << 20, 1).charge(4_000, 10), 4_000);
    }

    /// Single packets of every size stay below what was measured to fit into 212,992.
    #[test]
    fn singles_fit() {
        for (len, fits) in [(4_116, 25), (2_068, 48), (1_044, 92), (40, 256)] {
            let room = Room::singles(212_992, 1);
            let packets = room.budget() / room.charge(len, 1);
            assert!(packets <= fits && packets * 10 > fits * 6, "{len}: {packets} of {fits}");
        }
    }

    #[test]
    fn a_newcomer_does_not_pass_the_line() {
        let mut window = Window::new(Room::trains(1000, 1));
        assert!(window.take('a', 600));
        assert!(!window.take('b', 500), "700 is the budget");
        assert!(!window.take('c', 10), "there is room, but b was first");
        assert_eq!((window.next(), window.waiting()), (None, 2));
        window.release('a', 600);
        assert_eq!(window.next(), Some('b'));
        assert!(!window.take('c', 10));
        assert!(window.take('b', 500));
        assert_eq!(window.next(), Some('c'));
        window.withdraw('c');
        assert_eq!((window.next(), window.waiting(), window.used()), (None, 0, 500));
        window.forget('b');
        assert_eq!((window.used(), window.holders.len()), (0, 0));
    }

    #[test]
    fn what_is_larger_than_the_budget_goes_alone() {
        let mut window = Window::new(Room::trains(1000, 1));
        assert!(window.take(1, 5_000));
        assert!(!window.take(2, 1));
        window.release(1, u64::MAX);
        assert_eq!(window.next(), Some(2));
    }

    #[test]
    fn an_allowance_is_what_the_others_leave() {
        let mut window = Window::new(Room::told(1000));
        let allowance = |most, alone| Allowance { most, alone };
        assert_eq!(window.allowance('a'), allowance(1000, true));
        window.hold('a', 700);
        assert_eq!(window.allowance('a'), allowance(1000, true));
        assert_eq!(window.allowance('b'), allowance(300, false));
        window.hold('b', 200);
        window.wait('c', 400);
        // Who stands in line goes first; the others keep what they have.
        assert_eq!(window.allowance('a'), allowance(700, false));
        assert_eq!(window.allowance('c'), allowance(100, false));
        assert_eq!(window.allowance_in_passing('a'), allowance(800, false));
        window.wait('a', 100);
        window.wait('c', 300);
        assert_eq!((window.next(), window.waiting()), (None, 2));
        window.hold('b', 0);
        assert_eq!((window.next(), window.allowance('c')), (Some('c'), allowance(300, false)));
        window.hold('c', 300);
        assert_eq!((window.next(), window.waiting(), window.used()), (None, 1, 1000));
        // Less is no service: the place in line stays.
        window.hold('a', 300);
        assert_eq!((window.next(), window.waiting()), (Some('a'), 1));
        window.hold('c', 5000);
        assert_eq!(window.allowance('a'), allowance(300, false), "never less than it has");
    }

    /// Everybody always wants to send: nobody gets more than one train ahead of another.
    #[test]
    fn all_get_the_same() {
        let mut window = Window::new(Room::trains(1_000_000, 1));
        let mut served = vec![0u32; 7];
        let mut flying: VecDeque<usize> = VecDeque::new();
        for _ in 0..10_000 {
            for (qp, times) in served.iter_mut().enumerate() {
                if !window.holders.contains_key(&qp) && window.take(qp, 150_000) {
                    flying.push_back(qp);
                    *times += 1;
                }
            }
            while let Some(qp) = window.next() {
                assert!(window.take(qp, 150_000));
                flying.push_back(qp);
                served[qp] += 1;
            }
            let done = flying.pop_front().unwrap();
            window.release(done, 150_000);
        }
        let (most, least) = (served.iter().max().unwrap(), served.iter().min().unwrap());
        assert!(most - least <= 1, "{served:?}");
        assert!(*least > 1000);
    }

    #[derive(Debug, Clone)]
    enum Op {
        Take(u8, u64),
        Release(u8, u64),
        Withdraw(u8),
        Forget(u8),
        /// Sends as much as it may, up to so many octets, and waits for the rest.
        Fill(u8, u64),
        Turn,
    }

    fn ops() -> impl Strategy<Value = Vec<Op>> {
        let who = 0u8..6;
        let op = prop_oneof![
            6 => (who.clone(), 1u64..400).prop_map(|(q, n)| Op::Take(q, n)),
            4 => (who.clone(), 1u64..400).prop_map(|(q, n)| Op::Release(q, n)),
            1 => who.clone().prop_map(Op::Withdraw),
            1 => who.clone().prop_map(Op::Forget),
            3 => (who, 1u64..400).prop_map(|(q, n)| Op::Fill(q, n)),
            4 => Just(Op::Turn),
        ];
        prop::collection::vec(op, 0..400)
    }

    proptest! {
        #[test]
        fn the_budget_holds_and_the_line_is_in_order(ops in ops(), rcvbuf in 0u64..2_000) {
            let mut window = Window::new(Room::trains(rcvbuf, 1));
            let budget = window.room().budget();
            let mut used = [0u64; 6];
            let mut line: Vec<u8> = Vec::new();
            for op in ops {
                match op {
                    Op::Take(who, n) => {
                        let total: u64 = used.iter().sum();
                        let first = line.first().is_none_or(|&front| front == who);
                        let expected = first && (total == 0 || total + n <= budget);
                        prop_assert_eq!(window.take(who, n), expected);
                        if expected {
                            used[usize::from(who)] += n;
                            line.retain(|&other| other != who);
                            prop_assert!(total == 0 || total + n <= budget);
                        } else if !line.contains(&who) {
                            line.push(who);
                        }
                    }
                    Op::Release(who, n) => {
                        window.release(who, n);
                        let held = &mut used[usize::from(who)];
                        *held = held.saturating_sub(n);
                    }
                    Op::Withdraw(who) => {
                        window.withdraw(who);
                        line.retain(|&other| other != who);
                    }
                    Op::Forget(who) => {
                        window.forget(who);
                        line.retain(|&other| other != who);
                        used[usize::from(who)] = 0;
                    }
                    Op::Fill(who, n) => {
                        let others = used.iter().sum::<u64>() - used[usize::from(who)];
                        let first = line.first().is_none_or(|&front| front == who);
                        let has = used[usize::from(who)];
                        let Allowance { most, alone } = window.allowance(who);
                        let room = if first { budget.saturating_sub(others) } else { 0 };
                        prop_assert_eq!((most, alone), (room.max(has), first && others == 0));
                        let sent = n.min(most - has);
                        window.hold(who, has + sent);
                        used[usize::from(who)] += sent;
                        if sent > 0 {
                            line.retain(|&other| other != who);
                        }
                        if sent < n {
                            window.wait(who, n - sent);
                            if !line.contains(&who) {
                                line.push(who);
                            }
                        }
                    }
                    Op::Turn => {
                        if let Some(who) = window.next() {
                            prop_assert_eq!(Some(&who), line.first());
                            let wants = window.holders[&who].wants;
                            prop_assert!(window.take(who, wants), "whose turn it is gets it");
                            used[usize::from(who)] += wants;
                            line.remove(0);
                        }
                    }
                }
                prop_assert_eq!(window.used(), used.iter().sum::<u64>());
                prop_assert_eq!(window.waiting(), line.len());
                if window.used() == 0 {
                    prop_assert_eq!(window.next(), line.first().copied(), "never a dead end");
                }
                for who in 0..6 {
                    prop_assert_eq!(window.used_by(who), used[usize::from(who)]);
                }
            }
        }
    }
}
