//! What the queue pairs are to do, by a seed, and what must come of it: the model, which is nothing
//! but vectors.

use alloc::vec::Vec;
use core::iter;

use super::{Settings, qpn};
use crate::{
    mem::AtomicOp,
    sim::dice::Dice,
    verbs::{
        Imm, Payload, QpType, RecvWr, RemoteAddr, SendFlags, SendOp, SendWr, Sge, UdDest, Wc,
        WcOpcode,
    },
    wire::{
        ids::{LKey, RKey},
        roce::{
            feth::{Placement, Selectivity},
            grh::Grh,
        },
    },
};

/// What the peer works on.
pub(super) const TARGET: u32 = 0x1000_0000;
pub(super) const SOURCE: u32 = 0x2000_0000;
pub(super) const SINK: u32 = 0x3000_0000;
pub(super) const INBOX: u32 = 0x4000_0000;
/// Keys that the peer invalidates: this and the number of the work request.
const MORTAL: u32 = 0x5000_0000;
/// Keys that their owner invalidates.
const OWN_MORTAL: u32 = 0x6000_0000;

pub(super) const TARGET_IOVA: u64 = 0x7f00_0000_0000;

/// Octets that a UDP receive has in front of the message.
pub(super) const GRH_LEN: usize = Grh::LEN;

/// What one queue pair will do, and what must come of it.
#[derive(Debug, Default)]
pub(super) struct Plan {
    pub(super) sends: Vec<SendWr>,
    pub(super) send_wcs: Vec<Wc>,
    pub(super) source: Vec<u8>,
    /// What its READs and atomics must bring.
    pub(super) sink: Vec<u8>,
    /// Receives of the peer, and how they must complete.
    pub(super) receives: Vec<RecvWr>,
    pub(super) recv_wcs: Vec<Wc>,
    /// What must be in them. RC: one behind the other as in memory; UC and UD: see `messages`.
    pub(super) inbox: Vec<u8>,
    /// The peer's memory that it works on, before and after.
    pub(super) before: Vec<u8>,
    pub(super) target: Vec<u8>,
    /// UC and UD: each message in order of sending.
    pub(super) messages: Vec<Message>,
    /// Packets that it takes at least, for the bound on steps.
    pub(super) packets: u64,
}

/// A message that may be lost.
#[derive(Debug)]
pub(super) struct Message {
    pub(super) data: Vec<u8>,
    pub(super) imm: Option<Imm>,
    pub(super) solicited: bool,
    /// Of a WRITE: where in the target.
    pub(super) at: Option<usize>,
    /// It takes a receive.
    pub(super) consumes: bool,
}

impl Plan {
    /// The plan of the queue pair on `side` of `pair`.
    pub(super) fn new(dice: &mut Dice, s: &Settings, pair: usize, side: usize) -> Self {
        match s.kind {
            QpType::Rc => reliable(dice, s, pair, side),
            QpType::Uc | QpType::Ud => unreliable(dice, s, pair, side),
        }
    }

    /// The keys that are invalidated at the peer, and at the own side.
    pub(super) fn mortals(&self) -> (Vec<u32>, Vec<u32>) {
        let keys = |f: fn(&SendOp) -> Option<RKey>| -> Vec<u32> {
            self.sends.iter().filter_map(|wr| f(&wr.op)).map(|key| key.0).collect()
        };
        let at_peer = keys(|op| if let SendOp::SendInv(key) = op { Some(*key) } else { None });
        let own = keys(|op| if let SendOp::LocalInv(key) = op { Some(*key) } else { None });
        (at_peer, own)
    }

    /// Octets to be sent: inside the request, or from the source in pieces.
    fn gather(&mut self, dice: &mut Dice, data: &[u8]) -> Payload {
        if data.len() <= 100 && dice.one_in(2) {
            return Payload::Inline(data.iter().copied().collect());
        }
        let from = self.source.len() as u64;
        self.source.extend_from_slice(data);
        Payload::Sges(split(dice, from, data.len() as u32, SOURCE))
    }

    /// A place for octets that must come.
    fn expect_in_sink(&mut self, dice: &mut Dice, data: &[u8]) -> Payload {
        let at = self.sink.len() as u64;
        self.sink.extend_from_slice(data);
        Payload::Sges(split(dice, at, data.len() as u32, SINK))
    }

    /// A receive of the peer that takes `data`, with room to spare now and then.
    fn receive(&mut self, dice: &mut Dice, data: &[u8], wc: Wc) {
        let spare = if dice.one_in(2) { 0 } else { dice.below(100) as usize };
        let id = RECEIVE_IDS + self.receives.len() as u64;
        let at = self.inbox.len() as u64;
        let sges = split(dice, at, (data.len() + spare) as u32, INBOX);
        self.receives.push(RecvWr { id, sges });
        self.inbox.extend_from_slice(data);
        self.inbox.extend(iter::repeat_n(0, spare));
        self.recv_wcs.push(Wc { id, ..wc });
    }
}

/// The first receive's number: those of sends begin with 0.
pub(super) const RECEIVE_IDS: u64 = 1 << 32;

