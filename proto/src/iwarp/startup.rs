//! MPA start-up: RFC 5044 §7.1, with the enhanced frames of RFC 6581.

use alloc::vec::Vec;
use core::time::Duration;

use super::{
    Config, Connection, Established, Event, Request, RtrKinds, Shutdown, StartupError,
    connection::Phase,
};
use crate::{
    time::Instant,
    verbs::PostError,
    wire::iwarp::{
        fpdu::{Deframer, MarkerEncoder},
        mpa::{Enhanced, MAX_PRIVATE_DATA, NO_NEGOTIATION, Start, StartFlags, StartKind},
        terminate::{TermCode, Terminate},
    },
};

/// The greatest read depth that fits the 14 bits of RFC 6581 §9.
const MAX_DEPTH: u16 = NO_NEGOTIATION - 1;

/// What a request said, until it is answered.
#[derive(Debug, Clone, Copy)]
pub(super) struct Negotiation {
    flags: StartFlags,
    revision: u8,
    enhanced: Option<Enhanced>,
}

/// So long the FIN behind a reject waits for the peer's. Linux's siw takes a FIN that comes with the reply
/// for the end of a connection without one, and its program never sees the private data.
const FIN_AFTER_REJECT: Duration = Duration::from_millis(500);

impl Connection {
    /// The initiator's first frame.
    pub(super) fn request_frame(&self, private_data: &[u8]) -> Result<Vec<u8>, PostError> {
        let config = &self.config;
        let enhanced = (config.mpa.revision >= 2).then(|| {
            let p2p = config.mpa.peer_to_peer;
            let rtr = config.mpa.rtr;
            Enhanced {
                ird: config.ird.min(MAX_DEPTH),
                ord: config.ord.min(MAX_DEPTH),
                peer_to_peer: p2p,
                // RFC 6581 §9.2: without A the other flags must be 0.
                rtr_send: p2p && rtr.contains(RtrKinds::SEND),
                rtr_write: p2p && rtr.contains(RtrKinds::WRITE),
                rtr_read: p2p && rtr.contains(RtrKinds::READ),
            }
        });
        if !matches!(config.mpa.revision, 1 | 2) {
            return Err(PostError::Invalid("the MPA revision must be 1 or 2"));
        }
        if config.mpa.peer_to_peer && (enhanced.is_none() || config.mpa.rtr.is_empty()) {
            return Err(PostError::Invalid(
                "a peer-to-peer start-up needs MPA revision 2 and a kind of RTR indication",
            ));
        }
        frame(StartKind::Request, want_flags(config), config.mpa.revision, enhanced, private_data)
    }

    /// Takes a start-up frame from the stream. Returns the octets used, 0 if more are needed.
    pub(super) fn handle_start(&mut self, now: Instant, input: &[u8]) -> usize {
        self.reply_began |= !input.is_empty();
        let (start, used) = match Start::parse(input) {
            Ok(None) => return 0,
            Ok(Some(parsed)) => parsed,
            Err(error) => {
                // RFC 5044 §7.1.2 rules 2, 3, 5: a malformed frame closes the connection.
                self.fail_startup(error.into(), Shutdown::Close);
                return input.len();
            }
        };
        let expected = match self.phase {
            Phase::AwaitReply => StartKind::Reply,
            _ => StartKind::Request,
        };
        // RFC 5044 §7.1.2 rule 8: two initiators, or two responders.
        if start.kind != expected {
            let what = match start.kind {
                StartKind::Request => "both sides sent an MPA request (two initiators)",
                StartKind::Reply => "an MPA reply came where a request was due",
            };
            self.fail_startup(StartupError::Protocol(what), Shutdown::Close);
            return input.len();
        }
        match start.kind {
            StartKind::Request => self.handle_request(&start),
            StartKind::Reply => self.handle_reply(now, &start),
        }
        used
    }

