//! What all commands share: switches, addresses, a connection to a peer.

use std::{
    fmt,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    str::FromStr,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use serde_json::{Value, json};
use tokio::{net::lookup_host, time::timeout};
use userdma::{
    CloseReason, Cq, Device, Error, MpaOptions, Pd, Qp, QpInit, Wc, WcStatus,
    proto::iwarp::{Established, Stats},
    udp::ROCE_PORT,
};

use crate::{
    Usage,
    output::note,
    roce::{self, Roce},
};

/// The port that `serve` listens on and the clients go to, unless told otherwise.
pub(crate) const DEFAULT_PORT: u16 = 7174;

/// How long a side waits for the other one's next step before it calls the connection dead.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// `future`, or `None` if it takes longer than `limit`. Without a limit it takes what it takes.
pub(crate) async fn within<T>(
    limit: Option<Duration>,
    future: impl Future<Output = T>,
) -> Option<T> {
    match limit {
        Some(limit) => timeout(limit, future).await.ok(),
        None => Some(future.await),
    }
}

/// What carries the RDMA messages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Transport {
    /// MPA, DDP and RDMAP over TCP.
    Iwarp,
    /// InfiniBand transport over UDP (RoCEv2).
    Roce,
}

impl Transport {
    /// Its name on the command line and in JSON.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Iwarp => "iwarp",
            Self::Roce => "roce",
        }
    }

    /// Scheme of a device's address.
    const fn scheme(self) -> &'static str {
        match self {
            Self::Iwarp => "tcp",
            Self::Roce => "udp",
        }
    }
}

/// A switch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnOff {
    On,
    Off,
}

/// Switches of serve, ping, demo and perf.
#[derive(Args, Clone, Debug)]
pub(crate) struct Common {
    /// What carries the RDMA messages
    #[arg(long, value_enum, default_value_t = Transport::Iwarp)]
    pub(crate) transport: Transport,
    /// iWARP: ask for the CRC32C of MPA; it is left out only if both sides say off
    #[arg(long, value_enum, value_name = "on|off", hide_possible_values = true, default_value_t = OnOff::On)]
    pub(crate) crc: OnOff,
    /// iWARP: MPA revision to offer (2 tells the peer the READ depths, 1 is for old peers)
    #[arg(long, value_name = "1|2", default_value_t = 2, value_parser = clap::value_parser!(u8).range(1..=2))]
    pub(crate) mpa_rev: u8,
    /// iWARP: ask the peer to put MPA markers into its stream
    #[arg(long)]
    pub(crate) markers: bool,
    /// iWARP: peer-to-peer start-up (RFC 6581), in which the responder may send first
    #[arg(long)]
    pub(crate) p2p: bool,
    #[command(flatten)]
    pub(crate) roce: Roce,
    /// Say more: what the start-up settled, counters at the end; ping and serve: the data
    #[arg(short, long)]
    pub(crate) verbose: bool,
}

impl Common {
    /// Refuses what is not there, before anything starts.
    pub(crate) fn check(&self) -> Result<()> {
        let iwarps = [
            ("--crc off", self.crc == OnOff::Off),
            ("--mpa-rev 1", self.mpa_rev != 2),
            ("--markers", self.markers),
            ("--p2p", self.p2p),
        ];
        let foreign = match self.transport {
            Transport::Iwarp => self.roce.given().map(|switch| (switch, Transport::Roce)),
            Transport::Roce => iwarps
                .into_iter()
                .find(|(_, given)| *given)
                .map(|(switch, _)| (switch, Transport::Iwarp)),
        };
        if let Some((switch, owner)) = foreign {
            return Err(Usage(format!(
                "{switch} means nothing to {}: leave it out, or give --transport {}",
                self.transport.name(),
                owner.name()
            ))
            .into());
        }
        if self.p2p && self.mpa_rev == 1 {
            return Err(Usage("--p2p needs MPA revision 2: leave --mpa-rev 1 out".into()).into());
        }
        Ok(())
    }

