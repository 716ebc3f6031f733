//! The shipped captures through the library: that they show what `pcaps/README.md` says, and what
//! the independent decoder counted beyond that which `userdma dissect` prints (see
//! `cli/tests/dissect_truth.rs` for that).

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::File,
    path::Path,
};

use serde_json::{Value, json};
use userdma_proto::{
    dissect::{
        CrcState, DdpHeader, Dissector, Fpdu, Frame, IcrcState, Iwarp, Layer, Markers, Operation,
        Options, Roce, Start,
        capture::{Format, Reader},
    },
    wire::{
        iwarp::mpa::{StartFlags, StartKind},
        mad::{
            Mad,
            cm::{IpCm, Message, Reason},
        },
        roce::{
            aeth::{NakCode, Syndrome},
            opcode::Opcode,
        },
    },
};
use userdma_tests::{
    shared,
    truth::{Case, cases},
};

fn frames(path: &Path) -> Vec<Frame> {
    let file = File::open(path).expect("the capture can be opened");
    let mut reader = Reader::new(file).expect("it is a capture");
    let mut dissector = Dissector::new(Options::default());
    let mut frames = Vec::new();
    while let Some(record) = reader.next_record().expect("it is whole") {
        dissector.handle_record(&record);
        frames.extend(std::iter::from_fn(|| dissector.poll_frame()));
    }
    dissector.finish();
    frames.extend(std::iter::from_fn(|| dissector.poll_frame()));
    for frame in &frames {
        assert!(frame.error.is_none(), "{path:?}, frame {}: {:?}", frame.number, frame.error);
    }
    frames
}

