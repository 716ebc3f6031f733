//! One RoCE queue pair against packets made by hand: what it refuses, with which NAK and which
//! status; what it repeats, when, and how often.

use std::{net::SocketAddr, time::Duration};

use userdma_proto::{
    mem::PdId,
    roce::{
        Config, Event, ModifyError, PathMtu, Qp, QpAttr, Reason, Received, Stats, Train, Window,
    },
    time::Instant,
    verbs::{
        Access, Imm, PostError, QpState, QpType, RecvWr, RemoteAddr, SendFlags, SendOp, SendWr,
        Sge, UdDest, Wc, WcOpcode, WcStatus,
    },
    wire::{
        ids::{LKey, PKey, Psn, QKey, Qpn, RKey},
        roce::{
            Headers, Packet,
            aeth::{Aeth, Syndrome, credit_code, rnr_micros},
            atomic::{AtomicAckEth, AtomicEth},
            bth::Bth,
            deth::Deth,
            feth::{Feth, Placement, Selectivity},
            ieth::Ieth,
            immdt::ImmDt,
            opcode::Opcode,
            reth::Reth,
        },
    },
};
use userdma_tests::{PD, PlainMemory, Rng};

/// Region that the peer may do everything with, 4096 octets.
const OPEN: u32 = 0x100;
/// Local memory, 4096 octets.
const LOCAL: u32 = 0x200;
/// Local memory that cannot be written.
const SEALED: u32 = 0x300;
/// Of another domain.
const FOREIGN: u32 = 0x400;
/// The peer may read it, and nothing else.
const READABLE: u32 = 0x500;
/// The peer may write it, and nothing else.
const WRITABLE: u32 = 0x600;
/// May be invalidated.
const MORTAL: u32 = 0x700;

const MTU: usize = 256;
/// First PSN of the peer, and ours.
const THEIRS: u32 = 100;
const OURS: u32 = 0xff_fff0;

fn ours() -> SocketAddr {
    "192.0.2.1:4791".parse().unwrap()
}

fn peer() -> SocketAddr {
    "192.0.2.2:4791".parse().unwrap()
}

/// A packet that came out.
#[derive(Debug, Clone)]
struct Out {
    headers: Headers,
    payload: Vec<u8>,
}

impl Out {
    fn name(&self) -> &'static str {
        self.headers.bth.opcode().name().unwrap_or("?")
    }

    fn psn(&self) -> u32 {
        self.headers.bth.psn().get()
    }

    fn ask(&self) -> bool {
        self.headers.bth.ack_req()
    }

    /// Name, PSN, syndrome and MSN of an answer.
    fn answer(&self) -> (&'static str, u32, u8, u32) {
        let aeth = self.headers.aeth.expect("an AETH");
        (self.name(), self.psn(), aeth.syndrome, aeth.msn())
    }
}

/// A packet that goes in.
struct In {
    headers: Headers,
    payload: Vec<u8>,
}

fn packet(opcode: Opcode, psn: u32, payload: usize) -> In {
    let bth = Bth::new(opcode, PKey(0xffff), Qpn(0x11), Psn::new(psn)).with_ack_req(true);
    In {
        headers: Headers::new(bth),
        payload: (0..payload).map(|n| (n as u8).wrapping_add(1)).collect(),
    }
}

impl In {
    fn reth(mut self, va: u64, key: u32, len: u32) -> Self {
        self.headers.reth = Some(Reth::new(va, RKey(key), len));
        self
    }

    fn aeth(mut self, syndrome: u8, msn: u32) -> Self {
        self.headers.aeth = Some(Aeth::new(Syndrome::from_octet(syndrome), msn));
        self
    }

    fn with(mut self, change: impl FnOnce(&mut Headers)) -> Self {
        change(&mut self.headers);
        self
    }
}

fn ack(psn: u32) -> In {
    packet(Opcode::RC_ACK, psn, 0).aeth(0x1f, 0)
}

fn nak(psn: u32, syndrome: u8) -> In {
    packet(Opcode::RC_ACK, psn, 0).aeth(syndrome, 0)
}

struct Lab {
    qp: Qp,
    mem: PlainMemory,
    now: Instant,
    trains: Vec<usize>,
}

fn attributes() -> QpAttr {
    QpAttr {
        local: Some(ours()),
        peer: Some(peer()),
        dest_qp: Some(Qpn(0x22)),
        path_mtu: Some(PathMtu::Mtu256),
        rq_psn: Some(Psn::new(THEIRS)),
        sq_psn: Some(Psn::new(OURS)),
        qkey: Some(QKey(0x1111)),
        max_dest_rd_atomic: Some(2),
        max_rd_atomic: Some(2),
        timeout: Some(10),
        retry_cnt: Some(2),
        rnr_retry: Some(2),
        ..QpAttr::default()
    }
}

impl Lab {
    fn new(kind: QpType) -> Self {
        Self::with(kind, |_| {})
    }

    fn with(kind: QpType, change: impl FnOnce(&mut QpAttr)) -> Self {
        let mut qp = Qp::new(Config::new(kind, PdId(PD), Qpn(0x11)));
        let mut attr = attributes();
        change(&mut attr);
        for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
            qp.modify(&QpAttr { state: Some(state), ..attr }).unwrap();
            attr = QpAttr::default();
        }
        let mem = PlainMemory::default();
        let all = Access::all() - Access::REMOTE_INVALIDATE;
        mem.add(OPEN, PD, all, 0x1000, vec![0; 4096]);
        mem.add(LOCAL, PD, Access::LOCAL_WRITE, 0, (0..4096u32).map(|n| n as u8).collect());
        mem.add(SEALED, PD, Access::empty(), 0, vec![7; 4096]);
        mem.add(FOREIGN, PD + 1, all, 0x1000, vec![0; 4096]);
        mem.add(READABLE, PD, Access::REMOTE_READ, 0x1000, vec![9; 4096]);
        mem.add(WRITABLE, PD, Access::REMOTE_WRITE, 0x1000, vec![0; 4096]);
        mem.add(MORTAL, PD, Access::REMOTE_INVALIDATE, 0, vec![0; 8]);
        mem.bind(MORTAL, Qpn(0x11));
        Self { qp, mem, now: Instant::ZERO, trains: Vec::new() }
    }

    fn rc() -> Self {
        Self::new(QpType::Rc)
    }

    fn take(&mut self, mut packet: In) {
        let mut octets = Vec::new();
        packet.headers.emit_packet(&packet.payload, &mut octets);
        octets.extend([0; 4]);
        self.take_octets(&octets, peer());
    }

    fn take_octets(&mut self, octets: &[u8], from: SocketAddr) {
        let packet = Packet::parse(octets).unwrap();
        let received = Received { packet: &packet, from, len: octets.len(), ecn: 2 };
        self.qp.handle_packet(self.now, &received, &self.mem);
    }

    /// Everything that is to be sent.
    fn sent(&mut self) -> Vec<Out> {
        let (mut all, mut train) = (Vec::new(), Train::default());
        while self.qp.poll_transmit(self.now, &self.mem, usize::MAX, &mut train) {
            for octets in train.octets().chunks(train.segment_len()) {
                let packet = Packet::parse(octets).unwrap();
                packet.check_form().unwrap();
                all.push(Out { headers: packet.headers, payload: packet.payload.to_vec() });
            }
            self.trains.push(train.packets());
        }
        all
    }

    fn names(&mut self) -> Vec<(&'static str, u32)> {
        self.sent().iter().map(|out| (out.name(), out.psn())).collect()
    }

    fn answers(&mut self) -> Vec<(&'static str, u32, u8, u32)> {
        self.sent().iter().map(Out::answer).collect()
    }

    fn wcs(&mut self) -> Vec<Wc> {
        std::iter::from_fn(|| self.qp.poll_completion()).map(|c| c.wc).collect()
    }

    fn statuses(&mut self) -> Vec<(u64, WcStatus)> {
        self.wcs().iter().map(|wc| (wc.id, wc.status)).collect()
    }

    fn post(&mut self, wr: SendWr) {
        self.qp.post_send(wr, 0).unwrap();
    }

    fn recv(&mut self, id: u64, len: u32) {
        self.qp.post_recv(RecvWr::new(id, [local(0, len)]), 0).unwrap();
    }

    fn wait(&mut self, d: Duration) {
        self.now = self.now + d;
        if self.qp.poll_timeout().is_some_and(|at| at <= self.now) {
            self.qp.handle_timeout(self.now);
        }
    }

    fn stats(&self) -> Stats {
        *self.qp.stats()
    }
}

fn local(at: u64, len: u32) -> Sge {
    Sge::new(at, len, LKey(LOCAL))
}

fn remote(key: u32) -> RemoteAddr {
    RemoteAddr::new(0x1000, RKey(key))
}

/// The packets end in this NAK, the receive that is posted in this status; the queue pair is down
/// and what is written stays as it was.
fn is_refused(what: &str, packets: Vec<In>, syndrome: u8, status: WcStatus) {
    is_refused_by(Lab::rc(), what, packets, syndrome, status);
}

fn is_refused_by(mut lab: Lab, what: &str, packets: Vec<In>, syndrome: u8, status: WcStatus) {
    lab.recv(1, 600);
    lab.recv(2, 600);
    let last = packets.len() - 1;
    let mut psn = THEIRS;
    for (i, packet) in packets.into_iter().enumerate() {
        assert_eq!(lab.qp.state(), QpState::Rts, "{what}: packet {i}");
        psn = packet.headers.bth.psn().get();
        if i < last {
            lab.take(packet);
            lab.sent();
        } else {
            let before: Vec<_> =
                [OPEN, FOREIGN, READABLE, WRITABLE].map(|key| lab.mem.bytes(key)).into();
            lab.take(packet);
            let after: Vec<_> =
                [OPEN, FOREIGN, READABLE, WRITABLE].map(|key| lab.mem.bytes(key)).into();
            assert!(before == after, "{what}: nothing is written");
        }
    }
    let answers: Vec<_> = lab.answers().iter().map(|a| (a.0, a.1, a.2)).collect();
    assert_eq!(answers, [("RC_ACK", psn, syndrome)], "{what}");
    assert_eq!(lab.qp.state(), QpState::Err, "{what}");
    let event = Event::Error(Reason::Responder(Syndrome::from_octet(syndrome)));
    assert_eq!(lab.qp.poll_event(), Some(event), "{what}");
    let flushed = WcStatus::WR_FLUSH_ERR;
    assert_eq!(lab.statuses(), [(1, status), (2, flushed)], "{what}");
    // The NAK may be lost: who asks on hears it again.
    lab.take(packet(Opcode::RC_SEND_ONLY, psn, 0));
    assert_eq!(lab.answers()[0].2, syndrome, "{what}: again");
}

const FLUSHED: WcStatus = WcStatus::WR_FLUSH_ERR;

