//! One direction of one link.

use alloc::{
    collections::{BTreeMap, VecDeque},
    vec::Vec,
};
use core::{fmt, time::Duration};

use super::{
    dice::Dice,
    impairments::{Impairments, Marking, Probability, Rate},
    queue::EventQueue,
};
use crate::time::Instant;

/// ECN: congestion experienced.
const CE: u8 = 3;
const NANOS: u128 = 1_000_000_000;

/// A packet on its way. What a caller wants back with it goes into `meta`.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Packet<M = ()> {
    /// What it carries: of UDP the payload.
    pub octets: Vec<u8>,
    /// ECN, 2 bits: 1 and 2 can be marked, and are 3 then.
    pub ecn: u8,
    /// IPv4's Identification; goes into captures.
    pub identification: u16,
    /// Names it, and its repetitions, for `drops_of`.
    pub key: Option<u64>,
    /// Bits of it were flipped. A receiver is not to know that.
    pub damaged: bool,
    /// The caller's.
    pub meta: M,
}

impl Packet {
    /// A packet with ECN 0.
    pub const fn new(octets: Vec<u8>) -> Self {
        Self::with_meta(octets, ())
    }
}

impl<M> Packet<M> {
    /// A packet with ECN 0 that carries something of the caller's along.
    pub const fn with_meta(octets: Vec<u8>, meta: M) -> Self {
        Self { octets, ecn: 0, identification: 0, key: None, damaged: false, meta }
    }

    /// With these ECN bits.
    #[must_use]
    pub fn with_ecn(self, ecn: u8) -> Self {
        Self { ecn: ecn & 3, ..self }
    }

    /// With this key.
    #[must_use]
    pub fn with_key(self, key: u64) -> Self {
        Self { key: Some(key), ..self }
    }

    /// With this Identification.
    #[must_use]
    pub fn with_identification(self, identification: u16) -> Self {
        Self { identification, ..self }
    }
}

/// How a packet was lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Loss {
    /// By itself.
    Alone,
    /// While the link was bad.
    Burst,
    /// The queue in front of the link was full.
    Queue,
}

/// What becomes of a packet that was handed over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub struct Fate {
    /// It, or a copy of it, was lost.
    pub lost: Option<Loss>,
    /// It comes twice.
    pub duplicated: bool,
    /// It, or a copy, was marked.
    pub marked: bool,
    /// It, or a copy, was held back for others to overtake it.
    pub held: bool,
    /// Copies that will come out.
    pub copies: u8,
    /// How many of these are damaged.
    pub damaged: u8,
}

impl Fate {
    /// Whether a copy will come out as it went in.
    pub const fn is_intact(&self) -> bool {
        self.copies > self.damaged
    }
}

impl fmt::Display for Fate {
    /// What happened, in words; empty if nothing did.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let lost = self.lost.map(|loss| match loss {
            Loss::Alone => "lost",
            Loss::Burst => "lost in a burst",
            Loss::Queue => "lost, the queue was full",
        });
        let words = [
            lost,
            self.duplicated.then_some("duplicated"),
            self.marked.then_some("marked"),
            self.held.then_some("held back"),
            (self.damaged > 0).then_some("damaged"),
        ];
        for (i, word) in words.into_iter().flatten().enumerate() {
            f.write_str(if i > 0 { ", " } else { "" })?;
            f.write_str(word)?;
        }
        Ok(())
    }
}

/// What happened to packets so far. Always `handled + duplicated` is what was lost, in one of the
/// three ways, what was delivered, and what is still on its way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Counters {
    /// Packets handed over.
    pub handled: u64,
    /// Packets that came out, the second ones included.
    pub delivered: u64,
    /// Lost by themselves.
    pub lost: u64,
    /// Lost while the link was bad.
    pub lost_in_bursts: u64,
    /// Lost because the queue was full.
    pub queue_full: u64,
    /// Copies that were made.
    pub duplicated: u64,
    /// Came out behind one that was handed over later.
    pub reordered: u64,
    /// Bits were flipped.
    pub corrupted: u64,
    /// Marked with "congestion experienced".
    pub marked: u64,
    /// The most octets that waited for the link.
    pub longest_queue: u64,
}

