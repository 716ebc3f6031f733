//! Work requests of every kind over real UDP sockets: what arrives, what completes, and how.

mod common;
mod either;

use std::{
    future::Future,
    net::{SocketAddr, UdpSocket},
    sync::{Arc, atomic::Ordering},
    task::{Context, Wake, Waker},
    thread,
    time::{Duration, Instant},
};

use common::*;
use userdma::{
    Access, CloseReason, DeviceOptions, Imm, Mr, PathMtu, PostError, QpAttr, QpInit, QpState,
    QpType, Qpn, RKey, RecvWr, Region, RemoteAddr, RoceOptions, SendFlags, SendOp, SendWr, Wc,
    WcOpcode, WcStatus,
    proto::wire::{
        ids::Psn,
        roce::{
            aeth::{NakCode, Syndrome},
            feth::{Placement, Selectivity},
        },
    },
};

/// Every operation that RoCE has, each content checked at both ends.
async fn every_operation(host: &str, options: [DeviceOptions; 2]) {
    // A quarter of a second: a busy machine takes its time for thousands of packets.
    let (a, b) = roce_pair_with(host, options, |init| init.timeout = 16).await;
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

    // SEND of a megabyte and a bit: many trains.
    let len = (1 << 20) + 13;
    b.qp.post_recv(RecvWr::new(3, [mb.slice(0..2 << 20)])).unwrap();
    a.post(SendWr::send(4, [ma.slice(5..5 + len)])).await;
    assert_eq!(b.done(3).await.byte_len as usize, len);
    assert!(octets(&mb, 0, len) == octets(&ma, 5, len));

    // SEND inline, empty, solicited; with an immediate.
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
    b.qp.post_recv(RecvWr::new(30, [mb.slice(0..64)])).unwrap();
    a.post(SendWr::inline(31, SendOp::SendImm(0xfeed_beef), b"imm")).await;
    let wc = b.done(30).await;
    assert_eq!((wc.opcode, wc.imm), (WcOpcode::RECV, Some(Imm::from_u32(0xfeed_beef))));

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

    // WRITE, which is acknowledged when it is placed.
    for (id, at, len) in [(10, 0, 1), (11, 3, 4097), (12, 64, 2 << 20)] {
        let wc = a.post(SendWr::write(id, [ma.slice(at..at + len)], mb.remote(at + 1))).await;
        assert_eq!(wc.opcode, WcOpcode::WRITE);
        assert!(octets(&mb, at + 1, len) == octets(&ma, at, len), "{len} octets");
    }

    // WRITE with immediate: one completion at each side.
    b.qp.post_recv(RecvWr::new(13, [])).unwrap();
    a.post(SendWr::inline(14, SendOp::WriteImm(mb.remote(77), 0xfeed_beef), b"with it")).await;
    let wc = b.done(13).await;
    assert_eq!((wc.opcode, wc.imm), (WcOpcode::RECV_IMM, Some(Imm::from_u32(0xfeed_beef))));
    assert_eq!((octets(&mb, 77, 7), wc.byte_len), (b"with it".to_vec(), 7));

    // READ into one place and scattered, both directions.
    let wc = a.post(SendWr::read(17, [ma.slice(100..700_100)], mb.remote(33))).await;
    assert_eq!((wc.opcode, wc.byte_len), (WcOpcode::READ, 700_000));
    assert!(octets(&ma, 100, 700_000) == octets(&mb, 33, 700_000));
    b.post(SendWr::read(18, [mb.slice(0..5), mb.slice(50..60)], ma.remote(9))).await;
    assert_eq!([octets(&mb, 0, 5), octets(&mb, 50, 10)].concat(), octets(&ma, 9, 15));

    // Atomics; the old value lands in host order.
    mb.store_u64(64, 40, Ordering::Relaxed);
    let wc = a.post(SendWr::fetch_add(19, ma.slice(8..16), mb.remote(64), 2)).await;
    assert_eq!((wc.opcode, wc.byte_len), (WcOpcode::FETCH_ADD, 8));
    assert_eq!((ma.load_u64(8, Ordering::Relaxed), mb.load_u64(64, Ordering::Relaxed)), (40, 42));
    let wc = a.post(SendWr::cmp_swap(20, ma.slice(8..16), mb.remote(64), 42, 7)).await;
    assert_eq!(wc.opcode, WcOpcode::CMP_SWAP);
    assert_eq!((ma.load_u64(8, Ordering::Relaxed), mb.load_u64(64, Ordering::Relaxed)), (42, 7));
    a.post(SendWr::cmp_swap(21, ma.slice(8..16), mb.remote(64), 42, 8)).await;
    assert_eq!((ma.load_u64(8, Ordering::Relaxed), mb.load_u64(64, Ordering::Relaxed)), (7, 7));

    // ATOMIC_WRITE: a word at once.
    let word = *b"one word";
    let wc = a.post(SendWr::atomic_write(22, mb.remote(72), word)).await;
    assert_eq!(wc.opcode, WcOpcode::ATOMIC_WRITE);
    assert_eq!(octets(&mb, 72, 8), word);
    assert_eq!(octets(&mb, 80, 4), b"h it", "and nothing behind it");

    // FLUSH: of a range and of a region, for readers and against a loss of power.
    let rights = all() | Access::FLUSH_GLOBAL | Access::FLUSH_PERSISTENT;
    let kept = b.pd.register(Region::alloc(4096).unwrap(), rights).unwrap();
    a.qp.post_send(SendWr::write(23, [ma.slice(0..4096)], kept.remote(0)).unsignaled()).unwrap();
    let wc = a.post(SendWr::flush(24, kept.remote(0), 4096, Placement::GLOBAL_VISIBILITY)).await;
    assert_eq!(wc.opcode, WcOpcode::FLUSH);
    assert!(octets(&kept, 0, 4096) == octets(&ma, 0, 4096));
    let (placement, selectivity) = (Placement::PERSISTENCE, Selectivity::REGION);
    let whole = SendOp::Flush { remote: kept.remote(8), len: 0, placement, selectivity };
    a.post(SendWr::new(25, whole, [])).await;

    // Local invalidate: no message, the key is dead.
    let own = a.mr(4096, 3);
    own.bind(a.qp.qpn()).unwrap();
    let wc = a.post(SendWr::new(26, SendOp::LocalInv(own.rkey()), [])).await;
    assert_eq!(wc.opcode, WcOpcode::LOCAL_INV);
    assert!(!own.is_valid());

    assert_eq!(a.qp.disconnect().await, CloseReason::Graceful);
    assert_eq!(b.qp.closed().await, CloseReason::Graceful);
    for side in [&a, &b] {
        let stats = side.device.roce_stats().unwrap();
        assert_eq!((stats.port.icrc_bad, stats.port.malformed, stats.trouble), (0, 0, None));
    }
}

