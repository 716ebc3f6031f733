//! How two `userdma` commands know each other, and what they say to each other beside the data.
//!
//! The private data of a connection request of our own modes, big endian:
//!
//! ```text
//!  0       4         5      6            14
//! | "UDMA" | version | mode | seed (u64) | parameters of the mode
//! ```
//!
//! | mode | parameters |
//! |---|---|
//! | 1 demo | size u32, count u32 |
//! | 2 perf | operation u8, measure u8, size u32, longest run in milliseconds u32 |
//!
//! | answer | private data |
//! |---|---|
//! | accepted | `UDMA`, version, mode |
//! | version or mode unknown | rejected with `UDMA`, the highest version known, 0xff |
//! | parameters refused, or no room | rejected with `UDMA`, version, mode, and why (UTF-8) |
//!
//! A client of another kind that there is no room for is rejected with why alone.
//!
//! A connection manager may pad private data with zeros, so only what is known to be there is
//! read. Private data that does not begin with `UDMA` is somebody else's, and no error.
//!
//! A client speaks first (an iWARP responder may not), and posts nothing before it has found the
//! acceptance.

use std::fmt;

use anyhow::{Result, anyhow, bail};
use userdma::{Error, Qp, proto::wire::mad::cm::Reason};

/// First octets of private data and of the answer.
pub(crate) const MAGIC: [u8; 4] = *b"UDMA";
/// The version spoken here.
pub(crate) const VERSION: u8 = 1;
/// In the place of a mode: the version or the mode is unknown.
pub(crate) const UNKNOWN: u8 = 0xff;

/// Largest message of demo and perf, in octets.
pub(crate) const MAX_SIZE: u32 = 16 << 20;
/// Most messages of one operation of the demo, in each direction.
pub(crate) const MAX_COUNT: u32 = 1_000_000;
/// Longest measurement, in milliseconds.
pub(crate) const MAX_MILLIS: u32 = 600_000;

/// The operations perf measures.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
#[repr(u8)]
pub(crate) enum PerfOp {
    /// SEND.
    Send = 1,
    /// RDMA WRITE.
    Write = 2,
    /// RDMA READ.
    Read = 3,
    /// FetchAdd.
    Atomic = 4,
}

/// What perf measures about them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Measure {
    /// Octets per second.
    Bandwidth = 1,
    /// Time of one message.
    Latency = 2,
    /// Messages per second.
    Rate = 3,
}

impl PerfOp {
    /// As on the command line.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Send => "send",
            Self::Write => "write",
            Self::Read => "read",
            Self::Atomic => "atomic",
        }
    }
}

impl Measure {
    /// As on the command line.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Bandwidth => "bw",
            Self::Latency => "lat",
            Self::Rate => "rate",
        }
    }
}

/// What a client asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// All operations, verified.
    Demo {
        /// Octets a message.
        size: u32,
        /// Messages of each operation in each direction.
        count: u32,
    },
    /// One measurement.
    Perf {
        /// Of what.
        op: PerfOp,
        /// Which figure.
        measure: Measure,
        /// Octets a message.
        size: u32,
        /// How long it may take, in milliseconds.
        millis: u32,
    },
}

impl Mode {
    /// Its number on the wire.
    pub(crate) const fn code(self) -> u8 {
        match self {
            Self::Demo { .. } => 1,
            Self::Perf { .. } => 2,
        }
    }

    /// Its name in output.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Demo { .. } => "demo",
            Self::Perf { .. } => "perf",
        }
    }
}

/// The private data of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    /// What is asked for.
    pub(crate) mode: Mode,
    /// Seeds all content.
    pub(crate) seed: u64,
}

/// What a request's private data turned out to be.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Asked {
    /// Not one of ours: whatever the service of the port is.
    Stranger,
    /// One of ours, understood.
    Known(Hello),
    /// One of ours that this version cannot serve; the private data of the rejection, and why.
    Refused(Vec<u8>, String),
}

