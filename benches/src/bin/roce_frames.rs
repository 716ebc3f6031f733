//! Writes a capture of any number of RoCEv2 frames; see the crate's documentation.
#![forbid(unsafe_code)]

use std::{
    fs::File,
    io::{BufWriter, Write, stdout},
    path::PathBuf,
};

use anyhow::{Context, Result};
use clap::Parser;
use userdma_benches::Template;

/// Makes a capture of many connections from the recording of one
#[derive(Parser, Debug)]
struct Args {
    /// Where it goes; `-` is stdout
    out: PathBuf,
    /// How many frames
    #[arg(short = 'n', long, default_value_t = 1_000_000)]
    frames: u64,
    /// The recording
    #[arg(long, default_value = concat!(env!("CARGO_MANIFEST_DIR"), "/../pcaps/roce_large.pcap.gz"))]
    from: PathBuf,
}

fn main() -> Result<()> {
    let args = Args::parse();
    let template = Template::read(&args.from)?;
    let out: Box<dyn Write> = if args.out.as_os_str() == "-" {
        Box::new(stdout().lock())
    } else {
        let file = File::create(&args.out);
        Box::new(file.with_context(|| format!("cannot make {}", args.out.display()))?)
    };
    let mut out = BufWriter::with_capacity(1 << 20, out);
    template.write(args.frames, &mut out)?;
    out.flush()?;
    Ok(())
}
