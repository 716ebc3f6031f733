//! A RoCEv2 port under a script: its peers, its program and the clock.

use std::{
    collections::{BTreeMap, VecDeque},
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use userdma_proto::{
    roce::{
        self, Completion, PathMtu, Port, QpAttr, Train, Window,
        cm::{Datagrams, Event as CmEvent, Reject, Resolve},
        port::{Accept, Config, Connect, Event, IcrcPolicy, Limits, PortError, Request},
    },
    time::Instant,
    verbs::{Access, PostError, QpState, QpType, RecvWr, UdDest},
    wire::{
        ids::{PKey, Psn, QKey, Qpn},
        mad::{GSI_QKEY, GSI_QPN, MAD_LEN},
        roce::{
            Headers, ICRC_LEN, Packet,
            bth::Bth,
            cnp::Cnp,
            deth::Deth,
            icrc::Identification,
            opcode::{Opcode, Operation},
        },
    },
};

use crate::{
    Choices,
    mads::{SERVICE, SERVICES, Seen, UD_SERVICE},
    memory::{BOUND, Books, DOMAIN, LEN, Recorder, Touch},
    peer::{self, Peer},
};

/// Three octets of settings ([`Script::new`]), then steps until the input ends. A step is one octet;
/// the lower four bits say what, the upper ones for which queue pair or peer.
///
/// | step | what happens |
/// |---|---|
/// | 0, 1 | a MAD of a peer comes; see [`Seen::mad`] |
/// | 2 to 4 | a request for a queue pair comes; see [`Peer::request`] |
/// | 5 | an answer, or a congestion notification |
/// | 6 | `n` (two octets, at most 2,047) octets of the input come as a packet |
/// | 7 | the program connects |
/// | 8 | it accepts or rejects a request |
/// | 9 | it disconnects, or destroys a queue pair |
/// | 10 | it posts a send or a receive |
/// | 11 | it makes a queue pair |
/// | 12 | something rare; see [`Script::rare`] |
/// | 13 | time passes (milliseconds, two octets; 0: up to the next time-out) |
/// | 14 | up to `n` trains (one octet, 0: all) are sent |
/// | 15 | the program takes its events |
///
/// Behind each packet that comes there are two choices: [`peer::damage`], and how it comes
/// ([`Script::arrive`]).
///
/// Nothing panics; queue pairs, peers, connections and events are bounded; what goes out is
/// well-formed, with a good ICRC, and has an end; memory is touched only where a queue pair's peer
/// may or its work says so; work completes once and in turn; a connection that begins ends once; and
/// where nobody speaks any more, all does.
pub fn roce_port(data: &[u8]) {
    run(data);
}

fn run(data: &[u8]) -> Script<'_> {
    let mut script = Script::new(Choices::new(data));
    while !script.choices.is_empty() {
        script.step();
    }
    script.end();
    script
}

const MOST_QPS: usize = 4;
const MOST_PEERS: usize = 3;
/// Connections, half-open ones, and MADs or events that wait.
const MOST: usize = 8;
const MOST_HALF_OPEN: usize = 3;
const MOST_QUEUED: usize = 6;
/// Lengths of a queue pair's queues, and pieces a request may have.
const MOST_WORK: usize = 5;
const MOST_PIECES: usize = 2;
const QKEY: QKey = QKey(0x1234_5678);
const UDP_PORT: u16 = 4791;

/// A queue pair, as its program and its peer know it.
#[derive(Debug, Default)]
struct Line {
    books: Books,
    peer: Peer,
    /// It takes packets: what the peer knows of its PSNs is right.
    receives: bool,
    /// Connections begun, and those that were told to be over; whether one is established.
    begun: usize,
    over: usize,
    up: bool,
    /// It was accepted, and its peer was not heard of: nothing may go out.
    held: bool,
}

struct Script<'a> {
    choices: Choices<'a>,
    port: Port,
    mem: Recorder,
    now: Instant,
    seen: Seen,
    lines: BTreeMap<Qpn, Line>,
    /// Their numbers, in the order in which they were made.
    order: Vec<Qpn>,
    /// Queue pairs that were destroyed since the program took its events.
    gone: Vec<Qpn>,
    requests: VecDeque<Box<Request>>,
    /// Events are taken, and trains sent, only where the script says so.
    lazy_program: bool,
    lazy_socket: bool,
    /// Calls of the program since it took its events.
    calls: usize,
    train: Train,
    tag: u64,
    id: u16,
    established: usize,
    disconnected: usize,
    succeeded: usize,
}

