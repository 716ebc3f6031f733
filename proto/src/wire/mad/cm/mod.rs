//! Communication management (IBTA vol. 1, 12.6 to 12.11): connections are asked for, made and
//! ended by the messages here, each the body of a MAD of class 7 in version 2.
//!
//! ```text
//!   active               passive
//!     | ------- REQ ------> |     REJ instead of REP or RTU: no.
//!     | <------ REP ------- |     MRA in front of REP or RTU: wait.
//!     | ------- RTU ------> |
//!     |         data        |     LAP, APR: another alternate path.
//!     | ------- DREQ -----> |
//!     | <------ DREP ------ |     SIDR_REQ, SIDR_REP: which queue pair serves datagrams.
//! ```
//!
//! Fields that have fewer bits than their type are cut to their width when they are emitted, and
//! so is private data that is too long; private data that is too short is filled up with zeros.
//! So a message is written as `Rtu { local_comm_id, remote_comm_id, ..Rtu::default() }`.

mod alternate;
mod codec;
mod disconnect;
mod ip;
mod mra;
mod path;
mod rej;
mod rep;
mod req;
mod rtu;
mod sidr;

pub use alternate::{Apr, Lap};
pub use disconnect::{Drep, Dreq};
pub use ip::{IpCm, PortSpace};
pub use mra::Mra;
pub use path::Path;
pub use rej::{Reason, Rej};
pub use rep::Rep;
pub use req::Req;
pub use rtu::Rtu;
pub use sidr::{SidrRep, SidrReq};

use core::time::Duration;

use zerocopy::IntoBytes;

use super::{MAD_LEN, MadHeader};
use crate::wire::{Error, Layer};

/// REQ's attribute.
pub const REQ: u16 = 0x10;
/// MRA's attribute.
pub const MRA: u16 = 0x11;
/// REJ's attribute.
pub const REJ: u16 = 0x12;
/// REP's attribute.
pub const REP: u16 = 0x13;
/// RTU's attribute.
pub const RTU: u16 = 0x14;
/// DREQ's attribute.
pub const DREQ: u16 = 0x15;
/// DREP's attribute.
pub const DREP: u16 = 0x16;
/// SIDR_REQ's attribute.
pub const SIDR_REQ: u16 = 0x17;
/// SIDR_REP's attribute.
pub const SIDR_REP: u16 = 0x18;
/// LAP's attribute.
pub const LAP: u16 = 0x19;
/// APR's attribute.
pub const APR: u16 = 0x1a;
/// SAP's attribute, suggest alternate path: named, not decoded.
pub const SAP: u16 = 0x1b;
/// SPR's attribute, the response to a SAP: named, not decoded.
pub const SPR: u16 = 0x1c;

/// Octets of every message.
pub const BODY_LEN: usize = 232;
/// Version of the management class that these messages are of.
pub const CLASS_VERSION: u8 = 2;

/// The time that a code stands for, such as `remote_cm_timeout` and `ack_timeout`: 4.096 µs × 2^n
/// for the low 5 bits of the code. 0 as an ACK timeout means that there is none.
pub const fn timeout(code: u8) -> Duration {
    Duration::from_nanos(4096 << (code & 0x1f))
}

/// Octets of the path MTU that a REQ's code stands for: 256 to 4096 for 1 to 5. `None` for codes
/// that are reserved.
pub const fn mtu(code: u8) -> Option<u16> {
    match code {
        1..=5 => Some(128 << code),
        _ => None,
    }
}

