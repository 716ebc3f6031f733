//! The bare UDP socket: trains of datagrams by one call (GSO, GRO), single ones, round trips.
//!
//! The TCP connection says when a measurement begins and ends. The server answers the head with
//! its own UDP port (u32, big endian); the sending side ends by closing its half; a server that
//! received then tells its result. Everything else is datagrams, and any of them may be lost:
//!
//! * What is sent in a stream begins with its place in it, the octets up to its own end (u64,
//!   little endian). The receiver sends back the highest such number each quarter of a window,
//!   and the sender never has more than a window outstanding. What was not acknowledged after
//!   20 ms counts as lost.
//! * Each datagram of a round trip begins with the round's number, as many of its 8 octets as
//!   there is room for. A round without an answer after 100 ms is given up and not counted.
//!
//! Both sides spin, as userdma's do in `perf`.

use std::{
    io::{self, ErrorKind, Read, Write},
    iter,
    net::{IpAddr, Shutdown, SocketAddr, TcpStream, UdpSocket as StdSocket},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use socket2::SockRef;
use userdma::{
    Qpn,
    mr::Table,
    proto::mem::Scope,
    udp::{MAX_TRAIN, Piece, Route, Scratch, SendError, UdpOptions, UdpSocket},
};

use super::{Bare, PATIENCE, Shape, again, read_result, write_result};
use crate::session::{Measure, PerfOp};

/// Octets of a packet beside its payload: BTH and ICRC (IBTA §9.2, Annex A17).
const FRAME: u32 = 12 + 4;
/// Octets of the extended headers that come with a WRITE or a READ, an atomic, an answer to one
/// of these, and an atomic's old value.
const RETH: u32 = 16;
const ATOMIC_ETH: u32 = 28;
const AETH: u32 = 4;
const ATOMIC_ACK_ETH: u32 = 8;

/// Most octets that are outstanding in trains.
const WINDOW: usize = 1 << 20;
/// Octets that a single datagram takes in a receive buffer beside its own, rather more than less.
const OVERHEAD: usize = 1024;
/// Octets asked for the buffers of a socket.
const BUFFER: usize = 4 << 20;
/// When something counts as lost on its way through the host.
const LOST: Duration = Duration::from_millis(20);
/// When a round is given up.
const NO_ANSWER: Duration = Duration::from_millis(100);
/// Octets of a place in a stream, of a round's number.
const TAG: usize = 8;
/// Turns without anything to do, after which the connection is looked at.
const TURNS: u32 = 1024;
/// The same, after which another process may have the core.
const SOME_TURNS: u32 = 16;

/// Shape, octets there and back, octets of a datagram.
pub(super) fn shape(op: PerfOp, measure: Measure, size: u32, mtu: u32) -> (Shape, u32, u32, u32) {
    let mtu = mtu.clamp(1, MAX_TRAIN as u32 - FRAME - RETH);
    match measure {
        Measure::Bandwidth => {
            let segment = packet(0, size.min(mtu));
            let train = MAX_TRAIN as u32 / segment * segment;
            match op {
                PerfOp::Read => (Shape::StreamBack, 0, train, segment),
                _ => (Shape::Stream, train, 0, segment),
            }
        }
        // The wire size of the packet that carries the payload, or of its packets, whose other
        // headers do not matter then.
        Measure::Rate if size <= mtu || op == PerfOp::Atomic => {
            let packet = match op {
                PerfOp::Send => packet(0, size),
                PerfOp::Write => packet(RETH, size),
                PerfOp::Read => packet(AETH, size),
                PerfOp::Atomic => packet(AETH + ATOMIC_ACK_ETH, 0),
            };
            (Shape::Messages, packet, 0, packet)
        }
        Measure::Rate => {
            let message = size + size.div_ceil(mtu) * FRAME;
            (Shape::Messages, message, 0, mtu + FRAME)
        }
        // What the program says and gets, without any headers.
        Measure::Latency => {
            let (there, back) = match op {
                PerfOp::Send | PerfOp::Write => (size.max(1), size.max(1)),
                PerfOp::Read => (RETH, size.max(1)),
                PerfOp::Atomic => (ATOMIC_ETH, ATOMIC_ACK_ETH),
            };
            (Shape::PingPong, there, back, mtu)
        }
    }
}

/// Octets of a packet's UDP payload: BTH, extended header, payload, padding to 4, ICRC.
const fn packet(extended: u32, payload: u32) -> u32 {
    FRAME + extended + payload.next_multiple_of(4)
}

/// Refuses what no datagram can have.
pub(super) fn check(segment: u32, port: u16) -> Result<()> {
    if segment == 0 || segment as usize > MAX_TRAIN {
        bail!("datagrams of {segment} octets: from 1 to {MAX_TRAIN}");
    }
    if port == 0 {
        bail!("UDP port 0 is nobody's");
    }
    Ok(())
}

/// The client's part; `tcp` has just been connected.
pub(super) fn client(bare: Bare, mut tcp: TcpStream) -> Result<f64> {
    let mut socket = Socket::bind(tcp.local_addr()?.ip(), bare)?;
    let message = bare.there.max(bare.back) as usize;
    if bare.shape == Shape::PingPong && message > socket.recv_buffer / 2 {
        bail!(
            "a message of {message} octets does not fit a UDP receive buffer of {} octets: take \
             smaller ones, or raise net.core.rmem_max",
            socket.recv_buffer / 2
        );
    }
    tcp.set_read_timeout(Some(PATIENCE))?;
    tcp.write_all(&bare.head(socket.port()?))?;
    let mut port = [0; 4];
    tcp.read_exact(&mut port).context("the bare server did not tell its UDP port")?;
    let port = u16::try_from(u32::from_be_bytes(port)).context("no UDP port")?;
    socket.connect(SocketAddr::new(tcp.peer_addr()?.ip(), port));
    let mut control = Control::new(&tcp, bare)?;
    match bare.shape {
        Shape::Stream | Shape::Messages => {
            if !source(&mut socket, bare, bare.there, &mut control)? {
                bail!("the bare server closed");
            }
            tcp.shutdown(Shutdown::Write)?;
            tcp.set_nonblocking(false)?;
            arrived(bare, read_result(&mut tcp)?)
        }
        Shape::StreamBack => arrived(bare, sink(&mut socket, &mut control)?),
        Shape::PingPong => ping(&mut socket, bare, &mut control),
    }
}

fn arrived(bare: Bare, received: (u64, Duration)) -> Result<f64> {
    if received.0 == 0 {
        bail!("no datagram arrived: is UDP filtered on loopback?");
    }
    bare.figure(received)
}

/// The server's part, for a client whose UDP port is `port`.
pub(super) fn serve(bare: Bare, tcp: &mut TcpStream, port: u16) -> Result<()> {
    let mut socket = Socket::bind(tcp.local_addr()?.ip(), bare)?;
    socket.connect(SocketAddr::new(tcp.peer_addr()?.ip(), port));
    tcp.write_all(&u32::from(socket.port()?).to_be_bytes())?;
    let mut control = Control::new(tcp, bare)?;
    match bare.shape {
        Shape::Stream | Shape::Messages => {
            let received = sink(&mut socket, &mut control)?;
            tcp.set_nonblocking(false)?;
            write_result(tcp, received)?;
        }
        Shape::StreamBack => {
            source(&mut socket, bare, bare.back, &mut control)?;
        }
        Shape::PingPong => pong(&mut socket, bare, &mut control)?,
    }
    Ok(())
}

/// The connection, looked at now and then.
struct Control<'a> {
    tcp: &'a TcpStream,
    turns: u32,
    give_up: Instant,
}

