//! Makes the seeds in `corpus/` from `../pcaps` and from `specs/vectors.json` (beside the tree, or in
//! `$USERDMA_SHARED`). What is there under other names stays: inputs that once found something.
//!
//! ```sh
//! cargo run --manifest-path fuzz/Cargo.toml --example seeds
//! ```

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use serde_json::Value;
use userdma_fuzz::FOLDER;
use userdma_proto::{
    dissect::{Dissector, Options, capture::Reader},
    mem::PdId,
    roce::{
        self, PathMtu, Port, Train,
        port::{Accept, Config, Connect, Event, Limits},
    },
    time::Instant,
    verbs::{Access, QpType, RecvWr, RemoteAddr, SendWr, Sge},
    wire::{
        ib::{lrh::Lrh, vcrc::vcrc},
        ids::{Gid, LKey, Msn, PKey, Psn, Qpn, RKey, Stag},
        iwarp::{
            ddp::UntaggedHeader,
            fpdu::{self, MarkerEncoder},
            mpa::{Start, StartFlags, StartKind},
            rdmap,
        },
        mad::{MAD_LEN, cm::PortSpace},
        roce::{Packet, UDP_PORT, bth::Bth, feth::Placement, grh::Grh, icrc::Icrc, opcode::Opcode},
    },
};
use userdma_tests::PlainMemory;
use zerocopy::IntoBytes;

/// Captures longer than this are cut behind a frame.
const MOST_OCTETS: usize = 5000;

fn main() {
    let captures = captures();
    roce_packets(&captures);
    streams(&captures);
    mads(&captures);
    files(&captures);
    vectors();
    scripts();
    queue_pair_scripts();
    manager_scripts();
    port_scripts();
    kernel_mads(&captures);
    simulated();
    builders();
}

fn seed(target: &str, name: &str, octets: &[&[u8]]) {
    let folder = Path::new(FOLDER).join("corpus").join(target);
    fs::create_dir_all(&folder).expect("a folder that can be made");
    fs::write(folder.join(name), octets.concat()).expect("a file that can be written");
}

// -------------------------------------------------------------------------------------- captures

struct Capture {
    name: String,
    file: Vec<u8>,
    /// Link type and octets.
    frames: Vec<(u16, Vec<u8>)>,
}

/// The captures of this repository, by name.
fn captures() -> Vec<Capture> {
    let folder = Path::new(FOLDER).join("../pcaps");
    let mut paths: Vec<PathBuf> = fs::read_dir(&folder)
        .expect("the captures")
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| {
            let name = path.to_string_lossy();
            [".pcap", ".pcap.gz", ".pcapng", ".pcapng.gz"].iter().any(|end| name.ends_with(end))
        })
        .collect();
    paths.sort();
    paths
        .into_iter()
        .map(|path| {
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let file = fs::read(&path).expect("a readable capture");
            let mut reader = Reader::new(&file[..]).expect("a capture");
            let mut frames = Vec::new();
            while let Some(record) = reader.next_record().expect("a good capture") {
                frames.push((record.link.0, record.data.to_vec()));
            }
            Capture { name, file, frames }
        })
        .collect()
}

/// The IP packet of an Ethernet frame: its header, the protocol, what follows.
fn ip(frame: &[u8]) -> Option<(&[u8], u8, &[u8])> {
    let mut rest = frame.get(12..)?;
    while matches!(rest.get(..2)?, [0x81, 0] | [0x88, 0xa8]) {
        rest = rest.get(4..)?;
    }
    let ip = rest.get(2..)?;
    match (rest.get(..2)?, ip.first()? >> 4) {
        ([8, 0], 4) => {
            let len = usize::from(u16::from_be_bytes([ip[2], ip[3]]));
            let (header, rest) = ip.get(..len)?.split_at_checked(usize::from(ip[0] & 15) * 4)?;
            Some((header, header[9], rest))
        }
        ([0x86, 0xdd], 6) => {
            let len = usize::from(u16::from_be_bytes([ip[4], ip[5]]));
            let (header, rest) = ip.get(..40 + len)?.split_at(40);
            Some((header, header[6], rest))
        }
        _ => None,
    }
}

// ------------------------------------------------------------------------------------------ RoCE

/// As `roce_packet` wants it: IPv4 or IPv6 header without options, UDP header, packet.
fn roce_packet(header: &[u8], udp: &[u8]) -> Option<Vec<u8>> {
    let kind: u8 = match header.len() {
        20 => 0,
        40 => 1,
        _ => return None,
    };
    Some([&[kind, 0, 0][..], header, udp].concat())
}

/// The first packet of each opcode and IP version.
fn roce_packets(captures: &[Capture]) {
    let mut seen = BTreeSet::new();
    for (_, frame) in captures.iter().flat_map(|capture| &capture.frames) {
        let Some((header, 17, udp)) = ip(frame) else { continue };
        if udp.len() < 24 || udp[2..4] != UDP_PORT.to_be_bytes() {
            continue;
        }
        let (version, opcode) = (header[0] >> 4, Opcode(udp[8]));
        let (Some(name), Some(input)) = (opcode.name(), roce_packet(header, udp)) else { continue };
        if input.len() < 600 && seen.insert((version, opcode)) {
            seed("roce_packet", &format!("ipv{version}_{}", name.to_lowercase()), &[&input]);
        }
    }
    assert!(seen.len() > 20, "{} packets", seen.len());
}

/// The first of each attribute.
fn mads(captures: &[Capture]) {
    let mut seen = BTreeSet::new();
    for capture in captures {
        let mut reader = Reader::new(&capture.file[..]).expect("a capture");
        let mut dissector = Dissector::new(Options::default());
        while let Some(record) = reader.next_record().expect("a good capture") {
            dissector.handle_record(&record);
        }
        dissector.finish();
        while let Some(frame) = dissector.poll_frame() {
            for mad in frame.roce.iter().filter_map(|roce| roce.mad.as_deref()) {
                let Some(&[high, low]) = mad.get(16..18) else { continue };
                let attribute = u16::from_be_bytes([high, low]);
                if seen.insert(attribute) {
                    let name = userdma_proto::wire::mad::attribute_name(mad[1], attribute);
                    let name = name.unwrap_or("unknown").to_lowercase();
                    seed("cm_mad", &format!("cm_{name}"), &[&[high ^ low], mad]);
                }
            }
        }
    }
    assert!(seen.len() >= 7, "{} attributes", seen.len());
}