#[test]
fn shapes_that_are_invalid_requests() {
    use Opcode as Op;
    let p = THEIRS;
    let first = || packet(Op::RC_SEND_FIRST, p, MTU);
    let write_first = |len| packet(Op::RC_WRITE_FIRST, p, MTU).reth(0x1000, OPEN, len);
    let atomic = |op, va| {
        packet(op, p, 0).with(|h| h.atomic_eth = Some(AtomicEth::new(va, RKey(OPEN), 1, 0)))
    };
    let flush = |placement: u8, selectivity| {
        packet(Op::RC_FLUSH, p, 0).reth(0x1000, OPEN, 8).with(|h| {
            let placement = Placement::from_bits_retain(placement);
            h.feth = Some(Feth::new(placement, Selectivity(selectivity)));
        })
    };
    let cases: Vec<(&str, Vec<In>)> = vec![
        ("middle without first", vec![packet(Op::RC_SEND_MIDDLE, p, MTU)]),
        ("last without first", vec![packet(Op::RC_SEND_LAST, p, 4)]),
        ("WRITE middle without first", vec![packet(Op::RC_WRITE_MIDDLE, p, MTU)]),
        ("WRITE last without first", vec![packet(Op::RC_WRITE_LAST, p, 4)]),
        ("first after first", vec![first(), packet(Op::RC_SEND_FIRST, p + 1, MTU)]),
        ("only after first", vec![first(), packet(Op::RC_SEND_ONLY, p + 1, 4)]),
        ("WRITE middle in a SEND", vec![first(), packet(Op::RC_WRITE_MIDDLE, p + 1, MTU)]),
        (
            "WRITE only in a SEND",
            vec![first(), packet(Op::RC_WRITE_ONLY, p + 1, 4).reth(0x1000, OPEN, 4)],
        ),
        ("SEND last in a WRITE", vec![write_first(300), packet(Op::RC_SEND_LAST, p + 1, 44)]),
        ("READ in a SEND", vec![first(), packet(Op::RC_READ_REQUEST, p + 1, 0).reth(0, 0, 0)]),
        ("first too short", vec![packet(Op::RC_SEND_FIRST, p, MTU - 4)]),
        ("first too long", vec![packet(Op::RC_SEND_FIRST, p, MTU + 4)]),
        ("middle too short", vec![first(), packet(Op::RC_SEND_MIDDLE, p + 1, 4)]),
        ("empty last", vec![first(), packet(Op::RC_SEND_LAST, p + 1, 0)]),
        ("last too long", vec![first(), packet(Op::RC_SEND_LAST, p + 1, MTU + 4)]),
        ("only too long", vec![packet(Op::RC_SEND_ONLY, p, MTU + 4)]),
        (
            "WRITE only of another length",
            vec![packet(Op::RC_WRITE_ONLY, p, 8).reth(0x1000, OPEN, 12)],
        ),
        ("WRITE first that is all", vec![write_first(MTU as u32)]),
        ("WRITE last too short", vec![write_first(300), packet(Op::RC_WRITE_LAST, p + 1, 40)]),
        ("WRITE last too long", vec![write_first(300), packet(Op::RC_WRITE_LAST, p + 1, 48)]),
        (
            "WRITE middle at the end",
            vec![write_first(512), packet(Op::RC_WRITE_MIDDLE, p + 1, MTU)],
        ),
        ("WRITE of more than 2^31", vec![write_first((1 << 31) + 1)]),
        (
            "READ of more than 2^31",
            vec![packet(Op::RC_READ_REQUEST, p, 0).reth(0x1000, OPEN, (1 << 31) + 1)],
        ),
        ("READ with payload", vec![packet(Op::RC_READ_REQUEST, p, 4).reth(0x1000, OPEN, 4)]),
        ("atomic with payload", vec![packet(Op::RC_FETCH_ADD, p, 4)]),
        ("unknown opcode", vec![packet(Opcode(0x1f), p, 0)]),
        ("RESYNC on RC", vec![packet(Opcode(0x15), p, 0)]),
        ("FETCH_ADD misaligned", vec![atomic(Op::RC_FETCH_ADD, 0x1004)]),
        ("CMP_SWAP misaligned", vec![atomic(Op::RC_CMP_SWAP, 0x1001)]),
        ("ATOMIC_WRITE misaligned", vec![packet(Op::RC_ATOMIC_WRITE, p, 8).reth(0x1004, OPEN, 8)]),
        ("ATOMIC_WRITE of 4", vec![packet(Op::RC_ATOMIC_WRITE, p, 4).reth(0x1000, OPEN, 4)]),
        (
            "ATOMIC_WRITE of another length",
            vec![packet(Op::RC_ATOMIC_WRITE, p, 8).reth(0x1000, OPEN, 16)],
        ),
        ("FLUSH to nowhere", vec![flush(0, 0)]),
        ("FLUSH to an unknown place", vec![flush(4, 0)]),
        ("FLUSH of an unknown extent", vec![flush(1, 2)]),
    ];
    for (what, packets) in cases {
        is_refused(what, packets, 0x61, FLUSHED);
    }
    // Nine octets, and PadCnt says that there is no pad behind them.
    let mut lab = Lab::rc();
    let mut octets = Vec::new();
    packet(Opcode::RC_SEND_ONLY, p, 0).headers.emit_packet(&[], &mut octets);
    octets.extend([0; 9 + 4]);
    lab.recv(1, 9);
    lab.take_octets(&octets, peer());
    assert_eq!(lab.answers(), [("RC_ACK", p, 0x61, 0)]);
}

#[test]
fn what_the_queue_pair_itself_does_not_allow_is_an_invalid_request() {
    use Opcode as Op;
    let p = THEIRS;
    let cases = [
        ("WRITE", packet(Op::RC_WRITE_ONLY, p, 4).reth(0x1000, OPEN, 4)),
        ("empty WRITE", packet(Op::RC_WRITE_ONLY, p, 0).reth(0, 0, 0)),
        ("READ", packet(Op::RC_READ_REQUEST, p, 0).reth(0x1000, OPEN, 4)),
        ("ATOMIC_WRITE", packet(Op::RC_ATOMIC_WRITE, p, 8).reth(0x1000, OPEN, 8)),
        ("FETCH_ADD", packet(Op::RC_FETCH_ADD, p, 0)),
        ("FLUSH", {
            let visible = Feth::new(Placement::GLOBAL_VISIBILITY, Selectivity::RANGE);
            packet(Op::RC_FLUSH, p, 0).reth(0x1000, OPEN, 4).with(|h| h.feth = Some(visible))
        }),
    ];
    for (what, packet) in cases {
        let lab = Lab::with(QpType::Rc, |attr| attr.access = Some(Access::empty()));
        is_refused_by(lab, what, vec![packet], 0x61, FLUSHED);
    }
    // Two READs are served at a time: the third asks for too much.
    let mut lab = Lab::rc();
    for n in 0..3 {
        lab.take(packet(Op::RC_READ_REQUEST, p + n, 0).reth(0x1000, OPEN, 4));
    }
    let answers: Vec<_> = lab.answers().iter().map(|a| (a.0, a.1, a.2)).collect();
    let only = "RC_READ_RESP_ONLY";
    assert_eq!(answers, [(only, p, 0x1f), (only, p + 1, 0x1f), ("RC_ACK", p + 2, 0x61)]);
}

#[test]
fn accesses_that_are_refused() {
    use Opcode as Op;
    let p = THEIRS;
    // Key, domain, rights, bounds below and above, wrap.
    let places = |wrong_right| {
        [
            (0x1000, 0xdead),
            (0x1000, FOREIGN),
            (0x1000, wrong_right),
            (0xff8, OPEN),
            (0x1ffc, OPEN),
            (u64::MAX - 7, OPEN),
        ]
    };
    for (va, key) in places(READABLE) {
        let what = format!("{va:#x} {key:#x}");
        let write = packet(Op::RC_WRITE_ONLY, p, 16).reth(va, key, 16);
        is_refused(&format!("WRITE {what}"), vec![write], 0x62, FLUSHED);
        // All of it is checked before the first packet is placed.
        let write = packet(Op::RC_WRITE_FIRST, p, MTU).reth(va, key, 4096);
        is_refused(&format!("long WRITE {what}"), vec![write], 0x62, FLUSHED);
    }
    for (va, key) in places(WRITABLE) {
        let what = format!("READ {va:#x} {key:#x}");
        let read = packet(Op::RC_READ_REQUEST, p, 0).reth(va, key, 16);
        is_refused(&what, vec![read], 0x62, FLUSHED);
    }
    for (va, key) in
        [(0x1000, 0xdead), (0x1000, FOREIGN), (0x1000, READABLE), (0xff8, OPEN), (0x2000, OPEN)]
    {
        for op in [Op::RC_FETCH_ADD, Op::RC_CMP_SWAP] {
            let atomic =
                packet(op, p, 0).with(|h| h.atomic_eth = Some(AtomicEth::new(va, RKey(key), 1, 0)));
            is_refused(&format!("{op:?} {va:#x} {key:#x}"), vec![atomic], 0x62, FLUSHED);
        }
        let write = packet(Op::RC_ATOMIC_WRITE, p, 8).reth(va, key, 8);
        is_refused(&format!("ATOMIC_WRITE {va:#x} {key:#x}"), vec![write], 0x62, FLUSHED);
        let feth = Feth::new(Placement::GLOBAL_VISIBILITY, Selectivity::RANGE);
        let flush = packet(Op::RC_FLUSH, p, 0).reth(va, key, 8).with(|h| h.feth = Some(feth));
        is_refused(&format!("FLUSH {va:#x} {key:#x}"), vec![flush], 0x62, FLUSHED);
    }
    for key in [0xdead, OPEN] {
        let send = packet(Op::RC_SEND_ONLY_INV, p, 4).with(|h| h.ieth = Some(Ieth::new(RKey(key))));
        is_refused("SEND with invalidate", vec![send], 0x62, FLUSHED);
    }
}

#[test]
fn nothing_is_asked_of_an_access_of_length_zero() {
    use Opcode as Op;
    let p = THEIRS;
    let mut lab = Lab::rc();
    lab.recv(1, 0);
    lab.take(packet(Op::RC_WRITE_ONLY, p, 0).reth(77, 0xdead, 0));
    lab.take(packet(Op::RC_READ_REQUEST, p + 1, 0).reth(77, 0xdead, 0));
    lab.take(
        packet(Op::RC_WRITE_ONLY_IMM, p + 2, 0)
            .reth(77, 0xdead, 0)
            .with(|h| h.immdt = Some(ImmDt::new(5))),
    );
    let sent = lab.answers();
    let read = ("RC_READ_RESP_ONLY", p + 1, 0x1f, 2);
    assert_eq!(sent, [("RC_ACK", p, 0x1f, 1), read, ("RC_ACK", p + 2, 0x1f, 3)]);
    let wc = lab.wcs()[0];
    assert_eq!((wc.id, wc.opcode, wc.imm), (1, WcOpcode::RECV_IMM, Some(Imm::from_u32(5))));
}

#[test]
fn receives_that_do_not_take_the_message() {
    let p = THEIRS;
    let long = vec![
        packet(Opcode::RC_SEND_FIRST, p, MTU),
        packet(Opcode::RC_SEND_MIDDLE, p + 1, MTU),
        packet(Opcode::RC_SEND_LAST, p + 2, 89),
    ];
    is_refused("longer than the receive", long, 0x61, WcStatus::LOC_LEN_ERR);

    let mut lab = Lab::rc();
    let sealed = Sge::new(0, 100, LKey(SEALED));
    lab.qp.post_recv(RecvWr::new(1, [local(0, 100), sealed]), 0).unwrap();
    lab.recv(2, 1);
    let before = lab.mem.bytes(LOCAL);
    lab.take(packet(Opcode::RC_SEND_ONLY, p, 150));
    assert_eq!(lab.answers(), [("RC_ACK", p, 0x63, 0)]);
    assert_eq!(lab.statuses(), [(1, WcStatus::LOC_PROT_ERR), (2, FLUSHED)]);
    assert!(lab.mem.bytes(LOCAL) == before, "not even the piece that could be written");
}

