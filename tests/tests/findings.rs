//! What the analyser finds in captures of the kernel's drivers, against what was written down before there was one
//! (`expected-findings.json`, whose `about` says how the two are compared).

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
};

use serde_json::Value;
use userdma_analyze::{Analyser, Finding, Kind, Severity};
use userdma_tests::{captures, shared};

fn expected() -> Value {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("expected-findings.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

fn findings(path: &Path) -> Vec<Finding> {
    let records = captures::records(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let mut analyser = Analyser::new();
    for frame in captures::dissect(&records, 1 << 18) {
        analyser.push(&frame);
    }
    analyser.finish();
    analyser.take()
}

fn numbers(value: &Value) -> BTreeSet<u64> {
    value.as_array().into_iter().flatten().map(|n| n.as_u64().unwrap()).collect()
}

/// What is not as it was written down.
fn disagreements(ids: &Value, expected: &[Value], found: &[Finding]) -> Vec<String> {
    let mut wrong = Vec::new();
    let mut by_id: BTreeMap<&str, (Vec<&Value>, Vec<&Finding>)> = BTreeMap::new();
    for one in expected {
        by_id.entry(one["id"].as_str().unwrap()).or_default().0.push(one);
    }
    for one in found {
        by_id.entry(one.kind.id()).or_default().1.push(one);
    }
    for (id, (expected, mut found)) in by_id {
        let note = Kind::from_id(id).unwrap().severity() == Severity::Note;
        let folds = ids[id]["fold"] == true || expected.iter().any(|one| one["fold"] == true);
        if folds {
            let must: BTreeSet<_> =
                expected.iter().flat_map(|one| numbers(&one["frames"])).collect();
            let may: BTreeSet<_> = expected.iter().flat_map(|one| numbers(&one["may"])).collect();
            let have: BTreeSet<_> =
                found.iter().flat_map(|one| one.frames.iter().copied()).collect();
            for frame in must.difference(&have) {
                wrong.push(format!("{id}: frame {frame} is not named"));
            }
            for frame in have.iter().filter(|frame| !must.contains(frame) && !may.contains(frame)) {
                if !note {
                    wrong.push(format!("{id}: frame {frame} is named"));
                }
            }
            continue;
        }
        for one in expected {
            let (must, may) = (numbers(&one["frames"]), numbers(&one["may"]));
            let fits = found.iter().position(|found| {
                let have: BTreeSet<_> = found.frames.iter().copied().collect();
                must.is_subset(&have)
                    && have.iter().all(|frame| must.contains(frame) || may.contains(frame))
            });
            match fits {
                Some(at) => drop(found.remove(at)),
                None => wrong.push(format!("{id} at {must:?} is missing ({})", one["why"])),
            }
        }
        if !note {
            wrong.extend(found.iter().map(|one| format!("{id} at {:?}: {}", one.frames, one.text)));
        }
    }
    wrong
}

fn agree(folder: &Path, name: impl Fn(&str) -> Option<PathBuf>) -> usize {
    let all = expected();
    let (mut wrong, mut captures) = (Vec::new(), 0);
    for (file, expected) in all["captures"].as_object().unwrap() {
        let Some(path) = name(file) else { continue };
        captures += 1;
        let found = findings(&folder.join(path));
        let list = disagreements(&all["ids"], expected.as_array().unwrap(), &found);
        wrong.extend(list.into_iter().map(|what| format!("{file}: {what}")));
    }
    assert!(wrong.is_empty(), "{} disagreements:\n{}", wrong.len(), wrong.join("\n"));
    captures
}

#[test]
fn captures_of_the_kernel_give_what_was_written_down() {
    let Some(folder) = shared("captures/kernel") else { return };
    let captures = agree(&folder, |file| Some(file.into()));
    assert_eq!(captures, 78);
}

#[test]
fn so_do_those_that_are_shipped() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../pcaps");
    let captures = agree(&folder, |file| {
        let zipped = format!("{file}.gz");
        [file, &zipped].into_iter().find(|file| folder.join(file).exists()).map(Into::into)
    });
    assert!(captures > 25, "{captures}");
}

#[test]
fn kinds_and_severities_are_those_that_were_written_down() {
    let all = expected();
    let ids = all["ids"].as_object().unwrap();
    for (id, about) in ids {
        let kind = Kind::from_id(id).unwrap_or_else(|| panic!("{id}"));
        assert_eq!(about["severity"], kind.severity().name(), "{id}");
    }
    assert_eq!(ids.len(), Kind::ALL.len());
}

/// Captures with frames left out, doubled, swapped, cut and changed: whatever they are, they are no reason to panic,
/// and what is found names frames that are there.
#[test]
fn captures_that_were_mangled() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../pcaps");
    let mut files: Vec<_> = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| {
            path.to_str().is_some_and(|path| path.contains(".pcap") && !path.ends_with(".json"))
        })
        .collect();
    files.sort();
    let mut random = 0x2545_f491_4f6c_dd1d_u64;
    let mut next = move |below: usize| {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        (random % below as u64) as usize
    };
    for file in &files {
        let whole = captures::records(file).unwrap();
        for _ in 0..8 {
            let mut records = whole.clone();
            for _ in 0..1 + records.len() / 8 {
                let (a, b) = (next(records.len()), next(records.len()));
                match next(5) {
                    0 if records.len() > 2 => drop(records.remove(a)),
                    1 => records.insert(a, records[b].clone()),
                    2 => records.swap(a, b),
                    3 => {
                        let len = records[a].data.len();
                        records[a].data.truncate(len / 2 + next(len / 2 + 1));
                    }
                    _ => {
                        let at = next(records[a].data.len().max(1));
                        if let Some(octet) = records[a].data.get_mut(at) {
                            *octet ^= 1 << next(8);
                        }
                    }
                }
            }
            let mut analyser = Analyser::new();
            for frame in captures::dissect(&records, 1 << 18) {
                analyser.push(&frame);
            }
            analyser.finish();
            for one in analyser.take() {
                let named =
                    one.frames.iter().all(|&frame| (1..=records.len() as u64).contains(&frame));
                assert!(named && !one.frames.is_empty(), "{}: {one:?}", file.display());
            }
        }
    }
}

/// Captures of others: no panic, and of those without RDMA nothing at all.
#[test]
fn captures_of_others() {
    let Some(folder) = shared("captures/public") else { return };
    let mut files = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let Ok(records) = captures::records(&path) else { continue };
        files += 1;
        let frames = captures::dissect(&records, 1 << 18);
        let rdma = frames.iter().any(|frame| {
            !frame.roce.is_empty() || !frame.iwarp.is_empty() || frame.pause.is_some()
        });
        let mut analyser = Analyser::new();
        for frame in &frames {
            analyser.push(frame);
        }
        analyser.finish();
        let found = analyser.take();
        assert!(rdma || found.is_empty(), "{}: {found:?}", path.display());
    }
    assert!(files > 20, "{files}");
}
