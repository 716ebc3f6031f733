//! The two sides of the scripted traffic.

use std::{sync::atomic::Ordering, time::Duration};

use anyhow::{Context, Result, bail};
use serde_json::{Value, json};
use tokio::time::{Instant, sleep, timeout};
use userdma::{
    Access, CloseReason, ConnRequest, Cq, Device, LKey, Mr, Pd, Qp, QpInit, RKey, RecvWr, Region,
    RemoteAddr, SendFlags, SendOp, SendWr, Sge, Wc, proto::wire::roce::feth::Placement,
};

use crate::{Late, NoConnection, Settings, say, summary, text, told};

const MAGIC: u32 = 0x5544_5650;
const CHECK: u32 = 0x4348_454b;
/// Octets in front of memory that are words for atomics.
const WORDS: usize = 64;
/// Send requests have numbers from here on, receives theirs below.
const SENT: u64 = 1 << 32;
/// The rights of the second key.
const SECOND: Access =
    Access::LOCAL_WRITE.union(Access::REMOTE_WRITE).union(Access::REMOTE_INVALIDATE);
/// So long a completion is waited for.
const PATIENCE: Duration = Duration::from_secs(20);

/// The names of verbs, by number.
const STATUS: [&str; 22] = [
    "SUCCESS",
    "LOC_LEN_ERR",
    "LOC_QP_OP_ERR",
    "LOC_EEC_OP_ERR",
    "LOC_PROT_ERR",
    "WR_FLUSH_ERR",
    "MW_BIND_ERR",
    "BAD_RESP_ERR",
    "LOC_ACCESS_ERR",
    "REM_INV_REQ_ERR",
    "REM_ACCESS_ERR",
    "REM_OP_ERR",
    "RETRY_EXC_ERR",
    "RNR_RETRY_EXC_ERR",
    "LOC_RDD_VIOL_ERR",
    "REM_INV_RD_REQ_ERR",
    "REM_ABORT_ERR",
    "INV_EECN_ERR",
    "INV_EEC_STATE_ERR",
    "FATAL_ERR",
    "RESP_TIMEOUT_ERR",
    "GENERAL_ERR",
];

pub(crate) fn status(wc: &Wc) -> &'static str {
    STATUS.get(wc.status.0 as usize).copied().unwrap_or("UNKNOWN")
}

/// Octet `i` of the contents that `seed` stands for.
fn pattern(seed: u32, i: u64) -> u8 {
    i.wrapping_mul(31)
        .wrapping_add((i >> 8).wrapping_mul(7))
        .wrapping_add(u64::from(seed).wrapping_mul(17))
        .wrapping_add(5) as u8
}

fn contents(seed: u32, len: usize) -> Vec<u8> {
    (0..len as u64).map(|i| pattern(seed, i)).collect()
}

fn fill(mr: &Mr, at: usize, len: usize, seed: u32) -> Result<()> {
    Ok(mr.write_at(at, &contents(seed, len))?)
}

fn is_filled(mr: &Mr, at: usize, len: usize, seed: u32) -> bool {
    let mut found = vec![0; len];
    mr.read_at(at, &mut found).is_ok() && found == contents(seed, len)
}

/// What a server says of its memory in the private data of its reply.
#[derive(Clone, Copy, Debug)]
struct Offer {
    rkey: RKey,
    address: u64,
    length: u32,
    second: RKey,
    second_address: u64,
}

impl Offer {
    const LEN: usize = 32;

    fn to_bytes(self) -> [u8; Self::LEN] {
        let mut octets = [0; Self::LEN];
        octets[0..4].copy_from_slice(&MAGIC.to_be_bytes());
        octets[4..8].copy_from_slice(&self.rkey.0.to_be_bytes());
        octets[8..16].copy_from_slice(&self.address.to_be_bytes());
        octets[16..20].copy_from_slice(&self.length.to_be_bytes());
        octets[20..24].copy_from_slice(&self.second.0.to_be_bytes());
        octets[24..32].copy_from_slice(&self.second_address.to_be_bytes());
        octets
    }

    fn from_bytes(octets: &[u8]) -> Option<Self> {
        let octets: &[u8; Self::LEN] = octets.first_chunk()?;
        let word = |at: usize| {
            u32::from_be_bytes([octets[at], octets[at + 1], octets[at + 2], octets[at + 3]])
        };
        let long = |at: usize| u64::from(word(at)) << 32 | u64::from(word(at + 4));
        (word(0) == MAGIC).then(|| Self {
            rkey: RKey(word(4)),
            address: long(8),
            length: word(16),
            second: RKey(word(20)),
            second_address: long(24),
        })
    }
}

