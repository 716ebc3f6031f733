//! What the fuzzers found in a port and its queue pairs, each kept as a test.

use userdma_proto::{
    mem::{NoMemory, PdId},
    roce::{
        self, PathMtu, Port, QpAttr, Train,
        port::{Config, IcrcPolicy, Limits},
    },
    time::Instant,
    verbs::{Access, PostError, QpState, QpType, RecvWr, SendOp, SendWr, Sge},
    wire::{
        ids::{LKey, PKey, Psn, Qpn},
        roce::{Headers, bth::Bth, opcode::Opcode},
    },
};
use userdma_tests::PlainMemory;

/// A queue pair in RTS, without an ACK time-out.
fn port(change: impl FnOnce(&mut roce::Config)) -> (Port, Qpn) {
    let ours = "192.0.2.1:4791".parse().unwrap();
    let mut port = Port::new(Config { icrc: IcrcPolicy::Lenient, ..Config::new(ours, 1) });
    let mut config = roce::Config::new(QpType::Rc, PdId(0), Qpn(0));
    change(&mut config);
    let qpn = port.create_qp(config).unwrap();
    let rtr = QpAttr {
        peer: Some("192.0.2.2:4791".parse().unwrap()),
        dest_qp: Some(Qpn(0x12)),
        path_mtu: Some(PathMtu::Mtu256),
        rq_psn: Some(Psn::new(0)),
        ..QpAttr::to(QpState::Rtr)
    };
    let rts = QpAttr { sq_psn: Some(Psn::new(0)), timeout: Some(0), ..QpAttr::to(QpState::Rts) };
    for attr in [QpAttr::to(QpState::Init), rtr, rts] {
        port.modify(qpn, &attr).unwrap();
    }
    (port, qpn)
}

/// Where no time-out is set a silent peer costs a bounded number of wake-ups.
#[test]
fn without_an_ack_timeout_the_timer_comes_to_rest() {
    let (mut port, qpn) = port(|_| {});
    port.post_send(qpn, SendWr::inline(1, SendOp::Send, b"data"), 1).unwrap();
    let (mut now, mut train, mut wakeups) = (Instant::ZERO, Train::default(), 0);
    loop {
        while port.poll_transmit(now, &NoMemory, Limits::default(), &mut train).is_some() {}
        let Some(at) = port.poll_timeout() else { break };
        (now, wakeups) = (at.max(now), wakeups + 1);
        assert!(
            wakeups < 20,
            "{wakeups} wake-ups by {now:?}, {} packets",
            port.stats().packets_sent
        );
        port.handle_timeout(now);
    }
}

/// A full receive queue tells its length, also while a message has taken its receive.
#[test]
fn a_full_receive_queue_tells_its_length() {
    let (mut port, qpn) = port(|config| config.max_recv_wr = 2);
    let mem = PlainMemory::default();
    mem.add(1, 0, Access::LOCAL_WRITE, 0, vec![0; 1024]);
    port.post_recv(qpn, RecvWr::new(0, [Sge::new(0, 1024, LKey(1))]), 0).unwrap();
    // It takes the receive.
    let bth = Bth::new(Opcode::RC_SEND_FIRST, PKey(0xffff), qpn, Psn::new(0));
    let mut octets = Vec::new();
    Headers::new(bth).emit_packet(&[7; 256], &mut octets);
    octets.extend([0; 4]);
    let from = "192.0.2.2:4791".parse().unwrap();
    port.handle_datagram(Instant::ZERO, from, None, 0, &octets, &mem);
    let full = (0..4).find_map(|id| port.post_recv(qpn, RecvWr::new(id, []), id).err());
    let told = Some(roce::port::PortError::Post(PostError::QueueFull { max: 2 }));
    assert_eq!(full, told);
}

/// A queue pair that was reset owes nobody a notification: neither an address that was never set,
/// nor its next peer.
#[test]
fn no_congestion_notification_outlives_its_connection() {
    let ours = "192.0.2.1:4791".parse().unwrap();
    let theirs = ["192.0.2.2:4791", "192.0.2.3:4791"].map(|addr| addr.parse().unwrap());
    for again in [false, true] {
        let mut port = Port::new(Config { icrc: IcrcPolicy::Lenient, ..Config::new(ours, 1) });
        let qpn = port.create_qp(roce::Config::new(QpType::Rc, PdId(0), Qpn(0))).unwrap();
        let connect = |port: &mut Port, peer| {
            port.modify(qpn, &QpAttr::to(QpState::Init)).unwrap();
            let attr = QpAttr {
                peer: Some(peer),
                dest_qp: Some(Qpn(0x12)),
                path_mtu: Some(PathMtu::Mtu1024),
                rq_psn: Some(Psn::new(0)),
                ..QpAttr::to(QpState::Rtr)
            };
            port.modify(qpn, &attr).unwrap();
        };
        connect(&mut port, theirs[0]);
        let bth = Bth::new(Opcode::RC_WRITE_MIDDLE, PKey(0xffff), qpn, Psn::new(9));
        let mut octets = Vec::new();
        Headers::new(bth).emit_packet(&[], &mut octets);
        octets.extend([0; 4]);
        port.handle_datagram(Instant::ZERO, theirs[0], None, 3, &octets, &NoMemory);
        port.modify(qpn, &QpAttr::to(QpState::Reset)).unwrap();
        if again {
            connect(&mut port, theirs[1]);
        } else {
            port.modify(qpn, &QpAttr::to(QpState::Err)).unwrap();
        }
        let mut train = Train::default();
        let sent = port.poll_transmit(Instant::ZERO, &NoMemory, Limits::default(), &mut train);
        assert_eq!(sent, None, "connected again: {again}");
    }
}
