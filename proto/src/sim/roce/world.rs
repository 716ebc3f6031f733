//! Both machines and the network between them, in virtual time.

use alloc::{
    collections::{BTreeSet, VecDeque},
    format,
    string::{String, ToString},
    vec::Vec,
};
use core::{iter, net::SocketAddr, time::Duration};

use zerocopy::FromBytes;

use super::{
    QKEY, Settings, WORKLOAD, WORLD, problem, qpn, refused,
    workload::{self, Plan},
};
use crate::{
    mem::PdId,
    roce::{Config, Event, Qp, QpAttr, Received, Train},
    sim::{Delivery, Network, Packet, PlainMemory, dice::Dice},
    time::Instant,
    verbs::{Access, PostError, QpState, QpType, RecvWr, SendWr, Wc},
    wire::{
        ids::Psn,
        roce::{
            self, ICRC_LEN,
            bth::Bth,
            icrc::{self, Icrc, Identification, PathV4, PathV6},
            opcode::Operation,
        },
    },
};

/// The protection domain of everything.
const PD: u32 = 1;

/// One queue pair with its memory and its program.
#[derive(Debug)]
pub(super) struct End {
    pub(super) qp: Qp,
    pub(super) mem: PlainMemory,
    pub(super) wcs: Vec<Wc>,
    pub(super) events: Vec<Event>,
    /// When it missed an acknowledgement.
    pub(super) timeouts: Vec<Instant>,
    /// What the peer was waiting for then.
    pub(super) awaited: Vec<Psn>,
    /// The first packet that was sent after the last time-out.
    pub(super) una: Option<Psn>,
    /// When it went to the error state.
    pub(super) died: Option<Instant>,
    seeks: bool,
    sends: VecDeque<SendWr>,
    receives: VecDeque<RecvWr>,
    /// When the program posts.
    wake: Option<Instant>,
    /// The send queue was full: the program posts as soon as it is not.
    blocked: bool,
}

/// Names the packets of one attempt: a queue pair's requests, or the answers to them, between two
/// of its time-outs.
///
/// ```text
///   63..57 56    55..48 47     46       45..24   23..0
///   0      asks  pair   side   answer   attempt  PSN
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Key(pub(super) u64);

impl Key {
    pub(super) const ATTEMPTS: u64 = 1 << 22;

    fn new(pair: usize, side: usize, answer: bool, attempt: usize, psn: Psn) -> Self {
        let attempt = (attempt as u64).min(Self::ATTEMPTS - 1);
        let who = (pair as u64) << 48 | (side as u64) << 47 | u64::from(answer) << 46;
        Self(who | attempt << 24 | u64::from(psn.get()))
    }

    /// Of a request that asks for an acknowledgement.
    fn asking(self, asks: bool) -> Self {
        Self(self.0 | u64::from(asks) << 56)
    }

    pub(super) fn asks(self) -> bool {
        self.0 >> 56 & 1 != 0
    }

    /// Whether it is an answer, not a request.
    pub(super) fn is_answer(self) -> bool {
        self.0 >> 46 & 1 != 0
    }

    /// Whether it is of the exchange that this queue pair began.
    pub(super) fn is_of(self, pair: usize, side: usize) -> bool {
        self.0 >> 47 & 0x1ff == (2 * pair + side) as u64
    }

    pub(super) fn attempt(self) -> usize {
        (self.0 >> 24 & (Self::ATTEMPTS - 1)) as usize
    }

    pub(super) fn psn(self) -> Psn {
        Psn::new(self.0 as u32)
    }
}

/// What a packet carries along.
#[derive(Debug, Clone, Copy)]
pub(super) struct Meta {
    /// The how manyth of all packets.
    number: u64,
    key: Key,
    print: u64,
}

/// Which packets of one queue pair came in order.
#[derive(Debug, Default)]
struct Order {
    /// Sent, and not yet come.
    missing: BTreeSet<u64>,
    newest: u64,
}

impl Order {
    /// Whether a packet comes for the first time, and behind a later one.
    fn is_late(&mut self, number: u64) -> bool {
        let first = self.missing.remove(&number);
        self.newest = self.newest.max(number);
        first && number < self.newest
    }
}

