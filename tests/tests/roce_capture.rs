//! What a device sends and receives, as a capture that others read.

mod common;

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::Instant,
};

use common::*;
use userdma::{DeviceOptions, RecvWr, SendOp, SendWr, Wc};
use userdma_proto::dissect::{Dissector, Frame, IcrcState, Options, Roce, Version};
use userdma_tests::captures::records;

/// A file of this test alone, which goes with it.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Self {
        let file = format!("userdma-{}-{name}.pcapng", std::process::id());
        Self(std::env::temp_dir().join(file))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn capturing(file: &Scratch) -> DeviceOptions {
    let mut options = quick();
    options.roce.capture = Some(file.0.clone());
    options
}

/// The frames of a capture, each with one RoCEv2 packet.
fn frames(file: &Path, ports: &[u16]) -> Vec<Frame> {
    let roce_ports = ports.iter().copied().collect();
    let mut dissector = Dissector::new(Options { roce_ports, ..Options::default() });
    let mut frames = Vec::new();
    let records = records(file).unwrap();
    for (octets, number) in records.iter().zip(1..) {
        dissector.handle_record(&octets.record(number, usize::MAX));
        frames.extend(std::iter::from_fn(|| dissector.poll_frame()));
    }
    dissector.finish();
    frames.extend(std::iter::from_fn(|| dissector.poll_frame()));
    assert_eq!(frames.len(), records.len());
    for frame in &frames {
        assert!(frame.error.is_none() && frame.roce.len() == 1, "{frame:?}");
    }
    frames
}

/// The same, once the device has written all that it counted.
async fn all_frames(file: &Scratch, side: &Side, ports: &[u16]) -> Vec<Frame> {
    let began = Instant::now();
    loop {
        let stats = side.device.roce_stats().unwrap().port;
        let found = frames(&file.0, ports);
        if found.len() as u64 == stats.received + stats.packets_sent {
            return found;
        }
        assert!(began.elapsed() < LONG, "{} frames, {stats:?}", found.len());
        tokio::task::yield_now().await;
    }
}

fn opcode(packet: &Roce) -> &'static str {
    packet.headers.expect("headers").bth.opcode().name().expect("a known opcode")
}

/// What makes a packet the same one at both ends.
fn identity(frame: &Frame) -> String {
    format!("{:?} {:?} {:?}", frame.ends, frame.roce[0].headers, frame.len)
}

async fn some_work(a: &Side, b: &Side) {
    let (ma, mb) = (a.mr(200_000, 1), b.mr(200_000, 2));
    b.qp.post_recv(RecvWr::new(1, [mb.slice(0..10_000)])).unwrap();
    a.post(SendWr::send(2, [ma.slice(0..9_999)])).await;
    b.done(1).await;
    a.post(SendWr::write(3, [ma.slice(0..200_000)], mb.remote(0))).await;
    b.post(SendWr::read(4, [mb.slice(0..77_777)], ma.remote(0))).await;
    a.post(SendWr::fetch_add(5, ma.slice(0..8), mb.remote(0), 1)).await;
    a.post(SendWr::inline(6, SendOp::Write(mb.remote(0)), b"three")).await;
    a.post(SendWr::atomic_write(7, mb.remote(8), [7; 8])).await;
    let small = (0..64).map(|id| SendWr::inline(id, SendOp::Write(mb.remote(0)), b"!"));
    a.qp.post_send_batch(small).unwrap();
    for id in 0..64 {
        a.done(id).await;
    }
}

async fn a_capture_of_both_ends(host: &str, name: &str, max_packets: usize) {
    let files = ["here", "there"].map(|end| Scratch::new(&format!("{name}-{end}")));
    let options = files.each_ref().map(|file| {
        let mut options = capturing(file);
        options.roce.max_packets = max_packets;
        options
    });
    let (a, b) = roce_pair_with(host, options, |_| {}).await;
    some_work(&a, &b).await;
    a.qp.disconnect().await;
    b.qp.closed().await;
    let ports = [&a, &b].map(|side| side.device.udp_addr().unwrap().port());
    let mut same = BTreeMap::new();
    for ((side, file), change) in [&a, &b].into_iter().zip(&files).zip([1, -1]) {
        let mut opcodes = BTreeMap::<_, usize>::new();
        for frame in all_frames(file, side, &ports).await {
            let packet = &frame.roce[0];
            assert_eq!((packet.version, packet.icrc), (Version::V2, IcrcState::Good), "{frame:?}");
            assert!(packet.error.is_none(), "{frame:?}");
            *opcodes.entry(opcode(packet)).or_default() += 1;
            *same.entry(identity(&frame)).or_insert(0) += change;
            // Routers may mark it, but for the connection manager's.
            let ecn = if packet.mad.is_some() { 0 } else { 0b10 };
            assert_eq!(frame.ip.unwrap().ecn, ecn, "{frame:?}");
        }
        assert!(opcodes["UD_SEND_ONLY"] >= 5, "REQ, REP, RTU, DREQ, DREP: {opcodes:?}");
        // A busy machine may make some of them come twice.
        let writes = ["RC_WRITE_FIRST", "RC_WRITE_MIDDLE", "RC_WRITE_LAST"].map(|op| opcodes[op]);
        let least = [1, 200_000usize.div_ceil(4096) - 2, 1];
        assert!(writes.iter().zip(least).all(|(n, least)| *n >= least), "{opcodes:?}");
        assert!(opcodes["RC_READ_RESP_MIDDLE"] >= 17, "{opcodes:?}");
    }
    // Loopback loses nothing: what one sent the other received, in the same packets.
    assert!(same.values().all(|&count| count == 0), "{same:?}");
}

