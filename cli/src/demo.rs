//! `userdma demo`: two processes carry out every operation, in both directions, and verify every
//! octet on both sides.
//!
//! For each operation the client is active first, then the server. Who is active works in
//! batches; what the passive side prepares and verifies depends on the operation:
//!
//! ```text
//!  active                                      passive
//!  SEND Start {operation, first, messages} ──►  prepares receives, memory, keys
//!                                         ◄──  SEND Go {address, key, keys to revoke}
//!  the messages of the batch              ──►
//!  SEND Done                              ──►
//!                                         ◄──  SEND Arrived; then it verifies
//! ```
//!
//! An operation that the transport lacks ends with Skip in the place of the messages. When the
//! client was active it SENDs End; then the server is active, and tells in a last SEND, Report,
//! what it carried out and verified. Bye ends the demo. Time runs from the first message of a
//! batch to its Arrived, for READs and atomics to the last completion.

use std::{
    io::IsTerminal,
    process::ExitCode,
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail};
use clap::{Args, ValueEnum};
use comfy_table::{CellAlignment, Table, presets::UTF8_FULL_CONDENSED};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use serde_json::{Value, json};
use tokio::time::{sleep, timeout};
use userdma::{
    Access, Imm, Mr, PostError, RKey, RecvWr, Region, RemoteAddr, SendFlags, SendOp, SendWr, Wc,
    WcOpcode, WcStatus, proto::wire::roce::feth::Placement,
};

use crate::{
    Usage,
    child::ServerProcess,
    common::{
        Common, Link, PATIENCE, Shape, Target, check_last, check_wc, close, connect, with_reason,
    },
    output::{self, line, note},
    pattern::{Aspect, Content, Mismatch},
    roce,
    session::{self, Hello, MAX_COUNT, MAX_SIZE, Mode, Reader, confirm},
    stop::Stop,
};

/// Carry out every operation between two processes and verify every octet.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  userdma demo                             all operations, 64 KiB messages
  userdma demo --size 1048576 --count 16   larger messages
  userdma demo --crc off --json            one JSON object an operation
  userdma demo --mpa-rev 1 --markers       as with old peers
  userdma demo --transport roce            RoCEv2 over UDP instead of iWARP over TCP
  userdma demo --transport roce --impair loss=5%,dup=1%,reorder=1%,corrupt=0.1%,seed=7
                                           the same through loss, and what became of it

Exit status: 0 if everything was verified, 1 if not, 2 for wrong arguments.")]
pub(crate) struct Demo {
    /// Octets a message (atomics, AtomicWrite and immediates always have 8)
    #[arg(long, value_name = "OCTETS", default_value_t = 65536, value_parser = clap::value_parser!(u32).range(0..=i64::from(MAX_SIZE)))]
    size: u32,
    /// Messages of each operation, in each direction
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..=i64::from(MAX_COUNT)))]
    count: u32,
    /// Over ::1 instead of 127.0.0.1
    #[arg(short = '6', long)]
    ipv6: bool,
    /// Print JSON: an object an operation
    #[arg(long)]
    json: bool,
    /// For tests of the demo itself: the client falsifies one octet of what it sends in this
    /// operation (of what it expects for READs and atomics), which must be found
    #[arg(long, value_enum, value_name = "OPERATION", hide = true)]
    corrupt: Option<Op>,
    #[command(flatten)]
    common: Common,
}

/// The operations of the demo.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[repr(u8)]
pub(crate) enum Op {
    Send = 1,
    Write = 2,
    Read = 3,
    SendInv = 4,
    SendSe = 5,
    Imm = 6,
    WriteImm = 7,
    FetchAdd = 8,
    MaskedFetchAdd = 9,
    CmpSwap = 10,
    MaskedCmpSwap = 11,
    SendImm = 12,
    Flush = 13,
    AtomicWrite = 14,
}

impl Op {
    const ALL: [Self; 14] = [
        Self::Send,
        Self::Write,
        Self::Read,
        Self::SendInv,
        Self::SendSe,
        Self::SendImm,
        Self::Imm,
        Self::WriteImm,
        Self::FetchAdd,
        Self::MaskedFetchAdd,
        Self::CmpSwap,
        Self::MaskedCmpSwap,
        Self::Flush,
        Self::AtomicWrite,
    ];

    const fn name(self) -> &'static str {
        match self {
            Self::Send => "SEND/RECV",
            Self::Write => "WRITE",
            Self::Read => "READ",
            Self::SendInv => "SEND with invalidate",
            Self::SendSe => "SEND with solicited event",
            Self::Imm => "Immediate",
            Self::WriteImm => "WRITE with immediate",
            Self::FetchAdd => "FetchAdd",
            Self::MaskedFetchAdd => "FetchAdd, masked",
            Self::CmpSwap => "CmpSwap",
            Self::MaskedCmpSwap => "CmpSwap, masked",
            Self::SendImm => "SEND with immediate",
            Self::Flush => "WRITE and FLUSH",
            Self::AtomicWrite => "AtomicWrite",
        }
    }

    fn from_code(code: u8) -> Result<Self> {
        Self::ALL
            .into_iter()
            .find(|op| *op as u8 == code)
            .ok_or_else(|| anyhow!("the peer names an operation {code} that is unknown"))
    }

    const fn is_atomic(self) -> bool {
        matches!(self, Self::FetchAdd | Self::MaskedFetchAdd | Self::CmpSwap | Self::MaskedCmpSwap)
    }

    /// Whether each message consumes a receive of the passive side.
    const fn takes_receive(self) -> bool {
        self.is_send() || matches!(self, Self::Imm | Self::WriteImm)
    }

    /// Whether the message's octets land in a receive.
    const fn is_send(self) -> bool {
        matches!(self, Self::Send | Self::SendInv | Self::SendSe | Self::SendImm)
    }

    /// Whether the active side verifies the messages (the passive side otherwise).
    const fn verified_by_active(self) -> bool {
        matches!(self, Self::Read) || self.is_atomic()
    }

    /// Octets of one message of a demo of `size`.
    const fn octets(self, size: u32) -> u32 {
        if self.is_atomic() || matches!(self, Self::Imm | Self::AtomicWrite) { 8 } else { size }
    }
}

