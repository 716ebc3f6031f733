//! What the dissector makes of captures that other people and other stacks made: every frame's
//! layers and ends, every RoCE packet's headers and ICRC, against tshark and an independent decoder.

use std::{collections::BTreeMap, path::Path};

use serde_json::Value;
use userdma_proto::{
    dissect::{Frame, IcrcState, Layer, Roce, Version, capture::LinkType},
    wire::mad::Mad,
};
use userdma_tests::{
    Rng,
    captures::{Octets, dissect, records},
    shared,
    truth::{Case, cases, has_layer, layers},
};

/// Files with frames that are malformed, how many, and what the first error says. All others are
/// ordinary traffic: nothing in it is called wrong.
const MALFORMED: &[(&str, usize, &str)] = &[
    ("cont_libpcap_pcapng-tsresol-bin-overflow.pcapng", 1, "Ethernet: 14 octets needed, 1 found"),
    ("cont_pcapplusplus_TruncatedMplsPackets.pcapng", 5, "MPLS label: 4 octets needed, 3 found"),
    ("cont_pcapplusplus_ip4_bad_fragment.pcap", 1, "IPv4 header: 60 octets needed, 42 found"),
    ("cont_tcpdump_f8d388_heap-overflow-1.pcap", 1, "IP: version 3, 4 or 6 expected"),
    ("cont_tcpdump_heap-overflow-1.pcap", 1, "IP: version 3, 4 or 6 expected"),
    (
        "cont_tcpdump_hoobr_bfd_print.pcap",
        1,
        "IPv4: 12316 octets of payload announced, 12302 found",
    ),
    ("cont_tcpdump_icmp6_mobileprefix_asan.pcap", 1, "Ethernet: 14 octets needed, 0 found"),
    (
        "cont_tcpdump_tftp-heapoverflow.pcap",
        1,
        "UDP: 12328 octets of payload announced, 12308 found",
    ),
    // Each frame from one host lacks its last octet.
    ("cont_wiki_telnet-raw.pcap", 25, "IPv4: 33 octets of payload announced, 32 found"),
    ("cont_zeek_ip6-ext-trunc.pcap", 1, "IPv6: 20 octets of payload announced, 0 found"),
    ("cont_zeek_ipv4-truncated-broken-header.pcap", 1, "IPv4 header: 60 octets needed, 20 found"),
];

type Counts = BTreeMap<String, u64>;

/// The captures of a folder that tshark read to their end, with what it found.
fn captures(folder: &str) -> Option<Vec<(Case, Value)>> {
    let mut found = Vec::new();
    for case in cases(&shared(folder)?) {
        let truth = case.truth();
        let kind = truth["capinfos"]["File type"].as_str().unwrap_or("pcap");
        let readable = matches!(kind, "pcap" | "pcapng" | "nsecpcap" | "modpcap");
        if readable && truth["tshark_rc"].as_u64().unwrap_or(0) == 0 {
            found.push((case, truth));
        }
    }
    assert!(found.len() > 50, "{} captures in {folder}", found.len());
    Some(found)
}

fn whole_records(path: &Path) -> Vec<Octets> {
    records(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Our layers of which tshark's rule speaks.
fn our_layers(frame: &Frame) -> Vec<&'static str> {
    frame.stack.iter().map(|layer| layer.name()).filter(|name| has_layer(name)).collect()
}

/// A field of tshark's, decimal or hex; the first, where a frame has several.
fn field(row: &Value, name: &str) -> Option<u64> {
    let text = row[name].as_str()?.split(',').next()?;
    Some(match text.strip_prefix("0x") {
        Some(hex) => u64::from_str_radix(hex, 16).expect("hex"),
        None => text.parse().expect("a number"),
    })
}

fn mad(roce: &Roce) -> Option<Mad<'_>> {
    Some(Mad::parse(roce.mad.as_deref()?).expect("a header of 24 octets"))
}

