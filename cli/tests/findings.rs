//! `docs/findings.md` and its captures: what `check` and `sim --show` say and write.

use std::{
    collections::BTreeSet,
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use userdma_analyze::{Kind, Severity, scenes};

fn docs() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs")
}

fn userdma(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_userdma")).args(args).output().unwrap()
}

/// The page, as the table of kinds has it.
fn page() -> String {
    let mut out = String::from(
        "# What `userdma check` finds\n\n\
         Each kind has an identifier, which is stable, and a capture that shows it, made by `userdma sim --show ID --pcap F`;\n\
         `--nearly` writes one that nearly does, and does not. An error says that an operation or a connection failed, a\n\
         warning that it works though something is wrong or costs time, a note never makes `check` fail.\n\
         `UPDATE_GOLDENS=1 cargo test -p userdma-cli --test findings` writes this page and the captures.\n",
    );
    for severity in [Severity::Error, Severity::Warning, Severity::Note] {
        let title = match severity {
            Severity::Error => "Errors",
            Severity::Warning => "Warnings",
            Severity::Note => "Notes",
        };
        let _ = write!(
            out,
            "\n## {title}\n\n| kind | what it means | what to look at | rule |\n|---|---|---|---|\n"
        );
        for kind in Kind::ALL.iter().filter(|kind| kind.severity() == severity) {
            let _ = writeln!(
                out,
                "| [`{id}`](findings/{id}.pcap) | {} | {} | {} |",
                kind.meaning(),
                kind.look_at(),
                kind.rule(),
                id = kind.id()
            );
        }
    }
    out
}

#[test]
fn the_page_and_its_captures_are_those_of_the_table() {
    let folder = docs().join("findings");
    if std::env::var_os("UPDATE_GOLDENS").is_some() {
        fs::create_dir_all(&folder).unwrap();
        fs::write(docs().join("findings.md"), page()).unwrap();
        for kind in Kind::ALL {
            fs::write(folder.join(format!("{kind}.pcap")), scenes::of(*kind).shows.pcap()).unwrap();
        }
    }
    assert_eq!(fs::read_to_string(docs().join("findings.md")).unwrap(), page());
    let there: BTreeSet<_> = fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    let wanted: BTreeSet<_> = Kind::ALL.iter().map(|kind| format!("{kind}.pcap")).collect();
    assert_eq!(there, wanted);
    for kind in Kind::ALL {
        let file = folder.join(format!("{kind}.pcap"));
        assert_eq!(fs::read(&file).unwrap(), scenes::of(*kind).shows.pcap(), "{kind}");
    }
}

#[test]
fn check_finds_in_each_what_it_is_called_after() {
    for kind in Kind::ALL {
        let file = docs().join(format!("findings/{kind}.pcap"));
        let output = userdma(&["check", "--json", "--only", kind.id(), file.to_str().unwrap()]);
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(text.contains(&format!("\"id\":\"{kind}\"")), "{kind}: {text}");
        let fails = kind.severity() >= Severity::Warning;
        assert_eq!(output.status.code(), Some(i32::from(fails)), "{kind}");
    }
}

#[test]
fn sim_shows_a_kind_and_what_nearly_is_one() {
    let folder = std::env::temp_dir().join(format!("userdma-show-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let file = folder.join("x.pcap");
    let path = file.to_str().unwrap();
    assert!(userdma(&["sim", "--show", "rc-psn-gap", "--pcap", path]).status.success());
    let found = userdma(&["check", path]);
    assert_eq!(found.status.code(), Some(1));
    let text = String::from_utf8(found.stdout).unwrap();
    assert!(text.contains("warning RC-PSN-GAP") && text.contains("look at:"), "{text}");
    assert!(userdma(&["sim", "--show", "rc-psn-gap", "--nearly", "--pcap", path]).status.success());
    let found = String::from_utf8(userdma(&["check", path]).stdout).unwrap();
    assert!(!found.contains("RC-PSN-GAP"), "{found}");
    let wrong = userdma(&["sim", "--show", "RC-PSNGAP", "--pcap", path]);
    assert_eq!(wrong.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&wrong.stderr).contains("RC-PSN-GAP"));
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn exit_statuses_and_what_cannot_be_read() {
    let pcaps = Path::new(env!("CARGO_MANIFEST_DIR")).join("../pcaps");
    let at = |name: &str| pcaps.join(name).to_str().unwrap().to_owned();
    let code = |args: &[&str]| userdma(args).status.code();
    let (clean, warned, failed) =
        (at("roce_large.pcap.gz"), at("roce_rnr.pcap"), at("roce_err_rkey_write.pcap"));
    assert_eq!(code(&["check", &clean]), Some(0));
    assert_eq!(code(&["check", &warned]), Some(1));
    assert_eq!(code(&["check", "--fail-on", "error", &warned]), Some(0));
    assert_eq!(code(&["check", "--fail-on", "error", &clean, &failed]), Some(1));
    assert_eq!(code(&["check", "--fail-on", "never", &failed]), Some(0));
    assert_eq!(code(&["check", "--ignore", "RC-RNR", &warned]), Some(0));
    assert_eq!(code(&["check", "--only", "RC-PSN-GAP", &warned]), Some(0));
    let missing = userdma(&["check", "/nonexistent.pcap", &warned]);
    assert_eq!(missing.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&missing.stderr).contains("no such file"));
    // What can be read is looked at all the same.
    assert!(String::from_utf8_lossy(&missing.stdout).contains("RC-RNR"));
    assert_eq!(code(&["check"]), Some(2));
    assert_eq!(code(&["check", "--only", "RC-RNRR", &warned]), Some(2));
    let list = String::from_utf8(userdma(&["check", "--list"]).stdout).unwrap();
    assert_eq!(list.lines().count(), Kind::ALL.len());
}

#[test]
fn a_capture_that_ends_early_is_told_and_what_came_before_is_looked_at() {
    let folder = std::env::temp_dir().join(format!("userdma-early-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let pcaps = Path::new(env!("CARGO_MANIFEST_DIR")).join("../pcaps");
    let whole = fs::read(pcaps.join("roce_rnr.pcap")).unwrap();
    let file = folder.join("cut.pcap");
    fs::write(&file, &whole[..whole.len() - 10]).unwrap();
    let output = userdma(&["check", "--json", file.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(2));
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("\"id\":\"RC-RNR\"") && text.contains("\"whole\":false"), "{text}");
    assert!(String::from_utf8_lossy(&output.stderr).contains("ends early"));
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn hints_join_queue_pairs() {
    let folder = std::env::temp_dir().join(format!("userdma-hints-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let hints = folder.join("hints");
    fs::write(&hints, "# none\n10.0.0.1 0x11  10.0.0.2 0x22\n").unwrap();
    let capture = docs().join("findings/CAP-ONE-WAY.pcap");
    let (hints, capture) = (hints.to_str().unwrap(), capture.to_str().unwrap());
    let output = userdma(&["check", "--json", "--hints", hints, capture]);
    let text = String::from_utf8(output.stdout).unwrap();
    // The sender's queue pair is known by the hint alone.
    assert!(
        text.contains("\"from\":{\"ip\":\"10.0.0.1\",\"qp\":17}") || !text.contains("\"id\""),
        "{text}"
    );
    fs::write(folder.join("hints"), "10.0.0.1 0x11 nonsense\n").unwrap();
    let wrong = userdma(&["check", "--hints", hints, capture]);
    assert_eq!(wrong.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&wrong.stderr).contains("line 1"));
    fs::remove_dir_all(folder).unwrap();
}
