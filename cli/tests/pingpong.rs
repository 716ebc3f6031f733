//! `userdma pingpong`: two processes against each other, and one against what the programs of
//! libibverbs say.

mod common;

use std::{
    io::{BufRead, BufReader, Read, Write},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, TcpListener, TcpStream, UdpSocket},
    process::{Child, ChildStdout, Output, Stdio},
    time::Duration,
};

use common::*;
use serde_json::Value;

const LOCAL: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

/// Two UDP ports that nobody has at the moment.
fn free_ports(ip: IpAddr) -> [String; 2] {
    let sockets = [(); 2].map(|()| UdpSocket::bind((ip, 0)).unwrap());
    sockets.map(|socket| socket.local_addr().unwrap().port().to_string())
}

/// A server, listening.
struct Listening {
    child: Child,
    port: String,
    lines: BufReader<ChildStdout>,
}

impl Listening {
    fn start(args: &[&str]) -> Self {
        let mut all = vec!["pingpong", "--port", "0", "--json"];
        all.extend(args);
        let mut child = command(&all).stdin(Stdio::null()).spawn().unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap());
        let mut first = String::new();
        lines.read_line(&mut first).unwrap();
        let first: Value = serde_json::from_str(&first).expect("the first line is JSON");
        assert_eq!(first["event"], "listening");
        Self { child, port: first["port"].to_string(), lines }
    }

    /// Its end: the output, and the events after the first.
    fn wait(mut self) -> (Output, Vec<Value>) {
        let mut text = String::new();
        self.lines.read_to_string(&mut text).unwrap();
        let events = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        (finish(self.child, &["pingpong"]), events)
    }
}

/// Two processes on `ip`, each with a UDP port of its own; `args` for both, `server` and `client` for
/// one. The outputs of both, and the events of both.
fn play(ip: IpAddr, args: &[&str], server: &[&str], client: &[&str]) -> [(Output, Vec<Value>); 2] {
    let [a, b] = free_ports(ip);
    let host = ip.to_string();
    let mut all = vec!["--udp-port", &a, "--peer-udp-port", &b, "--bind", &host];
    all.extend(args);
    all.extend(server);
    let server = Listening::start(&all);
    let mut all = vec!["pingpong", &host, "--port", &server.port, "--json", "--bind", &host];
    all.extend(["--udp-port", &b, "--peer-udp-port", &a]);
    all.extend(args);
    all.extend(client);
    let client = run(&all);
    let events = match client.status.code() {
        Some(0) => objects(&client),
        _ => vec![],
    };
    [server.wait(), (client, events)]
}

/// Both end well, and say the same about it.
fn play_well(ip: IpAddr, args: &[&str], server: &[&str], client: &[&str]) -> Value {
    let sides = play(ip, args, server, client);
    for (output, _) in &sides {
        assert_eq!(output.status.code(), Some(0), "{args:?} {}", stderr(output));
    }
    let [(_, server), (_, client)] = sides;
    let [connected, summary] = &client[..] else { panic!("{client:?}") };
    let [there, other] = &server[..] else { panic!("{server:?}") };
    assert_eq!((&connected["event"], &there["event"]), (&"connected".into(), &"connected".into()));
    // Each knows the other one as that knows itself.
    assert_eq!(connected["local"], there["remote"]);
    assert_eq!(connected["remote"], there["local"]);
    for name in ["event", "type", "size", "iters", "qps", "octets", "mismatched"] {
        assert_eq!(summary[name], other[name], "{name}");
    }
    assert_eq!(summary["event"], "summary");
    assert_eq!(summary["mismatched"], 0);
    assert_eq!(connected["local"].as_array().unwrap().len() as u64, summary["qps"]);
    assert!(summary["us_per_iter"].as_f64().unwrap() > 0.1, "{summary}");
    let iters = summary["iters"].as_u64().unwrap();
    assert_eq!(summary["octets"], 2 * iters * summary["size"].as_u64().unwrap());
    summary.clone()
}

