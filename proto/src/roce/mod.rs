//! RoCEv2: queue pairs and the connection manager, without I/O.

pub mod cm;
