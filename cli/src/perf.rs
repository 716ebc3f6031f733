//! `userdma perf`: bandwidth, latency and message rate of one operation.
//!
//! Both sides are one thread each that polls its completion queue and hands nothing over to
//! another thread. The server has its memory and spins only from Begin on, and gives a client up
//! that lets nothing move for some seconds. One connection is one measurement:
//!
//! ```text
//!  client                                 server
//!  SEND Begin {address, key}         ──►
//!                                    ◄──  SEND Ready {address, key}; its clock starts
//!  the messages                      ──►  (SENDs: credits come back as receives are posted again)
//!  SEND Finish {messages}            ──►  its clock stops
//!                                    ◄──  SEND Result {messages, octets, nanoseconds}
//! ```
//!
//! Finish, Ready and Result ask for a solicited event, which tells them from SENDs that are
//! measured. What is received is counted where it is received: SENDs and WRITEs by the server
//! and its clock, READs and atomics by the client.

use std::{
    process::ExitCode,
    sync::atomic::Ordering,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail};
use clap::{ArgGroup, Args};
use comfy_table::{CellAlignment, Table, presets::UTF8_FULL_CONDENSED};
use hdrhistogram::Histogram;
use serde_json::json;
use tokio::runtime::Runtime;
use userdma::{
    Access, Mr, QpState, RKey, RecvWr, Region, RemoteAddr, SendFlags, SendOp, SendWr, Wc,
};

use crate::{
    Usage,
    bare::{self, Bare, MIN_SAMPLES, WARM_UP, histogram},
    child::ServerProcess,
    common::{
        Common, Link, PATIENCE, Shape, Target, check_wc, close, connect, server, with_reason,
    },
    output::{self, counted, line, note},
    session::{self, Hello, MAX_MILLIS, MAX_SIZE, Measure, Mode, PerfOp, Reader, confirm},
    stop::Stop,
};

/// Measure bandwidth, latency or message rate of one operation.
#[derive(Args, Debug)]
#[command(
    group(ArgGroup::new("where").required(true).args(["target", "local"])),
    group(ArgGroup::new("measure").required(true).args(["bw", "lat", "rate"])),
    after_help = "\
Examples:
  userdma perf --local --op write --size 1048576 --bw --baseline
  userdma perf --local --op send --size 64 --lat --baseline --runs 5 --max-ratio 1.5
  userdma perf --local --op write --size 8 --rate --baseline --crc off --json
  userdma perf 10.0.0.1 --op read --size 65536 --bw --duration 10
  userdma perf --local --op write --size 1048576 --bw --baseline --transport roce

bw counts octets at the receiver. lat is the median: half the round trip for send and write, the
whole one for read and atomic. rate counts messages at the receiver. --baseline measures the bare
TCP or UDP socket in the same run, and ratio is ours / baseline: for bw and rate more is better, for lat
less. A latency is the median of 100 round trips at least, after 100 for warming up; where --duration
is too short for them there is no figure. In JSON samples, seconds and messages are those of all runs.
Exit status: 0 if measured (and the ratio is within bounds), 1 if not, 2 for wrong arguments."
)]
pub(crate) struct Perf {
    /// A `userdma serve`
    #[arg(value_name = "ADDR[:PORT]", value_parser = server)]
    target: Option<Target>,
    /// Start a server process of our own on loopback
    #[arg(long)]
    local: bool,
    /// The operation
    #[arg(long, value_enum)]
    op: PerfOp,
    /// Octets a message
    #[arg(long, value_name = "OCTETS", value_parser = clap::value_parser!(u32).range(0..=i64::from(MAX_SIZE)))]
    size: u32,
    /// Bandwidth, in GB/s (10^9 octets)
    #[arg(long)]
    bw: bool,
    /// Latency, in microseconds
    #[arg(long)]
    lat: bool,
    /// Message rate, in millions a second
    #[arg(long)]
    rate: bool,
    /// Seconds a run
    #[arg(long, value_name = "SECONDS", default_value = "1", value_parser = duration)]
    duration: Duration,
    /// Runs; the median counts. With --baseline the two take turns
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    runs: u32,
    /// Measure the bare socket too, in two processes of its own (with --local)
    #[arg(long)]
    baseline: bool,
    /// Fail if the ratio is below this (with --baseline)
    #[arg(long, value_name = "RATIO", requires = "baseline")]
    min_ratio: Option<f64>,
    /// Fail if the ratio is above this (with --baseline)
    #[arg(long, value_name = "RATIO", requires = "baseline")]
    max_ratio: Option<f64>,
    /// Print JSON: an object a measurement
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    common: Common,
}

/// Seconds with a fraction.
fn duration(text: &str) -> Result<Duration, String> {
    text.parse()
        .ok()
        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
        .filter(|d| (1..=u128::from(MAX_MILLIS)).contains(&d.as_millis()))
        .ok_or_else(|| {
            format!("{text:?} is no number of seconds from 0.001 to {}", MAX_MILLIS / 1000)
        })
}

