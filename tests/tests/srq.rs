//! Shared receive queues: whose message takes which receive, what the limit tells, and what an end
//! leaves in the queue. First the state machines by themselves, then real sockets.

mod common;

use std::{
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, AtomicUsize, Ordering},
    },
    thread,
    time::Duration,
};

use common::*;
use userdma::{
    Access, CloseReason, Cq, Device, DeviceOptions, Error, Listener, Mr, Pd, PostError, Qp, QpInit,
    QpState, RecvWr, Region, SendOp, SendWr, Sge, Srq, Wc, WcOpcode, WcStatus,
    proto::{
        iwarp::{self, Event},
        srq::{Receive, Receives, SharedQueue},
        wire::{
            ids::{LKey, Qpn},
            iwarp::terminate::TermCode,
        },
    },
};
use userdma_tests::{PD, Pair, Rng, config};

/// What a driver does: the queue behind a lock.
#[derive(Debug)]
struct Locked(Mutex<SharedQueue>);

impl Receives for Locked {
    fn take(&self) -> Option<Receive> {
        self.0.lock().unwrap().take()
    }
}

const INBOX: u32 = 0x4000;
const SOURCE: u32 = 0x2000;
/// Octets of one receive in the simulated pairs.
const SLOT: usize = 10_000;

/// `count` connections whose responders share one queue; the queue pairs are 0x100, 0x101, ….
fn sharing(count: u32, slots: usize) -> (Vec<Pair>, Arc<Locked>) {
    let srq = Arc::new(Locked(Mutex::new(SharedQueue::new(slots.max(1), 1))));
    let pairs = (0..count)
        .map(|i| {
            let (a, b) = (config(0x10 + i, i.into()), config(0x100 + i, 7 + u64::from(i)));
            let mut pair = Pair::new(a, b, b"", 3 + u64::from(i));
            let [sender, receiver] = &mut pair.sides;
            receiver.conn.share_receives(srq.clone()).unwrap();
            receiver.mem.add(INBOX, PD, Access::LOCAL_WRITE, 0, vec![0; slots * SLOT]);
            sender.mem.add(SOURCE, PD, Access::empty(), 0, pattern(SLOT, i as u8));
            pair.connect();
            pair
        })
        .collect();
    (pairs, srq)
}

fn post(srq: &Locked, ids: impl IntoIterator<Item = u64>) {
    for id in ids {
        let sge = Sge::new(id * SLOT as u64, SLOT as u32, LKey(INBOX));
        srq.0.lock().unwrap().post(RecvWr::new(id, [sge]), 1000 + id).unwrap();
    }
}

/// Has the initiator of `pair` send `len` octets, and gives them as they leave.
fn outgoing(pair: &mut Pair, len: u32) -> Vec<u8> {
    let wr = SendWr::send(1, [Sge::new(0, len, LKey(SOURCE))]);
    pair.sides[0].conn.post_send(wr, 0).unwrap();
    pair.sides[0].drain_all(pair.now)
}

#[test]
fn the_first_segment_decides_who_takes_the_oldest_receive() {
    let (mut pairs, srq) = sharing(3, 8);
    post(&srq, 0..8);
    let now = pairs[0].now;
    let streams: Vec<_> = pairs.iter_mut().map(|pair| outgoing(pair, 3000)).collect();
    // Queue pair 1 begins, 0 is whole before it, 2 begins before 1 is whole.
    let cut = 700;
    pairs[1].sides[1].feed(now, &streams[1][..cut]);
    pairs[0].sides[1].feed(now, &streams[0]);
    pairs[2].sides[1].feed(now, &streams[2][..cut]);
    pairs[1].sides[1].feed(now, &streams[1][cut..]);
    pairs[2].sides[1].feed(now, &streams[2][cut..]);
    for (i, id) in [(0, 1), (1, 0), (2, 2)] {
        let side = &pairs[i].sides[1];
        let [done] = side.done[..] else { panic!("{:?}", side.done) };
        assert_eq!((done.wc.id, done.tag, done.wc.status), (id, 1000 + id, WcStatus::SUCCESS));
        assert_eq!((done.wc.qpn, done.wc.byte_len), (Qpn(0x100 + i as u32), 3000));
        let at = id as usize * SLOT;
        assert!(side.mem.bytes(INBOX)[at..at + 3000] == pattern(SLOT, i as u8)[..3000]);
        assert_eq!(side.conn.stats().receives, 1);
    }
    assert_eq!(srq.0.lock().unwrap().len(), 5);
}

