//! The budgets of receive buffers: those of the peers' sockets, and our own.

use alloc::{collections::BTreeMap, vec::Vec};
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

/// Names the budget of a peer's socket, for those that have joined it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Purse(u32);

/// A peer's socket, to which queue pairs are connected.
#[derive(Debug)]
struct Peer {
    socket: SocketAddr,
    buffer: Buffer,
    /// How many are.
    members: usize,
}

/// All budgets. A queue pair joins one of the peers' while it can send, and our own with it.
#[derive(Debug)]
pub(super) struct Budgets {
    own: Buffer,
    by_socket: BTreeMap<SocketAddr, Purse>,
    /// By [`Purse`]: every packet comes here.
    peers: Vec<Option<Peer>>,
    free: Vec<Purse>,
    /// The budget of a peer that has told none.
    stranger: u32,
}

impl Budgets {
    pub(super) fn new(own: u32, stranger: u32) -> Self {
        Self {
            own: Buffer::new(own),
            by_socket: BTreeMap::new(),
            peers: Vec::new(),
            free: Vec::new(),
            stranger,
        }
    }

    fn peer(&self, purse: Purse) -> Option<&Peer> {
        self.peers.get(purse.0 as usize)?.as_ref()
    }

    fn peer_mut(&mut self, purse: Purse) -> Option<&mut Peer> {
        self.peers.get_mut(purse.0 as usize)?.as_mut()
    }

    pub(super) fn join(&mut self, socket: SocketAddr) -> Purse {
        if let Some(&purse) = self.by_socket.get(&socket) {
            if let Some(peer) = self.peer_mut(purse) {
                peer.members += 1;
            }
            return purse;
        }
        let peer = Some(Peer { socket, buffer: Buffer::new(self.stranger), members: 1 });
        let purse = self.free.pop().unwrap_or(Purse(self.peers.len() as u32));
        match self.peers.get_mut(purse.0 as usize) {
            Some(place) => *place = peer,
            None => self.peers.push(peer),
        }
        self.by_socket.insert(socket, purse);
        purse
    }

    pub(super) fn leave(&mut self, purse: Purse, qpn: Qpn) {
        self.own.forget(qpn);
        let Some(place) = self.peers.get_mut(purse.0 as usize) else { return };
        let Some(peer) = place else { return };
        peer.buffer.forget(qpn);
        peer.members -= 1;
        if peer.members == 0 {
            self.by_socket.remove(&peer.socket);
            *place = None;
            self.free.push(purse);
        }
    }

    /// The peer told how many octets its socket takes.
    pub(super) fn set(&mut self, purse: Purse, octets: u32) {
        if let Some(peer) = self.peer_mut(purse) {
            peer.buffer.set(octets);
        }
    }

    /// How much a queue pair may have on the way. Of the small pools it takes what is there, whoever
    /// waits: who has its turn for data must not wait for a second one.
    pub(super) fn share(&self, purse: Purse, qpn: Qpn) -> Option<Share> {
        let (own, theirs) = (&self.own, &self.peer(purse)?.buffer);
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

    fn window(&mut self, purse: Purse, pool: Pool) -> Option<&mut Window<Qpn>> {
        match pool {
            Pool::Peer => Some(&mut self.peer_mut(purse)?.buffer.data),
            Pool::Requests => Some(&mut self.peer_mut(purse)?.buffer.small),
            Pool::Own => Some(&mut self.own.data),
            Pool::Results => Some(&mut self.own.small),
        }
    }

    /// What a queue pair has on the way now.
    pub(super) fn hold(&mut self, purse: Purse, qpn: Qpn, before: Load, now: Load) {
        for pool in Pool::ALL {
            if before.get(pool) != now.get(pool)
                && let Some(window) = self.window(purse, pool)
            {
                window.hold(qpn, now.get(pool));
            }
        }
    }

    /// A queue pair had its turn: whether it waits, and for what.
    pub(super) fn wait(&mut self, purse: Purse, qpn: Qpn, starved: Option<Starved>) {
        for pool in Pool::ALL {
            let Some(window) = self.window(purse, pool) else { continue };
            match starved {
                Some(Starved { pool: of, wants }) if of == pool => window.wait(qpn, wants),
                _ => window.withdraw(qpn),
            }
        }
    }

    /// Whose turn it is of those that wait for our socket, and for that of a peer.
    pub(super) fn next(&self, purse: Purse) -> impl Iterator<Item = Qpn> + use<> {
        let of = |buffer: &Buffer| [buffer.data.next(), buffer.small.next()];
        let theirs = self.peer(purse).map_or([None; 2], |peer| of(&peer.buffer));
        of(&self.own).into_iter().chain(theirs).flatten()
    }

    pub(super) fn own(&self) -> Budget {
        self.own.usage()
    }

    pub(super) fn purse(&self, socket: SocketAddr) -> Option<Purse> {
        self.by_socket.get(&socket).copied()
    }

    pub(super) fn toward(&self, socket: SocketAddr) -> Option<Budget> {
        Some(self.peer(self.purse(socket)?)?.buffer.usage())
    }
}
