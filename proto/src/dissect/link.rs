//! Link layers: from a frame's first octet to IP, RoCEv1 or InfiniBand.
//!
//! ```text
//!  Ethernet    | destination 6 | source 6 | EtherType 2 |                 IEEE 802.3
//!              … or a length below 0x600 and then IEEE 802.2: | DSAP | SSAP | control |
//!              of which SNAP is  | AA | AA | 03 | OUI 3 | EtherType 2 |
//!  VLAN        | priority, number 2 | EtherType 2 |                       IEEE 802.1Q, 802.1ad
//!  MPLS        | label 20 bits, class 3, bottom 1, TTL 8 |                RFC 3032
//!  Linux SLL   | direction 2 | ARPHRD 2 | address 2 + 8 | EtherType 2 |
//!  Linux SLL2  | EtherType 2 | 0 2 | interface 4 | ARPHRD 2 | direction 1 | address 1 + 8 |
//!  null, loop  | address family 4 |
//! ```
//!
//! Each layer is put on the stack before its header is looked at, so that the stack of a frame that
//! was cut within a header names that header's layer last.

use alloc::{format, string::String};

use etherparse::{EtherType, Ethernet2Slice, SingleVlanSlice, err::LenError};

use super::{
    Layer, Pause, Stack,
    capture::{LinkType, Record},
};

/// VLAN tags, MPLS labels and SNAP headers that a frame may have; beyond, it is not looked into.
pub(super) const MAX_DEPTH: usize = 32;

/// A second and third VLAN tag of devices older than 802.1ad use these, too.
const VLAN_9100: EtherType = EtherType(0x9100);
const VLAN_9200: EtherType = EtherType(0x9200);
const MPLS_UNICAST: EtherType = EtherType(0x8847);
const MPLS_MULTICAST: EtherType = EtherType(0x8848);
/// Reverse ARP (RFC 903): ARP's format with two more operations.
const RARP: EtherType = EtherType(0x8035);
const MAC_CONTROL: EtherType = EtherType(0x8808);
const ROCE_V1: EtherType = EtherType(crate::wire::roce::ETHERTYPE);
/// Below, the field is a length.
pub(super) const FIRST_ETHERTYPE: u16 = 0x600;

/// What a link layer carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Inner<'a> {
    /// IPv4 or IPv6: the version nibble decides. Not on the stack yet.
    Ip(&'a [u8]),
    /// RoCEv1: from the GRH on. Not on the stack yet.
    RoceV1(&'a [u8]),
    /// Native InfiniBand: from the LRH to the VCRC. Not on the stack yet.
    Ib(&'a [u8]),
    /// Pause or PFC; on the stack.
    Pause(Pause),
    /// Nothing that is looked into; on the stack, as ARP or data.
    Other,
}

/// Walks from a frame's first octet to what it carries. Appends the layers it passes to `stack`.
///
/// # Errors
///
/// A header that is not whole, in words.
pub(super) fn walk<'a>(record: &Record<'a>, stack: &mut Stack) -> Result<Inner<'a>, String> {
    let data = record.data;
    match record.link {
        LinkType::ETHERNET => ethernet(data, stack),
        LinkType::LINUX_SLL => sll(data, stack),
        LinkType::LINUX_SLL2 => sll2(data, stack),
        LinkType::NULL | LinkType::LOOP => null(data, stack),
        LinkType::ERF => erf(record.erf, data, stack),
        LinkType::INFINIBAND => Ok(Inner::Ib(data)),
        // DLT_RAW of most systems and of OpenBSD, LINKTYPE_RAW, _IPV4, _IPV6.
        LinkType(12 | 14 | 101 | 228 | 229) => Ok(Inner::Ip(data)),
        _ => other(stack),
    }
}

/// The same for Ethernet: also what VXLAN, Geneve and GRE carry.
///
/// # Errors
///
/// As of [`walk`].
pub(super) fn ethernet<'a>(data: &'a [u8], stack: &mut Stack) -> Result<Inner<'a>, String> {
    stack.push(Layer::Eth);
    let frame = Ethernet2Slice::from_slice_without_fcs(data).map_err(|e| cut("Ethernet", &e))?;
    ethertype(frame.ether_type().0, frame.payload_slice(), stack)
}