#[tokio::test]
async fn every_operation_on_ipv4() {
    every_operation("127.0.0.1", [quick(), quick()]).await;
}

#[tokio::test]
async fn every_operation_on_ipv6() {
    if userdma_tests::ipv6() {
        every_operation("[::1]", [quick(), quick()]).await;
    }
}

/// The smallest path MTU, and a kernel that cuts no trains.
#[tokio::test]
async fn every_operation_in_small_packets_one_by_one() {
    let roce = RoceOptions { mtu: Some(PathMtu::Mtu256), max_packets: 1, ..Default::default() };
    let small = DeviceOptions { roce, ..quick() };
    every_operation("127.0.0.1", [small.clone(), quick()]).await;
    every_operation("127.0.0.1", [quick(), small]).await;
}

/// An ordinary user's socket holds 212,992 octets; packets that it cannot hold are sent again.
#[tokio::test]
async fn every_operation_with_small_buffers() {
    let small =
        DeviceOptions { recv_buffer: Some(64 << 10), send_buffer: Some(64 << 10), ..quick() };
    every_operation("127.0.0.1", [small.clone(), small]).await;
}

#[tokio::test]
async fn what_roce_does_not_have_is_refused_at_the_call() {
    let (a, b) = roce_pair().await;
    let (ma, mb) = (a.mr(64, 1), b.mr(64, 2));
    let (remote, sge) = (mb.remote(0), ma.slice(0..8));
    let swap = |compare_mask, swap_mask| SendOp::CmpSwap {
        remote,
        compare: 1,
        swap: 2,
        compare_mask,
        swap_mask,
    };
    for (wr, op) in [
        (SendWr::new(1, SendOp::Imm(Imm(7)), []), "a stand-alone Immediate"),
        (SendWr::new(1, SendOp::FetchAdd { remote, add: 1, mask: 1 }, [sge]), "a masked FETCH_ADD"),
        (SendWr::new(1, swap(u64::MAX, 1), [sge]), "a masked CMP_SWAP"),
        (SendWr::new(1, swap(1, u64::MAX), [sge]), "a masked CMP_SWAP"),
    ] {
        let refused = a.qp.post_send(wr.clone()).unwrap_err();
        assert_eq!(refused, PostError::Unsupported { op, transport: "RoCEv2 RC" });
        let text = a.qp.submit(wr).await.unwrap_err().to_string();
        assert_eq!(text, format!("{op} is not supported by RoCEv2 RC"));
    }
    for wr in [
        SendWr::new(1, SendOp::AtomicWrite(remote), [ma.slice(0..7)]),
        SendWr::new(1, SendOp::AtomicWrite(mb.remote(4)), [sge]),
        SendWr::fetch_add(1, ma.slice(0..7), remote, 1),
        SendWr::fetch_add(1, sge, mb.remote(4), 1),
        SendWr::inline(1, SendOp::Read(remote), b"octets"),
        SendWr::flush(1, remote, 8, Placement::empty()),
    ] {
        let refused = a.qp.post_send(wr.clone()).unwrap_err();
        assert!(matches!(refused, PostError::Invalid(_)), "{wr:?}: {refused}");
    }
    // Nothing of it happened.
    assert_eq!(a.cq.poll(&mut [Wc::default()]), 0);
    barrier(&a, &b).await;
    assert_eq!((octets(&ma, 0, 64), octets(&mb, 0, 64)), (pattern(64, 1), pattern(64, 2)));
}