fn shipped(name: &str) -> Vec<Frame> {
    frames(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../pcaps").join(name))
}

fn packets(frames: &[Frame]) -> impl Iterator<Item = &Roce> {
    frames.iter().flat_map(|frame| frame.roce.iter().map(|packet| &**packet))
}

fn opcode(packet: &Roce) -> Opcode {
    packet.headers.expect("the packet is whole").bth.opcode()
}

fn fpdus(frames: &[Frame]) -> impl Iterator<Item = &Fpdu> {
    frames.iter().flat_map(|frame| &frame.iwarp).filter_map(|part| match part {
        Iwarp::Fpdu(fpdu) => Some(fpdu),
        Iwarp::Start(_) => None,
        Iwarp::Error(why) => panic!("{why}"),
    })
}

fn starts(frames: &[Frame]) -> Vec<&Start> {
    let parts = frames.iter().flat_map(|frame| &frame.iwarp);
    parts
        .filter_map(|part| match part {
            Iwarp::Start(start) => Some(&**start),
            Iwarp::Fpdu(_) | Iwarp::Error(_) => None,
        })
        .collect()
}

/// The connection manager's messages, each as `with` sees it.
fn messages<T>(frames: &[Frame], with: impl Fn(&Message<'_>) -> Option<T>) -> Vec<T> {
    packets(frames)
        .filter_map(|packet| packet.mad.as_deref())
        .filter_map(|octets| {
            let mad = Mad::parse(octets).expect("the MAD is whole");
            with(&mad.cm().expect("it is whole").expect("it is the connection manager's"))
        })
        .collect()
}

/// The packets' syndromes.
fn syndromes(frames: &[Frame]) -> Vec<Syndrome> {
    packets(frames).filter_map(|p| Some(p.headers?.aeth?.syndrome())).collect()
}

// ------------------------------------------------------------------ what the independent decoder says

fn add(counts: &mut BTreeMap<String, u64>, what: impl ToString) {
    *counts.entry(what.to_string()).or_default() += 1;
}

fn same(name: &str, key: &str, have: &BTreeMap<String, u64>, want: &Value) {
    let want: BTreeMap<String, u64> =
        serde_json::from_value(want[key].clone()).expect("it counts something");
    assert_eq!(*have, want, "{name}: {key}");
}

/// What the command's JSON is not judged by: who asked for an ACK, what the AETHs said, pads,
/// messages, MPA start-up and Terminates octet by octet.
fn beyond_the_judge(case: &Case) {
    let name = &case.name;
    let truth = case.truth();
    let frames = frames(&case.path);
    if let Some(want) = truth.get("roce").filter(|want| want.get("aeth").is_some()) {
        roce_counts(name, &frames, want);
    }
    if let Some(want) = truth.get("iwarp") {
        iwarp_counts(name, &frames, want);
    }
}

fn roce_counts(name: &str, frames: &[Frame], want: &Value) {
    let [mut aeth, mut ack_req, mut pad, mut migreq, mut pkey] = [const { BTreeMap::new() }; 5];
    let [mut sports, mut ttl] = [const { BTreeMap::new() }; 2];
    let mut solicited = 0;
    for frame in frames.iter().filter(|frame| !frame.roce.is_empty()) {
        assert_eq!(frame.roce.len(), 1, "{name}, frame {}: nothing is a train here", frame.number);
        let headers = frame.roce[0].headers.expect("the packet is whole");
        let bth = headers.bth;
        if bth.ack_req() {
            add(&mut ack_req, bth.opcode());
        }
        solicited += u64::from(bth.solicited());
        add(&mut pad, bth.pad());
        add(&mut migreq, u8::from(bth.migreq()));
        add(&mut pkey, format!("{:04x}", bth.pkey().0));
        add(&mut sports, frame.ends.and_then(|ends| ends.ports).expect("UDP has ports").0);
        add(&mut ttl, frame.ip.expect("IP is there").ttl);
        match headers.aeth.map(|aeth| aeth.syndrome()) {
            None => {}
            Some(Syndrome::Ack(_)) => add(&mut aeth, "ACK"),
            Some(Syndrome::RnrNak(timer)) => add(&mut aeth, format!("RNR_NAK timer {timer}")),
            Some(Syndrome::Nak(code)) => {
                let names = ["PSN_SEQ_ERR", "INVALID_REQ", "REM_ACCESS_ERR", "REM_OP_ERR"];
                let text = names.get(usize::from(code.0)).expect("rxe sends no other");
                add(&mut aeth, format!("NAK code {} {text}", code.0));
            }
            Some(Syndrome::Reserved(octet)) => panic!("{name}: syndrome {octet:#04x}"),
        }
    }
    same(name, "aeth", &aeth, want);
    same(name, "ack_req", &ack_req, want);
    same(name, "pad", &pad, want);
    same(name, "migreq", &migreq, want);
    same(name, "pkey", &pkey, want);
    same(name, "udp_sports", &sports, want);
    same(name, "ttl", &ttl, want);
    assert_eq!(json!(solicited), want["solicited"], "{name}: solicited");
}

fn iwarp_counts(name: &str, frames: &[Frame], want: &Value) {
    let [mut last, mut lengths] = [const { BTreeMap::new() }; 2];
    let mut terminates = Vec::new();
    for fpdu in fpdus(frames) {
        let header = fpdu.header.expect("the segment is whole");
        assert_eq!(fpdu.markers, Markers::None, "{name}: siw makes none");
        if header.last() {
            add(&mut last, operation(&header));
        }
        add(&mut lengths, fpdu.ulpdu_len);
        if let Operation::Terminate(terminate, octets) = &fpdu.operation {
            terminates.push((terminate, octets));
        }
    }
    same(name, "messages_last_flag", &last, want);
    // The truth has the 40 shortest.
    let want_lengths = want["ulpdu_lengths"].as_object().expect("lengths");
    if want_lengths.len() < 40 {
        same(name, "ulpdu_lengths", &lengths, want);
    }

    let want_terminates = want["terminates"].as_array().expect("a list");
    assert_eq!(terminates.len(), want_terminates.len(), "{name}: Terminates");
    for ((terminate, octets), want) in terminates.into_iter().zip(want_terminates) {
        assert_eq!(json!(hex(octets)), want["body"], "{name}");
        // The kernel's siw, told from RFC 5040 by its swapped nibbles.
        let meant = &want["as_siw_means"];
        assert!(terminate.swapped, "{name}: {terminate:?}");
        assert_eq!(json!(terminate.code.layer.0), meant["layer"], "{name}: {terminate:?}");
        assert_eq!(json!(terminate.code.etype), meant["etype"], "{name}: {terminate:?}");
        assert_eq!(json!(terminate.code.code), meant["code"], "{name}: {terminate:?}");
    }

    // Start-up frames: the decoder goes by stream, we go by frame.
    let mut found: Vec<Value> = starts(frames).into_iter().map(start).collect();
    for frame in want["mpa_frames"].as_array().expect("a list") {
        let mut frame = frame.clone();
        let fields = frame.as_object_mut().expect("an object");
        fields.retain(|key, _| !matches!(key.as_str(), "flow" | "rest_flags"));
        let at = found.iter().position(|f| *f == frame);
        found.swap_remove(at.unwrap_or_else(|| panic!("{name}: {frame} is not in {found:?}")));
    }
    assert!(found.is_empty(), "{name}: {found:?}");
}

/// A start-up frame in the independent decoder's words.
fn start(start: &Start) -> Value {
    let flag = |flag| u8::from(start.flags.contains(flag));
    let kind = match start.kind {
        StartKind::Request => "Req",
        StartKind::Reply => "Rep",
    };
    let len = start.private_data.len() + if start.enhanced.is_some() { 4 } else { 0 };
    let mut value = json!({
        "frame": kind, "M": flag(StartFlags::MARKERS), "C": flag(StartFlags::CRC),
        "R": flag(StartFlags::REJECT), "S": flag(StartFlags::ENHANCED), "rev": start.revision,
        "pd_length": len, "private_data": hex(&start.private_data),
    });
    if let Some(e) = start.enhanced {
        let bit = u8::from;
        value["A"] = json!(bit(e.peer_to_peer));
        value["B"] = json!(bit(e.rtr_send));
        value["IRD"] = json!(e.ird);
        value["C_write_rtr"] = json!(bit(e.rtr_write));
        value["D_read_rtr"] = json!(bit(e.rtr_read));
        value["ORD"] = json!(e.ord);
    }
    value
}

fn operation(header: &DdpHeader) -> &'static str {
    match header.opcode().0 {
        0 => "RDMA_WRITE",
        1 => "READ_REQUEST",
        2 => "READ_RESPONSE",
        3 => "SEND",
        4 => "SEND_INV",
        5 => "SEND_SE",
        6 => "SEND_SE_INV",
        7 => "TERMINATE",
        other => panic!("siw sends no opcode {other}"),
    }
}

fn hex(octets: &[u8]) -> String {
    octets.iter().map(|octet| format!("{octet:02x}")).collect()
}

#[test]
fn the_shipped_captures_hold_what_the_independent_decoder_counted() {
    let all = cases(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../pcaps"));
    assert!(all.len() >= 20, "{} captures", all.len());
    all.iter().for_each(beyond_the_judge);
}

#[test]
fn all_captures_of_the_kernel_hold_what_the_independent_decoder_counted() {
    let Some(folder) = shared("captures/kernel") else {
        return;
    };
    let all = cases(&folder);
    assert!(all.len() >= 78, "{} captures", all.len());
    all.iter().for_each(beyond_the_judge);
}

// --------------------------------------------------------------------- what pcaps/README.md says

/// All that rxe can send of RC but SEND_LAST_INV, and what it was made to send of UC and UD.
#[test]
fn together_they_show_every_operation() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../pcaps");
    let (mut opcodes, mut operations) = (BTreeSet::new(), BTreeSet::new());
    for case in cases(&folder) {
        let frames = frames(&case.path);
        opcodes.extend(packets(&frames).map(|packet| opcode(packet).0));
        operations.extend(fpdus(&frames).map(|f| operation(&f.header.expect("it is whole"))));
    }
    let rc = (0x00..=0x14).chain([0x17]);
    let expected: BTreeSet<u8> = rc.chain([0x20, 0x21, 0x22, 0x64, 0x65]).collect();
    assert_eq!(opcodes, expected);
    let expected =
        ["RDMA_WRITE", "READ_REQUEST", "READ_RESPONSE", "SEND", "SEND_INV", "SEND_SE", "TERMINATE"];
    assert_eq!(operations, BTreeSet::from(expected));
}

#[test]
fn refusals_of_rxe() {
    let reject = |m: &Message<'_>| match m {
        Message::Rej(rej) => Some((rej.reason, rej.private_data[..18].to_vec())),
        _ => None,
    };
    let said = messages(&shipped("roce_reject.pcap"), reject);
    assert_eq!(said, [(Reason::CONSUMER, b"rejected-by-server".to_vec())]);
    let said = messages(&shipped("roce_no_listener.pcap"), reject);
    assert_eq!(said, [(Reason::INVALID_SERVICE_ID, vec![0; 18])]);
    let naks = |name| {
        let mut all = syndromes(&shipped(name));
        all.retain(|s| !matches!(s, Syndrome::Ack(_)));
        all
    };
    assert_eq!(naks("roce_err_rkey_write.pcap"), [Syndrome::Nak(NakCode(2))]);
    assert_eq!(naks("roce_rnr.pcap"), [Syndrome::RnrNak(0); 2]);
    assert_eq!(naks("roce_reorder.pcap"), [Syndrome::Nak(NakCode(0)); 4]);
}

