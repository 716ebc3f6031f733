//! Capture files: pcap and pcapng, gzip'd or not.

mod pcap;
mod pcapng;

use std::io::{self, Read};

/// A link type (LINKTYPE_ of tcpdump.org), 16 bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct LinkType(pub u16);

/// One packet block of a capture.
#[derive(Debug, Clone, Copy)]
pub struct Record<'a> {
    /// Its number, from 1.
    pub number: u64,
    /// Nanoseconds since 1970; `None` where the block has no time.
    pub time_ns: Option<i128>,
    /// Octets on the wire.
    pub len: u32,
    /// What was captured. For ERF: without its header.
    pub data: &'a [u8],
    /// How `data` begins.
    pub link: LinkType,
}

/// Which file format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Format {
    /// Classic pcap, in any of its variants.
    Pcap,
    /// pcapng.
    Pcapng,
}

/// Why a capture cannot be read, or not further.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Not a capture at all, or one of a format that is not read: its name, if it is known.
    #[error("not a pcap or pcapng capture: {0}")]
    Format(&'static str),
    /// The file ends within a block.
    #[error("the capture ends early: at octet {at}, {need} octets needed, {have} left")]
    Truncated {
        /// Where the block begins that is not whole.
        at: u64,
        /// Octets of it that are needed.
        need: u64,
        /// Octets that are there.
        have: u64,
    },
    /// A block that cannot be.
    #[error("the capture is damaged: at octet {at}: {what}")]
    Damaged {
        /// Where the block begins.
        at: u64,
        /// What is wrong.
        what: &'static str,
    },
    /// The input could not be read.
    #[error("{0}")]
    Io(#[from] io::Error),
}

/// Reads the packet blocks of a capture, one by one. Memory: one block, and the interfaces.
pub struct Reader<R> {
    _input: R,
}

impl<R> core::fmt::Debug for Reader<R> {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        f.debug_struct("Reader").finish_non_exhaustive()
    }
}

impl<R: Read> Reader<R> {
    /// Looks at the front of `input`, which may be gzip'd.
    ///
    /// # Errors
    ///
    /// [`Error::Format`] if it is no capture that is read; [`Error::Io`].
    pub fn new(_input: R) -> Result<Self, Error> {
        unimplemented!()
    }

    /// The format.
    pub fn format(&self) -> Format {
        unimplemented!()
    }

    /// The next packet block; `None` at a good end.
    ///
    /// # Errors
    ///
    /// What ends the capture early. The same comes ever after.
    pub fn next_record(&mut self) -> Result<Option<Record<'_>>, Error> {
        unimplemented!()
    }
}
