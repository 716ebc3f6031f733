//! Settings, events and counters of a connection.

use alloc::vec::Vec;
use core::time::Duration;

use crate::{
    mem::{PdId, Scope},
    verbs::{Access, Wc},
    wire::{self, ids::Qpn, iwarp::terminate::Terminate},
};

/// Which side of the MPA start-up this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Role {
    /// Opened the TCP connection, sends the request.
    Initiator,
    /// Accepted the TCP connection, sends the reply.
    Responder,
}

bitflags::bitflags! {
    /// Ready-to-receive indications of a peer-to-peer start-up (RFC 6581 §9.2).
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub struct RtrKinds: u8 {
        /// A zero-length SEND.
        const SEND = 1;
        /// A zero-length WRITE.
        const WRITE = 2;
        /// A zero-length READ.
        const READ = 4;
    }
}

/// What one side says in its MPA start-up frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MpaOptions {
    /// Revision to offer: 2 (RFC 6581) or 1 (RFC 5044). A responder answers with the request's.
    pub revision: u8,
    /// Ask for the CRC. It is left out only if both sides do not ask (RFC 5044 §7.1).
    pub crc: bool,
    /// Ask the peer to put markers into what it sends.
    pub markers: bool,
    /// Initiator: ask for a peer-to-peer start-up, so that the responder may send first.
    pub peer_to_peer: bool,
    /// Kinds of ready-to-receive indication offered or accepted.
    pub rtr: RtrKinds,
}

/// Settings of a connection.
#[derive(Debug, Clone)]
pub struct Config {
    /// Protection domain and number of the queue pair.
    pub scope: Scope,
    /// MPA start-up.
    pub mpa: MpaOptions,
    /// What the peer may do to our memory through this queue pair at all, whatever its regions
    /// allow: [`Access::REMOTE_WRITE`], [`Access::REMOTE_READ`], [`Access::REMOTE_ATOMIC`].
    pub remote_access: Access,
    /// READs and atomics of the peer served at a time (inbound depth), 0..=16383.
    pub ird: u16,
    /// READs and atomics outstanding at a time (outbound depth), 0..=16383.
    pub ord: u16,
    /// Length of the send queue.
    pub max_send_wr: usize,
    /// Length of the receive queue.
    pub max_recv_wr: usize,
    /// Pieces a work request may have.
    pub max_sge: usize,
    /// Octets of inline data a work request may have.
    pub max_inline: usize,
    /// How long the start-up may take.
    pub startup_timeout: Duration,
    /// How long a graceful close may take before the connection is torn down.
    pub close_timeout: Duration,
    /// Initiator: where nothing has come this long after our first FPDU was sent, one empty WRITE
    /// follows it. Linux's siw, as responder, overlooks an FPDU that comes right behind its reply
    /// until something else comes. `None`: never.
    pub nudge: Option<Duration>,
    /// Seeds the keys of READ sinks: draw it from the system's generator.
    pub seed: u64,
}

impl Config {
    /// The defaults for a queue pair `qpn` in the domain `pd`.
    pub fn new(pd: PdId, qpn: Qpn, seed: u64) -> Self {
        Self {
            scope: Scope { pd, qpn },
            mpa: MpaOptions::default(),
            remote_access: Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC,
            ird: 16,
            ord: 16,
            max_send_wr: 128,
            max_recv_wr: 128,
            max_sge: 16,
            max_inline: 256,
            startup_timeout: Duration::from_secs(10),
            close_timeout: Duration::from_secs(10),
            nudge: Some(Duration::from_millis(100)),
            seed,
        }
    }
}

impl Default for MpaOptions {
    /// Revision 2, CRC on, no markers, client-server, every RTR kind understood.
    fn default() -> Self {
        Self { revision: 2, crc: true, markers: false, peer_to_peer: false, rtr: RtrKinds::all() }
    }
}

/// A connection request that arrived: answer with [`Connection::accept`](super::Connection::accept) or [`Connection::reject`](super::Connection::reject).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// The peer's private data.
    pub private_data: Vec<u8>,
    /// READs and atomics the peer serves at a time, if it said so (revision 2).
    pub ird: Option<u16>,
    /// READs and atomics the peer wants to have outstanding, if it said so.
    pub ord: Option<u16>,
    /// MPA revision of the request.
    pub revision: u8,
    /// Whether the peer asked for a peer-to-peer start-up.
    pub peer_to_peer: bool,
}

