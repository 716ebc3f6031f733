//! Communication management messages.

use crate::wire::{
    Error,
    ids::{Gid, PKey, Psn, QKey, Qpn},
};

/// REQ's attribute.
pub const REQ: u16 = 0x10;
/// MRA's attribute.
pub const MRA: u16 = 0x11;
/// REJ's attribute.
pub const REJ: u16 = 0x12;
/// REP's attribute.
pub const REP: u16 = 0x13;
/// RTU's attribute.
pub const RTU: u16 = 0x14;
/// DREQ's attribute.
pub const DREQ: u16 = 0x15;
/// DREP's attribute.
pub const DREP: u16 = 0x16;
/// SIDR_REQ's attribute.
pub const SIDR_REQ: u16 = 0x17;
/// SIDR_REP's attribute.
pub const SIDR_REP: u16 = 0x18;
/// LAP's attribute.
pub const LAP: u16 = 0x19;
/// APR's attribute.
pub const APR: u16 = 0x1a;

/// Octets of every message.
pub const BODY_LEN: usize = 232;

/// A path of a REQ.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Path {
    /// Local identifier of the active side; 0xffff on RoCE.
    pub local_lid: u16,
    /// Local identifier of the passive side.
    pub remote_lid: u16,
    /// The active side's address.
    pub local_gid: Gid,
    /// The passive side's address.
    pub remote_gid: Gid,
    /// Flow label, 20 bits.
    pub flow_label: u32,
    /// Packet rate, 6 bits.
    pub rate: u8,
    /// Traffic class.
    pub traffic_class: u8,
    /// Hop limit.
    pub hop_limit: u8,
    /// Service level, 4 bits.
    pub service_level: u8,
    /// Whether the path stays within the subnet.
    pub subnet_local: bool,
    /// Local ACK timeout code: 4.096 us x 2^n, 5 bits.
    pub ack_timeout: u8,
}

/// Request for a connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Req<'a> {
    /// The sender's name for the connection.
    pub local_comm_id: u32,
    /// Vendor, 24 bits.
    pub vendor_id: u32,
    /// What is wanted: for rdma_cm `0x0000000001` and protocol, port.
    pub service_id: u64,
    /// The sender's adapter.
    pub ca_guid: u64,
    /// Queue key.
    pub qkey: QKey,
    /// The sender's queue pair.
    pub qpn: Qpn,
    /// READs and atomics that the sender serves at a time.
    pub responder_resources: u8,
    /// End-to-end context of RD.
    pub eecn: u32,
    /// READs and atomics that the sender has outstanding.
    pub initiator_depth: u8,
    /// Remote end-to-end context of RD.
    pub remote_eecn: u32,
    /// Code of how long the receiver may take: 4.096 us x 2^n, 5 bits.
    pub remote_cm_timeout: u8,
    /// 0 RC, 1 UC, 2 RD, 3 see `extended_transport`; 2 bits.
    pub transport: u8,
    /// End-to-end flow control.
    pub flow_control: bool,
    /// The sender's first PSN.
    pub start_psn: Psn,
    /// Code of how long the sender may take, 5 bits.
    pub local_cm_timeout: u8,
    /// Retries, 3 bits.
    pub retry_count: u8,
    /// Partition.
    pub pkey: PKey,
    /// Path MTU code: 1 to 5 are 256 to 4096 octets; 4 bits.
    pub mtu: u8,
    /// RDC exists.
    pub rdc_exists: bool,
    /// RNR retries, 3 bits; 7 is for ever.
    pub rnr_retry_count: u8,
    /// Retries of CM messages, 4 bits.
    pub max_cm_retries: u8,
    /// The sender's queue pair has a shared receive queue.
    pub srq: bool,
    /// With `transport` 3: 1 is XRC; 3 bits.
    pub extended_transport: u8,
    /// Primary path.
    pub primary: Path,
    /// Alternate path; all zero where there is none.
    pub alternate: Path,
    /// 92 octets of the program's and rdma_cm's.
    pub private_data: &'a [u8],
}