#[test]
fn an_end_flushes_the_message_under_way_and_leaves_the_queue_to_the_others() {
    let (mut pairs, srq) = sharing(3, 8);
    post(&srq, 0..4);
    let now = pairs[0].now;
    let streams: Vec<_> = pairs.iter_mut().map(|pair| outgoing(pair, 3000)).collect();
    pairs[0].sides[1].feed(now, &streams[0][..700]);
    pairs[1].sides[1].feed(now, &streams[1][..700]);
    assert_eq!(srq.0.lock().unwrap().len(), 2);
    // One is aborted in the middle of a message, one without any.
    for (i, flushed) in [(0, Some(0)), (2, None)] {
        let side = &mut pairs[i].sides[1];
        side.conn.abort(now);
        side.drain_all(now);
        let wcs = side.wcs();
        assert_eq!(wcs.first().map(|wc| wc.id), flushed);
        let flush = |wc: &Wc| wc.status == WcStatus::WR_FLUSH_ERR && wc.opcode == WcOpcode::RECV;
        assert!(wcs.iter().all(flush) && wcs.len() <= 1, "{wcs:?}");
        assert_eq!(side.conn.stats().receives, 0, "no message of the peer used one up");
        assert_eq!(side.conn.post_recv(RecvWr::new(9, []), 0), Err(PostError::SharedReceives));
    }
    // The third goes on, and the next message takes what is next.
    pairs[1].sides[1].feed(now, &streams[1][700..]);
    let again = outgoing(&mut pairs[1], 1);
    pairs[1].sides[1].feed(now, &again);
    let ids: Vec<_> = pairs[1].sides[1].wcs().iter().map(|wc| (wc.id, wc.status)).collect();
    assert_eq!(ids, [(1, WcStatus::SUCCESS), (2, WcStatus::SUCCESS)]);
    assert_eq!(srq.0.lock().unwrap().len(), 1);
}

#[test]
fn a_receive_that_is_too_small_fails_alone() {
    let (mut pairs, srq) = sharing(2, 8);
    srq.0.lock().unwrap().post(RecvWr::new(70, []), 0).unwrap();
    post(&srq, 1..3);
    let now = pairs[0].now;
    for pair in &mut pairs {
        let stream = outgoing(pair, 10);
        pair.sides[1].feed(now, &stream);
    }
    let ends = |i: usize| {
        let side = &pairs[i].sides[1];
        side.wcs().iter().map(|wc| (wc.id, wc.status)).collect::<Vec<_>>()
    };
    assert_eq!(ends(0), [(70, WcStatus::LOC_LEN_ERR)]);
    assert_eq!(ends(1), [(1, WcStatus::SUCCESS)]);
    assert_eq!(srq.0.lock().unwrap().len(), 1);
}

#[test]
fn an_empty_queue_terminates_the_one_who_finds_it_so() {
    let (mut pairs, srq) = sharing(2, 8);
    let now = pairs[0].now;
    let stream = outgoing(&mut pairs[0], 5);
    pairs[0].sides[1].feed(now, &stream);
    pairs[0].run(10_000);
    let reason = pairs[0].sides[1].events.last();
    let Some(Event::Closed(iwarp::CloseReason::TerminateSent(sent))) = reason else {
        panic!("{reason:?}");
    };
    assert_eq!(sent.code, TermCode::DDP_UNTAGGED_NO_BUFFER);
    // What is posted now is for the other one: this one has ended.
    post(&srq, [5]);
    let stream = outgoing(&mut pairs[1], 5);
    pairs[1].sides[1].feed(now, &stream);
    assert_eq!((pairs[1].sides[1].wcs()[0].id, pairs[0].sides[1].done.len()), (5, 0));
}