/// The start-up is done.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Established {
    /// Private data of the reply (initiator; empty at the responder).
    pub private_data: Vec<u8>,
    /// READs and atomics served at a time.
    pub ird: u16,
    /// READs and atomics that may be outstanding.
    pub ord: u16,
    /// MPA revision in use.
    pub revision: u8,
    /// Whether the CRC is made and checked.
    pub crc: bool,
    /// Whether we put markers into what we send.
    pub markers_out: bool,
    /// Whether the peer does.
    pub markers_in: bool,
    /// The ready-to-receive indication in use.
    pub rtr: Option<RtrKinds>,
}

/// Why no connection came about.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum StartupError {
    /// The peer's program said no.
    #[error("the peer rejected the connection ({} octets of private data)", private_data.len())]
    Rejected {
        /// What it said.
        private_data: Vec<u8>,
        /// READs and atomics the peer serves at a time, if it said so.
        ird: Option<u16>,
        /// READs and atomics the peer wants, if it said so.
        ord: Option<u16>,
    },
    /// The peer closed before a single octet came: an unenhanced responder does so with revision 2
    /// (RFC 6581 §10). Try once more with revision 1.
    #[error("the peer closed the connection without an answer to the MPA request")]
    ClosedSilently,
    /// The peer closed or reset in the middle of the start-up.
    #[error("the connection was lost during the MPA start-up")]
    Lost,
    /// The peer said nothing in time.
    #[error("the MPA start-up took longer than {0:?}")]
    TimedOut(Duration),
    /// What came was no start-up frame.
    #[error("{0}")]
    Malformed(#[from] wire::Error),
    /// Well-formed, but not what may come here.
    #[error("MPA start-up: {0}")]
    Protocol(&'static str),
    /// We were told to give up.
    #[error("given up by the local side")]
    Aborted,
}

/// Why an established connection ended.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum CloseReason {
    /// Both sides closed in order.
    Graceful,
    /// The peer sent a Terminate.
    TerminateReceived(Terminate),
    /// We found an error and sent a Terminate.
    TerminateSent(Terminate),
    /// TCP was reset, timed out, or ended in the middle of work.
    Lost,
    /// We were told to abort.
    Aborted,
    /// The program took memory away that it had posted for sending, after the headers in front of
    /// it had left: the stream cannot go on.
    SourceRevoked,
}

/// What the program has to know.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// Responder: a request is waiting for an answer.
    Request(Request),
    /// The start-up is done; sends may be posted.
    Established(Established),
    /// No connection came about. Nothing follows.
    StartupFailed(StartupError),
    /// The peer closed its side: nothing more arrives. Work that was posted is still sent.
    PeerClosed,
    /// The connection is over, all work is flushed. Nothing follows.
    Closed(CloseReason),
}

/// A finished work request. Unsignalled work that succeeds makes none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completion {
    /// The driver's own number from the post.
    pub tag: u64,
    /// What the program sees.
    pub wc: Wc,
}

/// What the driver has to do with the socket once everything before it is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Shutdown {
    /// Shut the sending side down (FIN), go on receiving.
    Write,
    /// Close the socket in order (after a FIN both ways, or a Terminate).
    Close,
    /// Close it abortively (RST).
    Abort,
}

/// Counters of a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct Stats {
    /// FPDUs sent.
    pub fpdus_sent: u64,
    /// FPDUs received whole and found good.
    pub fpdus_received: u64,
    /// Octets of payload sent.
    pub payload_sent: u64,
    /// Octets of payload placed.
    pub payload_received: u64,
    /// Receives that the peer's messages used up, good or bad. Where several connections share
    /// them, this tells who takes how many (RFC 5041 §8.3.2 rule 5).
    pub receives: u64,
    /// FPDUs whose CRC was wrong.
    pub crc_errors: u64,
    /// FPDUs that broke MPA framing, DDP or RDMAP rules.
    pub protocol_errors: u64,
    /// Accesses of the peer that were refused.
    pub access_errors: u64,
}
