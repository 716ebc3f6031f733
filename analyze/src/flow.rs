//! What flows carried: who, what, how much, and how long it took.

use std::fmt;

use crate::End;

/// What a flow speaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Protocol {
    /// RoCE, reliable connection.
    Rc,
    /// RoCE, unreliable connection.
    Uc,
    /// RoCE, datagrams.
    Ud,
    /// MPA, DDP and RDMAP over TCP.
    Iwarp,
}

impl Protocol {
    /// `RC`, `UC`, `UD` or `iWARP`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Rc => "RC",
            Self::Uc => "UC",
            Self::Ud => "UD",
            Self::Iwarp => "iWARP",
        }
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Kinds of messages that are counted.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Message {
    /// SEND, of any kind.
    Send,
    /// RDMA WRITE, with immediate or not; atomic WRITE.
    Write,
    /// RDMA READ.
    Read,
    /// Compare-and-swap, fetch-and-add.
    Atomic,
    /// FLUSH, TERMINATE and whatever else.
    Other,
}

impl Message {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Send, Self::Write, Self::Read, Self::Atomic, Self::Other];

    /// `send`, `write`, `read`, `atomic` or `other`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Send => "send",
            Self::Write => "write",
            Self::Read => "read",
            Self::Atomic => "atomic",
            Self::Other => "other",
        }
    }
}

/// Times, in buckets of an eighth of their size: exact to 12 %.
#[derive(Debug, Clone, Default)]
pub struct Times {
    buckets: Vec<u32>,
    count: u64,
    max_ns: u64,
}

impl Times {
    /// Eighths of each power of two.
    const FINE: u32 = 3;

    pub(crate) fn add(&mut self, ns: i128) {
        let ns = u64::try_from(ns.max(0)).unwrap_or(u64::MAX);
        let at = Self::bucket(ns);
        if self.buckets.len() <= at {
            self.buckets.resize(at + 1, 0);
        }
        self.buckets[at] = self.buckets[at].saturating_add(1);
        self.count += 1;
        self.max_ns = self.max_ns.max(ns);
    }

    fn bucket(ns: u64) -> usize {
        let ns = ns.max(1 << Self::FINE);
        let power = ns.ilog2();
        let fine = (ns >> (power - Self::FINE)) & ((1 << Self::FINE) - 1);
        (((power - Self::FINE) << Self::FINE) as usize) + fine as usize
    }

    /// The largest time of a bucket.
    fn top(at: usize) -> u64 {
        let (power, fine) = (at >> Self::FINE, at as u64 & ((1 << Self::FINE) - 1));
        (((1 << Self::FINE) + fine + 1) << power) - 1
    }

    /// How many there are.
    pub const fn count(&self) -> u64 {
        self.count
    }

    /// The longest, in nanoseconds.
    pub const fn max_ns(&self) -> u64 {
        self.max_ns
    }

    /// The time that a share of all, from 0 to 1, does not exceed; `None` where there are none.
    pub fn quantile_ns(&self, share: f64) -> Option<u64> {
        let rank = ((self.count as f64 * share).ceil() as u64).max(1);
        let mut seen = 0;
        let found = self.buckets.iter().position(|&count| {
            seen += u64::from(count);
            seen >= rank
        });
        found.map(|at| Self::top(at).min(self.max_ns))
    }
}

/// What one end sent to the other.
#[derive(Debug, Clone, Default)]
pub struct Traffic {
    /// Packets of requests, or segments of DDP.
    pub packets: u64,
    /// Octets of payload in them, those that were sent again left out.
    pub octets: u64,
    /// Whole messages, by their kinds in the order of [`Message::ALL`].
    pub messages: [u64; 5],
    /// Octets that this end was given by the other in answers to its READs.
    pub read_octets: u64,
    /// Packets that were sent again.
    pub resent: u64,
    /// NAKs that the other end gave, RNR NAKs left out.
    pub naks: u64,
    /// RNR NAKs that the other end gave.
    pub rnr_naks: u64,
    /// Packets that came with CE set.
    pub marked: u64,
    /// CNPs toward this end.
    pub cnps: u64,
    /// Path MTU, as far as it is known.
    pub path_mtu: Option<u32>,
    /// From a SEND's last packet to its ACK.
    pub send_to_ack: Times,
    /// From a WRITE's last packet to its ACK.
    pub write_to_ack: Times,
    /// From a READ's request to the last packet of its answer.
    pub read_to_last: Times,
}

impl Traffic {
    /// Messages of all kinds.
    pub fn all_messages(&self) -> u64 {
        self.messages.iter().sum()
    }
}

/// A flow: a connection, or datagrams from one queue pair to another.
#[derive(Debug, Clone)]
pub struct Flow {
    /// What it speaks.
    pub protocol: Protocol,
    /// Its ends; the one that asked for the connection first, where that is known.
    pub ends: [End; 2],
    /// The first and the last frame.
    pub frames: [u64; 2],
    /// When these were.
    pub times_ns: [Option<i128>; 2],
    /// What each end sent.
    pub sent: [Traffic; 2],
}

impl Flow {
    /// Seconds from the first frame to the last.
    pub fn seconds(&self) -> Option<f64> {
        let [first, last] = self.times_ns;
        Some((last? - first?) as f64 / 1e9)
    }
}

/// When something was first and last seen.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Span {
    pub(crate) frames: [u64; 2],
    pub(crate) times: [Option<i128>; 2],
}

impl Span {
    pub(crate) fn see(&mut self, frame: u64, time: Option<i128>) {
        if self.frames[0] == 0 {
            (self.frames[0], self.times[0]) = (frame, time);
        }
        (self.frames[1], self.times[1]) = (frame, time);
    }

    /// Both together.
    pub(crate) fn with(self, other: Self) -> Self {
        let mut both = self;
        if other.frames[0] != 0 && (self.frames[0] == 0 || other.frames[0] < self.frames[0]) {
            (both.frames[0], both.times[0]) = (other.frames[0], other.times[0]);
        }
        if other.frames[1] > self.frames[1] {
            (both.frames[1], both.times[1]) = (other.frames[1], other.times[1]);
        }
        both
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_right_to_an_eighth() {
        let mut times = Times::default();
        assert_eq!(times.quantile_ns(0.5), None);
        for n in 1..=1000 {
            times.add(n * 1000);
        }
        assert_eq!((times.count(), times.max_ns()), (1000, 1_000_000));
        for (share, want) in [(0.5, 500_000.0), (0.99, 990_000.0), (1.0, 1_000_000.0)] {
            let got = times.quantile_ns(share).unwrap() as f64;
            assert!((want..want * 1.13).contains(&got), "{share}: {got}");
        }
        times.add(i128::MAX);
        times.add(-5);
        assert_eq!(times.max_ns(), u64::MAX);
        assert!(times.quantile_ns(0.0).unwrap() < 16);
    }

    #[test]
    fn a_bucket_holds_what_it_is_for() {
        for ns in [8, 9, 15, 16, 17, 1000, 123_456_789, u64::MAX / 2] {
            let at = Times::bucket(ns);
            assert!(Times::top(at) >= ns && (at == 0 || Times::top(at - 1) < ns), "{ns}");
        }
    }
}
