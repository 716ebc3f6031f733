//! The bare socket, TCP or UDP, measured in the same run as userdma: what a ratio is taken against.
//!
//! Two processes, as with userdma itself. The client connects over TCP, sends a head and does its
//! part; the server does the other one:
//!
//! ```text
//!  0        4       8       12      16        20     24
//! | socket | shape | there | back  | segment | port | milliseconds     (u32 each, big endian)
//! ```
//!
//! | shape | client | server |
//! |---|---|---|
//! | 1 stream | sends, by calls of `there` octets | receives, counts by its own clock |
//! | 2 stream back | receives, counts | sends, by calls of `back` octets |
//! | 3 messages | sends messages of `there` octets, each one call | receives, counts |
//! | 4 ping-pong | `there` octets, waits for `back` | the other way; both spin |
//!
//! With TCP (socket 6) all goes over that connection, and the last two fields before the
//! milliseconds are 0. With UDP (socket 17) see [`udp`].

mod udp;

use std::{
    io::{self, ErrorKind, Read, Write},
    net::{SocketAddr, TcpListener, TcpStream},
    process::{self, ExitCode},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use hdrhistogram::Histogram;
use serde_json::json;

use crate::{
    common::Transport,
    output,
    session::{Measure, PerfOp, Reader},
};

/// Octets of the head.
const HEAD: usize = 28;
/// Octets of the server's result: octets received, nanoseconds.
const RESULT: usize = 16;
/// The receiver's buffer where messages are small.
const BIG: usize = 1 << 20;
/// Largest message taken: 16 MiB, and 16 octets of headers to each 256.
const MAX: u32 = (16 << 20) / 16 * 17 + 64;

/// Path MTU that UDP is measured at, unless told otherwise: octets of payload in a packet.
pub(crate) const MTU: u32 = 4096;

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
enum Shape {
    Stream = 1,
    StreamBack = 2,
    Messages = 3,
    PingPong = 4,
}

/// One measurement of the bare socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Bare {
    transport: Transport,
    shape: Shape,
    there: u32,
    back: u32,
    /// Octets of a datagram; 0 with TCP.
    segment: u32,
    millis: u32,
    /// Whether the latency is that of one way.
    half: bool,
}

/// Octets on the wire of a message of `payload` octets behind a DDP and RDMAP header of `header`,
/// in one FPDU: length field, header, payload, padding to 4, CRC (RFC 5044 §4.1).
const fn fpdu(header: u32, payload: u32) -> u32 {
    (2 + header + payload).next_multiple_of(4) + 4
}

/// Header octets of tagged and untagged messages (RFC 5041 §4).
const TAGGED: u32 = 14;
const UNTAGGED: u32 = 18;
/// Octets of an atomic request and an atomic response behind the header (RFC 7306 §5.2).
const ATOMIC_REQUEST: u32 = 52;
const ATOMIC_RESPONSE: u32 = 12;
/// Octets of a READ request behind the header (RFC 5040 §4.4).
const READ_REQUEST: u32 = 28;

impl Bare {
    /// The counterpart of measuring `measure` of `op` over `transport`, for `millis`. `mtu` is the
    /// RDMA path MTU, for UDP alone.
    pub(crate) fn new(
        transport: Transport,
        op: PerfOp,
        measure: Measure,
        size: u32,
        mtu: u32,
        millis: u32,
    ) -> Self {
        let (shape, there, back, segment) = match transport {
            Transport::Iwarp => tcp_shape(op, measure, size),
            Transport::Roce => udp::shape(op, measure, size, mtu),
        };
        let half = matches!(op, PerfOp::Send | PerfOp::Write);
        Self { transport, shape, there, back, segment, millis, half }
    }

    /// `port` is the client's UDP port; 0 with TCP.
    fn head(self, port: u16) -> [u8; HEAD] {
        let socket = match self.transport {
            Transport::Iwarp => IPPROTO_TCP,
            Transport::Roce => IPPROTO_UDP,
        };
        let Self { shape, there, back, segment, millis, .. } = self;
        let mut head = [0; HEAD];
        let fields = [socket, shape as u32, there, back, segment, port.into(), millis];
        for (place, field) in head.chunks_mut(4).zip(fields) {
            place.copy_from_slice(&field.to_be_bytes());
        }
        head
    }

