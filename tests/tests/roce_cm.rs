//! The connection manager of RoCEv2: managers in virtual time over a network that loses, doubles,
//! delays and reorders their MADs, and MADs of the Linux kernel as input.

use std::{
    cmp::Reverse,
    collections::{BTreeMap, BTreeSet, BinaryHeap},
    net::{IpAddr, SocketAddr},
    path::Path,
    time::Duration,
};

use userdma_proto::{
    roce::cm::{
        Accept, Awaited, Cm, CmError, Config, ConnId, Connect, Datagrams, Ended, Established,
        Event, LocalQp, Reject, Request, Resolve, Token, Transport,
    },
    time::Instant,
    wire::{
        ids::{Psn, QKey, Qpn},
        mad::{
            MAD_LEN, METHOD_SEND, Mad,
            cm::{self, Apr, Lap, Message, Mra, PortSpace, Reason, Rej, Rep, Req, Rtu, SidrRep},
        },
    },
};
use userdma_tests::{Rng, shared};

const SERVICE: u64 = PortSpace::TCP.service_id(7174);
const UD_SERVICE: u64 = PortSpace::UDP.service_id(7174);
/// Where rxe's MADs come from: nobody may answer there.
const SOURCE_PORT: u16 = 55_410;

fn address(text: &str) -> SocketAddr {
    text.parse().expect("an address")
}

fn ms(n: u64) -> Duration {
    Duration::from_millis(n)
}

/// What a network does to each MAD: so many in a thousand.
#[derive(Debug, Clone, Copy, Default)]
struct Faults {
    loss: u64,
    dup: u64,
    /// The longest time on the way, in µs; each takes its own, so they overtake each other.
    delay: u64,
}

/// A manager, its address, and what it told.
struct Host {
    cm: Cm,
    addr: SocketAddr,
    events: Vec<Event>,
    /// Every communication ID that it sent, with its transaction: no ID has two.
    ids: BTreeMap<u32, u64>,
    /// Messages sent, by attribute.
    sent: BTreeMap<u16, usize>,
}

impl Host {
    fn new(addr: &str, config: Config) -> Self {
        Self {
            cm: Cm::new(config),
            addr: address(addr),
            events: Vec::new(),
            ids: BTreeMap::new(),
            sent: BTreeMap::new(),
        }
    }

    fn take(&mut self) -> Vec<Event> {
        std::mem::take(&mut self.events)
    }

    /// The only event since the last time.
    #[track_caller]
    fn only(&mut self) -> Event {
        let mut events = self.take();
        assert_eq!(events.len(), 1, "{events:?}");
        events.remove(0)
    }

    #[track_caller]
    fn request(&mut self) -> Request {
        match self.only() {
            Event::Request(request) => request,
            other => panic!("{other:?}"),
        }
    }

    #[track_caller]
    fn established(&mut self) -> Established {
        match self.only() {
            Event::Established(ready) => ready,
            other => panic!("{other:?}"),
        }
    }

    fn sent(&self, attribute: u16) -> usize {
        self.sent.get(&attribute).copied().unwrap_or(0)
    }
}

/// On its way: when, in which order, whence, whither.
type Flight = Reverse<(Instant, u64, SocketAddr, SocketAddr, [u8; MAD_LEN])>;

/// Hosts and the network between them.
struct Net {
    now: Instant,
    hosts: Vec<Host>,
    faults: Faults,
    rng: Rng,
    flights: BinaryHeap<Flight>,
    sequence: u64,
    /// MADs that had no receiver.
    nowhere: Vec<SocketAddr>,
    /// MADs lost by the network.
    lost: u64,
}

impl Net {
    fn new(hosts: Vec<Host>, faults: Faults, seed: u64) -> Self {
        Self {
            now: Instant::ZERO,
            hosts,
            faults,
            rng: Rng::new(seed),
            flights: BinaryHeap::new(),
            sequence: 0,
            nowhere: Vec::new(),
            lost: 0,
        }
    }

    /// Two hosts that each know only of UDP port 4791.
    fn pair(faults: Faults, seed: u64) -> Self {
        let hosts = vec![
            Host::new("10.0.0.1:4791", Config::new(seed * 2 + 1)),
            Host::new("10.0.0.2:4791", Config::new(seed * 2 + 2)),
        ];
        Self::new(hosts, faults, seed)
    }

    fn launch(&mut self, from: SocketAddr, to: SocketAddr, mad: [u8; MAD_LEN]) {
        let late = self.rng.below(self.faults.delay.max(1)) + 1;
        self.sequence += 1;
        let at = self.now + Duration::from_micros(late);
        self.flights.push(Reverse((at, self.sequence, from, to, mad)));
    }

    /// What the hosts have to say goes on its way.
    fn drain(&mut self) {
        for i in 0..self.hosts.len() {
            let mut mad = [0xee; MAD_LEN];
            while let Some(to) = self.hosts[i].cm.poll_mad(&mut mad) {
                let host = &mut self.hosts[i];
                note(host, &mad);
                let from = SocketAddr::new(host.addr.ip(), SOURCE_PORT);
                if self.rng.below(1000) < self.faults.loss {
                    self.lost += 1;
                    continue;
                }
                self.launch(from, to, mad);
                if self.rng.below(1000) < self.faults.dup {
                    self.launch(from, to, mad);
                }
            }
            while let Some(event) = self.hosts[i].cm.poll_event() {
                self.hosts[i].events.push(event);
            }
        }
    }

    /// Goes to the next thing that happens, not beyond `until`. False: nothing does.
    fn step(&mut self, until: Instant) -> bool {
        self.drain();
        let flight = self.flights.peek().map(|Reverse(flight)| flight.0);
        let timers = self.hosts.iter().filter_map(|host| host.cm.poll_timeout());
        let Some(next) = timers.chain(flight).min().filter(|&at| at <= until) else {
            self.now = until.max(self.now);
            return false;
        };
        self.now = next.max(self.now);
        while self.flights.peek().is_some_and(|Reverse(flight)| flight.0 <= self.now) {
            let Some(Reverse((_, _, from, to, mad))) = self.flights.pop() else { break };
            match self.hosts.iter_mut().find(|host| host.addr == to) {
                Some(host) => host.cm.handle_mad(self.now, from, &mad),
                None => self.nowhere.push(to),
            }
        }
        for host in &mut self.hosts {
            host.cm.handle_timeout(self.now);
        }
        self.drain();
        true
    }

    /// Runs for that long, whatever happens.
    fn run(&mut self, time: Duration) {
        let until = self.now + time;
        let mut steps = 0;
        while self.step(until) {
            steps += 1;
            assert!(steps < 1_000_000, "this does not end");
        }
    }

    /// A connection from host 0 to host 1, both ends ready.
    fn connected(&mut self) -> (Established, Established) {
        let _ = self.hosts[1].cm.listen(SERVICE, 16);
        self.hosts[0].cm.connect(self.now, &connect(0x11, "10.0.0.2:4791")).unwrap();
        self.run(ms(100));
        let request = self.hosts[1].request();
        self.hosts[1].cm.accept(self.now, request.conn, &Accept::new(qp(0x22))).unwrap();
        self.run(ms(100));
        (self.hosts[0].established(), self.hosts[1].established())
    }
}

/// Keeps an account of what a host sends: no ID stands for two connections.
fn note(host: &mut Host, mad: &[u8; MAD_LEN]) {
    let parsed = Mad::parse(mad).unwrap();
    let message = parsed.cm().unwrap().unwrap();
    *host.sent.entry(message.attribute()).or_default() += 1;
    if let Message::Req(_) | Message::Rep(_) | Message::SidrReq(_) = message {
        let id = message.local_comm_id().unwrap();
        let tid = *host.ids.entry(id).or_insert(parsed.header.tid());
        assert_eq!(tid, parsed.header.tid(), "ID {id:#x} was used twice");
    }
}

fn qp(n: u32) -> LocalQp {
    LocalQp::new(Qpn(n), Psn::new(n * 100))
}

/// A request with queue pair `n` from 10.0.0.1.
fn connect(n: u32, peer: &str) -> Connect<'static> {
    Connect::new(address(peer), IpAddr::from([10, 0, 0, 1]), SERVICE, qp(n))
}

/// A MAD made by hand.
fn mad<'m>(tid: u64, message: impl Into<Message<'m>>) -> [u8; MAD_LEN] {
    let mut out = [0; MAD_LEN];
    message.into().emit_mad(tid, METHOD_SEND, &mut out);
    out
}

/// Everything that a manager has to send.
fn mads(cm: &mut Cm) -> Vec<(SocketAddr, [u8; MAD_LEN])> {
    let mut out = [0; MAD_LEN];
    std::iter::from_fn(|| cm.poll_mad(&mut out).map(|to| (to, out))).collect()
}

/// The only thing that a manager has to send.
#[track_caller]
fn one(cm: &mut Cm) -> (SocketAddr, [u8; MAD_LEN]) {
    let all = mads(cm);
    assert_eq!(all.len(), 1, "{all:?}");
    all[0]
}

fn message(mad: &[u8; MAD_LEN]) -> Message<'_> {
    Mad::parse(mad).unwrap().cm().unwrap().unwrap()
}

// What the program of the model does.

/// How the passive program answers, by the first octet of private data.
const ACCEPT: u8 = 1;
const REJECT: u8 = 2;
const SLOW: u8 = 3;
const SILENT: u8 = 4;
const SMALL_MTU: u8 = 5;

/// The life of one connection, as it was told.
#[derive(Debug, Default, Clone)]
struct Told {
    request: bool,
    rejected_by_us: bool,
    established: Option<Established>,
    over: Option<Event>,
    released: bool,
}

/// Events in an order that is allowed, each once.
fn follow(told: &mut BTreeMap<ConnId, Told>, event: &Event) {
    let over = |conn: &ConnId, told: &mut BTreeMap<ConnId, Told>| {
        let told = told.entry(*conn).or_default();
        assert!(told.over.is_none() && !told.rejected_by_us, "{event:?} after {told:?}");
        told.over = Some(event.clone());
    };
    match event {
        Event::Request(request) => {
            let told = told.entry(request.conn).or_default();
            assert!(!told.request && told.established.is_none() && told.over.is_none());
            told.request = true;
        }
        Event::Established(ready) => {
            let told = told.entry(ready.conn).or_default();
            assert!(told.established.is_none() && told.over.is_none(), "{told:?}");
            told.established = Some(ready.clone());
        }
        Event::Rejected(rejected) => over(&rejected.conn, told),
        Event::TimedOut { conn, .. }
        | Event::Dropped { conn }
        | Event::Disconnected { conn, .. }
        | Event::Resolved { conn, .. }
        | Event::Unresolved { conn, .. } => over(conn, told),
        Event::Released { conn, .. } => {
            let told = told.get_mut(conn).expect("it was established");
            assert!(told.established.is_some() && told.over.is_some() && !told.released);
            told.released = true;
        }
        Event::Queried { .. } => {}
        other => panic!("{other:?}"),
    }
}

