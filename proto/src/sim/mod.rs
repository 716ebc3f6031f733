//! A network with faults, by a seed, in virtual time.
//!
//! * [`Impairments`]: what a network does to packets; has a text form (`loss=1%,delay=2ms,seed=7`).
//! * [`Impairer`]: does it to the packets of one direction of one link. Time is an argument, so it
//!   serves as well between a real socket and what reads from it.
//! * [`Network`]: hosts by their address, links between them, a packet a time; what crosses it can be
//!   recorded as a capture.
//! * [`EventQueue`]: what happens next, in virtual time.
//! * [`PlainMemory`]: registered memory made of vectors.
//! * [`roce`]: two machines with RoCEv2 queue pairs on such a network, judged by a model.
//!
//! The same seed and the same calls give the same result on every machine: no floating point, no
//! hash, no clock. Each fault draws from a generator of its own, so that the packets that are lost
//! stay the same when corruption is switched on.
//!
//! ```
//! use core::time::Duration;
//! use userdma_proto::{sim::{Network, Packet}, time::Instant};
//!
//! let mut network: Network = Network::new("loss=20%,delay=2ms,seed=7".parse()?);
//! let (a, b) = ("10.0.0.1:4791".parse()?, "10.0.0.2:4791".parse()?);
//! let start = Instant::ZERO;
//! for i in 0..100 {
//!     network.send(start, a, b, Packet::new(vec![i]).with_key(i.into()));
//! }
//! let later = start + Duration::from_millis(2);
//! assert_eq!(network.poll_timeout(), Some(later));
//! let arrived: Vec<u8> =
//!     std::iter::from_fn(|| network.poll(later)).map(|d| d.packet.octets[0]).collect();
//! assert_eq!(arrived.len() as u64, 100 - network.counters().lost);
//! for i in 0..100 {
//!     assert_eq!(arrived.contains(&i), network.drops_of(i.into()) == 0);
//! }
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod dice;
mod impairer;
mod impairments;
mod memory;
mod network;
mod queue;
pub mod roce;

pub use impairer::{Counters, Fate, Impairer, Loss, Packet};
pub use impairments::{
    Burst, Corruption, Impairments, Marking, ParseError, Probability, Problem, Rate, Reordering,
};
pub use memory::PlainMemory;
pub use network::{Delivery, LinkId, Network};
pub use queue::EventQueue;
