//! Ports over a network in virtual time that loses, doubles, reorders and damages packets: many
//! connections, all operations both ways, their ends; hostile packets; and packets of Linux rxe.

use std::{
    cmp::Reverse,
    collections::BinaryHeap,
    net::{IpAddr, SocketAddr},
    path::Path,
    time::Duration,
};

use userdma_proto::{
    mem::{NoMemory, PdId},
    roce::{
        self, PathMtu, Port, QpAttr, Train,
        cm::{self, Awaited, Datagrams, Ended, Reject, Resolve},
        port::{Accept, Config, Connect, Event, IcrcPolicy, Limits, PortError, Request},
    },
    time::Instant,
    verbs::{
        Access, QpState, QpType, RecvWr, RemoteAddr, SendOp, SendWr, Sge, UdDest, Wc, WcOpcode,
        WcStatus,
    },
    wire::{
        ids::{LKey, Psn, QKey, Qpn, RKey},
        mad::{
            Mad,
            cm::{Message, PortSpace, Reason as Rejection},
        },
        roce::{
            Packet, UDP_PORT,
            bth::Bth,
            feth::{Placement, Selectivity},
            icrc::{Icrc, Identification, PathV4, PathV6, verify_unknown_id},
        },
    },
};
use userdma_tests::{PD, PlainMemory, Rng};
use zerocopy::FromBytes;

const SERVICE: u64 = PortSpace::TCP.service_id(7174);

fn addr(text: &str) -> SocketAddr {
    text.parse().expect("an address")
}

/// One in so many; 0 is never.
#[derive(Debug, Clone, Copy, Default)]
struct Faults {
    loss: u64,
    dup: u64,
    reorder: u64,
    corrupt: u64,
}

/// How a host's kernel fills what a UDP socket does not show.
#[derive(Debug, Clone, Copy)]
enum Ident {
    /// As a plain socket of Linux: 0, 1, 2 in a train, and DF.
    Socket,
    /// Any, and no DF.
    Free,
}

struct Host {
    port: Port,
    mem: PlainMemory,
    addr: SocketAddr,
    ident: Ident,
    limits: Limits,
    wcs: Vec<(Qpn, Wc)>,
    events: Vec<Event>,
}

impl Host {
    fn new(config: Config) -> Self {
        Self {
            addr: config.local,
            port: Port::new(config),
            mem: PlainMemory::default(),
            ident: Ident::Socket,
            limits: Limits::default(),
            wcs: Vec::new(),
            events: Vec::new(),
        }
    }

    fn qp(&mut self, kind: QpType) -> Qpn {
        let mut config = roce::Config::new(kind, PdId(PD), Qpn(0));
        (config.max_send_wr, config.max_recv_wr) = (64, 64);
        self.port.create_qp(config).expect("room for a queue pair")
    }

    fn state(&self, qpn: Qpn) -> QpState {
        self.port.qp(qpn).expect("a queue pair").state()
    }

    fn requests(&self) -> usize {
        self.events.iter().filter(|event| matches!(event, Event::Request(_))).count()
    }

    /// Takes the first request out of the events.
    fn request(&mut self) -> Request {
        let at = self.events.iter().position(|event| matches!(event, Event::Request(_)));
        match self.events.remove(at.expect("a request")) {
            Event::Request(request) => *request,
            other => panic!("{other:?}"),
        }
    }

    fn established(&self, qpn: Qpn) -> bool {
        self.events.iter().any(|e| matches!(e, Event::Established { qpn: of, .. } if *of == qpn))
    }

    fn wcs_of(&self, qpn: Qpn) -> Vec<Wc> {
        self.wcs.iter().filter(|(of, _)| *of == qpn).map(|&(_, wc)| wc).collect()
    }
}

/// A packet on its way.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Flying {
    at: Instant,
    order: u64,
    from: SocketAddr,
    to: SocketAddr,
    octets: Vec<u8>,
}

struct Net {
    hosts: Vec<Host>,
    now: Instant,
    sky: BinaryHeap<Reverse<Flying>>,
    rng: Rng,
    faults: Faults,
    order: u64,
    lost: u64,
    doubled: u64,
    reordered: u64,
    damaged: u64,
    /// Packets to nobody.
    nowhere: u64,
    /// What was sent, if wanted.
    tap: Option<Vec<Flying>>,
    train: Train,
}

impl Net {
    fn new(hosts: Vec<Host>, seed: u64) -> Self {
        Self {
            hosts,
            now: Instant::ZERO,
            sky: BinaryHeap::new(),
            rng: Rng::new(seed),
            faults: Faults::default(),
            order: 0,
            lost: 0,
            doubled: 0,
            reordered: 0,
            damaged: 0,
            nowhere: 0,
            tap: None,
            train: Train::default(),
        }
    }

    /// Two hosts; even seeds IPv4, odd ones IPv6 with ports of their own. Every third does not keep
    /// what comes out of order.
    fn pair(seed: u64) -> Self {
        let ends = match seed % 2 {
            0 => ["192.0.2.1:4791", "192.0.2.2:4791"],
            _ => ["[2001:db8::1]:4792", "[2001:db8::2]:4793"],
        };
        let hosts = ends.into_iter().zip(1..).map(|(end, n)| {
            let config = Config::new(addr(end), seed * 2 + n);
            Host::new(Config { out_of_order: !seed.is_multiple_of(3), ..config })
        });
        Self::new(hosts.collect(), seed)
    }

    fn hit(&mut self, n: u64) -> bool {
        n > 0 && self.rng.one_in(n)
    }

    fn transmit(&mut self, i: usize) -> bool {
        let mut some = false;
        let mut train = std::mem::take(&mut self.train);
        loop {
            let host = &mut self.hosts[i];
            let Some(to) = host.port.poll_transmit(self.now, &host.mem, host.limits, &mut train)
            else {
                break;
            };
            some = true;
            let octets = train.octets();
            assert_eq!(octets.len(), train.len());
            assert!(train.packets() <= host.limits.max_packets);
            assert_eq!((to.from, Some(to.to)), (host.addr, train.peer()));
            let ident = host.ident;
            for octets in octets.chunks(train.segment_len()) {
                let mut octets = octets.to_vec();
                if let Ident::Free = ident {
                    let identification = self.rng.draw() as u16;
                    sign(to.from, to.to, identification, false, &mut octets);
                }
                self.fly(to.from, to.to, octets);
            }
            self.collect(i);
        }
        self.collect(i);
        self.train = train;
        some
    }

    fn fly(&mut self, from: SocketAddr, to: SocketAddr, octets: Vec<u8>) {
        if let Some(tap) = &mut self.tap {
            tap.push(Flying { at: self.now, order: 0, from, to, octets: octets.clone() });
        }
        if self.hit(self.faults.loss) {
            self.lost += 1;
            return;
        }
        let copies = if self.hit(self.faults.dup) { 2 } else { 1 };
        self.doubled += copies - 1;
        for _ in 0..copies {
            let mut octets = octets.clone();
            if self.hit(self.faults.corrupt) {
                self.damaged += 1;
                // One bit that the ICRC covers: not in the octet of FECN and BECN.
                let bit = self.rng.below(octets.len() as u64 * 8) as usize;
                let at = if bit / 8 == 4 { 5 } else { bit / 8 };
                octets[at] ^= 1 << (bit % 8);
            }
            let mut delay = 10_000;
            if self.hit(self.faults.reorder) {
                self.reordered += 1;
                delay += self.rng.below(100_000);
            }
            self.order += 1;
            let at = self.now + Duration::from_nanos(delay);
            self.sky.push(Reverse(Flying { at, order: self.order, from, to, octets }));
        }
    }

    fn collect(&mut self, i: usize) {
        let host = &mut self.hosts[i];
        host.wcs
            .extend(std::iter::from_fn(|| host.port.poll_completion()).map(|(qpn, c)| (qpn, c.wc)));
        host.events.extend(std::iter::from_fn(|| host.port.poll_event()));
    }