    /// What MPA is to say.
    pub(crate) fn mpa(&self) -> MpaOptions {
        MpaOptions {
            revision: self.mpa_rev,
            crc: self.crc == OnOff::On,
            markers: self.markers,
            peer_to_peer: self.p2p,
            ..MpaOptions::default()
        }
    }

    /// The switches again, as arguments for a server process that is to say the same.
    pub(crate) fn to_args(&self) -> Vec<String> {
        let mut args = vec![
            format!("--transport={}", self.transport.name()),
            format!("--crc={}", if self.crc == OnOff::On { "on" } else { "off" }),
            format!("--mpa-rev={}", self.mpa_rev),
        ];
        if self.markers {
            args.push("--markers".into());
        }
        if self.p2p {
            args.push("--p2p".into());
        }
        if self.transport == Transport::Roce {
            args.extend(self.roce.to_args());
        }
        if self.verbose {
            args.push("--verbose".into());
        }
        args
    }

    /// Whether counters are printed at the end.
    pub(crate) const fn counts(&self) -> bool {
        self.verbose || self.roce.impair.is_some()
    }

    /// Refuses what is settled where the server is our own.
    pub(crate) fn check_ours(&self) -> Result<()> {
        if self.roce.peer_udp_port != ROCE_PORT {
            let why = "--peer-udp-port: the server is started here, and its UDP port is known";
            return Err(Usage(why.into()).into());
        }
        Ok(())
    }

    /// The same switches for a client whose server is our own, `serve`; at this UDP port, where it
    /// was started here.
    pub(crate) fn for_ours(&self, udp_port: Option<u16>) -> Self {
        let mut common = self.clone();
        common.roce.peer = roce::Peer::Userdma;
        if let Some(port) = udp_port {
            common.roce.peer_udp_port = port;
            common.roce.udp_port.get_or_insert(0);
        }
        common
    }

    /// A device that listens at `addr`: of RoCE the port is that of the rdma_cm.
    pub(crate) fn listener(&self, addr: SocketAddr) -> Result<Device> {
        let mut addr = addr;
        if self.transport == Transport::Roce {
            addr.set_port(self.roce.udp_port.unwrap_or(ROCE_PORT));
        }
        Ok(self.roce.options().open(&format!("{}://{addr}", self.transport.scheme()))?)
    }

    /// A device for a connection to `peer`.
    fn client(&self, peer: SocketAddr) -> Result<Device> {
        if self.transport == Transport::Roce {
            return self.roce.client(peer);
        }
        let unspecified = match peer {
            SocketAddr::V4(_) => IpAddr::V4(Ipv4Addr::UNSPECIFIED),
            SocketAddr::V6(_) => IpAddr::V6(Ipv6Addr::UNSPECIFIED),
        };
        let addr = SocketAddr::new(unspecified, 0);
        Ok(Device::open(&format!("{}://{addr}", self.transport.scheme()))?)
    }
}

/// Where a host is to be found, as the user wrote it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Host {
    /// A literal address.
    Addr(IpAddr),
    /// An IPv6 literal with a zone (`fe80::1%eth0`).
    Scoped(Ipv6Addr, String),
    /// A name to be looked up.
    Name(String),
}

/// `ADDR[:PORT]`: an IPv4 or IPv6 literal (with a port in brackets: `[::1]:7174`), a zone
/// (`fe80::1%eth0`), or a host name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Target {
    /// The host.
    pub(crate) host: Host,
    /// The port, [`DEFAULT_PORT`] unless given.
    pub(crate) port: u16,
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.host {
            Host::Addr(ip) => write!(f, "{}", SocketAddr::new(*ip, self.port)),
            Host::Scoped(ip, zone) => write!(f, "[{ip}%{zone}]:{}", self.port),
            Host::Name(name) => write!(f, "{name}:{}", self.port),
        }
    }
}

impl FromStr for Target {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (host, port) = split_port(text)?;
        let port = match port {
            None => DEFAULT_PORT,
            Some(port) => port
                .parse()
                .ok()
                // `parse` takes a sign; a port has none.
                .filter(|_| port.bytes().all(|b| b.is_ascii_digit()))
                .ok_or_else(|| format!("{port:?} is no port: a number from 0 to 65535"))?,
        };
        Ok(Self { host, port })
    }
}