impl<'a> Script<'a> {
    /// One octet: the socket's address (lower two bits: IPv4, IPv6, all of IPv4, all), bit 2 the
    /// ICRC may be wrong, bit 3 the program is lazy, bit 4 the socket is, upper three the largest
    /// path MTU. One: time-outs of the connection manager, as codes, and how often it sends again.
    /// One: the seed.
    fn new(mut choices: Choices<'a>) -> Self {
        let [what, times, seed]: [u8; 3] = core::array::from_fn(|_| choices.any());
        let local = ["192.0.2.1", "2001:db8::1", "0.0.0.0", "::"][usize::from(what & 3)];
        let local = SocketAddr::new(local.parse().expect("an address"), UDP_PORT);
        let mut config = Config::new(local, seed.into());
        if what & 4 != 0 {
            config.icrc = IcrcPolicy::Lenient;
        }
        config.max_mtu = PathMtu::ALL[4 - usize::from(what >> 5) % 5];
        (config.max_qps, config.max_peers) = (MOST_QPS, MOST_PEERS);
        config.stranger = Window { packets: 16, octets: 16_000 };
        let cm = &mut config.cm;
        (cm.max_connections, cm.max_half_open) = (MOST, MOST_HALF_OPEN);
        cm.max_queued = MOST_QUEUED;
        (cm.response_timeout, cm.max_retries) = (times & 31, times >> 5);
        let remote = Access::REMOTE_READ
            | Access::REMOTE_WRITE
            | Access::REMOTE_ATOMIC
            | Access::FLUSH_GLOBAL
            | Access::FLUSH_PERSISTENT;
        let mut script = Self {
            choices,
            port: Port::new(config),
            mem: Recorder::new(remote, Qpn(0)),
            now: Instant::ZERO,
            seen: Seen::default(),
            lines: BTreeMap::new(),
            order: Vec::new(),
            gone: Vec::new(),
            requests: VecDeque::new(),
            lazy_program: what & 8 != 0,
            lazy_socket: what & 16 != 0,
            calls: 0,
            train: Train::default(),
            tag: 0,
            id: 0,
            established: 0,
            disconnected: 0,
            succeeded: 0,
        };
        script.port.listen(SERVICE, 2).expect("it is new");
        let service = Datagrams { qpn: Qpn(2), qkey: QKey(3), private_data: vec![4; 5] };
        script.port.listen_datagrams(UD_SERVICE, service).expect("it is new");
        script.create(QpType::Rc);
        script.mem.plain.bind(BOUND, script.order[0]);
        script
    }

    fn step(&mut self) {
        let step: u8 = self.choices.any();
        let at = usize::from(step >> 4);
        match step & 15 {
            0 | 1 => self.mad(at),
            2..=4 => self.request(at),
            5 => self.answer(at),
            6 => {
                let len = self.choices.any::<u16>() & 0x7ff;
                let octets = self.choices.octets(len.into()).to_vec();
                self.arrive(self.address(at), octets);
            }
            7 => self.connect(at),
            8 => self.answer_request(at),
            9 => self.leave(at),
            10 => self.post(at),
            11 => self.create([QpType::Rc, QpType::Rc, QpType::Uc, QpType::Ud][at & 3]),
            12 => self.rare(at),
            13 => {
                let time: u16 = self.choices.any();
                self.pass(match self.port.poll_timeout() {
                    Some(next) if time == 0 => next.max(self.now),
                    _ => self.now + Duration::from_millis(time.into()),
                });
            }
            14 => {
                let most = self.choices.any::<u8>();
                self.transmit(if most == 0 { usize::MAX } else { most.into() });
            }
            _ => self.take_events(),
        }
        self.collect();
    }

    fn qpn(&self, at: usize) -> Qpn {
        self.order.get(at % self.order.len().max(1)).copied().unwrap_or(Qpn(0x77))
    }

