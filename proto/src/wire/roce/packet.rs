//! A whole packet, from the BTH to the ICRC.

use alloc::vec::Vec;

use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::{
    ICRC_LEN,
    aeth::Aeth,
    atomic::{AtomicAckEth, AtomicEth},
    bth::Bth,
    deth::Deth,
    feth::Feth,
    ieth::Ieth,
    immdt::ImmDt,
    opcode::{Ext, MAX_EXT_LEN, Payload},
    rdeth::Rdeth,
    reth::Reth,
    xrceth::Xrceth,
};
use crate::wire::{Error, Layer};

/// BTH and the extended headers behind it. Which of them are on the wire the opcode says
/// ([`super::opcode::TABLE`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Headers {
    /// Base transport header.
    pub bth: Bth,
    /// Reliable datagram.
    pub rdeth: Option<Rdeth>,
    /// XRC.
    pub xrceth: Option<Xrceth>,
    /// Datagram.
    pub deth: Option<Deth>,
    /// FLUSH.
    pub feth: Option<Feth>,
    /// RDMA.
    pub reth: Option<Reth>,
    /// Atomic request.
    pub atomic_eth: Option<AtomicEth>,
    /// ACK.
    pub aeth: Option<Aeth>,
    /// Atomic acknowledgement.
    pub atomic_ack_eth: Option<AtomicAckEth>,
    /// Immediate data.
    pub immdt: Option<ImmDt>,
    /// Invalidate.
    pub ieth: Option<Ieth>,
}

/// A packet: a view over received octets.
///
/// ```
/// use userdma_proto::wire::roce::{Packet, opcode::Opcode};
///
/// // A READ response with MSN 1 and eight octets.
/// let octets = b"\x10\x40\xff\xff\0\0\0\x12\0\0\x03\x45\x1f\0\0\x01payload!icrc";
/// let packet = Packet::parse(octets)?;
/// assert_eq!(packet.headers.bth.opcode(), Opcode::RC_READ_RESP_ONLY);
/// assert_eq!(packet.headers.aeth.map(|aeth| aeth.msn()), Some(1));
/// assert_eq!((packet.payload, packet.icrc), (&b"payload!"[..], Some(*b"icrc")));
/// # Ok::<_, userdma_proto::wire::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packet<'a> {
    /// All headers, copied.
    pub headers: Headers,
    /// The payload, without pad. Cut short where the input was (see [`Packet::parse_captured`]).
    pub payload: &'a [u8],
    /// Octets of the payload on the wire.
    pub payload_len: usize,
    /// The ICRC as on the wire; `None` where it was not captured.
    pub icrc: Option<[u8; 4]>,
}

impl<'a> Packet<'a> {
    /// Reads a packet from its BTH to its ICRC. Neither the ICRC nor the packet's form is judged:
    /// see [`icrc`](super::icrc) and [`Packet::check_form`].
    ///
    /// # Errors
    ///
    /// Headers that are not whole, or a PadCnt beyond what is there.
    #[inline]
    pub fn parse(octets: &'a [u8]) -> Result<Self, Error> {
        Self::parse_captured(octets, octets.len())
    }

    /// Reads a packet of which only the front was captured: it had `wire_len` octets, from its BTH
    /// to its ICRC. Octets beyond `wire_len` (the padding of a short Ethernet frame) are ignored.
    ///
    /// # Errors
    ///
    /// Headers that are not whole, because the capture or the packet ends in them, or a PadCnt
    /// beyond what is there.
    #[inline]
    pub fn parse_captured(octets: &'a [u8], wire_len: usize) -> Result<Self, Error> {
        // Where the ICRC begins.
        let Some(end) = wire_len.checked_sub(ICRC_LEN).filter(|&end| end >= Bth::LEN) else {
            return Err(Error::truncated(Layer::Bth, 0, Bth::LEN + ICRC_LEN, wire_len));
        };
        let captured = octets.get(..end).unwrap_or(octets);
        let (headers, rest) = Headers::parse(captured)?;

        let pad = usize::from(headers.bth.pad());
        let Some(payload_len) = (end - (captured.len() - rest.len())).checked_sub(pad) else {
            let expected = "no more than the octets behind the headers";
            return Err(Error::field(Layer::Bth, 1, "PadCnt", pad as u64, expected));
        };
        Ok(Self {
            headers,
            payload: rest.get(..payload_len).unwrap_or(rest),
            payload_len,
            icrc: octets.get(end..wire_len).and_then(|icrc| icrc.try_into().ok()),
        })
    }

