//! Hosts, links between them, and what crosses.

use alloc::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    string::ToString,
    vec::Vec,
};
use core::net::SocketAddr;

use super::{
    dice::Dice,
    impairer::{Counters, Impairer, Packet},
    impairments::Impairments,
};
use crate::{
    time::Instant,
    wire::pcapng::{Datagram, Direction, Interface, Writer},
};

/// A link of a [`Network`], one direction of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LinkId(usize);

/// A packet that arrived.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Delivery<M = ()> {
    /// When.
    pub at: Instant,
    /// Who sent it.
    pub from: SocketAddr,
    /// Whom it reached.
    pub to: SocketAddr,
    /// What arrived.
    pub packet: Packet<M>,
}

/// Packets between addresses, in virtual time.
///
/// Each pair of addresses has a link of its own for each direction, made when it is first used, with
/// the network's impairments and a seed derived from theirs. [`route`](Self::route) says otherwise:
/// links that several pairs share, paths of several links.
///
/// ```text
///   add_link, route
///   send(now, from, to, packet)
///   poll(now) until None ──> Delivery      poll_timeout: when something happens next
/// ```
#[derive(Debug, Clone)]
pub struct Network<M = ()> {
    impairments: Impairments,
    links: Vec<Link<M>>,
    /// When which link has something, the earliest first.
    due: BTreeSet<(Instant, usize)>,
    routes: BTreeMap<(SocketAddr, SocketAddr), Vec<usize>>,
    arrived: VecDeque<Delivery<M>>,
    now: Instant,
    sent: u64,
    flights: BTreeMap<u64, Flight>,
    drops: BTreeMap<u64, u32>,
    record: Option<Record>,
}

#[derive(Debug, Clone)]
struct Link<M> {
    impairer: Impairer<Tag<M>>,
    /// The network made it, for one pair of addresses.
    own: bool,
    /// What it is in `due` with.
    listed: Option<Instant>,
}

/// What a packet carries along inside.
#[derive(Debug, Clone)]
struct Tag<M> {
    id: u64,
    from: SocketAddr,
    to: SocketAddr,
    /// Links passed so far.
    hops: usize,
    key: Option<u64>,
    meta: M,
}

/// A packet with a key, while copies of it are on their way.
#[derive(Debug, Clone)]
struct Flight {
    key: u64,
    copies: u64,
    intact: bool,
}

#[derive(Debug, Clone)]
struct Record {
    writer: Writer,
    sent: Interface,
    delivered: Interface,
}

impl<M: Clone> Network<M> {
    /// A network that does this to every packet.
    pub const fn new(impairments: Impairments) -> Self {
        Self {
            impairments,
            links: Vec::new(),
            due: BTreeSet::new(),
            routes: BTreeMap::new(),
            arrived: VecDeque::new(),
            now: Instant::ZERO,
            sent: 0,
            flights: BTreeMap::new(),
            drops: BTreeMap::new(),
            record: None,
        }
    }

    /// A link of its own kind; the seed is that of `impairments`.
    pub fn add_link(&mut self, impairments: Impairments) -> LinkId {
        LinkId(self.push_link(impairments, false))
    }

    /// Packets from `from` to `to` pass these links, one after the other; none: they arrive at once.
    ///
    /// # Panics
    ///
    /// If a link is of another network.
    pub fn route(&mut self, from: SocketAddr, to: SocketAddr, links: &[LinkId]) {
        assert!(links.iter().all(|link| link.0 < self.links.len()), "links of this network");
        self.routes.insert((from, to), links.iter().map(|link| link.0).collect());
    }

    /// A link of this network.
    ///
    /// # Panics
    ///
    /// If the link is of another network.
    pub fn link(&self, link: LinkId) -> (&Impairments, &Counters) {
        let impairer = &self.links[link.0].impairer;
        (impairer.impairments(), impairer.counters())
    }

    /// A link changes: what is sent from here on meets these impairments.
    ///
    /// # Panics
    ///
    /// If the link is of another network.
    pub fn set_link(&mut self, link: LinkId, impairments: Impairments) {
        self.links[link.0].impairer.set_impairments(impairments);
    }

