//! iWARP in words: what a frame completes of MPA streams.

use userdma_proto::{
    dissect::{CrcState, DdpHeader, Fpdu, Iwarp, Markers, Operation, Start},
    wire::iwarp::{
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
            Iwarp::Fpdu(found) => {
                run += rest.windows(2).take_while(|pair| continues(&pair[0], &pair[1])).count();
                fpdu(line, found, run as u64);
            }
            Iwarp::Error(error) => wrong(line, "error: ", error),
        }
        rest = &rest[run..];
    }
}

/// Whether `next` says nothing new: the next message of a queue, or of the same key, of the same
/// length.
fn continues(found: &Iwarp, next: &Iwarp) -> bool {
    let (Iwarp::Fpdu(a), Iwarp::Fpdu(b)) = (found, next) else { return false };
    let plain = |fpdu: &Fpdu| {
        fpdu.error.is_none()
            && matches!(fpdu.operation, Operation::None)
            && !crc_is_wrong(fpdu)
            && fpdu.markers != Markers::OffGrid
    };
    let follows = match (&a.header, &b.header) {
        (Some(DdpHeader::Tagged(a)), Some(DdpHeader::Tagged(b))) => {
            (a.control, a.rdmap, a.stag) == (b.control, b.rdmap, b.stag)
        }
        (Some(DdpHeader::Untagged(a)), Some(DdpHeader::Untagged(b))) => {
            (a.control, a.rdmap, a.invalidate_stag, a.qn, a.mo)
                == (b.control, b.rdmap, b.invalidate_stag, b.qn, b.mo)
                && a.msn().next() == b.msn()
        }
        _ => false,
    };
    plain(a) && plain(b) && a.payload_len == b.payload_len && follows
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

fn fpdu(line: &mut Line, fpdu: &Fpdu, run: u64) {
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
        if run > 1 {
            line.text(" x ");
            line.num(run);
        }
        place(line, header, run);
        match &fpdu.operation {
            Operation::None => {
                line.text("  ");
                octets(line, fpdu.payload_len.into());
                line.text(if run > 1 { " each" } else { "" });
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

/// Where the segment goes.
fn place(line: &mut Line, header: &DdpHeader, run: u64) {
    match header {
        DdpHeader::Tagged(header) => {
            line.text("  to ");
            line.hex_of(header.stag().0.into(), 8);
            line.byte(b':');
            line.hex(header.to.get());
            if run > 1 {
                line.text("...");
            }
        }
        DdpHeader::Untagged(header) => {
            line.text("  MSN ");
            line.num(header.msn().0);
            if run > 1 {
                line.text("..");
                line.num(header.msn().0.wrapping_add(run as u32 - 1));
            }
            if header.mo.get() != 0 {
                line.text(" at ");
                line.num(header.mo.get());
            }
        }
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
    if let Some((rfc, _)) = both_codes(octets).filter(|_| terminate.swapped) {
        line.text("  ");
        line.paint(Style::Dim, |line| {
            line.text("(siw's form; by RFC 5040 it would be ");
            line.display(rfc);
            line.byte(b')');
        });
    }
}
