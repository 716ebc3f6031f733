//! Damaged captures: every shipped one, cut and with a bit turned at 1,000 seeded places each, and
//! with its frames dropped, repeated, swapped, cut and overwritten. Nothing panics, nothing hangs,
//! each record gives one frame, in order; and a packet whose ICRC is good is the one that was sent.

use std::{
    collections::HashMap,
    io::Read,
    path::Path,
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::Duration,
};

use userdma_proto::{
    dissect::{
        Dissector, Frame, IcrcState, Options,
        capture::{Reader, Record},
    },
    wire::roce::Headers,
};
use userdma_tests::Rng;

/// Places at which each capture is cut, turned, or otherwise damaged.
const PLACES: u64 = 1000;
/// Up to here a capture is read as a whole each time; of a longer one the start and what is around
/// the place.
const WHOLE: usize = 8 << 10;
/// Records of a longer one that are kept: at its start, and before and behind the damaged one.
const START: usize = 5;
const AROUND: usize = 5;
/// No single run takes longer, on a slow machine that does something else too.
const PATIENCE: Duration = Duration::from_secs(60);

/// A shipped capture.
struct Shipped {
    name: String,
    octets: Vec<u8>,
}

/// All of them; what is gzip'd stands here twice, as it is and unpacked.
fn shipped() -> Vec<Shipped> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../pcaps");
    let mut all = Vec::new();
    for entry in std::fs::read_dir(folder).expect("pcaps/ is there") {
        let path = entry.expect("pcaps/ can be read").path();
        let name = path.file_name().expect("it has a name").to_string_lossy().into_owned();
        if !name.contains(".pcap") || name.ends_with(".json") {
            continue;
        }
        let octets = std::fs::read(&path).expect("it can be read");
        if name.ends_with(".gz") {
            let mut unpacked = Vec::new();
            let mut reader = flate2::read::GzDecoder::new(octets.as_slice());
            reader.read_to_end(&mut unpacked).expect("it is gzip");
            all.push(Shipped { name: name.trim_end_matches(".gz").to_owned(), octets: unpacked });
        }
        all.push(Shipped { name, octets });
    }
    all.sort_by(|a, b| a.name.cmp(&b.name));
    assert!(all.len() > 20, "pcaps/ holds {} captures", all.len());
    all
}

/// What is kept of a frame to be compared.
struct Seen {
    number: u64,
    time_ns: Option<i128>,
    caplen: u32,
    roce: Vec<(Option<Headers>, IcrcState)>,
}

impl Seen {
    fn new(frame: &Frame) -> Self {
        let roce = frame.roce.iter().map(|packet| (packet.headers, packet.icrc)).collect();
        Self { number: frame.number, time_ns: frame.time_ns, caplen: frame.caplen, roce }
    }
}

/// Decodes records, and checks what holds for any input.
struct Run {
    dissector: Dissector,
    records: u64,
    octets: usize,
    frames: Vec<Seen>,
}

impl Run {
    fn new() -> Self {
        let dissector = Dissector::new(Options::default());
        Self { dissector, records: 0, octets: 0, frames: Vec::new() }
    }

    fn take(&mut self, record: &Record<'_>) {
        self.records += 1;
        self.octets += record.data.len();
        assert_eq!(record.number, self.records, "records are numbered from 1");
        self.dissector.handle_record(record);
        self.drain();
    }

    fn drain(&mut self) {
        while let Some(frame) = self.dissector.poll_frame() {
            assert_eq!(frame.number, self.frames.len() as u64 + 1, "frames come in order");
            assert!(frame.number <= self.records, "a frame is of a record");
            // What one frame tells is bounded by what was read: a packet has at least 16 octets
            // and an FPDU 8, a start-up frame 20.
            assert!(frame.roce.len() <= 1 + frame.caplen as usize / 16, "packets out of nothing");
            assert!(frame.iwarp.len() <= 2 + self.octets / 8, "FPDUs out of nothing");
            self.frames.push(Seen::new(&frame));
        }
    }

    fn finish(mut self) -> Vec<Seen> {
        self.dissector.finish();
        self.drain();
        assert_eq!(self.frames.len() as u64, self.records, "each record gives a frame");
        assert!(self.dissector.poll_frame().is_none());
        self.frames
    }
}