/// Message receipt acknowledgement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mra<'a> {
    /// The sender's name for the connection.
    pub local_comm_id: u32,
    /// The receiver's.
    pub remote_comm_id: u32,
    /// What was received: 0 REQ, 1 REP, 2 LAP; 2 bits.
    pub message: u8,
    /// Code of the time asked for: 4.096 us x 2^n, 5 bits.
    pub service_timeout: u8,
    /// 222 octets.
    pub private_data: &'a [u8],
}

/// Rejection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rej<'a> {
    /// The sender's name for the connection, if it has one.
    pub local_comm_id: u32,
    /// The receiver's.
    pub remote_comm_id: u32,
    /// What is rejected: 0 REQ, 1 REP, 2 none; 2 bits.
    pub message: u8,
    /// Why; see [`Reason`].
    pub reason: Reason,
    /// Additional information: up to 72 octets.
    pub ari: &'a [u8],
    /// 148 octets.
    pub private_data: &'a [u8],
}

/// Why a REJ; open.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Hash)]
pub struct Reason(pub u16);

impl Reason {
    /// Nobody listens there.
    pub const INVALID_SERVICE_ID: Self = Self(8);
    /// The program said no.
    pub const CONSUMER: Self = Self(28);

    /// Such as `invalid service ID`.
    pub const fn name(self) -> Option<&'static str> {
        unimplemented!()
    }
}

/// Reply to a REQ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rep<'a> {
    /// The sender's name for the connection.
    pub local_comm_id: u32,
    /// The receiver's.
    pub remote_comm_id: u32,
    /// Queue key.
    pub qkey: QKey,
    /// The sender's queue pair.
    pub qpn: Qpn,
    /// End-to-end context of RD.
    pub eecn: u32,
    /// The sender's first PSN.
    pub start_psn: Psn,
    /// READs and atomics that the sender serves at a time.
    pub responder_resources: u8,
    /// READs and atomics that the sender has outstanding.
    pub initiator_depth: u8,
    /// Code of the time until an ACK, 5 bits.
    pub target_ack_delay: u8,
    /// Failover accepted: 0 yes, 1 not supported, 2 no; 2 bits.
    pub failover: u8,
    /// End-to-end flow control.
    pub flow_control: bool,
    /// RNR retries, 3 bits.
    pub rnr_retry_count: u8,
    /// The sender's queue pair has a shared receive queue.
    pub srq: bool,
    /// The sender's adapter.
    pub ca_guid: u64,
    /// 196 octets.
    pub private_data: &'a [u8],
}

/// Ready to use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rtu<'a> {
    /// The sender's name for the connection.
    pub local_comm_id: u32,
    /// The receiver's.
    pub remote_comm_id: u32,
    /// 224 octets.
    pub private_data: &'a [u8],
}

/// Request to disconnect.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Dreq<'a> {
    /// The sender's name for the connection.
    pub local_comm_id: u32,
    /// The receiver's.
    pub remote_comm_id: u32,
    /// The receiver's queue pair.
    pub remote_qpn: Qpn,
    /// 220 octets.
    pub private_data: &'a [u8],
}

/// Reply to a DREQ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Drep<'a> {
    /// The sender's name for the connection.
    pub local_comm_id: u32,
    /// The receiver's.
    pub remote_comm_id: u32,
    /// 224 octets.
    pub private_data: &'a [u8],
}

/// Request for a UD service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SidrReq<'a> {
    /// The sender's name for the request.
    pub request_id: u32,
    /// Partition.
    pub pkey: PKey,
    /// What is wanted.
    pub service_id: u64,
    /// 216 octets.
    pub private_data: &'a [u8],
}

