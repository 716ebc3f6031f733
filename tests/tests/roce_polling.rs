//! Who makes progress over UDP: a program that polls, futures, a task, and all of them at once.

mod common;
mod either;

use std::{
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU32, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use common::*;
use userdma::{CloseReason, Device, DeviceOptions, QpInit, RecvWr, SendOp, SendWr, Wc};

/// Polls both queues until each has given `count` completions.
fn spin_both(a: &Side, b: &Side, count: usize) -> [Vec<Wc>; 2] {
    let (mut got, began) = ([Vec::new(), Vec::new()], Instant::now());
    let mut wc = [Wc::default()];
    while got.iter().any(|wcs| wcs.len() < count) {
        for (side, wcs) in [a, b].into_iter().zip(&mut got) {
            if side.cq.poll(&mut wc) == 1 {
                assert!(wc[0].status.is_ok(), "{wc:?}");
                wcs.push(wc[0]);
            }
        }
        assert!(began.elapsed() < LONG, "completions in time");
    }
    got
}

/// A time-out so long that a test would notice.
fn patient(init: &mut QpInit) {
    // 17 s.
    init.timeout = 22;
}

async fn patient_pair(options: DeviceOptions) -> (Side, Side) {
    roce_pair_with("127.0.0.1", [options.clone(), options], patient).await
}

/// The runtime does nothing while its only thread spins: all progress is made by polling, start to
/// finish, time-outs included.
#[tokio::test]
async fn polling_alone_makes_all_progress() {
    let (a, b) = roce_pair().await;
    let (ma, mb) = (a.mr(1 << 20, 1), b.mr(1 << 20, 2));
    for round in 0..200 {
        b.qp.post_recv(RecvWr::new(round, [mb.slice(0..64)])).unwrap();
        a.qp.post_send(SendWr::send(round, [ma.slice(0..64)])).unwrap();
        let [at_a, at_b] = spin_both(&a, &b, 1);
        assert_eq!((at_a[0].id, at_b[0].id, at_b[0].byte_len), (round, round, 64));
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
    // A SEND that waits for its receive is tried again by nobody but the poller.
    a.qp.post_send(SendWr::send(2, [ma.slice(0..64)])).unwrap();
    let began = Instant::now();
    while a.qp.roce_stats().unwrap().rnr_naks_received < 3 {
        assert_eq!(a.cq.poll(&mut wcs) + b.cq.poll(&mut wcs), 0);
        assert!(began.elapsed() < LONG);
    }
    b.qp.post_recv(RecvWr::new(3, [mb.slice(0..64)])).unwrap();
    let [at_a, at_b] = spin_both(&a, &b, 1);
    assert_eq!((at_a[0].id, at_b[0].id), (2, 3));
}

/// The same through a network that loses: its timers are the poller's.
#[tokio::test]
async fn polling_alone_makes_good_for_losses() {
    let mut options = quick();
    options.roce.impair = Some("loss=10%,delay=1ms,seed=5".parse().unwrap());
    let quickly = |init: &mut QpInit| init.timeout = 12;
    let (a, b) = roce_pair_with("127.0.0.1", [options.clone(), options], quickly).await;
    let (ma, mb) = (a.mr(64, 1), b.mr(64, 2));
    for round in 0..50 {
        b.qp.post_recv(RecvWr::new(round, [mb.slice(0..64)])).unwrap();
        a.qp.post_send(SendWr::send(round, [ma.slice(0..64)])).unwrap();
        spin_both(&a, &b, 1);
    }
    assert!(a.qp.roce_stats().unwrap().timeouts > 0);
}

/// Who polls takes its completion before the acknowledgement is sent, and may never poll again: the
/// peer gets it all the same, long before it would ask.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_poller_that_stops_does_not_strand_its_peer() {
    let (a, b) = patient_pair(quick()).await;
    let (ma, mb) = (a.mr(4096, 1), b.mr(4096, 2));
    for round in 0..40 {
        b.qp.post_recv(RecvWr::new(round, [mb.slice(0..64)])).unwrap();
        let polling = thread::spawn({
            let cq = b.cq.clone();
            move || spin(&cq)
        });
        // The task has left the socket to the poller.
        tokio::time::sleep(Duration::from_micros(100 * round)).await;
        let began = Instant::now();
        a.qp.write(ma.slice(0..64), mb.remote(0)).await.unwrap();
        a.qp.send(ma.slice(0..64)).await.unwrap();
        let took = began.elapsed();
        assert!(took < Duration::from_secs(4), "round {round}: {took:?}");
        let wc = tokio::task::spawn_blocking(move || polling.join().unwrap()).await.unwrap();
        assert_eq!(wc.id, round);
    }
    assert_eq!(a.qp.roce_stats().unwrap().timeouts, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_polling_thread_and_futures_share_a_queue_pair() {
    let (a, b) = patient_pair(quick()).await;
    either::a_polling_thread_and_futures_share_a_queue_pair(&a, &b).await;
}

/// A program that spun and stops: the task takes over, at once where somebody awaits.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn progress_goes_on_when_polling_stops() {
    let (a, b) = patient_pair(quick()).await;
    either::progress_goes_on_when_polling_stops(&a, &b).await;
}

/// One queue pair is polled, another of the same socket is awaited: neither starves the other.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_poller_and_a_sleeper_share_a_socket() {
    let options = DeviceOptions { spin: Duration::ZERO, ..quick() };
    let (a, b) = patient_pair(options).await;
    let listener = b.device.listen(Some(0)).await.unwrap();
    let addr = listener.local_addr().to_string();
    let [slow_a, slow_b] = [&a, &b].map(|side| side.device.create_cq(16).unwrap());
    let init = |cq| {
        let mut init = QpInit::new(cq);
        patient(&mut init);
        init
    };
    let accept =
        async { listener.accept().await.unwrap().accept(&b.pd, init(&slow_b), b"").await.unwrap() };
    let connect = a.device.connect(&addr, &a.pd, init(&slow_a), b"");
    let (here, there) = tokio::join!(connect, accept);
    let here = here.unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    // Both sockets are polled all the time, for queues that get nothing.
    let pollers = [&a, &b].map(|side| {
        let (cq, stop) = (side.cq.clone(), stop.clone());
        thread::spawn(move || {
            let mut wcs = [Wc::default(); 8];
            while !stop.load(Ordering::Relaxed) {
                assert_eq!(cq.poll(&mut wcs), 0);
                thread::yield_now();
            }
        })
    });
    for n in 0..100u64 {
        let ((got, wc), (_, sent)) =
            tokio::join!(there.recv_lent(vec![0; 8]), here.send_lent(n.to_ne_bytes().to_vec()));
        sent.unwrap();
        wc.unwrap();
        assert_eq!(got, n.to_ne_bytes());
    }
    stop.store(true, Ordering::Relaxed);
    for poller in pollers {
        poller.join().unwrap();
    }
    assert_eq!(here.roce_stats().unwrap().timeouts, 0);
}

#[tokio::test]
async fn without_spinning_futures_sleep_and_are_woken() {
    let options = DeviceOptions { spin: Duration::ZERO, ..quick() };
    let (a, b) = patient_pair(options).await;
    either::without_spinning_futures_sleep_and_are_woken(&a, &b).await;
}

#[tokio::test]
async fn a_cancelled_next_takes_nothing() {
    let (a, b) = roce_pair().await;
    either::a_cancelled_next_takes_nothing(&a, &b).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_armed_queue_wakes_who_sleeps() {
    let (a, b) = roce_pair().await;
    either::an_armed_queue_wakes_who_sleeps(&a, &b).await;
}

#[tokio::test]
async fn two_queues_each_get_their_own() {
    let device = quick().open("udp://127.0.0.1:0").unwrap();
    let listener = device.listen(Some(0)).await.unwrap();
    let addr = listener.local_addr().to_string();
    let here = toward(&device, "127.0.0.1", quick());
    let pd = device.alloc_pd().unwrap();
    let (sends, recvs) = (device.create_cq(16).unwrap(), device.create_cq(16).unwrap());
    let init = || QpInit { recv_cq: recvs.clone(), ..QpInit::new(&sends) };
    let accept = async {
        let request = listener.accept().await.unwrap();
        request.accept(&pd, init(), b"").await.unwrap()
    };
    // Both devices complete into the same queues: each drives both sockets.
    let own_pd = here.alloc_pd().unwrap();
    let (a, b) = tokio::join!(here.connect(&addr, &own_pd, init(), b""), accept);
    let a = a.unwrap();
    for id in 0..20 {
        b.post_recv(RecvWr::new(id, [])).unwrap();
        a.post_send(SendWr::inline(id + 100, SendOp::Send, b"")).unwrap();
        let wc = spin(&recvs);
        assert_eq!((wc.id, wc.qpn), (id, b.qpn()));
        let wc = spin(&sends);
        assert_eq!((wc.id, wc.qpn), (id + 100, a.qpn()));
    }
}

/// The device itself connects to itself: one socket, two queue pairs, one queue.
#[tokio::test]
async fn a_device_connected_to_itself() {
    let probe = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let own = probe.local_addr().unwrap();
    drop(probe);
    let mut options = quick();
    options.roce.peer_udp_port = own.port();
    let device = options.open(&format!("udp://{own}")).unwrap();
    let listener = device.listen(None).await.unwrap();
    let (pd, cq) = (device.alloc_pd().unwrap(), device.create_cq(16).unwrap());
    let accept =
        async { listener.accept().await.unwrap().accept(&pd, QpInit::new(&cq), b"").await };
    let connect = device.connect("127.0.0.1", &pd, QpInit::new(&cq), b"");
    let (a, b) = tokio::join!(connect, accept);
    let (a, b) = (a.unwrap(), b.unwrap());
    b.post_recv(RecvWr::new(1, [])).unwrap();
    a.post_send(SendWr::inline(2, SendOp::SendImm(5), b"")).unwrap();
    let mut ids = [spin(&cq).id, spin(&cq).id];
    ids.sort_unstable();
    assert_eq!(ids, [1, 2]);
    a.disconnect().await;
    b.closed().await;
}

/// A waker that looks at the devices before it wakes, as an executor may that runs what it wakes at
/// once.
struct Nosy {
    thread: thread::Thread,
    devices: Vec<Device>,
    woken: AtomicU32,
}

impl std::task::Wake for Nosy {
    fn wake(self: Arc<Self>) {
        for device in &self.devices {
            assert!(device.roce_stats().is_some());
        }
        self.woken.fetch_add(1, Ordering::Relaxed);
        self.thread.unpark();
    }
}

/// Nobody is woken with a lock held: requests, connections, completions, events and ends.
#[test]
fn wakers_may_come_back() {
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(1).enable_all().build().unwrap();
    let (done, finished) = mpsc::channel();
    let handle = runtime.handle().clone();
    thread::spawn(move || {
        let options = DeviceOptions { runtime: Some(handle), spin: Duration::ZERO, ..quick() };
        let there = options.clone().open("udp://127.0.0.1:0").unwrap();
        let here = toward(&there, "127.0.0.1", options);
        let nosy = Arc::new(Nosy {
            thread: thread::current(),
            devices: vec![here.clone(), there.clone()],
            woken: AtomicU32::new(0),
        });
        let waker = nosy.clone().into();
        let mut context = std::task::Context::from_waker(&waker);
        let mut session = std::pin::pin!(async {
            let listener = there.listen(Some(0)).await.unwrap();
            let addr = listener.local_addr().to_string();
            let [a, b] = [&here, &there]
                .map(|device| (device.alloc_pd().unwrap(), device.create_cq(16).unwrap()));
            let srq = b.0.create_srq(8, 1).unwrap();
            let accept = async {
                let request = listener.accept().await.unwrap();
                request.accept(&b.0, QpInit::new(&b.1).srq(&srq), b"").await.unwrap()
            };
            let connect = here.connect(&addr, &a.0, QpInit::new(&a.1), b"");
            // The one that waits first: it is woken when the request comes.
            let (peer, qp) = tokio::join!(accept, connect);
            let qp = qp.unwrap();
            for _ in 0..10 {
                srq.post_recv(RecvWr::new(1, [])).unwrap();
                srq.arm(1).unwrap();
                b.1.arm(false);
                let ((), sent, (), wc) = tokio::join!(
                    srq.limit_reached(),
                    qp.submit(SendWr::send(2, [])),
                    b.1.notified(),
                    b.1.next(),
                );
                sent.unwrap();
                assert_eq!(wc.unwrap().id, 1);
            }
            let (end, other) = tokio::join!(qp.disconnect(), peer.closed());
            assert_eq!((end, other), (CloseReason::Graceful, CloseReason::Graceful));
            // A listener that goes, and one who waits for it.
            let waiting = listener.accept();
            assert!(tokio::select! {
                biased;
                _ = waiting => false,
                () = std::future::ready(()) => true,
            });
            drop(listener);
        });
        while session.as_mut().poll(&mut context).is_pending() {
            thread::park_timeout(LONG);
        }
        assert!(nosy.woken.load(Ordering::Relaxed) > 10);
        done.send(()).unwrap();
    });
    let finished = finished.recv_timeout(LONG);
    // Also where its thread never comes back.
    runtime.shutdown_background();
    finished.expect("nobody waits for a lock of its own");
}