// ----------------------------------------------------------------------------------------- iWARP

/// The start-up frames, and the front of what follows them.
fn streams(captures: &[Capture]) {
    for capture in captures.iter().filter(|c| c.name.starts_with("iwarp")) {
        let mut flows: BTreeMap<Vec<u8>, (u32, Vec<u8>)> = BTreeMap::new();
        for (_, frame) in &capture.frames {
            let Some((header, 6, tcp)) = ip(frame) else { continue };
            let addresses = if header.len() == 20 { &header[12..] } else { &header[8..] };
            let flow = [addresses, &tcp[..4]].concat();
            let seq = u32::from_be_bytes([tcp[4], tcp[5], tcp[6], tcp[7]]);
            let payload = &tcp[usize::from(tcp[12] >> 4) * 4..];
            if tcp[13] & 2 != 0 {
                flows.insert(flow, (seq.wrapping_add(1), Vec::new()));
            } else if let Some((next, octets)) = flows.get_mut(&flow)
                && *next == seq
            {
                *next = seq.wrapping_add(payload.len() as u32);
                octets.extend_from_slice(payload);
            }
        }
        let name = capture.name.split('.').next().unwrap_or_default();
        let starts: Vec<_> =
            flows.values().filter_map(|(_, octets)| Start::parse(octets).ok().flatten()).collect();
        let crc = starts.iter().any(|(start, _)| start.flags.contains(StartFlags::CRC));
        for (n, (_, octets)) in flows.values().enumerate() {
            let Ok(Some((start, used))) = Start::parse(octets) else { continue };
            let kind = format!("{:?}", start.kind).to_lowercase();
            seed("mpa_start", &format!("{name}_{kind}"), &[&octets[..used]]);
            let stream = &octets[used..octets.len().min(used + 1500)];
            if !stream.is_empty() {
                // Two cuts.
                let front = [0x20 | u8::from(crc) << 1, 7, 0, 40, 0];
                seed("iwarp_stream", &format!("{name}_{n}"), &[&front, stream]);
            }
        }
    }
}

// ----------------------------------------------------------------------------------------- files

/// Every capture, or its front; and the front of one in every form that a file can have.
fn files(captures: &[Capture]) {
    const PLAIN: [u8; 2] = [0, 0x25];
    for capture in captures {
        let name = capture.name.replace('.', "_");
        if capture.file.len() <= MOST_OCTETS {
            seed("dissect_file", &name, &[&PLAIN, &capture.file]);
            continue;
        }
        let mut out = pcap_header(capture.frames[0].0);
        for (_, frame) in &capture.frames {
            if out.len() + 16 + frame.len() > MOST_OCTETS {
                break;
            }
            pcap_record(&mut out, frame);
        }
        seed("dissect_file", &format!("front_of_{name}"), &[&PLAIN, &out]);
    }
    let rping = captures.iter().find(|c| c.name == "roce_rping.pcap").expect("it is there");
    let (req, data) = (&rping.frames[0].1, &rping.frames[3].1);
    for (name, swap, magic) in [
        ("pcap_micros_big_endian", true, 0xa1b2_c3d4u32),
        ("pcap_nanos", false, 0xa1b2_3c4d),
        ("pcap_nanos_big_endian", true, 0xa1b2_3c4d),
        ("pcap_modified", false, 0xa1b2_cd34),
    ] {
        let word = |n: u32| if swap { n.to_be_bytes() } else { n.to_le_bytes() };
        let half = |n: u16| if swap { n.to_be_bytes() } else { n.to_le_bytes() };
        let mut out =
            [&word(magic)[..], &half(2), &half(4), &word(0), &word(0), &word(65_535)].concat();
        out.extend(word(1));
        for frame in [req, data] {
            let len = frame.len() as u32;
            out.extend([word(1_700_000_000), word(5), word(len), word(len)].concat());
            if magic == 0xa1b2_cd34 {
                // Interface, protocol, kind, pad.
                out.extend([0; 8]);
            }
            out.extend(frame);
        }
        seed("dissect_file", name, &[&PLAIN, &out]);
    }
    seed("dissect_file", "pcapng_every_block", &[&PLAIN, &pcapng(req, data)]);
    seed("dissect_file", "tunnels_and_links", &[&PLAIN, &tunnels(data)]);
    seed("dissect_file", "ip_fragments", &[&PLAIN, &fragments(req)]);
    seed("dissect_file", "link_layers", &[&PLAIN, &links(data)]);
    seed("dissect_file", "ipv6_extensions", &[&PLAIN, &extensions(data)]);
    seed("dissect_file", "iwarp_with_markers", &[&PLAIN, &marked()]);
}

fn pcap_header(link: u16) -> Vec<u8> {
    let mut out = [0xd4, 0xc3, 0xb2, 0xa1, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0].to_vec();
    out.extend(65_535u32.to_le_bytes());
    out.extend(u32::from(link).to_le_bytes());
    out
}

fn pcap_record(out: &mut Vec<u8>, frame: &[u8]) {
    let len = (frame.len() as u32).to_le_bytes();
    out.extend(
        [&1_700_000_000u32.to_le_bytes()[..], &7u32.to_le_bytes(), &len, &len, frame].concat(),
    );
}

/// A section of each byte order; interfaces with options; EPB, SPB, the old PB, and blocks that are
/// no frames.
fn pcapng(req: &[u8], data: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    for big in [false, true] {
        let word = |n: u32| if big { n.to_be_bytes() } else { n.to_le_bytes() };
        let half = |n: u16| if big { n.to_be_bytes() } else { n.to_le_bytes() };
        let mut block = |kind: u32, body: Vec<u8>| {
            let len = word(12 + body.len().next_multiple_of(4) as u32);
            out.extend([word(kind), len].concat());
            out.extend(&body);
            out.resize(out.len().next_multiple_of(4), 0);
            out.extend(len);
        };
        let option = |code: u16, value: &[u8]| {
            let mut option = [half(code), half(value.len() as u16)].concat();
            option.extend(value);
            option.resize(option.len().next_multiple_of(4), 0);
            option
        };
        block(0x0a0d_0d0a, [&word(0x1a2b_3c4d)[..], &half(1), &half(0), &[0xff; 8]].concat());
        // if_tsresol: nanoseconds; if_tsoffset; if_name.
        let offset = if big { 100u64.to_be_bytes() } else { 100u64.to_le_bytes() };
        let options =
            [option(9, &[9]), option(14, &offset), option(2, b"eth0"), option(0, &[])].concat();
        block(1, [&half(1)[..], &half(0), &word(0), &options].concat());
        block(1, [&half(1)[..], &half(0), &word(64)].concat());
        let lens = |frame: &[u8]| [word(frame.len() as u32), word(frame.len() as u32)].concat();
        block(6, [&word(0)[..], &word(1), &word(2), &lens(req), req].concat());
        block(3, [&word(data.len() as u32)[..], data].concat());
        block(2, [&half(1)[..], &half(0), &word(1), &word(2), &lens(data), data].concat());
        block(5, [&word(0)[..], &word(1), &word(2)].concat());
        block(0x0bad, [&word(32_473)[..], b"custom"].concat());
        block(4, word(0).to_vec());
    }
    out
}