/// One run, as both sides know it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    /// The operation.
    pub(crate) op: PerfOp,
    /// The figure.
    pub(crate) measure: Measure,
    /// Octets a message.
    pub(crate) size: u32,
    /// Milliseconds of the client's part.
    pub(crate) millis: u32,
}

/// Octets that a control message takes at most.
const CONTROL: usize = 64;
/// Octets that may be outstanding for bandwidth.
const BUDGET: u32 = 16 << 20;
/// Octets of memory that messages go round in, unless one message is larger.
const MEMORY: u32 = 4 << 20;
/// Octets that a work request carries inside; the default of a queue pair.
const INLINE: u32 = 256;
/// Receives beyond those for SENDs that are measured.
const SPARE: usize = 16;

impl Run {
    const fn two_sided(self) -> bool {
        matches!(self.op, PerfOp::Send)
    }

    /// Whether the client receives the octets.
    const fn fetches(self) -> bool {
        matches!(self.op, PerfOp::Read | PerfOp::Atomic)
    }

    /// Messages posted with one call; the last of them is signalled.
    fn batch(self) -> usize {
        match self.measure {
            Measure::Latency => 1,
            Measure::Rate if self.fetches() => 64,
            Measure::Rate => {
                // Not more than the budget where the messages are large after all.
                (BUDGET / 4 / self.size.max(1)).clamp(1, 512) as usize
            }
            Measure::Bandwidth => (BUDGET / 4 / self.size.max(1)).clamp(1, 64) as usize,
        }
    }

    /// Messages outstanding at most.
    fn window(self) -> usize {
        match self.measure {
            Measure::Latency => 1,
            _ => 4 * self.batch(),
        }
    }

    /// Receives for SENDs that are measured.
    fn receives(self) -> usize {
        if !self.two_sided() {
            return 0;
        }
        match self.measure {
            Measure::Latency => SPARE,
            _ => 2 * self.window(),
        }
    }

    /// SENDs that are received before a credit goes back.
    fn credit(self) -> usize {
        (self.receives() / 4).max(1)
    }

    /// Octets between two messages in memory.
    fn stride(self) -> usize {
        (self.size as usize).max(8).next_multiple_of(64)
    }

    /// Messages that memory has room for.
    fn places(self) -> usize {
        (MEMORY as usize / self.stride()).clamp(1, self.window().max(1))
    }

    /// Octets of a receive.
    fn slot(self) -> usize {
        if self.two_sided() { self.stride().max(CONTROL) } else { CONTROL }
    }

    /// Receives' places in memory: they are used round, as nobody reads what is measured.
    fn slots(self) -> usize {
        let receives = self.receives() + SPARE;
        (2 * MEMORY as usize / self.slot()).clamp(1, receives)
    }

    /// How many credits a client may hold.
    fn allowance(self) -> u64 {
        if self.two_sided() { self.receives() as u64 } else { u64::MAX }
    }
}

/// Queues of a run's connection.
pub(crate) fn shape(run: Run) -> Shape {
    Shape {
        sends: run.window() + run.batch() + 128,
        recvs: run.receives() + SPARE,
        depth: 128,
        one_cq: true,
    }
}

/// What a side says: a kind and up to three numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Say {
    kind: u8,
    numbers: [u64; 3],
}

impl Say {
    const BEGIN: u8 = 1;
    const READY: u8 = 2;
    const CREDIT: u8 = 3;
    const FINISH: u8 = 4;
    const RESULT: u8 = 5;
    const LEN: usize = 25;

    fn to_bytes(self) -> [u8; Self::LEN] {
        let mut b = [0; Self::LEN];
        b[0] = self.kind;
        for (place, number) in b[1..].chunks_mut(8).zip(self.numbers) {
            place.copy_from_slice(&number.to_be_bytes());
        }
        b
    }

    fn from_bytes(b: &[u8]) -> Result<Self> {
        let mut r = Reader(b);
        Ok(Self { kind: r.u8()?, numbers: [r.u64()?, r.u64()?, r.u64()?] })
    }
}

/// What the server knows of a measurement.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Counted {
    /// Messages.
    pub(crate) messages: u64,
    /// Whether only the client says so: nobody here sees where a READ, an atomic or a WRITE of no
    /// octets begins and ends.
    pub(crate) claimed: bool,
    /// Octets of payload that came or, of READs, went, as counted here; `None` for atomics.
    pub(crate) octets: Option<u64>,
}

/// One side of a measurement.
pub(crate) struct Side {
    link: Link,
    run: Run,
    /// What the other side reads and writes.
    shared: Mr,
    /// What this side sends from and reads to.
    own: Mr,
    receives: Mr,
    inline: Vec<u8>,
    wcs: Vec<Wc>,
}

/// What a turn of polling found.
#[derive(Default)]
struct Found {
    /// Signalled sends.
    sends: usize,
    /// SENDs that are measured.
    data: usize,
    /// A control message.
    control: Option<Say>,
}