#[test]
fn all_four_types_play_on_both_ip_versions() {
    for ip in [LOCAL, Ipv6Addr::LOCALHOST.into()] {
        for (kind, size, qps) in
            [("rc", 4096, 1), ("uc", 4096, 1), ("ud", 1024, 1), ("srq", 4096, 16)]
        {
            let args = ["--type", kind, "--check", "--iters", "200"];
            let summary = play_well(ip, &args, &[], &[]);
            assert_eq!(summary["type"], kind);
            assert_eq!((&summary["size"], &summary["qps"]), (&size.into(), &qps.into()));
            assert_eq!(summary["checked"], true);
        }
    }
}

#[test]
fn every_path_mtu_and_odd_sizes() {
    for kind in ["rc", "uc"] {
        for mtu in ["256", "512", "1024", "2048", "4096"] {
            for size in ["1", "5000", "100001"] {
                let args = ["--type", kind, "--mtu", mtu, "-s", size, "-n", "5", "-c"];
                let summary = play_well(LOCAL, &args, &[], &[]);
                assert_eq!(summary["size"].to_string(), size);
            }
        }
    }
    play_well(LOCAL, &["--type", "ud", "-s", "4096", "-n", "5", "-c"], &[], &[]);
    play_well(LOCAL, &["--type", "ud", "-s", "1", "-n", "5", "-c"], &[], &[]);
}

#[test]
fn asleep_between_messages_and_with_one_receive_at_a_time() {
    for kind in ["rc", "uc", "ud"] {
        play_well(LOCAL, &["--type", kind, "-e", "-n", "100", "-c", "-r", "1"], &[], &[]);
    }
    play_well(LOCAL, &["--type", "srq", "-e", "-n", "100", "-r", "4", "-q", "4"], &[], &[]);
    play_well(LOCAL, &["--type", "srq", "-n", "300", "-r", "255", "-q", "255"], &[], &[]);
}

/// RC repeats what is lost, both ways, up to the last acknowledgement.
#[test]
fn reliable_types_play_through_loss() {
    for (kind, seed) in [("rc", "seed=1"), ("rc", "seed=2"), ("srq", "seed=3")] {
        let impair = format!("loss=2%,dup=2%,reorder=2%,{seed}");
        let args =
            ["--type", kind, "-n", "200", "-c", "--timeout", "30", "-v", "--impair", &impair];
        let sides = play(LOCAL, &args, &[], &[]);
        let mut resent = 0;
        for (output, events) in &sides {
            let text = stderr(output);
            assert_eq!(output.status.code(), Some(0), "{text}");
            assert_eq!(events.last().unwrap()["mismatched"], 0);
            let (_, rest) = text.split_once(" resent ").expect(&text);
            resent += rest.split(' ').next().unwrap().parse::<u64>().unwrap();
        }
        assert!(resent > 0, "{seed}: nothing was lost");
    }
}

#[test]
fn what_is_lost_for_good_is_told() {
    let args = ["--type", "uc", "--timeout", "0.5"];
    let [(server, _), (client, _)] = play(LOCAL, &args, &["--impair", "loss=100%"], &[]);
    for output in [server, client] {
        assert_eq!(output.status.code(), Some(1));
        let text = stderr(&output);
        assert!(
            text.contains("nothing came for 0.5 s") && text.contains("does not repeat"),
            "{text}"
        );
    }
}

#[test]
fn sizes_that_differ_are_told() {
    for kind in ["rc", "ud"] {
        let args = ["--type", kind, "--timeout", "1"];
        let [(server, _), (client, _)] = play(LOCAL, &args, &["-s", "1000"], &["-s", "900"]);
        assert_eq!((server.status.code(), client.status.code()), (Some(1), Some(1)));
        let text = stderr(&server);
        assert!(text.contains("messages of 900 octets") && text.contains("--size"), "{text}");
    }
}

