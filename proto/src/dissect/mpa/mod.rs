//! MPA in a TCP stream: start-up frames, FPDUs, and finding them where the start is missing.
//!
//! A [`Connection`] has two halves, one a direction. Each is in one of these states:
//!
//! ```text
//!                 key                     whole
//!   Search ───────────────> Startup ─────────────────> Fpdus
//!    │  ^                                               ^ │
//!    │  └── disproved ──────── Trial ──── proven ───────┘ │
//!    │                         ^   ^                      │
//!    └── looks like a header ──┘   └── framing in doubt ──┘
//!
//!   Scan:    Search where more is known. FPDUs were lost in a stream whose framing is known.
//!   Foreign: the stream's first octets are no key. Nothing but a key is looked for.
//!   Ended:   a reply with R. Nothing is looked for.
//! ```
//!
//! In Search and Foreign only the beginnings of segments are looked at, in any order, and no octet
//! is kept. In the other states the octets are wanted in order. A gap leads back to Search or Scan.
//!
//! **Scan.** FPDUs and the distance of markers are multiples of four octets (RFC 5044 §4): from one
//! place where an FPDU begins, such as the end of the start-up frame, it is known where others may.
//! Each of these places is looked at once, whatever segments there are: peers pack FPDUs, and may
//! never have one at a segment's beginning again. A marker that is there says where the FPDU
//! around it begins: places between the two are passed over. The beginnings of segments are looked
//! at too.
//!
//! **What counts as proof.** An FPDU has a length, a DDP and an RDMAP header that agree with each
//! other (RFC 5041 §4, RFC 5040 §4), and a CRC that is good or zero. In a stream about which
//! nothing is known three of them in a row are a proof, or two where a CRC is good. In a connection
//! that is known to be MPA it is one with a good CRC, or two. A CRC counts only if it is like those
//! that the peer sent before: zero is no proof from a peer that fills the field, and where the CRC
//! is in use only from one that was seen to leave it out. What a scan finds within a segment needs
//! a third FPDU where CRCs are neither good nor zero.

mod backlog;
mod view;

use alloc::{boxed::Box, format, string::ToString, vec::Vec};

use smallvec::SmallVec;

use super::{CrcState, Fpdu, Iwarp, Start};
use crate::wire::iwarp::{
    fpdu::{CRC_LEN, LENGTH_LEN, MARKER_LEN, MARKER_SPACING, fpdu_len},
    mpa::{self, KEY_REPLY, KEY_REQUEST, StartFlags, StartKind},
};
use backlog::Backlog;
pub(super) use backlog::Chunk;
use view::{Framing, View, is_control};

/// What was found, each with the number of its frame.
pub(super) type Out = Vec<(u64, Iwarp)>;

/// Octets of a segment that tell whether an FPDU may begin there: length and both control octets.
const HEADER_PEEK: usize = LENGTH_LEN + 2;
/// Octets that tell whether an FPDU may begin there, its queue number and a marker among them.
/// Fewer than any FPDU has.
const SCAN_PEEK: usize = 16;
/// FPDUs begin at places that differ by multiples of this.
const ALIGNMENT: u64 = 4;
/// Places of a marker that a trial goes through, at most.
const MAX_ALTERNATIVES: usize = 6;
/// Octets that trials may sum up beyond [`CREDIT_RATE`] for each octet received. Octets made to
/// look like beginnings of long FPDUs, again and again, cost no more than that.
const CREDIT: u64 = 1 << 20;
/// See [`CREDIT`].
const CREDIT_RATE: u64 = 8;

/// What is known of MPA in a TCP connection.
#[derive(Debug, Default)]
pub(super) struct Connection {
    halves: [Half; 2],
    /// It is MPA: a start-up frame was seen, or FPDUs were proven.
    known: bool,
    /// A stream began with something else than a key.
    foreign: bool,
    /// Something became known that the other half may be waiting for.
    news: bool,
}

/// One direction.
#[derive(Debug)]
struct Half {
    state: State,
    backlog: Backlog,
    /// Flags of the start-up frame that this side sent.
    flags: Option<StartFlags>,
    /// Where that frame ended: markers count from there.
    origin: Option<u64>,
    /// Markers were found off their grid.
    off_grid: bool,
    /// A place where an FPDU began.
    place: Option<u64>,
    /// The framing of FPDUs that were followed, if it was beyond doubt and is not off the grid.
    followed: Option<Framing>,
    /// What this side's FPDUs had as CRC.
    crcs: Crcs,
    /// Frames up to this one are gone: nothing can be told at them any more.
    released: u64,
    /// The frame that brought the latest octets.
    latest: u64,
    /// Octets that trials may still sum up: see [`CREDIT`].
    credit: u64,
}

impl Default for Half {
    fn default() -> Self {
        Self {
            state: State::Search,
            backlog: Backlog::default(),
            flags: None,
            origin: None,
            off_grid: false,
            place: None,
            followed: None,
            crcs: Crcs::default(),
            released: 0,
            latest: 0,
            credit: CREDIT,
        }
    }
}

/// The states of CRCs that one side sent.
#[derive(Debug, Default, Clone, Copy)]
struct Crcs {
    good: bool,
    zero: bool,
    bad: bool,
}

impl Crcs {
    const fn add(&mut self, crc: CrcState) {
        match crc {
            CrcState::Good => self.good = true,
            CrcState::Zero => self.zero = true,
            CrcState::Bad => self.bad = true,
        }
    }

    /// Whether an FPDU of this side may have a CRC of zero: one that always has a good one has not.
    fn may_be_zero(self, in_use: Option<bool>) -> bool {
        self.zero || in_use != Some(true) && (self.bad || !self.good)
    }

    /// Whether an FPDU of this side may hold anything where the CRC is, if that is not in use.
    const fn may_be_bad(self) -> bool {
        self.bad || !self.good && !self.zero
    }
}

impl Half {
    /// No frame waited for what was read until now.
    fn let_go(&mut self) {
        self.released = self.released.max(self.latest.saturating_sub(1));
    }

    /// Remembers the framing of the FPDUs that are followed.
    fn remember(&mut self) {
        if let State::Fpdus(Fpdus { framing, sure: true, .. }) = self.state {
            self.followed = match framing {
                Framing::OffGrid(_) => None,
                other => Some(other),
            };
        }
    }
}

/// See the module's picture.
#[derive(Debug)]
enum State {
    Search,
    Scan,
    Foreign,
    Ended,
    /// The octets begin like a key; whether they are the stream's first ones.
    Startup {
        first: bool,
    },
    Trial(Box<Trial>),
    Fpdus(Fpdus),
}

/// FPDUs that are followed.
#[derive(Debug)]
struct Fpdus {
    framing: Framing,
    /// Whether the framing is beyond doubt. Without a start-up frame a stream may have markers
    /// that are still to come.
    sure: bool,
    /// FPDUs since the start-up frame, if none is missing.
    finished: Option<u64>,
    /// Octets that were followed.
    run: u64,
    /// Octets that the next FPDU needs before more can be said about it.
    need: usize,
    /// The length of the next FPDU, where its headers are wrong and it is not whole.
    odd: Option<usize>,
}

/// FPDUs that are to be proven, at the front of the backlog.
#[derive(Debug)]
struct Trial {
    framing: Framing,
    /// Whether the framing is a guess.
    guess: bool,
    /// Whether they begin right behind a start-up frame.
    at_origin: bool,
    /// Whether they begin within a segment, at a place like any other.
    scanned: bool,
    /// Other framings to try: FPDUs to keep of those found, and the framing from there on.
    /// `None` as long as the first one stands.
    others: Option<SmallVec<[(usize, Framing); MAX_ALTERNATIVES]>>,
    found: Vec<Found>,
    /// Offset of the next FPDU from the backlog's front.
    at: usize,
    /// Octets that it needs before more can be said about it.
    need: usize,
}

/// An FPDU that may be one.
#[derive(Debug)]
struct Found {
    /// Offset from the backlog's front.
    begin: usize,
    number: u64,
    crc: CrcState,
    /// `None` once its frame is gone.
    fpdu: Option<Fpdu>,
}

impl Trial {
    fn new(framing: Option<Framing>) -> Box<Self> {
        Box::new(Self {
            framing: framing.unwrap_or(Framing::Plain),
            guess: framing.is_none(),
            at_origin: false,
            scanned: false,
            others: None,
            found: Vec::new(),
            at: 0,
            need: 0,
        })
    }

    fn is_proven(&self, known: bool) -> bool {
        let good = self.found.iter().any(|found| found.crc == CrcState::Good);
        match self.found.len() {
            0 => false,
            1 => known && good,
            2 => known && !(self.scanned && self.has_bad()) || good,
            _ => true,
        }
    }

    fn has_bad(&self) -> bool {
        self.found.iter().any(|found| found.crc == CrcState::Bad)
    }

    /// Whether what was found is believed in a connection that is known to be MPA where nothing
    /// more comes; there are `len` octets.
    fn will_do(&self, len: usize) -> bool {
        match self.found.len() {
            0 => false,
            found => !self.scanned || self.at == len && (found > 1 || !self.has_bad()),
        }
    }
}

impl Connection {
    /// Whether octets are wanted in order; else [`Connection::look`] is what wants them.
    pub(super) const fn is_ordered(&self, side: usize) -> bool {
        match self.halves[side].state {
            State::Search | State::Foreign | State::Ended => false,
            State::Scan | State::Startup { .. } | State::Trial(_) | State::Fpdus(_) => true,
        }
    }

