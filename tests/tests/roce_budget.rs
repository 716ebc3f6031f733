//! Many queue pairs of one port toward one peer: together they never have more on the way than its
//! receive buffer takes, and what their READs ask for never more than their own takes; everything
//! is done all the same, through loss, ends and silence.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, VecDeque},
    net::SocketAddr,
    time::Duration,
};

use userdma_proto::{
    mem::PdId,
    roce::{
        self, PathMtu, Port, QpAttr, Train,
        port::{Accept, Config, Connect, Event, Limits, PortError},
    },
    time::Instant,
    verbs::{
        Access, QpState, QpType, RecvWr, RemoteAddr, SendFlags, SendOp, SendWr, Sge, Wc, WcStatus,
    },
    wire::{
        ids::{LKey, Psn, Qpn, RKey},
        mad::cm::PortSpace,
        roce::{
            Packet,
            opcode::{Opcode, Operation},
        },
    },
};
use userdma_tests::{PD, PlainMemory, Rng};

const SERVICE: u64 = PortSpace::TCP.service_id(7174);
const TARGET: u32 = 0x1000;
const SOURCE: u32 = 0x2000;
const SINK: u32 = 0x3000;
const LEN: usize = 1 << 16;
/// One way through the network.
const DELAY: Duration = Duration::from_micros(20);
/// How long a host takes to read a packet out of its buffer.
const READING: Duration = Duration::from_micros(2);

/// What a packet occupies of a receive buffer.
fn weight(packet: &Packet<'_>) -> u64 {
    (packet.payload_len as u64 + 60).max(1024)
}

/// Whether it is data that an acknowledgement or an answer follows, or an answer with data.
fn counts(opcode: Opcode) -> bool {
    let operation = opcode.info().map(|info| info.operation);
    opcode != Opcode::UD_SEND_ONLY && operation != Some(Operation::Ack)
}

struct Host {
    port: Port,
    mem: PlainMemory,
    addr: SocketAddr,
    /// What its socket holds, with the weights that count.
    buffer: VecDeque<Flying>,
    /// On the way to it, and in the buffer.
    load: u64,
    most: u64,
    reads_at: Option<Instant>,
    wcs: Vec<(Qpn, Wc)>,
}

#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Flying {
    at: Instant,
    order: u64,
    to: usize,
    weight: u64,
    octets: Vec<u8>,
}

struct World {
    hosts: [Host; 2],
    now: Instant,
    sky: BinaryHeap<Reverse<Flying>>,
    order: u64,
    rng: Rng,
    /// One in so many is lost, 0 never: of what counts, and of acknowledgements.
    loss: [u64; 2],
    lost: u64,
    train: Train,
}

impl World {
    /// Two hosts; `windows` are what their sockets take.
    fn new(seed: u64, windows: [u32; 2]) -> Self {
        let hosts = [0, 1].map(|i| {
            let addr: SocketAddr = format!("192.0.2.{}:4791", i + 1).parse().unwrap();
            let mut config = Config::new(addr, seed * 2 + i);
            config.window = windows[i as usize];
            config.out_of_order = seed % 2 == 1;
            let mem = PlainMemory::default();
            let all = Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC;
            mem.add(TARGET, PD, all, 0, vec![1; LEN]);
            mem.add(SOURCE, PD, Access::empty(), 0, vec![2; LEN]);
            mem.add(SINK, PD, Access::LOCAL_WRITE, 0, vec![3; LEN]);
            let (buffer, wcs) = (VecDeque::new(), Vec::new());
            Host {
                port: Port::new(config),
                mem,
                addr,
                buffer,
                load: 0,
                most: 0,
                reads_at: None,
                wcs,
            }
        });
        Self {
            hosts,
            now: Instant::ZERO,
            sky: BinaryHeap::new(),
            order: 0,
            rng: Rng::new(seed),
            loss: [0; 2],
            lost: 0,
            train: Train::default(),
        }
    }

    fn config() -> roce::Config {
        let mut config = roce::Config::new(QpType::Rc, PdId(PD), Qpn(0));
        (config.max_send_wr, config.max_recv_wr) = (64, 64);
        config
    }

    /// A connection by the connection managers, with this path MTU.
    fn connected(&mut self, mtu: PathMtu) -> [Qpn; 2] {
        let [a, b] = &mut self.hosts;
        let client = a.port.create_qp(Self::config()).unwrap();
        let connect = Connect { mtu, ..Connect::new(b.addr, SERVICE) };
        a.port.connect(self.now, client, &connect).unwrap();
        let mut server = None;
        loop {
            while let Some(event) = self.hosts[1].port.poll_event() {
                if let Event::Request(request) = event {
                    let port = &mut self.hosts[1].port;
                    let qpn = port.create_qp(Self::config()).unwrap();
                    port.accept(self.now, &request, qpn, &Accept::default()).unwrap();
                    server = Some(qpn);
                } else if let (Event::Established { .. }, Some(server)) = (event, server) {
                    return [client, server];
                }
            }
            assert!(self.step(), "no connection");
        }
    }

