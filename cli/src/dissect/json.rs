//! `--format json`: an object a frame, each on a line of its own.

use userdma_proto::dissect::Frame;

use super::{
    fields::{self, Fields, Value},
    line::Line,
};

/// Appends `frame` and a line feed.
pub(super) fn frame(line: &mut Line, frame: &Frame) {
    line.byte(b'{');
    fields::frame(&mut Json(line), frame);
    line.close_with(b'}');
    line.byte(b'\n');
}

/// Each member ends with a comma; what closes takes the last one's place.
struct Json<'a>(&'a mut Line);

impl Json<'_> {
    /// Keys are plain names: nothing in them needs an escape.
    #[inline]
    fn key(&mut self, key: &'static str) {
        self.0.byte(b'"');
        self.0.text(key);
        self.0.text("\":");
    }

    #[inline]
    fn quoted(&mut self, write: impl FnOnce(&mut Line)) {
        self.0.byte(b'"');
        write(self.0);
        self.0.byte(b'"');
    }

    fn list<T>(&mut self, items: impl Iterator<Item = T>, mut write: impl FnMut(&mut Self, T)) {
        self.0.byte(b'[');
        for item in items {
            write(self, item);
            self.0.byte(b',');
        }
        self.0.close_with(b']');
    }
}

impl Fields for Json<'_> {
    #[inline]
    fn value(&mut self, key: &'static str, value: Value<'_>) {
        self.key(key);
        match value {
            Value::Null => self.0.text("null"),
            Value::Bool(true) => self.0.text("true"),
            Value::Bool(false) => self.0.text("false"),
            Value::Num(n) => self.0.num(n),
            Value::Key(n, _) => self.0.num(n),
            Value::Wide(n) => self.quoted(|line| line.hex(n)),
            Value::Text(text) => string(self.0, text),
            Value::Unnamed(n, digits) => self.quoted(|line| line.hex_of(n.into(), digits)),
            Value::Ip(ip) => self.quoted(|line| line.ip(ip)),
            Value::Gid(gid) => self.quoted(|line| line.display(gid)),
            Value::Octets(octets) => self.quoted(|line| line.octets(octets)),
            Value::Time(ns) => match i64::try_from(ns) {
                Ok(ns) => self.0.num(ns),
                Err(_) => self.0.num(ns),
            },
            Value::Layers(layers) => self.list(layers.iter(), |json, layer| {
                json.quoted(|line| line.text(layer.name()));
            }),
            Value::Nums(nums) => self.list(nums.iter(), |json, &n| json.0.num(n)),
        }
        self.0.byte(b',');
    }

    #[inline]
    fn open(&mut self, key: &'static str) {
        self.key(key);
        self.0.byte(b'{');
    }

    #[inline]
    fn close(&mut self) {
        self.0.close_with(b'}');
        self.0.byte(b',');
    }

    fn open_list(&mut self, key: &'static str) {
        self.key(key);
        self.0.byte(b'[');
    }

    fn item(&mut self) {
        self.0.byte(b'{');
    }

    fn close_list(&mut self) {
        self.0.close_with(b']');
        self.0.byte(b',');
    }
}

/// A string with its escapes (RFC 8259 §7).
fn string(line: &mut Line, text: &str) {
    line.byte(b'"');
    if text.bytes().all(|octet| octet >= 0x20 && octet != b'"' && octet != b'\\') {
        line.text(text);
    } else {
        for c in text.chars() {
            match c {
                '"' => line.text("\\\""),
                '\\' => line.text("\\\\"),
                '\0'..='\x1f' => line.display(format_args!("\\u{:04x}", u32::from(c))),
                c => line.display(c),
            }
        }
    }
    line.byte(b'"');
}

#[cfg(test)]
mod tests {
    use super::{super::sample::*, *};
    use serde_json::{Value as Json, json};
    use userdma_proto::{
        dissect::{CrcState, IcrcState, Iwarp, Layer, Markers, Operation, Pause},
        wire::{
            iwarp::{
                rdmap::{Opcode, ReadRequest},
                terminate::Terminate,
            },
            roce::{aeth::Aeth, atomic::AtomicEth, reth::Reth},
        },
    };

    fn object(of: &Frame) -> Json {
        let line = written(|line| frame(line, of));
        assert_eq!(line.matches('\n').count(), 1, "{line}");
        serde_json::from_str(&line).unwrap_or_else(|e| panic!("{e}: {line}"))
    }

