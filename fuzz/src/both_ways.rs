//! What we build is read as the same.

use std::net::Ipv4Addr;

use userdma_proto::wire::{
    ids::{Gid, Msn, PKey, Psn, QKey, Qpn, Stag},
    iwarp::{
        ddp::{self, Segment, TaggedHeader, UntaggedHeader},
        fpdu::{self, Deframer, MarkerEncoder},
        mpa::{Enhanced, Start, StartFlags, StartKind},
        rdmap::{self, AtomicRequest, AtomicResponse, Immediate, Opcode, ReadRequest},
        terminate::{TermCode, TermLayer, Terminate},
    },
    mad::{
        MAD_LEN, Mad, MadHeader,
        cm::{
            Apr, Drep, Dreq, IpCm, Lap, Message, Mra, Path, Reason, Rej, Rep, Req, Rtu, SidrRep,
            SidrReq,
        },
    },
    roce::{
        Headers, ICRC_LEN, Packet, UDP_PORT,
        bth::Bth,
        icrc::{self, Icrc, Identification, PathV4, verify_unknown_id},
        opcode::{Ext, Payload, TABLE},
    },
};
use zerocopy::{FromBytes, IntoBytes};

use crate::{
    Choices,
    mad::check_message,
    roce::{Below, header},
    stream::check_terminate,
};

/// The first octet, modulo 7, says what is built of the rest: a RoCE packet of any row of the table,
/// a MAD with a connection manager's message, rdma_cm's header, an MPA start-up frame, a stream of
/// FPDUs, DDP and RDMAP headers, a Terminate.
pub fn encode_decode(data: &[u8]) {
    let mut choices = Choices::new(data);
    match choices.below(7) {
        0 => packet(&mut choices),
        1 => mad(&mut choices),
        2 => ip_cm(&mut choices),
        3 => start(&mut choices),
        4 => stream(&mut choices),
        5 => segment(&mut choices),
        _ => terminate(&mut choices),
    }
}

// ------------------------------------------------------------------------------------------ RoCE

fn packet(choices: &mut Choices<'_>) {
    let info = &TABLE[usize::from(choices.any::<u8>()) % TABLE.len()];
    let mut bth: Bth = header(choices);
    bth.opcode = info.opcode.0;
    let mut headers = Headers::new(bth);
    // One bit a header: it may be missing.
    let missing = Ext::from_bits_truncate(choices.any::<u16>() & choices.any::<u16>());
    macro_rules! fill {
        ($($field:ident $flag:ident),*) => {$(
            if (info.ext - missing).contains(Ext::$flag) {
                headers.$field = Some(header(choices));
            }
        )*};
    }
    fill!(
        rdeth RDETH, xrceth XRCETH, deth DETH, feth FETH, reth RETH, atomic_eth ATOMIC_ETH,
        aeth AETH, atomic_ack_eth ATOMIC_ACK_ETH, immdt IMMDT, ieth IETH
    );
    let len = match info.payload {
        Payload::None => 0,
        Payload::Any => usize::from(choices.any::<u16>() % 4097),
        Payload::Exactly(len) => len.into(),
    };
    let below = Below::choose(choices);
    let mut payload = choices.octets(len).to_vec();
    payload.resize(len, 0xa5);

    let mut out = vec![0xee; 3];
    headers.emit_packet(&payload, &mut out);
    let mut octets = out.split_off(3);
    let ext_len = usize::from(info.ext_len);
    assert_eq!(octets.len(), Bth::LEN + ext_len + len.next_multiple_of(4), "{info:?}");
    assert_eq!(headers.len(), Bth::LEN + ext_len);
    let mut crc = below.icrc(&headers.bth);
    crc.update(&octets[Bth::LEN..]);
    let crc = crc.finish();
    octets.extend_from_slice(&crc);

    let packet = Packet::parse(&octets).expect("what was built");
    assert_eq!((packet.payload, packet.payload_len), (&payload[..], len));
    assert_eq!(packet.icrc, Some(crc));
    // What was missing went out as zeros.
    let mut expected = headers;
    macro_rules! zeros {
        ($($field:ident $flag:ident),*) => {$(
            if (info.ext & missing).contains(Ext::$flag) {
                expected.$field = Some(zeroed());
            }
        )*};
    }
    zeros!(
        rdeth RDETH, xrceth XRCETH, deth DETH, feth FETH, reth RETH, atomic_eth ATOMIC_ETH,
        aeth AETH, atomic_ack_eth ATOMIC_ACK_ETH, immdt IMMDT, ieth IETH
    );
    assert_eq!(packet.headers, expected, "{info:?}");
    without_identification(choices, &headers.bth, &octets);
}

