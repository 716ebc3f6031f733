//! Debian's own RDMA programs in the guest, each against the command of ours that is its other side.

use std::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use anyhow::{Result, ensure};
use serde_json::Value;

use crate::{
    case::{Lab, Link},
    job::Output,
    ours::{OurJob, Program},
    wire,
};

/// rping's port.
pub(crate) const PORT: u16 = 7174;
/// So long a server of ours takes to listen, at most.
const SOON: Duration = Duration::from_secs(10);

/// Our command with the switches that the peer's driver asks for.
fn with_transport<'a>(lab: &Lab, args: &[&'a str], more: &[&'a str]) -> Vec<&'a str> {
    let transport = ["--transport", lab.link().transport()];
    args.iter().copied().chain(transport).chain(more.iter().copied()).collect()
}

/// An address with its port, as our commands take it.
pub(crate) fn at(ip: IpAddr, port: u16) -> String {
    SocketAddr::new(ip, port).to_string()
}

/// `userdma serve --once`, when it listens at our address.
pub(crate) fn serve(lab: &Lab, ipv6: bool, port: u16, more: &[&str]) -> Result<OurJob> {
    let listen = at(lab.host(ipv6), port);
    let args = ["serve", "--listen", &listen, "--json", "-v"];
    let mut server = lab.ours_spawn(Program::Userdma, &with_transport(lab, &args, more))?;
    server.expect("\"listening\"", SOON)?;
    Ok(server)
}

/// Rounds that rping printed, of either side.
fn rounds(output: &Output) -> usize {
    output.text().lines().filter(|line| line.contains("ping data: rdma-ping-")).count()
}

/// One run of rping.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rping<'a> {
    pub(crate) ipv6: bool,
    /// Octets a message, the same on both sides.
    pub(crate) size: u32,
    pub(crate) rounds: u32,
    /// Further switches of our command.
    pub(crate) more: &'a [&'a str],
}

impl Rping<'_> {
    /// `rping -c -v -V` in the guest, and `userdma serve --once`. Gives the server's summary.
    pub(crate) fn client(&self, lab: &Lab) -> Result<Value> {
        let more: Vec<_> = ["--once"].iter().chain(self.more).copied().collect();
        let server = serve(lab, self.ipv6, PORT, &more)?;
        let rping = lab.guest(&format!(
            "rping -c -v -V -C {} -S {} -a {} -p {PORT}",
            self.rounds,
            self.size,
            lab.host(self.ipv6)
        ))?;
        rping.success()?;
        // rping ends with 0 even where the connection broke: its rounds are counted.
        let seen = rounds(&rping);
        ensure!(
            seen == self.rounds as usize,
            "rping -c printed {seen} rounds of {}:\n{}",
            self.rounds,
            rping.tail()
        );
        let output = lab.end_of(server)?;
        output.success()?;
        let done = output.event("done")?;
        ensure!(done["rounds"] == self.rounds, "the server counted otherwise: {done}");
        output.event("summary")
    }

    /// `rping -s -v` in the guest, and `userdma ping`. Gives the summary of `ping`.
    pub(crate) fn server(&self, lab: &Lab) -> Result<Value> {
        let guest = lab.peer(self.ipv6);
        let script = format!("rping -s -v -S {} -a {guest} -p {PORT}", self.size);
        let (to, count, size) = (at(guest, PORT), self.rounds.to_string(), self.size.to_string());
        let args = ["ping", &to, "-c", &count, "-s", &size, "-i", "0", "--json", "-v"];
        let (ping, rping) = lab.guest_beside(&script, |_| {
            lab.guest_listens(PORT)?;
            lab.ours(Program::Userdma, &with_transport(lab, &args, self.more))
        })?;
        ping.success()?;
        let summary = ping.event("summary")?;
        ensure!(
            summary["completed"] == self.rounds && summary["mismatched"] == 0,
            "not all came back right: {summary}"
        );
        let seen = rounds(&rping);
        ensure!(
            seen == self.rounds as usize,
            "rping -s saw {seen} rounds of {}:\n{}",
            self.rounds,
            rping.tail()
        );
        Ok(summary)
    }

    /// Both.
    pub(crate) fn both(&self, lab: &Lab) -> Result<()> {
        self.client(lab)?;
        self.server(lab)?;
        Ok(())
    }
}

/// `rdma_client` in the guest, and `userdma serve --as rdma-server`.
pub(crate) fn rdma_client(lab: &Lab, ipv6: bool) -> Result<()> {
    let server = serve(lab, ipv6, 7471, &["--as", "rdma-server", "--once"])?;
    let client = lab.guest(&format!("rdma_client -s {} -p 7471", lab.host(ipv6)))?;
    client.success()?.says("rdma_client: end 0")?;
    let output = lab.end_of(server)?;
    let done = output.success()?.event("done")?;
    ensure!(done["ok"] == true && done["messages"] == 2, "{done}");
    Ok(())
}

/// `rdma_server` in the guest, and our side of `rdma_client`.
pub(crate) fn rdma_server(lab: &Lab) -> Result<()> {
    let (host, guest) = (lab.host(false), lab.peer(false));
    let transport = lab.link().transport();
    let args = format!("rdma-client connect {guest} 7471 --transport {transport} --from {host}");
    let ((), theirs) = lab.guest_beside("rdma_server -p 7471", |_| {
        lab.guest_listens(7471)?;
        lab.ours(Program::Peer, &crate::traffic::words(&args))?.success()?;
        Ok(())
    })?;
    theirs.success()?.says("rdma_server: end 0")?;
    Ok(())
}

