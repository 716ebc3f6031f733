//! The order in which a sender sent, as far as IPv4's Identification tells.

use std::net::IpAddr;

use rustc_hash::FxHashMap;
use smallvec::SmallVec;

/// What a packet's Identification says of its place among those of the same sender.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    /// Nothing: it has none, or the sender does not count it up.
    Unknown,
    /// It was sent behind all that were seen: by so many packets (1 is the next).
    Ahead(u16),
    /// It was sent before one that was seen already.
    Late,
    /// It is the same packet as the one of this frame.
    Copy(u64),
}

/// Packets that are remembered: a copy or a late packet comes soon.
const KEPT: usize = 128;
/// So far ahead may a number be to count as counted up: others have their share of them.
const NEAR: u16 = 256;

/// Numbers of one sender toward one receiver.
#[derive(Debug, Default)]
pub(crate) struct Idents {
    max: Option<u16>,
    /// Steps that a counter makes, and others.
    good: u32,
    bad: u32,
    /// Number, what it was (PSN or TCP's sequence number, and so on), frame; a ring.
    recent: SmallVec<[(u16, u64, u64); 8]>,
    at: usize,
}

impl Idents {
    /// Judges a packet. `what` is the same for two copies of a packet alone.
    pub(crate) fn see(&mut self, ident: Option<u16>, what: u64, frame: u64) -> Order {
        let Some(ident) = ident else { return Order::Unknown };
        let Some(max) = self.max else {
            self.max = Some(ident);
            self.keep(ident, what, frame);
            return Order::Unknown;
        };
        let ahead = ident.wrapping_sub(max);
        if (1..=NEAR).contains(&ahead) {
            self.good += 1;
            self.max = Some(ident);
            self.keep(ident, what, frame);
            return if self.counts() { Order::Ahead(ahead) } else { Order::Unknown };
        }
        // A constant, as 0 with DF, says nothing.
        let copied = self.recent.iter().find(|kept| kept.0 == ident && kept.1 == what);
        if let Some(&(_, _, first)) = copied
            && self.could_count()
            && ident != 0
        {
            return Order::Copy(first);
        }
        let behind = max.wrapping_sub(ident);
        let seen = self.recent.iter().any(|kept| kept.0 == ident);
        if self.counts() && (1..=NEAR).contains(&behind) && !seen {
            self.keep(ident, what, frame);
            return Order::Late;
        }
        self.bad += 1;
        self.max = Some(ident);
        self.keep(ident, what, frame);
        Order::Unknown
    }

    /// The largest number so far, of a sender that counts.
    pub(crate) fn max(&self) -> Option<u16> {
        self.max.filter(|_| self.counts())
    }

    fn counts(&self) -> bool {
        self.good >= 2 && self.good / 8 >= self.bad
    }

    fn could_count(&self) -> bool {
        self.good / 8 >= self.bad
    }

    fn keep(&mut self, ident: u16, what: u64, frame: u64) {
        let kept = (ident, what, frame);
        if self.recent.len() < KEPT {
            self.recent.push(kept);
        } else {
            self.recent[self.at] = kept;
            self.at = (self.at + 1) % KEPT;
        }
    }
}

/// Of all pairs of addresses.
#[derive(Debug, Default)]
pub(crate) struct Senders(FxHashMap<(IpAddr, IpAddr), Idents>);

impl Senders {
    pub(crate) fn of(&mut self, src: IpAddr, dst: IpAddr) -> &mut Idents {
        self.0.entry((src, dst)).or_default()
    }
}

/// Packets that are missing in front of one, until it is known what became of them.
#[derive(Debug, Clone)]
pub(crate) struct Gap {
    /// The frame that showed it, and its time.
    pub(crate) frame: u64,
    pub(crate) time: Option<i128>,
    /// The frame before.
    pub(crate) before: u64,
    /// Numbers that are missing still: first, and how many.
    pub(crate) missing: SmallVec<[(u64, u64); 2]>,
    /// How many were at first.
    pub(crate) all: u64,
    pub(crate) first: u64,
    /// Identifications in between, if they are told.
    pub(crate) idents: Option<(u16, u16)>,
    /// Some were sent again: they were lost.
    pub(crate) lost: bool,
    /// Some were acknowledged though they were never seen.
    pub(crate) delivered: bool,
    /// Seen within a resend.
    pub(crate) in_resend: bool,
}

impl Gap {
    /// Takes `number` out. Says whether it was missing.
    pub(crate) fn take(&mut self, number: u64, len: u64) -> bool {
        let mut took = false;
        let mut left = SmallVec::new();
        for &(first, count) in &self.missing {
            let (end, until) = (first + count, number + len);
            if number >= end || until <= first {
                left.push((first, count));
                continue;
            }
            took = true;
            if first < number {
                left.push((first, number - first));
            }
            if until < end {
                left.push((until, end - until));
            }
        }
        self.missing = left;
        took
    }

    /// Whether `number` is missing still.
    pub(crate) fn has(&self, number: u64) -> bool {
        self.missing.iter().any(|&(first, count)| (first..first + count).contains(&number))
    }

    /// Whether this Identification lies in it, as far as it is known.
    pub(crate) fn may_hold(&self, ident: Option<u16>) -> bool {
        match (self.idents, ident) {
            (Some((first, last)), Some(ident)) => {
                ident.wrapping_sub(first) <= last.wrapping_sub(first)
            }
            _ => true,
        }
    }
}