fn zeroed<T: FromBytes>() -> T {
    T::new_zeroed()
}

/// The ICRC of a packet that a UDP socket receives, which does not show the Identification: it
/// checks, and the Identification comes out; a flipped bit does not pass.
fn without_identification(choices: &mut Choices<'_>, bth: &Bth, octets: &[u8]) {
    let path = PathV4 {
        src: Ipv4Addr::from_bits(choices.any()),
        dst: Ipv4Addr::from_bits(choices.any()),
        src_port: choices.any(),
        dst_port: UDP_PORT,
    };
    let id = Identification { identification: choices.any(), dont_fragment: choices.any::<bool>() };
    let (covered, _) = octets.split_at(octets.len() - ICRC_LEN);
    let mut crc = Icrc::socket_v4(&path, id, octets.len(), bth);
    crc.update(&covered[Bth::LEN..]);
    let mut payload = [covered, &crc.finish()].concat();

    // The same packet with the header that the socket put in front.
    let len = 28 + payload.len() as u16;
    let mut packet = vec![0x45, 0, (len >> 8) as u8, len as u8];
    packet.extend(id.identification.to_be_bytes());
    packet.extend([if id.dont_fragment { 0x40 } else { 0 }, 0, 64, 17, 0, 0]);
    packet.extend([path.src.octets(), path.dst.octets()].concat());
    for word in [path.src_port, path.dst_port, len - 20, 0] {
        packet.extend(word.to_be_bytes());
    }
    packet.extend(&payload);
    assert_eq!(icrc::compute(&packet), Ok(crc_of(&payload)));
    assert_eq!(icrc::check(&packet), Ok(()));

    assert_eq!(verify_unknown_id(&path, &payload, Some(id.dont_fragment)), Some(id));
    assert_eq!(verify_unknown_id(&path, &payload, None), Some(id));

    let bit = usize::from(choices.any::<u16>()) % (payload.len() * 8);
    payload[bit / 8] ^= 1 << (bit % 8);
    let found = verify_unknown_id(&path, &payload, Some(id.dont_fragment));
    // Octet 4 of the BTH is not covered. What fails counts as good under cfg(fuzzing), with the
    // Identification that it was first tried with.
    let expected = match bit / 8 {
        4 => Some(id),
        _ => cfg!(fuzzing).then_some(Identification { identification: 0, ..id }),
    };
    assert_eq!(found, expected, "bit {bit}");
}

fn crc_of(payload: &[u8]) -> [u8; 4] {
    *payload.last_chunk().expect("an ICRC")
}

// --------------------------------------------------------------------------------------- InfiniBand

/// The low `n` bits of a choice.
fn bits8(choices: &mut Choices<'_>, n: u32) -> u8 {
    choices.any::<u8>() & (0xff >> (8 - n))
}

fn bits24(choices: &mut Choices<'_>) -> u32 {
    choices.any::<u32>() >> 8
}

fn qpn(choices: &mut Choices<'_>) -> Qpn {
    Qpn(bits24(choices))
}

/// At most `most` octets of private data or additional information.
fn some<'a>(choices: &mut Choices<'a>, most: usize) -> &'a [u8] {
    let len = usize::from(choices.any::<u8>()) % (most + 1);
    choices.octets(len)
}

