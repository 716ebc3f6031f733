//! `userdma dissect`, end to end: files and pipes in, lines and exit status out.
//!
//! What is right is judged elsewhere (`dissect_truth.rs`); here it is how it is told.

mod common;

use std::{
    fs,
    io::{BufRead, BufReader, Read, Write},
    path::{Path, PathBuf},
    process::{Output, Stdio},
    thread,
};

use common::*;
use flate2::{Compression, write::GzEncoder};
use hex_literal::hex;
use serde_json::Value;

/// A SEND of 10 octets and its ACK, between 10.99.0.2 and 10.99.0.3, as Linux's rxe sent them.
const SEND: &[u8] = &hex!(
    "525400990003 525400990002 0800"
    "45000038 60fa4000 4011c4f0 0a630002 0a630003 fcef12b7 00240000"
    "0420ffff 0000003a 80060730 00010203040506070809 0000 81229cd9"
);
const ACK: &[u8] = &hex!(
    "525400990002 525400990003 0800"
    "45000030 0eda4000 40111719 0a630003 0a630002 fcef12b7 001c0000"
    "1100ffff 0000003d 00060730 1f000001 afad64ab"
);
/// As long as a datagram of RoCEv2, but its BTH is not whole.
const SHORT: &[u8] = &hex!(
    "525400990002 525400990003 0800"
    "45000024 0eda4000 40111725 0a630003 0a630002 fcef12b7 00100000 1100ffff 0000003d"
);
const ARP: &[u8] = &hex!(
    "ffffffffffff 525400990002 0806"
    "0001 0800 06 04 0001 525400990002 0a630002 000000000000 0a630003"
);

/// A classic pcap of Ethernet frames, 1 ms apart.
fn pcap(frames: &[&[u8]]) -> Vec<u8> {
    let mut file = hex!("d4c3b2a1 0200 0400 00000000 00000000 00000400 01000000").to_vec();
    for (i, frame) in frames.iter().enumerate() {
        for word in [1_700_000_000, 1000 * i as u32, frame.len() as u32, frame.len() as u32] {
            file.extend(word.to_le_bytes());
        }
        file.extend(*frame);
    }
    file
}

/// A folder of the test's own, gone with it.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("dissect-{name}"));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    fn file(&self, name: &str, octets: &[u8]) -> String {
        let path = self.0.join(name);
        fs::write(&path, octets).unwrap();
        path.to_str().unwrap().to_owned()
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn sample(name: &str) -> String {
    format!("{}/../pcaps/{name}", env!("CARGO_MANIFEST_DIR"))
}

/// Runs with `input` on stdin.
fn run_with(input: &[u8], args: &[&str]) -> Output {
    let mut child = command(args).stdin(Stdio::piped()).spawn().expect("the command starts");
    let mut stdin = child.stdin.take().unwrap();
    let input = input.to_vec();
    let writer = thread::spawn(move || {
        // The command may end before it has read all.
        let _ = stdin.write_all(&input);
    });
    let output = finish(child, args);
    writer.join().unwrap();
    output
}

fn status(output: &Output) -> i32 {
    output.status.code().expect("not ended by a signal")
}

fn lines(output: &Output) -> Vec<String> {
    stdout(output).lines().map(str::to_owned).collect()
}

/// The one line on stderr.
fn complaint(output: &Output) -> String {
    let text = stderr(output);
    assert_eq!(text.lines().count(), 1, "{text}");
    text.trim_end().to_owned()
}

fn golden(name: &str, args: &[&str]) {
    let path = format!("{}/tests/dissect/{name}", env!("CARGO_MANIFEST_DIR"));
    let got = stdout(&run_for(0, args));
    if std::env::var_os("UPDATE_GOLDENS").is_some() {
        fs::write(&path, &got).unwrap();
    }
    let want = fs::read_to_string(&path).unwrap_or_else(|e| panic!("{path}: {e}"));
    assert_eq!(got, want, "{path}: if this change is meant, run the test with UPDATE_GOLDENS=1");
}