    /// One step in time. False: nothing is left to happen.
    fn step(&mut self) -> bool {
        for i in 0..self.hosts.len() {
            self.transmit(i);
        }
        let timers = self.hosts.iter().filter_map(|host| host.port.poll_timeout());
        let arrival = self.sky.peek().map(|Reverse(flying)| flying.at);
        let Some(next) = timers.chain(arrival).min() else {
            return false;
        };
        self.now = self.now.max(next);
        while self.sky.peek().is_some_and(|Reverse(flying)| flying.at <= self.now) {
            let Some(Reverse(flying)) = self.sky.pop() else { break };
            let Some(i) = self.hosts.iter().position(|host| host.addr == flying.to) else {
                self.nowhere += 1;
                continue;
            };
            let host = &mut self.hosts[i];
            let to = Some(flying.to.ip());
            host.port.handle_datagram(self.now, flying.from, to, 0, &flying.octets, &host.mem);
            self.collect(i);
        }
        for i in 0..self.hosts.len() {
            let host = &mut self.hosts[i];
            if host.port.poll_timeout().is_some_and(|at| at <= self.now) {
                host.port.handle_timeout(self.now);
                self.collect(i);
            }
        }
        true
    }

    /// Goes on until `done`, or until nothing is left to happen.
    fn run(&mut self, mut done: impl FnMut(&Self) -> bool) {
        for _ in 0..1_000_000 {
            if done(self) || !self.step() {
                return;
            }
        }
        panic!("still busy");
    }

    fn run_out(&mut self) {
        self.run(|_| false);
    }

    fn listen(&mut self, i: usize) {
        self.hosts[i].port.listen(SERVICE, 4096).expect("nobody listens");
    }

    fn connect(&mut self, kind: QpType, data: &[u8]) -> Qpn {
        let peer = self.hosts[1].addr;
        let qpn = self.hosts[0].qp(kind);
        let connect = Connect { private_data: data, ..Connect::new(peer, SERVICE) };
        self.hosts[0].port.connect(self.now, qpn, &connect).expect("it can be asked for");
        qpn
    }

    /// A connection from host 0 to host 1, which listens: both queue pairs.
    fn connected(&mut self, kind: QpType) -> [Qpn; 2] {
        let client = self.connect(kind, b"hello");
        self.run(|net| net.hosts[1].requests() > 0);
        let request = self.hosts[1].request();
        assert!(request.cm.private_data.starts_with(b"hello"));
        let server = self.hosts[1].qp(kind);
        let answer = Accept { private_data: b"welcome", ..Accept::default() };
        self.hosts[1].port.accept(self.now, &request, server, &answer).expect("an acceptance");
        self.run(|net| net.hosts[0].established(client) && net.hosts[1].established(server));
        assert!(self.hosts[0].established(client) && self.hosts[1].established(server));
        [client, server]
    }
}

/// Puts the ICRC right, for this Identification and DF.
fn sign(from: SocketAddr, to: SocketAddr, identification: u16, df: bool, octets: &mut [u8]) {
    let Ok((bth, _)) = Bth::read_from_prefix(octets) else { return };
    let len = octets.len();
    if len < 16 {
        return;
    }
    let (src_port, dst_port) = (from.port(), to.port());
    let mut icrc = match (from, to) {
        (SocketAddr::V4(a), SocketAddr::V4(b)) => {
            let path = PathV4 { src: *a.ip(), dst: *b.ip(), src_port, dst_port };
            let id = Identification { identification, dont_fragment: df };
            Icrc::socket_v4(&path, id, len, &bth)
        }
        (SocketAddr::V6(a), SocketAddr::V6(b)) => {
            let path = PathV6 { src: *a.ip(), dst: *b.ip(), src_port, dst_port };
            Icrc::socket_v6(&path, len, &bth)
        }
        _ => panic!("two families"),
    };
    icrc.update(&octets[Bth::LEN..len - 4]);
    octets[len - 4..].copy_from_slice(&icrc.finish());
}

/// Each operation has so many octets of every region to itself.
const STRIDE: usize = 8192;
const IOVA: u64 = 0x7f00_0000_0000;

/// What one end does, and what must come of it.
struct Work {
    base: u32,
    sends: Vec<SendWr>,
    receives: Vec<RecvWr>,
    /// Of the sends: opcode and length; of the receives: opcode, length, immediate.
    send_wcs: Vec<(u64, WcOpcode, u32)>,
    recv_wcs: Vec<(u64, WcOpcode, u32, Option<u32>)>,
    mortals: Vec<u32>,
    source: Vec<u8>,
    before: Vec<u8>,
    target: Vec<u8>,
    sink: Vec<u8>,
    inbox: Vec<u8>,
}

impl Work {
    /// `count` operations, of every kind in turn. `base` is where its keys begin.
    fn new(rng: &mut Rng, count: usize, longest: u64, base: u32) -> Self {
        let size = count * STRIDE;
        let before = rng.bytes(size);
        let mut w = Self {
            base,
            sends: Vec::new(),
            receives: Vec::new(),
            send_wcs: Vec::new(),
            recv_wcs: Vec::new(),
            mortals: Vec::new(),
            source: rng.bytes(size),
            target: before.clone(),
            before,
            sink: vec![0; size],
            inbox: vec![0; size],
        };
        for n in 0..count {
            w.add(n, rng.below(longest) as usize, rng.draw());
        }
        w
    }

    fn add(&mut self, n: usize, len: usize, word: u64) {
        let (id, at) = (n as u64, n * STRIDE);
        let remote = RemoteAddr::new(IOVA + at as u64, RKey(self.base + 1));
        let source = |len: usize| Sge::new(at as u64, len as u32, LKey(self.base + 2));
        let sink = |len: usize| Sge::new(at as u64, len as u32, LKey(self.base + 3));
        let old = u64::from_ne_bytes(self.before[at..at + 8].try_into().expect("8 octets"));
        let imm = word as u32;
        let mut received = None;
        let (op, sge, len) = match n % 10 {
            0 => {
                received = Some((WcOpcode::RECV, None));
                (SendOp::Send, source(len), len)
            }
            1 => {
                received = Some((WcOpcode::RECV, Some(imm)));
                (SendOp::SendImm(imm), source(len), len)
            }
            2 => {
                received = Some((WcOpcode::RECV, None));
                let mortal = self.base + 0x100 + n as u32;
                self.mortals.push(mortal);
                (SendOp::SendInv(RKey(mortal)), source(len), len)
            }
            3 => (SendOp::Write(remote), source(len), len),
            4 => {
                received = Some((WcOpcode::RECV_IMM, Some(imm)));
                (SendOp::WriteImm(remote, imm), source(len), len)
            }
            5 => {
                self.sink[at..at + len].copy_from_slice(&self.before[at..at + len]);
                (SendOp::Read(remote), sink(len), len)
            }
            6 => {
                self.sink[at..at + 8].copy_from_slice(&old.to_ne_bytes());
                let sum = old.wrapping_add(word);
                self.target[at..at + 8].copy_from_slice(&sum.to_ne_bytes());
                (SendOp::FetchAdd { remote, add: word, mask: 0 }, sink(8), 8)
            }
            7 => {
                self.sink[at..at + 8].copy_from_slice(&old.to_ne_bytes());
                let compare = if word & 1 == 0 { old } else { !old };
                if compare == old {
                    self.target[at..at + 8].copy_from_slice(&word.to_ne_bytes());
                }
                let (compare_mask, swap_mask) = (u64::MAX, u64::MAX);
                let op = SendOp::CmpSwap { remote, compare, swap: word, compare_mask, swap_mask };
                (op, sink(8), 8)
            }
            8 => {
                let (placement, selectivity) = (Placement::GLOBAL_VISIBILITY, Selectivity::RANGE);
                (SendOp::Flush { remote, len: 8, placement, selectivity }, source(0), 0)
            }
            _ => (SendOp::AtomicWrite(remote), source(8), 8),
        };
        if matches!(op, SendOp::Write(_) | SendOp::WriteImm(..) | SendOp::AtomicWrite(_)) {
            self.target[at..at + len].copy_from_slice(&self.source[at..at + len]);
        }
        if let Some((opcode, imm)) = received {
            let id = id + 1_000;
            let place = Sge::new(at as u64, STRIDE as u32, LKey(self.base + 4));
            self.receives.push(RecvWr::new(id, [place]));
            self.recv_wcs.push((id, opcode, len as u32, imm));
            if opcode == WcOpcode::RECV {
                self.inbox[at..at + len].copy_from_slice(&self.source[at..at + len]);
            }
        }
        self.send_wcs.push((id, op.wc_opcode(), len as u32));
        self.sends.push(SendWr::new(id, op, [sge]));
    }

