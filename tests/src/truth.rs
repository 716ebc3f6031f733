//! Holds what `userdma dissect --format json` prints against the truth beside a capture.
//!
//! A truth file has tshark's fields of every frame (`rows`: of the frames that carry RDMA;
//! `frame_list`: of the first 400) and the counts and checksums of a decoder that has nothing in
//! common with userdma (`roce`, `iwarp`, `icrc_counts`, `independent_mpa_walk`). Everything here
//! works on the printed JSON: what a user sees is what is judged.

use std::{
    collections::BTreeMap,
    fmt::Debug,
    path::{Path, PathBuf},
};

use serde_json::Value;

/// tshark misses FPDUs in these: loss, reordering, streams that it does not follow, markers that
/// are off their grid. The independent decoder alone decides.
const TSHARK_MISSES: &[&str] = &[
    "iwarp_loss",
    "iwarp_reorder",
    "iwarp_rstream",
    "iwarp_read_write_long_run_mrkr",
    "smbdirect",
];

/// Files that tshark gives up on: their packet blocks, counted by hand, and the exit status due.
const COUNTED_BY_HAND: &[(&str, usize, i32)] = &[
    ("cont_tcpdump_dsa-high-vid.pcap", 4, 0),
    ("cont_tcpdump_edsa-high-vid.pcap", 4, 0),
    ("cont_tcpdump_frf16_magic_ie-oobr.pcap", 1, 0),
    ("cont_wiki_BT_USB_LinCooked_Eth_80211_RT.ntar.gz", 27228, 0),
    ("cont_wiki_http.bigendian.ntar", 43, 0),
    ("cont_wiki_pcap-ng_Wi-Fi_Bluetooth_USB_Cooked_timestamps_issue_1.ntar", 413, 0),
    ("cont_wiki_test007.ntar", 1, 0),
    ("cont_zeek_1a30e3_trunc-hdr.pcap", 1, 1),
    ("cont_ndpi_fuzz-2021-10-13.pcap", 0, 1),
];

/// tshark's names of the layers that `stack` must name too.
const LAYERS: &[(&str, &str)] = &[
    ("eth", "eth"),
    ("vlan", "vlan"),
    ("ieee8021ad", "vlan"),
    ("ip", "ipv4"),
    ("ipv6", "ipv6"),
    ("udp", "udp"),
    ("tcp", "tcp"),
    ("gre", "gre"),
    ("vxlan", "vxlan"),
    ("geneve", "geneve"),
    ("sll", "sll"),
];

/// tshark's field, and where the same stands in `roce`.
const ROCE: &[(&str, &str)] = &[
    ("bth.opcode", "opcode_value"),
    ("bth.se", "solicited"),
    ("bth.m", "migreq"),
    ("bth.padcnt", "pad"),
    ("bth.p_key", "pkey"),
    ("bth.destqp", "dest_qp"),
    ("bth.a", "ack_req"),
    ("bth.psn", "psn"),
    ("reth.va", "reth.va"),
    ("reth.r_key", "reth.rkey"),
    ("reth.dmalen", "reth.len"),
    ("aeth.msn", "aeth.msn"),
    ("immdt", "immdt"),
    ("ieth", "ieth"),
    ("deth.q_key", "deth.qkey"),
    ("deth.srcqp", "deth.src_qp"),
    ("atomiceth.swapdt", "atomic_eth.swap_add"),
    ("atomiceth.cmpdt", "atomic_eth.compare"),
    ("atomicacketh.origremdt", "atomic_ack.original"),
    ("mad.mgmtclass", "mad.mgmt_class"),
    ("mad.method", "mad.method"),
    ("mad.attributeid", "mad.attribute_id"),
    ("mad.transactionid", "mad.tid"),
];

const CM: &[(i128, &str)] = &[
    (0x10, "REQ"),
    (0x11, "MRA"),
    (0x12, "REJ"),
    (0x13, "REP"),
    (0x14, "RTU"),
    (0x15, "DREQ"),
    (0x16, "DREP"),
    (0x17, "SIDR_REQ"),
    (0x18, "SIDR_REP"),
    (0x19, "LAP"),
    (0x1a, "APR"),
];