/// A SEND that has the server look at what was written.
fn check_message(offset: u64, length: u64, seed: u32) -> [u8; 24] {
    let mut octets = [0; 24];
    octets[0..4].copy_from_slice(&CHECK.to_be_bytes());
    octets[4..8].copy_from_slice(&seed.to_be_bytes());
    octets[8..16].copy_from_slice(&offset.to_be_bytes());
    octets[16..24].copy_from_slice(&length.to_be_bytes());
    octets
}

/// One side of a connection: memory, queues, a queue pair.
struct Side {
    set: Settings,
    cq: Cq,
    qp: Qp,
    memory: Mr,
    received: Mr,
    /// Messages that took a receive, sent and received.
    sends: u32,
    receives: u32,
    /// The server's answers that have come: whether all were good.
    answers: Vec<bool>,
    wrong: usize,
    count: usize,
}

impl Side {
    fn new(dev: &Device, pd: &Pd, set: &Settings) -> Result<Self> {
        let cq = dev.create_cq(256 + 2 * set.receives)?;
        let init = QpInit {
            max_send_wr: 128,
            max_recv_wr: set.receives + 1,
            ird: set.ird,
            ord: set.ord,
            retry_cnt: set.retry,
            rnr_retry: set.rnr_retry,
            mtu: set.mtu,
            mpa: set.mpa,
            ..QpInit::new(&cq)
        };
        let qp = pd.create_qp(init)?;
        let access = Access::LOCAL_WRITE
            | Access::REMOTE_WRITE
            | Access::REMOTE_READ
            | Access::REMOTE_ATOMIC
            | Access::FLUSH_GLOBAL
            | Access::FLUSH_PERSISTENT;
        let memory = pd.register(Region::alloc(set.memory)?, access)?;
        fill(&memory, 4096, set.memory / 2 - 4096, 0)?;
        for i in 0..WORDS / 8 {
            memory.store_u64(8 * i, 0x1111_1111_1111_1111 * (i as u64 + 1), Ordering::Relaxed);
        }
        let received =
            pd.register(Region::alloc(set.receives * set.receive_size + 1)?, Access::LOCAL_WRITE)?;
        Ok(Self {
            set: set.clone(),
            cq,
            qp,
            memory,
            received,
            sends: 0,
            receives: 0,
            answers: Vec::new(),
            wrong: 0,
            count: 0,
        })
    }

    fn post_receive(&self, number: u64) -> Result<()> {
        let at = number as usize * self.set.receive_size;
        let place = self.received.slice(at..at + self.set.receive_size);
        Ok(self.qp.post_recv(RecvWr::new(number, [place]))?)
    }

    fn post_receives(&self) -> Result<()> {
        (0..self.set.receives as u64).try_for_each(|number| self.post_receive(number))
    }

    async fn next(&self, limit: Duration) -> Result<Option<Wc>> {
        match timeout(limit, self.cq.next()).await {
            Ok(wc) => Ok(Some(wc?)),
            Err(_) => Ok(None),
        }
    }

    /// What came in, at a server.
    fn take(&mut self, wc: &Wc) -> Result<()> {
        if !wc.status.is_ok() {
            if status(wc) != "WR_FLUSH_ERR" {
                say(&json!({"event": "received", "status": status(wc), "vendor": wc.vendor_err}));
                self.wrong += 1;
            }
            return Ok(());
        }
        self.count += 1;
        let at = wc.id as usize * self.set.receive_size;
        let is_data = wc.opcode == userdma::WcOpcode::RECV;
        let mut message = [0; 24];
        if is_data && wc.byte_len == 24 {
            self.received.read_at(at, &mut message)?;
        }
        if message[..4] == CHECK.to_be_bytes() {
            let long = |at: usize| {
                message[at..at + 8].iter().fold(0_u64, |long, &octet| long << 8 | u64::from(octet))
            };
            let (offset, length, seed) = (long(8), long(16), long(0) as u32);
            let good = offset.checked_add(length).is_some_and(|end| end <= self.set.memory as u64)
                && is_filled(&self.memory, offset as usize, length as usize, seed);
            say(&json!({"event": "checked", "length": length, "ok": good}));
            self.wrong += usize::from(!good);
            self.post_receive(wc.id)?;
            let answer = if good { b"y" } else { b"n" };
            self.qp.post_send(SendWr::inline(SENT, SendOp::Send, answer))?;
            return Ok(());
        }
        self.receives += 1;
        let good = !is_data || is_filled(&self.received, at, wc.byte_len as usize, self.receives);
        let mut event = json!({
            "event": "received",
            "status": "SUCCESS",
            "length": wc.byte_len,
            "number": self.receives,
            "ok": good,
        });
        if let Some(imm) = wc.imm {
            event["imm"] = imm.to_u32().into();
        }
        if let Some(key) = wc.invalidated {
            event["invalidated"] = key.0.into();
        }
        say(&event);
        self.wrong += usize::from(!good);
        self.post_receive(wc.id)
    }

