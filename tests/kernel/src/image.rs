//! What the guest boots: Debian's kernel, siw built from Debian's kernel source, and a first file system
//! with Debian's RDMA programs. Packages are downloaded, not installed.
//!
//! | in the folder of the lab | what it is |
//! |---|---|
//! | `deb/` | packages |
//! | `KERNEL/` | what is made of them for one kernel version: `vmlinux`, `siw.ko`, `initrd.cpio`, `key` |
//!
//! `key` says what the rest was made of; it is made anew where that has changed.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail, ensure};

use crate::{
    cpio::Archive,
    tools::{self, filter, output, run, shell},
};

/// Packages of the guest's programs, and their libraries where this host may lack them.
const PACKAGES: &str = "busybox-static dash libc6 iproute2 ethtool libbpf1 libelf1 libmnl0 libcap2 zlib1g libbsd0 libmd0 \
    libselinux1 libpcre2-8-0 libtirpc3 ibverbs-utils ibverbs-providers libibverbs1 librdmacm1 rdmacm-utils perftest \
    libnl-3-200 libnl-route-3-200 libibumad3 libpci3 libudev1 libgcc-s1 libcap-ng0 libxtables12 libdb5.3 \
    libibverbs-dev librdmacm-dev";

/// What is taken of them.
const PROGRAMS: &str = "dash ip tc rdma ss ethtool ibv_devices ibv_devinfo ibv_rc_pingpong ibv_uc_pingpong ibv_ud_pingpong \
    ibv_srq_pingpong rping ucmatose udaddy rdma_client rdma_server ib_send_bw ib_send_lat ib_write_bw ib_write_lat \
    ib_read_bw ib_read_lat";

/// Modules that are loaded at the start, each behind those that it needs.
const MODULES: &str = "virtio_pci virtio_console virtio_net virtio_rng crc32c_generic crc32c_intel crc32_generic \
    crc32_pclmul ib_core ib_uverbs ib_cm iw_cm rdma_cm rdma_ucm rdma_rxe siw sch_netem \
    sch_ingress cls_matchall act_mirred ifb";

/// siw's settings, which are constants in Linux: the lab makes parameters of them, and changes nothing else.
const SIW_SWITCHES: [&str; 7] = [
    "zcopy_tx",
    "try_gso",
    "loopback_enabled",
    "mpa_crc_required",
    "mpa_crc_strict",
    "siw_tcp_nagle",
    "peer_to_peer",
];

/// The project's own program for the guest.
const VERBS: &str = include_str!("../guest/verbs.c");
const INIT: &str = include_str!("../guest/init");
const AGENT: &str = include_str!("../guest/agent");
const LINKS: &str = include_str!("../guest/links");

/// A kernel and its first file system.
#[derive(Debug)]
pub(crate) struct Image {
    /// What QEMU starts.
    pub(crate) kernel: PathBuf,
    pub(crate) initrd: PathBuf,
}

/// The image in `folder`, made if it is not there.
pub(crate) fn build(folder: &Path) -> Result<Image> {
    let version = kernel_version()?;
    let place = folder.join(&version);
    let made = Image { kernel: place.join("vmlinux"), initrd: place.join("initrd.cpio") };
    let mut key = DefaultHasher::new();
    (VERBS, INIT, AGENT, LINKS, PACKAGES, PROGRAMS, MODULES, SIW_SWITCHES).hash(&mut key);
    let key = format!("{:016x}", key.finish());
    if fs::read_to_string(place.join("key")).is_ok_and(|found| found == key) {
        return Ok(made);
    }

    eprintln!("lab: making the image, kernel {version}");
    let debs = Debs::new(folder)?;
    fs::create_dir_all(&place)?;
    let kernel_package = format!("linux-image-{version}");
    let sources = format!("linux-source-{}", series(&version));
    let mut wanted: Vec<String> = PACKAGES.split_whitespace().map(str::to_owned).collect();
    wanted.push(kernel_package.clone());
    let siw = place.join("siw.ko");
    if !siw.exists() {
        wanted.extend(headers(&version));
        wanted.push(sources.clone());
    }
    debs.fetch(&wanted)?;

    let kernel = place.join("kernel");
    unpack_anew(&debs, &[&kernel_package], &kernel)?;
    extract_kernel(&kernel.join(format!("boot/vmlinuz-{version}")), &made.kernel)?;
    if !siw.exists() {
        build_siw(&debs, &version, &sources, &place.join("siw-build"), &siw)?;
    }
    let root = place.join("root");
    let packages: Vec<_> = PACKAGES.split_whitespace().collect();
    unpack_anew(&debs, &packages, &root)?;
    let verbs = place.join("verbs");
    compile_verbs(&root, &place, &verbs)?;

    let archive = archive(&kernel, &siw, &root, &verbs, &version)?;
    fs::write(&made.initrd, archive.pack())?;
    for done in [kernel, root] {
        fs::remove_dir_all(done)?;
    }
    fs::write(place.join("key"), key)?;
    eprintln!(
        "lab: {} files, {} MB",
        archive.files(),
        fs::metadata(&made.initrd)?.len() / 1_000_000
    );
    Ok(made)
}

