//! IP, and what it carries: UDP, TCP, tunnels.
//!
//! ```text
//!   link ──> IPv4, IPv6 ──┬── UDP ──┬── RoCEv2
//!    ^         ^          │         └── VXLAN, Geneve ──┐
//!    │         │          ├── TCP ──> streams           │
//!    │         ├──────────┼── IP in IP, MPLS in IP      │
//!    │         │          └── GRE ──────────────────────┤
//!    └─────────┴────────────────────────────────────────┘
//! ```
//!
//! A frame tells of its innermost headers. Octets that the capture cut off are known to be missing:
//! a header that ends there is no error. One that ends where the frame itself does, is.

use alloc::{format, string::String, vec::Vec};
use core::net::SocketAddr;

use etherparse::{
    IpAuthHeaderSlice, IpNumber, Ipv4HeaderSlice, Ipv6FragmentHeaderSlice, Ipv6HeaderSlice,
    Ipv6RawExtHeaderSlice, TcpHeaderSlice, ip_number,
};

use super::{
    Ends, Frame, IpInfo, Iwarp, Layer, Options, TcpInfo,
    fragments::{Fragment, Fragments, Head, Key, Outcome},
    link::{self, Inner},
    roce::{self, IpHeader},
    tcp::{Segment, Streams},
};

/// IP headers that one frame may nest. What a deeper one carries is not looked into.
const MAX_NESTING: usize = 16;
/// Octets of a datagram whose header does not say how many they are. No host hands more to its NIC
/// at once (Linux' `GSO_MAX_SIZE` is half of it); a capture's block may have hundreds of megabytes.
const MAX_UNTOLD: usize = 1 << 20;

const VXLAN_PORTS: [u16; 2] = [4789, 8472];
const GENEVE_PORT: u16 = 6081;
const TRANSPARENT_ETHERNET: u16 = 0x6558;
const MPLS: u16 = 0x8847;
/// Ethernet right in IP (RFC 8986).
const ETHERNET: IpNumber = IpNumber(143);

/// Takes one frame apart, from what its link layer carries on.
pub(super) struct Walk<'d> {
    pub(super) options: &'d Options,
    pub(super) fragments: &'d mut Fragments,
    pub(super) streams: &'d mut Streams,
    /// What TCP segments complete, with the number of the frame that it belongs to.
    pub(super) done: &'d mut Vec<(u64, Iwarp)>,
    pub(super) frame: &'d mut Frame,
    /// IP headers passed so far.
    pub(super) depth: usize,
}

/// What is to be looked at next.
struct Next<'a> {
    inner: Inner<'a>,
    /// Octets that follow on the wire, and were not captured.
    missing: usize,
}

