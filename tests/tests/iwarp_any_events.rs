//! Whatever happens to a connection, and in whatever order: each work request completes once and in
//! its turn, nothing is sent behind the FIN, and every end is reached in time.

use proptest::prelude::*;
use userdma_proto::{
    iwarp::{Event, Shutdown},
    verbs::{Access, QpState, RecvWr, RemoteAddr, SendFlags, SendOp, SendWr, Sge},
    wire::{
        ids::{LKey, Msn, RKey, Stag},
        iwarp::{
            ddp::{QN_READ_REQUEST, QN_SEND, QN_TERMINATE, TaggedHeader, UntaggedHeader},
            fpdu,
            rdmap::{Opcode, ReadRequest},
            terminate::{TermCode, Terminate},
        },
    },
};
use userdma_tests::{PD, Pair, Rng, Side, config};
use zerocopy::IntoBytes;

const KEY: u32 = 0x1000;
const LEN: u32 = 20_000;

/// The scripted peer: its next numbers, and the sinks of our READs that it has seen.
struct Peer {
    crc: bool,
    send_msn: u32,
    request_msn: u32,
    seen: Vec<u8>,
    sinks: Vec<(u32, u32)>,
}

impl Peer {
    fn framed(&self, header: &[u8], payload: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        let start = fpdu::begin(&mut out);
        out.extend_from_slice(header);
        out.extend_from_slice(payload);
        fpdu::finish(&mut out, start, self.crc);
        out
    }

    /// Takes what was sent, for the READs in it.
    fn see(&mut self, octets: &[u8]) {
        self.seen.extend_from_slice(octets);
        let (mut deframer, mut scratch) = (fpdu::Deframer::new(false, self.crc), Vec::new());
        while let Some(f) = deframer.next(&self.seen, &mut scratch).expect("good FPDUs") {
            if f.ulpdu[1] & 0xf == Opcode::READ_REQUEST.0 {
                let request = ReadRequest::parse(&f.ulpdu[18..]).expect("whole");
                self.sinks.push((request.sink_stag.get(), request.size.get()));
            }
            let used = f.consumed;
            self.seen.drain(..used);
        }
    }

    /// Something that a peer may say; now and then something that it may not.
    fn says(&mut self, rng: &mut Rng) -> Vec<u8> {
        let untagged = |op, qn, msn| UntaggedHeader::new(op, true, qn, Msn(msn), 0, Stag(0));
        match rng.below(12) {
            0..4 => {
                self.send_msn += 1;
                let header = untagged(Opcode::SEND, QN_SEND, self.send_msn);
                let len = rng.below(100) as usize;
                self.framed(header.as_bytes(), &rng.bytes(len))
            }
            4..6 => {
                let header = TaggedHeader::new(Opcode::WRITE, true, Stag(KEY), rng.below(100));
                self.framed(header.as_bytes(), &rng.bytes(50))
            }
            6..8 => {
                self.request_msn += 1;
                let header = untagged(Opcode::READ_REQUEST, QN_READ_REQUEST, self.request_msn);
                let size = rng.below(u64::from(LEN)) as u32;
                let request = ReadRequest::new((Stag(5), 0), size, (Stag(KEY), 0));
                self.framed(header.as_bytes(), request.as_bytes())
            }
            8..11 if !self.sinks.is_empty() => {
                let (stag, size) = self.sinks.remove(0);
                let header = TaggedHeader::new(Opcode::READ_RESPONSE, true, Stag(stag), 0);
                self.framed(header.as_bytes(), &vec![1; size as usize])
            }
            11 if rng.one_in(6) => {
                let mut payload = Vec::new();
                Terminate::new(TermCode::DDP_TAGGED_BOUNDS).emit(&mut payload);
                let header = untagged(Opcode::TERMINATE, QN_TERMINATE, 1);
                self.framed(header.as_bytes(), &payload)
            }
            11 if rng.one_in(6) => rng.bytes(40),
            _ => Vec::new(),
        }
    }
}

/// A work request of any kind, good or bad.
fn work(rng: &mut Rng, id: u64) -> SendWr {
    let key = |rng: &mut Rng| LKey(if rng.one_in(20) { 0xdead } else { KEY });
    let remote = RemoteAddr { addr: 0, rkey: RKey(7) };
    let len = rng.below(u64::from(LEN)) as u32;
    let wr = match rng.below(6) {
        0 => SendWr::send(id, [Sge::new(0, len / 2, key(rng)), Sge::new(0, len / 2, key(rng))]),
        1 | 2 => SendWr::write(id, [Sge::new(0, len, key(rng))], remote),
        3 => SendWr::read(id, [Sge::new(0, len.min(2000), key(rng))], remote),
        4 => SendWr::inline(id, SendOp::WriteImm(remote, 3), &rng.bytes(20)),
        _ => SendWr::inline(id, SendOp::Send, b"inline"),
    };
    let fence = if rng.one_in(8) { SendFlags::FENCE } else { SendFlags::empty() };
    wr.with_flags(SendFlags::SIGNALED | fence)
}

