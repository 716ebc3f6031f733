//! The other end of a RoCEv2 queue pair: packets that are nearly right, and a look at ours.

use std::{
    collections::VecDeque,
    net::{IpAddr, SocketAddr},
};

use userdma_proto::{
    roce::{Attributes, Train},
    verbs::{QpType, RemoteAddr, SendFlags, SendOp, SendWr, Sge, UdDest},
    wire::{
        ids::{PKey, Psn, QKey, Qpn, RKey},
        roce::{
            Headers, ICRC_LEN, Packet,
            aeth::{Aeth, NakCode, Syndrome},
            atomic::{AtomicAckEth, AtomicEth},
            bth::Bth,
            deth::Deth,
            feth::{Feth, Placement, Selectivity},
            icrc::{Icrc, Identification, PathV4, PathV6},
            ieth::Ieth,
            immdt::ImmDt,
            opcode::{Ext, Info, Opcode, Operation, Place, Transport},
            reth::Reth,
        },
    },
};

use crate::{Choices, memory::KEYS};

/// Unanswered requests that a peer remembers.
const MOST_ASKED: usize = 64;

/// What a queue pair asked for.
#[derive(Debug, Clone, Copy)]
struct Asked {
    psn: Psn,
    operation: Operation,
    /// Octets of a READ.
    len: u32,
}

/// What a peer knows of a queue pair.
#[derive(Debug, Default)]
pub(crate) struct Peer {
    /// PSN of its next request.
    psn: Psn,
    /// Octets left of the WRITE in hand.
    left: u32,
    asked: VecDeque<Asked>,
}

pub(crate) fn transport(kind: QpType) -> Transport {
    match kind {
        QpType::Rc => Transport::Rc,
        QpType::Uc => Transport::Uc,
        QpType::Ud => Transport::Ud,
    }
}

impl Peer {
    /// A peer whose first request has this PSN.
    pub(crate) fn new(psn: Psn) -> Self {
        Self { psn, ..Self::default() }
    }

    /// A packet of the queue pair arrives.
    pub(crate) fn see(&mut self, packet: &Packet<'_>) {
        let headers = &packet.headers;
        let Some(info) = headers.bth.opcode().info() else { return };
        if info.request {
            if self.asked.len() >= MOST_ASKED {
                self.asked.pop_front();
            }
            let len = headers.reth.map_or(0, |reth| reth.dma_len());
            let (psn, operation) = (headers.bth.psn(), info.operation);
            self.asked.push_back(Asked { psn, operation, len });
            return;
        }
        match headers.aeth.map(|aeth| aeth.syndrome()) {
            // From there on everything is to come again.
            Some(Syndrome::RnrNak(_) | Syndrome::Nak(NakCode::PSN_SEQUENCE)) => {
                self.psn = headers.bth.psn();
            }
            Some(Syndrome::Ack(_) | Syndrome::Nak(_) | Syndrome::Reserved(_)) | None => {}
        }
    }

