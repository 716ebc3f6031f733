//! `userdma dissect`: what RDMA a capture carries, frame by frame.
//!
//! Decoding is [`userdma_proto::dissect`]'s. Here is what reads and prints: [`stream`] opens
//! inputs and sends lines out, [`text`], [`mad`] and [`iwarp`] tell a frame in a line, [`fields`]
//! tells all of its fields to [`json`] or, for `-v`, to [`tree`].

mod fields;
mod iwarp;
mod json;
mod line;
mod mad;
#[cfg(test)]
mod sample;
pub(crate) mod stream;
mod text;
mod tree;

use std::{
    cell::RefCell,
    io::{self, IsTerminal, Read},
    path::{Path, PathBuf},
    process::ExitCode,
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use anyhow::{Context, Result};
use clap::{Args, ColorChoice, ValueEnum};
use userdma_proto::{
    dissect::{
        CrcState, Dissector, Frame, IcrcState, Iwarp, Options,
        capture::{self, Reader},
    },
    wire::roce::aeth::Syndrome,
};

use crate::output::{counted, note};
use stream::{Input, Sink};
use text::{Text, Time};

/// Exit status of what is no readable capture.
const UNREADABLE: u8 = 2;
/// Exit status after Ctrl-C: 128 and the signal.
const INTERRUPTED: u8 = 130;

/// Read a capture: RoCE, InfiniBand and iWARP, frame by frame, with all checksums checked
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  userdma dissect x.pcap                    a line a frame
  userdma dissect --rdma -v x.pcapng.gz     every field, of frames with RDMA only
  tcpdump -i eth0 -U -w - | userdma dissect -
                                            as it happens; Ctrl-C ends both
  userdma dissect --format json x.pcap | jq -c 'select(.roce.icrc == \"bad\")'

Reads pcap and pcapng, gzip'd or not. RoCEv2 is looked for on UDP port 4791 and on each --roce-port;
iWARP on every TCP port, by its start-up, so record from the first SYN on.

In a line: [SE] solicited event, [A] acknowledgement asked for, [pad N] octets behind the payload.
A checksum that is right is not mentioned. ECN CE, FECN, BECN: congestion.

Exit status: 0; 1 if something could not be decoded or the capture ends early (stderr says what);
2 if it is no readable capture; 130 after Ctrl-C. While a pipe is read the first Ctrl-C lets it
be read to its end, a second one ends at once.")]
pub(crate) struct Dissect {
    /// The capture; - for stdin
    #[arg(value_name = "FILE")]
    file: PathBuf,
    /// How frames are printed: a line for people, or a JSON object a line
    #[arg(short, long, value_enum, default_value_t = Format::Text)]
    format: Format,
    /// Every field, below each line (text; in JSON they always are there)
    #[arg(short, long)]
    verbose: bool,
    /// Only frames that carry RoCE, InfiniBand or iWARP, and pause frames
    #[arg(short, long)]
    rdma: bool,
    /// What times are counted from (text)
    #[arg(short, long, value_enum, default_value_t = Time::Relative)]
    time: Time,
    /// Stop after so many frames were printed
    #[arg(short, long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    /// Another UDP port of RoCEv2; may be given several times
    #[arg(long, value_name = "PORT", value_parser = clap::value_parser!(u16).range(1..))]
    roce_port: Vec<u16>,
    /// Colours in text: auto is on a terminal, unless NO_COLOR is set
    #[arg(long, value_name = "WHEN", default_value = "auto")]
    color: ColorChoice,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Format {
    Text,
    Json,
}

/// What was seen.
#[derive(Debug, Default)]
struct Tally {
    frames: u64,
    packets: u64,
    icrc_bad: u64,
    icrc_absent: u64,
    refusals: u64,
    marked: u64,
    starts: u64,
    fpdus: u64,
    crc_wrong: u64,
    undecoded: u64,
    /// Octets of iWARP that no frame tells of.
    lost: u64,
    /// The first frame that could not be decoded, and why.
    first: Option<(u64, String)>,
}

/// How reading ended.
#[derive(Debug)]
enum End {
    /// With the capture.
    Whole,
    /// Before its end.
    Early(capture::Error),
    /// By Ctrl-C.
    Interrupted,
    /// By `--count`.
    Enough,
    /// Nobody reads the output.
    OutputLost,
}

pub(crate) fn run(args: &Dissect) -> Result<ExitCode> {
    let name = match args.file.as_path() {
        path if path == Path::new("-") => "stdin".to_owned(),
        path => path.display().to_string(),
    };
    let refuse = |why: &str| {
        note(&format!("error: {name}: {why}"));
        Ok(ExitCode::from(UNREADABLE))
    };
    let input = match Input::open(&args.file) {
        Ok(input) => input,
        Err(why) => return refuse(&why),
    };
    let stop = stream::stop_flag().context("cannot watch for Ctrl-C")?;
    // Of a pipe nothing is lost: tcpdump ends by the same Ctrl-C, and what it still wrote is read.
    let stop = if input.is_live() { Arc::default() } else { stop };
    let sink = Rc::new(RefCell::new(Sink::new(Box::new(io::stdout()), args.colours())));
    let mut reader = match Reader::new(input.into_read(&sink)) {
        Ok(reader) => reader,
        Err(capture::Error::Io(e)) => return refuse(&stream::plain(&e)),
        Err(e) => return refuse(&e.to_string()),
    };
    let mut run = Run {
        text: (args.format == Format::Text).then(|| Text::new(args.time, args.verbose)),
        rdma_only: args.rdma,
        left: args.count.unwrap_or(u64::MAX),
        sink: &sink,
        tally: Tally::default(),
    };
    let end = run.all(&mut reader, args.options(), &stop);
    let tally = run.tally;
    // Ends the progress bar.
    drop(reader);
    let mut sink = sink.borrow_mut();
    sink.flush();
    if let Some(e) = sink.failure() {
        if e.kind() != io::ErrorKind::BrokenPipe {
            note(&format!("error: cannot write to stdout: {e}"));
            return Ok(ExitCode::FAILURE);
        }
        return Ok(ExitCode::SUCCESS);
    }
    if args.format == Format::Text && (args.verbose || io::stdout().is_terminal()) {
        note(&tally.to_string());
    }
    Ok(match &end {
        End::Interrupted => ExitCode::from(INTERRUPTED),
        end => match complaint(end, &tally) {
            Some(what) => {
                note(&format!("error: {name}: {what}"));
                ExitCode::FAILURE
            }
            None => ExitCode::SUCCESS,
        },
    })
}

/// What makes the exit status 1, in one line.
fn complaint(end: &End, tally: &Tally) -> Option<String> {
    let frames = tally.first.as_ref().map(|(frame, why)| {
        format!(
            "{} could not be decoded (the first: frame {frame}: {why})",
            counted(tally.undecoded, "frame")
        )
    });
    let lost = (tally.lost > 0).then(|| {
        format!(
            "{} of iWARP could not be decoded: others before them are not in the capture",
            counted(tally.lost, "octet")
        )
    });
    let undecoded = match (frames, lost) {
        (Some(frames), Some(lost)) => Some(format!("{frames}; {lost}")),
        (frames, lost) => frames.or(lost),
    };
    match end {
        End::Early(e) => {
            let what = match e {
                capture::Error::Io(e) => format!("cannot be read on: {}", stream::plain(e)),
                e => e.to_string(),
            };
            let before = counted(tally.frames, "frame");
            Some(match undecoded {
                None => format!("{what}; {before} before that"),
                Some(undecoded) => format!("{what}; {before} before that, of which {undecoded}"),
            })
        }
        _ => undecoded,
    }
}

impl Dissect {
    fn options(&self) -> Options {
        let mut options = Options::default();
        options.roce_ports.extend_from_slice(&self.roce_port);
        options
    }

    fn colours(&self) -> bool {
        self.format == Format::Text && stream::shows_colours(self.color)
    }
}

struct Run<'a> {
    /// `None`: JSON.
    text: Option<Text>,
    rdma_only: bool,
    /// Frames that may still be printed.
    left: u64,
    sink: &'a RefCell<Sink>,
    tally: Tally,
}

impl Run<'_> {
    /// Reads to the end, or until something ends it before.
    fn all<R: Read>(&mut self, reader: &mut Reader<R>, options: Options, stop: &AtomicBool) -> End {
        let mut dissector = Dissector::new(options);
        let end = loop {
            match reader.next_record() {
                Ok(Some(record)) => dissector.handle_record(&record),
                Ok(None) => break End::Whole,
                Err(_) if self.sink.borrow().failure().is_some() => return End::OutputLost,
                Err(e) => break End::Early(e),
            }
            if let Some(end) = self.drain(&mut dissector) {
                return end;
            }
            if stop.load(Ordering::Relaxed) {
                break End::Interrupted;
            }
        };
        dissector.finish();
        self.tally.lost = dissector.lost_octets();
        self.drain(&mut dissector).unwrap_or(end)
    }

    /// Prints the frames that are ready.
    fn drain(&mut self, dissector: &mut Dissector) -> Option<End> {
        while let Some(frame) = dissector.poll_frame() {
            self.tally.count(&frame);
            let has_rdma =
                !frame.roce.is_empty() || !frame.iwarp.is_empty() || frame.pause.is_some();
            if self.rdma_only && !has_rdma {
                continue;
            }
            let mut sink = self.sink.borrow_mut();
            match &mut self.text {
                Some(text) => text.frame(&mut sink.lines, &frame),
                None => json::frame(&mut sink.lines, &frame),
            }
            if !sink.end_line() {
                return Some(End::OutputLost);
            }
            self.left -= 1;
            if self.left == 0 {
                return Some(End::Enough);
            }
        }
        None
    }
}

