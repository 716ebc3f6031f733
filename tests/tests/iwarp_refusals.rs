//! A peer that misbehaves, segment by segment: the Terminate that answers it, the completions that
//! follow, and that memory stays as it was.

use userdma_proto::{
    iwarp::{CloseReason, Connection, Event, RtrKinds, Shutdown, StartupError},
    time::Instant,
    verbs::{Access, QpState, RecvWr, RemoteAddr, SendOp, SendWr, Sge, Wc, WcStatus},
    wire::{
        ids::{LKey, Msn, Qpn, RKey, Stag},
        iwarp::{
            ddp::{
                QN_ATOMIC_RESPONSE, QN_READ_REQUEST, QN_SEND, QN_TERMINATE, Segment, TaggedHeader,
                UntaggedHeader,
            },
            fpdu::{self, Deframer},
            mpa::{Enhanced, Start, StartFlags, StartKind},
            rdmap::{AtomicRequest, AtomicResponse, Opcode, ReadRequest},
            terminate::{TermCode, Terminate},
        },
    },
};
use userdma_tests::{PD, Side, config};
use zerocopy::IntoBytes;

const T0: Instant = Instant::ZERO;
const KEY: u32 = 0x1000;
const READ_ONLY: u32 = 0x1001;
const FOREIGN: u32 = 0x1002;
const BOUND_ELSEWHERE: u32 = 0x1003;
const MORTAL: u32 = 0x1004;
const INBOX: u32 = 0x1005;
const LEN: u64 = 4096;
const HIGH: u32 = 0x1006;

fn request(flags: StartFlags, enhanced: Option<Enhanced>) -> Vec<u8> {
    let mut out = Vec::new();
    let revision = if enhanced.is_some() { 2 } else { 1 };
    let kind = StartKind::Request;
    Start { kind, flags, revision, enhanced, private_data: b"hi" }.emit(&mut out);
    out
}

/// A responder that is connected to a scripted initiator, with two receives of 100 octets.
fn responder() -> Side {
    let mut side = Side::new(Connection::responder(config(5, 9), T0));
    let all = Access::REMOTE_READ | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC;
    side.mem.add(KEY, PD, all, 0, vec![0xee; LEN as usize]);
    side.mem.add(READ_ONLY, PD, Access::REMOTE_READ, 0, vec![0xee; LEN as usize]);
    side.mem.add(FOREIGN, PD + 1, all | Access::REMOTE_INVALIDATE, 0, vec![0xee; LEN as usize]);
    side.mem.add(BOUND_ELSEWHERE, PD, all | Access::REMOTE_INVALIDATE, 0, vec![0xee; 64]);
    side.mem.bind(BOUND_ELSEWHERE, Qpn(77));
    side.mem.add(MORTAL, PD, Access::REMOTE_INVALIDATE, 0, vec![0xee; 64]);
    side.mem.bind(MORTAL, Qpn(5));
    side.mem.add(INBOX, PD, Access::LOCAL_WRITE, 0, vec![0; 1000]);
    side.mem.add(HIGH, PD, all, u64::MAX - 4095, vec![0xee; 4095]);
    for id in 0..2 {
        let sge = Sge::new(id * 100, 100, LKey(INBOX));
        side.conn.post_recv(RecvWr::new(id, [sge]), id).expect("room");
    }
    let enhanced = Enhanced { ird: 2, ord: 2, ..Enhanced::default() };
    side.feed(T0, &request(StartFlags::CRC, Some(enhanced)));
    side.conn.accept(b"", T0).expect("a request is there");
    side.drain_all(T0);
    assert_eq!(side.conn.state(), QpState::Rts);
    side
}

fn framed(ulpdu: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    let start = fpdu::begin(&mut out);
    out.extend_from_slice(ulpdu);
    fpdu::finish(&mut out, start, true);
    out
}

fn tagged(op: Opcode, last: bool, stag: u32, to: u64, payload: &[u8]) -> Vec<u8> {
    let mut u = TaggedHeader::new(op, last, Stag(stag), to).as_bytes().to_vec();
    u.extend_from_slice(payload);
    u
}

fn untagged(op: Opcode, last: bool, qn: u32, msn: u32, mo: u32, payload: &[u8]) -> Vec<u8> {
    untagged_inv(op, last, qn, msn, mo, 0, payload)
}

fn untagged_inv(
    op: Opcode,
    last: bool,
    qn: u32,
    msn: u32,
    mo: u32,
    inv: u32,
    payload: &[u8],
) -> Vec<u8> {
    let mut u = UntaggedHeader::new(op, last, qn, Msn(msn), mo, Stag(inv)).as_bytes().to_vec();
    u.extend_from_slice(payload);
    u
}

fn read(stag: u32, to: u64, size: u32) -> Vec<u8> {
    let r = ReadRequest::new((Stag(0x55), 0), size, (Stag(stag), to));
    untagged(Opcode::READ_REQUEST, true, QN_READ_REQUEST, 1, 0, r.as_bytes())
}

fn atomic(code: u32, stag: u32, to: u64) -> Vec<u8> {
    let r = AtomicRequest {
        opcode: code.into(),
        request_id: 3.into(),
        stag: stag.into(),
        to: to.into(),
        add_swap_data: 1.into(),
        add_swap_mask: 0.into(),
        compare_data: 0.into(),
        compare_mask: 0.into(),
    };
    untagged(Opcode::ATOMIC_REQUEST, true, QN_READ_REQUEST, 1, 0, r.as_bytes())
}

