//! Registered memory that notes who touches it, and the account of a queue pair's work.

use std::{cell::RefCell, collections::VecDeque};

use userdma_proto::{
    mem::{AccessError, AtomicOp, Memory, PdId, Scope},
    verbs::{Access, Payload, PostError, RecvWr, SendFlags, SendOp, SendWr, Sge, Wc, WcOpcode},
    wire::ids::{LKey, Qpn, RKey},
};
use userdma_tests::PlainMemory;

use crate::Choices;

pub(crate) const DOMAIN: PdId = PdId(userdma_tests::PD);
/// Octets of each region.
pub(crate) const LEN: usize = 4096;
/// Everything is allowed.
pub(crate) const OPEN: u32 = 1;
/// Nothing is.
pub(crate) const SECRET: u32 = 2;
/// Only the program writes.
pub(crate) const INBOX: u32 = 3;
/// Bound to the queue pair; the peer may revoke it.
pub(crate) const BOUND: u32 = 4;
/// Of another protection domain.
pub(crate) const FOREIGN: u32 = 5;
/// Everything is allowed, and its addresses are the highest there are.
pub(crate) const HIGH: u32 = 6;
pub(crate) const KEYS: [u32; 8] = [OPEN, SECRET, INBOX, BOUND, FOREIGN, HIGH, 0, 0xdead];

/// A successful access.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Touch {
    ReadLocal(Sge),
    WriteLocal(Sge),
    Remote(Access, u64),
}

/// The tests' memory, and a record of what was touched, and on whose behalf.
#[derive(Debug, Default)]
pub(crate) struct Recorder {
    pub(crate) plain: PlainMemory,
    pub(crate) touched: RefCell<Vec<(Qpn, Touch)>>,
}

impl Recorder {
    /// The six regions; `remote` is what a peer may do with those that are open to it.
    pub(crate) fn new(remote: Access, bound_to: Qpn) -> Self {
        let mem = Self::default();
        let (all, pd) = (remote | Access::LOCAL_WRITE, DOMAIN.0);
        mem.plain.add(OPEN, pd, all, 0, vec![1; LEN]);
        mem.plain.add(SECRET, pd, Access::empty(), 0, vec![2; LEN]);
        mem.plain.add(INBOX, pd, Access::LOCAL_WRITE, 0, vec![3; LEN]);
        mem.plain.add(BOUND, pd, remote | Access::REMOTE_INVALIDATE, 0, vec![4; LEN]);
        mem.plain.bind(BOUND, bound_to);
        mem.plain.add(FOREIGN, pd + 1, all, 0, vec![5; LEN]);
        mem.plain.add(HIGH, pd, all, u64::MAX - LEN as u64, vec![6; LEN]);
        mem
    }

    /// What was touched since the last time.
    pub(crate) fn take(&self) -> Vec<(Qpn, Touch)> {
        std::mem::take(&mut *self.touched.borrow_mut())
    }

    /// Regions that no peer and no program writes are as they were, unless their keys are gone.
    pub(crate) fn check_untouched(&self) {
        for (key, octet) in [(SECRET, 2), (FOREIGN, 5)] {
            let same = self.plain.look(key, |bytes| bytes.iter().all(|&byte| byte == octet));
            assert!(same, "somebody wrote to the region {key}");
        }
    }

    fn note<T>(
        &self,
        scope: Scope,
        touch: Touch,
        done: Result<T, AccessError>,
    ) -> Result<T, AccessError> {
        assert_eq!(scope.pd, DOMAIN, "{touch:?}: no queue pair is of this domain");
        if done.is_ok() {
            self.touched.borrow_mut().push((scope.qpn, touch));
        }
        done
    }
}

impl Memory for Recorder {
    fn check_local(&self, scope: Scope, sge: Sge, access: Access) -> Result<(), AccessError> {
        self.plain.check_local(scope, sge, access)
    }

    fn check_remote(
        &self,
        scope: Scope,
        rkey: RKey,
        addr: u64,
        len: u64,
        access: Access,
    ) -> Result<(), AccessError> {
        self.plain.check_remote(scope, rkey, addr, len, access)
    }