    /// Whether a stream's first octets decide about it.
    pub(super) const fn wants_first(&self, side: usize) -> bool {
        matches!(self.halves[side].state, State::Search) && self.halves[side].flags.is_none()
    }

    /// Whether the connection is MPA.
    pub(super) const fn is_known(&self) -> bool {
        self.known
    }

    /// Looks at the first `octets` of a segment at `pos`; `first`: they are the stream's first.
    /// True where they, and what follows, are wanted in order.
    pub(super) fn look(&mut self, side: usize, pos: u64, first: bool, octets: &[u8]) -> bool {
        let half = &self.halves[side];
        if matches!(half.state, State::Ended) {
            return false;
        }
        // A part of a key is believed only where a key is due.
        let enough = if first { 1 } else { HEADER_PEEK };
        if half.flags.is_none() && octets.len() >= enough && begins_key(octets) {
            self.halves[side].state = State::Startup { first };
            return true;
        }
        if first && !self.known && !octets.is_empty() {
            self.give_up();
        }
        if self.foreign || octets.len() < HEADER_PEEK {
            return false;
        }
        let framing = self.framing(side);
        if !may_begin(framing, pos, octets) {
            return false;
        }
        self.halves[side].state = State::Trial(Trial::new(framing));
        true
    }

    /// Takes octets in order.
    pub(super) fn deliver(&mut self, side: usize, chunk: &Chunk<'_>, out: &mut Out) {
        let mut chunk = *chunk;
        let half = &mut self.halves[side];
        half.latest = half.latest.max(chunk.number);
        half.credit = (half.credit + chunk.octets.len() as u64 * CREDIT_RATE).min(CREDIT);
        if matches!(half.state, State::Scan) {
            half.let_go();
        }
        while !chunk.octets.is_empty() && self.is_ordered(side) {
            let half = &self.halves[side];
            let State::Fpdus(fpdus) = &half.state else {
                self.enqueue(side, &mut chunk, usize::MAX, out);
                continue;
            };
            if half.backlog.is_empty() {
                self.follow_chunk(side, &mut chunk, out);
            } else {
                // No more than the FPDU needs: the next one is read from the segment itself.
                let missing = fpdus.need.saturating_sub(half.backlog.len()).max(1);
                self.enqueue(side, &mut chunk, missing, out);
            }
        }
        self.settle(1 - side, out);
    }

    /// There are `len` octets that will not come. The next octets are those of frame `number`.
    pub(super) fn gap(&mut self, side: usize, number: u64, len: u64, out: &mut Out) {
        let broken = match &self.halves[side].state {
            State::Startup { .. } => self.halves[side].backlog.len() >= KEY_REQUEST.len(),
            State::Fpdus(_) => true,
            _ => false,
        };
        if broken {
            let octets = if len == 1 { "octet is" } else { "octets are" };
            let lost = format!(
                "{len} {octets} missing from the capture: FPDUs there are lost, the next one is \
                 looked for"
            );
            self.tell(side, number, Iwarp::Error(lost), out);
        }
        self.stop(side, out);
    }

    /// Octets that are kept, and what it takes to keep them.
    pub(super) fn keeps(&self, side: usize) -> usize {
        self.halves[side].backlog.takes()
    }

    /// Octets that are kept of what is beyond doubt.
    pub(super) const fn unread(&self, side: usize) -> usize {
        match self.halves[side].state {
            State::Startup { .. } | State::Fpdus(_) => self.halves[side].backlog.len(),
            _ => 0,
        }
    }

    /// Tells at frame `number` that there were `len` octets that can be told nowhere.
    pub(super) fn lost(&self, side: usize, number: u64, len: u64, out: &mut Out) {
        let octets = if len == 1 { "octet was" } else { "octets were" };
        let lost = format!(
            "{len} {octets} captured and given up, as others before them did not come in time: \
             FPDUs there are lost"
        );
        self.tell(side, number, Iwarp::Error(lost), out);
    }

    /// The lowest frame that something may still be told at.
    pub(super) fn hold(&self, side: usize) -> Option<u64> {
        let half = &self.halves[side];
        match half.state {
            State::Trial(_) => half.backlog.first_frame_after(half.released),
            _ => None,
        }
    }

    /// Frames up to `number` can wait no longer.
    pub(super) fn decide(&mut self, side: usize, number: u64, out: &mut Out) {
        let half = &mut self.halves[side];
        if let State::Trial(trial) = &mut half.state {
            if self.known && trial.will_do(half.backlog.len()) {
                self.accept(side, out);
                self.run(side, out);
            } else {
                // It may still be proven, for what comes later.
                for found in trial.found.iter_mut().filter(|found| found.number <= number) {
                    found.fpdu = None;
                }
            }
        }
        let half = &mut self.halves[side];
        half.released = half.released.max(number);
        self.settle(1 - side, out);
    }

    /// Nobody knows that it is MPA, and it begins like something else.
    fn give_up(&mut self) {
        self.foreign = true;
        for half in &mut self.halves {
            if matches!(half.state, State::Search | State::Trial(_)) {
                half.state = State::Foreign;
                half.backlog.clear();
            }
        }
    }

    /// What the start-up frames say about `side`'s framing, if anything.
    const fn framing(&self, side: usize) -> Option<Framing> {
        // RFC 5044 §7.1: M asks for markers in what the sender of M receives.
        let Some(asked) = self.halves[1 - side].flags else {
            return None;
        };
        match self.halves[side].origin {
            _ if !asked.contains(StartFlags::MARKERS) => Some(Framing::Plain),
            Some(origin) if !self.halves[side].off_grid => Some(Framing::Grid(origin)),
            _ => None,
        }
    }

    /// Where else FPDUs of `side` may begin: the framing, and a place where one did.
    fn grid(&self, side: usize) -> Option<(Framing, u64)> {
        let half = &self.halves[side];
        self.framing(side).or(half.followed).zip(half.place)
    }

    /// The state in which the next FPDU of `side` is looked for.
    fn searching(&self, side: usize) -> State {
        if self.grid(side).is_some() {
            State::Scan
        } else if self.foreign {
            State::Foreign
        } else {
            State::Search
        }
    }

    /// RFC 5044 §7.1: the CRC is left out only if neither side asks for it.
    fn crc_in_use(&self) -> Option<bool> {
        let [a, b] = [0, 1].map(|side: usize| {
            self.halves[side].flags.map(|flags| flags.contains(StartFlags::CRC))
        });
        match (a, b) {
            (Some(true), _) | (_, Some(true)) => Some(true),
            (Some(false), Some(false)) => Some(false),
            _ => None,
        }
    }

    /// Tells it at frame `number`; if that is gone, at the one that brought the latest octets.
    fn tell(&self, side: usize, number: u64, what: Iwarp, out: &mut Out) {
        let half = &self.halves[side];
        let still_there = [number, half.latest].into_iter().find(|&n| n > half.released);
        out.extend(still_there.map(|number| (number, what)));
    }

    /// Follows FPDUs from a segment's octets.
    fn follow_chunk(&mut self, side: usize, chunk: &mut Chunk<'_>, out: &mut Out) {
        let crc_in_use = self.crc_in_use();
        while !chunk.octets.is_empty()
            && let State::Fpdus(fpdus) = &mut self.halves[side].state
        {
            match fpdus.next(chunk.octets, chunk.pos, crc_in_use) {
                Step::Need => {
                    if let Some(odd) = fpdus.odd.take() {
                        self.tell(side, chunk.number, oddity(odd), out);
                    }
                    return self.enqueue(side, chunk, usize::MAX, out);
                }
                Step::Took(len, fpdu) => {
                    self.halves[side].crcs.add(fpdu.crc);
                    self.tell(side, chunk.number, Iwarp::Fpdu(fpdu), out);
                    chunk.advance(len);
                }
                Step::Doubt(len, fpdu) => {
                    if let Some(fpdu) = fpdu {
                        self.tell(side, chunk.number, Iwarp::Fpdu(fpdu), out);
                    }
                    chunk.advance(len);
                    self.doubt(side, len);
                    return self.enqueue(side, chunk, usize::MAX, out);
                }
            }
        }
    }

    /// Moves up to `len` octets of the chunk to the backlog, and does what can be done with it.
    fn enqueue(&mut self, side: usize, chunk: &mut Chunk<'_>, len: usize, out: &mut Out) {
        let len = len.min(chunk.octets.len());
        if len == 0 {
            return;
        }
        let part = Chunk { octets: &chunk.octets[..len], ..*chunk };
        self.halves[side].backlog.append(&part);
        chunk.advance(len);
        self.run(side, out);
    }

    /// The framing is in doubt behind an FPDU of `len` octets.
    fn doubt(&mut self, side: usize, len: usize) {
        let declared = self.framing(side);
        let half = &mut self.halves[side];
        half.let_go();
        half.remember();
        let State::Fpdus(fpdus) = &half.state else {
            return;
        };
        let framing = match fpdus.framing {
            Framing::OffGrid(_) if len > 0 => Some(fpdus.framing),
            _ if fpdus.sure && declared.is_none() => Some(fpdus.framing),
            _ => declared,
        };
        half.state = State::Trial(Trial::new(framing));
    }

    /// Does what can be done with the backlog.
    fn run(&mut self, side: usize, out: &mut Out) {
        loop {
            let half = &mut self.halves[side];
            let went_on = match half.state {
                State::Search | State::Foreign | State::Ended => {
                    half.backlog.clear();
                    return;
                }
                State::Scan => self.scan(side),
                State::Startup { first } => self.start_up(side, first, out),
                State::Trial(_) => self.try_on(side, out),
                State::Fpdus(_) => self.follow(side, out),
            };
            if !went_on {
                return;
            }
        }
    }

