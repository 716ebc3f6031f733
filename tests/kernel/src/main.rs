//! Linux's software RDMA drivers as peers: siw (iWARP) and rxe (RoCEv2) of Debian's kernel, in a virtual
//! machine, against the programs of this project over a virtual cable.
//!
//! `lab test` is for CI, `lab measure` for figures, `lab shell` for hands.

mod case;
mod cpio;
mod guest;
mod image;
mod impair;
mod job;
mod measure;
mod net;
mod ours;
mod programs;
mod rxe;
mod siw;
mod tools;
mod traffic;
mod wire;

use std::{
    fs,
    io::{BufRead, Write},
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    process::ExitCode,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use clap::{Args, Parser, Subcommand};

use crate::{
    case::{Lab, Plan, run_all},
    ours::Program,
};

/// The exit status that says that a test was left out, as Automake has it.
const SKIPPED: u8 = 77;
/// As a shell has it for a program that SIGINT ended.
const INTERRUPTED: u8 = 130;

/// Test userdma against Linux's siw and rxe in a virtual machine
#[derive(Debug, Parser)]
#[command(
    name = "lab",
    after_help = "\
Examples:
  lab test                       all tests; captures of those that fail are kept
  lab test siw::errors rxe::rping  those whose names contain one of these
  lab measure --write docs/peers.md
                                 siw, rxe and userdma on one machine; the table goes into the file
  lab shell                      a guest and a prompt; a line with ! in front runs on this side
  lab build                      only make the image

Needs root, a Debian of amd64, and the programs that it names if they are missing; --install installs them.
Exit status: 0 if all passed, 1 if not, 2 for wrong arguments, 77 where there can be no lab, 130 after Ctrl-C."
)]
struct Cli {
    #[command(subcommand)]
    command: Task,
}

#[derive(Debug, Subcommand)]
enum Task {
    /// Make the image: kernel, siw, programs
    Build(Common),
    /// Run the tests
    Test(Test),
    /// Measure siw, rxe and userdma, all in one guest with two processors
    Measure(measure::Measure),
    /// Boot the guest and give a prompt
    Shell(Shell),
}

#[derive(Debug, Args)]
struct Common {
    /// Install what this host lacks
    #[arg(long)]
    install: bool,

    /// Where the image and what it is made of are kept
    #[arg(long, value_name = "FOLDER", default_value = "/var/tmp/userdma-lab")]
    dir: PathBuf,
}

#[derive(Debug, Args)]
struct Test {
    #[command(flatten)]
    common: Common,

    /// Only tests whose names contain one of these
    #[arg(value_name = "NAME")]
    names: Vec<String>,

    /// Print the names, and run nothing
    #[arg(long)]
    list: bool,

    /// Where captures and records go
    #[arg(long, value_name = "FOLDER", default_value = "/var/tmp/userdma-lab/failed")]
    out: PathBuf,

    /// Keep the captures of tests that pass, too
    #[arg(long)]
    keep: bool,

    /// With those that move a hundred MiB each way
    #[arg(long)]
    long: bool,

    /// Try a test that fails a second time: an emulated guest on a busy host is late now and then
    #[arg(long)]
    again: bool,

    /// Begin no test after so many minutes; those that are left count as failed
    #[arg(long, value_name = "MINUTES", value_parser = clap::value_parser!(u32).range(1..=1440))]
    limit: Option<u32>,
}

#[derive(Debug, Args)]
struct Shell {
    #[command(flatten)]
    common: Common,

    /// The guest's driver: siw, rxe, or both ("siw rxe": the rdma_cm then takes the first)
    #[arg(long, value_name = "DRIVER", default_value = "siw rxe")]
    link: String,

    /// Processors of the guest
    #[arg(long, value_name = "N", default_value_t = 1)]
    smp: usize,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let done = tools::watch_signals().and_then(|()| match cli.command {
        Task::Build(common) => build(&common),
        Task::Test(test) => run_tests(&test),
        Task::Measure(measure) => run_measure(&measure),
        Task::Shell(shell) => run_shell(&shell),
    });
    match done {
        Ok(code) => code,
        Err(_) if tools::stopped() => {
            eprintln!("lab: interrupted");
            ExitCode::from(INTERRUPTED)
        }
        Err(e) => {
            eprintln!("lab: error: {e:#}");
            if e.is::<WrongArgument>() { ExitCode::from(2) } else { ExitCode::FAILURE }
        }
    }
}

/// An argument that cannot be meant.
#[derive(Debug)]
struct WrongArgument(String);

