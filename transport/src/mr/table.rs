//! The table of a device's keys: where every access of a peer or of a work request is checked.
//!
//! An access costs no lock. A key's low bits are the number of a bucket, which names a slot; the
//! slot's door opens for that very key and counts who is inside:
//!
//! ```text
//!   key 0x9c41_7a2e ──low bits──► index[generation] ──► slot: door (key | users), owner,
//!                                                             iova, pd, rights, queue pair
//! ```
//!
//! A new key is drawn until its bucket is free, of which there are at least as many as taken ones;
//! so buckets never collide and a look-up is a single probe. The index grows by a new generation
//! of twice the size; old ones stay for whoever is looking into them (together no larger than the
//! newest). Slots stay where they are until the table goes.
//!
//! Revocation closes the door and waits until nobody is inside. It waits for accesses to this one
//! region only, and holds no lock meanwhile.

use std::{
    collections::hash_map::Entry,
    fmt,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU8, AtomicU32, AtomicU64, Ordering},
    },
};

use parking_lot::Mutex;
use rustc_hash::FxHashMap;
use userdma_proto::{
    mem::{AccessError, AtomicOp, Memory, PdId, Scope},
    verbs::{Access, Sge},
    wire::ids::{LKey, Qpn, RKey},
};

use super::{
    Mr, Region, RegisterError,
    keys::KeySource,
    raw::{Backing, Door, Held},
};

/// Regions that may be registered at a time unless [`Table::with_limit`] says otherwise: as many
/// as the kernel's rxe allows.
pub const DEFAULT_MAX_REGIONS: usize = 1 << 19;

/// Regions that a table can have at most: half of the largest index.
const MOST_REGIONS: usize = 1 << (FIRST_BITS as usize + GENERATIONS - 2);

/// The first index has 2^6 buckets, the first chunk of slots as many slots.
const FIRST_BITS: u32 = 6;

/// Generations of the index, each twice as large as the one before, and chunks of slots.
const GENERATIONS: usize = 26;

/// No queue pair: numbers have 24 bits.
const UNBOUND: u32 = u32::MAX;

/// All regions of one device: keys, rights, and the memory behind them.
///
/// Implements [`Memory`] for the state machines. Reads and writes of registered memory that are
/// not the kernel's go through here or through [`Mr`].
pub struct Table {
    /// Which generation of `indexes` is in use.
    generation: AtomicU8,
    /// INVARIANT: a bucket of the newest generation holds 1 + the number of the slot whose door a
    /// key with these low bits opens, or 0; both change together under `admin`.
    indexes: [OnceLock<Box<[AtomicU32]>>; GENERATIONS],
    /// Chunk `i` has 2^(6 + i) slots.
    chunks: [OnceLock<Box<[Slot]>>; GENERATIONS],
    admin: Mutex<Admin>,
    max_regions: usize,
}

/// One registered region. On its own cache line, so that users of different regions do not slow
/// each other down.
///
/// Apart from the door and `qpn` all is stored before the door opens and stays until it is closed
/// and nobody is inside: relaxed loads inside see it.
#[derive(Default)]
#[repr(align(64))]
struct Slot {
    door: Door,
    iova: AtomicU64,
    pd: AtomicU32,
    access: AtomicU32,
    /// The queue pair that the key is bound to, or [`UNBOUND`].
    qpn: AtomicU32,
}

/// What changes under the lock.
#[derive(Default)]
struct Admin {
    keys: KeySource,
    /// Numbers of slots without a region.
    free: Vec<u32>,
    /// Slots made so far.
    slots: u32,
    /// Regions that have a slot.
    regions: usize,
    pds: FxHashMap<PdId, Pd>,
    last_pd: u32,
}

/// A protection domain.
#[derive(Default)]
struct Pd {
    regions: usize,
    /// Takes no more regions, and goes with the last one.
    closed: bool,
}

impl Table {
    /// A table that takes [`DEFAULT_MAX_REGIONS`] regions.
    pub fn new() -> Arc<Self> {
        Self::with_limit(DEFAULT_MAX_REGIONS)
    }

    /// A table that takes `max_regions` regions at a time (2^30 at most).
    pub fn with_limit(max_regions: usize) -> Arc<Self> {
        Arc::new(Self {
            generation: AtomicU8::new(0),
            indexes: [const { OnceLock::new() }; GENERATIONS],
            chunks: [const { OnceLock::new() }; GENERATIONS],
            admin: Mutex::default(),
            max_regions: max_regions.min(MOST_REGIONS),
        })
    }

    /// A new protection domain.
    pub fn alloc_pd(self: &Arc<Self>) -> PdId {
        let mut admin = self.admin.lock();
        loop {
            admin.last_pd = admin.last_pd.wrapping_add(1);
            let pd = PdId(admin.last_pd);
            // After 2^32 domains an old one may still be there.
            if let Entry::Vacant(free) = admin.pds.entry(pd) {
                free.insert(Pd::default());
                return pd;
            }
        }
    }

    /// Gives a protection domain back, as `ibv_dealloc_pd` does.
    ///
    /// # Errors
    /// [`RegisterError::PdInUse`] while regions of it are registered: nothing changed then.
    /// [`RegisterError::UnknownPd`] where there is no such domain.
    pub fn free_pd(&self, pd: PdId) -> Result<(), RegisterError> {
        let mut admin = self.admin.lock();
        let regions = admin.open_pd(pd)?.regions;
        if regions != 0 {
            return Err(RegisterError::PdInUse { regions });
        }
        admin.pds.remove(&pd);
        Ok(())
    }

