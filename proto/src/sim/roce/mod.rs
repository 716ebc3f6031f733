//! Two machines with RoCEv2 queue pairs, on a [`Network`](super::Network) with faults, judged by a
//! model.
//!
//! [`run`] does what [`Settings`] say: on both machines queue pairs in pairs, each with random work
//! of all its operations; programs that are slow to post; a check of each packet's ICRC as an
//! ordinary UDP socket has to make it. The [`Report`] says what happened, and whether it was right:
//!
//! * RC: both memories are those of a model, every work request completed once, in order, with what
//!   the model says. A queue pair may give up only where the network lost something of each of its
//!   `retry_cnt + 1` attempts at the same packet, or let it be overtaken, or where its peer gave up
//!   before.
//! * UC, UD: what was received was sent, and came in order, unless the network repeats or reorders;
//!   where it loses nothing, everything came.
//! * All: no changed packet passes its ICRC; nobody breaks a rule; where nothing was lost nothing is
//!   sent again; it ends, within a bound of steps.
//!
//! ```
//! use userdma_proto::sim::roce::{Settings, run};
//!
//! let report = run(&Settings::from_seed(7));
//! assert_eq!(report.verdict, Ok(()));
//! ```

mod check;
mod workload;
mod world;

use alloc::{collections::BTreeMap, format, string::String, vec::Vec};
use core::{net::SocketAddr, num::NonZeroU64, time::Duration};

use super::{Burst, Corruption, Counters, Impairments, Probability, Rate, Reordering, dice::Dice};
use crate::{
    roce::{PathMtu, Stats, Window},
    verbs::QpType,
    wire::ids::{QKey, Qpn},
};

/// What datagrams must carry.
const QKEY: QKey = QKey(0x1234);

/// Streams of chance, apart from those of the network.
const SETTINGS: u64 = 100;
const WORKLOAD: u64 = 101;
const WORLD: u64 = 102;

/// What is to be simulated.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Settings {
    /// What chance does: to the work, to the programs, and, unless `impairments` has another, to
    /// the network.
    pub seed: u64,
    /// RC, UC or UD.
    pub kind: QpType,
    /// Queue pairs on each machine, 1 to [`Settings::MAX_PAIRS`].
    pub pairs: usize,
    /// Work requests of each queue pair, up to [`Settings::MAX_OPERATIONS`].
    pub operations: usize,
    /// Octets of the longest message, up to [`Settings::MAX_LONGEST`].
    pub longest: u32,
    /// Path MTU.
    pub mtu: PathMtu,
    /// How much each queue pair has on the way.
    pub window: Window,
    /// How often it is tried again, 0 to 7.
    pub retry_cnt: u8,
    /// Addresses of IPv6.
    pub ipv6: bool,
    /// Programs post at random times; else all at once.
    pub slow: bool,
    /// What the network does, the same in both directions.
    pub impairments: Impairments,
    /// RC: both sides keep what comes out of order, and only what is missing is sent again.
    pub out_of_order: bool,
    /// Whether the [`Report`] has a capture.
    pub record: bool,
}

impl Settings {
    /// The most queue pairs of a machine.
    pub const MAX_PAIRS: usize = 64;
    /// The most work requests of a queue pair.
    pub const MAX_OPERATIONS: usize = 10_000;
    /// The longest message.
    pub const MAX_LONGEST: u32 = 1 << 20;

    /// Random work of RC queue pairs on a random network.
    pub fn from_seed(seed: u64) -> Self {
        let dice = &mut Dice::new(seed, SETTINGS);
        let mtu = PathMtu::ALL[dice.below(5) as usize];
        let longest = if dice.one_in(3) { 30_000 } else { 3_000 };
        Self {
            seed,
            kind: QpType::Rc,
            pairs: if dice.one_in(2) { 1 } else { 1 + dice.below(4) as usize },
            operations: 1 + dice.below(40) as usize,
            longest,
            mtu,
            window: Window {
                packets: 1 + dice.below(128) as u32,
                octets: 1 + dice.below(200_000) as u32,
            },
            retry_cnt: if dice.one_in(2) { 7 } else { dice.below(8) as u8 },
            ipv6: dice.one_in(2),
            slow: !dice.one_in(4),
            impairments: impairments(dice, seed),
            out_of_order: false,
            record: false,
        }
    }

    /// The UDP sockets of both machines.
    pub fn ends(&self) -> [SocketAddr; 2] {
        let v4 = |host| SocketAddr::from(([192, 0, 2, host], 4791));
        let v6 = |host| SocketAddr::from(([0x2001, 0xdb8, 0, 0, 0, 0, 0, host], 4791));
        if self.ipv6 { [v6(1), v6(2)] } else { [v4(1), v4(2)] }
    }

    /// What is out of range is moved into it.
    fn bounded(&self) -> Self {
        Self {
            pairs: self.pairs.clamp(1, Self::MAX_PAIRS),
            operations: self.operations.min(Self::MAX_OPERATIONS),
            longest: self.longest.min(Self::MAX_LONGEST),
            retry_cnt: self.retry_cnt.min(7),
            ..self.clone()
        }
    }

