//! The simulated network, seen from outside: congestion control on a shared link, and what crosses
//! it as a capture.

use std::{collections::VecDeque, net::SocketAddr, time::Duration};

use userdma_proto::{
    dissect::{Dissector, Frame, IcrcState, Layer, Options, capture::Reader},
    roce::congestion::{Dcqcn, NotificationPoint, ReactionPoint, Room, Window},
    sim::{Counters, EventQueue, Network, Packet},
    time::Instant,
    wire::{
        ids::{PKey, Psn, Qpn},
        roce::{
            Headers, ICRC_LEN,
            bth::Bth,
            cnp::Cnp,
            icrc::{Icrc, Identification, PathV4, PathV6},
            opcode::Opcode,
        },
    },
};
use zerocopy::IntoBytes;

fn host(n: u8) -> SocketAddr {
    SocketAddr::from(([10, 0, 0, n], 4791))
}

fn millis(n: u64) -> Instant {
    Instant::from_nanos(n * 1_000_000)
}

const PACKET: u64 = 4096;
/// Of the link that all share: 1 GB/s.
const RATE: u64 = 1_000_000_000;

/// What a sender's octets of the second half amount to, and what the shared link saw.
struct Shared {
    octets: Vec<u64>,
    halftime: Counters,
    end: Counters,
    cnps: u64,
}

/// `starts` says when each sender begins to send as fast as it may, up to 2 GB/s, through one link to
/// one receiver, for `end`.
fn share_a_link(starts: &[Instant], end: Instant, dcqcn: Option<Dcqcn>) -> Shared {
    #[derive(Debug)]
    enum Step {
        Send(usize),
        Halftime,
    }
    let receiver = host(100);
    let senders: Vec<SocketAddr> = (1..).take(starts.len()).map(host).collect();
    let mut network: Network<()> = Network::new("delay=5us".parse().unwrap());
    let bottleneck = "rate=1GB,queue=1MB,mark=20kB/200kB/10%,delay=5us,seed=1".parse().unwrap();
    let bottleneck = network.add_link(bottleneck);
    senders.iter().for_each(|&sender| network.route(sender, receiver, &[bottleneck]));

    // Where there is no congestion control nobody listens to the notifications.
    let mut points: Vec<Option<ReactionPoint>> =
        starts.iter().map(|_| dcqcn.map(|config| ReactionPoint::new(config).unwrap())).collect();
    let mut notify: Vec<NotificationPoint> = vec![NotificationPoint::default(); starts.len()];
    let mut octets = vec![0; starts.len()];
    let mut halftime = Counters::default();
    let middle = Instant::from_nanos(end.as_nanos() / 2);

    let mut events = EventQueue::new(Instant::ZERO);
    (0..).zip(starts).for_each(|(i, &start)| events.at(start, Step::Send(i)));
    events.at(middle, Step::Halftime);
    while let Some(now) = events.peek().into_iter().chain(network.poll_timeout()).min()
        && now <= end
    {
        match events.next_until(now) {
            Some((_, Step::Halftime)) => halftime = *network.link(bottleneck).1,
            Some((_, Step::Send(i))) => {
                let may = points[i].as_mut().map_or(Ok(()), |point| point.may_send(now, PACKET));
                if let Err(at) = may {
                    events.at(at, Step::Send(i));
                    continue;
                }
                let packet = Packet::new(vec![i as u8; PACKET as usize]).with_ecn(2);
                network.send(now, senders[i], receiver, packet);
                if let Some(point) = &mut points[i] {
                    point.on_sent(now, PACKET);
                }
                // Its own wire: 2 GB/s.
                events.after(Duration::from_nanos(PACKET / 2), Step::Send(i));
            }
            None => {}
        }
        while let Some(delivery) = network.poll(now) {
            if delivery.to != receiver {
                let i = senders.iter().position(|&sender| sender == delivery.to).unwrap();
                if let Some(point) = &mut points[i] {
                    point.on_cnp(now);
                }
                continue;
            }
            let i = usize::from(delivery.packet.octets[0]);
            if now >= middle {
                octets[i] += PACKET;
            }
            if delivery.packet.ecn == 3 && notify[i].on_marked(now) {
                let cnp = Cnp::new(PKey(0xffff), Qpn(i as u32)).as_bytes().to_vec();
                network.send(now, receiver, senders[i], Packet::new(cnp));
            }
        }
    }
    let cnps = notify.iter().map(NotificationPoint::cnps).sum();
    Shared { octets, halftime, end: *network.link(bottleneck).1, cnps }
}

