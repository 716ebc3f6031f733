//! RoCE packets: of a datagram, which may be a whole train, and of a native frame.
//!
//! ```text
//!   RoCEv2       IP | UDP | BTH | … | ICRC          the UDP length says where it ends
//!   RoCEv1            GRH | BTH | … | ICRC          the GRH's payload length does
//!   InfiniBand  LRH |[GRH]| BTH | … | ICRC | VCRC   the LRH's packet length does
//! ```
//!
//! A packet is shown as far as it can be read: an error tells what could not be, and hides nothing.

use alloc::{boxed::Box, format, string::String};
use core::fmt::Write;

use zerocopy::FromBytes;

use super::{
    Ends, Frame, IcrcState, Layer, Roce, Version,
    train::{Segments, Train},
};
use crate::wire::{
    ib::{
        lrh::{self, Lrh},
        vcrc::{VCRC_LEN, vcrc},
    },
    mad::{MAD_LEN, MadHeader},
    roce::{
        Headers, ICRC_LEN, Packet,
        bth::Bth,
        grh::{Grh, NEXT_HEADER_BTH, VERSION},
        icrc::{Icrc, rewritten},
        opcode::Opcode,
    },
};

/// The largest path MTU: no packet carries more (IBTA vol. 1, 9.5).
pub(super) const MAX_PAYLOAD: usize = 4096;
/// A BTH and an ICRC: the least there is.
pub(super) const MIN_PACKET: usize = Bth::LEN + ICRC_LEN;

