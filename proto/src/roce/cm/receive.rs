//! What peers say.

use alloc::{boxed::Box, vec::Vec};
use core::net::SocketAddr;

use super::{
    Cm, ConnId, Ended, Event, Rejected, Request, Token, Transport,
    connection::{Conn, State, Terms, ack_timeout},
    manager::{Listener, mad},
    types::mtu_code,
};
use crate::{
    time::Instant,
    wire::mad::{
        CLASS_CM, MAD_LEN, METHOD_SEND, Mad, MadHeader,
        cm::{
            self, Apr, CLASS_VERSION, Drep, Dreq, IpCm, Lap, Message, Mra, PortSpace, Reason, Rej,
            Rep, Req, Rtu, SidrRep, SidrReq,
        },
    },
};

/// The most that the path MTU can be.
const LARGEST_MTU: u16 = 4096;
/// `status` of an APR: alternate paths are not supported.
const NO_ALTERNATE_PATHS: u8 = 2;

/// Where a message came from and where its answer goes.
#[derive(Debug, Clone, Copy)]
struct Sender {
    /// Its address, with the UDP port that answers go to where nothing else is known.
    to: SocketAddr,
    tid: u64,
}

impl Cm {
    /// A MAD came for QP 1 from `from`, whose port does not count: 256 octets.
    pub fn handle_mad(&mut self, now: Instant, from: SocketAddr, mad: &[u8]) {
        let Some((header, message)) = read(mad) else {
            self.stats.malformed += 1;
            return;
        };
        self.stats.received += 1;
        let mut to = from;
        to.set_port(self.config.peer_udp_port);
        if let SocketAddr::V6(to) = &mut to {
            to.set_flowinfo(0);
        }
        let sender = Sender { to, tid: header.tid() };
        match message {
            Message::Req(req) => self.handle_req(now, sender, &req),
            Message::Mra(mra) => self.handle_mra(now, sender, &mra),
            Message::Rej(rej) => self.handle_rej(now, sender, &rej),
            Message::Rep(rep) => self.handle_rep(now, sender, &rep),
            Message::Rtu(rtu) => self.handle_rtu(sender, &rtu),
            Message::Dreq(dreq) => self.handle_dreq(now, sender, &dreq),
            Message::Drep(drep) => self.handle_drep(now, sender, &drep),
            Message::SidrReq(req) => self.handle_sidr_req(sender, &req),
            Message::SidrRep(rep) => self.handle_sidr_rep(now, sender, &rep),
            Message::Lap(lap) => self.handle_lap(sender, &lap),
            // We ask for no alternate path.
            Message::Apr(_) => self.stats.stray += 1,
        }
    }

    // Passive.

