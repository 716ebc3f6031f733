//! The octets of registered memory: the one module of `mr` that holds `unsafe` code.
//!
//! A peer, the kernel and other threads read and write a region at any time. So no `&[u8]` into a
//! region exists. What exists are atomics, and always of one size for one octet: an aligned 8-octet
//! word that lies wholly inside the region is only ever accessed as an [`AtomicU64`], and the up to
//! seven octets before the first and after the last such word as [`AtomicU8`]s. Nothing outside
//! the region is touched: it belongs to somebody else.
//!
//! ```text
//!          base (foreign memory starts anywhere)                     base + len
//!            │                                                           │
//!   ─┬───────┼─┬───────────────┬───────────────┬── … ──┬───────────────┬─┼──────┬─
//!    │other's│o│     word      │     word      │       │     word      │o│others│
//!   ─┴───────┴─┴───────────────┴───────────────┴── … ──┴───────────────┴─┴──────┴─
//!              lo                                                      hi
//! ```
//!
//! A part of a word is stored by compare-exchange, so that octets beside it that somebody else
//! stores at the same time are kept.

use std::{
    alloc::{self, Layout},
    fmt,
    marker::PhantomData,
    mem::ManuallyDrop,
    ptr::{self, NonNull},
    sync::{
        Arc,
        atomic::{AtomicPtr, AtomicU8, AtomicU64, AtomicUsize, Ordering, fence},
    },
};

use parking_lot::Mutex;
use userdma_proto::{
    mem::{AtomicOp, PdId},
    verbs::Access,
};

use super::{Mr, Region, RegisterError, Table, gate::Gate};

/// Octets in a word.
const WORD: usize = 8;

/// Words at the end of a piece that are stored one after the other, each after all before it.
const TAIL_WORDS: usize = 8;

/// What an owned region starts at a multiple of.
pub(super) const PAGE: usize = 4096;

/// The octets of a region, for as long as `'a`.
#[derive(Clone, Copy)]
pub(super) struct Words<'a> {
    /// INVARIANT: `[base, base + len)` is one allocation (or one foreign range), mapped, and
    /// initialised during `'a`; whoever accesses it in that time does so as the module's head
    /// says, or is the kernel, or is foreign code that answers for itself
    /// ([`Table::register_foreign`]). `len` is at most `isize::MAX`.
    base: *mut u8,
    len: usize,
    owner: PhantomData<&'a [AtomicU8]>,
}

impl<'a> Words<'a> {
    /// Length in octets.
    pub(super) const fn len(self) -> usize {
        self.len
    }

    /// The address of octet `off`, to be handed to the kernel.
    pub(super) const fn at(self, off: usize) -> *mut u8 {
        self.base.wrapping_add(off)
    }

    /// Stores `data` at `off`, rising. The last 64 octets become visible in rising order, each
    /// word after everything before it, so that a reader that polls the last octet or the last
    /// word finds all of the piece.
    pub(super) fn store(self, off: usize, data: &[u8]) {
        self.assert_inside(off, data.len());
        let (lo, hi) = self.inner();
        let end = off + data.len();
        let (lead, rest) = data.split_at(lo.saturating_sub(off).min(data.len()));
        let (inner, trail) = rest.split_at(rest.len() - end.saturating_sub(hi).min(rest.len()));
        if !lead.is_empty() {
            self.store_octets(off, lead);
        }
        if !inner.is_empty() {
            self.store_inner(off + lead.len(), inner);
        }
        if !trail.is_empty() {
            self.store_octets(end - trail.len(), trail);
        }
    }

    /// Appends `len` octets at `off` to `out`. Loads rise and are relaxed, but what is loaded
    /// after the call is no older than what the call saw.
    pub(super) fn load_to_vec(self, off: usize, len: usize, out: &mut Vec<u8>) {
        self.assert_inside(off, len);
        out.reserve(len);
        let filled = out.len();
        // SAFETY: `reserve` made `len` octets of room behind `filled`; nobody else knows of them,
        // and they do not overlap the region, which is another allocation.
        unsafe { self.load(off, out.spare_capacity_mut().as_mut_ptr().cast(), len) };
        // SAFETY: `load` has initialised exactly these `len` octets.
        unsafe { out.set_len(filled + len) };
    }

    /// Fills `out` from `off`, as [`Words::load_to_vec`] does.
    pub(super) fn load_to_slice(self, off: usize, out: &mut [u8]) {
        self.assert_inside(off, out.len());
        // SAFETY: `out` is exclusively borrowed and as long as is said.
        unsafe { self.load(off, out.as_mut_ptr(), out.len()) };
    }

    /// Loads the word at `off`, whose address must be a multiple of 8.
    pub(super) fn load_u64(self, off: usize, order: Ordering) -> u64 {
        self.word(off).load(order)
    }

    /// Stores the word at `off`, whose address must be a multiple of 8.
    pub(super) fn store_u64(self, off: usize, value: u64, order: Ordering) {
        self.word(off).store(value, order);
    }

    /// Loads the octet at `off`.
    pub(super) fn load_u8(self, off: usize, order: Ordering) -> u8 {
        self.assert_inside(off, 1);
        let (lo, hi) = self.inner();
        if off < lo || off >= hi {
            return self.octets(off, 1)[0].load(order);
        }
        let lane = self.lane(off);
        self.word(off - lane).load(order).to_ne_bytes()[lane]
    }

