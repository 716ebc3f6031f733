//! The connection manager's messages: who connects with whom, and what goes wrong with it.

use std::net::IpAddr;

use rustc_hash::FxHashMap;
use userdma_proto::wire::{
    ids::{Psn, Qpn},
    mad::{
        Mad,
        cm::{self, Message, Rej, Req},
    },
    roce::opcode::Transport,
};

use crate::{
    End, Findings, Kind, between,
    order::Order,
    rc::{Flows, Made, Packet},
    span,
};

/// What a connection allows one of its ends; `None`: not known.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Limits {
    /// READs and ATOMICs under way.
    pub(crate) outstanding: Option<u8>,
    pub(crate) rnr_retry: Option<u8>,
    pub(crate) retry: Option<u8>,
    /// Code: 4.096 us * 2^code.
    pub(crate) ack_timeout: Option<u8>,
    pub(crate) pkey: Option<u32>,
}

/// So long the rdma_cm waits for the answer to a SIDR request (time-out code 20).
const SIDR_NS: i128 = 4_294_967_296;

/// A message that was seen: attribute, whether of the active end, transaction.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Seen {
    attribute: u16,
    active: bool,
    tid: u64,
    frame: u64,
    time: Option<i128>,
}

/// A connection, from its REQ on.
#[derive(Debug)]
struct Connection {
    ends: [IpAddr; 2],
    qps: [Option<Qpn>; 2],
    service: u64,
    psns: [Psn; 2],
    mtu: Option<u32>,
    transport: Transport,
    limits: [Limits; 2],
    /// Depths of the REQ: what the active end wants outstanding, and what it takes.
    depths: (u8, u8),
    timeout_ns: i128,
    seen: Vec<Seen>,
    req: (u64, Option<i128>),
    rep: Option<(u64, Option<i128>)>,
    rtu: Option<u64>,
    early_told: bool,
    /// REQs that came again.
    repeats: u32,
    /// DREQs of both ends, until they are answered.
    dreqs: [Option<(u64, Option<i128>)>; 2],
    crossed: bool,
    answered: bool,
    over: bool,
}

/// A SIDR request that waits for its answer.
#[derive(Debug)]
struct Asked {
    frame: u64,
    time: Option<i128>,
    of: IpAddr,
    sent: u32,
}

/// All connections.
#[derive(Debug, Default)]
pub(crate) struct Cm {
    connections: Vec<Connection>,
    /// By an end's address and its name for the connection.
    by_id: FxHashMap<(IpAddr, u32), usize>,
    /// Established and without RTU, by the passive end's address and queue pair.
    awaited: FxHashMap<(IpAddr, u32), usize>,
    /// SIDR requests that wait for their answer.
    sidr: FxHashMap<(IpAddr, u32), Asked>,
}

