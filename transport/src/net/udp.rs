//! The UDP socket of a RoCE device: trains of packets out, batches of packets in. An ordinary,
//! unconnected socket that needs no privilege, never waits and holds no lock.
//!
//! **What the ICRC needs.** The ICRC covers IPv4's Identification and fragment bits, which a UDP
//! socket does not show. This socket never fragments (`IP_MTU_DISCOVER` is `DO`) and is not
//! connected, and so Linux sends its packets with DF set and Identification 0; the packets of one
//! train, which the kernel cuts (`UDP_SEGMENT`), with Identification 0, 1, 2 and so on. A train
//! goes out by one call or not at all, because a second call would begin at 0 again. Where the kernel
//! cuts no trains ([`UdpSocket::max_packets`] is 1), each packet has Identification 0. IPv6 has none.
//!
//! **What the receive buffer holds.** [`UdpSocket::recv_buffer`] is what the system granted, its own
//! overhead included. About 0.7 of it are octets of trains that `UDP_GRO` keeps together, 0.4 of
//! it single packets of 1 to 4 KiB, and 0.04 of it packets of 40 octets.

use std::{
    fmt, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket as StdSocket},
    ops::AddAssign,
    os::fd::{AsFd, BorrowedFd},
    sync::{Arc, OnceLock},
};

use socket2::{Domain, Protocol, Socket, Type};
use tokio::io::unix::AsyncFd;
use userdma_proto::{
    mem::{Memory, Scope},
    verbs::Sge,
};

use super::{
    holder,
    sys::{self, Envelope, Gather, MAX_PIECES},
};
use crate::{
    error::{Error, Result},
    mr::Table,
};

/// The UDP port of RoCEv2 (IBTA Annex A17).
pub const ROCE_PORT: u16 = 4791;

/// Octets that a train has at most: what fits a datagram over IPv4.
pub const MAX_TRAIN: usize = 65_507;

/// ECN-capable, codepoint ECT(0) (RFC 3168): what data packets carry.
pub const ECT_0: u8 = 0b10;

/// Congestion experienced (RFC 3168): what a switch makes of ECT.
pub const CE: u8 = 0b11;

/// Octets of a RoCEv2 packet beside its payload where they are most, in a WRITE ONLY over IPv6: IPv6
/// 40, UDP 8, BTH 12, RETH 16, ICRC 4.
const OVERHEAD: usize = 80;

/// Packets in a train that every kernel with `UDP_SEGMENT` takes (Linux 4.18).
const MAX_PACKETS_EVER: usize = 64;
/// The same since Linux 6.9.
const MAX_PACKETS_NEW: usize = 128;

/// Octets of a piece of a region that are rather copied than given to the kernel where they are.
const SMALL_REGION: usize = 1024;

/// A call that still fails when it was tried again as often fails by itself, not by what an earlier
/// packet brought back.
const TRIES: u64 = 3;

/// What may be chosen about a [`UdpSocket`]:
/// `UdpOptions { zero_checksum: true, ..Default::default() }`.
#[derive(Debug, Clone)]
pub struct UdpOptions {
    /// Octets asked for the receive buffer: 4 MiB by default. The system gives less to an ordinary
    /// user where `net.core.rmem_max` is lower; [`UdpSocket::recv_buffer`] tells.
    pub recv_buffer: usize,
    /// Octets asked for the send buffer: 4 MiB by default, bounded by `net.core.wmem_max`.
    pub send_buffer: usize,
    /// Send UDP checksum 0, as the kernel's rxe does; the ICRC protects the packet anyway. The kernel
    /// cuts no trains then. Off by default. Received are such packets in any case.
    pub zero_checksum: bool,
    /// Most packets in a train: 128 by default. 1 keeps the kernel from cutting trains.
    pub max_packets: usize,
    /// Let the kernel join the packets of a train again (`UDP_GRO`): on by default.
    pub join: bool,
}

impl Default for UdpOptions {
    fn default() -> Self {
        Self {
            recv_buffer: 4 << 20,
            send_buffer: 4 << 20,
            zero_checksum: false,
            max_packets: MAX_PACKETS_NEW,
            join: true,
        }
    }
}

/// A piece of a train.
#[derive(Debug, Clone, Copy)]
pub enum Piece<'a> {
    /// Headers, trailers, small payload.
    Bytes(&'a [u8]),
    /// Payload that lies in a registered region; it goes to the kernel uncopied, unless it is small.
    Region(Sge),
}

impl Piece<'_> {
    /// Octets.
    pub const fn len(&self) -> usize {
        match self {
            Self::Bytes(octets) => octets.len(),
            Self::Region(sge) => sge.length as usize,
        }
    }

    /// Whether it has no octets.
    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// Where a train goes and how it is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Route {
    /// The peer, with the interface's number where the address is link-local.
    pub to: SocketAddr,
    /// The source address, for a socket that is bound to all of them; None: the system's choice, or
    /// the one it is bound to.
    pub from: Option<IpAddr>,
    /// IPv4's type of service, IPv6's traffic class: DSCP in the upper six bits, ECN in the lower two
    /// ([`ECT_0`]).
    pub tos: u8,
    /// UDP payload of each packet but the last, which may be shorter.
    pub segment: usize,
}

/// Why nothing was sent.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SendError {
    /// The send buffer is full: wait until the socket is writable.
    #[error("the socket's send buffer is full")]
    WouldBlock,
    /// The packets are longer than the route takes.
    #[error(
        "a packet of {packet} octets does not fit the route to {to}, whose MTU is {mtu}: take a \
         smaller RDMA path MTU (`--mtu`{}), or raise the MTU of the link",
        largest_hint(*mtu)
    )]
    TooBig {
        /// Octets of the packet with its IP and UDP headers.
        packet: usize,
        /// What the route takes, in the same measure.
        mtu: usize,
        /// Where to.
        to: SocketAddr,
    },
    /// A piece of registered memory is not there any more, or may not be read.
    #[error("a piece of registered memory was taken away before it was sent")]
    Revoked,
    /// The network device toward this peer cuts no trains. [`UdpSocket::max_packets`] is 1 from now
    /// on. Over IPv4 the packets cannot be sent as they are, because their Identification would
    /// change: they are lost, and must be made anew.
    #[error("the network device toward {to} cuts no trains")]
    NotCut {
        /// Where to.
        to: SocketAddr,
    },
    /// More than a train holds, or another family of addresses.
    #[error("{0}")]
    Invalid(String),
    /// The system refused.
    #[error("cannot send to {to}: {source}")]
    Io {
        /// Where to.
        to: SocketAddr,
        /// What the system said.
        #[source]
        source: io::Error,
    },
}

fn largest_hint(mtu: usize) -> String {
    match largest_rdma_mtu(mtu) {
        Some(largest) => format!(", {largest} at most"),
        None => String::new(),
    }
}

/// What a socket did and met.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct UdpStats {
    /// Trains and single packets that the system took.
    pub sends: u64,
    /// Octets of UDP payload in them.
    pub sent_octets: u64,
    /// Sends that the system refused for a moment or by a filter, and which count as lost on the way.
    pub lost_sends: u64,
    /// Receptions: packets, or several that the kernel had joined.
    pub receptions: u64,
    /// Octets of UDP payload in them.
    pub received_octets: u64,
    /// Receptions that were longer than the scratch buffer, and were dropped.
    pub truncated: u64,
    /// Errors that earlier packets brought back from the network (ICMP); nothing follows from them.
    pub icmp_errors: u64,
    /// Packets that found the receive buffer full: the peers send faster than this side reads.
    pub overflows: u64,
}