    /// Carries out `op` on the word at `off`, whose address must be a multiple of 8. Returns the
    /// word before.
    pub(super) fn atomic(self, off: usize, op: AtomicOp) -> u64 {
        let word = self.word(off);
        match op {
            AtomicOp::FetchAdd { add, mask: 0 } => word.fetch_add(add, Ordering::AcqRel),
            AtomicOp::CmpSwap { compare, swap, compare_mask: u64::MAX, swap_mask: u64::MAX } => {
                match word.compare_exchange(compare, swap, Ordering::AcqRel, Ordering::Acquire) {
                    Ok(old) | Err(old) => old,
                }
            }
            AtomicOp::FetchAdd { .. } | AtomicOp::CmpSwap { .. } => {
                let update = |old| Some(op.apply(old));
                match word.fetch_update(Ordering::AcqRel, Ordering::Acquire, update) {
                    Ok(old) | Err(old) => old,
                }
            }
        }
    }

    /// Whether the address of octet `off` is a multiple of 8.
    pub(super) fn is_aligned(self, off: usize) -> bool {
        self.lane(off) == 0
    }

    /// Which octet of its word `off` is.
    fn lane(self, off: usize) -> usize {
        self.base.addr().wrapping_add(off) % WORD
    }

    /// Where the first whole word begins and where the last one ends.
    fn inner(self) -> (usize, usize) {
        let lo = (self.base.addr().wrapping_neg() % WORD).min(self.len);
        (lo, lo + (self.len - lo) / WORD * WORD)
    }

    #[track_caller]
    fn assert_inside(self, off: usize, len: usize) {
        assert!(
            off <= self.len && len <= self.len - off,
            "{len} octets at offset {off} are outside a region of {} octets",
            self.len
        );
    }

    /// The word at `off`.
    #[track_caller]
    fn word(self, off: usize) -> &'a AtomicU64 {
        &self.words(off, 1)[0]
    }

    /// `count` words from `off` on.
    #[track_caller]
    fn words(self, off: usize, count: usize) -> &'a [AtomicU64] {
        self.assert_inside(off, count * WORD);
        assert!(self.is_aligned(off), "offset {off} is not at an address that is a multiple of 8");
        let first = self.at(off).cast::<AtomicU64>();
        // SAFETY: inside the region and aligned (asserted above), so valid for `'a`, and only
        // ever accessed as words (the invariant of `base`: these words are whole ones). A slice
        // of atomics may be shared with whoever else accesses them.
        unsafe { std::slice::from_raw_parts(first, count) }
    }

    /// `count` octets from `off` on, none of them in a whole word.
    fn octets(self, off: usize, count: usize) -> &'a [AtomicU8] {
        self.assert_inside(off, count);
        debug_assert!({
            let (lo, hi) = self.inner();
            off + count <= lo || off >= hi
        });
        let first = self.at(off).cast::<AtomicU8>();
        // SAFETY: inside the region (asserted above), so valid for `'a`; an octet is always
        // aligned. Octets at the edges are only ever accessed as octets.
        unsafe { std::slice::from_raw_parts(first, count) }
    }

    /// Stores into octets at an edge of the region.
    #[cold]
    fn store_octets(self, off: usize, data: &[u8]) {
        for (octet, value) in self.octets(off, data.len()).iter().zip(data) {
            octet.store(*value, Ordering::Release);
        }
    }

    /// Stores into whole words and parts of whole words; `data` is not empty.
    fn store_inner(self, off: usize, data: &[u8]) {
        let lane = self.lane(off);
        let head_len = if lane == 0 { 0 } else { (WORD - lane).min(data.len()) };
        let (head, rest) = data.split_at(head_len);
        let (body, tail) = rest.split_at(rest.len() / WORD * WORD);
        if !head.is_empty() {
            merge(self.word(off - lane), lane, head);
        }
        let body_off = off + head.len();
        if !body.is_empty() {
            store_words(self.words(body_off, body.len() / WORD), body);
        }
        if !tail.is_empty() {
            merge(self.word(body_off + body.len()), 0, tail);
        }
    }

    /// Loads `len` octets from `off` on to `out`.
    ///
    /// # Safety
    /// `[out, out + len)` is valid for writing, and accessed by nobody else meanwhile.
    unsafe fn load(self, off: usize, out: *mut u8, len: usize) {
        let (lo, hi) = self.inner();
        let (mut at, end) = (off, off + len);
        let put = |at: usize, octet: u8| {
            // SAFETY: `off <= at < end`, so this is one of the `len` octets behind `out`.
            unsafe { out.wrapping_add(at - off).write(octet) };
        };
        while at < end.min(lo) {
            put(at, self.octets(at, 1)[0].load(Ordering::Relaxed));
            at += 1;
        }
        if at < end.min(hi) {
            let stop = end.min(hi);
            let lane = self.lane(at);
            if lane != 0 {
                let word = self.word(at - lane).load(Ordering::Relaxed).to_ne_bytes();
                for octet in &word[lane..(lane + (stop - at)).min(WORD)] {
                    put(at, *octet);
                    at += 1;
                }
            }
            let count = (stop - at) / WORD;
            if count != 0 {
                let words = self.words(at, count);
                // SAFETY: the octets of these words go behind what was put so far, within `len`.
                unsafe { load_words(words, out.wrapping_add(at - off)) };
                at += count * WORD;
            }
            if at < stop {
                let word = self.word(at).load(Ordering::Relaxed).to_ne_bytes();
                for octet in &word[..stop - at] {
                    put(at, *octet);
                    at += 1;
                }
            }
        }
        while at < end {
            put(at, self.octets(at, 1)[0].load(Ordering::Relaxed));
            at += 1;
        }
        // Pairs with the release stores of `store`: see `load_to_vec`.
        fence(Ordering::Acquire);
    }
}