    #[test]
    fn a_frame_without_rdma_has_what_always_is_there() {
        let mut bare = bare_frame(&[Layer::Eth, Layer::Arp], None);
        (bare.ends, bare.ip, bare.time_ns) = (None, None, None);
        let want =
            json!({"frame": 7, "time_ns": null, "len": 74, "caplen": 74, "stack": ["eth", "arp"]});
        assert_eq!(object(&bare), want);
        bare.stack.clear();
        bare.time_ns = Some(i128::from(i64::MIN) - 1);
        bare.error = Some("a \"quote\",\na \\ and \u{1}".into());
        let line = written(|line| frame(line, &bare));
        assert!(line.contains("\"time_ns\":-9223372036854775809,"), "{line}");
        assert!(
            line.ends_with("\"error\":\"a \\\"quote\\\",\\u000aa \\\\ and \\u0001\"}\n"),
            "{line}"
        );
        assert!(line.contains("\"stack\":[],"), "{line}");
    }

    #[test]
    fn a_write_with_all_that_a_bth_tells() {
        let mut write = headers_of(0x0a);
        write.bth.flags = 0xf0;
        write.bth.ecn = 0xc0;
        write.bth.ack = 0x80;
        write.reth = Some(Reth {
            va: 0x7fff_0000_1234_5678.into(),
            rkey: 0xdead_beef.into(),
            len: 4000.into(),
        });
        let got = object(&roce_frame(roce_of(write, 1021)));
        assert_eq!(
            got,
            json!({
                "frame": 7, "time_ns": 1_500_000_000, "len": 74, "caplen": 74,
                "stack": ["eth", "ipv4", "udp", "bth"],
                "src": "10.0.0.1", "dst": "10.0.0.2", "sport": 49152, "dport": 4791,
                "dscp": 0, "ecn": 0, "ttl": 64,
                "roce": {
                    "version": "2", "opcode": "RC_WRITE_ONLY", "opcode_value": 10,
                    "dest_qp": 18, "psn": 100, "ack_req": true, "solicited": true, "migreq": true,
                    "pad": 3, "tver": 0, "pkey": 65535, "becn": true, "fecn": true,
                    "payload_len": 1021, "icrc": "good",
                    "reth": {"va": "0x7fff000012345678", "rkey": 3735928559u32, "len": 4000}
                }
            })
        );
    }

    #[test]
    fn aeth_tells_kind_code_and_what_it_means() {
        let aeth = |syndrome| {
            let mut ack = headers_of(0x11);
            ack.aeth = Some(Aeth { syndrome, msn: [0, 1, 2] });
            object(&roce_frame(roce_of(ack, 0)))["roce"]["aeth"].clone()
        };
        let want = json!({"kind": "ACK", "code": 31, "credits": null, "syndrome": 31, "msn": 258});
        assert_eq!(aeth(0x1f), want);
        assert_eq!(aeth(0x05)["credits"], 6);
        let want =
            json!({"kind": "RNR_NAK", "code": 0, "wait_us": 655_360, "syndrome": 32, "msn": 258});
        assert_eq!(aeth(0x20), want);
        assert_eq!((&aeth(0x62)["kind"], &aeth(0x62)["code"]), (&json!("NAK"), &json!(2)));
        assert_eq!(aeth(0x7f)["reason"], "0x1f");
        assert_eq!(aeth(0x45), json!({"kind": null, "code": 5, "syndrome": 0x45, "msn": 258}));
    }

    #[test]
    fn unknown_opcodes_and_missing_headers_keep_their_keys() {
        let got = object(&roce_frame(roce_of(headers_of(0xe5), 4)));
        assert_eq!(
            (&got["roce"]["opcode"], &got["roce"]["opcode_value"]),
            (&json!("0xe5"), &json!(0xe5))
        );
        let whole = got["roce"].as_object().unwrap().clone();
        let mut broken = roce_of(headers_of(0), 0);
        (broken.headers, broken.icrc) = (None, IcrcState::Absent);
        broken.error = Some("BTH: at offset 0: 12 octets needed, 3 found".into());
        let got = object(&roce_frame(broken));
        for key in
            whole.keys().filter(|key| !["version", "payload_len", "icrc"].contains(&key.as_str()))
        {
            assert_eq!(got["roce"].get(key), Some(&Json::Null), "{key}");
        }
        assert_eq!(got["roce"]["icrc"], "absent");
        assert!(got["roce"]["error"].as_str().unwrap().starts_with("BTH"));
    }

