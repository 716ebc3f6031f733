//! Captures: their frames, and what RDMA they carry.
//!
//! ```text
//!   octets ──> capture::Reader ──> Record ──> Dissector ──> Frame
//!              pcap, pcapng, gzip             link, IP, tunnels, fragments
//!                                             ├── UDP 4791, 0x8915, LRH ──> Roce
//!                                             └── TCP streams ──> MPA ──> Iwarp
//! ```
//!
//! A [`Frame`] says everything there is to say about one frame of the capture, and owns it. It comes
//! out of the [`Dissector`] in the capture's order, a little later than it went in: where a TCP
//! stream may still turn out to be iWARP, frames wait for the verdict.

pub mod capture;
mod fragments;
mod ip;
mod link;
mod mpa;
mod roce;
mod tcp;
mod train;

use alloc::{boxed::Box, collections::VecDeque, string::String, vec::Vec};
use core::net::IpAddr;

use smallvec::SmallVec;

use crate::wire::{
    ib::lrh::Lrh,
    iwarp::{
        ddp::{TaggedHeader, UntaggedHeader},
        mpa::{Enhanced, StartFlags, StartKind},
        rdmap::{AtomicRequest, AtomicResponse, Opcode, ReadRequest},
        terminate::Terminate,
    },
    roce::{Headers, grh::Grh, icrc::Rewrite},
};
use capture::Record;

/// A layer of a frame, by name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Layer {
    /// Ethernet II or IEEE 802.3.
    Eth,
    /// A VLAN tag, 802.1Q or 802.1ad; one a tag.
    Vlan,
    /// An MPLS label; one a label.
    Mpls,
    /// Linux cooked capture, version 1 or 2.
    Sll,
    /// BSD loopback, with either byte order.
    Null,
    /// Endace extensible record format.
    Erf,
    /// IEEE 802.2.
    Llc,
    /// ARP.
    Arp,
    /// IPv4.
    Ipv4,
    /// IPv6, its extension headers included.
    Ipv6,
    /// ICMP or ICMPv6.
    Icmp,
    /// UDP.
    Udp,
    /// TCP.
    Tcp,
    /// GRE.
    Gre,
    /// VXLAN.
    Vxlan,
    /// Geneve.
    Geneve,
    /// IEEE 802.3x pause.
    Pause,
    /// Priority flow control, IEEE 802.1Qbb.
    Pfc,
    /// InfiniBand local route header.
    Lrh,
    /// Global route header.
    Grh,
    /// InfiniBand transport.
    Bth,
    /// A management datagram.
    Mad,
    /// MPA, with DDP and RDMAP.
    Mpa,
    /// Something that is not looked into.
    Data,
}

impl Layer {
    /// As in JSON, such as `eth`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Eth => "eth",
            Self::Vlan => "vlan",
            Self::Mpls => "mpls",
            Self::Sll => "sll",
            Self::Null => "null",
            Self::Erf => "erf",
            Self::Llc => "llc",
            Self::Arp => "arp",
            Self::Ipv4 => "ipv4",
            Self::Ipv6 => "ipv6",
            Self::Icmp => "icmp",
            Self::Udp => "udp",
            Self::Tcp => "tcp",
            Self::Gre => "gre",
            Self::Vxlan => "vxlan",
            Self::Geneve => "geneve",
            Self::Pause => "pause",
            Self::Pfc => "pfc",
            Self::Lrh => "lrh",
            Self::Grh => "grh",
            Self::Bth => "bth",
            Self::Mad => "mad",
            Self::Mpa => "mpa",
            Self::Data => "data",
        }
    }
}

/// The layers of a frame, outermost first.
pub type Stack = SmallVec<[Layer; 12]>;

