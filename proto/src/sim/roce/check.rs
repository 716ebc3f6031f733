//! Whether what happened was right.

use alloc::{collections::BTreeMap, format, string::String, vec::Vec};
use core::net::SocketAddr;

use super::{
    Settings, problem, qpn,
    workload::{GRH_LEN, INBOX, Message, Plan, RECEIVE_IDS, SINK, TARGET},
    world::{End, Key, World},
};
use crate::{
    sim::Probability,
    verbs::{QpState, QpType, Wc, WcOpcode, WcStatus},
    wire::ids::Psn,
};

pub(super) fn check(s: &Settings, world: &World) -> Result<(), String> {
    let drops = attempts_that_lost(world);
    for (pair, side, end) in world.ends() {
        let (own, other) = (world.plan(pair, side), world.plan(pair, 1 - side));
        let peer = world.end_of(pair, 1 - side);
        let judged = rules(end).and_then(|()| match (s.kind, end.died, peer.died) {
            (QpType::Rc, None, None) => all_done(end, own, other),
            (QpType::Rc, None, Some(_)) => begun(end, own, other, false),
            (QpType::Rc, Some(_), _) => {
                begun(end, own, other, true).and_then(|()| reason(s, pair, side, world, &drops))
            }
            (QpType::Uc | QpType::Ud, ..) => unreliable(s, pair, side, world),
        });
        judged.map_err(|what| problem(pair, side, &what))?;
    }
    let network = world.network.counters();
    let good = network.dropped() == 0
        && network.corrupted == 0
        && network.reordered == 0
        && network.duplicated == 0;
    let again: u64 = world.ends().map(|(.., end)| end.qp.stats().packets_resent).sum();
    let rnr: u64 = world.ends().map(|(.., end)| end.qp.stats().rnr_naks_sent).sum();
    if good && rnr == 0 && again > 0 {
        return Err(format!("nothing was lost, but {again} packets were sent again"));
    }
    Ok(())
}

/// Nobody breaks a rule towards the other.
fn rules(end: &End) -> Result<(), String> {
    let stats = end.qp.stats();
    let none = |count: u64, what: &str| match count {
        0 => Ok(()),
        n => Err(format!("{n} {what}")),
    };
    none(stats.malformed, "packets that break a rule")?;
    none(stats.access_errors, "accesses refused")
}

fn equal(is: bool, what: &str) -> Result<(), String> {
    if is { Ok(()) } else { Err(format!("{what}: not as the model has it")) }
}

/// Completions of receives, and of sends.
fn parts(end: &End) -> (Vec<Wc>, Vec<Wc>) {
    end.wcs.iter().partition(|wc| wc.opcode.is_recv())
}

/// RC: everything was done.
fn all_done(end: &End, own: &Plan, other: &Plan) -> Result<(), String> {
    if end.qp.state() != QpState::Rts {
        return Err(format!("it is in state {:?}", end.qp.state()));
    }
    let (receives, sends) = parts(end);
    same(&sends, &own.send_wcs, "send")?;
    same(&receives, &other.recv_wcs, "receive")?;
    let mem = &end.mem;
    equal(mem.look(TARGET, |octets| octets == other.target), "memory that the peer works on")?;
    equal(mem.look(SINK, |octets| octets == own.sink), "what was read")?;
    equal(mem.look(INBOX, |octets| octets == other.inbox), "what was received")?;
    equal(mem.bound() == 0, "keys that were to be invalidated")
}

/// The completions are those of the plan.
fn same(told: &[Wc], planned: &[Wc], what: &str) -> Result<(), String> {
    if let Some((told, planned)) = told.iter().zip(planned).find(|(told, planned)| told != planned)
    {
        return Err(format!("a {what} completed as {told:?}, expected {planned:?}"));
    }
    match (told.len(), planned.len()) {
        (a, b) if a == b => Ok(()),
        (a, b) => Err(format!("{a} completions of {what}s, expected {b}")),
    }
}

