//! Settings, requests, events and counters of a port.

use alloc::boxed::Box;
use core::net::{IpAddr, SocketAddr};

use crate::{
    mem::Scope,
    roce::{
        ModifyError, PathMtu, Reason, Window,
        cm::{self, Awaited, CmError, ConnId, Ended, Established, Rejected},
        congestion::DcqcnError,
    },
    verbs::{PostError, QpState, QpType},
    wire::ids::Qpn,
};

/// What becomes of a packet whose ICRC is not found good.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum IcrcPolicy {
    /// It is dropped.
    #[default]
    Strict,
    /// It is taken all the same. Octets that were changed on the way end in memory: for peers
    /// whose ICRC is known to be wrong, and for nothing else.
    Lenient,
}

/// Settings of a port.
#[derive(Debug, Clone)]
pub struct Config {
    /// Our UDP socket. The address may be the one that stands for all; what it is toward a peer is
    /// then learnt from the peer's packets, or told by the program.
    pub local: SocketAddr,
    /// What becomes of packets whose ICRC is not good.
    pub icrc: IcrcPolicy,
    /// The largest path MTU that our side of any route takes. Requests for a larger one are
    /// rejected with this one (reason 26).
    pub max_mtu: PathMtu,
    /// Queue pairs there may be, at most 65,536.
    pub max_qps: usize,
    /// Peers of which something is remembered. One more, and the one not heard of goes.
    pub max_peers: usize,
    /// Octets that our socket's receive buffer holds: told to userdma peers, and how much all queue
    /// pairs together ask for by READs at a time.
    pub window: u32,
    /// How much each queue pair has on the way to a peer that has not told its own window. All that
    /// go to the same socket of such a peer together have no more octets on the way than one.
    pub stranger: Window,
    /// What our token says of packets out of order: where the peer's says the same, both keep them, and
    /// send again only what is missing ([`QpAttr::out_of_order`](crate::roce::QpAttr::out_of_order)).
    pub out_of_order: bool,
    /// Octets that packets out of order take, those of all queue pairs together, at most. Of one queue
    /// pair there is [`max_kept_octets`](crate::roce::Config::max_kept_octets).
    pub max_kept_octets: usize,
    /// Settings of the connection manager.
    pub cm: cm::Config,
}

impl Config {
    /// The defaults for a socket at `local`: strict, up to 4096 octets of path MTU, 16,384 queue
    /// pairs, 4096 peers, the windows of [`Window::default`], packets out of order kept, 64 MiB of
    /// them. For the seed see [`cm::Config::seed`]; PSNs and queue pair numbers come from it too.
    pub fn new(local: SocketAddr, seed: u64) -> Self {
        Self {
            local,
            icrc: IcrcPolicy::Strict,
            max_mtu: PathMtu::Mtu4096,
            max_qps: 16_384,
            max_peers: 4096,
            window: Window::default().octets,
            stranger: Window::default(),
            out_of_order: true,
            max_kept_octets: 64 << 20,
            cm: cm::Config::new(seed),
        }
    }
}

/// How a receive buffer is used that queue pairs share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Budget {
    /// Octets that may be on the way to it.
    pub octets: u64,
    /// Octets that are, or that are kept for packets that must be able to go. A packet counts 1024 at
    /// least.
    pub used: u64,
    /// Queue pairs that wait for room.
    pub waiting: usize,
}

/// What one call of [`Port::poll_transmit`](super::Port::poll_transmit) may give out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Packets of a train. 1 where the kernel cuts no trains: each packet then has its ICRC for
    /// Identification 0.
    pub max_packets: usize,
    /// Octets of a train, about; one packet goes out whatever it says.
    pub max_octets: usize,
    /// Whether answers to peers go out too. A program that polls gets its requests out first; the
    /// ACKs that it owes follow with its next look, while its peer is at work already.
    pub answers: bool,
}

impl Default for Limits {
    /// What a train can have.
    fn default() -> Self {
        Self {
            max_packets: crate::roce::MAX_TRAIN,
            max_octets: crate::roce::MAX_TRAIN_OCTETS,
            answers: true,
        }
    }
}

/// Where a train goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Destination {
    /// The peer's UDP socket.
    pub to: SocketAddr,
    /// Our own: the ICRC was made for this address, so that it has to be the source's.
    pub from: SocketAddr,
    /// IPv4's type of service or IPv6's traffic class: DSCP, and ECT(0) where the train is
    /// ECN-capable.
    pub tos: u8,
    /// On whose behalf its pieces of registered memory are read.
    pub scope: Scope,
}

