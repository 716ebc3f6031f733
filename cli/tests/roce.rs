//! RoCEv2 on the command line, end to end: two processes over UDP sockets, also through loss.

mod common;

use std::{
    fs,
    io::{BufRead, BufReader, Read},
    net::{IpAddr, Ipv4Addr, SocketAddr, UdpSocket},
    path::{Path, PathBuf},
};

use common::*;
use serde_json::Value;
use userdma::{Access, DeviceOptions, QpInit, RecvWr, Region, RoceOptions, SendOp, SendWr};
use userdma_proto::{
    mem::PdId,
    roce::{self, Port, Train, port},
    time::Instant,
    verbs::QpType,
    wire::{ids::Qpn, mad::cm::PortSpace},
};

/// What RoCE does not have.
const LACKS: [&str; 3] = ["Immediate", "FetchAdd, masked", "CmpSwap, masked"];

/// The loopback addresses of this host.
fn hosts() -> Vec<&'static str> {
    if userdma_tests::ipv6() { vec!["127.0.0.1", "::1"] } else { vec!["127.0.0.1"] }
}

/// Runs `demo --transport roce --json` for success; on `::1` with `-6`.
fn demo(host: &str, args: &[&str]) -> Vec<Value> {
    let mut all = vec!["demo", "--transport", "roce", "--json"];
    if host == "::1" {
        all.push("-6");
    }
    all.extend(args);
    objects(&run_for(0, &all))
}

/// A server behind a free UDP port, and the switches of its clients. A client has a free port too.
fn serve(host: &str, extra: &[&str]) -> (Server, Vec<String>) {
    let listen = if host == "::1" { "[::1]:0" } else { "127.0.0.1:0" };
    let mut all = vec!["--transport", "roce", "--udp-port", "0"];
    all.extend(extra);
    let server = Server::listen(listen, &all);
    let port = server.first["udp_port"].as_u64().expect("RoCE has a UDP port").to_string();
    let client = ["--transport", "roce", "--udp-port", "0", "--peer-udp-port", &port];
    (server, client.map(str::to_owned).to_vec())
}

/// `args` and then `switches`.
fn with<'a>(args: &[&'a str], switches: &'a [String]) -> Vec<&'a str> {
    args.iter().copied().chain(switches.iter().map(String::as_str)).collect()
}

/// A UDP port of `host` that nobody has at the moment.
fn free_port(host: IpAddr) -> u16 {
    UdpSocket::bind((host, 0)).unwrap().local_addr().unwrap().port()
}

/// A directory of its own that goes with the test.
struct Dir(PathBuf);

impl Dir {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("userdma-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn file(&self, name: &str) -> String {
        self.0.join(name).to_str().unwrap().to_owned()
    }
}

