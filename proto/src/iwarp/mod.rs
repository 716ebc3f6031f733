//! One iWARP connection without I/O: MPA start-up, DDP queues, RDMAP operations.
//!
//! A driver owns the TCP socket and both buffers. After any input it drains the outputs:
//!
//! ```text
//! input:   handle_stream(octets of the socket)   handle_eof / handle_reset   handle_timeout
//!          post_send / post_recv / accept / reject / close / abort
//! output:  while poll_transmit(...) { write the parts, handle_written(n) }
//!          poll_shutdown    what to do with the socket, once everything is written
//!          poll_completion  to the completion queues
//!          poll_event       to the program
//!          poll_timeout     when handle_timeout wants to be called
//! ```
//!
//! Two connections and no socket at all:
//!
//! ```
//! use userdma_proto::{
//!     iwarp::{Config, Connection, Event, Transmit},
//!     mem::{NoMemory, PdId},
//!     time::Instant,
//!     verbs::{Imm, RecvWr, SendOp, SendWr},
//!     wire::ids::Qpn,
//! };
//!
//! /// Moves what `from` has to say to `to`.
//! fn carry(now: Instant, from: &mut Connection, to: &mut Connection) {
//!     let (mut out, mut stream) = (Transmit::default(), Vec::new());
//!     while from.poll_transmit(now, &NoMemory, 65_536, &mut out) {
//!         out.copy_to(&NoMemory, from.config().scope, &mut stream).unwrap();
//!         from.handle_written(now, out.len());
//!         out.clear();
//!     }
//!     assert_eq!(to.handle_stream(now, &stream, &NoMemory), stream.len());
//! }
//!
//! let now = Instant::ZERO;
//! let settings = |n| Config::new(PdId(0), Qpn(n), u64::from(n));
//! let mut client = Connection::initiator(settings(1), b"hello", now).unwrap();
//! let mut server = Connection::responder(settings(2), now);
//!
//! carry(now, &mut client, &mut server);
//! let Some(Event::Request(request)) = server.poll_event() else { panic!("no request") };
//! assert_eq!(request.private_data, b"hello");
//! server.post_recv(RecvWr::new(7, []), 0).unwrap();
//! server.accept(b"welcome", now).unwrap();
//! carry(now, &mut server, &mut client);
//!
//! client.post_send(SendWr::new(1, SendOp::Imm(Imm(42)), []), 0).unwrap();
//! carry(now, &mut client, &mut server);
//! let received = server.poll_completion().unwrap().wc;
//! assert_eq!((received.id, received.imm), (7, Some(Imm(42))));
//! assert_eq!(client.poll_completion().unwrap().wc.id, 1);
//! ```

mod connection;
mod receive;
mod send;
mod startup;
mod transmit;
mod types;

pub use connection::Connection;
pub use transmit::{Part, Transmit};
pub use types::{
    CloseReason, Completion, Config, Established, Event, MpaOptions, Request, Role, RtrKinds,
    Shutdown, StartupError, Stats,
};
