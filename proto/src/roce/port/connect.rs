//! Connections: what the program asks for, and what the connection manager tells.

use core::net::{IpAddr, SocketAddr};

use super::{Accept, Connect, Event, Port, PortError, Request, Slot, specified};
use crate::{
    roce::{
        PathMtu, Qp, QpAttr, Window,
        cm::{self, ConnId, Datagrams, LocalQp, Reject, Resolve, Token},
        load::LEAST,
        qp::canonical,
    },
    time::Instant,
    verbs::{QpState, QpType},
    wire::{
        ids::{Psn, Qpn},
        mad::cm::Reason,
    },
};

impl Port {
    /// Connects a queue pair, of type RC or UC and in RESET or INIT. [`Event::Established`],
    /// [`Event::Rejected`] or [`Event::TimedOut`] follows. Receives may be posted as soon as this
    /// returns, sends once it is established. A peer that names a smaller path MTU is asked once
    /// more.
    ///
    /// # Errors
    /// See [`PortError`]; nothing changes then.
    pub fn connect(
        &mut self,
        now: Instant,
        qpn: Qpn,
        wanted: &Connect<'_>,
    ) -> Result<(), PortError> {
        let kind = free(self.slots.get(qpn), qpn)?;
        let transport = transport(kind).ok_or(PortError::Type { qpn, found: kind })?;
        in_range("ack_timeout", wanted.ack_timeout, 31)?;
        in_range("retry_count", wanted.retry_count, 7)?;
        in_range("rnr_retry_count", wanted.rnr_retry_count, 7)?;
        let (asked, max) = (wanted.mtu, self.config.max_mtu);
        if asked > max {
            return Err(PortError::Mtu { asked: asked.octets(), max: max.octets() });
        }
        let peer = canonical(wanted.peer);
        let local_ip = self.local_ip(wanted.local_ip, peer.ip())?;
        let srq = self.qp(qpn).is_some_and(Qp::shares_receives);
        let connect = cm::Connect {
            local_port: wanted.local_port,
            transport,
            mtu: wanted.mtu.octets() as u16,
            ack_timeout: wanted.ack_timeout,
            retry_count: wanted.retry_count,
            traffic_class: wanted.traffic_class,
            private_data: wanted.private_data,
            token: wanted.token.then(|| self.token_for(qpn, peer)),
            ..cm::Connect::new(
                peer,
                local_ip,
                wanted.service_id,
                LocalQp {
                    responder_resources: wanted.responder_resources,
                    initiator_depth: wanted.initiator_depth,
                    rnr_retry_count: wanted.rnr_retry_count,
                    srq,
                    ..LocalQp::new(qpn, self.psn())
                },
            )
        };
        let conn = self.cm.connect(now, &connect).inspect_err(|_| self.give_back(qpn))?;
        self.peers.set_local(peer.ip(), local_ip);
        self.attach(qpn, conn, local_ip);
        Ok(())
    }

    /// Takes requests for a service: [`Event::Request`]. Up to `backlog` of them wait for an
    /// answer; one more, and the oldest is dropped.
    ///
    /// # Errors
    /// The service has a listener already.
    pub fn listen(&mut self, service_id: u64, backlog: usize) -> Result<(), PortError> {
        Ok(self.cm.listen(service_id, backlog)?)
    }

    /// Tells peers from now on which queue pair serves a UD service: [`Event::Service`].
    ///
    /// # Errors
    /// The service has a listener already, or private data is too long.
    pub fn listen_datagrams(
        &mut self,
        service_id: u64,
        service: Datagrams,
    ) -> Result<(), PortError> {
        Ok(self.cm.listen_datagrams(service_id, service)?)
    }

    /// Takes no more requests for a service. False: nobody listened.
    pub fn unlisten(&mut self, now: Instant, service_id: u64) -> bool {
        let listened = self.cm.unlisten(service_id);
        self.pump(now, None);
        listened
    }

