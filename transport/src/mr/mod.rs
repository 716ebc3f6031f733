//! Registered memory: regions, their keys, and every access to them.
//!
//! A peer writes a registered region while the program looks at it, so nobody ever holds a
//! reference into one. The program copies in and out ([`Mr::read_at`], [`Mr::write_at`]) or polls
//! a word ([`Mr::load_u64`]); the state machines copy through [`Memory`]; the kernel
//! gets pointers that are held for the call ([`Table::pin_read`]).
//!
//! **Order.** What is stored into a region as one piece (a peer's WRITE, one [`Mr::write_at`]) is
//! stored rising, and each of its last 64 octets' words after everything before it. So a program
//! that polls the last octet or word of a piece with [`Ordering::Acquire`] and finds it new finds
//! all of the piece with [`Mr::read_at`]. A single `read_at` that covers both gives no such
//! promise: it loads rising too, the flag last. But it acquires: a second one sees all that the
//! first one's octets were stored after.
//!
//! **Whole words.** An 8-octet word at an address that is a multiple of 8 is never torn, whoever
//! stores and loads it. Octets beside a piece keep what others store there.
//!
//! **Revocation is a barrier.** After [`Mr::deregister`], [`Mr::rearm`] or an invalidation has
//! returned, no octet is touched through the old key, by nobody.

#![deny(unsafe_code)]

mod gate;
mod keys;
#[allow(unsafe_code)]
mod raw;
mod region;
mod table;

use std::{
    fmt,
    ops::Range,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use parking_lot::Mutex;
#[cfg(doc)]
use userdma_proto::mem::Memory;
use userdma_proto::{
    mem::{AccessError, AtomicOp, PdId},
    verbs::{Access, RemoteAddr, Sge},
    wire::ids::{LKey, Qpn, RKey},
};

use self::raw::{Backing, Held};
pub use self::{
    region::Region,
    table::{DEFAULT_MAX_REGIONS, Pin, PinMut, Table},
};

/// Why memory was not registered. Nothing changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RegisterError {
    /// A region has at least one octet.
    #[error("a memory region of 0 octets: it must have at least 1")]
    Empty,
    /// The system has not as much memory, or not as much address space.
    #[error("no memory for {len} octets")]
    NoMemory {
        /// Octets asked for.
        len: usize,
    },
    /// Foreign memory that cannot be: it begins at null, or leaves the address space.
    #[error("{len} octets at {addr:#x} are no range of memory")]
    BadRange {
        /// Where it begins.
        addr: usize,
        /// Its length in octets.
        len: usize,
    },
    /// Foreign memory that is not there.
    #[error("nothing is mapped at {addr:#x}: map the whole range before it is registered")]
    NotMapped {
        /// The first page (or octet) without memory.
        addr: usize,
    },
    /// The device has as many regions as it may have.
    #[error("{max} memory regions are registered, which is the limit: deregister some")]
    Limit {
        /// How many there may be.
        max: usize,
    },
    /// No such protection domain, or no more.
    #[error("protection domain {} does not exist (any more)", .0.0)]
    UnknownPd(PdId),
    /// A protection domain that is to be freed still has regions.
    #[error("the protection domain still has {regions} memory regions: deregister them first")]
    PdInUse {
        /// How many.
        regions: usize,
    },
    /// The region has been deregistered.
    #[error("the memory region has been deregistered")]
    Deregistered,
    /// The system gives no random numbers, without which a key could be guessed.
    #[error("no random numbers for a key: {0}")]
    Random(getrandom::Error),
}

/// A registered memory region. Cheap to clone; the last clone's drop deregisters.
///
/// `lkey` and `rkey` are the same number. All offsets count octets from the region's start.
/// Work that was posted holds no clone: keep one until it has completed.
#[derive(Clone)]
pub struct Mr(Arc<Inner>);

struct Inner {
    table: Arc<Table>,
    backing: Arc<Backing>,
    /// INVARIANT: the slot is this region's exactly while `registered`.
    slot: u32,
    registered: Mutex<bool>,
    /// The newest key, valid or not.
    key: AtomicU32,
    access: Access,
}

impl Mr {
    fn new(table: Arc<Table>, backing: Arc<Backing>, slot: u32, key: u32, access: Access) -> Self {
        let (registered, key) = (Mutex::new(true), AtomicU32::new(key));
        Self(Arc::new(Inner { table, backing, slot, registered, key, access }))
    }

