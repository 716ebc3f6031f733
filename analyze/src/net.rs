//! What concerns frames and the network below: checksums, congestion, priorities, the capture itself.

use std::net::{IpAddr, Ipv4Addr};

use rustc_hash::FxHashMap;
use userdma_proto::{
    dissect::{Frame, IcrcState, Pause, Roce},
    wire::roce::{
        icrc::{Field, Rewrite},
        opcode::Transport,
    },
};

use crate::{End, Findings, Kind, rc::Packet, span};

/// Marked packets that must have drawn a CNP, and for how long.
const MARKED: u64 = 64;
const CNP_NS: i128 = 10_000_000;

/// Marks and CNPs of one direction.
#[derive(Debug, Default)]
struct Marks {
    first: Option<(u64, Option<i128>)>,
    last: Option<i128>,
    count: u64,
    cnps: u64,
    /// Of the sender, since the first CNP: when, octets before in as long a time, octets since.
    slow: Option<Slow>,
    /// Octets and their times, of the last milliseconds.
    recent: std::collections::VecDeque<(i128, u64)>,
}

/// What a sender does behind a CNP.
#[derive(Debug)]
struct Slow {
    frame: u64,
    time: i128,
    before: u64,
    since: u64,
    cnps: u64,
    told: bool,
}

/// So long before and behind a CNP a rate is looked at.
const RATE_NS: i128 = 2_000_000;
/// A rate is one from so many octets on.
const RATE_OCTETS: u64 = 32 << 10;

/// A packet with a bad ICRC that an address may explain.
#[derive(Debug)]
struct Suspect {
    /// 0: it is told already.
    frame: u64,
    time: Option<i128>,
    ends: (End, End),
    rewritten: Rewrite,
}

impl Suspect {
    fn told(&self) -> bool {
        self.frame == 0
    }
}

fn damaged(frame: u64, time: Option<i128>, ends: (End, End), found: &mut Findings) {
    let text = "the ICRC is wrong, and no single field put back makes it right".to_owned();
    found.add(Kind::RoceIcrcBad, [frame], time, ends, text);
}

fn nat(
    which: &str,
    was: Ipv4Addr,
    before: &Suspect,
    frame: &Frame,
    ends: (End, End),
    found: &mut Findings,
) {
    let text = format!(
        "right with the {which} address {was}, as of other packets: it was rewritten (NAT)"
    );
    if !before.told() {
        found.add(Kind::RoceIcrcRewrite, [before.frame], before.time, ends, text.clone());
    }
    found.add(Kind::RoceIcrcRewrite, [frame.number], frame.time_ns, ends, text);
}

impl Marks {
    /// A packet of the sender whose packets are marked: does it slow down behind a CNP?
    fn sent(&mut self, packet: &Packet<'_>, found: &mut Findings) {
        let Some(time) = packet.time else { return };
        let octets = u64::from(packet.roce.payload_len) + 60;
        if let Some(slow) = &mut self.slow {
            if time - slow.time <= RATE_NS {
                slow.since += octets;
            } else if !slow.told {
                slow.told = true;
                if slow.before >= RATE_OCTETS && slow.since >= slow.before {
                    let (before, since) = (slow.before, slow.since);
                    let text = format!(
                        "{} CNPs, and the sender goes on: {before} octets in {} before, {since} behind",
                        slow.cnps,
                        span(RATE_NS)
                    );
                    let ends = (End::Host(packet.ends.src), End::Host(packet.ends.dst));
                    found.add(Kind::CnpNoSlowdown, [slow.frame], Some(slow.time), ends, text);
                }
            }
        }
        self.recent.push_back((time, octets));
        while self.recent.front().is_some_and(|&(then, _)| time - then > RATE_NS) {
            self.recent.pop_front();
        }
    }
}

/// Whole-capture state.
#[derive(Debug, Default)]
pub(crate) struct Net {
    cut: Option<(u64, Option<i128>, u64)>,
    pauses: u64,
    marks: FxHashMap<(IpAddr, IpAddr), Marks>,
    suspects: FxHashMap<(IpAddr, IpAddr), Suspect>,
}

impl Net {
    pub(crate) fn frame(&mut self, frame: &Frame, found: &mut Findings) {
        let rdma = !frame.roce.is_empty() || !frame.iwarp.is_empty();
        if rdma && frame.caplen < frame.len {
            let cut = self.cut.get_or_insert((frame.number, frame.time_ns, 0));
            cut.2 += 1;
        }
        if let Some(pause) = frame.pause {
            self.pauses += 1;
            let what = match pause {
                Pause::Link(quanta) => {
                    format!("the whole link for {quanta} quanta of 512 bit times")
                }
                Pause::Priorities(which, quanta) => {
                    let each: Vec<_> = (0..8)
                        .filter(|n| which & (1 << n) != 0)
                        .map(|n| format!("priority {n} for {} quanta", quanta[n]))
                        .collect();
                    each.join(", ")
                }
            };
            found.0.push(crate::Finding {
                kind: Kind::PfcPause,
                frames: vec![frame.number],
                time_ns: frame.time_ns,
                from: None,
                to: None,
                text: format!("pause: {what}"),
            });
        }
        for roce in &frame.roce {
            if roce.icrc == IcrcState::Bad {
                self.icrc(frame, roce, found);
            }
        }
    }