/// The Terminate among the octets that were sent, and what stands before it.
fn sent_terminate(octets: &[u8]) -> Terminate {
    let mut deframer = Deframer::new(false, true);
    let mut rest = octets;
    let mut scratch = Vec::new();
    while let Some(f) = deframer.next(rest, &mut scratch).expect("we send good FPDUs") {
        let segment = Segment::parse(f.ulpdu).expect("whole headers");
        if segment.opcode() == Opcode::TERMINATE {
            let Segment::Untagged { header, payload } = segment else { panic!("tagged") };
            assert_eq!((header.qn.get(), header.msn.get(), header.mo.get()), (QN_TERMINATE, 1, 0));
            assert!(segment.last());
            assert_eq!(f.consumed, rest.len(), "nothing follows a Terminate");
            return Terminate::parse(payload).expect("a whole Terminate");
        }
        rest = &rest[f.consumed..];
    }
    panic!("no Terminate among {} octets", octets.len());
}

/// Feeds `good` segments, then the bad one. Returns the side after it, and the Terminate.
fn refuse(name: &str, good: &[Vec<u8>], bad: &[u8]) -> (Side, Terminate) {
    let mut side = responder();
    eprintln!("{name}");
    for ulpdu in good {
        side.feed(T0, &framed(ulpdu));
        assert_eq!(side.conn.state(), QpState::Rts, "a good segment");
    }
    let memory: Vec<_> = [KEY, READ_ONLY, FOREIGN, MORTAL, HIGH].map(|k| side.mem.bytes(k)).into();
    side.feed(T0, &framed(bad));
    let terminate = sent_terminate(&side.drain_all(T0));
    assert_eq!(side.conn.state(), QpState::Err);
    assert_eq!(side.shutdowns, [Shutdown::Write], "FIN, and the peer's is awaited");
    // RFC 5041 §7.1: what comes after the error is dropped.
    side.feed(T0, &framed(&tagged(Opcode::WRITE, true, KEY, 0, b"late")));
    let after: Vec<_> = [KEY, READ_ONLY, FOREIGN, MORTAL, HIGH].map(|k| side.mem.bytes(k)).into();
    assert!(memory == after, "memory is as it was");
    side.feed_eof(T0);
    assert_eq!(side.shutdowns, [Shutdown::Write, Shutdown::Close]);
    let closed = Event::Closed(CloseReason::TerminateSent(terminate));
    assert_eq!(side.events.last(), Some(&closed));
    (side, terminate)
}

fn with_version(mut ulpdu: Vec<u8>, octet: usize, clear: u8, set: u8) -> Vec<u8> {
    ulpdu[octet] = ulpdu[octet] & !clear | set;
    ulpdu
}