    /// Says yes to a request, with a queue pair in RESET or INIT and of the type asked for, which
    /// is in RTS then. Work may be posted at once; what is to be sent waits for the peer.
    /// [`Event::Established`], [`Event::Rejected`], [`Event::TimedOut`] or [`Event::Dropped`]
    /// follows.
    ///
    /// # Errors
    /// See [`PortError`]; nothing changes then.
    pub fn accept(
        &mut self,
        now: Instant,
        request: &Request,
        qpn: Qpn,
        answer: &Accept<'_>,
    ) -> Result<(), PortError> {
        let kind = free(self.slots.get(qpn), qpn)?;
        if transport(kind) != Some(request.cm.transport) {
            return Err(PortError::Type { qpn, found: kind });
        }
        in_range("rnr_retry_count", answer.rnr_retry_count, 7)?;
        in_range("target_ack_delay", answer.target_ack_delay, 31)?;
        let max = self.config.max_mtu.octets();
        let mtu = PathMtu::from_octets(request.cm.mtu.into()).filter(|mtu| mtu.octets() <= max);
        let mtu = mtu.ok_or(PortError::Mtu { asked: request.cm.mtu.into(), max })?;
        let theirs = &request.cm;
        let qp = LocalQp {
            responder_resources: answer.responder_resources.min(theirs.initiator_depth),
            initiator_depth: answer.initiator_depth.min(theirs.responder_resources),
            rnr_retry_count: answer.rnr_retry_count,
            srq: self.qp(qpn).is_some_and(Qp::shares_receives),
            ..LocalQp::new(qpn, self.psn())
        };
        let accept = cm::Accept {
            target_ack_delay: answer.target_ack_delay,
            private_data: answer.private_data,
            token: theirs.token.map(|_| self.token_for(qpn, theirs.peer)),
            ..cm::Accept::new(qp)
        };
        self.cm.accept(now, theirs.conn, &accept).inspect_err(|_| self.give_back(qpn))?;
        self.peers.set_local(theirs.peer.ip(), request.local.ip());
        self.attach(qpn, theirs.conn, request.local.ip());
        let rtr = QpAttr {
            peer: Some(theirs.peer),
            dest_qp: Some(theirs.qpn),
            path_mtu: Some(mtu),
            rq_psn: Some(qp.start_psn),
            max_dest_rd_atomic: Some(qp.responder_resources),
            ..QpAttr::to(QpState::Rtr)
        };
        let rts = QpAttr {
            sq_psn: Some(theirs.start_psn),
            max_rd_atomic: Some(qp.initiator_depth),
            timeout: Some(theirs.path.ack_timeout.min(31)),
            retry_cnt: Some(theirs.retry_count.min(7)),
            rnr_retry: Some(theirs.rnr_retry_count.min(7)),
            ..QpAttr::to(QpState::Rts)
        };
        if let Some(slot) = self.slots.get_mut(qpn) {
            slot.held = true;
            slot.traffic_class = theirs.path.traffic_class;
        }
        let is_up = self.bring_up(now, qpn, theirs.conn, &rtr, &rts);
        debug_assert!(is_up, "from INIT to RTS");
        Ok(())
    }

    /// Says no to a request. Nothing follows.
    ///
    /// # Errors
    /// No such request, private data or reject information too long.
    pub fn reject(
        &mut self,
        now: Instant,
        request: &Request,
        answer: &Reject<'_>,
    ) -> Result<(), PortError> {
        Ok(self.cm.reject(now, request.cm.conn, answer)?)
    }

    /// Ends a connection, or gives up one that is not established yet: the queue pair goes to the
    /// error state at once, and everything is flushed. [`Event::Disconnected`] follows.
    ///
    /// # Errors
    /// There is no such queue pair, or it has no connection.
    pub fn disconnect(&mut self, now: Instant, qpn: Qpn) -> Result<(), PortError> {
        let slot = self.slots.get(qpn).ok_or(PortError::UnknownQp(qpn))?;
        let conn = slot.conn.ok_or(PortError::NotConnected(qpn))?;
        self.fail_qp(qpn);
        // The peer's program is told of the end with the DREQ: that what it sent has arrived goes before.
        if self.slots.get(qpn).is_some_and(|slot| slot.qp.has_answers()) {
            self.parting.push(qpn);
        }
        self.cm.disconnect(now, conn)?;
        self.pump(now, None);
        Ok(())
    }

    /// Asks a peer for the queue pair of a UD service: [`Event::Service`] or [`Event::TimedOut`]
    /// follows. `wanted` has our address and the token.
    ///
    /// # Errors
    /// Private data too long, addresses of two kinds, or too many connections.
    pub fn resolve(&mut self, now: Instant, wanted: &Resolve<'_>) -> Result<ConnId, PortError> {
        let conn = self.cm.resolve(now, wanted)?;
        self.peers.set_local(wanted.peer.ip().to_canonical(), wanted.local_ip.to_canonical());
        Ok(conn)
    }

    /// Gives up a question that [`Port::resolve`] asked; nothing more is told of it. One that is
    /// answered already is none any more.
    pub fn forget_question(&mut self, now: Instant, conn: ConnId) {
        if !self.links.contains_key(&conn) {
            // Of an unknown one there is nothing to give up.
            let _ = self.cm.disconnect(now, conn);
            self.pump(now, None);
        }
    }