    /// Gives a protection domain back now, or with its last region: it takes no new ones, and the
    /// ones it has stay usable. For a handle that is dropped, which cannot fail.
    pub fn close_pd(&self, pd: PdId) {
        let mut admin = self.admin.lock();
        let Ok(entry) = admin.open_pd(pd) else {
            return;
        };
        entry.closed = true;
        if entry.regions == 0 {
            admin.pds.remove(&pd);
        }
    }

    /// Registered regions, those with an invalidated key among them.
    pub fn regions(&self) -> usize {
        self.admin.lock().regions
    }

    /// Registers `region` with the domain `pd`: gives it a key that is valid at once.
    ///
    /// # Errors
    /// [`RegisterError::Empty`], [`RegisterError::UnknownPd`], [`RegisterError::Limit`],
    /// [`RegisterError::NoMemory`] (for the table), [`RegisterError::Random`].
    pub fn register(
        self: &Arc<Self>,
        pd: PdId,
        region: Region,
        access: Access,
    ) -> Result<Mr, RegisterError> {
        if region.is_empty() {
            return Err(RegisterError::Empty);
        }
        let backing = Arc::new(region.into_backing());
        let (slot, key) = self.admit(pd, &backing, access)?;
        Ok(Mr::new(Arc::clone(self), backing, slot, key, access))
    }

    /// Whether the peer of `scope` may invalidate `rkey`; [`Memory::invalidate`] does it.
    fn check_invalidate(&self, scope: Scope, rkey: RKey) -> Result<(), AccessError> {
        let slot = self.find(rkey.0).ok_or(AccessError::InvalidKey)?;
        let _held = slot.door.enter(rkey.0).ok_or(AccessError::InvalidKey)?;
        slot.check(scope, Need { access: Access::REMOTE_INVALIDATE, bound: Bound::Must })
    }

