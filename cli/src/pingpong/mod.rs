//! `userdma pingpong`: the exchange of the pingpong programs of libibverbs, and their game of
//! messages to and fro, with one of them or with itself.
//!
//! ```text
//!  client                                    server
//!  its queue pairs, with receives posted
//!  TCP: the addresses of them           ──►  its queue pairs, with receives posted, brought up
//!  brings its own up                    ◄──  the addresses of them
//!  "done"                               ──►
//!  SEND                                 ──►  (each queue pair)
//!                                       ◄──  SEND of what came
//!  …                                         until both have sent and received --iters messages
//! ```
//!
//! The text is in [`exchange`], the counting in [`rally`].

mod exchange;
mod meet;
mod rally;
mod side;

use std::{
    net::{IpAddr, SocketAddr, SocketAddrV6},
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum, value_parser};
use serde_json::{Value, json};
use tokio::{
    net::{TcpListener, TcpStream},
    time::{sleep, timeout},
};
use userdma::{PathMtu, Wc, udp::ROCE_PORT};

use self::{
    exchange::{Address, PORT, SRQ_ADDRESSES},
    meet::{canonical, connect, hear, hear_done, listen, silent_server, tell, tell_done},
    rally::Rally,
    side::{Difference, Done, Plan, Side},
};
use crate::{
    Usage, chain,
    common::{Host, Target, split_port},
    output::{self, counted, line, note},
    roce::{Roce, check_capture, counters},
    session::MAX_SIZE,
    stop::Stop,
};

/// Play ping-pong with ibv_rc_pingpong, its kin of UC, UD and SRQ, or another userdma (RoCEv2).
#[derive(Args, Debug)]
#[command(mut_arg("mtu", |arg| arg.help("Path MTU: 256, 512, 1024, 2048 or 4096 [default: 1024, of ud what the route takes]")))]
#[command(mut_arg("udp_port", |arg| arg.help("Our own UDP port: the peer has to know it [default: 4791]")))]
#[command(after_help = "\
Examples:
  userdma pingpong                            a server, for `ibv_rc_pingpong -g 1 ADDR`
  userdma pingpong 10.0.0.1                   its client, or that of `ibv_rc_pingpong -g 1`
  userdma pingpong 10.0.0.1 --type ud -s 1024 of `ibv_ud_pingpong -g 1 -s 1024`
  userdma pingpong 10.0.0.1 --type srq -q 4   of `ibv_srq_pingpong -g 1 -q 4`
  userdma pingpong localhost --check          of another `userdma pingpong --check` here

Both sides need the same --type, --size, --mtu, --iters and --qps. The programs of libibverbs need a
GID index (-g) whose GID has the IP version that is used here. Defaults are theirs: TCP port 18515,
1000 messages of 4096 octets (ud: 1024), path MTU 1024, 500 receives posted, 16 queue pairs of srq.
Queue pairs are told over TCP; messages go over UDP, port 4791 unless told otherwise, between the
addresses in the GIDs. The programs' servers listen over IPv4 alone: to play over IPv6 with one, name
its IPv4 address, and give this side's IPv6 address with --bind. On one host each side needs an
address or a UDP port of its own: a client of 127.0.0.1 takes a free 127.0.0.x by itself, ::1 needs
--udp-port and --peer-udp-port.

