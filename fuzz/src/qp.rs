//! One RoCEv2 queue pair under a script: what its peer, its program and the clock do.

use std::{net::SocketAddr, time::Duration};

use userdma_proto::{
    roce::{Completion, Config, Event, PathMtu, Qp, QpAttr, Received, Train, Window},
    time::Instant,
    verbs::{Access, QpState, QpType, RecvWr, UdDest, WcStatus},
    wire::{
        ids::{PKey, Psn, QKey, Qpn},
        roce::{Packet, opcode::Operation},
    },
};

use crate::{
    Choices,
    memory::{Books, DOMAIN, KEYS, LEN, Recorder, Touch},
    peer::{self, Peer},
};

/// Six octets of settings ([`settings`]), then steps until the input ends. A step is one octet,
/// modulo 16, and what it needs:
///
/// | step | what happens |
/// |---|---|
/// | 0 to 3 | the peer sends a request that is nearly right; see [`Peer::request`] |
/// | 4, 5 | the peer answers a request of ours; see [`Peer::answer`] |
/// | 6 | `n` (two octets, at most 2,047) octets of the input come as a packet |
/// | 7, 8 | the program posts a send; see [`peer::send`] |
/// | 9 | the program posts a receive |
/// | 10 | up to `n` trains (one octet, 0: all) of so many octets (two) are sent |
/// | 11 | time passes, as two octets say; a time-out that is due is told |
/// | 12 | the time of the next time-out comes |
/// | 13 | the program modifies the queue pair; see [`Script::modify`] |
/// | 14 | the window changes, or a key is revoked |
/// | 15 | the last packet comes once more, damaged or not |
///
/// Behind a request or an answer [`peer::damage`] has a choice.
///
/// Nothing panics; memory is touched only where the peer may or posted work says so; requests
/// complete in their turn and once; in the error state all is flushed; what goes out is well-formed
/// and bounded; and a peer that falls silent leaves no send unfinished where a timer runs.
pub fn roce_qp(data: &[u8]) {
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

const QPN: Qpn = Qpn(0x11);
const THEIRS: Qpn = Qpn(0x12);
const QKEY: QKey = QKey(0x1234_5678);
/// Lengths of the queues, and pieces a request may have.
const MOST_WORK: usize = 6;
const MOST_PIECES: usize = 2;

struct Script<'a> {
    choices: Choices<'a>,
    qp: Qp,
    /// What brings it from RESET to RTS.
    up: QpAttr,
    mem: Recorder,
    now: Instant,
    peer: Peer,
    last: Vec<u8>,
    train: Train,
    tag: u64,
    books: Books,
    /// All that the peer was ever allowed.
    granted: Access,
    fed: u64,
    written_remotely: u64,
    /// Since RESET: the first packet was told, the error was.
    established: bool,
    broken: bool,
    /// SQD: it was told that all is done.
    drained: bool,
    /// Packets, and answers of however many.
    sent: u64,
    answers: usize,
}

impl<'a> Script<'a> {
    fn new(mut choices: Choices<'a>) -> Self {
        let (config, up, window) = settings(&mut choices);
        let remote = Access::REMOTE_READ
            | Access::REMOTE_WRITE
            | Access::REMOTE_ATOMIC
            | Access::FLUSH_GLOBAL
            | Access::FLUSH_PERSISTENT;
        let mut script = Self {
            choices,
            qp: Qp::new(config),
            up,
            mem: Recorder::new(remote, QPN),
            now: Instant::ZERO,
            peer: Peer::default(),
            last: Vec::new(),
            train: Train::default(),
            tag: 0,
            books: Books::default(),
            granted: Access::empty(),
            fed: 0,
            written_remotely: 0,
            established: false,
            broken: false,
            drained: false,
            sent: 0,
            answers: 0,
        };
        script.qp.set_window(window);
        script.bring_up();
        script
    }

    /// From RESET to RTS.
    fn bring_up(&mut self) {
        assert_eq!(self.qp.state(), QpState::Reset);
        let early = QpAttr {
            state: Some(QpState::Init),
            local: None,
            peer: None,
            rq_psn: None,
            sq_psn: None,
            ..self.up
        };
        self.modified(&early);
        let up = self.up;
        self.modified(&QpAttr { state: Some(QpState::Rtr), sq_psn: None, ..up });
        let rts = QpAttr { sq_psn: up.sq_psn, ..QpAttr::to(QpState::Rts) };
        self.modified(&rts);
        assert_eq!(self.qp.state(), QpState::Rts);
        self.peer = Peer::new(up.rq_psn.expect("it is set"));
    }

