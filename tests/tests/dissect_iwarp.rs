//! What the dissector makes of iWARP in captures that other stacks made: whole, without their
//! beginning, with frames missing, repeated or cut.

use std::{collections::BTreeMap, net::IpAddr};

use serde_json::Value;
use userdma_proto::{
    dissect::{CrcState, DdpHeader, Fpdu, Frame, Iwarp, Layer, Markers, Operation},
    wire::iwarp::{mpa::StartKind, rdmap::Opcode},
};
use userdma_tests::{
    Rng,
    captures::{Octets, dissect, records},
    shared, truth,
};

/// A capture with its truth beside it.
struct Case {
    name: String,
    records: Vec<Octets>,
    truth: Value,
}

/// Those of a folder that can be read to their end.
fn cases(folder: &str) -> Vec<Case> {
    let Some(folder) = shared(folder) else { return Vec::new() };
    let with_records = |case: truth::Case| {
        let (records, truth) = (records(&case.path).ok()?, case.truth());
        Some(Case { name: case.name, records, truth })
    };
    truth::cases(&folder).into_iter().filter_map(with_records).collect()
}

/// The kernel's captures that have FPDUs.
fn kernel_cases() -> Vec<Case> {
    let has_fpdus =
        |case: &Case| case.truth["iwarp"]["fpdus"].as_object().is_some_and(|ops| !ops.is_empty());
    let found: Vec<Case> = cases("captures/kernel").into_iter().filter(has_fpdus).collect();
    assert!(found.len() >= 25 || shared("captures/kernel").is_none(), "{} captures", found.len());
    found
}

fn iwarp(frames: &[Frame]) -> impl Iterator<Item = (&Frame, &Iwarp)> {
    frames.iter().flat_map(|frame| frame.iwarp.iter().map(move |iwarp| (frame, iwarp)))
}

fn fpdus(frames: &[Frame]) -> impl Iterator<Item = (&Frame, &Fpdu)> {
    iwarp(frames).filter_map(|(frame, iwarp)| match iwarp {
        Iwarp::Fpdu(fpdu) => Some((frame, fpdu)),
        _ => None,
    })
}

fn errors(frames: &[Frame]) -> Vec<&str> {
    let told = iwarp(frames).filter_map(|(_, iwarp)| match iwarp {
        Iwarp::Error(error) => Some(error.as_str()),
        Iwarp::Fpdu(fpdu) => fpdu.error.as_deref(),
        Iwarp::Start(_) => None,
    });
    told.collect()
}

/// As check_truth.py and the truth files name operations.
fn name(opcode: Opcode) -> String {
    match opcode {
        Opcode::WRITE => "RDMA_WRITE".into(),
        other => other.to_string(),
    }
}

/// What tells an FPDU from others of its direction: operation, last flag, length, place.
type Key = (String, bool, u16, u64, u64);

fn key(fpdu: &Fpdu) -> Key {
    let header = fpdu.header.expect("a DDP header");
    let (a, b) = match header {
        DdpHeader::Tagged(header) => (header.stag.get().into(), header.to.get()),
        DdpHeader::Untagged(header) => {
            (header.msn.get().into(), u64::from(header.qn.get()) << 32 | u64::from(header.mo.get()))
        }
    };
    (name(header.opcode()), header.last(), fpdu.ulpdu_len, a, b)
}

type End = (IpAddr, u16);

/// Who sent it to whom.
fn flow(frame: &Frame) -> (End, End) {
    let ends = frame.ends.expect("IP");
    let (sport, dport) = ends.ports.expect("TCP");
    ((ends.src, sport), (ends.dst, dport))
}

/// The FPDUs of each direction.
fn by_flow(frames: &[Frame]) -> BTreeMap<(End, End), Vec<Key>> {
    let mut out = BTreeMap::<_, Vec<_>>::new();
    for (frame, fpdu) in fpdus(frames) {
        out.entry(flow(frame)).or_default().push(key(fpdu));
    }
    out
}

fn count(names: impl Iterator<Item = String>) -> BTreeMap<String, u64> {
    let mut out = BTreeMap::new();
    for name in names {
        *out.entry(name).or_default() += 1;
    }
    out
}

