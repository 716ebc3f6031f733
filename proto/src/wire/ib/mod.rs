//! Native InfiniBand links: local route header and variant CRC.
//!
//! ```text
//!  +-----+-------+--------------------------+------+------+
//!  | LRH | (GRH) | BTH ... payload ... pad  | ICRC | VCRC |
//!  +-----+-------+--------------------------+------+------+
//!     8     40                                 4      2     octets
//! ```

pub mod lrh;
pub mod vcrc;