    /// The network changes, in all links that [`add_link`](Self::add_link) did not make, those to
    /// come included. Their seeds stay.
    pub fn set_impairments(&mut self, impairments: Impairments) {
        self.impairments = Impairments { seed: self.impairments.seed, ..impairments };
        for link in self.links.iter_mut().filter(|link| link.own) {
            let seed = link.impairer.impairments().seed;
            link.impairer.set_impairments(Impairments { seed, ..impairments });
        }
    }

    /// A packet is sent. `now` does not go back; if it does, it counts as the latest.
    pub fn send(&mut self, now: Instant, from: SocketAddr, to: SocketAddr, packet: Packet<M>) {
        self.advance(now);
        let now = self.now;
        self.sent += 1;
        let Packet { octets, ecn, identification, key, damaged, meta } = packet;
        let tag = Tag { id: self.sent, from, to, hops: 0, key, meta };
        let packet = Packet { octets, ecn, identification, key: None, damaged, meta: tag };
        if let Some(key) = key {
            self.flights.insert(self.sent, Flight { key, copies: 1, intact: false });
        }
        self.pass(now, packet);
    }

    /// The next packet that has arrived by `now`.
    pub fn poll(&mut self, now: Instant) -> Option<Delivery<M>> {
        self.advance(now);
        self.arrived.pop_front()
    }

    /// When a packet arrives, or passes from one link to the next.
    pub fn poll_timeout(&self) -> Option<Instant> {
        let arrived = self.arrived.front().map(|delivery| delivery.at);
        arrived.or_else(|| self.due.first().map(|&(at, _)| at))
    }

    /// Nothing is on its way, and nothing is left to be polled.
    pub fn is_empty(&self) -> bool {
        self.arrived.is_empty() && self.links.iter().all(|link| link.impairer.is_empty())
    }

    /// What happened so far on all links together. With paths of several links `handled` and
    /// `delivered` count a packet on each.
    pub fn counters(&self) -> Counters {
        self.links.iter().fold(Counters::default(), |sum, link| sum.plus(link.impairer.counters()))
    }

    /// How often a packet with this key was sent of which nothing intact arrived, nor will.
    pub fn drops_of(&self, key: u64) -> u32 {
        self.drops.get(&key).copied().unwrap_or(0)
    }

    /// All keys that [`drops_of`](Self::drops_of) knows, in order.
    pub fn drops(&self) -> impl Iterator<Item = (u64, u32)> {
        self.drops.iter().map(|(&key, &drops)| (key, drops))
    }

    /// From here on all packets go into a capture: on the interface `sent` as they were sent, with
    /// what became of them on their first link as a comment, on the interface `delivered` as they
    /// arrived. Time 0 is 1970. What no datagram can be (two address families, over 65,507 octets)
    /// is left out.
    pub fn record(&mut self, application: &str) {
        let mut writer = Writer::new(application);
        let (sent, delivered) = (writer.interface("sent"), writer.interface("delivered"));
        self.record = Some(Record { writer, sent, delivered });
    }

    /// The capture so far, to be written and [cleared](Writer::clear) piece by piece, or as a whole.
    pub fn capture(&mut self) -> Option<&mut Writer> {
        self.record.as_mut().map(|record| &mut record.writer)
    }

    /// Everything that happens until `now`.
    fn advance(&mut self, now: Instant) {
        self.now = self.now.max(now);
        while let Some(&(at, index)) = self.due.first()
            && at <= self.now
        {
            while let Some((due, mut packet)) = self.links[index].impairer.poll_due(at) {
                packet.meta.hops += 1;
                self.pass(due, packet);
            }
            self.list(index);
        }
    }

