//! What commands say and show of RoCEv2: its switches, its counters, and which address a client has.

use std::{
    net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket},
    path::{Path, PathBuf},
};

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use serde_json::{Value, json};
use userdma::{
    Device, DeviceOptions, Error, IcrcPolicy, Impairments, PathMtu, RoceOptions, RoceStats,
    proto::roce::cm::Established, udp::ROCE_PORT,
};

use crate::{
    output::{self, octets},
    sim::mtu,
};

/// Switches of RoCEv2.
#[derive(Args, Clone, Debug)]
pub(crate) struct Roce {
    /// RoCE: our own UDP port, 0 for a free one [default: 4791; demo and perf --local: 0]
    #[arg(long, value_name = "PORT")]
    pub(crate) udp_port: Option<u16>,
    /// RoCE: the UDP port at which the peer listens
    #[arg(long, value_name = "PORT", default_value_t = ROCE_PORT, value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) peer_udp_port: u16,
    /// RoCE: path MTU, 256, 512, 1024, 2048 or 4096 [default: what the route takes]
    #[arg(long, value_name = "OCTETS", value_parser = mtu)]
    pub(crate) mtu: Option<PathMtu>,
    /// RoCE: who the peer is; userdma tells what its receive buffer takes, so that large packets do no
    /// harm where ours is small (demo and perf know it)
    #[arg(long, value_enum, value_name = "any|userdma", hide_possible_values = true, default_value_t = Peer::Any)]
    pub(crate) peer: Peer,
    /// RoCE: what becomes of packets whose ICRC is not found good: dropped, or taken all the same
    #[arg(long, value_enum, value_name = "strict|lenient", hide_possible_values = true, default_value_t = Icrc::Strict)]
    pub(crate) icrc: Icrc,
    /// RoCE: what is done to packets received, in each process, for instance
    /// loss=1%,dup=1%,reorder=1%,corrupt=0.1%,delay=1ms,ecn=1%,seed=7; the rest of it: userdma sim --help
    #[arg(long, value_name = "LIST")]
    pub(crate) impair: Option<Impairments>,
    /// RoCE: write our own packets to FILE as pcapng, without privileges; demo and perf --local write
    /// the server's beside it (x.pcapng, x.server.pcapng)
    #[arg(long, value_name = "FILE")]
    pub(crate) pcap: Option<PathBuf>,
}

/// Who the peer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Peer {
    Any,
    Userdma,
}

/// What becomes of packets whose ICRC is not found good.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Icrc {
    Strict,
    Lenient,
}