impl Cm {
    pub(crate) fn mad(
        &mut self,
        octets: &[u8],
        packet: &Packet<'_>,
        order: Order,
        rc: &mut Flows,
        found: &mut Findings,
    ) {
        let Ok(mad) = Mad::parse(octets) else { return };
        let Ok(Some(message)) = mad.cm() else { return };
        let (src, dst) = (packet.ends.src, packet.ends.dst);
        let ends = (End::Host(src), End::Host(dst));
        let say = |kind, frames: &[u64], text: String, found: &mut Findings| {
            found.add(kind, frames.iter().copied(), packet.time, ends, text);
        };
        let tid = mad.header.tid.get();
        match &message {
            Message::SidrReq(req) => {
                let key = (src, req.request_id);
                let asked = Asked { frame: packet.frame, time: packet.time, of: dst, sent: 0 };
                let asked = self.sidr.entry(key).or_insert(asked);
                asked.sent += 1;
                if asked.sent > 1 {
                    let text = repeated("SIDR_REQ", asked.frame, asked.time, packet, order);
                    say(Kind::CmRepeated, &[packet.frame], text, found);
                }
                return;
            }
            Message::SidrRep(rep) => {
                self.sidr.remove(&(dst, rep.request_id));
                if rep.status != 0 {
                    let text = format!(
                        "SIDR_REP, status {}: the service was not found, or refuses",
                        rep.status
                    );
                    say(Kind::CmReject, &[packet.frame], text, found);
                }
                return;
            }
            _ => {}
        }
        let at = match &message {
            Message::Req(req) => {
                let known = self.by_id.get(&(src, req.local_comm_id)).copied();
                let same = known.filter(|&at| {
                    self.connections[at]
                        .seen
                        .iter()
                        .any(|seen| seen.attribute == cm::REQ && seen.tid == tid)
                });
                Some(same.unwrap_or_else(|| self.request(req, packet)))
            }
            other => {
                let by_local = other.local_comm_id().and_then(|id| self.by_id.get(&(src, id)));
                let by_remote = other.remote_comm_id().and_then(|id| self.by_id.get(&(dst, id)));
                by_local.or(by_remote).copied()
            }
        };
        let Some(at) = at else {
            if let Message::Dreq(dreq) = &message {
                let text = format!(
                    "DREQ for the connection {:#x}/{:#x}, which is not known from the capture",
                    dreq.local_comm_id, dreq.remote_comm_id
                );
                say(Kind::CmDreqStale, &[packet.frame], text, found);
            }
            return;
        };
        let connection = &mut self.connections[at];
        let active = src == connection.ends[0];
        let seen = Seen {
            attribute: message.attribute(),
            active,
            tid,
            frame: packet.frame,
            time: packet.time,
        };
        let before = connection.seen.iter().find(|old| {
            old.attribute == seen.attribute
                && old.active == active
                && (old.tid == tid || seen.attribute == cm::REQ)
        });
        if let Some(before) = before {
            connection.repeats += u32::from(seen.attribute == cm::REQ);
            let name = name(seen.attribute);
            let text = repeated(name, before.frame, before.time, packet, order);
            say(Kind::CmRepeated, &[packet.frame], text, found);
            return;
        }
        connection.seen.push(seen);
        match message {
            Message::Rep(rep) => {
                connection.rep = Some((packet.frame, packet.time));
                connection.answered = true;
                connection.qps[1] = Some(rep.qpn);
                // Each end names the first PSN that it wants to see.
                connection.psns[0] = rep.start_psn;
                let (wants, takes) = connection.depths;
                let [active, passive] = &mut connection.limits;
                active.outstanding = Some(wants.min(rep.responder_resources));
                passive.outstanding = Some(rep.initiator_depth.min(takes));
                active.rnr_retry = Some(rep.rnr_retry_count);
                self.by_id.insert((src, rep.local_comm_id), at);
                let connection = &self.connections[at];
                if let [Some(a), Some(b)] = connection.qps {
                    let made = Made {
                        ends: [(connection.ends[0], a), (connection.ends[1], b)],
                        psns: connection.psns,
                        mtu: connection.mtu,
                        transport: connection.transport,
                        limits: connection.limits,
                    };
                    rc.made(&made, packet.time, found);
                    self.awaited.insert((connection.ends[1], b.0), at);
                }
            }
            Message::Rtu(_) => {
                connection.rtu = Some(packet.frame);
                if let Some(qp) = connection.qps[1] {
                    self.awaited.remove(&(connection.ends[1], qp.0));
                }
                let late = connection.rep.and_then(|(_, time)| Some(packet.time? - time?));
                if late.is_some_and(|late| late > connection.timeout_ns) && !connection.early_told {
                    let text = format!(
                        "the RTU comes {} after the REP; the connection manager's time-out is {}",
                        span(late.unwrap_or_default()),
                        span(connection.timeout_ns)
                    );
                    say(Kind::CmRtuLate, &[packet.frame], text, found);
                }
            }
            Message::Rej(rej) => {
                connection.answered = true;
                connection.over = true;
                let req = connection.req;
                let text = rejected(&rej, req, packet);
                say(Kind::CmReject, &[packet.frame], text, found);
            }
            Message::Mra(mra) => {
                connection.answered = true;
                let of = mra.message_name().unwrap_or("message");
                let text = format!(
                    "MRA for the {of}: up to {} more",
                    span(timeout_ns(mra.service_timeout))
                );
                say(Kind::CmMra, &[packet.frame], text, found);
            }
            Message::Dreq(_) => {
                let side = usize::from(!active);
                if connection.over {
                    let text = "DREQ for a connection that is closed".to_owned();
                    say(Kind::CmDreqStale, &[packet.frame], text, found);
                    return;
                }
                connection.dreqs[side] = Some((packet.frame, packet.time));
                if let [Some(a), Some(b)] = connection.dreqs
                    && !connection.crossed
                {
                    connection.crossed = true;
                    let first = if a.0 < b.0 { a } else { b };
                    let text =
                        format!("both ends send a DREQ, {} apart", between(first.1, packet.time));
                    say(Kind::CmDreqCrossed, &[a.0, b.0], text, found);
                }
                if let [Some(a), Some(b)] = connection.qps {
                    let ends = [(connection.ends[0], a), (connection.ends[1], b)];
                    rc.closed(ends, found);
                }
            }
            Message::Drep(_) => {
                // Of crossing DREQs each is answered: only then it is over.
                let other = usize::from(active);
                connection.dreqs[other] = None;
                connection.over = connection.dreqs.iter().all(Option::is_none);
            }
            _ => {}
        }
    }