// ---------------------------------------------------------------------------------------------
// What the sides say to each other.

/// Octets that a receive must have at least, whatever the size of the messages.
const CONTROL_MAX: usize = 256;
/// Most messages of a batch.
const BATCH_MAX: u32 = 32;
/// Octets of messages that a batch may have, unless a single message is larger.
const BATCH_OCTETS: u32 = 16 << 20;

/// Messages of a batch.
const fn batch(size: u32) -> u32 {
    let fit = BATCH_OCTETS / if size == 0 { 1 } else { size };
    if fit < 1 {
        1
    } else if fit > BATCH_MAX {
        BATCH_MAX
    } else {
        fit
    }
}

/// What one direction of one operation came to.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Tally {
    /// The transport has no such operation.
    unsupported: bool,
    messages: u64,
    octets: u64,
    time: Duration,
}

/// What one side verified of one operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Verified {
    messages: u64,
    mismatch: Option<Mismatch>,
}

impl Verified {
    fn note(&mut self, found: Option<Mismatch>) {
        match found {
            None => self.messages += 1,
            Some(m) => self.wrong(m),
        }
    }

    /// Something is wrong; the first of it is kept.
    fn wrong(&mut self, m: Mismatch) {
        self.mismatch.get_or_insert(m);
    }
}

/// A control message. Each begins with eight octets that depend on the seed.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Control {
    Start { op: Op, first: u32, messages: u32 },
    Go { place: RemoteAddr, keys: Vec<RKey> },
    Done,
    Skip,
    Arrived,
    End { op: Op },
    Report { op: Op, tally: Tally, verified: Verified },
    Bye,
}

impl Control {
    fn mark(seed: u64) -> u64 {
        Content::new(seed, 0, 0, u64::MAX).word(0)
    }

    fn to_bytes(&self, seed: u64) -> Vec<u8> {
        let mut b = Self::mark(seed).to_be_bytes().to_vec();
        match self {
            Self::Start { op, first, messages } => {
                b.extend([1, *op as u8]);
                b.extend(first.to_be_bytes());
                b.extend(messages.to_be_bytes());
            }
            Self::Go { place, keys } => {
                b.push(2);
                b.extend(place.addr.to_be_bytes());
                b.extend(place.rkey.0.to_be_bytes());
                b.push(keys.len() as u8);
                for key in keys {
                    b.extend(key.0.to_be_bytes());
                }
            }
            Self::Done => b.push(3),
            Self::Skip => b.push(4),
            Self::Arrived => b.push(5),
            Self::End { op } => b.extend([6, *op as u8]),
            Self::Report { op, tally, verified } => {
                b.extend([7, *op as u8, u8::from(tally.unsupported)]);
                let nanos = u64::try_from(tally.time.as_nanos()).unwrap_or(u64::MAX);
                for v in [tally.messages, tally.octets, nanos, verified.messages] {
                    b.extend(v.to_be_bytes());
                }
                match verified.mismatch {
                    None => b.push(0),
                    Some(m) => {
                        b.push(m.aspect.code());
                        for v in [m.message, m.offset, m.expected, m.found] {
                            b.extend(v.to_be_bytes());
                        }
                    }
                }
            }
            Self::Bye => b.push(8),
        }
        b
    }

    /// Whether these octets begin as a control message does.
    fn is_marked(bytes: &[u8], seed: u64) -> bool {
        bytes.starts_with(&Self::mark(seed).to_be_bytes())
    }

    fn from_bytes(bytes: &[u8], seed: u64) -> Result<Self> {
        let mut r = Reader(bytes);
        if r.u64()? != Self::mark(seed) {
            bail!("expected a control message of the demo, found something else");
        }
        Ok(match r.u8()? {
            1 => Self::Start { op: Op::from_code(r.u8()?)?, first: r.u32()?, messages: r.u32()? },
            2 => {
                let place = RemoteAddr::new(r.u64()?, RKey(r.u32()?));
                let n = r.u8()?;
                let keys = (0..n).map(|_| r.u32().map(RKey)).collect::<Result<_>>()?;
                Self::Go { place, keys }
            }
            3 => Self::Done,
            4 => Self::Skip,
            5 => Self::Arrived,
            6 => Self::End { op: Op::from_code(r.u8()?)? },
            7 => {
                let op = Op::from_code(r.u8()?)?;
                let unsupported = r.u8()? != 0;
                let (messages, octets, nanos) = (r.u64()?, r.u64()?, r.u64()?);
                let tally =
                    Tally { unsupported, messages, octets, time: Duration::from_nanos(nanos) };
                let messages = r.u64()?;
                let mismatch = match r.u8()? {
                    0 => None,
                    code => Some(Mismatch {
                        aspect: Aspect::from_code(code)
                            .ok_or_else(|| anyhow!("a mismatch of unknown kind {code}"))?,
                        message: r.u64()?,
                        offset: r.u64()?,
                        expected: r.u64()?,
                        found: r.u64()?,
                    }),
                };
                Self::Report { op, tally, verified: Verified { messages, mismatch } }
            }
            8 => Self::Bye,
            kind => bail!("a control message of unknown kind {kind}"),
        })
    }
}

// ---------------------------------------------------------------------------------------------
// Atomics as RFC 7306 has them, computed apart from the stack under test.

/// One atomic and what it does to a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Atomic {
    Add { add: u64, mask: u64 },
    Swap { compare: u64, swap: u64, compare_mask: u64, swap_mask: u64 },
}

impl Atomic {
    /// Number `message` of `op`, for a word that holds `now`.
    fn number(op: Op, content: Content, message: u32, now: u64) -> Self {
        let (a, b) = (content.word(0), content.word(1));
        // Every fourth comparison fails.
        let compare = if message % 4 == 3 { now ^ 1 } else { now };
        match op {
            Op::MaskedFetchAdd => Self::Add { add: a, mask: b | 1 << 63 },
            // A miss must differ in a compared bit.
            Op::MaskedCmpSwap => Self::Swap {
                compare,
                swap: a,
                compare_mask: b | 1,
                swap_mask: b.rotate_left(17) | 1,
            },
            Op::CmpSwap => {
                Self::Swap { compare, swap: a, compare_mask: u64::MAX, swap_mask: u64::MAX }
            }
            _ => Self::Add { add: a, mask: 0 },
        }
    }

