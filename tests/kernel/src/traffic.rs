//! `verbs` in the guest against `peer` on our side, either as the client.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use crate::{
    case::{Case, Lab, Link, Needs},
    job::Output,
    ours::Program,
};

/// The port of the server.
pub(crate) const PORT: u16 = 7301;
const SOON: Duration = Duration::from_secs(10);

/// Which side is the client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Client {
    Guest,
    Ours,
}

impl Client {
    pub(crate) const BOTH: [Self; 2] = [Self::Guest, Self::Ours];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Guest => "theirs_to_ours",
            Self::Ours => "ours_to_theirs",
        }
    }
}

/// One run of the two programs.
#[derive(Clone, Debug)]
pub(crate) struct Run {
    pub(crate) client: Client,
    pub(crate) ipv6: bool,
    /// Options of the server, of the client, and of ours alone.
    pub(crate) server: String,
    pub(crate) options: String,
    pub(crate) ours: String,
    pub(crate) ops: String,
}

/// What both said.
pub(crate) struct Said {
    pub(crate) client: Output,
    pub(crate) server: Output,
}

impl Run {
    pub(crate) fn new(client: Client, ops: &str) -> Self {
        Self {
            client,
            ipv6: false,
            server: String::new(),
            options: String::new(),
            ours: String::new(),
            ops: ops.into(),
        }
    }

    pub(crate) fn server(mut self, options: &str) -> Self {
        self.server = options.into();
        self
    }

    pub(crate) fn options(mut self, options: &str) -> Self {
        self.options = options.into();
        self
    }

    pub(crate) fn ours(mut self, options: &str) -> Self {
        self.ours = options.into();
        self
    }

    pub(crate) fn ipv6(mut self) -> Self {
        self.ipv6 = true;
        self
    }

    /// Both programs, to their ends, whatever these are.
    pub(crate) fn run(&self, lab: &Lab) -> Result<Said> {
        let (host, guest) = (lab.host(self.ipv6), lab.peer(self.ipv6));
        let transport = format!("--transport {} {}", lab.link().transport(), self.ours);
        match self.client {
            Client::Guest => {
                let args = format!("listen {host} {PORT} {transport} {}", self.server);
                let mut server = lab.ours_spawn(Program::Peer, &words(&args))?;
                server.expect("\"listening\"", SOON)?;
                let script = format!("verbs connect {host} {PORT} {} {}", self.options, self.ops);
                let client = lab.guest(&script)?;
                Ok(Said { client, server: lab.end_of(server)? })
            }
            Client::Ours => {
                let script = format!("verbs listen {guest} {PORT} {}", self.server);
                let args = format!(
                    "connect {guest} {PORT} {transport} --from {host} {} {}",
                    self.options, self.ops
                );
                let (client, server) = lab.guest_beside(&script, |job| {
                    job.expect("\"listening\"", SOON)?;
                    lab.ours(Program::Peer, &words(&args))
                })?;
                Ok(Said { client, server })
            }
        }
    }

    /// The same, and all of it must have gone well on both sides.
    pub(crate) fn succeeds(&self, lab: &Lab) -> Result<Said> {
        let said = self.run(lab)?;
        said.client.success()?;
        said.server.success()?;
        for side in [&said.client, &said.server] {
            let summary = side.event("summary")?;
            ensure!(summary["ok"] == true, "`{}`: {summary}", side.command);
        }
        Ok(said)
    }

    /// The last operation fails at the client with `status`; those before it go well. What the server took went
    /// well, but for what [`Said::failed`] gives.
    pub(crate) fn fails(&self, lab: &Lab, status: &str) -> Result<Said> {
        let said = self.run(lab)?;
        said.client.ended_with(1)?;
        let sent = said.sent();
        let (last, before) = sent.split_last().context("no operation was carried out")?;
        ensure!(before.iter().all(|event| event["ok"] == true), "{before:?}");
        ensure!(last["status"] == status, "the last operation ended so: {last}, not with {status}");
        Ok(said)
    }
}

impl Said {
    /// What the client says of its operations.
    pub(crate) fn sent(&self) -> Vec<Value> {
        self.client.objects().into_iter().filter(|event| event["event"] == "sent").collect()
    }

    /// What the server received.
    pub(crate) fn received(&self) -> Vec<Value> {
        self.server.objects().into_iter().filter(|event| event["event"] == "received").collect()
    }

    /// The statuses of the server's receives that failed, but for those that the end of the queue pair flushed.
    pub(crate) fn failed(&self) -> Vec<String> {
        let statuses = self
            .received()
            .into_iter()
            .filter_map(|event| event["status"].as_str().map(str::to_owned));
        statuses.filter(|status| status != "SUCCESS").collect()
    }

    /// An error unless the server's receives failed with these statuses.
    pub(crate) fn server_failed_with(&self, statuses: &[&str]) -> Result<()> {
        ensure!(
            self.failed() == statuses,
            "the server's receives failed with {:?}, not {statuses:?}:\n{}",
            self.failed(),
            self.server.tail()
        );
        Ok(())
    }
}

/// A hundred MiB written, each looked at by the server, and as many read.
pub(crate) fn long(needs: Needs, client: Client) -> Case {
    let name = format!("{}::long::hundred_mib_{}", needs.link.name(), client.name());
    Case::new(name, needs, move |lab| {
        lab.extend(Duration::from_secs(600));
        let reads = ["read:20971520"; 5].join(" ");
        let memory = "--memory 50331648";
        Run::new(client, &format!("long:100 {reads}"))
            .server(memory)
            .options(memory)
            .succeeds(lab)
            .map(drop)
    })
}

pub(crate) fn words(text: &str) -> Vec<&str> {
    text.split_whitespace().collect()
}

/// Lengths around everything that a length may be around: words, path MTUs, FPDUs, 64 KiB.
pub(crate) fn sizes(link: Link) -> &'static [u64] {
    match link {
        Link::Siw => &[
            0, 1, 2, 3, 4, 5, 1423, 1424, 1425, 1428, 1429, 4096, 65_535, 65_536, 65_537, 1_000_003,
        ],
        Link::Rxe => &[
            0, 1, 2, 3, 4, 5, 255, 256, 257, 1023, 1024, 1025, 4095, 4096, 4097, 65_535, 65_536,
            1_000_003,
        ],
    }
}