/// RC, one of both gave up: what was told is right up to there, and all the rest was flushed.
fn begun(end: &End, own: &Plan, other: &Plan, died: bool) -> Result<(), String> {
    let (receives, sends) = parts(end);
    let good = |wcs: &[Wc]| wcs.iter().take_while(|wc| wc.status.is_ok()).count();
    let (sent, received) = (good(&sends), good(&receives));
    let planned = own.send_wcs.get(..sent).unwrap_or(&own.send_wcs);
    same(&sends[..sent], planned, "send")?;
    let planned = other.recv_wcs.get(..received).unwrap_or(&other.recv_wcs);
    same(&receives[..received], planned, "receive")?;
    let octets = other.receives.iter().take(received).flat_map(|wr| &wr.sges);
    let octets = octets.map(|sge| sge.length as usize).sum::<usize>();
    let taken = end.mem.look(INBOX, |is| is.get(..octets) == other.inbox.get(..octets));
    equal(taken, "what was received")?;
    if !died {
        return equal(sent == sends.len() && received == receives.len(), "completions");
    }
    let flushed = |wcs: &[Wc]| wcs.iter().all(|wc| wc.status == WcStatus::WR_FLUSH_ERR);
    let numbers = |wcs: &[Wc]| wcs.windows(2).all(|w| w[0].id + 1 == w[1].id);
    let [failed, rest @ ..] = &sends[sent..] else {
        return Err("it is in the error state, and nothing failed".into());
    };
    equal(failed.status == WcStatus::RETRY_EXC_ERR, "how a send failed")?;
    equal(flushed(rest) && numbers(&sends[sent..]), "sends flushed once and in order")?;
    let last = own.sends.last().map(|wr| wr.id);
    equal(sends.last().map(|wc| wc.id) == last, "the last send that was flushed")?;
    let all = RECEIVE_IDS..RECEIVE_IDS + other.receives.len() as u64;
    equal(flushed(&receives[received..]), "receives that were flushed")?;
    equal(receives.iter().map(|wc| wc.id).eq(all), "receives completed once and in order")
}

/// What the network did to which attempt.
type Drops = BTreeMap<(usize, usize, usize), Lost>;

#[derive(Default)]
struct Lost {
    /// These requests were lost, and whether they ask for an answer.
    requests: BTreeMap<u32, bool>,
    /// An answer was lost.
    answer: bool,
    /// Something was overtaken: who repeats from the first one lost on drops what overtakes.
    overtaken: bool,
}

fn attempts_that_lost(world: &World) -> Drops {
    let mut out = Drops::new();
    let dead = world.ends().filter(|(.., end)| end.died.is_some());
    let dead: Vec<(usize, usize)> = dead.map(|(pair, side, _)| (pair, side)).collect();
    if dead.is_empty() {
        return out;
    }
    let of = |key: Key| dead.iter().copied().find(|&(pair, side)| key.is_of(pair, side));
    for (key, _) in world.network.drops() {
        let key = Key(key);
        if let Some((pair, side)) = of(key) {
            let lost: &mut Lost = out.entry((pair, side, key.attempt())).or_default();
            if key.is_answer() {
                lost.answer = true;
            } else {
                *lost.requests.entry(key.psn().get()).or_default() |= key.asks();
            }
        }
    }
    for &key in &world.overtaken {
        if let Some((pair, side)) = of(key) {
            out.entry((pair, side, key.attempt())).or_default().overtaken = true;
        }
    }
    out
}

