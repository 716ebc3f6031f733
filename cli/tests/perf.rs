//! `userdma perf`, end to end. What it finds is of no interest here, only that it finds it.

mod common;

use std::time::{Duration, Instant};

use common::*;

const KEYS: [&str; 13] = [
    "op",
    "size",
    "transport",
    "mode",
    "value",
    "unit",
    "baseline",
    "ratio",
    "crc",
    "runs",
    "samples",
    "seconds",
    "messages",
];

/// Runs `perf --local` shortly. A latency needs its samples: on a busy machine it gets more time.
fn measure(args: &[&str]) -> std::process::Output {
    for duration in ["0.05", "0.5", "4"] {
        let mut all = vec!["perf", "--local", "--duration", duration];
        all.extend(args);
        let output = run(&all);
        if !stderr(&output).contains("raise --duration") {
            assert_eq!(output.status.code(), Some(0), "{all:?} {}", stderr(&output));
            return output;
        }
    }
    let mut all = vec!["perf", "--local", "--duration", "30"];
    all.extend(args);
    run_for(0, &all)
}

#[test]
fn every_operation_and_measure_gives_a_figure() {
    for (op, sizes) in [
        ("send", &["0", "8", "300", "1048576"][..]),
        ("write", &["1", "8", "300", "1048576"]),
        ("read", &["1", "64", "1048576"]),
        ("atomic", &["8"]),
    ] {
        every_measure("iwarp", op, sizes);
    }
}

#[test]
fn every_operation_and_measure_gives_a_figure_over_roce() {
    for (op, sizes) in [
        ("send", &["0", "300", "100000"][..]),
        ("write", &["8", "100000"]),
        ("read", &["1", "100000"]),
        ("atomic", &["8"]),
    ] {
        every_measure("roce", op, sizes);
    }
}

/// Each measure of `op` with messages of these sizes.
fn every_measure(transport: &str, op: &str, sizes: &[&str]) {
    for size in sizes {
        for (mode, unit) in [("bw", "GB/s"), ("lat", "us"), ("rate", "M msg/s")] {
            if mode == "bw" && (op == "atomic" || *size == "0") {
                continue;
            }
            let flag = format!("--{mode}");
            let args = ["--op", op, "--size", size, &flag, "--json", "--transport", transport];
            let output = measure(&args);
            let [object] = &objects(&output)[..] else { panic!("{}", stdout(&output)) };
            let keys: Vec<_> = object.as_object().unwrap().keys().collect();
            assert_eq!(keys, KEYS);
            assert_eq!(object["op"], op);
            assert_eq!(object["size"].to_string(), *size);
            assert_eq!(object["mode"], mode);
            assert_eq!(object["unit"], unit);
            assert_eq!(object["transport"], transport);
            assert_eq!(object["crc"], true);
            assert!(object["baseline"].is_null() && object["ratio"].is_null());
            let value = object["value"].as_f64().unwrap();
            assert!(value > 0.0, "{object}");
            assert!(object["seconds"].as_f64().unwrap() > 0.0, "{object}");
            let messages = object["messages"].as_u64().unwrap();
            if mode == "lat" {
                // A hundred before are for warming up.
                assert_eq!(object["samples"], messages - 100, "{object}");
            } else {
                assert!(object["samples"].is_null() && messages > 0, "{object}");
            }
            if mode == "lat" {
                // Nothing over a socket takes less than a tenth of a microsecond.
                assert!(value > 0.1, "{object}");
            }
        }
    }
}

#[test]
fn switches_of_mpa() {
    for (switches, crc) in [
        (&["--crc", "off"][..], false),
        (&["--markers"], true),
        (&["--mpa-rev", "1"], true),
        (&["--p2p"], true),
    ] {
        for op in ["send", "write", "read"] {
            let mut args =
                vec!["perf", "--local", "--op", op, "--size", "4000", "--bw", "--duration", "0.05"];
            args.push("--json");
            args.extend(switches);
            let output = run_for(0, &args);
            assert_eq!(objects(&output)[0]["crc"], crc);
        }
    }
}

#[test]
fn the_baseline_stands_beside_each_figure() {
    for (op, mode, size) in [
        ("write", "--bw", "65536"),
        ("read", "--bw", "65536"),
        ("send", "--lat", "64"),
        ("read", "--lat", "64"),
        ("atomic", "--lat", "8"),
        ("write", "--rate", "8"),
    ] {
        for transport in ["iwarp", "roce"] {
            let mut args = vec!["--op", op, "--size", size, mode, "--transport", transport];
            args.extend(["--baseline", "--runs", "3", "--json"]);
            let output = measure(&args);
            let object = &objects(&output)[0];
            let figure = |name: &str| object[name].as_f64().unwrap();
            assert_eq!(object["runs"], 3);
            let ratio = figure("value") / figure("baseline");
            assert!((ratio - figure("ratio")).abs() < 1e-9, "{object}");
        }
    }
}

