//! The token by which two userdma peers know each other: the last 12 octets of the private data of
//! REQ, SIDR_REQ and REP.
//!
//! ```text
//!   0                   1                   2                   3
//!   0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  |      'U'      |      'D'      |      'm'      |      '1'      |   0
//!  |            UDP port           |           |O| |   Reserved    |   4
//!  |                    Receive window, in octets                  |   8
//! ```
//!
//! O (bit 0 of its octet): packets out of order are accepted. A REP has one only as an answer to
//! that of a REQ. Where the program's data leaves no room there is none, and each side is a
//! stranger to the other.

/// What a userdma peer says of itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Token {
    /// The sender's own UDP port, not 0: where its packets and its MADs go.
    pub udp_port: u16,
    /// The sender takes packets of an RC queue pair that come out of order, and keeps them.
    pub out_of_order: bool,
    /// Octets that the sender's socket may be sent before they are acknowledged.
    pub window: u32,
}

impl Token {
    /// Octets on the wire.
    pub const LEN: usize = 12;
    const MAGIC: [u8; 4] = *b"UDm1";
    const OUT_OF_ORDER: u8 = 1;

    /// The 12 octets.
    pub fn to_bytes(self) -> [u8; Self::LEN] {
        let mut out = [0; Self::LEN];
        out[..4].copy_from_slice(&Self::MAGIC);
        out[4..6].copy_from_slice(&self.udp_port.to_be_bytes());
        out[6] = if self.out_of_order { Self::OUT_OF_ORDER } else { 0 };
        out[8..].copy_from_slice(&self.window.to_be_bytes());
        out
    }

    /// Reads 12 octets; `None` if they are no token. Flags and octets that are reserved are
    /// ignored.
    pub fn from_bytes(octets: [u8; Self::LEN]) -> Option<Self> {
        let [magic @ .., _, _, _, _, _, _, _, _] = octets;
        let [.., p, q, flags, _, a, b, c, d] = octets;
        let udp_port = u16::from_be_bytes([p, q]);
        (magic == Self::MAGIC && udp_port != 0).then_some(Self {
            udp_port,
            out_of_order: flags & Self::OUT_OF_ORDER != 0,
            window: u32::from_be_bytes([a, b, c, d]),
        })
    }

    /// Puts it behind the program's data, at the end of an area of `room` octets. False: there is
    /// no room, and nothing was done.
    pub(super) fn append(self, data: &mut alloc::vec::Vec<u8>, room: usize) -> bool {
        let fits = data.len() + Self::LEN <= room;
        if fits {
            data.resize(room - Self::LEN, 0);
            data.extend_from_slice(&self.to_bytes());
        }
        fits
    }

    /// Takes it off the end of an area of private data: the token, and what the program has.
    pub fn split(area: &[u8]) -> (Option<Self>, &[u8]) {
        let found = area
            .split_last_chunk()
            .and_then(|(data, &octets)| Some((Self::from_bytes(octets)?, data)));
        match found {
            Some((token, data)) => (Some(token), data),
            None => (None, area),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hex_literal::hex;
    use proptest::prelude::*;
    use std::vec::Vec;

    const OCTETS: [u8; 12] = hex!("55446d31 12b8 01 00 0003 3e00");

    fn token() -> Token {
        Token { udp_port: 4792, out_of_order: true, window: 0x3_3e00 }
    }

    #[test]
    fn octets_of_a_token() {
        assert_eq!(token().to_bytes(), OCTETS);
        assert_eq!(Token::from_bytes(OCTETS), Some(token()));
        // Reserved bits are ignored.
        assert_eq!(Token::from_bytes(hex!("55446d31 12b8 ff ff 00033e00")), Some(token()));
        assert_eq!(Token::from_bytes(hex!("55446d32 12b8 01 00 00033e00")), None);
        assert_eq!(Token::from_bytes(hex!("55446d31 0000 01 00 00033e00")), None);
    }

    #[test]
    fn at_the_end_of_the_area_and_nowhere_else() {
        let mut data = b"hello".to_vec();
        assert!(token().append(&mut data, 56));
        assert_eq!(data.len(), 56);
        assert_eq!(Token::split(&data), (Some(token()), &data[..44]));
        assert!(data.starts_with(b"hello\0"));
        // One octet further in it is the program's data.
        data.push(0);
        assert_eq!(Token::split(&data), (None, &data[..]));
        let mut full = [7; 45].to_vec();
        assert!(!token().append(&mut full, 56));
        assert_eq!(full, [7; 45]);
    }

    proptest! {
        #[test]
        fn there_and_back(port in 1u16.., order: bool, window: u32) {
            let token = Token { udp_port: port, out_of_order: order, window };
            prop_assert_eq!(Token::from_bytes(token.to_bytes()), Some(token));
        }

        #[test]
        fn any_bytes(area in prop::collection::vec(any::<u8>(), 0..40)) {
            let (token, data) = Token::split(&area);
            let rest: Vec<u8> = token.map_or(Vec::new(), |_| area[area.len() - 12..].to_vec());
            prop_assert_eq!([data, &rest].concat(), area);
        }
    }
}
