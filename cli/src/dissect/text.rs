//! `--format text`: a line a frame, as somebody reads it who knows RDMA.

use std::net::IpAddr;

use clap::ValueEnum;
use userdma_proto::{
    dissect::{Ends, Frame, IcrcState, Layer, Pause, Roce, TcpInfo, Version},
    wire::roce::{
        Headers, UDP_PORT,
        aeth::{Aeth, NakCode, Syndrome, credits, rnr_micros},
        feth::{Placement, Selectivity},
        opcode::{Info, Operation},
    },
};

use super::{
    iwarp,
    line::{Line, Style},
    mad, tree,
};

/// How a frame's time is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Time {
    /// Since the first frame that has one
    Relative,
    /// Since the frame printed before
    Delta,
    /// Seconds since 1970
    Epoch,
}

/// The widest that the column of addresses grows.
const MAX_ENDS: usize = 48;

/// What the lines that are printed have in common.
#[derive(Debug)]
pub(super) struct Text {
    time: Time,
    verbose: bool,
    /// What times are counted from.
    base: Option<i128>,
    /// Whether a time had nanoseconds: then all are printed with them.
    nanoseconds: bool,
    ends_width: usize,
}

impl Text {
    pub(super) fn new(time: Time, verbose: bool) -> Self {
        Self { time, verbose, base: None, nanoseconds: false, ends_width: 0 }
    }

    /// Appends the frame's line and, if wanted, all of its fields.
    pub(super) fn frame(&mut self, line: &mut Line, frame: &Frame) {
        line.num_right(frame.number, 6);
        line.text("  ");
        self.time(line, frame.time_ns);
        line.text("  ");
        self.ends(line, frame);
        line.text("  ");
        contents(line, frame);
        if let Some(error) = &frame.error {
            wrong(line, "error: ", error);
        }
        line.byte(b'\n');
        if self.verbose {
            tree::frame(line, frame);
        }
    }

    fn time(&mut self, line: &mut Line, time: Option<i128>) {
        let mark = line.mark();
        if let Some(now) = time {
            self.nanoseconds |= now.rem_euclid(1000) != 0;
            let shown = match self.time {
                Time::Epoch => now,
                Time::Relative | Time::Delta => now - *self.base.get_or_insert(now),
            };
            if self.time == Time::Delta {
                self.base = Some(now);
            }
            let (width, digits) = if self.nanoseconds { (14, 9) } else { (11, 6) };
            seconds(line, shown, width, digits);
        } else {
            line.text("-");
            line.pad_from(mark, if self.nanoseconds { 14 } else { 11 });
        }
    }

    fn ends(&mut self, line: &mut Line, frame: &Frame) {
        let mark = line.mark();
        let lrh = frame.roce.first().and_then(|roce| roce.lrh.as_ref());
        match (&frame.ends, lrh) {
            (Some(ends), _) => {
                let is_roce = !frame.roce.is_empty();
                end(line, ends, true, is_roce);
                line.text(" > ");
                end(line, ends, false, is_roce);
            }
            (None, Some(lrh)) => {
                line.text("LID ");
                line.num(lrh.slid.get());
                line.text(" > LID ");
                line.num(lrh.dlid.get());
            }
            (None, None) => {}
        }
        self.ends_width = self.ends_width.max(line.width_from(mark)).min(MAX_ENDS);
        line.pad_from(mark, self.ends_width);
    }
}

/// Nanoseconds as seconds, right-aligned.
fn seconds(line: &mut Line, ns: i128, width: usize, digits: usize) {
    let (whole, part) = (ns.unsigned_abs() / 1_000_000_000, ns.unsigned_abs() % 1_000_000_000);
    let part = part / 10u128.pow(9 - digits as u32);
    let sign = if ns < 0 { "-" } else { "" };
    let mut buffer = itoa::Buffer::new();
    let whole = buffer.format(whole);
    let missing = width.saturating_sub(digits + 1 + whole.len() + sign.len());
    let mark = line.mark();
    line.pad_from(mark, missing);
    line.text(sign);
    line.text(whole);
    line.byte(b'.');
    let mut buffer = itoa::Buffer::new();
    let part = buffer.format(part);
    line.text(&"000000000"[..digits.saturating_sub(part.len())]);
    line.text(part);
}