    /// Registers what is needed, and posts everything at the end that begins and the other one.
    fn post(&self, from: (&mut Host, Qpn), to: (&mut Host, Qpn)) {
        let (host, qpn) = to;
        let all = Access::REMOTE_READ
            | Access::REMOTE_WRITE
            | Access::REMOTE_ATOMIC
            | Access::FLUSH_GLOBAL;
        host.mem.add(self.base + 1, PD, all, IOVA, self.before.clone());
        host.mem.add(self.base + 4, PD, Access::LOCAL_WRITE, 0, vec![0; self.inbox.len()]);
        for &mortal in &self.mortals {
            host.mem.add(mortal, PD, Access::REMOTE_INVALIDATE, 0, vec![0; 8]);
            host.mem.bind(mortal, qpn);
        }
        for wr in &self.receives {
            host.port.post_recv(qpn, wr.clone(), 0).expect("room for a receive");
        }
        let (host, qpn) = from;
        host.mem.add(self.base + 2, PD, Access::empty(), 0, self.source.clone());
        host.mem.add(self.base + 3, PD, Access::LOCAL_WRITE, 0, vec![0; self.sink.len()]);
        for wr in &self.sends {
            host.port.post_send(qpn, wr.clone(), 0).expect("room for a send");
        }
    }

    #[track_caller]
    fn check(&self, from: (&Host, Qpn), to: (&Host, Qpn)) {
        let sent: Vec<_> =
            from.0.wcs_of(from.1).into_iter().filter(|wc| !wc.opcode.is_recv()).collect();
        assert!(sent.iter().all(|wc| wc.status.is_ok() && wc.qpn == from.1), "{sent:?}");
        let sent: Vec<_> = sent.iter().map(|wc| (wc.id, wc.opcode, wc.byte_len)).collect();
        assert_eq!(sent, self.send_wcs);
        let got: Vec<_> = to.0.wcs_of(to.1).into_iter().filter(|wc| wc.opcode.is_recv()).collect();
        assert!(got.iter().all(|wc| wc.status.is_ok() && wc.qpn == to.1), "{got:?}");
        let got: Vec<_> = got
            .iter()
            .map(|wc| (wc.id, wc.opcode, wc.byte_len, wc.imm.map(|imm| imm.to_u32())))
            .collect();
        assert_eq!(got, self.recv_wcs);
        assert!(to.0.mem.bytes(self.base + 1) == self.target, "memory that the peer works on");
        assert!(from.0.mem.bytes(self.base + 3) == self.sink, "what was read");
        assert!(to.0.mem.bytes(self.base + 4) == self.inbox, "what was received");
    }
}

/// Two of the hosts, to change both.
fn both(hosts: &mut [Host]) -> (&mut Host, &mut Host) {
    match hosts {
        [a, b] => (a, b),
        _ => panic!("two hosts"),
    }
}

/// Work both ways on one connection.
fn post_both_ways(net: &mut Net, [client, server]: [Qpn; 2], count: usize, k: u32) -> [Work; 2] {
    let work =
        [0, 1].map(|way| Work::new(&mut net.rng, count, 5_000, 0x10_0000 + (k * 2 + way) * 0x1000));
    let (a, b) = both(&mut net.hosts);
    work[0].post((a, client), (b, server));
    work[1].post((b, server), (a, client));
    work
}

fn check_both_ways(net: &Net, [client, server]: [Qpn; 2], work: &[Work; 2]) {
    let (a, b) = (&net.hosts[0], &net.hosts[1]);
    work[0].check((a, client), (b, server));
    work[1].check((b, server), (a, client));
}

#[test]
fn all_operations_both_ways_through_a_bad_network() {
    let (mut lost, mut doubled, mut reordered, mut damaged, mut bad, mut resent) =
        (0, 0, 0, 0, 0, 0);
    for seed in 0..40 {
        let mut net = Net::pair(seed);
        net.listen(1);
        net.faults = match seed / 2 % 4 {
            0 => Faults::default(),
            1 => Faults { loss: 100, dup: 100, reorder: 100, corrupt: 200 },
            2 => Faults { loss: 20, dup: 20, reorder: 20, corrupt: 50 },
            _ => Faults { corrupt: 10, ..Faults::default() },
        };
        if seed / 8 % 2 == 1 {
            net.hosts[0].ident = Ident::Free;
        }
        if seed % 3 == 0 {
            net.hosts[1].limits.max_packets = 1;
        }
        let qps = net.connected(QpType::Rc);
        let work = post_both_ways(&mut net, qps, 30, 0);
        net.run(|net| net.hosts.iter().map(|host| host.wcs.len()).sum::<usize>() == 90);
        check_both_ways(&net, qps, &work);

        for host in &net.hosts {
            let stats = host.port.stats();
            resent += host.port.qps().map(|qp| qp.stats().packets_resent).sum::<u64>();
            bad += stats.icrc_bad;
            // Nothing that was damaged came through, and nothing else is amiss.
            assert_eq!(stats.malformed + stats.bad_version + stats.bad_pkey, 0, "seed {seed}");
            assert_eq!(stats.unknown_qp + stats.wrong_type + stats.wrong_peer, 0, "seed {seed}");
            assert_eq!(stats.bad_mad + stats.unroutable + stats.icrc_unknown, 0, "seed {seed}");
        }
        net.hosts[0].port.disconnect(net.now, qps[0]).unwrap();
        assert_eq!(net.hosts[0].state(qps[0]), QpState::Err);
        net.run_out();
        let ended = |host: &Host, qpn: Qpn| {
            host.events.iter().find_map(|event| match event {
                Event::Disconnected { qpn: of, ended } if *of == qpn => Some(*ended),
                _ => None,
            })
        };
        assert_eq!(ended(&net.hosts[0], qps[0]), Some(Ended::Local), "seed {seed}");
        assert_eq!(ended(&net.hosts[1], qps[1]), Some(Ended::Peer), "seed {seed}");
        assert_eq!(net.hosts[1].state(qps[1]), QpState::Err);
        assert!(net.hosts.iter().all(|host| host.port.connections() == 0));
        assert_eq!(net.nowhere, 0, "nobody answers to a wrong port");
        (lost, doubled) = (lost + net.lost, doubled + net.doubled);
        (reordered, damaged) = (reordered + net.reordered, damaged + net.damaged);
    }
    assert!(lost > 50 && doubled > 50 && reordered > 50 && damaged > 50 && resent > 50);
    // Copies that a network damaged after the run are not counted by anybody.
    assert!(bad > damaged * 9 / 10 && bad <= damaged, "{bad} of {damaged}");
}

