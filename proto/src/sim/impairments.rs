//! What a network does to packets, and its text form.

use alloc::string::{String, ToString};
use core::{fmt, num::NonZeroU64, str::FromStr, time::Duration};

/// A probability in steps of 10^-9. In text: a percentage with up to 7 decimals, `0.1%`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Probability(u32);

impl Probability {
    /// 0 %.
    pub const NEVER: Self = Self(0);
    /// 100 %.
    pub const ALWAYS: Self = Self(1_000_000_000);

    /// So many percent; more than 100 are 100.
    pub const fn percent(percent: u32) -> Self {
        Self::parts_per_billion(percent.saturating_mul(10_000_000))
    }

    /// So many times in 10^9; more than that is always.
    pub const fn parts_per_billion(ppb: u32) -> Self {
        if ppb < Self::ALWAYS.0 { Self(ppb) } else { Self::ALWAYS }
    }

    /// How often in 10^9 times.
    pub const fn ppb(self) -> u32 {
        self.0
    }
}

/// Losses in bursts, as Gilbert and Elliott model them: a link is good or bad, and each packet may
/// change that. In text: `burst=ENTER/LEAVE` or `burst=ENTER/LEAVE/LOSS`, such as `0.1%/30%`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Burst {
    /// That a good link becomes bad with a packet.
    pub enter: Probability,
    /// That a bad link becomes good with a packet: bursts are 1/`leave` packets long on average.
    pub leave: Probability,
    /// That a packet is lost while the link is bad; 100 %.
    pub loss: Probability,
}

/// Packets that are overtaken. In text: `reorder=PROBABILITY`, and after a slash each the distance
/// and the hold: `1%/3/5ms`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reordering {
    /// That a packet is held back.
    pub probability: Probability,
    /// It is let go when 1 to so many later ones (by chance) have passed; 3.
    pub distance: u8,
    /// How long it is held back at most, where nothing follows; 5 ms.
    pub hold: Duration,
}

impl Reordering {
    /// Up to 3 packets, or 5 ms.
    pub const fn new(probability: Probability) -> Self {
        Self { probability, distance: 3, hold: Duration::from_millis(5) }
    }
}

/// Flipped bits. In text: `corrupt=PROBABILITY` or `corrupt=PROBABILITY/BITS`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Corruption {
    /// That a packet is changed.
    pub probability: Probability,
    /// 1 to so many different bits of it (by chance); 1.
    pub bits: u8,
}

/// How fast a link is, and how much waits in front of it. In text: `rate=100MB,queue=64kB`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rate {
    /// Octets per second.
    pub octets: NonZeroU64,
    /// Octets that may wait; a packet that would make them more is dropped (tail drop), unless
    /// nothing waits. 256 KiB.
    pub queue: u64,
    /// Marks by what waits.
    pub mark: Option<Marking>,
}

impl Rate {
    /// With a queue of 256 KiB, no marks.
    pub const fn new(octets: NonZeroU64) -> Self {
        Self { octets, queue: 262_144, mark: None }
    }
}

/// When a switch says "congestion experienced" (paper of DCQCN, figure 5): never below `low`, with a
/// probability that grows evenly to `most` at `high`, and always above. In text:
/// `mark=LOW/HIGH/MOST`, such as `5kB/200kB/1%`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Marking {
    /// K_min: octets in the queue.
    pub low: u64,
    /// K_max: octets in the queue.
    pub high: u64,
    /// P_max.
    pub most: Probability,
}