/// Many connections both ways, over a bad network. Returns how many MADs were lost and sent again.
fn many_connections(seed: u64) -> (u64, u64) {
    let mut rng = Rng::new(seed ^ 0x5eed);
    let faults =
        Faults { loss: rng.below(200), dup: rng.below(300), delay: 1 + rng.below(300_000) };
    let mut net = Net::pair(faults, seed);
    let mut told: [BTreeMap<ConnId, Told>; 2] = Default::default();
    // Of each connect: side, what the peer's program is to do, number.
    let mut wanted: BTreeMap<(usize, ConnId), (u8, u32)> = BTreeMap::new();
    let mut later: Vec<(Instant, usize, ConnId, u8, u32)> = Vec::new();
    for host in &mut net.hosts {
        host.cm.listen(SERVICE, 64).unwrap();
    }
    let mut number = 0;
    let mut to_connect = 12;
    let end = Instant::ZERO + Duration::from_secs(400);
    loop {
        if to_connect > 0 && rng.one_in(3) {
            to_connect -= 1;
            number += 1;
            let side = rng.below(2) as usize;
            let what = [ACCEPT, ACCEPT, REJECT, SLOW, SILENT, SMALL_MTU, 0][rng.below(7) as usize];
            let (own, peer) = (net.hosts[side].addr, net.hosts[1 - side].addr);
            let data = [what, number as u8];
            let service = if what == 0 { SERVICE + 1 } else { SERVICE };
            let wish = Connect {
                private_data: &data,
                mtu: 4096,
                transport: if number % 2 == 0 { Transport::Rc } else { Transport::Uc },
                ..Connect::new(peer, own.ip(), service, qp(number * 2))
            };
            let id = net.hosts[side].cm.connect(net.now, &wish).unwrap();
            wanted.insert((side, id), (what, number));
        }
        for (side, told) in told.iter_mut().enumerate() {
            for event in net.hosts[side].take() {
                follow(told, &event);
                let now = net.now;
                match &event {
                    Event::Request(request) => {
                        let [what, n, ..] = request.private_data[..] else { panic!() };
                        assert_eq!(request.qpn, Qpn(u32::from(n) * 2));
                        let after = match what {
                            SLOW => ms(8000 + rng.below(40_000)),
                            SILENT => continue,
                            _ => ms(rng.below(100)),
                        };
                        let what =
                            if what == SMALL_MTU && request.mtu <= 512 { ACCEPT } else { what };
                        later.push((now + after, side, request.conn, what, n.into()));
                    }
                    Event::Established(ready) => {
                        // Some end soon, from either side or both.
                        later.push((now + ms(rng.below(3000)), side, ready.conn, 9, 0));
                    }
                    _ => {}
                }
            }
        }
        later.sort_by_key(|&(at, ..)| at);
        while let Some(&(at, side, conn, what, n)) = later.first() {
            if at > net.now {
                break;
            }
            later.remove(0);
            let (now, cm) = (net.now, &mut net.hosts[side].cm);
            match what {
                ACCEPT | SLOW => {
                    let answer = Accept { private_data: &[n as u8], ..Accept::new(qp(n * 2 + 1)) };
                    // It may be gone: the initiator's patience has an end, too.
                    let _ = cm.accept(now, conn, &answer);
                }
                REJECT | SMALL_MTU => {
                    let no =
                        if what == REJECT { Reject::consumer(b"no") } else { Reject::mtu(512) };
                    if cm.reject(now, conn, &no).is_ok() {
                        told[side].get_mut(&conn).unwrap().rejected_by_us = true;
                    }
                }
                _ => cm.disconnect(now, conn).unwrap(),
            }
        }
        let next = later.first().map_or(end, |&(at, ..)| at).max(net.now);
        let until = if to_connect > 0 { next.min(net.now + ms(50)) } else { next };
        let moved = net.step(until);
        let events = net.hosts.iter().any(|host| !host.events.is_empty());
        if !moved && !events && later.is_empty() && to_connect == 0 && net.now >= end {
            break;
        }
    }
    assert_eq!(wanted.len(), 12);
    for ((side, id), (what, n)) in wanted {
        let here = &told[side][&id];
        let over = here.over.as_ref().unwrap_or_else(|| panic!("seed {seed}: {id} is not over"));
        // The passive ends that belong to it: old requests may come late, and find nobody.
        let there: Vec<&Told> = told[1 - side]
            .values()
            .filter(|told| {
                told.established
                    .as_ref()
                    .is_some_and(|e| told.request && e.remote_qpn == Qpn(n * 2))
            })
            .collect();
        match what {
            ACCEPT | SLOW | SMALL_MTU => {
                let (Some(ready), [passive]) = (&here.established, &there[..]) else {
                    panic!("seed {seed}: {what} {here:?} {there:?}")
                };
                let other = passive.established.as_ref().unwrap();
                assert_eq!((ready.local_qpn, other.local_qpn), (Qpn(n * 2), Qpn(n * 2 + 1)));
                assert_eq!((ready.remote_qpn, other.remote_qpn), (Qpn(n * 2 + 1), Qpn(n * 2)));
                assert_eq!((ready.send_psn, ready.expect_psn), (other.expect_psn, other.send_psn));
                assert_eq!(ready.send_psn, qp(n * 2 + 1).start_psn);
                assert_eq!(ready.mtu, if what == SMALL_MTU { 512 } else { 4096 });
                assert_eq!(ready.mtu, other.mtu);
                assert_eq!(ready.transport, other.transport);
                assert_eq!(ready.private_data[0], n as u8);
                assert!(here.released && passive.released, "seed {seed}");
                let ends = [over, passive.over.as_ref().unwrap()].map(|over| match over {
                    Event::Disconnected { ended, .. } => *ended,
                    other => panic!("seed {seed}: {other:?}"),
                });
                assert!(
                    ends.iter().all(|e| matches!(e, Ended::Local | Ended::Peer | Ended::TimedOut)),
                    "seed {seed}: {ends:?}"
                );
                // Somebody has begun.
                assert_ne!(ends, [Ended::Peer, Ended::Peer]);
            }
            REJECT | SILENT | 0 => {
                assert!(there.is_empty() && here.established.is_none(), "seed {seed}");
                let Event::Rejected(no) = over else {
                    // Nobody told it, or the REJ was lost.
                    assert!(what == SILENT && matches!(over, Event::TimedOut { .. }), "{over:?}");
                    continue;
                };
                let want = match what {
                    REJECT => Reason::CONSUMER,
                    SILENT => Reason::TIMEOUT,
                    _ => Reason::INVALID_SERVICE_ID,
                };
                assert_eq!(no.reason, want, "seed {seed}");
                assert_eq!(no.private_data.starts_with(b"no"), what == REJECT);
            }
            _ => unreachable!(),
        }
    }
    for (host, told) in net.hosts.iter().zip(&told) {
        assert_eq!((host.cm.connections(), host.cm.half_open()), (0, 0), "seed {seed}");
        assert_eq!(host.cm.poll_timeout(), None);
        assert!(told.values().all(|told| told.over.is_some() || told.rejected_by_us));
        assert_eq!(host.cm.stats().malformed + host.cm.stats().wrong_source, 0);
    }
    assert!(net.nowhere.is_empty());
    (net.lost, net.hosts.iter().map(|host| host.cm.stats().resent).sum())
}

#[test]
fn many_connections_over_a_bad_network() {
    let (mut lost, mut resent) = (0, 0);
    for seed in 0..300 {
        let (l, r) = many_connections(seed);
        lost += l;
        resent += r;
    }
    assert!(lost > 1000 && resent > 1000, "{lost} {resent}");
}

#[test]
fn a_good_network_takes_as_few_messages_as_there_are() {
    let mut net = Net::pair(Faults::default(), 1);
    let (a, b) = net.connected();
    assert_eq!((a.peer, b.peer), (net.hosts[1].addr, net.hosts[0].addr));
    assert_eq!((a.max_rd_atomic, b.max_rd_atomic), (16, 16));
    assert_eq!((a.ack_timeout, b.ack_timeout), (19, 19));
    net.hosts[0].cm.disconnect(net.now, a.conn).unwrap();
    net.run(ms(100));
    let over = |conn, ended| Event::Disconnected { conn, ended };
    assert_eq!(net.hosts[0].only(), over(a.conn, Ended::Local));
    assert_eq!(net.hosts[1].only(), over(b.conn, Ended::Peer));
    // Again: it is over, and nothing is sent.
    net.hosts[0].cm.disconnect(net.now, a.conn).unwrap();
    net.run(ms(10_000));
    let released = |e: &Established| Event::Released { conn: e.conn, local_qpn: e.local_qpn };
    assert_eq!(net.hosts[0].only(), released(&a));
    assert_eq!(net.hosts[1].only(), released(&b));
    assert_eq!(net.hosts[0].cm.disconnect(net.now, a.conn), Err(CmError::Unknown(a.conn)));
    let sent = |host: &Host| host.sent.clone().into_iter().collect::<Vec<_>>();
    assert_eq!(sent(&net.hosts[0]), [(cm::REQ, 1), (cm::RTU, 1), (cm::DREQ, 1)]);
    assert_eq!(sent(&net.hosts[1]), [(cm::REP, 1), (cm::DREP, 1)]);
}

#[test]
fn both_disconnect_at_once() {
    let mut net = Net::pair(Faults::default(), 2);
    let (a, b) = net.connected();
    net.hosts[0].cm.disconnect(net.now, a.conn).unwrap();
    net.hosts[1].cm.disconnect(net.now, b.conn).unwrap();
    net.run(ms(100));
    for (host, conn) in net.hosts.iter_mut().zip([a.conn, b.conn]) {
        assert_eq!(host.only(), Event::Disconnected { conn, ended: Ended::Local });
        assert_eq!((host.sent(cm::DREQ), host.sent(cm::DREP)), (1, 1));
    }
}

#[test]
fn nobody_answers() {
    let mut net = Net::pair(Faults { loss: 1000, ..Faults::default() }, 3);
    let conn = net.hosts[0].cm.connect(net.now, &connect(0x11, "10.0.0.2:4791")).unwrap();
    let wish = Resolve {
        peer: address("10.0.0.2:4791"),
        local_ip: IpAddr::from([10, 0, 0, 1]),
        local_port: 0,
        service_id: UD_SERVICE,
        private_data: &[],
        token: None,
    };
    let question = net.hosts[0].cm.resolve(net.now, &wish).unwrap();
    net.run(Duration::from_secs(40));
    assert_eq!(net.hosts[0].take(), []);
    net.run(Duration::from_secs(30));
    let told = net.hosts[0].take();
    let timed_out = |conn, awaited| Event::TimedOut { conn, awaited };
    assert_eq!(told, [timed_out(conn, Awaited::Reply), timed_out(question, Awaited::Resolution)]);
    let host = &net.hosts[0];
    // 16 of each, and the peer is told that it need not answer.
    assert_eq!((host.sent(cm::REQ), host.sent(cm::SIDR_REQ), host.sent(cm::REJ)), (16, 16, 1));
    assert_eq!((host.cm.connections(), host.cm.poll_timeout()), (0, None));
}