#[test]
fn no_receive_makes_the_peer_wait() {
    let p = THEIRS;
    let mut lab = Lab::with(QpType::Rc, |attr| attr.min_rnr_timer = Some(17));
    lab.take(packet(Opcode::RC_SEND_FIRST, p, MTU));
    lab.take(packet(Opcode::RC_SEND_LAST, p + 1, 4));
    // What follows on its heels makes no second NAK.
    assert_eq!(lab.answers(), [("RC_ACK", p, 0x31, 0)]);
    lab.recv(1, 600);
    lab.take(packet(Opcode::RC_SEND_FIRST, p, MTU));
    lab.take(packet(Opcode::RC_SEND_LAST, p + 1, 4));
    assert_eq!(lab.answers(), [("RC_ACK", p + 1, 0x1f, 1)]);
    // A WRITE with immediate places nothing of the packet that has to come again.
    let write = |psn| {
        packet(Opcode::RC_WRITE_ONLY_IMM, psn, 8)
            .reth(0x1000, OPEN, 8)
            .with(|h| h.immdt = Some(ImmDt::new(9)))
    };
    lab.take(write(p + 2));
    assert_eq!(lab.answers(), [("RC_ACK", p + 2, 0x31, 1)]);
    assert_eq!(lab.mem.bytes(OPEN)[..8], [0; 8]);
    lab.recv(2, 0);
    lab.take(write(p + 2));
    assert_eq!(lab.answers(), [("RC_ACK", p + 2, 0x1f, 2)]);
    assert_eq!(lab.mem.bytes(OPEN)[..8], [1, 2, 3, 4, 5, 6, 7, 8]);
    let wcs = lab.wcs();
    assert_eq!(wcs.iter().map(|wc| (wc.id, wc.byte_len)).collect::<Vec<_>>(), [(1, 260), (2, 8)]);
    assert_eq!(lab.stats().rnr_naks_sent, 2);
}

#[test]
fn a_gap_is_told_once() {
    let p = THEIRS;
    let mut lab = Lab::rc();
    for id in 0..4 {
        lab.recv(id, 8);
    }
    for n in [0, 2, 3] {
        lab.take(packet(Opcode::RC_SEND_ONLY, p + n, 4));
    }
    assert_eq!(lab.answers(), [("RC_ACK", p + 1, 0x60, 1)]);
    lab.take(packet(Opcode::RC_SEND_ONLY, p + 3, 4));
    assert_eq!(lab.answers(), []);
    for n in [1, 2] {
        lab.take(packet(Opcode::RC_SEND_ONLY, p + n, 4));
    }
    // A batch is acknowledged once.
    assert_eq!(lab.answers(), [("RC_ACK", p + 2, 0x1f, 3)]);
    // The next gap is another one.
    lab.take(packet(Opcode::RC_SEND_ONLY, p + 4, 4));
    assert_eq!(lab.answers(), [("RC_ACK", p + 3, 0x60, 3)]);
    assert_eq!(lab.wcs().len(), 3);
}

/// A packet overtaken by the next one, both in one batch: the next one is dropped, and the NAK that
/// says so goes out though the ACK of the late one follows.
#[test]
fn a_gap_that_is_filled_at_once_is_told_too() {
    let p = THEIRS;
    let mut lab = Lab::rc();
    for id in 0..6 {
        lab.recv(id, 8);
    }
    for n in [1, 0] {
        lab.take(packet(Opcode::RC_SEND_ONLY, p + n, 4));
    }
    assert_eq!(lab.answers(), [("RC_ACK", p, 0x60, 0), ("RC_ACK", p, 0x1f, 1)]);
    // Of several gaps the last one tells of all before.
    for n in [2, 1, 3, 2, 4] {
        lab.take(packet(Opcode::RC_SEND_ONLY, p + n, 4));
    }
    assert_eq!(lab.answers(), [("RC_ACK", p + 3, 0x60, 3)]);
}

#[test]
fn what_comes_again_is_answered_and_not_done_again() {
    use Opcode as Op;
    let p = THEIRS;
    let mut lab = Lab::rc();
    lab.recv(1, 8);
    lab.recv(2, 8);
    let send = || packet(Op::RC_SEND_ONLY, p, 4);
    let write = || packet(Op::RC_WRITE_ONLY, p + 1, 8).reth(0x1000, OPEN, 8);
    let add = |psn| {
        packet(Op::RC_FETCH_ADD, psn, 0)
            .with(|h| h.atomic_eth = Some(AtomicEth::new(0x1010, RKey(OPEN), 5, 0)))
    };
    let word = || packet(Op::RC_ATOMIC_WRITE, p + 3, 8).reth(0x1018, OPEN, 8);
    lab.take(send());
    lab.take(write());
    lab.take(add(p + 2));
    lab.take(word());
    lab.take(packet(Op::RC_READ_REQUEST, p + 4, 0).reth(0x1000, READABLE, 1000));
    let first = lab.sent();
    let names: Vec<_> = first.iter().map(|out| (out.name(), out.psn())).collect();
    let response = [
        ("RC_READ_RESP_FIRST", p + 4),
        ("RC_READ_RESP_MIDDLE", p + 5),
        ("RC_READ_RESP_MIDDLE", p + 6),
        ("RC_READ_RESP_LAST", p + 7),
    ];
    assert_eq!(
        names[..3],
        [("RC_ACK", p + 1), ("RC_ATOMIC_ACK", p + 2), ("RC_READ_RESP_ONLY", p + 3)]
    );
    assert_eq!(names[3..], response);
    assert_eq!(first[6].payload, [9; 1000 - 3 * MTU]);

    // Somebody changes what was written: to write again would show.
    lab.mem.add(OPEN, PD, Access::all(), 0x1000, vec![0x55; 4096]);
    lab.take(send());
    lab.take(write());
    // All that came before is acknowledged, in one ACK.
    assert_eq!(lab.answers(), [("RC_ACK", p + 7, 0x1f, 5)]);
    lab.take(add(p + 2));
    lab.take(word());
    let again = lab.sent();
    assert_eq!(again[0].answer(), ("RC_ATOMIC_ACK", p + 2, 0x1f, 3));
    assert_eq!(again[0].headers.atomic_ack_eth, Some(AtomicAckEth::new(0)));
    assert_eq!(again[1].answer(), ("RC_READ_RESP_ONLY", p + 3, 0x1f, 4));
    assert!(lab.mem.bytes(OPEN) == vec![0x55; 4096]);
    // A READ from its middle on.
    let at = 0x1000 + 2 * MTU as u64;
    lab.take(packet(Op::RC_READ_REQUEST, p + 6, 0).reth(at, READABLE, 1000 - 512));
    assert_eq!(lab.names(), [("RC_READ_RESP_FIRST", p + 6), ("RC_READ_RESP_LAST", p + 7)]);
    // One that asks for more than was asked for is no repetition.
    lab.take(packet(Op::RC_READ_REQUEST, p + 6, 0).reth(at, READABLE, 1000));
    assert_eq!(lab.names(), []);
    // One whose memory is gone: the peer has it, or never will. That is no reason to break.
    lab.mem.remove(READABLE);
    lab.take(packet(Op::RC_READ_REQUEST, p + 6, 0).reth(at, READABLE, 1000 - 512));
    assert_eq!((lab.names(), lab.qp.state()), (vec![], QpState::Rts));
    // Only as many results are kept as were agreed on.
    lab.take(add(p + 8));
    lab.take(add(p + 9));
    assert_eq!(lab.sent().len(), 2);
    lab.take(add(p + 2));
    assert_eq!(lab.names(), []);
    assert_eq!(lab.wcs().len(), 1);
}

#[test]
fn memory_that_goes_while_it_is_read() {
    let p = THEIRS;
    let mut lab = Lab::rc();
    lab.take(packet(Opcode::RC_READ_REQUEST, p, 0).reth(0x1000, READABLE, 4));
    lab.mem.remove(READABLE);
    assert_eq!(lab.answers(), [("RC_ACK", p, 0x62, 1)]);
    assert_eq!(lab.qp.state(), QpState::Err);
}

#[test]
fn packets_that_are_for_somebody_else() {
    let mut lab = Lab::rc();
    lab.recv(1, 8);
    let send = || packet(Opcode::RC_SEND_ONLY, THEIRS, 4);
    lab.take(send().with(|h| h.bth.pkey = 0x1234.into()));
    lab.take(send().with(|h| h.bth.flags |= 1));
    lab.take(packet(Opcode::UC_SEND_ONLY, THEIRS, 4));
    let mut octets = Vec::new();
    send().headers.emit_packet(&[0; 4], &mut octets);
    octets.extend([0; 4]);
    lab.take_octets(&octets, "192.0.2.9:4791".parse().unwrap());
    assert_eq!((lab.names(), lab.stats().malformed), (vec![], 4));
    // Both limited members: no.
    lab.qp.modify(&QpAttr { pkey: Some(PKey(0x7fff)), ..QpAttr::default() }).unwrap();
    lab.take(send().with(|h| h.bth.pkey = 0x7fff.into()));
    assert_eq!((lab.names(), lab.stats().malformed), (vec![], 5));
    // From another port, and one limited member: yes.
    octets[2..4].copy_from_slice(&[0xff, 0xff]);
    lab.take_octets(&octets, "192.0.2.2:69".parse().unwrap());
    assert_eq!(lab.answers(), [("RC_ACK", THEIRS, 0x1f, 1)]);
    assert_eq!(lab.wcs().len(), 1);
}

// ------------------------------------------------------------------------------ the requester

/// Four signalled SENDs of 600 octets: three packets each.
fn four_sends() -> Lab {
    let mut lab = Lab::rc();
    for id in 0..4 {
        lab.post(SendWr::send(id, [local(0, 600)]));
    }
    lab
}

fn ours_at(n: u32) -> u32 {
    (OURS + n) & 0xff_ffff
}