/// One end. RoCE's UDP ports say nothing: the source's is chance, the destination's always the
/// same.
fn end(line: &mut Line, ends: &Ends, src: bool, is_roce: bool) {
    let ip = if src { ends.src } else { ends.dst };
    let port = match ends.ports {
        Some((sport, _)) if src => Some(sport).filter(|_| !is_roce),
        Some((_, dport)) => Some(dport).filter(|&port| !is_roce || port != UDP_PORT),
        None => None,
    };
    match (ip, port) {
        (ip, None) => line.ip(ip),
        (IpAddr::V4(_), Some(port)) => {
            line.ip(ip);
            line.byte(b':');
            line.num(port);
        }
        (IpAddr::V6(_), Some(port)) => {
            line.byte(b'[');
            line.ip(ip);
            line.text("]:");
            line.num(port);
        }
    }
}

/// What is around the packet, and unusual.
fn tags(line: &mut Line, frame: &Frame) {
    let around = |layer: &&Layer| {
        matches!(layer, Layer::Vlan | Layer::Mpls | Layer::Gre | Layer::Vxlan | Layer::Geneve)
    };
    for layer in frame.stack.iter().filter(around) {
        line.paint(Style::Dim, |line| line.text(layer.name()));
        line.byte(b' ');
    }
}

fn contents(line: &mut Line, frame: &Frame) {
    if !frame.roce.is_empty() {
        tags(line, frame);
        if frame.ip.is_some_and(|ip| ip.ecn == 3) {
            line.paint(Style::Warn, |line| line.text("ECN CE"));
            line.text("  ");
        }
        packets(line, &frame.roce);
    } else if !frame.iwarp.is_empty() {
        tags(line, frame);
        iwarp::found(line, &frame.iwarp);
        if let Some(tcp) = frame.tcp.filter(|tcp| tcp.flags & (FIN | RST) != 0) {
            line.text("  ");
            tcp_flags(line, tcp.flags & (FIN | RST));
        }
    } else if let Some(pause) = &frame.pause {
        pauses(line, pause);
    } else if let Some(tcp) = &frame.tcp {
        tags(line, frame);
        line.paint(Style::Dim, |line| segment(line, tcp));
    } else {
        line.paint(Style::Dim, |line| {
            for (i, layer) in frame.stack.iter().filter(|layer| **layer != Layer::Data).enumerate()
            {
                line.text(if i == 0 { "" } else { " " });
                line.text(layer.name());
            }
            line.text(if frame.stack.is_empty() { "" } else { "  " });
            octets(line, frame.len.into());
        });
    }
}

pub(super) fn octets(line: &mut Line, n: u64) {
    line.num(n);
    line.text(" B");
}

pub(super) fn wrong(line: &mut Line, before: &str, what: &str) {
    line.text("  ");
    line.paint(Style::Bad, |line| {
        line.text(before);
        line.text(what);
    });
}

const FIN: u8 = 0x01;
const RST: u8 = 0x04;

fn tcp_flags(line: &mut Line, flags: u8) {
    let names = ["FIN", "SYN", "RST", "PSH", "ACK", "URG", "ECE", "CWR"];
    let set = (0..8).filter(|bit| flags & 1 << bit != 0);
    for (i, bit) in set.enumerate() {
        line.text(if i == 0 { "" } else { " " });
        line.text(names[bit]);
    }
}

fn segment(line: &mut Line, tcp: &TcpInfo) {
    line.text("TCP ");
    tcp_flags(line, tcp.flags);
    line.text("  seq ");
    line.num(tcp.seq);
    if tcp.flags & 0x10 != 0 {
        line.text(" ack ");
        line.num(tcp.ack);
    }
    line.text("  ");
    octets(line, tcp.payload_len.into());
}

fn pauses(line: &mut Line, pause: &Pause) {
    let quanta = |line: &mut Line, quanta: u16| {
        if quanta == 0 {
            line.text("go on");
        } else {
            line.text("stop for ");
            line.num(quanta);
            line.text(" quanta");
        }
    };
    match *pause {
        Pause::Link(time) => {
            line.paint(Style::Name, |line| line.text("PAUSE"));
            line.text("  ");
            quanta(line, time);
        }
        Pause::Priorities(enabled, times) => {
            line.paint(Style::Name, |line| line.text("PFC"));
            let meant = (0u8..).zip(times).filter(|(priority, _)| enabled & 1 << priority != 0);
            for (i, (priority, time)) in meant.enumerate() {
                line.text(if i == 0 { "  priority " } else { ", priority " });
                line.num(priority);
                line.text(": ");
                quanta(line, time);
            }
        }
    }
}

