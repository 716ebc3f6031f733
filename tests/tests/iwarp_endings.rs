//! How a connection ends: no last word is lost or said too late, and no path waits for ever.

use std::time::Duration;

use userdma_proto::{
    iwarp::{CloseReason, Connection, Event, Shutdown, StartupError, Transmit},
    mem::NoMemory,
    time::Instant,
    verbs::{Access, QpState, RemoteAddr, SendOp, SendWr, Sge, WcStatus},
    wire::{
        ids::{LKey, Msn, RKey, Stag},
        iwarp::{
            ddp::{QN_READ_REQUEST, QN_SEND, TaggedHeader, UntaggedHeader},
            fpdu,
            rdmap::{Opcode, ReadRequest},
        },
    },
};
use userdma_tests::{PD, Pair, Side, config};
use zerocopy::IntoBytes;

const T0: Instant = Instant::ZERO;
const KEY: u32 = 0x1000;

fn framed(header: &[u8], payload: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    let start = fpdu::begin(&mut out);
    out.extend_from_slice(header);
    out.extend_from_slice(payload);
    fpdu::finish(&mut out, start, true);
    out
}

/// A SEND, for which nobody here ever posts a receive.
fn send(msn: u32) -> Vec<u8> {
    let header = UntaggedHeader::new(Opcode::SEND, true, QN_SEND, Msn(msn), 0, Stag(0));
    framed(header.as_bytes(), b"nobody takes this")
}

fn empty_write() -> Vec<u8> {
    framed(TaggedHeader::new(Opcode::WRITE, true, Stag(1), 0).as_bytes(), b"")
}

fn connected() -> Pair {
    let mut pair = Pair::new(config(1, 2), config(2, 3), b"", 1);
    pair.connect();
    pair
}

#[test]
fn nothing_is_sent_behind_our_fin() {
    let mut pair = connected();
    let side = &mut pair.sides[1];
    side.feed(T0, &empty_write());
    side.conn.close(T0);
    assert_eq!(side.drain_all(T0), b"");
    assert_eq!(side.shutdowns, [Shutdown::Write]);
    // The peer's fault, too late to be told.
    side.feed(T0, &send(1));
    assert_eq!(side.conn.state(), QpState::Err);
    assert_eq!(side.drain_all(T0), b"");
    side.feed_eof(T0);
    assert_eq!(side.shutdowns, [Shutdown::Write, Shutdown::Close]);
    assert!(matches!(side.events.last(), Some(Event::Closed(CloseReason::TerminateSent(_)))));
}

#[test]
fn a_fin_of_the_peer_does_not_cut_our_terminate_off() {
    let mut pair = connected();
    let side = &mut pair.sides[1];
    side.feed(T0, &send(1));
    // The socket takes some octets of it, then the peer closes its half.
    let mut said = side.drain(T0, 1 << 20, 5);
    side.feed_eof(T0);
    assert_eq!(side.shutdowns, []);
    assert_eq!(side.conn.poll_shutdown(), None, "the rest is to be said first");
    said.extend(side.drain_all(T0));
    assert_eq!(side.shutdowns, [Shutdown::Close]);
    assert_eq!(u16::from_be_bytes([said[0], said[1]]) & 3, 2);
    assert!(said.len() > 30, "a whole FPDU: {said:02x?}");
}

#[test]
fn work_that_can_never_be_sent_is_flushed_with_the_peers_fin() {
    let mut pair = connected();
    let side = &mut pair.sides[1];
    // RFC 5044 §7.1.2 rule 4: it waits for the initiator's first FPDU, which never comes.
    side.conn.post_send(SendWr::inline(1, SendOp::Send, b"waits"), 1).expect("connected");
    assert_eq!(side.drain_all(T0), b"");
    side.feed_eof(T0);
    assert_eq!(side.wcs()[0].status, WcStatus::WR_FLUSH_ERR);
    assert_eq!(side.events.last(), Some(&Event::Closed(CloseReason::Graceful)));
    assert_eq!(side.shutdowns, [Shutdown::Close]);
}