#[test]
fn what_both_sides_said_is_what_the_queue_pairs_are_set_to() {
    let mut net = Net::pair(1);
    net.listen(1);
    for host in &mut net.hosts {
        host.port = Port::new(Config { window: 300_000, ..host.port.config().clone() });
    }
    net.listen(1);
    let client = net.hosts[0].qp(QpType::Rc);
    let connect = Connect {
        mtu: PathMtu::Mtu2048,
        initiator_depth: 5,
        responder_resources: 7,
        ack_timeout: 12,
        retry_count: 3,
        rnr_retry_count: 4,
        ..Connect::new(net.hosts[1].addr, SERVICE)
    };
    net.hosts[0].port.connect(net.now, client, &connect).unwrap();
    assert_eq!(net.hosts[0].state(client), QpState::Init);
    let again = net.hosts[0].port.connect(net.now, client, &connect);
    assert_eq!(again, Err(PortError::Connected(client)));
    net.run(|net| net.hosts[1].requests() > 0);
    let request = net.hosts[1].request();
    assert_eq!(request.local, net.hosts[1].addr);
    assert_eq!(request.cm.peer, net.hosts[0].addr, "the token tells the port");
    let server = net.hosts[1].qp(QpType::Rc);
    let answer = Accept {
        initiator_depth: 9,
        responder_resources: 3,
        rnr_retry_count: 2,
        target_ack_delay: 4,
        ..Accept::default()
    };
    let uc = net.hosts[1].qp(QpType::Uc);
    let wrong = net.hosts[1].port.accept(net.now, &request, uc, &answer);
    assert_eq!(wrong, Err(PortError::Type { qpn: uc, found: QpType::Uc }));
    net.hosts[1].port.accept(net.now, &request, server, &answer).unwrap();
    // It is ready, and what is posted waits for the peer.
    assert_eq!(net.hosts[1].state(server), QpState::Rts);
    net.hosts[1].port.post_send(server, SendWr::inline(1, SendOp::SendImm(7), b""), 0).unwrap();
    net.run(|net| net.hosts[0].established(client));
    assert_eq!(net.hosts[1].port.qp(server).unwrap().stats().packets_sent, 0);
    net.hosts[0].port.post_recv(client, RecvWr::new(2, []), 0).unwrap();
    net.run(|net| net.hosts[0].wcs.len() + net.hosts[1].wcs.len() == 2);
    assert_eq!(net.hosts[0].wcs_of(client)[0].imm.map(|imm| imm.to_u32()), Some(7));

    let [a, b] = [(0, client), (1, server)].map(|(i, qpn)| net.hosts[i].port.qp(qpn).unwrap());
    for (own, other) in [(a, b), (b, a)] {
        let (own_attr, other_attr) = (own.attributes(), other.attributes());
        assert_eq!(own_attr.dest_qp, other.config().scope.qpn);
        assert_eq!(own_attr.sq_psn, other_attr.rq_psn);
        assert_eq!((own_attr.local, own_attr.peer), (other_attr.peer, other_attr.local));
        assert_eq!(own_attr.path_mtu, PathMtu::Mtu2048);
        assert_eq!(own.window().octets, 128 << 10, "as the token says");
    }
    let (a, b) = (a.attributes(), b.attributes());
    assert_ne!(a.sq_psn, a.rq_psn);
    assert_eq!((a.max_rd_atomic, b.max_dest_rd_atomic), (3, 3));
    assert_eq!((b.max_rd_atomic, a.max_dest_rd_atomic), (7, 7));
    assert_eq!((a.timeout, a.retry_cnt, a.rnr_retry), (12, 3, 2));
    assert_eq!((b.timeout, b.retry_cnt, b.rnr_retry), (12, 3, 4));
}

/// Only what is missing is sent again where both sides say so, and to nobody else.
#[test]
fn what_comes_out_of_order_is_kept_where_both_agree() {
    for (ours, theirs, token) in
        [(true, true, true), (true, false, true), (false, true, true), (true, true, false)]
    {
        let mut net = Net::pair(0);
        for (host, out_of_order) in net.hosts.iter_mut().zip([ours, theirs]) {
            host.port = Port::new(Config { out_of_order, ..host.port.config().clone() });
        }
        net.listen(1);
        let client = net.hosts[0].qp(QpType::Rc);
        let connect = Connect { token, ..Connect::new(net.hosts[1].addr, SERVICE) };
        net.hosts[0].port.connect(net.now, client, &connect).unwrap();
        net.run(|net| net.hosts[1].requests() > 0);
        let (request, server) = (net.hosts[1].request(), net.hosts[1].qp(QpType::Rc));
        net.hosts[1].port.accept(net.now, &request, server, &Accept::default()).unwrap();
        net.run(|net| net.hosts[0].established(client) && net.hosts[1].established(server));
        for (host, qpn) in net.hosts.iter().zip([client, server]) {
            let agreed = host.port.qp(qpn).unwrap().attributes().out_of_order;
            assert_eq!(agreed, ours && theirs && token, "{ours} {theirs} {token}");
        }
        // 200 packets, one in twenty lost.
        net.faults.loss = 20;
        net.hosts[1].mem.add(1, PD, Access::REMOTE_WRITE, 0, vec![0; 200 << 10]);
        net.hosts[0].mem.add(1, PD, Access::empty(), 0, vec![7; 200 << 10]);
        let to = RemoteAddr::new(0, RKey(1));
        let write = SendWr::write(1, [Sge::new(0, 200 << 10, LKey(1))], to);
        net.hosts[0].port.post_send(client, write, 0).unwrap();
        net.run(|net| !net.hosts[0].wcs.is_empty());
        assert!(net.hosts[0].wcs[0].1.status.is_ok());
        assert!(net.hosts[1].mem.bytes(1).iter().all(|&octet| octet == 7));
        let (sent, taken) = (net.hosts[0].port.qp(client), net.hosts[1].port.qp(server));
        let (resent, kept) = (sent.unwrap().stats().packets_resent, taken.unwrap().stats().kept);
        assert_eq!((kept > 20, resent < 60), (ours && theirs && token, kept > 0), "{resent}");
    }
}

/// However many queue pairs there are, what they keep has one bound; what is beyond it comes again.
#[test]
fn what_all_keep_has_a_bound() {
    const MOST: usize = 20_000;
    let mut net = Net::pair(0);
    let config = Config { max_kept_octets: MOST, ..net.hosts[1].port.config().clone() };
    net.hosts[1].port = Port::new(config);
    net.listen(1);
    let pairs: Vec<_> = (0..8).map(|_| net.connected(QpType::Rc)).collect();
    for pair in &pairs {
        for (host, qpn) in net.hosts.iter_mut().zip(pair) {
            let order = QpAttr { out_of_order: Some(true), ..QpAttr::default() };
            host.port.modify(*qpn, &order).unwrap();
        }
    }
    let memory = 64 << 10;
    for (key, [client, _]) in (1..).zip(&pairs) {
        net.hosts[1].mem.add(key, PD, Access::REMOTE_WRITE, 0, vec![0; memory]);
        net.hosts[0].mem.add(key, PD, Access::empty(), 0, vec![7; memory]);
        let to = RemoteAddr::new(0, RKey(key));
        let write = SendWr::write(1, [Sge::new(0, memory as u32, LKey(key))], to);
        net.hosts[0].port.post_send(*client, write, 0).unwrap();
    }
    net.faults.loss = 20;
    let mut seen = 0;
    net.run(|net| {
        let kept = net.hosts[1].port.kept_octets();
        seen = seen.max(kept);
        assert!(kept <= MOST, "{kept}");
        net.hosts[0].wcs.len() == pairs.len()
    });
    assert!(seen > MOST - 2000, "the bound was reached: {seen}");
    assert!(net.hosts[0].wcs.iter().all(|(_, wc)| wc.status.is_ok()));
    for key in 1..=8 {
        assert!(net.hosts[1].mem.bytes(key).iter().all(|&octet| octet == 7));
    }
    assert_eq!(net.hosts[1].port.kept_octets(), 0, "all had its turn");
    // What a queue pair kept that is no more is given back.
    let [client, server] = pairs[0];
    let to = RemoteAddr::new(0, RKey(1));
    let write = SendWr::write(2, [Sge::new(0, memory as u32, LKey(1))], to);
    net.hosts[0].port.post_send(client, write, 0).unwrap();
    net.run(|net| net.hosts[1].port.kept_octets() > 0);
    let now = net.now;
    net.hosts[1].port.destroy_qp(now, server).unwrap();
    assert_eq!(net.hosts[1].port.kept_octets(), 0);
}

#[test]
fn a_path_mtu_that_is_too_large_is_asked_for_once_more() {
    let mut net = Net::pair(0);
    net.listen(1);
    net.hosts[1].port.set_max_mtu(PathMtu::Mtu512);
    let qps = net.connected(QpType::Rc);
    for (host, qpn) in net.hosts.iter().zip(qps) {
        assert_eq!(host.port.qp(qpn).unwrap().attributes().path_mtu, PathMtu::Mtu512);
    }
    assert_eq!(net.hosts[1].port.stats().mtu_rejected, 1);

    // Our own side's comes first.
    let host = &mut net.hosts[1];
    let qpn = host.qp(QpType::Rc);
    let connect = Connect::new(addr("192.0.2.1:4791"), SERVICE);
    let too_large = host.port.connect(net.now, qpn, &connect);
    assert_eq!(too_large, Err(PortError::Mtu { asked: 1024, max: 512 }));
    assert_eq!(host.state(qpn), QpState::Reset);
}

