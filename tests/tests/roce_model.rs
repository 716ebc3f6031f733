//! Two RC queue pairs with every operation mixed, over a network that loses, repeats and reorders,
//! against a model that is nothing but vectors: both memories end equal, every completion is told
//! once and in order.

use std::{
    collections::{BTreeMap, BinaryHeap},
    net::SocketAddr,
    time::Duration,
};

use userdma_proto::{
    mem::{AtomicOp, PdId},
    roce::{Config, Event, PathMtu, Qp, QpAttr, Received, Train, Window},
    time::Instant,
    verbs::{
        Access, Imm, Payload, QpState, QpType, RecvWr, RemoteAddr, SendFlags, SendOp, SendWr, Wc,
        WcOpcode, WcStatus,
    },
    wire::{
        ids::{Psn, Qpn, RKey},
        roce::{
            Packet,
            bth::Bth,
            feth::{Placement, Selectivity},
            icrc::{self, Icrc, Identification, PathV4, PathV6},
        },
    },
};
use userdma_tests::{PD, PlainMemory, Rng, split};
use zerocopy::FromBytes;

const TARGET: u32 = 0x1000;
const SOURCE: u32 = 0x2000;
const SINK: u32 = 0x3000;
const INBOX: u32 = 0x4000;
/// Keys from here on may be invalidated.
const MORTAL: u32 = 0x5000;
const OWN_MORTAL: u32 = 0x9000;

const TARGET_LEN: usize = 60_000;
const TARGET_IOVA: u64 = 0x7f00_0000_0000;

fn qpn(side: usize) -> Qpn {
    Qpn(0x11 + side as u32)
}

/// What one side will do, and what must come of it.
#[derive(Default)]
struct Plan {
    sends: Vec<SendWr>,
    receives: Vec<RecvWr>,
    send_wcs: Vec<Wc>,
    recv_wcs: Vec<Wc>,
    before: Vec<u8>,
    target: Vec<u8>,
    sink: Vec<u8>,
    inbox: Vec<u8>,
    source: Vec<u8>,
}

fn remote(at: usize) -> RemoteAddr {
    RemoteAddr::new(TARGET_IOVA + at as u64, RKey(TARGET))
}

fn touches(ranges: &[(usize, usize)], at: usize, len: usize) -> bool {
    ranges.iter().any(|&(a, l)| at < a + l && a < at + len)
}

