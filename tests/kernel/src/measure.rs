//! siw, rxe and this project's own stack, measured side by side in one guest.
//!
//! All of them run in the guest, from one process to another on the same machine, so that the same processor,
//! the same kernel and, where it is emulated, the same emulation lies below each. Linux's drivers are driven
//! by perftest, ours by `userdma perf --local`. They take turns, run by run.

use std::{
    fmt::Write as _,
    fs,
    io::{IsTerminal, Write as _},
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context, Result, bail, ensure};
use clap::{Args, ValueEnum};
use serde_json::json;

use crate::{case::Lab, tools::go_on};

/// The guest's processors: one for each side.
pub(crate) const PROCESSORS: usize = 2;
/// perftest's first port.
const PORT: u16 = 18_515;
/// Two lines of the file that is written, between which the figures stand.
const BEGIN: &str = "<!-- figures of lab measure -->";
const END: &str = "<!-- end of the figures -->";

#[derive(Debug, Args)]
pub(crate) struct Measure {
    #[command(flatten)]
    pub(crate) common: crate::Common,

    /// Octets a message
    #[arg(long = "size", value_name = "OCTETS", value_delimiter = ',', default_value = "64,65536,1048576",
          value_parser = octets)]
    sizes: Vec<usize>,

    /// The operations
    #[arg(
        long = "op",
        value_name = "OP",
        value_delimiter = ',',
        default_value = "send,write,read"
    )]
    ops: Vec<Op>,

    /// Seconds a run of ours; a latency lasts as long as its round trips take, and perftest as its
    /// messages
    #[arg(long, value_name = "SECONDS", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=60))]
    duration: u32,

    /// Runs; the median counts
    #[arg(long, value_name = "RUNS", default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=99))]
    runs: u32,

    /// Put the table, which is to be whole, into this file, between its lines
    /// "<!-- figures of lab measure -->" and "<!-- end of the figures -->"
    #[arg(long, value_name = "FILE", conflicts_with_all = ["sizes", "ops"])]
    write: Option<PathBuf>,

    /// Print JSON: an object a figure
    #[arg(long)]
    json: bool,
}

/// What both perftest and `perf` take.
fn octets(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(size @ 2..=16_777_216) => Ok(size),
        _ => Err("a number from 2 to 16777216".into()),
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Op {
    /// SEND
    Send,
    /// RDMA WRITE
    Write,
    /// RDMA READ
    Read,
}

impl Op {
    fn name(self) -> &'static str {
        match self {
            Self::Send => "send",
            Self::Write => "write",
            Self::Read => "read",
        }
    }
}

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    /// GB/s, 10^9 octets.
    Bandwidth,
    /// µs: half a round trip, for a READ the whole.
    Latency,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Bandwidth => "bandwidth",
            Self::Latency => "latency",
        }
    }

    /// As perftest and `perf` call it.
    fn short(self) -> &'static str {
        match self {
            Self::Bandwidth => "bw",
            Self::Latency => "lat",
        }
    }

    fn unit(self) -> &'static str {
        match self {
            Self::Bandwidth => "GB/s",
            Self::Latency => "us",
        }
    }
}

/// Who is measured: Linux's driver and ours in its place, one behind the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stack {
    Siw { crc: bool },
    Rxe,
    Iwarp { crc: bool },
    Roce,
}

/// Those that are compared, with what it is that both do.
const PAIRS: [(Stack, Stack, &str); 3] = [
    (Stack::Siw { crc: false }, Stack::Iwarp { crc: false }, "iWARP, no CRC"),
    (Stack::Siw { crc: true }, Stack::Iwarp { crc: true }, "iWARP, CRC32C"),
    (Stack::Rxe, Stack::Roce, "RoCEv2, ICRC"),
];

impl Stack {
    fn driver(self) -> &'static str {
        match self {
            Self::Siw { .. } => "siw",
            Self::Rxe => "rxe",
            Self::Iwarp { .. } | Self::Roce => "userdma",
        }
    }
}

/// The figures of one pair.
struct Row {
    kind: Kind,
    op: Op,
    size: usize,
    what: &'static str,
    driver: &'static str,
    theirs: f64,
    ours: f64,
}

impl Row {
    /// Ours over theirs.
    fn ratio(&self) -> f64 {
        self.ours / self.theirs
    }
}

impl Measure {
    /// That the figures can be written, which is to be said before minutes are spent.
    pub(crate) fn check(&self) -> Result<()> {
        self.write.as_deref().map_or(Ok(()), |path| parts(path).map(drop))
    }
}

