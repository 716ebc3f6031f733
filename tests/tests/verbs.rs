//! Work requests of every kind over real sockets: what arrives, what completes, and how.

mod common;
mod either;

use std::sync::atomic::Ordering;

use common::*;
use userdma::{
    Access, CloseReason, Imm, Mr, PostError, QpInit, QpState, RKey, RecvWr, Region, RemoteAddr,
    SendFlags, SendOp, SendWr, Wc, WcOpcode, WcStatus, proto::wire::iwarp::terminate::TermCode,
};

/// Every operation once, each content checked at both ends.
async fn every_operation(host: &str, crc: bool, markers: bool) {
    let (a, b) = pair_with(host, quick(), |init| {
        init.mpa.crc = crc;
        init.mpa.markers = markers;
    })
    .await;
    let settled = a.qp.established().unwrap();
    assert_eq!((settled.crc, settled.markers_out, settled.markers_in), (crc, markers, markers));
    let (ma, mb) = (a.mr(3 << 20, 1), b.mr(3 << 20, 2));

    // SEND: gathered from three pieces, scattered into two.
    b.qp.post_recv(RecvWr::new(1, [mb.slice(10..20), mb.slice(1000..3000)])).unwrap();
    let wc = a.post(SendWr::send(2, [ma.slice(0..3), ma.slice(50..1050), ma.slice(7..8)])).await;
    assert_eq!(wc.opcode, WcOpcode::SEND);
    let wc = b.done(1).await;
    assert_eq!((wc.opcode, wc.byte_len, wc.solicited), (WcOpcode::RECV, 1004, false));
    let sent = [octets(&ma, 0, 3), octets(&ma, 50, 1000), octets(&ma, 7, 1)].concat();
    assert_eq!([octets(&mb, 10, 10), octets(&mb, 1000, 994)].concat(), sent);
    assert_eq!(
        octets(&mb, 1994, 6),
        pattern(3 << 20, 2)[1994..2000],
        "nothing behind it is touched"
    );

    // SEND of a megabyte and a bit: many segments.
    let len = (1 << 20) + 13;
    b.qp.post_recv(RecvWr::new(3, [mb.slice(0..2 << 20)])).unwrap();
    a.post(SendWr::send(4, [ma.slice(5..5 + len)])).await;
    assert_eq!(b.done(3).await.byte_len as usize, len);
    assert!(octets(&mb, 0, len) == octets(&ma, 5, len));

    // SEND inline, empty, solicited.
    for (id, data, flags) in [
        (5, b"inline".as_slice(), SendFlags::empty()),
        (6, b"", SendFlags::empty()),
        (7, b"!", SendFlags::SOLICITED),
    ] {
        b.qp.post_recv(RecvWr::new(id, [mb.slice(0..64)])).unwrap();
        a.post(SendWr::inline(id + 100, SendOp::Send, data).with_flags(flags)).await;
        let wc = b.done(id).await;
        assert_eq!(wc.byte_len as usize, data.len());
        assert_eq!(wc.solicited, flags.contains(SendFlags::SOLICITED));
        assert_eq!(octets(&mb, 0, data.len()), data);
    }

    // SEND with invalidate: the key is dead afterwards, a fresh one works.
    let lent = b.mr(4096, 9);
    lent.bind(b.qp.qpn()).unwrap();
    let key = lent.rkey();
    b.qp.post_recv(RecvWr::new(8, [])).unwrap();
    a.post(SendWr::new(9, SendOp::SendInv(key), [])).await;
    assert_eq!(b.done(8).await.invalidated, Some(key));
    assert!(!lent.is_valid());
    lent.rearm().unwrap();
    assert!(lent.is_valid() && lent.rkey() != key);

    // WRITE, seen by a SEND that follows it.
    for (id, at, len) in [(10, 0, 1), (11, 3, 4097), (12, 64, 2 << 20)] {
        let wc = a.post(SendWr::write(id, [ma.slice(at..at + len)], mb.remote(at + 1))).await;
        assert_eq!(wc.opcode, WcOpcode::WRITE);
        barrier(&a, &b).await;
        assert!(octets(&mb, at + 1, len) == octets(&ma, at, len), "{len} octets");
    }

    // WRITE with immediate: one work request, one completion at each side.
    b.qp.post_recv(RecvWr::new(13, [])).unwrap();
    a.post(SendWr::inline(14, SendOp::WriteImm(mb.remote(77), 0xfeed_beef), b"with it")).await;
    let wc = b.done(13).await;
    assert_eq!((wc.opcode, wc.imm), (WcOpcode::RECV_IMM, Some(Imm::from_u32(0xfeed_beef))));
    assert_eq!(octets(&mb, 77, 7), b"with it");

    // Immediate alone, all of its 64 bits.
    b.qp.post_recv(RecvWr::new(15, [])).unwrap();
    let imm = Imm(0x0123_4567_89ab_cdef);
    a.post(SendWr::new(16, SendOp::Imm(imm), []).with_flags(SendFlags::SOLICITED)).await;
    let wc = b.done(15).await;
    assert_eq!((wc.imm, wc.solicited), (Some(imm), true));

    // READ into one place and scattered, both directions.
    let wc = a.post(SendWr::read(17, [ma.slice(100..700_100)], mb.remote(33))).await;
    assert_eq!((wc.opcode, wc.byte_len), (WcOpcode::READ, 700_000));
    assert!(octets(&ma, 100, 700_000) == octets(&mb, 33, 700_000));
    b.post(SendWr::read(18, [mb.slice(0..5), mb.slice(50..60)], ma.remote(9))).await;
    assert_eq!([octets(&mb, 0, 5), octets(&mb, 50, 10)].concat(), octets(&ma, 9, 15));

    // Atomics, plain and masked; the old value lands in host order.
    mb.store_u64(64, 40, Ordering::Relaxed);
    a.post(SendWr::fetch_add(19, ma.slice(8..16), mb.remote(64), 2)).await;
    assert_eq!((ma.load_u64(8, Ordering::Relaxed), mb.load_u64(64, Ordering::Relaxed)), (40, 42));
    a.post(SendWr::cmp_swap(20, ma.slice(8..16), mb.remote(64), 42, 7)).await;
    assert_eq!((ma.load_u64(8, Ordering::Relaxed), mb.load_u64(64, Ordering::Relaxed)), (42, 7));
    a.post(SendWr::cmp_swap(21, ma.slice(8..16), mb.remote(64), 42, 8)).await;
    assert_eq!((ma.load_u64(8, Ordering::Relaxed), mb.load_u64(64, Ordering::Relaxed)), (7, 7));
    let masked = SendOp::FetchAdd { remote: mb.remote(64), add: 0xff, mask: 0x80 };
    a.post(SendWr::new(22, masked, [ma.slice(8..16)])).await;
    assert_eq!(mb.load_u64(64, Ordering::Relaxed), 0x06, "no carry leaves bit 7");
    let masked = SendOp::CmpSwap {
        remote: mb.remote(64),
        compare: 0x06,
        swap: 0xffff,
        compare_mask: 0x0f,
        swap_mask: 0xf00,
    };
    a.post(SendWr::new(23, masked, [ma.slice(8..16)])).await;
    assert_eq!(mb.load_u64(64, Ordering::Relaxed), 0xf06);

    // Local invalidate: no message, the key is dead.
    let own = a.mr(4096, 3);
    own.bind(a.qp.qpn()).unwrap();
    let wc = a.post(SendWr::new(24, SendOp::LocalInv(own.rkey()), [])).await;
    assert_eq!(wc.opcode, WcOpcode::LOCAL_INV);
    assert!(!own.is_valid());

    assert_eq!(a.qp.disconnect().await, CloseReason::Graceful);
    assert_eq!(b.qp.closed().await, CloseReason::Graceful);
}

