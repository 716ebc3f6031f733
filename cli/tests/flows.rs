//! `userdma flows`.

use std::{path::Path, process::Command};

use serde_json::Value;

fn flows(args: &[&str]) -> (Option<i32>, String) {
    let output =
        Command::new(env!("CARGO_BIN_EXE_userdma")).arg("flows").args(args).output().unwrap();
    (output.status.code(), String::from_utf8(output.stdout).unwrap())
}

fn sample(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../pcaps").join(name).to_str().unwrap().to_owned()
}

#[test]
fn the_three_forms_say_the_same() {
    let file = sample("roce_large.pcap.gz");
    let (code, json) = flows(&["--format", "json", &file]);
    assert_eq!(code, Some(0));
    let lines: Vec<Value> = json.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(lines.len(), 1, "{json}");
    let line = &lines[0];
    assert_eq!(line["protocol"], "RC");
    assert_eq!((&line["octets"], &line["read_octets"]), (&131_072.into(), &65_536.into()));
    assert_eq!((&line["messages"]["send"], &line["messages"]["read"]), (&1.into(), &1.into()));
    assert!(
        line["latency"]["read"]["p50_ns"].as_u64().unwrap()
            <= line["latency"]["read"]["max_ns"].as_u64().unwrap()
    );
    let (code, csv) = flows(&["--format", "csv", &file, &sample("iwarp_rping.pcap")]);
    assert_eq!(code, Some(0));
    let rows: Vec<Vec<&str>> = csv.lines().map(|line| line.split(',').collect()).collect();
    assert_eq!(rows.len(), 4, "{csv}");
    assert!(rows.iter().all(|row| row.len() == rows[0].len()), "{csv}");
    let at = |name: &str| rows[0].iter().position(|column| *column == name).unwrap();
    assert_eq!((rows[1][at("octets")], rows[1][at("path_mtu")]), ("131072", "1024"));
    assert_eq!((rows[2][at("protocol")], rows[3][at("reads")]), ("iWARP", "3"));
    let (code, text) = flows(&[&file]);
    assert_eq!(code, Some(0));
    assert!(text.contains("1 flow") && text.contains("1 send, 1 write, 1 read"), "{text}");
}

#[test]
fn order_and_number_of_lines() {
    let file = sample("iwarp_rping.pcap");
    let first = |args: &[&str]| {
        let (_, json) = flows(&[args, &["--format", "json", &file]].concat());
        serde_json::from_str::<Value>(json.lines().next().unwrap()).unwrap()
    };
    assert_eq!(first(&[])["to"]["port"], 7174);
    assert_eq!(first(&["--sort", "octets"])["from"]["port"], 7174);
    let (_, json) = flows(&["--top", "1", "--format", "json", &file]);
    assert_eq!(json.lines().count(), 1);
}

#[test]
fn what_cannot_be_read_is_2() {
    assert_eq!(flows(&["/nonexistent.pcap"]).0, Some(2));
    assert_eq!(flows(&[]).0, Some(2));
}