/// A RoCE packet behind VLAN, MPLS, GRE, VXLAN and Geneve.
fn tunnels(frame: &[u8]) -> Vec<u8> {
    let (macs, ip) = (&frame[..12], &frame[14..]);
    let outer = |protocol: u8, inner: &[u8]| {
        let len = (20 + inner.len() as u16).to_be_bytes();
        let header =
            [0x45, 0, len[0], len[1], 0, 0, 0, 0, 64, protocol, 0, 0, 10, 0, 0, 1, 10, 0, 0, 2];
        [macs, &[8, 0], &header, inner].concat()
    };
    let udp = |port: u16, inner: &[u8]| {
        let len = (8 + inner.len() as u16).to_be_bytes();
        outer(17, &[&[0xc0, 0][..], &port.to_be_bytes(), &len, &[0, 0], inner].concat())
    };
    let mut out = pcap_header(1);
    for frame in [
        [macs, &[0x88, 0xa8, 0, 1, 0x81, 0, 0, 2, 8, 0], ip].concat(),
        [macs, &[0x88, 0x47, 0, 0, 0x10, 64, 0, 0, 0x21, 64], ip].concat(),
        outer(47, &[&[0, 0, 8, 0][..], ip].concat()),
        outer(47, &[&[0x30, 0, 0x65, 0x58, 0, 0, 0, 1, 0, 0, 0, 2][..], frame].concat()),
        udp(4789, &[&[8, 0, 0, 0, 0, 0, 1, 0][..], frame].concat()),
        udp(6081, &[&[1, 0, 0x65, 0x58, 0, 0, 1, 0, 0, 0, 1, 0][..], frame].concat()),
        // Pause, and priority flow control.
        [macs, &[0x88, 0x08, 0, 1, 0, 9], &[0; 42]].concat(),
        [macs, &[0x88, 0x08, 1, 1, 0, 8], &[0; 42]].concat(),
    ] {
        pcap_record(&mut out, &frame);
    }
    out
}

/// A RoCE packet on every link layer but Ethernet; RoCEv1, and InfiniBand with a GRH and without.
fn links(frame: &[u8]) -> Vec<u8> {
    let ip = &frame[14..];
    let (len, gid) = (48u16, Gid([0xfe; 16]));
    let bth = Bth::new(Opcode(4), PKey(0xffff), Qpn(2), Psn::new(7));
    let packet = |front: &[&[u8]], mut icrc: Icrc| {
        icrc.update(&[9; 32]);
        [&front.concat()[..], bth.as_bytes(), &[9; 32], &icrc.finish()].concat()
    };
    let grh = Grh::new(gid, gid, len);
    let short = Lrh::new(2, 1, 2, 8 + usize::from(len));
    let long = Lrh::new(3, 1, 2, 48 + usize::from(len));
    let v1 = packet(&[grh.as_bytes()], Icrc::grh(&grh, &bth));
    let ib = |octets: Vec<u8>| [&octets[..], &vcrc(&octets)].concat();
    let local = ib(packet(&[short.as_bytes()], Icrc::ib(&short, None, &bth)));
    let global = ib(packet(&[long.as_bytes(), grh.as_bytes()], Icrc::ib(&long, Some(&grh), &bth)));
    // ERF: time, kind, flags, length of the record, lost, length on the wire.
    let erf = |kind: u8, pad: &[u8], octets: &[u8]| {
        let (len, wire) = ((16 + pad.len() + octets.len()) as u16, octets.len() as u16);
        let front = [&[0, 0, 0, 0x80, 0, 0xf1, 0x53, 0x65, kind, 4][..], &len.to_be_bytes()];
        [&front.concat()[..], &[0, 0], &wire.to_be_bytes(), pad, octets].concat()
    };
    let frames = [
        (0, [&[2, 0, 0, 0], ip].concat()),
        (108, [&[0, 0, 0, 2], ip].concat()),
        (101, ip.to_vec()),
        (113, [&[0, 0, 0, 1, 0, 6, 1, 2, 3, 4, 5, 6, 0, 0, 8, 0], ip].concat()),
        (276, [&[8, 0, 0, 0, 0, 0, 0, 1, 0, 1, 0, 6, 1, 2, 3, 4, 5, 6, 0, 0], ip].concat()),
        (1, [&frame[..12], &[0x89, 0x15], &v1].concat()),
        (247, local.clone()),
        (247, global.clone()),
        (197, erf(21, &[], &local)),
        (197, erf(21, &[], &global)),
        (197, erf(2, &[0, 0], frame)),
        // With an extension header.
        (197, erf(2 | 0x80, &[1, 0, 0, 0, 0, 0, 0, 0, 0, 0], frame)),
    ];
    // Link types whose octets in front of the frame are no header of the frame.
    let other = [123, 140, 144, 177, 196, 201, 204, 209, 245, 254].map(|link| (link, vec![1; 20]));
    let mut out = Vec::new();
    let mut block = |kind: u32, body: &[u8]| {
        let len = (12 + body.len().next_multiple_of(4) as u32).to_le_bytes();
        out.extend([kind.to_le_bytes(), len].concat());
        out.extend(body);
        out.resize(out.len().next_multiple_of(4), 0);
        out.extend(len);
    };
    block(0x0a0d_0d0a, &[&[0x4d, 0x3c, 0x2b, 0x1a, 1, 0, 0, 0][..], &[0xff; 8]].concat());
    for (n, (link, frame)) in frames.into_iter().chain(other).enumerate() {
        block(1, &[u32::from(link as u16).to_le_bytes(), [0; 4]].concat());
        let len = (frame.len() as u32).to_le_bytes();
        let front = [(n as u32).to_le_bytes(), [0; 4], [9; 4], len, len];
        block(6, &[&front.concat()[..], &frame].concat());
    }
    out
}