const RDMAP: [&str; 8] = [
    "RDMA_WRITE",
    "READ_REQUEST",
    "READ_RESPONSE",
    "SEND",
    "SEND_INV",
    "SEND_SE",
    "SEND_SE_INV",
    "TERMINATE",
];

/// A capture that has a truth.
#[derive(Debug, Clone)]
pub struct Case {
    /// The capture's file name.
    pub name: String,
    /// The capture.
    pub path: PathBuf,
    /// Its truth: `NAME.json`, or the name with `.json` in place of its last extension.
    pub truth: PathBuf,
}

/// The captures of a folder that have a truth, by name.
pub fn cases(folder: &Path) -> Vec<Case> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(folder).expect("the folder can be read") {
        let path = entry.expect("the folder can be read").path();
        let name = path.file_name().expect("it has a name").to_string_lossy().into_owned();
        if name.ends_with(".json") || name.ends_with(".md") {
            continue;
        }
        let truth = [folder.join(format!("{name}.json")), path.with_extension("json")];
        if let Some(truth) = truth.into_iter().find(|p| p.exists()) {
            all.push(Case { name, path, truth });
        }
    }
    all.sort_by(|a, b| a.name.cmp(&b.name));
    all
}

impl Case {
    /// The truth, read.
    pub fn truth(&self) -> Value {
        let text = std::fs::read(&self.truth).expect("the truth can be read");
        serde_json::from_slice(&text).expect("the truth is JSON")
    }
}

/// What a run of `userdma dissect --format json` came to.
#[derive(Debug, Clone)]
pub struct Run {
    /// Its exit status; `None`: it was killed.
    pub status: Option<i32>,
    /// What it printed: an object a line.
    pub rows: Vec<Value>,
    /// Its standard error.
    pub stderr: String,
}

impl Run {
    /// Takes the printed lines apart.
    ///
    /// # Errors
    ///
    /// The first line that is not JSON.
    pub fn new(status: Option<i32>, stdout: &[u8], stderr: &[u8]) -> Result<Self, String> {
        let mut rows = Vec::new();
        for (i, line) in stdout.split(|b| *b == b'\n').enumerate() {
            if !line.is_empty() {
                let text = str::from_utf8(line).map_err(|e| format!("line {i}: {e}"))?;
                let mut row = serde_json::from_str(text).map_err(|e| format!("line {i}: {e}"))?;
                keep_time(&mut row, text);
                rows.push(row);
            }
        }
        Ok(Self { status, rows, stderr: String::from_utf8_lossy(stderr).into_owned() })
    }
}

/// Times of some captures are beyond 64 bits, which `serde_json` makes floating-point: as text.
fn keep_time(row: &mut Value, line: &str) {
    let key = "\"time_ns\":";
    if row["time_ns"].is_f64()
        && let Some(at) = line.find(key)
    {
        let rest = &line[at + key.len()..];
        let end = rest.find([',', '}']).unwrap_or(rest.len());
        row["time_ns"] = Value::from(&rest[..end]);
    }
}

/// Everything in which a run disagrees with the truth of the capture `name`; empty: nothing.
pub fn judge(name: &str, truth: &Value, run: &Run) -> Vec<String> {
    let mut odd = Vec::new();
    let hand = COUNTED_BY_HAND.iter().find(|(file, ..)| *file == name);
    if !matches!(run.status, Some(0..=2)) || hand.is_some_and(|h| run.status != Some(h.2)) {
        odd.push(format!("exit status {:?}: {}", run.status, run.stderr));
    }
    if run.status != Some(0) && run.stderr.trim().is_empty() {
        odd.push(format!("exit status {:?} with nothing on stderr", run.status));
    }
    let kind = truth["capinfos"]["File type"].as_str().unwrap_or("pcap");
    if !matches!(kind, "pcap" | "pcapng" | "nsecpcap" | "modpcap") {
        if run.status != Some(2) {
            odd.push(format!("{kind} is neither pcap nor pcapng: exit 2 was due"));
        }
        return odd;
    }
    if truth["tshark_rc"].as_i64().unwrap_or(0) != 0 {
        if let Some((_, frames, _)) = hand
            && run.rows.len() != *frames
        {
            odd.push(format!("frames {} != {frames}", run.rows.len()));
        }
        return odd;
    }
    let frames = frame_count(truth);
    let numbered = run.rows.iter().enumerate().all(|(i, r)| r["frame"] == i as u64 + 1);
    if run.rows.len() != frames || !numbered {
        odd.push(format!("frames {} != {frames}, or not numbered 1..", run.rows.len()));
        return odd;
    }
    shape(&run.rows, &mut odd);
    frame_list(truth, &run.rows, &mut odd);
    fields(truth, &run.rows, &mut odd);
    if !TSHARK_MISSES.iter().any(|prefix| name.starts_with(prefix)) {
        fpdu_sequences(truth, &run.rows, &mut odd);
    }
    counts(name, truth, &run.rows, &mut odd);
    odd
}