#[test]
fn a_request_is_rejected() {
    let mut net = Net::pair(0);
    // Nobody listens.
    let first = net.connect(QpType::Rc, b"");
    net.run_out();
    let events = std::mem::take(&mut net.hosts[0].events);
    let [Event::Rejected { qpn, rejected }] = &events[..] else { panic!("{events:?}") };
    assert_eq!(*qpn, Some(first));
    assert_eq!(rejected.reason, Rejection::INVALID_SERVICE_ID);
    assert_eq!(net.hosts[0].state(first), QpState::Err);

    // The program says no. A receive that was posted is flushed.
    net.listen(1);
    let second = net.connect(QpType::Rc, b"please");
    net.hosts[0].port.post_recv(second, RecvWr::new(9, []), 0).unwrap();
    net.run(|net| net.hosts[1].requests() > 0);
    let request = net.hosts[1].request();
    net.hosts[1].port.reject(net.now, &request, &Reject::consumer(b"no")).unwrap();
    net.run_out();
    let told = net.hosts[0].events.iter().find_map(|event| match event {
        Event::Rejected { qpn, rejected } if *qpn == Some(second) => Some(rejected),
        _ => None,
    });
    let rejected = told.expect("a rejection");
    assert_eq!(rejected.reason, Rejection::CONSUMER);
    assert!(rejected.private_data.starts_with(b"no"));
    assert_eq!(net.hosts[0].wcs_of(second)[0].status, WcStatus::WR_FLUSH_ERR);
    assert!(net.hosts.iter().all(|host| host.port.connections() == 0));
}

#[test]
fn nobody_answers() {
    let mut net = Net::pair(0);
    net.faults.loss = 1;
    let qpn = net.connect(QpType::Rc, b"");
    net.run_out();
    let last = net.hosts[0].events.last();
    let awaited = Awaited::Reply;
    assert!(matches!(last, Some(Event::TimedOut { qpn: of, awaited: a, .. })
        if *of == Some(qpn) && *a == awaited));
    assert_eq!(net.hosts[0].state(qpn), QpState::Err);
}

#[test]
fn a_lost_rtu_is_made_good_by_the_first_packet() {
    let mut net = Net::pair(0);
    net.listen(1);
    let client = net.connect(QpType::Rc, b"");
    net.run(|net| net.hosts[1].requests() > 0);
    let request = net.hosts[1].request();
    let server = net.hosts[1].qp(QpType::Rc);
    net.hosts[1].port.post_recv(server, RecvWr::new(1, []), 0).unwrap_err();
    net.hosts[1].port.accept(net.now, &request, server, &Accept::default()).unwrap();
    net.hosts[1].port.post_recv(server, RecvWr::new(1, []), 0).unwrap();
    net.run(|net| net.hosts[0].established(client));
    // The RTU goes nowhere.
    let host = &mut net.hosts[0];
    let (limits, mut train) = (Limits::default(), Train::default());
    host.port.poll_transmit(net.now, &host.mem, limits, &mut train).expect("the RTU");
    host.port.post_send(client, SendWr::inline(2, SendOp::Send, b""), 0).unwrap();
    net.run(|net| !net.hosts[1].wcs.is_empty());
    assert!(net.hosts[1].established(server));
    assert_eq!(net.hosts[1].wcs_of(server)[0].id, 1);
}

#[test]
fn hundreds_of_queue_pairs_on_one_port() {
    const MANY: usize = 300;
    let mut net = Net::pair(0);
    net.faults = Faults { loss: 100, dup: 100, reorder: 100, corrupt: 500 };
    net.listen(1);
    let clients: Vec<Qpn> =
        (0..MANY).map(|n| net.connect(QpType::Rc, &(n as u32).to_be_bytes())).collect();
    let mut servers = vec![Qpn(0); MANY];
    while servers.contains(&Qpn(0)) {
        net.run(|net| net.hosts[1].requests() > 0);
        let request = net.hosts[1].request();
        let n = u32::from_be_bytes(*request.cm.private_data.first_chunk().unwrap());
        let qpn = net.hosts[1].qp(QpType::Rc);
        net.hosts[1].port.accept(net.now, &request, qpn, &Accept::default()).unwrap();
        servers[n as usize] = qpn;
    }
    net.run(|net| {
        clients.iter().all(|&qpn| net.hosts[0].state(qpn) == QpState::Rts)
            && net.hosts[1].events.len() == MANY
    });
    let pairs: Vec<[Qpn; 2]> =
        clients.iter().zip(&servers).map(|(&client, &server)| [client, server]).collect();
    let work: Vec<_> =
        (0..).zip(&pairs).map(|(k, &qps)| post_both_ways(&mut net, qps, 10, k)).collect();
    net.run(|net| net.hosts.iter().map(|host| host.wcs.len()).sum::<usize>() == MANY * 28);
    for (&qps, work) in pairs.iter().zip(&work) {
        check_both_ways(&net, qps, work);
    }
    assert_eq!(net.hosts[0].port.len(), MANY);
    for (client, _) in clients.iter().zip(0..MANY / 2) {
        net.hosts[0].port.destroy_qp(net.now, *client).unwrap();
    }
    for server in &servers[MANY / 2..] {
        net.hosts[1].port.disconnect(net.now, *server).unwrap();
    }
    net.run_out();
    assert!(servers.iter().all(|&qpn| net.hosts[1].state(qpn) == QpState::Err));
    assert_eq!(net.hosts[0].port.len(), MANY - MANY / 2);
    assert!(net.hosts.iter().all(|host| host.port.connections() == 0));
}

#[test]
fn queue_pairs_take_turns() {
    let mut net = Net::pair(0);
    net.listen(1);
    let qps: Vec<[Qpn; 2]> = (0..5).map(|_| net.connected(QpType::Rc)).collect();
    let host = &mut net.hosts[0];
    host.mem.add(1, PD, Access::empty(), 0, vec![7; 1 << 20]);
    for [client, _] in &qps {
        let write = SendWr::write(1, [Sge::new(0, 1 << 20, LKey(1))], RemoteAddr::new(0, RKey(1)));
        host.port.post_send(*client, write, 0).unwrap();
    }
    let limits = Limits { max_packets: 4, max_octets: 1 << 20, ..Limits::default() };
    let mut train = Train::default();
    // As much as the peer's receive buffer takes.
    let order: Vec<Qpn> = (0..25)
        .map(|_| {
            let sent = host.port.poll_transmit(net.now, &host.mem, limits, &mut train);
            assert!((1..=4).contains(&train.packets()));
            sent.expect("there is more").scope.qpn
        })
        .collect();
    assert!(order.windows(5).all(|turn| qps.iter().all(|[qpn, _]| turn.contains(qpn))));
}

#[test]
fn uc_and_out_of_band() {
    let mut net = Net::pair(0);
    net.listen(1);
    let qps = net.connected(QpType::Uc);
    net.hosts[1].port.post_recv(qps[1], RecvWr::new(1, []), 0).unwrap();
    net.hosts[0].port.post_send(qps[0], SendWr::inline(2, SendOp::SendImm(5), b""), 0).unwrap();
    net.run(|net| !net.hosts[1].wcs.is_empty());
    assert_eq!(net.hosts[1].wcs_of(qps[1])[0].imm.map(|imm| imm.to_u32()), Some(5));

    // Numbers exchanged by other means, as the pingpong programs do.
    let qps = [0, 1].map(|i| net.hosts[i].qp(QpType::Rc));
    for i in 0..2 {
        let peer = Some(net.hosts[1 - i].addr);
        let port = &mut net.hosts[i].port;
        port.modify(qps[i], &QpAttr::to(QpState::Init)).unwrap();
        let rtr = QpAttr {
            peer,
            dest_qp: Some(qps[1 - i]),
            path_mtu: Some(PathMtu::Mtu1024),
            rq_psn: Some(Psn::new(1)),
            ..QpAttr::to(QpState::Rtr)
        };
        port.modify(qps[i], &rtr).unwrap();
        port.post_recv(qps[i], RecvWr::new(3, []), 0).unwrap();
    }
    let rts = QpAttr { sq_psn: Some(Psn::new(1)), ..QpAttr::to(QpState::Rts) };
    net.hosts[0].port.modify(qps[0], &rts).unwrap();
    net.hosts[0].port.post_send(qps[0], SendWr::inline(4, SendOp::Send, b""), 0).unwrap();
    net.run(|net| net.hosts[0].wcs_of(qps[0]).len() == 1 && net.hosts[1].wcs.len() == 2);
    assert!(net.hosts[1].events.contains(&Event::FirstPacket { qpn: qps[1] }));
    assert_eq!(net.hosts[1].wcs_of(qps[1])[0].id, 3);
}

