//! Trains: one captured datagram that holds several RoCEv2 packets.
//!
//! Where a program hands the kernel many packets in one call (UDP GSO), a capture on that host, or on
//! loopback, sees them before they are parted:
//!
//! ```text
//!   IP | UDP | BTH … ICRC | BTH … ICRC | BTH … ICRC | BTH … ICRC |
//!            |<-  size  ->|<-  size  ->|<-  size  ->|<- ≤ size ->|
//! ```
//!
//! Each packet's ICRC was computed for the IP and UDP lengths of that packet, and over IPv4 for the
//! Identification it is given when it is parted: that of the first, and one more each (with DF set
//! some leave it as it is).
//!
//! The size is nowhere on the wire. It is believed
//! 1. if what would be the second packet begins with a plausible BTH, and the ICRC of the first or of
//!    the second is right: 32 bits that chance does not match;
//! 2. or if the datagram cannot be one packet (too long, or not a length that its opcode may have)
//!    and all BTHs tell one story: same queue pair, rising PSNs, messages that begin and end, full
//!    packets of one path MTU.
//!
//! So an ordinary packet with a wrong ICRC stays one packet, whatever it carries.

use zerocopy::FromBytes;

use super::{
    IcrcState,
    roce::{self, Front, IpHeader, MAX_PAYLOAD, MIN_PACKET},
};
use crate::wire::roce::{
    Packet,
    bth::Bth,
    opcode::{Info, Operation, Payload, Place},
};

/// Packets of a train: what the kernel allows (`UDP_MAX_SEGMENTS`).
const MAX_SEGMENTS: usize = 128;
/// A UDP datagram's longest payload.
const MAX_DATAGRAM: usize = 65_535 - 8;
/// Packets are whole 4-octet words, and so are sizes.
const WORD: usize = 4;
/// Sizes whose ICRCs are computed, and octets of it as a multiple of the datagram's: what bounds the
/// work on octets that look like one BTH after the other.
const MAX_TRIES: usize = 32;
const MAX_CHECKED: usize = 8;
/// How far a train's second PSN may be from its first.
const PSN_WINDOW: u32 = 1 << 16;
/// Partition key of both members of the default partition.
const DEFAULT_PKEY: u16 = 0xffff;

/// A datagram that may hold several packets.
#[derive(Debug, Clone, Copy)]
pub(super) struct Train<'a> {
    pub(super) ip: IpHeader<'a>,
    pub(super) udp: &'a [u8; 8],
    /// What was captured of the datagram's payload.
    pub(super) octets: &'a [u8],
    /// Octets of payload on the wire.
    pub(super) wire_len: usize,
}

/// What Identification the packets of a train are given, over IPv4.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ids {
    Rising,
    Constant,
}

/// The packets of a train: what was captured of each, its octets on the wire, its ICRC.
#[derive(Debug)]
pub(super) struct Segments<'a> {
    train: Train<'a>,
    size: usize,
    next: usize,
    ids: Option<Ids>,
}

impl<'a> Iterator for Segments<'a> {
    type Item = (&'a [u8], usize, IcrcState);

    fn next(&mut self) -> Option<Self::Item> {
        let index = self.next;
        let (octets, wire_len) = self.train.segment(self.size, index)?;
        self.next += 1;
        let (icrc, ids) = self.train.icrc_state(self.size, index, self.ids);
        if icrc == IcrcState::Good && index > 0 {
            self.ids = Some(ids);
        }
        Some((octets, wire_len, icrc))
    }
}

impl<'a> Train<'a> {
    /// The packets, if there are several.
    pub(super) fn split(&self) -> Option<Segments<'a>> {
        let size = self.size()?;
        Some(Segments { train: *self, size, next: 0, ids: None })
    }