#[test]
fn waits_grow_from_a_quarter_second_to_the_response_timeout() {
    let mut cm = Cm::new(Config::new(1));
    cm.connect(Instant::ZERO, &connect(1, "10.0.0.2:4791")).unwrap();
    let mut waits = Vec::new();
    let mut now = Instant::ZERO;
    for _ in 0..7 {
        let next = cm.poll_timeout().unwrap();
        waits.push((next - now).as_millis());
        now = next;
        cm.handle_timeout(now);
    }
    assert_eq!(waits, [250, 500, 1000, 2000, 4000, 4294, 4294]);
    let all = mads(&mut cm);
    assert!(all.len() == 8 && all.iter().all(|mad| *mad == all[0]));
}

#[test]
fn an_initiator_that_vanishes() {
    let mut net = Net::pair(Faults::default(), 4);
    net.hosts[1].cm.listen(SERVICE, 1).unwrap();
    net.hosts[0].cm.connect(net.now, &connect(0x11, "10.0.0.2:4791")).unwrap();
    net.run(ms(10));
    let request = net.hosts[1].request();
    net.hosts[0] = Host::new("10.0.0.9:4791", Config::new(9));
    net.hosts[1].cm.accept(net.now, request.conn, &Accept::new(qp(0x22))).unwrap();
    net.run(Duration::from_secs(90));
    let awaited = Awaited::ReadyToUse;
    assert_eq!(net.hosts[1].only(), Event::TimedOut { conn: request.conn, awaited });
    assert_eq!((net.hosts[1].sent(cm::REP), net.hosts[1].sent(cm::REJ)), (16, 1));
    assert_eq!(net.hosts[1].cm.connections(), 0);
}

#[test]
fn a_slow_program_makes_the_initiator_wait() {
    let mut net = Net::pair(Faults::default(), 5);
    net.hosts[1].cm.listen(SERVICE, 1).unwrap();
    net.hosts[0].cm.connect(net.now, &connect(0x11, "10.0.0.2:4791")).unwrap();
    net.run(Duration::from_secs(60));
    let request = net.hosts[1].request();
    assert_eq!(net.hosts[0].take(), []);
    // The REQ came again once, and drew the MRA; then there was silence.
    assert_eq!((net.hosts[0].sent(cm::REQ), net.hosts[1].sent(cm::MRA)), (2, 1));
    net.hosts[1].cm.accept(net.now, request.conn, &Accept::new(qp(0x22))).unwrap();
    net.run(ms(10));
    net.hosts[0].established();
    net.hosts[1].established();
}

#[test]
fn a_slow_program_is_excused_without_being_asked() {
    // An initiator as Linux is: 4.3 s for an answer, so that 2.1 s have passed before it asks.
    let (mut cm, now) = (Cm::new(Config::new(1)), Instant::ZERO);
    cm.listen(SERVICE, 1).unwrap();
    let mut other = Cm::new(Config { resend_after: Duration::from_secs(5), ..Config::new(2) });
    other.connect(now, &connect(0x11, "10.0.0.2:4791")).unwrap();
    let (_, req) = one(&mut other);
    cm.handle_mad(now, address("10.0.0.1:1"), &req);
    let at = cm.poll_timeout().unwrap();
    assert_eq!((at - now).as_millis(), 2147);
    cm.handle_timeout(at);
    let (_, sent) = one(&mut cm);
    let Message::Mra(mra) = message(&sent) else { panic!() };
    assert_eq!((mra.message, mra.service_timeout), (Mra::REQ, 24));
    other.handle_mad(at, address("10.0.0.2:1"), &sent);
    let waits = (other.poll_timeout().unwrap() - at).as_secs();
    // 68.7 s, and the 4.3 s that the answer may take.
    assert_eq!(waits, 73);
    // It never answers.
    let at = cm.poll_timeout().unwrap();
    cm.handle_timeout(at);
    assert!(matches!(cm.poll_event(), Some(Event::Request(_))));
    let awaited = Awaited::Answer;
    assert!(matches!(cm.poll_event(), Some(Event::TimedOut { awaited: a, .. }) if a == awaited));
    let (_, sent) = one(&mut cm);
    let Message::Rej(rej) = message(&sent) else { panic!() };
    assert_eq!((rej.reason, rej.message), (Reason::TIMEOUT, Rej::REQ));
}

#[test]
fn nobody_is_put_off_for_ever() {
    let mut cm = Cm::new(Config::new(1));
    let conn = cm.connect(Instant::ZERO, &connect(1, "10.0.0.2:4791")).unwrap();
    let (_, req) = one(&mut cm);
    let remote_comm_id = message(&req).local_comm_id().unwrap();
    // 2.4 hours, again and again.
    let mra = Mra { local_comm_id: 7, remote_comm_id, service_timeout: 31, ..Mra::default() };
    let mut now = Instant::ZERO;
    let over = loop {
        cm.handle_mad(now, address("10.0.0.2:1"), &mad(0, mra));
        now = cm.poll_timeout().unwrap();
        cm.handle_timeout(now);
        mads(&mut cm);
        if let Some(event) = cm.poll_event() {
            break event;
        }
    };
    assert_eq!(over, Event::TimedOut { conn, awaited: Awaited::Reply });
    assert!(now < Instant::ZERO + Duration::from_secs(360), "{now:?}");
}

#[test]
fn an_mra_for_a_rep_prolongs_its_wait() {
    let mut net = Net::pair(Faults::default(), 6);
    net.hosts[1].cm.listen(SERVICE, 1).unwrap();
    net.hosts[0].cm.connect(net.now, &connect(0x11, "10.0.0.2:4791")).unwrap();
    net.run(ms(1));
    let request = net.hosts[1].request();
    let cm = &mut net.hosts[1].cm;
    cm.accept(net.now, request.conn, &Accept::new(qp(0x22))).unwrap();
    let (_, rep) = one(cm);
    let Message::Rep(rep) = message(&rep) else { panic!() };
    let mra = Mra {
        local_comm_id: rep.remote_comm_id,
        remote_comm_id: rep.local_comm_id,
        message: Mra::REP,
        service_timeout: 21,
        private_data: &[],
    };
    cm.handle_mad(net.now, address("10.0.0.1:1"), &mad(0, mra));
    assert!(cm.poll_timeout().unwrap() - net.now > Duration::from_secs(8));
    // Of a REQ, or of another connection, it means nothing.
    let stray = cm.stats().stray;
    cm.handle_mad(net.now, address("10.0.0.1:1"), &mad(0, Mra { message: Mra::REQ, ..mra }));
    cm.handle_mad(net.now, address("10.0.0.1:1"), &mad(0, Mra { local_comm_id: 0, ..mra }));
    assert_eq!(cm.stats().stray, stray + 2);
}

#[test]
fn rejected_in_words_and_again_when_asked_again() {
    let mut net = Net::pair(Faults::default(), 7);
    net.hosts[1].cm.listen(SERVICE, 1).unwrap();
    let conn = net.hosts[0].cm.connect(net.now, &connect(0x11, "10.0.0.2:4791")).unwrap();
    let (_, req) = one(&mut net.hosts[0].cm);
    let cm = &mut net.hosts[1].cm;
    cm.handle_mad(net.now, address("10.0.0.1:1"), &req);
    let Some(Event::Request(request)) = cm.poll_event() else { panic!() };
    let no = Reject { info: vec![1, 2, 3], ..Reject::consumer(b"not today") };
    cm.reject(net.now, request.conn, &no).unwrap();
    assert_eq!(cm.reject(net.now, request.conn, &no), Err(CmError::NotRequested(request.conn)));
    let (to, rej) = one(cm);
    assert_eq!(to, address("10.0.0.1:4791"));
    cm.handle_mad(net.now, address("10.0.0.1:1"), &req);
    assert_eq!(one(cm), (to, rej));
    assert_eq!(cm.poll_event(), None);
    net.hosts[0].cm.handle_mad(net.now, address("10.0.0.2:1"), &rej);
    let Some(Event::Rejected(told)) = net.hosts[0].cm.poll_event() else { panic!() };
    assert_eq!((told.conn, &told.info[..]), (conn, &[1, 2, 3][..]));
    assert_eq!((told.private_data.len(), &told.private_data[..9]), (148, &b"not today"[..]));
    assert_eq!(told.to_string(), "the peer rejected the connection: consumer reject (reason 28)");
}

#[test]
fn a_smaller_path_mtu_is_tried_once() {
    let mut net = Net::pair(Faults::default(), 8);
    net.hosts[1].cm.listen(SERVICE, 1).unwrap();
    let wish = Connect { mtu: 4096, ..connect(0x11, "10.0.0.2:4791") };
    let conn = net.hosts[0].cm.connect(net.now, &wish).unwrap();
    net.run(ms(10));
    let first = net.hosts[1].request();
    net.hosts[1].cm.reject(net.now, first.conn, &Reject::mtu(1024)).unwrap();
    net.run(ms(10));
    let second = net.hosts[1].request();
    assert_eq!((first.mtu, second.mtu), (4096, 1024));
    assert_eq!((first.qpn, first.start_psn), (second.qpn, second.start_psn));
    // It asks once more, not twice.
    net.hosts[1].cm.reject(net.now, second.conn, &Reject::mtu(512)).unwrap();
    net.run(ms(10));
    let Event::Rejected(told) = net.hosts[0].only() else { panic!() };
    assert_eq!((told.conn, told.reason, &told.info[..]), (conn, Reason::INVALID_MTU, &[2][..]));
}

#[test]
fn what_cannot_be_is_rejected_at_once() {
    let mut cm = Cm::new(Config::new(1));
    cm.listen(SERVICE, 1).unwrap();
    cm.listen_datagrams(UD_SERVICE, datagrams()).unwrap();
    let mut other = Cm::new(Config::new(2));
    other.connect(Instant::ZERO, &connect(1, "10.0.0.2:4791")).unwrap();
    let (_, sent) = one(&mut other);
    let Message::Req(req) = message(&sent) else { panic!() };
    let mut headless = req.private_data.to_vec();
    headless[1] = 0x50;
    let cases = [
        (Req { service_id: SERVICE + 1, ..req }, Reason::INVALID_SERVICE_ID, &[][..]),
        (Req { service_id: UD_SERVICE, ..req }, Reason::INVALID_SERVICE_ID, &[]),
        (Req { transport: Req::RD, ..req }, Reason::INVALID_TRANSPORT_TYPE, &[]),
        (Req { transport: Req::EXTENDED, ..req }, Reason::INVALID_TRANSPORT_TYPE, &[]),
        (Req { mtu: 0, ..req }, Reason::INVALID_MTU, &[5]),
        (Req { mtu: 6, ..req }, Reason::INVALID_MTU, &[5]),
        (Req { private_data: &headless, ..req }, Reason::UNSUPPORTED, &[]),
    ];
    for (req, reason, info) in cases {
        cm.handle_mad(Instant::ZERO, address("10.0.0.1:1"), &mad(77, req));
        let (to, sent) = one(&mut cm);
        assert_eq!(to, address("10.0.0.1:4791"));
        let Message::Rej(rej) = message(&sent) else { panic!() };
        assert_eq!((rej.reason, rej.message, rej.additional_info()), (reason, Rej::REQ, info));
        assert_eq!((rej.local_comm_id, rej.remote_comm_id), (0, req.local_comm_id));
        assert_eq!(Mad::parse(&sent).unwrap().header.tid(), 77);
    }
    assert_eq!((cm.connections(), cm.poll_event()), (0, None));
    assert_eq!((cm.stats().no_listener, cm.stats().unacceptable), (2, 5));
}