uc and ud repeat nothing: one message lost, and both sides wait until --timeout.
Exit status: 0 if all came back (and was right, with --check), 1 if not, 2 for wrong arguments.")]
pub(crate) struct Pingpong {
    /// The server; without it this side is one
    #[arg(value_parser = host)]
    host: Option<Host>,
    /// The kind of queue pairs: which of the four programs the other side is
    #[arg(short = 't', long = "type", value_enum, default_value_t = Kind::Rc)]
    kind: Kind,
    /// Octets a message; 4096, of ud 1024
    #[arg(short, long, value_name = "OCTETS", value_parser = value_parser!(u32).range(1..=i64::from(MAX_SIZE)))]
    size: Option<u32>,
    /// Messages each way, of all queue pairs together
    #[arg(short = 'n', long, value_name = "N", default_value_t = 1000, value_parser = value_parser!(u64).range(1..))]
    iters: u64,
    /// TCP port of the server; 0 for a free one
    #[arg(short, long, default_value_t = PORT)]
    port: u16,
    /// Receives posted at a time
    #[arg(short, long, value_name = "N", default_value_t = 500, value_parser = value_parser!(u32).range(1..=65_536))]
    rx_depth: u32,
    /// srq: queue pairs
    #[arg(short, long, value_name = "N", value_parser = value_parser!(u32).range(1..SRQ_ADDRESSES as i64))]
    qps: Option<u32>,
    /// Sleep until something comes, instead of polling
    #[arg(short, long)]
    events: bool,
    /// Look at what comes: the client at all of it, the server at what -c of the programs sets
    #[arg(short, long, visible_alias = "chk")]
    check: bool,
    /// This side's own address, where the server listens too; else the one of the TCP connection
    #[arg(long, value_name = "ADDR", value_parser = host)]
    bind: Option<Host>,
    /// Seconds without any message after which the game is given up
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = patience)]
    timeout: Duration,
    /// Print JSON: an object a step
    #[arg(long)]
    json: bool,
    /// Say more: the device's counters at the end
    #[arg(short, long)]
    verbose: bool,
    #[command(flatten)]
    roce: Roce,
}

/// Which of the programs it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Kind {
    /// Reliable connection: ibv_rc_pingpong
    Rc,
    /// Unreliable connection: ibv_uc_pingpong
    Uc,
    /// Datagrams: ibv_ud_pingpong
    Ud,
    /// Reliable connections with a shared receive queue: ibv_srq_pingpong
    Srq,
}

impl Kind {
    const fn name(self) -> &'static str {
        match self {
            Self::Rc => "rc",
            Self::Uc => "uc",
            Self::Ud => "ud",
            Self::Srq => "srq",
        }
    }

    /// Addresses that each side tells.
    const fn addresses(self) -> usize {
        match self {
            Self::Srq => SRQ_ADDRESSES,
            Self::Rc | Self::Uc | Self::Ud => 1,
        }
    }
}

/// An address without a port.
fn host(text: &str) -> Result<Host, String> {
    match split_port(text)? {
        (host, None) => Ok(host),
        (_, Some(port)) => Err(format!("the port goes by itself: --port {port}")),
    }
}

/// Seconds with a fraction.
fn patience(text: &str) -> Result<Duration, String> {
    text.parse()
        .ok()
        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
        .filter(|d| (1..=86_400_000).contains(&d.as_millis()))
        .ok_or_else(|| format!("{text:?} is no number of seconds from 0.001 to 86400"))
}

impl Pingpong {
    /// What is played, or why it cannot be.
    fn plan(&self) -> Result<Plan> {
        let kind = self.kind;
        let usage = |text: String| Err(Usage(text).into());
        let qps = match (kind, self.qps) {
            (Kind::Srq, qps) => qps.unwrap_or(16),
            (_, None) => 1,
            (_, Some(_)) => return usage("--qps is for --type srq: the others have one".into()),
        };
        if qps > self.rx_depth {
            return usage(format!(
                "--rx-depth {} is not enough for {qps} queue pairs: one receive for each at least",
                self.rx_depth
            ));
        }
        let (size, mtu) = match kind {
            Kind::Ud => (self.size.unwrap_or(1024), self.roce.mtu),
            Kind::Rc | Kind::Uc | Kind::Srq => {
                (self.size.unwrap_or(4096), Some(self.roce.mtu.unwrap_or(PathMtu::Mtu1024)))
            }
        };
        let largest = self.roce.mtu.unwrap_or(PathMtu::Mtu4096).octets();
        if kind == Kind::Ud && size > largest {
            return usage(format!(
                "--size {size} is too large for --type ud: a datagram is one packet, of {largest} \
                 octets at most"
            ));
        }
        if self.port == 0 && self.host.is_some() {
            return usage("--port 0 is for a server: give the port that it says it has".into());
        }
        Ok(Plan {
            kind,
            size: size as usize,
            depth: self.rx_depth as usize,
            qps: qps as usize,
            mtu,
            check: self.check,
            client: self.host.is_some(),
        })
    }