    /// Every address that a peer has; one more than are remembered of a family.
    fn address(&self, at: usize) -> SocketAddr {
        let local = self.port.config().local.ip();
        let v6 = match local {
            IpAddr::V4(_) => false,
            IpAddr::V6(ip) => !ip.is_unspecified() || at & 4 != 0,
        };
        let host = 2 + (at & 3) as u16;
        let ip: IpAddr = if v6 {
            [0x2001, 0xdb8, 0, 0, 0, 0, 0, host].into()
        } else {
            [192, 0, 2, host as u8].into()
        };
        SocketAddr::new(ip, UDP_PORT)
    }

    /// Our own address, as a peer sees it.
    fn local_toward(ip: IpAddr) -> IpAddr {
        let local = if ip.is_ipv4() { "192.0.2.1" } else { "2001:db8::1" };
        local.parse().expect("an address")
    }

    // --------------------------------------------------------------------- the peers, the clock

    /// A packet comes. One octet: bit 0 the ICRC is wrong, bit 1 DF is not set, bits 2 and 3 ECN,
    /// bit 4 nobody knows whereto it came, bit 5 from another UDP port.
    fn arrive(&mut self, from: SocketAddr, mut octets: Vec<u8>) {
        peer::damage(&mut self.choices, &mut octets);
        let how: u8 = self.choices.any();
        let local = Self::local_toward(from.ip());
        let from = SocketAddr::new(from.ip(), if how & 32 == 0 { UDP_PORT } else { 55_410 });
        self.id = self.id.wrapping_add(1);
        let id = Identification { identification: self.id, dont_fragment: how & 2 == 0 };
        if Packet::parse(&octets).is_ok() {
            let icrc = peer::icrc(from, SocketAddr::new(local, UDP_PORT), id, &octets);
            let at = octets.len() - ICRC_LEN;
            octets[at..].copy_from_slice(&icrc);
            octets[at] ^= how & 1;
        }
        let to = (how & 16 == 0).then_some(local);
        let before = *self.port.stats();
        let strange = self.strange(from.ip(), &octets);
        self.port.handle_datagram(self.now, from, to, how >> 2 & 3, &octets, &self.mem);
        let after = self.port.stats();
        assert_eq!(after.received, before.received + 1);
        // One verdict each.
        let verdicts = |s: &userdma_proto::roce::port::Stats| {
            s.icrc_good + s.icrc_bad + s.icrc_other_df + s.icrc_unknown
        };
        assert_eq!(verdicts(after), verdicts(&before) + 1);
        if let Some((qpn, packets)) = strange {
            let after = self.port.qp(qpn).expect("it is there").stats().packets_received;
            assert_eq!(after, packets, "{qpn} saw a packet from {from}");
        }
        self.collect();
    }

    /// The queue pair that a packet is for, if it has a peer and that is somebody else; and how many
    /// packets it has seen.
    fn strange(&self, from: IpAddr, octets: &[u8]) -> Option<(Qpn, u64)> {
        let qpn = Packet::parse(octets).ok()?.headers.bth.dest_qp();
        let qp = self.port.qp(qpn)?;
        let is_strange = qp.config().kind != QpType::Ud && qp.attributes().peer.ip() != from;
        is_strange.then(|| (qpn, qp.stats().packets_received))
    }

    fn mad(&mut self, at: usize) {
        let from = self.address(at);
        let to = Self::local_toward(from.ip());
        let mad = self.seen.mad(&mut self.choices, from.ip(), to);
        let bth = Bth::new(Opcode::UD_SEND_ONLY, PKey(0xffff), GSI_QPN, Psn::new(1));
        let mut headers = Headers::new(bth);
        headers.deth = Some(Deth::new(GSI_QKEY, GSI_QPN));
        let mut octets = Vec::new();
        headers.emit_packet(&mad, &mut octets);
        octets.extend([0; ICRC_LEN]);
        self.arrive(from, octets);
    }

    /// From the queue pair's peer, if it has one; from 8 on from another address.
    fn sender(&self, at: usize, qpn: Qpn) -> SocketAddr {
        let peer = self.port.qp(qpn).map(|qp| qp.attributes().peer);
        match peer.filter(|peer| at < 8 && peer.port() != 0) {
            Some(peer) => peer,
            None => self.address(at),
        }
    }

