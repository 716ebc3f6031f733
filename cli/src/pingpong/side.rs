//! One side's device, queue pairs and memory.

use std::{collections::HashMap, net::SocketAddr};

use anyhow::{Context, Result, anyhow, bail};
use userdma::{
    Access, Cq, Device, Mr, PathMtu, Pd, Qp, QpAttr, QpInit, QpState, QpType, Qpn, RecvWr, Region,
    RoceStats, SendWr, Srq, UdDest, Wc, WcStatus,
    proto::wire::ids::{Gid, Psn, QKey},
};

use super::{Kind, exchange::Address};
use crate::{output, session::fresh_seed};

/// The Q_Key of all datagrams of ibv_ud_pingpong.
const QKEY: QKey = QKey(0x1111_1111);
/// The code of the local ACK timeout: 0.27 s, so that eight tries bridge 2.1 s of silence. The
/// programs of libibverbs take 14, which is 0.54 s in all; but hardware may stretch that four times,
/// and Linux's rxe with seven retries never gives up. A peer that waits for a processor is no lost
/// one.
const TIMEOUT: u8 = 16;
/// What a receive of a datagram begins with: the area of the GRH (IBTA vol. 1, 11.4.1.2).
const GRH: usize = 40;
/// Octets of memory for receives, unless a few messages need more.
const MEMORY: usize = 64 << 20;
/// The number of a work request that sends: the queue pair's index, and this bit.
const SEND: u64 = 1 << 32;
/// The octet that the programs fill their buffer with.
const FILL: u8 = 0x7b;
/// Octets of a page: with -c the client sets the first of each to 0, and the server looks at these.
const PAGE: usize = 4096;

/// What both sides have to agree on, and how many receives this one posts.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan {
    pub(super) kind: Kind,
    /// Octets of a message.
    pub(super) size: usize,
    /// Receives posted at a time.
    pub(super) depth: usize,
    pub(super) qps: usize,
    /// `None`: as much as the route takes.
    pub(super) mtu: Option<PathMtu>,
    /// Whether octets are looked at.
    pub(super) check: bool,
    pub(super) client: bool,
}

/// A completion, in words of the ping-pong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Done {
    /// The message of this queue pair is out.
    Sent(usize),
    /// A message came to this queue pair, into this slot.
    Received(usize, usize),
}

/// Where octets differ from what they have to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Difference {
    pub(super) at: usize,
    pub(super) expected: u8,
    pub(super) found: u8,
}

/// Everything of one side. The fields are dropped in this order.
pub(super) struct Side {
    plan: Plan,
    qps: Vec<Qp>,
    index: HashMap<Qpn, usize>,
    srq: Option<Srq>,
    pub(super) cq: Cq,
    psns: Vec<Psn>,
    receives: Mr,
    /// Slots in `receives`, and the one that is posted next: they go round.
    slots: usize,
    next: usize,
    sends: Mr,
    /// UD: where to.
    dests: Vec<UdDest>,
    /// A message that is looked at or made.
    scratch: Vec<u8>,
    other: Vec<u8>,
    rounds: Vec<u64>,
    _pd: Pd,
    device: Device,
}

