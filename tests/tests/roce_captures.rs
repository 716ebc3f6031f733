//! RoCE and InfiniBand packets of captures made by others: every ICRC and VCRC, and what a UDP
//! socket finds out of them.
//!
//! The captures are looked for in `$USERDMA_SHARED`, by default in `shared` beside the tree. Where
//! they are missing a test says SKIPPED.

use std::{collections::BTreeMap, fs, net::Ipv4Addr, path::Path};

use userdma_proto::wire::{
    ib::{
        lrh::{self, Lrh},
        vcrc::{VCRC_LEN, vcrc},
    },
    roce::{
        ICRC_LEN, Packet, UDP_PORT,
        bth::Bth,
        grh::Grh,
        icrc::{self, Icrc, Identification, PathV4, verify_unknown_id},
    },
};
use userdma_tests::shared;
use zerocopy::FromBytes;

/// The frames of a little-endian pcap file that are there whole.
fn frames(file: &Path) -> Vec<Vec<u8>> {
    let octets = fs::read(file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
    let word = |at: usize| u32::from_le_bytes(octets[at..at + 4].try_into().expect("4 octets"));
    assert_eq!(word(0), 0xa1b2_c3d4, "{}", file.display());
    let (mut at, mut frames) = (24, Vec::new());
    while at < octets.len() {
        let (captured, len) = (word(at + 8) as usize, word(at + 12) as usize);
        if captured == len {
            frames.push(octets[at + 16..at + 16 + captured].to_vec());
        }
        at += 16 + captured;
    }
    frames
}

/// A capture, and what another decoder says of it.
struct Capture {
    name: String,
    frames: Vec<Vec<u8>>,
    /// How often each opcode is there.
    opcodes: BTreeMap<String, u64>,
}

/// The kernel's RoCE captures.
fn kernel_captures() -> Vec<Capture> {
    let Some(folder) = shared("captures/kernel") else {
        return Vec::new();
    };
    let entries = fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display()));
    let mut names: Vec<_> = entries
        .map(|entry| entry.expect("a folder entry").file_name().to_string_lossy().into_owned())
        .filter_map(|name| Some(name.strip_suffix(".pcap")?.to_owned()))
        .filter(|name| name.starts_with("roce_"))
        .collect();
    names.sort();
    names
        .into_iter()
        .map(|name| {
            let truth = fs::read(folder.join(format!("{name}.json"))).expect("its truth");
            let truth: serde_json::Value = serde_json::from_slice(&truth).expect("JSON");
            let opcodes = truth["roce"]["opcodes"].as_object().into_iter().flatten();
            let opcodes = opcodes.map(|(k, v)| (k.clone(), v.as_u64().unwrap_or(0))).collect();
            let frames = frames(&folder.join(format!("{name}.pcap")));
            Capture { name, frames, opcodes }
        })
        .collect()
}

/// The IP packet of an Ethernet frame that carries RoCEv2, and the length of its headers.
fn rocev2(frame: &[u8]) -> Option<(&[u8], usize)> {
    let ip = frame.get(14..)?;
    let header_len = match (frame[12], frame[13]) {
        (0x08, 0x00) if ip[9] == 17 => 20,
        (0x86, 0xdd) if ip[6] == 17 => 40,
        _ => return None,
    };
    let dst_port = u16::from_be_bytes([ip[header_len + 2], ip[header_len + 3]]);
    (dst_port == UDP_PORT).then_some((ip, header_len + 8))
}

#[test]
fn packets_of_linux_rxe_are_read_and_written() {
    let captures = kernel_captures();
    let mut seen = 0;
    for Capture { name, frames, opcodes: expected } in &captures {
        let mut opcodes = BTreeMap::<String, u64>::new();
        for (ip, header_len) in frames.iter().filter_map(|frame| rocev2(frame)) {
            assert_eq!(icrc::check(ip), Ok(()), "{name}");
            let packet = Packet::parse(&ip[header_len..]).unwrap_or_else(|e| panic!("{name}: {e}"));
            let opcode = packet.headers.bth.opcode().name().expect("a known opcode");
            *opcodes.entry(opcode.to_owned()).or_default() += 1;
            let (mut headers, mut out) = (packet.headers, ip[..header_len].to_vec());
            headers.emit_packet(packet.payload, &mut out);
            out.extend(packet.icrc.expect("an ICRC"));
            assert_eq!((packet.check_form(), &out[..]), (Ok(()), ip), "{name}");
            seen += 1;
        }
        assert_eq!(opcodes, *expected, "{name}");
    }
    assert!(captures.is_empty() || seen >= 1700, "{seen} packets");
}

#[test]
fn a_socket_finds_the_identification_of_each_packet_of_linux_rxe() {
    let captures = kernel_captures();
    let mut seen = 0;
    for Capture { name, frames, .. } in &captures {
        for (ip, header_len) in frames.iter().filter_map(|frame| rocev2(frame)) {
            if header_len != 28 {
                continue;
            }
            let half = |at: usize| u16::from_be_bytes([ip[at], ip[at + 1]]);
            let address = |at: usize| Ipv4Addr::new(ip[at], ip[at + 1], ip[at + 2], ip[at + 3]);
            let path = PathV4 {
                src: address(12),
                dst: address(16),
                src_port: half(20),
                dst_port: half(22),
            };
            let sent = Identification { identification: half(4), dont_fragment: ip[6] == 0x40 };
            let payload = &ip[header_len..];
            assert_eq!(verify_unknown_id(&path, payload, None), Some(sent), "{name}");
            let known = Some(sent.dont_fragment);
            assert_eq!(verify_unknown_id(&path, payload, known), Some(sent), "{name}");
            seen += 1;
        }
    }
    assert!(captures.is_empty() || seen >= 1600, "{seen} packets");
}

#[test]
fn checksums_of_native_infiniband() {
    let Some(file) = shared("captures/public/wiki_infiniband_erf.pcap") else {
        return;
    };
    let mut seen = 0;
    for frame in frames(&file) {
        // ERF: 16 octets of header, type 21 for InfiniBand; a set upper bit says that extension
        // headers follow.
        assert_eq!(frame[8], 21);
        let (lrh, _) = Lrh::read_from_prefix(&frame[16..]).expect("an LRH");
        if lrh.next_header() < lrh::BTH {
            continue;
        }
        let (packet, rest) = frame[16..].split_at(lrh.packet_len());
        assert_eq!(vcrc(packet), rest[..VCRC_LEN], "frame of {} octets", packet.len());

        let (grh, body) = if lrh.next_header() == lrh::GRH {
            let (grh, body) = Grh::read_from_prefix(&packet[Lrh::LEN..]).expect("a GRH");
            assert_eq!((grh.version(), grh.payload_len()), (6, body.len()));
            (Some(grh), body)
        } else {
            (None, &packet[Lrh::LEN..])
        };
        let read = Packet::parse(body).unwrap_or_else(|e| panic!("{e}"));
        let covered = &body[Bth::LEN..body.len() - ICRC_LEN];
        let mut icrc = Icrc::ib(&lrh, grh.as_ref(), &read.headers.bth);
        icrc.update(covered);
        assert_eq!(Some(icrc.finish()), read.icrc, "frame of {} octets", packet.len());
        seen += 1;
    }
    assert_eq!(seen, 43);
}
