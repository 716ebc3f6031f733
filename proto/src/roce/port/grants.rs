//! Our receive buffer, shared out among those who send to it.

use alloc::collections::BTreeMap;
use core::net::SocketAddr;

/// What a peer's socket was told, and how many connections it has.
#[derive(Debug)]
struct Grant {
    octets: u32,
    members: usize,
}

/// How much of the buffer each peer's socket may fill. It is told with the token of a connection, and cannot
/// be taken back as long as there is one: so a part is held back for those who come later. Together they are
/// told no more than there is, but for the [`least`](Grants::least) that everybody gets.
#[derive(Debug)]
pub(super) struct Grants {
    octets: u32,
    /// Octets of all grants.
    granted: u64,
    by_socket: BTreeMap<SocketAddr, Grant>,
}

/// A peer gets so many octets, as long as there are: two trains, one on the way while the other is taken in.
const TRAINS: u32 = 128 << 10;

impl Grants {
    /// Of a buffer that takes so many octets.
    pub(super) fn new(octets: u32) -> Self {
        Self { octets, granted: 0, by_socket: BTreeMap::new() }
    }

    /// What a peer is told where nothing is left.
    fn least(&self) -> u32 {
        (self.octets / 64).clamp(8192, TRAINS).min(self.octets)
    }

    /// A connection to `socket` begins: what it is told. All connections to one socket are told the same.
    pub(super) fn join(&mut self, socket: SocketAddr) -> u32 {
        if let Some(grant) = self.by_socket.get_mut(&socket) {
            grant.members += 1;
            return grant.octets;
        }
        let left = u64::from(self.octets).saturating_sub(self.granted);
        let left = u32::try_from(left).unwrap_or(u32::MAX);
        let octets = (left / 3).max(left.min(TRAINS)).max(self.least());
        self.granted += u64::from(octets);
        self.by_socket.insert(socket, Grant { octets, members: 1 });
        octets
    }

    /// A connection to `socket` is over.
    pub(super) fn leave(&mut self, socket: SocketAddr) {
        let Some(grant) = self.by_socket.get_mut(&socket) else { return };
        grant.members -= 1;
        if grant.members == 0 {
            self.granted -= u64::from(grant.octets);
            self.by_socket.remove(&socket);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn socket(n: u16) -> SocketAddr {
        SocketAddr::new([10, 0, 0, 1].into(), n)
    }

    #[test]
    fn those_who_come_later_find_something_too() {
        let mut grants = Grants::new(3 << 20);
        let told: alloc::vec::Vec<_> = (0..20).map(|n| grants.join(socket(n))).collect();
        assert_eq!(told[0], 1 << 20);
        assert!(told.windows(2).all(|pair| pair[0] >= pair[1]), "{told:?}");
        let least = grants.least();
        assert_eq!(told[19], least);
        let all: u32 = told.iter().filter(|&&octets| octets > least).sum();
        assert!(all <= 3 << 20, "{told:?}");
        // The same socket once more is told the same, and holds it until its last connection ends.
        assert_eq!(grants.join(socket(0)), 1 << 20);
        grants.leave(socket(0));
        assert!(grants.join(socket(99)) < 1 << 20);
        for n in (0..20).chain([99]) {
            grants.leave(socket(n));
        }
        assert_eq!((grants.granted, grants.by_socket.len()), (0, 0));
        assert_eq!(grants.join(socket(7)), 1 << 20);
        grants.leave(socket(1));
    }

    #[test]
    fn a_small_buffer_is_the_first_ones() {
        for octets in [1, 40_000, 128 << 10] {
            let mut grants = Grants::new(octets);
            assert_eq!(grants.join(socket(1)), octets);
            assert!(grants.join(socket(2)) <= octets.min(8192));
        }
    }
}