#[test]
fn each_nak_has_its_status() {
    for (syndrome, status) in [
        (0x61, WcStatus::REM_INV_REQ_ERR),
        (0x62, WcStatus::REM_ACCESS_ERR),
        (0x63, WcStatus::REM_OP_ERR),
    ] {
        let mut lab = four_sends();
        lab.recv(9, 8);
        assert_eq!(lab.sent().len(), 12);
        // In the middle of the second message: the first one is done.
        lab.take(nak(ours_at(4), syndrome));
        let wcs = lab.wcs();
        let told: Vec<_> = wcs.iter().map(|wc| (wc.id, wc.status)).collect();
        let ok = WcStatus::SUCCESS;
        assert_eq!(told, [(0, ok), (1, status), (2, FLUSHED), (3, FLUSHED), (9, FLUSHED)]);
        assert_eq!(wcs[1].vendor_err, u32::from(syndrome));
        assert_eq!(lab.qp.poll_event(), Some(Event::Error(Reason::Requester)));
        assert_eq!((lab.qp.state(), lab.names()), (QpState::Err, vec![]));
        // In the error state work is taken and flushed.
        lab.post(SendWr::send(5, [local(0, 600)]));
        lab.recv(6, 1);
        assert_eq!(lab.statuses(), [(5, FLUSHED), (6, FLUSHED)]);
        assert_eq!(lab.qp.poll_timeout(), None);
    }
    // Codes that no responder of RC has, and reserved syndromes, say nothing.
    for syndrome in [0x64, 0x7f, 0x40, 0x9f] {
        let mut lab = four_sends();
        lab.sent();
        lab.take(nak(ours_at(4), syndrome));
        assert_eq!((lab.wcs(), lab.qp.state()), (vec![], QpState::Rts));
        assert_eq!(lab.stats().malformed, 1);
    }
}

#[test]
fn a_gap_is_filled_from_the_packet_that_is_missing() {
    let mut lab = four_sends();
    assert_eq!(lab.sent().len(), 12);
    lab.take(nak(ours_at(4), 0x60));
    let names = lab.names();
    assert_eq!(names.len(), 8);
    let (middle, last) = ("RC_SEND_MIDDLE", "RC_SEND_LAST");
    assert_eq!(names[..2], [(middle, ours_at(4)), (last, ours_at(5))]);
    assert_eq!(lab.statuses(), [(0, WcStatus::SUCCESS)]);
    // Told again, as a network does that repeats: it is on its way.
    lab.take(nak(ours_at(4), 0x60));
    assert_eq!(lab.names(), []);
    assert_eq!(lab.stats().packets_resent, 8);
    // Cumulative, and in the middle of a message.
    lab.take(ack(ours_at(9)));
    assert_eq!(lab.statuses(), [(1, WcStatus::SUCCESS), (2, WcStatus::SUCCESS)]);
    // Ghosts: behind what is acknowledged, and beyond what was sent.
    for psn in [ours_at(3), ours_at(9), ours_at(12), ours_at(500)] {
        lab.take(ack(psn));
        lab.take(nak(psn, 0x62));
    }
    assert_eq!((lab.wcs(), lab.stats().ghosts), (vec![], 8));
    lab.take(ack(ours_at(11)));
    assert_eq!(lab.statuses(), [(3, WcStatus::SUCCESS)]);
    assert_eq!(lab.qp.poll_timeout(), None);
}

#[test]
fn silence_is_borne_as_often_as_was_agreed() {
    let timeout = Duration::from_nanos(4096 << 10);
    let mut lab = four_sends();
    assert_eq!(lab.sent().len(), 12);
    lab.wait(timeout - Duration::from_nanos(1));
    assert_eq!(lab.sent().len(), 0);
    lab.wait(Duration::from_nanos(1));
    assert_eq!(lab.sent().len(), 12);
    // Progress starts the count again.
    lab.take(ack(ours_at(2)));
    for _ in 0..2 {
        lab.wait(timeout);
        assert_eq!(lab.sent().len(), 9);
    }
    lab.wait(timeout);
    assert_eq!(
        lab.statuses(),
        [(0, WcStatus::SUCCESS), (1, WcStatus::RETRY_EXC_ERR), (2, FLUSHED), (3, FLUSHED)]
    );
    assert_eq!(lab.stats().timeouts, 4);
    // A time of 0 is for ever.
    let mut lab = Lab::with(QpType::Rc, |attr| attr.timeout = Some(0));
    lab.post(SendWr::send(1, []));
    assert_eq!((lab.sent().len(), lab.qp.poll_timeout()), (1, None));
}

#[test]
fn a_peer_without_receives_is_waited_for() {
    let mut lab = four_sends();
    lab.sent();
    for tried in 0..3 {
        lab.take(nak(ours_at(3), 0x20 | 5));
        if tried == 2 {
            break;
        }
        // Twice told, and the gap behind it: still one wait.
        lab.take(nak(ours_at(3), 0x20 | 5));
        lab.take(nak(ours_at(3), 0x60));
        assert_eq!(lab.sent().len(), 0);
        let wait = Duration::from_micros(rnr_micros(5).into());
        assert_eq!(lab.qp.poll_timeout(), Some(lab.now + wait));
        lab.wait(wait);
        assert_eq!(lab.sent().len(), 9);
    }
    assert_eq!(
        lab.statuses(),
        [(0, WcStatus::SUCCESS), (1, WcStatus::RNR_RETRY_EXC_ERR), (2, FLUSHED), (3, FLUSHED)]
    );
    // 7 is for ever.
    let mut lab = Lab::with(QpType::Rc, |attr| attr.rnr_retry = Some(7));
    lab.post(SendWr::send(1, []));
    for _ in 0..50 {
        assert_eq!(lab.sent().len(), 1);
        lab.take(nak(ours_at(0), 0x20));
        lab.wait(Duration::from_micros(655_360));
    }
    assert_eq!(lab.qp.state(), QpState::Rts);
}

#[test]
fn a_read_goes_on_where_responses_are_missing() {
    let mut lab = Lab::rc();
    lab.post(SendWr::send(0, []));
    lab.post(SendWr::read(1, [local(0, 600), local(1000, 424)], remote(OPEN)));
    lab.post(SendWr::send(2, []));
    let sent = lab.sent();
    assert_eq!((sent[1].psn(), sent[2].psn()), (ours_at(1), ours_at(5)));
    let response = |opcode, n: u32, byte: u8| {
        let mut packet = packet(opcode, ours_at(1 + n), MTU).aeth(0x1f, 1);
        packet.payload.fill(byte);
        packet
    };
    // The first response acknowledges the SEND in front.
    lab.take(response(Opcode::RC_READ_RESP_FIRST, 0, 0xa0));
    assert_eq!(lab.statuses(), [(0, WcStatus::SUCCESS)]);
    // The second is lost: the third says so, and asks once.
    lab.take(response(Opcode::RC_READ_RESP_MIDDLE, 2, 0xa2));
    let again = lab.sent();
    let place = Reth::new(0x1000 + 256, RKey(OPEN), 768);
    assert_eq!((again[0].name(), again[0].psn()), ("RC_READ_REQUEST", ours_at(2)));
    assert_eq!((again[0].headers.reth, again.len()), (Some(place), 2));
    lab.take(response(Opcode::RC_READ_RESP_LAST, 3, 0xa3));
    assert_eq!(lab.names(), []);
    for (n, opcode) in [
        (1, Opcode::RC_READ_RESP_FIRST),
        (2, Opcode::RC_READ_RESP_MIDDLE),
        (3, Opcode::RC_READ_RESP_LAST),
    ] {
        lab.take(response(opcode, n, 0xa0 + n as u8));
    }
    assert_eq!(lab.statuses(), [(1, WcStatus::SUCCESS)]);
    let memory = lab.mem.bytes(LOCAL);
    assert_eq!([memory[0], memory[256], memory[599], memory[1000]], [0xa0, 0xa1, 0xa2, 0xa2]);
    assert_eq!((memory[600], memory[1423]), (600u32 as u8, 0xa3));
    lab.take(ack(ours_at(5)));
    assert_eq!(lab.statuses(), [(2, WcStatus::SUCCESS)]);

    // An ACK behind a READ that has no answer implies that it is lost.
    lab.post(SendWr::read(3, [local(0, 8)], remote(OPEN)));
    lab.post(SendWr::send(4, []));
    lab.sent();
    lab.take(ack(ours_at(7)));
    assert_eq!(lab.names(), [("RC_READ_REQUEST", ours_at(6)), ("RC_SEND_ONLY", ours_at(7))]);
    assert_eq!(lab.wcs(), []);
}

#[test]
fn responses_that_are_wrong() {
    // Too short: the peer cannot count.
    let mut lab = Lab::rc();
    lab.post(SendWr::read(1, [local(0, 600)], remote(OPEN)));
    lab.sent();
    lab.take(packet(Opcode::RC_READ_RESP_FIRST, ours_at(0), 100).aeth(0x1f, 1));
    assert_eq!(lab.statuses(), [(1, WcStatus::BAD_RESP_ERR)]);
    // To another kind of request: no answer at all.
    let mut lab = Lab::rc();
    lab.post(SendWr::send(1, []));
    lab.sent();
    lab.take(packet(Opcode::RC_READ_RESP_ONLY, ours_at(0), 0).aeth(0x1f, 1));
    lab.take(packet(Opcode::RC_ATOMIC_ACK, ours_at(0), 0).aeth(0x1f, 1));
    assert_eq!((lab.wcs(), lab.stats().malformed), (vec![], 2));
    // The sink is gone.
    let mut lab = Lab::rc();
    lab.post(SendWr::read(1, [local(0, 100)], remote(OPEN)));
    lab.sent();
    lab.mem.remove(LOCAL);
    lab.take(packet(Opcode::RC_READ_RESP_ONLY, ours_at(0), 100).aeth(0x1f, 1));
    assert_eq!(lab.statuses(), [(1, WcStatus::LOC_ACCESS_ERR)]);
}

#[test]
fn local_memory_that_cannot_be_used_fails_in_its_turn() {
    let wrong = [
        SendWr::send(2, [Sge::new(4090, 100, LKey(LOCAL))]),
        SendWr::write(2, [Sge::new(0, 4, LKey(FOREIGN))], remote(OPEN)),
        SendWr::read(2, [Sge::new(0, 4, LKey(SEALED))], remote(OPEN)),
        SendWr::fetch_add(2, Sge::new(0, 8, LKey(SEALED)), remote(OPEN), 1),
        SendWr::new(2, SendOp::LocalInv(RKey(OPEN)), []),
    ];
    for wr in wrong {
        let mut lab = Lab::rc();
        lab.post(SendWr::send(1, []));
        lab.post(wr.clone());
        lab.post(SendWr::send(3, []));
        assert_eq!(lab.names(), [("RC_SEND_ONLY", ours_at(0))], "{wr:?}");
        assert_eq!((lab.wcs(), lab.qp.state()), (vec![], QpState::Rts));
        lab.take(ack(ours_at(0)));
        assert_eq!(lab.names(), []);
        let ok = WcStatus::SUCCESS;
        let told = lab.statuses();
        assert_eq!(told, [(1, ok), (2, WcStatus::LOC_PROT_ERR), (3, FLUSHED)], "{wr:?}");
    }
}

#[test]
fn what_waits_for_what() {
    // A fence waits for READs, two of which may be on the way.
    let mut lab = Lab::rc();
    for id in 0..3 {
        lab.post(SendWr::read(id, [local(0, 4)], remote(OPEN)));
    }
    lab.post(SendWr::send(3, []).with_flags(SendFlags::FENCE));
    let read = "RC_READ_REQUEST";
    assert_eq!(lab.names(), [(read, ours_at(0)), (read, ours_at(1))]);
    let answer = |n| packet(Opcode::RC_READ_RESP_ONLY, ours_at(n), 4).aeth(0x1f, 1);
    lab.take(answer(0));
    assert_eq!(lab.names(), [(read, ours_at(2))]);
    lab.take(answer(1));
    assert_eq!(lab.names(), []);
    lab.take(answer(2));
    assert_eq!(lab.names(), [("RC_SEND_ONLY", ours_at(3))]);
    // A local invalidate waits for everything.
    lab.post(SendWr::new(4, SendOp::LocalInv(RKey(MORTAL)), []));
    assert_eq!((lab.names(), lab.wcs().len()), (vec![], 3));
    lab.take(ack(ours_at(3)));
    assert_eq!(lab.names(), []);
    let wcs = lab.wcs();
    assert_eq!((wcs[0].id, wcs[1].id, wcs[1].opcode), (3, 4, WcOpcode::LOCAL_INV));
}

