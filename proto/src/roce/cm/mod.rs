//! The connection manager of one port, without I/O: all its connections, over the MADs of QP 1
//! (IBTA vol. 1, 12.9).
//!
//! A port hands in the MADs that came for QP 1, with the address they came from, and sends what
//! [`Cm::poll_mad`] gives out. After any input it drains the outputs:
//!
//! ```text
//! input:   handle_mad   handle_timeout   handle_established (a packet came for that queue pair)
//!          connect / resolve   listen / listen_datagrams / unlisten
//!          accept / reject   disconnect
//! output:  while let Some(destination) = poll_mad(&mut mad) { send it to QP 1 there }
//!          poll_event     to the program and its queue pairs
//!          poll_timeout   when handle_timeout wants to be called
//! ```
//!
//! Where an answer goes: to the address that the message came from, and to the UDP port that the
//! peer's [`Token`] tells, or else the configured one; never to the source port.
//!
//! What strangers can do is bounded: connections, half-open ones (the oldest goes first), waiting
//! MADs and events. Requests that nobody listens for, and questions for UD services, keep no state.
//! IDs cannot be guessed, and a message for a connection counts only from its peer's address. Who
//! can forge that address, and knows or guesses the peer's queue pair (24 bits), can have the
//! connection closed as stale: that is the protocol's own rule (IBTA vol. 1, 12.9).
//!
//! Two managers and no network at all:
//!
//! ```
//! use userdma_proto::{
//!     roce::cm::{Accept, Cm, Config, Connect, Event, LocalQp},
//!     time::Instant,
//!     wire::{ids::{Psn, Qpn}, mad::cm::PortSpace},
//! };
//!
//! /// Moves what `from` has to say to `to`.
//! fn carry(now: Instant, from: &mut Cm, to: &mut Cm) {
//!     let mut mad = [0; 256];
//!     while from.poll_mad(&mut mad).is_some() {
//!         to.handle_mad(now, "127.0.0.1:55410".parse().unwrap(), &mad);
//!     }
//! }
//!
//! let (now, service) = (Instant::ZERO, PortSpace::TCP.service_id(7174));
//! let (mut client, mut server) = (Cm::new(Config::new(1)), Cm::new(Config::new(2)));
//! server.listen(service, 16).unwrap();
//!
//! let ip = "127.0.0.1".parse().unwrap();
//! let qp = LocalQp::new(Qpn(0x11), Psn::new(100));
//! let hello = Connect {
//!     private_data: b"hello",
//!     ..Connect::new("127.0.0.1:4791".parse().unwrap(), ip, service, qp)
//! };
//! client.connect(now, &hello).unwrap();
//! carry(now, &mut client, &mut server);
//!
//! let Some(Event::Request(request)) = server.poll_event() else { panic!("no request") };
//! assert!(request.private_data.starts_with(b"hello"));
//! let answer = Accept::new(LocalQp::new(Qpn(0x22), Psn::new(200)));
//! server.accept(now, request.conn, &answer).unwrap();
//! carry(now, &mut server, &mut client);
//!
//! let Some(Event::Established(ready)) = client.poll_event() else { panic!("no reply") };
//! assert_eq!((ready.remote_qpn, ready.send_psn), (Qpn(0x22), Psn::new(200)));
//! assert_eq!((ready.local_qpn, ready.expect_psn), (Qpn(0x11), Psn::new(100)));
//! carry(now, &mut client, &mut server);
//! assert!(matches!(server.poll_event(), Some(Event::Established(_))));
//! ```

mod connection;
mod ids;
mod manager;
mod receive;
mod token;
mod types;

pub use manager::Cm;
pub use token::Token;
pub use types::{
    Accept, Awaited, CmError, Config, ConnId, Connect, Datagrams, Ended, Established, Event,
    LocalQp, Reject, Rejected, Request, Resolve, Stats, Transport,
};