/// One run of `ibv_{rc,uc,ud,srq}_pingpong`.
#[derive(Clone, Debug)]
pub(crate) struct Pingpong {
    /// `rc`, `uc`, `ud` or `srq`.
    pub(crate) kind: &'static str,
    pub(crate) mtu: u32,
    pub(crate) size: u32,
    pub(crate) iters: u32,
    /// Both sides sleep for completions.
    pub(crate) events: bool,
    pub(crate) ipv6: bool,
}

impl Pingpong {
    fn switches(&self) -> String {
        let events = if self.events { " -e" } else { "" };
        format!("-s {} -n {}{events}", self.size, self.iters)
    }

    fn theirs(&self, host: &str) -> String {
        // The index of the GID: 1 is IPv4's, 2 that of the global IPv6 address.
        let gid = if self.ipv6 { 2 } else { 1 };
        let mtu = if self.kind == "ud" { String::new() } else { format!("-m {}", self.mtu) };
        format!("ibv_{}_pingpong -d rxe0 -g {gid} {mtu} {} {host}", self.kind, self.switches())
    }

    fn ours(&self, lab: &Lab) -> Vec<String> {
        let bind = lab.host(self.ipv6);
        let mut all =
            format!("pingpong -t {} --json -v {} --bind {bind}", self.kind, self.switches());
        if self.kind != "ud" {
            all += &format!(" --mtu {}", self.mtu);
        }
        all.split_whitespace().map(str::to_owned).collect()
    }

    /// The guest's program is the client.
    pub(crate) fn client(&self, lab: &Lab) -> Result<()> {
        let args = self.ours(lab);
        let args: Vec<_> = args.iter().map(String::as_str).collect();
        let mut server = lab.ours_spawn(Program::Userdma, &args)?;
        server.expect("\"listening\"", SOON)?;
        let theirs = lab.guest(&self.theirs(&lab.host(self.ipv6).to_string()))?;
        let ours = lab.end_of(server)?;
        self.judge(&theirs, &ours)
    }

    /// The guest's program is the server. It exchanges its numbers over IPv4 alone.
    pub(crate) fn server(&self, lab: &Lab) -> Result<()> {
        let mut args = self.ours(lab);
        args.push(lab.peer(false).to_string());
        let args: Vec<_> = args.iter().map(String::as_str).collect();
        let (ours, theirs) = lab.guest_beside(&self.theirs(""), |_| {
            lab.guest_listens(18515)?;
            lab.ours(Program::Userdma, &args)
        })?;
        self.judge(&theirs, &ours)
    }

    fn judge(&self, theirs: &Output, ours: &Output) -> Result<()> {
        theirs.success()?.says(&format!("{} iters in ", self.iters))?;
        let summary = ours.success()?.event("summary")?;
        ensure!(summary["iters"] == self.iters, "{summary}");
        Ok(())
    }
}

/// Nobody listens where `userdma ping` asks: it says so at once.
pub(crate) fn no_listener_there(lab: &Lab) -> Result<()> {
    let to = at(lab.peer(false), 7999);
    let ping = lab.ours(Program::Userdma, &with_transport(lab, &["ping", &to, "-c", "1"], &[]))?;
    let why = match lab.link() {
        Link::Siw => "refused",
        Link::Rxe => "reason 8",
    };
    ping.ended_with(1)?.says(why)?;
    ensure!(ping.took < Duration::from_secs(5), "it took {:?}", ping.took);
    Ok(())
}

/// Nobody listens where the guest's rping asks.
pub(crate) fn no_listener_here(lab: &Lab) -> Result<()> {
    // Of RoCE there must be somebody behind the UDP port who says so.
    let server = serve(lab, false, PORT, &[])?;
    // Not rping: over siw it waits for ever when it is refused.
    let client = lab.guest(&format!("verbs connect {} 7999 send:1", lab.host(false)))?;
    server.interrupt(SOON)?.success()?;
    match lab.link() {
        Link::Siw => client.ended_with(1)?.says("rdma_connect: Connection refused")?,
        Link::Rxe => client.ended_with(3)?.says("RDMA_CM_EVENT_REJECTED\",\"status\":8")?,
    };
    ensure!(client.took < Duration::from_secs(5), "it took {:?}", client.took);
    Ok(())
}

/// A server of ours that is full rejects the guest's second rping, and says why in private data.
pub(crate) fn reject_here(lab: &Lab) -> Result<()> {
    let mut server = serve(lab, false, PORT, &["--max-clients", "1"])?;
    let rping = format!("rping -c -v -S 64 -a {} -p {PORT}", lab.host(false));
    lab.guest_while(&format!("{rping} -C 1000000 >/dev/null"), |_| {
        server.expect("\"connected\"", SOON)?;
        let second = lab.guest(&format!("{rping} -C 1"))?;
        second.says("RDMA_CM_EVENT_REJECTED")?;
        Ok(())
    })?;
    server.expect("too many clients", SOON)?;
    server.interrupt(SOON)?;
    wire::refused_with(&lab.wire()?, b"too many clients")
}