#[test]
fn receives_of_its_own_and_shared_ones_do_not_mix() {
    let (_, srq) = sharing(0, 1);
    let mut pair = Pair::new(config(2, 0), config(3, 0), b"", 0);
    pair.sides[1].conn.post_recv(RecvWr::new(1, []), 0).unwrap();
    let refused = pair.sides[1].conn.share_receives(srq.clone()).unwrap_err().to_string();
    assert!(refused.contains("cannot share others' any more"), "{refused}");
    // An Immediate takes a shared receive, too.
    pair.sides[0].conn.share_receives(srq.clone()).unwrap();
    post(&srq, [0]);
    pair.connect();
    pair.sides[0].conn.post_send(SendWr::send(1, []), 0).unwrap();
    pair.run(10_000);
    let imm = userdma::Imm(42);
    pair.sides[1].conn.post_send(SendWr::new(2, SendOp::Imm(imm), []), 0).unwrap();
    pair.run(10_000);
    let wc = *pair.sides[0].wcs().last().unwrap();
    assert_eq!((wc.id, wc.opcode, wc.imm), (0, WcOpcode::RECV_IMM, Some(imm)));
}

/// Streams cut at random places, messages of all sizes, connections in any order: each receive is
/// used by exactly one message, in the order of their first segments, and holds what was sent.
#[test]
fn any_interleaving_uses_each_receive_once() {
    for seed in 0..60 {
        let mut rng = Rng::new(seed);
        let count = 2 + rng.below(4) as usize;
        let slots = 40;
        let (mut pairs, srq) = sharing(count as u32, slots);
        post(&srq, 0..slots as u64);
        srq.0.lock().unwrap().arm(15).unwrap();
        // What each connection sends, by length; not all of the receives are used.
        let mut sent: Vec<Vec<u32>> = vec![Vec::new(); count];
        for _ in 0..30 {
            let i = rng.below(count as u64) as usize;
            let len = if rng.one_in(4) { rng.below(SLOT as u64) } else { rng.below(600) } as u32;
            let wr = SendWr::send(sent[i].len() as u64, [Sge::new(0, len, LKey(SOURCE))]);
            pairs[i].sides[0].conn.post_send(wr, 0).unwrap();
            sent[i].push(len);
        }
        let (mut events, mut still) = (0, 0);
        while still < 200 {
            let i = rng.below(count as u64) as usize;
            still = if pairs[i].step() { 0 } else { still + 1 };
            events += usize::from(srq.0.lock().unwrap().poll_event());
        }
        let mut used = Vec::new();
        for (i, pair) in pairs.iter().enumerate() {
            let side = &pair.sides[1];
            let wcs = side.wcs();
            assert!(wcs.iter().all(|wc| wc.status.is_ok() && wc.qpn == Qpn(0x100 + i as u32)));
            let lens: Vec<_> = wcs.iter().map(|wc| wc.byte_len).collect();
            assert_eq!(lens, sent[i], "seed {seed}: in the order in which they were sent");
            assert!(wcs.is_sorted_by_key(|wc| wc.id), "seed {seed}: the oldest receive first");
            let inbox = side.mem.bytes(INBOX);
            for wc in &wcs {
                let (at, len) = (wc.id as usize * SLOT, wc.byte_len as usize);
                assert!(inbox[at..at + len] == pattern(SLOT, i as u8)[..len], "seed {seed}");
            }
            assert_eq!(side.conn.stats().receives, wcs.len() as u64);
            used.extend(wcs.iter().map(|wc| wc.id));
        }
        used.sort_unstable();
        assert_eq!(used, (0..30).collect::<Vec<_>>(), "seed {seed}");
        assert_eq!((srq.0.lock().unwrap().len(), events), (10, 1), "seed {seed}");
    }
}

/// A server whose queue pairs share their receives.
struct Server {
    device: Device,
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
    async fn new(options: DeviceOptions, max_wr: usize) -> Self {
        let (device, listener, addr) = listening("127.0.0.1", options).await;
        let pd = device.alloc_pd().unwrap();
        let srq = pd.create_srq(max_wr, 2).unwrap();
        let inbox = pd.register(Region::alloc(max_wr * PIECE).unwrap(), Access::LOCAL_WRITE);
        let cq = device.create_cq(4096).unwrap();
        Self { device, listener, addr, pd, cq, srq, inbox: inbox.unwrap() }
    }

