//! A server process of our own, for `demo` and `perf --local`.
//!
//! It ends with us, however we end: it is killed when its handle is dropped, and it watches its
//! stdin, whose other end closes when this process is gone.

use std::{process::Stdio, time::Duration};

use anyhow::{Context, Result, anyhow, bail};
use serde_json::Value;
use tokio::{
    io::{AsyncBufReadExt, BufReader, Lines},
    process::{Child, ChildStdout, Command},
    time::timeout,
};

use crate::common::Target;

/// How long a server may take to listen, and to end.
const PATIENCE: Duration = Duration::from_secs(10);

/// How long its complaint is waited for once something went wrong.
const SOON: Duration = Duration::from_millis(300);

/// A `userdma serve` on a free port of loopback.
#[derive(Debug)]
pub(crate) struct ServerProcess {
    child: Child,
    lines: Lines<BufReader<ChildStdout>>,
    target: Target,
    udp_port: Option<u16>,
    counters: Option<Value>,
    /// What it last said went wrong.
    complaint: Option<String>,
}

impl ServerProcess {
    /// Starts this very executable as a server, with `extra` arguments, and waits until it
    /// listens.
    pub(crate) async fn start(ipv6: bool, extra: &[String]) -> Result<Self> {
        let listen = if ipv6 { "[::1]:0" } else { "127.0.0.1:0" };
        let args = ["serve", "--listen", listen, "--json", "--until-stdin-closes"];
        Self::spawn(args.iter().map(|s| (*s).to_owned()).chain(extra.iter().cloned())).await
    }

    /// Starts the server of the bare socket's measurements.
    pub(crate) async fn start_bare() -> Result<Self> {
        Self::spawn(["bare-server".to_owned()]).await
    }

    async fn spawn(args: impl IntoIterator<Item = String>) -> Result<Self> {
        let exe = std::env::current_exe().context("cannot find this program's own file")?;
        let mut child = Command::new(&exe)
            .args(args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("cannot start {} as a server", exe.display()))?;
        let stdout = child.stdout.take().context("the server has no stdout")?;
        let mut lines = BufReader::new(stdout).lines();
        let first = timeout(PATIENCE, lines.next_line())
            .await
            .map_err(|_| anyhow!("the server did not listen within {} s", PATIENCE.as_secs()))?
            .context("cannot read from the server")?
            .ok_or_else(|| anyhow!("the server ended before it listened"))?;
        let (target, udp_port) = listening(&first)?;
        Ok(Self { child, lines, target, udp_port, counters: None, complaint: None })
    }

    /// Where it listens.
    pub(crate) const fn target(&self) -> &Target {
        &self.target
    }

    /// Its UDP port, of RoCE.
    pub(crate) const fn udp_port(&self) -> Option<u16> {
        self.udp_port
    }

    /// The counters of its summary, once it has ended.
    pub(crate) const fn counters(&self) -> Option<&Value> {
        self.counters.as_ref()
    }

    /// What it last said went wrong, if it says so soon; for an error that this side only sees as
    /// a lost connection.
    pub(crate) async fn complaint(&mut self) -> Option<String> {
        while let Ok(Ok(Some(line))) = timeout(SOON, self.lines.next_line()).await {
            self.note(&line);
        }
        self.complaint.take()
    }

    fn note(&mut self, line: &str) {
        self.complaint = error_of(line).or(self.complaint.take());
        self.counters = counters_of(line).or(self.counters.take());
    }

    /// Waits until it says that something went wrong, and gives what. Cancel safe.
    pub(crate) async fn complains(&mut self) -> String {
        while self.complaint.is_none()
            && let Ok(Some(line)) = self.lines.next_line().await
        {
            self.note(&line);
        }
        match &self.complaint {
            Some(complaint) => complaint.clone(),
            // It has ended: its exit status tells how.
            None => std::future::pending().await,
        }
    }

    /// Waits for its end, which has to be a good one.
    pub(crate) async fn wait_success(&mut self) -> Result<()> {
        let end = async {
            while let Some(line) = self.lines.next_line().await? {
                self.note(&line);
            }
            self.child.wait().await
        };
        let status = timeout(PATIENCE, end)
            .await
            .map_err(|_| anyhow!("the server did not end within {} s", PATIENCE.as_secs()))?
            .context("cannot wait for the server")?;
        if status.success() {
            return Ok(());
        }
        match self.complaint.take() {
            Some(error) => bail!("the server says: {error}"),
            None => bail!("the server ended with {status}"),
        }
    }
}

/// The error in a server's line, if it is one.
fn error_of(line: &str) -> Option<String> {
    let event: Value = serde_json::from_str(line).ok()?;
    (event["event"] == "error").then(|| event["error"].as_str().map(str::to_owned))?
}

/// The counters in a server's line, if it is its summary.
fn counters_of(line: &str) -> Option<Value> {
    let mut event: Value = serde_json::from_str(line).ok()?;
    (event["event"] == "summary").then(|| event["counters"].take())
}

/// The address in a server's first line, and the UDP port of RoCE.
fn listening(line: &str) -> Result<(Target, Option<u16>)> {
    let event: Value = serde_json::from_str(line)
        .with_context(|| format!("the server's first line is no JSON: {line:?}"))?;
    if event["event"] != "listening" {
        bail!("the server's first line is not that it listens: {line}");
    }
    let host = event["addr"]
        .as_str()
        .and_then(|addr| addr.parse().ok())
        .with_context(|| format!("no address in the server's first line: {line}"))?;
    let port = event["port"]
        .as_u64()
        .and_then(|port| port.try_into().ok())
        .with_context(|| format!("no port in the server's first line: {line}"))?;
    let udp_port = event["udp_port"].as_u64().and_then(|port| port.try_into().ok());
    Ok((Target { host: crate::common::Host::Addr(host), port }, udp_port))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_line_tells_the_address() {
        let line = r#"{"event":"listening","transport":"iwarp","addr":"127.0.0.1","port":4711,"udp_port":null}"#;
        let read = |line: &str| listening(line).map(|(to, udp)| (to.to_string(), udp)).unwrap();
        assert_eq!(read(line), ("127.0.0.1:4711".into(), None));
        let line = line.replace("127.0.0.1", "::1").replace("null", "4791");
        assert_eq!(read(&line), ("[::1]:4711".into(), Some(4791)));
    }

    #[test]
    fn complaints_are_found_among_events() {
        let line = r#"{"event":"error","peer":"x","mode":"demo","error":"too bad"}"#;
        assert_eq!(error_of(line).as_deref(), Some("too bad"));
        for line in ["", "error", r#"{"event":"done","error":"x"}"#, r#"{"event":"error"}"#] {
            assert_eq!(error_of(line), None, "{line}");
        }
    }

    #[test]
    fn another_first_line_is_an_error() {
        for line in [
            "",
            "listening",
            r#"{"event":"error"}"#,
            r#"{"event":"listening","port":1}"#,
            r#"{"event":"listening","addr":"127.0.0.1","port":65536}"#,
            r#"{"event":"listening","addr":"x","port":1}"#,
        ] {
            assert!(listening(line).is_err(), "{line}");
        }
    }
}