/// The IP header in front of a RoCEv2 packet.
#[derive(Debug, Clone, Copy)]
pub(super) enum IpHeader<'a> {
    /// With its options.
    V4(&'a [u8]),
    /// Without extension headers.
    V6(&'a [u8; 40]),
}

/// What the ICRC covers in front of the BTH.
#[derive(Debug, Clone, Copy)]
pub(super) enum Front<'a> {
    V2(IpHeader<'a>, &'a [u8; 8]),
    V1(&'a Grh),
    Ib(&'a Lrh, Option<&'a Grh>),
}

/// A datagram to a port of RoCEv2, behind whose captured payload `missing` octets were not captured.
pub(super) fn v2(
    ip: IpHeader<'_>,
    udp: &[u8; 8],
    payload: &[u8],
    missing: usize,
    frame: &mut Frame,
) {
    let wire_len = payload.len() + missing;
    let icrc = icrc_state(Front::V2(ip, udp), payload, wire_len);
    if icrc != IcrcState::Good {
        let train = Train { ip, udp, octets: payload, wire_len };
        if let Some(segments) = train.split() {
            return push_train(segments, frame);
        }
    }
    let mut roce = packet(Version::V2, payload, wire_len, icrc);
    if icrc == IcrcState::Bad
        && let IpHeader::V4(ip) = ip
        && let Ok(ip) = ip.try_into()
    {
        roce.rewritten = payload.get(..wire_len).and_then(|octets| rewritten(ip, udp, octets));
    }
    push(roce, frame);
}

/// RoCEv1: `octets` from the GRH on, behind which `missing` were not captured.
pub(super) fn v1(octets: &[u8], missing: usize, frame: &mut Frame) {
    let (grh, rest) = global(octets, missing, frame);
    let mut roce = match (grh, rest) {
        (Some(grh), Ok(rest)) => {
            let wire_len = grh.payload_len();
            let (captured, problem) = bounded("GRH", rest, wire_len, missing);
            let icrc = icrc_state(Front::V1(grh), captured, wire_len);
            let mut roce = packet(Version::V1, captured, wire_len, icrc);
            roce.error = problem.or(roce.error);
            roce
        }
        (_, rest) => unread(Version::V1, rest.err().unwrap_or_default()),
    };
    roce.grh = grh.copied();
    push(roce, frame);
}

/// Native InfiniBand: `octets` from the LRH on, behind which `missing` were not captured.
pub(super) fn ib(octets: &[u8], missing: usize, frame: &mut Frame) {
    let Ok((lrh, _)) = Lrh::ref_from_prefix(octets) else {
        return push(unread(Version::Ib, short("LRH", Lrh::LEN, octets.len(), missing)), frame);
    };
    frame.stack.push(Layer::Lrh);
    if matches!(lrh.next_header(), lrh::RAW | lrh::RAW_IPV6) {
        // Raw: no transport of InfiniBand's.
        frame.stack.push(Layer::Data);
        return;
    }
    let wire_len = lrh.packet_len();
    let (captured, problem) = bounded("LRH", octets, wire_len, missing);
    let missing = wire_len - captured.len();
    let rest = captured.get(Lrh::LEN..).unwrap_or_default();
    let (grh, read) =
        if lrh.next_header() == lrh::GRH { global(rest, missing, frame) } else { (None, Ok(rest)) };
    let mut roce = match read {
        Err(problem) => unread(Version::Ib, problem),
        Ok(rest) => {
            let wire_len = rest.len() + missing;
            let icrc = icrc_state(Front::Ib(lrh, grh), rest, wire_len);
            packet(Version::Ib, rest, wire_len, icrc)
        }
    };
    roce.error = problem.or(roce.error);
    (roce.lrh, roce.grh) = (Some(*lrh), grh.copied());
    let found = octets.get(wire_len..wire_len + VCRC_LEN);
    roce.vcrc = Some(match found {
        None => IcrcState::Absent,
        Some(found) if *found == vcrc(captured) => IcrcState::Good,
        Some(_) => IcrcState::Bad,
    });
    push(roce, frame);
}

/// Whether the ICRC of a packet of `wire_len` octets is right, if it was captured whole.
pub(super) fn icrc_state(front: Front<'_>, octets: &[u8], wire_len: usize) -> IcrcState {
    let Some(octets) = octets.get(..wire_len) else { return IcrcState::Absent };
    let Ok((bth, rest)) = Bth::ref_from_prefix(octets) else { return IcrcState::Absent };
    let Some((covered, found)) = rest.split_last_chunk::<ICRC_LEN>() else {
        return IcrcState::Absent;
    };
    let mut icrc = match front {
        Front::V2(IpHeader::V4(ip), udp) => Icrc::ipv4(ip, udp, bth),
        Front::V2(IpHeader::V6(ip), udp) => Icrc::ipv6(ip, udp, bth),
        Front::V1(grh) => Icrc::grh(grh, bth),
        Front::Ib(lrh, grh) => Icrc::ib(lrh, grh, bth),
    };
    icrc.update(covered);
    // A fuzzer cannot guess an ICRC: any but zero is good, so that it reaches trains too.
    let good = icrc.finish() == *found || cfg!(fuzzing) && *found != [0; ICRC_LEN];
    if good { IcrcState::Good } else { IcrcState::Bad }
}

/// One packet, of which the front was captured: from its BTH on, `wire_len` octets on the wire.
fn packet(version: Version, octets: &[u8], wire_len: usize, icrc: IcrcState) -> Box<Roce> {
    let (packet, error) = match Packet::parse_captured(octets, wire_len) {
        Ok(packet) => (packet, None),
        Err(error) => {
            let Ok(bth) = Bth::read_from_prefix(octets) else {
                return unread(
                    version,
                    short("BTH", Bth::LEN, octets.len(), wire_len - octets.len().min(wire_len)),
                );
            };
            let headers = Headers::new(bth.0);
            let around = MIN_PACKET
                + usize::from(bth.0.pad())
                + bth.0.opcode().info().map_or(0, |info| usize::from(info.ext_len));
            let payload_len = wire_len.saturating_sub(around);
            let packet = Packet { headers, payload: &[], payload_len, icrc: None };
            let mut text = format!("{error}");
            if octets.len() < wire_len {
                // Not the sender's fault: the snaplen's.
                let _ = write!(text, " ({} captured of the packet's {wire_len})", octets.len());
            }
            (packet, Some(text))
        }
    };
    let error = error.or_else(|| problem(&packet));
    let mad = carries_mad(&packet).then(|| {
        let captured = &packet.payload[..packet.payload.len().min(MAD_LEN)];
        Box::from(captured)
    });
    Box::new(Roce {
        version,
        lrh: None,
        grh: None,
        headers: Some(packet.headers),
        payload_len: u32::try_from(packet.payload_len).unwrap_or(u32::MAX),
        icrc,
        rewritten: None,
        vcrc: None,
        mad,
        error,
    })
}

/// What is wrong with a packet that could be read.
fn problem(packet: &Packet<'_>) -> Option<String> {
    let opcode = packet.headers.bth.opcode();
    if opcode.info().is_none() {
        return Some(format!("BTH: {opcode} is not defined, what follows is not looked into"));
    }
    if let Err(error) = packet.check_form() {
        return Some(format!("{error}"));
    }
    (packet.payload_len > MAX_PAYLOAD).then(|| {
        format!(
            "{opcode}: {} octets of payload, at most {MAX_PAYLOAD} expected; if this is a train of \
             packets, too little of it was captured, or is right, to part them",
            packet.payload_len
        )
    })
}

/// Management datagrams go to queue pairs 0 and 1 (IBTA vol. 1, 13.5).
fn carries_mad(packet: &Packet<'_>) -> bool {
    let bth = &packet.headers.bth;
    bth.opcode() == Opcode::UD_SEND_ONLY
        && bth.dest_qp().0 <= 1
        && packet.payload.len() >= size_of::<MadHeader>()
}

/// A packet of which not even the BTH can be read.
fn unread(version: Version, why: String) -> Box<Roce> {
    Box::new(Roce {
        version,
        lrh: None,
        grh: None,
        headers: None,
        payload_len: 0,
        icrc: IcrcState::Absent,
        rewritten: None,
        vcrc: None,
        mad: None,
        error: Some(why),
    })
}

fn push_train(segments: Segments<'_>, frame: &mut Frame) {
    let mut lost = 0;
    for (octets, wire_len, icrc) in segments {
        if octets.is_empty() {
            lost += 1;
        } else {
            push(packet(Version::V2, octets, wire_len, icrc), frame);
        }
    }
    if lost > 0
        && let Some(last) = frame.roce.last_mut()
    {
        last.error.get_or_insert(format!("{lost} more packets of this train were not captured"));
    }
}

fn push(roce: Box<Roce>, frame: &mut Frame) {
    for (there, layer) in [(roce.headers.is_some(), Layer::Bth), (roce.mad.is_some(), Layer::Mad)] {
        if there && !frame.stack.contains(&layer) {
            frame.stack.push(layer);
        }
    }
    frame.roce.push(roce);
}

/// The GRH, and what is behind it if that is a BTH. The frame is told.
fn global<'a>(
    octets: &'a [u8],
    missing: usize,
    frame: &mut Frame,
) -> (Option<&'a Grh>, Result<&'a [u8], String>) {
    let Ok((grh, rest)) = Grh::ref_from_prefix(octets) else {
        return (None, Err(short("GRH", Grh::LEN, octets.len(), missing)));
    };
    frame.stack.push(Layer::Grh);
    frame.ends = Some(Ends { src: grh.sgid.to_ip(), dst: grh.dgid.to_ip(), ports: None });
    let problem = if grh.version() != VERSION {
        format!("GRH: version {}, {VERSION} expected", grh.version())
    } else if grh.next_header != NEXT_HEADER_BTH {
        format!("GRH: next header {:#04x}, {NEXT_HEADER_BTH:#04x} (BTH) expected", grh.next_header)
    } else {
        return (Some(grh), Ok(rest));
    };
    (Some(grh), Err(problem))
}