/// The kernel that Debian's `linux-image-amd64` stands for.
fn kernel_version() -> Result<String> {
    let depends = output(Command::new("apt-cache").args(["depends", "linux-image-amd64"]))?;
    let depends = String::from_utf8_lossy(&depends).into_owned();
    let version = depends
        .lines()
        .find_map(|line| line.trim().strip_prefix("Depends: linux-image-"))
        .context("apt knows no linux-image-amd64: run apt-get update, on a Debian of amd64")?;
    Ok(version.trim().to_owned())
}

/// `6.1` of `6.1.0-57-amd64`.
fn series(version: &str) -> String {
    version.split('.').take(2).collect::<Vec<_>>().join(".")
}

/// The packages that a module of this kernel is built with.
fn headers(version: &str) -> Vec<String> {
    let bare = version.trim_end_matches("-amd64");
    let kbuild = if series(version) == "6.1" { series(version) } else { bare.to_owned() };
    vec![
        format!("linux-headers-{version}"),
        format!("linux-headers-{bare}-common"),
        format!("linux-kbuild-{kbuild}"),
    ]
}

/// Downloaded packages.
struct Debs(PathBuf);

impl Debs {
    fn new(folder: &Path) -> Result<Self> {
        let place = folder.join("deb");
        fs::create_dir_all(&place).with_context(|| format!("cannot make {}", place.display()))?;
        Ok(Self(place))
    }

    /// Downloads those of `packages` that are not there.
    fn fetch(&self, packages: &[String]) -> Result<()> {
        let missing: Vec<_> = packages.iter().filter(|name| self.file(name).is_err()).collect();
        if missing.is_empty() {
            return Ok(());
        }
        eprintln!("lab: downloading {} packages", missing.len());
        run(Command::new("apt-get")
            .args(["-o", "APT::Sandbox::User=root", "-q", "download"])
            .args(missing)
            .current_dir(&self.0))
    }

    fn file(&self, package: &str) -> Result<PathBuf> {
        let prefix = format!("{package}_");
        let mut found: Vec<_> = fs::read_dir(&self.0)?
            .filter_map(|entry| Some(entry.ok()?.path()))
            .filter(|path| {
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                name.starts_with(&prefix) && name.ends_with(".deb")
            })
            .collect();
        found.sort();
        found.pop().with_context(|| format!("the package {package} is not there"))
    }

    fn unpack(&self, package: &str, to: &Path) -> Result<()> {
        run(Command::new("dpkg-deb").arg("-x").arg(self.file(package)?).arg(to))
    }
}

fn unpack_anew(debs: &Debs, packages: &[&str], to: &Path) -> Result<()> {
    let _ = fs::remove_dir_all(to);
    fs::create_dir_all(to)?;
    packages.iter().try_for_each(|package| debs.unpack(package, to))
}

/// The kernel itself from the file that unpacks itself: QEMU starts it as it is, which saves the guest
/// seconds under emulation.
fn extract_kernel(packed: &Path, to: &Path) -> Result<()> {
    let octets = fs::read(packed).with_context(|| format!("cannot read {}", packed.display()))?;
    let formats: [(&[u8], &str, &[&str]); 4] = [
        (b"\xfd7zXZ\0", "xz", &["-dc", "--single-stream"]),
        (b"\x28\xb5\x2f\xfd", "zstd", &["-dc"]),
        (b"\x02\x21\x4c\x18", "lz4", &["-dc"]),
        (b"\x1f\x8b\x08", "gzip", &["-dc"]),
    ];
    for (magic, program, args) in formats {
        let places = octets.windows(magic.len()).enumerate().filter(|(_, found)| *found == magic);
        for (at, _) in places {
            if let Some(kernel) = filter(program, args, &octets[at..])
                && kernel.starts_with(b"\x7fELF")
            {
                return Ok(fs::write(to, kernel)?);
            }
        }
    }
    bail!("no kernel found in {}", packed.display());
}