/// Stores `data` into `words`, of the same length in octets.
#[inline]
fn store_words(words: &[AtomicU64], data: &[u8]) {
    let put = |word: &AtomicU64, octets: &[u8], order| {
        // A chunk of 8 octets by construction of the loops below.
        word.store(u64::from_ne_bytes(octets.try_into().expect("8 octets")), order);
    };
    let bulk = words.len().saturating_sub(TAIL_WORDS);
    let (bulk_words, tail_words) = words.split_at(bulk);
    let (bulk_data, tail_data) = data.split_at(bulk * WORD);
    // Eight at a time: plain 8-octet moves without a loop test between them.
    let (blocks, rest_words) = bulk_words.as_chunks::<8>();
    let (lines, rest_data) = bulk_data.as_chunks::<64>();
    for (block, line) in blocks.iter().zip(lines) {
        for (word, octets) in block.iter().zip(line.as_chunks::<WORD>().0) {
            word.store(u64::from_ne_bytes(*octets), Ordering::Relaxed);
        }
    }
    for (word, octets) in rest_words.iter().zip(rest_data.chunks_exact(WORD)) {
        put(word, octets, Ordering::Relaxed);
    }
    // Each after all before it: as cheap as relaxed on x86, and right elsewhere too.
    for (word, octets) in tail_words.iter().zip(tail_data.chunks_exact(WORD)) {
        put(word, octets, Ordering::Release);
    }
}

/// Loads a first part of `words` to `out`, 16 octets at a time, and says how many words: none where
/// the processor does not promise that no such load is torn. Those with AVX do, for addresses that
/// are multiples of 16 (Intel SDM vol. 3A, 9.1.1; AMD64 APM vol. 2, 7.3.2). Twice as fast as words one
/// by one. What comes is fetched a kilobyte ahead: large regions lie in the last cache.
///
/// # Safety
/// As [`load_words`].
#[cfg(target_arch = "x86_64")]
unsafe fn load_lines(words: &[AtomicU64], out: *mut u8) -> usize {
    /// Below this it does not pay.
    const LEAST: usize = 32;
    if words.len() < LEAST || !std::arch::is_x86_feature_detected!("avx") {
        return 0;
    }
    // A word in front of a multiple of 16.
    let odd = usize::from(!words.as_ptr().addr().is_multiple_of(16));
    if odd == 1 {
        // SAFETY: one word fits behind `out`.
        unsafe { out.cast::<u64>().write_unaligned(words[0].load(Ordering::Relaxed)) };
    }
    let lines = (words.len() - odd) / 8;
    let (from, to) = (words.as_ptr().wrapping_add(odd), out.wrapping_add(odd * WORD));
    // SAFETY: reads `lines` times 64 octets of `words`, from a multiple of 16 on, and writes as many
    // behind `out`, where they fit. Others may store into `words` meanwhile: the assembler's loads
    // are no accesses of Rust's, and none of them is torn.
    unsafe {
        std::arch::asm!(
            "2:",
            "prefetcht0 [{from} + 1024]",
            "movdqa {a}, xmmword ptr [{from}]",
            "movdqa {b}, xmmword ptr [{from} + 16]",
            "movdqa {c}, xmmword ptr [{from} + 32]",
            "movdqa {d}, xmmword ptr [{from} + 48]",
            "movdqu xmmword ptr [{to}], {a}",
            "movdqu xmmword ptr [{to} + 16], {b}",
            "movdqu xmmword ptr [{to} + 32], {c}",
            "movdqu xmmword ptr [{to} + 48], {d}",
            "add {from}, 64",
            "add {to}, 64",
            "dec {lines}",
            "jnz 2b",
            from = inout(reg) from => _,
            to = inout(reg) to => _,
            lines = inout(reg) lines => _,
            a = out(xmm_reg) _,
            b = out(xmm_reg) _,
            c = out(xmm_reg) _,
            d = out(xmm_reg) _,
            options(nostack),
        );
    }
    odd + lines * 8
}

#[cfg(not(target_arch = "x86_64"))]
unsafe fn load_lines(_: &[AtomicU64], _: *mut u8) -> usize {
    0
}

/// Loads `words` to `out`.
///
/// # Safety
/// The octets of `words` fit behind `out`, which nobody else accesses meanwhile.
#[inline]
unsafe fn load_words(words: &[AtomicU64], out: *mut u8) {
    // SAFETY: as is asked for here.
    let loaded = unsafe { load_lines(words, out) };
    let (words, out) = (&words[loaded..], out.wrapping_add(loaded * WORD));
    let (blocks, rest) = words.as_chunks::<8>();
    let mut to = out.cast::<u64>();
    let mut put = |word: &AtomicU64| {
        // SAFETY: `to` is behind `out` by as many words as were put, and they fit.
        unsafe { to.write_unaligned(word.load(Ordering::Relaxed)) };
        to = to.wrapping_add(1);
    };
    for block in blocks {
        block.iter().for_each(&mut put);
    }
    rest.iter().for_each(&mut put);
}

/// Stores `octets` into lanes `lane..` of `word` and keeps the other lanes, whoever stores there
/// at the same time.
fn merge(word: &AtomicU64, lane: usize, octets: &[u8]) {
    let (mut value, mut mask) = (0u64, 0u64);
    for (i, octet) in octets.iter().enumerate() {
        let shift = if cfg!(target_endian = "little") { lane + i } else { WORD - 1 - lane - i } * 8;
        value |= u64::from(*octet) << shift;
        mask |= 0xff << shift;
    }
    let mut old = word.load(Ordering::Relaxed);
    while let Err(now) =
        word.compare_exchange_weak(old, (old & !mask) | value, Ordering::Release, Ordering::Relaxed)
    {
        old = now;
    }
}

/// Who owns the octets.
#[derive(Debug)]
enum Owner {
    /// We: pages from the allocator.
    Pages(Layout),
    /// We: the buffer of a `Vec<u8>` with this capacity.
    Vec(usize),
    /// Somebody else, who keeps them until the region is deregistered.
    Foreign,
    /// Nobody: the buffer was given back, and the length is 0.
    Taken,
}