#[test]
fn the_form_of_text() {
    let rnr = sample("roce_rnr.pcap");
    golden("roce_rnr.txt", &["dissect", &rnr]);
    golden("roce_rnr_verbose.txt", &["dissect", "--rdma", "--count", "5", "-v", &rnr]);
    let siw = sample("siw_overlooks_first_fpdu.pcap");
    golden("siw_overlooks_first_fpdu.txt", &["dissect", "--time", "delta", &siw]);
    golden(
        "terminate.txt",
        &["dissect", "--rdma", "-t", "epoch", &sample("iwarp_err_rkey_write.pcap")],
    );
}

#[test]
fn json_has_a_line_a_frame_and_its_keys_always() {
    let folder = Folder::new("keys");
    let made = folder.file("x.pcap", &pcap(&[SEND, ARP, ACK]));
    for (file, frames) in
        [(sample("roce_rnr.pcap"), 13), (sample("siw_overlooks_first_fpdu.pcap"), 16), (made, 3)]
    {
        let rows = objects(&run_for(0, &["dissect", "--format", "json", &file]));
        assert_eq!(rows.len(), frames, "{file}");
        for (row, number) in rows.iter().zip(1..) {
            assert_eq!(row["frame"], number);
            for key in ["time_ns", "len", "caplen"] {
                assert!(row[key].is_u64(), "{key}: {row}");
            }
            assert!(row["stack"].as_array().is_some_and(|stack| stack[0] == "eth"), "{row}");
            if let Some(roce) = row.get("roce") {
                for key in ["opcode_value", "dest_qp", "psn", "pad", "pkey", "payload_len"] {
                    assert!(roce[key].is_u64(), "{key}: {row}");
                }
                for key in ["ack_req", "solicited", "migreq", "becn", "fecn"] {
                    assert!(roce[key].is_boolean(), "{key}: {row}");
                }
                for key in ["version", "opcode", "icrc"] {
                    assert!(roce[key].is_string(), "{key}: {row}");
                }
            }
            for found in row.get("iwarp").and_then(Value::as_array).into_iter().flatten() {
                assert!(found["kind"].is_string(), "{row}");
            }
        }
    }
}

#[test]
fn a_packet_in_numbers() {
    let folder = Folder::new("numbers");
    let mut broken = SEND.to_vec();
    broken[60] ^= 1;
    let file = folder.file("x.pcap", &pcap(&[SEND, ACK, &broken]));
    let rows = objects(&run_for(0, &["dissect", "-f", "json", &file]));
    assert_eq!(rows[0]["time_ns"], 1_700_000_000_000_000_000u64);
    assert_eq!((&rows[0]["src"], &rows[0]["dport"]), (&"10.99.0.2".into(), &4791.into()));
    let roce = &rows[0]["roce"];
    assert_eq!((&roce["opcode"], &roce["icrc"]), (&"RC_SEND_ONLY".into(), &"good".into()));
    assert_eq!(
        (&roce["psn"], &roce["pad"], &roce["payload_len"]),
        (&0x60730.into(), &2.into(), &10.into())
    );
    assert_eq!(rows[1]["roce"]["aeth"]["kind"], "ACK");
    assert_eq!(rows[1]["roce"]["aeth"]["msn"], 1);
    assert_eq!(rows[2]["roce"]["icrc"], "bad");
    // A checksum that is wrong was decoded all the same.
    let text = lines(&run_for(0, &["dissect", &file]));
    assert!(text[2].contains("ICRC BAD") && !text[0].contains("ICRC"), "{text:?}");
}

#[test]
fn stdin_gives_what_the_file_gives() {
    let path = sample("roce_rnr.pcap");
    let octets = fs::read(&path).unwrap();
    let mut gzip = GzEncoder::new(Vec::new(), Compression::fast());
    gzip.write_all(&octets).unwrap();
    let gzip = gzip.finish().unwrap();
    for format in ["text", "json"] {
        let from_file = run_for(0, &["dissect", "--format", format, &path]);
        for input in [&octets, &gzip] {
            let from_pipe = run_with(input, &["dissect", "--format", format, "-"]);
            assert_eq!((status(&from_pipe), stderr(&from_pipe)), (0, String::new()));
            assert_eq!(stdout(&from_pipe), stdout(&from_file));
        }
        let mut redirected = command(&["dissect", "--format", format, "-"]);
        redirected.stdin(fs::File::open(&path).unwrap());
        assert_eq!(redirected.output().unwrap().stdout, from_file.stdout);
    }
}

