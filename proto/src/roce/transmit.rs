//! What goes out: trains of packets.

use alloc::vec::Vec;
use core::net::{IpAddr, SocketAddr};

use super::types::MAX_TRAIN;
use crate::{
    mem::{AccessError, Memory, Scope},
    parts::{Part, Parts},
    verbs::{Sge, pieces},
    wire::{
        ids::RKey,
        roce::{
            Headers, ICRC_LEN,
            bth::Bth,
            icrc::{Icrc, Identification, PathV4, PathV6},
            pad_len,
        },
    },
};

/// Payload up to this length is copied next to its headers: cheaper than a part of its own.
const COPY_LIMIT: usize = 256;

/// A train has at most this many parts: `IOV_MAX` is 1024 on Linux, and a packet adds up to a few.
const MAX_PARTS: usize = 960;

/// Payload in more pieces than this is copied too.
const MAX_PIECES: usize = 30;

/// The most octets of a train: what fits a UDP datagram over IPv4.
pub const MAX_TRAIN_OCTETS: usize = 65_507;

/// Packets to one peer, back to back. All are [`Train::segment_len`] octets long but the last,
/// which may be shorter: what one send call with segmentation offload cuts apart again. The caller
/// owns it and reuses its buffers.
///
/// Packet `i` of a train over IPv4 has its ICRC made for Identification `i` and DF set: what the
/// kernel puts into the packets it cuts a train into. A train that is sent otherwise must carry
/// the same.
#[derive(Debug, Default)]
pub struct Train {
    parts: Parts,
    packets: usize,
    segment: usize,
    /// A shorter packet is in: nothing may follow.
    closed: bool,
    ends: Option<(SocketAddr, SocketAddr)>,
    pub(super) ecn: bool,
    /// Payload on its way through the sum.
    scratch: Vec<u8>,
}

/// Where a packet's payload comes from.
#[derive(Debug, Clone, Copy)]
pub(super) enum Source<'a> {
    /// These octets.
    Bytes(&'a [u8]),
    /// `len` octets from `offset` of the list.
    Local { sges: &'a [Sge], offset: u32, len: u32 },
    /// Memory that the peer reads.
    Remote { rkey: RKey, addr: u64, len: u32 },
}

impl Source<'_> {
    pub(super) fn len(&self) -> usize {
        match self {
            Self::Bytes(bytes) => bytes.len(),
            Self::Local { len, .. } | Self::Remote { len, .. } => *len as usize,
        }
    }
}

/// How much a train may become.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limit {
    pub(super) packets: usize,
    pub(super) octets: usize,
}

impl Train {
    /// The octets that [`Part::Bytes`] refers to.
    pub fn bytes(&self) -> &[u8] {
        self.parts.bytes()
    }

    /// The parts, in sending order.
    pub fn parts(&self) -> &[Part] {
        self.parts.parts()
    }

    /// Octets in all.
    pub fn len(&self) -> usize {
        self.parts.len()
    }

    /// Whether there is nothing to send.
    pub fn is_empty(&self) -> bool {
        self.packets == 0
    }

    /// How many packets there are.
    pub fn packets(&self) -> usize {
        self.packets
    }

    /// Octets of every packet but the last, from the BTH to the ICRC.
    pub fn segment_len(&self) -> usize {
        self.segment
    }

    /// Where it goes to; `None` while it is empty.
    pub fn peer(&self) -> Option<SocketAddr> {
        self.ends.map(|(_, peer)| peer)
    }

    /// Where it comes from; `None` while it is empty.
    pub fn local(&self) -> Option<SocketAddr> {
        self.ends.map(|(local, _)| local)
    }

    /// Whether routers may mark it instead of dropping it: ECT(0) in its IP headers.
    pub fn ecn_capable(&self) -> bool {
        self.ecn
    }

    /// Empties it and keeps the buffers.
    pub fn clear(&mut self) {
        self.parts.clear();
        (self.packets, self.segment) = (0, 0);
        (self.closed, self.ends, self.ecn) = (false, None, false);
    }

    /// Copies all packets behind one another into `out`: the form for tests and simulations.
    /// Packet `i` begins at `i` times [`Train::segment_len`].
    ///
    /// # Errors
    /// A region's octets cannot be read any more.
    pub fn copy_to<M: Memory + ?Sized>(
        &self,
        mem: &M,
        scope: Scope,
        out: &mut Vec<u8>,
    ) -> Result<(), AccessError> {
        self.parts.copy_to(mem, scope, out)
    }