impl Roce {
    /// The first switch that means nothing without RoCE, if one was given.
    pub(crate) fn given(&self) -> Option<&'static str> {
        let given = [
            ("--udp-port", self.udp_port.is_some()),
            ("--peer-udp-port", self.peer_udp_port != ROCE_PORT),
            ("--mtu", self.mtu.is_some()),
            ("--peer", self.peer != Peer::Any),
            ("--icrc", self.icrc != Icrc::Strict),
            ("--impair", self.impair.is_some()),
            ("--pcap", self.pcap.is_some()),
        ];
        given.into_iter().find(|(_, given)| *given).map(|(name, _)| name)
    }

    /// The options of a device.
    pub(crate) fn options(&self) -> DeviceOptions {
        let roce = RoceOptions {
            peer_udp_port: self.peer_udp_port,
            icrc: match self.icrc {
                Icrc::Strict => IcrcPolicy::Strict,
                Icrc::Lenient => IcrcPolicy::Lenient,
            },
            mtu: self.mtu,
            userdma_peers: self.peer == Peer::Userdma,
            impair: self.impair,
            capture: self.pcap.clone(),
            ..RoceOptions::default()
        };
        DeviceOptions { roce, ..DeviceOptions::default() }
    }

    /// The switches again, for a server process of our own: at a free UDP port, with a capture of
    /// its own.
    pub(crate) fn to_args(&self) -> Vec<String> {
        let mut args = vec!["--udp-port=0".to_owned()];
        if let Some(mtu) = self.mtu {
            args.push(format!("--mtu={}", mtu.octets()));
        }
        if self.icrc == Icrc::Lenient {
            args.push("--icrc=lenient".into());
        }
        if let Some(impair) = self.impair {
            args.push(format!("--impair={impair}"));
        }
        if let Some(path) = &self.pcap {
            args.push(format!("--pcap={}", of_server(path).display()));
        }
        args
    }

    /// A device for a client whose server is at `peer`. Without an address of its own it takes that
    /// from which the route leaves; toward 127.0.0.0/8 the lowest 127.0.0.x from 2 on whose port is
    /// free; toward ::1, where the port is taken, another one.
    pub(crate) fn client(&self, peer: SocketAddr) -> Result<Device> {
        let port = self.udp_port.unwrap_or(ROCE_PORT);
        let open = |addr: SocketAddr| self.options().open(&format!("udp://{addr}"));
        let is_taken = |e: &Error| matches!(e, Error::Io { source, .. } if source.kind() == std::io::ErrorKind::AddrInUse);
        if let IpAddr::V4(ip) = peer.ip()
            && ip.is_loopback()
            && port != 0
        {
            for last in 2..=254 {
                match open(SocketAddr::new(Ipv4Addr::new(127, 0, 0, last).into(), port)) {
                    Err(e) if is_taken(&e) => {}
                    opened => return Ok(opened?),
                }
            }
        }
        let mut own = source_toward(peer)?;
        own.set_port(port);
        match open(own) {
            Err(e) if is_taken(&e) && self.udp_port.is_none() && own.ip().is_loopback() => {
                own.set_port(0);
                Ok(open(own)?)
            }
            Err(e) if is_taken(&e) => Err(e).context(
                "our own UDP port is taken: --udp-port 0 takes a free one, which userdma peers are \
                 told of",
            ),
            opened => Ok(opened?),
        }
    }
}

/// The capture of the server process beside that of the client: `x.pcapng` and `x.server.pcapng`.
fn of_server(path: &Path) -> PathBuf {
    match path.extension() {
        Some(extension) => {
            let mut name = std::ffi::OsString::from("server.");
            name.push(extension);
            path.with_extension(name)
        }
        None => path.with_extension("server"),
    }
}

/// Says it where the capture is not whole.
pub(crate) fn check_capture(stats: Option<&RoceStats>) {
    if let Some(why) = stats.and_then(|stats| stats.capture_failure.as_ref()) {
        output::spoil(&format!("the capture is not whole: {why}"));
    }
}

/// How to read the capture at `path` of packets between these UDP ports; `None` where `dissect` looks
/// for RoCEv2 there by itself.
pub(crate) fn reading(path: &Path, ports: [Option<u16>; 2]) -> Option<String> {
    let others: Vec<_> = ports
        .into_iter()
        .flatten()
        .filter(|&port| port != ROCE_PORT)
        .map(|port| format!("--roce-port {port} "))
        .collect();
    (!others.is_empty())
        .then(|| format!("to read: userdma dissect {}{}", others.concat(), path.display()))
}

/// The address from which packets to `peer` leave; its port means nothing.
fn source_toward(peer: SocketAddr) -> Result<SocketAddr> {
    let any: SocketAddr = if peer.is_ipv4() {
        (Ipv4Addr::UNSPECIFIED, 0).into()
    } else {
        (std::net::Ipv6Addr::UNSPECIFIED, 0).into()
    };
    let probe = UdpSocket::bind(any).and_then(|probe| {
        // Sends nothing.
        probe.connect(peer)?;
        probe.local_addr()
    });
    probe.with_context(|| {
        format!("no way leads to {} (`ip route get {}` shows what was tried)", peer.ip(), peer.ip())
    })
}

/// What the connection manager settled, for `-v`.
pub(crate) fn settled(e: &Established) -> String {
    format!(
        "path MTU {}, READs and atomics out {} in {}, ACK timeout code {}, retries {}, RNR retries \
         {}, {}, peer {}",
        e.mtu,
        e.max_rd_atomic,
        e.max_dest_rd_atomic,
        e.ack_timeout,
        e.retry_count,
        e.rnr_retry_count,
        if e.out_of_order { "packets out of order kept" } else { "go-back-N" },
        match e.token {
            Some(token) => format!(
                "userdma at UDP port {}, window {}",
                token.udp_port,
                octets(token.window.into())
            ),
            None => "no userdma".into(),
        },
    )
}