/// The same from an EtherType and what follows it: also what GRE and Geneve carry. Below 0x600 it
/// is the length of an IEEE 802.2 frame.
///
/// # Errors
///
/// As of [`walk`].
pub(super) fn ethertype<'a>(
    ethertype: u16,
    data: &'a [u8],
    stack: &mut Stack,
) -> Result<Inner<'a>, String> {
    let (mut next, mut data) = (EtherType(ethertype), data);
    for _ in 0..=MAX_DEPTH {
        match next {
            EtherType::IPV4 | EtherType::IPV6 => return Ok(Inner::Ip(data)),
            ROCE_V1 => return Ok(Inner::RoceV1(data)),
            EtherType::VLAN_TAGGED_FRAME | EtherType::PROVIDER_BRIDGING | VLAN_9100 | VLAN_9200 => {
                stack.push(Layer::Vlan);
                let tag = SingleVlanSlice::from_slice(data).map_err(|e| cut("VLAN tag", &e))?;
                (next, data) = (tag.ether_type(), tag.payload_slice());
            }
            MPLS_UNICAST | MPLS_MULTICAST => {
                stack.push(Layer::Mpls);
                let (label, rest) = split::<4>("MPLS label", data)?;
                data = rest;
                // The bottom of the stack does not say what follows: IP by its version, or
                // something by agreement.
                if label[2] & 1 != 0 {
                    return match data.first().map(|octet| octet >> 4) {
                        Some(4 | 6) => Ok(Inner::Ip(data)),
                        _ => other(stack),
                    };
                }
            }
            EtherType::ARP | RARP => {
                stack.push(Layer::Arp);
                return Ok(Inner::Other);
            }
            MAC_CONTROL => return mac_control(data, stack),
            EtherType(len) if len < FIRST_ETHERTYPE => {
                // What is behind that length is padding.
                let frame = &data[..data.len().min(len.into())];
                match llc(frame, stack)? {
                    Some((inner, rest)) => (next, data) = (inner, rest),
                    None => return other(stack),
                }
            }
            _ => return other(stack),
        }
    }
    Err(format!("link: more than {MAX_DEPTH} VLAN tags, MPLS labels and SNAP headers"))
}

/// IEEE 802.2: the EtherType and what follows it, if there is a SNAP header that has one.
fn llc<'a>(data: &'a [u8], stack: &mut Stack) -> Result<Option<(EtherType, &'a [u8])>, String> {
    // Novell's raw 802.3 has no LLC: IPX's checksum, never used, begins the frame.
    if data.starts_with(&[0xff, 0xff]) {
        return Ok(None);
    }
    stack.push(Layer::Llc);
    let (&[dsap, ssap, control], rest) = split::<3>("LLC", data)?;
    if (dsap & 0xfe, ssap & 0xfe, control) != (0xaa, 0xaa, 3) {
        return Ok(None);
    }
    let (&[o0, o1, o2, t0, t1], rest) = split::<5>("SNAP", rest)?;
    let inner = u16::from_be_bytes([t0, t1]);
    // OUI 0 of RFC 1042, and 802.1H's for bridges; others number protocols as they like.
    let known = matches!([o0, o1, o2], [0, 0, 0] | [0, 0, 0xf8]);
    Ok((known && inner >= FIRST_ETHERTYPE).then_some((EtherType(inner), rest)))
}

/// IEEE 802.3 annex 31B and IEEE 802.1Qbb.
fn mac_control<'a>(data: &'a [u8], stack: &mut Stack) -> Result<Inner<'a>, String> {
    let (opcode, rest) = split::<2>("MAC control", data)?;
    match u16::from_be_bytes(*opcode) {
        1 => {
            stack.push(Layer::Pause);
            let (quanta, _) = split::<2>("pause", rest)?;
            Ok(Inner::Pause(Pause::Link(u16::from_be_bytes(*quanta))))
        }
        0x0101 => {
            stack.push(Layer::Pfc);
            let (body, _) = split::<18>("PFC", rest)?;
            let quanta =
                core::array::from_fn(|i| u16::from_be_bytes([body[2 + 2 * i], body[3 + 2 * i]]));
            Ok(Inner::Pause(Pause::Priorities(body[1], quanta)))
        }
        _ => other(stack),
    }
}

/// LINKTYPE_LINUX_SLL. Read by hand: etherparse refuses headers of hardware that it does not know.
fn sll<'a>(data: &'a [u8], stack: &mut Stack) -> Result<Inner<'a>, String> {
    stack.push(Layer::Sll);
    let (header, rest) = split::<16>("Linux SLL", data)?;
    let hardware = u16::from_be_bytes([header[2], header[3]]);
    cooked(hardware, u16::from_be_bytes([header[14], header[15]]), rest, stack)
}