    /// A bad ICRC: what explains it?
    fn icrc(&mut self, frame: &Frame, roce: &Roce, found: &mut Findings) {
        let Some(ends) = frame.ends else { return };
        let dst = match &roce.headers {
            Some(headers) => End::Qp(ends.dst, headers.bth.dest_qp()),
            None => End::Host(ends.dst),
        };
        let both = (End::Host(ends.src), dst);
        let Some(rewritten) = roce.rewritten else {
            damaged(frame.number, frame.time_ns, both, found);
            return;
        };
        if let Some((field, was)) = rewritten.field {
            let text = match field {
                Field::Identification => {
                    format!("right with the IPv4 Identification {was}: it was rewritten")
                }
                Field::SourcePort => {
                    format!("right with the UDP source port {was}: it was rewritten")
                }
                Field::DestinationPort => {
                    format!("right with the UDP destination port {was}: it was rewritten")
                }
                Field::Ttl => format!(
                    "right where the time to live {was} is covered, which must count as ones"
                ),
                Field::Tos => format!(
                    "right where DSCP and ECN {was:#04x} are covered, which must count as ones"
                ),
            };
            found.add(Kind::RoceIcrcRewrite, [frame.number], frame.time_ns, both, text);
            return;
        }
        // An address always explains it: where two packets agree on it, it is meant.
        let one = Suspect { frame: frame.number, time: frame.time_ns, ends: both, rewritten };
        match self.suspects.insert((ends.src, ends.dst), one) {
            Some(before) if before.rewritten.src == rewritten.src => {
                nat("source", rewritten.src, &before, frame, both, found);
            }
            Some(before) if before.rewritten.dst == rewritten.dst => {
                nat("destination", rewritten.dst, &before, frame, both, found);
            }
            Some(before) if !before.told() => {
                damaged(before.frame, before.time, before.ends, found);
            }
            _ => return,
        }
        if let Some(one) = self.suspects.get_mut(&(ends.src, ends.dst))
            && found.0.last().is_some_and(|finding| finding.kind == Kind::RoceIcrcRewrite)
        {
            one.frame = 0;
        }
    }

    pub(crate) fn packet(&mut self, packet: &Packet<'_>, found: &mut Findings) {
        let (src, dst) = (packet.ends.src, packet.ends.dst);
        if packet.info.is_some_and(|info| info.transport == Transport::Cnp) {
            // It goes back to the one whose packets were marked.
            let marks = self.marks.entry((dst, src)).or_default();
            marks.cnps += 1;
            if let Some(time) = packet.time {
                match &mut marks.slow {
                    Some(slow) if time - slow.time <= RATE_NS => slow.cnps += 1,
                    slow => {
                        let before = marks.recent.iter().map(|(_, octets)| octets).sum();
                        let (frame, since) = (packet.frame, 0);
                        *slow = Some(Slow { frame, time, before, since, cnps: 1, told: false });
                    }
                }
            }
            if marks.cnps == 1 {
                let ends = (End::Host(src), End::Qp(dst, packet.dest_qp()));
                let text = format!("a CNP for QP {:#x}", packet.dest_qp().0);
                found.add(Kind::CnpSeen, [packet.frame], packet.time, ends, text);
            }
        } else if packet.ecn == 3 {
            let marks = self.marks.entry((src, dst)).or_default();
            marks.sent(packet, found);
            marks.first.get_or_insert((packet.frame, packet.time));
            marks.last = packet.time;
            marks.count += 1;
        } else if let Some(marks) = self.marks.get_mut(&(src, dst)) {
            // Only of flows that were marked once.
            marks.sent(packet, found);
        }
    }

    pub(crate) fn finish(&mut self, found: &mut Findings) {
        if let Some((frame, time, count)) = self.cut {
            found.0.push(crate::Finding {
                kind: Kind::CapSnaplen,
                frames: vec![frame],
                time_ns: time,
                from: None,
                to: None,
                text: format!(
                    "{count} frames with RDMA were cut by the snap length; this is the first"
                ),
            });
        }
        for (_, one) in self.suspects.drain() {
            if !one.told() {
                damaged(one.frame, one.time, one.ends, found);
            }
        }
        for (&(src, dst), marks) in &self.marks {
            let Some((frame, time)) = marks.first else { continue };
            let ends = (End::Host(src), End::Host(dst));
            let text = format!("{} packets came with CE set; this is the first", marks.count);
            found.add(Kind::EcnMarked, [frame], time, ends, text);
            let long = marks.last.zip(time).map_or(0, |(last, first)| last - first);
            if marks.cnps == 0 && (marks.count >= MARKED || long >= CNP_NS) {
                let text =
                    format!("{} marked packets in {}, and not one CNP", marks.count, span(long));
                found.add(Kind::EcnNoCnp, [frame], time, ends, text);
            }
        }
    }
}