    /// A client, and the server's queue pair for it.
    async fn client(&self) -> (Side, Qp) {
        let device = self.device.clone();
        let (pd, cq) = (device.alloc_pd().unwrap(), device.create_cq(1024).unwrap());
        let accept = async {
            let request = self.listener.accept().await.unwrap();
            request.accept(&self.pd, QpInit::new(&self.cq).srq(&self.srq), b"").await.unwrap()
        };
        let connect = device.connect(&self.addr, &pd, QpInit::new(&cq), b"");
        let (here, there) = tokio::join!(accept, connect);
        (Side { device: device.clone(), pd, cq, qp: there.unwrap() }, here)
    }

    fn wr(&self, id: u64) -> RecvWr {
        let at = id as usize * PIECE;
        RecvWr::new(id, [self.inbox.slice(at..at + PIECE)])
    }

    async fn wc(&self) -> Wc {
        tokio::time::timeout(LONG, self.cq.next()).await.expect("a completion in time").unwrap()
    }
}

fn error<T: std::fmt::Debug>(result: Result<T, Error>) -> String {
    result.unwrap_err().to_string()
}

#[tokio::test]
async fn several_queue_pairs_share_receives_over_sockets() {
    let server = Server::new(quick(), 16).await;
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
}

#[tokio::test]
async fn an_ended_queue_pair_leaves_the_receives_to_the_others() {
    let server = Server::new(quick(), 8).await;
    let (a, at_a) = server.client().await;
    let (b, at_b) = server.client().await;
    let (c, at_c) = server.client().await;
    server.srq.post_recv_batch((0..3).map(|id| server.wr(id))).unwrap();
    // An abort of ours, a close of the peer's: nothing is flushed.
    at_a.abort();
    assert_eq!(at_a.closed().await, CloseReason::Aborted);
    assert_eq!(b.qp.disconnect().await, CloseReason::Graceful);
    assert_eq!(at_b.closed().await, CloseReason::Graceful);
    assert_eq!((server.cq.poll(&mut [Wc::default()]), server.srq.posted()), (0, 3));
    assert_eq!(at_a.state(), QpState::Err);
    assert_eq!(at_a.post_recv(RecvWr::new(9, [])), Err(PostError::SharedReceives));
    for id in 0..3 {
        c.post(SendWr::inline(50, SendOp::Send, b"still here")).await;
        let wc = server.wc().await;
        assert_eq!((wc.id, wc.qpn, wc.byte_len), (id, at_c.qpn(), 10));
    }
    // None is left: the message that finds none ends its connection.
    let (d, at_d) = server.client().await;
    c.qp.post_send(SendWr::inline(51, SendOp::Send, b"nowhere to go")).unwrap();
    let CloseReason::TerminateSent(sent) = at_c.closed().await else {
        panic!("{:?}", at_c.close_reason());
    };
    assert_eq!(sent.code, TermCode::DDP_UNTAGGED_NO_BUFFER);
    assert!(matches!(c.qp.closed().await, CloseReason::TerminateReceived(_)));
    server.srq.post_recv(server.wr(3)).unwrap();
    d.post(SendWr::inline(52, SendOp::Send, b"")).await;
    let wc = server.wc().await;
    assert_eq!((wc.id, wc.qpn, wc.status), (3, at_d.qpn(), WcStatus::SUCCESS));
    drop(a);
}

/// A message that will never be whole: its receive is flushed when the connection is lost.
#[tokio::test]
async fn a_message_cut_short_flushes_the_receive_it_took() {
    // One thread, and the client's socket takes less than the message.
    let options = DeviceOptions { send_buffer: Some(4096), recv_buffer: Some(4096), ..quick() };
    let server = Server::new(options, 2048).await;
    let (a, at_a) = server.client().await;
    let len = 2047 * PIECE;
    server.srq.post_recv(RecvWr::new(7, [server.inbox.slice(0..len)])).unwrap();
    server.srq.post_recv(RecvWr::new(8, [])).unwrap();
    let source = a.mr(len, 1);
    a.qp.post_send(SendWr::send(1, [source.slice(0..len)])).unwrap();
    while server.srq.posted() == 2 {
        tokio::task::yield_now().await;
    }
    a.qp.abort();
    assert_eq!(at_a.closed().await, CloseReason::Lost);
    let wc = server.wc().await;
    let flushed = (7, WcStatus::WR_FLUSH_ERR, at_a.qpn());
    assert_eq!((wc.id, wc.status, wc.qpn), flushed);
    assert_eq!((server.cq.poll(&mut [Wc::default()]), server.srq.posted()), (0, 1));
}

