//! What is to be sent, described as parts so that a driver can hand a region's octets to the
//! kernel without copying them first. Both transports describe what they send like this.

use alloc::vec::Vec;

use crate::{
    mem::{AccessError, Memory, Scope},
    verbs::Sge,
};

/// A piece of what is to be sent.
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

/// Parts in sending order, and the octets that some of them refer to.
#[derive(Debug, Default)]
pub(crate) struct Parts {
    bytes: Vec<u8>,
    parts: Vec<Part>,
    /// Octets of `bytes` that belong to a part.
    sealed: usize,
    len: usize,
}

impl Parts {
    /// The octets that [`Part::Bytes`] refers to.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The parts, in sending order.
    pub(crate) fn parts(&self) -> &[Part] {
        &self.parts
    }

    /// Octets of all parts.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Empties it and keeps the buffers.
    pub(crate) fn clear(&mut self) {
        self.bytes.clear();
        self.parts.clear();
        self.sealed = 0;
        self.len = 0;
    }

    /// Copies everything behind one another into `out`.
    pub(crate) fn copy_to<M: Memory + ?Sized>(
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

    /// Where octets are appended; [`Parts::seal`] makes them a part.
    pub(crate) fn bytes_mut(&mut self) -> &mut Vec<u8> {
        &mut self.bytes
    }

    /// Takes the octets appended since the last seal as a part, joined to the last one if that is
    /// of this kind. Returns how many they are.
    pub(crate) fn seal(&mut self) -> usize {
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
    pub(crate) fn push_region(&mut self, sge: Sge) {
        self.seal();
        if sge.length > 0 {
            self.len += sge.length as usize;
            self.parts.push(Part::Region(sge));
        }
    }
}