fn plan(rng: &mut Rng, count: usize, longest: usize, side: usize) -> Plan {
    let target = rng.bytes(TARGET_LEN);
    let mut p = Plan { before: target.clone(), target, ..Plan::default() };
    // Ranges of READs that may not be answered yet: what changes them waits for that.
    let mut unanswered: Vec<(usize, usize)> = Vec::new();
    for n in 0..count {
        let id = n as u64;
        let len = match rng.below(8) {
            0 => 0,
            1 | 2 => rng.below(40) as usize,
            _ => rng.below(longest as u64) as usize,
        };
        let data = rng.bytes(len);
        let at = rng.below((TARGET_LEN - len) as u64) as usize;
        let mut flags = SendFlags::empty();
        flags.set(SendFlags::SIGNALED, !rng.one_in(4));
        let solicited = rng.one_in(3);
        flags.set(SendFlags::SOLICITED, solicited);
        let mut wc = Wc { id, qpn: qpn(side), byte_len: len as u32, ..Wc::default() };
        let mut gather = |rng: &mut Rng, data: &[u8]| {
            if data.len() <= 100 && rng.one_in(2) {
                return Payload::Inline(data.iter().copied().collect());
            }
            let from = p.source.len() as u64;
            p.source.extend_from_slice(data);
            Payload::Sges(split(rng, from, data.len() as u32, SOURCE))
        };
        let kind = rng.below(13);
        let mut fence = |at, len| {
            if touches(&unanswered, at, len) {
                unanswered.clear();
                return SendFlags::FENCE;
            }
            SendFlags::empty()
        };
        let (op, payload) = match kind {
            0..=3 => {
                let op = match kind {
                    0 | 1 => SendOp::Send,
                    2 => SendOp::SendImm(rng.draw() as u32),
                    _ => SendOp::SendInv(RKey(MORTAL + n as u32)),
                };
                let payload = gather(rng, &data);
                receive(&mut p, rng, &data, side, |wc| {
                    wc.solicited = solicited;
                    match op {
                        SendOp::SendImm(imm) => wc.imm = Some(Imm::from_u32(imm)),
                        SendOp::SendInv(key) => wc.invalidated = Some(key),
                        _ => {}
                    }
                });
                (op, payload)
            }
            4..=6 => {
                flags |= fence(at, len);
                let payload = gather(rng, &data);
                p.target[at..at + len].copy_from_slice(&data);
                wc.opcode = WcOpcode::WRITE;
                let op = if kind == 4 {
                    let imm = rng.draw() as u32;
                    receive(&mut p, rng, &[], side, |wc| {
                        wc.opcode = WcOpcode::RECV_IMM;
                        wc.byte_len = len as u32;
                        wc.imm = Some(Imm::from_u32(imm));
                        wc.solicited = solicited;
                    });
                    SendOp::WriteImm(remote(at), imm)
                } else {
                    SendOp::Write(remote(at))
                };
                (op, payload)
            }
            7 | 8 => {
                unanswered.push((at, len));
                let sink_at = p.sink.len() as u64;
                p.sink.extend_from_slice(&p.target[at..at + len]);
                wc.opcode = WcOpcode::READ;
                let payload = Payload::Sges(split(rng, sink_at, len as u32, SINK));
                (SendOp::Read(remote(at)), payload)
            }
            9 | 10 => {
                let at = at.min(TARGET_LEN - 8) & !7;
                flags |= fence(at, 8);
                let word: [u8; 8] = p.target[at..at + 8].try_into().expect("8 octets");
                let old = u64::from_ne_bytes(word);
                let swap = rng.draw();
                let (op, model) = if kind == 9 {
                    wc.opcode = WcOpcode::FETCH_ADD;
                    let op = SendOp::FetchAdd { remote: remote(at), add: swap, mask: 0 };
                    (op, AtomicOp::FetchAdd { add: swap, mask: 0 })
                } else {
                    wc.opcode = WcOpcode::CMP_SWAP;
                    let compare = if rng.one_in(2) { old } else { rng.draw() };
                    let (compare_mask, swap_mask) = (u64::MAX, u64::MAX);
                    let remote = remote(at);
                    let op = SendOp::CmpSwap { remote, compare, swap, compare_mask, swap_mask };
                    (op, AtomicOp::CmpSwap { compare, swap, compare_mask, swap_mask })
                };
                p.target[at..at + 8].copy_from_slice(&model.apply(old).to_ne_bytes());
                let sink_at = p.sink.len() as u64;
                p.sink.extend_from_slice(&word);
                wc.byte_len = 8;
                (op, Payload::Sges(split(rng, sink_at, 8, SINK)))
            }
            11 => {
                let at = at.min(TARGET_LEN - 8) & !7;
                flags |= fence(at, 8);
                let word = rng.bytes(8);
                let payload = gather(rng, &word);
                p.target[at..at + 8].copy_from_slice(&word);
                (wc.opcode, wc.byte_len) = (WcOpcode::ATOMIC_WRITE, 8);
                (SendOp::AtomicWrite(remote(at)), payload)
            }
            _ => {
                wc.byte_len = 0;
                let none = Payload::Sges([].into_iter().collect());
                if rng.one_in(3) {
                    wc.opcode = WcOpcode::LOCAL_INV;
                    (SendOp::LocalInv(RKey(OWN_MORTAL + n as u32)), none)
                } else {
                    wc.opcode = WcOpcode::FLUSH;
                    let op = SendOp::Flush {
                        remote: remote(at),
                        len: len as u32,
                        placement: Placement::GLOBAL_VISIBILITY,
                        selectivity: Selectivity(rng.below(2) as u8),
                    };
                    (op, none)
                }
            }
        };
        if flags.contains(SendFlags::SIGNALED) {
            p.send_wcs.push(wc);
        }
        p.sends.push(SendWr { id, op, payload, flags, dest: None });
    }
    p
}

