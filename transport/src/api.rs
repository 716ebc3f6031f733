#![allow(unused, missing_docs, clippy::todo, missing_debug_implementations)]
use crate::*;
use std::{io, net::SocketAddr, ops::Range, sync::atomic::Ordering, time::Duration};
use userdma_proto::mem::AccessError;

/// One address (and transport) of this host. Cheap to clone.
#[derive(Clone)]
pub struct Device(());
/// Everything that may be set about a device before it opens.
pub struct DeviceOptions {
    /// private
    _p: (),
}

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// what, where, what to do
    #[error("{0}")]
    BadAddress(String),
    #[error("{context}: {source}")]
    Io {
        context: String,
        #[source]
        source: io::Error,
    },
    #[error("no connection to {peer}: {source}")]
    Startup {
        peer: SocketAddr,
        #[source]
        source: StartupError,
    },
    #[error("{0}")]
    Post(#[from] PostError),
    #[error("{0}")]
    Access(#[from] AccessError),
    #[error("{0}")]
    Unsupported(&'static str),
    /// an awaited operation failed
    #[error("{opcode} ended with: {status}")]
    Wc { status: WcStatus, opcode: WcOpcode },
    #[error("the completion queue overflowed: {0} entries")]
    CqOverflow(usize),
    #[error("limit reached: {0}")]
    Limit(&'static str),
}
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Device {
    /// `tcp://10.0.0.1`, `tcp://0.0.0.0:7174`, `tcp://[::1]:0`, `tcp://host`, fe80::1%eth0.
    /// (`udp://` is the RoCEv2 device: Error::Unsupported until it exists.) Needs a tokio runtime (current handle).
    /// Opening makes no socket yet: the address is the local address of `connect` and `listen`.
    pub fn open(uri: &str) -> Result<Self> {
        todo!()
    }
    pub fn alloc_pd(&self) -> Result<Pd> {
        todo!()
    }
    /// depth: completions it holds; more is an overflow, which is reported and loses nothing of what is in it
    pub fn create_cq(&self, depth: usize) -> Result<Cq> {
        todo!()
    }
    /// resolve, TCP connect, MPA; one retry with MPA revision 1 where the peer closed without an octet
    pub async fn connect(
        &self,
        peer: &str,
        pd: &Pd,
        init: QpInit,
        private_data: &[u8],
    ) -> Result<Qp> {
        todo!()
    }
    /// the same with a QP made before by Pd::create_qp (so that receives are posted before the connection)
    pub async fn connect_qp(&self, peer: &str, qp: &Qp, private_data: &[u8]) -> Result<()> {
        todo!()
    }
    /// port of the device's address is used where `port` is None; 0 = a free one
    pub async fn listen(&self, port: Option<u16>) -> Result<Listener> {
        todo!()
    }
}
pub struct Listener(());
impl Listener {
    pub fn local_addr(&self) -> SocketAddr {
        todo!()
    }
    /// The next connection request whose MPA request has arrived. Bad start-ups and strays are counted, not returned.
    /// Cancel safe.
    pub async fn accept(&self) -> Result<ConnRequest> {
        todo!()
    }
    /// MPA options used for what arrives (crc, markers, p2p ...).
    pub fn set_mpa(&self, mpa: MpaOptions) {
        todo!()
    }
}
pub struct ConnRequest(());
impl ConnRequest {
    pub fn peer_addr(&self) -> SocketAddr {
        todo!()
    }
    pub fn private_data(&self) -> &[u8] {
        todo!()
    }
    /// what the peer said (None: revision 1)
    pub fn ird(&self) -> Option<u16> {
        todo!()
    }
    pub fn ord(&self) -> Option<u16> {
        todo!()
    }
    pub fn revision(&self) -> u8 {
        todo!()
    }
    pub async fn accept(self, pd: &Pd, init: QpInit, private_data: &[u8]) -> Result<Qp> {
        todo!()
    }
    /// with a QP made before by Pd::create_qp
    pub async fn accept_qp(self, qp: &Qp, private_data: &[u8]) -> Result<()> {
        todo!()
    }
    pub async fn reject(self, private_data: &[u8]) -> Result<()> {
        todo!()
    }
}

/// Settings of a queue pair.
#[derive(Clone)]
pub struct QpInit {
    pub send_cq: Cq,
    pub recv_cq: Cq,
    pub max_send_wr: usize,
    pub max_recv_wr: usize,
    pub max_sge: usize,
    pub max_inline: usize,
    pub ird: u16,
    pub ord: u16,
    pub mpa: MpaOptions,
    pub startup_timeout: Duration,
    pub close_timeout: Duration,
}
impl QpInit {
    pub fn new(cq: &Cq) -> Self {
        todo!()
    }
}

/// Protection domain.
#[derive(Clone)]
pub struct Pd(());
impl Pd {
    pub fn register(&self, region: Region, access: Access) -> Result<Mr> {
        todo!()
    }
    /// # Safety: [ptr, ptr+len) stays mapped and is not referenced by Rust references until deregistered. iova = ptr.
    pub unsafe fn register_foreign(&self, ptr: *mut u8, len: usize, access: Access) -> Result<Mr> {
        todo!()
    }
    /// A queue pair in state Init: receives may be posted before it is connected or accepted.
    pub fn create_qp(&self, init: QpInit) -> Result<Qp> {
        todo!()
    }
}
/// Memory to register.
pub struct Region(());
impl Region {
    /// zeroed, page aligned
    pub fn alloc(len: usize) -> Result<Self> {
        todo!()
    }
    /// takes the buffer over
    pub fn from_vec(v: Vec<u8>) -> Self {
        todo!()
    }
}
/// A registered region. Cheap to clone; the last clone's drop deregisters.
#[derive(Clone)]
pub struct Mr(());
impl Mr {
    pub fn len(&self) -> usize {
        todo!()
    }
    pub fn lkey(&self) -> LKey {
        todo!()
    }
    pub fn rkey(&self) -> RKey {
        todo!()
    }
    /// address of its first octet in work requests (0 for owned regions, the pointer for foreign ones)
    pub fn addr(&self) -> u64 {
        todo!()
    }
    /// a piece for a work request; offsets from the start of the region. Panics if out of range
    pub fn slice(&self, range: Range<usize>) -> Sge {
        todo!()
    }
    /// the place at `offset`, to be told to a peer
    pub fn remote(&self, offset: usize) -> RemoteAddr {
        todo!()
    }
    pub fn read_at(&self, offset: usize, out: &mut [u8]) -> Result<()> {
        todo!()
    }
    pub fn write_at(&self, offset: usize, data: &[u8]) -> Result<()> {
        todo!()
    }
    /// offset multiple of 8
    pub fn load_u64(&self, offset: usize, order: Ordering) -> u64 {
        todo!()
    }
    pub fn store_u64(&self, offset: usize, v: u64, order: Ordering) {
        todo!()
    }
    pub fn load_u8(&self, offset: usize, order: Ordering) -> u8 {
        todo!()
    }
    /// revoke: after it returns no octet of the region is touched. Every clone is dead then.
    pub fn deregister(&self) {
        todo!()
    }
    /// fresh keys for the same region (after an invalidate)
    pub fn rearm(&self) -> Result<()> {
        todo!()
    }
    /// whether its key is still valid
    pub fn is_valid(&self) -> bool {
        todo!()
    }
}

/// Completion queue. Cheap to clone.
#[derive(Clone)]
pub struct Cq(());
impl Cq {
    /// Takes what is there; drives the sockets of its queue pairs in this very thread where there is nothing (no hand-over
    /// to another thread). Returns how many were written to the front of `wcs`.
    pub fn poll(&self, wcs: &mut [Wc]) -> usize {
        todo!()
    }
    /// Waits for the next completion. Cancel safe: a completion is taken only when the future returns it.
    pub async fn next(&self) -> Result<Wc> {
        todo!()
    }
    /// Some(n) once it overflowed: n completions were dropped
    pub fn overflowed(&self) -> Option<u64> {
        todo!()
    }
}

/// Queue pair. Cheap to clone; the last drop aborts the connection.
#[derive(Clone)]
pub struct Qp(());
impl Qp {
    pub fn qpn(&self) -> Qpn {
        todo!()
    }
    pub fn state(&self) -> QpState {
        todo!()
    }
    pub fn peer_addr(&self) -> Option<SocketAddr> {
        todo!()
    }
    pub fn local_addr(&self) -> Option<SocketAddr> {
        todo!()
    }
    /// Private data of the peer's reply (initiator).
    pub fn private_data(&self) -> Vec<u8> {
        todo!()
    }
    /// What the start-up settled, once connected.
    pub fn established(&self) -> Option<userdma_proto::iwarp::Established> {
        todo!()
    }
    pub fn stats(&self) -> userdma_proto::iwarp::Stats {
        todo!()
    }
    pub fn post_send(&self, wr: SendWr) -> Result<(), PostError> {
        todo!()
    }
    /// All of them with one doorbell; Err((n, e)): the first n were posted, number n was refused
    pub fn post_send_batch(
        &self,
        wrs: impl IntoIterator<Item = SendWr>,
    ) -> Result<(), (usize, PostError)> {
        todo!()
    }
    pub fn post_recv(&self, wr: RecvWr) -> Result<(), PostError> {
        todo!()
    }
    pub fn post_recv_batch(
        &self,
        wrs: impl IntoIterator<Item = RecvWr>,
    ) -> Result<(), (usize, PostError)> {
        todo!()
    }
    /// graceful: what is posted is finished, then both sides close; returns the reason it ended
    pub async fn disconnect(&self) -> CloseReason {
        todo!()
    }
    /// error state at once
    pub fn abort(&self) {
        todo!()
    }
    /// Waits until the connection has ended, whoever ended it.
    pub async fn closed(&self) -> CloseReason {
        todo!()
    }
    // the async face; an awaited operation's completion goes to its future and to no CQ. Dropping the future does not
    // undo the operation.
    pub async fn send(&self, sge: Sge) -> Result<()> {
        todo!()
    }
    pub async fn recv(&self, sge: Sge) -> Result<Wc> {
        todo!()
    }
    pub async fn write(&self, sge: Sge, remote: RemoteAddr) -> Result<()> {
        todo!()
    }
    pub async fn read(&self, sge: Sge, remote: RemoteAddr) -> Result<()> {
        todo!()
    }
    /// old value
    pub async fn fetch_add(&self, remote: RemoteAddr, add: u64) -> Result<u64> {
        todo!()
    }
    pub async fn cmp_swap(&self, remote: RemoteAddr, compare: u64, swap: u64) -> Result<u64> {
        todo!()
    }
    /// any send work request, awaited
    pub async fn submit(&self, wr: SendWr) -> Result<Wc> {
        todo!()
    }
    /// a lent buffer: moved in, given back
    pub async fn send_lent(&self, buf: Vec<u8>) -> (Vec<u8>, Result<()>) {
        todo!()
    }
    /// receives into `buf` (its length), gives it back truncated to what came
    pub async fn recv_lent(&self, buf: Vec<u8>) -> (Vec<u8>, Result<Wc>) {
        todo!()
    }
}
