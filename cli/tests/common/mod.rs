//! Running the built command.
#![allow(dead_code, reason = "each test file uses a part")]

use std::{
    io::{BufRead, BufReader, Read},
    process::{Child, ChildStderr, ChildStdin, ChildStdout, Command, Output, Stdio},
    thread,
    time::{Duration, Instant},
};

use serde_json::Value;

/// Longer than anything here takes on a slow machine, shorter than a person's patience.
pub(crate) const PATIENCE: Duration = Duration::from_secs(120);

/// The command with `args`, both outputs piped: the one that cargo built, or `$USERDMA_BIN` for a user
/// who cannot see that.
pub(crate) fn command(args: &[&str]) -> Command {
    let built = || env!("CARGO_BIN_EXE_userdma").into();
    let mut command = Command::new(std::env::var_os("USERDMA_BIN").unwrap_or_else(built));
    command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Runs to the end; a command that hangs is ended and fails the test.
pub(crate) fn run(args: &[&str]) -> Output {
    finish(command(args).spawn().expect("the command starts"), args)
}

/// Waits for the end of `child`.
pub(crate) fn finish(mut child: Child, args: &[&str]) -> Output {
    let read = |mut pipe: Box<dyn Read + Send>| {
        thread::spawn(move || {
            let mut all = Vec::new();
            let _ = pipe.read_to_end(&mut all);
            all
        })
    };
    let out = child.stdout.take().map(|p: ChildStdout| read(Box::new(p)));
    let err = child.stderr.take().map(|p: ChildStderr| read(Box::new(p)));
    let deadline = Instant::now() + PATIENCE;
    let status = loop {
        if let Some(status) = child.try_wait().expect("the child can be waited for") {
            break status;
        }
        if Instant::now() > deadline {
            let _ = child.kill();
            panic!("{args:?} did not end within {PATIENCE:?}");
        }
        thread::sleep(Duration::from_millis(5));
    };
    let text = |t: Option<thread::JoinHandle<Vec<u8>>>| {
        t.map(|t| t.join().expect("the reader ends")).unwrap_or_default()
    };
    Output { status, stdout: text(out), stderr: text(err) }
}

pub(crate) fn stdout(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned()
}

pub(crate) fn stderr(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// Runs, wants exit status `code`, and gives back the output.
pub(crate) fn run_for(code: i32, args: &[&str]) -> Output {
    let output = run(args);
    assert_eq!(
        output.status.code(),
        Some(code),
        "{args:?}\n{}\n{}",
        stdout(&output),
        stderr(&output)
    );
    output
}

/// The JSON objects on stdout, one a line.
pub(crate) fn objects(output: &Output) -> Vec<Value> {
    let text = stdout(output);
    text.lines()
        .map(|line| serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}")))
        .collect()
}

/// Sends `signal` (INT, TERM) to a process that the test started.
pub(crate) fn signal(child: &Child, signal: &str) {
    let status = Command::new("kill")
        .args([format!("-{signal}"), child.id().to_string()])
        .status()
        .expect("kill(1) is there");
    assert!(status.success());
}

/// A `userdma serve --json` that is ended with the test.
pub(crate) struct Server {
    pub(crate) child: Child,
    pub(crate) addr: String,
    pub(crate) first: Value,
    pub(crate) lines: BufReader<ChildStdout>,
    stdin: Option<ChildStdin>,
}

impl Server {
    /// On a free port of IPv4 loopback.
    pub(crate) fn start(extra: &[&str]) -> Self {
        Self::listen("127.0.0.1:0", extra)
    }

    pub(crate) fn listen(addr: &str, extra: &[&str]) -> Self {
        let mut command = command(&["serve", "--listen", addr, "--json", "--until-stdin-closes"]);
        let mut child =
            command.args(extra).stdin(Stdio::piped()).spawn().expect("the server starts");
        let stdin = child.stdin.take();
        let mut lines = BufReader::new(child.stdout.take().expect("stdout is piped"));
        let mut first = String::new();
        lines.read_line(&mut first).expect("the first line can be read");
        let first: Value = serde_json::from_str(&first).expect("the first line is JSON");
        let (ip, port) = (first["addr"].as_str().unwrap(), first["port"].as_u64().unwrap());
        let addr = if ip.contains(':') { format!("[{ip}]:{port}") } else { format!("{ip}:{port}") };
        Self { child, addr, first, lines, stdin }
    }

    /// The next event.
    pub(crate) fn event(&mut self) -> Value {
        let mut line = String::new();
        self.lines.read_line(&mut line).expect("a line can be read");
        serde_json::from_str(&line).unwrap_or_else(|e| panic!("{e}: {line:?}"))
    }

    /// The next event of this kind; others are passed over.
    pub(crate) fn event_of(&mut self, kind: &str) -> Value {
        loop {
            let event = self.event();
            if event["event"] == kind {
                return event;
            }
        }
    }

    /// Closes its stdin and waits for its end.
    pub(crate) fn close(mut self) -> (Output, Vec<Value>) {
        drop(self.stdin.take());
        self.wait()
    }

    /// Closes the reading end of its stdout.
    pub(crate) fn lose_stdout(&mut self) {
        let mut other = Command::new("true").stdout(Stdio::piped()).spawn().expect("true(1) runs");
        self.lines = BufReader::new(other.stdout.take().expect("stdout is piped"));
        let _ = other.wait();
    }

    /// Waits for its end: the rest of the events.
    pub(crate) fn wait(mut self) -> (Output, Vec<Value>) {
        let mut events = Vec::new();
        let mut text = String::new();
        self.lines.read_to_string(&mut text).expect("the rest can be read");
        for line in text.lines() {
            events.push(serde_json::from_str(line).unwrap_or_else(|e| panic!("{e}: {line}")));
        }
        let mut child = Command::new("true").spawn().expect("true(1) is there");
        std::mem::swap(&mut child, &mut self.child);
        (finish(child, &["serve"]), events)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The operations of `demo`, as `--corrupt` names them and as it shows them.
pub(crate) const OPERATIONS: [(&str, &str); 14] = [
    ("send", "SEND/RECV"),
    ("write", "WRITE"),
    ("read", "READ"),
    ("send-inv", "SEND with invalidate"),
    ("send-se", "SEND with solicited event"),
    ("send-imm", "SEND with immediate"),
    ("imm", "Immediate"),
    ("write-imm", "WRITE with immediate"),
    ("fetch-add", "FetchAdd"),
    ("masked-fetch-add", "FetchAdd, masked"),
    ("cmp-swap", "CmpSwap"),
    ("masked-cmp-swap", "CmpSwap, masked"),
    ("flush", "WRITE and FLUSH"),
    ("atomic-write", "AtomicWrite"),
];

/// The rows of `demo --json`: every operation, each message verified on both sides, but those that
/// the transport `lacks`.
pub(crate) fn verified(rows: &[Value], lacks: &[&str], count: u64, size: u64) {
    let names: Vec<_> = rows.iter().map(|row| row["operation"].as_str().unwrap()).collect();
    assert_eq!(names, OPERATIONS.map(|(_, name)| name));
    for row in rows {
        let name = row["operation"].as_str().unwrap();
        let octets = match name {
            "Immediate" | "AtomicWrite" => 8,
            name if name.starts_with("FetchAdd") || name.starts_with("CmpSwap") => 8,
            _ => size,
        };
        let there = !lacks.contains(&name);
        let count = if there { count } else { 0 };
        assert_eq!(row["supported"], there, "{row}");
        assert_eq!(row["ok"], true, "{row}");
        assert_eq!(row["messages"], 2 * count, "{row}");
        assert_eq!(row["bytes"], 2 * count * octets, "{row}");
        assert_eq!(row["client_verified"], count, "{row}");
        assert_eq!(row["server_verified"], count, "{row}");
        assert_eq!(row["seconds"].as_f64().unwrap() > 0.0, there, "{row}");
    }
}

/// `demo --corrupt` with `args` finds the octet in every operation that the transport does not
/// lack, says where it is and who found it.
pub(crate) fn falsified(args: &[&str], lacks: &[&str]) {
    for (op, name) in OPERATIONS {
        let mut all = vec!["demo", "--size", "100", "--count", "9", "--corrupt", op];
        all.extend(args);
        if lacks.contains(&name) {
            // There is nothing to be falsified, and nothing is found.
            let output = run_for(0, &all);
            assert_eq!(stderr(&output), "");
            continue;
        }
        let output = run_for(1, &all);
        let text = stderr(&output);
        let complaint = text.lines().find(|line| line.starts_with("mismatch: "));
        let complaint = complaint.unwrap_or_else(|| panic!("{op}: {text}"));
        assert!(complaint.contains(&format!("{name}: message 4, ")), "{complaint}");
        assert!(complaint.contains("expected 0x") && complaint.contains("found 0x"), "{complaint}");
        let side = match op {
            "read" | "fetch-add" | "masked-fetch-add" | "cmp-swap" | "masked-cmp-swap" => "client",
            _ => "server",
        };
        assert!(complaint.contains(&format!("found by the {side}")), "{complaint}");
        // Words of 8 octets have no offset.
        if matches!(op, "send" | "write" | "read" | "send-inv" | "send-se" | "send-imm")
            || matches!(op, "write-imm" | "flush")
        {
            assert!(complaint.contains("offset 50"), "{complaint}");
        }
        assert!(stdout(&output).contains("MISMATCH"));
        // Nothing else is wrong.
        assert_eq!(text.lines().count(), 1, "{text}");
    }
}
