//! Each kind of finding is found where it is shown, and not where it nearly is.

use userdma_analyze::{Analyser, Finding, Kind, scenes};
use userdma_proto::dissect::{Dissector, Options, capture::Reader};

fn findings(capture: &scenes::Capture) -> Vec<Finding> {
    let octets = capture.pcap();
    let mut reader = Reader::new(&octets[..]).unwrap();
    let mut dissector = Dissector::new(Options::default());
    let mut analyser = Analyser::new();
    let mut drain = |dissector: &mut Dissector| {
        while let Some(frame) = dissector.poll_frame() {
            analyser.push(&frame);
        }
    };
    while let Some(record) = reader.next_record().unwrap() {
        dissector.handle_record(&record);
        drain(&mut dissector);
    }
    dissector.finish();
    drain(&mut dissector);
    analyser.finish();
    analyser.take()
}

fn words(findings: &[Finding]) -> String {
    let lines = findings.iter().map(|one| format!("  {} {:?}: {}", one.kind, one.frames, one.text));
    lines.collect::<Vec<_>>().join("\n")
}

#[test]
fn each_kind_is_shown_and_nearly_shown() {
    let mut wrong = Vec::new();
    for &kind in Kind::ALL {
        let scene = scenes::of(kind);
        let shown = findings(&scene.shows);
        if !shown.iter().any(|one| one.kind == kind) {
            wrong.push(format!("{kind} is not found:\n{}", words(&shown)));
        }
        let nearly = findings(&scene.nearly);
        if nearly.iter().any(|one| one.kind == kind) {
            wrong.push(format!("{kind} is found where it nearly is:\n{}", words(&nearly)));
        }
    }
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), Kind::ALL.len(), wrong.join("\n"));
}

/// What else is found in the two captures of a kind: it belongs to what they show.
#[test]
fn nothing_else_is_found() {
    let mut all = String::new();
    for &kind in Kind::ALL {
        let scene = scenes::of(kind);
        for (name, capture) in [("shows", &scene.shows), ("nearly", &scene.nearly)] {
            let mut others: Vec<_> = findings(capture)
                .iter()
                .filter(|one| one.kind != kind)
                .map(|one| format!("{} {:?}", one.kind, one.frames))
                .collect();
            others.sort();
            if !others.is_empty() {
                all += &format!("{kind} {name}: {}\n", others.join(", "));
            }
        }
    }
    let golden = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/scenes.txt");
    if std::env::var_os("UPDATE_GOLDENS").is_some() {
        std::fs::write(golden, &all).unwrap();
    }
    let known = std::fs::read_to_string(golden).unwrap();
    assert_eq!(all, known, "UPDATE_GOLDENS=1 writes what is found now");
}

#[test]
fn a_finding_names_frames_of_the_capture_and_says_something() {
    for &kind in Kind::ALL {
        let scene = scenes::of(kind);
        for one in findings(&scene.shows) {
            assert!(
                !one.frames.is_empty() && one.frames.iter().all(|&frame| frame > 0),
                "{kind}: {one:?}"
            );
            assert!(one.text.len() > 10 && !one.text.ends_with('.'), "{kind}: {one:?}");
        }
    }
}