    /// Where the peer takes RoCE: the IP address in its GID, with the interface of the TCP
    /// connection to `tcp` where it is link-local.
    fn peer(&self, address: &Address, tcp: SocketAddr) -> SocketAddr {
        let port = self.roce.peer_udp_port;
        match (address.gid.to_ip(), tcp) {
            (IpAddr::V6(ip), SocketAddr::V6(tcp)) if ip.is_unicast_link_local() => {
                SocketAddrV6::new(ip, port, 0, tcp.scope_id()).into()
            }
            (ip, _) => SocketAddr::new(ip, port),
        }
    }
}

/// Runs the command.
pub(crate) async fn run(args: Pingpong) -> Result<ExitCode> {
    let plan = args.plan()?;
    let stop = Stop::on_signals()?;
    let (mut side, remote) = tokio::select! {
        met = async {
            match &args.host {
                Some(host) => meet_server(&args, plan, host).await,
                None => meet_client(&args, plan).await,
            }
        } => met?,
        () = stop.raised() => bail!("interrupted before there was a peer"),
    };
    tell_addresses(&args, &side, &remote)?;
    let mut rally = Rally::new(args.iters, plan.qps, plan.depth, plan.client);
    let mut game = Game { side: &mut side, rally: &mut rally, mismatched: 0, first: None };
    let begun = Instant::now();
    let outcome = match game.open() {
        Ok(()) if args.events => game.by_events(&stop, args.timeout).await,
        Ok(()) => game.by_polling(&stop, args.timeout),
        Err(e) => Err(e),
    };
    let time = begun.elapsed();
    let (mismatched, first) = (game.mismatched, game.first);
    if args.verbose || args.roce.impair.is_some() {
        note(&counters(&side.stats()));
    }
    outcome.map_err(|e| {
        let so_far = format!("after {} came", counted(rally.received_so_far(), "message"));
        e.context(so_far)
    })?;
    summary(&args, plan, time, mismatched);
    if matches!(plan.kind, Kind::Rc | Kind::Srq) {
        linger(&side, &stop).await;
    }
    check_capture(Some(&side.stats()));
    let Some((message, qp, difference)) = first else { return Ok(ExitCode::SUCCESS) };
    let Difference { at, expected, found } = difference;
    let hint = if plan.client { "" } else { " (does the client check too? it has to)" };
    note(&format!(
        "{mismatched} of {} mismatched; the first: message {message}, of queue pair {qp}, offset \
         {at}: expected {expected:#04x}, found {found:#04x}{hint}",
        counted(rally.received_so_far(), "message")
    ));
    Ok(ExitCode::FAILURE)
}

/// The client's part of the exchange.
async fn meet_server(args: &Pingpong, plan: Plan, host: &Host) -> Result<(Side, Vec<Address>)> {
    let all = plan.kind.addresses();
    let target = Target { host: host.clone(), port: args.port };
    let mut tcp = connect(&target).await?;
    let (own, peer) = (canonical(tcp.local_addr()?), canonical(tcp.peer_addr()?));
    let mut side = open(args, plan, own, peer).await?;
    tell(&mut tcp, &side.addresses()?, all).await?;
    let remote = hear(&mut tcp, plan.qps, all)
        .await
        .map_err(|e| silent_server(e).context(format!("server {peer}")))?;
    side.join(&remote, args.peer(&remote[0], peer))?;
    tell_done(&mut tcp).await?;
    Ok((side, remote))
}

