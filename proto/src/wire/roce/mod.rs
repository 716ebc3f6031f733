//! RoCE and InfiniBand transport packets: base and extended headers, payload, pad, ICRC.

pub mod aeth;
pub mod atomic;
pub mod bth;
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
pub mod xrceth;

pub use packet::{Headers, Packet};

/// The UDP port of RoCEv2.
pub const UDP_PORT: u16 = 4791;
/// The EtherType of RoCEv1.
pub const ETHERTYPE: u16 = 0x8915;
/// Octets of the ICRC.
pub const ICRC_LEN: usize = 4;
/// Octets of zeros that a congestion notification packet carries.
pub const CNP_LEN: usize = 16;
