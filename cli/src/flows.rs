//! `userdma flows`: who talks to whom in captures, what, how much, and how long it takes.

use std::{path::PathBuf, process::ExitCode};

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use comfy_table::{CellAlignment, Table, presets::UTF8_FULL_CONDENSED};
use serde_json::{Value, json};
use userdma_analyze::{
    Analyser, End,
    flow::{Flow, Message, Times, Traffic},
};

use crate::{
    capture::{Read, read},
    dissect::stream::stop_flag,
    output::note,
};

/// Table of a capture's flows: ends, messages, octets, goodput, what was sent again, latencies
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  userdma flows x.pcap
  userdma flows --sort octets --top 10 x.pcapng.gz
  userdma flows --format json x.pcap | jq -c 'select(.resent > 0) | [.from, .to, .resent]'
  userdma flows --format csv *.pcap > flows.csv

A flow is a connection, or datagrams from one queue pair to another; each direction in which something was
asked has a line. Octets are those of payloads, of READs those of their answers; goodput is octets over the
time from the flow's first frame to its last. Latencies are from a message's last packet to its ACK (SEND,
WRITE), and from a request to the last packet of its answer (READ), of messages that were sent once; over
TCP nothing acknowledges a SEND or a WRITE. p50 and p99 are right to an eighth.

Exit status: 0; 2 if a capture cannot be read or not to its end; 130 after Ctrl-C.")]
pub(crate) struct Flows {
    /// Captures: pcap or pcapng, gzip'd or not; - for stdin
    #[arg(value_name = "FILE", required = true)]
    files: Vec<PathBuf>,
    /// A table for people, a JSON object a line, or comma-separated values
    #[arg(short, long, value_enum, default_value_t = Format::Text)]
    format: Format,
    /// What comes first
    #[arg(short, long, value_enum, default_value_t = Sort::Time)]
    sort: Sort,
    /// Only so many lines of a file
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    top: Option<u64>,
    /// Another UDP port of RoCEv2; may be given several times
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    roce_port: Vec<u16>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    Text,
    Json,
    Csv,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Sort {
    /// The flow whose first frame comes first
    Time,
    /// The most octets
    Octets,
    /// The most packets that were sent again
    Resent,
}

/// A direction of a flow.
struct Line<'a> {
    /// The flow's number in the capture, from 1.
    number: usize,
    flow: &'a Flow,
    from: End,
    to: End,
    sent: &'a Traffic,
}

impl Line<'_> {
    fn octets(&self) -> u64 {
        self.sent.octets + self.sent.read_octets
    }

    /// Octets a second.
    fn goodput(&self) -> Option<f64> {
        self.flow
            .seconds()
            .filter(|&seconds| seconds > 0.0)
            .map(|seconds| self.octets() as f64 / seconds)
    }

    /// Of all packets of requests, those that were sent again, in percent.
    fn resent_percent(&self) -> f64 {
        let all = self.sent.packets + self.sent.resent;
        if all == 0 { 0.0 } else { 100.0 * self.sent.resent as f64 / all as f64 }
    }
}

pub(crate) fn run(args: &Flows) -> Result<ExitCode> {
    let stop = stop_flag().context("cannot watch for Ctrl-C")?;
    let (mut unreadable, mut interrupted) = (false, false);
    if args.format == Format::Csv {
        crate::output::line(CSV);
    }
    for (n, file) in args.files.iter().enumerate() {
        let mut analyser = Analyser::with_flows();
        let ended = match read(file, &args.roce_port, &stop, |frame| {
            analyser.push(frame);
            // What is wrong with it is another command's.
            drop(analyser.take());
        }) {
            Ok(ended) => ended,
            Err(why) => {
                note(&format!("error: {}: {why}", crate::capture::name(file)));
                unreadable = true;
                continue;
            }
        };
        analyser.finish();
        let flows = analyser.flows();
        let mut lines = lines(&flows);
        match args.sort {
            Sort::Time => {}
            Sort::Octets => lines.sort_by_key(|line| std::cmp::Reverse(line.octets())),
            Sort::Resent => lines.sort_by_key(|line| std::cmp::Reverse(line.sent.resent)),
        }
        if let Some(top) = args.top {
            lines.truncate(usize::try_from(top).unwrap_or(usize::MAX));
        }
        let name = crate::capture::name(file);
        match args.format {
            Format::Text => {
                if n > 0 {
                    crate::output::line("");
                }
                text(&name, &flows, &lines);
            }
            Format::Json => lines.iter().for_each(|line| crate::output::json(&object(&name, line))),
            Format::Csv => lines.iter().for_each(|line| crate::output::line(&csv(&name, line))),
        }
        match ended {
            Read::Whole => {}
            Read::Early(why) => {
                note(&format!("error: {name}: {why}"));
                unreadable = true;
            }
            Read::Interrupted => {
                interrupted = true;
                break;
            }
        }
    }
    Ok(match (interrupted, unreadable) {
        (true, _) => ExitCode::from(crate::capture::INTERRUPTED),
        (_, true) => ExitCode::from(crate::capture::UNREADABLE),
        _ => ExitCode::SUCCESS,
    })
}