/// Builds siw, which Debian leaves out, from Debian's source of the same kernel.
fn build_siw(debs: &Debs, version: &str, sources: &str, work: &Path, to: &Path) -> Result<()> {
    let _ = fs::remove_dir_all(work);
    let source = work.join("src");
    fs::create_dir_all(&source)?;
    for package in headers(version) {
        debs.unpack(&package, work)?;
    }
    let package = debs.file(sources)?;
    shell(
        &source,
        &format!(
            "dpkg-deb --fsys-tarfile '{}' | tar -xO ./usr/src/{sources}.tar.xz | xz -T0 -dc | \
             tar -x --wildcards --strip-components=1 '*/drivers/infiniband/sw/siw/*'",
            package.display()
        ),
    )?;
    let headers = work.join(format!("usr/src/linux-headers-{version}"));
    // The makefile of the headers names the common ones by where they would be installed.
    let makefile = headers.join("Makefile");
    let text = fs::read_to_string(&makefile)?;
    let here = format!("include {}/usr/src", work.display());
    fs::write(&makefile, text.replace("include /usr/src", &here))?;

    let siw = source.join("drivers/infiniband/sw/siw");
    let edit = |name: &str, f: &dyn Fn(String) -> String| -> Result<()> {
        let path = siw.join(name);
        let text = fs::read_to_string(&path)?;
        let edited = f(text.clone());
        ensure!(edited != text, "{name} of siw is not as it was: its settings are not found");
        Ok(fs::write(path, edited)?)
    };
    edit("siw.h", &|text| {
        SIW_SWITCHES.iter().fold(text, |text, name| {
            text.replace(&format!("extern const bool {name};"), &format!("extern bool {name};"))
        })
    })?;
    edit("siw_main.c", &|text| {
        let text = SIW_SWITCHES.iter().fold(text, |text, name| {
            ["", " = true"].iter().fold(text, |text, value| {
                text.replace(
                    &format!("const bool {name}{value};"),
                    &format!("bool {name}{value};\nmodule_param({name}, bool, 0644);"),
                )
            })
        });
        text.replace(
            "u_char mpa_version = MPA_REVISION_2;",
            "u_char mpa_version = MPA_REVISION_2;\nmodule_param(mpa_version, byte, 0644);",
        )
    })?;
    edit("siw_cm.c", &|text| {
        text.replace(
            "static const bool relaxed_ird_negotiation = true;",
            "static bool relaxed_ird_negotiation = true;\nmodule_param(relaxed_ird_negotiation, bool, 0644);",
        )
    })?;
    run(Command::new("make")
        .args(["-s", "-j2", "CONFIG_RDMA_SIW=m", "CC=gcc", "modules"])
        .arg("-C")
        .arg(&headers)
        .arg(format!("M={}", siw.display())))
    .context("siw was not built")?;
    fs::copy(siw.join("siw.ko"), to)?;
    run(Command::new("strip").arg("--strip-debug").arg(to))?;
    fs::remove_dir_all(work)?;
    Ok(())
}

/// The project's program, against the headers and libraries of the guest.
fn compile_verbs(root: &Path, place: &Path, to: &Path) -> Result<()> {
    let source = place.join("verbs.c");
    fs::write(&source, VERBS)?;
    let libraries = root.join("usr/lib/x86_64-linux-gnu");
    let other = root.join("lib/x86_64-linux-gnu");
    run(Command::new("gcc")
        .args(["-std=gnu11", "-O2", "-Wall", "-Wextra"])
        .arg(format!("-I{}", root.join("usr/include").display()))
        .arg("-o")
        .args([to, &source])
        .arg(format!("-L{}", libraries.display()))
        .arg(format!("-Wl,-rpath-link,{}:{}", libraries.display(), other.display()))
        .args(["-lrdmacm", "-libverbs", "-lpthread"]))
    .context("guest/verbs.c does not compile")
}