    fn step(&mut self) {
        match self.choices.below(16) {
            0..=3 => {
                let (kind, attr) = (self.qp.config().kind, *self.qp.attributes());
                let mut octets = self.peer.request(&mut self.choices, QPN, kind, &attr);
                peer::damage(&mut self.choices, &mut octets);
                self.arrive(octets);
            }
            4 | 5 => {
                let attr = *self.qp.attributes();
                for mut octets in self.peer.answer(&mut self.choices, QPN, &attr) {
                    peer::damage(&mut self.choices, &mut octets);
                    self.arrive(octets);
                }
            }
            6 => {
                let len = self.choices.any::<u16>() & 0x7ff;
                let octets = self.choices.octets(len.into()).to_vec();
                self.arrive(octets);
            }
            7 | 8 => self.post_send(),
            9 => self.post_recv(),
            10 => {
                let (most, budget) = (self.choices.any::<u8>(), self.choices.any::<u16>());
                let most = if most == 0 { usize::MAX } else { most.into() };
                self.transmit(most, budget.into());
            }
            11 => {
                let time: u16 = self.choices.any();
                let micros = u64::from(time & 0xfff) << (time >> 12);
                self.pass(self.now + Duration::from_micros(micros));
            }
            12 => {
                if let Some(at) = self.qp.poll_timeout() {
                    self.pass(at.max(self.now));
                }
            }
            13 => self.modify(),
            14 => match self.choices.any::<u8>() {
                0..0xc0 => {
                    let (packets, octets) = (self.choices.any::<u8>(), self.choices.any::<u16>());
                    self.qp.set_window(Window { packets: packets.into(), octets: octets.into() });
                }
                _ => self.mem.plain.remove(self.choices.one_of(&KEYS)),
            },
            _ => {
                let mut octets = self.last.clone();
                peer::damage(&mut self.choices, &mut octets);
                self.arrive(octets);
            }
        }
        self.collect();
    }

    // ---------------------------------------------------------------------- the peer, the clock

    /// One octet: bit 0 from somebody else, bits 1 and 2 the ECN bits.
    fn arrive(&mut self, octets: Vec<u8>) {
        let how: u8 = self.choices.any();
        let Ok(packet) = Packet::parse(&octets) else { return };
        let mut from = self.up.peer.expect("it is set");
        if how & 1 != 0 {
            from = "192.0.2.99:4791".parse().expect("an address");
        }
        self.fed += octets.len() as u64;
        let received = Received { packet: &packet, from, len: octets.len(), ecn: how >> 1 & 3 };
        self.qp.handle_packet(self.now, &received, &self.mem);
        self.last = octets;
        self.collect();
    }

    fn pass(&mut self, until: Instant) {
        self.now = until;
        if self.qp.poll_timeout().is_some_and(|at| at <= until) {
            self.qp.handle_timeout(until);
            assert!(self.qp.poll_timeout().is_none_or(|at| at > until), "it is due for ever");
        }
    }

    // ------------------------------------------------------------------------------ the program

    fn post_send(&mut self) {
        let to = (self.qp.config().kind == QpType::Ud).then(|| UdDest {
            addr: self.up.peer.expect("it is set"),
            qpn: THEIRS,
            qkey: QKey(self.choices.one_of(&[QKEY.0, 1 << 31])),
        });
        let wr = peer::send(&mut self.choices, self.tag, to);
        let state = self.qp.state();
        match self.qp.post_send(wr.clone(), self.tag) {
            Ok(()) => {
                assert!(matches!(state, QpState::Rts | QpState::Sqd | QpState::Err), "{state:?}");
                self.books.sent(&wr);
                self.tag += 1;
            }
            Err(error) => self.books.refused(error, false, MOST_WORK),
        }
    }

    fn post_recv(&mut self) {
        let wr = RecvWr::new(self.tag, self.choices.sges());
        match self.qp.post_recv(wr.clone(), self.tag) {
            Ok(()) => {
                assert_ne!(self.qp.state(), QpState::Reset);
                self.books.received(&wr);
                self.tag += 1;
            }
            Err(error) => self.books.refused(error, true, MOST_WORK),
        }
    }

