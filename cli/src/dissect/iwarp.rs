//! iWARP in words: what a frame completes of MPA streams.

use userdma_proto::{
    dissect::{CrcState, DdpHeader, Fpdu, Iwarp, Markers, Operation, Start},
    wire::iwarp::{
        ddp::UntaggedHeader,
        mpa::{StartFlags, StartKind},
        rdmap::{AtomicOpcode, AtomicRequest},
        terminate::Terminate,
    },
};

use super::{
    fields::{both_codes, rdmap_name},
    line::{Line, Style},
    text::{octets, private_data, wrong},
};

/// All that was found, one behind the other; what is alike in a row is told once.
pub(super) fn found(line: &mut Line, all: &[Iwarp]) {
    let mut rest = all;
    while let Some(first) = rest.first() {
        if rest.len() < all.len() {
            line.text(" | ");
        }
        let mut run = 1;
        match first {
            Iwarp::Start(frame) => start(line, frame),
            Iwarp::Fpdu(first) => {
                let row = row(rest);
                run = row.as_ref().map_or(1, |row| row.len);
                fpdu(line, first, row);
            }
            Iwarp::Error(error) => line.paint(Style::Bad, |line| {
                line.text("error: ");
                line.text(error);
            }),
        }
        rest = &rest[run..];
    }
}

/// How an FPDU goes on from the one before it, where it says nothing else that is new.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    /// With the queue's next message.
    Message,
    /// With the message's next segment.
    Segment,
    /// With the same key, at the address behind.
    Behind,
    /// With the same key, somewhere else.
    Elsewhere,
}

/// Several FPDUs that are told as one.
struct Row<'a> {
    len: usize,
    step: Step,
    last: &'a DdpHeader,
}

/// The FPDUs at the front of `all` that go on in the same way, if they are several.
fn row(all: &[Iwarp]) -> Option<Row<'_>> {
    let first = step(all.first()?, all.get(1)?)?;
    let more = all.windows(2).take_while(|pair| step(&pair[0], &pair[1]) == Some(first)).count();
    match all.get(more) {
        Some(Iwarp::Fpdu(Fpdu { header: Some(last), .. })) => {
            Some(Row { len: more + 1, step: first, last })
        }
        _ => None,
    }
}

fn step(found: &Iwarp, next: &Iwarp) -> Option<Step> {
    let (Iwarp::Fpdu(a), Iwarp::Fpdu(b)) = (found, next) else { return None };
    let plain = |fpdu: &Fpdu| {
        fpdu.error.is_none()
            && matches!(fpdu.operation, Operation::None)
            && !crc_is_wrong(fpdu)
            && fpdu.markers != Markers::OffGrid
    };
    if !plain(a) || !plain(b) || a.payload_len != b.payload_len {
        return None;
    }
    let len = a.payload_len;
    match (a.header.as_ref()?, b.header.as_ref()?) {
        (DdpHeader::Tagged(a), DdpHeader::Tagged(b)) => {
            let alike = (a.control, a.rdmap, a.stag) == (b.control, b.rdmap, b.stag);
            let behind = a.to.get().checked_add(len.into()) == Some(b.to.get());
            alike.then_some(if behind { Step::Behind } else { Step::Elsewhere })
        }
        (DdpHeader::Untagged(a), DdpHeader::Untagged(b)) => {
            let front = |header: &UntaggedHeader| {
                (header.control, header.rdmap, header.invalidate_stag, header.qn)
            };
            if front(a) != front(b) {
                None
            } else if a.msn().next() == b.msn() && a.mo == b.mo {
                Some(Step::Message)
            } else {
                let behind = a.mo.get().checked_add(len.into()) == Some(b.mo.get());
                (a.msn == b.msn && behind).then_some(Step::Segment)
            }
        }
        _ => None,
    }
}

