//! One RoCEv2 queue pair without I/O: RC, UC or UD (IBTA vol. 1, chapters 9 to 11; annex A17).
//!
//! A driver owns the UDP socket, looks up the queue pair of each packet and checks its ICRC. After
//! any input it drains the outputs:
//!
//! ```text
//! input:   handle_packet(a packet)   handle_timeout
//!          post_send / post_recv / modify / set_window
//! output:  while poll_transmit(...) { send the train }
//!          poll_completion  to the completion queues
//!          poll_event       to the program
//!          poll_timeout     when handle_timeout wants to be called
//! ```
//!
//! A train is a copy: it may be sent at once or later, and more than once.
//!
//! Two queue pairs and no socket at all:
//!
//! ```
//! use userdma_proto::{
//!     mem::{NoMemory, PdId},
//!     roce::{Config, PathMtu, Qp, QpAttr, Received, Train},
//!     time::Instant,
//!     verbs::{QpState, QpType, RecvWr, SendOp, SendWr},
//!     wire::{ids::{Psn, Qpn}, roce::Packet},
//! };
//!
//! /// Moves what `from` has to say to `to`.
//! fn carry(now: Instant, from: &mut Qp, to: &mut Qp) {
//!     let mut train = Train::default();
//!     while from.poll_transmit(now, &NoMemory, usize::MAX, &mut train) {
//!         for octets in train.octets().chunks(train.segment_len()) {
//!             let packet = &Packet::parse(octets).unwrap();
//!             let from = train.local().unwrap();
//!             let received = Received { packet, from, len: octets.len(), ecn: 0 };
//!             to.handle_packet(now, &received, &NoMemory);
//!         }
//!     }
//! }
//!
//! let now = Instant::ZERO;
//! let ends = ["192.0.2.1:4791", "192.0.2.2:4791"].map(|addr| addr.parse().unwrap());
//! let [mut a, mut b] = [0, 1].map(|i| {
//!     let mut qp = Qp::new(Config::new(QpType::Rc, PdId(0), Qpn(17 + i)));
//!     qp.modify(&QpAttr::to(QpState::Init)).unwrap();
//!     let attr = QpAttr {
//!         local: Some(ends[i as usize]),
//!         peer: Some(ends[1 - i as usize]),
//!         dest_qp: Some(Qpn(17 + 1 - i)),
//!         path_mtu: Some(PathMtu::Mtu1024),
//!         rq_psn: Some(Psn::new(100)),
//!         ..QpAttr::to(QpState::Rtr)
//!     };
//!     qp.modify(&attr).unwrap();
//!     let attr = QpAttr { sq_psn: Some(Psn::new(100)), ..QpAttr::to(QpState::Rts) };
//!     qp.modify(&attr).unwrap();
//!     qp
//! });
//!
//! b.post_recv(RecvWr::new(7, []), 0).unwrap();
//! a.post_send(SendWr::new(1, SendOp::SendImm(42), []), 0).unwrap();
//! carry(now, &mut a, &mut b);
//! let received = b.poll_completion().unwrap().wc;
//! assert_eq!((received.id, received.imm.map(|imm| imm.to_u32())), (7, Some(42)));
//! carry(now, &mut b, &mut a);
//! assert_eq!(a.poll_completion().unwrap().wc.id, 1);
//! ```
//!
//! What was lost is sent again from the first packet lost on (go-back-N), as any peer expects it.
//! Where both sides agreed on it ([`QpAttr::out_of_order`]), only what is missing is:
//!
//! ```text
//!   requester                           responder
//!   1 2 3 4 5 6 7      3 and 6 lost     1 2 . 4 5 . 7    keeps 4, 5 and 7
//!                 ◄─── NAK 3 ─────────
//!   3, asks       ──────────────────►   1 2 3 4 5 . 7
//!                 ◄─── NAK 6 ─────────                   which acknowledges 1 to 5
//!   6, asks       ──────────────────►   1 2 3 4 5 6 7
//!                 ◄─── ACK 7 ─────────
//! ```
//!
//! Where the NAK after that names the packet that follows, as many more are sent with it, twice as
//! many each time. A time-out sends the oldest packet again, a second one in a row everything, as does
//! a response that is lost, or a wait for a receive.

pub mod cm;
pub mod congestion;
mod load;
pub mod port;
mod qp;
mod requester;
mod responder;
mod transmit;
mod types;
mod unreliable;

pub use port::Port;
pub use qp::Qp;
pub use transmit::{MAX_TRAIN_OCTETS, Train};
pub use types::{
    Attributes, Completion, Config, Event, MAX_TRAIN, ModifyError, PathMtu, QpAttr, Reason,
    Received, Stats, Window,
};
