//! REJ: rejection (IBTA vol. 1, 12.6.7).
//!
//! ```text
//!   0                   1                   2                   3
//!   0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1 2 3 4 5 6 7 8 9 0 1
//!  +-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+-+
//!  |                     Local communication ID                    |   0
//!  |                     Remote communication ID                   |   4
//!  |MSG|  Reserved | Info length |R|             Reason            |   8
//!  +          Additional reject information (72 octets)            +  12
//!  +                     Private data (148 octets)                 +  84
//! ```

use core::fmt;

use nom::{
    Parser,
    number::complete::{be_u8, be_u16},
};

use super::{
    Message,
    codec::{Body, Read, bits, comm_ids, octets, up},
};

/// Rejection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Rej<'a> {
    /// The sender's name for the connection; 0 if it has none.
    pub local_comm_id: u32,
    /// The receiver's.
    pub remote_comm_id: u32,
    /// What is rejected: [`Self::REQ`], [`Self::REP`] or [`Self::NONE`]; 2 bits.
    pub message: u8,
    /// Octets of `ari` that are valid, 7 bits; see [`Self::additional_info`].
    pub info_len: u8,
    /// Why.
    pub reason: Reason,
    /// Additional reject information, [`Self::ARI_LEN`] octets; what it is depends on the reason.
    pub ari: &'a [u8],
    /// [`Self::PRIVATE_DATA_LEN`] octets.
    pub private_data: &'a [u8],
}

impl<'a> Rej<'a> {
    /// Octets of private data.
    pub const PRIVATE_DATA_LEN: usize = 148;
    /// Octets of additional reject information.
    pub const ARI_LEN: usize = 72;

    /// `message`: a REQ is rejected.
    pub const REQ: u8 = 0;
    /// `message`: a REP is rejected.
    pub const REP: u8 = 1;
    /// `message`: no message, or another one, such as when time ran out.
    pub const NONE: u8 = 2;

    /// The rejection of `message` by somebody who calls the connection `local_comm_id` (0: not at
    /// all). `None` for messages that are not rejected this way: REJ, MRA, DREP and APR, which
    /// are answers, and those of SIDR.
    pub fn answer(message: &Message<'_>, local_comm_id: u32, reason: Reason) -> Option<Self> {
        let kind = match message {
            Message::Req(_) => Self::REQ,
            Message::Rep(_) => Self::REP,
            Message::Rtu(_) | Message::Dreq(_) | Message::Lap(_) => Self::NONE,
            Message::Mra(_)
            | Message::Rej(_)
            | Message::Drep(_)
            | Message::Apr(_)
            | Message::SidrReq(_)
            | Message::SidrRep(_) => return None,
        };
        let remote_comm_id = message.local_comm_id()?;
        Some(Self { local_comm_id, remote_comm_id, message: kind, reason, ..Self::default() })
    }

    /// What is rejected, by name.
    pub const fn message_name(&self) -> Option<&'static str> {
        match self.message {
            Self::REQ => Some("REQ"),
            Self::REP => Some("REP"),
            Self::NONE => Some("none"),
            _ => None,
        }
    }

    /// The valid octets of `ari`: as many as `info_len` says, but not more than there are.
    pub fn additional_info(&self) -> &'a [u8] {
        &self.ari[..self.ari.len().min(self.info_len.into())]
    }

    pub(super) fn read(input: &'a [u8]) -> Read<'a, Self> {
        let (rest, (local_comm_id, remote_comm_id)) = comm_ids(input)?;
        let (rest, (message, info_len, reason)) = (be_u8, be_u8, be_u16).parse(rest)?;
        let (rest, ari) = octets(Self::ARI_LEN, rest)?;
        let (rest, private_data) = octets(Self::PRIVATE_DATA_LEN, rest)?;
        let rej = Self {
            local_comm_id,
            remote_comm_id,
            message: bits(message, 6, 2),
            info_len: bits(info_len, 1, 7),
            reason: Reason(reason),
            ari,
            private_data,
        };
        Ok((rest, rej))
    }

    pub(super) fn write(&self, out: &mut Body) {
        out.u32(self.local_comm_id);
        out.u32(self.remote_comm_id);
        out.u8(up(self.message, 6, 2));
        out.u8(up(self.info_len, 1, 7));
        out.u16(self.reason.0);
        out.octets(self.ari, Self::ARI_LEN);
        out.octets(self.private_data, Self::PRIVATE_DATA_LEN);
    }
}

/// Why a REJ (IBTA vol. 1, 12.6.7.2); open.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Reason(pub u16);

