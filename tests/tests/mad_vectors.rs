//! Management datagrams of other stacks: `vectors.json`, the Linux kernel's captures and public
//! ones. Each is read, written again and found equal, and what the messages say agrees with the
//! packets that other programs decoded behind them.
//!
//! The material is looked for in `$USERDMA_SHARED`, by default in `shared` beside the tree. Where
//! it is missing a test says SKIPPED; the messages that matter most stand in proto's own tests.

use std::{collections::BTreeMap, fs, path::PathBuf};

use userdma_proto::wire::mad::{
    MAD_LEN, METHOD_SEND, Mad, attribute_name,
    cm::{self, Message, PortSpace, Reason},
};
use userdma_tests::{json, shared, unhex};

/// The message of a MAD; what is written again is equal to the last bit.
fn there_and_back(octets: &[u8; MAD_LEN]) -> Message<'_> {
    let mad = Mad::parse(octets).expect("a whole MAD");
    let message = mad.cm().expect("a whole message").expect("a message");
    let mut out = [0xee; MAD_LEN];
    message.emit_mad(mad.header.tid(), METHOD_SEND, &mut out);
    assert_eq!(out, *octets, "{message:?}");
    message
}

/// The communication management MADs of a capture, whatever its format: 256 octets that begin with
/// a good header, none of whose values is common elsewhere.
fn mads(capture: &[u8]) -> Vec<&[u8; MAD_LEN]> {
    let good = |octets: &&[u8]| {
        octets.starts_with(&[1, 7, 2, 3, 0, 0, 0, 0])
            && octets[16] == 0
            && (0x10..=0x1a).contains(&octets[17])
            && octets[18..24] == [0; 6]
    };
    capture
        .windows(MAD_LEN)
        .filter(good)
        .map(|octets| octets.try_into().expect("a window is that long"))
        .collect()
}

/// The captures of a folder, each with the name of its decoded fields.
fn captures(folder: &str) -> Vec<(PathBuf, PathBuf)> {
    let Some(folder) = shared(folder) else { return Vec::new() };
    let mut found: Vec<_> = fs::read_dir(&folder)
        .expect("a folder")
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.extension().is_none_or(|end| end != "json" && end != "md"))
        .map(|path| (path.clone(), path.with_extension("json")))
        .collect();
    found.sort();
    assert!(!found.is_empty(), "{}", folder.display());
    found
}

#[test]
fn frames_of_vectors_json() {
    let Some(file) = shared("specs/vectors.json") else { return };
    let mut seen = 0;
    for frame in json(&file)["rocev2_frames"].as_array().expect("frames") {
        if frame["opcode"] != "0x64" {
            continue;
        }
        // IPv4 and UDP; BTH and DETH; the MAD; the ICRC.
        let packet = unhex(&frame["ip_packet"]);
        let datagram = &packet[usize::from(packet[0] & 15) * 4 + 8..];
        let octets = datagram[12 + 8..].first_chunk().expect("a MAD");
        let Message::Req(req) = there_and_back(octets) else { panic!("not a REQ") };
        assert_eq!(PortSpace::of_service_id(req.service_id), Some((PortSpace::TCP, 7174)));
        // As octets 88 to 91 are 91 1c 70 00.
        assert_eq!((req.primary.flow_label, req.primary.rate), (0x9_11c7, 0));
        // The frame's addresses are those of the path and of rdma_cm.
        let (ip, _) = Message::Req(req).ip_cm().expect("rdma_cm's header");
        let ends = (req.primary.local_gid.to_ip(), req.primary.remote_gid.to_ip());
        assert_eq!(ip.addresses(), Some(ends));
        assert_eq!(ends.0.to_string(), "192.168.1.102");
        seen += 1;
    }
    assert!(seen > 0);
}

#[test]
fn every_message_of_the_kernel_captures() {
    let mut seen: BTreeMap<&str, u64> = BTreeMap::new();
    for (capture, truth) in captures("captures/kernel") {
        let (octets, truth) = (fs::read(&capture).expect("a file"), json(&truth));
        let mut counts = serde_json::Map::new();
        for octets in mads(&octets) {
            let message = there_and_back(octets);
            let name = attribute_name(7, message.attribute()).expect("a name");
            *seen.entry(name).or_default() += 1;
            let count = counts.entry(name).or_insert(0.into());
            *count = (count.as_u64().expect("a count") + 1).into();
        }
        if let Some(want) = truth["roce"]["cm_mads"].as_object() {
            assert_eq!(counts, *want, "{}", capture.display());
        } else {
            assert!(counts.is_empty(), "{}", capture.display());
        }
    }
    let kinds = ["DREP", "DREQ", "REJ", "REP", "REQ", "RTU", "SIDR_REP", "SIDR_REQ"];
    assert!(seen.is_empty() || seen.keys().eq(&kinds), "{seen:?}");
}