    /// Holds a local piece for a system call that reads it. Deregistration waits for the pin.
    #[inline]
    pub fn pin_read(&self, scope: Scope, sge: Sge) -> Result<Pin<'_>, AccessError> {
        let len = u64::from(sge.length);
        self.pin(scope, sge.lkey.0, sge.addr, len, Need::local(Access::empty()))
    }

    /// Holds a local piece for a system call that writes it, which needs
    /// [`Access::LOCAL_WRITE`].
    #[inline]
    pub fn pin_write_local(&self, scope: Scope, sge: Sge) -> Result<PinMut<'_>, AccessError> {
        let len = u64::from(sge.length);
        self.pin(scope, sge.lkey.0, sge.addr, len, Need::local(Access::LOCAL_WRITE)).map(PinMut)
    }

    /// Holds a piece that a peer named for a system call that writes it, which needs
    /// [`Access::REMOTE_WRITE`].
    #[inline]
    pub fn pin_write_remote(
        &self,
        scope: Scope,
        rkey: RKey,
        addr: u64,
        len: u64,
    ) -> Result<PinMut<'_>, AccessError> {
        self.pin(scope, rkey.0, addr, len, Need::remote(Access::REMOTE_WRITE)).map(PinMut)
    }

    #[inline]
    fn pin(
        &self,
        scope: Scope,
        key: u32,
        addr: u64,
        len: u64,
        need: Need,
    ) -> Result<Pin<'_>, AccessError> {
        if len == 0 {
            return Ok(Pin { held: None, off: 0, len: 0 });
        }
        let (held, off) = self.enter(scope, key, addr, len, need)?;
        // No truncation: within the region, by `enter`.
        Ok(Pin { held: Some(held), off, len: len as usize })
    }

    /// Passes all checks and goes in, or touches nothing. `len` is not 0. Returns the offset of
    /// `addr` within the region.
    #[inline]
    fn enter(
        &self,
        scope: Scope,
        key: u32,
        addr: u64,
        len: u64,
        need: Need,
    ) -> Result<(Held<'_>, usize), AccessError> {
        let slot = self.find(key).ok_or(AccessError::InvalidKey)?;
        let held = slot.door.enter(key).ok_or(AccessError::InvalidKey)?;
        slot.check(scope, need)?;
        // RFC 5041 §7.1: the 64-bit sum of length and tagged offset does not wrap.
        if addr.checked_add(len).is_none() {
            return Err(AccessError::Wrap);
        }
        let iova = slot.iova.load(Ordering::Relaxed);
        let off = addr.checked_sub(iova).ok_or(AccessError::Bounds)?;
        let region = held.words().len() as u64;
        if off > region || len > region - off {
            return Err(AccessError::Bounds);
        }
        Ok((held, off as usize))
    }

    /// The slot that `key`'s bucket names: its door decides whether the key is valid.
    #[inline]
    fn find(&self, key: u32) -> Option<&Slot> {
        self.number(key).map(|number| self.slot(number))
    }

    #[inline]
    fn number(&self, key: u32) -> Option<u32> {
        self.bucket_of(key)?.load(Ordering::Acquire).checked_sub(1)
    }

    #[inline]
    fn slot(&self, number: u32) -> &Slot {
        let (chunk, at) = place(number);
        // A number is given out after its chunk was made.
        &self.chunks[chunk].get().expect("the chunk of a slot in use")[at]
    }

    /// Gives `backing` a slot and a key.
    fn admit(
        &self,
        pd: PdId,
        backing: &Arc<Backing>,
        access: Access,
    ) -> Result<(u32, u32), RegisterError> {
        let admin = &mut *self.admin.lock();
        admin.open_pd(pd)?;
        if admin.regions >= self.max_regions {
            return Err(RegisterError::Limit { max: self.max_regions });
        }
        self.make_room(admin)?;
        let key = self.draw_key(admin, 0)?;
        // From here on nothing fails.
        let number = admin.free.pop().unwrap_or_else(|| {
            admin.slots += 1;
            admin.slots - 1
        });
        let slot = self.slot(number);
        slot.iova.store(backing.iova(), Ordering::Relaxed);
        slot.pd.store(pd.0, Ordering::Relaxed);
        slot.access.store(access.bits(), Ordering::Relaxed);
        slot.qpn.store(UNBOUND, Ordering::Relaxed);
        slot.door.put(Arc::clone(backing));
        admin.regions += 1;
        admin.open_pd(pd)?.regions += 1;
        self.publish(number, key);
        Ok((number, key))
    }

    /// Makes sure that there is a slot, and that half of the index stays free, for one more region.
    fn make_room(&self, admin: &mut Admin) -> Result<(), RegisterError> {
        if admin.free.is_empty() {
            let (chunk, _) = place(admin.slots);
            if self.chunks[chunk].get().is_none() {
                let slots = try_boxed(1 << (FIRST_BITS as usize + chunk))?;
                // Only ever set under the lock of `admin`.
                let _ = self.chunks[chunk].set(slots);
            }
        }
        let generation = self.generation.load(Ordering::Relaxed);
        let index = self.indexes[usize::from(generation)].get();
        let buckets = index.map_or(0, |index| index.len());
        if (admin.regions + 1) * 2 <= buckets {
            return Ok(());
        }
        let next = if index.is_none() { generation } else { generation + 1 };
        let fresh: Box<[AtomicU32]> = try_boxed(1 << (FIRST_BITS + u32::from(next)))?;
        for taken in index.into_iter().flatten() {
            let entry = taken.load(Ordering::Relaxed);
            if let Some(number) = entry.checked_sub(1) {
                let key = self.slot(number).door.key();
                fresh[bucket(key, &fresh)].store(entry, Ordering::Relaxed);
            }
        }
        let _ = self.indexes[usize::from(next)].set(fresh);
        self.generation.store(next, Ordering::Release);
        Ok(())
    }

    /// A key other than `old` whose bucket is free. At least half of them are.
    fn draw_key(&self, admin: &mut Admin, old: u32) -> Result<u32, RegisterError> {
        loop {
            let key = admin.keys.next()?;
            let free = self.bucket_of(key).is_some_and(|b| b.load(Ordering::Relaxed) == 0);
            if free && key != old {
                return Ok(key);
            }
        }
    }

    /// Opens the slot for `key`, whose bucket is free. Under the lock.
    fn publish(&self, number: u32, key: u32) {
        self.slot(number).door.open(key);
        if let Some(bucket) = self.bucket_of(key) {
            bucket.store(number + 1, Ordering::Release);
        }
    }

    /// The bucket of `key` in the newest index.
    #[inline]
    fn bucket_of(&self, key: u32) -> Option<&AtomicU32> {
        let generation = self.generation.load(Ordering::Acquire);
        let index = self.indexes[usize::from(generation)].get()?;
        Some(&index[bucket(key, index)])
    }

    /// Makes `key` invalid where it still opens slot `number`; whether it did. When this returns,
    /// whoever used it has finished, and also where somebody else made it invalid.
    pub(super) fn revoke(&self, number: u32, key: u32) -> bool {
        let slot = self.slot(number);
        let closed = {
            let _admin = self.admin.lock();
            let closed = slot.door.close(key);
            if closed && let Some(bucket) = self.bucket_of(key) {
                bucket.store(0, Ordering::Release);
            }
            closed
        };
        slot.door.drain();
        closed
    }

    /// Gives slot `number`, whose key has been revoked, a new key.
    pub(super) fn rekey(&self, number: u32, old: u32) -> Result<u32, RegisterError> {
        let admin = &mut *self.admin.lock();
        let key = self.draw_key(admin, old)?;
        self.publish(number, key);
        Ok(key)
    }

    /// Takes the region out of slot `number`, whose key has been revoked.
    pub(super) fn release(&self, number: u32) {
        let slot = self.slot(number);
        slot.door.take();
        let pd = PdId(slot.pd.load(Ordering::Relaxed));
        let admin = &mut *self.admin.lock();
        admin.free.push(number);
        admin.regions -= 1;
        if let Some(entry) = admin.pds.get_mut(&pd) {
            entry.regions -= 1;
            if entry.closed && entry.regions == 0 {
                admin.pds.remove(&pd);
            }
        }
    }

    /// Whether `key` opens slot `number`.
    pub(super) fn opens(&self, number: u32, key: u32) -> bool {
        self.slot(number).door.key() == key
    }

    /// Binds slot `number` to a queue pair, or to none.
    pub(super) fn bind(&self, number: u32, qpn: Option<Qpn>) {
        let qpn = qpn.map_or(UNBOUND, |qpn| qpn.0);
        self.slot(number).qpn.store(qpn, Ordering::Release);
    }
}

impl Table {
    // A range of length zero passes every check and touches nothing, so its key is not looked at.

    #[inline]
    fn probe(
        &self,
        scope: Scope,
        key: u32,
        addr: u64,
        len: u64,
        need: Need,
    ) -> Result<(), AccessError> {
        if len == 0 {
            return Ok(());
        }
        self.enter(scope, key, addr, len, need).map(drop)
    }

    #[inline]
    fn read(
        &self,
        scope: Scope,
        key: u32,
        addr: u64,
        len: u64,
        need: Need,
        out: &mut Vec<u8>,
    ) -> Result<(), AccessError> {
        if len == 0 {
            return Ok(());
        }
        let (held, off) = self.enter(scope, key, addr, len, need)?;
        held.words().load_to_vec(off, len as usize, out);
        Ok(())
    }

    #[inline]
    fn write(
        &self,
        scope: Scope,
        key: u32,
        addr: u64,
        data: &[u8],
        need: Need,
    ) -> Result<(), AccessError> {
        if data.is_empty() {
            return Ok(());
        }
        let (held, off) = self.enter(scope, key, addr, data.len() as u64, need)?;
        held.words().store(off, data);
        Ok(())
    }
}

