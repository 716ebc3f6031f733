//! What the tests share: two connections in virtual time, and the judge of decoded captures.

pub mod captures;
pub mod truth;

use std::{
    fs,
    io::Write,
    path::{Path, PathBuf},
    time::Duration,
};

use serde_json::Value;
use userdma_proto::{
    iwarp::{Completion, Config, Connection, Event, Shutdown, Transmit},
    mem::PdId,
    time::Instant,
    verbs::{Sge, Wc},
    wire::ids::{LKey, Qpn},
};

pub use userdma_proto::sim::PlainMemory;

/// `path` of the material that lies beside the tree, in `$USERDMA_SHARED` or `../shared`. Where it
/// is missing a line says so that begins with SKIPPED.
pub fn shared(path: &str) -> Option<PathBuf> {
    let root = std::env::var_os("USERDMA_SHARED")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared"), PathBuf::from);
    let found = root.join(path);
    if found.exists() {
        return Some(found);
    }
    skipped(&format!("{} is missing; set USERDMA_SHARED to its folder", found.display()));
    None
}

/// Whether this host has `::1`; a line says so where it has not.
pub fn ipv6() -> bool {
    let found = std::net::TcpListener::bind("[::1]:0").is_ok();
    if !found {
        skipped("this host has no ::1");
    }
    found
}

/// Says on stderr that something was left out, and why: `.ci/run` repeats such lines.
pub fn skipped(why: &str) {
    // Not by eprintln: what a passing test prints with that is not shown.
    let line = format!("SKIPPED: {why}\n");
    std::io::stderr().write_all(line.as_bytes()).expect("stderr takes a line");
}

