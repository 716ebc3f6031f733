//! What is to be sent of a stream.

use alloc::vec::Vec;

use crate::{
    mem::{AccessError, Memory, Scope},
    parts::{Part, Parts},
    verbs::Sge,
};

/// A run of octets to send, in order. The caller owns it and reuses its buffers.
#[derive(Debug, Default)]
pub struct Transmit(Parts);

impl Transmit {
    /// The octets that [`Part::Bytes`] refers to.
    pub fn bytes(&self) -> &[u8] {
        self.0.bytes()
    }

    /// The parts, in sending order.
    pub fn parts(&self) -> &[Part] {
        self.0.parts()
    }

    /// Octets in all.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there is nothing to send.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Empties it and keeps the buffers.
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// Copies everything behind one another into `out`: the form for tests and simulations.
    pub fn copy_to<M: Memory + ?Sized>(
        &self,
        mem: &M,
        scope: Scope,
        out: &mut Vec<u8>,
    ) -> Result<(), AccessError> {
        self.0.copy_to(mem, scope, out)
    }

    /// Where octets are appended; [`Transmit::seal`] makes them a part.
    pub(super) fn bytes_mut(&mut self) -> &mut Vec<u8> {
        self.0.bytes_mut()
    }

    /// Takes the octets appended since the last seal as a part. Returns how many they are.
    pub(super) fn seal(&mut self) -> usize {
        self.0.seal()
    }

    /// Appends a piece of a region.
    pub(super) fn push_region(&mut self, sge: Sge) {
        self.0.push_region(sge);
    }
}