/// One frame of a capture, decoded.
#[derive(Debug, Clone)]
pub struct Frame {
    /// Its number in the capture, from 1.
    pub number: u64,
    /// When, in nanoseconds since 1970; `None` where the capture does not say.
    pub time_ns: Option<i128>,
    /// Octets on the wire.
    pub len: u32,
    /// Octets captured.
    pub caplen: u32,
    /// Its layers, outermost first.
    pub stack: Stack,
    /// The innermost addresses and ports.
    pub ends: Option<Ends>,
    /// The innermost IP header's fields that matter to RDMA.
    pub ip: Option<IpInfo>,
    /// The innermost TCP header.
    pub tcp: Option<TcpInfo>,
    /// RoCE packets: one, or several where a capture on a host shows a GSO train as one datagram.
    pub roce: SmallVec<[Box<Roce>; 1]>,
    /// What this frame completes of iWARP streams.
    pub iwarp: Vec<Iwarp>,
    /// A pause or PFC frame.
    pub pause: Option<Pause>,
    /// Priority code point of the outermost VLAN tag, of Ethernet.
    pub pcp: Option<u8>,
    /// What is wrong below RoCE and iWARP.
    pub error: Option<String>,
}

/// Who to whom.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Ends {
    /// Source. Of RoCEv1 and InfiniBand with a GRH: the source GID.
    pub src: IpAddr,
    /// Destination.
    pub dst: IpAddr,
    /// Source and destination port, where there are any.
    pub ports: Option<(u16, u16)>,
}

/// Fields of an IP header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IpInfo {
    /// Differentiated services code point, 6 bits.
    pub dscp: u8,
    /// ECN, 2 bits: 3 says that congestion was met.
    pub ecn: u8,
    /// Time to live, or hop limit.
    pub ttl: u8,
    /// IPv4's Identification. Many senders count it up, packet by packet.
    pub ident: Option<u16>,
}

/// Fields of a TCP header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TcpInfo {
    /// Sequence number.
    pub seq: u32,
    /// Acknowledgement number; means something with ACK (0x10).
    pub ack: u32,
    /// FIN 1, SYN 2, RST 4, PSH 8, ACK 0x10, URG 0x20, ECE 0x40, CWR 0x80.
    pub flags: u8,
    /// The window as it is in the header, without a scale.
    pub window: u16,
    /// Octets of payload on the wire.
    pub payload_len: u32,
}

/// A pause frame.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pause {
    /// Everything, for so many quanta of 512 bit times.
    Link(u16),
    /// Priorities: which are meant (bit n is priority n), and for how many quanta.
    Priorities(u8, [u16; 8]),
}

/// Which RoCE.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Version {
    /// EtherType 0x8915.
    V1,
    /// UDP.
    V2,
    /// Native InfiniBand.
    Ib,
}

/// Whether a checksum is right.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum IcrcState {
    /// It is.
    Good,
    /// It is not.
    Bad,
    /// It cannot be said: the packet was not captured whole.
    Absent,
}

/// One RoCE or InfiniBand packet.
#[derive(Debug, Clone)]
pub struct Roce {
    /// Which RoCE.
    pub version: Version,
    /// LRH of native InfiniBand.
    pub lrh: Option<Lrh>,
    /// GRH of RoCEv1 and of native InfiniBand that has one.
    pub grh: Option<Grh>,
    /// BTH and extended headers; `None` where not even the BTH is whole: `error` says so then.
    pub headers: Option<Headers>,
    /// Octets of payload on the wire, without pad.
    pub payload_len: u32,
    /// The ICRC.
    pub icrc: IcrcState,
    /// What would make it right, where it is wrong and the packet came over IPv4.
    pub rewritten: Option<Rewrite>,
    /// The VCRC of native InfiniBand.
    pub vcrc: Option<IcrcState>,
    /// A management datagram's octets, as captured (256 of a whole one); read it with
    /// [`crate::wire::mad::Mad::parse`].
    pub mad: Option<Box<[u8]>>,
    /// What could not be decoded.
    pub error: Option<String>,
}