#[test]
fn each_bad_segment_draws_its_terminate() {
    use Opcode as O;
    let send = |len: usize| untagged(O::SEND, true, QN_SEND, 1, 0, &vec![1; len]);
    let first_half = || untagged(O::SEND, false, QN_SEND, 1, 0, &[1; 50]);
    let w = |stag, to, len: usize| tagged(O::WRITE, true, stag, to, &vec![1; len]);
    let both = || vec![send(3), untagged(O::SEND, true, QN_SEND, 2, 0, b"xyz")];
    // What it is, the good segments before it, the bad one, and what answers it.
    type Case = (&'static str, Vec<Vec<u8>>, Vec<u8>, TermCode);
    let cases: Vec<Case> = vec![
        // RFC 5041 §7.1, tagged.
        ("unknown key", vec![], w(0xdead, 0, 4), TermCode::DDP_TAGGED_INVALID_STAG),
        ("key 0", vec![], w(0, 0, 4), TermCode::DDP_TAGGED_INVALID_STAG),
        ("beyond the end", vec![], w(KEY, LEN - 3, 4), TermCode::DDP_TAGGED_BOUNDS),
        ("far beyond the end", vec![], w(KEY, 1 << 60, 4), TermCode::DDP_TAGGED_BOUNDS),
        ("below the start", vec![], w(HIGH, 0, 4), TermCode::DDP_TAGGED_BOUNDS),
        ("wraps", vec![], w(HIGH, u64::MAX - 1, 4), TermCode::DDP_TAGGED_TO_WRAP),
        ("wraps from anywhere", vec![], w(KEY, u64::MAX, 2), TermCode::DDP_TAGGED_TO_WRAP),
        ("other domain", vec![], w(FOREIGN, 0, 4), TermCode::DDP_TAGGED_STAG_NOT_ASSOCIATED),
        ("other QP", vec![], w(BOUND_ELSEWHERE, 0, 4), TermCode::DDP_TAGGED_STAG_NOT_ASSOCIATED),
        ("no right to write", vec![], w(READ_ONLY, 0, 4), TermCode::RDMAP_ACCESS),
        (
            "DDP version 2, tagged",
            vec![],
            with_version(w(KEY, 0, 4), 0, 3, 2),
            TermCode::DDP_TAGGED_INVALID_VERSION,
        ),
        // RFC 5041 §7.1, untagged.
        (
            "DDP version 0, untagged",
            vec![],
            with_version(send(4), 0, 3, 0),
            TermCode::DDP_UNTAGGED_INVALID_VERSION,
        ),
        (
            "queue 4",
            vec![],
            untagged(O::SEND, true, 4, 1, 0, b"x"),
            TermCode::DDP_UNTAGGED_INVALID_QN,
        ),
        (
            "no receive posted",
            both(),
            untagged(O::SEND, true, QN_SEND, 3, 0, b"x"),
            TermCode::DDP_UNTAGGED_NO_BUFFER,
        ),
        (
            "no receive for an empty SEND",
            both(),
            untagged(O::SEND, true, QN_SEND, 3, 0, b""),
            TermCode::DDP_UNTAGGED_NO_BUFFER,
        ),
        (
            "no receive for an Immediate",
            both(),
            untagged(O::IMMEDIATE, true, QN_SEND, 3, 0, &[0; 8]),
            TermCode::DDP_UNTAGGED_NO_BUFFER,
        ),
        (
            "a number left out",
            vec![],
            untagged(O::SEND, true, QN_SEND, 2, 0, b"x"),
            TermCode::DDP_UNTAGGED_MSN_RANGE,
        ),
        ("a number again", vec![send(3)], send(3), TermCode::DDP_UNTAGGED_MSN_RANGE),
        (
            "first segment not at 0",
            vec![],
            untagged(O::SEND, true, QN_SEND, 1, 4, b"x"),
            TermCode::DDP_UNTAGGED_INVALID_MO,
        ),
        (
            "a gap inside a message",
            vec![first_half()],
            untagged(O::SEND, true, QN_SEND, 1, 51, b"x"),
            TermCode::DDP_UNTAGGED_INVALID_MO,
        ),
        ("too long", vec![], send(101), TermCode::DDP_UNTAGGED_TOO_LONG),
        (
            "too long in the second segment",
            vec![first_half()],
            untagged(O::SEND, true, QN_SEND, 1, 50, &[1; 51]),
            TermCode::DDP_UNTAGGED_TOO_LONG,
        ),
        // RFC 5040 §7.2.
        (
            "RDMAP version 2",
            vec![],
            with_version(send(4), 1, 0xc0, 0x80),
            TermCode::RDMAP_INVALID_VERSION,
        ),
        (
            "opcode 15",
            vec![],
            untagged(Opcode(15), true, QN_SEND, 1, 0, b""),
            TermCode::RDMAP_UNEXPECTED_OPCODE,
        ),
        (
            "tagged SEND",
            vec![],
            tagged(O::SEND, true, KEY, 0, b""),
            TermCode::RDMAP_UNEXPECTED_OPCODE,
        ),
        (
            "untagged WRITE",
            vec![],
            untagged(O::WRITE, true, QN_SEND, 1, 0, b""),
            TermCode::RDMAP_UNEXPECTED_OPCODE,
        ),
        (
            "SEND on the READ queue",
            vec![],
            untagged(O::SEND, true, QN_READ_REQUEST, 1, 0, b""),
            TermCode::RDMAP_UNEXPECTED_OPCODE,
        ),
        (
            "another opcode inside a message",
            vec![first_half()],
            untagged(O::SEND_SE, true, QN_SEND, 1, 50, b"x"),
            TermCode::RDMAP_UNEXPECTED_OPCODE,
        ),
        (
            "Immediate inside a message",
            vec![first_half()],
            untagged(O::IMMEDIATE, true, QN_SEND, 1, 0, &[0; 8]),
            TermCode::RDMAP_UNEXPECTED_OPCODE,
        ),
        (
            "READ response nobody asked for",
            vec![],
            tagged(O::READ_RESPONSE, true, 0x55, 0, b"x"),
            TermCode::RDMAP_UNEXPECTED_OPCODE,
        ),
        (
            "atomic response nobody asked for",
            vec![],
            untagged(
                O::ATOMIC_RESPONSE,
                true,
                QN_ATOMIC_RESPONSE,
                1,
                0,
                AtomicResponse { request_id: 1.into(), original: 0.into() }.as_bytes(),
            ),
            TermCode::DDP_UNTAGGED_NO_BUFFER,
        ),
        ("READ, unknown key", vec![], read(0xdead, 0, 4), TermCode::RDMAP_INVALID_STAG),
        ("READ beyond the end", vec![], read(KEY, LEN, 1), TermCode::RDMAP_BOUNDS),
        ("READ that wraps", vec![], read(KEY, u64::MAX, 2), TermCode::RDMAP_TO_WRAP),
        ("READ, other domain", vec![], read(FOREIGN, 0, 4), TermCode::RDMAP_STAG_NOT_ASSOCIATED),
        ("READ, no right", vec![], read(MORTAL, 0, 4), TermCode::RDMAP_ACCESS),
        (
            "READ request too short",
            vec![],
            untagged(O::READ_REQUEST, true, QN_READ_REQUEST, 1, 0, &[0; 27]),
            TermCode::RDMAP_OPERATION_UNSPECIFIED,
        ),
        (
            "READ request too long",
            vec![],
            untagged(O::READ_REQUEST, true, QN_READ_REQUEST, 1, 0, &[0; 29]),
            TermCode::DDP_UNTAGGED_TOO_LONG,
        ),
        (
            "READ request not at offset 0",
            vec![],
            untagged(O::READ_REQUEST, true, QN_READ_REQUEST, 1, 4, &[0; 28]),
            TermCode::DDP_UNTAGGED_INVALID_MO,
        ),
        (
            "READ request in pieces",
            vec![],
            untagged(O::READ_REQUEST, false, QN_READ_REQUEST, 1, 0, &[0; 28]),
            TermCode::RDMAP_OPERATION_UNSPECIFIED,
        ),
        (
            "Immediate of 7 octets",
            vec![],
            untagged(O::IMMEDIATE, true, QN_SEND, 1, 0, &[0; 7]),
            TermCode::RDMAP_OPERATION_UNSPECIFIED,
        ),
        (
            "Immediate of 9 octets",
            vec![],
            untagged(O::IMMEDIATE, true, QN_SEND, 1, 0, &[0; 9]),
            TermCode::DDP_UNTAGGED_TOO_LONG,
        ),
        // RFC 7306.
        ("atomic code 1", vec![], atomic(1, KEY, 0), TermCode::RDMAP_UNEXPECTED_OPCODE),
        ("atomic, unaligned", vec![], atomic(0, KEY, 4), TermCode::RDMAP_CATASTROPHIC_STREAM),
        ("atomic, unknown key", vec![], atomic(0, 0xdead, 0), TermCode::RDMAP_INVALID_STAG),
        ("atomic, no right", vec![], atomic(2, READ_ONLY, 0), TermCode::RDMAP_ACCESS),
        ("atomic, beyond the end", vec![], atomic(2, KEY, LEN), TermCode::RDMAP_BOUNDS),
        // SEND with invalidate.
        (
            "invalidate an unknown key",
            vec![],
            untagged_inv(O::SEND_INV, true, QN_SEND, 1, 0, 0xdead, b"x"),
            TermCode::RDMAP_INVALID_STAG,
        ),
        (
            "invalidate another domain's key",
            vec![],
            untagged_inv(O::SEND_INV, true, QN_SEND, 1, 0, FOREIGN, b"x"),
            TermCode::RDMAP_CANNOT_INVALIDATE,
        ),
        (
            "invalidate a key bound to another QP",
            vec![],
            untagged_inv(O::SEND_SE_INV, true, QN_SEND, 1, 0, BOUND_ELSEWHERE, b"x"),
            TermCode::RDMAP_CANNOT_INVALIDATE,
        ),
        // Too short for any header.
        ("one octet", vec![], vec![0xc1], TermCode::DDP_LOCAL_CATASTROPHIC),
        ("no octet", vec![], vec![], TermCode::DDP_LOCAL_CATASTROPHIC),
        (
            "half a tagged header",
            vec![],
            tagged(O::WRITE, true, KEY, 0, b"")[..13].to_vec(),
            TermCode::DDP_LOCAL_CATASTROPHIC,
        ),
    ];
    for (name, good, bad, code) in cases {
        let (_, terminate) = refuse(name, &good, &bad);
        assert_eq!(terminate.code, code, "{name}");
        // RFC 5040 Figure 10.
        let headers = code.copies_ddp_header();
        assert_eq!(terminate.ddp_header.is_some(), headers, "{name}: DDP header");
        if let (true, Ok(segment)) = (headers, Segment::parse(&bad)) {
            let copied = terminate.ddp_header.expect("it is there");
            assert_eq!(&copied[..], segment.header_bytes(), "{name}: the header as it came");
            assert_eq!(terminate.ddp_segment_len, Some(bad.len() as u16), "{name}: its length");
        }
        let is_read = Segment::parse(&bad).is_ok_and(|s| s.opcode() == O::READ_REQUEST);
        let with_request = is_read && code.copies_read_request();
        assert_eq!(terminate.read_request().is_some(), with_request, "{name}: READ header");
    }
}

#[test]
fn a_receive_that_is_too_small_completes_with_a_length_error_and_the_rest_is_flushed() {
    let bad = untagged(Opcode::SEND, true, QN_SEND, 1, 0, &[1; 101]);
    let (side, _) = refuse("too long", &[], &bad);
    let statuses: Vec<_> = side.wcs().iter().map(|wc| (wc.id, wc.status)).collect();
    assert_eq!(statuses, [(0, WcStatus::LOC_LEN_ERR), (1, WcStatus::WR_FLUSH_ERR)]);
    assert_eq!(side.mem.bytes(INBOX), vec![0; 1000], "nothing of the segment is placed");
}

#[test]
fn more_reads_than_negotiated_are_refused() {
    let mut side = responder();
    let request = |msn| {
        let r = ReadRequest::new((Stag(0x55), 0), 1, (Stag(KEY), 0));
        framed(&untagged(Opcode::READ_REQUEST, true, QN_READ_REQUEST, msn, 0, r.as_bytes()))
    };
    // The request asked for an ORD of 2, but the reply granted what the responder has: 16.
    for msn in 1..=16 {
        side.feed(T0, &request(msn));
        assert_eq!(side.conn.state(), QpState::Rts, "request {msn}");
    }
    side.feed(T0, &request(17));
    assert_eq!(side.conn.state(), QpState::Err);
    let terminate = sent_terminate(&side.drain_all(T0));
    assert_eq!(terminate.code, TermCode::DDP_UNTAGGED_NO_BUFFER);
}

#[test]
fn zero_length_tagged_segments_touch_and_check_nothing() {
    let mut side = responder();
    // RFC 5041 §5.2, RFC 5040 §5.2: no key, no bounds.
    side.feed(T0, &framed(&tagged(Opcode::WRITE, true, 0xdead, u64::MAX, b"")));
    side.feed(T0, &framed(&read(0xdead, u64::MAX, 0)));
    assert_eq!(side.conn.state(), QpState::Rts);
    let sent = side.drain_all(T0);
    let mut scratch = Vec::new();
    let f = Deframer::new(false, true).next(&sent, &mut scratch).expect("good").expect("whole");
    let Segment::Tagged { header, payload } = Segment::parse(f.ulpdu).expect("whole") else {
        panic!("a READ response is tagged")
    };
    assert_eq!(
        (header.opcode(), header.stag(), payload.len()),
        (Opcode::READ_RESPONSE, Stag(0x55), 0)
    );
    assert_eq!(f.consumed, sent.len(), "one answer");
}

#[test]
fn a_source_revoked_in_the_middle_ends_in_a_terminate_that_says_how_far_it_got() {
    let mut side = responder();
    side.conn.set_emss(536);
    side.feed(T0, &framed(&read(KEY, 16, 2000)));
    let first = side.drain(T0, 1, usize::MAX);
    assert!(first.len() > 500, "one segment is out");
    side.mem.remove(KEY);
    let terminate = sent_terminate(&side.drain_all(T0));
    assert_eq!(terminate.code, TermCode::RDMAP_INVALID_STAG);
    let rest = *terminate.read_request().expect("RFC 5040 §4.8");
    let done = u64::from(2000 - rest.size.get());
    assert!(done > 0, "something was sent");
    assert_eq!((rest.sink_to.get(), rest.source_to.get()), (done, 16 + done));
}

#[test]
fn a_bad_crc_ends_the_connection() {
    let mut side = responder();
    side.feed(T0, &framed(&untagged(Opcode::SEND, true, QN_SEND, 1, 0, b"fine")));
    let mut bad = framed(&tagged(Opcode::WRITE, true, KEY, 0, b"bad!"));
    bad[17] ^= 1;
    side.feed(T0, &bad);
    let terminate = sent_terminate(&side.drain_all(T0));
    assert_eq!(terminate.code, TermCode::MPA_CRC);
    assert_eq!(side.mem.bytes(KEY), vec![0xee; LEN as usize], "checked before it is placed");
    assert_eq!(side.conn.stats().crc_errors, 1);
}

#[test]
fn a_responder_says_nothing_before_a_good_first_fpdu() {
    let mut side = responder();
    side.conn.post_send(SendWr::inline(1, SendOp::Send, b"early"), 1).expect("connected");
    assert_eq!(side.drain_all(T0), b"", "it waits");
    let fpdu = framed(&tagged(Opcode::WRITE, true, 1, 0, b""));
    side.feed(T0, &fpdu[..fpdu.len() - 1]);
    assert_eq!(side.drain_all(T0), b"", "it waits for all of it");
    side.feed(T0, &fpdu[fpdu.len() - 1..]);
    assert!(!side.drain_all(T0).is_empty());

    // RFC 5044 §7.1.2 rule 4: not even a Terminate, since nothing was validated.
    let mut side = responder();
    let mut bad = fpdu;
    bad[3] ^= 1;
    side.feed(T0, &bad);
    assert_eq!(side.conn.state(), QpState::Err);
    assert_eq!(side.drain_all(T0), b"");
    assert_eq!(side.shutdowns, [Shutdown::Write]);
}

#[test]
fn a_terminate_is_never_answered_and_blames_the_right_work() {
    let write = |stag: u32, to| {
        SendWr::write(1, [Sge::new(0, 8, LKey(INBOX))], RemoteAddr::new(to, RKey(stag)))
    };
    let read = |id| SendWr::read(id, [Sge::new(0, 8, LKey(INBOX))], RemoteAddr::new(0, RKey(7)));
    let mut side = responder();
    side.feed(T0, &framed(&tagged(Opcode::WRITE, true, 1, 0, b"")));
    for wr in [read(10), write(0xbad, 64), read(12)] {
        side.conn.post_send(wr.clone(), wr.id).expect("connected");
    }
    // One FPDU at a time would complete nothing: the WRITE waits behind the READ in the queue.
    side.drain_all(T0);
    let bad_write = tagged(Opcode::WRITE, true, 0xbad, 64, b"");
    let t = Terminate::new(TermCode::DDP_TAGGED_INVALID_STAG).with_segment(22, &bad_write);
    let mut payload = Vec::new();
    t.emit(&mut payload);
    let ulpdu = untagged(Opcode::TERMINATE, true, QN_TERMINATE, 1, 0, &payload);
    side.feed(T0, &framed(&ulpdu));
    assert_eq!(side.drain_all(T0), b"", "no answer to a Terminate");
    let sends: Vec<(u64, WcStatus, u32)> = side
        .wcs()
        .iter()
        .filter(|wc| !wc.opcode.is_recv())
        .map(|wc: &Wc| (wc.id, wc.status, wc.vendor_err))
        .collect();
    let vendor = u32::from(TermCode::DDP_TAGGED_INVALID_STAG.to_u16());
    assert_eq!(
        sends,
        [
            (10, WcStatus::WR_FLUSH_ERR, vendor),
            (1, WcStatus::REM_ACCESS_ERR, vendor),
            (12, WcStatus::WR_FLUSH_ERR, vendor),
        ],
        "the WRITE waits behind the READ, so it can still be told what became of it"
    );
    side.feed_eof(T0);
    assert!(matches!(side.events.last(), Some(Event::Closed(CloseReason::TerminateReceived(_)))));
}

#[test]
fn siw_s_terminate_of_a_read_blames_that_read() {
    let mut side = responder();
    side.feed(T0, &framed(&tagged(Opcode::WRITE, true, 1, 0, b"")));
    let read = |id| SendWr::read(id, [Sge::new(0, 8, LKey(INBOX))], RemoteAddr::new(0, RKey(7)));
    for id in [1, 2] {
        side.conn.post_send(read(id), id).expect("connected");
    }
    let sent = side.drain_all(T0);
    let mut scratch = Vec::new();
    let mut deframer = Deframer::new(false, true);
    let f = deframer.next(&sent, &mut scratch).expect("good").expect("whole");
    let f = deframer.next(&sent[f.consumed..], &mut scratch).expect("good").expect("whole");
    let Segment::Untagged { payload, .. } = Segment::parse(f.ulpdu).expect("whole") else {
        panic!()
    };
    let second = ReadRequest::parse(payload).expect("a READ request");
    // siw: nibbles and bits swapped, length 0, a rebuilt header whose number is the read size.
    let mut payload = vec![0x10, 0x00, 0x07, 0x00, 0, 0];
    payload.extend(untagged(Opcode::READ_REQUEST, true, QN_READ_REQUEST, 8, 0, b""));
    payload.extend_from_slice(second.as_bytes());
    let ulpdu = untagged(Opcode::TERMINATE, true, QN_TERMINATE, 1, 0, &payload);
    side.feed(T0, &framed(&ulpdu));
    let sends: Vec<_> =
        side.wcs().iter().filter(|wc| !wc.opcode.is_recv()).map(|wc| (wc.id, wc.status)).collect();
    assert_eq!(sends, [(1, WcStatus::WR_FLUSH_ERR), (2, WcStatus::REM_ACCESS_ERR)]);
}

/// What the sink of a READ takes: the answer due and nothing else.
#[test]
fn a_read_sink_takes_only_its_answer() {
    use Opcode as O;
    let start = || {
        let mut side = responder();
        side.feed(T0, &framed(&tagged(O::WRITE, true, 1, 0, b"")));
        let sink = Sge::new(500, 8, LKey(INBOX));
        let wr = SendWr::read(1, [sink], RemoteAddr::new(0, RKey(7)));
        side.conn.post_send(wr, 1).expect("connected");
        let sent = side.drain_all(T0);
        let mut scratch = Vec::new();
        let f = Deframer::new(false, true).next(&sent, &mut scratch).expect("good").expect("whole");
        let Segment::Untagged { payload, .. } = Segment::parse(f.ulpdu).expect("whole") else {
            panic!()
        };
        let request = ReadRequest::parse(payload).expect("a READ request");
        let stag = request.sink_stag.get();
        (side, stag)
    };
    let status = |side: &Side| {
        side.wcs().iter().find(|wc| wc.id == 1 && !wc.opcode.is_recv()).map(|wc| wc.status)
    };
    let (mut side, stag) = start();
    side.feed(T0, &framed(&tagged(O::READ_RESPONSE, false, stag, 0, b"abc")));
    side.feed(T0, &framed(&tagged(O::READ_RESPONSE, true, stag, 3, b"defgh")));
    assert_eq!(status(&side), Some(WcStatus::SUCCESS));
    assert_eq!(&side.mem.bytes(INBOX)[500..508], b"abcdefgh");
    side.feed(T0, &framed(&tagged(O::READ_RESPONSE, true, stag, 0, b"again!!!")));
    assert_eq!(side.conn.state(), QpState::Err, "a sink is used once");
    assert_eq!(&side.mem.bytes(INBOX)[500..508], b"abcdefgh");

    type Case = (&'static str, fn(u32) -> Vec<u8>, TermCode);
    let bad: [Case; 6] = [
        (
            "a WRITE to it",
            |stag| tagged(O::WRITE, true, stag, 0, b"abcdefgh"),
            TermCode::DDP_TAGGED_INVALID_STAG,
        ),
        (
            "another key",
            |stag| tagged(O::READ_RESPONSE, true, stag ^ 1, 0, b"abcdefgh"),
            TermCode::DDP_TAGGED_INVALID_STAG,
        ),
        (
            "another offset",
            |stag| tagged(O::READ_RESPONSE, true, stag, 1, b"abcdefg"),
            TermCode::DDP_TAGGED_BOUNDS,
        ),
        (
            "too long",
            |stag| tagged(O::READ_RESPONSE, true, stag, 0, b"abcdefghi"),
            TermCode::DDP_TAGGED_BOUNDS,
        ),
        (
            "last too early",
            |stag| tagged(O::READ_RESPONSE, true, stag, 0, b"abcdefg"),
            TermCode::RDMAP_OPERATION_UNSPECIFIED,
        ),
        (
            "not last at the end",
            |stag| tagged(O::READ_RESPONSE, false, stag, 0, b"abcdefgh"),
            TermCode::RDMAP_OPERATION_UNSPECIFIED,
        ),
    ];
    for (name, make, code) in bad {
        let (mut side, stag) = start();
        side.feed(T0, &framed(&make(stag)));
        assert_eq!(sent_terminate(&side.drain_all(T0)).code, code, "{name}");
        assert_eq!(side.mem.bytes(INBOX), vec![0; 1000], "{name}: nothing is placed");
        let expected =
            if name == "a WRITE to it" { WcStatus::WR_FLUSH_ERR } else { WcStatus::BAD_RESP_ERR };
        assert_eq!(status(&side), Some(expected), "{name}");
    }
}

/// A local mistake: the work fails with a status of its own, what was given out before it is done.
#[test]
fn a_local_mistake_fails_that_work_and_flushes_what_follows() {
    let mut side = responder();
    side.feed(T0, &framed(&tagged(Opcode::WRITE, true, 1, 0, b"")));
    let remote = RemoteAddr::new(0, RKey(7));
    let good = SendWr::write(1, [Sge::new(0, 8, LKey(INBOX))], remote);
    let bad = SendWr::write(2, [Sge::new(999, 2, LKey(INBOX))], remote);
    let late = SendWr::inline(3, SendOp::Send, b"never");
    for wr in [good, bad, late] {
        let id = wr.id;
        side.conn.post_send(wr, id).expect("connected");
    }
    let terminate = sent_terminate(&side.drain_all(T0));
    assert_eq!(terminate.code, TermCode::RDMAP_LOCAL_CATASTROPHIC);
    let sends: Vec<_> =
        side.wcs().iter().filter(|wc| !wc.opcode.is_recv()).map(|wc| (wc.id, wc.status)).collect();
    assert_eq!(
        sends,
        [(1, WcStatus::SUCCESS), (2, WcStatus::LOC_PROT_ERR), (3, WcStatus::WR_FLUSH_ERR)]
    );
    let wr = SendWr::inline(4, SendOp::Send, b"after");
    side.conn.post_send(wr, 4).expect("taken in the error state");
    side.drain_all(T0);
    let last = side.wcs().last().map(|wc| (wc.id, wc.status));
    assert_eq!(last, Some((4, WcStatus::WR_FLUSH_ERR)), "and flushed");
}

#[test]
fn half_a_message_and_then_fin_is_a_loss() {
    for cut in [
        framed(&untagged(Opcode::SEND, true, QN_SEND, 1, 0, b"xyz"))[..10].to_vec(),
        framed(&untagged(Opcode::SEND, false, QN_SEND, 1, 0, b"xyz")),
    ] {
        let mut side = responder();
        side.feed(T0, &cut);
        side.feed_eof(T0);
        assert_eq!(side.events.last(), Some(&Event::Closed(CloseReason::Lost)));
        assert!(side.wcs().iter().all(|wc| wc.status == WcStatus::WR_FLUSH_ERR));
        assert_eq!(side.done.len(), 2);
    }
}

/// siw takes a FIN that comes with the reply for no reply at all.
#[test]
fn the_fin_behind_a_reject_waits_for_the_peers() {
    let rejecting = || {
        let mut peer = Side::new(Connection::initiator(config(5, 9), b"", T0).expect("valid"));
        let mut side = Side::new(Connection::responder(config(5, 9), T0));
        side.feed(T0, &peer.drain_all(T0));
        side.conn.reject(b"no", T0).expect("there is a request");
        assert!(!side.drain_all(T0).is_empty());
        assert_eq!(side.shutdowns, []);
        side
    };
    let mut side = rejecting();
    side.feed_eof(T0);
    assert_eq!(side.shutdowns, [Shutdown::Close]);
    assert_eq!(side.conn.poll_timeout(), None, "nothing is waited for any more");
    // One that does not close gets it half a second later.
    let mut side = rejecting();
    let at = side.conn.poll_timeout().expect("a time");
    assert_eq!(at, T0 + std::time::Duration::from_millis(500));
    side.conn.handle_timeout(at);
    side.drain_all(at);
    assert_eq!(side.shutdowns, [Shutdown::Write]);
}

#[test]
fn a_peer_that_never_closes_is_cut_off_in_time() {
    let mut side = responder();
    side.feed(T0, &framed(&tagged(Opcode::WRITE, true, 1, 0, b"")));
    side.conn.close(T0);
    side.drain_all(T0);
    assert_eq!(side.shutdowns, [Shutdown::Write]);
    let deadline = side.conn.poll_timeout().expect("a deadline");
    side.conn.handle_timeout(deadline);
    side.drain_all(deadline);
    assert_eq!(side.shutdowns, [Shutdown::Write, Shutdown::Abort]);
    assert_eq!(side.events.last(), Some(&Event::Closed(CloseReason::Lost)));
}

/// Start-up frames that must not be taken.
#[test]
fn bad_requests_close_the_connection_without_an_answer() {
    let good = request(StartFlags::CRC, Some(Enhanced::default()));
    let mut wrong_key = good.clone();
    wrong_key[3] ^= 0x20;
    let mut long = good.clone();
    long[18..20].copy_from_slice(&513u16.to_be_bytes());
    let mut new_revision = good.clone();
    new_revision[17] = 3;
    let mut reply = good.clone();
    reply[..16].copy_from_slice(b"MPA ID Rep Frame");
    let mut no_room = good.clone();
    no_room[18..20].copy_from_slice(&3u16.to_be_bytes());
    let mut early = good.clone();
    early.extend(framed(b""));
    for (name, octets) in [
        ("wrong key", &wrong_key[..4]),
        ("private data too long", &long),
        ("revision 3", &new_revision),
        ("a reply", &reply),
        ("S without room for IRD and ORD", &no_room),
        ("FPDU before the reply", &early),
    ] {
        let mut side = Side::new(Connection::responder(config(5, 9), T0));
        side.feed(T0, octets);
        assert!(
            matches!(side.events.last(), Some(Event::StartupFailed(_))),
            "{name}: {:?}",
            side.events
        );
        assert_eq!(side.drain_all(T0), b"", "{name}");
        assert_eq!(side.shutdowns.len(), 1, "{name}");
    }
}

/// The initiator's side of the start-up, against scripted replies.
#[test]
fn an_initiator_follows_the_reply() {
    let connect = |p2p: bool, flags: StartFlags, enhanced: Option<Enhanced>| {
        let mut c = config(5, 9);
        (c.ird, c.ord) = (4, 8);
        c.mpa.peer_to_peer = p2p;
        let mut side = Side::new(Connection::initiator(c, b"", T0).expect("valid"));
        assert_eq!(side.drain_all(T0).len(), 24);
        let mut reply = Vec::new();
        let revision = if enhanced.is_some() { 2 } else { 1 };
        let kind = StartKind::Reply;
        Start { kind, flags, revision, enhanced, private_data: b"yes" }.emit(&mut reply);
        side.feed(T0, &reply);
        side
    };
    let established = |side: &Side| match side.events.first() {
        Some(Event::Established(e)) => e.clone(),
        other => panic!("{other:?}"),
    };
    // IRD and ORD (RFC 6581 §9.1).
    let side = connect(
        false,
        StartFlags::empty(),
        Some(Enhanced { ird: 3, ord: 2, ..Enhanced::default() }),
    );
    let e = established(&side);
    assert_eq!((e.ird, e.ord, e.crc, e.private_data.as_slice()), (4, 3, true, &b"yes"[..]));
    let side = connect(
        false,
        StartFlags::empty(),
        Some(Enhanced { ird: 0x3fff, ord: 0x3fff, ..Enhanced::default() }),
    );
    assert_eq!((established(&side).ird, established(&side).ord), (4, 8), "left to the programs");
    let side = connect(false, StartFlags::empty(), None);
    assert_eq!((established(&side).ird, established(&side).ord), (4, 8), "as configured");
    let mut side =
        connect(false, StartFlags::CRC, Some(Enhanced { ird: 3, ord: 5, ..Enhanced::default() }));
    assert_eq!(sent_terminate(&side.drain_all(T0)).code, TermCode::MPA_INSUFFICIENT_IRD);

    // RTR (RFC 6581 §9.2): the reply decides, a WRITE is preferred, no match is a Terminate.
    let p2p = |rtr: RtrKinds| Enhanced {
        ird: 4,
        ord: 4,
        peer_to_peer: true,
        rtr_send: rtr.contains(RtrKinds::SEND),
        rtr_write: rtr.contains(RtrKinds::WRITE),
        rtr_read: rtr.contains(RtrKinds::READ),
    };
    for (offered, op) in [
        (RtrKinds::all(), Opcode::WRITE),
        (RtrKinds::WRITE, Opcode::WRITE),
        (RtrKinds::READ | RtrKinds::SEND, Opcode::READ_REQUEST),
        (RtrKinds::SEND, Opcode::SEND),
    ] {
        let mut side = connect(true, StartFlags::CRC, Some(p2p(offered)));
        let sent = side.drain_all(T0);
        let mut scratch = Vec::new();
        let f = Deframer::new(false, true).next(&sent, &mut scratch).expect("good").expect("whole");
        let segment = Segment::parse(f.ulpdu).expect("whole");
        assert_eq!(segment.opcode(), op, "{offered:?}");
        if let Segment::Tagged { header, payload } = segment {
            assert_ne!(header.stag(), Stag(0), "Chelsio refuses 0");
            assert!(payload.is_empty());
        }
        assert_eq!(f.consumed, sent.len());
        assert_eq!(side.done.len(), 0, "the program sees nothing of it");
    }
    let mut side = connect(true, StartFlags::CRC, Some(p2p(RtrKinds::empty())));
    assert_eq!(sent_terminate(&side.drain_all(T0)).code, TermCode::MPA_NO_MATCHING_RTR);

    // A reject, and a peer that closes without a word.
    let side = connect(false, StartFlags::REJECT, Some(Enhanced::default()));
    assert!(matches!(
        side.events.last(),
        Some(Event::StartupFailed(StartupError::Rejected { private_data, .. })) if private_data == b"yes"
    ));
    let mut side = Side::new(Connection::initiator(config(5, 9), b"", T0).expect("valid"));
    side.drain_all(T0);
    side.feed_eof(T0);
    assert_eq!(side.events, [Event::StartupFailed(StartupError::ClosedSilently)]);
    let mut side = Side::new(Connection::initiator(config(5, 9), b"", T0).expect("valid"));
    side.drain_all(T0);
    side.feed(T0, b"MPA");
    side.feed_eof(T0);
    assert_eq!(side.events, [Event::StartupFailed(StartupError::Lost)]);
}

/// siw, as responder, overlooks an FPDU right behind its reply until more octets come.
#[test]
fn an_initiator_that_hears_nothing_sends_one_empty_write() {
    let mut side = Side::new(Connection::initiator(config(5, 9), b"", T0).expect("valid"));
    side.drain_all(T0);
    let mut reply = Vec::new();
    let enhanced = Some(Enhanced { ird: 1, ord: 1, ..Enhanced::default() });
    let kind = StartKind::Reply;
    Start { kind, flags: StartFlags::CRC, revision: 2, enhanced, private_data: b"" }
        .emit(&mut reply);
    side.feed(T0, &reply);
    assert_eq!(side.conn.poll_timeout(), None, "nothing was sent");
    side.conn.post_send(SendWr::inline(1, SendOp::Send, b"hello"), 1).expect("connected");
    side.drain_all(T0);
    let at = side.conn.poll_timeout().expect("a time to look again");
    assert!(at > T0);
    side.conn.handle_timeout(at);
    assert_eq!(side.drain_all(at), framed(&tagged(Opcode::WRITE, true, 1, 0, b"")));
    assert_eq!(side.conn.poll_timeout(), None, "once");
    assert_eq!(side.done.len(), 1, "the program sees only its own work");

    // Who hears something in time sends nothing.
    let mut side = responder();
    side.feed(T0, &framed(&tagged(Opcode::WRITE, true, 1, 0, b"")));
    side.conn.post_send(SendWr::inline(1, SendOp::Send, b"hello"), 1).expect("connected");
    side.drain_all(T0);
    assert_eq!(side.conn.poll_timeout(), None);
}

/// All three ready-to-receive indications in both roles, and a responder that speaks first.
#[test]
fn peer_to_peer_lets_the_responder_speak_first() {
    for kind in [RtrKinds::SEND, RtrKinds::WRITE, RtrKinds::READ] {
        let (mut a, mut b) = (config(1, 2), config(2, 3));
        a.mpa.peer_to_peer = true;
        a.mpa.rtr = kind;
        (b.ird, a.ord) = (0, 0);
        // Access flags of the queue pair are the program's matter, not the indication's.
        b.remote_access = Access::empty();
        let mut pair = userdma_tests::Pair::new(a, b, b"", 1);
        pair.sides[0].mem.add(INBOX, PD, Access::LOCAL_WRITE, 0, vec![0; 16]);
        let recv = RecvWr::new(1, [Sge::new(0, 16, LKey(INBOX))]);
        pair.sides[0].conn.post_recv(recv, 1).expect("room");
        pair.connect();
        pair.sides[1]
            .conn
            .post_send(SendWr::inline(2, SendOp::Send, b"responder first"), 2)
            .expect("connected");
        pair.run(10_000);
        assert_eq!(&pair.sides[0].mem.bytes(INBOX)[..15], b"responder first", "{kind:?}");
        assert_eq!(pair.sides[0].done.len(), 1, "{kind:?}: nothing but the receive");
        assert_eq!(pair.sides[1].done.len(), 1, "{kind:?}: nothing but the send");
        // The SEND queue's numbers go on behind a SEND that was an indication.
        pair.sides[1].conn.post_recv(RecvWr::new(3, []), 3).expect("room");
        pair.sides[0].conn.post_send(SendWr::inline(4, SendOp::Send, b""), 4).expect("connected");
        pair.run(10_000);
        assert_eq!(
            pair.sides[1].wcs().last().map(|wc| (wc.id, wc.status)),
            Some((3, WcStatus::SUCCESS))
        );
    }
}
