//! The sender's part of DCQCN: how fast (paper, section 3.1, equations 1 to 4, algorithm 1).
//!
//! ```text
//!            CNP                                 max(T, BC) < F     R_T stays
//!   unlimited ──> limited: R_C, R_T, α           min(T, BC) <= F    R_T += R_AI
//!        ^        │                              otherwise          R_T += (min(T, BC) - F) · R_HAI
//!        └────────┘ R_C reaches the line rate    and each time      R_C = (R_T + R_C) / 2
//!
//!   CNP:     R_T = R_C;  R_C = R_C · (1 - α/2);  α = (1-g) · α + g;  T = BC = 0
//!   K over:  α = (1-g) · α
//! ```
//!
//! T counts the periods of the rate-increase timer since the last CNP, BC the times that B octets
//! were sent.
//!
//! No timer runs. What the timers would have done is caught up when somebody asks, so that a queue
//! pair which has nothing to send wakes nobody. While no CNP came, [`ReactionPoint::may_send`] is one
//! comparison, and [`ReactionPoint::on_sent`] an addition.
//!
//! What the paper leaves open:
//!
//! * Its sender starts at the line rate of its adapter. A socket does not know one, so the first CNP
//!   cuts the rate that was really used (a mean over the last [`Dcqcn::sample`]).
//! * When R_C reaches the line rate, or after 65,536 steps without a CNP, the limit is gone and the
//!   next CNP is a first one, with α = 1.
//! * Octets are let go by a token bucket of [`Dcqcn::burst`] octets: a driver that sleeps longer
//!   than it was told makes up for it, and a train goes as a whole.

use core::time::Duration;

use crate::time::Instant;

/// α = 1, as a fixed-point number.
const ONE: u64 = 1 << 32;
/// Tokens of one octet: a rate in octets per second times nanoseconds gives these.
const OCTET: i128 = 1_000_000_000;
/// So many steps without a CNP (3.6 s by the default timer) end the limit, whatever the rate is.
const FORGET: u32 = 65_536;

/// The parameters, named as in the paper. Rates are in octets per second.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct Dcqcn {
    /// g = 2^-`g_shift`, the gain with which α follows: 8 (g = 1/256, the paper's choice).
    pub g_shift: u8,
    /// K, the alpha timer: without a CNP for so long, α shrinks. 55 µs.
    pub alpha_timer: Duration,
    /// Period of the rate-increase timer. 55 µs.
    pub increase_timer: Duration,
    /// B, the byte counter: so many octets count as one step of increase. 10 MB.
    pub byte_counter: u64,
    /// F: steps of fast recovery. 5.
    pub fast_recovery: u32,
    /// R_AI, a step of additive increase. 5,000,000 (40 Mb/s).
    pub rate_ai: u64,
    /// R_HAI, a step of hyper increase, which the paper does not give. 50,000,000.
    pub rate_hai: u64,
    /// No CNP pushes the rate below this. 1,250,000 (10 Mb/s).
    pub min_rate: u64,
    /// From this rate on there is no limit. 12,500,000,000 (100 Gb/s).
    pub line_rate: u64,
    /// Octets that may go at once after a pause. 65,536, a train.
    pub burst: u64,
    /// Over how long the rate is measured that the first CNP cuts. 1 ms.
    pub sample: Duration,
}

impl Default for Dcqcn {
    fn default() -> Self {
        Self {
            g_shift: 8,
            alpha_timer: Duration::from_micros(55),
            increase_timer: Duration::from_micros(55),
            byte_counter: 10_000_000,
            fast_recovery: 5,
            rate_ai: 5_000_000,
            rate_hai: 50_000_000,
            min_rate: 1_250_000,
            line_rate: 12_500_000_000,
            burst: 65_536,
            sample: Duration::from_millis(1),
        }
    }
}

