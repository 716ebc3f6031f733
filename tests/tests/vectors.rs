//! The wire formats against material kept beside the tree: `vectors.json` (published examples, and
//! octets computed by other implementations) and the Linux kernel's own captures, as decoded by
//! other programs.
//!
//! The material is looked for in `$USERDMA_SHARED`, by default in `shared` beside the tree. Where
//! it is missing a test says SKIPPED; the same vectors that matter most stand in proto's own tests.

use std::fs;

use serde_json::Value;
use userdma_proto::wire::{
    crc::{Crc32c, crc32c},
    iwarp::{
        ddp::{QN_TERMINATE, Segment},
        fpdu::{self, Deframer, MarkerEncoder},
        mpa::{Start, StartKind},
        terminate::Terminate,
    },
    roce::{Packet, grh::Grh, icrc, opcode::Opcode},
};
use userdma_tests::{json, shared, unhex};
use zerocopy::FromBytes;

/// The entries of one part of `vectors.json`, at least `least` of them.
fn vectors(part: &str, least: usize) -> Option<Vec<Value>> {
    let file = shared("specs/vectors.json")?;
    let entries = json(&file)[part].as_array().cloned().unwrap_or_default();
    assert!(entries.len() >= least, "{part}: {} entries", entries.len());
    Some(entries)
}

#[test]
fn crc32c_vectors() {
    for v in vectors("crc32c", 6).unwrap_or_default() {
        let (input, wire) = (unhex(&v["input"]), unhex(&v["wire"]));
        assert_eq!(crc32c(&input).to_le_bytes(), *wire, "{}", v["name"]);
        let mut crc = Crc32c::new();
        input.chunks(5).for_each(|piece| crc.update(piece));
        assert_eq!(crc.finish().to_le_bytes(), *wire, "{}, in pieces", v["name"]);
    }
}

#[test]
fn fpdu_vectors() {
    let mut seen = 0;
    for v in vectors("mpa_fpdu", 16).unwrap_or_default() {
        let (name, want) = (&v["name"], unhex(&v["fpdu"]));
        let markers = v["markers"].as_bool().expect("markers");
        let offset = v["stream_offset"].as_u64().unwrap_or(0) as usize;

        // What comes before it in the stream: nothing, or one FPDU of just that length.
        let mut encoder = MarkerEncoder::new(true);
        let mut stream = Vec::new();
        if offset > 0 {
            assert!(markers && offset < 508, "{name}");
            encoder.push(&made(&vec![0; offset - 4 - 2 - 4]), &mut stream);
        }
        assert_eq!(stream.len(), offset, "{name}");
        stream.extend_from_slice(&want);

        let mut deframer = Deframer::new(markers, true);
        let (mut rest, mut found, mut scratch) = (&stream[..], Vec::new(), Vec::new());
        while let Some(fpdu) = deframer.next(rest, &mut scratch).expect("a good stream") {
            rest = &rest[fpdu.consumed..];
            found = fpdu.ulpdu.to_vec();
        }
        assert!(rest.is_empty(), "{name}");
        if v["ulpdu"].is_string() {
            assert_eq!(found, unhex(&v["ulpdu"]), "{name}");
        }
        assert!(Segment::parse(&found).is_ok_and(|s| s.ddp_version() == 1), "{name}");

        let mut again = Vec::new();
        if markers {
            encoder.push(&made(&found), &mut again);
        } else {
            again = made(&found);
        }
        assert_eq!(again, want, "{name}");
        seen += 1;
    }
    eprintln!("{seen} FPDUs");
}

/// An FPDU without markers.
fn made(ulpdu: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    let start = fpdu::begin(&mut out);
    out.extend_from_slice(ulpdu);
    fpdu::finish(&mut out, start, true);
    out
}

#[test]
fn startup_vectors() {
    for v in vectors("mpa_startup", 4).unwrap_or_default() {
        let (name, frame) = (v["name"].as_str().expect("a name"), unhex(&v["frame"]));
        let (start, used) = Start::parse(&frame).expect("a frame").expect("a whole frame");
        assert_eq!(used, frame.len(), "{name}");
        assert_eq!(start.kind == StartKind::Request, name.starts_with("Req"), "{name}");
        let mut out = Vec::new();
        start.emit(&mut out);
        assert_eq!(out, frame, "{name}");
    }
}