/// The server's part of the exchange, with the first client that is one.
async fn meet_client(args: &Pingpong, plan: Plan) -> Result<(Side, Vec<Address>)> {
    let bind = match &args.bind {
        Some(host) => {
            let target = Target { host: host.clone(), port: args.port };
            Some(target.resolve().await?[0])
        }
        None => None,
    };
    let listener = listen(bind, args.port)?;
    let addr = listener.local_addr()?;
    if args.json {
        output::json(&json!({
            "event": "listening",
            "type": plan.kind.name(),
            "addr": addr.ip().to_string(),
            "port": addr.port(),
        }));
    } else {
        line(&format!("listening at TCP {addr} for a client of type {}", plan.kind.name()));
    }
    let (mut tcp, peer, remote) = first_client(&listener, plan).await?;
    let met = async {
        let mut side = open(args, plan, canonical(tcp.local_addr()?), peer).await?;
        side.join(&remote, args.peer(&remote[0], peer))?;
        let all = plan.kind.addresses();
        tell(&mut tcp, &side.addresses()?, all).await?;
        hear_done(&mut tcp, all).await?;
        Ok((side, remote))
    };
    met.await.map_err(|e: anyhow::Error| e.context(format!("client {peer}")))
}

/// A client whose address could be read. Others are told of, and passed over.
async fn first_client(
    listener: &TcpListener,
    plan: Plan,
) -> Result<(TcpStream, SocketAddr, Vec<Address>)> {
    loop {
        let (mut tcp, peer) = listener.accept().await.context("cannot accept a connection")?;
        let peer = canonical(peer);
        match hear(&mut tcp, plan.qps, plan.kind.addresses()).await {
            Ok(remote) => return Ok((tcp, peer, remote)),
            Err(e) => note(&format!("client {peer}: {}", chain(&e))),
        }
    }
}

/// Opens this side at `--bind`, or where its TCP connection `own` ends. A client on loopback leaves
/// 127.0.0.1 to the server.
async fn open(args: &Pingpong, plan: Plan, own: SocketAddr, peer: SocketAddr) -> Result<Side> {
    let port = args.roce.udp_port.unwrap_or(ROCE_PORT);
    let at = match &args.bind {
        Some(host) => Target { host: host.clone(), port }.resolve().await?[0],
        None => own,
    };
    if at.ip().is_unspecified() {
        bail!("--bind {} is no address of this host: the peer has to know one", at.ip());
    }
    let device = if args.bind.is_none() && plan.client && own.is_ipv4() && own.ip().is_loopback() {
        args.roce.client(peer)?
    } else {
        let mut at = at;
        at.set_port(port);
        args.roce.options().open(&format!("udp://{at}"))?
    };
    Side::new(device, plan)
}

fn tell_addresses(args: &Pingpong, side: &Side, remote: &[Address]) -> Result<()> {
    let local = side.addresses()?;
    if !args.json {
        let port = side.udp_addr()?.port();
        if port != ROCE_PORT {
            line(&format!("  local UDP port: {port}, which the peer is told by --peer-udp-port"));
        }
        for address in &local {
            line(&format!("  local address:  {address}"));
        }
        for address in remote {
            line(&format!("  remote address: {address}"));
        }
        return Ok(());
    }
    let list = |addresses: &[Address]| -> Vec<Value> {
        let object =
            |a: &Address| json!({ "qpn": a.qpn.0, "psn": a.psn.get(), "gid": a.gid.to_string() });
        addresses.iter().map(object).collect()
    };
    output::json(&json!({
        "event": "connected",
        "udp_port": side.udp_addr()?.port(),
        "local": list(&local),
        "remote": list(remote),
    }));
    Ok(())
}

fn summary(args: &Pingpong, plan: Plan, time: Duration, mismatched: u64) {
    let octets = 2 * u128::from(args.iters) * plan.size as u128;
    let us = (time.as_secs_f64() * 1e6).max(1e-3);
    let (seconds, megabits) = (time.as_secs_f64(), octets as f64 * 8.0 / us);
    let per_iter = us / args.iters as f64;
    if args.json {
        output::json(&json!({
            "event": "summary",
            "type": plan.kind.name(),
            "size": plan.size,
            "iters": args.iters,
            "qps": plan.qps,
            "octets": u64::try_from(octets).unwrap_or(u64::MAX),
            "seconds": seconds,
            "mbit_per_second": megabits,
            "us_per_iter": per_iter,
            "checked": plan.check,
            "mismatched": mismatched,
        }));
        return;
    }
    line(&format!("{octets} bytes in {seconds:.2} seconds = {megabits:.2} Mbit/sec"));
    line(&format!("{} iters in {seconds:.2} seconds = {per_iter:.2} usec/iter", args.iters));
}