    /// What was found on one side may decide what is open on the other.
    fn settle(&mut self, side: usize, out: &mut Out) {
        if !core::mem::take(&mut self.news) {
            return;
        }
        let declared = self.framing(side);
        let half = &mut self.halves[side];
        if let State::Trial(trial) = &mut half.state {
            if trial.at_origin && declared.is_some() {
                half.state = State::Fpdus(Fpdus::behind_start(declared));
            } else {
                trial.need = 0;
            }
            self.run(side, out);
        } else if matches!(half.state, State::Search) {
            self.halves[side].state = self.searching(side);
        }
    }

    /// Reads the start-up frame at the backlog's front.
    fn start_up(&mut self, side: usize, first: bool, out: &mut Out) -> bool {
        let half = &mut self.halves[side];
        let found = match mpa::Start::parse(half.backlog.octets()) {
            Ok(None) => return false,
            Ok(Some((start, used))) => {
                half.flags = Some(start.flags);
                half.origin = Some(half.backlog.pos + used as u64);
                half.place = half.origin;
                Ok((to_owned(&start), used))
            }
            Err(error) => Err(error),
        };
        let (start, used) = match found {
            Ok(found) => found,
            Err(error) if error.offset < KEY_REQUEST.len() => {
                // No key after all.
                half.let_go();
                half.state = State::Search;
                if first && !self.known {
                    self.give_up();
                }
                self.resume(side);
                return true;
            }
            Err(error) => {
                let number = half.backlog.number_at(mpa::START_LEN - 1);
                half.let_go();
                self.known = true;
                self.news = true;
                self.tell(side, number, Iwarp::Error(error.to_string()), out);
                self.resume(side);
                return true;
            }
        };
        let number = half.backlog.number_at(used - 1);
        half.backlog.advance(used);
        self.known = true;
        self.foreign = false;
        self.news = true;
        let refused = start.kind == StartKind::Reply && start.flags.contains(StartFlags::REJECT);
        self.tell(side, number, Iwarp::Start(Box::new(start)), out);
        if refused {
            for half in &mut self.halves {
                half.state = State::Ended;
                half.backlog.clear();
            }
            return false;
        }
        let other = &mut self.halves[1 - side];
        if matches!(other.state, State::Foreign) {
            other.state = State::Search;
        }
        let declared = self.framing(side);
        self.halves[side].state = if declared.is_some() {
            State::Fpdus(Fpdus::behind_start(declared))
        } else {
            // The other side's frame was not seen, or not yet: markers are found out.
            let mut trial = Trial::new(None);
            trial.at_origin = true;
            State::Trial(trial)
        };
        true
    }

    /// Follows FPDUs in the backlog.
    fn follow(&mut self, side: usize, out: &mut Out) -> bool {
        let crc_in_use = self.crc_in_use();
        loop {
            let half = &mut self.halves[side];
            let State::Fpdus(fpdus) = &mut half.state else {
                return true;
            };
            if half.backlog.len() < fpdus.need.max(1) {
                return false;
            }
            let (len, fpdu, doubt) =
                match fpdus.next(half.backlog.octets(), half.backlog.pos, crc_in_use) {
                    Step::Need => {
                        if let Some(odd) = fpdus.odd.take() {
                            let number = half.latest;
                            self.tell(side, number, oddity(odd), out);
                        }
                        return false;
                    }
                    Step::Took(len, fpdu) => (len, Some(fpdu), false),
                    Step::Doubt(len, fpdu) => (len, fpdu, true),
                };
            if let Some(fpdu) = fpdu {
                half.crcs.add(fpdu.crc);
                let number = half.backlog.number_at(len - 1);
                self.tell(side, number, Iwarp::Fpdu(fpdu), out);
            }
            if doubt {
                self.doubt(side, len);
            }
            self.halves[side].backlog.advance(len);
        }
    }

    /// Looks for an FPDU in the backlog. What precedes it goes, and so does what is none; less than
    /// an FPDU is kept.
    fn scan(&mut self, side: usize) -> bool {
        let grid = self.grid(side);
        let half = &mut self.halves[side];
        let Some((framing, place)) = grid else {
            half.state = State::Search;
            return true;
        };
        let (start, octets) = (half.backlog.pos, half.backlog.octets());
        let mut arrivals = half.backlog.arrivals().peekable();
        let mut at = 0;
        while octets.len() >= at + SCAN_PEEK {
            let (pos, input) = (start + at as u64, &octets[at..]);
            let to_grid = (place.wrapping_sub(pos) % ALIGNMENT) as usize;
            let segment = arrivals.peek() == Some(&(pos, true));
            let distance = match to_grid {
                0 => next_place(framing, pos, input),
                _ if segment && may_begin(Some(framing), pos, input) => 0,
                _ => to_grid,
            };
            if distance == 0 {
                drop(arrivals);
                half.backlog.advance(at);
                let mut trial = Trial::new(Some(framing));
                trial.scanned = !segment;
                half.state = State::Trial(trial);
                return true;
            }
            at += distance;
            // A segment off the grid may be another connection's, between the same ends.
            let next = start + at as u64;
            while let Some(&(begin, segment)) = arrivals.peek()
                && begin < next
            {
                if segment && begin > pos {
                    at = (begin - start) as usize;
                    break;
                }
                arrivals.next();
            }
        }
        drop(arrivals);
        // The next place may lie behind what is there.
        let len = half.backlog.len();
        half.backlog.advance(at.min(len));
        false
    }

    /// Goes on with a trial.
    fn try_on(&mut self, side: usize, out: &mut Out) -> bool {
        let (known, crc_in_use) = (self.known, self.crc_in_use());
        let half = &mut self.halves[side];
        let State::Trial(trial) = &mut half.state else {
            return true;
        };
        // RFC 5044 §7.1.1: without CRC the field may hold anything. Where markers are a guess too,
        // that is too little, unless the first FPDU's place is known.
        let any_crc = crc_in_use == Some(false) && !trial.guess
            || trial.at_origin && crc_in_use != Some(true);
        while !trial.is_proven(known) {
            let input = &half.backlog.octets()[trial.at..];
            if input.len() < trial.need.max(1) {
                return false;
            }
            let pos = half.backlog.pos + trial.at as u64;
            let step = match View::new(trial.framing, pos, input) {
                _ if input.len() < HEADER_PEEK => Err(HEADER_PEEK),
                // Four octets of zero are a marker, or nothing.
                _ if trial.guess && input.len() < 2 * MARKER_LEN && is_marker(input, 0, 0) => {
                    Err(2 * MARKER_LEN)
                }
                Err(need) => Err(need),
                Ok(view) if !view.is_plausible() => Ok(None),
                Ok(view) if view.is_whole() => Ok(Some(view)),
                Ok(view) => Err(view.total),
            };
            let view = match step {
                Ok(view) => view,
                Err(need) => {
                    trial.need = need;
                    return false;
                }
            };
            // What is beyond the credit is not looked into.
            let affordable = view.filter(|view| half.credit >= view.total as u64);
            if let Some(view) = affordable {
                half.credit -= view.total as u64;
                let fpdu = view.read(crc_in_use);
                let believed = match fpdu.crc {
                    CrcState::Good => true,
                    CrcState::Zero => half.crcs.may_be_zero(crc_in_use),
                    CrcState::Bad => any_crc && half.crcs.may_be_bad(),
                };
                if believed {
                    trial.found.push(Found {
                        begin: trial.at,
                        number: half.backlog.number_at(trial.at + view.total - 1),
                        crc: fpdu.crc,
                        fpdu: Some(fpdu),
                    });
                    trial.framing = trial.framing.after(view.total);
                    trial.at += view.total;
                    trial.need = 0;
                    continue;
                }
            }
            // It is none so: is it one with a marker in it?
            if !trial.guess || !trial.next_guess(&half.backlog, half.off_grid) {
                self.resume(side);
                return true;
            }
        }
        self.accept(side, out);
        true
    }

    /// What the trial found is true.
    fn accept(&mut self, side: usize, out: &mut Out) {
        let half = &mut self.halves[side];
        let State::Trial(trial) = core::mem::replace(&mut half.state, State::Search) else {
            return;
        };
        let mut fpdus = Fpdus {
            framing: trial.framing,
            sure: !trial.guess || trial.framing != Framing::Plain,
            finished: trial.at_origin.then_some(trial.found.len() as u64),
            run: trial.at as u64,
            need: 0,
            odd: None,
        };
        fpdus.make_sure();
        half.state = State::Fpdus(fpdus);
        half.place = Some(half.backlog.pos);
        half.backlog.advance(trial.at);
        if !self.known {
            self.known = true;
            self.news = true;
        }
        for found in trial.found {
            self.halves[side].crcs.add(found.crc);
            if let Some(fpdu) = found.fpdu {
                self.tell(side, found.number, Iwarp::Fpdu(fpdu), out);
            }
        }
    }

    /// The backlog's front is nothing: looks at what is behind it.
    fn resume(&mut self, side: usize) {
        if self.grid(side).is_some() {
            let half = &mut self.halves[side];
            half.state = State::Scan;
            half.backlog.advance(half.backlog.len().min(1));
            return;
        }
        self.halves[side].state = if self.foreign { State::Foreign } else { State::Search };
        // The backlog is put aside, for `look` to change the rest.
        let mut backlog = core::mem::take(&mut self.halves[side].backlog);
        while backlog.skip_to_segment() {
            if self.look(side, backlog.pos, false, backlog.octets()) {
                break;
            }
        }
        self.halves[side].backlog = backlog;
    }

