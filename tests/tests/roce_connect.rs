//! How connections over UDP come about, do not come about, and end.

mod common;

use std::{
    future::Future,
    net::{Ipv4Addr, SocketAddr, UdpSocket},
    process::Command,
    task::{Context, Waker},
    thread,
    time::{Duration, Instant},
};

use common::*;
use userdma::{
    Access, CloseReason, Cq, Device, DeviceOptions, Error, Listener, Mr, PathMtu, Pd, PostError,
    Qp, QpAttr, QpInit, QpState, QpType, Qpn, RecvWr, Region, RoceOptions, SendOp, SendWr, UdDest,
    Wc, WcOpcode, WcStatus,
    proto::wire::{
        ids::{Psn, QKey},
        mad::cm::{PortSpace, Reason},
    },
};
use userdma_proto::{
    mem::{NoMemory, PdId},
    roce::{
        self, Port, Train,
        port::{Accept, Event, Limits},
    },
};

/// A device at a free port, with a domain and a queue.
struct Host {
    device: Device,
    pd: Pd,
    cq: Cq,
}

impl Host {
    fn new(options: DeviceOptions, host: &str) -> Self {
        Self::of(options.open(&format!("udp://{host}:0")).unwrap())
    }

    fn of(device: Device) -> Self {
        let (pd, cq) = (device.alloc_pd().unwrap(), device.create_cq(1024).unwrap());
        Self { device, pd, cq }
    }

    /// One that connects to `peer`.
    fn toward(peer: &Device, options: DeviceOptions, host: &str) -> Self {
        Self::of(toward(peer, host, options))
    }

    fn init(&self) -> QpInit {
        QpInit::new(&self.cq)
    }

    async fn listen(&self) -> (Listener, String) {
        let listener = self.device.listen(Some(0)).await.unwrap();
        let addr = listener.local_addr().to_string();
        (listener, addr)
    }

    async fn connect(&self, addr: &str, init: QpInit) -> userdma::Result<Qp> {
        self.device.connect(addr, &self.pd, init, b"").await
    }

    async fn accept(&self, listener: &Listener, init: QpInit) -> Qp {
        listener.accept().await.unwrap().accept(&self.pd, init, b"").await.unwrap()
    }

    fn mr(&self, len: usize) -> Mr {
        self.pd.register(Region::alloc(len).unwrap(), all()).unwrap()
    }

    async fn wc(&self) -> Wc {
        tokio::time::timeout(LONG, self.cq.next()).await.expect("a completion in time").unwrap()
    }

    /// The next completion, which must be a success of `id`.
    async fn done(&self, id: u64) -> Wc {
        let wc = self.wc().await;
        assert!(wc.status.is_ok() && wc.id == id, "{wc:?}");
        wc
    }
}

/// Two hosts on loopback, of which the second listens.
async fn two() -> (Host, Host, Listener, String) {
    let there = Host::new(quick(), "127.0.0.1");
    let here = Host::toward(&there.device, quick(), "127.0.0.1");
    let (listener, addr) = there.listen().await;
    (here, there, listener, addr)
}

async fn closed(qp: &Qp) -> CloseReason {
    tokio::time::timeout(LONG, qp.closed()).await.expect("it ends")
}