    /// Length in octets, at least 1.
    #[expect(clippy::len_without_is_empty, reason = "a region is never empty")]
    pub fn len(&self) -> usize {
        self.0.backing.len()
    }

    /// The key for the program's own work requests.
    pub fn lkey(&self) -> LKey {
        LKey(self.0.key.load(Ordering::Relaxed))
    }

    /// The key for peers. Whoever knows it and reaches a queue pair of this protection domain may
    /// do what the region's rights allow: see [`Mr::bind`].
    pub fn rkey(&self) -> RKey {
        RKey(self.0.key.load(Ordering::Relaxed))
    }

    /// What the region was registered for.
    pub fn access(&self) -> Access {
        self.0.access
    }

    /// Address of its first octet in work requests: 0 for owned and lent memory, the pointer for
    /// foreign memory.
    pub fn addr(&self) -> u64 {
        self.0.backing.iova()
    }

    /// A piece for a work request.
    ///
    /// # Panics
    /// Where the range is outside the region or longer than `u32::MAX` octets.
    #[track_caller]
    pub fn slice(&self, range: Range<usize>) -> Sge {
        let Range { start, end } = range;
        let len = self.len();
        assert!(
            start <= end && end <= len,
            "the range {start}..{end} is outside a region of {len} octets"
        );
        let Ok(length) = u32::try_from(end - start) else {
            panic!("a piece of {} octets: one work request moves at most 2^32 - 1", end - start);
        };
        Sge::new(self.addr() + start as u64, length, self.lkey())
    }

    /// The place at `offset`, to be told to a peer.
    ///
    /// # Panics
    /// Where `offset` is beyond the region's end.
    #[track_caller]
    pub fn remote(&self, offset: usize) -> RemoteAddr {
        let len = self.len();
        assert!(offset <= len, "offset {offset} is outside a region of {len} octets");
        RemoteAddr::new(self.addr() + offset as u64, self.rkey())
    }

    /// Fills `out` with the octets at `offset`.
    ///
    /// Words are loaded rising; what is read after this call is no older than what it saw (the
    /// module's head says what that means for polling).
    ///
    /// # Errors
    /// [`AccessError::Bounds`], or [`AccessError::InvalidKey`] once deregistered. An invalidated
    /// key does not matter: the memory is the program's own.
    pub fn read_at(&self, offset: usize, out: &mut [u8]) -> Result<(), AccessError> {
        self.enter(offset, out.len())?.words().load_to_slice(offset, out);
        Ok(())
    }

    /// Stores `data` at `offset`, in the order in which a peer's data is stored: rising, the last
    /// 64 octets visibly so.
    ///
    /// # Errors
    /// As [`Mr::read_at`].
    pub fn write_at(&self, offset: usize, data: &[u8]) -> Result<(), AccessError> {
        self.enter(offset, data.len())?.words().store(offset, data);
        Ok(())
    }

    /// The 8-octet word at `offset`, in the host's octet order.
    ///
    /// # Panics
    /// Where the word is outside the region, its address is not a multiple of 8 (owned memory
    /// starts at a page; lent and foreign memory anywhere), `order` is not one for loads, or the
    /// region is deregistered.
    #[track_caller]
    #[inline]
    pub fn load_u64(&self, offset: usize, order: Ordering) -> u64 {
        match self.0.backing.peek() {
            Some(words) => words.load_u64(offset, order),
            None => self.held().words().load_u64(offset, order),
        }
    }

    /// Stores the 8-octet word at `offset`, in the host's octet order.
    ///
    /// # Panics
    /// As [`Mr::load_u64`]; `order` is one for stores.
    #[track_caller]
    #[inline]
    pub fn store_u64(&self, offset: usize, value: u64, order: Ordering) {
        self.held().words().store_u64(offset, value, order);
    }

    /// The octet at `offset`: to poll the last octet of a message, as verbs programs do.
    ///
    /// # Panics
    /// As [`Mr::load_u64`], at any address.
    #[track_caller]
    #[inline]
    pub fn load_u8(&self, offset: usize, order: Ordering) -> u8 {
        match self.0.backing.peek() {
            Some(words) => words.load_u8(offset, order),
            None => self.held().words().load_u8(offset, order),
        }
    }

    /// Carries `op` out on the word at `offset`, atomically also for peers' atomics. Returns the
    /// word before.
    ///
    /// # Panics
    /// As [`Mr::load_u64`].
    #[track_caller]
    pub fn atomic(&self, offset: usize, op: AtomicOp) -> u64 {
        self.held().words().atomic(offset, op)
    }