fn counts(value: &Value) -> BTreeMap<String, u64> {
    let numbers = value.as_object().into_iter().flatten();
    numbers
        .filter_map(|(name, count)| Some((name.clone(), count.as_u64().filter(|n| *n > 0)?)))
        .collect()
}

fn crcs(frames: &[Frame]) -> [usize; 3] {
    [CrcState::Good, CrcState::Zero, CrcState::Bad]
        .map(|state| fpdus(frames).filter(|(_, fpdu)| fpdu.crc == state).count())
}

#[test]
fn the_kernels_streams_are_what_the_independent_decoder_read() {
    for Case { name: file, records, truth } in cases("captures/kernel") {
        let frames = dissect(&records, usize::MAX);
        let Some(want) = truth.get("iwarp") else {
            assert_eq!(iwarp(&frames).count(), 0, "{file}");
            continue;
        };
        let ops = fpdus(&frames).map(|(_, fpdu)| key(fpdu).0);
        assert_eq!(count(ops), counts(&want["fpdus"]), "{file}");
        let crc = &want["mpa_crc"];
        let number = |name: &str| crc[name].as_u64().unwrap_or(0) as usize;
        let zero = number("zero");
        assert_eq!(crcs(&frames), [number("correct"), zero, number("wrong") - zero], "{file}");
        let starts: Vec<_> = iwarp(&frames)
            .filter_map(|(frame, iwarp)| match iwarp {
                Iwarp::Start(start) => Some((frame.number, start)),
                _ => None,
            })
            .collect();
        assert_eq!(starts.len(), want["mpa_frames"].as_array().map_or(0, Vec::len), "{file}");
        assert_eq!(errors(&frames), [""; 0], "{file}");
        // siw knows no markers; the CRC is used if either side asks.
        let asked = starts.iter().any(|(_, start)| start.flags.bits() & 0x40 != 0);
        for (frame, fpdu) in fpdus(&frames) {
            assert_eq!(fpdu.markers, Markers::None, "{file}: frame {}", frame.number);
            assert_eq!(fpdu.crc_in_use, Some(asked), "{file}: frame {}", frame.number);
            assert!(frame.stack.ends_with(&[Layer::Tcp, Layer::Mpa]), "{file}: {:?}", frame.stack);
        }
        check_directions(&file, want, &frames);
    }
}

/// Each direction by itself: FPDUs, last flags, the start-up frame's fields, Terminates.
fn check_directions(file: &str, want: &Value, frames: &[Frame]) {
    for direction in want["directions"].as_array().into_iter().flatten() {
        let Some(ops) = direction["fpdus"].as_object() else { continue };
        let flow_name = direction["flow"].as_str().expect("a name");
        let (src, dst) = flow_name.split_once('>').expect("two ends");
        let end = |text: &str| -> End {
            let (ip, port) = text.rsplit_once(':').expect("a port");
            (ip.parse().expect("an address"), port.parse().expect("a number"))
        };
        let ours = (end(src), end(dst));
        let here = || fpdus(frames).filter(|(frame, _)| flow(frame) == ours).map(|(_, fpdu)| fpdu);
        let at = format!("{file} {flow_name}");
        assert_eq!(count(here().map(|f| key(f).0)), counts(&Value::from(ops.clone())), "{at}");
        let last = here().filter(|fpdu| key(fpdu).1).map(|fpdu| key(fpdu).0);
        assert_eq!(count(last), counts(&direction["messages"]), "{at}");
        let start = iwarp(frames).find_map(|(frame, iwarp)| match iwarp {
            Iwarp::Start(start) if flow(frame) == ours => Some(start),
            _ => None,
        });
        let start = start.expect("a start-up frame");
        let mpa = &direction["mpa"];
        assert_eq!(start.kind == StartKind::Request, direction["initiator"] == true, "{at}");
        assert_eq!(u64::from(start.revision), mpa["rev"], "{at}");
        if let Some(enhanced) = start.enhanced {
            assert_eq!(u64::from(enhanced.ird), mpa["IRD"], "{at}");
            assert_eq!(u64::from(enhanced.ord), mpa["ORD"], "{at}");
        }
        let terminates = here().filter(|f| matches!(f.operation, Operation::Terminate(..))).count();
        assert_eq!(terminates as u64, ops.get("TERMINATE").and_then(Value::as_u64).unwrap_or(0));
    }
}

