//! `userdma serve` and `userdma ping`, end to end, and peers that are neither.

mod common;

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    net::{TcpListener, TcpStream},
    thread,
    time::Duration,
};

use common::*;
use userdma::{
    Access, CloseReason, Device, Error, QpInit, RecvWr, Region, SendOp, SendWr, StartupError,
};

// ---------------------------------------------------------------------------------------------
// serve

#[test]
fn the_first_line_says_where_it_listens() {
    for (listen, addr) in [("127.0.0.1:0", "127.0.0.1"), ("[::1]:0", "::1"), ("localhost:0", "")] {
        if addr == "::1" && !userdma_tests::ipv6() {
            continue;
        }
        let server = Server::listen(listen, &[]);
        let first = &server.first;
        assert_eq!(first["event"], "listening");
        assert_eq!(first["transport"], "iwarp");
        assert!(addr.is_empty() || first["addr"] == addr, "{first}");
        assert!(first["port"].as_u64().unwrap() > 0);
        assert!(first["udp_port"].is_null());
        let (output, _) = server.close();
        assert!(output.status.success());
        assert_eq!(stderr(&output), "");
    }
}

#[test]
fn it_warns_when_it_listens_beyond_loopback() {
    let server = Server::listen("0.0.0.0:0", &[]);
    let (output, _) = server.close();
    assert!(stderr(&output).contains("warning: 0.0.0.0:"), "{}", stderr(&output));
}

#[test]
fn a_port_that_is_taken_is_an_error_that_names_it() {
    let server = Server::start(&[]);
    let output = run_for(1, &["serve", "--listen", &server.addr]);
    assert!(stderr(&output).contains(&server.addr), "{}", stderr(&output));
}

#[test]
fn signals_end_it_cleanly_with_a_summary() {
    for how in ["INT", "TERM"] {
        let mut server = Server::start(&["-v"]);
        run_for(0, &["ping", &server.addr, "-c", "2", "-i", "0"]);
        assert_eq!(server.event_of("done")["rounds"], 2);
        signal(&server.child, how);
        let (output, events) = server.wait();
        assert!(output.status.success());
        let summary = events.last().expect("a summary");
        assert_eq!(summary["event"], "summary");
        assert_eq!(summary["clients"], 1);
        assert_eq!(summary["failed"], 0);
        // Two rounds: four adverts in, two READs, two WRITEs and four answers out.
        assert_eq!(summary["counters"]["payload_received"].as_u64().unwrap(), 4 * 16 + 2 * 64);
        assert!(summary["counters"]["crc_errors"] == 0);
    }
}

#[test]
fn several_clients_are_served_at_once() {
    let mut server = Server::start(&[]);
    // One client that stays all the time, and others beside it.
    let slow = command(&["ping", &server.addr]).spawn().unwrap();
    assert_eq!(server.event_of("connected")["mode"], "rping");
    let clients: Vec<_> = (0..4)
        .map(|_| command(&["ping", &server.addr, "-c", "20", "-i", "0"]).spawn().unwrap())
        .collect();
    for client in clients {
        assert!(finish(client, &["ping"]).status.success());
    }
    run_for(
        0,
        &["perf", &server.addr, "--op", "write", "--size", "64", "--bw", "--duration", "0.05"],
    );
    signal(&slow, "INT");
    assert!(finish(slow, &["ping"]).status.success());
    let mut done = Vec::new();
    while done.len() < 6 {
        let event = server.event();
        assert_ne!(event["event"], "error", "{event}");
        if event["event"] == "done" {
            done.push(event["mode"].clone());
        }
    }
    assert_eq!(done.iter().filter(|mode| *mode == "perf").count(), 1);
}

#[test]
fn once_ends_after_one_client_and_tells_how_it_went() {
    let server = Server::start(&["--once"]);
    run_for(0, &["ping", &server.addr, "-c", "1"]);
    let (output, events) = server.wait();
    assert!(output.status.success());
    assert_eq!(events.last().unwrap()["rounds"], 1);

    let server = Server::start(&["--once"]);
    let rejected = connect(&server.addr, b"UDMA\x01\x63");
    assert!(rejected.is_err());
    let (output, events) = server.wait();
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(events.last().unwrap()["event"], "error");
}