#[derive(Debug)]
pub(super) struct World {
    ends: Vec<[End; 2]>,
    plans: Vec<[Plan; 2]>,
    sockets: [SocketAddr; 2],
    pub(super) network: Network<Meta>,
    /// What came of the packets that each queue pair sent.
    orders: Vec<[Order; 2]>,
    /// Packets that came behind one that was sent later.
    pub(super) overtaken: Vec<Key>,
    sent: u64,
    now: Instant,
    /// When something happened last.
    pub(super) last: Instant,
    pub(super) bad_icrc: u64,
    pub(super) steps: u64,
    limit: u64,
    dice: Dice,
    slow: bool,
    fingerprints: bool,
    train: Train,
}

impl World {
    pub(super) fn new(s: &Settings) -> Result<Self, String> {
        let mut dice = Dice::new(s.seed, WORKLOAD);
        let plans: Vec<[Plan; 2]> = (0..s.pairs)
            .map(|pair| [0, 1].map(|side| Plan::new(&mut dice, s, pair, side)))
            .collect();
        let packets: u64 = plans.iter().flatten().map(|plan| plan.packets).sum();
        let mut network = Network::new(s.impairments);
        if s.record {
            network.record("userdma sim");
        }
        let mut world = Self {
            ends: Vec::new(),
            plans,
            sockets: s.ends(),
            network,
            orders: iter::repeat_with(Default::default).take(s.pairs).collect(),
            overtaken: Vec::new(),
            sent: 0,
            now: Instant::ZERO,
            last: Instant::ZERO,
            bad_icrc: 0,
            steps: 0,
            limit: 10_000 + 500 * packets,
            dice: Dice::new(s.seed, WORLD),
            slow: s.slow,
            fingerprints: s.impairments.corrupt.is_some(),
            train: Train::default(),
        };
        for pair in 0..s.pairs {
            let dice = &mut world.dice;
            let psns = [0, 1].map(|_| match dice.one_in(2) {
                // The numbers wrap soon.
                true => Psn::new(0xff_ffff - dice.below(100) as u32),
                false => Psn::new(dice.draw() as u32),
            });
            let depths = [0, 1].map(|_| 1 + dice.below(6) as u8);
            let [a, b] = [0, 1].map(|side| world.end(s, pair, side, psns, depths));
            world.ends.push([a?, b?]);
        }
        Ok(world)
    }