/// The directions in which something was asked.
fn lines(flows: &[Flow]) -> Vec<Line<'_>> {
    let mut lines = Vec::new();
    for (n, flow) in flows.iter().enumerate() {
        for side in 0..2 {
            let sent = &flow.sent[side];
            // A flow of which only answers are in the capture has a line all the same.
            let silent = flow.sent.iter().all(|sent| sent.packets == 0);
            if sent.packets > 0 || silent && side == 0 {
                let (from, to) = (flow.ends[side], flow.ends[1 - side]);
                lines.push(Line { number: n + 1, flow, from, to, sent });
            }
        }
    }
    lines
}

fn text(name: &str, flows: &[Flow], lines: &[Line<'_>]) {
    crate::output::line(&format!("{name}: {}", crate::output::counted(flows.len() as u64, "flow")));
    if lines.is_empty() {
        return;
    }
    let mut table = Table::new();
    table.load_preset(UTF8_FULL_CONDENSED);
    table.set_header([
        "#",
        "",
        "from",
        "to",
        "frames",
        "seconds",
        "messages",
        "octets",
        "B/s",
        "resent",
        "RNR",
        "NAK",
        "p50/p99/max",
        "MTU",
        "CE/CNP",
    ]);
    for at in [0, 4, 5, 7, 8, 9, 10, 11, 13] {
        if let Some(column) = table.column_mut(at) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    for line in lines {
        let sent = line.sent;
        let messages: Vec<_> = Message::ALL
            .iter()
            .filter(|&&kind| sent.messages[kind as usize] > 0)
            .map(|&kind| format!("{} {}", sent.messages[kind as usize], kind.name()))
            .collect();
        let latencies: Vec<_> = times(sent)
            .into_iter()
            .filter(|(_, times)| times.count() > 0)
            .map(|(name, times)| {
                let at = |share| times.quantile_ns(share).unwrap_or_default();
                format!("{name} {}/{}/{}", short(at(0.5)), short(at(0.99)), short(times.max_ns()))
            })
            .collect();
        let [first, last] = line.flow.frames;
        table.add_row([
            line.number.to_string(),
            line.flow.protocol.to_string(),
            line.from.to_string(),
            line.to.to_string(),
            format!("{first}-{last}"),
            line.flow.seconds().map_or(String::new(), |seconds| format!("{seconds:.6}")),
            messages.join(", "),
            line.octets().to_string(),
            line.goodput().map_or(String::new(), |rate| crate::output::octets(rate as u64)),
            match sent.resent {
                0 => String::new(),
                n => format!("{n} ({:.1} %)", line.resent_percent()),
            },
            none_for_0(sent.rnr_naks),
            none_for_0(sent.naks),
            latencies.join("\n"),
            sent.path_mtu.map_or(String::new(), |mtu| mtu.to_string()),
            match (sent.marked, sent.cnps) {
                (0, 0) => String::new(),
                (marked, cnps) => format!("{marked}/{cnps}"),
            },
        ]);
    }
    crate::output::line(&table.to_string());
}

fn none_for_0(n: u64) -> String {
    if n == 0 { String::new() } else { n.to_string() }
}

/// A time for a table.
fn short(ns: u64) -> String {
    match ns {
        0..10_000 => format!("{:.1}us", ns as f64 / 1e3),
        10_000..10_000_000 => format!("{}us", ns / 1000),
        10_000_000..10_000_000_000 => format!("{}ms", ns / 1_000_000),
        _ => format!("{}s", ns / 1_000_000_000),
    }
}

fn times(sent: &Traffic) -> [(&'static str, &Times); 3] {
    [("send", &sent.send_to_ack), ("write", &sent.write_to_ack), ("read", &sent.read_to_last)]
}

fn object(name: &str, line: &Line<'_>) -> Value {
    let sent = line.sent;
    let messages: serde_json::Map<_, _> = Message::ALL
        .iter()
        .map(|&kind| (kind.name().into(), sent.messages[kind as usize].into()))
        .collect();
    let latency: serde_json::Map<_, _> = times(sent)
        .into_iter()
        .filter(|(_, times)| times.count() > 0)
        .map(|(name, times)| {
            let value = json!({
                "count": times.count(),
                "p50_ns": times.quantile_ns(0.5),
                "p99_ns": times.quantile_ns(0.99),
                "max_ns": times.max_ns(),
            });
            (name.into(), value)
        })
        .collect();
    json!({
        "file": name,
        "flow": line.number,
        "protocol": line.flow.protocol.name(),
        "from": crate::check::end(line.from),
        "to": crate::check::end(line.to),
        "first_frame": line.flow.frames[0],
        "last_frame": line.flow.frames[1],
        "seconds": line.flow.seconds(),
        "packets": sent.packets,
        "messages": messages,
        "octets": sent.octets,
        "read_octets": sent.read_octets,
        "goodput": line.goodput(),
        "resent": sent.resent,
        "resent_percent": line.resent_percent(),
        "rnr_naks": sent.rnr_naks,
        "naks": sent.naks,
        "path_mtu": sent.path_mtu,
        "marked": sent.marked,
        "cnps": sent.cnps,
        "latency": latency,
    })
}

/// The columns of `--format csv`.
const CSV: &str = "file,flow,protocol,from_ip,from_qp,from_port,to_ip,to_qp,to_port,first_frame,last_frame,seconds,packets,\
                   sends,writes,reads,atomics,others,octets,read_octets,goodput,resent,rnr_naks,naks,path_mtu,marked,cnps,\
                   send_p50_ns,send_p99_ns,send_max_ns,write_p50_ns,write_p99_ns,write_max_ns,read_p50_ns,read_p99_ns,\
                   read_max_ns";

fn csv(name: &str, line: &Line<'_>) -> String {
    let sent = line.sent;
    let mut values = vec![quoted(name), line.number.to_string(), line.flow.protocol.to_string()];
    for end in [line.from, line.to] {
        let (ip, qp, port) = match end {
            End::Host(ip) => (ip, String::new(), String::new()),
            End::Qp(ip, qpn) => (ip, qpn.0.to_string(), String::new()),
            End::Socket(addr) => (addr.ip(), String::new(), addr.port().to_string()),
        };
        values.extend([ip.to_string(), qp, port]);
    }
    values.extend(line.flow.frames.map(|frame| frame.to_string()));
    values.push(line.flow.seconds().map_or(String::new(), |seconds| format!("{seconds:.9}")));
    values.push(sent.packets.to_string());
    values.extend(sent.messages.map(|n| n.to_string()));
    values.extend([sent.octets, sent.read_octets].map(|n| n.to_string()));
    values.push(line.goodput().map_or(String::new(), |rate| format!("{rate:.0}")));
    values.extend([sent.resent, sent.rnr_naks, sent.naks].map(|n| n.to_string()));
    values.push(sent.path_mtu.map_or(String::new(), |mtu| mtu.to_string()));
    values.extend([sent.marked, sent.cnps].map(|n| n.to_string()));
    for (_, times) in times(sent) {
        let max = (times.count() > 0).then(|| times.max_ns());
        let all = [times.quantile_ns(0.5), times.quantile_ns(0.99), max];
        values.extend(all.map(|ns| ns.map_or(String::new(), |ns| ns.to_string())));
    }
    values.join(",")
}

/// As RFC 4180 has it.
fn quoted(text: &str) -> String {
    if text.contains([',', '"', '\n', '\r']) {
        format!("\"{}\"", text.replace('"', "\"\""))
    } else {
        text.into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_with_commas_are_quoted() {
        assert_eq!(quoted("a.pcap"), "a.pcap");
        assert_eq!(quoted("a,\"b\".pcap"), "\"a,\"\"b\"\".pcap\"");
    }

    #[test]
    fn times_are_short() {
        let shown = [0, 1500, 45_000, 12_345_678, 20_000_000_000].map(short);
        assert_eq!(shown, ["0.0us", "1.5us", "45us", "12ms", "20s"]);
    }
}