impl Drop for Dir {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Reads a capture of packets between these UDP ports: each frame's RoCE packet. Every ICRC is good.
fn packets(file: &str, ports: [&str; 2]) -> Vec<Value> {
    let args = ["dissect", "--format", "json", "--roce-port", ports[0], "--roce-port", ports[1]];
    let mut all = args.to_vec();
    all.push(file);
    let frames = objects(&run_for(0, &all));
    assert!(!frames.is_empty(), "{file} has no frame");
    let mut packets = Vec::new();
    for frame in frames {
        assert!(frame["error"].is_null(), "{frame}");
        let more = frame["roce_more"].as_array().cloned().unwrap_or_default();
        for packet in std::iter::once(frame["roce"].clone()).chain(more) {
            assert_eq!(packet["icrc"], "good", "{frame}");
            packets.push(packet);
        }
    }
    packets
}

// ---------------------------------------------------------------------------------------------
// demo

#[test]
fn every_operation_in_all_sizes_on_both_ip_versions() {
    for host in hosts() {
        for (size, count) in
            [(0, 3), (1, 70), (1000, 33), (4097, 20), (65_536, 5), (1 << 20, 2), (16 << 20, 1)]
        {
            let rows = demo(host, &["--size", &size.to_string(), "--count", &count.to_string()]);
            verified(&rows, &LACKS, count, size);
        }
    }
}

#[test]
fn every_path_mtu() {
    for host in hosts() {
        for mtu in ["256", "512", "1024", "2048", "4096"] {
            let rows = demo(host, &["--size", "20001", "--count", "20", "--mtu", mtu]);
            verified(&rows, &LACKS, 20, 20_001);
        }
    }
}

/// Both processes lost, doubled, turned around and falsified packets on receive, and sent again.
/// Nothing was lost or changed for the program.
fn through(host: &str, impair: &str) {
    let mut rows =
        demo(host, &["--size", "65536", "--count", "64", "--mtu", "1024", "--impair", impair]);
    let last = rows.pop().expect("the counters come last");
    verified(&rows, &LACKS, 64, 65_536);
    for side in ["client", "server"] {
        let counters = &last["counters"][side];
        let above_0 = |value: &Value, name: &str| {
            assert!(value.as_u64().is_some_and(|n| n > 0), "{side} {name} {host} {impair}: {last}");
        };
        for name in ["dropped", "duplicated", "reordered", "corrupted"] {
            above_0(&counters["impaired"][name], name);
        }
        for name in ["icrc_bad", "packets_resent", "duplicates", "packets_sent"] {
            above_0(&counters[name], name);
        }
        // Each direction of each operation: what a side sends it counts, more than once where it
        // was lost. Eight operations carry messages of this size.
        let octets = counters["payload_sent"].as_u64().unwrap();
        assert!(octets > 7 * 64 * 65_536, "{last}");
    }
}

#[test]
fn through_1_percent_loss_over_ipv4() {
    through("127.0.0.1", "loss=1%,dup=1%,reorder=1%,corrupt=0.1%,seed=7");
}

#[test]
fn through_5_percent_loss_over_ipv4() {
    through("127.0.0.1", "loss=5%,dup=1%,reorder=1%,corrupt=0.1%,seed=7");
}

#[test]
fn through_1_percent_loss_over_ipv6() {
    if userdma_tests::ipv6() {
        through("::1", "loss=1%,dup=1%,reorder=1%,corrupt=0.1%,seed=8");
    }
}

#[test]
fn through_5_percent_loss_over_ipv6() {
    if userdma_tests::ipv6() {
        through("::1", "loss=5%,dup=1%,reorder=1%,corrupt=0.1%,seed=8");
    }
}

/// Packets marked as by a full router: each side tells the other, and slows down, and all arrives.
#[test]
fn marks_of_congestion_are_answered() {
    let mut rows = demo("127.0.0.1", &["--count", "8", "--impair", "ecn=5%,seed=7"]);
    let last = rows.pop().expect("the counters come last");
    verified(&rows, &LACKS, 8, 65_536);
    for side in ["client", "server"] {
        let counters = &last["counters"][side];
        for name in ["cnps_sent", "cnps_received"] {
            assert!(counters[name].as_u64() > Some(0), "{side} {name}: {last}");
        }
        assert!(counters["impaired"]["marked"].as_u64() > Some(0), "{side}: {last}");
    }
}

#[test]
fn the_table_names_what_roce_lacks_and_what_was_done_to_packets() {
    let args = ["demo", "--transport", "roce", "--impair", "loss=2%,seed=3", "--size", "10000"];
    let output = run_for(0, &args);
    let text = stdout(&output);
    for (_, name) in OPERATIONS {
        let row = text.lines().find(|line| line.contains(&format!(" {name} ")));
        let row = row.unwrap_or_else(|| panic!("{name}\n{text}"));
        let lacks = LACKS.contains(&name);
        assert_eq!(row.contains("unsupported"), lacks, "{row}");
        assert_eq!(row.matches("64/64").count(), if lacks { 0 } else { 2 }, "{row}");
    }
    assert!(text.contains("over roce on loopback, two processes"), "{text}");
    for part in ["dropped", "duplicated", "reordered", "bad ICRC", "resent", " client ", " server "]
    {
        assert!(text.contains(part), "{part}\n{text}");
    }
    assert_eq!(stderr(&output), "");
}

#[test]
fn a_falsified_octet_is_found_and_placed_in_every_operation() {
    falsified(&["--transport", "roce"], &LACKS);
}

/// Each process writes what it sends and receives; the demo says how to read it.
#[test]
fn a_demo_leaves_two_captures() {
    let dir = Dir::new("demo");
    for host in hosts() {
        let file = dir.file("x.pcapng");
        let mut all = vec!["demo", "--transport", "roce", "--size", "5000", "--count", "4"];
        all.extend(["--pcap", &file]);
        if host == "::1" {
            all.push("-6");
        }
        let text = stderr(&run_for(0, &all));
        let words: Vec<_> = text.split_whitespace().collect();
        let ["to", "read:", "userdma", "dissect", "--roce-port", a, "--roce-port", b, path] =
            words[..]
        else {
            panic!("{text}");
        };
        assert_eq!(path, file);
        for file in [&file, &dir.file("x.server.pcapng")] {
            let all = packets(file, [a, b]);
            let has = |opcode: &str| all.iter().any(|packet| packet["opcode"] == opcode);
            for opcode in ["RC_WRITE_FIRST", "RC_FLUSH", "RC_ATOMIC_WRITE", "RC_SEND_ONLY"] {
                assert!(has(opcode), "{opcode} in {file}: {}", all[all.len() / 2]);
            }
        }
    }
}

// ---------------------------------------------------------------------------------------------
// serve and ping

#[test]
fn a_ping_over_both_ip_versions_and_its_capture() {
    let dir = Dir::new("ping");
    for host in hosts() {
        let (there, here) = (dir.file("serve.pcapng"), dir.file("ping.pcapng"));
        let (mut server, client) = serve(host, &["-v", "--pcap", &there]);
        assert_eq!(server.first["transport"], "roce");
        let args = ["ping", &server.addr, "-c", "20", "-s", "6000", "-i", "0", "--json"];
        let mut args = with(&args, &client);
        args.extend(["--pcap", &here, "-v"]);
        let output = run_for(0, &args);
        let summary = objects(&output).pop().unwrap();
        assert_eq!((&summary["completed"], &summary["mismatched"]), (&20.into(), &0.into()));
        assert!(stderr(&output).contains("peer userdma at UDP port"), "{}", stderr(&output));
        let connected = server.event_of("connected");
        assert_eq!(connected["mode"], "rping");
        let peer: std::net::SocketAddr = connected["peer"].as_str().unwrap().parse().unwrap();
        let own = server.first["udp_port"].to_string();
        let (output, events) = server.close();
        assert!(output.status.success(), "{events:?}");
        let summary = events.last().unwrap();
        // The queue pair is gone, what it counted is not: 20 READs' and 40 SENDs' payload came in.
        let counters = &summary["counters"];
        assert_eq!(
            counters["payload_received"].as_u64().unwrap(),
            20 * 6000 + 40 * 16,
            "{summary}"
        );
        assert_eq!(counters["icrc_bad"], 0);
        for file in [&here, &there] {
            let all = packets(file, [&own, &peer.port().to_string()]);
            let reads = all.iter().filter(|packet| packet["opcode"] == "RC_READ_REQUEST").count();
            assert_eq!(reads, 20, "{file}");
        }
    }
}

#[test]
fn a_ping_through_loss_comes_back_right_and_counts() {
    for host in hosts() {
        let impair = "loss=5%,dup=2%,reorder=2%,corrupt=1%,seed=5";
        let (server, client) = serve(host, &["--once", "--impair", impair]);
        let args = ["ping", &server.addr, "-c", "100", "-s", "20000", "-i", "0", "--mtu", "1024"];
        let mut args = with(&args, &client);
        args.extend(["--impair", impair]);
        let output = run_for(0, &args);
        assert!(stdout(&output).contains("100 completed, 0 mismatched"), "{}", stdout(&output));
        assert!(stderr(&output).contains("; impaired: "), "{}", stderr(&output));
        let (output, events) = server.wait();
        assert!(output.status.success(), "{events:?}");
        let counters = &events.last().unwrap()["counters"];
        for name in ["icrc_bad", "packets_resent", "duplicates"] {
            assert!(counters[name].as_u64() > Some(0), "{name}: {counters}");
        }
        assert!(counters["impaired"]["dropped"].as_u64() > Some(0), "{counters}");
    }
}

#[test]
fn a_lenient_side_and_a_smaller_mtu() {
    let (server, client) = serve("127.0.0.1", &["--once", "--icrc", "lenient"]);
    let args = ["ping", &server.addr, "-c", "5", "-s", "5000", "-i", "0", "-v", "--mtu", "512"];
    let mut args = with(&args, &client);
    args.extend(["--icrc", "lenient"]);
    let output = run_for(0, &args);
    assert!(stderr(&output).contains("path MTU 512, "), "{}", stderr(&output));
    assert!(server.wait().0.status.success());
}

#[test]
fn several_clients_are_served_at_once() {
    let (mut server, client) = serve("127.0.0.1", &[]);
    let slow = command(&with(&["ping", &server.addr], &client)).spawn().unwrap();
    assert_eq!(server.event_of("connected")["mode"], "rping");
    let args = ["ping", &server.addr, "-c", "20", "-i", "0"];
    let args = with(&args, &client);
    let clients: Vec<_> = (0..4).map(|_| command(&args).spawn().unwrap()).collect();
    for client in clients {
        let output = finish(client, &["ping"]);
        assert!(output.status.success(), "{}", stderr(&output));
    }
    let args = ["perf", &server.addr, "--op", "write", "--size", "64", "--bw", "--duration", "0.1"];
    run_for(0, &with(&args, &client));
    signal(&slow, "INT");
    assert!(finish(slow, &["ping"]).status.success());
    for _ in 0..6 {
        assert_eq!(server.event_of("done")["ok"], true);
    }
    signal(&server.child, "TERM");
    assert!(server.wait().0.status.success());
}

#[test]
fn a_client_too_many_is_told_so() {
    let (mut server, client) = serve("127.0.0.1", &["--max-clients", "1"]);
    let slow = command(&with(&["ping", &server.addr], &client)).spawn().unwrap();
    server.event_of("connected");
    let why = "too many clients: at most 1 at a time";
    let addr = server.addr.clone();
    for args in [&["ping", &addr][..], &["perf", &addr, "--op", "write", "--size", "8", "--rate"]] {
        let output = run_for(1, &with(args, &client));
        assert!(stderr(&output).contains(why), "{}", stderr(&output));
        assert_eq!(server.event_of("error")["error"], format!("rejected: {why}"));
    }
    signal(&slow, "INT");
    assert!(finish(slow, &["ping"]).status.success());
    server.event_of("done");
    run_for(0, &with(&["ping", &server.addr, "-c", "1"], &client));
}

/// The request for a connection of a client that says nothing more, in octets from the BTH to the ICRC,
/// and the socket it comes from.
fn request_of_one_who_leaves(to: SocketAddr, port: u16, seed: u64) -> (UdpSocket, Vec<u8>) {
    let socket = UdpSocket::bind((to.ip(), 0)).unwrap();
    let local = socket.local_addr().unwrap();
    let (mut own, now) = (Port::new(port::Config::new(local, seed)), Instant::from_nanos(0));
    let qpn = own.create_qp(roce::Config::new(QpType::Rc, PdId(1), Qpn(0))).unwrap();
    let wanted = port::Connect::new(to, PortSpace::TCP.service_id(port));
    own.connect(now, qpn, &wanted).unwrap();
    let mut train = Train::default();
    let table = userdma::mr::Table::new();
    own.poll_transmit(now, &*table, port::Limits::default(), &mut train).expect("a REQ");
    (socket, train.octets().to_vec())
}

/// Two at once for the last place: whoever came first keeps it, though it had not finished yet.
#[test]
fn who_is_about_to_finish_a_connection_keeps_its_place() {
    for _ in 0..10 {
        let (mut server, client) = serve("127.0.0.1", &["--max-clients", "1"]);
        let ping = with(&["ping", &server.addr, "-c", "20", "-i", "0.01"], &client);
        let both = [(); 2].map(|()| command(&ping).spawn().unwrap());
        let both = both.map(|child| finish(child, &["ping"]));
        let (served, told): (Vec<_>, Vec<_>) = both.iter().partition(|o| o.status.success());
        for output in &told {
            assert!(stderr(output).contains("at most 1 at a time"), "{}", stderr(output));
        }
        assert!(!served.is_empty(), "{both:?}");
        server.event_of("done");
    }
}

/// Whoever sends requests and nothing more takes no place from those who mean it.
#[test]
fn who_does_not_finish_a_connection_gives_way() {
    let (mut server, client) = serve("127.0.0.1", &["--max-clients", "2"]);
    let addr: SocketAddr = server.addr.parse().unwrap();
    let udp_port: u16 = client[5].parse().unwrap();
    let slow = command(&with(&["ping", &server.addr], &client)).spawn().unwrap();
    server.event_of("connected");
    for seed in 0..5 {
        let to = SocketAddr::new(addr.ip(), udp_port);
        let (socket, request) = request_of_one_who_leaves(to, addr.port(), seed);
        socket.send_to(&request, to).unwrap();
        assert_eq!(server.event_of("connected")["mode"], "rping");
    }
    run_for(0, &with(&["ping", &server.addr, "-c", "3", "-i", "0"], &client));
    assert_eq!(server.event_of("done")["rounds"], 3);
    // The one that was there all the time still is.
    signal(&slow, "INT");
    assert!(finish(slow, &["ping"]).status.success());
    assert_eq!(server.event_of("done")["ok"], true);
}

#[test]
fn the_port_of_our_own_server_is_not_to_be_given() {
    for args in [&["demo"][..], &["perf", "--local", "--op", "send", "--size", "1", "--lat"]] {
        let args = [args, &["--transport", "roce", "--peer-udp-port", "4000"]].concat();
        let output = run_for(2, &args);
        assert!(stderr(&output).contains("--peer-udp-port"), "{}", stderr(&output));
    }
}

/// The work is done, but the capture that was asked for is not whole.
#[test]
fn a_capture_that_is_not_whole_is_no_success() {
    if !std::path::Path::new("/dev/full").exists() {
        userdma_tests::skipped("this host has no /dev/full");
        return;
    }
    let (server, client) = serve("127.0.0.1", &[]);
    let args = ["ping", &server.addr, "-c", "2", "-i", "0", "--pcap", "/dev/full"];
    let output = run_for(1, &with(&args, &client));
    assert!(stdout(&output).contains(" 0 mismatched"), "{}", stdout(&output));
    assert!(stderr(&output).contains("the capture is not whole: /dev/full"), "{}", stderr(&output));
}

/// An IPv4 address may be written as one of IPv6.
#[test]
fn an_ipv4_address_in_the_form_of_ipv6() {
    let (server, client) = serve("127.0.0.1", &[]);
    let addr: SocketAddr = server.addr.parse().unwrap();
    let mapped = format!("[::ffff:{}]:{}", addr.ip(), addr.port());
    run_for(0, &with(&["ping", &mapped, "-c", "1"], &client));
}

#[test]
fn ctrl_c_prints_the_summary_and_the_server_is_told() {
    let (mut server, client) = serve("127.0.0.1", &["-v"]);
    let mut child = command(&with(&["ping", &server.addr, "-i", "0.02"], &client)).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap());
    for _ in 0..3 {
        let mut line = String::new();
        lines.read_line(&mut line).unwrap();
        assert!(line.contains("round="), "{line}");
    }
    signal(&child, "INT");
    let mut rest = String::new();
    lines.read_to_string(&mut rest).unwrap();
    assert!(child.wait().unwrap().success());
    assert!(rest.contains("ping statistics") && rest.contains(" 0 mismatched"), "{rest}");
    let done = server.event_of("done");
    assert!(done["rounds"].as_u64() >= Some(3), "{done}");
    assert_eq!(done["closed"], "graceful", "{done}");
    signal(&server.child, "INT");
    let (output, events) = server.wait();
    assert!(output.status.success());
    let summary = events.last().unwrap();
    assert_eq!((&summary["clients"], &summary["failed"]), (&1.into(), &0.into()), "{summary}");
}

