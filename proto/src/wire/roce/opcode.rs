//! THE table: which headers follow which opcode (IBTA vol. 1, 9.2.2 and 9.6; CNP: annex A17.9.1;
//! XRC: annex A14; FLUSH and ATOMIC WRITE: annex A19).
//!
//! An opcode is one octet, the BTH's first: three bits of transport and five of operation.
//!
//! ```text
//!    7   6   5   4   3   2   1   0
//!  +---+---+---+---+---+---+---+---+
//!  | transport |     operation     |   000 RC   001 UC   010 RD   011 UD   100 CNP   101 XRC
//!  +---+---+---+---+---+---+---+---+
//! ```
//!
//! The operations are written down once, for RC. The other transports take the ones they have, and
//! put their own headers in front. Parser, builder, decoder and generators of test packets all read
//! [`TABLE`].

use core::fmt;

bitflags::bitflags! {
    /// Extended headers behind a BTH. On the wire they stand in the order of their bits.
    #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
    pub struct Ext: u16 {
        /// Reliable datagram: [`Rdeth`](super::rdeth::Rdeth).
        const RDETH = 1 << 0;
        /// XRC: [`Xrceth`](super::xrceth::Xrceth).
        const XRCETH = 1 << 1;
        /// Datagram: [`Deth`](super::deth::Deth).
        const DETH = 1 << 2;
        /// FLUSH: [`Feth`](super::feth::Feth).
        const FETH = 1 << 3;
        /// RDMA: [`Reth`](super::reth::Reth).
        const RETH = 1 << 4;
        /// Atomic request: [`AtomicEth`](super::atomic::AtomicEth).
        const ATOMIC_ETH = 1 << 5;
        /// ACK: [`Aeth`](super::aeth::Aeth).
        const AETH = 1 << 6;
        /// Atomic acknowledgement: [`AtomicAckEth`](super::atomic::AtomicAckEth).
        const ATOMIC_ACK_ETH = 1 << 7;
        /// Immediate data: [`ImmDt`](super::immdt::ImmDt).
        const IMMDT = 1 << 8;
        /// Invalidate: [`Ieth`](super::ieth::Ieth).
        const IETH = 1 << 9;
    }
}

impl Ext {
    /// Name in the specification and length in octets of each header, in the order of the bits.
    pub const HEADERS: [(&str, usize); 10] = [
        ("RDETH", size_of::<super::rdeth::Rdeth>()),
        ("XRCETH", size_of::<super::xrceth::Xrceth>()),
        ("DETH", size_of::<super::deth::Deth>()),
        ("FETH", size_of::<super::feth::Feth>()),
        ("RETH", size_of::<super::reth::Reth>()),
        ("AtomicETH", size_of::<super::atomic::AtomicEth>()),
        ("AETH", size_of::<super::aeth::Aeth>()),
        ("AtomicAckETH", size_of::<super::atomic::AtomicAckEth>()),
        ("ImmDt", size_of::<super::immdt::ImmDt>()),
        ("IETH", size_of::<super::ieth::Ieth>()),
    ];

    /// Octets that these headers take together.
    pub const fn octets(self) -> usize {
        let (mut sum, mut bit) = (0, 0);
        while bit < Self::HEADERS.len() {
            if self.bits() & (1 << bit) != 0 {
                sum += Self::HEADERS[bit].1;
            }
            bit += 1;
        }
        sum
    }

    /// Name and length of each of these headers, in the order of the wire.
    pub fn headers(self) -> impl Iterator<Item = (&'static str, usize)> {
        let headers = Self::HEADERS.into_iter().enumerate();
        headers.filter(move |(bit, _)| self.bits() & (1 << bit) != 0).map(|(_, header)| header)
    }
}

/// The transport service of an opcode: its upper three bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Transport {
    /// Reliable connection, 000.
    Rc,
    /// Unreliable connection, 001.
    Uc,
    /// Reliable datagram, 010.
    Rd,
    /// Unreliable datagram, 011.
    Ud,
    /// Congestion notification, 100.
    Cnp,
    /// Extended reliable connection, 101.
    Xrc,
}