/// UDP behind IPv6 extension headers: hop-by-hop, routing, authentication, fragments, destination.
fn extensions(frame: &[u8]) -> Vec<u8> {
    let (macs, udp) = (&frame[..12], &frame[34..]);
    let ip = |next: u8, body: &[u8]| {
        let len = (body.len() as u16).to_be_bytes();
        let front = [0x60, 0, 0, 0, len[0], len[1], next, 64];
        [macs, &[0x86, 0xdd], &front, &[0xfd; 32], body].concat()
    };
    let eight = |next: u8, rest: &[u8]| [&[next, 0, 1, 4, 0, 0, 0, 0], rest].concat();
    let authentication = [&[17, 2, 0, 0][..], &[7; 12], udp].concat();
    let piece = |offset: u8, more: u8, octets: &[u8]| {
        ip(44, &[&[17, 0, 0, offset | more, 0, 0, 0, 1], octets].concat())
    };
    let (first, second) = udp.split_at(24);
    let mut out = pcap_header(1);
    for frame in [
        ip(0, &eight(43, &eight(60, &eight(17, udp)))),
        ip(51, &authentication),
        ip(60, &eight(51, &authentication)),
        piece(24, 0, second),
        piece(0, 1, first),
    ] {
        pcap_record(&mut out, &frame);
    }
    out
}

/// A connection whose streams have markers, and one whose start is missing.
fn marked() -> Vec<u8> {
    let mut out = pcap_header(1);
    for (port, whole) in [(7174u16, true), (7175, false)] {
        let (mut seqs, mut encoders) = ([100u32, 900], [true, true].map(MarkerEncoder::new));
        let mut segment = |from: usize, flags: u8, payload: &[u8]| {
            let len = (40 + payload.len() as u16).to_be_bytes();
            let ends = [[10, 0, 0, 1], [10, 0, 0, 2]];
            let ports = [40_000u16.to_be_bytes(), port.to_be_bytes()];
            let frame = [
                &[2, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 2, 8, 0, 0x45, 0, len[0], len[1]][..],
                &[0, 0, 0x40, 0, 64, 6, 0, 0],
                &ends[from],
                &ends[1 - from],
                &ports[from],
                &ports[1 - from],
                &seqs[from].to_be_bytes(),
                &seqs[1 - from].to_be_bytes(),
                &[0x50, flags, 0x20, 0, 0, 0, 0, 0],
                payload,
            ];
            pcap_record(&mut out, &frame.concat());
            seqs[from] += payload.len() as u32 + u32::from(flags & 3 != 0);
        };
        if whole {
            segment(0, 2, &[]);
            segment(1, 0x12, &[]);
            for (from, kind) in [StartKind::Request, StartKind::Reply].into_iter().enumerate() {
                let (flags, mut frame) = (StartFlags::MARKERS | StartFlags::CRC, Vec::new());
                Start { kind, flags, revision: 1, enhanced: None, private_data: b"hi" }
                    .emit(&mut frame);
                segment(from, 0x18, &frame);
            }
        }
        for msn in 1..6 {
            for (from, encoder) in encoders.iter_mut().enumerate() {
                let header =
                    UntaggedHeader::new(rdmap::Opcode::SEND, true, 0, Msn(msn), 0, Stag(0));
                let (mut plain, mut stream) = (Vec::new(), Vec::new());
                let start = fpdu::begin(&mut plain);
                plain.extend([header.as_bytes(), &[msn as u8; 180]].concat());
                fpdu::finish(&mut plain, start, true);
                encoder.push(&plain, &mut stream);
                segment(from, 0x18, &stream);
            }
        }
        segment(0, 0x11, &[]);
    }
    out
}

/// A datagram in two fragments, the second one first.
fn fragments(frame: &[u8]) -> Vec<u8> {
    let (front, ip) = frame.split_at(14);
    let (header, body) = ip.split_at(20);
    let (first, second) = body.split_at(160);
    let mut out = pcap_header(1);
    for (piece, offset, more) in [(second, 20u16, 0u16), (first, 0, 0x2000)] {
        let mut header = header.to_vec();
        header[2..4].copy_from_slice(&(20 + piece.len() as u16).to_be_bytes());
        header[6..8].copy_from_slice(&(offset | more).to_be_bytes());
        pcap_record(&mut out, &[front, &header, piece].concat());
    }
    out
}

// --------------------------------------------------------------------------------------- vectors

fn vectors() {
    let Some(path) = userdma_tests::shared("specs/vectors.json") else { return };
    let all: Value = serde_json::from_slice(&fs::read(path).expect("readable")).expect("JSON");
    let unhex = |value: &Value| -> Vec<u8> {
        let digits = value.as_str().expect("hex digits");
        (0..digits.len())
            .step_by(2)
            .map(|at| u8::from_str_radix(&digits[at..at + 2], 16).expect("hex digits"))
            .collect()
    };
    let entries = |part: &str| all[part].as_array().expect("a list").iter().enumerate();
    for (n, v) in entries("mpa_startup") {
        seed("mpa_start", &format!("vector_{n}"), &[&unhex(&v["frame"])]);
    }
    for (n, v) in entries("mpa_fpdu") {
        let markers = v["markers"].as_bool().expect("markers");
        // A later place in the stream would need the FPDU in front of it.
        if v["stream_offset"].as_u64().unwrap_or(0) == 0 {
            let front = [0x12 | u8::from(markers), 5, 0];
            seed("iwarp_stream", &format!("vector_{n:02}"), &[&front, &unhex(&v["fpdu"])]);
        }
    }
    for (_, v) in entries("rocev2_synthetic") {
        let packet = unhex(&v["ip_packet"]);
        let (header, udp) = packet.split_at(if packet[0] >> 4 == 4 { 20 } else { 40 });
        let name: String = v["name"].as_str().expect("a name").to_lowercase();
        let name: String =
            name.chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '_' }).collect();
        if let Some(input) = roce_packet(header, udp) {
            seed("roce_packet", &format!("vector_{}", name.trim_matches('_')), &[&input]);
        }
    }
}

// --------------------------------------------------------------------------------------- scripts