    fn handle_request(&mut self, start: &Start<'_>) {
        // RFC 5044 §7.1: revision 1 is what a compliant peer sends; 0 is the RDMA Consortium's.
        // An answer carries the request's revision.
        if start.revision > 2 {
            let what = "the request's MPA revision is above 2";
            return self.fail_startup(StartupError::Protocol(what), Shutdown::Close);
        }
        self.phase = Phase::Requested;
        self.deadline = None;
        self.request = Some(Negotiation {
            flags: start.flags,
            revision: start.revision,
            enhanced: start.enhanced,
        });
        self.events.push_back(Event::Request(Request {
            private_data: start.private_data.to_vec(),
            ird: start.enhanced.map(|e| e.ird),
            ord: start.enhanced.map(|e| e.ord),
            revision: start.revision,
            peer_to_peer: start.enhanced.is_some_and(|e| e.peer_to_peer),
        }));
    }

    /// Responder: accepts the request. Sends may be posted at once; they leave when the
    /// initiator's first FPDU has come (RFC 5044 §7.1.2 rule 4). `private_data`: at most 512
    /// octets, 508 in answer to revision 2.
    pub fn accept(&mut self, private_data: &[u8], _now: Instant) -> Result<(), PostError> {
        let Some(request) = self.request else {
            return Err(PostError::BadState(self.state()));
        };
        let (mut ird, mut ord) = (self.config.ird.min(MAX_DEPTH), self.config.ord.min(MAX_DEPTH));
        let mut rtr = None;
        let enhanced = request.enhanced.map(|asked| {
            // RFC 6581 §9.1: our outbound depth stays within the initiator's inbound depth; what
            // is all ones is left to the programs.
            let reply_ord = if asked.ird == NO_NEGOTIATION {
                NO_NEGOTIATION
            } else {
                ord = ord.min(asked.ird);
                ord
            };
            let offered = kinds(asked);
            let mut chosen = RtrKinds::empty();
            if asked.peer_to_peer {
                chosen = offered & self.config.mpa.rtr;
                // RFC 6581 §9.2: with no match, say what we have; the initiator terminates.
                if chosen.is_empty() {
                    chosen = self.config.mpa.rtr;
                }
                // A READ as the indication needs an inbound depth of 1.
                if chosen.contains(RtrKinds::READ) {
                    ird = ird.max(1);
                }
                rtr = Some(chosen);
            }
            Enhanced {
                ird: if asked.ord == NO_NEGOTIATION { NO_NEGOTIATION } else { ird },
                ord: reply_ord,
                peer_to_peer: asked.peer_to_peer,
                rtr_send: chosen.contains(RtrKinds::SEND),
                rtr_write: chosen.contains(RtrKinds::WRITE),
                rtr_read: chosen.contains(RtrKinds::READ),
            }
        });
        // Both sides must use the CRC if either asks; siw's initiator obeys the reply alone.
        let flags = want_flags(&self.config) | (request.flags & StartFlags::CRC);
        let reply = frame(StartKind::Reply, flags, request.revision, enhanced, private_data)?;
        self.request = None;
        self.startup_out = reply;
        self.open(Established {
            private_data: Vec::new(),
            ird,
            ord,
            revision: request.revision,
            crc: crc_in_use(flags, request.flags),
            markers_out: request.flags.contains(StartFlags::MARKERS),
            markers_in: flags.contains(StartFlags::MARKERS),
            rtr,
        });
        Ok(())
    }

    /// Responder: refuses the request; then the connection is over. `private_data` as for
    /// [`Connection::accept`].
    pub fn reject(&mut self, private_data: &[u8], now: Instant) -> Result<(), PostError> {
        let Some(request) = self.request else {
            return Err(PostError::BadState(self.state()));
        };
        let enhanced = request.enhanced.map(|_| Enhanced {
            ird: self.config.ird.min(MAX_DEPTH),
            ord: self.config.ord.min(MAX_DEPTH),
            ..Enhanced::default()
        });
        let flags = want_flags(&self.config) | StartFlags::REJECT;
        self.startup_out =
            frame(StartKind::Reply, flags, request.revision, enhanced, private_data)?;
        self.request = None;
        self.flush_all();
        self.phase = Phase::Ending;
        self.deadline = Some(now + self.config.close_timeout);
        self.fin_at = Some(now + FIN_AFTER_REJECT);
        Ok(())
    }