    /// What a head says, and the client's UDP port.
    fn from_head(head: &[u8; HEAD]) -> Result<(Self, u16)> {
        let mut r = Reader(head);
        let transport = match r.u32()? {
            IPPROTO_TCP => Transport::Iwarp,
            IPPROTO_UDP => Transport::Roce,
            other => bail!("unknown socket {other}"),
        };
        let shape = r.u32()?;
        let shape = [Shape::Stream, Shape::StreamBack, Shape::Messages, Shape::PingPong]
            .into_iter()
            .find(|s| *s as u32 == shape)
            .with_context(|| format!("unknown shape {shape}"))?;
        let (there, back, segment, port) = (r.u32()?, r.u32()?, r.u32()?, r.u32()?);
        let millis = r.u32()?;
        if there > MAX || back > MAX {
            bail!("messages of {there} and {back} octets: at most {MAX}");
        }
        let Ok(port) = u16::try_from(port) else { bail!("no UDP port: {port}") };
        if transport == Transport::Roce {
            udp::check(segment, port)?;
        }
        Ok((Self { transport, shape, there, back, segment, millis, half: false }, port))
    }

    /// Measures against a bare server at `addr`: GB/s, million messages per second, or
    /// microseconds.
    pub(crate) fn measure(self, addr: SocketAddr) -> Result<f64> {
        self.client(addr).context("the measurement of the bare socket failed")
    }

    fn client(self, addr: SocketAddr) -> Result<f64> {
        let mut tcp = TcpStream::connect(addr)?;
        tcp.set_nodelay(true)?;
        if self.transport == Transport::Roce {
            return udp::client(self, tcp);
        }
        tcp.write_all(&self.head(0))?;
        let deadline = self.deadline();
        match self.shape {
            Shape::Stream | Shape::Messages => {
                write_until(&mut tcp, self.there, deadline)?;
                tcp.shutdown(std::net::Shutdown::Write)?;
                self.figure(read_result(&mut tcp)?)
            }
            Shape::StreamBack => self.figure(read_to_end(&mut tcp, self.back as usize)?),
            Shape::PingPong => {
                tcp.set_nonblocking(true)?;
                let (there, mut back) = (vec![7; self.there as usize], vec![0; self.back as usize]);
                self.round_trips(deadline, |_| {
                    spin_write(&mut tcp, &there)?;
                    if !spin_read(&mut tcp, &mut back)? {
                        bail!("the bare server closed");
                    }
                    Ok(true)
                })
            }
        }
    }

    fn serve(self, tcp: &mut TcpStream) -> Result<()> {
        match self.shape {
            Shape::Stream | Shape::Messages => {
                let room = if self.shape == Shape::Messages { BIG } else { self.there as usize };
                let received = read_to_end(tcp, room)?;
                write_result(tcp, received)?;
            }
            Shape::StreamBack => write_until(tcp, self.back, self.deadline())?,
            Shape::PingPong => {
                tcp.set_nonblocking(true)?;
                let (mut there, back) = (vec![0; self.there as usize], vec![7; self.back as usize]);
                while spin_read(tcp, &mut there)? {
                    spin_write(tcp, &back)?;
                }
            }
        }
        Ok(())
    }

    /// When the sending side is done, if it starts now.
    fn deadline(self) -> Instant {
        Instant::now() + Duration::from_millis(self.millis.into())
    }

    /// GB/s, or million messages per second, of the octets that arrived.
    fn figure(self, (octets, time): (u64, Duration)) -> Result<f64> {
        let (octets, nanos) = (octets as f64, time.as_nanos().max(1) as f64);
        Ok(match self.shape {
            Shape::Messages => octets / f64::from(self.there) / nanos * 1e3,
            _ => octets / nanos,
        })
    }

    /// The median of the rounds that `round` makes until `deadline`, in microseconds: of the one
    /// way or of both. `round` is given a number, and says whether the round may be counted.
    fn round_trips(
        self,
        deadline: Instant,
        mut round: impl FnMut(u64) -> Result<bool>,
    ) -> Result<f64> {
        let mut times = histogram()?;
        let mut last = Instant::now();
        for n in 0_u64.. {
            let counts = round(n)?;
            let now = Instant::now();
            if counts && n >= WARM_UP {
                times.saturating_record((now - last).as_nanos() as u64);
            }
            last = now;
            // Two spinning processes on a busy machine may need longer than they have.
            if now >= deadline && times.len() >= MIN_SAMPLES {
                break;
            }
            if now >= deadline + PATIENCE {
                bail!(
                    "{} round trips in {} s, a median needs {MIN_SAMPLES}: the machine is busy",
                    times.len(),
                    PATIENCE.as_secs()
                );
            }
        }
        let ways = if self.half { 2.0 } else { 1.0 };
        Ok(times.value_at_quantile(0.5) as f64 / ways / 1e3)
    }
}