    /// Nothing comes right behind the latest octets, perhaps nothing at all: what is open is decided.
    pub(super) fn stop(&mut self, side: usize, out: &mut Out) {
        while let State::Trial(trial) = &self.halves[side].state {
            if self.known && trial.will_do(self.halves[side].backlog.len()) {
                self.accept(side, out);
            } else if self.grid(side).is_some() {
                // It hides what is behind it.
                self.resume(side);
            } else {
                break;
            }
            self.run(side, out);
        }
        let half = &mut self.halves[side];
        half.backlog.clear();
        half.remember();
        if let State::Fpdus(Fpdus { framing: Framing::OffGrid(_), .. }) = half.state {
            half.off_grid = true;
        }
        if self.is_ordered(side) {
            self.halves[side].state = self.searching(side);
        }
        self.settle(1 - side, out);
    }
}

/// What can be said about the next FPDU.
enum Step {
    /// Not enough: [`Fpdus::need`] says how much is needed.
    Need,
    /// It took so many octets.
    Took(usize, Fpdu),
    /// So many octets are behind us, perhaps an FPDU. What follows must be proven.
    Doubt(usize, Option<Fpdu>),
}

impl Fpdus {
    /// At the first octet after a start-up frame.
    fn behind_start(declared: Option<Framing>) -> Self {
        let framing = declared.unwrap_or(Framing::Plain);
        Self { framing, sure: declared.is_some(), finished: Some(0), run: 0, need: 0, odd: None }
    }

    /// A stretch without markers that is longer than their distance: there are none.
    const fn make_sure(&mut self) {
        self.sure |= self.run >= (MARKER_SPACING + MARKER_LEN) as u64;
    }

    /// The FPDU at the front of `input`, which is not empty and at `pos`.
    #[inline]
    fn next(&mut self, input: &[u8], pos: u64, crc_in_use: Option<bool>) -> Step {
        let mut view = View::new(self.framing, pos, input);
        if let (Framing::Grid(origin), Some(finished)) = (self.framing, self.finished)
            && view.as_ref().is_ok_and(|view| !view.is_plausible())
        {
            let count = pos.wrapping_sub(origin).wrapping_sub(finished * CRC_LEN as u64);
            let other = Framing::OffGrid(count);
            match View::new(other, pos, input) {
                Ok(found) if !found.is_plausible() => {}
                Ok(found) if !found.is_whole() => {
                    self.need = found.total;
                    return Step::Need;
                }
                Ok(found) if found.markers().next().is_some() || !found.crc_is_bad() => {
                    self.framing = other;
                    view = Ok(found);
                }
                Ok(_) => {}
                Err(need) => {
                    self.need = need;
                    return Step::Need;
                }
            }
        }
        let view = match view {
            Ok(view) => view,
            Err(need) => {
                self.need = need;
                return Step::Need;
            }
        };
        let plausible = view.is_plausible();
        if !self.sure && !plausible {
            return Step::Doubt(0, None);
        }
        if !view.is_whole() {
            if !plausible && self.need != view.total {
                self.odd = Some(view.ulpdu_len);
            }
            self.need = view.total;
            return Step::Need;
        }
        let fpdu = view.read(crc_in_use);
        let bad = fpdu.crc == CrcState::Bad;
        if !self.sure && bad {
            return Step::Doubt(0, None);
        }
        let (total, header) = (view.total, view.has_header());
        self.framing = self.framing.after(total);
        self.finished = self.finished.map(|finished| finished + 1);
        self.run = self.run.saturating_add(total as u64);
        self.need = 0;
        self.make_sure();
        // A header that is none is told. Whether its length is one, what follows shows.
        let believed = match fpdu.crc {
            CrcState::Good => true,
            CrcState::Zero => fpdu.header.is_some() && crc_in_use != Some(true),
            CrcState::Bad => false,
        };
        if !believed && !header {
            return Step::Doubt(total, Some(fpdu));
        }
        Step::Took(total, fpdu)
    }
}

impl Trial {
    /// The framing does not hold. Tries the next place where a marker may be; false if there is
    /// none left.
    fn next_guess(&mut self, backlog: &Backlog, off_grid: bool) -> bool {
        let others = self.others.get_or_insert_with(|| {
            let begins = self.found.iter().map(|found| found.begin).chain([self.at]);
            let mut others = SmallVec::new();
            for (kept, begin) in begins.enumerate() {
                let pos = backlog.pos + begin as u64;
                find_markers(&backlog.octets()[begin..], off_grid, |at, wrong| {
                    let framing = if wrong {
                        Framing::OffGrid((at as u64).wrapping_neg())
                    } else {
                        Framing::Grid(pos + at as u64)
                    };
                    others.push((kept, framing));
                    others.len() < MAX_ALTERNATIVES
                });
            }
            others
        });
        // What went wrong is more likely near the end.
        let Some((kept, framing)) = others.pop() else {
            return false;
        };
        if let Some(first) = self.found.get(kept) {
            self.at = first.begin;
        }
        self.found.truncate(kept);
        self.framing = framing;
        self.need = 0;
        true
    }
}

/// How far it is from `pos` to the next place where an FPDU may begin, or where more can be said: 0
/// if one may begin here. There are at least [`SCAN_PEEK`] octets of `input`.
#[inline]
fn next_place(framing: Framing, pos: u64, input: &[u8]) -> usize {
    let mut control = LENGTH_LEN;
    if let Some(to_marker) = framing.to_marker(pos) {
        if to_marker == 0 {
            control += MARKER_LEN;
        } else if to_marker == MARKER_SPACING - MARKER_LEN {
            // A marker belongs to the FPDU behind it, which begins with it.
            return MARKER_LEN;
        } else if let Some(&[_, _, high, low]) =
            input.get(to_marker..).and_then(<[u8]>::first_chunk)
            && to_marker < usize::from(u16::from_be_bytes([high, low]) & !3)
        {
            // The FPDU around the marker began before.
            return to_marker;
        }
    }
    let begins = is_control(input[control])
        && View::new(framing, pos, input).is_ok_and(|view| view.is_plausible());
    if begins { 0 } else { ALIGNMENT as usize }
}

/// Calls `found` for each place at the front of `input`, where an FPDU or the marker in front of
/// it begins, that holds what a marker would hold there; with `off_grid` also in little-endian
/// order (true). Ends where `found` says false.
fn find_markers(input: &[u8], off_grid: bool, mut found: impl FnMut(usize, bool) -> bool) {
    let reach = match input.first_chunk() {
        // A marker in front of the FPDU says 0.
        Some(&[0, 0, 0, 0]) => MARKER_LEN,
        Some(&[a, b, ..]) => {
            (fpdu_len(usize::from(u16::from_be_bytes([a, b]))) + 1).min(MARKER_SPACING)
        }
        None => return,
    };
    for at in (0..reach.min(input.len())).step_by(MARKER_LEN) {
        let right = is_marker(input, at, at);
        let wrong = off_grid && at > 0 && is_marker(input, at, (at as u16).swap_bytes().into());
        if (right || wrong) && !found(at, !right || off_grid) {
            return;
        }
    }
}

/// Whether there is a marker at `at` whose FPDUPTR is `pointer`, and whose reserved half is zero.
fn is_marker(input: &[u8], at: usize, pointer: usize) -> bool {
    input.get(at..at + MARKER_LEN).is_some_and(|octets| octets == (pointer as u32).to_be_bytes())
}

/// Whether `octets` begin a start-up frame's key, or are the beginning of one.
fn begins_key(octets: &[u8]) -> bool {
    let len = octets.len().min(KEY_REQUEST.len());
    octets[..len] == KEY_REQUEST[..len] || octets[..len] == KEY_REPLY[..len]
}

/// Octets that cannot be a good FPDU, and are not all there: as long as they are waited for, nothing
/// else is told of the stream.
fn oddity(ulpdu_len: usize) -> Iwarp {
    Iwarp::Error(format!(
        "MPA: an FPDU of {ulpdu_len} octets is due, whose headers are wrong: nothing is told before it \
         is whole"
    ))
}

/// Whether an FPDU may begin at `pos` with these octets; `None`: whatever the markers.
fn may_begin(framing: Option<Framing>, pos: u64, octets: &[u8]) -> bool {
    let plausible = |framing: Framing| {
        // FPDUs and the distance of markers are multiples of 4 octets.
        framing.to_marker(pos).is_none_or(|distance| distance.is_multiple_of(MARKER_LEN))
            && View::new(framing, pos, octets).is_ok_and(|view| view.is_plausible())
    };
    match framing {
        Some(framing) => plausible(framing),
        None => {
            // A marker in front of the header, or where QN would be.
            let marked =
                |at| is_marker(octets, at, at) && plausible(Framing::Grid(pos + at as u64));
            plausible(Framing::Plain)
                || octets.len() >= 2 * MARKER_LEN && [0, 4, 8].into_iter().any(marked)
        }
    }
}

/// A start-up frame with all that it holds.
fn to_owned(start: &mpa::Start<'_>) -> Start {
    Start {
        kind: start.kind,
        flags: start.flags,
        revision: start.revision,
        enhanced: start.enhanced,
        // Revision 2 has its own place for them.
        legacy_ird_ord: if start.revision < 2 {
            mpa::legacy_ird_ord(start.private_data)
        } else {
            None
        },
        private_data: start.private_data.to_vec(),
    }
}

