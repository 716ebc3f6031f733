//! Memory for simulations.

use alloc::{collections::BTreeMap, vec::Vec};
use core::cell::RefCell;

use crate::{
    mem::{AccessError, AtomicOp, Memory, PdId, Scope},
    verbs::{Access, Sge},
    wire::ids::{LKey, Qpn, RKey},
};

/// One region of [`PlainMemory`].
#[derive(Debug, Clone)]
struct Plain {
    pd: PdId,
    access: Access,
    bound_to: Option<Qpn>,
    iova: u64,
    bytes: Vec<u8>,
}

/// Registered memory that is nothing but vectors, for tests and simulations: the trait's rules
/// written down plainly, apart from any engine's.
#[derive(Debug, Default)]
pub struct PlainMemory {
    regions: RefCell<BTreeMap<u32, Plain>>,
}

impl PlainMemory {
    /// Registers `bytes` at `iova` under `key`, in the protection domain `pd`.
    pub fn add(&self, key: u32, pd: u32, access: Access, iova: u64, bytes: Vec<u8>) {
        let plain = Plain { pd: PdId(pd), access, bound_to: None, iova, bytes };
        self.regions.borrow_mut().insert(key, plain);
    }

    /// Binds a key to one queue pair.
    ///
    /// # Panics
    /// The key names nothing.
    pub fn bind(&self, key: u32, qpn: Qpn) {
        self.regions.borrow_mut().get_mut(&key).expect("the key was added").bound_to = Some(qpn);
    }

    /// What a region holds.
    ///
    /// # Panics
    /// The key names nothing.
    pub fn bytes(&self, key: u32) -> Vec<u8> {
        self.regions.borrow()[&key].bytes.clone()
    }

    /// Looks at what a region holds; at nothing where the key names none.
    pub fn look<T>(&self, key: u32, f: impl FnOnce(&[u8]) -> T) -> T {
        let regions = self.regions.borrow();
        f(regions.get(&key).map_or(&[], |region| &region.bytes))
    }

    /// How many keys are bound to a queue pair.
    pub fn bound(&self) -> usize {
        self.regions.borrow().values().filter(|region| region.bound_to.is_some()).count()
    }

    /// Forgets a key.
    pub fn remove(&self, key: u32) {
        self.regions.borrow_mut().remove(&key);
    }

    fn may_invalidate(&self, scope: Scope, rkey: RKey) -> Result<(), AccessError> {
        let regions = self.regions.borrow();
        let region = regions.get(&rkey.0).ok_or(AccessError::InvalidKey)?;
        if region.pd != scope.pd || region.bound_to != Some(scope.qpn) {
            return Err(AccessError::WrongDomain);
        }
        if !region.access.contains(Access::REMOTE_INVALIDATE) {
            return Err(AccessError::Rights);
        }
        Ok(())
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
        let mut regions = self.regions.borrow_mut();
        if len == 0 {
            return Ok(f(&mut []));
        }
        let region = regions.get_mut(&key).ok_or(AccessError::InvalidKey)?;
        if region.pd != scope.pd || region.bound_to.is_some_and(|qpn| qpn != scope.qpn) {
            return Err(AccessError::WrongDomain);
        }
        if !region.access.contains(access) {
            return Err(AccessError::Rights);
        }
        let end = addr.checked_add(len).ok_or(AccessError::Wrap)?;
        let top = region.iova + region.bytes.len() as u64;
        if addr < region.iova || end > top {
            return Err(AccessError::Bounds);
        }
        let from = (addr - region.iova) as usize;
        Ok(f(&mut region.bytes[from..from + len as usize]))
    }
}

impl Memory for PlainMemory {
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
        self.with(rkey.0, scope, addr, 8, Access::REMOTE_ATOMIC, |b| {
            if !addr.is_multiple_of(8) {
                return Err(AccessError::Alignment);
            }
            let old = u64::from_ne_bytes((&*b).try_into().expect("8 octets"));
            b.copy_from_slice(&op.apply(old).to_ne_bytes());
            Ok(old)
        })?
    }

    fn invalidate(&self, scope: Scope, rkey: RKey) -> Result<(), AccessError> {
        self.may_invalidate(scope, rkey)?;
        self.remove(rkey.0);
        Ok(())
    }
}