#[test]
fn public_captures_hold_messages_of_other_stacks() {
    // Soft-RoCE of several ages, an adapter, and InfiniBand with Mellanox's own REQs and REPs.
    let mut seen = 0;
    let captures = captures("captures/public");
    for (capture, _) in &captures {
        let octets = fs::read(capture).expect("a file");
        seen += mads(&octets).into_iter().map(there_and_back).count();
    }
    assert!(captures.is_empty() || seen >= 30, "{seen}");
}

#[test]
fn what_messages_say_is_what_packets_do() {
    let mut checked = 0;
    for (capture, truth) in captures("captures/kernel") {
        let (octets, truth) = (fs::read(&capture).expect("a file"), json(&truth));
        let messages: Vec<_> = mads(&octets).into_iter().map(there_and_back).collect();
        let mut requests = messages.iter().filter_map(|m| match m {
            Message::Req(req) => Some(req),
            _ => None,
        });
        let mut replies = messages.iter().filter_map(|m| match m {
            Message::Rep(rep) => Some(rep),
            _ => None,
        });
        // One connection, whose packets nobody loses or moves.
        let (Some(req), Some(rep)) = (requests.next(), replies.next()) else { continue };
        let name = capture.file_name().expect("a name").to_string_lossy();
        let disturbed = ["loss", "reorder", "duplicate"].iter().any(|what| name.contains(what));
        if disturbed || requests.next().is_some() || replies.next().is_some() {
            continue;
        }
        assert_eq!(rep.remote_comm_id, req.local_comm_id, "{name}");
        for message in &messages {
            let ids = (message.local_comm_id(), message.remote_comm_id());
            let (active, passive) = (Some(req.local_comm_id), Some(rep.local_comm_id));
            let to_passive = ids == (active, passive);
            let known = to_passive || ids == (passive, active) || ids == (active, None);
            assert!(known, "{name}: {message:?}");
            if let Message::Dreq(dreq) = message {
                let qpn = if to_passive { rep.qpn } else { req.qpn };
                assert_eq!(dreq.remote_qpn, qpn, "{name}");
            }
        }
        // Who sends to the other's queue pair begins with the PSN that the other said.
        let active = req.primary.local_gid.to_ip().to_string();
        let mut first: BTreeMap<bool, (u64, u64)> = BTreeMap::new();
        for row in truth["rows"].as_array().expect("rows") {
            let number = |field: &str| {
                let text = row[format!("infiniband.bth.{field}")].as_str()?;
                let digits = text.strip_prefix("0x");
                digits.map_or(text.parse().ok(), |d| u64::from_str_radix(d, 16).ok())
            };
            // Requests of RC: SEND, WRITE, READ, atomics.
            if !number("opcode")
                .is_some_and(|op| matches!(op, 0..=0x0c | 0x13 | 0x14 | 0x16 | 0x17))
            {
                continue;
            }
            let (qpn, psn) = (number("destqp").expect("destqp"), number("psn").expect("psn"));
            let source = row["ip.src"].as_str().or(row["ipv6.src"].as_str()).expect("a source");
            first.entry(source == active).or_insert((qpn, psn));
        }
        for (from_active, (qpn, psn)) in first {
            let want = match from_active {
                true => (rep.qpn, rep.start_psn),
                false => (req.qpn, req.start_psn),
            };
            assert_eq!((qpn, psn), (want.0.0.into(), want.1.get().into()), "{name}");
            checked += 1;
        }
    }
    assert!(checked >= 10 || shared("captures/kernel").is_none(), "{checked}");
}

#[test]
fn refusals_of_the_kernel() {
    let Some(folder) = shared("captures/kernel") else { return };
    // The reasons are those of the captures' description.
    for (name, reason, data) in [
        ("roce_no_listener.pcap", Reason::INVALID_SERVICE_ID, &b""[..]),
        ("roce_reject.pcap", Reason::CONSUMER, b"rejected-by-server"),
    ] {
        let octets = fs::read(folder.join(name)).expect("a file");
        let messages: Vec<_> = mads(&octets).into_iter().map(there_and_back).collect();
        let [request @ Message::Req(_), Message::Rej(rej)] = &messages[..] else {
            panic!("{name}: {messages:?}");
        };
        assert_eq!((rej.reason, rej.message_name()), (reason, Some("REQ")), "{name}");
        assert!(rej.private_data.starts_with(data), "{name}");
        assert!(rej.private_data[data.len()..].iter().all(|&octet| octet == 0), "{name}");
        let answer = cm::Rej::answer(request, rej.local_comm_id, reason).expect("a REQ");
        let answer = cm::Rej { private_data: data, ..answer };
        assert_eq!(Message::Rej(answer).to_body(), Message::Rej(*rej).to_body(), "{name}");
    }
}