fn check_packet(at: &str, row: &Value, roce: &Roce) {
    let headers = roce.headers.expect("a BTH");
    let bth = headers.bth;
    let mut have = vec![
        ("bth.opcode", Some(u64::from(bth.opcode))),
        ("bth.se", Some(bth.solicited().into())),
        ("bth.m", Some(bth.migreq().into())),
        ("bth.padcnt", Some(bth.pad().into())),
        ("bth.tver", Some(bth.tver().into())),
        ("bth.p_key", Some(bth.pkey().0.into())),
        ("bth.destqp", Some(bth.dest_qp().0.into())),
        ("bth.a", Some(bth.ack_req().into())),
        ("bth.psn", Some(bth.psn().get().into())),
        ("lrh.slid", roce.lrh.map(|lrh| lrh.slid.get().into())),
        ("lrh.dlid", roce.lrh.map(|lrh| lrh.dlid.get().into())),
    ];
    // tshark knows no SIDR messages.
    if let Some(mad) = mad(roce).filter(|_| row["infiniband.mad.method"].is_string()) {
        have.push(("mad.mgmtclass", Some(mad.header.mgmt_class.into())));
        have.push(("mad.attributeid", Some(mad.header.attribute_id.get().into())));
        have.push(("mad.transactionid", Some(mad.header.tid.get())));
    }
    for (name, have) in have {
        assert_eq!(have, field(row, &format!("infiniband.{name}")), "{at}: {name}");
    }
    assert_eq!(roce.error, None, "{at}");
}

fn check_rows(file: &str, truth: &Value, frames: &[Frame]) {
    for row in truth["rows"].as_array().into_iter().flatten() {
        let number = field(row, "frame.number").expect("a number");
        let frame = &frames[number as usize - 1];
        let at = format!("{file}: frame {number}");
        assert_eq!(Some(frame.len.into()), field(row, "frame.len"), "{at}");
        assert_eq!(Some(frame.caplen.into()), field(row, "frame.cap_len"), "{at}");
        if row["infiniband.bth.opcode"].is_string() {
            let [roce] = &frame.roce[..] else { panic!("{at}: {} packets", frame.roce.len()) };
            check_packet(&at, row, roce);
        }
        if frame.stack.contains(&Layer::Erf) {
            continue; // tshark looks into IP over InfiniBand.
        }
        let ends = frame.ends;
        for (fields, have) in [
            (["ip.src", "ipv6.src"], ends.map(|ends| ends.src.to_string())),
            (["ip.dst", "ipv6.dst"], ends.map(|ends| ends.dst.to_string())),
        ] {
            let want = fields.iter().find_map(|name| row[*name].as_str());
            if let Some(want) = want.filter(|want| !want.contains(',')) {
                assert_eq!(have.as_deref(), Some(want), "{at}");
            }
        }
        for layer in ["udp", "tcp"] {
            let want = field(row, &format!("{layer}.srcport"))
                .zip(field(row, &format!("{layer}.dstport")));
            if want.is_some() {
                let ports = ends.and_then(|ends| ends.ports);
                assert_eq!(ports.map(|(src, dst)| (src.into(), dst.into())), want, "{at}");
            }
        }
        for (layer, bits) in [("dscp", 0), ("ecn", 1)] {
            if let Some(want) = field(row, &format!("ip.dsfield.{layer}")) {
                let ip = frame.ip.expect("an IP header");
                assert_eq!([u64::from(ip.dscp), ip.ecn.into()][bits], want, "{at}: {layer}");
            }
        }
    }
}

fn check_stacks(file: &str, truth: &Value, frames: &[Frame]) -> usize {
    let list = truth["frame_list"].as_array().map(Vec::as_slice).unwrap_or_default();
    if list.len() != frames.len().min(400) {
        return 0; // tshark counts custom blocks as frames, too.
    }
    for (entry, frame) in list.iter().zip(frames) {
        let want = layers(entry[2].as_str().expect("a text"));
        let have = our_layers(frame);
        assert!(
            have.starts_with(&want),
            "{file}: frame {}: {have:?} does not begin with {want:?}",
            frame.number
        );
    }
    list.len().min(frames.len())
}