fn start(line: &mut Line, start: &Start) {
    let is_reply = start.kind == StartKind::Reply;
    line.paint(Style::Name, |line| line.text(if is_reply { "MPA reply" } else { "MPA request" }));
    line.text("  revision ");
    line.num(start.revision);
    if start.flags.contains(StartFlags::REJECT) {
        line.text(", ");
        line.paint(Style::Bad, |line| line.text("REJECTED"));
    }
    line.text(if start.flags.contains(StartFlags::CRC) { ", CRC" } else { ", no CRC" });
    line.text(if start.flags.contains(StartFlags::MARKERS) { ", markers" } else { ", no markers" });
    if let Some(enhanced) = &start.enhanced {
        line.text(", IRD ");
        line.num(enhanced.ird);
        line.text(", ORD ");
        line.num(enhanced.ord);
        if enhanced.peer_to_peer {
            line.text(", peer to peer by");
            let any = [
                (enhanced.rtr_write, " WRITE"),
                (enhanced.rtr_read, " READ"),
                (enhanced.rtr_send, " SEND"),
            ];
            for (_, name) in any.iter().filter(|(on, _)| *on) {
                line.text(name);
            }
            if !any.iter().any(|(on, _)| *on) {
                line.text(" nothing");
            }
        }
    }
    if let Some((ird, ord)) = start.legacy_ird_ord {
        line.text(", perhaps IRD ");
        line.num(ird);
        line.text(", ORD ");
        line.num(ord);
    }
    private_data(line, &start.private_data);
}

/// In use and not right.
pub(super) fn crc_is_wrong(fpdu: &Fpdu) -> bool {
    match fpdu.crc {
        CrcState::Good => false,
        // RFC 5044 §7.1.1: without CRC any value goes.
        CrcState::Bad => fpdu.crc_in_use != Some(false),
        CrcState::Zero => fpdu.crc_in_use == Some(true),
    }
}

fn fpdu(line: &mut Line, fpdu: &Fpdu, row: Option<Row<'_>>) {
    if let Some(header) = &fpdu.header {
        let opcode = header.opcode();
        let is_known = rdmap_name(opcode).is_some();
        line.paint(if is_known { Style::Name } else { Style::Warn }, |line| {
            match rdmap_name(opcode) {
                Some(name) => line.text(name),
                None => {
                    line.text("opcode ");
                    line.hex_of(opcode.0.into(), 1);
                }
            }
        });
        if let Some(row) = &row {
            line.text(" x ");
            line.num(row.len);
        }
        place(line, header, row.as_ref());
        match &fpdu.operation {
            Operation::None => {
                line.text("  ");
                octets(line, fpdu.payload_len.into());
                line.text(if row.is_some() { " each" } else { "" });
            }
            other => operation(line, other),
        }
        if header.opcode().invalidates()
            && let DdpHeader::Untagged(header) = header
        {
            line.text("  revokes ");
            line.hex_of(header.invalidate_stag().0.into(), 8);
        }
        if !header.last() {
            line.text(", more");
        }
    } else {
        line.paint(Style::Warn, |line| line.text("FPDU"));
        line.text("  ");
        octets(line, fpdu.ulpdu_len.into());
    }
    if crc_is_wrong(fpdu) {
        wrong(line, "", if fpdu.crc == CrcState::Zero { "CRC ZERO" } else { "CRC BAD" });
    }
    if fpdu.markers == Markers::OffGrid {
        line.text("  ");
        line.paint(Style::Warn, |line| line.text("markers off their grid"));
    }
    if let Some(error) = &fpdu.error {
        wrong(line, "error: ", error);
    }
}

/// Where the segment goes, and the last one of a row.
fn place(line: &mut Line, header: &DdpHeader, row: Option<&Row<'_>>) {
    match header {
        DdpHeader::Tagged(header) => {
            line.text("  to ");
            line.hex_of(header.stag().0.into(), 8);
            line.byte(b':');
            line.hex(header.to.get());
        }
        DdpHeader::Untagged(header) => {
            line.text("  MSN ");
            line.num(header.msn().0);
            if header.mo.get() != 0 || row.is_some_and(|row| row.step == Step::Segment) {
                line.text(" at ");
                line.num(header.mo.get());
            }
        }
    }
    match row.map(|row| (row.step, row.last)) {
        Some((Step::Message, DdpHeader::Untagged(last))) => {
            line.text("..");
            line.num(last.msn().0);
        }
        Some((Step::Segment, DdpHeader::Untagged(last))) => {
            line.text("..");
            line.num(last.mo.get());
        }
        Some((Step::Behind, DdpHeader::Tagged(last))) => {
            line.text("..");
            line.hex(last.to.get());
        }
        Some(_) => line.text("..."),
        None => {}
    }
}

