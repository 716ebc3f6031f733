//! Settings, attributes, events and counters of a queue pair.

use core::{net::SocketAddr, ops::AddAssign, time::Duration};

use super::congestion::Dcqcn;
use crate::{
    mem::{PdId, Scope},
    verbs::{Access, QpState, QpType, Wc},
    wire::{
        ids::{PKey, Psn, QKey, Qpn},
        roce::{Packet, aeth::Syndrome},
    },
};

/// The most packets a train has: what Linux cuts one send call into.
pub const MAX_TRAIN: usize = 128;

/// What a queue pair is made with, and keeps.
#[derive(Debug, Clone)]
pub struct Config {
    /// RC, UC or UD.
    pub kind: QpType,
    /// Protection domain and number of the queue pair.
    pub scope: Scope,
    /// Length of the send queue.
    pub max_send_wr: usize,
    /// Length of the receive queue.
    pub max_recv_wr: usize,
    /// Pieces a work request may have.
    pub max_sge: usize,
    /// Octets of inline data a work request may have.
    pub max_inline: usize,
    /// An acknowledgement is asked for at least every so many packets, and at the end of every
    /// message.
    pub ack_every: u32,
    /// Packets a train may have, 1 to [`MAX_TRAIN`].
    pub max_train: usize,
    /// Whether packets are marked as ECN-capable.
    pub ecn: bool,
    /// Whether acknowledgements tell the peer how many receives are posted. Without, the peer
    /// finds out by RNR NAKs, as with Linux rxe.
    pub credits: bool,
    /// Requests that are kept while one before them is missing ([`QpAttr::out_of_order`]), at most.
    pub max_kept: usize,
    /// Octets that these take, at most.
    pub max_kept_octets: usize,
    /// Whether the time-out doubles with each retry, up to 16 times what was set. InfiniBand has no
    /// such thing, and without it is the default. A peer in software may stand still for a second,
    /// or have as much to look at before it comes to our packets: the same packets again only add to
    /// that.
    pub backoff: bool,
    /// How it slows down when its peer says that its packets met congestion: RC and UC, requests and
    /// READ responses. `None`: not at all. Parameters that [`Dcqcn::check`] refuses count as `None`;
    /// a [`Port`](super::Port) refuses them.
    pub dcqcn: Option<Dcqcn>,
}

impl Config {
    /// The defaults for a queue pair `qpn` in the domain `pd`.
    pub fn new(kind: QpType, pd: PdId, qpn: Qpn) -> Self {
        Self {
            kind,
            scope: Scope { pd, qpn },
            max_send_wr: 128,
            max_recv_wr: 128,
            max_sge: 16,
            max_inline: 256,
            ack_every: 64,
            max_train: MAX_TRAIN,
            ecn: false,
            credits: false,
            max_kept: 1024,
            max_kept_octets: 1 << 20,
            backoff: false,
            dcqcn: Some(Dcqcn::default()),
        }
    }

    /// With room for all that a peer with this window may have on the way behind one that is lost: its
    /// octets, and as many again for what is remembered of each packet.
    pub fn keeping(mut self, window: Window) -> Self {
        self.max_kept = self.max_kept.max(window.packets as usize);
        self.max_kept_octets = self.max_kept_octets.max(2 * window.octets as usize);
        self
    }
}

/// How much an RC queue pair has on the way before it waits for an acknowledgement. Responses to
/// its READs count, which its own socket has to hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    /// Packets, 1 to 2^22.
    pub packets: u32,
    /// Octets, UDP headers included; one packet goes out whatever it says.
    pub octets: u32,
}

impl Default for Window {
    /// What the socket of a stranger holds who has set nothing: 212,992 octets as Linux counts,
    /// of which trains of full packets fill 0.7.
    fn default() -> Self {
        Self { packets: 128, octets: 149_000 }
    }
}

/// Octets of payload that a packet takes, 256 to 4096.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[repr(u8)]
pub enum PathMtu {
    /// 256 octets.
    Mtu256 = 1,
    /// 512 octets.
    Mtu512 = 2,
    /// 1024 octets: what fits Ethernet's 1500.
    Mtu1024 = 3,
    /// 2048 octets.
    Mtu2048 = 4,
    /// 4096 octets.
    Mtu4096 = 5,
}

impl PathMtu {
    /// All of them, rising.
    pub const ALL: [Self; 5] =
        [Self::Mtu256, Self::Mtu512, Self::Mtu1024, Self::Mtu2048, Self::Mtu4096];

    /// Its octets.
    pub const fn octets(self) -> u32 {
        128 << self as u32
    }

    /// The one of so many octets.
    pub fn from_octets(octets: u32) -> Option<Self> {
        Self::ALL.into_iter().find(|mtu| mtu.octets() == octets)
    }
}