#[test]
fn a_ud_service_is_found_and_answers() {
    let service = PortSpace::UDP.service_id(7175);
    let qkey = QKey(0x0123_4567);
    for seed in 0..2 {
        let mut net = Net::pair(seed);
        let ends = [0, 1].map(|i| net.hosts[i].addr);
        let qps = [0, 1].map(|i| {
            let qpn = net.hosts[i].qp(QpType::Ud);
            let init = QpAttr { qkey: Some(qkey), ..QpAttr::to(QpState::Init) };
            let path_mtu = Some(PathMtu::Mtu1024);
            let rtr = QpAttr { path_mtu, ..QpAttr::to(QpState::Rtr) };
            let rts = QpAttr { sq_psn: Some(Psn::new(0)), ..QpAttr::to(QpState::Rts) };
            for attr in [init, rtr, rts] {
                net.hosts[i].port.modify(qpn, &attr).unwrap();
            }
            net.hosts[i].mem.add(1, PD, Access::LOCAL_WRITE, 0, vec![0; 100]);
            let receive = RecvWr::new(1, [Sge::new(0, 100, LKey(1))]);
            net.hosts[i].port.post_recv(qpn, receive, 0).unwrap();
            qpn
        });
        let answer = Datagrams { qpn: qps[1], qkey, private_data: b"here".to_vec() };
        net.hosts[1].port.listen_datagrams(service, answer).unwrap();
        let token = Some(net.hosts[0].port.token());
        let question = Resolve {
            peer: ends[1],
            local_ip: ends[0].ip(),
            local_port: 0,
            service_id: service,
            private_data: b"where",
            token,
        };
        net.hosts[0].port.resolve(net.now, &question).unwrap();
        net.run(|net| net.hosts.iter().all(|host| !host.events.is_empty()));
        let Event::Service(cm::Event::Resolved { peer, qpn, qkey, .. }) = net.hosts[0].events[0]
        else {
            panic!("{:?}", net.hosts[0].events)
        };
        assert_eq!((peer, qpn), (ends[1], qps[1]));
        let Event::Service(cm::Event::Queried { peer: asker, .. }) = net.hosts[1].events[0] else {
            panic!("{:?}", net.hosts[1].events)
        };
        // There and back.
        for (i, dest) in
            [(0, UdDest { addr: peer, qpn, qkey }), (1, UdDest { addr: asker, qpn: qps[0], qkey })]
        {
            let wr = SendWr::inline(2, SendOp::Send, b"datagram").to(dest);
            net.hosts[i].port.post_send(qps[i], wr, 0).unwrap();
            net.run(|net| net.hosts[1 - i].wcs.iter().any(|(_, wc)| wc.opcode.is_recv()));
            let host = &net.hosts[1 - i];
            let wc = host.wcs.iter().find(|(_, wc)| wc.opcode.is_recv()).unwrap().1;
            assert_eq!((wc.byte_len, wc.src_qp), (48, Some(qps[i])));
            assert_eq!(&host.mem.bytes(1)[40..48], b"datagram");
        }
    }
}

#[test]
fn packets_for_others_are_counted_and_dropped() {
    let mut net = Net::pair(0);
    net.tap = Some(Vec::new());
    net.listen(1);
    let qps = net.connected(QpType::Rc);
    net.hosts[1].port.post_recv(qps[1], RecvWr::new(1, []), 0).unwrap();
    net.hosts[0].port.post_send(qps[0], SendWr::inline(2, SendOp::Send, b""), 0).unwrap();
    net.run(|net| !net.hosts[1].wcs.is_empty());
    let tap = net.tap.take().unwrap();
    let send = tap.iter().find(|p| p.to == net.hosts[1].addr && p.octets[0] == 0x04).unwrap();
    let req = &tap[0];
    let (from, to) = (send.from, send.to);
    let idle = net.hosts[1].qp(QpType::Rc);
    let port = &mut net.hosts[1].port;
    let before = port.qp(qps[1]).unwrap().stats().packets_received;
    let mut feed = |from: SocketAddr, packet: &[u8], change: &dyn Fn(&mut Vec<u8>)| {
        let mut octets = packet.to_vec();
        change(&mut octets);
        sign(from, to, 5, true, &mut octets);
        let seen = *port.stats();
        port.handle_datagram(net.now, from, Some(to.ip()), 0, &octets, &NoMemory);
        let now = *port.stats();
        assert_eq!((now.received, now.icrc_good), (seen.received + 1, seen.icrc_good + 1));
        move |counter: fn(&roce::port::Stats) -> u64| {
            assert_eq!(counter(&now), counter(&seen) + 1, "{now:?}");
        }
    };
    let s = &send.octets[..];
    feed(from, s, &|p| p[1] |= 1)(|s| s.bad_version);
    feed(from, s, &|p| p[2] ^= 1)(|s| s.bad_pkey);
    feed(from, s, &|p| p[7] ^= 0x80)(|s| s.unknown_qp);
    feed(from, s, &|p| p[5..8].fill(0))(|s| s.unknown_qp);
    feed(from, s, &|p| p[5..8].fill(0xff))(|s| s.unknown_qp);
    feed(from, s, &|p| p[0] |= 0x20)(|s| s.wrong_type);
    feed(from, s, &|p| p[5..8].copy_from_slice(&idle.0.to_be_bytes()[1..]))(|s| s.not_ready);
    feed(addr("192.0.2.77:4791"), s, &|_| {})(|s| s.wrong_peer);
    feed(from, s, &|p| p[0] = 0x0c)(|s| s.malformed);
    feed(from, &req.octets, &|p| p[2..4].fill(0))(|s| s.bad_pkey);
    feed(from, &req.octets, &|p| p[12] = 0)(|s| s.bad_mad);
    feed(from, &req.octets, &|p| drop(p.drain(100..104)))(|s| s.bad_mad);
    // A congestion notification is the queue pair's.
    feed(from, s, &|p| {
        p[0] = 0x81;
        p.truncate(12);
        p.extend([0; 20]);
    })(|s| s.cnps_received);
    let port = &net.hosts[1].port;
    assert_eq!(port.qp(qps[1]).unwrap().stats().packets_received, before + 1);
    assert_eq!(net.hosts[1].state(qps[1]), QpState::Rts);
}

#[test]
fn strict_and_lenient() {
    for icrc in [IcrcPolicy::Strict, IcrcPolicy::Lenient] {
        let lenient = icrc == IcrcPolicy::Lenient;
        let mut net = Net::pair(0);
        let config = Config { icrc, ..net.hosts[1].port.config().clone() };
        net.hosts[1].port = Port::new(config);
        net.listen(1);
        let qps = net.connected(QpType::Rc);
        net.hosts[1].port.post_recv(qps[1], RecvWr::new(1, []), 0).unwrap();
        net.hosts[0].port.post_send(qps[0], SendWr::inline(2, SendOp::Send, b""), 0).unwrap();
        // The peer's ICRC is wrong, and nothing else.
        net.transmit(0);
        let Some(Reverse(mut flying)) = net.sky.pop() else { panic!("a packet") };
        let last = flying.octets.len() - 1;
        flying.octets[last] ^= 0x80;
        let (host, to) = (&mut net.hosts[1], Some(flying.to.ip()));
        host.port.handle_datagram(net.now, flying.from, to, 0, &flying.octets, &host.mem);
        let stats = *host.port.stats();
        assert_eq!((stats.icrc_bad, stats.icrc_lenient), (1, u64::from(lenient)));
        net.collect(1);
        assert_eq!(net.hosts[1].wcs.len(), usize::from(lenient));
    }
}

