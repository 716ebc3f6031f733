//! Tests against the guest: what they need, what they get, and the runner.

use std::{
    cell::{Cell, RefCell},
    fs,
    net::IpAddr,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, anyhow, ensure};
use userdma_proto::dissect::Frame;

use crate::{
    guest::{Guest, GuestJob},
    image::Image,
    impair::{self, Impairment, MEND},
    job::Output,
    net::{Capture, GUEST, HOST, Net},
    ours::{OurJob, Program},
    tools::stopped,
    wire,
};

/// The guest's driver that is the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Link {
    /// iWARP over the guest's TCP.
    Siw,
    /// RoCEv2 over UDP.
    Rxe,
}

impl Link {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Siw => "siw",
            Self::Rxe => "rxe",
        }
    }

    /// What our commands are told.
    pub(crate) fn transport(self) -> &'static str {
        match self {
            Self::Siw => "iwarp",
            Self::Rxe => "roce",
        }
    }
}

/// How the guest is to be set up.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Needs {
    pub(crate) link: Link,
    /// MTU of the wire.
    pub(crate) mtu: u16,
    /// Parameters of siw that are not as it has them by itself, `NAME=VALUE`, in order.
    pub(crate) siw: Vec<&'static str>,
}

impl Needs {
    pub(crate) fn siw(parameters: &[&'static str]) -> Self {
        Self { link: Link::Siw, mtu: 1500, siw: parameters.to_vec() }
    }

    pub(crate) fn rxe(mtu: u16) -> Self {
        Self { link: Link::Rxe, mtu, siw: Vec::new() }
    }
}

/// siw's parameters as it has them by itself.
const SIW_DEFAULTS: [&str; 5] =
    ["mpa_crc_required=N", "mpa_crc_strict=N", "mpa_version=2", "peer_to_peer=N", "try_gso=N"];

type Body = Box<dyn Fn(&Lab) -> Result<()>>;

/// A test.
pub(crate) struct Case {
    pub(crate) name: String,
    needs: Needs,
    body: Body,
}

impl Case {
    pub(crate) fn new(
        name: impl Into<String>,
        needs: Needs,
        body: impl Fn(&Lab) -> Result<()> + 'static,
    ) -> Self {
        Self { name: name.into(), needs, body: Box::new(body) }
    }

    /// What its files are called.
    fn stem(&self) -> String {
        self.name.replace("::", "-")
    }
}

/// So long a case may take in all.
const CASE: Duration = Duration::from_secs(120);
/// The names of the folders of labs that run begin so; the process follows.
const RUN: &str = "run-";

/// What a test gets: the guest, the wire, and our own side.
pub(crate) struct Lab {
    image: Image,
    folder: PathBuf,
    processors: usize,
    guest: RefCell<Option<Guest>>,
    capture: RefCell<Option<Capture>>,
    set_up: RefCell<Option<Needs>>,
    until: Cell<Instant>,
    /// What commands of the case under way printed, for the record of a failure.
    record: RefCell<String>,
    link: Cell<Link>,
    net: Net,
}

impl Lab {
    /// Boots the guest. `programs` are ours, by name and path; `folder` is the lab's own.
    pub(crate) fn new(
        image: Image,
        programs: &[(Program, PathBuf)],
        folder: &Path,
        processors: usize,
    ) -> Result<Self> {
        let net = Net::new()?;
        remove_stale(folder);
        let folder = folder.join(format!("{RUN}{}", std::process::id()));
        fs::create_dir_all(&folder)?;
        // Where an ordinary user can read and run them.
        for (program, path) in programs {
            fs::copy(path, folder.join(program.name()))
                .with_context(|| format!("cannot copy {}", path.display()))?;
        }
        let lab = Self {
            image,
            folder,
            processors,
            guest: RefCell::new(None),
            capture: RefCell::new(None),
            set_up: RefCell::new(None),
            until: Cell::new(Instant::now() + CASE),
            record: RefCell::new(String::new()),
            link: Cell::new(Link::Siw),
            net,
        };
        lab.boot()?;
        Ok(lab)
    }

    fn boot(&self) -> Result<()> {
        // The old one first: it has the tap device.
        self.guest.take();
        self.set_up.take();
        let ours: Vec<_> = Program::ALL
            .iter()
            .map(|program| (program.name(), self.folder.join(program.name())))
            .filter(|(_, path)| path.exists())
            .collect();
        let ours: Vec<_> = ours.iter().map(|(name, path)| (*name, path.as_path())).collect();
        let programs = crate::image::programs(&ours)?;
        let folder = self.folder.join("guest");
        let guest = Guest::boot(&self.image, &programs, &self.net, &folder, self.processors)?;
        self.guest.replace(Some(guest));
        Ok(())
    }