    fn end(
        &mut self,
        s: &Settings,
        pair: usize,
        side: usize,
        psns: [Psn; 2],
        depths: [u8; 2],
    ) -> Result<End, String> {
        let dice = &mut self.dice;
        let (own, other) = (&self.plans[pair][side], &self.plans[pair][1 - side]);
        let mut config = Config::new(s.kind, PdId(PD), qpn(pair, side));
        config.max_send_wr = 1 + dice.below(s.operations.max(1) as u64) as usize;
        config.max_recv_wr = other.receives.len().max(1);
        config.ack_every = 1 + dice.below(64) as u32;
        config.max_train = 1 + dice.below(128) as usize;
        config.credits = dice.one_in(2);
        config.ecn = dice.one_in(2);
        let mut qp = Qp::new(config.keeping(s.window));
        qp.set_window(s.window);
        let connected = s.kind != QpType::Ud;
        let steps = [
            QpAttr { qkey: Some(QKEY), ..QpAttr::to(QpState::Init) },
            QpAttr {
                local: Some(self.sockets[side]),
                peer: connected.then_some(self.sockets[1 - side]),
                dest_qp: connected.then_some(qpn(pair, 1 - side)),
                path_mtu: Some(s.mtu),
                rq_psn: Some(psns[1 - side]),
                max_dest_rd_atomic: Some(depths[1 - side]),
                min_rnr_timer: Some(1 + dice.below(8) as u8),
                ..QpAttr::to(QpState::Rtr)
            },
            QpAttr {
                sq_psn: Some(psns[side]),
                max_rd_atomic: Some(depths[side]),
                timeout: Some(s.timeout()),
                retry_cnt: Some(s.retry_cnt),
                out_of_order: Some(s.out_of_order),
                ..QpAttr::to(QpState::Rts)
            },
        ];
        for attr in &steps {
            qp.modify(attr).map_err(|error| refused(pair, side, "its attributes", &error))?;
        }
        let mem = PlainMemory::default();
        let peers = Access::REMOTE_READ
            | Access::REMOTE_WRITE
            | Access::REMOTE_ATOMIC
            | Access::FLUSH_GLOBAL;
        mem.add(workload::TARGET, PD, peers, workload::TARGET_IOVA, other.before.clone());
        mem.add(workload::SOURCE, PD, Access::empty(), 0, own.source.clone());
        let empty = |len| iter::repeat_n(0, len).collect();
        mem.add(workload::SINK, PD, Access::LOCAL_WRITE, 0, empty(own.sink.len()));
        mem.add(workload::INBOX, PD, Access::LOCAL_WRITE, 0, empty(other.inbox.len()));
        for key in other.mortals().0.into_iter().chain(own.mortals().1) {
            mem.add(key, PD, Access::REMOTE_INVALIDATE, 0, Vec::new());
            mem.bind(key, qpn(pair, side));
        }
        let mut end = End {
            qp,
            mem,
            wcs: Vec::new(),
            events: Vec::new(),
            timeouts: Vec::new(),
            awaited: Vec::new(),
            una: None,
            died: None,
            seeks: false,
            sends: own.sends.iter().cloned().collect(),
            receives: other.receives.iter().cloned().collect(),
            wake: Some(Instant::ZERO),
            blocked: false,
        };
        // What finds no receive is lost there.
        if s.kind != QpType::Rc {
            end.post_receives(usize::MAX).map_err(|e| refused(pair, side, "a receive", &e))?;
        }
        Ok(end)
    }

    /// All queue pairs.
    pub(super) fn ends(&self) -> impl Iterator<Item = (usize, usize, &End)> {
        self.ends
            .iter()
            .enumerate()
            .flat_map(|(pair, ends)| ends.iter().enumerate().map(move |(i, end)| (pair, i, end)))
    }

    pub(super) fn end_of(&self, pair: usize, side: usize) -> &End {
        &self.ends[pair][side]
    }

    #[cfg(test)]
    pub(super) fn end_mut(&mut self, pair: usize, side: usize) -> &mut End {
        &mut self.ends[pair][side]
    }

    pub(super) fn plan(&self, pair: usize, side: usize) -> &Plan {
        &self.plans[pair][side]
    }

    /// Goes on until nothing is left to happen.
    pub(super) fn run(&mut self) -> Result<(), String> {
        loop {
            self.steps += 1;
            if self.steps > self.limit {
                return Err(format!("it does not end: {} steps, at {:?}", self.limit, self.now));
            }
            for pair in 0..self.ends.len() {
                for side in 0..2 {
                    self.program(pair, side)?;
                    self.transmit(pair, side)?;
                }
            }
            let ends = self.ends.iter().flatten();
            let timers = ends.flat_map(|end| [end.qp.poll_timeout(), end.wake]).flatten().min();
            let Some(next) = timers.into_iter().chain(self.network.poll_timeout()).min() else {
                // A send queue may have become empty without a packet.
                let left = self.left();
                for pair in 0..self.ends.len() {
                    self.program(pair, 0)?;
                    self.program(pair, 1)?;
                }
                if self.left() < left {
                    continue;
                }
                return Ok(());
            };
            self.now = self.now.max(next);
            while let Some(delivery) = self.network.poll(self.now) {
                self.deliver(&delivery)?;
            }
            for ends in &mut self.ends {
                let expected = ends.each_ref().map(|end| end.qp.expected_psn());
                for (end, expected) in ends.iter_mut().zip(expected.into_iter().rev()) {
                    if end.qp.poll_timeout().is_some_and(|at| at <= self.now) {
                        end.expire(self.now, expected);
                    }
                }
            }
        }
    }

