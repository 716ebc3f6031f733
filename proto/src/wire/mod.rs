//! Wire formats. One header, one file: its picture, its section of the specification, a vector in
//! hex, a round trip.
//!
//! Fixed headers are views over the caller's bytes (zerocopy). Parsers borrow, never panic and
//! allocate nothing. Codes are open: an unknown value survives a parse.

pub mod crc;
pub mod ib;
pub mod ids;
pub(crate) mod ip;
pub mod iwarp;
pub mod mad;
pub mod pcapng;
pub mod roce;

use core::fmt;

/// The layer whose octets were being read.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Layer {
    /// MPA start-up frame (RFC 5044 §7.1, RFC 6581 §6).
    MpaStart,
    /// MPA framing: length, markers, CRC (RFC 5044 §4).
    Mpa,
    /// DDP (RFC 5041).
    Ddp,
    /// RDMAP (RFC 5040, RFC 7306).
    Rdmap,
    /// Local route header of native InfiniBand (IBTA vol. 1, 7.7).
    Lrh,
    /// Global route header (IBTA vol. 1, 8.3).
    Grh,
    /// Base transport header (IBTA vol. 1, 9.2), and the packet behind it as a whole.
    Bth,
    /// Extended transport header (IBTA vol. 1, 9.3): its name.
    Eth(&'static str),
    /// Invariant CRC (IBTA vol. 1, 7.8.1; for RoCEv2 annex A17).
    Icrc,
    /// Management datagram header (IBTA vol. 1, 13.4.3).
    Mad,
    /// Communication management message (IBTA vol. 1, 12.6).
    Cm,
}

impl fmt::Display for Layer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::MpaStart => "MPA start-up frame",
            Self::Mpa => "MPA",
            Self::Ddp => "DDP",
            Self::Rdmap => "RDMAP",
            Self::Lrh => "LRH",
            Self::Grh => "GRH",
            Self::Bth => "BTH",
            Self::Eth(name) => name,
            Self::Icrc => "ICRC",
            Self::Mad => "MAD",
            Self::Cm => "CM message",
        })
    }
}

/// What is wrong with octets that could not be parsed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Problem {
    /// The input ends too early.
    #[error("{need} octets needed, {have} found")]
    Truncated {
        /// How many octets are needed from the offset on.
        need: usize,
        /// How many there are.
        have: usize,
    },
    /// A field has a value that the specification forbids.
    #[error("{field} is {found:#x}, expected {expected}")]
    Field {
        /// The field's name in the specification.
        field: &'static str,
        /// What it holds.
        found: u64,
        /// What it may hold.
        expected: &'static str,
    },
    /// A checksum does not match.
    #[error("CRC is {found:#010x}, computed {computed:#010x}")]
    Crc {
        /// What the wire carried.
        found: u32,
        /// What the octets give.
        computed: u32,
    },
}

/// Octets that could not be parsed: which layer, where, and why.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{layer}: at offset {offset}: {problem}")]
pub struct Error {
    /// The layer that was being read.
    pub layer: Layer,
    /// Offset of the offending octets from the start of the input.
    pub offset: usize,
    /// What is wrong.
    pub problem: Problem,
}

impl Error {
    /// The input ends too early: `need` octets are needed at `offset`, `have` are there.
    pub const fn truncated(layer: Layer, offset: usize, need: usize, have: usize) -> Self {
        Self { layer, offset, problem: Problem::Truncated { need, have } }
    }

    /// A field holds what it must not.
    pub const fn field(
        layer: Layer,
        offset: usize,
        field: &'static str,
        found: u64,
        expected: &'static str,
    ) -> Self {
        Self { layer, offset, problem: Problem::Field { field, found, expected } }
    }
}