#[test]
fn a_packet_is_as_good_as_an_rtu() {
    let mut net = Net::pair(Faults::default(), 9);
    net.hosts[1].cm.listen(SERVICE, 1).unwrap();
    net.hosts[0].cm.connect(net.now, &connect(0x11, "10.0.0.2:4791")).unwrap();
    net.run(ms(1));
    let request = net.hosts[1].request();
    let cm = &mut net.hosts[1].cm;
    cm.accept(net.now, request.conn, &Accept::new(qp(0x22))).unwrap();
    cm.handle_established(Qpn(0x23));
    assert_eq!(cm.poll_event(), None);
    cm.handle_established(Qpn(0x22));
    cm.handle_established(Qpn(0x22));
    // The REP comes, the RTU with it: nothing new.
    net.run(ms(100));
    let ready = net.hosts[1].established();
    assert_eq!((ready.conn, ready.remote_qpn), (request.conn, Qpn(0x11)));
    net.hosts[0].established();
    assert_eq!(net.hosts[1].cm.stats().duplicates, 1);
}

#[test]
fn a_dreq_that_overtakes_the_rtu() {
    let mut net = Net::pair(Faults::default(), 10);
    net.hosts[1].cm.listen(SERVICE, 1).unwrap();
    let conn = net.hosts[0].cm.connect(net.now, &connect(0x11, "10.0.0.2:4791")).unwrap();
    net.run(ms(1));
    let request = net.hosts[1].request();
    net.hosts[1].cm.accept(net.now, request.conn, &Accept::new(qp(0x22))).unwrap();
    let (_, rep) = one(&mut net.hosts[1].cm);
    net.hosts[0].cm.handle_mad(net.now, address("10.0.0.2:1"), &rep);
    net.hosts[0].cm.disconnect(net.now, conn).unwrap();
    let sent = mads(&mut net.hosts[0].cm);
    let [(_, rtu), (_, dreq)] = sent[..] else { panic!() };
    for mad in [dreq, rtu, dreq] {
        net.hosts[1].cm.handle_mad(net.now, address("10.0.0.1:1"), &mad);
    }
    net.drain();
    let told = net.hosts[1].take();
    assert!(matches!(told[0], Event::Established(_)), "{told:?}");
    let over = Event::Disconnected { conn: request.conn, ended: Ended::Peer };
    assert_eq!(told[1..], [over]);
    // Each DREQ is answered, the second one too.
    assert_eq!(net.hosts[1].sent(cm::DREP), 2);
}

#[test]
fn duplicates_are_answered_alike() {
    let mut net = Net::pair(Faults::default(), 11);
    net.hosts[1].cm.listen(SERVICE, 1).unwrap();
    net.hosts[0].cm.connect(net.now, &connect(0x11, "10.0.0.2:4791")).unwrap();
    let (_, req) = one(&mut net.hosts[0].cm);
    let (a, b) = (address("10.0.0.1:1"), address("10.0.0.2:1"));
    let now = net.now;
    let passive = &mut net.hosts[1].cm;
    passive.handle_mad(now, a, &req);
    let Some(Event::Request(request)) = passive.poll_event() else { panic!() };
    passive.accept(now, request.conn, &Accept::new(qp(0x22))).unwrap();
    let (_, rep) = one(passive);
    passive.handle_mad(now, a, &req);
    assert_eq!(one(passive).1, rep);
    let active = &mut net.hosts[0].cm;
    active.handle_mad(now, b, &rep);
    let (_, rtu) = one(active);
    active.handle_mad(now, b, &rep);
    assert_eq!(one(active).1, rtu);
    let passive = &mut net.hosts[1].cm;
    passive.handle_mad(now, a, &rtu);
    passive.handle_mad(now, a, &rtu);
    // A REQ that was late: the connection is there.
    passive.handle_mad(now, a, &req);
    assert_eq!(mads(passive), []);
    assert!(matches!(passive.poll_event(), Some(Event::Established(_))));
    assert_eq!((passive.poll_event(), passive.stats().duplicates), (None, 3));
}

#[test]
fn unknown_connections() {
    let mut cm = Cm::new(Config::new(1));
    let from = address("10.0.0.1:55410");
    let (l, r) = (0x1111, 0x2222);
    let rep = Rep { local_comm_id: l, remote_comm_id: r, ..Rep::default() };
    let rtu = Rtu { local_comm_id: l, remote_comm_id: r, ..Rtu::default() };
    let lap = Lap { local_comm_id: l, remote_comm_id: r, ..Lap::default() };
    for (mad, kind) in [(mad(5, rep), Rej::REP), (mad(5, rtu), Rej::NONE), (mad(5, lap), Rej::NONE)]
    {
        cm.handle_mad(Instant::ZERO, from, &mad);
        let (to, sent) = one(&mut cm);
        let Message::Rej(rej) = message(&sent) else { panic!() };
        assert_eq!((rej.reason, rej.message), (Reason::INVALID_COMM_ID, kind));
        assert_eq!((to, rej.local_comm_id, rej.remote_comm_id), (address("10.0.0.1:4791"), 0, l));
    }
    let dreq = cm::Dreq { local_comm_id: l, remote_comm_id: r, ..cm::Dreq::default() };
    cm.handle_mad(Instant::ZERO, from, &mad(5, dreq));
    let (_, sent) = one(&mut cm);
    let Message::Drep(drep) = message(&sent) else { panic!() };
    assert_eq!((drep.local_comm_id, drep.remote_comm_id), (r, l));
    // Answers are not answered.
    let drep = cm::Drep { local_comm_id: l, remote_comm_id: r, ..cm::Drep::default() };
    let rej = Rej { local_comm_id: l, remote_comm_id: r, ..Rej::default() };
    let mra = Mra { local_comm_id: l, remote_comm_id: r, ..Mra::default() };
    let apr = Apr { local_comm_id: l, remote_comm_id: r, ..Apr::default() };
    let sidr = SidrRep { request_id: r, ..SidrRep::default() };
    for mad in [mad(5, drep), mad(5, rej), mad(5, mra), mad(5, apr), mad(5, sidr)] {
        cm.handle_mad(Instant::ZERO, from, &mad);
    }
    assert_eq!((mads(&mut cm), cm.stats().stray, cm.poll_event()), (vec![], 9, None));
}

#[test]
fn alternate_paths_are_not_supported() {
    let mut net = Net::pair(Faults::default(), 12);
    let (a, _) = net.connected();
    let ids: Vec<u32> = net.hosts.iter().map(|host| *host.ids.keys().next().unwrap()).collect();
    let lap = Lap {
        local_comm_id: ids[1],
        remote_comm_id: ids[0],
        remote_qpn: a.local_qpn,
        ..Lap::default()
    };
    net.hosts[0].cm.handle_mad(net.now, address("10.0.0.2:1"), &mad(6, lap));
    let (_, sent) = one(&mut net.hosts[0].cm);
    let Message::Apr(apr) = message(&sent) else { panic!() };
    assert_eq!(apr.status_name(), Some("alternate paths are not supported"));
    assert_eq!((apr.local_comm_id, apr.remote_comm_id), (ids[0], ids[1]));
}

#[test]
fn a_peer_that_has_forgotten_a_connection() {
    let mut net = Net::pair(Faults::default(), 13);
    let (_, b) = net.connected();
    // It starts anew, and its queue pairs have the same numbers.
    net.hosts[0] = Host::new("10.0.0.1:4791", Config::new(99));
    let again = net.hosts[0].cm.connect(net.now, &connect(0x11, "10.0.0.2:4791")).unwrap();
    net.run(ms(100));
    let Event::Rejected(no) = net.hosts[0].only() else { panic!() };
    assert_eq!((no.conn, no.reason), (again, Reason::STALE_CONNECTION));
    // The old one is closed, so the next try goes through.
    assert_eq!(net.hosts[1].only(), Event::Disconnected { conn: b.conn, ended: Ended::Stale });
    assert_eq!(net.hosts[1].cm.stats().stale, 1);
    net.connected();
}

#[test]
fn a_peer_that_starts_anew_before_it_is_answered() {
    // The same queue pair, with another ID or with the same one, in another transaction.
    for same_id in [false, true] {
        let mut net = Net::pair(Faults::default(), 22);
        net.hosts[1].cm.listen(SERVICE, 4).unwrap();
        net.hosts[0].cm.connect(net.now, &connect(0x11, "10.0.0.2:4791")).unwrap();
        let (_, first) = one(&mut net.hosts[0].cm);
        let Message::Req(req) = message(&first) else { panic!() };
        let cm = &mut net.hosts[1].cm;
        cm.handle_mad(net.now, address("10.0.0.1:1"), &first);
        let Some(Event::Request(old)) = cm.poll_event() else { panic!() };
        let local_comm_id = if same_id { req.local_comm_id } else { !req.local_comm_id };
        let again = mad(99, Req { local_comm_id, ..req });
        cm.handle_mad(net.now, address("10.0.0.1:1"), &again);
        assert_eq!(cm.poll_event(), Some(Event::Dropped { conn: old.conn }));
        let Some(Event::Request(new)) = cm.poll_event() else { panic!() };
        assert_eq!((new.qpn, mads(cm)), (old.qpn, vec![]));
        cm.accept(net.now, new.conn, &Accept::new(qp(0x22))).unwrap();
        let (_, sent) = one(cm);
        let Message::Rep(rep) = message(&sent) else { panic!() };
        assert_eq!((rep.remote_comm_id, cm.half_open()), (local_comm_id, 1));
    }
}

#[test]
fn an_initiator_that_gives_up() {
    let mut net = Net::pair(Faults::default(), 14);
    net.hosts[1].cm.listen(SERVICE, 1).unwrap();
    let conn = net.hosts[0].cm.connect(net.now, &connect(0x11, "10.0.0.2:4791")).unwrap();
    net.run(ms(1));
    let request = net.hosts[1].request();
    net.hosts[0].cm.disconnect(net.now, conn).unwrap();
    net.run(ms(1));
    assert_eq!(net.hosts[0].only(), Event::Disconnected { conn, ended: Ended::Local });
    let Event::Rejected(no) = net.hosts[1].only() else { panic!() };
    assert_eq!((no.conn, no.reason), (request.conn, Reason::TIMEOUT));
    let too_late = net.hosts[1].cm.accept(net.now, request.conn, &Accept::new(qp(0x22)));
    assert_eq!(too_late, Err(CmError::NotRequested(request.conn)));
}

