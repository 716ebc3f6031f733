//! Every capture that lies beside the tree, read by `capture::Reader`, against what tshark and an
//! independent count say of it: how many frames, when, how long, how much of each was captured,
//! and whether the file ends well.

use std::{fs::File, path::Path};

use serde_json::Value;
use userdma_proto::dissect::capture::{Error, Format, Reader};
use userdma_tests::{
    shared,
    truth::{cases, frame_count, nanoseconds},
};

/// Files that tshark gives up on, or breaks off: frames as counted by hand, and whether an error
/// ends the file.
const COUNTED: [(&str, usize, bool); 9] = [
    ("cont_tcpdump_dsa-high-vid.pcap", 4, false),
    ("cont_tcpdump_edsa-high-vid.pcap", 4, false),
    ("cont_tcpdump_frf16_magic_ie-oobr.pcap", 1, false),
    ("cont_wiki_BT_USB_LinCooked_Eth_80211_RT.ntar.gz", 27_228, false),
    ("cont_wiki_http.bigendian.ntar", 43, false),
    ("cont_wiki_pcap-ng_Wi-Fi_Bluetooth_USB_Cooked_timestamps_issue_1.ntar", 413, false),
    ("cont_wiki_test007.ntar", 1, false),
    ("cont_zeek_1a30e3_trunc-hdr.pcap", 1, true),
    ("cont_ndpi_fuzz-2021-10-13.pcap", 0, true),
];

/// Files of other formats, and how the error names them.
const OTHERS: [(&str, &str); 3] = [
    ("cont_FlashBarryAllen_solaris.snoop", "snoop"),
    ("cont_wiki_l2ping.cap", "hcidump"),
    ("wiki_ethernet_pause_frame.cap", "ngsniffer"),
];

/// Where tshark is wrong: file, frame, the time that is right.
///
/// The unit is 2^-63 s (if_tsresol 0xbf) and the count 2^63 - 1, which is one unit less than a
/// second. tshark says 1 ns: it multiplies by 10^9 in 64 bits, where that wraps to 2^64 - 10^9,
/// and divides that by 2^63.
const TIMES: [(&str, usize, i128); 1] =
    [("cont_libpcap_pcapng-tsresol-bin-overflow.pcapng", 1, 999_999_999)];

/// What a file gave.
struct Found {
    /// Time, length, octets captured.
    frames: Vec<(Option<i128>, u32, usize)>,
    end: Option<Error>,
}

#[test]
fn every_capture_agrees_with_its_truth() {
    let (Some(kernel), Some(public)) = (shared("captures/kernel"), shared("captures/public"))
    else {
        return;
    };
    let mut disagreements = Vec::new();
    let (mut files, mut timed) = (0, 0);
    for case in cases(&kernel).into_iter().chain(cases(&public)) {
        let (name, truth) = (&case.name, case.truth());
        files += 1;
        match compare(name, &case.path, &truth) {
            Ok(frames) => timed += frames,
            Err(told) => disagreements.extend(told.into_iter().map(|d| format!("{name}: {d}"))),
        }
    }
    assert!(disagreements.is_empty(), "\n{}", disagreements.join("\n"));
    // None was passed over.
    assert_eq!(files, 260);
    assert!(timed > 8_000, "{timed} frames compared one by one");
}

/// How many frames were compared one by one; or what disagrees.
fn compare(name: &str, path: &Path, truth: &Value) -> Result<usize, Vec<String>> {
    let kind = truth["capinfos"]["File type"].as_str().unwrap_or("pcap");
    let found = match read(path) {
        Ok((format, found)) => {
            let right = match format {
                Format::Pcap => ["pcap", "nsecpcap", "modpcap"].contains(&kind),
                // Of files that tshark gives up on there is no kind.
                Format::Pcapng => kind == "pcapng" || truth["capinfos"]["File type"].is_null(),
            };
            if !right {
                return Err(vec![format!("{kind} is read as {format:?}")]);
            }
            found
        }
        Err(error) => {
            let expected = OTHERS.iter().find(|(file, _)| *file == name);
            return match (&error, expected) {
                (Error::Format(what), Some((_, format))) if what.contains(format) => Ok(0),
                _ => Err(vec![format!("{error} ({kind})")]),
            };
        }
    };
    let counted = COUNTED.iter().find(|(file, ..)| *file == name);
    let breaks_off = counted.is_some_and(|&(_, _, breaks_off)| breaks_off);
    let mut told = Vec::new();
    if found.end.is_some() != breaks_off {
        told.push(format!("ends with {:?}", found.end));
    }
    let expected = counted.map_or_else(|| frame_count(truth), |&(_, frames, _)| frames);
    if found.frames.len() != expected {
        told.push(format!("{} frames, not {expected}", found.frames.len()));
        return Err(told);
    }
    // Where there are custom blocks, tshark lists them among the frames.
    let list = truth["frame_list"].as_array().map_or(&[][..], Vec::as_slice);
    let list = if list.len() == expected.min(400) { list } else { &[] };
    for (row, &(time_ns, len, caplen)) in list.iter().zip(&found.frames) {
        let text = |i: usize| row[i].as_str().unwrap();
        let number: usize = text(0).parse().unwrap();
        let exception = TIMES.iter().find(|(file, frame, _)| *file == name && *frame == number);
        let expected_time = exception.map_or_else(|| nanoseconds(text(1)), |&(_, _, t)| Some(t));
        if time_ns != expected_time {
            told.push(format!("frame {number}: at {time_ns:?}, not {expected_time:?}"));
        }
        if (len.to_string(), caplen.to_string()) != (text(3).into(), text(4).into()) {
            let (l, c) = (text(3), text(4));
            told.push(format!("frame {number}: {len} octets, {caplen} captured, not {l}, {c}"));
        }
    }
    for row in truth["rows"].as_array().map_or(&[][..], Vec::as_slice) {
        let number = |key: &str| -> usize { row[key].as_str().unwrap().parse().unwrap() };
        let (_, len, caplen) = found.frames[number("frame.number") - 1];
        if (len as usize, caplen) != (number("frame.len"), number("frame.cap_len")) {
            told.push(format!("row {}: {len} octets, {caplen} captured", number("frame.number")));
        }
    }
    if told.is_empty() { Ok(list.len()) } else { Err(told) }
}

fn read(path: &Path) -> Result<(Format, Found), Error> {
    let mut reader = Reader::new(File::open(path)?)?;
    let mut frames = Vec::new();
    loop {
        match reader.next_record() {
            Ok(Some(record)) => {
                frames.push((record.time_ns, record.len, record.data.len()));
                assert_eq!(record.number, frames.len() as u64);
            }
            Ok(None) => return Ok((reader.format(), Found { frames, end: None })),
            Err(error) => {
                let again = reader.next_record().unwrap_err();
                assert_eq!(again.to_string(), error.to_string());
                return Ok((reader.format(), Found { frames, end: Some(error) }));
            }
        }
    }
}
