//! What the table of flows says of captures, against what their descriptions say was done.

use std::path::Path;

use userdma_analyze::{
    Analyser, End,
    flow::{Flow, Message, Protocol},
};
use userdma_tests::{captures, shared};

fn flows(path: &Path) -> Vec<Flow> {
    let records = captures::records(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let mut analyser = Analyser::with_flows();
    for frame in captures::dissect(&records, 1 << 18) {
        analyser.push(&frame);
    }
    analyser.finish();
    analyser.flows()
}

/// Messages of the initiator: SEND, WRITE, READ, ATOMIC.
fn messages(flow: &Flow, side: usize) -> [u64; 4] {
    [Message::Send, Message::Write, Message::Read, Message::Atomic]
        .map(|kind| flow.sent[side].messages[kind as usize])
}

#[test]
fn what_was_done_is_what_is_told() {
    let Some(folder) = shared("captures/kernel") else { return };
    // The capture, what it speaks, messages of the client, octets of its SENDs and WRITEs, octets that it READ.
    let all: [(&str, Protocol, [u64; 4], u64, u64); 7] = [
        ("roce_large", Protocol::Rc, [1, 1, 1, 0], 131_072, 65_536),
        ("iwarp_large", Protocol::Iwarp, [1, 1, 1, 0], 131_072, 65_536),
        ("roce_loss_requests", Protocol::Rc, [2, 2, 1, 0], 80_100, 15_000),
        ("iwarp_loss", Protocol::Iwarp, [1, 1, 1, 0], 120_000, 30_000),
        ("roce_duplicate", Protocol::Rc, [1, 1, 1, 6], 40_000, 20_000),
        ("roce_reorder", Protocol::Rc, [1, 1, 0, 0], 0, 0),
        ("iwarp_ip6_mix", Protocol::Iwarp, [2, 1, 1, 0], 3600, 2000),
    ];
    for (name, protocol, want, octets, read) in all {
        let flows = flows(&folder.join(format!("{name}.pcap")));
        let rc: Vec<_> = flows.iter().filter(|flow| flow.protocol == protocol).collect();
        assert_eq!(rc.len(), 1, "{name}: {flows:?}");
        let got = messages(rc[0], 0);
        assert_eq!(got[..2], want[..2], "{name}");
        if octets > 0 {
            assert_eq!((got, rc[0].sent[0].octets), (want, octets), "{name}");
            // A READ that is answered twice counts twice.
            assert!(rc[0].sent[0].read_octets >= read, "{name}: {}", rc[0].sent[0].read_octets);
        }
        assert!(rc[0].seconds().unwrap() > 0.0 && rc[0].frames[0] < rc[0].frames[1], "{name}");
    }
}

#[test]
fn what_went_wrong_is_counted() {
    let Some(folder) = shared("captures/kernel") else { return };
    let of = |name: &str| flows(&folder.join(format!("{name}.pcap"))).remove(0);
    // As the expected findings have it: 2 + 6 + 8 + 3 + 2 packets, 4 NAKs.
    let lossy = of("roce_loss_requests");
    assert_eq!((lossy.sent[0].resent, lossy.sent[0].naks), (21, 4));
    let rnr = of("roce_rnr");
    assert_eq!((rnr.sent[0].rnr_naks, rnr.sent[0].resent), (2, 2));
    let tcp = of("iwarp_loss");
    assert_eq!(tcp.sent[0].resent, 5);
    let clean = of("roce_sizes");
    assert_eq!((clean.sent[0].resent, clean.sent[0].naks, clean.sent[0].rnr_naks), (0, 0, 0));
    assert_eq!(clean.sent[0].path_mtu, Some(1024));
    assert!(clean.sent[0].send_to_ack.count() > 0 && clean.sent[0].read_to_last.count() > 0);
}

#[test]
fn ends_are_queue_pairs_or_sockets() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../pcaps");
    let roce = flows(&folder.join("roce_rping.pcap")).remove(0);
    assert!(roce.ends.iter().all(|end| matches!(end, End::Qp(..))), "{:?}", roce.ends);
    // The initiator first.
    let iwarp = flows(&folder.join("iwarp_rping.pcap")).remove(0);
    assert!(matches!(iwarp.ends[1], End::Socket(addr) if addr.port() == 7174), "{:?}", iwarp.ends);
    // A READ takes as long in the table as between its two frames, to an eighth.
    let reads = &iwarp.sent[1].read_to_last;
    assert_eq!(reads.count(), 3);
    assert!(reads.quantile_ns(0.5).unwrap() <= reads.max_ns());
}

#[test]
fn many_connections_are_as_many_flows() {
    let Some(folder) = shared("captures/kernel") else { return };
    let flows = flows(&folder.join("roce_write_bw_cm.pcap"));
    let rc = flows.iter().filter(|flow| flow.protocol == Protocol::Rc).count();
    assert_eq!(rc, 2, "{flows:?}");
}