impl Memory for Table {
    fn check_local(&self, scope: Scope, sge: Sge, access: Access) -> Result<(), AccessError> {
        self.probe(scope, sge.lkey.0, sge.addr, sge.length.into(), Need::local(access))
    }

    fn check_remote(
        &self,
        scope: Scope,
        rkey: RKey,
        addr: u64,
        len: u64,
        access: Access,
    ) -> Result<(), AccessError> {
        self.probe(scope, rkey.0, addr, len, Need::remote(access))
    }

    fn read_local(&self, scope: Scope, sge: Sge, out: &mut Vec<u8>) -> Result<(), AccessError> {
        let need = Need::local(Access::empty());
        self.read(scope, sge.lkey.0, sge.addr, sge.length.into(), need, out)
    }

    fn write_local(
        &self,
        scope: Scope,
        lkey: LKey,
        addr: u64,
        data: &[u8],
    ) -> Result<(), AccessError> {
        self.write(scope, lkey.0, addr, data, Need::local(Access::LOCAL_WRITE))
    }

    fn read_remote(
        &self,
        scope: Scope,
        rkey: RKey,
        addr: u64,
        len: u64,
        out: &mut Vec<u8>,
    ) -> Result<(), AccessError> {
        self.read(scope, rkey.0, addr, len, Need::remote(Access::REMOTE_READ), out)
    }

    fn write_remote(
        &self,
        scope: Scope,
        rkey: RKey,
        addr: u64,
        data: &[u8],
    ) -> Result<(), AccessError> {
        self.write(scope, rkey.0, addr, data, Need::remote(Access::REMOTE_WRITE))
    }

    fn atomic(
        &self,
        scope: Scope,
        rkey: RKey,
        addr: u64,
        op: AtomicOp,
    ) -> Result<u64, AccessError> {
        let need = Need::remote(Access::REMOTE_ATOMIC);
        let (held, off) = self.enter(scope, rkey.0, addr, 8, need)?;
        if !held.words().is_aligned(off) {
            return Err(AccessError::Alignment);
        }
        Ok(held.words().atomic(off, op))
    }

    fn invalidate(&self, scope: Scope, rkey: RKey) -> Result<(), AccessError> {
        self.check_invalidate(scope, rkey)?;
        let number = self.number(rkey.0).ok_or(AccessError::InvalidKey)?;
        // The key may have been revoked, and the slot even be another region's by now: then it
        // does not open the slot any more, and nothing happens.
        if self.revoke(number, rkey.0) { Ok(()) } else { Err(AccessError::InvalidKey) }
    }
}

impl fmt::Debug for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Table")
            .field("regions", &self.regions())
            .field("max_regions", &self.max_regions)
            .finish_non_exhaustive()
    }
}

impl Slot {
    /// Domain, then binding, then rights. From inside the door.
    #[inline]
    fn check(&self, scope: Scope, need: Need) -> Result<(), AccessError> {
        if self.pd.load(Ordering::Relaxed) != scope.pd.0 {
            return Err(AccessError::WrongDomain);
        }
        let bound = match need.bound {
            Bound::Any => true,
            Bound::MayNot => {
                let qpn = self.qpn.load(Ordering::Acquire);
                qpn == UNBOUND || qpn == scope.qpn.0
            }
            Bound::Must => self.qpn.load(Ordering::Acquire) == scope.qpn.0,
        };
        if !bound {
            return Err(AccessError::WrongDomain);
        }
        if self.access.load(Ordering::Relaxed) & need.access.bits() != need.access.bits() {
            return Err(AccessError::Rights);
        }
        Ok(())
    }
}

impl Admin {
    /// A domain that takes regions.
    fn open_pd(&mut self, pd: PdId) -> Result<&mut Pd, RegisterError> {
        self.pds.get_mut(&pd).filter(|entry| !entry.closed).ok_or(RegisterError::UnknownPd(pd))
    }
}

/// What an access needs.
#[derive(Clone, Copy)]
struct Need {
    access: Access,
    bound: Bound,
}

/// What the queue pair must be.
#[derive(Clone, Copy)]
enum Bound {
    /// Whichever: the program's own work requests.
    Any,
    /// The one that the key is bound to, where it is bound.
    MayNot,
    /// The one that the key is bound to.
    Must,
}

impl Need {
    const fn local(access: Access) -> Self {
        Self { access, bound: Bound::Any }
    }

    const fn remote(access: Access) -> Self {
        Self { access, bound: Bound::MayNot }
    }
}

/// A piece of a region held for a system call that reads it: the octets stay there, and
/// deregistration waits, until the pin is dropped. Stays on its thread.
///
/// The thread that holds a pin must not deregister, invalidate or rearm that region: it would wait
/// for itself (a debug build panics). Nor may a pin be forgotten: revocation would wait for ever.
#[derive(Debug)]
#[must_use = "the octets stay only while the pin is held"]
pub struct Pin<'a> {
    /// None where the piece is empty.
    held: Option<Held<'a>>,
    off: usize,
    len: usize,
}

impl Pin<'_> {
    /// The first octet. Others write here at any time: for the kernel, never for a reference.
    #[inline]
    pub fn as_ptr(&self) -> *const u8 {
        self.as_mut().cast_const()
    }

    /// Length in octets.
    #[inline]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no octets; the pointer is dangling then.
    #[inline]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    #[inline]
    fn as_mut(&self) -> *mut u8 {
        self.held.as_ref().map_or(std::ptr::dangling_mut(), |held| held.words().at(self.off))
    }
}

/// A [`Pin`] for a system call that writes the piece.
#[derive(Debug)]
#[must_use = "the octets stay only while the pin is held"]
pub struct PinMut<'a>(Pin<'a>);