fn operation(line: &mut Line, operation: &Operation) {
    match operation {
        Operation::None => {}
        Operation::ReadRequest(request) => {
            line.text("  ");
            octets(line, request.size.get().into());
            line.text(" from ");
            line.hex_of(request.source_stag.get().into(), 8);
            line.byte(b':');
            line.hex(request.source_to.get());
            line.text(" into ");
            line.hex_of(request.sink_stag.get().into(), 8);
            line.byte(b':');
            line.hex(request.sink_to.get());
        }
        Operation::Immediate(data) => {
            line.text("  imm ");
            line.hex_of(*data, 16);
        }
        Operation::AtomicRequest(request) => atomic(line, request),
        Operation::AtomicResponse(response) => {
            line.text("  id ");
            line.hex_of(response.request_id.get().into(), 8);
            line.text(" was ");
            line.hex(response.original.get());
        }
        Operation::Terminate(found, octets) => terminate(line, found, octets),
    }
}

fn atomic(line: &mut Line, request: &AtomicRequest) {
    line.text("  id ");
    line.hex_of(request.request_id.get().into(), 8);
    line.byte(b' ');
    line.display(request.operation());
    line.text(" at ");
    line.hex_of(request.stag.get().into(), 8);
    line.byte(b':');
    line.hex(request.to.get());
    let masked = |line: &mut Line, n: u64, mask: u64, plain: u64| {
        line.hex(n);
        if mask != plain {
            line.text(" mask ");
            line.hex(mask);
        }
    };
    // RFC 7306 §5.1: an addition without field boundaries and a swap of all bits are the plain
    // forms.
    let is_swap = request.operation() == AtomicOpcode::CMP_SWAP;
    if is_swap {
        line.text(", if ");
        masked(line, request.compare_data.get(), request.compare_mask.get(), u64::MAX);
        line.text(" then ");
    } else {
        line.text(", add ");
    }
    let plain = if is_swap { u64::MAX } else { 0 };
    masked(line, request.add_swap_data.get(), request.add_swap_mask.get(), plain);
}

fn terminate(line: &mut Line, terminate: &Terminate, octets: &[u8]) {
    line.text("  ");
    line.paint(Style::Bad, |line| line.display(terminate));
    if let Some((rfc, siw)) = both_codes(octets).filter(|_| terminate.swapped) {
        line.text("  ");
        line.paint(Style::Dim, |line| {
            line.text("(siw's form");
            if rfc != siw {
                line.text("; by RFC 5040 it would be ");
                line.display(rfc);
            }
            line.byte(b')');
        });
    }
}

#[cfg(test)]
mod tests {
    use super::{super::sample::*, *};
    use userdma_proto::wire::{
        ids::{Msn, Stag},
        iwarp::{
            mpa::Enhanced,
            rdmap::{AtomicResponse, Opcode, ReadRequest},
        },
    };

    fn told(all: Vec<Iwarp>) -> String {
        written(|line| found(line, &all))
    }

    #[test]
    fn start_up() {
        let mut request = Start {
            kind: StartKind::Request,
            flags: StartFlags::ENHANCED | StartFlags::CRC,
            revision: 2,
            enhanced: Some(Enhanced { ird: 8, ord: 16, ..Enhanced::default() }),
            legacy_ird_ord: None,
            private_data: b"hello".to_vec(),
        };
        let one = |start: &Start| told(vec![Iwarp::Start(Box::new(start.clone()))]);
        assert_eq!(
            one(&request),
            "MPA request  revision 2, CRC, no markers, IRD 8, ORD 16  private data \"hello\""
        );
        let enhanced = request.enhanced.as_mut().unwrap();
        (enhanced.peer_to_peer, enhanced.rtr_write, enhanced.rtr_read) = (true, true, true);
        assert!(one(&request).contains("ORD 16, peer to peer by WRITE READ  private"));
        let reply = Start {
            kind: StartKind::Reply,
            flags: StartFlags::REJECT | StartFlags::MARKERS,
            revision: 1,
            enhanced: None,
            legacy_ird_ord: Some((1, 2)),
            private_data: Vec::new(),
        };
        assert_eq!(
            one(&reply),
            "MPA reply  revision 1, REJECTED, no CRC, markers, perhaps IRD 1, ORD 2"
        );
    }