impl AddAssign for UdpStats {
    fn add_assign(&mut self, other: Self) {
        self.sends += other.sends;
        self.sent_octets += other.sent_octets;
        self.lost_sends += other.lost_sends;
        self.receptions += other.receptions;
        self.received_octets += other.received_octets;
        self.truncated += other.truncated;
        self.icmp_errors += other.icmp_errors;
        self.overflows += other.overflows;
    }
}

/// Where datagrams are received into; one for any number of sockets of a thread.
#[derive(Debug)]
pub struct Scratch(Box<[u8]>);

impl Scratch {
    /// 64 KiB: the largest datagram, and the most that the kernel joins.
    pub fn new() -> Self {
        Self::with_size(1 << 16)
    }

    /// With room for `size` octets; what is longer is dropped as truncated.
    pub fn with_size(size: usize) -> Self {
        Self(vec![0; size].into_boxed_slice())
    }
}

impl Default for Scratch {
    fn default() -> Self {
        Self::new()
    }
}

/// One packet, or several from one peer that the kernel joined.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Datagram<'a> {
    /// Who sent it. The port is not where a RoCE peer is to be answered.
    pub from: SocketAddr,
    /// The local address it came to.
    pub to: IpAddr,
    /// The ECN bits, of each of the joined packets: 0 to 3.
    pub ecn: u8,
    /// UDP payload of each packet but the last, which may be shorter.
    pub segment: usize,
    /// The packets, one behind the other.
    pub octets: &'a [u8],
}

impl<'a> Datagram<'a> {
    /// The packets: UDP payload, from BTH to ICRC.
    pub fn packets(&self) -> impl ExactSizeIterator<Item = &'a [u8]> + use<'a> {
        self.octets.chunks(self.segment)
    }
}

/// The socket. See the [module](self).
pub struct UdpSocket {
    socket: Arc<StdSocket>,
    local: SocketAddr,
    max_packets: usize,
    /// What packets carry that say nothing else: to say so costs 0.2 µs a send call.
    tos: u8,
    recv_buffer: usize,
    send_buffer: usize,
    gather: Gather,
    /// A train that is copied together.
    flat: Vec<u8>,
    stats: UdpStats,
    /// The kernel's own count, as it was told last.
    overflows: u32,
}

impl UdpSocket {
    /// Binds `local`; port 0 takes a free one, an unspecified address all of its family.
    ///
    /// A port that is taken is an error that says by whom, as far as this user may know.
    pub fn bind(local: SocketAddr, options: &UdpOptions) -> Result<Self> {
        // ::ffff:10.0.0.1 is IPv4, and our IPv6 sockets take none of it.
        let local = SocketAddr::new(local.ip().to_canonical(), local.port()).with_scope_of(local);
        let socket = open(local).map_err(|e| bind_error(local, e))?;
        let set = |what: &str, done: io::Result<()>| {
            done.map_err(|e| Error::io(format!("cannot set {what} of a UDP socket"), e))
        };
        set("SO_RCVBUF", socket.set_recv_buffer_size(options.recv_buffer))?;
        set("SO_SNDBUF", socket.set_send_buffer_size(options.send_buffer))?;
        let fd = socket.as_fd();
        if options.zero_checksum {
            set("no checksums", no_checksum(fd, local.is_ipv6()))?;
        }
        if options.join {
            // Linux before 5.0 has no such option: packets come one by one then.
            let _ = sys::set_option(fd, libc::SOL_UDP, libc::UDP_GRO, 1);
        }
        let (level, name) = sys::tos_option(local.is_ipv6());
        set("ECN", sys::set_option(fd, level, name, ECT_0.into()))?;
        // Only counted, so nothing is lost where it cannot be had.
        let _ = sys::set_option(fd, libc::SOL_SOCKET, libc::SO_RXQ_OVFL, 1);
        socket.bind(&local.into()).map_err(|e| bind_error(local, e))?;

        let failed = |e| Error::io("cannot read the options of a UDP socket", e);
        let recv_buffer = socket.recv_buffer_size().map_err(failed)?;
        let send_buffer = socket.send_buffer_size().map_err(failed)?;
        let socket = StdSocket::from(socket);
        let local = socket.local_addr().map_err(failed)?;
        // With a checksum of 0 the kernel refuses to cut.
        let most = if options.zero_checksum { 1 } else { kernel_max_packets() };
        Ok(Self {
            socket: Arc::new(socket),
            local,
            max_packets: options.max_packets.clamp(1, most),
            tos: ECT_0,
            recv_buffer,
            send_buffer,
            gather: Gather::default(),
            flat: Vec::new(),
            stats: UdpStats::default(),
            overflows: 0,
        })
    }

    /// The address and port it is bound to.
    pub const fn local_addr(&self) -> SocketAddr {
        self.local
    }

    /// Octets of the receive buffer as the system counts them: twice what was asked for, or twice
    /// `net.core.rmem_max` where that is less. All peers share it.
    pub const fn recv_buffer(&self) -> usize {
        self.recv_buffer
    }

    /// Octets of the send buffer as the system counts them.
    pub const fn send_buffer(&self) -> usize {
        self.send_buffer
    }

    /// Most packets in a train; 1 where the kernel cuts none.
    pub const fn max_packets(&self) -> usize {
        self.max_packets
    }

    /// What it did so far.
    pub const fn stats(&self) -> UdpStats {
        self.stats
    }

    /// The MTU of the route to `to`, IP header included: 65,535 on lo, over IPv6 65,536.
    pub fn path_mtu(&self, to: SocketAddr) -> Result<usize> {
        self.try_path_mtu(to)
            .map_err(|e| Error::io(format!("cannot tell the MTU of the route to {}", to.ip()), e))
    }

    /// The address from which packets to `to` leave, as the route says.
    pub fn source_toward(&self, to: SocketAddr) -> Result<IpAddr> {
        let source = self.probe(to).and_then(|probe| probe.local_addr());
        source.ok().and_then(|addr| addr.as_socket()).map(|addr| addr.ip()).ok_or_else(|| {
            Error::BadAddress(format!(
                "no way leads to {} (`ip route get {}` shows what was tried)",
                to.ip(),
                to.ip()
            ))
        })
    }

    fn try_path_mtu(&self, to: SocketAddr) -> io::Result<usize> {
        let probe = self.probe(to)?;
        let (level, name) = match to {
            SocketAddr::V4(_) => (libc::IPPROTO_IP, libc::IP_MTU),
            SocketAddr::V6(_) => (libc::IPPROTO_IPV6, libc::IPV6_MTU),
        };
        let mtu = sys::option(probe.as_fd(), level, name)?;
        usize::try_from(mtu).map_err(|_| io::ErrorKind::InvalidData.into())
    }