    /// One octet: to RESET and up again, to ERR, SQD or RTS; or attributes, each with an octet of
    /// its own, and any state.
    fn modify(&mut self) {
        match self.choices.any::<u8>() {
            0..0x20 => {
                self.modified(&QpAttr::to(QpState::Reset));
                self.bring_up();
            }
            0x20..0x30 => self.modified(&QpAttr::to(QpState::Err)),
            0x30..0x60 => self.modified(&QpAttr::to(QpState::Sqd)),
            0x60..0x90 => self.modified(&QpAttr::to(QpState::Rts)),
            which => {
                let state = match self.choices.any::<u8>() {
                    0..0xc0 => None,
                    state => Some(STATES[usize::from(state) % STATES.len()]),
                };
                let value: u8 = self.choices.any();
                let on = |bit: u8| which >> bit & 1 != 0;
                let attr = QpAttr {
                    state,
                    pkey: on(0).then_some(PKey(0xffff ^ u32::from(value >> 7))),
                    access: on(1).then_some(Access::from_bits_truncate(value.into())),
                    max_rd_atomic: on(2).then_some(value & 3),
                    timeout: on(3).then_some(value),
                    retry_cnt: on(3).then_some(value & 9),
                    rnr_retry: on(4).then_some(value >> 4 & 7),
                    min_rnr_timer: on(4).then_some(value & 31),
                    migreq: on(5).then_some(value & 1 != 0),
                    // Too late in most states.
                    rq_psn: (value == 0xff).then_some(Psn::new(7)),
                    sq_psn: (value == 0xfe).then_some(Psn::new(7)),
                    max_dest_rd_atomic: (value == 0xfd).then_some(2),
                    path_mtu: (value == 0xfc).then_some(PathMtu::Mtu4096),
                    ..QpAttr::default()
                };
                self.modified(&attr);
            }
        }
    }

    fn modified(&mut self, attr: &QpAttr) {
        let (state, before) = (self.qp.state(), *self.qp.attributes());
        match self.qp.modify(attr) {
            Ok(()) => {
                let to = attr.state.unwrap_or(state);
                assert_eq!(self.qp.state(), to);
                self.drained &= to == state;
                if to == QpState::Reset {
                    self.books.forget();
                    (self.established, self.broken) = (false, false);
                    self.granted = Access::empty();
                    self.peer = Peer::new(self.up.rq_psn.expect("it is set"));
                }
                if to != QpState::Reset {
                    self.granted |= self.qp.attributes().access;
                }
            }
            Err(error) => {
                assert!(!error.to_string().is_empty());
                assert_eq!((self.qp.state(), *self.qp.attributes()), (state, before));
            }
        }
        self.collect();
    }

    // ------------------------------------------------------------------------------- the socket

    /// Sends up to `most` trains of about `budget` octets. Returns how many packets that were.
    fn transmit(&mut self, most: usize, budget: usize) -> usize {
        let (mut packets, answers) = (0, self.answers);
        for _ in 0..most {
            let some = self.qp.poll_transmit(self.now, &self.mem, budget, &mut self.train);
            assert_eq!(some, !self.train.is_empty());
            if !some {
                break;
            }
            packets += self.train.packets();
            assert!(packets <= self.most_packets(), "{packets} packets, and no end");
            self.sent();
            self.collect();
        }
        // Each of its resources twice, and acknowledgements between them.
        let most = 4 * usize::from(self.qp.attributes().max_dest_rd_atomic) + 6;
        assert!(self.answers - answers <= most, "{} answers", self.answers - answers);
        packets
    }

    /// What can be waiting to be sent: all work in the queue, and an answer to all that the peer
    /// may ask for at a time, each of a whole region.
    fn most_packets(&self) -> usize {
        let attr = self.qp.attributes();
        let mtu = attr.path_mtu.octets() as usize;
        let requests = MOST_WORK * ((LEN + 64) * MOST_PIECES).div_ceil(mtu);
        let answers = (4 * usize::from(attr.max_dest_rd_atomic) + 6) * LEN.div_ceil(mtu);
        requests + answers
    }

