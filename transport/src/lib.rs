//! RDMA verbs in user space, over ordinary sockets: no kernel module, no RDMA NIC, no root.
//!
//! A [`Device`] is an address of this host; `tcp://` speaks iWARP (RFC 5040, 5041, 5044, 6581,
//! 7306), `udp://` RoCEv2 (IBTA volume 1, annex A17). On it stand the objects of verbs: a
//! protection domain ([`Pd`]) holds memory regions ([`Mr`]) and queue pairs ([`Qp`]), and work that
//! is done shows up in completion queues ([`Cq`]). Queue pairs may share their receives ([`Srq`]).
//!
//! ```
//! use userdma::{Access, Device, QpInit, RecvWr, Region, SendWr};
//!
//! # #[tokio::main(flavor = "current_thread")]
//! # async fn main() -> userdma::Result<()> {
//! let device = Device::open("tcp://127.0.0.1:0")?;
//! let (pd, cq) = (device.alloc_pd()?, device.create_cq(64)?);
//!
//! // One side listens; here both are one program.
//! let listener = device.listen(None).await?;
//! let peer = listener.local_addr().to_string();
//! let accept = async { listener.accept().await?.accept(&pd, QpInit::new(&cq), b"welcome").await };
//! let connect = device.connect(&peer, &pd, QpInit::new(&cq), b"hello");
//! let (server, client) = tokio::try_join!(accept, connect)?;
//! assert_eq!(client.private_data(), b"welcome");
//!
//! // Memory is registered, and never borrowed: the peer may store into it at any time.
//! let source = pd.register(Region::alloc(4096)?, Access::empty())?;
//! let target = pd.register(Region::alloc(4096)?, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
//! source.write_at(0, b"written by the peer, ")?;
//! source.write_at(100, b"told by a message")?;
//!
//! // The verbs: post, and look for completions.
//! server.post_recv(RecvWr::new(1, [target.slice(21..100)]))?;
//! client.post_send(SendWr::write(2, [source.slice(0..21)], target.remote(0)).unsignaled())?;
//! client.post_send(SendWr::send(3, [source.slice(100..117)]))?;
//! for _ in 0..2 {
//!     let wc = cq.next().await?;
//!     assert!(wc.status.is_ok() && [1, 3].contains(&wc.id));
//! }
//! let mut told = [0; 38];
//! target.read_at(0, &mut told)?;
//! assert_eq!(&told, b"written by the peer, told by a message");
//!
//! // The same, awaited: the completion goes to the future and to no queue.
//! client.write(source.slice(0..21), target.remote(512)).await?;
//! let (sent, received) = tokio::join!(
//!     client.send_lent(b"a buffer that is moved in and given back".to_vec()),
//!     server.recv_lent(vec![0; 64]),
//! );
//! sent.1?;
//! received.1?;
//! assert_eq!(received.0, b"a buffer that is moved in and given back");
//!
//! client.disconnect().await;
//! # Ok(())
//! # }
//! ```
//!
//! # Two ways to wait
//! [`Cq::next`] and the awaited operations sleep, after a short time of polling
//! ([`DeviceOptions::spin`]). [`Cq::poll`] never sleeps and drives the sockets in the caller's own
//! thread: this is where low latency comes from, and it needs no runtime to run meanwhile. One-sided
//! work of a peer is served in any case, by a task on the tokio runtime in which the device was
//! opened. Where that runtime ends first, the connections end with it.
//!
//! # What goes wrong, and where it is told
//! A call that asks for something wrong returns an error, and nothing has changed. Work that fails,
//! or that the peer refuses, completes with a [`WcStatus`]; the queue pair is in [`QpState::Err`]
//! then, everything outstanding completes as flushed, and [`Qp::closed`] tells why. A completion
//! queue that is too short loses nothing, but ends the queue pairs that use it ([`Cq`]). What
//! strangers do to a listener is counted in [`DeviceStats`].
#![deny(unsafe_code)]

mod capture;
mod cq;
mod datagrams;
mod device;
mod engine;
mod error;
mod listener;
pub mod mr;
mod net;
mod pd;
mod qp;
mod srq;
mod users;

pub use cq::Cq;
pub use datagrams::{RDMA_UDP_QKEY, UdListener, UdService};
pub use device::{Device, DeviceOptions, DeviceStats, RoceOptions};
pub use engine::datagram::RoceStats;
pub use error::{CloseReason, Error, Result};
pub use listener::{ConnRequest, Listener};
pub use mr::{Mr, Region, RegisterError};
pub use net::udp;
pub use pd::Pd;
pub use qp::{Qp, QpInit};
pub use srq::Srq;
pub use userdma_proto as proto;
pub use userdma_proto::{
    iwarp::{Established, MpaOptions, RtrKinds, StartupError, Stats},
    mem::{AccessError, AtomicOp},
    roce::{PathMtu, QpAttr, port::IcrcPolicy},
    sim::Impairments,
    verbs::{
        Access, Imm, Payload, PostError, QpState, QpType, RecvWr, RemoteAddr, SendFlags, SendOp,
        SendWr, Sge, UdDest, Wc, WcOpcode, WcStatus,
    },
    wire::ids::{LKey, Qpn, RKey},
};