    /// The word after it: the pseudocode of RFC 7306 §5.1.1 and §5.1.2.
    fn apply(self, old: u64) -> u64 {
        match self {
            Self::Add { add, mask } => {
                let (mut new, mut carry) = (0, 0);
                for bit in 0..64 {
                    let sum = (old >> bit & 1) + (add >> bit & 1) + carry;
                    new |= (sum & 1) << bit;
                    carry = if mask >> bit & 1 == 1 { 0 } else { sum >> 1 };
                }
                new
            }
            Self::Swap { compare, swap, compare_mask, swap_mask } => {
                if compare & compare_mask == old & compare_mask {
                    old & !swap_mask | swap & swap_mask
                } else {
                    old
                }
            }
        }
    }

    fn request(self, remote: RemoteAddr) -> SendOp {
        match self {
            Self::Add { add, mask } => SendOp::FetchAdd { remote, add, mask },
            Self::Swap { compare, swap, compare_mask, swap_mask } => {
                SendOp::CmpSwap { remote, compare, swap, compare_mask, swap_mask }
            }
        }
    }
}

// ---------------------------------------------------------------------------------------------
// One side of a demo.

/// Which way messages go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
enum Direction {
    ToServer = 0,
    ToClient = 1,
}

/// The memory and the connection of one side.
pub(crate) struct Peer {
    link: Link,
    seed: u64,
    size: u32,
    count: u32,
    /// Octets between two messages in `source`, `sink` and `target`.
    stride: usize,
    /// Octets of a receive.
    slot: usize,
    /// Where the active side sends from.
    source: Mr,
    /// Where the active side READs to, and where atomics put the old values.
    sink: Mr,
    /// What the other side reads and writes.
    target: Mr,
    receives: Mr,
    /// One small region a message of a batch of SENDs with invalidate.
    revocable: Vec<Mr>,
    scratch: Vec<u8>,
}

impl Peer {
    /// Shape of the connection of a demo.
    pub(crate) const SHAPE: Shape =
        Shape { sends: 128, recvs: BATCH_MAX as usize + 4, depth: 16, one_cq: false };

    /// Octets of the memory that [`Peer::new`] registers and allocates.
    pub(crate) fn octets(size: u32) -> usize {
        let (n, (stride, slot)) = (batch(size) as usize, Self::places(size));
        3 * n * stride + Self::receives(size) * slot + n * 64 + size as usize
    }

    /// Octets between two messages in memory, and of a receive.
    fn places(size: u32) -> (usize, usize) {
        let stride = (size as usize).max(8).next_multiple_of(64);
        (stride, stride.max(CONTROL_MAX))
    }

    /// Registers the memory; posts nothing.
    pub(crate) fn new(link: Link, seed: u64, size: u32, count: u32) -> Result<Self> {
        let n = batch(size) as usize;
        let (stride, slot) = Self::places(size);
        let register = |octets: usize, access: Access| -> Result<Mr> {
            let region = Region::alloc(octets)
                .with_context(|| format!("cannot have {}", output::octets(octets as u64)))?;
            Ok(link.pd.register(region, access)?)
        };
        let remote = Access::LOCAL_WRITE
            | Access::REMOTE_WRITE
            | Access::REMOTE_READ
            | Access::REMOTE_ATOMIC
            | Access::FLUSH_GLOBAL;
        let source = register(n * stride, Access::empty())?;
        let sink = register(n * stride, Access::LOCAL_WRITE)?;
        let target = register(n * stride, remote)?;
        let receives = register(Self::receives(size) * slot, Access::LOCAL_WRITE)?;
        let revocable = (0..n)
            .map(|_| {
                let mr = register(64, Access::REMOTE_WRITE | Access::REMOTE_INVALIDATE)?;
                // A peer may revoke only what is bound to its connection (RFC 5040 §5.3).
                mr.bind(link.qp.qpn())?;
                Ok(mr)
            })
            .collect::<Result<_>>()?;
        let scratch = vec![0; size as usize];
        Ok(Self {
            link,
            seed,
            size,
            count,
            stride,
            slot,
            source,
            sink,
            target,
            receives,
            revocable,
            scratch,
        })
    }

    /// Receives that are always posted: a batch, the Done after it, and the two messages that may
    /// come while the batch is verified.
    const fn receives(size: u32) -> usize {
        batch(size) as usize + 3
    }

    /// Posts all receives.
    pub(crate) fn post_receives(&self) -> Result<()> {
        (0..Self::receives(self.size) as u64).try_for_each(|slot| self.post_receive(slot))
    }

    fn post_receive(&self, slot: u64) -> Result<()> {
        let at = slot as usize * self.slot;
        self.link
            .qp
            .post_recv(RecvWr::new(slot, [self.receives.slice(at..at + self.slot)]))
            .context("cannot post a receive")
    }

    /// The next completion of a receive; it has to be posted again.
    async fn received(&self) -> Result<Wc> {
        let wc = timeout(PATIENCE, self.link.recv_cq.next())
            .await
            .map_err(|_| anyhow!("the other side said nothing for {} s", PATIENCE.as_secs()))??;
        if let Err(e) = check_wc(&wc, "a receive") {
            return Err(with_reason(e, &self.link.qp).await);
        }
        Ok(wc)
    }

    /// The next message, which has to be a control message.
    async fn control(&self) -> Result<Control> {
        let wc = self.received().await?;
        self.control_of(&wc)
    }

    fn control_of(&self, wc: &Wc) -> Result<Control> {
        let mut bytes = vec![0; (wc.byte_len as usize).min(CONTROL_MAX)];
        self.receives.read_at(wc.id as usize * self.slot, &mut bytes)?;
        let control = Control::from_bytes(&bytes, self.seed)?;
        self.post_receive(wc.id)?;
        Ok(control)
    }

    async fn say(&self, control: &Control) -> Result<()> {
        self.post(control)?;
        self.sent("a control message").await
    }