    /// The code of a time-out that no packet that arrives at all takes half of, at least 1 ms.
    fn timeout(&self) -> u8 {
        let i = &self.impairments;
        let hold = i.reorder.map_or(Duration::ZERO, |reorder| reorder.hold);
        let queued = i.rate.map_or(Duration::ZERO, |rate| {
            let octets = u128::from(rate.queue) + 70_000;
            let nanos = octets * 1_000_000_000 / u128::from(rate.octets.get());
            Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
        });
        let way = i.delay.saturating_add(i.jitter).saturating_add(hold).saturating_add(queued);
        let enough = way.as_nanos().saturating_mul(4);
        (8..31).find(|&t| 4096u128 << t > enough).unwrap_or(31)
    }
}

/// A random network: often good, mostly a little bad, sometimes very.
fn impairments(dice: &mut Dice, seed: u64) -> Impairments {
    let mut out = Impairments { seed, ..Impairments::default() };
    let bad = dice.below(5);
    if bad == 0 {
        return out;
    }
    let mut some = |most: u32| {
        if dice.one_in(2) {
            return Probability::NEVER;
        }
        let most = if bad == 4 { 4 * most } else { most };
        Probability::parts_per_billion(dice.below(u64::from(most) * 10_000_000) as u32)
    };
    (out.loss, out.dup, out.ecn) = (some(5), some(5), some(20));
    let (reorder, corrupt, burst) = (some(5), some(2), some(1));
    if reorder > Probability::NEVER {
        let hold = Duration::from_micros(1 + dice.below(1000));
        out.reorder =
            Some(Reordering { probability: reorder, distance: 1 + dice.below(9) as u8, hold });
    }
    if corrupt > Probability::NEVER {
        out.corrupt = Some(Corruption { probability: corrupt, bits: 1 });
    }
    if burst > Probability::NEVER {
        let leave = Probability::percent(20 + dice.below(80) as u32);
        out.burst = Some(Burst { enter: burst, leave, loss: Probability::ALWAYS });
    }
    out.delay = Duration::from_micros(dice.below(1000));
    if dice.one_in(2) {
        out.jitter = Duration::from_micros(dice.below(500));
    }
    if dice.one_in(3) {
        let octets = NonZeroU64::MIN.saturating_add(1_000_000 * dice.below(1000) + 999_999);
        out.rate = Some(Rate { queue: 4096 + dice.below(300_000), ..Rate::new(octets) });
    }
    out
}

/// The number of a queue pair.
fn qpn(pair: usize, side: usize) -> Qpn {
    Qpn(0x10 + 2 * pair as u32 + side as u32)
}

/// What happened. Numbers are sums of all queue pairs of both machines.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Report {
    /// Whether everything was right; else what was not.
    pub verdict: Result<(), String>,
    /// Work requests by what they do.
    pub operations: BTreeMap<&'static str, u64>,
    /// Completions that say success, of sends and receives.
    pub succeeded: u64,
    /// Completions that say that something failed.
    pub failed: u64,
    /// Completions of work that was flushed.
    pub flushed: u64,
    /// The counters of the queue pairs.
    pub stats: Stats,
    /// Packets whose ICRC was wrong.
    pub bad_icrc: u64,
    /// What the network did.
    pub network: Counters,
    /// Queue pairs in the error state.
    pub given_up: Vec<Qpn>,
    /// How long it took in virtual time, up to the last thing that happened.
    pub time: Duration,
    /// Times that something happened.
    pub steps: u64,
    /// All packets as pcapng: the interface `sent` with what became of them, and `delivered`.
    pub capture: Option<Vec<u8>>,
}

/// Simulates. Values out of range are moved into it.
pub fn run(settings: &Settings) -> Report {
    let settings = &settings.bounded();
    let mut world = match world::World::new(settings) {
        Ok(world) => world,
        Err(problem) => return Report::empty(Err(problem)),
    };
    let ran = world.run();
    let verdict = ran.and_then(|()| check::check(settings, &world));
    let mut report = Report::empty(verdict);
    for (pair, side, end) in world.ends() {
        for wr in &world.plan(pair, side).sends {
            *report.operations.entry(wr.op.name()).or_default() += 1;
        }
        for wc in &end.wcs {
            let count = match wc.status {
                crate::verbs::WcStatus::SUCCESS => &mut report.succeeded,
                crate::verbs::WcStatus::WR_FLUSH_ERR => &mut report.flushed,
                _ => &mut report.failed,
            };
            *count += 1;
        }
        report.stats += *end.qp.stats();
        if end.died.is_some() {
            report.given_up.push(qpn(pair, side));
        }
    }
    report.bad_icrc = world.bad_icrc;
    report.network = world.network.counters();
    report.time = world.last - crate::time::Instant::ZERO;
    report.steps = world.steps;
    report.capture = world.network.capture().map(|writer| writer.octets().to_vec());
    report
}

impl Report {
    fn empty(verdict: Result<(), String>) -> Self {
        Self {
            verdict,
            operations: BTreeMap::new(),
            succeeded: 0,
            failed: 0,
            flushed: 0,
            stats: Stats::default(),
            bad_icrc: 0,
            network: Counters::default(),
            given_up: Vec::new(),
            time: Duration::ZERO,
            steps: 0,
            capture: None,
        }
    }
}

/// A problem of the queue pair on `side` of `pair`.
fn problem(pair: usize, side: usize, what: &str) -> String {
    format!("queue pair {}: {what}", qpn(pair, side).0)
}

/// An error that a queue pair should not have given.
fn refused(pair: usize, side: usize, what: &str, error: &dyn core::error::Error) -> String {
    problem(pair, side, &format!("{what}: {error}"))
}