/// What was captured of `len` octets that a header announces; an error where the frame had fewer.
fn bounded<'a>(
    what: &str,
    octets: &'a [u8],
    len: usize,
    missing: usize,
) -> (&'a [u8], Option<String>) {
    let there = octets.len() + missing;
    let problem = (len > there).then(|| format!("{what}: {len} octets announced, {there} found"));
    (&octets[..len.min(octets.len())], problem)
}

fn short(what: &str, need: usize, captured: usize, missing: usize) -> String {
    if missing > 0 {
        let wire_len = captured + missing;
        return format!("{what}: {need} octets needed, {captured} captured of {wire_len}");
    }
    format!("{what}: {need} octets needed, {captured} found")
}

#[cfg(test)]
mod tests {
    use super::super::tests::*;
    use super::*;
    use hex_literal::hex;
    use std::{string::ToString, vec, vec::Vec};

    // Linux 6.1, rxe: pcaps of `rping`, frames 4 and 9.
    const WRITE: [u8; 74] = hex!(
        "525400990003 525400990002 0800"
        "4500003c 1d6c4000 4011087b 0a630002 0a630003 c90612b7 00280000"
        "0400ffff 00000029 80964195 000055f755911370 00001ab5 00000040 8455de48"
    );
    const ACK: [u8; 62] = hex!(
        "525400990003 525400990002 0800"
        "45000030 1d6e4000 40110885 0a630002 0a630003 c90612b7 001c0000"
        "1100ffff 00000029 00b2a1bb 1f000002 dc5e7a0b"
    );