    /// What we say of ourselves to the peer at `socket`, with its part of our receive buffer, which is its own
    /// until [`Port::give_back`].
    fn token_for(&mut self, qpn: Qpn, socket: SocketAddr) -> Token {
        if let Some(slot) = self.slots.get_mut(qpn) {
            slot.granted = Some(socket);
        }
        Token { window: self.grants.join(socket), ..self.token() }
    }

    /// The queue pair has no connection, or none any more, whose peer was told a part of our receive buffer.
    pub(super) fn give_back(&mut self, qpn: Qpn) {
        if let Some(socket) = self.slots.get_mut(qpn).and_then(|slot| slot.granted.take()) {
            self.grants.leave(socket);
        }
    }

    /// What we say of ourselves to a userdma peer that is the only one.
    pub fn token(&self) -> Token {
        Token {
            udp_port: self.config.local.port(),
            out_of_order: self.config.out_of_order,
            window: self.config.window,
        }
    }

    fn psn(&mut self) -> Psn {
        Psn::new(self.cm.word() as u32)
    }

    /// Our address toward `peer`: as given, or the socket's.
    fn local_ip(&self, given: Option<IpAddr>, peer: IpAddr) -> Result<IpAddr, PortError> {
        let local = given.and_then(specified).or_else(|| specified(self.config.local.ip()));
        local.ok_or(PortError::NoLocalAddress(peer))
    }

    /// The queue pair, in RESET or INIT, has a connection from here on.
    fn attach(&mut self, qpn: Qpn, conn: ConnId, local_ip: IpAddr) {
        self.links.insert(conn, qpn);
        let Some(slot) = self.slots.get_mut(qpn) else { return };
        slot.conn = Some(conn);
        let local = Some(SocketAddr::new(local_ip.to_canonical(), self.config.local.port()));
        let changed = slot.qp.modify(&QpAttr { local, ..QpAttr::to(QpState::Init) });
        debug_assert_eq!(changed, Ok(()), "to INIT");
    }

    /// To RTR and RTS. All that can be wrong was checked before, but for what the program did to
    /// the queue pair meanwhile: then the connection is given up, and false comes back.
    fn bring_up(
        &mut self,
        now: Instant,
        qpn: Qpn,
        conn: ConnId,
        rtr: &QpAttr,
        rts: &QpAttr,
    ) -> bool {
        let Some(slot) = self.slots.get_mut(qpn) else { return false };
        let changed = slot.qp.modify(rtr).and_then(|()| slot.qp.modify(rts));
        if changed.is_err() {
            self.fail_qp(qpn);
            // It is neither unknown nor a request that waits.
            let _ = self.cm.disconnect(now, conn);
        }
        changed.is_ok()
    }

    fn fail_qp(&mut self, qpn: Qpn) {
        let Some(slot) = self.slots.get_mut(qpn) else { return };
        slot.held = false;
        let changed = slot.qp.modify(&QpAttr::to(QpState::Err));
        debug_assert_eq!(changed, Ok(()), "every state leads to ERR");
        self.touch(qpn);
    }

    /// The connection is over: its queue pair, which has gone to the error state.
    fn detach(&mut self, conn: ConnId) -> Option<Qpn> {
        let qpn = self.links.remove(&conn)?;
        self.fail_qp(qpn);
        self.give_back(qpn);
        self.slots.get_mut(qpn)?.conn = None;
        Some(qpn)
    }

    /// Takes what the connection manager has to tell. `to` is our address that its cause came to.
    pub(super) fn pump(&mut self, now: Instant, to: Option<IpAddr>) {
        while let Some(event) = self.cm.poll_event() {
            match event {
                cm::Event::Request(request) => self.take_request(now, to, request),
                cm::Event::Established(terms) => self.establish(now, terms),
                cm::Event::Rejected(rejected) => {
                    let qpn = self.detach(rejected.conn);
                    self.events.push_back(Event::Rejected { qpn, rejected });
                }
                cm::Event::TimedOut { conn, awaited } => {
                    let qpn = self.detach(conn);
                    self.events.push_back(Event::TimedOut { conn, qpn, awaited });
                }
                cm::Event::Dropped { conn } => {
                    let qpn = self.detach(conn);
                    self.events.push_back(Event::Dropped { conn, qpn });
                }
                cm::Event::Disconnected { conn, ended } => {
                    // Of one that was destroyed nothing is told.
                    if let Some(qpn) = self.detach(conn) {
                        self.events.push_back(Event::Disconnected { qpn, ended });
                    }
                }
                // Numbers do not come again for so long that none is waited for.
                cm::Event::Released { .. } => {}
                event @ cm::Event::Queried { .. } => {
                    if self.is_crowded() {
                        self.stats.crowded += 1;
                    } else {
                        self.events.push_back(Event::Service(event));
                    }
                }
                event @ (cm::Event::Resolved { .. } | cm::Event::Unresolved { .. }) => {
                    self.events.push_back(Event::Service(event));
                }
            }
        }
    }