#[test]
fn two_senders_share_a_link_fairly_and_lose_nothing() {
    for starts in [[millis(0), millis(0)], [millis(0), millis(20)]] {
        let run = share_a_link(&starts, millis(200), Some(Dcqcn::default()));
        let total: u64 = run.octets.iter().sum();
        // 100 ms at 1 GB/s.
        let possible = RATE / 10;
        assert!(total > possible / 10 * 9, "{total} of {possible} used");
        for &octets in &run.octets {
            let percent = octets * 100 / total;
            assert!((42..=58).contains(&percent), "{:?} from {starts:?}", run.octets);
        }
        assert!(run.cnps > 10 && run.end.marked > 10);
        assert_eq!(run.end.dropped(), 0);
        assert!(run.end.longest_queue < 600_000, "{}", run.end.longest_queue);
    }
}

#[test]
fn without_congestion_control_the_link_loses() {
    let run = share_a_link(&[millis(0), millis(0)], millis(20), None);
    assert!(run.halftime.queue_full > 1000 && run.end.queue_full > run.halftime.queue_full);
    assert!(run.end.longest_queue > 990_000);
}

/// Six queue pairs send trains to one socket whose buffer takes 425,984 octets, and which is read at
/// 1 GB/s. Gives what was lost, and the trains of each that arrived.
fn fill_a_buffer(room: Option<Room>) -> (u64, Vec<u64>) {
    const RCVBUF: u64 = 425_984;
    const TRAIN: u64 = 65_507;
    let (from, to) = (host(1), host(2));
    let mut network: Network<usize> = Network::new("delay=20us".parse().unwrap());
    let buffer = network.add_link(format!("rate=1GB,queue={RCVBUF}B").parse().unwrap());
    network.route(from, to, &[buffer]);
    let mut window = room.map(Window::new);
    let mut arrived = vec![0; 6];
    let mut turns: VecDeque<usize> = (0..6).collect();
    let mut now = Instant::ZERO;
    let mut sent = 0;
    let mut send = |network: &mut Network<usize>, now, qp| {
        network.send(now, from, to, Packet::with_meta(vec![0; TRAIN as usize], qp));
        sent += 1;
        sent >= 3_000
    };
    loop {
        let done = match &mut window {
            // A train each microsecond, whoever's turn it is.
            None => {
                turns.rotate_left(1);
                send(&mut network, now, turns[0])
            }
            Some(window) => {
                let mut done = false;
                for qp in 0..6 {
                    if window.next().is_none() && window.take(qp, TRAIN) {
                        done |= send(&mut network, now, qp);
                    }
                }
                while let Some(qp) = window.next() {
                    assert!(window.take(qp, TRAIN), "it is its turn");
                    done |= send(&mut network, now, qp);
                }
                done
            }
        };
        while let Some(delivery) = network.poll(now) {
            // To the receiver, and back as an acknowledgement.
            if delivery.to == to {
                arrived[delivery.packet.meta] += 1;
                network.send(now, to, from, Packet::with_meta(vec![0; 20], delivery.packet.meta));
            } else if let Some(window) = &mut window {
                window.release(delivery.packet.meta, TRAIN);
            }
        }
        if done {
            return (network.link(buffer).1.queue_full, arrived);
        }
        now = now + Duration::from_micros(1);
    }
}

#[test]
fn a_window_keeps_the_buffer_from_overflowing() {
    let (lost, _) = fill_a_buffer(None);
    assert!(lost > 1000, "{lost}");
    let (lost, arrived) = fill_a_buffer(Some(Room::trains(425_984, 65_507)));
    assert_eq!(lost, 0);
    let (most, least) = (arrived.iter().max().unwrap(), arrived.iter().min().unwrap());
    assert!(most - least <= 1 && *least > 400, "{arrived:?}");
}

/// A SEND with its ICRC, as packet `i` of a train.
fn send_only(from: SocketAddr, to: SocketAddr, i: u16, payload: &[u8]) -> Vec<u8> {
    let bth = Bth::new(Opcode::RC_SEND_ONLY, PKey(0xffff), Qpn(0x12), Psn::new(i.into()));
    let mut headers = Headers::new(bth);
    let mut octets = Vec::new();
    headers.emit_packet(payload, &mut octets);
    let len = octets.len() + ICRC_LEN;
    let (src_port, dst_port) = (from.port(), to.port());
    let mut icrc = match (from, to) {
        (SocketAddr::V4(from), SocketAddr::V4(to)) => {
            let path = PathV4 { src: *from.ip(), dst: *to.ip(), src_port, dst_port };
            let id = Identification { identification: i, dont_fragment: true };
            Icrc::socket_v4(&path, id, len, &headers.bth)
        }
        (SocketAddr::V6(from), SocketAddr::V6(to)) => {
            let path = PathV6 { src: *from.ip(), dst: *to.ip(), src_port, dst_port };
            Icrc::socket_v6(&path, len, &headers.bth)
        }
        _ => unreachable!("both of one family"),
    };
    icrc.update(&octets[Bth::LEN..]);
    octets.extend_from_slice(&icrc.finish());
    octets
}

