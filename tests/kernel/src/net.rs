//! The network between us and the guest: a namespace with one tap device, the wire.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};

use crate::tools::{go_on, output, pause, run};

/// The names of namespaces begin so; the process that made one follows.
const PREFIX: &str = "userdma-lab-";
/// The tap device: our end of the wire.
pub(crate) const TAP: &str = "lab0";

/// Our addresses.
pub(crate) const HOST: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(10, 99, 0, 1)),
    IpAddr::V6(Ipv6Addr::new(0xfd99, 0, 0, 0, 0, 0, 0, 1)),
];
/// The guest's.
pub(crate) const GUEST: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(10, 99, 0, 2)),
    IpAddr::V6(Ipv6Addr::new(0xfd99, 0, 0, 0, 0, 0, 0, 2)),
];

/// A network namespace of our own. It goes when this does.
#[derive(Debug)]
pub(crate) struct Net {
    name: String,
}

impl Net {
    /// The namespace with its tap device. What labs left that were killed goes first.
    pub(crate) fn new() -> Result<Self> {
        remove_stale()?;
        let net = Self { name: format!("{PREFIX}{}", std::process::id()) };
        run(Command::new("ip").args(["netns", "add", &net.name]))
            .context("cannot make a network namespace: the lab needs root")?;
        net.ip(&["link", "set", "lo", "up"])?;
        net.ip(&["tuntap", "add", TAP, "mode", "tap"])
            .context("cannot make a tap device: is there /dev/net/tun?")?;
        net.ip(&["link", "set", TAP, "address", "52:54:00:99:00:01", "mtu", "9000", "up"])?;
        net.ip(&["addr", "add", "10.99.0.1/24", "dev", TAP])?;
        net.ip(&["addr", "add", "fd99::1/64", "dev", TAP, "nodad"])?;
        // Whole checksums and frames no larger than the MTU, as on a cable.
        for feature in ["tx", "sg", "tso", "gso", "gro"] {
            let _ = net.run("ethtool", &["-K", TAP, feature, "off"]);
        }
        Ok(net)
    }

    /// A program in the namespace.
    pub(crate) fn command(&self, program: &str) -> Command {
        let mut command = Command::new("ip");
        command.args(["netns", "exec", &self.name, program]);
        command
    }

    fn run(&self, program: &str, args: &[&str]) -> Result<()> {
        run(self.command(program).args(args))
    }

    fn ip(&self, args: &[&str]) -> Result<()> {
        run(Command::new("ip").args(["-n", &self.name]).args(args))
    }

    /// Sets the MTU of our end.
    pub(crate) fn set_mtu(&self, mtu: u16) -> Result<()> {
        self.ip(&["link", "set", TAP, "mtu", &mtu.to_string()])?;
        // An MTU below 1280 takes the IPv6 addresses away.
        if mtu >= 1280 {
            self.ip(&["addr", "replace", "fd99::1/64", "dev", TAP, "nodad"])?;
        }
        Ok(())
    }

    /// Writes what is on the wire into `file`.
    pub(crate) fn capture(&self, file: &Path) -> Result<Capture> {
        let said = file.with_extension("tcpdump");
        let errors = fs::File::create(&said).with_context(|| {
            format!("cannot write into {}", file.parent().unwrap_or(file).display())
        })?;
        // It does not outlive us, however we end.
        let child = self
            .command("setpriv")
            .args(["--pdeathsig", "KILL", "tcpdump"])
            .args([
                "-q",
                "-U",
                "--immediate-mode",
                "-s",
                "0",
                "-B",
                "65536",
                "-Z",
                "root",
                "-i",
                TAP,
                "-w",
            ])
            .arg(file)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(errors)
            .spawn()
            .context("cannot run tcpdump")?;
        let mut capture = Capture { child, file: file.to_owned(), said };
        let until = Instant::now() + Duration::from_secs(10);
        while !fs::read_to_string(&capture.said)?.contains("listening on") {
            go_on()?;
            capture.goes_on()?;
            if Instant::now() > until {
                bail!("tcpdump does not start: {}", fs::read_to_string(&capture.said)?.trim());
            }
            pause();
        }
        Ok(capture)
    }
}

impl Drop for Net {
    fn drop(&mut self) {
        let _ =
            Command::new("ip").args(["netns", "del", &self.name]).stderr(Stdio::null()).status();
    }
}

/// Removes the namespaces of labs that do not run any more.
fn remove_stale() -> Result<()> {
    let list = String::from_utf8(output(Command::new("ip").args(["netns", "list"]))?)?;
    for name in list.lines().filter_map(|line| line.split_whitespace().next()) {
        let Some(process) = name.strip_prefix(PREFIX) else { continue };
        if !Path::new("/proc").join(process).exists() {
            run(Command::new("ip").args(["netns", "del", name]))?;
        }
    }
    Ok(())
}

/// A capture under way. It ends when this is dropped; the file stays.
#[derive(Debug)]
pub(crate) struct Capture {
    child: Child,
    pub(crate) file: PathBuf,
    said: PathBuf,
}

impl Capture {
    /// An error if it has ended by itself.
    pub(crate) fn goes_on(&mut self) -> Result<()> {
        if let Some(status) = self.child.try_wait()? {
            let said = fs::read_to_string(&self.said).unwrap_or_default();
            bail!(
                "tcpdump, which writes {}, has ended ({status}); is there room on that disk? It says:\n{}",
                self.file.display(),
                said.trim()
            );
        }
        Ok(())
    }
}

impl Drop for Capture {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = fs::remove_file(&self.said);
    }
}
