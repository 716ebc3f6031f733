//! An allocator that counts, for the whole process: a file that has this holds one test.

use std::{
    alloc::{GlobalAlloc, Layout, System},
    sync::atomic::{AtomicU64, Ordering},
};

use userdma::Wc;

use crate::common::Side;

struct Counting;

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

// SAFETY: the system's allocator, and a counter beside it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller promises the same.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the caller promises the same.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller promises the same.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Polls both sides until each has its completions.
pub(crate) fn drive(a: &Side, b: &Side, mut at_a: usize, mut at_b: usize) {
    let mut wcs = [Wc::default(); 16];
    while at_a + at_b > 0 {
        for (side, left) in [(a, &mut at_a), (b, &mut at_b)] {
            let n = side.cq.poll(&mut wcs);
            assert!(wcs[..n].iter().all(|wc| wc.status.is_ok()));
            *left -= n;
        }
    }
}

/// What `round` allocates in so many rounds, once it has run as often.
pub(crate) fn allocated(rounds: usize, round: impl Fn()) -> u64 {
    (0..rounds).for_each(|_| round());
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    (0..rounds).for_each(|_| round());
    ALLOCATIONS.load(Ordering::Relaxed) - before
}
