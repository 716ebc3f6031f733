//! Two ports on a link that is too slow for them and marks packets when its queue is long: marks
//! become notifications, notifications a lower rate, and everything is done all the same.

use std::{cmp::Reverse, collections::BinaryHeap, time::Duration};

use userdma_proto::{
    mem::PdId,
    roce::{
        self, PathMtu, Port, QpAttr, Train,
        congestion::{Dcqcn, DcqcnError},
        port::{Config, Limits, PortError},
    },
    time::Instant,
    verbs::{Access, QpState, QpType, RemoteAddr, SendOp, SendWr, Sge, Wc},
    wire::{
        ids::{LKey, Psn, Qpn, RKey},
        roce::{Packet, opcode::Opcode},
    },
};
use userdma_tests::{PD, PlainMemory};

const REGION: u32 = 0x1000;
const LEN: usize = 1 << 18;
const DELAY: Duration = Duration::from_micros(10);

/// One direction of the link.
struct Way {
    /// Octets per second.
    rate: u64,
    /// Packets are marked while more octets than this wait. 0: all are.
    mark_above: u64,
    /// When the last packet that waits has left.
    free_at: Instant,
    /// Octets that waited, at most.
    longest: u64,
    octets: u64,
    marked: u64,
    cnps: u64,
}

/// When it arrives, in which order, at whom; ECN bits and octets.
type Flying = (Instant, u64, usize, u8, Vec<u8>);

struct World {
    ports: [Port; 2],
    mem: [PlainMemory; 2],
    /// From each.
    ways: [Way; 2],
    now: Instant,
    sky: BinaryHeap<Reverse<Flying>>,
    order: u64,
    wcs: Vec<(usize, Qpn, Wc)>,
}

impl World {
    fn new(rate: u64, mark_above: u64) -> Self {
        let ports = [1, 2].map(|host| {
            let addr = format!("192.0.2.{host}:4791").parse().unwrap();
            let mut config = Config::new(addr, host);
            config.window = 4 << 20;
            config.stranger = roce::Window { packets: 4096, octets: 4 << 20 };
            Port::new(config)
        });
        let all = Access::REMOTE_WRITE | Access::REMOTE_READ | Access::LOCAL_WRITE;
        let mem = [(); 2].map(|()| PlainMemory::default());
        mem.iter().for_each(|mem| mem.add(REGION, PD, all, 0, vec![1; LEN]));
        let way = || Way {
            rate,
            mark_above,
            free_at: Instant::ZERO,
            longest: 0,
            octets: 0,
            marked: 0,
            cnps: 0,
        };
        let (sky, wcs) = (BinaryHeap::new(), Vec::new());
        let (ways, now, order) = ([way(), way()], Instant::ZERO, 0);
        Self { ports, mem, ways, now, sky, order, wcs }
    }

    fn connected(&mut self, kind: QpType, dcqcn: Option<Dcqcn>) -> [Qpn; 2] {
        let mut config = roce::Config::new(kind, PdId(PD), Qpn(0));
        (config.dcqcn, config.ecn, config.max_send_wr) = (dcqcn, true, 1024);
        let ends = self.ports.each_ref().map(|port| port.config().local);
        let qpns = self.ports.each_mut().map(|port| port.create_qp(config.clone()).unwrap());
        for side in 0..2 {
            let attr = QpAttr {
                peer: Some(ends[1 - side]),
                dest_qp: Some(qpns[1 - side]),
                path_mtu: Some(PathMtu::Mtu1024),
                rq_psn: Some(Psn::new(0)),
                ..QpAttr::to(QpState::Rtr)
            };
            let port = &mut self.ports[side];
            port.modify(qpns[side], &QpAttr::to(QpState::Init)).unwrap();
            port.modify(qpns[side], &attr).unwrap();
            let attr = QpAttr {
                sq_psn: Some(Psn::new(0)),
                // 134 ms.
                timeout: Some(15),
                ..QpAttr::to(QpState::Rts)
            };
            port.modify(qpns[side], &attr).unwrap();
            port.set_window(qpns[side], roce::Window { packets: 512, octets: 512 << 10 }).unwrap();
        }
        qpns
    }