/// Why [`Dcqcn`] makes no sense.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum DcqcnError {
    /// g is 2^-`g_shift` of 1 to 31.
    #[error("g_shift is {0}, expected 1 to 31")]
    Gain(u8),
    /// A period is shorter than 1 µs or longer than an hour.
    #[error("{name} is {found:?}, expected 1 µs to 1 h")]
    Period {
        /// Which parameter.
        name: &'static str,
        /// Its value.
        found: Duration,
    },
    /// A number that must be above 0 is 0, or is over 10^15.
    #[error("{name} is {found}, expected 1 to 10^15")]
    Number {
        /// Which parameter.
        name: &'static str,
        /// Its value.
        found: u64,
    },
    /// The least rate is above the highest.
    #[error("min_rate {min} is above line_rate {line}")]
    Rates {
        /// [`Dcqcn::min_rate`].
        min: u64,
        /// [`Dcqcn::line_rate`].
        line: u64,
    },
}

impl Dcqcn {
    /// Whether a sender can run by these.
    ///
    /// # Errors
    ///
    /// The first parameter that is out of its range.
    pub fn check(&self) -> Result<(), DcqcnError> {
        if !(1..=31).contains(&self.g_shift) {
            return Err(DcqcnError::Gain(self.g_shift));
        }
        for (name, found) in [
            ("alpha_timer", self.alpha_timer),
            ("increase_timer", self.increase_timer),
            ("sample", self.sample),
        ] {
            if !(Duration::from_micros(1)..=Duration::from_secs(3600)).contains(&found) {
                return Err(DcqcnError::Period { name, found });
            }
        }
        for (name, found) in [
            ("byte_counter", self.byte_counter),
            ("rate_ai", self.rate_ai),
            ("rate_hai", self.rate_hai),
            ("min_rate", self.min_rate),
            ("line_rate", self.line_rate),
            ("burst", self.burst),
        ] {
            if !(1..=1_000_000_000_000_000).contains(&found) {
                return Err(DcqcnError::Number { name, found });
            }
        }
        let &Self { min_rate: min, line_rate: line, .. } = self;
        if min > line { Err(DcqcnError::Rates { min, line }) } else { Ok(()) }
    }
}

/// How the rate grows at present.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Phase {
    /// No CNP came, or what it did is over.
    Unlimited,
    /// Half of what was lost comes back with each step.
    FastRecovery,
    /// The target grows by R_AI a step.
    Additive,
    /// The target grows faster with each step.
    Hyper,
}

/// Says for one sender how fast it may send.
///
/// ```text
///   may_send(now, n) ── Ok: send ──> on_sent(now, n)
///                    └─ Err(at): ask again at `at`; poll_timeout repeats it
///   on_cnp(now)
/// ```
#[derive(Debug, Clone)]
pub struct ReactionPoint {
    config: Dcqcn,
    limit: Option<Limit>,
    /// When the sender that was told to wait may ask again.
    wake: Option<Instant>,
    meter: Meter,
    cnps: u64,
}

/// What the first CNP makes.
#[derive(Debug, Clone)]
struct Limit {
    /// R_C.
    current: u64,
    /// R_T.
    target: u64,
    /// α, [`ONE`] is 1.
    alpha: u64,
    /// T.
    timer_steps: u32,
    /// BC.
    byte_steps: u32,
    /// Octets since the last step of BC.
    octets: u64,
    /// When the timers end next.
    alpha_due: Instant,
    increase_due: Instant,
    /// What may go at once, in tokens of [`OCTET`]; below 0 after a train that is longer than the
    /// bucket is deep.
    tokens: i128,
    filled_at: Instant,
}

impl ReactionPoint {
    /// A sender without a limit.
    ///
    /// # Errors
    ///
    /// See [`Dcqcn::check`].
    pub fn new(config: Dcqcn) -> Result<Self, DcqcnError> {
        config.check()?;
        Ok(Self { config, limit: None, wake: None, meter: Meter::default(), cnps: 0 })
    }

    /// Whether `octets` may be sent now; else when to ask again, which may turn out too early.
    ///
    /// # Errors
    ///
    /// The instant, later than `now`, at which so many octets may go at the present rate.
    #[inline]
    pub fn may_send(&mut self, now: Instant, octets: u64) -> Result<(), Instant> {
        if self.limit.is_none() {
            return Ok(());
        }
        self.may_send_limited(now, octets)
    }

