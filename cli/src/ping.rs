//! `userdma ping`: rping's client. The protocol is in [`crate::rping`].

use std::{
    process::ExitCode,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, bail};
use clap::Args;
use serde_json::json;
use tokio::time::{sleep_until, timeout};
use userdma::{Access, Mr, RecvWr, Region, SendOp, SendWr};

use crate::{
    chain,
    common::{Common, Link, Shape, Target, check_wc, close, connect, server, with_reason},
    output::{self, counted, line, note},
    rping::{self, ADVERT_LEN, Advert, MAX_SIZE, MIN_SIZE},
    session,
    stop::Stop,
};

/// What a server that ends the first round may be.
const SERVICE: &str = "is the peer an rping server (`userdma serve` without --as, `rping -s`)?";

/// How long a round may take.
const PATIENCE: Duration = Duration::from_secs(10);

/// Ping a `userdma serve` or librdmacm's `rping -s`: the server READs a buffer and WRITEs it back.
#[derive(Args, Debug)]
#[command(after_help = "\
Examples:
  userdma ping 10.0.0.1                   a round a second, until Ctrl-C
  userdma ping '[fe80::1%eth0]:7174' -c 3 three rounds over link-local IPv6
  userdma ping host -c 100 -s 4000 -i 0   as `rping -c -a host -C 100 -S 4000`
  userdma ping host -c 3 -v               show the data, as rping -v does
  userdma ping host --transport roce      RoCEv2; to a server on this host too

The other end: `userdma serve --listen ADDR` or `rping -s -a ADDR`.
Exit status: 0 if all came back right, 1 if not or nothing did, 2 for wrong arguments.")]
pub(crate) struct Ping {
    /// The server
    #[arg(value_name = "ADDR[:PORT]", value_parser = server)]
    target: Target,
    /// Rounds; without it until Ctrl-C
    #[arg(short, long, short_alias = 'C', value_parser = clap::value_parser!(u64).range(1..))]
    count: Option<u64>,
    /// Octets a message, the final NUL included
    #[arg(short, long, short_alias = 'S', default_value_t = 64, value_parser = clap::value_parser!(u32).range(i64::from(MIN_SIZE)..=i64::from(MAX_SIZE)))]
    size: u32,
    /// Seconds from one round's start to the next one's; 0 for no pause
    #[arg(short, long, default_value = "1", value_parser = interval)]
    interval: Duration,
    /// Print JSON: an object a round, and the summary
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    common: Common,
}

/// Seconds with a fraction.
fn interval(text: &str) -> Result<Duration, String> {
    text.parse()
        .ok()
        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
        .filter(|d| *d <= Duration::from_secs(86_400))
        .ok_or_else(|| format!("{text:?} is no number of seconds from 0 to 86400"))
}

/// Figures over round-trip times, in microseconds (Welford's running variance).
#[derive(Clone, Copy, Debug, Default)]
struct Times {
    n: u64,
    min: f64,
    max: f64,
    mean: f64,
    squares: f64,
}

impl Times {
    fn add(&mut self, time: Duration) {
        let x = time.as_secs_f64() * 1e6;
        if self.n == 0 {
            (self.min, self.max) = (x, x);
        }
        self.n += 1;
        self.min = self.min.min(x);
        self.max = self.max.max(x);
        let delta = x - self.mean;
        self.mean += delta / self.n as f64;
        self.squares += delta * (x - self.mean);
    }

    /// Standard deviation of the rounds seen, as ping has it (of all, not of a sample).
    fn stddev(&self) -> f64 {
        if self.n == 0 { 0.0 } else { (self.squares / self.n as f64).sqrt() }
    }
}

/// What came of all rounds.
#[derive(Debug, Default)]
struct Summary {
    begun: u64,
    mismatched: u64,
    times: Times,
}

