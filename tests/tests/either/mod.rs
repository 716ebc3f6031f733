//! What holds over either transport, for two connected queue pairs of it.
#![allow(dead_code, reason = "each test file uses a part of it")]

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

use userdma::{Mr, QpState, RecvWr, Region, RemoteAddr, SendFlags, SendOp, SendWr, Wc};

use crate::common::*;

pub(crate) async fn the_async_face_gives_each_result_to_its_future(a: &Side, b: &Side) {
    let (ma, mb) = (a.mr(4096, 1), b.mr(4096, 2));
    let echo = async {
        let wc = b.qp.recv(mb.slice(0..100)).await.unwrap();
        assert_eq!(wc.byte_len, 40);
        b.qp.send(mb.slice(0..40)).await.unwrap();
    };
    let ask = async {
        let (got, sent) = tokio::join!(a.qp.recv(ma.slice(1000..2000)), a.qp.send(ma.slice(0..40)));
        sent.unwrap();
        assert_eq!(got.unwrap().byte_len, 40);
    };
    tokio::join!(echo, ask);
    assert_eq!(octets(&ma, 1000, 40), octets(&ma, 0, 40));

    a.qp.write(ma.slice(0..64), mb.remote(512)).await.unwrap();
    a.qp.read(ma.slice(2048..2112), mb.remote(512)).await.unwrap();
    assert_eq!(octets(&ma, 2048, 64), octets(&ma, 0, 64));
    mb.store_u64(0, 5, Ordering::Relaxed);
    assert_eq!(a.qp.fetch_add(mb.remote(0), 10).await.unwrap(), 5);
    assert_eq!(a.qp.cmp_swap(mb.remote(0), 15, 1).await.unwrap(), 15);
    assert_eq!(mb.load_u64(0, Ordering::Relaxed), 1);

    // Unsignalled work is awaited all the same.
    a.qp.submit(SendWr::inline(0, SendOp::Write(mb.remote(8)), b"x").unsignaled()).await.unwrap();

    // Lent buffers come back, cut to what came.
    let ((sent, ok), (got, wc)) =
        tokio::join!(a.qp.send_lent(pattern(100_000, 3)), b.qp.recv_lent(vec![0; 200_000]));
    ok.unwrap();
    assert_eq!(wc.unwrap().byte_len, 100_000);
    assert!(sent == pattern(100_000, 3) && got == sent);
    let ((_, ok), (got, wc)) = tokio::join!(a.qp.send_lent(Vec::new()), b.qp.recv_lent(Vec::new()));
    ok.unwrap();
    assert_eq!((wc.unwrap().byte_len, got.len()), (0, 0));

    assert_eq!(a.cq.poll(&mut [Wc::default()]), 0, "nothing of it went to the queue");
    assert_eq!(b.cq.poll(&mut [Wc::default()]), 0);
}

pub(crate) async fn a_dropped_future_leaves_its_operation_going(a: &Side, b: &Side) {
    // The receive is posted, its future is dropped: the SEND still has a place to go.
    {
        let mut recv = Box::pin(b.qp.recv_lent(vec![0; 64]));
        let poll = std::future::poll_fn(|cx| std::task::Poll::Ready(recv.as_mut().poll(cx)));
        assert!(poll.await.is_pending());
    }
    let (_, sent) = a.qp.send_lent(b"lost".to_vec()).await;
    sent.unwrap();
    let ((_, sent), (got, wc)) =
        tokio::join!(a.qp.send_lent(b"found".to_vec()), b.qp.recv_lent(vec![0; 64]));
    sent.unwrap();
    wc.unwrap();
    assert_eq!(got, b"found");
}

/// The initiator has room for 600 send work requests.
pub(crate) async fn unsignalled_work_completes_silently_and_in_order(a: &Side, b: &Side) {
    let (ma, mb) = (a.mr(8192, 1), b.mr(8192, 0));
    let batch = (0..512).map(|i| {
        let at = i * 8;
        let wr = SendWr::write(i as u64, [ma.slice(at..at + 8)], mb.remote(at));
        if i % 100 == 99 { wr } else { wr.unsignaled() }
    });
    a.qp.post_send_batch(batch).unwrap();
    for id in [99, 199, 299, 399, 499] {
        a.done(id).await;
    }
    barrier(a, b).await;
    assert_eq!(octets(&mb, 0, 4096), octets(&ma, 0, 4096));
    assert_eq!(a.cq.poll(&mut [Wc::default()]), 0);
}