    /// The next completion of a send. Answers that come meanwhile are kept.
    async fn sent(&mut self) -> Result<Option<Wc>> {
        while let Some(wc) = self.next(PATIENCE).await? {
            if wc.id >= SENT {
                return Ok(Some(wc));
            }
            self.keep_answer(&wc)?;
        }
        Ok(None)
    }

    fn keep_answer(&mut self, wc: &Wc) -> Result<()> {
        if !wc.status.is_ok() {
            return Ok(());
        }
        let mut answer = [0];
        self.received.read_at(wc.id as usize * self.set.receive_size, &mut answer)?;
        self.answers.push(answer == *b"y");
        self.post_receive(wc.id)
    }

    /// Has the server look at what was written. Whether it was right.
    async fn check(&mut self, (offset, length, seed): (u64, u64, u32)) -> Result<bool> {
        let message = check_message(offset, length, seed);
        self.qp.post_send(SendWr::inline(SENT, SendOp::Send, &message))?;
        if !self.sent().await?.is_some_and(|wc| wc.status.is_ok()) {
            return Ok(false);
        }
        while self.answers.is_empty() {
            match self.next(PATIENCE).await? {
                Some(wc) if wc.status.is_ok() && wc.id < SENT => self.keep_answer(&wc)?,
                _ => return Ok(false),
            }
        }
        Ok(self.answers.remove(0))
    }
}

/// How a connection ended, in a word.
fn reason(reason: &CloseReason) -> String {
    match reason {
        CloseReason::Graceful => "graceful".into(),
        other => format!("{other:?}"),
    }
}

// ------------------------------------------------------------------------------------------ server

pub(crate) async fn listen(set: &Settings) -> Result<bool> {
    let dev = set.device(true)?;
    let listener = dev.listen(Some(set.port)).await?;
    listener.set_mpa(set.mpa);
    say(&json!({"event": "listening"}));
    let (mut count, mut wrong) = (0, 0);
    for _ in 0..set.connections {
        let request = listener.accept().await?;
        let (received, bad) = serve(&dev, set, request).await?;
        count += received;
        wrong += bad;
    }
    Ok(summary(0, count, wrong))
}

async fn serve(dev: &Device, set: &Settings, request: ConnRequest) -> Result<(usize, usize)> {
    say(&json!({
        "event": "request",
        "initiator_depth": request.ord(),
        "responder_resources": request.ird(),
        "private": text(request.private_data()),
    }));
    if let Some(why) = &set.reject {
        request.reject(why.as_bytes()).await?;
        say(&json!({"event": "rejected"}));
        // The end of this program would be the end of the connection.
        sleep(Duration::from_millis(700)).await;
        return Ok((0, 0));
    }
    let pd = dev.alloc_pd()?;
    let mut side = Side::new(dev, &pd, set)?;
    let second = pd.register(Region::alloc(set.memory)?, SECOND)?;
    second.bind(side.qp.qpn())?;
    if set.late == Late::After(Duration::ZERO) {
        side.post_receives()?;
    }
    let offer = Offer {
        rkey: side.memory.rkey(),
        address: side.memory.addr(),
        length: set.memory as u32,
        second: second.rkey(),
        second_address: second.addr(),
    };
    request.accept_qp(&side.qp, &offer.to_bytes()).await?;
    say(&json!({"event": "accepted"}));
    let accepted = Instant::now();
    let qp = side.qp.clone();
    let closed = qp.closed();
    tokio::pin!(closed);
    let mut posted = set.late == Late::After(Duration::ZERO);
    let how = loop {
        let post_in = match set.late {
            Late::After(late) if !posted => late.saturating_sub(accepted.elapsed()),
            _ => Duration::from_secs(3600),
        };
        tokio::select! {
            wc = side.cq.next() => {
                let wc = wc?;
                if wc.id < SENT {
                    side.take(&wc)?;
                } else if !wc.status.is_ok() && status(&wc) != "WR_FLUSH_ERR" {
                    say(&json!({"event": "sent", "op": "answer", "status": status(&wc)}));
                    side.wrong += 1;
                }
            }
            () = sleep(post_in) => {
                side.post_receives()?;
                posted = true;
            }
            how = &mut closed => break how,
        }
    };
    // What was under way when it ended.
    while let Some(wc) = side.next(Duration::from_millis(20)).await? {
        if wc.id < SENT {
            side.take(&wc)?;
        }
    }
    let word = |i: usize| format!("{:016x}", side.memory.load_u64(8 * i, Ordering::Relaxed));
    say(&json!({"event": "closed", "how": reason(&how), "words": [word(0), word(1)]}));
    // A SEND that found no receive, for one, is told by the end alone.
    side.wrong += usize::from(how != CloseReason::Graceful);
    Ok((side.count, side.wrong))
}