impl Counters {
    /// Both together; of the queues the longer one.
    #[must_use]
    pub fn plus(&self, other: &Self) -> Self {
        Self {
            handled: self.handled + other.handled,
            delivered: self.delivered + other.delivered,
            lost: self.lost + other.lost,
            lost_in_bursts: self.lost_in_bursts + other.lost_in_bursts,
            queue_full: self.queue_full + other.queue_full,
            duplicated: self.duplicated + other.duplicated,
            reordered: self.reordered + other.reordered,
            corrupted: self.corrupted + other.corrupted,
            marked: self.marked + other.marked,
            longest_queue: self.longest_queue.max(other.longest_queue),
        }
    }

    /// Lost in any way.
    pub const fn dropped(&self) -> u64 {
        self.lost + self.lost_in_bursts + self.queue_full
    }
}

impl fmt::Display for Counters {
    /// One line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { handled, delivered, duplicated, reordered, corrupted, marked, .. } = self;
        write!(
            f,
            "{handled} packets: {} dropped ({} alone, {} in bursts, {} by a full queue), {duplicated} \
             duplicated, {reordered} reordered, {corrupted} corrupted, {marked} marked, {delivered} \
             delivered",
            self.dropped(),
            self.lost,
            self.lost_in_bursts,
            self.queue_full,
        )
    }
}

/// Does to packets what [`Impairments`] say.
///
/// ```text
///   handle(now, packet) ──> loss ──> copy ──> rate, queue, marks ──> flips ──> delay ──> hold ──┐
///   poll_due(now) until None    poll_timeout: when the next one is due  <───────────────────────┘
/// ```
///
/// What comes out and when depends on what goes in and when, not on how often it is polled.
#[derive(Debug, Clone)]
pub struct Impairer<M = ()> {
    impairments: Impairments,
    chance: Chance,
    bad: bool,
    line: Line,
    now: Instant,
    /// Packets handed over that were not lost.
    passed: u64,
    last_due: Instant,
    held: Vec<Held<M>>,
    due: EventQueue<Numbered<M>>,
    waiting: u64,
    max_waiting: u64,
    newest_out: u64,
    counters: Counters,
    drops: BTreeMap<u64, u32>,
}

/// A generator for each fault.
#[derive(Debug, Clone)]
struct Chance {
    loss: Dice,
    burst: Dice,
    dup: Dice,
    reorder: Dice,
    corrupt: Dice,
    jitter: Dice,
    ecn: Dice,
    queue: Dice,
}

impl Chance {
    fn new(seed: u64) -> Self {
        let dice = |stream| Dice::new(seed, stream);
        Self {
            loss: dice(0),
            burst: dice(1),
            dup: dice(2),
            reorder: dice(3),
            corrupt: dice(4),
            jitter: dice(5),
            ecn: dice(6),
            queue: dice(7),
        }
    }
}

/// A packet and its number among those that were not lost.
#[derive(Debug, Clone)]
struct Numbered<M> {
    number: u64,
    packet: Packet<M>,
}

#[derive(Debug, Clone)]
struct Held<M> {
    /// The number of the packet behind which it goes.
    behind: u64,
    due: Instant,
    deadline: Instant,
    inner: Numbered<M>,
}

impl<M: Clone> Impairer<M> {
    /// Octets that may be on their way, unless [`with_max_waiting`](Self::with_max_waiting) says
    /// otherwise: 256 MiB.
    pub const MAX_WAITING: u64 = 256 << 20;

    /// Nothing is on its way.
    pub fn new(impairments: Impairments) -> Self {
        Self {
            impairments,
            chance: Chance::new(impairments.seed),
            bad: false,
            line: Line::default(),
            now: Instant::ZERO,
            passed: 0,
            last_due: Instant::ZERO,
            held: Vec::new(),
            due: EventQueue::new(Instant::ZERO),
            waiting: 0,
            max_waiting: Self::MAX_WAITING,
            newest_out: 0,
            counters: Counters::default(),
            drops: BTreeMap::new(),
        }
    }

    /// With another bound on the octets on their way, however long the delay is. Packets beyond are
    /// lost as by a full queue.
    #[must_use]
    pub fn with_max_waiting(self, octets: u64) -> Self {
        Self { max_waiting: octets, ..self }
    }