#[test]
fn other_peoples_streams_are_what_the_independent_decoder_read() {
    let (mut with, mut without) = (0, 0);
    for Case { name: file, records, truth } in cases("captures/public") {
        let frames = dissect(&records, usize::MAX);
        let Some(walk) = truth["independent_mpa_walk"].as_array() else {
            assert_eq!(iwarp(&frames).count(), 0, "{file}");
            without += 1;
            continue;
        };
        let mut want = Vec::new();
        for side in walk {
            let quirk = &side["quirk_walk"];
            let odd = side["unparsed_tail"] != 0 && quirk["unparsed_tail"] == 0;
            let fpdus = if odd { &quirk["fpdu"] } else { &side["fpdu"] };
            want.extend(fpdus.as_array().into_iter().flatten().map(|fpdu| {
                let state = match (&fpdu["crc_ok"], &fpdu["crc_zero"]) {
                    (Value::Bool(true), _) => CrcState::Good,
                    (_, Value::Bool(true)) => CrcState::Zero,
                    _ => CrcState::Bad,
                };
                (fpdu["ulpdu_len"].as_u64().expect("a number"), state)
            }));
        }
        // A direction after the other one.
        let flows = iwarp(&frames).map(|(frame, _)| flow(frame));
        let mut sides: Vec<_> = Vec::new();
        flows.for_each(|flow| {
            if !sides.contains(&flow) {
                sides.push(flow);
            }
        });
        let have: Vec<_> = sides
            .iter()
            .flat_map(|side| fpdus(&frames).filter(|(frame, _)| flow(frame) == *side))
            .map(|(_, fpdu)| (u64::from(fpdu.ulpdu_len), fpdu.crc))
            .collect();
        assert_eq!(have, want, "{file}");
        // SoftUiWARP sends DDP version 0 (`iwarp_ddp.dv`).
        let wrong =
            &["DDP: version is 0, expected 1"][..usize::from(file == "softuiwarp_send.pcap")];
        assert_eq!(errors(&frames), wrong, "{file}");
        let starts = iwarp(&frames).filter(|(_, iwarp)| matches!(iwarp, Iwarp::Start(_)));
        assert_eq!(starts.count(), walk.len(), "{file}");
        with += 1;
    }
    if shared("captures/public").is_some() {
        assert!(with >= 13 && without >= 100, "{with} with iWARP, {without} without");
    }
}

/// softiwarp of 2008 put markers where no grid has them: all FPDUs are found, and that is said.
#[test]
fn markers_off_their_grid() {
    let file = "iwarp_read_write_long_run_mrkr.pcap";
    for case in cases("captures/public").into_iter().filter(|case| case.name == file) {
        let frames = dissect(&case.records, usize::MAX);
        let sides: Vec<usize> = by_flow(&frames).values().map(Vec::len).collect();
        assert_eq!(sides, [42, 21]);
        let off = fpdus(&frames).filter(|(_, fpdu)| fpdu.markers == Markers::OffGrid).count();
        // The first of each side lies on the grid as well.
        assert_eq!(off, 61);
        // The same program without markers did the same.
        let plain = "iwarp_read_write_long_run.pcap";
        let plain = cases("captures/public").into_iter().find(|case| case.name == plain);
        let plain = dissect(&plain.expect("it is there").records, usize::MAX);
        let shape = |frames: &[Frame]| -> Vec<Vec<(String, bool, u16)>> {
            let shape = |key: &Key| (key.0.clone(), key.1, key.2);
            by_flow(frames).values().map(|keys| keys.iter().map(shape).collect()).collect()
        };
        assert_eq!(shape(&frames), shape(&plain));
    }
}