    /// Whether too much waits for the program for a stranger to add to it.
    fn is_crowded(&self) -> bool {
        self.events.len() >= self.config.cm.max_queued
    }

    fn take_request(&mut self, now: Instant, to: Option<IpAddr>, request: cm::Request) {
        let max = self.config.max_mtu.octets();
        let refusal = if u32::from(request.mtu) > max {
            self.stats.mtu_rejected += 1;
            Reject::mtu(max as u16)
        } else if self.is_crowded() {
            self.stats.crowded += 1;
            Reject { reason: Reason::NO_RESOURCES, ..Reject::consumer(&[]) }
        } else if let Some(local) = to.and_then(specified) {
            let local = SocketAddr::new(local, self.config.local.port());
            let request = Request { local, cm: request };
            self.events.push_back(Event::Request(request.into()));
            return;
        } else {
            self.stats.unroutable += 1;
            Reject { reason: Reason::NO_RESOURCES, ..Reject::consumer(&[]) }
        };
        let rejected = self.cm.reject(now, request.conn, &refusal);
        debug_assert_eq!(rejected, Ok(()), "the request is new");
    }

    fn establish(&mut self, now: Instant, terms: cm::Established) {
        let Some(&qpn) = self.links.get(&terms.conn) else {
            // Its queue pair was destroyed meanwhile.
            let _ = self.cm.disconnect(now, terms.conn);
            return;
        };
        let window = self.window_toward(&terms);
        let Some(slot) = self.slots.get_mut(qpn) else { return };
        slot.qp.set_window(window);
        slot.traffic_class = terms.traffic_class;
        let order = QpAttr { out_of_order: Some(terms.out_of_order), ..QpAttr::default() };
        let changed = slot.qp.modify(&order);
        debug_assert_eq!(changed, Ok(()), "it may change at any time");
        // The passive side is there already.
        let passive = core::mem::take(&mut slot.held);
        if !passive {
            let rtr = QpAttr {
                peer: Some(terms.peer),
                dest_qp: Some(terms.remote_qpn),
                path_mtu: PathMtu::from_octets(terms.mtu.into()),
                rq_psn: Some(terms.expect_psn),
                max_dest_rd_atomic: Some(terms.max_dest_rd_atomic),
                ..QpAttr::to(QpState::Rtr)
            };
            let rts = QpAttr {
                sq_psn: Some(terms.send_psn),
                max_rd_atomic: Some(terms.max_rd_atomic),
                timeout: Some(terms.ack_timeout.min(31)),
                retry_cnt: Some(terms.retry_count.min(7)),
                rnr_retry: Some(terms.rnr_retry_count.min(7)),
                ..QpAttr::to(QpState::Rts)
            };
            if !self.bring_up(now, qpn, terms.conn, &rtr, &rts) {
                return;
            }
        }
        self.touch(qpn);
        if let Some(token) = terms.token
            && let Some(purse) = self.budgets.purse(terms.peer)
        {
            self.budgets.set(purse, token.window);
            self.wake(purse);
        }
        self.events.push_back(Event::Established { qpn, terms: terms.into() });
    }

    /// How much may be on the way to the peer: what its socket holds, and ours, for what it
    /// answers.
    fn window_toward(&self, terms: &cm::Established) -> Window {
        let Some(token) = terms.token else {
            return self.config.stranger;
        };
        let octets = token.window.min(self.config.window).max(1);
        // Of small packets it holds no more than what each takes at least.
        Window { packets: (octets / LEAST as u32).max(16), octets }
    }
}

/// The type of a queue pair that can have a connection now.
fn free(slot: Option<&Slot>, qpn: Qpn) -> Result<QpType, PortError> {
    let slot = slot.ok_or(PortError::UnknownQp(qpn))?;
    if slot.conn.is_some() {
        return Err(PortError::Connected(qpn));
    }
    let state = slot.qp.state();
    if !matches!(state, QpState::Reset | QpState::Init) {
        return Err(PortError::State { qpn, state });
    }
    Ok(slot.qp.config().kind)
}

fn transport(kind: QpType) -> Option<cm::Transport> {
    match kind {
        QpType::Rc => Some(cm::Transport::Rc),
        QpType::Uc => Some(cm::Transport::Uc),
        QpType::Ud => None,
    }
}

fn in_range(field: &'static str, found: u8, max: u8) -> Result<(), PortError> {
    if found > max { Err(PortError::Range { field, found, max }) } else { Ok(()) }
}