    /// Says what may be the last word before the client's Bye and its end. That it came is known by
    /// what the client says next.
    async fn say_last(&self, control: &Control) -> Result<()> {
        self.post(control)?;
        let wc = self.completed("a control message").await?;
        match check_last(&wc, "a control message", &self.link.qp).await {
            Ok(()) => Ok(()),
            Err(e) => Err(with_reason(e, &self.link.qp).await),
        }
    }

    fn post(&self, control: &Control) -> Result<()> {
        let wr = SendWr::inline(0, SendOp::Send, &control.to_bytes(self.seed));
        self.link.qp.post_send(wr).context("cannot post a control message")
    }

    /// Waits for one send completion.
    async fn sent(&self, what: &str) -> Result<()> {
        match check_wc(&self.completed(what).await?, what) {
            Ok(()) => Ok(()),
            Err(e) => Err(with_reason(e, &self.link.qp).await),
        }
    }

    async fn completed(&self, what: &str) -> Result<Wc> {
        let wc = timeout(PATIENCE, self.link.send_cq.next())
            .await
            .map_err(|_| anyhow!("{what} did not complete within {} s", PATIENCE.as_secs()))??;
        Ok(wc)
    }

    fn content(&self, op: Op, direction: Direction, message: u32) -> Content {
        Content::new(self.seed, op as u8, direction as u8, message.into())
    }

    /// The word that atomics of the batch from `first` begin with.
    fn initial(&self, op: Op, direction: Direction, first: u32) -> u64 {
        self.content(op, direction, first).word(7)
    }

    /// Carries out all messages of `op`. `corrupt`: falsify one octet of one of them.
    async fn active(
        &mut self,
        op: Op,
        direction: Direction,
        corrupt: bool,
        verified: &mut Verified,
        progress: &ProgressBar,
    ) -> Result<Tally> {
        let mut tally = Tally::default();
        let mut first = 0;
        while first < self.count {
            let n = batch(self.size).min(self.count - first);
            let victim = corrupt.then_some(self.count / 2);
            let go = Control::Start { op, first, messages: n };
            self.say(&go).await?;
            let Control::Go { place, keys } = self.control().await? else {
                bail!("the other side did not answer Start with Go");
            };
            let done = self.active_batch(op, direction, first..first + n, victim, place, &keys);
            match done.await? {
                None => {
                    self.say(&Control::Skip).await?;
                    tally.unsupported = true;
                    return Ok(tally);
                }
                Some(batch) => {
                    if op.verified_by_active() {
                        self.verify_active(op, direction, first..first + n, victim, verified)?;
                    }
                    tally.messages += u64::from(n);
                    tally.octets += u64::from(n) * u64::from(op.octets(self.size));
                    tally.time += batch;
                }
            }
            progress.inc(n.into());
            first += n;
        }
        Ok(tally)
    }

    /// One batch: the messages, Done, Arrived. Says how long it took, or `None` if the transport
    /// has no such operation.
    async fn active_batch(
        &mut self,
        op: Op,
        direction: Direction,
        messages: std::ops::Range<u32>,
        victim: Option<u32>,
        place: RemoteAddr,
        keys: &[RKey],
    ) -> Result<Option<Duration>> {
        let n = messages.len();
        if op == Op::SendInv && keys.len() != n {
            bail!("the other side gave {} keys to revoke instead of {n}", keys.len());
        }
        let size = self.size as usize;
        let mut word = self.initial(op, direction, messages.start);
        let mut wrs = Vec::with_capacity(n);
        for (i, message) in messages.clone().enumerate() {
            let content = self.content(op, direction, message);
            let id = u64::from(message);
            let at = i * self.stride;
            let remote = RemoteAddr::new(place.addr + at as u64, place.rkey);
            let corrupt = victim == Some(message);
            if !op.verified_by_active() && !matches!(op, Op::Imm | Op::AtomicWrite) {
                content.fill(&mut self.scratch);
                if corrupt {
                    self.scratch[size / 2] ^= 0x20;
                }
                self.source.write_at(at, &self.scratch)?;
            }
            let source = self.source.slice(at..at + size);
            let imm = content.word(1) ^ if corrupt { 0x20 << 32 } else { 0 };
            if op == Op::Flush {
                wrs.push(SendWr::new(id, SendOp::Write(remote), [source]).unsignaled());
            }
            wrs.push(match op {
                Op::SendImm => {
                    let imm = Imm(content.word(1)).to_u32();
                    SendWr::new(id, SendOp::SendImm(imm), [source])
                }
                Op::Flush => SendWr::flush(id, remote, self.size, Placement::GLOBAL_VISIBILITY),
                Op::AtomicWrite => SendWr::atomic_write(id, remote, imm.to_ne_bytes()),
                Op::Send => SendWr::new(id, SendOp::Send, [source]),
                Op::SendSe => {
                    SendWr::new(id, SendOp::Send, [source]).with_flags(SendFlags::SOLICITED)
                }
                Op::SendInv => SendWr::new(id, SendOp::SendInv(keys[i]), [source]),
                Op::Write => SendWr::new(id, SendOp::Write(remote), [source]),
                Op::WriteImm => {
                    let imm = Imm(content.word(1)).to_u32();
                    SendWr::new(id, SendOp::WriteImm(remote, imm), [source])
                }
                Op::Imm => SendWr::new(id, SendOp::Imm(Imm(imm)), []),
                Op::Read => {
                    // What is there before must not pass for what is read.
                    self.poison(&self.sink.clone(), at, content)?;
                    SendWr::new(id, SendOp::Read(remote), [self.sink.slice(at..at + size)])
                }
                Op::FetchAdd | Op::MaskedFetchAdd | Op::CmpSwap | Op::MaskedCmpSwap => {
                    let atomic = Atomic::number(op, content, message, word);
                    self.sink.store_u64(at, !word, Ordering::Relaxed);
                    word = atomic.apply(word);
                    SendWr::new(id, atomic.request(place), [self.sink.slice(at..at + 8)])
                }
            });
        }

        let begun = Instant::now();
        match self.link.qp.post_send_batch(wrs) {
            Ok(()) => {}
            // The transport lacks it; of WRITE and FLUSH it has the WRITE, which does no harm.
            Err((0 | 1, PostError::Unsupported { .. })) => return Ok(None),
            Err((i, e)) => {
                return Err(e).with_context(|| format!("message {i} of the batch was not taken"));
            }
        }
        for _ in 0..n {
            self.sent(op.name()).await?;
        }
        let completed = begun.elapsed();
        self.say(&Control::Done).await?;
        let Control::Arrived = self.control().await? else {
            bail!("the other side did not answer Done with Arrived");
        };
        // On iWARP SEND and WRITE complete here when the socket took them: only the answer tells that
        // they arrived. READs and atomics are over when they complete.
        Ok(Some(if op.verified_by_active() { completed } else { begun.elapsed() }))
    }