impl Side {
    /// Makes the queue pairs, with all receives posted.
    pub(super) fn new(device: Device, plan: Plan) -> Result<Self> {
        let pd = device.alloc_pd()?;
        let cq = device.create_cq(plan.depth + 2 * plan.qps + 1)?;
        let mut init = QpInit::new(&cq).kind(plan.kind.qp_type());
        (init.max_send_wr, init.max_recv_wr, init.max_sge) = (2, plan.depth, 1);
        (init.ird, init.ord) = (1, 1);
        let srq = match plan.kind {
            Kind::Srq => Some(pd.create_srq(plan.depth, 1)?),
            Kind::Rc | Kind::Uc | Kind::Ud => None,
        };
        if let Some(srq) = &srq {
            init = init.srq(srq);
        }
        let stride = stride(plan);
        // Of each queue pair one message is under way, and one is looked at.
        let slots = plan.depth.min(MEMORY / stride).max(2 * plan.qps);
        let register = |octets: usize| -> Result<Mr> {
            let region = Region::alloc(octets)
                .with_context(|| format!("cannot have {}", output::octets(octets as u64)))?;
            Ok(pd.register(region, Access::LOCAL_WRITE)?)
        };
        let (receives, sends) = (register(slots * stride)?, register(plan.qps * plan.size)?);
        let seed = fresh_seed();
        let mut side = Self {
            plan,
            qps: Vec::with_capacity(plan.qps),
            index: HashMap::with_capacity(plan.qps),
            srq,
            cq,
            psns: Vec::with_capacity(plan.qps),
            receives,
            slots,
            next: 0,
            sends,
            dests: Vec::new(),
            scratch: vec![0; plan.size],
            other: vec![0; plan.size],
            rounds: vec![0; plan.qps],
            _pd: pd.clone(),
            device,
        };
        for i in 0..plan.qps {
            let qp = pd.create_qp(init.clone()).with_context(|| format!("queue pair {i}"))?;
            let attr = QpAttr {
                qkey: (plan.kind == Kind::Ud).then_some(QKEY),
                access: Some(Access::empty()),
                ..QpAttr::to(QpState::Init)
            };
            qp.modify(&attr).with_context(|| format!("cannot bring queue pair {i} to INIT"))?;
            // As random as the seed: each starts somewhere else.
            let psn = crate::pattern::Content::new(seed, 0, 0, i as u64).word(0);
            side.psns.push(Psn::new(psn as u32));
            side.index.insert(qp.qpn(), i);
            side.qps.push(qp);
        }
        if plan.check {
            for slot in 0..side.slots {
                side.spoil(slot)?;
            }
        }
        side.post_receives(plan.depth)?;
        Ok(side)
    }

    /// What the peer is to know.
    pub(super) fn addresses(&self) -> Result<Vec<Address>> {
        let local = self.udp_addr()?;
        let numbers = self.qps.iter().zip(&self.psns);
        Ok(numbers
            .map(|(qp, &psn)| Address { lid: 0, qpn: qp.qpn(), psn, gid: Gid::from(local.ip()) })
            .collect())
    }

    /// Our UDP socket.
    pub(super) fn udp_addr(&self) -> Result<SocketAddr> {
        self.device.udp_addr().context("the device has no UDP socket")
    }

    /// What is played.
    pub(super) const fn plan(&self) -> Plan {
        self.plan
    }

    /// What the device counted.
    pub(super) fn stats(&self) -> RoceStats {
        self.device.roce_stats().unwrap_or_default()
    }

    /// Brings the queue pairs up: `remote` are the peer's, `peer` its UDP socket.
    pub(super) fn join(&mut self, remote: &[Address], peer: SocketAddr) -> Result<PathMtu> {
        let local = self.udp_addr()?;
        if local.is_ipv4() != peer.is_ipv4() {
            bail!(
                "the peer's GID is {} and this side's address {}: both need the same IP version \
                 (--bind here, another GID index -g there)",
                peer.ip(),
                local.ip()
            );
        }
        let mtu = match self.plan.mtu {
            Some(mtu) => mtu,
            None => self.device.path_mtu(peer)?,
        };
        if self.plan.kind == Kind::Ud && self.plan.size > mtu.octets() as usize {
            bail!(
                "a datagram of {} octets does not fit the path MTU of {}: take a smaller --size",
                self.plan.size,
                mtu.octets()
            );
        }
        for (i, (qp, remote)) in self.qps.iter().zip(remote).enumerate() {
            let rc = matches!(self.plan.kind, Kind::Rc | Kind::Srq);
            let connected = self.plan.kind != Kind::Ud;
            let rtr = QpAttr {
                local: Some(local),
                peer: connected.then_some(peer),
                dest_qp: connected.then_some(remote.qpn),
                path_mtu: Some(mtu),
                rq_psn: connected.then_some(remote.psn),
                max_dest_rd_atomic: rc.then_some(1),
                min_rnr_timer: rc.then_some(12),
                ..QpAttr::to(QpState::Rtr)
            };
            let rts = QpAttr {
                sq_psn: Some(self.psns[i]),
                timeout: rc.then_some(TIMEOUT),
                retry_cnt: rc.then_some(7),
                rnr_retry: rc.then_some(7),
                max_rd_atomic: rc.then_some(1),
                ..QpAttr::to(QpState::Rts)
            };
            qp.modify(&rtr).with_context(|| format!("cannot bring queue pair {i} to RTR"))?;
            qp.modify(&rts).with_context(|| format!("cannot bring queue pair {i} to RTS"))?;
            if !connected {
                self.dests.push(UdDest { addr: peer, qpn: remote.qpn, qkey: QKEY });
            }
        }
        Ok(mtu)
    }