    /// The guest. It is there but while it boots.
    fn with_guest<T>(&self, f: impl FnOnce(&Guest) -> Result<T>) -> Result<T> {
        let guest = self.guest.borrow();
        f(guest.as_ref().context("the guest is down")?)
    }

    /// Whether the guest runs on this processor, rather than in an emulation.
    pub(crate) fn accelerated(&self) -> Result<bool> {
        self.with_guest(|guest| Ok(guest.accelerated))
    }

    /// Our address.
    pub(crate) fn host(&self, ipv6: bool) -> IpAddr {
        HOST[usize::from(ipv6)]
    }

    /// The guest's address.
    pub(crate) fn peer(&self, ipv6: bool) -> IpAddr {
        GUEST[usize::from(ipv6)]
    }

    /// The driver that the guest has now.
    pub(crate) fn link(&self) -> Link {
        self.link.get()
    }

    /// Gives what follows more time.
    pub(crate) fn extend(&self, time: Duration) {
        self.until.set(Instant::now() + time);
    }

    /// What is left of the case's time.
    pub(crate) fn left(&self) -> Duration {
        self.until.get().saturating_duration_since(Instant::now()).max(Duration::from_millis(1))
    }

    /// Runs a script in the guest to its end.
    pub(crate) fn guest(&self, script: &str) -> Result<Output> {
        let output = self.with_guest(|guest| guest.run(script, self.left()))?;
        self.keep("guest", &output);
        Ok(output)
    }

