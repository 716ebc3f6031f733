//! What UC and UD do otherwise than RC: nothing is acknowledged, what is lost is lost
//! (IBTA vol. 1, 9.8).

use zerocopy::IntoBytes;

use super::{
    Qp, Reason, Received,
    responder::{Refusal, scatter},
};
use crate::{
    mem::Memory,
    verbs::{Access, Imm, UdDest, Wc, WcOpcode, WcStatus},
    wire::{
        ids::Gid,
        ip::{IPV4_LEN, Ipv4, UDP, UDP_LEN},
        roce::{
            aeth::NakCode,
            deth::Deth,
            grh::Grh,
            opcode::{Info, Operation},
        },
    },
};

/// A Q_Key with this bit stands for the queue pair's own.
const PRIVILEGED: u32 = 1 << 31;

/// Octets in front of what a datagram carries.
const GRH_LEN: u32 = Grh::LEN as u32;

impl Qp {
    /// Takes a packet of a UC queue pair. Where one is missing the message it belongs to is given
    /// up, and what is left of it dropped (IBTA vol. 1, 9.8.2.2).
    pub(super) fn handle_uc<M: Memory + ?Sized>(
        &mut self,
        received: &Received<'_>,
        info: &Info,
        mem: &M,
    ) {
        let packet = received.packet;
        let psn = packet.headers.bth.psn();
        let in_order = psn == self.rx.expected;
        if !in_order {
            self.stats.out_of_order += 1;
        }
        self.rx.expected = psn.next();
        if !in_order || info.place.begins() {
            // The message in hand lost its end.
            self.give_up_message();
        }
        if packet.check_form().is_err() {
            self.stats.malformed += 1;
            self.give_up_message();
            return;
        }
        if !info.place.begins() && self.rx.message.is_none() {
            return;
        }
        let taken = match info.operation {
            Operation::Send => self.take_send(received, info, mem),
            _ => self.take_write(received, info, mem),
        };
        match taken {
            Ok(()) => {}
            Err(Refusal::NotReady) => {
                self.stats.no_receive += 1;
                self.give_up_message();
            }
            Err(Refusal::Nak(_)) if self.rx.receive_is_bad() => {
                self.enter_error(Reason::Receive);
            }
            Err(Refusal::Nak(NakCode::REMOTE_ACCESS)) => {
                self.stats.access_errors += 1;
                self.give_up_message();
            }
            Err(Refusal::Nak(_)) => {
                self.stats.malformed += 1;
                self.give_up_message();
            }
        }
    }

    /// Its receive takes the next message.
    fn give_up_message(&mut self) {
        self.rx.message = None;
        self.rx.forgive_receive();
    }

    /// What a datagram to `dest` carries of Q_Key and sender.
    pub(super) fn deth(&self, dest: &UdDest) -> Deth {
        let own = dest.qkey.0 & PRIVILEGED != 0;
        Deth::new(if own { self.attr.qkey } else { dest.qkey }, self.config.scope.qpn)
    }

    /// Takes a datagram.
    pub(super) fn handle_ud<M: Memory + ?Sized>(&mut self, received: &Received<'_>, mem: &M) {
        let packet = received.packet;
        let Some(deth) = packet.headers.deth else {
            self.stats.malformed += 1;
            return;
        };
        // IBTA vol. 1, 9.8.3.1: one that carries another Q_Key is dropped.
        let fits = packet.payload_len <= self.attr.path_mtu.octets() as usize;
        if packet.check_form().is_err() || deth.qkey() != self.attr.qkey || !fits {
            self.stats.malformed += 1;
            return;
        }
        let len = GRH_LEN + packet.payload_len as u32;
        let current = self.rx.receives.current();
        if current.is_none_or(|receive| receive.len < len) {
            self.stats.no_receive += 1;
            return;
        }
        let Some(receive) = self.rx.receives.finish() else {
            return;
        };
        let scope = self.config.scope;
        let sges = &receive.wr.sges;
        let writable = |&sge| mem.check_local(scope, sge, Access::LOCAL_WRITE).is_ok();
        let placed = sges.iter().all(writable)
            && scatter(mem, scope, sges, 0, &self.grh(received)).is_ok()
            && scatter(mem, scope, sges, GRH_LEN, packet.payload).is_ok();
        if !placed {
            let status = WcStatus::LOC_PROT_ERR;
            self.complete_receive(&receive, Wc { status, opcode: WcOpcode::RECV, ..Wc::default() });
            self.enter_error(Reason::Receive);
            return;
        }
        self.stats.payload_received += packet.payload_len as u64;
        let wc = Wc {
            opcode: WcOpcode::RECV,
            byte_len: len,
            imm: packet.headers.immdt.map(|imm| Imm::from_u32(imm.data())),
            solicited: packet.headers.bth.solicited(),
            src_qp: Some(deth.src_qp()),
            ..Wc::default()
        };
        self.complete_receive(&receive, wc);
    }

    /// The 40 octets in front of a datagram: the IP header that brought it, one of IPv4 in the last
    /// 20, as Linux has it. What a UDP socket does not tell is zero (Identification, flags, time to
    /// live, DSCP, flow label); the checksum of an IPv4 header is that of these octets.
    fn grh(&self, received: &Received<'_>) -> [u8; Grh::LEN] {
        let (from, to) = (received.from.ip().to_canonical(), self.attr.local.ip());
        let len = UDP_LEN + received.len;
        if let (core::net::IpAddr::V4(from), core::net::IpAddr::V4(to)) = (from, to) {
            let header = Ipv4 {
                tos: received.ecn & 3,
                ttl: 0,
                identification: 0,
                dont_fragment: false,
                src: from,
                dst: to,
                udp_len: len,
            };
            let mut area = [0; Grh::LEN];
            area[Grh::LEN - IPV4_LEN..].copy_from_slice(&header.octets());
            return area;
        }
        let mut grh = Grh::new(Gid::from(from), Gid::from(to), len as u16)
            .with_hop_limit(0)
            .with_traffic_class(received.ecn & 3);
        grh.next_header = UDP;
        let mut area = [0; Grh::LEN];
        area.copy_from_slice(grh.as_bytes());
        area
    }
}