/// A RoCE packet of `vectors.json`: read, its ICRC checked, and written again.
fn roce_packet(v: &Value, packet: &[u8], header_len: usize) {
    let name = v["name"].as_str().or(v["source"].as_str()).expect("a name");
    let (headers, body) = packet.split_at(header_len);
    let wire: [u8; 4] = *packet.last_chunk().expect("four octets");
    if v["icrc_wire"].is_string() {
        assert_eq!(unhex(&v["icrc_wire"]), wire, "{name}");
    }
    assert_eq!(icrc::check(packet), Ok(()), "{name}");
    assert_eq!(icrc::compute(packet), Ok(wire), "{name}");

    let read = Packet::parse(body).unwrap_or_else(|e| panic!("{name}: {e}"));
    if let Some(opcode) = v["opcode"].as_str() {
        assert_eq!(format!("{:#04x}", read.headers.bth.opcode().0), opcode, "{name}");
    }
    assert!(read.headers.bth.opcode().info().is_some(), "{name}");
    assert_eq!((read.check_form(), read.icrc), (Ok(()), Some(wire)), "{name}");

    let (mut again, mut out) = (read.headers, headers.to_vec());
    again.emit_packet(read.payload, &mut out);
    out.extend(wire);
    assert_eq!(out, packet, "{name}");
    assert_eq!(again, read.headers, "{name}");
    eprintln!("{name}: {} of {} octets", again.bth.opcode(), read.payload_len);
}

#[test]
fn rocev2_vectors() {
    for (part, count) in [("rocev2_frames", 11), ("rocev2_synthetic", 18)] {
        for v in vectors(part, count).unwrap_or_default() {
            let packet = unhex(&v["ip_packet"]);
            let header_len = if packet[0] >> 4 == 4 { 20 + 8 } else { 40 + 8 };
            roce_packet(&v, &packet, header_len);
        }
    }
}

#[test]
fn rocev1_vectors() {
    for v in vectors("rocev1_frames", 2).unwrap_or_default() {
        let packet = unhex(&v["grh_on"]);
        let (grh, body) = Grh::ref_from_prefix(&packet).expect("a GRH");
        assert_eq!((grh.version(), grh.payload_len()), (6, body.len()));
        roce_packet(&v, &packet, Grh::LEN);
    }
}

#[test]
fn synthetic_headers_hold_what_their_names_say() {
    let entries = vectors("rocev2_synthetic", 18).unwrap_or_default();
    let bodies: Vec<_> =
        entries.iter().map(|v| (v["name"].as_str(), unhex(&v["ip_packet"]))).collect();
    let headers = |opcode: Opcode| {
        let found = bodies.iter().find(|(_, packet)| packet[0] == 0x45 && packet[28] == opcode.0);
        found.map(|(_, packet)| Packet::parse(&packet[28..]).expect("a packet").headers)
    };
    if bodies.is_empty() {
        return;
    }
    let swap = headers(Opcode::RC_CMP_SWAP).and_then(|h| h.atomic_eth).expect("AtomicETH");
    assert_eq!((swap.va(), swap.rkey().0), (0x7f00_0000_1000, 0x1234));
    assert_eq!((swap.swap_add(), swap.compare()), (2, 1));
    let original = headers(Opcode::RC_ATOMIC_ACK).and_then(|h| h.atomic_ack_eth);
    assert_eq!(original.map(|eth| eth.original()), Some(42));
    let ieth = headers(Opcode::RC_SEND_ONLY_INV).and_then(|h| h.ieth).expect("IETH");
    assert_eq!(ieth.rkey().0, 0xabcd);
    let write = headers(Opcode::RC_WRITE_ONLY_IMM).expect("a WRITE");
    assert_eq!(write.reth.map(|reth| reth.dma_len()), Some(8));
    assert_eq!(write.immdt.map(|immdt| immdt.data()), Some(0xdead_beef));
    let deth = headers(Opcode::UD_SEND_ONLY_IMM).and_then(|h| h.deth).expect("DETH");
    assert_eq!((deth.qkey().0, deth.src_qp().0), (0x8001_0000, 1));
    let xrceth = headers(Opcode::XRC_SEND_ONLY).and_then(|h| h.xrceth).expect("XRCETH");
    assert_eq!(xrceth.srq(), 0x33);
    let flush = headers(Opcode::RC_FLUSH).expect("a FLUSH");
    assert_eq!(flush.feth.map(|feth| feth.bits.get()), Some(0x13));
    assert_eq!(flush.reth.map(|reth| reth.va()), Some(0x7f00_0000_1000));
}

/// The JSON files of the kernel's iWARP captures.
fn kernel_captures() -> Vec<(String, Value)> {
    let Some(folder) = shared("captures/kernel") else {
        return Vec::new();
    };
    let mut files: Vec<_> = fs::read_dir(&folder)
        .unwrap_or_else(|e| panic!("{}: {e}", folder.display()))
        .map(|entry| entry.expect("a folder entry").path())
        .filter(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            name.starts_with("iwarp_") && name.ends_with(".json")
        })
        .collect();
    files.sort();
    files
        .iter()
        .map(|file| (file.file_name().unwrap_or_default().to_string_lossy().into(), json(file)))
        .collect()
}