    fn step(&mut self) -> bool {
        let mut train = Train::default();
        for i in 0..2 {
            let (port, mem, way) = (&mut self.ports[i], &self.mem[i], &mut self.ways[i]);
            while let Some(to) = port.poll_transmit(self.now, mem, Limits::default(), &mut train) {
                for octets in train.octets().chunks(train.segment_len()) {
                    let opcode = Packet::parse(octets).unwrap().headers.bth.opcode();
                    way.cnps += u64::from(opcode == Opcode::CNP);
                    way.octets += octets.len() as u64;
                    let waits = (way.free_at - self.now).as_nanos() as u64;
                    let queue = waits * way.rate / 1_000_000_000;
                    way.longest = way.longest.max(queue);
                    let marked = to.tos & 3 == 2 && queue >= way.mark_above;
                    way.marked += u64::from(marked);
                    let takes = octets.len() as u64 * 1_000_000_000 / way.rate;
                    way.free_at = way.free_at.max(self.now) + Duration::from_nanos(takes);
                    self.order += 1;
                    let ecn = if marked { 3 } else { to.tos & 3 };
                    let at = way.free_at + DELAY;
                    self.sky.push(Reverse((at, self.order, 1 - i, ecn, octets.to_vec())));
                }
            }
        }
        self.collect();
        let timers = self.ports.iter().filter_map(Port::poll_timeout);
        let Some(next) = timers.chain(self.sky.peek().map(|Reverse(first)| first.0)).min() else {
            return false;
        };
        self.now = self.now.max(next);
        while self.sky.peek().is_some_and(|Reverse(first)| first.0 <= self.now) {
            let Some(Reverse((_, _, i, ecn, octets))) = self.sky.pop() else { break };
            let from = self.ports[1 - i].config().local;
            self.ports[i].handle_datagram(self.now, from, None, ecn, &octets, &self.mem[i]);
        }
        for port in &mut self.ports {
            if port.poll_timeout().is_some_and(|at| at <= self.now) {
                port.handle_timeout(self.now);
            }
        }
        self.collect();
        true
    }

    fn collect(&mut self) {
        for (i, port) in self.ports.iter_mut().enumerate() {
            while let Some((qpn, done)) = port.poll_completion() {
                self.wcs.push((i, qpn, done.wc));
            }
        }
    }

    fn run(&mut self, done: impl Fn(&Self) -> bool) {
        for _ in 0..3_000_000 {
            if done(self) {
                return;
            }
            assert!(self.step(), "it came to rest");
        }
        panic!("still busy");
    }
}

fn wr(id: u64, op: SendOp) -> SendWr {
    SendWr::new(id, op, [Sge::new(0, LEN as u32, LKey(REGION))])
}

const TARGET: RemoteAddr = RemoteAddr::new(0, RKey(REGION));

/// A link of 1 GB/s that marks from 100 kB on, and 60 times 256 KiB on each of two queue pairs. The
/// longest queue is that after the first quarter.
fn load(dcqcn: Option<Dcqcn>, op: SendOp) -> World {
    let mut world = World::new(1_000_000_000, 100_000);
    let qps = [(); 2].map(|()| world.connected(QpType::Rc, dcqcn));
    for id in 0..60 {
        for [client, _] in qps {
            world.ports[0].post_send(client, wr(id, op), 0).unwrap();
        }
    }
    world.run(|world| world.wcs.len() >= 30);
    world.ways.iter_mut().for_each(|way| way.longest = 0);
    world.run(|world| world.wcs.len() == 120);
    assert!(world.wcs.iter().all(|(_, _, wc)| wc.status.is_ok()));
    let stats: Vec<_> = world
        .ports
        .iter()
        .flat_map(Port::qps)
        .map(|qp| (qp.stats().timeouts, qp.state()))
        .collect();
    assert!(stats.iter().all(|&stats| stats == (0, QpState::Rts)), "{stats:?}");
    world
}