    /// Whether the packet has the form that its opcode asks for, as far as it can be told without
    /// a connection: TVer, length of the payload, pad. Nothing is asked of an unknown opcode but a
    /// length in words of four octets.
    ///
    /// # Errors
    ///
    /// The field that is wrong.
    pub fn check_form(&self) -> Result<(), Error> {
        let bth = &self.headers.bth;
        if bth.tver() != 0 {
            return Err(Error::field(Layer::Bth, 1, "TVer", bth.tver().into(), "0"));
        }
        if bth.pad() != pad_len(self.payload_len) {
            let expected = "what makes payload and pad a multiple of 4";
            return Err(Error::field(Layer::Bth, 1, "PadCnt", bth.pad().into(), expected));
        }
        let (expected, good) = match bth.opcode().info().map(|info| info.payload) {
            None | Some(Payload::Any) => return Ok(()),
            Some(Payload::None) => ("none for this opcode", 0),
            Some(Payload::Exactly(octets)) => ("another for this opcode", usize::from(octets)),
        };
        if self.payload_len != good {
            let (at, len) = (self.headers.len(), self.payload_len as u64);
            return Err(Error::field(Layer::Bth, at, "payload length", len, expected));
        }
        Ok(())
    }
}

/// Pad octets behind a payload of `len` octets: what is missing to a multiple of 4.
#[inline]
pub const fn pad_len(len: usize) -> u8 {
    (len.wrapping_neg() & 3) as u8
}

impl Headers {
    /// The most octets that any opcode's headers take.
    pub const MAX_LEN: usize = Bth::LEN + MAX_EXT_LEN;

    /// Headers of nothing but a BTH.
    #[inline]
    pub const fn new(bth: Bth) -> Self {
        Self {
            bth,
            rdeth: None,
            xrceth: None,
            deth: None,
            feth: None,
            reth: None,
            atomic_eth: None,
            aeth: None,
            atomic_ack_eth: None,
            immdt: None,
            ieth: None,
        }
    }

    /// Reads the headers from the front of `octets`, and gives back what follows them. An unknown
    /// opcode has no extended headers.
    ///
    /// # Errors
    ///
    /// Truncated, of the header in which `octets` end.
    #[inline]
    pub fn parse(octets: &[u8]) -> Result<(Self, &[u8]), Error> {
        let Ok((bth, rest)) = Bth::read_from_prefix(octets) else {
            return Err(Error::truncated(Layer::Bth, 0, Bth::LEN, octets.len()));
        };
        let mut headers = Self::new(bth);
        let Some(info) = bth.opcode().info() else {
            return Ok((headers, rest));
        };
        if info.ext.is_empty() {
            return Ok((headers, rest));
        }
        let Some((ext, rest)) = rest.split_at_checked(usize::from(info.ext_len)) else {
            return Err(cut_header(info.ext, octets.len()));
        };
        let mut take = Take { ext: info.ext, rest: ext };
        // In the order of the wire.
        headers.rdeth = take.next(Ext::RDETH);
        headers.xrceth = take.next(Ext::XRCETH);
        headers.deth = take.next(Ext::DETH);
        headers.feth = take.next(Ext::FETH);
        headers.reth = take.next(Ext::RETH);
        headers.atomic_eth = take.next(Ext::ATOMIC_ETH);
        headers.aeth = take.next(Ext::AETH);
        headers.atomic_ack_eth = take.next(Ext::ATOMIC_ACK_ETH);
        headers.immdt = take.next(Ext::IMMDT);
        headers.ieth = take.next(Ext::IETH);
        Ok((headers, rest))
    }

