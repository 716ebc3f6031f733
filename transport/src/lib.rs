//! RDMA verbs in user space.
#![deny(unsafe_code)]

mod cq;
mod device;
mod engine;
mod error;
mod listener;
pub mod mr;
mod net;
mod pd;
mod qp;

pub use cq::Cq;
pub use device::{Device, DeviceOptions, DeviceStats};
pub use error::{Error, Result};
pub use listener::{ConnRequest, Listener};
pub use mr::{Mr, Region, RegisterError};
pub use pd::Pd;
pub use qp::{Qp, QpInit};
pub use userdma_proto as proto;
pub use userdma_proto::{
    iwarp::{CloseReason, Established, MpaOptions, RtrKinds, StartupError, Stats},
    mem::{AccessError, AtomicOp},
    verbs::{
        Access, Imm, Payload, PostError, QpState, RecvWr, RemoteAddr, SendFlags, SendOp, SendWr,
        Sge, Wc, WcOpcode, WcStatus,
    },
    wire::ids::{LKey, Qpn, RKey},
};