    fn error(frame: &Frame) -> &str {
        frame.roce[0].error.as_deref().expect("there is one")
    }

    #[test]
    fn a_packet_of_rxe() {
        let frame = dissect(&ACK);
        assert_eq!(stack(&frame), ["eth", "ipv4", "udp", "bth"]);
        assert_eq!(frame.ends.unwrap().ports, Some((0xc906, 4791)));
        let [roce] = &frame.roce[..] else { panic!("one packet expected") };
        let headers = roce.headers.unwrap();
        assert_eq!((headers.bth.opcode, headers.bth.dest_qp().0), (0x11, 0x29));
        assert_eq!((headers.bth.psn().get(), headers.aeth.is_some()), (0xb2_a1bb, true));
        assert_eq!((roce.version, roce.icrc, roce.vcrc), (Version::V2, IcrcState::Good, None));
        assert_eq!((roce.payload_len, &roce.mad, &roce.error), (0, &None, &None));
        assert_eq!(dissect(&WRITE).roce[0].icrc, IcrcState::Good);
    }

    #[test]
    fn routers_change_nothing_that_counts() {
        // TOS, TTL, checksum, BTH octet 4 are masked; the Identification is not.
        for (at, icrc) in [
            (15, IcrcState::Good),
            (22, IcrcState::Good),
            (24, IcrcState::Good),
            (46, IcrcState::Good),
            (19, IcrcState::Bad),
            (52, IcrcState::Bad),
        ] {
            let mut octets = ACK;
            octets[at] ^= 1;
            assert_eq!(dissect(&octets).roce[0].icrc, icrc, "octet {at}");
        }
    }

    #[test]
    fn any_port_may_be_given() {
        let mut octets = ACK;
        octets[36..38].copy_from_slice(&5000_u16.to_be_bytes());
        assert!(dissect(&octets).roce.is_empty());
        let options = super::super::Options {
            roce_ports: [4791, 5000].into_iter().collect(),
            ..Default::default()
        };
        let mut dissector = super::super::Dissector::new(options);
        dissector.handle_record(&record(1, octets.len(), &octets));
        assert_eq!(dissector.poll_frame().unwrap().roce[0].icrc, IcrcState::Bad);
    }

    #[test]
    fn cut_packets_tell_what_they_have() {
        let whole = framed(false, 7, &sealed(false, 7, 6, 1, &[7; 1024]));
        for captured in 0..whole.len() {
            let frame = dissect_cut(&whole, captured);
            assert_eq!(frame.error, None);
            if captured < 42 {
                assert!(frame.roce.is_empty(), "{captured}");
                continue;
            }
            let [roce] = &frame.roce[..] else { panic!("one packet expected") };
            assert_eq!(roce.icrc, IcrcState::Absent, "{captured}");
            assert_eq!(roce.headers.is_some(), captured >= 54);
            match captured {
                42..54 => assert_eq!(
                    roce.error,
                    Some(format!("BTH: 12 octets needed, {} captured of 1056", captured - 42))
                ),
                54..70 => {
                    let needs = format!("16 octets needed, {} found", captured - 54);
                    let cut = format!("({} captured of the packet's 1056)", captured - 42);
                    let error = roce.error.as_ref().unwrap();
                    assert_eq!(*error, format!("RETH: at offset 12: {needs} {cut}"));
                }
                _ => assert_eq!((roce.payload_len, &roce.error), (1024, &None)),
            }
            if captured >= 54 {
                assert_eq!(roce.payload_len, 1024);
            }
        }
    }

