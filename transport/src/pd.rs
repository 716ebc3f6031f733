//! Protection domains.

use std::{fmt, sync::Arc};

use userdma_proto::{mem::PdId, verbs::Access};

use crate::{
    device::DeviceShared,
    error::Result,
    mr::{Mr, Region, Table},
    qp::{Qp, QpInit},
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

    /// A queue pair in the state [`Init`](crate::QpState::Init): receives may be posted before it
    /// is connected or accepted.
    ///
    /// # Errors
    /// [`Error::Limit`](crate::Error::Limit) where the device has as many as it may have. Settings
    /// that no connection can have are told when it is connected.
    pub fn create_qp(&self, init: QpInit) -> Result<Qp> {
        Qp::new(self.0.device.clone(), self.clone(), init)
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
