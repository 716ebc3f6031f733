//! Shared receive queues over UDP: several queue pairs behind one socket take from one queue.

mod common;

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use common::*;
use userdma::{
    Access, CloseReason, Cq, Device, Error, Listener, Mr, PathMtu, Pd, PostError, Qp, QpInit,
    QpState, QpType, RecvWr, Region, SendOp, SendWr, Srq, UdDest, Wc, WcOpcode, WcStatus,
    proto::wire::ids::QKey,
};

/// A server whose queue pairs share their receives, and a device of its clients.
struct Server {
    device: Device,
    clients: Device,
    listener: Listener,
    addr: String,
    pd: Pd,
    cq: Cq,
    srq: Srq,
    inbox: Mr,
}

/// Octets of one receive of the server.
const PIECE: usize = 4096;

impl Server {
    async fn new(max_wr: usize, depth: usize) -> Self {
        let device = quick().open("udp://127.0.0.1:0").unwrap();
        let clients = toward(&device, "127.0.0.1", quick());
        let listener = device.listen(Some(0)).await.unwrap();
        let addr = listener.local_addr().to_string();
        let pd = device.alloc_pd().unwrap();
        let srq = pd.create_srq(max_wr, 2).unwrap();
        let inbox = pd.register(Region::alloc(max_wr * PIECE).unwrap(), Access::LOCAL_WRITE);
        let cq = device.create_cq(depth).unwrap();
        Self { device, clients, listener, addr, pd, cq, srq, inbox: inbox.unwrap() }
    }

    fn init(&self) -> QpInit {
        QpInit::new(&self.cq).srq(&self.srq)
    }

    /// A client, and the server's queue pair for it.
    async fn client(&self) -> (Side, Qp) {
        let device = self.clients.clone();
        let (pd, cq) = (device.alloc_pd().unwrap(), device.create_cq(1024).unwrap());
        let accept = async {
            let request = self.listener.accept().await.unwrap();
            request.accept(&self.pd, self.init(), b"").await.unwrap()
        };
        let connect = device.connect(&self.addr, &pd, QpInit::new(&cq), b"");
        let (here, there) = tokio::join!(accept, connect);
        let qp = there.unwrap();
        (Side { device, pd, cq, qp }, here)
    }

    fn wr(&self, id: u64) -> RecvWr {
        let at = id as usize * PIECE;
        RecvWr::new(id, [self.inbox.slice(at..at + PIECE)])
    }

    async fn wc(&self) -> Wc {
        tokio::time::timeout(LONG, self.cq.next()).await.expect("a completion in time").unwrap()
    }
}

async fn closed(qp: &Qp) -> CloseReason {
    tokio::time::timeout(LONG, qp.closed()).await.expect("it ends")
}

#[tokio::test]
async fn several_queue_pairs_share_receives_over_one_socket() {
    let server = Server::new(16, 4096).await;
    let mut clients = Vec::new();
    for _ in 0..4 {
        clients.push(server.client().await);
    }
    assert_eq!(server.srq.users(), 4);
    server.srq.post_recv_batch((0..16).map(|id| server.wr(id))).unwrap();
    for round in 0..3u64 {
        // In another order each time; each waits until the one before has arrived.
        for turn in 0..4u64 {
            let (client, qp) = &clients[((turn * 3 + round) % 4) as usize];
            let text = format!("message {turn} of round {round}");
            client.post(SendWr::inline(9, SendOp::Send, text.as_bytes())).await;
            let wc = server.wc().await;
            assert_eq!((wc.id, wc.qpn, wc.opcode), (round * 4 + turn, qp.qpn(), WcOpcode::RECV));
            let at = wc.id as usize * PIECE;
            assert_eq!(octets(&server.inbox, at, wc.byte_len as usize), text.as_bytes());
        }
    }
    assert_eq!(server.srq.posted(), 4);
    // WRITE with immediate takes one as well.
    let (client, qp) = &clients[2];
    let target = server.pd.register(Region::alloc(64).unwrap(), all()).unwrap();
    client.post(SendWr::inline(9, SendOp::WriteImm(target.remote(0), 77), b"there")).await;
    let wc = server.wc().await;
    assert_eq!((wc.id, wc.qpn, wc.opcode), (12, qp.qpn(), WcOpcode::RECV_IMM));
    assert_eq!((wc.imm.unwrap().to_u32(), octets(&target, 0, 5)), (77, b"there".to_vec()));
    // Dropped, they use it no more.
    drop(clients);
    assert_eq!(server.srq.users(), 0);
    assert_eq!(server.srq.destroy().unwrap(), 3);
}