/// What a network does to the packets of one direction. The default is nothing.
///
/// The text form is a list with commas, in any order, each at most once:
///
/// | item | means |
/// | --- | --- |
/// | `loss=1%` | each packet is lost with this probability |
/// | `burst=0.1%/30%/100%` | [`Burst`] |
/// | `dup=1%` | a packet comes twice |
/// | `reorder=1%/3/5ms` | [`Reordering`] |
/// | `corrupt=0.1%/1` | [`Corruption`] |
/// | `delay=2ms`, `jitter=1ms` | it takes 2 to 3 ms, without overtaking: `ns`, `us`, `ms`, `s` |
/// | `ecn=1%` | a packet that can be marked (ECN 1 or 2) is |
/// | `rate=100MB`, `queue=256KiB` | [`Rate`]: octets per second; `B`, `kB`, `MB`, `GB`, `KiB`, `MiB`, `GiB` |
/// | `mark=5kB/200kB/1%` | [`Marking`] |
/// | `seed=7` | what chance does |
///
/// `none` and the empty text are the default.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Impairments {
    /// Losses that do not depend on each other.
    pub loss: Probability,
    /// Losses in bursts, besides.
    pub burst: Option<Burst>,
    /// A packet comes twice.
    pub dup: Probability,
    /// A packet comes late.
    pub reorder: Option<Reordering>,
    /// A packet comes changed.
    pub corrupt: Option<Corruption>,
    /// How long a packet is on its way, at least.
    pub delay: Duration,
    /// How much longer it is at most; evenly distributed.
    pub jitter: Duration,
    /// A packet that can be marked comes marked.
    pub ecn: Probability,
    /// How fast the link is; `None`: no bound.
    pub rate: Option<Rate>,
    /// What chance does.
    pub seed: u64,
}

/// A text that is no list of impairments: which item, where, and why.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("at offset {at}, `{item}`: {problem}")]
pub struct ParseError {
    /// Where the item begins, in octets.
    pub at: usize,
    /// The item.
    pub item: String,
    /// What is wrong with it.
    pub problem: Problem,
}

/// What is wrong with an item.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Problem {
    /// It has no such name.
    #[error(
        "unknown; expected loss, burst, dup, reorder, corrupt, delay, jitter, ecn, rate, queue, mark or seed"
    )]
    Unknown,
    /// It has no value.
    #[error("expected {0}")]
    Expected(&'static str),
    /// It was there before.
    #[error("given twice")]
    Twice,
    /// It means something only with another one.
    #[error("needs {0} besides")]
    Needs(&'static str),
}

const PERCENTAGE: &str = "a percentage from 0% to 100% with at most 7 decimals, such as 0.1%";
const DURATION: &str = "a time up to 1000s with a unit (ns, us, ms, s), such as 2ms";
const SIZE: &str =
    "octets above 0 with a unit (B, kB, MB, GB, KiB, MiB, GiB), up to 1000GB, such as 64kB";
const BURST: &str = "ENTER%/LEAVE% or ENTER%/LEAVE%/LOSS%, such as 0.1%/30%";
const REORDER: &str = "PERCENTAGE, PERCENTAGE/DISTANCE or PERCENTAGE/DISTANCE/TIME, such as 1%/3/5ms (distance 1 to 255)";
const CORRUPT: &str = "PERCENTAGE or PERCENTAGE/BITS, such as 0.1%/3 (1 to 32 bits)";
const MARK: &str = "LOW/HIGH/PERCENTAGE, LOW not above HIGH, such as 5kB/200kB/1%";
const SEED: &str = "a whole number below 2^64";

impl FromStr for Impairments {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let mut found = Found::default();
        let trimmed = text.trim();
        if trimmed.is_empty() || trimmed == "none" {
            return Ok(Self::default());
        }
        let mut at = 0;
        for part in text.split(',') {
            let item = part.trim();
            let begin = at + (part.len() - part.trim_start().len());
            found.take(begin, item).map_err(|problem| ParseError {
                at: begin,
                item: item.to_string(),
                problem,
            })?;
            at += part.len() + 1;
        }
        found.finish().map_err(|(at, item, problem)| ParseError {
            at,
            item: item.to_string(),
            problem,
        })
    }
}

/// The items seen so far, with where they begin.
#[derive(Default)]
struct Found<'a> {
    seen: alloc::vec::Vec<(&'a str, usize, &'a str)>,
    so_far: Impairments,
    rate: Option<NonZeroU64>,
    queue: Option<u64>,
    mark: Option<Marking>,
}

