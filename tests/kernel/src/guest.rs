//! The virtual machine, and commands in it.

use std::{
    fs,
    io::{Read, Write},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::{Child, Stdio},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail, ensure};

use crate::{
    image::Image,
    job::{Output, Watched},
    net::{Net, TAP},
    tools::{go_on, last_lines, pause},
};

/// So many commands may run at a time.
const PORTS: usize = 8;
/// How long a guest may take to boot, under emulation on a busy machine.
const BOOT: Duration = Duration::from_secs(120);

/// A guest that runs. It ends when this is dropped.
#[derive(Debug)]
pub(crate) struct Guest {
    qemu: Child,
    folder: PathBuf,
    /// Ports on which nothing runs.
    free: Arc<Mutex<Vec<UnixStream>>>,
    number: Mutex<u64>,
    /// Whether the processor runs it, rather than an emulation.
    pub(crate) accelerated: bool,
}

impl Guest {
    /// Boots `image` with so many processors. `programs` is a further archive for its file system. What the
    /// guest needs on disk lies in `folder`, which is its own.
    pub(crate) fn boot(
        image: &Image,
        programs: &[u8],
        net: &Net,
        folder: &Path,
        processors: usize,
    ) -> Result<Self> {
        let _ = fs::remove_dir_all(folder);
        fs::create_dir_all(folder)?;
        let initrd = folder.join("initrd");
        let mut octets = fs::read(&image.initrd)?;
        octets.extend_from_slice(programs);
        fs::write(&initrd, octets)?;
        let began = Instant::now();
        if kvm_works() {
            match Self::start(image, &initrd, net, folder, processors, true) {
                Ok(guest) => return Ok(guest.told(began)),
                Err(e) => eprintln!("lab: KVM does not boot the guest, emulating: {e:#}"),
            }
        }
        Self::start(image, &initrd, net, folder, processors, false).map(|guest| guest.told(began))
    }

    fn told(self, began: Instant) -> Self {
        let how = if self.accelerated { "KVM" } else { "emulated" };
        eprintln!("lab: the guest is up after {:.1} s ({how})", began.elapsed().as_secs_f64());
        self
    }

    fn start(
        image: &Image,
        initrd: &Path,
        net: &Net,
        folder: &Path,
        processors: usize,
        accelerated: bool,
    ) -> Result<Self> {
        let console = folder.join("console");
        fs::write(&console, "")?;
        let mut qemu = net.command("setpriv");
        // It does not outlive us, however we end.
        qemu.args(["--pdeathsig", "KILL", "qemu-system-x86_64", "-nodefaults", "-no-user-config"])
            .args(["-display", "none", "-no-reboot", "-machine", "pc,hpet=off,usb=off,vmport=off"])
            .args(if accelerated {
                ["-accel", "kvm", "-cpu", "host"]
            } else {
                ["-accel", "tcg,thread=multi,tb-size=256", "-cpu", "Nehalem"]
            })
            .args(["-smp", &processors.to_string(), "-m", "768"])
            .arg("-kernel")
            .arg(&image.kernel)
            .arg("-initrd")
            .arg(initrd)
            .args([
                "-append",
                "console=ttyS0 quiet panic=-1 mitigations=off nokaslr audit=0 tsc=reliable no_timer_check \
                 random.trust_cpu=on 8250.nr_uarts=1 nmi_watchdog=0 rcupdate.rcu_expedited=1",
            ])
            .arg("-serial")
            .arg(format!("file:{}", console.display()))
            .arg("-device")
            .arg(format!("virtio-serial-pci,max_ports={}", PORTS + 1))
            .arg("-netdev")
            .arg(format!("tap,id=n0,ifname={TAP},script=no,downscript=no,vhost=off"))
            .args([
                "-device",
                // Checksums and segments are the guest's own work, as on a cable.
                "virtio-net-pci,netdev=n0,mac=52:54:00:99:00:02,mrg_rxbuf=on,csum=off,gso=off,guest_csum=off,\
                 guest_tso4=off,guest_tso6=off,guest_ufo=off,host_tso4=off,host_tso6=off,host_ufo=off,\
                 host_ecn=off,guest_ecn=off,romfile=",
                "-device",
                "virtio-rng-pci",
            ]);
        for port in 1..=PORTS {
            let path = folder.join(format!("port{port}"));
            qemu.arg("-chardev")
                .arg(format!("socket,id=c{port},path={},server=on,wait=off", path.display()))
                .arg("-device")
                .arg(format!("virtserialport,chardev=c{port},nr={port},name=command{port}"));
        }
        let errors = folder.join("qemu");
        let qemu = qemu
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(fs::File::create(&errors)?)
            .spawn()
            .context("cannot run QEMU")?;
        let mut guest = Self {
            qemu,
            folder: folder.to_owned(),
            free: Arc::default(),
            number: Mutex::new(0),
            accelerated,
        };
        guest.await_boot(&console, &errors)?;
        for port in 1..=PORTS {
            let stream = UnixStream::connect(folder.join(format!("port{port}")))?;
            guest.give_back(stream);
        }
        Ok(guest)
    }