#[tokio::test]
async fn an_ended_queue_pair_leaves_the_receives_to_the_others() {
    let server = Server::new(8, 4096).await;
    let (a, at_a) = server.client().await;
    let (b, at_b) = server.client().await;
    let (c, at_c) = server.client().await;
    server.srq.post_recv_batch((0..3).map(|id| server.wr(id))).unwrap();
    // An abort of ours, a close of the peer's: nothing is flushed.
    at_a.abort();
    assert_eq!(closed(&at_a).await, CloseReason::Aborted);
    assert_eq!(b.qp.disconnect().await, CloseReason::Graceful);
    assert_eq!(closed(&at_b).await, CloseReason::Graceful);
    assert_eq!((server.cq.poll(&mut [Wc::default()]), server.srq.posted()), (0, 3));
    assert_eq!(at_a.state(), QpState::Err);
    assert_eq!(at_a.post_recv(RecvWr::new(9, [])), Err(PostError::SharedReceives));
    assert_eq!(closed(&a.qp).await, CloseReason::Graceful);
    for id in 0..3 {
        c.post(SendWr::inline(50, SendOp::Send, b"still here")).await;
        let wc = server.wc().await;
        assert_eq!((wc.id, wc.qpn, wc.byte_len), (id, at_c.qpn(), 10));
    }
    // None is left: the message that finds none waits, and whoever comes first gets the next.
    let (d, at_d) = server.client().await;
    c.qp.post_send(SendWr::inline(51, SendOp::Send, b"patience")).unwrap();
    d.qp.post_send(SendWr::inline(52, SendOp::Send, b"patience")).unwrap();
    tokio::time::timeout(LONG, async {
        let waits = |side: &Side| side.qp.roce_stats().unwrap().rnr_naks_received > 0;
        while !waits(&c) || !waits(&d) {
            tokio::task::yield_now().await;
        }
    })
    .await
    .expect("both are told to wait");
    server.srq.post_recv(server.wr(3)).unwrap();
    let first = server.wc().await;
    server.srq.post_recv(server.wr(4)).unwrap();
    let second = server.wc().await;
    let mut served = [first, second].map(|wc| (wc.id, wc.status, wc.qpn));
    served.sort_by_key(|&(_, _, qpn)| qpn == at_d.qpn());
    assert_eq!(served.map(|(_, _, qpn)| qpn), [at_c.qpn(), at_d.qpn()]);
    assert!(served.iter().all(|(id, status, _)| [3, 4].contains(id) && status.is_ok()));
    c.done(51).await;
    d.done(52).await;
}

#[tokio::test]
async fn the_limit_is_told_once_an_arming() {
    let server = Server::new(16, 4096).await;
    let (a, at_a) = server.client().await;
    let told = Arc::new(AtomicUsize::new(0));
    server.srq.on_limit({
        let (told, srq, qp, stats) =
            (told.clone(), server.srq.clone(), at_a.clone(), server.device.clone());
        // A hook may come back to the queue, the queue pair and the device: no lock is held.
        move || {
            assert_eq!((srq.limit(), qp.state()), (0, QpState::Rts));
            assert!(stats.roce_stats().is_some());
            told.fetch_add(1, Ordering::SeqCst);
        }
    });
    let told = || told.load(Ordering::SeqCst);
    let take = async |n: u64| {
        for _ in 0..n {
            a.post(SendWr::inline(1, SendOp::Send, b"x")).await;
            assert!(server.wc().await.status.is_ok());
        }
    };
    server.srq.post_recv_batch((0..10).map(|id| server.wr(id))).unwrap();
    take(2).await;
    assert_eq!((server.srq.posted(), told()), (8, 0), "not armed");
    server.srq.arm(6).unwrap();
    take(2).await;
    assert_eq!(told(), 0, "six are not fewer than six");
    let listening = tokio::spawn({
        let srq = server.srq.clone();
        async move { srq.limit_reached().await }
    });
    tokio::task::yield_now().await;
    take(3).await;
    assert_eq!((server.srq.posted(), told(), server.srq.limit()), (3, 1, 0));
    tokio::time::timeout(LONG, listening).await.expect("it is woken").unwrap();
    server.srq.arm(4).unwrap();
    assert_eq!(told(), 2, "at once, where there are so few already");
    server.srq.limit_reached().await;
    let none = tokio::time::timeout(Duration::from_millis(20), server.srq.limit_reached());
    assert!(none.await.is_err(), "each event is taken once");
    take(3).await;
    assert_eq!((server.srq.posted(), told()), (0, 2));
    server.srq.on_limit(|| ());
}

