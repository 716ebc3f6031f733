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

use zerocopy::FromBytes;

use super::{
    Ends, Frame, IcrcState, Layer, Roce, Version,
    train::{Segments, Train},
};
use crate::wire::{
    ib::{lrh::Lrh, vcrc::vcrc},
    mad::MAD_LEN,
    roce::{
        Headers, ICRC_LEN, Packet,
        bth::Bth,
        grh::Grh,
        icrc::Icrc,
        opcode::{Ext, Info, Operation, Payload, Place, Transport},
    },
};

/// The largest path MTU: no packet carries more (IBTA vol. 1, 9.5).
pub(super) const MAX_PAYLOAD: usize = 4096;
/// A BTH and an ICRC: the least there is.
pub(super) const MIN_PACKET: usize = Bth::LEN + ICRC_LEN;
/// Octets of a MAD's header, without which it is not looked into.
const MAD_HEADER: usize = 24;
/// Next Header of a GRH in front of a BTH.
const NEXT_IS_BTH: u8 = 0x1b;

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
    push(packet(Version::V2, payload, wire_len, icrc), frame);
}

/// RoCEv1: `octets` from the GRH on, behind which `missing` were not captured.
pub(super) fn v1(octets: &[u8], missing: usize, frame: &mut Frame) {
    let Ok((grh, rest)) = Grh::ref_from_prefix(octets) else {
        return push(unread(Version::V1, short("GRH", 40, octets.len(), missing)), frame);
    };
    tell_ends(grh, frame);
    let mut roce = match grh_problem(grh) {
        Some(problem) => unread(Version::V1, problem),
        None => {
            let wire_len = usize::from(grh.payload_len.get());
            let (captured, problem) = bounded("GRH", rest, wire_len, missing);
            let icrc = icrc_state(Front::V1(grh), captured, wire_len);
            let mut roce = packet(Version::V1, captured, wire_len, icrc);
            roce.error = problem.or(roce.error);
            roce
        }
    };
    roce.grh = Some(*grh);
    push(roce, frame);
}

/// Native InfiniBand: `octets` from the LRH on, behind which `missing` were not captured.
pub(super) fn ib(octets: &[u8], missing: usize, frame: &mut Frame) {
    let Ok((lrh, _)) = Lrh::ref_from_prefix(octets) else {
        return push(unread(Version::Ib, short("LRH", 8, octets.len(), missing)), frame);
    };
    frame.stack.push(Layer::Lrh);
    if lrh.next_header() < 2 {
        // Raw: no transport of InfiniBand's.
        frame.stack.push(Layer::Data);
        return;
    }
    let wire_len = lrh.packet_len();
    let (captured, mut problem) = bounded("LRH", octets, wire_len, missing);
    let mut rest = captured.get(size_of::<Lrh>()..).unwrap_or_default();
    let mut grh = None;
    if lrh.next_header() == 3 {
        match Grh::ref_from_prefix(rest) {
            Ok((header, behind)) => {
                tell_ends(header, frame);
                problem = problem.or_else(|| grh_problem(header));
                (grh, rest) = (Some(header), behind);
            }
            Err(_) => {
                let missing = wire_len - captured.len();
                problem = problem.or_else(|| Some(short("GRH", 40, rest.len(), missing)));
            }
        }
    }
    let mut roce = if lrh.next_header() == 3 && grh.is_none_or(|grh| grh_problem(grh).is_some()) {
        unread(Version::Ib, String::new())
    } else {
        let wire_len = rest.len() + (wire_len - captured.len());
        let icrc = icrc_state(Front::Ib(lrh, grh), rest, wire_len);
        packet(Version::Ib, rest, wire_len, icrc)
    };
    roce.error = problem.or(roce.error);
    (roce.lrh, roce.grh) = (Some(*lrh), grh.copied());
    let found = octets.get(wire_len..wire_len + 2);
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
    if icrc.finish() == *found { IcrcState::Good } else { IcrcState::Bad }
}

/// Why a payload of this length cannot follow these headers.
pub(super) fn payload_problem(info: &Info, payload_len: usize) -> Option<String> {
    let name = info.name;
    match info.payload {
        Payload::None if payload_len > 0 => {
            Some(format!("{name}: {payload_len} octets of payload, none expected"))
        }
        Payload::Exactly(len) if payload_len != usize::from(len) => {
            Some(format!("{name}: {payload_len} octets of payload, {len} expected"))
        }
        _ if payload_len > MAX_PAYLOAD => Some(format!(
            "{name}: {payload_len} octets of payload, at most {MAX_PAYLOAD} expected; if this is a \
             train of packets, too little of it was captured, or is right, to part them"
        )),
        _ => None,
    }
}

/// One packet, of which the front was captured: from its BTH on, `wire_len` octets on the wire.
fn packet(version: Version, octets: &[u8], wire_len: usize, icrc: IcrcState) -> Box<Roce> {
    let (packet, problem) = match Packet::parse_captured(octets, wire_len) {
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
            (packet, Some(format!("{error}")))
        }
    };
    let info = packet.headers.bth.opcode().info();
    let problem = problem.or_else(|| header_problem(&packet, info));
    let mad = info.is_some_and(|info| carries_mad(&packet, info)).then(|| {
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
        vcrc: None,
        mad,
        error: problem,
    })
}

fn header_problem(packet: &Packet<'_>, info: Option<&Info>) -> Option<String> {
    let bth = &packet.headers.bth;
    if bth.tver() != 0 {
        return Some(format!("BTH: transport header version {}, 0 expected", bth.tver()));
    }
    match info {
        None => Some(format!(
            "BTH: opcode {:#04x} is not defined, what follows is not looked into",
            bth.opcode
        )),
        Some(info) => payload_problem(info, packet.payload_len),
    }
}

/// Management datagrams go to queue pairs 0 and 1 (IBTA vol. 1, 13.5).
fn carries_mad(packet: &Packet<'_>, info: &Info) -> bool {
    info.transport == Transport::Ud
        && (info.operation, info.place) == (Operation::Send, Place::Only)
        && !info.ext.contains(Ext::IMMDT)
        && packet.headers.bth.dest_qp().0 <= 1
        && packet.payload.len() >= MAD_HEADER
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

fn tell_ends(grh: &Grh, frame: &mut Frame) {
    frame.stack.push(Layer::Grh);
    frame.ends = Some(Ends { src: grh.sgid.to_ip(), dst: grh.dgid.to_ip(), ports: None });
}

fn grh_problem(grh: &Grh) -> Option<String> {
    let version = grh.word.get() >> 28;
    if version != 6 {
        return Some(format!("GRH: version {version}, 6 expected"));
    }
    (grh.next_header != NEXT_IS_BTH).then(|| {
        format!("GRH: next header {:#04x}, {NEXT_IS_BTH:#04x} (BTH) expected", grh.next_header)
    })
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
