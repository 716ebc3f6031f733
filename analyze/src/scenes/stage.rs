//! Two hosts that send what they are told to, and a capture of it.

use std::net::{IpAddr, Ipv4Addr};

use zerocopy::{Immutable, IntoBytes};

use userdma_proto::wire::{
    ids::{Msn, PKey, Psn, QKey, Qpn, RKey, Stag},
    iwarp::{ddp, fpdu, mpa, rdmap, terminate},
    mad::{self, cm},
    roce::{
        Headers,
        aeth::{Aeth, NakCode, Syndrome},
        atomic::{AtomicAckEth, AtomicEth},
        bth::Bth,
        deth::Deth,
        icrc,
        opcode::Opcode,
        reth::Reth,
    },
};

/// The two hosts: A asks for the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    A,
    B,
}
pub(super) use Side::{A, B};

impl Side {
    fn index(self) -> usize {
        usize::from(self == B)
    }

    fn other(self) -> Self {
        if self == A { B } else { A }
    }
}

const HOSTS: [Ipv4Addr; 2] = [Ipv4Addr::new(10, 0, 0, 1), Ipv4Addr::new(10, 0, 0, 2)];
pub(super) const QPS: [Qpn; 2] = [Qpn(0x11), Qpn(0x22)];
/// The first PSNs of what A and B ask.
pub(super) const PSNS: [u32; 2] = [1000, 5000];
pub(super) const MTU: usize = 1024;
const PORTS: [u16; 2] = [40_000, 7174];

/// Fields that a packet may have otherwise.
#[derive(Debug, Clone, Copy)]
pub(super) struct Odd {
    pub(super) qp: Option<Qpn>,
    pub(super) pkey: u32,
    pub(super) migreq: bool,
    pub(super) pad: Option<u8>,
    pub(super) tos: u8,
    pub(super) ident: Option<u16>,
    /// Octets of the IP packet that are changed behind the ICRC: where, and by what exclusive or.
    pub(super) flip: Option<(usize, u8)>,
    pub(super) pcp: Option<u8>,
    pub(super) cut: Option<usize>,
    pub(super) mad: bool,
}

impl Odd {
    pub(super) const NONE: Self = Self {
        qp: None,
        pkey: 0xffff,
        migreq: false,
        pad: None,
        tos: 0,
        ident: None,
        flip: None,
        pcp: None,
        cut: None,
        mad: false,
    };
}

/// A capture in the making.
#[derive(Debug, Clone)]
pub struct Capture {
    /// Time in nanoseconds, octets on the wire, octets captured.
    records: Vec<(u64, usize, Vec<u8>)>,
    now: u64,
    idents: [u16; 2],
    /// TCP's next sequence numbers.
    seqs: [u32; 2],
    pub(super) window: u16,
    pub(super) odd: Odd,
}

impl Default for Capture {
    fn default() -> Self {
        Self {
            records: Vec::new(),
            now: 1_700_000_000_000_000_000,
            idents: [100, 7000],
            seqs: [10_000, 90_000],
            window: 500,
            odd: Odd::NONE,
        }
    }
}

impl Capture {
    /// As a file: pcap with nanoseconds, Ethernet.
    pub fn pcap(&self) -> Vec<u8> {
        let mut out = Vec::new();
        for word in [0xa1b2_3c4d_u32, 0x0004_0002, 0, 0, 1 << 18, 1] {
            out.extend(word.to_le_bytes());
        }
        for (time, len, octets) in &self.records {
            let (seconds, rest) = (time / 1_000_000_000, time % 1_000_000_000);
            for word in [seconds as u32, rest as u32, octets.len() as u32, *len as u32] {
                out.extend(word.to_le_bytes());
            }
            out.extend(octets);
        }
        out
    }

    /// Frames so far.
    pub(super) fn frames(&self) -> u64 {
        self.records.len() as u64
    }

    /// Lets time pass.
    pub(super) fn after_us(&mut self, us: u64) -> &mut Self {
        self.now += us * 1000;
        self
    }

    /// Packets of a side that never arrive.
    pub(super) fn lose(&mut self, from: Side, count: u16) -> &mut Self {
        self.idents[from.index()] += count;
        self
    }

    /// What follows has these fields otherwise.
    pub(super) fn with(&mut self, change: impl FnOnce(&mut Odd)) -> &mut Self {
        change(&mut self.odd);
        self
    }

    pub(super) fn plain(&mut self) -> &mut Self {
        self.odd = Odd::NONE;
        self
    }