    fn request(&mut self, at: usize) {
        let qpn = self.qpn(at);
        let from = self.sender(at, qpn);
        let Some((qp, line)) = self.port.qp(qpn).zip(self.lines.get_mut(&qpn)) else { return };
        let (kind, attr) = (qp.config().kind, qp.attributes());
        let octets = line.peer.request(&mut self.choices, qpn, kind, attr);
        self.arrive(from, octets);
    }

    fn answer(&mut self, at: usize) {
        let qpn = self.qpn(at);
        let from = self.sender(at, qpn);
        let Some((qp, line)) = self.port.qp(qpn).zip(self.lines.get_mut(&qpn)) else { return };
        let attr = qp.attributes();
        if self.choices.any::<u8>() >= 0xe0 {
            let cnp = Cnp::new(attr.pkey, qpn);
            let mut octets = Vec::new();
            Headers::new(cnp.bth).emit_packet(&cnp.reserved, &mut octets);
            octets.extend([0; ICRC_LEN]);
            return self.arrive(from, octets);
        }
        for octets in line.peer.answer(&mut self.choices, qpn, attr) {
            self.arrive(from, octets);
        }
    }

    fn pass(&mut self, until: Instant) {
        self.now = until;
        self.port.handle_timeout(until);
        assert!(self.port.poll_timeout().is_none_or(|at| at > until), "it is due for ever");
    }

    // ------------------------------------------------------------------------------ the program

    /// What a call refused changed nothing, and says why.
    fn called<T>(&mut self, done: Result<T, PortError>) -> Option<T> {
        self.calls += 1;
        done.map_err(|error| assert!(!error.to_string().is_empty())).ok()
    }

    fn create(&mut self, kind: QpType) {
        let mut config = roce::Config::new(kind, DOMAIN, Qpn(0));
        (config.max_send_wr, config.max_recv_wr) = (MOST_WORK, MOST_WORK);
        (config.max_sge, config.max_inline) = (MOST_PIECES, 64);
        config.ecn = self.id & 1 != 0;
        config.credits = self.id & 2 != 0;
        let is_full = self.lines.len() >= MOST_QPS;
        let made = self.port.create_qp(config);
        assert_eq!(made.is_err(), is_full);
        if let Some(qpn) = self.called(made) {
            assert!(qpn.0 > 1 && self.lines.insert(qpn, Line::default()).is_none());
            self.order.push(qpn);
        }
    }

    fn connect(&mut self, at: usize) {
        let (which, to): (u8, u8) = (self.choices.any(), self.choices.any());
        let (qpn, peer) = (self.qpn(at), self.address(to.into()));
        let wish = Connect {
            local_ip: (which & 1 == 0).then(|| Self::local_toward(peer.ip())),
            mtu: PathMtu::ALL[usize::from(which >> 1) % 5],
            token: which & 0x80 == 0,
            ack_timeout: which >> 3,
            retry_count: which >> 5,
            private_data: &[7; 60][..usize::from(which) % 61],
            ..Connect::new(peer, SERVICES[usize::from(to >> 6)])
        };
        let done = self.port.connect(self.now, qpn, &wish);
        self.begun(qpn, done, false);
    }

    fn begun(&mut self, qpn: Qpn, done: Result<(), PortError>, held: bool) {
        if let (Some(line), false) = (self.lines.get_mut(&qpn), self.lazy_program) {
            let is_open = line.begun > line.over;
            assert!(!(is_open && done.is_ok()), "{line:?}");
            assert!(is_open || done != Err(PortError::Connected(qpn)), "{line:?}");
        }
        if self.called(done).is_some() {
            let line = self.lines.get_mut(&qpn).expect("it was connected");
            line.begun += 1;
            line.held = held;
        }
    }