/// What [`Qp::modify`](super::Qp::modify) sets; `None` leaves as it is. The names are those of
/// `ibv_qp_attr`.
///
/// | to | RC needs | UC needs | UD needs |
/// |---|---|---|---|
/// | INIT | – | – | `qkey` |
/// | RTR | `local`, `peer`, `dest_qp`, `path_mtu`, `rq_psn` | the same | `local`, `path_mtu` |
/// | RTS | `sq_psn` | `sq_psn` | `sq_psn` |
///
/// Everything else has a default ([`Attributes::default`]).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct QpAttr {
    /// Where the queue pair goes.
    pub state: Option<QpState>,
    /// The partition.
    pub pkey: Option<PKey>,
    /// UD: what a datagram must carry to be taken.
    pub qkey: Option<QKey>,
    /// What the peer may do through this queue pair at all, whatever the regions allow.
    pub access: Option<Access>,
    /// Our own UDP socket as the peer sees it: it is part of the ICRC.
    pub local: Option<SocketAddr>,
    /// The peer's UDP socket, of the same family.
    pub peer: Option<SocketAddr>,
    /// The peer's queue pair.
    pub dest_qp: Option<Qpn>,
    /// Payload of a full packet. UD: the longest datagram.
    pub path_mtu: Option<PathMtu>,
    /// PSN of the first packet that the peer sends.
    pub rq_psn: Option<Psn>,
    /// PSN of the first packet that we send.
    pub sq_psn: Option<Psn>,
    /// READs, atomics and FLUSHes outstanding at a time.
    pub max_rd_atomic: Option<u8>,
    /// READs, atomics and FLUSHes of the peer served at a time; as many results are kept for
    /// requests that come again.
    pub max_dest_rd_atomic: Option<u8>,
    /// Code of the time that the peer is to wait where no receive is posted, 0 to 31
    /// ([`rnr_micros`](crate::wire::roce::aeth::rnr_micros)).
    pub min_rnr_timer: Option<u8>,
    /// Code `t` of the time after which a missing acknowledgement is missed: 4.096 µs × 2^t, at
    /// most 31. 0: never.
    pub timeout: Option<u8>,
    /// How often it is tried again then, 0 to 7.
    pub retry_cnt: Option<u8>,
    /// How often it is tried again where the peer has no receive, 0 to 7; 7 is for ever.
    pub rnr_retry: Option<u8>,
    /// MigReq of the packets sent. Hardware sends 1, Linux rxe 0, both take both.
    pub migreq: Option<bool>,
    /// RC: requests that come before one that is missing are kept, and of our own only what is
    /// missing is sent again. Both sides must have agreed on it: a connection does that by tokens.
    pub out_of_order: Option<bool>,
}

impl QpAttr {
    /// Moves to `state` and sets nothing.
    pub fn to(state: QpState) -> Self {
        Self { state: Some(state), ..Self::default() }
    }
}

/// The attributes in force: the fields are those of [`QpAttr`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct Attributes {
    pub pkey: PKey,
    pub qkey: QKey,
    pub access: Access,
    pub local: SocketAddr,
    pub peer: SocketAddr,
    pub dest_qp: Qpn,
    pub path_mtu: PathMtu,
    pub rq_psn: Psn,
    pub sq_psn: Psn,
    pub max_rd_atomic: u8,
    pub max_dest_rd_atomic: u8,
    pub min_rnr_timer: u8,
    pub timeout: u8,
    pub retry_cnt: u8,
    pub rnr_retry: u8,
    pub migreq: bool,
    pub out_of_order: bool,
}

impl Default for Attributes {
    /// The default partition, every right of the peer, 16 READs and atomics each way, an RNR time
    /// of 0.64 ms, a time-out of 67 ms, 7 retries, RNR retries for ever, MigReq 1, everything sent
    /// again from what is missing on.
    fn default() -> Self {
        let nowhere = SocketAddr::from(([0, 0, 0, 0], 0));
        Self {
            pkey: PKey(0xffff),
            qkey: QKey(0),
            access: Access::REMOTE_WRITE
                | Access::REMOTE_READ
                | Access::REMOTE_ATOMIC
                | Access::FLUSH_GLOBAL
                | Access::FLUSH_PERSISTENT,
            local: nowhere,
            peer: nowhere,
            dest_qp: Qpn(0),
            path_mtu: PathMtu::Mtu1024,
            rq_psn: Psn::new(0),
            sq_psn: Psn::new(0),
            max_rd_atomic: 16,
            max_dest_rd_atomic: 16,
            min_rnr_timer: 12,
            timeout: 14,
            retry_cnt: 7,
            rnr_retry: 7,
            migreq: true,
            out_of_order: false,
        }
    }
}

impl Attributes {
    /// How long an acknowledgement may take; `None`: for ever.
    pub fn ack_timeout(&self) -> Option<Duration> {
        (self.timeout != 0).then(|| Duration::from_nanos(4096 << self.timeout))
    }
}