#[test]
fn lines_come_as_frames_come() {
    let args = ["dissect", "--format", "json", "-"];
    let mut child = command(&args).stdin(Stdio::piped()).spawn().unwrap();
    let mut stdin = child.stdin.take().unwrap();
    let mut rows = BufReader::new(child.stdout.take().unwrap());
    let mut all = pcap(&[SEND, ACK, SEND, ACK]);
    let rest = all.split_off(24 + 16 + SEND.len());
    let mut sent = all;
    for next in [&rest[..16 + ACK.len()], &rest[16 + ACK.len()..]] {
        stdin.write_all(&sent).unwrap();
        sent = next.to_vec();
        // With the pipe still open: it blocks where the line is held back.
        let mut line = String::new();
        rows.read_line(&mut line).unwrap();
        assert!(line.starts_with("{\"frame\":"), "{line}");
    }
    stdin.write_all(&sent).unwrap();
    drop(stdin);
    let mut more = String::new();
    rows.read_to_string(&mut more).unwrap();
    assert_eq!(more.lines().count(), 2);
    assert_eq!(status(&finish(child, &args)), 0);
}

#[test]
fn a_capture_that_ends_early_is_told_and_what_came_before_is_printed() {
    let whole = pcap(&[SEND, ACK, SEND]);
    let folder = Folder::new("early");
    for cut in [1, 20, SEND.len() + 5] {
        let file = folder.file("cut.pcap", &whole[..whole.len() - cut]);
        let output = run_for(1, &["dissect", "--format", "json", &file]);
        assert_eq!(objects(&output).len(), 2, "{cut}");
        let said = complaint(&output);
        assert!(said.starts_with(&format!("error: {file}: the capture ends early: ")), "{said}");
        assert!(said.ends_with("; 2 frames before that"), "{said}");
        let piped = run_with(&whole[..whole.len() - cut], &["dissect", "-"]);
        assert_eq!((status(&piped), lines(&piped).len()), (1, 2));
        assert!(complaint(&piped).starts_with("error: stdin: the capture ends early: "));
    }
}

#[test]
fn frames_that_cannot_be_decoded_are_told_in_one_line() {
    let folder = Folder::new("undecoded");
    let file = folder.file("x.pcap", &pcap(&[SEND, SHORT, ACK, SHORT]));
    let output = run_for(1, &["dissect", "--format", "json", &file]);
    let rows = objects(&output);
    assert_eq!(rows.len(), 4);
    let errors: Vec<_> = rows.iter().map(|row| row["roce"]["error"].as_str()).collect();
    assert!(
        errors[0].is_none() && errors[1].is_some() && errors[2].is_none() && errors[3].is_some()
    );
    // The keys are there all the same.
    assert!(rows[1]["roce"].as_object().unwrap().contains_key("psn"));
    let why = errors[1].unwrap();
    assert_eq!(
        complaint(&output),
        format!("error: {file}: 2 frames could not be decoded (the first: frame 2: {why})")
    );
    let text = lines(&run_for(1, &["dissect", &file]));
    assert!(text[1].contains("error: "), "{text:?}");
    // Both: the end is what matters more, the rest is not lost.
    let early = folder.file("y.pcap", &pcap(&[SHORT, ACK])[..24 + 16 + SHORT.len() + 3]);
    let said = complaint(&run_for(1, &["dissect", &early]));
    assert!(
        said.contains("; 1 frame before that, of which 1 frame could not be decoded"),
        "{said}"
    );
}