    fn size(&self) -> Option<usize> {
        if !self.wire_len.is_multiple_of(WORD)
            || !(2 * MIN_PACKET..=MAX_DATAGRAM).contains(&self.wire_len)
        {
            return None;
        }
        let (first, _) = Bth::ref_from_prefix(self.octets).ok()?;
        let (mut tries, mut checked) = (0, 0);
        let mut verified = |size: usize| {
            tries += 1;
            checked += 2 * size;
            (0..2)
                .any(|index| self.icrc_state(size, index, None).0 == IcrcState::Good)
                .then_some(size)
                .ok_or(tries == MAX_TRIES || checked > MAX_CHECKED * self.octets.len())
        };
        for continues in [follows, may_follow] {
            for size in
                self.sizes().filter(|size| self.bth(*size).is_some_and(|bth| continues(first, bth)))
            {
                match verified(size) {
                    Ok(size) => return Some(size),
                    Err(true) => return None,
                    Err(false) => {}
                }
            }
        }
        if self.may_be_one() {
            return None;
        }
        self.sizes()
            .filter(|size| self.bth(*size).is_some_and(|bth| follows(first, bth)))
            .take(MAX_TRIES)
            .find(|size| self.is_consistent(*size))
    }

    /// Every size at which the second packet's BTH was captured.
    fn sizes(&self) -> impl Iterator<Item = usize> + use<> {
        let least = self.wire_len.div_ceil(MAX_SEGMENTS).next_multiple_of(WORD).max(MIN_PACKET);
        let captured = self.octets.len().saturating_sub(Bth::LEN);
        let most = captured.min(self.wire_len - MIN_PACKET);
        (least..=most).step_by(WORD)
    }

    fn bth(&self, at: usize) -> Option<&'a Bth> {
        Some(Bth::ref_from_prefix(self.octets.get(at..)?).ok()?.0)
    }

    /// What was captured of a packet, and how long it is on the wire; `None` beyond the last.
    fn segment(&self, size: usize, index: usize) -> Option<(&'a [u8], usize)> {
        let from = size.checked_mul(index)?;
        let wire_len = self.wire_len.checked_sub(from).filter(|left| *left > 0)?.min(size);
        let captured = self.octets.get(from..).unwrap_or_default();
        Some((&captured[..captured.len().min(wire_len)], wire_len))
    }

    /// A packet's ICRC, and for which Identification it was judged: both, where neither is given.
    fn icrc_state(&self, size: usize, index: usize, ids: Option<Ids>) -> (IcrcState, Ids) {
        let first = ids.unwrap_or(Ids::Rising);
        let state = self.icrc_state_for(size, index, first);
        let other = ids.is_none() && index > 0 && matches!(self.ip, IpHeader::V4(_));
        if state == IcrcState::Bad && other {
            return (self.icrc_state_for(size, index, Ids::Constant), Ids::Constant);
        }
        (state, first)
    }

    fn icrc_state_for(&self, size: usize, index: usize, ids: Ids) -> IcrcState {
        let Some((octets, wire_len)) = self.segment(size, index) else {
            return IcrcState::Absent;
        };
        if octets.len() < wire_len {
            return IcrcState::Absent;
        }
        // As it was when it had been parted.
        let udp_len = (8 + wire_len) as u16;
        let mut udp = *self.udp;
        udp[4..6].copy_from_slice(&udp_len.to_be_bytes());
        match self.ip {
            IpHeader::V4(header) => {
                let mut room = [0; 60];
                let Some(ip) = room.get_mut(..header.len()) else { return IcrcState::Absent };
                ip.copy_from_slice(header);
                let total_len = (header.len() as u16).wrapping_add(udp_len);
                ip[2..4].copy_from_slice(&total_len.to_be_bytes());
                if ids == Ids::Rising {
                    let id = u16::from_be_bytes([ip[4], ip[5]]).wrapping_add(index as u16);
                    ip[4..6].copy_from_slice(&id.to_be_bytes());
                }
                roce::icrc_state(Front::V2(IpHeader::V4(ip), &udp), octets, wire_len)
            }
            IpHeader::V6(header) => {
                let mut ip = *header;
                ip[4..6].copy_from_slice(&udp_len.to_be_bytes());
                roce::icrc_state(Front::V2(IpHeader::V6(&ip), &udp), octets, wire_len)
            }
        }
    }

    /// Whether the datagram may be what it seems: one packet.
    fn may_be_one(&self) -> bool {
        let Ok(packet) = Packet::parse_captured(self.octets, self.wire_len) else { return true };
        match packet.headers.bth.opcode().info() {
            None => packet.payload_len <= MAX_PAYLOAD,
            Some(info) => is_right_length(info, packet.payload_len),
        }
    }

    /// Whether all packets that were captured tell one story.
    fn is_consistent(&self, size: usize) -> bool {
        let mut before: Option<(&'static Info, Packet<'_>)> = None;
        let mut mtu = None;
        for index in 0.. {
            let Some((octets, wire_len)) = self.segment(size, index) else { break };
            let Ok(packet) = Packet::parse_captured(octets, wire_len) else {
                // What was cut off is not held against it.
                return octets.len() < wire_len && index >= 2;
            };
            let Some(info) = packet.headers.bth.opcode().info() else { return false };
            if !is_right_length(info, packet.payload_len) {
                return false;
            }
            if is_full(info) && *mtu.get_or_insert(packet.payload_len) != packet.payload_len {
                return false;
            }
            if let Some((info_before, packet_before)) = &before
                && !(follows(&packet_before.headers.bth, &packet.headers.bth)
                    && continues_message(info_before, info)
                    && continues_psn(info_before, &packet_before.headers.bth, &packet.headers.bth))
            {
                return false;
            }
            before = Some((info, packet));
        }
        true
    }
}