#[test]
fn a_reader_that_goes_away_is_no_panic() {
    let mut child = command(&["serve", "--listen", "127.0.0.1:0"]).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap());
    let mut first = String::new();
    lines.read_line(&mut first).unwrap();
    drop(lines);
    let addr = first.split(' ').find(|w| w.starts_with("127.")).unwrap().trim_end_matches(',');
    // Whether the ping gets through depends on when the server writes next; it may not hang.
    run(&["ping", addr, "-c", "1"]);
    let output = finish(child, &["serve"]);
    assert_eq!(output.status.code(), Some(0), "{}", stderr(&output));
    assert!(!stderr(&output).contains("panicked"), "{}", stderr(&output));
}

// ---------------------------------------------------------------------------------------------
// Clients that take more than they give

/// Processor time of a process so far, in seconds; and its resident memory in octets.
fn load(pid: u32) -> (f64, u64) {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
    // Behind the name in parentheses; user and system time are fields 14 and 15, in 1/100 s.
    let fields: Vec<_> = stat.rsplit_once(") ").unwrap().1.split(' ').collect();
    let ticks: f64 = [11, 12].iter().map(|&i| fields[i].parse::<f64>().unwrap()).sum();
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let rss = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    let kib: u64 = rss.trim().trim_end_matches(" kB").parse().unwrap();
    (ticks / 100.0, kib << 10)
}

