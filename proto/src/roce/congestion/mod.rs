//! How fast, and how much at a time.
//!
//! * [`ReactionPoint`] and [`NotificationPoint`]: DCQCN, the congestion control of RoCEv2 (Zhu et
//!   al., "Congestion Control for Large-Scale RDMA Deployments", SIGCOMM 2015, cited here as the
//!   paper; the packet is in annex A17.9 of IBTA vol. 1). A switch marks packets, the receiver
//!   answers with congestion notification packets (CNP), the sender slows down.
//! * [`Window`]: how many octets may be on their way to one receive buffer. It is the socket that
//!   has the buffer, so all queue pairs whose packets end there share one window.
//!
//! ```text
//!   requester                     switch                       responder
//!   Window::take, may_send ──data, ECT──> queue long: CE ──> NotificationPoint::on_marked
//!   ReactionPoint::on_cnp <──────────── CNP ───────────────  at most one in 50 µs
//! ```
//!
//! The three know neither sockets nor queue pairs. All of it is integers: the same events give the
//! same rates on every machine.

mod notification;
mod reaction;
mod window;

pub use notification::NotificationPoint;
pub use reaction::{Dcqcn, DcqcnError, Phase, ReactionPoint};
pub use window::{Allowance, Room, Window};
