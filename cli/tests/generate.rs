//! Man pages and completions: there for every command, and taken by who reads them.

use std::{collections::BTreeSet, fs, process::Command};

fn userdma(args: &[&str]) -> (Option<i32>, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_userdma")).args(args).output().unwrap();
    (output.status.code(), String::from_utf8(output.stdout).unwrap())
}

/// The commands that `--help` names.
fn commands() -> BTreeSet<String> {
    let (_, help) = userdma(&["--help"]);
    let list = help.split_once("Commands:").unwrap().1.split_once("\n\n").unwrap().0;
    // What is wrapped is indented further.
    let lines = list.lines().filter_map(|line| line.strip_prefix("  "));
    let names = lines
        .filter(|line| !line.starts_with(' '))
        .filter_map(|line| line.split_whitespace().next());
    names.filter(|name| *name != "help").map(str::to_owned).collect()
}

#[test]
fn each_command_has_a_page() {
    let folder = std::env::temp_dir().join(format!("userdma-man-{}", std::process::id()));
    assert_eq!(userdma(&["generate", "man", folder.to_str().unwrap()]).0, Some(0));
    let commands = commands();
    assert!(commands.len() >= 4 && commands.contains("check"), "{commands:?}");
    for command in &commands {
        let page = fs::read_to_string(folder.join(format!("userdma-{command}.1"))).unwrap();
        assert!(page.contains(".SH NAME") && page.contains(".SH OPTIONS"), "{command}");
    }
    // Examples are in it.
    let check = fs::read_to_string(folder.join("userdma-check.1")).unwrap();
    assert!(check.contains("userdma check x.pcap"), "{check}");
    assert!(folder.join("userdma.1").exists());
    fs::remove_dir_all(folder).unwrap();
}

#[test]
fn completions_for_shells() {
    for shell in ["bash", "zsh", "fish"] {
        let (code, text) = userdma(&["generate", "completions", shell]);
        assert_eq!(code, Some(0), "{shell}");
        for command in commands() {
            assert!(text.contains(&command), "{shell}: {command}");
        }
    }
    assert_eq!(userdma(&["generate", "completions", "cmd.exe"]).0, Some(2));
}

#[test]
fn bash_takes_its_completions() {
    if Command::new("bash").arg("--version").output().is_err() {
        eprintln!("SKIPPED: no bash: its completions were not tried");
        return;
    }
    let script = r#"eval "$("$0" generate completions bash)" && COMP_WORDS=(userdma ch) COMP_CWORD=1 && _userdma userdma ch userdma && echo "${COMPREPLY[@]}""#;
    let output =
        Command::new("bash").args(["-c", script, env!("CARGO_BIN_EXE_userdma")]).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(text.contains("check"), "{text} {}", String::from_utf8_lossy(&output.stderr));
}