/// Decodes a file up to where it ends or is damaged.
fn decode(octets: &[u8]) -> Vec<Seen> {
    let Ok(mut reader) = Reader::new(octets) else {
        return Vec::new();
    };
    let mut run = Run::new();
    // A block has at least 12 octets; gzip packs at most 1032 times.
    let bound = octets.len() * if octets.starts_with(&[0x1f, 0x8b]) { 1032 } else { 1 } / 12 + 1;
    let failed = loop {
        match reader.next_record() {
            Ok(Some(record)) => run.take(&record),
            Ok(None) => break None,
            Err(why) => break Some(why.to_string()),
        }
        assert!(run.records <= bound as u64, "more records than octets for them");
    };
    if let Some(why) = failed {
        let again = reader.next_record().map(|record| record.map(|r| r.number));
        assert_eq!(again.expect_err("an end stays the end").to_string(), why);
    }
    run.finish()
}

/// Ends the test, and names the case, when one takes too long or panics.
fn each_within_patience(body: impl FnOnce(&dyn Fn(String)) + Send + 'static) {
    let (tell, told) = mpsc::channel();
    let worker = thread::spawn(move || body(&|case| tell.send(case).expect("the test waits")));
    let mut current = "the start".to_owned();
    loop {
        match told.recv_timeout(PATIENCE) {
            Ok(case) => current = case,
            Err(RecvTimeoutError::Timeout) => panic!("{current}: not done within {PATIENCE:?}"),
            Err(RecvTimeoutError::Disconnected) => break,
        }
    }
    assert!(worker.join().is_ok(), "{current}: panicked, see above");
}

/// Where the records of a classic little-endian capture begin, and its end; nothing for others.
fn records(octets: &[u8]) -> Vec<usize> {
    if !octets.starts_with(&[0xd4, 0xc3, 0xb2, 0xa1]) {
        return Vec::new();
    }
    let mut at = 24;
    let mut all = vec![at];
    while at < octets.len() {
        let len = octets[at + 8..at + 12].try_into().expect("four octets");
        at += 16 + u32::from_le_bytes(len) as usize;
        all.push(at);
    }
    all
}

/// A capture that is short enough to be read a thousand times, with what is around `place`;
/// and where `place` is in it.
fn around(octets: &[u8], records: &[usize], place: usize) -> (Vec<u8>, usize) {
    let last = records.len().saturating_sub(1);
    if octets.len() <= WHOLE || last <= START + 2 * AROUND {
        return (octets.to_vec(), place);
    }
    let hit = records.partition_point(|start| *start <= place).saturating_sub(1);
    let from = hit.saturating_sub(AROUND).max(START);
    let to = (hit.max(START) + AROUND).min(last);
    let mut kept = octets[..records[START]].to_vec();
    kept.extend_from_slice(&octets[records[from]..records[to]]);
    let place = if place < records[START] { place } else { place - records[from] + records[START] };
    (kept, place)
}

#[test]
fn a_capture_that_is_cut_gives_the_frames_before_the_cut() {
    each_within_patience(|case| {
        for Shipped { name, octets } in shipped() {
            let mut rng = Rng::new(1);
            let starts = records(&octets);
            for _ in 0..PLACES {
                let place = rng.below(octets.len() as u64) as usize;
                case(format!("{name}, cut at octet {place}"));
                let (mut kept, place) = around(&octets, &starts, place);
                kept.truncate(place);
                let frames = decode(&kept);
                if !starts.is_empty() {
                    let expected = complete(&kept);
                    assert_eq!(frames.len(), expected, "{name}, cut at octet {place}");
                }
            }
        }
    });
}

/// The whole records of a classic capture that was cut.
fn complete(octets: &[u8]) -> usize {
    let (mut at, mut n) = (24, 0);
    while let Some(len) = octets.get(at + 8..at + 12) {
        at += 16 + u32::from_le_bytes(len.try_into().expect("four octets")) as usize;
        n += usize::from(at <= octets.len());
    }
    n
}

#[test]
fn a_turned_bit_never_gives_another_packet_with_a_good_icrc() {
    each_within_patience(|case| {
        for Shipped { name, octets } in shipped() {
            let mut rng = Rng::new(2);
            let starts = records(&octets);
            let mut good = 0;
            // What the undamaged surroundings of a record decode to.
            let mut known = HashMap::new();
            for _ in 0..PLACES {
                let place = rng.below(octets.len() as u64) as usize;
                let bit = rng.below(8);
                case(format!("{name}, bit {bit} of octet {place} turned"));
                let record = starts.partition_point(|start| *start <= place);
                let (mut kept, place) = around(&octets, &starts, place);
                let before = known.entry(record).or_insert_with(|| decode(&kept));
                kept[place] ^= 1 << bit;
                good += same_packets(before, &decode(&kept));
            }
            if name.starts_with("roce") && !name.ends_with(".gz") {
                assert!(good > PLACES, "{name}: {good} good packets were compared");
            }
        }
    });
}