/// What [`Port::connect`](super::Port::connect) asks for.
#[derive(Debug, Clone)]
pub struct Connect<'a> {
    /// The peer: its address, and the UDP port at which it listens.
    pub peer: SocketAddr,
    /// The service: [`PortSpace::service_id`](crate::wire::mad::cm::PortSpace::service_id) of the
    /// peer's rdma_cm port.
    pub service_id: u64,
    /// Our address toward it. `None`: that of the socket.
    pub local_ip: Option<IpAddr>,
    /// Our rdma_cm port; told, and of no further use.
    pub local_port: u16,
    /// Path MTU. Not above [`Config::max_mtu`].
    pub mtu: PathMtu,
    /// READs and atomics that we want to have outstanding.
    pub initiator_depth: u8,
    /// READs and atomics of the peer that we serve at a time.
    pub responder_resources: u8,
    /// Code of the time after which a missing acknowledgement is missed, 5 bits; what the peer
    /// says of its delay is added.
    pub ack_timeout: u8,
    /// Retries then, 0 to 7.
    pub retry_count: u8,
    /// How often the peer is to try again where we have no receive, 0 to 7; 7 is for ever.
    pub rnr_retry_count: u8,
    /// Traffic class, or the octet of DSCP and ECN.
    pub traffic_class: u8,
    /// Whether we say that we are userdma ([`Token`](cm::Token)), where there is room.
    pub token: bool,
    /// At most [`cm::Connect::MAX_PRIVATE_DATA`] octets.
    pub private_data: &'a [u8],
}

impl Connect<'_> {
    /// With path MTU 1024, 16 READs and atomics each way, an ACK timeout of 67 ms, 7 retries, RNR
    /// retries for ever, and our token.
    pub fn new(peer: SocketAddr, service_id: u64) -> Self {
        Self {
            peer,
            service_id,
            local_ip: None,
            local_port: 0,
            mtu: PathMtu::Mtu1024,
            initiator_depth: 16,
            responder_resources: 16,
            ack_timeout: 14,
            retry_count: 7,
            rnr_retry_count: 7,
            traffic_class: 0,
            token: true,
            private_data: &[],
        }
    }
}

/// How [`Port::accept`](super::Port::accept) answers a request.
#[derive(Debug, Clone)]
pub struct Accept<'a> {
    /// READs and atomics that we want to have outstanding; the peer's word may lower it.
    pub initiator_depth: u8,
    /// READs and atomics of the peer that we serve at a time. No more than it asks for are told.
    pub responder_resources: u8,
    /// How often the peer is to try again where we have no receive, 0 to 7; 7 is for ever.
    pub rnr_retry_count: u8,
    /// Code of the time until an ACK of ours, 5 bits.
    pub target_ack_delay: u8,
    /// At most [`cm::Accept::MAX_PRIVATE_DATA`] octets.
    pub private_data: &'a [u8],
}

impl Default for Accept<'_> {
    /// 16 READs and atomics each way, RNR retries for ever, an ACK within 4 ms.
    fn default() -> Self {
        Self {
            initiator_depth: 16,
            responder_resources: 16,
            rnr_retry_count: 7,
            target_ack_delay: 10,
            private_data: &[],
        }
    }
}

/// A peer asks for a connection: answer with [`Port::accept`](super::Port::accept) or
/// [`Port::reject`](super::Port::reject).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// Our own socket, as the peer sees it.
    pub local: SocketAddr,
    /// What the peer says.
    pub cm: cm::Request,
}

/// What the program has to know. `qpn` is our own queue pair; where it is an [`Option`] there is
/// none if the request was not accepted.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// A peer asks for a connection.
    Request(Box<Request>),
    /// Data may flow.
    Established {
        /// The queue pair, which is in RTS.
        qpn: Qpn,
        /// What both sides agreed upon, and the private data of the peer's answer.
        terms: Box<Established>,
    },
    /// The peer said no; the queue pair is in error.
    Rejected {
        /// The queue pair.
        qpn: Option<Qpn>,
        /// Why.
        rejected: Rejected,
    },
    /// Something did not come in time; the queue pair is in error.
    TimedOut {
        /// The connection.
        conn: ConnId,
        /// The queue pair.
        qpn: Option<Qpn>,
        /// What.
        awaited: Awaited,
    },
    /// A request was dropped in favour of newer ones, or because its listener is gone; the queue
    /// pair is in error.
    Dropped {
        /// The connection.
        conn: ConnId,
        /// The queue pair.
        qpn: Option<Qpn>,
    },
    /// The connection is over; the queue pair is in error and everything is flushed.
    Disconnected {
        /// The queue pair.
        qpn: Qpn,
        /// How.
        ended: Ended,
    },
    /// The first packet came for a queue pair in RTR that the connection manager knows nothing of.
    FirstPacket {
        /// The queue pair.
        qpn: Qpn,
    },
    /// SQD: everything that was begun is done.
    Drained {
        /// The queue pair.
        qpn: Qpn,
    },
    /// The queue pair went to the error state without anybody asking for it; everything is
    /// flushed. A connection stays until it is disconnected.
    QpError {
        /// The queue pair.
        qpn: Qpn,
        /// Why.
        reason: Reason,
    },
    /// Of UD services: [`cm::Event::Resolved`], [`cm::Event::Unresolved`],
    /// [`cm::Event::Queried`].
    Service(cm::Event),
}