/// The peer's messages overflow the completion queue: what they brought is handed out all the same.
#[tokio::test]
async fn a_completion_queue_that_peers_overflow_loses_nothing() {
    let server = Server::new(16, 2).await;
    let (a, at_a) = server.client().await;
    let (b, at_b) = server.client().await;
    let told = Arc::new(AtomicUsize::new(0));
    server.cq.on_overflow({
        let (told, qp) = (told.clone(), at_a.clone());
        move || {
            let _ = qp.state();
            told.fetch_add(1, Ordering::SeqCst);
        }
    });
    server.srq.post_recv_batch((0..16).map(|id| server.wr(id))).unwrap();
    let send = |id| SendWr::inline(id, SendOp::Send, b"one too many").unsignaled();
    // Nobody polls the queue; its event comes though it was never armed.
    a.qp.post_send_batch((0..5).map(send)).unwrap();
    tokio::time::timeout(LONG, server.cq.notified()).await.expect("the overflow is an event");
    // All queue pairs of the queue end, the one that brought nothing too.
    for (server, client) in [(&at_a, &a.qp), (&at_b, &b.qp)] {
        assert_eq!(closed(server).await, CloseReason::Aborted);
        assert_eq!(closed(client).await, CloseReason::Graceful);
    }
    assert_eq!(told.load(Ordering::SeqCst), 1);
    let brought = 16 - server.srq.posted() as u64;
    assert!(brought >= 3, "{brought}");
    for id in 0..brought {
        let wc = server.wc().await;
        assert_eq!((wc.id, wc.qpn, wc.status), (id, at_a.qpn(), WcStatus::SUCCESS));
        assert_eq!(octets(&server.inbox, id as usize * PIECE, 12), b"one too many");
    }
    assert!(matches!(server.cq.next().await, Err(Error::CqOverflow(2))));
    server.cq.on_overflow(|| ());
}

/// Datagrams share receives as well: who finds none is lost and counted.
#[tokio::test]
async fn datagrams_share_receives() {
    let server = Server::new(4, 64).await;
    let key = QKey(7);
    let init = || server.init().kind(QpType::Ud);
    let [first, second] = [0, 1].map(|_| {
        let qp = server.pd.create_qp(init()).unwrap();
        qp.open_datagram(key, PathMtu::Mtu1024).unwrap();
        qp
    });
    let (pd, cq) = (server.clients.alloc_pd().unwrap(), server.clients.create_cq(64).unwrap());
    let sender = pd.create_qp(QpInit::new(&cq).kind(QpType::Ud)).unwrap();
    sender.open_datagram(key, PathMtu::Mtu1024).unwrap();
    server.srq.post_recv_batch((0..2).map(|id| server.wr(id))).unwrap();
    let addr = server.device.udp_addr().unwrap();
    for qp in [&first, &second, &first] {
        let dest = UdDest { addr, qpn: qp.qpn(), qkey: key };
        sender.submit(SendWr::inline(0, SendOp::Send, b"datagram").to(dest)).await.unwrap();
    }
    for (id, qp) in [(0, &first), (1, &second)] {
        let wc = server.wc().await;
        assert_eq!((wc.id, wc.qpn, wc.byte_len), (id, qp.qpn(), 48));
        assert_eq!(wc.src_qp, Some(sender.qpn()));
    }
    tokio::time::timeout(LONG, async {
        while first.roce_stats().unwrap().no_receive == 0 {
            tokio::task::yield_now().await;
        }
    })
    .await
    .expect("the third is counted");
}

#[tokio::test]
async fn what_cannot_be_is_refused_and_says_why() {
    let server = Server::new(4, 64).await;
    let other = server.device.alloc_pd().unwrap();
    let e = other.create_qp(server.init()).unwrap_err().to_string();
    assert!(e.contains("domain"), "{e}");
    assert_eq!(server.srq.users(), 0);
    let qp = server.pd.create_qp(server.init()).unwrap();
    assert_eq!(qp.post_recv(RecvWr::new(1, [])), Err(PostError::SharedReceives));
    let e = qp.recv(server.inbox.slice(0..8)).await.unwrap_err().to_string();
    assert!(e.contains("shared receive queue"), "{e}");
    assert_eq!(server.srq.users(), 1);
    let e = server.srq.destroy().unwrap_err().to_string();
    assert!(e.contains("drop them first"), "{e}");
    drop(qp);
    assert_eq!(server.srq.destroy().unwrap(), 0);
    let e = server.pd.create_qp(server.init()).unwrap_err().to_string();
    assert!(e.contains("destroyed"), "{e}");
}