impl PinMut<'_> {
    /// The first octet. Others access it at any time: for the kernel, never for a reference.
    #[inline]
    pub fn as_mut_ptr(&self) -> *mut u8 {
        self.0.as_mut()
    }

    /// Length in octets.
    #[inline]
    pub const fn len(&self) -> usize {
        self.0.len
    }

    /// Whether there are no octets; the pointer is dangling then.
    #[inline]
    pub const fn is_empty(&self) -> bool {
        self.0.len == 0
    }

    /// Stores `data` at `offset` of the piece, in the order of [`Memory::write_local`]: for the
    /// last octets of a piece whose others the kernel wrote.
    ///
    /// # Panics
    /// Where `data` does not fit.
    pub fn store(&self, offset: usize, data: &[u8]) {
        assert!(
            offset <= self.len() && data.len() <= self.len() - offset,
            "{} octets at offset {offset} do not fit a piece of {} octets",
            data.len(),
            self.len()
        );
        if let Some(held) = &self.0.held {
            held.words().store(self.0.off + offset, data);
        }
    }
}

/// The bucket of `key`: its low bits. The length is a power of two.
#[inline]
fn bucket(key: u32, index: &[AtomicU32]) -> usize {
    key as usize & (index.len() - 1)
}

/// The chunk of slot `number`, and where in it.
#[inline]
fn place(number: u32) -> (usize, usize) {
    let shifted = number as usize + (1 << FIRST_BITS);
    let bits = shifted.ilog2();
    ((bits - FIRST_BITS) as usize, shifted - (1 << bits))
}