impl<'a> Control<'a> {
    fn new(tcp: &'a TcpStream, bare: Bare) -> io::Result<Self> {
        tcp.set_nonblocking(true)?;
        Ok(Self { tcp, turns: 0, give_up: bare.deadline() + 2 * PATIENCE })
    }

    /// For a turn in which there was nothing to do: whether the other side has ended.
    fn idle(&mut self) -> Result<bool> {
        self.turns += 1;
        if self.turns.is_multiple_of(SOME_TURNS) {
            // Where the two do not have a core each, the other side is to have this one.
            thread::yield_now();
        }
        if self.turns < TURNS {
            return Ok(false);
        }
        self.turns = 0;
        if Instant::now() >= self.give_up {
            bail!("the other side of the bare measurement came to no end");
        }
        match self.tcp.peek(&mut [0]) {
            Ok(n) => Ok(n == 0),
            Err(e) if again(&e) => Ok(false),
            Err(e) => Err(e.into()),
        }
    }
}

/// Sends messages of `message` octets until the time is up; false if the other side has gone.
fn source(
    socket: &mut Socket,
    bare: Bare,
    message: u32,
    control: &mut Control<'_>,
) -> Result<bool> {
    let deadline = bare.deadline();
    let segment = bare.segment as usize;
    let window = socket.window(segment) as u64;
    let most = socket.most(segment);
    // A stream is not made of messages: all calls are full.
    let message = match bare.shape {
        Shape::Messages => message as usize,
        _ => most.min(message as usize),
    };
    let mut buffer = vec![0; most.min(message)];
    let (mut sent, mut known) = (0_u64, 0_u64);
    while Instant::now() < deadline {
        let mut rest = message;
        while rest > 0 {
            let call = rest.min(most);
            let mut since = None;
            while sent + call as u64 > known + window {
                if let Some(datagram) = socket.recv()? {
                    known = known.max(datagram.tag().unwrap_or(0)).min(sent);
                    continue;
                }
                let now = Instant::now();
                if now >= deadline {
                    return Ok(true);
                }
                if now > *since.get_or_insert(now) + LOST {
                    known = sent;
                }
                if control.idle()? {
                    return Ok(false);
                }
            }
            let end = (sent + call as u64).to_le_bytes();
            let tag = call.min(TAG);
            buffer[..tag].copy_from_slice(&end[..tag]);
            if socket.send(&buffer[..call], segment)? {
                sent += call as u64;
                rest -= call;
            } else if Instant::now() >= deadline {
                return Ok(true);
            } else if control.idle()? {
                return Ok(false);
            }
        }
    }
    Ok(true)
}