/// Counters as a line of `-v`.
pub(crate) fn counters(s: &RoceStats) -> String {
    let (q, p) = (&s.qps, &s.port);
    let mut text = format!(
        "packets sent {} resent {} received {}, payload octets sent {} received {}, ICRC good {} \
         bad {}, time-outs {}, NAKs for a gap {}, RNR NAKs {}, duplicates {}, out of order {}, CNPs \
         sent {} received {}, refused accesses {}, dropped for another reason {}, receive buffer \
         overruns {}",
        p.packets_sent,
        q.packets_resent,
        p.received,
        q.payload_sent,
        q.payload_received,
        p.icrc_good,
        bad_icrc(s),
        q.timeouts,
        q.sequence_naks_received,
        q.rnr_naks_received,
        q.duplicates,
        q.out_of_order,
        p.cnps_sent,
        p.cnps_received,
        q.access_errors,
        dropped(s),
        s.udp.overflows,
    );
    if let Some(impaired) = &s.impaired {
        text.push_str(&format!("; impaired: {impaired}"));
    }
    if let Some(trouble) = &s.trouble {
        text.push_str(&format!("; the socket said: {trouble}"));
    }
    text
}

fn bad_icrc(s: &RoceStats) -> u64 {
    s.port.icrc_bad + s.port.icrc_other_df + s.port.icrc_unknown
}

/// Packets with a good ICRC that no queue pair saw.
fn dropped(s: &RoceStats) -> u64 {
    let p = &s.port;
    p.malformed
        + p.bad_version
        + p.bad_pkey
        + p.unknown_qp
        + p.wrong_type
        + p.not_ready
        + p.wrong_peer
        + p.bad_mad
}

/// Counters as a JSON object.
pub(crate) fn counters_json(s: &RoceStats) -> Value {
    let (q, p) = (&s.qps, &s.port);
    json!({
        "packets_sent": p.packets_sent,
        "packets_resent": q.packets_resent,
        "packets_received": p.received,
        "payload_sent": q.payload_sent,
        "payload_received": q.payload_received,
        "icrc_good": p.icrc_good,
        "icrc_bad": p.icrc_bad,
        "icrc_other_df": p.icrc_other_df,
        "icrc_unknown": p.icrc_unknown,
        "icrc_lenient": p.icrc_lenient,
        "timeouts": q.timeouts,
        "sequence_naks": q.sequence_naks_received,
        "rnr_naks": q.rnr_naks_received,
        "duplicates": q.duplicates,
        "out_of_order": q.out_of_order,
        "cnps_sent": p.cnps_sent,
        "cnps_received": p.cnps_received,
        "access_errors": q.access_errors,
        "dropped": dropped(s),
        "overruns": s.udp.overflows,
        "trouble": s.trouble,
        "impaired": s.impaired.map(|i| json!({
            "packets": i.handled,
            "dropped": i.dropped(),
            "duplicated": i.duplicated,
            "reordered": i.reordered,
            "corrupted": i.corrupted,
            "marked": i.marked,
        })),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_servers_capture_lies_beside_the_clients() {
        let name = |path: &str| of_server(Path::new(path)).display().to_string();
        assert_eq!(name("a/x.pcapng"), "a/x.server.pcapng");
        assert_eq!(name("x"), "x.server");
    }

    #[test]
    fn a_capture_of_other_ports_says_how_it_is_read() {
        let path = Path::new("x.pcapng");
        assert_eq!(reading(path, [Some(ROCE_PORT), Some(ROCE_PORT)]), None);
        assert_eq!(
            reading(path, [Some(7), Some(ROCE_PORT)]).as_deref(),
            Some("to read: userdma dissect --roce-port 7 x.pcapng")
        );
        assert_eq!(
            reading(path, [Some(7), Some(8)]).as_deref(),
            Some("to read: userdma dissect --roce-port 7 --roce-port 8 x.pcapng")
        );
    }

    #[test]
    fn path_mtus() {
        assert_eq!(mtu("1024"), Ok(PathMtu::Mtu1024));
        for text in ["", "0", "1500", "x", "-256"] {
            assert!(mtu(text).is_err(), "{text}");
        }
    }
}