/// Why attributes were refused. Nothing changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ModifyError {
    /// There is no such step.
    #[error("a queue pair does not go from {from:?} to {to:?}")]
    Transition {
        /// The state it is in.
        from: QpState,
        /// The state that was asked for.
        to: QpState,
    },
    /// A step needs an attribute that was never set.
    #[error("{attribute} must be set to go to {to:?}")]
    Missing {
        /// Its name.
        attribute: &'static str,
        /// The state that was asked for.
        to: QpState,
    },
    /// An attribute is out of its range.
    #[error("{attribute} is {found}, at most {max} is allowed")]
    Range {
        /// Its name.
        attribute: &'static str,
        /// What it is.
        found: u32,
        /// What it may be.
        max: u32,
    },
    /// An attribute cannot change any more.
    #[error("{attribute} cannot be set in state {state:?}")]
    Late {
        /// Its name.
        attribute: &'static str,
        /// The state it is in.
        state: QpState,
    },
    /// One address is IPv4, the other IPv6.
    #[error("local address {local} and peer address {peer} are of different families")]
    Family {
        /// Ours.
        local: SocketAddr,
        /// The peer's.
        peer: SocketAddr,
    },
}

/// A packet that came, with what its datagram says.
#[derive(Debug, Clone, Copy)]
pub struct Received<'a> {
    /// The packet. Its ICRC is good, its destination is this queue pair.
    pub packet: &'a Packet<'a>,
    /// Where it came from.
    pub from: SocketAddr,
    /// Octets of the datagram, from the BTH to the ICRC.
    pub len: usize,
    /// The lower two bits of IPv4's TOS or IPv6's traffic class.
    pub ecn: u8,
}

/// A finished work request. Unsignalled work that succeeds makes none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// The driver's own number from the post.
    pub tag: u64,
    /// What the program sees.
    pub wc: Wc,
}

/// Why a queue pair went to the error state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reason {
    /// [`Qp::modify`](super::Qp::modify) asked for it.
    Asked,
    /// A work request of ours failed; its completion says how.
    Requester,
    /// The peer asked for something wrong and was told so.
    Responder(Syndrome),
    /// A receive that was posted cannot be used.
    Receive,
}

/// What the program has to know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// RTR: the first packet came (`IBV_EVENT_COMM_EST`).
    Established,
    /// SQD: everything that was begun is done (`IBV_EVENT_SQ_DRAINED`).
    Drained,
    /// The queue pair is in the error state; everything is flushed.
    Error(Reason),
}

/// Counters of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Stats {
    /// Packets given out, of any kind.
    pub packets_sent: u64,
    /// Request packets that had gone out before.
    pub packets_resent: u64,
    /// Packets handed in.
    pub packets_received: u64,
    /// Octets of payload given out.
    pub payload_sent: u64,
    /// Octets of payload placed.
    pub payload_received: u64,
    /// ACKs given out, and RNR NAKs and NAKs.
    pub acks_sent: u64,
    /// RNR NAKs given out.
    pub rnr_naks_sent: u64,
    /// NAKs for a gap given out.
    pub sequence_naks_sent: u64,
    /// RNR NAKs that counted.
    pub rnr_naks_received: u64,
    /// NAKs for a gap, told or implied, that counted.
    pub sequence_naks_received: u64,
    /// Times that an acknowledgement was missed.
    pub timeouts: u64,
    /// Requests that came again.
    pub duplicates: u64,
    /// Packets that came too early.
    pub out_of_order: u64,
    /// How many of them were kept.
    pub kept: u64,
    /// Responses that were no news.
    pub ghosts: u64,
    /// Packets that broke a rule, or were meant for somebody else.
    pub malformed: u64,
    /// UC and UD: messages for which there was no receive, or too small a one.
    pub no_receive: u64,
    /// Accesses of the peer that were refused.
    pub access_errors: u64,
    /// Packets that came marked by a congested router.
    pub ce_marked: u64,
    /// Congestion notifications from the peer.
    pub cnps_received: u64,
    /// Times that something was ready and had to wait for the rate that these allow.
    pub paced: u64,
}

impl AddAssign for Stats {
    fn add_assign(&mut self, other: Self) {
        let Self {
            packets_sent,
            packets_resent,
            packets_received,
            payload_sent,
            payload_received,
            acks_sent,
            rnr_naks_sent,
            sequence_naks_sent,
            rnr_naks_received,
            sequence_naks_received,
            timeouts,
            duplicates,
            out_of_order,
            kept,
            ghosts,
            malformed,
            no_receive,
            access_errors,
            ce_marked,
            cnps_received,
            paced,
        } = other;
        self.packets_sent += packets_sent;
        self.packets_resent += packets_resent;
        self.packets_received += packets_received;
        self.payload_sent += payload_sent;
        self.payload_received += payload_received;
        self.acks_sent += acks_sent;
        self.rnr_naks_sent += rnr_naks_sent;
        self.sequence_naks_sent += sequence_naks_sent;
        self.rnr_naks_received += rnr_naks_received;
        self.sequence_naks_received += sequence_naks_received;
        self.timeouts += timeouts;
        self.duplicates += duplicates;
        self.out_of_order += out_of_order;
        self.kept += kept;
        self.ghosts += ghosts;
        self.malformed += malformed;
        self.no_receive += no_receive;
        self.access_errors += access_errors;
        self.ce_marked += ce_marked;
        self.cnps_received += cnps_received;
        self.paced += paced;
    }
}