/// The capture began when the connections were under way.
#[test]
fn without_the_start_of_the_connection() {
    let (mut found, mut sent) = (0, 0);
    for Case { name: file, records, .. } in kernel_cases() {
        let whole = dissect(&records, usize::MAX);
        // The frames of connections' first moments: all up to their start-up frames.
        let last_start = |at: (End, End)| {
            iwarp(&whole)
                .filter(|(frame, iwarp)| {
                    let ends = flow(frame);
                    matches!(iwarp, Iwarp::Start(_)) && (ends == at || (ends.1, ends.0) == at)
                })
                .map(|(frame, _)| frame.number)
                .max()
        };
        let late = whole.iter().zip(&records).filter(|(frame, _)| {
            frame.tcp.is_none() || last_start(flow(frame)).is_none_or(|start| frame.number > start)
        });
        let frames = dissect(late.map(|(_, octets)| octets), usize::MAX);
        let (had, has) = (by_flow(&whole), by_flow(&frames));
        for (flow, had) in &had {
            let has = has.get(flow).map_or(&[][..], Vec::as_slice);
            found += has.len();
            sent += had.len();
            // Three prove each other; where the other side did, two do.
            let crc = crcs(&whole)[0] > 0;
            // Where FPDUs begin within segments, or segments come in another order, the first ones
            // are passed over.
            let odd = ["iwarp_gso", "iwarp_mtu700", "iwarp_loss", "iwarp_reorder"];
            let odd = odd.iter().any(|odd| file.starts_with(odd));
            let enough = if crc { 2 } else { 3 };
            if had.len() >= enough && !odd {
                assert_eq!(has, &had[had.len() - has.len()..], "{file} {flow:?}");
                assert_eq!(has.len(), had.len(), "{file} {flow:?}");
            }
        }
        for (frame, fpdu) in fpdus(&frames) {
            assert_eq!(fpdu.crc_in_use, None, "{file}: frame {}", frame.number);
        }
    }
    assert!(found * 100 >= sent * 97, "{found} of {sent} FPDUs");
}

/// Whatever the capture missed: each FPDU told is one that was sent, and most are told.
#[test]
fn with_frames_missing() {
    let mut rng = Rng::new(5044);
    let (mut found, mut sent) = (0, 0);
    for Case { name: file, records, .. } in kernel_cases() {
        let whole = by_flow(&dissect(&records, usize::MAX));
        for _ in 0..10 {
            let some = records.iter().filter(|_| !rng.one_in(20)).collect::<Vec<_>>();
            let frames = dissect(some, usize::MAX);
            for (flow, has) in by_flow(&frames) {
                let mut had = whole[&flow].iter();
                for key in &has {
                    assert!(had.any(|sent| sent == key), "{file} {flow:?}: {key:?} was not sent");
                }
                found += has.len();
            }
            sent += whole.values().map(Vec::len).sum::<usize>();
            let crc = crcs(&frames);
            assert!(crc[2] == 0 && (crc[0] == 0 || crc[1] == 0), "{file}: {crc:?}");
        }
    }
    assert!(found * 100 >= sent * 92, "{found} of {sent} FPDUs");
}

/// As a capture on all interfaces shows them: each frame twice.
#[test]
fn with_each_frame_twice() {
    for Case { name: file, records, .. } in kernel_cases() {
        let once = by_flow(&dissect(&records, usize::MAX));
        let twice = dissect(records.iter().flat_map(|octets| [octets, octets]), usize::MAX);
        assert_eq!(by_flow(&twice), once, "{file}");
        assert_eq!(errors(&twice), [""; 0], "{file}");
    }
}

/// A snaplen: what is whole is told, and nothing else.
#[test]
fn with_frames_cut() {
    for Case { name: file, records, .. } in kernel_cases() {
        let whole = by_flow(&dissect(&records, usize::MAX));
        for snaplen in [60, 96, 128, 200, 600, 1400] {
            for (flow, has) in by_flow(&dissect(&records, snaplen)) {
                let mut had = whole[&flow].iter();
                for key in &has {
                    let at = format!("{file} at {snaplen} {flow:?}");
                    assert!(had.any(|sent| sent == key), "{at}: {key:?} was not sent");
                }
            }
        }
    }
}