/// A receive at the other side that takes `data`, with room to spare now and then.
fn receive(p: &mut Plan, rng: &mut Rng, data: &[u8], side: usize, set: impl FnOnce(&mut Wc)) {
    let spare = if rng.one_in(2) { 0 } else { rng.below(100) as usize };
    let id = p.receives.len() as u64 + 1_000_000;
    let at = p.inbox.len() as u64;
    p.receives.push(RecvWr { id, sges: split(rng, at, (data.len() + spare) as u32, INBOX) });
    p.inbox.extend_from_slice(data);
    p.inbox.extend(std::iter::repeat_n(0, spare));
    let mut wc = Wc {
        id,
        qpn: qpn(1 - side),
        opcode: WcOpcode::RECV,
        byte_len: data.len() as u32,
        ..Wc::default()
    };
    set(&mut wc);
    p.recv_wcs.push(wc);
}

/// A packet on its way; the earliest is the greatest.
#[derive(PartialEq, Eq)]
struct Flying {
    at: Instant,
    order: u64,
    to: usize,
    octets: Vec<u8>,
}

impl Ord for Flying {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (other.at, other.order).cmp(&(self.at, self.order))
    }
}

impl PartialOrd for Flying {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

/// What the network does to a packet: once in so many times, 0 never.
#[derive(Debug, Clone, Copy)]
struct Faults {
    loss: u64,
    dup: u64,
    reorder: u64,
}

struct Side {
    qp: Qp,
    mem: PlainMemory,
    wcs: Vec<Wc>,
    events: Vec<Event>,
    receives: std::vec::IntoIter<RecvWr>,
}

struct World {
    sides: [Side; 2],
    ends: [SocketAddr; 2],
    now: Instant,
    sky: BinaryHeap<Flying>,
    rng: Rng,
    faults: Faults,
    order: u64,
    dropped: u64,
    duplicated: u64,
    reordered: u64,
    steps: usize,
    train: Train,
}

impl World {
    /// One in `n`, with 0 for never.
    fn hit(&mut self, n: u64) -> bool {
        n > 0 && self.rng.one_in(n)
    }

    fn transmit(&mut self, side: usize) {
        let budget = 1 + self.rng.below(100_000) as usize;
        loop {
            let me = &mut self.sides[side];
            if !me.qp.poll_transmit(self.now, &me.mem, budget, &mut self.train) {
                // A local invalidate is carried out without a packet.
                self.collect(side);
                return;
            }
            let octets = self.train.octets();
            assert_eq!(octets.len(), self.train.len(), "the parts add up");
            let packets: Vec<_> =
                octets.chunks(self.train.segment_len()).map(<[u8]>::to_vec).collect();
            assert_eq!(packets.len(), self.train.packets());
            assert!(packets.len() <= 128 && octets.len() <= 65_507);
            assert_eq!(self.train.peer(), Some(self.ends[1 - side]));
            for (i, octets) in packets.iter().enumerate() {
                assert!(icrc_is_good(self.ends[side], self.ends[1 - side], i, octets));
                self.fly(1 - side, octets);
            }
            self.collect(side);
        }
    }

    fn fly(&mut self, to: usize, octets: &[u8]) {
        if self.hit(self.faults.loss) {
            self.dropped += 1;
            return;
        }
        let copies = if self.hit(self.faults.dup) { 2 } else { 1 };
        self.duplicated += copies - 1;
        for _ in 0..copies {
            let mut delay = 10_000;
            if self.hit(self.faults.reorder) {
                self.reordered += 1;
                delay += self.rng.below(100_000);
            }
            self.order += 1;
            let at = self.now + Duration::from_nanos(delay);
            self.sky.push(Flying { at, order: self.order, to, octets: octets.to_vec() });
        }
    }

    fn collect(&mut self, side: usize) {
        let me = &mut self.sides[side];
        me.wcs.extend(std::iter::from_fn(|| me.qp.poll_completion()).map(|c| c.wc));
        me.events.extend(std::iter::from_fn(|| me.qp.poll_event()));
    }