/// The packets of a frame: one or, of a train, several; what is alike in a row is told once.
fn packets(line: &mut Line, all: &[Box<Roce>]) {
    let mut rest = all;
    while let Some(first) = rest.first() {
        if rest.len() < all.len() {
            line.text(" | ");
        }
        let run = 1 + rest.windows(2).take_while(|pair| continues(&pair[0], &pair[1])).count();
        packet(line, first, run as u64);
        rest = &rest[run..];
    }
}

/// Whether `next` says nothing new: the next PSN, and all else the same.
fn continues(packet: &Roce, next: &Roce) -> bool {
    let plain =
        |roce: &Roce| roce.error.is_none() && roce.mad.is_none() && roce.icrc == IcrcState::Good;
    let (Some(a), Some(b)) = (&packet.headers, &next.headers) else { return false };
    let mut expected = *a;
    expected.bth.psn = b.bth.psn;
    plain(packet)
        && plain(next)
        && packet.payload_len == next.payload_len
        && b.bth.psn() == a.bth.psn().next()
        && *b == expected
}

fn packet(line: &mut Line, roce: &Roce, run: u64) {
    match roce.version {
        Version::V1 => line.text("v1 "),
        Version::V2 => {}
        Version::Ib => line.text("ib "),
    }
    if let Some(headers) = &roce.headers {
        let bth = &headers.bth;
        line.text("QP ");
        line.hex_of(bth.dest_qp().0.into(), 6);
        line.text("  ");
        let info = bth.opcode().info();
        let mark = line.mark();
        let style = if info.is_some() { Style::Name } else { Style::Warn };
        line.paint(style, |line| match info {
            Some(info) => line.text(info.name),
            None => line.display(bth.opcode()),
        });
        line.pad_from(mark, 19);
        line.text(" PSN ");
        let mark = line.mark();
        line.num(bth.psn().get());
        if run > 1 {
            line.text("..");
            line.num(bth.psn().add(run as u32 - 1).get());
        }
        line.pad_from(mark, 8);
        if run > 1 {
            line.text("  ");
            line.num(run);
            line.text(" x");
        }
        operation(line, roce, headers, info);
        flags(line, headers);
    } else {
        line.paint(Style::Warn, |line| line.text("RoCE"));
    }
    match roce.icrc {
        IcrcState::Good => {}
        IcrcState::Bad => wrong(line, "", "ICRC BAD"),
        IcrcState::Absent => {
            line.text("  ");
            line.paint(Style::Dim, |line| line.text("ICRC not captured"));
        }
    }
    if roce.vcrc == Some(IcrcState::Bad) {
        wrong(line, "", "VCRC BAD");
    }
    if let Some(error) = &roce.error {
        wrong(line, "error: ", error);
    }
}

fn flags(line: &mut Line, headers: &Headers) {
    let bth = &headers.bth;
    let mut before = "  [";
    let mut flag = |line: &mut Line, set: bool, write: &dyn Fn(&mut Line)| {
        if set {
            line.text(before);
            write(line);
            before = " ";
        }
    };
    flag(line, bth.solicited(), &|line| line.text("SE"));
    flag(line, bth.ack_req(), &|line| line.text("A"));
    flag(line, bth.pad() != 0, &|line| {
        line.text("pad ");
        line.num(bth.pad());
    });
    let warn =
        |text: &'static str| move |line: &mut Line| line.paint(Style::Warn, |line| line.text(text));
    flag(line, bth.fecn(), &warn("FECN"));
    flag(line, bth.becn(), &warn("BECN"));
    flag(line, bth.tver() != 0, &|line| {
        line.paint(Style::Warn, |line| {
            line.text("TVer ");
            line.num(bth.tver());
        });
    });
    flag(line, bth.pkey().0 & 0x7fff != 0x7fff, &|line| {
        line.text("P_Key ");
        line.hex_of(bth.pkey().0.into(), 4);
    });
    if before == " " {
        line.byte(b']');
    }
}