fn remote(at: usize) -> RemoteAddr {
    RemoteAddr::new(TARGET_IOVA + at as u64, RKey(TARGET))
}

fn touches(ranges: &[(usize, usize)], at: usize, len: usize) -> bool {
    ranges.iter().any(|&(a, l)| at < a + l && a < at + len)
}

/// Octets of the memory that the peer works on.
fn target_len(s: &Settings) -> usize {
    60_000.max(2 * s.longest as usize)
}

fn length(dice: &mut Dice, longest: u32) -> usize {
    match dice.below(8) {
        0 => 0,
        1 | 2 => dice.below(40.min(u64::from(longest) + 1)) as usize,
        _ => dice.below(u64::from(longest) + 1) as usize,
    }
}

fn reliable(dice: &mut Dice, s: &Settings, pair: usize, side: usize) -> Plan {
    let target_len = target_len(s);
    let target = dice.octets(target_len);
    let mut p = Plan { before: target.clone(), target, ..Plan::default() };
    // Ranges of READs that may not be answered yet: what changes them waits for that.
    let mut unanswered: Vec<(usize, usize)> = Vec::new();
    for n in 0..s.operations {
        let id = n as u64;
        let len = length(dice, s.longest);
        let data = dice.octets(len);
        let at = dice.below((target_len - len) as u64) as usize;
        let word_at = at.min(target_len - 8) & !7;
        let mut flags = SendFlags::empty();
        flags.set(SendFlags::SIGNALED, !dice.one_in(4));
        let solicited = dice.one_in(3);
        flags.set(SendFlags::SOLICITED, solicited);
        let mut wc = Wc { id, qpn: qpn(pair, side), byte_len: len as u32, ..Wc::default() };
        let received = Wc {
            qpn: qpn(pair, 1 - side),
            opcode: WcOpcode::RECV,
            byte_len: len as u32,
            solicited,
            ..Wc::default()
        };
        let mut fence = |at, len| {
            if touches(&unanswered, at, len) {
                unanswered.clear();
                return SendFlags::FENCE;
            }
            SendFlags::empty()
        };
        p.packets += 1 + (len as u64).div_ceil(s.mtu.octets().into());
        let (op, payload) = match dice.below(13) {
            0 | 1 => {
                p.receive(dice, &data, received);
                (SendOp::Send, p.gather(dice, &data))
            }
            2 => {
                let imm = dice.draw() as u32;
                p.receive(dice, &data, Wc { imm: Some(Imm::from_u32(imm)), ..received });
                (SendOp::SendImm(imm), p.gather(dice, &data))
            }
            3 => {
                let key = RKey(MORTAL + n as u32);
                p.receive(dice, &data, Wc { invalidated: Some(key), ..received });
                (SendOp::SendInv(key), p.gather(dice, &data))
            }
            kind @ 4..=6 => {
                flags |= fence(at, len);
                p.target[at..at + len].copy_from_slice(&data);
                wc.opcode = WcOpcode::WRITE;
                let payload = p.gather(dice, &data);
                if kind == 4 {
                    let imm = dice.draw() as u32;
                    let opcode = WcOpcode::RECV_IMM;
                    let imm_wc = Some(Imm::from_u32(imm));
                    p.receive(dice, &[], Wc { opcode, imm: imm_wc, ..received });
                    (SendOp::WriteImm(remote(at), imm), payload)
                } else {
                    (SendOp::Write(remote(at)), payload)
                }
            }
            7 | 8 => {
                unanswered.push((at, len));
                wc.opcode = WcOpcode::READ;
                let there = p.target[at..at + len].to_vec();
                (SendOp::Read(remote(at)), p.expect_in_sink(dice, &there))
            }
            kind @ (9 | 10) => {
                flags |= fence(word_at, 8);
                let (op, model) = atomic(dice, kind == 9, word_at, &p.target);
                let word = &mut p.target[word_at..word_at + 8];
                let old: [u8; 8] = word.try_into().unwrap_or_default();
                word.copy_from_slice(&model.apply(u64::from_ne_bytes(old)).to_ne_bytes());
                (wc.opcode, wc.byte_len) = (op.wc_opcode(), 8);
                (op, p.expect_in_sink(dice, &old))
            }
            11 => {
                flags |= fence(word_at, 8);
                let word = dice.octets(8);
                p.target[word_at..word_at + 8].copy_from_slice(&word);
                (wc.opcode, wc.byte_len) = (WcOpcode::ATOMIC_WRITE, 8);
                (SendOp::AtomicWrite(remote(word_at)), p.gather(dice, &word))
            }
            _ => {
                let none = Payload::Sges([].into_iter().collect());
                let op = if dice.one_in(3) {
                    SendOp::LocalInv(RKey(OWN_MORTAL + n as u32))
                } else {
                    SendOp::Flush {
                        remote: remote(at),
                        len: len as u32,
                        placement: Placement::GLOBAL_VISIBILITY,
                        selectivity: Selectivity(dice.below(2) as u8),
                    }
                };
                (wc.opcode, wc.byte_len) = (op.wc_opcode(), 0);
                (op, none)
            }
        };
        if flags.contains(SendFlags::SIGNALED) {
            p.send_wcs.push(wc);
        }
        p.sends.push(SendWr { id, op, payload, flags, dest: None });
    }
    p
}