/// What an iWARP stream carries.
#[derive(Debug, Clone)]
pub enum Iwarp {
    /// A start-up frame.
    Start(Box<Start>),
    /// An FPDU.
    Fpdu(Fpdu),
    /// Why the stream cannot be followed from here on.
    Error(String),
}

/// A start-up frame of MPA, owned; see [`crate::wire::iwarp::mpa::Start`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Start {
    /// Request or reply.
    pub kind: StartKind,
    /// M, C, R, S.
    pub flags: StartFlags,
    /// Revision.
    pub revision: u8,
    /// Queue depths of revision 2.
    pub enhanced: Option<Enhanced>,
    /// IRD and ORD that a revision 1 program may have put into its private data, in either byte
    /// order: a guess, see [`crate::wire::iwarp::mpa::legacy_ird_ord`].
    pub legacy_ird_ord: Option<(u32, u32)>,
    /// The program's private data.
    pub private_data: Vec<u8>,
}

/// State of an FPDU's CRC field.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CrcState {
    /// It is the CRC.
    Good,
    /// It is neither the CRC nor zero. Without CRC in use that is allowed (RFC 5044 §7.1.1).
    Bad,
    /// It is zero.
    Zero,
}

/// An FPDU and the DDP segment in it.
#[derive(Debug, Clone)]
pub struct Fpdu {
    /// Length of the ULPDU.
    pub ulpdu_len: u16,
    /// Its CRC field.
    pub crc: CrcState,
    /// Whether the start-up put the CRC into use; `None` where it is not in the capture.
    pub crc_in_use: Option<bool>,
    /// Markers in this stream.
    pub markers: Markers,
    /// The DDP header; `None` where it is not whole: `error` says so then.
    pub header: Option<DdpHeader>,
    /// Octets behind the DDP header (RDMAP's own header included).
    pub payload_len: u16,
    /// RDMAP's own header, where the operation has one.
    pub operation: Operation,
    /// What could not be decoded, or is wrong.
    pub error: Option<String>,
}

/// Markers of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Markers {
    /// There are none.
    None,
    /// Where RFC 5044 §4.3 has them.
    Right,
    /// Off their grid: followed all the same.
    OffGrid,
}

/// The header of a DDP segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DdpHeader {
    /// Named by STag and offset.
    Tagged(TaggedHeader),
    /// For the next buffer of a queue.
    Untagged(UntaggedHeader),
}

impl DdpHeader {
    /// What the message is.
    pub const fn opcode(&self) -> Opcode {
        match self {
            Self::Tagged(header) => header.opcode(),
            Self::Untagged(header) => header.opcode(),
        }
    }

    /// L: the message's last segment.
    pub const fn last(&self) -> bool {
        match self {
            Self::Tagged(header) => header.last(),
            Self::Untagged(header) => header.last(),
        }
    }
}

/// RDMAP's own header.
#[derive(Debug, Clone)]
pub enum Operation {
    /// The operation has none, or it is not whole.
    None,
    /// READ.
    ReadRequest(ReadRequest),
    /// Immediate data: 8 octets as a big-endian number.
    Immediate(u64),
    /// Atomic request.
    AtomicRequest(AtomicRequest),
    /// Atomic response.
    AtomicResponse(AtomicResponse),
    /// Terminate: as [`Terminate::parse`] reads it, and its octets as they are on the wire.
    Terminate(Box<Terminate>, Vec<u8>),
}