/// A server that ends tells the client that it has; the client says so at once.
#[test]
fn a_server_that_ends_is_no_silence() {
    let (mut server, client) = serve("127.0.0.1", &[]);
    let child = command(&with(&["ping", &server.addr, "-i", "0.02"], &client)).spawn().unwrap();
    server.event_of("connected");
    let begun = std::time::Instant::now();
    signal(&server.child, "TERM");
    let output = finish(child, &["ping"]);
    assert_eq!(output.status.code(), Some(1), "{}", stdout(&output));
    assert!(stderr(&output).starts_with("error: "), "{}", stderr(&output));
    assert!(begun.elapsed().as_secs() < 5, "it took {:?}", begun.elapsed());
    assert!(server.wait().0.status.success());
}

/// What librdmacm's rdma_client does: 16 octets there, 16 back.
#[test]
fn as_rdma_server_it_answers_rdma_client() {
    for host in hosts() {
        let (server, _) = serve(host, &["--as", "rdma-server", "--once"]);
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let peer_udp_port = server.first["udp_port"].as_u64().unwrap() as u16;
            let roce = RoceOptions { peer_udp_port, ..RoceOptions::default() };
            let options = DeviceOptions { roce, ..DeviceOptions::default() };
            let own = if host == "::1" { "udp://[::1]:0" } else { "udp://127.0.0.1:0" };
            let dev = options.open(own).unwrap();
            let (pd, cq) = (dev.alloc_pd().unwrap(), dev.create_cq(16).unwrap());
            let mr = pd.register(Region::from_vec(vec![0xff; 16]), Access::LOCAL_WRITE).unwrap();
            let qp = pd.create_qp(QpInit::new(&cq)).unwrap();
            qp.post_recv(RecvWr::new(1, [mr.slice(0..16)])).unwrap();
            dev.connect_qp(&server.addr, &qp, b"").await.unwrap();
            qp.post_send(SendWr::inline(2, SendOp::Send, &[0; 16])).unwrap();
            let mut wcs = vec![cq.next().await.unwrap(), cq.next().await.unwrap()];
            wcs.sort_by_key(|wc| wc.id);
            assert!(wcs.iter().all(|wc| wc.status.is_ok()), "{wcs:?}");
            assert_eq!(wcs[0].byte_len, 16);
            let mut answer = [0xff; 16];
            mr.read_at(0, &mut answer).unwrap();
            assert_eq!(answer, [0; 16]);
            qp.disconnect().await;
        });
        let (output, events) = server.wait();
        assert!(output.status.success(), "{events:?}");
        let done = events.last().unwrap();
        assert_eq!((&done["mode"], &done["closed"]), (&"rdma-server".into(), &"graceful".into()));
    }
}

