//! A whole packet, from the BTH to the ICRC.

use alloc::vec::Vec;

use super::{
    aeth::Aeth,
    atomic::{AtomicAckEth, AtomicEth},
    bth::Bth,
    deth::Deth,
    feth::Feth,
    ieth::Ieth,
    immdt::ImmDt,
    rdeth::Rdeth,
    reth::Reth,
    xrceth::Xrceth,
};
use crate::wire::Error;

/// BTH and the extended headers behind it. Which of them are on the wire the opcode says
/// ([`super::opcode::TABLE`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Headers {
    /// Base transport header.
    pub bth: Bth,
    /// Reliable datagram.
    pub rdeth: Option<Rdeth>,
    /// XRC.
    pub xrceth: Option<Xrceth>,
    /// Datagram.
    pub deth: Option<Deth>,
    /// FLUSH.
    pub feth: Option<Feth>,
    /// RDMA.
    pub reth: Option<Reth>,
    /// Atomic request.
    pub atomic_eth: Option<AtomicEth>,
    /// ACK.
    pub aeth: Option<Aeth>,
    /// Atomic acknowledgement.
    pub atomic_ack_eth: Option<AtomicAckEth>,
    /// Immediate data.
    pub immdt: Option<ImmDt>,
    /// Invalidate.
    pub ieth: Option<Ieth>,
}

/// A packet: a view over received octets.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Packet<'a> {
    /// All headers, copied.
    pub headers: Headers,
    /// The payload, without pad. Cut short where the input was (see [`Packet::parse_captured`]).
    pub payload: &'a [u8],
    /// Octets of the payload on the wire.
    pub payload_len: usize,
    /// The ICRC as on the wire; `None` where it was not captured.
    pub icrc: Option<[u8; 4]>,
}

impl<'a> Packet<'a> {
    /// Reads a packet from its BTH to its ICRC.
    ///
    /// # Errors
    ///
    /// Headers that are not whole, or a PadCnt beyond what is there.
    pub fn parse(octets: &'a [u8]) -> Result<Self, Error> {
        Self::parse_captured(octets, octets.len())
    }

    /// Reads a packet of which only the front was captured: it had `wire_len` octets, from its BTH
    /// to its ICRC.
    ///
    /// # Errors
    ///
    /// As for [`Packet::parse`].
    pub fn parse_captured(_octets: &'a [u8], _wire_len: usize) -> Result<Self, Error> {
        unimplemented!()
    }
}

impl Headers {
    /// Headers of nothing but a BTH.
    pub const fn new(bth: Bth) -> Self {
        Self {
            bth,
            rdeth: None,
            xrceth: None,
            deth: None,
            feth: None,
            reth: None,
            atomic_eth: None,
            aeth: None,
            atomic_ack_eth: None,
            immdt: None,
            ieth: None,
        }
    }

    /// Octets that [`Headers::emit`] appends.
    pub fn len(&self) -> usize {
        unimplemented!()
    }

    /// Whether there is nothing to emit: never.
    pub const fn is_empty(&self) -> bool {
        false
    }

    /// Appends BTH and the extended headers that the opcode asks for; one that is missing goes
    /// out as zeros. An unknown opcode has none.
    pub fn emit(&self, _out: &mut Vec<u8>) {
        unimplemented!()
    }

    /// Appends headers, `payload` and pad: everything in front of the ICRC. PadCnt is set from
    /// the payload's length.
    pub fn emit_packet(&mut self, _payload: &[u8], _out: &mut Vec<u8>) {
        unimplemented!()
    }
}