    /// The extended headers that go out: those of the opcode.
    #[inline]
    fn ext(&self) -> Ext {
        self.bth.opcode().info().map_or(Ext::empty(), |info| info.ext)
    }

    /// Octets that these headers take on the wire.
    #[inline]
    pub fn len(&self) -> usize {
        let info = self.bth.opcode().info();
        Bth::LEN + info.map_or(0, |info| usize::from(info.ext_len))
    }

    /// Whether there is nothing to emit: never.
    pub const fn is_empty(&self) -> bool {
        false
    }

    /// Writes BTH and the extended headers that the opcode asks for to the front of `out`, and
    /// says how many octets that took; one that is missing goes out as zeros. An unknown opcode
    /// has none.
    #[inline]
    pub fn write(&self, out: &mut [u8; Self::MAX_LEN]) -> usize {
        let mut put = Put { ext: self.ext(), out, at: 0 };
        put.octets(self.bth.as_bytes());
        put.next(Ext::RDETH, self.rdeth.as_ref());
        put.next(Ext::XRCETH, self.xrceth.as_ref());
        put.next(Ext::DETH, self.deth.as_ref());
        put.next(Ext::FETH, self.feth.as_ref());
        put.next(Ext::RETH, self.reth.as_ref());
        put.next(Ext::ATOMIC_ETH, self.atomic_eth.as_ref());
        put.next(Ext::AETH, self.aeth.as_ref());
        put.next(Ext::ATOMIC_ACK_ETH, self.atomic_ack_eth.as_ref());
        put.next(Ext::IMMDT, self.immdt.as_ref());
        put.next(Ext::IETH, self.ieth.as_ref());
        put.at
    }

    /// Appends what [`Headers::write`] writes.
    pub fn emit(&self, out: &mut Vec<u8>) {
        let mut octets = [0; Self::MAX_LEN];
        let len = self.write(&mut octets);
        out.extend_from_slice(&octets[..len]);
    }

    /// Appends headers, `payload` and pad: everything in front of the ICRC. PadCnt is set from
    /// the payload's length.
    pub fn emit_packet(&mut self, payload: &[u8], out: &mut Vec<u8>) {
        let pad = pad_len(payload.len());
        self.bth = self.bth.with_pad(pad);
        out.reserve(self.len() + payload.len() + usize::from(pad) + ICRC_LEN);
        self.emit(out);
        out.extend_from_slice(payload);
        out.extend_from_slice(&[0; 3][..usize::from(pad)]);
    }
}

/// Which of the headers `ext` is not whole where octets end after `len`, the BTH's included.
#[cold]
fn cut_header(ext: Ext, len: usize) -> Error {
    let mut at = Bth::LEN;
    for (name, need) in ext.headers() {
        if at + need > len {
            return Error::truncated(Layer::Eth(name), at, need, len - at);
        }
        at += need;
    }
    // Not reached by a caller that found them not to be whole.
    Error::truncated(Layer::Bth, 0, at, len)
}

/// Takes one header after the other from the front of octets.
struct Take<'a> {
    ext: Ext,
    rest: &'a [u8],
}

impl Take<'_> {
    /// The next header, if it is there; the caller has seen to it that octets enough are.
    #[inline]
    fn next<H: FromBytes>(&mut self, which: Ext) -> Option<H> {
        if !self.ext.contains(which) {
            return None;
        }
        let (header, rest) = H::read_from_prefix(self.rest).ok()?;
        self.rest = rest;
        Some(header)
    }
}

/// Puts one header behind the other.
struct Put<'a> {
    ext: Ext,
    out: &'a mut [u8; Headers::MAX_LEN],
    at: usize,
}