    #[test]
    fn the_rest_of_a_train_is_a_list() {
        let mut train = roce_frame(roce_of(headers_of(0x00), 1024));
        let mut second = headers_of(0x13);
        second.atomic_eth = Some(AtomicEth {
            va: 8.into(),
            rkey: 1.into(),
            swap_add: 2.into(),
            compare: u64::MAX.into(),
        });
        train.roce.push(Box::new(roce_of(second, 0)));
        let got = object(&train);
        assert_eq!(got["roce"]["opcode"], "RC_SEND_FIRST");
        let more = got["roce_more"].as_array().unwrap();
        assert_eq!(more.len(), 1);
        let want =
            json!({"va": "0x8", "rkey": 1, "swap_add": "0x2", "compare": "0xffffffffffffffff"});
        assert_eq!(more[0]["atomic_eth"], want);
    }

    #[test]
    fn fpdus_have_either_form_of_place() {
        let mut read = fpdu_of(untagged(Opcode::READ_REQUEST, 1, 3), 28);
        read.operation = Operation::ReadRequest(ReadRequest::new(
            (userdma_proto::wire::ids::Stag(5), 6),
            7,
            (userdma_proto::wire::ids::Stag(8), 9),
        ));
        let mut write = fpdu_of(tagged(Opcode::WRITE, false, 0x1_0000_0000), 100);
        (write.crc, write.crc_in_use) = (CrcState::Bad, None);
        write.markers = Markers::OffGrid;
        let found = vec![Iwarp::Fpdu(read), Iwarp::Fpdu(write), Iwarp::Error("lost".into())];
        let got = object(&iwarp_frame(found));
        assert_eq!(got["tcp"], json!({"seq": 1000, "ack": 2000, "flags": 24, "payload_len": 100}));
        assert_eq!(
            got["iwarp"],
            json!([
                {
                    "kind": "fpdu", "rdmap_opcode": "READ_REQUEST", "last": true,
                    "ulpdu_len": 46, "payload_len": 28, "crc": "zero", "crc_in_use": false,
                    "qn": 1, "msn": 3, "mo": 0,
                    "sink_stag": 5, "sink_to": "0x6", "size": 7, "source_stag": 8, "source_to": "0x9"
                },
                {
                    "kind": "fpdu", "rdmap_opcode": "RDMA_WRITE", "last": false,
                    "ulpdu_len": 114, "payload_len": 100, "crc": "bad", "crc_in_use": null,
                    "markers": "off_grid", "stag": 0x1234, "to": "0x100000000"
                },
                {"kind": "error", "error": "lost"}
            ])
        );
    }

    #[test]
    fn a_terminate_is_read_both_ways() {
        // siw: WRITE to a wrong STag.
        let octets = [
            0x11, 0, 3, 0, 0, 0x64, 0xc1, 0x40, 0x23, 0x40, 0xa4, 0, 0, 0, 0x7f, 0x71, 0x2c, 9,
            0x70, 0,
        ];
        let mut end = fpdu_of(untagged(Opcode::TERMINATE, 2, 1), 20);
        end.operation =
            Operation::Terminate(Box::new(Terminate::parse(&octets).unwrap()), octets.to_vec());
        let got = object(&iwarp_frame(vec![Iwarp::Fpdu(end)]));
        let got = &got["iwarp"][0]["terminate"];
        assert_eq!(got["meant"], "siw");
        assert_eq!(got["rfc"]["m"], false);
        assert_eq!(
            got["siw"],
            json!({
                "layer": 1, "etype": 1, "code": 0, "text": "DDP tagged buffer error: invalid STag",
                "m": true, "d": true, "r": false
            })
        );
        assert_eq!(got["segment_len"], 100);
        assert_eq!(got["segment"]["stag"], 0x2340_a400);
        assert_eq!(got["octets"], "110003000064c1402340a40000007f712c097000");
    }

    #[test]
    fn pauses() {
        let mut paused = bare_frame(&[Layer::Eth, Layer::Pause], None);
        (paused.ends, paused.ip) = (None, None);
        paused.pause = Some(Pause::Link(65535));
        assert_eq!(object(&paused)["pause"], json!({"quanta": 65535}));
        paused.pause = Some(Pause::Priorities(0b1001, [1, 0, 0, 65535, 0, 0, 0, 0]));
        let want = json!({"enabled": 9, "quanta": [1, 0, 0, 65535, 0, 0, 0, 0]});
        assert_eq!(object(&paused)["pfc"], want);
    }
}