/// Whether `next` is a BTH of the same flow as `first`.
fn follows(first: &Bth, next: &Bth) -> bool {
    next.pkey == first.pkey
        && next.dest_qp == first.dest_qp
        && next.opcode >> 5 == first.opcode >> 5
        && next.tver() == 0
        && next.psn().since(first.psn()) <= PSN_WINDOW
        && next.opcode().info().is_some()
}

/// Whether `next` can be a BTH at all: of another flow, or behind one that was damaged.
fn may_follow(first: &Bth, next: &Bth) -> bool {
    (next.pkey == first.pkey || next.pkey.get() == DEFAULT_PKEY)
        && next.tver() == 0
        && next.ecn & 0x3f == 0
        && next.ack & 0x7f == 0
        && next.opcode().info().is_some()
        && !follows(first, next)
}

/// Whether the packet must fill the path MTU.
fn is_full(info: &Info) -> bool {
    matches!(info.place, Place::First | Place::Middle)
}

fn is_right_length(info: &Info, payload_len: usize) -> bool {
    roce::payload_problem(info, payload_len).is_none()
        && !(is_full(info)
            && info.payload == Payload::Any
            && !matches!(payload_len, 256 | 512 | 1024 | 2048 | 4096))
}

/// Whether a packet may come after another: a message goes on, or ends and the next begins.
fn continues_message(before: &Info, next: &Info) -> bool {
    let begins = matches!(next.place, Place::First | Place::Only);
    is_full(before) != begins && (begins || before.operation == next.operation)
}

/// Requests and READ responses count up one by one; a READ request takes as many numbers as it has
/// responses, and acknowledgements skip what they need not name.
fn continues_psn(info: &Info, before: &Bth, next: &Bth) -> bool {
    let ahead = next.psn().since(before.psn());
    match info.operation {
        Operation::Send
        | Operation::Write
        | Operation::ReadResponse
        | Operation::CmpSwap
        | Operation::FetchAdd
        | Operation::Flush
        | Operation::AtomicWrite => ahead == 1,
        Operation::ReadRequest | Operation::AtomicAck | Operation::Resync => ahead >= 1,
        Operation::Ack | Operation::Cnp => true,
    }
}
