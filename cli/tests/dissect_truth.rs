//! `userdma dissect` against what others read from the same captures.

mod common;

use std::{path::Path, process::Command};

use serde_json::{Value, json};
use userdma_tests::{
    shared,
    truth::{Case, Exceptions, Run, cases, judge},
};

fn dissect(case: &Case) -> Result<Run, String> {
    let path = case.path.to_str().expect("the path is UTF-8");
    let output = common::run(&["dissect", "--format", "json", path]);
    Run::new(output.status.code(), &output.stdout, &output.stderr)
}

/// Every disagreement of a folder, but for those that are excused.
fn judge_folder(folder: &Path, exceptions: &mut Exceptions) -> (usize, Vec<String>) {
    let cases = cases(folder);
    let mut odd = Vec::new();
    for case in &cases {
        let found = match dissect(case) {
            Ok(run) => judge(&case.name, &case.truth(), &run),
            Err(why) => vec![why],
        };
        let found = exceptions.filter(&case.name, found);
        odd.extend(found.into_iter().map(|complaint| format!("{}: {complaint}", case.name)));
    }
    (cases.len(), odd)
}

fn pcaps() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../pcaps"))
}

fn nothing(odd: &[String]) {
    assert!(odd.is_empty(), "{} disagreements:\n{}", odd.len(), odd.join("\n"));
}

#[test]
fn the_shipped_captures_are_decoded_as_their_truth_has_it() {
    let (n, odd) = judge_folder(pcaps(), &mut Exceptions::read());
    nothing(&odd);
    let captures = std::fs::read_dir(pcaps()).expect("pcaps/ is there").filter(|entry| {
        let name = entry.as_ref().expect("pcaps/ can be read").file_name();
        let name = name.to_string_lossy().into_owned();
        name.contains(".pcap") && !name.ends_with(".json")
    });
    assert_eq!(n, captures.count(), "each capture has a truth");
    assert!(n >= 20, "{n} captures");
}

/// 260 captures: of the Linux kernel, and of many other people.
#[test]
fn all_captures_are_decoded_as_their_truth_has_it() {
    let mut exceptions = Exceptions::read();
    let (mut n, mut all) = (0, Vec::new());
    for folder in ["captures/kernel", "captures/public"] {
        let Some(folder) = shared(folder) else {
            return;
        };
        let (count, odd) = judge_folder(&folder, &mut exceptions);
        n += count;
        all.extend(odd);
    }
    nothing(&all);
    assert!(n >= 260, "{n} captures");
    let unused = exceptions.unused();
    assert!(unused.is_empty(), "truth-exceptions.md excuses what is no disagreement: {unused:?}");
}

/// The judge that the captures came with, which knows nothing of ours.
#[test]
fn the_other_judge_agrees() {
    let (Some(script), Some(kernel), Some(public)) =
        (shared("tools/check_truth.py"), shared("captures/kernel"), shared("captures/public"))
    else {
        return;
    };
    let Ok(output) = Command::new("python3")
        .arg(script)
        .args([env!("CARGO_BIN_EXE_userdma").as_ref(), kernel.as_path(), &public, pcaps()])
        .output()
    else {
        userdma_tests::skipped("python3 is missing: check_truth.py did not run");
        return;
    };
    let text = common::stdout(&output);
    let mut lines: Vec<_> = text.lines().collect();
    let summary = lines.pop().unwrap_or_default();
    assert!(summary.ends_with("captures agree"), "{text}{}", common::stderr(&output));
    let mut exceptions = Exceptions::read();
    let mut odd = Vec::new();
    for line in lines {
        let (file, complaint) = line.split_once(": ").unwrap_or((line, ""));
        odd.extend(
            exceptions.filter(file, vec![complaint.to_owned()]).pop().map(|_| line.to_owned()),
        );
    }
    nothing(&odd);
}