    /// Other impairments from here on. What is on its way is not touched; chance starts anew if the
    /// seed is another one.
    pub fn set_impairments(&mut self, impairments: Impairments) {
        if impairments.seed != self.impairments.seed {
            self.chance = Chance::new(impairments.seed);
        }
        self.impairments = impairments;
    }

    /// A packet is handed over. `now` does not go back; if it does, it counts as the latest.
    pub fn handle(&mut self, now: Instant, packet: Packet<M>) -> Fate {
        self.now = self.now.max(now);
        let now = self.now;
        self.expire(now);
        self.counters.handled += 1;
        let key = packet.key;
        let mut fate = Fate { lost: self.loses(), ..Fate::default() };
        match fate.lost {
            Some(Loss::Burst) => self.counters.lost_in_bursts += 1,
            Some(_) => self.counters.lost += 1,
            None => {
                self.passed += 1;
                fate.duplicated = self.chance.dup.chance(self.impairments.dup);
                if fate.duplicated {
                    self.counters.duplicated += 1;
                    self.forward(now, packet.clone(), &mut fate);
                }
                self.forward(now, packet, &mut fate);
                self.release(now);
            }
        }
        if let Some(key) = key
            && !fate.is_intact()
        {
            let drops = self.drops.entry(key).or_default();
            *drops = drops.saturating_add(1);
        }
        fate
    }

    /// The next packet that is due by `now`, with the time at which it was.
    pub fn poll_due(&mut self, now: Instant) -> Option<(Instant, Packet<M>)> {
        self.now = self.now.max(now);
        self.expire(now);
        let (at, Numbered { number, packet }) = self.due.next_until(now)?;
        self.waiting -= packet.octets.len() as u64;
        self.counters.delivered += 1;
        if number < self.newest_out {
            self.counters.reordered += 1;
        }
        self.newest_out = self.newest_out.max(number);
        Some((at, packet))
    }

    /// When [`poll_due`](Self::poll_due) has the next packet.
    pub fn poll_timeout(&self) -> Option<Instant> {
        let held = self.held.iter().map(|held| held.deadline).min();
        self.due.peek().into_iter().chain(held).min()
    }

    /// Packets on their way.
    pub fn len(&self) -> usize {
        self.due.len() + self.held.len()
    }

    /// Nothing is on its way.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// What happened so far.
    pub const fn counters(&self) -> &Counters {
        &self.counters
    }

    /// What is done to packets.
    pub const fn impairments(&self) -> &Impairments {
        &self.impairments
    }

    /// How often a packet with this key was handed over of which nothing intact came out, or will:
    /// it was lost, damaged, or met a full queue, with its copy if it had one.
    pub fn drops_of(&self, key: u64) -> u32 {
        self.drops.get(&key).copied().unwrap_or(0)
    }

    /// All keys that [`drops_of`](Self::drops_of) knows, in order.
    pub fn drops(&self) -> impl Iterator<Item = (u64, u32)> {
        self.drops.iter().map(|(&key, &drops)| (key, drops))
    }

    fn loses(&mut self) -> Option<Loss> {
        if let Some(burst) = self.impairments.burst {
            let turn = if self.bad { burst.leave } else { burst.enter };
            self.bad ^= self.chance.burst.chance(turn);
            if self.bad && self.chance.burst.chance(burst.loss) {
                return Some(Loss::Burst);
            }
        }
        self.chance.loss.chance(self.impairments.loss).then_some(Loss::Alone)
    }