    /// Posts `n` receives.
    pub(super) fn post_receives(&mut self, n: usize) -> Result<()> {
        let (stride, slots, first) = (stride(self.plan), self.slots, self.next);
        let receives = &self.receives;
        let wrs = (first..first + n).map(|slot| {
            let slot = slot % slots;
            RecvWr::new(slot as u64, [receives.slice(slot * stride..(slot + 1) * stride)])
        });
        self.next = (first + n) % slots;
        let posted = match (&self.srq, self.qps.first()) {
            (Some(srq), _) => srq.post_recv_batch(wrs),
            (None, Some(qp)) => qp.post_recv_batch(wrs),
            (None, None) => Ok(()),
        };
        posted.map_err(|(i, e)| anyhow!("receive {i} of {n} was not taken: {e}"))
    }

    /// Sends what is in queue pair `qp`'s buffer.
    pub(super) fn send(&self, qp: usize) -> Result<()> {
        let at = qp * self.plan.size;
        let mut wr = SendWr::send(SEND | qp as u64, [self.sends.slice(at..at + self.plan.size)]);
        if let Some(&dest) = self.dests.get(qp) {
            wr = wr.to(dest);
        }
        self.qps[qp].post_send(wr).with_context(|| format!("cannot send on queue pair {qp}"))
    }

    /// Puts the client's next message into queue pair `qp`'s buffer. What is looked at differs from
    /// round to round; with a shared receive queue it is always the same, because the programs have
    /// one buffer for all of it.
    pub(super) fn compose(&mut self, qp: usize) -> Result<()> {
        let round = self.rounds[qp];
        self.rounds[qp] += 1;
        let changes = self.plan.check && self.plan.kind != Kind::Srq;
        if round > 0 && !changes {
            return Ok(());
        }
        compose(round, self.plan.check, &mut self.scratch);
        Ok(self.sends.write_at(qp * self.plan.size, &self.scratch)?)
    }

    /// Takes the message in `slot`, which came to queue pair `qp`: the server gets it ready to be
    /// sent back, and both look at it where that was asked for.
    pub(super) fn take(&mut self, qp: usize, slot: usize) -> Result<Option<Difference>> {
        let Plan { size, check, client, .. } = self.plan;
        if client && !check {
            return Ok(None);
        }
        self.receives.read_at(slot * stride(self.plan) + header(self.plan), &mut self.scratch)?;
        let own = qp * size;
        let difference = if client {
            self.sends.read_at(own, &mut self.other)?;
            first_difference(&self.other, &self.scratch)
        } else {
            self.sends.write_at(own, &self.scratch)?;
            if check { first_page_not_zero(&self.scratch) } else { None }
        };
        if check {
            self.spoil(slot)?;
        }
        Ok(difference)
    }

    /// What is in a slot before must not pass for what comes.
    fn spoil(&mut self, slot: usize) -> Result<()> {
        let octets = vec![0xff; self.plan.size];
        Ok(self.receives.write_at(slot * stride(self.plan) + header(self.plan), &octets)?)
    }