impl Transport {
    /// All of them, in the order of their codes.
    pub const ALL: [Self; 6] = [Self::Rc, Self::Uc, Self::Rd, Self::Ud, Self::Cnp, Self::Xrc];

    /// The bits it adds to an operation's code: 0x00, 0x20, 0x40, 0x60, 0x80, 0xa0.
    pub const fn bits(self) -> u8 {
        (self as u8) << 5
    }

    /// Its rows of the table, in rising order.
    pub fn rows(self) -> impl Iterator<Item = &'static Info> {
        TABLE.iter().filter(move |info| info.transport == self)
    }

    /// What stands in front of an operation's own headers.
    const fn front(self, request: bool) -> Ext {
        match (self, request) {
            (Self::Rd, true) => Ext::RDETH.union(Ext::DETH),
            (Self::Rd, false) => Ext::RDETH,
            (Self::Ud, _) => Ext::DETH,
            (Self::Xrc, true) => Ext::XRCETH,
            _ => Ext::empty(),
        }
    }
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
    /// RDMA READ response; also the answer to FLUSH and to atomic WRITE.
    ReadResponse,
    /// Acknowledge: ACK, RNR NAK or NAK.
    Ack,
    /// Atomic acknowledge: the answer to compare-and-swap and to fetch-and-add.
    AtomicAck,
    /// Compare and swap.
    CmpSwap,
    /// Fetch and add.
    FetchAdd,
    /// RD resynchronisation.
    Resync,
    /// FLUSH.
    Flush,
    /// Atomic WRITE of eight octets.
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

impl Place {
    /// Whether a message begins here.
    pub const fn begins(self) -> bool {
        matches!(self, Self::First | Self::Only)
    }

    /// Whether a message ends here.
    pub const fn ends(self) -> bool {
        matches!(self, Self::Last | Self::Only)
    }
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
    /// Whether this packet takes a posted receive: the first or only one of a SEND, the last or
    /// only one of a WRITE with immediate.
    pub takes_receive: bool,
}

/// The BTH's first octet; open: a value without a row in the table survives.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Opcode(pub u8);

