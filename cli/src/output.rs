//! Printing that survives a closed pipe, and small formatters.

use std::{
    io::{self, Write},
    process::{self, ExitCode},
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use serde_json::Value;

/// Prints one line to stdout and flushes it. Where the reader has gone away the process ends
/// quietly: a command in front of `head` is no failure.
pub(crate) fn line(text: &str) {
    if let Err(e) = try_line(text) {
        if e.kind() != io::ErrorKind::BrokenPipe {
            note(&format!("error: cannot write to stdout: {e}"));
            process::exit(1);
        }
        process::exit(0);
    }
}

/// Something beside the work itself was lost, and said: the program does not end with success.
static SPOILT: AtomicBool = AtomicBool::new(false);

/// Says that something beside the work itself was lost.
pub(crate) fn spoil(text: &str) {
    note(&format!("error: {text}"));
    SPOILT.store(true, Ordering::Relaxed);
}

/// The exit status where the work itself came to `code`.
pub(crate) fn exit_code(code: ExitCode) -> ExitCode {
    let spoilt = SPOILT.load(Ordering::Relaxed);
    if spoilt && code == ExitCode::SUCCESS { ExitCode::FAILURE } else { code }
}

/// Prints one line to stdout and flushes it, for a program that has more to do than to print.
pub(crate) fn try_line(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    writeln!(out, "{text}")?;
    out.flush()
}

/// Prints one JSON object as a line.
pub(crate) fn json(value: &Value) {
    line(&value.to_string());
}

/// Prints one line to stderr. Nobody reading it is no reason to fail.
pub(crate) fn note(text: &str) {
    // By one write: two processes may share it.
    let _ = io::stderr().lock().write_all(format!("{text}\n").as_bytes());
}

/// A number of things: "1 message", "2 messages".
pub(crate) fn counted(n: u64, thing: &str) -> String {
    format!("{n} {thing}{}", if n == 1 { "" } else { "s" })
}

/// Octets in the unit that keeps the number short.
pub(crate) fn octets(n: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = n as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 {
        format!("{n} B")
    } else if value.fract() == 0.0 {
        format!("{value:.0} {}", UNITS[unit])
    } else {
        format!("{value:.1} {}", UNITS[unit])
    }
}

/// A duration with three digits that mean something.
pub(crate) fn seconds(d: Duration) -> String {
    let s = d.as_secs_f64();
    if s >= 1.0 {
        format!("{s:.2} s")
    } else if s >= 1e-3 {
        format!("{:.2} ms", s * 1e3)
    } else {
        format!("{:.1} us", s * 1e6)
    }
}

/// Octets per second, or messages per second where the messages are empty or small.
pub(crate) fn rate(octets: u64, messages: u64, time: Duration) -> String {
    let s = time.as_secs_f64();
    if s <= 0.0 || messages == 0 {
        return "-".into();
    }
    if octets / messages >= 1024 {
        let per_second = octets as f64 / s;
        if per_second >= 1e9 {
            format!("{:.2} GB/s", per_second / 1e9)
        } else {
            format!("{:.1} MB/s", per_second / 1e6)
        }
    } else {
        let per_second = messages as f64 / s;
        if per_second >= 1e6 {
            format!("{:.2} M msg/s", per_second / 1e6)
        } else {
            format!("{:.1} k msg/s", per_second / 1e3)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_is_singular() {
        assert_eq!([0, 1, 2].map(|n| counted(n, "round")), ["0 rounds", "1 round", "2 rounds"]);
    }

    #[test]
    fn octets_keep_round_numbers_round() {
        assert_eq!(octets(0), "0 B");
        assert_eq!(octets(1023), "1023 B");
        assert_eq!(octets(65536), "64 KiB");
        assert_eq!(octets(16 << 20), "16 MiB");
        assert_eq!(octets(1536), "1.5 KiB");
        assert_eq!(octets(3 << 40), "3 TiB");
        assert_eq!(octets(2 << 50), "2048 TiB");
    }

    #[test]
    fn rates_choose_octets_for_large_and_messages_for_small() {
        let second = Duration::from_secs(1);
        assert_eq!(rate(2_000_000_000, 1000, second), "2.00 GB/s");
        assert_eq!(rate(20_480_000, 1000, second), "20.5 MB/s");
        assert_eq!(rate(8_000, 1000, second), "1.0 k msg/s");
        assert_eq!(rate(16_000_000, 2_000_000, second), "2.00 M msg/s");
        assert_eq!(rate(0, 0, second), "-");
        assert_eq!(rate(8, 1, Duration::ZERO), "-");
    }

    #[test]
    fn durations_pick_their_unit() {
        assert_eq!(seconds(Duration::from_millis(1500)), "1.50 s");
        assert_eq!(seconds(Duration::from_micros(2500)), "2.50 ms");
        assert_eq!(seconds(Duration::from_nanos(3400)), "3.4 us");
    }
}