#[cfg(test)]
mod tests {
    use super::{
        super::tcp::tests::{
            CLIENT, Capture, NONE, SERVER, Sent, Talk, describe, frame, mixed, send, start, write,
        },
        *,
    };
    use crate::{
        dissect::{
            Markers, Operation,
            tcp::{ACK, FIN, SYN},
        },
        wire::{
            ids::{Msn, Stag},
            iwarp::{
                ddp::UntaggedHeader,
                fpdu,
                mpa::Enhanced,
                rdmap::{AtomicRequest, Opcode, ReadRequest},
            },
        },
    };
    use hex_literal::hex;
    use proptest::prelude::*;
    use std::{string::String, vec, vec::Vec};
    use zerocopy::IntoBytes;

    const MARKERS: StartFlags = StartFlags::MARKERS;
    const CRC: StartFlags = StartFlags::CRC;

    /// A connection under way: each element of `fpdus` a segment.
    fn under_way(segments: &[Vec<u8>]) -> Vec<Sent> {
        let mut talk = Talk::under_way();
        segments.iter().for_each(|octets| talk.push(CLIENT, ACK, octets));
        talk.sent
    }

    /// The stream of these ULPDUs, an FPDU at a time.
    fn one_by_one(ulpdus: &[Vec<u8>], markers: bool, crc: bool) -> Vec<Vec<u8>> {
        let mut done = 0;
        let piece = |i: usize| {
            let all = frame(&ulpdus[..=i], markers, crc);
            let piece = all[done..].to_vec();
            done = all.len();
            piece
        };
        (0..ulpdus.len()).map(piece).collect()
    }

    fn fpdu_at(capture: &Capture, at: usize) -> &Fpdu {
        let mut fpdus = capture.told.iter().filter_map(|(_, what)| match what {
            Iwarp::Fpdu(fpdu) => Some(fpdu),
            _ => None,
        });
        fpdus.nth(at).expect("so many FPDUs")
    }

    fn untagged(op: Opcode, qn: u32, payload: &[u8]) -> Vec<u8> {
        let header = UntaggedHeader::new(op, true, qn, Msn(1), 0, Stag(0));
        [header.as_bytes(), payload].concat()
    }

    #[test]
    fn start_up_frames_in_full() {
        let mut talk = Talk::open(5, 6);
        let mut request = Vec::new();
        let enhanced = Enhanced { ird: 3, ord: 4, peer_to_peer: true, ..Enhanced::default() };
        mpa::Start {
            kind: StartKind::Request,
            flags: CRC | MARKERS | StartFlags::ENHANCED,
            revision: 2,
            enhanced: Some(enhanced),
            private_data: b"private",
        }
        .emit(&mut request);
        // Octet by octet.
        talk.send(CLIENT, &request, 1);
        let mut reply = Vec::new();
        let legacy = hex!("00000010 00000020");
        mpa::Start {
            kind: StartKind::Reply,
            flags: NONE,
            revision: 1,
            enhanced: None,
            private_data: &legacy,
        }
        .emit(&mut reply);
        talk.push(SERVER, ACK, &reply);
        let capture = Capture::of(&talk.sent);
        let [(at, Iwarp::Start(first)), (_, Iwarp::Start(second))] = &capture.told[..] else {
            panic!("{:?}", capture.told)
        };
        assert_eq!(*at, 3 + request.len() as u64);
        assert_eq!(
            **first,
            Start {
                kind: StartKind::Request,
                flags: CRC | MARKERS | StartFlags::ENHANCED,
                revision: 2,
                enhanced: Some(enhanced),
                legacy_ird_ord: None,
                private_data: b"private".to_vec(),
            }
        );
        assert_eq!(second.legacy_ird_ord, Some((16, 32)));
        assert_eq!(second.private_data, legacy);
    }

    #[test]
    fn markers_go_where_the_receiver_asked_for_them() {
        let mut talk = Talk::started(MARKERS, CRC);
        // The reply did not ask, the request did.
        talk.send(CLIENT, &frame(&mixed(30, |i| i * 20), false, true), 1000);
        talk.send(SERVER, &frame(&mixed(30, |i| i * 20), true, true), 1000);
        let capture = Capture::of(&talk.sent);
        assert_eq!(capture.fpdus().len(), 60);
        for i in 0..60 {
            let fpdu = fpdu_at(&capture, i);
            let markers = if i < 30 { Markers::None } else { Markers::Right };
            assert_eq!(
                (fpdu.markers, fpdu.crc, fpdu.crc_in_use),
                (markers, CrcState::Good, Some(true))
            );
            assert_eq!(fpdu.error, None);
        }
    }

    #[test]
    fn a_bad_crc_does_not_end_the_stream() {
        for (flags, in_use) in [(CRC, true), (NONE, false)] {
            let mut talk = Talk::started(NONE, flags);
            let mut octets = frame(&[write(1, 8), write(2, 8), write(3, 8)], false, true);
            let len = octets.len();
            octets[len / 3 - 2] ^= 1;
            talk.push(CLIENT, ACK, &octets);
            let capture = Capture::of(&talk.sent);
            let crcs: Vec<_> = (0..3).map(|i| fpdu_at(&capture, i).crc).collect();
            assert_eq!(crcs, [CrcState::Bad, CrcState::Good, CrcState::Good]);
            assert_eq!(fpdu_at(&capture, 0).crc_in_use, Some(in_use));
        }
    }

    #[test]
    fn operations() {
        let mut talk = Talk::started(NONE, NONE);
        let read = ReadRequest::new((Stag(1), 2), 3, (Stag(4), 5));
        let mut atomic = [0; AtomicRequest::LEN];
        atomic[3] = 2;
        atomic[7] = 9;
        let terminate = hex!("11000300 0064 c140 12345678 0000000000000000");
        let ulpdus = [
            untagged(Opcode::READ_REQUEST, 1, read.as_bytes()),
            untagged(Opcode::IMMEDIATE, 0, &hex!("0102030405060708")),
            untagged(Opcode::ATOMIC_REQUEST, 1, &atomic),
            untagged(Opcode::ATOMIC_RESPONSE, 3, &hex!("00000009 00000000000000ff")),
            untagged(Opcode::TERMINATE, 2, &terminate),
        ];
        talk.push(CLIENT, ACK, &frame(&ulpdus, false, false));
        let capture = Capture::of(&talk.sent);
        for (i, ulpdu) in ulpdus.iter().enumerate() {
            let fpdu = fpdu_at(&capture, i);
            assert_eq!(fpdu.error, None, "{i}");
            assert_eq!(usize::from(fpdu.payload_len), ulpdu.len() - 18);
        }
        let operation = |i| &fpdu_at(&capture, i).operation;
        let Operation::ReadRequest(found) = operation(0) else { panic!("{:?}", operation(0)) };
        assert_eq!(*found, read);
        let Operation::Immediate(found) = operation(1) else { panic!("{:?}", operation(1)) };
        assert_eq!(*found, 0x0102_0304_0506_0708);
        let Operation::AtomicRequest(found) = operation(2) else { panic!("{:?}", operation(2)) };
        assert_eq!(found.request_id, 9);
        let Operation::AtomicResponse(_) = operation(3) else { panic!("{:?}", operation(3)) };
        let Operation::Terminate(found, octets) = operation(4) else {
            panic!("{:?}", operation(4))
        };
        assert_eq!((octets, found.swapped), (&terminate.to_vec(), true));
    }

    #[test]
    fn operations_across_a_marker() {
        let read = ReadRequest::new((Stag(1), 2), 3, (Stag(4), 5));
        let terminate = hex!("12000000");
        // The marker meets each place of the two.
        for pad in (430..480).step_by(4) {
            let mut talk = Talk::started(NONE, MARKERS);
            let ulpdus = [
                write(1, pad - 20),
                untagged(Opcode::READ_REQUEST, 1, read.as_bytes()),
                untagged(Opcode::TERMINATE, 2, &terminate),
            ];
            talk.push(CLIENT, ACK, &frame(&ulpdus, true, false));
            let capture = Capture::of(&talk.sent);
            let Operation::ReadRequest(found) = fpdu_at(&capture, 1).operation else {
                panic!("{:?}", fpdu_at(&capture, 1))
            };
            assert_eq!(found, read);
            let Operation::Terminate(_, octets) = &fpdu_at(&capture, 2).operation else {
                panic!("{:?}", fpdu_at(&capture, 2))
            };
            assert_eq!(octets[..], terminate);
        }
    }

    #[test]
    fn what_is_wrong_with_an_fpdu_is_said_and_the_stream_goes_on() {
        let mut talk = Talk::started(NONE, NONE);
        let mut version = write(1, 4);
        version[0] = 0xc2;
        let mut rdmap = write(1, 4);
        rdmap[1] = 0x80;
        let ulpdus = [
            version,
            rdmap,
            untagged(Opcode(13), 0, b""),
            untagged(Opcode::SEND, 5, b""),
            untagged(Opcode::WRITE, 0, b""),
            [&[0xc1, 0x43][..], &[0; 12]].concat(),
            untagged(Opcode::READ_REQUEST, 1, &[0; 10]),
            untagged(Opcode::IMMEDIATE, 0, &[0; 3]),
            untagged(Opcode::TERMINATE, 2, &[0; 2]),
            vec![0x41, 0x43, 0],
            write(7, 1),
            write(8, 1),
            vec![],
            write(9, 1),
        ];
        talk.push(CLIENT, ACK, &frame(&ulpdus, false, false));
        let capture = Capture::whole(&talk.sent);
        let errors: Vec<_> =
            (0..ulpdus.len()).map(|i| fpdu_at(&capture, i).error.as_deref()).collect();
        assert_eq!(
            errors,
            [
                Some("DDP: version is 2, expected 1"),
                Some("RDMAP: version is 2, expected 1"),
                Some("RDMAP: opcode 0xd is not known"),
                Some("RDMAP: SEND on queue 5"),
                Some("RDMAP: WRITE in an untagged segment"),
                Some("RDMAP: SEND in a tagged segment"),
                Some("RDMAP: at offset 0: 28 octets needed, 10 found"),
                Some("RDMAP: at offset 0: 8 octets needed, 3 found"),
                Some("RDMAP: at offset 0: 4 octets needed, 2 found"),
                Some("DDP: at offset 0: 18 octets needed, 3 found"),
                None,
                None,
                Some("DDP: at offset 0: 14 octets needed, 0 found"),
                None,
            ]
        );
        assert!(fpdu_at(&capture, 9).header.is_none());
    }