/// Scripts for `iwarp_connection`; see there what the numbers mean.
fn scripts() {
    const ALL_WRITTEN: [u8; 3] = [9, 0xff, 0xff];
    const TAKEN: u8 = 0;
    // Settings: MPA and bounds, then the role. Start-up frame: flags, revision, depths.
    let initiator = |mpa: u8, flags: u8, depths: [u8; 4]| {
        [&[mpa, 0xf0, 0][..], &ALL_WRITTEN, &[5, flags, 0], &depths, &[TAKEN]].concat()
    };
    let responder = |mpa: u8, flags: u8, depths: [u8; 4]| {
        [&[mpa, 0xf0, 1, 5, flags, 0][..], &depths, &[TAKEN, 12, 0], &ALL_WRITTEN].concat()
    };
    let depths = [0, 2, 0, 2];
    // A SEND: opcode 3, untagged, last; queue, MSN and MO as they are due; no STag; 16 octets.
    let send = [0, 3 << 4, 0, 0, 0, 6, 0, 16, 0, TAKEN];
    // A receive of two pieces in the inbox.
    let recv = [8, 2, 2, 0, 0, 0, 64, 0, 2, 0, 64, 0, 64, 0];
    // An inline SEND of 4 octets.
    let post = [6, 0, 0, 0, 0, 0x10, 4, b'a', b'b', b'c', b'd'];
    // A READ into the inbox, and its response.
    let read = [6, 0, 0, 0, 1, 0x08, 1, 2, 0, 0, 0, 32, 0];
    // A SEND of 2,000 octets from the region that allows everything: too many to be copied.
    let long = [6, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0xd0, 7];
    let response = [0, 2 << 4 | 1, 0x80, 0, 0, 0, 0, 32, 0, TAKEN];
    // The peer WRITEs, READs and adds.
    let write = [0, 1, 0, 0, 8, 0, 0, 24, 0, TAKEN];
    let asks = [0, 1 << 4, 0, 0, 0, 6, 1, 9, 200, 0, 0, 0, 0, 0, TAKEN];
    let adds = [&[0, 10 << 4, 0, 0, 0, 6, 2][..], &[7; 52], &[0, 0, 0, 16, 0, TAKEN]].concat();
    let close = [15, 0];
    let fin = [13];

    let script = |name: &str, steps: &[&[u8]]| seed("iwarp_connection", name, steps);
    script(
        "initiator_sends_and_reads",
        &[
            &initiator(0, 0, depths),
            &recv,
            &post,
            &read,
            &ALL_WRITTEN,
            &response,
            &send,
            &close,
            &ALL_WRITTEN,
            &fin,
        ],
    );
    script(
        "responder_serves",
        &[
            &responder(0, 0, depths),
            &recv,
            &send,
            &write,
            &asks,
            &adds,
            &ALL_WRITTEN,
            &post,
            &ALL_WRITTEN,
            &fin,
        ],
    );
    script(
        "crc_and_markers_both_ways",
        &[
            &initiator(3, 0xc0, depths),
            &recv,
            &post,
            &read,
            &ALL_WRITTEN,
            &response,
            &send,
            &write,
            &ALL_WRITTEN,
        ],
    );
    script(
        "peer_to_peer",
        &[&initiator(8, 0, [0x80, 2, 0x80, 2]), &ALL_WRITTEN, &recv, &send, &post, &ALL_WRITTEN],
    );
    script("revision_1", &[&responder(4, 0x40, depths), &recv, &send, &post, &ALL_WRITTEN, &fin]);
    script("no_receive_posted", &[&responder(0, 0, depths), &send, &ALL_WRITTEN, &fin]);
    // To the region that allows nothing.
    let refused = [0, 1, 1, 0, 8, 0, 0, 24, 0, TAKEN];
    script("write_refused", &[&responder(0, 0, depths), &refused, &ALL_WRITTEN, &fin]);
    let terminate = [0, 7 << 4, 0, 0, 0, 6, 3, 20, 0, 0x41, 0x43, TAKEN];
    script("peer_terminates", &[&initiator(0, 0, depths), &post, &read, &ALL_WRITTEN, &terminate]);
    script(
        "rejected_by_the_program",
        &[&[0, 0, 1, 5, 0, 0, 0, 1, 0, 1, 0, 12, 5], &ALL_WRITTEN, &fin],
    );
    // A WRITE to the key that may be revoked, a SEND that revokes it, the WRITE once more.
    let to_bound = [0, 1, 3, 0, 8, 0, 0, 24, 0, TAKEN];
    let send_inv = [0, 4 << 4, 0, 0, 0, 3, 0, 16, 0, TAKEN];
    script(
        "peer_invalidates",
        &[&responder(0, 0, depths), &recv, &to_bound, &send_inv, &to_bound, &ALL_WRITTEN],
    );
    script(
        "payload_from_a_region",
        &[&initiator(0, 0, depths), &[14, 0xff, 0x0f], &long, &ALL_WRITTEN, &close, &ALL_WRITTEN],
    );
    script(
        "source_is_gone",
        &[&initiator(0, 0, depths), &[14, 0xff, 0x0f], &long, &[15, 0x60, 0], &ALL_WRITTEN],
    );
    script("start_up_times_out", &[&[0, 0, 1], &recv, &[11, 0xff, 0xff]]);
}