/// The first file system.
fn archive(kernel: &Path, siw: &Path, root: &Path, verbs: &Path, version: &str) -> Result<Archive> {
    let mut archive = Archive::default();
    for folder in ["bin", "sbin", "proc", "sys", "dev", "tmp", "run", "root", "etc", "var/run"] {
        archive.folder(folder);
    }
    archive.link("lib", "usr/lib");
    let busybox = find(root, &["bin/busybox", "usr/bin/busybox"])?;
    archive.file("bin/busybox", 0o755, fs::read(busybox)?);
    archive.file("init", 0o755, INIT);
    archive.file("usr/bin/agent", 0o755, AGENT);
    archive.file("usr/bin/links", 0o755, LINKS);
    archive.file("etc/passwd", 0o644, "root:x:0:0::/root:/bin/sh\n");
    archive.file("etc/hosts", 0o644, "127.0.0.1 localhost guest\n::1 localhost\n");

    let mut libraries = Libraries { root, found: BTreeSet::new() };
    for program in PROGRAMS.split_whitespace() {
        let places =
            ["usr/bin", "bin", "usr/sbin", "sbin"].map(|folder| format!("{folder}/{program}"));
        let path = find(root, &places.each_ref().map(String::as_str))?;
        add_program(&mut archive, &mut libraries, program, &path)?;
    }
    add_program(&mut archive, &mut libraries, "verbs", verbs)?;
    let providers = root.join("usr/lib/x86_64-linux-gnu/libibverbs");
    for provider in ["rxe", "siw"] {
        let prefix = format!("lib{provider}-");
        let path = fs::read_dir(&providers)?
            .filter_map(|entry| Some(entry.ok()?.path()))
            .find(|path| {
                path.file_name().is_some_and(|name| name.to_string_lossy().starts_with(&prefix))
            })
            .with_context(|| format!("no provider library of {provider}"))?;
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        archive.file(&format!("{LIBRARIES}/libibverbs/{name}"), 0o644, fs::read(&path)?);
        libraries.needed_by(&path)?;
        archive.file(
            &format!("etc/libibverbs.d/{provider}.driver"),
            0o644,
            format!("driver {provider}\n"),
        );
    }
    for name in ["libgcc_s.so.1", "libm.so.6", "libnss_files.so.2"] {
        libraries.add(name)?;
    }
    for path in &libraries.found {
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        archive.file(&format!("{LIBRARIES}/{name}"), 0o755, fs::read(path)?);
    }
    archive.file("lib64/ld-linux-x86-64.so.2", 0o755, fs::read("/lib64/ld-linux-x86-64.so.2")?);

    let modules = Modules::of(kernel, siw)?;
    let order = modules.order(MODULES.split_whitespace())?;
    for name in &order {
        archive.file(&format!("usr/lib/modules/{version}/{name}.ko"), 0o644, modules.read(name)?);
    }
    archive.file("etc/modules", 0o644, order.join("\n") + "\n");
    Ok(archive)
}

const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";

fn add_program(
    archive: &mut Archive,
    libraries: &mut Libraries<'_>,
    name: &str,
    path: &Path,
) -> Result<()> {
    archive.file(&format!("usr/bin/{name}"), 0o755, fs::read(path)?);
    libraries.needed_by(path)
}

/// A second archive, which the kernel unpacks over the first: programs of this host, with the libraries
/// that they need and the first archive may not have.
pub(crate) fn programs(paths: &[(&str, &Path)]) -> Result<Vec<u8>> {
    let mut archive = Archive::default();
    // Nothing but this host's own libraries.
    let mut libraries = Libraries { root: Path::new("/"), found: BTreeSet::new() };
    for &(name, path) in paths {
        add_program(&mut archive, &mut libraries, name, path)?;
    }
    Ok(archive.pack())
}

fn find(root: &Path, places: &[&str]) -> Result<PathBuf> {
    let found = places.iter().map(|place| root.join(place)).find(|path| path.is_file());
    found.with_context(|| format!("none of {} is in Debian's packages", places.join(", ")))
}

/// Shared libraries that programs need: of the packages where they have them, else of this host, which is
/// of the same Debian.
struct Libraries<'a> {
    root: &'a Path,
    found: BTreeSet<PathBuf>,
}