/// A peer that always has two READs outstanding.
#[test]
fn a_close_ends_though_the_peer_goes_on_reading() {
    let mut pair = connected();
    let side = &mut pair.sides[1];
    side.mem.add(KEY, PD, Access::REMOTE_READ, 0, vec![7; 64]);
    let read = |msn| {
        let header =
            UntaggedHeader::new(Opcode::READ_REQUEST, true, QN_READ_REQUEST, Msn(msn), 0, Stag(0));
        let request = ReadRequest::new((Stag(0x55), 0), 64, (Stag(KEY), 0));
        framed(header.as_bytes(), request.as_bytes())
    };
    side.feed(T0, &read(1));
    side.feed(T0, &read(2));
    side.conn.close(T0);
    let mut answers = 0;
    for msn in 3..1000 {
        if !side.shutdowns.is_empty() {
            assert_eq!((&side.shutdowns[..], answers), (&[Shutdown::Write][..], 2));
            return;
        }
        // One answer, and the next request is there before the other one is out.
        answers += usize::from(!side.drain(T0, 1, usize::MAX).is_empty());
        side.feed(T0, &read(msn));
    }
    panic!("no FIN after {answers} answers");
}

/// A peer that keeps back an answer, and keeps the line busy meanwhile.
#[test]
fn a_close_is_not_put_off_by_octets_that_bring_it_no_further() {
    let mut pair = connected();
    let side = &mut pair.sides[0];
    side.mem.add(KEY, PD, Access::LOCAL_WRITE, 0, vec![0; 64]);
    let sink = Sge::new(0, 8, LKey(KEY));
    let read = SendWr::read(1, [sink], RemoteAddr::new(0, RKey(9)));
    side.conn.post_send(read, 1).expect("connected");
    side.drain_all(T0);
    side.conn.close(T0);
    let deadline = T0 + side.conn.config().close_timeout;
    for second in 1..30 {
        let now = T0 + Duration::from_secs(second);
        side.feed(now, &empty_write());
        side.conn.handle_timeout(now);
        side.drain_all(now);
        assert_eq!(side.shutdowns.is_empty(), now < deadline, "after {second} s");
    }
    assert_eq!(side.events.last(), Some(&Event::Closed(CloseReason::Lost)));
}

/// A program that exits with octets unread resets TCP, as an old responder does that has looked at
/// no more than the revision.
#[test]
fn a_reset_without_an_answer_is_a_silent_close() {
    let mut side = Side::new(Connection::initiator(config(5, 9), b"", T0).expect("valid"));
    side.drain_all(T0);
    side.conn.handle_reset(T0);
    assert_eq!(side.conn.poll_event(), Some(Event::StartupFailed(StartupError::ClosedSilently)));
    let mut side = Side::new(Connection::initiator(config(5, 9), b"", T0).expect("valid"));
    side.drain_all(T0);
    side.feed(T0, b"MPA");
    side.conn.handle_reset(T0);
    assert_eq!(side.conn.poll_event(), Some(Event::StartupFailed(StartupError::Lost)));
}

/// The empty WRITE that wakes a siw ([`userdma_proto::iwarp::Config::nudge`]) never stands between
/// the segments of a message: siw, like many, takes it for a part of the WRITE under way.
#[test]
fn a_nudge_does_not_break_into_a_message() {
    let mut a = config(1, 2);
    a.mpa.crc = false;
    let mut b = config(2, 3);
    b.mpa.crc = false;
    let mut pair = Pair::new(a, b, b"", 1);
    pair.connect();
    let side = &mut pair.sides[0];
    side.mem.add(KEY, PD, Access::empty(), 0, vec![7; 100_000]);
    let remote = RemoteAddr { addr: 0, rkey: RKey(KEY) };
    let wr = SendWr::write(1, [Sge::new(0, 100_000, LKey(KEY))], remote);
    side.conn.post_send(wr, 1).expect("connected");
    // Some segments leave, then the time comes.
    let mut sent = side.drain(pair.now, 2000, usize::MAX);
    let at = side.conn.poll_timeout().expect("a time to look again");
    side.conn.handle_timeout(at);
    sent.extend(side.drain_all(at));
    let (mut deframer, mut scratch) = (fpdu::Deframer::new(false, false), Vec::new());
    let mut expected = 0;
    let mut rest = &sent[..];
    while let Some(f) = deframer.next(rest, &mut scratch).expect("good") {
        rest = &rest[f.consumed..];
        let to = u64::from_be_bytes(f.ulpdu[6..14].try_into().expect("8 octets"));
        if expected < 100_000 {
            assert_eq!(to, expected, "a segment of something else");
        }
        expected += f.ulpdu.len() as u64 - 14;
    }
    assert_eq!((expected, rest.len()), (100_000, 0));
}