    /// Whether a packet of `len` octets, from `local` to `peer`, may be the next one.
    pub(super) fn takes(
        &self,
        len: usize,
        local: SocketAddr,
        peer: SocketAddr,
        limit: Limit,
    ) -> bool {
        if self.packets == 0 {
            return true;
        }
        !self.closed
            && len <= self.segment
            && self.ends == Some((local, peer))
            && self.packets < limit.packets.min(MAX_TRAIN)
            && self.len() + len <= limit.octets.min(MAX_TRAIN_OCTETS)
            && self.parts().len() < MAX_PARTS
    }

    /// Appends a packet. On an error nothing is appended.
    pub(super) fn push<M: Memory + ?Sized>(
        &mut self,
        (local, peer): (SocketAddr, SocketAddr),
        headers: &mut Headers,
        source: Source<'_>,
        mem: &M,
        scope: Scope,
    ) -> Result<(), AccessError> {
        let payload = source.len();
        let pad = pad_len(payload);
        headers.bth = headers.bth.with_pad(pad);
        let mut octets = [0; Headers::MAX_LEN];
        let header_len = headers.write(&mut octets);
        let len = header_len + payload + usize::from(pad) + ICRC_LEN;
        let mut icrc = self.icrc(local, peer, len, &headers.bth);
        icrc.update(&octets[Bth::LEN..header_len]);

        let bytes = self.parts.bytes_mut();
        let start = bytes.len();
        bytes.extend_from_slice(&octets[..header_len]);
        let copied = bytes.len();
        let mut by_region = None;
        let read = match source {
            Source::Bytes(octets) => {
                bytes.extend_from_slice(octets);
                Ok(())
            }
            // The peer may change it any time: what is summed must be what is sent.
            Source::Remote { rkey, addr, len } => {
                mem.read_remote(scope, rkey, addr, len.into(), bytes)
            }
            Source::Local { sges, offset, len } => {
                let mut list = pieces(sges, offset, len);
                if len as usize <= COPY_LIMIT || sges.len() > MAX_PIECES {
                    list.try_for_each(|sge| mem.read_local(scope, sge, bytes))
                } else {
                    by_region = Some(pieces(sges, offset, len));
                    self.scratch.clear();
                    list.try_for_each(|sge| mem.read_local(scope, sge, &mut self.scratch))
                }
            }
        };
        if let Err(error) = read {
            bytes.truncate(start);
            return Err(error);
        }
        match by_region {
            Some(list) => {
                icrc.update(&self.scratch);
                list.for_each(|sge| self.parts.push_region(sge));
            }
            None => icrc.update(&bytes[copied..]),
        }
        let pad = &[0; 3][..usize::from(pad)];
        icrc.update(pad);
        let bytes = self.parts.bytes_mut();
        bytes.extend_from_slice(pad);
        bytes.extend_from_slice(&icrc.finish());
        self.parts.seal();

        if self.packets == 0 {
            self.segment = len;
            self.ends = Some((local, peer));
        }
        self.closed = len < self.segment;
        self.packets += 1;
        Ok(())
    }

    /// The ICRC of the next packet, up to its BTH.
    fn icrc(&self, local: SocketAddr, peer: SocketAddr, len: usize, bth: &Bth) -> Icrc {
        let (src_port, dst_port) = (local.port(), peer.port());
        match (local.ip(), peer.ip()) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => {
                let id =
                    Identification { identification: self.packets as u16, dont_fragment: true };
                Icrc::socket_v4(&PathV4 { src, dst, src_port, dst_port }, id, len, bth)
            }
            (src, dst) => {
                let [src, dst] = [src, dst].map(|ip| match ip {
                    IpAddr::V4(ip) => ip.to_ipv6_mapped(),
                    IpAddr::V6(ip) => ip,
                });
                Icrc::socket_v6(&PathV6 { src, dst, src_port, dst_port }, len, bth)
            }
        }
    }
}

/// Octets of a packet with these headers and so much payload.
pub(super) fn packet_len(headers: &Headers, payload: u32) -> usize {
    let payload = payload as usize;
    headers.len() + payload + usize::from(pad_len(payload)) + ICRC_LEN
}