/// What the program and the peer do in a script for `roce_qp`; see there what the numbers mean.
mod qp {
    /// Time-out 67 ms, retries 7, RNR retries for ever; then the type, IP version, path MTU.
    pub(super) fn settings(what: u8) -> [u8; 6] {
        [what, 0x3f, 14, 0, 0, 0]
    }
    /// All that can be sent is.
    pub(super) const SENT: [u8; 4] = [10, 0, 0xff, 0xff];
    /// The next time-out comes.
    pub(super) const TIME: [u8; 1] = [12];
    /// A receive of two pieces in the inbox.
    pub(super) const RECV: [u8; 14] = [9, 2, 2, 0, 0, 0, 64, 0, 2, 0, 64, 0, 64, 0];
    /// A send of four octets, or no more than a header; the operation.
    pub(super) fn inline(op: u8) -> [u8; 10] {
        [7, 0x10 | op, 0, 0, 0, 4, b'a', b'b', b'c', b'd']
    }
    /// A send of 600 octets from, or a READ into, one piece of a region.
    pub(super) fn long(op: u8, key: u8) -> [u8; 12] {
        [7, op, 0, 0, 0, 1, key, 0, 0, 0, 0x58, 2]
    }
    /// An atomic, with its result in the inbox.
    pub(super) fn atomic(op: u8) -> [u8; 11] {
        [7, op, 0, 0, 0, 2, 0, 32, 0, 8, 0]
    }
    /// The peer answers as it should, in so many packets.
    pub(super) fn answer(packets: usize) -> Vec<u8> {
        [&[4, 0, 0, 0, 0][..], &vec![0; 2 * packets]].concat()
    }
    /// It says something else.
    pub(super) fn says(how: u8) -> [u8; 7] {
        [4, 0, how, 0, 0, 0, 0]
    }
    /// A request without RETH: the row among the requests of its type.
    pub(super) fn request(row: u8) -> [u8; 7] {
        [0, row, 0, 0, 0, 0, 0]
    }
    /// One with RETH: the region, how many octets.
    pub(super) fn rdma(row: u8, key: u8, len: u16) -> [u8; 13] {
        let [low, high] = len.to_le_bytes();
        [0, row, 0, 0, key, 0, 8, 0, low, high, 0, 0, 0]
    }
    /// An atomic at offset 16 of the open region.
    pub(super) fn asks_atomic(row: u8) -> [u8; 12] {
        [0, row, 0, 0, 0, 0, 16, 0, 3, 0, 0, 0]
    }
}

/// Scripts for `roce_qp`.
fn queue_pair_scripts() {
    use qp::*;
    const RC: u8 = 0;
    const UC: u8 = 2;
    const UD: u8 = 3;
    const V6: u8 = 4;
    const MTU_1024: u8 = 0x40;
    let script = |name: &str, what: u8, steps: &[&[u8]]| {
        seed("roce_qp", name, &[&settings(what), &steps.concat()]);
    };
    script(
        "rc_requests_of_every_kind",
        RC,
        &[
            &inline(0),
            &inline(4),
            &long(0, 0),
            &SENT,
            &answer(1),
            &answer(1),
            &answer(1),
            &answer(1),
            &answer(1),
            &long(8, 2),
            &atomic(12),
            &SENT,
            &answer(3),
            &answer(1),
            &[7, 0x1b, 0, 0, 0],
            &[7, 14, 0, 0, 0, 0],
            &SENT,
            &answer(1),
            &answer(1),
        ],
    );
    script(
        "rc_answers_of_every_kind",
        RC | V6 | MTU_1024,
        &[
            &RECV,
            &RECV,
            &request(4),
            &[0, 5, 0, 0, 9, 0, 0, 0],
            &rdma(10, 0, 24),
            &rdma(12, 0, 2000),
            &asks_atomic(14),
            &asks_atomic(13),
            &[0, 17, 0, 0, 0, 0, 0, 8, 0, 24, 0, 0, 0, 0],
            &rdma(18, 0, 8),
            &SENT,
        ],
    );
    script(
        "rc_messages_of_many_packets",
        RC,
        &[
            &RECV[..1],
            &[1, 2, 0, 0, 0, 0, 4],
            &request(0),
            &request(2),
            &rdma(6, 0, 600),
            &request(7),
            &request(8),
            &SENT,
        ],
    );
    script(
        "rc_loss",
        RC,
        &[&long(5, 0), &SENT, &says(0xc8), &SENT, &TIME, &SENT, &answer(1), &answer(1), &answer(1)],
    );
    script(
        "rc_read_restarted",
        RC,
        &[&long(8, 2), &SENT, &[4, 0, 0, 1, 0, 0, 0], &TIME, &SENT, &answer(2)],
    );
    // Kept until what is missing comes: a WRITE, and a SEND behind it.
    let keeps = [RC, 0x3f, 14, 0x10, 0, 0];
    let [mut write, mut send] = [rdma(10, 0, 24).to_vec(), request(4).to_vec()];
    (write[2], send[2]) = (0xd9, 0xda);
    let late = rdma(10, 0, 24);
    seed("roce_qp", "rc_out_of_order", &[&keeps, &RECV, &write, &send, &late, &SENT]);
    script("rc_no_receive", RC, &[&request(4), &SENT, &RECV, &request(4), &SENT]);
    script("rc_told_to_wait", RC, &[&inline(0), &SENT, &says(0xa1), &TIME, &SENT, &answer(1)]);
    script("rc_refused", RC, &[&rdma(10, 1, 24), &SENT, &request(4), &SENT]);
    script("rc_told_to_stop", RC, &[&inline(0), &inline(5), &SENT, &says(0xc2)]);
    script("rc_silence", RC, &[&inline(0), &SENT]);
    script(
        "rc_duplicates",
        RC,
        &[
            &RECV,
            &request(4),
            &[15, 0, 0],
            &asks_atomic(14),
            &[15, 0, 0],
            &SENT,
            &[15, 0, 0],
            &SENT,
        ],
    );
    // One at a time may be asked for.
    let depth_1 = [RC, 0x3f, 0x2e, 0, 0, 0];
    let before = |n: u8| [0, 12, 0xd7 - n, 0, 0, 0, 8, 0, 24, 0, 0, 0, 0];
    let reads: Vec<u8> = (0..12).flat_map(before).collect();
    seed("roce_qp", "rc_reads_that_came_before", &[&depth_1, &reads, &SENT]);
    script(
        "rc_drained_and_again",
        RC,
        &[&inline(0), &SENT, &[13, 0x30], &inline(0), &answer(1), &[13, 0x60], &SENT, &answer(1)],
    );
    script("rc_reset_and_again", RC, &[&inline(0), &SENT, &[13, 0], &RECV, &request(4), &SENT]);
    script(
        "uc_both_ways",
        UC | MTU_1024,
        &[&RECV, &request(4), &rdma(10, 0, 24), &inline(0), &long(5, 0), &SENT],
    );
    script("uc_gap", UC, &[&RECV, &request(0), &[0, 2, 0xd9, 0, 0, 0, 0], &request(4), &SENT]);
    script(
        "ud_both_ways",
        UD,
        &[
            &RECV,
            &request(0),
            &RECV,
            &[0, 1, 0, 0, 9, 0, 0, 0],
            &[7, 0, 0x10, 0, 0, 0, 4, 1, 2, 3, 4],
            &SENT,
        ],
    );
}