/// Packet blocks. tshark counts custom blocks as frames too, capinfos does not.
pub fn frame_count(truth: &Value) -> usize {
    if let Some(count) = number(&truth["capinfos"]["Number of packets"]) {
        return count as usize;
    }
    match &truth["frames"] {
        Value::Object(kinds) => kinds.values().filter_map(number).sum::<i128>() as usize,
        count => number(count).unwrap_or(-1) as usize,
    }
}

/// The keys that are always there.
fn shape(rows: &[Value], odd: &mut Vec<String>) {
    let always = ["frame", "time_ns", "len", "caplen", "stack"];
    let roce = [
        "version",
        "opcode",
        "opcode_value",
        "dest_qp",
        "psn",
        "ack_req",
        "solicited",
        "migreq",
        "pad",
        "pkey",
        "becn",
        "fecn",
        "payload_len",
        "icrc",
    ];
    for row in rows {
        let n = &row["frame"];
        odd.extend(missing(row, &always).map(|key| format!("frame {n}: no key {key}")));
        let more = row["roce_more"].as_array().into_iter().flatten();
        for packet in row.get("roce").into_iter().chain(more) {
            // Of a packet that could not be decoded `error` says why, and the rest is what is known.
            if packet.get("error").is_none() {
                odd.extend(missing(packet, &roce).map(|key| format!("frame {n}: no roce.{key}")));
            }
        }
        for part in row["iwarp"].as_array().into_iter().flatten() {
            // Which object an `error` stands in is said too.
            if !matches!(part["kind"].as_str(), Some("mpa_req" | "mpa_rep" | "fpdu" | "error")) {
                odd.push(format!("frame {n}: iwarp of kind {}", part["kind"]));
            }
            if part["kind"] == "fpdu" && part.get("error").is_none() {
                let keys = ["rdmap_opcode", "last", "ulpdu_len", "crc"];
                odd.extend(missing(part, &keys).map(|key| format!("frame {n}: no iwarp.{key}")));
            }
        }
    }
}

fn missing<'a>(object: &'a Value, keys: &'a [&str]) -> impl Iterator<Item = &'a str> {
    keys.iter().copied().filter(|key| object.get(*key).is_none())
}

/// Time, lengths and layers of the first 400 frames.
fn frame_list(truth: &Value, rows: &[Value], odd: &mut Vec<String>) {
    let list = truth["frame_list"].as_array().map_or(&[][..], Vec::as_slice);
    if list.len() != rows.len().min(400) {
        return;
    }
    for (want, row) in list.iter().zip(rows) {
        let text = |i: usize| want[i].as_str().unwrap_or_default();
        let n = text(0);
        let time = nanoseconds(text(1));
        if number(&row["time_ns"]) != time {
            odd.push(format!("frame {n}: time_ns {} != {time:?}", row["time_ns"]));
        }
        for (key, i) in [("len", 3), ("caplen", 4)] {
            if number(&row[key]).is_none() || number(&row[key]) != number(&want[i]) {
                odd.push(format!("frame {n}: {key} {} != {}", row[key], want[i]));
            }
        }
        let layers = layers(text(2));
        let have: Vec<&str> = row["stack"]
            .as_array()
            .into_iter()
            .flatten()
            .filter_map(Value::as_str)
            .filter(|name| has_layer(name))
            .collect();
        if !have.starts_with(&layers) {
            odd.push(format!("frame {n}: stack {} does not begin with {layers:?}", row["stack"]));
        }
    }
}

/// Seconds with a fraction, as tshark prints them; the empty text is a frame without a time.
pub fn nanoseconds(text: &str) -> Option<i128> {
    let (seconds, fraction) = text.split_once('.').unwrap_or((text, "0"));
    let whole: i128 = seconds.parse().ok()?;
    let fraction: i128 = format!("{fraction:0<9}").parse().ok()?;
    Some(whole * 1_000_000_000 + if text.starts_with('-') { -fraction } else { fraction })
}

