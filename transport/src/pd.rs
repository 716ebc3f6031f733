//! Protection domains.

use std::{fmt, sync::Arc};

use userdma_proto::{mem::PdId, verbs::Access};

use crate::{
    device::DeviceShared,
    error::Result,
    mr::{Mr, Region, Table},
    qp::{Qp, QpInit},
    srq::Srq,
};

/// Protection domain: the regions and queue pairs that may be used together. Cheap to clone.
#[derive(Clone)]
pub struct Pd(Arc<PdShared>);

struct PdShared {
    id: PdId,
    device: Arc<DeviceShared>,
}

impl Pd {
    pub(crate) fn new(device: Arc<DeviceShared>) -> Self {
        let id = device.table.alloc_pd();
        Self(Arc::new(PdShared { id, device }))
    }

    /// Its name in [`Pd::table`].
    pub fn id(&self) -> PdId {
        self.0.id
    }

    /// All regions of the device: for what stands below these objects, such as a C ABI.
    pub fn table(&self) -> &Arc<Table> {
        &self.0.device.table
    }

    /// Registers memory for the work requests of this domain's queue pairs and, as far as `access`
    /// allows, for their peers.
    ///
    /// # Errors
    /// [`Error::Register`](crate::Error::Register): an empty region, or too many regions.
    pub fn register(&self, region: Region, access: Access) -> Result<Mr> {
        Ok(self.table().register(self.0.id, region, access)?)
    }

    /// A shared receive queue of at most `max_wr` receives, each of at most `max_sge` pieces, for
    /// queue pairs of this domain.
    ///
    /// # Errors
    /// [`Error::Limit`](crate::Error::Limit) for a length of 0 or above 4,194,304.
    pub fn create_srq(&self, max_wr: usize, max_sge: usize) -> Result<Srq> {
        Srq::new(self.clone(), max_wr, max_sge)
    }

    /// A queue pair in the state [`Init`](crate::QpState::Init): receives may be posted before it
    /// is connected or accepted.
    ///
    /// # Errors
    /// [`Error::Limit`](crate::Error::Limit) where the device has as many as it may have;
    /// [`Error::CqOverflow`](crate::Error::CqOverflow) where one of its completion queues has
    /// overflowed; [`Error::State`](crate::Error::State) where its shared receive queue is destroyed
    /// or of another domain. Settings that no connection can have are told when it is connected.
    pub fn create_qp(&self, init: QpInit) -> Result<Qp> {
        Qp::new(self.0.device.clone(), self.clone(), init)
    }

    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Drop for PdShared {
    fn drop(&mut self) {
        self.device.table.close_pd(self.id);
    }
}

impl fmt::Debug for Pd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Pd").field(&self.0.id.0).finish()
    }
}
