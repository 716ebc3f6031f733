//! One RoCE queue pair in situations that random runs seldom reach: answers asked for again while
//! others wait, credits of a message half done, a key that goes while its octets are in a train.

use std::net::SocketAddr;

use userdma_proto::{
    mem::PdId,
    roce::{Config, PathMtu, Qp, QpAttr, Received, Train, Window},
    time::Instant,
    verbs::{Access, QpState, QpType, RecvWr, RemoteAddr, SendOp, SendWr, Sge, WcStatus},
    wire::{
        ids::{LKey, PKey, Psn, Qpn, RKey},
        roce::{
            Headers, Packet,
            aeth::{Aeth, Syndrome},
            atomic::AtomicEth,
            bth::Bth,
            opcode::Opcode,
            reth::Reth,
        },
    },
};
use userdma_tests::{PD, PlainMemory};

/// Region that the peer may do everything with, 4096 octets at 0x1000.
const OPEN: u32 = 0x100;
/// Local memory, 4096 octets at 0; it may be invalidated.
const MORTAL: u32 = 0x200;

const MTU: u32 = PathMtu::Mtu256.octets();
/// First PSN of the peer, and ours.
const THEIRS: u32 = 100;
const OURS: u32 = 500;

fn ends() -> [SocketAddr; 2] {
    ["192.0.2.1:4791", "192.0.2.2:4791"].map(|addr| addr.parse().unwrap())
}

struct Lab {
    qp: Qp,
    mem: PlainMemory,
}

impl Lab {
    fn new(kind: QpType, mtu: PathMtu, change: impl FnOnce(&mut Config)) -> Self {
        let mut config = Config::new(kind, PdId(PD), Qpn(0x11));
        change(&mut config);
        let mut qp = Qp::new(config);
        let [local, peer] = ends();
        qp.modify(&QpAttr::to(QpState::Init)).unwrap();
        let attr = QpAttr {
            local: Some(local),
            peer: Some(peer),
            dest_qp: Some(Qpn(0x22)),
            path_mtu: Some(mtu),
            rq_psn: Some(Psn::new(THEIRS)),
            max_dest_rd_atomic: Some(4),
            ..QpAttr::to(QpState::Rtr)
        };
        qp.modify(&attr).unwrap();
        let attr = QpAttr { sq_psn: Some(Psn::new(OURS)), ..QpAttr::to(QpState::Rts) };
        qp.modify(&attr).unwrap();
        let mem = PlainMemory::default();
        let all = Access::all() - Access::REMOTE_INVALIDATE;
        mem.add(OPEN, PD, all, 0x1000, vec![5; 4096]);
        let access = Access::LOCAL_WRITE | Access::REMOTE_INVALIDATE;
        mem.add(MORTAL, PD, access, 0, vec![7; 4096]);
        mem.bind(MORTAL, Qpn(0x11));
        Self { qp, mem }
    }

    fn take(&mut self, opcode: Opcode, psn: u32, set: impl FnOnce(&mut Headers)) {
        let bth = Bth::new(opcode, PKey(0xffff), Qpn(0x11), Psn::new(psn)).with_ack_req(true);
        let mut headers = Headers::new(bth);
        set(&mut headers);
        let mut octets = Vec::new();
        headers.emit_packet(&[], &mut octets);
        octets.extend([0; 4]);
        let packet = &Packet::parse(&octets).unwrap();
        let received = Received { packet, from: ends()[1], len: octets.len(), ecn: 0 };
        self.qp.handle_packet(Instant::ZERO, &received, &self.mem);
    }

    fn read(&mut self, psn: u32, va: u64, packets: u32) {
        let reth = Reth::new(va, RKey(OPEN), packets * MTU);
        self.take(Opcode::RC_READ_REQUEST, psn, |headers| headers.reth = Some(reth));
    }