#[test]
fn queue_pairs_that_differ_are_told() {
    let args = ["--type", "srq", "--timeout", "1"];
    let [(server, _), (client, _)] = play_and_end(&args, &["-q", "3"], &["-q", "5"]);
    assert_eq!((server.status.code(), client.status.code()), (Some(1), Some(1)));
    let text = stderr(&server);
    assert!(text.contains("5 queue pairs and this side 3"), "{text}");
}

/// As `play`, with a server that is told to end when the client has.
fn play_and_end(args: &[&str], server: &[&str], client: &[&str]) -> [(Output, Vec<Value>); 2] {
    let mut all = args.to_vec();
    all.extend(server);
    let server = Listening::start(&all);
    let mut all = vec!["pingpong", "127.0.0.1", "--port", &server.port];
    let [a, b] = free_ports(LOCAL);
    all.extend(["--udp-port", &a, "--peer-udp-port", &b]);
    all.extend(args);
    all.extend(client);
    let client = (run(&all), vec![]);
    signal(&server.child, "INT");
    [server.wait(), client]
}

/// On one host without any switch: the client takes another address of loopback.
#[test]
fn a_client_on_loopback_finds_an_address_of_its_own() {
    let [udp, _] = free_ports(LOCAL);
    let server = Listening::start(&["--udp-port", &udp, "--peer-udp-port", &udp, "-n", "10"]);
    let args = ["pingpong", "localhost", "--port", &server.port, "-n", "10", "-c"];
    let mut all = args.to_vec();
    all.extend(["--udp-port", &udp, "--peer-udp-port", &udp]);
    let client = run_for(0, &all);
    let text = stdout(&client);
    let local = text.lines().find(|line| line.contains("local address:")).expect(&text);
    assert!(
        local.contains("LID 0x0000, QPN 0x") && local.contains("GID ::ffff:127.0.0."),
        "{text}"
    );
    assert!(!local.ends_with("127.0.0.1"), "{text}");
    assert!(text.contains("81920 bytes in ") && text.contains("10 iters in "), "{text}");
    assert_eq!(server.wait().0.status.code(), Some(0));
}

/// What a program says, octet by octet; each by one call, and each read by one call.
#[test]
fn a_server_says_what_the_programs_read() {
    let [udp, peer] = free_ports(LOCAL);
    let args = ["--udp-port", &udp, "--peer-udp-port", &peer, "--timeout", "0.3"];
    let server = Listening::start(&args);
    let addr = format!("127.0.0.1:{}", server.port);

    // Somebody else, and a program without a GID index: both are told of, and passed over.
    let mut tcp = TcpStream::connect(&addr).unwrap();
    tcp.write_all(b"GET / HTTP/1.0\r\n\r\n").unwrap();
    drop(tcp);
    let mut tcp = TcpStream::connect(&addr).unwrap();
    tcp.write_all(b"0000:000011:084c82:00000000000000000000000000000000\0").unwrap();
    assert_eq!(tcp.read(&mut [0; 1]).unwrap(), 0);

    let mut tcp = TcpStream::connect(&addr).unwrap();
    tcp.write_all(b"0000:000011:084c82:00000000000000000000ffff7f000002\0").unwrap();
    let mut line = [0; 100];
    assert_eq!(tcp.read(&mut line).unwrap(), 52);
    let text = std::str::from_utf8(&line[..51]).unwrap();
    assert_eq!((&text[..5], &text[11..12], &text[18..19]), ("0000:", ":", ":"));
    assert_eq!(&text[19..], "00000000000000000000ffff7f000001");
    assert_eq!(line[51], 0);
    let qpn = u32::from_str_radix(&text[5..11], 16).unwrap();
    let psn = u32::from_str_radix(&text[12..18], 16).unwrap();
    assert!(qpn > 1);
    tcp.write_all(b"done\0").unwrap();

    let (output, events) = server.wait();
    let text = stderr(&output);
    assert!(text.contains("octet") || text.contains("it closed after 18 of 52"), "{text}");
    assert!(text.contains("told no GID"), "{text}");
    // Nobody played: the client was only words.
    assert_eq!(output.status.code(), Some(1));
    assert!(text.contains("nothing came for 0.3 s"), "{text}");
    let connected = &events[0];
    assert_eq!(
        (&connected["local"][0]["qpn"], &connected["local"][0]["psn"]),
        (&qpn.into(), &psn.into())
    );
    let remote = &connected["remote"][0];
    assert_eq!((&remote["qpn"], &remote["psn"]), (&0x11.into(), &0x8_4c82.into()));
    assert_eq!(remote["gid"], "::ffff:127.0.0.2");
}