    /// A socket that is connected to `to`, to be asked about the route.
    fn probe(&self, to: SocketAddr) -> io::Result<Socket> {
        let probe = Socket::new(Domain::for_address(to), Type::DGRAM, Some(Protocol::UDP))?;
        if !self.local.ip().is_unspecified() {
            let mut from = self.local;
            from.set_port(0);
            probe.bind(&from.into())?;
        }
        // Sends nothing; the route does not depend on the port.
        probe.connect(&SocketAddr::new(to.ip(), ROCE_PORT).with_scope_of(to).into())?;
        Ok(probe)
    }

    /// Sends a train along `route`: `pieces`, of which the first `sent` octets were sent by a call
    /// before this one. Returns how many octets it sent now. These are all, but where
    /// [`UdpSocket::max_packets`] is 1: then whole packets, as many as the socket takes.
    ///
    /// Regions are read by the kernel, through `table`, on behalf of `scope`, and are held until the
    /// call returns. A train whose region pieces have 1024 octets or less on average, or of more than
    /// 1024 pieces, is copied together first. Does not wait.
    ///
    /// Errors that earlier packets brought back (ICMP) are counted and change nothing.
    pub fn send_train<'p, I>(
        &mut self,
        route: &Route,
        pieces: I,
        sent: usize,
        table: &Table,
        scope: Scope,
    ) -> Result<usize, SendError>
    where
        I: Iterator<Item = Piece<'p>> + Clone,
    {
        let mut shape = Shape::default();
        for piece in pieces.clone() {
            shape.add(&piece);
        }
        let len = shape.len;
        self.check(route, len, sent)?;
        if !shape.copy() {
            return self.send(route, pieces, len, sent, table, scope);
        }
        let mut flat = std::mem::take(&mut self.flat);
        let result = flatten(pieces, table, scope, &mut flat).and_then(|()| {
            self.send(route, std::iter::once(Piece::Bytes(&flat)), len, sent, table, scope)
        });
        flat.clear();
        self.flat = flat;
        result
    }

    /// Whether it is a train at all.
    fn check(&self, route: &Route, len: usize, sent: usize) -> Result<(), SendError> {
        let invalid = |text| Err(SendError::Invalid(text));
        let Route { to, segment, .. } = *route;
        if to.is_ipv4() != self.local.is_ipv4()
            || route.from.is_some_and(|from| from.is_ipv4() != to.is_ipv4())
        {
            return invalid(format!(
                "a socket bound to {} cannot send to {to} from {:?}: the families of the addresses \
                 differ",
                self.local, route.from
            ));
        }
        if segment == 0 || len <= sent {
            return invalid(format!(
                "nothing to send: {len} octets, of which {sent} were sent, in packets of {segment}"
            ));
        }
        if sent > 0 && self.max_packets > 1 {
            return invalid(format!(
                "a train of {len} octets cannot go on behind {sent}: it goes out by one call"
            ));
        }
        // Without cutting there is no train, only packets one after the other.
        let most = if self.max_packets == 1 { usize::MAX } else { self.max_packets };
        let packets = len.div_ceil(segment);
        if packets > most || len.min(segment) > MAX_TRAIN || (most != usize::MAX && len > MAX_TRAIN)
        {
            return invalid(format!(
                "a train of {packets} packets and {len} octets: {} packets and {MAX_TRAIN} octets \
                 are the most",
                self.max_packets
            ));
        }
        Ok(())
    }

    /// Sends what is known to be a train, and sorts out what the system says.
    fn send<'p>(
        &mut self,
        route: &Route,
        pieces: impl Iterator<Item = Piece<'p>> + Clone,
        len: usize,
        sent: usize,
        table: &Table,
        scope: Scope,
    ) -> Result<usize, SendError> {
        let Route { to, from, tos, segment } = *route;
        let rest = len - sent;
        let mut icmp = 0;
        loop {
            let cut = self.max_packets > 1 && rest > segment;
            // A segment of a train is below MAX_TRAIN, a u16.
            let tos = (tos != self.tos).then_some(tos);
            let envelope = Envelope::new(to, from, tos, cut.then_some(segment as u16));
            let result = self.gather.send_datagrams(
                &self.socket,
                &envelope,
                segment,
                sent,
                pieces.clone(),
                |sge| table.pin_read(scope, sge),
            );
            let e = match result {
                Ok(n) => {
                    self.stats.sends += if cut { 1 } else { n.div_ceil(segment) as u64 };
                    self.stats.sent_octets += n as u64;
                    return Ok(n);
                }
                Err(sys::SendError::Revoked) => return Err(SendError::Revoked),
                Err(sys::SendError::Io(e)) => e,
            };
            match verdict(&e) {
                Verdict::Full => return Err(SendError::WouldBlock),
                Verdict::Icmp if icmp < TRIES => {
                    icmp += 1;
                    self.stats.icmp_errors += 1;
                }
                Verdict::Icmp => {
                    // It was this call's own error each time.
                    self.stats.icmp_errors -= icmp;
                    return Err(SendError::Io { to, source: e });
                }
                Verdict::Lost => {
                    self.stats.lost_sends += 1;
                    return Ok(if cut { rest } else { rest.min(segment) });
                }
                Verdict::NoCutting if cut => {
                    // The device cannot compute checksums, which old kernels want for cutting.
                    self.max_packets = 1;
                    if to.is_ipv4() {
                        return Err(SendError::NotCut { to });
                    }
                }
                Verdict::TooBig | Verdict::Other | Verdict::NoCutting => {
                    return Err(self.send_error(route, rest, e));
                }
            }
        }
    }

    /// An error that stands: kernels tell too large segments by EMSGSIZE or by EINVAL.
    fn send_error(&self, route: &Route, rest: usize, source: io::Error) -> SendError {
        let Route { to, segment, .. } = *route;
        let packet = rest.min(segment) + if to.is_ipv4() { 28 } else { 48 };
        if matches!(source.raw_os_error(), Some(libc::EMSGSIZE | libc::EINVAL)) {
            match self.try_path_mtu(to) {
                Ok(mtu) if packet > mtu => return SendError::TooBig { packet, mtu, to },
                _ => {}
            }
        }
        SendError::Io { to, source }
    }

    /// Receives into `scratch`. None: nothing is there. Does not wait.
    pub fn recv_batch<'s>(&mut self, scratch: &'s mut Scratch) -> Result<Option<Datagram<'s>>> {
        let (received, from) = loop {
            let received = match sys::receive(&self.socket, &mut scratch.0) {
                Ok(received) => received,
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                // Brought back by a packet that was sent, and told once.
                Err(e) if matches!(verdict(&e), Verdict::Icmp | Verdict::TooBig) => {
                    self.stats.icmp_errors += 1;
                    continue;
                }
                Err(e) => {
                    return Err(Error::io(format!("cannot receive at {}", self.local), e));
                }
            };
            if let Some(overflows) = received.overflows {
                let more = overflows.wrapping_sub(self.overflows);
                self.overflows = overflows;
                self.stats.overflows += u64::from(more);
            }
            if received.truncated {
                self.stats.truncated += 1;
                continue;
            }
            // A socket of the Internet hears of no other family.
            let Some(from) = received.from else { continue };
            break (received, from);
        };
        self.stats.receptions += 1;
        self.stats.received_octets += received.len as u64;
        Ok(Some(Datagram {
            from,
            to: received.to.unwrap_or(self.local.ip()),
            ecn: received.tos & 0b11,
            segment: received.segment.unwrap_or(received.len).max(1),
            octets: &scratch.0[..received.len],
        }))
    }

    /// The socket in the runtime's epoll, until the result is dropped: to wait until it is readable or
    /// writable. While somebody polls in its own thread it had better not be there. Must be called
    /// inside of a tokio runtime.
    pub fn watch(&self) -> io::Result<AsyncFd<Arc<StdSocket>>> {
        sys::watch_datagrams(Arc::clone(&self.socket))
    }

    /// Whether the socket takes more, without asking for a train.
    pub fn is_writable(&self) -> bool {
        sys::writable(self.socket.as_fd())
    }
}