    /// Fills a message's place with the opposite of what is to come.
    fn poison(&mut self, mr: &Mr, at: usize, content: Content) -> Result<()> {
        content.fill(&mut self.scratch);
        self.scratch.iter_mut().for_each(|b| *b = !*b);
        mr.write_at(at, &self.scratch)?;
        Ok(())
    }

    /// What was read, and the words before the atomics.
    fn verify_active(
        &mut self,
        op: Op,
        direction: Direction,
        messages: std::ops::Range<u32>,
        victim: Option<u32>,
        verified: &mut Verified,
    ) -> Result<()> {
        let mut word = self.initial(op, direction, messages.start);
        for (i, message) in messages.enumerate() {
            let content = self.content(op, direction, message);
            let at = i * self.stride;
            let corrupt = victim == Some(message);
            verified.note(if op == Op::Read {
                self.sink.read_at(at, &mut self.scratch)?;
                if corrupt {
                    // The expectation is falsified: the same as an octet that came wrong.
                    let middle = self.scratch.len() / 2;
                    self.scratch[middle] ^= 0x20;
                }
                let place = content.verify(&self.scratch).err();
                place.map(|p| Mismatch::content(Aspect::Content, message.into(), p))
            } else {
                let expected = word ^ if corrupt { 0x20 } else { 0 };
                let found = self.sink.load_u64(at, Ordering::Acquire);
                word = Atomic::number(op, content, message, word).apply(word);
                (expected != found)
                    .then(|| Mismatch::of(Aspect::OldValue, message.into(), expected, found))
            });
        }
        Ok(())
    }

    /// Serves one batch of the active side. False if the transport lacks the operation there.
    async fn passive_batch(
        &mut self,
        op: Op,
        direction: Direction,
        messages: std::ops::Range<u32>,
        verified: &mut Verified,
    ) -> Result<bool> {
        let n = messages.len();
        if messages.end > self.count || n == 0 || n > batch(self.size) as usize {
            bail!("the other side asks for messages {messages:?} of {}", self.count);
        }
        let mut keys = Vec::new();
        for (i, message) in messages.clone().enumerate() {
            let content = self.content(op, direction, message);
            let at = i * self.stride;
            match op {
                Op::Write | Op::WriteImm | Op::Flush => {
                    self.poison(&self.target.clone(), at, content)?;
                }
                Op::Read => {
                    content.fill(&mut self.scratch);
                    self.target.write_at(at, &self.scratch)?;
                }
                Op::SendInv => keys.push(self.revocable[i].rkey()),
                Op::AtomicWrite => self.target.store_u64(at, !content.word(1), Ordering::Release),
                _ => {}
            }
        }
        if op.is_atomic() {
            let word = self.initial(op, direction, messages.start);
            self.target.store_u64(0, word, Ordering::Release);
        }
        self.say(&Control::Go { place: self.target.remote(0), keys: keys.clone() }).await?;

        let mut wcs = Vec::with_capacity(n);
        while op.takes_receive() && wcs.len() < n {
            let wc = self.received().await?;
            if wcs.is_empty() && self.is_skip(&wc)? {
                self.control_of(&wc)?;
                return Ok(false);
            }
            wcs.push(wc);
        }
        match self.control().await? {
            Control::Done => {}
            Control::Skip => return Ok(false),
            other => bail!("expected Done, found {other:?}"),
        }
        self.say(&Control::Arrived).await?;

        let mut word = self.initial(op, direction, messages.start);
        for (i, message) in messages.clone().enumerate() {
            let content = self.content(op, direction, message);
            if op.is_atomic() {
                word = Atomic::number(op, content, message, word).apply(word);
                continue;
            }
            let found = self.verify_passive(op, i, message, content, wcs.get(i), &keys)?;
            if op == Op::Read {
                // The active side verifies the READ; here only the source must have stayed.
                if let Some(m) = found {
                    verified.wrong(m);
                }
            } else {
                verified.note(found);
            }
        }
        if op.is_atomic() {
            let found = self.target.load_u64(0, Ordering::Acquire);
            if found != word {
                let last = u64::from(messages.end - 1);
                verified.wrong(Mismatch::of(Aspect::FinalValue, last, word, found));
            }
        }
        for wc in &wcs {
            self.post_receive(wc.id)?;
        }
        Ok(true)
    }

    /// Whether a receive holds Skip where a message was due.
    fn is_skip(&self, wc: &Wc) -> Result<bool> {
        if wc.opcode != WcOpcode::RECV || wc.byte_len as usize != 9 {
            return Ok(false);
        }
        let mut bytes = [0; 9];
        self.receives.read_at(wc.id as usize * self.slot, &mut bytes)?;
        Ok(Control::is_marked(&bytes, self.seed))
    }