    fn await_boot(&mut self, console: &Path, errors: &Path) -> Result<()> {
        let limit = if self.accelerated { Duration::from_secs(20) } else { BOOT };
        let until = Instant::now() + limit;
        loop {
            go_on()?;
            let said = String::from_utf8_lossy(&fs::read(console)?).into_owned();
            if said.contains("LAB-READY") {
                return Ok(());
            }
            let ended = self.qemu.try_wait()?;
            if ended.is_some() || Instant::now() > until {
                let why = if ended.is_some() { "QEMU ended" } else { "the guest does not boot" };
                bail!(
                    "{why}: {}\nthe console's last lines:\n{}",
                    fs::read_to_string(errors).unwrap_or_default().trim(),
                    last_lines(&said, 15)
                );
            }
            pause();
        }
    }

    fn take_port(&self) -> Result<UnixStream> {
        let until = Instant::now() + Duration::from_secs(10);
        loop {
            go_on()?;
            let free = self.free.lock().unwrap_or_else(PoisonError::into_inner).pop();
            if let Some(port) = free {
                return Ok(port);
            }
            ensure!(Instant::now() < until, "all {PORTS} command ports of the guest are in use");
            pause();
        }
    }

    fn give_back(&self, port: UnixStream) {
        self.free.lock().unwrap_or_else(PoisonError::into_inner).push(port);
    }

    /// Starts a script of the shell.
    pub(crate) fn spawn(&self, script: &str) -> Result<GuestJob<'_>> {
        let number = {
            let mut number = self.number.lock().unwrap_or_else(PoisonError::into_inner);
            *number += 1;
            *number
        };
        let mut port = self.take_port()?;
        let body = format!("{script}\n");
        let request = format!("{number} {}\n{body}", body.len());
        port.write_all(request.as_bytes()).context("the guest takes no command")?;
        let watched = Watched::new(script);
        let (seen, free) = (watched.clone(), Arc::clone(&self.free));
        std::thread::spawn(move || match read_answer(&mut port, number, &seen) {
            Ok(code) => {
                free.lock().unwrap_or_else(PoisonError::into_inner).push(port);
                seen.ended(Some(code));
            }
            Err(e) => seen.broke(&format!("the guest is gone: {e}")),
        });
        Ok(GuestJob { guest: self, number, watched })
    }

    /// Runs a script to its end. One that takes longer than `limit` is ended, which is an error.
    pub(crate) fn run(&self, script: &str, limit: Duration) -> Result<Output> {
        self.spawn(script)?.wait(limit)
    }

    /// Whether it still answers.
    pub(crate) fn answers(&self) -> bool {
        self.run("true", Duration::from_secs(10)).is_ok_and(|output| output.code == Some(0))
    }

    /// What its kernel has said.
    pub(crate) fn kernel_log(&self) -> String {
        self.run("dmesg", Duration::from_secs(10)).map(|output| output.text()).unwrap_or_default()
    }
}

impl Drop for Guest {
    fn drop(&mut self) {
        let _ = self.qemu.kill();
        let _ = self.qemu.wait();
        let _ = fs::remove_dir_all(&self.folder);
    }
}

/// KVM is used where it is there and the processor says that it can: /dev/kvm alone, without the flags, was
/// seen to hang the guest.
fn kvm_works() -> bool {
    let device = fs::OpenOptions::new().read(true).write(true).open("/dev/kvm");
    let flags = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    device.is_ok() && flags.split_whitespace().any(|flag| flag == "vmx" || flag == "svm")
}