/// What the packet does, behind its name and PSN.
fn operation(line: &mut Line, roce: &Roce, headers: &Headers, info: Option<&Info>) {
    if let Some(rdeth) = &headers.rdeth {
        line.text("  EEC ");
        line.hex_of(rdeth.ee_context().into(), 6);
    }
    if let Some(xrceth) = &headers.xrceth {
        line.text("  SRQ ");
        line.hex_of(xrceth.srq().into(), 6);
    }
    if let Some(octets) = &roce.mad {
        return mad::mad(line, octets);
    }
    let what = info.map(|info| info.operation);
    let carries =
        matches!(what, Some(Operation::Send | Operation::Write | Operation::ReadResponse));
    let has_payload = what != Some(Operation::Cnp) && (carries || roce.payload_len > 0);
    if has_payload {
        line.text("  ");
        octets(line, roce.payload_len.into());
    }
    if let Some(reth) = &headers.reth {
        // The RETH has the length of the whole message.
        let len = reth.len.get();
        if !has_payload || len != roce.payload_len {
            line.text(if has_payload { " of " } else { "  " });
            octets(line, len.into());
        }
        line.text(match what {
            Some(Operation::ReadRequest) => " from ",
            Some(Operation::Flush) => " at ",
            _ => " to ",
        });
        address(line, reth.va.get(), reth.rkey.get());
    }
    if let Some(deth) = &headers.deth {
        line.text("  from QP ");
        line.hex_of(deth.src_qp().0.into(), 6);
        line.text(", Q_Key ");
        line.hex_of(deth.qkey().0.into(), 8);
    }
    if let Some(feth) = &headers.feth {
        let placement = feth.placement();
        line.text("  to");
        for (kind, name) in [
            (Placement::GLOBAL_VISIBILITY, " global visibility"),
            (Placement::PERSISTENCE, " persistence"),
        ] {
            line.text(if placement.contains(kind) { name } else { "" });
        }
        match feth.selectivity() {
            Selectivity::RANGE => line.text(", this range"),
            Selectivity::REGION => line.text(", the whole region"),
            Selectivity(code) => {
                line.text(", selectivity ");
                line.num(code);
            }
        }
    }
    if let Some(atomic) = &headers.atomic_eth {
        line.text("  at ");
        address(line, atomic.va.get(), atomic.rkey.get());
        if what == Some(Operation::CmpSwap) {
            line.text(", if ");
            line.hex(atomic.compare.get());
            line.text(" then ");
        } else {
            line.text(", add ");
        }
        line.hex(atomic.swap_add.get());
    }
    if let Some(header) = &headers.aeth {
        aeth(line, header, headers.bth.psn().get());
    }
    if let Some(ack) = &headers.atomic_ack_eth {
        line.text("  was ");
        line.hex(ack.original.get());
    }
    if let Some(immdt) = &headers.immdt {
        line.text("  imm ");
        line.hex_of(immdt.data.get().into(), 8);
    }
    if let Some(ieth) = &headers.ieth {
        line.text("  revokes rkey ");
        line.hex_of(ieth.rkey.get().into(), 8);
    }
    if what == Some(Operation::Cnp) {
        line.text("  ");
        line.paint(Style::Warn, |line| line.text("congestion: slow down"));
    }
}

fn address(line: &mut Line, va: u64, rkey: u32) {
    line.hex(va);
    line.text(" rkey ");
    line.hex_of(rkey.into(), 8);
}

fn aeth(line: &mut Line, aeth: &Aeth, psn: u32) {
    line.text("  ");
    match aeth.syndrome() {
        Syndrome::Ack(code) => {
            if let Some(credits) = credits(code) {
                line.text("credits ");
                line.num(credits);
                line.text(", ");
            }
        }
        Syndrome::RnrNak(code) => line.paint(Style::Warn, |line| {
            line.text("RNR NAK, wait ");
            milliseconds(line, rnr_micros(code).into());
        }),
        Syndrome::Nak(code) => line.paint(Style::Bad, |line| {
            line.text("NAK ");
            match code.name() {
                Some(name) => line.text(name),
                None => {
                    line.text("code ");
                    line.num(code.0);
                }
            }
            // The PSN of this NAK is the one that the responder waits for.
            if code == NakCode::PSN_SEQUENCE {
                line.text(", expects PSN ");
                line.num(psn);
            }
        }),
        Syndrome::Reserved(octet) => line.paint(Style::Warn, |line| {
            line.text("reserved syndrome ");
            line.hex_of(octet.into(), 2);
        }),
    }
    if !matches!(aeth.syndrome(), Syndrome::Ack(_)) {
        line.text(", ");
    }
    line.text("MSN ");
    line.num(aeth.msn());
}