/// What `stack` must begin with, up to the first layer that has no name there.
pub fn layers(protocols: &str) -> Vec<&'static str> {
    protocols
        .split(':')
        .filter(|p| !matches!(*p, "ethertype" | "frame" | "raw") && !p.starts_with("ipv6."))
        .map_while(|p| LAYERS.iter().find(|(theirs, _)| *theirs == p).map(|(_, ours)| *ours))
        .collect()
}

/// Whether [`layers`] may name a layer of this name of ours.
pub fn has_layer(name: &str) -> bool {
    LAYERS.iter().any(|&(_, ours)| ours == name)
}

/// Lengths and RoCE fields of the frames that have a row.
fn fields(truth: &Value, rows: &[Value], odd: &mut Vec<String>) {
    for want in truth["rows"].as_array().into_iter().flatten() {
        let n = number(&want["frame.number"]).unwrap_or(0);
        let Some(row) = usize::try_from(n - 1).ok().and_then(|i| rows.get(i)) else {
            odd.push(format!("frame {n} of the truth is not there"));
            continue;
        };
        for (key, theirs) in [("len", "frame.len"), ("caplen", "frame.cap_len")] {
            if number(&row[key]) != number(&want[theirs]) {
                odd.push(format!("frame {n}: {key} {} != {}", row[key], want[theirs]));
            }
        }
        if want.get("infiniband.bth.opcode").is_some()
            && let Err(why) = roce(want, &row["roce"])
        {
            odd.push(format!("frame {n}: {why}"));
        }
    }
}

/// One RoCE packet: tshark's fields and ours.
fn roce(want: &Value, have: &Value) -> Result<(), String> {
    if !have.is_object() {
        return Err("no roce".to_owned());
    }
    // The first of a field's values: tshark joins what it finds in one frame by commas.
    let theirs = |field: &str| {
        let text = want[format!("infiniband.{field}")].as_str()?;
        Some(text.split(',').next().unwrap_or(text))
    };
    let opcode = theirs("bth.opcode").and_then(parse).unwrap_or(-1);
    // tshark shows AtomicETH's address and key as RETH's.
    let atomic = matches!(opcode & 31, 0x13 | 0x14);
    for (field, path) in ROCE {
        let path = if atomic { path.replace("reth.", "atomic_eth.") } else { (*path).to_owned() };
        let found = path.split('.').fold(have, |value, key| &value[key]);
        let Some(expected) = theirs(field) else {
            let header = field.split('.').next().unwrap_or(field);
            let optional = ["reth", "aeth", "deth", "atomiceth", "atomicacketh", "immdt", "ieth"];
            if !found.is_null() && !atomic && optional.contains(&header) {
                return Err(format!("{path} {found} where there is none"));
            }
            continue;
        };
        let expected = if matches!(*field, "immdt" | "ieth") {
            i128::from_str_radix(expected.trim_start_matches("0x"), 16).ok()
        } else {
            parse(expected)
        };
        if expected.is_none() || number(found) != expected {
            return Err(format!("{path} {found} != {expected:?}"));
        }
    }
    if let Some(syndrome) = theirs("aeth.syndrome").and_then(parse) {
        let kind = ["ACK", "RNR_NAK", "", "NAK"][(syndrome >> 5) as usize & 3];
        let aeth = &have["aeth"];
        if aeth["kind"] != kind || number(&aeth["code"]) != Some(syndrome & 31) {
            return Err(format!("aeth {aeth} != {kind} {}", syndrome & 31));
        }
    }
    Ok(())
}

/// Where from and where to.
type Direction = (String, i128, String, i128);
/// Opcode, Last, length of the ULPDU, and STag and offset or queue, MSN and offset.
type FpduKey = (String, i128, i128, Vec<i128>);