/// Reads what script `number` prints, up to its end. Gives its exit status.
fn read_answer(port: &mut impl Read, number: u64, seen: &Watched) -> std::io::Result<i32> {
    let mark = format!("\n--{number} ").into_bytes();
    let mut kept: Vec<u8> = Vec::new();
    let mut room = [0; 65_536];
    loop {
        let octets = port.read(&mut room)?;
        if octets == 0 {
            return Err(std::io::ErrorKind::UnexpectedEof.into());
        }
        kept.extend_from_slice(&room[..octets]);
        let Some(at) = kept.windows(mark.len()).position(|window| window == mark) else {
            // What may be the beginning of the mark is kept.
            let begun = (0..mark.len()).rev().find(|&len| kept.ends_with(&mark[..len]));
            let sure = kept.len() - begun.unwrap_or(0);
            seen.printed(&kept[..sure]);
            kept.drain(..sure);
            continue;
        };
        let rest = &kept[at + mark.len()..];
        let Some(end) = rest.iter().position(|&octet| octet == b'\n') else { continue };
        let head = String::from_utf8_lossy(&rest[..end]).into_owned();
        let mut numbers = head.split_whitespace().map(str::parse::<usize>);
        let (Some(Ok(code)), Some(Ok(errors))) = (numbers.next(), numbers.next()) else {
            return Err(std::io::Error::other(format!("a garbled answer: {head:?}")));
        };
        let mut stderr = rest[end + 1..].to_vec();
        let have = stderr.len();
        if have < errors {
            stderr.resize(errors, 0);
            port.read_exact(&mut stderr[have..])?;
        }
        seen.printed(&kept[..at]);
        seen.complained(&stderr);
        return Ok(code as i32);
    }
}

/// A script that runs in the guest. It is ended when this is dropped.
#[derive(Debug)]
pub(crate) struct GuestJob<'a> {
    guest: &'a Guest,
    number: u64,
    watched: Watched,
}

impl GuestJob<'_> {
    /// Waits for its end. After `limit` it is ended, which is an error.
    pub(crate) fn wait(self, limit: Duration) -> Result<Output> {
        if let Some(output) = self.watched.wait(limit)? {
            return Ok(output);
        }
        let so_far = self.watched.so_far();
        bail!(
            "`{}` in the guest has not ended after {limit:?}:\n{}",
            self.watched.command,
            so_far.tail()
        );
    }

    /// Waits for a line that contains `what`.
    pub(crate) fn expect(&self, what: &str, limit: Duration) -> Result<String> {
        self.watched.expect(what, limit)
    }

    /// Sends it a signal, for instance `INT`.
    pub(crate) fn signal(&self, name: &str) -> Result<()> {
        let group = format!("/run/group.{}", self.number);
        let script = format!("[ ! -e {group} ] || kill -{name} -- -$(cat {group})");
        self.guest.run(&script, Duration::from_secs(10)).map(drop)
    }

    /// Ends it, and gives what it printed.
    pub(crate) fn end(self) -> Result<Output> {
        self.signal("KILL")?;
        self.watched.wait(Duration::from_secs(5))?.context("it does not end")
    }
}

impl Drop for GuestJob<'_> {
    fn drop(&mut self) {
        if !self.watched.has_ended() && !crate::tools::stopped() {
            let _ = self.signal("KILL");
            let _ = self.watched.wait(Duration::from_secs(5));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Gives its octets in small pieces.
    struct Pieces<'a>(&'a [u8], usize);

    impl Read for Pieces<'_> {
        fn read(&mut self, room: &mut [u8]) -> std::io::Result<usize> {
            let n = self.1.min(room.len()).min(self.0.len());
            room[..n].copy_from_slice(&self.0[..n]);
            self.0 = &self.0[n..];
            Ok(n)
        }
    }

    #[test]
    fn an_answer_in_pieces_of_any_length() {
        let answer = b"out\n--8 0 0\nput\n\n--7 3 5\nerror";
        for len in 1..answer.len() {
            let seen = Watched::new("x");
            let code = read_answer(&mut Pieces(answer, len), 7, &seen).unwrap();
            seen.ended(Some(code));
            let output = seen.so_far();
            assert_eq!(output.code, Some(3), "{len}");
            assert_eq!(output.stdout, b"out\n--8 0 0\nput\n", "{len}");
            assert_eq!(output.stderr, b"error", "{len}");
        }
        // What is no mark is seen at once.
        let seen = Watched::new("x");
        assert!(read_answer(&mut Pieces(b"a line\n--", 100), 7, &seen).is_err());
        assert_eq!(seen.so_far().stdout, b"a line");
        let cut = &answer[..answer.len() - 1];
        assert!(read_answer(&mut Pieces(cut, 9), 7, &Watched::new("x")).is_err());
    }
}
