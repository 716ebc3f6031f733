//! Once a connection has warmed up, moving messages allocates nothing.
//!
//! The only test of this file: the counter counts the whole process.

mod common;
mod counting;

use common::*;
use counting::{allocated, drive};
use userdma::{QpInit, RecvWr, SendOp, SendWr};

#[tokio::test]
async fn moving_messages_allocates_nothing() {
    for crc in [true, false] {
        let (a, b) = pair_with("127.0.0.1", quick(), |init| init.mpa.crc = crc).await;
        let (ma, mb) = (a.mr(1 << 20, 1), b.mr(1 << 20, 2));
        let round = || {
            b.qp.post_recv(RecvWr::new(1, [mb.slice(0..64)])).unwrap();
            a.qp.post_send(SendWr::send(2, [ma.slice(0..64)])).unwrap();
            drive(&a, &b, 1, 1);
            let small = (0..64).map(|i| {
                SendWr::inline(i, SendOp::Write(mb.remote(8 * i as usize)), b"8 octets")
                    .unsignaled()
            });
            a.qp.post_send_batch(small).unwrap();
            a.qp.post_send(SendWr::write(3, [ma.slice(0..1 << 20)], mb.remote(0))).unwrap();
            a.qp.post_send(SendWr::read(4, [ma.slice(0..1 << 18)], mb.remote(0))).unwrap();
            a.qp.post_send(SendWr::fetch_add(5, ma.slice(0..8), mb.remote(0), 1)).unwrap();
            drive(&a, &b, 3, 0);
        };
        assert_eq!(allocated(50, round), 0, "in 50 rounds of 68 messages, CRC {crc}");
    }

    // The same with receives from a shared queue, armed for its limit each time.
    let (device, listener, addr) = listening("127.0.0.1", quick()).await;
    let (pd, cq) = (device.alloc_pd().unwrap(), device.create_cq(64).unwrap());
    let srq = pd.create_srq(16, 1).unwrap();
    let accept = async {
        let request = listener.accept().await.unwrap();
        request.accept(&pd, QpInit::new(&cq).srq(&srq), b"").await.unwrap()
    };
    let here = (device.alloc_pd().unwrap(), device.create_cq(64).unwrap());
    let connect = device.connect(&addr, &here.0, QpInit::new(&here.1), b"");
    let (qp, client) = tokio::join!(accept, connect);
    let b = Side { device: device.clone(), pd, cq, qp };
    let a = Side { device: device.clone(), pd: here.0, cq: here.1, qp: client.unwrap() };
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