#[test]
fn the_connection_manager_says_which_queue_pairs_talk() {
    let frames = shipped("roce_sizes.pcap");
    let (client, server) = ("10.99.0.2", "10.99.0.3");
    let named: BTreeSet<_> = messages(&frames, |m| match m {
        Message::Req(req) => {
            let (ip, rest) = IpCm::parse(req.private_data).expect("rdma_cm's header");
            let (src, dst) = ip.addresses().expect("IPv4");
            assert_eq!((src.to_string(), dst.to_string()), (client.into(), server.into()));
            assert!(rest.starts_with(b"hello-private-data\0"));
            Some((client.to_owned(), req.qpn))
        }
        Message::Rep(rep) => Some((server.to_owned(), rep.qpn)),
        _ => None,
    })
    .into_iter()
    .collect();
    let data = frames.iter().filter(|frame| frame.roce.iter().any(|p| p.mad.is_none()));
    let seen: BTreeSet<_> = data
        .map(|frame| {
            let qpn = frame.roce[0].headers.expect("it is whole").bth.dest_qp();
            (frame.ends.expect("IP is there").dst.to_string(), qpn)
        })
        .collect();
    assert_eq!(seen, named);
    assert_eq!(seen.len(), 2);

    let udaddy = messages(&shipped("roce_udaddy.pcap"), |m| match m {
        Message::SidrReq(req) => Some((req.request_id, 0)),
        Message::SidrRep(rep) => Some((rep.request_id, rep.qpn.0)),
        _ => None,
    });
    let [(asked, _), (answered, qpn)] = udaddy[..] else {
        panic!("{udaddy:?}");
    };
    assert_eq!(asked, answered);
    let frames = shipped("roce_udaddy.pcap");
    assert!(packets(&frames).any(|p| p.headers.is_some_and(|h| h.bth.dest_qp().0 == qpn)));
}