/// Measures, prints, and writes.
pub(crate) fn run(lab: &Lab, args: &Measure) -> Result<()> {
    lab.extend(Duration::from_secs(60));
    // Packets of rxe as large as they can be. The rdma_cm takes the first link, siw; rxe needs none.
    lab.guest(
        "ip link set eth0 mtu 9000 && ip addr replace 10.99.0.2/24 dev eth0 && links siw rxe",
    )?
    .success()
    .context("the guest's links are not made")?;
    let about = about(lab)?;
    if !args.json {
        println!("{about}\n");
    }
    let mut rows = Vec::new();
    let all = 2 * args.ops.len() * args.sizes.len() * PAIRS.len();
    for kind in [Kind::Bandwidth, Kind::Latency] {
        if !args.json {
            println!("{}", head(kind));
        }
        for &op in &args.ops {
            for &size in &args.sizes {
                for (theirs, ours, what) in PAIRS {
                    let cell = Cell { kind, op, size, seconds: args.duration };
                    let (mut left, mut right) = (Vec::new(), Vec::new());
                    for _ in 0..args.runs {
                        go_on()?;
                        left.push(cell.measure(lab, theirs)?);
                        right.push(cell.measure(lab, ours)?);
                    }
                    let (theirs, ours, driver) = (median(left), median(right), theirs.driver());
                    let row = Row { kind, op, size, what, driver, theirs, ours };
                    if args.json {
                        println!("{}", object(&row));
                    } else {
                        println!("{}", line(&row));
                    }
                    std::io::stdout().flush()?;
                    rows.push(row);
                    progress(rows.len(), all);
                }
            }
        }
    }
    if let Some(path) = &args.write {
        // As it is now: much time has passed.
        let (before, after) = parts(path)?;
        let runs = args.runs;
        let how = format!(
            "{about} {}; the ratio is ours / theirs.",
            if runs == 1 {
                "One run each".into()
            } else {
                format!("The median of {runs} runs each")
            },
        );
        let table = table(&rows);
        fs::write(path, format!("{before}{BEGIN}\n\n{how}\n{table}\n{END}{after}"))
            .with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// On a terminal: how far it is, in a line that the next one of the table overwrites.
fn progress(done: usize, all: usize) {
    if std::io::stderr().is_terminal() && done < all {
        eprint!("lab: {done} of {all} figures\r");
    }
}

/// What a file has before and behind the figures.
fn parts(path: &Path) -> Result<(String, String)> {
    let text =
        fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let split = text.split_once(BEGIN).and_then(|(before, rest)| {
        rest.split_once(END).map(|(_, after)| (before.to_owned(), after.to_owned()))
    });
    split.with_context(|| {
        format!(
            "{} has no line {BEGIN:?} with {END:?} behind it: put both where the figures belong",
            path.display()
        )
    })
}

/// The machine, in a sentence.
fn about(lab: &Lab) -> Result<String> {
    let said = lab.guest("uname -r; grep -m1 'model name' /proc/cpuinfo; nproc")?;
    let text = said.success()?.text();
    let [kernel, model, processors] = text.lines().collect::<Vec<_>>()[..] else {
        bail!("the guest does not say what it is:\n{text}");
    };
    let model = model.split_once(": ").map_or(model, |(_, name)| name);
    let how = if lab.accelerated()? { "KVM" } else { "emulated by QEMU" };
    Ok(format!(
        "Linux {kernel}, {processors} processors ({model}, {how}), both sides in the guest: siw and ours over its \
         loopback device, rxe by its own short cut inside the driver, without UDP or IP."
    ))
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// One figure that is to be had.
#[derive(Clone, Copy, Debug)]
struct Cell {
    kind: Kind,
    op: Op,
    size: usize,
    seconds: u32,
}

/// So often a figure is tried: perftest's processes lose each other now and then.
const TRIES: u32 = 3;
/// Ends what a try has left, and makes the links anew.
const AFRESH: &str = "killall -9 userdma ib_send_bw ib_send_lat ib_write_bw ib_write_lat ib_read_bw ib_read_lat \
                      2>/dev/null; links siw rxe";

impl Cell {
    fn measure(self, lab: &Lab, stack: Stack) -> Result<f64> {
        let (what, op, size) = (self.kind.name(), self.op.name(), self.size);
        let mut tries = 1;
        loop {
            lab.extend(Duration::from_secs(180));
            lab.take_record();
            let value = self.once(lab, stack).and_then(|value| {
                ensure!(value.is_finite() && value > 0.0, "it gives {value} {}", self.kind.unit());
                Ok(value)
            });
            let e = match value {
                Ok(value) => return Ok(value),
                Err(e) => e.context(format!("{what} of {op}, {size} octets, by {stack:?}")),
            };
            go_on()?;
            if tries == TRIES {
                let record = lab.take_record();
                let kernel =
                    lab.guest("dmesg | tail -n 20").map(|said| said.text()).unwrap_or_default();
                bail!(
                    "{e:#}\n\nin {TRIES} tries; of the last one:\n{record}\n== the guest's kernel\n{kernel}"
                );
            }
            eprintln!("lab: once more: {e:#}");
            lab.extend(Duration::from_secs(60));
            lab.guest(AFRESH)?.success().context("the guest's links are not made")?;
            tries += 1;
        }
    }

    fn once(self, lab: &Lab, stack: Stack) -> Result<f64> {
        match stack {
            Stack::Siw { crc } => {
                let crc = if crc { 'Y' } else { 'N' };
                lab.guest(&format!("echo {crc} >/sys/module/siw/parameters/mpa_crc_required"))?
                    .success()?;
                self.perftest(lab, "-d siw0 -R")
            }
            // The GID of its IPv4 address.
            Stack::Rxe => self.perftest(lab, "-d rxe0 -x 1 -m 4096"),
            Stack::Iwarp { crc } => self.perf(
                lab,
                if crc { "--transport iwarp --crc on" } else { "--transport iwarp --crc off" },
            ),
            Stack::Roce => self.perf(lab, "--transport roce --mtu 4096"),
        }
    }

    /// The figure of perftest, of two processes in the guest.
    fn perftest(self, lab: &Lab, device: &str) -> Result<f64> {
        let how = match self.kind {
            Kind::Bandwidth => format!("-n {}", messages(self.size)),
            Kind::Latency => format!("-n {}", round_trips(self.size)),
        };
        let (op, kind, size) = (self.op.name(), self.kind.short(), self.size);
        let command = format!("ib_{op}_{kind} {device} -F -p {PORT} -s {size} {how}");
        let (client, server) = lab.guest_beside_or_ended(&command, |_| {
            lab.guest_listens(PORT)?;
            lab.guest(&format!("{command} {}", lab.peer(false)))
        })?;
        // The client's words first: what it says explains why a server does not end.
        let text = client.success()?.text();
        let value = column(&text, self.kind)
            .with_context(|| format!("`{command}` printed no figure:\n{}", client.tail()))?;
        server?.success()?;
        Ok(value)
    }

    /// The figure of `userdma perf`.
    fn perf(self, lab: &Lab, transport: &str) -> Result<f64> {
        let (op, kind, size) = (self.op.name(), self.kind.short(), self.size);
        let command = |seconds: u32| {
            format!(
                "userdma perf --local --json --op {op} --size {size} --{kind} {transport} --duration {seconds}"
            )
        };
        let mut output = lab.guest(&command(self.seconds))?;
        // A latency wants its round trips, and says how long they take.
        let longer = output.stderr_text();
        let longer = longer.split_once("raise --duration, to ").and_then(|(_, rest)| {
            rest.split_whitespace().next().and_then(|seconds| seconds.parse::<f64>().ok())
        });
        if let Some(seconds) = longer {
            output = lab.guest(&command(seconds.ceil() as u32))?;
        }
        let objects = output.success()?.objects();
        let value = objects.first().and_then(|object| object["value"].as_f64());
        value.with_context(|| format!("`{}` printed no figure:\n{}", output.command, output.tail()))
    }
}

/// Messages of a bandwidth of perftest: 128 MiB in all, but as many as are under way at least. (By time, it
/// gives 0 where not one of them ends in the middle of it.)
fn messages(size: usize) -> usize {
    ((128 << 20) / size).clamp(128, 20_000)
}

/// Round trips that a latency of perftest is the median of: as `perf` has it, a hundred at least.
fn round_trips(size: usize) -> u32 {
    if size <= 4096 { 1000 } else { 200 }
}

/// The figure in what perftest prints: the average bandwidth in GB/s, or the median of the latencies in µs. (It has
/// two decimals, so that Gb/s, which it can print, would be coarse.)
fn column(text: &str, kind: Kind) -> Option<f64> {
    let mut lines = text.lines().skip_while(|line| !line.trim_start().starts_with("#bytes"));
    let head = lines.next()?;
    let values: Vec<&str> = lines.next()?.split_whitespace().collect();
    match kind {
        // #bytes #iterations "BW peak[MB/sec]" "BW average[MB/sec]" MsgRate[Mpps], of 2^20 octets.
        Kind::Bandwidth
            if ["MB/sec", "MiB/sec"]
                .iter()
                .any(|unit| head.contains(&format!("BW average[{unit}]"))) =>
        {
            values.get(3)?.parse::<f64>().ok().map(|mib| mib * 1_048_576.0 / 1e9)
        }
        Kind::Latency => {
            let at = head.split_whitespace().position(|name| name == "t_typical[usec]")?;
            values.get(at)?.parse().ok()
        }
        Kind::Bandwidth => None,
    }
}

fn head(kind: Kind) -> String {
    let unit = kind.unit();
    let better = if kind == Kind::Bandwidth { "more" } else { "less" };
    format!(
        "| {}, {unit} | octets | protocol | Linux | userdma | ratio ({better} is better) |\n|---|---|---|---|---|---|",
        kind.name()
    )
}

fn line(row: &Row) -> String {
    format!(
        "| {} | {} | {} | {} {} | {} | {:.2} |",
        row.op.name().to_uppercase(),
        row.size,
        row.what,
        row.driver,
        three_digits(row.theirs),
        three_digits(row.ours),
        row.ratio()
    )
}

/// What is measured here is not known better than to three digits.
fn three_digits(value: f64) -> String {
    let digits = (2 - value.log10().floor() as i32).clamp(0, 6) as usize;
    format!("{value:.digits$}")
}

fn object(row: &Row) -> serde_json::Value {
    json!({
        "measure": row.kind.name(),
        "op": row.op.name(),
        "size": row.size,
        "protocol": row.what,
        "driver": row.driver,
        "theirs": row.theirs,
        "ours": row.ours,
        "unit": row.kind.unit(),
        "ratio": row.ratio(),
    })
}

fn table(rows: &[Row]) -> String {
    let mut text = String::new();
    for kind in [Kind::Bandwidth, Kind::Latency] {
        let _ = writeln!(text, "\n{}", head(kind));
        for row in rows.iter().filter(|row| row.kind == kind) {
            let _ = writeln!(text, "{}", line(row));
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_of_perftest() {
        let bandwidth = "\
 Device         : siw0
---------------------------------------------------------------------------------------
 #bytes     #iterations    BW peak[MB/sec]    BW average[MB/sec]   MsgRate[Mpps]
 65536      1041             0.00               32.50  \t\t   0.000520
---------------------------------------------------------------------------------------
";
        assert_eq!(column(bandwidth, Kind::Bandwidth), Some(0.034_078_72));
        assert_eq!(column(bandwidth, Kind::Latency), None);
        // Another unit is not taken for it.
        assert_eq!(column(&bandwidth.replace("MB/sec", "Gb/sec"), Kind::Bandwidth), None);
        let latency = "\
 #bytes #iterations    t_min[usec]    t_max[usec]  t_typical[usec]    t_avg[usec]    t_stdev[usec]   99% percentile[usec]   99.9% percentile[usec]
 64      1000          28.62          2205.61      38.08    \t       46.62       \t69.94  \t\t142.27  \t\t2205.61
";
        assert_eq!(column(latency, Kind::Latency), Some(38.08));
        assert_eq!(column("Couldn't connect\n", Kind::Latency), None);
        assert_eq!(column(" #bytes", Kind::Latency), None);
    }

    #[test]
    fn three_digits_of_each() {
        let shown = [0.0001234, 0.034567, 1.0, 12.345, 999.96, 123_456.7].map(three_digits);
        assert_eq!(shown, ["0.000123", "0.0346", "1.00", "12.3", "1000", "123457"]);
        assert_eq!(median(vec![3.0, 1.0, 2.0]), 2.0);
    }

    #[test]
    fn figures_go_between_their_two_lines() {
        let file = std::env::temp_dir().join(format!("userdma-measure-{}", std::process::id()));
        fs::write(&file, format!("before\n{BEGIN}\nold\n{END}\nafter\n")).unwrap();
        assert_eq!(parts(&file).unwrap(), ("before\n".into(), "\nafter\n".into()));
        fs::write(&file, format!("{END}\n{BEGIN}\n")).unwrap();
        assert!(parts(&file).unwrap_err().to_string().contains("has no line"));
        fs::remove_file(&file).unwrap();
        assert!(parts(&file).unwrap_err().to_string().contains("cannot read"));
        let row = Row {
            kind: Kind::Latency,
            op: Op::Read,
            size: 64,
            what: "RoCEv2, ICRC",
            driver: "rxe",
            theirs: 200.0,
            ours: 100.0,
        };
        let text = table(&[row]);
        assert!(text.contains("| READ | 64 | RoCEv2, ICRC | rxe 200 | 100 | 0.50 |"), "{text}");
    }
}
