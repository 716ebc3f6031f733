//! Our side: programs of this project in the namespace, as an ordinary user.

use std::{
    io::Read,
    path::Path,
    process::{Child, Command, Stdio},
    thread::JoinHandle,
    time::Duration,
};

use anyhow::{Context, Result, bail};

use crate::{
    job::{Output, Watched},
    net::Net,
    tools::run,
};

/// The user that Debian calls nobody.
const USER: &str = "65534";

/// A program of ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Program {
    /// The command line of this project.
    Userdma,
    /// What `verbs` is in the guest, over our library.
    Peer,
}

impl Program {
    pub(crate) const ALL: [Self; 2] = [Self::Userdma, Self::Peer];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Userdma => "userdma",
            Self::Peer => "peer",
        }
    }
}

/// A program of ours that runs. It is ended when this is dropped.
#[derive(Debug)]
pub(crate) struct OurJob {
    child: Child,
    watched: Watched,
    readers: Vec<JoinHandle<()>>,
}

impl OurJob {
    /// Starts a program, which lies in `folder`, without any privilege.
    pub(crate) fn start(net: &Net, folder: &Path, program: Program, args: &[&str]) -> Result<Self> {
        let mut command = net.command("setpriv");
        command
            .args(["--reuid", USER, "--regid", USER, "--clear-groups", "--inh-caps=-all"])
            .args(["--bounding-set=-all", "--no-new-privs", "--pdeathsig", "KILL"])
            .arg(folder.join(program.name()))
            .args(args)
            .env_clear()
            .envs([
                ("PATH", "/usr/sbin:/usr/bin:/sbin:/bin"),
                ("HOME", "/tmp"),
                ("RUST_BACKTRACE", "1"),
            ])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child =
            command.spawn().with_context(|| format!("cannot start {}", program.name()))?;
        let watched = Watched::new(&format!("{} {}", program.name(), args.join(" ")));
        let mut readers = Vec::new();
        if let Some(stdout) = child.stdout.take() {
            let seen = watched.clone();
            readers.push(std::thread::spawn(move || read(stdout, |octets| seen.printed(octets))));
        }
        if let Some(stderr) = child.stderr.take() {
            let seen = watched.clone();
            readers
                .push(std::thread::spawn(move || read(stderr, |octets| seen.complained(octets))));
        }
        Ok(Self { child, watched, readers })
    }

    /// Waits for a line of its stdout that contains `what`.
    pub(crate) fn expect(&mut self, what: &str, limit: Duration) -> Result<String> {
        self.look()?;
        // Its end is seen while it is waited for.
        let slice = Duration::from_millis(100);
        let mut left = limit;
        loop {
            match self.watched.expect(what, slice.min(left)) {
                Err(e) if left <= slice || self.watched.has_ended() => return Err(e),
                Err(_) => left -= slice,
                Ok(line) => return Ok(line),
            }
            self.look()?;
        }
    }

    /// Notes its end.
    fn look(&mut self) -> Result<()> {
        if !self.watched.has_ended()
            && let Some(status) = self.child.try_wait()?
        {
            // All that it has printed is read first.
            for reader in self.readers.drain(..) {
                let _ = reader.join();
            }
            self.watched.ended(status.code());
        }
        Ok(())
    }

    /// Waits for its end. After `limit` it is ended, which is an error.
    pub(crate) fn wait(mut self, limit: Duration) -> Result<Output> {
        let until = std::time::Instant::now() + limit;
        loop {
            self.look()?;
            if let Some(output) = self.watched.wait(Duration::from_millis(20))? {
                return Ok(output);
            }
            if std::time::Instant::now() > until {
                let so_far = self.watched.so_far();
                bail!(
                    "`{}` has not ended after {limit:?}:\n{}",
                    self.watched.command,
                    so_far.tail()
                );
            }
        }
    }

    /// Sends it a signal, for instance `INT`.
    pub(crate) fn signal(&self, name: &str) -> Result<()> {
        run(Command::new("kill").arg(format!("-{name}")).arg(self.child.id().to_string()))
    }

    /// As Ctrl-C does, and waits for its end.
    pub(crate) fn interrupt(self, limit: Duration) -> Result<Output> {
        self.signal("INT")?;
        self.wait(limit)
    }
}

impl Drop for OurJob {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn read(mut from: impl Read, mut to: impl FnMut(&[u8])) {
    let mut room = [0; 65_536];
    while let Ok(octets @ 1..) = from.read(&mut room) {
        to(&room[..octets]);
    }
}