    fn transmit(&mut self, i: usize) {
        let mut train = std::mem::take(&mut self.train);
        loop {
            let host = &mut self.hosts[i];
            let way = host.port.poll_transmit(self.now, &host.mem, Limits::default(), &mut train);
            if way.is_none() {
                break;
            }
            for octets in train.octets().chunks(train.segment_len()) {
                let packet = Packet::parse(octets).unwrap();
                let counted = counts(packet.headers.bth.opcode());
                let loss = self.loss[usize::from(!counted)];
                if loss > 0 && self.rng.one_in(loss) {
                    self.lost += 1;
                    continue;
                }
                let weight = if counted { weight(&packet) } else { 0 };
                let (to, octets) = (1 - i, octets.to_vec());
                self.order += 1;
                let at = self.now + DELAY;
                self.sky.push(Reverse(Flying { at, order: self.order, to, weight, octets }));
                let host = &mut self.hosts[to];
                host.load += weight;
                host.most = host.most.max(host.load);
            }
        }
        self.train = train;
        self.collect(i);
    }

    fn collect(&mut self, i: usize) {
        let host = &mut self.hosts[i];
        while let Some((qpn, done)) = host.port.poll_completion() {
            host.wcs.push((qpn, done.wc));
        }
    }

    fn step(&mut self) -> bool {
        (0..2).for_each(|i| self.transmit(i));
        let timers = self.hosts.iter().flat_map(|h| [h.port.poll_timeout(), h.reads_at]).flatten();
        let arrival = self.sky.peek().map(|Reverse(flying)| flying.at);
        let Some(next) = timers.chain(arrival).min() else { return false };
        self.now = self.now.max(next);
        while self.sky.peek().is_some_and(|Reverse(flying)| flying.at <= self.now) {
            let Some(Reverse(flying)) = self.sky.pop() else { break };
            let host = &mut self.hosts[flying.to];
            host.buffer.push_back(flying);
            host.reads_at.get_or_insert(self.now + READING);
        }
        for i in 0..2 {
            let [a, b] = &mut self.hosts;
            let (host, from) = if i == 0 { (a, b.addr) } else { (b, a.addr) };
            if host.reads_at.is_some_and(|at| at <= self.now) {
                let read = host.buffer.pop_front().unwrap();
                host.load -= read.weight;
                host.reads_at = (!host.buffer.is_empty()).then(|| self.now + READING);
                host.port.handle_datagram(self.now, from, None, 0, &read.octets, &host.mem);
            }
            if host.port.poll_timeout().is_some_and(|at| at <= self.now) {
                host.port.handle_timeout(self.now);
            }
            self.collect(i);
        }
        true
    }

    fn run(&mut self, done: impl Fn(&Self) -> bool) {
        for _ in 0..2_000_000 {
            if done(self) || !self.step() {
                return;
            }
        }
        panic!("still busy");
    }

    /// Nothing is on the way, and nobody waits.
    fn is_idle(&self) -> bool {
        let [a, b] = &self.hosts;
        let toward = a.port.budget_toward(b.addr);
        let used = toward.map_or((0, 0), |budget| (budget.used, budget.waiting));
        let own = a.port.own_budget();
        used == (0, 0) && (own.used, own.waiting) == (0, 0)
    }
}

fn local(key: u32, len: u32) -> Sge {
    Sge::new(0, len, LKey(key))
}

/// Random work of one queue pair: how many completions it makes at this side, and how many receives
/// it takes at the other.
fn work(rng: &mut Rng, n: usize, longest: u64) -> (Vec<SendWr>, usize) {
    let remote = RemoteAddr::new(0, RKey(TARGET));
    let mut sends = 0;
    let wrs = (0..n as u64).map(|id| {
        let len = rng.below(longest) as u32;
        match rng.below(8) {
            0..=2 => SendWr::write(id, [local(SOURCE, len)], remote),
            3 | 4 => {
                sends += 1;
                SendWr::send(id, [local(SOURCE, len)])
            }
            5 | 6 => SendWr::new(id, SendOp::Read(remote), [local(SINK, len)]),
            _ => {
                let op = SendOp::FetchAdd { remote, add: 1, mask: 0 };
                SendWr::new(id, op, [local(SINK, 8)])
            }
        }
    });
    let wrs = wrs.collect();
    (wrs, sends)
}