    /// Frame `number`, from 1 on, once more as it was.
    pub(super) fn copy(&mut self, number: u64) -> &mut Self {
        let (_, len, octets) = self.records[number as usize - 1].clone();
        self.now += 5_000;
        self.records.push((self.now, len, octets));
        self
    }

    /// Frames `a` and `b`, from 1 on, arrive in each other's place.
    pub(super) fn swap(&mut self, a: u64, b: u64) -> &mut Self {
        let (a, b) = (a as usize - 1, b as usize - 1);
        let times = (self.records[a].0, self.records[b].0);
        self.records.swap(a, b);
        (self.records[a].0, self.records[b].0) = times;
        self
    }

    fn frame(&mut self, ethertype: u16, payload: &[u8]) {
        let mut octets = vec![0x52, 0x54, 0, 0, 0, 2, 0x52, 0x54, 0, 0, 0, 1];
        if let Some(pcp) = self.odd.pcp {
            octets.extend([0x81, 0, pcp << 5, 7]);
        }
        octets.extend(ethertype.to_be_bytes());
        octets.extend(payload);
        let len = octets.len();
        if let Some(cut) = self.odd.cut {
            octets.truncate(cut);
        }
        self.records.push((self.now, len, octets));
        self.now += 10_000;
    }

    /// A pause frame: PFC of these priorities.
    pub(super) fn pause(&mut self, priorities: u8, quanta: u16) -> &mut Self {
        let mut payload = vec![0x01, 0x01, 0, priorities];
        for _ in 0..8 {
            payload.extend(quanta.to_be_bytes());
        }
        payload.resize(46, 0);
        self.frame(0x8808, &payload);
        self
    }

    fn ip(&mut self, from: Side, protocol: u8, payload: &[u8]) -> Vec<u8> {
        let ident = match self.odd.ident {
            Some(ident) => ident,
            None => {
                let ident = &mut self.idents[from.index()];
                *ident += 1;
                *ident
            }
        };
        let len = (20 + payload.len()) as u16;
        let mut packet = vec![0x45, self.odd.tos];
        packet.extend(len.to_be_bytes());
        packet.extend(ident.to_be_bytes());
        packet.extend([0x40, 0, 64, protocol, 0, 0]);
        packet.extend(HOSTS[from.index()].octets());
        packet.extend(HOSTS[from.other().index()].octets());
        let mut sum: u32 =
            packet.chunks(2).map(|pair| u32::from(u16::from_be_bytes([pair[0], pair[1]]))).sum();
        sum = (sum & 0xffff) + (sum >> 16);
        sum = (sum & 0xffff) + (sum >> 16);
        packet[10..12].copy_from_slice(&(!(sum as u16)).to_be_bytes());
        packet.extend(payload);
        packet
    }

    // ------------------------------------------------------------------------------------ RoCE

    /// A RoCE packet.
    pub(super) fn roce(
        &mut self,
        from: Side,
        opcode: Opcode,
        psn: u32,
        payload: usize,
        more: impl FnOnce(&mut Headers),
    ) -> &mut Self {
        let filled: Vec<u8> = (0..payload).map(|i| (i as u32 * 7 + psn) as u8).collect();
        self.packet(from, opcode, psn, &filled, more)
    }

    fn packet(
        &mut self,
        from: Side,
        opcode: Opcode,
        psn: u32,
        payload: &[u8],
        more: impl FnOnce(&mut Headers),
    ) -> &mut Self {
        let qp = if self.odd.mad { Qpn(1) } else { QPS[from.other().index()] };
        let qp = self.odd.qp.unwrap_or(qp);
        let bth =
            Bth::new(opcode, PKey(self.odd.pkey), qp, Psn::new(psn)).with_migreq(self.odd.migreq);
        let mut headers = Headers::new(bth);
        more(&mut headers);
        let mut octets = Vec::new();
        headers.emit_packet(payload, &mut octets);
        if let Some(pad) = self.odd.pad {
            // PadCnt says so; the pad itself is left out.
            octets[1] = octets[1] & !0x30 | pad << 4;
            octets.truncate(octets.len() - payload.len().next_multiple_of(4) + payload.len());
        }
        octets.extend([0; 4]);
        let mut udp = Vec::from(49_200_u16.to_be_bytes());
        udp.extend(4791_u16.to_be_bytes());
        udp.extend((8 + octets.len() as u16).to_be_bytes());
        udp.extend([0, 0]);
        udp.extend(octets);
        let mut packet = self.ip(from, 17, &udp);
        let sum = icrc::compute(&packet).expect("it is a RoCE packet");
        let at = packet.len() - 4;
        packet[at..].copy_from_slice(&sum);
        if let Some((at, by)) = self.odd.flip {
            packet[at] ^= by;
        }
        self.frame(0x0800, &packet);
        self
    }