#[test]
fn a_train_of_packets_is_split_into_all_of_them() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../pcaps");
    let all = cases(&folder);
    let case = all.iter().find(|case| case.name == "roce_gso_loopback.pcap").expect("it is there");
    let truth = case.truth();
    let frames = frames(&case.path);
    let found: Vec<Vec<Value>> =
        frames.iter().map(|frame| frame.roce.iter().map(|p| packet(p)).collect()).collect();
    assert_eq!(json!(found), truth["packets"]);
    assert_eq!(found.iter().map(Vec::len).collect::<Vec<_>>(), [1, 9, 1, 5, 5, 1, 1, 3]);
}

/// A packet in the words of `pcaps/make.py`.
fn packet(packet: &Roce) -> Value {
    let headers = packet.headers.expect("it is whole");
    let bth = headers.bth;
    let mut value = json!({
        "opcode": bth.opcode().to_string(), "opcode_value": bth.opcode, "dest_qp": bth.dest_qp().0,
        "psn": bth.psn().get(), "ack_req": bth.ack_req(), "solicited": bth.solicited(),
        "migreq": bth.migreq(), "pad": bth.pad(), "pkey": bth.pkey().0,
        "payload_len": packet.payload_len,
        "icrc": if packet.icrc == IcrcState::Good { "good" } else { "not good" },
    });
    if let Some(reth) = headers.reth {
        let va = format!("{:#x}", reth.va.get());
        value["reth"] = json!({ "va": va, "rkey": reth.rkey.get(), "len": reth.len.get() });
    }
    if let Some(aeth) = headers.aeth {
        let Syndrome::Ack(code) = aeth.syndrome() else {
            panic!("{aeth:?}");
        };
        value["aeth"] = json!({ "kind": "ACK", "code": code, "msn": aeth.msn() });
    }
    value
}