impl<'a> Found<'a> {
    fn take(&mut self, at: usize, item: &'a str) -> Result<(), Problem> {
        let (name, value) = item.split_once('=').unwrap_or((item, ""));
        let (name, value) = (name.trim(), value.trim());
        let want = |what: &'static str| Problem::Expected(what);
        let out = &mut self.so_far;
        match name {
            "loss" => out.loss = percentage(value).ok_or(want(PERCENTAGE))?,
            "dup" => out.dup = percentage(value).ok_or(want(PERCENTAGE))?,
            "ecn" => out.ecn = percentage(value).ok_or(want(PERCENTAGE))?,
            "burst" => out.burst = Some(burst(value).ok_or(want(BURST))?),
            "reorder" => out.reorder = reorder(value).ok_or(want(REORDER))?,
            "corrupt" => out.corrupt = corrupt(value).ok_or(want(CORRUPT))?,
            "delay" => out.delay = duration(value).ok_or(want(DURATION))?,
            "jitter" => out.jitter = duration(value).ok_or(want(DURATION))?,
            "rate" => self.rate = Some(rate(value).ok_or(want(SIZE))?),
            "queue" => self.queue = Some(size(value).ok_or(want(SIZE))?),
            "mark" => self.mark = Some(mark(value).ok_or(want(MARK))?),
            "seed" => out.seed = whole(value).ok_or(want(SEED))?,
            _ => return Err(Problem::Unknown),
        }
        if self.seen.iter().any(|&(other, ..)| other == name) {
            return Err(Problem::Twice);
        }
        self.seen.push((name, at, item));
        Ok(())
    }

    fn finish(self) -> Result<Impairments, (usize, &'a str, Problem)> {
        let Some(octets) = self.rate else {
            let lonely = self.seen.iter().find(|(name, ..)| matches!(*name, "queue" | "mark"));
            return match lonely {
                Some(&(_, at, item)) => Err((at, item, Problem::Needs("rate=…"))),
                None => Ok(self.so_far),
            };
        };
        let mut rate = Rate { mark: self.mark, ..Rate::new(octets) };
        if let Some(queue) = self.queue {
            rate.queue = queue;
        }
        Ok(Impairments { rate: Some(rate), ..self.so_far })
    }
}

/// `number` times `scale`, if that is whole.
fn scaled(number: &str, scale: u64) -> Option<u64> {
    let (front, decimals) = match number.split_once('.') {
        Some((_, "")) => return None,
        Some(parts) => parts,
        None => (number, ""),
    };
    let digits = |text: &str| text.bytes().all(|b| b.is_ascii_digit());
    if front.is_empty()
        || front.len() > 20
        || decimals.len() > 12
        || !digits(front)
        || !digits(decimals)
    {
        return None;
    }
    let unit = 10u128.pow(decimals.len() as u32);
    let front: u128 = front.parse().ok()?;
    let decimals: u128 = if decimals.is_empty() { 0 } else { decimals.parse().ok()? };
    // At most 10^20 · 10^12 · 2^64 would not fit; front · unit does.
    let product = (front * unit + decimals).checked_mul(scale.into())?;
    product.is_multiple_of(unit).then_some(product / unit).and_then(|n| u64::try_from(n).ok())
}

fn whole(value: &str) -> Option<u64> {
    scaled(value, 1).filter(|_| !value.contains('.'))
}

fn percentage(value: &str) -> Option<Probability> {
    let ppb = scaled(value.strip_suffix('%')?, 10_000_000)?;
    let ppb = u32::try_from(ppb).ok().filter(|&ppb| ppb <= Probability::ALWAYS.0)?;
    Some(Probability(ppb))
}

fn duration(value: &str) -> Option<Duration> {
    let nanos = with_unit(value, &TIMES)?;
    (nanos <= 1_000_000_000_000).then_some(Duration::from_nanos(nanos))
}

fn size(value: &str) -> Option<u64> {
    with_unit(value, &SIZES).filter(|n| (1..=1_000_000_000_000).contains(n))
}

