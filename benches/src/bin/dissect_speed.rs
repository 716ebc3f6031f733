//! `userdma dissect` beside tshark, on the same frames, in one run.
#![forbid(unsafe_code)]

use std::{
    fmt::Write as _,
    fs::{self, File},
    io::{BufRead, BufReader, BufWriter, Write},
    path::{Path, PathBuf},
    process::{Child, Command, ExitCode, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use userdma_benches::Template;

/// Measures `userdma dissect` and tshark, as JSON and as text: seconds, frames/s, peak memory, ratios
///
/// Makes captures of RoCEv2 connections (see `roce_frames`), runs each command on them with its
/// output going to /dev/null, and compares. Before that the output is checked once: a line for each
/// frame, every ICRC good. Memory must not grow with the capture: userdma's peak on all
/// frames and on a tenth of them may differ by --max-growth at most.
#[derive(Parser, Debug)]
struct Args {
    /// Frames that userdma decodes
    #[arg(short = 'n', long, default_value_t = 1_000_000)]
    frames: u64,
    /// Frames that tshark decodes; fewer than --frames: compared by rate, and userdma is measured
    /// on as few too. It needs some 2 GB of memory and minutes for a million
    #[arg(long)]
    tshark_frames: Option<u64>,
    /// Runs of each command, in turns; the median counts
    #[arg(long, default_value_t = 1)]
    runs: usize,
    /// Fails if userdma is not this many times as fast
    #[arg(long)]
    min_ratio: Option<f64>,
    /// MiB that userdma's peak may grow from a tenth of the frames to all
    #[arg(long, default_value_t = 4.0)]
    max_growth: f64,
    /// The userdma to measure [default: the one built beside this program]
    #[arg(long)]
    userdma: Option<PathBuf>,
    /// The tshark to measure
    #[arg(long, default_value = "tshark")]
    tshark: PathBuf,
    /// The recording that the frames are made from
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/../pcaps/roce_large.pcap.gz"))]
    from: PathBuf,
    /// Where the captures are made (1.1 GB for a million frames); they are deleted at the end
    #[arg(long, default_value_os_t = std::env::temp_dir())]
    dir: PathBuf,
}

fn main() -> ExitCode {
    match run(&Args::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            eprintln!("error: {e:#}");
            ExitCode::from(2)
        }
    }
}

fn run(args: &Args) -> Result<bool> {
    let tshark_frames = args.tshark_frames.unwrap_or(args.frames);
    ensure!(args.frames >= 10 && tshark_frames > 0 && args.runs > 0, "there is nothing to measure");
    let userdma = match &args.userdma {
        Some(path) => path.clone(),
        None => std::env::current_exe()?.with_file_name("userdma"),
    };
    ensure!(
        userdma.exists(),
        "{} is not there: cargo build --release -p userdma-cli, or say --userdma",
        userdma.display()
    );
    let dir = Scratch::new(&args.dir)?;
    let template = Template::read(&args.from)?;
    let all = Capture::make(&template, &dir, args.frames)?;
    let tenth = Capture::make(&template, &dir, args.frames / 10)?;
    let theirs = if tshark_frames == args.frames {
        all.clone()
    } else {
        Capture::make(&template, &dir, tshark_frames)?
    };
    print_line(&format!("{}, {}", version(&userdma)?, version(&args.tshark)?));
    print_line(&format!("frames made from {}, output to /dev/null", name(&args.from)));
    check(&userdma, &tenth)?;

    let ours = |format| {
        let exe = userdma.clone();
        Task {
            label: format!("userdma dissect --format {format}"),
            exe,
            args: vec!["dissect", "--format", format],
        }
    };
    let tshark = |label: &str, arguments: &[&'static str]| Task {
        label: label.to_owned(),
        exe: args.tshark.clone(),
        args: arguments.to_vec(),
    };
    let pairs = [
        ("json", ours("json"), tshark("tshark -n -T json", &["-n", "-T", "json", "-r"])),
        ("text", ours("text"), tshark("tshark -n", &["-n", "-r"])),
    ];
    print_line(&format!(
        "{:<30} {:>9} {:>9} {:>11} {:>9}",
        "", "frames", "seconds", "frames/s", "peak MiB"
    ));
    let mut good = true;
    let mut verdict = String::new();
    for (format, ours, tshark) in &pairs {
        let (mut on_all, mut on_theirs, mut on_tenth, mut of_tshark) =
            (vec![], vec![], vec![], vec![]);
        for _ in 0..args.runs {
            on_tenth.push(ours.run(&tenth)?);
            on_all.push(ours.run(&all)?);
            if theirs.frames != all.frames && theirs.frames != tenth.frames {
                on_theirs.push(ours.run(&theirs)?);
            }
            of_tshark.push(tshark.run(&theirs)?);
        }
        let on_tenth = report(ours, &tenth, on_tenth);
        let on_all = report(ours, &all, on_all);
        let on_theirs = (!on_theirs.is_empty()).then(|| report(ours, &theirs, on_theirs));
        let same_file = match theirs.frames {
            n if n == all.frames => None,
            n if n == tenth.frames => Some(&on_tenth),
            _ => on_theirs.as_ref(),
        };
        let of_tshark = report(tshark, &theirs, of_tshark);

        let rate = |m: &Measured, c: &Capture| c.frames as f64 / m.seconds;
        let mut ratio = rate(&on_all, &all) / rate(&of_tshark, &theirs);
        write!(verdict, "{format}: {ratio:.1} x tshark's rate")?;
        if let Some(same) = same_file {
            let smaller = rate(same, &theirs) / rate(&of_tshark, &theirs);
            write!(verdict, " ({smaller:.1} x on the same {} frames)", theirs.frames)?;
            ratio = ratio.min(smaller);
        }
        let growth = on_all.peak_mib - on_tenth.peak_mib;
        writeln!(
            verdict,
            "; memory {growth:+.1} MiB from {} to {} frames",
            tenth.frames, all.frames
        )?;
        if let Some(least) = args.min_ratio.filter(|least| ratio < *least) {
            writeln!(verdict, "MISSED: {format} must be {least} x tshark at least")?;
            good = false;
        }
        if growth > args.max_growth {
            writeln!(verdict, "MISSED: {format} may grow by {} MiB at most", args.max_growth)?;
            good = false;
        }
    }
    print_line(verdict.trim_end());
    Ok(good)
}

/// The median run.
fn report(task: &Task, capture: &Capture, mut runs: Vec<Measured>) -> Measured {
    runs.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
    let median = runs.swap_remove(runs.len() / 2);
    print_line(&format!(
        "{:<30} {:>9} {:>9.3} {:>11.0} {:>9.1}",
        task.label,
        capture.frames,
        median.seconds,
        capture.frames as f64 / median.seconds,
        median.peak_mib
    ));
    median
}

fn print_line(line: &str) {
    // A closed pipe ends nothing: the exit status still says what came out.
    let _ = writeln!(std::io::stdout(), "{line}");
}

/// A folder that is deleted again.
struct Scratch(PathBuf);

impl Scratch {
    fn new(parent: &Path) -> Result<Self> {
        let path = parent.join(format!("userdma-dissect-speed-{}", std::process::id()));
        fs::create_dir_all(&path).with_context(|| format!("cannot make {}", path.display()))?;
        Ok(Self(path))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

#[derive(Debug, Clone)]
struct Capture {
    path: PathBuf,
    frames: u64,
}

impl Capture {
    fn make(template: &Template, dir: &Scratch, frames: u64) -> Result<Self> {
        let path = dir.0.join(format!("{frames}.pcap"));
        if !path.exists() {
            let file = File::create(&path);
            let file = file.with_context(|| format!("cannot make {}", path.display()))?;
            let mut out = BufWriter::with_capacity(1 << 20, file);
            let done = template.write(frames, &mut out).and_then(|()| out.flush());
            done.with_context(|| format!("cannot write {}", path.display()))?;
        }
        Ok(Self { path, frames })
    }
}

struct Task {
    label: String,
    exe: PathBuf,
    args: Vec<&'static str>,
}

struct Measured {
    seconds: f64,
    peak_mib: f64,
}

impl Task {
    fn run(&self, capture: &Capture) -> Result<Measured> {
        let started = Instant::now();
        let mut child = Command::new(&self.exe)
            .args(&self.args)
            .arg(&capture.path)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot start {}", self.exe.display()))?;
        let stderr = child.stderr.take().context("stderr was piped")?;
        let said = thread::spawn(move || std::io::read_to_string(stderr).unwrap_or_default());
        let mut peak_kib = 0;
        // Its peak is asked for while it lives: the last answer is a millisecond old at most.
        let status = loop {
            peak_kib = peak(&child).unwrap_or(peak_kib);
            if let Some(status) = child.try_wait()? {
                break status;
            }
            let short = started.elapsed() < Duration::from_millis(50);
            thread::sleep(Duration::from_micros(if short { 50 } else { 1000 }));
        };
        let seconds = started.elapsed().as_secs_f64();
        let said = said.join().unwrap_or_default();
        ensure!(status.success(), "{} on {} frames: {status}: {said}", self.label, capture.frames);
        ensure!(peak_kib > 0, "{} was over before its memory was seen", self.label);
        Ok(Measured { seconds, peak_mib: f64::from(peak_kib) / 1024.0 })
    }
}

/// VmHWM: the most memory that a process ever had resident, in KiB.
fn peak(child: &Child) -> Option<u32> {
    let status = fs::read_to_string(format!("/proc/{}/status", child.id())).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    line.trim().strip_suffix("kB")?.trim().parse().ok()
}

/// What is measured must be right: a line for each frame, every ICRC good.
fn check(userdma: &Path, capture: &Capture) -> Result<()> {
    let mut child = Command::new(userdma)
        .args(["dissect", "--format", "json"])
        .arg(&capture.path)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {}", userdma.display()))?;
    let (mut lines, mut good) = (0, 0);
    for line in BufReader::new(child.stdout.take().context("stdout was piped")?).lines() {
        lines += 1;
        good += u64::from(line?.contains(r#""icrc":"good""#));
    }
    let status = child.wait()?;
    if !status.success() || (lines, good) != (capture.frames, capture.frames) {
        bail!(
            "of {} frames userdma printed {lines}, with {good} good ICRCs; {status}",
            capture.frames
        );
    }
    Ok(())
}

fn version(exe: &Path) -> Result<String> {
    let output = Command::new(exe).arg("--version").stderr(Stdio::null()).output();
    let output = output.with_context(|| format!("cannot start {}", exe.display()))?;
    let text = String::from_utf8_lossy(&output.stdout);
    let line = text.lines().next().unwrap_or_default();
    Ok(line.split(" (Git").next().unwrap_or(line).trim_end_matches('.').to_owned())
}

fn name(path: &Path) -> String {
    path.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned())
}