    /// Only the peer of queue pair `qpn` may use the key from now on; and may invalidate it, where
    /// the region has [`Access::REMOTE_INVALIDATE`]. The program's own work requests are not
    /// limited. Stays with the region when it is rearmed.
    ///
    /// Bind before the key is told to anybody: accesses that have begun are not waited for.
    ///
    /// # Errors
    /// [`RegisterError::Deregistered`].
    pub fn bind(&self, qpn: Qpn) -> Result<(), RegisterError> {
        self.set_bound(Some(qpn))
    }

    /// Lets the peers of all queue pairs of the protection domain use the key again, and none
    /// invalidate it.
    ///
    /// # Errors
    /// [`RegisterError::Deregistered`].
    pub fn unbind(&self) -> Result<(), RegisterError> {
        self.set_bound(None)
    }

    fn set_bound(&self, qpn: Option<Qpn>) -> Result<(), RegisterError> {
        let registered = self.0.registered.lock();
        if !*registered {
            return Err(RegisterError::Deregistered);
        }
        self.0.table.bind(self.0.slot, qpn);
        Ok(())
    }

    /// Revokes the region: after it returns no octet is touched, neither by a peer nor through any
    /// clone. Waits for accesses and system calls that are under way; calling it again, or from
    /// two threads, is harmless. Owned memory is freed with the last clone.
    ///
    /// Must not be called by a thread that holds a [`Pin`] of the region.
    pub fn deregister(&self) {
        self.0.deregister();
    }

    /// Gives the region fresh keys, whether the old ones were invalidated or not. After it returns
    /// no octet is touched through the old ones.
    ///
    /// # Errors
    /// [`RegisterError::Deregistered`]; [`RegisterError::Random`], and the region is left without
    /// a valid key then.
    pub fn rearm(&self) -> Result<(), RegisterError> {
        let Inner { table, slot, registered, key, .. } = &*self.0;
        let registered = registered.lock();
        if !*registered {
            return Err(RegisterError::Deregistered);
        }
        let old = key.load(Ordering::Relaxed);
        table.revoke(*slot, old);
        key.store(table.rekey(*slot, old)?, Ordering::Relaxed);
        Ok(())
    }

    /// Whether the key is valid: neither invalidated nor deregistered.
    pub fn is_valid(&self) -> bool {
        self.0.table.opens(self.0.slot, self.0.key.load(Ordering::Relaxed))
    }

    /// Deregisters, and gives back the buffer that [`Region::from_vec`] took, with what peers
    /// wrote.
    ///
    /// # Errors
    /// The region itself, unchanged, where it is not made of a buffer or has other clones.
    pub fn into_vec(mut self) -> Result<Vec<u8>, Self> {
        let Some(inner) = Arc::get_mut(&mut self.0) else {
            return Err(self);
        };
        if !inner.backing.is_vec() {
            return Err(self);
        }
        inner.deregister();
        // The table has let go of the memory, and nobody else ever has it.
        let vec = Arc::get_mut(&mut inner.backing).and_then(Backing::take_vec);
        vec.ok_or(self)
    }

    /// Goes to `len` octets at `offset` on behalf of the program.
    #[inline]
    fn enter(&self, offset: usize, len: usize) -> Result<Held<'_>, AccessError> {
        let held = self.0.backing.enter().ok_or(AccessError::InvalidKey)?;
        let region = self.len();
        if offset > region || len > region - offset {
            return Err(AccessError::Bounds);
        }
        Ok(held)
    }

    #[track_caller]
    fn held(&self) -> Held<'_> {
        match self.0.backing.enter() {
            Some(held) => held,
            None => panic!("the memory region has been deregistered"),
        }
    }
}

impl fmt::Debug for Mr {
    /// Never the octets.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Mr")
            .field("key", &self.rkey())
            .field("addr", &format_args!("{:#x}", self.addr()))
            .field("len", &self.len())
            .field("access", &self.0.access)
            .field("valid", &self.is_valid())
            .finish()
    }
}

impl Inner {
    fn deregister(&self) {
        // Held while waiting: a second caller must not return before nobody is inside either.
        let mut registered = self.registered.lock();
        if !*registered {
            return;
        }
        *registered = false;
        self.backing.close();
        self.table.revoke(self.slot, self.key.load(Ordering::Relaxed));
        self.table.release(self.slot);
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.deregister();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        panic::{AssertUnwindSafe, catch_unwind},
        sync::atomic::AtomicBool,
        thread,
    };
    use userdma_proto::mem::{Memory, Scope};

