//! Who makes progress: a program that polls, futures, a task, and all of them at once.

mod common;
mod either;

use std::time::{Duration, Instant};

use common::*;
use userdma::{DeviceOptions, QpInit, RecvWr, SendOp, SendWr, Wc};

/// The runtime does nothing while its only thread spins: all progress is made by polling, start to
/// finish, timers included.
#[tokio::test]
async fn polling_alone_makes_all_progress() {
    let (a, b) = pair().await;
    let (ma, mb) = (a.mr(1 << 20, 1), b.mr(1 << 20, 2));
    for round in 0..200 {
        b.qp.post_recv(RecvWr::new(round, [mb.slice(0..64)])).unwrap();
        a.qp.post_send(SendWr::send(round, [ma.slice(0..64)])).unwrap();
        assert_eq!(spin(&a.cq).id, round);
        let wc = spin(&b.cq);
        assert_eq!((wc.id, wc.byte_len), (round, 64));
    }
    // A READ needs both sides: the poller of one does not turn the other's.
    a.qp.post_send(SendWr::read(1, [ma.slice(0..1 << 20)], mb.remote(0))).unwrap();
    let mut wcs = [Wc::default(); 4];
    let began = Instant::now();
    while a.cq.poll(&mut wcs) == 0 {
        assert_eq!(b.cq.poll(&mut wcs), 0);
        assert!(began.elapsed() < LONG);
    }
    assert!(wcs[0].status.is_ok());
    assert!(octets(&ma, 0, 1 << 20) == octets(&mb, 0, 1 << 20));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_polling_thread_and_futures_share_a_queue_pair() {
    let (a, b) = pair().await;
    either::a_polling_thread_and_futures_share_a_queue_pair(&a, &b).await;
}

/// A program that spun and stops: the task takes over, at once where somebody awaits.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn progress_goes_on_when_polling_stops() {
    let (a, b) = pair().await;
    either::progress_goes_on_when_polling_stops(&a, &b).await;
}

#[tokio::test]
async fn without_spinning_futures_sleep_and_are_woken() {
    let options = DeviceOptions { spin: Duration::ZERO, ..quick() };
    let (a, b) = pair_with("127.0.0.1", options, |_| {}).await;
    either::without_spinning_futures_sleep_and_are_woken(&a, &b).await;
}

#[tokio::test]
async fn a_cancelled_next_takes_nothing() {
    let (a, b) = pair().await;
    either::a_cancelled_next_takes_nothing(&a, &b).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_armed_queue_wakes_who_sleeps() {
    let (a, b) = pair().await;
    either::an_armed_queue_wakes_who_sleeps(&a, &b).await;
}

#[tokio::test]
async fn two_queues_each_get_their_own() {
    let (device, listener, addr) = listening("127.0.0.1", quick()).await;
    let pd = device.alloc_pd().unwrap();
    let (sends, recvs) = (device.create_cq(16).unwrap(), device.create_cq(16).unwrap());
    let init = || QpInit { recv_cq: recvs.clone(), ..QpInit::new(&sends) };
    let accept = async {
        let request = listener.accept().await.unwrap();
        request.accept(&pd, init(), b"").await.unwrap()
    };
    let (a, b) = tokio::join!(device.connect(&addr, &pd, init(), b""), accept);
    let a = a.unwrap();
    b.post_recv(RecvWr::new(1, [])).unwrap();
    a.post_send(SendWr::inline(2, SendOp::Send, b"")).unwrap();
    assert_eq!(spin(&recvs).id, 1);
    assert_eq!(spin(&sends).id, 2);
}