macro_rules! reasons {
    ($($(#[$doc:meta])* $name:ident = $code:literal, $text:literal;)*) => {
        impl Reason {
            $($(#[$doc])* pub const $name: Self = Self($code);)*

            /// The name in the field's words, such as `invalid service ID`; `None` for a code
            /// that is reserved.
            pub const fn name(self) -> Option<&'static str> {
                Some(match self {
                    $(Self::$name => $text,)*
                    _ => return None,
                })
            }
        }
    };
}

reasons! {
    /// The peer has no queue pair left.
    NO_QP = 1, "no QP available";
    /// The peer has no end-to-end context left (RD).
    NO_EEC = 2, "no EEC available";
    /// The peer lacks something else.
    NO_RESOURCES = 3, "no resources available";
    /// The peer waited for an answer in vain.
    TIMEOUT = 4, "timeout";
    /// The peer does not know this request.
    UNSUPPORTED = 5, "unsupported request";
    /// The communication ID means nothing to the peer.
    INVALID_COMM_ID = 6, "invalid communication ID";
    /// Local and remote communication ID, QPN or EECN do not belong together.
    INVALID_COMM_INSTANCE = 7, "invalid communication instance";
    /// Nobody listens there.
    INVALID_SERVICE_ID = 8, "invalid service ID";
    /// The service has no such transport.
    INVALID_TRANSPORT_TYPE = 9, "invalid transport service type";
    /// A connection from that queue pair exists already.
    STALE_CONNECTION = 10, "stale connection";
    /// The RDC that REQ says exists does not.
    RDC_NOT_EXIST = 11, "RDC does not exist";
    /// The primary path's remote GID is not the peer's; ARI has one that is.
    INVALID_GID = 12, "primary remote port GID rejected";
    /// The primary path's remote LID is not the peer's; ARI has one that is.
    INVALID_LID = 13, "primary remote port LID rejected";
    /// The primary path's service level; ARI has a good one.
    INVALID_SL = 14, "invalid primary SL";
    /// The primary path's traffic class; ARI has a good one.
    INVALID_TRAFFIC_CLASS = 15, "invalid primary traffic class";
    /// The primary path's hop limit; ARI has a good one.
    INVALID_HOP_LIMIT = 16, "invalid primary hop limit";
    /// The primary path's packet rate; ARI has a good one.
    INVALID_PACKET_RATE = 17, "invalid primary packet rate";
    /// As [`Self::INVALID_GID`], of the alternate path.
    INVALID_ALTERNATE_GID = 18, "alternate remote port GID rejected";
    /// As [`Self::INVALID_LID`], of the alternate path.
    INVALID_ALTERNATE_LID = 19, "alternate remote port LID rejected";
    /// As [`Self::INVALID_SL`], of the alternate path.
    INVALID_ALTERNATE_SL = 20, "invalid alternate SL";
    /// As [`Self::INVALID_TRAFFIC_CLASS`], of the alternate path.
    INVALID_ALTERNATE_TRAFFIC_CLASS = 21, "invalid alternate traffic class";
    /// As [`Self::INVALID_HOP_LIMIT`], of the alternate path.
    INVALID_ALTERNATE_HOP_LIMIT = 22, "invalid alternate hop limit";
    /// As [`Self::INVALID_PACKET_RATE`], of the alternate path.
    INVALID_ALTERNATE_PACKET_RATE = 23, "invalid alternate packet rate";
    /// Ask another connection manager: ARI is its ClassPortInfo.
    CM_REDIRECT = 24, "port and CM redirection";
    /// Ask for another port: ARI is its GID.
    PORT_REDIRECT = 25, "port redirection";
    /// The path MTU is too large; ARI has the largest code that the peer takes.
    INVALID_MTU = 26, "invalid path MTU";
    /// The peer serves fewer READs and atomics at a time.
    INSUFFICIENT_RESPONDER_RESOURCES = 27, "insufficient responder resources";
    /// The program said no; private data may say why.
    CONSUMER = 28, "consumer reject";
    /// The RNR retry count.
    INVALID_RNR_RETRY = 29, "RNR retry count rejected";
    /// The sender's communication ID is in use already.
    DUPLICATE_COMM_ID = 30, "duplicate local communication ID";
    /// The class version; ARI has the peer's.
    INVALID_CLASS_VERSION = 31, "unsupported class version";
    /// The primary path's flow label; ARI has a good one.
    INVALID_FLOW_LABEL = 32, "invalid primary flow label";
    /// As [`Self::INVALID_FLOW_LABEL`], of the alternate path.
    INVALID_ALTERNATE_FLOW_LABEL = 33, "invalid alternate flow label";
    /// The vendor's option that the attribute modifier names.
    VENDOR_OPTION = 35, "vendor option is not supported";
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.name() {
            Some(name) => f.write_str(name),
            None => write!(f, "reason {}", self.0),
        }
    }
}

impl fmt::Debug for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Reason({}, {self})", self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::{super::tests::*, *};
    use crate::wire::{
        ids::Qpn,
        mad::cm::{Dreq, Lap, REJ, Rep, Req, Rtu},
    };
    use hex_literal::hex;
    use proptest::prelude::*;
    use std::{collections::HashSet, format, string::ToString, vec::Vec};

    #[test]
    fn nobody_listens_by_linux() {
        let octets = body(&hex!("00000000 c204b188 00 00 0008"));
        let req = Req { local_comm_id: 0xc204_b188, ..Req::default() };
        let answer = Rej::answer(&req.into(), 0, Reason::INVALID_SERVICE_ID).unwrap();
        let rej = Rej { ari: &octets[12..84], private_data: &octets[84..], ..answer };
        both_ways(REJ, Message::Rej(rej), &octets);
        assert_eq!(Message::Rej(answer).to_body(), octets);
        assert_eq!((rej.message_name(), rej.additional_info()), (Some("REQ"), &[][..]));
        assert_eq!(rej.reason.to_string(), "invalid service ID");
    }

    #[test]
    fn a_program_said_no_by_linux() {
        let mut octets = body(&hex!("496344c8 c104b188 00 00 001c"));
        octets[84..102].copy_from_slice(b"rejected-by-server");
        let rej = Rej {
            local_comm_id: 0x4963_44c8,
            remote_comm_id: 0xc104_b188,
            message: Rej::REQ,
            reason: Reason::CONSUMER,
            ari: &octets[12..84],
            private_data: &octets[84..],
            ..Rej::default()
        };
        both_ways(REJ, Message::Rej(rej), &octets);
        let private_data = b"rejected-by-server";
        assert_eq!(Message::Rej(Rej { private_data, ari: &[], ..rej }).to_body(), octets);
    }

    #[test]
    fn every_field_has_its_place() {
        let mut octets = body(&hex!("01020304 05060708 40 06 001a 030405 00"));
        octets[84] = 0x7e;
        let rej = Rej {
            local_comm_id: 0x0102_0304,
            remote_comm_id: 0x0506_0708,
            message: Rej::REP,
            info_len: 3,
            reason: Reason::INVALID_MTU,
            ari: &octets[12..84],
            private_data: &octets[84..],
        };
        both_ways(REJ, Message::Rej(rej), &octets);
        assert_eq!(rej.additional_info(), [3, 4, 5]);
        // A length that is not possible is cut.
        assert_eq!(Rej { info_len: 127, ..rej }.additional_info().len(), 72);
    }

    #[test]
    fn which_messages_are_rejected() {
        let (local_comm_id, reason) = (7, Reason::TIMEOUT);
        let kind = |message: Message<'_>| {
            Rej::answer(&message, 9, reason).map(|rej| {
                assert_eq!((rej.local_comm_id, rej.remote_comm_id, rej.reason), (9, 7, reason));
                rej.message
            })
        };
        assert_eq!(kind(Req { local_comm_id, ..Req::default() }.into()), Some(0));
        assert_eq!(kind(Rep { local_comm_id, ..Rep::default() }.into()), Some(1));
        assert_eq!(kind(Rtu { local_comm_id, ..Rtu::default() }.into()), Some(2));
        assert_eq!(kind(Lap { local_comm_id, ..Lap::default() }.into()), Some(2));
        let remote_qpn = Qpn(1);
        assert_eq!(kind(Dreq { local_comm_id, remote_qpn, ..Dreq::default() }.into()), Some(2));
        assert_eq!(kind(Rej { local_comm_id, ..Rej::default() }.into()), None);
        for attribute in [super::super::SIDR_REQ, super::super::SIDR_REP, super::super::MRA] {
            assert_eq!(kind(Message::parse(attribute, &body(&[])).unwrap().unwrap()), None);
        }
    }

    #[test]
    fn reasons_have_names() {
        let names: Vec<_> = (0..=u16::MAX).filter_map(|code| Reason(code).name()).collect();
        assert_eq!(names.len(), 34);
        assert_eq!(names.iter().collect::<HashSet<_>>().len(), 34);
        for reserved in [0, 34, 36] {
            assert_eq!(Reason(reserved).name(), None);
        }
        assert_eq!(Reason(28).name(), Some("consumer reject"));
        assert_eq!(Reason(999).to_string(), "reason 999");
        assert_eq!(format!("{:?}", Reason(26)), "Reason(26, invalid path MTU)");
    }

    #[test]
    fn truncated() {
        short_bodies(REJ, &[(0, 0), (9, 9), (11, 10), (83, 12), (84, 84), (231, 84)]);
    }

    proptest! {
        #[test]
        fn round_trip(
            local_comm_id: u32, remote_comm_id: u32, message in 0u8..4, info_len in 0u8..128,
            reason: u16, ari in octets_of(Rej::ARI_LEN), data in octets_of(Rej::PRIVATE_DATA_LEN),
        ) {
            let (reason, ari, private_data) = (Reason(reason), &ari[..], &data[..]);
            comes_back(Message::Rej(Rej {
                local_comm_id, remote_comm_id, message, info_len, reason, ari, private_data,
            }))?;
        }

        #[test]
        fn any_bytes_are_emitted_as_they_were(octets in any_body()) {
            survives(REJ, &octets, &[(8, 0x3f), (9, 0x01)])?;
        }
    }
}
