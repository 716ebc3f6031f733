//! TCP streams: octets in order, whatever the capture's order.

use alloc::vec::Vec;
use core::net::SocketAddr;

use super::Iwarp;

/// A TCP segment of a frame.
#[derive(Debug, Clone, Copy)]
pub(super) struct Segment<'a> {
    pub(super) src: SocketAddr,
    pub(super) dst: SocketAddr,
    pub(super) seq: u32,
    pub(super) ack: u32,
    /// As in [`super::TcpInfo::flags`].
    pub(super) flags: u8,
    /// What was captured of the payload.
    pub(super) payload: &'a [u8],
    /// Octets of payload on the wire: more than captured, where the capture cut the frame.
    pub(super) wire_len: u32,
}

/// All streams of a capture.
#[derive(Debug)]
pub(super) struct Streams {}

impl Streams {
    pub(super) fn new(_max_streams: usize, _max_stream_octets: usize) -> Self {
        unimplemented!()
    }

    /// Takes the segment of frame `number`. What it completes goes to `out`, each with the number
    /// of the frame that completed it: `number`, or an earlier one that waited for the verdict.
    pub(super) fn handle_segment(
        &mut self,
        _number: u64,
        _segment: &Segment<'_>,
        _out: &mut Vec<(u64, Iwarp)>,
    ) {
        unimplemented!()
    }

    /// The lowest frame number that something may still be added to.
    pub(super) fn oldest_undecided(&self) -> Option<u64> {
        unimplemented!()
    }

    /// Decides now what is undecided for frames up to `number`: they can wait no longer.
    pub(super) fn decide(&mut self, _number: u64, _out: &mut Vec<(u64, Iwarp)>) {
        unimplemented!()
    }
}