/// The memory of one region, with the gate through which the program goes to it.
pub(super) struct Backing {
    /// INVARIANT: `[base, base + len)` is initialised memory of one allocation, described by
    /// `owner`; no reference to it exists. Owned memory is ours until `drop` or `take_vec`,
    /// foreign memory is there until `close` has returned and no `Door` that holds this backing
    /// lets anybody in any more.
    base: NonNull<u8>,
    len: usize,
    owner: Owner,
    gate: Gate,
}

/// The key of the program's gate, which is no secret.
const PROGRAM: u32 = 1;

// SAFETY: the pointer is to memory that is not bound to a thread, and is followed only by way of
// `Words`, which is atomic.
unsafe impl Send for Backing {}
// SAFETY: as above; `&Backing` gives out nothing but `Words`.
unsafe impl Sync for Backing {}

impl Backing {
    /// `len` zeroed octets that start at a page.
    pub(super) fn pages(len: usize) -> Result<Self, RegisterError> {
        if len == 0 {
            return Err(RegisterError::Empty);
        }
        let no_memory = RegisterError::NoMemory { len };
        let Ok(layout) = Layout::from_size_align(len, PAGE) else {
            return Err(no_memory);
        };
        // SAFETY: the size is not 0.
        let base = unsafe { alloc::alloc_zeroed(layout) };
        let Some(base) = NonNull::new(base) else {
            return Err(no_memory);
        };
        Ok(Self { base, len, owner: Owner::Pages(layout), gate: Gate::opened(PROGRAM) })
    }

    /// The octets of `vec`, up to its length.
    pub(super) fn vec(vec: Vec<u8>) -> Self {
        let mut vec = ManuallyDrop::new(vec);
        let (len, capacity) = (vec.len(), vec.capacity());
        // A vector's pointer is never null; it dangles where the capacity is 0, and so is the
        // length then.
        let base = NonNull::new(vec.as_mut_ptr()).unwrap_or(NonNull::dangling());
        Self { base, len, owner: Owner::Vec(capacity), gate: Gate::opened(PROGRAM) }
    }

    /// Memory of somebody else.
    ///
    /// # Safety
    /// As [`Table::register_foreign`] says.
    unsafe fn foreign(ptr: *mut u8, len: usize) -> Result<Self, RegisterError> {
        if len == 0 {
            return Err(RegisterError::Empty);
        }
        let range = RegisterError::BadRange { addr: ptr.addr(), len };
        let Some(base) = NonNull::new(ptr) else {
            return Err(range);
        };
        if isize::try_from(len).is_err() || ptr.addr().checked_add(len).is_none() {
            return Err(range);
        }
        if let Some(addr) = first_unmapped(ptr, len) {
            return Err(RegisterError::NotMapped { addr });
        }
        Ok(Self { base, len, owner: Owner::Foreign, gate: Gate::opened(PROGRAM) })
    }

    /// Length in octets.
    pub(super) const fn len(&self) -> usize {
        self.len
    }

    /// Whether the memory is somebody else's.
    pub(super) const fn is_foreign(&self) -> bool {
        matches!(self.owner, Owner::Foreign)
    }

    /// Whether [`Backing::take_vec`] gives a buffer back.
    pub(super) const fn is_vec(&self) -> bool {
        matches!(self.owner, Owner::Vec(_))
    }

    /// What the first octet's address in work requests is.
    pub(super) fn iova(&self) -> u64 {
        if self.is_foreign() { self.base.addr().get() as u64 } else { 0 }
    }

    /// The octets for the program, for as long as the guard lives; nothing once closed.
    pub(super) fn enter(&self) -> Option<Held<'_>> {
        if !self.gate.enter(PROGRAM) {
            return None;
        }
        Some(Held { words: self.words(), gate: &self.gate })
    }

    /// The octets of owned memory, to be loaded without a guard: they are there for as long as
    /// `self` is. Nothing for foreign memory, nor once closed.
    pub(super) fn peek(&self) -> Option<Words<'_>> {
        (!self.is_foreign() && self.gate.key() == PROGRAM).then(|| self.words())
    }

    /// Keeps the program out for good, and waits until it is out.
    pub(super) fn close(&self) {
        self.gate.close(PROGRAM);
        self.gate.drain();
    }

    /// Gives the buffer of [`Backing::vec`] back. `&mut`: nobody is at it.
    pub(super) fn take_vec(&mut self) -> Option<Vec<u8>> {
        let Owner::Vec(capacity) = self.owner else {
            return None;
        };
        let (base, len) = (self.base, self.len);
        self.owner = Owner::Taken;
        self.base = NonNull::dangling();
        self.len = 0;
        // SAFETY: pointer, length and capacity are those of the vector that `vec` took apart, and
        // its octets stayed initialised. `self` has just forgotten them.
        Some(unsafe { Vec::from_raw_parts(base.as_ptr(), len, capacity) })
    }

    /// The octets. Private: for foreign memory the caller must be inside a gate.
    fn words(&self) -> Words<'_> {
        Words { base: self.base.as_ptr(), len: self.len, owner: PhantomData }
    }
}

impl Drop for Backing {
    fn drop(&mut self) {
        drop(self.take_vec());
        if let Owner::Pages(layout) = self.owner {
            // SAFETY: allocated by `pages` with this layout, freed only here.
            unsafe { alloc::dealloc(self.base.as_ptr(), layout) };
        }
    }
}

impl fmt::Debug for Backing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Backing")
            .field("len", &self.len)
            .field("owner", &self.owner)
            .finish_non_exhaustive()
    }
}