    fn sent(&mut self) {
        let (config, attr) = (self.qp.config(), self.qp.attributes());
        let peer = self.up.peer.expect("it is set");
        let ends = (self.train.local(), self.train.peer());
        assert_eq!(ends, (self.up.local, Some(peer)), "from where to where");
        assert_eq!(self.train.ecn_capable(), config.ecn);
        assert!(self.train.packets() <= config.max_train);
        let mtu = attr.path_mtu.octets();
        for octets in peer::packets(&self.train, mtu) {
            let packet = Packet::parse(&octets).expect("it was found good");
            let bth = &packet.headers.bth;
            let info = bth.opcode().info().expect("a known opcode");
            assert_eq!(info.transport, peer::transport(config.kind), "{}", bth.opcode());
            assert_eq!(bth.dest_qp(), THEIRS, "{packet:?}");
            assert!(info.operation != Operation::Resync && bth.tver() == 0);
            self.peer.see(&packet);
            self.answers += usize::from(!info.request && info.place.begins());
            self.sent += 1;
        }
    }

    // ------------------------------------------------------------------------------- what holds

    /// Takes completions and events, and judges them and the memory that was touched.
    fn collect(&mut self) {
        for (qpn, touch) in self.mem.take() {
            assert_eq!(qpn, QPN);
            // Many requests may have waited for the one that came.
            let kept = self.qp.attributes().out_of_order;
            self.books.judge(touch, if kept { usize::MAX } else { 1 });
            let Touch::Remote(access, len) = touch else { continue };
            if len == 0 {
                continue;
            }
            assert!(self.granted.contains(access), "{access:?} is not granted");
            if access == Access::REMOTE_WRITE {
                self.written_remotely += len;
                assert!(self.written_remotely <= self.fed, "more than came was written");
            }
        }
        let mut recv_flushed = false;
        while let Some(Completion { tag, wc }) = self.qp.poll_completion() {
            self.books.complete(tag, &wc, QPN);
            if wc.status == WcStatus::WR_FLUSH_ERR {
                assert!(!recv_flushed || wc.opcode.is_recv(), "sends are flushed first");
                recv_flushed |= wc.opcode.is_recv();
            }
        }
        while let Some(event) = self.qp.poll_event() {
            match event {
                Event::Established => {
                    assert!(!core::mem::replace(&mut self.established, true), "twice");
                }
                Event::Drained => {
                    assert!(!core::mem::replace(&mut self.drained, true), "twice");
                }
                Event::Error(_) => assert!(!core::mem::replace(&mut self.broken, true), "twice"),
                other => panic!("{other:?}"),
            }
        }
        let is_broken = self.qp.state() == QpState::Err;
        assert_eq!(self.broken, is_broken, "the event and the state");
        if is_broken {
            self.books.check_done();
            assert_eq!(self.qp.poll_timeout(), None);
        }
    }

    /// The peer says nothing more; then the program closes.
    fn end(&mut self) {
        // RNR, all retries, and what is told once more.
        for n in 0.. {
            assert!(n < 20, "it goes on for ever: {:?}", self.qp);
            self.transmit(usize::MAX, 1 << 16);
            self.collect();
            let Some(at) = self.qp.poll_timeout() else { break };
            self.pass(at.max(self.now));
            self.collect();
        }
        assert_eq!(self.transmit(1, 1 << 16), 0, "all was sent");
        let timer = self.qp.config().kind != QpType::Rc || self.qp.attributes().timeout != 0;
        if self.qp.state() == QpState::Rts && timer {
            self.books.check_sends_done();
        }
        self.modified(&QpAttr::to(QpState::Err));
        self.transmit(usize::MAX, 1 << 16);
        self.books.check_done();
        self.mem.check_untouched();
        // In the error state work is taken and flushed.
        self.post_recv();
        self.collect();
        self.post_send();
        self.collect();
        self.modified(&QpAttr::to(QpState::Reset));
        assert_eq!(self.transmit(1, 1 << 16), 0, "there is nothing in RESET");
    }
}

const STATES: [QpState; 6] =
    [QpState::Reset, QpState::Init, QpState::Rtr, QpState::Rts, QpState::Sqd, QpState::Err];