    fn answer_request(&mut self, at: usize) {
        let how: u8 = self.choices.any();
        // From 0xf0 on it stays, to be answered twice.
        let Some(request) = self.requests.pop_front() else { return };
        match how & 0x0f {
            0..0xc => {
                let qpn = self.qpn(at);
                let answer = Accept {
                    private_data: &[8; 200][..usize::from(how) % 198],
                    initiator_depth: how,
                    ..Accept::default()
                };
                let done = self.port.accept(self.now, &request, qpn, &answer);
                if done.is_ok() && self.lines.contains_key(&qpn) {
                    let state = self.port.qp(qpn).map(roce::Qp::state);
                    assert_eq!(state, Some(QpState::Rts));
                }
                self.begun(qpn, done, true);
            }
            _ => {
                let no = if how & 0x10 == 0 { Reject::consumer(b"no") } else { Reject::mtu(256) };
                let done = self.port.reject(self.now, &request, &no);
                self.called(done);
            }
        }
        if how >= 0xf0 {
            self.requests.push_back(request);
        }
    }

    fn leave(&mut self, at: usize) {
        let qpn = self.qpn(at);
        if self.choices.any::<u8>() < 0xa0 {
            let done = self.port.disconnect(self.now, qpn);
            if self.called(done).is_some() {
                assert_eq!(self.port.qp(qpn).map(roce::Qp::state), Some(QpState::Err));
                self.lines.get_mut(&qpn).expect("it is there").held = false;
            }
            return;
        }
        let done = self.port.destroy_qp(self.now, qpn);
        if self.called(done).is_some() {
            // Completions that were not told are forgotten: none comes from here on.
            self.lines.remove(&qpn).expect("it was there");
            self.order.retain(|&other| other != qpn);
            if self.lazy_program {
                self.gone.push(qpn);
            }
        }
    }

    fn post(&mut self, at: usize) {
        let qpn = self.qpn(at);
        let Some((qp, line)) = self.port.qp(qpn).zip(self.lines.get_mut(&qpn)) else { return };
        let is_datagram = qp.config().kind == QpType::Ud;
        let is_recv = self.choices.any::<u8>() >= 0x80;
        let done = if is_recv {
            let wr = RecvWr::new(self.tag, self.choices.sges());
            let done = self.port.post_recv(qpn, wr.clone(), self.tag);
            if done.is_ok() {
                line.books.received(&wr);
            }
            done
        } else {
            let to: u8 = if is_datagram { self.choices.any() } else { 0 };
            let addr = self.address(to.into());
            let dest = is_datagram.then_some(UdDest { addr, qpn: Qpn(0x12), qkey: QKEY });
            let wr = peer::send(&mut self.choices, self.tag, dest);
            let done = self.port.post_send(qpn, wr.clone(), self.tag);
            let Some(line) = self.lines.get_mut(&qpn) else { return };
            if done.is_ok() {
                line.books.sent(&wr);
            }
            done
        };
        match done {
            Ok(()) => self.tag += 1,
            Err(PortError::Post(error @ PostError::QueueFull { .. })) => {
                self.lines[&qpn].books.refused(error, is_recv, MOST_WORK);
            }
            Err(error) => assert!(!error.to_string().is_empty()),
        }
        self.calls += 1;
    }

    /// One octet: attributes change, a queue pair goes to another state or without a connection to
    /// RTS; a window, the route's MTU, a listener changes; a UD service is asked for.
    fn rare(&mut self, at: usize) {
        let qpn = self.qpn(at);
        let choice: u8 = self.choices.any();
        match choice {
            0..0x40 => self.modify(qpn, &QpAttr::to(STATES[usize::from(choice) % STATES.len()])),
            0x40..0x70 => self.bring_up(qpn, choice & 15),
            0x70..0x90 => {
                let attr = QpAttr {
                    timeout: Some(choice & 31),
                    access: Some(Access::from_bits_truncate(choice.into())),
                    max_rd_atomic: Some(choice & 3),
                    ..QpAttr::default()
                };
                self.modify(qpn, &attr);
            }
            0x90..0xa0 => {
                let window = Window { packets: (choice & 15).into(), octets: 4000 };
                let done = self.port.set_window(qpn, window);
                self.called(done);
            }
            0xa0..0xb0 => self.port.set_max_mtu(PathMtu::ALL[usize::from(choice) % 5]),
            0xb0..0xc0 => {
                let service = SERVICES[usize::from(choice & 3)];
                let done = self.port.listen(service, (choice >> 2 & 3).into());
                self.called(done);
            }
            0xc0..0xd0 => {
                self.port.unlisten(self.now, SERVICES[usize::from(choice & 3)]);
                self.calls += 1;
            }
            _ => {
                let peer = self.address(choice.into());
                let wish = Resolve {
                    peer,
                    local_ip: Self::local_toward(peer.ip()),
                    local_port: 9,
                    service_id: SERVICES[usize::from(choice >> 3 & 3)],
                    private_data: &[1; 9],
                    token: (choice & 1 != 0).then(|| self.port.token()),
                };
                let done = self.port.resolve(self.now, &wish);
                self.called(done);
            }
        }
    }