    /// One copy goes on: onto the line, and out of it in due time.
    fn forward(&mut self, now: Instant, mut packet: Packet<M>, fate: &mut Fate) {
        let len = packet.octets.len() as u64;
        let mut due = now;
        let mut mark = false;
        let full = self.waiting.saturating_add(len) > self.max_waiting;
        match &self.impairments.rate {
            Some(rate) if !full => {
                let queued = self.line.queued(now);
                let Some(sent) = self.line.put(now, len, rate) else {
                    self.counters.queue_full += 1;
                    fate.lost = Some(Loss::Queue);
                    return;
                };
                due = sent;
                self.counters.longest_queue = self.counters.longest_queue.max(queued + len);
                if let Some(marking) = &rate.mark {
                    mark = self.chance.queue.chance(marking_at(marking, queued));
                }
            }
            _ if full => {
                self.counters.queue_full += 1;
                fate.lost = Some(Loss::Queue);
                return;
            }
            _ => {}
        }
        mark |= self.chance.ecn.chance(self.impairments.ecn);
        if mark && matches!(packet.ecn, 1 | 2) {
            packet.ecn = CE;
            fate.marked = true;
            self.counters.marked += 1;
        }
        if self.corrupt(&mut packet.octets) {
            packet.damaged = true;
            self.counters.corrupted += 1;
        }
        fate.copies += 1;
        fate.damaged += u8::from(packet.damaged);
        self.waiting += len;

        due = due + self.impairments.delay;
        // Jitter overtakes nothing. What comes while another one is late stays behind it and draws
        // nothing itself: else a dense stream would only ever see the most of all.
        if due >= self.last_due && !self.impairments.jitter.is_zero() {
            let most = u64::try_from(self.impairments.jitter.as_nanos()).unwrap_or(u64::MAX);
            due = due + Duration::from_nanos(self.chance.jitter.below(most.saturating_add(1)));
        }
        due = due.max(self.last_due);
        let inner = Numbered { number: self.passed, packet };
        if let Some(reorder) = &self.impairments.reorder
            && self.chance.reorder.chance(reorder.probability)
        {
            let behind = 1 + self.chance.reorder.below(reorder.distance.max(1).into());
            fate.held = true;
            let deadline = due + reorder.hold;
            self.held.push(Held { behind: self.passed + behind, due, deadline, inner });
            return;
        }
        self.last_due = due;
        self.due.at(due, inner);
    }

    /// Flips bits by chance; says whether it did.
    fn corrupt(&mut self, octets: &mut [u8]) -> bool {
        let Some(corruption) = &self.impairments.corrupt else {
            return false;
        };
        let dice = &mut self.chance.corrupt;
        let bits = octets.len() as u64 * 8;
        if !dice.chance(corruption.probability) || bits == 0 {
            return false;
        }
        let count = 1 + dice.below(corruption.bits.max(1).into());
        let mut flipped: Vec<u64> = Vec::new();
        for _ in 0..count.min(bits) {
            let mut bit = dice.below(bits);
            // Two flips of one bit would be none: the next one that is whole.
            while flipped.contains(&bit) {
                bit = (bit + 1) % bits;
            }
            flipped.push(bit);
            // The octet is within, as `bit` is.
            octets[(bit / 8) as usize] ^= 1 << (bit % 8);
        }
        true
    }

    /// Lets those go that enough others have passed.
    fn release(&mut self, now: Instant) {
        for held in self.held.extract_if(.., |held| held.behind <= self.passed) {
            self.due.at(held.due.max(self.last_due).max(now).min(held.deadline), held.inner);
        }
    }

    /// Lets those go that waited too long.
    fn expire(&mut self, now: Instant) {
        if self.held.iter().all(|held| held.deadline > now) {
            return;
        }
        let mut late: Vec<_> = self.held.extract_if(.., |held| held.deadline <= now).collect();
        late.sort_by_key(|held| held.deadline);
        late.into_iter().for_each(|held| self.due.at(held.deadline, held.inner));
    }
}

/// The probability of a mark while `queued` octets wait.
fn marking_at(marking: &Marking, queued: u64) -> Probability {
    let &Marking { low, high, most } = marking;
    if queued < low {
        Probability::NEVER
    } else if queued >= high {
        Probability::ALWAYS
    } else {
        let share = u128::from(most.ppb()) * u128::from(queued - low) / u128::from(high - low);
        // Less than `most`.
        Probability::parts_per_billion(share as u32)
    }
}

/// The wire, and what waits for it.
#[derive(Debug, Clone, Default)]
struct Line {
    /// When it has sent everything, and what is left over of a nanosecond, in octets' shares.
    free: Instant,
    rest: u128,
    /// When each packet has been sent, and its octets.
    packets: VecDeque<(Instant, u64)>,
    octets: u64,
}