    /// A request, without ICRC. One octet: which, of those of its type; from 0xf8 on the next
    /// octet is the opcode. One of the PSN (see [`distance`]), one of flags: bit 0 turns the
    /// AckReq that a last packet has, bit 1 Solicited, bit 2 the lowest bit of MigReq, bit 3 another
    /// partition, bit 4 another Q_Key. Then the headers, then the payload.
    pub(crate) fn request(
        &mut self,
        choices: &mut Choices<'_>,
        to: Qpn,
        kind: QpType,
        attr: &Attributes,
    ) -> Vec<u8> {
        let rows: Vec<&Info> = transport(kind).rows().filter(|info| info.request).collect();
        let opcode = match choices.any::<u8>() {
            0xf8.. => Opcode(choices.any()),
            which => rows[usize::from(which) % rows.len()].opcode,
        };
        let (ahead, flags) = (distance(choices), choices.any::<u8>());
        let psn = self.psn.add(ahead);
        let info = opcode.info();
        let (place, ext) = info.map_or((Place::Only, Ext::empty()), |info| (info.place, info.ext));
        let pkey = if flags & 8 == 0 { attr.pkey } else { PKey(attr.pkey.0 ^ 1) };
        let bth = Bth::new(opcode, pkey, to, psn)
            .with_ack_req(place.ends() == (flags & 1 == 0))
            .with_solicited(flags & 2 != 0)
            .with_migreq(flags & 4 == 0);
        let mut headers = Headers::new(bth);
        if ext.contains(Ext::DETH) {
            let qkey = if flags & 16 == 0 { attr.qkey } else { QKey(attr.qkey.0 ^ 1) };
            headers.deth = Some(Deth::new(qkey, Qpn(0x77)));
        }
        if ext.contains(Ext::FETH) {
            let (placement, selectivity) = flush(choices.any());
            headers.feth = Some(Feth::new(placement, selectivity));
        }
        let is_write = info.is_some_and(|info| info.operation == Operation::Write);
        let mut asked = 0;
        if ext.contains(Ext::RETH) {
            let (key, addr) = (key(choices), choices.address());
            asked = match (info.map(|info| info.operation), choices.any::<u16>()) {
                (Some(Operation::AtomicWrite), 0..0xff00) => 8,
                (_, 0xffff) => u32::MAX,
                (_, 0xff00..) => 1 << 31,
                (_, len) => u32::from(len) % 4200,
            };
            headers.reth = Some(Reth::new(addr, key, asked));
            if is_write {
                self.left = asked;
            }
        }
        if ext.contains(Ext::ATOMIC_ETH) {
            let (key, addr, swap) = (key(choices), choices.address(), choices.any::<u8>());
            let addr = if swap & 0x80 == 0 { addr & !7 } else { addr };
            // What the open region holds at first.
            let compare = u64::from_ne_bytes([1; 8]);
            headers.atomic_eth = Some(AtomicEth::new(addr, key, swap.into(), compare));
        }
        if ext.contains(Ext::IMMDT) {
            headers.immdt = Some(ImmDt::new(choices.any::<u8>().into()));
        }
        if ext.contains(Ext::IETH) {
            headers.ieth = Some(Ieth::new(key(choices)));
        }
        let mtu = attr.path_mtu.octets();
        let due = match info.map(|info| (info.operation, place)) {
            Some((Operation::Write, Place::Only | Place::Last)) => self.left.min(mtu),
            Some((Operation::Send | Operation::Write, Place::First | Place::Middle)) => mtu,
            Some((Operation::Send, _)) => 24.min(mtu),
            Some((Operation::AtomicWrite, _)) => 8,
            _ => 0,
        };
        let payload = payload(choices, due as usize);
        if is_write {
            self.left = self.left.saturating_sub(payload.len() as u32);
        }
        if ahead == 0 {
            let is_read = info.is_some_and(|info| info.operation == Operation::ReadRequest);
            let psns = if is_read { asked.div_ceil(mtu).max(1) } else { 1 };
            self.psn = psn.add(psns);
        }
        whole(&mut headers, &payload)
    }

