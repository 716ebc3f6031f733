//! RoCEv2 without I/O.

pub mod congestion;