/// FPDUs in their order, each direction for itself.
fn fpdu_sequences(truth: &Value, rows: &[Value], odd: &mut Vec<String>) {
    let wanted = truth["rows"].as_array().map_or(&[][..], Vec::as_slice);
    if !wanted.iter().any(|row| row.get("iwarp_rdma.opcode").is_some()) {
        return;
    }
    let (have, want) = match (our_fpdus(rows), their_fpdus(wanted)) {
        (Ok(have), Ok(want)) => (have, want),
        (have, want) => {
            odd.extend(have.err().into_iter().chain(want.err()));
            return;
        }
    };
    let empty = Vec::new();
    let directions: std::collections::BTreeSet<_> = have.keys().chain(want.keys()).collect();
    for direction in directions {
        let a = have.get(direction).unwrap_or(&empty);
        let b = want.get(direction).unwrap_or(&empty);
        if a != b {
            let same = a.iter().zip(b).take_while(|(x, y)| x == y).count();
            odd.push(format!(
                "{direction:?}: FPDU {same} differs: {:?} != {:?} ({} of {})",
                a.get(same),
                b.get(same),
                a.len(),
                b.len()
            ));
        }
    }
}

fn our_fpdus(rows: &[Value]) -> Result<BTreeMap<Direction, Vec<FpduKey>>, String> {
    let mut out = BTreeMap::<_, Vec<_>>::new();
    for row in rows {
        for part in row["iwarp"].as_array().into_iter().flatten() {
            if part["kind"] != "fpdu" {
                continue;
            }
            let place: &[&str] = if part.get("stag").is_some_and(|v| !v.is_null()) {
                &["stag", "to"]
            } else {
                &["qn", "msn", "mo"]
            };
            let of = |value: &Value, key: &str| {
                number(&value[key]).ok_or_else(|| format!("frame {}: no {key}", row["frame"]))
            };
            let place = place.iter().map(|k| of(part, k)).collect::<Result<_, _>>()?;
            let opcode = part["rdmap_opcode"].as_str().unwrap_or_default().to_owned();
            let end = |key: &str| row[key].as_str().unwrap_or_default().to_owned();
            let direction = (end("src"), of(row, "sport")?, end("dst"), of(row, "dport")?);
            let key = (opcode, of(part, "last")?, of(part, "ulpdu_len")?, place);
            out.entry(direction).or_default().push(key);
        }
    }
    Ok(out)
}

fn their_fpdus(rows: &[Value]) -> Result<BTreeMap<Direction, Vec<FpduKey>>, String> {
    let mut out = BTreeMap::<_, Vec<_>>::new();
    for row in rows {
        let Some(opcodes) = row["iwarp_rdma.opcode"].as_str() else {
            continue;
        };
        let list = |field: &str| {
            let text = row[field].as_str().unwrap_or_default();
            text.split(',').filter_map(parse).collect::<Vec<_>>().into_iter()
        };
        let lacks = || format!("frame {} of the truth lacks a field", row["frame.number"]);
        let (mut tagged, mut last) = (list("iwarp_ddp.tagged_flag"), list("iwarp_ddp.last_flag"));
        let mut len = list("iwarp_mpa.ulpdulength");
        let mut stag = [list("iwarp_ddp.stag"), list("iwarp_ddp.tagged_offset")];
        let mut queue = [list("iwarp_ddp.qn"), list("iwarp_ddp.msn"), list("iwarp_ddp.mo")];
        for opcode in opcodes.split(',') {
            let by_stag = tagged.next().ok_or_else(lacks)? == 1;
            let place = if by_stag { &mut stag[..] } else { &mut queue[..] };
            let place = place.iter_mut().map(Iterator::next).collect::<Option<_>>();
            let name = parse(opcode).and_then(|code| RDMAP.get(code as usize)).ok_or_else(lacks)?;
            let key = (
                (*name).to_owned(),
                last.next().ok_or_else(lacks)?,
                len.next().ok_or_else(lacks)?,
                place.ok_or_else(lacks)?,
            );
            let end = |v4: &str, v6: &str| {
                row[v4].as_str().or(row[v6].as_str()).unwrap_or_default().to_owned()
            };
            let port = |field: &str| number(&row[field]).ok_or_else(lacks);
            let direction = (
                end("ip.src", "ipv6.src"),
                port("tcp.srcport")?,
                end("ip.dst", "ipv6.dst"),
                port("tcp.dstport")?,
            );
            out.entry(direction).or_default().push(key);
        }
    }
    Ok(out)
}

/// How often each.
type Counts = BTreeMap<String, i128>;