    /// A new REQ.
    fn request(&mut self, req: &Req<'_>, packet: &Packet<'_>) -> usize {
        let at = self.connections.len();
        let transport = if req.transport == Req::UC { Transport::Uc } else { Transport::Rc };
        let both = Limits {
            outstanding: None,
            rnr_retry: Some(req.rnr_retry_count),
            retry: Some(req.retry_count),
            ack_timeout: Some(req.primary.ack_timeout),
            pkey: Some(req.pkey.0),
        };
        self.connections.push(Connection {
            ends: [packet.ends.src, packet.ends.dst],
            qps: [Some(req.qpn), None],
            service: req.service_id,
            psns: [Psn::new(0), req.start_psn],
            mtu: cm::mtu(req.mtu).map(u32::from),
            transport,
            limits: [both; 2],
            depths: (req.initiator_depth, req.responder_resources),
            timeout_ns: timeout_ns(req.remote_cm_timeout).max(timeout_ns(req.local_cm_timeout)),
            seen: Vec::new(),
            req: (packet.frame, packet.time),
            rep: None,
            rtu: None,
            early_told: false,
            repeats: 0,
            dreqs: [None; 2],
            crossed: false,
            answered: false,
            over: false,
        });
        self.by_id.insert((packet.ends.src, req.local_comm_id), at);
        at
    }

    /// A request of RC: is it of an active end whose RTU has not come?
    pub(crate) fn data(&mut self, packet: &Packet<'_>, found: &mut Findings) {
        if self.awaited.is_empty() {
            return;
        }
        let key = (packet.ends.dst, packet.dest_qp().0);
        let Some(&at) = self.awaited.get(&key) else { return };
        let connection = &mut self.connections[at];
        if packet.ends.src != connection.ends[0] || connection.early_told {
            return;
        }
        connection.early_told = true;
        self.awaited.remove(&key);
        let rep = connection.rep.map_or(0, |(frame, _)| frame);
        let text = format!("data of the active end, and no RTU since the REP of frame {rep}");
        let ends = (End::Host(packet.ends.src), End::Qp(packet.ends.dst, packet.dest_qp()));
        found.add(Kind::CmRtuLate, [packet.frame], packet.time, ends, text);
    }

    pub(crate) fn finish(&mut self, last: Option<i128>, found: &mut Findings) {
        let waited = |time: Option<i128>| last.zip(time).map_or(0, |(last, time)| last - time);
        for connection in &self.connections {
            if connection.answered {
                continue;
            }
            let waited = waited(connection.req.1);
            if connection.repeats > 0 || waited > connection.timeout_ns {
                let text = format!(
                    "the REQ for service {:#x} was not answered in {}",
                    connection.service,
                    span(waited)
                );
                let ends = (End::Host(connection.ends[0]), End::Host(connection.ends[1]));
                found.add(Kind::CmTimeout, [connection.req.0], connection.req.1, ends, text);
            }
        }
        for (&(src, _), asked) in &self.sidr {
            let waited = waited(asked.time);
            if asked.sent > 1 || waited > SIDR_NS {
                let text = format!("the SIDR_REQ was not answered in {}", span(waited));
                let ends = (End::Host(src), End::Host(asked.of));
                found.add(Kind::CmTimeout, [asked.frame], asked.time, ends, text);
            }
        }
    }
}

fn timeout_ns(code: u8) -> i128 {
    i128::try_from(cm::timeout(code).as_nanos()).unwrap_or(i128::MAX)
}

fn name(attribute: u16) -> &'static str {
    match attribute {
        cm::REQ => "REQ",
        cm::MRA => "MRA",
        cm::REJ => "REJ",
        cm::REP => "REP",
        cm::RTU => "RTU",
        cm::DREQ => "DREQ",
        cm::DREP => "DREP",
        cm::LAP => "LAP",
        cm::APR => "APR",
        _ => "message",
    }
}

fn repeated(
    name: &str,
    frame: u64,
    time: Option<i128>,
    packet: &Packet<'_>,
    order: Order,
) -> String {
    let by = match order {
        Order::Copy(_) => "copied by the network (the same IPv4 Identification)",
        _ => "sent again by its sender",
    };
    format!("the {name} of frame {frame} comes again {} later, {by}", between(time, packet.time))
}

fn rejected(rej: &Rej<'_>, req: (u64, Option<i128>), packet: &Packet<'_>) -> String {
    let name = rej.reason.name().unwrap_or("a reason without a name");
    let text: String = rej
        .private_data
        .iter()
        .take_while(|octet| octet.is_ascii_graphic() || **octet == b' ')
        .map(|&octet| char::from(octet))
        .collect();
    let words =
        if text.len() >= 3 { format!(", with the private data {text:?}") } else { String::new() };
    format!(
        "the REQ of frame {} was rejected after {}: reason {}, {name}{words}",
        req.0,
        between(req.1, packet.time),
        rej.reason.0
    )
}