/// Receives until the other side has ended: the octets behind the first datagram, and the time
/// from that one to the last.
fn sink(socket: &mut Socket, control: &mut Control<'_>) -> Result<(u64, Duration)> {
    let mut octets = 0;
    let mut times: Option<(Instant, Instant)> = None;
    let (mut seen, mut told, mut quiet) = (0, 0, true);
    loop {
        let Some(datagram) = socket.recv()? else {
            if let Some((_, last)) = &mut times
                && !quiet
            {
                *last = Instant::now();
            }
            quiet = true;
            if control.idle()? {
                let time = times.map_or(Duration::ZERO, |(first, last)| last - first);
                return Ok((octets, time));
            }
            continue;
        };
        let (len, segment) = (datagram.octets.len() as u64, datagram.segment);
        seen = seen.max(datagram.tag().unwrap_or(0));
        if times.is_some() {
            octets += len;
            quiet = false;
        } else {
            let now = Instant::now();
            times = Some((now, now));
        }
        if seen - told >= socket.window(segment) as u64 / 4 {
            told = seen;
            // One that is lost is made up for by the next.
            socket.send(&seen.to_le_bytes(), TAG)?;
        }
    }
}

/// The client of a ping-pong: the median, in microseconds.
fn ping(socket: &mut Socket, bare: Bare, control: &mut Control<'_>) -> Result<f64> {
    let segment = bare.segment as usize;
    let tag = tag_len(bare);
    let (mut there, back) = (vec![7; bare.there as usize], bare.back as usize);
    bare.round_trips(bare.deadline(), |n| {
        let number = n.to_le_bytes();
        mark(&mut there, segment, &number[..tag]);
        let begun = Instant::now();
        send_message(socket, &there, segment, begun + NO_ANSWER)?;
        let mut got = 0;
        loop {
            if let Some(datagram) = socket.recv()? {
                for packet in datagram.packets() {
                    let tag = tag.min(packet.len());
                    if packet[..tag] == number[..tag] {
                        got += packet.len();
                    }
                }
                if got >= back {
                    return Ok(true);
                }
                continue;
            }
            if begun.elapsed() > NO_ANSWER {
                return Ok(false);
            }
            if control.idle()? {
                bail!("the bare server closed");
            }
        }
    })
}

/// The server of a ping-pong, until the client has ended.
fn pong(socket: &mut Socket, bare: Bare, control: &mut Control<'_>) -> Result<()> {
    let segment = bare.segment as usize;
    let tag = tag_len(bare);
    let (there, mut back) = (bare.there as usize, vec![7; bare.back as usize]);
    let (mut number, mut got) = ([0; TAG], 0);
    loop {
        let Some(datagram) = socket.recv()? else {
            if control.idle()? {
                return Ok(());
            }
            continue;
        };
        let mut whole = false;
        for packet in datagram.packets() {
            let tag = tag.min(packet.len());
            if packet[..tag] != number[..tag] {
                number = [0; TAG];
                number[..tag].copy_from_slice(&packet[..tag]);
                got = 0;
            }
            got += packet.len();
            if got >= there {
                got = 0;
                whole = true;
            }
        }
        if whole {
            mark(&mut back, segment, &number[..tag]);
            send_message(socket, &back, segment, Instant::now() + NO_ANSWER)?;
        }
    }
}

