//! Whatever a peer sends, the receiving machine does not panic, answers at most one Terminate,
//! finishes every work request exactly once, and touches only what the peer may touch.

use proptest::prelude::*;
use userdma_proto::{
    iwarp::{Connection, Event},
    time::Instant,
    verbs::{Access, RecvWr, RemoteAddr, SendOp, SendWr, Sge},
    wire::{
        ids::{LKey, Msn, RKey, Stag},
        iwarp::{
            ddp::{TaggedHeader, UntaggedHeader},
            fpdu,
            mpa::{Enhanced, Start, StartFlags, StartKind},
            rdmap::Opcode,
        },
    },
};
use userdma_tests::{PD, Rng, Side, config};
use zerocopy::IntoBytes;

const T0: Instant = Instant::ZERO;
const OPEN: u32 = 1;
const SECRET: u32 = 2;
const INBOX: u32 = 3;
const RECEIVES: u64 = 8;
const SENDS: u64 = 8;

/// A connected end without CRC, with work in both queues.
fn start(initiator: bool, markers: bool) -> Side {
    let mut c = config(5, 9);
    c.mpa.crc = false;
    c.mpa.markers = markers;
    let conn = if initiator {
        Connection::initiator(c, b"", T0).expect("valid")
    } else {
        Connection::responder(c, T0)
    };
    let mut side = Side::new(conn);
    let all = Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
    side.mem.add(OPEN, PD, all, 0, vec![0; 4096]);
    side.mem.add(SECRET, PD, Access::empty(), 0, vec![0x5a; 4096]);
    side.mem.add(INBOX, PD, Access::LOCAL_WRITE, 0, vec![0; 4096]);
    for id in 0..RECEIVES {
        let sge = Sge::new(id * 64, 64, LKey(INBOX));
        side.conn.post_recv(RecvWr::new(id, [sge]), id).expect("room");
    }
    let kind = if initiator { StartKind::Reply } else { StartKind::Request };
    let enhanced = Some(Enhanced { ird: 8, ord: 8, ..Enhanced::default() });
    let mut frame = Vec::new();
    Start { kind, flags: StartFlags::empty(), revision: 2, enhanced, private_data: b"" }
        .emit(&mut frame);
    side.drain_all(T0);
    side.feed(T0, &frame);
    if !initiator {
        side.conn.accept(b"", T0).expect("a request");
    }
    for id in 0..SENDS {
        let remote = RemoteAddr::new(0, RKey(9));
        let sink = Sge::new(2048 + id * 8, 8, LKey(INBOX));
        let wr = match id % 4 {
            0 => SendWr::read(id, [sink], remote),
            1 => SendWr::fetch_add(id, sink, remote, 1),
            2 => SendWr::inline(id, SendOp::Send, b"hi"),
            _ => SendWr::inline(id, SendOp::Write(remote), b"hi"),
        };
        side.conn.post_send(wr, 100 + id).expect("connected");
    }
    side
}

/// Segments that are nearly right: the fields a peer can choose, in combinations.
fn nearly_right(rng: &mut Rng) -> Vec<u8> {
    let payload = {
        let len = [0, 1, 7, 8, 12, 28, 52, 64, 65][rng.below(9) as usize];
        let mut p = rng.bytes(len);
        // READ and atomic requests that name keys which exist.
        for at in [4, 8, 16] {
            if p.len() >= at + 4 && rng.one_in(2) {
                p[at..at + 4].copy_from_slice(&(1 + rng.below(3) as u32).to_be_bytes());
            }
        }
        p
    };
    let op = Opcode(rng.below(13) as u8);
    let last = !rng.one_in(4);
    let mut ulpdu = if rng.one_in(3) {
        let to = if rng.one_in(4) { rng.draw() } else { rng.below(4200) };
        TaggedHeader::new(op, last, Stag(1 + rng.below(4) as u32), to).as_bytes().to_vec()
    } else {
        let (qn, msn) = (rng.below(5) as u32, Msn(1 + rng.below(3) as u32));
        let mo = if rng.one_in(3) { rng.below(70) as u32 } else { 0 };
        let inv = Stag(rng.below(4) as u32);
        UntaggedHeader::new(op, last, qn, msn, mo, inv).as_bytes().to_vec()
    };
    ulpdu.extend(payload);
    let mut out = Vec::new();
    let at = fpdu::begin(&mut out);
    out.extend(ulpdu);
    fpdu::finish(&mut out, at, false);
    out
}

fn check(mut side: Side, octets: &[u8], rng: &mut Rng) -> Result<(), TestCaseError> {
    let secret = side.mem.bytes(SECRET);
    let mut rest = octets;
    let mut sent = 0;
    while !rest.is_empty() {
        let n = 1 + rng.below(rest.len() as u64) as usize;
        side.feed(T0, &rest[..n]);
        rest = &rest[n..];
        sent += side.drain_all(T0).len();
    }
    side.feed_eof(T0);
    side.conn.abort(T0);
    side.drain_all(T0);
    prop_assert!(side.mem.bytes(SECRET) == secret, "nobody may write there");
    // What is sent back is bounded by what was asked for: no amplification beyond READs of 4 KiB.
    prop_assert!(sent < 200_000 + octets.len() * 5000, "{sent} octets sent");
    let mut tags: Vec<u64> = side.done.iter().map(|c| c.tag).collect();
    tags.sort_unstable();
    let all: Vec<u64> = (0..RECEIVES).chain((0..SENDS).map(|id| 100 + id)).collect();
    prop_assert_eq!(tags, all, "every work request ends exactly once");
    let ends = side.events.iter().filter(|e| matches!(e, Event::Closed(_))).count();
    prop_assert_eq!(ends, 1, "{:?}", side.events);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, ..ProptestConfig::default() })]

    #[test]
    fn any_octets(initiator: bool, markers: bool, seed: u64, octets: Vec<u8>) {
        check(start(initiator, markers), &octets, &mut Rng::new(seed))?;
    }

    #[test]
    fn nearly_right_segments(initiator: bool, seed: u64, count in 1..30usize) {
        let mut rng = Rng::new(seed);
        let octets: Vec<u8> = (0..count).flat_map(|_| nearly_right(&mut rng)).collect();
        check(start(initiator, false), &octets, &mut rng)?;
    }

    #[test]
    fn any_start_frame(initiator: bool, mut octets: Vec<u8>, key: bool, seed: u64) {
        let mut side = Side::new(if initiator {
            Connection::initiator(config(5, 9), b"", T0).expect("valid")
        } else {
            Connection::responder(config(5, 9), T0)
        });
        if key {
            let front = if initiator { b"MPA ID Rep Frame" } else { b"MPA ID Req Frame" };
            octets.splice(..0, front.iter().copied());
        }
        let mut rng = Rng::new(seed);
        side.conn.post_recv(RecvWr::new(1, []), 1).expect("room");
        let mut rest = octets.as_slice();
        while !rest.is_empty() {
            let n = 1 + rng.below(rest.len() as u64) as usize;
            side.feed(T0, &rest[..n]);
            side.drain_all(T0);
            rest = &rest[n..];
        }
        side.feed_eof(T0);
        side.conn.abort(T0);
        side.drain_all(T0);
        prop_assert_eq!(side.done.len(), 1);
        let ends = side.events.iter().filter(|e| matches!(e, Event::Closed(_) | Event::StartupFailed(_)));
        prop_assert_eq!(ends.count(), 1);
    }
}