    /// A SEND of one packet, with AckReq.
    pub(super) fn send(&mut self, from: Side, psn: u32, len: usize) -> &mut Self {
        self.roce(from, Opcode::RC_SEND_ONLY, psn, len, |headers| {
            headers.bth = headers.bth.with_ack_req(true);
        })
    }

    /// A SEND of several packets of a whole path MTU: from `psn` on; the last has AckReq.
    pub(super) fn sends(&mut self, from: Side, psn: u32, packets: u32) -> &mut Self {
        for n in 0..packets {
            self.part(from, psn, packets, n);
        }
        self
    }

    /// Packet `n` of such a SEND.
    pub(super) fn part(&mut self, from: Side, psn: u32, packets: u32, n: u32) -> &mut Self {
        let last = n + 1 == packets;
        let opcode = match n {
            0 => Opcode::RC_SEND_FIRST,
            _ if last => Opcode::RC_SEND_LAST,
            _ => Opcode::RC_SEND_MIDDLE,
        };
        self.roce(from, opcode, psn + n, MTU, |headers| {
            headers.bth = headers.bth.with_ack_req(last);
        })
    }

    /// A WRITE of one packet.
    pub(super) fn write(&mut self, from: Side, psn: u32, len: usize, told: u32) -> &mut Self {
        self.roce(from, Opcode::RC_WRITE_ONLY, psn, len, |headers| {
            headers.bth = headers.bth.with_ack_req(true);
            headers.reth = Some(Reth::new(0x1000, RKey(0x55), told));
        })
    }

    /// A READ request of so many octets.
    pub(super) fn read(&mut self, from: Side, psn: u32, len: u32) -> &mut Self {
        self.roce(from, Opcode::RC_READ_REQUEST, psn, 0, |headers| {
            headers.bth = headers.bth.with_ack_req(true);
            headers.reth = Some(Reth::new(0x1000, RKey(0x55), len));
        })
    }

    /// Its answer, of so many whole packets but for `without`.
    pub(super) fn responses(
        &mut self,
        from: Side,
        psn: u32,
        packets: u32,
        without: Option<u32>,
    ) -> &mut Self {
        for n in 0..packets {
            let opcode = match n {
                0 if packets == 1 => Opcode::RC_READ_RESP_ONLY,
                0 => Opcode::RC_READ_RESP_FIRST,
                _ if n + 1 == packets => Opcode::RC_READ_RESP_LAST,
                _ => Opcode::RC_READ_RESP_MIDDLE,
            };
            if without == Some(n) {
                self.lose(from, 1);
                continue;
            }
            self.roce(from, opcode, psn + n, MTU, |headers| {
                headers.aeth = Some(Aeth::new(Syndrome::ACK, 1));
            });
        }
        self
    }

    /// A fetch-and-add.
    pub(super) fn fetch_add(&mut self, from: Side, psn: u32) -> &mut Self {
        self.roce(from, Opcode::RC_FETCH_ADD, psn, 0, |headers| {
            headers.bth = headers.bth.with_ack_req(true);
            headers.atomic_eth = Some(AtomicEth::new(0x1000, RKey(0x55), 1, 0));
        })
    }

    /// Its answer.
    pub(super) fn atomic_ack(&mut self, from: Side, psn: u32) -> &mut Self {
        self.roce(from, Opcode::RC_ATOMIC_ACK, psn, 0, |headers| {
            headers.aeth = Some(Aeth::new(Syndrome::ACK, 1));
            headers.atomic_ack_eth = Some(AtomicAckEth::new(7));
        })
    }

    fn aeth(&mut self, from: Side, psn: u32, syndrome: Syndrome, msn: u32) -> &mut Self {
        self.roce(from, Opcode::RC_ACK, psn, 0, |headers| {
            headers.aeth = Some(Aeth::new(syndrome, msn));
        })
    }

    pub(super) fn ack(&mut self, from: Side, psn: u32) -> &mut Self {
        self.aeth(from, psn, Syndrome::ACK, psn % 1000 + 1)
    }

    pub(super) fn nak(&mut self, from: Side, psn: u32, code: NakCode) -> &mut Self {
        self.aeth(from, psn, Syndrome::Nak(code), psn % 1000)
    }

