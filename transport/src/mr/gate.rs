//! A gate: counts who is inside, and closes so that nobody is inside when the close returns.

use std::{
    sync::atomic::{AtomicU64, Ordering},
    thread,
    time::Duration,
};

/// The low half counts those inside.
const USERS: u64 = 0xffff_ffff;

/// The half above is the key that opens the gate; 0 opens nothing.
const KEY_SHIFT: u32 = 32;

/// Key and user count in one word, so that one read-modify-write both enters and looks whether
/// the gate was open.
#[derive(Debug, Default)]
pub(super) struct Gate(AtomicU64);

impl Gate {
    /// A gate that `key` opens.
    pub(super) const fn opened(key: u32) -> Self {
        Self(AtomicU64::new((key as u64) << KEY_SHIFT))
    }

    /// The key that opens it now; 0 while closed.
    pub(super) fn key(&self) -> u32 {
        (self.0.load(Ordering::Acquire) >> KEY_SHIFT) as u32
    }

    /// Goes in where `key` opens the gate; [`Gate::leave`] must follow then, and only then.
    ///
    /// What was stored before [`Gate::open`] is seen inside.
    #[must_use]
    pub(super) fn enter(&self, key: u32) -> bool {
        let before = self.0.fetch_add(1, Ordering::Acquire);
        if before & USERS > USERS / 2 {
            // 2^31 guards were forgotten. One more lap and the count runs into the key.
            std::process::abort();
        }
        if (before >> KEY_SHIFT) as u32 != key || key == 0 {
            self.0.fetch_sub(1, Ordering::Release);
            return false;
        }
        #[cfg(debug_assertions)]
        held::push(self);
        true
    }

    /// Goes out.
    pub(super) fn leave(&self) {
        #[cfg(debug_assertions)]
        held::pop(self);
        // Release: what was done inside comes before the closer's return (`drain`).
        let before = self.0.fetch_sub(1, Ordering::Release);
        debug_assert!(before & USERS != 0, "a gate was left more often than entered");
    }

    /// Opens a closed and drained gate for `key`, which is not 0.
    pub(super) fn open(&self, key: u32) {
        debug_assert!(key != 0, "key 0 opens nothing");
        // An addition, not a store: somebody with an old key may be about to find out.
        let before = self.0.fetch_or(u64::from(key) << KEY_SHIFT, Ordering::Release);
        debug_assert!(before >> KEY_SHIFT == 0, "the gate was open");
    }

    /// Closes the gate where `key` is what opens it; false where it is not. Those inside are
    /// still there until [`Gate::drain`] returns.
    pub(super) fn close(&self, key: u32) -> bool {
        self.0
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |state| {
                ((state >> KEY_SHIFT) as u32 == key).then_some(state & USERS)
            })
            .is_ok()
    }

    /// Waits until nobody is inside whom an older key let in. Returns at once for a gate that is
    /// open (again): whoever opened it has drained it first.
    ///
    /// A thread that is inside itself would wait for ever; a debug build panics instead.
    pub(super) fn drain(&self) {
        let mut turns = 0u32;
        // Only a closed gate with somebody inside is the count alone, and not 0.
        while (1..=USERS).contains(&self.0.load(Ordering::Acquire)) {
            #[cfg(debug_assertions)]
            if turns == 0 {
                held::assert_outside(self);
            }
            turns = turns.saturating_add(1);
            match turns {
                // A copy of one packet or FPDU ends within microseconds.
                0..256 => std::hint::spin_loop(),
                // A system call on the other core, or a holder that was preempted.
                256..512 => thread::yield_now(),
                _ => thread::sleep(Duration::from_micros(50)),
            }
        }
    }
}

/// Which gates this thread is inside: for the one mistake that would hang silently.
#[cfg(debug_assertions)]
mod held {
    use super::Gate;
    use std::cell::RefCell;

    thread_local! {
        static HELD: RefCell<Vec<*const Gate>> = const { RefCell::new(Vec::new()) };
    }

    pub(super) fn push(gate: &Gate) {
        // A guard may live in another thread-local that is destroyed after this one: then there
        // is nothing to record into.
        let _ = HELD.try_with(|held| held.borrow_mut().push(gate));
    }

    pub(super) fn pop(gate: &Gate) {
        let _ = HELD.try_with(|held| {
            let mut held = held.borrow_mut();
            if let Some(at) = held.iter().rposition(|g| std::ptr::eq(*g, gate)) {
                held.swap_remove(at);
            }
        });
    }

    pub(super) fn assert_outside(gate: &Gate) {
        let inside = HELD.try_with(|held| held.borrow().iter().any(|g| std::ptr::eq(*g, gate)));
        if inside == Ok(true) && !std::thread::panicking() {
            panic!(
                "this thread revokes a region while it holds a pin of it, and would wait for \
                 itself: drop the pin first"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    #[test]
    fn only_the_key_enters() {
        let gate = Gate::default();
        assert!(!gate.enter(0), "a closed gate lets nobody in, not even with 0");
        gate.open(7);
        assert!(!gate.enter(8));
        assert!(gate.enter(7));
        gate.leave();
        assert!(!gate.close(8));
        assert!(gate.close(7));
        assert!(!gate.close(7));
        gate.drain();
        assert!(!gate.enter(7));
        assert_eq!(gate.key(), 0);
    }

    #[test]
    fn drain_waits_for_who_is_inside() {
        let gate = Gate::opened(1);
        let left = AtomicBool::new(false);
        thread::scope(|s| {
            let (entered, inside) = std::sync::mpsc::channel();
            let (gate, left) = (&gate, &left);
            s.spawn(move || {
                assert!(gate.enter(1));
                entered.send(()).unwrap();
                thread::sleep(Duration::from_millis(20));
                left.store(true, Ordering::Relaxed);
                gate.leave();
            });
            inside.recv().unwrap();
            assert!(gate.close(1));
            gate.drain();
            assert!(left.load(Ordering::Relaxed), "drain returned before the holder left");
        });
    }

    #[test]
    #[cfg(debug_assertions)]
    #[should_panic(expected = "drop the pin first")]
    fn waiting_for_oneself_is_detected() {
        let gate = Gate::opened(1);
        assert!(gate.enter(1));
        assert!(gate.close(1));
        gate.drain();
    }
}
