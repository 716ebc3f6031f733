//! The receiver's part of DCQCN: when to tell the sender (paper, section 3.2, figure 6).

use core::time::Duration;

use crate::time::Instant;

/// Says for one queue pair when a CNP is due.
///
/// ```text
///              marked: CNP                  marked: nothing
///   (quiet) ───────────────> (told) ───────────────┐
///      ^                        │ ^                │
///      └──── interval over ─────┘ └────────────────┘
/// ```
#[derive(Debug, Clone)]
pub struct NotificationPoint {
    interval: Duration,
    quiet_until: Option<Instant>,
    marked: u64,
    told: u64,
}

impl NotificationPoint {
    /// The paper's N: at most one CNP in 50 µs.
    pub const INTERVAL: Duration = Duration::from_micros(50);

    /// Sends at most one CNP in `interval`; zero: one for each marked packet.
    pub const fn new(interval: Duration) -> Self {
        Self { interval, quiet_until: None, marked: 0, told: 0 }
    }

    /// A data packet (or a train of them) came in with ECN 11b, "congestion experienced". True: a
    /// CNP is to be sent now.
    pub fn on_marked(&mut self, now: Instant) -> bool {
        self.marked += 1;
        if self.quiet_until.is_some_and(|until| now < until) {
            return false;
        }
        self.quiet_until = Some(now + self.interval);
        self.told += 1;
        true
    }

    /// The CNP leaves now, which may be later than it was due: the interval counts from here.
    pub fn on_sent(&mut self, now: Instant) {
        self.quiet_until = Some(now + self.interval);
    }

    /// Calls of [`on_marked`](Self::on_marked) so far.
    pub const fn marked(&self) -> u64 {
        self.marked
    }

    /// CNPs asked for so far.
    pub const fn cnps(&self) -> u64 {
        self.told
    }
}

impl Default for NotificationPoint {
    fn default() -> Self {
        Self::new(Self::INTERVAL)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::vec::Vec;

    #[test]
    fn one_in_fifty_microseconds() {
        let mut np = NotificationPoint::default();
        let at = |nanos| Instant::from_nanos(nanos);
        assert!(np.on_marked(at(7)), "the first one at once, also at the beginning of time");
        assert!(!np.on_marked(at(8)));
        assert!(!np.on_marked(at(50_006)));
        assert!(np.on_marked(at(50_007)));
        assert_eq!((np.marked(), np.cnps()), (4, 2));
        // It was held up for a while.
        np.on_sent(at(90_000));
        assert!(!np.on_marked(at(139_999)));
        assert!(np.on_marked(at(140_000)));
    }

    proptest! {
        #[test]
        fn never_two_within_the_interval(
            gaps in prop::collection::vec(0u64..100_000, 1..200),
            interval in 0u64..200_000,
        ) {
            let mut np = NotificationPoint::new(Duration::from_nanos(interval));
            let mut now = Instant::ZERO;
            let mut told: Vec<Instant> = Vec::new();
            for gap in gaps {
                now = now + Duration::from_nanos(gap);
                let due = told.last().is_none_or(|&last| (now - last).as_nanos() >= interval.into());
                prop_assert_eq!(np.on_marked(now), due);
                if due {
                    told.push(now);
                }
            }
            prop_assert_eq!(np.cnps(), told.len() as u64);
        }
    }
}