/// A program that gives its peer no rights over memory at all.
#[test]
fn a_nudge_breaks_nothing_where_the_peer_may_not_write() {
    let mut b = config(2, 3);
    b.remote_access = Access::empty();
    let mut pair = Pair::new(config(1, 2), b, b"", 1);
    pair.connect();
    pair.sides[1].conn.post_recv(userdma_proto::verbs::RecvWr::new(7, []), 7).expect("room");
    pair.sides[0].conn.post_send(SendWr::inline(1, SendOp::Send, b""), 1).expect("connected");
    pair.run(1000);
    let at = pair.sides[0].conn.poll_timeout().expect("a time to look again");
    pair.sides[0].conn.handle_timeout(at);
    pair.run(1000);
    assert_eq!(pair.sides[0].conn.stats().fpdus_sent, 2, "the SEND and the nudge");
    for side in &pair.sides {
        assert_eq!(side.conn.state(), QpState::Rts, "{:?}", side.events);
    }
}

#[test]
fn a_nudge_also_goes_out_while_we_close() {
    let mut pair = connected();
    let side = &mut pair.sides[0];
    side.mem.add(KEY, PD, Access::LOCAL_WRITE, 0, vec![0; 8]);
    let remote = RemoteAddr { addr: 0, rkey: RKey(KEY) };
    let wr = SendWr::read(1, [Sge::new(0, 8, LKey(KEY))], remote);
    side.conn.post_send(wr, 1).expect("connected");
    side.drain_all(T0);
    side.conn.close(T0);
    let at = side.conn.poll_timeout().expect("a time to look again");
    side.conn.handle_timeout(at);
    let mut out = Transmit::default();
    assert!(side.conn.poll_transmit(at, &NoMemory, 1 << 20, &mut out), "it was due");
}

/// While octets of a work request are with the driver, its memory is still read: whoever finds the
/// completion may use the memory for something else.
#[test]
fn work_is_over_when_its_memory_is_not_read_any_more() {
    let remote = RemoteAddr { addr: 0, rkey: RKey(KEY) };
    for failed in [false, true] {
        let (mut a, mut b) = (config(1, 2), config(2, 3));
        (a.mpa.crc, b.mpa.crc) = (false, false);
        let mut pair = Pair::new(a, b, b"", 1);
        pair.connect();
        let side = &mut pair.sides[0];
        side.mem.add(KEY, PD, Access::empty(), 0, vec![7; 100_000]);
        for id in 0..3 {
            // Half of the last one's memory is not there.
            let last = Sge::new(0, 50_000, LKey(if failed && id == 2 { 0xdead } else { KEY }));
            let sges = [Sge::new(0, 50_000, LKey(KEY)), last];
            side.conn.post_send(SendWr::write(id, sges, remote), 1).expect("connected");
        }
        // All that can be sent is handed out, and the socket takes a little.
        let mut sent = side.drain(T0, 1 << 20, 10);
        if !failed {
            side.feed(T0, &send(1));
        }
        assert_eq!(side.conn.state(), QpState::Err);
        assert_eq!(side.done.len(), 0, "all of it is still with the driver");
        sent.extend(side.drain_all(T0));
        let statuses: Vec<_> = side.wcs().iter().map(|wc| (wc.id, wc.status)).collect();
        let (before, last) = if failed {
            (WcStatus::SUCCESS, WcStatus::LOC_PROT_ERR)
        } else {
            (WcStatus::WR_FLUSH_ERR, WcStatus::WR_FLUSH_ERR)
        };
        assert_eq!(statuses, [(0, before), (1, before), (2, last)]);
        assert!(sent.len() > 200_000);
    }
}