    /// `octets` were sent.
    #[inline]
    pub fn on_sent(&mut self, now: Instant, octets: u64) {
        if self.limit.is_none() {
            self.meter.add(now, octets, self.config.sample);
            return;
        }
        self.on_sent_limited(now, octets);
    }

    /// A CNP came in for this sender.
    pub fn on_cnp(&mut self, now: Instant) {
        self.cnps += 1;
        self.catch_up(now);
        let config = &self.config;
        let limit = self.limit.get_or_insert_with(|| {
            let measured = self.meter.rate(now).unwrap_or(config.line_rate);
            Limit {
                current: measured.clamp(config.min_rate, config.line_rate),
                target: config.line_rate,
                alpha: ONE,
                timer_steps: 0,
                byte_steps: 0,
                octets: 0,
                alpha_due: now,
                increase_due: now,
                tokens: 0,
                filled_at: now,
            }
        });
        limit.target = limit.current;
        limit.current -= share(limit.current, limit.alpha / 2);
        limit.current = limit.current.max(config.min_rate);
        limit.alpha += (ONE >> config.g_shift) - (limit.alpha >> config.g_shift);
        limit.timer_steps = 0;
        limit.byte_steps = 0;
        limit.octets = 0;
        limit.alpha_due = now + config.alpha_timer;
        limit.increase_due = now + config.increase_timer;
    }

    /// When a sender that was told to wait may ask again; `None` if none waits.
    pub const fn poll_timeout(&self) -> Option<Instant> {
        self.wake
    }

    /// The time of [`poll_timeout`](Self::poll_timeout) has come: it is not named again. The sender
    /// asks, if it still has something to send.
    pub fn handle_timeout(&mut self, now: Instant) {
        self.wake = self.wake.filter(|&at| at > now);
    }

    /// R_C in octets per second; `None` without a limit.
    pub fn rate(&mut self, now: Instant) -> Option<u64> {
        self.catch_up(now);
        self.limit.as_ref().map(|limit| limit.current)
    }

    /// How the rate grows now.
    pub fn phase(&mut self, now: Instant) -> Phase {
        self.catch_up(now);
        self.limit.as_ref().map_or(Phase::Unlimited, |limit| limit.phase(&self.config))
    }

    /// CNPs so far.
    pub const fn cnps(&self) -> u64 {
        self.cnps
    }

    /// The parameters.
    pub const fn config(&self) -> &Dcqcn {
        &self.config
    }

    fn may_send_limited(&mut self, now: Instant, octets: u64) -> Result<(), Instant> {
        self.catch_up(now);
        self.wake = None;
        let Some(limit) = &self.limit else {
            return Ok(());
        };
        let need = i128::from(octets.min(self.config.burst)) * OCTET;
        let missing = need - limit.tokens;
        if missing <= 0 {
            return Ok(());
        }
        let rate = i128::from(limit.current);
        let nanos = u64::try_from((missing + rate - 1) / rate).unwrap_or(u64::MAX);
        let at = now + Duration::from_nanos(nanos);
        self.wake = Some(at);
        Err(at)
    }

    fn on_sent_limited(&mut self, now: Instant, octets: u64) {
        self.catch_up(now);
        self.wake = None;
        let Some(limit) = &mut self.limit else {
            self.meter.add(now, octets, self.config.sample);
            return;
        };
        limit.tokens -= i128::from(octets) * OCTET;
        limit.octets = limit.octets.saturating_add(octets);
        while limit.octets >= self.config.byte_counter && !limit.is_over(&self.config) {
            limit.octets -= self.config.byte_counter;
            limit.byte_steps = limit.byte_steps.saturating_add(1);
            limit.increase(&self.config);
        }
        self.lift();
    }

    /// Does what the timers would have done until `now`.
    fn catch_up(&mut self, now: Instant) {
        let Some(limit) = &mut self.limit else {
            return;
        };
        let config = &self.config;
        while limit.increase_due <= now && !limit.is_over(config) {
            limit.fill(limit.increase_due, config.burst);
            limit.increase_due = limit.increase_due + config.increase_timer;
            limit.timer_steps = limit.timer_steps.saturating_add(1);
            limit.increase(config);
        }
        limit.fill(now, config.burst);
        // Below 2^g_shift α no longer shrinks. A long pause with a small g is cut short.
        let mut steps = 0u32;
        while limit.alpha_due <= now {
            let less = limit.alpha >> config.g_shift;
            steps += 1;
            if less == 0 || steps > FORGET {
                limit.alpha_due = now + config.alpha_timer;
                break;
            }
            limit.alpha -= less;
            limit.alpha_due = limit.alpha_due + config.alpha_timer;
        }
        self.lift();
    }

