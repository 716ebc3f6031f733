//! The budgets of receive buffers: those of the peers' sockets, and our own.

use alloc::collections::BTreeMap;
use core::net::SocketAddr;

use super::Budget;
use crate::{
    roce::{
        congestion::{Room, Window},
        load::{Load, Pool, Share, Starved},
    },
    wire::ids::Qpn,
};

/// A receive buffer, in two pools: see [`load`](crate::roce::load).
#[derive(Debug)]
struct Buffer {
    data: Window<Qpn>,
    small: Window<Qpn>,
}

impl Buffer {
    fn new(octets: u32) -> Self {
        let [data, small] = Self::rooms(octets).map(Window::new);
        Self { data, small }
    }

    fn set(&mut self, octets: u32) {
        let [data, small] = Self::rooms(octets);
        self.data.set_room(data);
        self.small.set_room(small);
    }

    /// An eighth is for what is small.
    fn rooms(octets: u32) -> [Room; 2] {
        let small = octets / 8;
        [octets - small, small].map(|octets| Room::told(octets.into()))
    }

    fn forget(&mut self, qpn: Qpn) {
        self.data.forget(qpn);
        self.small.forget(qpn);
    }

    fn usage(&self) -> Budget {
        let (data, small) = (&self.data, &self.small);
        Budget {
            octets: data.room().budget() + small.room().budget(),
            used: data.used() + small.used(),
            waiting: data.waiting() + small.waiting(),
        }
    }
}

/// A peer's socket, to which queue pairs are connected.
#[derive(Debug)]
struct Peer {
    buffer: Buffer,
    /// How many are.
    members: usize,
}

/// All budgets. A queue pair joins one of the peers' while it can send, and our own with it.
#[derive(Debug)]
pub(super) struct Budgets {
    own: Buffer,
    peers: BTreeMap<SocketAddr, Peer>,
    /// The budget of a peer that has told none.
    stranger: u32,
}

impl Budgets {
    pub(super) fn new(own: u32, stranger: u32) -> Self {
        Self { own: Buffer::new(own), peers: BTreeMap::new(), stranger }
    }

    pub(super) fn join(&mut self, peer: SocketAddr) {
        let octets = self.stranger;
        let new = || Peer { buffer: Buffer::new(octets), members: 0 };
        self.peers.entry(peer).or_insert_with(new).members += 1;
    }

    pub(super) fn leave(&mut self, peer: SocketAddr, qpn: Qpn) {
        self.own.forget(qpn);
        if let Some(entry) = self.peers.get_mut(&peer) {
            entry.buffer.forget(qpn);
            entry.members -= 1;
            if entry.members == 0 {
                self.peers.remove(&peer);
            }
        }
    }

    /// The peer told how many octets its socket takes.
    pub(super) fn set(&mut self, peer: SocketAddr, octets: u32) {
        if let Some(entry) = self.peers.get_mut(&peer) {
            entry.buffer.set(octets);
        }
    }

    /// How much a queue pair may have on the way. Of the small pools it takes what is there, whoever
    /// waits: who has its turn for data must not wait for a second one.
    pub(super) fn share(&self, peer: SocketAddr, qpn: Qpn) -> Option<Share> {
        let (own, theirs) = (&self.own, &self.peers.get(&peer)?.buffer);
        Some(Share {
            pools: Pool::ALL.map(|pool| match pool {
                Pool::Peer => theirs.data.allowance(qpn),
                Pool::Own => own.data.allowance(qpn),
                Pool::Requests => theirs.small.allowance_in_passing(qpn),
                Pool::Results => own.small.allowance_in_passing(qpn),
            }),
            read: own.data.room().budget() / 2,
        })
    }

    fn window(&mut self, peer: SocketAddr, pool: Pool) -> Option<&mut Window<Qpn>> {
        let theirs = self.peers.get_mut(&peer).map(|entry| &mut entry.buffer);
        match pool {
            Pool::Peer => theirs.map(|buffer| &mut buffer.data),
            Pool::Requests => theirs.map(|buffer| &mut buffer.small),
            Pool::Own => Some(&mut self.own.data),
            Pool::Results => Some(&mut self.own.small),
        }
    }

    /// What a queue pair has on the way now.
    pub(super) fn hold(&mut self, peer: SocketAddr, qpn: Qpn, before: Load, now: Load) {
        for pool in Pool::ALL {
            if before.get(pool) != now.get(pool)
                && let Some(window) = self.window(peer, pool)
            {
                window.hold(qpn, now.get(pool));
            }
        }
    }

    /// A queue pair had its turn: whether it waits, and for what.
    pub(super) fn wait(&mut self, peer: SocketAddr, qpn: Qpn, starved: Option<Starved>) {
        for pool in Pool::ALL {
            let Some(window) = self.window(peer, pool) else { continue };
            match starved {
                Some(Starved { pool: of, wants }) if of == pool => window.wait(qpn, wants),
                _ => window.withdraw(qpn),
            }
        }
    }

    /// Whose turn it is of those that wait for our socket, and for that of `peer`.
    pub(super) fn next(&self, peer: SocketAddr) -> impl Iterator<Item = Qpn> + use<> {
        let of = |buffer: &Buffer| [buffer.data.next(), buffer.small.next()];
        let theirs = self.peers.get(&peer).map_or([None; 2], |entry| of(&entry.buffer));
        of(&self.own).into_iter().chain(theirs).flatten()
    }

    pub(super) fn own(&self) -> Budget {
        self.own.usage()
    }

    pub(super) fn toward(&self, peer: SocketAddr) -> Option<Budget> {
        Some(self.peers.get(&peer)?.buffer.usage())
    }
}