#[test]
fn a_client_says_what_the_programs_read() {
    for (kind, all) in [("rc", 1), ("srq", 256)] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port().to_string();
        let [udp, peer] = free_ports(LOCAL);
        let mut args = vec!["pingpong", "127.0.0.1", "--port", &port, "--type", kind];
        args.extend(["--bind", "127.0.0.1", "--udp-port", &udp, "--peer-udp-port", &peer]);
        args.extend(["--timeout", "0.3"]);
        let child = command(&args).spawn().unwrap();
        let mut tcp = listener.accept().unwrap().0;
        tcp.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let mut lines = vec![0; all * 52];
        if all == 1 {
            assert_eq!(tcp.read(&mut lines).unwrap(), 52);
        } else {
            tcp.read_exact(&mut lines).unwrap();
        }
        let used = if all == 1 { 1 } else { 16 };
        for (i, line) in lines.chunks(52).enumerate() {
            let text = std::str::from_utf8(&line[..51]).unwrap();
            assert_eq!(line[51], 0);
            if i < used {
                assert_eq!(&text[19..], "00000000000000000000ffff7f000001");
                assert_ne!(&text[5..11], "000000");
            } else {
                assert_eq!(text, "0000:000000:000000:00000000000000000000000000000000");
            }
        }
        // Its own numbers back, which are as good as any.
        tcp.write_all(&lines).unwrap();
        let mut done = [0; 9];
        assert_eq!(tcp.read(&mut done).unwrap(), 5);
        assert_eq!(&done[..5], b"done\0");
        let output = finish(child, &args);
        assert_eq!(output.status.code(), Some(1), "{}", stderr(&output));
    }
}

/// A peer that is silent for a second, as one that waits for a processor may be, is not given up: the
/// first message goes out again and again, until --timeout.
#[test]
fn a_silent_peer_is_waited_for() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    let silent = UdpSocket::bind("127.0.0.2:0").unwrap();
    let peer = silent.local_addr().unwrap().port().to_string();
    let mut args = vec!["pingpong", "127.0.0.1", "--port", &port, "--bind", "127.0.0.1"];
    args.extend(["--udp-port", "0", "--peer-udp-port", &peer, "--timeout", "1"]);
    let child = command(&args).spawn().unwrap();
    let mut tcp = listener.accept().unwrap().0;
    tcp.read_exact(&mut [0; 52]).unwrap();
    tcp.write_all(b"0000:000011:084c82:00000000000000000000ffff7f000002\0").unwrap();
    let output = finish(child, &args);
    assert_eq!(output.status.code(), Some(1));
    let text = stderr(&output);
    assert!(text.contains("after 0 messages came: nothing came for 1 s"), "{text}");
    // A message is four packets.
    silent.set_nonblocking(true).unwrap();
    let packets = std::iter::from_fn(|| silent.recv(&mut [0; 2048]).ok()).count();
    assert!(packets >= 8 && packets.is_multiple_of(4), "{packets}");
}