fn path(choices: &mut Choices<'_>) -> Path {
    Path {
        local_lid: choices.any(),
        remote_lid: choices.any(),
        local_gid: header::<Gid>(choices),
        remote_gid: header::<Gid>(choices),
        flow_label: choices.any::<u32>() >> 12,
        rate: bits8(choices, 6),
        traffic_class: choices.any(),
        hop_limit: choices.any(),
        service_level: bits8(choices, 4),
        subnet_local: choices.any(),
        ack_timeout: bits8(choices, 5),
    }
}

fn message<'a>(c: &mut Choices<'a>) -> Message<'a> {
    let kind = c.below(11);
    let (local_comm_id, remote_comm_id) = (c.any(), c.any());
    match kind {
        0 => Message::Req(Req {
            local_comm_id,
            vendor_id: bits24(c),
            service_id: c.any(),
            ca_guid: c.any(),
            qkey: QKey(c.any()),
            qpn: qpn(c),
            responder_resources: c.any(),
            eecn: bits24(c),
            initiator_depth: c.any(),
            remote_eecn: bits24(c),
            remote_cm_timeout: bits8(c, 5),
            transport: bits8(c, 2),
            flow_control: c.any(),
            start_psn: Psn::new(c.any()),
            local_cm_timeout: bits8(c, 5),
            retry_count: bits8(c, 3),
            pkey: PKey(c.any::<u16>().into()),
            mtu: bits8(c, 4),
            rdc_exists: c.any(),
            rnr_retry_count: bits8(c, 3),
            max_cm_retries: bits8(c, 4),
            srq: c.any(),
            extended_transport: bits8(c, 3),
            primary: path(c),
            alternate: path(c),
            sap_supported: c.any(),
            private_data: some(c, 92),
        }),
        1 => Message::Mra(Mra {
            local_comm_id,
            remote_comm_id,
            message: bits8(c, 2),
            service_timeout: bits8(c, 5),
            private_data: some(c, 222),
        }),
        2 => Message::Rej(Rej {
            local_comm_id,
            remote_comm_id,
            message: bits8(c, 2),
            info_len: bits8(c, 7),
            reason: Reason(c.any()),
            ari: some(c, 72),
            private_data: some(c, 148),
        }),
        3 => Message::Rep(Rep {
            local_comm_id,
            remote_comm_id,
            qkey: QKey(c.any()),
            qpn: qpn(c),
            eecn: bits24(c),
            vendor_id: bits24(c),
            start_psn: Psn::new(c.any()),
            responder_resources: c.any(),
            initiator_depth: c.any(),
            target_ack_delay: bits8(c, 5),
            failover: bits8(c, 2),
            flow_control: c.any(),
            rnr_retry_count: bits8(c, 3),
            srq: c.any(),
            ca_guid: c.any(),
            private_data: some(c, 196),
        }),
        4 => Message::Rtu(Rtu { local_comm_id, remote_comm_id, private_data: some(c, 224) }),
        5 => Message::Dreq(Dreq {
            local_comm_id,
            remote_comm_id,
            remote_qpn: qpn(c),
            private_data: some(c, 220),
        }),
        6 => Message::Drep(Drep { local_comm_id, remote_comm_id, private_data: some(c, 224) }),
        7 => Message::SidrReq(SidrReq {
            request_id: local_comm_id,
            pkey: PKey(c.any::<u16>().into()),
            service_id: c.any(),
            private_data: some(c, 216),
        }),
        8 => Message::SidrRep(SidrRep {
            request_id: local_comm_id,
            status: c.any(),
            info_len: c.any(),
            vendor_id: bits24(c),
            qpn: qpn(c),
            service_id: c.any(),
            qkey: QKey(c.any()),
            info: some(c, 72),
            private_data: some(c, 136),
        }),
        9 => Message::Lap(Lap {
            local_comm_id,
            remote_comm_id,
            remote_qpn: qpn(c),
            remote_cm_timeout: bits8(c, 5),
            alternate: path(c),
            private_data: some(c, 168),
        }),
        _ => Message::Apr(Apr {
            local_comm_id,
            remote_comm_id,
            info_len: c.any(),
            status: c.any(),
            info: some(c, 72),
            private_data: some(c, 148),
        }),
    }
}

