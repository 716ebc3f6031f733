//! Two connection managers under a script: their programs, the network, strangers, the clock.

use std::{
    collections::{BTreeMap, VecDeque},
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use userdma_proto::{
    roce::cm::{
        Accept, Cm, Config, ConnId, Connect, Datagrams, Event, LocalQp, Reject, Resolve, Token,
        Transport,
    },
    time::Instant,
    wire::{
        ids::{Psn, QKey, Qpn},
        mad::{MAD_LEN, cm::timeout},
    },
};

use crate::{
    Choices,
    mads::{Lives, SERVICE, SERVICES, Seen, UD_SERVICE},
    peer,
};

/// Two octets of settings ([`settings`]), then steps until the input ends. A step is one octet: the
/// lower four bits say what, the highest one at which of the two managers.
///
/// | step | what happens |
/// |---|---|
/// | 0 to 3 | a MAD on its way arrives; see [`Script::deliver`] |
/// | 4, 5 | a MAD of anybody's comes; see [`Seen::mad`] |
/// | 6 | `n` (one octet) octets of the input come, filled up with zeros if `n` is even |
/// | 7 | the program connects |
/// | 8 | it accepts or rejects a request |
/// | 9 | it disconnects |
/// | 10 | it asks for a UD service |
/// | 11 | it listens, or no longer |
/// | 12 | a packet comes for a queue pair (its number: one octet) |
/// | 13 | so many milliseconds pass (two octets) |
/// | 14 | the time of the next time-out comes |
/// | 15 | it takes its events |
///
/// Nothing panics; each connection tells its events in order and once; connections, half-open ones,
/// events and MADs are bounded; a MAD is answered by a few; no ID stands for two connections; and
/// where nobody speaks any more, all comes to its end.
pub fn roce_cm(data: &[u8]) {
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

/// Connections, half-open ones, and MADs or events that wait.
const MOST: usize = 8;
const MOST_HALF_OPEN: usize = 3;
const MOST_QUEUED: usize = 6;
/// MADs on their way.
const MOST_FLIGHTS: usize = 64;
/// MADs that one MAD causes.
const MOST_ANSWERS: usize = 4;
/// Neither of the two managers.
const STRANGER: SocketAddr = SocketAddr::new(IpAddr::V4(std::net::Ipv4Addr::new(10, 0, 0, 9)), 9);

struct Host {
    cm: Cm,
    addr: SocketAddr,
    lives: Lives,
    /// Connections that the program knows, the newest one first; and those it may answer.
    known: VecDeque<ConnId>,
    waiting: VecDeque<ConnId>,
    /// Requests that were told, and neither answered nor over: their services.
    unanswered: BTreeMap<ConnId, u64>,
    /// How many of them each service may have.
    backlogs: BTreeMap<u64, usize>,
    /// Events are taken only where the script says so.
    lazy: bool,
    /// Calls of the program since it took its events.
    calls: usize,
    qpn: u32,
}

struct Script<'a> {
    choices: Choices<'a>,
    hosts: [Host; 2],
    seen: Seen,
    flights: VecDeque<(SocketAddr, SocketAddr, [u8; MAD_LEN])>,
    now: Instant,
    established: usize,
}

impl<'a> Script<'a> {
    fn new(mut choices: Choices<'a>) -> Self {
        let lazy = choices.any::<u8>();
        let hosts = [1, 2].map(|n| Host {
            cm: Cm::new(settings(&mut choices, n)),
            addr: SocketAddr::from(([10, 0, 0, n], 4791)),
            lives: Lives::default(),
            known: VecDeque::new(),
            waiting: VecDeque::new(),
            unanswered: BTreeMap::new(),
            backlogs: [(SERVICE, 2)].into(),
            lazy: lazy & n != 0,
            calls: 0,
            qpn: u32::from(n) * 16,
        });
        let (seen, flights) = (Seen::default(), VecDeque::new());
        let mut script = Self { choices, hosts, seen, flights, now: Instant::ZERO, established: 0 };
        for host in &mut script.hosts {
            host.cm.listen(SERVICE, 2).expect("it is new");
            let service = Datagrams { qpn: Qpn(2), qkey: QKey(3), private_data: vec![4; 5] };
            host.cm.listen_datagrams(UD_SERVICE, service).expect("it is new");
        }
        script
    }

    fn step(&mut self) {
        let step: u8 = self.choices.any();
        let at = usize::from(step >> 7);
        match step & 15 {
            0..=3 => self.deliver(),
            4 | 5 => {
                let froms = [self.hosts[1 - at].addr, STRANGER];
                let from = froms[usize::from(step >> 6 & 1)];
                let to = self.hosts[at].addr.ip();
                let mut mad = self.seen.mad(&mut self.choices, from.ip(), to);
                peer::damage(&mut self.choices, &mut mad);
                self.arrive(at, from, &mad);
            }
            6 => {
                let len = self.choices.any::<u8>();
                let mut octets = self.choices.octets(len.into()).to_vec();
                if len & 1 == 0 {
                    octets.resize(MAD_LEN, 0);
                }
                self.arrive(at, self.hosts[1 - at].addr, &octets);
            }
            7 => self.connect(at),
            8 => self.answer(at),
            9 => {
                let which = self.choices.any::<u8>();
                let host = &mut self.hosts[at];
                host.calls += 1;
                if let Some(&conn) = host.known.get(usize::from(which) % host.known.len().max(1))
                    && let Err(error) = host.cm.disconnect(self.now, conn)
                {
                    assert!(!error.to_string().is_empty());
                }
            }
            10 => self.resolve(at),
            11 => self.listen(at),
            12 => {
                let qpn = Qpn(self.choices.any::<u8>().into());
                self.hosts[at].cm.handle_established(qpn);
            }
            13 => {
                let time: u16 = self.choices.any();
                self.pass(self.now + Duration::from_millis(time.into()));
            }
            14 => {
                let next = self.hosts.iter().filter_map(|host| host.cm.poll_timeout()).min();
                if let Some(at) = next {
                    self.pass(at.max(self.now));
                }
            }
            _ => self.take_events(at),
        }
        self.drain();
    }

    // ------------------------------------------------------------------ the network, the clock

    /// Two octets: which MAD (0 to 0xbf: the oldest one), and how: bit 0 it stays on its way, too,
    /// bit 1 it is lost, bit 2 it comes from somebody else.
    fn deliver(&mut self) {
        let (which, how): (u8, u8) = (self.choices.any(), self.choices.any());
        let index = if which < 0xc0 { 0 } else { usize::from(which) % self.flights.len().max(1) };
        let Some(&(from, to, mut mad)) = self.flights.get(index) else { return };
        if how & 1 == 0 {
            self.flights.remove(index);
        }
        let host = self.hosts.iter().position(|host| host.addr == to);
        let (Some(host), true) = (host, how & 2 == 0) else { return };
        peer::damage(&mut self.choices, &mut mad);
        let from = if how & 4 == 0 { from } else { STRANGER };
        self.arrive(host, from, &mad);
    }

    fn arrive(&mut self, at: usize, from: SocketAddr, mad: &[u8]) {
        self.drain();
        self.hosts[at].cm.handle_mad(self.now, from, mad);
        let answers = self.drain();
        assert!(answers <= MOST_ANSWERS, "{answers} answers to one MAD");
    }

    fn pass(&mut self, until: Instant) {
        self.now = until;
        for host in &mut self.hosts {
            host.cm.handle_timeout(until);
            assert!(host.cm.poll_timeout().is_none_or(|at| at > until), "it is due for ever");
        }
    }

    // ----------------------------------------------------------------------------- the programs

    fn token(&mut self) -> Option<Token> {
        let choice: u8 = self.choices.any();
        let udp_port = 4791 + u16::from(choice >> 7);
        (choice & 1 != 0).then_some(Token { udp_port, out_of_order: true, window: 1 << 20 })
    }

    fn connect(&mut self, at: usize) {
        let (which, data, token) = (self.choices.any::<u8>(), self.data(), self.token());
        let peer = if which < 0xf0 { self.hosts[1 - at].addr } else { STRANGER };
        let host = &mut self.hosts[at];
        host.qpn += 1;
        let wish = Connect {
            private_data: &data,
            token,
            mtu: [4096, 256, 1024, 1000][usize::from(which >> 2 & 3)],
            transport: if which & 16 == 0 { Transport::Rc } else { Transport::Uc },
            ..Connect::new(
                peer,
                host.addr.ip(),
                SERVICES[usize::from(which & 3)],
                LocalQp::new(Qpn(host.qpn), Psn::new(5)),
            )
        };
        let before = host.cm.connections();
        host.calls += 1;
        match host.cm.connect(self.now, &wish) {
            Ok(conn) => host.knows(conn),
            Err(error) => {
                assert!(!error.to_string().is_empty());
                assert_eq!(host.cm.connections(), before, "{error}: nothing changes");
            }
        }
    }

    /// One octet: the oldest request that waits, or from 0xc0 on any connection; then how.
    fn answer(&mut self, at: usize) {
        let (which, how) = (self.choices.any::<u8>(), self.choices.any::<u8>());
        let (data, token) = (self.data(), self.token());
        let host = &mut self.hosts[at];
        let conn = match which {
            0..0xc0 => host.waiting.pop_front(),
            _ => host.known.get(usize::from(which) % host.known.len().max(1)).copied(),
        };
        let Some(conn) = conn else { return };
        host.calls += 1;
        host.qpn += 1;
        let qp = LocalQp::new(Qpn(host.qpn), Psn::new(6));
        let done = match how {
            0..0xa0 => {
                let accept = Accept { private_data: &data, token, ..Accept::new(qp) };
                host.cm.accept(self.now, conn, &accept)
            }
            0xa0..0xd0 => host.cm.reject(self.now, conn, &Reject::mtu(256)),
            _ => {
                let info = vec![1; usize::from(how) % 80];
                let no = Reject { info, ..Reject::consumer(&data) };
                host.cm.reject(self.now, conn, &no)
            }
        };
        let told = host.lives.told(conn);
        match done {
            Ok(()) => {
                assert!(told.request && !told.established && !told.rejected_by_us, "{told:?}");
                told.rejected_by_us = how >= 0xa0;
                host.unanswered.remove(&conn);
            }
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    }

    fn resolve(&mut self, at: usize) {
        let (which, data, token) = (self.choices.any::<u8>(), self.data(), self.token());
        let peer = if which < 0xf0 { self.hosts[1 - at].addr } else { STRANGER };
        let host = &mut self.hosts[at];
        let wish = Resolve {
            peer,
            local_ip: host.addr.ip(),
            local_port: 3,
            service_id: SERVICES[3 - usize::from(which & 3)],
            private_data: &data,
            token,
        };
        host.calls += 1;
        match host.cm.resolve(self.now, &wish) {
            Ok(conn) => host.knows(conn),
            Err(error) => assert!(!error.to_string().is_empty()),
        }
    }

    fn listen(&mut self, at: usize) {
        let which: u8 = self.choices.any();
        let (service, host) = (SERVICES[usize::from(which & 3)], &mut self.hosts[at]);
        host.calls += 1;
        let done = match which >> 6 {
            0 => {
                let backlog = usize::from(which >> 2 & 3);
                let done = host.cm.listen(service, backlog);
                if done.is_ok() {
                    host.backlogs.insert(service, backlog.max(1));
                }
                done
            }
            1 => {
                let private_data = vec![1; usize::from(which) * 2];
                let datagrams = Datagrams { qpn: Qpn(2), qkey: QKey(3), private_data };
                host.cm.listen_datagrams(service, datagrams)
            }
            _ => {
                host.cm.unlisten(service);
                Ok(())
            }
        };
        if let Err(error) = done {
            assert!(!error.to_string().is_empty());
        }
    }

    /// One octet: how long, of a few octets or more than there is room for.
    fn data(&mut self) -> Vec<u8> {
        match self.choices.any::<u8>() {
            0..0xe0 => vec![0xda; 5],
            more => vec![0xda; usize::from(more)],
        }
    }

    // ------------------------------------------------------------------------------- what holds

    /// What the managers say goes on its way. Returns how many MADs that were.
    fn drain(&mut self) -> usize {
        let mut mads = 0;
        for at in 0..2 {
            let (mut mad, mut here) = ([0xee; MAD_LEN], 0);
            let host = &mut self.hosts[at];
            while let Some(to) = host.cm.poll_mad(&mut mad) {
                here += 1;
                assert!(here <= MOST_QUEUED, "{here} MADs waited");
                let [one, two] = [1, 2].map(|n| IpAddr::from([10, 0, 0, n]));
                assert!([one, two, STRANGER.ip()].contains(&to.ip()) && to.port() != 0, "{to}");
                self.seen.see(&mad);
                if self.flights.len() >= MOST_FLIGHTS {
                    self.flights.pop_front();
                }
                self.flights.push_back((SocketAddr::new(host.addr.ip(), 55_410), to, mad));
            }
            mads += here;
            assert!(host.cm.connections() <= MOST, "{}", host.cm.connections());
            assert!(host.cm.half_open() <= MOST_HALF_OPEN, "{}", host.cm.half_open());
            if !host.lazy {
                self.take_events(at);
            }
        }
        mads
    }

    /// Strangers add no more events than the queue has room for, and those of the connections there
    /// are: three each. A call of the program adds a few.
    fn take_events(&mut self, at: usize) {
        let host = &mut self.hosts[at];
        let most = MOST_QUEUED + 4 * MOST + 8 * core::mem::take(&mut host.calls);
        for n in 0.. {
            let Some(event) = host.cm.poll_event() else { break };
            assert!(n < most, "{n} events waited");
            host.lives.follow(&event);
            match event {
                Event::Request(request) => {
                    host.knows(request.conn);
                    host.waiting.push_back(request.conn);
                    host.unanswered.insert(request.conn, request.service_id);
                }
                Event::Established(ready) => {
                    self.established += 1;
                    assert!(!ready.out_of_order || ready.token.is_some());
                }
                _ => {}
            }
        }
        let lives = &host.lives.0;
        host.unanswered.retain(|conn, _| lives.get(conn).is_some_and(|told| !told.over));
        for (service, &backlog) in &host.backlogs {
            let waiting = host.unanswered.values().filter(|of| *of == service).count();
            assert!(waiting <= backlog, "{waiting} requests wait for an answer");
        }
    }

    /// Nobody answers any more.
    fn end(&mut self) {
        for at in 0..2 {
            self.take_events(at);
            let host = &mut self.hosts[at];
            host.lazy = false;
            for (&conn, _) in host.lives.0.iter().filter(|(_, told)| told.established && !told.over)
            {
                host.cm.disconnect(self.now, conn).expect("it is established");
            }
        }
        // Each message is sent 16 times at most; a REQ may be put off, a program may be waited for.
        let most = self.hosts.iter().map(|host| {
            let config = host.cm.config();
            let times = timeout(config.response_timeout) * 40 + timeout(config.service_timeout) * 2;
            times + config.max_service_time + config.time_wait * 3
        });
        let latest = self.now + most.max().expect("there are two");
        for n in 0.. {
            // 16 times each message is sent, and a few other times.
            assert!(n < 2 * MOST * 20, "it does not end");
            self.drain();
            let next = self.hosts.iter().filter_map(|host| host.cm.poll_timeout()).min();
            let Some(next) = next else { break };
            assert!(next <= latest, "something is due in {:?}", next - self.now);
            self.pass(next.max(self.now));
        }
        for host in &self.hosts {
            assert_eq!((host.cm.connections(), host.cm.half_open()), (0, 0), "{:?}", host.lives);
            host.lives.check_over();
        }
    }
}

impl Host {
    fn knows(&mut self, conn: ConnId) {
        self.lives.told(conn);
        self.known.truncate(15);
        self.known.push_front(conn);
    }
}

/// One octet for each manager, after one whose bits 0 and 1 say whose program is lazy: short or
/// long times, and how often a message is sent again.
fn settings(choices: &mut Choices<'_>, n: u8) -> Config {
    let choice: u8 = choices.any();
    let mut config = Config::new(n.into());
    (config.max_connections, config.max_half_open) = (MOST, MOST_HALF_OPEN);
    config.max_queued = MOST_QUEUED;
    config.response_timeout = choice & 31;
    config.max_retries = choice >> 5;
    config.service_timeout = 31 - (choice & 31);
    config.resend_after = Duration::from_millis(u64::from(choice >> 3));
    config
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A seed that stops early would be worth little, and nobody would see it.
    #[test]
    fn the_seeds_get_where_their_names_say() {
        for (name, established) in [
            ("connected_and_disconnected", 2),
            ("both_disconnect", 2),
            ("rejected", 0),
            ("smaller_path_mtu", 2),
            ("all_lost", 0),
            ("reply_lost", 2),
            ("ready_by_a_packet", 1),
            ("slow_program", 0),
            ("tokens", 2),
            ("datagram_service", 0),
            ("nobody_listens", 0),
            ("crowd", 0),
            ("crowd_and_a_lazy_program", 0),
            ("questions_and_a_lazy_program", 0),
            ("told_to_wait_long", 0),
            ("stale", 1),
            ("same_id_again", 1),
        ] {
            let input = crate::seed("roce_cm", name);
            let script = run(&input);
            assert_eq!(script.established, established, "{name}");
            let [active, passive] = script.hosts.map(|host| host.cm.stats());
            assert_eq!(
                (passive.crowded > 0, passive.stale),
                match name {
                    "crowd" | "crowd_and_a_lazy_program" | "questions_and_a_lazy_program" =>
                        (true, 0),
                    "stale" | "same_id_again" => (false, 1),
                    _ => (false, 0),
                }
            );
            assert_eq!(active.malformed + passive.malformed, 0, "{name}");
        }
    }
}