    /// Starts a script in the guest, and gives what runs to `f`.
    ///
    /// It is ended behind `f` if it runs still; what it printed comes back with the result.
    pub(crate) fn guest_while<T>(
        &self,
        script: &str,
        f: impl FnOnce(&GuestJob<'_>) -> Result<T>,
    ) -> Result<T> {
        self.with_guest(|guest| {
            let job = guest.spawn(script)?;
            let result = f(&job);
            let output = job.end();
            if let Ok(output) = &output {
                self.keep("guest", output);
            }
            result
        })
    }

    /// The same for a script that ends by itself, and soon after `f` is done.
    pub(crate) fn guest_beside<T>(
        &self,
        script: &str,
        f: impl FnOnce(&GuestJob<'_>) -> Result<T>,
    ) -> Result<(T, Output)> {
        let (result, output) = self.guest_beside_or_ended(script, f)?;
        Ok((result, output?))
    }

    /// The same, but gives what came of `f` where the script did not end, too.
    pub(crate) fn guest_beside_or_ended<T>(
        &self,
        script: &str,
        f: impl FnOnce(&GuestJob<'_>) -> Result<T>,
    ) -> Result<(T, Result<Output>)> {
        self.with_guest(|guest| {
            let job = guest.spawn(script)?;
            let result = f(&job);
            let output = if result.is_ok() {
                job.wait(self.left().min(Duration::from_secs(15)))
            } else {
                job.end()
            };
            if let Ok(output) = &output {
                self.keep("guest", output);
            }
            Ok((result?, output))
        })
    }

    /// Waits until something listens in the guest: at a TCP port, or (`rxe`) at one of the rdma_cm.
    pub(crate) fn guest_listens(&self, port: u16) -> Result<()> {
        let until = Instant::now() + self.left().min(Duration::from_secs(15));
        // The rdma_cm of siw listens with the kernel's TCP; of rxe only the rdma tool knows.
        let script = format!("ss -Htln 'sport = {port}'; rdma resource show cm_id 2>/dev/null");
        loop {
            let output = self.with_guest(|guest| guest.run(&script, self.left()))?;
            let needle = format!(":{port} ");
            if output.text().lines().any(|line| line.contains("LISTEN") && line.contains(&needle)) {
                return Ok(());
            }
            ensure!(
                Instant::now() < until,
                "nothing listens at port {port} of the guest:\n{}",
                output.tail()
            );
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Runs a program of ours to its end.
    pub(crate) fn ours(&self, program: Program, args: &[&str]) -> Result<Output> {
        let output = self.ours_spawn(program, args)?.wait(self.left())?;
        self.keep("ours", &output);
        Ok(output)
    }

    /// Starts a program of ours.
    pub(crate) fn ours_spawn(&self, program: Program, args: &[&str]) -> Result<OurJob> {
        OurJob::start(&self.net, &self.folder, program, args)
    }

    /// Waits for the end of a program of ours.
    pub(crate) fn end_of(&self, job: OurJob) -> Result<Output> {
        let output = job.wait(self.left().min(Duration::from_secs(15)))?;
        self.keep("ours", &output);
        Ok(output)
    }

    fn keep(&self, side: &str, output: &Output) {
        use std::fmt::Write;
        let mut record = self.record.borrow_mut();
        let _ = writeln!(
            record,
            "== {side}: {}\n-- ended with {:?} after {:?}\n{}-- stderr\n{}",
            output.command,
            output.code,
            output.took,
            output.text(),
            output.stderr_text()
        );
    }

    /// What commands printed since the case began, or since this was asked last.
    pub(crate) fn take_record(&self) -> String {
        self.record.take()
    }

    /// What the wire has seen of this case, frame by frame.
    pub(crate) fn wire(&self) -> Result<Vec<Frame>> {
        Ok(userdma_tests::captures::dissect(&self.records()?, 1 << 18))
    }

    /// Who sent each IPv4 packet of this case, and its identification.
    pub(crate) fn identifications(&self) -> Result<Vec<(IpAddr, u16)>> {
        Ok(self.records()?.iter().filter_map(|record| wire::identification(&record.data)).collect())
    }

    fn records(&self) -> Result<Vec<userdma_tests::captures::Octets>> {
        // What is under way gets into the file.
        std::thread::sleep(Duration::from_millis(150));
        let mut capture = self.capture.borrow_mut();
        let capture = capture.as_mut().context("no capture runs")?;
        capture.goes_on()?;
        userdma_tests::captures::records(&capture.file)
            .map_err(|e| anyhow!("cannot read the capture: {e}"))
    }

    /// What netem does to the packets of both directions, until the case has ended.
    pub(crate) fn impair(&self, what: &str) -> Result<Impairment<'_>> {
        Impairment::new(self, what)
    }

    /// Cuts the cable in both directions when so many `octets` have gone over it, and mends it when it has been cut
    /// so `long`; `f` goes on meanwhile.
    pub(crate) fn while_cut<T>(
        &self,
        octets: u64,
        long: Duration,
        f: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let script = format!(
            "cd /sys/class/net/eth0/statistics\n\
             so_far() {{ echo $(($(cat rx_bytes) + $(cat tx_bytes))); }}\n\
             until=$(($(so_far) + {octets}))\n\
             while [ $(so_far) -lt $until ]; do sleep 0.02; done\n\
             {}\necho cut\nsleep {}\n{MEND}\necho mended",
            impair::script("loss 100%"),
            long.as_secs_f64()
        );
        let (result, said) = self.guest_beside(&script, |_| f())?;
        said.success()?.says("mended")?;
        Ok(result)
    }

    /// Sets the guest and the wire up for a case.
    fn prepare(&self, needs: &Needs) -> Result<()> {
        let is_up = self.with_guest(|guest| Ok(guest.answers())).unwrap_or(false);
        if !is_up {
            eprintln!("lab: the guest does not answer: booting it anew");
            self.boot()?;
        }
        let has = self.set_up.take();
        let same = |f: &dyn Fn(&Needs) -> bool| has.as_ref().is_some_and(f);
        if !same(&|has| has.mtu == needs.mtu && has.link == needs.link) {
            self.net.set_mtu(needs.mtu)?;
            let script = format!(
                "links && ip link set eth0 mtu {} && ip addr replace 10.99.0.2/24 dev eth0 && \
                 {{ [ {} -lt 1280 ] || ip addr replace fd99::2/64 dev eth0 nodad; }} && links {}",
                needs.mtu,
                needs.mtu,
                needs.link.name()
            );
            self.guest(&script)?.success().context("the guest's link is not made")?;
        }
        if needs.link == Link::Siw && !same(&|has| has.siw == needs.siw) {
            let script: String = SIW_DEFAULTS
                .iter()
                .chain(&needs.siw)
                .filter_map(|pair| pair.split_once('='))
                .map(|(name, value)| {
                    format!("echo {value} >/sys/module/siw/parameters/{name} || exit 1\n")
                })
                .collect();
            self.guest(&script)?.success().context("siw's parameters are not set")?;
        }
        self.link.set(needs.link);
        self.set_up.replace(Some(needs.clone()));
        Ok(())
    }

    /// Runs one case. Its capture and, if it fails, its record are called `stem`.
    fn run(&self, case: &Case, out: &Path, stem: &str, keep: bool) -> Result<()> {
        self.until.set(Instant::now() + CASE);
        self.record.take();
        self.prepare(&case.needs)?;
        let file = out.join(format!("{stem}.pcap"));
        self.capture.replace(Some(self.net.capture(&file)?));
        self.record.take();
        let body = catch_unwind(AssertUnwindSafe(|| (case.body)(self)));
        let result = body.unwrap_or_else(|panic| {
            let what = panic.downcast_ref::<String>().cloned();
            let what = what.or_else(|| panic.downcast_ref::<&str>().map(|&s| s.to_owned()));
            Err(anyhow!("panicked: {}", what.unwrap_or_default()))
        });
        if stopped() {
            // It is no failure, and half a capture.
            self.capture.take();
            let _ = fs::remove_file(&file);
            return result;
        }
        // Nothing of this one is left for the next.
        let tidy = "killall -9 rping ucmatose udaddy rdma_server \
                    rdma_client verbs ibv_rc_pingpong ibv_uc_pingpong ibv_ud_pingpong ibv_srq_pingpong \
                    2>/dev/null; true";
        let tidy = format!("{MEND}; {tidy}");
        let _ = self.with_guest(|guest| guest.run(&tidy, Duration::from_secs(10)));
        if result.is_err() {
            std::thread::sleep(Duration::from_millis(300));
        }
        self.capture.take();
        if let Err(e) = &result {
            let kernel = self.with_guest(|guest| Ok(guest.kernel_log())).unwrap_or_default();
            let record = file.with_extension("txt");
            let kernel = crate::tools::last_lines(&kernel, 40);
            let text =
                format!("{e:#}\n\n{}\n== the guest's kernel\n{kernel}\n", self.record.borrow());
            fs::write(&record, text)
                .with_context(|| format!("cannot write {} ({e:#})", record.display()))?;
            // Whatever it has left in the guest does not disturb the next one.
            self.set_up.take();
        } else if !keep {
            let _ = fs::remove_file(&file);
        }
        result
    }
}

/// Removes what labs have left that were killed.
fn remove_stale(folder: &Path) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten() {
        let name = entry.file_name();
        let process = name.to_str().and_then(|name| name.strip_prefix(RUN));
        if process.is_some_and(|process| !Path::new("/proc").join(process).exists()) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        self.capture.take();
        self.guest.take();
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// How cases are to be run.
#[derive(Debug)]
pub(crate) struct Plan<'a> {
    /// Where captures and records of those that fail go.
    pub(crate) out: &'a Path,
    /// The captures of all are kept.
    pub(crate) keep: bool,
    /// One that fails is tried a second time, and said to have been.
    pub(crate) again: bool,
    /// After this none is begun.
    pub(crate) limit: Option<Duration>,
}

/// How cases went.
#[derive(Debug, Default)]
pub(crate) struct Tally {
    pub(crate) passed: usize,
    pub(crate) failed: usize,
    /// Those that were interrupted, or not begun.
    pub(crate) left: usize,
    twice: usize,
}

/// Runs cases, those together that need the same.
pub(crate) fn run_all(lab: &Lab, mut cases: Vec<Case>, plan: &Plan<'_>) -> Result<Tally> {
    let out = plan.out;
    for case in &cases {
        let stem = case.stem();
        for name in [stem.clone(), again(&stem)] {
            for end in ["pcap", "txt", "tcpdump"] {
                let _ = fs::remove_file(out.join(format!("{name}.{end}")));
            }
        }
    }
    cases.sort_by(|a, b| a.needs.cmp(&b.needs));
    let (mut tally, all) = (Tally { left: cases.len(), ..Tally::default() }, cases.len());
    let began = Instant::now();
    for (n, case) in cases.iter().enumerate() {
        if stopped() || plan.limit.is_some_and(|limit| began.elapsed() >= limit) {
            break;
        }
        let at = Instant::now();
        let stem = case.stem();
        let mut result = lab.run(case, out, &stem, plan.keep);
        if let Err(e) = &result
            && plan.again
            && !stopped()
        {
            println!("         once more: {}\n{}", case.name, indented(&format!("{e:#}")));
            tally.twice += 1;
            result = lab.run(case, out, &again(&stem), plan.keep);
        }
        if stopped() {
            break;
        }
        tally.left -= 1;
        let seconds = at.elapsed().as_secs_f64();
        let n = n + 1;
        match result {
            Ok(()) => {
                println!("{n:>3}/{all}  ok    {seconds:6.1} s  {}", case.name);
                tally.passed += 1;
            }
            Err(e) => {
                println!("{n:>3}/{all}  FAIL  {seconds:6.1} s  {}", case.name);
                println!("{}", indented(&format!("{e:#}")));
                tally.failed += 1;
            }
        }
    }
    let left = match (tally.left, stopped()) {
        (0, _) => String::new(),
        (left, true) => format!("{left} not run (interrupted), "),
        (left, false) => format!("{left} not run (--limit is over), "),
    };
    println!(
        "{} passed, {} failed, {left}{} tried twice, in {:.0} s",
        tally.passed,
        tally.failed,
        tally.twice,
        began.elapsed().as_secs_f64()
    );
    if tally.failed + tally.twice > 0 {
        println!("captures and what both sides said: {}", out.display());
    }
    Ok(tally)
}

/// What the files of a second try are called.
fn again(stem: &str) -> String {
    format!("{stem}-again")
}

fn indented(text: &str) -> String {
    text.lines().map(|line| format!("          {line}")).collect::<Vec<_>>().join("\n")
}