    /// Answers to a request of ours, without ICRC. One octet: the oldest one, or from 0xc0 on any.
    /// One octet: below 0x80 what it asks for, of a READ's responses as many as the next octet says
    /// (0: all); then ACK with credits, RNR NAK, NAK, or any response opcode with a payload. Then
    /// one of the PSN.
    pub(crate) fn answer(
        &mut self,
        choices: &mut Choices<'_>,
        to: Qpn,
        attr: &Attributes,
    ) -> Vec<Vec<u8>> {
        let (which, how) = (choices.any::<u8>(), choices.any::<u8>());
        let index = match which {
            0..0xc0 => 0,
            _ => usize::from(which) % self.asked.len().max(1),
        };
        let asked = self.asked.get(index).copied();
        let asked = asked.unwrap_or(Asked { psn: attr.sq_psn, operation: Operation::Send, len: 0 });
        let packet = |opcode, psn, syndrome, payload: &[u8]| {
            let mut headers = Headers::new(Bth::new(opcode, attr.pkey, to, psn));
            headers.aeth = Some(Aeth::new(syndrome, 1));
            headers.atomic_ack_eth = Some(AtomicAckEth::new(0x55));
            whole(&mut headers, payload)
        };
        let nothing: &[u8] = &[];
        let (opcode, syndrome) = match how {
            0..0x80 => {
                let most = choices.any::<u8>();
                let psn = asked.psn.add(distance(choices));
                self.asked.drain(..(index + 1).min(self.asked.len()));
                return match asked.operation {
                    Operation::ReadRequest => {
                        let (len, mtu) = (asked.len as usize, attr.path_mtu.octets() as usize);
                        let packets = len.div_ceil(mtu).max(1);
                        let most = if most == 0 { packets } else { packets.min(most.into()) };
                        let data = vec![how; len.min(packets * mtu)];
                        (0..most)
                            .map(|n| {
                                let opcode = match (n == 0, n + 1 == packets) {
                                    (true, true) => Opcode::RC_READ_RESP_ONLY,
                                    (true, false) => Opcode::RC_READ_RESP_FIRST,
                                    (false, true) => Opcode::RC_READ_RESP_LAST,
                                    (false, false) => Opcode::RC_READ_RESP_MIDDLE,
                                };
                                let data = &data[n * mtu..len.min((n + 1) * mtu)];
                                packet(opcode, psn.add(n as u32), Syndrome::ACK, data)
                            })
                            .collect()
                    }
                    Operation::CmpSwap | Operation::FetchAdd => {
                        vec![packet(Opcode::RC_ATOMIC_ACK, psn, Syndrome::ACK, nothing)]
                    }
                    Operation::Flush | Operation::AtomicWrite => {
                        vec![packet(Opcode::RC_READ_RESP_ONLY, psn, Syndrome::ACK, nothing)]
                    }
                    _ => vec![packet(Opcode::RC_ACK, psn, Syndrome::ACK, nothing)],
                };
            }
            0x80..0xa0 => (Opcode::RC_ACK, Syndrome::Ack(how & 31)),
            0xa0..0xc0 => (Opcode::RC_ACK, Syndrome::RnrNak(how & 31)),
            0xc0..0xc8 => (Opcode::RC_ACK, Syndrome::Nak(NakCode(how & 7))),
            0xc8..0xd0 => (Opcode::RC_ACK, Syndrome::Nak(NakCode::PSN_SEQUENCE)),
            _ => (Opcode(0x0d + how % 6), Syndrome::from_octet(choices.any())),
        };
        let psn = asked.psn.add(distance(choices));
        let due = if opcode == Opcode::RC_ACK { 0 } else { attr.path_mtu.octets() as usize };
        vec![packet(opcode, psn, syndrome, &payload(choices, due))]
    }
}

/// How far a PSN is from the one that is due: mostly not at all, or a little, before or behind it,
/// or anything.
fn distance(choices: &mut Choices<'_>) -> u32 {
    match choices.any::<u8>() {
        0..0xc0 => 0,
        0xff => u32::from(choices.any::<u16>()) << 8,
        near => (u32::from(near)).wrapping_sub(0xd8) & 0xff_ffff,
    }
}

fn key(choices: &mut Choices<'_>) -> RKey {
    RKey(KEYS[usize::from(choices.any::<u8>()) % KEYS.len()])
}

/// Mostly one that there is.
fn flush(choice: u8) -> (Placement, Selectivity) {
    let placement = Placement::from_bits_retain(choice & 3 ^ 1);
    (placement, Selectivity(choice >> 2 & 3))
}

/// One octet: below 0x80 what is `due`; then so many octets less 0x80; 0xff: as the next two say.
fn payload(choices: &mut Choices<'_>, due: usize) -> Vec<u8> {
    let len = match choices.any::<u8>() {
        0..0x80 => due,
        0xff => usize::from(choices.any::<u16>()) % 5000,
        len => usize::from(len) - 0x80,
    };
    vec![0x5a; len]
}

/// A packet that has zeros where the ICRC goes.
fn whole(headers: &mut Headers, payload: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    headers.emit_packet(payload, &mut out);
    out.extend([0; ICRC_LEN]);
    out
}

/// One octet: from 0xe8 on an octet of the packet (two octets) is changed (one).
pub(crate) fn damage(choices: &mut Choices<'_>, octets: &mut [u8]) {
    if choices.any::<u8>() < 0xe8 || octets.is_empty() {
        return;
    }
    let at = usize::from(choices.any::<u16>()) % octets.len();
    octets[at] ^= choices.any::<u8>();
}