    fn read_local(&self, scope: Scope, sge: Sge, out: &mut Vec<u8>) -> Result<(), AccessError> {
        self.note(scope, Touch::ReadLocal(sge), self.plain.read_local(scope, sge, out))
    }

    fn write_local(
        &self,
        scope: Scope,
        lkey: LKey,
        addr: u64,
        data: &[u8],
    ) -> Result<(), AccessError> {
        let sge = Sge::new(addr, data.len() as u32, lkey);
        self.note(scope, Touch::WriteLocal(sge), self.plain.write_local(scope, lkey, addr, data))
    }

    fn read_remote(
        &self,
        scope: Scope,
        rkey: RKey,
        addr: u64,
        len: u64,
        out: &mut Vec<u8>,
    ) -> Result<(), AccessError> {
        let touch = Touch::Remote(Access::REMOTE_READ, len);
        self.note(scope, touch, self.plain.read_remote(scope, rkey, addr, len, out))
    }

    fn write_remote(
        &self,
        scope: Scope,
        rkey: RKey,
        addr: u64,
        data: &[u8],
    ) -> Result<(), AccessError> {
        let touch = Touch::Remote(Access::REMOTE_WRITE, data.len() as u64);
        self.note(scope, touch, self.plain.write_remote(scope, rkey, addr, data))
    }

    fn atomic(
        &self,
        scope: Scope,
        rkey: RKey,
        addr: u64,
        op: AtomicOp,
    ) -> Result<u64, AccessError> {
        let touch = Touch::Remote(Access::REMOTE_ATOMIC, 8);
        self.note(scope, touch, self.plain.atomic(scope, rkey, addr, op))
    }

    fn invalidate(&self, scope: Scope, rkey: RKey) -> Result<(), AccessError> {
        self.plain.invalidate(scope, rkey)
    }
}

/// A work request that was taken and has not completed.
#[derive(Debug)]
struct Posted {
    tag: u64,
    signaled: bool,
    /// What it may touch, and whether by writing.
    sges: Vec<Sge>,
    writes: bool,
}

impl Posted {
    fn covers(&self, piece: Sge) -> bool {
        let end = |sge: &Sge| u128::from(sge.addr) + u128::from(sge.length);
        self.sges
            .iter()
            .any(|sge| sge.lkey == piece.lkey && sge.addr <= piece.addr && end(&piece) <= end(sge))
    }
}

/// What a queue pair was given to do and has not told the end of.
#[derive(Debug, Default)]
pub(crate) struct Books {
    sends: VecDeque<Posted>,
    recvs: VecDeque<Posted>,
    /// Of each queue, whether something failed.
    failed: [bool; 2],
    /// Completions that told success.
    pub(crate) succeeded: usize,
    /// Octets that came and were placed for sends and receives, and those that completions told of.
    placed: u64,
    told: u64,
}

impl Books {
    /// The queue pair took a send, with the tag `wr.id`.
    pub(crate) fn sent(&mut self, wr: &SendWr) {
        let sges = match &wr.payload {
            Payload::Sges(sges) => sges.to_vec(),
            Payload::Inline(_) => Vec::new(),
        };
        let writes =
            matches!(wr.op, SendOp::Read(_) | SendOp::FetchAdd { .. } | SendOp::CmpSwap { .. });
        let signaled = wr.flags.contains(SendFlags::SIGNALED);
        self.sends.push_back(Posted { tag: wr.id, signaled, sges, writes });
    }

    /// The queue pair took a receive, with the tag `wr.id`.
    pub(crate) fn received(&mut self, wr: &RecvWr) {
        let sges = wr.sges.to_vec();
        self.recvs.push_back(Posted { tag: wr.id, signaled: true, sges, writes: true });
    }

    /// The queue pair, whose queue has room for `max`, refused a send or a receive.
    pub(crate) fn refused(&self, error: PostError, recv: bool, max: usize) {
        assert!(!error.to_string().is_empty());
        if let PostError::QueueFull { max: told } = error {
            let outstanding = if recv { self.recvs.len() } else { self.sends.len() };
            assert_eq!(told, max);
            assert!(outstanding >= max, "{outstanding} of {max}");
        }
    }