/// LINKTYPE_LINUX_SLL2.
fn sll2<'a>(data: &'a [u8], stack: &mut Stack) -> Result<Inner<'a>, String> {
    stack.push(Layer::Sll);
    let (header, rest) = split::<20>("Linux SLL2", data)?;
    let hardware = u16::from_be_bytes([header[8], header[9]]);
    cooked(hardware, u16::from_be_bytes([header[0], header[1]]), rest, stack)
}

/// What follows a cooked header.
fn cooked<'a>(
    hardware: u16,
    protocol: u16,
    data: &'a [u8],
    stack: &mut Stack,
) -> Result<Inner<'a>, String> {
    /// The protocol is one of netlink's.
    const NETLINK: u16 = 824;
    /// Numbers of Linux that are no EtherTypes: 802.3 without LLC, and 802.2.
    const ETH_P_802_2: u16 = 4;
    match (hardware, protocol) {
        (NETLINK, _) => other(stack),
        (_, ETH_P_802_2) => match llc(data, stack)? {
            Some((inner, rest)) => ethertype(inner.0, rest, stack),
            None => other(stack),
        },
        (_, 0..FIRST_ETHERTYPE) => other(stack),
        _ => ethertype(protocol, data, stack),
    }
}

/// LINKTYPE_NULL, in the byte order of the host that captured, and LINKTYPE_LOOP, in network byte
/// order: the families are so small that both can be told apart.
fn null<'a>(data: &'a [u8], stack: &mut Stack) -> Result<Inner<'a>, String> {
    stack.push(Layer::Null);
    let (octets, rest) = split::<4>("null", data)?;
    let family = u32::from_le_bytes(*octets).min(u32::from_be_bytes(*octets));
    match family {
        // AF_INET is 2 everywhere. AF_INET6 is 10 on Linux, 23 on Windows, 24 on NetBSD and
        // OpenBSD, 28 on FreeBSD, 30 on macOS.
        2 | 10 | 23 | 24 | 28 | 30 => Ok(Inner::Ip(rest)),
        // Some put an EtherType into the lower half.
        _ => match EtherType(u16::from_be_bytes([octets[2], octets[3]])) {
            EtherType::IPV4 | EtherType::IPV6 => Ok(Inner::Ip(rest)),
            _ => other(stack),
        },
    }
}

/// An ERF record without its headers.
fn erf<'a>(kind: Option<u8>, data: &'a [u8], stack: &mut Stack) -> Result<Inner<'a>, String> {
    stack.push(Layer::Erf);
    match kind {
        None => Err(format!("ERF: headers of 16 octets or more needed, {} found", data.len())),
        // Plain, with a colour, of a DSM, with a hash.
        Some(2 | 11 | 16 | 20) => ethernet(data, stack),
        Some(21) => Ok(Inner::Ib(data)),
        Some(22 | 23) => Ok(Inner::Ip(data)),
        Some(_) => other(stack),
    }
}

fn other<'a>(stack: &mut Stack) -> Result<Inner<'a>, String> {
    stack.push(Layer::Data);
    Ok(Inner::Other)
}

fn split<'a, const N: usize>(
    layer: &str,
    data: &'a [u8],
) -> Result<(&'a [u8; N], &'a [u8]), String> {
    data.split_first_chunk()
        .ok_or_else(|| format!("{layer}: {N} octets needed, {} found", data.len()))
}

fn cut(layer: &str, error: &LenError) -> String {
    format!("{layer}: {} octets needed, {} found", error.required_len, error.len)
}

#[cfg(test)]
mod tests {
    use super::*;
    use hex_literal::hex;
    use proptest::prelude::*;
    use std::{vec, vec::Vec};

