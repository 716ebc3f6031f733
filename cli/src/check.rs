//! `userdma check`: what is wrong in captures, for people and for CI.

use std::{
    collections::BTreeMap,
    fmt::Write as _,
    net::IpAddr,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::atomic::AtomicBool,
};

use anyhow::{Context, Result};
use clap::{Args, ColorChoice, ValueEnum};
use serde_json::{Value, json};
use userdma_analyze::{Analyser, End, Finding, Hint, Kind, Severity};
use userdma_proto::wire::ids::Qpn;

use crate::{
    capture::{INTERRUPTED, Read, UNREADABLE, name, read},
    dissect::stream::{shows_colours, stop_flag},
    output::{counted, note},
};

/// Say what is wrong in captures: losses, refusals, time-outs, broken rules, and whose they are
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  userdma check x.pcap                      what is wrong, where, and what to look at
  userdma check --fail-on error *.pcapng    for CI: exit 1 if an operation or a connection failed
  userdma check --json x.pcap.gz | jq -r 'select(.id == \"RC-PSN-GAP\") | .frames[0]'
  userdma check --only RC-RNR,RC-NAK-ACCESS x.pcap
  tcpdump -i eth0 -w - port 4791 | userdma check -
  userdma check --list                      every kind of finding, with its severity and meaning

A finding has an identifier, which is stable, a severity, the frames that show it, and both ends.
  error     an operation or a connection failed
  warning   it works, but something is wrong or costs time
  note      worth saying; never a reason to fail

Queue pairs are joined by the connection manager's messages, or by their answers. Where neither is in the
capture, --hints joins them: a line a pair, such as
  10.0.0.1 0x11  10.0.0.2 0x2a     # comment

Exit status: 0 if nothing at or above --fail-on was found, 1 if something was, 2 if a capture cannot be
read or not to its end, 130 after Ctrl-C.")]
pub(crate) struct Check {
    /// Captures: pcap or pcapng, gzip'd or not; - for stdin
    #[arg(value_name = "FILE", required_unless_present = "list")]
    files: Vec<PathBuf>,
    /// Print JSON: an object a finding, and one a file at its end
    #[arg(long)]
    json: bool,
    /// The least severity that makes the exit status 1
    #[arg(long, value_enum, value_name = "SEVERITY", default_value_t = FailOn::Warning)]
    fail_on: FailOn,
    /// Only these kinds of findings
    #[arg(long, value_name = "ID", value_delimiter = ',', value_parser = kind)]
    only: Vec<Kind>,
    /// All but these kinds of findings
    #[arg(long, value_name = "ID", value_delimiter = ',', value_parser = kind)]
    ignore: Vec<Kind>,
    /// At most so many findings of a kind are printed of a file, 0 for all (JSON has all)
    #[arg(long, value_name = "N", default_value_t = 20)]
    limit: usize,
    /// Queue pairs that belong together
    #[arg(long, value_name = "FILE")]
    hints: Option<PathBuf>,
    /// Another UDP port of RoCEv2; may be given several times
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    roce_port: Vec<u16>,
    /// List every kind of finding
    #[arg(long, conflicts_with = "files")]
    list: bool,
    /// Colours in text: auto is on a terminal, unless NO_COLOR is set
    #[arg(long, value_name = "WHEN", default_value = "auto")]
    color: ColorChoice,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum FailOn {
    Warning,
    Error,
    /// Whatever is found
    Never,
}

/// A kind by its identifier.
pub(crate) fn kind(text: &str) -> Result<Kind, String> {
    Kind::from_id(text).ok_or_else(|| {
        let near =
            Kind::ALL.iter().min_by_key(|kind| distance(kind.id(), &text.to_ascii_uppercase()));
        match near {
            Some(near) => {
                format!("there is no such kind; the nearest is {near}, and --list has all")
            }
            None => "there is no such kind".into(),
        }
    })
}

/// How many letters differ, roughly: for a hint.
fn distance(a: &str, b: &str) -> usize {
    let (a, b) = (a.as_bytes(), b.as_bytes());
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.iter().enumerate() {
        let mut before = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let here = (before + usize::from(x != y)).min(row[j] + 1).min(row[j + 1] + 1);
            before = std::mem::replace(&mut row[j + 1], here);
        }
    }
    row[b.len()]
}

/// What came of a file.
struct Checked {
    name: String,
    findings: Vec<Finding>,
    frames: u64,
    first_time: Option<i128>,
    ended: Read,
}