#[test]
fn a_marked_packet_is_told_to_its_sender() {
    for seed in 0..2 {
        let mut net = Net::pair(seed);
        net.listen(1);
        let qps = net.connected(QpType::Rc);
        let cnps = |net: &Net, i: usize| {
            let stats = net.hosts[i].port.stats();
            (stats.cnps_sent, stats.cnps_received)
        };
        for n in 0..4 {
            net.hosts[1].port.post_recv(qps[1], RecvWr::new(n, []), 0).unwrap();
            net.hosts[0].port.post_send(qps[0], SendWr::inline(n, SendOp::Send, b""), 0).unwrap();
        }
        net.transmit(0);
        while let Some(Reverse(flying)) = net.sky.pop() {
            let (host, to) = (&mut net.hosts[1], Some(flying.to.ip()));
            host.port.handle_datagram(net.now, flying.from, to, 0b11, &flying.octets, &host.mem);
        }
        net.run(|net| net.hosts[0].wcs.len() == 4);
        // One for all four, with a good ICRC, for the queue pair that sent them.
        assert_eq!((cnps(&net, 0), cnps(&net, 1)), ((0, 1), (1, 0)));
        net.now = net.now + Duration::from_micros(50);
        net.hosts[1].port.post_recv(qps[1], RecvWr::new(9, []), 0).unwrap();
        net.hosts[0].port.post_send(qps[0], SendWr::inline(9, SendOp::Send, b""), 0).unwrap();
        net.transmit(0);
        let Some(Reverse(flying)) = net.sky.pop() else { panic!("a packet") };
        let (host, to) = (&mut net.hosts[1], Some(flying.to.ip()));
        host.port.handle_datagram(net.now, flying.from, to, 0b11, &flying.octets, &host.mem);
        net.run(|net| net.hosts[0].wcs.len() == 5);
        assert_eq!((cnps(&net, 0), cnps(&net, 1)), ((0, 2), (2, 0)));
    }
}

#[test]
fn random_and_mutated_packets_do_no_harm() {
    for seed in 0..4 {
        let mut net = Net::pair(seed);
        net.tap = Some(Vec::new());
        net.listen(1);
        let qps = net.connected(QpType::Rc);
        let work = post_both_ways(&mut net, qps, 10, 0);
        net.run(|net| net.hosts.iter().map(|host| host.wcs.len()).sum::<usize>() == 28);
        check_both_ways(&net, qps, &work);
        let tap = net.tap.take().unwrap();

        let mut rng = Rng::new(seed + 100);
        let local = net.hosts[1].addr;
        let mut config = net.hosts[1].port.config().clone();
        (config.max_peers, config.cm.max_connections, config.cm.max_half_open) = (32, 64, 16);
        config.cm.max_queued = 64;
        let mut host = Host::new(config);
        host.port.listen(SERVICE, 8).unwrap();
        let stranger = if local.is_ipv4() { addr("10.0.0.1:1") } else { addr("[fd00::1]:1") };
        // Queue pairs in RTS, made by other means.
        let ready = |host: &mut Host, kind| {
            let qpn = host.qp(kind);
            let init = QpAttr { qkey: Some(QKey(0x11)), ..QpAttr::to(QpState::Init) };
            let rtr = QpAttr {
                peer: Some(stranger),
                dest_qp: Some(Qpn(77)),
                path_mtu: Some(PathMtu::Mtu1024),
                rq_psn: Some(Psn::new(0)),
                ..QpAttr::to(QpState::Rtr)
            };
            let rts = QpAttr { sq_psn: Some(Psn::new(0)), ..QpAttr::to(QpState::Rts) };
            for attr in [init, rtr, rts] {
                host.port.modify(qpn, &attr).expect("a step");
            }
            qpn
        };
        let kinds = [QpType::Rc, QpType::Uc, QpType::Ud];
        let mut qps = kinds.map(|kind| ready(&mut host, kind));
        let (mut now, mut sent, mut handed) = (Instant::ZERO, 0, 0);
        for n in 0..20_000_u32 {
            now = now + Duration::from_micros(rng.below(2_000));
            let mut octets = if rng.one_in(4) {
                let len = rng.below(400) as usize;
                rng.bytes(len)
            } else {
                let flying = &tap[rng.below(tap.len() as u64) as usize];
                flying.octets.clone()
            };
            for _ in 0..rng.below(4) {
                if let Some(at) = (octets.len() as u64).checked_sub(1) {
                    let at = rng.below(at + 1) as usize;
                    octets[at] = rng.draw() as u8;
                }
            }
            if rng.one_in(8) {
                octets.truncate(rng.below(octets.len() as u64 + 1) as usize);
            }
            // The peer of the queue pairs, one of a few others, or any of many strangers.
            let mut from = stranger;
            from.set_port(rng.draw() as u16);
            let n = [0, n % 8, n % 3_000][rng.below(3) as usize];
            from.set_ip(match from.ip() {
                IpAddr::V4(ip) => IpAddr::V4((u32::from(ip) + n).into()),
                IpAddr::V6(ip) => IpAddr::V6((u128::from(ip) + u128::from(n)).into()),
            });
            if n == 0 && octets.len() > 12 && octets[7] != 1 {
                let i = rng.below(3) as usize;
                if host.state(qps[i]) == QpState::Err {
                    handed += host.port.qp(qps[i]).unwrap().stats().packets_received;
                    host.port.destroy_qp(now, qps[i]).unwrap();
                    qps[i] = ready(&mut host, kinds[i]);
                }
                octets[0] = octets[0] & 0x1f | [0x00, 0x20, 0x60][i];
                octets[5..8].copy_from_slice(&qps[i].0.to_be_bytes()[1..]);
                let expected = host.port.qp(qps[i]).unwrap().attributes().rq_psn;
                octets[9..12].copy_from_slice(&expected.get().to_be_bytes()[1..]);
            }
            if !rng.one_in(5) {
                sign(from, local, rng.draw() as u16, rng.one_in(2), &mut octets);
            }
            let to = Some(local.ip()).filter(|_| !rng.one_in(50));
            host.port.handle_datagram(now, from, to, rng.draw() as u8, &octets, &host.mem);
            let mut train = Train::default();
            while host.port.poll_transmit(now, &host.mem, Limits::default(), &mut train).is_some() {
                sent += 1;
            }
            if rng.one_in(10) {
                host.port.handle_timeout(now);
            }
            if let Some(Event::Request(request)) = host.port.poll_event() {
                if rng.one_in(2) {
                    let qpn = host.qp(QpType::Rc);
                    // It may be gone by now.
                    let _ = host.port.accept(now, &request, qpn, &Accept::default());
                } else {
                    let _ = host.port.reject(now, &request, &Reject::consumer(b""));
                }
            }
            assert!(host.port.peers() <= 32 && host.port.connections() <= 64);
        }
        let stats = *host.port.stats();
        assert!(stats.icrc_good > 5_000 && stats.mads_received > 200 && sent > 500, "{stats:?}");
        handed += host.port.qps().map(|qp| qp.stats().packets_received).sum::<u64>();
        assert!(handed > 300, "{handed}");
        let dropped = stats.icrc_bad
            + stats.icrc_other_df
            + stats.icrc_unknown
            + stats.malformed
            + stats.bad_version
            + stats.bad_pkey
            + stats.unknown_qp
            + stats.wrong_type
            + stats.not_ready
            + stats.wrong_peer
            + stats.bad_mad
            + stats.mads_received;
        assert_eq!(stats.received, dropped + handed, "each counts once: {stats:?}");
    }
}

/// An IPv4 packet of a capture: from, to, Identification, DF, UDP payload.
struct Seen {
    from: SocketAddr,
    to: SocketAddr,
    id: Identification,
    octets: Vec<u8>,
}

/// What `pcaps/roce_rping.pcap` has: Linux rxe at both ends.
fn rping() -> Vec<Seen> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../pcaps/roce_rping.pcap");
    let octets = std::fs::read(&file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
    let word = |at: usize| u32::from_le_bytes(octets[at..at + 4].try_into().expect("4 octets"));
    let (mut at, mut seen) = (24, Vec::new());
    while at < octets.len() {
        let len = word(at + 8) as usize;
        let frame = &octets[at + 16..at + 16 + len];
        at += 16 + len;
        let half = |at: usize| u16::from_be_bytes([frame[at], frame[at + 1]]);
        if half(12) != 0x0800 || frame[23] != 17 || half(36) != UDP_PORT {
            continue;
        }
        let ip = |at: usize| <[u8; 4]>::try_from(&frame[at..at + 4]).expect("4 octets");
        let end = 14 + usize::from(half(16));
        seen.push(Seen {
            from: (ip(26), half(34)).into(),
            to: (ip(30), half(36)).into(),
            id: Identification { identification: half(18), dont_fragment: frame[20] & 0x40 != 0 },
            octets: frame[42..end].to_vec(),
        });
    }
    assert!(seen.len() > 20, "{}", seen.len());
    seen
}