/// Goes on answering until the peer has been quiet for as long as it takes it to miss three
/// acknowledgements: one that was lost is asked for again.
async fn linger(side: &Side, stop: &Stop) {
    const QUIET: Duration = Duration::from_millis(200);
    const LONG: Duration = Duration::from_secs(3);
    let quiet = async {
        let mut before = side.stats().udp.receptions;
        loop {
            sleep(QUIET).await;
            let now = side.stats().udp.receptions;
            if now == before {
                return;
            }
            before = now;
        }
    };
    tokio::select! {
        _ = timeout(LONG, quiet) => {}
        () = stop.raised() => {}
    }
}

/// A game under way.
struct Game<'a> {
    side: &'a mut Side,
    rally: &'a mut Rally,
    mismatched: u64,
    /// The first message that was not what it should be, its queue pair, and where.
    first: Option<(u64, usize, Difference)>,
}

impl Game<'_> {
    /// The client's first messages.
    fn open(&mut self) -> Result<()> {
        let Plan { client, qps, .. } = self.side.plan();
        if client {
            for qp in 0..qps {
                self.side.compose(qp)?;
                self.side.send(qp)?;
            }
        }
        Ok(())
    }

    fn handle(&mut self, wc: &Wc) -> Result<()> {
        let (qp, send) = match self.side.understand(wc)? {
            Done::Sent(qp) => (qp, self.rally.sent(qp)),
            Done::Received(qp, slot) => {
                if let Some(difference) = self.side.take(qp, slot)? {
                    self.mismatched += 1;
                    let message = self.rally.received_so_far();
                    self.first.get_or_insert((message, qp, difference));
                }
                (qp, self.rally.received(qp))
            }
        };
        let refill = self.rally.refill();
        if refill > 0 {
            self.side.post_receives(refill)?;
        }
        if send {
            if self.side.plan().client {
                self.side.compose(qp)?;
            }
            self.side.send(qp)?;
        }
        Ok(())
    }

    /// Plays in this very thread.
    fn by_polling(&mut self, stop: &Stop, patience: Duration) -> Result<()> {
        let mut wcs = [Wc::default(); 64];
        let (mut turns, mut vain, mut since) = (0_u32, false, Instant::now());
        while !self.rally.is_over() {
            turns = turns.wrapping_add(1);
            if turns.is_multiple_of(1024) {
                if stop.is_raised() {
                    bail!("interrupted");
                }
                if vain && since.elapsed() >= patience {
                    return Err(self.nothing_comes(patience));
                }
            }
            let n = self.side.cq.poll(&mut wcs);
            if n == 0 {
                if !vain {
                    (vain, since) = (true, Instant::now());
                }
                continue;
            }
            vain = false;
            for wc in &wcs[..n] {
                if !self.rally.is_over() {
                    self.handle(wc)?;
                }
            }
        }
        Ok(())
    }

    /// Plays asleep between completions.
    async fn by_events(&mut self, stop: &Stop, patience: Duration) -> Result<()> {
        while !self.rally.is_over() {
            let wc = tokio::select! {
                wc = timeout(patience, self.side.cq.next()) => wc,
                () = stop.raised() => bail!("interrupted"),
            };
            match wc {
                Ok(wc) => self.handle(&wc?)?,
                Err(_) => return Err(self.nothing_comes(patience)),
            }
        }
        Ok(())
    }

    fn nothing_comes(&self, patience: Duration) -> anyhow::Error {
        let hint = match self.side.plan().kind {
            Kind::Uc | Kind::Ud => {
                "a message was lost, which this type does not repeat; or the peer has ended, has \
                 another UDP port (--peer-udp-port) or --type, or plays fewer --iters"
            }
            Kind::Rc | Kind::Srq => {
                "the peer has ended, has another UDP port (--peer-udp-port) or --type, or plays \
                 fewer --iters"
            }
        };
        anyhow::anyhow!("nothing came for {} s: {hint}", patience.as_secs_f64())
    }
}
