//! `userdma demo`, end to end: two processes over real sockets.

mod common;

use std::{
    fs,
    thread::sleep,
    time::{Duration, Instant},
};

use common::*;

const OPERATIONS: [(&str, &str); 11] = [
    ("send", "SEND/RECV"),
    ("write", "WRITE"),
    ("read", "READ"),
    ("send-inv", "SEND with invalidate"),
    ("send-se", "SEND with solicited event"),
    ("imm", "Immediate"),
    ("write-imm", "WRITE with immediate"),
    ("fetch-add", "FetchAdd"),
    ("masked-fetch-add", "FetchAdd, masked"),
    ("cmp-swap", "CmpSwap"),
    ("masked-cmp-swap", "CmpSwap, masked"),
];

/// All operations, each message verified on both sides.
fn demo(args: &[&str], count: u64, size: u64) {
    let mut all = vec!["demo", "--json"];
    all.extend(args);
    let rows = objects(&run_for(0, &all));
    let names: Vec<_> = rows.iter().map(|row| row["operation"].as_str().unwrap()).collect();
    assert_eq!(names, OPERATIONS.map(|(_, name)| name));
    for row in &rows {
        let octets = match row["operation"].as_str().unwrap() {
            "Immediate" => 8,
            name if name.starts_with("FetchAdd") || name.starts_with("CmpSwap") => 8,
            _ => size,
        };
        assert_eq!(row["supported"], true, "{row}");
        assert_eq!(row["ok"], true, "{row}");
        assert_eq!(row["messages"], 2 * count, "{row}");
        assert_eq!(row["bytes"], 2 * count * octets, "{row}");
        assert_eq!(row["client_verified"], count, "{row}");
        assert_eq!(row["server_verified"], count, "{row}");
        assert!(row["seconds"].as_f64().unwrap() > 0.0, "{row}");
    }
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
        assert_eq!(row.matches("64/64").count(), 2, "{row}");
    }
    // No terminal, no progress bar.
    assert_eq!(stderr(&output), "");
}

#[test]
fn a_falsified_octet_is_found_and_placed_in_every_operation() {
    for (op, name) in OPERATIONS {
        let output = run_for(1, &["demo", "--size", "100", "--count", "9", "--corrupt", op]);
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
        if !matches!(side, "client") && op != "imm" || op == "read" {
            assert!(complaint.contains("offset 50"), "{complaint}");
        }
        assert!(stdout(&output).contains("MISMATCH"));
        // Nothing else is wrong.
        assert_eq!(text.lines().count(), 1, "{text}");
    }
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
    ] {
        let output = run_for(2, args);
        assert!(stderr(&output).starts_with("error: "), "{args:?}: {}", stderr(&output));
    }
    let output = run_for(2, &["demo", "--transport", "roce"]);
    assert!(stderr(&output).contains("not built yet"));
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