    /// What is wrong with message `i` of a batch, if anything.
    fn verify_passive(
        &mut self,
        op: Op,
        i: usize,
        message: u32,
        content: Content,
        wc: Option<&Wc>,
        keys: &[RKey],
    ) -> Result<Option<Mismatch>> {
        let wrong = |aspect, expected, found| {
            Ok(Some(Mismatch::of(aspect, message.into(), expected, found)))
        };
        if let Some(wc) = wc {
            let kind = if op.is_send() { WcOpcode::RECV } else { WcOpcode::RECV_IMM };
            if wc.opcode != kind {
                return wrong(Aspect::Kind, kind.0.into(), wc.opcode.0.into());
            }
            let imm = match op {
                Op::Imm => Some(Imm(content.word(1))),
                Op::WriteImm | Op::SendImm => Some(Imm::from_u32(Imm(content.word(1)).to_u32())),
                _ => None,
            };
            if wc.imm != imm {
                let value = |imm: Option<Imm>| imm.map_or(0, |imm| imm.0);
                return wrong(Aspect::Immediate, value(imm), value(wc.imm));
            }
            let solicited = op == Op::SendSe;
            if wc.solicited != solicited {
                return wrong(Aspect::Solicited, solicited.into(), wc.solicited.into());
            }
            let revoked = keys.get(i).copied();
            if wc.invalidated != revoked {
                let value = |key: Option<RKey>| key.map_or(0, |key| u64::from(key.0));
                return wrong(Aspect::Invalidated, value(revoked), value(wc.invalidated));
            }
            if op.is_send() && wc.byte_len != self.size {
                return wrong(Aspect::Length, self.size.into(), wc.byte_len.into());
            }
        }
        if op == Op::SendInv {
            let mr = &self.revocable[i];
            if mr.is_valid() {
                return wrong(Aspect::StillValid, 0, 1);
            }
            mr.rearm()?;
        }
        let aspect = match (op, wc) {
            (Op::Imm, _) => return Ok(None),
            (Op::AtomicWrite, _) => {
                let (expected, found) =
                    (content.word(1), self.target.load_u64(i * self.stride, Ordering::Acquire));
                return if expected == found {
                    Ok(None)
                } else {
                    wrong(Aspect::FinalValue, expected, found)
                };
            }
            (_, Some(wc)) if op.is_send() => {
                self.receives.read_at(wc.id as usize * self.slot, &mut self.scratch)?;
                Aspect::Content
            }
            _ => {
                self.target.read_at(i * self.stride, &mut self.scratch)?;
                if op == Op::Read { Aspect::Source } else { Aspect::Content }
            }
        };
        let place = content.verify(&self.scratch).err();
        Ok(place.map(|p| Mismatch::content(aspect, message.into(), p)))
    }
}

// ---------------------------------------------------------------------------------------------
// The server.

/// What a server says of a demo that it served.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Served {
    /// Messages that arrived or were carried out, in both directions.
    pub(crate) messages: u64,
    /// Messages verified here.
    pub(crate) verified: u64,
    /// The first mismatch found here.
    pub(crate) mismatch: Option<(Op, Mismatch)>,
}

impl Served {
    /// The mismatch in words.
    pub(crate) fn mismatch_text(&self) -> Option<String> {
        self.mismatch.map(|(op, m)| format!("{}: {m}", op.name()))
    }
}

/// Serves a demo, whose first control message is `first`, until the client says Bye.
pub(crate) async fn serve(peer: &mut Peer, first: &[u8]) -> Result<Served> {
    let hidden = ProgressBar::hidden();
    let mut served = Served::default();
    // Of the operation under way: what was verified.
    let mut verified = Verified::default();
    let mut next = Control::from_bytes(first, peer.seed)?;
    loop {
        match next {
            Control::Start { op, first, messages } => {
                let end = first.checked_add(messages).context("a message number beyond 2^32")?;
                let range = first..end;
                if peer.passive_batch(op, Direction::ToServer, range, &mut verified).await? {
                    served.messages += u64::from(messages);
                }
            }
            Control::End { op } => {
                let tally =
                    peer.active(op, Direction::ToClient, false, &mut verified, &hidden).await?;
                peer.say_last(&Control::Report { op, tally, verified }).await?;
                served.messages += tally.messages;
                served.verified += verified.messages;
                if let Some(m) = verified.mismatch {
                    served.mismatch.get_or_insert((op, m));
                }
                verified = Verified::default();
            }
            Control::Bye => return Ok(served),
            other => bail!("expected Start, End or Bye, found {other:?}"),
        }
        next = peer.control().await?;
    }
}

// ---------------------------------------------------------------------------------------------
// The client.

/// What became of one operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Row {
    op: Op,
    /// What both directions came to.
    tally: Tally,
    client: Verified,
    server: Verified,
    /// Messages each side has to verify.
    due: u64,
}

impl Row {
    fn ok(&self) -> bool {
        let good = |v: &Verified| v.mismatch.is_none() && v.messages == self.due;
        self.tally.unsupported || good(&self.client) && good(&self.server)
    }

    /// What went wrong, in sentences.
    fn complaints(&self) -> Vec<String> {
        let mut all = Vec::new();
        for (side, v) in [("client", &self.client), ("server", &self.server)] {
            if let Some(m) = v.mismatch {
                all.push(format!("{}: {m} (found by the {side})", self.op.name()));
            } else if !self.ok() && v.messages != self.due {
                all.push(format!(
                    "{}: the {side} verified {} of {} messages",
                    self.op.name(),
                    v.messages,
                    self.due
                ));
            }
        }
        all
    }

    fn cells(&self) -> Vec<String> {
        let name = self.op.name().to_owned();
        if self.tally.unsupported {
            return [name, "unsupported".into()]
                .into_iter()
                .chain(std::iter::repeat_n("-".to_owned(), 5))
                .collect();
        }
        let verdict = |v: &Verified| match v.mismatch {
            None => format!("{}/{}", v.messages, self.due),
            Some(_) => format!("{}/{} MISMATCH", v.messages, self.due),
        };
        vec![
            name,
            self.tally.messages.to_string(),
            output::octets(self.tally.octets),
            output::seconds(self.tally.time),
            output::rate(self.tally.octets, self.tally.messages, self.tally.time),
            verdict(&self.client),
            verdict(&self.server),
        ]
    }

    fn json(&self) -> Value {
        let mismatch = |v: &Verified| {
            v.mismatch.map(|m| {
                json!({
                    "message": m.message,
                    "what": m.aspect.name(),
                    "offset": m.offset,
                    "expected": m.expected,
                    "found": m.found,
                })
            })
        };
        json!({
            "operation": self.op.name(),
            "supported": !self.tally.unsupported,
            "messages": self.tally.messages,
            "bytes": self.tally.octets,
            "seconds": self.tally.time.as_secs_f64(),
            "client_verified": self.client.messages,
            "server_verified": self.server.messages,
            "due": self.due,
            "client_mismatch": mismatch(&self.client),
            "server_mismatch": mismatch(&self.server),
            "ok": self.ok(),
        })
    }
}