/// Posts everything at once, on as many queue pairs; receives first.
fn post_all(world: &mut World, qps: &[[Qpn; 2]], n: usize, longest: u64) {
    for &[client, server] in qps {
        let (wrs, sends) = work(&mut world.rng, n, longest);
        let [a, b] = &mut world.hosts;
        for id in 0..sends as u64 {
            let wr = RecvWr::new(id, [local(SINK, LEN as u32)]);
            b.port.post_recv(server, wr, 0).unwrap();
        }
        for wr in wrs {
            assert!(wr.flags.contains(SendFlags::SIGNALED));
            a.port.post_send(client, wr, 0).unwrap();
        }
    }
}

fn check_done(world: &World, qps: &[[Qpn; 2]], n: u64) {
    for &[client, _] in qps {
        let of = world.hosts[0].wcs.iter().filter(|(qpn, _)| *qpn == client);
        let ids: Vec<_> = of.map(|(_, wc)| (wc.id, wc.status)).collect();
        let expected: Vec<_> = (0..n).map(|id| (id, WcStatus::SUCCESS)).collect();
        assert_eq!(ids, expected, "{client}");
    }
}

#[test]
fn many_queue_pairs_share_the_peers_buffer_and_their_own() {
    // Loss of data, and of acknowledgements, one in so many; with odd seeds both sides keep what comes
    // out of order.
    for (seed, loss) in [
        (1, [0, 0]),
        (2, [0, 0]),
        (3, [20, 20]),
        (4, [20, 20]),
        (5, [7, 0]),
        (6, [7, 0]),
        (7, [0, 5]),
        (8, [0, 5]),
    ] {
        let windows = [40_000, 60_000];
        let mut world = World::new(seed, windows);
        world.hosts[1].port.listen(SERVICE, 64).unwrap();
        let mtus = [PathMtu::Mtu1024, PathMtu::Mtu4096, PathMtu::Mtu256];
        let qps: Vec<_> = (0..200).map(|i| world.connected(mtus[i % 3])).collect();
        let agreed = |qp: &roce::Qp| qp.attributes().out_of_order == (seed % 2 == 1);
        assert!(world.hosts.iter().flat_map(|host| host.port.qps()).all(agreed));
        world.loss = loss;
        post_all(&mut world, &qps, 4, 9000);
        world.hosts.iter_mut().for_each(|host| host.most = 0);
        let waiting = std::cell::Cell::new(0);
        world.run(|world| {
            let budget = world.hosts[0].port.budget_toward(world.hosts[1].addr).unwrap();
            waiting.set(waiting.get().max(budget.waiting));
            assert_eq!((budget.octets, budget.used <= budget.octets), (60_000, true), "{budget:?}");
            world.hosts[0].wcs.len() == 800
        });
        check_done(&world, &qps, 4);
        assert!(waiting.get() > 50, "{} waited", waiting.get());
        for (host, window) in world.hosts.iter().zip(windows) {
            let (most, window) = (host.most, u64::from(window));
            assert!(most <= window, "seed {seed}: {most} of {window}");
            // And it is made use of.
            assert!(most * 2 > window, "seed {seed}: {most} of {window}");
        }
        let stats = world.hosts[0].port.qps().map(|qp| qp.stats().packets_resent).sum::<u64>();
        assert_eq!(stats > 100, loss != [0, 0], "{stats} resent");
        assert!(loss == [0, 0] || world.lost > 100, "{} lost", world.lost);
        assert!(world.is_idle());
    }
}

/// What one of those has that end, in any way, is the others' again.
#[test]
fn what_ends_gives_its_room_back() {
    let mut world = World::new(7, [20_000, 20_000]);
    world.hosts[1].port.listen(SERVICE, 64).unwrap();
    let qps: Vec<_> = (0..60).map(|_| world.connected(PathMtu::Mtu1024)).collect();
    world.loss = [10, 10];
    post_all(&mut world, &qps, 6, 20_000);
    world.run(|world| world.hosts[0].wcs.len() > 20);
    let peer = world.hosts[1].addr;
    assert!(world.hosts[0].port.budget_toward(peer).unwrap().waiting > 20);
    for (i, &[client, server]) in qps.iter().enumerate() {
        let [a, b] = &mut world.hosts;
        match i % 6 {
            0 => a.port.destroy_qp(world.now, client).unwrap(),
            1 => a.port.modify(client, &QpAttr::to(QpState::Err)).unwrap(),
            2 => a.port.modify(client, &QpAttr::to(QpState::Reset)).unwrap(),
            // The peer is gone and says nothing: time-outs.
            3 => b.port.destroy_qp(world.now, server).unwrap(),
            _ => {}
        }
    }
    world.run(|_| false);
    let alive: Vec<_> = qps.iter().copied().skip(4).step_by(6).collect();
    check_done(&world, &alive, 6);
    assert!(world.is_idle());
    for &[client, _] in &qps {
        if world.hosts[0].port.qp(client).is_some() {
            world.hosts[0].port.destroy_qp(world.now, client).unwrap();
        }
    }
    assert_eq!(world.hosts[0].port.budget_toward(peer), None);
}