    /// An RNR NAK with timer 14 (1 ms), which says that so many messages are done.
    pub(super) fn rnr(&mut self, from: Side, psn: u32, msn: u32) -> &mut Self {
        self.aeth(from, psn, Syndrome::RnrNak(14), msn)
    }

    /// A CNP toward the other side's queue pair.
    pub(super) fn cnp(&mut self, from: Side) -> &mut Self {
        let filled = [0; 16];
        self.packet(from, Opcode::CNP, 0, &filled, |headers| {
            headers.bth = headers.bth.with_becn(true);
        })
    }

    // ------------------------------------------------------------------- the connection manager

    /// A message of the connection manager.
    pub(super) fn cm(&mut self, from: Side, tid: u64, message: &cm::Message<'_>) -> &mut Self {
        let mut octets = [0; mad::MAD_LEN];
        message.emit_mad(tid, mad::METHOD_SEND, &mut octets);
        let before = self.odd;
        self.odd.mad = true;
        self.packet(from, Opcode::UD_SEND_ONLY, 1, &octets, |headers| {
            headers.deth = Some(Deth::new(QKey(0x8001_0000), Qpn(1)));
        });
        self.odd = before;
        self
    }

    /// REQ, with what `change` makes of it.
    pub(super) fn req(&mut self, change: impl FnOnce(&mut cm::Req<'_>)) -> &mut Self {
        let mut req = cm::Req {
            local_comm_id: 0xa,
            service_id: 0x0106_1c06,
            qpn: QPS[0],
            responder_resources: 4,
            initiator_depth: 4,
            remote_cm_timeout: 16,
            local_cm_timeout: 16,
            start_psn: Psn::new(PSNS[1]),
            retry_count: 3,
            pkey: PKey(0xffff),
            mtu: 3,
            rnr_retry_count: 2,
            ..Default::default()
        };
        req.primary.ack_timeout = 14;
        change(&mut req);
        self.cm(A, 0x50, &req.into())
    }

    pub(super) fn rep(&mut self) -> &mut Self {
        let rep = cm::Rep {
            local_comm_id: 0xb,
            remote_comm_id: 0xa,
            qpn: QPS[1],
            start_psn: Psn::new(PSNS[0]),
            responder_resources: 2,
            initiator_depth: 2,
            rnr_retry_count: 2,
            ..Default::default()
        };
        self.cm(B, 0x50, &rep.into())
    }

    pub(super) fn rtu(&mut self) -> &mut Self {
        let rtu = cm::Rtu { local_comm_id: 0xa, remote_comm_id: 0xb, ..Default::default() };
        self.cm(A, 0x50, &rtu.into())
    }

    pub(super) fn dreq(&mut self, from: Side, tid: u64) -> &mut Self {
        let (local, remote) = if from == A { (0xa, 0xb) } else { (0xb, 0xa) };
        let dreq = cm::Dreq {
            local_comm_id: local,
            remote_comm_id: remote,
            remote_qpn: QPS[from.other().index()],
            ..Default::default()
        };
        self.cm(from, tid, &dreq.into())
    }

    pub(super) fn drep(&mut self, from: Side, tid: u64) -> &mut Self {
        let (local, remote) = if from == A { (0xa, 0xb) } else { (0xb, 0xa) };
        let drep = cm::Drep { local_comm_id: local, remote_comm_id: remote, ..Default::default() };
        self.cm(from, tid, &drep.into())
    }

    /// REQ, REP, RTU.
    pub(super) fn connect(&mut self) -> &mut Self {
        self.req(|_| {}).rep().rtu().after_us(100)
    }

    /// DREQ, DREP.
    pub(super) fn disconnect(&mut self) -> &mut Self {
        self.dreq(A, 0x51).drep(B, 0x51)
    }

    // ----------------------------------------------------------------------------------- iWARP

    /// A TCP segment; without payload, SYN or FIN it takes no sequence numbers.
    pub(super) fn tcp(&mut self, from: Side, flags: u8, payload: &[u8]) -> &mut Self {
        let seq = self.seqs[from.index()];
        self.tcp_at(from, seq, flags, payload);
        let taken = payload.len() as u32 + u32::from(flags & 3 != 0);
        self.seqs[from.index()] = seq.wrapping_add(taken);
        self
    }

    /// The same with a sequence number of its own.
    pub(super) fn tcp_at(&mut self, from: Side, seq: u32, flags: u8, payload: &[u8]) -> &mut Self {
        let other = from.other().index();
        let mut segment = Vec::from(PORTS[from.index()].to_be_bytes());
        segment.extend(PORTS[other].to_be_bytes());
        segment.extend(seq.to_be_bytes());
        let ack = if flags & 0x10 != 0 { self.seqs[other] } else { 0 };
        segment.extend(ack.to_be_bytes());
        segment.extend([0x50, flags]);
        segment.extend(self.window.to_be_bytes());
        segment.extend([0; 4]);
        segment.extend(payload);
        let packet = self.ip(from, 6, &segment);
        self.frame(0x0800, &packet);
        self
    }

    /// The next sequence number of a side.
    pub(super) fn seq(&self, from: Side) -> u32 {
        self.seqs[from.index()]
    }

    /// Octets of the stream that never arrive, in one segment.
    pub(super) fn lose_octets(&mut self, from: Side, count: u32) -> &mut Self {
        self.seqs[from.index()] += count;
        self.lose(from, 1)
    }

    pub(super) fn handshake(&mut self) -> &mut Self {
        self.tcp(A, 0x02, &[]).tcp(B, 0x12, &[]).tcp(A, 0x10, &[])
    }

    /// A start-up frame: `(flags, revision, queue depths, private data)`.
    pub(super) fn start(
        &mut self,
        from: Side,
        flags: mpa::StartFlags,
        revision: u8,
        enhanced: Option<mpa::Enhanced>,
        private: &[u8],
    ) -> &mut Self {
        let kind = if from == A { mpa::StartKind::Request } else { mpa::StartKind::Reply };
        let mut flags = flags;
        flags.set(mpa::StartFlags::ENHANCED, enhanced.is_some());
        let start = mpa::Start { kind, flags, revision, enhanced, private_data: private };
        let mut octets = Vec::new();
        start.emit(&mut octets);
        self.tcp(from, 0x18, &octets)
    }

    /// TCP and MPA: revision 2, CRC, depths of 2.
    pub(super) fn stream(&mut self) -> &mut Self {
        let depths = mpa::Enhanced { ird: 2, ord: 2, ..Default::default() };
        self.handshake()
            .start(A, mpa::StartFlags::CRC, 2, Some(depths), b"")
            .start(B, mpa::StartFlags::CRC, 2, Some(depths), b"")
            .after_us(100)
    }

    /// An FPDU with its CRC.
    pub(super) fn fpdu(header: &[u8], payload: &[u8]) -> Vec<u8> {
        let mut octets = Vec::new();
        let start = fpdu::begin(&mut octets);
        octets.extend(header);
        octets.extend(payload);
        fpdu::finish(&mut octets, start, true);
        octets
    }

    /// An untagged segment.
    pub(super) fn untagged(
        op: rdmap::Opcode,
        last: bool,
        qn: u32,
        msn: u32,
        mo: u32,
        payload: &[u8],
    ) -> Vec<u8> {
        let header = ddp::UntaggedHeader::new(op, last, qn, Msn(msn), mo, Stag(0));
        Self::fpdu(&octets_of(&header), payload)
    }

    /// A SEND of one segment.
    pub(super) fn message(&mut self, from: Side, msn: u32, payload: &[u8]) -> &mut Self {
        let octets = Self::untagged(rdmap::Opcode::SEND, true, 0, msn, 0, payload);
        self.tcp(from, 0x18, &octets)
    }

    /// A TERMINATE.
    pub(super) fn terminate(
        &mut self,
        from: Side,
        code: terminate::TermCode,
        swapped: bool,
    ) -> &mut Self {
        let header = ddp::UntaggedHeader::new(rdmap::Opcode::SEND, true, 0, Msn(1), 0, Stag(0));
        let mut payload = Vec::new();
        terminate::Terminate::new(code).with_segment(28, &octets_of(&header)).emit(&mut payload);
        if swapped {
            // As siw has it: halves swapped, M, D and R in the low bits.
            payload[0] = payload[0].rotate_left(4);
            payload[2] = payload[2].reverse_bits();
        }
        let octets = Self::untagged(rdmap::Opcode::TERMINATE, true, 2, 1, 0, &payload);
        self.tcp(from, 0x18, &octets)
    }

    /// FIN of both.
    pub(super) fn close(&mut self) -> &mut Self {
        self.tcp(A, 0x11, &[]).tcp(B, 0x11, &[]).tcp(A, 0x10, &[])
    }

    /// Both addresses.
    pub fn hosts() -> [IpAddr; 2] {
        HOSTS.map(Into::into)
    }
}

/// A header's octets.
pub(super) fn octets_of(header: &(impl IntoBytes + Immutable)) -> Vec<u8> {
    header.as_bytes().to_vec()
}
