//! How rdma_cm names services and ends (IBTA vol. 1, annex A11).
//!
//! The service ID says protocol and port:
//!
//! ```text
//!   0                   1                   2                   3
//!   0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  |                               0                               |
//!  |       1       |  IP protocol  |              Port             |
//! ```
//!
//! The private data of REQ and SIDR_REQ begins with the addresses:
//!
//! ```text
//!  | Major | Minor |  IPV  |  Rsv  |          Source port          |   0
//!  +                     Source address (128)                      +   4
//!  +                   Destination address (128)                   +  20
//!  +                    The program's private data                 +  36
//! ```

use core::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
};

/// What rdma_cm puts in front of the private data of REQ and SIDR_REQ: 36 octets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct IpCm {
    /// Major version, 4 bits, and minor version, 4 bits: 0.
    pub version: u8,
    /// IP's version, 4 bits: 4 or 6.
    pub ip_version: u8,
    /// The active side's port.
    pub src_port: u16,
    /// The active side's address; IPv4 in the last 4 octets, zeros in front.
    pub src: [u8; 16],
    /// The passive side's address.
    pub dst: [u8; 16],
}

impl IpCm {
    /// Octets on the wire.
    pub const LEN: usize = 36;

    /// From `src` and `src_port` to `dst`; `None` if one is IPv4 and the other IPv6.
    pub fn new(src: IpAddr, src_port: u16, dst: IpAddr) -> Option<Self> {
        let (ip_version, src, dst) = match (src, dst) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => {
                (4, src.to_ipv6_compatible().octets(), dst.to_ipv6_compatible().octets())
            }
            (IpAddr::V6(src), IpAddr::V6(dst)) => (6, src.octets(), dst.octets()),
            _ => return None,
        };
        Some(Self { version: 0, ip_version, src_port, src, dst })
    }

    /// Reads it from the front of private data; what follows is the program's. `None` if it is
    /// none: too short, wrong version, or an IP version other than 4 and 6.
    pub fn parse(private_data: &[u8]) -> Option<(Self, &[u8])> {
        let (head, rest) = private_data.split_first_chunk::<{ Self::LEN }>()?;
        let (&[version, ip_version, a, b], addresses) = head.split_first_chunk()?;
        let (&src, dst) = addresses.split_first_chunk()?;
        let &dst = dst.first_chunk()?;
        let ip_version = ip_version >> 4;
        let src_port = u16::from_be_bytes([a, b]);
        let good = version == 0 && matches!(ip_version, 4 | 6);
        good.then_some((Self { version, ip_version, src_port, src, dst }, rest))
    }

    /// The 36 octets.
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        out[0] = self.version;
        out[1] = self.ip_version << 4;
        out[2..4].copy_from_slice(&self.src_port.to_be_bytes());
        out[4..20].copy_from_slice(&self.src);
        out[20..].copy_from_slice(&self.dst);
        out
    }

    /// Source and destination; `None` if the IP version is neither 4 nor 6.
    pub fn addresses(&self) -> Option<(IpAddr, IpAddr)> {
        let address = |octets: [u8; 16]| match (self.ip_version, octets) {
            (4, [.., a, b, c, d]) => Some(IpAddr::V4(Ipv4Addr::new(a, b, c, d))),
            (6, octets) => Some(IpAddr::V6(Ipv6Addr::from(octets))),
            _ => None,
        };
        address(self.src).zip(address(self.dst))
    }
}

/// rdma_cm's port spaces: which ports are meant. The low octet is an IP protocol, for those that
/// the annex defines; open.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct PortSpace(pub u16);

impl PortSpace {
    /// `RDMA_PS_TCP`: connections (RC).
    pub const TCP: Self = Self(0x0106);
    /// `RDMA_PS_UDP`: datagrams.
    pub const UDP: Self = Self(0x0111);
    /// `RDMA_PS_IB`: any queue pair type, services without IP.
    pub const IB: Self = Self(0x013f);

    /// The service ID of `port`.
    pub const fn service_id(self, port: u16) -> u64 {
        (self.0 as u64) << 16 | port as u64
    }

    /// Port space and port of a service ID; `None` if it is not one of rdma_cm's, which begin
    /// with `0x0000000001`.
    pub const fn of_service_id(service_id: u64) -> Option<(Self, u16)> {
        if service_id >> 24 != 1 {
            return None;
        }
        Some((Self((service_id >> 16) as u16), service_id as u16))
    }

    /// IP protocol: 6 for TCP, 17 for UDP, 63 for IB.
    pub const fn protocol(self) -> u8 {
        self.0 as u8
    }

    /// `TCP`, `UDP` or `IB`; `None` for any other.
    pub const fn name(self) -> Option<&'static str> {
        match self {
            Self::TCP => Some("TCP"),
            Self::UDP => Some("UDP"),
            Self::IB => Some("IB"),
            _ => None,
        }
    }
}