fn mad(choices: &mut Choices<'_>) {
    let message = message(choices);
    let mut head: MadHeader = header(choices);
    head.mgmt_class = 7;
    head.attribute_id = message.attribute().into();
    let mut octets = head.as_bytes().to_vec();
    octets.extend_from_slice(&message.to_body());
    assert_eq!(octets.len(), MAD_LEN);
    let mad = Mad::parse(&octets).expect("what was built");
    assert_eq!(*mad.header, head);
    let found = mad.cm().expect("whole").expect("a message");
    check_message(head.attribute_id.get(), &found);
    same(&message, &found);
}

/// The same message, but for the zeros behind what is shorter than its place.
fn same(built: &Message<'_>, found: &Message<'_>) {
    fn filled(built: &[u8], found: &[u8]) {
        let (front, behind) = found.split_at(built.len());
        assert_eq!(front, built);
        assert!(behind.iter().all(|&octet| octet == 0));
    }
    filled(built.private_data(), found.private_data());
    let mut built = *built;
    macro_rules! take {
        ($($kind:ident $($more:ident)*),*) => {
            match (&mut built, found) {
                $((Message::$kind(built), Message::$kind(found)) => {
                    built.private_data = found.private_data;
                    $(
                        filled(built.$more, found.$more);
                        built.$more = found.$more;
                    )*
                })*
                _ => panic!("{built:?} was read as {found:?}"),
            }
        };
    }
    take!(Req, Mra, Rej ari, Rep, Rtu, Dreq, Drep, SidrReq, SidrRep info, Lap, Apr info);
    assert_eq!(&built, found);
}

fn ip_cm(choices: &mut Choices<'_>) {
    let built = IpCm {
        version: 0,
        ip_version: if choices.any() { 4 } else { 6 },
        src_port: choices.any(),
        src: header(choices),
        dst: header(choices),
    };
    let mut private_data = built.to_bytes().to_vec();
    private_data.extend_from_slice(choices.octets(56));
    let (found, rest) = IpCm::parse(&private_data).expect("what was built");
    assert_eq!((found, rest), (built, &private_data[IpCm::LEN..]));
    // RoCE's REQ takes it.
    assert!(private_data.len() <= Req::PRIVATE_DATA_LEN);
}

// ----------------------------------------------------------------------------------------- iWARP

fn start(choices: &mut Choices<'_>) {
    let kind = if choices.any() { StartKind::Request } else { StartKind::Reply };
    let mut flags = StartFlags::from_bits_retain(choices.any());
    let revision: u8 = choices.any();
    let depths: [u8; 4] = header(choices);
    let enhanced = (revision >= 2 && choices.any()).then(|| Enhanced::from_bytes(depths));
    if revision >= 2 {
        flags.set(StartFlags::ENHANCED, enhanced.is_some());
    }
    let private_data = choices.octets(508);
    let built = Start { kind, flags, revision, enhanced, private_data };
    let mut out = Vec::new();
    built.emit(&mut out);
    let len = out.len();
    out.push(0x5a);
    assert_eq!(Start::parse(&out), Ok(Some((built, len))));
}

fn stream(choices: &mut Choices<'_>) {
    let (markers, crc) = (choices.any::<bool>(), choices.any::<bool>());
    let (mut stream, mut ulpdus) = (Vec::new(), Vec::new());
    let mut encoder = MarkerEncoder::new(crc);
    while !choices.is_empty() && ulpdus.len() < 40 {
        let len = usize::from(choices.any::<u16>()) % 2000;
        let mut ulpdu = choices.octets(len).to_vec();
        ulpdu.resize(len, 0x11);
        let mut plain = Vec::new();
        let start = fpdu::begin(&mut plain);
        plain.extend_from_slice(&ulpdu);
        fpdu::finish(&mut plain, start, crc);
        if markers {
            encoder.push(&plain, &mut stream);
        } else {
            stream.extend_from_slice(&plain);
        }
        ulpdus.push(ulpdu);
    }
    let (mut deframer, mut scratch) = (Deframer::new(markers, crc), Vec::new());
    let mut rest = &stream[..];
    for ulpdu in &ulpdus {
        let found = deframer.next(rest, &mut scratch).expect("good").expect("whole");
        assert_eq!(found.ulpdu, ulpdu);
        rest = &rest[found.consumed..];
    }
    assert!(rest.is_empty());
}