    fn record(link: LinkType, data: &[u8]) -> Record<'_> {
        Record { number: 1, time_ns: None, len: data.len() as u32, data, link, erf: None }
    }

    /// The stack's names, and what is carried.
    fn walked<'a>(record: &Record<'a>) -> (Vec<&'static str>, Result<Inner<'a>, String>) {
        let mut stack = Stack::new();
        let inner = walk(record, &mut stack);
        (stack.iter().map(|layer| layer.name()).collect(), inner)
    }

    /// A frame after its two MAC addresses.
    fn eth(rest: &[u8]) -> (Vec<&'static str>, Result<Inner<'_>, String>) {
        let frame = [&hex!("020000000001 020000000002")[..], rest].concat();
        walked(&record(LinkType::ETHERNET, Vec::leak(frame)))
    }

    fn told<T>(result: Result<T, String>) -> String {
        result.err().expect("an error")
    }

    #[test]
    fn ethernet_carries_ip_roce_and_arp() {
        let ip = &hex!("45000014")[..];
        assert_eq!(eth(&hex!("0800 45000014")), (vec!["eth"], Ok(Inner::Ip(ip))));
        let ip = &hex!("60000000")[..];
        assert_eq!(eth(&hex!("86dd 60000000")), (vec!["eth"], Ok(Inner::Ip(ip))));
        let grh = &hex!("6000000000001b40")[..];
        let found = eth(&hex!("8915 6000000000001b40"));
        assert_eq!(found, (vec!["eth"], Ok(Inner::RoceV1(grh))));
        assert_eq!(eth(&hex!("0806 0001")), (vec!["eth", "arp"], Ok(Inner::Other)));
        assert_eq!(eth(&hex!("8035 0001")), (vec!["eth", "arp"], Ok(Inner::Other)));
        assert_eq!(eth(&hex!("88cc 0207")), (vec!["eth", "data"], Ok(Inner::Other)));
        // Nothing behind the header is for the next layer to say.
        assert_eq!(eth(&hex!("0800")), (vec!["eth"], Ok(Inner::Ip(&[]))));
    }

    #[test]
    fn vlan_tags_of_every_kind() {
        let rest = &hex!("45")[..];
        for tag in [hex!("8100"), hex!("88a8"), hex!("9100"), hex!("9200")] {
            let frame = [&tag[..], &hex!("0064 8100 6065 0800 45")].concat();
            assert_eq!(eth(&frame), (vec!["eth", "vlan", "vlan"], Ok(Inner::Ip(rest))));
        }
        let grh = &hex!("60")[..];
        let found = eth(&hex!("8100 6064 8915 60"));
        assert_eq!(found, (vec!["eth", "vlan"], Ok(Inner::RoceV1(grh))));
        // LLC behind a tag, without SNAP: a spanning tree frame.
        let found = eth(&hex!("8100 0064 0003 424203"));
        assert_eq!(found, (vec!["eth", "vlan", "llc", "data"], Ok(Inner::Other)));
    }

    #[test]
    fn mpls_labels_down_to_the_bottom() {
        let ip = &hex!("45")[..];
        let found = eth(&hex!("8847 000640ff 00065140 45"));
        assert_eq!(found, (vec!["eth", "mpls", "mpls"], Ok(Inner::Ip(ip))));
        let ip = &hex!("60")[..];
        let found = eth(&hex!("8100 0064 8848 00065140 60"));
        assert_eq!(found, (vec!["eth", "vlan", "mpls"], Ok(Inner::Ip(ip))));
        // A pseudowire's control word; nothing at all.
        let found = eth(&hex!("8847 00065140 00000000"));
        assert_eq!(found, (vec!["eth", "mpls", "data"], Ok(Inner::Other)));
        let found = eth(&hex!("8847 00065140"));
        assert_eq!(found, (vec!["eth", "mpls", "data"], Ok(Inner::Other)));
    }

    #[test]
    fn lengths_instead_of_ethertypes() {
        // SNAP with an EtherType, and padding behind the length.
        let ip = &hex!("4500")[..];
        let found = eth(&hex!("000a aaaa03 000000 0800 4500 ffffffff"));
        assert_eq!(found, (vec!["eth", "llc"], Ok(Inner::Ip(ip))));
        let found = eth(&hex!("000a aaaa03 0000f8 0800 4500"));
        assert_eq!(found, (vec!["eth", "llc"], Ok(Inner::Ip(ip))));
        // Cisco's OUI; a number below the EtherTypes; a spanning tree; Novell's raw IPX.
        for frame in [
            &hex!("000a aaaa03 00000c 2000 02b4")[..],
            &hex!("000a aaaa03 000000 0064 4500"),
            &hex!("0005 424203 0000"),
        ] {
            assert_eq!(eth(frame), (vec!["eth", "llc", "data"], Ok(Inner::Other)));
        }
        let found = eth(&hex!("0022 ffff 0022"));
        assert_eq!(found, (vec!["eth", "data"], Ok(Inner::Other)));
        // The length, not the frame's end, is where the header is cut.
        let (stack, inner) = eth(&hex!("0002 aaaa03 000000 0800 4500"));
        assert_eq!(stack, ["eth", "llc"]);
        assert_eq!(told(inner), "LLC: 3 octets needed, 2 found");
        let (_, inner) = eth(&hex!("0007 aaaa03 000000 0800 4500"));
        assert_eq!(told(inner), "SNAP: 5 octets needed, 4 found");
    }

    #[test]
    fn pause_and_priority_flow_control() {
        let found = eth(&hex!("8808 0001 ffff 0000"));
        assert_eq!(found, (vec!["eth", "pause"], Ok(Inner::Pause(Pause::Link(65535)))));
        let found = eth(&hex!("8808 0101 0008 0000 0001 0002 ffff 0004 0005 0006 0007 0000"));
        let quanta = [0, 1, 2, 65535, 4, 5, 6, 7];
        let pause = Pause::Priorities(8, quanta);
        assert_eq!(found, (vec!["eth", "pfc"], Ok(Inner::Pause(pause))));
        let found = eth(&hex!("8808 0002 0000"));
        assert_eq!(found, (vec!["eth", "data"], Ok(Inner::Other)));
        assert_eq!(told(eth(&hex!("8808 00")).1), "MAC control: 2 octets needed, 1 found");
        assert_eq!(told(eth(&hex!("8808 0001 ff")).1), "pause: 2 octets needed, 1 found");
        assert_eq!(told(eth(&hex!("8808 0101 0008")).1), "PFC: 18 octets needed, 2 found");
    }

    #[test]
    fn linux_cooked_captures() {
        let ip = &hex!("45")[..];
        let found = |link, data| walked(&record(link, data));
        let v1 = hex!("0000 0001 0006 020000000001 0000 0800 45");
        assert_eq!(found(LinkType::LINUX_SLL, &v1), (vec!["sll"], Ok(Inner::Ip(ip))));
        let v2 = hex!("0800 0000 00000003 0001 04 06 020000000001 0000 45");
        assert_eq!(found(LinkType::LINUX_SLL2, &v2), (vec!["sll"], Ok(Inner::Ip(ip))));
        // A VLAN tag; LLC; CAN's number; netlink, whose protocols are its own.
        let vlan = hex!("0000 0001 0006 020000000001 0000 8100 0064 0800 45");
        let stack = vec!["sll", "vlan"];
        assert_eq!(found(LinkType::LINUX_SLL, &vlan), (stack, Ok(Inner::Ip(ip))));
        let llc = hex!("0000 0001 0006 020000000001 0000 0004 aaaa03 000000 0800 45");
        assert_eq!(found(LinkType::LINUX_SLL, &llc), (vec!["sll", "llc"], Ok(Inner::Ip(ip))));
        let can = hex!("0001 0118 0000 0000000000000000 000c 00000000");
        assert_eq!(found(LinkType::LINUX_SLL, &can), (vec!["sll", "data"], Ok(Inner::Other)));
        let netlink = hex!("0004 0338 0000 0000000000000000 0800 45");
        let stack = vec!["sll", "data"];
        assert_eq!(found(LinkType::LINUX_SLL, &netlink), (stack, Ok(Inner::Other)));
        let (stack, inner) = found(LinkType::LINUX_SLL, &v1[..15]);
        assert_eq!(stack, ["sll"]);
        assert_eq!(told(inner), "Linux SLL: 16 octets needed, 15 found");
        let (_, inner) = found(LinkType::LINUX_SLL2, &v1);
        assert_eq!(told(inner), "Linux SLL2: 20 octets needed, 17 found");
    }

    #[test]
    fn loopback_in_either_byte_order() {
        for link in [LinkType::NULL, LinkType::LOOP] {
            for family in [2u32, 10, 23, 24, 28, 30] {
                for octets in [family.to_le_bytes(), family.to_be_bytes()] {
                    let data = [&octets[..], &[0x45]].concat();
                    let found = walked(&record(link, &data));
                    assert_eq!(found, (vec!["null"], Ok(Inner::Ip(&[0x45]))));
                }
            }
            let found = walked(&record(link, &hex!("0f000800 45")));
            assert_eq!(found, (vec!["null"], Ok(Inner::Ip(&[0x45]))));
            let found = walked(&record(link, &hex!("07000000 45")));
            assert_eq!(found, (vec!["null", "data"], Ok(Inner::Other)));
            let (_, inner) = walked(&record(link, &hex!("020000")));
            assert_eq!(told(inner), "null: 4 octets needed, 3 found");
        }
    }

    #[test]
    fn link_types_without_a_header() {
        let data = hex!("45000014");
        for link in [12, 14, 101, 228, 229] {
            let found = walked(&record(LinkType(link), &data));
            assert_eq!(found, (vec![], Ok(Inner::Ip(&data))), "{link}");
        }
        let found = walked(&record(LinkType::INFINIBAND, &data));
        assert_eq!(found, (vec![], Ok(Inner::Ib(&data))));
        for link in [LinkType(105), LinkType(195), LinkType::UNDECLARED] {
            let found = walked(&record(link, &data));
            assert_eq!(found, (vec!["data"], Ok(Inner::Other)), "{link:?}");
        }
    }

    #[test]
    fn erf_records_by_type() {
        let data = hex!("020000000001 020000000002 0800 45");
        let of = |kind| walked(&Record { erf: kind, ..record(LinkType::ERF, &data) });
        for kind in [2, 11, 16, 20] {
            assert_eq!(of(Some(kind)), (vec!["erf", "eth"], Ok(Inner::Ip(&[0x45]))));
        }
        assert_eq!(of(Some(21)), (vec!["erf"], Ok(Inner::Ib(&data))));
        assert_eq!(of(Some(22)), (vec!["erf"], Ok(Inner::Ip(&data))));
        assert_eq!(of(Some(23)), (vec!["erf"], Ok(Inner::Ip(&data))));
        assert_eq!(of(Some(27)), (vec!["erf", "data"], Ok(Inner::Other)));
        let (stack, inner) = of(None);
        assert_eq!(stack, ["erf"]);
        assert_eq!(told(inner), "ERF: headers of 16 octets or more needed, 15 found");
    }

    #[test]
    fn headers_that_are_cut_name_their_layer() {
        let whole = hex!("020000000001 020000000002 8100 0064 8847 00065140 45");
        for (have, stack, error) in [
            (0, &["eth"][..], "Ethernet: 14 octets needed, 0 found"),
            (13, &["eth"], "Ethernet: 14 octets needed, 13 found"),
            (14, &["eth", "vlan"], "VLAN tag: 4 octets needed, 0 found"),
            (17, &["eth", "vlan"], "VLAN tag: 4 octets needed, 3 found"),
            (21, &["eth", "vlan", "mpls"], "MPLS label: 4 octets needed, 3 found"),
        ] {
            let (found, inner) = walked(&record(LinkType::ETHERNET, &whole[..have]));
            assert_eq!((&found[..], &told(inner)[..]), (stack, error));
        }
    }

    #[test]
    fn tags_have_a_bound() {
        let frame = |tags: usize| {
            let tags = hex!("8100 0064").repeat(tags);
            [&tags[..], &hex!("0800 45")].concat()
        };
        let found = frame(MAX_DEPTH);
        let (stack, inner) = eth(&found);
        assert_eq!((stack.len(), inner), (1 + MAX_DEPTH, Ok(Inner::Ip(&[0x45]))));
        for tags in [MAX_DEPTH + 1, 10_000] {
            let found = frame(tags);
            let (stack, inner) = eth(&found);
            assert_eq!(stack.len(), 2 + MAX_DEPTH);
            assert!(told(inner).contains("more than 32 VLAN tags"));
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_walked(data: Vec<u8>, link in 0..300u16, erf: Option<u8>) {
            let mut stack = Stack::new();
            let record = Record { erf, ..record(LinkType(link), &data) };
            if let Ok(Inner::Ip(rest) | Inner::RoceV1(rest) | Inner::Ib(rest)) =
                walk(&record, &mut stack)
            {
                prop_assert!(data.ends_with(rest));
            }
            prop_assert!(stack.len() <= MAX_DEPTH + 3);
        }

        #[test]
        fn any_bytes_behind_an_ethertype(
            data: Vec<u8>,
            next in prop::sample::select(vec![0x8100u16, 0x8847, 0x8808, 10, 0x8915, 0x800]),
        ) {
            let mut stack = Stack::new();
            let _ = ethertype(next, &data, &mut stack);
            prop_assert!(stack.len() <= MAX_DEPTH + 2);
        }
    }
}