    #[test]
    fn malformed_packets_are_told_and_shown() {
        let first = |octets: &[u8]| dissect(&framed(false, 7, octets));
        assert_eq!(error(&first(&[4; 11])), "BTH: 12 octets needed, 11 found");
        let frame = first(&[4; 15]);
        assert!(frame.roce[0].headers.is_some() && frame.roce[0].icrc == IcrcState::Absent);
        assert_eq!(stack(&frame).last(), Some(&"bth"));
        let mut packet = sealed(false, 7, 4, 1, &[]);
        packet[1] |= 0x30;
        let frame = first(&packet);
        assert!(error(&frame).contains("PadCnt"), "{}", error(&frame));
        packet[1] = 0x41;
        assert!(error(&first(&packet)).contains("TVer"));
        // An opcode that nobody defined; the ICRC is right all the same.
        let mut packet = sealed(false, 7, 4, 1, b"abcd");
        packet.truncate(16);
        packet[0] = 0xff;
        let frame = first(&seal(false, 7, packet));
        assert_eq!(
            error(&frame),
            "BTH: opcode 0xff is not defined, what follows is not looked into"
        );
        assert_eq!((frame.roce[0].icrc, frame.roce[0].payload_len), (IcrcState::Good, 4));
        // Payload behind an ACK, none behind a CNP, more than any path MTU.
        for (opcode, payload) in [(0x11, 4), (0x81, 0), (0x04, 4100)] {
            let frame = first(&sealed(false, 7, opcode, 1, &vec![0; payload]));
            assert!(error(&frame).contains("payload"), "{}", error(&frame));
            assert_eq!(frame.roce[0].icrc, IcrcState::Good);
        }
        assert_eq!(first(&sealed(false, 7, 0x81, 0, &[0; 16])).roce[0].error, None);
    }

    #[test]
    fn mads_are_taken_out() {
        let ud = |opcode, qp, len| {
            let mut packet = sealed(false, 7, opcode, 1, &vec![7; len]);
            packet.truncate(packet.len() - ICRC_LEN);
            packet[7] = qp;
            framed(false, 7, &seal(false, 7, packet))
        };
        let whole = ud(0x64, 1, 256);
        let frame = dissect(&whole);
        assert_eq!(stack(&frame), ["eth", "ipv4", "udp", "bth", "mad"]);
        assert_eq!(frame.roce[0].mad.as_deref(), Some(&[7; 256][..]));
        assert_eq!(dissect_cut(&whole, 42 + 20 + 24).roce[0].mad.as_ref().unwrap().len(), 24);
        assert_eq!(dissect_cut(&whole, 42 + 20 + 23).roce[0].mad, None);
        assert_eq!(dissect(&ud(0x64, 0, 300)).roce[0].mad.as_ref().unwrap().len(), 256);
        for (opcode, qp, len) in [(0x64, 2, 256), (0x65, 1, 256), (0x04, 1, 256), (0x64, 1, 23)] {
            assert_eq!(dissect(&ud(opcode, qp, len)).roce[0].mad, None);
        }
    }

    fn grh(payload_len: u16) -> Vec<u8> {
        let mut grh = hex!(
            "60000000 0000 1b 40 00000000000000000000ffff0a630002 fe800000000000000000000000000003"
        )
        .to_vec();
        grh[4..6].copy_from_slice(&payload_len.to_be_bytes());
        grh
    }

    /// A packet with the ICRC that follows from `covered`: what the ICRC covers in front of it.
    fn native(front: &dyn Fn(&Bth) -> Icrc) -> Vec<u8> {
        let mut packet = sealed(false, 7, 4, 9, b"abcd");
        let (covered, found) = packet.split_last_chunk_mut::<ICRC_LEN>().unwrap();
        let (bth, rest) = Bth::read_from_prefix(covered).unwrap();
        let mut icrc = front(&bth);
        icrc.update(rest);
        *found = icrc.finish();
        packet
    }