#[tokio::test]
async fn a_call_that_cannot_be_changes_nothing() {
    let (a, b) = roce_pair_with("127.0.0.1", [quick(), quick()], |init| {
        init.max_send_wr = 4;
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
    let mb = b.mr(8, 0);
    b.qp.post_recv(RecvWr::new(9, [mb.slice(0..8)])).unwrap();
    assert_eq!(a.qp.post_send_batch(wrs), Err((1, too_many)));
    a.done(5).await;
    // Nobody has acknowledged anything while this thread is here.
    let refused = a.qp.post_send_batch((10..20).map(|id| SendWr::send(id, [])));
    assert_eq!(refused, Err((4, PostError::QueueFull { max: 4 })));

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
async fn settings_out_of_range_are_refused() {
    let (a, _b) = roce_pair().await;
    for (init, what) in [
        (QpInit { timeout: 32, ..QpInit::new(&a.cq) }, "timeout is 32, at most 31"),
        (QpInit { retry_cnt: 8, ..QpInit::new(&a.cq) }, "retry_cnt is 8, at most 7"),
        (QpInit { rnr_retry: 8, ..QpInit::new(&a.cq) }, "rnr_retry is 8, at most 7"),
        (QpInit { min_rnr_timer: 32, ..QpInit::new(&a.cq) }, "min_rnr_timer is 32, at most 31"),
    ] {
        let e = a.pd.create_qp(init).unwrap_err().to_string();
        assert!(e.contains(what), "{e}");
    }
    let few = DeviceOptions { max_qps: 2, ..quick() }.open("udp://127.0.0.1:0").unwrap();
    let (pd, cq) = (few.alloc_pd().unwrap(), few.create_cq(8).unwrap());
    let init = || QpInit::new(&cq);
    let _two = [pd.create_qp(init()).unwrap(), pd.create_qp(init()).unwrap()];
    let e = pd.create_qp(init()).unwrap_err().to_string();
    assert!(e.contains("2 queue pairs are open, and no more are allowed"), "{e}");
}

#[tokio::test]
async fn the_async_face_gives_each_result_to_its_future() {
    let (a, b) = roce_pair().await;
    // A WRITE completes when it is placed.
    let (ma, mb) = (a.mr(64, 1), b.mr(64, 2));
    a.qp.write(ma.slice(0..64), mb.remote(0)).await.unwrap();
    assert_eq!(octets(&mb, 0, 64), octets(&ma, 0, 64));
    either::the_async_face_gives_each_result_to_its_future(&a, &b).await;
}

#[tokio::test]
async fn a_dropped_future_leaves_its_operation_going() {
    let (a, b) = roce_pair().await;
    either::a_dropped_future_leaves_its_operation_going(&a, &b).await;
    assert_eq!(b.pd.table().regions(), 0, "lent memory is given back");
}

#[tokio::test]
async fn unsignalled_work_completes_silently_and_in_order() {
    let wide = |init: &mut QpInit| init.max_send_wr = 600;
    let (a, b) = roce_pair_with("127.0.0.1", [quick(), quick()], wide).await;
    either::unsignalled_work_completes_silently_and_in_order(&a, &b).await;
}

#[tokio::test]
async fn an_abort_flushes_both_sides_in_order() {
    let (a, b) = roce_pair().await;
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
    // The connection manager has one word for all ends.
    assert_eq!(b.qp.closed().await, CloseReason::Graceful);
    assert_eq!(b.qp.state(), QpState::Err);
    // In the error state work is taken and flushed.
    b.qp.post_send(SendWr::send(77, [])).unwrap();
    b.qp.post_recv(RecvWr::new(78, [])).unwrap();
    assert_eq!((b.wc().await.id, b.wc().await.id), (77, 78));
    let failed = b.qp.send(b.mr(8, 0).slice(0..8)).await.unwrap_err().to_string();
    assert!(failed.contains("flushed"), "{failed}");
    // Ending what has ended changes nothing.
    a.qp.abort();
    assert_eq!(a.qp.disconnect().await, CloseReason::Aborted);
}

/// What `a` posts (as number 9, with the regions it needs) is refused by `b` with `code`: both learn
/// why.
async fn refused_by_the_peer(
    code: NakCode,
    status: WcStatus,
    request: impl FnOnce(&Side, &Side) -> (SendWr, [Mr; 2]),
) {
    let (a, b) = roce_pair().await;
    b.qp.post_recv(RecvWr::new(1, [])).unwrap();
    a.qp.post_recv(RecvWr::new(2, [])).unwrap();
    let (wr, regions) = request(&a, &b);
    let before = regions.each_ref().map(|mr| octets(mr, 0, mr.len()));
    a.qp.post_send(wr).unwrap();
    let nak = Syndrome::Nak(code);
    assert_eq!(b.qp.closed().await, CloseReason::NakSent(nak));
    assert_eq!(a.qp.closed().await, CloseReason::WorkFailed);
    let wc = b.wc().await;
    assert_eq!((wc.id, wc.status), (1, WcStatus::WR_FLUSH_ERR));
    // The refused request first, then the flushed receive.
    let refused = a.wc().await;
    assert_eq!((refused.id, refused.status), (9, status));
    assert_eq!(refused.vendor_err, u32::from(nak.to_octet()), "the NAK is told");
    let wc = a.wc().await;
    assert_eq!((wc.id, wc.status), (2, WcStatus::WR_FLUSH_ERR));
    assert_eq!((a.qp.state(), b.qp.state()), (QpState::Err, QpState::Err));
    assert_eq!(regions.each_ref().map(|mr| octets(mr, 0, mr.len())), before, "nothing is touched");
    let stats = b.qp.roce_stats().unwrap();
    let is_access = code == NakCode::REMOTE_ACCESS;
    assert_eq!((stats.access_errors, stats.malformed), (is_access.into(), (!is_access).into()));
}

/// The same for what the peer's keys do not allow.
async fn no_access(request: impl FnOnce(&Side, &Side) -> (SendWr, [Mr; 2])) {
    refused_by_the_peer(NakCode::REMOTE_ACCESS, WcStatus::REM_ACCESS_ERR, request).await;
}

#[tokio::test]
async fn a_wrong_key_is_a_remote_access_error() {
    let nobodys = |mr: &Mr| RemoteAddr::new(0, RKey(mr.rkey().0 ^ 0x8000_0001));
    no_access(|a, b| {
        let (ma, mb) = (a.mr(64, 1), b.mr(64, 1));
        (SendWr::read(9, [ma.slice(0..8)], nobodys(&mb)), [ma, mb])
    })
    .await;
    no_access(|a, b| {
        let (ma, mb) = (a.mr(64, 1), b.mr(64, 2));
        (SendWr::write(9, [ma.slice(0..8)], nobodys(&mb)), [ma, mb])
    })
    .await;
    no_access(|a, b| {
        let (ma, mb) = (a.mr(64, 1), b.mr(64, 2));
        (SendWr::new(9, SendOp::SendInv(nobodys(&mb).rkey), []), [ma, mb])
    })
    .await;
}

/// A waker that takes its time.
struct Slow;

impl Wake for Slow {
    fn wake(self: Arc<Self>) {
        thread::sleep(Duration::from_millis(100));
    }
}

/// The peer disconnects as soon as it knows. Whoever sent the NAK is still busy telling of it when another
/// thread has the end of the connection to tell.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_nak_is_the_reason_whatever_comes_behind_it() {
    let asleep = || DeviceOptions { spin: Duration::ZERO, ..quick() };
    let (a, b) = roce_pair_with("127.0.0.1", [asleep(), asleep()], |_| {}).await;
    let (ma, mb) = (a.mr(64, 1), b.mr(64, 1));
    b.qp.post_recv(RecvWr::new(1, [mb.slice(0..64)])).unwrap();
    let mut flushed = Box::pin(b.cq.next());
    let slow = Waker::from(Arc::new(Slow));
    assert!(flushed.as_mut().poll(&mut Context::from_waker(&slow)).is_pending());
    let polls = [(); 2].map(|()| {
        let (cq, qp) = (b.cq.clone(), b.qp.clone());
        thread::spawn(move || {
            while qp.close_reason().is_none() {
                let _ = cq.poll(&mut [Wc::default()]);
            }
        })
    });
    let nobodys = RemoteAddr::new(0, RKey(mb.rkey().0 ^ 0x8000_0001));
    a.qp.post_send(SendWr::read(9, [ma.slice(0..8)], nobodys)).unwrap();
    assert_eq!(a.wc().await.status, WcStatus::REM_ACCESS_ERR);
    a.qp.disconnect().await;
    let nak = CloseReason::NakSent(Syndrome::Nak(NakCode::REMOTE_ACCESS));
    assert_eq!(b.qp.closed().await, nak);
    for thread in polls {
        thread.join().unwrap();
    }
}

#[tokio::test]
async fn out_of_bounds_is_a_remote_access_error() {
    no_access(|a, b| {
        let (ma, mb) = (a.mr(64, 1), b.mr(64, 1));
        (SendWr::read(9, [ma.slice(0..16)], mb.remote(56)), [ma, mb])
    })
    .await;
    // Of a long WRITE no octet is placed, also of the packets that would fit.
    no_access(|a, b| {
        let (ma, mb) = (a.mr(100_001, 1), b.mr(100_000, 2));
        (SendWr::write(9, [ma.slice(0..100_001)], mb.remote(0)), [ma, mb])
    })
    .await;
}

#[tokio::test]
async fn without_the_right_it_is_a_remote_access_error() {
    let with = |b: &Side, rights| b.pd.register(Region::alloc(64).unwrap(), rights).unwrap();
    no_access(|a, b| {
        let (ma, mb) = (a.mr(64, 1), with(b, Access::REMOTE_READ | Access::REMOTE_WRITE));
        (SendWr::fetch_add(9, ma.slice(0..8), mb.remote(0), 1), [ma, mb])
    })
    .await;
    no_access(|a, b| {
        let (ma, mb) = (a.mr(64, 1), with(b, Access::REMOTE_READ));
        (SendWr::write(9, [ma.slice(0..8)], mb.remote(0)), [ma, mb])
    })
    .await;
    no_access(|a, b| {
        let (ma, mb) = (a.mr(64, 1), with(b, Access::REMOTE_READ));
        (SendWr::atomic_write(9, mb.remote(0), [7; 8]), [ma, mb])
    })
    .await;
    no_access(|a, b| {
        let (ma, mb) = (a.mr(64, 1), with(b, Access::REMOTE_WRITE));
        (SendWr::read(9, [ma.slice(0..8)], mb.remote(0)), [ma, mb])
    })
    .await;
    no_access(|a, b| {
        let (ma, mb) = (a.mr(64, 1), with(b, all()));
        (SendWr::flush(9, mb.remote(0), 64, Placement::GLOBAL_VISIBILITY), [ma, mb])
    })
    .await;
}

#[tokio::test]
async fn a_key_of_another_domain_is_refused() {
    no_access(|a, b| {
        let (ma, other) = (a.mr(64, 1), b.device.alloc_pd().unwrap());
        let mb = other.register(Region::alloc(64).unwrap(), all()).unwrap();
        (SendWr::write(9, [ma.slice(0..64)], mb.remote(0)), [ma, mb])
    })
    .await;
}

#[tokio::test]
async fn a_message_longer_than_its_receive_is_refused() {
    let (a, b) = roce_pair().await;
    let (ma, mb) = (a.mr(64, 1), b.mr(64, 2));
    b.qp.post_recv(RecvWr::new(1, [mb.slice(0..8)])).unwrap();
    a.qp.post_send(SendWr::send(2, [ma.slice(0..9)])).unwrap();
    let wc = b.wc().await;
    assert_eq!((wc.id, wc.status), (1, WcStatus::LOC_LEN_ERR));
    let wc = a.wc().await;
    assert_eq!((wc.id, wc.status), (2, WcStatus::REM_INV_REQ_ERR));
    let invalid = Syndrome::Nak(NakCode::INVALID_REQUEST);
    assert_eq!(b.qp.closed().await, CloseReason::NakSent(invalid));
    assert_eq!(a.qp.closed().await, CloseReason::WorkFailed);
}

#[tokio::test]
async fn a_receive_that_cannot_be_written_fails_at_both_ends() {
    let (a, b) = roce_pair().await;
    let sealed = b.pd.register(Region::alloc(64).unwrap(), Access::empty()).unwrap();
    b.qp.post_recv(RecvWr::new(1, [sealed.slice(0..64)])).unwrap();
    a.qp.post_send(SendWr::inline(2, SendOp::Send, b"octets")).unwrap();
    let wc = b.wc().await;
    assert_eq!((wc.id, wc.status), (1, WcStatus::LOC_PROT_ERR));
    let wc = a.wc().await;
    assert_eq!((wc.id, wc.status), (2, WcStatus::REM_OP_ERR));
    assert_eq!(octets(&sealed, 0, 64), [0; 64]);
}

#[tokio::test]
async fn a_local_protection_error_breaks_the_connection() {
    let (a, b) = roce_pair().await;
    let ma = a.mr(64, 1);
    let mut sge = ma.slice(0..64);
    sge.length = 65;
    a.qp.post_send(SendWr::send(1, [sge])).unwrap();
    let wc = a.wc().await;
    assert_eq!((wc.id, wc.status), (1, WcStatus::LOC_PROT_ERR));
    assert_eq!(a.qp.state(), QpState::Err);
    assert_eq!(a.qp.closed().await, CloseReason::WorkFailed);
    assert_eq!(b.qp.closed().await, CloseReason::Graceful);
}

#[tokio::test]
async fn the_queue_pairs_own_rights_limit_its_peer() {
    let only_read = |init: &mut QpInit| init.remote_access = Access::REMOTE_READ;
    let (a, b) = roce_pair_with("127.0.0.1", [quick(), quick()], only_read).await;
    let (ma, mb) = (a.mr(64, 1), b.mr(64, 2));
    a.post(SendWr::read(1, [ma.slice(0..8)], mb.remote(0))).await;
    a.qp.post_send(SendWr::write(2, [ma.slice(0..8)], mb.remote(0))).unwrap();
    assert!(matches!(b.qp.closed().await, CloseReason::NakSent(_)));
    assert_eq!(octets(&mb, 0, 64), pattern(64, 2));
    let wc = a.wc().await;
    assert_eq!((wc.id, wc.status), (2, WcStatus::REM_INV_REQ_ERR));
}

#[tokio::test]
async fn a_send_without_a_receive_waits_for_one() {
    let (a, b) = roce_pair().await;
    let mb = b.mr(64, 2);
    a.qp.post_send(SendWr::inline(1, SendOp::Send, b"patience")).unwrap();
    // The peer has said more than once that it is not ready.
    tokio::time::timeout(LONG, async {
        while a.qp.roce_stats().unwrap().rnr_naks_received < 3 {
            tokio::task::yield_now().await;
        }
    })
    .await
    .expect("RNR NAKs");
    assert_eq!(a.cq.poll(&mut [Wc::default()]), 0);
    b.qp.post_recv(RecvWr::new(2, [mb.slice(0..64)])).unwrap();
    a.done(1).await;
    assert_eq!((b.done(2).await.byte_len, octets(&mb, 0, 8)), (8, b"patience".to_vec()));
    assert!(b.qp.roce_stats().unwrap().rnr_naks_sent >= 3);
}

#[tokio::test]
async fn a_peer_that_is_never_ready_ends_it_where_retries_are_counted() {
    let twice = |init: &mut QpInit| init.rnr_retry = 2;
    let (a, b) = roce_pair_with("127.0.0.1", [quick(), quick()], twice).await;
    a.qp.post_send(SendWr::inline(1, SendOp::Send, b"nowhere to go")).unwrap();
    let wc = a.wc().await;
    assert_eq!((wc.id, wc.status), (1, WcStatus::RNR_RETRY_EXC_ERR));
    assert_eq!(a.qp.closed().await, CloseReason::WorkFailed);
    assert_eq!(a.qp.roce_stats().unwrap().rnr_naks_received, 3);
    assert_eq!(b.qp.closed().await, CloseReason::Graceful);
}

/// A queue pair in RTS toward `peer`, as two programs make it who exchange numbers by themselves.
fn moved_by_hand(side: &Side, init: QpInit, peer: SocketAddr, dest_qp: Qpn) -> userdma::Qp {
    let qp = side.pd.create_qp(init).unwrap();
    let rtr = QpAttr {
        peer: Some(peer),
        dest_qp: Some(dest_qp),
        path_mtu: Some(PathMtu::Mtu1024),
        rq_psn: Some(Psn::new(7)),
        ..QpAttr::to(QpState::Rtr)
    };
    qp.modify(&QpAttr::to(QpState::Init)).unwrap();
    qp.modify(&rtr).unwrap();
    qp.modify(&QpAttr { sq_psn: Some(Psn::new(7)), ..QpAttr::to(QpState::Rts) }).unwrap();
    qp
}

#[tokio::test]
async fn a_peer_that_says_nothing_ends_it_when_retries_run_out() {
    let (a, _b) = roce_pair().await;
    let silent = UdpSocket::bind("127.0.0.1:0").unwrap();
    // 4.2 ms, three times.
    let init = QpInit { timeout: 10, retry_cnt: 2, ..QpInit::new(&a.cq) };
    let qp = moved_by_hand(&a, init, silent.local_addr().unwrap(), Qpn(0x77));
    qp.post_recv(RecvWr::new(3, [])).unwrap();
    let began = Instant::now();
    qp.post_send(SendWr::inline(1, SendOp::Send, b"is anybody there?")).unwrap();
    qp.post_send(SendWr::inline(2, SendOp::Send, b"no")).unwrap();
    for (id, status) in
        [(1, WcStatus::RETRY_EXC_ERR), (2, WcStatus::WR_FLUSH_ERR), (3, WcStatus::WR_FLUSH_ERR)]
    {
        let wc = a.wc().await;
        assert_eq!((wc.id, wc.status, wc.qpn), (id, status, qp.qpn()));
    }
    assert!(began.elapsed().as_micros() >= 3 * 4194);
    assert_eq!(qp.closed().await, CloseReason::WorkFailed);
    assert_eq!(qp.roce_stats().unwrap().timeouts, 3);
    // Both really were sent, and sent again: BTH, payload and its pad, ICRC.
    let (mut octets, mut first) = ([0; 2048], 0);
    for _ in 0..6 {
        let (n, from) = silent.recv_from(&mut octets).unwrap();
        assert_eq!(Some(from), a.device.udp_addr());
        first += usize::from(octets[..n - 4].ends_with(b"is anybody there?\0\0\0"));
    }
    assert_eq!(first, 3);
}

/// A process that stands still, as on a busy machine, loses nothing.
#[tokio::test]
async fn a_peer_that_stands_still_for_a_while_is_waited_for() {
    let mut there = tokio::runtime::Builder::new_multi_thread();
    let there = there.worker_threads(1).enable_all().build().unwrap();
    let options = DeviceOptions { runtime: Some(there.handle().clone()), ..quick() };
    let (a, b) = roce_pair_with("127.0.0.1", [quick(), options], |_| {}).await;
    let (ma, mb) = (a.mr(1 << 20, 1), b.mr(1 << 20, 2));
    there.spawn(async { thread::sleep(Duration::from_millis(1200)) });
    let began = Instant::now();
    a.qp.write(ma.slice(0..1 << 20), mb.remote(0)).await.unwrap();
    assert!(began.elapsed() >= Duration::from_secs(1), "nobody else serves it");
    assert!(octets(&ma, 0, 1 << 20) == octets(&mb, 0, 1 << 20));
    assert!(a.qp.roce_stats().unwrap().timeouts >= 2);
    there.shutdown_background();
}

#[tokio::test]
async fn an_overflowing_queue_ends_its_queue_pairs_and_loses_nothing() {
    let (a, b) = roce_pair().await;
    let small = b.device.create_cq(4).unwrap();
    let listener = a.device.listen(Some(0)).await.unwrap();
    let addr = listener.local_addr().to_string();
    let here = toward(&a.device, "127.0.0.1", quick());
    let pd = here.alloc_pd().unwrap();
    let connect = async { here.connect(&addr, &pd, QpInit::new(&small), b"").await.unwrap() };
    let accept =
        async { listener.accept().await.unwrap().accept(&a.pd, a.qp.init().clone(), b"").await };
    let (qp, peer) = tokio::join!(connect, accept);
    let peer = peer.unwrap();
    let write = |id| SendWr::write(id, [], RemoteAddr::default());
    qp.post_recv(RecvWr::new(100, [])).unwrap();
    qp.post_send_batch((0..10).map(write)).unwrap();
    // More than it holds: that is the end of the queue pair, and the peer is told.
    assert_eq!(qp.closed().await, CloseReason::Aborted);
    assert_eq!(peer.closed().await, CloseReason::Graceful);
    assert!(small.overflowed().is_some());
    let refused = qp.post_send(write(10)).unwrap_err();
    assert_eq!(refused, PostError::CqOverflow { depth: 4 });
    assert_eq!(qp.post_recv(RecvWr::new(101, [])), Err(refused));
    // But every completion is handed out, those without room too, and the flushed receive.
    let mut wcs = [Wc::default(); 16];
    assert_eq!(small.poll(&mut wcs), 11);
    assert_eq!(wcs[..10].iter().map(|wc| wc.id).collect::<Vec<_>>(), (0..10).collect::<Vec<_>>());
    assert!(wcs[..5].iter().all(|wc| wc.status.is_ok()));
    assert_eq!((wcs[10].id, wcs[10].status), (100, WcStatus::WR_FLUSH_ERR));
    let e = small.next().await.unwrap_err().to_string();
    assert!(e.contains("overflowed: 4 entries"), "{e}");
    let e = pd.create_qp(QpInit::new(&small)).unwrap_err().to_string();
    assert!(e.contains("overflowed: 4 entries"), "{e}");
    // Queue pairs of other queues are as before.
    barrier(&a, &b).await;
    barrier(&b, &a).await;
}

/// Both sides WRITE and READ much more than the sockets hold, at the same time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn both_directions_at_once_do_not_block_each_other() {
    // A busy machine takes its time for so much.
    let patient = |init: &mut QpInit| init.timeout = 18;
    let (a, b) = roce_pair_with("127.0.0.1", [quick(), quick()], patient).await;
    either::both_directions_at_once_do_not_block_each_other(&a, &b, async {}).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reads_of_changing_memory_never_break_the_icrc() {
    let (a, b) = roce_pair().await;
    either::reads_of_changing_memory(&a, &b).await;
    assert_eq!(a.device.roce_stats().unwrap().port.icrc_bad, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_deregister_a_writing_peer_changes_nothing() {
    let (a, b) = roce_pair().await;
    let ended = async {
        let access = Syndrome::Nak(NakCode::REMOTE_ACCESS);
        assert_eq!(b.qp.closed().await, CloseReason::NakSent(access));
        assert_eq!(a.qp.closed().await, CloseReason::WorkFailed);
    };
    either::after_deregister_a_writing_peer_changes_nothing(&a, &b, ended).await;
}

/// One thread: nobody else acknowledges what this one sends.
#[tokio::test(flavor = "current_thread")]
async fn a_source_revoked_while_it_is_sent_fails_that_work() {
    let (a, b) = roce_pair().await;
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
    assert_eq!(a.qp.closed().await, CloseReason::WorkFailed);
    assert_eq!(b.qp.closed().await, CloseReason::Graceful);
}

#[tokio::test]
async fn iwarp_and_unreliable_kinds_say_what_they_are() {
    let tcp = quick().open("tcp://127.0.0.1").unwrap();
    let (pd, cq) = (tcp.alloc_pd().unwrap(), tcp.create_cq(8).unwrap());
    for kind in [QpType::Uc, QpType::Ud] {
        let e = pd.create_qp(QpInit::new(&cq).kind(kind)).unwrap_err().to_string();
        assert!(e.contains("iWARP has reliable connections only"), "{e}");
    }
    let qp = pd.create_qp(QpInit::new(&cq)).unwrap();
    assert!(qp.modify(&QpAttr::to(QpState::Init)).is_err());
    assert!((tcp.udp_addr(), qp.attributes(), qp.roce_stats()) == (None, None, None));
    assert!(tcp.roce_stats().is_none());
}
