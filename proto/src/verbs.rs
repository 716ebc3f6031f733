//! Plain data that an RDMA program and both transports speak: work requests, completions, queue
//! pair states, access rights. Numeric values are those of `infiniband/verbs.h`, so that a C ABI
//! can pass them through.

use core::{fmt, net::SocketAddr};

use smallvec::SmallVec;

use crate::wire::{
    ids::{LKey, QKey, Qpn, RKey},
    roce::feth::{Placement, Selectivity},
};

bitflags::bitflags! {
    /// What a memory region may be used for. Local reading is always allowed.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct Access: u32 {
        /// The local side may write: needed by receives, READ sinks and atomic results.
        const LOCAL_WRITE = 0x01;
        /// A peer may WRITE. Needs [`Access::LOCAL_WRITE`] in the verbs of C; here it stands alone.
        const REMOTE_WRITE = 0x02;
        /// A peer may READ.
        const REMOTE_READ = 0x04;
        /// A peer may FetchAdd and CmpSwap.
        const REMOTE_ATOMIC = 0x08;
        /// A peer may FLUSH what it wrote so far that every reader here sees it.
        const FLUSH_GLOBAL = 0x0100;
        /// A peer may FLUSH what it wrote so far that it outlasts a loss of power: only for memory
        /// that does.
        const FLUSH_PERSISTENT = 0x0200;
        /// A peer may revoke the key by SEND with invalidate, and the program by a local
        /// invalidate (verbs have no such flag for a region: it is a right of memory windows there).
        const REMOTE_INVALIDATE = 0x0001_0000;
    }
}

bitflags::bitflags! {
    /// How one send work request is to be carried out.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
    pub struct SendFlags: u32 {
        /// Start only when all READs and atomics posted before have completed.
        const FENCE = 0x01;
        /// Report a completion when done. Work that fails is always reported.
        const SIGNALED = 0x02;
        /// Raise a solicited event at the receiver (SEND and Immediate only).
        const SOLICITED = 0x04;
    }
}

/// A piece of registered local memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Sge {
    /// Address within the region's address range (its iova), in octets.
    pub addr: u64,
    /// Length in octets; 0 is allowed and touches nothing.
    pub length: u32,
    /// Key of the region.
    pub lkey: LKey,
}

impl Sge {
    /// A piece of `length` octets at `addr` of the region that `lkey` names.
    pub const fn new(addr: u64, length: u32, lkey: LKey) -> Self {
        Self { addr, length, lkey }
    }
}

/// A gather or scatter list.
pub type SgeList = SmallVec<[Sge; 2]>;

/// Octets carried inside a work request.
pub type InlineData = SmallVec<[u8; 32]>;

/// A place in a peer's registered memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct RemoteAddr {
    /// Address within the peer's region (iWARP: the tagged offset).
    pub addr: u64,
    /// Key of the peer's region (iWARP: the STag).
    pub rkey: RKey,
}

impl RemoteAddr {
    /// The place `addr` of the region that `rkey` names.
    pub const fn new(addr: u64, rkey: RKey) -> Self {
        Self { addr, rkey }
    }
}

/// Immediate data as it completes at a receiver: 8 octets on iWARP (RFC 7306 §6), of which the
/// verbs' 32-bit immediate is the first four; on RoCE the last four are zero.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Imm(pub u64);

impl Imm {
    /// The 32-bit immediate of verbs, placed in the first four octets.
    pub const fn from_u32(imm: u32) -> Self {
        Self((imm as u64) << 32)
    }

    /// The 32-bit immediate of verbs: the first four octets.
    pub const fn to_u32(self) -> u32 {
        (self.0 >> 32) as u32
    }
}

impl fmt::Debug for Imm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Imm({:#018x})", self.0)
    }
}