fn count(counts: &mut Counts, what: &Value) {
    let what = what.as_str().map_or_else(|| what.to_string(), str::to_owned);
    *counts.entry(what).or_default() += 1;
}

/// The entries of an object of numbers, without those that are 0.
fn wanted(object: &Value) -> Counts {
    let entries = object.as_object().into_iter().flatten();
    let numbers = entries.filter_map(|(k, v)| Some((k.clone(), number(v)?)));
    numbers.filter(|(_, n)| *n != 0).collect()
}

fn same<T: PartialEq + Debug>(what: &str, have: &T, want: &T, odd: &mut Vec<String>) {
    if have != want {
        odd.push(format!("{what} {have:?} != {want:?}"));
    }
}

/// Counts and checksums of the independent decoder.
fn counts(name: &str, truth: &Value, rows: &[Value], odd: &mut Vec<String>) {
    let [mut opcodes, mut icrc, mut cm, mut fpdus, mut crc] = [const { Counts::new() }; 5];
    let mut starts = Counts::new();
    for row in rows {
        if let Some(packet) = row.get("roce").filter(|p| p.is_object()) {
            count(&mut opcodes, &packet["opcode"]);
            count(&mut icrc, &packet["icrc"]);
            let mad = &packet["mad"];
            let attribute = number(&mad["attribute_id"]);
            let named = CM.iter().find(|(id, _)| Some(*id) == attribute);
            if let Some((_, message)) = named
                && number(&mad["mgmt_class"]) == Some(7)
            {
                count(&mut cm, &mad["attribute"]);
                if mad["attribute"] != *message {
                    odd.push(format!(
                        "frame {}: {message} is called {}",
                        row["frame"], mad["attribute"]
                    ));
                }
            }
        }
        for part in row["iwarp"].as_array().into_iter().flatten() {
            if part["kind"] == "fpdu" {
                count(&mut fpdus, &part["rdmap_opcode"]);
                count(&mut crc, &part["crc"]);
            } else {
                count(&mut starts, &part["kind"]);
            }
        }
    }
    if let Some(want) = truth.get("roce") {
        same("opcodes", &opcodes, &wanted(&want["opcodes"]), odd);
        let mut checked = wanted(&want["icrc"]);
        checked.retain(|k, _| k == "good" || k == "bad");
        same("icrc", &icrc, &checked, odd);
        same("cm", &cm, &wanted(&want["cm_mads"]), odd);
    }
    if let Some(want) = truth.get("iwarp") {
        same("fpdus", &fpdus, &wanted(&want["fpdus"]), odd);
        let of = |key: &str| number(&want["mpa_crc"][key]).unwrap_or(0);
        let mut checked = Counts::new();
        checked.insert("good".to_owned(), of("correct"));
        checked.insert("zero".to_owned(), of("zero"));
        checked.insert("bad".to_owned(), of("wrong") - of("zero"));
        checked.retain(|_, n| *n != 0);
        same("crc", &crc, &checked, odd);
        let mut frames = Counts::new();
        for frame in want["mpa_frames"].as_array().into_iter().flatten() {
            let reply = frame["frame"] == "Rep";
            count(&mut frames, &Value::from(if reply { "mpa_rep" } else { "mpa_req" }));
        }
        same("mpa start-up frames", &starts, &frames, odd);
    }
    if let Some(want) = truth.get("icrc_counts") {
        let mut checked = wanted(want);
        if let Some(good) = checked.remove("ok") {
            checked.insert("good".to_owned(), good);
        }
        same("icrc", &icrc, &checked, odd);
    }
    let good = crc.get("good").copied().unwrap_or(0);
    if let Some(walks) = truth["independent_mpa_walk"].as_array() {
        let (mut n, mut correct) = (0, 0);
        for walk in walks {
            // A stream whose markers are off their grid: walked a second time where they are.
            let tail = |w: &Value| number(&w["unparsed_tail"]);
            let quirk = walk.get("quirk_walk").filter(|quirk| tail(quirk) == Some(0));
            let walk =
                if tail(walk).is_some_and(|t| t != 0) { quirk.unwrap_or(walk) } else { walk };
            n += number(&walk["fpdus"]).unwrap_or(0);
            let all = walk["fpdu"].as_array().into_iter().flatten();
            correct += all.filter(|f| f["crc_ok"] == true).count() as i128;
        }
        let have: i128 = fpdus.values().sum();
        if !name.starts_with("smbdirect") {
            same("fpdus, and crc good", &(have, good), &(n, correct), odd);
        }
    }
    let silent = |keys: &[&str]| !keys.iter().any(|key| truth.get(*key).is_some());
    if silent(&["roce", "bth_opcode_counts"]) && !opcodes.is_empty() {
        odd.push(format!("RoCE seen where there is none: {opcodes:?}"));
    }
    if silent(&["iwarp", "independent_mpa_walk", "rdmap_opcode_counts"])
        && (!fpdus.is_empty() || !starts.is_empty())
    {
        odd.push(format!("iWARP seen where there is none: {fpdus:?}, {starts:?}"));
    }
}