/// RC: it gave up because of the network. Each attempt at the same packet, `retry_cnt + 1` of them,
/// lost what would have been progress: that packet, the one that the peer waited for (it told so once, and
/// that may have been lost before), one behind that asks for an answer, or an answer; or something came out
/// of order, which is as good as lost. (It need not be the same packet each time.)
/// From where the peer gave up on there is no answer anyway. Where the peer keeps what comes out of order
/// a time-out asks about the oldest packet alone: the first try may miss what was lost before. Where
/// nothing is tried again the packet is not known: any will do.
fn reason(
    s: &Settings,
    pair: usize,
    side: usize,
    world: &World,
    drops: &Drops,
) -> Result<(), String> {
    let (end, peer) = (world.end_of(pair, side), world.end_of(pair, 1 - side));
    let tries = usize::from(s.retry_cnt) + 1;
    let Some(first) = end.timeouts.len().checked_sub(tries) else {
        return Err(format!("it gave up after {} tries, not {tries}", end.timeouts.len()));
    };
    let una = end.una.filter(|_| s.retry_cnt > 0);
    let matters = |lost: &Lost, awaited: Psn| {
        let request = match una {
            Some(una) => {
                let either =
                    [una, awaited].iter().any(|psn| lost.requests.contains_key(&psn.get()));
                let behind = |psn: u32| !Psn::new(psn).is_before(una);
                either || lost.requests.iter().any(|(&psn, &asks)| asks && behind(psn))
            }
            None => !lost.requests.is_empty(),
        };
        lost.overtaken || lost.answer || request
    };
    for (attempt, &at) in end.timeouts.iter().enumerate().skip(first) {
        let alone = peer.died.is_some_and(|died| died <= at);
        let before = s.out_of_order && attempt == first;
        let lost = (attempt.saturating_sub(before.into())..=attempt).any(|attempt| {
            let awaited = end.awaited[attempt];
            drops.get(&(pair, side, attempt)).is_some_and(|lost| matters(lost, awaited))
        });
        if !alone && !lost {
            return Err(format!(
                "it gave up, but of its try {} of {tries} nothing was lost",
                attempt - first + 1
            ));
        }
    }
    Ok(())
}

/// UC and UD: what came was sent.
fn unreliable(s: &Settings, pair: usize, side: usize, world: &World) -> Result<(), String> {
    let end = world.end_of(pair, side);
    let (own, other) = (world.plan(pair, side), world.plan(pair, 1 - side));
    if end.died.is_some() {
        return Err(format!("it is in the error state: {:?}", end.events));
    }
    let (receives, sends) = parts(end);
    same(&sends, &own.send_wcs, "send")?;
    let i = &s.impairments;
    let ordered = i.dup == Probability::NEVER && i.reorder.is_none();
    let mut next = 0;
    for (n, wc) in receives.iter().enumerate() {
        equal(wc.id == RECEIVE_IDS + n as u64 && wc.status.is_ok(), "a receive")?;
        let from = if ordered { next } else { 0 };
        let fits = |message: &Message| is_of(s, pair, side, end, other, wc, message);
        let Some(found) = other.messages[from..].iter().position(fits) else {
            return Err(format!("receive {n} has what was not sent, or was sent before: {wc:?}"));
        };
        next = from + found + 1;
    }
    let network = world.network.counters();
    if network.dropped() == 0 && network.corrupted == 0 && ordered {
        let sent = other.messages.iter().filter(|message| message.consumes).count();
        equal(receives.len() == sent, "how much came, where nothing was lost,")?;
        equal(end.mem.look(TARGET, |is| is == other.target), "what was written")?;
    }
    // Lost in part or not: nothing else is there.
    let mixed = end.mem.look(TARGET, |is| {
        is.iter()
            .zip(&other.before)
            .zip(&other.target)
            .all(|((is, old), new)| is == old || is == new)
    });
    equal(mixed, "memory that the peer writes")
}

/// Whether a receive took this message.
fn is_of(
    s: &Settings,
    pair: usize,
    side: usize,
    end: &End,
    other: &Plan,
    wc: &Wc,
    message: &Message,
) -> bool {
    let head = if s.kind == QpType::Ud { GRH_LEN } else { 0 };
    let opcode = if message.at.is_some() { WcOpcode::RECV_IMM } else { WcOpcode::RECV };
    let alike = message.consumes
        && (wc.opcode, wc.byte_len as usize) == (opcode, head + message.data.len())
        && (wc.imm, wc.solicited) == (message.imm, message.solicited)
        && wc.src_qp == (s.kind == QpType::Ud).then(|| qpn(pair, 1 - side));
    if !alike {
        return false;
    }
    if let Some(at) = message.at {
        return end
            .mem
            .look(TARGET, |is| is.get(at..at + message.data.len()) == Some(&message.data));
    }
    let Some(wr) = other.receives.get((wc.id - RECEIVE_IDS) as usize) else {
        return false;
    };
    let from = wr.sges.first().map_or(0, |sge| sge.addr as usize);
    end.mem.look(INBOX, |is| {
        let octets = is.get(from..from + head + message.data.len()).unwrap_or_default();
        octets.split_at_checked(head).is_some_and(|(grh, data)| {
            data == message.data
                && (grh.is_empty() || names(grh, s.ends()[1 - side], s.ends()[side]))
        })
    })
}

