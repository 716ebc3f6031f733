//! Registered memory that is nothing but vectors.

use alloc::{collections::BTreeMap, vec::Vec};
use core::cell::RefCell;

use crate::{
    mem::{AccessError, AtomicOp, Memory, Scope},
    verbs::{Access, Sge},
    wire::ids::{LKey, Qpn, RKey},
};

#[derive(Debug)]
struct Region {
    access: Access,
    bound_to: Option<Qpn>,
    iova: u64,
    bytes: Vec<u8>,
}

/// The memory of one queue pair.
#[derive(Debug, Default)]
pub(super) struct Vectors(RefCell<BTreeMap<u32, Region>>);

impl Vectors {
    /// Registers `bytes` at `iova` under `key`.
    pub(super) fn add(&self, key: u32, access: Access, iova: u64, bytes: Vec<u8>) {
        self.0.borrow_mut().insert(key, Region { access, bound_to: None, iova, bytes });
    }

    /// A key for one queue pair, to be invalidated.
    pub(super) fn add_mortal(&self, key: u32, qpn: Qpn) {
        let (access, bound_to) = (Access::REMOTE_INVALIDATE, Some(qpn));
        self.0.borrow_mut().insert(key, Region { access, bound_to, iova: 0, bytes: Vec::new() });
    }

    /// What a region holds; nothing where there is none.
    pub(super) fn look<T>(&self, key: u32, f: impl FnOnce(&[u8]) -> T) -> T {
        let regions = self.0.borrow();
        f(regions.get(&key).map_or(&[], |region| &region.bytes))
    }

    /// Keys that can still be invalidated.
    pub(super) fn mortals(&self) -> usize {
        self.0.borrow().values().filter(|region| region.bound_to.is_some()).count()
    }

    fn with<T>(
        &self,
        key: u32,
        scope: Scope,
        addr: u64,
        len: u64,
        access: Access,
        f: impl FnOnce(&mut [u8]) -> T,
    ) -> Result<T, AccessError> {
        if len == 0 {
            return Ok(f(&mut []));
        }
        let mut regions = self.0.borrow_mut();
        let region = regions.get_mut(&key).ok_or(AccessError::InvalidKey)?;
        if region.bound_to.is_some_and(|qpn| qpn != scope.qpn) {
            return Err(AccessError::WrongDomain);
        }
        if !region.access.contains(access) {
            return Err(AccessError::Rights);
        }
        addr.checked_add(len).ok_or(AccessError::Wrap)?;
        let from = addr.checked_sub(region.iova).ok_or(AccessError::Bounds)?;
        let range = usize::try_from(from).ok().zip(usize::try_from(from + len).ok());
        let bytes = range.and_then(|(from, to)| region.bytes.get_mut(from..to));
        Ok(f(bytes.ok_or(AccessError::Bounds)?))
    }
}

impl Memory for Vectors {
    fn check_local(&self, scope: Scope, sge: Sge, access: Access) -> Result<(), AccessError> {
        self.with(sge.lkey.0, scope, sge.addr, sge.length.into(), access, |_| ())
    }

    fn check_remote(
        &self,
        scope: Scope,
        rkey: RKey,
        addr: u64,
        len: u64,
        access: Access,
    ) -> Result<(), AccessError> {
        self.with(rkey.0, scope, addr, len, access, |_| ())
    }

    fn read_local(&self, scope: Scope, sge: Sge, out: &mut Vec<u8>) -> Result<(), AccessError> {
        let (key, len) = (sge.lkey.0, sge.length.into());
        self.with(key, scope, sge.addr, len, Access::empty(), |b| out.extend_from_slice(b))
    }

    fn write_local(
        &self,
        scope: Scope,
        lkey: LKey,
        addr: u64,
        data: &[u8],
    ) -> Result<(), AccessError> {
        let len = data.len() as u64;
        self.with(lkey.0, scope, addr, len, Access::LOCAL_WRITE, |b| b.copy_from_slice(data))
    }

    fn read_remote(
        &self,
        scope: Scope,
        rkey: RKey,
        addr: u64,
        len: u64,
        out: &mut Vec<u8>,
    ) -> Result<(), AccessError> {
        self.with(rkey.0, scope, addr, len, Access::REMOTE_READ, |b| out.extend_from_slice(b))
    }

    fn write_remote(
        &self,
        scope: Scope,
        rkey: RKey,
        addr: u64,
        data: &[u8],
    ) -> Result<(), AccessError> {
        let len = data.len() as u64;
        self.with(rkey.0, scope, addr, len, Access::REMOTE_WRITE, |b| b.copy_from_slice(data))
    }

    fn atomic(
        &self,
        scope: Scope,
        rkey: RKey,
        addr: u64,
        op: AtomicOp,
    ) -> Result<u64, AccessError> {
        if !addr.is_multiple_of(8) {
            return Err(AccessError::Alignment);
        }
        self.with(rkey.0, scope, addr, 8, Access::REMOTE_ATOMIC, |word| {
            let mut old = [0; 8];
            old.copy_from_slice(word);
            let old = u64::from_ne_bytes(old);
            word.copy_from_slice(&op.apply(old).to_ne_bytes());
            old
        })
    }

    fn invalidate(&self, scope: Scope, rkey: RKey) -> Result<(), AccessError> {
        let mut regions = self.0.borrow_mut();
        let region = regions.get(&rkey.0).ok_or(AccessError::InvalidKey)?;
        if region.bound_to != Some(scope.qpn) {
            return Err(AccessError::WrongDomain);
        }
        regions.remove(&rkey.0);
        Ok(())
    }
}
