//! RoCE and InfiniBand packets, and their ICRC.

use userdma_proto::wire::{
    ib::{lrh::Lrh, vcrc::vcrc},
    roce::{
        ICRC_LEN, Packet,
        aeth::{Syndrome, credits, rnr_micros},
        bth::Bth,
        grh::Grh,
        icrc::{self, Icrc},
    },
};
use zerocopy::{FromBytes, IntoBytes};

use crate::Choices;

/// One octet of choices (modulo 4: below IPv4, IPv6, a GRH, an LRH with a GRH or without), two of
/// how much the capture cut off, the headers below (with 20 to 60 octets of IPv4), then the packet
/// from its BTH on.
///
/// What is read adds up to what came, and goes out again octet for octet; a capture that was cut
/// says the same as far as it goes; the ICRC is that of the pseudo packet, computed bit by bit.
pub fn roce_packet(data: &[u8]) {
    let mut choices = Choices::new(data);
    let below = Below::choose(&mut choices);
    let cut: u16 = choices.any();
    let octets = choices.rest();

    let whole = check_packet(octets, octets.len());
    check_packet(octets, octets.len() + usize::from(cut));
    if let Some(whole) = whole {
        for len in [0, 12, 16, 20, octets.len() / 2, octets.len().saturating_sub(5)] {
            let front = &octets[..len.min(octets.len())];
            if let Some(part) = check_packet(front, octets.len()) {
                assert_eq!(part.headers, whole.headers);
                assert_eq!(part.payload_len, whole.payload_len);
                assert!(whole.payload.starts_with(part.payload));
                assert!(part.icrc.is_none() || part.icrc == whole.icrc);
            }
        }
    }
    if let (Ok((bth, rest)), true) = (Bth::ref_from_prefix(octets), octets.len() >= 16) {
        let covered = &rest[..rest.len() - ICRC_LEN];
        let mut icrc = below.icrc(bth);
        let middle = usize::from(cut) % (covered.len() + 1);
        icrc.update(&covered[..middle]);
        icrc.update(&covered[middle..]);
        let by_bits = below.icrc_by_bits(bth, covered);
        assert_eq!(icrc.finish(), by_bits);
        below.check_whole(octets, by_bits);
    }
    assert_eq!(vcrc(octets), vcrc_by_bits(octets));
}

/// Reads a packet and judges it.
fn check_packet(octets: &[u8], wire_len: usize) -> Option<Packet<'_>> {
    let packet = match Packet::parse_captured(octets, wire_len) {
        Ok(packet) => packet,
        Err(error) => {
            assert!(!error.to_string().is_empty());
            return None;
        }
    };
    let headers = &packet.headers;
    let (len, pad) = (headers.len(), usize::from(headers.bth.pad()));
    assert_eq!(len + packet.payload_len + pad + ICRC_LEN, wire_len, "{packet:?}");
    assert!(packet.payload.len() <= packet.payload_len);
    assert_eq!(packet.icrc.is_some(), octets.len() >= wire_len);
    let mut out = Vec::new();
    headers.emit(&mut out);
    assert_eq!(out, octets[..len], "the headers go out as they came");
    if octets.len() >= wire_len {
        assert_eq!(packet.payload, &octets[len..len + packet.payload_len]);
        assert_eq!(
            packet.icrc.map(|icrc| icrc.to_vec()).as_deref(),
            Some(&octets[wire_len - 4..wire_len])
        );
        // PadCnt is the builder's where payload and pad are no whole words.
        if (packet.payload_len + pad).is_multiple_of(4) {
            let (mut out, mut again) = (Vec::new(), *headers);
            again.emit_packet(packet.payload, &mut out);
            assert_eq!((again, out.len()), (*headers, wire_len - ICRC_LEN));
            assert_eq!(out[..len + packet.payload_len], octets[..len + packet.payload_len]);
            assert!(out[len + packet.payload_len..].iter().all(|&octet| octet == 0));
        }
    }
    if let Err(error) = packet.check_form() {
        assert!(!error.to_string().is_empty());
    }
    let opcode = headers.bth.opcode();
    assert!(!opcode.to_string().is_empty() && !format!("{packet:?}").is_empty());
    match opcode.info() {
        Some(info) => assert_eq!(usize::from(info.ext_len) + Bth::LEN, len),
        None => assert_eq!(len, Bth::LEN),
    }
    if let Some(aeth) = headers.aeth {
        match aeth.syndrome() {
            Syndrome::Ack(code) => assert_eq!(credits(code).is_none(), code == 31),
            Syndrome::RnrNak(code) => assert!(rnr_micros(code) >= 10),
            Syndrome::Nak(code) => assert!(code.name().is_none_or(|name| !name.is_empty())),
            Syndrome::Reserved(octet) => assert_eq!(octet, aeth.syndrome),
        }
    }
    Some(packet)
}

/// What stands below a BTH.
pub(crate) enum Below {
    V4(Vec<u8>, [u8; 8]),
    V6([u8; 40], [u8; 8]),
    V1(Grh),
    Ib(Lrh, Option<Grh>),
}

