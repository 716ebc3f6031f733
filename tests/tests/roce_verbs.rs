//! Work requests of every kind over real UDP sockets: what arrives, what completes, and how.

mod common;

use std::sync::atomic::Ordering;

use common::*;
use userdma::{CloseReason, DeviceOptions, Imm, RecvWr, SendFlags, SendOp, SendWr, WcOpcode};

/// Every operation that RoCE has, each content checked at both ends.
async fn every_operation(host: &str, options: [DeviceOptions; 2]) {
    let (a, b) = roce_pair_with(host, options, |_| {}).await;
    let (ma, mb) = (a.mr(3 << 20, 1), b.mr(3 << 20, 2));

    // SEND: gathered from three pieces, scattered into two.
    b.qp.post_recv(RecvWr::new(1, [mb.slice(10..20), mb.slice(1000..3000)])).unwrap();
    let wc = a.post(SendWr::send(2, [ma.slice(0..3), ma.slice(50..1050), ma.slice(7..8)])).await;
    assert_eq!(wc.opcode, WcOpcode::SEND);
    let wc = b.done(1).await;
    assert_eq!((wc.opcode, wc.byte_len, wc.solicited), (WcOpcode::RECV, 1004, false));
    let sent = [octets(&ma, 0, 3), octets(&ma, 50, 1000), octets(&ma, 7, 1)].concat();
    assert_eq!([octets(&mb, 10, 10), octets(&mb, 1000, 994)].concat(), sent);

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

    // SEND with invalidate: the key is dead afterwards.
    let lent = b.mr(4096, 9);
    lent.bind(b.qp.qpn()).unwrap();
    let key = lent.rkey();
    b.qp.post_recv(RecvWr::new(8, [])).unwrap();
    a.post(SendWr::new(9, SendOp::SendInv(key), [])).await;
    assert_eq!(b.done(8).await.invalidated, Some(key));
    assert!(!lent.is_valid());

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
    assert_eq!(octets(&mb, 77, 7), b"with it");

    // READ into one place and scattered, both directions.
    let wc = a.post(SendWr::read(17, [ma.slice(100..700_100)], mb.remote(33))).await;
    assert_eq!((wc.opcode, wc.byte_len), (WcOpcode::READ, 700_000));
    assert!(octets(&ma, 100, 700_000) == octets(&mb, 33, 700_000));
    b.post(SendWr::read(18, [mb.slice(0..5), mb.slice(50..60)], ma.remote(9))).await;
    assert_eq!([octets(&mb, 0, 5), octets(&mb, 50, 10)].concat(), octets(&ma, 9, 15));

    // Atomics; the old value lands in host order.
    mb.store_u64(64, 40, Ordering::Relaxed);
    a.post(SendWr::fetch_add(19, ma.slice(8..16), mb.remote(64), 2)).await;
    assert_eq!((ma.load_u64(8, Ordering::Relaxed), mb.load_u64(64, Ordering::Relaxed)), (40, 42));
    a.post(SendWr::cmp_swap(20, ma.slice(8..16), mb.remote(64), 42, 7)).await;
    assert_eq!((ma.load_u64(8, Ordering::Relaxed), mb.load_u64(64, Ordering::Relaxed)), (42, 7));
    a.post(SendWr::cmp_swap(21, ma.slice(8..16), mb.remote(64), 42, 8)).await;
    assert_eq!((ma.load_u64(8, Ordering::Relaxed), mb.load_u64(64, Ordering::Relaxed)), (7, 7));

    a.qp.disconnect().await;
    assert_eq!(b.qp.closed().await, CloseReason::Graceful);
}

#[tokio::test]
async fn every_operation_on_ipv4() {
    every_operation("127.0.0.1", [quick(), quick()]).await;
}