/// The host of `HOST[:PORT]` and the text after its colon, if there is one.
pub(crate) fn split_port(text: &str) -> Result<(Host, Option<&str>), String> {
    if let Some(rest) = text.strip_prefix('[') {
        let (literal, rest) =
            rest.split_once(']').ok_or("the bracket '[' is not closed: write [::1]:7174")?;
        let host = ipv6(literal)?;
        return match rest.strip_prefix(':') {
            Some(port) => Ok((host, Some(port))),
            None if rest.is_empty() => Ok((host, None)),
            None => Err(format!("{rest:?} after the bracket: expected ':' and a port")),
        };
    }
    if text.bytes().filter(|&b| b == b':').count() > 1 {
        return Ok((ipv6(text)?, None));
    }
    match text.split_once(':') {
        Some((name, port)) => Ok((name_or_ipv4(name)?, Some(port))),
        None => Ok((name_or_ipv4(text)?, None)),
    }
}

/// An IPv6 literal with or without a zone.
fn ipv6(text: &str) -> Result<Host, String> {
    let (literal, zone) = match text.split_once('%') {
        Some((literal, zone)) => (literal, Some(zone)),
        None => (text, None),
    };
    let ip: Ipv6Addr = literal.parse().map_err(|_| {
        format!(
            "{literal:?} is no IPv6 address (an IPv6 address with a port is written [::1]:7174)"
        )
    })?;
    match zone {
        None => Ok(Host::Addr(ip.into())),
        Some("") => Err("the zone after '%' is empty: write fe80::1%eth0".into()),
        Some(zone) if zone.bytes().all(|b| b.is_ascii_graphic() && b != b'/') => {
            Ok(Host::Scoped(ip, zone.into()))
        }
        Some(zone) => Err(format!("{zone:?} is no interface name")),
    }
}

/// An IPv4 literal or a name.
fn name_or_ipv4(text: &str) -> Result<Host, String> {
    if let Ok(ip) = text.parse::<Ipv4Addr>() {
        return Ok(Host::Addr(ip.into()));
    }
    if text.is_empty() {
        return Err("the address is empty: write ADDR or ADDR:PORT".into());
    }
    if text.bytes().all(|b| b.is_ascii_digit() || b == b'.') {
        return Err(format!("{text:?} is no IPv4 address"));
    }
    if !text.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b'_')) {
        return Err(format!("{text:?} is neither an address nor a host name"));
    }
    Ok(Host::Name(text.into()))
}

/// A [`Target`] that a client may go to.
pub(crate) fn server(text: &str) -> Result<Target, String> {
    let target: Target = text.parse()?;
    if target.port == 0 {
        return Err("port 0 is for listening: give the port that the server says it has".into());
    }
    Ok(target)
}

impl Target {
    /// The socket addresses behind it, in the resolver's order, at least one.
    pub(crate) async fn resolve(&self) -> Result<Vec<SocketAddr>> {
        let name = match &self.host {
            // `::ffff:10.0.0.1` is IPv4 on the wire.
            Host::Addr(ip) => return Ok(vec![SocketAddr::new(ip.to_canonical(), self.port)]),
            // getaddrinfo knows zones, by name and by number.
            Host::Scoped(ip, zone) => format!("{ip}%{zone}"),
            Host::Name(name) => name.clone(),
        };
        let found: Vec<_> = lookup_host((name.as_str(), self.port))
            .await
            .with_context(|| format!("cannot find the host {name:?}"))?
            .collect();
        if found.is_empty() {
            bail!("the host {name:?} has no address");
        }
        Ok(found)
    }
}

/// Everything about one connection.
#[derive(Clone)]
pub(crate) struct Link {
    /// What it is a connection of.
    pub(crate) dev: Device,
    /// The protection domain of its queue pair.
    pub(crate) pd: Pd,
    /// Completions of sends.
    pub(crate) send_cq: Cq,
    /// Completions of receives; the same queue as `send_cq` where one was asked for.
    pub(crate) recv_cq: Cq,
    /// The queue pair.
    pub(crate) qp: Qp,
}

