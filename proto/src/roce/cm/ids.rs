//! Communication IDs and transaction IDs: never twice the same, and hard to guess for those who do
//! not see them.

/// Makes both kinds out of one seed.
#[derive(Debug, Clone)]
pub(super) struct Ids {
    key: [u64; 2],
    comm_ids: u32,
    words: u64,
}

impl Ids {
    /// `seed` comes from the system's generator; with the same seed the same IDs come.
    pub(super) fn new(seed: u64) -> Self {
        let key = [seed, siphash([seed, !seed], 0)];
        Self { key, comm_ids: 0, words: 0 }
    }

    /// A communication ID. Each of the 2^32 comes once before one comes again: they are a
    /// permutation of the numbers in order (four Feistel rounds of SipHash).
    pub(super) fn comm_id(&mut self) -> u32 {
        loop {
            let n = self.comm_ids;
            self.comm_ids = n.wrapping_add(1);
            let (mut left, mut right) = ((n >> 16) as u16, n as u16);
            for round in 0..4 {
                let word = 1 << 63 | round << 16 | u64::from(right);
                (left, right) = (right, left ^ siphash(self.key, word) as u16);
            }
            let id = u32::from(left) << 16 | u32::from(right);
            // 0 stands for none in a REJ.
            if id != 0 {
                return id;
            }
        }
    }

    /// 64 bits: a transaction ID, or a flow label out of them.
    pub(super) fn word(&mut self) -> u64 {
        self.words += 1;
        siphash(self.key, self.words)
    }
}

/// SipHash-2-4 of one word (Aumasson and Bernstein, 2012).
fn siphash(key: [u64; 2], word: u64) -> u64 {
    let mut v = [
        key[0] ^ 0x736f_6d65_7073_6575,
        key[1] ^ 0x646f_7261_6e64_6f6d,
        key[0] ^ 0x6c79_6765_6e65_7261,
        key[1] ^ 0x7465_6462_7974_6573,
    ];
    // The word, then the block that holds its length of 8 octets.
    for block in [word, 8 << 56] {
        v[3] ^= block;
        rounds(&mut v, 2);
        v[0] ^= block;
    }
    v[2] ^= 0xff;
    rounds(&mut v, 4);
    v[0] ^ v[1] ^ v[2] ^ v[3]
}

fn rounds(v: &mut [u64; 4], n: usize) {
    for _ in 0..n {
        v[0] = v[0].wrapping_add(v[1]);
        v[2] = v[2].wrapping_add(v[3]);
        v[1] = v[1].rotate_left(13) ^ v[0];
        v[3] = v[3].rotate_left(16) ^ v[2];
        v[0] = v[0].rotate_left(32);
        v[2] = v[2].wrapping_add(v[1]);
        v[0] = v[0].wrapping_add(v[3]);
        v[1] = v[1].rotate_left(17) ^ v[2];
        v[3] = v[3].rotate_left(21) ^ v[0];
        v[2] = v[2].rotate_left(32);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{collections::BTreeSet, vec::Vec};

    #[test]
    fn siphash_is_that_of_its_authors() {
        // The reference's vector for the key 00 01 .. 0f and the message 00 01 .. 07.
        let key = [0x0706_0504_0302_0100, 0x0f0e_0d0c_0b0a_0908];
        assert_eq!(siphash(key, 0x0706_0504_0302_0100), 0x93f5_f579_9a93_2462);
    }

    #[test]
    fn comm_ids_are_a_permutation() {
        let mut ids = Ids::new(7);
        let first: Vec<u32> = (0..100_000).map(|_| ids.comm_id()).collect();
        assert_eq!(first.iter().collect::<BTreeSet<_>>().len(), first.len());
        assert!(!first.contains(&0));
        // Neighbours tell nothing of each other: half of the bits differ on average.
        let differ: u32 = first.windows(2).map(|w| (w[0] ^ w[1]).count_ones()).sum();
        let mean = f64::from(differ) / (first.len() - 1) as f64;
        assert!((15.8..16.2).contains(&mean), "{mean}");
        let mut others = Ids::new(8);
        let same = first.iter().filter(|&&id| id == others.comm_id()).count();
        assert!(same < 3, "{same}");
    }

    #[test]
    fn the_seed_decides() {
        let (mut a, mut b) = (Ids::new(1), Ids::new(1));
        assert_eq!((a.comm_id(), a.word()), (b.comm_id(), b.word()));
        assert_ne!(a.word(), Ids::new(2).word());
    }
}