// ---------------------------------------------------------------------------------------------
// Addresses and ports

/// The same UDP port on two loopback addresses: the client takes the second by itself, another one
/// the third.
#[test]
fn a_client_beside_a_server_takes_the_next_loopback_address() {
    let port = free_port(Ipv4Addr::LOCALHOST.into()).to_string();
    let switches = ["--transport", "roce", "--udp-port", &port];
    let mut server = Server::start(&switches);
    assert_eq!(server.first["udp_port"].to_string(), port);
    let addr = server.addr.clone();
    let mut args = vec!["ping", &addr, "-i", "0.02", "--peer-udp-port", &port];
    args.extend(switches);
    let first = command(&args).spawn().unwrap();
    assert_eq!(server.event_of("connected")["peer"], format!("127.0.0.2:{port}"));
    args.extend(["-c", "2"]);
    run_for(0, &args);
    assert_eq!(server.event_of("connected")["peer"], format!("127.0.0.3:{port}"));
    signal(&first, "INT");
    assert!(finish(first, &["ping"]).status.success());
}

#[test]
fn a_udp_port_that_is_taken_says_by_whom_and_what_helps() {
    for host in hosts() {
        let ip: IpAddr = host.parse().unwrap();
        let holder = UdpSocket::bind((ip, 0)).unwrap();
        let addr = holder.local_addr().unwrap();
        let port = addr.port().to_string();
        let listen = if host == "::1" { "[::1]:0" } else { "127.0.0.1:0" };
        let args = ["serve", "--transport", "roce", "--listen", listen, "--udp-port", &port];
        let text = stderr(&run_for(1, &args));
        for part in [
            format!("cannot bind UDP {addr}"),
            format!("(process {})", std::process::id()),
            "--udp-port N".into(),
            "0 for a free one".into(),
        ] {
            assert!(text.contains(&part), "{part}: {text}");
        }
        drop(holder);
    }
}