/// Octets of a round's number that fit the messages of both ways.
fn tag_len(bare: Bare) -> usize {
    TAG.min(bare.there as usize).min(bare.back as usize).min(bare.segment as usize)
}

/// Puts `tag` in front of each datagram.
fn mark(message: &mut [u8], segment: usize, tag: &[u8]) {
    for packet in message.chunks_mut(segment) {
        let tag = &tag[..tag.len().min(packet.len())];
        packet[..tag.len()].copy_from_slice(tag);
    }
}

/// Sends all of `message` by as few calls as it takes. What the socket does not take until `limit`
/// is lost.
fn send_message(socket: &mut Socket, message: &[u8], segment: usize, limit: Instant) -> Result<()> {
    for call in message.chunks(socket.most(segment)) {
        while !socket.send(call, segment)? {
            if Instant::now() >= limit {
                return Ok(());
            }
        }
    }
    Ok(())
}

/// One datagram, or several that the kernel joined.
#[derive(Clone, Copy)]
struct Datagram<'a> {
    octets: &'a [u8],
    /// Octets of each but the last.
    segment: usize,
}

impl<'a> Datagram<'a> {
    /// The number in its first octets.
    fn tag(&self) -> Option<u64> {
        self.octets.first_chunk().map(|tag| u64::from_le_bytes(*tag))
    }

    fn packets(&self) -> impl Iterator<Item = &'a [u8]> + use<'a> {
        self.octets.chunks(self.segment)
    }
}

/// One of the two kinds of socket, neither of which ever waits.
struct Socket {
    kind: Kind,
    /// Octets of the receive buffer, as the system counts them.
    recv_buffer: usize,
}

enum Kind {
    /// One datagram a call, by a socket of the standard library that is not connected: the least
    /// that a call can cost to whom must know the Identification of its packets, as RoCE's ICRC
    /// does. Of a connected socket it counts up from a number that nobody is told.
    Plain { socket: StdSocket, peer: SocketAddr, room: Vec<u8> },
    /// Trains.
    Trains(Box<Trains>),
}

struct Trains {
    socket: UdpSocket,
    peer: SocketAddr,
    table: Arc<Table>,
    scope: Scope,
    scratch: Scratch,
}

impl Socket {
    /// At a free port of `ip`. Which kind it is follows from the measurement: what fits one
    /// datagram is sent as one.
    fn bind(ip: IpAddr, bare: Bare) -> Result<Self> {
        let addr = SocketAddr::new(ip, 0);
        // A round trip is measured with the socket that RoCE has to have: one that tells ECN and
        // joins trains.
        let trains = matches!(bare.shape, Shape::Stream | Shape::StreamBack | Shape::PingPong)
            || bare.there.max(bare.back) > bare.segment;
        if trains {
            let socket = UdpSocket::bind(addr, &UdpOptions::default())?;
            let recv_buffer = socket.recv_buffer();
            let table = Table::new();
            let scope = Scope { pd: table.alloc_pd(), qpn: Qpn(1) };
            let trains = Trains { socket, peer: addr, table, scope, scratch: Scratch::new() };
            return Ok(Self { kind: Kind::Trains(Box::new(trains)), recv_buffer });
        }
        let socket =
            StdSocket::bind(addr).with_context(|| format!("cannot bind UDP {}", addr.ip()))?;
        socket.set_nonblocking(true)?;
        let options = SockRef::from(&socket);
        options.set_recv_buffer_size(BUFFER)?;
        options.set_send_buffer_size(BUFFER)?;
        let recv_buffer = options.recv_buffer_size()?;
        let room = vec![0; bare.segment.max(TAG as u32) as usize];
        Ok(Self { kind: Kind::Plain { socket, peer: addr, room }, recv_buffer })
    }

    fn port(&self) -> Result<u16> {
        Ok(match &self.kind {
            Kind::Plain { socket, .. } => socket.local_addr()?.port(),
            Kind::Trains(trains) => trains.socket.local_addr().port(),
        })
    }