/// Sizes of a connection's queues.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Shape {
    /// Send work requests outstanding at a time.
    pub(crate) sends: usize,
    /// Receives outstanding at a time.
    pub(crate) recvs: usize,
    /// READs and atomics outstanding at a time, both ways.
    pub(crate) depth: u16,
    /// Whether sends and receives complete in one queue.
    pub(crate) one_cq: bool,
}

impl Shape {
    /// Queues of this shape on `dev`, and the settings of a queue pair that uses them.
    pub(crate) fn queues(self, dev: &Device, common: &Common) -> Result<QpInit> {
        let depth = if self.one_cq { self.sends + self.recvs } else { self.sends };
        let send_cq = dev.create_cq(depth + 16).context("cannot make a completion queue")?;
        let recv_cq = if self.one_cq {
            send_cq.clone()
        } else {
            dev.create_cq(self.recvs + 16).context("cannot make a completion queue")?
        };
        let mut init = QpInit::new(&send_cq);
        init.recv_cq = recv_cq;
        init.max_send_wr = self.sends;
        init.max_recv_wr = self.recvs;
        init.ird = self.depth;
        init.ord = self.depth;
        init.mpa = common.mpa();
        Ok(init)
    }
}

/// Connects to `target` with `private_data`. A host with several addresses is tried at each of
/// them until one answers; an answer that is a refusal is final.
pub(crate) async fn connect(
    common: &Common,
    target: &Target,
    shape: Shape,
    private_data: &[u8],
) -> Result<Link> {
    let mut last = None;
    for peer in target.resolve().await? {
        let dev = common.client(peer)?;
        let pd = dev.alloc_pd()?;
        let init = shape.queues(&dev, common)?;
        let (send_cq, recv_cq) = (init.send_cq.clone(), init.recv_cq.clone());
        match dev.connect(&peer.to_string(), &pd, init, private_data).await {
            Ok(qp) => {
                return Ok(Link { dev, pd, send_cq, recv_cq, qp });
            }
            Err(e @ (Error::Startup { .. } | Error::Rejected { .. })) => return Err(e.into()),
            Err(e) => last = Some(e),
        }
    }
    // `resolve` gave at least one address, so a round without success left its error.
    match last {
        Some(e) => Err(e.into()),
        None => bail!("{target} has no address"),
    }
}

/// An error unless `wc` is a success.
pub(crate) fn check_wc(wc: &Wc, what: &str) -> Result<()> {
    if wc.status.is_ok() {
        return Ok(());
    }
    if wc.vendor_err != 0 {
        // iWARP: the first two octets of the Terminate, layer and type, code (RFC 5040 §4.8).
        // RoCE: the syndrome of the NAK (IBTA vol. 1, table 45).
        bail!("{what} ended with: {} (the peer's code {:#06x})", wc.status, wc.vendor_err);
    }
    bail!("{what} ended with: {}", wc.status);
}

/// As [`check_wc`], of a SEND after which the peer may close. Where it was flushed by a peer that
/// closed in order all is well: the peer got it and its acknowledgement was lost, or it did not care.
pub(crate) async fn check_last(wc: &Wc, what: &str, qp: &Qp) -> Result<()> {
    if wc.status == WcStatus::WR_FLUSH_ERR
        && let Ok(CloseReason::Graceful) = timeout(Duration::from_millis(500), qp.closed()).await
    {
        return Ok(());
    }
    check_wc(wc, what)
}

/// `error` and, where the connection has ended, why.
pub(crate) async fn with_reason(error: anyhow::Error, qp: &Qp) -> anyhow::Error {
    match timeout(Duration::from_millis(500), qp.closed()).await {
        Ok(reason) => error.context(format!("the connection ended: {}", reason_text(&reason))),
        Err(_) => error,
    }
}