    /// Forgets the limit once it limits nothing.
    fn lift(&mut self) {
        if self.limit.as_ref().is_some_and(|limit| limit.is_over(&self.config)) {
            self.limit = None;
            self.wake = None;
            self.meter = Meter::default();
        }
    }
}

impl Limit {
    /// It limits nothing, or has not been renewed for very long.
    fn is_over(&self, config: &Dcqcn) -> bool {
        self.current >= config.line_rate || self.timer_steps.max(self.byte_steps) >= FORGET
    }

    fn phase(&self, config: &Dcqcn) -> Phase {
        let (most, least) =
            (self.timer_steps.max(self.byte_steps), self.timer_steps.min(self.byte_steps));
        if most < config.fast_recovery {
            Phase::FastRecovery
        } else if least > config.fast_recovery {
            Phase::Hyper
        } else {
            Phase::Additive
        }
    }

    /// One step of increase.
    fn increase(&mut self, config: &Dcqcn) {
        let more = match self.phase(config) {
            Phase::Unlimited | Phase::FastRecovery => 0,
            Phase::Additive => config.rate_ai,
            Phase::Hyper => {
                let steps = self.timer_steps.min(self.byte_steps) - config.fast_recovery;
                config.rate_hai.saturating_mul(steps.into())
            }
        };
        self.target = self.target.saturating_add(more).min(config.line_rate);
        // Rounded up: halving alone would never arrive.
        self.current = (self.target + self.current).div_ceil(2);
    }

    /// Puts in what came at the present rate until `at`.
    fn fill(&mut self, at: Instant, burst: u64) {
        let nanos = i128::from((at.as_nanos()).saturating_sub(self.filled_at.as_nanos()));
        let full = i128::from(burst) * OCTET;
        self.tokens = (self.tokens + i128::from(self.current) * nanos).min(full);
        self.filled_at = self.filled_at.max(at);
    }
}

/// `rate` times `part` of [`ONE`].
fn share(rate: u64, part: u64) -> u64 {
    // Less than `rate`, because `part` is less than ONE.
    ((u128::from(rate) * u128::from(part)) >> 32) as u64
}

/// The rate really used while there is no limit.
#[derive(Debug, Clone, Default)]
struct Meter {
    since: Option<Instant>,
    octets: u64,
    /// What the last full sample gave, and when it ended.
    last: Option<(Instant, u64)>,
}

impl Meter {
    #[inline]
    fn add(&mut self, now: Instant, octets: u64, sample: Duration) {
        let since = *self.since.get_or_insert(now);
        let span = now - since;
        if span >= sample {
            self.last = Some((now, per_second(self.octets, span)));
            self.since = Some(now);
            self.octets = 0;
        }
        self.octets = self.octets.saturating_add(octets);
    }

    /// The last full sample, or the one under way if there is none.
    fn rate(&self, now: Instant) -> Option<u64> {
        let under_way = self
            .since
            .map(|since| (self.octets, now - since))
            .filter(|(_, span)| !span.is_zero())
            .map(|(octets, span)| per_second(octets, span));
        self.last.map(|(_, rate)| rate).or(under_way)
    }
}