/// The operations as RC has them, with names that begin with `$transport`.
macro_rules! operations {
    ($transport:literal) => {{
        use Operation as Op;
        use Place::{First, Last, Middle, Only};
        const ANY: Payload = Payload::Any;
        const NOTHING: Payload = Payload::None;
        const EIGHT: Payload = Payload::Exactly(8);
        const NONE: Ext = Ext::empty();
        const RETH_IMMDT: Ext = Ext::RETH.union(Ext::IMMDT);
        const AETH_ORIGINAL: Ext = Ext::AETH.union(Ext::ATOMIC_ACK_ETH);
        const FETH_RETH: Ext = Ext::FETH.union(Ext::RETH);
        macro_rules! row {
            ($code:literal, $name:literal, $op:ident, $place:ident, $ext:expr, $payload:expr) => {
                row($code, concat!($transport, $name), (Op::$op, $place), $ext, $payload)
            };
        }
        [
            row!(0x00, "_SEND_FIRST", Send, First, NONE, ANY),
            row!(0x01, "_SEND_MIDDLE", Send, Middle, NONE, ANY),
            row!(0x02, "_SEND_LAST", Send, Last, NONE, ANY),
            row!(0x03, "_SEND_LAST_IMM", Send, Last, Ext::IMMDT, ANY),
            row!(0x04, "_SEND_ONLY", Send, Only, NONE, ANY),
            row!(0x05, "_SEND_ONLY_IMM", Send, Only, Ext::IMMDT, ANY),
            row!(0x06, "_WRITE_FIRST", Write, First, Ext::RETH, ANY),
            row!(0x07, "_WRITE_MIDDLE", Write, Middle, NONE, ANY),
            row!(0x08, "_WRITE_LAST", Write, Last, NONE, ANY),
            row!(0x09, "_WRITE_LAST_IMM", Write, Last, Ext::IMMDT, ANY),
            row!(0x0a, "_WRITE_ONLY", Write, Only, Ext::RETH, ANY),
            row!(0x0b, "_WRITE_ONLY_IMM", Write, Only, RETH_IMMDT, ANY),
            row!(0x0c, "_READ_REQUEST", ReadRequest, Only, Ext::RETH, NOTHING),
            row!(0x0d, "_READ_RESP_FIRST", ReadResponse, First, Ext::AETH, ANY),
            row!(0x0e, "_READ_RESP_MIDDLE", ReadResponse, Middle, NONE, ANY),
            row!(0x0f, "_READ_RESP_LAST", ReadResponse, Last, Ext::AETH, ANY),
            row!(0x10, "_READ_RESP_ONLY", ReadResponse, Only, Ext::AETH, ANY),
            row!(0x11, "_ACK", Ack, Only, Ext::AETH, NOTHING),
            row!(0x12, "_ATOMIC_ACK", AtomicAck, Only, AETH_ORIGINAL, NOTHING),
            row!(0x13, "_CMP_SWAP", CmpSwap, Only, Ext::ATOMIC_ETH, NOTHING),
            row!(0x14, "_FETCH_ADD", FetchAdd, Only, Ext::ATOMIC_ETH, NOTHING),
            // RD alone has this one.
            row!(0x15, "_RESYNC", Resync, Only, NONE, NOTHING),
            row!(0x16, "_SEND_LAST_INV", Send, Last, Ext::IETH, ANY),
            row!(0x17, "_SEND_ONLY_INV", Send, Only, Ext::IETH, ANY),
            row!(0x1c, "_FLUSH", Flush, Only, FETH_RETH, NOTHING),
            row!(0x1d, "_ATOMIC_WRITE", AtomicWrite, Only, Ext::RETH, EIGHT),
        ]
    }};
}

/// A row of RC.
const fn row(
    code: u8,
    name: &'static str,
    (operation, place): (Operation, Place),
    ext: Ext,
    payload: Payload,
) -> Info {
    let takes_receive = match operation {
        Operation::Send => place.begins(),
        Operation::Write => ext.contains(Ext::IMMDT),
        _ => false,
    };
    Info {
        opcode: Opcode(code),
        name,
        transport: Transport::Rc,
        operation,
        place,
        ext,
        ext_len: ext.octets() as u8,
        payload,
        request: !matches!(
            operation,
            Operation::ReadResponse | Operation::Ack | Operation::AtomicAck | Operation::Cnp
        ),
        takes_receive,
    }
}

/// The same operation on another transport.
const fn on(transport: Transport, rc: Info) -> Info {
    let ext = rc.ext.union(transport.front(rc.request));
    Info {
        opcode: Opcode(rc.opcode.0 | transport.bits()),
        transport,
        ext,
        ext_len: ext.octets() as u8,
        ..rc
    }
}

/// The operations of a transport.
const fn has(transport: Transport, operation: u8) -> bool {
    match transport {
        Transport::Rc => matches!(operation, 0x00..=0x14 | 0x16 | 0x17 | 0x1c | 0x1d),
        Transport::Uc => matches!(operation, 0x00..=0x0b),
        Transport::Rd => matches!(operation, 0x00..=0x15 | 0x1c | 0x1d),
        Transport::Ud => matches!(operation, 0x04 | 0x05),
        Transport::Cnp => false,
        Transport::Xrc => matches!(operation, 0x00..=0x14 | 0x16 | 0x17),
    }
}

/// How many opcodes there are: RC 25, UC 12, RD 24, UD 2, CNP 1, XRC 23.
const COUNT: usize = 87;