    fn handle_reply(&mut self, now: Instant, start: &Start<'_>) {
        let config = &self.config;
        if start.flags.contains(StartFlags::REJECT) {
            return self.fail_startup(
                StartupError::Rejected {
                    private_data: start.private_data.to_vec(),
                    ird: start.enhanced.map(|e| e.ird),
                    ord: start.enhanced.map(|e| e.ord),
                },
                Shutdown::Close,
            );
        }
        if start.revision > config.mpa.revision {
            let what = "the reply's MPA revision is above the request's";
            return self.fail_startup(StartupError::Protocol(what), Shutdown::Close);
        }
        let ours = want_flags(config);
        let (ird, mut ord) = (config.ird.min(MAX_DEPTH), config.ord.min(MAX_DEPTH));
        let (mut rtr, mut failure) = (None, None);
        if let Some(reply) = start.enhanced {
            // RFC 6581 §9.1, from the initiator's side.
            if reply.ird != NO_NEGOTIATION {
                ord = ord.min(reply.ird);
            }
            if reply.ord != NO_NEGOTIATION && reply.ord > ird {
                failure = Some(TermCode::MPA_INSUFFICIENT_IRD);
            }
            // RFC 6581 §9.2: the reply decides. One without A means client and server (old siw
            // forgot the bit): our first FPDU opens it anyway. A WRITE disturbs the peer least.
            if config.mpa.peer_to_peer && reply.peer_to_peer {
                let common = kinds(reply) & config.mpa.rtr;
                rtr = [RtrKinds::WRITE, RtrKinds::READ, RtrKinds::SEND]
                    .into_iter()
                    .find(|kind| common.contains(*kind));
                if rtr.is_none() {
                    failure = Some(TermCode::MPA_NO_MATCHING_RTR);
                }
            }
        }
        self.open(Established {
            private_data: start.private_data.to_vec(),
            ird,
            ord,
            revision: start.revision,
            crc: crc_in_use(ours, start.flags),
            markers_out: start.flags.contains(StartFlags::MARKERS),
            markers_in: ours.contains(StartFlags::MARKERS),
            rtr,
        });
        self.may_send = true;
        match failure {
            Some(code) => self.terminate(now, Terminate::new(code)),
            None => self.tx.rtr = rtr,
        }
    }

    /// Full operation begins.
    fn open(&mut self, established: Established) {
        self.framer.crc = established.crc;
        self.deframer = Deframer::new(established.markers_in, established.crc);
        self.framer.markers = established.markers_out.then(|| MarkerEncoder::new(established.crc));
        self.phase = Phase::Open;
        self.deadline = None;
        self.established = Some(established.clone());
        self.events.push_back(Event::Established(established));
    }

    /// No connection comes about: posted work is flushed, the program is told.
    pub(super) fn fail_startup(&mut self, error: StartupError, shutdown: Shutdown) {
        self.request = None;
        self.events.push_back(Event::StartupFailed(error));
        self.finish(shutdown);
    }
}

/// M and C of our frames. The CRC is left out only where neither side sets C (RFC 5044 §7.1).
fn want_flags(config: &Config) -> StartFlags {
    let mut flags = StartFlags::empty();
    flags.set(StartFlags::CRC, config.mpa.crc);
    flags.set(StartFlags::MARKERS, config.mpa.markers);
    flags
}

fn crc_in_use(ours: StartFlags, theirs: StartFlags) -> bool {
    (ours | theirs).contains(StartFlags::CRC)
}

fn kinds(enhanced: Enhanced) -> RtrKinds {
    let mut kinds = RtrKinds::empty();
    kinds.set(RtrKinds::SEND, enhanced.rtr_send);
    kinds.set(RtrKinds::WRITE, enhanced.rtr_write);
    kinds.set(RtrKinds::READ, enhanced.rtr_read);
    kinds
}

fn frame(
    kind: StartKind,
    flags: StartFlags,
    revision: u8,
    enhanced: Option<Enhanced>,
    private_data: &[u8],
) -> Result<Vec<u8>, PostError> {
    let max = MAX_PRIVATE_DATA - if enhanced.is_some() { 4 } else { 0 };
    if private_data.len() > max {
        return Err(PostError::TooLong { max: max as u64, have: private_data.len() as u64 });
    }
    let mut out = Vec::new();
    Start { kind, flags, revision, enhanced, private_data }.emit(&mut out);
    Ok(out)
}