impl Side {
    /// Octets of the memory that [`Side::new`] registers.
    pub(crate) fn octets(run: Run) -> usize {
        2 * run.places() * run.stride() + run.slots() * run.slot()
    }

    /// Registers the memory; posts nothing.
    pub(crate) fn new(link: Link, run: Run) -> Result<Self> {
        let register = |octets: usize, access: Access| -> Result<Mr> {
            let region = Region::alloc(octets)
                .with_context(|| format!("cannot have {}", output::octets(octets as u64)))?;
            Ok(link.pd.register(region, access)?)
        };
        let octets = run.places() * run.stride();
        let remote = Access::LOCAL_WRITE
            | Access::REMOTE_WRITE
            | Access::REMOTE_READ
            | Access::REMOTE_ATOMIC;
        let shared = register(octets, remote)?;
        let own = register(octets, Access::LOCAL_WRITE)?;
        let receives = register(run.slots() * run.slot(), Access::LOCAL_WRITE)?;
        let inline = vec![7; run.size.min(INLINE) as usize];
        Ok(Self { link, run, shared, own, receives, inline, wcs: vec![Wc::default(); 256] })
    }

    fn receive(&self, id: u64) -> RecvWr {
        let at = (id as usize % self.run.slots()) * self.run.slot();
        RecvWr::new(id, [self.receives.slice(at..at + self.run.slot())])
    }

    /// Posts all receives.
    pub(crate) fn post_receives(&self) -> Result<()> {
        let n = (self.run.receives() + SPARE) as u64;
        self.link
            .qp
            .post_recv_batch((0..n).map(|id| self.receive(id)))
            .map_err(|(i, e)| anyhow!("receive {i} was not taken: {e}"))
    }

    /// Polls once and posts receives again. `expected`: the kind of control message that may come.
    fn poll(&mut self, credits: bool) -> Result<Found> {
        let mut wcs = std::mem::take(&mut self.wcs);
        let n = self.link.send_cq.poll(&mut wcs);
        let found = self.sort(&wcs[..n], credits);
        self.wcs = wcs;
        found
    }

    fn sort(&self, wcs: &[Wc], credits: bool) -> Result<Found> {
        let mut found = Found::default();
        for wc in wcs {
            check_wc(wc, if wc.opcode.is_recv() { "a receive" } else { "a message" })?;
            if !wc.opcode.is_recv() {
                found.sends += 1;
            } else if wc.solicited || credits {
                let mut b = [0; Say::LEN];
                let at = (wc.id as usize % self.run.slots()) * self.run.slot();
                self.receives.read_at(at, &mut b)?;
                // Of several credits the last counts; nothing follows a solicited one.
                found.control = Some(Say::from_bytes(&b[..(wc.byte_len as usize).min(Say::LEN)])?);
            } else {
                found.data += 1;
            }
        }
        let received = wcs.iter().filter(|wc| wc.opcode.is_recv());
        let again = received.map(|wc| self.receive(wc.id));
        self.link
            .qp
            .post_recv_batch(again)
            .map_err(|(_, e)| anyhow!("a receive was not taken again: {e}"))?;
        Ok(found)
    }

    fn say(&self, kind: u8, numbers: [u64; 3]) -> Result<()> {
        let flags = if kind == Say::CREDIT { SendFlags::empty() } else { SendFlags::SOLICITED };
        let wr = SendWr::inline(u64::MAX, SendOp::Send, &Say { kind, numbers }.to_bytes())
            .unsignaled()
            .with_flags(flags);
        self.link.qp.post_send(wr).context("cannot post a control message")
    }

    /// Spins until a control message of `kind` comes.
    fn await_control(&mut self, kind: u8, watch: &mut Watch) -> Result<[u64; 3]> {
        loop {
            if let Some(say) = self.poll(false)?.control {
                if say.kind != kind {
                    bail!("expected control message {kind}, found {}", say.kind);
                }
                return Ok(say.numbers);
            }
            watch.tick(&self.link)?;
        }
    }

    /// Message number `n`, whatever the operation, for the other side's memory at `peer`.
    fn message(&self, n: u64, peer: RemoteAddr) -> SendWr {
        let size = self.run.size as usize;
        let at = (n as usize % self.run.places()) * self.run.stride();
        let remote = RemoteAddr::new(peer.addr + at as u64, peer.rkey);
        let own = || [self.own.slice(at..at + size)];
        match self.run.op {
            PerfOp::Send if self.run.size <= INLINE => {
                SendWr::inline(n, SendOp::Send, &self.inline)
            }
            PerfOp::Write if self.run.size <= INLINE => {
                SendWr::inline(n, SendOp::Write(remote), &self.inline)
            }
            PerfOp::Send => SendWr::send(n, own()),
            PerfOp::Write => SendWr::write(n, own(), remote),
            PerfOp::Read => SendWr::read(n, own(), remote),
            PerfOp::Atomic => {
                SendWr::new(n, SendOp::FetchAdd { remote: peer, add: 1, mask: 0 }, own())
            }
        }
    }