/// A gate with memory behind it, which may be exchanged while nobody is inside.
#[derive(Default)]
pub(super) struct Door {
    gate: Gate,
    /// INVARIANT: while the gate has a key or somebody who entered with one is inside, `base` and
    /// `len` are those of the backing in `owner`, which is not exchanged: `put` and `take` insist
    /// on a gate that has no key, and drain it first.
    base: AtomicPtr<u8>,
    len: AtomicUsize,
    owner: Mutex<Option<Arc<Backing>>>,
}

impl Door {
    /// Puts `backing` behind the closed door. [`Door::open`] lets people in.
    pub(super) fn put(&self, backing: Arc<Backing>) {
        let mut owner = self.lock_empty();
        self.base.store(backing.base.as_ptr(), Ordering::Relaxed);
        self.len.store(backing.len, Ordering::Relaxed);
        *owner = Some(backing);
    }

    /// Takes the memory away from behind the closed door.
    pub(super) fn take(&self) {
        let mut owner = self.lock_empty();
        self.base.store(ptr::null_mut(), Ordering::Relaxed);
        self.len.store(0, Ordering::Relaxed);
        *owner = None;
    }

    /// Opens the door for `key`, which is not 0.
    pub(super) fn open(&self, key: u32) {
        let owner = self.owner.lock();
        assert!(owner.is_some(), "no memory behind the door");
        self.gate.open(key);
    }

    /// Closes it where `key` opens it; whether it did. Those inside stay until [`Door::drain`].
    pub(super) fn close(&self, key: u32) -> bool {
        self.gate.close(key)
    }

    /// Waits until nobody is inside.
    pub(super) fn drain(&self) {
        self.gate.drain();
    }

    /// The key that opens it; 0 while closed.
    pub(super) fn key(&self) -> u32 {
        self.gate.key()
    }

    /// The memory, for as long as the guard lives, where `key` opens the door.
    #[inline]
    pub(super) fn enter(&self, key: u32) -> Option<Held<'_>> {
        if !self.gate.enter(key) {
            return None;
        }
        // Relaxed: `enter` acquired what `put` and `open` released. The invariant of `Words`
        // follows from that of `base`: the backing stays until the guard has left.
        let words = Words {
            base: self.base.load(Ordering::Relaxed),
            len: self.len.load(Ordering::Relaxed),
            owner: PhantomData,
        };
        Some(Held { words, gate: &self.gate })
    }

    /// The owner's lock, with the gate closed and nobody inside. `open` needs the same lock, so
    /// that stays so.
    fn lock_empty(&self) -> parking_lot::MutexGuard<'_, Option<Arc<Backing>>> {
        let owner = self.owner.lock();
        assert!(self.gate.key() == 0, "the memory behind an open door is not exchanged");
        self.gate.drain();
        owner
    }
}

/// Somebody inside a gate, and the octets behind it. Revocation waits until it is dropped.
pub(super) struct Held<'a> {
    words: Words<'a>,
    gate: &'a Gate,
}

impl Held<'_> {
    /// The octets, for as long as `self` is borrowed.
    pub(super) const fn words(&self) -> Words<'_> {
        self.words
    }
}

impl Drop for Held<'_> {
    #[inline]
    fn drop(&mut self) {
        self.gate.leave();
    }
}

impl fmt::Debug for Held<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Held").field("len", &self.words.len).finish_non_exhaustive()
    }
}

impl Table {
    /// Registers memory that somebody else owns: `len` octets at `ptr`. Its address in work
    /// requests is the pointer itself, as in the verbs of C.
    ///
    /// # Errors
    /// As [`Table::register`]; also [`RegisterError::BadRange`] for a null pointer or a range that
    /// leaves the address space, and [`RegisterError::NotMapped`] (Linux) where no memory is.
    ///
    /// # Safety
    /// From now until [`Mr::deregister`] has returned, or the last clone of the region is dropped:
    /// * `[ptr, ptr + len)` is mapped, readable, and where `access` or the program's own calls
    ///   write, writable; its octets are initialised;
    /// * no Rust reference to any of these octets exists, atomics excepted;
    /// * whoever else accesses them does so in a way that is defined when a peer stores there at
    ///   the same time: by atomics, from another language, or ordered by completions;
    /// * of regions that overlap, one may have only a part of an 8-octet word that the other has
    ///   whole: the program does not let both store into such a word at the same time.
    pub unsafe fn register_foreign(
        self: &Arc<Self>,
        pd: PdId,
        ptr: *mut u8,
        len: usize,
        access: Access,
    ) -> Result<Mr, RegisterError> {
        // SAFETY: the caller promises the same.
        let backing = unsafe { Backing::foreign(ptr, len)? };
        self.register(pd, Region::new(backing), access)
    }
}

impl crate::Pd {
    /// Registers memory that somebody else owns: [`Table::register_foreign`] in this domain. Its
    /// address in work requests is the pointer itself, as in the verbs of C.
    ///
    /// # Errors
    /// As [`Pd::register`](crate::Pd::register); also for a range that cannot be, or where nothing
    /// is mapped.
    ///
    /// # Safety
    /// As [`Table::register_foreign`].
    pub unsafe fn register_foreign(
        &self,
        ptr: *mut u8,
        len: usize,
        access: Access,
    ) -> crate::Result<Mr> {
        // SAFETY: the caller promises the same.
        Ok(unsafe { self.table().register_foreign(self.id(), ptr, len, access)? })
    }
}