impl fmt::Debug for UdpSocket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UdpSocket")
            .field("local", &self.local)
            .field("max_packets", &self.max_packets)
            .field("recv_buffer", &self.recv_buffer)
            .field("send_buffer", &self.send_buffer)
            .field("stats", &self.stats)
            .finish_non_exhaustive()
    }
}

/// The largest RDMA path MTU, 256 to 4096, whose packets fit a route that takes packets of `route`
/// octets; None where not even the smallest fits.
pub const fn largest_rdma_mtu(route: usize) -> Option<usize> {
    let mut mtu = 4096;
    while mtu >= 256 {
        if mtu + OVERHEAD <= route {
            return Some(mtu);
        }
        mtu /= 2;
    }
    None
}

/// What a train consists of.
#[derive(Debug, Default)]
struct Shape {
    len: usize,
    pieces: usize,
    regions: usize,
    region_octets: usize,
}

impl Shape {
    fn add(&mut self, piece: &Piece<'_>) {
        self.len += piece.len();
        self.pieces += usize::from(!piece.is_empty());
        if let Piece::Region(sge) = piece {
            self.regions += 1;
            self.region_octets += sge.length as usize;
        }
    }

    /// Whether it is better copied together. A piece costs the kernel some 40 ns; against three
    /// pieces a packet, copying was 2 times as fast at 24 and 256 octets, 1.4 times at 1024, the same
    /// at 2048 and 0.9 times at 4096.
    const fn copy(&self) -> bool {
        self.pieces > MAX_PIECES || self.region_octets < self.regions * (SMALL_REGION + 1)
    }
}

/// What an error of the system means for a socket that talks to many peers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    /// No room; or nothing to read.
    Full,
    /// Perhaps brought back by an earlier packet, to whomever that went.
    Icmp,
    /// Gone like a packet that the network drops: a filter, or no memory for the moment.
    Lost,
    /// The device cannot cut a train.
    NoCutting,
    /// Longer than the route takes.
    TooBig,
    /// What the caller must hear.
    Other,
}

fn verdict(e: &io::Error) -> Verdict {
    let Some(errno) = e.raw_os_error() else { return Verdict::Other };
    match errno {
        _ if e.kind() == io::ErrorKind::WouldBlock => Verdict::Full,
        libc::ECONNREFUSED
        | libc::ECONNRESET
        | libc::EHOSTUNREACH
        | libc::ENETUNREACH
        | libc::EHOSTDOWN
        | libc::ENONET
        | libc::EPROTO
        | libc::ENOPROTOOPT
        | libc::EOPNOTSUPP
        | libc::EACCES => Verdict::Icmp,
        libc::EPERM | libc::ENOBUFS | libc::ENOMEM => Verdict::Lost,
        libc::EIO => Verdict::NoCutting,
        libc::EMSGSIZE => Verdict::TooBig,
        _ => Verdict::Other,
    }
}

/// All pieces behind one another.
fn flatten<'p>(
    pieces: impl Iterator<Item = Piece<'p>>,
    table: &Table,
    scope: Scope,
    out: &mut Vec<u8>,
) -> Result<(), SendError> {
    out.clear();
    for piece in pieces {
        match piece {
            Piece::Bytes(octets) => out.extend_from_slice(octets),
            Piece::Region(sge) => {
                table.read_local(scope, sge, out).map_err(|_| SendError::Revoked)?;
            }
        }
    }
    Ok(())
}

/// A socket with everything set that does not depend on the options.
fn open(local: SocketAddr) -> io::Result<Socket> {
    let socket = Socket::new(Domain::for_address(local), Type::DGRAM, Some(Protocol::UDP))?;
    socket.set_nonblocking(true)?;
    let fd = socket.as_fd();
    let any = libc::c_int::from(local.ip().is_unspecified());
    if local.is_ipv4() {
        for (name, value) in [
            (libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_DO),
            (libc::IP_RECVTOS, 1),
            (libc::IP_PKTINFO, any),
        ] {
            sys::set_option(fd, libc::IPPROTO_IP, name, value)?;
        }
    } else {
        for (level, name, value) in [
            (libc::IPPROTO_IPV6, libc::IPV6_V6ONLY, 1),
            (libc::IPPROTO_IPV6, libc::IPV6_MTU_DISCOVER, libc::IPV6_PMTUDISC_DO),
            (libc::IPPROTO_IPV6, libc::IPV6_RECVTCLASS, 1),
            (libc::IPPROTO_IPV6, libc::IPV6_RECVPKTINFO, any),
            // rxe sends checksum 0, over IPv6 too.
            (libc::SOL_UDP, libc::UDP_NO_CHECK6_RX, 1),
        ] {
            sys::set_option(fd, level, name, value)?;
        }
    }
    Ok(socket)
}

fn no_checksum(socket: BorrowedFd<'_>, v6: bool) -> io::Result<()> {
    if v6 {
        sys::set_option(socket, libc::SOL_UDP, libc::UDP_NO_CHECK6_TX, 1)
    } else {
        sys::set_option(socket, libc::SOL_SOCKET, libc::SO_NO_CHECK, 1)
    }
}

fn bind_error(addr: SocketAddr, source: io::Error) -> Error {
    let context = match source.kind() {
        io::ErrorKind::AddrInUse => {
            format!("cannot bind UDP {addr}: {}", holder::describe(addr))
        }
        io::ErrorKind::AddrNotAvailable => format!(
            "cannot bind UDP {addr}: no interface of this host has this address (`ip addr` lists them)"
        ),
        io::ErrorKind::InvalidInput if is_link_local(addr.ip()) => format!(
            "cannot bind UDP {addr}: a link-local address needs its interface, as in fe80::1%eth0"
        ),
        io::ErrorKind::PermissionDenied => format!(
            "cannot bind UDP {addr}: ports below {} are for root; take a higher one",
            std::fs::read_to_string("/proc/sys/net/ipv4/ip_unprivileged_port_start")
                .map_or_else(|_| "1024".to_owned(), |text| text.trim().to_owned())
        ),
        _ => format!("cannot bind UDP {addr}"),
    };
    Error::io(context, source)
}

fn is_link_local(ip: IpAddr) -> bool {
    matches!(ip, IpAddr::V6(ip) if ip.is_unicast_link_local())
}

/// How many packets of a train this kernel cuts, tried once by a socket that sends to itself.
fn kernel_max_packets() -> usize {
    static MOST: OnceLock<usize> = OnceLock::new();
    *MOST.get_or_init(|| {
        [Ipv4Addr::LOCALHOST.into(), Ipv6Addr::LOCALHOST.into()]
            .into_iter()
            .find_map(|ip: IpAddr| probe(ip).ok())
            .unwrap_or_else(max_packets_untried)
    })
}