impl Hello {
    /// As it is sent.
    pub(crate) fn to_bytes(self) -> Vec<u8> {
        let mut b = MAGIC.to_vec();
        b.extend([VERSION, self.mode.code()]);
        b.extend(self.seed.to_be_bytes());
        match self.mode {
            Mode::Demo { size, count } => {
                b.extend(size.to_be_bytes());
                b.extend(count.to_be_bytes());
            }
            Mode::Perf { op, measure, size, millis } => {
                b.extend([op as u8, measure as u8]);
                b.extend(size.to_be_bytes());
                b.extend(millis.to_be_bytes());
            }
        }
        b
    }

    /// As it arrives.
    pub(crate) fn read(private_data: &[u8]) -> Asked {
        if !private_data.starts_with(&MAGIC) {
            return Asked::Stranger;
        }
        let mut r = Reader(&private_data[MAGIC.len()..]);
        let (Ok(version), Ok(mode)) = (r.u8(), r.u8()) else {
            return unknown("a request of userdma without version and mode".into());
        };
        if version != VERSION {
            return unknown(format!("session version {version} is unknown"));
        }
        let parsed = (|| {
            let seed = r.u64()?;
            let mode = match mode {
                1 => Mode::Demo { size: r.u32()?, count: r.u32()? },
                2 => {
                    let (op, measure) = (r.u8()?, r.u8()?);
                    Mode::Perf {
                        op: perf_op(op)?,
                        measure: measure_of(measure)?,
                        size: r.u32()?,
                        millis: r.u32()?,
                    }
                }
                _ => return Ok(None),
            };
            check(mode)?;
            anyhow::Ok(Some(Self { mode, seed }))
        })();
        match parsed {
            Ok(Some(hello)) => Asked::Known(hello),
            Ok(None) => unknown(format!("mode {mode} is unknown")),
            Err(e) => {
                let why = format!("{e:#}");
                Asked::Refused(refusal(mode, &why), why)
            }
        }
    }

    /// The private data of the acceptance.
    pub(crate) fn acceptance(self) -> Vec<u8> {
        let mut b = MAGIC.to_vec();
        b.extend([VERSION, self.mode.code()]);
        b
    }

    /// Whether the peer's answer accepts this. An error says what the peer is.
    pub(crate) fn check_acceptance(self, answer: &[u8]) -> Result<()> {
        if answer.starts_with(&self.acceptance()) {
            return Ok(());
        }
        if answer.starts_with(&MAGIC) {
            bail!(
                "the peer accepted as userdma, but another version or mode: update the older one"
            );
        }
        bail!("the peer took the connection, but it is no userdma: is a `userdma serve` there?")
    }

    /// The error of a failed connection, in the words of the session if the peer rejected with
    /// them.
    pub(crate) fn explain(self, error: anyhow::Error) -> anyhow::Error {
        let error = match nobody(error, "`userdma serve`") {
            Ok(explained) => return explained,
            Err(error) => error,
        };
        let Some(private_data) = error.downcast_ref::<Error>().and_then(Error::rejection) else {
            return ask(error, "`userdma serve`");
        };
        let Some(rest) = private_data.strip_prefix(&MAGIC) else {
            let what = match text(private_data) {
                Some(text) => format!("the peer is no userdma, it says: {text}"),
                None => "the peer is no userdma".into(),
            };
            return error.context(what);
        };
        let text = match rest {
            [known, UNKNOWN, ..] if *known != VERSION => format!(
                "the peer is a userdma that knows session versions up to {known}; this one speaks {VERSION}"
            ),
            [_, UNKNOWN, ..] => format!(
                "the peer is a userdma of session version {VERSION} that does not know the mode {}",
                self.mode.name()
            ),
            [_, _, why @ ..] => {
                let end = why.iter().position(|&b| b == 0).unwrap_or(why.len());
                format!("the peer refused: {}", String::from_utf8_lossy(&why[..end]))
            }
            _ => return error,
        };
        error.context(text)
    }
}

