//! Once a connection over UDP has warmed up, moving messages allocates nothing.
//!
//! The only test of this file: the counter counts the whole process.

mod common;
mod counting;

use common::*;
use counting::{allocated, drive};
use userdma::{QpInit, RecvWr, SendOp, SendWr};

#[tokio::test]
async fn moving_messages_over_udp_allocates_nothing() {
    let mut hosts = vec![("127.0.0.1", 128), ("127.0.0.1", 1)];
    if userdma_tests::ipv6() {
        hosts.push(("[::1]", 128));
    }
    for (host, max_packets) in hosts {
        let mut options = quick();
        options.roce.max_packets = max_packets;
        let (a, b) = roce_pair_with(host, [options.clone(), options], |_| {}).await;
        let (ma, mb) = (a.mr(1 << 20, 1), b.mr(1 << 20, 2));
        let ping_pong = || {
            for (from, to, of, at) in [(&a, &b, &ma, &mb), (&b, &a, &mb, &ma)] {
                to.qp.post_recv(RecvWr::new(1, [at.slice(0..64)])).unwrap();
                from.qp.post_send(SendWr::send(2, [of.slice(0..64)])).unwrap();
                drive(from, to, 1, 1);
            }
        };
        assert_eq!(allocated(200, ping_pong), 0, "{host}: SEND to and fro");
        let one_sided = || {
            let small = (0..64).map(|i| {
                SendWr::inline(i, SendOp::Write(mb.remote(8 * i as usize)), b"8 octets")
                    .unsignaled()
            });
            a.qp.post_send_batch(small).unwrap();
            a.qp.post_send(SendWr::write(3, [ma.slice(0..1 << 20)], mb.remote(0))).unwrap();
            a.qp.post_send(SendWr::read(4, [ma.slice(0..1 << 18)], mb.remote(0))).unwrap();
            a.qp.post_send(SendWr::fetch_add(5, ma.slice(0..8), mb.remote(0), 1)).unwrap();
            a.qp.post_send(SendWr::atomic_write(6, mb.remote(8), [1; 8])).unwrap();
            drive(&a, &b, 4, 0);
        };
        let made = allocated(50, one_sided);
        assert_eq!(made, 0, "{host}: in 50 rounds of 68 messages, trains of {max_packets}");
    }

    // The same with receives from a shared queue, armed for its limit each time.
    let there = quick().open("udp://127.0.0.1:0").unwrap();
    let here = toward(&there, "127.0.0.1", quick());
    let listener = there.listen(Some(0)).await.unwrap();
    let addr = listener.local_addr().to_string();
    let (pd, cq) = (there.alloc_pd().unwrap(), there.create_cq(64).unwrap());
    let srq = pd.create_srq(16, 1).unwrap();
    let accept = async {
        let request = listener.accept().await.unwrap();
        request.accept(&pd, QpInit::new(&cq).srq(&srq), b"").await.unwrap()
    };
    let client = (here.alloc_pd().unwrap(), here.create_cq(64).unwrap());
    let connect = here.connect(&addr, &client.0, QpInit::new(&client.1), b"");
    let (qp, connected) = tokio::join!(accept, connect);
    let b = Side { device: there, pd, cq, qp };
    let a = Side { device: here, pd: client.0, cq: client.1, qp: connected.unwrap() };
    let (ma, mb) = (a.mr(1 << 16, 1), b.mr(1 << 16, 2));
    let round = || {
        srq.post_recv_batch((0..8).map(|i| RecvWr::new(i, [mb.slice(0..1 << 16)]))).unwrap();
        srq.arm(2).unwrap();
        for i in 0..8 {
            a.qp.post_send(SendWr::send(i, [ma.slice(0..1 << (2 * i))])).unwrap();
        }
        drive(&a, &b, 8, 8);
        assert_eq!((srq.posted(), srq.limit()), (0, 0));
    };
    assert_eq!(allocated(50, round), 0, "in 50 rounds of 8 messages from a shared queue");
}
