//! How connections come about, do not come about, and end.

mod common;

use std::{
    io::{ErrorKind, Read, Write},
    net::{TcpListener, TcpStream},
    thread,
    time::{Duration, Instant},
};

use common::*;
use userdma::{
    CloseReason, Device, DeviceOptions, Error, QpInit, QpState, RecvWr, SendOp, SendWr,
    StartupError, WcStatus,
};

/// A device with a domain and a queue.
fn side(options: DeviceOptions, host: &str) -> (Device, userdma::Pd, userdma::Cq) {
    let device = options.open(&format!("tcp://{host}")).unwrap();
    let (pd, cq) = (device.alloc_pd().unwrap(), device.create_cq(64).unwrap());
    (device, pd, cq)
}

#[tokio::test]
async fn private_data_and_depths_reach_the_other_side() {
    let (_device, listener, addr) = listening("127.0.0.1", quick()).await;
    let (here, pd, cq) = side(quick(), "127.0.0.1");
    let ask = async {
        let init = QpInit { ird: 3, ord: 5, ..QpInit::new(&cq) };
        here.connect(&addr, &pd, init, b"question").await.unwrap()
    };
    let answer = async {
        let (there, pd, cq) = side(quick(), "127.0.0.1");
        let request = listener.accept().await.unwrap();
        assert_eq!(request.private_data(), b"question");
        assert_eq!(
            (request.ird(), request.ord(), request.mpa().map(|mpa| mpa.revision)),
            (Some(3), Some(5), Some(2))
        );
        let init = QpInit { ird: 4, ord: 9, ..QpInit::new(&cq) };
        let qp = request.accept(&pd, init, b"answer").await.unwrap();
        let settled = qp.established().unwrap();
        assert_eq!(settled.ord, 3, "bounded by the peer's IRD (RFC 6581 §9.1)");
        (there, qp)
    };
    let (qp, (_there, peer)) = tokio::join!(ask, answer);
    assert_eq!(qp.private_data(), b"answer");
    assert_eq!(qp.established().unwrap().ord, 4, "bounded by the peer's IRD");
    assert_eq!(qp.peer_addr(), peer.local_addr());
    assert_eq!(qp.local_addr(), peer.peer_addr());
    assert_eq!((qp.state(), peer.state()), (QpState::Rts, QpState::Rts));
}

#[tokio::test]
async fn a_reject_carries_private_data() {
    let (device, listener, addr) = listening("127.0.0.1", quick()).await;
    let (here, pd, cq) = side(quick(), "127.0.0.1");
    let refuse = async { listener.accept().await.unwrap().reject(b"not today").await.unwrap() };
    let (failed, ()) = tokio::join!(here.connect(&addr, &pd, QpInit::new(&cq), b""), refuse);
    match failed.unwrap_err() {
        Error::Startup { source: StartupError::Rejected { private_data, .. }, .. } => {
            assert_eq!(private_data, b"not today");
        }
        e => panic!("{e:?}"),
    }
    // A request that is dropped is rejected too, and so are those of a dropped listener.
    let drop_it = async { drop(listener.accept().await.unwrap()) };
    let (failed, ()) = tokio::join!(here.connect(&addr, &pd, QpInit::new(&cq), b""), drop_it);
    let e = failed.unwrap_err();
    assert!(matches!(e, Error::Startup { source: StartupError::Rejected { .. }, .. }), "{e:?}");
    assert_eq!(device.stats().rejected, 2);
}

#[tokio::test]
async fn private_data_that_is_too_long_is_refused_by_the_call() {
    let (_device, listener, addr) = listening("127.0.0.1", quick()).await;
    let (here, pd, cq) = side(quick(), "127.0.0.1");
    let e = here.connect(&addr, &pd, QpInit::new(&cq), &[0; 509]).await.unwrap_err();
    assert!(matches!(e, Error::Post(_)), "{e:?}");
    let answer = async {
        let request = listener.accept().await.unwrap();
        request.accept(&pd, QpInit::new(&cq), &[0; 509]).await.unwrap_err()
    };
    let (failed, e) = tokio::join!(here.connect(&addr, &pd, QpInit::new(&cq), &[7; 508]), answer);
    assert!(matches!(e, Error::Post(_)), "{e:?}");
    let e = failed.unwrap_err();
    assert!(matches!(e, Error::Startup { source: StartupError::Rejected { .. }, .. }), "{e:?}");
}

