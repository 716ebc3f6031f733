//! RoCE queue pairs that share their receives: whose message takes which, what an empty queue does
//! to each type, and what an end leaves in it.

use std::{
    net::SocketAddr,
    sync::{Arc, Mutex},
    time::Duration,
};

use userdma_proto::{
    mem::PdId,
    roce::{
        self, PathMtu, Port, Qp, QpAttr, Received, Train,
        port::{Accept, Connect, Event, Limits, PortError},
    },
    srq::{Receive, Receives, SharedQueue},
    time::Instant,
    verbs::{
        Access, PostError, QpState, QpType, RecvWr, RemoteAddr, SendOp, SendWr, Sge, UdDest, Wc,
        WcOpcode, WcStatus,
    },
    wire::{
        ids::{LKey, Psn, QKey, Qpn, RKey},
        mad::{
            Mad,
            cm::{Message, PortSpace},
        },
        roce::{Packet, aeth::Syndrome, opcode::Opcode},
    },
};
use userdma_tests::{PD, PlainMemory};

/// What a driver does: the queue behind a lock.
#[derive(Debug)]
struct Locked(Mutex<SharedQueue>);

impl Receives for Locked {
    fn take(&self) -> Option<Receive> {
        self.0.lock().unwrap().take()
    }
}

const INBOX: u32 = 0x4000;
const TARGET: u32 = 0x3000;
const SOURCE: u32 = 0x2000;
/// Octets of a receive; a message of 600 takes three packets.
const SLOT: u64 = 1000;
const QKEY: QKey = QKey(0x1111);

fn ends() -> [SocketAddr; 2] {
    ["192.0.2.1:4791", "192.0.2.2:4791"].map(|addr| addr.parse().unwrap())
}

struct Side {
    qp: Qp,
    mem: PlainMemory,
}

impl Side {
    fn new(kind: QpType, qpn: u32, peer: u32, [local, remote]: [SocketAddr; 2]) -> Self {
        let mut config = roce::Config::new(kind, PdId(PD), Qpn(qpn));
        config.credits = true;
        let mut qp = Qp::new(config);
        let connected = kind != QpType::Ud;
        let attr = QpAttr {
            local: Some(local),
            peer: connected.then_some(remote),
            dest_qp: connected.then_some(Qpn(peer)),
            path_mtu: Some(PathMtu::Mtu256),
            rq_psn: Some(Psn::new(7)),
            sq_psn: Some(Psn::new(7)),
            qkey: Some(QKEY),
            min_rnr_timer: Some(12),
            ..QpAttr::default()
        };
        qp.modify(&QpAttr { state: Some(QpState::Init), ..attr }).unwrap();
        qp.modify(&QpAttr::to(QpState::Rtr)).unwrap();
        qp.modify(&QpAttr::to(QpState::Rts)).unwrap();
        let mem = PlainMemory::default();
        mem.add(INBOX, PD, Access::LOCAL_WRITE, 0, vec![0; 32 * SLOT as usize]);
        mem.add(TARGET, PD, Access::REMOTE_WRITE, 0, vec![0; SLOT as usize]);
        mem.add(SOURCE, PD, Access::empty(), 0, vec![qpn as u8; SLOT as usize]);
        Self { qp, mem }
    }

    /// What it has to say, packet by packet.
    fn packets(&mut self, now: Instant) -> Vec<Vec<u8>> {
        let (mut all, mut train) = (Vec::new(), Train::default());
        while self.qp.poll_transmit(now, &self.mem, usize::MAX, &mut train) {
            all.extend(train.octets().chunks(train.segment_len()).map(<[u8]>::to_vec));
        }
        all
    }

    fn take(&mut self, now: Instant, from: SocketAddr, packets: &[Vec<u8>]) {
        for octets in packets {
            let packet = &Packet::parse(octets).unwrap();
            let received = Received { packet, from, len: octets.len(), ecn: 0 };
            self.qp.handle_packet(now, &received, &self.mem);
        }
    }

    fn wcs(&mut self) -> Vec<Wc> {
        std::iter::from_fn(|| self.qp.poll_completion()).map(|done| done.wc).collect()
    }