/// What a send work request does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SendOp {
    /// Send the data to the peer's next receive.
    Send,
    /// SEND with a 32-bit immediate (RoCE; iWARP has no such message).
    SendImm(u32),
    /// SEND, and revoke this key at the peer.
    SendInv(RKey),
    /// Write the data into the peer's memory.
    Write(RemoteAddr),
    /// WRITE, then consume one receive of the peer with a 32-bit immediate.
    WriteImm(RemoteAddr, u32),
    /// Read from the peer's memory into the data's place.
    Read(RemoteAddr),
    /// Immediate data alone: 8 octets, no payload (iWARP, RFC 7306 §6).
    Imm(Imm),
    /// Add to the 8-octet word in the peer's memory; the old value lands in the data's place.
    FetchAdd {
        /// The word; its address must be a multiple of 8.
        remote: RemoteAddr,
        /// What is added.
        add: u64,
        /// Field boundaries: no carry leaves a bit that is set here (RFC 7306 §5.1.1). 0 adds plainly.
        mask: u64,
    },
    /// Compare the 8-octet word in the peer's memory and, where equal, swap; the old value lands
    /// in the data's place.
    CmpSwap {
        /// The word; its address must be a multiple of 8.
        remote: RemoteAddr,
        /// What it is compared with.
        compare: u64,
        /// What replaces it.
        swap: u64,
        /// Bits that are compared. All ones compares plainly, 0 always swaps.
        compare_mask: u64,
        /// Bits that are replaced. All ones swaps plainly.
        swap_mask: u64,
    },
    /// Revoke a key of our own (no message).
    LocalInv(RKey),
    /// Make sure that what was written at the peer has come far enough (RoCE, IBTA annex A19).
    Flush {
        /// Where the range begins; for a whole region any place in it.
        remote: RemoteAddr,
        /// Octets of the range.
        len: u32,
        /// How far they must have come.
        placement: Placement,
        /// The range, or the whole region.
        selectivity: Selectivity,
    },
    /// Write the data, exactly 8 octets, as one word that no reader sees in halves; the address
    /// must be a multiple of 8 (RoCE, IBTA annex A19).
    AtomicWrite(RemoteAddr),
}

impl SendOp {
    /// What its completion calls it.
    pub const fn wc_opcode(&self) -> WcOpcode {
        match self {
            Self::Send | Self::SendImm(_) | Self::SendInv(_) | Self::Imm(_) => WcOpcode::SEND,
            Self::Write(_) | Self::WriteImm(..) => WcOpcode::WRITE,
            Self::Read(_) => WcOpcode::READ,
            Self::FetchAdd { .. } => WcOpcode::FETCH_ADD,
            Self::CmpSwap { .. } => WcOpcode::CMP_SWAP,
            Self::LocalInv(_) => WcOpcode::LOCAL_INV,
            Self::Flush { .. } => WcOpcode::FLUSH,
            Self::AtomicWrite(_) => WcOpcode::ATOMIC_WRITE,
        }
    }

    /// Its name in messages.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Send => "SEND",
            Self::SendImm(_) => "SEND with immediate",
            Self::SendInv(_) => "SEND with invalidate",
            Self::Write(_) => "WRITE",
            Self::WriteImm(..) => "WRITE with immediate",
            Self::Read(_) => "READ",
            Self::Imm(_) => "a stand-alone Immediate",
            Self::FetchAdd { mask: 0, .. } => "FETCH_ADD",
            Self::FetchAdd { .. } => "a masked FETCH_ADD",
            Self::CmpSwap { compare_mask: u64::MAX, swap_mask: u64::MAX, .. } => "CMP_SWAP",
            Self::CmpSwap { .. } => "a masked CMP_SWAP",
            Self::LocalInv(_) => "a local invalidate",
            Self::Flush { .. } => "FLUSH",
            Self::AtomicWrite(_) => "ATOMIC_WRITE",
        }
    }
}

/// The octets of a work request: in registered memory, or inside the request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Payload {
    /// Gather (SEND, WRITE) from or scatter (READ, atomics) to these pieces.
    Sges(SgeList),
    /// Octets copied at the call: the caller may reuse its buffer at once.
    Inline(InlineData),
}

impl Payload {
    /// Length in octets.
    pub fn len(&self) -> u64 {
        match self {
            Self::Sges(sges) => sges.iter().map(|s| u64::from(s.length)).sum(),
            Self::Inline(data) => data.len() as u64,
        }
    }

    /// Whether there are no octets.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The pieces that make up `len` octets from `offset` of a gather or scatter list.
pub(crate) fn pieces(sges: &[Sge], offset: u32, len: u32) -> impl Iterator<Item = Sge> + '_ {
    let (mut skip, mut left) = (offset, len);
    sges.iter()
        .map_while(move |sge| {
            if left == 0 {
                return None;
            }
            let from = skip.min(sge.length);
            skip -= from;
            let take = (sge.length - from).min(left);
            left -= take;
            Some(Sge::new(sge.addr.wrapping_add(u64::from(from)), take, sge.lkey))
        })
        .filter(|sge| sge.length > 0)
}