#[tokio::test]
async fn nobody_listens() {
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let (here, pd, cq) = side(quick(), "127.0.0.1");
    let e = here.connect(&free.to_string(), &pd, QpInit::new(&cq), b"").await.unwrap_err();
    assert!(e.to_string().contains("nothing listens there"), "{e}");
    let e = here.connect("[::1]:9", &pd, QpInit::new(&cq), b"").await.unwrap_err();
    assert!(e.to_string().contains("one is IPv4, the other IPv6"), "{e}");
    let e = here.connect("no such host", &pd, QpInit::new(&cq), b"").await.unwrap_err();
    assert!(matches!(e, Error::BadAddress(_)), "{e:?}");
}

#[tokio::test]
async fn names_are_looked_up() {
    let (_device, listener, addr) = listening("localhost", quick()).await;
    let port = listener.local_addr().port();
    assert!(listener.local_addr().ip().is_loopback(), "{addr}");
    let (here, pd, cq) = side(quick(), "localhost");
    let accept = async {
        let request = listener.accept().await.unwrap();
        request.accept(&pd, QpInit::new(&cq), b"").await.unwrap()
    };
    let connect = here.connect(&addr, &pd, QpInit::new(&cq), b"");
    let (qp, _peer) = tokio::join!(connect, accept);
    assert_eq!(qp.unwrap().state(), QpState::Rts);
    // From any address of ours to a name.
    let (here, pd, cq) = side(quick(), "0.0.0.0");
    let accept = async {
        let request = listener.accept().await.unwrap();
        request.accept(&pd, QpInit::new(&cq), b"").await.unwrap()
    };
    let peer = format!("localhost:{port}");
    let (qp, _peer) = tokio::join!(here.connect(&peer, &pd, QpInit::new(&cq), b""), accept);
    assert_eq!(qp.unwrap().state(), QpState::Rts);
}

#[tokio::test]
async fn a_taken_port_says_what_to_do() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let device = Device::open("tcp://127.0.0.1").unwrap();
    let e = device.listen(Some(port)).await.unwrap_err().to_string();
    assert!(e.contains("another socket holds it") && e.contains("port 0"), "{e}");
    let device = Device::open("tcp://192.0.2.1:0").unwrap();
    let e = device.listen(None).await.unwrap_err().to_string();
    assert!(e.contains("no interface of this host has this address"), "{e}");
}

/// An old peer: closes on revision 2, answers revision 1.
#[tokio::test]
async fn a_peer_that_closes_silently_is_tried_with_revision_1() {
    let old = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = old.local_addr().unwrap().to_string();
    let peer = thread::spawn(move || {
        let mut requests = Vec::new();
        for _ in 0..2 {
            let (mut stream, _) = old.accept().unwrap();
            let mut start = [0; 20];
            stream.read_exact(&mut start).unwrap();
            let mut rest = vec![0; u16::from_be_bytes([start[18], start[19]]).into()];
            stream.read_exact(&mut rest).unwrap();
            requests.push((start, rest));
            if start[17] == 1 {
                let mut reply = *b"MPA ID Rep Frame\x40\x01\x00\x02";
                reply[16] = start[16] & 0x40;
                stream.write_all(&reply).unwrap();
                stream.write_all(b"ok").unwrap();
                // Until the other side closes.
                let _ = stream.read(&mut [0; 64]);
            }
        }
        requests
    });
    let (here, pd, cq) = side(quick(), "127.0.0.1");
    let qp = here.connect(&addr, &pd, QpInit::new(&cq), b"hello").await.unwrap();
    let settled = qp.established().unwrap();
    assert_eq!((settled.revision, settled.ird, settled.ord), (1, 16, 16));
    assert_eq!(qp.private_data(), b"ok");
    drop(qp);
    let requests = peer.join().unwrap();
    assert_eq!((requests[0].0[17], requests[1].0[17]), (2, 1));
    assert_eq!(requests[1].1, b"hello", "revision 1 has no IRD/ORD block in front");
    assert_eq!(requests[0].1[4..], *b"hello");
}