/// A client that is told to take a port that is not there to be had.
#[test]
fn a_client_whose_port_is_taken_is_told_the_way_out() {
    if !userdma_tests::ipv6() {
        return;
    }
    let (server, _) = serve("::1", &[]);
    let port = server.first["udp_port"].to_string();
    let args = ["ping", &server.addr, "--transport", "roce", "--peer-udp-port", &port];
    let mut args = args.to_vec();
    args.extend(["--udp-port", &port, "-c", "1"]);
    let text = stderr(&run_for(1, &args));
    for part in ["our own UDP port is taken", "--udp-port 0", "[::1]:", "userdma (process "] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn where_nothing_listens_the_peer_says_so_at_once() {
    for host in hosts() {
        let (server, client) = serve(host, &[]);
        // The server's own port is not the one asked for.
        let other = match server.first["port"].as_u64().unwrap() {
            7171 => "7172",
            _ => "7171",
        };
        let addr = if host == "::1" { format!("[::1]:{other}") } else { format!("{host}:{other}") };
        for args in
            [&["ping", &addr][..], &["perf", &addr, "--op", "write", "--size", "8", "--rate"]]
        {
            let text = stderr(&run_for(1, &with(args, &client)));
            assert!(text.contains(&format!("nothing listens at port {other} of {host}")), "{text}");
            assert!(text.contains("`userdma serve`"), "{text}");
        }
    }
}

/// No socket at the peer's UDP port: the connection manager asks some times, for some 10 s.
#[test]
fn where_nothing_answers_it_gives_up_and_says_what_it_tried() {
    let begun = std::time::Instant::now();
    let clients: Vec<_> = hosts()
        .into_iter()
        .map(|host| {
            let port = free_port(host.parse().unwrap()).to_string();
            let addr = if host == "::1" { "[::1]:7174" } else { "127.0.0.1:7174" };
            let args = ["ping", addr, "--transport", "roce", "--udp-port", "0", "-c", "1"];
            let mut args = args.to_vec();
            args.extend(["--peer-udp-port", &port]);
            let child = command(&args).spawn().unwrap();
            (child, format!("no answer from {addr} at UDP port {port}"))
        })
        .collect();
    for (child, why) in clients {
        let output = finish(child, &["ping"]);
        assert_eq!(output.status.code(), Some(1));
        let text = stderr(&output);
        assert!(text.contains(&why), "{why}: {text}");
        assert!(text.contains("firewall") && text.contains("running there?"), "{text}");
    }
    let time = begun.elapsed().as_secs();
    assert!((3..30).contains(&time), "it took {time} s");
}

#[test]
fn switches_of_the_other_transport_are_refused() {
    for (command, rest) in [
        ("demo", &[][..]),
        ("serve", &[]),
        ("ping", &["127.0.0.1"]),
        ("perf", &["127.0.0.1", "--op", "write", "--size", "8", "--bw"]),
    ] {
        let refused = |transport: &str, switches: &[&str], other: &str| {
            let mut args = vec![command];
            args.extend(rest);
            args.extend(["--transport", transport]);
            args.extend(switches);
            let text = stderr(&run_for(2, &args));
            for part in
                [switches[0], "means nothing to", transport, &format!("--transport {other}")]
            {
                assert!(text.contains(part), "{part}: {text}");
            }
        };
        for switches in [
            &["--impair", "loss=1%"][..],
            &["--pcap", "x.pcapng"],
            &["--udp-port", "0"],
            &["--peer-udp-port", "4792"],
            &["--mtu", "1024"],
            &["--icrc", "lenient"],
        ] {
            refused("iwarp", switches, "roce");
        }
        for switches in [&["--markers"][..], &["--p2p"], &["--crc", "off"], &["--mpa-rev", "1"]] {
            refused("roce", switches, "iwarp");
        }
    }
    assert!(!Path::new("x.pcapng").exists());
}

#[test]
fn wrong_values_are_usage_errors_that_say_what_is_right() {
    for (switch, value, why) in [
        ("--mtu", "1500", "1024"),
        ("--impair", "loss=150%", "loss"),
        ("--impair", "nonsense=1", "nonsense"),
        ("--icrc", "maybe", "strict"),
        ("--udp-port", "65536", "65536"),
        ("--peer-udp-port", "0", "0"),
    ] {
        let text = stderr(&run_for(2, &["demo", "--transport", "roce", switch, value]));
        assert!(text.starts_with("error: ") && text.contains(why), "{switch} {value}: {text}");
    }
}

#[test]
fn the_help_tells_of_roce() {
    for command in ["demo", "serve", "ping", "perf"] {
        let text = stdout(&run_for(0, &[command, "--help"]));
        for part in [
            "--transport <TRANSPORT>",
            "--udp-port <PORT>",
            "--peer-udp-port <PORT>",
            "--mtu <OCTETS>",
            "--icrc <strict|lenient>",
            "--impair <LIST>",
            "loss=1%,dup=1%,reorder=1%,corrupt=0.1%,delay=1ms,ecn=1%,seed=7",
            "--pcap <FILE>",
            "--transport roce",
        ] {
            assert!(text.contains(part), "{command}: {part}\n{text}");
        }
    }
}
