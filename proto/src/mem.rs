//! The only door from a state machine to registered memory.
//!
//! A peer writes a registered region while the program looks at it, so nobody holds a reference
//! into one: all access copies. An implementation checks, in this order, the key, its protection
//! domain (and the queue pair it is bound to), its rights, and its bounds without overflow, and
//! touches nothing unless all pass.

use crate::{
    verbs::{Access, Sge},
    wire::ids::{LKey, Qpn, RKey},
};

/// Names a protection domain within one [`Memory`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PdId(pub u32);

/// On whose behalf memory is accessed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Scope {
    /// The protection domain of the queue pair.
    pub pd: PdId,
    /// The queue pair.
    pub qpn: Qpn,
}

/// Why an access was refused, in the order of the checks. Nothing was touched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum AccessError {
    /// The key names nothing (any more).
    #[error("the key names no registered memory")]
    InvalidKey,
    /// The key is of another protection domain, or bound to another queue pair.
    #[error("the key belongs to another protection domain or queue pair")]
    WrongDomain,
    /// The region does not allow this kind of access.
    #[error("the region does not allow this access")]
    Rights,
    /// `address + length` is beyond 2^64.
    #[error("address plus length wraps around")]
    Wrap,
    /// The range is not within the region.
    #[error("the range is outside the region")]
    Bounds,
    /// An atomic's address is not a multiple of 8.
    #[error("the address is not a multiple of 8")]
    Alignment,
}

/// A read-modify-write of one 8-octet word.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AtomicOp {
    /// Add; no carry leaves a bit that is set in `mask` (RFC 7306 §5.1.1).
    FetchAdd {
        /// What is added.
        add: u64,
        /// Field boundaries; 0 adds plainly.
        mask: u64,
    },
    /// Where `(compare ^ old) & compare_mask` is 0, replace the bits of `swap_mask` (§5.1.2).
    CmpSwap {
        /// What the word is compared with.
        compare: u64,
        /// What replaces it.
        swap: u64,
        /// Bits that are compared.
        compare_mask: u64,
        /// Bits that are replaced.
        swap_mask: u64,
    },
}

impl AtomicOp {
    /// The word that replaces `old`.
    pub const fn apply(self, old: u64) -> u64 {
        match self {
            Self::FetchAdd { add, mask } => masked_add(old, add, mask),
            Self::CmpSwap { compare, swap, compare_mask, swap_mask } => {
                if (compare ^ old) & compare_mask == 0 {
                    (old & !swap_mask) | (swap & swap_mask)
                } else {
                    old
                }
            }
        }
    }
}

/// Adds field by field: a bit set in `mask` is the top bit of its field and lets no carry out.
///
/// The fields' top bits are added apart, without carry (an exclusive or), so that the ordinary sum
/// of the rest never carries from one field into the next.
const fn masked_add(a: u64, b: u64, mask: u64) -> u64 {
    ((a & !mask).wrapping_add(b & !mask)) ^ ((a ^ b) & mask)
}

/// Registered memory, as a state machine sees it.
///
/// Lengths are octets. A range of length zero passes all checks and touches nothing
/// (RFC 5041 §5.2; IBTA C9-88): implementations return success without looking at the key.
pub trait Memory {
    /// Whether `scope` may access `[addr, addr + len)` of the local key `lkey`; with
    /// [`Access::LOCAL_WRITE`] for writing, with [`Access::empty()`] for reading.
    fn check_local(&self, scope: Scope, sge: Sge, access: Access) -> Result<(), AccessError>;

    /// Whether the peer of `scope` may access `[addr, addr + len)` of `rkey` in the way `access`.
    fn check_remote(
        &self,
        scope: Scope,
        rkey: RKey,
        addr: u64,
        len: u64,
        access: Access,
    ) -> Result<(), AccessError>;

    /// Appends the octets of `sge` to `out`. On an error `out` is as it was.
    fn read_local(
        &self,
        scope: Scope,
        sge: Sge,
        out: &mut alloc::vec::Vec<u8>,
    ) -> Result<(), AccessError>;

    /// Stores `data` at `addr` of `lkey`, which needs [`Access::LOCAL_WRITE`]. The last 64 octets
    /// are stored in rising order and the very last word with release ordering, after the rest.
    fn write_local(
        &self,
        scope: Scope,
        lkey: LKey,
        addr: u64,
        data: &[u8],
    ) -> Result<(), AccessError>;

    /// Appends `len` octets at `addr` of `rkey` to `out`, which needs [`Access::REMOTE_READ`].
    /// On an error `out` is as it was.
    fn read_remote(
        &self,
        scope: Scope,
        rkey: RKey,
        addr: u64,
        len: u64,
        out: &mut alloc::vec::Vec<u8>,
    ) -> Result<(), AccessError>;