    /// A WRITE whose last octet is `mark`, to the beginning of the other side's memory.
    fn marked_write(&mut self, mark: u8, peer: RemoteAddr) -> Result<SendWr> {
        let last = self.run.size as usize - 1;
        if self.run.size <= INLINE {
            self.inline[last] = mark;
            return Ok(SendWr::inline(0, SendOp::Write(peer), &self.inline));
        }
        // The other side has answered the WRITE before: its source is free again.
        self.own.write_at(last, &[mark])?;
        Ok(SendWr::write(0, [self.own.slice(0..last + 1)], peer))
    }

    /// Whether the last octet of the first message in our memory is `mark`.
    fn is_marked(&self, mark: u8) -> bool {
        self.shared.load_u8(self.run.size as usize - 1, Ordering::Acquire) == mark
    }
}

/// The mark of round `n`: never the same twice in a row, never zero.
const fn mark(n: u64) -> u8 {
    (n % 255) as u8 + 1
}

/// Signal one in so many of the SENDs and WRITEs of a latency run, so that the queue empties.
const SIGNAL: u64 = 32;

/// Nothing moved for so long: looking a thousand times a second is enough.
const REST: Duration = Duration::from_secs(1);
/// A server gives a client up that lets nothing move for so long in a measurement.
const SERVER_PATIENCE: Duration = Duration::from_secs(5);

/// Looks now and then whether spinning still makes sense.
struct Watch<'a> {
    idle: u32,
    stop: &'a Stop,
    /// The measurement has to be over by then.
    deadline: Instant,
    /// How long nothing may move.
    patience: Duration,
    /// FPDUs both ways when something moved last, and when that was.
    moved: u64,
    since: Instant,
    resting: bool,
}

impl<'a> Watch<'a> {
    fn new(stop: &'a Stop, run: Run, patience: Duration) -> Self {
        let limit = Duration::from_millis(run.millis.into()) + Duration::from_secs(15);
        let now = Instant::now();
        Self {
            idle: 0,
            stop,
            deadline: now + limit,
            patience,
            moved: 0,
            since: now,
            resting: false,
        }
    }

    /// An empty turn.
    fn tick(&mut self, link: &Link) -> Result<()> {
        std::hint::spin_loop();
        self.idle = self.idle.wrapping_add(1);
        if !self.resting && !self.idle.is_multiple_of(4096) {
            return Ok(());
        }
        if self.stop.is_raised() {
            bail!("interrupted");
        }
        if link.qp.state() == QpState::Err {
            bail!("the connection ended in the middle of a measurement");
        }
        let now = Instant::now();
        if now > self.deadline {
            bail!("the measurement is not over 15 s after its time");
        }
        // Of READs and WRITEs a server sees nothing else.
        let moved = link.moved().packets;
        if moved != self.moved {
            (self.moved, self.since) = (moved, now);
            self.resting = false;
            return Ok(());
        }
        if now - self.since > self.patience {
            bail!("nothing has moved for {} s", self.patience.as_secs());
        }
        self.resting = now - self.since > REST;
        if self.resting {
            thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }
}

// ---------------------------------------------------------------------------------------------
// The server.

/// Serves one measurement from its Begin on, spinning in the thread that calls.
pub(crate) fn serve(mut side: Side, begin: &[u8], stop: &Stop) -> Result<Counted> {
    let run = side.run;
    let Say { kind: Say::BEGIN, numbers: [addr, rkey, _] } = Say::from_bytes(begin)? else {
        bail!("expected Begin, found something else");
    };
    let mut watch = Watch::new(stop, run, SERVER_PATIENCE);
    let peer = RemoteAddr::new(addr, RKey(rkey as u32));
    let before = side.link.moved();
    let here = side.shared.remote(0);
    side.say(Say::READY, [here.addr, here.rkey.0.into(), 0])?;
    let begun = Instant::now();

    let mut data = 0_u64;
    let mut credited = 0_u64;
    let mut rounds = 0_u64;
    let told = loop {
        let found = side.poll(false)?;
        data += found.data as u64;
        match (run.op, run.measure) {
            (PerfOp::Send, Measure::Latency) => {
                for _ in 0..found.data {
                    side.answer(rounds, peer)?;
                    rounds += 1;
                }
            }
            (PerfOp::Write, Measure::Latency) if side.is_marked(mark(rounds)) => {
                let wr = side.marked_write(mark(rounds), peer)?;
                side.post_round(rounds, wr)?;
                rounds += 1;
                continue;
            }
            (PerfOp::Send, _) if data - credited >= run.credit() as u64 => {
                credited = data;
                side.say(Say::CREDIT, [data, 0, 0])?;
            }
            _ => {}
        }
        match found.control {
            Some(Say { kind: Say::FINISH, numbers: [told, ..] }) => break told,
            Some(say) => bail!("expected Finish, found control message {}", say.kind),
            None if found.data == 0 && found.sends == 0 => watch.tick(&side.link)?,
            None => {}
        }
    };
    let nanos = u64::try_from(begun.elapsed().as_nanos()).unwrap_or(u64::MAX);

    let octets = told.checked_mul(run.size.into()).context("an impossible number of messages")?;
    if run.two_sided() && data != told {
        bail!("the client sent {told} messages, {data} arrived");
    }
    let after = side.link.moved();
    // Nobody is told of a WRITE or a READ: the octets are counted, without Finish and Ready.
    let control = Say::LEN as u64;
    let counted = match run.op {
        PerfOp::Send => Some(octets),
        PerfOp::Write => {
            Some((after.octets_received - before.octets_received).saturating_sub(control))
        }
        PerfOp::Read => Some((after.octets_sent - before.octets_sent).saturating_sub(control)),
        PerfOp::Atomic => None,
    };
    if let Some(counted) = counted
        && counted < octets
    {
        bail!("the client says that it moved {octets} octets, {counted} were moved");
    }
    side.say(Say::RESULT, [told, octets, nanos])?;
    let claimed = run.fetches() || run.op == PerfOp::Write && run.size == 0;
    Ok(Counted { messages: told, claimed, octets: counted })
}

impl Side {
    fn answer(&mut self, round: u64, peer: RemoteAddr) -> Result<()> {
        let wr = self.message(0, peer);
        self.post_round(round, wr)
    }