/// A judge that finds nothing must be one that would have found something: every value that the
/// truth knows is changed, one at a time, and each time there must be a complaint.
#[test]
fn the_judge_notices_every_change() {
    let names = [
        "roce_mix_imm_atomic_inv.pcap",
        "roce_err_rkey_write.pcap",
        "roce_udaddy.pcap",
        "iwarp_rping.pcap",
    ];
    let all = cases(pcaps());
    let mut changed = 0;
    for name in names {
        let case = all.iter().find(|case| case.name == name).expect("it is shipped");
        let truth = case.truth();
        let run = dissect(case).expect("the output is JSON");
        nothing(&judge(name, &truth, &run));
        for i in 0..run.rows.len() {
            for path in leaves(&run.rows[i]) {
                if !judged(&path) {
                    continue;
                }
                // tshark's names of other layers are not ours.
                let layer = run.rows[i].pointer(&path).and_then(Value::as_str);
                if path.starts_with("/stack")
                    && !matches!(layer, Some("eth" | "ipv4" | "udp" | "tcp"))
                {
                    continue;
                }
                let mut run = run.clone();
                let value = run.rows[i].pointer_mut(&path).expect("it was just found");
                *value = other(value);
                assert!(!judge(name, &truth, &run).is_empty(), "{name}, frame {}: {path}", i + 1);
                changed += 1;
            }
        }
        let mut short = run.clone();
        short.rows.pop();
        assert!(!judge(name, &truth, &short).is_empty());
        let mut silent = run.clone();
        silent.status = Some(1);
        silent.stderr.clear();
        assert!(!judge(name, &truth, &silent).is_empty());
    }
    assert!(changed > 1000, "{changed} values");
}

/// The JSON pointers of all that is neither object nor array.
fn leaves(value: &Value) -> Vec<String> {
    let children: Vec<(String, &Value)> = match value {
        Value::Object(map) => map.iter().map(|(key, v)| (key.clone(), v)).collect(),
        Value::Array(list) => list.iter().enumerate().map(|(i, v)| (i.to_string(), v)).collect(),
        _ => return vec![String::new()],
    };
    let below =
        |(key, v): (String, &Value)| leaves(v).into_iter().map(move |l| format!("/{key}{l}"));
    children.into_iter().flat_map(below).collect()
}

/// What the truth of the kernel's captures knows.
fn judged(path: &str) -> bool {
    const KNOWN: &[&str] = &[
        "/frame",
        "/time_ns",
        "/len",
        "/caplen",
        "/stack/0",
        "/stack/1",
        "/stack/2",
        "/roce/opcode",
        "/roce/opcode_value",
        "/roce/dest_qp",
        "/roce/psn",
        "/roce/ack_req",
        "/roce/solicited",
        "/roce/migreq",
        "/roce/pad",
        "/roce/pkey",
        "/roce/icrc",
        "/roce/reth/va",
        "/roce/reth/rkey",
        "/roce/reth/len",
        "/roce/aeth/kind",
        "/roce/aeth/code",
        "/roce/aeth/msn",
        "/roce/immdt",
        "/roce/ieth",
        "/roce/deth/qkey",
        "/roce/deth/src_qp",
        "/roce/atomic_eth/va",
        "/roce/atomic_eth/rkey",
        "/roce/atomic_eth/swap_add",
        "/roce/atomic_ack/original",
        "/roce/mad/mgmt_class",
        "/roce/mad/method",
        "/roce/mad/tid",
        "/roce/mad/attribute_id",
        "/roce/mad/attribute",
        "/iwarp/0/kind",
        "/iwarp/0/rdmap_opcode",
        "/iwarp/0/last",
        "/iwarp/0/ulpdu_len",
        "/iwarp/0/crc",
        "/iwarp/0/stag",
        "/iwarp/0/to",
        "/iwarp/0/qn",
        "/iwarp/0/msn",
        "/iwarp/0/mo",
    ];
    KNOWN.contains(&path)
}

/// Another value of the same kind.
fn other(value: &Value) -> Value {
    match value {
        Value::Bool(b) => json!(!b),
        Value::Number(n) => json!(n.as_i64().expect("it fits") ^ 1),
        Value::String(s) if s.starts_with("0x") => {
            let n = u64::from_str_radix(&s[2..], 16).expect("it is hex");
            json!(format!("{:#x}", n ^ 1))
        }
        Value::String(s) => json!(format!("{s}x")),
        _ => json!("x"),
    }
}