    fn handle_req(&mut self, now: Instant, sender: Sender, req: &Req<'_>) {
        let (ip, data) = match PortSpace::of_service_id(req.service_id) {
            None => (None, req.private_data),
            Some(_) => match IpCm::parse(req.private_data) {
                Some((ip, data)) => (Some(ip), data),
                None => {
                    self.stats.unacceptable += 1;
                    return self.reject_req(sender, req, Reason::UNSUPPORTED, &[]);
                }
            },
        };
        let (token, data) = Token::split(data);
        let mut peer = sender.to;
        if let Some(token) = token {
            peer.set_port(token.udp_port);
        }
        // Answers go to the peer's own port from here on.
        let sender = Sender { to: peer, ..sender };
        let key = (peer.ip().to_canonical(), req.local_comm_id, peer.port());
        if let Some(&id) = self.index.remote.get(&key) {
            let Some(conn) = self.conns.get(&id) else { return };
            if conn.passive && conn.tid == sender.tid && conn.remote_qpn == req.qpn {
                return self.handle_duplicate_req(now, id);
            }
            // The peer gives its IDs out again: what had this one is over.
            if self.displace(now, id) {
                return self.reject_req(sender, req, Reason::STALE_CONNECTION, &[]);
            }
        }
        let transport = match req.transport {
            Req::RC => Transport::Rc,
            Req::UC => Transport::Uc,
            _ => {
                self.stats.unacceptable += 1;
                return self.reject_req(sender, req, Reason::INVALID_TRANSPORT_TYPE, &[]);
            }
        };
        let Some(mtu) = cm::mtu(req.mtu) else {
            self.stats.unacceptable += 1;
            let largest = mtu_code(LARGEST_MTU);
            return self.reject_req(sender, req, Reason::INVALID_MTU, largest.as_slice());
        };
        let Some(Listener::Connections { .. }) = self.listeners.get(&req.service_id) else {
            self.stats.no_listener += 1;
            return self.reject_req(sender, req, Reason::INVALID_SERVICE_ID, &[]);
        };
        // IBTA vol. 1, 12.9: a connection to that queue pair is forgotten by the peer.
        let key = (peer.ip().to_canonical(), peer.port(), req.qpn);
        if let Some(&id) = self.index.remote_qpn.get(&key)
            && self.displace(now, id)
        {
            return self.reject_req(sender, req, Reason::STALE_CONNECTION, &[]);
        }
        if self.events.len() >= self.config.max_queued {
            self.stats.crowded += 1;
            return;
        }
        self.crowd_out(req.service_id);
        if self.make_room().is_err() {
            self.stats.crowded += 1;
            return self.reject_req(sender, req, Reason::NO_RESOURCES, &[]);
        }
        let (local_id, _, _) = self.new_ids();
        let terms = Terms {
            transport,
            mtu,
            send_psn: req.start_psn,
            // The program says it when it accepts.
            expect_psn: req.start_psn,
            initiator_depth: 0,
            responder_resources: 0,
            peer_resources: req.responder_resources,
            ack_timeout: req.primary.ack_timeout,
            retry_count: req.retry_count,
            rnr_retry_count: req.rnr_retry_count,
            flow_label: req.primary.flow_label,
            traffic_class: req.primary.traffic_class,
            flow_control: req.flow_control,
            own_token: None,
            peer_token: token,
        };
        let state = State::Requested { mra: false };
        let blank = self.new_conn(now, state, peer, local_id, sender.tid);
        let conn = Conn {
            passive: true,
            service_id: req.service_id,
            remote_id: Some(req.local_comm_id),
            remote_qpn: req.qpn,
            terms: Some(Box::new(terms)),
            retries: self.config.max_retries.min(req.max_cm_retries),
            longest: blank.longest.min(cm::timeout(req.local_cm_timeout)),
            ..blank
        };
        let id = self.insert(conn);
        self.index_peer(id);
        // Half of the time that the initiator waits for us; then it is told to wait longer.
        let (least, most) = (self.config.resend_after, cm::timeout(self.config.response_timeout));
        let patience = (cm::timeout(req.remote_cm_timeout) / 2).clamp(least.min(most), most);
        self.enter(id, state, Some(now + patience));
        self.events.push_back(Event::Request(Request {
            conn: id,
            service_id: req.service_id,
            peer,
            ip,
            path: req.primary,
            transport,
            qpn: req.qpn,
            start_psn: req.start_psn,
            responder_resources: req.responder_resources,
            initiator_depth: req.initiator_depth,
            mtu,
            retry_count: req.retry_count,
            rnr_retry_count: req.rnr_retry_count,
            pkey: req.pkey,
            srq: req.srq,
            flow_control: req.flow_control,
            token,
            private_data: data.into(),
        }));
    }

    fn handle_duplicate_req(&mut self, now: Instant, id: ConnId) {
        self.stats.duplicates += 1;
        let Some(conn) = self.conns.get(&id) else { return };
        match conn.state {
            State::Requested { .. } => self.send_mra(now, id),
            // The REP, or the REJ, once more.
            State::RepSent | State::Refused => {
                if let Some(mad) = &conn.mad {
                    self.outbox.push(conn.peer, **mad);
                }
            }
            // We gave it up before the peer had our REP.
            State::DreqSent | State::TimeWait if !conn.established => {
                let rej = Rej {
                    local_comm_id: conn.local_id,
                    remote_comm_id: conn.remote_id.unwrap_or(0),
                    message: Rej::REQ,
                    reason: Reason::CONSUMER,
                    ..Rej::default()
                };
                self.outbox.message(conn.peer, conn.tid, rej);
            }
            // It is late.
            State::Established
            | State::DreqSent
            | State::TimeWait
            | State::ReqSent
            | State::SidrSent => {}
        }
    }