impl fmt::Display for PortSpace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name),
            None => write!(f, "{:#06x}", self.0),
        }
    }
}

impl fmt::Debug for PortSpace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "PortSpace({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hex_literal::hex;
    use proptest::prelude::*;
    use std::{string::ToString, vec::Vec};

    #[test]
    fn the_header_of_linux() {
        // verbtest's, of a REQ: its program's data follows.
        let octets = hex!(
            "00 40 e00a 0000000000000000000000000a630002 0000000000000000000000000a630003 706c65617365"
        );
        let (ip, rest) = IpCm::parse(&octets).unwrap();
        let [src, dst] = ["10.99.0.2", "10.99.0.3"].map(|ip| ip.parse().unwrap());
        assert_eq!((ip.version, ip.ip_version, ip.src_port), (0, 4, 0xe00a));
        assert_eq!(ip.addresses(), Some((src, dst)));
        assert_eq!(rest, b"please");
        assert_eq!(IpCm::new(src, 0xe00a, dst), Some(ip));
        assert_eq!(ip.to_bytes(), octets[..36]);
    }

    #[test]
    fn ipv6() {
        let octets =
            hex!("00 60 1234 fe800000000000000000000000000001 20010db8000000000000000000000002");
        let (ip, rest) = IpCm::parse(&octets).unwrap();
        let [src, dst] = ["fe80::1", "2001:db8::2"].map(|ip| ip.parse().unwrap());
        assert_eq!((ip.addresses(), rest.len()), (Some((src, dst)), 0));
        assert_eq!(IpCm::new(src, 0x1234, dst), Some(ip));
        assert_eq!(ip.to_bytes(), octets);
        assert_eq!(IpCm::new(src, 1, "10.0.0.1".parse().unwrap()), None);
    }

    #[test]
    fn what_is_no_header() {
        let good = IpCm { ip_version: 4, ..IpCm::default() }.to_bytes();
        assert!(IpCm::parse(&good).is_some());
        assert_eq!(IpCm::parse(&good[..35]), None);
        for (at, octet) in [(0, 0x01), (0, 0x10), (1, 0x00), (1, 0x50), (1, 0x04)] {
            let mut bad = good;
            bad[at] = octet;
            assert_eq!(IpCm::parse(&bad), None, "{at}: {octet:#x}");
        }
        assert_eq!(IpCm { ip_version: 5, ..IpCm::default() }.addresses(), None);
    }

    #[test]
    fn service_ids() {
        for (id, space, port, name, protocol) in [
            (0x0000_0000_0106_1c06, PortSpace::TCP, 7174, "TCP", 6),
            (0x0000_0000_0111_1c06, PortSpace::UDP, 7174, "UDP", 17),
            (0x0000_0000_013f_0001, PortSpace::IB, 1, "IB", 63),
            (0x0000_0000_0184_ffff, PortSpace(0x184), 0xffff, "0x0184", 132),
        ] {
            assert_eq!(space.service_id(port), id);
            assert_eq!(PortSpace::of_service_id(id), Some((space, port)));
            assert_eq!((space.to_string().as_str(), space.protocol()), (name, protocol));
        }
        for id in [0, 0x1_1c06, 0x0206_1c06, 0x1_0106_1c06, 0x1000_0000_0106_1c06] {
            assert_eq!(PortSpace::of_service_id(id), None, "{id:#x}");
        }
    }

    proptest! {
        #[test]
        fn round_trip(six: bool, src_port: u16, src: [u8; 16], dst: [u8; 16], rest: Vec<u8>) {
            let ip = IpCm { version: 0, ip_version: if six { 6 } else { 4 }, src_port, src, dst };
            let octets = [&ip.to_bytes()[..], &rest].concat();
            prop_assert_eq!(IpCm::parse(&octets), Some((ip, &rest[..])));
            prop_assert!(ip.addresses().is_some());
        }

        #[test]
        fn any_bytes_are_emitted_as_they_were(octets in prop::collection::vec(0u8.., 0..64)) {
            if let Some((ip, rest)) = IpCm::parse(&octets) {
                let mut again = [&ip.to_bytes()[..], rest].concat();
                again[1] |= octets[1] & 0x0f;
                prop_assert_eq!(again, octets);
            }
        }

        #[test]
        fn any_service_id_comes_back(id: u64, low in 0u64..1 << 24) {
            let ours = 0x0100_0000 | low;
            let (space, port) = PortSpace::of_service_id(ours).unwrap();
            prop_assert_eq!(space.service_id(port), ours);
            prop_assert_eq!(PortSpace::of_service_id(id).is_some(), id >> 24 == 1);
        }
    }
}