fn probe(ip: IpAddr) -> io::Result<usize> {
    let socket = StdSocket::bind((ip, 0))?;
    socket.set_nonblocking(true)?;
    let to = socket.local_addr()?;
    let octets = [0; MAX_PACKETS_NEW];
    for packets in [MAX_PACKETS_NEW, MAX_PACKETS_EVER] {
        let envelope = Envelope::new(to, None, None, Some(1));
        let train = std::iter::once(Piece::Bytes(&octets[..packets]));
        let sent =
            Gather::default().send_datagrams(&socket, &envelope, 1, 0, train, |_| unreachable!());
        // A kernel that does not know the option takes it for nothing and sends one datagram.
        if sent.is_ok() && socket.recv(&mut [0; MAX_PACKETS_NEW])? == 1 {
            return Ok(packets);
        }
    }
    // A single packet tells whether the way to itself is there at all.
    socket.send_to(&[0], to)?;
    Ok(1)
}

/// Without loopback: every kernel that knows the option cuts 64.
fn max_packets_untried() -> usize {
    let known = Socket::new(Domain::IPV4, Type::DGRAM, Some(Protocol::UDP))
        .is_ok_and(|s| sys::set_option(s.as_fd(), libc::SOL_UDP, libc::UDP_SEGMENT, 1400).is_ok());
    if known { MAX_PACKETS_EVER } else { 1 }
}

trait WithScope {
    /// With the interface of `other`, where both are IPv6.
    fn with_scope_of(self, other: SocketAddr) -> Self;
}

impl WithScope for SocketAddr {
    fn with_scope_of(mut self, other: SocketAddr) -> Self {
        if let (Self::V6(this), Self::V6(other)) = (&mut self, other) {
            this.set_scope_id(other.scope_id());
        }
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mr::{Mr, Region};
    use std::{
        net::{SocketAddrV4, SocketAddrV6},
        time::{Duration, Instant},
    };
    use userdma_proto::{
        mem::PdId,
        verbs::Access,
        wire::ids::{LKey, Qpn},
    };

    const V4: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);
    const V6: IpAddr = IpAddr::V6(Ipv6Addr::LOCALHOST);

    /// What ends in a network namespace without IPv6 is not tested there.
    fn families() -> impl Iterator<Item = IpAddr> {
        let v6 = StdSocket::bind((V6, 0)).is_ok();
        if !v6 {
            eprintln!("SKIPPED over IPv6: this host has no ::1");
        }
        [V4, V6].into_iter().take(1 + usize::from(v6))
    }

    fn bind(ip: IpAddr, options: &UdpOptions) -> UdpSocket {
        UdpSocket::bind(SocketAddr::new(ip, 0), options).unwrap()
    }

    fn default(ip: IpAddr) -> UdpSocket {
        bind(ip, &UdpOptions::default())
    }

    fn plain(ip: IpAddr) -> StdSocket {
        let socket = StdSocket::bind((ip, 0)).unwrap();
        socket.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        socket
    }

    fn route(to: SocketAddr, segment: usize) -> Route {
        Route { to, from: None, tos: ECT_0, segment }
    }

    /// Octets that repeat late, so that a swap of packets shows.
    fn octets(n: usize) -> Vec<u8> {
        (0..n as u64).map(|i| (i.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 56) as u8).collect()
    }

    struct Host(Arc<Table>, Scope);

    impl Host {
        fn new() -> Self {
            let table = Table::new();
            let pd = table.alloc_pd();
            Self(table, Scope { pd, qpn: Qpn(7) })
        }

        fn register(&self, octets: &[u8]) -> Mr {
            self.0.register(self.1.pd, Region::from_vec(octets.to_vec()), Access::empty()).unwrap()
        }

        /// All of a train, by as many calls as it takes.
        fn send<'p>(
            &self,
            socket: &mut UdpSocket,
            route: &Route,
            pieces: impl Iterator<Item = Piece<'p>> + Clone,
        ) -> usize {
            let len: usize = pieces.clone().map(|piece| piece.len()).sum();
            let (mut sent, mut calls) = (0, 0);
            while sent < len {
                sent += socket.send_train(route, pieces.clone(), sent, &self.0, self.1).unwrap();
                calls += 1;
            }
            assert_eq!(sent, len);
            calls
        }