/// The kind of a queue pair.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum QpType {
    /// Reliable connection.
    Rc = 2,
    /// Unreliable connection: what is lost is lost.
    Uc = 3,
    /// Unreliable datagram: each SEND says where it goes.
    Ud = 4,
}

/// Where a datagram goes: what verbs split into address handle, queue pair and Q_Key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct UdDest {
    /// The peer's UDP socket.
    pub addr: SocketAddr,
    /// The queue pair there.
    pub qpn: Qpn,
    /// What that queue pair asks for. With the upper bit set our own queue pair's Q_Key goes out
    /// in its place (IBTA vol. 1, 10.2.5).
    pub qkey: QKey,
}

/// A send work request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SendWr {
    /// The program's own number, given back in the completion.
    pub id: u64,
    /// What to do.
    pub op: SendOp,
    /// With which octets.
    pub payload: Payload,
    /// How.
    pub flags: SendFlags,
    /// Where to: for queue pairs of type UD, and only for those.
    pub dest: Option<UdDest>,
}

impl SendWr {
    /// A signalled request for `op` on the pieces `sges`.
    pub fn new(id: u64, op: SendOp, sges: impl IntoIterator<Item = Sge>) -> Self {
        Self {
            id,
            op,
            payload: Payload::Sges(sges.into_iter().collect()),
            flags: SendFlags::SIGNALED,
            dest: None,
        }
    }

    /// A signalled request for `op` that carries `data` inside.
    #[inline]
    pub fn inline(id: u64, op: SendOp, data: &[u8]) -> Self {
        Self {
            id,
            op,
            payload: Payload::Inline(InlineData::from_slice(data)),
            flags: SendFlags::SIGNALED,
            dest: None,
        }
    }

    /// A signalled SEND of the pieces `sges`.
    pub fn send(id: u64, sges: impl IntoIterator<Item = Sge>) -> Self {
        Self::new(id, SendOp::Send, sges)
    }

    /// A signalled WRITE of the pieces `sges` to `remote`.
    pub fn write(id: u64, sges: impl IntoIterator<Item = Sge>, remote: RemoteAddr) -> Self {
        Self::new(id, SendOp::Write(remote), sges)
    }

    /// A signalled READ from `remote` into the pieces `sges`.
    pub fn read(id: u64, sges: impl IntoIterator<Item = Sge>, remote: RemoteAddr) -> Self {
        Self::new(id, SendOp::Read(remote), sges)
    }

    /// A signalled FetchAdd; the old value lands in `result` (8 octets).
    pub fn fetch_add(id: u64, result: Sge, remote: RemoteAddr, add: u64) -> Self {
        let op = SendOp::FetchAdd { remote, add, mask: 0 };
        Self::new(id, op, [result])
    }

    /// A signalled CmpSwap; the old value lands in `result` (8 octets).
    pub fn cmp_swap(id: u64, result: Sge, remote: RemoteAddr, compare: u64, swap: u64) -> Self {
        let op =
            SendOp::CmpSwap { remote, compare, swap, compare_mask: u64::MAX, swap_mask: u64::MAX };
        Self::new(id, op, [result])
    }

    /// A signalled FLUSH of `len` octets from `remote` on.
    pub fn flush(id: u64, remote: RemoteAddr, len: u32, placement: Placement) -> Self {
        let selectivity = Selectivity::RANGE;
        Self::new(id, SendOp::Flush { remote, len, placement, selectivity }, [])
    }

    /// A signalled ATOMIC_WRITE of `word` to `remote`.
    pub fn atomic_write(id: u64, remote: RemoteAddr, word: [u8; 8]) -> Self {
        Self::inline(id, SendOp::AtomicWrite(remote), &word)
    }

    /// The same request as a datagram to `dest`.
    #[must_use]
    pub fn to(mut self, dest: UdDest) -> Self {
        self.dest = Some(dest);
        self
    }

    /// The same request without a completion when it succeeds.
    #[must_use]
    pub fn unsignaled(mut self) -> Self {
        self.flags.remove(SendFlags::SIGNALED);
        self
    }

    /// The same request with `flags` added.
    #[must_use]
    pub fn with_flags(mut self, flags: SendFlags) -> Self {
        self.flags.insert(flags);
        self
    }
}

/// A receive work request.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RecvWr {
    /// The program's own number, given back in the completion.
    pub id: u64,
    /// Where the octets of the next SEND are placed, piece after piece. May be empty: such a
    /// receive takes SENDs without payload and immediates.
    pub sges: SgeList,
}

