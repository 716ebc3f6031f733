//! RDMA verbs in user space (skeleton of the API).
pub mod api;
pub mod mr;
pub use api::*;
pub use mr::{Mr, Region, RegisterError};
pub use userdma_proto as proto;
pub use userdma_proto::verbs::{
    Access, Imm, Payload, PostError, QpState, RecvWr, RemoteAddr, SendFlags, SendOp, SendWr, Sge, WcOpcode, WcStatus,
    Wc,
};
pub use userdma_proto::iwarp::{MpaOptions, RtrKinds, CloseReason, StartupError};
pub use userdma_proto::wire::ids::{LKey, Qpn, RKey};