/// What a [`Dissector`] shall look for, and its bounds.
#[derive(Debug, Clone)]
pub struct Options {
    /// UDP ports of RoCEv2: 4791 and what the user adds.
    pub roce_ports: SmallVec<[u16; 4]>,
    /// TCP streams that are followed at a time; beyond, the one silent for longest is given up.
    pub max_streams: usize,
    /// Octets that one stream may hold back (gaps, FPDUs that are not whole).
    pub max_stream_octets: usize,
    /// Octets that all fragments of IP datagrams may hold.
    pub max_fragment_octets: usize,
    /// Octets that all streams together may hold back; beyond, those that hold for longest let go.
    pub max_held_octets: usize,
    /// Frames that wait for the verdict about a stream.
    pub max_waiting: usize,
    /// Octets, roughly, that what was found in these frames may take.
    pub max_waiting_octets: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            roce_ports: SmallVec::from_slice(&[crate::wire::roce::UDP_PORT]),
            max_streams: 65_536,
            max_stream_octets: 16 << 20,
            max_fragment_octets: 16 << 20,
            max_held_octets: 64 << 20,
            max_waiting: 1024,
            max_waiting_octets: 16 << 20,
        }
    }
}

/// Takes records in, gives frames out.
///
/// ```text
///   handle_record(1) handle_record(2) … ──> poll_frame() until None … finish() ──> poll_frame()
/// ```
///
/// A frame is ready at once, unless it, or one before it, belongs to a TCP stream that may still turn
/// out to carry iWARP. At most [`Options::max_waiting`] frames wait, and at most
/// [`Options::max_waiting_octets`] of what was found in them.
#[derive(Debug)]
pub struct Dissector {
    options: Options,
    streams: tcp::Streams,
    fragments: fragments::Fragments,
    waiting: VecDeque<Frame>,
    /// What was found in the frames that wait takes so many octets, roughly.
    found: usize,
    /// What segments completed; empty between calls.
    done: Vec<(u64, Iwarp)>,
    finished: bool,
}

impl Dissector {
    /// One that has seen nothing.
    pub fn new(options: Options) -> Self {
        Self {
            streams: tcp::Streams::new(
                options.max_streams,
                options.max_stream_octets,
                options.max_held_octets,
            ),
            fragments: fragments::Fragments::new(options.max_fragment_octets),
            waiting: VecDeque::new(),
            found: 0,
            done: Vec::new(),
            finished: false,
            options,
        }
    }

    /// Takes the capture's next frame; numbers rise. Then call [`Dissector::poll_frame`] until it
    /// has none.
    pub fn handle_record(&mut self, record: &Record<'_>) {
        self.finished = false;
        let mut frame = Frame::new(record);
        let missing = (record.len as usize).saturating_sub(record.data.len());
        match link::walk(record, &mut frame.stack) {
            Ok(inner) => ip::Walk {
                options: &self.options,
                fragments: &mut self.fragments,
                streams: &mut self.streams,
                done: &mut self.done,
                frame: &mut frame,
                depth: 0,
            }
            .walk(inner, missing),
            // What the capture cut off is nobody's mistake.
            Err(_) if missing > 0 => {}
            Err(what) => frame.error = Some(what),
        }
        if let [Layer::Eth, Layer::Vlan, ..] = frame.stack[..] {
            // TCI behind both addresses and the tag's EtherType: PCP, DEI, VLAN.
            frame.pcp = record.data.get(14).map(|octet| octet >> 5);
        }
        self.found += frame.found_octets();
        self.waiting.push_back(frame);
        self.attach();
        if self.found > self.options.max_waiting_octets {
            self.streams.decide(record.number, &mut self.done);
            self.attach();
        } else if self.waiting.len() > self.options.max_waiting
            && let Some(front) = self.waiting.front().map(|frame| frame.number)
            && !self.is_decided(front)
        {
            self.streams.decide(front, &mut self.done);
            self.attach();
        }
    }

    /// The next frame that nothing can be added to any more, in the capture's order.
    pub fn poll_frame(&mut self) -> Option<Frame> {
        let front = self.waiting.front()?.number;
        if !self.finished && !self.is_decided(front) {
            return None;
        }
        let frame = self.waiting.pop_front()?;
        self.found -= frame.found_octets();
        Some(frame)
    }

