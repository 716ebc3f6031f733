//! `-v`: every field of a frame, a line each, below the frame's own line.

use userdma_proto::dissect::Frame;

use super::{
    fields::{self, Fields, Value},
    line::{Line, Style},
};

/// Columns that the frame's own line is ahead.
const MARGIN: usize = 8;

/// Appends the fields of `frame`.
pub(super) fn frame(line: &mut Line, frame: &Frame) {
    fields::frame(&mut Tree { line, depth: 0, list: ("", 0) }, frame);
}

struct Tree<'a> {
    line: &'a mut Line,
    depth: usize,
    /// The list that is open, and how many items it had.
    list: (&'static str, usize),
}

impl Tree<'_> {
    fn indent(&mut self) {
        let mark = self.line.mark();
        self.line.pad_from(mark, MARGIN + 2 * self.depth);
    }

    fn heading(&mut self, write: impl FnOnce(&mut Line)) {
        self.indent();
        self.line.paint(Style::Name, write);
        self.line.byte(b'\n');
        self.depth += 1;
    }
}

impl Fields for Tree<'_> {
    fn value(&mut self, key: &'static str, value: Value<'_>) {
        self.indent();
        let line = &mut *self.line;
        line.paint(Style::Dim, |line| {
            line.text(key);
            line.byte(b':');
        });
        line.byte(b' ');
        match value {
            Value::Text(text) if key == "error" || text == "bad" => {
                line.paint(Style::Bad, |line| line.text(text));
            }
            value => plain(line, value),
        }
        line.byte(b'\n');
    }

    fn open(&mut self, key: &'static str) {
        self.heading(|line| line.text(key));
    }

    fn close(&mut self) {
        self.depth -= 1;
    }

    fn open_list(&mut self, key: &'static str) {
        self.list = (key, 0);
    }

    fn item(&mut self) {
        self.list.1 += 1;
        let (key, n) = self.list;
        self.heading(|line| {
            line.text(key);
            line.byte(b' ');
            line.num(n);
        });
    }

    fn close_list(&mut self) {}
}

fn plain(line: &mut Line, value: Value<'_>) {
    match value {
        Value::Null => line.byte(b'-'),
        Value::Bool(true) => line.text("yes"),
        Value::Bool(false) => line.text("no"),
        Value::Num(n) => line.num(n),
        Value::Key(n, digits) | Value::Unnamed(n, digits) => line.hex_of(n.into(), digits),
        Value::Wide(n) => line.hex_of(n, 16),
        Value::Text(text) => line.text(text),
        Value::Ip(ip) => line.ip(ip),
        Value::Gid(gid) => line.display(gid),
        Value::Octets([]) => line.byte(b'-'),
        Value::Octets(octets) => line.octets(octets),
        Value::Time(ns) => line.num(ns),
        Value::Layers(layers) => {
            for (i, layer) in layers.iter().enumerate() {
                line.text(if i == 0 { "" } else { " " });
                line.text(layer.name());
            }
        }
        Value::Nums(nums) => {
            for (i, &n) in nums.iter().enumerate() {
                line.text(if i == 0 { "" } else { " " });
                line.num(n);
            }
        }
    }
}