    #[test]
    fn roce_v1_ends_where_its_grh_says() {
        let header = grh(20);
        let packet = native(&|bth| Icrc::grh(Grh::ref_from_bytes(&header).unwrap(), bth));
        let mut octets = ethernet(0x8915, &[&header[..], &packet].concat());
        let frame = dissect(&octets);
        assert_eq!(stack(&frame), ["eth", "grh", "bth"]);
        assert_eq!(frame.ends.unwrap().src.to_string(), "10.99.0.2");
        assert_eq!(frame.ends.unwrap().dst.to_string(), "fe80::3");
        let roce = &frame.roce[0];
        assert_eq!((roce.version, roce.icrc, roce.payload_len), (Version::V1, IcrcState::Good, 4));
        assert!(roce.grh.is_some() && roce.error.is_none());
        // Padding behind it, or too little.
        octets.extend([0; 6]);
        assert_eq!(dissect(&octets).roce[0].icrc, IcrcState::Good);
        octets.truncate(70);
        let frame = dissect(&octets);
        assert_eq!(error(&frame), "GRH: 20 octets announced, 16 found");
        assert_eq!(frame.roce[0].icrc, IcrcState::Absent);
        let cut = dissect_cut(&octets[..60], 30);
        assert_eq!(error(&cut), "GRH: 40 octets needed, 16 captured of 46");
        octets[20] = 0x3a;
        assert_eq!(error(&dissect(&octets)), "GRH: next header 0x3a, 0x1b (BTH) expected");
        octets[14] = 0x40;
        assert_eq!(error(&dissect(&octets)), "GRH: version 4, 6 expected");
        assert_eq!(stack(&dissect(&octets)), ["eth", "grh"]);
    }

    #[test]
    fn native_infiniband_has_two_checksums() {
        let ib = |octets: &[u8], captured: usize| {
            let mut dissector = super::super::Dissector::new(Default::default());
            let mut record = record(1, octets.len(), &octets[..captured]);
            record.link = super::super::capture::LinkType::INFINIBAND;
            dissector.handle_record(&record);
            dissector.poll_frame().unwrap()
        };
        for global in [false, true] {
            let mut lrh = hex!("0002 0001 0007 0002");
            lrh[1] |= u8::from(global);
            lrh[5] += if global { 10 } else { 0 };
            let header = if global { grh(20) } else { Vec::new() };
            let grh = Grh::ref_from_bytes(&header).ok();
            let packet = native(&|bth| Icrc::ib(Lrh::ref_from_bytes(&lrh).unwrap(), grh, bth));
            let mut octets = [&lrh[..], &header, &packet].concat();
            octets.extend(vcrc(&octets));
            let frame = ib(&octets, octets.len());
            let want = if global { &["lrh", "grh", "bth"][..] } else { &["lrh", "bth"] };
            assert_eq!((stack(&frame), frame.ends.is_some()), (want.to_vec(), global));
            let roce = &frame.roce[0];
            assert_eq!((roce.icrc, roce.vcrc), (IcrcState::Good, Some(IcrcState::Good)));
            assert_eq!((roce.payload_len, &roce.error), (4, &None));
            let cut = ib(&octets, octets.len() - 2);
            assert_eq!(
                (cut.roce[0].icrc, cut.roce[0].vcrc),
                (IcrcState::Good, Some(IcrcState::Absent))
            );
            let cut = ib(&octets, octets.len() - 3);
            assert_eq!(cut.roce[0].icrc, IcrcState::Absent);
            let last = octets.len() - 1;
            octets[last] ^= 1;
            assert_eq!(ib(&octets, last + 1).roce[0].vcrc, Some(IcrcState::Bad));
            octets[last - 10] ^= 1;
            assert_eq!(ib(&octets, last + 1).roce[0].icrc, IcrcState::Bad);
            for captured in 0..octets.len() {
                ib(&octets, captured);
                ib(&octets[..captured], captured);
            }
            octets[5] += 1;
            let frame = ib(&octets, octets.len());
            assert!(error(&frame).starts_with("LRH: "), "{}", error(&frame));
        }
        let frame = ib(&hex!("0000 0001 0007 0002 00000000"), 12);
        assert_eq!((stack(&frame), frame.roce.len()), (vec!["lrh", "data"], 0));
        assert_eq!(error(&ib(&hex!("0002 0001"), 4)), "LRH: 8 octets needed, 4 found");
    }
}