/// A JSON file, which must be good.
pub fn json(file: &Path) -> Value {
    let text = fs::read(file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
    serde_json::from_slice(&text).unwrap_or_else(|e| panic!("{}: {e}", file.display()))
}

/// The octets that a JSON string has as hex digits.
pub fn unhex(value: &Value) -> Vec<u8> {
    let digits = value.as_str().expect("a string of hex digits");
    (0..digits.len())
        .step_by(2)
        .map(|at| u8::from_str_radix(&digits[at..at + 2], 16).expect("hex digits"))
        .collect()
}

/// `len` octets from `addr`, cut into one to four pieces, some of them empty.
pub fn split<L: FromIterator<Sge>>(rng: &mut Rng, addr: u64, len: u32, key: u32) -> L {
    let mut cuts: Vec<u32> =
        (0..rng.below(4)).map(|_| rng.below(u64::from(len) + 1) as u32).collect();
    cuts.extend([0, len]);
    cuts.sort_unstable();
    cuts.windows(2).map(|w| Sge::new(addr + u64::from(w[0]), w[1] - w[0], LKey(key))).collect()
}

/// A small generator with a seed (xorshift64*), for inputs that can be made again.
#[derive(Debug, Clone)]
pub struct Rng(u64);

impl Rng {
    /// A generator; every seed is as good as any other.
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// The next 64 bits.
    pub fn draw(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    /// A number below `n`, which is not 0.
    pub fn below(&mut self, n: u64) -> u64 {
        (self.draw() >> 16) % n
    }

    /// True once in `n` times on average.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// `len` octets.
    pub fn bytes(&mut self, len: usize) -> Vec<u8> {
        (0..len).map(|_| self.draw() as u8).collect()
    }
}

/// The protection domain that tests use.
pub const PD: u32 = 1;

/// One end of a simulated TCP connection.
#[derive(Debug)]
pub struct Side {
    /// The state machine.
    pub conn: Connection,
    /// Its memory.
    pub mem: PlainMemory,
    /// Work that was finished, in order.
    pub done: Vec<Completion>,
    /// What the program was told, in order.
    pub events: Vec<Event>,
    /// What the driver was told to do with the socket, in order.
    pub shutdowns: Vec<Shutdown>,
    transmit: Transmit,
    /// Octets given out by the state machine that the "socket" has not taken.
    outgoing: Vec<u8>,
    /// Octets that the "socket" received and the state machine has not used.
    incoming: Vec<u8>,
    eof_seen: bool,
}

impl Side {
    /// An end that drives `conn`.
    pub fn new(conn: Connection) -> Self {
        Self {
            conn,
            mem: PlainMemory::default(),
            done: Vec::new(),
            events: Vec::new(),
            shutdowns: Vec::new(),
            transmit: Transmit::default(),
            outgoing: Vec::new(),
            incoming: Vec::new(),
            eof_seen: false,
        }
    }

    /// The completions' contents.
    pub fn wcs(&self) -> Vec<Wc> {
        self.done.iter().map(|c| c.wc).collect()
    }

    /// Octets go in as if they came from the socket.
    pub fn feed(&mut self, now: Instant, octets: &[u8]) {
        self.incoming.extend_from_slice(octets);
        let used = self.conn.handle_stream(now, &self.incoming, &self.mem);
        self.incoming.drain(..used);
        self.collect();
    }

    /// The peer's FIN.
    pub fn feed_eof(&mut self, now: Instant) {
        if !std::mem::replace(&mut self.eof_seen, true) {
            self.conn.handle_eof(now, self.incoming.len());
            if self.outgoing.is_empty() {
                self.shutdowns.extend(self.conn.poll_shutdown());
            }
            self.collect();
        }
    }

    /// Takes up to `max` octets that are to be sent.
    pub fn drain(&mut self, now: Instant, budget: usize, max: usize) -> Vec<u8> {
        if self.outgoing.is_empty() {
            self.transmit.clear();
            self.conn.poll_transmit(now, &self.mem, budget, &mut self.transmit);
            let scope = self.conn.config().scope;
            self.transmit
                .copy_to(&self.mem, scope, &mut self.outgoing)
                .expect("sources are valid until they are sent");
            assert_eq!(self.outgoing.len(), self.transmit.len(), "the parts add up");
        }
        let n = max.min(self.outgoing.len());
        let sent: Vec<u8> = self.outgoing.drain(..n).collect();
        self.conn.handle_written(now, n);
        if self.outgoing.is_empty() {
            self.shutdowns.extend(self.conn.poll_shutdown());
        }
        self.collect();
        sent
    }

    /// Everything that is to be sent.
    pub fn drain_all(&mut self, now: Instant) -> Vec<u8> {
        let mut all = Vec::new();
        loop {
            let some = self.drain(now, 1 << 20, usize::MAX);
            if some.is_empty() {
                return all;
            }
            all.extend(some);
        }
    }

    fn collect(&mut self) {
        while let Some(completion) = self.conn.poll_completion() {
            self.done.push(completion);
        }
        while let Some(event) = self.conn.poll_event() {
            self.events.push(event);
        }
    }

    fn sent_fin(&self) -> bool {
        !self.shutdowns.is_empty()
    }
}

/// Two connections and the two streams between them, cut at random places.
#[derive(Debug)]
pub struct Pair {
    /// Initiator and responder.
    pub sides: [Side; 2],
    /// Octets on their way to side 0 and to side 1.
    wires: [Vec<u8>; 2],
    /// The clock.
    pub now: Instant,
    rng: Rng,
}

impl Pair {
    /// Two ends; nothing is exchanged yet.
    pub fn new(initiator: Config, responder: Config, private_data: &[u8], seed: u64) -> Self {
        let now = Instant::ZERO;
        let initiator =
            Connection::initiator(initiator, private_data, now).expect("the settings are valid");
        let responder = Connection::responder(responder, now);
        Self {
            sides: [Side::new(initiator), Side::new(responder)],
            wires: [Vec::new(), Vec::new()],
            now,
            rng: Rng::new(seed),
        }
    }

    /// One turn: each end sends a little, each wire delivers a little. False: nothing moved.
    pub fn step(&mut self) -> bool {
        self.now = self.now + Duration::from_micros(1);
        let mut moved = false;
        for i in 0..2 {
            let budget = 1 + self.rng.below(100_000) as usize;
            let max = 1 + self.rng.below(20_000) as usize;
            let sent = self.sides[i].drain(self.now, budget, max);
            moved |= !sent.is_empty();
            self.wires[1 - i].extend(sent);
            let there = self.wires[i].len() as u64;
            if there > 0 {
                // Cut anywhere: often a few octets, sometimes all.
                let most = if self.rng.one_in(3) { there } else { there.min(40) };
                let n = 1 + self.rng.below(most) as usize;
                let some: Vec<u8> = self.wires[i].drain(..n).collect();
                self.sides[i].feed(self.now, &some);
                moved = true;
            } else if self.sides[1 - i].sent_fin() && !self.sides[i].eof_seen {
                self.sides[i].feed_eof(self.now);
                moved = true;
            }
        }
        moved
    }

    /// Goes on until nothing moves any more. Panics if that takes more than `limit` turns.
    pub fn run(&mut self, limit: usize) {
        for _ in 0..limit {
            // An end may have something to say only after the other one has moved: ask twice.
            if !self.step() && !self.step() {
                return;
            }
        }
        panic!("the pair is still busy after {limit} turns");
    }

    /// Runs until the responder has a request, accepts it, and runs on until both are connected.
    pub fn connect(&mut self) {
        while !matches!(self.sides[1].events.last(), Some(Event::Request(_))) {
            assert!(self.step(), "the start-up stopped: {:?}", self.sides[0].events);
        }
        self.sides[1].conn.accept(b"", self.now).expect("a request is there");
        self.run(100_000);
    }
}

/// Settings for tests: domain [`PD`], queue pair `qpn`.
pub fn config(qpn: u32, seed: u64) -> Config {
    Config::new(PdId(PD), Qpn(qpn), seed)
}