    /// Posts a message of a latency run.
    fn post_round(&self, round: u64, wr: SendWr) -> Result<()> {
        let wr = if round.is_multiple_of(SIGNAL) { wr } else { wr.unsignaled() };
        self.link.qp.post_send(wr).context("cannot post a message")
    }
}

// ---------------------------------------------------------------------------------------------
// The client.

/// What a run, or all of them, came to.
#[derive(Clone, Copy, Debug, Default)]
struct Measured {
    /// GB/s, million messages per second, or microseconds.
    value: f64,
    /// Messages, or round trips where these are measured.
    messages: u64,
    /// Round trips that the latency is the median of; 0 where none is measured.
    samples: u64,
    /// Time that the messages took, by the clock that the figure is taken from.
    seconds: f64,
}

/// Measures, spinning in the thread that calls.
fn measure(mut side: Side, stop: &Stop) -> Result<Measured> {
    let run = side.run;
    let mut watch = Watch::new(stop, run, PATIENCE);
    let here = side.shared.remote(0);
    side.say(Say::BEGIN, [here.addr, here.rkey.0.into(), 0])?;
    let [addr, rkey, _] = side.await_control(Say::READY, &mut watch)?;
    let peer = RemoteAddr::new(addr, RKey(rkey as u32));
    let begun = Instant::now();
    let deadline = begun + Duration::from_millis(run.millis.into());

    if run.measure == Measure::Latency {
        let (messages, times) = latency(&mut side, peer, deadline, &mut watch)?;
        let seconds = begun.elapsed().as_secs_f64();
        side.say(Say::FINISH, [messages, 0, 0])?;
        side.await_control(Say::RESULT, &mut watch)?;
        let ways = if run.fetches() { 1.0 } else { 2.0 };
        let median = times.value_at_quantile(0.5);
        let value = median as f64 / ways / 1e3;
        return Ok(Measured { value, messages, samples: times.len(), seconds });
    }

    let messages = pump(&mut side, peer, deadline, &mut watch)?;
    let here = begun.elapsed();
    side.say(Say::FINISH, [messages, 0, 0])?;
    let [messages, octets, nanos] = side.await_result(&mut watch)?;
    let nanos = if run.fetches() { here.as_nanos() as f64 } else { nanos as f64 }.max(1.0);
    let value = match run.measure {
        Measure::Rate => messages as f64 / nanos * 1e3,
        Measure::Bandwidth | Measure::Latency => octets as f64 / nanos,
    };
    Ok(Measured { value, messages, samples: 0, seconds: nanos / 1e9 })
}

/// A latency that is the median of next to nothing is none.
fn enough(run: Run, measured: &Measured) -> Result<()> {
    if run.measure != Measure::Latency || measured.samples >= MIN_SAMPLES {
        return Ok(());
    }
    // Twice what it would take at this pace, in whole seconds.
    let round = measured.seconds / measured.messages.max(1) as f64;
    let needed = (2.0 * round * (WARM_UP + MIN_SAMPLES) as f64).ceil().max(1.0);
    bail!(
        "{} after {WARM_UP} for warming up, a median needs {MIN_SAMPLES}: raise --duration, to {needed} \
         for example",
        counted(measured.samples, "round trip"),
    )
}

impl Side {
    /// The result; credits that were under way are of no use any more.
    fn await_result(&mut self, watch: &mut Watch<'_>) -> Result<[u64; 3]> {
        loop {
            match self.poll(self.run.two_sided())?.control {
                Some(Say { kind: Say::RESULT, numbers }) => return Ok(numbers),
                Some(Say { kind: Say::CREDIT, .. }) => {}
                Some(say) => bail!("expected Result, found control message {}", say.kind),
                None => watch.tick(&self.link)?,
            }
        }
    }
}

/// Keeps the window full until `deadline`. Says how many messages were completed.
fn pump(
    side: &mut Side,
    peer: RemoteAddr,
    deadline: Instant,
    watch: &mut Watch<'_>,
) -> Result<u64> {
    let run = side.run;
    let (batch, window) = (run.batch() as u64, run.window() as u64);
    let allowance = run.allowance();
    let (mut posted, mut completed, mut credited) = (0_u64, 0_u64, 0_u64);
    loop {
        let over = Instant::now() >= deadline;
        if over && posted == completed {
            return Ok(posted);
        }
        while !over
            && posted + batch - completed <= window
            && posted + batch - credited <= allowance
        {
            let wrs = (posted..posted + batch).map(|n| {
                let wr = side.message(n, peer);
                if n + 1 == posted + batch { wr } else { wr.unsignaled() }
            });
            side.link
                .qp
                .post_send_batch(wrs)
                .map_err(|(i, e)| anyhow!("message {i} of a batch was not taken: {e}"))?;
            posted += batch;
        }
        let found = side.poll(run.two_sided())?;
        // Only the last of a batch is signalled, and completions come in order.
        completed += found.sends as u64 * batch;
        match found.control {
            Some(Say { kind: Say::CREDIT, numbers: [n, ..] }) => credited = n,
            Some(say) => bail!("expected a credit, found control message {}", say.kind),
            None if found.sends == 0 => watch.tick(&side.link)?,
            None => {}
        }
    }
}

/// Rounds until `deadline`: how many, and the times of those after the warm-up in nanoseconds.
fn latency(
    side: &mut Side,
    peer: RemoteAddr,
    deadline: Instant,
    watch: &mut Watch<'_>,
) -> Result<(u64, Histogram<u64>)> {
    let run = side.run;
    let mut times = histogram()?;
    let mut last = Instant::now();
    let mut n = 0_u64;
    loop {
        match run.op {
            PerfOp::Send => {
                side.answer(n, peer)?;
                while side.poll(false)?.data == 0 {
                    watch.tick(&side.link)?;
                }
            }
            PerfOp::Write => {
                let wr = side.marked_write(mark(n), peer)?;
                side.post_round(n, wr)?;
                while !side.is_marked(mark(n)) {
                    side.poll(false)?;
                    watch.tick(&side.link)?;
                }
            }
            PerfOp::Read | PerfOp::Atomic => {
                let wr = side.message(0, peer);
                side.link.qp.post_send(wr).context("cannot post a message")?;
                while side.poll(false)?.sends == 0 {
                    watch.tick(&side.link)?;
                }
            }
        }
        let now = Instant::now();
        if n >= WARM_UP {
            times.saturating_record((now - last).as_nanos() as u64);
        }
        last = now;
        n += 1;
        if now >= deadline {
            return Ok((n, times));
        }
    }
}

// ---------------------------------------------------------------------------------------------
// The command.

/// The middle of `values`, between the two middle ones if their number is even.
fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let n = sorted.len();
    match n {
        0 => None,
        _ if n % 2 == 1 => Some(sorted[n / 2]),
        _ => Some(f64::midpoint(sorted[n / 2 - 1], sorted[n / 2])),
    }
}