/// What an rping client looks for.
const RPING: &str = "`userdma serve` or `rping -s`";

/// The error of a failed connection to an rping server, with what the server said if it rejected
/// with a text.
pub(crate) fn explain_rping(error: anyhow::Error) -> anyhow::Error {
    let error = match nobody(error, RPING) {
        Ok(explained) => return explained,
        Err(error) => error,
    };
    let said = match error.downcast_ref::<Error>().and_then(Error::rejection) {
        Some(private_data) => text(private_data),
        None => return ask(error, RPING),
    };
    match said {
        Some(said) => error.context(format!("the peer refused: {said}")),
        None => error,
    }
}

/// The error of a connection that the peer's connection manager rejected because no program listens
/// at that rdma_cm port: explained. Another error comes back as it is.
fn nobody(error: anyhow::Error, service: &str) -> Result<anyhow::Error, anyhow::Error> {
    match error.downcast_ref::<Error>() {
        Some(Error::Rejected { peer, source }) if source.reason == Reason::INVALID_SERVICE_ID => {
            let text = format!(
                "nothing listens at port {} of {}: is {service} running there, with this port?",
                peer.port(),
                peer.ip()
            );
            Ok(error.context(text))
        }
        _ => Err(error),
    }
}

/// Where something listens that does not speak as it should: whether the right `service` is there.
fn ask(error: anyhow::Error, service: &str) -> anyhow::Error {
    match error.downcast_ref::<Error>() {
        Some(Error::Startup { .. } | Error::Rejected { .. } | Error::NoAnswer { .. }) => {
            anyhow!("{}; is {service} running there?", crate::chain(&error))
        }
        _ => error,
    }
}

/// Private data that is a text to be shown, without what a connection manager padded.
fn text(private_data: &[u8]) -> Option<String> {
    let end = private_data.iter().rposition(|&b| b != 0)? + 1;
    let text = str::from_utf8(&private_data[..end]).ok()?;
    (!text.chars().any(char::is_control)).then(|| text.to_owned())
}

/// The error of a client whose peer turned out not to be a userdma; the connection is given up
/// before anything was posted.
pub(crate) fn confirm(hello: Hello, qp: &Qp) -> Result<()> {
    hello.check_acceptance(&qp.private_data()).inspect_err(|_| qp.abort())
}

/// The private data of a rejection for the reason `why`.
pub(crate) fn refusal(mode: u8, why: &str) -> Vec<u8> {
    let mut answer = MAGIC.to_vec();
    answer.extend([VERSION, mode]);
    answer.extend(short(why).bytes());
    answer
}

/// As much of a reason as any connection manager's rejection has room for (RoCE: 148 octets).
pub(crate) fn short(why: &str) -> &str {
    let mut end = why.len().min(120);
    while !why.is_char_boundary(end) {
        end -= 1;
    }
    &why[..end]
}

/// The rejection for what cannot be known.
fn unknown(why: String) -> Asked {
    let mut answer = MAGIC.to_vec();
    answer.extend([VERSION, UNKNOWN]);
    Asked::Refused(answer, why)
}

fn perf_op(code: u8) -> Result<PerfOp> {
    [PerfOp::Send, PerfOp::Write, PerfOp::Read, PerfOp::Atomic]
        .into_iter()
        .find(|op| *op as u8 == code)
        .ok_or_else(|| anyhow!("operation {code} is unknown"))
}

fn measure_of(code: u8) -> Result<Measure> {
    [Measure::Bandwidth, Measure::Latency, Measure::Rate]
        .into_iter()
        .find(|m| *m as u8 == code)
        .ok_or_else(|| anyhow!("measure {code} is unknown"))
}