    /// Work requests that are still to be posted.
    fn left(&self) -> usize {
        self.ends.iter().flatten().map(|end| end.sends.len() + end.receives.len()).sum()
    }

    /// The program posts some of what it has to post.
    fn program(&mut self, pair: usize, side: usize) -> Result<(), String> {
        let (now, dice, slow) = (self.now, &mut self.dice, self.slow);
        let end = &mut self.ends[pair][side];
        let awake = end.wake.is_some_and(|at| at <= now);
        if awake {
            let most = if slow { 1 + dice.below(8) as usize } else { usize::MAX };
            end.wake = None;
            end.post_receives(most).map_err(|e| refused(pair, side, "a receive", &e))?;
        }
        if awake || end.blocked {
            let most = if slow && awake { 1 + dice.below(8) as usize } else { usize::MAX };
            end.post_sends(most).map_err(|e| refused(pair, side, "a send", &e))?;
        }
        let waits = end.receives.is_empty() && (end.sends.is_empty() || end.blocked);
        if awake && !waits {
            end.wake = Some(now + Duration::from_micros(1 + dice.below(100)));
        }
        end.collect(now);
        Ok(())
    }

    fn transmit(&mut self, pair: usize, side: usize) -> Result<(), String> {
        let budget = 1 + self.dice.below(100_000) as usize;
        let attempts = self.ends[pair].each_ref().map(|end| end.timeouts.len());
        let (from, to) = (self.sockets[side], self.sockets[1 - side]);
        let end = &mut self.ends[pair][side];
        while end.qp.poll_transmit(self.now, &end.mem, budget, &mut self.train) {
            let octets = self.train.octets();
            let packets = octets.chunks(self.train.segment_len().max(1));
            if (octets.len(), packets.len()) != (self.train.len(), self.train.packets()) {
                return Err(problem(pair, side, "the parts of a train do not add up"));
            }
            if (self.train.local(), self.train.peer()) != (Some(from), Some(to)) {
                return Err(problem(pair, side, "a train goes elsewhere"));
            }
            for (i, octets) in packets.enumerate() {
                let Ok((bth, _)) = Bth::read_from_prefix(octets) else {
                    return Err(problem(pair, side, "a packet without a BTH"));
                };
                let is_request = bth.opcode().info().is_some_and(|info| info.request);
                let requester = if is_request { side } else { 1 - side };
                if is_request && core::mem::take(&mut end.seeks) {
                    end.una = Some(bth.psn());
                }
                let key = Key::new(pair, requester, !is_request, attempts[requester], bth.psn());
                // A response is awaited as much as an acknowledgement that was asked for.
                let sends = bth.opcode().info().is_some_and(|info| {
                    matches!(info.operation, Operation::Send | Operation::Write)
                });
                let key = key.asking(is_request && (bth.ack_req() || !sends));
                let print = if self.fingerprints { fingerprint(octets) } else { 0 };
                self.sent += 1;
                self.orders[pair][side].missing.insert(self.sent);
                let meta = Meta { number: self.sent, key, print };
                let packet = Packet::with_meta(octets.to_vec(), meta)
                    .with_ecn(if self.train.ecn_capable() { 2 } else { 0 })
                    .with_identification(i as u16)
                    .with_key(key.0);
                self.network.send(self.now, from, to, packet);
                self.last = self.now;
            }
        }
        end.collect(self.now);
        Ok(())
    }