impl Walk<'_> {
    /// Goes on with `inner`, behind which `missing` octets were not captured.
    pub(super) fn walk(&mut self, inner: Inner<'_>, missing: usize) {
        let mut next = Next { inner, missing };
        loop {
            let Next { inner, missing } = next;
            let found = match inner {
                Inner::Ip(octets) => self.ip(octets, missing, false),
                Inner::RoceV1(octets) => return roce::v1(octets, missing, self.frame),
                Inner::Ib(octets) => return roce::ib(octets, missing, self.frame),
                Inner::Pause(pause) => {
                    self.frame.pause = Some(pause);
                    return;
                }
                Inner::Other => return,
            };
            let Some(found) = found else { return };
            next = found;
        }
    }

    /// One IP header; `whole` says that it was put together from fragments, which the stack has
    /// already named.
    fn ip<'a>(&mut self, octets: &'a [u8], missing: usize, whole: bool) -> Option<Next<'a>> {
        let Some(first) = octets.first() else {
            return self.short("IP header", 20, octets, missing);
        };
        let layer = match first >> 4 {
            4 => Layer::Ipv4,
            6 => Layer::Ipv6,
            version => {
                return self.wrong(format!("IP: version {version}, 4 or 6 expected"));
            }
        };
        if self.depth == MAX_NESTING {
            return self.wrong(format!(
                "{MAX_NESTING} IP headers are nested: what is in the last is not looked into"
            ));
        }
        self.depth += 1;
        if !whole {
            self.frame.stack.push(layer);
        }
        match layer {
            Layer::Ipv4 => self.ipv4(octets, missing),
            _ => self.ipv6(octets, missing),
        }
    }

    fn ipv4<'a>(&mut self, octets: &'a [u8], missing: usize) -> Option<Next<'a>> {
        let header_len = usize::from(octets[0] & 0x0f) * 4;
        if header_len < 20 {
            return self
                .wrong(format!("IPv4: header length {header_len}, at least 20 octets expected"));
        }
        let Ok(header) = Ipv4HeaderSlice::from_slice(octets) else {
            return self.short("IPv4 header", header_len, octets, missing);
        };
        self.frame.ends = Some(Ends {
            src: header.source_addr().into(),
            dst: header.destination_addr().into(),
            ports: None,
        });
        self.frame.ip = Some(IpInfo {
            dscp: octets[1] >> 2,
            ecn: octets[1] & 3,
            ttl: header.ttl(),
            ident: Some(header.identification()),
        });
        self.frame.tcp = None;
        let total = usize::from(header.total_len());
        let rest = &octets[header_len..];
        let (payload, missing) = match total {
            // Seen on the sending host, where the NIC fills it in.
            0 => self.untold("IPv4", rest, missing)?,
            _ if total < header_len => {
                return self.wrong(format!(
                    "IPv4: total length {total}, at least the header's {header_len} expected"
                ));
            }
            _ => self.bounded("IPv4", rest, total - header_len, missing),
        };
        if header.is_fragmenting_payload() {
            let key = Key {
                src: header.source_addr().into(),
                dst: header.destination_addr().into(),
                id: header.identification().into(),
                protocol: header.protocol().0,
                level: self.depth,
            };
            let fragment = Fragment {
                offset: header.fragments_offset().byte_offset().into(),
                more: header.more_fragments(),
                payload,
                head: Head::V4(header.slice()),
            };
            self.fragment(key, &fragment, missing);
            return None;
        }
        let mut protocol = header.protocol();
        let mut payload = payload;
        if protocol == ip_number::AUTH {
            let (next, rest) = self.authentication(payload, missing)?;
            (protocol, payload) = (next, rest);
        }
        self.transport(protocol, IpHeader::V4(header.slice()), payload, missing)
    }

    fn ipv6<'a>(&mut self, octets: &'a [u8], missing: usize) -> Option<Next<'a>> {
        let Some((fixed, rest)) = octets.split_first_chunk::<40>() else {
            return self.short("IPv6 header", 40, octets, missing);
        };
        let Ok(header) = Ipv6HeaderSlice::from_slice(fixed) else {
            return self.short("IPv6 header", 40, octets, missing);
        };
        self.frame.ends = Some(Ends {
            src: header.source_addr().into(),
            dst: header.destination_addr().into(),
            ports: None,
        });
        let class = header.traffic_class();
        self.frame.ip =
            Some(IpInfo { dscp: class >> 2, ecn: class & 3, ttl: header.hop_limit(), ident: None });
        self.frame.tcp = None;
        let (mut payload, missing) = match usize::from(header.payload_length()) {
            // A jumbogram, or seen on the sending host, where the NIC fills it in.
            0 => self.untold("IPv6", rest, missing)?,
            len => self.bounded("IPv6", rest, len, missing),
        };
        // Not by etherparse's iterator: after a header that is not whole it reads on.
        let mut next_header = header.next_header();
        let mut next_header_at = 6;
        let payload_len = payload.len();
        loop {
            let at = fixed.len() + (payload_len - payload.len());
            match next_header {
                ip_number::IPV6_HOP_BY_HOP
                | ip_number::IPV6_ROUTE
                | ip_number::IPV6_DEST_OPTIONS
                | ip_number::MOBILITY
                | ip_number::HIP
                | ip_number::SHIM6 => {
                    let Ok(extension) = Ipv6RawExtHeaderSlice::from_slice(payload) else {
                        let need =
                            payload.get(1).map_or(8, |len| (usize::from(*len) + 1) * 8).max(8);
                        return self.short("IPv6 extension header", need, payload, missing);
                    };
                    (next_header, next_header_at) = (extension.next_header(), at);
                    payload = &payload[extension.slice().len()..];
                }
                ip_number::AUTH => {
                    let (next, rest) = self.authentication(payload, missing)?;
                    (next_header, next_header_at) = (next, at);
                    payload = rest;
                }
                ip_number::IPV6_FRAG => {
                    let Ok(extension) = Ipv6FragmentHeaderSlice::from_slice(payload) else {
                        return self.short("IPv6 fragment header", 8, payload, missing);
                    };
                    payload = &payload[extension.slice().len()..];
                    if !extension.is_fragmenting_payload() {
                        // RFC 6946: by itself, whatever else has the same Identification.
                        (next_header, next_header_at) = (extension.next_header(), at);
                        continue;
                    }
                    let key = Key {
                        src: header.source_addr().into(),
                        dst: header.destination_addr().into(),
                        id: extension.identification(),
                        protocol: 0,
                        level: self.depth,
                    };
                    let fragment = Fragment {
                        offset: extension.fragment_offset().byte_offset().into(),
                        more: extension.more_fragments(),
                        payload,
                        head: Head::V6 {
                            octets: &octets[..at],
                            next_header_at,
                            next_header: extension.next_header().0,
                        },
                    };
                    self.fragment(key, &fragment, missing);
                    return None;
                }
                _ => break,
            }
        }
        self.transport(next_header, IpHeader::V6(fixed), payload, missing)
    }

    /// A payload that its header says is `len` octets long: what was captured of it, and how many
    /// octets of it were not.
    fn bounded<'a>(
        &mut self,
        what: &str,
        rest: &'a [u8],
        len: usize,
        missing: usize,
    ) -> (&'a [u8], usize) {
        let there = rest.len() + missing;
        if len > there {
            self.fail(format!("{what}: {len} octets of payload announced, {there} found"));
        }
        let captured = &rest[..len.min(rest.len())];
        (captured, len - captured.len())
    }

    /// A payload whose length its header does not say: all that there is, within reason.
    fn untold<'a>(
        &mut self,
        what: &str,
        rest: &'a [u8],
        missing: usize,
    ) -> Option<(&'a [u8], usize)> {
        let there = rest.len().saturating_add(missing);
        if there <= MAX_UNTOLD {
            return Some((rest, missing));
        }
        self.fail(format!(
            "{what}: no length is announced, and {there} octets of payload found, at most \
             {MAX_UNTOLD} expected"
        ));
        None
    }

    fn authentication<'a>(
        &mut self,
        octets: &'a [u8],
        missing: usize,
    ) -> Option<(IpNumber, &'a [u8])> {
        let Ok(header) = IpAuthHeaderSlice::from_slice(octets) else {
            let need = octets.get(1).map_or(12, |len| (usize::from(*len) + 2) * 4).max(12);
            self.short("IP authentication header", need, octets, missing);
            return None;
        };
        Some((header.next_header(), &octets[header.slice().len()..]))
    }

    fn fragment(&mut self, key: Key, fragment: &Fragment<'_>, missing: usize) {
        let outcome = if missing > 0 {
            Outcome::Waiting
        } else {
            self.fragments.insert(key, self.frame.time_ns, fragment)
        };
        match outcome {
            Outcome::Waiting => self.frame.stack.push(Layer::Data),
            Outcome::Wrong(what) => {
                self.frame.stack.push(Layer::Data);
                self.fail(what);
            }
            Outcome::Whole(datagram) => {
                // Here it goes deeper by a call, which `depth` bounds.
                if let Some(next) = self.ip(&datagram, 0, true) {
                    self.walk(next.inner, next.missing);
                }
            }
        }
    }

    fn transport<'a>(
        &mut self,
        protocol: IpNumber,
        ip: IpHeader<'a>,
        payload: &'a [u8],
        missing: usize,
    ) -> Option<Next<'a>> {
        match protocol {
            ip_number::UDP => self.udp(ip, payload, missing),
            ip_number::TCP => self.tcp(payload, missing),
            ip_number::ICMP | ip_number::IPV6_ICMP => {
                self.frame.stack.push(Layer::Icmp);
                None
            }
            ip_number::IPV4 | ip_number::IPV6 => Some(Next { inner: Inner::Ip(payload), missing }),
            ip_number::GRE => self.gre(payload, missing),
            ip_number::MPLS_IN_IP => self.ethertype(MPLS, payload, missing),
            ETHERNET => self.ethernet(payload, missing),
            _ => {
                self.frame.stack.push(Layer::Data);
                None
            }
        }
    }

    fn udp<'a>(&mut self, ip: IpHeader<'a>, octets: &'a [u8], missing: usize) -> Option<Next<'a>> {
        self.frame.stack.push(Layer::Udp);
        let (_, dst) = self.ports(octets).unwrap_or_default();
        let Some((header, rest)) = octets.split_first_chunk::<8>() else {
            return self.short("UDP header", 8, octets, missing);
        };
        let (payload, missing) = match usize::from(u16::from_be_bytes([header[4], header[5]])) {
            // As for IP: filled in by the NIC, or longer than 16 bits can say (RFC 2675).
            0 => (rest, missing),
            len if len < 8 => {
                return self.wrong(format!("UDP: length {len}, at least 8 expected"));
            }
            len => self.bounded("UDP", rest, len - 8, missing),
        };
        if self.options.roce_ports.contains(&dst) {
            roce::v2(ip, header, payload, missing, self.frame);
            return None;
        }
        if VXLAN_PORTS.contains(&dst) {
            return self.vxlan(payload, missing);
        }
        if dst == GENEVE_PORT {
            return self.geneve(payload, missing);
        }
        None
    }

    /// RFC 7348 §5.
    fn vxlan<'a>(&mut self, octets: &'a [u8], missing: usize) -> Option<Next<'a>> {
        self.frame.stack.push(Layer::Vxlan);
        let Some((header, inner)) = octets.split_first_chunk::<8>() else {
            return self.short("VXLAN header", 8, octets, missing);
        };
        if header[0] & 0x08 == 0 {
            // No network identifier: another protocol on this port.
            self.frame.stack.push(Layer::Data);
            return None;
        }
        self.ethernet(inner, missing)
    }

    /// RFC 8926 §3.4.
    fn geneve<'a>(&mut self, octets: &'a [u8], missing: usize) -> Option<Next<'a>> {
        self.frame.stack.push(Layer::Geneve);
        let Some((header, rest)) = octets.split_first_chunk::<8>() else {
            return self.short("Geneve header", 8, octets, missing);
        };
        let options = usize::from(header[0] & 0x3f) * 4;
        let Some(inner) = rest.get(options..) else {
            return self.short("Geneve options", options, rest, missing);
        };
        if header[0] >> 6 != 0 {
            self.frame.stack.push(Layer::Data);
            return None;
        }
        self.ethertype(u16::from_be_bytes([header[2], header[3]]), inner, missing)
    }

    /// RFC 2784, RFC 2890.
    fn gre<'a>(&mut self, octets: &'a [u8], missing: usize) -> Option<Next<'a>> {
        const CHECKSUM: u8 = 0x80;
        const ROUTING: u8 = 0x40;
        const KEY: u8 = 0x20;
        const SEQUENCE: u8 = 0x10;
        self.frame.stack.push(Layer::Gre);
        let [flags, version, high, low, rest @ ..] = octets else {
            return self.short("GRE header", 4, octets, missing);
        };
        if version & 7 != 0 || flags & ROUTING != 0 {
            // Version 1 carries PPP (RFC 2637), routing is of RFC 1701 alone.
            self.frame.stack.push(Layer::Data);
            return None;
        }
        let fields = [CHECKSUM, KEY, SEQUENCE].iter().filter(|bit| flags & **bit != 0).count();
        let Some(inner) = rest.get(fields * 4..) else {
            return self.short("GRE header", 4 + fields * 4, octets, missing);
        };
        self.ethertype(u16::from_be_bytes([*high, *low]), inner, missing)
    }

    fn ethernet<'a>(&mut self, octets: &'a [u8], missing: usize) -> Option<Next<'a>> {
        let inner = link::ethernet(octets, &mut self.frame.stack);
        self.linked(inner, missing)
    }

    fn ethertype<'a>(
        &mut self,
        ethertype: u16,
        octets: &'a [u8],
        missing: usize,
    ) -> Option<Next<'a>> {
        if ethertype == TRANSPARENT_ETHERNET {
            return self.ethernet(octets, missing);
        }
        if ethertype < link::FIRST_ETHERTYPE {
            // A number from before EtherTypes (RFC 1701), 0 of a keepalive: no length, as in a frame.
            self.frame.stack.push(Layer::Data);
            return None;
        }
        let inner = link::ethertype(ethertype, octets, &mut self.frame.stack);
        self.linked(inner, missing)
    }

    fn linked<'a>(&mut self, inner: Result<Inner<'a>, String>, missing: usize) -> Option<Next<'a>> {
        match inner {
            Ok(inner) => Some(Next { inner, missing }),
            Err(_) if missing > 0 => None,
            Err(what) => self.wrong(what),
        }
    }

    fn tcp<'a>(&mut self, octets: &[u8], missing: usize) -> Option<Next<'a>> {
        self.frame.stack.push(Layer::Tcp);
        let ports = self.ports(octets);
        let Some((fixed, rest)) = octets.split_first_chunk::<20>() else {
            return self.short("TCP header", 20, octets, missing);
        };
        let header_len = usize::from(fixed[12] >> 4) * 4;
        if header_len < 20 {
            return self
                .wrong(format!("TCP: header length {header_len}, at least 20 octets expected"));
        }
        let options = header_len - 20;
        let wire_len = rest.len() + missing;
        if options > wire_len {
            return self.short("TCP header", header_len, octets, missing);
        }
        // The options may have been cut off: without them the rest can still be told.
        let mut plain = *fixed;
        plain[12] = 5 << 4;
        let Ok(header) = TcpHeaderSlice::from_slice(&plain) else {
            return self.short("TCP header", 20, octets, missing);
        };
        let payload_len = u32::try_from(wire_len - options).unwrap_or(u32::MAX);
        let tcp = TcpInfo {
            seq: header.sequence_number(),
            ack: header.acknowledgment_number(),
            flags: fixed[13],
            window: header.window_size(),
            payload_len,
        };
        self.frame.tcp = Some(tcp);
        let (ends, ports) = self.frame.ends.zip(ports)?;
        let segment = Segment {
            src: SocketAddr::new(ends.src, ports.0),
            dst: SocketAddr::new(ends.dst, ports.1),
            seq: tcp.seq,
            ack: tcp.ack,
            flags: tcp.flags,
            payload: rest.get(options..).unwrap_or_default(),
            wire_len: payload_len,
        };
        self.streams.handle_segment(self.frame.number, &segment, self.done);
        None
    }

    /// The ports at the front of UDP and TCP headers; the frame is told.
    fn ports(&mut self, octets: &[u8]) -> Option<(u16, u16)> {
        let [a, b, c, d, ..] = *octets else { return None };
        let ports = (u16::from_be_bytes([a, b]), u16::from_be_bytes([c, d]));
        if let Some(ends) = &mut self.frame.ends {
            ends.ports = Some(ports);
        }
        Some(ports)
    }

    /// `what` needs `need` octets from the front of `octets`. No error if the capture cut them off.
    fn short<'a>(
        &mut self,
        what: &str,
        need: usize,
        octets: &[u8],
        missing: usize,
    ) -> Option<Next<'a>> {
        let have = octets.len() + missing;
        if have < need {
            self.fail(format!("{what}: {need} octets needed, {have} found"));
        }
        None
    }

    fn wrong<'a>(&mut self, what: String) -> Option<Next<'a>> {
        self.fail(what);
        None
    }

    /// The first problem is told.
    fn fail(&mut self, what: String) {
        self.frame.error.get_or_insert(what);
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::*;
    use super::*;
    use hex_literal::hex;
    use std::{string::ToString, vec};

    /// A frame of IPv4.
    fn frame4(protocol: u8, payload: &[u8]) -> Vec<u8> {
        ethernet(0x0800, &ipv4(7, 0, protocol, payload))
    }

    fn frame6(next_header: u8, payload: &[u8]) -> Vec<u8> {
        ethernet(0x86dd, &ipv6(next_header, payload))
    }

    fn error(frame: &[u8]) -> String {
        dissect(frame).error.expect("there is one")
    }

    const TCP: [u8; 20] = hex!("1c06 1c07 00000064 000000c8 5018 ffff 0000 0000");

    #[test]
    fn a_frame_tells_of_ip_and_udp() {
        let frame = dissect(&frame4(17, &udp(53, b"x")));
        assert_eq!(stack(&frame), ["eth", "ipv4", "udp"]);
        let src = "10.99.0.2".parse().unwrap();
        let dst = "10.99.0.3".parse().unwrap();
        assert_eq!(frame.ends, Some(Ends { src, dst, ports: Some((55_410, 53)) }));
        assert_eq!(frame.ip, Some(IpInfo { dscp: 0, ecn: 2, ttl: 64, ident: Some(7) }));
        let frame = dissect(&frame6(17, &udp(53, b"x")));
        assert_eq!(stack(&frame), ["eth", "ipv6", "udp"]);
        assert_eq!(frame.ip, Some(IpInfo { dscp: 3, ecn: 1, ttl: 63, ident: None }));
        assert_eq!(frame.ends.unwrap().dst.to_string(), "fd99::3");
        assert_eq!((frame.error, frame.tcp), (None, None));
    }

    #[test]
    fn padding_is_no_payload() {
        let mut octets = frame4(6, &TCP);
        octets.resize(60, 0);
        let frame = dissect(&octets);
        let want = TcpInfo { seq: 100, ack: 200, flags: 0x18, window: 0xffff, payload_len: 0 };
        assert_eq!((stack(&frame), frame.tcp), (vec!["eth", "ipv4", "tcp"], Some(want)));
    }

    #[test]
    fn a_length_of_0_means_the_rest() {
        let mut octets = frame4(6, &[&TCP[..], &[0; 30]].concat());
        octets[16..18].copy_from_slice(&[0, 0]);
        assert_eq!(dissect(&octets).tcp.unwrap().payload_len, 30);
        let mut octets = frame6(6, &[&TCP[..], &[0; 40]].concat());
        octets[18..20].copy_from_slice(&[0, 0]);
        let frame = dissect(&octets);
        assert_eq!((frame.tcp.unwrap().payload_len, frame.error), (40, None));
    }

    #[test]
    fn what_follows_an_ipv6_packet_does_not_count_as_headers() {
        // A frame check sequence that was captured too.
        let packet = sealed(true, 0, 6, 1, &[7; 1024]);
        let datagram = udp(4791, &packet);
        let cut = |from: usize, to: usize| {
            let mut header = hex!("11000000 00000009").to_vec();
            header[2..4].copy_from_slice(&(from as u16).to_be_bytes());
            header[3] |= u8::from(to < datagram.len());
            let options = hex!("2c 00 0104 00000000");
            let mut frame = frame6(0, &[&options[..], &header, &datagram[from..to]].concat());
            frame.extend(hex!("01020304"));
            frame
        };
        let frames = dissect_all(&[(&cut(0, 400), 9999), (&cut(400, datagram.len()), 9999)]);
        assert_eq!(
            (stack(&frames[1]), &frames[1].error),
            (vec!["eth", "ipv6", "udp", "bth"], &None)
        );
        assert_eq!(frames[1].roce[0].payload_len, 1024);
    }

    #[test]
    fn a_length_of_0_has_bounds() {
        for (payload, told) in [(MAX_UNTOLD, false), (MAX_UNTOLD + 1, true)] {
            let payload = vec![0; payload];
            let [mut v4, mut v6] = [ipv4(1, 0, 6, &[]), ipv6(6, &[])];
            (v4[2], v4[3]) = (0, 0);
            v4.extend(&payload);
            v6.extend(&payload);
            for frame in [ethernet(0x0800, &v4), ethernet(0x86dd, &v6)] {
                let frame = dissect(&frame);
                assert_eq!(frame.stack.contains(&Layer::Tcp), !told);
                let error = frame.error.unwrap_or_default();
                assert_eq!(error.contains("1048577 octets of payload found"), told, "{error}");
            }
        }
    }

    #[test]
    fn options_and_extension_headers_are_passed() {
        let mut packet = ipv4(7, 0, 17, &[&[1, 1, 1, 0][..], &udp(53, b"x")].concat());
        packet[0] = 0x46;
        assert_eq!(stack(&dissect(&ethernet(0x0800, &packet))), ["eth", "ipv4", "udp"]);
        let extensions = hex!(
            "2b 00 0104 00000000" // hop by hop
            "3c 00 0000 00000000" // routing
            "33 01 010c 00000000 00000000 00000000" // destination options
            "87 04 0000 00000001 00000001 000000000000000000000000" // authentication
            "2c 00 0000 00000000" // mobility
            "11 00 0000 00000009" // a fragment that is all
        );
        let frame = dissect(&frame6(0, &[&extensions[..], &udp(53, b"x")].concat()));
        assert_eq!((stack(&frame), frame.error), (vec!["eth", "ipv6", "udp"], None));
        assert_eq!(frame.ends.unwrap().ports, Some((55_410, 53)));
        let authenticated = [&hex!("11 01 0000 00000001 00000001")[..], &udp(53, b"x")].concat();
        assert_eq!(stack(&dissect(&frame4(51, &authenticated))), ["eth", "ipv4", "udp"]);
    }

    #[test]
    fn tunnels_are_walked() {
        let inner4 = ipv4(8, 0, 17, &udp(53, b"x"));
        let inner6 = ipv6(17, &udp(53, b"x"));
        let inner = ethernet(0x0800, &inner4);
        let vxlan = [&hex!("0800000000000100")[..], &inner].concat();
        let behind = |header: &[u8], inner: &[u8]| [header, inner].concat();
        for (outer, protocol, payload, want) in [
            (4, 4, inner4.clone(), "eth ipv4 ipv4 udp"),
            (4, 41, inner6.clone(), "eth ipv4 ipv6 udp"),
            (6, 4, inner4.clone(), "eth ipv6 ipv4 udp"),
            (6, 41, inner6.clone(), "eth ipv6 ipv6 udp"),
            (4, 137, behind(&hex!("00064140"), &inner4), "eth ipv4 mpls ipv4 udp"),
            (6, 143, inner.clone(), "eth ipv6 eth ipv4 udp"),
            (4, 47, behind(&hex!("0000 0800"), &inner4), "eth ipv4 gre ipv4 udp"),
            (4, 47, behind(&hex!("8000 86dd 00000000"), &inner6), "eth ipv4 gre ipv6 udp"),
            (
                6,
                47,
                behind(&hex!("b000 6558 00000000 00000001 00000002"), &inner),
                "eth ipv6 gre eth ipv4 udp",
            ),
            (
                4,
                47,
                behind(&hex!("2000 8847 00000001 00064140"), &inner4),
                "eth ipv4 gre mpls ipv4 udp",
            ),
            (4, 47, hex!("3001 880b 00000000 00000001").to_vec(), "eth ipv4 gre data"),
            (4, 47, hex!("0000 0000").to_vec(), "eth ipv4 gre data"),
            (4, 47, hex!("0000 88be 00").to_vec(), "eth ipv4 gre data"),
            (4, 17, udp(4789, &vxlan), "eth ipv4 udp vxlan eth ipv4 udp"),
            (6, 17, udp(8472, &vxlan), "eth ipv6 udp vxlan eth ipv4 udp"),
            (4, 17, udp(4789, &[0; 8]), "eth ipv4 udp vxlan data"),
            (
                4,
                17,
                udp(6081, &behind(&hex!("0240 6558 00000100 0102800100000000"), &inner)),
                "eth ipv4 udp geneve eth ipv4 udp",
            ),
            (
                4,
                17,
                udp(6081, &behind(&hex!("0000 0800 00000100"), &inner4)),
                "eth ipv4 udp geneve ipv4 udp",
            ),
            (4, 1, vec![8, 0, 0, 0], "eth ipv4 icmp"),
            (6, 58, vec![128, 0, 0, 0], "eth ipv6 icmp"),
            (4, 89, vec![0], "eth ipv4 data"),
        ] {
            let octets =
                if outer == 4 { frame4(protocol, &payload) } else { frame6(protocol, &payload) };
            let frame = dissect(&octets);
            assert_eq!((stack(&frame).join(" "), frame.error), (want.into(), None));
            if want.ends_with("udp") {
                // The innermost header is the one that is told of.
                let src = if want.ends_with("ipv6 udp") { "fd99::2" } else { "10.99.0.2" };
                let ends = frame.ends.unwrap();
                assert_eq!((ends.src.to_string(), ends.ports), (src.into(), Some((55_410, 53))));
            }
        }
    }

    #[test]
    fn tunnels_end_somewhere() {
        let nested = |depth: usize| {
            let mut packet = ipv4(8, 0, 17, &udp(53, b"x"));
            for _ in 1..depth {
                packet = ipv4(8, 0, 4, &packet);
            }
            dissect(&ethernet(0x0800, &packet))
        };
        let frame = nested(MAX_NESTING);
        assert_eq!((frame.stack.len(), frame.error), (MAX_NESTING + 2, None));
        assert_eq!(
            nested(MAX_NESTING + 1).error.unwrap(),
            "16 IP headers are nested: what is in the last is not looked into"
        );
        let deepest = nested(MAX_NESTING + 1000);
        assert_eq!(deepest.stack.len(), MAX_NESTING + 1);
    }

    #[test]
    fn malformed_headers_are_told() {
        let change = |mut octets: Vec<u8>, at: usize, value: u8| {
            octets[at] = value;
            octets
        };
        let udp4 = frame4(17, &udp(53, b"x"));
        for (octets, want) in [
            (change(udp4.clone(), 14, 0x55), "IP: version 5, 4 or 6 expected"),
            (change(udp4.clone(), 14, 0x44), "IPv4: header length 16, at least 20 octets expected"),
            (change(udp4.clone(), 14, 0x4f), "IPv4 header: 60 octets needed, 29 found"),
            (
                change(udp4.clone(), 17, 19),
                "IPv4: total length 19, at least the header's 20 expected",
            ),
            (change(udp4.clone(), 17, 30), "IPv4: 10 octets of payload announced, 9 found"),
            (change(udp4.clone(), 39, 7), "UDP: length 7, at least 8 expected"),
            (change(udp4.clone(), 39, 10), "UDP: 2 octets of payload announced, 1 found"),
            (frame4(17, &[0; 7]), "UDP header: 8 octets needed, 7 found"),
            (frame4(6, &TCP[..19]), "TCP header: 20 octets needed, 19 found"),
            (
                frame4(6, &change(TCP.to_vec(), 12, 0x40)),
                "TCP: header length 16, at least 20 octets expected",
            ),
            (frame4(6, &change(TCP.to_vec(), 12, 0x60)), "TCP header: 24 octets needed, 20 found"),
            (frame4(4, &[]), "IP header: 20 octets needed, 0 found"),
            (frame4(41, &[0x60]), "IPv6 header: 40 octets needed, 1 found"),
            (frame4(51, &[17, 1, 0, 0]), "IP authentication header: 12 octets needed, 4 found"),
            (
                frame6(60, &[17, 1, 0, 0, 0, 0, 0, 0]),
                "IPv6 extension header: 16 octets needed, 8 found",
            ),
            (frame6(44, &[17, 0]), "IPv6 fragment header: 8 octets needed, 2 found"),
            (frame4(47, &[0, 0, 8]), "GRE header: 4 octets needed, 3 found"),
            (frame4(47, &[0xb0, 0, 8, 0, 0]), "GRE header: 16 octets needed, 5 found"),
            (frame4(17, &udp(4789, &[8])), "VXLAN header: 8 octets needed, 1 found"),
            (frame4(17, &udp(6081, &[0; 7])), "Geneve header: 8 octets needed, 7 found"),
            (
                frame4(17, &udp(6081, &[1, 0, 8, 0, 0, 0, 0, 0])),
                "Geneve options: 4 octets needed, 0 found",
            ),
            (
                ethernet(0x0800, &ipv4(7, 0x2000, 17, &[0; 9])),
                "IP fragment: 9 octets, a multiple of 8 expected where more follow",
            ),
        ] {
            assert_eq!(error(&octets), want);
        }
    }

    #[test]
    fn what_the_capture_cut_is_no_error() {
        let inner = ethernet(0x0800, &ipv4(8, 0, 6, &[&TCP[..], &[0; 30]].concat()));
        let vxlan = [&hex!("0800000000000100")[..], &inner].concat();
        let gre = [&hex!("b000 6558 00000000 00000001 00000002")[..], &inner].concat();
        let extended = [&hex!("06 00 0104 00000000")[..], &TCP].concat();
        for whole in [
            frame4(17, &udp(4789, &vxlan)),
            frame4(47, &gre),
            frame6(0, &extended),
            ethernet(0x0800, &ipv4(7, 0x2000, 17, &[0; 64])),
        ] {
            let full = dissect(&whole);
            for captured in 0..whole.len() {
                let frame = dissect_cut(&whole, captured);
                assert_eq!(frame.error, None, "{captured} of {}", whole.len());
                assert!(
                    full.stack.starts_with(&frame.stack)
                        || frame.stack.last() == Some(&Layer::Data)
                );
            }
        }
    }

    #[test]
    fn a_cut_tcp_header_tells_what_it_has() {
        let mut tcp = TCP.to_vec();
        tcp[12] = 0x80;
        tcp.extend([1; 12]);
        tcp.extend([0; 100]);
        let whole = frame4(6, &tcp);
        for captured in [54, 60, 66, 70] {
            let info = dissect_cut(&whole, captured).tcp.unwrap();
            assert_eq!((info.seq, info.payload_len), (100, 100), "{captured}");
        }
        let frame = dissect_cut(&whole, 40);
        assert_eq!((frame.tcp, frame.ends.unwrap().ports), (None, Some((0x1c06, 0x1c07))));
    }

    #[test]
    fn a_datagram_in_fragments_is_told_where_it_is_whole() {
        for v6 in [false, true] {
            let packet = sealed(v6, 0x1234, 6, 1, &[7; 1024]);
            // Its ICRC has DF, which the header keeps.
            let datagram = udp(4791, &packet);
            let cut = |from: usize, to: usize| {
                let more = u16::from(to < datagram.len());
                let piece = &datagram[from..to];
                if v6 {
                    let mut header = hex!("1100 0000 00000009").to_vec();
                    header[2..4].copy_from_slice(&(from as u16 | more).to_be_bytes());
                    ethernet(0x86dd, &ipv6(44, &[&header, piece].concat()))
                } else {
                    let flags = 0x4000 | more << 13 | (from / 8) as u16;
                    ethernet(0x0800, &ipv4(0x1234, flags, 17, piece))
                }
            };
            let [a, b, c] = [cut(0, 400), cut(400, 800), cut(800, datagram.len())];
            let frames = dissect_all(&[(&c, 9999), (&a, 9999), (&a, 9999), (&b, 9999)]);
            let ip = if v6 { "ipv6" } else { "ipv4" };
            for frame in &frames[..3] {
                assert_eq!((stack(frame), &frame.error), (vec!["eth", ip, "data"], &None));
            }
            assert_eq!(stack(&frames[3]), ["eth", ip, "udp", "bth"]);
            let roce = &frames[3].roce[0];
            assert_eq!((roce.icrc, roce.payload_len), (super::super::IcrcState::Good, 1024));
            assert_eq!(frames[3].ends.unwrap().ports, Some((55_410, 4791)));
            // A fragment that the capture cut completes nothing.
            let frames = dissect_all(&[(&a, 9999), (&b, 100), (&c, 9999)]);
            assert!(frames.iter().all(|frame| frame.roce.is_empty() && frame.error.is_none()));
        }
    }
}