pub(crate) fn run(args: &Check) -> Result<ExitCode> {
    if args.list {
        list(args.json);
        return Ok(ExitCode::SUCCESS);
    }
    let hints = match &args.hints {
        Some(path) => match read_hints(path) {
            Ok(hints) => hints,
            Err(e) => {
                note(&format!("error: {e:#}"));
                return Ok(ExitCode::from(UNREADABLE));
            }
        },
        None => Vec::new(),
    };
    let stop = stop_flag().context("cannot watch for Ctrl-C")?;
    let (mut unreadable, mut failed, mut interrupted) = (false, false, false);
    for (n, file) in args.files.iter().enumerate() {
        let checked = match check(args, file, &hints, &stop) {
            Ok(checked) => checked,
            Err(why) => {
                note(&format!("error: {}: {why}", name(file)));
                unreadable = true;
                continue;
            }
        };
        failed |= checked.findings.iter().any(|finding| args.fails(finding.kind.severity()));
        let mut out = String::new();
        if args.json {
            checked.json(&mut out);
        } else {
            if n > 0 {
                out.push('\n');
            }
            checked.text(args, &mut out);
        }
        crate::output::line(out.trim_end_matches('\n'));
        match &checked.ended {
            Read::Whole => {}
            Read::Early(why) => {
                note(&format!("error: {}: {why}", checked.name));
                unreadable = true;
            }
            Read::Interrupted => {
                interrupted = true;
                break;
            }
        }
    }
    Ok(match (interrupted, unreadable, failed) {
        (true, ..) => ExitCode::from(INTERRUPTED),
        (_, true, _) => ExitCode::from(UNREADABLE),
        (.., true) => ExitCode::FAILURE,
        _ => ExitCode::SUCCESS,
    })
}

impl Check {
    fn fails(&self, severity: Severity) -> bool {
        match self.fail_on {
            FailOn::Warning => severity >= Severity::Warning,
            FailOn::Error => severity >= Severity::Error,
            FailOn::Never => false,
        }
    }

    fn wants(&self, kind: Kind) -> bool {
        (self.only.is_empty() || self.only.contains(&kind)) && !self.ignore.contains(&kind)
    }
}

fn check(args: &Check, file: &Path, hints: &[Hint], stop: &AtomicBool) -> Result<Checked, String> {
    let mut analyser = Analyser::new();
    for &hint in hints {
        analyser.hint(hint);
    }
    let (mut frames, mut first_time, mut findings) = (0, None, Vec::new());
    let ended = read(file, &args.roce_port, stop, |frame| {
        frames += 1;
        first_time = first_time.or(frame.time_ns);
        analyser.push(frame);
        if analyser.has_findings() {
            findings.append(&mut analyser.take());
        }
    })?;
    analyser.finish();
    findings.append(&mut analyser.take());
    findings.retain(|finding| args.wants(finding.kind));
    findings.sort_by(|a, b| {
        (a.frames.first(), a.kind, &a.frames).cmp(&(b.frames.first(), b.kind, &b.frames))
    });
    Ok(Checked { name: name(file), findings, frames, first_time, ended })
}

impl Checked {
    /// How many there are of each severity: errors, warnings, notes.
    fn counts(&self) -> [u64; 3] {
        let count = |severity| {
            self.findings.iter().filter(|finding| finding.kind.severity() == severity).count()
                as u64
        };
        [count(Severity::Error), count(Severity::Warning), count(Severity::Note)]
    }

    fn text(&self, args: &Check, out: &mut String) {
        let colours = shows_colours(args.color);
        let paint = |severity: Severity| match (colours, severity) {
            (false, _) => ("", ""),
            (true, Severity::Error) => ("\x1b[1;31m", "\x1b[0m"),
            (true, Severity::Warning) => ("\x1b[33m", "\x1b[0m"),
            (true, Severity::Note) => ("\x1b[36m", "\x1b[0m"),
        };
        let [errors, warnings, notes] = self.counts();
        let _ = write!(out, "{}: {}: ", self.name, counted(self.frames, "frame"));
        let _ = match errors + warnings + notes {
            0 => writeln!(out, "nothing found"),
            _ => writeln!(
                out,
                "{}, {}, {}",
                counted(errors, "error"),
                counted(warnings, "warning"),
                counted(notes, "note")
            ),
        };
        let mut told: BTreeMap<Kind, usize> = BTreeMap::new();
        for finding in &self.findings {
            let kind = finding.kind;
            let count = told.entry(kind).or_default();
            *count += 1;
            if args.limit > 0 && *count > args.limit {
                continue;
            }
            let (on, off) = paint(kind.severity());
            let _ = write!(
                out,
                "  {on}{:<7} {:<20}{off} {}",
                kind.severity(),
                kind.id(),
                frames(&finding.frames)
            );
            if let (Some(time), Some(first)) = (finding.time_ns, self.first_time) {
                let _ = write!(out, "  at {:.6} s", (time - first) as f64 / 1e9);
            }
            if let (Some(from), Some(to)) = (finding.from, finding.to) {
                let _ = write!(out, "  {from} > {to}");
            }
            let _ = writeln!(out, "\n          {}", finding.text);
            if *count == 1 {
                let _ = writeln!(out, "          look at: {}", kind.look_at());
            }
        }
        for (kind, count) in told {
            if args.limit > 0 && count > args.limit {
                let more = count - args.limit;
                let _ = writeln!(out, "  and {more} more {kind} (--limit 0 prints all)");
            }
        }
    }