#[test]
fn credits_are_kept_to() {
    let mut lab = Lab::rc();
    lab.post(SendWr::send(0, []));
    lab.sent();
    // The peer has two receives more.
    lab.take(packet(Opcode::RC_ACK, ours_at(0), 0).aeth(credit_code(2), 1));
    for id in 1..5 {
        lab.post(SendWr::send(id, []));
    }
    lab.post(SendWr::write(5, [local(0, 4)], remote(OPEN)));
    assert_eq!(lab.sent().len(), 2);
    // None left: one at a time finds out.
    lab.take(packet(Opcode::RC_ACK, ours_at(2), 0).aeth(credit_code(0), 3));
    assert_eq!(lab.names(), [("RC_SEND_ONLY", ours_at(3))]);
    // No credits given: no limit.
    lab.take(ack(ours_at(3)));
    assert_eq!(lab.names(), [("RC_SEND_ONLY", ours_at(4)), ("RC_WRITE_ONLY", ours_at(5))]);
}

#[test]
fn the_window_is_kept_and_acknowledgements_are_asked_for() {
    let mut lab = Lab::rc();
    lab.qp.set_window(Window { packets: 200, octets: 1 << 20 });
    lab.post(SendWr::write(1, [local(0, 4096); 16], remote(OPEN)));
    let sent = lab.sent();
    // At least every 64th packet asks; the last one before the window is shut need not, as long as
    // an acknowledgement is to come.
    assert_eq!(sent.len(), 200);
    let asking: Vec<_> = (0..sent.len()).filter(|&i| sent[i].ask()).collect();
    assert_eq!(asking, [63, 127, 191]);
    lab.take(ack(ours_at(63)));
    let next: Vec<_> = lab.sent().iter().map(Out::ask).collect();
    assert_eq!((next.len(), next.iter().position(|&ask| ask)), (56, Some(55)));
    // Octets count too, and one packet always goes.
    let mut lab = Lab::rc();
    lab.qp.set_window(Window { packets: 100, octets: 1000 });
    lab.post(SendWr::write(1, [local(0, 4096)], remote(OPEN)));
    let sent = lab.sent();
    assert_eq!((sent.len(), sent[2].ask()), (3, true));
    lab.qp.set_window(Window { packets: 1, octets: 1 });
    lab.take(ack(ours_at(2)));
    assert_eq!(lab.names(), [("RC_WRITE_MIDDLE", ours_at(3))]);
    // A READ is asked for in pieces that the window bounds, and goes on from where it was cut.
    let mut lab = Lab::rc();
    lab.qp.set_window(Window { packets: 8, octets: 1 << 20 });
    lab.post(SendWr::read(1, [local(0, 3000)], remote(OPEN)));
    let pieces: Vec<_> =
        lab.sent().iter().map(|out| (out.psn(), out.headers.reth.unwrap())).collect();
    assert_eq!(
        pieces,
        [
            (ours_at(0), Reth::new(0x1000, RKey(OPEN), 1024)),
            (ours_at(4), Reth::new(0x1400, RKey(OPEN), 1024)),
        ]
    );
}

#[test]
fn trains_are_of_equal_packets() {
    let mut lab = Lab::rc();
    lab.qp.set_window(Window { packets: 1000, octets: 1 << 24 });
    // SENDs of whole packets run on across messages.
    for id in 0..4 {
        lab.post(SendWr::send(id, [local(0, 1024)]));
    }
    assert_eq!(lab.sent().len(), 16);
    assert_eq!(std::mem::take(&mut lab.trains), [16]);
    // The first packet of a WRITE is longer: it takes one more with it.
    lab.post(SendWr::write(4, [local(0, 2048)], remote(OPEN)));
    assert_eq!(lab.sent().len(), 8);
    assert_eq!(std::mem::take(&mut lab.trains), [2, 6]);
    // Small ones share a train, as many as the kernel cuts.
    for id in 5..105 {
        lab.post(SendWr::inline(id, SendOp::Write(remote(OPEN)), &[1; 8]));
    }
    assert_eq!(lab.sent().len(), 100);
    assert_eq!(std::mem::take(&mut lab.trains), [100]);
}

#[test]
fn posts_that_are_refused_at_the_call() {
    let mut lab = Lab::rc();
    let sink = local(0, 8);
    let odd = RemoteAddr::new(0x1004, RKey(OPEN));
    let unsupported = [
        SendWr::new(1, SendOp::Imm(Imm(1)), []),
        SendWr::new(1, SendOp::FetchAdd { remote: remote(OPEN), add: 1, mask: 2 }, [sink]),
        SendWr::new(
            1,
            SendOp::CmpSwap {
                remote: remote(OPEN),
                compare: 1,
                swap: 2,
                compare_mask: 0,
                swap_mask: u64::MAX,
            },
            [sink],
        ),
    ];
    for wr in unsupported {
        let refused = lab.qp.post_send(wr, 0);
        assert!(matches!(refused, Err(PostError::Unsupported { .. })), "{refused:?}");
    }
    let dest = UdDest { addr: peer(), qpn: Qpn(1), qkey: QKey(1) };
    let huge = vec![local(0, 1 << 30), local(0, 1 << 30), local(0, 1)];
    let invalid = [
        SendWr::fetch_add(1, sink, odd, 1),
        SendWr::cmp_swap(1, sink, odd, 1, 2),
        SendWr::atomic_write(1, odd, [0; 8]),
        SendWr::fetch_add(1, local(0, 4), remote(OPEN), 1),
        SendWr::inline(1, SendOp::AtomicWrite(remote(OPEN)), &[0; 7]),
        SendWr::inline(1, SendOp::Read(remote(OPEN)), &[0; 7]),
        SendWr::flush(1, remote(OPEN), 8, Placement::empty()),
        SendWr::new(1, SendOp::LocalInv(RKey(1)), [sink]),
        SendWr::send(1, []).to(dest),
        SendWr::send(1, huge),
        SendWr::send(1, [sink; 17]),
        SendWr::inline(1, SendOp::Send, &[0; 257]),
    ];
    for wr in invalid {
        assert!(lab.qp.post_send(wr.clone(), 0).is_err(), "{wr:?}");
    }
    for id in 0..128 {
        lab.post(SendWr::send(id, []));
    }
    let full = lab.qp.post_send(SendWr::send(1, []), 0);
    assert_eq!(full, Err(PostError::QueueFull { max: 128 }));
    let mut lab = Lab::with(QpType::Rc, |attr| attr.max_rd_atomic = Some(0));
    assert!(lab.qp.post_send(SendWr::read(1, [sink], remote(OPEN)), 0).is_err());
    let mut lab = Lab::new(QpType::Uc);
    for op in [SendOp::Read(remote(OPEN)), SendOp::SendInv(RKey(1))] {
        let refused = lab.qp.post_send(SendWr::new(1, op, []), 0);
        assert!(matches!(refused, Err(PostError::Unsupported { .. })), "{refused:?}");
    }
    let mut lab = Lab::new(QpType::Ud);
    let write = lab.qp.post_send(SendWr::new(1, SendOp::Write(remote(OPEN)), []).to(dest), 0);
    assert!(matches!(write, Err(PostError::Unsupported { .. })));
    assert!(lab.qp.post_send(SendWr::send(1, []), 0).is_err());
    assert_eq!(
        lab.qp.post_send(SendWr::send(1, [local(0, 257)]).to(dest), 0),
        Err(PostError::TooLong { max: 256, have: 257 })
    );
    let six = UdDest { addr: "[::1]:4791".parse().unwrap(), ..dest };
    assert!(lab.qp.post_send(SendWr::send(1, []).to(six), 0).is_err());
}

#[test]
fn states_follow_one_another() {
    use QpState::{Err, Init, Reset, Rtr, Rts, Sqd};
    let new = || Qp::new(Config::new(QpType::Rc, PdId(PD), Qpn(0x11)));
    let mut qp = new();
    assert_eq!(qp.post_recv(RecvWr::new(1, []), 0), Result::Err(PostError::BadState(Reset)));
    for to in [Rtr, Rts, Sqd] {
        let refused = qp.modify(&QpAttr { state: Some(to), ..attributes() });
        assert_eq!(refused, Result::Err(ModifyError::Transition { from: Reset, to }));
    }
    qp.modify(&QpAttr::to(Init)).unwrap();
    qp.post_recv(RecvWr::new(1, []), 0).unwrap();
    assert_eq!(qp.post_send(SendWr::send(1, []), 0), Result::Err(PostError::BadState(Init)));
    for (attribute, attr) in [
        ("local", QpAttr { local: None, ..attributes() }),
        ("peer", QpAttr { peer: None, ..attributes() }),
        ("dest_qp", QpAttr { dest_qp: None, ..attributes() }),
        ("path_mtu", QpAttr { path_mtu: None, ..attributes() }),
        ("rq_psn", QpAttr { rq_psn: None, ..attributes() }),
    ] {
        let refused = qp.modify(&QpAttr { state: Some(Rtr), ..attr });
        assert_eq!(refused, Result::Err(ModifyError::Missing { attribute, to: Rtr }));
    }
    let six = "[::1]:4791".parse().unwrap();
    let refused = qp.modify(&QpAttr { state: Some(Rtr), peer: Some(six), ..attributes() });
    assert!(matches!(refused, Result::Err(ModifyError::Family { .. })));
    let refused = qp.modify(&QpAttr { retry_cnt: Some(8), ..QpAttr::default() });
    let error = ModifyError::Range { attribute: "retry_cnt", found: 8, max: 7 };
    assert_eq!(refused, Result::Err(error));
    qp.modify(&QpAttr { state: Some(Rtr), sq_psn: None, ..attributes() }).unwrap();
    let missing = ModifyError::Missing { attribute: "sq_psn", to: Rts };
    assert_eq!(qp.modify(&QpAttr::to(Rts)), Result::Err(missing));
    let late = ModifyError::Late { attribute: "rq_psn", state: Rtr };
    let psn = Some(Psn::new(1));
    assert_eq!(qp.modify(&QpAttr { rq_psn: psn, ..QpAttr::default() }), Result::Err(late));
    qp.modify(&QpAttr { sq_psn: psn, ..QpAttr::to(Rts) }).unwrap();
    assert_eq!(qp.state(), Rts);
    qp.modify(&QpAttr::to(Err)).unwrap();
    let wc = qp.poll_completion().unwrap().wc;
    assert_eq!((wc.id, wc.status), (1, FLUSHED));
    assert_eq!(qp.poll_event(), Some(Event::Error(Reason::Asked)));
    qp.modify(&QpAttr::to(Reset)).unwrap();
    assert_eq!((qp.state(), qp.stats().packets_sent), (Reset, 0));
    // UD asks for its Q_Key first, and for no peer.
    let mut qp = Qp::new(Config::new(QpType::Ud, PdId(PD), Qpn(0x11)));
    let missing = ModifyError::Missing { attribute: "qkey", to: Init };
    assert_eq!(qp.modify(&QpAttr::to(Init)), Result::Err(missing));
}