    #[test]
    fn operations() {
        let one = |fpdu| told(vec![Iwarp::Fpdu(fpdu)]);
        assert_eq!(one(fpdu_of(untagged(Opcode::SEND, 0, 3), 100)), "SEND  MSN 3  100 B");
        let part = UntaggedHeader::new(Opcode::SEND_INV, false, 0, Msn(3), 1424, Stag(0x99));
        assert_eq!(
            one(fpdu_of(DdpHeader::Untagged(part), 1424)),
            "SEND_INV  MSN 3 at 1424  1424 B  revokes 0x00000099, more"
        );
        assert_eq!(
            one(fpdu_of(tagged(Opcode::WRITE, true, 0x7000), 5)),
            "RDMA_WRITE  to 0x00001234:0x7000  5 B"
        );
        let mut read = fpdu_of(untagged(Opcode::READ_REQUEST, 1, 1), 28);
        read.operation = Operation::ReadRequest(ReadRequest::new((Stag(5), 6), 7, (Stag(8), 9)));
        assert_eq!(one(read), "READ_REQUEST  MSN 1  7 B from 0x00000008:0x9 into 0x00000005:0x6");
        let mut imm = fpdu_of(untagged(Opcode::IMMEDIATE, 0, 1), 8);
        imm.operation = Operation::Immediate(0x1234);
        assert_eq!(one(imm), "IMMEDIATE  MSN 1  imm 0x0000000000001234");
        let mut atomic = fpdu_of(untagged(Opcode::ATOMIC_REQUEST, 1, 1), 52);
        let mut request = AtomicRequest {
            opcode: 0.into(),
            request_id: 1.into(),
            stag: 2.into(),
            to: 3.into(),
            add_swap_data: 4.into(),
            add_swap_mask: 0.into(),
            compare_data: 5.into(),
            compare_mask: 6.into(),
        };
        atomic.operation = Operation::AtomicRequest(request);
        assert_eq!(
            one(atomic.clone()),
            "ATOMIC_REQUEST  MSN 1  id 0x00000001 FETCH_ADD at 0x00000002:0x3, add 0x4"
        );
        (request.opcode, request.add_swap_mask) = (2.into(), u64::MAX.into());
        atomic.operation = Operation::AtomicRequest(request);
        assert!(one(atomic).ends_with("CMP_SWAP at 0x00000002:0x3, if 0x5 mask 0x6 then 0x4"));
        let mut response = fpdu_of(untagged(Opcode::ATOMIC_RESPONSE, 3, 1), 12);
        response.operation =
            Operation::AtomicResponse(AtomicResponse { request_id: 1.into(), original: 9.into() });
        assert_eq!(one(response), "ATOMIC_RESPONSE  MSN 1  id 0x00000001 was 0x9");
        assert!(one(fpdu_of(untagged(Opcode(15), 0, 1), 3)).starts_with("opcode 0xf  MSN 1  3 B"));
    }

    #[test]
    fn a_terminate_is_told_in_words() {
        let one = |octets: &[u8]| {
            let mut end = fpdu_of(untagged(Opcode::TERMINATE, 2, 1), octets.len() as u16);
            end.operation =
                Operation::Terminate(Box::new(Terminate::parse(octets).unwrap()), octets.to_vec());
            told(vec![Iwarp::Fpdu(end)])
        };
        assert_eq!(
            one(&[0x01, 0x01, 0, 0]),
            "TERMINATE  MSN 1  RDMAP remote protection error: base or bounds violation"
        );
        // siw's MPA CRC error.
        assert_eq!(
            one(&[0x02, 0x02, 0, 0]),
            "TERMINATE  MSN 1  MPA error: CRC mismatch  \
             (siw's form; by RFC 5040 it would be RDMAP remote operation error: code 0x02)"
        );
    }

