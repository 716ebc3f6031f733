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
//! 1. if what would be the second packet begins with what may be a BTH, and the ICRC of the first or
//!    of the second is right: 32 bits that chance does not match;
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
    opcode::{Info, Operation, Place},
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
        let candidates = |is_next: fn(&Bth, &Bth) -> bool| {
            let is_next =
                move |size: &usize| self.bth(*size).is_some_and(|bth| is_next(first, bth));
            self.sizes().filter(is_next).take(MAX_TRIES)
        };
        // The size comes before its multiples.
        let mut checked = 0;
        for size in candidates(may_follow) {
            checked += 2 * size;
            if checked > MAX_CHECKED * self.octets.len() {
                break;
            }
            let good = |index| self.icrc_state(size, index, None).0 == IcrcState::Good;
            if good(0) || good(1) {
                return Some(size);
            }
        }
        if self.may_be_one() {
            return None;
        }
        candidates(follows).find(|size| self.is_consistent(*size))
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
        Packet::parse_captured(self.octets, self.wire_len)
            .map_or(true, |packet| is_regular(&packet))
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
            if !is_regular(&packet) {
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

/// Whether `next` may be a BTH, of another flow, or where one of the two was damaged: two of its
/// partition key, its queue pair and its form are as they should be.
fn may_follow(first: &Bth, next: &Bth) -> bool {
    let pkey = next.pkey == first.pkey || next.pkey.get() == DEFAULT_PKEY;
    let qp = next.dest_qp == first.dest_qp;
    let form = || {
        next.tver() == 0
            && next.ecn & 0x3f == 0
            && next.ack & 0x7f == 0
            && next.opcode().info().is_some()
    };
    (pkey && qp) || ((pkey || qp) && form())
}

/// Whether the packet must fill the path MTU.
fn is_full(info: &Info) -> bool {
    matches!(info.place, Place::First | Place::Middle)
}

/// Whether a packet has the form that its opcode asks for, and a length that it may have.
fn is_regular(packet: &Packet<'_>) -> bool {
    let is_mtu = || matches!(packet.payload_len, 256 | 512 | 1024 | 2048 | 4096);
    packet.check_form().is_ok()
        && packet.payload_len <= MAX_PAYLOAD
        && packet.headers.bth.opcode().info().is_none_or(|info| !is_full(info) || is_mtu())
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

#[cfg(test)]
mod tests {
    use super::super::tests::*;
    use super::super::{Frame, Layer};
    use super::*;
    use proptest::prelude::*;
    use std::{
        time::{Duration, Instant},
        vec,
        vec::Vec,
    };

    const ID: u16 = 0xfffe;

    /// Packets of one message, each with the ICRC it has once it is by itself.
    fn packets(v6: bool, rising: bool, opcodes: &[u8], len: usize, last: usize) -> Vec<Vec<u8>> {
        let ends = opcodes.len() - 1;
        (0..opcodes.len())
            .map(|i| {
                let id = if rising { ID.wrapping_add(i as u16) } else { ID };
                let len = if i == ends { last } else { len };
                let payload: Vec<u8> = (0..len).map(|at| (at * 7 + i) as u8).collect();
                sealed(v6, id, opcodes[i], 0xff_fff0 + i as u32, &payload)
            })
            .collect()
    }

    /// FIRST, MIDDLE, …, LAST of a SEND.
    fn send(count: usize) -> Vec<u8> {
        (0..count).map(|i| if i == 0 { 0 } else { 1 + u8::from(i + 1 == count) }).collect()
    }

    fn states(frame: &Frame) -> Vec<IcrcState> {
        frame.roce.iter().map(|roce| roce.icrc).collect()
    }

    fn is_train(frame: &Frame, packets: &[Vec<u8>]) {
        assert_eq!(frame.roce.len(), packets.len());
        assert_eq!(frame.stack.iter().filter(|layer| **layer == Layer::Bth).count(), 1);
        for (roce, packet) in frame.roce.iter().zip(packets) {
            let bth = Bth::ref_from_prefix(packet).unwrap().0;
            assert_eq!(roce.headers.unwrap().bth, *bth);
        }
    }

    #[test]
    fn trains_are_parted() {
        for v6 in [false, true] {
            for rising in [false, true] {
                for (count, len, last) in
                    [(2, 1024, 1), (2, 256, 256), (15, 4096, 77), (60, 1024, 8)]
                {
                    let packets = packets(v6, rising, &send(count), len, last);
                    let frame = dissect(&framed(v6, ID, &packets.concat()));
                    is_train(&frame, &packets);
                    assert_eq!(states(&frame), vec![IcrcState::Good; count]);
                    assert_eq!(frame.roce[count - 1].payload_len as usize, last);
                    assert!(frame.roce.iter().all(|roce| roce.error.is_none()));
                }
            }
        }
    }

    #[test]
    fn a_train_may_be_of_many_queue_pairs() {
        // SENDs of 4 octets and ACKs are of one size.
        let packets: Vec<Vec<u8>> = (0..6)
            .map(|i: u16| {
                let mut packet = match i % 2 {
                    0 => sealed(false, 0, 4, u32::from(i) * 100_000, b"abcd"),
                    _ => sealed(false, 0, 0x11, 77, b""),
                };
                packet.truncate(16);
                packet[7] = i as u8;
                seal(false, ID.wrapping_add(i), packet)
            })
            .collect();
        let frame = dissect(&framed(false, ID, &packets.concat()));
        is_train(&frame, &packets);
        assert_eq!(states(&frame), [IcrcState::Good; 6]);
    }

    proptest! {
        #[test]
        fn one_flipped_bit_spoils_one_packet(
            v6 in any::<bool>(),
            count in 2usize..60,
            mtu in prop::sample::select(vec![256usize, 1024]),
            last in 0usize..256,
            at in any::<prop::sample::Index>(),
            bit in 0u8..8,
        ) {
            let packets = packets(v6, true, &send(count), mtu, last);
            let mut octets = packets.concat();
            let at = at.index(octets.len());
            let size = packets[0].len();
            octets[at] ^= 1 << bit;
            let frame = dissect(&framed(v6, ID, &octets));
            prop_assert_eq!(frame.roce.len(), count);
            let mut want = vec![IcrcState::Good; count];
            if at % size != 4 {
                // FECN, BECN and the bits beside them are masked.
                want[at / size] = IcrcState::Bad;
            }
            prop_assert_eq!(states(&frame), want);
        }

        #[test]
        fn a_cut_train_is_parted_as_far_as_it_goes(
            v6 in any::<bool>(),
            count in 2usize..40,
            captured in any::<prop::sample::Index>(),
        ) {
            let packets = packets(v6, true, &send(count), 256, 100);
            let octets = packets.concat();
            let whole = framed(v6, ID, &octets);
            let headers = whole.len() - octets.len();
            let captured = captured.index(octets.len());
            let frame = dissect_cut(&whole, headers + captured);
            let size = packets[0].len();
            if captured < size + Bth::LEN {
                // Not enough to know that it is one.
                prop_assert_eq!(states(&frame), [IcrcState::Absent]);
                if captured >= Bth::LEN && octets.len() > 4096 + 16 {
                    let error = frame.roce[0].error.as_ref().unwrap();
                    prop_assert!(error.contains("train"), "{error}");
                }
                return Ok(());
            }
            let seen = captured.div_ceil(size);
            prop_assert_eq!(frame.roce.len(), seen);
            for (i, roce) in frame.roce.iter().enumerate() {
                let whole = captured >= i * size + packets[i].len();
                let want = if whole { IcrcState::Good } else { IcrcState::Absent };
                prop_assert_eq!(roce.icrc, want);
            }
            let told = frame.roce[seen - 1].error.is_some();
            let there = captured - (seen - 1) * size;
            prop_assert_eq!(told, seen < count || there < Bth::LEN);
        }

        /// Whatever an ordinary packet carries, it stays one packet if its ICRC is wrong.
        #[test]
        fn an_ordinary_packet_is_not_parted(
            v6 in any::<bool>(),
            opcode in prop::sample::select(vec![0u8, 1, 2, 4, 7, 0x0e, 0x10, 0x64]),
            inner in 16usize..300,
            same_flow in any::<bool>(),
            full in any::<bool>(),
            good in any::<bool>(),
        ) {
            // Octets that look like packets of the very same queue pair, one after the other, with
            // ICRCs that are right elsewhere: a capture that is being copied by RDMA.
            let inner = inner.next_multiple_of(4);
            let mut payload = Vec::new();
            let mut psn = 0xff_fff1;
            while payload.len() < 4096 {
                let flow = if same_flow { 7 } else { psn as u16 };
                payload.extend(sealed(v6, flow, 1, psn, &vec![0; inner]));
                psn += 1;
            }
            payload.truncate(if full { 4096 } else { 1024 });
            let mut packet = sealed(v6, ID, opcode, 0xff_fff0, &payload);
            if !good {
                let last = packet.len() - 1;
                packet[last] ^= 1;
            }
            let frame = dissect(&framed(v6, ID, &packet));
            let want = if good { IcrcState::Good } else { IcrcState::Bad };
            prop_assert_eq!(states(&frame), [want]);
            prop_assert_eq!(frame.roce[0].payload_len as usize, payload.len());
        }

        #[test]
        fn random_payload_is_never_parted(
            v6 in any::<bool>(),
            payload in prop::collection::vec(any::<u8>(), 16..4096),
            captured in 42usize..4200,
        ) {
            let packet = sealed(v6, ID.wrapping_add(1), 4, 1, &payload);
            let frame = framed(v6, ID, &packet);
            let state = if v6 { IcrcState::Good } else { IcrcState::Bad };
            prop_assert_eq!(states(&dissect(&frame)), [state]);
            prop_assert!(dissect_cut(&frame, captured).roce.len() <= 1);
        }
    }

    #[test]
    fn a_train_of_wrong_icrcs_is_parted_by_its_story() {
        // Longer than a packet may be, or a FIRST that is not full: it cannot be one packet.
        for (count, len, last) in [(2, 4096, 1), (3, 1024, 100), (40, 1024, 1024), (60, 256, 0)] {
            let mut packets = packets(true, true, &send(count), len, last);
            for packet in &mut packets {
                let last = packet.len() - 1;
                packet[last] ^= 1;
            }
            let frame = dissect(&framed(true, ID, &packets.concat()));
            is_train(&frame, &packets);
            assert_eq!(states(&frame), vec![IcrcState::Bad; count]);
            // A story that does not hold: a number is missing.
            let psn = packets[1][11];
            packets[1][11] = psn.wrapping_add(1);
            assert_eq!(dissect(&framed(true, ID, &packets.concat())).roce.len(), 1);
            packets[1][11] = psn;
            // Another SEND begins before this one ends.
            packets[1][0] = 0;
            assert_eq!(dissect(&framed(true, ID, &packets.concat())).roce.len(), 1);
        }
    }

    #[test]
    fn hostile_octets_take_no_quadratic_time() {
        // Every 4 octets a BTH might begin. Each of the 16,000 sizes tried would be 1 GB a frame.
        let begun = Instant::now();
        let bth = [0x04, 0x40, 0xff, 0xff];
        for (v6, fill) in [(false, bth), (true, bth), (false, [0; 4]), (true, [0xff; 4])] {
            let octets: Vec<u8> = fill.iter().copied().cycle().take(65_480).collect();
            let frame = framed(v6, ID, &octets);
            for _ in 0..50 {
                assert_eq!(dissect(&frame).roce.len(), 1);
            }
        }
        // One BTH after the other, all of the same flow.
        let bth = [4, 0x40, 0xff, 0xff, 0, 0, 0, 0x11, 0, 0, 0, 1, 9, 9, 9, 9];
        let octets: Vec<u8> = bth.iter().copied().cycle().take(65_472).collect();
        for _ in 0..50 {
            assert_eq!(dissect(&framed(false, ID, &octets)).roce.len(), 1);
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "{:?}", begun.elapsed());
    }
}
