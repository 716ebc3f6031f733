//! Programs of this host: running them, and what to install where one is missing.

use std::{
    io::Write,
    path::Path,
    process::{Command, Stdio},
    sync::{
        Arc, LazyLock,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use anyhow::{Context, Result, bail};

/// Raised by Ctrl-C and SIGTERM: everything that waits gives up, and cleans up on its way.
static STOP: LazyLock<Arc<AtomicBool>> = LazyLock::new(Arc::default);

/// Watches for Ctrl-C and SIGTERM. A second one ends the program at once: what is left then, the next lab
/// cleans up.
pub(crate) fn watch_signals() -> Result<()> {
    for signal in [signal_hook::consts::SIGINT, signal_hook::consts::SIGTERM] {
        signal_hook::flag::register_conditional_shutdown(signal, 130, Arc::clone(&STOP))?;
        signal_hook::flag::register(signal, Arc::clone(&STOP))?;
    }
    Ok(())
}

/// Whether the program was asked to end.
pub(crate) fn stopped() -> bool {
    STOP.load(Ordering::Relaxed)
}

/// An error if the program was asked to end.
pub(crate) fn go_on() -> Result<()> {
    if stopped() {
        bail!("interrupted");
    }
    Ok(())
}

/// Waits a little between two looks at something.
pub(crate) fn pause() {
    std::thread::sleep(Duration::from_millis(20));
}

/// What the lab needs on this host, and the Debian package it is in.
const NEEDED: [(&str, &str); 14] = [
    ("qemu-system-x86_64", "qemu-system-x86"),
    ("gcc", "gcc"),
    ("make", "make"),
    ("objdump", "binutils"),
    ("xz", "xz-utils"),
    ("tar", "tar"),
    ("ip", "iproute2"),
    ("tc", "iproute2"),
    ("ethtool", "ethtool"),
    ("tcpdump", "tcpdump"),
    ("setpriv", "util-linux"),
    ("dpkg-deb", "dpkg"),
    ("apt-get", "apt"),
    ("timeout", "coreutils"),
];

/// The packages that are missing here.
pub(crate) fn missing() -> Vec<&'static str> {
    let mut missing: Vec<_> = NEEDED
        .iter()
        .filter(|(program, _)| !is_there(program))
        .map(|&(_, package)| package)
        .collect();
    missing.dedup();
    missing
}

fn is_there(program: &str) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let known = ["/usr/sbin", "/sbin"].map(Into::into);
    std::env::split_paths(&path).chain(known).any(|folder| folder.join(program).is_file())
}

/// Installs `packages`.
pub(crate) fn install(packages: &[&str]) -> Result<()> {
    eprintln!("lab: installing {}", packages.join(" "));
    run(Command::new("apt-get").args(["update", "-q"]))?;
    run(Command::new("apt-get")
        .env("DEBIAN_FRONTEND", "noninteractive")
        .args(["install", "-qy", "--no-install-recommends"])
        .args(packages))
}

/// Runs a program to its end; its output is shown only if it fails.
pub(crate) fn run(command: &mut Command) -> Result<()> {
    output(command).map(drop)
}

/// The same, and gives what it printed.
pub(crate) fn output(command: &mut Command) -> Result<Vec<u8>> {
    go_on()?;
    let program = command.get_program().to_string_lossy().into_owned();
    let done =
        command.stdin(Stdio::null()).output().with_context(|| format!("cannot run {program}"))?;
    if !done.status.success() {
        let mut said = String::from_utf8_lossy(&done.stdout).into_owned();
        said += &String::from_utf8_lossy(&done.stderr);
        let args: Vec<_> = command.get_args().map(|arg| arg.to_string_lossy()).collect();
        bail!("{program} {} failed ({}):\n{}", args.join(" "), done.status, last_lines(&said, 30));
    }
    Ok(done.stdout)
}

/// What a program makes of `input`; `None` if it does not like it.
pub(crate) fn filter(program: &str, args: &[&str], input: &[u8]) -> Option<Vec<u8>> {
    let mut child = Command::new(program)
        .args(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .ok()?;
    let mut stdin = child.stdin.take()?;
    let input = input.to_vec();
    // It need not read to the end.
    let writer = std::thread::spawn(move || drop(stdin.write_all(&input)));
    let output = child.wait_with_output().ok()?;
    let _ = writer.join();
    (!output.stdout.is_empty()).then_some(output.stdout)
}

/// `sh -c` in a folder.
pub(crate) fn shell(folder: &Path, script: &str) -> Result<()> {
    run(Command::new("sh").arg("-ec").arg(script).current_dir(folder))
}

/// The last lines of a text.
pub(crate) fn last_lines(text: &str, most: usize) -> String {
    let lines: Vec<_> = text.lines().collect();
    lines[lines.len().saturating_sub(most)..].join("\n")
}
