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
const MAC_CONTROL: EtherType = EtherType(0x8808);
const ROCE_V1: EtherType = EtherType(crate::wire::roce::ETHERTYPE);
/// Below, the field is a length.
const FIRST_ETHERTYPE: u16 = 0x600;

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
            EtherType::ARP => {
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
    let (family, rest) = split::<4>("null", data)?;
    let family = u32::from_le_bytes(*family).min(u32::from_be_bytes(*family));
    match family {
        // AF_INET is 2 everywhere. AF_INET6 is 10 on Linux, 23 on Windows, 24 on NetBSD and
        // OpenBSD, 28 on FreeBSD, 30 on macOS.
        2 | 10 | 23 | 24 | 28 | 30 => Ok(Inner::Ip(rest)),
        _ => other(stack),
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
