//! `userdma sim`: two machines on a network with faults, in virtual time, by a seed.
//!
//! The machines, the network and the judge are [`userdma_proto::sim::roce`]'s. No socket is opened.

use std::{fs, path::PathBuf, process::ExitCode};

use anyhow::{Context, Result};
use clap::{Args, ValueEnum, value_parser};
use serde_json::{Value, json};
use userdma_analyze::{Kind as Finding, scenes};
use userdma_proto::{
    roce::{PathMtu, Window},
    sim::{
        Impairments,
        roce::{Report, Settings, run as simulate},
    },
    verbs::QpType,
};

use crate::{
    Usage,
    output::{counted, json, line, octets, seconds},
};

/// Simulate RoCEv2 through loss, by a seed: every operation, both directions, judged by a model
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  userdma sim --seed 7                                  random work on a random network
  userdma sim --seed 7 --impair loss=5%,reorder=1%,delay=1ms --mtu 4096
  userdma sim --seed 7 --pcap run.pcapng && userdma dissect run.pcapng
  userdma sim --show RC-PSN-GAP --pcap x.pcap && userdma check x.pcap
  for s in $(seq 100); do userdma sim --seed $s --json; done | jq -c 'select(.verdict != \"right\")'

What is not given is chosen by the seed. The same arguments give the same run on every machine.

--impair: loss=1%, burst=0.1%/30% (a packet begins a burst of losses, ends it), dup=1%,
reorder=1%/3/5ms (behind up to 3 later ones, for 5 ms at most), corrupt=0.1%/2 (up to 2 bits),
ecn=1%, delay=1ms, jitter=2ms, rate=100MB,queue=64kB,mark=20kB (a link, what waits for it, what is
marked from there on), seed=7 (that of --seed, if none is given); or none. All but the first value
after each = may be left out.

The capture has two interfaces: sent, with what became of each packet, and delivered.

Exit status: 0; 1 if the run was not right (the verdict says what), or the capture cannot be
written; 2 for wrong arguments.")]
pub(crate) struct Sim {
    /// What chance does
    #[arg(long, value_name = "N", default_value_t = 1)]
    seed: u64,
    /// What the network does, such as loss=1%,dup=1%,delay=2ms
    #[arg(long, value_name = "LIST")]
    impair: Option<Impairments>,
    /// Kind of the queue pairs
    #[arg(long = "type", value_enum, default_value_t = Kind::Rc)]
    kind: Kind,
    /// Queue pairs of each machine
    #[arg(long, value_name = "N", value_parser = value_parser!(u8).range(1..=Settings::MAX_PAIRS as i64))]
    pairs: Option<u8>,
    /// Operations of each queue pair
    #[arg(long, value_name = "N", value_parser = value_parser!(u16).range(0..=Settings::MAX_OPERATIONS as i64))]
    ops: Option<u16>,
    /// Octets of the longest message
    #[arg(long, value_name = "OCTETS", value_parser = value_parser!(u32).range(0..=i64::from(Settings::MAX_LONGEST)))]
    size: Option<u32>,
    /// Path MTU: 256, 512, 1024, 2048 or 4096
    #[arg(long, value_name = "OCTETS", value_parser = mtu)]
    mtu: Option<PathMtu>,
    /// Packets that a queue pair has on the way
    #[arg(long, value_name = "PACKETS", value_parser = value_parser!(u32).range(1..=4_194_304))]
    window: Option<u32>,
    /// RC: both sides keep what comes out of order, and only what is missing is sent again, as between
    /// two userdma
    #[arg(long)]
    out_of_order: bool,
    /// How often it is tried again before a queue pair gives up
    #[arg(long, value_name = "N", value_parser = value_parser!(u8).range(0..=7))]
    retry: Option<u8>,
    /// Write all packets as pcapng
    #[arg(long, value_name = "FILE")]
    pcap: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    /// Instead: write to --pcap a made-up capture that shows this kind of finding (`userdma check --list`)
    #[arg(long, value_name = "ID", value_parser = crate::check::kind, requires = "pcap", conflicts_with_all = [
        "seed", "impair", "kind", "pairs", "ops", "size", "mtu", "window", "out_of_order", "retry", "json"
    ])]
    show: Option<Finding>,
    /// With --show: a capture that nearly shows it, and does not
    #[arg(long, requires = "show")]
    nearly: bool,
}

