//! An archive in the format "newc" of cpio: what the kernel unpacks as its first file system.

use std::collections::BTreeMap;

/// A file of an archive.
#[derive(Clone, Debug)]
enum Entry {
    Folder,
    File { mode: u32, octets: Vec<u8> },
    Link(String),
}

/// Files by path, without a leading slash. Folders come before what is in them.
#[derive(Clone, Debug, Default)]
pub(crate) struct Archive(BTreeMap<String, Entry>);

impl Archive {
    /// A folder, with those that it is in.
    pub(crate) fn folder(&mut self, path: &str) {
        for (at, _) in path.match_indices('/') {
            self.0.entry(path[..at].into()).or_insert(Entry::Folder);
        }
        self.0.entry(path.into()).or_insert(Entry::Folder);
    }

    /// A file that can be run, or one that cannot (`mode` is 0o755 or 0o644).
    pub(crate) fn file(&mut self, path: &str, mode: u32, octets: impl Into<Vec<u8>>) {
        if let Some((folder, _)) = path.rsplit_once('/') {
            self.folder(folder);
        }
        self.0.insert(path.into(), Entry::File { mode, octets: octets.into() });
    }

    /// A symbolic link.
    pub(crate) fn link(&mut self, path: &str, to: &str) {
        self.0.insert(path.into(), Entry::Link(to.into()));
    }

    /// Regular files in it.
    pub(crate) fn files(&self) -> usize {
        self.0.values().filter(|entry| matches!(entry, Entry::File { .. })).count()
    }

    /// The archive's octets, padded to a multiple of 512: another archive may follow.
    pub(crate) fn pack(&self) -> Vec<u8> {
        let mut out = Vec::new();
        for (number, (path, entry)) in self.0.iter().enumerate() {
            let (mode, octets) = match entry {
                Entry::Folder => (0o040_755, &[][..]),
                Entry::File { mode, octets } => (0o100_000 | mode, &octets[..]),
                Entry::Link(to) => (0o120_777, to.as_bytes()),
            };
            push(&mut out, number + 1, mode, path, octets);
        }
        push(&mut out, 0, 0, "TRAILER!!!", &[]);
        out.resize(out.len().next_multiple_of(512), 0);
        out
    }
}

fn push(out: &mut Vec<u8>, number: usize, mode: u32, path: &str, octets: &[u8]) {
    let fields = [number, mode as usize, 0, 0, 1, 0, octets.len(), 0, 0, 0, 0, path.len() + 1, 0];
    out.extend_from_slice(b"070701");
    for field in fields {
        out.extend_from_slice(format!("{field:08X}").as_bytes());
    }
    out.extend_from_slice(path.as_bytes());
    out.push(0);
    out.resize(out.len().next_multiple_of(4), 0);
    out.extend_from_slice(octets);
    out.resize(out.len().next_multiple_of(4), 0);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        fs,
        io::Write,
        process::{Command, Stdio},
    };

    /// What the archive holds is what GNU cpio unpacks, where there is one.
    #[test]
    fn cpio_unpacks_it() {
        if Command::new("cpio").arg("--version").output().is_err() {
            userdma_tests::skipped("no cpio on this machine");
            return;
        }
        let mut archive = Archive::default();
        archive.file("a/b/run", 0o755, *b"#!/bin/sh\n");
        archive.file("a/odd", 0o644, *b"12345");
        archive.link("a/to", "odd");
        archive.folder("empty/deep");
        assert_eq!(archive.files(), 2);
        let dir = std::env::temp_dir().join(format!("userdma-cpio-{}", std::process::id()));
        fs::create_dir_all(&dir).unwrap();
        let mut cpio = Command::new("cpio")
            .args(["-i", "-d", "--quiet"])
            .current_dir(&dir)
            .stdin(Stdio::piped())
            .spawn()
            .unwrap();
        cpio.stdin.take().unwrap().write_all(&archive.pack()).unwrap();
        assert!(cpio.wait().unwrap().success());
        assert_eq!(fs::read(dir.join("a/b/run")).unwrap(), b"#!/bin/sh\n");
        assert_eq!(fs::read(dir.join("a/to")).unwrap(), b"12345");
        assert!(dir.join("empty/deep").is_dir());
        fs::remove_dir_all(&dir).unwrap();
    }

    #[test]
    fn it_is_a_whole_number_of_blocks() {
        let mut archive = Archive::default();
        archive.file("x", 0o644, vec![7; 1001]);
        let packed = archive.pack();
        assert_eq!(packed.len() % 512, 0);
        assert!(packed.starts_with(b"070701"));
        let name = b"TRAILER!!!\0";
        assert!(packed.windows(name.len()).any(|window| window == name));
    }
}