    /// Onto the next link, or out.
    fn pass(&mut self, now: Instant, packet: Packet<Tag<M>>) {
        let (from, to, hops) = (packet.meta.from, packet.meta.to, packet.meta.hops);
        let next = match self.routes.get(&(from, to)) {
            Some(route) => route.get(hops).copied(),
            None => Some(self.own_link(from, to)),
        };
        let Some(index) = next else {
            return self.arrive(now, packet);
        };
        let id = packet.meta.id;
        let as_sent = (hops == 0 && self.record.is_some()).then(|| packet.clone());
        let fate = self.links[index].impairer.handle(now, packet);
        if let (Some(record), Some(packet)) = (&mut self.record, as_sent) {
            record.put(now, Direction::Outbound, &packet, &fate.to_string());
        }
        if let Some(flight) = self.flights.get_mut(&id) {
            flight.copies = flight.copies - 1 + u64::from(fate.copies);
            self.settle(id);
        }
        self.list(index);
    }

    fn arrive(&mut self, at: Instant, packet: Packet<Tag<M>>) {
        if let Some(record) = &mut self.record {
            record.put(at, Direction::Inbound, &packet, "");
        }
        let Packet { octets, ecn, identification, damaged, meta: tag, .. } = packet;
        if let Some(flight) = self.flights.get_mut(&tag.id) {
            flight.copies -= 1;
            flight.intact |= !damaged;
            self.settle(tag.id);
        }
        let (from, to) = (tag.from, tag.to);
        let packet = Packet { octets, ecn, identification, key: tag.key, damaged, meta: tag.meta };
        self.arrived.push_back(Delivery { at, from, to, packet });
    }

    /// Once no copy is on its way it is known whether one arrived.
    fn settle(&mut self, id: u64) {
        if self.flights.get(&id).is_some_and(|flight| flight.copies > 0) {
            return;
        }
        if let Some(Flight { key, intact: false, .. }) = self.flights.remove(&id) {
            let drops = self.drops.entry(key).or_default();
            *drops = drops.saturating_add(1);
        }
    }

    /// The link that a pair of addresses has for itself.
    fn own_link(&mut self, from: SocketAddr, to: SocketAddr) -> usize {
        let index = self.links.len();
        let seed = Dice::new(self.impairments.seed, index as u64).draw();
        self.push_link(Impairments { seed, ..self.impairments }, true);
        self.routes.insert((from, to), Vec::from([index]));
        index
    }

    fn push_link(&mut self, impairments: Impairments, own: bool) -> usize {
        self.links.push(Link { impairer: Impairer::new(impairments), own, listed: None });
        self.links.len() - 1
    }

    /// Keeps `due` in step with a link.
    fn list(&mut self, index: usize) {
        let link = &mut self.links[index];
        let due = link.impairer.poll_timeout();
        if due == link.listed {
            return;
        }
        if let Some(before) = core::mem::replace(&mut link.listed, due) {
            self.due.remove(&(before, index));
        }
        if let Some(at) = due {
            self.due.insert((at, index));
        }
    }
}

