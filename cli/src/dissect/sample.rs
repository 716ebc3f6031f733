//! Frames made by hand, for the tests of what prints them.

use userdma_proto::{
    dissect::{
        CrcState, DdpHeader, Ends, Fpdu, Frame, IcrcState, IpInfo, Iwarp, Layer, Markers,
        Operation, Roce, TcpInfo, Version,
    },
    wire::{
        ids::{Msn, Stag},
        iwarp::{
            ddp::{TaggedHeader, UntaggedHeader},
            rdmap::Opcode,
        },
        roce::{Headers, bth::Bth},
    },
};

use super::line::Line;

/// What `write` appends, without colours.
pub(super) fn written(write: impl FnOnce(&mut Line)) -> String {
    let mut line = Line::new(false);
    write(&mut line);
    String::from_utf8(line.as_bytes().to_vec()).unwrap()
}

/// Frame 7, 1.5 s after 1970, 10.0.0.1 to 10.0.0.2, with nothing in it.
pub(super) fn bare_frame(layers: &[Layer], ports: Option<(u16, u16)>) -> Frame {
    Frame {
        number: 7,
        time_ns: Some(1_500_000_000),
        len: 74,
        caplen: 74,
        stack: layers.iter().copied().collect(),
        ends: Some(Ends { src: [10, 0, 0, 1].into(), dst: [10, 0, 0, 2].into(), ports }),
        ip: Some(IpInfo { dscp: 0, ecn: 0, ttl: 64, ident: Some(0) }),
        tcp: None,
        roce: Default::default(),
        iwarp: Vec::new(),
        pause: None,
        pcp: None,
        error: None,
    }
}

/// A frame with this RoCEv2 packet.
pub(super) fn roce_frame(roce: Roce) -> Frame {
    let mut frame =
        bare_frame(&[Layer::Eth, Layer::Ipv4, Layer::Udp, Layer::Bth], Some((49_152, 4791)));
    frame.roce.push(Box::new(roce));
    frame
}

/// A BTH for queue pair 0x12 with PSN 100.
pub(super) fn headers_of(opcode: u8) -> Headers {
    Headers::new(Bth {
        opcode,
        flags: 0x40,
        pkey: 0xffff.into(),
        ecn: 0,
        dest_qp: [0, 0, 0x12],
        ack: 0,
        psn: [0, 0, 100],
    })
}

/// A RoCEv2 packet with a good ICRC.
pub(super) fn roce_of(headers: Headers, payload_len: u32) -> Roce {
    Roce {
        version: Version::V2,
        lrh: None,
        grh: None,
        headers: Some(headers),
        payload_len,
        icrc: IcrcState::Good,
        rewritten: None,
        vcrc: None,
        mad: None,
        error: None,
    }
}

/// A frame of a TCP connection with this in it.
pub(super) fn iwarp_frame(found: Vec<Iwarp>) -> Frame {
    let mut frame = bare_frame(&[Layer::Eth, Layer::Ipv4, Layer::Tcp], Some((40_000, 7174)));
    frame.tcp = Some(TcpInfo { seq: 1000, ack: 2000, flags: 0x18, window: 500, payload_len: 100 });
    if !found.is_empty() {
        frame.stack.push(Layer::Mpa);
    }
    frame.iwarp = found;
    frame
}

/// An FPDU of a connection without CRC.
pub(super) fn fpdu_of(header: DdpHeader, payload_len: u16) -> Fpdu {
    let header_len = if matches!(header, DdpHeader::Tagged(_)) { 14 } else { 18 };
    Fpdu {
        ulpdu_len: payload_len + header_len,
        crc: CrcState::Zero,
        crc_in_use: Some(false),
        markers: Markers::None,
        header: Some(header),
        payload_len,
        operation: Operation::None,
        error: None,
    }
}

pub(super) fn untagged(op: Opcode, qn: u32, msn: u32) -> DdpHeader {
    DdpHeader::Untagged(UntaggedHeader::new(op, true, qn, Msn(msn), 0, Stag(0)))
}

pub(super) fn tagged(op: Opcode, last: bool, to: u64) -> DdpHeader {
    DdpHeader::Tagged(TaggedHeader::new(op, last, Stag(0x1234), to))
}