/// Why a connection ended, in a sentence's end.
pub(crate) fn reason_text(reason: &CloseReason) -> String {
    match reason {
        CloseReason::Graceful => "closed in order".into(),
        CloseReason::TerminateReceived(t) => format!("the peer sent a Terminate: {t}"),
        CloseReason::TerminateSent(t) => format!("the peer broke a rule, it was told: {t}"),
        CloseReason::Lost => "the peer has gone".into(),
        CloseReason::WorkFailed => "work of this side failed".into(),
        CloseReason::NakSent(syndrome) => {
            format!("the peer broke a rule, it was told by a NAK: {syndrome:?}")
        }
        CloseReason::Aborted => "aborted by this side".into(),
        CloseReason::SourceRevoked => "memory was deregistered while it was being sent".into(),
        other => format!("{other:?}"),
    }
}

/// Closes gracefully, or abortively if the peer does not close its side soon.
pub(crate) async fn close(qp: &Qp) {
    if timeout(Duration::from_secs(5), qp.disconnect()).await.is_err() {
        qp.abort();
    }
}

/// What a connection moved so far.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Moved {
    /// FPDUs or packets, both ways.
    pub(crate) packets: u64,
    /// Octets of payload that were placed here.
    pub(crate) octets_received: u64,
    /// Octets of payload that left.
    pub(crate) octets_sent: u64,
}

impl Link {
    /// What it moved so far.
    pub(crate) fn moved(&self) -> Moved {
        match self.qp.roce_stats() {
            Some(s) => Moved {
                packets: s.packets_sent.wrapping_add(s.packets_received),
                octets_received: s.payload_received,
                octets_sent: s.payload_sent,
            },
            None => {
                let s = self.qp.stats();
                Moved {
                    packets: s.fpdus_sent.wrapping_add(s.fpdus_received),
                    octets_received: s.payload_received,
                    octets_sent: s.payload_sent,
                }
            }
        }
    }

    /// What the start-up settled, for `-v`; `None` before.
    pub(crate) fn settled(&self) -> Option<String> {
        match self.qp.terms() {
            Some(terms) => Some(roce::settled(&terms)),
            None => self.qp.established().as_ref().map(settled),
        }
    }

    /// What is told on stderr when it is over: the counters, if wanted, and how a capture is read in
    /// which a side has another UDP port than RoCE's own.
    pub(crate) fn tell(&self, common: &Common, counters: bool) {
        if counters {
            note(&self.counters());
        }
        roce::check_capture(self.dev.roce_stats().as_ref());
        if let Some(path) = &common.roce.pcap {
            let theirs = self.qp.terms().and_then(|terms| terms.token).map(|token| token.udp_port);
            let ports = [self.dev.udp_addr().map(|own| own.port()), theirs];
            if let Some(hint) = roce::reading(path, ports) {
                note(&hint);
            }
        }
    }

    /// The counters, as a line of `-v`: of RoCE those of the device.
    fn counters(&self) -> String {
        match self.dev.roce_stats() {
            Some(stats) => roce::counters(&stats),
            None => counters(&self.qp.stats()),
        }
    }
}

/// What the start-up of iWARP settled.
fn settled(e: &Established) -> String {
    format!(
        "MPA revision {}, CRC {}, markers out {} in {}, IRD {} ORD {}, peer-to-peer {}",
        e.revision,
        on_off(e.crc),
        on_off(e.markers_out),
        on_off(e.markers_in),
        e.ird,
        e.ord,
        e.rtr.map_or_else(|| "off".to_owned(), |kind| format!("{kind:?}")),
    )
}

const fn on_off(on: bool) -> &'static str {
    if on { "on" } else { "off" }
}

/// Counters as a line of `-v`.
pub(crate) fn counters(s: &Stats) -> String {
    format!(
        "FPDUs sent {} received {}, payload octets sent {} received {}, CRC errors {}, protocol errors {}, refused accesses {}",
        s.fpdus_sent,
        s.fpdus_received,
        s.payload_sent,
        s.payload_received,
        s.crc_errors,
        s.protocol_errors,
        s.access_errors,
    )
}

/// Counters as a JSON object.
pub(crate) fn counters_json(s: &Stats) -> Value {
    json!({
        "fpdus_sent": s.fpdus_sent,
        "fpdus_received": s.fpdus_received,
        "payload_sent": s.payload_sent,
        "payload_received": s.payload_received,
        "crc_errors": s.crc_errors,
        "protocol_errors": s.protocol_errors,
        "access_errors": s.access_errors,
    })
}