/// Why a call did nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PortError {
    /// There is no such queue pair, or no longer.
    #[error("there is no queue pair {0}")]
    UnknownQp(Qpn),
    /// No more queue pairs ([`Config::max_qps`]).
    #[error("{0} queue pairs are open, and no more are allowed")]
    TooManyQps(usize),
    /// Only RC and UC have connections, and the peer names one of them.
    #[error("queue pair {qpn} is of type {found:?}, and cannot have this connection")]
    Type {
        /// The queue pair.
        qpn: Qpn,
        /// What it is.
        found: QpType,
    },
    /// A connection is made from RESET or INIT.
    #[error("queue pair {qpn} is in state {state:?}; a connection begins in RESET or INIT")]
    State {
        /// The queue pair.
        qpn: Qpn,
        /// What it is in.
        state: QpState,
    },
    /// It has one already.
    #[error("queue pair {0} has a connection already")]
    Connected(Qpn),
    /// It has none.
    #[error("queue pair {0} has no connection")]
    NotConnected(Qpn),
    /// Larger than our side takes.
    #[error("path MTU {asked} is asked for, but no more than {max} fits here")]
    Mtu {
        /// What was asked for.
        asked: u32,
        /// What fits.
        max: u32,
    },
    /// A field of a few bits.
    #[error("{field} is {found}, at most {max} is allowed")]
    Range {
        /// Its name.
        field: &'static str,
        /// What it is.
        found: u8,
        /// What it may be.
        max: u8,
    },
    /// The socket is bound to all addresses, and none was given.
    #[error("our own address toward {0} is not known: say it")]
    NoLocalAddress(IpAddr),
    /// The parameters of congestion control make no sense.
    #[error(transparent)]
    Dcqcn(#[from] DcqcnError),
    /// What the connection manager says.
    #[error(transparent)]
    Cm(#[from] CmError),
    /// What the queue pair says of attributes.
    #[error(transparent)]
    Modify(#[from] ModifyError),
    /// What the queue pair says of a work request.
    #[error(transparent)]
    Post(#[from] PostError),
}

/// Counters of a port. A packet that is dropped counts in exactly one of those that say why.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Stats {
    /// Packets handed in.
    pub received: u64,
    /// Octets of them, from BTH to ICRC.
    pub received_octets: u64,
    /// Packets with a good ICRC.
    pub icrc_good: u64,
    /// Packets with a wrong one.
    pub icrc_bad: u64,
    /// Packets whose ICRC is good only if IPv4's DF is not what the peer is known to send.
    pub icrc_other_df: u64,
    /// Packets whose ICRC cannot be checked: the address that they came to is not known.
    pub icrc_unknown: u64,
    /// How many of these three were taken all the same ([`IcrcPolicy::Lenient`]).
    pub icrc_lenient: u64,
    /// Peers of which DF became known.
    pub df_learnt: u64,
    /// Peers of which it turned out to be the other one.
    pub df_relearnt: u64,
    /// Dropped: no packet.
    pub malformed: u64,
    /// Dropped: TVer is not 0.
    pub bad_version: u64,
    /// Dropped: of another partition.
    pub bad_pkey: u64,
    /// Dropped: for a queue pair that there is not.
    pub unknown_qp: u64,
    /// Dropped: an opcode of another transport service than the queue pair's.
    pub wrong_type: u64,
    /// Dropped: the queue pair is in RESET or INIT.
    pub not_ready: u64,
    /// Dropped: not from the address that the queue pair is connected to.
    pub wrong_peer: u64,
    /// Dropped: for QP 1, but no datagram with a MAD and QP 1's Q_Key.
    pub bad_mad: u64,
    /// MADs given to the connection manager.
    pub mads_received: u64,
    /// Congestion notifications for a queue pair, from its peer.
    pub cnps_received: u64,
    /// Congestion notifications given out.
    pub cnps_sent: u64,
    /// Requests rejected because their path MTU is too large.
    pub mtu_rejected: u64,
    /// Requests rejected because too many events wait for the program.
    pub crowded: u64,
    /// Trains given out, single packets included.
    pub trains_sent: u64,
    /// Packets given out.
    pub packets_sent: u64,
    /// Octets of them.
    pub sent_octets: u64,
    /// MADs that were dropped, because our own address toward their peer is not known.
    pub unroutable: u64,
}