    /// Octets in registered memory are read or written for this queue pair: only where work says so.
    /// Of the receives the first `recvs` may be in use.
    pub(crate) fn judge(&mut self, touch: Touch, recvs: usize) {
        match touch {
            Touch::ReadLocal(sge) if sge.length > 0 => {
                let posted = self.sends.iter().any(|work| !work.writes && work.covers(sge));
                assert!(posted, "{sge:?} was read: not posted");
            }
            Touch::WriteLocal(sge) if sge.length > 0 => {
                let posted = self.sends.iter().any(|work| work.writes && work.covers(sge))
                    || self.recvs.iter().take(recvs).any(|work| work.covers(sge));
                assert!(posted, "{sge:?} was written: not posted");
                self.placed += u64::from(sge.length);
            }
            Touch::ReadLocal(_) | Touch::WriteLocal(_) | Touch::Remote(..) => {}
        }
    }

    /// A completion: its work was posted, all before it in its queue is done, no success follows a
    /// failure, and what it tells of has come.
    pub(crate) fn complete(&mut self, tag: u64, wc: &Wc, qpn: Qpn) {
        let recv = wc.opcode.is_recv();
        let queue = if recv { &mut self.recvs } else { &mut self.sends };
        loop {
            let work = queue.pop_front().unwrap_or_else(|| panic!("{tag}, {wc:?}: not posted"));
            if work.tag == tag {
                assert!(work.signaled || !wc.status.is_ok(), "{tag}: nobody asked for {wc:?}");
                let has_come = matches!(
                    wc.opcode,
                    WcOpcode::RECV | WcOpcode::READ | WcOpcode::FETCH_ADD | WcOpcode::CMP_SWAP
                );
                if has_come && wc.status.is_ok() {
                    let room: u64 = work.sges.iter().map(|sge| u64::from(sge.length)).sum();
                    assert!(u64::from(wc.byte_len) <= room, "{wc:?} into {room} octets");
                    self.told += u64::from(wc.byte_len);
                    assert!(self.told <= self.placed, "{wc:?}: not so much came");
                }
                break;
            }
            // Unsignalled work that succeeded before it.
            assert!(!work.signaled, "{tag}, {wc:?} came before {}", work.tag);
        }
        assert_eq!((wc.id, wc.qpn), (tag, qpn));
        let failed = &mut self.failed[usize::from(recv)];
        assert!(!(*failed && wc.status.is_ok()), "{tag}: a success behind a failure: {wc:?}");
        *failed |= !wc.status.is_ok();
        self.succeeded += usize::from(wc.status.is_ok());
    }

    /// The queue pair is in the error state: everything has completed.
    pub(crate) fn check_done(&mut self) {
        assert!(self.recvs.is_empty(), "never completed: {:?}", self.recvs);
        self.check_sends_done();
    }

    /// All sends have completed.
    pub(crate) fn check_sends_done(&mut self) {
        let left: Vec<_> = self.sends.iter().filter(|work| work.signaled).collect();
        assert!(left.is_empty(), "never completed: {left:?}");
        self.sends.clear();
    }

    /// The queue pair forgot all: it went back to RESET.
    pub(crate) fn forget(&mut self) {
        *self = Self { succeeded: self.succeeded, ..Self::default() };
    }
}

impl Choices<'_> {
    /// An address, mostly within the regions.
    pub(crate) fn address(&mut self) -> u64 {
        let (choice, low) = (self.any::<u8>(), self.any::<u16>());
        match choice {
            0xf0.. => u64::MAX - u64::from(low),
            0xe0.. => u64::from(low) << 24,
            _ => u64::from(low) % (LEN as u64 + 64),
        }
    }

    pub(crate) fn sge(&mut self) -> Sge {
        let key = LKey(KEYS[usize::from(self.any::<u8>()) % KEYS.len()]);
        let addr = self.address();
        Sge::new(addr, u32::from(self.any::<u16>()) % (LEN as u32 + 64), key)
    }

    pub(crate) fn sges(&mut self) -> Vec<Sge> {
        (0..self.below(4)).map(|_| self.sge()).collect()
    }
}