fn rate(value: &str) -> Option<NonZeroU64> {
    NonZeroU64::new(size(value.strip_suffix("/s").unwrap_or(value))?)
}

fn burst(value: &str) -> Option<Burst> {
    let mut parts = value.split('/').map(percentage);
    let (enter, leave) = (parts.next()??, parts.next()??);
    let loss = parts.next().unwrap_or(Some(Probability::ALWAYS))?;
    parts.next().is_none().then_some(Burst { enter, leave, loss })
}

/// The outer `None` is an error, the inner one says that nothing is reordered.
fn reorder(value: &str) -> Option<Option<Reordering>> {
    let mut parts = value.split('/');
    let mut out = Reordering::new(percentage(parts.next()?)?);
    if let Some(distance) = parts.next() {
        out.distance = u8::try_from(whole(distance)?).ok().filter(|&n| n > 0)?;
    }
    if let Some(hold) = parts.next() {
        out.hold = duration(hold)?;
    }
    parts.next().is_none().then_some(Some(out).filter(|out| out.probability > Probability::NEVER))
}

/// As of [`reorder`].
fn corrupt(value: &str) -> Option<Option<Corruption>> {
    let mut parts = value.split('/');
    let mut out = Corruption { probability: percentage(parts.next()?)?, bits: 1 };
    if let Some(bits) = parts.next() {
        out.bits = u8::try_from(whole(bits)?).ok().filter(|n| (1..=32).contains(n))?;
    }
    parts.next().is_none().then_some(Some(out).filter(|out| out.probability > Probability::NEVER))
}

fn mark(value: &str) -> Option<Marking> {
    let mut parts = value.split('/');
    let (low, high) = (size(parts.next()?)?, size(parts.next()?)?);
    let most = percentage(parts.next()?)?;
    (parts.next().is_none() && low <= high).then_some(Marking { low, high, most })
}

/// Units, the largest first.
const TIMES: [(&str, u64); 5] =
    [("s", 1_000_000_000), ("ms", 1_000_000), ("us", 1_000), ("µs", 1_000), ("ns", 1)];
const SIZES: [(&str, u64); 7] = [
    ("GiB", 1 << 30),
    ("GB", 1_000_000_000),
    ("MiB", 1 << 20),
    ("MB", 1_000_000),
    ("KiB", 1 << 10),
    ("kB", 1_000),
    ("B", 1),
];

fn with_unit(value: &str, units: &[(&str, u64)]) -> Option<u64> {
    let end = value.find(|c: char| !c.is_ascii_digit() && c != '.')?;
    let (number, name) = value.split_at(end);
    let &(_, scale) = units.iter().find(|&&(unit, _)| unit == name)?;
    scaled(number, scale)
}

/// A number in the largest unit of which it is a whole multiple.
struct InUnits(u64, &'static [(&'static str, u64)]);

impl fmt::Display for InUnits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let &Self(n, units) = self;
        let fits = units.iter().find(|(_, scale)| n > 0 && n.is_multiple_of(*scale));
        let &(name, scale) = fits.unwrap_or(&units[units.len() - 1]);
        write!(f, "{}{name}", n / scale)
    }
}

fn time(duration: Duration) -> InUnits {
    InUnits(u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX), &TIMES)
}

impl fmt::Display for Probability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (whole, rest) = (self.0 / 10_000_000, self.0 % 10_000_000);
        if rest == 0 {
            return write!(f, "{whole}%");
        }
        let (mut rest, mut width) = (rest, 7);
        while rest.is_multiple_of(10) {
            rest /= 10;
            width -= 1;
        }
        write!(f, "{whole}.{rest:0width$}%")
    }
}

