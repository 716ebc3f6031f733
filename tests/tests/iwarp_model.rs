//! Two connections with every operation mixed, the stream cut at random places, against a model
//! that is nothing but vectors: both memories end equal, every completion is told once and in order.

use std::collections::BTreeMap;

use proptest::prelude::*;
use userdma_proto::{
    iwarp::Event,
    mem::AtomicOp,
    verbs::{
        Access, Imm, Payload, QpState, RecvWr, RemoteAddr, SendFlags, SendOp, SendWr, Wc, WcOpcode,
        WcStatus,
    },
    wire::ids::{Qpn, RKey},
};
use userdma_tests::{PD, Pair, Rng, config, split};

/// Keys of each side: what the peer works on, where its own requests come from and go to, where
/// receives land.
const TARGET: u32 = 0x1000;
const SOURCE: u32 = 0x2000;
const SINK: u32 = 0x3000;
const INBOX: u32 = 0x4000;
/// Keys from here on may be invalidated by the peer.
const MORTAL: u32 = 0x5000;

const TARGET_LEN: usize = 100_000;
const TARGET_IOVA: u64 = 0x7f00_0000_0000;

/// What one side will do, and what must come of it.
struct Plan {
    sends: Vec<SendWr>,
    receives: Vec<RecvWr>,
    send_wcs: Vec<Wc>,
    recv_wcs: Vec<Wc>,
    target: Vec<u8>,
    sink: Vec<u8>,
    inbox: Vec<u8>,
    source: Vec<u8>,
}

fn qpn(side: usize) -> Qpn {
    Qpn(0x10 + side as u32)
}