    /// Without the connection manager.
    fn bring_up(&mut self, qpn: Qpn, to: u8) {
        let peer = self.address(to.into());
        let to_init = QpAttr { qkey: Some(QKEY), ..QpAttr::to(QpState::Init) };
        let to_rtr = QpAttr {
            local: Some(SocketAddr::new(Self::local_toward(peer.ip()), UDP_PORT)),
            peer: Some(peer),
            dest_qp: Some(Qpn(0x12)),
            path_mtu: Some(PathMtu::ALL[usize::from(to) % 5]),
            rq_psn: Some(Psn::new(0xff_fffe)),
            ..QpAttr::to(QpState::Rtr)
        };
        let to_rts = QpAttr { sq_psn: Some(Psn::new(0xff_fffd)), ..QpAttr::to(QpState::Rts) };
        for attr in [to_init, to_rtr, to_rts] {
            self.modify(qpn, &attr);
        }
    }

    fn modify(&mut self, qpn: Qpn, attr: &QpAttr) {
        self.collect();
        let done = self.port.modify(qpn, attr);
        if self.called(done).is_some()
            && attr.state == Some(QpState::Reset)
            && let Some(line) = self.lines.get_mut(&qpn)
        {
            line.books.forget();
        }
    }

    // ------------------------------------------------------------------------------- the socket

    /// Sends up to `most` trains.
    fn transmit(&mut self, most: usize) {
        let mut packets = 0;
        for n in 0..most {
            let limits = match self.id % 3 {
                0 => Limits::default(),
                1 => Limits { max_packets: 1, max_octets: 1, ..Limits::default() },
                _ => Limits { max_packets: 3, max_octets: 5000, ..Limits::default() },
            };
            let sent = self.port.poll_transmit(self.now, &self.mem, limits, &mut self.train);
            let Some(destination) = sent else {
                // It may have carried out what needs no packet.
                self.collect_work();
                break;
            };
            packets += self.train.packets();
            assert!(self.train.packets() <= limits.max_packets);
            assert!(n < MOST_PACKETS && packets <= MOST_PACKETS, "{packets} packets, and no end");
            let ends = (self.train.local(), self.train.peer());
            assert_eq!(ends, (Some(destination.from), Some(destination.to)));
            let all = peer::packets(&self.train, 4096);
            for octets in all {
                self.sent(destination.scope.qpn, destination.to, &octets);
            }
            self.collect_work();
        }
    }

    fn sent(&mut self, qpn: Qpn, to: SocketAddr, octets: &[u8]) {
        let packet = Packet::parse(octets).expect("it was found good");
        assert!(
            (0..16).any(|at| self.address(at).ip() == to.ip()) && to.port() != 0,
            "{to}: {packet:?}"
        );
        let bth = &packet.headers.bth;
        if qpn == GSI_QPN {
            assert_eq!((bth.opcode(), bth.dest_qp()), (Opcode::UD_SEND_ONLY, GSI_QPN));
            let mad: &[u8; MAD_LEN] = packet.payload.try_into().expect("a MAD");
            self.seen.see(mad);
            return;
        }
        let qp = self.port.qp(qpn).expect("it was not destroyed");
        assert!(!matches!(qp.state(), QpState::Reset | QpState::Init), "{packet:?}");
        let operation = bth.opcode().info().expect("a known opcode").operation;
        let line = self.lines.get_mut(&qpn).expect("it is there");
        assert!(!line.held || self.lazy_program, "it is to wait for its peer: {packet:?}");
        if operation != Operation::Cnp {
            line.peer.see(&packet);
        }
    }

    // ------------------------------------------------------------------------------- what holds