/// The protocols' numbers in an IP header.
const IPPROTO_TCP: u32 = 6;
const IPPROTO_UDP: u32 = 17;

/// Shape, octets there and back; datagrams have no size.
fn tcp_shape(op: PerfOp, measure: Measure, size: u32) -> (Shape, u32, u32, u32) {
    let (shape, there, back) = match (measure, op) {
        (Measure::Bandwidth, PerfOp::Read) => (Shape::StreamBack, 0, size),
        (Measure::Bandwidth, _) => (Shape::Stream, size, 0),
        // The wire size of the message that carries the payload.
        (Measure::Rate, PerfOp::Send) => (Shape::Messages, fpdu(UNTAGGED, size), 0),
        (Measure::Rate, PerfOp::Write | PerfOp::Read) => (Shape::Messages, fpdu(TAGGED, size), 0),
        (Measure::Rate, PerfOp::Atomic) => (Shape::Messages, fpdu(UNTAGGED, ATOMIC_RESPONSE), 0),
        (Measure::Latency, PerfOp::Send | PerfOp::Write) => {
            (Shape::PingPong, size.max(1), size.max(1))
        }
        // What the program says and gets, without any headers.
        (Measure::Latency, PerfOp::Read) => (Shape::PingPong, READ_REQUEST, size.max(1)),
        (Measure::Latency, PerfOp::Atomic) => (Shape::PingPong, ATOMIC_REQUEST, ATOMIC_RESPONSE),
    };
    (shape, there, back, 0)
}

/// Rounds that are not counted: caches and the socket's buffers settle.
pub(crate) const WARM_UP: u64 = 100;

/// How long the bare socket may go on to get there.
const PATIENCE: Duration = Duration::from_secs(20);

/// Rounds that a median is taken of at least.
pub(crate) const MIN_SAMPLES: u64 = 100;

/// Nanoseconds up to a minute, to three digits.
pub(crate) fn histogram() -> Result<Histogram<u64>> {
    Ok(Histogram::new_with_bounds(1, 60_000_000_000, 3)?)
}

/// One write a message until `deadline`.
fn write_until(tcp: &mut TcpStream, len: u32, deadline: Instant) -> io::Result<()> {
    let message = vec![7; len as usize];
    // The clock is read once per 64 KiB or 16 messages, so that it costs nothing.
    let between = (65_536 / len.max(1)).clamp(1, 16);
    while Instant::now() < deadline {
        for _ in 0..between {
            tcp.write_all(&message)?;
        }
    }
    Ok(())
}

