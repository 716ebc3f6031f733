//! `userdma perf`, end to end. What it finds is of no interest here, only that it finds it.

mod common;

use common::*;

const KEYS: [&str; 10] =
    ["op", "size", "transport", "mode", "value", "unit", "baseline", "ratio", "crc", "runs"];

#[test]
fn every_operation_and_measure_gives_a_figure() {
    for (op, sizes) in [
        ("send", &["0", "8", "300", "1048576"][..]),
        ("write", &["1", "8", "300", "1048576"]),
        ("read", &["1", "64", "1048576"]),
        ("atomic", &["8"]),
    ] {
        for size in sizes {
            for (mode, unit) in [("bw", "GB/s"), ("lat", "us"), ("rate", "M msg/s")] {
                if mode == "bw" && (op == "atomic" || *size == "0") {
                    continue;
                }
                let flag = format!("--{mode}");
                let output = run_for(
                    0,
                    &[
                        "perf",
                        "--local",
                        "--op",
                        op,
                        "--size",
                        size,
                        &flag,
                        "--duration",
                        "0.05",
                        "--json",
                    ],
                );
                let [object] = &objects(&output)[..] else { panic!("{}", stdout(&output)) };
                let keys: Vec<_> = object.as_object().unwrap().keys().collect();
                assert_eq!(keys, KEYS);
                assert_eq!(object["op"], op);
                assert_eq!(object["size"].to_string(), *size);
                assert_eq!(object["mode"], mode);
                assert_eq!(object["unit"], unit);
                assert_eq!(object["crc"], true);
                assert!(object["baseline"].is_null() && object["ratio"].is_null());
                let value = object["value"].as_f64().unwrap();
                assert!(value > 0.0, "{object}");
                if mode == "lat" {
                    // Nothing over a socket takes less than a tenth of a microsecond.
                    assert!(value > 0.1, "{object}");
                }
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
        let output = run_for(
            0,
            &[
                "perf",
                "--local",
                "--op",
                op,
                "--size",
                size,
                mode,
                "--duration",
                "0.05",
                "--baseline",
                "--runs",
                "3",
                "--json",
            ],
        );
        let object = &objects(&output)[0];
        let figure = |name: &str| object[name].as_f64().unwrap();
        assert_eq!(object["runs"], 3);
        assert!((figure("value") / figure("baseline") - figure("ratio")).abs() < 1e-9, "{object}");
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

#[test]
fn wrong_arguments_are_usage_errors() {
    for args in [
        &["--op", "write", "--size", "8", "--bw"][..],
        &["::1", "--local", "--op", "write", "--size", "8", "--bw"],
        &["--local", "--op", "write", "--size", "8"],
        &["--local", "--op", "write", "--size", "8", "--bw", "--lat"],
        &["--local", "--op", "write", "--bw"],
        &["--local", "--op", "atomic", "--size", "8", "--bw"],
        &["--local", "--op", "atomic", "--size", "64", "--lat"],
        &["--local", "--op", "write", "--size", "0", "--lat"],
        &["--local", "--op", "write", "--size", "8", "--bw", "--min-ratio", "1"],
        &["::1", "--op", "write", "--size", "8", "--bw", "--baseline"],
        &["--local", "--op", "write", "--size", "8", "--bw", "--duration", "0"],
        &["--local", "--op", "write", "--size", "8", "--bw", "--transport", "roce"],
    ] {
        let mut all = vec!["perf"];
        all.extend(args);
        run_for(2, &all);
    }
}
