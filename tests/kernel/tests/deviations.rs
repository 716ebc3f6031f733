//! The captures of `docs/peers/`: each shows what `docs/peers.md` says of siw or rxe.

#[allow(dead_code, reason = "the lab asks more")]
#[path = "../src/wire.rs"]
mod wire;

use std::{
    collections::BTreeSet,
    fs,
    net::{IpAddr, Ipv4Addr},
    path::PathBuf,
};

use userdma_proto::{
    dissect::{CrcState, Frame},
    wire::{
        iwarp::{mpa::StartFlags, rdmap::Opcode},
        roce::aeth::{NakCode, Syndrome},
    },
};

/// TCP's flags.
const FIN: u8 = 1;
const RST: u8 = 4;

const OURS: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 99, 0, 1));
const THEIRS: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 99, 0, 2));

fn docs() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../docs")
}

fn capture(name: &str) -> Vec<Frame> {
    let records =
        userdma_tests::captures::records(&docs().join(format!("peers/{name}.pcap"))).unwrap();
    userdma_tests::captures::dissect(&records, 1 << 18)
}

/// The start-up of both sides: request and reply.
fn flags(name: &str) -> Vec<(IpAddr, StartFlags)> {
    wire::starts(&capture(name)).map(|(from, start)| (from, start.flags)).collect()
}