#[test]
fn the_send_queue_drains() {
    let mut lab = Lab::rc();
    lab.qp.set_window(Window { packets: 2, octets: 1 << 20 });
    lab.post(SendWr::send(1, [local(0, 600)]));
    lab.post(SendWr::send(2, []));
    assert_eq!(lab.sent().len(), 2);
    lab.qp.modify(&QpAttr::to(QpState::Sqd)).unwrap();
    lab.post(SendWr::send(3, []));
    // What was begun is finished, nothing new starts.
    lab.take(ack(ours_at(1)));
    assert_eq!(lab.names(), [("RC_SEND_LAST", ours_at(2))]);
    assert_eq!(lab.qp.poll_event(), None);
    lab.take(ack(ours_at(2)));
    assert_eq!(lab.names(), []);
    assert_eq!(lab.qp.poll_event(), Some(Event::Drained));
    lab.qp.modify(&QpAttr::to(QpState::Rts)).unwrap();
    assert_eq!(lab.names(), [("RC_SEND_ONLY", ours_at(3)), ("RC_SEND_ONLY", ours_at(4))]);
}

#[test]
fn the_first_packet_is_told() {
    let mut qp = Qp::new(Config::new(QpType::Rc, PdId(PD), Qpn(0x11)));
    qp.modify(&QpAttr::to(QpState::Init)).unwrap();
    qp.modify(&QpAttr { state: Some(QpState::Rtr), ..attributes() }).unwrap();
    let mut lab = Lab { qp, ..Lab::rc() };
    lab.recv(1, 8);
    lab.take(packet(Opcode::RC_SEND_ONLY, THEIRS, 4));
    lab.take(packet(Opcode::RC_SEND_ONLY, THEIRS, 4));
    assert_eq!(lab.qp.poll_event(), Some(Event::Established));
    assert_eq!(lab.qp.poll_event(), None);
    // It answers before it may send.
    assert_eq!(lab.answers(), [("RC_ACK", THEIRS, 0x1f, 1)]);
}

// -------------------------------------------------------------------------------- UC and UD

#[test]
fn uc_gives_up_what_has_a_gap() {
    use Opcode as Op;
    let mut lab = Lab::new(QpType::Uc);
    for id in 1..4 {
        lab.recv(id, 600);
    }
    lab.take(packet(Op::UC_SEND_FIRST, 5, MTU));
    // One is missing: the rest is dropped, and the receive is used again.
    lab.take(packet(Op::UC_SEND_MIDDLE, 7, MTU));
    lab.take(packet(Op::UC_SEND_LAST, 8, 4));
    lab.take(packet(Op::UC_SEND_FIRST, 20, MTU));
    lab.take(packet(Op::UC_SEND_LAST, 21, 4));
    // A message that stops in the middle of a WRITE leaves the next one alone.
    lab.take(packet(Op::UC_WRITE_FIRST, 22, MTU).reth(0x1000, OPEN, 300));
    let write = packet(Op::UC_WRITE_ONLY_IMM, 24, 4).reth(0x1004, OPEN, 4);
    lab.take(write.with(|h| h.immdt = Some(ImmDt::new(3))));
    // What RC would refuse is dropped: wrong key, too long, wrong shape.
    lab.take(packet(Op::UC_WRITE_ONLY, 25, 4).reth(0x1000, 0xdead, 4));
    lab.take(packet(Op::UC_SEND_FIRST, 26, MTU));
    lab.take(packet(Op::UC_SEND_MIDDLE, 27, MTU));
    lab.take(packet(Op::UC_SEND_LAST, 28, MTU));
    lab.take(packet(Op::UC_SEND_FIRST, 29, 4));
    lab.take(packet(Op::UC_SEND_ONLY, 30, 4));
    lab.take(packet(Op::UC_SEND_ONLY, 31, 4));
    let told: Vec<_> = lab.wcs().iter().map(|wc| (wc.id, wc.opcode, wc.byte_len)).collect();
    let (recv, imm) = (WcOpcode::RECV, WcOpcode::RECV_IMM);
    assert_eq!(told, [(1, recv, 260), (2, imm, 4), (3, recv, 4)]);
    let stats = lab.stats();
    assert_eq!((stats.no_receive, stats.malformed, stats.access_errors), (1, 2, 1));
    assert_eq!((lab.names(), lab.qp.state()), (vec![], QpState::Rts));

    // What is sent is done.
    lab.post(SendWr::write(7, [local(0, 600)], remote(OPEN)));
    lab.post(SendWr::new(8, SendOp::SendImm(1), []));
    let names = lab.names();
    let expected = ["UC_WRITE_FIRST", "UC_WRITE_MIDDLE", "UC_WRITE_LAST", "UC_SEND_ONLY_IMM"];
    assert_eq!(names.iter().map(|n| n.0).collect::<Vec<_>>(), expected);
    assert_eq!(lab.statuses(), [(7, WcStatus::SUCCESS), (8, WcStatus::SUCCESS)]);
    assert_eq!(lab.qp.poll_timeout(), None);
}

#[test]
fn ud_takes_what_has_its_key() {
    let mut lab = Lab::new(QpType::Ud);
    let deth = |qkey| Some(Deth::new(QKey(qkey), Qpn(0x33)));
    let datagram = |qkey, len| {
        packet(Opcode::UD_SEND_ONLY_IMM, 9, len).with(|h| {
            h.deth = deth(qkey);
            h.immdt = Some(ImmDt::new(4));
        })
    };
    lab.take(datagram(0x1111, 8));
    assert_eq!(lab.stats().no_receive, 1);
    lab.recv(1, 47);
    lab.take(datagram(0x1111, 8));
    assert_eq!(lab.stats().no_receive, 2, "no room for the GRH and the payload");
    lab.take(datagram(0x1112, 4));
    lab.take(datagram(0x1111, MTU + 4));
    assert_eq!(lab.stats().malformed, 2);
    lab.take(datagram(0x1111, 7));
    let wc = lab.wcs()[0];
    assert_eq!((wc.id, wc.byte_len, wc.src_qp), (1, 47, Some(Qpn(0x33))));
    assert_eq!(wc.imm, Some(Imm::from_u32(4)));
    let memory = lab.mem.bytes(LOCAL);
    assert_eq!(memory[40..47], [1, 2, 3, 4, 5, 6, 7]);
    assert_eq!(memory[..20], [0; 20]);
    // An IPv4 header: BTH 12, DETH 8, immediate 4, payload and pad 8, ICRC 4, UDP 8, IP 20.
    let ip = &memory[20..40];
    assert_eq!((ip[0], ip[1], ip[2..4].to_vec(), ip[9]), (0x45, 2, vec![0, 64], 17));
    assert_eq!(
        (ip[12..16].to_vec(), ip[16..20].to_vec()),
        (vec![192, 0, 2, 2], vec![192, 0, 2, 1])
    );
    let words = ip.chunks(2).map(|w| u32::from(u16::from_be_bytes([w[0], w[1]])));
    let sum: u32 = words.sum();
    assert_eq!((sum & 0xffff) + (sum >> 16), 0xffff, "the checksum is right");

    // Each says where it goes; the upper bit of a Q_Key asks for our own.
    let to = |n: u8, qkey| UdDest {
        addr: SocketAddr::from(([192, 0, 2, n], 4791)),
        qpn: Qpn(n.into()),
        qkey: QKey(qkey),
    };
    lab.post(SendWr::inline(1, SendOp::Send, b"ab").to(to(7, 0x2222)));
    lab.post(SendWr::inline(2, SendOp::SendImm(8), b"").to(to(8, 0x8000_0000)));
    let sent = lab.sent();
    assert_eq!(sent[0].headers.deth, Some(Deth::new(QKey(0x2222), Qpn(0x11))));
    assert_eq!(sent[1].headers.deth, Some(Deth::new(QKey(0x1111), Qpn(0x11))));
    assert_eq!((sent[0].headers.bth.dest_qp(), sent[0].payload.as_slice()), (Qpn(7), &b"ab"[..]));
    assert_eq!(lab.trains, [1, 1], "one peer, one train");
    assert_eq!(lab.statuses(), [(1, WcStatus::SUCCESS), (2, WcStatus::SUCCESS)]);
}

#[test]
fn ud_over_ipv6_has_the_header_that_brought_it() {
    let ends = ["[2001:db8::1]:4791", "[2001:db8::2]:4791"].map(|addr| addr.parse().unwrap());
    let mut lab = Lab::with(QpType::Ud, |attr| (attr.local, attr.peer) = (Some(ends[0]), None));
    lab.recv(1, 44);
    let mut octets = Vec::new();
    let datagram = packet(Opcode::UD_SEND_ONLY, 9, 4)
        .with(|h| h.deth = Some(Deth::new(QKey(0x1111), Qpn(0x33))));
    let (mut headers, payload) = (datagram.headers, datagram.payload);
    headers.emit_packet(&payload, &mut octets);
    octets.extend([0; 4]);
    lab.take_octets(&octets, ends[1]);
    assert_eq!((lab.wcs().len(), lab.mem.bytes(LOCAL)[40..44].to_vec()), (1, payload));
    let memory = lab.mem.bytes(LOCAL);
    // Version, ECN, 8 + 12 + 8 + 4 + 4 octets behind it, UDP.
    assert_eq!(memory[..8], [0x60, 0x20, 0, 0, 0, 36, 17, 0]);
    assert_eq!((memory[8], memory[23], memory[24], memory[39]), (0x20, 2, 0x20, 1));
}

// ---------------------------------------------------------------------------- anything at all