    /// Something newer has the queue pair, or the ID, of this connection. True: it was open; it
    /// will be closed, and the newcomer has to wait. False: it is gone.
    fn displace(&mut self, now: Instant, id: ConnId) -> bool {
        let Some(conn) = self.conns.get(&id) else { return false };
        self.stats.stale += 1;
        match conn.state {
            State::Established => {
                self.send_dreq(now, id, Ended::Stale);
                true
            }
            State::DreqSent => true,
            // Active: by now its peer has forgotten it.
            State::ReqSent | State::SidrSent => true,
            State::Requested { .. } | State::RepSent => {
                // A REJ would reach the newcomer, if it has the same ID.
                self.drop_half_open(id, None);
                false
            }
            State::Refused | State::TimeWait => {
                self.remove(id);
                false
            }
        }
    }

    /// Makes room for one more request, at its listener and among all that are half open.
    fn crowd_out(&mut self, service_id: u64) {
        let full = match self.listeners.get(&service_id) {
            Some(Listener::Connections { backlog, waiting }) if waiting.len() >= *backlog => {
                waiting.first().copied()
            }
            Some(Listener::Connections { .. } | Listener::Datagrams(_)) | None => None,
        };
        let most = self.config.max_half_open.max(1);
        let oldest = || {
            let full = self.index.half_open.len() >= most;
            self.index.half_open.first().copied().filter(|_| full)
        };
        if let Some(id) = full.or_else(oldest) {
            self.stats.crowded += 1;
            self.drop_half_open(id, Some(Reason::NO_RESOURCES));
        }
    }

    /// Rejects a request of which nothing is kept.
    fn reject_req(&mut self, sender: Sender, req: &Req<'_>, reason: Reason, info: &[u8]) {
        let rej = Rej {
            remote_comm_id: req.local_comm_id,
            message: Rej::REQ,
            info_len: info.len() as u8,
            reason,
            ari: info,
            ..Rej::default()
        };
        self.outbox.message(sender.to, sender.tid, rej);
    }

    fn handle_rtu(&mut self, sender: Sender, rtu: &Rtu<'_>) {
        let message = Message::Rtu(*rtu);
        let Some(id) = self.known(sender, &message) else { return };
        match self.conns[&id].state {
            State::RepSent => self.establish(id, &[]),
            State::Established | State::DreqSent | State::TimeWait => self.stats.duplicates += 1,
            State::ReqSent | State::SidrSent | State::Requested { .. } | State::Refused => {
                self.stats.stray += 1;
            }
        }
    }

    // Active.

    fn handle_rep(&mut self, now: Instant, sender: Sender, rep: &Rep<'_>) {
        let Some(&id) = self.index.comm_id.get(&rep.remote_comm_id) else {
            return self.answer_unknown(sender, &Message::Rep(*rep));
        };
        let conn = &self.conns[&id];
        if !conn.is_from(sender.to.ip()) {
            self.stats.wrong_source += 1;
            return;
        }
        match conn.state {
            State::ReqSent => self.handle_first_rep(now, sender, id, rep),
            // Our RTU was lost.
            State::Established if !conn.passive && conn.remote_id == Some(rep.local_comm_id) => {
                self.stats.duplicates += 1;
                let rtu = rtu(conn, rep);
                self.outbox.message(conn.peer, conn.tid, rtu);
            }
            // It learns from our DREQ.
            State::DreqSent if conn.remote_id == Some(rep.local_comm_id) => {
                self.stats.duplicates += 1;
            }
            State::Established
            | State::DreqSent
            | State::TimeWait
            | State::Refused
            | State::SidrSent
            | State::Requested { .. }
            | State::RepSent => self.answer_unknown(sender, &Message::Rep(*rep)),
        }
    }

    fn handle_first_rep(&mut self, now: Instant, sender: Sender, id: ConnId, rep: &Rep<'_>) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        let Some(terms) = &mut conn.terms else { return };
        let offered = terms.own_token.is_some();
        let (token, data) =
            if offered { Token::split(rep.private_data) } else { (None, rep.private_data) };
        if let Some(token) = token {
            conn.peer.set_port(token.udp_port);
        }
        terms.peer_token = token;
        terms.send_psn = rep.start_psn;
        terms.peer_resources = rep.responder_resources;
        terms.rnr_retry_count = rep.rnr_retry_count;
        terms.ack_timeout = ack_timeout(terms.ack_timeout, rep.target_ack_delay);
        terms.flow_control = rep.flow_control;
        let (ip, port) = (conn.peer.ip().to_canonical(), conn.peer.port());
        let by_id = self.index.remote.get(&(ip, rep.local_comm_id, port)).copied();
        let by_qpn = self.index.remote_qpn.get(&(ip, port, rep.qpn)).copied();
        for (other, reason) in
            [(by_id, Reason::DUPLICATE_COMM_ID), (by_qpn, Reason::STALE_CONNECTION)]
        {
            let Some(other) = other else { continue };
            if !self.displace(now, other) {
                continue;
            }
            let rej = Rej { reason, ..rej_of_rep(&self.conns[&id], rep) };
            self.outbox.message(sender.to, sender.tid, rej);
            let (info, private_data) = (Vec::new(), Vec::new());
            let over = Rejected { conn: id, reason, info, private_data };
            return self.end(now, id, Event::Rejected(over));
        }
        let Some(conn) = self.conns.get_mut(&id) else { return };
        conn.remote_id = Some(rep.local_comm_id);
        conn.remote_qpn = rep.qpn;
        let rtu = rtu(conn, rep);
        self.outbox.message(conn.peer, conn.tid, rtu);
        self.index_peer(id);
        self.establish(id, data);
    }