/// Whether the parameters are within the limits; the same check on both sides.
pub(crate) fn check(mode: Mode) -> Result<()> {
    let (Mode::Demo { size, .. } | Mode::Perf { size, .. }) = mode;
    if size > MAX_SIZE {
        bail!("a size of {size} octets is too large: at most {MAX_SIZE}");
    }
    match mode {
        Mode::Demo { count, .. } if count == 0 || count > MAX_COUNT => {
            bail!("a count of {count} is out of range: 1 to {MAX_COUNT}")
        }
        Mode::Perf { millis, .. } if millis == 0 || millis > MAX_MILLIS => {
            bail!("a duration of {millis} ms is out of range: 1 to {MAX_MILLIS}")
        }
        Mode::Perf { op: PerfOp::Atomic, measure: Measure::Bandwidth, .. } => {
            bail!("atomics move 8 octets each, their bandwidth says nothing: use --lat or --rate")
        }
        Mode::Perf { op: PerfOp::Atomic, size, .. } if size != 8 => {
            bail!("atomics work on 8 octets: --size 8")
        }
        Mode::Perf { measure: Measure::Bandwidth, size: 0, .. } => {
            bail!("messages of no octets have no bandwidth: --size 1 or more")
        }
        Mode::Perf { op: PerfOp::Write, measure: Measure::Latency, size: 0, .. } => {
            bail!("the latency of a WRITE is seen at its last octet: --size 1 or more")
        }
        Mode::Demo { .. } | Mode::Perf { .. } => Ok(()),
    }
}

/// Takes big-endian numbers from the front.
pub(crate) struct Reader<'a>(pub(crate) &'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N]> {
        let (head, rest) = self.0.split_first_chunk::<N>().ok_or_else(|| {
            anyhow!("the message is cut short: {N} octets needed, {} there", self.0.len())
        })?;
        self.0 = rest;
        Ok(*head)
    }

    /// One octet.
    pub(crate) fn u8(&mut self) -> Result<u8> {
        Ok(u8::from_be_bytes(self.take()?))
    }

    /// Four octets.
    pub(crate) fn u32(&mut self) -> Result<u32> {
        Ok(u32::from_be_bytes(self.take()?))
    }

    /// Eight octets.
    pub(crate) fn u64(&mut self) -> Result<u64> {
        Ok(u64::from_be_bytes(self.take()?))
    }
}