    /// Ends the threads that look at the flag, also where an assertion fails.
    pub(super) struct StopOnDrop<'a>(pub(super) &'a AtomicBool);

    impl Drop for StopOnDrop<'_> {
        fn drop(&mut self) {
            self.0.store(true, Ordering::Relaxed);
        }
    }

    fn register(region: Region) -> (Arc<Table>, Scope, Mr) {
        let table = Table::new();
        let pd = table.alloc_pd();
        let mr = table.register(pd, region, Access::all()).unwrap();
        (table, Scope { pd, qpn: Qpn(1) }, mr)
    }

    fn panic_of<T: fmt::Debug>(run: impl FnOnce() -> T) -> String {
        let panic = catch_unwind(AssertUnwindSafe(run)).unwrap_err();
        match panic.downcast::<String>() {
            Ok(text) => *text,
            Err(panic) => (*panic.downcast::<&str>().unwrap()).to_owned(),
        }
    }

    #[test]
    fn a_lent_buffer_comes_back_with_what_was_written() {
        let mut vec = Vec::with_capacity(100);
        vec.extend_from_slice(b"lent buffer");
        let place = vec.as_ptr();
        let (table, scope, mr) = register(Region::from_vec(vec));
        let key = mr.rkey();
        table.write_remote(scope, key, 5, b"BUFFER").unwrap();
        let clone = mr.clone();
        let mr = mr.into_vec().expect_err("a clone is left");
        assert!(mr.is_valid());
        drop(clone);
        let vec = mr.into_vec().unwrap();
        assert_eq!(
            (vec.as_slice(), vec.as_ptr(), vec.capacity()),
            (&b"lent BUFFER"[..], place, 100)
        );
        assert_eq!(table.write_remote(scope, key, 0, &[0]), Err(AccessError::InvalidKey));
        assert_eq!(table.regions(), 0);
    }

    #[test]
    fn a_lent_buffer_comes_back_after_deregister_and_invalidate() {
        let (_table, _, mr) = register(Region::from_vec(vec![1; 9]));
        mr.deregister();
        assert_eq!(mr.into_vec().unwrap(), [1; 9]);
        let (table, scope, mr) = register(Region::from_vec(vec![2; 9]));
        mr.bind(scope.qpn).unwrap();
        table.invalidate(scope, mr.rkey()).unwrap();
        assert_eq!(mr.into_vec().unwrap(), [2; 9]);
        let (_table, _, mr) = register(Region::alloc(9).unwrap());
        assert!(mr.into_vec().expect_err("pages are no buffer").is_valid());
    }

    #[test]
    fn every_clone_is_dead_after_deregister() {
        let (table, scope, mr) = register(Region::alloc(64).unwrap());
        let clone = mr.clone();
        assert!(clone.is_valid());
        mr.deregister();
        mr.deregister();
        assert!(!clone.is_valid());
        assert_eq!(clone.read_at(0, &mut [0]), Err(AccessError::InvalidKey));
        assert_eq!(clone.write_at(0, &[0]), Err(AccessError::InvalidKey));
        assert_eq!(clone.rearm(), Err(RegisterError::Deregistered));
        assert_eq!(clone.bind(Qpn(1)), Err(RegisterError::Deregistered));
        assert_eq!(
            table.read_local(scope, clone.slice(0..8), &mut Vec::new()),
            Err(AccessError::InvalidKey)
        );
        // The slot is another region's now, which the dead clone leaves alone.
        let next = table.register(scope.pd, Region::alloc(8).unwrap(), Access::all()).unwrap();
        drop((mr, clone));
        assert!(next.is_valid());
        assert_eq!(table.regions(), 1);
    }

    #[test]
    fn the_last_drop_deregisters() {
        let (table, scope, mr) = register(Region::alloc(64).unwrap());
        let (clone, sge) = (mr.clone(), mr.slice(0..8));
        drop(mr);
        assert_eq!(table.check_local(scope, sge, Access::empty()), Ok(()));
        drop(clone);
        let gone = table.check_local(scope, sge, Access::empty());
        assert_eq!(gone, Err(AccessError::InvalidKey));
    }

    #[test]
    fn pieces_and_places_are_told_from_the_start() {
        let (_table, _, mr) = register(Region::alloc(100).unwrap());
        assert_eq!((mr.addr(), mr.len(), mr.access()), (0, 100, Access::all()));
        assert_eq!(mr.slice(10..30), Sge::new(10, 20, mr.lkey()));
        assert_eq!(mr.slice(100..100), Sge::new(100, 0, mr.lkey()));
        assert_eq!(mr.remote(100), RemoteAddr::new(100, mr.rkey()));
        assert_eq!(
            panic_of(|| mr.slice(90..101)),
            "the range 90..101 is outside a region of 100 octets"
        );
        #[expect(clippy::reversed_empty_ranges, reason = "a wrong argument")]
        let reversed = 5..4;
        assert!(panic_of(|| mr.slice(reversed)).contains("5..4"));
        assert!(panic_of(|| mr.remote(101)).contains("offset 101"));
    }

    #[test]
    fn words_are_polled_at_multiples_of_8_only() {
        let (_table, _, mr) = register(Region::alloc(20).unwrap());
        mr.store_u64(8, 0x0102_0304_0506_0708, Ordering::Release);
        assert_eq!(mr.load_u64(8, Ordering::Acquire), 0x0102_0304_0506_0708);
        let octets: Vec<u8> = (8..16).map(|at| mr.load_u8(at, Ordering::Acquire)).collect();
        assert_eq!(octets, 0x0102_0304_0506_0708u64.to_ne_bytes());
        assert_eq!(mr.load_u8(19, Ordering::Acquire), 0);
        for (at, want) in [
            (4, "offset 4 is not at an address that is a multiple of 8"),
            (16, "8 octets at offset 16 are outside a region of 20 octets"),
        ] {
            assert_eq!(panic_of(|| mr.load_u64(at, Ordering::Acquire)), want);
        }
        mr.deregister();
        let text = panic_of(|| mr.load_u8(0, Ordering::Acquire));
        assert_eq!(text, "the memory region has been deregistered");
    }

    #[test]
    fn the_programs_own_accesses_are_bounded() {
        let (_table, _, mr) = register(Region::alloc(8).unwrap());
        for (at, len) in [(0, 9), (8, 1), (9, 0), (usize::MAX, 2)] {
            assert_eq!(mr.read_at(at, &mut vec![0; len]), Err(AccessError::Bounds));
            assert_eq!(mr.write_at(at, &vec![0; len]), Err(AccessError::Bounds));
        }
        assert_eq!(mr.read_at(8, &mut []), Ok(()));
    }

    #[test]
    fn debug_shows_no_octet() {
        let secret = b"secret octets that must not be printed".to_vec();
        let numbers = format!("{:?}", &secret[..4]);
        let region = Region::from_vec(secret);
        let printed = format!("{region:?}");
        let (table, scope, mr) = register(region);
        let pin = table.pin_read(scope, mr.slice(0..4)).unwrap();
        for text in [printed, format!("{mr:?}"), format!("{table:?}"), format!("{pin:?}")] {
            assert!(!text.contains("secret") && !text.contains(&numbers), "{text}");
        }
    }

    /// Who polls the end of a piece and finds it new finds the whole piece new: the last octet of
    /// pieces that end anywhere in a word, and of lengths below and above the 64-octet tail.
    #[test]
    fn the_last_octet_comes_last() {
        let (table, scope, mr) = register(Region::alloc(4096).unwrap());
        let done = AtomicBool::new(false);
        let pieces = [(0, 8), (0, 64), (3, 62), (0, 4096), (5, 4091), (1000, 1200)];
        for (from, to) in pieces.into_iter().cycle().take(8 * pieces.len()) {
            done.store(false, Ordering::Relaxed);
            mr.write_at(0, &[0; 4096]).unwrap();
            thread::scope(|s| {
                s.spawn(|| {
                    let mut data = vec![0; to - from];
                    for value in 1..=u8::MAX {
                        data.fill(value);
                        table.write_remote(scope, mr.rkey(), from as u64, &data).unwrap();
                    }
                    done.store(true, Ordering::Relaxed);
                });
                // The moment the last octet is new, one other octet: near the end, where a store
                // in the wrong order would come last, or anywhere.
                let (mut seen, mut turn) = (0, 0);
                while !done.load(Ordering::Relaxed) {
                    let last = mr.load_u8(to - 1, Ordering::Acquire);
                    if last == seen {
                        continue;
                    }
                    let back = [2, 9, 60, 65, 70, 130, turn * 61][turn % 7] % (to - from);
                    let octet = mr.load_u8(to - 1 - back, Ordering::Relaxed);
                    assert!(octet >= last, "{octet} {back} octets before a last one of {last}");
                    (seen, turn) = (last, turn + 1);
                }
            });
        }
    }
}
