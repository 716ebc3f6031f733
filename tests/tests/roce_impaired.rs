//! Work of every kind through a network that loses, doubles, reorders and changes packets: nothing
//! of it is lost or changed, and the network really did all that.

mod common;

use common::*;
use userdma::{
    CloseReason, Imm, Mr, PathMtu, QpState, RecvWr, RemoteAddr, SendOp, SendWr, WcOpcode,
    proto::wire::roce::feth::Placement,
};

const MILD: &str = "loss=1%,dup=1%,reorder=1%,corrupt=0.1%,seed=7";
const HARD: &str = "loss=5%,dup=1%,reorder=1%,corrupt=0.1%,seed=7";

/// Octets of a block that is written and read back.
const BLOCK: usize = 64 << 10;
/// Octets of a message.
const MESSAGE: usize = 5000;

/// Where things lie in the region that the peer reaches: its blocks, then its words, then messages.
const WORDS: usize = 64 * BLOCK;
const MESSAGES: usize = WORDS + 64;

/// What one side does: it writes blocks and reads them back, counts, and sends numbered messages.
async fn work(rounds: usize, side: &Side, peer: RemoteAddr, seed: u8) {
    let at = |offset: usize| RemoteAddr::new(peer.addr + offset as u64, peer.rkey);
    let source = side.mr(BLOCK, 0);
    let back = side.mr(BLOCK + 8, 0);
    for round in 0..rounds {
        // Odd lengths and places.
        let (len, place) = (BLOCK - round * 37 % 999, (round % 64) * BLOCK);
        source.write_at(0, &pattern(len, seed.wrapping_add(round as u8))).unwrap();
        let message = [SendOp::Send, SendOp::SendImm(round as u32)][round % 2];
        let told = SendOp::WriteImm(at(WORDS + 32), round as u32);
        let posted = [
            SendWr::write(1, [source.slice(0..len)], at(place)).unsignaled(),
            SendWr::new(2, message, [source.slice(0..MESSAGE - round)]).unsignaled(),
            SendWr::inline(3, told, &(round as u64).to_ne_bytes()).unsignaled(),
        ];
        side.qp.post_send_batch(posted).unwrap();
        let (read, counted) = tokio::join!(
            side.qp.read(back.slice(0..len), at(place)),
            side.qp.fetch_add(at(WORDS), round as u64 + 1),
        );
        read.unwrap();
        assert!(octets(&back, 0, len) == octets(&source, 0, len), "round {round}");
        let expected = round * (round + 1) / 2;
        assert_eq!(counted.unwrap(), expected as u64, "round {round}: an atomic, exactly once");
        let swap = side.qp.cmp_swap(at(WORDS + 8), round as u64, round as u64 + 1);
        assert_eq!(swap.await.unwrap(), round as u64);
        let word = (round as u64).to_be_bytes();
        side.qp.submit(SendWr::atomic_write(4, at(WORDS + 16), word)).await.unwrap();
        let flush = SendWr::flush(5, at(place), len as u32, Placement::GLOBAL_VISIBILITY);
        side.qp.submit(flush).await.unwrap();
    }
}

/// Takes the messages that the peer sends, and checks each.
async fn take(rounds: usize, side: &Side, own: &Mr, seed: u8) {
    for round in 0..rounds {
        let wc = side.done(2 * round as u64).await;
        let imm = (round % 2 == 1).then_some(Imm::from_u32(round as u32));
        assert_eq!((wc.opcode, wc.imm), (WcOpcode::RECV, imm), "{round}");
        assert_eq!(wc.byte_len as usize, MESSAGE - round);
        let expected = pattern(MESSAGE - round, seed.wrapping_add(round as u8));
        assert!(octets(own, MESSAGES + round * MESSAGE, MESSAGE - round) == expected, "{round}");
        let wc = side.done(2 * round as u64 + 1).await;
        assert_eq!((wc.opcode, wc.byte_len), (WcOpcode::RECV_IMM, 8));
        assert_eq!(wc.imm, Some(Imm::from_u32(round as u32)));
    }
}