    fn json(&self, out: &mut String) {
        for finding in &self.findings {
            let object = json!({
                "file": self.name,
                "id": finding.kind.id(),
                "severity": finding.kind.severity().name(),
                "frames": finding.frames,
                // As `dissect` has it: an i128 is no number of JSON's library.
                "time_ns": finding.time_ns.and_then(|ns| i64::try_from(ns).ok()),
                "from": finding.from.map(end),
                "to": finding.to.map(end),
                "text": finding.text,
                "look_at": finding.kind.look_at(),
            });
            let _ = writeln!(out, "{object}");
        }
        let [errors, warnings, notes] = self.counts();
        let object = json!({
            "file": self.name,
            "frames": self.frames,
            "errors": errors,
            "warnings": warnings,
            "notes": notes,
            "whole": self.ended == Read::Whole,
        });
        let _ = writeln!(out, "{object}");
    }
}

/// An end, for JSON.
pub(crate) fn end(end: End) -> Value {
    match end {
        End::Host(ip) => json!({"ip": ip.to_string()}),
        End::Qp(ip, qpn) => json!({"ip": ip.to_string(), "qp": qpn.0}),
        End::Socket(addr) => json!({"ip": addr.ip().to_string(), "port": addr.port()}),
    }
}

/// Frame numbers for people: neighbours together, and not too many.
fn frames(numbers: &[u64]) -> String {
    const MOST: usize = 6;
    let mut runs: Vec<(u64, u64)> = Vec::new();
    for &number in numbers {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == number => *last = number,
            _ => runs.push((number, number)),
        }
    }
    let word = if numbers.len() == 1 { "frame" } else { "frames" };
    let shown: Vec<_> = runs
        .iter()
        .take(MOST)
        .map(|&(first, last)| match last - first {
            0 => first.to_string(),
            1 => format!("{first}, {last}"),
            _ => format!("{first}-{last}"),
        })
        .collect();
    let more =
        if runs.len() > MOST { format!(" and {} more", runs.len() - MOST) } else { String::new() };
    format!("{word} {}{more}", shown.join(", "))
}

fn list(as_json: bool) {
    for kind in Kind::ALL {
        if as_json {
            crate::output::json(&json!({
                "id": kind.id(),
                "severity": kind.severity().name(),
                "meaning": kind.meaning(),
                "look_at": kind.look_at(),
                "rule": kind.rule(),
            }));
        } else {
            crate::output::line(&format!(
                "{:<7} {:<20} {}",
                kind.severity(),
                kind.id(),
                kind.meaning()
            ));
        }
    }
}

/// Reads a file of hints.
fn read_hints(path: &Path) -> Result<Vec<Hint>> {
    let text =
        std::fs::read_to_string(path).with_context(|| format!("--hints {}", path.display()))?;
    let mut hints = Vec::new();
    for (n, line) in text.lines().enumerate() {
        let line = line.split('#').next().unwrap_or_default();
        let words: Vec<_> = line.split_whitespace().collect();
        if words.is_empty() {
            continue;
        }
        let hint = hint(&words).with_context(|| {
            format!(
                "--hints {}, line {}: {line:?} is no pair: ADDRESS QP ADDRESS QP, such as 10.0.0.1 0x11 10.0.0.2 0x2a",
                path.display(),
                n + 1
            )
        })?;
        hints.push(hint);
    }
    Ok(hints)
}

fn hint(words: &[&str]) -> Option<Hint> {
    let [a, a_qp, b, b_qp] = words else { return None };
    let qp = |text: &str| {
        let number = match text.strip_prefix("0x") {
            Some(hex) => u32::from_str_radix(hex, 16).ok()?,
            None => text.parse().ok()?,
        };
        (number < 1 << 24).then_some(Qpn(number))
    };
    Some(Hint {
        ends: [(a.parse::<IpAddr>().ok()?, qp(a_qp)?), (b.parse::<IpAddr>().ok()?, qp(b_qp)?)],
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frame_numbers_are_put_together() {
        assert_eq!(frames(&[5]), "frame 5");
        assert_eq!(frames(&[5, 6]), "frames 5, 6");
        assert_eq!(frames(&[1, 2, 3, 4, 9]), "frames 1-4, 9");
        assert_eq!(frames(&[1, 3, 5, 7, 9, 11, 13, 15]), "frames 1, 3, 5, 7, 9, 11 and 2 more");
    }

    #[test]
    fn hints_are_pairs() {
        let good = hint(&["10.0.0.1", "0x11", "fe80::1", "42"]).unwrap();
        assert_eq!(good.ends[1], ("fe80::1".parse().unwrap(), Qpn(42)));
        for bad in [
            &["10.0.0.1", "0x11", "10.0.0.2"][..],
            &["x", "1", "10.0.0.2", "2"],
            &["10.0.0.1", "0x1000000", "10.0.0.2", "2"],
        ] {
            assert!(hint(bad).is_none(), "{bad:?}");
        }
    }

    #[test]
    fn a_wrong_kind_names_the_nearest() {
        assert_eq!(kind("rc-psn-gap"), Ok(Kind::RcPsnGap));
        assert!(kind("RC-PSNGAP").unwrap_err().contains("RC-PSN-GAP"));
    }
}
