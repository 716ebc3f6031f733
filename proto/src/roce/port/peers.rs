//! What is known of those who send to this port, and by it the verdict on a packet's ICRC.

use alloc::collections::{BTreeMap, VecDeque};
use core::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

use zerocopy::FromBytes;

use crate::wire::roce::{
    ICRC_LEN,
    bth::Bth,
    icrc::{Icrc, PathV4, PathV6, verify_unknown_id},
};

/// So many packets in a row that fit nothing but the other DF, and no good one between them, make
/// it the known one: the first packet of a peer may have been a damaged one.
const CHANGE_OF_MIND: u8 = 8;

/// What is known of one address.
#[derive(Debug, Default)]
struct Peer {
    /// Whether its packets carry IPv4's flag DF.
    dont_fragment: Option<bool>,
    /// Packets in a row that fit the other DF alone.
    contrary: u8,
    /// Our address, as it uses it.
    local: Option<IpAddr>,
    /// It was heard of since the hand of the clock passed.
    used: bool,
}

/// The peers by address. There are at most so many: of those that nothing was heard of for long,
/// one goes when another comes.
#[derive(Debug)]
pub(super) struct Peers {
    peers: BTreeMap<IpAddr, Peer>,
    /// Those to be asked whether they may go, the next one in front.
    clock: VecDeque<IpAddr>,
    most: usize,
}

/// What the ICRC of a packet says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Good.
    Good,
    /// Good, and now it is known whether the peer sets DF.
    Learnt,
    /// Good after all: what was known of DF was wrong.
    Relearnt,
    /// Good only with the other DF than the peer is known to send.
    OtherDf,
    /// Wrong.
    Bad,
    /// It cannot be told: our own address is not known.
    Unknown,
}

impl Peer {
    /// It sent a good packet to `local`, with this DF.
    fn judge(&mut self, df: bool, local: IpAddr) -> Verdict {
        let Some(known) = self.dont_fragment else {
            (self.dont_fragment, self.local) = (Some(df), Some(local));
            return Verdict::Learnt;
        };
        if df == known {
            (self.contrary, self.local) = (0, Some(local));
            return Verdict::Good;
        }
        self.contrary += 1;
        if self.contrary < CHANGE_OF_MIND {
            return Verdict::OtherDf;
        }
        (self.dont_fragment, self.contrary, self.local) = (Some(df), 0, Some(local));
        Verdict::Relearnt
    }
}

impl Peers {
    pub(super) fn new(most: usize) -> Self {
        Self { peers: BTreeMap::new(), clock: VecDeque::new(), most: most.max(1) }
    }

    pub(super) fn len(&self) -> usize {
        self.peers.len()
    }

    /// Our address as the peer at `ip` uses it.
    pub(super) fn local(&self, ip: IpAddr) -> Option<IpAddr> {
        self.peers.get(&ip)?.local
    }

    /// The peer at `ip` uses our address `local`.
    pub(super) fn set_local(&mut self, ip: IpAddr, local: IpAddr) {
        self.entry(ip).local = Some(local);
    }

    /// Judges a packet that came from `from` to `to`. Only who sends a good one is remembered.
    pub(super) fn judge(
        &mut self,
        from: SocketAddr,
        to: Option<IpAddr>,
        port: u16,
        octets: &[u8],
    ) -> Verdict {
        let Some(to) = to else {
            return Verdict::Unknown;
        };
        let (src_port, dst_port) = (from.port(), port);
        match (from.ip(), to) {
            (IpAddr::V4(src), IpAddr::V4(dst)) => {
                self.judge_v4(&PathV4 { src, dst, src_port, dst_port }, octets)
            }
            (IpAddr::V6(src), IpAddr::V6(dst)) => {
                if !is_good_v6(&PathV6 { src, dst, src_port, dst_port }, octets) {
                    return Verdict::Bad;
                }
                self.set_local(src.into(), to);
                Verdict::Good
            }
            (IpAddr::V4(_), IpAddr::V6(_)) | (IpAddr::V6(_), IpAddr::V4(_)) => Verdict::Unknown,
        }
    }

    fn judge_v4(&mut self, path: &PathV4, octets: &[u8]) -> Verdict {
        // One sum tells which DF fits: never both.
        let Some(found) = verify_unknown_id(path, octets, None) else {
            return Verdict::Bad;
        };
        let (df, local) = (found.dont_fragment, path.dst.into());
        let ip = path.src.into();
        if let Some(known) = self.peers.get_mut(&ip) {
            known.used = true;
            return known.judge(df, local);
        }
        self.entry(ip).judge(df, local)
    }

