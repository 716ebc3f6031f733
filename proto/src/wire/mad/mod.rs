//! Management datagrams (IBTA vol. 1, 13.4): 256 octets that carry one attribute of one class.

pub mod cm;
mod header;
mod names;

pub use header::{MAD_LEN, MadHeader};
pub use names::{attribute_name, class_name, method_name};

use zerocopy::FromBytes;

use crate::wire::{
    Error, Layer,
    ids::{QKey, Qpn},
};

/// Subnet management, routed by LID.
pub const CLASS_SM: u8 = 0x01;
/// Subnet administration.
pub const CLASS_SA: u8 = 0x03;
/// Performance management.
pub const CLASS_PERF: u8 = 0x04;
/// Baseboard management.
pub const CLASS_BM: u8 = 0x05;
/// Device management.
pub const CLASS_DEVICE: u8 = 0x06;
/// Communication management.
pub const CLASS_CM: u8 = 0x07;
/// SNMP tunnelled through MADs.
pub const CLASS_SNMP: u8 = 0x08;
/// Congestion control (annex A10).
pub const CLASS_CONGESTION: u8 = 0x21;
/// Subnet management along a route that the datagram names.
pub const CLASS_SM_DIRECTED: u8 = 0x81;

/// Method Get.
pub const METHOD_GET: u8 = 0x01;
/// Method Set.
pub const METHOD_SET: u8 = 0x02;
/// Method Send: the one of every communication management message.
pub const METHOD_SEND: u8 = 0x03;
/// Method GetResp: the response to Get and Set.
pub const METHOD_GET_RESP: u8 = 0x81;

/// The queue pair that general management datagrams go to and come from; SMPs use 0.
pub const GSI_QPN: Qpn = Qpn(1);
/// The queue key of [`GSI_QPN`] (IBTA vol. 1, 3.5.3).
pub const GSI_QKEY: QKey = QKey(0x8001_0000);

/// A management datagram: a view.
#[derive(Debug, Clone, Copy)]
pub struct Mad<'a> {
    /// The header of 24 octets.
    pub header: &'a MadHeader,
    /// What follows it: 232 octets in a whole MAD.
    pub body: &'a [u8],
}

impl<'a> Mad<'a> {
    /// Splits a MAD. Versions, class and length of the body are not judged.
    ///
    /// # Errors
    ///
    /// Truncated, if the header is not whole.
    pub fn parse(octets: &'a [u8]) -> Result<Self, Error> {
        MadHeader::ref_from_prefix(octets)
            .map(|(header, body)| Self { header, body })
            .map_err(|_| Error::truncated(Layer::Mad, 0, MadHeader::LEN, octets.len()))
    }

    /// The connection manager's message in it; `None` for another class, or an attribute that
    /// names none.
    ///
    /// # Errors
    ///
    /// Truncated, of layer CM, if the body is not whole; the offset counts from the start of the
    /// MAD.
    pub fn cm(&self) -> Result<Option<cm::Message<'a>>, Error> {
        if self.header.mgmt_class != CLASS_CM {
            return Ok(None);
        }
        cm::Message::parse(self.header.attribute_id(), self.body)
            .map_err(|e| Error { offset: e.offset + MadHeader::LEN, ..e })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use hex_literal::hex;
    use proptest::prelude::*;
    use std::vec::Vec;
    use zerocopy::IntoBytes;

    /// A DREQ of Linux, cut behind its fields.
    const DREQ: [u8; 36] = hex!(
        "01070203 00000000 0000000c88b104c8 0015 0000 00000000"
        "c804b188 5b6344c8 000029 00"
    );

    #[test]
    fn a_message_in_its_mad() {
        let mut octets = DREQ.to_vec();
        octets.resize(MAD_LEN, 0);
        let mad = Mad::parse(&octets).unwrap();
        assert_eq!((mad.header.attribute_id(), mad.body.len()), (0x15, 232));
        let message = mad.cm().unwrap().unwrap();
        let cm::Message::Dreq(dreq) = message else { panic!("{message:?}") };
        assert_eq!((dreq.local_comm_id, dreq.remote_comm_id), (0xc804_b188, 0x5b63_44c8));
        assert_eq!(dreq.remote_qpn, Qpn(0x29));
        let mut out = [0xee; MAD_LEN];
        message.emit_mad(0x0c_88b1_04c8, METHOD_SEND, &mut out);
        assert_eq!(out[..], octets);
    }

    #[test]
    fn a_short_mad_says_how_short() {
        let error = Mad::parse(&DREQ[..23]).unwrap_err();
        assert_eq!(error, Error::truncated(Layer::Mad, 0, 24, 23));
        // 12 octets of the body are there: its private data, 220 octets, is not.
        let error = Mad::parse(&DREQ).unwrap().cm().unwrap_err();
        assert_eq!(error, Error::truncated(Layer::Cm, 36, 220, 0));
    }

    #[test]
    fn other_classes_and_attributes_are_no_message() {
        let mut octets = DREQ;
        octets[1] = CLASS_SA;
        assert_eq!(Mad::parse(&octets).unwrap().cm(), Ok(None));
        octets[1] = CLASS_CM;
        octets[17] = 0x01;
        assert_eq!(Mad::parse(&octets).unwrap().cm(), Ok(None));
    }

    proptest! {
        #[test]
        fn any_bytes_do_not_panic(octets in prop::collection::vec(any::<u8>(), 0..300)) {
            if let Ok(mad) = Mad::parse(&octets) {
                let _ = mad.cm();
                prop_assert_eq!([mad.header.as_bytes(), mad.body].concat(), octets);
            } else {
                prop_assert!(octets.len() < MadHeader::LEN);
            }
        }

        #[test]
        fn any_cm_mad_is_a_message_or_short(
            attribute in 0x0fu8..0x1c, rest in prop::collection::vec(any::<u8>(), 200..240),
        ) {
            let mut octets: Vec<u8> = DREQ[..24].to_vec();
            octets[17] = attribute;
            octets.extend(&rest);
            let found = Mad::parse(&octets).unwrap().cm();
            if !(0x10..=0x1a).contains(&attribute) {
                prop_assert_eq!(found, Ok(None));
            } else if rest.len() < cm::BODY_LEN {
                prop_assert_eq!(found.unwrap_err().layer, Layer::Cm);
            } else {
                prop_assert_eq!(found.unwrap().unwrap().attribute(), u16::from(attribute));
            }
        }
    }
}