async fn through(host: &str, impairments: &str, rounds: usize) {
    let mut options = quick();
    options.roce.impair = Some(impairments.parse().unwrap());
    // Some 300 packets a round.
    options.roce.mtu = Some(PathMtu::Mtu1024);
    let rights = userdma::Access::FLUSH_GLOBAL;
    let (a, b) = roce_pair_with(host, [options.clone(), options], |init| {
        init.max_recv_wr = 2 * rounds;
    })
    .await;
    let sides = [(&a, 1), (&b, 101)];
    let regions = sides.map(|(side, _)| {
        let region = userdma::Region::alloc(MESSAGES + rounds * MESSAGE).unwrap();
        let mr = side.pd.register(region, all() | rights).unwrap();
        for round in 0..rounds {
            let place = MESSAGES + round * MESSAGE;
            let message = RecvWr::new(2 * round as u64, [mr.slice(place..place + MESSAGE)]);
            side.qp.post_recv_batch([message, RecvWr::new(2 * round as u64 + 1, [])]).unwrap();
        }
        mr
    });
    let [ma, mb] = &regions;
    let everything = async {
        tokio::join!(
            work(rounds, &a, mb.remote(0), 1),
            work(rounds, &b, ma.remote(0), 101),
            take(rounds, &a, ma, 101),
            take(rounds, &b, mb, 1),
        )
    };
    // Most of the time is spent waiting for time-outs, of which a busy machine makes more.
    tokio::time::timeout(4 * LONG, everything).await.expect("all of it in time");

    for ((side, _), (mr, seed)) in sides.iter().zip([(ma, 101u8), (mb, 1)]) {
        let last = rounds as u64 - 1;
        for (word, value) in [
            (0, last * (last + 1) / 2 + last + 1),
            (8, last + 1),
            (16, u64::from_ne_bytes(last.to_be_bytes())),
            (32, last),
        ] {
            let there = u64::from_ne_bytes(octets(mr, WORDS + word, 8).try_into().unwrap());
            assert_eq!(there, value, "word {word}");
        }
        // Of each block the last who wrote it.
        for block in 0..rounds.min(64) {
            let round = (0..rounds).rev().find(|round| round % 64 == block).unwrap();
            let len = BLOCK - round * 37 % 999;
            let expected = pattern(len, seed.wrapping_add(round as u8));
            assert!(octets(mr, block * BLOCK, len) == expected, "block {block}");
        }
        assert_eq!(side.qp.state(), QpState::Rts);
        assert_eq!(side.cq.poll(&mut [userdma::Wc::default()]), 0, "nothing completes twice");
    }

    let [here, there] = sides.map(|(side, _)| side.device.roce_stats().unwrap());
    let both = |pick: fn(&userdma::RoceStats) -> u64| pick(&here) + pick(&there);
    let impaired = |pick: fn(&userdma::proto::sim::Counters) -> u64| {
        [&here, &there].iter().map(|stats| pick(stats.impaired.as_ref().unwrap())).sum::<u64>()
    };
    let counts = [
        ("dropped", impaired(|counters| counters.lost)),
        ("duplicated", impaired(|counters| counters.duplicated)),
        ("reordered", impaired(|counters| counters.reordered)),
        ("corrupted", impaired(|counters| counters.corrupted)),
        ("bad ICRC", both(|stats| stats.port.icrc_bad)),
        ("resent", both(|stats| stats.qps.packets_resent)),
        ("duplicates", both(|stats| stats.qps.duplicates)),
    ];
    for (what, count) in counts {
        assert!(count > 0, "{what}: {counts:?}");
    }
    // What came out of the network whole was not taken for anything else.
    let (bad, corrupted) = (counts[4].1, counts[3].1);
    assert!(bad <= 2 * corrupted, "each may have been doubled: {counts:?}");

    assert_eq!(a.qp.disconnect().await, CloseReason::Graceful);
    let end = tokio::time::timeout(LONG, b.qp.closed()).await.expect("it ends at both sides");
    assert_eq!(end, CloseReason::Graceful);
}

#[tokio::test]
async fn nothing_is_lost_or_changed_on_ipv4() {
    through("127.0.0.1", MILD, 50).await;
}

#[tokio::test]
async fn nothing_is_lost_or_changed_on_ipv6() {
    if userdma_tests::ipv6() {
        through("[::1]", MILD, 50).await;
    }
}

#[tokio::test]
async fn nothing_is_lost_or_changed_at_5_percent_loss_on_ipv4() {
    through("127.0.0.1", HARD, 32).await;
}

#[tokio::test]
async fn nothing_is_lost_or_changed_at_5_percent_loss_on_ipv6() {
    if userdma_tests::ipv6() {
        through("[::1]", HARD, 32).await;
    }
}

/// Only what is missing comes again, with as much on the way as a userdma peer lets us have.
#[tokio::test]
async fn little_more_is_sent_again_than_was_lost() {
    const LEN: usize = 4 << 20;
    let mut lossy = quick();
    lossy.roce.impair = Some("loss=1%,seed=3".parse().unwrap());
    let (a, b) = roce_pair_with("127.0.0.1", [quick(), lossy], |_| {}).await;
    let (ma, mb) = (a.mr(LEN, 1), b.mr(LEN, 2));
    for id in 0..8 {
        a.qp.post_send(SendWr::write(id, [ma.slice(0..LEN)], mb.remote(0))).unwrap();
    }
    for id in 0..8 {
        assert!(a.done(id).await.status.is_ok());
    }
    assert!(octets(&mb, 0, LEN) == octets(&ma, 0, LEN));
    let (here, there) = (a.device.roce_stats().unwrap(), b.device.roce_stats().unwrap());
    let (lost, resent) = (there.impaired.unwrap().lost, here.qps.packets_resent);
    assert!(
        there.qps.kept > 20 * lost,
        "much was on the way behind each: {} of {lost}",
        there.qps.kept
    );
    // A second time-out in a row sends all that is on the way, at most 300 packets.
    let timeouts = here.qps.timeouts;
    assert!(
        lost > 30 && resent < 3 * lost + 300 * timeouts,
        "{lost} lost, {resent} resent, {timeouts}"
    );
}
