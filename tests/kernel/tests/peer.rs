//! `peer` against `peer` over loopback: what it carries out, and that it sees what goes wrong. Against a kernel
//! it is the judge, so it is judged here first.

use std::{
    io::{BufRead, BufReader},
    process::{Child, ChildStdout, Command, Stdio},
    time::{Duration, Instant},
};

use serde_json::Value;

const TRANSPORTS: [&str; 2] = ["iwarp", "roce"];
/// Longer than anything here takes on a slow machine.
const PATIENCE: Duration = Duration::from_secs(60);

/// A run's end.
#[derive(Debug)]
struct Ran {
    code: Option<i32>,
    events: Vec<Value>,
}

impl Ran {
    fn all<'a>(&'a self, name: &str) -> impl DoubleEndedIterator<Item = &'a Value> + use<'a> {
        let name = name.to_owned();
        self.events.iter().filter(move |event| event["event"] == name)
    }

    #[track_caller]
    fn one(&self, name: &str) -> &Value {
        let found: Vec<_> = self.all(name).collect();
        assert_eq!(found.len(), 1, "{name}: {self:?}");
        found[0]
    }

    #[track_caller]
    fn went_well(&self) {
        assert_eq!(self.code, Some(0), "{self:?}");
        assert_eq!(self.one("summary")["ok"], true, "{self:?}");
    }
}

/// A `peer` that runs. It is ended when this is dropped.
struct Running {
    child: Child,
    lines: BufReader<ChildStdout>,
    events: Vec<Value>,
}

