//! RoCE and InfiniBand transport packets: base and extended headers, payload, pad, ICRC.
//!
//! ```text
//!  +-----+------------------+---------+-----+------+
//!  | BTH | extended headers | payload | pad | ICRC |
//!  +-----+------------------+---------+-----+------+
//!    12    by the opcode               0..3    4      octets
//! ```
//!
//! RoCEv2 puts that into UDP, port [`UDP_PORT`]; RoCEv1 behind a [`Grh`](grh::Grh) with EtherType
//! [`ETHERTYPE`]; native InfiniBand behind an [`Lrh`](crate::wire::ib::lrh::Lrh). [`Packet`] reads
//! a packet, [`Headers`] writes one, [`Icrc`](icrc::Icrc) checks it.

pub mod aeth;
pub mod atomic;
pub mod bth;
pub mod cnp;
pub mod deth;
pub mod feth;
pub mod grh;
pub mod icrc;
pub mod ieth;
pub mod immdt;
pub mod opcode;
mod packet;
pub mod rdeth;
pub mod reth;
mod u24;
pub mod xrceth;

pub use packet::{Headers, Packet, pad_len};

/// The UDP port of RoCEv2.
pub const UDP_PORT: u16 = 4791;
/// The EtherType of RoCEv1.
pub const ETHERTYPE: u16 = 0x8915;
/// Octets of the ICRC.
pub const ICRC_LEN: usize = 4;
/// Octets of zeros that a congestion notification packet carries.
pub const CNP_LEN: usize = 16;