/// Scripts for `roce_cm`.
fn manager_scripts() {
    let front = [0, 0xf4, 0xf4];
    let (connect, deliver, accept) = ([7, 0, 0, 0], [0, 0, 0, 0], [0x88, 0, 0, 0, 0]);
    let connected = [&connect[..], &deliver, &accept, &deliver, &deliver].concat();
    let script = |name: &str, steps: &[&[u8]]| seed("roce_cm", name, &[&front, &steps.concat()]);
    script("connected_and_disconnected", &[&connected, &[9, 0], &deliver, &deliver]);
    script(
        "both_disconnect",
        &[&connected, &[9, 0, 0x89, 0], &deliver, &deliver, &deliver, &deliver],
    );
    script("rejected", &[&connect, &deliver, &[0x88, 0, 0xff, 0, 0], &deliver]);
    script(
        "smaller_path_mtu",
        &[
            &connect,
            &deliver,
            &[0x88, 0, 0xa0, 0, 0],
            &deliver,
            &deliver,
            &accept,
            &deliver,
            &deliver,
        ],
    );
    script("all_lost", &[&connect, &[0, 0, 2], &[14; 30]]);
    script(
        "reply_lost",
        &[&connect, &deliver, &accept, &[0, 0, 2, 14], &deliver, &deliver, &deliver, &deliver],
    );
    script("ready_by_a_packet", &[&connect, &deliver, &accept, &[0x8c, 0x21]]);
    script("slow_program", &[&connect, &deliver, &[14, 14, 14], &accept]);
    // Token on both sides.
    script("tokens", &[&[7, 0, 0, 1], &deliver, &[0x88, 0, 0, 0, 1], &deliver, &deliver]);
    script("datagram_service", &[&[10, 0, 0, 1], &deliver, &deliver]);
    script("nobody_listens", &[&[7, 1, 0, 0], &deliver, &deliver]);
    // A stranger's requests: its ID, its queue pair.
    let request = |id: u8, qp: u8| [0xc4, 0, 0, 13, 0, id, 0, 0, 0, 0, qp, 0x94, 0x17, 0, 0];
    let ready = [0xc4, 4, 0, 0, 0, 0, 0];
    script(
        "crowd",
        &[1, 2, 3, 4, 5, 6].map(|n| request(n, n)).each_ref().map(|request| &request[..]),
    );
    // Host 1 takes no events.
    let lazy = [2, 0xf4, 0xf4];
    let crowd: Vec<u8> = (1..40).flat_map(|n| request(n, n)).collect();
    seed("roce_cm", "crowd_and_a_lazy_program", &[&lazy, &crowd]);
    let question = |n: u8| [0xc4, 7, 0, 13, 0, n, 0, 0, 0, 0, 0];
    let questions: Vec<u8> = (1..50).flat_map(question).collect();
    seed("roce_cm", "questions_and_a_lazy_program", &[&lazy, &questions]);
    // An MRA for the REQ, with the longest time there is.
    script("told_to_wait_long", &[&connect, &[4, 1, 0, 0, 0x55, 0, 31, 0]]);
    script("stale", &[&request(1, 9), &accept, &ready, &request(2, 9)]);
    script("same_id_again", &[&request(1, 9), &accept, &ready, &request(1, 8)]);
}

/// Scripts for `roce_port`.
fn port_scripts() {
    let front = [0, 0xf4, 0];
    // REQ of the first peer, accepted; RTU.
    let request = [0, 0, 0, 0, 0, 0x21, 0, 0, 0, 0, 0x31, 0x94, 0x17, 0, 0, 0];
    let passive = [&request[..], &[8, 0], &[0, 4, 0, 0, 0, 0, 0, 0]].concat();
    // Answered by its REP.
    let active = [&[7, 0, 0][..], &[0, 3, 0, 0, 0x41, 0, 0xff, 0x51, 0, 0]].concat();
    let recv = [10, 0x80, 1, 2, 0, 0, 0, 64, 0];
    let send = [10, 0, 0x10, 0, 0, 0, 4, 1, 2, 3, 4];
    let (acked, asked) = ([5, 0, 0, 0, 0, 0, 0, 0], [2, 4, 0, 0, 0, 0, 0]);
    let read = [2, 12, 0, 0, 0, 0, 8, 0, 24, 0, 0, 0, 0];
    // The peer disconnects; it answers our DREQ.
    let (dreq, drep) = ([0, 5, 1, 0, 0, 0, 0, 0], [0, 6, 0, 0, 0, 0, 0, 0]);
    let script = |name: &str, what: u8, steps: &[&[u8]]| {
        seed("roce_port", name, &[&[what], &front[1..], &steps.concat()]);
    };
    script("passive_and_data", 0, &[&passive, &recv, &asked, &send, &acked, &read, &[9, 0], &drep]);
    script("active_and_data", 0, &[&active, &send, &acked, &recv, &asked, &dreq]);
    script("ipv6", 1, &[&passive, &recv, &asked, &send, &acked]);
    script("any_address", 3, &[&passive, &recv, &asked, &send, &acked, &[9, 0], &drep]);
    script("ready_by_a_packet", 0, &[&request, &[8, 0], &recv, &asked]);
    script("rejected", 0, &[&request, &[8, 0xc]]);
    script("destroyed", 0, &[&passive, &send, &[9, 0xff], &drep]);
    script("never_answered", 0, &[&request, &[13, 0, 0, 13, 0, 0, 13, 0, 0]]);
    script("never_reached", 0, &[&[7, 0, 0], &[13, 0, 0].repeat(20)]);
    // Marked by a router: one notification.
    script("congestion", 0, &[&passive, &recv, &[2, 4, 0, 0, 0, 0, 0xc], &asked, &[5, 0xe0, 0, 0]]);
    script("by_hand", 0, &[&[12, 0x42], &recv, &asked, &send, &acked, &[12, 0x41], &asked]);
    // One of the type UD: made, brought up, a datagram each way.
    script(
        "datagrams",
        0,
        &[
            &[0x3b, 0x1c, 0x40, 0x1a, 0x80, 1, 2, 0, 0, 0, 64, 0],
            &[0x12, 0, 0, 0, 0, 0, 0],
            &[0x1a, 0, 0, 0x10, 0, 0, 0, 4, 1, 2, 3, 4],
        ],
    );
    script("service_asked_for", 0, &[&[12, 0xd1], &[0, 8, 0, 0, 0, 0, 0, 0]]);
    let rtu = [0, 4, 0, 0, 0, 0, 0, 0];
    script("posted_before_ready", 0, &[&request, &[8, 0], &send, &rtu, &acked]);
    let taken = [&request[..], &[8, 0], &send, &[14, 0], &rtu, &[14, 0], &acked].concat();
    script("posted_before_ready_lazily", 0x10, &[&[12, 0], &taken]);
    script("again_after_the_end", 0, &[&passive, &[9, 0], &drep, &[12, 0], &active]);
    let crowd = |n: u8| [0, 0, 0, 13, 0, n, 0, 0, 0, 0, n, 0x94, 0x17, 0, 0, 0];
    let crowd: Vec<u8> = (1..60).flat_map(crowd).collect();
    script("crowd_and_a_lazy_program", 8, &[&crowd]);
    script("wrong_icrc", 0, &[&passive, &[2, 4, 0, 0, 0, 0, 1]]);
    script("lazy", 0x18, &[&request, &[15, 8, 0, 14, 0], &rtu, &recv, &asked, &[14, 0, 15]]);
}

