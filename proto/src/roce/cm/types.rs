//! Settings, requests, events and counters of the connection manager.

use alloc::vec::Vec;
use core::{
    fmt,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use super::Token;
use crate::wire::{
    ids::{PKey, Psn, QKey, Qpn},
    mad::cm::{IpCm, Path, Reason, Rej, Rep, Req, SidrRep, SidrReq, mtu},
    roce::UDP_PORT,
};

/// Name of a connection, or of a question for a UD service, for as long as the manager lives:
/// none is given out twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ConnId(pub u64);

impl fmt::Display for ConnId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "#{}", self.0)
    }
}

/// Settings of a connection manager.
#[derive(Debug, Clone)]
pub struct Config {
    /// Seeds communication IDs, transaction IDs and flow labels: draw it from the system's
    /// generator, so that strangers cannot guess them.
    pub seed: u64,
    /// GUID of the adapter, as REQ and REP name it.
    pub ca_guid: u64,
    /// UDP port of a peer that has not told another one by its [`Token`]. The source port of its
    /// MADs never counts: rxe's is 55410, and it listens at 4791.
    pub peer_udp_port: u16,
    /// Code of the time in which each side is to answer ([`timeout`](crate::wire::mad::cm::timeout)).
    /// Linux says 20, 4.3 s.
    pub response_timeout: u8,
    /// How long the first answer is waited for until the message is sent again. It doubles with
    /// each time, up to the response timeout.
    pub resend_after: Duration,
    /// How often REQ, REP and SIDR_REQ are sent again, 0..=15. A REP not more often than its REQ
    /// allows.
    pub max_retries: u8,
    /// How often a DREQ is sent again.
    pub disconnect_retries: u8,
    /// Code of the time that a program has to answer a request: asked for by MRA when it is slow,
    /// and the request is rejected after it. Linux says 24, 68.7 s.
    pub service_timeout: u8,
    /// The longest time for which a peer may put us off by MRA.
    pub max_service_time: Duration,
    /// How long the IDs of a connection that is over are kept, so that late messages are known.
    pub time_wait: Duration,
    /// Connections of any state, those that are over but kept, and questions.
    pub max_connections: usize,
    /// Connections of peers that are not established yet. One more, and the oldest is dropped.
    pub max_half_open: usize,
    /// MADs that wait for [`Cm::poll_mad`](super::Cm::poll_mad): one more, and the oldest is lost.
    /// While so many events wait, requests of peers are dropped.
    pub max_queued: usize,
}

impl Config {
    /// The defaults: 4791, Linux' time-outs, first resend after 250 ms; up to 16,384 connections,
    /// 1024 of them half open.
    pub fn new(seed: u64) -> Self {
        Self {
            seed,
            ca_guid: 0,
            peer_udp_port: UDP_PORT,
            response_timeout: 20,
            resend_after: Duration::from_millis(250),
            max_retries: 15,
            disconnect_retries: 5,
            service_timeout: 24,
            max_service_time: Duration::from_secs(300),
            time_wait: Duration::from_secs(4),
            max_connections: 16_384,
            max_half_open: 1024,
            max_queued: 4096,
        }
    }
}

/// Which service a connection has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Transport {
    /// Reliable connection.
    Rc,
    /// Unreliable connection.
    Uc,
}

/// What each side says of its queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LocalQp {
    /// Its number.
    pub qpn: Qpn,
    /// The PSN that it expects in the peer's first request.
    pub start_psn: Psn,
    /// READs and atomics of the peer that it serves at a time.
    pub responder_resources: u8,
    /// READs and atomics that it wants to have outstanding.
    pub initiator_depth: u8,
    /// How often the peer is to try again where no receive is posted, 0..=7; 7 is for ever.
    pub rnr_retry_count: u8,
    /// It has a shared receive queue.
    pub srq: bool,
    /// It gives credits in its acknowledgements.
    pub flow_control: bool,
}

impl LocalQp {
    /// A queue pair of depth 16 both ways, whose peer tries for ever where no receive is posted.
    pub fn new(qpn: Qpn, start_psn: Psn) -> Self {
        Self {
            qpn,
            start_psn,
            responder_resources: 16,
            initiator_depth: 16,
            rnr_retry_count: 7,
            srq: false,
            flow_control: false,
        }
    }
}