    fn collect(&mut self) {
        self.collect_work();
        if !self.lazy_program {
            self.take_events();
        }
        if !self.lazy_socket {
            self.transmit(usize::MAX);
        }
        if !self.lazy_program {
            self.take_events();
        }
        let port = &self.port;
        assert!(port.len() == self.lines.len() && port.len() <= MOST_QPS);
        assert!(port.peers() <= MOST_PEERS && port.connections() <= MOST);
        assert_eq!(port.config().max_qps, MOST_QPS);
        for (&qpn, line) in &mut self.lines {
            let qp = port.qp(qpn).expect("it is there");
            let receives = !matches!(qp.state(), QpState::Reset | QpState::Init);
            if receives && !line.receives {
                line.peer = Peer::new(qp.attributes().rq_psn);
            }
            line.receives = receives;
            if qp.state() == QpState::Err {
                line.books.check_done();
            }
        }
    }

    fn collect_work(&mut self) {
        for (qpn, touch) in self.mem.take() {
            let line = self.lines.get_mut(&qpn).unwrap_or_else(|| panic!("{touch:?} for {qpn}"));
            line.books.judge(touch, 1);
            if let Touch::Remote(..) = touch {
                assert!(line.receives, "{touch:?} for {qpn}");
            }
        }
        while let Some((qpn, Completion { tag, wc })) = self.port.poll_completion() {
            let line = self.lines.get_mut(&qpn).expect("it was not destroyed");
            line.books.complete(tag, &wc, qpn);
            self.succeeded += usize::from(wc.status.is_ok());
        }
    }

    /// Strangers add no more events than the queue has room for, and those of the connections and
    /// queue pairs there are. A call of the program adds a few.
    fn take_events(&mut self) {
        let calls = core::mem::take(&mut self.calls);
        let most = MOST_QUEUED + 4 * MOST + 4 * MOST_QPS + 8 * calls;
        for n in 0.. {
            let Some(event) = self.port.poll_event() else { break };
            assert!(n < most, "{n} events waited");
            self.follow(event);
        }
        self.gone.clear();
    }

    fn follow(&mut self, event: Event) {
        let (qpn, over) = match event {
            Event::Request(request) => {
                let same_family = request.cm.peer.is_ipv4() == request.local.is_ipv4();
                assert!(same_family, "{request:?}");
                self.requests.push_back(request);
                if self.requests.len() > MOST {
                    self.requests.pop_front();
                }
                return;
            }
            Event::Established { qpn, .. } => {
                self.established += 1;
                let Some(line) = self.line(qpn) else { return };
                assert!(line.begun > line.over && !line.up, "{qpn} is established: {line:?}");
                (line.up, line.held) = (true, false);
                return;
            }
            Event::Rejected { qpn: None, .. }
            | Event::TimedOut { qpn: None, .. }
            | Event::Dropped { qpn: None, .. } => return,
            Event::Rejected { qpn: Some(qpn), .. }
            | Event::TimedOut { qpn: Some(qpn), .. }
            | Event::Dropped { qpn: Some(qpn), .. } => (qpn, false),
            Event::Disconnected { qpn, .. } => {
                self.disconnected += 1;
                (qpn, true)
            }
            Event::FirstPacket { qpn } | Event::Drained { qpn } | Event::QpError { qpn, .. } => {
                self.line(qpn);
                return;
            }
            Event::Service(event) => {
                assert!(matches!(
                    event,
                    CmEvent::Resolved { .. }
                        | CmEvent::Unresolved { .. }
                        | CmEvent::Queried { .. }
                        | CmEvent::TimedOut { .. }
                ));
                return;
            }
            other => panic!("{other:?}"),
        };
        let Some(line) = self.line(qpn) else { return };
        // Only what was not established is rejected, timed out or dropped.
        assert!(line.begun > line.over && (over || !line.up), "{qpn} is over: {line:?}");
        line.over += 1;
        (line.up, line.held) = (false, false);
    }

    /// The queue pair of an event; `None` if it was destroyed since.
    fn line(&mut self, qpn: Qpn) -> Option<&mut Line> {
        let line = self.lines.get_mut(&qpn);
        assert!(line.is_some() || self.gone.contains(&qpn), "{qpn} is not there");
        line
    }

