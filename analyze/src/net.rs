//! What concerns frames and the network below: checksums, congestion, priorities, the capture itself.

use std::net::IpAddr;

use rustc_hash::FxHashMap;
use userdma_proto::{
    dissect::{Frame, IcrcState, Pause},
    wire::roce::opcode::Transport,
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
}

/// Whole-capture state.
#[derive(Debug, Default)]
pub(crate) struct Net {
    cut: Option<(u64, Option<i128>, u64)>,
    pauses: u64,
    marks: FxHashMap<(IpAddr, IpAddr), Marks>,
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
            if roce.icrc != IcrcState::Bad {
                continue;
            }
            let Some(ends) = frame.ends else { continue };
            let dst = match &roce.headers {
                Some(headers) => End::Qp(ends.dst, headers.bth.dest_qp()),
                None => End::Host(ends.dst),
            };
            found.add(
                Kind::RoceIcrcBad,
                [frame.number],
                frame.time_ns,
                (End::Host(ends.src), dst),
                "the ICRC is wrong, and no single field put back makes it right".into(),
            );
        }
    }

    pub(crate) fn packet(&mut self, packet: &Packet<'_>, found: &mut Findings) {
        let (src, dst) = (packet.ends.src, packet.ends.dst);
        if packet.info.is_some_and(|info| info.transport == Transport::Cnp) {
            // It goes back to the one whose packets were marked.
            let marks = self.marks.entry((dst, src)).or_default();
            marks.cnps += 1;
            if marks.cnps == 1 {
                let ends = (End::Host(src), End::Qp(dst, packet.dest_qp()));
                let text = format!("a CNP for QP {:#x}", packet.dest_qp().0);
                found.add(Kind::CnpSeen, [packet.frame], packet.time, ends, text);
            }
        } else if packet.ecn == 3 {
            let marks = self.marks.entry((src, dst)).or_default();
            marks.first.get_or_insert((packet.frame, packet.time));
            marks.last = packet.time;
            marks.count += 1;
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