/// `len` defaults, or an error where there is no memory for them.
fn try_boxed<T: Default>(len: usize) -> Result<Box<[T]>, RegisterError> {
    let mut vec = Vec::new();
    let no_memory = |_| RegisterError::NoMemory { len: len.saturating_mul(size_of::<T>()) };
    vec.try_reserve_exact(len).map_err(no_memory)?;
    vec.resize_with(len, T::default);
    Ok(vec.into_boxed_slice())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mr::tests::StopOnDrop;
    use proptest::prelude::*;
    use rustc_hash::FxHashSet;
    use std::{
        sync::{atomic::AtomicBool, mpsc},
        thread,
        time::Duration,
    };

    const RIGHTS: [Access; 5] = [
        Access::LOCAL_WRITE,
        Access::REMOTE_WRITE,
        Access::REMOTE_READ,
        Access::REMOTE_ATOMIC,
        Access::REMOTE_INVALIDATE,
    ];

    fn setup(len: usize, access: Access) -> (Arc<Table>, Scope, Mr) {
        let table = Table::new();
        let pd = table.alloc_pd();
        let mr = table.register(pd, Region::alloc(len).unwrap(), access).unwrap();
        (table, Scope { pd, qpn: Qpn(5) }, mr)
    }

    /// What an access is expected to give: the first check that fails, in the order of the design.
    #[derive(Debug, Clone)]
    struct Case {
        key_is_ours: bool,
        domain_is_ours: bool,
        bound: Option<bool>,
        rights: Access,
        addr: u64,
        len: u64,
    }

    const LEN: u64 = 64;

    impl Case {
        fn expect(&self, local: bool, need: Access) -> Result<(), AccessError> {
            if !self.key_is_ours {
                Err(AccessError::InvalidKey)
            } else if !self.domain_is_ours || (!local && self.bound == Some(false)) {
                Err(AccessError::WrongDomain)
            } else if !self.rights.contains(need) {
                Err(AccessError::Rights)
            } else if u128::from(self.addr) + u128::from(self.len) >= 1 << 64 {
                Err(AccessError::Wrap)
            } else if u128::from(self.addr) + u128::from(self.len) > u128::from(LEN) {
                Err(AccessError::Bounds)
            } else {
                Ok(())
            }
        }
    }

    fn cases() -> impl Strategy<Value = Case> {
        let mostly = || proptest::bool::weighted(0.9);
        let addr = prop_oneof![
            4 => 0..LEN,
            1 => LEN - 1..LEN + 2,
            1 => u64::MAX - 70..=u64::MAX,
            1 => any::<u64>(),
        ];
        let rights =
            prop_oneof![(0u32..16).prop_map(Access::from_bits_truncate), Just(Access::all())];
        let bound = prop_oneof![Just(None), Just(Some(true)), Just(Some(false))];
        (mostly(), mostly(), bound, rights, addr, 1..=LEN + 1).prop_map(
            |(key_is_ours, domain_is_ours, bound, rights, addr, len)| Case {
                key_is_ours,
                domain_is_ours,
                bound,
                rights,
                addr,
                len,
            },
        )
    }

    proptest! {
        #[test]
        fn checks_come_in_order_and_nothing_is_touched_unless_all_pass(case in cases()) {
            let (table, mut scope, mr) = setup(LEN as usize, case.rights);
            mr.write_at(0, &[7; LEN as usize]).unwrap();
            if let Some(ours) = case.bound {
                mr.bind(if ours { scope.qpn } else { Qpn(6) }).unwrap();
            }
            if !case.domain_is_ours {
                scope.pd = table.alloc_pd();
            }
            let key = if case.key_is_ours { mr.rkey().0 } else { mr.rkey().0 ^ 1 << 31 };
            let (addr, len) = (case.addr, case.len);
            let sge = Sge::new(addr, len as u32, LKey(key));

            let mut out = vec![1];
            let reading = case.expect(true, Access::empty());
            prop_assert_eq!(table.check_local(scope, sge, Access::empty()), reading);
            prop_assert_eq!(table.pin_read(scope, sge).map(|pin| pin.len()), reading.map(|()| len as usize));
            prop_assert_eq!(table.read_local(scope, sge, &mut out), reading);
            prop_assert_eq!(out.len(), if reading.is_ok() { 1 + len as usize } else { 1 });

            let mut out = vec![1];
            let reading = case.expect(false, Access::REMOTE_READ);
            prop_assert_eq!(table.check_remote(scope, RKey(key), addr, len, Access::REMOTE_READ), reading);
            prop_assert_eq!(table.read_remote(scope, RKey(key), addr, len, &mut out), reading);
            prop_assert_eq!(out.len(), if reading.is_ok() { 1 + len as usize } else { 1 });

            let atomic = case.expect(false, Access::REMOTE_ATOMIC);
            let word = Case { len: 8, ..case.clone() }.expect(false, Access::REMOTE_ATOMIC);
            prop_assert_eq!(table.check_remote(scope, RKey(key), addr, len, Access::REMOTE_ATOMIC), atomic);
            let op = AtomicOp::FetchAdd { add: 0, mask: 0 };
            let word = match word {
                Ok(()) if !addr.is_multiple_of(8) => Err(AccessError::Alignment),
                Ok(()) => Ok(u64::from_ne_bytes([7; 8])),
                Err(e) => Err(e),
            };
            prop_assert_eq!(table.atomic(scope, RKey(key), addr, op), word);

            let data = vec![9; len as usize];
            let local = case.expect(true, Access::LOCAL_WRITE);
            prop_assert_eq!(table.check_local(scope, sge, Access::LOCAL_WRITE), local);
            prop_assert_eq!(table.pin_write_local(scope, sge).map(|pin| pin.len()), local.map(|()| len as usize));
            let remote = case.expect(false, Access::REMOTE_WRITE);
            prop_assert_eq!(
                table.pin_write_remote(scope, RKey(key), addr, len).map(|pin| pin.len()),
                remote.map(|()| len as usize)
            );
            prop_assert_eq!(table.write_local(scope, LKey(key), addr, &data), local);
            prop_assert_eq!(count(&mr, 9), if local.is_ok() { len } else { 0 });
            mr.write_at(0, &[7; LEN as usize]).unwrap();
            prop_assert_eq!(table.write_remote(scope, RKey(key), addr, &data), remote);
            prop_assert_eq!(count(&mr, 9), if remote.is_ok() { len } else { 0 });
        }
    }

    fn count(mr: &Mr, value: u8) -> u64 {
        let mut out = vec![0; mr.len()];
        mr.read_at(0, &mut out).unwrap();
        out.iter().filter(|octet| **octet == value).count() as u64
    }

    #[test]
    fn length_zero_passes_everything_and_touches_nothing() {
        let (table, scope, mr) = setup(8, Access::empty());
        mr.deregister();
        let (key, nowhere) = (mr.rkey(), u64::MAX);
        let sge = Sge::new(nowhere, 0, mr.lkey());
        let mut out = Vec::new();
        assert_eq!(table.check_local(scope, sge, Access::LOCAL_WRITE), Ok(()));
        assert_eq!(table.check_remote(scope, key, nowhere, 0, Access::REMOTE_READ), Ok(()));
        assert_eq!(table.read_local(scope, sge, &mut out), Ok(()));
        assert_eq!(table.read_remote(scope, key, nowhere, 0, &mut out), Ok(()));
        assert_eq!(table.write_local(scope, mr.lkey(), nowhere, &[]), Ok(()));
        assert_eq!(table.write_remote(scope, key, nowhere, &[]), Ok(()));
        assert!(out.is_empty());
        assert!(table.pin_read(scope, sge).unwrap().is_empty());
        assert!(!table.pin_read(scope, sge).unwrap().as_ptr().is_null());
        let pin = table.pin_write_remote(scope, key, nowhere, 0).unwrap();
        pin.store(0, &[]);
        assert!(pin.is_empty() && table.pin_write_local(scope, sge).unwrap().is_empty());
    }

    #[test]
    fn each_right_stands_alone() {
        for have in RIGHTS {
            let (table, scope, mr) = setup(8, have);
            for need in RIGHTS {
                let want = if have == need { Ok(()) } else { Err(AccessError::Rights) };
                assert_eq!(table.check_remote(scope, mr.rkey(), 0, 8, need), want);
                assert_eq!(table.check_local(scope, mr.slice(0..8), need), want);
            }
        }
    }

    #[test]
    fn only_the_bound_queue_pair_invalidates() {
        let (table, scope, mr) = setup(8, Access::all());
        let other = Scope { qpn: Qpn(6), ..scope };
        let stranger = Scope { pd: table.alloc_pd(), ..scope };
        let key = mr.rkey();
        // Not bound: nobody.
        assert_eq!(table.check_invalidate(scope, key), Err(AccessError::WrongDomain));
        assert_eq!(table.invalidate(scope, key), Err(AccessError::WrongDomain));
        mr.bind(scope.qpn).unwrap();
        for scope in [other, stranger] {
            assert_eq!(table.check_invalidate(scope, key), Err(AccessError::WrongDomain));
            assert_eq!(table.invalidate(scope, key), Err(AccessError::WrongDomain));
        }
        assert!(mr.is_valid());
        assert_eq!(table.check_invalidate(scope, key), Ok(()));
        assert!(mr.is_valid(), "a check changes nothing");
        assert_eq!(table.invalidate(scope, key), Ok(()));
        assert!(!mr.is_valid());
        assert_eq!(table.invalidate(scope, key), Err(AccessError::InvalidKey));
        assert_eq!(table.write_remote(scope, key, 0, &[1]), Err(AccessError::InvalidKey));
        mr.write_at(0, &[1]).expect("the memory is still the program's");

        mr.rearm().unwrap();
        assert_ne!(mr.rkey(), key);
        assert_eq!(mr.rkey().0, mr.lkey().0);
        assert_eq!(table.write_remote(scope, key, 0, &[1]), Err(AccessError::InvalidKey));
        assert_eq!(table.write_remote(scope, mr.rkey(), 0, &[1]), Ok(()));
        assert_eq!(table.write_remote(other, mr.rkey(), 0, &[1]), Err(AccessError::WrongDomain));
        mr.unbind().unwrap();
        assert_eq!(table.write_remote(other, mr.rkey(), 0, &[1]), Ok(()));
        assert_eq!(table.check_invalidate(scope, mr.rkey()), Err(AccessError::WrongDomain));
    }

    #[test]
    fn a_region_without_the_right_is_not_invalidated() {
        let (table, scope, mr) = setup(8, Access::all() - Access::REMOTE_INVALIDATE);
        mr.bind(scope.qpn).unwrap();
        assert_eq!(table.check_invalidate(scope, mr.rkey()), Err(AccessError::Rights));
        assert_eq!(table.invalidate(scope, mr.rkey()), Err(AccessError::Rights));
        assert!(mr.is_valid());
    }

    #[test]
    fn the_limit_holds_and_room_comes_back() {
        let table = Table::with_limit(3);
        let pd = table.alloc_pd();
        let register = || table.register(pd, Region::alloc(8).unwrap(), Access::empty());
        let mut mrs: Vec<Mr> = (0..3).map(|_| register().unwrap()).collect();
        assert_eq!(register().unwrap_err(), RegisterError::Limit { max: 3 });
        mrs[1].deregister();
        mrs.push(register().expect("room after deregister, though a clone is left"));
        assert_eq!(register().unwrap_err(), RegisterError::Limit { max: 3 });
        mrs.clear();
        assert_eq!(table.regions(), 0);
    }

    #[test]
    fn domains_end_with_their_regions() {
        let table = Table::new();
        let pd = table.alloc_pd();
        let register = |pd| table.register(pd, Region::alloc(8).unwrap(), Access::empty());
        let mr = register(pd).unwrap();
        assert_eq!(table.free_pd(pd), Err(RegisterError::PdInUse { regions: 1 }));
        drop(mr);
        assert_eq!(table.free_pd(pd), Ok(()));
        assert_eq!(table.free_pd(pd), Err(RegisterError::UnknownPd(pd)));
        assert_eq!(register(pd).unwrap_err(), RegisterError::UnknownPd(pd));

        let pd = table.alloc_pd();
        let mr = register(pd).unwrap();
        table.close_pd(pd);
        assert_eq!(register(pd).unwrap_err(), RegisterError::UnknownPd(pd));
        let scope = Scope { pd, qpn: Qpn(1) };
        assert_eq!(table.check_local(scope, mr.slice(0..8), Access::empty()), Ok(()));
        drop(mr);
        assert!(table.admin.lock().pds.is_empty());
    }

    #[test]
    fn an_empty_buffer_is_refused() {
        let table = Table::new();
        let pd = table.alloc_pd();
        let refused = table.register(pd, Region::from_vec(Vec::new()), Access::empty());
        assert_eq!(refused.unwrap_err(), RegisterError::Empty);
    }

    /// Keys stay valid while the index grows under a thread that uses one, and a key that is gone
    /// stays gone.
    #[test]
    fn thousands_of_regions_come_and_go() {
        let (table, scope, first) = setup(8, Access::all());
        first.store_u64(0, 0x5555, Ordering::Relaxed);
        let stop = AtomicBool::new(false);
        thread::scope(|s| {
            s.spawn(|| {
                let mut out = Vec::new();
                while !stop.load(Ordering::Relaxed) {
                    out.clear();
                    table
                        .read_remote(scope, first.rkey(), 0, 8, &mut out)
                        .expect("valid all along");
                    assert_eq!(out, 0x5555u64.to_ne_bytes());
                }
            });
            let _stop = StopOnDrop(&stop);
            let (mut mrs, mut gone) = (Vec::new(), Vec::new());
            for i in 0..6000u64 {
                let region = Region::from_vec(i.to_ne_bytes().to_vec());
                mrs.push((i, table.register(scope.pd, region, Access::all()).unwrap()));
                if i % 3 == 0 {
                    let (_, mr) = mrs.swap_remove((i as usize * 7919) % mrs.len());
                    gone.push(mr.rkey());
                }
                if i % 5 == 4 {
                    let mr = &mrs[(i as usize * 104_729) % mrs.len()].1;
                    gone.push(mr.rkey());
                    mr.rearm().unwrap();
                }
            }
            let keys: FxHashSet<RKey> = mrs.iter().map(|(_, mr)| mr.rkey()).collect();
            assert_eq!(keys.len(), mrs.len());
            for (i, mr) in &mrs {
                let mut out = Vec::new();
                table.read_remote(scope, mr.rkey(), 0, 8, &mut out).unwrap();
                assert_eq!(out, i.to_ne_bytes());
            }
            for key in gone {
                // A key may come again: once in 2^32 / 4000 draws here.
                if !keys.contains(&key) {
                    assert_eq!(
                        table.check_remote(scope, key, 0, 8, Access::REMOTE_READ),
                        Err(AccessError::InvalidKey)
                    );
                }
            }
            assert_eq!(table.regions(), mrs.len() + 1);
        });
        assert_eq!(table.regions(), 1);
    }

    #[test]
    fn slots_have_a_place_of_their_own() {
        let mut last = (0, usize::MAX);
        for number in 0..100_000 {
            let (chunk, at) = place(number);
            assert!(at < 1 << (FIRST_BITS as usize + chunk));
            let next = if last.1 == (1usize << (FIRST_BITS as usize + last.0)).wrapping_sub(1) {
                (last.0 + 1, 0)
            } else {
                (last.0, last.1.wrapping_add(1))
            };
            assert_eq!((chunk, at), next);
            last = next;
        }
        assert!(place(MOST_REGIONS as u32 - 1).0 < GENERATIONS);
    }

    #[test]
    fn revocation_waits_for_a_pin() {
        let (table, scope, mr) = setup(4096, Access::all());
        mr.bind(scope.qpn).unwrap();
        let revoke: [fn(&Table, Scope, &Mr); 3] = [
            |table, scope, mr| table.invalidate(scope, mr.rkey()).unwrap(),
            |_, _, mr| mr.rearm().unwrap(),
            |_, _, mr| mr.deregister(),
        ];
        for (i, revoke) in revoke.into_iter().enumerate() {
            if i == 1 {
                mr.rearm().unwrap();
            }
            let dropped = AtomicBool::new(false);
            thread::scope(|s| {
                let (pinned, is_pinned) = mpsc::channel();
                let (table, mr, dropped) = (&table, &mr, &dropped);
                s.spawn(move || {
                    let pin = table.pin_write_local(scope, mr.slice(0..4096)).unwrap();
                    pinned.send(()).unwrap();
                    thread::sleep(Duration::from_millis(10));
                    dropped.store(true, Ordering::Relaxed);
                    drop(pin);
                });
                is_pinned.recv().unwrap();
                revoke(table, scope, mr);
                assert!(dropped.load(Ordering::Relaxed), "revocation {i} did not wait");
            });
        }
    }

    #[test]
    #[cfg(debug_assertions)]
    #[should_panic(expected = "drop the pin first")]
    fn revoking_what_the_thread_itself_holds_is_told() {
        let (table, scope, mr) = setup(8, Access::all());
        let pin = table.pin_read(scope, mr.slice(0..8)).unwrap();
        let revoked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| mr.rearm()));
        drop(pin);
        std::panic::resume_unwind(revoked.unwrap_err());
    }

    /// A peer's WRITE that is under way ends before an invalidation returns, and no later one
    /// passes.
    #[test]
    fn after_an_invalidation_the_memory_is_the_programs() {
        const LEN: usize = 1 << 18;
        let (table, scope, mr) = setup(LEN, Access::all());
        mr.bind(scope.qpn).unwrap();
        let stop = AtomicBool::new(false);
        thread::scope(|s| {
            for value in 1..3 {
                let (table, mr, stop) = (&table, &mr, &stop);
                s.spawn(move || {
                    let data = vec![value; LEN];
                    while !stop.load(Ordering::Relaxed) {
                        let _ = table.write_remote(scope, mr.rkey(), 0, &data);
                    }
                });
            }
            let _stop = StopOnDrop(&stop);
            let mut out = vec![0; LEN];
            for round in 0..100 {
                while mr.load_u8(LEN - 1, Ordering::Acquire) == 0 {
                    thread::yield_now();
                }
                for _ in 0..round * 100 {
                    std::hint::spin_loop();
                }
                table.invalidate(scope, mr.rkey()).unwrap();
                mr.write_at(0, &vec![0; LEN]).unwrap();
                thread::yield_now();
                mr.read_at(0, &mut out).unwrap();
                assert!(out.iter().all(|octet| *octet == 0), "written after the invalidation");
                mr.rearm().unwrap();
            }
        });
    }

    #[test]
    fn remote_and_local_atomics_agree() {
        const TURNS: u64 = 20_000;
        let (table, scope, mr) = setup(64, Access::all());
        let plain = AtomicOp::FetchAdd { add: 1, mask: 0 };
        // The same addition, by way of compare-exchange: the top bits of four fields.
        let masked = AtomicOp::FetchAdd { add: 1, mask: 0x8000_8000_8000_8000 };
        thread::scope(|s| {
            let (table, mr) = (&table, &mr);
            let remote = move |op| {
                for _ in 0..TURNS {
                    table.atomic(scope, mr.rkey(), 8, op).unwrap();
                }
            };
            s.spawn(move || remote(plain));
            s.spawn(move || remote(masked));
            for _ in 0..TURNS {
                mr.atomic(8, plain);
            }
        });
        assert_eq!(mr.load_u64(8, Ordering::Relaxed), 3 * TURNS % (1 << 16));
        assert_eq!((mr.load_u64(0, Ordering::Relaxed), mr.load_u64(16, Ordering::Relaxed)), (0, 0));
    }

    #[test]
    fn atomics_return_the_word_before() {
        let (table, scope, mr) = setup(64, Access::REMOTE_ATOMIC);
        let run = |op| table.atomic(scope, mr.rkey(), 56, op).unwrap();
        let swap = |compare, swap, compare_mask, swap_mask| AtomicOp::CmpSwap {
            compare,
            swap,
            compare_mask,
            swap_mask,
        };
        assert_eq!(run(AtomicOp::FetchAdd { add: 5, mask: 0 }), 0);
        assert_eq!(run(swap(4, 9, u64::MAX, u64::MAX)), 5);
        assert_eq!(run(swap(5, 0xff00, u64::MAX, u64::MAX)), 5);
        assert_eq!(run(swap(0, 0x00ee, 0xff, 0xff)), 0xff00);
        assert_eq!(run(swap(0, 0, 0xff, 0xff)), 0xffee);
        assert_eq!(run(AtomicOp::FetchAdd { add: 0x0101, mask: 0x8080 }), 0xffee);
        assert_eq!(mr.load_u64(56, Ordering::Relaxed), 0x00ef);
        for addr in [1, 4, 55] {
            let op = AtomicOp::FetchAdd { add: 1, mask: 0 };
            assert_eq!(table.atomic(scope, mr.rkey(), addr, op), Err(AccessError::Alignment));
        }
        let op = AtomicOp::FetchAdd { add: 1, mask: 0 };
        assert_eq!(table.atomic(scope, mr.rkey(), 57, op), Err(AccessError::Bounds));
    }
}