/// Adds the counters `b` to `a`.
pub(crate) fn add_counters(a: &mut Stats, b: &Stats) {
    a.fpdus_sent += b.fpdus_sent;
    a.fpdus_received += b.fpdus_received;
    a.payload_sent += b.payload_sent;
    a.payload_received += b.payload_received;
    a.crc_errors += b.crc_errors;
    a.protocol_errors += b.protocol_errors;
    a.access_errors += b.access_errors;
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Target {
        text.parse().unwrap_or_else(|e| panic!("{text}: {e}"))
    }

    #[test]
    fn literals_with_and_without_port() {
        assert_eq!(parse("10.0.0.1").to_string(), "10.0.0.1:7174");
        assert_eq!(parse("10.0.0.1:0").to_string(), "10.0.0.1:0");
        assert_eq!(parse("::1").to_string(), "[::1]:7174");
        assert_eq!(parse("[::1]").to_string(), "[::1]:7174");
        assert_eq!(parse("[::1]:65535").to_string(), "[::1]:65535");
        assert_eq!(parse("2001:db8::7").host, Host::Addr("2001:db8::7".parse().unwrap()));
        assert_eq!(parse("::ffff:10.0.0.1").host, Host::Addr("::ffff:10.0.0.1".parse().unwrap()));
    }

    #[test]
    fn zones() {
        let link_local = Host::Scoped("fe80::1".parse().unwrap(), "eth0".into());
        assert_eq!(parse("fe80::1%eth0"), Target { host: link_local.clone(), port: 7174 });
        assert_eq!(parse("[fe80::1%eth0]:1"), Target { host: link_local, port: 1 });
        assert_eq!(parse("fe80::1%eth0").to_string(), "[fe80::1%eth0]:7174");
        assert_eq!(parse("[fe80::1%3]:9").to_string(), "[fe80::1%3]:9");
    }

    #[test]
    fn names() {
        assert_eq!(parse("host-1.example.org:80").to_string(), "host-1.example.org:80");
        assert_eq!(parse("localhost").host, Host::Name("localhost".into()));
        assert_eq!(parse("1and1.example").host, Host::Name("1and1.example".into()));
    }

    #[test]
    fn nonsense_is_refused_and_says_why() {
        for (text, why) in [
            ("", "empty"),
            (":7174", "empty"),
            ("10.0.0.256", "no IPv4 address"),
            ("10.0.0:1", "no IPv4 address"),
            ("host:", "no port"),
            ("host:65536", "no port"),
            ("host:+1", "no port"),
            ("host:-1", "no port"),
            ("[::1", "not closed"),
            ("[::1]7174", "expected ':'"),
            ("[10.0.0.1]:1", "no IPv6 address"),
            ("::1:x", "no IPv6 address"),
            ("fe80::1%", "zone"),
            ("fe80::1%a b", "no interface name"),
            ("a b", "neither"),
            ("tcp://host", "neither an address"),
        ] {
            let error = text.parse::<Target>().expect_err(text);
            assert!(error.contains(why) || text.contains("//"), "{text}: {error}");
        }
    }

    #[test]
    fn nothing_is_at_port_0() {
        assert_eq!(server("host:1"), Ok(parse("host:1")));
        assert!(server("[::1]:0").unwrap_err().contains("for listening"));
        assert!(server("[::1").unwrap_err().contains("not closed"));
    }

    #[tokio::test]
    async fn zones_resolve_by_number_and_localhost_resolves() {
        let addrs = parse("fe80::1%1").resolve().await.unwrap();
        assert!(matches!(addrs[0], SocketAddr::V6(a) if a.scope_id() == 1 && a.port() == 7174));
        assert!(addrs[0].to_string().parse::<SocketAddr>().is_ok());
        let addrs = parse("localhost:5").resolve().await.unwrap();
        assert!(addrs.iter().all(|a| a.ip().is_loopback() && a.port() == 5));
    }
}