#[test]
fn a_responder_that_gives_up() {
    let mut net = Net::pair(Faults::default(), 15);
    net.hosts[1].cm.listen(SERVICE, 1).unwrap();
    let conn = net.hosts[0].cm.connect(net.now, &connect(0x11, "10.0.0.2:4791")).unwrap();
    net.run(ms(1));
    let request = net.hosts[1].request();
    let cm = &mut net.hosts[1].cm;
    assert_eq!(cm.disconnect(net.now, request.conn), Err(CmError::Unanswered(request.conn)));
    cm.accept(net.now, request.conn, &Accept::new(qp(0x22))).unwrap();
    // Its REP is lost.
    one(cm);
    cm.disconnect(net.now, request.conn).unwrap();
    net.run(Duration::from_secs(2));
    let ended = Ended::Local;
    assert_eq!(net.hosts[1].only(), Event::Disconnected { conn: request.conn, ended });
    // The initiator asks again, and learns of it.
    let Event::Rejected(no) = net.hosts[0].only() else { panic!() };
    assert_eq!((no.conn, no.reason), (conn, Reason::CONSUMER));
}

#[test]
fn a_disconnect_that_nobody_answers() {
    let mut net = Net::pair(Faults::default(), 16);
    let (a, _) = net.connected();
    net.faults.loss = 1000;
    net.hosts[0].cm.disconnect(net.now, a.conn).unwrap();
    net.run(Duration::from_secs(15));
    assert_eq!(net.hosts[0].only(), Event::Disconnected { conn: a.conn, ended: Ended::TimedOut });
    assert_eq!(net.hosts[0].sent(cm::DREQ), 6);
    // The other end learns when it disconnects, though its peer knows nothing any more.
    net.run(Duration::from_secs(10));
    net.faults.loss = 0;
    let b = ConnId(1);
    net.hosts[1].cm.disconnect(net.now, b).unwrap();
    net.run(ms(10));
    assert_eq!(net.hosts[1].only(), Event::Disconnected { conn: b, ended: Ended::Local });
}

#[test]
fn a_listener_that_goes() {
    let mut net = Net::pair(Faults::default(), 17);
    net.hosts[1].cm.listen(SERVICE, 4).unwrap();
    assert_eq!(net.hosts[1].cm.listen(SERVICE, 4), Err(CmError::InUse(SERVICE)));
    let conn = net.hosts[0].cm.connect(net.now, &connect(0x11, "10.0.0.2:4791")).unwrap();
    net.run(ms(1));
    let request = net.hosts[1].request();
    assert!(net.hosts[1].cm.unlisten(SERVICE));
    assert!(!net.hosts[1].cm.unlisten(SERVICE));
    net.run(ms(1));
    assert_eq!(net.hosts[1].only(), Event::Dropped { conn: request.conn });
    let Event::Rejected(no) = net.hosts[0].only() else { panic!() };
    assert_eq!((no.conn, no.reason), (conn, Reason::INVALID_SERVICE_ID));
    assert_eq!(net.hosts[1].cm.connections(), 0);
}

fn token(udp_port: u16, out_of_order: bool) -> Token {
    Token { udp_port, out_of_order, window: 100_000 + u32::from(udp_port) }
}

#[test]
fn two_ports_of_one_address_know_each_other_by_their_tokens() {
    for (order_a, order_b) in [(true, true), (true, false), (false, true)] {
        let hosts =
            vec![Host::new("[::1]:4791", Config::new(1)), Host::new("[::1]:4792", Config::new(2))];
        let mut net = Net::new(hosts, Faults::default(), 18);
        // The client sits at the port that its peer could not guess.
        net.hosts[0].cm.listen(SERVICE, 1).unwrap();
        let ip = address("[::1]:0").ip();
        let wish = Connect {
            token: Some(token(4792, order_a)),
            private_data: &[7; 44],
            ..Connect::new(address("[::1]:4791"), ip, SERVICE, qp(0x11))
        };
        net.hosts[1].cm.connect(net.now, &wish).unwrap();
        net.run(ms(1));
        let request = net.hosts[0].request();
        assert_eq!(request.token, Some(token(4792, order_a)));
        assert_eq!(request.private_data, [7; 44]);
        assert_eq!(request.peer, address("[::1]:4792"));
        let yes = Accept {
            token: Some(token(4791, order_b)),
            private_data: &[8; 184],
            ..Accept::new(qp(0x22))
        };
        net.hosts[0].cm.accept(net.now, request.conn, &yes).unwrap();
        net.run(ms(1));
        let (b, a) = (net.hosts[0].established(), net.hosts[1].established());
        assert_eq!((a.token, b.token), (yes.token, wish.token));
        assert_eq!((a.out_of_order, b.out_of_order), (order_a && order_b, order_a && order_b));
        assert_eq!((a.peer, b.peer), (address("[::1]:4791"), address("[::1]:4792")));
        assert_eq!(a.private_data, [8; 184]);
        net.hosts[0].cm.disconnect(net.now, b.conn).unwrap();
        net.run(ms(10));
        assert!(net.nowhere.is_empty(), "{:?}", net.nowhere);
    }
}

/// Host 0 has a REQ out, with these wishes; what it sent is given back.
fn asked(wish: &Connect<'_>) -> (Cm, ConnId, [u8; MAD_LEN]) {
    let mut cm = Cm::new(Config::new(1));
    let conn = cm.connect(Instant::ZERO, wish).unwrap();
    let (_, req) = one(&mut cm);
    (cm, conn, req)
}

#[test]
fn a_token_that_nobody_asked_for_is_private_data() {
    let (mut cm, _, req) = asked(&connect(0x11, "10.0.0.2:4791"));
    let mut data = vec![0; 184];
    data.extend(token(9999, true).to_bytes());
    let rep = Rep {
        local_comm_id: 5,
        remote_comm_id: message(&req).local_comm_id().unwrap(),
        private_data: &data,
        ..Rep::default()
    };
    cm.handle_mad(Instant::ZERO, address("10.0.0.2:1"), &mad(1, rep));
    let Some(Event::Established(ready)) = cm.poll_event() else { panic!() };
    assert_eq!((ready.token, ready.private_data), (None, data));
    assert_eq!(ready.peer, address("10.0.0.2:4791"));
}

#[test]
fn depths_and_retries_are_what_both_can() {
    let mut net = Net::pair(Faults::default(), 23);
    net.hosts[1].cm.listen(SERVICE, 1).unwrap();
    let own = LocalQp {
        responder_resources: 3,
        initiator_depth: 50,
        rnr_retry_count: 2,
        flow_control: true,
        ..qp(0x11)
    };
    let wish = Connect { qp: own, retry_count: 4, ..connect(0, "10.0.0.2:4791") };
    net.hosts[0].cm.connect(net.now, &wish).unwrap();
    net.run(ms(1));
    let request = net.hosts[1].request();
    assert_eq!((request.responder_resources, request.initiator_depth), (3, 50));
    let theirs =
        LocalQp { responder_resources: 20, initiator_depth: 100, rnr_retry_count: 5, ..qp(0x22) };
    let yes = Accept { target_ack_delay: 19, ..Accept::new(theirs) };
    net.hosts[1].cm.accept(net.now, request.conn, &yes).unwrap();
    let (_, sent) = one(&mut net.hosts[1].cm);
    let Message::Rep(rep) = message(&sent) else { panic!() };
    // Not more than the other side serves.
    assert_eq!((rep.responder_resources, rep.initiator_depth), (20, 3));
    net.hosts[0].cm.handle_mad(net.now, address("10.0.0.2:1"), &sent);
    net.run(ms(1));
    let (a, b) = (net.hosts[0].established(), net.hosts[1].established());
    assert_eq!((a.max_rd_atomic, a.max_dest_rd_atomic), (20, 3));
    assert_eq!((b.max_rd_atomic, b.max_dest_rd_atomic), (3, 20));
    // Each makes the RNR retries that the other asks for; both the initiator's other ones.
    assert_eq!((a.rnr_retry_count, b.rnr_retry_count), (5, 2));
    assert_eq!((a.retry_count, b.retry_count), (4, 4));
    assert_eq!((a.flow_control, b.flow_control), (false, true));
    // The delay counts where it is as long as the way.
    assert_eq!((a.ack_timeout, b.ack_timeout), (20, 19));
}

#[test]
fn a_rep_is_sent_as_the_initiator_wishes() {
    let (_, _, sent) = asked(&connect(0x11, "10.0.0.2:4791"));
    let Message::Req(req) = message(&sent) else { panic!() };
    // It answers within 268 ms, and wants no more than 3 more.
    let req = Req { local_cm_timeout: 16, max_cm_retries: 3, ..req };
    let mut cm = Cm::new(Config::new(2));
    cm.listen(SERVICE, 1).unwrap();
    let mut now = Instant::ZERO;
    cm.handle_mad(now, address("10.0.0.1:1"), &mad(1, req));
    let Some(Event::Request(request)) = cm.poll_event() else { panic!() };
    cm.accept(now, request.conn, &Accept::new(qp(0x22))).unwrap();
    let mut waits = Vec::new();
    while cm.poll_event().is_none() {
        let next = cm.poll_timeout().unwrap();
        waits.push((next - now).as_millis());
        now = next;
        cm.handle_timeout(now);
    }
    assert_eq!(waits, [250, 268, 268, 268]);
    // Four REPs and a REJ.
    assert_eq!(mads(&mut cm).len(), 5);
}

#[test]
fn asking_again_does_not_give_the_program_more_time() {
    let (_, _, req) = asked(&connect(0x11, "10.0.0.2:4791"));
    let mut cm = Cm::new(Config::new(2));
    cm.listen(SERVICE, 1).unwrap();
    let from = address("10.0.0.1:1");
    cm.handle_mad(Instant::ZERO, from, &req);
    cm.handle_mad(Instant::ZERO, from, &req);
    let end = cm.poll_timeout().unwrap();
    assert_eq!((end - Instant::ZERO).as_secs(), 68);
    cm.handle_mad(Instant::ZERO + ms(1000), from, &req);
    assert_eq!(cm.poll_timeout(), Some(end));
    let all = mads(&mut cm);
    assert!(all.len() == 2 && all[0] == all[1]);
    assert!(matches!(message(&all[0].1), Message::Mra(_)));
}

#[test]
fn a_rep_with_names_of_another_connection() {
    for same_id in [false, true] {
        let mut net = Net::pair(Faults::default(), 24);
        let (a, _) = net.connected();
        let their_id = *net.hosts[1].ids.keys().next().unwrap();
        let cm = &mut net.hosts[0].cm;
        let again = cm.connect(net.now, &connect(0x12, "10.0.0.2:4791")).unwrap();
        let (_, req) = one(cm);
        let rep = Rep {
            local_comm_id: if same_id { their_id } else { !their_id },
            remote_comm_id: message(&req).local_comm_id().unwrap(),
            qpn: if same_id { Qpn(0x23) } else { a.remote_qpn },
            ..Rep::default()
        };
        cm.handle_mad(net.now, address("10.0.0.2:1"), &mad(1, rep));
        let want = if same_id { Reason::DUPLICATE_COMM_ID } else { Reason::STALE_CONNECTION };
        let Some(Event::Rejected(no)) = cm.poll_event() else { panic!() };
        assert_eq!((no.conn, no.reason), (again, want));
        // The old one is closed, the new one rejected.
        let sent = mads(cm);
        let [Message::Dreq(dreq), Message::Rej(rej)] = [message(&sent[0].1), message(&sent[1].1)]
        else {
            panic!("{sent:?}")
        };
        assert_eq!((dreq.remote_comm_id, rej.reason, rej.message), (their_id, want, Rej::REP));
        net.launch(net.hosts[0].addr, net.hosts[1].addr, sent[0].1);
        net.run(ms(10));
        assert_eq!(net.hosts[0].only(), Event::Disconnected { conn: a.conn, ended: Ended::Stale });
    }
}