/// What [`Cm::connect`](super::Cm::connect) asks for.
#[derive(Debug, Clone)]
pub struct Connect<'a> {
    /// The peer: its address, and the UDP port at which it listens.
    pub peer: SocketAddr,
    /// Our address, as the peer sees it.
    pub local_ip: IpAddr,
    /// Our rdma_cm port; told, and of no further use.
    pub local_port: u16,
    /// The service: [`PortSpace::service_id`](crate::wire::mad::cm::PortSpace::service_id) of the
    /// peer's rdma_cm port. For any other ID no rdma_cm header is sent.
    pub service_id: u64,
    /// Our queue pair.
    pub qp: LocalQp,
    /// Its service.
    pub transport: Transport,
    /// Path MTU in octets, 256 to 4096.
    pub mtu: u16,
    /// Code of the local ACK timeout, 5 bits.
    pub ack_timeout: u8,
    /// Retries of requests that are not acknowledged, 0..=7.
    pub retry_count: u8,
    /// Traffic class, or the octet of DSCP and ECN.
    pub traffic_class: u8,
    /// At most [`Connect::MAX_PRIVATE_DATA`] octets; 92 without the rdma_cm header. The peer sees
    /// zeros behind them.
    pub private_data: &'a [u8],
    /// What we say to a userdma peer. Left out where fewer than 12 octets of private data are free.
    pub token: Option<Token>,
}

impl<'a> Connect<'a> {
    /// Octets of private data that the program has.
    pub const MAX_PRIVATE_DATA: usize = Req::PRIVATE_DATA_LEN - IpCm::LEN;

    /// A reliable connection with path MTU 1024 and Linux' ACK timeout 19 (2.1 s), 7 retries.
    pub fn new(peer: SocketAddr, local_ip: IpAddr, service_id: u64, qp: LocalQp) -> Self {
        Self {
            peer,
            local_ip,
            local_port: 0,
            service_id,
            qp,
            transport: Transport::Rc,
            mtu: 1024,
            ack_timeout: 19,
            retry_count: 7,
            traffic_class: 0,
            private_data: &[],
            token: None,
        }
    }
}

/// What [`Cm::resolve`](super::Cm::resolve) asks for: the queue pair of a UD service.
#[derive(Debug, Clone)]
pub struct Resolve<'a> {
    /// The peer: its address, and the UDP port at which it listens.
    pub peer: SocketAddr,
    /// Our address, as the peer sees it.
    pub local_ip: IpAddr,
    /// Our rdma_cm port; told, and of no further use.
    pub local_port: u16,
    /// The service, as in [`Connect::service_id`].
    pub service_id: u64,
    /// At most [`Resolve::MAX_PRIVATE_DATA`] octets; 216 without the rdma_cm header.
    pub private_data: &'a [u8],
    /// What we say to a userdma peer: without it the service answers our packets at UDP 4791.
    pub token: Option<Token>,
}

impl Resolve<'_> {
    /// Octets of private data that the program has.
    pub const MAX_PRIVATE_DATA: usize = SidrReq::PRIVATE_DATA_LEN - IpCm::LEN;
}

/// How [`Cm::accept`](super::Cm::accept) answers a request.
#[derive(Debug, Clone)]
pub struct Accept<'a> {
    /// Our queue pair. Its initiator depth is cut to what the peer serves.
    pub qp: LocalQp,
    /// Code of the time until an ACK, 5 bits.
    pub target_ack_delay: u8,
    /// At most [`Accept::MAX_PRIVATE_DATA`] octets.
    pub private_data: &'a [u8],
    /// What we say to a userdma peer: sent only if its request has a token, and 12 octets are free.
    pub token: Option<Token>,
}

impl Accept<'_> {
    /// Octets of private data that the program has.
    pub const MAX_PRIVATE_DATA: usize = Rep::PRIVATE_DATA_LEN;

    /// With this queue pair, and an ACK delay of 15 (134 ms) as rxe says.
    pub fn new(qp: LocalQp) -> Self {
        Self { qp, target_ack_delay: 15, private_data: &[], token: None }
    }
}

/// How [`Cm::reject`](super::Cm::reject) answers a request.
#[derive(Debug, Clone)]
pub struct Reject<'a> {
    /// Why.
    pub reason: Reason,
    /// Additional reject information, at most 72 octets.
    pub info: Vec<u8>,
    /// At most [`Reject::MAX_PRIVATE_DATA`] octets.
    pub private_data: &'a [u8],
}

impl<'a> Reject<'a> {
    /// Octets of private data that the program has.
    pub const MAX_PRIVATE_DATA: usize = Rej::PRIVATE_DATA_LEN;

    /// The program says no (reason 28), in its own words.
    pub fn consumer(private_data: &'a [u8]) -> Self {
        Self { reason: Reason::CONSUMER, info: Vec::new(), private_data }
    }

    /// The path MTU is too large; `largest` is what would do, 256 to 4096 octets. A userdma peer
    /// then asks once more.
    pub fn mtu(largest: u16) -> Self {
        let info = mtu_code(largest).into_iter().collect();
        Self { reason: Reason::INVALID_MTU, info, private_data: &[] }
    }
}

/// The code of a path MTU: 1 to 5 for 256 to 4096.
pub(super) fn mtu_code(octets: u16) -> Option<u8> {
    (1..=5).find(|&code| mtu(code) == Some(octets))
}