fn per_second(octets: u64, span: Duration) -> u64 {
    let rate = u128::from(octets) * 1_000_000_000 / span.as_nanos().max(1);
    u64::try_from(rate).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::{string::ToString, vec::Vec};

    /// The paper's equations in floating point, event by event.
    struct Model {
        current: f64,
        target: f64,
        alpha: f64,
        t: u32,
        bc: u32,
        octets: u64,
        alpha_due: u64,
        increase_due: u64,
    }

    impl Model {
        fn new(config: &Dcqcn) -> Self {
            let line = config.line_rate as f64;
            Self {
                current: line,
                target: line,
                alpha: 1.0,
                t: 0,
                bc: 0,
                octets: 0,
                alpha_due: u64::MAX,
                increase_due: u64::MAX,
            }
        }

        fn increase(&mut self, c: &Dcqcn) {
            let f = c.fast_recovery;
            if self.t.max(self.bc) >= f {
                if self.t.min(self.bc) > f {
                    let i = self.t.min(self.bc) - f;
                    self.target += f64::from(i) * c.rate_hai as f64;
                } else {
                    self.target += c.rate_ai as f64;
                }
            }
            self.target = self.target.min(c.line_rate as f64);
            self.current = f64::midpoint(self.target, self.current);
        }

        fn run(&mut self, c: &Dcqcn, now: u64) {
            loop {
                let due = self.alpha_due.min(self.increase_due);
                if due > now {
                    return;
                }
                if self.alpha_due == due {
                    self.alpha *= 1.0 - 0.5f64.powi(c.g_shift.into());
                    self.alpha_due += c.alpha_timer.as_nanos() as u64;
                } else {
                    self.t += 1;
                    self.increase_due += c.increase_timer.as_nanos() as u64;
                    self.increase(c);
                }
            }
        }

        fn sent(&mut self, c: &Dcqcn, octets: u64) {
            self.octets += octets;
            while self.octets >= c.byte_counter {
                self.octets -= c.byte_counter;
                self.bc += 1;
                self.increase(c);
            }
        }

        fn cnp(&mut self, c: &Dcqcn, now: u64) {
            let g = 0.5f64.powi(c.g_shift.into());
            self.target = self.current;
            self.current = (self.current * (1.0 - self.alpha / 2.0)).max(c.min_rate as f64);
            self.alpha = (1.0 - g) * self.alpha + g;
            (self.t, self.bc, self.octets) = (0, 0, 0);
            self.alpha_due = now + c.alpha_timer.as_nanos() as u64;
            self.increase_due = now + c.increase_timer.as_nanos() as u64;
        }
    }

    #[derive(Debug, Clone)]
    enum Step {
        Wait(u64),
        Cnp,
        Sent(u64),
    }

    fn steps() -> impl Strategy<Value = Vec<Step>> {
        let step = prop_oneof![
            4 => (0u64..400_000).prop_map(Step::Wait),
            2 => Just(Step::Cnp),
            4 => (1u64..4_000_000).prop_map(Step::Sent),
        ];
        prop::collection::vec(step, 1..300)
    }

    fn configs() -> impl Strategy<Value = Dcqcn> {
        (1u8..12, 20u64..2_000, 20u64..2_000, 100_000u64..20_000_000, 1u32..8).prop_map(
            |(g_shift, k, t, byte_counter, fast_recovery)| Dcqcn {
                g_shift,
                alpha_timer: Duration::from_micros(k),
                increase_timer: Duration::from_micros(t),
                byte_counter,
                fast_recovery,
                ..Dcqcn::default()
            },
        )
    }

    fn at(nanos: u64) -> Instant {
        Instant::from_nanos(nanos)
    }

    proptest! {
        #[test]
        fn rates_are_those_of_the_paper(config in configs(), steps in steps()) {
            let mut rp = ReactionPoint::new(config).unwrap();
            let mut model = Model::new(&config);
            let mut now = 0;
            for step in steps {
                match step {
                    Step::Wait(nanos) => now += nanos,
                    Step::Cnp => {
                        model.run(&config, now);
                        model.cnp(&config, now);
                        rp.on_cnp(at(now));
                    }
                    Step::Sent(octets) if rp.rate(at(now)).is_some() => {
                        model.run(&config, now);
                        model.sent(&config, octets);
                        rp.on_sent(at(now), octets);
                    }
                    // The rate before the first CNP is not in the paper.
                    Step::Sent(_) => {}
                }
                model.run(&config, now);
                match &rp.limit {
                    None => {
                        // Rounding up gets there a little earlier than never.
                        prop_assert!(model.current > config.line_rate as f64 - 64.0);
                        model = Model::new(&config);
                        prop_assert_eq!(rp.rate(at(now)), None);
                    }
                    Some(_) => {
                        let found = rp.rate(at(now)).map_or(config.line_rate, |rate| rate) as f64;
                        let near = (found - model.current).abs() < 1e-6 * model.current + 64.0;
                        prop_assert!(near, "{found} and {} at {now}", model.current);
                        if let Some(limit) = &rp.limit {
                            let alpha = limit.alpha as f64 / ONE as f64;
                            prop_assert!((alpha - model.alpha).abs() < 1e-5, "{alpha}, {}", model.alpha);
                            let counts = (limit.timer_steps, limit.byte_steps, limit.octets);
                            prop_assert_eq!(counts, (model.t, model.bc, model.octets));
                        } else {
                            model = Model::new(&config);
                        }
                    }
                }
            }
        }

        /// Whoever obeys never exceeds the rate by more than the bucket and one train.
        #[test]
        fn obedience_keeps_the_rate(
            trains in prop::collection::vec((1u64..100_000, 0u64..2_000_000), 1..300),
            cnps in 6u64..14,
        ) {
            let config = Dcqcn { rate_ai: 1, rate_hai: 1, ..Dcqcn::default() };
            let mut rp = ReactionPoint::new(config).unwrap();
            (0..cnps).for_each(|_| rp.on_cnp(at(0)));
            let (mut now, mut sent) = (0u64, 0i128);
            let mut waited = 0;
            for &(octets, pause) in &trains {
                now += pause;
                if let Err(until) = rp.may_send(at(now), octets) {
                    prop_assert!(until > at(now));
                    prop_assert_eq!(rp.poll_timeout(), Some(until));
                    rp.handle_timeout(at(now));
                    prop_assert_eq!(rp.poll_timeout(), Some(until));
                    now = until.as_nanos();
                    rp.handle_timeout(until);
                    prop_assert_eq!(rp.poll_timeout(), None);
                    // A rate that grew meanwhile only made it earlier.
                    prop_assert_eq!(rp.may_send(until, octets), Ok(()));
                    waited += 1;
                }
                rp.on_sent(at(now), octets);
                sent += i128::from(octets);
                // Steps of 1 octet/s: the target is as good as constant, and the rate is below it.
                let Some(limit) = &rp.limit else {
                    prop_assert!(now > 3_600_000_000, "forgotten after 65,536 steps");
                    break;
                };
                let top = i128::from(limit.target);
                let allowed = top * i128::from(now) + i128::from(config.burst + octets) * OCTET;
                prop_assert!(sent * OCTET <= allowed);
            }
            let slow = rp.rate(at(now)).is_some_and(|rate| rate < 20_000_000);
            prop_assert!(!slow || trains.len() < 100 || waited > 0, "slow, and yet never waited");
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Any times, also such that go back, and any amounts.
        #[test]
        fn any_events_survive(
            events in prop::collection::vec((0u8..4, any::<u64>(), 0u32..64, any::<u64>()), 0..60),
            byte_counter in 1u64..1000,
            rate_ai in 1u64..1000,
        ) {
            let config = Dcqcn { byte_counter, rate_ai, rate_hai: rate_ai, ..Dcqcn::default() };
            let mut rp = ReactionPoint::new(config).unwrap();
            for (kind, time, shift, octets) in events {
                let now = at(time >> shift);
                match kind {
                    0 => rp.on_cnp(now),
                    1 => rp.on_sent(now, octets >> shift),
                    2 => rp.handle_timeout(now),
                    _ => {
                        let told = rp.may_send(now, octets).err();
                        prop_assert!(told.is_none_or(|until| until >= now));
                        prop_assert_eq!(told, rp.poll_timeout());
                    }
                }
                if let Some(rate) = rp.rate(now) {
                    prop_assert!((config.min_rate..config.line_rate).contains(&rate));
                }
            }
        }
    }

    #[test]
    fn nothing_is_limited_before_a_cnp() {
        let mut rp = ReactionPoint::new(Dcqcn::default()).unwrap();
        for i in 0..1000 {
            assert_eq!(rp.may_send(at(i), u64::MAX), Ok(()));
            rp.on_sent(at(i), 1 << 20);
        }
        assert_eq!((rp.rate(at(1000)), rp.poll_timeout()), (None, None));
        assert_eq!(rp.phase(at(1000)), Phase::Unlimited);
    }

    #[test]
    fn first_cnp_halves_what_was_really_sent() {
        let mut rp = ReactionPoint::new(Dcqcn::default()).unwrap();
        // 4,000 octets each 4 µs: 1 GB/s.
        for i in 0..1000 {
            rp.on_sent(at(i * 4_000), 4_000);
        }
        rp.on_cnp(at(4_000_000));
        assert_eq!(rp.rate(at(4_000_000)), Some(500_000_000));
        // At half a gigabyte a second 4,000 octets take 8 µs.
        assert_eq!(rp.may_send(at(4_000_000), 4_000), Err(at(4_008_000)));
        assert_eq!(rp.poll_timeout(), Some(at(4_008_000)));
        assert_eq!(rp.may_send(at(4_008_000), 4_000), Ok(()));
        assert_eq!(rp.poll_timeout(), None);
    }

    /// Worked by hand: α = 1, g = 1/256, line rate 12.5 GB/s.
    #[test]
    fn phases_by_hand() {
        let mut rp = ReactionPoint::new(Dcqcn::default()).unwrap();
        rp.on_cnp(at(0));
        assert_eq!(rp.rate(at(0)), Some(6_250_000_000));
        assert_eq!(rp.rate(at(54_999)), Some(6_250_000_000));
        assert_eq!(rp.rate(at(55_000)), Some(9_375_000_000));
        assert_eq!(rp.rate(at(110_000)), Some(10_937_500_000));
        assert_eq!(rp.phase(at(110_000)), Phase::FastRecovery);
        // A second CNP: α was 1, then twice · 255/256; the target is what was.
        rp.on_cnp(at(110_000));
        let alpha = 255.0 * 255.0 / 65_536.0;
        let rate = (10_937_500_000.0 * (1.0 - alpha / 2.0)) as u64;
        assert!(rp.rate(at(110_000)).unwrap().abs_diff(rate) < 8);
        assert_eq!(rp.phase(at(110_000 + 5 * 55_000)), Phase::Additive);
        // The byte counter too is past F: hyper increase.
        rp.on_sent(at(110_000 + 5 * 55_000), 60_000_000);
        assert_eq!(rp.phase(at(110_000 + 6 * 55_000)), Phase::Hyper);
    }

    #[test]
    fn a_flood_of_cnps_ends_at_the_minimum() {
        let mut rp = ReactionPoint::new(Dcqcn::default()).unwrap();
        for i in 0..100_000 {
            rp.on_cnp(at(i));
        }
        assert_eq!((rp.rate(at(100_000)), rp.cnps()), (Some(1_250_000), 100_000));
    }

    #[test]
    fn a_long_silence_lifts_the_limit_and_costs_little() {
        let mut rp = ReactionPoint::new(Dcqcn::default()).unwrap();
        (0..40).for_each(|i| rp.on_cnp(at(i)));
        assert!(rp.rate(at(50_000_000)).is_some());
        assert_eq!(rp.rate(at(u64::MAX - 1)), None);
        assert_eq!(rp.may_send(at(u64::MAX), 1 << 40), Ok(()));
    }

    #[test]
    fn nonsense_is_refused_with_its_name() {
        let with = |change: fn(&mut Dcqcn)| {
            let mut config = Dcqcn::default();
            change(&mut config);
            ReactionPoint::new(config).unwrap_err().to_string()
        };
        assert_eq!(with(|c| c.g_shift = 0), "g_shift is 0, expected 1 to 31");
        assert_eq!(
            with(|c| c.alpha_timer = Duration::ZERO),
            "alpha_timer is 0ns, expected 1 µs to 1 h"
        );
        assert_eq!(with(|c| c.byte_counter = 0), "byte_counter is 0, expected 1 to 10^15");
        assert_eq!(
            with(|c| c.min_rate = 1 << 40),
            "min_rate 1099511627776 is above line_rate 12500000000"
        );
    }
}