#[test]
fn strangers_get_no_token_and_long_data_leaves_no_room() {
    // No token in the REQ, so none in the REP.
    let mut net = Net::pair(Faults::default(), 19);
    net.hosts[1].cm.listen(SERVICE, 1).unwrap();
    net.hosts[0].cm.connect(net.now, &connect(0x11, "10.0.0.2:4791")).unwrap();
    net.run(ms(1));
    let request = net.hosts[1].request();
    assert_eq!((request.token, request.private_data.len()), (None, 56));
    let yes = Accept { token: Some(token(4791, true)), ..Accept::new(qp(0x22)) };
    net.hosts[1].cm.accept(net.now, request.conn, &yes).unwrap();
    net.run(ms(1));
    let ready = net.hosts[0].established();
    assert_eq!((ready.token, ready.private_data), (None, vec![0; 196]));
    assert!(!net.hosts[1].established().out_of_order);
    // 45 octets and a token are too many for the 56.
    let wish = Connect {
        private_data: &[9; 45],
        token: Some(token(4791, true)),
        ..connect(0x12, "10.0.0.2:4791")
    };
    net.hosts[0].cm.connect(net.now, &wish).unwrap();
    net.run(ms(1));
    let request = net.hosts[1].request();
    assert_eq!((request.token, &request.private_data[..45]), (None, &[9; 45][..]));
}

#[test]
fn private_data_without_rdma_cm() {
    let mut net = Net::pair(Faults::default(), 20);
    let service_id = 0x1122_3344_5566_7788;
    net.hosts[1].cm.listen(service_id, 1).unwrap();
    let wish = Connect { service_id, private_data: &[3; 92], ..connect(0x11, "10.0.0.2:4791") };
    net.hosts[0].cm.connect(net.now, &wish).unwrap();
    net.run(ms(1));
    let request = net.hosts[1].request();
    assert_eq!((request.ip, request.private_data), (None, vec![3; 92]));
}

#[test]
fn calls_that_ask_for_something_wrong() {
    let mut cm = Cm::new(Config { max_connections: 1, ..Config::new(1) });
    let now = Instant::ZERO;
    let good = connect(1, "10.0.0.2:4791");
    let long = Connect { private_data: &[0; 57], ..good.clone() };
    assert_eq!(cm.connect(now, &long), Err(CmError::PrivateData { len: 57, room: 56 }));
    assert_eq!(cm.connect(now, &Connect { mtu: 1500, ..good.clone() }), Err(CmError::Mtu(1500)));
    let six = Connect { peer: address("[::1]:4791"), ..good.clone() };
    let error = cm.connect(now, &six).unwrap_err();
    assert_eq!(error.to_string(), "10.0.0.1 and ::1 are not of the same IP version");
    assert_eq!((mads(&mut cm), cm.connections()), (vec![], 0));
    cm.connect(now, &good).unwrap();
    assert_eq!(cm.connect(now, &good), Err(CmError::TooMany(1)));
    let unknown = ConnId(77);
    assert_eq!(cm.disconnect(now, unknown), Err(CmError::Unknown(unknown)));
    assert_eq!(cm.accept(now, unknown, &Accept::new(qp(1))), Err(CmError::Unknown(unknown)));
    let long = Datagrams { private_data: vec![0; 137], ..datagrams() };
    let error = CmError::PrivateData { len: 137, room: 136 };
    assert_eq!(cm.listen_datagrams(UD_SERVICE, long), Err(error));
}

fn datagrams() -> Datagrams {
    Datagrams { qpn: Qpn(0x33), qkey: QKey(0x0123_4567), private_data: b"here".to_vec() }
}

#[test]
fn ud_services_are_found() {
    for seed in 0..50 {
        let faults = Faults { loss: 200, dup: 200, delay: 100_000 };
        let mut net = Net::pair(faults, seed);
        net.hosts[1].cm.listen_datagrams(UD_SERVICE, datagrams()).unwrap();
        let wish = Resolve {
            peer: address("10.0.0.2:4791"),
            local_ip: IpAddr::from([10, 0, 0, 1]),
            local_port: 1000,
            service_id: UD_SERVICE,
            private_data: &[5; 168],
            token: Some(token(4791, false)),
        };
        let found = net.hosts[0].cm.resolve(net.now, &wish).unwrap();
        let none = Resolve { service_id: UD_SERVICE + 1, ..wish.clone() };
        let missed = net.hosts[0].cm.resolve(net.now, &none).unwrap();
        net.run(Duration::from_secs(60));
        let mut told = net.hosts[0].take();
        told.sort_by_key(|event| matches!(event, Event::Unresolved { .. }));
        let [Event::Resolved { conn, peer, qpn, qkey, private_data }, unresolved] = &told[..]
        else {
            panic!("{told:?}")
        };
        assert_eq!((*conn, *qpn, *qkey), (found, Qpn(0x33), QKey(0x0123_4567)));
        assert_eq!((*peer, &private_data[..4]), (wish.peer, &b"here"[..]));
        let status = SidrRep::UNSUPPORTED;
        assert_eq!(*unresolved, Event::Unresolved { conn: missed, status });
        // The service learns of each question, where it came from, and how to answer packets.
        let asked = net.hosts[1].take();
        assert!(!asked.is_empty());
        for event in asked {
            let Event::Queried { peer, ip, token: t, private_data, .. } = event else { panic!() };
            assert_eq!((peer, t), (net.hosts[0].addr, wish.token));
            assert_eq!((ip.unwrap().src_port, private_data), (1000, vec![5; 168]));
        }
        assert_eq!((net.hosts[0].cm.connections(), net.hosts[1].cm.connections()), (0, 0));
    }
}

// Strangers.

#[test]
fn messages_from_another_address_do_nothing() {
    let mut net = Net::pair(Faults::default(), 21);
    let (a, _) = net.connected();
    let ids: Vec<u32> = net.hosts.iter().map(|host| *host.ids.keys().next().unwrap()).collect();
    let dreq = cm::Dreq {
        local_comm_id: ids[1],
        remote_comm_id: ids[0],
        remote_qpn: a.local_qpn,
        ..cm::Dreq::default()
    };
    let rej =
        Rej { local_comm_id: ids[1], remote_comm_id: ids[0], message: Rej::NONE, ..Rej::default() };
    let cm = &mut net.hosts[0].cm;
    for mad in [mad(1, dreq), mad(1, rej)] {
        cm.handle_mad(net.now, address("10.0.0.3:4791"), &mad);
    }
    // From the right address, but for another queue pair.
    let other = cm::Dreq { remote_qpn: Qpn(0x12), ..dreq };
    cm.handle_mad(net.now, address("10.0.0.2:4791"), &mad(1, other));
    assert_eq!((mads(cm), cm.poll_event(), cm.stats().wrong_source), (vec![], None, 2));
    cm.handle_mad(net.now, address("10.0.0.2:9"), &mad(1, dreq));
    let over = Event::Disconnected { conn: a.conn, ended: Ended::Peer };
    assert_eq!((mads(cm).len(), cm.poll_event()), (1, Some(over)));
}

/// A REQ of some host, as it would make it.
fn foreign_req(n: u32) -> (SocketAddr, [u8; MAD_LEN]) {
    let mut cm = Cm::new(Config::new(n.into()));
    let ip = IpAddr::from([10, 1, (n >> 8) as u8, n as u8]);
    let wish = Connect::new(address("10.0.0.2:4791"), ip, SERVICE, qp(n & 0xff_ffff));
    cm.connect(Instant::ZERO, &wish).unwrap();
    (SocketAddr::new(ip, SOURCE_PORT), one(&mut cm).1)
}

#[test]
fn the_oldest_half_open_request_makes_room() {
    let config = Config { max_half_open: 20, max_queued: 64, ..Config::new(1) };
    let mut cm = Cm::new(config);
    cm.listen(SERVICE, 8).unwrap();
    let now = Instant::ZERO;
    let mut requests = Vec::new();
    let mut dropped = Vec::new();
    for n in 0..1000 {
        let (from, req) = foreign_req(n);
        cm.handle_mad(now, from, &req);
        while let Some(event) = cm.poll_event() {
            match event {
                Event::Request(request) => requests.push(request.conn),
                Event::Dropped { conn } => dropped.push(conn),
                other => panic!("{other:?}"),
            }
        }
        assert!(cm.half_open() <= 8 && cm.connections() <= 8);
        assert!(mads(&mut cm).len() <= 1, "one REJ to who was dropped");
    }
    assert_eq!((requests.len(), dropped.len()), (1000, 992));
    assert_eq!(requests[..992], dropped);
    assert_eq!(cm.stats().crowded, 992);
    // Once accepted they do not count for the backlog, but are half open still.
    for &conn in &requests[992..] {
        cm.accept(now, conn, &Accept::new(qp(conn.0 as u32))).unwrap();
    }
    for n in 1000..1012 {
        let (from, req) = foreign_req(n);
        cm.handle_mad(now, from, &req);
        let Some(Event::Request(request)) = cm.poll_event() else { panic!() };
        cm.accept(now, request.conn, &Accept::new(qp(request.conn.0 as u32))).unwrap();
    }
    assert_eq!((cm.half_open(), cm.poll_event()), (20, None));
    let (from, req) = foreign_req(1012);
    cm.handle_mad(now, from, &req);
    assert_eq!(cm.poll_event(), Some(Event::Dropped { conn: requests[992] }));
    assert_eq!(cm.half_open(), 20);
}

#[test]
fn a_driver_that_fetches_nothing_costs_nothing() {
    let config = Config { max_half_open: 50, max_queued: 100, ..Config::new(1) };
    let mut cm = Cm::new(config);
    cm.listen(SERVICE, 10_000).unwrap();
    for n in 0..1000 {
        let (from, req) = foreign_req(n);
        cm.handle_mad(Instant::ZERO, from, &req);
    }
    let events = std::iter::from_fn(|| cm.poll_event()).count();
    assert!(events <= 101, "{events}");
    assert!(mads(&mut cm).len() <= 100);
    assert!(cm.stats().crowded > 900);
    // Answers that keep no state wait no longer than others: the oldest are lost.
    cm.unlisten(SERVICE);
    mads(&mut cm);
    for n in 0..1000 {
        let (from, req) = foreign_req(n);
        cm.handle_mad(Instant::ZERO, from, &req);
    }
    let (to, _) = mads(&mut cm)[0];
    assert_eq!((cm.stats().overflowed, to), (900, address("10.1.3.132:4791")));
}