#[tokio::test]
async fn every_operation_on_ipv4() {
    every_operation("127.0.0.1", true, false).await;
}

#[tokio::test]
async fn every_operation_on_ipv6() {
    if userdma_tests::ipv6() {
        every_operation("[::1]", true, false).await;
    }
}

#[tokio::test]
async fn every_operation_without_crc() {
    every_operation("127.0.0.1", false, false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_operation_with_markers() {
    every_operation("127.0.0.1", true, true).await;
    every_operation("127.0.0.1", false, true).await;
}

#[tokio::test]
async fn the_async_face_gives_each_result_to_its_future() {
    let (a, b) = pair().await;
    either::the_async_face_gives_each_result_to_its_future(&a, &b).await;
}

#[tokio::test]
async fn a_dropped_future_leaves_its_operation_going() {
    let (a, b) = pair().await;
    either::a_dropped_future_leaves_its_operation_going(&a, &b).await;
}

#[tokio::test]
async fn unsignalled_work_completes_silently_and_in_order() {
    let (a, b) = pair_with("127.0.0.1", quick(), |init| init.max_send_wr = 600).await;
    either::unsignalled_work_completes_silently_and_in_order(&a, &b).await;
}

#[tokio::test]
async fn a_call_that_cannot_be_changes_nothing() {
    let (a, b) = pair_with("127.0.0.1", quick(), |init| {
        init.max_recv_wr = 2;
        init.max_sge = 2;
        init.max_inline = 4;
    })
    .await;
    let ma = a.mr(64, 1);
    let piece = || ma.slice(0..1);
    let sges = [piece(), piece(), piece()];
    let too_many = PostError::TooManySges { max: 2, have: 3 };
    assert_eq!(a.qp.post_send(SendWr::send(1, sges)), Err(too_many));
    assert_eq!(a.qp.post_recv(RecvWr::new(1, sges)), Err(too_many));
    assert_eq!(
        a.qp.post_send(SendWr::inline(1, SendOp::Send, b"12345")),
        Err(PostError::InlineTooLong { max: 4, have: 5 })
    );
    a.qp.post_recv(RecvWr::new(1, [])).unwrap();
    let refused = a.qp.post_recv_batch([RecvWr::new(2, []), RecvWr::new(3, [])]);
    assert_eq!(refused, Err((1, PostError::QueueFull { max: 2 })));
    let wrs = [SendWr::send(5, [piece()]), SendWr::send(6, sges), SendWr::send(7, [piece()])];
    b.qp.post_recv(RecvWr::new(9, [b.mr(8, 0).slice(0..8)])).unwrap();
    assert_eq!(a.qp.post_send_batch(wrs), Err((1, too_many)));
    a.done(5).await;

    // Before it is connected: receives are taken within the same limits, sends are not.
    let qp = a.pd.create_qp(a.qp.init().clone()).unwrap();
    assert_eq!(qp.state(), QpState::Init);
    assert_eq!(qp.post_send(SendWr::send(1, [])), Err(PostError::BadState(QpState::Init)));
    assert_eq!(qp.post_recv(RecvWr::new(1, sges)), Err(too_many));
    qp.post_recv_batch([RecvWr::new(10, []), RecvWr::new(11, [])]).unwrap();
    assert_eq!(qp.post_recv(RecvWr::new(3, [])), Err(PostError::QueueFull { max: 2 }));
    // Aborted, they are flushed; what is posted then too.
    qp.abort();
    assert_eq!(qp.state(), QpState::Err);
    qp.post_send(SendWr::write(12, [], RemoteAddr::default())).unwrap();
    for (id, opcode) in [(10, WcOpcode::RECV), (11, WcOpcode::RECV), (12, WcOpcode::WRITE)] {
        let wc = a.wc().await;
        assert_eq!((wc.id, wc.opcode, wc.status), (id, opcode, WcStatus::WR_FLUSH_ERR));
        assert_eq!(wc.qpn, qp.qpn());
    }
    assert_eq!(qp.closed().await, CloseReason::Aborted);
}

#[tokio::test]
async fn an_abort_flushes_both_sides_in_order() {
    let (a, b) = pair().await;
    for id in 0..10 {
        a.qp.post_recv(RecvWr::new(id, [])).unwrap();
        b.qp.post_recv(RecvWr::new(id, [])).unwrap();
    }
    a.qp.abort();
    assert_eq!(a.qp.state(), QpState::Err);
    for side in [&a, &b] {
        for id in 0..10 {
            let wc = side.wc().await;
            assert_eq!((wc.id, wc.status), (id, WcStatus::WR_FLUSH_ERR));
        }
    }
    assert_eq!(a.qp.closed().await, CloseReason::Aborted);
    assert_eq!(b.qp.closed().await, CloseReason::Lost);
    assert_eq!(b.qp.state(), QpState::Err);
    // In the error state work is taken and flushed.
    b.qp.post_send(SendWr::send(77, [])).unwrap();
    b.qp.post_recv(RecvWr::new(78, [])).unwrap();
    assert_eq!((b.wc().await.id, b.wc().await.id), (77, 78));
    let failed = b.qp.send(b.mr(8, 0).slice(0..8)).await.unwrap_err().to_string();
    assert!(failed.contains("flushed"), "{failed}");
}

/// What `a` posts (as number 9, with the regions it needs) is refused by `b`: both learn why.
async fn refused_by_the_peer(request: impl FnOnce(&Side, &Side) -> (SendWr, [Mr; 2])) -> Wc {
    let (a, b) = pair().await;
    b.qp.post_recv(RecvWr::new(1, [])).unwrap();
    a.qp.post_recv(RecvWr::new(2, [])).unwrap();
    let (wr, _regions) = request(&a, &b);
    a.qp.post_send(wr).unwrap();
    let CloseReason::TerminateSent(sent) = b.qp.closed().await else {
        panic!("{:?}", b.qp.close_reason());
    };
    let CloseReason::TerminateReceived(got) = a.qp.closed().await else {
        panic!("{:?}", a.qp.close_reason());
    };
    assert_eq!(sent.code, got.code);
    let wc = b.wc().await;
    assert_eq!((wc.id, wc.status), (1, WcStatus::WR_FLUSH_ERR));
    // The refused request first, then the flushed receive.
    let refused = a.wc().await;
    assert_eq!(refused.id, 9);
    assert_eq!(refused.vendor_err, u32::from(got.code.to_u16()), "the Terminate's code is told");
    let wc = a.wc().await;
    assert_eq!((wc.id, wc.status), (2, WcStatus::WR_FLUSH_ERR));
    assert_eq!((a.qp.state(), b.qp.state()), (QpState::Err, QpState::Err));
    assert_eq!(b.qp.stats().access_errors, 1);
    refused
}

#[tokio::test]
async fn a_read_with_a_wrong_key_is_a_remote_access_error() {
    let wc = refused_by_the_peer(|a, b| {
        let (ma, mb) = (a.mr(64, 1), b.mr(64, 1));
        let nobodys = RKey(mb.rkey().0 ^ 0x8000_0001);
        (SendWr::read(9, [ma.slice(0..8)], RemoteAddr::new(0, nobodys)), [ma, mb])
    });
    assert_eq!(wc.await.status, WcStatus::REM_ACCESS_ERR);
}

#[tokio::test]
async fn a_read_beyond_the_region_is_a_remote_access_error() {
    let wc = refused_by_the_peer(|a, b| {
        let (ma, mb) = (a.mr(64, 1), b.mr(64, 1));
        (SendWr::read(9, [ma.slice(0..16)], mb.remote(56)), [ma, mb])
    });
    assert_eq!(wc.await.status, WcStatus::REM_ACCESS_ERR);
}

#[tokio::test]
async fn an_atomic_without_the_right_is_a_remote_access_error() {
    let wc = refused_by_the_peer(|a, b| {
        let rights = Access::REMOTE_READ | Access::REMOTE_WRITE;
        let mb = b.pd.register(Region::alloc(64).unwrap(), rights).unwrap();
        let ma = a.mr(64, 1);
        (SendWr::fetch_add(9, ma.slice(0..8), mb.remote(0), 1), [ma, mb])
    });
    assert_eq!(wc.await.status, WcStatus::REM_ACCESS_ERR);
}

#[tokio::test]
async fn a_key_of_another_domain_is_refused() {
    let (a, b) = pair().await;
    let (ma, other) = (a.mr(64, 1), b.device.alloc_pd().unwrap());
    let mb = other.register(Region::alloc(64).unwrap(), all()).unwrap();
    // A WRITE has completed when the socket took it; the Terminate tells that it was refused.
    a.qp.post_send(SendWr::write(1, [ma.slice(0..64)], mb.remote(0))).unwrap();
    assert!(matches!(a.qp.closed().await, CloseReason::TerminateReceived(_)));
    assert!(matches!(b.qp.closed().await, CloseReason::TerminateSent(_)));
    assert_eq!(octets(&mb, 0, 64), [0; 64], "nothing was written");
}

#[tokio::test]
async fn a_local_protection_error_breaks_the_connection() {
    let (a, b) = pair().await;
    let ma = a.mr(64, 1);
    let mut sge = ma.slice(0..64);
    sge.length = 65;
    a.qp.post_send(SendWr::send(1, [sge])).unwrap();
    let wc = a.wc().await;
    assert_eq!((wc.id, wc.status), (1, WcStatus::LOC_PROT_ERR));
    assert_eq!(a.qp.state(), QpState::Err);
    b.qp.closed().await;
}

#[tokio::test]
async fn a_send_without_a_receive_terminates() {
    let (a, b) = pair().await;
    a.qp.post_send(SendWr::inline(1, SendOp::Send, b"nowhere to go")).unwrap();
    assert!(matches!(b.qp.closed().await, CloseReason::TerminateSent(_)));
    assert!(matches!(a.qp.closed().await, CloseReason::TerminateReceived(_)));
}

#[tokio::test]
async fn the_queue_pairs_own_rights_limit_its_peer() {
    let (a, b) =
        pair_with("127.0.0.1", quick(), |init| init.remote_access = Access::REMOTE_READ).await;
    let (ma, mb) = (a.mr(64, 1), b.mr(64, 2));
    a.post(SendWr::read(1, [ma.slice(0..8)], mb.remote(0))).await;
    a.qp.post_send(SendWr::write(2, [ma.slice(0..8)], mb.remote(0))).unwrap();
    assert!(matches!(b.qp.closed().await, CloseReason::TerminateSent(_)));
    assert_eq!(octets(&mb, 0, 64), pattern(64, 2));
}

#[tokio::test]
async fn an_overflowing_queue_ends_its_queue_pairs_and_loses_nothing() {
    let (a, b) = pair().await;
    let small = b.device.create_cq(4).unwrap();
    let (listener_device, listener, addr) = listening("127.0.0.1", quick()).await;
    let connect = async {
        let init = userdma::QpInit::new(&small);
        b.device.connect(&addr, &b.pd, init, b"").await.unwrap()
    };
    let accept = async {
        let pd = listener_device.alloc_pd().unwrap();
        listener.accept().await.unwrap().accept(&pd, a.qp.init().clone(), b"").await.unwrap()
    };
    let (qp, peer) = tokio::join!(connect, accept);
    let mr = b.mr(64, 0);
    // Nothing is delivered for WRITEs of length 0, but they complete.
    let write = |id| SendWr::write(id, [mr.slice(0..0)], RemoteAddr::default());
    qp.post_recv(RecvWr::new(100, [])).unwrap();
    qp.post_send_batch((0..10).map(write)).unwrap();
    assert_eq!(small.overflowed(), Some(7));
    // More than it holds: that is the end of the queue pair, and the peer is told.
    let CloseReason::TerminateSent(sent) = qp.closed().await else {
        panic!("{:?}", qp.close_reason());
    };
    assert_eq!(sent.code, TermCode::RDMAP_LOCAL_CATASTROPHIC);
    assert!(matches!(peer.closed().await, CloseReason::TerminateReceived(_)));
    let refused = qp.post_send(write(10)).unwrap_err();
    assert_eq!(refused, PostError::CqOverflow { depth: 4 });
    assert!(refused.to_string().contains("overflowed (4 entries)"), "{refused}");
    assert_eq!(qp.post_recv(RecvWr::new(101, [])), Err(refused));
    // But every completion is handed out, those without room too, and the flushed receive.
    let mut wcs = [Wc::default(); 16];
    assert_eq!(small.poll(&mut wcs), 11);
    assert_eq!(wcs[..10].iter().map(|wc| wc.id).collect::<Vec<_>>(), (0..10).collect::<Vec<_>>());
    assert!(wcs[..10].iter().all(|wc| wc.status.is_ok()));
    assert_eq!((wcs[10].id, wcs[10].status), (100, WcStatus::WR_FLUSH_ERR));
    let e = small.next().await.unwrap_err().to_string();
    assert!(e.contains("overflowed: 4 entries"), "{e}");
    let e = b.pd.create_qp(QpInit::new(&small)).unwrap_err().to_string();
    assert!(e.contains("overflowed: 4 entries"), "{e}");
    // Queue pairs of other queues are as before (RFC 5040 §8.1.1).
    barrier(&a, &b).await;
    barrier(&b, &a).await;
}

/// Both sides WRITE and READ much more than the sockets hold, at the same time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn both_directions_at_once_do_not_block_each_other() {
    let (a, b) = pair().await;
    let settled = async {
        barrier(&a, &b).await;
        barrier(&b, &a).await;
    };
    either::both_directions_at_once_do_not_block_each_other(&a, &b, settled).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reads_of_changing_memory_never_break_the_checksum() {
    let (a, b) = pair().await;
    either::reads_of_changing_memory(&a, &b).await;
    assert_eq!(a.qp.stats().crc_errors, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_deregister_a_writing_peer_changes_nothing() {
    let (a, b) = pair().await;
    let ended = async {
        assert!(matches!(b.qp.closed().await, CloseReason::TerminateSent(_)));
        assert!(matches!(a.qp.closed().await, CloseReason::TerminateReceived(_)));
    };
    either::after_deregister_a_writing_peer_changes_nothing(&a, &b, ended).await;
}

/// One thread: the peer's task cannot empty the socket while this one fills it.
#[tokio::test(flavor = "current_thread")]
async fn a_source_revoked_while_it_is_sent_fails_that_work() {
    let off = |init: &mut QpInit| init.mpa.crc = false;
    let (a, b) = pair_with("127.0.0.1", quick(), off).await;
    let len = 16 << 20;
    let (first, second) = (a.mr(8, 1), a.mr(len, 2));
    let target = b.mr(len, 3);
    let wrs = [
        SendWr::write(1, [first.slice(0..8)], target.remote(0)),
        SendWr::write(2, [second.slice(0..len)], target.remote(0)),
        SendWr::write(3, [first.slice(0..8)], target.remote(0)),
    ];
    a.qp.post_send_batch(wrs).unwrap();
    second.deregister();
    a.done(1).await;
    let ends = [a.wc().await, a.wc().await].map(|wc| (wc.id, wc.status));
    assert_eq!(ends, [(2, WcStatus::LOC_PROT_ERR), (3, WcStatus::WR_FLUSH_ERR)]);
    assert_eq!(a.qp.closed().await, CloseReason::SourceRevoked);
    assert_eq!(b.qp.closed().await, CloseReason::Lost);
}
