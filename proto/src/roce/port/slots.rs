//! The queue pairs of a port by number.
//!
//! ```text
//!  queue pair number   |  generation, 8 bits, never 0  |  slot, 16 bits  |
//! ```

use alloc::{collections::VecDeque, vec::Vec};
use core::net::SocketAddr;

use super::budgets::Purse;
use crate::{
    roce::{Config, Qp, cm::ConnId, congestion::NotificationPoint, load::Load},
    time::Instant,
    wire::ids::Qpn,
};

/// Bits of a queue pair number that are the slot's.
const SLOT_BITS: u32 = 16;
/// The most queue pairs.
pub(super) const MOST: usize = 1 << SLOT_BITS;
/// So many free slots are kept waiting before one is used again.
const WAITING: usize = 256;
/// The number of all queue pairs of a multicast group.
const MULTICAST: u32 = 0xff_ffff;

/// A queue pair and what the port knows of it.
#[derive(Debug)]
pub(super) struct Slot {
    pub(super) qp: Qp,
    /// The packets that a train of it may have; a call of the driver may lower it.
    pub(super) max_train: usize,
    /// Its connection, if the connection manager made it.
    pub(super) conn: Option<ConnId>,
    /// Whom it told a part of our receive buffer.
    pub(super) granted: Option<SocketAddr>,
    /// We accepted, and the peer was not heard of since: nothing goes out yet.
    pub(super) held: bool,
    /// It is in the list of those that may have something to send.
    pub(super) ready: bool,
    /// The peer's socket whose budget it shares.
    pub(super) socket: Option<(SocketAddr, Purse)>,
    /// What it has of that, and of our own.
    pub(super) load: Load,
    /// Octets of packets out of order that it keeps.
    pub(super) kept: usize,
    /// It stands in a line for more.
    pub(super) waits: bool,
    /// It is in the list of those that have completions.
    pub(super) finished: bool,
    /// When the port looks after its timer.
    pub(super) alarm: Option<Instant>,
    /// When its peer is told of congestion.
    pub(super) notification: NotificationPoint,
    /// It is in the list of those whose peer is to be told now.
    pub(super) cnp_due: bool,
    /// DSCP of its packets, in the upper six bits.
    pub(super) traffic_class: u8,
}

/// The slots.
#[derive(Debug)]
pub(super) struct Slots {
    slots: Vec<(u8, Option<Slot>)>,
    /// Free ones; the one that is free for the longest time comes first.
    free: VecDeque<u32>,
    most: usize,
    live: usize,
}

impl Slots {
    pub(super) fn new(most: usize) -> Self {
        Self { slots: Vec::new(), free: VecDeque::new(), most: most.clamp(1, MOST), live: 0 }
    }

    /// Queue pairs there are.
    pub(super) fn len(&self) -> usize {
        self.live
    }

    /// The most there may be.
    pub(super) fn most(&self) -> usize {
        self.most
    }

    /// Makes a queue pair of these settings, but with a number of its own. `generation` is where
    /// the numbers of a slot that was never used begin. `None`: there is no room.
    pub(super) fn insert(&mut self, mut config: Config, generation: u8) -> Option<Qpn> {
        if self.live >= self.most {
            return None;
        }
        // A few more slots than queue pairs, so that no number comes again soon.
        let limit = (self.most + WAITING).min(MOST);
        let index = if self.free.len() < WAITING && self.slots.len() < limit {
            self.slots.push((generation, None));
            self.slots.len() as u32 - 1
        } else {
            self.free.pop_front()?
        };
        let (generation, place) = self.slots.get_mut(index as usize)?;
        *generation = generation.wrapping_add(1).max(1);
        if qpn(*generation, index).0 == MULTICAST {
            *generation = 1;
        }
        config.scope.qpn = qpn(*generation, index);
        let slot = Slot {
            max_train: config.max_train,
            kept: 0,
            qp: Qp::new(config),
            conn: None,
            granted: None,
            held: false,
            ready: false,
            socket: None,
            load: Load::default(),
            waits: false,
            finished: false,
            alarm: None,
            notification: NotificationPoint::default(),
            cnp_due: false,
            traffic_class: 0,
        };
        self.live += 1;
        Some(place.insert(slot).qp.config().scope.qpn)
    }

    pub(super) fn remove(&mut self, qpn: Qpn) -> Option<Slot> {
        self.get(qpn)?;
        let index = index(qpn);
        let slot = self.slots.get_mut(index as usize)?.1.take()?;
        self.live -= 1;
        self.free.push_back(index);
        Some(slot)
    }

    #[inline]
    pub(super) fn get(&self, qpn: Qpn) -> Option<&Slot> {
        let slot = self.slots.get(index(qpn) as usize)?.1.as_ref()?;
        (slot.qp.config().scope.qpn == qpn).then_some(slot)
    }

    #[inline]
    pub(super) fn get_mut(&mut self, qpn: Qpn) -> Option<&mut Slot> {
        let slot = self.slots.get_mut(index(qpn) as usize)?.1.as_mut()?;
        (slot.qp.config().scope.qpn == qpn).then_some(slot)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Slot> {
        self.slots.iter().filter_map(|(_, slot)| slot.as_ref())
    }
}

fn index(qpn: Qpn) -> u32 {
    qpn.0 & ((1 << SLOT_BITS) - 1)
}

fn qpn(generation: u8, index: u32) -> Qpn {
    Qpn(u32::from(generation) << SLOT_BITS | index)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{mem::PdId, verbs::QpType};
    use std::collections::BTreeMap;

    fn config() -> Config {
        Config::new(QpType::Rc, PdId(1), Qpn(0))
    }

    #[test]
    fn numbers_do_not_come_again_soon() {
        let mut slots = Slots::new(4);
        let mut seen = BTreeMap::new();
        for n in 0..70_000_u32 {
            let qpn = slots.insert(config(), 0xfe).unwrap();
            assert!(qpn.0 > 1 && qpn.0 < MULTICAST, "{qpn}");
            assert!(slots.get(qpn).is_some());
            if let Some(before) = seen.insert(qpn, n) {
                assert!(n - before > 65_000, "{qpn} after {}", n - before);
            }
            assert!(slots.remove(qpn).is_some());
            assert!(slots.get(qpn).is_none() && slots.remove(qpn).is_none());
        }
        assert!(slots.slots.len() <= 4 + WAITING);
    }

    #[test]
    fn there_is_a_most() {
        let mut slots = Slots::new(3);
        let numbers = [(); 3].map(|()| slots.insert(config(), 0).unwrap());
        assert_eq!((slots.insert(config(), 0), slots.len()), (None, 3));
        slots.remove(numbers[1]).unwrap();
        let next = slots.insert(config(), 0).unwrap();
        assert!(!numbers.contains(&next));
        assert_eq!(slots.iter().count(), 3);
    }

    #[test]
    fn the_multicast_number_is_nobodys() {
        let mut slots = Slots::new(MOST);
        // All 65,536 slots, the last one with the last generation but one.
        let last = (0..MOST).map(|_| slots.insert(config(), 0xfe).unwrap()).last().unwrap();
        assert_eq!(last, Qpn(0x01_ffff));
        assert_eq!(slots.insert(config(), 0), None);
    }
}
