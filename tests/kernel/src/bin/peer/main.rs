//! Scripted traffic over the `userdma` crate, for tests: every operation, every size, errors on purpose.
//! `guest/verbs.c` is the same program over librdmacm, so that either can be on either side.
//!
//! ```text
//! peer listen ADDRESS PORT [OPTIONS]
//! peer connect ADDRESS PORT [OPTIONS] OPERATION...
//! peer cmatose|udaddy listen|connect ADDRESS PORT [OPTIONS]      the sides of librdmacm's examples
//! peer rdma-client connect ADDRESS PORT [OPTIONS]
//! ```
//!
//! | option | meaning |
//! |---|---|
//! | `--memory N` | octets of memory on each side: words for atomics, a half to read, a half to write (2 MiB) |
//! | `--receives N`, `--receive-size N` | receives posted, and octets of each (64 of 65,536) |
//! | `--receive-late MS\|never` | a server posts them so long after the connection is there |
//! | `--ird N`, `--ord N`, `--retry N`, `--rnr-retry N` | as rdma_cm has them (16, 16, 7, 7) |
//! | `--connections N` | so many, one after the other (1) |
//! | `--private TEXT`, `--reject TEXT` | private data of a request; a server rejects with private data |
//! | `--events` | `verbs` alone: sleeps for completions |
//! | `--window` | a server over RoCE has a second key: a window (a region here, and over iWARP always) |
//! | `--transport iwarp\|roce`, `--from ADDRESS`, `--mtu N`, `--crc on\|off`, `--mpa-rev N`, `--p2p`, `--rtr write\|read\|send` | `peer` alone |
//! | `--messages N`, `--size N` | of `cmatose` and `udaddy` (10 of 100 octets) |
//!
//! | operation | |
//! |---|---|
//! | `send:LEN`, `sendsol:LEN`, `sendimm:LEN:IMM`, `sendinv:LEN` | SEND, with solicited event, immediate, invalidate (of the second key) |
//! | `write:LEN`, `writeimm:LEN:IMM`, `write2:LEN` | WRITE; with the second key |
//! | `check` | the server looks at what was last written, and answers |
//! | `read:LEN`, `faa:ADD`, `cas:COMPARE:SWAP` | READ, atomics on the first word |
//! | `flush`, `atomicwrite:WORD` | `peer` alone |
//! | `badwrite:LEN`, `badread:LEN`, `badfaa:ADD`, `oobwrite:LEN`, `oobread:LEN` | wrong key, out of bounds |
//! | `burst:N:LEN`, `long:MIB`, `sleep:MS` | SENDs posted at once; WRITEs of 1 MiB, each checked |
//!
//! Output: JSON, an object a line: `listening`, `request`, `established`, `sent`, `received`, `checked`, `closed`,
//! at last `summary`. Exit status: 0 if all went well, 1 if not, 3 where there was no connection.

mod examples;
mod traffic;

use std::{net::IpAddr, process::ExitCode, str::FromStr, time::Duration};

use anyhow::{Context, Result, anyhow, bail};
use serde_json::{Value, json};
use userdma::{Device, DeviceOptions, Error, MpaOptions, PathMtu, RtrKinds};

/// What the command line says.
#[derive(Clone, Debug)]
struct Settings {
    address: IpAddr,
    port: u16,
    memory: usize,
    receives: usize,
    receive_size: usize,
    late: Late,
    ird: u16,
    ord: u16,
    retry: u8,
    rnr_retry: u8,
    connections: usize,
    private: String,
    reject: Option<String>,
    roce: bool,
    from: Option<IpAddr>,
    mtu: Option<PathMtu>,
    mpa: MpaOptions,
    messages: usize,
    size: usize,
}

/// When a server posts its receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Late {
    After(Duration),
    Never,
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match run(&args) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(e) => {
            eprintln!("peer: {e:#}");
            ExitCode::from(if e.downcast_ref::<NoConnection>().is_some() { 3 } else { 2 })
        }
    }
}

/// There was no connection, and it was told why.
#[derive(Debug)]
struct NoConnection;

impl std::fmt::Display for NoConnection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("no connection")
    }
}

impl std::error::Error for NoConnection {}

fn run(args: &[String]) -> Result<bool> {
    let mut words = args.iter().map(String::as_str);
    let mut role = words.next().unwrap_or_default();
    let example = match role {
        "cmatose" | "udaddy" | "rdma-client" => {
            let example = role;
            role = words.next().unwrap_or_default();
            Some(example)
        }
        _ => None,
    };
    let usage =
        "peer [cmatose|udaddy|rdma-client] listen|connect ADDRESS PORT [OPTIONS] [OPERATION...]";
    if role != "listen" && role != "connect" {
        bail!("{role:?} is no role: {usage}");
    }
    let address = parsed::<IpAddr>("ADDRESS", words.next())?;
    let port = parsed::<u16>("PORT", words.next())?;
    let (settings, ops) = settings(address, port, words)?;
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    runtime.block_on(async {
        match (example, role) {
            (None, "listen") => traffic::listen(&settings).await,
            (None, _) => traffic::connect(&settings, &ops).await,
            (Some("rdma-client"), "connect") => examples::rdma_client(&settings).await,
            (Some("rdma-client"), _) => bail!("userdma serve --as rdma-server is the other side"),
            (Some("cmatose"), role) => examples::cmatose(&settings, role == "listen").await,
            (Some(_), role) => examples::udaddy(&settings, role == "listen").await,
        }
    })
}