impl Tally {
    fn count(&mut self, frame: &Frame) {
        self.frames += 1;
        self.marked += u64::from(frame.ip.is_some_and(|ip| ip.ecn == 3));
        for roce in &frame.roce {
            self.packets += 1;
            self.icrc_bad += u64::from(roce.icrc == IcrcState::Bad);
            self.icrc_absent += u64::from(roce.icrc == IcrcState::Absent);
            let aeth = roce.headers.as_ref().and_then(|headers| headers.aeth);
            let refuses = matches!(
                aeth.map(|aeth| aeth.syndrome()),
                Some(Syndrome::Nak(_) | Syndrome::RnrNak(_))
            );
            self.refusals += u64::from(refuses);
        }
        for found in &frame.iwarp {
            match found {
                Iwarp::Start(_) => self.starts += 1,
                Iwarp::Fpdu(fpdu) => {
                    self.fpdus += 1;
                    let is_wrong = fpdu.crc != CrcState::Good && iwarp::crc_is_wrong(fpdu);
                    self.crc_wrong += u64::from(is_wrong);
                }
                Iwarp::Error(_) => {}
            }
        }
        if let Some(error) = fields::first_error(frame) {
            self.undecoded += 1;
            self.first.get_or_insert((frame.number, error));
        }
    }
}

impl std::fmt::Display for Tally {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&counted(self.frames, "frame"))?;
        for (n, thing) in [
            (self.packets, "RoCE packet"),
            (self.starts, "MPA start-up frame"),
            (self.fpdus, "FPDU"),
            (self.icrc_bad, "bad ICRC"),
            (self.icrc_absent, "ICRC not captured"),
            (self.crc_wrong, "bad CRC"),
            (self.refusals, "NAK"),
            (self.marked, "ECN mark"),
            (self.undecoded, "not decoded"),
        ] {
            match (n, thing) {
                (0, _) => {}
                (n, "ICRC not captured" | "not decoded") => write!(f, ", {n} {thing}")?,
                (n, thing) => write!(f, ", {}", counted(n, thing))?,
            }
        }
        Ok(())
    }
}