#[test]
fn containers_and_tags() {
    let open = |name: &str| {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../pcaps").join(name);
        Reader::new(File::open(path).expect("it is shipped")).expect("it is a capture").format()
    };
    assert_eq!(open("rping_both.pcapng"), Format::Pcapng);
    assert_eq!(open("roce_ip6_mix_qinq.pcapng.gz"), Format::Pcapng);
    assert_eq!(open("roce_large.pcap.gz"), Format::Pcap);
    for frame in shipped("roce_ip6_mix_qinq.pcapng.gz") {
        let outer = [Layer::Eth, Layer::Vlan, Layer::Vlan, Layer::Ipv6, Layer::Udp, Layer::Bth];
        assert_eq!(frame.stack[..6], outer, "frame {}", frame.number);
    }
    let both = shipped("rping_both.pcapng");
    assert!(packets(&both).count() == 41 && fpdus(&both).count() == 21);
}

#[test]
fn start_ups_of_siw() {
    let flags = |name| starts(&shipped(name)).into_iter().map(|s| s.flags).collect::<Vec<_>>();
    let (crc, enhanced) = (StartFlags::CRC, StartFlags::ENHANCED);
    assert_eq!(flags("iwarp_crc_on.pcap"), [crc | enhanced; 2]);
    assert_eq!(flags("iwarp_rping.pcap"), [enhanced; 2]);
    assert_eq!(flags("iwarp_reject.pcap"), [enhanced, enhanced | StartFlags::REJECT]);
    assert_eq!(flags("iwarp_mpa_v1.pcap"), [StartFlags::empty(); 2]);
    for (name, state, used) in
        [("iwarp_crc_on.pcap", CrcState::Good, true), ("iwarp_rping.pcap", CrcState::Zero, false)]
    {
        let frames = shipped(name);
        assert!(fpdus(&frames).all(|f| f.crc == state && f.crc_in_use == Some(used)), "{name}");
    }
    // The empty WRITE that says ready-to-receive is the first FPDU.
    let p2p = shipped("iwarp_p2p.pcap");
    let first = fpdus(&p2p).next().expect("there are FPDUs");
    assert!(matches!(first.header, Some(h) if operation(&h) == "RDMA_WRITE"));
    assert_eq!(first.payload_len, 0);
    let gso = shipped("iwarp_gso.pcap.gz");
    assert!(fpdus(&gso).any(|f| f.ulpdu_len > 30_000));
}