    /// Number and status of what is completed.
    fn statuses(&mut self) -> Vec<(u64, WcStatus)> {
        self.wcs().iter().map(|wc| (wc.id, wc.status)).collect()
    }
}

/// Senders and receivers in pairs; the receivers share one queue. The queue pairs are 0x10, 0x11, …
/// and 0x20, 0x21, ….
struct Lab {
    senders: Vec<Side>,
    receivers: Vec<Side>,
    srq: Arc<Locked>,
    now: Instant,
    kind: QpType,
}

impl Lab {
    fn new(kind: QpType, pairs: u32) -> Self {
        let srq = Arc::new(Locked(Mutex::new(SharedQueue::new(32, 1))));
        let [a, b] = ends();
        let senders = (0..pairs).map(|i| Side::new(kind, 0x10 + i, 0x20 + i, [a, b])).collect();
        let receivers = (0..pairs).map(|i| {
            let mut side = Side::new(kind, 0x20 + i, 0x10 + i, [b, a]);
            side.qp.share_receives(srq.clone()).unwrap();
            side
        });
        Self { senders, receivers: receivers.collect(), srq, now: Instant::ZERO, kind }
    }

    fn post(&self, ids: impl IntoIterator<Item = u64>) {
        for id in ids {
            let sge = Sge::new(id * SLOT, SLOT as u32, LKey(INBOX));
            self.srq.0.lock().unwrap().post(RecvWr::new(id, [sge]), 1000 + id).unwrap();
        }
    }

    fn left(&self) -> usize {
        self.srq.0.lock().unwrap().len()
    }

    /// Has a sender send `len` octets, and gives the packets.
    fn outgoing(&mut self, i: usize, len: u32) -> Vec<Vec<u8>> {
        let wr = SendWr::send(1, [Sge::new(0, len, LKey(SOURCE))]);
        let to = UdDest { addr: ends()[1], qpn: Qpn(0x20 + i as u32), qkey: QKEY };
        let wr = if self.kind == QpType::Ud { wr.to(to) } else { wr };
        self.senders[i].qp.post_send(wr, 0).unwrap();
        self.senders[i].packets(self.now)
    }

    fn take(&mut self, i: usize, packets: &[Vec<u8>]) {
        self.receivers[i].take(self.now, ends()[0], packets);
    }

    /// What the receiver answers; the sender takes it.
    fn answers(&mut self, i: usize) -> Vec<Syndrome> {
        let packets = self.receivers[i].packets(self.now);
        self.senders[i].take(self.now, ends()[1], &packets);
        let aeths = packets.iter().filter_map(|packet| Packet::parse(packet).unwrap().headers.aeth);
        aeths.map(|aeth| aeth.syndrome()).collect()
    }
}

/// Credit code 31: none are told.
const PLAIN_ACK: Syndrome = Syndrome::Ack(31);

#[test]
fn the_first_packet_decides_who_takes_the_oldest_receive() {
    for kind in [QpType::Rc, QpType::Uc] {
        let mut lab = Lab::new(kind, 3);
        lab.post(0..8);
        lab.srq.0.lock().unwrap().arm(6).unwrap();
        let streams: Vec<_> = (0..3).map(|i| lab.outgoing(i, 600)).collect();
        assert_eq!(streams[0].len(), 3);
        lab.take(1, &streams[1][..1]);
        lab.take(0, &streams[0]);
        assert!(!lab.srq.0.lock().unwrap().poll_event(), "six are left");
        lab.take(2, &streams[2][..2]);
        assert!(lab.srq.0.lock().unwrap().poll_event(), "five are left");
        assert!(!lab.srq.0.lock().unwrap().poll_event(), "told once");
        lab.take(1, &streams[1][1..]);
        lab.take(2, &streams[2][2..]);
        for (i, id) in [(0, 1), (1, 0), (2, 2)] {
            let done: Vec<_> =
                std::iter::from_fn(|| lab.receivers[i].qp.poll_completion()).collect();
            let [done] = done[..] else { panic!("{done:?}") };
            assert_eq!((done.wc.id, done.tag, done.wc.status), (id, 1000 + id, WcStatus::SUCCESS));
            assert_eq!((done.wc.qpn, done.wc.byte_len), (Qpn(0x20 + i as u32), 600));
            let at = (id * SLOT) as usize;
            assert_eq!(
                lab.receivers[i].mem.bytes(INBOX)[at..at + 601],
                [vec![0x10 + i as u8; 600], vec![0]].concat()
            );
            // Credits are on, and none are given.
            let expected: &[Syndrome] = if kind == QpType::Rc { &[PLAIN_ACK] } else { &[] };
            assert_eq!(lab.answers(i), expected);
            assert_eq!(lab.senders[i].statuses(), [(1, WcStatus::SUCCESS)]);
        }
        assert_eq!(lab.left(), 5);
    }
}