/// The peer stores into a region all the time while it is READ; the caller looks at the checksums.
pub(crate) async fn reads_of_changing_memory(a: &Side, b: &Side) {
    let len = 200_000;
    let (ma, mb) = (a.mr(len, 1), b.mr(len, 2));
    let stop = Arc::new(AtomicBool::new(false));
    let storing = {
        let (mb, stop) = (mb.clone(), stop.clone());
        thread::spawn(move || {
            let mut n = 0u64;
            while !stop.load(Ordering::Relaxed) {
                for at in (0..len).step_by(8) {
                    mb.store_u64(at, n, Ordering::Relaxed);
                }
                n += 1;
            }
        })
    };
    let (mut reads, mut changed, mut before) = (0, 0, 0);
    while reads < 200 || changed < 20 {
        a.qp.read(ma.slice(0..len), mb.remote(0)).await.unwrap();
        let now = ma.load_u64(len - 8, Ordering::Relaxed);
        reads += 1;
        changed += u32::from(now != before);
        before = now;
    }
    stop.store(true, Ordering::Relaxed);
    storing.join().unwrap();
    assert_eq!((a.qp.state(), b.qp.state()), (QpState::Rts, QpState::Rts));
}

/// Once `settled` is, both find what the other wrote.
pub(crate) async fn both_directions_at_once_do_not_block_each_other(
    a: &Side,
    b: &Side,
    settled: impl Future<Output = ()>,
) {
    const LEN: usize = 1 << 20;
    let (ma, mb) = (a.mr(4 * LEN, 1), b.mr(4 * LEN, 2));
    let work = |side: &Side, own: &Mr, place: RemoteAddr| {
        let (qp, own) = (side.qp.clone(), own.clone());
        tokio::spawn(async move {
            let at = |offset: usize| RemoteAddr::new(place.addr + offset as u64, place.rkey);
            for _ in 0..20 {
                // From our first quarter to its second, from its first to our third.
                let (wrote, read) = tokio::join!(
                    qp.write(own.slice(0..LEN), at(LEN)),
                    qp.read(own.slice(2 * LEN..3 * LEN), at(0)),
                );
                wrote.unwrap();
                read.unwrap();
            }
        })
    };
    let (wa, wb) = (work(a, &ma, mb.remote(0)), work(b, &mb, ma.remote(0)));
    let both = async { tokio::join!(wa, wb) };
    let (wa, wb) = tokio::time::timeout(LONG, both).await.expect("no deadlock");
    wa.unwrap();
    wb.unwrap();
    settled.await;
    for (here, there) in [(&ma, &mb), (&mb, &ma)] {
        let theirs = octets(there, 0, LEN);
        assert!(octets(here, LEN, LEN) == theirs, "what it wrote");
        assert!(octets(here, 2 * LEN, LEN) == theirs, "what we read");
    }
}

/// `ended` waits for both ends of the connection, and looks why.
pub(crate) async fn after_deregister_a_writing_peer_changes_nothing(
    a: &Side,
    b: &Side,
    ended: impl Future<Output = ()>,
) {
    let len = 1 << 20;
    let ma = a.mr(len, 1);
    let mb = b.pd.register(Region::from_vec(vec![0; len]), all()).unwrap();
    let place = mb.remote(0);
    let writing = {
        let qp = a.qp.clone();
        tokio::spawn(async move {
            let mut n = 0u64;
            loop {
                n += 1;
                ma.write_at(0, &[n as u8; 4096]).unwrap();
                if qp.write(ma.slice(0..len), place).await.is_err() {
                    return n;
                }
            }
        })
    };
    while octets(&mb, 0, 1) == [0] || octets(&mb, 0, 1) == [1] {
        tokio::task::yield_now().await;
    }
    // Deregisters while WRITEs pour in, and gives the memory back for looking at it.
    let mut memory = mb.into_vec().unwrap();
    memory.fill(0xee);
    ended.await;
    assert!(writing.await.unwrap() >= 2);
    assert!(memory.iter().all(|&octet| octet == 0xee));
}

pub(crate) async fn a_polling_thread_and_futures_share_a_queue_pair(a: &Side, b: &Side) {
    const ROUNDS: u64 = 300;
    let (ma, mb) = (a.mr(1 << 16, 1), b.mr(1 << 16, 2));
    // b answers by polling, in a thread of its own.
    let answering = {
        let (qp, cq, mb) = (b.qp.clone(), b.cq.clone(), mb.clone());
        for id in 0..2 {
            qp.post_recv(RecvWr::new(id, [mb.slice(0..8)])).unwrap();
        }
        thread::spawn(move || {
            for _ in 0..ROUNDS {
                let wc = spin(&cq);
                assert!(wc.status.is_ok(), "{wc:?}");
                qp.post_recv(RecvWr::new(wc.id, [mb.slice(0..8)])).unwrap();
                qp.post_send(SendWr::send(9, [mb.slice(0..8)]).unsignaled()).unwrap();
            }
        })
    };
    // a asks and awaits, while another task of it READs, and a thread polls its queue.
    let stop = Arc::new(AtomicBool::new(false));
    let polling = {
        let (cq, stop) = (a.cq.clone(), stop.clone());
        thread::spawn(move || {
            let mut wcs = [Wc::default(); 8];
            while !stop.load(Ordering::Relaxed) {
                assert_eq!(cq.poll(&mut wcs), 0, "awaited work goes to its futures");
            }
        })
    };
    let reading = {
        let (qp, ma, place) = (a.qp.clone(), ma.clone(), mb.remote(4096));
        tokio::spawn(async move {
            for _ in 0..ROUNDS {
                qp.read(ma.slice(4096..8192), place).await.unwrap();
            }
        })
    };
    for n in 0..ROUNDS {
        ma.write_at(0, &n.to_ne_bytes()).unwrap();
        // The receive first: the answer may come as soon as the question is out.
        let (got, sent) = tokio::join!(a.qp.recv(ma.slice(8..16)), a.qp.send(ma.slice(0..8)));
        sent.unwrap();
        got.unwrap();
        assert_eq!(octets(&ma, 8, 8), n.to_ne_bytes());
    }
    reading.await.unwrap();
    stop.store(true, Ordering::Relaxed);
    polling.join().unwrap();
    answering.join().unwrap();
    assert_eq!(octets(&ma, 4096, 4096), octets(&mb, 4096, 4096));
}

