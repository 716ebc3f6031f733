//! Text in the making: octets, and fast ways to append numbers and addresses.

use std::{fmt, net::IpAddr};

const DIGITS: &[u8; 16] = b"0123456789abcdef";

/// What a piece of text says about itself by its colour.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Style {
    /// Wrong: red.
    Bad,
    /// Worth a look: yellow.
    Warn,
    /// What is done: bold.
    Name,
    /// Beside the point: dim.
    Dim,
}

impl Style {
    const fn on(self) -> &'static str {
        match self {
            Self::Bad => "\x1b[1;31m",
            Self::Warn => "\x1b[33m",
            Self::Name => "\x1b[1m",
            Self::Dim => "\x1b[2m",
        }
    }
}

const OFF: &str = "\x1b[0m";

/// Lines in the making.
#[derive(Debug, Default)]
pub(crate) struct Line {
    octets: Vec<u8>,
    /// Octets of escape sequences among them.
    escapes: usize,
    colours: bool,
}

impl Line {
    /// An empty one; with `colours`, [`Line::paint`] has an effect.
    pub(super) fn new(colours: bool) -> Self {
        Self { octets: Vec::with_capacity(80 << 10), escapes: 0, colours }
    }

    pub(super) fn as_bytes(&self) -> &[u8] {
        &self.octets
    }

    pub(super) fn clear(&mut self) {
        self.octets.clear();
        self.escapes = 0;
    }

    #[inline]
    pub(super) fn byte(&mut self, octet: u8) {
        self.octets.push(octet);
    }

    #[inline]
    pub(super) fn text(&mut self, text: &str) {
        self.octets.extend_from_slice(text.as_bytes());
    }

    /// A decimal number.
    #[inline]
    pub(super) fn num<N: itoa::Integer>(&mut self, n: N) {
        self.text(itoa::Buffer::new().format(n));
    }

    /// `0x` and as many digits as the number needs.
    #[inline]
    pub(super) fn hex(&mut self, n: u64) {
        let digits = (16 - n.leading_zeros() as usize / 4).max(1);
        self.hex_of(n, digits);
    }

    /// `0x` and at least so many digits, at most 16.
    pub(super) fn hex_of(&mut self, n: u64, digits: usize) {
        let mut text = *b"0x0000000000000000";
        let digits = digits.max(16 - n.leading_zeros() as usize / 4).min(16);
        for (i, place) in text[2..2 + digits].iter_mut().enumerate() {
            *place = DIGITS[(n >> (4 * (digits - 1 - i)) & 0xf) as usize];
        }
        self.octets.extend_from_slice(&text[..2 + digits]);
    }

    /// Two hex digits an octet.
    pub(super) fn octets(&mut self, octets: &[u8]) {
        self.octets.reserve(2 * octets.len());
        for octet in octets {
            self.byte(DIGITS[usize::from(octet >> 4)]);
            self.byte(DIGITS[usize::from(octet & 0xf)]);
        }
    }

    pub(super) fn ip(&mut self, ip: IpAddr) {
        match ip {
            IpAddr::V4(ip) => {
                let [a, b, c, d] = ip.octets();
                self.num(a);
                for octet in [b, c, d] {
                    self.byte(b'.');
                    self.num(octet);
                }
            }
            IpAddr::V6(ip) => self.display(ip),
        }
    }

    pub(super) fn display(&mut self, it: impl fmt::Display) {
        // Appending to a vector does not fail.
        let _ = fmt::Write::write_fmt(self, format_args!("{it}"));
    }

    /// What `write` appends, in a colour.
    pub(super) fn paint(&mut self, style: Style, write: impl FnOnce(&mut Self)) {
        if !self.colours {
            return write(self);
        }
        self.text(style.on());
        write(self);
        self.text(OFF);
        self.escapes += style.on().len() + OFF.len();
    }

    /// Where the text stands; see [`Line::pad_from`].
    pub(super) fn mark(&self) -> usize {
        self.octets.len() - self.escapes
    }

    /// Characters since `mark`; all that is written in columns is ASCII.
    pub(super) fn width_from(&self, mark: usize) -> usize {
        self.mark() - mark
    }

    /// Spaces until what was written since `mark` is `width` wide.
    pub(super) fn pad_from(&mut self, mark: usize, width: usize) {
        let missing = width.saturating_sub(self.width_from(mark));
        self.octets.resize(self.octets.len() + missing, b' ');
    }

    /// A number, right-aligned.
    pub(super) fn num_right(&mut self, n: u64, width: usize) {
        let mut buffer = itoa::Buffer::new();
        let digits = buffer.format(n);
        self.octets.resize(self.octets.len() + width.saturating_sub(digits.len()), b' ');
        self.text(digits);
    }

    /// Puts `last` in the place of a final comma, or behind what is there.
    pub(super) fn close_with(&mut self, last: u8) {
        match self.octets.last_mut() {
            Some(octet) if *octet == b',' => *octet = last,
            _ => self.byte(last),
        }
    }
}

impl fmt::Write for Line {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        self.text(text);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written(write: impl FnOnce(&mut Line)) -> String {
        let mut line = Line::new(false);
        write(&mut line);
        String::from_utf8(line.octets).unwrap()
    }

    #[test]
    fn numbers() {
        assert_eq!(written(|l| l.num(-5)), "-5");
        for (n, text) in
            [(0, "0x0"), (0xf, "0xf"), (0x10, "0x10"), (u64::MAX, "0xffffffffffffffff")]
        {
            assert_eq!(written(|l| l.hex(n)), text);
            assert_eq!(written(|l| l.hex(n)), format!("{n:#x}"));
        }
        assert_eq!(written(|l| l.hex_of(0x12, 6)), "0x000012");
        assert_eq!(written(|l| l.hex_of(0x1234_5678, 6)), "0x12345678");
        assert_eq!(written(|l| l.octets(&[0, 0xab, 0x1f])), "00ab1f");
        assert_eq!(written(|l| l.num_right(42, 5)), "   42");
        assert_eq!(written(|l| l.num_right(123_456, 5)), "123456");
    }

    #[test]
    fn addresses_print_as_std_prints_them() {
        for ip in ["10.99.0.2", "255.255.255.255", "0.0.0.0", "fe80::1", "::", "::ffff:192.0.2.1"] {
            assert_eq!(written(|l| l.ip(ip.parse().unwrap())), ip);
        }
    }

    #[test]
    fn colours_take_no_width() {
        let mut line = Line::new(true);
        let mark = line.mark();
        line.paint(Style::Bad, |l| l.text("BAD"));
        line.pad_from(mark, 5);
        assert_eq!(line.as_bytes(), b"\x1b[1;31mBAD\x1b[0m  ");
        assert_eq!(written(|l| l.paint(Style::Bad, |l| l.text("BAD"))), "BAD");
    }
}