impl Line {
    /// Octets that are not sent yet.
    fn queued(&mut self, now: Instant) -> u64 {
        while let Some(&(sent, len)) = self.packets.front()
            && sent <= now
        {
            self.packets.pop_front();
            self.octets -= len;
        }
        self.octets
    }

    /// When a packet will be sent; `None` if there is no room for it. [`queued`](Self::queued) was
    /// asked before.
    fn put(&mut self, now: Instant, len: u64, rate: &Rate) -> Option<Instant> {
        if !self.packets.is_empty() && self.octets.saturating_add(len) > rate.queue {
            return None;
        }
        if self.free < now {
            (self.free, self.rest) = (now, 0);
        }
        let octets = u128::from(rate.octets.get());
        let shares = u128::from(len) * NANOS + self.rest.min(octets);
        self.rest = shares % octets;
        let nanos = u64::try_from(shares / octets).unwrap_or(u64::MAX);
        self.free = self.free + Duration::from_nanos(nanos);
        self.packets.push_back((self.free, len));
        self.octets += len;
        Some(self.free)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::{collections::BTreeSet, string::ToString, vec};

    fn at(micros: u64) -> Instant {
        Instant::from_nanos(micros * 1000)
    }

    /// Packet `i` says that it is packet `i`, in its octets too.
    fn packet(i: u64) -> Packet<u64> {
        let mut octets = vec![0; 100];
        octets[..8].copy_from_slice(&i.to_be_bytes());
        Packet::with_meta(octets, i).with_ecn(2).with_key(i)
    }

    fn drain(link: &mut Impairer<u64>, now: Instant) -> Vec<(Instant, Packet<u64>)> {
        core::iter::from_fn(|| link.poll_due(now)).collect()
    }

    /// `n` packets, one each microsecond, and all that comes out, polled when something is due.
    fn run(text: &str, n: u64) -> (Impairer<u64>, Vec<(Instant, Packet<u64>)>) {
        let mut link = Impairer::new(text.parse().unwrap());
        let mut out = Vec::new();
        for i in 0..n {
            out.extend(drain(&mut link, at(i)));
            link.handle(at(i), packet(i));
        }
        while let Some(due) = link.poll_timeout() {
            let more = drain(&mut link, due);
            assert!(!more.is_empty(), "a timeout that was none");
            out.extend(more);
        }
        assert!(link.is_empty());
        assert_eq!(link.waiting, 0);
        let c = *link.counters();
        assert_eq!(c.handled + c.duplicated, c.delivered + c.dropped());
        assert_eq!(c.delivered, out.len() as u64);
        (link, out)
    }

    #[test]
    fn nothing_is_done_by_default() {
        let (link, out) = run("none", 1000);
        let expected: Vec<_> = (0..1000).map(|i| (at(i), packet(i))).collect();
        assert_eq!(out, expected);
        let only = Counters { handled: 1000, delivered: 1000, ..Counters::default() };
        assert_eq!((link.counters(), link.drops().count()), (&only, 0));
    }

    #[test]
    fn each_fault_happens_as_often_as_told() {
        let near = |found: u64, expected: u64| {
            assert!(found.abs_diff(expected) * 10 < expected, "{found}, not {expected}");
        };
        let (link, out) = run("loss=5%", 50_000);
        near(link.counters().lost, 2_500);
        let arrived: BTreeSet<u64> = out.iter().map(|(_, p)| p.meta).collect();
        (0..50_000).for_each(|i| assert_eq!(link.drops_of(i), u32::from(!arrived.contains(&i))));

        let (link, out) = run("dup=5%", 50_000);
        near(link.counters().duplicated, 2_500);
        let twice = out.windows(2).filter(|pair| pair[0].1 == pair[1].1).count();
        assert_eq!((twice as u64, link.counters().reordered), (link.counters().duplicated, 0));

        let (link, out) = run("corrupt=5%/3", 50_000);
        near(link.counters().corrupted, 2_500);
        for (_, found) in &out {
            let flips: u32 = found
                .octets
                .iter()
                .zip(&packet(found.meta).octets)
                .map(|(a, b)| (a ^ b).count_ones())
                .sum();
            assert_eq!(found.damaged, (1..=3).contains(&flips));
            assert!(flips <= 3);
            assert_eq!(link.drops_of(found.meta), u32::from(found.damaged));
        }

        let (link, out) = run("ecn=5%", 50_000);
        near(link.counters().marked, 2_500);
        assert_eq!(out.iter().filter(|(_, p)| p.ecn == 3).count() as u64, link.counters().marked);

        let (link, _) = run("reorder=5%", 50_000);
        near(link.counters().reordered, 2_500);
    }

    #[test]
    fn bursts_are_as_long_as_told() {
        let (link, out) = run("burst=1%/25%", 100_000);
        let lost = link.counters().lost_in_bursts;
        let arrived: BTreeSet<u64> = out.iter().map(|(_, p)| p.meta).collect();
        let begins = |i: &u64| !arrived.contains(i) && (*i == 0 || arrived.contains(&(i - 1)));
        let bursts = (0..100_000).filter(begins).count() as u64;
        // 4 packets on average; a share of 1 / (1 + 25) of all.
        assert!((bursts * 36 / 10..bursts * 44 / 10).contains(&lost), "{lost} in {bursts}");
        assert!((3_400..4_300).contains(&lost), "{lost}");
        assert_eq!(link.counters().lost, 0);
    }

    #[test]
    fn delay_and_jitter_keep_the_order() {
        let (link, out) = run("delay=2ms,jitter=1ms,seed=3", 2000);
        let mut spread = BTreeSet::new();
        for (i, (due, packet)) in out.iter().enumerate() {
            assert_eq!(packet.meta, i as u64);
            let took = (*due - at(packet.meta)).as_micros();
            assert!((2000..=3000).contains(&took));
            spread.insert(took / 100);
        }
        assert!(spread.len() > 3 && link.counters().reordered == 0);
    }

    #[test]
    fn reordering_has_its_distance_and_its_hold() {
        let (_, out) = run("reorder=10%/4,seed=1", 10_000);
        let mut farthest = 0;
        for (place, (_, packet)) in out.iter().enumerate() {
            let overtaken =
                out[..place].iter().rev().take(20).filter(|(_, p)| p.meta > packet.meta).count();
            farthest = farthest.max(overtaken);
        }
        assert_eq!(farthest, 4);
        // The last one waits for nobody for ever.
        let mut link = Impairer::new("reorder=100%/200/3ms,delay=1ms".parse().unwrap());
        assert!(link.handle(at(0), packet(0)).held);
        assert_eq!(link.poll_due(at(3_999)), None);
        assert_eq!(link.poll_timeout(), Some(at(4_000)));
        assert_eq!(link.poll_due(at(9_000)).unwrap().0, at(4_000));
    }

    #[test]
    fn rate_and_queue() {
        // 100 octets a packet, 1 packet in 10 µs, room for 5.
        let mut link = Impairer::new("rate=10MB,queue=500B".parse().unwrap());
        let fates: Vec<_> = (0..8).map(|i| link.handle(at(0), packet(i)).lost).collect();
        assert_eq!(fates[..5], [None; 5]);
        assert_eq!(fates[5..], [Some(Loss::Queue); 3]);
        assert_eq!((link.drops_of(5), link.counters().longest_queue), (1, 500));
        let due: Vec<_> = drain(&mut link, at(1000)).iter().map(|(due, _)| *due).collect();
        assert_eq!(due, [at(10), at(20), at(30), at(40), at(50)]);
        // A packet longer than the queue passes when nothing waits.
        assert_eq!(link.handle(at(1000), Packet::with_meta(vec![0; 5000], 0)).lost, None);
        assert_eq!(link.handle(at(1000), packet(9)).lost, Some(Loss::Queue));
        assert_eq!(link.handle(at(1500), packet(9)).lost, None);
    }

    /// Three packets a nanosecond: what is left over of one is not forgotten.
    #[test]
    fn rates_are_exact() {
        let mut link = Impairer::new("rate=3GB,queue=1GB".parse().unwrap());
        (0..3000).for_each(|i| _ = link.handle(at(0), Packet::with_meta(vec![0; 1], i)));
        let last = drain(&mut link, at(1000)).last().unwrap().0;
        assert_eq!(last, at(1));
    }

    #[test]
    fn marks_follow_the_queue() {
        let mut link = Impairer::new("rate=10MB,queue=100kB,mark=1kB/2kB/50%".parse().unwrap());
        let marked: Vec<u64> =
            (0..1000).map(|i| u64::from(link.handle(at(0), packet(i)).marked)).collect();
        assert_eq!(marked[..10].iter().sum::<u64>(), 0, "1 kB are 10 packets");
        assert_eq!(marked[20..].iter().sum::<u64>(), 980);
        let marking = Marking { low: 1000, high: 2000, most: Probability::percent(50) };
        assert_eq!(marking_at(&marking, 1500), Probability::percent(25));
        let step = Marking { low: 1000, high: 1000, most: Probability::percent(1) };
        assert_eq!(marking_at(&step, 999), Probability::NEVER);
        assert_eq!(marking_at(&step, 1000), Probability::ALWAYS);
        // What cannot be marked is not.
        let fate = link.handle(at(0), packet(0).with_ecn(0));
        assert!(!fate.marked);
    }

    #[test]
    fn what_waits_has_a_bound() {
        let mut link = Impairer::new("delay=1s".parse().unwrap()).with_max_waiting(1000);
        let lost = (0..100).filter(|&i| link.handle(at(0), packet(i)).lost.is_some()).count();
        assert_eq!((lost, link.counters().queue_full), (90, 90));
    }

    #[test]
    fn one_fault_does_not_shift_another() {
        let lost = |text| -> Vec<u64> {
            let (link, _) = run(text, 5000);
            link.drops().map(|(key, _)| key).collect()
        };
        let alone = lost("loss=3%,seed=9");
        assert_eq!(alone, lost("loss=3%,seed=9,dup=10%,reorder=10%,ecn=10%,jitter=1ms"));
        assert_ne!(alone, lost("loss=3%,seed=10"));
    }

    /// The very numbers, so that a change of what a seed means shows.
    #[test]
    fn a_seed_is_a_promise() {
        let text = "loss=1%,burst=0.2%/30%,dup=1%,reorder=1%,corrupt=1%,ecn=1%,jitter=20us,seed=7";
        let (link, out) = run(text, 10_000);
        assert_eq!(
            link.counters().to_string(),
            "10000 packets: 145 dropped (98 alone, 47 in bursts, 0 by a full queue), 92 duplicated, \
             94 reordered, 89 corrupted, 112 marked, 9947 delivered"
        );
        let sum = out.iter().fold(0u64, |sum, (due, p)| {
            let octets =
                p.octets.iter().fold(0u64, |s, &o| s.wrapping_mul(31).wrapping_add(o.into()));
            sum.wrapping_mul(31).wrapping_add(due.as_nanos() ^ octets)
        });
        assert_eq!(sum, 8_213_509_979_753_642_354);
    }

    #[test]
    fn fates_in_words() {
        let fate = Fate { lost: Some(Loss::Queue), duplicated: true, ..Fate::default() };
        assert_eq!(fate.to_string(), "lost, the queue was full, duplicated");
        assert_eq!(Fate::default().to_string(), "");
    }

    proptest! {
        /// Whether it is polled often or at the end only, the same comes out, and when it does.
        #[test]
        fn polling_changes_nothing(gaps in prop::collection::vec(0u64..20, 1..300), seed: u64) {
            let text = std::format!(
                "loss=5%,dup=5%,reorder=20%/3/30us,corrupt=5%,jitter=15us,rate=30MB,queue=2kB,seed={seed}"
            );
            let new = || Impairer::<u64>::new(text.parse().unwrap());
            let (mut eager, mut lazy) = (new(), new());
            let (mut often, mut now) = (Vec::new(), 0);
            for (i, gap) in (0..).zip(gaps) {
                for micro in now..=now + gap {
                    often.extend(drain(&mut eager, at(micro)));
                }
                now += gap;
                prop_assert_eq!(eager.handle(at(now), packet(i)), lazy.handle(at(now), packet(i)));
            }
            let end = at(now + 1_000_000);
            often.extend(drain(&mut eager, end));
            prop_assert_eq!(often, drain(&mut lazy, end));
            prop_assert_eq!(eager.counters(), lazy.counters());
        }
    }
}