fn counts(value: &Value) -> Counts {
    let numbers = value.as_object().into_iter().flatten();
    numbers
        .filter_map(|(name, count)| Some((name.clone(), count.as_u64().filter(|n| *n > 0)?)))
        .collect()
}

fn count(names: impl Iterator<Item = String>) -> Counts {
    let mut out = Counts::new();
    for name in names {
        *out.entry(name).or_default() += 1;
    }
    out
}

/// What the independent decoder counted of RoCE packets, ICRCs and CM messages.
fn check_counts(file: &str, truth: &Value, frames: &[Frame]) -> Counts {
    let packets = || frames.iter().flat_map(|frame| &frame.roce);
    let headers = || packets().map(|roce| roce.headers.expect("a BTH"));
    let icrc = count(packets().map(|roce| format!("{:?}", roce.icrc).to_lowercase()));
    if let Some(want) = truth.get("roce") {
        let names = headers().map(|h| h.bth.opcode().name().expect("a known opcode").to_string());
        assert_eq!(count(names), counts(&want["opcodes"]), "{file}");
        assert_eq!(icrc, counts(&want["icrc"]), "{file}");
        let cm =
            packets().filter_map(|roce| mad(roce)).filter(|mad| mad.header.mgmt_class == 7).count()
                as u64;
        assert_eq!(cm, counts(&want["cm_mads"]).values().sum::<u64>(), "{file}");
    } else if let Some(want) = truth.get("bth_opcode_counts") {
        let values = headers().map(|headers| headers.bth.opcode.to_string());
        assert_eq!(count(values), counts(want), "{file}");
        let good = icrc.get("good").copied();
        assert_eq!(good, truth["icrc_counts"]["ok"].as_u64(), "{file}");
        assert_eq!(icrc.len(), 1, "{file}: {icrc:?}");
    } else {
        assert_eq!(packets().count(), 0, "{file}: RoCE where there is none");
    }
    icrc
}

#[test]
fn every_frame_is_what_others_say_it_is() {
    let (mut stacks, mut good) = (0, 0);
    for folder in ["captures/kernel", "captures/public"] {
        for (Case { name: file, path, .. }, truth) in captures(folder).into_iter().flatten() {
            let frames = dissect(&whole_records(&path), usize::MAX);
            let numbers: Vec<u64> = frames.iter().map(|frame| frame.number).collect();
            assert_eq!(numbers, (1..=frames.len() as u64).collect::<Vec<_>>(), "{file}");
            stacks += check_stacks(&file, &truth, &frames);
            check_rows(&file, &truth, &frames);
            good += check_counts(&file, &truth, &frames).get("good").copied().unwrap_or(0);

            let errors: Vec<_> = frames.iter().filter_map(|f| f.error.as_deref()).collect();
            let known = MALFORMED.iter().find(|(name, ..)| *name == file);
            let want = known.map(|(_, count, first)| (*count, *first));
            assert_eq!(errors.first().map(|first| (errors.len(), *first)), want, "{file}");
        }
    }
    if shared("captures").is_some() {
        assert!(stacks > 8_000 && good > 1_800, "{stacks} stacks, {good} good ICRCs");
    }
}