#[tokio::test]
async fn a_capture_decodes_with_every_icrc_good_on_ipv4() {
    a_capture_of_both_ends("127.0.0.1", "ipv4", 128).await;
    a_capture_of_both_ends("127.0.0.1", "ipv4-single", 1).await;
}

#[tokio::test]
async fn a_capture_decodes_with_every_icrc_good_on_ipv6() {
    if userdma_tests::ipv6() {
        a_capture_of_both_ends("[::1]", "ipv6", 128).await;
    }
}

/// A socket that is bound to all addresses: the capture has those that were really used.
#[tokio::test]
async fn a_capture_of_an_unspecified_address() {
    let file = Scratch::new("any");
    let there = capturing(&file).open("udp://0.0.0.0:0").unwrap();
    let listener = there.listen(Some(0)).await.unwrap();
    let port = there.udp_addr().unwrap().port();
    let here = toward(&there, "127.0.0.1", quick());
    let [a, b] =
        [&here, &there].map(|device| (device.alloc_pd().unwrap(), device.create_cq(64).unwrap()));
    let init = |cq| userdma::QpInit::new(cq);
    let addr = format!("127.0.0.9:{}", listener.local_addr().port());
    let accept = async { listener.accept().await.unwrap().accept(&b.0, init(&b.1), b"").await };
    let (qa, qb) = tokio::join!(here.connect(&addr, &a.0, init(&a.1), b""), accept);
    let side = |device: &userdma::Device, (pd, cq): (userdma::Pd, userdma::Cq), qp| Side {
        device: device.clone(),
        pd,
        cq,
        qp,
    };
    let (a, b) = (side(&here, a, qa.unwrap()), side(&there, b, qb.unwrap()));
    some_work(&a, &b).await;
    let peer = a.device.udp_addr().unwrap();
    for frame in all_frames(&file, &b, &[port, peer.port()]).await {
        let ends = frame.ends.unwrap();
        let pair = [ends.src.to_string(), ends.dst.to_string()];
        assert!(pair.contains(&"127.0.0.9".to_owned()) && pair.contains(&"127.0.0.1".to_owned()));
        assert_eq!(frame.roce[0].icrc, IcrcState::Good, "{frame:?}");
    }
}

/// The capture has what came out of the impairments, and says what was changed there.
#[tokio::test]
async fn a_capture_shows_what_was_changed_on_the_way() {
    let file = Scratch::new("changed");
    let mut options = capturing(&file);
    options.roce.impair = Some("corrupt=5%,loss=5%,seed=3".parse().unwrap());
    let (a, b) = roce_pair_with("127.0.0.1", [quick(), options], |_| {}).await;
    let (ma, mb) = (a.mr(1 << 20, 1), b.mr(1 << 20, 2));
    a.qp.write(ma.slice(0..1 << 20), mb.remote(0)).await.unwrap();
    assert!(octets(&ma, 0, 1 << 20) == octets(&mb, 0, 1 << 20));
    let ports = [&a, &b].map(|side| side.device.udp_addr().unwrap().port());
    let frames = all_frames(&file, &b, &ports).await;
    let stats = b.device.roce_stats().unwrap();
    // A changed BTH may have another length of headers, or an unknown opcode.
    let bad = frames.iter().filter(|frame| frame.roce[0].icrc != IcrcState::Good).count();
    assert!(bad > 0);
    assert_eq!(bad as u64, stats.port.icrc_bad, "{:?}", stats.port);
    assert_eq!(stats.port.received, stats.impaired.unwrap().delivered);
}

#[tokio::test]
async fn a_file_that_cannot_be_made_is_named() {
    let file = Scratch(PathBuf::from("/nonexistent/folder/x.pcapng"));
    let e = capturing(&file).open("udp://127.0.0.1:0").unwrap_err().to_string();
    assert!(e.contains("cannot write the capture /nonexistent/folder/x.pcapng"), "{e}");
}

/// A full disk ends the capture, and nothing else.
#[tokio::test]
async fn a_full_disk_ends_the_capture_alone() {
    let full = Path::new("/dev/full");
    if !full.exists() {
        userdma_tests::skipped("this host has no /dev/full");
        return;
    }
    let mut options = quick();
    options.roce.capture = Some(full.to_owned());
    let (a, b) = roce_pair_with("127.0.0.1", [options, quick()], |_| {}).await;
    some_work(&a, &b).await;
    assert_eq!(a.cq.poll(&mut [Wc::default()]), 0);
    let why = a.device.roce_stats().unwrap().capture_failure.expect("it is told");
    assert!(why.starts_with("/dev/full: "), "{why}");
    assert_eq!(b.device.roce_stats().unwrap().capture_failure, None);
}