/// Whether frames with the same number carry, where the ICRC is good, the same packets; how many
/// were compared. FECN, BECN and reserved bits are not under the ICRC.
fn same_packets(before: &[Seen], after: &[Seen]) -> u64 {
    let mut compared = 0;
    for (a, b) in before.iter().zip(after) {
        // A turned bit in a record's header may put another frame here.
        if a.time_ns != b.time_ns || a.caplen != b.caplen {
            break;
        }
        for ((was, _), (is, icrc)) in a.roce.iter().zip(&b.roce) {
            let (Some(mut was), Some(is), IcrcState::Good) = (*was, *is, *icrc) else {
                continue;
            };
            was.bth.ecn = is.bth.ecn;
            assert_eq!(was, is, "frame {}: another packet, and the ICRC is good", b.number);
            compared += 1;
        }
    }
    compared
}

/// A record of a capture, owned.
#[derive(Clone)]
struct Owned {
    record: Record<'static>,
    data: Vec<u8>,
}

#[test]
fn damaged_frames_in_any_order_give_as_many_frames() {
    each_within_patience(|case| {
        for Shipped { name, octets } in shipped() {
            if name.ends_with(".gz") {
                continue;
            }
            let mut all = Vec::new();
            let mut reader = Reader::new(octets.as_slice()).expect("it is a capture");
            while let Some(r) = reader.next_record().expect("it is whole") {
                all.push(Owned { data: r.data.to_vec(), record: Record { data: &[], ..r } });
            }
            let mut rng = Rng::new(3);
            for round in 0..PLACES {
                case(format!("{name}, frames damaged, round {round}"));
                let hit = rng.below(all.len() as u64) as usize;
                let from = hit.saturating_sub(AROUND).max(START.min(all.len()));
                let to = (hit.max(from) + AROUND).min(all.len());
                let mut frames = all[..START.min(all.len())].to_vec();
                frames.extend_from_slice(&all[from.min(to)..to]);
                for _ in 0..=rng.below(3) {
                    damage(&mut frames, &mut rng);
                }
                let mut run = Run::new();
                for (i, frame) in frames.iter().enumerate() {
                    let number = i as u64 + 1;
                    run.take(&Record { number, data: &frame.data, ..frame.record });
                }
                assert_eq!(run.finish().len(), frames.len());
            }
        }
    });
}

/// One damage to one frame, or to the order of two.
fn damage(frames: &mut Vec<Owned>, rng: &mut Rng) {
    let Some(n) = frames.len().checked_sub(1) else {
        return;
    };
    let i = rng.below(n as u64 + 1) as usize;
    let len = frames[i].data.len() as u64;
    match rng.below(8) {
        0 if n > 0 => drop(frames.remove(i)),
        1 => {
            let again = frames[i].clone();
            frames.insert(i, again);
        }
        2 => {
            let j = rng.below(n as u64 + 1) as usize;
            frames.swap(i, j);
        }
        // The capture kept only the front.
        3 => frames[i].data.truncate(rng.below(len + 1) as usize),
        // The front of it and a part of another.
        4 => {
            let cut = rng.below(len + 1) as usize;
            let other = frames[rng.below(n as u64 + 1) as usize].data.clone();
            let from = rng.below(other.len() as u64 + 1) as usize;
            frames[i].data.truncate(cut);
            frames[i].data.extend_from_slice(&other[from..]);
            frames[i].record.len = frames[i].data.len() as u32;
        }
        // A field of ones, zeros or anything.
        5 if len > 0 => {
            let at = rng.below(len) as usize;
            let n = (1 + rng.below(4) as usize).min(frames[i].data.len() - at);
            let with = [0, 0xff, rng.draw() as u8][rng.below(3) as usize];
            frames[i].data[at..at + n].fill(with);
        }
        6 => frames[i].record.len = [0, 1, u32::MAX, rng.draw() as u32][rng.below(4) as usize],
        _ if len > 0 => {
            let at = rng.below(len) as usize;
            frames[i].data[at] ^= 1 << rng.below(8);
        }
        _ => {}
    }
}