fn dissected(capture: &[u8]) -> Vec<Frame> {
    let mut reader = Reader::new(capture).expect("a capture");
    let mut dissector = Dissector::new(Options::default());
    let mut frames = Vec::new();
    while let Some(record) = reader.next_record().expect("whole") {
        dissector.handle_record(&record);
        frames.extend(std::iter::from_fn(|| dissector.poll_frame()));
    }
    dissector.finish();
    frames.extend(std::iter::from_fn(|| dissector.poll_frame()));
    frames
}

/// With `USERDMA_KEEP=FOLDER` the captures stay there, for Wireshark.
#[test]
fn a_run_is_a_capture_that_dissect_reads() {
    let v6 = |n: u16| SocketAddr::from(([0xfd00, 0, 0, 0, 0, 0, 0, n], 4791));
    for (name, from, to) in [("v4", host(1), host(2)), ("v6", v6(1), v6(2))] {
        let text = "delay=1ms,loss=10%,corrupt=10%,dup=10%,ecn=20%,reorder=10%,seed=4";
        let mut network: Network<()> = Network::new(text.parse().unwrap());
        network.record("userdma tests");
        for i in 0..200u16 {
            let octets = send_only(from, to, i, &[i as u8; 50]);
            let packet = Packet::new(octets).with_identification(i).with_ecn(2);
            network.send(Instant::from_nanos(u64::from(i) * 10_000), from, to, packet);
        }
        let mut damaged = 0;
        while let Some(due) = network.poll_timeout() {
            while let Some(delivery) = network.poll(due) {
                damaged += usize::from(delivery.packet.damaged);
            }
        }
        let counters = network.counters();
        let capture = network.capture().expect("it was recorded").octets().to_vec();
        if let Some(folder) = std::env::var_os("USERDMA_KEEP") {
            let path = std::path::Path::new(&folder).join(format!("sim-{name}.pcapng"));
            std::fs::write(path, &capture).expect("the folder can be written to");
        }
        let frames = dissected(&capture);
        assert_eq!(frames.len() as u64, 200 + counters.delivered);
        let ip = if name == "v4" { Layer::Ipv4 } else { Layer::Ipv6 };
        let (mut bad, mut marked) = (0, 0);
        for frame in &frames {
            assert_eq!((frame.stack[0], frame.error.as_deref()), (ip, None));
            let ends = frame.ends.expect("UDP has ends");
            assert_eq!((ends.src, ends.dst, ends.ports), (from.ip(), to.ip(), Some((4791, 4791))));
            let [roce] = &*frame.roce else { panic!("one packet a datagram") };
            bad += usize::from(roce.icrc == IcrcState::Bad);
            marked += u64::from(frame.ip.expect("IP").ecn == 3);
        }
        // Corruption shows in the ICRC, but for the bits of octet 4 (FECN, BECN) that it leaves out.
        assert!(bad <= damaged && bad + 1 >= damaged && bad > 5, "{bad} of {damaged}");
        assert!(marked >= counters.marked && marked > 10);
        assert!(frames.is_sorted_by_key(|frame| frame.time_ns));
        assert!(counters.lost > 0 && counters.duplicated > 0 && counters.reordered > 0);
    }
}

/// The same calls, the same capture, octet by octet.
#[test]
fn a_run_can_be_made_again() {
    let run = |seed: u64| {
        let text =
            format!("loss=5%,burst=1%/30%,dup=5%,reorder=5%,corrupt=5%,jitter=1ms,seed={seed}");
        let mut network: Network<()> = Network::new(text.parse().unwrap());
        network.record("userdma tests");
        for i in 0..500u16 {
            let (from, to) = if i % 3 == 0 { (host(1), host(2)) } else { (host(2), host(1)) };
            network.send(
                Instant::from_nanos(u64::from(i) * 7_000),
                from,
                to,
                Packet::new(vec![7; 64]),
            );
            while network.poll(Instant::from_nanos(u64::from(i) * 7_000)).is_some() {}
        }
        while network.poll(millis(1000)).is_some() {}
        (network.counters(), network.capture().expect("recorded").octets().to_vec())
    };
    assert_eq!(run(1), run(1));
    assert_ne!(run(1), run(2));
}
