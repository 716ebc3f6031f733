//! THE table: which headers follow which opcode.

use core::fmt;

bitflags::bitflags! {
    /// Extended headers behind a BTH. On the wire they stand in the order of their bits.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub struct Ext: u16 {
        /// Reliable datagram.
        const RDETH = 1 << 0;
        /// XRC.
        const XRCETH = 1 << 1;
        /// Datagram.
        const DETH = 1 << 2;
        /// FLUSH.
        const FETH = 1 << 3;
        /// RDMA.
        const RETH = 1 << 4;
        /// Atomic request.
        const ATOMIC_ETH = 1 << 5;
        /// ACK.
        const AETH = 1 << 6;
        /// Atomic acknowledgement.
        const ATOMIC_ACK_ETH = 1 << 7;
        /// Immediate data.
        const IMMDT = 1 << 8;
        /// Invalidate.
        const IETH = 1 << 9;
    }
}

/// The transport service of an opcode: its upper three bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Transport {
    /// Reliable connection.
    Rc,
    /// Unreliable connection.
    Uc,
    /// Reliable datagram.
    Rd,
    /// Unreliable datagram.
    Ud,
    /// Congestion notification.
    Cnp,
    /// Extended reliable connection.
    Xrc,
}

/// What an operation is, whatever the transport.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Operation {
    /// SEND.
    Send,
    /// RDMA WRITE.
    Write,
    /// RDMA READ request.
    ReadRequest,
    /// RDMA READ response.
    ReadResponse,
    /// Acknowledge.
    Ack,
    /// Atomic acknowledge.
    AtomicAck,
    /// Compare and swap.
    CmpSwap,
    /// Fetch and add.
    FetchAdd,
    /// RD resynchronisation.
    Resync,
    /// FLUSH.
    Flush,
    /// Atomic WRITE.
    AtomicWrite,
    /// Congestion notification.
    Cnp,
}

/// Which packet of its message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Place {
    /// The first of several.
    First,
    /// Neither first nor last.
    Middle,
    /// The last of several.
    Last,
    /// The only one.
    Only,
}

/// What may stand between the headers and the ICRC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Payload {
    /// Nothing.
    None,
    /// 0 up to path MTU octets, padded to a multiple of 4.
    Any,
    /// Exactly so many octets.
    Exactly(u8),
}

/// One row of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Info {
    /// The code.
    pub opcode: Opcode,
    /// Such as `RC_SEND_ONLY_INV`.
    pub name: &'static str,
    /// The transport.
    pub transport: Transport,
    /// What it does.
    pub operation: Operation,
    /// Which packet of its message.
    pub place: Place,
    /// Headers behind the BTH.
    pub ext: Ext,
    /// Octets of them.
    pub ext_len: u8,
    /// What follows them.
    pub payload: Payload,
    /// Whether it is a request (goes from requester to responder).
    pub request: bool,
    /// Whether the message takes a posted receive (told at its last or only packet).
    pub takes_receive: bool,
}

/// The BTH's first octet; open: a value without a row in the table survives.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Opcode(pub u8);

/// Every opcode there is, rising.
pub static TABLE: &[Info] = &[];

impl Opcode {
    /// Its row of the table; `None` for a code that no specification defines.
    #[inline]
    pub fn info(self) -> Option<&'static Info> {
        unimplemented!()
    }

    /// Its name; `None` for a code that no specification defines.
    pub fn name(self) -> Option<&'static str> {
        self.info().map(|info| info.name)
    }
}

impl fmt::Display for Opcode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name),
            None => write!(f, "opcode {:#04x}", self.0),
        }
    }
}

impl fmt::Debug for Opcode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