impl Libraries<'_> {
    /// Adds what a program or a library needs, and what that needs in turn.
    fn needed_by(&mut self, path: &Path) -> Result<()> {
        let printed = output(Command::new("objdump").arg("-p").arg(path))?;
        let printed = String::from_utf8_lossy(&printed).into_owned();
        for line in printed.lines() {
            if let Some(name) = line.trim().strip_prefix("NEEDED") {
                self.add(name.trim())?;
            }
        }
        Ok(())
    }

    fn add(&mut self, name: &str) -> Result<()> {
        if self.found.iter().any(|path| path.ends_with(name)) {
            return Ok(());
        }
        for root in [self.root, Path::new("/")] {
            for folder in [LIBRARIES, "lib/x86_64-linux-gnu", "lib64", "usr/lib"] {
                let path = root.join(folder).join(name);
                // A link of a package may lead out of it.
                if path.is_file() {
                    self.found.insert(path.clone());
                    return self.needed_by(&path);
                }
            }
        }
        bail!("the library {name} is neither in Debian's packages nor on this host");
    }
}

/// Kernel modules by name, with `_` for `-`.
struct Modules(BTreeMap<String, PathBuf>);

impl Modules {
    fn of(kernel: &Path, siw: &Path) -> Result<Self> {
        let mut modules = BTreeMap::new();
        let mut folders = vec![kernel.to_owned()];
        while let Some(folder) = folders.pop() {
            for entry in fs::read_dir(folder)? {
                let path = entry?.path();
                if path.is_dir() {
                    folders.push(path);
                    continue;
                }
                let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
                let name = ["", ".xz", ".zst"].iter().find_map(|end| {
                    file.strip_suffix(end)?.strip_suffix(".ko").map(|name| name.replace('-', "_"))
                });
                if let Some(name) = name {
                    modules.insert(name, path);
                }
            }
        }
        // A kernel that has its own siw lets nobody set it.
        modules.insert("siw".into(), siw.to_owned());
        Ok(Self(modules))
    }

    fn read(&self, name: &str) -> Result<Vec<u8>> {
        let path = self.0.get(name).with_context(|| format!("no module {name}"))?;
        let octets = fs::read(path)?;
        let unpacked = match path.extension().and_then(|end| end.to_str()) {
            Some("xz") => filter("xz", &["-dc"], &octets),
            Some("zst") => filter("zstd", &["-dc"], &octets),
            _ => Some(octets),
        };
        unpacked.with_context(|| format!("cannot unpack {}", path.display()))
    }

    /// The modules `wanted`, each behind those that it needs. Such as are part of the kernel are left out.
    fn order<'a>(&self, wanted: impl Iterator<Item = &'a str>) -> Result<Vec<String>> {
        let mut order = Vec::new();
        for name in wanted {
            if self.0.contains_key(name) {
                self.place(name, &mut order)?;
            }
        }
        Ok(order)
    }

    fn place(&self, name: &str, order: &mut Vec<String>) -> Result<()> {
        if order.iter().any(|placed| placed == name) {
            return Ok(());
        }
        for needed in needs(&self.read(name)?) {
            self.place(&needed, order)?;
        }
        order.push(name.into());
        Ok(())
    }
}

/// The modules that a module needs, as its own description says.
fn needs(module: &[u8]) -> Vec<String> {
    let mark = b"\0depends=";
    let Some(at) = module.windows(mark.len()).position(|window| window == mark) else {
        return Vec::new();
    };
    let rest = &module[at + mark.len()..];
    let end = rest.iter().position(|&octet| octet == 0).unwrap_or(rest.len());
    let list = String::from_utf8_lossy(&rest[..end]).replace('-', "_");
    list.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect()
}

/// Whether this host has what building takes; else what is to be done.
pub(crate) fn check_host(install: bool) -> Result<()> {
    let missing = tools::missing();
    if missing.is_empty() {
        return Ok(());
    }
    if install {
        return tools::install(&missing);
    }
    bail!("this host lacks programs: apt-get install {} (or --install)", missing.join(" "));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions() {
        assert_eq!(series("6.1.0-57-amd64"), "6.1");
        assert_eq!(
            headers("6.1.0-57-amd64"),
            ["linux-headers-6.1.0-57-amd64", "linux-headers-6.1.0-57-common", "linux-kbuild-6.1"]
        );
        assert_eq!(headers("6.12.5-amd64")[2], "linux-kbuild-6.12.5");
    }

    #[test]
    fn a_module_says_what_it_needs() {
        assert_eq!(needs(b"x\0depends=ib-core,libcrc32c\0name=siw\0"), ["ib_core", "libcrc32c"]);
        assert!(needs(b"x\0depends=\0").is_empty() && needs(b"nothing").is_empty());
    }
}