        fn send_octets(&self, socket: &mut UdpSocket, route: &Route, octets: &[u8]) -> usize {
            self.send(socket, route, std::iter::once(Piece::Bytes(octets)))
        }
    }

    /// The next `n` packets, and what stood beside the last.
    fn receive(socket: &mut UdpSocket, n: usize) -> (Vec<Vec<u8>>, SocketAddr, IpAddr, u8) {
        let mut scratch = Scratch::new();
        let mut packets = Vec::new();
        let late = Instant::now() + Duration::from_secs(10);
        loop {
            match socket.recv_batch(&mut scratch).unwrap() {
                Some(datagram) => {
                    packets.extend(datagram.packets().map(<[u8]>::to_vec));
                    if packets.len() >= n {
                        return (packets, datagram.from, datagram.to, datagram.ecn);
                    }
                }
                None => {
                    assert!(Instant::now() < late, "{} of {n} packets arrived", packets.len());
                    std::thread::yield_now();
                }
            }
        }
    }

    /// The shapes of trains: octets of a packet, packets, octets of the last.
    fn shapes() -> Vec<(usize, usize, usize)> {
        let mut shapes: Vec<_> = (1..=128).map(|packets| (40, packets, 40)).collect();
        shapes.extend([
            (4112, 15, 4112),
            (4112, 15, 20),
            (4128, 2, 4112),
            (4096 + 32, 1, 4096 + 32),
            (2064, 31, 1),
            (1040, 62, 1040),
            (272, 128, 271),
            (511, 128, 511),
            (1, 128, 1),
            (4367, 15, 4367),
            (512, 128, 483),
            // The largest that fits lo over IPv6.
            (65_488, 1, 65_488),
            (65_488, 2, 19),
        ]);
        shapes
    }

    #[test]
    fn trains_arrive_whole_and_cut_where_they_were_joined() {
        let host = Host::new();
        for ip in families() {
            let mut joining = default(ip);
            let mut single = bind(ip, &UdpOptions { join: false, ..UdpOptions::default() });
            let cut = plain(ip);
            for max_packets in [128, 1] {
                let mut sender = bind(ip, &UdpOptions { max_packets, ..UdpOptions::default() });
                for (segment, packets, last) in shapes() {
                    if packets > sender.max_packets() && sender.max_packets() > 1 {
                        eprintln!(
                            "SKIPPED {packets} packets: this kernel cuts {}",
                            sender.max_packets()
                        );
                        continue;
                    }
                    let train = octets(segment * (packets - 1) + last);
                    let expected: Vec<_> = train.chunks(segment).collect();
                    let before = sender.stats();
                    for to in [joining.local_addr(), single.local_addr(), cut.local_addr().unwrap()]
                    {
                        let calls = host.send_octets(&mut sender, &route(to, segment), &train);
                        assert!(sender.max_packets() == 1 || calls == 1);
                    }
                    let stats = sender.stats();
                    assert_eq!(stats.sent_octets - before.sent_octets, 3 * train.len() as u64);
                    let calls = if sender.max_packets() == 1 { packets as u64 } else { 1 };
                    assert_eq!(stats.sends - before.sends, 3 * calls, "{segment} x {packets}");
                    for receiver in [&mut joining, &mut single] {
                        let (got, from, to, ecn) = receive(receiver, packets);
                        assert!(got == expected, "{segment} x {packets} of {ip}");
                        assert_eq!((from, to, ecn), (sender.local_addr(), ip, ECT_0));
                    }
                    // The judge that is not ours: a socket without any option.
                    let mut got = vec![0; 1 << 16];
                    for packet in expected {
                        let n = cut.recv(&mut got).unwrap();
                        assert_eq!(&got[..n], packet);
                    }
                }
            }
        }
    }

    #[test]
    fn a_train_is_one_reception_where_the_kernel_joins() {
        let host = Host::new();
        for ip in families() {
            let (mut sender, mut receiver) = (default(ip), default(ip));
            if sender.max_packets() < 15 {
                eprintln!("SKIPPED: this kernel cuts no trains");
                return;
            }
            let train = octets(15 * 4112);
            host.send_octets(&mut sender, &route(receiver.local_addr(), 4112), &train);
            let (packets, ..) = receive(&mut receiver, 15);
            assert_eq!(packets.concat(), train);
            let stats = receiver.stats();
            assert_eq!((stats.receptions, stats.received_octets), (1, 15 * 4112));
        }
    }

    #[test]
    fn ecn_bits_cross_and_dscp_does_not_disturb_them() {
        let host = Host::new();
        for ip in families() {
            let (mut sender, mut receiver) = (default(ip), default(ip));
            for tos in [0, 1, ECT_0, CE, 26 << 2 | ECT_0, 0xff, 0xfc] {
                for packets in [1, 8] {
                    let route = Route { tos, ..route(receiver.local_addr(), 300) };
                    host.send_octets(&mut sender, &route, &octets(300 * packets));
                    let (_, _, _, ecn) = receive(&mut receiver, packets);
                    assert_eq!(ecn, tos & 3, "tos {tos:#x}, {packets} packets over {ip}");
                }
            }
        }
    }

    #[test]
    fn a_udp_checksum_of_zero_arrives() {
        let host = Host::new();
        for ip in families() {
            let mut sender = bind(ip, &UdpOptions { zero_checksum: true, ..UdpOptions::default() });
            assert_eq!(sender.max_packets(), 1, "the kernel cuts only what has a checksum");
            let mut receiver = default(ip);
            let other = plain(ip);
            other.set_nonblocking(true).unwrap();
            for to in [other.local_addr().unwrap(), receiver.local_addr()] {
                host.send_octets(&mut sender, &route(to, 60), b"no checksum");
            }
            assert_eq!(receive(&mut receiver, 1).0, [b"no checksum"]);
            // Over IPv6 a socket without our option takes none of it: so it was 0 indeed.
            let taken = other.recv(&mut [0; 60]).map_err(|e| e.kind());
            let expected = if ip.is_ipv6() { Err(io::ErrorKind::WouldBlock) } else { Ok(11) };
            assert_eq!(taken, expected);
        }
    }

    #[test]
    fn the_buffers_are_what_the_system_granted() {
        let limit = |name| {
            let text = std::fs::read_to_string(format!("/proc/sys/net/core/{name}_max"));
            text.ok().and_then(|text| text.trim().parse::<usize>().ok())
        };
        for asked in [64 << 10, 4 << 20, 1 << 30] {
            let options =
                UdpOptions { recv_buffer: asked, send_buffer: asked, ..UdpOptions::default() };
            let socket = bind(V4, &options);
            // socket(7): the kernel doubles what it is asked for.
            for (granted, name) in [(socket.recv_buffer(), "rmem"), (socket.send_buffer(), "wmem")]
            {
                match limit(name) {
                    Some(most) => assert_eq!(granted, 2 * asked.min(most), "{name}, {asked} asked"),
                    // Newer kernels show it only to the first network namespace.
                    None => assert!(granted > 0 && granted <= 2 * asked),
                }
            }
        }
    }

    #[test]
    fn a_taken_port_says_who_has_it_and_what_helps() {
        let error = |addr| UdpSocket::bind(addr, &UdpOptions::default()).unwrap_err().to_string();
        let name = std::fs::read_to_string("/proc/self/comm").unwrap();
        let me = format!("{} (process {})", name.trim_end(), std::process::id());
        for ip in families() {
            let holder = default(ip);
            let at = holder.local_addr();
            let text = error(at);
            assert!(text.contains(&format!("{at} is held by {me}")), "{text}");
            assert!(text.contains("another address") && text.contains("--udp-port N"), "{text}");
            let everywhere = SocketAddr::new(
                if at.is_ipv4() {
                    Ipv4Addr::UNSPECIFIED.into()
                } else {
                    Ipv6Addr::UNSPECIFIED.into()
                },
                at.port(),
            );
            let text = error(everywhere);
            assert!(text.contains(&me) && !text.contains("another address"), "{text}");
        }
        let text = error("192.0.2.1:4791".parse().unwrap());
        assert!(text.contains("no interface of this host"), "{text}");
        let text = error("[fe80::1]:0".parse().unwrap());
        assert!(text.contains("fe80::1%eth0") || text.contains("no interface"), "{text}");
    }

    #[test]
    fn one_port_at_two_addresses_is_two_sockets() {
        let host = Host::new();
        let second = |port| {
            UdpSocket::bind(
                SocketAddrV4::new(Ipv4Addr::new(127, 0, 0, 2), port).into(),
                &UdpOptions::default(),
            )
        };
        // Another program may have that port at 127.0.0.2.
        let (mut one, mut two) = (0..100)
            .find_map(|_| {
                let one = default(V4);
                second(one.local_addr().port()).ok().map(|two| (one, two))
            })
            .unwrap();
        assert_eq!(one.local_addr().port(), two.local_addr().port());
        host.send_octets(&mut one, &route(two.local_addr(), 9), b"to two");
        host.send_octets(&mut two, &route(one.local_addr(), 9), b"to one");
        let (packets, from, to, _) = receive(&mut one, 1);
        assert_eq!((packets, from, to), (vec![b"to one".to_vec()], two.local_addr(), V4));
        assert_eq!(receive(&mut two, 1).1, one.local_addr());
    }

    #[test]
    fn a_socket_of_all_addresses_knows_which_one_was_meant() {
        let host = Host::new();
        for (any, ip) in [
            (IpAddr::V4(Ipv4Addr::UNSPECIFIED), IpAddr::V4(Ipv4Addr::new(127, 0, 0, 3))),
            (Ipv6Addr::UNSPECIFIED.into(), V6),
        ] {
            if families().all(|family| family.is_ipv4() != ip.is_ipv4()) {
                continue;
            }
            let (mut server, mut client) =
                (default(any), default(if ip.is_ipv4() { V4 } else { ip }));
            let at = SocketAddr::new(ip, server.local_addr().port());
            host.send_octets(&mut client, &route(at, 100), &octets(300));
            let (_, from, to, ecn) = receive(&mut server, 3);
            assert_eq!((from, to, ecn), (client.local_addr(), ip, ECT_0));
            // The answer comes from where the question went.
            let back = Route { from: Some(to), ..route(from, 100) };
            host.send_octets(&mut server, &back, &octets(250));
            let (packets, from, ..) = receive(&mut client, 3);
            assert_eq!((packets.concat(), from), (octets(250), at));
        }
    }

    #[test]
    fn regions_go_out_as_they_are() {
        let host = Host::new();
        let payload = octets(64 << 10);
        let mr = host.register(&payload);
        let heads = octets(128 * 16);
        for ip in families() {
            for max_packets in [128, 1] {
                let (mut sender, mut receiver) =
                    (bind(ip, &UdpOptions { max_packets, ..UdpOptions::default() }), default(ip));
                for (packets, piece) in [
                    (1, 1),
                    (1, 1025),
                    (15, 4096),
                    (31, 2048),
                    (61, 1025),
                    (62, 1000),
                    (64, 9),
                    (3, 0),
                ] {
                    // From an odd place, as a program may ask for.
                    let at = |i: usize| 3 + i * piece;
                    let train: Vec<_> = (0..packets)
                        .flat_map(|i| {
                            let sge = Sge::new(at(i) as u64, piece as u32, mr.lkey());
                            [
                                Piece::Bytes(&heads[i * 16..][..12]),
                                Piece::Region(sge),
                                Piece::Bytes(&heads[i * 16 + 12..][..4]),
                            ]
                        })
                        .collect();
                    let route = route(receiver.local_addr(), 16 + piece);
                    host.send(&mut sender, &route, train.iter().copied());
                    let (got, ..) = receive(&mut receiver, packets);
                    assert_eq!(got.len(), packets);
                    for (i, packet) in got.iter().enumerate() {
                        let (head, rest) = packet.split_at(12);
                        let (body, tail) = rest.split_at(piece);
                        assert_eq!(head, &heads[i * 16..][..12]);
                        assert!(body == &payload[at(i)..][..piece], "packet {i} of {packets}");
                        assert_eq!(tail, &heads[i * 16 + 12..][..4]);
                    }
                }
            }
        }
    }

    #[test]
    fn a_train_of_too_many_pieces_is_still_one_train() {
        let host = Host::new();
        let payload = octets(4096);
        let mr = host.register(&payload);
        let (mut sender, mut receiver) = (default(V4), default(V4));
        let train: Vec<_> = (0..4000)
            .map(|i| match i % 2 {
                0 => Piece::Region(Sge::new(i, 1, mr.lkey())),
                _ => Piece::Bytes(&payload[i as usize..][..1]),
            })
            .collect();
        let route = route(receiver.local_addr(), 100);
        let calls = host.send(&mut sender, &route, train.iter().copied());
        assert!(calls == 1 || sender.max_packets() == 1);
        let (got, ..) = receive(&mut receiver, 40);
        assert_eq!((got.len(), got.concat()), (40, payload[..4000].to_vec()));
        mr.deregister();
        let gone = sender.send_train(&route, train.iter().copied(), 0, &host.0, host.1);
        assert!(matches!(gone, Err(SendError::Revoked)), "{gone:?}");
    }

    #[test]
    fn nothing_of_a_revoked_region_is_sent() {
        for len in [100, 2000] {
            let host = Host::new();
            let mr = host.register(&octets(len));
            let (mut sender, mut receiver) = (default(V4), default(V4));
            let train = [Piece::Bytes(b"head"), Piece::Region(Sge::new(0, len as u32, mr.lkey()))];
            let route = route(receiver.local_addr(), 4 + len);
            let mut send = |scope| sender.send_train(&route, train.into_iter(), 0, &host.0, scope);
            let stranger = Scope { pd: PdId(99), qpn: Qpn(7) };
            assert!(matches!(send(stranger), Err(SendError::Revoked)));
            assert!(matches!(send(host.1), Ok(n) if n == 4 + len));
            mr.deregister();
            assert!(matches!(send(host.1), Err(SendError::Revoked)));
            let (packets, ..) = receive(&mut receiver, 1);
            assert_eq!(packets.len(), 1);
            assert_eq!(receiver.recv_batch(&mut Scratch::new()).unwrap(), None);
        }
    }

    #[test]
    fn large_regions_are_not_copied_and_small_ones_are() {
        for (piece, copied) in [(1, true), (1024, true), (1025, false), (4096, false)] {
            let mut shape = Shape::default();
            for _ in 0..15 {
                shape.add(&Piece::Bytes(&[0; 16]));
                shape.add(&Piece::Region(Sge::new(0, piece, LKey(1))));
            }
            assert_eq!(shape.copy(), copied, "{piece}");
        }
        // Without regions there is nothing to gain, until the kernel takes no more pieces.
        let mut shape = Shape::default();
        for _ in 0..1024 {
            shape.add(&Piece::Bytes(b"x"));
        }
        assert!(!shape.copy());
        shape.add(&Piece::Bytes(b"x"));
        assert!(shape.copy());
    }

    #[test]
    fn what_is_no_train_is_refused_and_says_why() {
        let host = Host::new();
        let mut socket = default(V4);
        let to = socket.local_addr();
        let many = octets(70_000);
        let mut refused = |route: Route, octets: &[u8], sent, why: &str| {
            let pieces = std::iter::once(Piece::Bytes(octets));
            let e = socket.send_train(&route, pieces, sent, &host.0, host.1).unwrap_err();
            assert!(matches!(e, SendError::Invalid(_)) && e.to_string().contains(why), "{e}");
        };
        refused(route(to, 100), &[], 0, "nothing to send");
        refused(route(to, 0), b"x", 0, "nothing to send");
        refused(route(to, 1), b"x", 1, "nothing to send");
        refused(route(to, 1000), &many[..65_508], 0, "65507 octets are the most");
        refused(route(to, 65_508), &many[..65_508], 0, "65507 octets are the most");
        refused(route(to, 1), &many[..129], 0, "129 packets");
        refused(route(to, 10), &many[..100], 10, "by one call");
        let v6 = SocketAddrV6::new(Ipv6Addr::LOCALHOST, 1, 0, 0).into();
        refused(route(v6, 10), b"x", 0, "families");
        refused(Route { from: Some(V6), ..route(to, 10) }, b"x", 0, "families");
        assert_eq!(socket.stats(), UdpStats::default());
    }

    #[test]
    fn an_error_of_the_call_itself_is_told_and_not_counted() {
        let host = Host::new();
        let mut socket = default(V4);
        // No host: the system says EACCES for a broadcast, unless it was asked for.
        let to = "255.255.255.255:4791".parse().unwrap();
        let pieces = std::iter::once(Piece::Bytes(b"x"));
        let e = socket.send_train(&route(to, 1), pieces, 0, &host.0, host.1).unwrap_err();
        assert!(matches!(e, SendError::Io { to: t, .. } if t == to), "{e}");
        assert_eq!(socket.stats(), UdpStats::default());
    }

    #[test]
    fn what_the_network_brings_back_is_counted_and_stops_nothing() {
        let host = Host::new();
        let mut socket = default(V4);
        // Without this option Linux tells an unconnected socket nothing at all.
        sys::set_option(socket.socket.as_fd(), libc::IPPROTO_IP, libc::IP_RECVERR, 1).unwrap();
        let nobody = plain(V4).local_addr().unwrap();
        let mut receiver = default(V4);
        host.send_octets(&mut socket, &route(nobody, 50), b"anybody?");
        host.send_octets(&mut socket, &route(receiver.local_addr(), 50), b"you?");
        assert_eq!(receive(&mut receiver, 1).0, [b"you?"]);
        assert_eq!(socket.stats().icmp_errors, 1);
        host.send_octets(&mut socket, &route(nobody, 50), b"anybody?");
        host.send_octets(&mut receiver, &route(socket.local_addr(), 50), b"me");
        assert_eq!(receive(&mut socket, 1).0, [b"me"]);
        assert_eq!((socket.stats().icmp_errors, socket.stats().sends), (2, 3));
    }

    #[test]
    fn what_is_longer_than_the_scratch_is_dropped_and_counted() {
        let host = Host::new();
        let (mut sender, mut receiver) = (default(V4), default(V4));
        let to = route(receiver.local_addr(), 200);
        for len in [101, 100] {
            host.send_octets(&mut sender, &to, &octets(len));
        }
        let mut scratch = Scratch::with_size(100);
        let got = receiver.recv_batch(&mut scratch).unwrap().unwrap();
        assert_eq!(got.octets, octets(100));
        assert_eq!((receiver.stats().truncated, receiver.stats().receptions), (1, 1));
    }

    #[test]
    fn an_empty_datagram_has_no_packets() {
        let mut receiver = default(V4);
        plain(V4).send_to(&[], receiver.local_addr()).unwrap();
        let mut scratch = Scratch::new();
        let got = receiver.recv_batch(&mut scratch).unwrap().unwrap();
        assert_eq!((got.packets().len(), got.octets.len()), (0, 0));
    }

    #[test]
    fn packets_that_found_the_buffer_full_are_counted() {
        let host = Host::new();
        let mut sender = default(V4);
        let mut receiver = bind(V4, &UdpOptions { recv_buffer: 16 << 10, ..UdpOptions::default() });
        let to = route(receiver.local_addr(), 1000);
        for _ in 0..200 {
            host.send_octets(&mut sender, &to, &octets(1000));
        }
        let mut scratch = Scratch::new();
        let mut arrived = 0;
        while receiver.recv_batch(&mut scratch).unwrap().is_some() {
            arrived += 1;
        }
        // The kernel tells with the next that finds room.
        host.send_octets(&mut sender, &to, b"tell");
        receive(&mut receiver, 1);
        assert!(arrived > 0 && arrived < 200, "{arrived}");
        assert_eq!(receiver.stats().overflows, 200 - arrived);
    }

    #[test]
    fn the_largest_rdma_mtu_leaves_room_for_the_headers() {
        for (route, expected) in [
            (65_536, Some(4096)),
            (4176, Some(4096)),
            (4175, Some(2048)),
            (2128, Some(2048)),
            (1500, Some(1024)),
            (1103, Some(512)),
            (576, Some(256)),
            (336, Some(256)),
            (335, None),
            (0, None),
        ] {
            assert_eq!(largest_rdma_mtu(route), expected, "MTU {route}");
        }
    }

    #[test]
    fn the_mtu_of_the_route_is_that_of_its_link() {
        let lo = std::fs::read_to_string("/sys/class/net/lo/mtu").unwrap();
        for ip in families() {
            let socket = default(ip);
            let mtu = socket.path_mtu(socket.local_addr()).unwrap();
            // An IPv4 packet has a length of 16 bits.
            let most = if ip.is_ipv4() { 65_535 } else { usize::MAX };
            assert_eq!(mtu, lo.trim().parse::<usize>().unwrap().min(most), "{ip}");
        }
    }

    #[test]
    fn a_packet_that_does_not_fit_the_route_names_both_sizes() {
        let to = "192.0.2.1:4791".parse().unwrap();
        let text = SendError::TooBig { packet: 4144, mtu: 1500, to }.to_string();
        for part in ["4144 octets", "192.0.2.1:4791", "MTU is 1500", "`--mtu`, 1024 at most"] {
            assert!(text.contains(part), "{text}");
        }
        let host = Host::new();
        // By lo, whose 65,536 octets are too few for this packet over IPv6.
        if families().any(|ip| ip.is_ipv6()) {
            let mut socket = default(V6);
            let to = socket.local_addr();
            let (train, mtu) = (octets(MAX_TRAIN), socket.path_mtu(to).unwrap());
            let pieces = std::iter::once(Piece::Bytes(&train));
            let e = socket.send_train(&route(to, MAX_TRAIN), pieces, 0, &host.0, host.1);
            assert!(
                matches!(e, Err(SendError::TooBig { packet: 65_555, mtu: m, .. }) if m == mtu),
                "{e:?}"
            );
        }
        // By the default route: to TEST-NET-1, and no packet leaves.
        let mut socket = default(Ipv4Addr::UNSPECIFIED.into());
        let mtu = match socket.path_mtu(to) {
            Ok(mtu) if mtu < 60_000 => mtu,
            other => return eprintln!("SKIPPED: no route with a small MTU: {other:?}"),
        };
        for packets in [1, 2] {
            let train = octets((mtu + 1 - 28) * packets);
            let pieces = std::iter::once(Piece::Bytes(&train));
            let e = socket
                .send_train(&route(to, mtu + 1 - 28), pieces, 0, &host.0, host.1)
                .unwrap_err();
            assert!(
                matches!(e, SendError::TooBig { packet, mtu: m, .. } if packet == mtu + 1 && m == mtu),
                "{packets}: {e}"
            );
        }
    }

    #[test]
    fn errors_of_the_system_are_told_apart() {
        for (errno, expected) in [
            (libc::EAGAIN, Verdict::Full),
            (libc::ECONNREFUSED, Verdict::Icmp),
            (libc::EHOSTUNREACH, Verdict::Icmp),
            (libc::EPERM, Verdict::Lost),
            (libc::ENOBUFS, Verdict::Lost),
            (libc::EIO, Verdict::NoCutting),
            (libc::EMSGSIZE, Verdict::TooBig),
            (libc::EINVAL, Verdict::Other),
            (libc::EBADF, Verdict::Other),
        ] {
            assert_eq!(verdict(&io::Error::from_raw_os_error(errno)), expected, "{errno}");
        }
    }

    #[tokio::test]
    async fn a_sleeper_is_woken_by_a_train() {
        let host = Host::new();
        let (mut sender, mut receiver) = (default(V4), default(V4));
        let watch = receiver.watch().unwrap();
        assert!(watch.writable().await.is_ok() && receiver.is_writable());
        let mut scratch = Scratch::new();
        assert_eq!(receiver.recv_batch(&mut scratch).unwrap(), None);
        let to = route(receiver.local_addr(), 500);
        let sleeper = tokio::spawn(async move {
            let mut got = Vec::new();
            while got.len() < 5000 {
                let mut ready = watch.readable().await.unwrap();
                match receiver.recv_batch(&mut scratch).unwrap() {
                    Some(datagram) => got.extend_from_slice(datagram.octets),
                    None => ready.clear_ready(),
                }
            }
            got
        });
        tokio::task::yield_now().await;
        host.send_octets(&mut sender, &to, &octets(5000));
        assert_eq!(sleeper.await.unwrap(), octets(5000));
    }
}