/// Packets of every kind, most of them nearly right, at a queue pair at work: nothing panics, no
/// memory is written that may not be, every work request is told once.
#[test]
fn any_packets_do_no_harm() {
    let (mut broken, mut done) = (0, 0);
    for seed in 0..3_000 {
        let mut rng = Rng::new(seed);
        let kind = [QpType::Rc, QpType::Rc, QpType::Uc, QpType::Ud][rng.below(4) as usize];
        let mut lab = Lab::new(kind);
        let untouched = [FOREIGN, READABLE, SEALED].map(|key| lab.mem.bytes(key));
        let dest = (kind == QpType::Ud).then(|| UdDest {
            addr: peer(),
            qpn: Qpn(0x22),
            qkey: QKey(0x1111),
        });
        let (mut sends, mut receives) = (0, 0);
        for _ in 0..40 {
            let word = local(rng.below(500) * 8, 8);
            let piece = local(rng.below(2000), rng.below(2000) as u32);
            let op = match rng.below(8) {
                0 | 1 => SendWr::send(sends, [piece]),
                2 => SendWr::write(sends, [piece], remote(OPEN)),
                3 => SendWr::read(sends, [piece], remote(OPEN)),
                4 => SendWr::fetch_add(sends, word, remote(OPEN), 1),
                5 => SendWr::atomic_write(sends, remote(OPEN), [1; 8]),
                6 => SendWr::flush(sends, remote(OPEN), 8, Placement::PERSISTENCE),
                _ => SendWr::new(sends, SendOp::SendImm(7), []),
            };
            let post = SendWr { dest, ..op };
            sends += u64::from(rng.one_in(2) && lab.qp.post_send(post, 0).is_ok());
            if rng.one_in(2) {
                lab.recv(1000 + receives, rng.below(700) as u32);
                receives += 1;
            }
            let sent = lab.sent();
            // Near what is expected: requests of the peer, and answers to what was sent.
            let base = match sent.last() {
                Some(last) if rng.one_in(2) => last.psn(),
                _ if rng.one_in(4) => rng.draw() as u32,
                _ => THEIRS + rng.below(20) as u32,
            };
            let rows = userdma_proto::wire::roce::opcode::TABLE;
            let opcode = match rng.below(10) {
                0 => Opcode(rng.draw() as u8),
                1 => rows[rng.below(rows.len() as u64) as usize].opcode,
                _ => Opcode(rng.below(0x1e) as u8 | [0, 0, 0x20, 0x60][rng.below(4) as usize]),
            };
            let len = [0, 4, 8, 256, rng.below(300) as usize][rng.below(5) as usize];
            let key = [OPEN, OPEN, OPEN, FOREIGN, READABLE, SEALED, 1][rng.below(7) as usize];
            let va = 0x1000 + [0, 8, 16, rng.below(5000)][rng.below(4) as usize];
            let whole = [len as u32, 0, 600, rng.draw() as u32][rng.below(4) as usize];
            let made = packet(opcode, base.wrapping_add(rng.below(3) as u32), len)
                .reth(va, key, whole)
                .aeth([0x1f, 0x1f, 0x25, 0x60, rng.draw() as u8][rng.below(5) as usize], 0)
                .with(|h| {
                    h.deth = Some(Deth::new(QKey(0x1111), Qpn(3)));
                    h.atomic_eth = Some(AtomicEth::new(va, RKey(key), 3, 4));
                    h.atomic_ack_eth = Some(AtomicAckEth::new(5));
                    h.feth =
                        Some(Feth::new(Placement::GLOBAL_VISIBILITY, Selectivity(key as u8 & 1)));
                    h.immdt = Some(ImmDt::new(6));
                    h.ieth = Some(Ieth::new(RKey(key)));
                });
            lab.take(made);
            if rng.one_in(3) {
                lab.wait(Duration::from_millis(rng.below(20)));
            }
        }
        broken += u64::from(lab.qp.state() == QpState::Err);
        lab.qp.modify(&QpAttr::to(QpState::Err)).unwrap();
        assert_eq!(lab.qp.poll_timeout(), None);
        let wcs = lab.wcs();
        done += wcs.iter().filter(|wc| wc.status.is_ok()).count();
        let ids = |recv| wcs.iter().filter(move |wc| wc.opcode.is_recv() == recv).map(|wc| wc.id);
        assert!(ids(false).eq(0..sends), "seed {seed}: each send once, in order");
        assert!(ids(true).eq(1000..1000 + receives), "seed {seed}: each receive too");
        assert!([FOREIGN, READABLE, SEALED].map(|key| lab.mem.bytes(key)) == untouched);
    }
    assert!(broken > 500 && done > 5_000, "{broken} {done}");
}

/// What follows on the heels of a message without a receive says nothing new; what comes when the
/// peer has waited was sent again, and a gap then is a loss.
#[test]
fn a_loss_after_the_wait_for_a_receive_is_told() {
    let only = |n| packet(Opcode::RC_SEND_ONLY, THEIRS + n, 4);
    let mut lab = Lab::rc();
    lab.take(only(0));
    lab.take(only(1));
    assert_eq!(lab.answers(), [("RC_ACK", THEIRS, 0x2c, 0)]);
    lab.recv(1, 4);
    let wait = Duration::from_micros(rnr_micros(12).into());
    lab.wait(wait - Duration::from_nanos(1));
    lab.take(only(2));
    assert_eq!(lab.answers(), []);
    // The first packet is lost when it is sent again.
    lab.wait(Duration::from_nanos(1));
    lab.take(only(1));
    assert_eq!(lab.answers(), [("RC_ACK", THEIRS, 0x60, 0)]);
    lab.take(only(2));
    assert_eq!(lab.answers(), [], "told once");
    lab.take(only(0));
    assert_eq!(lab.answers(), [("RC_ACK", THEIRS, 0x1f, 1)]);
    assert_eq!(lab.statuses(), [(1, WcStatus::SUCCESS)]);

    // And the peer that is told so does not wait for a time-out.
    let mut lab = four_sends();
    assert_eq!(lab.sent().len(), 12);
    lab.take(nak(ours_at(0), 0x2c));
    lab.take(nak(ours_at(0), 0x60));
    assert_eq!(lab.names(), [], "it waits");
    lab.wait(wait);
    assert_eq!(lab.sent().len(), 12);
    lab.take(nak(ours_at(0), 0x60));
    assert_eq!((lab.sent().len(), lab.stats().timeouts), (12, 0));
}

/// A window that shrinks in the middle of a message leaves nobody without an acknowledgement.
#[test]
fn a_window_may_become_smaller_at_any_time() {
    let mut lab = Lab::rc();
    lab.post(SendWr::send(1, [local(0, 10 * MTU as u32)]));
    let mut train = Train::default();
    assert!(lab.qp.poll_transmit(lab.now, &lab.mem, 4 * MTU, &mut train));
    let gone = train.packets() as u32;
    assert!((2..5).contains(&gone), "{gone}");
    lab.qp.set_window(Window { packets: 1, octets: 1 });
    let sent = lab.sent();
    let [asks] = &sent[..] else { panic!("{} packets", sent.len()) };
    assert!((asks.psn(), asks.ask()) == (ours_at(gone), true), "{asks:?}");
    for n in gone..10 {
        lab.take(ack(ours_at(n)));
        let next: Vec<_> = lab.sent().iter().map(|out| (out.psn(), out.ask())).collect();
        let expected: &[_] = if n < 9 { &[(ours_at(n + 1), true)] } else { &[] };
        assert_eq!(next, expected);
    }
    assert_eq!(lab.statuses(), [(1, WcStatus::SUCCESS)]);
    assert_eq!((lab.stats().timeouts, lab.stats().packets_resent), (0, 0));
}

/// Of a whole region neither address nor length count, its key, domain and rights do.
#[test]
fn a_flush_of_a_whole_region_has_no_address() {
    let flush = |psn, va, key, len| {
        packet(Opcode::RC_FLUSH, psn, 0).reth(va, key, len).with(|h| {
            h.feth = Some(Feth::new(Placement::GLOBAL_VISIBILITY, Selectivity::REGION));
        })
    };
    let mut lab = Lab::rc();
    let ranges = [(0, 0), (0x1000, 4096), (0x5000, 1), (u64::MAX, u32::MAX)];
    for (psn, (va, len)) in (THEIRS..).zip(ranges) {
        lab.take(flush(psn, va, OPEN, len));
        let [(name, at, syndrome, _)] = lab.answers()[..] else { panic!("one answer") };
        assert_eq!((name, at, syndrome), ("RC_READ_RESP_ONLY", psn, 0x1f), "{va:#x}, {len}");
    }
    for key in [0xdead, FOREIGN, READABLE] {
        let what = format!("{key:#x}");
        is_refused(&what, vec![flush(THEIRS, 0x1000, key, 4)], 0x62, FLUSHED);
    }
}

/// A READ without its answer, and a request behind it that the peer refuses.
fn doomed(timeout: u8) -> Lab {
    let mut lab = Lab::with(QpType::Rc, |attr| attr.timeout = Some(timeout));
    lab.post(SendWr::read(1, [local(0, 8)], remote(OPEN)));
    lab.post(SendWr::write(2, [local(0, 8)], remote(OPEN)));
    lab.post(SendWr::write(3, [local(0, 8)], remote(OPEN)));
    lab.post(SendWr::send(4, []));
    assert_eq!(lab.sent().len(), 4);
    lab.take(nak(ours_at(2), 0x62));
    lab
}

#[test]
fn what_is_refused_fails_in_its_turn() {
    let ok = WcStatus::SUCCESS;
    let answer = |n: u32| packet(Opcode::RC_READ_RESP_ONLY, ours_at(n), 8).aeth(0x1f, 1);
    // The READ is asked for again, and nothing is sent from what was refused on.
    let before = [("RC_READ_REQUEST", ours_at(0)), ("RC_WRITE_ONLY", ours_at(1))];
    let mut lab = doomed(10);
    assert_eq!((lab.wcs(), lab.names()), (vec![], before.to_vec()));
    lab.post(SendWr::send(5, []));
    assert_eq!(lab.names(), []);
    // The peer says so again, and is heard once.
    lab.take(nak(ours_at(2), 0x62));
    assert_eq!((lab.wcs(), lab.names()), (vec![], vec![]));
    lab.take(answer(0));
    let expected = [(1, ok), (2, ok), (3, WcStatus::REM_ACCESS_ERR), (4, FLUSHED), (5, FLUSHED)];
    let wcs = lab.wcs();
    assert_eq!(wcs.iter().map(|wc| (wc.id, wc.status)).collect::<Vec<_>>(), expected);
    assert_eq!((wcs[2].vendor_err, lab.qp.state()), (0x62, QpState::Err));

    // No answer: its retries run out, and what the peer said is told with that.
    let given_up = [(1, WcStatus::RETRY_EXC_ERR), (2, FLUSHED), (3, FLUSHED), (4, FLUSHED)];
    let mut lab = doomed(10);
    for _ in 0..3 {
        assert_eq!((lab.names(), lab.wcs()), (before.to_vec(), vec![]));
        lab.wait(Duration::from_nanos(4096 << 10));
    }
    let wcs = lab.wcs();
    assert_eq!(wcs.iter().map(|wc| (wc.id, wc.status)).collect::<Vec<_>>(), given_up);
    assert_eq!((wcs[0].vendor_err, lab.stats().timeouts), (0x62, 3));
    // Who never gives up would wait for ever.
    let mut lab = doomed(0);
    assert_eq!(lab.statuses(), given_up);

    // A READ of which a part came, and the rest is refused, fails by itself.
    let mut lab = Lab::rc();
    lab.post(SendWr::read(1, [local(0, 600)], remote(OPEN)));
    lab.sent();
    lab.take(nak(ours_at(2), 0x62));
    assert_eq!(lab.statuses(), [(1, WcStatus::REM_ACCESS_ERR)]);
}

/// With a peer that keeps what comes out of order, as we do.
fn orderly(change: impl FnOnce(&mut Config)) -> Lab {
    let mut config = Config::new(QpType::Rc, PdId(PD), Qpn(0x11));
    change(&mut config);
    let mut lab = Lab::rc();
    lab.qp = Qp::new(config);
    let mut attr = QpAttr { out_of_order: Some(true), ..attributes() };
    for state in [QpState::Init, QpState::Rtr, QpState::Rts] {
        lab.qp.modify(&QpAttr { state: Some(state), ..attr }).unwrap();
        attr = QpAttr::default();
    }
    lab
}