#[test]
fn rc_with_an_empty_queue_makes_the_peer_wait() {
    let mut lab = Lab::new(QpType::Rc, 2);
    let packets = lab.outgoing(0, 600);
    lab.take(0, &packets);
    assert_eq!(lab.answers(0), [Syndrome::RnrNak(12)]);
    assert_eq!(lab.receivers[0].qp.stats().rnr_naks_sent, 1);
    assert!(lab.receivers[0].wcs().is_empty());
    // What is posted meanwhile goes to who comes first.
    lab.post([3]);
    let other = lab.outgoing(1, 10);
    lab.take(1, &other);
    assert_eq!(lab.receivers[1].statuses(), [(3, WcStatus::SUCCESS)]);
    let again = |lab: &mut Lab| {
        lab.now = lab.now + Duration::from_micros(640);
        lab.senders[0].qp.handle_timeout(lab.now);
        let packets = lab.senders[0].packets(lab.now);
        assert_eq!(packets.len(), 3);
        lab.take(0, &packets);
    };
    again(&mut lab);
    assert_eq!(lab.answers(0), [Syndrome::RnrNak(12)]);
    lab.post([4]);
    again(&mut lab);
    assert_eq!(lab.answers(0), [PLAIN_ACK]);
    assert_eq!(lab.receivers[0].statuses(), [(4, WcStatus::SUCCESS)]);
    assert_eq!(lab.senders[0].statuses(), [(1, WcStatus::SUCCESS)]);
}

#[test]
fn a_write_with_immediate_takes_its_receive_with_the_last_packet() {
    for kind in [QpType::Rc, QpType::Uc] {
        let mut lab = Lab::new(kind, 1);
        let remote = RemoteAddr::new(0, RKey(TARGET));
        let wr = SendWr::new(1, SendOp::WriteImm(remote, 5), [Sge::new(0, 600, LKey(SOURCE))]);
        lab.senders[0].qp.post_send(wr, 0).unwrap();
        let packets = lab.senders[0].packets(lab.now);
        lab.take(0, &packets[..2]);
        lab.post([0]);
        lab.take(0, &packets[2..]);
        let [wc] = lab.receivers[0].wcs()[..] else { panic!("one completion") };
        assert_eq!((wc.id, wc.opcode, wc.byte_len), (0, WcOpcode::RECV_IMM, 600));
    }
}

#[test]
fn uc_and_ud_with_an_empty_queue_drop_and_count() {
    for kind in [QpType::Uc, QpType::Ud] {
        let mut lab = Lab::new(kind, 2);
        let lost = lab.outgoing(0, 200);
        lab.take(0, &lost);
        assert_eq!(lab.receivers[0].qp.stats().no_receive, 1, "{kind:?}");
        assert_eq!((lab.receivers[0].wcs(), lab.answers(0)), (vec![], vec![]));
        lab.post(0..2);
        for i in [1, 0] {
            let packets = lab.outgoing(i, 200);
            lab.take(i, &packets);
        }
        assert_eq!(lab.receivers[1].statuses(), [(0, WcStatus::SUCCESS)], "{kind:?}");
        assert_eq!(lab.receivers[0].statuses(), [(1, WcStatus::SUCCESS)], "{kind:?}");
        assert_eq!(lab.receivers[0].qp.state(), QpState::Rts);
    }
}