    #[test]
    fn framing_that_is_lost_is_found_again() {
        let mut talk = Talk::started(CRC, CRC);
        talk.push(CLIENT, ACK, &frame(&[write(1, 8)], false, true));
        // 100 octets of something else, then good ones at the next segment.
        talk.push(CLIENT, ACK, &[0x5a; 100]);
        talk.push(CLIENT, ACK, &frame(&[write(2, 30_000)], false, true)[..20_000]);
        talk.push(CLIENT, ACK, &[0; 4000]);
        for i in 3..6 {
            talk.push(CLIENT, ACK, &frame(&[write(i, 8)], false, true));
        }
        let capture = Capture::whole(&talk.sent);
        let last: Vec<String> = capture.described().split_off(capture.told.len() - 3);
        assert_eq!(last, ["10: WRITE 0x3 8 Good", "11: WRITE 0x4 8 Good", "12: WRITE 0x5 8 Good"]);
    }

    #[test]
    fn a_refusal_ends_it() {
        let mut talk = Talk::started(NONE, StartFlags::REJECT);
        talk.push(CLIENT, ACK, &frame(&mixed(5, |_| 50), false, true));
        talk.push(SERVER, ACK, &start(StartKind::Reply, NONE));
        talk.push(SERVER, ACK | FIN, &[]);
        let capture = Capture::whole(&talk.sent);
        assert_eq!(capture.described(), ["4: Request", "5: Reply"]);
    }

    #[test]
    fn a_start_up_frame_that_is_none_is_told() {
        let mut talk = Talk::open(1, 2);
        let mut frame_ = KEY_REQUEST.to_vec();
        frame_.extend(hex!("00 01 0201"));
        talk.send(CLIENT, &frame_, 17);
        let capture = Capture::of(&talk.sent);
        assert_eq!(
            capture.described(),
            [
                "5: error: MPA start-up frame: at offset 18: PD_Length is 0x201, expected at most 512"
            ]
        );
    }

    #[test]
    fn a_key_in_the_middle_of_a_stream() {
        // As where a login precedes it.
        let mut talk = Talk::open(1, 2);
        talk.push(CLIENT, ACK, b"LOGIN me\r\n");
        talk.push(SERVER, ACK, b"WELCOME\r\n");
        talk.push(CLIENT, ACK, &start(StartKind::Request, NONE));
        talk.push(SERVER, ACK, &start(StartKind::Reply, NONE));
        talk.push(CLIENT, ACK, &frame(&[write(1, 8)], false, false));
        let capture = Capture::of(&talk.sent);
        assert_eq!(capture.described(), ["6: Request", "7: Reply", "8: WRITE 0x1 8 Zero"]);
        assert_eq!(capture.waited, 0);
    }

    #[test]
    fn one_start_up_frame_is_missing() {
        for (lost, request, reply) in [
            (3, NONE, MARKERS),
            (4, NONE, MARKERS),
            (3, MARKERS, NONE),
            (4, MARKERS, NONE),
            (3, NONE, NONE),
            (4, CRC | MARKERS, CRC | MARKERS),
        ] {
            let mut talk = Talk::started(request, reply);
            let crc = request.contains(CRC);
            for (side, asked) in [(CLIENT, reply), (SERVER, request)] {
                let markers = asked.contains(MARKERS);
                for octets in one_by_one(&mixed(20, |i| i * 31), markers, crc) {
                    talk.push(side, ACK, &octets);
                }
            }
            talk.sent.remove(lost);
            let capture = Capture::whole(&talk.sent);
            let case = format!("without {lost}, {request:?}, {reply:?}");
            assert_eq!(capture.fpdus().len(), 40, "{case}: {:#?}", capture.described());
            for i in 0..40 {
                let fpdu = fpdu_at(&capture, i);
                assert_eq!(fpdu.error, None, "{case} {i}");
                assert_eq!(fpdu.crc_in_use, crc.then_some(true), "{case} {i}");
            }
        }
    }

    #[test]
    fn three_fpdus_prove_each_other_or_two_with_a_good_crc() {
        for (crc, need) in [(false, 3), (true, 2)] {
            let segments = one_by_one(&mixed(5, |i| i * 10), false, crc);
            let mut capture = Capture::new();
            for (i, sent) in under_way(&segments).iter().enumerate() {
                capture.take(sent);
                let n = i + 1;
                assert_eq!(capture.told.len(), if n < need { 0 } else { n }, "{n} of {need}");
                let waits = (n < need).then_some(1);
                assert_eq!(capture.streams.oldest_undecided(), waits);
            }
            // Each at its own frame.
            let numbers: Vec<u64> = capture.told.iter().map(|(number, _)| *number).collect();
            assert_eq!(numbers, [1, 2, 3, 4, 5]);
            assert_eq!(fpdu_at(&capture, 0).crc_in_use, None);
        }
    }

    #[test]
    fn what_one_side_proves_helps_the_other() {
        let mut talk = Talk::under_way();
        let segments = one_by_one(&mixed(3, |i| i * 10), false, false);
        talk.push(SERVER, ACK, &frame(&[send(1, 4)], false, true));
        segments.iter().for_each(|octets| talk.push(CLIENT, ACK, octets));
        let capture = Capture::of(&talk.sent);
        let mut numbers: Vec<u64> = capture.told.iter().map(|(number, _)| *number).collect();
        numbers.sort_unstable();
        assert_eq!(numbers, [1, 2, 3, 4]);
    }

    #[test]
    fn two_fpdus_without_crc_are_no_proof() {
        let segments = one_by_one(&mixed(2, |i| i * 10), false, false);
        assert_eq!(Capture::whole(&under_way(&segments)).told.len(), 0);
        // Nor are three, if one has a bad CRC.
        let mut segments = one_by_one(&mixed(3, |i| i * 10), false, true);
        segments[1][10] ^= 1;
        assert_eq!(Capture::whole(&under_way(&segments[..2])).told.len(), 0);
        // In a known connection one at the end is.
        let mut talk = Talk::started(NONE, NONE);
        talk.push(CLIENT, ACK, &frame(&[write(1, 4)], false, false));
        talk.push(CLIENT, ACK, &frame(&[write(2, 4)], false, false));
        talk.sent.remove(5);
        let capture = Capture::whole(&talk.sent);
        assert_eq!(capture.fpdus().len(), 1);
    }

    #[test]
    fn a_verdict_may_be_forced() {
        let segments = one_by_one(&mixed(6, |i| i * 10), false, false);
        let sent = under_way(&segments);
        let mut capture = Capture::of(&sent[..2]);
        capture.decide(1);
        assert_eq!(capture.streams.oldest_undecided(), Some(2));
        capture.decide(2);
        assert_eq!(capture.streams.oldest_undecided(), None);
        // What was judged is gone, and still is evidence.
        capture.take(&sent[2]);
        let numbers: Vec<u64> = capture.told.iter().map(|(number, _)| *number).collect();
        assert_eq!(numbers, [3]);
    }

    #[test]
    fn fpdus_that_span_segments_are_found_too() {
        let octets = frame(&mixed(4, |_| 5000), false, false);
        let mut talk = Talk::under_way();
        talk.send(CLIENT, &octets, 1460);
        let numbers: Vec<u64> =
            Capture::of(&talk.sent).told.iter().map(|(number, _)| *number).collect();
        assert_eq!(numbers, [4, 7, 11, 14]);
    }

    #[test]
    fn markers_after_small_fpdus() {
        let lens = [121, 1185, 129, 489, 0, 0, 1061, 433];
        let segments = one_by_one(&mixed(8, |i| lens[i - 1]), true, true);
        let capture = Capture::whole(&under_way(&segments[4..]));
        assert_eq!(capture.fpdus().len(), 4, "{:?}", capture.described());
    }

    #[test]
    fn after_a_gap_the_stream_is_found_again_at_a_segment() {
        for markers in [false, true] {
            for crc in [false, true] {
                let mut talk = Talk::started(
                    if crc { CRC } else { NONE },
                    if markers { MARKERS } else { NONE },
                );
                // Two FPDUs a segment, so that markers lie anywhere.
                let segments = one_by_one(&mixed(60, |i| i * 13), markers, crc);
                for two in segments.chunks(2) {
                    talk.push(CLIENT, ACK, &two.concat());
                }
                talk.push(SERVER, ACK, &[]);
                talk.sent.drain(10..12);
                talk.sent.drain(20..23);
                let capture = Capture::whole(&talk.sent);
                let fpdus = capture.fpdus();
                assert_eq!(fpdus.len(), 50, "markers {markers}, CRC {crc}");
                assert!(fpdus.iter().all(|(_, words)| words.ends_with(if crc {
                    "Good"
                } else {
                    "Zero"
                })));
                let errors = capture.told.iter().filter(|t| matches!(t.1, Iwarp::Error(_)));
                assert_eq!(errors.count(), 2);
            }
        }
    }

