//! `userdma demo`, end to end: two processes over real sockets.

mod common;

use std::{
    fs,
    thread::sleep,
    time::{Duration, Instant},
};

use common::*;

/// What iWARP does not have.
const LACKS: [&str; 3] = ["SEND with immediate", "WRITE and FLUSH", "AtomicWrite"];

/// All operations, each message verified on both sides.
fn demo(args: &[&str], count: u64, size: u64) {
    let mut all = vec!["demo", "--json"];
    all.extend(args);
    verified(&objects(&run_for(0, &all)), &LACKS, count, size);
}

#[test]
fn sizes() {
    for (size, count) in [(0, 3), (1, 70), (1000, 33), (65_536, 5), (1 << 20, 2), (16 << 20, 1)] {
        demo(&["--size", &size.to_string(), "--count", &count.to_string()], count, size);
    }
}

#[test]
fn switches_of_mpa() {
    for switches in [
        &["--crc", "off"][..],
        &["--markers"],
        &["--mpa-rev", "1"],
        &["--p2p"],
        &["--p2p", "--markers", "--crc", "off"],
        &["--mpa-rev", "1", "--markers"],
    ] {
        let mut args = vec!["--size", "5001", "--count", "20"];
        args.extend(switches);
        demo(&args, 20, 5001);
    }
}

#[test]
fn the_defaults_give_a_table_with_a_column_for_each_side() {
    let output = run_for(0, &["demo"]);
    let table = stdout(&output);
    for part in
        ["operation", "messages", "bytes", "time", "rate", "client verified", "server verified"]
    {
        assert!(table.contains(part), "{part}\n{table}");
    }
    for (_, name) in OPERATIONS {
        let row = table.lines().find(|line| line.contains(&format!(" {name} ")));
        let row = row.unwrap_or_else(|| panic!("{name}\n{table}"));
        let lacks = LACKS.contains(&name);
        assert_eq!(row.contains("unsupported"), lacks, "{row}");
        assert_eq!(row.matches("64/64").count(), if lacks { 0 } else { 2 }, "{row}");
    }
    // No terminal, no progress bar.
    assert_eq!(stderr(&output), "");
}

#[test]
fn a_falsified_octet_is_found_and_placed_in_every_operation() {
    falsified(&[], &LACKS);
}

#[test]
fn wrong_arguments_are_usage_errors() {
    for args in [
        &["demo", "--size", "16777217"][..],
        &["demo", "--count", "0"],
        &["demo", "--transport", "tcp"],
        &["demo", "--mpa-rev", "3"],
        &["demo", "--p2p", "--mpa-rev", "1"],
        &["demo", "--size", "0", "--corrupt", "write"],
        &["demo", "extra"],
        &["demo", "--transport", "roce", "--markers"],
        &["demo", "--impair", "loss=1%"],
    ] {
        let output = run_for(2, args);
        assert!(stderr(&output).starts_with("error: "), "{args:?}: {}", stderr(&output));
    }
}

/// Processes whose parent is `pid`.
fn children(pid: u32) -> Vec<u32> {
    let parent = |stat: &str| -> Option<u32> {
        // The name in parentheses may contain anything; the parent is the second field after it.
        stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok()
    };
    fs::read_dir("/proc")
        .expect("there is a /proc")
        .filter_map(|entry| entry.ok()?.file_name().to_str()?.parse().ok())
        .filter(|child: &u32| {
            fs::read_to_string(format!("/proc/{child}/stat"))
                .is_ok_and(|stat| parent(&stat) == Some(pid))
        })
        .collect()
}

/// Whether the process is gone, or only waits for somebody to ask how it ended.
fn is_over(pid: u32) -> bool {
    match fs::read_to_string(format!("/proc/{pid}/stat")) {
        Ok(stat) => stat.rsplit_once(") ").is_some_and(|(_, rest)| rest.starts_with(['Z', 'X'])),
        Err(_) => true,
    }
}

#[test]
fn the_server_ends_with_its_parent_however_that_ends() {
    for how in ["KILL", "INT", "TERM"] {
        let mut demo =
            command(&["demo", "--size", "0", "--count", "1000000"]).spawn().expect("demo starts");
        let deadline = Instant::now() + PATIENCE;
        let server = loop {
            if let [server] = children(demo.id())[..] {
                break server;
            }
            assert!(Instant::now() < deadline, "no server was started");
            sleep(Duration::from_millis(2));
        };
        signal(&demo, how);
        let status = demo.wait().expect("demo ends");
        assert!(!status.success());
        while !is_over(server) {
            assert!(Instant::now() < deadline, "the server outlived its parent after {how}");
            sleep(Duration::from_millis(2));
        }
    }
}