/// A UC message that loses its end leaves its receive to the next one of the same queue pair.
#[test]
fn a_message_given_up_leaves_its_receive_to_the_queue_pair() {
    let mut lab = Lab::new(QpType::Uc, 2);
    lab.post(0..3);
    let lost = lab.outgoing(0, 600);
    lab.take(0, &lost[..1]);
    let other = lab.outgoing(1, 1);
    lab.take(1, &other);
    let next = lab.outgoing(0, 2);
    lab.take(0, &next);
    assert_eq!(lab.receivers[0].statuses(), [(0, WcStatus::SUCCESS)]);
    assert_eq!(lab.receivers[1].statuses(), [(1, WcStatus::SUCCESS)]);
    assert_eq!(lab.left(), 1);
}

#[test]
fn an_end_flushes_the_message_under_way_and_leaves_the_queue_to_the_others() {
    for kind in [QpType::Rc, QpType::Uc] {
        let mut lab = Lab::new(kind, 3);
        lab.post(0..4);
        let streams: Vec<_> = (0..3).map(|i| lab.outgoing(i, 600)).collect();
        lab.take(0, &streams[0][..1]);
        lab.take(1, &streams[1][..1]);
        for (i, flushed) in [(0, vec![(0, WcStatus::WR_FLUSH_ERR)]), (2, vec![])] {
            let side = &mut lab.receivers[i];
            side.qp.modify(&QpAttr::to(QpState::Err)).unwrap();
            assert_eq!(side.statuses(), flushed, "{kind:?}");
            let refused = side.qp.post_recv(RecvWr::new(9, []), 0);
            assert_eq!(refused, Err(PostError::SharedReceives));
        }
        assert_eq!(lab.left(), 2);
        lab.take(1, &streams[1][1..]);
        assert_eq!(lab.receivers[1].statuses(), [(1, WcStatus::SUCCESS)], "{kind:?}");
        // Through RESET it stays with its queue.
        lab.receivers[0].qp.modify(&QpAttr::to(QpState::Reset)).unwrap();
        assert!(lab.receivers[0].qp.shares_receives());
        assert_eq!((lab.receivers[0].wcs(), lab.left()), (vec![], 2));
    }
}

#[test]
fn a_receive_that_is_too_small_fails_alone() {
    let mut lab = Lab::new(QpType::Rc, 2);
    lab.srq.0.lock().unwrap().post(RecvWr::new(70, []), 0).unwrap();
    lab.post(1..3);
    for i in 0..2 {
        let packets = lab.outgoing(i, 10);
        lab.take(i, &packets);
    }
    assert_eq!(lab.receivers[0].statuses(), [(70, WcStatus::LOC_LEN_ERR)]);
    assert_eq!(lab.receivers[1].statuses(), [(1, WcStatus::SUCCESS)]);
    assert_eq!((lab.receivers[0].qp.state(), lab.left()), (QpState::Err, 1));
}

#[test]
fn receives_of_its_own_and_shared_ones_do_not_mix() {
    let lab = Lab::new(QpType::Rc, 0);
    let mut side = Side::new(QpType::Rc, 1, 2, ends());
    side.qp.post_recv(RecvWr::new(1, []), 0).unwrap();
    let refused = side.qp.share_receives(lab.srq.clone()).unwrap_err().to_string();
    assert!(refused.contains("cannot share others' any more"), "{refused}");
    assert!(!side.qp.shares_receives());
}