fn message(octets: &[u8]) -> Option<Message<'_>> {
    let packet = Packet::parse(octets).ok()?;
    let mad = packet.headers.deth.and(Mad::parse(packet.payload).ok())?;
    mad.cm().ok()?
}

#[test]
fn rping_of_linux_asks_and_is_answered() {
    let seen = rping();
    let (client, server) = (seen[0].from, seen[0].to);
    let Some(Message::Req(req)) = message(&seen[0].octets) else { panic!("a REQ") };
    let mut host = Host::new(Config::new(server, 1));
    host.port.listen(req.service_id, 1).unwrap();
    let now = Instant::ZERO;
    let feed = |host: &mut Host, from, octets: &[u8]| {
        host.port.handle_datagram(now, from, Some(server.ip()), 0, octets, &host.mem);
        host.events.extend(std::iter::from_fn(|| host.port.poll_event()));
        host.wcs.extend(std::iter::from_fn(|| host.port.poll_completion()).map(|(q, c)| (q, c.wc)));
    };
    feed(&mut host, client, &seen[0].octets);
    let request = host.request();
    assert_eq!((request.cm.qpn, request.cm.token), (req.qpn, None));
    // rxe's MADs come from another port than it listens at.
    assert_ne!(client.port(), UDP_PORT);
    assert_eq!(request.cm.peer, SocketAddr::new(client.ip(), UDP_PORT));

    let qpn = host.qp(QpType::Rc);
    host.mem.add(1, PD, Access::LOCAL_WRITE, 0, vec![0; 4096]);
    host.port.accept(now, &request, qpn, &Accept::default()).unwrap();
    for n in 0..8_u32 {
        let place = Sge::new(u64::from(n) * 64, 64, LKey(1));
        host.port.post_recv(qpn, RecvWr::new(n.into(), [place]), 0).unwrap();
    }
    let mut train = Train::default();
    let mut transmit = |host: &mut Host| {
        let to = host.port.poll_transmit(now, &host.mem, Limits::default(), &mut train)?;
        Some((to, train.octets().to_vec()))
    };
    let (to, rep) = transmit(&mut host).expect("a REP");
    assert_eq!((to.to, to.from), (SocketAddr::new(client.ip(), UDP_PORT), server));
    let Some(Message::Rep(rep)) = message(&rep) else { panic!("a REP") };
    assert_eq!((rep.remote_comm_id, rep.qpn), (req.local_comm_id, qpn));
    assert!(rep.responder_resources <= req.initiator_depth);

    // All that the client sent has a good ICRC, though its Identification is hidden; but what
    // follows is for the server of then.
    let rest: Vec<&Seen> = seen[1..].iter().filter(|seen| seen.from.ip() == client.ip()).collect();
    assert!(rest.iter().any(|seen| seen.id.identification != 0));
    for seen in &rest {
        feed(&mut host, seen.from, &seen.octets);
    }
    let stats = *host.port.stats();
    assert_eq!((stats.icrc_good, stats.df_learnt), (1 + rest.len() as u64, 1));
    assert_eq!(stats.icrc_bad + stats.icrc_other_df + stats.icrc_unknown + stats.malformed, 0);
    assert!(stats.unknown_qp > 5 && stats.mads_received > 1, "{stats:?}");
    assert!(host.wcs.is_empty() && !host.established(qpn));

    // The same for the server of now: its queue pair and its PSN, under the same Identification.
    let theirs = seen.iter().find_map(|seen| match message(&seen.octets) {
        Some(Message::Rep(rep)) if seen.from.ip() == server.ip() => Some(rep),
        _ => None,
    });
    let theirs = theirs.expect("the REP of then");
    let mut sent = Vec::new();
    for seen in rest.iter().filter(|seen| seen.octets[0] == 0x04).take(3) {
        let mut octets = seen.octets.clone();
        let psn = Packet::parse(&octets).unwrap().headers.bth.psn().since(theirs.start_psn);
        octets[5..8].copy_from_slice(&qpn.0.to_be_bytes()[1..]);
        let psn = rep.start_psn.add(psn).get().to_be_bytes();
        octets[9..12].copy_from_slice(&psn[1..]);
        sign(seen.from, server, seen.id.identification, seen.id.dont_fragment, &mut octets);
        sent.push(Packet::parse(&seen.octets).unwrap().payload.to_vec());
        feed(&mut host, seen.from, &octets);
        if !host.wcs.is_empty() {
            break;
        }
    }
    assert!(host.established(qpn), "the first packet is as good as the RTU");
    let wc = host.wcs_of(qpn)[0];
    assert_eq!((wc.status, wc.opcode, wc.id), (WcStatus::SUCCESS, WcOpcode::RECV, 0));
    // rping tells address, key and length.
    assert_eq!(wc.byte_len as usize, sent[0].len());
    assert_eq!(host.mem.bytes(1)[..sent[0].len()], sent[0]);
    // What came for the server of then was answered, too.
    let is_ack = |(_, octets): &(_, Vec<u8>)| octets[0] == 0x11;
    let answers = std::iter::from_fn(|| transmit(&mut host));
    let (to, ack) = answers.filter(is_ack).last().expect("an ACK");
    assert_eq!(to.to, SocketAddr::new(client.ip(), UDP_PORT));
    let ack = Packet::parse(&ack).unwrap();
    assert_eq!((ack.headers.bth.dest_qp(), ack.headers.aeth.unwrap().msn()), (req.qpn, 1));
}

#[test]
fn a_socket_bound_to_all_addresses_learns_its_own() {
    let mut net = Net::pair(0);
    let real = net.hosts[1].addr;
    net.hosts[1].port = Port::new(Config::new(addr("0.0.0.0:4791"), 9));
    net.listen(1);
    let host = &mut net.hosts[1];
    let qpn = host.qp(QpType::Rc);
    let connect = Connect::new(net.hosts[0].addr, SERVICE);
    let host = &mut net.hosts[1];
    let unsaid = host.port.connect(net.now, qpn, &connect);
    assert_eq!(unsaid, Err(PortError::NoLocalAddress(connect.peer.ip())));
    // Without the address that it came to nothing can be checked.
    host.port.handle_datagram(net.now, connect.peer, None, 0, &[0; 60], &host.mem);
    assert_eq!((host.port.stats().icrc_unknown, host.port.peers()), (1, 0));
    // Each train is asserted to come from the address that the peer knows.
    let [_, server] = net.connected(QpType::Rc);
    assert_eq!(net.hosts[1].port.qp(server).unwrap().attributes().local, real);
    // And told by the program.
    let connect = Connect { local_ip: Some(real.ip()), ..connect };
    net.hosts[1].port.connect(net.now, qpn, &connect).unwrap();
    net.run_out();
    assert!(net.hosts[1].events.iter().any(|e| matches!(e, Event::Rejected { .. })));
}

#[test]
fn mads_are_signed_for_what_a_socket_sends() {
    let mut net = Net::pair(0);
    net.tap = Some(Vec::new());
    net.listen(1);
    net.connected(QpType::Rc);
    for flying in net.tap.take().unwrap() {
        let (SocketAddr::V4(a), SocketAddr::V4(b)) = (flying.from, flying.to) else {
            panic!("IPv4")
        };
        let (src_port, dst_port) = (a.port(), b.port());
        let path = PathV4 { src: *a.ip(), dst: *b.ip(), src_port, dst_port };
        let id = Identification { identification: 0, dont_fragment: true };
        assert_eq!(verify_unknown_id(&path, &flying.octets, Some(true)), Some(id));
    }
    assert_eq!(net.hosts[1].port.stats().df_learnt, 1);
}