fn quiet(packet: In) -> In {
    packet.with(|headers| headers.bth = headers.bth.with_ack_req(false))
}

#[test]
fn what_comes_too_early_is_kept_and_has_its_turn() {
    let only = |n| packet(Opcode::RC_SEND_ONLY, THEIRS + n, 4 + n as usize);
    let nak_at = |n, msn| ("RC_ACK", THEIRS + n, 0x60, msn);
    let mut lab = orderly(|_| {});
    (0..9).for_each(|id| lab.recv(id, 20));
    // 0, 2 and 5 are missing; what comes twice is one.
    for n in [1, 3, 4, 3, 6] {
        lab.take(only(n));
    }
    assert_eq!((lab.answers(), lab.wcs()), (vec![nak_at(0, 0)], vec![]));
    assert_eq!((lab.stats().out_of_order, lab.stats().kept), (5, 4));
    // The peer sent what it knew of, asks, and is told what else is missing.
    lab.take(only(0));
    assert_eq!(lab.answers(), [nak_at(2, 2)]);
    // One that does not ask may be the first of several.
    lab.take(quiet(only(2)));
    assert_eq!(lab.answers(), [("RC_ACK", THEIRS + 4, 0x1f, 5)], "what was kept did ask");
    lab.take(only(7));
    assert_eq!(lab.answers(), [nak_at(5, 5)]);
    lab.take(only(5));
    assert_eq!(lab.answers(), [("RC_ACK", THEIRS + 7, 0x1f, 8)]);
    let done: Vec<_> = lab.wcs().iter().map(|wc| (wc.id, wc.byte_len)).collect();
    assert_eq!(done, (0..8).map(|n| (n, 4 + n as u32)).collect::<Vec<_>>());
    assert_eq!((lab.stats().duplicates, lab.stats().malformed), (0, 0));
    // What was kept and comes again is a duplicate.
    lab.take(only(6));
    assert_eq!(lab.answers(), [("RC_ACK", THEIRS + 7, 0x1f, 8)]);
    assert_eq!((lab.stats().duplicates, lab.wcs()), (1, vec![]));
}

#[test]
fn what_is_kept_has_bounds() {
    let only = |n, len| packet(Opcode::RC_SEND_ONLY, THEIRS + n, len);
    let mut lab = orderly(|config| config.max_kept = 2);
    (0..9).for_each(|id| lab.recv(id, 256));
    [3, 2, 1].into_iter().for_each(|n| lab.take(only(n, 4)));
    lab.take(packet(Opcode::RC_ACK, THEIRS + 4, 0).aeth(0x1f, 0));
    assert_eq!((lab.stats().kept, lab.stats().out_of_order), (2, 3));
    lab.sent();
    lab.take(only(0, 4));
    assert_eq!(lab.answers(), [("RC_ACK", THEIRS + 1, 0x60, 1)]);
    lab.take(only(1, 4));
    assert_eq!(lab.answers(), [("RC_ACK", THEIRS + 3, 0x1f, 4)]);

    let mut lab = orderly(|config| config.max_kept_octets = 1000);
    (1..9).for_each(|n| lab.take(only(n, 256)));
    assert!((1..=3).contains(&lab.stats().kept), "{}", lab.stats().kept);
    // Too far ahead, or without an opcode that is known.
    let mut lab = orderly(|_| {});
    lab.take(only(1 << 16, 4));
    lab.take(packet(Opcode(0x1f), THEIRS + 1, 4));
    assert_eq!(lab.stats().kept, 0);
}

/// What has its turn is what it always is: it may find no receive, be refused, take many numbers.
#[test]
fn what_is_kept_is_judged_in_its_turn() {
    let mut lab = orderly(|_| {});
    lab.take(packet(Opcode::RC_READ_REQUEST, THEIRS + 1, 0).reth(0x1000, OPEN, 600));
    lab.take(packet(Opcode::RC_SEND_ONLY, THEIRS + 4, 4));
    lab.take(packet(Opcode::RC_WRITE_ONLY, THEIRS + 5, 4).reth(0x1000, OPEN, 4));
    lab.sent();
    lab.take(packet(Opcode::RC_WRITE_ONLY, THEIRS, 4).reth(0x1000, OPEN, 4));
    let of = |out: &Out| (out.psn() - THEIRS, out.headers.aeth.map(|aeth| aeth.syndrome));
    let answers: Vec<_> = lab.sent().iter().map(of).collect();
    // The READ's responses, and that there is no receive.
    assert_eq!(answers, [(1, Some(0x1f)), (2, None), (3, Some(0x1f)), (4, Some(0x2c))]);
    lab.recv(1, 4);
    lab.take(packet(Opcode::RC_SEND_ONLY, THEIRS + 4, 4));
    assert_eq!(lab.answers(), [("RC_ACK", THEIRS + 5, 0x1f, 4)]);

    let mut lab = orderly(|_| {});
    lab.recv(1, 4);
    lab.take(packet(Opcode::RC_WRITE_ONLY, THEIRS + 1, 4).reth(0x1000, 0xdead, 4));
    lab.take(packet(Opcode::RC_SEND_ONLY, THEIRS + 2, 4));
    lab.sent();
    lab.take(packet(Opcode::RC_WRITE_ONLY, THEIRS, 4).reth(0x1000, OPEN, 4));
    assert_eq!(lab.answers(), [("RC_ACK", THEIRS + 1, 0x62, 1)]);
    assert_eq!((lab.qp.state(), lab.statuses()), (QpState::Err, vec![(1, FLUSHED)]));
}

/// Four messages of three packets each, on the way.
fn four_sends_on_the_way() -> Lab {
    let mut lab = orderly(|_| {});
    for id in 0..4 {
        lab.post(SendWr::send(id, [local(0, 3 * MTU as u32)]));
    }
    assert_eq!(lab.sent().len(), 12);
    lab
}

impl Lab {
    /// PSN, and whether an acknowledgement is asked for.
    fn asks(&mut self) -> Vec<(u32, bool)> {
        self.sent().iter().map(|out| (out.psn(), out.ask())).collect()
    }
}

#[test]
fn only_what_is_missing_is_sent_again() {
    let at = ours_at;
    let mut lab = four_sends_on_the_way();
    lab.take(nak(at(4), 0x60));
    assert_eq!(lab.asks(), [(at(4), true)]);
    lab.take(nak(at(4), 0x60));
    assert_eq!(lab.asks(), [], "told twice");
    // What is new goes on behind what was sent.
    lab.post(SendWr::send(4, [local(0, 2 * MTU as u32)]));
    assert_eq!(lab.asks(), [(at(12), false), (at(13), true)]);
    // Something else is missing.
    lab.take(nak(at(8), 0x60));
    assert_eq!(lab.asks(), [(at(8), true)]);
    lab.take(ack(at(13)));
    let done: Vec<_> = (0..5).map(|id| (id, WcStatus::SUCCESS)).collect();
    assert_eq!((lab.statuses(), lab.qp.poll_timeout()), (done, None));
    assert_eq!((lab.stats().packets_resent, lab.stats().sequence_naks_received), (2, 2));

    // Many in a row: more at a time.
    let mut lab = four_sends_on_the_way();
    for (from, to) in [(1, 2), (2, 4), (4, 8), (8, 12)] {
        lab.take(nak(at(from), 0x60));
        let expected: Vec<_> = (from..to).map(|n| (at(n), n + 1 == to || n % 3 == 2)).collect();
        assert_eq!(lab.asks(), expected);
    }
    // Silence: the answer to one packet tells what is missing. Again: everything from there.
    lab.wait(Duration::from_nanos(4096 << 10));
    assert_eq!(lab.asks(), [(at(8), true)]);
    lab.wait(Duration::from_nanos(4096 << 10));
    assert_eq!((lab.sent().len(), lab.stats().timeouts), (4, 2));
    lab.take(ack(at(11)));
    assert_eq!(lab.statuses().len(), 4);
}

/// What was lost at the end shows when what was missing before it is there.
#[test]
fn a_tail_that_is_lost_is_found() {
    let at = ours_at;
    let mut lab = four_sends_on_the_way();
    lab.take(nak(at(4), 0x60));
    lab.sent();
    // The rest is lost: had it come, something would be missing, or all be there.
    lab.take(ack(at(6)));
    assert_eq!(lab.asks(), [(at(7), true)]);
    lab.take(ack(at(7)));
    assert_eq!(lab.asks(), [(at(8), true), (at(9), true)]);
    lab.take(ack(at(9)));
    assert_eq!(lab.asks(), [(at(10), false), (at(11), true)]);
    lab.take(ack(at(11)));
    assert_eq!((lab.statuses().len(), lab.stats().timeouts), (4, 0));

    // An answer goes first, and the acknowledgement says nothing else than that.
    let atomic = |id| {
        let op = SendOp::FetchAdd { remote: remote(OPEN), add: 1, mask: 0 };
        SendWr::new(id, op, [local(0, 8)])
    };
    let answer = |n| {
        packet(Opcode::RC_ATOMIC_ACK, at(n), 0)
            .aeth(0x1f, 1)
            .with(|h| h.atomic_ack_eth = Some(AtomicAckEth::new(7)))
    };
    let mut lab = orderly(|_| {});
    [SendWr::send(0, []), atomic(1), SendWr::send(2, [])].into_iter().for_each(|wr| lab.post(wr));
    assert_eq!(lab.sent().len(), 3);
    lab.take(nak(at(0), 0x60));
    assert_eq!(lab.asks(), [(at(0), true)]);
    lab.take(answer(1));
    assert_eq!(lab.asks(), []);
    lab.take(ack(at(1)));
    assert_eq!(lab.asks(), [(at(2), true)]);
    // What was missing is answered itself: no acknowledgement follows.
    let mut lab = orderly(|_| {});
    [atomic(0), SendWr::send(1, [])].into_iter().for_each(|wr| lab.post(wr));
    assert_eq!(lab.sent().len(), 2);
    lab.take(nak(at(0), 0x60));
    assert_eq!(lab.asks(), [(at(0), true)]);
    lab.take(answer(0));
    assert_eq!(lab.asks(), [(at(1), true)]);
    // Where something else is missing, this is what the peer says next.
    lab.take(nak(at(1), 0x60));
    assert_eq!(lab.asks(), []);
}

/// Answers are taken in order only: after one that is lost everything is asked for again.
#[test]
fn a_lost_answer_goes_back_to_it() {
    let mut lab = orderly(|_| {});
    lab.post(SendWr::read(1, [local(0, 8)], remote(OPEN)));
    lab.post(SendWr::send(2, [local(0, 8)]));
    lab.post(SendWr::send(3, [local(0, 8)]));
    assert_eq!(lab.sent().len(), 3);
    lab.take(nak(ours_at(2), 0x60));
    assert_eq!(lab.sent().len(), 3);
    // A wait for a receive, too.
    lab.take(packet(Opcode::RC_READ_RESP_ONLY, ours_at(0), 8).aeth(0x1f, 1));
    lab.take(nak(ours_at(1), 0x21));
    lab.wait(Duration::from_micros(10));
    assert_eq!(lab.sent().len(), 2);
    lab.take(ack(ours_at(2)));
    assert_eq!(lab.statuses().len(), 3);
}