impl Put<'_> {
    #[inline]
    fn next<H: IntoBytes + Immutable + FromBytes>(&mut self, which: Ext, header: Option<&H>) {
        if !self.ext.contains(which) {
            return;
        }
        match header {
            Some(header) => self.octets(header.as_bytes()),
            None => self.octets(H::new_zeroed().as_bytes()),
        }
    }

    #[inline]
    fn octets(&mut self, octets: &[u8]) {
        let end = self.at + octets.len();
        self.out[self.at..end].copy_from_slice(octets);
        self.at = end;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::{
        Problem,
        ids::{PKey, Psn, Qpn, RKey},
        roce::{
            aeth::{NakCode, Syndrome},
            opcode::{Opcode, TABLE},
        },
    };
    use hex_literal::hex;
    use proptest::prelude::*;
    use std::{string::ToString, vec};

    /// A packet whose extended headers, payload and ICRC are rising octets.
    fn made(opcode: Opcode, payload_len: usize) -> Vec<u8> {
        let pad = pad_len(payload_len);
        let bth = Bth::new(opcode, PKey(0xffff), Qpn(0x12), Psn::new(0x345)).with_pad(pad);
        let ext = opcode.info().map_or(0, |info| usize::from(info.ext_len));
        let mut packet = bth.as_bytes().to_vec();
        packet.extend((0..ext + payload_len).map(|n| (n as u8).wrapping_add(1)));
        packet.extend(vec![0; usize::from(pad)]);
        packet.extend(hex!("a1a2a3a4"));
        packet
    }

    fn emitted(packet: &Packet<'_>) -> Vec<u8> {
        let (mut headers, mut out) = (packet.headers, Vec::new());
        headers.emit_packet(packet.payload, &mut out);
        out.extend(packet.icrc.unwrap());
        out
    }

    #[test]
    fn write_only_with_immediate() {
        let wire = hex!(
            "0b 00 ffff 00000012 80000345 00007f0000001000 00001234 00000008 deadbeef"
            "3132333435363738 0df028d3"
        );
        let packet = Packet::parse(&wire).unwrap();
        let bth = Bth::new(Opcode::RC_WRITE_ONLY_IMM, PKey(0xffff), Qpn(0x12), Psn::new(0x345));
        let mut headers = Headers::new(bth.with_migreq(false).with_ack_req(true));
        headers.reth = Some(Reth::new(0x7f00_0000_1000, RKey(0x1234), 8));
        headers.immdt = Some(ImmDt::new(0xdead_beef));
        assert_eq!(packet.headers, headers);
        assert_eq!((packet.payload, packet.payload_len), (&b"12345678"[..], 8));
        assert_eq!(packet.icrc, Some(hex!("0df028d3")));
        assert_eq!((headers.len(), packet.check_form()), (32, Ok(())));
        assert_eq!(emitted(&packet), wire);
    }

    #[test]
    fn acknowledgements() {
        let wire = hex!("11 00 ffff 00000012 80000345 60000001 d5a0337f");
        let packet = Packet::parse(&wire).unwrap();
        let aeth = Aeth::new(Syndrome::Nak(NakCode::PSN_SEQUENCE), 1);
        assert_eq!((packet.headers.aeth, packet.payload), (Some(aeth), &[][..]));
        assert_eq!(emitted(&packet), wire);
        let wire = hex!("12 00 ffff 00000012 80000345 1f000001 000000000000002a 724e9bc1");
        let packet = Packet::parse(&wire).unwrap();
        assert_eq!(packet.headers.atomic_ack_eth, Some(AtomicAckEth::new(42)));
        assert_eq!(emitted(&packet), wire);
    }

    #[test]
    fn a_padded_send_with_invalidate() {
        let wire = hex!("16 10 ffff 00000012 80000345 0000abcd 616263 00 416f14c6");
        let packet = Packet::parse(&wire).unwrap();
        assert_eq!(
            (packet.headers.ieth, packet.payload),
            (Some(Ieth::new(RKey(0xabcd))), &b"abc"[..])
        );
        assert_eq!(emitted(&packet), wire);
    }

    #[test]
    fn every_opcode_goes_round() {
        for info in TABLE {
            for len in [0, 1, 2, 3, 4, 256] {
                let wire = made(info.opcode, len);
                let packet = Packet::parse(&wire).unwrap();
                assert_eq!(packet.headers.len(), Bth::LEN + usize::from(info.ext_len));
                assert_eq!((packet.payload.len(), packet.payload_len), (len, len));
                assert_eq!(emitted(&packet), wire, "{}", info.name);
                let mut octets = [0; Headers::MAX_LEN];
                let written = packet.headers.write(&mut octets);
                assert_eq!(octets[..written], wire[..packet.headers.len()]);
                let form = match info.payload {
                    Payload::Any => true,
                    Payload::None => len == 0,
                    Payload::Exactly(octets) => len == usize::from(octets),
                };
                assert_eq!(packet.check_form().is_ok(), form, "{} {len}", info.name);
            }
        }
    }

    #[test]
    fn the_longest_headers_fit() {
        let longest = TABLE.iter().map(|info| info.ext_len).max().unwrap();
        assert_eq!(Headers::MAX_LEN, 12 + usize::from(longest));
    }

    #[test]
    fn an_unknown_opcode_has_no_extended_headers() {
        let wire = made(Opcode(0xc5), 8);
        let packet = Packet::parse(&wire).unwrap();
        assert_eq!(packet.headers, Headers::new(packet.headers.bth));
        assert_eq!((packet.payload_len, packet.headers.len()), (8, 12));
        assert_eq!((packet.check_form(), emitted(&packet)), (Ok(()), wire));
    }

    /// Where the header begins in which a packet of `opcode` cut to `len` octets ends, its name
    /// and length.
    fn cut_header(opcode: Opcode, len: usize) -> Option<(usize, Layer, usize)> {
        let lengths = [
            ("RDETH", 4),
            ("XRCETH", 4),
            ("DETH", 8),
            ("FETH", 4),
            ("RETH", 16),
            ("AtomicETH", 28),
            ("AETH", 4),
            ("AtomicAckETH", 8),
            ("ImmDt", 4),
            ("IETH", 4),
        ];
        let mut headers = vec![(0, Layer::Bth, 12)];
        let mut at = 12;
        for (bit, (name, length)) in lengths.into_iter().enumerate() {
            if opcode.info().unwrap().ext.bits() & (1 << bit) != 0 {
                headers.push((at, Layer::Eth(name), length));
                at += length;
            }
        }
        headers.into_iter().find(|(at, _, length)| at + length > len)
    }

    #[test]
    fn a_packet_cut_short_says_where() {
        for info in TABLE {
            let wire = made(info.opcode, 8);
            for len in 0..wire.len() {
                // As if the packet had been that short.
                let error = match Packet::parse(&wire[..len]) {
                    Ok(packet) => {
                        assert_eq!(packet.payload_len, len - 4 - packet.headers.len());
                        None
                    }
                    Err(error) => Some(error),
                };
                let expected = match len {
                    0..16 => Some(Error::truncated(Layer::Bth, 0, 16, len)),
                    _ => cut_header(info.opcode, len - 4)
                        .map(|(at, layer, need)| Error::truncated(layer, at, need, len - 4 - at)),
                };
                assert_eq!(error, expected, "{} {len}", info.name);

                // As if no more had been captured.
                match Packet::parse_captured(&wire[..len], wire.len()) {
                    Ok(packet) => {
                        let headers = packet.headers.len();
                        assert_eq!((packet.payload_len, packet.icrc), (8, None));
                        assert_eq!(packet.payload, &wire[headers..len.min(wire.len() - 4)]);
                        assert_eq!(cut_header(info.opcode, len), None);
                    }
                    Err(error) => {
                        let (at, layer, need) = cut_header(info.opcode, len).unwrap();
                        assert_eq!(error, Error::truncated(layer, at, need, len - at));
                    }
                }
            }
        }
    }

    #[test]
    fn what_follows_the_packet_is_ignored() {
        let mut wire = made(Opcode::RC_SEND_ONLY, 5);
        let len = wire.len();
        wire.extend([0; 14]);
        let packet = Packet::parse_captured(&wire, len).unwrap();
        assert_eq!(packet, Packet::parse(&wire[..len]).unwrap());
    }

    #[test]
    fn a_pad_that_is_not_there() {
        let wire = hex!("04 30 ffff 00000012 00000000 6162 a1a2a3a4");
        let error = Packet::parse(&wire).unwrap_err();
        let message =
            "BTH: at offset 1: PadCnt is 0x3, expected no more than the octets behind the headers";
        assert_eq!(error.to_string(), message);
    }

    #[test]
    fn forms_that_are_wrong() {
        let field = |wire: &[u8]| match Packet::parse(wire).unwrap().check_form() {
            Err(Error { problem: Problem::Field { field, .. }, .. }) => Some(field),
            _ => None,
        };
        let mut wire = made(Opcode::RC_SEND_ONLY, 5);
        assert_eq!((field(&wire), field(&wire[1..])), (None, Some("TVer")));
        wire.push(0);
        assert_eq!(field(&wire), Some("PadCnt"));
        wire[1] |= 0x01;
        assert_eq!(field(&wire), Some("TVer"));
        assert_eq!(field(&made(Opcode::RC_ACK, 4)), Some("payload length"));
        assert_eq!(field(&made(Opcode::RC_ATOMIC_WRITE, 7)), Some("payload length"));
        assert_eq!(field(&made(Opcode::RC_ATOMIC_WRITE, 8)), None);
    }

    #[test]
    fn missing_headers_go_out_as_zeros() {
        let bth = Bth::new(Opcode::RD_FLUSH, PKey(0xffff), Qpn(1), Psn::new(0));
        let mut out = Vec::new();
        Headers::new(bth).emit(&mut out);
        assert_eq!(out, [bth.as_bytes(), &[0; 32]].concat());
    }

    prop_compose! {
        fn any_octets()(
            opcode in prop_oneof![any::<u8>(), prop::sample::select(TABLE).prop_map(|i| i.opcode.0)],
            mut octets in prop::collection::vec(any::<u8>(), 0..100),
        ) -> Vec<u8> {
            if let Some(first) = octets.first_mut() {
                *first = opcode;
            }
            octets
        }
    }

    proptest! {
        #[test]
        fn any_headers_and_payload_go_round(
            info in prop::sample::select(TABLE),
            octets in prop::array::uniform32(any::<u8>()),
            more in prop::array::uniform20(any::<u8>()),
            payload in prop::collection::vec(any::<u8>(), 0..64),
        ) {
            let mut wire = [&octets[..], &more].concat();
            wire[0] = info.opcode.0;
            let (mut headers, _) = Headers::parse(&wire).unwrap();
            let mut out = Vec::new();
            headers.emit_packet(&payload, &mut out);
            prop_assert_eq!(out.len() % 4, 0);
            prop_assert_eq!(&out[2..headers.len()], &wire[2..headers.len()]);
            out.extend(hex!("a1a2a3a4"));
            let packet = Packet::parse(&out).unwrap();
            prop_assert_eq!((packet.headers, packet.payload), (headers, &payload[..]));
            prop_assert_eq!(packet.icrc, Some(hex!("a1a2a3a4")));
        }

        #[test]
        fn any_octets_parse_without_loss_or_panic(octets in any_octets(), wire_len in 0usize..120) {
            if let Ok(packet) = Packet::parse_captured(&octets, wire_len) {
                let headers = packet.headers.len();
                let pad = usize::from(packet.headers.bth.pad());
                prop_assert_eq!(headers + packet.payload_len + pad + 4, wire_len);
                let mut out = Vec::new();
                packet.headers.emit(&mut out);
                prop_assert_eq!(&out, &octets[..headers]);
                let captured = (octets.len() - headers).min(packet.payload_len);
                prop_assert_eq!(packet.payload, &octets[headers..headers + captured]);
                prop_assert_eq!(packet.icrc.is_some(), octets.len() >= wire_len);
            }
        }
    }
}