    /// The peer at `ip`, who was heard of just now. Who is new may take the place of one that was
    /// not heard of a second time.
    fn entry(&mut self, ip: IpAddr) -> &mut Peer {
        let is_known = self.peers.contains_key(&ip);
        while !is_known && self.peers.len() >= self.most {
            let Some(oldest) = self.clock.pop_front() else { break };
            let peer = self.peers.get_mut(&oldest);
            if peer.is_some_and(|peer| core::mem::take(&mut peer.used)) {
                // A second chance.
                self.clock.push_back(oldest);
            } else {
                self.peers.remove(&oldest);
            }
        }
        if !is_known {
            self.clock.push_back(ip);
        }
        let peer = self.peers.entry(ip).or_default();
        peer.used = is_known;
        peer
    }
}

/// Over IPv6 nothing is hidden that the ICRC covers.
fn is_good_v6(path: &PathV6, octets: &[u8]) -> bool {
    let Some((covered, found)) = octets.split_last_chunk::<ICRC_LEN>() else {
        return false;
    };
    let Ok((bth, rest)) = Bth::read_from_prefix(covered) else {
        return false;
    };
    let mut icrc = Icrc::socket_v6(path, octets.len(), &bth);
    icrc.update(rest);
    icrc.finish() == *found || cfg!(fuzzing)
}

/// The address, unless it stands for all of its family.
pub(super) fn specified(ip: IpAddr) -> Option<IpAddr> {
    let ip = ip.to_canonical();
    (ip != Ipv4Addr::UNSPECIFIED && ip != Ipv6Addr::UNSPECIFIED).then_some(ip)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::roce::icrc::Identification;
    use std::vec::Vec;

    const TO: IpAddr = IpAddr::V4(Ipv4Addr::new(192, 0, 2, 9));

    fn from(host: u8) -> SocketAddr {
        SocketAddr::from(([192, 0, 2, host], 55_410))
    }

    /// A packet of 60 octets as `host` sends it.
    fn packet(host: u8, id: u16, df: bool) -> Vec<u8> {
        let mut octets: Vec<u8> = (0..60).collect();
        let path = PathV4 {
            src: Ipv4Addr::new(192, 0, 2, host),
            dst: Ipv4Addr::new(192, 0, 2, 9),
            src_port: 55_410,
            dst_port: 4791,
        };
        let id = Identification { identification: id, dont_fragment: df };
        let bth = Bth::read_from_prefix(&octets).unwrap().0;
        let mut icrc = Icrc::socket_v4(&path, id, octets.len(), &bth);
        icrc.update(&octets[Bth::LEN..56]);
        octets[56..].copy_from_slice(&icrc.finish());
        octets
    }

    fn judge(peers: &mut Peers, host: u8, octets: &[u8]) -> Verdict {
        peers.judge(from(host), Some(TO), 4791, octets)
    }

    #[test]
    fn df_is_learnt_and_then_held_to() {
        let mut peers = Peers::new(16);
        for (host, df) in [(1, true), (2, false)] {
            assert_eq!(judge(&mut peers, host, &packet(host, 7, df)), Verdict::Learnt);
            assert_eq!(judge(&mut peers, host, &packet(host, 8, df)), Verdict::Good);
            assert_eq!(judge(&mut peers, host, &packet(host, 9, !df)), Verdict::OtherDf);
        }
        assert_eq!(peers.local(from(1).ip()), Some(TO));
        // Not in a row: nothing changes.
        for n in 0..100 {
            let df = n % 2 == 0;
            let expected = if df { Verdict::Good } else { Verdict::OtherDf };
            assert_eq!(judge(&mut peers, 1, &packet(1, n, df)), expected);
        }
        // In a row: the peer is another one now.
        for n in 1..CHANGE_OF_MIND {
            let verdict = judge(&mut peers, 1, &packet(1, n.into(), false));
            // One was there already.
            let expected =
                if n + 1 < CHANGE_OF_MIND { Verdict::OtherDf } else { Verdict::Relearnt };
            assert_eq!(verdict, expected, "{n}");
        }
        assert_eq!(judge(&mut peers, 1, &packet(1, 1, false)), Verdict::Good);
        assert_eq!(judge(&mut peers, 1, &packet(1, 1, true)), Verdict::OtherDf);
    }

    #[test]
    fn who_sends_nothing_good_is_not_remembered() {
        let mut peers = Peers::new(16);
        let mut octets = packet(1, 0, true);
        octets[20] ^= 1;
        assert_eq!(judge(&mut peers, 1, &octets), Verdict::Bad);
        assert_eq!(judge(&mut peers, 1, &octets[..12]), Verdict::Bad);
        assert_eq!(peers.judge(from(1), None, 4791, &octets), Verdict::Unknown);
        assert_eq!(peers.len(), 0);
    }

    #[test]
    fn the_table_has_a_bound_and_keeps_who_is_heard_of() {
        let mut peers = Peers::new(4);
        for host in 1..=200 {
            judge(&mut peers, host, &packet(host, 0, true));
            let verdict = judge(&mut peers, 1, &packet(1, 0, true));
            assert_eq!(verdict, Verdict::Good, "after {host}");
            assert!(peers.len() <= 4 && peers.clock.len() <= 4);
        }
        assert_eq!(judge(&mut peers, 150, &packet(150, 0, false)), Verdict::Learnt);
    }
}