    /// Octets that look like FPDUs, each with a CRC of `crc`.
    fn feigned(n: usize, lens: &[usize], crc: [u8; CRC_LEN]) -> Vec<u8> {
        let mut out = Vec::new();
        for i in 0..n {
            // No FPDU that is sent has such a place.
            let ulpdu = write(0xfe16_0000 + i as u64, lens[i % lens.len()]);
            let begin = out.len();
            out.extend(frame(&[ulpdu], false, false));
            let end = out.len() - CRC_LEN;
            // The right one, by chance, would be no pretence.
            assert_ne!(crate::wire::crc::crc32c(&out[begin..end]).to_le_bytes(), crc);
            out[end..].copy_from_slice(&crc);
        }
        out
    }

    /// A WRITE of these octets.
    fn write_of(n: u64, octets: &[u8]) -> Vec<u8> {
        let mut ulpdu = write(n, octets.len());
        let header = ulpdu.len() - octets.len();
        ulpdu[header..].copy_from_slice(octets);
        ulpdu
    }

    /// Sends these ULPDUs packed, loses `lose` segments at each place in turn, and compares what is
    /// told with what was sent: all that precedes what is lost, and all that begins behind it.
    fn lose_each(ulpdus: &[Vec<u8>], markers: bool, crc: bool, mss: usize, lose: usize) {
        let flags = if crc { CRC } else { NONE };
        let mut talk = Talk::started(flags, if markers { MARKERS } else { NONE });
        let opening = talk.sent.len();
        talk.send(CLIENT, &frame(ulpdus, markers, crc), mss);
        let segments = talk.sent.len() - opening;
        talk.push(SERVER, ACK, &[]);
        let mut ends = vec![0];
        let mut encoder = fpdu::MarkerEncoder::new(crc);
        for ulpdu in ulpdus {
            let mut one = frame(core::slice::from_ref(ulpdu), false, crc);
            if markers {
                let mut marked = Vec::new();
                encoder.push(&one, &mut marked);
                one = marked;
            }
            ends.push(ends.last().unwrap_or(&0) + one.len());
        }
        let sent = Capture::whole(&talk.sent).fpdus();
        assert_eq!(sent.len(), ulpdus.len());
        for lost in opening..opening + segments {
            let mut some = talk.sent.clone();
            let behind = (lost + lose).min(opening + segments);
            some.drain(lost..behind);
            let gone = (behind - lost) as u64;
            let told = Capture::whole(&some).fpdus();
            // Those that were whole before the gap, and those that began behind it.
            let gap = [lost, behind].map(|at| (at - opening) * mss);
            let parts = ends.windows(2).zip(&sent);
            let before = parts.clone().filter(|(ends, _)| ends[1] <= gap[0]);
            let after = parts.filter(|(ends, _)| ends[0] >= gap[1]);
            let after = after.map(|(_, (number, words))| (number - gone, words.clone()));
            let want: Vec<_> = before.map(|(_, told)| told.clone()).chain(after).collect();
            let case = format!("markers {markers}, CRC {crc}, {mss} octets each, without {lost}");
            assert_eq!(told, want, "{case}");
        }
    }