/// The first page of `[ptr, ptr + len)` where nothing is mapped: memory that a peer's WRITE would
/// kill the process with. Pages that are mapped without rights are not found.
#[cfg(target_os = "linux")]
fn first_unmapped(ptr: *mut u8, len: usize) -> Option<usize> {
    // SAFETY: asks for a number.
    let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(PAGE);
    let end = ptr.addr() + len;
    let mut at = ptr.map_addr(|addr| addr / page * page);
    let mut resident = [0u8; 1024];
    let mut step = page * resident.len();
    while at.addr() < end {
        let chunk = step.min(end - at.addr());
        // SAFETY: `mincore` reads no memory at `at`; it writes an octet a page to `resident`,
        // and `chunk` is at most as many pages as that has octets.
        let ret = unsafe { libc::mincore(at.cast(), chunk, resident.as_mut_ptr()) };
        if ret == 0 {
            at = at.wrapping_add(chunk);
            continue;
        }
        // Anything but ENOMEM (an old kernel, a sandbox) tells nothing about the memory.
        if std::io::Error::last_os_error().raw_os_error() != Some(libc::ENOMEM) {
            return None;
        }
        if chunk <= page {
            return Some(at.addr());
        }
        step = page;
    }
    None
}

#[cfg(not(target_os = "linux"))]
fn first_unmapped(_: *mut u8, _: usize) -> Option<usize> {
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mr::tests::StopOnDrop;
    use proptest::prelude::*;
    use std::sync::atomic::AtomicBool;
    use userdma_proto::{
        mem::{AccessError, Memory, Scope},
        verbs::Sge,
        wire::ids::{LKey, Qpn},
    };

    /// What surrounds foreign memory, and is not ours.
    const OTHERS: u8 = 0xee;

    /// Memory of "somebody else": octets with others' octets around, at any alignment.
    struct Foreign {
        whole: *mut [u8],
        off: usize,
        len: usize,
    }

    impl Foreign {
        fn new(misalign: usize, len: usize) -> Self {
            // Words, so that the alignment is known.
            let words = vec![u64::from_ne_bytes([OTHERS; 8]); len.div_ceil(8) + 4];
            let octets = words.len() * 8;
            let first = Box::into_raw(words.into_boxed_slice()).cast::<u8>();
            let whole = ptr::slice_from_raw_parts_mut(first, octets);
            Self { whole, off: 8 + misalign, len }
        }

        fn ptr(&self) -> *mut u8 {
            self.whole.cast::<u8>().wrapping_add(self.off)
        }

        fn register(&self, table: &Arc<Table>, pd: PdId, access: Access) -> Mr {
            // SAFETY: the memory is there until `self` is dropped, which tests do after the
            // region's end; nothing refers to it meanwhile.
            unsafe { table.register_foreign(pd, self.ptr(), self.len, access) }.unwrap()
        }

        /// A copy of the memory, once nobody accesses it. Panics where others' octets changed.
        fn octets(&self) -> Vec<u8> {
            // SAFETY: tests call this when no region is registered over it.
            let whole = unsafe { &*self.whole };
            let (before, rest) = whole.split_at(self.off);
            let (ours, after) = rest.split_at(self.len);
            assert!(before.iter().chain(after).all(|octet| *octet == OTHERS), "outside octets");
            ours.to_vec()
        }
    }

    impl Drop for Foreign {
        fn drop(&mut self) {
            let words =
                ptr::slice_from_raw_parts_mut(self.whole.cast::<u64>(), self.whole.len() / 8);
            // SAFETY: from `Box::into_raw` in `new`, as so many words.
            drop(unsafe { Box::from_raw(words) });
        }
    }

    fn all() -> Access {
        Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC
    }

    fn setup() -> (Arc<Table>, Scope) {
        let table = Table::new();
        let pd = table.alloc_pd();
        (table, Scope { pd, qpn: Qpn(1) })
    }

    /// One access, offsets and lengths as fractions of what there is.
    #[derive(Debug, Clone)]
    enum Op {
        Write(u16, Vec<u8>),
        WriteAt(u16, Vec<u8>),
        Read(u16, u16),
        ReadAt(u16, u16),
        Octet(u16),
        Add(u16, u64),
    }

    fn ops() -> impl Strategy<Value = Vec<Op>> {
        let data = || {
            prop_oneof![
                4 => proptest::collection::vec(any::<u8>(), 0..24),
                1 => proptest::collection::vec(any::<u8>(), 0..700),
            ]
        };
        let op = prop_oneof![
            (any::<u16>(), data()).prop_map(|(at, data)| Op::Write(at, data)),
            (any::<u16>(), data()).prop_map(|(at, data)| Op::WriteAt(at, data)),
            any::<(u16, u16)>().prop_map(|(at, len)| Op::Read(at, len)),
            any::<(u16, u16)>().prop_map(|(at, len)| Op::ReadAt(at, len)),
            any::<u16>().prop_map(Op::Octet),
            any::<(u16, u64)>().prop_map(|(at, add)| Op::Add(at, add)),
        ];
        proptest::collection::vec(op, 1..24)
    }

    proptest! {
        /// Every kind of access against a plain vector, at every alignment; others' octets around
        /// the region stay.
        #[test]
        fn foreign_memory_is_as_a_plain_vector(
            misalign in 0usize..8,
            len in prop_oneof![1usize..40, 500usize..900],
            ops in ops(),
        ) {
            let (table, scope) = setup();
            let memory = Foreign::new(misalign, len);
            let mr = memory.register(&table, scope.pd, all());
            let base = memory.ptr().addr() as u64;
            prop_assert_eq!(mr.addr(), base);
            let mut model = vec![OTHERS; len];
            for op in ops {
                match op {
                    Op::Write(at, data) | Op::WriteAt(at, data) if at % 2 == 0 => {
                        let at = usize::from(at) % (len + 1);
                        let data = &data[..data.len().min(len - at)];
                        table.write_remote(scope, mr.rkey(), base + at as u64, data).unwrap();
                        model[at..at + data.len()].copy_from_slice(data);
                    }
                    Op::Write(at, data) | Op::WriteAt(at, data) => {
                        let at = usize::from(at) % (len + 1);
                        let data = &data[..data.len().min(len - at)];
                        mr.write_at(at, data).unwrap();
                        model[at..at + data.len()].copy_from_slice(data);
                    }
                    Op::Read(at, n) => {
                        let at = usize::from(at) % (len + 1);
                        let n = usize::from(n) % (len - at + 1);
                        let mut out = vec![1, 2, 3];
                        let sge = Sge::new(base + at as u64, n as u32, mr.lkey());
                        table.read_local(scope, sge, &mut out).unwrap();
                        prop_assert_eq!(&out[..3], &[1, 2, 3]);
                        prop_assert_eq!(&out[3..], &model[at..at + n]);
                    }
                    Op::ReadAt(at, n) => {
                        let at = usize::from(at) % (len + 1);
                        let mut out = vec![0; usize::from(n) % (len - at + 1)];
                        mr.read_at(at, &mut out).unwrap();
                        prop_assert_eq!(&out[..], &model[at..at + out.len()]);
                    }
                    Op::Octet(at) => {
                        let at = usize::from(at) % len;
                        prop_assert_eq!(mr.load_u8(at, Ordering::Acquire), model[at]);
                    }
                    Op::Add(at, add) => {
                        let at = usize::from(at) % len;
                        let op = AtomicOp::FetchAdd { add, mask: 0 };
                        let got = table.atomic(scope, mr.rkey(), base + at as u64, op);
                        if at + 8 > len {
                            prop_assert_eq!(got, Err(AccessError::Bounds));
                        } else if !(base as usize + at).is_multiple_of(8) {
                            prop_assert_eq!(got, Err(AccessError::Alignment));
                        } else {
                            let word: &mut [u8; 8] = (&mut model[at..at + 8]).try_into().unwrap();
                            let old = u64::from_ne_bytes(*word);
                            prop_assert_eq!(got, Ok(old));
                            *word = old.wrapping_add(add).to_ne_bytes();
                        }
                    }
                }
            }
            drop(mr);
            prop_assert_eq!(memory.octets(), model);
        }
    }

    #[test]
    fn every_offset_and_length_at_every_alignment() {
        let (table, scope) = setup();
        for misalign in 0..8 {
            for len in 1..=35 {
                let memory = Foreign::new(misalign, len);
                let mr = memory.register(&table, scope.pd, all());
                let mut model = vec![OTHERS; len];
                let mut value = 0u8;
                for at in 0..=len {
                    for n in 0..=len - at {
                        let data: Vec<u8> = (0..n as u8).map(|i| value.wrapping_add(i)).collect();
                        value = value.wrapping_add(7);
                        mr.write_at(at, &data).unwrap();
                        model[at..at + n].copy_from_slice(&data);
                        let mut out = vec![0; n];
                        mr.read_at(at, &mut out).unwrap();
                        assert_eq!(out, data, "{n} octets at {at} of {len}, misaligned {misalign}");
                    }
                }
                mr.deregister();
                assert_eq!(memory.octets(), model);
            }
        }
    }

    #[test]
    fn pins_point_at_the_piece() {
        let (table, scope) = setup();
        let memory = Foreign::new(3, 100);
        let mr = memory.register(&table, scope.pd, all());
        let pin = table.pin_read(scope, mr.slice(10..30)).unwrap();
        assert_eq!((pin.as_ptr(), pin.len()), (memory.ptr().wrapping_add(10).cast_const(), 20));
        drop(pin);
        let addr = mr.remote(90).addr;
        let pin = table.pin_write_remote(scope, mr.rkey(), addr, 10).unwrap();
        assert_eq!((pin.as_mut_ptr(), pin.len()), (memory.ptr().wrapping_add(90), 10));
        // As the kernel would.
        // SAFETY: the pin holds ten octets there.
        unsafe { pin.as_mut_ptr().write_bytes(0x11, 10) };
        pin.store(8, &[0x22; 2]);
        drop(pin);
        let refused = table.pin_write_remote(scope, mr.rkey(), addr, 11).unwrap_err();
        assert_eq!(refused, AccessError::Bounds);
        mr.deregister();
        assert_eq!(memory.octets()[88..], [OTHERS, OTHERS, 17, 17, 17, 17, 17, 17, 17, 17, 34, 34]);
    }

    /// The barrier, seen from outside: long WRITEs, READs and the program's own stores are under
    /// way all the time, and end with the call.
    #[test]
    fn after_deregister_foreign_memory_never_changes() {
        const LEN: usize = 1 << 18;
        for round in 0..40 {
            let (table, scope) = setup();
            let memory = Foreign::new(5, LEN);
            let mr = memory.register(&table, scope.pd, all());
            let (key, addr) = (mr.rkey(), mr.addr());
            let started = std::sync::Barrier::new(3);
            let stop = AtomicBool::new(false);
            std::thread::scope(|s| {
                s.spawn(|| {
                    let data = [vec![1; LEN], vec![2; LEN]];
                    started.wait();
                    for piece in data.iter().cycle() {
                        if stop.load(Ordering::Relaxed) {
                            break;
                        }
                        let done = table.write_remote(scope, key, addr, piece);
                        assert!(done.is_ok() || done == Err(AccessError::InvalidKey));
                    }
                });
                let clone = mr.clone();
                let (started, stop) = (&started, &stop);
                s.spawn(move || {
                    let data = vec![3; LEN];
                    started.wait();
                    while !stop.load(Ordering::Relaxed) {
                        let done = clone.write_at(0, &data);
                        assert!(done.is_ok() || done == Err(AccessError::InvalidKey));
                    }
                });
                started.wait();
                let _stop = StopOnDrop(stop);
                for _ in 0..round * 1000 {
                    std::hint::spin_loop();
                }
                mr.deregister();
                let before = memory.octets();
                for _ in 0..4 {
                    std::thread::yield_now();
                    assert!(before == memory.octets(), "memory changed after deregister");
                }
            });
        }
    }

    #[test]
    fn foreign_memory_that_is_not_there_is_refused() {
        let (table, scope) = setup();
        let register = |ptr: *mut u8, len| {
            // SAFETY: refused, so never accessed.
            unsafe { table.register_foreign(scope.pd, ptr, len, all()) }.map(drop)
        };
        let dangling = ptr::without_provenance_mut;
        let bad = |addr, len| Err(RegisterError::BadRange { addr, len });
        assert_eq!(register(ptr::null_mut(), 8), bad(0, 8));
        assert_eq!(register(dangling(64), 0), Err(RegisterError::Empty));
        assert_eq!(register(dangling(usize::MAX - 7), 9), bad(usize::MAX - 7, 9));
        assert_eq!(register(dangling(64), usize::MAX / 2 + 1), bad(64, usize::MAX / 2 + 1));
        // Below vm.mmap_min_addr there is never anything.
        #[cfg(target_os = "linux")]
        assert_eq!(register(dangling(PAGE + 1), 8), Err(RegisterError::NotMapped { addr: PAGE }));
        assert_eq!(table.regions(), 0);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_hole_at_the_end_of_foreign_memory_is_found() {
        let pages = 1500;
        // SAFETY: asks for fresh memory.
        let start = unsafe {
            libc::mmap(
                ptr::null_mut(),
                pages * PAGE,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        assert_ne!(start, libc::MAP_FAILED);
        assert_eq!(first_unmapped(start.cast(), pages * PAGE), None);
        let hole = start.wrapping_byte_add((pages - 1) * PAGE);
        // SAFETY: the last page of the mapping above, which nobody uses.
        assert_eq!(unsafe { libc::munmap(hole, PAGE) }, 0);
        assert_eq!(first_unmapped(start.cast(), pages * PAGE), Some(hole.addr()));
        assert_eq!(first_unmapped(start.cast(), (pages - 1) * PAGE), None);
        // SAFETY: the rest of the mapping above.
        assert_eq!(unsafe { libc::munmap(start, (pages - 1) * PAGE) }, 0);
    }

    /// A word is one store and one load, whoever is at it.
    #[test]
    fn aligned_words_are_never_torn() {
        let (table, scope) = setup();
        let memory = Foreign::new(4, 4096);
        let mr = memory.register(&table, scope.pd, all());
        // The first aligned word is at offset 4. Pieces begin and end within words, too.
        let (from, to) = (4 + 3, 4096 - 7);
        let stop = AtomicBool::new(false);
        std::thread::scope(|s| {
            s.spawn(|| {
                let pieces = [vec![0xaa; to - from], vec![0xbb; to - from]];
                for piece in pieces.iter().cycle() {
                    if stop.load(Ordering::Relaxed) {
                        break;
                    }
                    let addr = mr.addr() + from as u64;
                    table.write_remote(scope, mr.rkey(), addr, piece).unwrap();
                }
            });
            let stop = StopOnDrop(&stop);
            let (mut out, mut mixed) = (Vec::new(), 0);
            for _ in 0..4000 {
                out.clear();
                table.read_local(scope, mr.slice(0..4096), &mut out).unwrap();
                let (words, _) = out[4..].as_chunks::<8>();
                // The first and the last hold octets that nobody writes.
                let inner = &words[1..words.len() - 1];
                for word in inner {
                    assert!(word.iter().all(|octet| octet == &word[0]), "torn: {word:02x?}");
                }
                mixed += usize::from(inner.first() != inner.last());
            }
            drop(stop);
            // On one core alone the threads may never meet; nothing is shown then.
            println!("{mixed} of 4000 snapshots were taken amid a store");
        });
    }

    /// Octets that share a word, each stored by its own thread: none is lost.
    #[test]
    fn neighbours_in_one_word_are_kept() {
        let (table, scope) = setup();
        for misalign in [0, 3] {
            let memory = Foreign::new(misalign, 40);
            let mr = memory.register(&table, scope.pd, all());
            let cuts = [0usize, 5, 13, 14, 27, 40];
            std::thread::scope(|s| {
                for pair in cuts.windows(2) {
                    let (mr, table) = (&mr, &table);
                    let (from, to) = (pair[0], pair[1]);
                    s.spawn(move || {
                        for value in 0..20_000u32 {
                            let data = vec![value as u8; to - from];
                            let addr = mr.addr() + from as u64;
                            table.write_remote(scope, mr.rkey(), addr, &data).unwrap();
                            let mut out = vec![0; to - from];
                            mr.read_at(from, &mut out).unwrap();
                            assert_eq!(out, data, "octets {from}..{to}");
                        }
                    });
                }
            });
        }
    }

    #[test]
    fn an_lkey_of_a_foreign_region_takes_pointers_only() {
        let (table, scope) = setup();
        let memory = Foreign::new(0, 64);
        let mr = memory.register(&table, scope.pd, all());
        let check = |addr: u64, len| {
            table.check_local(scope, Sge::new(addr, len, LKey(mr.lkey().0)), Access::empty())
        };
        let base = memory.ptr().addr() as u64;
        assert_eq!(check(base, 64), Ok(()));
        assert_eq!(check(0, 64), Err(AccessError::Bounds));
        assert_eq!(check(base - 1, 2), Err(AccessError::Bounds));
        assert_eq!(check(base + 1, 64), Err(AccessError::Bounds));
        assert_eq!(check(u64::MAX, 2), Err(AccessError::Wrap));
        assert_eq!(check(u64::MAX, 1), Err(AccessError::Wrap));
        assert_eq!(check(u64::MAX - 1, 1), Err(AccessError::Bounds));
    }
}