    /// What a completion means.
    pub(super) fn understand(&self, wc: &Wc) -> Result<Done> {
        let qp = *self.index.get(&wc.qpn).context("a completion of an unknown queue pair")?;
        if !wc.status.is_ok() {
            return Err(self.failed(qp, wc));
        }
        if wc.id & SEND != 0 {
            return Ok(Done::Sent(qp));
        }
        let expected = self.plan.size + header(self.plan);
        if wc.byte_len as usize != expected {
            bail!(
                "the peer sends messages of {} octets and this side of {}: both need the same --size",
                (wc.byte_len as usize).saturating_sub(header(self.plan)),
                self.plan.size
            );
        }
        Ok(Done::Received(qp, wc.id as usize))
    }

    fn failed(&self, qp: usize, wc: &Wc) -> anyhow::Error {
        let what = if wc.id & SEND != 0 { "a message" } else { "a receive" };
        let hint = match wc.status {
            WcStatus::RETRY_EXC_ERR => {
                ": the peer acknowledges nothing (has it ended? is UDP to its port let through?)"
            }
            WcStatus::LOC_LEN_ERR | WcStatus::REM_INV_REQ_ERR => {
                ": both sides need the same --size and --mtu"
            }
            _ => "",
        };
        let trouble =
            self.stats().trouble.map(|t| format!(" (the socket said: {t})")).unwrap_or_default();
        anyhow!("{what} of queue pair {qp} ended with: {}{hint}{trouble}", wc.status)
    }
}

/// Octets in front of a received message.
const fn header(plan: Plan) -> usize {
    if matches!(plan.kind, Kind::Ud) { GRH } else { 0 }
}

/// Octets of a slot.
const fn stride(plan: Plan) -> usize {
    plan.size + header(plan)
}

impl Kind {
    const fn qp_type(self) -> QpType {
        match self {
            Self::Rc | Self::Srq => QpType::Rc,
            Self::Uc => QpType::Uc,
            Self::Ud => QpType::Ud,
        }
    }
}

/// The client's message: what the programs send with -c, and where it is `checked` other octets in
/// each round.
fn compose(round: u64, checked: bool, message: &mut [u8]) {
    for (i, octet) in message.iter_mut().enumerate() {
        let mix = if checked { (round as usize).wrapping_mul(31) ^ i ^ (i >> 8) } else { 0 };
        *octet = if i % PAGE == 0 { 0 } else { FILL ^ mix as u8 };
    }
}

fn first_difference(expected: &[u8], found: &[u8]) -> Option<Difference> {
    let at = expected.iter().zip(found).position(|(a, b)| a != b)?;
    Some(Difference { at, expected: expected[at], found: found[at] })
}

/// What a server of -c looks at.
fn first_page_not_zero(message: &[u8]) -> Option<Difference> {
    let page = message.chunks(PAGE).position(|page| page[0] != 0)?;
    let at = page * PAGE;
    Some(Difference { at, expected: 0, found: message[at] })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// With -c a client of the programs sets the first octet of each page to 0; everything else is
    /// 0x7b.
    #[test]
    fn messages_are_what_the_programs_look_for() {
        let mut message = vec![1; 3 * PAGE + 1];
        for checked in [false, true] {
            for round in [0, 1, 255, u64::MAX] {
                compose(round, checked, &mut message);
                assert_eq!(first_page_not_zero(&message), None);
                if !checked {
                    assert!(
                        message
                            .iter()
                            .enumerate()
                            .all(|(i, &b)| { b == if i % PAGE == 0 { 0 } else { 0x7b } })
                    );
                }
            }
        }
        message[2 * PAGE] = 9;
        let difference = Difference { at: 2 * PAGE, expected: 0, found: 9 };
        assert_eq!(first_page_not_zero(&message), Some(difference));
    }

    #[test]
    fn messages_that_are_looked_at_differ_from_round_to_round() {
        let (mut a, mut b) = (vec![0; 64], vec![0; 64]);
        for round in 0..300 {
            compose(round, true, &mut a);
            compose(round + 1, true, &mut b);
            assert!(first_difference(&a, &b).is_some(), "{round}");
            // What is there before anything came.
            assert!(first_difference(&a, &[0xff; 64]).is_some());
        }
        assert_eq!(first_difference(&a, &a.clone()), None);
    }
}