#[test]
fn each_capture_is_named_and_each_name_is_a_capture() {
    let text = fs::read_to_string(docs().join("peers.md")).unwrap();
    let named: BTreeSet<_> = text
        .split('`')
        .filter_map(|word| word.strip_prefix("peers/"))
        .map(|name| format!("{name}.pcap"))
        .collect();
    let there: BTreeSet<_> = fs::read_dir(docs().join("peers"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    assert_eq!(named, there);
    for name in text.split('`').filter_map(|word| word.strip_prefix("pcaps/")) {
        let folder = docs().join("../pcaps");
        let known = name.is_empty() || folder.join(format!("{name}.pcap")).exists();
        assert!(known, "pcaps/{name}");
    }
}

#[test]
fn a_terminate_has_its_halves_swapped() {
    // Layer RDMAP, type remote protection: by RFC 5040 §4.8 the first octet is 0x01.
    let found = wire::terminates(&capture("siw-errors-stag_read_ours_to_theirs"), THEIRS);
    assert_eq!(found.len(), 1);
    assert_eq!(found[0][..2], [0x10, 0]);
}

#[test]
fn a_receive_that_is_too_small() {
    // By RFC 5041 §7.2 code 5, and the first octet 0x12.
    let found = wire::terminates(&capture("siw-errors-receive_too_small_ours_to_theirs"), THEIRS);
    assert_eq!(found.len(), 1);
    assert_eq!(found[0][..2], [0x21, 2]);
    let syndromes =
        wire::syndromes(&capture("rxe-errors-receive_too_small_ours_to_theirs"), THEIRS);
    let last = Syndrome::Nak(NakCode::REMOTE_OPERATIONAL);
    assert_eq!(syndromes.last(), Some(&last), "and not that the request is invalid");
}

#[test]
fn the_crc_of_siw() {
    // mpa_crc_required is set: as a responder it does not raise C, as an initiator it asks for it.
    let [(OURS, request), (THEIRS, reply)] = flags("siw-start-crc_theirs_server")[..] else {
        panic!()
    };
    assert!(!request.contains(StartFlags::CRC) && !reply.contains(StartFlags::CRC));
    let frames = capture("siw-start-crc_theirs_server");
    assert!(wire::fpdus(&frames).all(|(_, fpdu)| fpdu.crc_in_use == Some(false)));
    let [(THEIRS, request), (OURS, reply)] = flags("siw-start-crc_theirs_client")[..] else {
        panic!()
    };
    assert!(request.contains(StartFlags::CRC) && reply.contains(StartFlags::CRC));
    // Where it does not ask, and our reply raises C, it uses it.
    let [(THEIRS, request), (OURS, reply)] = flags("siw-errors-stag_write_theirs_to_ours")[..]
    else {
        panic!()
    };
    assert!(!request.contains(StartFlags::CRC) && reply.contains(StartFlags::CRC));
    let frames = capture("siw-errors-stag_write_theirs_to_ours");
    let crcs: Vec<_> = wire::fpdus(&frames)
        .filter(|(from, _)| *from == THEIRS)
        .map(|(_, fpdu)| fpdu.crc)
        .collect();
    assert!(!crcs.is_empty() && crcs.iter().all(|crc| *crc == CrcState::Good), "{crcs:?}");
}

#[test]
fn requests_that_siw_rejects() {
    let [(OURS, request), (THEIRS, reply)] = flags("siw-start-markers_are_refused")[..] else {
        panic!()
    };
    assert!(request.contains(StartFlags::MARKERS) && reply.contains(StartFlags::REJECT));
    let [(OURS, request), (THEIRS, reply)] = flags("siw-start-strict_refuses_our_crc")[..] else {
        panic!()
    };
    assert!(request.contains(StartFlags::CRC) && reply.contains(StartFlags::REJECT));
}

#[test]
fn revision_1_tells_no_depths() {
    let frames = capture("siw-start-rev1_server");
    assert!(wire::starts(&frames).all(|(_, start)| start.revision == 1));
    // rping's server would READ now, but has no depth to do it with.
    let sent: Vec<_> = wire::fpdus(&frames).map(|(from, _)| from).collect();
    assert_eq!(sent, [OURS]);
}

#[test]
fn data_right_behind_the_reply() {
    let frames = capture("siw-ucmatose-server");
    let first = wire::fpdus(&frames).next().expect("an FPDU").0;
    assert_eq!(first, THEIRS, "the responder sends first, though no peer-to-peer was agreed on");
    // siw as the initiator does not take that from another siw: nothing of its own follows but a reset.
    let frames = capture("siw-both-ucmatose");
    let responder = IpAddr::V4(Ipv4Addr::new(10, 99, 0, 3));
    assert!(wire::fpdus(&frames).all(|(from, _)| from == responder));
    let resets: Vec<_> = frames
        .iter()
        .filter(|frame| frame.tcp.is_some_and(|tcp| tcp.flags & RST != 0))
        .map(|frame| frame.ends.expect("TCP").src)
        .collect();
    assert_eq!(resets, [THEIRS]);
    // From us it takes nothing, for we wait: nobody begins.
    let frames = capture("siw-ucmatose-we_hold_back");
    assert_eq!((wire::starts(&frames).count(), wire::fpdus(&frames).count()), (2, 0));
}

#[test]
fn a_fin_right_behind_a_reject() {
    let frames = capture("siw-connect-reject_theirs_to_ours");
    let reply = wire::starts(&frames).last().expect("a reply");
    assert!(reply.0 == OURS && reply.1.flags.contains(StartFlags::REJECT));
    let ends: Vec<_> = frames
        .iter()
        .filter_map(|frame| Some((frame.ends?.src, frame.tcp?.flags & (FIN | RST))))
        .filter(|(_, flags)| *flags != 0)
        .collect();
    assert_eq!(ends, [(OURS, FIN), (THEIRS, RST)]);
}

#[test]
fn nothing_follows_a_terminate_of_ours() {
    let frames = capture("siw-errors-stag_write_theirs_to_ours");
    assert_eq!(wire::terminates(&frames, OURS).len(), 1);
    let last = frames.iter().rfind(|frame| !frame.iwarp.is_empty()).expect("the TERMINATE");
    assert_eq!(last.ends.expect("TCP").src, OURS);
}

#[test]
fn a_terminate_of_ours_that_refuses_a_read() {
    // Layer RDMAP, remote protection error, invalid STag.
    let found = wire::terminates(&capture("siw-errors-stag_read_theirs_to_ours"), OURS);
    assert_eq!(found.len(), 1);
    assert_eq!(found[0][..2], [0x01, 0]);
}

#[test]
fn a_read_of_nothing_is_answered_with_an_octet() {
    let frames = capture("siw-operations-read_of_nothing");
    assert_eq!(wire::payloads(&frames, THEIRS, Opcode::SEND), [1]);
    assert_eq!(wire::payloads(&frames, THEIRS, Opcode::READ_RESPONSE), [1]);
    let end = wire::terminates(&frames, OURS);
    assert_eq!((end.len(), &end[0][..2]), (1, &[0x11, 1][..]));
}

#[test]
fn keys_that_are_revoked() {
    let frames = capture("siw-operations-invalidate_ours_to_theirs");
    assert_eq!(wire::terminates(&frames, THEIRS).len(), 1, "the key is gone");
    let frames = capture("rxe-operations-invalidate_ours_to_theirs");
    let last = Syndrome::Nak(NakCode::REMOTE_ACCESS);
    assert_eq!(wire::syndromes(&frames, THEIRS).last(), Some(&last), "the key is gone");
}

#[test]
fn times_that_the_rdma_cm_leaves_to_rxe() {
    let frames = capture("rxe-errors-receives_late_ours_to_theirs");
    let waits = wire::syndromes(&frames, THEIRS);
    // 0 stands for 655.36 ms.
    assert_eq!(waits.iter().filter(|syndrome| **syndrome == Syndrome::RnrNak(0)).count(), 2);
    let frames = capture("rxe-rdma_client");
    // 4.096 us * 2^19.
    assert_eq!(wire::ack_timeouts(&frames), [19]);
}

#[test]
fn a_refusal_that_rping_does_not_end_with() {
    // The SYN is answered by a reset, and that is all there is.
    let frames = capture("siw-connect-no_listener_here");
    assert!(frames.len() >= 2 && frames.iter().all(|frame| frame.iwarp.is_empty()));
}
