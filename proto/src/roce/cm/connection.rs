//! What the manager keeps of one connection.

use alloc::boxed::Box;
use core::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use super::{Ended, Established, Token, Transport, types::ConnId};
use crate::{
    time::Instant,
    wire::{
        ids::{Psn, Qpn},
        mad::MAD_LEN,
    },
};

/// Where a connection is in its life (IBTA vol. 1, 12.9).
///
/// ```text
///  active:  connect                            passive:  REQ
///              ▼                                          ▼           reject, or no answer in time
///           ReqSent ─REJ, no answer─► gone            Requested ──────────────────────► Refused
///              │                                          │ accept    (its REJ, told again)  │
///              │ REP: RTU                                 ▼                                  │
///              │                                       RepSent ─REJ, no RTU──────┐           │
///              │            RTU, a packet, DREQ           │                      │       time-wait
///              └──────────► Established ◄─────────────────┘                      │           │
///                            │  │  REJ; DREQ: DREP                               ▼           ▼
///                disconnect  │  └──────────────────────────────────────────► TimeWait ────► gone
///                or stale    ▼                                                   ▲
///                         DreqSent ─DREP, DREQ, REJ, no answer───────────────────┘
///
///  resolve ─► SidrSent ─SIDR_REP, no answer─► gone
/// ```
///
/// `disconnect` leads from ReqSent to nothing (the peer gets a REJ) and from RepSent to DreqSent.
/// Half-open connections that are crowded out are gone at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    /// Active: the REQ is out. It is sent again until the peer answers.
    ReqSent,
    /// A SIDR_REQ is out, likewise.
    SidrSent,
    /// Passive: the program has the request and has not answered. MRA was sent or not yet.
    Requested {
        /// The initiator was told to wait.
        mra: bool,
    },
    /// Passive: the REP is out, likewise.
    RepSent,
    /// Data flows.
    Established,
    /// The DREQ is out, likewise.
    DreqSent,
    /// Passive: rejected; who asks again gets the same REJ again.
    Refused,
    /// Over: the IDs are kept for a while, so that late messages find no new connection.
    TimeWait,
}

impl State {
    /// A peer's request that is not established yet.
    pub(super) const fn half_open(self) -> bool {
        match self {
            Self::Requested { .. } | Self::RepSent => true,
            Self::ReqSent
            | Self::SidrSent
            | Self::Established
            | Self::DreqSent
            | Self::Refused
            | Self::TimeWait => false,
        }
    }

    /// Only the IDs are left.
    pub(super) const fn over(self) -> bool {
        match self {
            Self::Refused | Self::TimeWait => true,
            Self::ReqSent
            | Self::SidrSent
            | Self::Requested { .. }
            | Self::RepSent
            | Self::Established
            | Self::DreqSent => false,
        }
    }
}

/// What both sides said, as far as it is needed later.
#[derive(Debug, Clone)]
pub(super) struct Terms {
    pub(super) transport: Transport,
    pub(super) mtu: u16,
    pub(super) send_psn: Psn,
    pub(super) expect_psn: Psn,
    /// What we want to have outstanding; once the peer has spoken, what it serves of that.
    pub(super) initiator_depth: u8,
    pub(super) responder_resources: u8,
    /// What the peer serves.
    pub(super) peer_resources: u8,
    pub(super) ack_timeout: u8,
    pub(super) retry_count: u8,
    pub(super) rnr_retry_count: u8,
    pub(super) flow_label: u32,
    pub(super) traffic_class: u8,
    pub(super) flow_control: bool,
    /// What we told of ourselves.
    pub(super) own_token: Option<Token>,
    /// What the peer told.
    pub(super) peer_token: Option<Token>,
}

/// One connection, or one question for a UD service.
#[derive(Debug)]
pub(super) struct Conn {
    pub(super) state: State,
    /// The peer's request made it.
    pub(super) passive: bool,
    /// It was established, and the program knows.
    pub(super) established: bool,
    /// Where MADs go.
    pub(super) peer: SocketAddr,
    /// The listener's, if passive.
    pub(super) service_id: u64,
    /// Transaction of the REQ.
    pub(super) tid: u64,
    pub(super) local_id: u32,
    pub(super) remote_id: Option<u32>,
    pub(super) local_qpn: Qpn,
    pub(super) remote_qpn: Qpn,
    pub(super) terms: Option<Box<Terms>>,
    /// The message that may have to be sent again.
    pub(super) mad: Option<Box<[u8; MAD_LEN]>>,
    /// How often it was sent.
    pub(super) sends: u8,
    /// How often it may be sent again.
    pub(super) retries: u8,
    /// The longest time between two of these.
    pub(super) longest: Duration,
    /// When something is to be done.
    pub(super) deadline: Option<Instant>,
    /// MRAs of the peer do not put us off any longer than this.
    pub(super) patience: Instant,
    /// ReqSent: the path MTU was lowered once already.
    pub(super) mtu_lowered: bool,
    /// DreqSent: what the program will be told.
    pub(super) ended: Ended,
}

impl Conn {
    /// Whether a message came from the peer's address; its port does not count.
    pub(super) fn is_from(&self, ip: IpAddr) -> bool {
        self.peer.ip().to_canonical() == ip.to_canonical()
    }

    /// The event that the connection is ready; `None` before both sides have spoken.
    pub(super) fn ready(&self, conn: ConnId, private_data: &[u8]) -> Option<Established> {
        let terms = self.terms.as_ref()?;
        let order = |token: Option<Token>| token.is_some_and(|token| token.out_of_order);
        Some(Established {
            conn,
            peer: self.peer,
            transport: terms.transport,
            local_qpn: self.local_qpn,
            remote_qpn: self.remote_qpn,
            send_psn: terms.send_psn,
            expect_psn: terms.expect_psn,
            mtu: terms.mtu,
            max_rd_atomic: terms.initiator_depth.min(terms.peer_resources),
            max_dest_rd_atomic: terms.responder_resources,
            ack_timeout: terms.ack_timeout,
            retry_count: terms.retry_count,
            rnr_retry_count: terms.rnr_retry_count,
            flow_label: terms.flow_label,
            traffic_class: terms.traffic_class,
            flow_control: terms.flow_control,
            token: terms.peer_token,
            out_of_order: order(terms.own_token) && order(terms.peer_token),
            private_data: private_data.into(),
        })
    }
}

/// The ACK timeout of a path whose code is `path`, with a peer that takes `delay` to answer: the
/// greater code, and one more where both count. 0 remains: no timeout.
pub(super) fn ack_timeout(path: u8, delay: u8) -> u8 {
    if path == 0 {
        return 0;
    }
    let greater = path.max(delay);
    let both = path.abs_diff(delay) <= 1;
    (greater + u8::from(both)).min(31)
}
