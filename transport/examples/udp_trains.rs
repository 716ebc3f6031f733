//! How fast the UDP socket of a RoCE device moves octets between two threads over loopback: trains
//! from one buffer, and the same trains with their payload in registered memory.
//!
//! `cargo run --release -p userdma --example udp_trains -- [PAYLOAD [PACKETS [SECONDS]]]`
use std::{env, error::Error, net::Ipv4Addr, thread, time::Duration};

use tokio::time::{Instant, timeout_at};
use userdma::{
    Access, Mr, Qpn, Region, Sge,
    mr::Table,
    proto::mem::Scope,
    udp::{ECT_0, Piece, Route, Scratch, SendError, UdpOptions, UdpSocket},
};

/// Octets of header before and of checksum behind the payload of a WRITE MIDDLE.
const HEAD: usize = 12;
const TAIL: usize = 4;
const REGION: usize = 8 << 20;

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

fn main() -> Result<()> {
    let mut args = env::args().skip(1);
    let payload: usize = args.next().map_or(Ok(4096), |arg| arg.parse())?;
    let packets: usize = args.next().map_or(Ok(15), |arg| arg.parse())?;
    let seconds: f64 = args.next().map_or(Ok(1.0), |arg| arg.parse())?;
    for round in 1..=3 {
        let flat = measure(payload, packets, seconds, false)?;
        let parts = measure(payload, packets, seconds, true)?;
        println!(
            "{round}: {packets} x {} octets: one buffer {flat:.2} GB/s, regions {parts:.2} GB/s, \
             ratio {:.2}",
            HEAD + payload + TAIL,
            parts / flat
        );
    }
    Ok(())
}

/// GB/s that arrived.
fn measure(payload: usize, packets: usize, seconds: f64, regions: bool) -> Result<f64> {
    let bind = || UdpSocket::bind((Ipv4Addr::LOCALHOST, 0).into(), &UdpOptions::default());
    let (mut sender, mut receiver) = (bind()?, bind()?);
    let segment = HEAD + payload + TAIL;
    let back = Route { to: sender.local_addr(), from: None, tos: 0, segment: 8 };
    let there = Route { to: receiver.local_addr(), from: None, tos: ECT_0, segment };
    // A quarter of the receive buffer, one MiB at most, and two trains at least.
    let window = (receiver.recv_buffer() / 4).min(1 << 20).max(2 * segment * packets) as u64;
    let end = Instant::now() + Duration::from_secs_f64(seconds);
    let sink = thread::spawn(move || block_on(sink(&mut receiver, back, window, end)));
    block_on(source(&mut sender, there, packets, regions, window, end))?;
    let got = sink.join().expect("the sink does not panic")?;
    Ok(got as f64 / seconds / 1e9)
}

fn block_on<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(work)
}

/// Sends trains until `end`, with at most `window` octets that the peer has not told of.
async fn source(
    socket: &mut UdpSocket,
    route: Route,
    packets: usize,
    regions: bool,
    window: u64,
    end: Instant,
) -> Result<()> {
    let table = Table::new();
    let scope = Scope { pd: table.alloc_pd(), qpn: Qpn(1) };
    let region = table.register(scope.pd, Region::alloc(REGION)?, Access::empty())?;
    let buffer = vec![7; route.segment * packets];
    let (watch, mut scratch) = (socket.watch()?, Scratch::new());
    let (mut sent, mut known, mut offset) = (0, 0, 0);
    while Instant::now() < end {
        if sent + buffer.len() as u64 > known + window {
            let Ok(ready) = timeout_at(end, watch.readable()).await else { break };
            match socket.recv_batch(&mut scratch)? {
                Some(told) => known = known.max(u64::from_be_bytes(told.octets.try_into()?)),
                None => ready?.clear_ready(),
            }
            continue;
        }
        let pieces = if regions {
            in_region(&buffer, &region, &mut offset, route.segment - HEAD - TAIL, packets)
        } else {
            vec![Piece::Bytes(&buffer)]
        };
        match socket.send_train(&route, pieces.iter().copied(), 0, &table, scope) {
            Ok(n) => sent += n as u64,
            Err(SendError::WouldBlock) => watch.writable().await?.clear_ready(),
            Err(e) => return Err(e.into()),
        }
    }
    Ok(())
}

/// A train whose payload lies in the region, from `offset` on.
fn in_region<'a>(
    buffer: &'a [u8],
    region: &Mr,
    offset: &mut usize,
    payload: usize,
    packets: usize,
) -> Vec<Piece<'a>> {
    let mut pieces = Vec::with_capacity(3 * packets);
    for _ in 0..packets {
        let at = if *offset + payload > REGION { 0 } else { *offset };
        pieces.push(Piece::Bytes(&buffer[..HEAD]));
        pieces.push(Piece::Region(Sge::new(at as u64, payload as u32, region.lkey())));
        pieces.push(Piece::Bytes(&buffer[..TAIL]));
        *offset = at + payload;
    }
    pieces
}

/// Receives until `end` and tells the peer so, each quarter of the window. Returns the octets.
async fn sink(socket: &mut UdpSocket, back: Route, window: u64, end: Instant) -> Result<u64> {
    let table = Table::new();
    let scope = Scope { pd: table.alloc_pd(), qpn: Qpn(2) };
    let (watch, mut scratch) = (socket.watch()?, Scratch::new());
    let (mut told, mut got) = (0, 0);
    loop {
        let Ok(ready) = timeout_at(end, watch.readable()).await else { return Ok(got) };
        while let Some(datagram) = socket.recv_batch(&mut scratch)? {
            got += datagram.octets.len() as u64;
            if got - told >= window / 4 {
                told = got;
                let octets = got.to_be_bytes();
                let pieces = [Piece::Bytes(&octets)].into_iter();
                // One that is lost is made up for by the next.
                let _ = socket.send_train(&back, pieces, 0, &table, scope);
            }
            if Instant::now() >= end {
                return Ok(got);
            }
        }
        ready?.clear_ready();
    }
}