/// An atomic on the word at `at`, and what it does.
fn atomic(dice: &mut Dice, add: bool, at: usize, target: &[u8]) -> (SendOp, AtomicOp) {
    let (remote, number) = (remote(at), dice.draw());
    if add {
        let op = SendOp::FetchAdd { remote, add: number, mask: 0 };
        return (op, AtomicOp::FetchAdd { add: number, mask: 0 });
    }
    let old: [u8; 8] = target[at..at + 8].try_into().unwrap_or_default();
    let compare = if dice.one_in(2) { u64::from_ne_bytes(old) } else { dice.draw() };
    let (swap, compare_mask, swap_mask) = (number, u64::MAX, u64::MAX);
    let op = SendOp::CmpSwap { remote, compare, swap, compare_mask, swap_mask };
    (op, AtomicOp::CmpSwap { compare, swap, compare_mask, swap_mask })
}

fn unreliable(dice: &mut Dice, s: &Settings, pair: usize, side: usize) -> Plan {
    let datagrams = s.kind == QpType::Ud;
    let longest = if datagrams { s.longest.min(s.mtu.octets()) } else { s.longest };
    let room = longest + if datagrams { GRH_LEN as u32 } else { 0 };
    let mut p = Plan::default();
    for n in 0..s.operations {
        let id = n as u64;
        let len = length(dice, longest);
        let data = dice.octets(len);
        let solicited = dice.one_in(3);
        let mut flags = SendFlags::empty();
        flags.set(SendFlags::SIGNALED, !dice.one_in(4));
        flags.set(SendFlags::SOLICITED, solicited);
        let number = dice.draw() as u32;
        let at = p.target.len();
        let op = match dice.below(if datagrams { 2 } else { 4 }) {
            0 => SendOp::Send,
            1 => SendOp::SendImm(number),
            2 => SendOp::Write(remote(at)),
            _ => SendOp::WriteImm(remote(at), number),
        };
        let is_write = op.wc_opcode() == WcOpcode::WRITE;
        if is_write {
            // Each has its own place.
            p.before.extend(dice.octets(len));
            p.target.extend_from_slice(&data);
        }
        let imm = match op {
            SendOp::SendImm(imm) | SendOp::WriteImm(_, imm) => Some(Imm::from_u32(imm)),
            _ => None,
        };
        let consumes = !matches!(op, SendOp::Write(_));
        if consumes {
            let id = RECEIVE_IDS + p.receives.len() as u64;
            let sges = split(dice, p.inbox.len() as u64, room, INBOX);
            p.receives.push(RecvWr { id, sges });
            p.inbox.extend(iter::repeat_n(0, room as usize));
        }
        let payload = p.gather(dice, &data);
        if flags.contains(SendFlags::SIGNALED) {
            let (qpn, opcode) = (qpn(pair, side), op.wc_opcode());
            p.send_wcs.push(Wc { id, qpn, opcode, byte_len: len as u32, ..Wc::default() });
        }
        let dest = datagrams.then(|| UdDest {
            addr: s.ends()[1 - side],
            qpn: qpn(pair, 1 - side),
            qkey: super::QKEY,
        });
        p.packets += 1 + (len as u64).div_ceil(s.mtu.octets().into());
        p.sends.push(SendWr { id, op, payload, flags, dest });
        p.messages.push(Message { data, imm, solicited, at: is_write.then_some(at), consumes });
    }
    p
}

/// `len` octets from `addr`, cut into one to four pieces, some of them empty.
fn split<L: FromIterator<Sge>>(dice: &mut Dice, addr: u64, len: u32, key: u32) -> L {
    let mut cuts: Vec<u32> =
        (0..dice.below(4)).map(|_| dice.below(u64::from(len) + 1) as u32).collect();
    cuts.extend([0, len]);
    cuts.sort_unstable();
    cuts.windows(2).map(|w| Sge::new(addr + u64::from(w[0]), w[1] - w[0], LKey(key))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::collections::BTreeMap;

    #[test]
    fn operations_of_all_kinds_are_planned_and_change_something() {
        for (kind, kinds) in [(QpType::Rc, 11), (QpType::Uc, 4), (QpType::Ud, 2)] {
            let s = Settings { kind, operations: 200, ..Settings::from_seed(1) };
            let p = Plan::new(&mut Dice::new(1, 0), &s, 0, 0);
            let names: BTreeMap<&str, usize> = p.sends.iter().fold(BTreeMap::new(), |mut m, wr| {
                *m.entry(wr.op.name()).or_default() += 1;
                m
            });
            assert_eq!(names.len(), kinds, "{kind:?}: {names:?}");
            assert!(kind == QpType::Ud || p.target != p.before);
        }
    }
}
