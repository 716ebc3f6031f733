//! `userdma`: software RDMA peers over ordinary sockets, and a decoder of captures.
//!
//! One command a file: [`demo`], [`serve`], [`ping`], [`perf`], [`sim`]; [`pingpong`] and
//! [`dissect`] have a folder.
//! What two of our own commands say to each other is in [`session`], what rping says in [`rping`].
//! Without the feature `peers` there are [`dissect`], [`check`], [`flows`], [`sim`] and [`generate`], and nothing that opens a socket.
#![forbid(unsafe_code)]

mod capture;
mod check;
mod dissect;
mod flows;
mod generate;
#[cfg_attr(not(feature = "peers"), allow(dead_code, reason = "the peers print more than the rest"))]
mod output;
mod sim;

#[cfg(feature = "peers")]
mod bare;
#[cfg(feature = "peers")]
mod child;
#[cfg(feature = "peers")]
mod common;
#[cfg(feature = "peers")]
mod demo;
#[cfg(feature = "peers")]
mod pattern;
#[cfg(feature = "peers")]
mod perf;
#[cfg(feature = "peers")]
mod ping;
#[cfg(feature = "peers")]
mod pingpong;
#[cfg(feature = "peers")]
mod roce;
#[cfg(feature = "peers")]
mod rping;
#[cfg(feature = "peers")]
mod serve;
#[cfg(feature = "peers")]
mod session;
#[cfg(feature = "peers")]
mod stop;

use std::process::ExitCode;

use anyhow::Result;
use clap::{CommandFactory, Parser, Subcommand};
#[cfg(feature = "peers")]
use {
    anyhow::Context,
    std::time::Duration,
    tokio::runtime::{Builder, Runtime},
};

/// RDMA in user space, over ordinary sockets: no kernel module, no RDMA NIC, no root.
#[derive(Parser, Debug)]
#[command(name = "userdma", version, propagate_version = true)]
#[cfg_attr(
    feature = "peers",
    command(after_help = "\
Examples:
  userdma demo                          see every operation work and verified
  userdma serve --listen 10.0.0.1       rping's server, and that of demo and perf
  userdma ping 10.0.0.1 -c 10           rping's client
  userdma demo --transport roce         the same over UDP: RoCEv2
  userdma perf --local --op write --size 1048576 --bw --baseline
  userdma pingpong 10.0.0.1             the client of ibv_rc_pingpong
  userdma dissect x.pcap                what RDMA a capture carries
  userdma check x.pcap                  what is wrong in it, where, and what to look at
  userdma flows x.pcap                  who talks to whom, how much, how long it takes
  userdma sim --seed 7                  RoCEv2 through loss, simulated")
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    #[cfg(feature = "peers")]
    #[command(flatten)]
    Peer(Peer),
    Dissect(dissect::Dissect),
    Check(check::Check),
    Flows(flows::Flows),
    Generate(generate::Generate),
    Sim(sim::Sim),
}

/// The commands that have sockets.
#[cfg(feature = "peers")]
#[derive(Subcommand, Debug)]
enum Peer {
    Demo(demo::Demo),
    Serve(serve::Serve),
    Ping(ping::Ping),
    Perf(perf::Perf),
    Pingpong(pingpong::Pingpong),
    /// The bare socket's side of `perf --baseline`
    #[command(hide = true)]
    BareServer,
}

/// Arguments that contradict each other, found after parsing: exit status 2.
#[cfg(feature = "peers")]
#[derive(Debug)]
pub(crate) struct Usage(pub(crate) String);

#[cfg(feature = "peers")]
impl std::fmt::Display for Usage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(feature = "peers")]
impl std::error::Error for Usage {}

fn main() -> ExitCode {
    let cli = Cli::parse();
    match run(cli.command) {
        Ok(code) => output::exit_code(code),
        Err(e) => {
            output::note(&format!("error: {}", chain(&e)));
            #[cfg(feature = "peers")]
            if e.is::<Usage>() {
                return ExitCode::from(2);
            }
            ExitCode::FAILURE
        }
    }
}

fn run(command: Command) -> Result<ExitCode> {
    match command {
        #[cfg(feature = "peers")]
        Command::Peer(peer) => run_peer(peer),
        Command::Dissect(args) => dissect::run(&args),
        Command::Check(args) => check::run(&args),
        Command::Flows(args) => flows::run(&args),
        Command::Generate(args) => generate::run(&args, Cli::command()),
        Command::Sim(args) => sim::run(&args),
    }
}

#[cfg(feature = "peers")]
fn run_peer(peer: Peer) -> Result<ExitCode> {
    let runtime = Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()
        .context("cannot start the runtime")?;
    let code = match peer {
        Peer::Demo(args) => runtime.block_on(demo::run(args)),
        Peer::Serve(args) => runtime.block_on(serve::run(args)),
        Peer::Ping(args) => runtime.block_on(ping::run(args)),
        Peer::Perf(args) => perf::run(args, &runtime),
        Peer::Pingpong(args) => runtime.block_on(pingpong::run(args)),
        Peer::BareServer => bare::serve(),
    };
    finish(runtime);
    code
}

/// Ends the runtime's tasks, and waits a moment for threads that measure to see that they shall stop.
#[cfg(feature = "peers")]
fn finish(runtime: Runtime) {
    runtime.shutdown_timeout(Duration::from_millis(200));
}

/// An error and its causes in one line, none told twice.
pub(crate) fn chain(error: &anyhow::Error) -> String {
    let mut text = String::new();
    for cause in error.chain() {
        let cause = cause.to_string();
        if text.is_empty() {
            text = cause;
        } else if !text.contains(&cause) {
            text.push_str(": ");
            text.push_str(&cause);
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_command_has_examples_in_its_help() {
        for command in Cli::command().get_subcommands().filter(|c| !c.is_hide_set()) {
            let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
            assert!(help.contains("Examples:"), "{}", command.get_name());
            assert!(help.contains(&format!("userdma {}", command.get_name())));
        }
    }

    #[test]
    fn causes_are_told_once() {
        let inner = anyhow::anyhow!("refused");
        let error = inner.context("no connection to x: refused").context("ping");
        assert_eq!(chain(&error), "ping: no connection to x: refused");
    }
}