    fn fetch_add(&mut self, psn: u32) {
        let eth = AtomicEth::new(0x1000, RKey(OPEN), 1, 0);
        self.take(Opcode::RC_FETCH_ADD, psn, |headers| headers.atomic_eth = Some(eth));
    }

    fn ack(&mut self, psn: u32, credits: u8) {
        let aeth = Aeth::new(Syndrome::Ack(credits), 0);
        self.take(Opcode::RC_ACK, psn, |headers| headers.aeth = Some(aeth));
    }

    fn post(&mut self, id: u64, op: SendOp, len: u32) {
        let sges = [Sge::new(0, len, LKey(MORTAL))];
        self.qp.post_send(SendWr::new(id, op, sges), 0).unwrap();
    }

    /// The next train's packets, about `budget` octets of them.
    fn train(&mut self, budget: usize) -> Vec<Headers> {
        let mut train = Train::default();
        if !self.qp.poll_transmit(Instant::ZERO, &self.mem, budget, &mut train) {
            return Vec::new();
        }
        train
            .octets()
            .chunks(train.segment_len())
            .map(|p| Packet::parse(p).unwrap().headers)
            .collect()
    }

    /// Opcode and PSN of everything that is to be sent.
    fn sent(&mut self) -> Vec<(Opcode, u32)> {
        let trains = std::iter::from_fn(|| Some(self.train(usize::MAX)).filter(|t| !t.is_empty()));
        trains.flatten().map(|h| (h.bth.opcode(), h.bth.psn().get())).collect()
    }

    fn psns(&mut self) -> Vec<u32> {
        self.sent().into_iter().map(|(_, psn)| psn).collect()
    }
}

/// IBTA vol. 1, 9.7.5: responses go out in the order of their PSNs. One that overtook another would
/// tell the peer that the other is lost.
#[test]
fn answers_asked_for_again_go_before_later_ones() {
    let mut lab = Lab::new(QpType::Rc, PathMtu::Mtu256, |_| {});
    lab.fetch_add(THEIRS);
    lab.read(THEIRS + 1, 0x1000, 3);
    lab.read(THEIRS + 4, 0x1400, 2);
    // One packet at a time: the atomic, the first READ, none of the second.
    let first: Vec<u32> = (0..4).map(|_| lab.train(1)[0].bth.psn().get()).collect();
    assert_eq!(first, [100, 101, 102, 103]);
    // All was lost from the atomic on: the peer goes back.
    lab.read(THEIRS + 2, 0x1100, 2);
    lab.fetch_add(THEIRS);
    assert_eq!(lab.psns(), [100, 102, 103, 104, 105]);
    // It is the first answer again, and the word counts once.
    assert_eq!(lab.mem.bytes(OPEN)[..8], u64::from_ne_bytes([5; 8]).wrapping_add(1).to_ne_bytes());
}

/// A READ repeated from the middle is a request of its own: its first response is a FIRST, even if
/// the one before is still being answered.
#[test]
fn a_read_repeated_while_it_is_answered_begins_with_a_first_response() {
    let mut lab = Lab::new(QpType::Rc, PathMtu::Mtu256, |_| {});
    lab.read(THEIRS, 0x1000, 5);
    let first: Vec<u32> = (0..3).map(|_| lab.train(1)[0].bth.psn().get()).collect();
    assert_eq!(first, [100, 101, 102]);
    lab.read(THEIRS + 1, 0x1100, 4);
    let (first, middle) = (Opcode::RC_READ_RESP_FIRST, Opcode::RC_READ_RESP_MIDDLE);
    let last = Opcode::RC_READ_RESP_LAST;
    assert_eq!(lab.sent(), [(first, 101), (middle, 102), (middle, 103), (last, 104)]);
    // The peer has seen more than we have sent again: nothing before is needed any more.
    lab.read(THEIRS + 1, 0x1100, 4);
    lab.read(THEIRS + 4, 0x1400, 1);
    assert_eq!(lab.sent(), [(Opcode::RC_READ_RESP_ONLY, 104)]);
}