/// A capture with a snaplen: what is there is told, nothing is called wrong, no ICRC is judged.
#[test]
fn cut_frames_are_told_as_far_as_they_go() {
    for (Case { name: file, path, .. }, _) in captures("captures/kernel").into_iter().flatten() {
        let records = whole_records(&path);
        let whole = dissect(&records, usize::MAX);
        for snaplen in [14, 20, 34, 42, 54, 60, 70, 96, 128] {
            for (frame, whole) in dissect(&records, snaplen).iter().zip(&whole) {
                let at = format!("{file}: frame {} at {snaplen}", frame.number);
                assert_eq!(frame.error, None, "{at}");
                if snaplen >= 96 && (frame.caplen as usize) < frame.len as usize {
                    for (roce, whole) in frame.roce.iter().zip(&whole.roce) {
                        assert_eq!(roce.icrc, IcrcState::Absent, "{at}");
                        assert_eq!(roce.headers, whole.headers, "{at}");
                        assert_eq!(roce.payload_len, whole.payload_len, "{at}");
                        assert_eq!(roce.error, None, "{at}");
                    }
                    assert_eq!(frame.roce.len(), whole.roce.len(), "{at}");
                    assert_eq!((frame.ends, frame.tcp), (whole.ends, whole.tcp), "{at}");
                }
            }
        }
    }
}

/// One flipped bit in a RoCE packet, anywhere from the BTH on: its ICRC is bad, nothing else falls.
#[test]
fn a_flipped_bit_is_seen() {
    let mut rng = Rng::new(4791);
    for (Case { name: file, path, .. }, truth) in captures("captures/kernel").into_iter().flatten()
    {
        if truth.get("roce").is_none() {
            continue;
        }
        let mut records = whole_records(&path);
        let whole = dissect(&records, usize::MAX);
        let mut flipped = vec![None; records.len()];
        for ((octets, frame), flipped) in records.iter_mut().zip(&whole).zip(&mut flipped) {
            if frame.roce.len() == 1 && rng.one_in(2) {
                let bth = if frame.stack.contains(&Layer::Ipv6) { 62 } else { 42 };
                let at = bth + rng.below((octets.data.len() - bth) as u64) as usize;
                octets.data[at] ^= 1 << rng.below(8);
                *flipped = Some(at - bth);
            }
        }
        for (frame, flipped) in dissect(&records, usize::MAX).iter().zip(&flipped) {
            let Some(at) = flipped else { continue };
            let want = if *at == 4 { IcrcState::Good } else { IcrcState::Bad };
            let states: Vec<_> = frame.roce.iter().map(|roce| roce.icrc).collect();
            assert_eq!(states, [want], "{file}: frame {}", frame.number);
        }
    }
}

/// Published packets, of RoCEv2 and RoCEv1.
#[test]
fn published_icrcs_are_good() {
    let Some(path) = shared("specs/vectors.json") else { return };
    let vectors: Value =
        serde_json::from_str(&std::fs::read_to_string(path).expect("it can be read"))
            .expect("JSON");
    let octets = |vector: &Value, field: &str| -> Vec<u8> {
        let hex = vector[field].as_str().expect("hex").as_bytes();
        hex.chunks(2)
            .map(|pair| u8::from_str_radix(std::str::from_utf8(pair).expect("ASCII"), 16))
            .collect::<Result<_, _>>()
            .expect("hex")
    };
    let mut checked = 0;
    for (list, field, link, version) in [
        ("rocev2_frames", "ip_packet", LinkType(101), Version::V2),
        ("rocev2_synthetic", "ip_packet", LinkType(101), Version::V2),
        ("rocev1_frames", "grh_on", LinkType::ETHERNET, Version::V1),
    ] {
        for vector in vectors[list].as_array().expect("a list") {
            let mut data = octets(vector, field);
            let icrc = vector.get("icrc_wire").map(|_| octets(vector, "icrc_wire"));
            if let Some(icrc) = icrc.filter(|icrc| !data.ends_with(icrc)) {
                data.extend(icrc);
            }
            if version == Version::V1 {
                let header = [&[2; 12][..], &[0x89, 0x15]].concat();
                data = [header, data].concat();
            }
            let records = [Octets { link, erf: None, time_ns: None, len: data.len() as u32, data }];
            let frame = &dissect(&records, usize::MAX)[0];
            let [roce] = &frame.roce[..] else { panic!("{vector}: {frame:?}") };
            assert_eq!((roce.version, roce.icrc), (version, IcrcState::Good), "{vector}");
            checked += 1;
        }
    }
    assert!(checked > 25, "{checked} vectors");
}