    /// Goes on until nothing is left to happen.
    fn run(&mut self, limit: usize) {
        loop {
            self.steps += 1;
            assert!(self.steps < limit, "still busy after {limit} steps");
            for side in 0..2 {
                // The program is slow to post receives now and then.
                while self.rng.one_in(2) {
                    let me = &mut self.sides[side];
                    let Some(wr) = me.receives.next() else { break };
                    me.qp.post_recv(wr.clone(), wr.id).expect("room for every receive");
                }
                self.transmit(side);
            }
            let timers = self.sides.iter().filter_map(|side| side.qp.poll_timeout()).min();
            let arrival = self.sky.peek().map(|flying| flying.at);
            let Some(next) = timers.into_iter().chain(arrival).min() else {
                if self.sides.iter().all(|side| side.receives.len() == 0) {
                    return;
                }
                continue;
            };
            self.now = self.now.max(next);
            while self.sky.peek().is_some_and(|flying| flying.at <= self.now) {
                let flying = self.sky.pop().expect("it was there");
                let packet = Packet::parse(&flying.octets).expect("a whole packet");
                let from = self.ends[1 - flying.to];
                let len = flying.octets.len();
                let received = Received { packet: &packet, from, len, ecn: 0 };
                let me = &mut self.sides[flying.to];
                me.qp.handle_packet(self.now, &received, &me.mem);
                self.collect(flying.to);
            }
            for side in 0..2 {
                if self.sides[side].qp.poll_timeout().is_some_and(|at| at <= self.now) {
                    self.sides[side].qp.handle_timeout(self.now);
                    self.collect(side);
                }
            }
        }
    }
}

fn icrc_is_good(from: SocketAddr, to: SocketAddr, index: usize, octets: &[u8]) -> bool {
    let (src_port, dst_port) = (from.port(), to.port());
    match (from, to) {
        (SocketAddr::V4(a), SocketAddr::V4(b)) => {
            let path = PathV4 { src: *a.ip(), dst: *b.ip(), src_port, dst_port };
            let id = Identification { identification: index as u16, dont_fragment: true };
            icrc::verify_unknown_id(&path, octets, Some(true)) == Some(id)
        }
        (SocketAddr::V6(a), SocketAddr::V6(b)) => {
            let path = PathV6 { src: *a.ip(), dst: *b.ip(), src_port, dst_port };
            let (bth, rest) = Bth::read_from_prefix(octets).expect("a BTH");
            let (covered, found) = rest.split_at(rest.len() - 4);
            let mut icrc = Icrc::socket_v6(&path, octets.len(), &bth);
            icrc.update(covered);
            icrc.finish() == found
        }
        _ => false,
    }
}

struct Settings {
    seed: u64,
    count: usize,
    longest: usize,
    faults: Faults,
    retry_cnt: u8,
}

/// What became of a run.
struct Outcome {
    world: World,
    plans: [Plan; 2],
}

fn run(s: &Settings) -> Outcome {
    let mut rng = Rng::new(s.seed);
    let plans = [0, 1].map(|side| plan(&mut rng, s.count, s.longest, side));
    let mtu = PathMtu::ALL[rng.below(5) as usize];
    let ends: [SocketAddr; 2] = if rng.one_in(2) {
        ["192.0.2.1:4791", "192.0.2.2:4791"].map(|a| a.parse().unwrap())
    } else {
        ["[2001:db8::1]:4791", "[2001:db8::2]:40000"].map(|a| a.parse().unwrap())
    };
    let psns = [0, 1].map(|_| match rng.below(2) {
        // The numbers wrap soon.
        0 => Psn::new(0xff_ffff - rng.below(100) as u32),
        _ => Psn::new(rng.draw() as u32),
    });
    let depths = [0, 1].map(|_| 1 + rng.below(6) as u8);
    let sides = [0, 1].map(|i| {
        let mut config = Config::new(QpType::Rc, PdId(PD), qpn(i));
        (config.max_send_wr, config.max_recv_wr) = (s.count, s.count);
        config.ack_every = 1 + rng.below(64) as u32;
        config.credits = rng.one_in(2);
        let mut qp = Qp::new(config);
        qp.set_window(Window {
            packets: 1 + rng.below(128) as u32,
            octets: 1 + rng.below(200_000) as u32,
        });
        qp.modify(&QpAttr::to(QpState::Init)).unwrap();
        qp.modify(&QpAttr {
            local: Some(ends[i]),
            peer: Some(ends[1 - i]),
            dest_qp: Some(qpn(1 - i)),
            path_mtu: Some(mtu),
            rq_psn: Some(psns[1 - i]),
            max_dest_rd_atomic: Some(depths[1 - i]),
            min_rnr_timer: Some(1 + rng.below(4) as u8),
            ..QpAttr::to(QpState::Rtr)
        })
        .unwrap();
        qp.modify(&QpAttr {
            sq_psn: Some(psns[i]),
            max_rd_atomic: Some(depths[i]),
            timeout: Some(8),
            retry_cnt: Some(s.retry_cnt),
            ..QpAttr::to(QpState::Rts)
        })
        .unwrap();
        let (own, other) = (&plans[i], &plans[1 - i]);
        let mem = PlainMemory::default();
        let all = Access::REMOTE_READ
            | Access::REMOTE_WRITE
            | Access::REMOTE_ATOMIC
            | Access::FLUSH_GLOBAL;
        mem.add(TARGET, PD, all, TARGET_IOVA, other.before.clone());
        mem.add(SOURCE, PD, Access::empty(), 0, own.source.clone());
        mem.add(SINK, PD, Access::LOCAL_WRITE, 0, vec![0; own.sink.len()]);
        mem.add(INBOX, PD, Access::LOCAL_WRITE, 0, vec![0; other.inbox.len()]);
        let mortal = |key: u32| {
            mem.add(key, PD, Access::REMOTE_INVALIDATE, 0, vec![0; 8]);
            mem.bind(key, qpn(i));
        };
        for wr in &other.sends {
            if let SendOp::SendInv(key) = wr.op {
                mortal(key.0);
            }
        }
        for wr in &own.sends {
            if let SendOp::LocalInv(key) = wr.op {
                mortal(key.0);
            }
            qp.post_send(wr.clone(), wr.id).expect("room for every send");
        }
        let receives = other.receives.clone().into_iter();
        Side { qp, mem, wcs: Vec::new(), events: Vec::new(), receives }
    });
    let mut world = World {
        sides,
        ends,
        now: Instant::ZERO,
        sky: BinaryHeap::new(),
        rng,
        faults: s.faults,
        order: 0,
        dropped: 0,
        duplicated: 0,
        reordered: 0,
        steps: 0,
        train: Train::default(),
    };
    world.run(100_000);
    Outcome { world, plans }
}

fn check(outcome: &Outcome, seed: u64) {
    for (i, side) in outcome.world.sides.iter().enumerate() {
        let (own, other) = (&outcome.plans[i], &outcome.plans[1 - i]);
        assert_eq!(side.qp.state(), QpState::Rts, "seed {seed} side {i}: {:?}", side.events);
        let (recvs, sends): (Vec<Wc>, Vec<Wc>) =
            side.wcs.iter().partition(|wc| wc.opcode.is_recv());
        assert_eq!(sends, own.send_wcs, "seed {seed} side {i}: send completions");
        assert_eq!(recvs, other.recv_wcs, "seed {seed} side {i}: receive completions");
        let worked_on = side.mem.bytes(TARGET) == other.target;
        assert!(worked_on, "seed {seed} side {i}: memory that the peer works on");
        assert!(side.mem.bytes(SINK) == own.sink, "seed {seed} side {i}: what was read");
        assert!(side.mem.bytes(INBOX) == other.inbox, "seed {seed} side {i}: what was received");
    }
}

/// How many seeds are tried: `$USERDMA_SEEDS`, or a few.
fn seeds(few: u64) -> u64 {
    std::env::var("USERDMA_SEEDS").map_or(few, |many| many.parse().expect("a number of seeds"))
}

#[test]
fn both_memories_equal_the_model() {
    let (mut lost, mut dup, mut reordered, mut resent, mut rnr) = (0, 0, 0, 0, 0);
    for seed in 0..seeds(240) {
        let faults = match seed % 4 {
            0 => Faults { loss: 0, dup: 0, reorder: 0 },
            1 => Faults { loss: 100, dup: 100, reorder: 100 },
            2 => Faults { loss: 20, dup: 20, reorder: 0 },
            _ => Faults { loss: 20, dup: 10, reorder: 10 },
        };
        let longest = if seed % 3 == 0 { 30_000 } else { 3_000 };
        let count = 1 + (seed as usize * 7) % 40;
        let outcome = run(&Settings { seed, count, longest, faults, retry_cnt: 7 });
        check(&outcome, seed);
        let world = &outcome.world;
        let stats = world.sides.each_ref().map(|side| *side.qp.stats());
        let again: u64 = stats.iter().map(|s| s.packets_resent).sum();
        let rnrs: u64 = stats.iter().map(|s| s.rnr_naks_sent).sum();
        if faults.loss == 0 && rnrs == 0 {
            assert_eq!(again, 0, "seed {seed}: a good network, and packets sent twice");
        }
        (lost, dup, reordered) =
            (lost + world.dropped, dup + world.duplicated, reordered + world.reordered);
        (resent, rnr) = (resent + again, rnr + rnrs);
    }
    // Everything that is to be lived through has happened.
    assert!(lost > 500 && dup > 500 && reordered > 500, "{lost} {dup} {reordered}");
    assert!(resent > 500 && rnr > 50, "{resent} {rnr}");
}

/// A network that loses a third, and one retry: many give up, and what is told is still in order.
#[test]
fn who_gives_up_had_reason_to() {
    let mut given_up = 0;
    for seed in 0..seeds(100) {
        let faults = Faults { loss: 3, dup: 20, reorder: 20 };
        let s = Settings { seed, count: 20, longest: 2_000, faults, retry_cnt: 1 };
        let outcome = run(&s);
        for (i, side) in outcome.world.sides.iter().enumerate() {
            let own = &outcome.plans[i];
            let sends: Vec<&Wc> = side.wcs.iter().filter(|wc| !wc.opcode.is_recv()).collect();
            let ids: Vec<u64> = sends.iter().map(|wc| wc.id).collect();
            assert!(ids.is_sorted_by(|a, b| a < b), "seed {seed} side {i}: once and in order");
            let good = sends.iter().take_while(|wc| wc.status.is_ok()).count();
            for (told, planned) in sends.iter().zip(&own.send_wcs).take(good) {
                assert_eq!(*told, planned, "seed {seed} side {i}");
            }
            match sends.get(good) {
                None => assert_eq!(side.qp.state(), QpState::Rts),
                Some(failed) => {
                    given_up += 1;
                    assert_eq!(failed.status, WcStatus::RETRY_EXC_ERR, "seed {seed} side {i}");
                    assert!(
                        side.qp.stats().timeouts > 1 && outcome.world.dropped > 1
                            || outcome.world.sides[1 - i].qp.state() == QpState::Err
                    );
                    assert_eq!(side.qp.state(), QpState::Err);
                    let rest = &sends[good + 1..];
                    assert!(rest.iter().all(|wc| wc.status == WcStatus::WR_FLUSH_ERR));
                    // Whatever was not told as done is told as flushed, signalled or not.
                    let last = own.sends.len() as u64 - 1;
                    assert_eq!(rest.len() as u64, last - failed.id, "seed {seed} side {i}");
                }
            }
        }
    }
    assert!(given_up > 20, "{given_up}");
}

/// The model itself can fail: operations of all kinds change something.
#[test]
fn a_wrong_octet_would_be_seen() {
    let p = plan(&mut Rng::new(1), 100, 3_000, 0);
    assert!(p.target != p.before);
    let kinds: BTreeMap<&str, usize> = p.sends.iter().fold(BTreeMap::new(), |mut m, wr| {
        *m.entry(wr.op.name()).or_default() += 1;
        m
    });
    assert_eq!(kinds.len(), 11, "operations of all kinds: {kinds:?}");
}
