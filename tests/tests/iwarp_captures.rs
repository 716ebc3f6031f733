//! The wire formats against traffic of the Linux kernel's siw: every FPDU of every capture, counted
//! by operation, with its CRC, against the counts of an independent decoder.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use serde_json::Value;
use userdma_proto::wire::iwarp::{
    ddp::Segment,
    fpdu::Deframer,
    mpa::{Start, StartFlags, StartKind},
    rdmap::Opcode,
    terminate::Terminate,
};
use userdma_tests::shared;

/// One TCP segment: who to whom, its place in the stream, its octets, and whether it is a SYN.
struct TcpSegment {
    micros: u64,
    flow: String,
    seq: u32,
    syn: bool,
    payload: Vec<u8>,
}

fn be16(b: &[u8], at: usize) -> usize {
    usize::from(u16::from_be_bytes([b[at], b[at + 1]]))
}

/// The TCP segments of a classic little-endian pcap file of Ethernet frames.
fn tcp_segments(file: &[u8]) -> Vec<TcpSegment> {
    let mut out = Vec::new();
    let mut at = 24;
    while at + 16 <= file.len() {
        let len = u32::from_le_bytes(file[at + 8..at + 12].try_into().expect("4 octets")) as usize;
        let word = |from: usize| -> u64 {
            u32::from_le_bytes(file[at + from..at + from + 4].try_into().expect("4 octets")).into()
        };
        let micros = word(0) * 1_000_000 + word(4);
        let frame = &file[at + 16..at + 16 + len];
        at += 16 + len;
        let ip = &frame[14..];
        let (src, dst, l4) = match be16(frame, 12) {
            0x0800 if ip[9] == 6 => {
                let head = usize::from(ip[0] & 15) * 4;
                let dotted = |b: &[u8]| b.iter().map(u8::to_string).collect::<Vec<_>>().join(".");
                (dotted(&ip[12..16]), dotted(&ip[16..20]), &ip[head..be16(ip, 2)])
            }
            0x86dd if ip[6] == 6 => {
                let groups = |b: &[u8]| {
                    b.chunks(2)
                        .map(|g| format!("{:02x}{:02x}", g[0], g[1]))
                        .collect::<Vec<_>>()
                        .join(":")
                };
                (groups(&ip[8..24]), groups(&ip[24..40]), &ip[40..40 + be16(ip, 4)])
            }
            _ => continue,
        };
        let head = usize::from(l4[12] >> 4) * 4;
        out.push(TcpSegment {
            micros,
            flow: format!("{src}:{}>{dst}:{}", be16(l4, 0), be16(l4, 2)),
            seq: u32::from_be_bytes(l4[4..8].try_into().expect("4 octets")),
            syn: l4[13] & 2 != 0,
            payload: l4[head..].to_vec(),
        });
    }
    out
}

/// The octets of each direction, in order, as far as they are whole. A flow whose SYN comes twice
/// (a port used again) starts anew.
fn streams(segments: &[TcpSegment]) -> BTreeMap<String, Vec<u8>> {
    let mut placed: BTreeMap<String, (u32, BTreeMap<u32, u8>)> = BTreeMap::new();
    for s in segments {
        if s.syn {
            placed.insert(s.flow.clone(), (s.seq.wrapping_add(1), BTreeMap::new()));
        } else if let Some((first, octets)) = placed.get_mut(&s.flow) {
            for (i, octet) in s.payload.iter().enumerate() {
                let offset = s.seq.wrapping_sub(*first).wrapping_add(i as u32);
                octets.entry(offset).or_insert(*octet);
            }
        }
    }
    placed
        .into_iter()
        .map(|(flow, (_, octets))| {
            let whole = octets.iter().enumerate().take_while(|&(i, (at, _))| i as u32 == *at);
            (flow, whole.map(|(_, (_, octet))| *octet).collect())
        })
        .collect()
}

fn name(op: Opcode) -> String {
    match op {
        Opcode::WRITE => "RDMA_WRITE",
        Opcode::READ_REQUEST => "READ_REQUEST",
        Opcode::READ_RESPONSE => "READ_RESPONSE",
        Opcode::SEND => "SEND",
        Opcode::SEND_INV => "SEND_INV",
        Opcode::SEND_SE => "SEND_SE",
        Opcode::SEND_SE_INV => "SEND_SE_INV",
        Opcode::TERMINATE => "TERMINATE",
        other => return format!("{other}"),
    }
    .to_owned()
}