impl Record {
    fn put<M>(&mut self, at: Instant, way: Direction, packet: &Packet<Tag<M>>, comment: &str) {
        let interface = if way == Direction::Outbound { self.sent } else { self.delivered };
        let datagram = Datagram::new(packet.meta.from, packet.meta.to, &packet.octets)
            .with_tos(packet.ecn)
            .with_identification(packet.identification);
        // What no datagram can be is left out, as `Network::record` says.
        let _ = self.writer.datagram(interface, at.as_nanos(), way, &datagram, comment);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::{format, vec};

    fn host(n: u8) -> SocketAddr {
        SocketAddr::from(([10, 0, 0, n], 4791))
    }

    fn at(micros: u64) -> Instant {
        Instant::from_nanos(micros * 1000)
    }

    /// All that still arrives.
    fn rest(network: &mut Network<u64>) -> Vec<Delivery<u64>> {
        let mut out = Vec::new();
        while let Some(due) = network.poll_timeout() {
            out.extend(core::iter::from_fn(|| network.poll(due)));
        }
        assert!(network.is_empty() && network.flights.is_empty());
        out
    }

    #[test]
    fn directions_have_links_of_their_own() {
        let mut network = Network::new("loss=50%,seed=1".parse().unwrap());
        for i in 0..64 {
            network.send(at(0), host(1), host(2), Packet::with_meta(vec![1], i));
            network.send(at(0), host(2), host(1), Packet::with_meta(vec![2], i));
        }
        let out = rest(&mut network);
        let to = |n| -> Vec<u64> {
            out.iter().filter(|d| d.to == host(n)).map(|d| d.packet.meta).collect()
        };
        assert!(to(1) != to(2) && to(1).len() > 16 && to(2).len() > 16);
        assert!(
            out.iter().all(|d| d.from != d.to
                && d.packet.octets[0] != d.to.ip().to_string().as_bytes()[7] - b'0')
        );
    }

    #[test]
    fn pairs_share_a_link_and_a_path_has_several() {
        let mut network: Network<u64> = Network::new(Impairments::default());
        let near = network.add_link("delay=1ms".parse().unwrap());
        let shared = network.add_link("rate=1MB,queue=10kB".parse().unwrap());
        network.route(host(1), host(3), &[near, shared]);
        network.route(host(2), host(3), &[shared]);
        network.route(host(3), host(1), &[]);
        network.send(at(0), host(1), host(3), Packet::with_meta(vec![0; 1000], 1));
        network.send(at(500), host(2), host(3), Packet::with_meta(vec![0; 1000], 2));
        // The first one comes to the shared link at 1 ms and finds it busy until 1.5 ms.
        network.send(at(3000), host(3), host(1), Packet::with_meta(vec![], 3));
        let out = rest(&mut network);
        let seen: Vec<_> = out.iter().map(|d| (d.at, d.packet.meta)).collect();
        assert_eq!(seen, [(at(1500), 2), (at(2500), 1), (at(3000), 3)]);
        assert_eq!(network.link(shared).1.longest_queue, 2000);
        network.set_link(shared, "loss=100%".parse().unwrap());
        network.send(at(3000), host(2), host(3), Packet::with_meta(vec![0; 1], 4).with_key(4));
        assert_eq!((rest(&mut network).len(), network.drops_of(4)), (0, 1));
    }

    #[test]
    fn the_network_changes() {
        let mut network: Network<u64> = Network::new(Impairments::default());
        let own = network.add_link(Impairments::default());
        network.route(host(1), host(3), &[own]);
        network.send(at(0), host(1), host(2), Packet::with_meta(vec![], 0));
        network.set_impairments("loss=100%".parse().unwrap());
        for to in [2, 3, 4] {
            network.send(at(0), host(1), host(to), Packet::with_meta(vec![], to.into()));
        }
        let out: Vec<u64> = rest(&mut network).iter().map(|d| d.packet.meta).collect();
        assert_eq!(out, [0, 3]);
    }

    proptest! {
        /// On a path of two bad links each packet that has a key arrived intact, or is said not to
        /// have; and a second run is the same.
        #[test]
        fn drops_are_known(seed: u64, n in 1u64..200) {
            let run = || {
                let mut network = Network::new(Impairments::default());
                let text = "loss=20%,dup=20%,corrupt=20%,reorder=20%,jitter=20us,rate=10MB,queue=500B";
                let first = network.add_link(format!("{text},seed={seed}").parse().unwrap());
                let second = network.add_link(format!("{text},seed={}", seed ^ 1).parse().unwrap());
                network.route(host(1), host(2), &[first, second]);
                for i in 0..n {
                    let packet = Packet::with_meta(vec![0; 100], i).with_key(i / 2);
                    network.send(at(i * 10), host(1), host(2), packet);
                }
                let out = rest(&mut network);
                (out, network)
            };
            let (out, network) = run();
            for key in 0..n.div_ceil(2) {
                let sent = (0..n).filter(|i| i / 2 == key);
                let missing = sent.filter(|&i| !out.iter().any(|d| d.packet.meta == i && !d.packet.damaged));
                prop_assert_eq!(network.drops_of(key) as usize, missing.count());
            }
            prop_assert!(out.iter().all(|d| d.packet.key == Some(d.packet.meta / 2)));
            prop_assert!(out.is_sorted_by_key(|d| d.at));
            prop_assert_eq!(run().0, out);
        }
    }
}