#[test]
fn what_is_over_makes_room_first() {
    let config = Config { max_connections: 10, ..Config::new(1) };
    let mut cm = Cm::new(config);
    cm.listen(SERVICE, 10).unwrap();
    let now = Instant::ZERO;
    for n in 0..100 {
        let (from, req) = foreign_req(n);
        cm.handle_mad(now, from, &req);
        let Some(Event::Request(request)) = cm.poll_event() else { panic!() };
        // One of ten stays.
        if n % 10 == 0 && n < 90 {
            cm.accept(now, request.conn, &Accept::new(qp(n))).unwrap();
            cm.handle_established(Qpn(n));
            assert!(matches!(cm.poll_event(), Some(Event::Established(_))));
        } else {
            cm.reject(now, request.conn, &Reject::consumer(b"")).unwrap();
        }
        mads(&mut cm);
        assert!(cm.connections() <= 10);
    }
    // Nine stay, and one place turns.
    let (from, req) = foreign_req(100);
    cm.handle_mad(now, from, &req);
    let Some(Event::Request(request)) = cm.poll_event() else { panic!() };
    cm.accept(now, request.conn, &Accept::new(qp(100))).unwrap();
    cm.handle_established(Qpn(100));
    mads(&mut cm);
    let (from, req) = foreign_req(101);
    cm.handle_mad(now, from, &req);
    let (_, sent) = one(&mut cm);
    let Message::Rej(rej) = message(&sent) else { panic!() };
    assert_eq!(rej.reason, Reason::NO_RESOURCES);
}

#[test]
fn any_mads_do_not_panic_and_cost_no_more_than_allowed() {
    for seed in 0..40 {
        let mut rng = Rng::new(seed);
        let config = Config {
            max_connections: 64,
            max_half_open: 16,
            max_queued: 32,
            time_wait: ms(50),
            ..Config::new(seed)
        };
        let mut cm = Cm::new(config);
        cm.listen(SERVICE, 8).unwrap();
        cm.listen_datagrams(UD_SERVICE, datagrams()).unwrap();
        let mut now = Instant::ZERO;
        let mut told = BTreeMap::new();
        // IDs that were seen, so that some messages mean something.
        let mut ids: Vec<u32> = vec![0, 1];
        let mut last = None;
        let mut kinds = BTreeSet::new();
        for _ in 0..3000 {
            let ip = IpAddr::from([10, 0, 0, 1 + rng.below(3) as u8]);
            let mut octets = rng.bytes(MAD_LEN);
            octets[..16].copy_from_slice(&[1, 7, 2, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1]);
            octets[16..24].copy_from_slice(&[0, 0x10 + rng.below(11) as u8, 0, 0, 0, 0, 0, 0]);
            let pick = |rng: &mut Rng| ids[rng.below(ids.len() as u64) as usize].to_be_bytes();
            let (first, second) = (pick(&mut rng), pick(&mut rng));
            octets[24..28].copy_from_slice(&first);
            octets[28..32].copy_from_slice(&second);
            match octets[17] {
                // A REQ that may be taken.
                0x10 => {
                    let service = if rng.one_in(4) { UD_SERVICE } else { SERVICE };
                    octets[32..40].copy_from_slice(&service.to_be_bytes());
                    octets[56..60].copy_from_slice(&[0, 0, rng.below(4) as u8, 1]);
                    octets[67] &= 0xf9;
                    octets[74] = octets[74] & 0x0f | 0x30;
                    octets[164..166].copy_from_slice(&[0, 0x40]);
                }
                0x15 => octets[32..35].copy_from_slice(&[0, 0, rng.below(8) as u8]),
                0x17 => {
                    octets[32..40].copy_from_slice(&UD_SERVICE.to_be_bytes());
                    octets[40..42].copy_from_slice(&[0, 0x40]);
                }
                _ => {}
            }
            if rng.one_in(20) {
                octets.truncate(rng.below(256) as usize);
            }
            cm.handle_mad(now, SocketAddr::new(ip, 9), &octets);
            match rng.below(10) {
                0 => {
                    let wish = connect(rng.below(8) as u32, "10.0.0.2:4791");
                    last = cm.connect(now, &wish).ok().or(last);
                }
                1 => {
                    let _ = last.map(|id| cm.disconnect(now, id));
                }
                2 => cm.handle_established(Qpn(rng.below(8) as u32)),
                _ => {}
            }
            now = now + ms(rng.below(100));
            cm.handle_timeout(now);
            assert!(cm.poll_timeout().is_none_or(|at| at > now));
            for (to, sent) in mads(&mut cm) {
                assert_ne!(to.port(), 9);
                ids.extend(message(&sent).local_comm_id());
            }
            ids.splice(2..2 + ids.len().saturating_sub(12), []);
            while let Some(event) = cm.poll_event() {
                follow(&mut told, &event);
                kinds.insert(format!("{:?}", std::mem::discriminant(&event)));
                if let Event::Request(request) = event {
                    last = Some(request.conn);
                    if rng.one_in(2) {
                        let yes = Accept::new(qp(rng.below(8) as u32));
                        cm.accept(now, request.conn, &yes).unwrap();
                    } else if rng.one_in(2) {
                        cm.reject(now, request.conn, &Reject::mtu(256)).unwrap();
                        told.get_mut(&request.conn).unwrap().rejected_by_us = true;
                    }
                }
            }
            assert!(cm.connections() <= 64 && cm.half_open() <= 16);
        }
        assert!(kinds.len() >= 6, "{kinds:?}");
    }
}

// The Linux kernel's own messages.

/// A communication management MAD of a capture: when, whence, whither, what.
#[derive(Debug, Clone)]
struct Seen {
    at: Instant,
    from: SocketAddr,
    to: IpAddr,
    mad: [u8; MAD_LEN],
}

impl Seen {
    fn message(&self) -> Message<'_> {
        message(&self.mad)
    }

    fn tid(&self) -> u64 {
        Mad::parse(&self.mad).unwrap().header.tid()
    }
}

/// What went to QP 1 in a pcap file of Ethernet frames.
fn seen(file: &Path) -> Vec<Seen> {
    let octets = std::fs::read(file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
    let word = |at: usize| u32::from_le_bytes(octets[at..at + 4].try_into().unwrap());
    assert!([0xa1b2_c3d4, 0xa1b2_3c4d].contains(&word(0)), "{}", file.display());
    let unit = if word(0) == 0xa1b2_3c4d { 1 } else { 1000 };
    let (mut at, mut found, mut start) = (24, Vec::new(), None);
    while at < octets.len() {
        let captured = word(at + 8) as usize;
        let nanos = u64::from(word(at)) * 1_000_000_000 + u64::from(word(at + 4)) * unit;
        let frame = &octets[at + 16..at + 16 + captured];
        at += 16 + captured;
        let array = |at: usize| <[u8; 16]>::try_from(&frame[at..at + 16]).unwrap();
        let four = |at: usize| <[u8; 4]>::try_from(&frame[at..at + 4]).unwrap();
        let (from, to, udp): (IpAddr, IpAddr, usize) = match frame[12..14] {
            [8, 0] if frame[23] == 17 => (four(26).into(), four(30).into(), 34),
            [0x86, 0xdd] if frame[20] == 17 => (array(22).into(), array(38).into(), 54),
            _ => continue,
        };
        let bth = udp + 8;
        let gsi = frame.len() >= bth + 276
            && frame[udp + 2..udp + 4] == [0x12, 0xb7]
            && frame[bth] == 0x64
            && frame[bth + 5..bth + 8] == [0, 0, 1];
        if !gsi {
            continue;
        }
        let port = u16::from_be_bytes([frame[udp], frame[udp + 1]]);
        let start = *start.get_or_insert(nanos);
        found.push(Seen {
            at: Instant::from_nanos(nanos - start),
            from: SocketAddr::new(from, port),
            to,
            mad: frame[bth + 20..bth + 276].try_into().unwrap(),
        });
    }
    found
}

/// The captures that come with the tree, and all others of the kernel where they are at hand.
fn captures() -> Vec<Vec<Seen>> {
    let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("../pcaps");
    let names = ["rping", "sizes", "ip6_mix", "udaddy", "reject", "no_listener", "rnr", "reorder"];
    let mut files: Vec<_> =
        names.iter().map(|name| shipped.join(format!("roce_{name}.pcap"))).collect();
    if let Some(folder) = shared("captures/kernel") {
        let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
        files.extend(entries.filter(|path| path.extension().is_some_and(|end| end == "pcap")));
    }
    let all: Vec<_> = files.iter().map(|file| seen(file)).filter(|all| !all.is_empty()).collect();
    assert!(all.len() >= names.len());
    all
}

/// Our IDs and theirs for the same connection.
#[derive(Default)]
struct Names(BTreeMap<u32, u32>);

impl Names {
    fn put(&self, mad: &mut [u8; MAD_LEN], at: usize) {
        let name = u32::from_be_bytes(mad[at..at + 4].try_into().unwrap());
        if let Some(other) = self.0.get(&name) {
            mad[at..at + 4].copy_from_slice(&other.to_be_bytes());
        }
    }

    /// The MAD, with these names put for their others, wherever one stands.
    fn translate(&self, mad: &[u8; MAD_LEN]) -> [u8; MAD_LEN] {
        let mut out = *mad;
        let both =
            message(mad).remote_comm_id().is_some() && message(mad).local_comm_id().is_some();
        self.put(&mut out, 24);
        if both {
            self.put(&mut out, 28);
        }
        out
    }
}

/// Takes out the first of `waiting` that is the kind of message that `like` is.
#[track_caller]
fn take_like(
    waiting: &mut Vec<(SocketAddr, [u8; MAD_LEN])>,
    like: Message<'_>,
) -> (SocketAddr, [u8; MAD_LEN]) {
    let found = waiting.iter().position(|(_, mad)| message(mad).attribute() == like.attribute());
    waiting.remove(found.unwrap_or_else(|| panic!("{waiting:?} instead of {like:?}")))
}

/// Both ends may disconnect at once: then the server's DREQ left before the client's came, though
/// a capture at the client has them the other way round.
fn as_the_server_saw_it(seen: &[Seen]) -> Vec<Seen> {
    let mut seen = seen.to_vec();
    let server = seen[0].to;
    for i in 1..seen.len() {
        let (Message::Dreq(theirs), Message::Dreq(own)) =
            (seen[i - 1].message(), seen[i].message())
        else {
            continue;
        };
        if seen[i].from.ip() == server && own.remote_comm_id == theirs.local_comm_id {
            seen.swap(i - 1, i);
        }
    }
    seen
}

/// What a REP of the kernel says, as an answer of ours.
fn as_accept<'a>(rep: &Rep<'a>) -> Accept<'a> {
    let qp = LocalQp {
        qpn: rep.qpn,
        start_psn: rep.start_psn,
        responder_resources: rep.responder_resources,
        initiator_depth: rep.initiator_depth,
        rnr_retry_count: rep.rnr_retry_count,
        srq: rep.srq,
        flow_control: rep.flow_control,
    };
    let target_ack_delay = rep.target_ack_delay;
    Accept { target_ack_delay, private_data: rep.private_data, ..Accept::new(qp) }
}