/// Queue pairs whose peer has no receive hold nothing for long, and those that wait for ever nothing
/// for ever.
#[test]
fn who_waits_keeps_nobody_else_waiting() {
    let mut world = World::new(8, [30_000, 30_000]);
    let ends = world.hosts.each_ref().map(|host| host.addr);
    let qps: Vec<[Qpn; 2]> = (0..12)
        .map(|i| {
            let qpns = world.hosts.each_mut().map(|h| h.port.create_qp(World::config()).unwrap());
            for (side, host) in world.hosts.iter_mut().enumerate() {
                let attr = QpAttr {
                    local: Some(ends[side]),
                    peer: Some(ends[1 - side]),
                    dest_qp: Some(qpns[1 - side]),
                    path_mtu: Some(PathMtu::Mtu1024),
                    rq_psn: Some(Psn::new(0)),
                    // 491 ms where there is no receive.
                    min_rnr_timer: Some(31),
                    ..QpAttr::to(QpState::Rtr)
                };
                host.port.modify(qpns[side], &QpAttr::to(QpState::Init)).unwrap();
                host.port.modify(qpns[side], &attr).unwrap();
                let attr = QpAttr {
                    sq_psn: Some(Psn::new(0)),
                    // Some wait for ever for an acknowledgement.
                    timeout: Some(if i % 3 == 0 { 0 } else { 14 }),
                    ..QpAttr::to(QpState::Rts)
                };
                host.port.modify(qpns[side], &attr).unwrap();
            }
            qpns
        })
        .collect();
    let remote = RemoteAddr::new(0, RKey(TARGET));
    for (i, &[client, server]) in qps.iter().enumerate() {
        let [a, b] = &mut world.hosts;
        match i % 3 {
            // Nobody is there: silence.
            0 => b.port.modify(server, &QpAttr::to(QpState::Reset)).unwrap(),
            1 => {
                let wr = SendWr::send(1, [local(SOURCE, 20_000)]);
                a.port.post_send(client, wr, 0).unwrap();
                continue;
            }
            _ => {}
        }
        let wr = SendWr::write(1, [local(SOURCE, 20_000)], remote);
        a.port.post_send(client, wr, 0).unwrap();
    }
    let peer = ends[1];
    assert_eq!(world.hosts[0].port.budget_toward(peer).unwrap().octets, 149_000);
    let window = world.hosts[0].port.set_peer_window(qps[0][0], 30_000);
    assert_eq!(window, Ok(()));
    assert_eq!(world.hosts[0].port.set_peer_window(Qpn(1), 1), Err(PortError::UnknownQp(Qpn(1))));
    world.run(|world| world.hosts[0].wcs.len() == 4);
    let done: Vec<_> = world.hosts[0].wcs.iter().map(|(qpn, _)| *qpn).collect();
    assert!(qps.iter().skip(2).step_by(3).all(|[qpn, _]| done.contains(qpn)), "{done:?}");
    // Eight had 20,000 octets each on the way, for 100 ms and not for 491 ms or for ever.
    assert!(world.now < Instant::ZERO + Duration::from_millis(1000), "{:?}", world.now);
    let wr = RecvWr::new(1, [local(SINK, LEN as u32)]);
    for [_, server] in qps.iter().skip(1).step_by(3) {
        world.hosts[1].port.post_recv(*server, wr.clone(), 0).unwrap();
    }
    world.run(|world| world.hosts[0].wcs.len() == 8);
    assert!(world.hosts[0].wcs.iter().all(|(_, wc)| wc.status.is_ok()));
}

/// However small the buffer is, one packet goes, and asks for its acknowledgement.
#[test]
fn a_window_too_small_for_a_packet_lets_one_go() {
    for windows in [[1, 1], [7, 3], [900, 1500], [1023, 4000]] {
        let mut world = World::new(9, windows);
        world.hosts[1].port.listen(SERVICE, 64).unwrap();
        let qps: Vec<_> = (0..5).map(|_| world.connected(PathMtu::Mtu1024)).collect();
        post_all(&mut world, &qps, 5, 4000);
        let start = world.now;
        world.run(|world| world.hosts[0].wcs.len() == 25);
        check_done(&world, &qps, 5);
        let timeouts: u64 = world.hosts[0].port.qps().map(|qp| qp.stats().timeouts).sum();
        assert_eq!(timeouts, 0, "{windows:?}: {:?}", world.now - start);
        assert!(world.is_idle());
    }
}
