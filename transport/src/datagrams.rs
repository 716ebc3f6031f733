//! UD services: which queue pair serves a port, asked for and told by the connection manager (SIDR).

use std::{fmt, net::SocketAddr, sync::Arc};

use userdma_proto::{
    verbs::{QpType, UdDest},
    wire::ids::QKey,
};

use crate::{
    device::Device,
    engine::datagram::Engine,
    error::{Error, Result},
    net::{DEFAULT_PORT, HostPort},
    qp::Qp,
};

/// A UD service of a peer, as it told: send to [`UdService::dest`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UdService {
    /// Its queue pair, its Q_Key, and the UDP socket in front of it.
    pub dest: UdDest,
    /// What its program says: 136 octets, zeros behind what was said.
    pub private_data: Vec<u8>,
}

/// A UD service of ours. Dropped, peers that ask are told that there is none.
pub struct UdListener {
    addr: SocketAddr,
    engine: Arc<Engine>,
}

impl UdListener {
    /// Our address, and the rdma_cm port that was chosen.
    pub fn local_addr(&self) -> SocketAddr {
        self.addr
    }
}

impl Drop for UdListener {
    fn drop(&mut self) {
        self.engine.unlisten_datagrams(self.addr.port());
    }
}

impl fmt::Debug for UdListener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "UdListener({})", self.addr)
    }
}

/// The Q_Key of rdma_cm's UD services (`RDMA_UDP_QKEY`).
pub const RDMA_UDP_QKEY: QKey = QKey(0x0123_4567);

impl Device {
    /// Tells every peer that asks for the rdma_cm port `port` (7174 for `None`, 0 for a free one)
    /// of datagrams that `qp`, of type UD, serves it, with its Q_Key `qkey` and `private_data`, 136
    /// octets at most. Nobody is asked whether they may know.
    ///
    /// # Errors
    /// [`Error::Unsupported`] over TCP and for a queue pair of another type, [`Error::State`] for
    /// one of another device, [`Error::Port`] where the port has a service or the private data is
    /// too long.
    pub fn listen_datagrams(
        &self,
        port: Option<u16>,
        qp: &Qp,
        qkey: QKey,
        private_data: &[u8],
    ) -> Result<UdListener> {
        let engine = self.engine()?.clone();
        if qp.init().kind != QpType::Ud {
            return Err(Error::Unsupported("only a queue pair of type UD serves datagrams"));
        }
        engine.may_begin(qp.shared())?;
        let mut addr = engine.local();
        let port = port.unwrap_or(DEFAULT_PORT);
        let random = self.random();
        addr.set_port(engine.listen_datagrams(port, qp.qpn(), qkey, private_data, random)?);
        Ok(UdListener { addr, engine })
    }

    /// Asks the peer at `peer` (`HOST[:PORT]`, the rdma_cm port of datagrams, 7174 where none is
    /// given) which queue pair serves it. `private_data`, 180 octets at most, is shown to it.
    /// Dropping the future gives up.
    ///
    /// # Errors
    /// [`Error::NoService`] where it says that there is none, [`Error::NoAnswer`] where it says
    /// nothing within [`DeviceOptions::startup_timeout`](crate::DeviceOptions::startup_timeout),
    /// [`Error::BadAddress`], [`Error::Port`] for private data that is too long,
    /// [`Error::Unsupported`] over TCP.
    pub async fn resolve(&self, peer: &str, private_data: &[u8]) -> Result<UdService> {
        let engine = self.engine()?;
        let mut last = Error::State("the peer's name has no address");
        for peer in self.look_up(HostPort::parse(peer)?).await? {
            match engine.resolve(peer, private_data, self.patience()).await {
                Ok(service) => return Ok(service),
                Err(e @ Error::NoService { .. }) => return Err(e),
                Err(e) => last = e,
            }
        }
        Err(last)
    }
}