#[test]
fn in_the_place_of_the_kernels_server() {
    let mut counts: BTreeMap<u16, usize> = BTreeMap::new();
    for seen in captures() {
        let seen = as_the_server_saw_it(&seen);
        let server = seen[0].to;
        let guid = seen.iter().find_map(|seen| match seen.message() {
            Message::Rep(rep) => Some(rep.ca_guid),
            _ => None,
        });
        let mut cm = Cm::new(Config { ca_guid: guid.unwrap_or(0), ..Config::new(5) });
        for one in &seen {
            // Who listens is what the answers say.
            match one.message() {
                Message::Req(req) => {
                    let nobody = |seen: &Seen| match seen.message() {
                        Message::Rej(rej) => {
                            rej.reason == Reason::INVALID_SERVICE_ID
                                && rej.remote_comm_id == req.local_comm_id
                        }
                        _ => false,
                    };
                    if !seen.iter().any(nobody) {
                        let _ = cm.listen(req.service_id, 8);
                    }
                }
                Message::SidrRep(rep) => {
                    let service =
                        Datagrams { qpn: rep.qpn, qkey: rep.qkey, private_data: Vec::new() };
                    let _ = cm.listen_datagrams(rep.service_id, service);
                }
                _ => {}
            }
        }
        // Theirs by ours, ours by theirs; connections by their ID.
        let (mut ours, mut theirs) = (Names::default(), Names::default());
        let mut conns: BTreeMap<u64, ConnId> = BTreeMap::new();
        let mut requests: BTreeMap<u64, Request> = BTreeMap::new();
        let (mut told, mut waiting) = (BTreeMap::new(), Vec::new());
        for one in &seen {
            let _ = cm.poll_timeout().filter(|&at| at <= one.at).map(|_| cm.handle_timeout(one.at));
            if one.from.ip() != server {
                cm.handle_mad(one.at, one.from, &ours.translate(&one.mad));
            } else {
                // What a program does, the capture's did.
                let request = requests.get(&one.tid()).map(|request| request.conn);
                match (one.message(), request) {
                    (Message::Rep(rep), Some(conn)) => {
                        let _ = cm.accept(one.at, conn, &as_accept(&rep));
                    }
                    (Message::Rej(rej), Some(conn)) if rej.reason == Reason::CONSUMER => {
                        let no = Reject::consumer(rej.private_data);
                        cm.reject(one.at, conn, &no).unwrap();
                    }
                    (Message::Dreq(dreq), _) => {
                        let conn = conns[&u64::from(dreq.remote_comm_id)];
                        cm.disconnect(one.at, conn).unwrap();
                    }
                    _ => {}
                }
                waiting.extend(mads(&mut cm));
                let (to, mad) = take_like(&mut waiting, one.message());
                assert_eq!(to, SocketAddr::new(one.to, 4791));
                if let (Message::Rep(own), Message::Rep(rxe)) = (message(&mad), one.message()) {
                    ours.0.insert(rxe.local_comm_id, own.local_comm_id);
                    theirs.0.insert(own.local_comm_id, rxe.local_comm_id);
                    let conn = requests[&one.tid()].conn;
                    conns.insert(rxe.remote_comm_id.into(), conn);
                }
                if let (Message::Rej(own), Message::Rej(rxe)) = (message(&mad), one.message()) {
                    theirs.0.insert(own.local_comm_id, rxe.local_comm_id);
                }
                let mut mad = theirs.translate(&mad);
                if let Message::Dreq(_) = one.message() {
                    mad[8..16].copy_from_slice(&one.mad[8..16]);
                }
                // To the last octet.
                assert_eq!(message(&mad), one.message());
                assert_eq!(mad, one.mad);
                *counts.entry(one.message().attribute()).or_default() += 1;
            }
            while let Some(event) = cm.poll_event() {
                follow(&mut told, &event);
                match event {
                    Event::Request(request) => {
                        let Message::Req(req) = one.message() else { panic!() };
                        let (_, data) = one.message().ip_cm().unwrap();
                        assert_eq!(request.private_data, data);
                        let ends = (one.from.ip(), one.to);
                        assert_eq!(request.ip.unwrap().addresses(), Some(ends));
                        assert_eq!(request.peer, SocketAddr::new(one.from.ip(), 4791));
                        assert_eq!((request.qpn, request.start_psn), (req.qpn, req.start_psn));
                        assert_eq!(request.token, None);
                        requests.insert(one.tid(), request);
                    }
                    Event::Established(ready) => {
                        let request = requests.values().find(|r| r.conn == ready.conn).unwrap();
                        assert_eq!(ready.send_psn, request.start_psn);
                        assert_eq!((ready.remote_qpn, ready.mtu), (request.qpn, request.mtu));
                        assert_eq!(
                            (ready.ack_timeout, ready.retry_count),
                            (19, request.retry_count)
                        );
                    }
                    Event::Disconnected { ended, .. } => {
                        assert!(matches!(ended, Ended::Peer | Ended::Local));
                    }
                    Event::Queried { token, peer, .. } => {
                        assert_eq!((token, peer), (None, SocketAddr::new(one.from.ip(), 4791)));
                    }
                    Event::Released { .. } => {}
                    other => panic!("{other:?}"),
                }
            }
        }
        waiting.extend(mads(&mut cm));
        waiting.retain(|(_, mad)| !matches!(message(mad), Message::Mra(_)));
        assert_eq!(waiting, [], "{:?}", seen[0]);
        let ready = told.values().filter(|told: &&Told| told.established.is_some()).count();
        let rtus = seen.iter().filter(|seen| matches!(seen.message(), Message::Rtu(_)));
        let rtus = rtus.map(|seen| seen.mad).collect::<BTreeSet<_>>().len();
        assert_eq!(ready, rtus, "each RTU makes a connection");
    }
    for attribute in [cm::REP, cm::REJ, cm::DREP, cm::SIDR_REP] {
        assert!(counts.contains_key(&attribute), "{counts:?}");
    }
}

#[test]
fn in_the_place_of_the_kernels_client() {
    let mut counts: BTreeMap<u16, usize> = BTreeMap::new();
    for seen in captures() {
        let (Message::Req(_) | Message::SidrReq(_)) = seen[0].message() else { panic!() };
        let (client, server) = (seen[0].from.ip(), seen[0].to);
        let guid = seen.iter().find_map(|seen| match seen.message() {
            Message::Req(req) => Some(req.ca_guid),
            _ => None,
        });
        let mut cm = Cm::new(Config { ca_guid: guid.unwrap_or(0), ..Config::new(6) });
        let (mut ours, mut theirs) = (Names::default(), Names::default());
        let mut conns: BTreeMap<u32, ConnId> = BTreeMap::new();
        let (mut told, mut waiting) = (BTreeMap::new(), Vec::new());
        let (mut before, mut tids) = (BTreeSet::new(), BTreeMap::new());
        let peer = SocketAddr::new(server, 4791);
        for one in &seen {
            // The network has doubled it.
            if !before.insert(one.mad) && one.from.ip() == client {
                continue;
            }
            if one.from.ip() != client {
                cm.handle_mad(one.at, one.from, &ours.translate(&one.mad));
            } else {
                match one.message() {
                    Message::Req(req) if !conns.contains_key(&req.local_comm_id) => {
                        let (ip, data) = one.message().ip_cm().unwrap();
                        let qp = LocalQp {
                            qpn: req.qpn,
                            start_psn: req.start_psn,
                            responder_resources: req.responder_resources,
                            initiator_depth: req.initiator_depth,
                            rnr_retry_count: req.rnr_retry_count,
                            srq: req.srq,
                            flow_control: req.flow_control,
                        };
                        let wish = Connect {
                            local_port: ip.src_port,
                            transport: if req.transport == 0 {
                                Transport::Rc
                            } else {
                                Transport::Uc
                            },
                            mtu: cm::mtu(req.mtu).unwrap(),
                            ack_timeout: req.primary.ack_timeout,
                            retry_count: req.retry_count,
                            traffic_class: req.primary.traffic_class,
                            private_data: data,
                            ..Connect::new(peer, client, req.service_id, qp)
                        };
                        let conn = cm.connect(one.at, &wish).unwrap();
                        conns.insert(req.local_comm_id, conn);
                    }
                    Message::SidrReq(req) => {
                        let (ip, data) = one.message().ip_cm().unwrap();
                        let wish = Resolve {
                            peer,
                            local_ip: client,
                            local_port: ip.src_port,
                            service_id: req.service_id,
                            private_data: data,
                            token: None,
                        };
                        let conn = cm.resolve(one.at, &wish).unwrap();
                        conns.insert(req.request_id, conn);
                    }
                    Message::Dreq(dreq) => {
                        cm.disconnect(one.at, conns[&dreq.local_comm_id]).unwrap();
                    }
                    _ => {}
                }
                waiting.extend(mads(&mut cm));
                let (to, mad) = take_like(&mut waiting, one.message());
                assert_eq!(to, peer);
                let own = message(&mad).local_comm_id().unwrap();
                let rxe = one.message().local_comm_id().unwrap();
                ours.0.insert(rxe, own);
                theirs.0.insert(own, rxe);
                let mut mad = theirs.translate(&mad);
                // The transactions that it begins are its own, and answers are of those they answer.
                let (own_tid, tid) = (Mad::parse(&mad).unwrap().header.tid(), one.tid());
                match one.message() {
                    Message::Rtu(_) => assert_eq!(own_tid, tids[&tid]),
                    Message::Drep(_) => assert_eq!(own_tid, tid),
                    _ => drop(tids.insert(tid, own_tid)),
                }
                mad[8..16].copy_from_slice(&one.mad[8..16]);
                // The flow label is random: 20 bits.
                if let Message::Req(_) = one.message() {
                    mad[112..114].copy_from_slice(&one.mad[112..114]);
                    mad[114] = mad[114] & 0x0f | one.mad[114] & 0xf0;
                }
                assert_eq!(message(&mad), one.message());
                assert_eq!(mad, one.mad);
                *counts.entry(one.message().attribute()).or_default() += 1;
            }
            while let Some(event) = cm.poll_event() {
                follow(&mut told, &event);
                match (event, one.message()) {
                    (Event::Established(ready), Message::Rep(rep)) => {
                        assert_eq!((ready.remote_qpn, ready.send_psn), (rep.qpn, rep.start_psn));
                        assert_eq!(ready.private_data, rep.private_data);
                        assert_eq!((ready.peer, ready.token), (peer, None));
                    }
                    (Event::Rejected(no), Message::Rej(rej)) => {
                        assert_eq!(no.reason, rej.reason);
                        assert_eq!(no.private_data, rej.private_data);
                    }
                    (Event::Resolved { qpn, qkey, .. }, Message::SidrRep(rep)) => {
                        assert_eq!((qpn, qkey), (rep.qpn, rep.qkey));
                        assert_eq!(qkey, QKey(0x0123_4567));
                    }
                    (Event::Disconnected { .. }, Message::Drep(_) | Message::Dreq(_)) => {}
                    other => panic!("{other:?}"),
                }
            }
        }
        waiting.extend(mads(&mut cm));
        assert_eq!(waiting, [], "{:?}", seen[0]);
        assert!(told.values().all(|told| told.over.is_some() || told.established.is_some()));
        assert_eq!(told.len(), conns.len());
    }
    for attribute in [cm::REQ, cm::RTU, cm::DREQ, cm::SIDR_REQ] {
        assert!(counts.contains_key(&attribute), "{counts:?}");
    }
}
