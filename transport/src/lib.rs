//! RDMA verbs in user space (skeleton of the API).
pub mod api;
pub use api::*;
pub use userdma_proto as proto;
pub use userdma_proto::iwarp::{CloseReason, MpaOptions, RtrKinds, StartupError};
pub use userdma_proto::verbs::{
    Access, Imm, Payload, PostError, QpState, RecvWr, RemoteAddr, SendFlags, SendOp, SendWr, Sge,
    Wc, WcOpcode, WcStatus,
};
pub use userdma_proto::wire::ids::{LKey, Qpn, RKey};
