//! Who holds a UDP port: from `/proc`, as far as this user may look.

use std::{
    fmt::Write as _,
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

/// Looks at the list before it is believed that nobody is there.
const TRIES: usize = 10;

/// A bound socket of `/proc/net/udp` or `/proc/net/udp6`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Entry {
    local: SocketAddr,
    user: u32,
    inode: u64,
}

/// Why `addr` cannot be bound, and what helps, as the end of a sentence.
pub(super) fn describe(addr: SocketAddr) -> String {
    // The kernel lists by position, and leaves one out where another ends while we read.
    let entries = (0..TRIES).map(|_| holders(addr)).find(|found| !found.is_empty());
    let mut text = String::new();
    let mut all_addresses = false;
    for entry in entries.unwrap_or_default() {
        let separator = if text.is_empty() { "" } else { ", and " };
        let _ = write!(text, "{separator}{} is held by ", entry.local);
        match program(entry.inode) {
            Some((pid, name)) => {
                let _ = write!(text, "{name} (process {pid})");
            }
            None => {
                let _ = write!(
                    text,
                    "a process of user {} that we may not see, or by the kernel{}",
                    entry.user,
                    if addr.port() == 4791 {
                        ", whose rxe driver takes port 4791 on all addresses (`rdma link` shows it)"
                    } else {
                        ""
                    }
                );
            }
        }
        all_addresses |= entry.local.ip().is_unspecified();
    }
    if text.is_empty() {
        text = format!(
            "another socket holds it (`ss -lunp 'sport = :{}'` shows whose; the kernel's rxe driver \
             takes 4791 on all addresses)",
            addr.port()
        );
    }
    text.push_str("; end that program, or take ");
    if !all_addresses && !addr.ip().is_unspecified() {
        text.push_str("another address, such as 127.0.0.2 within one host, or ");
    }
    text.push_str("another port (`--udp-port N`, 0 for a free one)");
    text
}

/// All sockets that keep `addr` from being bound, as far as one look tells.
fn holders(addr: SocketAddr) -> Vec<Entry> {
    ["/proc/net/udp", "/proc/net/udp6"]
        .into_iter()
        .filter_map(|file| fs::read_to_string(file).ok())
        .flat_map(|text| text.lines().filter_map(parse).collect::<Vec<_>>())
        .filter(|entry| conflicts(addr, entry.local))
        .collect()
}

/// Whether who holds `held` keeps others from binding `wanted`: the same port, and the same address
/// or all addresses on one of the sides.
fn conflicts(wanted: SocketAddr, held: SocketAddr) -> bool {
    let (w, h) = (wanted.ip(), held.ip());
    // An IPv6 socket bound to :: may take IPv4's datagrams too; an IPv4 socket takes none of IPv6.
    let family = w.is_ipv4() == h.is_ipv4() || (w.is_ipv4() && h == Ipv6Addr::UNSPECIFIED);
    wanted.port() == held.port() && family && (w == h || w.is_unspecified() || h.is_unspecified())
}

/// The number and name of a process that has the socket open.
fn program(inode: u64) -> Option<(u32, String)> {
    // A socket that is being closed has none any more.
    if inode == 0 {
        return None;
    }
    let link = format!("socket:[{inode}]");
    for process in fs::read_dir("/proc").ok()?.flatten() {
        let Some(pid) = process.file_name().to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        // Those of other users, and those that end meanwhile, cannot be read.
        let Ok(files) = fs::read_dir(process.path().join("fd")) else { continue };
        let mut links = files.flatten().filter_map(|file| fs::read_link(file.path()).ok());
        if links.any(|target| target.as_os_str() == link.as_str()) {
            let name = fs::read_to_string(process.path().join("comm")).unwrap_or_default();
            return Some((pid, name.trim_end().to_owned()));
        }
    }
    None
}

/// `sl local_address rem_address st tx_queue:rx_queue tr:tm->when retrnsmt uid timeout inode …`
fn parse(line: &str) -> Option<Entry> {
    let mut fields = line.split_ascii_whitespace().skip(1);
    let (ip, port) = fields.next()?.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let user = fields.nth(5)?.parse().ok()?;
    let inode = fields.nth(1)?.parse().ok()?;
    Some(Entry { local: SocketAddr::new(address(ip)?, port), user, inode })
}

/// Each four octets stand as one number in the byte order of this machine.
fn address(hex: &str) -> Option<IpAddr> {
    let word = |at: usize| {
        let digits = hex.get(at..at + 8)?;
        u32::from_str_radix(digits, 16).ok().map(u32::to_ne_bytes)
    };
    match hex.len() {
        8 => Some(Ipv4Addr::from(word(0)?).into()),
        32 => {
            let words = [word(0)?, word(8)?, word(16)?, word(24)?];
            let octets: [u8; 16] = words.as_flattened().try_into().ok()?;
            Some(Ipv6Addr::from(octets).into())
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    #[test]
    #[cfg(target_endian = "little")]
    fn lines_of_proc_are_read() {
        // 127.0.0.2:4791 and [fe80::1:2]:4791 as an x86-64 kernel prints them.
        let v4 = "  316: 0200007F:12B7 00000000:0000 07 00000000:00000000 00:00000000 00000000  \
                  1000        0 48211 2 0000000000000000 0";
        assert_eq!(
            parse(v4),
            Some(Entry { local: at("127.0.0.2:4791"), user: 1000, inode: 48211 })
        );
        let v6 = " 1300: 000080FE000000000000000002000100:12B7 \
                  00000000000000000000000000000000:0000 07 00000000:00000000 00:00000000 00000000 \
                  0        0 7 2 0000000000000000 0";
        assert_eq!(parse(v6), Some(Entry { local: at("[fe80::1:2]:4791"), user: 0, inode: 7 }));
        for other in ["", "  sl  local_address rem_address   st", "1: 02007F:12B7 x", "1: é:1"] {
            assert_eq!(parse(other), None, "{other:?}");
        }
    }

    #[test]
    fn what_keeps_a_port_from_being_bound() {
        for (wanted, held, expected) in [
            ("127.0.0.1:4791", "127.0.0.1:4791", true),
            ("127.0.0.1:4791", "127.0.0.2:4791", false),
            ("127.0.0.1:4791", "127.0.0.1:4792", false),
            ("127.0.0.1:4791", "0.0.0.0:4791", true),
            ("127.0.0.1:4791", "[::]:4791", true),
            ("0.0.0.0:4791", "127.0.0.2:4791", true),
            ("[::1]:4791", "0.0.0.0:4791", false),
            ("[::1]:4791", "[::]:4791", true),
            ("[::]:4791", "127.0.0.1:4791", false),
        ] {
            assert_eq!(conflicts(at(wanted), at(held)), expected, "{wanted} and {held}");
        }
    }
}
