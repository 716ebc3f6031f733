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