/// As the programs do whose queue pair does not come up.
#[test]
fn a_server_that_closes_without_a_word_is_explained() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port().to_string();
    let [udp, _] = free_ports(LOCAL);
    let args = ["pingpong", "127.0.0.1", "--port", &port, "--udp-port", &udp];
    let child = command(&args).spawn().unwrap();
    let mut tcp = listener.accept().unwrap().0;
    tcp.read_exact(&mut [0; 52]).unwrap();
    drop(tcp);
    let output = finish(child, &args);
    assert_eq!(output.status.code(), Some(1));
    let text = stderr(&output);
    assert!(text.contains("closed after 0 of 52") && text.contains("GID index (-g)"), "{text}");
}

#[test]
fn ctrl_c_ends_a_server_that_waits() {
    let server = Listening::start(&[]);
    signal(&server.child, "INT");
    let (output, _) = server.wait();
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("interrupted"), "{}", stderr(&output));
}

#[test]
fn nobody_there_and_a_taken_port_are_told() {
    let free = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port().to_string();
    let output = run_for(1, &["pingpong", "127.0.0.1", "--port", &free]);
    assert!(stderr(&output).contains("is a server there?"), "{}", stderr(&output));
    let server = Listening::start(&[]);
    let output = run_for(1, &["pingpong", "--port", &server.port]);
    assert!(stderr(&output).contains("another port: --port"), "{}", stderr(&output));
    signal(&server.child, "TERM");
    server.wait();
}

/// Half a second into a game of many hours.
#[test]
fn ctrl_c_ends_a_game() {
    for mode in [&["--timeout", "100"][..], &["--timeout", "100", "-e"]] {
        let [a, b] = free_ports(LOCAL);
        let mut all = vec!["-n", "1000000000", "--udp-port", &a, "--peer-udp-port", &b];
        all.extend(mode);
        let server = Listening::start(&all);
        let mut all = vec!["pingpong", "127.0.0.1", "--port", &server.port, "-n", "1000000000"];
        all.extend(["--bind", "127.0.0.1", "--udp-port", &b, "--peer-udp-port", &a, "--json"]);
        all.extend(mode);
        let mut client = command(&all).spawn().unwrap();
        let mut first = String::new();
        let mut lines = BufReader::new(client.stdout.take().unwrap());
        lines.read_line(&mut first).unwrap();
        assert!(first.contains("connected"), "{first}");
        std::thread::sleep(Duration::from_millis(500));
        signal(&client, "INT");
        signal(&server.child, "INT");
        let output = finish(client, &all);
        let (other, _) = server.wait();
        for output in [output, other] {
            let text = stderr(&output);
            assert_eq!(output.status.code(), Some(1), "{text}");
            assert!(text.contains("came: interrupted") && !text.contains("after 0 "), "{text}");
        }
    }
}

#[test]
fn wrong_arguments_are_usage_errors() {
    for args in [
        &["--type", "xrc"][..],
        &["--size", "0"],
        &["--size", "16777217"],
        &["--iters", "0"],
        &["--mtu", "1500"],
        &["--rx-depth", "0"],
        &["--type", "rc", "--qps", "2"],
        &["--type", "srq", "--qps", "256"],
        &["--type", "srq", "--qps", "20", "--rx-depth", "19"],
        &["--type", "ud", "--size", "4097"],
        &["--type", "ud", "--size", "2000", "--mtu", "1024"],
        &["host:18515"],
        &["host", "--port", "0"],
        &["--timeout", "0"],
        &["--impair", "loss=2"],
        &["--peer-udp-port", "0"],
    ] {
        let mut all = vec!["pingpong"];
        all.extend(args);
        let output = run_for(2, &all);
        assert!(!stderr(&output).is_empty());
    }
    // What only the resolver knows.
    let server = Listening::start(&[]);
    let args = ["pingpong", "127.0.0.1", "--port", &server.port, "--bind", "0.0.0.0"];
    assert!(stderr(&run_for(1, &args)).contains("--bind 0.0.0.0 is no address"));
    signal(&server.child, "INT");
    server.wait();
}