#[test]
fn every_fpdu_of_the_kernel_is_read_as_the_independent_decoder_reads_it() {
    let Some(dir) = shared("captures/kernel") else { return };
    let mut names: Vec<PathBuf> = std::fs::read_dir(&dir)
        .expect("a readable folder")
        .map(|entry| entry.expect("an entry").path())
        .filter(|p| p.extension().is_some_and(|e| e == "pcap"))
        .filter(|p| p.file_name().is_some_and(|n| n.to_string_lossy().starts_with("iwarp_")))
        .collect();
    names.sort();
    assert!(names.len() >= 30, "the captures are there");
    let (mut fpdus, mut terminates) = (0, 0);
    for path in names {
        let truth: Value = serde_json::from_slice(
            &std::fs::read(path.with_extension("json")).expect("its ground truth"),
        )
        .expect("JSON");
        let streams = streams(&tcp_segments(&std::fs::read(&path).expect("a capture")));
        let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let Some(directions) = truth["iwarp"]["directions"].as_array() else { continue };
        // Whether a flow's connection uses the CRC: either side's C (RFC 5044 §7.1).
        let crc_asked = |flow: &str| {
            streams
                .get(flow)
                .and_then(|s| Start::parse(s).ok().flatten())
                .is_some_and(|(start, _)| start.flags.contains(StartFlags::CRC))
        };
        for direction in directions {
            let Some(expected) = direction["fpdus"].as_object() else { continue };
            let flow = direction["flow"].as_str().expect("a name");
            let (a, b) = flow.split_once('>').expect("two ends");
            let stream = &streams[flow];
            let (start, used) = Start::parse(stream).expect("a start frame").expect("whole");
            let initiator = direction["initiator"].as_bool().expect("a role");
            assert_eq!(start.kind == StartKind::Request, initiator, "{file} {flow}");
            let mpa = &direction["mpa"];
            assert_eq!(u64::from(start.revision), mpa["rev"], "{file} {flow}");
            if let Some(enhanced) = start.enhanced {
                assert_eq!(u64::from(enhanced.ird), mpa["IRD"], "{file} {flow}");
                assert_eq!(u64::from(enhanced.ord), mpa["ORD"], "{file} {flow}");
                assert_eq!(u64::from(enhanced.peer_to_peer), mpa["A"], "{file} {flow}");
                assert_eq!(u64::from(enhanced.rtr_write), mpa["C_write_rtr"], "{file} {flow}");
                assert_eq!(u64::from(enhanced.rtr_read), mpa["D_read_rtr"], "{file} {flow}");
            }
            let crc = crc_asked(flow) || crc_asked(&format!("{b}>{a}"));
            let correct = direction["crc"]["correct"].as_u64().expect("a count");
            let mut deframer = Deframer::new(false, crc);
            let (mut rest, mut scratch) = (&stream[used..], Vec::new());
            let (mut ops, mut last) = (BTreeMap::new(), BTreeMap::new());
            while let Some(f) =
                deframer.next(rest, &mut scratch).unwrap_or_else(|e| panic!("{file} {flow}: {e}"))
            {
                let segment = Segment::parse(f.ulpdu).expect("whole headers");
                assert_eq!((segment.ddp_version(), segment.rdmap_version()), (1, 1));
                *ops.entry(name(segment.opcode())).or_insert(0u64) += 1;
                if segment.last() {
                    *last.entry(name(segment.opcode())).or_insert(0u64) += 1;
                }
                if segment.opcode() == Opcode::TERMINATE {
                    let ours = Terminate::parse(segment.payload()).expect("a Terminate");
                    let theirs = &truth["iwarp"]["terminates"][0]["as_siw_means"];
                    let code = ours.code;
                    assert_eq!(u64::from(code.layer.0), theirs["layer"], "{file}");
                    assert_eq!(u64::from(code.etype), theirs["etype"], "{file}");
                    assert_eq!(u64::from(code.code), theirs["code"], "{file}");
                    let bits = [&theirs["D"], &theirs["R"]].map(|b| b.as_u64() == Some(1));
                    let seen = [ours.ddp_header.is_some(), ours.read_request().is_some()];
                    assert_eq!(seen, bits, "{file}: {ours:?}");
                    terminates += 1;
                }
                fpdus += 1;
                rest = &rest[f.consumed..];
            }
            let counts = |map: &serde_json::Map<String, Value>| -> BTreeMap<String, u64> {
                map.iter().map(|(k, v)| (k.clone(), v.as_u64().expect("a count"))).collect()
            };
            assert_eq!(ops, counts(expected), "{file} {flow}");
            let messages = direction["messages"].as_object().expect("counts");
            assert_eq!(last, counts(messages), "{file} {flow}: last flags");
            if crc {
                assert_eq!(correct, ops.values().sum::<u64>(), "{file} {flow}: every CRC");
            }
        }
    }
    println!("{fpdus} FPDUs, {terminates} Terminates");
    assert!(fpdus > 500 && terminates >= 6, "{fpdus} FPDUs, {terminates} Terminates");
}

/// Why [`userdma_proto::iwarp::Config::nudge`] exists: siw's silence, and what ends it.
#[test]
fn siw_overlooks_an_fpdu_right_behind_its_reply_until_an_empty_write_comes() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../pcaps/siw_overlooks_first_fpdu.pcap");
    let segments = tcp_segments(&std::fs::read(path).expect("a capture of this repository"));
    // Each FPDU with the time it was sent, behind the start-up frames.
    let fpdus: Vec<(u64, bool, Opcode, usize)> = segments
        .iter()
        .filter(|s| !s.payload.is_empty() && !s.payload.starts_with(b"MPA ID "))
        .filter_map(|s| {
            let mut scratch = Vec::new();
            let f = Deframer::new(false, true).next(&s.payload, &mut scratch).ok()??;
            let segment = Segment::parse(f.ulpdu).ok()?;
            let ours = s.flow.starts_with("10.99.0.1:");
            Some((s.micros, ours, segment.opcode(), segment.payload().len()))
        })
        .collect();
    let [send, write, read, ..] = fpdus.as_slice() else { panic!("{fpdus:?}") };
    assert_eq!((send.1, send.2), (true, Opcode::SEND));
    assert_eq!((write.1, write.2, write.3), (true, Opcode::WRITE, 0), "an empty WRITE");
    assert_eq!((read.1, read.2), (false, Opcode::READ_REQUEST));
    let (silence, answer) = (write.0 - send.0, read.0 - write.0);
    assert!(silence > 90_000, "siw was silent for {silence} us");
    assert!(answer < 20_000, "and answered {answer} us after the WRITE");
}