#[tokio::test]
async fn a_peer_that_never_speaks_is_dropped_after_the_timeout() {
    let limit = Duration::from_millis(200);
    let options = DeviceOptions { startup_timeout: limit, ..quick() };
    let (device, listener, addr) = listening("127.0.0.1", options).await;
    let began = Instant::now();
    let gone = tokio::task::spawn_blocking(move || {
        let mut silent = TcpStream::connect(&addr).unwrap();
        let mut slow = TcpStream::connect(&addr).unwrap();
        slow.write_all(b"MPA ID Req").unwrap();
        let mut wrong = TcpStream::connect(&addr).unwrap();
        wrong.write_all(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").unwrap();
        for stream in [&mut wrong, &mut silent, &mut slow] {
            // Closed or reset, but not left open.
            match stream.read(&mut [0; 64]) {
                Ok(0) => {}
                Err(e) if e.kind() == ErrorKind::ConnectionReset => {}
                other => panic!("{other:?}"),
            }
        }
    });
    tokio::time::timeout(LONG, gone).await.unwrap().unwrap();
    assert!(began.elapsed() >= limit);
    let stats = device.stats();
    assert_eq!((stats.startup_timeouts, stats.startup_malformed), (2, 1), "{stats:?}");
    drop(listener);
}

/// Only start-ups under way count: a slow one stays while others come and go.
#[tokio::test]
async fn a_slow_start_up_is_not_dropped_for_those_that_have_ended() {
    let options = DeviceOptions { max_startups: 3, ..quick() };
    let (device, listener, addr) = listening("127.0.0.1", options).await;
    let slow = TcpStream::connect(&addr).unwrap();
    let (here, pd, cq) = side(quick(), "127.0.0.1");
    for _ in 0..8 {
        let accept = async {
            let request = listener.accept().await.unwrap();
            request.accept(&pd, QpInit::new(&cq), b"").await.unwrap()
        };
        let (qp, _peer) = tokio::join!(here.connect(&addr, &pd, QpInit::new(&cq), b""), accept);
        qp.unwrap();
    }
    assert_eq!(device.stats().refused, 0);
    slow.set_nonblocking(true).unwrap();
    let e = (&slow).read(&mut [0; 1]).unwrap_err();
    assert_eq!(e.kind(), ErrorKind::WouldBlock, "it is still there");
}

/// More strangers than there is room for, who connect and say nothing: the oldest makes room.
#[tokio::test]
async fn silent_strangers_do_not_lock_out_who_has_something_to_say() {
    let options = DeviceOptions { max_startups: 2, ..quick() };
    let (device, listener, addr) = listening("127.0.0.1", options).await;
    let mut silent: Vec<_> = (0..8).map(|_| TcpStream::connect(&addr).unwrap()).collect();
    let (here, pd, cq) = side(quick(), "127.0.0.1");
    let accept = async {
        let request = listener.accept().await.unwrap();
        request.accept(&pd, QpInit::new(&cq), b"").await.unwrap()
    };
    let (qp, _peer) = tokio::join!(here.connect(&addr, &pd, QpInit::new(&cq), b""), accept);
    assert_eq!(qp.unwrap().state(), QpState::Rts);
    assert_eq!(device.stats().refused, 7, "of nine, two are kept at a time");
    let mut oldest = silent.remove(0);
    let dropped = tokio::task::spawn_blocking(move || oldest.read(&mut [0; 1]));
    match dropped.await.unwrap() {
        Ok(0) => {}
        Err(e) if e.kind() == ErrorKind::ConnectionReset => {}
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn connecting_to_a_silent_peer_times_out_and_leaves_the_queue_pair() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = silent.local_addr().unwrap().to_string();
    let (here, pd, cq) = side(quick(), "127.0.0.1");
    let startup_timeout = Duration::from_millis(50);
    let qp = pd.create_qp(QpInit { startup_timeout, ..QpInit::new(&cq) }).unwrap();
    qp.post_recv(RecvWr::new(5, [])).unwrap();
    let e = here.connect_qp(&addr, &qp, b"").await.unwrap_err();
    assert!(
        matches!(e, Error::Startup { source: StartupError::TimedOut(t), .. } if t == startup_timeout),
        "{e:?}"
    );
    assert_eq!(qp.state(), QpState::Init);

    // It can be used still, and its receive is posted still.
    let (_device, listener, addr) = listening("127.0.0.1", quick()).await;
    let accept = async {
        let request = listener.accept().await.unwrap();
        let qp = request.accept(&pd, QpInit::new(&cq), b"").await.unwrap();
        qp.post_send(SendWr::send(6, [])).unwrap();
        qp
    };
    let (connected, _peer) = tokio::join!(here.connect_qp(&addr, &qp, b""), accept);
    connected.unwrap();
    let again = here.connect_qp(&addr, &qp, b"").await.unwrap_err();
    assert!(matches!(again, Error::State(_)), "{again:?}");
    // RFC 5044 §7.1.2: the responder's SEND waits for our first message.
    qp.submit(SendWr::inline(0, SendOp::Write(Default::default()), b"")).await.unwrap();
    let (mut ids, next) = (Vec::new(), || cq.next());
    for _ in 0..2 {
        let wc = tokio::time::timeout(LONG, next()).await.unwrap().unwrap();
        assert_eq!(wc.status, WcStatus::SUCCESS);
        ids.push(wc.id);
    }
    ids.sort_unstable();
    assert_eq!(ids, [5, 6]);
}

#[tokio::test]
async fn a_cancelled_connect_gives_up() {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = silent.local_addr().unwrap().to_string();
    let (here, pd, cq) = side(quick(), "127.0.0.1");
    let qp = pd.create_qp(QpInit::new(&cq)).unwrap();
    let closed = tokio::task::spawn_blocking(move || {
        let (mut stream, _) = silent.accept().unwrap();
        let mut start = [0; 20];
        stream.read_exact(&mut start).unwrap();
        // Ends when the other side gives up.
        let mut rest = Vec::new();
        let _ = stream.read_to_end(&mut rest);
    });
    tokio::select! {
        biased;
        _ = here.connect_qp(&addr, &qp, b"") => panic!("nobody answers"),
        () = tokio::time::sleep(Duration::from_millis(50)) => {}
    }
    tokio::time::timeout(LONG, closed).await.unwrap().unwrap();
    assert_eq!(qp.state(), QpState::Init);
}

#[tokio::test]
async fn what_a_responder_posts_waits_for_the_initiators_first_message() {
    let (a, b) = pair().await;
    let mb = b.mr(64, 1);
    let ma = a.mr(64, 2);
    a.qp.post_recv(RecvWr::new(1, [ma.slice(0..64)])).unwrap();
    b.qp.post_send(SendWr::send(2, [mb.slice(0..64)])).unwrap();
    assert_eq!(b.qp.stats().fpdus_sent, 0);
    a.post(SendWr::write(3, [ma.slice(0..0)], mb.remote(0))).await;
    b.done(2).await;
    assert_eq!(a.done(1).await.byte_len, 64);
}

#[tokio::test]
async fn with_peer_to_peer_the_responder_may_send_first() {
    for rtr in [userdma::RtrKinds::SEND, userdma::RtrKinds::WRITE, userdma::RtrKinds::READ] {
        let (a, b) = pair_with("127.0.0.1", quick(), |init| {
            init.mpa.peer_to_peer = true;
            init.mpa.rtr = rtr;
        })
        .await;
        assert_eq!(a.qp.established().unwrap().rtr, Some(rtr));
        let (ma, mb) = (a.mr(64, 2), b.mr(64, 1));
        a.qp.post_recv(RecvWr::new(1, [ma.slice(0..64)])).unwrap();
        b.post(SendWr::send(2, [mb.slice(0..64)])).await;
        assert_eq!(a.done(1).await.byte_len, 64);
        assert_eq!(octets(&ma, 0, 64), octets(&mb, 0, 64));
    }
}

#[tokio::test]
async fn a_disconnect_finishes_what_is_posted() {
    let (a, b) = pair().await;
    let (ma, mb) = (a.mr(4 << 20, 1), b.mr(4 << 20, 2));
    a.qp.post_send(SendWr::write(1, [ma.slice(0..4 << 20)], mb.remote(0)).unsignaled()).unwrap();
    a.qp.post_send(SendWr::read(2, [ma.slice(0..1 << 20)], mb.remote(0))).unwrap();
    b.qp.post_recv(RecvWr::new(3, [])).unwrap();
    a.qp.post_recv(RecvWr::new(4, [])).unwrap();
    let (here, there) = tokio::join!(a.qp.disconnect(), b.qp.closed());
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

#[tokio::test]
async fn both_sides_may_disconnect_at_once() {
    let (a, b) = pair().await;
    a.post(SendWr::inline(1, SendOp::Write(b.mr(8, 0).remote(0)), b"")).await;
    let (here, there) = tokio::join!(a.qp.disconnect(), b.qp.disconnect());
    assert_eq!((here, there), (CloseReason::Graceful, CloseReason::Graceful));
}

#[tokio::test]
async fn a_dropped_queue_pair_aborts() {
    let (a, b) = pair().await;
    a.qp.post_recv(RecvWr::new(1, [])).unwrap();
    let clone = a.qp.clone();
    drop(clone);
    assert_eq!(a.qp.state(), QpState::Rts, "a clone is left");
    let Side { qp, cq, .. } = a;
    drop(qp);
    let wc = cq.next().await.unwrap();
    assert_eq!((wc.id, wc.status), (1, WcStatus::WR_FLUSH_ERR));
    assert_eq!(b.qp.closed().await, CloseReason::Lost);
}

#[tokio::test]
async fn a_peer_that_vanishes_is_noticed() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap().to_string();
    let peer = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        let mut request = [0; 24];
        stream.read_exact(&mut request).unwrap();
        let mut reply = *b"MPA ID Rep Frame\x50\x02\x00\x04\x00\x10\x00\x10";
        reply[16] = request[16];
        stream.write_all(&reply).unwrap();
        // Half of an FPDU, and gone.
        stream.write_all(&[0, 100, 1, 2, 3]).unwrap();
    });
    let (here, pd, cq) = side(quick(), "127.0.0.1");
    let qp = here.connect(&addr, &pd, QpInit::new(&cq), b"").await.unwrap();
    qp.post_recv(RecvWr::new(1, [])).unwrap();
    assert_eq!(qp.closed().await, CloseReason::Lost);
    assert_eq!(cq.next().await.unwrap().status, WcStatus::WR_FLUSH_ERR);
    peer.join().unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_connections_share_one_queue() {
    const MANY: usize = 200;
    let (device, listener, addr) = listening("127.0.0.1", quick()).await;
    let serve = tokio::spawn(async move {
        let (pd, cq) = (device.alloc_pd().unwrap(), device.create_cq(4 * MANY).unwrap());
        let mr = pd.register(userdma::Region::alloc(8 * MANY).unwrap(), all()).unwrap();
        let mut qps = std::collections::HashMap::new();
        for _ in 0..MANY {
            let request = listener.accept().await.unwrap();
            let qp = pd.create_qp(QpInit::new(&cq)).unwrap();
            let index = u64::from_be_bytes(request.private_data().try_into().unwrap());
            let at = 8 * index as usize;
            qp.post_recv(RecvWr::new(index, [mr.slice(at..at + 8)])).unwrap();
            request.accept_qp(&qp, b"").await.unwrap();
            qps.insert(qp.qpn(), qp);
        }
        // Each message is echoed on the connection that it came from.
        for _ in 0..MANY {
            let wc = loop {
                let wc = cq.next().await.unwrap();
                assert!(wc.status.is_ok(), "{wc:?}");
                if wc.opcode.is_recv() {
                    break wc;
                }
            };
            let at = 8 * wc.id as usize;
            qps[&wc.qpn].post_send(SendWr::send(wc.id, [mr.slice(at..at + 8)])).unwrap();
        }
        for qp in qps.values() {
            qp.closed().await;
        }
    });
    let (here, pd, cq) = side(quick(), "127.0.0.1");
    let mut clients = tokio::task::JoinSet::new();
    for index in 0..MANY as u64 {
        let (here, pd, cq, addr) = (here.clone(), pd.clone(), cq.clone(), addr.clone());
        clients.spawn(async move {
            let data = index.to_be_bytes();
            let qp = here.connect(&addr, &pd, QpInit::new(&cq), &data).await.unwrap();
            // The receive first: the echo may come as soon as the message is out.
            let ((got, wc), (_, sent)) =
                tokio::join!(qp.recv_lent(vec![0; 16]), qp.send_lent(data.to_vec()));
            sent.unwrap();
            wc.unwrap();
            assert_eq!(got, data);
            qp
        });
    }
    let mut numbers = std::collections::HashSet::new();
    let mut qps = Vec::new();
    while let Some(qp) = clients.join_next().await {
        let qp = qp.unwrap();
        assert!(numbers.insert(qp.qpn()));
        qps.push(qp);
    }
    for qp in &qps {
        assert_eq!(qp.disconnect().await, CloseReason::Graceful);
    }
    serve.await.unwrap();
    assert_eq!(here.stats().connections, MANY as u64);
}