/// An FPDU waits for one that never comes, until its frame can wait no longer.
#[test]
fn octets_that_no_frame_tells_of_are_told_at_the_end() {
    let segment = |src: u8, seq: u32, payload: &[u8]| {
        let mut frame = hex!(
            "525400990003 525400990002 0800 45000000 00004000 4006 0000 0a630000 0a630000"
            "1c061c06 00000000 00000001 5010ffff 00000000"
        )
        .to_vec();
        frame[17] = (40 + payload.len()) as u8;
        (frame[29], frame[33]) = (src, 5 - src);
        frame[38..42].copy_from_slice(&seq.to_be_bytes());
        frame.extend(payload);
        frame
    };
    let [request, reply] = [b"MPA ID Req Frame\0\x01\0\0", b"MPA ID Rep Frame\0\x01\0\0"];
    let fpdu = hex!("0013 4143 00000000 00000000 00000002 00000000 78 000000 00000000");
    let start = [segment(2, 1, request), segment(3, 1, reply), segment(2, 100, &fpdu)];
    let mut frames: Vec<&[u8]> = start.iter().map(|frame| &frame[..]).collect();
    frames.resize(2000, SEND);
    let output = run_with(&pcap(&frames), &["dissect", "-"]);
    assert_eq!((status(&output), lines(&output).len()), (1, 2000));
    assert_eq!(
        complaint(&output),
        "error: stdin: 28 octets of iWARP could not be decoded: others before them are not in the \
         capture"
    );
}

#[test]
fn what_is_no_capture_is_refused() {
    let folder = Folder::new("refused");
    let text = folder.file("x.txt", b"this is no capture, but a text of some length\n");
    let empty = folder.file("empty.pcap", b"");
    let snoop = folder.file("x.snoop", &hex!("736e6f6f70000000 00000002 00000004"));
    let missing = folder.0.join("missing.pcap").to_str().unwrap().to_owned();
    let directory = folder.0.to_str().unwrap().to_owned();
    for (file, why) in [
        (&text, "not a pcap or pcapng capture"),
        (&empty, ""),
        (&snoop, "not a pcap or pcapng capture"),
        (&missing, "no such file"),
        (&directory, "is a directory"),
    ] {
        let output = run_for(2, &["dissect", file]);
        assert_eq!(stdout(&output), "");
        let said = complaint(&output);
        assert!(said.starts_with(&format!("error: {file}: {why}")), "{said}");
    }
    let output = run_with(b"no capture either\n", &["dissect", "-"]);
    assert_eq!(status(&output), 2);
    assert!(complaint(&output).starts_with("error: stdin: not a pcap"), "{}", stderr(&output));
}

#[test]
fn wrong_arguments_are_refused() {
    let file = sample("roce_rnr.pcap");
    for args in [
        &["dissect"][..],
        &["dissect", &file, "--format", "xml"],
        &["dissect", &file, "--roce-port", "0"],
        &["dissect", &file, "--roce-port", "65536"],
        &["dissect", &file, "--count", "0"],
        &["dissect", &file, "--time", "local"],
        &["dissect", &file, &file],
    ] {
        assert_eq!(stdout(&run_for(2, args)), "", "{args:?}");
    }
}

#[test]
fn a_reader_that_goes_away_is_no_failure() {
    let folder = Folder::new("head");
    let file = folder.file("x.pcap", &pcap(&vec![SEND; 20_000]));
    let args = ["dissect", &file];
    let mut child = command(&args).spawn().unwrap();
    let mut first = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut first).unwrap();
    assert!(first.contains("RC_SEND_ONLY"), "{first}");
    let output = finish(child, &args);
    assert_eq!((status(&output), stderr(&output)), (0, String::new()));
}

#[test]
fn a_file_is_left_at_the_first_interrupt() {
    let folder = Folder::new("interrupt");
    let file = folder.file("x.pcap", &pcap(&vec![SEND; 50_000]));
    let args = ["dissect", "--format", "json", &file];
    let mut child = command(&args).spawn().unwrap();
    let mut rows = BufReader::new(child.stdout.take().unwrap());
    let mut first = String::new();
    rows.read_line(&mut first).unwrap();
    // It waits for the pipe to be read, with most of the file still ahead.
    signal(&child, "INT");
    let mut more = String::new();
    rows.read_to_string(&mut more).unwrap();
    assert!(more.ends_with("}\n") && more.lines().count() < 49_999, "{}", more.lines().count());
    let output = finish(child, &args);
    assert_eq!((status(&output), stderr(&output)), (130, String::new()));
}