/// A UD service: what SIDR_REQ is answered with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Datagrams {
    /// Its queue pair.
    pub qpn: Qpn,
    /// The queue key that its packets must carry; rdma_cm's is 0x01234567.
    pub qkey: QKey,
    /// At most 136 octets.
    pub private_data: Vec<u8>,
}

impl Datagrams {
    /// Octets of private data that the program has.
    pub const MAX_PRIVATE_DATA: usize = SidrRep::PRIVATE_DATA_LEN;
}

/// Why a call did nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CmError {
    /// There is no such connection, or no longer.
    #[error("connection {0} is not known to the connection manager")]
    Unknown(ConnId),
    /// Only a request that was not answered can be accepted or rejected.
    #[error("connection {0} is not a request that waits for an answer")]
    NotRequested(ConnId),
    /// A request is ended by accepting or rejecting it.
    #[error("connection {0} is a request that waits for an answer: accept or reject it")]
    Unanswered(ConnId),
    /// Private data is too long.
    #[error("{len} octets of private data, but there is room for {room}")]
    PrivateData {
        /// Octets given.
        len: usize,
        /// Octets that the message has for the program.
        room: usize,
    },
    /// Additional reject information is too long.
    #[error("{0} octets of additional reject information, but there is room for 72")]
    RejectInfo(usize),
    /// Not 256, 512, 1024, 2048 or 4096.
    #[error("{0} is no path MTU: 256, 512, 1024, 2048 and 4096 are")]
    Mtu(u16),
    /// Own and peer's address are of different kinds.
    #[error("{local} and {peer} are not of the same IP version")]
    IpVersions {
        /// Ours.
        local: IpAddr,
        /// The peer's.
        peer: IpAddr,
    },
    /// Somebody listens there already.
    #[error("service {0:#018x} has a listener already")]
    InUse(u64),
    /// No more connections ([`Config::max_connections`]).
    #[error("{0} connections are open, and no more are allowed")]
    TooMany(usize),
}

/// A peer asks for a connection: answer with [`Cm::accept`](super::Cm::accept) or
/// [`Cm::reject`](super::Cm::reject).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// The connection to be.
    pub conn: ConnId,
    /// Which listener it is for.
    pub service_id: u64,
    /// Where the peer's packets go: the address that the MAD came from, and the UDP port of its
    /// token or the configured one. What the message says of addresses is not trusted.
    pub peer: SocketAddr,
    /// rdma_cm's header, as the peer says.
    pub ip: Option<IpCm>,
    /// The primary path, as the peer says: flow label, traffic class, ACK timeout.
    pub path: Path,
    /// The service.
    pub transport: Transport,
    /// The peer's queue pair.
    pub qpn: Qpn,
    /// The PSN that it expects in our first request.
    pub start_psn: Psn,
    /// READs and atomics that the peer serves at a time.
    pub responder_resources: u8,
    /// READs and atomics that it wants to have outstanding.
    pub initiator_depth: u8,
    /// Path MTU in octets. Too large for the route: [`Reject::mtu`].
    pub mtu: u16,
    /// Retries that the peer asks us to make.
    pub retry_count: u8,
    /// Retries that it asks us to make where no receive is posted; 7 is for ever.
    pub rnr_retry_count: u8,
    /// Partition.
    pub pkey: PKey,
    /// It has a shared receive queue.
    pub srq: bool,
    /// It takes credits from acknowledgements.
    pub flow_control: bool,
    /// What it says if it is userdma.
    pub token: Option<Token>,
    /// The program's private data, the whole area: zeros behind what was given.
    pub private_data: Vec<u8>,
}

/// Both sides are ready: what the queue pair is to be set to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Established {
    /// The connection.
    pub conn: ConnId,
    /// Where our packets go.
    pub peer: SocketAddr,
    /// The service.
    pub transport: Transport,
    /// Our queue pair.
    pub local_qpn: Qpn,
    /// The peer's.
    pub remote_qpn: Qpn,
    /// The PSN that our first request carries.
    pub send_psn: Psn,
    /// The PSN that we expect in the peer's first request.
    pub expect_psn: Psn,
    /// Path MTU in octets.
    pub mtu: u16,
    /// READs and atomics that we may have outstanding: what we want and the peer serves.
    pub max_rd_atomic: u8,
    /// READs and atomics of the peer that we serve at a time.
    pub max_dest_rd_atomic: u8,
    /// Code of the local ACK timeout, the peer's delay included.
    pub ack_timeout: u8,
    /// Retries of requests that are not acknowledged.
    pub retry_count: u8,
    /// Retries where the peer has no receive posted; 7 is for ever.
    pub rnr_retry_count: u8,
    /// The connection's flow label, 20 bits.
    pub flow_label: u32,
    /// Its traffic class.
    pub traffic_class: u8,
    /// The peer gives credits in its acknowledgements.
    pub flow_control: bool,
    /// What the peer says if it is userdma; none: it is a stranger.
    pub token: Option<Token>,
    /// Both sides keep packets that come out of order.
    pub out_of_order: bool,
    /// Active side: private data of the REP, the whole area. Passive side: none.
    pub private_data: Vec<u8>,
}