#[derive(ValueEnum, Debug, Clone, Copy)]
enum Kind {
    /// Reliable connections
    Rc,
    /// Unreliable connections
    Uc,
    /// Datagrams
    Ud,
}

/// A path MTU as users write it.
pub(crate) fn mtu(text: &str) -> Result<PathMtu, String> {
    let mtu = text.parse().ok().and_then(PathMtu::from_octets);
    mtu.ok_or_else(|| "a path MTU is 256, 512, 1024, 2048 or 4096".into())
}

impl Sim {
    fn settings(&self) -> Settings {
        let mut s = Settings::from_seed(self.seed);
        s.kind = match self.kind {
            Kind::Rc => QpType::Rc,
            Kind::Uc => QpType::Uc,
            Kind::Ud => QpType::Ud,
        };
        if let Some(impair) = self.impair {
            s.impairments = impair;
            if impair.seed == 0 {
                s.impairments.seed = self.seed;
            }
        }
        s.pairs = self.pairs.map_or(s.pairs, usize::from);
        s.operations = self.ops.map_or(s.operations, usize::from);
        s.longest = self.size.unwrap_or(s.longest);
        s.mtu = self.mtu.unwrap_or(s.mtu);
        s.retry_cnt = self.retry.unwrap_or(s.retry_cnt);
        if let Some(packets) = self.window {
            // IP, UDP and RoCE headers are about 60 octets.
            s.window = Window { packets, octets: packets.saturating_mul(s.mtu.octets() + 60) };
        }
        s.out_of_order = self.out_of_order;
        s.record = self.pcap.is_some();
        s
    }
}

/// Octets of all messages, at most: both machines, the model and a capture are in memory.
const MOST_OCTETS: u64 = 1 << 30;

