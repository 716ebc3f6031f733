//! `userdma sim`, end to end.

mod common;

use std::{fs, path::Path};

use common::*;
use serde_json::Value;

fn object(args: &[&str]) -> Value {
    let out = run(&[&["sim", "--json"], args].concat());
    assert!(out.status.success(), "{args:?}: {}", String::from_utf8_lossy(&out.stdout));
    serde_json::from_slice(&out.stdout).expect("one JSON object")
}

/// Everything that can happen to a packet happens, and nothing is lost or changed.
#[test]
fn a_bad_network_is_lived_through() {
    let impair = "loss=2%,dup=1%,ecn=5%,reorder=2%/3/5ms,corrupt=1%/1,delay=100us,jitter=50us";
    let args = ["--seed", "7", "--ops", "200", "--retry", "7", "--mtu", "1024", "--impair", impair];
    let report = object(&args);
    assert_eq!(report["verdict"], "right");
    assert_eq!(report["completions"]["failed"], 0);
    assert_eq!(report["impairments"], format!("{impair},seed=7"));
    let above_zero = |object: &str, names: &[&str]| {
        for name in names {
            assert!(report[object][name].as_u64() > Some(0), "{object}.{name}: {report}");
        }
    };
    above_zero("network", &["dropped", "duplicated", "reordered", "corrupted"]);
    above_zero("queue_pairs", &["packets_resent", "duplicates", "sequence_naks"]);
    assert!(report["bad_icrc"].as_u64() > Some(0));
    let kinds = report["operations"].as_object().expect("an object");
    assert_eq!(kinds.len(), 11, "{kinds:?}");
    assert_eq!(object(&args), report, "the same run again");
}

#[test]
fn only_what_is_missing_is_sent_again_where_asked_for() {
    let args = ["--seed", "7", "--ops", "200", "--impair", "loss=3%,delay=50us", "--mtu", "1024"];
    let resent = |report: &Value| report["queue_pairs"]["packets_resent"].as_u64().unwrap();
    let kept = object(&[&args[..], &["--out-of-order"]].concat());
    assert!(resent(&kept) < resent(&object(&args)), "{kept}");
}

/// More than a machine has is refused before it is tried.
#[test]
fn what_would_take_all_memory_is_refused() {
    let out = run_for(2, &["sim", "--pairs", "64", "--ops", "3000", "--size", "100000"]);
    assert!(stderr(&out).contains("lower --pairs, --ops or --size"), "{}", stderr(&out));
}

#[test]
fn the_capture_is_read_by_dissect() {
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join("sim.pcapng");
    let file = path.to_str().expect("a path of UTF-8");
    let mut families = Vec::new();
    for (kind, seed) in
        [("rc", "7"), ("uc", "7"), ("ud", "7"), ("rc", "1"), ("rc", "5"), ("rc", "6")]
    {
        let impair = "loss=2%,dup=1%,delay=100us";
        let args = ["--seed", seed, "--type", kind, "--pcap", file, "--impair", impair];
        let report = object(&args);
        families.push(report["ipv6"] == true);
        let out = run(&["dissect", "--format", "json", file]);
        assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
        let frames: Vec<Value> = out
            .stdout
            .split(|&octet| octet == b'\n')
            .filter(|line| !line.is_empty())
            .map(|line| serde_json::from_slice(line).expect("a frame a line"))
            .collect();
        let network = &report["network"];
        let count = |name: &str| network[name].as_u64().expect("a number");
        assert_eq!(frames.len() as u64, count("packets") + count("delivered"), "{kind}");
        assert!(frames.iter().all(|frame| frame["roce"]["icrc"] == "good"), "{kind}");
        let _ = fs::remove_file(&path);
    }
    assert!(families.contains(&true) && families.contains(&false), "{families:?}");
}

#[test]
fn the_text_says_what_happened() {
    let out = run(&["sim", "--seed", "3", "--impair", "none", "--pairs", "1"]);
    let text = String::from_utf8_lossy(&out.stdout);
    assert!(out.status.success(), "{text}");
    for part in
        ["seed 3: 1 RC queue pair on", "impairments  seed=3", " 0 dropped", "verdict      right"]
    {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn what_is_wrong_is_said() {
    for (args, says) in [
        (["--mtu", "1500"], "256, 512, 1024, 2048 or 4096"),
        (["--impair", "los=1%"], "expected loss, burst"),
        (["--retry", "8"], "0..=7"),
    ] {
        let out = run(&[&["sim"][..], &args].concat());
        assert_eq!(out.status.code(), Some(2));
        let text = String::from_utf8_lossy(&out.stderr);
        assert!(text.contains(says), "{text}");
    }
    let out = run(&["sim", "--pcap", "/nowhere/x.pcapng"]);
    assert_eq!(out.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&out.stderr).contains("/nowhere/x.pcapng"));
}