/// Until `done` says so.
async fn until(mut done: impl FnMut() -> bool, what: &str) {
    let began = Instant::now();
    while !done() {
        assert!(began.elapsed() < LONG, "{what}");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

/// Private data, with the zeros that follow in a message of fixed length.
fn says(area: &[u8], data: &[u8]) -> bool {
    area.strip_prefix(data).is_some_and(|rest| rest.iter().all(|&octet| octet == 0))
}

#[tokio::test]
async fn private_data_and_depths_reach_the_other_side() {
    let (here, there, listener, addr) = two().await;
    let ask = async {
        let init = QpInit { ird: 3, ord: 5, ..here.init() };
        here.device.connect(&addr, &here.pd, init, b"question").await.unwrap()
    };
    let answer = async {
        let request = listener.accept().await.unwrap();
        assert!(says(request.private_data(), b"question"), "{:?}", request.private_data());
        assert_eq!((request.ird(), request.ord(), request.mpa()), (Some(3), Some(5), None));
        assert_eq!(request.qp_type(), QpType::Rc);
        assert_eq!(Some(request.peer_addr()), here.device.udp_addr(), "its token tells its port");
        let init = QpInit { ird: 4, ord: 9, ..there.init() };
        request.accept(&there.pd, init, b"answer").await.unwrap()
    };
    let (qp, peer) = tokio::join!(ask, answer);
    assert!(says(&qp.private_data(), b"answer"));
    let depths = |qp: &Qp| {
        let attr = qp.attributes().unwrap();
        (attr.max_rd_atomic, attr.max_dest_rd_atomic)
    };
    assert_eq!((depths(&qp), depths(&peer)), ((4, 3), (3, 4)), "bounded by what the other serves");
    assert_eq!((qp.peer_addr(), qp.local_addr()), (peer.local_addr(), peer.peer_addr()));
    assert_eq!(qp.peer_addr(), there.device.udp_addr());
    assert_eq!((qp.state(), peer.state()), (QpState::Rts, QpState::Rts));
    let terms = qp.terms().unwrap();
    assert_eq!((terms.remote_qpn, terms.local_qpn), (peer.qpn(), qp.qpn()));
    assert_eq!(terms.mtu, 4096, "what loopback takes");
    assert!(terms.token.is_some(), "two of a kind");
    until(|| there.device.stats().connections == 1, "both sides count it").await;
    assert_eq!(here.device.stats().connections, 1);
}

#[tokio::test]
async fn a_reject_carries_private_data() {
    let (here, there, listener, addr) = two().await;
    let refuse = async { listener.accept().await.unwrap().reject(b"not today").await.unwrap() };
    let (failed, ()) = tokio::join!(here.connect(&addr, here.init()), refuse);
    let e = failed.unwrap_err();
    assert!(says(e.rejection().unwrap(), b"not today"));
    let Error::Rejected { source, .. } = &e else { panic!("{e:?}") };
    assert_eq!(source.reason, Reason::CONSUMER);
    assert!(e.to_string().contains("the peer rejected the connection"), "{e}");
    // A request that is dropped is rejected too.
    let drop_it = async { drop(listener.accept().await.unwrap()) };
    let (failed, ()) = tokio::join!(here.connect(&addr, here.init()), drop_it);
    let e = failed.unwrap_err();
    assert!(says(e.rejection().unwrap(), b""), "{e:?}");
    assert_eq!(there.device.stats().rejected, 2);
}

/// Devices at 127.0.0.1 and 127.0.0.2 with one port, which each expects of the other: they need not
/// tell each other theirs.
fn two_at_one_port() -> (Host, Host) {
    for _ in 0..100 {
        let mut options = quick();
        options.roce.peer_udp_port = silent().1;
        let ends = ["127.0.0.1", "127.0.0.2"].map(|ip| {
            options.clone().open(&format!("udp://{ip}:{}", options.roce.peer_udp_port)).ok()
        });
        let [Some(first), Some(second)] = ends.map(|device| device.map(Host::of)) else { continue };
        return (first, second);
    }
    panic!("no port is free at two addresses");
}

#[tokio::test]
async fn private_data_that_is_too_long_is_refused_by_the_call() {
    let (there, here) = two_at_one_port();
    let (listener, addr) = there.listen().await;
    let e = here.device.connect(&addr, &here.pd, here.init(), &[1; 57]).await.unwrap_err();
    assert_eq!(e.to_string(), "57 octets of private data, but there is room for 56");
    let answer = async {
        let request = listener.accept().await.unwrap();
        assert_eq!(request.private_data(), [7; 56]);
        let too_long = request.accept(&there.pd, there.init(), &[1; 197]).await.unwrap_err();
        let request = listener.accept().await.unwrap();
        (too_long, request.reject(&[1; 149]).await.unwrap_err())
    };
    let ask = async {
        let mut failed = Vec::new();
        for _ in 0..2 {
            let asked = here.device.connect(&addr, &here.pd, here.init(), &[7; 56]).await;
            failed.push(asked.unwrap_err());
        }
        failed
    };
    let (failed, (accepting, rejecting)) = tokio::join!(ask, answer);
    assert!(accepting.to_string().contains("room for 196"), "{accepting}");
    assert!(rejecting.to_string().contains("room for 148"), "{rejecting}");
    for e in failed {
        assert!(matches!(e, Error::Rejected { .. }), "{e:?}");
    }
}

#[tokio::test]
async fn nobody_listens() {
    let (here, there, listener, addr) = two().await;
    let before = here.device.roce_stats().unwrap().cm.sent;
    drop(listener);
    let e = here.connect(&addr, here.init()).await.unwrap_err();
    let Error::Rejected { source, .. } = &e else { panic!("{e:?}") };
    assert_eq!(source.reason, Reason::INVALID_SERVICE_ID);
    assert_eq!(here.device.roce_stats().unwrap().cm.sent, before + 1, "one question is enough");
    assert_eq!(there.device.roce_stats().unwrap().cm.no_listener, 1);

    let e = here.connect("[::1]:9", here.init()).await.unwrap_err();
    assert!(e.to_string().contains("one is IPv4, the other IPv6"), "{e}");
    let e = here.connect("no such host", here.init()).await.unwrap_err();
    assert!(matches!(e, Error::BadAddress(_)), "{e:?}");
}

#[tokio::test]
async fn requests_of_a_dropped_listener_are_rejected() {
    let (here, there, listener, addr) = two().await;
    let drop_it = async {
        // It has come, and nobody has looked at it.
        until(|| there.device.roce_stats().unwrap().cm.received > 0, "a request").await;
        drop(listener);
    };
    let (failed, ()) = tokio::join!(here.connect(&addr, here.init()), drop_it);
    let e = failed.unwrap_err();
    assert!(matches!(e, Error::Rejected { .. }), "{e:?}");
    // The port is free again, and another may take it.
    let port = addr.parse::<SocketAddr>().unwrap().port();
    let again = there.device.listen(Some(port)).await.unwrap();
    let e = there.device.listen(Some(port)).await.unwrap_err().to_string();
    assert!(e.contains("has a listener already"), "{e}");
    let (qp, peer) =
        tokio::join!(here.connect(&addr, here.init()), there.accept(&again, there.init()));
    assert_eq!((qp.unwrap().state(), peer.state()), (QpState::Rts, QpState::Rts));
}

#[tokio::test]
async fn more_requests_than_the_backlog_are_refused() {
    let there = Host::new(DeviceOptions { backlog: 2, ..quick() }, "127.0.0.1");
    let here = Host::toward(&there.device, quick(), "127.0.0.1");
    let (listener, addr) = there.listen().await;
    let mut asking = tokio::task::JoinSet::new();
    for _ in 0..5 {
        let (device, pd, addr, init) =
            (here.device.clone(), here.pd.clone(), addr.clone(), here.init());
        asking.spawn(async move { device.connect(&addr, &pd, init, b"").await });
    }
    let mut refused = 0;
    while refused < 3 {
        let e = asking.join_next().await.unwrap().unwrap().unwrap_err();
        assert!(matches!(e, Error::Rejected { .. }), "{e:?}");
        refused += 1;
    }
    let mut kept = Vec::new();
    for _ in 0..2 {
        kept.push(there.accept(&listener, there.init()).await);
        kept.push(asking.join_next().await.unwrap().unwrap().unwrap());
    }
    assert!(kept.iter().all(|qp| qp.state() == QpState::Rts));
}

/// A UDP port that swallows everything.
fn silent() -> (UdpSocket, u16) {
    let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
    let port = socket.local_addr().unwrap().port();
    (socket, port)
}

#[tokio::test]
async fn a_silent_peer_times_out_and_leaves_the_queue_pair() {
    let (socket, silent_port) = silent();
    let mut options = quick();
    options.roce.peer_udp_port = silent_port;
    let here = Host::new(options, "127.0.0.1");
    let startup_timeout = Duration::from_millis(100);
    let qp = here.pd.create_qp(QpInit { startup_timeout, ..here.init() }).unwrap();
    qp.post_recv(RecvWr::new(5, [])).unwrap();
    let began = Instant::now();
    let e = here.device.connect_qp("127.0.0.1:7174", &qp, b"").await.unwrap_err();
    assert!(began.elapsed() >= startup_timeout);
    let text = e.to_string();
    assert!(matches!(e, Error::NoAnswer { udp_port, .. } if udp_port == silent_port), "{e:?}");
    assert!(text.contains(&format!("127.0.0.1:7174 at UDP port {silent_port}")), "{text}");
    assert_eq!((qp.state(), qp.close_reason()), (QpState::Init, None));
    drop(socket);

    // It can be used still, and its receive is posted still: a device takes the silent one's port.
    let there = quick().open(&format!("udp://127.0.0.1:{silent_port}")).unwrap();
    let (pd, cq) = (there.alloc_pd().unwrap(), there.create_cq(8).unwrap());
    let listener = there.listen(None).await.unwrap();
    let accept = async {
        let request = listener.accept().await.unwrap();
        let qp = request.accept(&pd, QpInit::new(&cq), b"").await.unwrap();
        qp.post_send(SendWr::send(6, [])).unwrap();
        qp
    };
    let connect = here.device.connect_qp("127.0.0.1", &qp, b"");
    let (connected, _peer) = tokio::join!(connect, accept);
    connected.unwrap();
    here.done(5).await;
    let again = here.device.connect_qp("127.0.0.1", &qp, b"").await.unwrap_err();
    assert!(matches!(again, Error::State("the queue pair is connected already")), "{again:?}");
}

#[tokio::test]
async fn nobody_at_the_udp_port() {
    let (socket, port) = silent();
    drop(socket);
    let mut options = quick();
    options.roce.peer_udp_port = port;
    let here = Host::new(options, "127.0.0.1");
    let startup_timeout = Duration::from_millis(400);
    let init = QpInit { startup_timeout, ..here.init() };
    let e = here.connect("127.0.0.1", init).await.unwrap_err();
    assert!(matches!(e, Error::NoAnswer { trouble: None, .. }), "{e:?}");
    // What came back of it (ICMP) broke nothing, and it was asked more than once.
    let stats = here.device.roce_stats().unwrap();
    assert!(stats.cm.resent > 0, "{stats:?}");
}

#[tokio::test]
async fn a_cancelled_connect_leaves_the_queue_pair_as_it_was() {
    for shared in [false, true] {
        let (here, there, listener, addr) = two().await;
        let received = || there.device.roce_stats().unwrap().cm.received;
        let srq = here.pd.create_srq(4, 1).unwrap();
        let init = if shared { here.init().srq(&srq) } else { here.init() };
        let qp = here.pd.create_qp(init).unwrap();
        let recv = RecvWr::new(1, []);
        if shared {
            srq.post_recv(recv).unwrap();
        } else {
            qp.post_recv(recv).unwrap();
        }
        for attempt in 1..4 {
            tokio::select! {
                biased;
                _ = here.device.connect_qp(&addr, &qp, b"") => panic!("nobody accepts"),
                () = tokio::time::sleep(Duration::from_millis(20)) => {}
            }
            assert_eq!((qp.state(), qp.peer_addr()), (QpState::Init, None));
            // The question, and that it is taken back.
            until(|| received() == 2 * attempt, "the peer is told").await;
        }
        // While it is being connected nobody else may.
        let first = here.device.connect_qp(&addr, &qp, b"");
        let second = async { here.device.connect_qp(&addr, &qp, b"").await.unwrap_err() };
        let accept = async {
            // Those that were taken back cannot be accepted.
            loop {
                let request = listener.accept().await.unwrap();
                if let Ok(qp) = request.accept(&there.pd, there.init(), b"").await {
                    return qp;
                }
            }
        };
        let (qp_done, e, peer) = tokio::join!(first, second, accept);
        qp_done.unwrap();
        assert!(e.to_string().contains("is being connected already"), "{e}");
        peer.post_send(SendWr::inline(2, SendOp::Send, b"")).unwrap();
        assert_eq!(here.done(1).await.qpn, qp.qpn(), "the receive was posted all the time");
        there.done(2).await;
    }
}

#[tokio::test]
async fn an_abort_while_connecting_ends_the_attempt() {
    let (here, _there, _listener, addr) = two().await;
    let qp = here.pd.create_qp(here.init()).unwrap();
    qp.post_recv(RecvWr::new(1, [])).unwrap();
    let abort = async {
        tokio::task::yield_now().await;
        qp.abort();
    };
    let (failed, ()) = tokio::join!(here.device.connect_qp(&addr, &qp, b""), abort);
    let e = failed.unwrap_err();
    assert!(matches!(e, Error::Post(PostError::BadState(QpState::Err))), "{e:?}");
    assert_eq!((qp.state(), closed(&qp).await), (QpState::Err, CloseReason::Aborted));
    assert_eq!(here.wc().await.status, WcStatus::WR_FLUSH_ERR);
    let e = here.device.connect_qp(&addr, &qp, b"").await.unwrap_err().to_string();
    assert!(e.contains("error state: make a new one"), "{e}");
}

/// The peer has given up by the time that its request is accepted.
#[tokio::test]
async fn a_request_that_was_given_up_cannot_be_accepted() {
    let (here, there, listener, addr) = two().await;
    let init = QpInit { startup_timeout: Duration::from_millis(50), ..here.init() };
    let late = async {
        let request = listener.accept().await.unwrap();
        until(|| there.device.roce_stats().unwrap().cm.received >= 2, "the peer says so").await;
        request
    };
    let (failed, request) = tokio::join!(here.connect(&addr, init), late);
    assert!(matches!(failed.unwrap_err(), Error::NoAnswer { .. }));
    let qp = there.pd.create_qp(there.init()).unwrap();
    let e = request.accept_qp(&qp, b"").await.unwrap_err();
    assert!(matches!(e, Error::Port(_)), "{e:?}");
    assert_eq!(qp.state(), QpState::Init);
}

#[tokio::test]
async fn what_belongs_to_another_device_is_refused() {
    let (here, there, listener, addr) = two().await;
    let tcp = quick().open("tcp://127.0.0.1:0").unwrap();
    let other = tcp.alloc_pd().unwrap().create_qp(QpInit::new(&here.cq)).unwrap();
    let foreign = there.pd.create_qp(there.init()).unwrap();
    for qp in [&other, &foreign] {
        let e = here.device.connect_qp(&addr, qp, b"").await.unwrap_err().to_string();
        assert!(e.contains("belongs to another device"), "{e}");
        assert_eq!(qp.state(), QpState::Init);
    }
    let ours = here.pd.create_qp(here.init()).unwrap();
    let e = tcp.connect_qp(&addr, &ours, b"").await.unwrap_err().to_string();
    assert!(e.contains("is one of RoCEv2"), "{e}");
    let accept = async {
        let request = listener.accept().await.unwrap();
        request.accept_qp(&ours, b"").await.unwrap_err().to_string()
    };
    let (failed, e) = tokio::join!(here.connect(&addr, here.init()), accept);
    assert!(e.contains("belongs to another device"), "{e}");
    assert!(matches!(failed.unwrap_err(), Error::Rejected { .. }));
    assert_eq!(ours.state(), QpState::Init);
}

#[tokio::test]
async fn what_a_responder_posts_at_once_arrives() {
    let (here, there, listener, addr) = two().await;
    let (ma, mb) = (here.mr(64), there.mr(64));
    mb.write_at(0, b"first of all").unwrap();
    let qp = here.pd.create_qp(here.init()).unwrap();
    qp.post_recv(RecvWr::new(1, [ma.slice(0..64)])).unwrap();
    let accept = async {
        let peer = there.accept(&listener, there.init()).await;
        peer.post_send(SendWr::send(2, [mb.slice(0..12)])).unwrap();
        peer
    };
    let (connected, _peer) = tokio::join!(here.device.connect_qp(&addr, &qp, b""), accept);
    connected.unwrap();
    there.done(2).await;
    assert_eq!(here.done(1).await.byte_len, 12);
    assert_eq!(octets(&ma, 0, 12), b"first of all");
}

/// Who disconnects as soon as he has the last message still says that he has it.
#[tokio::test]
async fn what_arrived_is_acknowledged_before_the_end() {
    for _ in 0..60 {
        let (a, b) = roce_pair().await;
        let (ma, mb) = (a.mr(64, 1), b.mr(64, 2));
        b.qp.post_recv(RecvWr::new(1, [mb.slice(0..64)])).unwrap();
        let (cq, qp) = (b.cq.clone(), b.qp.clone());
        let took = thread::spawn(move || {
            let wc = spin(&cq);
            // It begins at once, before there is another turn.
            let mut begun = Box::pin(qp.disconnect());
            let _ = begun.as_mut().poll(&mut Context::from_waker(Waker::noop()));
            wc
        });
        // It polls for a while: then it is the one that reads the socket.
        tokio::time::sleep(Duration::from_millis(10)).await;
        a.qp.post_send(SendWr::send(2, [ma.slice(0..64)])).unwrap();
        assert_eq!(a.wc().await.status, WcStatus::SUCCESS);
        assert_eq!(took.join().unwrap().status, WcStatus::SUCCESS);
        assert_eq!(a.qp.closed().await, CloseReason::Graceful);
    }
}

#[tokio::test]
async fn a_disconnect_finishes_what_is_posted() {
    let (a, b) = roce_pair().await;
    let (ma, mb) = (a.mr(4 << 20, 1), b.mr(4 << 20, 2));
    a.qp.post_send(SendWr::write(1, [ma.slice(0..4 << 20)], mb.remote(0)).unsignaled()).unwrap();
    a.qp.post_send(SendWr::read(2, [ma.slice(0..1 << 20)], mb.remote(0))).unwrap();
    b.qp.post_recv(RecvWr::new(3, [])).unwrap();
    a.qp.post_recv(RecvWr::new(4, [])).unwrap();
    let while_it_closes = async {
        tokio::task::yield_now().await;
        assert_eq!(a.qp.state(), QpState::Sqd);
        let refused = a.qp.post_send(SendWr::send(9, []));
        assert_eq!(refused, Err(PostError::BadState(QpState::Sqd)), "nothing new starts");
    };
    let (here, there, ()) = tokio::join!(a.qp.disconnect(), b.qp.closed(), while_it_closes);
    assert_eq!((here, there), (CloseReason::Graceful, CloseReason::Graceful));
    assert!(octets(&mb, 0, 4 << 20) == pattern(4 << 20, 1));
    a.done(2).await;
    for (side, id) in [(&a, 4), (&b, 3)] {
        let wc = side.wc().await;
        assert_eq!((wc.id, wc.status), (id, WcStatus::WR_FLUSH_ERR));
    }
    assert_eq!((a.qp.state(), b.qp.state()), (QpState::Err, QpState::Err));
    // Closing what is closed tells how it ended.
    assert_eq!(b.qp.disconnect().await, CloseReason::Graceful);
}

/// Work that cannot be done does not keep a queue pair open for ever.
#[tokio::test]
async fn a_disconnect_has_its_time() {
    let close_timeout = Duration::from_millis(100);
    let hurried = |init: &mut QpInit| init.close_timeout = close_timeout;
    let (a, b) = roce_pair_with("127.0.0.1", [quick(), quick()], hurried).await;
    a.qp.post_send(SendWr::inline(1, SendOp::Send, b"there is no receive")).unwrap();
    let began = Instant::now();
    assert_eq!(a.qp.disconnect().await, CloseReason::Lost);
    assert!(began.elapsed() >= close_timeout);
    let wc = a.wc().await;
    assert_eq!((wc.id, wc.status), (1, WcStatus::WR_FLUSH_ERR));
    assert_eq!(closed(&b.qp).await, CloseReason::Graceful);
}

/// Its work fails while it waits for it: that is what is told.
#[tokio::test]
async fn work_that_fails_while_closing_is_told() {
    let (a, b) = roce_pair().await;
    let (ma, mb) = (a.mr(64, 1), b.mr(64, 1));
    a.qp.post_send(SendWr::read(1, [ma.slice(0..64)], mb.remote(1))).unwrap();
    assert_eq!(a.qp.disconnect().await, CloseReason::WorkFailed);
    assert!(matches!(closed(&b.qp).await, CloseReason::NakSent(_)));
    assert_eq!(a.wc().await.status, WcStatus::REM_ACCESS_ERR);
}

#[tokio::test]
async fn both_sides_may_disconnect_at_once() {
    for _ in 0..20 {
        let (a, b) = roce_pair().await;
        let (here, there) = tokio::join!(a.qp.disconnect(), b.qp.disconnect());
        assert_eq!((here, there), (CloseReason::Graceful, CloseReason::Graceful));
    }
}

#[tokio::test]
async fn a_dropped_queue_pair_ends_its_connection() {
    let (a, b) = roce_pair().await;
    a.qp.post_recv(RecvWr::new(1, [])).unwrap();
    let clone = a.qp.clone();
    drop(clone);
    assert_eq!(a.qp.state(), QpState::Rts, "a clone is left");
    let Side { qp, cq, device, .. } = a;
    drop(qp);
    let wc = tokio::time::timeout(LONG, cq.next()).await.unwrap().unwrap();
    assert_eq!((wc.id, wc.status), (1, WcStatus::WR_FLUSH_ERR));
    // With the device too, which says so before it goes.
    drop(device);
    assert_eq!(closed(&b.qp).await, CloseReason::Graceful);
}

fn a_runtime() -> tokio::runtime::Runtime {
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    runtime.worker_threads(1).enable_all().build().unwrap()
}

/// The device's runtime goes, the program stays: nobody would ever watch the socket again.
#[tokio::test]
async fn the_end_of_the_runtime_ends_its_connections() {
    let there = a_runtime();
    let options = DeviceOptions { runtime: Some(there.handle().clone()), ..quick() };
    let (a, b) = roce_pair_with("127.0.0.1", [quick(), options], |_| {}).await;
    let listener = b.device.listen(Some(0)).await.unwrap();
    b.qp.post_recv(RecvWr::new(1, [])).unwrap();
    there.shutdown_background();
    assert_eq!(closed(&b.qp).await, CloseReason::Lost);
    assert_eq!(b.wc().await.status, WcStatus::WR_FLUSH_ERR);
    let got = tokio::time::timeout(LONG, b.qp.recv_lent(vec![0; 8])).await.expect("no hang").1;
    assert!(matches!(got, Err(Error::Wc { .. })), "{got:?}");
    // Its last words reach the peer.
    assert_eq!(closed(&a.qp).await, CloseReason::Graceful);
    // What needs the runtime says that it is gone.
    let gone = "the device's tokio runtime was shut down";
    let accepted = tokio::time::timeout(LONG, listener.accept()).await.expect("no hang");
    assert_eq!(accepted.err().unwrap().to_string(), gone);
    assert_eq!(b.device.listen(Some(0)).await.unwrap_err().to_string(), gone);
    let e = b.device.connect("127.0.0.1", &b.pd, QpInit::new(&b.cq), b"").await.unwrap_err();
    assert_eq!(e.to_string(), gone);
}

#[tokio::test]
async fn a_taken_port_says_who_holds_it() {
    let first = Host::new(quick(), "127.0.0.1");
    let addr = first.device.udp_addr().unwrap();
    let e = quick().open(&format!("udp://{addr}")).unwrap_err().to_string();
    let me = format!("(process {})", std::process::id());
    assert!(e.contains(&format!("{addr} is held by ")) && e.contains(&me), "{e}");
    let e = quick().open("udp://192.0.2.1:0").unwrap_err().to_string();
    assert!(e.contains("no interface of this host has this address"), "{e}");
    // When it is gone its port is free.
    drop(first);
    until(|| quick().open(&format!("udp://{addr}")).is_ok(), "the port is free").await;
}

/// Two devices with the same port at two addresses, as two hosts have it.
#[tokio::test]
async fn the_same_port_at_two_addresses() {
    let (there, here) = two_at_one_port();
    let port = there.device.udp_addr().unwrap().port();
    let (listener, addr) = there.listen().await;
    let (qp, peer) =
        tokio::join!(here.connect(&addr, here.init()), there.accept(&listener, there.init()));
    let qp = qp.unwrap();
    assert_eq!(peer.peer_addr().unwrap(), SocketAddr::new([127, 0, 0, 2].into(), port));
    assert_eq!(qp.peer_addr().unwrap(), SocketAddr::new([127, 0, 0, 1].into(), port));
    let ((got, wc), (_, sent)) =
        tokio::join!(peer.recv_lent(vec![0; 64]), qp.send_lent(b"from .2 to .1".to_vec()));
    sent.unwrap();
    wc.unwrap();
    assert_eq!(got, b"from .2 to .1");
    assert_eq!(qp.disconnect().await, CloseReason::Graceful);
}

/// A socket bound to all addresses answers from the one that was asked, and asks from the one that
/// the route says.
#[tokio::test]
async fn an_unspecified_address_has_the_right_source() {
    let there = Host::new(quick(), "0.0.0.0");
    let here = Host::toward(&there.device, quick(), "0.0.0.0");
    let (listener, addr) = there.listen().await;
    let port = addr.parse::<SocketAddr>().unwrap().port();
    let (ma, mb) = (here.mr(1 << 20), there.mr(1 << 20));
    ma.write_at(0, &pattern(1 << 20, 5)).unwrap();
    for last in 1..4 {
        let ip = Ipv4Addr::new(127, 0, 0, last);
        let peer = format!("{ip}:{port}");
        let connect = here.connect(&peer, here.init());
        let (qp, passive) = tokio::join!(connect, there.accept(&listener, there.init()));
        let qp = qp.unwrap();
        assert_eq!(qp.peer_addr().unwrap().ip(), ip);
        assert_eq!(passive.local_addr().unwrap().ip(), ip, "it knows as whom it was asked");
        assert_eq!(qp.local_addr(), passive.peer_addr());
        qp.write(ma.slice(0..1 << 20), mb.remote(0)).await.unwrap();
        qp.read(ma.slice(0..1 << 20), mb.remote(0)).await.unwrap();
        assert!(octets(&mb, 0, 1 << 20) == pattern(1 << 20, 5));
        mb.write_at(0, &[0; 64]).unwrap();
    }
    for host in [&here, &there] {
        let stats = host.device.roce_stats().unwrap();
        assert_eq!((stats.port.icrc_bad, stats.port.wrong_peer, stats.trouble), (0, 0, None));
    }
}

#[tokio::test]
async fn a_path_mtu_that_does_not_fit_says_what_does() {
    let (here, there, listener, addr) = two().await;
    let peer = there.device.udp_addr().unwrap();
    assert_eq!(here.device.path_mtu(peer).unwrap(), PathMtu::Mtu4096);
    // The smaller of what both sides, and the queue pair, want.
    let mtu = |mtu| RoceOptions { mtu: Some(mtu), ..RoceOptions::default() };
    let small = DeviceOptions { roce: mtu(PathMtu::Mtu512), ..quick() };
    let modest = Host::toward(&there.device, small.clone(), "127.0.0.1");
    assert_eq!(modest.device.path_mtu(peer).unwrap(), PathMtu::Mtu512);
    for (host, wanted, agreed) in [
        (&here, None, 4096),
        (&here, Some(PathMtu::Mtu1024), 1024),
        (&modest, None, 512),
        (&modest, Some(PathMtu::Mtu1024), 512),
        (&modest, Some(PathMtu::Mtu256), 256),
    ] {
        let init = QpInit { mtu: wanted, ..host.init() };
        let (qp, peer) =
            tokio::join!(host.connect(&addr, init), there.accept(&listener, there.init()));
        let terms = qp.unwrap().terms().unwrap();
        assert_eq!(
            (terms.mtu, peer.attributes().unwrap().path_mtu.octets()),
            (agreed as u16, agreed)
        );
    }
    // A peer that takes less says so, and is asked for that.
    let there = Host::new(small, "127.0.0.1");
    let here = Host::toward(&there.device, quick(), "127.0.0.1");
    let (listener, addr) = there.listen().await;
    let (qp, _peer) =
        tokio::join!(here.connect(&addr, here.init()), there.accept(&listener, there.init()));
    assert_eq!(qp.unwrap().terms().unwrap().mtu, 512);
    assert_eq!(there.device.roce_stats().unwrap().port.mtu_rejected, 1);
}

/// Sets the MTU of the loopback of this test's own network namespace.
fn set_mtu(mtu: u32) {
    let link = ["link", "set", "lo", "mtu", &mtu.to_string(), "up"];
    let done = Command::new("ip").args(link).status().expect("ip runs");
    assert!(done.success(), "ip {link:?}");
}

/// A link of 1500 octets, as Ethernet has it, in a network namespace of its own.
#[tokio::test]
async fn the_path_mtu_is_what_the_link_takes() {
    const INSIDE: &str = "USERDMA_TEST_INSIDE";
    if std::env::var_os(INSIDE).is_none() {
        let inside = Command::new("unshare")
            .args(["-rn", "sh", "-c", "ip link set lo mtu 1500 up || exit 77; exec \"$0\" \"$@\""])
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", "the_path_mtu_is_what_the_link_takes", "--nocapture"])
            .env(INSIDE, "1")
            .output();
        match inside {
            Ok(out) if out.status.success() => {}
            Ok(out) if String::from_utf8_lossy(&out.stdout).contains("running 1 test") => {
                panic!("{}", String::from_utf8_lossy(&out.stderr));
            }
            _ => userdma_tests::skipped("this host gives an ordinary user no network namespace"),
        }
        return;
    }
    let (here, there, listener, addr) = two().await;
    let peer = there.device.udp_addr().unwrap();
    assert_eq!(here.device.path_mtu(peer).unwrap(), PathMtu::Mtu1024);
    // Half a second, eight times: until the link has grown again.
    let patient = QpInit { timeout: 17, ..here.init() };
    let (qp, passive) =
        tokio::join!(here.connect(&addr, patient), there.accept(&listener, there.init()));
    let qp = qp.unwrap();
    assert_eq!(
        (qp.terms().unwrap().mtu, passive.attributes().unwrap().path_mtu.octets()),
        (1024, 1024)
    );
    let (ma, mb) = (here.mr(1 << 20), there.mr(1 << 20));
    ma.write_at(0, &pattern(1 << 20, 1)).unwrap();
    qp.write(ma.slice(0..1 << 20), mb.remote(0)).await.unwrap();
    assert!(octets(&mb, 0, 1 << 20) == pattern(1 << 20, 1));

    // What does not fit is said, and what would.
    let roce = RoceOptions { mtu: Some(PathMtu::Mtu4096), ..RoceOptions::default() };
    let wide = Host::toward(&there.device, DeviceOptions { roce, ..quick() }, "127.0.0.1");
    let e = wide.connect(&addr, wide.init()).await.unwrap_err().to_string();
    let why = "a path MTU of 4096 octets does not fit the route to 127.0.0.1, whose MTU is 1500: \
               take 1024 at most";
    assert_eq!(e, why);
    let by_hand = here.pd.create_qp(here.init()).unwrap();
    by_hand.modify(&QpAttr::to(QpState::Init)).unwrap();
    let rtr = QpAttr {
        peer: Some(peer),
        dest_qp: Some(Qpn(2)),
        path_mtu: Some(PathMtu::Mtu2048),
        rq_psn: Some(Psn::new(0)),
        ..QpAttr::to(QpState::Rtr)
    };
    let e = by_hand.modify(&rtr).unwrap_err().to_string();
    assert!(e.contains("2048 octets does not fit the route to 127.0.0.1: take 1024"), "{e}");
    assert_eq!(by_hand.state(), QpState::Init, "nothing changed");

    // The link shrinks under a connection: its packets are too long, and that is told.
    set_mtu(600);
    let quickly = QpInit { timeout: 8, retry_cnt: 1, ..here.init() };
    assert_eq!(here.device.path_mtu(peer).unwrap(), PathMtu::Mtu512);
    let (small, _small) =
        tokio::join!(here.connect(&addr, quickly), there.accept(&listener, there.init()));
    let small = small.unwrap();
    assert_eq!(small.terms().unwrap().mtu, 512);
    small.write(ma.slice(0..1 << 16), mb.remote(0)).await.unwrap();
    qp.post_send(SendWr::write(1, [ma.slice(0..1 << 16)], mb.remote(0))).unwrap();
    until(|| here.device.roce_stats().unwrap().trouble.is_some(), "it is told").await;
    let trouble = here.device.roce_stats().unwrap().trouble.unwrap();
    assert!(trouble.contains("whose MTU is 600: take a smaller RDMA path MTU"), "{trouble}");
    // Below the smallest there is no connection, and grown again the work is done.
    set_mtu(300);
    let e = here.connect(&addr, here.init()).await.unwrap_err().to_string();
    assert!(e.contains("takes packets of 300 octets, and the smallest of RoCE needs 336"), "{e}");
    set_mtu(1500);
    here.done(1).await;
    assert!(octets(&mb, 0, 1 << 16) == pattern(1 << 16, 1));
}

#[tokio::test]
async fn an_unreliable_connection() {
    let (here, there, listener, addr) = two().await;
    let uc = |host: &Host| host.init().kind(QpType::Uc);
    let accept = async {
        let request = listener.accept().await.unwrap();
        assert_eq!(request.qp_type(), QpType::Uc);
        // It takes a queue pair of its type alone.
        let rc = there.pd.create_qp(there.init()).unwrap();
        let e = request.accept_qp(&rc, b"").await.unwrap_err().to_string();
        assert!(e.contains("is of type Rc, and cannot have this connection"), "{e}");
        let request = listener.accept().await.unwrap();
        request.accept(&there.pd, uc(&there), b"").await.unwrap()
    };
    let connect = async {
        let e = here.connect(&addr, uc(&here)).await.unwrap_err();
        assert!(matches!(e, Error::Rejected { .. }), "{e:?}");
        here.connect(&addr, uc(&here)).await.unwrap()
    };
    let (qp, peer) = tokio::join!(connect, accept);
    let (ma, mb) = (here.mr(100_000), there.mr(100_000));
    ma.write_at(0, &pattern(100_000, 3)).unwrap();
    peer.post_recv(RecvWr::new(1, [mb.slice(0..50_000)])).unwrap();
    peer.post_recv(RecvWr::new(2, [])).unwrap();
    qp.post_send(SendWr::send(3, [ma.slice(0..50_000)])).unwrap();
    let told = SendOp::WriteImm(mb.remote(50_000), 4);
    qp.post_send(SendWr::new(5, told, [ma.slice(0..50_000)])).unwrap();
    here.done(3).await;
    here.done(5).await;
    assert_eq!(there.done(1).await.byte_len, 50_000);
    let wc = there.done(2).await;
    assert_eq!((wc.opcode, wc.byte_len), (WcOpcode::RECV_IMM, 50_000));
    let sent = pattern(100_000, 3);
    assert!(
        octets(&mb, 0, 50_000) == sent[..50_000] && octets(&mb, 50_000, 50_000) == sent[..50_000]
    );
    // What it does not have is refused; what finds no receive is dropped, and counted.
    let read = SendWr::read(6, [ma.slice(0..8)], mb.remote(0));
    let e = qp.post_send(read).unwrap_err().to_string();
    assert_eq!(e, "READ is not supported by RoCEv2 UC");
    qp.post_send(SendWr::inline(7, SendOp::Send, b"nowhere to go")).unwrap();
    here.done(7).await;
    until(|| peer.roce_stats().unwrap().no_receive == 1, "it is counted").await;
    assert_eq!(qp.disconnect().await, CloseReason::Graceful);
    assert_eq!(closed(&peer).await, CloseReason::Graceful);
}

#[tokio::test]
async fn datagrams() {
    let mut hosts = vec!["127.0.0.1"];
    if userdma_tests::ipv6() {
        hosts.push("[::1]");
    }
    for host in hosts {
        let [a, b] = [0, 1].map(|_| Host::new(quick(), host));
        let key = QKey(0x1234_5678);
        let open = |side: &Host, key| {
            let qp = side.pd.create_qp(side.init().kind(QpType::Ud)).unwrap();
            assert_eq!(qp.post_send(SendWr::send(0, [])), Err(PostError::BadState(QpState::Init)));
            // A receive from before it is open counts.
            qp.open_datagram(key, PathMtu::Mtu1024).unwrap();
            assert_eq!(qp.state(), QpState::Rts);
            qp
        };
        let (qa, qb) = (open(&a, key), open(&b, key));
        let (ma, mb) = (a.mr(4096), b.mr(4096));
        ma.write_at(0, &pattern(1024, 9)).unwrap();
        for id in 0..4 {
            let at = id as usize * 1024;
            qb.post_recv(RecvWr::new(id, [mb.slice(at..at + 1024)])).unwrap();
        }
        let addr = b.device.udp_addr().unwrap();
        let dest = UdDest { addr, qpn: qb.qpn(), qkey: key };
        qa.post_send(SendWr::send(10, [ma.slice(0..100)]).to(dest)).unwrap();
        a.done(10).await;
        let wc = b.done(0).await;
        assert_eq!((wc.byte_len, wc.src_qp, wc.qpn), (140, Some(qa.qpn()), qb.qpn()));
        assert_eq!(octets(&mb, 40, 100), octets(&ma, 0, 100), "behind 40 octets of GRH");
        // Where it came from: in the GRH, of IPv4 in its last 20 octets as an IPv4 header.
        let sender = a.device.udp_addr().unwrap();
        let grh = octets(&mb, 0, 40);
        match sender {
            SocketAddr::V4(v4) => assert_eq!(grh[32..36], v4.ip().octets()),
            SocketAddr::V6(v6) => assert_eq!(grh[8..24], v6.ip().octets()),
        }

        // The wrong key, the wrong queue pair: dropped, and nobody is told.
        let wrong_key = UdDest { qkey: QKey(1), ..dest };
        qa.post_send(SendWr::inline(11, SendOp::Send, b"no").to(wrong_key)).unwrap();
        let wrong_qp = UdDest { qpn: Qpn(0xabcdef), ..dest };
        qa.post_send(SendWr::inline(12, SendOp::Send, b"no").to(wrong_qp)).unwrap();
        let with_imm = SendWr::inline(13, SendOp::SendImm(77), b"yes").to(dest);
        qa.post_send(with_imm).unwrap();
        for id in [11, 12, 13] {
            a.done(id).await;
        }
        let wc = b.done(1).await;
        assert_eq!((wc.byte_len, wc.imm.map(|imm| imm.to_u32())), (43, Some(77)));
        assert_eq!(octets(&mb, 1024 + 40, 3), b"yes");
        assert_eq!(b.device.roce_stats().unwrap().port.unknown_qp, 1);

        // And back, to where the completion says.
        qa.post_recv(RecvWr::new(20, [ma.slice(2048..4096)])).unwrap();
        let back = UdDest { addr: sender, qpn: wc.src_qp.unwrap(), qkey: key };
        qb.post_send(SendWr::send(21, [mb.slice(0..1024)]).to(back)).unwrap();
        assert_eq!(a.done(20).await.byte_len, 1064);
        b.done(21).await;

        // What a datagram is not.
        for (wr, why) in [
            (SendWr::send(1, [ma.slice(0..1025)]).to(dest), "1025 octets, at most 1024"),
            (SendWr::send(1, [ma.slice(0..8)]), "destination"),
            (
                SendWr::write(1, [ma.slice(0..8)], mb.remote(0)).to(dest),
                "not supported by RoCEv2 UD",
            ),
        ] {
            let e = qa.post_send(wr).unwrap_err().to_string();
            assert!(e.contains(why), "{e}");
        }
        let e = a.device.connect_qp(&addr.to_string(), &qa, b"").await.unwrap_err();
        assert!(matches!(e, Error::State(_) | Error::Port(_)), "{e:?}");
        // It ends like any other.
        qa.post_recv(RecvWr::new(30, [])).unwrap();
        assert_eq!(qa.disconnect().await, CloseReason::Graceful);
        let wc = a.wc().await;
        assert_eq!((wc.id, wc.status), (30, WcStatus::WR_FLUSH_ERR));
    }
}

/// Both sides exchange numbers and addresses by themselves, as `ibv_rc_pingpong` does.
#[tokio::test]
async fn queue_pairs_moved_by_hand() {
    let [a, b] = [0, 1].map(|_| Host::new(quick(), "127.0.0.1"));
    let (qa, qb) = (a.pd.create_qp(a.init()).unwrap(), b.pd.create_qp(b.init()).unwrap());
    let (ma, mb) = (a.mr(1 << 16), b.mr(1 << 16));
    ma.write_at(0, &pattern(1 << 16, 3)).unwrap();
    // Posted before anything else.
    qb.post_recv(RecvWr::new(1, [mb.slice(0..1 << 16)])).unwrap();
    let psns = [0xff_fff0, 0x00_0123];
    let sides = [(&a, &qa, &qb, psns), (&b, &qb, &qa, [psns[1], psns[0]])];
    for (i, (_, qp, other, [own, theirs])) in sides.into_iter().enumerate() {
        let peer = sides[1 - i].0.device.udp_addr();
        qp.modify(&QpAttr::to(QpState::Init)).unwrap();
        assert_eq!(qp.state(), QpState::Init);
        let e = sides[i].0.device.connect_qp("127.0.0.1", qp, b"").await.unwrap_err().to_string();
        assert!(e.contains("has moved this queue pair to INIT"), "{e}");
        let rtr = QpAttr {
            peer,
            dest_qp: Some(other.qpn()),
            path_mtu: Some(PathMtu::Mtu1024),
            rq_psn: Some(Psn::new(theirs)),
            ..QpAttr::to(QpState::Rtr)
        };
        let e = qp.modify(&QpAttr { peer: None, ..rtr }).unwrap_err().to_string();
        assert!(e.contains("peer must be set to go to Rtr"), "{e}");
        qp.modify(&rtr).unwrap();
        assert_eq!(qp.state(), QpState::Rtr);
        let e = qp.modify(&QpAttr::to(QpState::Rts)).unwrap_err().to_string();
        assert!(e.contains("sq_psn must be set"), "{e}");
        let rts = QpAttr { sq_psn: Some(Psn::new(own)), ..QpAttr::to(QpState::Rts) };
        qp.modify(&rts).unwrap();
        assert_eq!((qp.state(), qp.peer_addr()), (QpState::Rts, peer));
    }
    // Over the end of the PSNs.
    qa.post_send(SendWr::send(2, [ma.slice(0..1 << 16)])).unwrap();
    a.done(2).await;
    b.done(1).await;
    assert!(octets(&mb, 0, 1 << 16) == pattern(1 << 16, 3));
    qb.read(mb.slice(0..4096), ma.remote(4096)).await.unwrap();
    assert_eq!(octets(&mb, 0, 4096), octets(&ma, 4096, 4096));

    // Back to RESET: what is posted is dropped, who awaits some of it hears of that.
    qb.post_recv(RecvWr::new(3, [])).unwrap();
    let waits = qb.recv(mb.slice(0..8));
    let reset = async { qb.modify(&QpAttr::to(QpState::Reset)).unwrap() };
    let (awaited, ()) = tokio::join!(waits, reset);
    assert!(
        matches!(awaited, Err(Error::Wc { status: WcStatus::WR_FLUSH_ERR, .. })),
        "{awaited:?}"
    );
    assert_eq!((b.cq.poll(&mut [Wc::default()]), qb.state()), (0, QpState::Reset));
    assert_eq!(qb.post_recv(RecvWr::new(4, [])), Err(PostError::BadState(QpState::Reset)));
    // To the error state, and once more from the start.
    qa.post_recv(RecvWr::new(5, [])).unwrap();
    qa.modify(&QpAttr::to(QpState::Err)).unwrap();
    assert_eq!(a.wc().await.status, WcStatus::WR_FLUSH_ERR);
    assert_eq!(closed(&qa).await, CloseReason::Aborted);
    qa.modify(&QpAttr::to(QpState::Reset)).unwrap();
    assert_eq!(qa.close_reason(), None);
    let (listener, _) = b.listen().await;
    let here = Host::toward(&b.device, quick(), "127.0.0.1");
    // One that the program moved before takes a connection all the same.
    let addr = listener.local_addr().to_string();
    let accept = async { listener.accept().await.unwrap().accept_qp(&qb, b"").await.unwrap() };
    let (qp, ()) = tokio::join!(here.connect(&addr, here.init()), accept);
    let qp = qp.unwrap();
    qb.post_recv(RecvWr::new(6, [])).unwrap();
    qp.submit(SendWr::send(7, [])).await.unwrap();
    b.done(6).await;
    let e = qb.modify(&QpAttr::to(QpState::Reset)).unwrap_err().to_string();
    assert!(e.contains("the connection manager moves this queue pair"), "{e}");
}

#[tokio::test]
async fn datagrams_of_a_socket_for_all_addresses_say_where_from() {
    let a = Host::new(quick(), "0.0.0.0");
    let b = Host::new(quick(), "127.0.0.1");
    let key = QKey(5);
    let [qa, qb] = [&a, &b].map(|side| side.pd.create_qp(side.init().kind(QpType::Ud)).unwrap());
    qb.open_datagram(key, PathMtu::Mtu1024).unwrap();
    let e = qa.open_datagram(key, PathMtu::Mtu1024).unwrap_err().to_string();
    assert!(e.contains("local must be set to go to Rtr"), "{e}");
    let local = SocketAddr::new([127, 0, 0, 7].into(), a.device.udp_addr().unwrap().port());
    let (local, path_mtu) = (Some(local), Some(PathMtu::Mtu1024));
    qa.modify(&QpAttr { local, path_mtu, ..QpAttr::to(QpState::Rtr) }).unwrap();
    qa.modify(&QpAttr { sq_psn: Some(Psn::new(0)), ..QpAttr::to(QpState::Rts) }).unwrap();
    let mb = b.mr(64);
    qb.post_recv(RecvWr::new(1, [mb.slice(0..64)])).unwrap();
    let dest = UdDest { addr: b.device.udp_addr().unwrap(), qpn: qb.qpn(), qkey: key };
    qa.post_send(SendWr::inline(2, SendOp::Send, b"hello").to(dest)).unwrap();
    a.done(2).await;
    assert_eq!(b.done(1).await.byte_len, 45);
    assert_eq!(octets(&mb, 32, 4), [127, 0, 0, 7], "the source in the GRH");
}

/// A peer by itself: the state machines behind a socket, without our token, for as long as it is
/// turned.
struct Stranger {
    socket: UdpSocket,
    port: Port,
    qpn: Qpn,
    train: Train,
    began: Instant,
}

impl Stranger {
    const SERVICE: u16 = 7174;

    /// Behind `socket`, to be asked from the UDP port `peer`, which nobody tells it.
    fn new(socket: UdpSocket, peer: u16) -> Self {
        socket.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
        let mut config = roce::port::Config::new(socket.local_addr().unwrap(), 5);
        config.cm.peer_udp_port = peer;
        let mut port = Port::new(config);
        let qpn = port.create_qp(roce::Config::new(QpType::Rc, PdId(0), Qpn(0))).unwrap();
        port.listen(PortSpace::TCP.service_id(Self::SERVICE), 4).unwrap();
        Self { socket, port, qpn, train: Train::default(), began: Instant::now() }
    }

    /// Takes what has come, and answers it, until `done` says so.
    fn turn(mut self, done: impl Fn(&Self) -> bool) -> Self {
        let mut octets = vec![0; 65_536];
        while !done(&self) {
            assert!(self.began.elapsed() < LONG);
            let now =
                userdma_proto::time::Instant::from_nanos(self.began.elapsed().as_nanos() as u64);
            if let Ok((n, from)) = self.socket.recv_from(&mut octets) {
                self.port.handle_datagram(now, from, None, 0, &octets[..n], &NoMemory);
            }
            while let Some(Event::Request(request)) = self.port.poll_event() {
                let answer = Accept { private_data: b"who are you?", ..Accept::default() };
                self.port.accept(now, &request, self.qpn, &answer).unwrap();
            }
            if self.port.poll_timeout().is_some_and(|at| at <= now) {
                self.port.handle_timeout(now);
            }
            let limits = Limits { max_packets: 1, ..Limits::default() };
            let train = &mut self.train;
            while let Some(way) = self.port.poll_transmit(now, &NoMemory, limits, train) {
                self.socket.send_to(train.octets(), way.to).unwrap();
            }
        }
        self
    }
}

/// A queue pair of ours that is connected to a stranger, who was turned until it knew.
async fn to_a_stranger(init: impl FnOnce(&Host) -> QpInit) -> (Host, Qp, Stranger) {
    let (socket, port) = silent();
    let mut options = quick();
    options.roce.peer_udp_port = port;
    let here = Host::new(options, "127.0.0.1");
    let stranger = Stranger::new(socket, here.device.udp_addr().unwrap().port());
    let (device, pd, init) = (here.device.clone(), here.pd.clone(), init(&here));
    let peer = std::thread::spawn(|| {
        stranger
            .turn(|this| this.port.qp(this.qpn).is_some_and(|qp| qp.stats().packets_received > 0))
    });
    // As much private data as leaves no room for a token.
    let qp = device.connect("127.0.0.1:7174", &pd, init, &[7; 56]).await.unwrap();
    let sent = qp.submit(SendWr::inline(1, SendOp::Write(Default::default()), b""));
    // Its time is what the peer needs to go.
    let (sent, stranger) = tokio::join!(sent, async {
        tokio::task::spawn_blocking(|| peer.join().unwrap()).await.unwrap()
    });
    sent.unwrap();
    (here, qp, stranger)
}

#[tokio::test]
async fn a_peer_that_vanishes_is_noticed_by_work() {
    let quickly = |host: &Host| QpInit { timeout: 10, retry_cnt: 3, ..host.init() };
    let (here, qp, stranger) = to_a_stranger(quickly).await;
    assert!(says(&qp.private_data(), b"who are you?"));
    assert_eq!(qp.terms().unwrap().token, None, "a stranger");
    qp.post_recv(RecvWr::new(2, [])).unwrap();
    qp.post_send(SendWr::inline(3, SendOp::Send, b"are you there?")).unwrap();
    let ends = [here.wc().await, here.wc().await].map(|wc| (wc.id, wc.status));
    assert_eq!(ends, [(3, WcStatus::RETRY_EXC_ERR), (2, WcStatus::WR_FLUSH_ERR)]);
    assert_eq!(closed(&qp).await, CloseReason::WorkFailed);
    // The end of the connection is told to whom it may concern.
    let stranger = tokio::task::spawn_blocking(|| {
        stranger.turn(|this| this.port.qp(this.qpn).is_some_and(|qp| qp.state() == QpState::Err))
    });
    stranger.await.unwrap();
}

#[tokio::test]
async fn a_peer_that_vanishes_is_noticed_by_disconnecting() {
    let (_here, qp, _stranger) = to_a_stranger(Host::init).await;
    let began = Instant::now();
    assert_eq!(qp.disconnect().await, CloseReason::Lost);
    // Asked four times, each time with twice the patience: 3.75 s.
    assert!(began.elapsed() > Duration::from_secs(3), "{:?}", began.elapsed());
    assert_eq!(qp.state(), QpState::Err);
}

/// What a queue pair was made with is in force again after RESET.
#[tokio::test]
async fn a_reset_keeps_the_queue_pairs_own_rights() {
    let a = Host::new(quick(), "127.0.0.1");
    let rights = Access::REMOTE_READ;
    let init = QpInit { remote_access: rights, min_rnr_timer: 3, ird: 5, ..a.init() };
    let qp = a.pd.create_qp(init).unwrap();
    let check = |when: &str| {
        let attr = qp.attributes().unwrap();
        let found = (attr.access, attr.min_rnr_timer, attr.max_dest_rd_atomic);
        assert_eq!(found, (rights, 3, 5), "{when}");
    };
    check("made");
    qp.modify(&QpAttr::to(QpState::Init)).unwrap();
    qp.modify(&QpAttr::to(QpState::Reset)).unwrap();
    check("reset");
    let e = qp.modify(&QpAttr { timeout: Some(40), ..QpAttr::to(QpState::Reset) }).unwrap_err();
    assert!(e.to_string().contains("timeout is 40, at most 31"), "{e}");
    qp.modify(&QpAttr { timeout: Some(20), ..QpAttr::to(QpState::Reset) }).unwrap();
    check("set");
    assert_eq!(qp.attributes().unwrap().timeout, 20);
}

#[tokio::test]
async fn the_calling_program_needs_no_runtime() {
    let runtime = a_runtime();
    let handle = runtime.handle().clone();
    let program = std::thread::spawn(move || {
        let options = DeviceOptions { runtime: Some(handle), ..quick() };
        let there = options.clone().open("udp://127.0.0.1:0").unwrap();
        let here = toward(&there, "127.0.0.1", options);
        let sides = [&there, &here]
            .map(|device| (device.alloc_pd().unwrap(), device.create_cq(8).unwrap()));
        block_on(async {
            let listener = there.listen(Some(0)).await.unwrap();
            let addr = format!("localhost:{}", listener.local_addr().port());
            let [(pd, cq), (own_pd, own_cq)] = &sides;
            let accept = async {
                listener.accept().await.unwrap().accept(pd, QpInit::new(cq), b"").await.unwrap()
            };
            let connect = here.connect(&addr, own_pd, QpInit::new(own_cq), b"");
            let (qp, peer) = tokio::join!(connect, accept);
            let qp = qp.unwrap();
            let ((got, _), (_, sent)) =
                tokio::join!(peer.recv_lent(vec![0; 8]), qp.send_lent(b"hello".to_vec()));
            sent.unwrap();
            assert_eq!(got, b"hello");
            assert_eq!(qp.disconnect().await, CloseReason::Graceful);
            let server = pd.create_qp(QpInit::new(cq).kind(QpType::Ud)).unwrap();
            let service = there.listen_datagrams(Some(0), &server, QKey(1), b"").unwrap();
            let addr = format!("localhost:{}", service.local_addr().port());
            assert_eq!(here.resolve(&addr, b"").await.unwrap().dest.qpn, server.qpn());
        });
    });
    tokio::task::spawn_blocking(move || program.join().unwrap()).await.unwrap();
    runtime.shutdown_background();
}

/// Runs a future in this thread, which sleeps in between.
fn block_on<T>(future: impl Future<Output = T>) -> T {
    struct Unpark(std::thread::Thread);
    impl std::task::Wake for Unpark {
        fn wake(self: std::sync::Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = std::sync::Arc::new(Unpark(std::thread::current())).into();
    let mut context = std::task::Context::from_waker(&waker);
    let mut future = std::pin::pin!(future);
    loop {
        match future.as_mut().poll(&mut context) {
            std::task::Poll::Ready(done) => return done,
            std::task::Poll::Pending => std::thread::park_timeout(LONG),
        }
    }
}

/// A UD service is asked for by its rdma_cm port; the answer says where datagrams go.
#[tokio::test]
async fn datagram_services() {
    let there = Host::new(quick(), "127.0.0.1");
    let here = Host::toward(&there.device, quick(), "127.0.0.1");
    let (key, own) = (userdma::RDMA_UDP_QKEY, QKey(0x111));
    let open = |side: &Host, key| {
        let qp = side.pd.create_qp(side.init().kind(QpType::Ud)).unwrap();
        qp.open_datagram(key, PathMtu::Mtu1024).unwrap();
        qp
    };
    let (server, client) = (open(&there, key), open(&here, own));
    let service = there.device.listen_datagrams(Some(0), &server, key, b"welcome").unwrap();
    let addr = service.local_addr().to_string();
    let taken = there.device.listen_datagrams(Some(service.local_addr().port()), &server, key, b"");
    assert!(taken.unwrap_err().to_string().contains("has a listener already"));

    let found = here.device.resolve(&addr, b"hello").await.unwrap();
    assert_eq!((found.dest.qpn, found.dest.qkey), (server.qpn(), key));
    assert_eq!(Some(found.dest.addr), there.device.udp_addr());
    assert!(found.private_data.starts_with(b"welcome\0"));

    let (ma, mb) = (here.mr(64), there.mr(256));
    ma.write_at(0, b"a datagram").unwrap();
    server.post_recv(RecvWr::new(1, [mb.slice(0..256)])).unwrap();
    client.post_send(SendWr::send(2, [ma.slice(0..10)]).to(found.dest)).unwrap();
    here.done(2).await;
    assert_eq!(there.done(1).await.byte_len, 50);
    assert_eq!(octets(&mb, 40, 10), b"a datagram");

    // One that is gone says so, and a connection's port is none of datagrams.
    drop(service);
    let e = here.device.resolve(&addr, b"").await.unwrap_err();
    assert!(matches!(e, Error::NoService { .. }), "{e:?}");
    assert!(e.to_string().contains("SIDR status"), "{e}");
    let rc = there.pd.create_qp(there.init()).unwrap();
    let e = there.device.listen_datagrams(None, &rc, key, b"").unwrap_err();
    assert!(matches!(e, Error::Unsupported(_)), "{e:?}");
    let e = here.device.listen_datagrams(None, &server, key, b"").unwrap_err();
    assert!(matches!(e, Error::State(_)), "{e:?}");

    // Nobody is there.
    let options = DeviceOptions { startup_timeout: Duration::from_millis(300), ..quick() };
    let nobody = Host::new(quick(), "127.0.0.1");
    let lonely = Host::toward(&nobody.device, options, "127.0.0.1");
    drop(nobody);
    let e = lonely.device.resolve("127.0.0.1:7174", b"").await.unwrap_err();
    assert!(matches!(e, Error::NoAnswer { .. }), "{e:?}");
}

/// A small receive buffer makes for small packets, unless the peer tells what it has on the way, or
/// the program says otherwise.
#[tokio::test]
async fn a_small_buffer_asks_a_stranger_for_small_packets() {
    let there = Host::new(quick(), "127.0.0.1");
    let (listener, addr) = there.listen().await;
    let small = DeviceOptions { recv_buffer: Some(200_000), ..quick() };
    let mut known = small.clone();
    known.roce.userdma_peers = true;
    for (options, asked, mtu) in [
        (quick(), None, 4096),
        (small.clone(), None, 1024),
        (small, Some(PathMtu::Mtu2048), 2048),
        (known, None, 4096),
    ] {
        let here = Host::toward(&there.device, options, "127.0.0.1");
        let init = QpInit { mtu: asked, ..here.init() };
        let (qp, _peer) =
            tokio::join!(here.connect(&addr, init), there.accept(&listener, there.init()));
        assert_eq!(qp.unwrap().terms().unwrap().mtu, mtu);
    }
}