#[test]
fn marks_slow_the_sender_until_the_queue_is_short() {
    for (op, from) in [(SendOp::Write(TARGET), 0), (SendOp::Read(TARGET), 1)] {
        let free = load(None, op);
        let held = load(Some(Dcqcn::default()), op);
        for world in [&free, &held] {
            assert!(world.ways[from].marked > 1000, "{op:?}: {} marked", world.ways[from].marked);
            let told = world.ports[from].stats().cnps_received;
            assert!(told > 50 && told == world.ways[1 - from].cnps, "{op:?}: {told} told");
        }
        let sum = |world: &World, side: usize| -> (u64, u64) {
            let stats = world.ports[side].qps().map(|qp| qp.stats());
            stats.fold((0, 0), |(a, b), stats| (a + stats.cnps_received, b + stats.paced))
        };
        assert!(sum(&held, from).0 == held.ports[from].stats().cnps_received);
        assert!(sum(&held, from).1 > 100 && sum(&free, from).1 == 0);
        // Without, the queue is what both windows let through.
        let (long, short) = (free.ways[from].longest, held.ways[from].longest);
        assert!(long > 700_000 && short * 3 < long, "{op:?}: {long} without, {short} with");
        // And the link is used.
        let (fast, slow) = (free.now - Instant::ZERO, held.now - Instant::ZERO);
        assert!(slow < fast * 3 / 2, "{op:?}: {fast:?} without, {slow:?} with");
    }
}

/// Every packet is marked, for ever: it goes on at the least rate, and nobody gives up.
#[test]
fn marks_without_end_do_not_stop_it() {
    for (kind, op) in [
        (QpType::Rc, SendOp::Write(TARGET)),
        (QpType::Rc, SendOp::Read(TARGET)),
        (QpType::Uc, SendOp::Write(TARGET)),
    ] {
        let mut world = World::new(1_000_000_000, 0);
        let [client, server] = world.connected(kind, Some(Dcqcn::default()));
        let post = |world: &mut World| {
            (0..12).for_each(|id| world.ports[0].post_send(client, wr(id, op), 0).unwrap());
        };
        post(&mut world);
        // UC waits for nothing until it is told to.
        world.run(|world| world.wcs.len() == 12 && world.ways[1].cnps + world.ways[0].cnps > 2);
        post(&mut world);
        world.run(|world| world.wcs.len() == 24);
        let (side, qpn) = if matches!(op, SendOp::Read(_)) { (1, server) } else { (0, client) };
        let qp = world.ports[side].qp(qpn).unwrap();
        assert!(qp.stats().cnps_received > 20, "{op:?}: {:?}", qp.stats());
        assert!(world.ports.iter().flat_map(Port::qps).all(|qp| qp.stats().timeouts == 0));
        // What the window lets through went out before the first CNP; the rest goes slowly.
        let took = world.now - Instant::ZERO;
        let range = Duration::from_millis(20)..Duration::from_millis(1000);
        assert!(range.contains(&took), "{kind:?} {op:?}: {took:?}");
    }
}

/// The rate is told, comes back after the last notification, and an end while it is held to one
/// leaves no timer.
#[test]
fn a_rate_is_forgotten_again() {
    let mut world = World::new(1_000_000_000, 0);
    let [client, _] = world.connected(QpType::Rc, Some(Dcqcn::default()));
    let write = wr(1, SendOp::Write(TARGET));
    (0..4).for_each(|_| world.ports[0].post_send(client, write.clone(), 0).unwrap());
    world.run(|world| world.ports[0].stats().cnps_received >= 3);
    world.ways[0].mark_above = u64::MAX;
    world.run(|world| world.wcs.len() == 4);
    let sent = world.ways[0].octets;
    // A minute without any: as fast as the link is.
    world.now = world.now + Duration::from_secs(60);
    let start = world.now;
    (0..4).for_each(|_| world.ports[0].post_send(client, write.clone(), 0).unwrap());
    world.run(|world| world.wcs.len() == 8);
    let rate = (world.ways[0].octets - sent) as f64 / (world.now - start).as_secs_f64();
    assert!(rate > 0.9e9, "{rate}");

    world.ways[0].mark_above = 0;
    (0..40).for_each(|_| world.ports[0].post_send(client, write.clone(), 0).unwrap());
    world.run(|world| world.ports[0].stats().cnps_received >= 20);
    world.ports[0].modify(client, &QpAttr::to(QpState::Err)).unwrap();
    while world.step() {}
    assert!(world.ports.iter().all(|port| port.poll_timeout().is_none()));
}

#[test]
fn parameters_without_sense_are_refused() {
    let mut config = roce::Config::new(QpType::Rc, PdId(PD), Qpn(0));
    let mut nonsense = Dcqcn::default();
    nonsense.g_shift = 40;
    config.dcqcn = Some(nonsense);
    let refused = World::new(1, 0).ports[0].create_qp(config);
    assert_eq!(refused, Err(PortError::Dcqcn(DcqcnError::Gain(40))));
}