/// Reads to the end of the stream: how much, and how long it took.
fn read_to_end(tcp: &mut TcpStream, room: usize) -> io::Result<(u64, Duration)> {
    let mut buf = vec![0; room.max(1)];
    let begun = Instant::now();
    let mut octets = 0;
    loop {
        match tcp.read(&mut buf) {
            Ok(0) => return Ok((octets, begun.elapsed())),
            Ok(n) => octets += n as u64,
            Err(e) if e.kind() == ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
}

fn write_result(tcp: &mut TcpStream, (octets, time): (u64, Duration)) -> io::Result<()> {
    let mut result = octets.to_be_bytes().to_vec();
    result.extend((time.as_nanos() as u64).to_be_bytes());
    tcp.write_all(&result)
}

/// Octets received, and how long it took.
fn read_result(tcp: &mut TcpStream) -> Result<(u64, Duration)> {
    let mut result = [0; RESULT];
    tcp.read_exact(&mut result)?;
    let mut r = Reader(&result);
    Ok((r.u64()?, Duration::from_nanos(r.u64()?)))
}

/// Whether a non-blocking call is to be tried again at once.
fn again(e: &io::Error) -> bool {
    matches!(e.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted)
}

fn spin_write(tcp: &mut TcpStream, mut data: &[u8]) -> io::Result<()> {
    while !data.is_empty() {
        match tcp.write(data) {
            Ok(n) => data = &data[n..],
            Err(e) if again(&e) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(())
}

/// Fills `buf`; false at the end of the stream.
fn spin_read(tcp: &mut TcpStream, mut buf: &mut [u8]) -> io::Result<bool> {
    while !buf.is_empty() {
        match tcp.read(buf) {
            Ok(0) => return Ok(false),
            Ok(n) => buf = &mut buf[n..],
            Err(e) if again(&e) => {}
            Err(e) => return Err(e),
        }
    }
    Ok(true)
}

/// The server's process: one client after the other until stdin closes.
pub(crate) fn serve() -> Result<ExitCode> {
    let listener = TcpListener::bind("127.0.0.1:0").context("cannot listen on loopback")?;
    let addr = listener.local_addr()?;
    output::json(&json!({
        "event": "listening",
        "transport": "tcp",
        "addr": addr.ip().to_string(),
        "port": addr.port(),
    }));
    thread::spawn(|| {
        let mut buf = [0; 64];
        while matches!(io::stdin().lock().read(&mut buf), Ok(n) if n > 0) {}
        process::exit(0);
    });
    loop {
        let (mut tcp, _) = listener.accept().context("cannot accept a connection")?;
        if let Err(e) = one(&mut tcp) {
            output::note(&format!("bare server: {e:#}"));
        }
    }
}

fn one(tcp: &mut TcpStream) -> Result<()> {
    tcp.set_nodelay(true)?;
    let mut head = [0; HEAD];
    tcp.read_exact(&mut head)?;
    let (bare, port) = Bare::from_head(&head)?;
    match bare.transport {
        Transport::Iwarp => bare.serve(tcp),
        Transport::Roce => udp::serve(bare, tcp, port),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 5044 §4.1: 8 octets in a tagged FPDU take 28 on the wire.
    #[test]
    fn wire_sizes_follow_the_rule() {
        assert_eq!(fpdu(TAGGED, 8), 28);
        assert_eq!(fpdu(UNTAGGED, 8), 32);
        assert_eq!(fpdu(TAGGED, 0), 20);
        assert_eq!(fpdu(TAGGED, 1), 24);
        // The advert of rping: a TCP segment of 40 octets in iwarp_rping.pcap; its READ request 52.
        assert_eq!(fpdu(UNTAGGED, 16), 40);
        assert_eq!(fpdu(UNTAGGED, READ_REQUEST), 52);
        assert_eq!(fpdu(TAGGED, 64), 84);
    }

    const BOTH: [Transport; 2] = [Transport::Iwarp, Transport::Roce];

    #[test]
    fn heads_survive_the_way() {
        let all = [PerfOp::Send, PerfOp::Write, PerfOp::Read, PerfOp::Atomic];
        for transport in BOTH {
            for op in all {
                for measure in [Measure::Bandwidth, Measure::Latency, Measure::Rate] {
                    let bare = Bare::new(transport, op, measure, 8, MTU, 5);
                    let (read, port) = Bare::from_head(&bare.head(9)).unwrap();
                    assert_eq!(read, Bare { half: false, ..bare });
                    assert_eq!(port, 9);
                }
            }
            assert!(Bare::from_head(&[0; HEAD]).is_err());
            let bare = Bare::new(transport, PerfOp::Send, Measure::Rate, 8, MTU, 5);
            assert!(Bare::from_head(&Bare { there: MAX + 1, ..bare }.head(9)).is_err());
            assert!(Bare::from_head(&Bare { back: MAX + 1, ..bare }.head(9)).is_err());
            let mut head = bare.head(9);
            head[20] = 1;
            assert!(Bare::from_head(&head).is_err(), "a port above 65535");
        }
    }

    /// The largest message that perf takes is one that the server takes, at the smallest MTU.
    #[test]
    fn the_largest_message_is_taken() {
        for transport in BOTH {
            for measure in [Measure::Bandwidth, Measure::Latency, Measure::Rate] {
                let size = crate::session::MAX_SIZE;
                let bare = Bare::new(transport, PerfOp::Write, measure, size, 256, 5);
                assert!(Bare::from_head(&bare.head(9)).is_ok(), "{bare:?}");
            }
        }
    }

    #[test]
    fn the_histogram_keeps_what_it_is_given() {
        let mut times = histogram().unwrap();
        for nanos in [4_000, 5_000, 6_000, 1_000_000_000] {
            times.saturating_record(nanos);
        }
        assert!((4_990..=5_010).contains(&times.value_at_quantile(0.5)));
        assert!(times.max() >= 1_000_000_000);
    }

    #[test]
    fn every_shape_gives_a_figure() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap();
        let shapes = BOTH.map(|transport| {
            [
                Bare::new(transport, PerfOp::Write, Measure::Bandwidth, 65536, MTU, 20),
                Bare::new(transport, PerfOp::Read, Measure::Bandwidth, 65536, MTU, 20),
                Bare::new(transport, PerfOp::Write, Measure::Bandwidth, 1, MTU, 20),
                Bare::new(transport, PerfOp::Write, Measure::Rate, 8, MTU, 20),
                Bare::new(transport, PerfOp::Send, Measure::Rate, 0, MTU, 20),
                Bare::new(transport, PerfOp::Write, Measure::Rate, 100_001, MTU, 20),
                Bare::new(transport, PerfOp::Send, Measure::Latency, 64, MTU, 20),
                Bare::new(transport, PerfOp::Send, Measure::Latency, 0, MTU, 20),
                Bare::new(transport, PerfOp::Read, Measure::Latency, 100_001, MTU, 20),
                Bare::new(transport, PerfOp::Atomic, Measure::Latency, 8, MTU, 20),
            ]
        });
        let shapes = shapes.as_flattened().to_vec();
        let server = thread::spawn({
            let shapes = shapes.clone();
            move || {
                for _ in shapes {
                    one(&mut listener.accept().unwrap().0).unwrap();
                }
            }
        });
        for bare in shapes {
            let value = bare.measure(addr).unwrap();
            assert!(value.is_finite() && value > 0.0, "{bare:?}: {value}");
            if bare.shape == Shape::PingPong {
                // No socket answers in a tenth of a microsecond.
                assert!(value > 0.1, "{value} us");
            }
        }
        server.join().unwrap();
    }

    /// A client that goes away in the middle does not keep the server.
    #[test]
    fn the_server_goes_on_when_a_client_has_gone() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap();
        let bares = BOTH.map(|transport| {
            [
                Bare::new(transport, PerfOp::Send, Measure::Latency, 64, MTU, 600_000),
                Bare::new(transport, PerfOp::Write, Measure::Rate, 8, MTU, 600_000),
                Bare::new(transport, PerfOp::Read, Measure::Bandwidth, 65536, MTU, 600_000),
            ]
        });
        for bare in bares.as_flattened() {
            let mut client = TcpStream::connect(addr).unwrap();
            client.write_all(&bare.head(9)).unwrap();
            let mut served = listener.accept().unwrap().0;
            let server = thread::spawn(move || one(&mut served));
            if bare.transport == Transport::Roce {
                client.read_exact(&mut [0; 4]).unwrap();
            }
            drop(client);
            // That is an end like any other, or an error of the connection.
            let _ = server.join().unwrap();
        }
    }

    /// Prints what this machine's sockets do; between two threads, which makes no difference to
    /// them. With `--release -- --ignored --nocapture`.
    #[test]
    #[ignore = "takes 20 s and says something on a quiet machine alone"]
    fn figures_of_this_machine() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap();
        thread::spawn(move || {
            while let Ok((mut tcp, _)) = listener.accept() {
                one(&mut tcp).unwrap();
            }
        });
        for (op, measure, size, unit) in [
            (PerfOp::Write, Measure::Bandwidth, 1 << 20, "GB/s"),
            (PerfOp::Read, Measure::Bandwidth, 1 << 20, "GB/s"),
            (PerfOp::Send, Measure::Latency, 64, "us"),
            (PerfOp::Write, Measure::Rate, 8, "M msg/s"),
        ] {
            for transport in BOTH {
                let figures = [(); 3].map(|()| {
                    Bare::new(transport, op, measure, size, MTU, 800).measure(addr).unwrap()
                });
                let name = transport.name();
                println!("{} {size} {name}: {figures:.3?} {unit}", op.name());
                assert!(figures.iter().all(|figure| *figure > 0.0));
            }
        }
    }
}