/// Whether the area in front of a datagram names its sender and its receiver.
fn names(grh: &[u8], from: SocketAddr, to: SocketAddr) -> bool {
    match (from, to) {
        (SocketAddr::V4(a), SocketAddr::V4(b)) => {
            grh[32..36] == a.ip().octets() && grh[36..40] == b.ip().octets()
        }
        (SocketAddr::V6(a), SocketAddr::V6(b)) => {
            grh[8..24] == a.ip().octets() && grh[24..40] == b.ip().octets()
        }
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{mem::Memory, mem::PdId, mem::Scope, sim::roce::run, wire::ids::LKey};

    fn settings(kind: QpType, impairments: &str) -> Settings {
        let impairments = impairments.parse().unwrap();
        let operations = 40;
        Settings { kind, impairments, operations, pairs: 1, ..Settings::from_seed(5) }
    }

    /// What the judge says after `harm` was done to the queue pair on side 0.
    fn after(s: &Settings, harm: impl FnOnce(&mut End)) -> Result<(), String> {
        let mut world = World::new(s)?;
        world.run()?;
        check(s, &world)?;
        harm(world.end_mut(0, 0));
        check(s, &world)
    }

    /// Flips a bit.
    fn flip(end: &End, key: u32) {
        let scope = Scope { pd: PdId(1), qpn: qpn(0, 0) };
        let octet = end.mem.look(key, |octets| octets[0]);
        if key == TARGET {
            let (rkey, iova) = (crate::wire::ids::RKey(key), super::super::workload::TARGET_IOVA);
            end.mem.write_remote(scope, rkey, iova, &[octet ^ 1]).unwrap();
        } else {
            end.mem.write_local(scope, LKey(key), 0, &[octet ^ 1]).unwrap();
        }
    }

    #[test]
    fn what_is_wrong_is_found() {
        let s = &settings(QpType::Rc, "loss=1%");
        assert_eq!(after(s, |_| ()), Ok(()));
        for key in [TARGET, SINK, INBOX] {
            assert!(after(s, |end| flip(end, key)).is_err(), "{key:#x}");
        }
        let twice = after(s, |end| end.wcs.push(*end.wcs.last().unwrap()));
        assert!(twice.unwrap_err().contains("completions"));
        assert!(after(s, |end| end.wcs.truncate(5)).is_err());
        assert!(after(s, |end| end.wcs.reverse()).is_err());
    }

    #[test]
    fn what_was_not_sent_is_found() {
        for kind in [QpType::Uc, QpType::Ud] {
            let s = &settings(kind, "loss=5%");
            assert_eq!(after(s, |_| ()), Ok(()));
            let harm = |end: &mut End| {
                let received = end.wcs.iter_mut().filter(|wc| wc.opcode.is_recv());
                received.for_each(|wc| wc.imm = Some(crate::verbs::Imm(7)));
            };
            assert!(after(s, harm).unwrap_err().contains("was not sent"), "{kind:?}");
        }
    }

    #[test]
    fn to_give_up_without_a_loss_is_found() {
        let s = &settings(QpType::Rc, "loss=60%");
        let mut s = Settings { retry_cnt: 1, ..s.clone() };
        assert!(run(&s).given_up.len() == 2 && run(&s).verdict.is_ok());
        let mut world = World::new(&s).unwrap();
        world.run().unwrap();
        // As if it had had one try more, of which nothing was lost.
        for side in 0..2 {
            let end = world.end_mut(0, side);
            let at = end.timeouts[0];
            end.timeouts.push(at);
            end.awaited.push(end.awaited[0]);
        }
        assert!(check(&s, &world).unwrap_err().contains("nothing was lost"));
        s.retry_cnt = 7;
        assert!(check(&s, &world).unwrap_err().contains("gave up after"));
    }
}