impl Below {
    pub(crate) fn choose(choices: &mut Choices<'_>) -> Self {
        let choice: u8 = choices.any();
        match choice % 4 {
            0 => {
                let mut ip = choices.octets(20 + usize::from(choice >> 4 & 15) % 11 * 4).to_vec();
                ip.resize(ip.len().max(20), 0);
                Self::V4(ip, header(choices))
            }
            1 => Self::V6(header(choices), header(choices)),
            2 => Self::V1(header(choices)),
            _ => Self::Ib(header(choices), (choice & 0x80 != 0).then(|| header(choices))),
        }
    }

    pub(crate) fn icrc(&self, bth: &Bth) -> Icrc {
        match self {
            Self::V4(ip, udp) => Icrc::ipv4(ip, udp, bth),
            Self::V6(ip, udp) => Icrc::ipv6(ip, udp, bth),
            Self::V1(grh) => Icrc::grh(grh, bth),
            Self::Ib(lrh, grh) => Icrc::ib(lrh, grh.as_ref(), bth),
        }
    }

    /// From the IP header on, where there is one, or the GRH: a packet whose length field says the
    /// same, with the ICRC `by_bits`.
    fn check_whole(&self, octets: &[u8], by_bits: [u8; 4]) {
        let (packet, len, as_said) = match self {
            Self::V4(ip, udp) => {
                let len = usize::from(u16::from_be_bytes([ip[2], ip[3]]));
                let as_said = usize::from(ip[0]) == 0x40 + ip.len() / 4 && ip[9] == 17;
                ([ip, &udp[..], octets].concat(), len, as_said)
            }
            Self::V6(ip, udp) => {
                let len = 40 + usize::from(u16::from_be_bytes([ip[4], ip[5]]));
                ([&ip[..], udp, octets].concat(), len, ip[0] >> 4 == 6 && ip[6] == 17)
            }
            Self::V1(grh) => {
                let as_said = grh.version() == 6 && grh.next_header == 0x1b;
                ([grh.as_bytes(), octets].concat(), 40 + grh.payload_len(), as_said)
            }
            Self::Ib(..) => return,
        };
        let (computed, checked) = (icrc::compute(&packet), icrc::check(&packet));
        if let Err(error) = computed {
            assert_eq!(checked, Err(error));
        }
        // Otherwise another header is read than the one that was put there.
        if as_said && len == packet.len() && computed.is_ok() {
            assert_eq!(computed, Ok(by_bits));
            assert_eq!(checked.is_ok(), packet.ends_with(&by_bits) || cfg!(fuzzing));
        }
    }

    /// IBTA vol. 1, 7.8.1 and annex A17: the packet with ones where a router may change it.
    fn pseudo(&self, bth: &Bth) -> Vec<u8> {
        let mut out = vec![0xff; 8];
        let mask = |out: &mut Vec<u8>, octets: &[u8], ones: &[usize]| {
            let start = out.len();
            out.extend_from_slice(octets);
            ones.iter().for_each(|at| out[start + at] = 0xff);
        };
        let mask_v6 = |out: &mut Vec<u8>, octets: &[u8]| {
            let start = out.len();
            mask(out, octets, &[1, 2, 3, 7]);
            out[start] |= 0x0f;
        };
        match self {
            Self::V4(ip, udp) => {
                mask(&mut out, ip, &[1, 8, 10, 11]);
                mask(&mut out, udp, &[6, 7]);
            }
            Self::V6(ip, udp) => {
                mask_v6(&mut out, ip);
                mask(&mut out, udp, &[6, 7]);
            }
            Self::V1(grh) => mask_v6(&mut out, grh.as_bytes()),
            // Routers make another LRH: behind it a GRH counts, and it does not.
            Self::Ib(_, Some(grh)) => mask_v6(&mut out, grh.as_bytes()),
            Self::Ib(lrh, None) => {
                out[..8].copy_from_slice(lrh.as_bytes());
                out[0] |= 0xf0;
            }
        }
        mask(&mut out, bth.as_bytes(), &[4]);
        out
    }

    fn icrc_by_bits(&self, bth: &Bth, behind: &[u8]) -> [u8; 4] {
        let mut octets = self.pseudo(bth);
        octets.extend_from_slice(behind);
        let mut crc = u32::MAX;
        for octet in octets {
            crc ^= u32::from(octet);
            for _ in 0..8 {
                crc = if crc & 1 == 0 { crc >> 1 } else { crc >> 1 ^ 0xedb8_8320 };
            }
        }
        (!crc).to_le_bytes()
    }
}

/// CRC-16 of IBTA vol. 1, 7.8.2.
fn vcrc_by_bits(octets: &[u8]) -> [u8; 2] {
    let mut crc = u16::MAX;
    for octet in octets {
        crc ^= u16::from(*octet);
        for _ in 0..8 {
            crc = if crc & 1 == 0 { crc >> 1 } else { crc >> 1 ^ 0xd008 };
        }
    }
    (!crc).to_le_bytes()
}

/// A header of the next octets; zeros behind the end.
pub(crate) fn header<T: FromBytes + IntoBytes>(choices: &mut Choices<'_>) -> T {
    let mut header = T::new_zeroed();
    let octets = choices.octets(size_of::<T>());
    header.as_mut_bytes()[..octets.len()].copy_from_slice(octets);
    header
}