impl RecvWr {
    /// A receive into the pieces `sges`.
    pub fn new(id: u64, sges: impl IntoIterator<Item = Sge>) -> Self {
        Self { id, sges: sges.into_iter().collect() }
    }

    /// Octets it takes in all, where a queue of `max_sge` pieces a request has room for it.
    ///
    /// # Errors
    /// [`PostError::TooManySges`]; [`PostError::TooLong`] for more octets than a message has.
    pub fn check(&self, max_sge: usize) -> Result<u32, PostError> {
        if self.sges.len() > max_sge {
            return Err(PostError::TooManySges { max: max_sge, have: self.sges.len() });
        }
        let have = self.sges.iter().map(|sge| u64::from(sge.length)).sum();
        u32::try_from(have).map_err(|_| PostError::TooLong { max: u64::from(u32::MAX), have })
    }
}

/// How a work request ended. Open: an unknown number prints as such.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct WcStatus(pub u32);

macro_rules! open_code {
    ($ty:ident { $($(#[$doc:meta])* $name:ident = $value:expr, $text:expr;)* }) => {
        impl $ty {
            $($(#[$doc])* pub const $name: Self = Self($value);)*

            /// The name in the words of verbs, if the number has one.
            pub const fn name(self) -> Option<&'static str> {
                match self.0 {
                    $($value => Some($text),)*
                    _ => None,
                }
            }
        }

        impl fmt::Display for $ty {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                match self.name() {
                    Some(name) => f.write_str(name),
                    None => write!(f, "unknown ({})", self.0),
                }
            }
        }

        impl fmt::Debug for $ty {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, concat!(stringify!($ty), "({})"), self)
            }
        }
    };
}

open_code!(WcStatus {
    /// Done.
    SUCCESS = 0, "success";
    /// A local buffer is too small, or a message too long.
    LOC_LEN_ERR = 1, "local length error";
    /// The local queue pair cannot do this.
    LOC_QP_OP_ERR = 2, "local QP operation error";
    /// A local key, its domain, its rights or its bounds do not allow this.
    LOC_PROT_ERR = 4, "local protection error";
    /// Not carried out: the queue pair went to the error state first.
    WR_FLUSH_ERR = 5, "work request flushed";
    /// The peer answered with something unexpected.
    BAD_RESP_ERR = 7, "bad response";
    /// A local access failed while data from the peer was placed.
    LOC_ACCESS_ERR = 8, "local access error";
    /// The peer found the request invalid.
    REM_INV_REQ_ERR = 9, "remote invalid request";
    /// The peer's key, domain, rights or bounds do not allow this.
    REM_ACCESS_ERR = 10, "remote access error";
    /// The peer could not carry it out.
    REM_OP_ERR = 11, "remote operation error";
    /// No answer after all retries, or the connection broke.
    RETRY_EXC_ERR = 12, "transport retries exceeded";
    /// The peer never had a receive ready.
    RNR_RETRY_EXC_ERR = 13, "receiver-not-ready retries exceeded";
    /// The transport broke down.
    FATAL_ERR = 19, "fatal error";
    /// No response in time.
    RESP_TIMEOUT_ERR = 20, "response time-out";
    /// Something else.
    GENERAL_ERR = 21, "general error";
});

impl WcStatus {
    /// Whether the work was done.
    pub const fn is_ok(self) -> bool {
        self.0 == Self::SUCCESS.0
    }
}

/// What a completed work request was.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct WcOpcode(pub u32);

open_code!(WcOpcode {
    /// A SEND of any kind, or an Immediate.
    SEND = 0, "SEND";
    /// An RDMA WRITE.
    WRITE = 1, "WRITE";
    /// An RDMA READ.
    READ = 2, "READ";
    /// A CmpSwap.
    CMP_SWAP = 3, "CMP_SWAP";
    /// A FetchAdd.
    FETCH_ADD = 4, "FETCH_ADD";
    /// A local invalidate.
    LOCAL_INV = 6, "LOCAL_INV";
    /// A FLUSH.
    FLUSH = 8, "FLUSH";
    /// An ATOMIC_WRITE.
    ATOMIC_WRITE = 9, "ATOMIC_WRITE";
    /// A receive consumed by a SEND.
    RECV = 128, "RECV";
    /// A receive consumed by immediate data without payload of its own (WRITE with immediate,
    /// or iWARP's Immediate).
    RECV_IMM = 129, "RECV_IMM";
});

impl WcOpcode {
    /// Whether this was a receive.
    pub const fn is_recv(self) -> bool {
        self.0 & 128 != 0
    }
}

/// A work completion.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wc {
    /// The number that the work request carried.
    pub id: u64,
    /// How it ended. After an error only `id`, `qpn`, `opcode` and `vendor_err` mean anything.
    pub status: WcStatus,
    /// What it was.
    pub opcode: WcOpcode,
    /// Octets moved (receives, READs and atomics).
    pub byte_len: u32,
    /// Immediate data, where the message carried any.
    pub imm: Option<Imm>,
    /// The key that a SEND with invalidate revoked here.
    pub invalidated: Option<RKey>,
    /// Whether the sender asked for a solicited event.
    pub solicited: bool,
    /// The queue pair.
    pub qpn: Qpn,
    /// UD: the queue pair that sent it. Its address is in the 40 octets of GRH in front of the
    /// payload, which `byte_len` counts.
    pub src_qp: Option<Qpn>,
    /// What the transport knows beyond `status`: on iWARP the first two octets of the Terminate
    /// (layer, type, code), on RoCE the AETH syndrome of the NAK; 0 otherwise.
    pub vendor_err: u32,
}