    /// Nobody else is listened to from now on.
    fn connect(&mut self, to: SocketAddr) {
        match &mut self.kind {
            Kind::Plain { peer, .. } => *peer = to,
            Kind::Trains(trains) => trains.peer = to,
        }
    }

    /// Octets that may be outstanding, in datagrams of `segment` octets. Both sides come to the same:
    /// they are on one host, and ask for the same buffer.
    fn window(&self, segment: usize) -> usize {
        match self.kind {
            Kind::Plain { .. } => {
                (self.recv_buffer as u64 / 2 * segment as u64 / (segment + OVERHEAD) as u64)
                    as usize
            }
            Kind::Trains(_) => (self.recv_buffer / 4).min(WINDOW),
        }
        .max(2 * segment)
    }

    /// Octets that one call takes at most.
    fn most(&self, segment: usize) -> usize {
        match &self.kind {
            Kind::Plain { .. } => segment,
            Kind::Trains(trains) => {
                let most = MAX_TRAIN.min(self.window(segment) / 2) / segment;
                most.clamp(1, trains.socket.max_packets().max(1)) * segment
            }
        }
    }

    /// Sends `octets` in datagrams of `segment`, which is as much as one call takes. False if the
    /// socket takes nothing at the moment.
    fn send(&mut self, octets: &[u8], segment: usize) -> Result<bool> {
        match &mut self.kind {
            Kind::Plain { socket, peer, .. } => match socket.send_to(octets, *peer) {
                Ok(_) => Ok(true),
                Err(e) if passing(&e) => Ok(false),
                Err(e) => Err(e).context("cannot send a datagram"),
            },
            Kind::Trains(trains) => trains.send(octets, segment),
        }
    }

    fn recv(&mut self) -> Result<Option<Datagram<'_>>> {
        match &mut self.kind {
            Kind::Plain { socket, peer, room } => match socket.recv_from(room) {
                Ok((_, from)) if from != *peer => Ok(None),
                Ok((n, _)) => Ok(Some(Datagram { octets: &room[..n], segment: n.max(1) })),
                Err(e) if passing(&e) => Ok(None),
                Err(e) => Err(e).context("cannot receive a datagram"),
            },
            Kind::Trains(trains) => {
                let peer = trains.peer;
                let datagram = trains.socket.recv_batch(&mut trains.scratch)?;
                let datagram = datagram.filter(|datagram| datagram.from == peer);
                Ok(datagram.map(|d| Datagram { octets: d.octets, segment: d.segment }))
            }
        }
    }
}

/// Nothing there, no room; or an earlier datagram found nobody (ICMP): the connection tells
/// whether the other side is there.
fn passing(e: &io::Error) -> bool {
    again(e) || e.kind() == ErrorKind::ConnectionRefused
}

impl Trains {
    fn send(&mut self, octets: &[u8], segment: usize) -> Result<bool> {
        let route = Route { to: self.peer, from: None, tos: 0, segment };
        let mut sent = 0;
        while sent < octets.len() {
            let pieces = iter::once(Piece::Bytes(octets));
            match self.socket.send_train(&route, pieces, sent, &self.table, self.scope) {
                Ok(n) => sent += n,
                // Where the kernel cuts nothing, a part may have gone: the rest of it is lost.
                Err(SendError::WouldBlock | SendError::NotCut { .. }) => return Ok(sent > 0),
                Err(e) => return Err(e.into()),
            }
        }
        Ok(true)
    }
}

#[cfg(test)]
mod tests {
    use std::{
        net::{Ipv4Addr, TcpListener},
        thread,
    };

    use super::*;
    use crate::{bare::MTU, common::Transport};

    const HERE: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

    fn bare(op: PerfOp, measure: Measure, size: u32, millis: u32) -> Bare {
        Bare::new(Transport::Roce, op, measure, size, MTU, millis)
    }

    /// What a socket of the measurement talks to: a plain one of the test.
    fn socket_and_peer(bare: Bare) -> (Socket, StdSocket) {
        let peer = StdSocket::bind((HERE, 0)).unwrap();
        peer.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let mut socket = Socket::bind(HERE, bare).unwrap();
        socket.connect(peer.local_addr().unwrap());
        peer.connect((HERE, socket.port().unwrap())).unwrap();
        (socket, peer)
    }

    fn tcp_pair() -> (TcpStream, TcpStream) {
        let listener = TcpListener::bind((HERE, 0)).unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        (client, listener.accept().unwrap().0)
    }

