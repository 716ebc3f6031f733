//! Variant CRC: CRC-16 over a whole native packet.

/// The two octets as they go out, for a packet from LRH to ICRC.
pub fn vcrc(_octets: &[u8]) -> [u8; 2] {
    unimplemented!()
}