    /// What a port does: check the ICRC, look up the queue pair.
    fn deliver(&mut self, delivery: &Delivery<Meta>) -> Result<(), String> {
        self.last = self.now;
        let Packet { octets, damaged, meta, ecn, .. } = &delivery.packet;
        if !icrc_is_good(delivery.from, delivery.to, octets) {
            self.bad_icrc += 1;
            if !damaged {
                return Err("the ICRC of an unchanged packet is found to be wrong".to_string());
            }
            return Ok(());
        }
        if *damaged && fingerprint(octets) != meta.print {
            return Err("a changed packet passes its ICRC".to_string());
        }
        let packet = match roce::Packet::parse(octets) {
            Ok(packet) => packet,
            Err(error) => return Err(format!("a packet cannot be read: {error}")),
        };
        let side = usize::from(delivery.to == self.sockets[1]);
        let dest = packet.headers.bth.dest_qp();
        let pair = (dest.0.saturating_sub(qpn(0, 0).0) / 2) as usize;
        match self.ends.get_mut(pair) {
            Some(ends) if dest == qpn(pair, side) => {
                if self.orders[pair][1 - side].is_late(meta.number) {
                    self.overtaken.push(meta.key);
                }
                let end = &mut ends[side];
                let received =
                    Received { packet: &packet, from: delivery.from, len: octets.len(), ecn: *ecn };
                end.qp.handle_packet(self.now, &received, &end.mem);
                end.collect(self.now);
                Ok(())
            }
            _ => Err(format!("a packet for queue pair {}, which does not exist", dest.0)),
        }
    }
}

impl End {
    fn post_receives(&mut self, most: usize) -> Result<(), PostError> {
        let count = most.min(self.receives.len());
        self.receives.drain(..count).try_for_each(|wr| {
            let id = wr.id;
            self.qp.post_recv(wr, id)
        })
    }

    fn post_sends(&mut self, most: usize) -> Result<(), PostError> {
        self.blocked = false;
        for _ in 0..most {
            let Some(wr) = self.sends.front() else {
                break;
            };
            match self.qp.post_send(wr.clone(), wr.id) {
                Ok(()) => self.sends.pop_front(),
                Err(PostError::QueueFull { .. }) => {
                    self.blocked = true;
                    break;
                }
                Err(error) => return Err(error),
            };
        }
        Ok(())
    }

    /// `expected` is what the peer expects.
    fn expire(&mut self, now: Instant, expected: Psn) {
        let before = self.qp.stats().timeouts;
        self.qp.handle_timeout(now);
        if self.qp.stats().timeouts > before {
            self.timeouts.push(now);
            self.awaited.push(expected);
            self.seeks = true;
        }
        self.collect(now);
    }

    fn collect(&mut self, now: Instant) {
        while let Some(completion) = self.qp.poll_completion() {
            self.wcs.push(completion.wc);
        }
        while let Some(event) = self.qp.poll_event() {
            self.events.push(event);
        }
        if self.qp.state() == QpState::Err && self.died.is_none() {
            self.died = Some(now);
        }
    }
}

/// Whether a UDP socket that does not see IPv4's Identification can take it.
fn icrc_is_good(from: SocketAddr, to: SocketAddr, octets: &[u8]) -> bool {
    let (src_port, dst_port) = (from.port(), to.port());
    match (from, to) {
        (SocketAddr::V4(a), SocketAddr::V4(b)) => {
            let path = PathV4 { src: *a.ip(), dst: *b.ip(), src_port, dst_port };
            // DF holds for a peer: it is known.
            let found: Option<Identification> = icrc::verify_unknown_id(&path, octets, Some(true));
            found.is_some()
        }
        (SocketAddr::V6(a), SocketAddr::V6(b)) => {
            let path = PathV6 { src: *a.ip(), dst: *b.ip(), src_port, dst_port };
            let Some((covered, found)) = octets.split_last_chunk::<ICRC_LEN>() else {
                return false;
            };
            let Ok((bth, rest)) = Bth::read_from_prefix(covered) else {
                return false;
            };
            let mut icrc = Icrc::socket_v6(&path, octets.len(), &bth);
            icrc.update(rest);
            icrc.finish() == *found
        }
        _ => false,
    }
}

/// Octets that the ICRC covers, as a number (FNV-1a). Of a BTH's octet 4, congestion bits and
/// reserved ones, routers may change what they like.
fn fingerprint(octets: &[u8]) -> u64 {
    let hashed = octets.iter().enumerate().filter(|&(at, _)| at != 4);
    hashed.fold(0xcbf2_9ce4_8422_2325, |hash, (_, &octet)| {
        (hash ^ u64::from(octet)).wrapping_mul(0x0100_0000_01b3)
    })
}
