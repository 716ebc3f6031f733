//! RDMA wire formats and protocol state machines: bytes in, bytes out.
//!
//! The layers, bottom-up:
//!
//! * [`wire`]: one header, one file. Parsing borrows, never panics, and says in its error which
//!   layer failed, at which offset, how much was needed and how much was there.
//! * [`verbs`]: plain data that an RDMA program and both transports speak: work requests,
//!   completions, states, rights.
//! * [`mem`]: the [`mem::Memory`] trait, the only door from a state machine to registered bytes.
//! * [`srq`]: the receives of a queue pair, its own or shared by several.
//! * [`iwarp`]: MPA start-up, DDP queues and RDMAP operations of one iWARP connection
//!   (RFC 5044, 5041, 5040, 6581, 7306).
//! * [`roce`]: RoCEv2 queue pairs, RC, UC and UD (IBTA vol. 1, chapter 9; annex A17), the
//!   connection manager ([`roce::cm`]), congestion control ([`roce::congestion`]), and everything
//!   behind one UDP socket ([`roce::port`]).
//! * `dissect` (feature of that name): captures, their frames, and what RDMA they carry.
//! * `sim` (feature of that name): a network with faults, by a seed, in virtual time.
//!
//! Nothing here opens a socket, reads a clock, spawns, locks or draws a random number: time,
//! bytes, seeds and memory are arguments. The crate builds without `std` (it needs `alloc`).
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;
#[cfg(any(test, feature = "dissect"))]
extern crate std;

#[cfg(feature = "dissect")]
pub mod dissect;
pub mod iwarp;
pub mod mem;
pub mod roce;
#[cfg(feature = "sim")]
pub mod sim;
mod splitmix;
pub mod srq;
pub mod time;
pub mod verbs;
pub mod wire;