impl Summary {
    fn print(&self, args: &Ping) {
        let t = &self.times;
        if args.json {
            output::json(&json!({
                "event": "summary",
                "rounds": self.begun,
                "completed": t.n,
                "mismatched": self.mismatched,
                "size": args.size,
                "min_us": t.min,
                "avg_us": t.mean,
                "max_us": t.max,
                "stddev_us": t.stddev(),
            }));
            return;
        }
        line(&format!("--- {} ping statistics ---", args.target));
        line(&format!(
            "{} of {} octets, {} completed, {} mismatched",
            counted(self.begun, "round"),
            args.size,
            t.n,
            self.mismatched
        ));
        if t.n > 0 {
            line(&format!(
                "round trip min/avg/max/stddev = {:.1}/{:.1}/{:.1}/{:.1} us",
                t.min,
                t.mean,
                t.max,
                t.stddev()
            ));
        }
    }
}

/// The client's memory: rping's start_buf (source), rdma_buf (sink) and receives.
struct Client {
    link: Link,
    source: Mr,
    sink: Mr,
    answers: Mr,
    size: usize,
}

impl Client {
    /// IRD = ORD = 1, as rping.
    const SHAPE: Shape = Shape { sends: 4, recvs: 4, depth: 1, one_cq: false };

    fn new(link: Link, size: u32) -> Result<Self> {
        let size = size as usize;
        let source = link.pd.register(Region::alloc(size)?, Access::REMOTE_READ)?;
        let sink = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let sink = link.pd.register(Region::alloc(size)?, sink)?;
        let answers = link.pd.register(Region::alloc(2 * ADVERT_LEN)?, Access::LOCAL_WRITE)?;
        let client = Self { link, source, sink, answers, size };
        client.post_receive(0)?;
        client.post_receive(1)?;
        Ok(client)
    }

    fn post_receive(&self, slot: u64) -> Result<()> {
        let at = slot as usize * ADVERT_LEN;
        self.link.qp.post_recv(RecvWr::new(slot, [self.answers.slice(at..at + ADVERT_LEN)]))?;
        Ok(())
    }

    /// SENDs an advert of `mr` and waits for the server's answer.
    async fn exchange(&self, mr: &Mr, what: &str) -> Result<()> {
        let place = mr.remote(0);
        let advert = Advert { addr: place.addr, rkey: place.rkey, length: self.size as u32 };
        let wr = SendWr::inline(0, SendOp::Send, &advert.to_bytes());
        self.link.qp.post_send(wr).with_context(|| format!("cannot post {what}"))?;
        check_wc(&self.link.send_cq.next().await?, what)?;
        let wc = self.link.recv_cq.next().await?;
        check_wc(&wc, &format!("the receive of the answer to {what}"))?;
        if wc.byte_len as usize != ADVERT_LEN {
            bail!("the server answered {what} with {} octets instead of {ADVERT_LEN}", wc.byte_len);
        }
        self.post_receive(wc.id)
    }

    /// One round: its time, and where what came back differs.
    async fn round(&self, n: u64, message: &mut [u8]) -> Result<(Duration, Option<String>)> {
        rping::fill(n, message);
        self.source.write_at(0, message)?;
        // What is there before must not pass for what the server writes.
        let inverse: Vec<u8> = message.iter().map(|b| !b).collect();
        self.sink.write_at(0, &inverse)?;
        let begun = Instant::now();
        self.exchange(&self.source, "the advert of the source").await?;
        self.exchange(&self.sink, "the advert of the sink").await?;
        let time = begun.elapsed();
        let mut back = inverse;
        self.sink.read_at(0, &mut back)?;
        let wrong = rping::first_difference(message, &back).map(|(at, expected, found)| {
            format!("offset {at}: expected {expected:#04x}, found {found:#04x}")
        });
        message.copy_from_slice(&back);
        Ok((time, wrong))
    }
}