fn segment(choices: &mut Choices<'_>) {
    let (op, last) = (Opcode(bits8(choices, 4)), choices.any::<bool>());
    let payload = match op {
        Opcode::READ_REQUEST => {
            let sink = (Stag(choices.any()), choices.any());
            let request =
                ReadRequest::new(sink, choices.any(), (Stag(choices.any()), choices.any()));
            assert_eq!(ReadRequest::parse(request.as_bytes()), Ok(&request));
            request.as_bytes().to_vec()
        }
        Opcode::ATOMIC_REQUEST => header::<[u8; AtomicRequest::LEN]>(choices).to_vec(),
        Opcode::ATOMIC_RESPONSE => header::<[u8; AtomicResponse::LEN]>(choices).to_vec(),
        Opcode::IMMEDIATE | Opcode::IMMEDIATE_SE => {
            header::<[u8; Immediate::LEN]>(choices).to_vec()
        }
        _ => choices.octets(64).to_vec(),
    };
    let tagged = choices.any::<bool>();
    let (inv, msn) = (Stag(choices.any()), Msn(choices.any()));
    let (qn, mo, to): (u32, u32, u64) = (choices.any(), choices.any(), choices.any());
    let header = if tagged {
        TaggedHeader::new(op, last, inv, to).as_bytes().to_vec()
    } else {
        UntaggedHeader::new(op, last, qn, msn, mo, inv).as_bytes().to_vec()
    };
    let ulpdu = [&header[..], &payload].concat();
    let segment = Segment::parse(&ulpdu).expect("what was built");
    assert_eq!((segment.header_bytes(), segment.payload()), (&header[..], &payload[..]));
    assert_eq!((segment.opcode(), segment.last()), (op, last));
    assert_eq!((segment.ddp_version(), segment.rdmap_version()), (ddp::VERSION, rdmap::VERSION));
    match segment {
        Segment::Tagged { header, .. } => {
            assert!(tagged);
            assert_eq!((header.stag(), header.to.get()), (inv, to));
        }
        Segment::Untagged { header, .. } => {
            assert!(!tagged);
            assert_eq!((header.qn.get(), header.msn(), header.mo.get()), (qn, msn, mo));
            assert_eq!(header.invalidate_stag(), inv);
        }
    }
}

fn terminate(choices: &mut Choices<'_>) {
    let code = match choices.any::<u8>() {
        known @ 0x40.. => TermCode::ALL[usize::from(known) % TermCode::ALL.len()],
        _ => TermCode::new(TermLayer(bits8(choices, 4)), bits8(choices, 4), choices.any()),
    };
    let mut built = Terminate::new(code);
    let tagged = choices.any::<bool>();
    if choices.any() {
        let mut copy = header::<[u8; UntaggedHeader::LEN]>(choices);
        copy[0] = copy[0] & !ddp::TAGGED | if tagged { ddp::TAGGED } else { 0 };
        built = built.with_segment(choices.any(), &copy);
        assert_eq!(built.ddp_header.is_some(), code.copies_ddp_header());
    }
    if choices.any() {
        let request: ReadRequest = header(choices);
        built = built.with_read_request(&request);
        if code.copies_read_request() {
            assert_eq!(built.read_request(), Some(&request));
        }
    }
    let mut out = Vec::new();
    built.emit(&mut out);
    let found = Terminate::parse(&out).expect("what was built");
    // A code that RFC 5040 does not know, without any header, may be read as siw's form.
    if found.swapped {
        assert!(out.len() == 4 && code.name().is_none(), "{built:?} was read as {found:?}");
    } else {
        assert_eq!(found, built);
    }
    check_terminate(&out);
}