impl Running {
    fn start(args: &str) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_peer"))
            .args(args.split_whitespace())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap());
        Self { child, lines, events: Vec::new() }
    }

    /// The next event; `None` at the end.
    fn next(&mut self) -> Option<&Value> {
        let mut line = String::new();
        if self.lines.read_line(&mut line).unwrap() == 0 {
            return None;
        }
        let event = serde_json::from_str(&line).unwrap_or_else(|e| panic!("{e}: {line:?}"));
        self.events.push(event);
        self.events.last()
    }

    fn end(mut self) -> Ran {
        while self.next().is_some() {}
        let until = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                let events = std::mem::take(&mut self.events);
                return Ran { code: status.code(), events };
            }
            assert!(Instant::now() < until, "it has not ended after {PATIENCE:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A server and a client at two addresses of their own: RoCE's UDP port is the same for all.
/// `kind` is empty or the example.
fn pair(net: u8, kind: &str, transport: &str, server: &str, client: &str) -> (Ran, Ran) {
    let at = |host: u8| format!("127.47.{net}.{host}");
    let transport = format!("--transport {transport}");
    let mut server = Running::start(&format!("{kind} listen {} 7301 {transport} {server}", at(1)));
    assert_eq!(server.next().expect("it listens")["event"], "listening");
    let client = format!("{kind} connect {} 7301 {transport} --from {} {client}", at(1), at(2));
    let client = Running::start(&client).end();
    (server.end(), client)
}

#[test]
fn every_size_of_every_operation() {
    for (net, transport) in (1..).zip(TRANSPORTS) {
        let ops: String = [0, 1, 3, 4095, 4096, 4097, 65_535, 65_536, 65_537, 1_000_003]
            .map(|len| format!("send:{len} write:{len} check read:{len} "))
            .concat();
        let room = "--memory 4194304 --receive-size 1048576 --receives 40";
        let more =
            "faa:5 cas:0x1111111111111116:7 faa:1 write2:9 burst:32:100 writeimm:10:7 sendinv:3";
        let (server, client) =
            pair(net, "", transport, room, &format!("--memory 4194304 {ops} {more}"));
        client.went_well();
        server.went_well();
        assert_eq!(server.all("received").count(), 10 + 32 + 1 + 1, "{server:?}");
        assert!(server.all("received").all(|event| event["ok"] == true));
        assert_eq!(server.all("checked").count(), 10);
        let immediates: Vec<_> =
            server.all("received").filter_map(|event| event["imm"].as_u64()).collect();
        assert_eq!(immediates, [7]);
        assert_eq!(server.all("received").filter(|e| e["invalidated"].is_u64()).count(), 1);
        // What the atomics found, and what they left.
        let olds: Vec<_> = client.all("sent").filter_map(|event| event["old"].as_str()).collect();
        assert_eq!(olds, ["1111111111111111", "1111111111111116", "0000000000000007"]);
        assert_eq!(server.one("closed")["words"][0], "0000000000000008");
    }
}

#[test]
fn what_only_one_transport_has() {
    let (server, client) =
        pair(3, "", "roce", "", "write:100 flush sendimm:10:77 atomicwrite:9 check");
    client.went_well();
    server.went_well();
    assert_eq!(server.one("received")["imm"], 77);
    assert_eq!(server.one("closed")["words"][0], "0000000000000009");
    let (server, client) = pair(4, "", "iwarp", "", "sendimm:10:77");
    assert_eq!(client.code, Some(1));
    assert_eq!(client.one("sent")["status"], "refused");
    server.went_well();
}

#[test]
fn errors_end_with_their_status() {
    for (net, transport) in (5..).zip(TRANSPORTS) {
        for (server, op, status) in [
            ("", "badread:100", "REM_ACCESS_ERR"),
            ("", "oobread:100", "REM_ACCESS_ERR"),
            ("", "badfaa:1", "REM_ACCESS_ERR"),
            // Over TCP a WRITE is done when it is sent; the next one learns of the end.
            ("", "badwrite:100", "REM_ACCESS_ERR"),
            ("", "oobwrite:100", "REM_ACCESS_ERR"),
            ("--receive-size 100", "send:101", "REM_INV_REQ_ERR"),
        ] {
            let told = transport == "roce" || op.contains("read") || op.contains("faa");
            let behind = if told { "" } else { "sleep:200 read:8" };
            let (server, client) = pair(net, "", transport, server, &format!("{op} {behind}"));
            let last = client.all("sent").last().unwrap_or_else(|| panic!("{op}: {client:?}"));
            let status = if told { status } else { "WR_FLUSH_ERR" };
            assert_eq!(last["status"], status, "{transport} {op}: {client:?}");
            assert_eq!(client.code, Some(1), "{transport} {op}: {client:?}");
            assert_eq!(server.code, Some(1), "{transport} {op}: {server:?}");
        }
    }
}

#[test]
fn contents_that_are_wrong_are_seen() {
    // The client asks the server to look at what another WRITE has covered since.
    for (net, transport) in (7..).zip(TRANSPORTS) {
        let (server, client) = pair(net, "", transport, "", "write:100 writeimm:50:1 check");
        client.went_well();
        server.went_well();
        // `faa` changes a word; the READ's half is as it was, and is compared.
        let (server, client) = pair(net, "", transport, "--memory 65536", "read:40000");
        assert_eq!(client.one("sent")["ok"], false, "{client:?}");
        assert_eq!(client.code, Some(1));
        server.went_well();
    }
}

#[test]
fn connections_that_are_and_are_not() {
    for (net, transport) in (9..).zip(TRANSPORTS) {
        let (server, client) = pair(
            net,
            "",
            transport,
            "--connections 20",
            "--connections 20 --private who-asks send:10 read:10",
        );
        client.went_well();
        server.went_well();
        assert_eq!(server.all("request").filter(|e| e["private"] == "who-asks").count(), 20);
        assert_eq!(server.all("received").count(), 20);
        let (server, client) = pair(net, "", transport, "--reject not-today", "send:10");
        assert_eq!(client.code, Some(3), "{client:?}");
        assert_eq!(client.one("rejected")["private"], "not-today");
        server.went_well();
        let nobody =
            format!("connect 127.47.{net}.1 7302 --from 127.47.{net}.2 --transport {transport}");
        let client = Running::start(&nobody).end();
        assert_eq!(client.code, Some(3), "{client:?}");
        assert!(client.all("sent").next().is_none());
    }
}

#[test]
fn receives_that_come_late_or_never() {
    let (server, client) = pair(11, "", "roce", "--receive-late 300", "send:100");
    client.went_well();
    server.went_well();
    let never = "--receive-late never";
    let never_counted = format!("{never} --rnr-retry 1");
    let (_, client) = pair(11, "", "roce", &never_counted, "send:100");
    assert_eq!(client.one("sent")["status"], "RNR_RETRY_EXC_ERR", "{client:?}");
    let (server, client) = pair(12, "", "iwarp", never, "send:10 sleep:200");
    assert!(client.all("sent").all(|event| event["ok"] == true), "{client:?}");
    // The end alone tells it.
    assert_eq!((server.code, client.code), (Some(1), Some(1)), "{server:?} {client:?}");
}

#[test]
fn the_examples_of_librdmacm_both_ways() {
    for (net, kind, transport, more) in
        [(13, "cmatose", "iwarp", "--p2p"), (14, "cmatose", "roce", ""), (15, "udaddy", "roce", "")]
    {
        let set = format!("--messages 5 --size 200 {more}");
        let (server, client) = pair(net, kind, transport, &set, &set);
        for side in [&server, &client] {
            assert_eq!(side.code, Some(0), "{kind} {transport}: {side:?}");
        }
    }
}

#[test]
fn wrong_arguments_say_what_is_wrong() {
    for (args, says) in [
        ("", "is no role"),
        ("listen", "ADDRESS is missing"),
        ("connect nowhere 1", "ADDRESS: not \"nowhere\""),
        ("connect 127.0.0.1 70000", "PORT: not \"70000\""),
        ("listen 127.0.0.1 1 --colour red", "there is no option --colour"),
        ("listen 127.0.0.1 1 --mtu 1000", "--mtu is 256"),
        ("listen 127.0.0.1 1 --transport tcp", "--transport is iwarp or roce"),
        ("listen 127.0.0.1 1 --memory 5", "--memory is 16384 at least"),
    ] {
        let output = Command::new(env!("CARGO_BIN_EXE_peer"))
            .args(args.split_whitespace())
            .output()
            .unwrap();
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains(says), "{args}: {said}");
        assert_eq!(output.status.code(), Some(2), "{args}");
    }
}
