//! Content that both sides can compute: a function of the seed, the operation, the direction and
//! the message. And the check that says where content differs.

use std::fmt;

/// The golden ratio in 64 bits: the step of splitmix64.
const STEP: u64 = 0x9e37_79b9_7f4a_7c15;

/// The output function of splitmix64 (Steele, Lea, Flood 2014): every bit of `x` reaches every bit
/// of the result.
const fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// A stream of octets without end. Two keys that differ in any of their parts give streams that
/// have nothing to do with each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Content(u64);

impl Content {
    /// The content of message `message` of operation `op` in direction `direction` under `seed`.
    pub(crate) const fn new(seed: u64, op: u8, direction: u8, message: u64) -> Self {
        let place = ((op as u64) << 8 | direction as u64).wrapping_mul(STEP);
        Self(mix(mix(seed ^ mix(place)).wrapping_add(mix(message.wrapping_add(STEP)))))
    }

    /// Word number `index` of the stream.
    pub(crate) const fn word(self, index: u64) -> u64 {
        mix(self.0.wrapping_add(index.wrapping_add(1).wrapping_mul(STEP)))
    }

    /// Writes the stream's beginning over `buf`.
    pub(crate) fn fill(self, buf: &mut [u8]) {
        for (i, chunk) in buf.chunks_mut(8).enumerate() {
            chunk.copy_from_slice(&self.word(i as u64).to_le_bytes()[..chunk.len()]);
        }
    }

    /// Where `found` first differs from the stream's beginning: offset, octet expected, octet
    /// found.
    pub(crate) fn verify(self, found: &[u8]) -> Result<(), (usize, u8, u8)> {
        for (i, chunk) in found.chunks(8).enumerate() {
            let expected = self.word(i as u64).to_le_bytes();
            let expected = &expected[..chunk.len()];
            if expected != chunk
                && let Some(at) = expected.iter().zip(chunk).position(|(a, b)| a != b)
            {
                return Err((i * 8 + at, expected[at], chunk[at]));
            }
        }
        Ok(())
    }
}

/// What of a message was wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Aspect {
    /// An octet of its content.
    Content,
    /// Its length.
    Length,
    /// What kind of completion it was (a receive, a receive with immediate).
    Kind,
    /// Its immediate data.
    Immediate,
    /// Whether it asked for a solicited event (1) or not (0).
    Solicited,
    /// The key that it revoked (0: none).
    Invalidated,
    /// Whether the revoked key still worked (1) or not (0).
    StillValid,
    /// The word before an atomic.
    OldValue,
    /// The word after all atomics.
    FinalValue,
    /// An octet of memory that was only to be read.
    Source,
}

impl Aspect {
    const ALL: [(Self, u8, &'static str); 10] = [
        (Self::Content, 1, "content"),
        (Self::Length, 2, "length"),
        (Self::Kind, 3, "kind of completion"),
        (Self::Immediate, 4, "immediate data"),
        (Self::Solicited, 5, "solicited event"),
        (Self::Invalidated, 6, "revoked key"),
        (Self::StillValid, 7, "validity of the revoked key"),
        (Self::OldValue, 8, "value before"),
        (Self::FinalValue, 9, "value after"),
        (Self::Source, 10, "content of the source"),
    ];

    /// Its number in a report.
    pub(crate) fn code(self) -> u8 {
        Self::ALL.iter().find(|(a, ..)| *a == self).map_or(0, |(_, code, _)| *code)
    }

    /// The aspect with that number.
    pub(crate) fn from_code(code: u8) -> Option<Self> {
        Self::ALL.iter().find(|(_, c, _)| *c == code).map(|(a, ..)| *a)
    }

    /// In words.
    pub(crate) fn name(self) -> &'static str {
        Self::ALL.iter().find(|(a, ..)| *a == self).map_or("", |(_, _, name)| name)
    }

    /// Whether the mismatch has a place within the message.
    const fn has_offset(self) -> bool {
        matches!(self, Self::Content | Self::Source)
    }
}

/// Something that is not what it should be, and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mismatch {
    /// Number of the message within its operation and direction, from 0.
    pub(crate) message: u64,
    /// What of it.
    pub(crate) aspect: Aspect,
    /// Offset in the message, in octets, where the aspect is content.
    pub(crate) offset: u64,
    /// What should be there.
    pub(crate) expected: u64,
    /// What is there.
    pub(crate) found: u64,
}

impl Mismatch {
    /// A mismatch of anything but content.
    pub(crate) const fn of(aspect: Aspect, message: u64, expected: u64, found: u64) -> Self {
        Self { message, aspect, offset: 0, expected, found }
    }

    /// A mismatch of content, as [`Content::verify`] found it.
    pub(crate) fn content(aspect: Aspect, message: u64, place: (usize, u8, u8)) -> Self {
        let (offset, expected, found) = place;
        Self {
            message,
            aspect,
            offset: offset as u64,
            expected: expected.into(),
            found: found.into(),
        }
    }
}

impl fmt::Display for Mismatch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "message {}, ", self.message)?;
        if self.aspect.has_offset() {
            write!(f, "offset {}", self.offset)?;
            if self.aspect == Aspect::Source {
                write!(f, " of the source")?;
            }
        } else {
            write!(f, "{}", self.aspect.name())?;
        }
        write!(f, ": expected {:#04x}, found {:#04x}", self.expected, self.found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first outputs of splitmix64 for seed 1234567, as published with the generator.
    #[test]
    fn the_mixer_is_splitmix64() {
        let outputs: Vec<u64> = (0..3).map(|i| Content(1_234_567).word(i)).collect();
        assert_eq!(
            outputs,
            [6_457_827_717_110_365_317, 3_203_168_211_198_807_973, 9_817_491_932_198_370_423]
        );
    }

    #[test]
    fn what_was_filled_verifies_and_one_flipped_bit_is_found() {
        let content = Content::new(1, 2, 0, 3);
        for len in [0, 1, 7, 8, 9, 1000] {
            let mut buf = vec![0; len];
            content.fill(&mut buf);
            assert_eq!(content.verify(&buf), Ok(()));
            for at in 0..len {
                let good = buf[at];
                buf[at] ^= 0x10;
                assert_eq!(content.verify(&buf), Err((at, good, good ^ 0x10)));
                buf[at] = good;
            }
        }
    }

    #[test]
    fn every_part_of_the_key_counts() {
        let keys = [
            Content::new(0, 0, 0, 0),
            Content::new(1, 0, 0, 0),
            Content::new(0, 1, 0, 0),
            Content::new(0, 0, 1, 0),
            Content::new(0, 0, 0, 1),
            Content::new(0, 1, 1, 0),
            Content::new(1, 1, 0, 1),
        ];
        for (i, a) in keys.iter().enumerate() {
            for b in &keys[i + 1..] {
                assert_ne!(a.word(0), b.word(0));
            }
        }
    }

    #[test]
    fn a_mismatch_says_where() {
        let m = Mismatch::content(Aspect::Content, 37, (500, 0x12, 0x13));
        assert_eq!(m.to_string(), "message 37, offset 500: expected 0x12, found 0x13");
        let m = Mismatch::of(Aspect::OldValue, 4, 0xabcd, 1);
        assert_eq!(m.to_string(), "message 4, value before: expected 0xabcd, found 0x01");
    }

    #[test]
    fn aspects_survive_a_report() {
        for (aspect, ..) in Aspect::ALL {
            assert_eq!(Aspect::from_code(aspect.code()), Some(aspect));
            assert!(!aspect.name().is_empty());
        }
        assert_eq!(Aspect::from_code(0), None);
    }
}