/// A seed that differs from run to run.
pub(crate) fn fresh_seed() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::process::id())
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Demo { size, count } => write!(f, "demo, {count} messages of {size} octets"),
            Self::Perf { op, measure, size, .. } => {
                write!(f, "perf {} {} of {size} octets", op.name(), measure.name())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use userdma::StartupError;

    const DEMO: Hello =
        Hello { mode: Mode::Demo { size: 65536, count: 64 }, seed: 0x0102_0304_0506_0708 };
    const PERF: Hello = Hello {
        mode: Mode::Perf { op: PerfOp::Read, measure: Measure::Latency, size: 64, millis: 1000 },
        seed: 1,
    };

    #[test]
    fn the_bytes_of_a_demo_request() {
        assert_eq!(
            DEMO.to_bytes(),
            b"UDMA\x01\x01\x01\x02\x03\x04\x05\x06\x07\x08\x00\x01\x00\x00\x00\x00\x00\x40"
        );
        assert_eq!(DEMO.acceptance(), b"UDMA\x01\x01");
    }

    #[test]
    fn requests_survive_padding_and_cuts_are_refused() {
        for hello in [DEMO, PERF] {
            let mut bytes = hello.to_bytes();
            assert!(bytes.len() <= 44, "leaves room in a CM REQ");
            assert_eq!(Hello::read(&bytes), Asked::Known(hello));
            for cut in 4..bytes.len() {
                assert!(matches!(Hello::read(&bytes[..cut]), Asked::Refused(..)), "{cut}");
            }
            for cut in 0..4 {
                assert_eq!(Hello::read(&bytes[..cut]), Asked::Stranger);
            }
            bytes.resize(56, 0);
            assert_eq!(Hello::read(&bytes), Asked::Known(hello));
        }
    }

    #[test]
    fn unknown_versions_and_modes_are_rejected_with_what_is_known() {
        let mut version = DEMO.to_bytes();
        version[4] = 9;
        let mut mode = DEMO.to_bytes();
        mode[5] = 77;
        for bytes in [version, mode] {
            let Asked::Refused(answer, why) = Hello::read(&bytes) else { panic!() };
            assert_eq!(answer, b"UDMA\x01\xff");
            assert!(why.contains("unknown"));
        }
    }

    #[test]
    fn parameters_out_of_range_are_refused_with_the_reason() {
        let too_large = Mode::Demo { size: MAX_SIZE + 1, count: 1 };
        let Asked::Refused(answer, why) =
            Hello::read(&Hello { mode: too_large, ..DEMO }.to_bytes())
        else {
            panic!()
        };
        assert!(answer.starts_with(b"UDMA\x01\x01a size of"), "{answer:?}");
        assert!(why.contains("too large"));
        assert!(check(Mode::Demo { size: 0, count: 0 }).is_err());
        assert!(check(Mode::Demo { size: 0, count: 1 }).is_ok());
        let perf = |op, measure, size| check(Mode::Perf { op, measure, size, millis: 1 });
        assert!(perf(PerfOp::Atomic, Measure::Bandwidth, 8).is_err());
        assert!(perf(PerfOp::Atomic, Measure::Rate, 8).is_ok());
        assert!(perf(PerfOp::Atomic, Measure::Rate, 16).is_err());
        assert!(perf(PerfOp::Write, Measure::Latency, 0).is_err());
        assert!(perf(PerfOp::Send, Measure::Latency, 0).is_ok());
    }

    #[test]
    fn an_acceptance_is_found_under_padding_and_missed_where_it_is_not() {
        assert!(DEMO.check_acceptance(b"UDMA\x01\x01\0\0\0\0").is_ok());
        for answer in [b"".as_slice(), b"hello", b"UDM", b"UDMA\x01\x02", b"UDMA\x02\x01"] {
            assert!(DEMO.check_acceptance(answer).is_err(), "{answer:?}");
        }
        let error = DEMO.check_acceptance(b"").unwrap_err().to_string();
        assert!(error.contains("no userdma"), "{error}");
    }

    #[test]
    fn only_printable_private_data_is_a_text() {
        assert_eq!(text(b"too busy\0\0").as_deref(), Some("too busy"));
        assert_eq!(text("größer".as_bytes()).as_deref(), Some("größer"));
        for data in [&b""[..], b"\0\0", b"\x1b[2J", b"a\0b", b"\xff\xfe"] {
            assert_eq!(text(data), None, "{data:?}");
        }
    }

    #[test]
    fn reasons_are_cut_between_characters() {
        let long = "ü".repeat(100);
        assert_eq!(short(&format!("x{long}")).len(), 119);
        assert_eq!(short("too many"), "too many");
    }

    #[test]
    fn rejections_are_explained() {
        let rejected = |private_data: &[u8]| {
            let source = StartupError::Rejected {
                private_data: private_data.to_vec(),
                ird: None,
                ord: None,
            };
            let peer = "127.0.0.1:1".parse().unwrap();
            DEMO.explain(Error::Startup { peer, source }.into()).to_string()
        };
        assert!(rejected(b"UDMA\x03\xff\0\0").contains("versions up to 3"));
        assert!(rejected(b"UDMA\x01\xff").contains("does not know the mode demo"));
        assert_eq!(rejected(b"UDMA\x01\x01too busy\0\0"), "the peer refused: too busy");
        assert!(rejected(b"go away\0\0").contains("no userdma, it says: go away"));
        assert!(rejected(b"").contains("no userdma"));
    }
}