impl fmt::Display for Impairments {
    /// The text form, only what is not the default; `none` if all is.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut list = List { f, any: false };
        for (name, p) in [("loss", self.loss), ("dup", self.dup), ("ecn", self.ecn)] {
            if p > Probability::NEVER {
                list.item(format_args!("{name}={p}"))?;
            }
        }
        if let Some(Burst { enter, leave, loss }) = self.burst {
            list.item(format_args!("burst={enter}/{leave}/{loss}"))?;
        }
        if let Some(Reordering { probability, distance, hold }) = self.reorder {
            list.item(format_args!("reorder={probability}/{distance}/{}", time(hold)))?;
        }
        if let Some(Corruption { probability, bits }) = self.corrupt {
            list.item(format_args!("corrupt={probability}/{bits}"))?;
        }
        for (name, duration) in [("delay", self.delay), ("jitter", self.jitter)] {
            if !duration.is_zero() {
                list.item(format_args!("{name}={}", time(duration)))?;
            }
        }
        if let Some(Rate { octets, queue, mark }) = self.rate {
            let (rate, queue) = (InUnits(octets.get(), &SIZES), InUnits(queue, &SIZES));
            list.item(format_args!("rate={rate},queue={queue}"))?;
            if let Some(Marking { low, high, most }) = mark {
                let (low, high) = (InUnits(low, &SIZES), InUnits(high, &SIZES));
                list.item(format_args!("mark={low}/{high}/{most}"))?;
            }
        }
        if self.seed != 0 {
            list.item(format_args!("seed={}", self.seed))?;
        }
        if list.any { Ok(()) } else { f.write_str("none") }
    }
}

/// Items with commas between.
struct List<'a, 'b> {
    f: &'a mut fmt::Formatter<'b>,
    any: bool,
}

