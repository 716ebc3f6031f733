//! Addresses and sockets.

mod holder;
pub(crate) mod startup;
#[allow(unsafe_code)]
pub(crate) mod sys;
pub(crate) mod tcp;
pub mod udp;

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6},
};

use crate::error::{Error, Result};

/// The port where none is given: that of the rdma_cm examples.
pub(crate) const DEFAULT_PORT: u16 = 7174;

/// A host as it was written.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Host {
    V4(Ipv4Addr),
    /// With its scope (the number of an interface), 0 for none.
    V6(Ipv6Addr, u32),
    Name(String),
}

/// `HOST[:PORT]`: an IPv4 or IPv6 literal (in brackets before a port, with `%interface` where it is
/// link-local) or a name, which is looked up each time it is used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HostPort {
    host: Host,
    port: Option<u16>,
}

impl HostPort {
    /// Reads `HOST[:PORT]`.
    pub(crate) fn parse(text: &str) -> Result<Self> {
        let bad = |why: &str| {
            Error::BadAddress(format!(
                "{text:?} is no address: {why}. Expected HOST[:PORT], such as 10.0.0.1, \
                 10.0.0.1:7174, [::1]:7174, [fe80::1%eth0]:7174 or example.org:7174"
            ))
        };
        if let Some((scheme, rest)) = text.split_once("://") {
            return Err(bad(&format!("leave {scheme}:// out of the peer's address: {rest}")));
        }
        let (host, port) = if let Some(rest) = text.strip_prefix('[') {
            let (host, after) =
                rest.split_once(']').ok_or_else(|| bad("the bracket is not closed"))?;
            let port = match after {
                "" => None,
                _ => Some(after.strip_prefix(':').ok_or_else(|| bad("a colon must follow \"]\""))?),
            };
            (literal_v6(host).map_err(|why| bad(&why))?, port)
        } else if text.matches(':').count() > 1 {
            // An IPv6 literal without brackets has no port.
            (literal_v6(text).map_err(|why| bad(&why))?, None)
        } else {
            let (host, port) = match text.split_once(':') {
                Some((host, port)) => (host, Some(port)),
                None => (text, None),
            };
            if host.is_empty() {
                return Err(bad("the host is missing"));
            }
            let host = match host.parse() {
                Ok(ip) => Host::V4(ip),
                Err(_) if host.bytes().all(|b| b.is_ascii_digit() || b == b'.') => {
                    return Err(bad("four numbers from 0 to 255 make an IPv4 address"));
                }
                Err(_) if host.contains(|c: char| c.is_whitespace() || c == '/' || c == '%') => {
                    return Err(bad("a host name has no such characters"));
                }
                Err(_) => Host::Name(host.to_owned()),
            };
            (host, port)
        };
        let port = match port {
            Some(digits) => {
                Some(digits.parse().map_err(|_| bad("a port is a number from 0 to 65535"))?)
            }
            None => None,
        };
        Ok(Self { host, port })
    }

    /// The port, where one was written.
    pub(crate) fn port(&self) -> Option<u16> {
        self.port
    }

    /// Whether it is a name, which has to be looked up.
    pub(crate) fn is_name(&self) -> bool {
        matches!(self.host, Host::Name(_))
    }

    /// Whether it stands for all addresses of this host (`0.0.0.0`, `::`).
    pub(crate) fn is_unspecified(&self) -> bool {
        match &self.host {
            Host::V4(ip) => ip.is_unspecified(),
            Host::V6(ip, _) => ip.is_unspecified(),
            Host::Name(_) => false,
        }
    }

    /// The first address, with `port` where none was written. Looks a name up, which waits.
    pub(crate) fn resolve_now(&self, port: u16) -> Result<SocketAddr> {
        let port = self.port.unwrap_or(port);
        let name = match &self.host {
            Host::V4(ip) => return Ok(SocketAddrV4::new(*ip, port).into()),
            Host::V6(ip, scope) => return Ok(SocketAddrV6::new(*ip, port, 0, *scope).into()),
            Host::Name(name) => name,
        };
        let mut found = std::net::ToSocketAddrs::to_socket_addrs(&(name.as_str(), port))
            .map_err(|e| Error::io(format!("cannot look up {name}"), e))?;
        found.next().ok_or_else(|| Error::BadAddress(format!("the name {name} has no address")))
    }