impl Perf {
    const fn measure(&self) -> Measure {
        if self.bw {
            Measure::Bandwidth
        } else if self.lat {
            Measure::Latency
        } else {
            Measure::Rate
        }
    }

    const fn unit(&self) -> &'static str {
        match self.measure() {
            Measure::Bandwidth => "GB/s",
            Measure::Latency => "us",
            Measure::Rate => "M msg/s",
        }
    }

    fn run(&self) -> Run {
        Run {
            op: self.op,
            measure: self.measure(),
            size: self.size,
            // `duration` keeps it within the limit.
            millis: u32::try_from(self.duration.as_millis()).unwrap_or(MAX_MILLIS),
        }
    }

    fn mode(&self) -> Mode {
        let Run { op, measure, size, millis } = self.run();
        Mode::Perf { op, measure, size, millis }
    }
}

/// Runs the command. The measuring loops run in this very thread.
pub(crate) fn run(args: Perf, runtime: &Runtime) -> Result<ExitCode> {
    args.common.check()?;
    session::check(args.mode()).map_err(|e| Usage(e.to_string()))?;
    if args.local {
        args.common.check_ours()?;
    }
    if args.baseline && !args.local {
        return Err(
            Usage("--baseline needs --local: the bare socket is measured here".into()).into()
        );
    }
    let inside = runtime.enter();
    let stop = Stop::on_signals()?;
    let mut server = match args.local {
        true => Some(runtime.block_on(ServerProcess::start(false, &args.common.to_args()))?),
        false => None,
    };
    let bare_server = match args.baseline {
        true => Some(runtime.block_on(ServerProcess::start_bare())?),
        false => None,
    };
    // clap has seen to it that there is exactly one of the two.
    let target = match (&args.target, &server) {
        (Some(target), _) => target.clone(),
        (None, Some(server)) => server.target().clone(),
        (None, None) => return Err(Usage("where to? give ADDR or --local".into()).into()),
    };

    let common = args.common.for_ours(server.as_ref().and_then(ServerProcess::udp_port));
    let (mut ours, mut baselines) = (Vec::new(), Vec::new());
    let mut crc = false;
    for _ in 0..args.runs {
        if let Some(process) = &bare_server {
            let addr = runtime.block_on(process.target().resolve())?[0];
            let run = args.run();
            let transport = args.common.transport;
            let bare = Bare::new(transport, run.op, run.measure, run.size, bare::MTU, run.millis);
            // It spins in a thread of its own, which is not waited for if Ctrl-C comes.
            let (done, measured) = tokio::sync::oneshot::channel();
            std::thread::spawn(move || drop(done.send(bare.measure(addr))));
            let measured = runtime.block_on(async {
                tokio::select! {
                    measured = measured => measured.context("the measurement of the bare socket broke off"),
                    () = stop.raised() => bail!("interrupted"),
                }
            });
            baselines.push(measured??);
        }
        if stop.is_raised() {
            bail!("interrupted");
        }
        let (measured, with_crc) = match once(&args, &common, &target, runtime, &stop) {
            Ok(measured) => measured,
            Err(_) if stop.is_raised() => bail!("interrupted"),
            Err(e) => {
                let complaint = match &mut server {
                    Some(server) => runtime.block_on(server.complaint()),
                    None => None,
                };
                return Err(match complaint {
                    Some(complaint) => e.context(format!("the server says: {complaint}")),
                    None => e,
                });
            }
        };
        ours.push(measured);
        crc = with_crc;
    }
    drop(inside);

    let values: Vec<_> = ours.iter().map(|run| run.value).collect();
    let value = median(&values).context("nothing was measured")?;
    let all = ours.iter().fold(Measured { value, ..Measured::default() }, |all, run| Measured {
        value,
        messages: all.messages + run.messages,
        samples: all.samples + run.samples,
        seconds: all.seconds + run.seconds,
    });
    let baseline = median(&baselines);
    let ratio = baseline.filter(|b| *b > 0.0).map(|b| value / b);
    print(&args, all, baseline, ratio, crc);
    Ok(if within(&args, ratio) { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// One connection, one measurement; and whether there was a CRC.
fn once(
    args: &Perf,
    common: &Common,
    target: &Target,
    runtime: &Runtime,
    stop: &Stop,
) -> Result<(Measured, bool)> {
    let run = args.run();
    let hello = Hello { mode: args.mode(), seed: session::fresh_seed() };
    let private_data = hello.to_bytes();
    let link = runtime
        .block_on(async {
            tokio::select! {
                link = connect(common, target, shape(run), &private_data) => link,
                () = stop.raised() => bail!("interrupted"),
            }
        })
        .map_err(|e| hello.explain(e))?;
    confirm(hello, &link.qp)?;
    let established = link.qp.established();
    if args.common.verbose
        && let Some(settled) = link.settled()
    {
        note(&settled);
    }
    let side = Side::new(link.clone(), run)?;
    side.post_receives()?;
    let measured = match measure(side, stop) {
        Ok(measured) => {
            runtime.block_on(close(&link.qp));
            Ok(measured)
        }
        Err(e) if link.qp.state() == QpState::Err => {
            Err(runtime.block_on(with_reason(e, &link.qp)))
        }
        Err(e) => {
            link.qp.abort();
            Err(e)
        }
    };
    link.tell(&args.common, args.common.counts());
    let measured = measured?;
    if args.common.verbose {
        let samples = match run.measure {
            Measure::Latency => format!(", {}", counted(measured.samples, "sample")),
            Measure::Bandwidth | Measure::Rate => String::new(),
        };
        let messages = counted(measured.messages, "message");
        note(&format!("{messages} in {:.3} s{samples}", measured.seconds));
    }
    enough(run, &measured)?;
    // RoCE has no packet without its ICRC.
    Ok((measured, established.is_none_or(|e| e.crc)))
}

/// Whether the ratio is where it has to be; says so if not.
fn within(args: &Perf, ratio: Option<f64>) -> bool {
    let Some(ratio) = ratio else {
        return args.min_ratio.is_none() && args.max_ratio.is_none();
    };
    if let Some(min) = args.min_ratio
        && ratio < min
    {
        note(&format!("the ratio {ratio:.3} is below {min}"));
        return false;
    }
    if let Some(max) = args.max_ratio
        && ratio > max
    {
        note(&format!("the ratio {ratio:.3} is above {max}"));
        return false;
    }
    true
}

fn print(args: &Perf, all: Measured, baseline: Option<f64>, ratio: Option<f64>, crc: bool) {
    let value = all.value;
    if args.json {
        output::json(&json!({
            "op": args.op.name(),
            "size": args.size,
            "transport": args.common.transport.name(),
            "mode": args.measure().name(),
            "value": value,
            "unit": args.unit(),
            "baseline": baseline,
            "ratio": ratio,
            "crc": crc,
            "runs": args.runs,
            "samples": (all.samples > 0).then_some(all.samples),
            "seconds": all.seconds,
            "messages": all.messages,
        }));
        return;
    }
    let or_dash = |v: Option<f64>| v.map_or_else(|| "-".to_owned(), |v| format!("{v:.3}"));
    let mut table = Table::new();
    table
        .load_preset(UTF8_FULL_CONDENSED)
        .set_header([
            "op",
            "size",
            "transport",
            "CRC",
            "mode",
            "value",
            "unit",
            "baseline",
            "ratio",
        ])
        .add_row([
            args.op.name().to_owned(),
            output::octets(args.size.into()),
            args.common.transport.name().to_owned(),
            if crc { "on" } else { "off" }.to_owned(),
            args.measure().name().to_owned(),
            format!("{value:.3}"),
            args.unit().to_owned(),
            or_dash(baseline),
            or_dash(ratio),
        ]);
    for column in [1, 5, 7, 8] {
        if let Some(column) = table.column_mut(column) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    line(&table.to_string());
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> impl Iterator<Item = Run> {
        let ops = [PerfOp::Send, PerfOp::Write, PerfOp::Read, PerfOp::Atomic];
        let measures = [Measure::Bandwidth, Measure::Latency, Measure::Rate];
        let sizes = [0, 1, 8, 64, 257, 4096, 1 << 20, MAX_SIZE];
        ops.into_iter().flat_map(move |op| {
            measures.into_iter().flat_map(move |measure| {
                sizes.into_iter().map(move |size| Run { op, measure, size, millis: 1 })
            })
        })
    }

    #[test]
    fn every_plan_fits_its_queues_and_its_memory() {
        for run in all() {
            let shape = shape(run);
            assert!(run.window() + run.batch() < shape.sends, "{run:?}");
            assert!(run.places() * run.stride() >= run.size as usize, "{run:?}");
            assert!(run.places() * run.stride() <= (MEMORY.max(run.size) as usize) + 64, "{run:?}");
            assert!(
                run.slots() * run.slot() <= (2 * MEMORY.max(run.size) as usize) + 128,
                "{run:?}"
            );
            assert!(run.slot() >= Say::LEN && run.slot() <= run.stride().max(CONTROL), "{run:?}");
            if run.two_sided() && run.measure != Measure::Latency {
                // A client that waits for a credit gets one: what it may have outstanding without
                // one is more than what the server collects before it sends one.
                assert!(run.allowance() >= run.credit() as u64 + run.batch() as u64, "{run:?}");
                // And it never has more outstanding than there are receives.
                assert!(run.allowance() <= (shape.recvs - SPARE) as u64, "{run:?}");
            }
        }
    }

    #[test]
    fn small_writes_go_in_batches_of_512() {
        let run = Run { op: PerfOp::Write, measure: Measure::Rate, size: 8, millis: 1 };
        assert_eq!((run.batch(), run.window()), (512, 2048));
        let run = Run { op: PerfOp::Write, measure: Measure::Bandwidth, size: 1 << 20, millis: 1 };
        assert_eq!((run.batch(), run.window()), (4, 16));
        let run = Run { op: PerfOp::Send, measure: Measure::Rate, size: 8, millis: 1 };
        assert_eq!(run.receives(), 4096);
    }

    #[test]
    fn control_messages_survive_the_way() {
        let say = Say { kind: Say::RESULT, numbers: [1, u64::MAX, 3] };
        assert_eq!(Say::from_bytes(&say.to_bytes()).unwrap(), say);
        assert!(Say::from_bytes(&say.to_bytes()[..24]).is_err());
    }

    #[test]
    fn marks_change_from_round_to_round() {
        for n in 0..1000 {
            assert_ne!(mark(n), mark(n + 1));
            assert_ne!(mark(n), 0);
        }
    }

    #[test]
    fn medians() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0]), Some(3.0));
        assert_eq!(median(&[3.0, 1.0]), Some(2.0));
        assert_eq!(median(&[9.0, 1.0, 2.0]), Some(2.0));
    }

    #[test]
    fn a_latency_of_too_few_samples_is_refused() {
        let run = Run { op: PerfOp::Send, measure: Measure::Latency, size: 8, millis: 1000 };
        let few = Measured { value: 1.0, messages: 110, samples: 10, seconds: 1.1 };
        let error = enough(run, &few).unwrap_err().to_string();
        assert!(error.contains("10 round trips") && error.contains("--duration, to 4"), "{error}");
        assert!(enough(run, &Measured { samples: MIN_SAMPLES, ..few }).is_ok());
        assert!(enough(Run { measure: Measure::Rate, ..run }, &few).is_ok());
    }

    #[test]
    fn durations() {
        assert_eq!(duration("0.5"), Ok(Duration::from_millis(500)));
        for text in ["0", "-1", "601", "x", "nan"] {
            assert!(duration(text).is_err(), "{text}");
        }
    }
}