#[test]
fn terminates_of_linux_siw() {
    let captures = kernel_captures();
    let mut seen = 0;
    for (name, capture) in &captures {
        for t in capture["iwarp"]["terminates"].as_array().into_iter().flatten() {
            let payload = unhex(&t["body"]);
            let terminate = Terminate::parse(&payload).unwrap_or_else(|e| panic!("{name}: {e}"));
            let means = &t["as_siw_means"];
            let number = |field: &str| means[field].as_u64().unwrap_or(u64::MAX);
            assert_eq!(u64::from(terminate.code.layer.0), number("layer"), "{name}");
            assert_eq!(u64::from(terminate.code.etype), number("etype"), "{name}");
            assert_eq!(u64::from(terminate.code.code), number("code"), "{name}");
            assert_eq!(u64::from(terminate.ddp_segment_len.is_some()), number("M"), "{name}");
            assert_eq!(u64::from(terminate.ddp_header.is_some()), number("D"), "{name}");
            assert_eq!(u64::from(terminate.read_request.is_some()), number("R"), "{name}");
            let mut out = Vec::new();
            terminate.emit(&mut out);
            assert_eq!(out, payload, "{name}");
            eprintln!("{name}: {terminate}");
            seen += 1;
        }
    }
    assert!(captures.is_empty() || seen >= 8, "{seen} Terminates");
}

#[test]
fn startup_frames_of_linux_siw() {
    let captures = kernel_captures();
    let mut seen = 0;
    for (name, capture) in &captures {
        for m in capture["iwarp"]["mpa_frames"].as_array().into_iter().flatten() {
            let number = |field: &str| m[field].as_u64().unwrap_or(0);
            // Octets from the fields that another decoder found.
            let private_data = unhex(&m["private_data"]);
            let mut frame = Vec::new();
            let key = if m["frame"] == "Req" { StartKind::Request } else { StartKind::Reply };
            frame.extend_from_slice(key.key());
            let flags = [("M", 7), ("C", 6), ("R", 5), ("S", 4)]
                .iter()
                .fold(number("rest_flags"), |acc, (field, bit)| acc | number(field) << bit);
            frame.extend([flags as u8, number("rev") as u8]);
            frame.extend((number("pd_length") as u16).to_be_bytes());
            let enhanced = number("S") == 1 && number("rev") == 2;
            if enhanced {
                let ird = number("IRD") | number("A") << 15 | number("B") << 14;
                let ord = number("ORD") | number("C_write_rtr") << 15 | number("D_read_rtr") << 14;
                frame.extend((ird as u16).to_be_bytes());
                frame.extend((ord as u16).to_be_bytes());
            }
            frame.extend(&private_data);

            let (start, used) = Start::parse(&frame)
                .unwrap_or_else(|e| panic!("{name}: {e}"))
                .unwrap_or_else(|| panic!("{name}: not whole"));
            assert_eq!(used, frame.len(), "{name}");
            assert_eq!(start.private_data, private_data, "{name}");
            assert_eq!(start.enhanced.is_some(), enhanced, "{name}");
            if let Some(e) = start.enhanced {
                assert_eq!((u64::from(e.ird), u64::from(e.ord)), (number("IRD"), number("ORD")));
                assert_eq!(u64::from(e.peer_to_peer), number("A"), "{name}");
                assert_eq!(u64::from(e.rtr_send), number("B"), "{name}");
                assert_eq!(u64::from(e.rtr_write), number("C_write_rtr"), "{name}");
                assert_eq!(u64::from(e.rtr_read), number("D_read_rtr"), "{name}");
            }
            let mut out = Vec::new();
            start.emit(&mut out);
            assert_eq!(out, frame, "{name}");
            seen += 1;
        }
    }
    assert!(captures.is_empty() || seen >= 50, "{seen} frames");
}

#[test]
fn segments_of_a_terminate_go_to_its_queue() {
    for v in vectors("mpa_fpdu", 16).unwrap_or_default() {
        if !v["name"].as_str().is_some_and(|name| name.contains("Terminate")) {
            continue;
        }
        let ulpdu = unhex(&v["ulpdu"]);
        match Segment::parse(&ulpdu).expect("a segment") {
            Segment::Untagged { header, payload } => {
                assert_eq!(header.qn.get(), QN_TERMINATE);
                let terminate = Terminate::parse(payload).expect("a Terminate");
                assert_eq!(terminate.term_octets(), 0x0101);
            }
            tagged @ Segment::Tagged { .. } => panic!("{tagged:?}"),
        }
    }
}
