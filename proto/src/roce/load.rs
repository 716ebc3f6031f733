//! What a queue pair causes to lie in receive buffers, and how much it may.
//!
//! Requests fill the peer's socket, the answers that they ask for our own. Both have a buffer that
//! many queue pairs share, in two pools each: one for what carries data, and a small one for what
//! comes along with it, so that who needs room in both buffers never waits for two in turn.
//!
//! | request | in the peer's buffer | in our own |
//! |---|---|---|
//! | SEND, WRITE | [`Pool::Peer`] | |
//! | READ | [`Pool::Requests`] | [`Pool::Own`] |
//! | atomic, FLUSH, ATOMIC_WRITE | [`Pool::Peer`] | [`Pool::Results`] |
//!
//! A port gives a queue pair its [`Share`] before it sends. A queue pair counts:
//!
//! ```text
//!   flight    what was sent from the oldest unacknowledged packet on
//!   stale     after a packet is known to be missing: what was sent behind it, which is still on the
//!             way while that one is sent again, until its acknowledgement or the time-out
//!   spare     room for the one that is missing: it can always be sent again
//!   reserve   room for one more packet, while none on the way asks for an acknowledgement: it can
//!             always be asked for
//! ```
//!
//! UC and UD count nothing: nobody says when their packets arrive.

use super::congestion::Allowance;

/// What a packet occupies of a receive buffer at least, as Linux counts.
pub(super) const LEAST: u64 = 1024;

/// Octets that a packet adds to its payload: IP, UDP, BTH, ICRC and a little.
pub(super) const OVERHEAD: u64 = 60;

/// What a packet with so much payload counts.
pub(super) fn weigh(payload: u32) -> u64 {
    (u64::from(payload) + OVERHEAD).max(LEAST)
}

/// A part of a receive buffer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pool {
    /// The peer's, for data.
    Peer,
    /// Our own, for READ responses.
    Own,
    /// The peer's, for READ requests.
    Requests,
    /// Our own, for what atomics and FLUSHes are answered.
    Results,
}

impl Pool {
    /// Those that carry data first: who finds no room waits for the first one that has none.
    pub(super) const ALL: [Self; 4] = [Self::Peer, Self::Own, Self::Requests, Self::Results];
}

/// Octets on the way to each [`Pool`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Load([u64; 4]);

impl Load {
    pub(super) fn of(pool: Pool, octets: u64) -> Self {
        let mut load = Self::default();
        load.0[pool as usize] = octets;
        load
    }

    pub(super) fn get(self, pool: Pool) -> u64 {
        self.0[pool as usize]
    }

    pub(super) fn plus(self, more: Self) -> Self {
        self.zip(more, |a, b| a + b)
    }

    pub(super) fn minus(self, less: Self) -> Self {
        self.zip(less, u64::saturating_sub)
    }

    pub(super) fn at_most(self, most: Self) -> Self {
        self.zip(most, u64::min)
    }

    pub(super) fn at_least(self, least: Self) -> Self {
        self.zip(least, u64::max)
    }

    fn zip(self, other: Self, f: impl Fn(u64, u64) -> u64) -> Self {
        Self(core::array::from_fn(|i| f(self.0[i], other.0[i])))
    }
}

/// A queue pair that found no room, and for how much more it waits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Starved {
    pub(super) pool: Pool,
    pub(super) wants: u64,
}

/// How much a queue pair may have on the way of what it shares with others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Share {
    /// By [`Pool`].
    pub(super) pools: [Allowance; 4],
    /// Octets that one READ request asks for at most.
    pub(super) read: u64,
}

impl Share {
    /// Whether `more` may join what is on the way; else which pool has no room.
    pub(super) fn takes(&self, load: Load, more: Load) -> Result<(), Pool> {
        let full = |&pool: &Pool| {
            let (has, more, allowance) =
                (load.get(pool), more.get(pool), self.pools[pool as usize]);
            more > 0 && has + more > allowance.most && !(allowance.alone && has == 0)
        };
        Pool::ALL.into_iter().find(full).map_or(Ok(()), Err)
    }

    /// Whether so much is no more than was allowed.
    pub(super) fn is_kept(&self, load: Load) -> bool {
        Pool::ALL.into_iter().all(|pool| {
            let allowance = self.pools[pool as usize];
            load.get(pool) <= allowance.most || allowance.alone
        })
    }
}