#[test]
fn options_choose_frames() {
    let folder = Folder::new("options");
    let mut other = SEND.to_vec();
    // UDP port 4792.
    other[37] += 1;
    let file = folder.file("x.pcap", &pcap(&[ARP, SEND, &other, ACK]));
    let numbers = |args: &[&str]| {
        let mut all = vec!["dissect", "--format", "json", &file];
        all.extend(args);
        let rows = objects(&run_for(0, &all));
        rows.iter().map(|row| row["frame"].as_u64().unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(numbers(&[]), [1, 2, 3, 4]);
    assert_eq!(numbers(&["--rdma"]), [2, 4]);
    assert_eq!(numbers(&["--rdma", "--roce-port", "4792", "--roce-port", "5000"]), [2, 3, 4]);
    assert_eq!(numbers(&["--count", "3"]), [1, 2, 3]);
    assert_eq!(numbers(&["--rdma", "-c", "1"]), [2]);
    let text = lines(&run_for(0, &["dissect", "--rdma", "--roce-port", "4792", &file]));
    assert!(text[1].contains(" > 10.99.0.3:4792  QP "), "{text:?}");
    // What was not asked for is not said.
    assert_eq!(stderr(&run_for(0, &["dissect", &file])), "");
    let verbose = run_for(0, &["dissect", "-v", "--rdma", &file]);
    assert_eq!(complaint(&verbose), "4 frames, 2 RoCE packets");
    assert!(stdout(&verbose).contains("\n          psn: 395056\n"), "{}", stdout(&verbose));
}

#[test]
fn colours_only_where_asked_for() {
    let file = sample("roce_rnr.pcap");
    let colourful = |args: &[&str], no_color: Option<&str>| {
        let mut all = vec!["dissect", &file];
        all.extend(args);
        let mut command = command(&all);
        command.env_remove("NO_COLOR");
        if let Some(value) = no_color {
            command.env("NO_COLOR", value);
        }
        let output = command.output().unwrap();
        assert!(output.status.success());
        output.stdout.contains(&0x1b)
    };
    // A pipe is no terminal.
    assert!(!colourful(&[], None));
    assert!(!colourful(&["--color", "never"], None));
    assert!(colourful(&["--color", "always"], None));
    assert!(colourful(&["--color", "always"], Some("1")));
    assert!(!colourful(&["--color", "always", "--format", "json"], None));
}

#[test]
fn a_pipe_is_read_to_its_end_after_one_interrupt_and_left_after_two() {
    let args = ["dissect", "--format", "json", "-"];
    let start = || {
        let mut child = command(&args).stdin(Stdio::piped()).spawn().unwrap();
        let mut stdin = child.stdin.take().unwrap();
        let mut rows = BufReader::new(child.stdout.take().unwrap());
        let mut capture = pcap(&[SEND, ACK]);
        let rest = capture.split_off(24 + 16 + SEND.len());
        stdin.write_all(&capture).unwrap();
        let mut line = String::new();
        // From here on it waits for more.
        rows.read_line(&mut line).unwrap();
        signal(&child, "INT");
        (child, stdin, rows, rest)
    };
    let (child, mut stdin, mut rows, rest) = start();
    stdin.write_all(&rest).unwrap();
    drop(stdin);
    let mut line = String::new();
    rows.read_line(&mut line).unwrap();
    assert!(line.contains("\"RC_ACK\""), "{line}");
    assert_eq!(status(&finish(child, &args)), 0);

    let (mut child, _stdin, _rows, _) = start();
    // Two signals that are pending at a time are one: it may take a third.
    for _ in 0..1000 {
        if child.try_wait().unwrap().is_some() {
            break;
        }
        signal(&child, "INT");
        thread::sleep(std::time::Duration::from_millis(5));
    }
    assert_eq!(status(&finish(child, &args)), 130);
}
