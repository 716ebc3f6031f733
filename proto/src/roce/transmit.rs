//! What goes out: trains of packets.

use alloc::vec::Vec;
use core::net::{IpAddr, SocketAddr};

use super::types::MAX_TRAIN;
use crate::{
    mem::{AccessError, Memory, Scope},
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

/// The most octets of a train: what fits a UDP datagram over IPv4.
pub const MAX_TRAIN_OCTETS: usize = 65_507;

/// Packets to one peer, back to back. All are [`Train::segment_len`] octets long but the last,
/// which may be shorter: what one send call with segmentation offload cuts apart again. The caller
/// owns it and reuses its buffers.
///
/// Packet `i` of a train over IPv4 has its ICRC made for Identification `i` and DF set: what the
/// kernel puts into the packets it cuts a train into. A train that is sent otherwise must carry
/// the same.
///
/// It is a copy: the sum goes over all octets anyway, what is summed is what is sent, and one buffer
/// costs the kernel two thirds of what a list of regions does. It may be kept and sent later.
#[derive(Debug, Default)]
pub struct Train {
    octets: Vec<u8>,
    packets: usize,
    segment: usize,
    /// A shorter packet is in: nothing may follow.
    closed: bool,
    ends: Option<(SocketAddr, SocketAddr)>,
    pub(super) ecn: bool,
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
    /// All packets behind one another: packet `i` begins at `i` times [`Train::segment_len`].
    pub fn octets(&self) -> &[u8] {
        &self.octets
    }

    /// Octets in all.
    pub fn len(&self) -> usize {
        self.octets.len()
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
        self.octets.clear();
        (self.packets, self.segment) = (0, 0);
        (self.closed, self.ends, self.ecn) = (false, None, false);
    }

    /// Whether a packet of `len` octets between these ends, ours first, may be the next one.
    pub(super) fn takes(&self, len: usize, ends: (&SocketAddr, &SocketAddr), limit: Limit) -> bool {
        if self.packets == 0 {
            return true;
        }
        !self.closed
            && len <= self.segment
            && self.ends.as_ref().is_some_and(|(local, peer)| (local, peer) == ends)
            && self.packets < limit.packets.min(MAX_TRAIN)
            && self.len() + len <= limit.octets.min(MAX_TRAIN_OCTETS)
    }

    /// How many packets more it takes that are like the last one.
    pub(super) fn room_for_alike(&self, limit: Limit) -> usize {
        if self.packets == 0 || self.closed {
            return 0;
        }
        let packets = limit.packets.min(MAX_TRAIN).saturating_sub(self.packets);
        let octets = limit.octets.min(MAX_TRAIN_OCTETS).saturating_sub(self.len());
        packets.min(octets / self.segment)
    }

    /// Appends a packet. On an error nothing is appended.
    pub(super) fn push<M: Memory + ?Sized>(
        &mut self,
        (local, peer): (&SocketAddr, &SocketAddr),
        headers: &mut Headers,
        source: Source<'_>,
        mem: &M,
        scope: Scope,
    ) -> Result<(), AccessError> {
        let payload = source.len();
        let pad = pad_len(payload);
        // Mostly it is right: to read a header again that was just written in parts takes its time.
        if headers.bth.pad() != pad {
            headers.bth = headers.bth.with_pad(pad);
        }
        let mut octets = [0; Headers::MAX_LEN];
        let header_len = headers.write(&mut octets);
        let len = header_len + payload + usize::from(pad) + ICRC_LEN;
        let mut icrc = self.icrc(local, peer, len, &headers.bth);
        let start = self.octets.len();
        self.octets.extend_from_slice(&octets[..header_len]);
        let read = match source {
            Source::Bytes(octets) => {
                self.octets.extend_from_slice(octets);
                Ok(())
            }
            Source::Remote { rkey, addr, len } => {
                mem.read_remote(scope, rkey, addr, len.into(), &mut self.octets)
            }
            Source::Local { sges, offset, len } => pieces(sges, offset, len)
                .try_for_each(|sge| mem.read_local(scope, sge, &mut self.octets)),
        };
        if let Err(error) = read {
            self.octets.truncate(start);
            return Err(error);
        }
        self.octets.extend_from_slice(&[0; 3][..usize::from(pad)]);
        icrc.update(&self.octets[start + Bth::LEN..]);
        self.octets.extend_from_slice(&icrc.finish());

        if self.packets == 0 {
            self.segment = len;
            self.ends = Some((*local, *peer));
        }
        self.closed = len < self.segment;
        self.packets += 1;
        Ok(())
    }

    /// The ICRC of the next packet, up to its BTH.
    fn icrc(&self, local: &SocketAddr, peer: &SocketAddr, len: usize, bth: &Bth) -> Icrc {
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