/// A number, `true` or `false`, or one in a string, decimal or 0x.
fn number(value: &Value) -> Option<i128> {
    match value {
        Value::Bool(b) => Some((*b).into()),
        Value::Number(n) => n.as_i128(),
        Value::String(s) => parse(s),
        _ => None,
    }
}

fn parse(text: &str) -> Option<i128> {
    match text.strip_prefix("0x") {
        Some(hex) => i128::from_str_radix(hex, 16).ok(),
        None => text.parse().ok(),
    }
}

/// Disagreements that are proven to be mistakes of tshark or of the truth: the rows
/// `` | `FILE` | WHERE | PROOF | `` of `tests/truth-exceptions.md`.
#[derive(Debug, Default)]
pub struct Exceptions {
    listed: Vec<(String, String)>,
    used: Vec<bool>,
}

impl Exceptions {
    /// Reads the list.
    pub fn read() -> Self {
        Self::parse(include_str!("../truth-exceptions.md"))
    }

    fn parse(text: &str) -> Self {
        let mut listed = Vec::new();
        for line in text.lines() {
            let cells: Vec<_> = line.split('|').map(str::trim).collect();
            if let ["", file, place, proof, ""] = cells[..]
                && let Some(file) = file.strip_prefix('`').and_then(|f| f.strip_suffix('`'))
            {
                assert!(
                    !place.is_empty() && !proof.is_empty(),
                    "an exception without proof: {line}"
                );
                listed.push((file.to_owned(), place.to_owned()));
            }
        }
        Self { used: vec![false; listed.len()], listed }
    }

    /// Takes away what is listed. `WHERE` is how a complaint begins, such as `frame 7:`.
    pub fn filter(&mut self, file: &str, mut odd: Vec<String>) -> Vec<String> {
        odd.retain(|complaint| {
            let hit = self.listed.iter().position(|(f, w)| f == file && complaint.starts_with(w));
            hit.inspect(|i| self.used[*i] = true).is_none()
        });
        odd
    }

    /// Entries that excused nothing: they are to be deleted.
    pub fn unused(&self) -> Vec<&(String, String)> {
        self.listed.iter().zip(&self.used).filter(|(_, used)| !**used).map(|(l, _)| l).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tsharks_notations_are_read() {
        assert_eq!(nanoseconds("1796042713.576028000"), Some(1_796_042_713_576_028_000));
        assert_eq!(nanoseconds("-0.5"), Some(-500_000_000));
        assert_eq!(nanoseconds(""), None);
        assert_eq!(
            layers(
                "eth:ethertype:ieee8021ad:ethertype:vlan:ethertype:ipv6:ipv6.fraghdr:udp:infiniband:tcp"
            ),
            ["eth", "vlan", "vlan", "ipv6", "udp"]
        );
        assert_eq!(parse("0x80010000"), Some(0x8001_0000));
        assert_eq!(number(&Value::from(true)), Some(1));
    }

    #[test]
    fn an_exception_excuses_its_complaint_alone() {
        let text = "| file | where | proof |\n|---|---|---|\n| `a.pcap` | frame 7: | because |\n";
        let mut list = Exceptions::parse(text);
        assert_eq!(list.unused().len(), 1);
        let odd = vec!["frame 7: psn".to_owned(), "frame 77: psn".to_owned()];
        assert_eq!(list.filter("b.pcap", odd.clone()), odd);
        assert_eq!(list.unused().len(), 1);
        assert_eq!(list.filter("a.pcap", odd), ["frame 77: psn"]);
        assert!(list.unused().is_empty());
    }
}