    /// Until nothing is due any more.
    fn silence(&mut self) {
        for n in 0.. {
            // A few times each connection, each queue pair.
            assert!(n < 40 * (MOST + MOST_QPS), "it goes on for ever");
            let Some(next) = self.port.poll_timeout() else { return };
            self.pass(next.max(self.now));
            self.collect();
        }
    }

    /// Nobody speaks any more; the program closes.
    fn end(&mut self) {
        self.take_events();
        (self.lazy_program, self.lazy_socket) = (false, false);
        self.collect();
        self.silence();
        for (&qpn, line) in &mut self.lines {
            let qp = self.port.qp(qpn).expect("it is there");
            let timer = qp.config().kind != QpType::Rc || qp.attributes().timeout != 0;
            if qp.state() == QpState::Rts && timer {
                assert!(!line.held, "its peer was waited for long enough: {line:?}");
                line.books.check_sends_done();
            }
        }
        for qpn in self.order.clone() {
            let done = self.port.disconnect(self.now, qpn);
            self.called(done);
            self.collect();
        }
        self.silence();
        assert_eq!(self.port.connections(), 0);
        for (qpn, line) in &self.lines {
            assert_eq!((line.begun, line.up), (line.over, false), "{qpn}: {line:?}");
        }
        self.mem.check_untouched();
        for qpn in self.order.clone() {
            self.modify(qpn, &QpAttr::to(QpState::Err));
            self.collect();
            self.port.destroy_qp(self.now, qpn).expect("it is there");
            self.lines.remove(&qpn);
        }
        assert!(self.port.is_empty() && self.port.poll_timeout().is_none());
    }
}

const STATES: [QpState; 6] =
    [QpState::Reset, QpState::Err, QpState::Sqd, QpState::Rts, QpState::Reset, QpState::Err];

/// What can be waiting to be sent: all work in all queues, an answer to all that peers may ask for
/// at a time, each of a whole region; MADs and congestion notifications.
const MOST_PACKETS: usize = {
    let requests = MOST_WORK * ((LEN + 64) * MOST_PIECES).div_ceil(256);
    let answers = (4 * 256 + 6) * LEN.div_ceil(256);
    MOST_QPS * (requests + answers + 1) + MOST_QUEUED
};

#[cfg(test)]
mod tests {
    use super::*;

    /// A seed that stops early would be worth little, and nobody would see it.
    #[test]
    fn the_seeds_get_where_their_names_say() {
        // Connections established and disconnected, completions that tell success.
        for (name, established, disconnected, succeeded) in [
            ("passive_and_data", 1, 1, 2),
            ("active_and_data", 1, 1, 2),
            ("ipv6", 1, 1, 2),
            ("any_address", 1, 1, 2),
            ("ready_by_a_packet", 1, 1, 1),
            ("rejected", 0, 0, 0),
            ("destroyed", 1, 0, 0),
            ("never_answered", 0, 0, 0),
            ("never_reached", 0, 0, 0),
            ("congestion", 1, 1, 1),
            ("by_hand", 0, 0, 2),
            ("datagrams", 0, 0, 2),
            ("service_asked_for", 0, 0, 0),
            ("wrong_icrc", 1, 1, 0),
            ("lazy", 1, 1, 1),
            ("posted_before_ready", 1, 1, 1),
            ("posted_before_ready_lazily", 1, 1, 1),
            ("again_after_the_end", 2, 2, 0),
            ("crowd_and_a_lazy_program", 0, 0, 0),
            ("kernel_rping", 0, 0, 0),
            ("simulated_run", 1, 1, 1),
        ] {
            let input = crate::seed("roce_port", name);
            let script = run(&input);
            let found = (script.established, script.disconnected, script.succeeded);
            assert_eq!(found, (established, disconnected, succeeded), "{name}");
            let stats = script.port.stats();
            assert_eq!(stats.cnps_sent, u64::from(name == "congestion"), "{name}");
            assert_eq!((stats.malformed, stats.bad_mad, stats.wrong_peer), (0, 0, 0), "{name}");
            let bad = u64::from(name == "wrong_icrc");
            assert!(stats.icrc_bad == bad || cfg!(fuzzing), "{name}: {stats:?}");
            assert!(name != "simulated_run" || stats.received == 12, "{stats:?}");
        }
    }
}