/// The ICRC of a packet whose octets but the last four are final. `id` counts over IPv4 only.
pub(crate) fn icrc(from: SocketAddr, to: SocketAddr, id: Identification, octets: &[u8]) -> [u8; 4] {
    let covered = &octets[..octets.len() - ICRC_LEN];
    let (headers, _) = Headers::parse(covered).expect("whole headers");
    let (len, bth) = (octets.len(), &headers.bth);
    let (src_port, dst_port) = (from.port(), to.port());
    let mut icrc = match (from.ip(), to.ip()) {
        (IpAddr::V4(src), IpAddr::V4(dst)) => {
            Icrc::socket_v4(&PathV4 { src, dst, src_port, dst_port }, id, len, bth)
        }
        (IpAddr::V6(src), IpAddr::V6(dst)) => {
            Icrc::socket_v6(&PathV6 { src, dst, src_port, dst_port }, len, bth)
        }
        ends => panic!("{ends:?} are of two families"),
    };
    icrc.update(&covered[Bth::LEN..]);
    icrc.finish()
}

/// The packets of a train of ours, which must be good: of one length but the last, whole, of the
/// form that their opcodes ask for, no longer than `mtu` allows, with the ICRC that the kernel's
/// headers will make good.
pub(crate) fn packets(train: &Train, mtu: u32) -> Vec<Vec<u8>> {
    let (from, to) = (train.local().expect("an end"), train.peer().expect("another"));
    let octets = train.octets();
    assert_eq!(octets.len(), train.len(), "the parts add up");
    let all: Vec<Vec<u8>> = octets.chunks(train.segment_len()).map(<[u8]>::to_vec).collect();
    assert_eq!(all.len(), train.packets());
    for (n, octets) in all.iter().enumerate() {
        let packet = Packet::parse(octets).unwrap_or_else(|e| panic!("{e}: {octets:02x?}"));
        packet.check_form().unwrap_or_else(|e| panic!("{e}: {packet:?}"));
        assert!(packet.payload_len <= mtu as usize, "{packet:?}");
        let id = Identification { identification: n as u16, dont_fragment: true };
        let expected = icrc(from, to, id, octets);
        assert_eq!(packet.icrc, Some(expected), "packet {n} of {}: {packet:?}", all.len());
    }
    all
}

/// A send, of which one octet says what: the lower four bits the operation, then inline, not
/// signalled, fenced, solicited. For a datagram `to` says where it goes.
pub(crate) fn send(choices: &mut Choices<'_>, id: u64, to: Option<UdDest>) -> SendWr {
    let (kind, addr): (u8, u64) = (choices.any(), choices.address());
    let remote = RemoteAddr::new(addr, RKey(7));
    let word = RemoteAddr { addr: addr & !7, ..remote };
    let op = match kind & 15 {
        0..=2 => SendOp::Send,
        3 => SendOp::SendInv(RKey(9)),
        4 => SendOp::SendImm(4),
        5 | 6 => SendOp::Write(remote),
        7 => SendOp::WriteImm(remote, 7),
        8..=10 => SendOp::Read(remote),
        11 => SendOp::AtomicWrite(word),
        12 => SendOp::FetchAdd { remote: word, add: 3, mask: 0 },
        13 => SendOp::CmpSwap {
            remote: word,
            compare: 1,
            swap: 2,
            compare_mask: u64::MAX,
            swap_mask: u64::MAX,
        },
        14 => {
            let (placement, selectivity) = flush(choices.any());
            SendOp::Flush { remote, len: 64, placement, selectivity }
        }
        _ => SendOp::LocalInv(key(choices)),
    };
    let wr = match (op, kind & 0x10) {
        (SendOp::Flush { .. } | SendOp::LocalInv(_), _) => SendWr::new(id, op, []),
        (SendOp::FetchAdd { .. } | SendOp::CmpSwap { .. }, _) => {
            SendWr::new(id, op, [Sge { length: 8, ..choices.sge() }])
        }
        (SendOp::AtomicWrite(_), _) => SendWr::inline(id, op, &[9; 8]),
        (_, 0) => SendWr::new(id, op, choices.sges()),
        _ => {
            let len: u8 = choices.any();
            SendWr::inline(id, op, choices.octets(len.into()))
        }
    };
    let mut wr = if kind & 0x20 == 0 { wr } else { wr.unsignaled() };
    wr.flags.set(SendFlags::FENCE, kind & 0x40 != 0);
    wr.flags.set(SendFlags::SOLICITED, kind & 0x80 != 0);
    wr.dest = to;
    wr
}