    #[test]
    fn after_a_gap_packed_fpdus_are_found_again() {
        // Payload is random: neighbours that look like FPDUs by chance are no matter.
        let mut state = 1_u64;
        let mut random = move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 56) as u8
        };
        for lens in [&[0, 1, 2, 3][..], &[40], &[500, 7], &[1400, 20, 300], &[9000, 3], &[65_000]] {
            let n = (60_000 / lens.iter().sum::<usize>()).clamp(6, 60) * lens.len();
            let fill =
                |i: usize| -> Vec<u8> { (0..lens[i % lens.len()]).map(|_| random()).collect() };
            let payloads: Vec<Vec<u8>> = (0..n.min(120)).map(fill).collect();
            let ulpdus: Vec<_> = (1..).zip(&payloads).map(|(n, p)| write_of(n, p)).collect();
            let whole = frame(&ulpdus, false, false).len();
            for mss in [100, 531, 1448, 65_483] {
                if whole / mss > 150 || whole < 3 * mss {
                    continue;
                }
                for (markers, crc) in [(false, true), (false, false), (true, true), (true, false)] {
                    lose_each(&ulpdus, markers, crc, mss, 1);
                    lose_each(&ulpdus, markers, crc, mss, 3);
                }
            }
        }
    }

    #[test]
    fn after_a_gap_without_a_start_up_frame() {
        // Its framing is known from what was followed.
        for markers in [false, true] {
            let ulpdus = mixed(200, |i| 50 + i % 30);
            let octets = frame(&ulpdus, markers, true);
            let mut talk = Talk::under_way();
            talk.send(CLIENT, &octets, 733);
            talk.push(SERVER, ACK, &[]);
            talk.sent.remove(7);
            let told = Capture::whole(&talk.sent).fpdus().len();
            assert!(told > 180, "markers {markers}: {told}");
        }
    }

    #[test]
    fn what_looks_like_a_long_fpdu_hides_nothing() {
        for (flags, crc) in [(CRC, true), (NONE, false)] {
            let mut talk = Talk::started(flags, NONE);
            let first = frame(&[write(1, 1000)], false, crc);
            talk.push(CLIENT, ACK, &first);
            // The beginning of one of 60,000 octets, in the payload behind the gap.
            let payload = [&[0; 1400][..], &hex!("ea60 c140"), &[0; 1096]].concat();
            talk.send(CLIENT, &frame(&[write_of(2, &payload)], false, crc), 1000);
            for n in 3..9 {
                talk.push(CLIENT, ACK, &frame(&[write(n, 100)], false, crc));
            }
            talk.push(SERVER, ACK, &[]);
            talk.sent.remove(6);
            let capture = Capture::whole(&talk.sent);
            let numbers: Vec<u64> = capture.fpdus().iter().map(|(number, _)| *number).collect();
            assert_eq!(numbers, [6, 9, 10, 11, 12, 13, 14], "{:?}", capture.described());
        }
    }

    #[test]
    fn a_scan_costs_little() {
        // A beginning of an FPDU of 60,000 octets at each fourth octet.
        let payload = hex!("ea60 c140").repeat(4000);
        let ulpdus = vec![write_of(1, &payload); 200];
        for markers in [false, true] {
            for flags in [CRC, NONE] {
                let mut talk = Talk::started(flags, if markers { MARKERS } else { NONE });
                talk.send(CLIENT, &frame(&ulpdus, markers, true), 1448);
                talk.push(SERVER, ACK, &[]);
                talk.sent.remove(10);
                let begin = std::time::Instant::now();
                let capture = Capture::whole(&talk.sent);
                // Each of 800,000 places with 60,000 octets would take minutes.
                assert!(begin.elapsed().as_secs() < 20, "{:?}", begin.elapsed());
                let sent = |told: &(u64, String)| told.1.starts_with("WRITE 0x1 16000 Good");
                let fpdus = capture.fpdus();
                if flags == CRC || markers {
                    assert!(fpdus.iter().all(sent), "{:?}", fpdus.iter().find(|f| !sent(f)));
                }
            }
        }
    }

    #[test]
    fn a_peer_that_leaves_the_crc_out_is_believed_if_it_always_did() {
        let octets = frame(&mixed(300, |i| 50 + i % 30), false, false);
        let mut talk = Talk::started(CRC, CRC);
        talk.send(CLIENT, &octets, 733);
        talk.push(SERVER, ACK, &[]);
        talk.sent.remove(12);
        let told = Capture::whole(&talk.sent).fpdus().len();
        assert!((280..300).contains(&told), "{told}");
    }

    /// As softiwarp put markers into a stream in 2008.
    fn off_grid(ulpdus: &[Vec<u8>]) -> Vec<Vec<u8>> {
        let mut count = 0_usize;
        let one = |ulpdu: &Vec<u8>| {
            let mut plain = Vec::new();
            let begin = fpdu::begin(&mut plain);
            plain.extend_from_slice(ulpdu);
            fpdu::finish(&mut plain, begin, false);
            let (mut out, mut header_at) = (Vec::new(), None);
            for word in plain[..plain.len() - CRC_LEN].chunks(4) {
                if count.is_multiple_of(MARKER_SPACING) {
                    let distance = header_at.map_or(0, |header_at| count - header_at) as u16;
                    out.extend([0, 0]);
                    out.extend(distance.to_le_bytes());
                    count += MARKER_LEN;
                }
                header_at.get_or_insert(count);
                out.extend_from_slice(word);
                count += word.len();
            }
            out.extend([0; CRC_LEN]);
            out
        };
        ulpdus.iter().map(one).collect()
    }

    #[test]
    fn markers_off_their_grid_are_followed() {
        for len in [10, 20, 100, 1000, 3000] {
            let mut talk = Talk::started(MARKERS, MARKERS);
            let ulpdus = mixed(100, |i| len + i % 7);
            let segments = off_grid(&ulpdus);
            talk.send(CLIENT, &segments.concat(), 1448);
            for octets in &segments {
                talk.push(SERVER, ACK, octets);
            }
            let capture = Capture::of(&talk.sent);
            let fpdus = capture.fpdus();
            assert_eq!(fpdus.len(), 200, "{len}: {fpdus:#?}");
            for i in 0..200 {
                let fpdu = fpdu_at(&capture, i);
                assert_eq!((&fpdu.error, fpdu.crc), (&None, CrcState::Zero), "{len}: {i}");
                assert_eq!(usize::from(fpdu.ulpdu_len), ulpdus[i % 100].len(), "{len}: {i}");
            }
            assert_eq!(fpdu_at(&capture, 199).markers, Markers::OffGrid, "{len}");
        }
    }

    #[test]
    fn markers_off_their_grid_are_found_again_after_a_gap() {
        let mut talk = Talk::started(MARKERS, MARKERS);
        let ulpdus = mixed(100, |i| 300 + 40 * (i % 7));
        for octets in off_grid(&ulpdus) {
            talk.push(CLIENT, ACK, &octets);
        }
        talk.push(SERVER, ACK, &[]);
        talk.sent.drain(40..42);
        talk.sent.drain(70..75);
        let capture = Capture::whole(&talk.sent);
        let fpdus = capture.fpdus();
        assert!(fpdus.len() > 85, "{fpdus:#?}");
        for (_, words) in &fpdus {
            assert!(words.ends_with("Zero"), "{words}");
        }
    }

    #[test]
    fn a_wrong_marker_is_said_and_no_more() {
        let mut talk = Talk::started(MARKERS, MARKERS);
        let mut octets = frame(&mixed(4, |_| 400), true, true);
        octets[515] ^= 0x40;
        talk.push(CLIENT, ACK, &octets);
        let capture = Capture::of(&talk.sent);
        assert_eq!(capture.fpdus().len(), 4);
        let fpdu = fpdu_at(&capture, 1);
        assert_eq!(fpdu.crc, CrcState::Bad);
        let error = fpdu.error.as_deref().unwrap_or_default();
        assert!(error.starts_with("MPA: at offset 84: FPDUPTR is 0x14, expected 0x54"), "{error}");
    }

    #[test]
    fn ordinary_traffic_is_never_held() {
        let http = b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n".to_vec();
        let tls = [&hex!("160301 0200 0100 01fc 0303")[..], &[7; 900]].concat();
        let ssh = b"SSH-2.0-OpenSSH_9.2p1 Debian-2\r\n".to_vec();
        let zeros = vec![0; 1448];
        let text = vec![b'A'; 1448];
        for first in [http, tls, ssh, zeros, text, b"M".to_vec(), b"MPA ID Ref".to_vec()] {
            for opened in [true, false] {
                let mut talk = if opened { Talk::open(7, 8) } else { Talk::under_way() };
                for i in 0..20_u8 {
                    talk.push(CLIENT, ACK, &first);
                    talk.push(SERVER, ACK, &first);
                    talk.push(SERVER, ACK, &[i, b'\r', b'\n']);
                    talk.push(CLIENT, ACK, &[i]);
                    // Out of order.
                    let last = talk.sent.len() - 1;
                    talk.sent.swap(last - 2, last - 1);
                }
                let capture = Capture::of(&talk.sent);
                let key = first[0] == b'M';
                assert!(key || capture.waited == 0, "{first:02x?}: {}", capture.waited);
                assert_eq!(capture.told.len(), 0);
                assert_eq!(capture.streams.oldest_undecided(), None);
            }
        }
    }

    #[test]
    fn a_stream_that_begins_otherwise_is_not_looked_at_any_more() {
        let mut talk = Talk::open(1, 2);
        talk.push(CLIENT, ACK, b"GET / HTTP/1.1\r\n\r\n");
        for octets in one_by_one(&mixed(9, |i| i * 10), false, true) {
            talk.push(CLIENT, ACK, &octets);
            talk.push(SERVER, ACK, &octets);
        }
        let capture = Capture::of(&talk.sent);
        assert_eq!((capture.told.len(), capture.waited), (0, 0));
    }

    #[test]
    fn beginnings_of_fpdus_again_and_again_cost_little() {
        // Each segment looks like the beginning of a long FPDU, to whose end there are many more.
        let mut talk = Talk::under_way();
        let header = [&hex!("f000")[..], &write(0, 10)].concat();
        for _ in 0..20_000 {
            talk.push(CLIENT, ACK, &header);
        }
        let begin = std::time::Instant::now();
        let capture = Capture::whole(&talk.sent);
        assert_eq!(capture.told.len(), 0);
        // 20,000 × 60,000 octets would take minutes.
        assert!(begin.elapsed().as_secs() < 20, "{:?}", begin.elapsed());
    }

    #[test]
    fn a_syn_alone_tells_nothing() {
        let mut talk = Talk::open(1, 2);
        talk.push(CLIENT, SYN, &[]);
        assert_eq!(Capture::whole(&talk.sent).told.len(), 0);
    }

    proptest! {
        #[test]
        fn under_way_with_markers(
            lens in prop::collection::vec(0_usize..1200, 8..30), from in 0_usize..5, crc: bool,
        ) {
            let ulpdus = mixed(lens.len(), |i| lens[i - 1]);
            let segments = one_by_one(&ulpdus, true, crc);
            let sent = under_way(&segments[from..]);
            let capture = Capture::whole(&sent);
            let fpdus = capture.fpdus();
            let whole: usize = segments[from..].iter().map(Vec::len).sum();
            // With a CRC all of them. Without, one marker among zeros may be missed at first.
            let least = if crc { lens.len() - from } else { lens.len() - from - 3 };
            prop_assume!(whole > 1600);
            prop_assert!(fpdus.len() >= least, "{} of {} {:?}", fpdus.len(), lens.len() - from, capture.described());
            for i in 0..fpdus.len() {
                let fpdu = fpdu_at(&capture, i);
                let state = if crc { CrcState::Good } else { CrcState::Zero };
                prop_assert_eq!((&fpdu.error, fpdu.crc), (&None, state));
            }
        }

        #[test]
        fn under_way_without_markers(
            lens in prop::collection::vec(0_usize..1200, 3..30), crc: bool, mss in 1_usize..3000,
        ) {
            let ulpdus = mixed(lens.len(), |i| lens[i - 1]);
            let mut talk = Talk::under_way();
            let octets = frame(&ulpdus, false, crc);
            // The first segment has what tells that it may be one.
            talk.push(CLIENT, ACK, &octets[..8]);
            talk.send(CLIENT, &octets[8..], mss);
            let capture = Capture::whole(&talk.sent);
            prop_assert_eq!(capture.fpdus().len(), lens.len());
        }

        /// Payload that is made of FPDUs, but for the right CRC.
        #[test]
        fn what_was_not_sent_is_not_told(
            lens in prop::collection::vec(0_usize..300, 1..6), crc: [u8; 4], zero: bool,
            shift in 0_usize..8, sizes in prop::collection::vec(1_usize..60, 5..20),
            mss in 20_usize..3000, markers: bool, lost in prop::collection::vec(any::<bool>(), 1..40),
        ) {
            let crc = if zero { [0; 4] } else { crc };
            let ulpdus: Vec<_> = (1..)
                .zip(&sizes)
                .map(|(n, &size)| {
                    write_of(n, &[&vec![0; shift][..], &feigned(size, &lens, crc)].concat())
                })
                .filter(|ulpdu| ulpdu.len() < 65_000)
                .collect();
            let mut talk = Talk::started(CRC, if markers { MARKERS } else { NONE });
            let opening = talk.sent.len();
            talk.send(CLIENT, &frame(&ulpdus, markers, true), mss);
            talk.push(SERVER, ACK, &[]);
            let some: Vec<_> = talk
                .sent
                .iter()
                .enumerate()
                .filter(|&(i, _)| i < opening || !lost[i % lost.len()] || i % 3 > 0)
                .map(|(_, sent)| sent.clone())
                .collect();
            let sent = Capture::whole(&talk.sent).fpdus();
            prop_assert_eq!(sent.len(), ulpdus.len());
            let mut sent = sent.iter().map(|(_, words)| words);
            for (_, words) in Capture::whole(&some).fpdus() {
                prop_assert!(sent.any(|sent| *sent == words), "{} was not sent", words);
            }
        }

        #[test]
        fn random_octets_are_no_fpdus(
            octets in prop::collection::vec(any::<u8>(), 1..20_000), mss in 1_usize..1500, opened: bool,
        ) {
            let mut talk = if opened { Talk::open(7, 8) } else { Talk::under_way() };
            talk.send(CLIENT, &octets, mss);
            let capture = Capture::whole(&talk.sent);
            prop_assert_eq!(capture.told.len(), 0);
        }

        #[test]
        fn random_octets_behind_a_gap_are_no_fpdus(
            octets in prop::collection::vec(any::<u8>(), 1..20_000), mss in 1_usize..1500,
            crc: bool, markers: bool,
        ) {
            let flags = if crc { CRC } else { NONE };
            let mut talk = Talk::started(flags, if markers { MARKERS } else { NONE });
            talk.push(CLIENT, ACK, &frame(&mixed(3, |i| i), markers, crc));
            let lost = talk.sent.len();
            talk.push(CLIENT, ACK, &[0; 40]);
            talk.send(CLIENT, &octets, mss);
            talk.push(SERVER, ACK, &[]);
            talk.sent.remove(lost);
            prop_assert_eq!(Capture::whole(&talk.sent).fpdus().len(), 3);
        }

        #[test]
        fn random_octets_after_a_start_up_do_not_panic(
            octets in prop::collection::vec(any::<u8>(), 1..5000), mss in 1_usize..1500,
            request: u8, reply: u8, good: bool,
        ) {
            let flags = |bits| StartFlags::from_bits_retain(bits) - StartFlags::REJECT;
            let mut talk = Talk::started(flags(request), flags(reply));
            talk.send(CLIENT, &octets, mss);
            if good {
                talk.send(CLIENT, &frame(&mixed(5, |i| i * 100), true, true), mss);
            }
            talk.send(SERVER, &octets, mss);
            let capture = Capture::whole(&talk.sent);
            prop_assert_eq!(describe(&capture.told[0].1), "Request");
        }
    }
}