// ------------------------------------------------------------------------------------------ client

pub(crate) async fn connect(set: &Settings, ops: &[&str]) -> Result<bool> {
    let dev = set.device(false)?;
    let (mut operations, mut wrong) = (0, 0);
    for _ in 0..set.connections {
        let pd = dev.alloc_pd()?;
        let side = Side::new(&dev, &pd, set)?;
        side.post_receives()?;
        let connected = dev.connect_qp(&set.peer(), &side.qp, set.private.as_bytes()).await;
        connected.map_err(|e| told(&e))?;
        let offer =
            Offer::from_bytes(&side.qp.private_data()).context("the server is none of ours")?;
        let roce = side.qp.terms();
        let iwarp = side.qp.established();
        say(&json!({
            "event": "established",
            "ord": roce.as_ref().map(|terms| u16::from(terms.max_rd_atomic)).or(iwarp.map(|e| e.ord)),
            "mtu": roce.map(|terms| terms.mtu),
        }));
        let mut script = Script { side, offer, written: (0, 0, 0) };
        let mut good = true;
        for (n, op) in ops.iter().enumerate() {
            operations += 1;
            good = script.carry_out(op, n as u32 + 1, false).await?;
            if !good {
                break;
            }
        }
        let qp = &script.side.qp;
        let how = match timeout(Duration::from_secs(5), qp.disconnect()).await {
            Ok(how) => how,
            Err(_) => {
                qp.abort();
                qp.closed().await
            }
        };
        say(&json!({"event": "closed", "how": reason(&how)}));
        // Over TCP what was sent last may have failed at the peer, which only the end tells.
        wrong += usize::from(!good || how != CloseReason::Graceful);
    }
    Ok(summary(operations, 0, wrong))
}

/// A client that carries operations out.
struct Script {
    side: Side,
    offer: Offer,
    /// Where and what was written last.
    written: (u64, u64, u32),
}