pub(crate) fn run(args: &Sim) -> Result<ExitCode> {
    if let (Some(kind), Some(path)) = (args.show, &args.pcap) {
        let scene = scenes::of(kind);
        let capture = if args.nearly { scene.nearly } else { scene.shows };
        fs::write(path, capture.pcap())
            .with_context(|| format!("cannot write {}", path.display()))?;
        return Ok(ExitCode::SUCCESS);
    }

    let settings = args.settings();
    let (pairs, ops, size) = (settings.pairs, settings.operations, settings.longest);
    let all = 2 * pairs as u64 * ops as u64 * u64::from(size);
    if all > MOST_OCTETS {
        return Err(Usage(format!(
            "{pairs} queue pairs of each machine, {ops} operations of each, up to {size} octets an operation: \
             that may be {}, and all of it is kept in memory. At most {}: lower --pairs, --ops or --size",
            octets(all),
            octets(MOST_OCTETS)
        ))
        .into());
    }
    let report = simulate(&settings);
    if args.json {
        json(&object(args, &settings, &report));
    } else {
        text(args, &settings, &report);
    }
    if let (Some(path), Some(capture)) = (&args.pcap, &report.capture) {
        fs::write(path, capture).with_context(|| format!("cannot write {}", path.display()))?;
        if !args.json {
            let path = path.display();
            line(&format!(
                "capture      {path}, {}: userdma dissect {path}",
                octets(capture.len() as u64)
            ));
        }
    }
    Ok(if report.verdict.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn kind(settings: &Settings) -> &'static str {
    match settings.kind {
        QpType::Rc => "RC",
        QpType::Uc => "UC",
        QpType::Ud => "UD",
    }
}

fn text(args: &Sim, s: &Settings, report: &Report) {
    let Report { stats, network, .. } = report;
    let say = |name: &str, what: &str| line(&format!("{name:<12} {what}"));
    let family = if s.ipv6 { "IPv6" } else { "IPv4" };
    line(&format!(
        "seed {}: {} {} on each of two machines, {} each, {family}, MTU {}, window {} and {}, \
         retry_cnt {}",
        args.seed,
        s.pairs,
        if s.pairs == 1 {
            format!("{} queue pair", kind(s))
        } else {
            format!("{} queue pairs", kind(s))
        },
        counted(s.operations as u64, "operation"),
        s.mtu.octets(),
        counted(s.window.packets.into(), "packet"),
        octets(s.window.octets.into()),
        s.retry_cnt,
    ));
    say("impairments", &s.impairments.to_string());
    let each = report.operations.iter().map(|(name, n)| format!("{n} {name}"));
    say("operations", &each.collect::<Vec<_>>().join(", "));
    say(
        "completions",
        &format!(
            "{} succeeded, {} failed, {} flushed",
            report.succeeded, report.failed, report.flushed
        ),
    );
    say(
        "queue pairs",
        &format!(
            "{} sent, {} resent, {} received; {}, {}, {}, {}, {}",
            counted(stats.packets_sent, "packet"),
            stats.packets_resent,
            stats.packets_received,
            counted(stats.timeouts, "time-out"),
            counted(stats.sequence_naks_received, "sequence NAK"),
            counted(stats.rnr_naks_received, "RNR NAK"),
            counted(stats.duplicates, "duplicate"),
            counted(stats.ghosts, "ghost"),
        ),
    );
    say("network", &network.to_string());
    say("bad ICRC", &report.bad_icrc.to_string());
    say("time", &format!("{} (virtual), {}", seconds(report.time), counted(report.steps, "step")));
    if !report.given_up.is_empty() {
        let each = report.given_up.iter().map(|qpn| qpn.0.to_string());
        say("gave up", &format!("queue pairs {}", each.collect::<Vec<_>>().join(", ")));
    }
    match &report.verdict {
        Ok(()) => say("verdict", "right"),
        Err(problem) => say("verdict", &format!("WRONG: {problem}")),
    }
}

fn object(args: &Sim, s: &Settings, report: &Report) -> Value {
    let Report { stats, network, .. } = report;
    let verdict = match &report.verdict {
        Ok(()) => "right",
        Err(problem) => problem,
    };
    json!({
        "seed": args.seed,
        "type": kind(s),
        "pairs": s.pairs,
        "ops": s.operations,
        "size": s.longest,
        "mtu": s.mtu.octets(),
        "window": { "packets": s.window.packets, "octets": s.window.octets },
        "retry_cnt": s.retry_cnt,
        "ipv6": s.ipv6,
        "impairments": s.impairments.to_string(),
        "operations": report.operations,
        "completions": {
            "succeeded": report.succeeded,
            "failed": report.failed,
            "flushed": report.flushed,
        },
        "queue_pairs": {
            "packets_sent": stats.packets_sent,
            "packets_resent": stats.packets_resent,
            "packets_received": stats.packets_received,
            "payload_sent": stats.payload_sent,
            "payload_received": stats.payload_received,
            "timeouts": stats.timeouts,
            "sequence_naks": stats.sequence_naks_received,
            "rnr_naks": stats.rnr_naks_received,
            "duplicates": stats.duplicates,
            "ghosts": stats.ghosts,
            "ce_marked": stats.ce_marked,
        },
        "network": {
            "packets": network.handled,
            "delivered": network.delivered,
            "dropped": network.dropped(),
            "duplicated": network.duplicated,
            "reordered": network.reordered,
            "corrupted": network.corrupted,
            "marked": network.marked,
        },
        "bad_icrc": report.bad_icrc,
        "gave_up": report.given_up.iter().map(|qpn| qpn.0).collect::<Vec<_>>(),
        "time_ns": u64::try_from(report.time.as_nanos()).unwrap_or(u64::MAX),
        "steps": report.steps,
        "verdict": verdict,
    })
}