/// Takes some octets off the side, and checks that it may have said them.
fn drain(side: &mut Side, peer: &mut Peer, now: userdma_proto::time::Instant, n: usize) -> usize {
    let silent = side.shutdowns.contains(&Shutdown::Write);
    let over = matches!(side.events.last(), Some(Event::Closed(_)));
    let sent = side.drain(now, 1 + n, n);
    if !over {
        assert!(!silent || sent.is_empty(), "{} octets behind the FIN", sent.len());
        peer.see(&sent);
    }
    sent.len()
}

fn run(seed: u64, role: usize, crc: bool) {
    let mut rng = Rng::new(seed);
    let mut configs = [config(1, 2), config(2, 3)];
    for c in &mut configs {
        c.mpa.crc = crc;
        (c.ird, c.ord) = (4, 4);
        (c.max_send_wr, c.max_recv_wr) = (20, 20);
    }
    let [a, b] = configs;
    let mut pair = Pair::new(a, b, b"", seed);
    pair.connect();
    let mut now = pair.now;
    let side = &mut pair.sides[role];
    side.mem.add(KEY, PD, Access::all(), 0, vec![7; LEN as usize]);
    let mut peer = Peer { crc, send_msn: 0, request_msn: 0, seen: Vec::new(), sinks: Vec::new() };
    let (mut sends, mut recvs) = (Vec::new(), Vec::new());
    let mut eof = false;
    for id in 0..300 {
        now = now + core::time::Duration::from_millis(rng.below(20));
        match rng.below(40) {
            0..10 => {
                if side.conn.post_send(work(&mut rng, id), id).is_ok() {
                    sends.push(id);
                }
            }
            10..18 => {
                let wr = RecvWr::new(id, [Sge::new(0, 100, LKey(KEY))]);
                if side.conn.post_recv(wr, id).is_ok() {
                    recvs.push(id);
                }
            }
            18..27 if !eof => {
                let octets = peer.says(&mut rng);
                side.feed(now, &octets);
            }
            27..37 => {
                let n = 1 + rng.below(30_000) as usize;
                drain(side, &mut peer, now, n);
            }
            37 if rng.one_in(4) => side.conn.close(now),
            38 if rng.one_in(6) => {
                eof = true;
                side.feed_eof(now);
            }
            39 if rng.one_in(20) => side.conn.abort(now),
            39 if rng.one_in(20) => side.conn.handle_reset(now),
            _ => {
                if side.conn.poll_timeout().is_some_and(|at| at <= now) {
                    side.conn.handle_timeout(now);
                }
            }
        }
    }
    // The program closes; the peer does nothing more at all.
    side.conn.close(now);
    for _ in 0..8 {
        while drain(side, &mut peer, now, usize::MAX / 2) > 0 {}
        match side.conn.poll_timeout() {
            Some(at) => {
                now = at.max(now);
                side.conn.handle_timeout(now);
            }
            None => break,
        }
    }
    drain(side, &mut peer, now, 1);
    assert_eq!(side.conn.state(), QpState::Err);
    let ends = side.events.iter().filter(|e| matches!(e, Event::Closed(_))).count();
    assert_eq!(ends, 1, "it ends, and once: {:?}", side.events);
    assert!(matches!(side.events.last(), Some(Event::Closed(_))), "{:?}", side.events);
    let (got_recvs, got_sends): (Vec<_>, Vec<_>) =
        side.wcs().into_iter().partition(|wc| wc.opcode.is_recv());
    let ids = |wcs: &[userdma_proto::verbs::Wc]| wcs.iter().map(|wc| wc.id).collect::<Vec<_>>();
    assert_eq!(ids(&got_sends), sends, "each send completes once and in its turn");
    assert_eq!(ids(&got_recvs), recvs, "each receive completes once and in its turn");
    // After the first failure nothing succeeds that was posted behind it.
    for wcs in [&got_sends, &got_recvs] {
        let first = wcs.iter().position(|wc| !wc.status.is_ok()).unwrap_or(wcs.len());
        let late = wcs[first..].iter().find(|wc| wc.status.is_ok());
        assert_eq!(late, None, "a success behind {:?}", wcs[first]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    #[test]
    fn any_order_of_events_ends_well(seed: u64, role in 0..2usize, crc: bool) {
        run(seed, role, crc);
    }
}