    /// IBTA §9.2 and the captures: a WRITE ONLY of 8 octets is a UDP payload of 40, a SEND ONLY 24,
    /// a READ RESPONSE ONLY 28, an ATOMIC ACKNOWLEDGE 28; a MIDDLE at path MTU 4096 is one of 4112.
    #[test]
    fn sizes_of_packets() {
        let rate = |op, size| {
            let (shape, there, back, segment) = shape(op, Measure::Rate, size, MTU);
            assert_eq!((shape, back), (Shape::Messages, 0));
            (there, segment)
        };
        assert_eq!(rate(PerfOp::Write, 8), (40, 40));
        assert_eq!(rate(PerfOp::Send, 8), (24, 24));
        assert_eq!(rate(PerfOp::Send, 37), (56, 56));
        assert_eq!(rate(PerfOp::Read, 8), (28, 28));
        assert_eq!(rate(PerfOp::Atomic, 8), (28, 28));
        assert_eq!(rate(PerfOp::Send, 0), (16, 16));
        assert_eq!(rate(PerfOp::Write, 10_000), (10_000 + 3 * 16, 4112));
        let bandwidth = |op, size, mtu| shape(op, Measure::Bandwidth, size, mtu);
        let train = 15 * 4112;
        assert_eq!(bandwidth(PerfOp::Write, 1 << 20, 4096), (Shape::Stream, train, 0, 4112));
        assert_eq!(bandwidth(PerfOp::Read, 1 << 20, 4096), (Shape::StreamBack, 0, train, 4112));
        assert_eq!(bandwidth(PerfOp::Write, 1 << 20, 1024).3, 1040);
        assert_eq!(bandwidth(PerfOp::Write, 10, 1024).3, 28);
        let latency = |op| shape(op, Measure::Latency, 64, MTU);
        assert_eq!(latency(PerfOp::Send), (Shape::PingPong, 64, 64, MTU));
        assert_eq!(latency(PerfOp::Read), (Shape::PingPong, 16, 64, MTU));
        assert_eq!(latency(PerfOp::Atomic), (Shape::PingPong, 28, 8, MTU));
    }

    #[test]
    fn heads_that_make_no_sense_are_refused() {
        assert!(check(0, 1).is_err() && check(65_508, 1).is_err() && check(1, 0).is_err());
        assert!(check(1, 1).is_ok() && check(65_507, 65_535).is_ok());
    }

    /// Nobody acknowledges: everything counts as lost, and the time is up when it is up.
    #[test]
    fn a_sender_that_hears_nothing_ends_in_time() {
        for (op, measure) in [(PerfOp::Write, Measure::Bandwidth), (PerfOp::Write, Measure::Rate)] {
            let bare = bare(op, measure, 8, 200);
            let (mut socket, _peer) = socket_and_peer(bare);
            let (tcp, _other) = tcp_pair();
            let begun = Instant::now();
            let mut control = Control::new(&tcp, bare).unwrap();
            assert!(source(&mut socket, bare, bare.there, &mut control).unwrap());
            assert!(begun.elapsed() >= Duration::from_millis(200));
            assert!(begun.elapsed() < Duration::from_secs(10));
        }
    }

    /// Of what is sent a part is lost, of what is acknowledged too: it goes on, and within the window.
    #[test]
    fn a_sender_goes_on_through_loss() {
        let bare = bare(PerfOp::Write, Measure::Rate, 8, 1000);
        let (mut socket, peer) = socket_and_peer(bare);
        let window = socket.window(40) as u64;
        let (tcp, other) = tcp_pair();
        let receiver = thread::spawn(move || {
            let (mut seen, mut acks) = (0_u64, 0_u64);
            let mut datagram = [0; 64];
            while let Ok(n) = peer.recv(&mut datagram) {
                assert_eq!(n, 40);
                let end = u64::from_le_bytes(*datagram.first_chunk().unwrap());
                // Each third is as good as lost.
                if end.is_multiple_of(120) {
                    continue;
                }
                if end >= seen + window / 4 {
                    seen = end;
                    acks += 1;
                    if acks.is_multiple_of(2) {
                        peer.send(&end.to_le_bytes()).unwrap();
                    }
                }
                if end > 3 * window {
                    return end;
                }
            }
            0
        });
        let mut control = Control::new(&tcp, bare).unwrap();
        assert!(source(&mut socket, bare, bare.there, &mut control).unwrap());
        assert!(receiver.join().unwrap() > 3 * window);
        drop(other);
    }