    // Either side.

    fn handle_mra(&mut self, now: Instant, sender: Sender, mra: &Mra<'_>) {
        let Some(&id) = self.index.comm_id.get(&mra.remote_comm_id) else {
            self.stats.stray += 1;
            return;
        };
        let conn = &self.conns[&id];
        if !conn.is_from(sender.to.ip()) {
            self.stats.wrong_source += 1;
            return;
        }
        let state = conn.state;
        let meant = match state {
            State::ReqSent => mra.message == Mra::REQ,
            State::RepSent => mra.message == Mra::REP && conn.remote_id == Some(mra.local_comm_id),
            State::SidrSent
            | State::Requested { .. }
            | State::Established
            | State::DreqSent
            | State::Refused
            | State::TimeWait => false,
        };
        if !meant {
            self.stats.stray += 1;
            return;
        }
        // Its program needs that long, and the answer its time on the way.
        let until = now + cm::timeout(mra.service_timeout) + conn.longest;
        let until = until.min(conn.patience);
        if conn.deadline.is_some_and(|at| at < until) {
            self.enter(id, state, Some(until));
        }
    }

    fn handle_rej(&mut self, now: Instant, sender: Sender, rej: &Rej<'_>) {
        let Some(id) = self.rejected(sender, rej) else {
            self.stats.stray += 1;
            return;
        };
        let conn = &self.conns[&id];
        if !conn.is_from(sender.to.ip()) {
            self.stats.wrong_source += 1;
            return;
        }
        // Who does not know the connection says 0.
        let theirs = rej.local_comm_id == 0 || conn.remote_id == Some(rej.local_comm_id);
        match conn.state {
            State::ReqSent => {
                if !self.ask_again(now, id, rej) {
                    self.end(now, id, Event::Rejected(rejection(id, rej)));
                }
            }
            State::Requested { .. } | State::RepSent if theirs => {
                self.end(now, id, Event::Rejected(rejection(id, rej)));
            }
            State::Established if theirs && rej.message != Rej::REQ => {
                let ended = Ended::Rejected(rej.reason);
                self.end(now, id, Event::Disconnected { conn: id, ended });
            }
            State::DreqSent if theirs => {
                let ended = conn.ended;
                self.end(now, id, Event::Disconnected { conn: id, ended });
            }
            State::Requested { .. }
            | State::RepSent
            | State::Established
            | State::DreqSent
            | State::Refused
            | State::TimeWait
            | State::SidrSent => self.stats.stray += 1,
        }
    }

    /// Which connection a REJ means. An initiator that gave up does not know our name for it.
    fn rejected(&self, sender: Sender, rej: &Rej<'_>) -> Option<ConnId> {
        if let Some(&id) = self.index.comm_id.get(&rej.remote_comm_id) {
            return Some(id);
        }
        if rej.remote_comm_id != 0 || rej.reason != Reason::TIMEOUT {
            return None;
        }
        let (ip, theirs) = (sender.to.ip().to_canonical(), rej.local_comm_id);
        let mut found = self.index.remote.range((ip, theirs, 0)..=(ip, theirs, u16::MAX));
        found.find(|(_, id)| self.conns[*id].tid == sender.tid).map(|(_, &id)| id)
    }

