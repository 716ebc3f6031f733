//! What is wrong in a capture of RoCE or iWARP, where, and whose fault.
//!
//! ```text
//!   userdma_proto::dissect::Frame ──> Analyser ──> Finding: what, where, when, between whom
//!                                     ├── cm     connections, as their messages make them
//!                                     ├── rc     requests, answers and what becomes of them (RC, UC)
//!                                     ├── tcp    streams below iWARP
//!                                     ├── iwarp  MPA, DDP, RDMAP
//!                                     └── net    congestion, priorities, the capture itself
//! ```
//!
//! The [`Analyser`] takes frames in the capture's order and gives findings when they are settled: whether packets
//! were lost or come late is known only afterwards. What it remembers is bounded by the flows that live, not by the
//! capture.
#![forbid(unsafe_code)]

mod cm;
pub mod flow;
mod iwarp;
mod kind;
mod net;
mod order;
mod rc;
#[cfg(feature = "scenes")]
pub mod scenes;
mod tcp;

use std::{
    fmt,
    net::{IpAddr, SocketAddr},
};

use userdma_proto::{dissect::Frame, wire::ids::Qpn};

pub use kind::{Kind, Severity};

/// One end of a flow.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum End {
    /// A host, where no more is known or meant.
    Host(IpAddr),
    /// A queue pair.
    Qp(IpAddr, Qpn),
    /// A TCP socket.
    Socket(SocketAddr),
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host(ip) => write!(f, "{ip}"),
            Self::Qp(ip, qpn) => write!(f, "{ip} QP {:#x}", qpn.0),
            Self::Socket(addr) => write!(f, "{addr}"),
        }
    }
}

/// Two queue pairs that belong together, where the capture does not show it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hint {
    /// Both ends.
    pub ends: [(IpAddr, Qpn); 2],
}

/// Something that is wrong, or worth saying.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// What.
    pub kind: Kind,
    /// The frames that show it, in rising order.
    pub frames: Vec<u64>,
    /// When: nanoseconds since 1970 of the first of them, where the capture says so.
    pub time_ns: Option<i128>,
    /// Who sent these frames.
    pub from: Option<End>,
    /// To whom.
    pub to: Option<End>,
    /// What happened, in a sentence.
    pub text: String,
}

/// Gathers findings.
#[derive(Debug, Default)]
struct Findings(Vec<Finding>);

impl Findings {
    fn add(
        &mut self,
        kind: Kind,
        frames: impl IntoIterator<Item = u64>,
        time_ns: Option<i128>,
        ends: (End, End),
        text: String,
    ) {
        let mut frames: Vec<_> = frames.into_iter().collect();
        frames.sort_unstable();
        frames.dedup();
        self.0.push(Finding { kind, frames, time_ns, from: Some(ends.0), to: Some(ends.1), text });
    }
}

/// Takes frames, gives findings.
#[derive(Debug, Default)]
pub struct Analyser {
    found: Findings,
    senders: order::Senders,
    cm: cm::Cm,
    rc: rc::Flows,
    tcp: tcp::Streams,
    net: net::Net,
    last_time: Option<i128>,
}

impl Analyser {
    /// One that has seen nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// One that keeps account of flows, too: [`Analyser::flows`] has them at the end.
    pub fn with_flows() -> Self {
        let mut analyser = Self::default();
        analyser.rc.keep_flows();
        analyser.tcp.keep_flows();
        analyser
    }

    /// The flows of the capture in the order of their first frames, behind [`Analyser::finish`]. Empty unless
    /// [`Analyser::with_flows`] made this.
    pub fn flows(&mut self) -> Vec<flow::Flow> {
        let mut flows = self.rc.take_flows();
        flows.append(&mut self.tcp.take_flows());
        flows.sort_by_key(|flow| flow.frames);
        flows
    }

    /// Joins two queue pairs; to be given before the first frame.
    pub fn hint(&mut self, hint: Hint) {
        self.rc.hint(hint.ends);
    }

    /// Looks at the capture's next frame.
    pub fn push(&mut self, frame: &Frame) {
        self.last_time = frame.time_ns.or(self.last_time);
        self.net.frame(frame, &mut self.found);
        if !frame.roce.is_empty() {
            let Some(ends) = frame.ends else { return };
            for roce in &frame.roce {
                let Some(headers) = &roce.headers else { continue };
                let packet = rc::Packet::new(frame, roce, headers, ends);
                let order = self.senders.of(ends.src, ends.dst).see(
                    packet.ident,
                    packet.what(),
                    frame.number,
                );
                if let Some(mad) = roce.mad.as_deref() {
                    self.cm.mad(mad, &packet, order, &mut self.rc, &mut self.found);
                    continue;
                }
                let max = self.senders.of(ends.src, ends.dst).max();
                self.net.packet(&packet, &mut self.found);
                self.rc.datagram(&packet);
                self.rc.packet(&packet, order, max, &mut self.cm, &mut self.found);
            }
        } else if frame.tcp.is_some() {
            self.tcp.frame(frame, &mut self.found);
        }
    }

    /// Settles what is open at the end of the capture.
    pub fn finish(&mut self) {
        self.rc.finish(self.last_time, &mut self.found);
        self.cm.finish(self.last_time, &mut self.found);
        self.tcp.finish(self.last_time, &mut self.found);
        self.net.finish(&mut self.found);
    }

    /// Whether there are findings to [`Analyser::take`].
    pub fn has_findings(&self) -> bool {
        !self.found.0.is_empty()
    }

    /// The findings that are settled, which are taken out.
    pub fn take(&mut self) -> Vec<Finding> {
        std::mem::take(&mut self.found.0)
    }
}

/// A span of time for people.
fn span(ns: i128) -> String {
    let seconds = ns as f64 / 1e9;
    match seconds {
        s if s < 1e-3 => format!("{:.0} us", s * 1e6),
        s if s < 1.0 => format!("{:.1} ms", s * 1e3),
        s => format!("{s:.3} s"),
    }
}

/// The time between two frames, for people; nothing where the capture does not say.
fn between(from: Option<i128>, to: Option<i128>) -> String {
    match (from, to) {
        (Some(from), Some(to)) => span((to - from).max(0)),
        _ => "an unknown time".into(),
    }
}