    /// All addresses, with `port` where none was written. Looks names up.
    pub(crate) async fn resolve(&self, port: u16) -> Result<Vec<SocketAddr>> {
        let port = self.port.unwrap_or(port);
        let name = match &self.host {
            Host::V4(ip) => return Ok(vec![SocketAddrV4::new(*ip, port).into()]),
            Host::V6(ip, scope) => return Ok(vec![SocketAddrV6::new(*ip, port, 0, *scope).into()]),
            Host::Name(name) => name,
        };
        let found = tokio::net::lookup_host((name.as_str(), port)).await;
        let addresses: Vec<_> =
            found.map_err(|e| Error::io(format!("cannot look up {name}"), e))?.collect();
        if addresses.is_empty() {
            return Err(Error::BadAddress(format!("the name {name} has no address")));
        }
        Ok(addresses)
    }
}

impl fmt::Display for HostPort {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            Host::V4(ip) => write!(f, "{ip}")?,
            Host::V6(ip, 0) => write!(f, "[{ip}]")?,
            Host::V6(ip, scope) => write!(f, "[{ip}%{scope}]")?,
            Host::Name(name) => f.write_str(name)?,
        }
        match self.port {
            Some(port) => write!(f, ":{port}"),
            None => Ok(()),
        }
    }
}

fn literal_v6(text: &str) -> Result<Host, String> {
    let (ip, scope) = match text.split_once('%') {
        Some((ip, scope)) => (ip, Some(scope)),
        None => (text, None),
    };
    let ip: Ipv6Addr = ip.parse().map_err(|_| format!("{ip} is no IPv6 address"))?;
    if let IpAddr::V4(ip) = IpAddr::V6(ip).to_canonical() {
        // IPv4 in IPv6's clothes (RFC 4291 §2.5.5.2) is IPv4 on the wire.
        return Ok(Host::V4(ip));
    }
    let scope = match scope {
        None => 0,
        Some(scope) => match scope.parse() {
            Ok(number) => number,
            Err(_) => sys::interface_index(scope)
                .ok_or_else(|| format!("there is no network interface {scope:?}"))?,
        },
    };
    Ok(Host::V6(ip, scope))
}

/// The first of `candidates` of the same family as `like`.
pub(crate) fn same_family(candidates: &[SocketAddr], like: &SocketAddr) -> Option<SocketAddr> {
    candidates.iter().copied().find(|a| a.is_ipv4() == like.is_ipv4())
}

/// The address without its port, for binding to a free one.
pub(crate) fn any_port(mut addr: SocketAddr) -> SocketAddr {
    addr.set_port(0);
    addr
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(text: &str) -> (Host, Option<u16>) {
        let HostPort { host, port } = HostPort::parse(text).unwrap();
        (host, port)
    }

    #[test]
    fn hosts_and_ports() {
        let v6 = |s: &str, scope| Host::V6(s.parse().unwrap(), scope);
        assert_eq!(parsed("10.0.0.1"), (Host::V4(Ipv4Addr::new(10, 0, 0, 1)), None));
        assert_eq!(parsed("10.0.0.1:0"), (Host::V4(Ipv4Addr::new(10, 0, 0, 1)), Some(0)));
        assert_eq!(parsed("[::1]:7174"), (v6("::1", 0), Some(7174)));
        assert_eq!(parsed("[::1]"), (v6("::1", 0), None));
        assert_eq!(parsed("::1"), (v6("::1", 0), None));
        assert_eq!(parsed("[fe80::1%3]:9"), (v6("fe80::1", 3), Some(9)));
        let mapped = (Host::V4(Ipv4Addr::new(10, 0, 0, 1)), Some(7));
        assert_eq!(parsed("[::ffff:10.0.0.1]:7"), mapped);
        assert_eq!(parsed("example.org:1"), (Host::Name("example.org".into()), Some(1)));
    }

    #[test]
    fn a_scope_is_the_number_of_an_interface() {
        let lo = sys::interface_index("lo").expect("every Linux host has lo");
        assert_eq!(parsed("fe80::1%lo").0, Host::V6("fe80::1".parse().unwrap(), lo));
        let e = HostPort::parse("fe80::1%nosuch0").unwrap_err().to_string();
        assert!(e.contains("no network interface \"nosuch0\""), "{e}");
    }

    #[test]
    fn what_is_no_address_says_why() {
        for (text, why) in [
            ("[::1", "bracket"),
            ("[::1]7174", "colon"),
            ("10.0.0.1:70000", "0 to 65535"),
            ("10.0.0.1:", "0 to 65535"),
            ("10.0.0.300", "IPv4"),
            (":7174", "host is missing"),
            ("", "host is missing"),
            ("a b", "characters"),
            ("1:2:3", "IPv6"),
            ("tcp://10.0.0.1:7174", "leave tcp:// out of the peer's address: 10.0.0.1:7174"),
            ("tcp://[::1]:7174", "leave tcp:// out"),
        ] {
            let e = HostPort::parse(text).unwrap_err().to_string();
            assert!(e.contains(why) && e.contains("Expected HOST[:PORT]"), "{text}: {e}");
        }
    }
}
