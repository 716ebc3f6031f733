//! Native InfiniBand links: local route header and variant CRC.

pub mod lrh;
pub mod vcrc;