impl List<'_, '_> {
    fn item(&mut self, item: fmt::Arguments<'_>) -> fmt::Result {
        if core::mem::replace(&mut self.any, true) {
            self.f.write_str(",")?;
        }
        self.f.write_fmt(item)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(text: &str) -> Impairments {
        text.parse().unwrap()
    }

    fn refusal(text: &str) -> String {
        text.parse::<Impairments>().unwrap_err().to_string()
    }

    #[test]
    fn all_items() {
        let found = parse(
            "loss=1%, dup=2.5%,reorder=1%/7/250us,corrupt=0.1%/3,delay=2ms,jitter=1.5ms,ecn=100%,\
             rate=100MB/s,queue=64KiB,mark=5kB/200kB/1%,burst=0.0000001%/30%,seed=7",
        );
        let expected = Impairments {
            loss: Probability::percent(1),
            burst: Some(Burst {
                enter: Probability(1),
                leave: Probability::percent(30),
                loss: Probability::ALWAYS,
            }),
            dup: Probability(25_000_000),
            reorder: Some(Reordering {
                probability: Probability::percent(1),
                distance: 7,
                hold: Duration::from_micros(250),
            }),
            corrupt: Some(Corruption { probability: Probability(1_000_000), bits: 3 }),
            delay: Duration::from_millis(2),
            jitter: Duration::from_micros(1500),
            ecn: Probability::ALWAYS,
            rate: Some(Rate {
                octets: NonZeroU64::new(100_000_000).unwrap(),
                queue: 65_536,
                mark: Some(Marking { low: 5_000, high: 200_000, most: Probability::percent(1) }),
            }),
            seed: 7,
        };
        assert_eq!(found, expected);
        assert_eq!(
            found.to_string(),
            "loss=1%,dup=2.5%,ecn=100%,burst=0.0000001%/30%/100%,reorder=1%/7/250us,corrupt=0.1%/3,\
             delay=2ms,jitter=1500us,rate=100MB,queue=64KiB,mark=5kB/200kB/1%,seed=7"
        );
        assert_eq!(parse("none"), parse("  "));
        assert_eq!(parse("loss=0%,reorder=0%,delay=0s").to_string(), "none");
    }

    #[test]
    fn refusals_say_what_where_and_what_else() {
        assert_eq!(
            refusal("loss=1%,los=2%"),
            "at offset 8, `los=2%`: unknown; expected loss, burst, dup, reorder, corrupt, delay, \
             jitter, ecn, rate, queue, mark or seed"
        );
        let percentage =
            "expected a percentage from 0% to 100% with at most 7 decimals, such as 0.1%";
        for value in ["0.01", "101%", "1.%", ".1%", "-1%", "%", "", "0.00000001%", "1e1%", "+1%"] {
            assert_eq!(
                refusal(&alloc::format!("seed=1, loss={value} ")),
                alloc::format!("at offset 8, `loss={value}`: {percentage}")
            );
        }
        assert_eq!(refusal("seed=1,dup"), alloc::format!("at offset 7, `dup`: {percentage}"));
        assert_eq!(refusal("loss=1%,loss=1%"), "at offset 8, `loss=1%`: given twice");
        assert_eq!(
            refusal("delay=2"),
            "at offset 0, `delay=2`: expected a time up to 1000s with a unit (ns, us, ms, s), such as 2ms"
        );
        assert_eq!(refusal("loss=1%,queue=1kB"), "at offset 8, `queue=1kB`: needs rate=… besides");
        for wrong in [
            "rate=0B",
            "rate=1Mbit",
            "rate=0.5B",
            "rate=1001GB",
            "delay=1001s",
            "delay=0.1ns",
            "reorder=1%/0",
            "reorder=1%/256",
            "reorder=1%/1/1ms/1",
            "corrupt=1%/0",
            "corrupt=1%/33",
            "burst=1%",
            "burst=1%/1%/1%/1%",
            "mark=2kB/1kB/1%",
            "seed=-1",
            "seed=1.0",
            "loss=1%,",
            "seed=18446744073709551616",
            "seed=999999999999999999999999999999999999999",
            "none,",
        ] {
            assert!(wrong.parse::<Impairments>().is_err(), "{wrong}");
        }
    }

    fn probability() -> impl Strategy<Value = Probability> {
        prop_oneof![
            (0u32..=1_000_000_000).prop_map(Probability),
            (0u32..=100).prop_map(Probability::percent),
        ]
    }

    fn some() -> impl Strategy<Value = Probability> {
        probability().prop_filter("not never", |&p| p > Probability::NEVER)
    }

    fn nanos() -> impl Strategy<Value = Duration> {
        prop_oneof![0u64..=1_000_000_000_000, (0u64..1000).prop_map(|n| n * 1_000_000)]
            .prop_map(Duration::from_nanos)
    }

    fn octets() -> impl Strategy<Value = u64> {
        prop_oneof![1u64..=1_000_000_000_000, (1u64..900).prop_map(|n| n << 30)]
    }

    proptest! {
        #[test]
        fn round_trip(
            probabilities in (probability(), probability(), probability()),
            burst in prop::option::of((probability(), probability(), probability())),
            reorder in prop::option::of((some(), 1u8.., nanos())),
            corrupt in prop::option::of((some(), 1u8..=32)),
            times in (nanos(), nanos()),
            rate in prop::option::of((octets(), octets())),
            mark in prop::option::of((octets(), octets(), probability())),
            seed: u64,
        ) {
            let (loss, dup, ecn) = probabilities;
            let mark = mark.map(|(a, b, most)| Marking { low: a.min(b), high: a.max(b), most });
            let impairments = Impairments {
                loss,
                dup,
                ecn,
                burst: burst.map(|(enter, leave, loss)| Burst { enter, leave, loss }),
                reorder: reorder.map(|(probability, distance, hold)| Reordering { probability, distance, hold }),
                corrupt: corrupt.map(|(probability, bits)| Corruption { probability, bits }),
                delay: times.0,
                jitter: times.1,
                rate: rate.map(|(rate, queue)| Rate { octets: NonZeroU64::new(rate).unwrap(), queue, mark }),
                seed,
            };
            let text = impairments.to_string();
            prop_assert_eq!(text.parse::<Impairments>(), Ok(impairments), "{}", text);
        }

        #[test]
        fn any_text_survives(text in ".{0,60}", items in "(loss|rate|mark|reorder|seed|=|,|/|%|[0-9.]|kB|ms){0,12}") {
            for text in [text, items] {
                if let Ok(found) = text.parse::<Impairments>() {
                    prop_assert_eq!(found.to_string().parse::<Impairments>(), Ok(found));
                }
            }
        }
    }
}