/// The MADs of the Linux kernel in a capture, one after the other to the same manager and port.
fn kernel_mads(captures: &[Capture]) {
    for name in ["roce_rping.pcap", "roce_udaddy.pcap", "roce_reject.pcap"] {
        let capture = captures.iter().find(|c| c.name == name).expect("it is there");
        let (mut manager, mut port) = (vec![0, 0xf4, 0xf4], vec![0, 0xf4, 0]);
        for (_, frame) in &capture.frames {
            let Some((_, 17, udp)) = ip(frame) else { continue };
            let packet = &udp[8..];
            if Packet::parse(packet).is_ok_and(|p| p.payload.len() == MAD_LEN) {
                // All but two zeros at the end; the program accepts.
                manager.extend([&[0x86, 254][..], &packet[20..274], &[0x88, 0, 0, 0, 0]].concat());
                raw(&mut port, packet);
                port.extend([8, 0]);
            }
        }
        let name = name.trim_end_matches(".pcap").replace("roce_", "kernel_");
        seed("roce_cm", &name, &[&manager]);
        seed("roce_port", &name, &[&port]);
    }
}

/// Step 6 of `roce_qp` and `roce_port`: a packet, neither damaged nor marked.
fn raw(out: &mut Vec<u8>, packet: &[u8]) {
    out.extend([&[6][..], &(packet.len() as u16).to_le_bytes(), packet, &[0, 0]].concat());
}

// ------------------------------------------------------------------------------------- simulated

/// Two ports of ours: what one of them sends, from the REQ to the DREQ, as the other one's input.
fn simulated() {
    let ends = ["192.0.2.2:4791", "192.0.2.1:4791"].map(|addr| addr.parse().expect("an address"));
    let mut ports = [1, 0].map(|seed| Port::new(Config::new(ends[1 - seed as usize], seed)));
    let service = PortSpace::TCP.service_id(7174);
    ports[1].listen(service, 2).expect("it is new");
    let mems = [PlainMemory::default(), PlainMemory::default()];
    let rights = Access::LOCAL_WRITE
        | Access::REMOTE_READ
        | Access::REMOTE_WRITE
        | Access::REMOTE_ATOMIC
        | Access::FLUSH_GLOBAL;
    mems.iter().for_each(|mem| mem.add(1, userdma_tests::PD, rights, 0, vec![1; 4096]));
    let pd = PdId(userdma_tests::PD);
    let qpns = ports.each_mut().map(|port| {
        port.create_qp(roce::Config::new(QpType::Rc, pd, Qpn(0))).expect("there is room")
    });
    let mut out = vec![0, 0xf4, 0];
    let (now, mut train) = (Instant::ZERO, Train::default());
    let mut carry = |ports: &mut [Port; 2], out: &mut Vec<u8>| {
        for from in [0, 1, 0, 1] {
            let [port, peer] = match ports {
                [a, b] if from == 0 => [a, b],
                [a, b] => [b, a],
            };
            while let Some(way) =
                port.poll_transmit(now, &mems[from], Limits::default(), &mut train)
            {
                for octets in train.octets().chunks(train.segment_len()) {
                    peer.handle_datagram(now, way.from, None, 0, octets, &mems[1 - from]);
                    if from == 0 {
                        raw(out, octets);
                    }
                }
            }
        }
    };
    let wish = Connect { mtu: PathMtu::Mtu256, ..Connect::new(ends[1], service) };
    ports[0].connect(now, qpns[0], &wish).expect("it is new");
    carry(&mut ports, &mut out);
    let Some(Event::Request(request)) = ports[1].poll_event() else { panic!("no request") };
    ports[1].accept(now, &request, qpns[1], &Accept::default()).expect("it waits");
    out.extend([8, 0]);
    carry(&mut ports, &mut out);
    // A receive of 64 octets in the open region.
    let sge = |length| Sge::new(0, length, LKey(1));
    ports[1].post_recv(qpns[1], RecvWr::new(0, [sge(64)]), 0).expect("there is room");
    out.extend([10, 0x80, 1, 0, 0, 0, 0, 64, 0]);
    let remote = RemoteAddr::new(512, RKey(1));
    let placement = Placement::GLOBAL_VISIBILITY;
    for wr in [
        SendWr::send(1, [sge(24)]),
        SendWr::write(2, [sge(600)], remote),
        SendWr::read(3, [sge(600)], remote),
        SendWr::fetch_add(4, sge(8), remote, 5),
        SendWr::cmp_swap(5, sge(8), remote, 1, 2),
        SendWr::flush(6, remote, 64, placement),
        SendWr::atomic_write(7, remote, [7; 8]),
    ] {
        ports[0].post_send(qpns[0], wr, 0).expect("there is room");
        carry(&mut ports, &mut out);
    }
    let done = std::iter::from_fn(|| ports[0].poll_completion());
    assert_eq!(done.filter(|(_, done)| done.wc.status.is_ok()).count(), 7);
    ports[0].disconnect(now, qpns[0]).expect("it is connected");
    carry(&mut ports, &mut out);
    seed("roce_port", "simulated_run", &[&out]);
}

/// One input for each thing that `encode_decode` builds.
fn builders() {
    let names = ["roce", "mad", "ip_cm", "mpa_start", "fpdus", "ddp", "terminate"];
    let mut rng = userdma_tests::Rng::new(1);
    for (kind, name) in names.iter().enumerate() {
        for n in 0..4 {
            seed("encode_decode", &format!("{name}_{n}"), &[&[kind as u8], &rng.bytes(180)]);
        }
    }
}