impl Default for Wc {
    fn default() -> Self {
        Self {
            id: 0,
            status: WcStatus::SUCCESS,
            opcode: WcOpcode::SEND,
            byte_len: 0,
            imm: None,
            invalidated: None,
            solicited: false,
            qpn: Qpn(0),
            src_qp: None,
            vendor_err: 0,
        }
    }
}

/// The state of a queue pair.
///
/// ```text
///  RESET ─► INIT ─► RTR ─► RTS ─► SQD
///    ▲        │       │      │      │
///    │        └───────┴──┬───┴──────┘
///    └── destroy ◄── ERR ◄┘
/// ```
///
/// Receives may be posted from INIT on, sends from RTS on. In ERR both are taken and flushed. A
/// connection manager that moves a queue pair by itself, as iWARP's start-up does, shows INIT, RTS,
/// SQD while it closes, and ERR.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum QpState {
    /// Made, nothing else.
    Reset,
    /// Receives may be posted.
    Init,
    /// Ready to receive: connected, but may not send yet.
    Rtr,
    /// Ready to send.
    Rts,
    /// The send queue drains; nothing new starts.
    Sqd,
    /// Broken or closed: everything is flushed.
    Err,
}

/// Why a post was refused. Nothing changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum PostError {
    /// The transport has no such operation.
    #[error("{op} is not supported by {transport}")]
    Unsupported {
        /// The operation.
        op: &'static str,
        /// The transport.
        transport: &'static str,
    },
    /// The queue is full: poll completions first, or make the queue longer.
    #[error("the queue is full: {max} work requests are outstanding")]
    QueueFull {
        /// Its length.
        max: usize,
    },
    /// The queue pair has no receive queue of its own: post to the shared one, which it takes its
    /// receives from.
    #[error(
        "the queue pair takes its receives from a shared receive queue: post them to that queue"
    )]
    SharedReceives,
    /// The completion queue holds more than its length already, and is of no use any more.
    #[error(
        "the completion queue overflowed ({depth} entries), so nothing new is taken: make it as \
         deep as all work that is outstanding at a time, or poll it more often"
    )]
    CqOverflow {
        /// Completions it holds.
        depth: usize,
    },
    /// The queue pair is not in a state that takes this.
    #[error("the queue pair is in state {0:?}, which takes no such work")]
    BadState(QpState),
    /// Too many pieces.
    #[error("{have} pieces in the gather/scatter list, at most {max} are allowed")]
    TooManySges {
        /// How many there may be.
        max: usize,
        /// How many there are.
        have: usize,
    },
    /// Too much inline data.
    #[error("{have} octets of inline data, at most {max} are allowed")]
    InlineTooLong {
        /// How much there may be.
        max: usize,
        /// How much there is.
        have: usize,
    },
    /// The message is longer than the transport can carry.
    #[error("a message of {have} octets, at most {max} are allowed")]
    TooLong {
        /// How long it may be.
        max: u64,
        /// How long it is.
        have: u64,
    },
    /// The request contradicts itself.
    #[error("{0}")]
    Invalid(&'static str),
}