    /// Active: asks once more, under another name, where the peer names a smaller path MTU.
    fn ask_again(&mut self, now: Instant, id: ConnId, rej: &Rej<'_>) -> bool {
        let largest = match rej.additional_info() {
            [code, ..] if rej.reason == Reason::INVALID_MTU => cm::mtu(*code),
            _ => None,
        };
        let Some(conn) = self.conns.get_mut(&id) else { return false };
        let (Some(largest), Some(terms), Some(kept)) = (largest, &mut conn.terms, &mut conn.mad)
        else {
            return false;
        };
        let Some((_, Message::Req(req))) = read(&kept[..]) else { return false };
        if conn.mtu_lowered || largest >= terms.mtu {
            return false;
        }
        terms.mtu = largest;
        conn.mtu_lowered = true;
        conn.sends = 0;
        self.index.comm_id.remove(&conn.local_id);
        conn.local_id = self.ids.comm_id();
        conn.tid = self.ids.word();
        self.index.comm_id.insert(conn.local_id, id);
        let mtu = mtu_code(largest).unwrap_or(req.mtu);
        let again = mad(conn.tid, Req { local_comm_id: conn.local_id, mtu, ..req });
        **kept = again;
        self.send_kept(now, id, State::ReqSent);
        true
    }

    fn handle_dreq(&mut self, now: Instant, sender: Sender, dreq: &Dreq<'_>) {
        let message = Message::Dreq(*dreq);
        let Some(id) = self.known(sender, &message) else { return };
        let conn = &self.conns[&id];
        if conn.local_qpn != dreq.remote_qpn {
            self.stats.stray += 1;
            return;
        }
        let drep = Drep {
            local_comm_id: conn.local_id,
            remote_comm_id: dreq.local_comm_id,
            ..Drep::default()
        };
        self.outbox.message(conn.peer, sender.tid, drep);
        let ended = match conn.state {
            // It could not ask without our REP: the RTU was lost, or comes late.
            State::RepSent => {
                self.establish(id, &[]);
                Ended::Peer
            }
            State::Established => Ended::Peer,
            // Both at once.
            State::DreqSent => conn.ended,
            State::TimeWait | State::Refused => {
                self.stats.duplicates += 1;
                return;
            }
            State::ReqSent | State::SidrSent | State::Requested { .. } => {
                self.stats.stray += 1;
                return;
            }
        };
        self.end(now, id, Event::Disconnected { conn: id, ended });
    }

    fn handle_drep(&mut self, now: Instant, sender: Sender, drep: &Drep<'_>) {
        let message = Message::Drep(*drep);
        let Some(id) = self.known(sender, &message) else { return };
        let conn = &self.conns[&id];
        match conn.state {
            State::DreqSent => {
                let ended = conn.ended;
                self.end(now, id, Event::Disconnected { conn: id, ended });
            }
            State::TimeWait => self.stats.duplicates += 1,
            State::ReqSent
            | State::SidrSent
            | State::Requested { .. }
            | State::RepSent
            | State::Established
            | State::Refused => self.stats.stray += 1,
        }
    }

    fn handle_lap(&mut self, sender: Sender, lap: &Lap<'_>) {
        let message = Message::Lap(*lap);
        let Some(id) = self.known(sender, &message) else { return };
        let conn = &self.conns[&id];
        match conn.state {
            State::Established => {
                let apr = Apr {
                    local_comm_id: conn.local_id,
                    remote_comm_id: lap.local_comm_id,
                    status: NO_ALTERNATE_PATHS,
                    ..Apr::default()
                };
                self.outbox.message(conn.peer, sender.tid, apr);
            }
            State::ReqSent
            | State::SidrSent
            | State::Requested { .. }
            | State::RepSent
            | State::DreqSent
            | State::Refused
            | State::TimeWait => self.stats.stray += 1,
        }
    }

    /// The connection of a message with both names in it. Where there is none its sender is told,
    /// if the message is one that wants an answer.
    fn known(&mut self, sender: Sender, message: &Message<'_>) -> Option<ConnId> {
        let ours = message.remote_comm_id()?;
        let found = self.index.comm_id.get(&ours).copied();
        let theirs = message.local_comm_id();
        let Some(id) = found.filter(|id| self.conns[id].remote_id == theirs) else {
            self.answer_unknown(sender, message);
            return None;
        };
        if !self.conns[&id].is_from(sender.to.ip()) {
            self.stats.wrong_source += 1;
            return None;
        }
        Some(id)
    }