#[tokio::test]
async fn the_limit_is_told_once_an_arming() {
    let server = Server::new(quick(), 16).await;
    let (a, _at_a) = server.client().await;
    let told = Arc::new(AtomicUsize::new(0));
    server.srq.on_limit({
        let told = told.clone();
        // A hook may come back to the queue: no lock is held.
        let srq = server.srq.clone();
        move || {
            assert_eq!(srq.limit(), 0);
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
    assert_eq!(server.srq.limit(), 6);
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
    // Armed again with too few posted: at once, and taken by who asks later.
    server.srq.arm(4).unwrap();
    assert_eq!(told(), 2);
    server.srq.limit_reached().await;
    let none = tokio::time::timeout(Duration::from_millis(20), server.srq.limit_reached());
    assert!(none.await.is_err(), "each event is taken once");
    // Posting above the limit and falling below it again without arming tells nothing.
    server.srq.post_recv_batch((0..5).map(|id| server.wr(id))).unwrap();
    take(6).await;
    assert_eq!((server.srq.posted(), told()), (2, 2));
    server.srq.arm(1).unwrap();
    server.srq.arm(0).unwrap();
    take(2).await;
    assert_eq!(told(), 2, "disarmed");
}

#[tokio::test]
async fn a_greedy_peer_of_a_shared_queue_is_noticed() {
    let server = Server::new(quick(), 64).await;
    let (greedy, at_greedy) = server.client().await;
    let (modest, at_modest) = server.client().await;
    server.srq.post_recv_batch((0..40).map(|id| server.wr(id))).unwrap();
    server.srq.arm(10).unwrap();
    modest.post(SendWr::inline(1, SendOp::Send, b"")).await;
    for _ in 0..30 {
        greedy.post(SendWr::inline(1, SendOp::Send, b"")).await;
    }
    tokio::time::timeout(LONG, server.srq.limit_reached()).await.expect("few are left");
    // Its counter tells who it was, and it is sent away; the other goes on.
    assert_eq!((at_greedy.stats().receives, at_modest.stats().receives), (30, 1));
    at_greedy.abort();
    greedy.qp.closed().await;
    modest.post(SendWr::inline(1, SendOp::Send, b"")).await;
    for _ in 0..32 {
        assert!(server.wc().await.status.is_ok());
    }
    assert_eq!(server.srq.posted(), 8);
}

/// The peer's messages overflow the completion queue: what they brought is handed out all the same.
#[tokio::test]
async fn a_completion_queue_that_peers_overflow_loses_nothing() {
    let mut server = Server::new(quick(), 16).await;
    server.cq = server.device.create_cq(2).unwrap();
    let (a, at_a) = server.client().await;
    let (b, at_b) = server.client().await;
    let other = Server::new(quick(), 4).await;
    let (c, at_c) = other.client().await;
    let told = Arc::new(AtomicUsize::new(0));
    server.cq.on_overflow({
        let told = told.clone();
        move || {
            told.fetch_add(1, Ordering::SeqCst);
        }
    });
    server.srq.post_recv_batch((0..16).map(|id| server.wr(id))).unwrap();
    let send = |id| SendWr::inline(id, SendOp::Send, b"one too many").unsignaled();
    // Nobody polls the queue; its event comes though it was never armed.
    a.qp.post_send_batch((0..5).map(send)).unwrap();
    tokio::time::timeout(LONG, server.cq.notified()).await.expect("the overflow is an event");
    assert!(matches!(at_a.closed().await, CloseReason::TerminateSent(_)));
    assert!(matches!(a.qp.closed().await, CloseReason::TerminateReceived(_)));
    assert_eq!(told.load(Ordering::SeqCst), 1);
    assert_eq!(server.cq.overflowed(), Some(3));
    // The other queue pair that completes into it ends with its next message, which is not lost.
    b.qp.post_send(send(0)).unwrap();
    assert!(matches!(at_b.closed().await, CloseReason::TerminateSent(_)));
    for (id, qp) in (0..5).map(|id| (id, &at_a)).chain([(5, &at_b)]) {
        let wc = server.wc().await;
        assert_eq!((wc.id, wc.qpn, wc.status), (id, qp.qpn(), WcStatus::SUCCESS));
        assert_eq!(octets(&server.inbox, id as usize * PIECE, 12), b"one too many");
    }
    assert!(matches!(server.cq.next().await, Err(Error::CqOverflow(2))));
    assert_eq!((told.load(Ordering::SeqCst), server.srq.posted()), (1, 10));
    // Those of another queue see nothing of it.
    other.srq.post_recv(other.wr(0)).unwrap();
    c.post(SendWr::inline(1, SendOp::Send, b"")).await;
    assert_eq!((other.wc().await.qpn, at_c.state()), (at_c.qpn(), QpState::Rts));
}

#[tokio::test]
async fn what_cannot_be_is_refused_and_says_why() {
    let server = Server::new(quick(), 4).await;
    let Server { pd, cq, srq, .. } = &server;
    for max_wr in [0, (1 << 22) + 1] {
        assert!(error(pd.create_srq(max_wr, 1)).contains("1 to 4,194,304 receives"));
    }
    let other = server.device.alloc_pd().unwrap();
    let e = error(other.create_qp(QpInit::new(cq).srq(srq)));
    assert!(e.contains("another protection domain"), "{e}");
    assert_eq!(srq.users(), 0, "a queue pair that was refused does not use it");

    // The queue's own limits hold, not the queue pair's.
    let sge = server.inbox.slice(0..1);
    let too_many = PostError::TooManySges { max: 2, have: 3 };
    assert_eq!(srq.post_recv(RecvWr::new(1, [sge; 3])), Err(too_many));
    let refused = srq.post_recv_batch((0..9).map(|id| RecvWr::new(id, [sge; 2])));
    assert_eq!(refused, Err((4, PostError::QueueFull { max: 4 })));
    assert!(error(srq.arm(5)).contains("at most its length"));
    assert!(error(srq.resize(0)).contains("1 to 4,194,304"));
    assert!(error(srq.resize(3)).contains("the queue is full: 3 work requests"));
    srq.resize(5).unwrap();
    srq.post_recv(RecvWr::new(5, [])).unwrap();
    assert_eq!((srq.max_wr(), srq.max_sge(), srq.posted()), (5, 2, 5));

    // A queue pair with shared receives takes none of its own, connected or not.
    let qp = pd.create_qp(QpInit::new(cq).srq(srq)).unwrap();
    let (_client, connected) = server.client().await;
    for qp in [&qp, &connected] {
        let e = qp.post_recv(RecvWr::new(1, [])).unwrap_err();
        assert!(e.to_string().contains("post them to that queue"), "{e}");
        assert_eq!(qp.post_recv_batch([RecvWr::default()]), Err((0, PostError::SharedReceives)));
        let e = error(qp.recv(sge).await);
        assert!(e.contains("shared receive queue"), "{e}");
        let (buf, result) = qp.recv_lent(vec![1, 2, 3]).await;
        assert!(error(result).contains("shared receive queue"));
        assert_eq!(buf, [1, 2, 3], "given back");
    }

    // Destroyed only when nobody uses it, and then it is gone.
    let e = error(srq.destroy());
    assert!(e.contains("queue pairs still take receives") && e.contains("drop them"), "{e}");
    drop((connected, qp));
    assert_eq!((srq.users(), srq.posted()), (0, 5));
    assert_eq!(srq.destroy().unwrap(), 5);
    let gone = |e: String| assert!(e.contains("was destroyed"), "{e}");
    gone(error(srq.destroy()));
    gone(error(srq.arm(1)));
    gone(error(srq.resize(8)));
    gone(error(pd.create_qp(QpInit::new(cq).srq(srq))));
    gone(srq.post_recv(RecvWr::default()).unwrap_err().to_string());
    assert_eq!(cq.poll(&mut [Wc::default()]), 0, "dropped without a completion");
}

/// Threads post, threads send, one thread polls: each receive is used once, nothing is lost, and
/// the limit is told as often as it was armed.
#[test]
fn many_threads_post_while_messages_arrive() {
    const CLIENTS: usize = 4;
    const EACH: u64 = 3000;
    const SLOTS: usize = 64;
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let (server, clients) = runtime.block_on(async {
        let server = Server::new(quick(), SLOTS).await;
        let mut clients = Vec::new();
        for _ in 0..CLIENTS {
            clients.push(server.client().await);
        }
        (server, clients)
    });
    // As many sends may leave as receives were posted.
    let credits = AtomicU64::new(0);
    let free = Mutex::new((0..SLOTS as u64).collect::<Vec<_>>());
    let posted = AtomicU64::new(0);
    let (armed, events) = (AtomicU64::new(0), Arc::new(AtomicU64::new(0)));
    server.srq.on_limit({
        let events = events.clone();
        move || {
            events.fetch_add(1, Ordering::SeqCst);
        }
    });
    let all = EACH * CLIENTS as u64;
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                loop {
                    let place = free.lock().unwrap().pop();
                    let Some(place) = place else {
                        if posted.load(Ordering::SeqCst) >= all {
                            return;
                        }
                        thread::yield_now();
                        continue;
                    };
                    server.srq.post_recv(server.wr(place)).unwrap();
                    posted.fetch_add(1, Ordering::SeqCst);
                    credits.fetch_add(1, Ordering::SeqCst);
                }
            });
        }
        scope.spawn(|| {
            // Whenever it was told, armed again: never two armings at a time.
            while posted.load(Ordering::SeqCst) < all {
                if events.load(Ordering::SeqCst) == armed.load(Ordering::SeqCst) {
                    armed.fetch_add(1, Ordering::SeqCst);
                    server.srq.arm(SLOTS / 4).unwrap();
                }
                thread::yield_now();
            }
        });
        for (i, (client, _)) in clients.iter().enumerate() {
            let credits = &credits;
            scope.spawn(move || {
                let mut wcs = [Wc::default(); 8];
                for n in 0..EACH {
                    let spend = |c: u64| c.checked_sub(1);
                    while credits.fetch_update(Ordering::SeqCst, Ordering::SeqCst, spend).is_err() {
                        thread::yield_now();
                    }
                    let data = [i as u64, n].map(u64::to_le_bytes).concat();
                    client.qp.post_send(SendWr::inline(n, SendOp::Send, &data)).unwrap();
                    let done = client.cq.poll(&mut wcs);
                    assert!(wcs[..done].iter().all(|wc| wc.status.is_ok()), "{wcs:?}");
                }
            });
        }
        let mut next = [0; CLIENTS];
        let mut wcs = [Wc::default(); 32];
        let mut received = 0;
        while received < all {
            let n = server.cq.poll(&mut wcs);
            for wc in &wcs[..n] {
                assert!(wc.status.is_ok(), "{wc:?}");
                let i = clients.iter().position(|(_, qp)| qp.qpn() == wc.qpn).unwrap();
                let data = octets(&server.inbox, wc.id as usize * PIECE, 16);
                let expected = [i as u64, next[i]].map(u64::to_le_bytes).concat();
                assert_eq!(data, expected, "in order, in the place that its completion names");
                next[i] += 1;
                received += 1;
                // The last places are not posted again: exactly as many as there are messages.
                if received + SLOTS as u64 <= all {
                    free.lock().unwrap().push(wc.id);
                }
            }
        }
        assert_eq!(next, [EACH; CLIENTS]);
    });
    assert_eq!((posted.load(Ordering::SeqCst), server.srq.posted()), (all, 0));
    let taken: Vec<_> = clients.iter().map(|(_, qp)| qp.stats().receives).collect();
    assert_eq!(taken, [EACH; CLIENTS]);
    // The queue is empty at the end, so the last arming is answered too, perhaps in a moment: by the
    // runtime's thread. More events than armings never come.
    let armed = armed.load(Ordering::SeqCst);
    let end = std::time::Instant::now() + LONG;
    while events.load(Ordering::SeqCst) < armed && std::time::Instant::now() < end {
        thread::yield_now();
    }
    thread::sleep(Duration::from_millis(20));
    assert!(armed > 1);
    assert_eq!(events.load(Ordering::SeqCst), armed);
}