/// An acknowledgement covers all before it, so an answer from before goes first.
#[test]
fn answers_asked_for_again_go_before_a_later_acknowledgement() {
    let mut lab = Lab::new(QpType::Rc, PathMtu::Mtu256, |_| {});
    lab.read(THEIRS, 0x1000, 2);
    assert_eq!(lab.psns(), [100, 101]);
    lab.qp.post_recv(RecvWr::new(1, []), 0).unwrap();
    lab.take(Opcode::RC_SEND_ONLY, THEIRS + 2, |_| {});
    lab.read(THEIRS + 1, 0x1100, 1);
    let (only, ack) = (Opcode::RC_READ_RESP_ONLY, Opcode::RC_ACK);
    assert_eq!(lab.sent(), [(only, 101), (ack, 102)]);
}

/// A UC message is done once it is in a train; the key of its memory must live until that is sent.
#[test]
fn a_key_is_not_revoked_while_a_train_refers_to_it() {
    let mut lab = Lab::new(QpType::Uc, PathMtu::Mtu1024, |_| {});
    lab.post(1, SendOp::Send, 3000);
    lab.qp.post_send(SendWr::new(2, SendOp::LocalInv(RKey(MORTAL)), []), 0).unwrap();
    lab.post(3, SendOp::Send, 0);
    assert_eq!(lab.train(usize::MAX).len(), 3);
    assert_eq!(lab.psns(), [OURS + 3]);
    let wcs: Vec<_> = std::iter::from_fn(|| lab.qp.poll_completion()).map(|c| c.wc).collect();
    assert_eq!(wcs.iter().map(|wc| wc.id).collect::<Vec<_>>(), [1, 2, 3]);
    assert!(wcs.iter().all(|wc| wc.status == WcStatus::SUCCESS));
}

/// A WRITE with immediate takes its receive with the last packet: credits told before count it.
#[test]
fn a_write_with_immediate_in_progress_has_not_used_its_credit() {
    let mut lab = Lab::new(QpType::Rc, PathMtu::Mtu256, |_| {});
    lab.qp.set_window(Window { packets: 1, octets: 100_000 });
    lab.post(1, SendOp::WriteImm(RemoteAddr::new(0x1000, RKey(OPEN)), 9), 2 * MTU);
    lab.post(2, SendOp::Send, 8);
    assert_eq!(lab.psns(), [OURS]);
    // One receive is posted: that of the immediate.
    lab.qp.set_window(Window { packets: 100, octets: 100_000 });
    lab.ack(OURS, 1);
    assert_eq!(lab.psns(), [OURS + 1]);
    lab.ack(OURS + 1, 1);
    assert_eq!(lab.psns(), [OURS + 2]);
}

/// What was taken at the post goes out, whatever is set after.
#[test]
fn a_queued_read_does_not_hang_when_reads_are_turned_off() {
    let mut lab = Lab::new(QpType::Rc, PathMtu::Mtu256, |_| {});
    lab.post(1, SendOp::Read(RemoteAddr::new(0x1000, RKey(OPEN))), 8);
    lab.qp.modify(&QpAttr { max_rd_atomic: Some(0), ..QpAttr::default() }).unwrap();
    assert_eq!(lab.psns(), [OURS]);
}

/// IBTA vol. 1, 9.7.7.2: every AETH of an ACK carries credits, or none does.
#[test]
fn responses_carry_credits_where_acknowledgements_do() {
    let mut lab = Lab::new(QpType::Rc, PathMtu::Mtu256, |config| config.credits = true);
    lab.qp.post_recv(RecvWr::new(1, []), 0).unwrap();
    lab.read(THEIRS, 0x1000, 1);
    lab.fetch_add(THEIRS + 1);
    let told: Vec<_> = std::iter::from_fn(|| lab.train(1).pop())
        .map(|headers| headers.aeth.unwrap().syndrome())
        .collect();
    assert_eq!(told, [Syndrome::Ack(1); 2]);
}