    /// Answers a message for a connection that there is not: a DREQ has what it wants, others get
    /// REJ 6 (IBTA vol. 1, 12.9).
    fn answer_unknown(&mut self, sender: Sender, message: &Message<'_>) {
        self.stats.stray += 1;
        if let Message::Dreq(dreq) = message {
            let drep = Drep {
                local_comm_id: dreq.remote_comm_id,
                remote_comm_id: dreq.local_comm_id,
                ..Drep::default()
            };
            self.outbox.message(sender.to, sender.tid, drep);
        } else if let Some(rej) = Rej::answer(message, 0, Reason::INVALID_COMM_ID) {
            self.outbox.message(sender.to, sender.tid, rej);
        }
    }

    // UD services.

    fn handle_sidr_req(&mut self, sender: Sender, req: &SidrReq<'_>) {
        let (ip, data) = match PortSpace::of_service_id(req.service_id) {
            None => (None, req.private_data),
            Some(_) => match IpCm::parse(req.private_data) {
                Some((ip, data)) => (Some(ip), data),
                None => {
                    self.stats.unacceptable += 1;
                    return self.sidr_answer(sender, req, SidrRep::REJECTED);
                }
            },
        };
        let (token, data) = Token::split(data);
        let mut peer = sender.to;
        if let Some(token) = token {
            peer.set_port(token.udp_port);
        }
        let sender = Sender { to: peer, ..sender };
        let Some(Listener::Datagrams(service)) = self.listeners.get(&req.service_id) else {
            self.stats.no_listener += 1;
            return self.sidr_answer(sender, req, SidrRep::UNSUPPORTED);
        };
        // Without the event the service would not know how to answer that peer's packets.
        if self.events.len() >= self.config.max_queued {
            self.stats.crowded += 1;
            return;
        }
        let rep = SidrRep {
            request_id: req.request_id,
            status: SidrRep::VALID,
            qpn: service.qpn,
            service_id: req.service_id,
            qkey: service.qkey,
            private_data: &service.private_data,
            ..SidrRep::default()
        };
        self.outbox.message(sender.to, sender.tid, rep);
        let service_id = req.service_id;
        self.events.push_back(Event::Queried {
            service_id,
            peer,
            ip,
            token,
            private_data: data.into(),
        });
    }

    fn sidr_answer(&mut self, sender: Sender, req: &SidrReq<'_>, status: u8) {
        let (request_id, service_id) = (req.request_id, req.service_id);
        let rep = SidrRep { request_id, status, service_id, ..SidrRep::default() };
        self.outbox.message(sender.to, sender.tid, rep);
    }

    fn handle_sidr_rep(&mut self, now: Instant, sender: Sender, rep: &SidrRep<'_>) {
        let asked = self.index.comm_id.get(&rep.request_id).copied();
        let Some(id) = asked.filter(|id| self.conns[id].state == State::SidrSent) else {
            self.stats.stray += 1;
            return;
        };
        let conn = &self.conns[&id];
        if !conn.is_from(sender.to.ip()) {
            self.stats.wrong_source += 1;
            return;
        }
        let event = match rep.status {
            SidrRep::VALID => Event::Resolved {
                conn: id,
                peer: conn.peer,
                qpn: rep.qpn,
                qkey: rep.qkey,
                private_data: rep.private_data.into(),
            },
            status => Event::Unresolved { conn: id, status },
        };
        self.end(now, id, event);
    }
}

/// The message of a MAD of ours: class and version, method Send, 256 octets.
fn read(octets: &[u8]) -> Option<(&MadHeader, Message<'_>)> {
    let mad = Mad::parse(octets.get(..MAD_LEN)?).ok()?;
    let header = mad.header;
    let good = header.base_version == MadHeader::BASE_VERSION
        && header.mgmt_class == CLASS_CM
        && header.class_version == CLASS_VERSION
        && header.method == METHOD_SEND;
    let message = mad.cm().ok()??;
    good.then_some((header, message))
}

fn rtu(conn: &Conn, rep: &Rep<'_>) -> Rtu<'static> {
    Rtu { local_comm_id: conn.local_id, remote_comm_id: rep.local_comm_id, ..Rtu::default() }
}

fn rej_of_rep(conn: &Conn, rep: &Rep<'_>) -> Rej<'static> {
    Rej {
        local_comm_id: conn.local_id,
        remote_comm_id: rep.local_comm_id,
        message: Rej::REP,
        ..Rej::default()
    }
}

fn rejection(conn: ConnId, rej: &Rej<'_>) -> Rejected {
    Rejected {
        conn,
        reason: rej.reason,
        info: rej.additional_info().into(),
        private_data: rej.private_data.into(),
    }
}