#[test]
fn the_ratio_is_held_against_its_bounds() {
    let perf = |code: i32, bound: &str, value: &str| {
        run_for(
            code,
            &[
                "perf",
                "--local",
                "--op",
                "write",
                "--size",
                "4096",
                "--bw",
                "--duration",
                "0.05",
                "--baseline",
                bound,
                value,
            ],
        )
    };
    perf(0, "--min-ratio", "0.000001");
    assert!(stderr(&perf(1, "--min-ratio", "1000000")).contains("below 1000000"));
    perf(0, "--max-ratio", "1000000");
    assert!(stderr(&perf(1, "--max-ratio", "0.000001")).contains("above 0.000001"));
}

/// One millisecond is too short for 200 round trips of 1 MiB on any machine.
#[test]
fn a_latency_of_too_few_samples_is_no_figure() {
    let mut args = vec!["perf", "--local", "--op", "send", "--size", "1048576", "--lat"];
    args.extend(["--duration", "0.001", "-v"]);
    let output = run_for(1, &args);
    let text = stderr(&output);
    assert!(text.contains("raise --duration") && text.contains(" samples"), "{text}");
    assert_eq!(stdout(&output), "");
}

/// What only the client knows is called its claim; octets are counted where it can be done.
#[test]
fn the_server_tells_what_it_counted_from_what_the_client_claims() {
    let mut server = Server::start(&[]);
    for (op, size, counted) in
        [("write", "64", true), ("read", "64", false), ("atomic", "8", false)]
    {
        let args = ["--op", op, "--size", size, "--rate", "--duration", "0.1"];
        let mut all = vec!["perf", &server.addr];
        all.extend(args);
        run_for(0, &all);
        let connected = server.event_of("connected");
        assert_eq!((&connected["mode"], &connected["op"]), (&"perf".into(), &op.into()));
        let done = server.event_of("done");
        assert_eq!((&done["mode"], &done["ok"]), (&"perf".into(), &true.into()), "{done}");
        assert_eq!(done["closed"], "graceful");
        let (yes, no) = match counted {
            true => ("messages", "claimed_messages"),
            false => ("claimed_messages", "messages"),
        };
        assert!(done[no].is_null(), "{done}");
        let messages = done[yes].as_u64().unwrap();
        match op {
            "atomic" => assert!(done["bytes"].is_null(), "{done}"),
            _ => assert_eq!(done["bytes"], messages * 64, "{done}"),
        }
    }
}

#[test]
fn a_server_elsewhere_is_measured_and_counts_what_arrived() {
    let mut server = Server::start(&[]);
    let output = run_for(
        0,
        &["perf", &server.addr, "--op", "send", "--size", "1000", "--rate", "--duration", "0.1"],
    );
    assert!(stdout(&output).contains("M msg/s"), "{}", stdout(&output));
    let done = server.event_of("done");
    let messages = done["messages"].as_u64().unwrap();
    assert!(messages > 0);
    assert_eq!(done["bytes"], messages * 1000);
}

/// In the middle of a measurement of a minute: of the bare socket, or of ours.
#[test]
fn ctrl_c_ends_it_at_once() {
    for transport in ["iwarp", "roce"] {
        for baseline in [&["--baseline"][..], &[]] {
            let mut args = vec!["perf", "--local", "--op", "write", "--size", "65536", "--bw"];
            args.extend(["--duration", "60", "--transport", transport]);
            args.extend(baseline);
            let child = command(&args).spawn().unwrap();
            std::thread::sleep(Duration::from_secs(1));
            let begun = Instant::now();
            signal(&child, "INT");
            let output = finish(child, &args);
            assert!(begun.elapsed() < Duration::from_secs(20), "it took {:?}", begun.elapsed());
            assert_eq!(output.status.code(), Some(1), "{args:?}");
            assert_eq!(stderr(&output), "error: interrupted\n", "{args:?}");
        }
    }
}

#[test]
fn wrong_arguments_are_usage_errors() {
    for args in [
        &["--op", "write", "--size", "8", "--bw"][..],
        &["::1", "--local", "--op", "write", "--size", "8", "--bw"],
        &["--local", "--op", "write", "--size", "8"],
        &["[::1]:0", "--op", "write", "--size", "8", "--bw"],
        &["--local", "--op", "write", "--size", "8", "--bw", "--lat"],
        &["--local", "--op", "write", "--bw"],
        &["--local", "--op", "atomic", "--size", "8", "--bw"],
        &["--local", "--op", "atomic", "--size", "64", "--lat"],
        &["--local", "--op", "write", "--size", "0", "--lat"],
        &["--local", "--op", "write", "--size", "8", "--bw", "--min-ratio", "1"],
        &["::1", "--op", "write", "--size", "8", "--bw", "--baseline"],
        &["--local", "--op", "write", "--size", "8", "--bw", "--duration", "0"],
        &["--local", "--op", "write", "--size", "8", "--bw", "--transport", "roce", "--crc", "off"],
        &["--local", "--op", "write", "--size", "8", "--bw", "--mtu", "4096"],
    ] {
        let mut all = vec!["perf"];
        all.extend(args);
        run_for(2, &all);
    }
}