/// Runs the command.
pub(crate) async fn run(args: Ping) -> Result<ExitCode> {
    args.common.check()?;
    let stop = Stop::on_signals()?;
    let link = tokio::select! {
        link = connect(&args.common, &args.target, Client::SHAPE, &[]) => {
            link.map_err(session::explain_rping)
                .with_context(|| format!("cannot ping {}", args.target))?
        }
        () = stop.raised() => bail!("interrupted before there was a connection"),
    };
    let qp = link.qp.clone();
    if args.common.verbose
        && let Some(settled) = link.settled()
    {
        note(&settled);
    }
    let client = Client::new(link.clone(), args.size)?;
    let mut summary = Summary::default();
    let outcome = rounds(&args, &client, &stop, &mut summary).await;
    if outcome.is_ok() {
        close(&qp).await;
    }
    summary.print(&args);
    link.tell(&args.common, args.common.counts());
    outcome?;
    if summary.mismatched > 0 || summary.times.n == 0 {
        return Ok(ExitCode::FAILURE);
    }
    Ok(ExitCode::SUCCESS)
}

async fn rounds(args: &Ping, client: &Client, stop: &Stop, summary: &mut Summary) -> Result<()> {
    let mut message = vec![0; args.size as usize];
    let mut start = tokio::time::Instant::now();
    for n in 0..args.count.unwrap_or(u64::MAX) {
        if n > 0 && !args.interval.is_zero() {
            start += args.interval;
            tokio::select! {
                () = sleep_until(start) => {}
                () = stop.raised() => {}
            }
        }
        if stop.is_raised() {
            break;
        }
        summary.begun += 1;
        // A round under way is finished, unless a signal finds it waiting for a server that says
        // nothing: then there is nothing to finish.
        let round = timeout(PATIENCE, client.round(n, &mut message));
        let done = tokio::select! {
            biased;
            done = round => done,
            () = async { stop.raised().await; tokio::time::sleep(Duration::from_millis(500)).await } => break,
        };
        let (time, wrong) = match done {
            Ok(Ok(done)) => done,
            Ok(Err(e)) => {
                let e = with_reason(e, &client.link.qp).await.context(format!("round {n}"));
                if n == 0 && client.link.qp.close_reason().is_some() {
                    return Err(anyhow!("{}; {SERVICE}", chain(&e)));
                }
                return Err(e);
            }
            Err(_) => {
                return Err(anyhow!("the server did not answer within {} s", PATIENCE.as_secs())
                    .context(format!("round {n}")));
            }
        };
        summary.times.add(time);
        if let Some(wrong) = &wrong {
            summary.mismatched += 1;
            note(&format!("round {n}: {wrong}"));
        }
        let us = time.as_secs_f64() * 1e6;
        if args.json {
            output::json(&json!({
                "event": "round",
                "round": n,
                "size": args.size,
                "us": us,
                "ok": wrong.is_none(),
            }));
        } else {
            if args.common.verbose {
                line(&format!("ping data: {}", rping::text(&message)));
            }
            line(&format!(
                "{} octets from {}: round={n} time={us:.1} us{}",
                args.size,
                args.target,
                if wrong.is_some() { " MISMATCH" } else { "" }
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn intervals() {
        assert_eq!(interval("0.25"), Ok(Duration::from_millis(250)));
        assert_eq!(interval("0"), Ok(Duration::ZERO));
        for text in ["-1", "x", "", "nan", "inf", "1e9"] {
            assert!(interval(text).is_err(), "{text}");
        }
    }

    /// 2, 4, 4, 4, 5, 5, 7, 9: the textbook's example with mean 5 and standard deviation 2.
    #[test]
    fn figures_are_those_of_the_textbook() {
        let mut times = Times::default();
        assert_eq!(times.stddev(), 0.0);
        for us in [2, 4, 4, 4, 5, 5, 7, 9] {
            times.add(Duration::from_micros(us));
        }
        assert_eq!(times.n, 8);
        for (got, want) in
            [(times.min, 2.0), (times.max, 9.0), (times.mean, 5.0), (times.stddev(), 2.0)]
        {
            assert!((got - want).abs() < 1e-9, "{got} {want}");
        }
    }
}