/// A communication management message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Message<'a> {
    /// Request for a connection.
    Req(Req<'a>),
    /// Message receipt acknowledgement.
    Mra(Mra<'a>),
    /// Rejection.
    Rej(Rej<'a>),
    /// Reply to a REQ.
    Rep(Rep<'a>),
    /// Ready to use.
    Rtu(Rtu<'a>),
    /// Request to disconnect.
    Dreq(Dreq<'a>),
    /// Reply to a DREQ.
    Drep(Drep<'a>),
    /// Request for a UD service.
    SidrReq(SidrReq<'a>),
    /// Reply to a SIDR_REQ.
    SidrRep(SidrRep<'a>),
    /// Load alternate path.
    Lap(Lap<'a>),
    /// Reply to a LAP.
    Apr(Apr<'a>),
}

impl<'a> Message<'a> {
    /// Reads the body of a MAD with this attribute; `None` where the attribute names no message.
    /// Octets behind the 232 of a message are ignored.
    ///
    /// # Errors
    ///
    /// Truncated, of layer CM, if `body` is shorter than 232 octets: the offset is that of the
    /// first field that is not whole, `need` what the message still lacks from there on.
    pub fn parse(attribute: u16, body: &'a [u8]) -> Result<Option<Self>, Error> {
        let read = match attribute {
            REQ => Req::read(body).map(|(_, req)| Self::Req(req)),
            MRA => Mra::read(body).map(|(_, mra)| Self::Mra(mra)),
            REJ => Rej::read(body).map(|(_, rej)| Self::Rej(rej)),
            REP => Rep::read(body).map(|(_, rep)| Self::Rep(rep)),
            RTU => Rtu::read(body).map(|(_, rtu)| Self::Rtu(rtu)),
            DREQ => Dreq::read(body).map(|(_, dreq)| Self::Dreq(dreq)),
            DREP => Drep::read(body).map(|(_, drep)| Self::Drep(drep)),
            SIDR_REQ => SidrReq::read(body).map(|(_, req)| Self::SidrReq(req)),
            SIDR_REP => SidrRep::read(body).map(|(_, rep)| Self::SidrRep(rep)),
            LAP => Lap::read(body).map(|(_, lap)| Self::Lap(lap)),
            APR => Apr::read(body).map(|(_, apr)| Self::Apr(apr)),
            _ => return Ok(None),
        };
        read.map(Some).map_err(|e| {
            let have = match e {
                nom::Err::Error(e) | nom::Err::Failure(e) => e.input.len(),
                nom::Err::Incomplete(_) => 0,
            };
            let offset = body.len() - have;
            Error::truncated(Layer::Cm, offset, BODY_LEN - offset, have)
        })
    }

    /// The attribute that names this message: [`REQ`] and following.
    pub const fn attribute(&self) -> u16 {
        match self {
            Self::Req(_) => REQ,
            Self::Mra(_) => MRA,
            Self::Rej(_) => REJ,
            Self::Rep(_) => REP,
            Self::Rtu(_) => RTU,
            Self::Dreq(_) => DREQ,
            Self::Drep(_) => DREP,
            Self::SidrReq(_) => SIDR_REQ,
            Self::SidrRep(_) => SIDR_REP,
            Self::Lap(_) => LAP,
            Self::Apr(_) => APR,
        }
    }

    /// The 232 octets. Private data that is too short is filled up with zeros; what is too long or
    /// too wide for its field is cut. Reserved bits are zero.
    pub fn to_body(&self) -> [u8; BODY_LEN] {
        let mut out = codec::Body::new();
        match self {
            Self::Req(req) => req.write(&mut out),
            Self::Mra(mra) => mra.write(&mut out),
            Self::Rej(rej) => rej.write(&mut out),
            Self::Rep(rep) => rep.write(&mut out),
            Self::Rtu(rtu) => rtu.write(&mut out),
            Self::Dreq(dreq) => dreq.write(&mut out),
            Self::Drep(drep) => drep.write(&mut out),
            Self::SidrReq(req) => req.write(&mut out),
            Self::SidrRep(rep) => rep.write(&mut out),
            Self::Lap(lap) => lap.write(&mut out),
            Self::Apr(apr) => apr.write(&mut out),
        }
        out.finish()
    }

    /// Writes the whole MAD of 256 octets: header of class 7 in version 2, then the body. `method`
    /// is [`METHOD_SEND`](super::METHOD_SEND) for all of them.
    pub fn emit_mad(&self, tid: u64, method: u8, out: &mut [u8; MAD_LEN]) {
        let (header, body) = out.split_at_mut(MadHeader::LEN);
        header.copy_from_slice(MadHeader::cm(method, tid, self.attribute()).as_bytes());
        body.copy_from_slice(&self.to_body());
    }

    /// The program's private data and what rdma_cm puts in front of it: as long as the field, of
    /// a message that was parsed.
    pub const fn private_data(&self) -> &'a [u8] {
        match self {
            Self::Req(req) => req.private_data,
            Self::Mra(mra) => mra.private_data,
            Self::Rej(rej) => rej.private_data,
            Self::Rep(rep) => rep.private_data,
            Self::Rtu(rtu) => rtu.private_data,
            Self::Dreq(dreq) => dreq.private_data,
            Self::Drep(drep) => drep.private_data,
            Self::SidrReq(req) => req.private_data,
            Self::SidrRep(rep) => rep.private_data,
            Self::Lap(lap) => lap.private_data,
            Self::Apr(apr) => apr.private_data,
        }
    }

    /// How many octets of private data the message has room for.
    pub const fn private_data_len(&self) -> usize {
        match self {
            Self::Req(_) => Req::PRIVATE_DATA_LEN,
            Self::Mra(_) => Mra::PRIVATE_DATA_LEN,
            Self::Rej(_) => Rej::PRIVATE_DATA_LEN,
            Self::Rep(_) => Rep::PRIVATE_DATA_LEN,
            Self::Rtu(_) => Rtu::PRIVATE_DATA_LEN,
            Self::Dreq(_) => Dreq::PRIVATE_DATA_LEN,
            Self::Drep(_) => Drep::PRIVATE_DATA_LEN,
            Self::SidrReq(_) => SidrReq::PRIVATE_DATA_LEN,
            Self::SidrRep(_) => SidrRep::PRIVATE_DATA_LEN,
            Self::Lap(_) => Lap::PRIVATE_DATA_LEN,
            Self::Apr(_) => Apr::PRIVATE_DATA_LEN,
        }
    }

    /// The sender's name for the connection, or for the request if this is a SIDR_REQ; `None` for
    /// SIDR_REP, whose sender has none. A REJ whose sender has none says 0.
    pub const fn local_comm_id(&self) -> Option<u32> {
        match self {
            Self::Req(req) => Some(req.local_comm_id),
            Self::Mra(mra) => Some(mra.local_comm_id),
            Self::Rej(rej) => Some(rej.local_comm_id),
            Self::Rep(rep) => Some(rep.local_comm_id),
            Self::Rtu(rtu) => Some(rtu.local_comm_id),
            Self::Dreq(dreq) => Some(dreq.local_comm_id),
            Self::Drep(drep) => Some(drep.local_comm_id),
            Self::SidrReq(req) => Some(req.request_id),
            Self::SidrRep(_) => None,
            Self::Lap(lap) => Some(lap.local_comm_id),
            Self::Apr(apr) => Some(apr.local_comm_id),
        }
    }

    /// The receiver's name for the connection, or for the request if this is a SIDR_REP; `None`
    /// for REQ and SIDR_REQ, whose sender does not know one yet.
    pub const fn remote_comm_id(&self) -> Option<u32> {
        match self {
            Self::Req(_) | Self::SidrReq(_) => None,
            Self::Mra(mra) => Some(mra.remote_comm_id),
            Self::Rej(rej) => Some(rej.remote_comm_id),
            Self::Rep(rep) => Some(rep.remote_comm_id),
            Self::Rtu(rtu) => Some(rtu.remote_comm_id),
            Self::Dreq(dreq) => Some(dreq.remote_comm_id),
            Self::Drep(drep) => Some(drep.remote_comm_id),
            Self::SidrRep(rep) => Some(rep.request_id),
            Self::Lap(lap) => Some(lap.remote_comm_id),
            Self::Apr(apr) => Some(apr.remote_comm_id),
        }
    }

    /// rdma_cm's header and the program's private data behind it; `None` unless this is a REQ or a
    /// SIDR_REQ for a service ID of rdma_cm, with such a header.
    pub fn ip_cm(&self) -> Option<(IpCm, &'a [u8])> {
        let (service_id, private_data) = match self {
            Self::Req(req) => (req.service_id, req.private_data),
            Self::SidrReq(req) => (req.service_id, req.private_data),
            _ => return None,
        };
        PortSpace::of_service_id(service_id)?;
        IpCm::parse(private_data)
    }
}

macro_rules! from_messages {
    ($($name:ident)*) => {
        $(impl<'a> From<$name<'a>> for Message<'a> {
            fn from(message: $name<'a>) -> Self {
                Self::$name(message)
            }
        })*
    };
}

from_messages! { Req Mra Rej Rep Rtu Dreq Drep SidrReq SidrRep Lap Apr }

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wire::mad::{Mad, attribute_name};
    use proptest::{collection::vec, prelude::*};
    use std::vec::Vec;

    /// `head`, and zeros up to the end of the message.
    pub(super) fn body(head: &[u8]) -> [u8; BODY_LEN] {
        let mut octets = [0; BODY_LEN];
        octets[..head.len()].copy_from_slice(head);
        octets
    }

    /// These octets say this message, and this message is written as these octets.
    #[track_caller]
    pub(super) fn both_ways(attribute: u16, message: Message<'_>, octets: &[u8; BODY_LEN]) {
        assert_eq!(Message::parse(attribute, octets), Ok(Some(message)));
        assert_eq!(message.attribute(), attribute);
        assert_eq!(message.to_body(), *octets);
    }

    /// Each number of octets lacks something at this offset; and with any too few the error says
    /// what is true.
    #[track_caller]
    pub(super) fn short_bodies(attribute: u16, cases: &[(usize, usize)]) {
        let whole = [0x5a; BODY_LEN];
        for &(len, offset) in cases {
            let error = Message::parse(attribute, &whole[..len]).unwrap_err();
            let want = Error::truncated(Layer::Cm, offset, BODY_LEN - offset, len - offset);
            assert_eq!(error, want, "{len} octets");
        }
        let offsets: Vec<_> = (0..BODY_LEN)
            .map(|len| Message::parse(attribute, &whole[..len]).unwrap_err().offset)
            .collect();
        assert!(offsets.is_sorted() && offsets.iter().zip(0..).all(|(&at, len)| at <= len));
        let longer = [whole, whole].concat();
        assert_eq!(Message::parse(attribute, &longer), Message::parse(attribute, &whole));
    }

    /// What is written is read as what it was.
    pub(super) fn comes_back(message: Message<'_>) -> Result<(), TestCaseError> {
        let octets = message.to_body();
        prop_assert_eq!(Message::parse(message.attribute(), &octets), Ok(Some(message)));
        Ok(())
    }

    /// What is read is written as it was, but for reserved bits, which are zero.
    pub(super) fn survives(
        attribute: u16,
        octets: &[u8],
        reserved: &[(usize, u8)],
    ) -> Result<(), TestCaseError> {
        let message = Message::parse(attribute, octets).unwrap().unwrap();
        let mut want = octets.to_vec();
        reserved.iter().for_each(|&(at, bits)| want[at] &= !bits);
        prop_assert_eq!(&message.to_body()[..], &want);
        prop_assert_eq!(message.private_data().len(), message.private_data_len());
        prop_assert!(octets.ends_with(message.private_data()));
        Ok(())
    }

    pub(super) fn octets_of(len: usize) -> impl Strategy<Value = Vec<u8>> {
        vec(any::<u8>(), len)
    }

    pub(super) fn any_body() -> impl Strategy<Value = Vec<u8>> {
        octets_of(BODY_LEN)
    }

    #[test]
    fn lengths_of_private_data() {
        // The sizes that Linux' ib_cm.h gives to programs.
        for (attribute, len) in [
            (REQ, 92),
            (MRA, 222),
            (REJ, 148),
            (REP, 196),
            (RTU, 224),
            (DREQ, 220),
            (DREP, 224),
            (LAP, 168),
            (APR, 148),
            (SIDR_REQ, 216),
            (SIDR_REP, 136),
        ] {
            let message = Message::parse(attribute, &[0; BODY_LEN]).unwrap().unwrap();
            assert_eq!(message.private_data_len(), len);
            assert_eq!(message.private_data().len(), len);
        }
    }

    #[test]
    fn private_data_is_filled_up_or_cut() {
        let long = [7; 300];
        for len in [0, 1, 223, 224, 225, 300] {
            let octets =
                Message::from(Rtu { private_data: &long[..len], ..Rtu::default() }).to_body();
            let filled = len.min(Rtu::PRIVATE_DATA_LEN);
            assert_eq!(octets[8..][..filled], long[..filled]);
            assert!(octets[8 + filled..].iter().all(|&octet| octet == 0));
        }
    }

    #[test]
    fn whose_ids_are_whose() {
        let ids = |attribute| {
            let octets = body(&[0, 0, 0, 1, 0, 0, 0, 2]);
            let message = Message::parse(attribute, &octets).unwrap().unwrap();
            (message.local_comm_id(), message.remote_comm_id())
        };
        assert_eq!(ids(REQ), (Some(1), None));
        assert_eq!(ids(SIDR_REQ), (Some(1), None));
        assert_eq!(ids(SIDR_REP), (None, Some(1)));
        for attribute in [MRA, REJ, REP, RTU, DREQ, DREP, LAP, APR] {
            assert_eq!(ids(attribute), (Some(1), Some(2)), "{attribute:#x}");
        }
    }

    #[test]
    fn rdma_cm_is_seen_by_service_id_and_header() {
        let [src, dst] = ["10.0.0.1", "10.0.0.2"].map(|ip| ip.parse().unwrap());
        let ip = IpCm::new(src, 1234, dst).unwrap();
        let private_data = [&ip.to_bytes()[..], b"hello"].concat();
        let private_data = &private_data[..];
        let service_id = PortSpace::TCP.service_id(7174);
        let req = Req { service_id, private_data, ..Req::default() };
        assert_eq!(Message::from(req).ip_cm(), Some((ip, &b"hello"[..])));
        let sidr = SidrReq { service_id, private_data, ..SidrReq::default() };
        assert_eq!(Message::from(sidr).ip_cm(), Some((ip, &b"hello"[..])));
        assert_eq!(Message::from(Req { service_id: 7174, ..req }).ip_cm(), None);
        assert_eq!(Message::from(Req { private_data: b"hello", ..req }).ip_cm(), None);
        assert_eq!(Message::from(Rep { private_data, ..Rep::default() }).ip_cm(), None);
    }

    #[test]
    fn codes() {
        assert_eq!(timeout(0), Duration::from_nanos(4096));
        assert_eq!(timeout(20).as_millis(), 4294);
        assert_eq!(timeout(31), Duration::from_nanos(8_796_093_022_208));
        assert_eq!(timeout(0xff), timeout(31));
        let mtus = [1, 2, 3, 4, 5].map(mtu);
        assert_eq!(mtus, [256, 512, 1024, 2048, 4096].map(Some));
        assert_eq!((mtu(0), mtu(6), mtu(255)), (None, None, None));
    }

    #[test]
    fn other_attributes_name_no_message() {
        for attribute in (0..=u16::MAX).filter(|attribute| !(REQ..=APR).contains(attribute)) {
            assert_eq!(Message::parse(attribute, &[]), Ok(None));
        }
        for attribute in REQ..=APR {
            assert!(Message::parse(attribute, &[]).is_err());
            assert!(attribute_name(7, attribute).is_some());
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_message_if_there_are_enough(
            attribute in REQ..=APR, octets in vec(any::<u8>(), 0..300),
        ) {
            match Message::parse(attribute, &octets) {
                Ok(message) => {
                    let message = message.unwrap();
                    prop_assert!(octets.len() >= BODY_LEN);
                    comes_back(message)?;
                    let _ = message.ip_cm();
                }
                Err(e) => {
                    prop_assert!(octets.len() < BODY_LEN);
                    let want = Error::truncated(
                        Layer::Cm, e.offset, BODY_LEN - e.offset, octets.len() - e.offset,
                    );
                    prop_assert_eq!(e, want);
                }
            }
        }

        #[test]
        fn a_whole_mad_comes_back(attribute in REQ..=APR, tid: u64, octets in any_body()) {
            let message = Message::parse(attribute, &octets).unwrap().unwrap();
            let mut out = [0xee; MAD_LEN];
            message.emit_mad(tid, crate::wire::mad::METHOD_SEND, &mut out);
            let mad = Mad::parse(&out).unwrap();
            prop_assert_eq!((mad.header.tid(), mad.header.attribute_id()), (tid, attribute));
            prop_assert_eq!((mad.header.mgmt_class, mad.header.class_version), (7, 2));
            prop_assert_eq!(mad.cm(), Ok(Some(message)));
        }
    }
}