/// The table of all operations.
fn table(rows: &[Row]) -> String {
    let mut table = Table::new();
    table.load_preset(UTF8_FULL_CONDENSED).set_header([
        "operation",
        "messages",
        "bytes",
        "time",
        "rate",
        "client verified",
        "server verified",
    ]);
    for row in rows {
        table.add_row(row.cells());
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table.to_string()
}

/// Runs the command.
pub(crate) async fn run(args: Demo) -> Result<ExitCode> {
    args.common.check()?;
    args.common.check_ours()?;
    if let Some(op) = args.corrupt
        && args.size == 0
        && op.octets(args.size) == 0
    {
        let why = format!("--corrupt {}: messages of no octets have nothing to falsify", op.name());
        return Err(Usage(why).into());
    }
    let stop = Stop::on_signals()?;
    let mut extra = args.common.to_args();
    extra.push("--once".into());
    let mut server = ServerProcess::start(args.ipv6, &extra).await?;
    let (target, udp_port) = (server.target().clone(), server.udp_port());
    let outcome = tokio::select! {
        outcome = client(&args, &target, udp_port) => outcome,
        // The client may see nothing of it for long; what it does see it tells better.
        complaint = async {
            let complaint = server.complains().await;
            sleep(Duration::from_secs(1)).await;
            complaint
        } => return Err(anyhow!("the server says: {complaint}")),
        () = stop.raised() => bail!("interrupted"),
    };
    let (rows, link) = match outcome {
        Ok(outcome) => outcome,
        Err(e) => {
            return Err(match server.complaint().await {
                Some(complaint) => e.context(format!("the server says: {complaint}")),
                None => e,
            });
        }
    };

    if args.json {
        rows.iter().for_each(|row| output::json(&row.json()));
    } else {
        line(&table(&rows));
        line(&format!(
            "{} messages each way of {} over {} on loopback, two processes",
            args.count,
            output::octets(args.size.into()),
            args.common.transport.name(),
        ));
    }
    let complaints: Vec<_> = rows.iter().flat_map(Row::complaints).collect();
    complaints.iter().for_each(|c| note(&format!("mismatch: {c}")));
    // If the server found no mismatch it ends with success too.
    let ended = server.wait_success().await;
    if args.common.roce.impair.is_some() {
        tell_counters(&args, &link, server.counters());
    }
    link.tell(&args.common, args.common.verbose);
    if !complaints.is_empty() {
        return Ok(ExitCode::FAILURE);
    }
    ended?;
    Ok(ExitCode::SUCCESS)
}

/// What was done to both sides' packets, and what they made of it.
fn tell_counters(args: &Demo, link: &Link, server: Option<&Value>) {
    let Some(stats) = link.dev.roce_stats() else { return };
    let sides = [("client", roce::counters_json(&stats)), ("server", json!(server))];
    if args.json {
        let sides = sides.into_iter().map(|(side, counters)| (side.to_owned(), counters));
        output::json(&json!({ "counters": serde_json::Map::from_iter(sides) }));
        return;
    }
    let mut table = Table::new();
    table.load_preset(UTF8_FULL_CONDENSED).set_header([
        "side",
        "received",
        "dropped",
        "duplicated",
        "reordered",
        "corrupted",
        "bad ICRC",
        "sent",
        "resent",
    ]);
    for (side, counters) in &sides {
        let impaired = &counters["impaired"];
        let cells = [
            &impaired["packets"],
            &impaired["dropped"],
            &impaired["duplicated"],
            &impaired["reordered"],
            &impaired["corrupted"],
            &counters["icrc_bad"],
            &counters["packets_sent"],
            &counters["packets_resent"],
        ];
        table.add_row(std::iter::once((*side).to_owned()).chain(cells.map(Value::to_string)));
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    line(&table.to_string());
}

async fn client(args: &Demo, target: &Target, udp_port: Option<u16>) -> Result<(Vec<Row>, Link)> {
    let hello = Hello {
        mode: Mode::Demo { size: args.size, count: args.count },
        seed: session::fresh_seed(),
    };
    let common = args.common.for_ours(udp_port);
    let link = connect(&common, target, Peer::SHAPE, &hello.to_bytes())
        .await
        .map_err(|e| hello.explain(e))?;
    confirm(hello, &link.qp)?;
    if args.common.verbose
        && let Some(settled) = link.settled()
    {
        note(&settled);
    }
    let mut peer = Peer::new(link.clone(), hello.seed, args.size, args.count)?;
    peer.post_receives()?;

    let progress = ProgressBar::new(u64::from(args.count) * 2 * Op::ALL.len() as u64);
    if args.json || !std::io::stderr().is_terminal() {
        progress.set_draw_target(ProgressDrawTarget::hidden());
    }
    if let Ok(style) = ProgressStyle::with_template("{msg:26} {wide_bar} {pos}/{len} messages") {
        progress.set_style(style);
    }
    let mut rows = Vec::new();
    for op in Op::ALL {
        progress.set_message(op.name());
        let row = operation(&mut peer, op, args, &progress).await.context(op.name())?;
        rows.push(row);
    }
    progress.finish_and_clear();
    peer.say(&Control::Bye).await?;
    close(&link.qp).await;
    Ok((rows, link))
}

/// One operation in both directions.
async fn operation(peer: &mut Peer, op: Op, args: &Demo, progress: &ProgressBar) -> Result<Row> {
    let mut client = Verified::default();
    let corrupt = args.corrupt == Some(op);
    let mine = peer.active(op, Direction::ToServer, corrupt, &mut client, progress).await?;
    peer.say(&Control::End { op }).await?;
    let (theirs, server) = loop {
        match peer.control().await? {
            Control::Start { op: theirs, first, messages } if theirs == op => {
                let end = first.checked_add(messages).context("a message number beyond 2^32")?;
                let range = first..end;
                peer.passive_batch(op, Direction::ToClient, range, &mut client).await?;
                progress.inc(messages.into());
            }
            Control::Report { op: theirs, tally, verified } if theirs == op => {
                break (tally, verified);
            }
            other => bail!("expected Start or Report, found {other:?}"),
        }
    };
    Ok(Row {
        op,
        tally: Tally {
            unsupported: mine.unsupported || theirs.unsupported,
            messages: mine.messages + theirs.messages,
            octets: mine.octets + theirs.octets,
            time: mine.time + theirs.time,
        },
        client,
        server,
        due: args.count.into(),
    })
}

/// Whether a completion says that the connection is over rather than that something failed.
pub(crate) fn is_flush(wc: &Wc) -> bool {
    wc.status == WcStatus::WR_FLUSH_ERR
}

#[cfg(test)]
mod tests {
    use super::*;

    const MISMATCH: Mismatch =
        Mismatch { message: 3, aspect: Aspect::Content, offset: 9, expected: 1, found: 2 };

    #[test]
    fn control_messages_survive_the_way_and_cuts_are_refused() {
        let tally = Tally {
            unsupported: false,
            messages: 64,
            octets: 1 << 40,
            time: Duration::from_micros(12),
        };
        let controls = [
            Control::Start { op: Op::Read, first: 5, messages: 7 },
            Control::Go {
                place: RemoteAddr::new(u64::MAX, RKey(7)),
                keys: vec![RKey(1); BATCH_MAX as usize],
            },
            Control::Done,
            Control::Skip,
            Control::Arrived,
            Control::End { op: Op::MaskedCmpSwap },
            Control::Report {
                op: Op::Imm,
                tally,
                verified: Verified { messages: 9, mismatch: Some(MISMATCH) },
            },
            Control::Report { op: Op::Imm, tally, verified: Verified::default() },
            Control::Bye,
        ];
        for control in controls {
            let bytes = control.to_bytes(42);
            assert!(bytes.len() <= CONTROL_MAX);
            assert_eq!(Control::from_bytes(&bytes, 42).unwrap(), control);
            assert!(Control::from_bytes(&bytes, 43).is_err());
            for cut in 0..bytes.len() {
                assert!(Control::from_bytes(&bytes[..cut], 42).is_err());
            }
        }
        assert_eq!(Control::Skip.to_bytes(1).len(), 9);
    }

    #[test]
    fn every_operation_has_its_code() {
        for op in Op::ALL {
            assert_eq!(Op::from_code(op as u8).unwrap(), op);
        }
        assert!(Op::from_code(0).is_err());
        assert!(Op::from_code(15).is_err());
    }

    #[test]
    fn batches_fit_the_budget() {
        assert_eq!(batch(0), BATCH_MAX);
        assert_eq!(batch(65536), 32);
        assert_eq!(batch(1 << 20), 16);
        assert_eq!(batch(MAX_SIZE), 1);
        assert!(Peer::receives(0) <= Peer::SHAPE.recvs);
        assert!(2 * (BATCH_MAX as usize) < Peer::SHAPE.sends);
    }

    /// Worked by hand: fields of 8 bits, mask 0x80 at each field's top.
    #[test]
    fn the_model_of_atomics_is_that_of_rfc_7306() {
        let add = |old, add, mask| Atomic::Add { add, mask }.apply(old);
        assert_eq!(add(u64::MAX, 1, 0), 0);
        assert_eq!(add(0x00ff, 0x0101, 0x8080), 0x0100);
        assert_eq!(add(0x00ff, 0x0101, 0), 0x0200);
        let swap = |old, compare, swap, compare_mask, swap_mask| {
            Atomic::Swap { compare, swap, compare_mask, swap_mask }.apply(old)
        };
        assert_eq!(swap(5, 5, 9, u64::MAX, u64::MAX), 9);
        assert_eq!(swap(5, 4, 9, u64::MAX, u64::MAX), 5);
        assert_eq!(swap(0xab, 0x0b, 0xff, 0x0f, 0xf0), 0xfb);
        assert_eq!(swap(0xab, 0x0c, 0xff, 0x0f, 0xf0), 0xab);
    }

    #[test]
    fn atomics_hit_three_times_and_miss_the_fourth() {
        for op in [Op::CmpSwap, Op::MaskedCmpSwap] {
            let mut word = 0x1234;
            for message in 0..64 {
                let content = Content::new(1, op as u8, 0, message.into());
                let Atomic::Swap { compare, compare_mask, .. } =
                    Atomic::number(op, content, message, word)
                else {
                    panic!()
                };
                let hit = (compare ^ word) & compare_mask == 0;
                assert_eq!(hit, message % 4 != 3);
                word = Atomic::number(op, content, message, word).apply(word);
            }
        }
    }

    #[test]
    fn the_table_shows_both_sides_and_a_mismatch_says_where() {
        let good = Verified { messages: 64, mismatch: None };
        let tally = Tally {
            unsupported: false,
            messages: 128,
            octets: 8 << 20,
            time: Duration::from_millis(4),
        };
        let row = Row { op: Op::Write, tally, client: good, server: good, due: 64 };
        assert!(row.ok() && row.complaints().is_empty());
        let bad = Row { server: Verified { messages: 63, mismatch: Some(MISMATCH) }, ..row };
        assert!(!bad.ok());
        assert_eq!(
            bad.complaints(),
            ["WRITE: message 3, offset 9: expected 0x01, found 0x02 (found by the server)"]
        );
        let short = Row { client: Verified { messages: 63, mismatch: None }, ..row };
        assert_eq!(short.complaints(), ["WRITE: the client verified 63 of 64 messages"]);
        let unsupported = Row {
            tally: Tally { unsupported: true, ..Tally::default() },
            client: Verified::default(),
            server: Verified::default(),
            ..row
        };
        assert!(unsupported.ok());
        let text = table(&[row, bad, unsupported]);
        for part in [
            "client verified",
            "server verified",
            "8 MiB",
            "64/64",
            "63/64 MISMATCH",
            "unsupported",
            "2.10 GB/s",
        ] {
            assert!(text.contains(part), "{part} in\n{text}");
        }
    }
}