/// Reply to a SIDR_REQ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SidrRep<'a> {
    /// The receiver's name for the request.
    pub request_id: u32,
    /// 0 valid; see the specification's table.
    pub status: u8,
    /// Octets of `info` that are valid.
    pub info_len: u8,
    /// The service's queue pair.
    pub qpn: Qpn,
    /// The service.
    pub service_id: u64,
    /// Its queue key.
    pub qkey: QKey,
    /// Additional information, 72 octets.
    pub info: &'a [u8],
    /// 136 octets.
    pub private_data: &'a [u8],
}

/// Load alternate path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lap<'a> {
    /// The sender's name for the connection.
    pub local_comm_id: u32,
    /// The receiver's.
    pub remote_comm_id: u32,
    /// The receiver's queue pair.
    pub remote_qpn: Qpn,
    /// Code of how long the receiver may take, 5 bits.
    pub remote_cm_timeout: u8,
    /// The path.
    pub alternate: Path,
    /// 168 octets.
    pub private_data: &'a [u8],
}

/// Reply to a LAP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Apr<'a> {
    /// The sender's name for the connection.
    pub local_comm_id: u32,
    /// The receiver's.
    pub remote_comm_id: u32,
    /// Octets of `info` that are valid.
    pub info_len: u8,
    /// 0: the path is loaded.
    pub status: u8,
    /// Additional information, 72 octets.
    pub info: &'a [u8],
    /// 148 octets.
    pub private_data: &'a [u8],
}

/// A communication management message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::large_enum_variant, reason = "a view that lives on the stack")]
pub enum Message<'a> {
    /// Request for a connection.
    Req(Req<'a>),
    /// Message receipt acknowledgement.
    Mra(Mra<'a>),
    /// Rejection.
    Rej(Rej<'a>),
    /// Reply to a REQ.
    Rep(Rep<'a>),
    /// Ready to use.
    Rtu(Rtu<'a>),
    /// Request to disconnect.
    Dreq(Dreq<'a>),
    /// Reply to a DREQ.
    Drep(Drep<'a>),
    /// Request for a UD service.
    SidrReq(SidrReq<'a>),
    /// Reply to a SIDR_REQ.
    SidrRep(SidrRep<'a>),
    /// Load alternate path.
    Lap(Lap<'a>),
    /// Reply to a LAP.
    Apr(Apr<'a>),
}

impl<'a> Message<'a> {
    /// Reads the body of a MAD with this attribute; `None` where the attribute names no message.
    ///
    /// # Errors
    ///
    /// Truncated, if `body` is shorter than 232 octets.
    pub fn parse(_attribute: u16, _body: &'a [u8]) -> Result<Option<Self>, Error> {
        unimplemented!()
    }

    /// The attribute that names this message.
    pub const fn attribute(&self) -> u16 {
        unimplemented!()
    }

    /// The 232 octets. Private data that is too short is filled up with zeros.
    pub fn to_body(&self) -> [u8; BODY_LEN] {
        unimplemented!()
    }

    /// The program's private data and what rdma_cm puts in front of it.
    pub const fn private_data(&self) -> &'a [u8] {
        unimplemented!()
    }
}

/// What rdma_cm puts in front of the private data of REQ and SIDR_REQ: 36 octets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IpCm {
    /// 0.
    pub version: u8,
    /// 4 or 6; other values survive.
    pub ip_version: u8,
    /// The active side's port.
    pub src_port: u16,
    /// Its address; IPv4 in the last 4 octets.
    pub src: [u8; 16],
    /// The passive side's address.
    pub dst: [u8; 16],
}

impl IpCm {
    /// Octets on the wire.
    pub const LEN: usize = 36;

    /// Reads it from the front of private data; what follows is the program's. `None` if it is
    /// none: wrong version, or an IP version other than 4 and 6.
    pub fn parse(_private_data: &[u8]) -> Option<(Self, &[u8])> {
        unimplemented!()
    }

    /// The 36 octets.
    pub fn to_bytes(&self) -> [u8; Self::LEN] {
        unimplemented!()
    }

    /// Source and destination.
    pub fn addresses(&self) -> Option<(core::net::IpAddr, core::net::IpAddr)> {
        unimplemented!()
    }
}