/// Eight clients that say what they want and then nothing.
#[test]
fn a_client_that_never_begins_is_dropped_and_costs_next_to_nothing() {
    for (hello, size) in [
        // A WRITE's bandwidth, 16 MiB, 600 s; and a million messages of 16 MiB.
        (&b"UDMA\x01\x02\0\0\0\0\0\0\0\x01\x02\x01\x01\0\0\0\0\x09\x27\xc0"[..], 24),
        (b"UDMA\x01\x01\0\0\0\0\0\0\0\x01\x01\0\0\0\0\x0f\x42\x40", 22),
    ] {
        assert_eq!(hello.len(), size);
        let mut server = Server::start(&[]);
        let (cpu, memory) = load(server.child.id());
        runtime().block_on(async {
            let mut clients = Vec::new();
            for _ in 0..5 {
                let dev = Device::open("tcp://127.0.0.1:0").unwrap();
                let (pd, cq) = (dev.alloc_pd().unwrap(), dev.create_cq(16).unwrap());
                let qp = dev.connect(&server.addr, &pd, QpInit::new(&cq), hello).await.unwrap();
                clients.push(qp);
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
            let (_, now) = load(server.child.id());
            assert!(now < memory + (16 << 20), "{memory} octets became {now}");
            for qp in clients {
                tokio::time::timeout(Duration::from_secs(30), qp.closed()).await.expect("it ends");
            }
        });
        let (now, _) = load(server.child.id());
        assert!(now - cpu < 2.0, "{} s of processor time", now - cpu);
        for _ in 0..5 {
            let error = server.event_of("error")["error"].as_str().unwrap().to_owned();
            assert!(error.contains("said nothing for 5 s"), "{error}");
        }
        run_for(0, &["ping", &server.addr, "-c", "1"]);
    }
}

/// A measurement that begins and then stands still.
#[test]
fn a_client_that_stops_in_a_measurement_is_dropped_and_not_spun_for() {
    let mut server = Server::start(&[]);
    let (cpu, _) = load(server.child.id());
    runtime().block_on(async {
        let dev = Device::open("tcp://127.0.0.1:0").unwrap();
        let (pd, cq) = (dev.alloc_pd().unwrap(), dev.create_cq(16).unwrap());
        let mr = pd.register(Region::alloc(64).unwrap(), Access::LOCAL_WRITE).unwrap();
        let hello = b"UDMA\x01\x02\0\0\0\0\0\0\0\x01\x02\x01\0\0\x10\0\0\x09\x27\xc0";
        let qp = dev.connect(&server.addr, &pd, QpInit::new(&cq), hello).await.unwrap();
        qp.post_recv(RecvWr::new(1, [mr.slice(0..64)])).unwrap();
        let mut begin = [0; 25];
        begin[0] = 1;
        qp.post_send(SendWr::inline(2, SendOp::Send, &begin)).unwrap();
        tokio::time::timeout(Duration::from_secs(30), qp.closed()).await.expect("it ends");
    });
    let (now, _) = load(server.child.id());
    assert!(now - cpu < 3.0, "{} s of processor time", now - cpu);
    let error = server.event_of("error")["error"].as_str().unwrap().to_owned();
    assert!(error.contains("nothing has moved for 5 s"), "{error}");
}

/// A measurement that the client breaks off: the server says why.
#[test]
fn a_measurement_that_is_broken_off_tells_why() {
    let mut server = Server::start(&[]);
    runtime().block_on(async {
        let dev = Device::open("tcp://127.0.0.1:0").unwrap();
        let (pd, cq) = (dev.alloc_pd().unwrap(), dev.create_cq(16).unwrap());
        let hello = b"UDMA\x01\x02\0\0\0\0\0\0\0\x01\x02\x01\0\0\x10\0\0\x09\x27\xc0";
        let qp = dev.connect(&server.addr, &pd, QpInit::new(&cq), hello).await.unwrap();
        let mut begin = [0; 25];
        begin[0] = 1;
        // There is no receive for the answer.
        qp.post_send(SendWr::inline(2, SendOp::Send, &begin)).unwrap();
        tokio::time::timeout(Duration::from_secs(30), qp.closed()).await.expect("it ends");
    });
    let error = server.event_of("error")["error"].as_str().unwrap().to_owned();
    assert!(error.contains("the peer sent a Terminate"), "{error}");
}

#[test]
fn a_client_that_needs_more_memory_than_is_left_is_told_so() {
    let mut server = Server::start(&["--max-memory", "64MiB"]);
    let hello = b"UDMA\x01\x01\0\0\0\0\0\0\0\x01\x01\0\0\0\0\0\0\x01";
    let answer = connect(&server.addr, hello).unwrap_err();
    let text = String::from_utf8(answer[6..].to_vec()).unwrap();
    assert!(text.contains("too little memory") && text.contains("of 64 MiB are left"), "{text}");
    assert!(server.event_of("error")["error"].as_str().unwrap().contains("too little memory"));
    run_for(0, &["ping", &server.addr, "-c", "1"]);
    // What a client took is there again after it.
    for _ in 0..3 {
        let args = ["--op", "write", "--size", "8388608", "--bw", "--duration", "0.05"];
        let mut all = vec!["perf", &server.addr];
        all.extend(args);
        run_for(0, &all);
        assert_eq!(server.event_of("done")["ok"], true);
    }
}

#[test]
fn a_client_too_many_is_told_so() {
    let mut server = Server::start(&["--max-clients", "1"]);
    let slow = command(&["ping", &server.addr]).spawn().unwrap();
    server.event_of("connected");
    let why = "too many clients: at most 1 at a time";
    let addr = server.addr.clone();
    for args in [&["ping", &addr][..], &["perf", &addr, "--op", "write", "--size", "8", "--rate"]] {
        let output = run_for(1, args);
        assert!(stderr(&output).contains(why), "{}", stderr(&output));
        assert_eq!(server.event_of("error")["error"], format!("rejected: {why}"));
    }
    signal(&slow, "INT");
    assert!(finish(slow, &["ping"]).status.success());
    server.event_of("done");
    run_for(0, &["ping", &server.addr, "-c", "1"]);
}

#[test]
fn an_idle_client_is_closed_in_order() {
    for service in ["rping", "rdma-server"] {
        let server = Server::start(&["--idle-timeout", "0.5", "--once", "--as", service]);
        let reason = runtime().block_on(async {
            let dev = Device::open("tcp://127.0.0.1:0").unwrap();
            let (pd, cq) = (dev.alloc_pd().unwrap(), dev.create_cq(16).unwrap());
            let qp = dev.connect(&server.addr, &pd, QpInit::new(&cq), b"").await.unwrap();
            tokio::time::timeout(Duration::from_secs(30), qp.closed()).await.expect("it ends")
        });
        assert_eq!(reason, CloseReason::Graceful);
        let (output, events) = server.wait();
        assert_eq!(output.status.code(), Some(1));
        let error = events.last().unwrap()["error"].as_str().unwrap();
        assert!(error.contains("silent for longer than --idle-timeout"), "{error}");
    }
}

// ---------------------------------------------------------------------------------------------
// How a client was served

/// A start-up without CRC by hand, for what the library would never send.
fn raw(addr: &str) -> TcpStream {
    let mut tcp = TcpStream::connect(addr).unwrap();
    tcp.write_all(b"MPA ID Req Frame\x10\x02\0\x04\0\x01\0\x01").unwrap();
    let mut reply = [0; 24];
    tcp.read_exact(&mut reply).unwrap();
    assert!(reply.starts_with(b"MPA ID Rep Frame"));
    tcp
}

#[test]
fn a_broken_client_was_not_served_well() {
    // A READ request to a key that nobody has, half an FPDU, a reset at once.
    let mut wrong_key = vec![0, 46, 0x41, 0x41, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 1, 0, 0, 0, 0];
    wrong_key.extend([0; 8 + 4]);
    wrong_key.extend([0, 0, 0, 8, 0, 0, 0, 77]);
    wrong_key.extend([0; 8 + 4]);
    for (octets, stay, why) in [
        (&wrong_key[..], true, "the peer broke a rule"),
        (&wrong_key[..20], false, "the peer has gone"),
    ] {
        let server = Server::start(&["--once", "--crc", "off"]);
        let mut tcp = raw(&server.addr);
        tcp.write_all(octets).unwrap();
        if stay {
            let _ = tcp.read_to_end(&mut Vec::new());
        }
        drop(tcp);
        let (output, events) = server.wait();
        assert_eq!(output.status.code(), Some(1), "{events:?}");
        let last = events.last().unwrap();
        assert_eq!(last["event"], "error", "{last}");
        assert!(last["error"].as_str().unwrap().contains(why), "{last}");
    }
    // In order, at a message boundary, even if there was no message.
    let server = Server::start(&["--once", "--crc", "off"]);
    drop(raw(&server.addr));
    let (output, events) = server.wait();
    assert!(output.status.success(), "{events:?}");
    assert_eq!(events.last().unwrap()["closed"], "graceful");
}

/// A client whose process ends after a round: TCP is reset, nothing was under way. Before the first
/// round it got nothing.
#[test]
fn a_reset_after_a_whole_round_is_told_and_is_no_failure() {
    for rounds in [1, 0] {
        let server = Server::start(&["--once"]);
        runtime().block_on(async {
            let dev = Device::open("tcp://127.0.0.1:0").unwrap();
            let (pd, cq) = (dev.alloc_pd().unwrap(), dev.create_cq(16).unwrap());
            let access = Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE;
            let mr = pd.register(Region::alloc(64).unwrap(), access).unwrap();
            let qp = dev.connect(&server.addr, &pd, QpInit::new(&cq), b"").await.unwrap();
            let mut advert = mr.remote(0).addr.to_be_bytes().to_vec();
            advert.extend(mr.remote(0).rkey.0.to_be_bytes());
            advert.extend(32_u32.to_be_bytes());
            // Two adverts are a round: one is READ, the other written.
            for _ in 0..2 * rounds {
                qp.post_recv(RecvWr::new(1, [mr.slice(48..64)])).unwrap();
                qp.post_send(SendWr::inline(2, SendOp::Send, &advert).unsignaled()).unwrap();
                let wc = cq.next().await.unwrap();
                assert!(wc.status.is_ok() && wc.id == 1, "{wc:?}");
            }
            // The server has to be back at its receive, which its last answer does not prove.
            tokio::time::sleep(Duration::from_millis(300)).await;
            qp.abort();
        });
        let (output, events) = server.wait();
        let last = events.last().unwrap();
        if rounds == 1 {
            assert!(output.status.success(), "{events:?}");
            assert_eq!((&last["rounds"], &last["closed"]), (&1.into(), &"lost".into()), "{last}");
        } else {
            assert_eq!(output.status.code(), Some(1), "{events:?}");
            let error = last["error"].as_str().unwrap();
            assert!(
                error.contains("after 0 rounds") && error.contains("the peer has gone"),
                "{last}"
            );
        }
    }
}

#[test]
fn a_mode_has_one_name_in_all_events() {
    let mut server = Server::start(&[]);
    run_for(0, &["ping", &server.addr, "-c", "1"]);
    assert_eq!(server.event_of("connected")["mode"], "rping");
    let done = server.event_of("done");
    assert_eq!((&done["mode"], &done["closed"]), (&"rping".into(), &"graceful".into()));
    let demo = b"UDMA\x01\x01\0\0\0\0\0\0\0\x01\0\0\0\x08\0\0\0\x01";
    connect(&server.addr, demo).unwrap();
    let connected = server.event_of("connected");
    assert_eq!(connected["mode"], "demo");
    assert_eq!((&connected["size"], &connected["count"]), (&8.into(), &1.into()));
    assert_eq!(server.event_of("error")["mode"], "demo");
}

/// Nobody reads the events any more: the server ends, and the client it has is told.
#[test]
fn events_that_nobody_reads_are_an_error() {
    let mut server = Server::start(&[]);
    runtime().block_on(async {
        let dev = Device::open("tcp://127.0.0.1:0").unwrap();
        let (pd, cq) = (dev.alloc_pd().unwrap(), dev.create_cq(16).unwrap());
        let first = dev.connect(&server.addr, &pd, QpInit::new(&cq), b"").await.unwrap();
        server.event_of("connected");
        server.lose_stdout();
        let second = dev.connect(&server.addr, &pd, QpInit::new(&cq), b"").await.unwrap();
        let reason = tokio::time::timeout(Duration::from_secs(30), first.closed()).await;
        assert_eq!(reason.expect("it ends"), CloseReason::Graceful);
        drop(second);
    });
    let (output, _) = server.wait();
    assert_eq!(output.status.code(), Some(1));
    assert!(stderr(&output).contains("cannot write to stdout"), "{}", stderr(&output));
    assert!(!stderr(&output).contains("panicked"), "{}", stderr(&output));
}

#[test]
fn a_ping_of_another_service_asks_whether_it_is_the_right_one() {
    let server = Server::start(&["--as", "rdma-server"]);
    let output = run_for(1, &["ping", &server.addr, "-c", "1"]);
    assert!(stderr(&output).contains("is the peer an rping server"), "{}", stderr(&output));
}

// ---------------------------------------------------------------------------------------------
// The library as a stranger

/// A connection of the library with `private_data`; says what the private data of a rejection was.
fn connect(addr: &str, private_data: &[u8]) -> Result<(), Vec<u8>> {
    runtime().block_on(async {
        let dev = Device::open("tcp://127.0.0.1:0").unwrap();
        let (pd, cq) = (dev.alloc_pd().unwrap(), dev.create_cq(16).unwrap());
        match dev.connect(addr, &pd, QpInit::new(&cq), private_data).await {
            Ok(_) => Ok(()),
            Err(Error::Startup { source: StartupError::Rejected { private_data, .. }, .. }) => {
                Err(private_data)
            }
            Err(e) => panic!("{e}"),
        }
    })
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap()
}

#[test]
fn unknown_versions_and_modes_are_rejected_with_what_is_known() {
    for extra in [&["--as", "rping"][..], &["--as", "rdma-server"]] {
        let mut server = Server::start(extra);
        for private_data in
            [&b"UDMA\x01\x63\0\0\0\0\0\0\0\x01"[..], b"UDMA\x02\x01\0\0\0\0\0\0\0\x01", b"UDMA"]
        {
            let answer = connect(&server.addr, private_data).unwrap_err();
            assert!(answer.starts_with(b"UDMA\x01\xff"), "{answer:?}");
            assert_eq!(server.event()["event"], "error");
        }
        // A demo of messages that are too large is refused with the reason.
        let huge = b"UDMA\x01\x01\0\0\0\0\0\0\0\x01\xff\xff\xff\xff\0\0\0\x01";
        let answer = connect(&server.addr, huge).unwrap_err();
        assert!(String::from_utf8_lossy(&answer).contains("too large"), "{answer:?}");
    }
}

/// What librdmacm's rdma_client does: 16 octets there, 16 back.
#[test]
fn as_rdma_server_it_answers_rdma_client() {
    let server = Server::start(&["--as", "rdma-server", "--once"]);
    runtime().block_on(async {
        let dev = Device::open("tcp://127.0.0.1:0").unwrap();
        let (pd, cq) = (dev.alloc_pd().unwrap(), dev.create_cq(16).unwrap());
        let mr = pd.register(Region::from_vec(vec![0xff; 16]), Access::LOCAL_WRITE).unwrap();
        let qp = dev.connect(&server.addr, &pd, QpInit::new(&cq), b"").await.unwrap();
        qp.post_recv(RecvWr::new(1, [mr.slice(0..16)])).unwrap();
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
    assert_eq!(events.last().unwrap()["mode"], "rdma-server");
}

/// An advert of more than the server's buffer: the connection ends, and the server says why.
#[test]
fn an_advert_that_is_too_long_ends_the_connection() {
    let server = Server::start(&["--once"]);
    runtime().block_on(async {
        let dev = Device::open("tcp://127.0.0.1:0").unwrap();
        let (pd, cq) = (dev.alloc_pd().unwrap(), dev.create_cq(16).unwrap());
        let qp = dev.connect(&server.addr, &pd, QpInit::new(&cq), b"").await.unwrap();
        let mut advert = [0; 16];
        advert[12..].copy_from_slice(&65_537_u32.to_be_bytes());
        qp.post_send(SendWr::inline(1, SendOp::Send, &advert)).unwrap();
        tokio::time::timeout(Duration::from_secs(30), qp.closed()).await.expect("it ends");
    });
    let (output, events) = server.wait();
    assert_eq!(output.status.code(), Some(1));
    let error = events.last().unwrap()["error"].as_str().unwrap();
    assert!(error.contains("65537") && error.contains("at most 65536"), "{error}");
}

/// A peer that takes the connection without the words of a userdma gets nothing posted to it.
#[test]
fn a_client_posts_nothing_to_a_peer_that_is_no_userdma() {
    let runtime = runtime();
    for (answer, why) in [(&b""[..], "no userdma"), (b"UDMA\x01\x09", "another version or mode")] {
        let (listener, pd, cq) = runtime.block_on(async {
            let dev = Device::open("tcp://127.0.0.1:0").unwrap();
            let (pd, cq) = (dev.alloc_pd().unwrap(), dev.create_cq(16).unwrap());
            (dev.listen(None).await.unwrap(), pd, cq)
        });
        let addr = listener.local_addr().to_string();
        let stranger = runtime.spawn(async move {
            let mr = pd.register(Region::alloc(4096).unwrap(), Access::LOCAL_WRITE).unwrap();
            let request = listener.accept().await.unwrap();
            assert!(request.private_data().starts_with(b"UDMA\x01\x02"));
            let qp = pd.create_qp(QpInit::new(&cq)).unwrap();
            qp.post_recv(RecvWr::new(1, [mr.slice(0..4096)])).unwrap();
            request.accept_qp(&qp, answer).await.unwrap();
            qp.closed().await;
            (cq.next().await.unwrap(), qp.stats().fpdus_received)
        });
        let output = run_for(1, &["perf", &addr, "--op", "send", "--size", "8", "--lat"]);
        assert!(stderr(&output).contains(why), "{}", stderr(&output));
        let (wc, fpdus) = runtime.block_on(stranger).unwrap();
        assert!(!wc.status.is_ok(), "a message arrived: {wc:?}");
        assert_eq!(fpdus, 0);
    }
}

/// Rejections, in the words of a peer that knows another version, and of one that knows nothing.
#[test]
fn a_client_says_what_rejected_it() {
    let runtime = runtime();
    for (answer, why) in [
        (&b"UDMA\x03\xff\0\0"[..], "versions up to 3"),
        (b"UDMA\x01\xff", "does not know the mode perf"),
        (b"", "no userdma"),
    ] {
        let listener = runtime.block_on(async {
            Device::open("tcp://127.0.0.1:0").unwrap().listen(None).await.unwrap()
        });
        let addr = listener.local_addr().to_string();
        let peer = runtime.spawn(async move {
            listener.accept().await.unwrap().reject(answer).await.unwrap();
        });
        let output = run_for(1, &["perf", &addr, "--op", "send", "--size", "8", "--lat"]);
        assert!(stderr(&output).contains(why), "{}", stderr(&output));
        runtime.block_on(peer).unwrap();
    }
}

/// A listener that speaks no MPA.
#[test]
fn a_peer_that_speaks_something_else_is_an_error() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = listener.local_addr().unwrap().to_string();
    thread::spawn(move || {
        for tcp in listener.incoming() {
            let mut tcp = tcp.unwrap();
            let mut request = [0; 20];
            tcp.read_exact(&mut request).unwrap();
            tcp.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").unwrap();
        }
    });
    for args in [&["ping", &addr][..], &["perf", &addr, "--op", "read", "--size", "8", "--rate"]] {
        let output = run_for(1, args);
        assert!(stderr(&output).contains(&addr), "{}", stderr(&output));
        assert!(stderr(&output).contains("is `userdma serve`"), "{}", stderr(&output));
        assert!(stderr(&output).contains("running there?"), "{}", stderr(&output));
    }
}

#[test]
fn nobody_there_is_an_error() {
    // A port that was free a moment ago.
    let addr = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let output = run_for(1, &["ping", &addr]);
    assert!(stderr(&output).contains(&addr), "{}", stderr(&output));
    let output = run_for(1, &["ping", "no-such-host.invalid"]);
    assert!(stderr(&output).contains("no-such-host.invalid"), "{}", stderr(&output));
}

// ---------------------------------------------------------------------------------------------
// ping

#[test]
fn ping_of_every_size_and_switch() {
    for size in ["26", "27", "64", "4000", "65535"] {
        let server = Server::start(&["--once"]);
        let output =
            run_for(0, &["ping", &server.addr, "-c", "60", "-s", size, "-i", "0", "--json"]);
        let all = objects(&output);
        let (summary, rounds) = all.split_last().unwrap();
        assert_eq!(rounds.len(), 60);
        assert!(rounds.iter().all(|round| round["ok"] == true && round["us"].as_f64() > Some(0.0)));
        assert_eq!(summary["completed"], 60);
        assert_eq!(summary["mismatched"], 0);
        let figure = |name: &str| summary[name].as_f64().unwrap();
        assert!(figure("min_us") > 0.0 && figure("min_us") <= figure("avg_us"));
        assert!(figure("avg_us") <= figure("max_us"));
        let (output, events) = server.wait();
        assert!(output.status.success());
        assert_eq!(events.last().unwrap()["rounds"], 60);
    }
    for switches in [
        &["--crc", "off"][..],
        &["--mpa-rev", "1"],
        &["--markers"],
        &["--p2p"],
        &["--p2p", "--crc", "off", "--markers"],
    ] {
        let mut args = switches.to_vec();
        args.push("--once");
        let server = Server::start(&args);
        let mut args = vec!["ping", &server.addr, "-c", "3", "-s", "4000", "-i", "0"];
        args.extend(switches);
        run_for(0, &args);
        assert!(server.wait().0.status.success());
    }
}

#[test]
fn ping_over_ipv6_and_by_name() {
    if userdma_tests::ipv6() {
        let server = Server::listen("[::1]:0", &["--once"]);
        let output = run_for(0, &["ping", &server.addr, "-c", "2", "-i", "0"]);
        assert!(stdout(&output).contains(&server.addr), "{}", stdout(&output));
        assert!(server.wait().0.status.success());
    }
    let server = Server::listen("localhost:0", &["--once"]);
    let port = server.first["port"].to_string();
    run_for(0, &["ping", &format!("localhost:{port}"), "-c", "2", "-i", "0"]);
    assert!(server.wait().0.status.success());
}

#[test]
fn ping_asks_for_ird_and_ord_1_and_no_peer_to_peer() {
    let runtime = runtime();
    let listener = runtime
        .block_on(async { Device::open("tcp://127.0.0.1:0").unwrap().listen(None).await.unwrap() });
    let addr = listener.local_addr().to_string();
    let peer = runtime.spawn(async move {
        let request = listener.accept().await.unwrap();
        let mpa = request.mpa().expect("it is a request over MPA");
        let asked = (request.ird(), request.ord(), mpa.revision, mpa.peer_to_peer);
        assert!(request.private_data().is_empty());
        request.reject(b"").await.unwrap();
        asked
    });
    run_for(1, &["ping", &addr]);
    assert_eq!(runtime.block_on(peer).unwrap(), (Some(1), Some(1), 2, false));
}

#[test]
fn ping_shows_the_data_with_v_as_rping_does() {
    let server = Server::start(&["--once"]);
    let output = run_for(0, &["ping", &server.addr, "-c", "2", "-i", "0", "-v"]);
    let text = stdout(&output);
    let data: Vec<_> = text.lines().filter(|line| line.starts_with("ping data: ")).collect();
    // The output of `rping -c -C 3 -v` against the kernel (iwarp_rping.json).
    assert_eq!(
        data,
        [
            r"ping data: rdma-ping-0: ABCDEFGHIJKLMNOPQRSTUVWXYZ[\]^_`abcdefghijklmnopqr",
            r"ping data: rdma-ping-1: BCDEFGHIJKLMNOPQRSTUVWXYZ[\]^_`abcdefghijklmnopqrs",
        ]
    );
    assert!(text.contains("min/avg/max/stddev = "), "{text}");
}

#[test]
fn ctrl_c_prints_the_summary() {
    let mut server = Server::start(&[]);
    let mut child = command(&["ping", &server.addr, "-i", "0.02"]).spawn().unwrap();
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
    assert!(rest.contains("ping statistics"), "{rest}");
    assert!(rest.contains(" 0 mismatched"), "{rest}");
    assert!(rest.contains("min/avg/max/stddev = "), "{rest}");
    assert!(server.event_of("done")["rounds"].as_u64() >= Some(3));
}

/// A server that WRITEs something else than it READ.
#[test]
fn ping_finds_a_mismatch() {
    let runtime = runtime();
    let listener = runtime
        .block_on(async { Device::open("tcp://127.0.0.1:0").unwrap().listen(None).await.unwrap() });
    let addr = listener.local_addr().to_string();
    let server = runtime.spawn(async move {
        let dev = Device::open("tcp://127.0.0.1:0").unwrap();
        let (pd, cq) = (dev.alloc_pd().unwrap(), dev.create_cq(16).unwrap());
        let mr = pd.register(Region::alloc(128).unwrap(), Access::LOCAL_WRITE).unwrap();
        let qp = pd.create_qp(QpInit::new(&cq)).unwrap();
        let place = |at: usize| {
            let mut advert = [0; 16];
            mr.read_at(at, &mut advert).unwrap();
            userdma::RemoteAddr::new(
                u64::from_be_bytes(advert[..8].try_into().unwrap()),
                userdma::RKey(u32::from_be_bytes(advert[8..12].try_into().unwrap())),
            )
        };
        let done = async |id: u64| {
            let wc = cq.next().await.unwrap();
            assert!(wc.status.is_ok() && wc.id == id, "{wc:?}");
        };
        let request = listener.accept().await.unwrap();
        qp.post_recv(RecvWr::new(1, [mr.slice(0..16)])).unwrap();
        qp.post_recv(RecvWr::new(2, [mr.slice(16..32)])).unwrap();
        request.accept_qp(&qp, b"").await.unwrap();
        done(1).await;
        qp.read(mr.slice(64..128), place(0)).await.unwrap();
        let mut message = [0; 64];
        mr.read_at(64, &mut message).unwrap();
        message[40] ^= 1;
        mr.write_at(64, &message).unwrap();
        qp.post_send(SendWr::inline(3, SendOp::Send, &[0; 16])).unwrap();
        done(3).await;
        done(2).await;
        qp.post_send(SendWr::write(4, [mr.slice(64..128)], place(16)).unsignaled()).unwrap();
        qp.post_send(SendWr::inline(5, SendOp::Send, &[0; 16])).unwrap();
        done(5).await;
        qp.closed().await;
    });
    let output = run_for(1, &["ping", &addr, "-c", "1"]);
    assert!(stderr(&output).contains("round 0: offset 40: expected 0x"), "{}", stderr(&output));
    assert!(stdout(&output).contains("1 mismatched"), "{}", stdout(&output));
    runtime.block_on(server).unwrap();
}

#[test]
fn wrong_arguments_are_usage_errors() {
    for args in [
        &["ping"][..],
        &["ping", "a b"],
        &["ping", "::1", "-s", "25"],
        &["ping", "[::1]:0"],
        &["serve", "--max-clients", "0"],
        &["serve", "--max-memory", "1"],
        &["serve", "--max-memory", "much"],
        &["serve", "--idle-timeout", "-1"],
        &["ping", "::1", "-s", "65536"],
        &["ping", "::1", "-c", "0"],
        &["ping", "::1", "-i", "-1"],
        &["ping", "::1", "--crc", "maybe"],
        &["serve", "--listen", "127.0.0.1:65536"],
        &["serve", "--as", "telnet"],
        &["serve", "--udp-port", "4791"],
        &["serve", "--transport", "roce", "--p2p"],
        &["ping", "::1", "--pcap", "x"],
        &["ping", "::1", "--transport", "roce", "--crc", "off"],
        &["ping", "::1", "--transport", "roce", "--mtu", "1500"],
        &["ping", "::1", "--transport", "roce", "--impair", "loss=200%"],
        &["ping", "::1", "--transport", "roce", "--peer-udp-port", "0"],
        &["nothing"],
    ] {
        run_for(2, args);
    }
    for command in ["demo", "serve", "ping", "perf"] {
        let output = run_for(0, &[command, "--help"]);
        assert!(stdout(&output).contains("Examples:"), "{command}");
    }
}
