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
    job::Output,
    net::{Capture, GUEST, HOST, Net},
    ours::{OurJob, Program},
    tools::{go_on, stopped},
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

/// Takes netem away again.
const MEND: &str =
    "tc qdisc del dev eth0 root 2>/dev/null; tc qdisc del dev eth0 ingress 2>/dev/null; true";

/// Has netem do `what` to all that the guest sends and receives.
fn impairment(what: &str) -> String {
    format!(
        "tc qdisc replace dev eth0 root netem limit 10000 {what} || exit 1\n\
         tc qdisc replace dev ifb0 root netem limit 10000 {what} || exit 1\n\
         tc qdisc show dev eth0 ingress | grep -q ingress || tc qdisc add dev eth0 ingress || exit 1\n\
         tc filter replace dev eth0 parent ffff: protocol all prio 1 matchall \
         action mirred egress redirect dev ifb0 || exit 1"
    )
}

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
}

/// So long a case may take in all.
const CASE: Duration = Duration::from_secs(120);

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
        let folder = folder.join(format!("run-{}", std::process::id()));
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
            Ok((result?, output?))
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

    /// What the wire has seen of this case, frame by frame.
    pub(crate) fn wire(&self) -> Result<Vec<Frame>> {
        // What is under way gets into the file.
        std::thread::sleep(Duration::from_millis(150));
        let capture = self.capture.borrow();
        let capture = capture.as_ref().context("no capture runs")?;
        let records = userdma_tests::captures::records(&capture.file)
            .map_err(|e| anyhow!("cannot read the capture: {e}"))?;
        Ok(userdma_tests::captures::dissect(&records, 1 << 18))
    }

    /// What netem does to the packets of both directions, until the case has ended. It is the guest's: this
    /// host's kernel may have none.
    pub(crate) fn impair(&self, what: &str) -> Result<()> {
        self.guest(&impairment(what))?.success().context("netem is not set up")?;
        Ok(())
    }

    /// Cuts the cable `after` a while, in both directions, and mends it when it has been cut so `long`; `f` goes
    /// on meanwhile.
    pub(crate) fn while_cut<T>(
        &self,
        after: Duration,
        long: Duration,
        f: impl FnOnce() -> Result<T>,
    ) -> Result<T> {
        let script = format!(
            "sleep {}\n{}\necho cut\nsleep {}\n{MEND}\necho mended",
            after.as_secs_f64(),
            impairment("loss 100%"),
            long.as_secs_f64()
        );
        let (result, said) = self.guest_beside(&script, |_| f())?;
        said.says("mended")?;
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

    /// Runs one case.
    fn run(&self, case: &Case, out: &Path, keep: bool) -> Result<()> {
        self.until.set(Instant::now() + CASE);
        self.record.borrow_mut().clear();
        self.prepare(&case.needs)?;
        let file = out.join(format!("{}.pcap", case.name.replace("::", "-")));
        self.capture.replace(Some(self.net.capture(&file)?));
        self.record.borrow_mut().clear();
        let body = catch_unwind(AssertUnwindSafe(|| (case.body)(self)));
        let result = body.unwrap_or_else(|panic| {
            let what = panic.downcast_ref::<String>().cloned();
            let what = what.or_else(|| panic.downcast_ref::<&str>().map(|&s| s.to_owned()));
            Err(anyhow!("panicked: {}", what.unwrap_or_default()))
        });
        if stopped() {
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
        let record = file.with_extension("txt");
        if let Err(e) = &result {
            let kernel = self.with_guest(|guest| Ok(guest.kernel_log())).unwrap_or_default();
            let record = record.with_extension("txt");
            let kernel = crate::tools::last_lines(&kernel, 40);
            let text =
                format!("{e:#}\n\n{}\n== the guest's kernel\n{kernel}\n", self.record.borrow());
            fs::write(record, text)?;
            // Whatever it has left in the guest does not disturb the next one.
            self.set_up.take();
        } else if !keep {
            let _ = fs::remove_file(&file);
        }
        result
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        self.capture.take();
        self.guest.take();
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// Runs cases, those together that need the same. Captures and records of those that fail are in `out`; with
/// `keep` the captures of all. With `again` a case that fails is tried a second time, and said to have been. Gives
/// the names of those that failed.
pub(crate) fn run_all(
    lab: &Lab,
    mut cases: Vec<Case>,
    out: &Path,
    keep: bool,
    again: bool,
) -> Result<Vec<String>> {
    fs::create_dir_all(out).with_context(|| format!("cannot make {}", out.display()))?;
    cases.sort_by(|a, b| a.needs.cmp(&b.needs));
    let (mut failed, all, mut twice) = (Vec::new(), cases.len(), 0);
    let began = Instant::now();
    for (n, case) in cases.iter().enumerate() {
        go_on()?;
        let at = Instant::now();
        let mut result = lab.run(case, out, keep);
        go_on()?;
        if let Err(e) = &result
            && again
        {
            println!("         once more: {}\n{}", case.name, indented(&format!("{e:#}")));
            twice += 1;
            result = lab.run(case, out, keep);
            go_on()?;
        }
        let seconds = at.elapsed().as_secs_f64();
        let n = n + 1;
        match result {
            Ok(()) => println!("{n:>3}/{all}  ok    {seconds:6.1} s  {}", case.name),
            Err(e) => {
                println!("{n:>3}/{all}  FAIL  {seconds:6.1} s  {}", case.name);
                println!("{}", indented(&format!("{e:#}")));
                failed.push(case.name.clone());
            }
        }
    }
    println!(
        "{} passed, {} failed, {twice} tried twice, in {:.0} s",
        all - failed.len(),
        failed.len(),
        began.elapsed().as_secs_f64()
    );
    if !failed.is_empty() {
        println!("captures and what both sides said: {}", out.display());
    }
    Ok(failed)
}

fn indented(text: &str) -> String {
    text.lines().map(|line| format!("          {line}")).collect::<Vec<_>>().join("\n")
}