    /// Stores `data` at `addr` of `rkey`, which needs [`Access::REMOTE_WRITE`], in the order of
    /// [`Memory::write_local`].
    fn write_remote(
        &self,
        scope: Scope,
        rkey: RKey,
        addr: u64,
        data: &[u8],
    ) -> Result<(), AccessError>;

    /// Carries out `op` on the word at `addr` of `rkey`, which needs [`Access::REMOTE_ATOMIC`] and
    /// an address in memory that is a multiple of 8. Returns the word before.
    fn atomic(&self, scope: Scope, rkey: RKey, addr: u64, op: AtomicOp)
    -> Result<u64, AccessError>;

    /// Revokes `rkey`: after this returns no octet of the region is touched through it. Needs
    /// [`Access::REMOTE_INVALIDATE`] and a key of `scope`'s protection domain, bound to its
    /// queue pair.
    fn invalidate(&self, scope: Scope, rkey: RKey) -> Result<(), AccessError>;
}

/// No registered memory at all: every key is invalid. For peers that move only inline data,
/// immediates and empty messages, and for tests.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NoMemory;

impl NoMemory {
    /// The answer to every access: a range of length zero passes, anything else names no region.
    const fn answer(len: u64) -> Result<(), AccessError> {
        if len == 0 { Ok(()) } else { Err(AccessError::InvalidKey) }
    }
}

impl Memory for NoMemory {
    fn check_local(&self, _: Scope, sge: Sge, _: Access) -> Result<(), AccessError> {
        Self::answer(sge.length.into())
    }

    fn check_remote(
        &self,
        _: Scope,
        _: RKey,
        _: u64,
        len: u64,
        _: Access,
    ) -> Result<(), AccessError> {
        Self::answer(len)
    }

    fn read_local(
        &self,
        _: Scope,
        sge: Sge,
        _: &mut alloc::vec::Vec<u8>,
    ) -> Result<(), AccessError> {
        Self::answer(sge.length.into())
    }

    fn write_local(&self, _: Scope, _: LKey, _: u64, data: &[u8]) -> Result<(), AccessError> {
        Self::answer(data.len() as u64)
    }

    fn read_remote(
        &self,
        _: Scope,
        _: RKey,
        _: u64,
        len: u64,
        _: &mut alloc::vec::Vec<u8>,
    ) -> Result<(), AccessError> {
        Self::answer(len)
    }

    fn write_remote(&self, _: Scope, _: RKey, _: u64, data: &[u8]) -> Result<(), AccessError> {
        Self::answer(data.len() as u64)
    }

    fn atomic(&self, _: Scope, _: RKey, _: u64, _: AtomicOp) -> Result<u64, AccessError> {
        Err(AccessError::InvalidKey)
    }

    fn invalidate(&self, _: Scope, _: RKey) -> Result<(), AccessError> {
        Err(AccessError::InvalidKey)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The pseudocode of RFC 7306 §5.1.1, bit by bit.
    fn rfc_add(orig: u64, add: u64, mask: u64) -> u64 {
        let (mut out, mut carry) = (0u64, 0u64);
        for bit in 0..64 {
            let loc = 1u64 << bit;
            let sum = carry + ((orig & loc) >> bit) + ((add & loc) >> bit);
            carry = u64::from(sum & 2 != 0 && mask & loc == 0);
            if sum & 1 != 0 {
                out |= loc;
            }
        }
        out
    }

    proptest! {
        #[test]
        fn fetch_add_follows_the_pseudocode_of_rfc_7306(old: u64, add: u64, mask: u64) {
            prop_assert_eq!(AtomicOp::FetchAdd { add, mask }.apply(old), rfc_add(old, add, mask));
            prop_assert_eq!(AtomicOp::FetchAdd { add, mask: 0 }.apply(old), old.wrapping_add(add));
        }

        #[test]
        fn cmp_swap_replaces_only_masked_bits(old: u64, swap: u64, swap_mask: u64) {
            let op = AtomicOp::CmpSwap { compare: old, swap, compare_mask: u64::MAX, swap_mask };
            let new = op.apply(old);
            prop_assert_eq!(new & swap_mask, swap & swap_mask);
            prop_assert_eq!(new & !swap_mask, old & !swap_mask);
            let op = AtomicOp::CmpSwap { compare: !old, swap, compare_mask: 1, swap_mask };
            prop_assert_eq!(op.apply(old), old);
        }
    }
}