impl Script {
    /// Carries one operation out. False: it did not end with success, or its result was wrong.
    async fn carry_out(&mut self, op: &str, seed: u32, quiet: bool) -> Result<bool> {
        let mut parts = op.split(':');
        let name = parts.next().unwrap_or_default();
        let mut args = [0_u64; 3];
        for (place, part) in args.iter_mut().zip(parts) {
            let number = match part.strip_prefix("0x") {
                Some(hex) => u64::from_str_radix(hex, 16),
                None => part.parse(),
            };
            *place = number.with_context(|| format!("not a number in {op}"))?;
        }
        let sent = |status: &str, ok: bool, more: Value| {
            let mut event = json!({"event": "sent", "op": op, "status": status, "ok": ok});
            if let (Value::Object(event), Value::Object(more)) = (&mut event, more) {
                event.extend(more);
            }
            if !quiet || !ok {
                say(&event);
            }
            Ok(ok)
        };
        match name {
            "sleep" => {
                sleep(Duration::from_millis(args[0])).await;
                return Ok(true);
            }
            "check" => {
                let good = self.side.check(self.written).await?;
                return sent("SUCCESS", good, Value::Null);
            }
            "long" => {
                for i in 0..args[0] as u32 {
                    let wrote = Box::pin(self.carry_out("write:1048576", seed + i, true)).await?;
                    if !wrote || !self.side.check(self.written).await? {
                        return sent("SUCCESS", false, Value::Null);
                    }
                }
                return sent("SUCCESS", true, Value::Null);
            }
            _ => {}
        }
        let count = if name == "burst" { args[0].min(64) } else { 1 };
        let len = match name {
            "burst" => args[1],
            "faa" | "badfaa" | "cas" | "atomicwrite" => 8,
            "flush" => 0,
            _ => args[0],
        } as usize;
        if (len as u64 * count) as usize > self.side.set.memory - 4096 {
            bail!("{op} is more than --memory {} has", self.side.set.memory);
        }
        let half = u64::from(self.offer.length / 2);
        let at = |offset: u64| RemoteAddr::new(self.offer.address + offset, self.offer.rkey);
        let bad = |remote: RemoteAddr| RemoteAddr::new(remote.addr, RKey(remote.rkey.0 ^ 0x5500));
        let end = at(2 * half - len as u64 / 2);
        let second = RemoteAddr::new(self.offer.second_address + half, self.offer.second);
        let imm = args[1] as u32;
        let op_of = match name {
            "send" | "burst" | "sendsol" => SendOp::Send,
            "sendimm" => SendOp::SendImm(imm),
            "sendinv" => SendOp::SendInv(self.offer.second),
            "write" => SendOp::Write(at(half)),
            "write2" => SendOp::Write(second),
            "badwrite" => SendOp::Write(bad(at(half))),
            "oobwrite" => SendOp::Write(end),
            "writeimm" => SendOp::WriteImm(at(half), imm),
            "read" => SendOp::Read(at(4096)),
            "badread" => SendOp::Read(bad(at(4096))),
            "oobread" => SendOp::Read(end),
            "faa" => SendOp::FetchAdd { remote: at(0), add: args[0], mask: 0 },
            "badfaa" => SendOp::FetchAdd { remote: bad(at(0)), add: args[0], mask: 0 },
            "cas" => SendOp::CmpSwap {
                remote: at(0),
                compare: args[0],
                swap: args[1],
                compare_mask: u64::MAX,
                swap_mask: u64::MAX,
            },
            "atomicwrite" => SendOp::AtomicWrite(at(0)),
            "flush" => SendOp::Flush {
                remote: at(half),
                len: self.written.1 as u32,
                placement: Placement::GLOBAL_VISIBILITY,
                selectivity: userdma::proto::wire::roce::feth::Selectivity::RANGE,
            },
            _ => bail!("there is no operation {op}"),
        };
        let atomic = matches!(op_of, SendOp::FetchAdd { .. } | SendOp::CmpSwap { .. });
        let reads = matches!(op_of, SendOp::Read(_));
        let data = matches!(op_of, SendOp::Send | SendOp::SendImm(_) | SendOp::SendInv(_));
        if matches!(op_of, SendOp::WriteImm(..)) {
            self.side.sends += 1;
        }
        if matches!(op_of, SendOp::Write(_) | SendOp::WriteImm(..)) {
            fill(&self.side.memory, 4096, len, seed)?;
            if name != "write2" {
                self.written = (half, len as u64, seed);
            }
        }
        if reads || atomic {
            self.side.memory.write_at(4096, &vec![0xee; len])?;
        }
        if name == "atomicwrite" {
            self.side.memory.write_at(4096, &args[0].to_le_bytes())?;
        }
        let mut batch = Vec::new();
        for i in 0..count {
            let at = 4096 + i as usize * len;
            if data {
                self.side.sends += 1;
                fill(&self.side.memory, at, len, self.side.sends)?;
            }
            let place: Option<Sge> = (len > 0).then(|| self.side.memory.slice(at..at + len));
            let mut wr = SendWr::new(SENT + i, op_of, place);
            if name == "sendsol" {
                wr = wr.with_flags(SendFlags::SIGNALED | SendFlags::SOLICITED);
            }
            batch.push(wr);
        }
        if let Err((_, e)) = self.side.qp.post_send_batch(batch) {
            return sent("refused", false, json!({"why": e.to_string()}));
        }
        let mut ended: Option<Wc> = None;
        for _ in 0..count {
            let Some(wc) = self.side.sent().await? else {
                return sent("nothing", false, Value::Null);
            };
            if ended.is_none_or(|ended| ended.status.is_ok()) {
                ended = Some(wc);
            }
        }
        let Some(wc) = ended else { return sent("SUCCESS", true, Value::Null) };
        if !wc.status.is_ok() {
            return sent(status(&wc), false, json!({"vendor": wc.vendor_err}));
        }
        let good = !reads || is_filled(&self.side.memory, 4096, len, 0);
        let mut more = Value::Null;
        if atomic {
            let mut old = [0; 8];
            self.side.memory.read_at(4096, &mut old)?;
            more = json!({"old": format!("{:016x}", u64::from_le_bytes(old))});
        }
        sent("SUCCESS", good, more)
    }
}

/// Registered memory of one message, for the examples.
pub(crate) fn place(mr: &Mr, number: usize, size: usize) -> Sge {
    if size == 0 { Sge::new(0, 0, LKey(0)) } else { mr.slice(number * size..(number + 1) * size) }
}

/// An error that says there is no connection.
pub(crate) fn none() -> anyhow::Error {
    NoConnection.into()
}