/// Microseconds in milliseconds, with as many decimals as they have.
fn milliseconds(line: &mut Line, us: u64) {
    line.num(us / 1000);
    if !us.is_multiple_of(1000) {
        let digits = format!("{:03}", us % 1000);
        line.byte(b'.');
        line.text(digits.trim_end_matches('0'));
    }
    line.text(" ms");
}

/// Octets that are shown at most where they are no text.
const SHOWN: usize = 16;

/// A program's private data: as text if it is one, else the front of it in hex. Zeros behind it
/// are the message's padding.
pub(super) fn private_data(line: &mut Line, data: &[u8]) {
    let len = data.iter().rposition(|octet| *octet != 0).map_or(0, |last| last + 1);
    let data = &data[..len];
    if data.is_empty() {
        return;
    }
    line.text("  private data ");
    if data.iter().all(|octet| (b' '..=b'~').contains(octet)) {
        line.byte(b'"');
        data.iter().for_each(|octet| line.byte(*octet));
        line.byte(b'"');
    } else {
        line.octets(&data[..len.min(SHOWN)]);
        if len > SHOWN {
            line.text("... (");
            octets(line, len as u64);
            line.byte(b')');
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{super::sample::*, *};
    use userdma_proto::wire::roce::{
        atomic::{AtomicAckEth, AtomicEth},
        deth::Deth,
        ieth::Ieth,
        immdt::ImmDt,
        reth::Reth,
    };

    /// What stands behind addresses.
    fn told(of: &Frame) -> String {
        let line = written(|line| Text::new(Time::Epoch, false).frame(line, of));
        let before = "     7     1.500000  10.0.0.1 > 10.0.0.2  ";
        line.strip_prefix(before).unwrap_or_else(|| panic!("{line}")).trim_end().to_owned()
    }

    fn packet(headers: Headers, payload_len: u32) -> String {
        told(&roce_frame(roce_of(headers, payload_len)))
    }

    fn with_reth(opcode: u8, len: u32) -> Headers {
        let reth = Reth { va: 0x7f00_0000_1000.into(), rkey: 0xabcd.into(), len: len.into() };
        Headers { reth: Some(reth), ..headers_of(opcode) }
    }

    fn with_aeth(opcode: u8, syndrome: u8) -> Headers {
        Headers { aeth: Some(Aeth { syndrome, msn: [0, 0, 5] }), ..headers_of(opcode) }
    }

    #[test]
    fn requests() {
        let mut send = headers_of(0x04);
        (send.bth.flags, send.bth.ack) = (0xf0, 0x80);
        assert_eq!(
            packet(send, 37),
            "QP 0x000012  RC_SEND_ONLY        PSN 100       37 B  [SE A pad 3]"
        );
        let mut send = headers_of(0x17);
        send.ieth = Some(Ieth { rkey: 0x77.into() });
        assert!(packet(send, 8).ends_with("8 B  revokes rkey 0x00000077"), "{}", packet(send, 8));
        let mut send = headers_of(0x65);
        send.deth = Some(Deth { qkey: 0x1111_1111.into(), reserved: 0, src_qp: [0, 0, 0x34] });
        send.immdt = Some(ImmDt { data: 5.into() });
        assert!(
            packet(send, 64).ends_with("64 B  from QP 0x000034, Q_Key 0x11111111  imm 0x00000005")
        );
        let first = packet(with_reth(0x06, 4000), 1024);
        assert!(first.ends_with("  1024 B of 4000 B to 0x7f0000001000 rkey 0x0000abcd"), "{first}");
        let only = packet(with_reth(0x0a, 100), 100);
        assert!(only.ends_with("  100 B to 0x7f0000001000 rkey 0x0000abcd"), "{only}");
        let read = packet(with_reth(0x0c, 100), 0);
        assert!(read.ends_with("  100 B from 0x7f0000001000 rkey 0x0000abcd"), "{read}");
        let atomic =
            AtomicEth { va: 0x10.into(), rkey: 1.into(), swap_add: 2.into(), compare: 3.into() };
        let atomic = |opcode| Headers { atomic_eth: Some(atomic), ..headers_of(opcode) };
        let told = packet(atomic(0x13), 0);
        assert!(told.ends_with("  at 0x10 rkey 0x00000001, if 0x3 then 0x2"), "{told}");
        let told = packet(atomic(0x14), 0);
        assert!(told.ends_with("  at 0x10 rkey 0x00000001, add 0x2"), "{told}");
    }

    #[test]
    fn answers() {
        for (syndrome, words) in [
            (0x1f, "MSN 5"),
            (0x05, "credits 6, MSN 5"),
            (0x20, "RNR NAK, wait 655.36 ms, MSN 5"),
            (0x21, "RNR NAK, wait 0.01 ms, MSN 5"),
            (0x3f, "RNR NAK, wait 491.52 ms, MSN 5"),
            (0x60, "NAK PSN sequence error, expects PSN 100, MSN 5"),
            (0x62, "NAK remote access error, MSN 5"),
            (0x7f, "NAK code 31, MSN 5"),
            (0x41, "reserved syndrome 0x41, MSN 5"),
        ] {
            let told = packet(with_aeth(0x11, syndrome), 0);
            let want = format!("QP 0x000012  RC_ACK              PSN 100       {words}");
            assert_eq!(told, want);
        }
        let response = packet(with_aeth(0x10, 0x1f), 100);
        assert!(response.ends_with("100 B  MSN 5"), "{response}");
        let mut ack = with_aeth(0x12, 0x1f);
        ack.atomic_ack_eth = Some(AtomicAckEth { original: 0x1234.into() });
        assert!(packet(ack, 0).ends_with("MSN 5  was 0x1234"), "{}", packet(ack, 0));
    }

    #[test]
    fn congestion_and_what_is_wrong() {
        let mut cnp = headers_of(0x81);
        cnp.bth.ecn = 0x40;
        let told_cnp = packet(cnp, 16);
        assert!(told_cnp.ends_with("congestion: slow down  [BECN]"), "{told_cnp}");
        let mut marked = roce_frame(roce_of(headers_of(0x04), 8));
        marked.ip =
            Some(userdma_proto::dissect::IpInfo { dscp: 0, ecn: 3, ttl: 64, ident: Some(0) });
        assert!(told(&marked).starts_with("ECN CE  QP 0x000012"), "{}", told(&marked));
        let mut bad = roce_of(headers_of(0x04), 8);
        bad.icrc = IcrcState::Bad;
        bad.error = Some("it is odd".into());
        let bad = told(&roce_frame(bad));
        assert!(bad.ends_with("8 B  ICRC BAD  error: it is odd"), "{bad}");
        let mut cut = roce_of(headers_of(0x04), 8);
        cut.icrc = IcrcState::Absent;
        assert!(told(&roce_frame(cut)).ends_with("8 B  ICRC not captured"));
        let mut odd = headers_of(0xe5);
        (odd.bth.flags, odd.bth.pkey) = (0x41, 0x1234.into());
        assert_eq!(
            packet(odd, 8),
            "QP 0x000012  opcode 0xe5         PSN 100       8 B  [TVer 1 P_Key 0x1234]"
        );
    }

    #[test]
    fn colours_stand_where_something_is_wrong() {
        let mut bad = roce_of(headers_of(0x04), 8);
        bad.icrc = IcrcState::Bad;
        let mut line = Line::new(true);
        Text::new(Time::Epoch, false).frame(&mut line, &roce_frame(bad));
        let line = String::from_utf8(line.as_bytes().to_vec()).unwrap();
        assert!(line.contains("\x1b[1;31mICRC BAD\x1b[0m"), "{line}");
        assert!(line.contains("\x1b[1mRC_SEND_ONLY\x1b[0m        PSN"), "{line}");
    }

    #[test]
    fn trains_tell_what_is_alike_once() {
        let packet = |opcode, psn: u8, payload_len| {
            let mut headers = headers_of(opcode);
            headers.bth.psn = [0, 0, psn];
            Box::new(roce_of(headers, payload_len))
        };
        let mut train = roce_frame(*packet(0x00, 1, 1024));
        train.roce.extend((2..10).map(|psn| packet(0x01, psn, 1024)));
        train.roce.push(packet(0x02, 10, 7));
        assert_eq!(
            told(&train),
            "QP 0x000012  RC_SEND_FIRST       PSN 1         1024 B | \
             QP 0x000012  RC_SEND_MIDDLE      PSN 2..9      8 x  1024 B | \
             QP 0x000012  RC_SEND_LAST        PSN 10        7 B"
        );
        train.roce[4].icrc = IcrcState::Bad;
        assert_eq!(told(&train).matches(" | ").count(), 4);
    }

    #[test]
    fn times() {
        let mut text = Text::new(Time::Relative, false);
        let at = |text: &mut Text, time_ns| {
            let frame = Frame { time_ns, ..bare_frame(&[Layer::Eth], None) };
            let line = written(|line| text.frame(line, &frame));
            line[6..].split("  10.0.0.1").next().unwrap().to_owned()
        };
        assert_eq!(at(&mut text, Some(5_000_000_000)), "     0.000000");
        assert_eq!(at(&mut text, None), "  -          ");
        assert_eq!(at(&mut text, Some(6_000_001_000)), "     1.000001");
        assert_eq!(at(&mut text, Some(4_999_000_000)), "    -0.001000");
        // From here on nanoseconds are shown.
        assert_eq!(at(&mut text, Some(5_000_000_001)), "     0.000000001");
        assert_eq!(at(&mut text, None), "  -             ");
        let mut delta = Text::new(Time::Delta, false);
        let deltas = [1_000_000, 3_000_000, 2_000_000].map(|ns| at(&mut delta, Some(ns)));
        assert_eq!(deltas, ["     0.000000", "     0.002000", "    -0.001000"]);
        let mut epoch = Text::new(Time::Epoch, false);
        let late = i128::from(i64::MAX) * 10;
        assert_eq!(at(&mut epoch, Some(late)), "  92233720368.547758070");
        assert_eq!(at(&mut epoch, Some(-1_500_000_000)), "    -1.500000000");
    }

    #[test]
    fn frames_without_rdma() {
        let mut tcp = iwarp_frame(Vec::new());
        let line = |of: &Frame| written(|line| Text::new(Time::Epoch, false).frame(line, of));
        assert!(line(&tcp).ends_with("TCP PSH ACK  seq 1000 ack 2000  100 B\n"), "{}", line(&tcp));
        tcp.stack.insert(1, Layer::Vlan);
        tcp.ends = Some(Ends {
            src: "fe80::1".parse().unwrap(),
            dst: "fe80::2".parse().unwrap(),
            ports: Some((1, 2)),
        });
        assert!(line(&tcp).contains("[fe80::1]:1 > [fe80::2]:2  vlan TCP PSH"), "{}", line(&tcp));
        let mut arp = bare_frame(&[Layer::Eth, Layer::Arp], None);
        arp.ends = None;
        assert_eq!(line(&arp), "     7     1.500000    eth arp  74 B\n");
        arp.error = Some("cut".into());
        assert!(line(&arp).ends_with("eth arp  74 B  error: cut\n"));
    }

    #[test]
    fn pause_frames() {
        let mut frame = bare_frame(&[Layer::Eth, Layer::Pause], None);
        frame.pause = Some(Pause::Link(65535));
        assert_eq!(told(&frame), "PAUSE  stop for 65535 quanta");
        frame.pause = Some(Pause::Link(0));
        assert_eq!(told(&frame), "PAUSE  go on");
        frame.pause = Some(Pause::Priorities(0b1001_0000, [9, 9, 9, 9, 0, 9, 9, 7]));
        assert_eq!(told(&frame), "PFC  priority 4: go on, priority 7: stop for 7 quanta");
    }

    #[test]
    fn private_data_is_text_or_hex() {
        assert_eq!(written(|line| private_data(line, &[0; 56])), "");
        assert_eq!(written(|line| private_data(line, b"hello\0\0")), "  private data \"hello\"");
        assert_eq!(written(|line| private_data(line, &[1, 0, 2, 0])), "  private data 010002");
        let long = written(|line| private_data(line, &[0xab; 20]));
        assert_eq!(long, format!("  private data {}... (20 B)", "ab".repeat(16)));
        // Nothing that a terminal would obey.
        assert_eq!(written(|line| private_data(line, b"\x1b[2J")), "  private data 1b5b324a");
    }

    #[test]
    fn every_field_stands_below_the_line() {
        let mut write = roce_of(with_reth(0x0a, 100), 100);
        write.icrc = IcrcState::Bad;
        let lines = written(|line| Text::new(Time::Epoch, true).frame(line, &roce_frame(write)));
        for line in [
            "        stack: eth ipv4 udp bth",
            "        roce",
            "          dest_qp: 0x000012",
            "          ack_req: no",
            "          icrc: bad",
            "          reth",
            "            va: 0x00007f0000001000",
            "            rkey: 0x0000abcd",
        ] {
            assert!(lines.contains(&format!("\n{line}\n")), "{line}\n{lines}");
        }
    }
}