static ROWS: [Info; COUNT] = {
    let transports = [
        (Transport::Rc, operations!("RC")),
        (Transport::Uc, operations!("UC")),
        (Transport::Rd, operations!("RD")),
        (Transport::Ud, operations!("UD")),
        (Transport::Xrc, operations!("XRC")),
    ];
    // A congestion notification packet has a transport of its own, with one operation.
    let cnp = row(0x01, "CNP", (Operation::Cnp, Place::Only), Ext::empty(), Payload::Exactly(16));
    let cnp = on(Transport::Cnp, cnp);
    let mut rows = [cnp; COUNT];
    let (mut filled, mut t) = (0, 0);
    while t < transports.len() {
        let (transport, operations) = transports[t];
        if matches!(transport, Transport::Xrc) {
            rows[filled] = cnp;
            filled += 1;
        }
        let mut o = 0;
        while o < operations.len() {
            if has(transport, operations[o].opcode.0) {
                rows[filled] = on(transport, operations[o]);
                filled += 1;
            }
            o += 1;
        }
        t += 1;
    }
    assert!(filled == COUNT);
    rows
};

/// Every opcode there is, rising.
pub static TABLE: &[Info] = &ROWS;

/// The row of each code; 255 where there is none.
static ROW_OF: [u8; 256] = {
    assert!(COUNT < 255);
    let mut rows = [255; 256];
    let mut row = 0;
    while row < COUNT {
        rows[ROWS[row].opcode.0 as usize] = row as u8;
        row += 1;
    }
    rows
};

/// The most octets of extended headers that any opcode has.
pub(super) const MAX_EXT_LEN: usize = {
    let (mut most, mut row) = (0, 0);
    while row < COUNT {
        if ROWS[row].ext_len as usize > most {
            most = ROWS[row].ext_len as usize;
        }
        row += 1;
    }
    most
};

impl Opcode {
    /// Its row of the table, found in one step; `None` for a code that no specification defines.
    #[inline]
    pub fn info(self) -> Option<&'static Info> {
        ROWS.get(usize::from(ROW_OF[usize::from(self.0)]))
    }

    /// Its name; `None` for a code that no specification defines.
    pub fn name(self) -> Option<&'static str> {
        self.info().map(|info| info.name)
    }

    /// Every opcode of the table, rising.
    pub fn all() -> impl Iterator<Item = Self> {
        TABLE.iter().map(|info| info.opcode)
    }

    /// The opcode with this name, such as `RC_SEND_ONLY`.
    pub const fn from_name(name: &str) -> Option<Self> {
        let mut row = 0;
        while row < COUNT {
            if same(ROWS[row].name, name) {
                return Some(ROWS[row].opcode);
            }
            row += 1;
        }
        None
    }
}

/// String comparison for constants.
const fn same(a: &str, b: &str) -> bool {
    let (a, b) = (a.as_bytes(), b.as_bytes());
    if a.len() != b.len() {
        return false;
    }
    let mut i = 0;
    while i < a.len() {
        if a[i] != b[i] {
            return false;
        }
        i += 1;
    }
    true
}

/// Constants by the names of the table: one that is not in it does not compile.
macro_rules! constants {
    ($($name:ident)*) => {
        impl Opcode {
            $(
                #[doc = concat!("The opcode called `", stringify!($name), "` in [`TABLE`].")]
                pub const $name: Self = Self::from_name(stringify!($name)).unwrap();
            )*
        }

        #[cfg(test)]
        const NAMES: &[&str] = &[$(stringify!($name)),*];
    };
}

