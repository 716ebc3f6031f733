//! What is to be sent, described as parts so that a driver can hand a region's octets to the
//! kernel without copying them first.

use alloc::vec::Vec;

use crate::{
    mem::{AccessError, Memory, Scope},
    verbs::Sge,
};

/// A piece of the stream to send.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// `bytes()[start..end]`: headers, trailers, small or checksummed payload.
    Bytes {
        /// First octet.
        start: usize,
        /// One past the last octet.
        end: usize,
    },
    /// Payload that lies in a registered region.
    Region(Sge),
}

/// A run of octets to send, in order. The caller owns it and reuses its buffers.
#[derive(Debug, Default)]
pub struct Transmit {
    bytes: Vec<u8>,
    parts: Vec<Part>,
    /// Octets of `bytes` that belong to a part.
    sealed: usize,
    len: usize,
}

impl Transmit {
    /// The octets that [`Part::Bytes`] refers to.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The parts, in sending order.
    pub fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// Octets in all.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is nothing to send.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Empties it and keeps the buffers.
    pub fn clear(&mut self) {
        self.bytes.clear();
        self.parts.clear();
        self.sealed = 0;
        self.len = 0;
    }

    /// Copies everything behind one another into `out`: the form for tests and simulations.
    pub fn copy_to<M: Memory + ?Sized>(
        &self,
        mem: &M,
        scope: Scope,
        out: &mut Vec<u8>,
    ) -> Result<(), AccessError> {
        for part in &self.parts {
            match *part {
                Part::Bytes { start, end } => out.extend_from_slice(&self.bytes[start..end]),
                Part::Region(sge) => mem.read_local(scope, sge, out)?,
            }
        }
        Ok(())
    }

    /// Where octets are appended; [`Transmit::seal`] makes them a part.
    pub(super) fn bytes_mut(&mut self) -> &mut Vec<u8> {
        &mut self.bytes
    }

    /// Takes the octets appended since the last seal as a part, joined to the last one if that is
    /// of this kind. Returns how many they are.
    pub(super) fn seal(&mut self) -> usize {
        let (start, end) = (self.sealed, self.bytes.len());
        if start == end {
            return 0;
        }
        self.sealed = end;
        self.len += end - start;
        match self.parts.last_mut() {
            Some(Part::Bytes { end: last, .. }) => *last = end,
            _ => self.parts.push(Part::Bytes { start, end }),
        }
        end - start
    }

    /// Appends a piece of a region.
    pub(super) fn push_region(&mut self, sge: Sge) {
        self.seal();
        if sge.length > 0 {
            self.len += sge.length as usize;
            self.parts.push(Part::Region(sge));
        }
    }
}
