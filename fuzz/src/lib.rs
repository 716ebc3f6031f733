//! Bodies of the fuzz targets: plain functions of octets that panic where something is wrong.
//!
//! `cargo fuzz run TARGET` calls one with inputs that libFuzzer makes; the tests call all of them
//! with the corpora. An input begins with a few octets of choices, which each function's
//! description lays out, so that a seed can be written by hand.
//!
//! Under `cfg(fuzzing)` the checksums of received octets count as good, so that the fuzzer reaches
//! the code behind them. Everything here holds with and without.

mod both_ways;
mod cm;
mod connection;
mod file;
mod mad;
mod mads;
mod memory;
mod peer;
mod port;
mod qp;
mod roce;
mod start;
mod stream;

use arbitrary::Unstructured;

pub use both_ways::encode_decode;
pub use cm::roce_cm;
pub use connection::iwarp_connection;
pub use file::dissect_file;
pub use mad::cm_mad;
pub use port::roce_port;
pub use qp::roce_qp;
pub use roce::roce_packet;
pub use start::mpa_start;
pub use stream::iwarp_stream;

/// A target's body.
pub type Body = fn(&[u8]);

/// Every target by name.
pub const TARGETS: [(&str, Body); 10] = [
    ("cm_mad", cm_mad),
    ("dissect_file", dissect_file),
    ("encode_decode", encode_decode),
    ("iwarp_connection", iwarp_connection),
    ("iwarp_stream", iwarp_stream),
    ("mpa_start", mpa_start),
    ("roce_cm", roce_cm),
    ("roce_packet", roce_packet),
    ("roce_port", roce_port),
    ("roce_qp", roce_qp),
];

/// The folder of this crate, which has `corpus/TARGET/` in it.
pub const FOLDER: &str = env!("CARGO_MANIFEST_DIR");

/// Runs the committed inputs of a target, `corpus/TARGET/*`, and says how many they were. What
/// libFuzzer adds there (names of 40 hex digits) is left to it.
///
/// # Panics
///
/// Where the body does (the input's name is printed before), or without a single input.
pub fn replay(target: &str, body: Body) -> usize {
    let folder = std::path::Path::new(FOLDER).join("corpus").join(target);
    let entries = std::fs::read_dir(&folder)
        .unwrap_or_else(|e| panic!("{}: {e}", folder.display()))
        .map(|entry| entry.expect("a readable folder").path());
    let mut files: Vec<_> = entries.filter(|path| !is_found_by_libfuzzer(path)).collect();
    files.sort();
    for file in &files {
        replay_file(file, body);
    }
    assert!(!files.is_empty(), "{} has no input", folder.display());
    files.len()
}

fn is_found_by_libfuzzer(path: &std::path::Path) -> bool {
    let name = path.file_name().unwrap_or_default().as_encoded_bytes();
    name.len() == 40 && name.iter().all(u8::is_ascii_hexdigit)
}

/// Runs one file. Its name is printed if the body panics.
///
/// # Panics
///
/// Where the body does, or if the file cannot be read.
pub fn replay_file(path: &std::path::Path, body: Body) {
    struct Name<'a>(&'a std::path::Path);
    impl Drop for Name<'_> {
        fn drop(&mut self) {
            if std::thread::panicking() {
                eprintln!("the input was {}", self.0.display());
            }
        }
    }
    let octets = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    let _name = Name(path);
    body(&octets);
}

/// Makes the body of that name a program: libFuzzer's under `cfg(fuzzing)`, otherwise one that
/// runs the files named on its command line.
#[macro_export]
macro_rules! target {
    ($name:ident) => {
        #[cfg(fuzzing)]
        libfuzzer_sys::fuzz_target!(|data: &[u8]| $crate::$name(data));

        #[cfg(not(fuzzing))]
        fn main() {
            for path in std::env::args_os().skip(1) {
                $crate::replay_file(path.as_ref(), $crate::$name);
            }
        }
    };
}

/// Choices read off the front of an input. Behind its end every choice is zero.
struct Choices<'a>(Unstructured<'a>);

impl<'a> Choices<'a> {
    fn new(data: &'a [u8]) -> Self {
        Self(Unstructured::new(data))
    }

    fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// A number, little endian.
    fn any<T: arbitrary::Arbitrary<'a> + Default>(&mut self) -> T {
        self.0.arbitrary().unwrap_or_default()
    }

    /// A number below `n`, which is not 0, of one octet.
    fn below(&mut self, n: u8) -> u8 {
        self.any::<u8>() % n
    }

    fn one_of<T: Copy>(&mut self, all: &[T]) -> T {
        all[usize::from(self.any::<u8>()) % all.len()]
    }

    /// The next `len` octets, or what there is.
    fn octets(&mut self, len: usize) -> &'a [u8] {
        let len = len.min(self.0.len());
        self.0.bytes(len).unwrap_or_default()
    }

    /// All that is left.
    fn rest(self) -> &'a [u8] {
        self.0.take_rest()
    }
}

/// A seed, by its name.
#[cfg(test)]
fn seed(target: &str, name: &str) -> Vec<u8> {
    let path = std::path::Path::new(FOLDER).join("corpus").join(target).join(name);
    std::fs::read(&path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

#[cfg(test)]
mod tests {
    /// The same runs from the main workspace: `tests/tests/fuzz_corpus.rs`.
    #[test]
    fn every_corpus() {
        for (target, body) in super::TARGETS {
            let n = super::replay(target, body);
            println!("{target}: {n} inputs");
        }
    }
}