    /// There are no more records: frames that waited come out.
    pub fn finish(&mut self) {
        self.streams.decide(u64::MAX, &mut self.done);
        self.attach();
        self.finished = true;
    }

    /// Octets of iWARP that were captured, and are told in no frame: others before them never came,
    /// and their frames could not wait. Complete after [`Dissector::finish`].
    pub const fn lost_octets(&self) -> u64 {
        self.streams.lost()
    }

    fn is_decided(&self, number: u64) -> bool {
        self.streams.oldest_undecided().is_none_or(|oldest| number < oldest)
    }

    /// Gives what was completed to the frames that completed it.
    fn attach(&mut self) {
        for (number, iwarp) in self.done.drain(..) {
            let found = self.waiting.binary_search_by_key(&number, |frame| frame.number);
            debug_assert!(found.is_ok(), "frame {number} is gone, and {iwarp:?} belongs to it");
            let Some(frame) = found.ok().and_then(|at| self.waiting.get_mut(at)) else { continue };
            if frame.iwarp.is_empty() {
                frame.stack.push(Layer::Mpa);
            }
            frame.iwarp.push(iwarp);
            self.found += size_of::<Iwarp>();
        }
    }
}

impl Frame {
    /// Nothing but what the record says.
    fn new(record: &Record<'_>) -> Self {
        Self {
            number: record.number,
            time_ns: record.time_ns,
            len: record.len,
            caplen: u32::try_from(record.data.len()).unwrap_or(u32::MAX),
            stack: Stack::new(),
            ends: None,
            ip: None,
            tcp: None,
            roce: SmallVec::new(),
            iwarp: Vec::new(),
            pause: None,
            pcp: None,
            error: None,
        }
    }