/// One octet each: the type (lower two bits), IPv6, ECN, credits, path MTU (upper three); retries
/// and RNR retries; ACK time-out, with the upper three bits for READs and atomics outstanding;
/// rights of the peer (ones take them away), and bit 4, which keeps packets out of order; PSNs, from
/// 0x80 on close to where they wrap; window, cadence of acknowledgements, and length of a train.
fn settings(choices: &mut Choices<'_>) -> (Config, QpAttr, Window) {
    let [what, retries, time, rights, psn, window]: [u8; 6] =
        core::array::from_fn(|_| choices.any());
    let kind = [QpType::Rc, QpType::Rc, QpType::Uc, QpType::Ud][usize::from(what & 3)];
    let mut config = Config::new(kind, DOMAIN, QPN);
    config.ecn = what & 8 != 0;
    config.credits = what & 16 != 0;
    (config.max_send_wr, config.max_recv_wr) = (MOST_WORK, MOST_WORK);
    (config.max_sge, config.max_inline) = (MOST_PIECES, 64);
    (config.max_kept, config.max_kept_octets) = (8, 3000);
    config.ack_every = u32::from(window & 3) * 2 + 1;
    config.max_train = [128, 128, 1, 7][usize::from(window >> 2 & 3)];
    let window = match window >> 4 {
        0 => Window::default(),
        small => Window { packets: small.into(), octets: u32::from(small) * 600 },
    };
    let ends: [SocketAddr; 2] = if what & 4 == 0 {
        ["192.0.2.1:4791", "192.0.2.2:4792"]
    } else {
        ["[2001:db8::1]:4791", "[2001:db8::2]:4792"]
    }
    .map(|addr| addr.parse().expect("an address"));
    let psns = match psn {
        0..0x80 => [100 + u32::from(psn), 500],
        near => [0xff_ff00 + u32::from(near), 0xff_fff8 + u32::from(near & 7)],
    };
    let default = Access::REMOTE_WRITE
        | Access::REMOTE_READ
        | Access::REMOTE_ATOMIC
        | Access::FLUSH_GLOBAL
        | Access::FLUSH_PERSISTENT;
    let depth = [16, 1, 2, 3, 4, 0, 1, 16][usize::from(time >> 5)];
    let up = QpAttr {
        qkey: Some(QKEY),
        access: Some(default - Access::from_bits_truncate(rights.into())),
        local: Some(ends[0]),
        peer: Some(ends[1]),
        dest_qp: Some(THEIRS),
        path_mtu: Some(PathMtu::ALL[usize::from(what >> 5) % 5]),
        rq_psn: Some(Psn::new(psns[0])),
        sq_psn: Some(Psn::new(psns[1])),
        timeout: Some(time & 31),
        retry_cnt: Some(retries & 7),
        rnr_retry: Some(retries >> 3 & 7),
        max_rd_atomic: Some(depth),
        max_dest_rd_atomic: Some(depth),
        out_of_order: Some(rights & 16 != 0),
        ..QpAttr::default()
    };
    (config, up, window)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A seed that stops early would be worth little, and nobody would see it.
    #[test]
    fn the_seeds_get_where_their_names_say() {
        // Completions that tell success, octets written by the peer, packets sent.
        for (name, succeeded, written, sent) in [
            ("rc_requests_of_every_kind", 7, 0, 9),
            ("rc_answers_of_every_kind", 2, 32, 7),
            ("rc_messages_of_many_packets", 1, 600, 1),
            ("rc_loss", 1, 0, 9),
            ("rc_read_restarted", 1, 0, 2),
            ("rc_out_of_order", 1, 48, 2),
            ("rc_no_receive", 1, 0, 2),
            ("rc_told_to_wait", 1, 0, 2),
            ("rc_refused", 0, 0, 2),
            ("rc_told_to_stop", 0, 0, 2),
            ("rc_silence", 0, 0, 8),
            ("rc_duplicates", 1, 0, 3),
            ("rc_reads_that_came_before", 0, 0, 7),
            ("rc_drained_and_again", 2, 0, 2),
            ("rc_reset_and_again", 1, 0, 2),
            ("uc_both_ways", 3, 24, 2),
            ("uc_gap", 1, 0, 0),
            ("ud_both_ways", 3, 0, 1),
        ] {
            let input = crate::seed("roce_qp", name);
            let script = run(&input);
            let found = (script.books.succeeded, script.written_remotely, script.sent);
            assert_eq!(found, (succeeded, written, sent), "{name}");
        }
    }
}