/// The peer said no.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the peer rejected the connection: {}", Words(*reason))]
pub struct Rejected {
    /// The connection, which is over.
    pub conn: ConnId,
    /// Why.
    pub reason: Reason,
    /// Additional reject information; what it is depends on the reason.
    pub info: Vec<u8>,
    /// The peer program's private data, the whole area.
    pub private_data: Vec<u8>,
}

/// A reason in words, and its number.
struct Words(Reason);

impl fmt::Display for Words {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.name() {
            Some(name) => write!(f, "{name} (reason {})", self.0.0),
            None => write!(f, "reason {}", self.0.0),
        }
    }
}

/// What did not come in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Awaited {
    /// The peer's answer to our REQ.
    Reply,
    /// Our program's answer to a request.
    Answer,
    /// The peer's RTU, or anything else after our REP.
    ReadyToUse,
    /// The peer's answer to our SIDR_REQ.
    Resolution,
}

/// How an established connection, or one that was given up, came to its end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// We disconnected, and the peer knows.
    Local,
    /// We disconnected, and the peer did not answer.
    TimedOut,
    /// The peer disconnected.
    Peer,
    /// The peer's queue pair asked for another connection: it has forgotten this one.
    Stale,
    /// The peer rejected it after all.
    Rejected(Reason),
}

/// What the port has to know. For each connection there is at most one [`Event::Request`], then at
/// most one [`Event::Established`], then one of those that say in their first words that it is
/// over, unless the program rejected it; last a [`Event::Released`], if it was established.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// Passive side: a request waits for an answer.
    Request(Request),
    /// Data may flow.
    Established(Established),
    /// Over: the peer said no.
    Rejected(Rejected),
    /// Over: something did not come in time.
    TimedOut {
        /// The connection.
        conn: ConnId,
        /// What.
        awaited: Awaited,
    },
    /// Over, passive side: it was dropped before it was established, in favour of newer requests,
    /// or because its listener is gone.
    Dropped {
        /// The connection.
        conn: ConnId,
    },
    /// Over: it was disconnected.
    Disconnected {
        /// The connection.
        conn: ConnId,
        /// How.
        ended: Ended,
    },
    /// The time-wait of a connection that was established has passed: its queue pair number may be
    /// used again.
    Released {
        /// The connection.
        conn: ConnId,
        /// Our queue pair.
        local_qpn: Qpn,
    },
    /// Over: this is the queue pair of the UD service asked for.
    Resolved {
        /// The question.
        conn: ConnId,
        /// Where packets for it go.
        peer: SocketAddr,
        /// Its number.
        qpn: Qpn,
        /// Its queue key.
        qkey: QKey,
        /// The service's private data, the whole area.
        private_data: Vec<u8>,
    },
    /// Over: there is no such UD service, or it said no.
    Unresolved {
        /// The question.
        conn: ConnId,
        /// SIDR status; see [`SidrRep::status_name`].
        status: u8,
    },
    /// Passive side: a peer asked for a UD service of ours, and was told.
    Queried {
        /// Which.
        service_id: u64,
        /// Where packets for that peer go.
        peer: SocketAddr,
        /// rdma_cm's header, as the peer says.
        ip: Option<IpCm>,
        /// What it says if it is userdma.
        token: Option<Token>,
        /// The program's private data, the whole area.
        private_data: Vec<u8>,
    },
}

/// Counters of a connection manager.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Stats {
    /// MADs given out, those sent again included.
    pub sent: u64,
    /// MADs sent again because no answer came.
    pub resent: u64,
    /// MADs that were lost because too many waited to be sent.
    pub overflowed: u64,
    /// Messages received.
    pub received: u64,
    /// MADs that were none, or of another class or version, or of an unknown attribute.
    pub malformed: u64,
    /// Messages that had come before.
    pub duplicates: u64,
    /// Messages for a connection that is not known, or that its state has no use for.
    pub stray: u64,
    /// Messages for a connection, from an address that is not its peer's.
    pub wrong_source: u64,
    /// Requests that nobody listens for.
    pub no_listener: u64,
    /// Requests that were rejected at once: transport, path MTU, rdma_cm header.
    pub unacceptable: u64,
    /// Requests from a queue pair that a connection was open to.
    pub stale: u64,
    /// Half-open connections dropped for newer ones, and requests dropped because too much waited.
    pub crowded: u64,
}