/// Makes the work of one side (`send_wcs`, `sink`, its `sends`) and its effects at the other
/// (`recv_wcs`, `target`, `inbox`, `receives`).
fn plan(rng: &mut Rng, count: usize, side: usize) -> Plan {
    let source = rng.bytes(TARGET_LEN);
    let target = rng.bytes(TARGET_LEN);
    let mut p = Plan {
        sends: Vec::new(),
        receives: Vec::new(),
        send_wcs: Vec::new(),
        recv_wcs: Vec::new(),
        target,
        sink: vec![0; 0],
        inbox: vec![0; 0],
        source,
    };
    // Ranges of the peer's memory that unanswered READs and atomics may still look at.
    let mut unanswered: Vec<(usize, usize)> = Vec::new();
    let mut mortal = 0;
    for id in 0..count as u64 {
        let len = match rng.below(6) {
            0 => 0,
            1 => rng.below(64) as usize,
            2 => 1400 + rng.below(200) as usize,
            3 => 40_000 + rng.below(40_000) as usize,
            _ => rng.below(5_000) as usize,
        };
        let mut flags = SendFlags::empty();
        if !rng.one_in(3) {
            flags |= SendFlags::SIGNALED;
        }
        let solicited = rng.one_in(3);
        if rng.one_in(20) {
            flags |= SendFlags::FENCE;
            unanswered.clear();
        }
        let from = rng.below((TARGET_LEN - len) as u64 + 1) as usize;
        let at = rng.below((TARGET_LEN - len) as u64 + 1) as usize;
        let remote = |at: usize| RemoteAddr::new(TARGET_IOVA + at as u64, RKey(TARGET));
        let data = p.source[from..from + len].to_vec();
        let gather = |rng: &mut Rng| {
            if len <= 200 && rng.one_in(2) {
                return Payload::Inline(data.as_slice().into());
            }
            Payload::Sges(split(rng, from as u64, len as u32, SOURCE))
        };
        // Where this request's answer goes.
        let sink_at = p.sink.len() as u64;
        let touches = |ranges: &[(usize, usize)], at: usize, len: usize| {
            ranges.iter().any(|&(a, l)| a < at + len && at < a + l)
        };
        let mut wc = Wc { id, qpn: qpn(side), ..Wc::default() };
        let (op, payload) = match rng.below(9) {
            0 | 1 => {
                if solicited {
                    flags |= SendFlags::SOLICITED;
                }
                let op = if rng.one_in(4) {
                    mortal += 1;
                    SendOp::SendInv(RKey(MORTAL + mortal))
                } else {
                    SendOp::Send
                };
                let invalidated = match op {
                    SendOp::SendInv(key) => Some(key),
                    _ => None,
                };
                receive(&mut p, rng, &data, side, |wc| {
                    wc.invalidated = invalidated;
                    wc.solicited = solicited;
                });
                (wc.opcode, wc.byte_len) = (WcOpcode::SEND, len as u32);
                (op, gather(rng))
            }
            2 => {
                if solicited {
                    flags |= SendFlags::SOLICITED;
                }
                let imm = Imm(rng.draw());
                receive(&mut p, rng, &[], side, |wc| {
                    wc.opcode = WcOpcode::RECV_IMM;
                    wc.imm = Some(imm);
                    wc.solicited = solicited;
                });
                wc.opcode = WcOpcode::SEND;
                (SendOp::Imm(imm), Payload::Sges([].into_iter().collect()))
            }
            kind @ 3..=5 => {
                if touches(&unanswered, at, len) {
                    flags |= SendFlags::FENCE;
                    unanswered.clear();
                }
                p.target[at..at + len].copy_from_slice(&data);
                (wc.opcode, wc.byte_len) = (WcOpcode::WRITE, len as u32);
                let op = if kind == 3 {
                    let imm = rng.draw() as u32;
                    receive(&mut p, rng, &[], side, |wc| {
                        wc.opcode = WcOpcode::RECV_IMM;
                        wc.imm = Some(Imm::from_u32(imm));
                        wc.solicited = false;
                    });
                    SendOp::WriteImm(remote(at), imm)
                } else {
                    SendOp::Write(remote(at))
                };
                (op, gather(rng))
            }
            6 => {
                unanswered.push((at, len));
                p.sink.extend_from_slice(&p.target[at..at + len]);
                (wc.opcode, wc.byte_len) = (WcOpcode::READ, len as u32);
                (SendOp::Read(remote(at)), Payload::Sges(split(rng, sink_at, len as u32, SINK)))
            }
            kind => {
                let at = at.min(TARGET_LEN - 8) & !7;
                unanswered.push((at, 8));
                let word: [u8; 8] = p.target[at..at + 8].try_into().expect("8 octets");
                let old = u64::from_ne_bytes(word);
                let (add, mask) = (rng.draw(), if rng.one_in(2) { 0 } else { rng.draw() });
                let (op, model) = if kind == 7 {
                    wc.opcode = WcOpcode::FETCH_ADD;
                    (
                        SendOp::FetchAdd { remote: remote(at), add, mask },
                        AtomicOp::FetchAdd { add, mask },
                    )
                } else {
                    wc.opcode = WcOpcode::CMP_SWAP;
                    let compare = if rng.one_in(2) { old } else { rng.draw() };
                    let masks = if rng.one_in(2) {
                        (u64::MAX, u64::MAX)
                    } else {
                        (rng.draw() & rng.draw() & rng.draw(), rng.draw())
                    };
                    let (compare_mask, swap_mask) = masks;
                    (
                        SendOp::CmpSwap {
                            remote: remote(at),
                            compare,
                            swap: add,
                            compare_mask,
                            swap_mask,
                        },
                        AtomicOp::CmpSwap { compare, swap: add, compare_mask, swap_mask },
                    )
                };
                p.target[at..at + 8].copy_from_slice(&model.apply(old).to_ne_bytes());
                p.sink.extend_from_slice(&word);
                wc.byte_len = 8;
                (op, Payload::Sges(split(rng, sink_at, 8, SINK)))
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

struct Settings {
    crc: [bool; 2],
    markers: [bool; 2],
    revision: u8,
    peer_to_peer: bool,
    emss: usize,
    depth: u16,
    seed: u64,
    count: usize,
}

fn run(s: &Settings) {
    let mut rng = Rng::new(s.seed);
    let plans = [plan(&mut rng, s.count, 0), plan(&mut rng, s.count, 1)];
    let configs = [0, 1].map(|i| {
        let mut c = config(qpn(i).0, rng.draw());
        c.mpa.crc = s.crc[i];
        c.mpa.markers = s.markers[i];
        c.mpa.revision = s.revision;
        c.mpa.peer_to_peer = s.peer_to_peer && i == 0;
        (c.ird, c.ord) = (s.depth, s.depth);
        (c.max_send_wr, c.max_recv_wr) = (s.count, s.count);
        c
    });
    let [a, b] = configs;
    let mut pair = Pair::new(a, b, b"hello", s.seed);
    for (i, side) in pair.sides.iter_mut().enumerate() {
        let other = &plans[1 - i];
        let remote = Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
        side.conn.set_emss(s.emss);
        // The memory before any work: the model's was already worked on, so make it afresh.
        side.mem.add(TARGET, PD, remote, TARGET_IOVA, Vec::new());
        side.mem.add(SOURCE, PD, Access::empty(), 0, plans[i].source.clone());
        side.mem.add(SINK, PD, Access::LOCAL_WRITE, 0, vec![0; plans[i].sink.len()]);
        side.mem.add(INBOX, PD, Access::LOCAL_WRITE, 0, vec![0; other.inbox.len()]);
        for wr in &other.receives {
            side.conn.post_recv(wr.clone(), wr.id).expect("room for every receive");
        }
        for wr in &other.sends {
            if let SendOp::SendInv(key) = wr.op {
                side.mem.add(key.0, PD, Access::REMOTE_INVALIDATE, 0, vec![0; 8]);
                side.mem.bind(key.0, qpn(i));
            }
        }
    }
    // The same generator again gives the targets as they were before.
    let mut again = Rng::new(s.seed);
    for i in 0..2 {
        let before = initial_target(&mut again, s.count, i);
        let remote = Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
        pair.sides[1 - i].mem.add(TARGET, PD, remote, TARGET_IOVA, before);
    }
    pair.connect();
    for (side, plan) in pair.sides.iter_mut().zip(&plans) {
        assert_eq!(side.conn.state(), QpState::Rts, "{:?}", side.events);
        for wr in &plan.sends {
            side.conn.post_send(wr.clone(), wr.id).expect("room for every send");
        }
    }
    pair.run(5_000_000);
    for (i, side) in pair.sides.iter().enumerate() {
        let (own, other) = (&plans[i], &plans[1 - i]);
        let broken = side.events.iter().find(|e| matches!(e, Event::Closed(_)));
        assert_eq!(broken, None, "side {i}");
        let (recvs, sends): (Vec<Wc>, Vec<Wc>) =
            side.wcs().into_iter().partition(|wc| wc.opcode.is_recv());
        assert_eq!(sends, own.send_wcs, "side {i}: send completions");
        assert_eq!(recvs, other.recv_wcs, "side {i}: receive completions");
        assert!(side.mem.bytes(TARGET) == other.target, "side {i}: memory that the peer works on");
        assert!(side.mem.bytes(SINK) == own.sink, "side {i}: what was read");
        assert!(side.mem.bytes(INBOX) == other.inbox, "side {i}: what was received");
    }
    // Both close: what is left in the queues is flushed, and both ends agree that all is well.
    let extra = RecvWr::new(7, []);
    pair.sides[0].conn.post_recv(extra, 7).expect("room");
    pair.sides[0].conn.close(pair.now);
    pair.run(100_000);
    for side in &pair.sides {
        let graceful = Event::Closed(userdma_proto::iwarp::CloseReason::Graceful);
        assert_eq!(side.events.last(), Some(&graceful));
        assert_eq!(side.conn.state(), QpState::Err);
    }
    let last = pair.sides[0].wcs().last().copied().expect("the extra receive");
    assert_eq!((last.id, last.status), (7, WcStatus::WR_FLUSH_ERR));
}

/// The target memory that [`plan`] starts from.
fn initial_target(rng: &mut Rng, count: usize, side: usize) -> Vec<u8> {
    let mut peek = rng.clone();
    peek.bytes(TARGET_LEN);
    let target = peek.bytes(TARGET_LEN);
    plan(rng, count, side);
    target
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 256, ..ProptestConfig::default() })]

    #[test]
    fn both_memories_equal_the_model(
        crc: [bool; 2],
        markers: [bool; 2],
        peer_to_peer: bool,
        revision in 1..=2u8,
        emss in prop_oneof![Just(536usize), Just(1448), Just(9000), Just(65_483), 512..4000usize],
        depth in 1..20u16,
        seed: u64,
        count in 1..60usize,
    ) {
        run(&Settings {
            crc,
            markers,
            revision,
            peer_to_peer: peer_to_peer && revision == 2,
            emss,
            depth,
            seed,
            count,
        });
    }
}

/// The model itself can fail: a target changed by one octet is found.
#[test]
fn a_wrong_octet_would_be_seen() {
    let mut rng = Rng::new(1);
    let p = plan(&mut rng, 50, 0);
    let before = initial_target(&mut Rng::new(1), 50, 0);
    assert!(p.target != before, "50 operations change something");
    let kinds: BTreeMap<String, usize> = p.sends.iter().fold(BTreeMap::new(), |mut m, wr| {
        let name = format!("{:?}", wr.op);
        *m.entry(name.split(['(', ' ']).next().unwrap_or_default().to_owned()).or_default() += 1;
        m
    });
    assert!(kinds.len() >= 7, "operations of all kinds: {kinds:?}");
}