    #[test]
    fn what_is_alike_is_told_once() {
        let sends = (3..13).map(|msn| Iwarp::Fpdu(fpdu_of(untagged(Opcode::SEND, 0, msn), 8)));
        let writes = (0..3).map(|i| Iwarp::Fpdu(fpdu_of(tagged(Opcode::WRITE, true, 8 * i), 8)));
        let mut all: Vec<_> = sends.chain(writes).collect();
        assert_eq!(
            told(all.clone()),
            "SEND x 10  MSN 3..12  8 B each | RDMA_WRITE x 3  to 0x00001234:0x0..0x10  8 B each"
        );
        let Iwarp::Fpdu(fifth) = &mut all[4] else { unreachable!() };
        (fifth.crc, fifth.crc_in_use) = (CrcState::Bad, Some(true));
        assert_eq!(
            told(all),
            "SEND x 4  MSN 3..6  8 B each | SEND  MSN 7  8 B  CRC BAD | \
             SEND x 5  MSN 8..12  8 B each | RDMA_WRITE x 3  to 0x00001234:0x0..0x10  8 B each"
        );
    }

    #[test]
    fn segments_of_a_message_are_a_row() {
        let part = |last, mo| {
            let header = UntaggedHeader::new(Opcode::SEND, last, 0, Msn(1), mo, Stag(0));
            Iwarp::Fpdu(fpdu_of(DdpHeader::Untagged(header), 1000))
        };
        let mut all: Vec<_> = (0..5).map(|i| part(false, 1000 * i)).collect();
        all.push(part(true, 5000));
        assert_eq!(
            told(all),
            "SEND x 5  MSN 1 at 0..4000  1000 B each, more | SEND  MSN 1 at 5000  1000 B"
        );
        let write = |to| Iwarp::Fpdu(fpdu_of(tagged(Opcode::WRITE, false, to), 16));
        assert_eq!(
            told([0, 16, 32, 8, 0x80, 0x90].map(write).to_vec()),
            "RDMA_WRITE x 3  to 0x00001234:0x0..0x20  16 B each, more | \
             RDMA_WRITE x 2  to 0x00001234:0x8...  16 B each, more | \
             RDMA_WRITE  to 0x00001234:0x90  16 B, more"
        );
        // An address cannot wrap.
        let end = [u64::MAX - 15, 0].map(write).to_vec();
        assert!(told(end).starts_with("RDMA_WRITE x 2  to 0x00001234:0xfffffffffffffff0...  16"));
    }

    #[test]
    fn a_crc_is_wrong_only_where_it_may_be_in_use() {
        let wrong = |crc, in_use| {
            crc_is_wrong(&Fpdu {
                crc,
                crc_in_use: in_use,
                ..fpdu_of(untagged(Opcode::SEND, 0, 1), 0)
            })
        };
        let all = [Some(true), None, Some(false)];
        assert_eq!(all.map(|in_use| wrong(CrcState::Good, in_use)), [false; 3]);
        assert_eq!(all.map(|in_use| wrong(CrcState::Bad, in_use)), [true, true, false]);
        assert_eq!(all.map(|in_use| wrong(CrcState::Zero, in_use)), [true, false, false]);
    }

    #[test]
    fn what_cannot_be_followed_says_so() {
        let mut broken = fpdu_of(untagged(Opcode::SEND, 0, 1), 0);
        broken.header = None;
        broken.ulpdu_len = 3;
        broken.error = Some("DDP: too short".into());
        broken.markers = Markers::OffGrid;
        assert_eq!(
            told(vec![Iwarp::Fpdu(broken), Iwarp::Error("octets are missing".into())]),
            "FPDU  3 B  markers off their grid  error: DDP: too short | error: octets are missing"
        );
    }
}