constants! {
    RC_SEND_FIRST RC_SEND_MIDDLE RC_SEND_LAST RC_SEND_LAST_IMM RC_SEND_ONLY RC_SEND_ONLY_IMM
    RC_WRITE_FIRST RC_WRITE_MIDDLE RC_WRITE_LAST RC_WRITE_LAST_IMM RC_WRITE_ONLY RC_WRITE_ONLY_IMM
    RC_READ_REQUEST RC_READ_RESP_FIRST RC_READ_RESP_MIDDLE RC_READ_RESP_LAST RC_READ_RESP_ONLY
    RC_ACK RC_ATOMIC_ACK RC_CMP_SWAP RC_FETCH_ADD RC_SEND_LAST_INV RC_SEND_ONLY_INV
    RC_FLUSH RC_ATOMIC_WRITE

    UC_SEND_FIRST UC_SEND_MIDDLE UC_SEND_LAST UC_SEND_LAST_IMM UC_SEND_ONLY UC_SEND_ONLY_IMM
    UC_WRITE_FIRST UC_WRITE_MIDDLE UC_WRITE_LAST UC_WRITE_LAST_IMM UC_WRITE_ONLY UC_WRITE_ONLY_IMM

    RD_SEND_FIRST RD_SEND_MIDDLE RD_SEND_LAST RD_SEND_LAST_IMM RD_SEND_ONLY RD_SEND_ONLY_IMM
    RD_WRITE_FIRST RD_WRITE_MIDDLE RD_WRITE_LAST RD_WRITE_LAST_IMM RD_WRITE_ONLY RD_WRITE_ONLY_IMM
    RD_READ_REQUEST RD_READ_RESP_FIRST RD_READ_RESP_MIDDLE RD_READ_RESP_LAST RD_READ_RESP_ONLY
    RD_ACK RD_ATOMIC_ACK RD_CMP_SWAP RD_FETCH_ADD RD_RESYNC RD_FLUSH RD_ATOMIC_WRITE

    UD_SEND_ONLY UD_SEND_ONLY_IMM

    CNP

    XRC_SEND_FIRST XRC_SEND_MIDDLE XRC_SEND_LAST XRC_SEND_LAST_IMM XRC_SEND_ONLY XRC_SEND_ONLY_IMM
    XRC_WRITE_FIRST XRC_WRITE_MIDDLE XRC_WRITE_LAST XRC_WRITE_LAST_IMM XRC_WRITE_ONLY
    XRC_WRITE_ONLY_IMM XRC_READ_REQUEST XRC_READ_RESP_FIRST XRC_READ_RESP_MIDDLE XRC_READ_RESP_LAST
    XRC_READ_RESP_ONLY XRC_ACK XRC_ATOMIC_ACK XRC_CMP_SWAP XRC_FETCH_ADD XRC_SEND_LAST_INV
    XRC_SEND_ONLY_INV
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::{format, vec::Vec};

    #[test]
    fn codes_rise_and_names_are_unique() {
        assert!(TABLE.is_sorted_by(|a, b| a.opcode < b.opcode));
        let mut names: Vec<_> = TABLE.iter().map(|info| info.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), TABLE.len());
    }

    #[test]
    fn each_transport_has_its_operations() {
        let counts = Transport::ALL.map(|t| (t.bits(), t.rows().count()));
        assert_eq!(counts, [(0, 25), (0x20, 12), (0x40, 24), (0x60, 2), (0x80, 1), (0xa0, 23)]);
        for info in TABLE {
            assert_eq!(info.opcode.0 & 0xe0, info.transport.bits(), "{}", info.name);
            let prefix = format!("{:?}", info.transport).to_uppercase();
            assert!(info.name.starts_with(&prefix), "{}", info.name);
        }
    }

    #[test]
    fn every_code_finds_its_row_or_none() {
        let mut found = 0;
        for code in 0..=255 {
            let row = TABLE.iter().find(|info| info.opcode == Opcode(code));
            assert_eq!(Opcode(code).info(), row);
            found += usize::from(row.is_some());
        }
        assert_eq!(found, TABLE.len());
        assert_eq!(Opcode::all().count(), TABLE.len());
        // The class prefix alone is no packet: a CNP is 0x81 on the wire.
        assert_eq!(format!("{}, {:?}", Opcode(0x80), Opcode(0x81)), "opcode 0x80, CNP");
    }

    #[test]
    fn constants_are_the_table() {
        let names: Vec<_> = TABLE.iter().map(|info| info.name).collect();
        assert_eq!(NAMES, names);
        assert_eq!(Opcode::from_name("RC_NONE"), None);
        for info in TABLE {
            assert_eq!(Opcode::from_name(info.name), Some(info.opcode));
        }
    }

    /// Headers and lengths as Linux has them (rxe_opcode.c; RD FLUSH and RD ATOMIC WRITE: the same
    /// with RDETH and DETH in front), written out by hand.
    #[rustfmt::skip]
    const EXPECTED: &[(u8, &str, &[&str], usize)] = &[
        (0x00, "RC_SEND_FIRST", &[], 0), (0x01, "RC_SEND_MIDDLE", &[], 0), (0x02, "RC_SEND_LAST", &[], 0),
        (0x03, "RC_SEND_LAST_IMM", &["IMMDT"], 4), (0x04, "RC_SEND_ONLY", &[], 0),
        (0x05, "RC_SEND_ONLY_IMM", &["IMMDT"], 4), (0x06, "RC_WRITE_FIRST", &["RETH"], 16),
        (0x07, "RC_WRITE_MIDDLE", &[], 0), (0x08, "RC_WRITE_LAST", &[], 0),
        (0x09, "RC_WRITE_LAST_IMM", &["IMMDT"], 4), (0x0a, "RC_WRITE_ONLY", &["RETH"], 16),
        (0x0b, "RC_WRITE_ONLY_IMM", &["RETH", "IMMDT"], 20), (0x0c, "RC_READ_REQUEST", &["RETH"], 16),
        (0x0d, "RC_READ_RESP_FIRST", &["AETH"], 4), (0x0e, "RC_READ_RESP_MIDDLE", &[], 0),
        (0x0f, "RC_READ_RESP_LAST", &["AETH"], 4), (0x10, "RC_READ_RESP_ONLY", &["AETH"], 4),
        (0x11, "RC_ACK", &["AETH"], 4), (0x12, "RC_ATOMIC_ACK", &["AETH", "ATOMIC_ACK_ETH"], 12),
        (0x13, "RC_CMP_SWAP", &["ATOMIC_ETH"], 28), (0x14, "RC_FETCH_ADD", &["ATOMIC_ETH"], 28),
        (0x16, "RC_SEND_LAST_INV", &["IETH"], 4), (0x17, "RC_SEND_ONLY_INV", &["IETH"], 4),
        (0x1c, "RC_FLUSH", &["FETH", "RETH"], 20), (0x1d, "RC_ATOMIC_WRITE", &["RETH"], 16),
        (0x20, "UC_SEND_FIRST", &[], 0), (0x23, "UC_SEND_LAST_IMM", &["IMMDT"], 4),
        (0x28, "UC_WRITE_LAST", &[], 0), (0x2b, "UC_WRITE_ONLY_IMM", &["RETH", "IMMDT"], 20),
        (0x40, "RD_SEND_FIRST", &["RDETH", "DETH"], 12), (0x45, "RD_SEND_ONLY_IMM", &["RDETH", "DETH", "IMMDT"], 16),
        (0x47, "RD_WRITE_MIDDLE", &["RDETH", "DETH"], 12),
        (0x4b, "RD_WRITE_ONLY_IMM", &["RDETH", "DETH", "RETH", "IMMDT"], 32),
        (0x4c, "RD_READ_REQUEST", &["RDETH", "DETH", "RETH"], 28), (0x4d, "RD_READ_RESP_FIRST", &["RDETH", "AETH"], 8),
        (0x4e, "RD_READ_RESP_MIDDLE", &["RDETH"], 4), (0x51, "RD_ACK", &["RDETH", "AETH"], 8),
        (0x52, "RD_ATOMIC_ACK", &["RDETH", "AETH", "ATOMIC_ACK_ETH"], 16),
        (0x53, "RD_CMP_SWAP", &["RDETH", "DETH", "ATOMIC_ETH"], 40), (0x55, "RD_RESYNC", &["RDETH", "DETH"], 12),
        (0x5c, "RD_FLUSH", &["RDETH", "DETH", "FETH", "RETH"], 32),
        (0x5d, "RD_ATOMIC_WRITE", &["RDETH", "DETH", "RETH"], 28),
        (0x64, "UD_SEND_ONLY", &["DETH"], 8), (0x65, "UD_SEND_ONLY_IMM", &["DETH", "IMMDT"], 12),
        (0x81, "CNP", &[], 0),
        (0xa0, "XRC_SEND_FIRST", &["XRCETH"], 4), (0xa1, "XRC_SEND_MIDDLE", &["XRCETH"], 4),
        (0xab, "XRC_WRITE_ONLY_IMM", &["XRCETH", "RETH", "IMMDT"], 24), (0xac, "XRC_READ_REQUEST", &["XRCETH", "RETH"], 20),
        (0xad, "XRC_READ_RESP_FIRST", &["AETH"], 4), (0xae, "XRC_READ_RESP_MIDDLE", &[], 0),
        (0xb1, "XRC_ACK", &["AETH"], 4), (0xb2, "XRC_ATOMIC_ACK", &["AETH", "ATOMIC_ACK_ETH"], 12),
        (0xb3, "XRC_CMP_SWAP", &["XRCETH", "ATOMIC_ETH"], 32), (0xb7, "XRC_SEND_ONLY_INV", &["XRCETH", "IETH"], 8),
    ];

    #[test]
    fn headers_and_lengths() {
        for &(code, name, headers, len) in EXPECTED {
            let info = Opcode(code).info().unwrap_or_else(|| panic!("{name}"));
            let found: Vec<_> = info.ext.iter_names().map(|(name, _)| name).collect();
            assert_eq!((info.name, &found[..], usize::from(info.ext_len)), (name, headers, len));
        }
        for info in TABLE {
            assert_eq!(usize::from(info.ext_len), info.ext.octets(), "{}", info.name);
        }
        assert_eq!(MAX_EXT_LEN, 40);
        // What is reserved, or left to other transports.
        for code in [0x15, 0x18, 0x1b, 0x1e, 0x2c, 0x36, 0x56, 0x60, 0x66, 0x82, 0xb5, 0xc0, 0xff] {
            assert_eq!(Opcode(code).info(), None, "{code:#x}");
        }
    }

    #[test]
    fn what_takes_a_receive_and_what_is_a_request() {
        let takes: Vec<_> = Transport::Rc.rows().filter(|i| i.takes_receive).collect();
        let codes: Vec<_> = takes.iter().map(|info| info.opcode.0).collect();
        assert_eq!(codes, [0x00, 0x04, 0x05, 0x09, 0x0b, 0x17]);
        let answers: Vec<_> = Transport::Rc.rows().filter(|i| !i.request).collect();
        let codes: Vec<_> = answers.iter().map(|info| info.opcode.0).collect();
        assert_eq!(codes, [0x0d, 0x0e, 0x0f, 0x10, 0x11, 0x12]);
    }

    #[test]
    fn payloads() {
        let of = |wanted| {
            let rows = TABLE.iter().filter(move |info| info.payload == wanted);
            rows.map(|info| info.opcode.0).collect::<Vec<_>>()
        };
        assert_eq!(of(Payload::Exactly(8)), [0x1d, 0x5d]);
        assert_eq!(of(Payload::Exactly(16)), [0x81]);
        let none = [
            0x0c, 0x11, 0x12, 0x13, 0x14, 0x1c, 0x4c, 0x51, 0x52, 0x53, 0x54, 0x55, 0x5c, 0xac,
            0xb1, 0xb2, 0xb3, 0xb4,
        ];
        assert_eq!(of(Payload::None), none);
    }

    #[test]
    fn places_follow_the_names() {
        for info in TABLE {
            let word = |word| info.name.split('_').any(|w| w == word);
            let place = match () {
                () if word("FIRST") => Place::First,
                () if word("MIDDLE") => Place::Middle,
                () if word("LAST") => Place::Last,
                () => Place::Only,
            };
            assert_eq!(info.place, place, "{}", info.name);
            assert_eq!(info.ext.contains(Ext::IMMDT), word("IMM"), "{}", info.name);
            assert_eq!(info.ext.contains(Ext::IETH), word("INV"), "{}", info.name);
        }
    }
}