    /// Octets that RoCE and iWARP in it take, roughly.
    fn found_octets(&self) -> usize {
        self.roce.len() * size_of::<Roce>() + self.iwarp.len() * size_of::<Iwarp>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::roce::{ICRC_LEN, bth::Bth, icrc::Icrc};
    use capture::LinkType;
    use hex_literal::hex;
    use std::vec;

    pub(super) fn record<'a>(number: u64, len: usize, data: &'a [u8]) -> Record<'a> {
        Record { number, time_ns: None, len: len as u32, data, link: LinkType::ETHERNET, erf: None }
    }

    /// The frames of a capture, each as it is on the wire and how much of it was captured.
    pub(super) fn dissect_all(frames: &[(&[u8], usize)]) -> Vec<Frame> {
        let mut dissector = Dissector::new(Options::default());
        let mut out = Vec::new();
        for (number, (frame, captured)) in (1..).zip(frames) {
            let captured = &frame[..*captured.min(&frame.len())];
            dissector.handle_record(&record(number, frame.len(), captured));
            while let Some(frame) = dissector.poll_frame() {
                out.push(frame);
            }
        }
        dissector.finish();
        while let Some(frame) = dissector.poll_frame() {
            out.push(frame);
        }
        out
    }

    /// A frame that was captured whole.
    pub(super) fn dissect(frame: &[u8]) -> Frame {
        dissect_cut(frame, frame.len())
    }

    pub(super) fn dissect_cut(frame: &[u8], captured: usize) -> Frame {
        dissect_all(&[(frame, captured)]).remove(0)
    }

    pub(super) fn stack(frame: &Frame) -> Vec<&'static str> {
        frame.stack.iter().map(|layer| layer.name()).collect()
    }

    pub(super) fn ethernet(ethertype: u16, payload: &[u8]) -> Vec<u8> {
        let mut frame = hex!("525400999903 525400999902").to_vec();
        frame.extend(ethertype.to_be_bytes());
        frame.extend(payload);
        frame
    }

    /// From 10.99.0.2 to 10.99.0.3; `flags` and the fragment's offset as on the wire.
    pub(super) fn ipv4(id: u16, flags: u16, protocol: u8, payload: &[u8]) -> Vec<u8> {
        let mut packet = hex!("4502 0000 0000 0000 40 00 0000 0a630002 0a630003").to_vec();
        packet[2..4].copy_from_slice(&(20 + payload.len() as u16).to_be_bytes());
        packet[4..6].copy_from_slice(&id.to_be_bytes());
        packet[6..8].copy_from_slice(&flags.to_be_bytes());
        packet[9] = protocol;
        packet.extend(payload);
        packet
    }

    /// From fd99::2 to fd99::3.
    pub(super) fn ipv6(next_header: u8, payload: &[u8]) -> Vec<u8> {
        let mut packet = hex!(
            "60d00000 0000 00 3f fd990000000000000000000000000002 fd990000000000000000000000000003"
        )
        .to_vec();
        packet[4..6].copy_from_slice(&(payload.len() as u16).to_be_bytes());
        packet[6] = next_header;
        packet.extend(payload);
        packet
    }

    pub(super) fn udp(dst: u16, payload: &[u8]) -> Vec<u8> {
        let mut datagram = 55_410_u16.to_be_bytes().to_vec();
        datagram.extend(dst.to_be_bytes());
        datagram.extend((8 + payload.len() as u16).to_be_bytes());
        datagram.extend([0, 0]);
        datagram.extend(payload);
        datagram
    }

    /// A packet of queue pair 0x11, from its BTH to its ICRC, which is as in an IP datagram by
    /// itself; over IPv4 with this Identification, and DF.
    pub(super) fn sealed(v6: bool, id: u16, opcode: u8, psn: u32, payload: &[u8]) -> Vec<u8> {
        let [_, high, mid, low] = psn.to_be_bytes();
        let bth = Bth {
            opcode,
            flags: 0x40,
            pkey: 0xffff.into(),
            ecn: 0,
            dest_qp: [0, 0, 0x11],
            ack: 0,
            psn: [high, mid, low],
        };
        let mut packet = Vec::new();
        Headers::new(bth).emit_packet(payload, &mut packet);
        seal(v6, id, packet)
    }

    /// Appends the ICRC.
    pub(super) fn seal(v6: bool, id: u16, mut packet: Vec<u8>) -> Vec<u8> {
        use zerocopy::FromBytes;
        packet.extend([0; ICRC_LEN]);
        let datagram = udp(4791, &packet);
        let end = datagram.len() - ICRC_LEN;
        let (header, rest) = datagram.split_first_chunk::<8>().unwrap();
        let bth = Bth::ref_from_prefix(rest).unwrap().0;
        let mut icrc = if v6 {
            Icrc::ipv6(ipv6(17, &datagram)[..40].try_into().unwrap(), header, bth)
        } else {
            Icrc::ipv4(&ipv4(id, 0x4000, 17, &datagram)[..20], header, bth)
        };
        icrc.update(&datagram[20..end]);
        let at = packet.len() - ICRC_LEN;
        packet[at..].copy_from_slice(&icrc.finish());
        packet
    }

    /// The frame of a datagram to port 4791; over IPv4 with this Identification, and DF.
    pub(super) fn framed(v6: bool, id: u16, payload: &[u8]) -> Vec<u8> {
        let datagram = udp(4791, payload);
        if v6 {
            ethernet(0x86dd, &ipv6(17, &datagram))
        } else {
            ethernet(0x0800, &ipv4(id, 0x4000, 17, &datagram))
        }
    }

    #[test]
    fn a_frame_without_a_stream_is_ready_at_once() {
        let frame = framed(false, 7, &sealed(false, 7, 4, 1, b"abc"));
        let mut dissector = Dissector::new(Options::default());
        for number in 1..5 {
            dissector.handle_record(&record(number, frame.len(), &frame));
            let frame = dissector.poll_frame().unwrap();
            assert_eq!((frame.number, frame.roce.len()), (number, 1));
            assert!(dissector.poll_frame().is_none());
        }
    }

    #[test]
    fn frames_come_in_order_and_none_is_lost() {
        let mut options = Options { max_waiting: 3, ..Options::default() };
        for max_waiting in [0, 3, 1000] {
            options.max_waiting = max_waiting;
            let mut dissector = Dissector::new(options.clone());
            let mut numbers = Vec::new();
            for number in 1..=100 {
                // A stream whose start is missing, and that is not iWARP.
                let mut tcp = hex!("1c06 1c07 00000000 00000000 5010 ffff 0000 0000").to_vec();
                let seq = 1000 + 50 * number as u32;
                tcp[4..8].copy_from_slice(&seq.to_be_bytes());
                tcp.extend([0; 50]);
                let frame = ethernet(0x0800, &ipv4(number as u16, 0, 6, &tcp));
                dissector.handle_record(&record(number, frame.len(), &frame));
                assert!(dissector.waiting.len() <= max_waiting + 1);
                while let Some(frame) = dissector.poll_frame() {
                    numbers.push(frame.number);
                }
                assert!(dissector.waiting.len() <= max_waiting);
            }
            dissector.finish();
            while let Some(frame) = dissector.poll_frame() {
                numbers.push(frame.number);
            }
            assert_eq!(numbers, (1..=100).collect::<Vec<u64>>());
        }
    }

    #[test]
    fn what_waits_has_bounds() {
        // A stream that begins like an FPDU and never goes on; behind it datagrams.
        let mut tcp = hex!("1c06 1c07 00000001 00000000 5010 ffff 0000 0000").to_vec();
        tcp.extend(hex!("0012 4143 00000000"));
        let open = ethernet(0x0800, &ipv4(1, 0, 6, &tcp));
        let roce = framed(false, 7, &sealed(false, 7, 4, 1, b"abc"));
        let max_waiting_octets = 10 * size_of::<Roce>();
        let mut dissector = Dissector::new(Options { max_waiting_octets, ..Options::default() });
        dissector.handle_record(&record(1, open.len(), &open));
        for number in 2..100 {
            dissector.handle_record(&record(number, roce.len(), &roce));
            assert!(dissector.found <= max_waiting_octets + size_of::<Roce>());
            let out = core::iter::from_fn(|| dissector.poll_frame()).count();
            assert_eq!(out > 0, number >= 12);
        }
        assert_eq!(dissector.found, 0);
    }

    proptest::proptest! {
        #[test]
        fn any_bytes(
            frames in proptest::collection::vec(
                (proptest::collection::vec(proptest::prelude::any::<u8>(), 0..200), 0usize..300),
                1..20),
        ) {
            let frames: Vec<_> = frames.iter().map(|(frame, captured)| (&frame[..], *captured)).collect();
            let out = dissect_all(&frames);
            proptest::prop_assert_eq!(out.len(), frames.len());
        }

        #[test]
        fn any_bytes_behind_good_headers(
            payload in proptest::collection::vec(proptest::prelude::any::<u8>(), 0..300),
            protocol in proptest::sample::select(
                vec![0u8, 1, 4, 6, 17, 41, 43, 44, 47, 50, 51, 58, 59, 60, 135, 137, 143]),
            flags in proptest::prelude::any::<u16>(),
            port in proptest::sample::select(vec![4789u16, 4791, 6081, 8472]),
            captured in 0usize..400,
        ) {
            let datagram = udp(port, &payload);
            for frame in [
                ethernet(0x0800, &ipv4(7, 0, protocol, &payload)),
                ethernet(0x0800, &ipv4(7, flags, protocol, &payload)),
                ethernet(0x86dd, &ipv6(protocol, &payload)),
                ethernet(0x0800, &ipv4(7, 0, 17, &datagram)),
                ethernet(0x86dd, &ipv6(17, &datagram)),
                ethernet(0x8915, &payload),
            ] {
                dissect(&frame);
                dissect_cut(&frame, captured);
            }
        }
    }
}