impl std::fmt::Display for WrongArgument {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for WrongArgument {}

/// Why there can be no lab on this host, if so.
fn obstacle(common: &Common) -> Option<String> {
    if cfg!(not(all(target_os = "linux", target_arch = "x86_64"))) {
        return Some("the guest is Linux for amd64, and so must this host be".into());
    }
    // This process's folder is its user's.
    if fs::metadata("/proc/self").map_or(0, |of| of.uid()) != 0 {
        return Some("network namespaces and tap devices need root".into());
    }
    if let Err(e) = image::check_host(common.install) {
        return Some(format!("{e:#}"));
    }
    if !Path::new("/dev/net/tun").exists() {
        return Some("there is no /dev/net/tun".into());
    }
    None
}

fn skipped(why: &str) -> ExitCode {
    eprintln!("SKIPPED: no virtual machine with Linux's siw and rxe: {why}");
    ExitCode::from(SKIPPED)
}

fn build(common: &Common) -> Result<ExitCode> {
    if let Some(why) = obstacle(common) {
        return Ok(skipped(&why));
    }
    let image = image::build(&common.dir)?;
    println!("{}", image.initrd.display());
    Ok(ExitCode::SUCCESS)
}

/// A lab with the programs of this build.
fn lab(common: &Common, processors: usize) -> Result<Lab> {
    let image = image::build(&common.dir)?;
    let beside = std::env::current_exe()?;
    let folder = beside.parent().context("this program lies in no folder")?.to_owned();
    let ours: Vec<_> =
        Program::ALL.iter().map(|&program| (program, folder.join(program.name()))).collect();
    for (program, path) in &ours {
        if !path.exists() {
            bail!(
                "{} is not there: build {} first (cargo build --release -p userdma-cli -p userdma-kernel)",
                path.display(),
                program.name()
            );
        }
    }
    Lab::new(image, &ours, &common.dir, processors)
}

fn run_tests(args: &Test) -> Result<ExitCode> {
    let mut cases = siw::cases();
    cases.extend(rxe::cases());
    if args.long {
        cases.extend(siw::long());
        cases.extend(rxe::long());
    }
    if let Some(name) =
        args.names.iter().find(|name| !cases.iter().any(|case| case.name.contains(*name)))
    {
        let long = if args.long { "" } else { ", with --long for those that take long" };
        return Err(WrongArgument(format!(
            "no test's name contains {name:?}: see lab test --list{long}"
        ))
        .into());
    }
    if !args.names.is_empty() {
        cases.retain(|case| args.names.iter().any(|name| case.name.contains(name)));
    }
    if args.list {
        for case in &cases {
            println!("{}", case.name);
        }
        return Ok(ExitCode::SUCCESS);
    }
    if let Some(why) = obstacle(&args.common) {
        return Ok(skipped(&why));
    }
    check_out(&args.out)?;
    let lab = lab(&args.common, 1)?;
    let plan = Plan {
        out: &args.out,
        keep: args.keep,
        again: args.again,
        limit: args.limit.map(|minutes| Duration::from_secs(60 * u64::from(minutes))),
    };
    let tally = run_all(&lab, cases, &plan)?;
    Ok(match (tools::stopped(), tally.failed + tally.left) {
        (true, _) => ExitCode::from(INTERRUPTED),
        (false, 0) => ExitCode::SUCCESS,
        (false, _) => ExitCode::FAILURE,
    })
}

/// That files can be written into `out`, which is to be said before minutes are spent.
fn check_out(out: &Path) -> Result<()> {
    let file = out.join(format!(".lab-{}", std::process::id()));
    fs::create_dir_all(out)
        .and_then(|()| fs::write(&file, "room\n"))
        .and_then(|()| fs::remove_file(&file))
        .with_context(|| format!("--out: cannot write into {}", out.display()))
}

fn run_measure(args: &measure::Measure) -> Result<ExitCode> {
    if let Some(why) = obstacle(&args.common) {
        return Ok(skipped(&why));
    }
    args.check()?;
    let lab = lab(&args.common, measure::PROCESSORS)?;
    measure::run(&lab, args)?;
    Ok(ExitCode::SUCCESS)
}

fn run_shell(args: &Shell) -> Result<ExitCode> {
    if let Some(why) = obstacle(&args.common) {
        return Ok(skipped(&why));
    }
    let lab = lab(&args.common, args.smp)?;
    lab.guest(&format!("links {}", args.link))?.success()?;
    println!(
        "guest: {} {}; this side: {} {}",
        lab.peer(false),
        lab.peer(true),
        lab.host(false),
        lab.host(true)
    );
    println!(
        "a line runs in the guest, one with ! in front here, as an ordinary user; Ctrl-D ends"
    );
    let stdin = std::io::stdin();
    loop {
        print!("lab> ");
        std::io::stdout().flush()?;
        let mut line = String::new();
        if stdin.lock().read_line(&mut line)? == 0 || tools::stopped() {
            println!();
            return Ok(ExitCode::SUCCESS);
        }
        lab.extend(Duration::from_secs(3600));
        let line = line.trim();
        let output = match line.strip_prefix('!') {
            _ if line.is_empty() => continue,
            Some(ours) => {
                let mut words = ours.split_whitespace();
                let name = words.next().unwrap_or_default();
                let Some(program) = Program::ALL.into_iter().find(|program| program.name() == name)
                else {
                    eprintln!("here run userdma and peer, not {name:?}");
                    continue;
                };
                lab.ours(program, &words.collect::<Vec<_>>())
            }
            None => lab.guest(line),
        };
        match output {
            Ok(output) => {
                print!("{}", output.text());
                eprint!("{}", output.stderr_text());
                if output.code != Some(0) {
                    eprintln!("ended with {:?}", output.code);
                }
            }
            Err(e) => eprintln!("{e:#}"),
        }
    }
}