/// An own receive that a message has begun is no credit, and makes room for another.
#[test]
fn a_receive_in_hand_is_no_credit() {
    let [mut a, mut b] = [(1, 2, ends()), (2, 1, [ends()[1], ends()[0]])]
        .map(|(own, peer, ends)| Side::new(QpType::Rc, own, peer, ends));
    let max = b.qp.config().max_recv_wr as u64;
    for id in 0..max {
        b.qp.post_recv(RecvWr::new(id, [Sge::new(0, 1000, LKey(INBOX))]), 0).unwrap();
    }
    assert!(matches!(b.qp.post_recv(RecvWr::new(9, []), 0), Err(PostError::QueueFull { .. })));
    a.qp.set_window(roce::Window { packets: 2, octets: 1 << 20 });
    a.qp.post_send(SendWr::send(1, [Sge::new(0, 600, LKey(SOURCE))]), 0).unwrap();
    let packets = a.packets(Instant::ZERO);
    assert_eq!(packets.len(), 2, "the window: an acknowledgement in the middle of the message");
    b.take(Instant::ZERO, ends()[0], &packets);
    let ack = b.packets(Instant::ZERO);
    let aeth = Packet::parse(&ack[0]).unwrap().headers.aeth.unwrap();
    // 127 of 128: the code for 96 is 13, that for 128 is 14.
    assert_eq!((max, aeth.syndrome()), (128, Syndrome::Ack(13)));
    b.qp.post_recv(RecvWr::new(9, []), 0).unwrap();
}

#[test]
fn a_connection_says_that_receives_are_shared() {
    let srq = Arc::new(Locked(Mutex::new(SharedQueue::new(32, 1))));
    let (now, service) = (Instant::ZERO, PortSpace::TCP.service_id(7174));
    let ends = ends();
    let mut ports = [0, 1].map(|i| Port::new(roce::port::Config::new(ends[i], i as u64)));
    let mem = PlainMemory::default();
    mem.add(INBOX, PD, Access::LOCAL_WRITE, 0, vec![0; 2000]);
    let [ours, theirs] = [0, 1].map(|i| {
        let qpn = ports[i].create_qp(roce::Config::new(QpType::Rc, PdId(PD), Qpn(0))).unwrap();
        ports[i].share_receives(qpn, srq.clone()).unwrap();
        qpn
    });
    let nobody = ports[0].share_receives(Qpn(5), srq.clone());
    assert_eq!(nobody, Err(PortError::UnknownQp(Qpn(5))));
    let refused = ports[0].post_recv(ours, RecvWr::new(1, []), 0);
    assert!(matches!(refused, Err(PortError::Post(PostError::BadState(_)))), "{refused:?}");

    let mut said = Vec::new();
    let mut train = Train::default();
    let mut carry = |ports: &mut [Port; 2], from: usize| {
        while let Some(way) = ports[from].poll_transmit(now, &mem, Limits::default(), &mut train) {
            for packet in train.octets().chunks(train.segment_len()) {
                let parsed = Packet::parse(packet).unwrap();
                if parsed.headers.bth.opcode() == Opcode::UD_SEND_ONLY {
                    match Mad::parse(parsed.payload).unwrap().cm().unwrap().unwrap() {
                        Message::Req(req) => said.push(("REQ", req.srq)),
                        Message::Rep(rep) => said.push(("REP", rep.srq)),
                        _ => {}
                    }
                }
                ports[1 - from].handle_datagram(now, way.from, None, 0, packet, &mem);
            }
        }
    };
    ports[1].listen(service, 4).unwrap();
    ports[0].connect(now, ours, &Connect::new(ends[1], service)).unwrap();
    carry(&mut ports, 0);
    let Some(Event::Request(request)) = ports[1].poll_event() else { panic!("no request") };
    assert!(request.cm.srq);
    ports[1].accept(now, &request, theirs, &Accept::default()).unwrap();
    carry(&mut ports, 1);
    let sge = Sge::new(0, 100, LKey(INBOX));
    srq.0.lock().unwrap().post(RecvWr::new(8, [sge]), 0).unwrap();
    ports[0].post_send(ours, SendWr::inline(1, SendOp::Send, b"hello"), 0).unwrap();
    carry(&mut ports, 0);
    carry(&mut ports, 1);
    let (qpn, done) = ports[1].poll_completion().unwrap();
    assert_eq!((qpn, done.wc.id, done.wc.byte_len), (theirs, 8, 5));
    assert_eq!(ports[0].poll_completion().map(|(qpn, done)| (qpn, done.wc.id)), Some((ours, 1)));
    assert_eq!(said, [("REQ", true), ("REP", true)]);
    let refused = ports[0].post_recv(ours, RecvWr::new(1, []), 0);
    assert_eq!(refused, Err(PortError::Post(PostError::SharedReceives)));
}