    /// A receiver counts what arrives, however much is missing, until the other side ends.
    #[test]
    fn a_receiver_counts_what_arrives() {
        let bare = bare(PerfOp::Write, Measure::Rate, 8, 1000);
        let (mut socket, peer) = socket_and_peer(bare);
        let (tcp, other) = tcp_pair();
        for n in [1_u64, 2, 5, 9] {
            let mut datagram = [0; 40];
            datagram[..8].copy_from_slice(&(n * 40).to_le_bytes());
            peer.send(&datagram).unwrap();
        }
        other.shutdown(Shutdown::Write).unwrap();
        let mut control = Control::new(&tcp, bare).unwrap();
        let (octets, time) = sink(&mut socket, &mut control).unwrap();
        // The first begins the time.
        assert_eq!(octets, 3 * 40);
        assert!(time > Duration::ZERO);
    }

    /// Some datagrams go unanswered, and old answers come again: the figure is that of rounds
    /// that were answered.
    #[test]
    fn round_trips_survive_loss_and_repetition() {
        let bare = bare(PerfOp::Send, Measure::Latency, 64, 50);
        let (mut socket, peer) = socket_and_peer(bare);
        let (tcp, other) = tcp_pair();
        let server = thread::spawn(move || {
            let mut datagram = [0; 64];
            let mut old = [0; 64];
            let mut dropped = 0;
            let mut n = 0_u64;
            peer.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
            while let Ok(64) = peer.recv(&mut datagram) {
                n += 1;
                if n.is_multiple_of(20) && dropped < 5 {
                    dropped += 1;
                    continue;
                }
                peer.send(&old).unwrap();
                peer.send(&datagram).unwrap();
                old = datagram;
            }
            dropped
        });
        let mut control = Control::new(&tcp, bare).unwrap();
        let figure = ping(&mut socket, bare, &mut control).unwrap();
        assert!(figure > 0.1 && figure < NO_ANSWER.as_micros() as f64, "{figure}");
        assert_eq!(server.join().unwrap(), 5);
        drop(other);
    }

    /// A server answers a message of several datagrams once all of it is there, and a repeated
    /// round like any other.
    #[test]
    fn an_answer_takes_the_whole_message() {
        let bare = bare(PerfOp::Send, Measure::Latency, 10_000, 1000);
        let (mut socket, peer) = socket_and_peer(bare);
        let (tcp, other) = tcp_pair();
        let server = thread::spawn(move || {
            let mut control = Control::new(&tcp, bare).unwrap();
            pong(&mut socket, bare, &mut control).unwrap();
        });
        let say = |round: u8, lens: &[usize]| {
            for &len in lens {
                let mut datagram = vec![0; len];
                datagram[0] = round;
                peer.send(&datagram).unwrap();
            }
        };
        let hear = || {
            let mut got = vec![];
            while got.iter().map(|(_, n)| n).sum::<usize>() < 10_000 {
                let mut datagram = [0; 5000];
                let n = peer.recv(&mut datagram).unwrap();
                got.push((datagram[0], n));
            }
            got
        };
        // Round 1 misses its middle; round 2 is whole; round 3 too, and round 2 was not answered twice.
        say(1, &[4096, 1808]);
        say(2, &[4096, 4096, 1808]);
        assert_eq!(hear(), [(2, 4096), (2, 4096), (2, 1808)]);
        say(3, &[4096, 4096, 1808]);
        assert_eq!(hear(), [(3, 4096), (3, 4096), (3, 1808)]);
        drop(other);
        server.join().unwrap();
    }

    /// What a stranger sends is not counted.
    #[test]
    fn strangers_are_not_listened_to() {
        let stranger = StdSocket::bind((HERE, 0)).unwrap();
        for measure in [Measure::Rate, Measure::Bandwidth] {
            let (mut socket, peer) = socket_and_peer(bare(PerfOp::Write, measure, 8, 10));
            stranger.send_to(&[1; 24], (HERE, socket.port().unwrap())).unwrap();
            peer.send(&[2; 24]).unwrap();
            let begun = Instant::now();
            let first = loop {
                assert!(begun.elapsed() < Duration::from_secs(10));
                if let Some(datagram) = socket.recv().unwrap() {
                    break datagram.octets[0];
                }
            };
            assert_eq!(first, 2);
        }
    }
}