fn parsed<T: FromStr>(name: &str, text: Option<&str>) -> Result<T> {
    let text = text.with_context(|| format!("{name} is missing"))?;
    text.parse().map_err(|_| anyhow!("{name}: not {text:?}"))
}

fn settings<'a>(
    address: IpAddr,
    port: u16,
    words: impl Iterator<Item = &'a str>,
) -> Result<(Settings, Vec<&'a str>)> {
    let mut set = Settings {
        address,
        port,
        memory: 2 << 20,
        receives: 64,
        receive_size: 65_536,
        late: Late::After(Duration::ZERO),
        ird: 16,
        ord: 16,
        retry: 7,
        rnr_retry: 7,
        connections: 1,
        private: String::new(),
        reject: None,
        roce: false,
        from: None,
        mtu: None,
        mpa: MpaOptions::default(),
        messages: 10,
        size: 100,
    };
    let mut words = words.peekable();
    while let Some(option) = words.next_if(|word| word.starts_with("--")) {
        if option == "--p2p" {
            set.mpa.peer_to_peer = true;
            continue;
        }
        // The second key needs no window here.
        if option == "--window" {
            continue;
        }
        let value = words.next();
        match option {
            "--memory" => set.memory = parsed(option, value)?,
            "--receives" => set.receives = parsed(option, value)?,
            "--receive-size" => set.receive_size = parsed(option, value)?,
            "--receive-late" if value == Some("never") => set.late = Late::Never,
            "--receive-late" => {
                set.late = Late::After(Duration::from_millis(parsed(option, value)?));
            }
            "--ird" => set.ird = parsed(option, value)?,
            "--ord" => set.ord = parsed(option, value)?,
            "--retry" => set.retry = parsed(option, value)?,
            "--rnr-retry" => set.rnr_retry = parsed(option, value)?,
            "--connections" => set.connections = parsed(option, value)?,
            "--private" => set.private = value.unwrap_or_default().into(),
            "--reject" => set.reject = value.map(Into::into),
            "--transport" => {
                set.roce = match value {
                    Some("iwarp") => false,
                    Some("roce") => true,
                    other => bail!("--transport is iwarp or roce, not {other:?}"),
                }
            }
            "--from" => set.from = Some(parsed(option, value)?),
            "--mtu" => {
                let mtu = PathMtu::from_octets(parsed(option, value)?);
                set.mtu = Some(mtu.context("--mtu is 256, 512, 1024, 2048 or 4096")?);
            }
            "--crc" => set.mpa.crc = value == Some("on"),
            "--mpa-rev" => set.mpa.revision = parsed(option, value)?,
            "--rtr" => {
                set.mpa.rtr = match value {
                    Some("write") => RtrKinds::WRITE,
                    Some("read") => RtrKinds::READ,
                    Some("send") => RtrKinds::SEND,
                    other => bail!("--rtr is write, read or send, not {other:?}"),
                }
            }
            "--messages" => set.messages = parsed(option, value)?,
            "--size" => set.size = parsed(option, value)?,
            _ => bail!("there is no option {option}"),
        }
    }
    if set.memory < 16_384 || set.receives == 0 {
        bail!("--memory is 16384 at least, --receives 1");
    }
    Ok((set, words.collect()))
}

impl Settings {
    /// The device of a server, or of a client.
    fn device(&self, server: bool) -> Result<Device> {
        let scheme = if self.roce { "udp" } else { "tcp" };
        let own =
            if server { self.address } else { self.from.unwrap_or(unspecified(self.address)) };
        let port = match (self.roce, server) {
            (true, _) => 4791,
            (false, true) => self.port,
            (false, false) => 0,
        };
        let addr = std::net::SocketAddr::new(own, port);
        Ok(DeviceOptions::default().open(&format!("{scheme}://{addr}"))?)
    }

    /// The other side, for a client.
    fn peer(&self) -> String {
        std::net::SocketAddr::new(self.address, self.port).to_string()
    }
}

/// The address that stands for all of a family.
fn unspecified(like: IpAddr) -> IpAddr {
    match like {
        IpAddr::V4(_) => IpAddr::V4(std::net::Ipv4Addr::UNSPECIFIED),
        IpAddr::V6(_) => IpAddr::V6(std::net::Ipv6Addr::UNSPECIFIED),
    }
}

/// Prints an event.
fn say(event: &Value) {
    println!("{event}");
}

/// The last event. Gives whether all went well.
fn summary(operations: usize, received: usize, wrong: usize) -> bool {
    say(&json!({
        "event": "summary",
        "ok": wrong == 0,
        "operations": operations,
        "received": received,
        "wrong": wrong,
    }));
    wrong == 0
}

/// Tells why there is no connection.
fn told(error: &Error) -> anyhow::Error {
    let rejected = error.rejection().map(text);
    say(&json!({
        "event": if rejected.is_some() { "rejected" } else { "unreachable" },
        "why": error.to_string(),
        "private": rejected,
    }));
    NoConnection.into()
}

/// Private data as text, up to its first NUL.
fn text(octets: &[u8]) -> String {
    let end = octets.iter().position(|&octet| octet == 0).unwrap_or(octets.len());
    String::from_utf8_lossy(&octets[..end]).into_owned()
}