/// A program that spun and stops: the task takes over, at once where somebody awaits.
pub(crate) async fn progress_goes_on_when_polling_stops(a: &Side, b: &Side) {
    let (ma, mb) = (a.mr(4096, 1), b.mr(4096, 2));
    for round in 0..20 {
        let mut wcs = [Wc::default(); 4];
        let until = Instant::now() + Duration::from_millis(3);
        while Instant::now() < until {
            assert_eq!(b.cq.poll(&mut wcs), 0);
        }
        // One-sided work needs nobody at b.
        a.qp.read(ma.slice(0..64), mb.remote(64)).await.unwrap();
        assert_eq!(octets(&ma, 0, 64), octets(&mb, 64, 64));
        // And a message is awaited right after spinning.
        b.qp.post_recv(RecvWr::new(round, [mb.slice(0..8)])).unwrap();
        let ((), wc) =
            tokio::join!(async { a.qp.send(ma.slice(0..8)).await.unwrap() }, b.done(round));
        assert_eq!(wc.byte_len, 8);
    }
}

pub(crate) async fn without_spinning_futures_sleep_and_are_woken(a: &Side, b: &Side) {
    let (ma, mb) = (a.mr(1 << 20, 1), b.mr(1 << 20, 2));
    for _ in 0..20 {
        a.qp.write(ma.slice(0..1 << 20), mb.remote(0)).await.unwrap();
        a.qp.read(ma.slice(0..4096), mb.remote(8192)).await.unwrap();
        let (got, sent) = tokio::join!(b.qp.recv(mb.slice(0..99)), a.qp.send(ma.slice(0..99)));
        sent.unwrap();
        got.unwrap();
    }
}

pub(crate) async fn a_cancelled_next_takes_nothing(a: &Side, b: &Side) {
    for id in 0..50 {
        b.qp.post_recv(RecvWr::new(id, [])).unwrap();
    }
    let mut got = Vec::new();
    for id in 0..50 {
        a.qp.post_send(SendWr::send(id, []).unsignaled()).unwrap();
        // Cancelled at any stage: before, while and after it arrives.
        for patience in 0..3 {
            let wait = Duration::from_micros(patience * 20 + id);
            if let Ok(wc) = tokio::time::timeout(wait, b.cq.next()).await {
                got.push(wc.unwrap().id);
            }
        }
    }
    while got.len() < 50 {
        got.push(b.wc().await.id);
    }
    assert_eq!(got, (0..50).collect::<Vec<_>>());
}

pub(crate) async fn an_armed_queue_wakes_who_sleeps(a: &Side, b: &Side) {
    // As a C program does: sleep on something that the hook writes to.
    let (tx, rx) = mpsc::channel();
    let events = Arc::new(AtomicU32::new(0));
    let counted = events.clone();
    b.cq.on_event(move || {
        counted.fetch_add(1, Ordering::Relaxed);
        let _ = tx.send(());
    });
    for id in 0..6 {
        b.qp.post_recv(RecvWr::new(id, [])).unwrap();
    }
    // Right after spinning: the task has let go of the socket, and takes it back.
    let mut wcs = [Wc::default()];
    let until = Instant::now() + Duration::from_millis(5);
    while Instant::now() < until {
        assert_eq!(b.cq.poll(&mut wcs), 0);
    }
    b.cq.arm(false);
    a.qp.post_send(SendWr::send(0, [])).unwrap();
    let rx = tokio::task::spawn_blocking(move || {
        rx.recv_timeout(LONG).unwrap();
        rx
    })
    .await
    .unwrap();
    b.done(0).await;
    b.cq.notified().await;

    // Only what is solicited.
    b.cq.arm(true);
    a.qp.post_send(SendWr::send(1, [])).unwrap();
    b.done(1).await;
    assert!(rx.try_recv().is_err());
    a.qp.post_send(SendWr::send(2, []).with_flags(SendFlags::SOLICITED)).unwrap();
    tokio::time::timeout(LONG, b.cq.notified()).await.unwrap();
    assert!(b.done(2).await.solicited);
    tokio::task::spawn_blocking(move || rx.recv_timeout(LONG).unwrap()).await.unwrap();
    assert_eq!(events.load(Ordering::Relaxed), 2);
}
